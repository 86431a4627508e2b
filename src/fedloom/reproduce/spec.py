"""The file of one published table or figure: its rows and columns, the paper's numbers, and what it claims."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.method import problems
from fedloom.experiment.config import RunConfig
from fedloom.experiment.reading import check

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")
System = Literal["fedal", "afind", "evfl", "augfl"]
SYSTEMS = {
    "fedal": "FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial Learning",
    "afind": "Smart Sampling: Helping from Friendly Neighbors for Decentralized Federated Learning (AFIND+)",
    "evfl": "Proto-EVFL: Enhanced Vertical Federated Learning via Dual Prototype with Extremely Unaligned Data",
    "augfl": "AugFL: Augmenting Federated Learning with Pretrained Models",
}
"""The papers, by the first word of a file's name."""
FACTORS = {"%": 100.0, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9}
"""By which a raw value is multiplied to be in a unit; of any other unit it is as it is."""
PICTURES = ("curves", "bytes", "columns", "bars", "holdings", "choices")
AT = " @ "


def _in_its_case(unit: str) -> str:
    for known in FACTORS:
        if unit != known and unit.casefold() == known.casefold():
            raise ValueError(f"a unit {unit!r} would leave numbers as they are: did you mean {known!r}?")
    return unit


_Unit = Annotated[str, AfterValidator(_in_its_case)]


class _SpecModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _RowOrColumn(_SpecModel):
    """What a row and a column have in common."""

    name: str = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    """Settings of a run, as in a run's file, at both scales."""
    small: dict[str, Any] = Field(default_factory=dict)
    """Settings at the small scale alone."""
    paper: dict[str, Any] = Field(default_factory=dict)
    """Settings at the paper's scale alone."""
    untestable: dict[Scale, str] = Field(default_factory=dict)
    """Why it can't be run at a scale; then it has the paper's numbers alone."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if AT in name:
            raise ValueError(f"a name can't hold {AT!r}, which joins a row and a column")
        return name


class Row(_RowOrColumn):
    """A method, or a variant of one."""

    published: dict[str, float | tuple[float, float]] = Field(default_factory=dict)
    """The paper's number in each column, or its mean and standard deviation, in the file's unit."""


class Column(_RowOrColumn):
    """A data set, a degree of skew, a setting that is varied."""

    value: float | None = None
    """Where it lies on an axis, if columns are numbers."""


class Claim(_SpecModel):
    """What the paper says of its numbers, as a difference that seeds can decide."""

    text: str = Field(min_length=1)
    """In a sentence."""
    left: str
    """A row, over `columns`; or a single cell, as `row @ column`."""
    right: str | float
    """Another one, or a number in the unit of the measure."""
    rule: Literal["more", "less", "within"] = "more"
    """Left is more than right by at least `by`, less by at least `by`, or differs by no more than `by`."""
    by: float = Field(0.0, ge=0)
    """In the unit of the measure: percentage points of a share."""
    times: float = Field(1.0, gt=0)
    """Right counts so many times."""
    columns: tuple[str, ...] | None = None
    """Over which the mean is taken; None for all that both have."""
    measure: str | None = None
    """None for the file's."""
    unit: _Unit | None = None
    """Of another measure; None for the file's."""
    untestable: dict[Scale, str] = Field(default_factory=dict)
    """Why it can't be tested at a scale."""


class ScaleConfig(_SpecModel):
    """What a scale has in common: data, models, length, seeds."""

    about: str = ""
    """What differs from the paper, in a sentence or two."""
    seeds: int = Field(3, ge=1)
    """How many, from 0."""
    run: dict[str, Any] = Field(default_factory=dict)
    """Settings of a run that all cells share."""


@dataclass(frozen=True)
class Cell:
    """One place of the table at one scale.

    Attributes:
        runs: one for each seed; none where it can't be run.
        untestable: why not.
    """

    row: Row
    column: Column
    runs: tuple[RunConfig, ...]
    untestable: str = ""

    @property
    def name(self) -> str:
        """As claims and `--only` call it."""
        return f"{self.row.name}{AT}{self.column.name}"

    @property
    def published(self) -> tuple[float, float | None] | None:
        """The paper's mean, and its standard deviation if it has one."""
        found = self.row.published.get(self.column.name)
        if found is None or isinstance(found, tuple):
            return found
        return found, None


