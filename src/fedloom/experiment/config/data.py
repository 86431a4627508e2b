"""`[data]`: the section of a config on the data set and its partition. It needs no PyTorch."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.core.objects import is_object
from fedloom.core.rng import stream
from fedloom.data.dataset import Fill
from fedloom.data.encoder import OneHot, RawNumber
from fedloom.data.grammar import MISSING_WORDS, Decimal
from fedloom.data.options import DataOptions, Encoding, Missing, MissingColumns, Task
from fedloom.data.options import Kind as ColumnKind
from fedloom.data.schema import DataSchema
from fedloom.data.sources import is_path
from fedloom.data.text_and_dates import DateParts, HashedText
from fedloom.experiment.config.section import Section

PARTITION_SETTINGS = ("root", "partition", "options", "own_test_rows", "validation")
"""Settings that apply only if a data set is partitioned."""


def _check_label_scale(scale: tuple[float, float] | None) -> None:
    if scale is not None and not (math.isfinite(scale[0]) and 0 < scale[1] < 1e30):
        raise ValueError("label_scale must be a mean and an s.d. above 0, such as [50, 20]")


class ColumnConfig(Section):
    """A column."""

    name: str = Field(min_length=1)
    """Its name in the header of each party's file."""
    categories: tuple[str, ...] = ()
    """All values of a categorical column; "?" is a missing value. Empty for a numeric column."""
    encode: Encoding | None = None
    """"text" or "date" for a column of texts or dates, which a fixed encoder reads; None for
    others.
    """

    @model_validator(mode="after")
    def _one_kind(self) -> "ColumnConfig":
        if self.categories and self.encode:
            raise ValueError(f"column {self.name!r} has categories and encode: leave one out")
        return self

    def rule(self, gaps: bool, indicator: bool) -> RawNumber | OneHot | HashedText | DateParts:
        """How its values become numbers."""
        if self.encode == "text":
            return HashedText(self.name)
        if self.encode == "date":
            return DateParts(self.name, gaps=gaps, indicator=indicator)
        return (
            OneHot(self.name, self.categories)
            if self.categories
            else RawNumber(self.name, gaps, indicator)
        )


