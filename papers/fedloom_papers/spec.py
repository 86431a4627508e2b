"""The TOML file of a published table or figure: rows, columns, published numbers and claims."""

import fnmatch
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.problems import problems
from fedloom.data.sources import SOURCES
from fedloom.experiment.config.foreign_code import refuse_foreign_code
from fedloom.experiment.config.overrides import merged
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import check
from fedloom.report.metrics import RunMetric
from fedloom_papers.shipped import shipped
from fedloom_papers.units import FACTORS

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")
System = Literal["fedal", "afind", "evfl", "augfl"]
MANIFESTS = {"modelnet10": "ModelNet-10"}
"""Titles of data that come as a manifest, by the first word of its file's name."""
PICTURES = ("curves", "bytes", "columns", "bars", "partition", "mixing")
AT = " @ "


def _in_its_case(unit: str) -> str:
    for known in FACTORS:
        if unit != known and unit.casefold() == known.casefold():
            raise ValueError(f"unknown unit {unit!r}. Did you mean {known!r}?")
    return unit


_Unit = Annotated[str, AfterValidator(_in_its_case)]


_About = Annotated[str, AfterValidator(lambda text: " ".join(text.split()))]
"""A paragraph; line breaks are those of the file."""


class _SpecModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _RowOrColumn(_SpecModel):
    """Fields shared by rows and columns."""

    name: str = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run at both scales."""
    small: dict[str, Any] = Field(default_factory=dict)
    """Settings at the small scale only."""
    paper: dict[str, Any] = Field(default_factory=dict)
    """Settings at the paper's scale only."""
    untestable: dict[Scale, str] = Field(default_factory=dict)
    """Why it cannot be run at a scale; the table then shows the published numbers only."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if AT in name:
            raise ValueError(f"a name must not contain {AT!r}, which joins a row and a column")
        return name


class Row(_RowOrColumn):
    """A method, or a variant of one."""

    published: dict[str, float | tuple[float, float]] = Field(default_factory=dict)
    """The published value, or mean and standard deviation, by column, in the file's unit."""
    tuned: dict[Scale, int] = Field(default_factory=dict)
    """Number of settings tried for it, judged on training or validation rows; 0 if not given. Rows
    are compared only with rows of the same number.
    """


class Column(_RowOrColumn):
    """A data set, a degree of skew or a value of a setting."""

    value: float | None = None
    """Its position on an axis, if columns are numbers."""


class Claim(_SpecModel):
    """A statement of the paper, as a difference that can be tested over seeds."""

    text: str = Field(min_length=1)
    """The claim in a sentence."""
    left: str
    """A row, averaged over `columns`, or a cell, `row @ column`."""
    right: str | float | tuple[str, ...]
    """A row, a cell, or a number in the unit of the metric; or several rows or cells, for a claim
    about each.
    """
    than: tuple[str, str] | None = None
    """Rows or cells of a second difference, which is subtracted from the first: `left - right`
    grows.
    """
    rule: Literal["more", "less", "within"] = "more"
    """Left is more than right by at least `by`, less by at least `by`, or differs by no more than
    `by`.
    """
    by: float = Field(0.0, ge=0)
    """The margin, in the unit of the metric; percentage points for shares."""
    times: float = Field(1.0, gt=0)
    """A factor of the right side."""
    printed: float | None = None
    """The paper's difference in the unit; None to take it from the published numbers."""
    incomparable: str = ""
    """Why the two sides cannot be compared, whatever their numbers."""
    columns: tuple[str, ...] | None = None
    """The columns to average over; None for all that both rows have."""
    metric: str | None = None
    """The metric; None for the file's."""
    unit: _Unit | None = None
    """The unit; None for the file's."""
    untestable: dict[Scale, str] = Field(default_factory=dict)
    """Why it cannot be tested at a scale."""
    headline: bool = False
    """Whether it is one of the questions on the overview of all papers."""

    @model_validator(mode="after")
    def _sides(self) -> "Claim":
        if self.right == ():
            raise ValueError(f"the claim {self.text!r} has no right side. Name at least one row.")
        return self

    @property
    def rights(self) -> tuple[str | float, ...]:
        """The right side of each difference."""
        return self.right if isinstance(self.right, tuple) else (self.right,)

    @property
    def sides(self) -> list[str]:
        """All rows and cells that it compares."""
        return [
            side for side in (self.left, *self.rights, *(self.than or ())) if isinstance(side, str)
        ]


class Multiverse(_SpecModel):
    """Differences of rows over readings, metrics and columns, for a map of where a claim holds."""

    text: str = Field(min_length=1)
    """The claim in a sentence."""
    pairs: tuple[tuple[str, str], ...] = Field(min_length=1)
    """Rows to compare: the claimed one, and its rival under the same reading."""
    metrics: dict[str, str] = Field(min_length=1)
    """Metrics by a label, which may be empty; shares, of which higher is better."""
    without: tuple[str, ...] = ()
    """Columns to leave out."""


