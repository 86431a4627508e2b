"""The methods: one file (page) per paper, grouped by communication pattern.

A page imports only `fedloom.core` and `fedloom.protect`, and ends with `METHODS`, the methods that
it registers.
"""

import importlib
import importlib.util
import pkgutil
import sys
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from fedloom.core.errors import MethodError, did_you_mean
from fedloom.core.method import Method
from fedloom.core.objects import find as find_object
from fedloom.core.objects import is_object


@cache
def pages() -> tuple[ModuleType, ...]:
    """All pages, by family and file name. Adding a file adds its methods."""
    families = [f.name for f in pkgutil.iter_modules(__path__, f"{__name__}.") if f.ispkg]
    packages = [(name, importlib.import_module(name).__path__) for name in families]
    files = [
        page.name for name, path in packages for page in pkgutil.iter_modules(path, f"{name}.")
    ]
    return tuple(map(importlib.import_module, files))


@cache
def registry() -> MappingProxyType[str, Method]:
    """All methods by name, in the order of the pages.

    Raises:
        MethodError: two methods have the same name.
    """
    by_name: dict[str, Method] = {}
    for page in pages():
        for method in methods_of(page):
            if method.name in by_name:
                raise MethodError(
                    f"{page.__file__}: another page already defines the method {method.name!r}: "
                    "rename it"
                )
            by_name[method.name] = method
    return MappingProxyType(by_name)


def find(name: str) -> Method:
    """The method with this name.

    Raises:
        MethodError: the name is unknown; the message suggests a similar one.
    """
    if is_object(name):
        return find_object(name, MethodError)  # type: ignore[no-any-return]
    known = registry()
    if name not in known:
        hint = did_you_mean(name, known) or " fedloom list methods names all."
        raise MethodError(f"unknown method {name!r}.{hint}")
    return known[name]


def named(name: str) -> Method:
    """The method that a user names: a registered one, or `FILE.py` or `FILE.py:NAME`, which runs
    the file's code.

    Raises:
        MethodError: see `find` and `load`.
    """
    return load(name) if ".py" in name else find(name)


def load(file: Path | str) -> Method:
    """A method of the user's own page: the first in `FILE.py`, or `FILE.py:NAME`.

    Raises:
        MethodError: the file is missing, fails to import, or does not define the method.
    """
    path, _, name = str(file).partition(".py:")
    source = Path(path if path.endswith(".py") else f"{path}.py")
    if not source.is_file():
        raise MethodError(f"{source} does not exist")
    by_name = {m.name: m for m in methods_of(_page_at(source, source.read_bytes()))}
    if not by_name:
        raise MethodError(
            f"{source} defines no METHODS: end the page with METHODS = (Method(...),)"
        )
    if name and name not in by_name:
        raise MethodError(f"{source} defines no method {name!r}.{did_you_mean(name, by_name)}")
    return by_name[name] if name else next(iter(by_name.values()))


@lru_cache(maxsize=32)
def _page_at(source: Path, content: bytes) -> ModuleType:
    """The page of a file with this content, imported once: then runs of its methods can be batched
    together.
    """
    spec = importlib.util.spec_from_file_location(f"fedloom_page_{source.stem}", source)
    if spec is None or spec.loader is None:
        raise MethodError(f"cannot import {source} as a Python file")
    page = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = page  # where pydantic resolves a config's annotations
    try:
        spec.loader.exec_module(page)
    except Exception as error:
        del sys.modules[spec.name]
        raise MethodError(f"cannot import {source}: {type(error).__name__}: {error}") from error
    return page


def source_of(name: str) -> Path:
    """The file of the page that defines a method."""
    method = find(name)
    for page in pages():
        if method in methods_of(page) and page.__file__:
            return Path(page.__file__)
    raise MethodError(f"the page of {name!r} has no file")  # a frozen or zipped installation


def methods_of(page: ModuleType) -> tuple[Method, ...]:
    """The METHODS of a page."""
    return tuple(getattr(page, "METHODS", ()))
