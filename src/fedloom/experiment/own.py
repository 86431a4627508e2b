"""`[data.form]`: runs whose parties have rows of their own, which nobody else ever sees: what is known of them all the
same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedloom.data.dataset import DatasetInfo
from fedloom.data.encoder import OneHot, RawNumber
from fedloom.data.schema import DataSchema
from fedloom.experiment.holdings import schema
from fedloom.experiment.matched import Matched


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ColumnConfig(_Section):
    """A column."""

    name: str = Field(min_length=1)
    """As in the header of each party's file."""
    words: tuple[str, ...] = ()
    """All words that it may hold; "?" stands for none. Without them it holds numbers."""


class FormConfig(_Section):
    """`[data.form]`: what the rows of all parties look like, where each has its own.

    Columns of numbers are scaled by the public rows, the same for all; without such, each party's by its own rows.
    """

    kind: Literal["table", "image"] = "table"
    """Rows of a table, or images."""
    columns: tuple[ColumnConfig, ...] = ()
    """What is learnt from, in order: names of columns of numbers, or tables of `name` and `words` (table)."""
    label: str = "label"
    """The column of the classes (table)."""
    classes: tuple[str, ...] = Field(min_length=2)
    """Their names, in order; those of the folders where images lie in such."""
    shape: tuple[int, int, int] | None = None
    """Channels, height and width (image)."""

    @field_validator("columns", mode="before")
    @classmethod
    def _short(cls, columns: Any) -> Any:
        """A bare name is a column of numbers."""
        if not isinstance(columns, list | tuple):
            return columns
        return [{"name": column} if isinstance(column, str) else column for column in columns]

    @model_validator(mode="after")
    def _whole(self) -> FormConfig:
        names = [column.name for column in self.columns]
        for what, listed in (("columns", names), ("classes", self.classes), *((c.name, c.words) for c in self.columns)):
            if len(set(listed)) < len(listed):
                raise ValueError(f"{what} must differ from each other: one stands there twice")
        if self.kind == "table" and (not names or self.label in names or self.shape is not None):
            raise ValueError("a table has columns, the label not among them, and no shape")
        if self.kind == "image" and (names or self.shape is None or self.shape[0] not in (1, 3) or min(self.shape) < 1):
            raise ValueError("images have a shape, such as [3, 32, 32] with 1 or 3 channels, and no columns")
        return self

    def form(self) -> DataSchema:
        """The same for those who read rows."""
        columns = tuple(OneHot(c.name, c.words) if c.words else RawNumber(c.name) for c in self.columns)
        return DataSchema(self.kind, self.classes, self.label, columns, self.shape or ())


@dataclass(frozen=True)
class Files:
    """What lies on this machine of a run's data, by whatever name the run calls it.

    Attributes:
        set: what the data set is called here, or its path; None for the run's own name.
        root: a folder with data sets.
        rows: of parties that have rows of their own: those of the party, or of the server, that is here.
        public: the rows that all of these hold.
        id: of rows that are matched: the column of the ids; None for what the run says.
        matched: which of these are whose; None where nothing was matched.
    """

    set: str | None = None
    root: str | None = None
    rows: Path | None = None
    public: Path | None = None
    id: str | None = None
    matched: Matched | None = None


@dataclass(frozen=True)
class Apart:
    """Each client has rows of its own, and nobody else knows anything of them: see `Holdings`.

    Attributes:
        public_rows: how many all hold.
        server: what the server's own rows come to, if it has some, and how many they are.
    """

    outline: DatasetInfo
    clients: int
    public_digest: str
    public_rows: int
    server: tuple[str, int] = ("", 0)

    @property
    def name(self) -> str:
        """What all parties call their data."""
        return self.outline.name

    @property
    def classes(self) -> tuple[str, ...]:
        """K names."""
        return self.outline.classes

    @property
    def known(self) -> DatasetInfo:
        """All but the rows."""
        return self.outline

    @property
    def labels(self) -> Mapping[str, list[np.ndarray]]:
        """None: each client is judged where its rows are."""
        return {}

    @property
    def own_chances(self) -> np.ndarray | None:
        """None: each client tells its own with its accuracy."""
        return None

    @property
    def common(self) -> str:
        """The form, and the rows that all hold."""
        return hashlib.sha256(f"{self.schema(0)}\n{self.public_digest}".encode()).hexdigest()

    @property
    def digest(self) -> str:
        """The same, and the server's rows."""
        return hashlib.sha256(f"{self.common}\n{self.server[0]}".encode()).hexdigest()

    def schema(self, party: int) -> dict[str, Any]:
        """The same for all."""
        form = self.outline
        return schema(form.kind, form.input_shape, form.classes, form.columns)

    def describe(self) -> dict[str, Any]:
        """How many rows all hold, and the server."""
        digest, rows = self.server
        return {
            "apart": self.clients,
            "public": self.public_rows,
            "public_sha256": self.public_digest,
            "server": rows,
            "server_sha256": digest or None,
        }
