"""`[columns]`: which party holds which columns, for vertical methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedloom.data.tables import read_csv
from fedloom.experiment.section import Section

CUT = ("unaligned", "held", "grid", "balanced", "ratio", "majority", "rare", "rare_rows")
"""Settings of how a known data set is cut, which mean nothing where the parties' own data is read."""


class ColumnsConfig(Section):
    """`[columns]`: a known data set cut into columns; or each party's own CSV file; or a manifest of images; or files
    that lie where the parties are."""

    aligned: int | None = Field(None, ge=1)
    """Rows that all parties hold, labelled at the first one; None for 200, or all that files have in common."""
    unaligned: int | None = Field(None, ge=0)
    """Further rows of each party, which no other has; None for as many as there are."""
    held: int | None = Field(None, ge=1)
    """Blocks of columns, or cells of the picture, at each party, beginning with its own; None for 2, or 1 of two."""
    grid: tuple[int, int] | None = None
    """Rows and columns of cells that a picture is cut into; None for (2, 2) at four parties, or what fits."""
    balanced: bool | None = None
    """Whether the aligned rows are drawn evenly over the classes; None: those of pictures are."""
    ratio: float | tuple[float, ...] = 1.0
    """Γ: how many times as many unaligned rows a party has of a majority class as of another; one, or each party's."""
    majority: int = Field(1, ge=1)
    """How many classes are a party's majority classes. With two classes it is the first one."""
    rare: tuple[int, ...] = ()
    """Classes that are rare among the aligned rows, by number."""
    rare_rows: int = Field(0, ge=0)
    """So many aligned rows there are of each of these: 0 for zero-shot, a few for few-shot."""
    files: tuple[str, ...] = ()
    """Each party's CSV file, the first that of the party with the labels; instead of `data.name`."""
    id: str | tuple[str, ...] | None = None
    """The column of ids by which rows are matched: one name for all files, or one for each."""
    label: str | None = None
    """The column of the first file that is to be predicted."""
    align: Literal["plain", "openmined"] | None = None
    """How ids are matched: in the open, or by private set intersection (extra `psi`). None: files on this machine in
    the open, parties at nodes privately."""
    own: bool = False
    """Whether each party has a file of its own where it is: the one with the labels at the coordinator, the others at
    nodes. Then `id` is the first one's, and that of nodes which name none (engine net)."""
    manifest: str | None = None
    """A CSV file that lists pictures: sample_id, party, view, path, label; instead of `data.name`."""
    size: int = Field(32, ge=1)
    """Pixels a side of the manifest's pictures."""

    @field_validator("files", "manifest")
    @classmethod
    def _whole(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Paths that mean the same file wherever the config is read again."""
        if isinstance(value, tuple):
            return tuple(_absolute(path) for path in value)
        return _absolute(value) if value else value

    @model_validator(mode="after")
    def _sources(self) -> ColumnsConfig:
        if self.files and self.manifest:
            raise ValueError("give files or a manifest, not both")
        if self.own and (self.files or self.manifest):
            raise ValueError("with own each party names its file where it is: leave files and manifest out")
        if (self.files or self.own) and (self.id is None or self.label is None):
            raise ValueError("files need id, the column that matches rows, and label, the one to predict")
        if not (self.files or self.own) and (self.id is not None or self.label is not None):
            raise ValueError("id and label name columns of files: name these too")
        if self.own and isinstance(self.id, tuple):
            raise ValueError("with own id is the column of the first party's file: a node names its own in node.toml")
        if isinstance(self.id, tuple) and len(self.id) != len(self.files):
            raise ValueError(f"id must be one name, or one for each of {len(self.files)} files, not {len(self.id)}")
        if self.own_data and (useless := [name for name in CUT if self._differs(name)]):
            source = "a manifest" if self.manifest else "files"
            raise ValueError(
                f"only where a known data set is cut is there a choice of {', '.join(useless)}: with {source}, leave "
                f"{'it' if len(useless) == 1 else 'them'} away"
            )
        return self

    def _differs(self, name: str) -> bool:
        """Whether a setting is not as it usually is; a resolved config writes all of them out."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def own_data(self) -> bool:
        """Whether the data comes from files, here or at the parties."""
        return bool(self.files or self.manifest or self.own)

    @property
    def backend(self) -> Literal["plain", "openmined"]:
        """How ids are matched."""
        return self.align or ("openmined" if self.own else "plain")

    def number(self) -> int | None:
        """How many parties the files or the manifest have; None where a known data set is cut.

        Raises:
            DataError: the manifest can't be read.
        """
        if self.manifest:
            return len(set(read_csv(Path(self.manifest), needed=["party"])["party"]))
        return len(self.files) or None


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())