class ScaleConfig(_SpecModel):
    """Settings shared by all cells of a scale."""

    about: _About = ""
    """Differences from the paper, in a sentence or two."""
    seeds: int = Field(3, ge=1)
    """Number of seeds, from 0."""
    run: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run, shared by all cells."""


@dataclass(frozen=True)
class Cell:
    """A cell of the table at one scale.

    Attributes:
        runs: one run per seed; empty if the cell cannot be run.
        untestable: the reason for that.
    """

    row: Row
    column: Column
    runs: tuple[RunConfig, ...]
    untestable: str = ""

    @property
    def name(self) -> str:
        """Its name in claims and `--only`."""
        return f"{self.row.name}{AT}{self.column.name}"

    @property
    def published(self) -> tuple[float, float | None] | None:
        """The published mean and, if known, standard deviation."""
        found = self.row.published.get(self.column.name)
        if found is None or isinstance(found, tuple):
            return found
        return found, None


class Reproduction(_SpecModel):
    """One published table or figure."""

    title: str = Field(min_length=1)
    """The content in a line."""
    system: System
    """The paper: a key of `SYSTEMS` in `fedloom_papers.shipped`."""
    place: str
    """Its place in the paper, such as `Table VI`, or `Section V-A` for statements without one."""
    about: _About = ""
    """Notes for the reader, such as what the paper leaves open."""
    metric: str = "accuracy"
    """The metric of a cell: see `fedloom.report.metrics`."""
    unit: _Unit = "%"
    """The unit of published and shown numbers, such as % for shares or MB for bytes."""
    better: Literal["higher", "lower"] = "higher"
    """Whether higher or lower values are better."""
    across: str = ""
    """The quantity that columns vary."""
    alone: str = ""
    """The row of owners that train alone, shown beside each verdict."""
    oracle: str = ""
    """A row that bounds the possible gain, such as training on all rows, shown beside each verdict.
    """
    diagnoses: tuple[str, ...] = ()
    """Metrics of the claimed row that are shown beside each verdict, such as the accuracy of its
    discriminator.
    """
    pictures: tuple[str, ...] = ()
    """Pictures to draw. curves: the metric by iteration. bytes: the metric by bytes sent. columns:
    rows as lines over the columns' values. bars: rows side by side. partition: rows of each class
    at each client. mixing: the weights with which clients mix each other's models.
    """
    rows: tuple[Row, ...] = Field(min_length=1)
    columns: tuple[Column, ...] = Field(min_length=1)
    claims: tuple[Claim, ...] = ()
    multiverse: tuple[Multiverse, ...] = ()
    """Maps of where the paper's headline claim holds."""
    small: ScaleConfig
    paper: ScaleConfig

    @property
    def measured(self) -> RunMetric:
        """The metric as a value."""
        return RunMetric.parse(self.metric)

    @model_validator(mode="after")
    def _consistent(self) -> "Reproduction":
        rows, columns = [r.name for r in self.rows], [c.name for c in self.columns]
        for kind, names in (("row", rows), ("column", columns)):
            if twice := sorted({n for n in names if names.count(n) > 1}):
                raise ValueError(f"two {kind}s have the name {twice[0]!r}. Rename one.")
        for row in self.rows:
            if unknown := sorted(row.published.keys() - {*columns}):
                raise ValueError(
                    f"{row.name} has a published number for the unknown column {unknown[0]!r}"
                )
        for claim in self.claims:
            for side in claim.sides:
                of, _, at = side.partition(AT)
                if of not in rows or (at and at not in columns):
                    raise ValueError(
                        f"the claim {claim.text!r} names the unknown row or cell {side!r}"
                    )
            if unknown := sorted({*(claim.columns or ())} - {*columns}):
                raise ValueError(
                    f"the claim {claim.text!r} names the unknown column {unknown[0]!r}"
                )
        for side in (row for one in self.multiverse for pair in one.pairs for row in pair):
            if side not in rows:
                raise ValueError(
                    f"multiverse names the unknown row {side!r}. Valid rows are {', '.join(rows)}."
                )
        for kind, named in (("alone", self.alone), ("oracle", self.oracle)):
            if named and named not in rows:
                raise ValueError(
                    f"{kind} names the unknown row {named!r}. Valid rows are {', '.join(rows)}."
                )
        if unknown := sorted({*self.pictures} - {*PICTURES}):
            raise ValueError(
                f"unknown picture {unknown[0]!r}. Valid pictures are {', '.join(PICTURES)}."
            )
        if "columns" in self.pictures and any(c.value is None for c in self.columns):
            raise ValueError("the picture 'columns' needs a value in each column")
        return self

    @property
    def names(self) -> list[str]:
        """The names of all rows, columns and cells."""
        every = (
            name for row in self.rows for column in self.columns for name in _called(row, column)
        )
        return [*dict.fromkeys(every)]

    def scale(self, scale: Scale) -> ScaleConfig:
        """The settings of a scale."""
        return self.small if scale == "small" else self.paper

    def cells(
        self,
        scale: Scale,
        seeds: int | None = None,
        only: Sequence[str] = (),
        change: Mapping[str, Any] | None = None,
    ) -> Iterator[Cell]:
        """The table at a scale, row by row.

        Args:
            scale: small or paper.
            seeds: number of seeds, from 0; None for that of the scale.
            only: patterns of rows, columns or `row @ column`, with * and ?; empty for all.
            change: settings that override all others.

        Raises:
            ConfigError: the settings of a cell are invalid.
        """
        for row in self.rows:
            for column in self.columns:
                if only and not any(
                    matches_pattern(n, pattern) for pattern in only for n in _called(row, column)
                ):
                    continue
                why = row.untestable.get(scale) or column.untestable.get(scale) or ""
                runs = () if why else tuple(self._runs(row, column, scale, seeds, change or {}))
                yield Cell(row, column, runs, why)

    def settings(self, row: Row, column: Column, scale: Scale) -> dict[str, Any]:
        """The settings of a cell at a scale."""
        values: dict[str, Any] = {}
        for part in (
            self.scale(scale).run,
            column.run,
            getattr(column, scale),
            row.run,
            getattr(row, scale),
        ):
            values = merged(values, part)
        return values

    def data(self, row: Row, column: Column, scale: Scale) -> str:
        """The title of a cell's data set at a scale; of a manifest, by the first word of its file's
        name.
        """
        settings = self.settings(row, column, scale)
        if manifest := settings.get("columns", {}).get("manifest"):
            name = Path(manifest).stem.partition("-")[0]
            return MANIFESTS.get(name, name)
        name = settings.get("data", {}).get("name", "digits")
        return SOURCES[name].title.partition(",")[0] if name in SOURCES else name

    def _runs(
        self, row: Row, column: Column, scale: Scale, seeds: int | None, change: Mapping[str, Any]
    ) -> Iterator[RunConfig]:
        values = merged(self.settings(row, column, scale), change)
        for seed in range(seeds or self.scale(scale).seeds):
            try:
                yield check({"run": {**values, "seed": seed}}).run
            except ConfigError as error:
                raise ConfigError(
                    f"{row.name}{AT}{column.name} at the {scale} scale: {error}"
                ) from None


