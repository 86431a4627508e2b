"""Lists of methods, networks, data sets, partitions, presets and settings, and shell completion
from them.

Reading them from the pages takes as long as importing PyTorch. So a wheel has them in `INDEX`,
which `write_index` writes before it is built, with the digest of all source files. Where a source
file was added or changed since, or there is no such file, they are read from the pages and cached
on disk under the new digest.
"""

import contextlib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fedloom.core.errors import ConfigError
from fedloom.support.extensions import presets
from fedloom.support.paths import cache_folder

Row = dict[str, Any]
LISTS = ("methods", "models", "datasets", "partitions", "experiments", "reproductions")
NAMED = {
    **{"method": "methods", "data.name": "datasets", "data.partition": "partitions"},
    **{"models.pool": "models", "models.each": "models", "pretrained.model": "models"},
}
"""The settings whose value is a name in one of `LISTS`, or a list of such names."""
ROOT = Path(str(files("fedloom")))
"""The folder of the package."""
INDEX = ROOT / "cli/listing.json"
"""The lists of a wheel; a checkout has no such file."""
NO_PAPERS = (
    "the papers' tables and figures are a package of their own: in a clone, pip install -e . -e "
    "papers"
)
KEPT = 8
"""Maximum number of earlier versions in the cache."""


def listing() -> dict[str, Any]:
    """The rows of each of `LISTS` but reproductions, `settings` of a run, and of each method
    `params` and its `pages`.

    A setting comes with the words that its type lists. A page is its file below `ROOT` and the name
    of the first method in it.
    """
    digest = _digest()
    entry = cache_folder("lists") / f"{digest}.json"
    for file in (INDEX, entry):
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if found.get("digest") == digest:
                return found
    text = json.dumps({"digest": digest, **_build()})
    with contextlib.suppress(OSError):  # a read-only cache folder
        entry.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(entry.parent.glob("*.json"), key=os.path.getmtime)[:-KEPT]:
            old.unlink(missing_ok=True)
        draft = entry.with_suffix(f".{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(entry)
    made: dict[str, Any] = json.loads(text)  # as it is read later: with lists in place of tuples
    return made


def rows_of(kind: str) -> list[Row]:
    """The rows of one of `LISTS`.

    Raises:
        ConfigError: reproductions are asked for, and their package is not installed.
    """
    if kind != "reproductions":
        found: list[Row] = listing()[kind]
        return found
    every = {name: tomllib.loads(text) for name, text in presets().items()}
    if not every:
        raise ConfigError(NO_PAPERS)
    return [
        {"name": name, "place": one["place"], "title": one["title"]}
        for name, one in every.items()
        if "rows" in one
    ]


def write_index() -> None:
    """Write `INDEX`, for a wheel."""
    INDEX.write_text(json.dumps({"digest": _digest(), **_build()}), encoding="utf-8")


def _digest() -> str:
    """The SHA-256 of all source files and their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in ROOT.rglob("*") if path.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _build() -> dict[str, Any]:
    from fedloom import methods
    from fedloom.data.partitions import PARTITIONS
    from fedloom.data.sources import SOURCES
    from fedloom.experiment.config.run import RunConfig
    from fedloom.experiment.plan.reading import experiments
    from fedloom.models import BLACK_BOXES, MODELS

    boxes = {
        "inputs": ["table", "image"],
        "norm": "",
        "source": "scikit-learn; docs/black-boxes.md",
    }
    registry = methods.registry()
    return {
        "methods": [
            {
                "name": m.name,
                "what": m.title,
                "family": m.family,
                "presets": ["recommended", *m.presets],
                "public_set": "public rows" in m.needs,
                "paper": m.paper,
            }
            for m in registry.values()
        ],
        "models": [
            *(
                {"name": k, "what": m.title, "inputs": m.inputs, "norm": m.norm, "source": m.source}
                for k, m in MODELS.items()
            ),
            *(
                {"name": name, "what": f"black box: {box.title}", **boxes}
                for name, box in BLACK_BOXES.items()
            ),
        ],
        "datasets": [
            {"name": name, "what": s.title, "bundled": s.bundled, "hub": s.hub, "extra": s.extra}
            for name, s in SOURCES.items()
        ],
        "partitions": [
            {"name": name, "what": p.title, "options": [f"{o.name}={o.default}" for o in p.options]}
            for name, p in PARTITIONS.items()
        ],
        "experiments": [
            {"name": k, "what": tomllib.loads(text).get("title", "")}
            for k, text in experiments().items()
        ],
        "settings": dict(sorted(_settings(RunConfig))),
        "params": {name: params(method) for name, method in registry.items()},
        "pages": {
            method.name: [
                Path(str(page.__file__)).relative_to(ROOT).as_posix(),
                methods.methods_of(page)[0].name,
            ]
            for page in methods.pages()
            for method in methods.methods_of(page)
        },
    }


def params(method: Any) -> list[Row]:
    """The settings of a method: name, default, and meaning."""
    values, fields = method.configure().model_dump(mode="json"), method.config.model_fields
    return [
        {"name": f"params.{key}", "default": json.dumps(value), "what": fields[key].description}
        for key, value in values.items()
    ]


def _settings(section: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """The dotted name of each setting in a section of a config, and the words that its
    type lists.
    """
    for name, field in section.model_fields.items():
        kind = field.annotation
        if hasattr(kind, "model_fields"):
            yield from _settings(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, [word for word in get_args(kind) if get_origin(kind) is Literal]


def completing(*kinds: str) -> Callable[[str], list[tuple[str, str]]]:
    """A shell completion of the names in some of `LISTS`, each with its description."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        rows = [row for kind in kinds for row in rows_of(kind)]
        named = [(row["name"], row.get("what") or row.get("title", "")) for row in rows]
        return [(name, what) for name, what in named if name.startswith(incomplete)]

    return complete


def complete_list(incomplete: str) -> list[tuple[str, str]]:
    """Names of lists, and methods."""
    return [(name, "") for name in LISTS if name.startswith(incomplete)] + completing("methods")(
        incomplete
    )


def complete_engine(incomplete: str) -> list[tuple[str, str]]:
    """Names of engines."""
    return [
        (name, "") for name in listing()["settings"]["engine.name"] if name.startswith(incomplete)
    ]


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """Settings of a run, those of its method, and the names that a setting can have; in a list of
    names, the last.
    """
    known, (key, equals, value) = listing(), incomplete.partition("=")
    if equals:
        start = re.split(r'[\[", ]', value)[-1]
        found = [(word, "") for word in known["settings"].get(key, ()) if word.startswith(start)]
        found += completing(NAMED[key])(start) if key in NAMED else []
        return [(incomplete.removesuffix(start) + word, what) for word, what in found]
    # of bash, or of other shells
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    own = [
        (row["name"], row["what"]) for name in line.split() for row in known["params"].get(name, ())
    ]
    every = [*own, *((name, "") for name in known["settings"])]
    return [(f"{name}=", what) for name, what in dict(every).items() if name.startswith(incomplete)]
