"""`[columns]`: who holds which columns of whom, for methods whose parties share people and not columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedloom.data.columns import Parties, simulate
from fedloom.errors import ConfigError

ALIGNED = 200


class ColumnsConfig(BaseModel):
    """`[columns]`: a known data set cut into columns; or each party's own CSV file; or a manifest of images."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    aligned: int | None = Field(None, ge=1)
    """People whom all parties hold, and whose labels the first one knows; None for 200, or all there are of files."""
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
    id: str | None = None
    """The column of the files by which people are matched."""
    label: str | None = None
    """The column of the first file that is to be predicted."""
    align: Literal["plain", "openmined"] = "plain"
    """How ids are matched: in the open on this machine, or by private set intersection (extra `psi`)."""
    manifest: str | None = None
    """A CSV file that lists pictures: sample_id, party, view, path, label; instead of `data.name`."""
    size: int = Field(32, ge=1)
    """Pixels a side of the manifest's pictures."""

    @model_validator(mode="after")
    def _sources(self) -> ColumnsConfig:
        if self.files and self.manifest:
            raise ValueError("give files or a manifest, not both")
        if self.files and (self.id is None or self.label is None):
            raise ValueError("files need id, the column that matches people, and label, the one to predict")
        if not self.files and (self.id is not None or self.label is not None):
            raise ValueError("id and label name columns of files: name these too")
        return self

    @property
    def own_data(self) -> bool:
        """Whether the data comes from files that this section names."""
        return bool(self.files or self.manifest)

    def parties(
        self,
        name: str,
        *,
        parties: int,
        seed: int,
        root: str | None,
        test_fraction: float,
        test_rows: int | None,
        pooled: bool = False,
    ) -> Parties:
        """What each party holds.

        Args:
            name: of the data set that is cut, where there are no files.
            parties: how many share it.
            seed: of all that is drawn by chance.
            root: of data sets.
            test_fraction, test_rows: as in `[data]`.
            pooled: whether every row of every party counts as aligned and labelled.

        Raises:
            ConfigError, DataError: it can't be had.
        """
        if pooled and self.own_data:
            raise ConfigError(
                "columns: only where a known data set is cut are all rows known in full; leave pooled away"
            )
        if self.files:
            from fedloom.data.party_files import from_files

            return from_files(
                [Path(file) for file in self.files],
                id=self.id or "",
                label=self.label or "",
                seed=seed,
                test_fraction=test_fraction,
                test_rows=test_rows,
                aligned=self.aligned,
                align=self._align,
            )
        if self.manifest:
            from fedloom.data.manifest import manifest

            return manifest(
                Path(self.manifest),
                seed=seed,
                aligned=self.aligned,
                test_fraction=test_fraction,
                test_rows=test_rows,
                size=self.size,
            )
        return simulate(
            name,
            parties=parties,
            seed=seed,
            root=Path(root) if root else None,
            aligned=self.aligned or ALIGNED,
            unaligned=self.unaligned,
            held=self.held,
            grid=self.grid,
            balanced=self.balanced,
            ratio=self.ratio,
            majority=self.majority,
            rare=self.rare,
            rare_rows=self.rare_rows,
            test_fraction=test_fraction,
            test_rows=test_rows,
            everything=pooled,
        )

    def _align(self, ids: Sequence[Sequence[str | int]]) -> list[np.ndarray]:
        from fedloom.data.alignment import align

        return list(align(ids, backend=self.align).aligned)
