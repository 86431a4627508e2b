"""`[columns]`: which party holds which columns, for vertical methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedloom.data.tables import read_csv
from fedloom.experiment.section import Section

CUT = ("unaligned", "held", "grid", "balanced", "ratio", "majority", "rare", "rare_rows")
"""Settings of splitting a data set, which do not apply to files and manifests."""


class ColumnsConfig(Section):
    """`[columns]`: a data set whose columns are split; or a CSV file for each party, here or at its node; or a manifest
    of images."""

    aligned: int | None = Field(None, ge=1)
    """Number of aligned rows, labelled at the active party; None for 200, or all that files have in common."""
    unaligned: int | None = Field(None, ge=0)
    """Number of unaligned rows of each party; None for all that remain."""
    held: int | None = Field(None, ge=1)
    """Number of column blocks, or image cells, at each party, from its own on; None for 2, or 1 at two parties."""
    grid: tuple[int, int] | None = None
    """Rows and columns of cells of an image; None for (2, 2) at four parties, else for one that fits."""
    balanced: bool | None = None
    """Whether aligned rows are balanced over classes; None: for images only."""
    ratio: float | tuple[float, ...] = 1.0
    """Γ: ratio of unaligned rows of a majority class to those of another class; one value, or one for each party."""
    majority: int = Field(1, ge=1)
    """Number of majority classes of a party. With two classes it is the first one."""
    rare: tuple[int, ...] = ()
    """Indices of the classes that are rare among the aligned rows."""
    rare_rows: int = Field(0, ge=0)
    """Number of aligned rows of each rare class: 0 for zero-shot, a few for few-shot."""
    files: tuple[str, ...] = ()
    """CSV file of each party, the active party's first; instead of `data.name`."""
    id: str | tuple[str, ...] | None = None
    """Id column for aligning rows: one name for all files, or one for each."""
    label: str | None = None
    """Label column of the active party's file."""
    align: Literal["plain", "openmined"] | None = None
    """How ids are aligned: in plain text, or by private set intersection (extra `psi`). None: plain for files on this
    machine, private for nodes."""
    own: bool = False
    """Whether files are private: the active party's at the coordinator, the others at nodes. Then `id` is the active
    party's column, and the default of nodes (net)."""
    manifest: str | None = None
    """CSV file that lists images: sample_id, party, view, path, label; instead of `data.name`."""
    size: int = Field(32, ge=1)
    """Side length in pixels of the manifest's images."""

    @field_validator("files", "manifest")
    @classmethod
    def _whole(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Make paths absolute, as the config may be read from another folder."""
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
        """Whether a setting differs from its default; a saved config contains all settings."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def own_data(self) -> bool:
        """Whether the data comes from files, here or at nodes."""
        return bool(self.files or self.manifest or self.own)

    @property
    def backend(self) -> Literal["plain", "openmined"]:
        """How ids are aligned."""
        return self.align or ("openmined" if self.own else "plain")

    def number(self) -> int | None:
        """The number of parties of the files or manifest; None for a data set.

        Raises:
            DataError: the manifest can't be read.
        """
        if self.manifest:
            return len(set(read_csv(Path(self.manifest), needed=["party"])["party"]))
        return len(self.files) or None


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())
