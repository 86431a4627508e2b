"""`[data.form]`: what the rows of all parties look like where each has its own, which nobody else sees."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom.data.encoder import OneHot, RawNumber
from fedloom.data.schema import DataSchema
from fedloom.experiment.section import Section


class ColumnConfig(Section):
    """A column."""

    name: str = Field(min_length=1)
    """As in the header of each party's file."""
    words: tuple[str, ...] = ()
    """All words that it may hold; "?" stands for none. Without them it holds numbers."""


class FormConfig(Section):
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
