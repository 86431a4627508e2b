"""The key of a run in the archive. It outlives new names of settings: `ARCHIVED` has
the old ones.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.run_digest import digest, user_files

ARCHIVED = {
    "aggregate.f": "params.robust_f",
    "aggregate.rule": "params.robust",
    "aggregate.secure": "params.secure",
}
"""The names of settings in the keys of archived runs, by their names today. Whoever renames a
setting adds it here.
"""


def archive_key(run: RunConfig) -> str:
    """16 hex digits that identify the given settings and the user's own files. Unlike `digest` it
    does not depend on defaults or on the names of settings, so that it is the same in later
    versions of fedloom.

    Raises:
        ConfigError: see `RunConfig.resolve`.
    """
    given = run.model_dump(mode="json", exclude_unset=True, exclude={"name": True, "title": True})
    settings = archived_names(given)
    engine = {
        key: value
        for key, value in settings.pop("engine", {}).items()
        if key not in ("device", "workers")
    }
    page = [digest(run)] if run.method_is_file else []
    text = json.dumps([settings, engine, *user_files(run), *page], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def archived_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their names in the archive."""
    found = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()
    }
    for new, old in ARCHIVED.items():
        section, _, name = new.partition(".")
        if name in found.get(section, {}):
            there, _, called = old.partition(".")
            found.setdefault(there, {})[called] = found[section].pop(name)
            if not found[section]:
                del found[section]
    return found
