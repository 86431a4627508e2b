"""The methods: one file per paper, grouped by communication pattern.

A page imports the core and nothing else of fedloom: no engine, no experiment. It ends with `METHODS`, the points
of the page that have a name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from fedloom.core.errors import MethodError, did_you_mean
from fedloom.core.method import Method


@cache
def pages() -> tuple[ModuleType, ...]:
    """Every page of the family packages, by family and file name: a method is added by adding its file."""
    families = [f.name for f in pkgutil.iter_modules(__path__, f"{__name__}.") if f.ispkg]
    packages = [(name, importlib.import_module(name).__path__) for name in families]
    files = [page.name for name, path in packages for page in pkgutil.iter_modules(path, f"{name}.")]
    return tuple(map(importlib.import_module, files))


@cache
def registry() -> MappingProxyType[str, Method]:
    """Every method by name, in the order of the pages.

    Raises:
        MethodError: two methods have one name.
    """
    found: dict[str, Method] = {}
    for page in pages():
        for method in methods_of(page):
            if method.name in found:
                raise MethodError(f"{page.__file__} defines {method.name!r}, which another page defines: rename it")
            found[method.name] = method
    return MappingProxyType(found)


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
    """The file of the page that defines a method."""
    known = find(name)
    for page in pages():
        if known in methods_of(page) and page.__file__:
            return Path(page.__file__)
    raise MethodError(f"the page of {name!r} has no file")  # a frozen or zipped installation


def methods_of(page: ModuleType) -> tuple[Method, ...]:
    """The METHODS of a page."""
    return tuple(getattr(page, "METHODS", ()))
