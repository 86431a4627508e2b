"""`[data.form]`: the schema of private rows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.data.encoder import OneHot, RawNumber
from fedloom.data.schema import DataSchema
from fedloom.experiment.section import Section


class ColumnConfig(Section):
    """A column."""

    name: str = Field(min_length=1)
    """Its name in the header of each party's file."""
    words: tuple[str, ...] = ()
    """All values of a categorical column; "?" is a missing value. Empty for a numeric column."""


class FormConfig(Section):
    """`[data.form]`: the schema of private rows, common to all parties.

    Numeric columns are standardised by the public rows, or without them by each party's own training rows.
    """

    kind: Literal["table", "image"] = "table"
    """Rows of a table, or images."""
    columns: tuple[ColumnConfig, ...] = ()
    """The input columns in order: names of numeric columns, or tables of `name` and `words` (table)."""
    label: str = "label"
    """Name of the label column (table)."""
    classes: tuple[str, ...] = Field(min_length=2)
    """Class names in order; for images in folders, the folders' names."""
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
    def _whole(self) -> FormConfig:
        names = [column.name for column in self.columns]
        for field, listed in (
            ("columns", names),
            ("classes", self.classes),
            *((c.name, c.words) for c in self.columns),
        ):
            if len(set(listed)) < len(listed):
                raise ValueError(f"{field} has a value twice: remove one")
        if self.kind == "table" and (not names or self.label in names or self.shape is not None):
            raise ValueError("a table needs columns without the label, and no shape")
        if self.kind == "image" and (names or self.shape is None or self.shape[0] not in (1, 3) or min(self.shape) < 1):
            raise ValueError("images need a shape with 1 or 3 channels, such as [3, 32, 32], and no columns")
        return self

    def form(self) -> DataSchema:
        """The schema for reading rows."""
        columns = tuple(OneHot(c.name, c.words) if c.words else RawNumber(c.name) for c in self.columns)
        return DataSchema(self.kind, self.classes, self.label, columns, self.shape or ())
