"""`[methods.NAME]` of `node.toml`: conditions on a method's settings."""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.method import Method


class MethodPolicy(BaseModel):
    """`[methods.NAME]`: conditions on a method's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    presets: tuple[str, ...] | None = None
    """Allowed presets; None for any."""
    min: Mapping[str, float] = Field(default_factory=dict)
    """Lower bounds of settings, such as `embedding_noise = 0.5`."""
    max: Mapping[str, float] = Field(default_factory=dict)
    """Upper bounds of settings, such as `"dp.clip" = 1.0`. A setting that is none has no bound and
    is refused.
    """
    fixed: Mapping[str, Any] = Field(default_factory=dict)
    """Required values of settings, such as `"dp.target" = "phi"`; "none" for none."""

    secure: bool = False
    """Whether runs must have aggregate.secure = true, so that no single reply of this node enters a
    mean unmasked. It protects against a coordinator that follows the protocol.
    """

    def problems(self, method: Method) -> Iterator[str]:
        """A sentence for each condition that is invalid or that no run of this method
        could meet.
        """
        for preset in self.presets or ():
            try:
                method.configure(preset)
            except ConfigError as error:
                yield f"presets: {error}"
        if self.secure and not method.client.MEANS:
            yield "secure: the method takes no mean of clients' replies, so it has no secure sums"
        kinds, sound = _kinds(method.config), {}
        for table in ("min", "max", "fixed"):
            for name, value in getattr(self, table).items():
                if name not in kinds and name == "secure":
                    yield (
                        f"{table}: secure is no setting of a method any more: write secure = "
                        f"true beside {table}"
                    )
                elif name not in kinds:
                    meant = did_you_mean(name, kinds)
                    yield f"{table}: the method has no setting {name!r}.{meant}"
                elif inner := next((known for known in kinds if known.startswith(f"{name}.")), ""):
                    yield (
                        f"{table}: {name} is a table: give its settings one by one, such as "
                        f'"{inner}"'
                    )
                elif table == "fixed":
                    sound[name] = value
                elif not _is_number(kinds[name]):
                    yield f"{table}: {name} is not a number: give its value under fixed"
        yield from (f"fixed: {line}" for line in _impossible(method, sound, kinds))

    def violations(self, method: str, cfg: Any, *, secure: bool) -> Iterator[str]:
        """A sentence for each condition that a run of the method with this config violates.
        `secure`: its setting `aggregate.secure`.
        """
        if self.secure and not secure:
            yield f"{method} has aggregate.secure = false; this node requires true"
        for name, bound in self.min.items():
            value = setting(cfg, name)
            if not isinstance(value, int | float) or not value >= bound:  # nor is NaN
                yield f"{method} has {name} = {value}; this node requires at least {bound:g}"
        for name, bound in self.max.items():
            value = setting(cfg, name)
            if not isinstance(value, int | float) or not value <= bound:
                yield f"{method} has {name} = {value}; this node allows at most {bound:g}"
        for name, wanted in self.fixed.items():
            value = setting(cfg, name)
            if not _alike(value, wanted):
                yield f"{method} has {name} = {_plain(value)}; this node requires {_plain(wanted)}"


def setting(cfg: Any, name: str) -> Any:
    """A setting of a method by its dotted name; None if it does not exist."""
    for part in name.split("."):
        cfg = getattr(cfg, part, None)
    return cfg


def _alike(value: Any, wanted: Any) -> bool:
    return bool(_plain(value) == _plain(wanted)) or (wanted == "none" and value is None)


def _plain(value: Any) -> Any:
    """A value with lists for tuples: TOML has no tuples, and settings have no lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _impossible(
    method: Method, fixed: Mapping[str, Any], kinds: Mapping[str, Any]
) -> Iterator[str]:
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
        # A run's other settings may fix an error that concerns several settings together.
        yield from (
            line
            for line in lines
            if line.startswith(tuple(f"{name}{end}" for name in fixed for end in ":."))
        )
        return
    for name, value in fixed.items():
        if not _alike(setting(cfg, name), value):
            yield (
                f"{name}: {value!r} becomes {_plain(setting(cfg, name))!r} in a run: write that "
                "value"
            )


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
    """The members of a union type; any other type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_number(kind: Any) -> bool:
    """Whether a value of this type may be a number."""
    if get_origin(kind) is Annotated:
        return _is_number(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return any(type(value) in (int, float) for value in get_args(kind))
    return (
        kind in (int, float) if (parts := _either(kind)) == (kind,) else any(map(_is_number, parts))
    )