class SchemaConfig(Section):
    """`[data.row_schema]`: the schema of private rows, common to all parties.

    Numeric columns are standardized by `scale`, or else by the public rows, or else by each party's
    own training rows.
    """

    kind: Literal["table", "image"] = "table"
    """Rows of a table, or images."""
    columns: tuple[ColumnConfig, ...] = ()
    """The input columns in order: names of numeric columns, or tables of `name` and `categories`,
    or of `name` and `encode` (table).
    """
    scale: dict[str, tuple[float, float]] | None = None
    """Mean and s.d. of every numeric column, and of the years of every column of dates (2021.5 is
    July 2021), agreed
    beforehand: rows are scaled by them and cut off at 5 s.d., and a missing number is the mean.
        Differential privacy
    needs it, or public rows: one row moves the mean of a party's own (table).
    """
    label: str = "label"
    """Name of the label column (table)."""
    classes: tuple[str, ...] = ()
    """Class names in order; for images in folders, the folders' names. Empty for a number to
    predict.
    """
    label_scale: tuple[float, float] | None = None
    """Mean and s.d. by which a number to predict is standardized, agreed beforehand, in its unit;
    for classes none.
    """
    shape: tuple[int, int, int] | None = None
    """Channels, height and width (image)."""

    @field_validator("columns", mode="before")
    @classmethod
    def _short(cls, columns: Any) -> Any:
        """A bare name is a numeric column."""
        if not isinstance(columns, list | tuple):
            return columns
        return [{"name": column} if isinstance(column, str) else column for column in columns]

    @model_validator(mode="after")
    def _whole(self) -> "SchemaConfig":
        # no name, class or category twice
        names = [column.name for column in self.columns]
        for field, listed in (
            ("columns", names),
            ("classes", self.classes),
            *((c.name, c.categories) for c in self.columns),
        ):
            if len(set(listed)) < len(listed):
                raise ValueError(f"{field} has a duplicate value: remove it")

        # the label: classes or a scale (a finite mean, an s.d. above 0), not both and not neither
        if len(self.classes) == 1 or bool(self.classes) == (self.label_scale is not None):
            raise ValueError(
                "name at least two classes, or give label_scale = [mean, s.d.] of a number to "
                "predict"
            )
        _check_label_scale(self.label_scale)
        if self.kind == "image" and not self.classes:
            raise ValueError(
                "kind image needs classes: numbers of pictures are for data sets on one machine"
            )

        # a table has columns, of which the agreed scale covers all that are numbers
        if self.kind == "table" and (not names or self.label in names or self.shape is not None):
            raise ValueError(
                "kind table needs columns, which must not include the label, and no shape"
            )
        numeric = {
            column.name
            for column in self.columns
            if not column.categories and column.encode != "text"  # a date counts: it has a year
        }
        # 1e30 is also the largest number that a column of a table may have
        if self.scale is not None and (
            self.scale.keys() != numeric
            or not all(math.isfinite(mean) and 0 < sd < 1e30 for mean, sd in self.scale.values())
        ):
            raise ValueError(
                "scale gives the mean and s.d. of each column of numbers or dates and of no "
                "other, such as { age = [50, 20], visited = [2021.5, 2] }"
            )

        # an image has a shape, and nothing of a table
        if self.kind == "image" and (
            names or self.shape is None or self.shape[0] not in (1, 3) or min(self.shape) < 1
        ):
            raise ValueError(
                "kind image needs a shape with 1 or 3 channels, such as [3, 32, 32], and no columns"
            )
        return self

    def build(
        self, missing: Missing = "refuse", missing_columns: MissingColumns = "refuse"
    ) -> DataSchema:
        """The schema for reading rows, with `data.missing` and `data.missing_columns`."""
        gaps, indicator = missing != "refuse", missing == "indicator"
        columns = tuple(column.rule(gaps, indicator) for column in self.columns)
        fill: Fill = "most-frequent" if missing == "most-frequent" else "median" if gaps else ""
        return DataSchema(
            self.kind,
            self.classes,
            self.label,
            columns,
            self.shape or (),
            fill,
            self.scale,
            self.label_scale or (0.0, 1.0),
            missing_columns == "allow",
        )