def _called(row: Row, column: Column) -> tuple[str, str, str]:
    return row.name, column.name, f"{row.name}{AT}{column.name}"


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern with * and ?, ignoring case."""
    return fnmatch.fnmatchcase(name.casefold(), pattern.casefold())


def read(name: str) -> Reproduction:
    """A published table or figure by its name, such as `fedal-table-6`.

    Raises:
        ConfigError: the name is unknown, or the file is invalid.
    """
    called = canonical(name)
    return parsed(shipped()[called], called)


def canonical(name: str) -> str:
    """The name of a shipped table or figure, whose number may be Roman.

    Raises:
        ConfigError: the name is unknown.
    """
    known = shipped()
    plain = re.sub(r"-([ivxl]+)$", lambda number: f"-{_arabic(number[1])}", name.casefold())
    if plain in known:
        return plain
    if Path(name).is_dir():
        raise ConfigError(
            f"{name} is a folder. Name a .toml file, or a name from: fedloom list reproductions"
        )
    hint = did_you_mean(plain, get_close_matches(plain, known, n=1))
    raise ConfigError(
        f"unknown table or figure {name!r}.{hint} List all with: fedloom list reproductions"
    )


def _arabic(roman: str) -> int:
    """`vi` is 6."""
    digits = [{"i": 1, "v": 5, "x": 10, "l": 50}[letter] for letter in roman]
    return sum(
        -one if one < after else one for one, after in zip(digits, [*digits[1:], 0], strict=True)
    )


def own_file(path: str) -> Reproduction:
    """A file of the user's.

    Raises:
        ConfigError: the file is invalid, or it names code and is outside the working folder.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    with suppress(tomllib.TOMLDecodeError):
        refuse_foreign_code(tomllib.loads(text), Path(path), None)
    return parsed(text, path)


def parsed(text: str, where: str) -> Reproduction:
    """The text of a file.

    Raises:
        ConfigError: the file is invalid; the message lists all problems.
    """
    try:
        return Reproduction(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{where}: {p}" for p in problems(error, Reproduction))
        ) from None
