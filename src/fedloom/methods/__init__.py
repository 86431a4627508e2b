"""The methods: one file per paper, grouped by who talks to whom.

A page imports the core and nothing else of fedloom: no engine, no experiment. It ends with `METHODS`, the points
of the page that have a name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from fedloom.core.errors import MethodError, did_you_mean
from fedloom.core.method import Method

PAGES = (
    "fedloom.methods.distillation.fedal",
    "fedloom.methods.distillation.cfd",
    "fedloom.methods.distillation.fd",
    "fedloom.methods.distillation.fedproto_public",
    "fedloom.methods.distillation.fccl",
    "fedloom.methods.distillation.fccl_plus",
    "fedloom.methods.distillation.feddf",
    "fedloom.methods.distillation.feddf_al",
    "fedloom.methods.averaging.fedavg",
    "fedloom.methods.peer.afind",
    "fedloom.methods.peer.gossip",
    "fedloom.methods.peer.pens",
    "fedloom.methods.peer.federico",
    "fedloom.methods.peer.ditto",
    "fedloom.methods.peer.fedfomo",
    "fedloom.methods.peer.dispfl",
    "fedloom.methods.meta.augfl",
    "fedloom.methods.meta.perfedavg",
    "fedloom.methods.meta.fedproto",
    "fedloom.methods.meta.fedcp",
    "fedloom.methods.meta.fedpcl",
    "fedloom.methods.vertical.proto_evfl",
    "fedloom.methods.vertical.proto_student",
    "fedloom.methods.vertical.split",
    "fedloom.methods.vertical.ss_vfl",
    "fedloom.methods.vertical.fedhssl",
)


@cache
def registry() -> MappingProxyType[str, Method]:
    """Every method by name, in the order of the pages."""
    return MappingProxyType({m.name: m for page in PAGES for m in methods_of(importlib.import_module(page))})


def find(name: str) -> Method:
    """The method of that name.

    Raises:
        MethodError: there is none; the text has a suggestion.
    """
    known = registry()
    if name not in known:
        raise MethodError(f"there is no method {name!r}.{did_you_mean(name, known)}")
    return known[name]


def load(file: Path | str) -> Method:
    """The method of a user's own page: the first of `FILE.py`, or `FILE.py:NAME`.

    Raises:
        MethodError: the file is missing, does not import, or holds no method of that name.
    """
    path, _, name = str(file).partition(".py:")
    source = Path(path if path.endswith(".py") else f"{path}.py")
    if not source.is_file():
        raise MethodError(f"there is no file {source}")
    spec = importlib.util.spec_from_file_location(f"fedloom_page_{source.stem}", source)
    if spec is None or spec.loader is None:
        raise MethodError(f"{source} can't be imported as a Python file")
    page = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = page  # where pydantic looks for the names in a config's annotations
    try:
        spec.loader.exec_module(page)
    except Exception as error:
        del sys.modules[spec.name]
        raise MethodError(f"{source} can't be imported: {type(error).__name__}: {error}") from error
    found = {m.name: m for m in methods_of(page)}
    if not found:
        raise MethodError(f"{source} defines no METHODS: end the page with METHODS = (Method(...),)")
    if name and name not in found:
        raise MethodError(f"{source} has no method {name!r}.{did_you_mean(name, found)}")
    return found[name] if name else next(iter(found.values()))


def source_of(name: str) -> Path:
    """The file of the page that a method stands on."""
    known = find(name)
    for page in PAGES:
        module = importlib.import_module(page)
        if known in methods_of(module) and module.__file__:
            return Path(module.__file__)
    raise MethodError(f"the page of {name!r} has no file")  # a frozen or zipped installation


def methods_of(page: ModuleType) -> tuple[Method, ...]:
    """The METHODS of a page."""
    return tuple(getattr(page, "METHODS", ()))
