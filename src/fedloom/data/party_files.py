"""A vertical federation from one CSV file for each party."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.tables import class_numbers, column_values, read_csv
from fedloom.data.vertical import PartyView, VerticalDataset, ranges, table_view
from fedloom.data.vertical_split import split_parties

Align = Callable[[list[list[str]]], Sequence[np.ndarray]]
"""The ids of each party -> for each party (P,) its row numbers of the people that all have, in one order."""


@dataclass(frozen=True, eq=False)
class PartyFile:
    """The content of one party's file.

    Attributes:
        name: the stem of the file's name.
        ids: of its n rows.
        columns: name -> the text of each row; without ids and labels.
        labels: (n,) int64 classes of the active party's rows, -1 where missing; empty for other parties.
        classes: their names; empty for other parties.
    """

    name: str
    ids: list[str]
    columns: dict[str, list[str]]
    labels: np.ndarray
    classes: tuple[str, ...] = ()

    @classmethod
    def active(cls, file: Path, id: str, label: str) -> PartyFile:
        """The file of the party with the labels. Raises DataError if it can't be used."""
        table = read_csv(file, needed=[id, label])
        labels, classes = class_numbers(table.pop(label), f"Column {label!r} of {file}")
        return cls(file.stem, table.pop(id), table, labels, classes)

    @classmethod
    def passive(cls, file: Path, id: str, label: str) -> PartyFile:
        """The file of another party. Raises DataError if it can't be used, or has labels too."""
        table = read_csv(file, needed=[id])
        if label in table:
            raise DataError(f"Only the first party may have labels, but {file} has a column {label!r} too; remove it.")
        return cls(file.stem, table.pop(id), table, np.empty(0, dtype=np.int64))

    def view(self, aligned: np.ndarray, unaligned: np.ndarray, test: np.ndarray, truth: np.ndarray | None) -> PartyView:
        """Its columns as numbers, of some of its rows by their numbers (n,)."""
        rows = np.concatenate([aligned, unaligned, test])
        columns = {name: column_values(words)[rows] for name, words in self.columns.items()}
        return table_view(self.name, columns, *ranges(len(aligned), len(unaligned), len(test)), truth)


def from_files(
    files: Sequence[Path],
    *,
    id: str | Sequence[str],
    label: str,
    seed: int,
    align: Align,
    aligned: int | None = None,
    test_fraction: float = 0.25,
    test_rows: int | None = None,
) -> VerticalDataset:
    """Read each party's CSV file and match their people.

    People whom all parties have and who have a label are aligned or tested. Any other row is an unaligned row of its
    party. So two of three parties may have unaligned rows of a person whom the third does not have; and unaligned rows
    of the first party are trained on without their labels, even if the file has them. A column holds numbers if all
    its known values can be read as numbers, else words. Each party's encoder is fitted on its
    aligned and unaligned rows.

    Args:
        files: one for each party, the active one first.
        id: the column of the ids, in all files or each.
        label: the column of the labels, in the first file only; empty where there is none.
        seed: of the run.
        align: matches ids (`fedloom.data.alignment`); it gets them as they stand in the files.
        aligned: how many people are aligned, drawn as they come; None: all that can be. Others are dealt in turn,
            each to one party as unaligned.
        test_fraction: the share of each class that is tested.
        test_rows: at most so many test rows, at random; None keeps all.

    Raises:
        DataError: a file can't be used, ids don't match, or the numbers can't be met.
    """
    keys = [id] * len(files) if isinstance(id, str) else list(id)
    if len(files) < 2 or len(keys) != len(files):
        raise DataError(
            f"from_files needs at least 2 files, and one id or one for each, not {len(files)} files and ids {keys}."
        )
    held = [PartyFile.active(Path(files[0]), keys[0], label)]
    held += [PartyFile.passive(Path(file), key, label) for file, key in zip(files[1:], keys[1:], strict=True)]
    ids, y, classes = [own.ids for own in held], held[0].labels, held[0].classes
    common = _checked([np.asarray(rows) for rows in align(ids)], [len(words) for words in ids])
    known = [np.full(len(words), -1, dtype=np.int64) for words in ids]
    for rows, numbers in zip(common, known, strict=True):
        numbers[rows] = y[common[0]]
    known[0] = y
    split = split_parties(
        common, known, seed=seed, aligned=aligned, test_fraction=test_fraction, test_rows=test_rows, balanced=False
    )
    views = []
    for party, own in enumerate(held):
        views.append(own.view(split.aligned[party], split.unaligned[party], split.test[party], split.truth[party]))
    return VerticalDataset(Path(files[0]).stem, "table", classes, tuple(views), split.labels, split.test_labels)


def _checked(common: list[np.ndarray], sizes: list[int]) -> list[np.ndarray]:
    """An alignment's rows in the order of the first party's. Raises DataError if they can't be right."""
    lengths = [rows.shape for rows in common]
    fit = len(common) == len(sizes) and len(set(lengths)) == 1 and all(rows.ndim == 1 for rows in common)
    fit = fit and all(rows.dtype.kind in "iu" or len(rows) == 0 for rows in common)
    if fit and all(
        len(np.unique(rows)) == len(rows) and (len(rows) == 0 or (rows.min() >= 0 and rows.max() < size))
        for rows, size in zip(common, sizes, strict=True)
    ):
        order = np.argsort(common[0])  # an alignment's own order may differ from run to run
        return [rows[order].astype(np.int64) for rows in common]
    raise DataError(
        f"An alignment must give each of {len(sizes)} parties equally many different row numbers, below {sizes}, but "
        f"it gave {lengths}."
    )
