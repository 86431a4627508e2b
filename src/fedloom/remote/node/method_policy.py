"""`[methods.NAME]` of `node.toml`: what a method's settings must be for a run of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.method import Method


class MethodPolicy(BaseModel):
    """`[methods.NAME]`: how a method may be run here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    presets: tuple[str, ...] | None = None
    """The presets that are allowed; None for any."""
    least: Mapping[str, float] = Field(default_factory=dict)
    """The least value of settings, such as `embedding_noise = 0.5`: a run that has less is refused."""
    most: Mapping[str, float] = Field(default_factory=dict)
    """The largest value of settings, such as `"dp.clip" = 1.0`. One that is none, and so has no bound, is refused."""
    fixed: Mapping[str, Any] = Field(default_factory=dict)
    """What settings must be, such as `"dp.target" = "phi"`; "none" for one that must be none."""

    def wrong(self, method: Method) -> Iterator[str]:
        """A sentence for each condition that means nothing, or that no run of this method could meet."""
        for preset in self.presets or ():
            try:
                method.configure(preset)
            except ConfigError as error:
                yield f"presets: {error}"
        kinds, sound = _kinds(method.config), {}
        for table in ("least", "most", "fixed"):
            for name, value in getattr(self, table).items():
                if name not in kinds:
                    yield f"{table}: it has no setting {name!r}.{did_you_mean(name, kinds)}"
                elif inner := next((known for known in kinds if known.startswith(f"{name}.")), ""):
                    yield f'{table}: {name} has settings of its own: name them one by one, such as "{inner}"'
                elif table == "fixed":
                    sound[name] = value
                elif not _is_number(kinds[name]):
                    yield f"{table}: {name} is no number: say in fixed what it must be"
        yield from (f"fixed: {line}" for line in _impossible(method, sound, kinds))

    def unmet(self, method: str, cfg: Any) -> Iterator[str]:
        """A sentence for each condition that a run of the method with this config does not meet."""
        for name, bound in self.least.items():
            value = setting(cfg, name)
            if not isinstance(value, int | float) or not value >= bound:  # nor is NaN
                yield f"{method} must have {name} of at least {bound:g} here, not {value}"
        for name, bound in self.most.items():
            value = setting(cfg, name)
            if not isinstance(value, int | float) or not value <= bound:
                yield f"{method} must have {name} of at most {bound:g} here, not {value}"
        for name, wanted in self.fixed.items():
            value = setting(cfg, name)
            if not _alike(value, wanted):
                yield f"{method} must have {name} = {_plain(wanted)} here, not {_plain(value)}"


def setting(cfg: Any, name: str) -> Any:
    """A setting of a method by its dotted name; None where there is none."""
    for part in name.split("."):
        cfg = getattr(cfg, part, None)
    return cfg


def _alike(value: Any, wanted: Any) -> bool:
    return bool(_plain(value) == _plain(wanted)) or (wanted == "none" and value is None)


def _plain(value: Any) -> Any:
    """The same with lists for tuples: TOML has no tuples, and settings no lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _impossible(method: Method, fixed: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that its setting can't have, whatever the others are."""
    params: dict[str, Any] = {}
    for name, value in fixed.items():
        *path, last = name.split(".")
        table = params
        for part in path:
            table = table.setdefault(part, {})
        table[last] = None if value == "none" and NoneType in get_args(kinds[name]) else value
    try:
        cfg = method.configure(params=params)
    except ConfigError as error:
        lines = [line.removeprefix("params.") for line in str(error).splitlines()]
        # What is wrong with several settings together may be right with those of a run.
        yield from (line for line in lines if line.startswith(tuple(f"{name}{end}" for name in fixed for end in ":.")))
        return
    for name, value in fixed.items():
        if not _alike(setting(cfg, name), value):
            yield f"{name}: {value!r} is {_plain(setting(cfg, name))!r} in a run: write it so"


def _kinds(model: type[BaseModel], at: str = "") -> dict[str, Any]:
    """The types of all settings by their dotted names."""
    found = {}
    for name, field in model.model_fields.items():
        found[f"{at}{name}"] = field.annotation
        for kind in _either(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _kinds(kind, f"{at}{name}.")
    return found


def _either(kind: Any) -> tuple[Any, ...]:
    """The types of which this is one."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_number(kind: Any) -> bool:
    """Whether something of this type may be a number."""
    if get_origin(kind) is Annotated:
        return _is_number(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return any(type(value) in (int, float) for value in get_args(kind))
    return kind in (int, float) if (parts := _either(kind)) == (kind,) else any(map(_is_number, parts))
