"""The data sets of runs: which are not here yet, and fetching each once before many processes read
it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.core.errors import DataError
from fedloom.data.sources import ROOT_VARIABLE, SOURCES, load
from fedloom.experiment.config.run import RunConfig


def absent(runs: Mapping[str, RunConfig]) -> list[tuple[str, str | None]]:
    """Data sets, each with its root, that no local folder holds and that come from the hub or its
    cache.
    """

    def is_local(name: str, root: str | None) -> bool:
        hub, folder = SOURCES[name].hub, root or os.environ.get(ROOT_VARIABLE)
        return hub is None or bool(folder and (Path(folder).expanduser() / hub).is_dir())

    sets = {
        (run.data.name, run.data.root): None
        for run in runs.values()
        if not (run.data.own or run.columns.private or run.columns.manifest or run.columns.files)
    }
    return [(name, root) for name, root in sets if name in SOURCES and not is_local(name, root)]


def fetch(sets: Sequence[tuple[str, str | None]]) -> None:
    """Fetch data sets once, before many processes read them.

    Raises:
        DataError: a data set is not available; the message says how to get it.
    """
    wrong: dict[str, str] = {}
    for name, root in sets:
        try:
            load(name, root=None if root is None else Path(root))
        except DataError as error:
            wrong[name] = str(error)
    if wrong:
        places = ", ".join(f"$FEDLOOM_DATA/{SOURCES[name].hub}" for name in wrong)
        raise DataError(
            "\n".join(f"{name}: {reason}" for name, reason in wrong.items())
            + f"\nmissing data: {', '.join(wrong)}. Install the extra (pip install -e "
            f"'.[hub]') and run once with network access, or put the files into {places}."
        )
