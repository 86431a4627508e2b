"""Objects of the calling program, such as arrays, modules and methods, under names made from their
content.

A config stays plain text: it names an object, and the process that holds the object finds it by
that name. The same script gives the same names, so its run can be resumed.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from fedloom.core.errors import FedloomError

PREFIX: Final = "object:"
"""Prefix of the names of objects."""
_NAME: Final = re.compile(r"object:[\w.-]+")
_HELD: dict[str, tuple[Any, Mapping[str, Any]]] = {}


def hold(label: str, content: bytes, value: Any, **about: Any) -> str:
    """Hold an object of this process; returns its name.

    Args:
        label: what the name begins with, such as the object's class.
        content: bytes that identify the object's content.
        value: the object. The caller must not change it afterwards.
        **about: plain values that describe it, for the run folder.
    """
    sha256 = hashlib.sha256(content).hexdigest()
    plain = re.sub(r"[^\w.]", "_", label)
    name = f"{PREFIX}{plain}-{sha256[:12]}"
    _HELD.setdefault(name, (value, {**about, "sha256": sha256}))
    return name


def is_object(name: str) -> bool:
    """Whether a name belongs to an object, held or not."""
    return name.startswith(PREFIX)


def find(name: str, error: type[FedloomError]) -> Any:
    """The object of this name. Raises `error` if this process does not hold it."""
    if name not in _HELD:
        raise error(
            f"{name} is an object of the script that started the run: run that script again, "
            "or export the models there, with result.export(FOLDER)"
        )
    return _HELD[name][0]


def described(text: str) -> dict[str, dict[str, Any]]:
    """The descriptions of all objects that a text names, by name."""
    return {
        name: dict(_HELD[name][1]) for name in dict.fromkeys(_NAME.findall(text)) if name in _HELD
    }