class DataConfig(Section):
    """`[data]`: the data set and its partition."""

    name: str = "digits"
    """A name from `fedloom list datasets`, or the path of a folder, Parquet or CSV file."""
    root: str | None = None
    """Folder of data sets in the hub's layout. None: the environment variable FEDLOOM_DATA, then
    the hub.
    """
    clients: int = Field(10, ge=1, le=100_000)
    """Number of clients, or of parties in the vertical setting (default 4)."""
    partition: str = "dirichlet"
    """A name from `fedloom list partitions`, or `package.module:name`: see
    `fedloom.data.flower.partition_at`.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the partition, such as alpha."""
    unseen: Annotated[float, Field(ge=0, lt=1)] | tuple[str, ...] = 0.0
    """Share of unseen clients, drawn from the seed, or names of owners: they take part in no round
    and are only evaluated.
    """
    server_rows: int | Literal["auto"] | None = None
    """Number of labeled training rows at the server, the same rows for every seed. "auto": a
    quarter, at most 10,000.
    None: "auto" if a method of the experiment needs them, otherwise 0.
    """
    public_rows: int | None = Field(None, ge=0)
    """Number of public rows; None for a fifth of the training rows, at most 1,000, if a method of
    the experiment learns from them, otherwise 0.
    """
    test_fraction: float | None = Field(None, ge=0, lt=1)
    """Share of test rows, for data sets without an official test split. 0 uses all rows, and
    measures on these same rows; only methods that describe rows, such as regressions, allow it.
    None: 0 if all methods of the experiment do and nothing else asks for test rows, otherwise 0.25.
    """
    test_rows: int | None = Field(None, ge=1)
    """Maximum number of test rows; None for all."""
    validation: float = Field(0.0, ge=0, lt=1)
    """Share of the training rows to test on in place of the test rows, which are then used for
    nothing: to compare settings. 0 tests on the test rows.
    """
    own_test_rows: int | None = Field(None, ge=0)
    """Maximum number of test rows of each client: its owner's own, or else rows in its class mix.
    None: all of its owner, or else 100.
    """
    label: str | None = None
    """Column to predict, of a file; None: guessed, with a warning."""
    group: str | None = None
    """Column of the rows' owners (hospital, person, device), of a file: each owner is a client."""
    id: str | None = None
    """Column that names each row, of a file; never a feature."""
    drop: tuple[str, ...] = ()
    """Columns of a file that are no features; "*" stands for any text."""
    keep: tuple[str, ...] = ()
    """The only columns of a file that are features; empty for all. A column named in full is kept
    even if it looks like an identifier.
    """
    encode: dict[str, ColumnKind] = Field(default_factory=dict)
    """Columns of a file whose kind is not guessed: "number", "category", "text" or "date". Texts
    are hashed, dates become years and points of circles, by encoders that no data decides.
    """
    missing_columns: MissingColumns = "refuse"
    """Whether owners may have different columns. "allow": what an owner lacks is missing there, and
    `missing` is "indicator" if it is not set.
    """
    missing: Missing = "refuse"
    """The replacement of a missing number in a file: none, so that it is refused; the median; the
    most frequent one; or the median and a column that marks it. It is fitted on public rows, or on
    each owner's own training rows.
    """
    test: str | tuple[str, ...] | None = None
    """Test rows of a file: a share (as test_fraction), the column that says train or test, or names
    of owners.
    """
    task: Task | None = None
    """What the label of a file is: "classes" if whole numbers are names of classes, however many;
    "number" for a number to predict; None to guess.
    """
    label_scale: tuple[float, float] | None = None
    """Mean and s.d. by which a number to predict is standardized, agreed beforehand, in its unit;
    None takes those of the server's rows, or of all training rows, as only a simulation can.
    """
    missing_words: tuple[str, ...] = MISSING_WORDS
    """Words of a file that stand for a missing value, in every column; an empty cell always does.
    """
    decimal: Decimal | dict[str, Decimal] = "."
    """The sign before the decimals of a number, "." or ","; or that of files by name, such as {
    "lab.csv" = "," }. Other files have a point.
    """
    row_schema: SchemaConfig | None = None
    """The schema of private rows, where each party's rows stay at its node."""

    @model_validator(mode="before")
    @classmethod
    def _file_defaults(cls, values: Any) -> Any:
        """The default partition of a file: each owner is a client, and rows without owners are
        assigned at random.
        """
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if isinstance(values.get("test"), int | float):
            if values.get("test_fraction", values["test"]) != values["test"]:
                raise ValueError("set test or test_fraction, not both")
            values["test_fraction"] = values.pop("test")
        if isinstance(values.get("unseen"), str):
            values["unseen"] = [values["unseen"]]
        if values.get("missing_columns") == "allow":
            values.setdefault("missing", "indicator")
        if (
            "partition" not in values
            and not values.get("options")
            and values.get("row_schema") is None
        ):
            if values.get("group"):
                values["partition"] = "natural"
            elif (
                is_path(str(values.get("name", "digits")))
                and Path(str(values["name"])).expanduser().exists()
            ):
                values["partition"] = "iid"
        return values

    @field_validator("server_rows", mode="before")
    @classmethod
    def _check_server_rows(cls, server: Any) -> Any:
        if server not in ("auto", None) and (type(server) is not int or server < 0):
            raise ValueError('must be a number of rows of at least 0, or "auto"')
        return server

    @model_validator(mode="after")
    def _check_unseen(self) -> "DataConfig":
        count = self._number_unseen
        if self.unseen and not 0 < count < self.clients:
            problem = "leaves no clients to train" if count else "is less than one client"
            share = f"{self.unseen:g}" if isinstance(self.unseen, float) else list(self.unseen)
            raise ValueError(
                f"unseen = {share} of {self.clients} clients {problem}: change unseen or clients"
            )
        if self.group is None and not isinstance(self.unseen, float) and not is_object(self.name):
            raise ValueError("unseen names owners: name their column as group, or give a share")
        return self

    @model_validator(mode="after")
    def _check_target(self) -> "DataConfig":
        _check_label_scale(self.label_scale)
        if self.label_scale is not None and self.task == "classes":
            raise ValueError(
                'label_scale is for a number to predict: leave it out, or set task to "number"'
            )
        if self.own and (self.label_scale is not None or self.task is not None):
            raise ValueError(
                "task and label_scale do not apply with row_schema, which has classes or "
                "label_scale"
            )
        return self

    @model_validator(mode="after")
    def _check_columns(self) -> "DataConfig":
        if self.missing_columns == "allow" and self.missing == "refuse":
            raise ValueError(
                'missing_columns = "allow" makes missing values: set missing to "indicator", or '
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_private(self) -> "DataConfig":
        defaults = {
            k: f.get_default(call_default_factory=True) for k, f in type(self).model_fields.items()
        }
        unused = [name for name in PARTITION_SETTINGS if getattr(self, name) != defaults[name]]
        if self.own and unused:
            raise ValueError(
                f"{unused[0]} does not apply with row_schema, as nothing is partitioned: leave "
                "it out"
            )
        given = [
            name
            for name in ("label", "group", "id", "drop", "keep", "encode", "test")
            if getattr(self, name)
        ]
        if self.own and given:
            where = (
                "row_schema names it"
                if given[0] in ("label", "encode")
                else "each node's owner sets it in node.toml"
            )
            raise ValueError(f"{given[0]} does not apply with row_schema: leave it out, as {where}")
        if self.own and self.server_rows not in (None, 0, "auto"):
            raise ValueError(
                "with row_schema, the server's rows come from a file: set server_rows to "
                '"auto", or leave it out'
            )
        return self

    @property
    def own(self) -> bool:
        """Whether each party's rows are private."""
        return self.row_schema is not None

    def rows_at_server(self, training: int) -> int:
        """The number of rows at the server, given the number of training rows."""
        return min(10_000, training // 4) if self.server_rows == "auto" else self.server_rows or 0

    @property
    def test_share(self) -> float:
        """The share of test rows, where the data has no official ones."""
        return 0.25 if self.test_fraction is None else self.test_fraction

    @property
    def columns(self) -> DataOptions:
        """How to read a file's columns."""
        names = self.unseen if isinstance(self.unseen, tuple) and not is_object(self.name) else ()
        return DataOptions(
            self.label,
            self.group,
            self.id,
            self.drop,
            self.keep,
            self.missing,
            self.test,
            names,
            self.task,
            self.missing_words,
            self.decimal,
            self.encode,
            self.missing_columns,
        )

    @property
    def _number_unseen(self) -> int:
        return (
            int(self.unseen * self.clients + 0.5)
            if isinstance(self.unseen, float)
            else len(self.unseen)
        )

    @property
    def training(self) -> int:
        """Number of training clients."""
        return self.clients - self._number_unseen

    def unseen_clients(self, seed: int) -> tuple[int, ...]:
        """Numbers of the unseen clients, ascending; the same for every method on this seed."""
        if isinstance(self.unseen, tuple):  # they are numbered last
            return tuple(range(self.training, self.clients))
        drawn = stream(seed, "unseen").choice(self.clients, self._number_unseen, replace=False)
        return tuple(sorted(drawn.tolist()))
