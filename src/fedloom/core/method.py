"""What a method page offers to the rest: a name, a config, parties, and one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fedloom.core.context import Site
from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.party import Party

Round: TypeAlias = Callable[..., Iterator[str]]
"""`round(fed, server, clients, cfg, t)`: one pass of the algorithm's outer loop, yielding the name of each
stage that it ends. Whatever must live until the next round belongs in a party's state."""


class MethodConfig(BaseModel):
    """Base of every method's config: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: dict[str, Any]) -> dict[str, Any]:
        """TOML has no null: "none" stands for it, where a setting may be None."""
        fields = cls.model_fields
        able = {k for k in values if k in fields and type(None) in get_args(fields[k].annotation)}
        return {k: None if v == "none" and k in able else v for k, v in values.items()}

    @property
    def iterations_per_round(self) -> int:
        """Optimiser steps of one kind in a round: what makes runs of different methods comparable."""
        return 1

    @property
    def ways(self) -> tuple[str, ...]:
        """Further ways to evaluate a party than as it is, such as after fine-tuning: see `Party.prepare`."""
        return ()

    @property
    def least_rounds(self) -> int:
        """With fewer rounds a run comes to nothing, such as with those that only prepare."""
        return 0

    @property
    def warnings(self) -> Mapping[str, str]:
        """Notes of a party that a user should hear of while they are above 0, by name: what they mean."""
        return {}


@dataclass(frozen=True)
class Method:
    """A registered method: one point of a page.

    Attributes:
        name: as the command line has it.
        title: one line for a list.
        paper: the citation.
        family: the folder of the page: who talks to whom.
        config: the config class; its defaults are the `recommended` preset before `fixed`.
        round: one round.
        client: the party class of every participant.
        server: the party class in whose place the round runs, or None where there is no server.
        black_box: the party class of a client that has an object with `fit` and `predict_proba` in the place of a
            network; None where the method can't do with such.
        fixed: config values that make this method this method.
        presets: further named sets of config values, under `fixed`.
        public: whether it needs an unlabelled public set.
        server_public: whether its server holds the public rows too.
        one_network: whether all parties begin with one and the same network, as methods that average weights need.
        groups: whether weights are averaged among clients of one architecture: these begin with the same weights, and
            the server knows each client's group and can build each group's network.
        one_width: whether the networks, though they may differ, must give features of one width: unless some are named,
            all have one architecture. A setting `adaptor` of its config that is not None makes them so.
        least: the fewest participants that a round makes sense with.
        server_rows: whether its server needs labelled rows of its own.
        pretrained: whether its server needs a pretrained model.
        encoder: whether clients are told that model's architecture, to be sent its weights; then there must be one.
        columns: whether parties hold different columns of the same rows, and the home has the labels; party 0 is in
            its house.
        pooled: with `columns`: whether all rows of all parties count as aligned and labelled, as no federation has it.
    """

    name: str
    title: str
    paper: str
    family: str
    config: type[MethodConfig]
    round: Round
    client: type[Party[Any]]
    server: type[Party[Any]] | None = None
    black_box: type[Party[Any]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    public: bool = False
    server_public: bool = False
    one_network: bool = False
    groups: bool = False
    one_width: bool = False
    least: int = 1
    server_rows: bool = False
    pretrained: bool = False
    encoder: bool = False
    columns: bool = False
    pooled: bool = False

    def party_at(self, site: Site) -> type[Party[Any]]:
        """The party class of the client at this place."""
        return self.black_box if self.black_box is not None and site.box is not None else self.client

    def configure(self, preset: str = "recommended", params: Mapping[str, Any] | None = None) -> Any:
        """The config of a preset with `params` over it.

        Raises:
            ConfigError: an unknown preset or parameter, or a value out of range; all of them at once.
        """
        known = {"recommended": {}, **self.presets}
        if preset not in known:
            raise ConfigError(f"{self.name} has no preset {preset!r}.{did_you_mean(preset, known)}")
        values = {**known[preset], **self.fixed, **(params or {})}
        try:
            return self.config(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(problems(error, self.config, "params"))) from None


def problems(error: ValidationError, model: type[BaseModel], at: str = "") -> list[str]:
    """One plain sentence for each thing that is wrong, each naming the key and a mend."""
    found = []
    for item in error.errors():
        path = [str(p) for p in item["loc"]]
        where = ".".join(([at] if at else []) + path)
        if item["type"] == "extra_forbidden":
            names = _names(model, path[:-1])
            found.append(f"{where}: there is no such setting.{did_you_mean(path[-1], names)}")
        elif item["type"] == "missing":
            found.append(f"{where}: must be set")
        elif item["type"] in ("model_type", "dict_type"):
            found.append(f"{where}: must be a table, not {item['input']!r}")
        elif item["type"] == "too_short":
            found.append(f"{where}: must have at least {item['ctx']['min_length']}")
        else:
            text = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], dict | list) else f", not {item['input']!r}"
            found.append(f"{where}: {text[0].lower() + text[1:]}{given}")
    return found


def _names(model: type[BaseModel], path: list[str]) -> list[str]:
    """The field names of the model that `path` leads to, also through mappings and sequences of models."""
    kind: Any = model
    for part in path:
        if _is_model(kind):
            kind = kind.model_fields[part].annotation if part in kind.model_fields else None
        else:
            kind = next((inner for inner in reversed(get_args(kind)) if inner is not Ellipsis), None)
        if NoneType in get_args(kind):
            kind = next((inner for inner in get_args(kind) if _is_model(inner)), None)
    return list(kind.model_fields) if _is_model(kind) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
