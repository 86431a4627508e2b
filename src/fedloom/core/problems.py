"""Errors of pydantic as sentences."""

import re
from types import NoneType
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from fedloom.core.errors import did_you_mean

_TYPE: Final = (
    r"constrained-\w+|(?:tuple|list|dict|function-\w+)\[.*\]|literal\[.*\]|int|float|str|bool"
)
_KINDS: Final = {
    "int_": "an integer",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "a string",
}
"""The required kind of value, by the prefix of pydantic's error type."""


def problems(error: ValidationError, model: type[BaseModel], at: str = "") -> list[str]:
    """One sentence for each error, with the key and what is allowed; of a value that may have
    several types, for the first.
    """
    lines = []
    told: set[str] = set()
    for item in error.errors():
        path = [str(p) for p in item["loc"]]
        if path and re.fullmatch(_TYPE, path[-1]):  # the name of one of the types
            if ".".join(path[:-1]) in told:
                continue
            told.add(".".join(path := path[:-1]))
        where = ".".join(([at] if at else []) + path)
        if item["type"] == "extra_forbidden":
            known, given = _names(model, path[:-1]), item["input"]
            if isinstance(given, dict) and given and set(given) <= set(known):
                lines.append(
                    f"{where}: there is no such section. Write its settings one level up: "
                    f"{', '.join(given)}."
                )
                continue
            meant = did_you_mean(path[-1], known)
            lines.append(f"{where}: there is no such setting.{meant}")
        elif item["type"] == "missing":
            lines.append(f"{where}: must be set")
        elif item["type"] in ("model_type", "dict_type"):
            lines.append(f"{where}: must be a table, not {_shown(item['input'])}")
        elif item["type"] in ("tuple_type", "list_type"):
            given = item["input"]
            parts = (
                [part.strip() for part in given.split(",")] if isinstance(given, str) else [given]
            )
            example = ", ".join(map(_shown, parts))
            lines.append(f"{where}: must be a list, such as [{example}], not {_shown(given)}")
        elif item["type"] == "too_short":
            lines.append(f"{where}: must have at least {item['ctx']['min_length']}")
        elif kind := next(
            (name for start, name in _KINDS.items() if item["type"].startswith(start)), ""
        ):
            lines.append(f"{where}: must be {kind}, not {_shown(item['input'])}")
        else:
            text = item["msg"].removeprefix("Value error, ").replace("Input should ", "must ")
            given = (
                "" if isinstance(item["input"], dict | list) else f", not {_shown(item['input'])}"
            )
            named = text.startswith(f"{where}.")  # a check of several settings names them in full
            lines.append(text if named else f"{where}: {text[0].lower() + text[1:]}{given}")
    return lines


def _shown(value: Any) -> str:
    """A value as one would write it; the kind of an object, such as a data frame, whose text has
    many lines.
    """
    return (
        repr(value)
        if isinstance(value, str | int | float | list | tuple | dict | None)
        else f"a {type(value).__name__}"
    )


def _names(model: type[BaseModel], path: list[str]) -> list[str]:
    """The field names of the model at `path`, also within mappings and sequences of models."""
    kind: Any = model
    for part in path:
        if _is_model(kind):
            kind = kind.model_fields[part].annotation if part in kind.model_fields else None
        else:
            kind = next(
                (inner for inner in reversed(get_args(kind)) if inner is not Ellipsis), None
            )
        if NoneType in get_args(kind):
            kind = next((inner for inner in get_args(kind) if _is_model(inner)), None)
    return list(kind.model_fields) if _is_model(kind) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