class Reproduction(_SpecModel):
    """One published table or figure."""

    title: str = Field(min_length=1)
    """What it shows, in a line."""
    system: System
    """The paper: a key of `SYSTEMS`."""
    place: str
    """Where it stands in the paper, such as `Table VI`."""
    about: str = ""
    """What a reader should know: what the paper did and does not say."""
    measure: str = "accuracy"
    """What a cell shows: see `fedloom.reproduce.measure`."""
    unit: _Unit = "%"
    """Of the numbers as published and shown; shares become percent, and bytes MB, where it says so."""
    better: Literal["more", "less"] = "more"
    """Which is better."""
    across: str = ""
    """What the columns are."""
    pictures: tuple[str, ...] = ()
    """Some of `PICTURES`. curves: the measure by iteration. bytes: by bytes sent. columns: rows as lines over the
    columns' values. bars: rows side by side. holdings: who holds what. choices: who chose whom."""
    rows: tuple[Row, ...] = Field(min_length=1)
    columns: tuple[Column, ...] = Field(min_length=1)
    claims: tuple[Claim, ...] = ()
    small: ScaleConfig
    paper: ScaleConfig

    @model_validator(mode="after")
    def _consistent(self) -> Reproduction:
        rows, columns = [r.name for r in self.rows], [c.name for c in self.columns]
        for kind, names in (("row", rows), ("column", columns)):
            if twice := sorted({n for n in names if names.count(n) > 1}):
                raise ValueError(f"two {kind}s are called {twice[0]!r}")
        for row in self.rows:
            if unknown := sorted(row.published.keys() - {*columns}):
                raise ValueError(f"{row.name} has a published number in {unknown[0]!r}, which is no column")
        for claim in self.claims:
            for side in (claim.left, claim.right):
                if isinstance(side, str):
                    of, _, at = side.partition(AT)
                    if of not in rows or (at and at not in columns):
                        raise ValueError(f"the claim {claim.text!r} speaks of {side!r}, which is no row or cell")
            if unknown := sorted({*(claim.columns or ())} - {*columns}):
                raise ValueError(f"the claim {claim.text!r} speaks of {unknown[0]!r}, which is no column")
        if unknown := sorted({*self.pictures} - {*PICTURES}):
            raise ValueError(f"there is no picture {unknown[0]!r}; there are {', '.join(PICTURES)}")
        if "columns" in self.pictures and any(c.value is None for c in self.columns):
            raise ValueError("the picture 'columns' needs a value of each column")
        return self

    @property
    def names(self) -> list[str]:
        """Of all rows, columns and cells, as `--only` calls them."""
        every = (name for row in self.rows for column in self.columns for name in _called(row, column))
        return [*dict.fromkeys(every)]

    def scale(self, scale: Scale) -> ScaleConfig:
        """What the cells of a scale share."""
        return self.small if scale == "small" else self.paper

    def cells(
        self, scale: Scale, seeds: int | None = None, only: Sequence[str] = (), change: Mapping[str, Any] | None = None
    ) -> Iterator[Cell]:
        """The table at a scale, row by row.

        Args:
            scale: small or paper.
            seeds: how many, from 0; None for as many as the scale has.
            only: names of rows, columns or `row @ column`, with * and ?; empty for all.
            change: settings over all others.

        Raises:
            ConfigError: a cell is no valid run.
        """
        for row in self.rows:
            for column in self.columns:
                if only and not any(match(n, pattern) for pattern in only for n in _called(row, column)):
                    continue
                why = row.untestable.get(scale) or column.untestable.get(scale) or ""
                runs = () if why else tuple(self._runs(row, column, scale, seeds, change or {}))
                yield Cell(row, column, runs, why)

    def _runs(
        self, row: Row, column: Column, scale: Scale, seeds: int | None, change: Mapping[str, Any]
    ) -> Iterator[RunConfig]:
        both = self.scale(scale)
        parts = (both.run, column.run, getattr(column, scale), row.run, getattr(row, scale), change)
        values: dict[str, Any] = {}
        for part in parts:
            values = merged(values, part)
        for seed in range(seeds or both.seeds):
            try:
                yield check({"run": {**values, "seed": seed}}).run
            except ConfigError as error:
                raise ConfigError(f"{row.name}{AT}{column.name} at the {scale} scale: {error}") from None


def _called(row: Row, column: Column) -> tuple[str, str, str]:
    return row.name, column.name, f"{row.name}{AT}{column.name}"


def match(name: str, pattern: str) -> bool:
    """Whether a name is what a pattern with * and ? says, in any case."""
    return fnmatch.fnmatchcase(name.casefold(), pattern.casefold())


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One table of settings over another: tables within are merged too. `rounds` and `iterations` replace each other
    (of both in one table, whoever checks the run tells), and a partition drops the options of the one before."""
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    for one, other in (("rounds", "iterations"), ("iterations", "rounds")):
        if one in over and other not in over:
            found.pop(other, None)
    if "partition" in over and "options" in under:
        found["options"] = over.get("options", {})
    return found


def shipped() -> dict[str, str]:
    """The files that come with fedloom: their text by name, in the order of the papers."""
    folder = resources.files("fedloom") / "experiments" / "papers"
    texts = {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return {name: texts[name] for name in sorted(texts, key=_order)}


def _order(name: str) -> tuple[int, int, int]:
    """Paper by paper, tables first, each by number."""
    system, kind, number = name.split("-")
    return [*SYSTEMS].index(system), "table figure".index(kind), int(number)


def read(name: str) -> Reproduction:
    """A published table or figure by its name, such as `fedal-table-6`.

    Raises:
        ConfigError: there is none of the name, or the file is not valid.
    """
    called = canonical(name)
    return parsed(shipped()[called], called)


def canonical(name: str) -> str:
    """What fedloom calls a published table or figure that a paper may number with Roman numerals.

    Raises:
        ConfigError: there is none of the name.
    """
    known = shipped()
    plain = re.sub(r"-([ivxl]+)$", lambda number: f"-{_arabic(number[1])}", name.casefold())
    if plain in known:
        return plain
    if Path(name).is_dir():
        raise ConfigError(f"{name} is a folder: name a .toml file, or one of fedloom list reproductions")
    hint = did_you_mean(plain, get_close_matches(plain, known, n=1))
    raise ConfigError(f"there is no reproduction {name!r}.{hint} fedloom list reproductions shows all")


def _arabic(roman: str) -> int:
    """`vi` is 6."""
    digits = [{"i": 1, "v": 5, "x": 10, "l": 50}[letter] for letter in roman]
    return sum(-one if one < after else one for one, after in zip(digits, [*digits[1:], 0], strict=True))


def parsed(text: str, where: str) -> Reproduction:
    """The text of a file.

    Raises:
        ConfigError: it is not valid; all problems at once.
    """
    try:
        return Reproduction(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {p}" for p in problems(error, Reproduction))) from None
