"""A vertical federation from one CSV or Parquet file for each party.

The parties' people are matched by ids (`Align`), and their rows divided into aligned, unaligned and
test rows (`split_parties`); each party's columns are then encoded by themselves. In a simulation
`from_files` does all of it; at a node, `PartyFile` reads the party's own file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn
from fedloom.data.hub import read_table, refuse_unknown_files
from fedloom.data.options import GUESS, DataOptions
from fedloom.data.presence import RowPresence, had
from fedloom.data.roles import labels_of, left_out, matches, unlabeled
from fedloom.data.tables import filled, strata_of, typed
from fedloom.data.vertical import PartyView, VerticalDataset, ranges, scale_of, table_view
from fedloom.data.vertical_split import split_parties

Align = Callable[[list[list[str]]], Sequence[np.ndarray]]
"""The ids of each party -> for each party (P,) its row numbers of the common people, in one order.
"""


@dataclass(frozen=True, eq=False)
class PartyFile:
    """The content of one party's file."""

    name: str
    """The stem of the file's name."""
    ids: list[str]
    """Of its n rows."""
    columns: dict[str, RawColumn]
    """By name, without ids and labels."""
    labels: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """(n,) int64 classes of the active party's rows, -1 where missing, or float64 numbers to
    predict, NaN where missing; empty for other parties.
    """
    classes: tuple[str, ...] = ()
    """Their names; () for numbers, and for other parties."""
    options: DataOptions = GUESS
    """How cells were read."""

    @classmethod
    def active(cls, file: Path, id: str, label: str, options: DataOptions = GUESS) -> "PartyFile":
        """The file of the active party; `OF_FILES` of the options apply. Raises DataError if it is
        invalid.
        """
        table = read_table(file, needed=[id, label], grammar=options.grammar)
        labels, classes = labels_of(table.pop(label), str(file), None, options)
        different = len(np.unique(labels[~unlabeled(labels)]))
        if different < 2:
            what = "2 classes, but its labels are" if classes else "2 different numbers, but has"
            raise DataError(
                f"Column {label!r} of {file} must have at least {what} {[*classes] or different}."
            )
        ids = table.pop(id).text
        return cls(file.stem, ids, _kept(table, options), labels, classes, options)

    @property
    def strata(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """(n,) int64 classes of the rows, or parts of the numbers' range, -1 where missing; and
        their names.
        """
        known = ~unlabeled(self.labels)
        parts = np.full(len(self.labels), -1, dtype=np.int64)
        parts[known], names = strata_of(self.labels[known], self.classes)
        return parts, names

    @classmethod
    def passive(cls, file: Path, id: str, label: str, options: DataOptions = GUESS) -> "PartyFile":
        """The file of a passive party; `OF_FILES` of the options apply. Raises DataError if it is
        invalid or has labels.
        """
        table = read_table(file, needed=[id], grammar=options.grammar)
        if label in table:
            raise DataError(
                f"Only the active party may have labels, but {file} has a column {label!r}; "
                "remove it."
            )
        ids = table.pop(id).text
        if not (kept := _kept(table, options)):
            raise DataError(
                f"keep and drop leave no column of {file}: correct them."
                if table
                else f"{file} has no column besides the ids; add some."
            )
        return cls(file.stem, ids, kept, options=options)

    def view(
        self,
        aligned: np.ndarray,
        unaligned: np.ndarray,
        test: np.ndarray,
        truth: np.ndarray | None,
        present: np.ndarray | None = None,
    ) -> PartyView:
        """The encoded columns of its aligned, unaligned and test rows, given by row numbers (n,),
        and whether it has each; a row that it lacks may have any number.
        """
        rows = np.concatenate([aligned, unaligned, test])
        kinds = {name: kind for name, kind in self.options.encode.items() if name in self.columns}
        columns = {
            name: (
                filled(column.words)
                if kinds.get(name, "number") != "number"
                else typed(name, column)
            )[rows]
            for name, column in self.columns.items()
        }
        parts = ranges(len(aligned), len(unaligned), len(test))
        return table_view(self.name, columns, *parts, truth, present, kinds, self.options.grammar)


OF_FILES = ("task", "drop", "keep", "missing_words", "decimal", "encode")
"""The settings of `DataOptions` that apply to parties' files."""


def _kept(table: dict[str, RawColumn], options: DataOptions) -> dict[str, RawColumn]:
    return {name: column for name, column in table.items() if not left_out(name, options)}


def from_files(
    files: Sequence[Path],
    *,
    id: str | Sequence[str],
    label: str,
    seed: int,
    align: Align,
    options: DataOptions = GUESS,
    aligned: int | None = None,
    test_fraction: float = 0.25,
    test_rows: int | None = None,
    validation: float = 0.0,
    anybody: bool = False,
    presence: RowPresence | None = None,
) -> VerticalDataset:
    """Read each party's CSV or Parquet file and match their people.

    Common people with a label are aligned or tested. All other rows are unaligned: two of three
    parties may have unaligned rows of a person that the third lacks, and unaligned rows of the
    first party are used without labels. A column is numeric if all its known values are numbers,
    else text. Each party's encoder is fitted on its aligned and unaligned rows.

    Args:
        files: one for each party, the active one first.
        id: the id column, one for all files or one for each.
        label: the label column, in the first file only; cells without a label are empty.
        seed: of the run.
        align: matches ids (`fedloom.data.alignment`), as they are in the files.
        options: how the files are read: `OF_FILES`.
        aligned: number of aligned people, drawn at random; None for all common people. The others
            are assigned in turn, each to one party as unaligned.
        test_fraction: the share of each class that is tested.
        test_rows: maximum number of test rows, a random sample; None keeps all.
        validation: see `fedloom.data.split.hold_out`.
        anybody: whether all people of the first file with a label are aligned or tested, though
            other files may lack them; otherwise only those that all files have.
        presence: which aligned and test people each party has, by the first party's ids; None for
            all.

    Raises:
        DataError: a file is invalid, ids do not match, or there are too few people.
    """
    # the files
    id_columns = [id] * len(files) if isinstance(id, str) else list(id)
    if len(files) < 2 or len(id_columns) != len(files):
        raise DataError(
            f"from_files needs at least 2 files, and one id or one for each, not {len(files)} "
            f"files and ids {id_columns}."
        )
    refuse_unknown_files(options.decimals, map(Path, files))
    held = [
        PartyFile.active(Path(files[0]), id_columns[0], label, options.of_file(Path(files[0]).name))
    ]
    held += [
        PartyFile.passive(Path(file), id_column, label, options.of_file(Path(file).name))
        for file, id_column in zip(files[1:], id_columns[1:], strict=True)
    ]
    _check_named(held, options)

    # `common`: for each party, (P,) its row of each of P people, -1 for one that it lacks. By
    # `anybody` these are all people of the first party, who may lack others
    ids, y, (parts, part_names) = [own.ids for own in held], held[0].labels, held[0].strata
    common = (
        [np.arange(len(y)), *(_found(ids[0], other, align) for other in ids[1:])]
        if anybody
        else _common(ids, align)
    )
    # `known`: the class, or part of a number's range, of each row of each party; -1 where unknown.
    # Other parties' rows have those of the same people at the first, which has all its own
    known = [np.full(len(words), -1, dtype=np.int64) for words in ids]
    for rows, numbers in zip(common, known, strict=True):
        numbers[rows[rows >= 0]] = parts[common[0][rows >= 0]]
    known[0] = parts
    split = split_parties(
        common,
        known,
        seed=seed,
        aligned=aligned,
        test_fraction=test_fraction,
        test_rows=test_rows,
        balanced=False,
        validation=validation,
    )

    # each party's columns, and which rows it has: by the rule of `presence`, whose keys are the
    # first party's ids, or by what it lacks in its file
    first_ids = np.array(ids[0], dtype=object)
    aligned_ids, test_ids = list(first_ids[split.aligned[0]]), list(first_ids[split.test[0]])
    views = []
    for m, own in enumerate(held):
        joint, rest, test = split.aligned[m], split.unaligned[m], split.test[m]
        present = had(presence, m, aligned_ids, len(rest), test_ids)
        if anybody:
            present = np.concatenate([joint, rest, test]) >= 0
        views.append(own.view(joint, rest, test, split.truth[m], present))

    # the labels as they were read; `split` has classes, or parts of a number's range
    labels, test_labels = y[split.aligned[0]], y[split.test[0]]
    target, range_parts = (0.0, 1.0), None
    if not held[0].classes:
        target, range_parts = scale_of(labels), (part_names, split.labels, split.test_labels)
    return VerticalDataset(
        Path(files[0]).stem,
        "table",
        held[0].classes,
        tuple(views),
        labels,
        test_labels,
        label,
        target,
        range_parts,
    )


def _check_named(held: Sequence[PartyFile], options: DataOptions) -> None:
    """Raise DataError if `keep` or `encode` names a column that no file has."""
    columns = [name for own in held for name in own.columns]
    for setting, names in (("keep", options.keep), ("encode", tuple(options.encode))):
        for name in names:
            if not any(matches(name, column) for column in columns):
                raise DataError(
                    f"data.{setting} names the column {name!r}, but the files have "
                    f"{columns[:20]} only."
                )


def _common(ids: Sequence[list[str]], align: Align) -> list[np.ndarray]:
    """For each party, (P,) its row numbers of the people that all have."""
    return _checked([np.asarray(rows) for rows in align(list(ids))], [len(words) for words in ids])


def _found(first: list[str], other: list[str], align: Align) -> np.ndarray:
    """(n,) another party's row number of each of the first one's people, -1 where it has none."""
    mine, theirs = _common([first, other], align)
    rows = np.full(len(first), -1, dtype=np.int64)
    rows[mine] = theirs
    return rows


def _checked(common: list[np.ndarray], sizes: list[int]) -> list[np.ndarray]:
    """An alignment's rows in the order of the first party's. Raises DataError if they
    are invalid.
    """
    fits = (
        len(common) == len(sizes)
        and len({rows.shape for rows in common}) == 1
        and common[0].ndim == 1
    )
    if fits and all(
        not len(rows)
        or (
            rows.dtype.kind in "iu"
            and rows.min() >= 0
            and len(np.unique(rows[rows < size])) == len(rows)  # distinct, and all below `size`
        )
        for rows, size in zip(common, sizes, strict=True)
    ):
        order = np.argsort(common[0])  # an alignment's own order may differ from run to run
        return [rows[order].astype(np.int64) for rows in common]
    raise DataError(
        f"An alignment must return equally many distinct row numbers below {sizes} for "
        f"{len(sizes)} parties, not {[rows.shape for rows in common]}."
    )
