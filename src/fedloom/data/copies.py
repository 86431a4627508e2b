"""Rows that are copies of one another, equal or equal but for rounding, told from people who happen
to be alike.

Two rows may be equal by chance, as two men of one age are in a table of age and sex. How many rows
would be equal to a row by chance is told by those that are nearly so: of h_k rows that differ from
it in k columns, h_k / e_k would differ in none if columns differ independently of each other, where
e_k sums the products of the odds of a difference over all sets of k columns. The largest of these
numbers is taken, over the nearest rows, as people come in kinds. Columns that are one in another
unit count once. The share of rows that have copies has the largest likelihood, and equal rows are
taken for copies if that is twice as probable as chance.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.data.tables import RawTable

FEWEST = 12
"""Different rows from which on "each row k times" is no chance."""
MOST_COLUMNS = 64
"""Columns that tell chance, at most."""
OTHERS = 1000
"""Other rows that tell chance, at most."""
SAME = 0.95
"""The correlation of ranks from which on two columns are one in another unit."""
SHELLS = 12
"""Columns in which nearly equal rows differ, at most."""
NEAR = 10
"""The nearest rows that tell chance, at least; others differ in kind."""
SURE = 0.5
"""The odds of chance against a copy with which equal rows are still copies."""
MANY_VALUES = 20
"""Different numbers from which on a column may be rounded."""
FULL = 99
"""The decimals of a number that is not rounded."""
LINE = 0.99
"""The correlation of a label and of another column that is a line of it, at least."""
SEARCHED, NEAREST, MOST_NEAR = 4, 0.06, 2000
"""Columns by which rounded copies are looked for; standard deviations between a number and its
rounded copy, at most; and rows among which a copy
is looked for.
"""
MOST_OF_ONE = 3
"""Different rows that may be one rounded row; more say that its numbers, such as 0, tell nobody."""
GAP = -1e9
"""What stands for a missing number."""
LARGEST = 5_000_000
"""Numbers of a table beyond which rounded copies are not looked for."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Which of n rows are equal.

    Attributes:
        equal: (n,) int64; rows of one value are equal to the bit.
        copies: (n,) int64; rows of one value are copies: see the module.
    """

    equal: np.ndarray
    copies: np.ndarray

    @property
    def any(self) -> bool:
        """Whether there are copies."""
        return len(np.unique(self.copies)) < len(self.copies)


def copies_of(x: np.ndarray, numbers: np.ndarray) -> Copies:
    """The copies among rows x (n, ...), without their labels; `numbers` (F,) says which columns
    have numbers that may be rounded, not codes of words.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(50, 4))
        >>> found = copies_of(np.concatenate([x, x[:5], x[5:9].round(2)]), np.ones(4, bool))
        >>> found.copies[50:].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    # candidates: the first of each set of equal rows that has several, and pairs (P, 2) of a row
    # and its rounded copy
    flat = x.reshape(len(x), -1)
    equal = _first_equal(flat)
    copies = equal.copy()
    distinct = np.unique(equal)
    pairs = _rounded(flat, numbers, distinct)
    repeated = np.unique(equal[equal != np.arange(len(equal))])
    if not len(repeated) and not len(pairs):
        return Copies(equal, copies)

    # how many rows would be equal to each by chance; to the coarser row of a pair, within half of
    # its last place or, if that is more, within what the two are apart
    judge = _Judge(flat, distinct)
    of_equal = judge.chance(repeated, np.zeros((len(repeated), len(judge.used))))
    fine, coarse = pairs.T
    apart = np.abs(judge.filled(flat[fine]) - judge.filled(flat[coarse]))
    of_pairs = judge.chance(coarse, np.maximum(judge.places(coarse), apart))

    # one entry for each row that has a candidate, as the share is one of rows
    sizes = np.bincount(equal, minlength=len(flat))
    share = _share(
        np.concatenate([np.repeat(of_equal, sizes[repeated]), np.repeat(of_pairs, 2)]), len(flat)
    )

    # rows that are equal by chance are no copies, each a number of its own; pairs are joined, also
    # by way of others, under the smaller number
    by_chance = np.isin(equal, repeated[of_equal > SURE * share])
    copies[by_chance] = np.flatnonzero(by_chance)
    for one, other in pairs[of_pairs <= SURE * share].tolist():
        low, high = sorted((int(copies[one]), int(copies[other])))
        copies[copies == high] = low
    return Copies(equal, copies)


def _share(chance: np.ndarray, rows: int) -> float:
    """The share of copies of so many rows, given how many rows are equal to each of those that have
    equal ones by chance; of largest likelihood.
    """
    share = len(chance) / rows  # to begin with, all candidates are copies
    for _ in range(50):  # the mean probability of being one, given the share before (EM)
        share = float((share / np.maximum(share + chance, 1e-300)).sum() / rows)
    return share


def raw_matrix(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Columns (n,) of a raw table as a matrix (n, F), words by their numbers; and which columns
    (F,) have numbers.
    """
    parts = [
        np.unique(v.astype(str), return_inverse=True)[1].reshape(-1) if v.dtype.kind == "O" else v
        for v in columns.values()
    ]
    x = np.stack(parts, axis=1).astype(np.float64)
    return x, np.array([v.dtype.kind in "fiu" for v in columns.values()])


def notes_on_copies(table: RawTable) -> list[str]:
    """Notes on rows of a table that are copies: within an owner, of several owners, of test rows.

    Example:
        >>> x = np.random.default_rng(0).normal(size=20)
        >>> columns = {"a": np.tile(x, 2), "b": np.tile(x[::-1], 2)}
        >>> notes_on_copies(RawTable("t", columns, np.zeros(40, int), ("no", "yes"), None))
        ["20 of 40 rows are copies of another row of their owner, also up to rounding."]
    """
    if not table.columns:
        return []
    found = copies_of(*raw_matrix(table.columns)).copies
    owner = np.zeros(len(found), np.int64) if table.groups is None else table.groups
    pairs = np.stack([owner, found], axis=1)
    notes, n = [], len(found)
    of_owner = np.unique(pairs, axis=0)
    if within := n - len(of_owner):
        notes.append(
            f"{within} of {n} rows are copies of another row of their owner, also up to rounding."
        )
    if across := int(elsewhere(found, owner).sum()):
        notes.append(
            f"{across} of {n} rows are at several owners, equal or equal but for rounding: "
            "fedloom trial keeps copies together; other splits may have one in training and one in "
            "test."
        )
    if table.test is not None:
        tested = found[table.test]
        if seen := int(np.isin(tested, np.delete(found, table.test)).sum()):
            notes.append(
                f"{seen} of {len(tested)} test rows are copies of training rows: scores on them "
                "are too good."
            )
    return notes


def elsewhere(copies: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """(n,) whether another owner has a copy of each row."""
    pairs = np.unique(np.stack([copies, owner], axis=1), axis=0)
    names, owners = np.unique(pairs[:, 0], return_counts=True)
    found: np.ndarray = np.isin(copies, names[owners > 1])
    return found


def times_of(equal: np.ndarray) -> int:
    """How many times each of the rows with these codes (r,) is there, such as 2 if all are twice;
    1 if there are too few different ones to tell.
    """
    counts = np.unique(equal, return_counts=True)[1]
    return int(np.gcd.reduce(counts)) if len(counts) >= FEWEST else 1


def codes_of_rows(*codes: np.ndarray) -> np.ndarray:
    """(n,) one code for each combination of codes (n,)."""
    found = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)[1]
    return found.reshape(-1).astype(np.int64)


def joined_codes(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) codes that are equal in rows that `one` or `other` joins, also by way of others.

    Example:
        >>> joined_codes(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2])).tolist()
        [0, 0, 0, 3]
    """
    found = np.arange(len(one))
    places = [np.unique(codes, return_inverse=True)[1].reshape(-1) for codes in (one, other)]
    while True:
        before = found
        for place in places:
            least = np.full(len(one), len(one))
            np.minimum.at(least, place, found)
            found = least[place]
        if np.array_equal(before, found):
            return found


def places_among(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) how many earlier rows have the same code; and (n,) how many rows in all."""
    order = np.argsort(codes, kind="stable")
    _, first, place, count = np.unique(
        codes[order], return_index=True, return_inverse=True, return_counts=True
    )
    found, of_all = np.empty((2, len(codes)), np.int64)
    found[order] = np.arange(len(codes)) - first[place.reshape(-1)]
    of_all[order] = count[place.reshape(-1)]
    return found, of_all


def _first_equal(flat: np.ndarray) -> np.ndarray:
    """(n,) the first row that is equal to each."""
    seen: dict[bytes, int] = {}
    rows = np.ascontiguousarray(flat + 0.0 if flat.dtype.kind == "f" else flat)  # no -0.0
    found = [seen.setdefault(row.tobytes(), number) for number, row in enumerate(rows)]
    return np.array(found, np.int64)


# -- the label -------------------------------------------------------------------------------------


def label_copies(
    columns: Mapping[str, np.ndarray], y: np.ndarray, groups: np.ndarray | None = None
) -> list[str]:
    """Notes on columns of numbers that are the label in another form: a number in another unit,
    also rounded, and of other units at each owner; or with limits between classes.

    Example:
        >>> price = np.random.default_rng(0).normal(200, 50, 40)
        >>> label_copies({"cents": (100 * price).round(), "rooms": np.arange(40) % 5}, price)
        ["Column 'cents' tells the label of every row, in another unit: drop it if it is known only later."]
    """  # noqa: E501
    owners = [] if groups is None else [groups == i for i in np.unique(groups)]
    # an owner with one label cannot tell; if none has two, all rows together may
    owners = [own for own in owners if len(np.unique(y[own])) > 1] or [slice(None)]
    by = "in another unit" if y.dtype.kind == "f" else "by limits between classes"
    test = _of_one_line if y.dtype.kind == "f" else _apart
    return [
        f"Column {name!r} tells the label of every row, {by}: drop it if it is known only later."
        for name, values in columns.items()
        if values.dtype.kind in "fiu"
        and not (values.dtype == y.dtype and np.array_equal(values, y))
        and all(test(values[own], y[own]) for own in owners)
    ]


def _of_one_line(values: np.ndarray, y: np.ndarray) -> bool:
    """Whether numbers (n,) are a line of `y` up to the last place of both."""
    known = np.isfinite(values)
    v, label = values[known].astype(np.float64), y[known]
    # too few rows, or too few different numbers: a line through them would be chance
    if 2 * len(v) < len(y) or min(len(np.unique(v)), len(np.unique(label))) < FEWEST:
        return False
    if not abs(np.corrcoef(v, label)[0, 1]) > LINE:
        return False
    slope, start = np.polyfit(v, label, 1)
    # rounding of the label, and that of the values in the unit of the label
    places = [2 * _half_places(decimals(each)).min() for each in (label, v)]
    allowed = places[0] + abs(slope) * places[1] + 1e-6 * np.ptp(label)
    return bool((np.abs(label - slope * v - start) <= allowed).all())


def _apart(values: np.ndarray, y: np.ndarray) -> bool:
    """Whether numbers (n,) of each class are apart from those of others, and each has some."""
    if not np.isfinite(values).all() or len(np.unique(values)) <= len(classes := np.unique(y)):
        return False
    if np.unique(y, return_counts=True)[1].min() < FEWEST:
        return False
    # the classes' ranges, in order, do not overlap
    ends = sorted((values[y == k].min(), values[y == k].max()) for k in classes)
    return all(one[1] < other[0] for one, other in itertools.pairwise(ends))


# -- chance ----------------------------------------------------------------------------------------


class _Judge:
    """How many rows would be equal to a row by chance.

    Attributes:
        used: the U columns that tell it.
        x: (m, U) a sample of all rows, by which shares are estimated.
        unseen: (U,) how many others have a value that is there once, as far as one can expect, so
            that no share is 0.
    """

    def __init__(self, flat: np.ndarray, first: np.ndarray) -> None:
        pick = np.random.default_rng(0)  # any: a sample tells chance, and equal tables equal copies

        def some(rows: np.ndarray) -> np.ndarray:
            found: np.ndarray = flat[
                rows if len(rows) <= OTHERS else np.sort(pick.choice(rows, OTHERS, replace=False))
            ]
            return found

        self.flat, distinct = flat, some(first)
        self.used = _informative(distinct)
        self.x = self.filled(some(np.arange(len(flat))))
        # how often a value that one row has is in the others (I. J. Good, A. Turing)
        self.unseen = np.array([_unseen(column) for column in distinct[:, self.used].T])

    def filled(self, x: np.ndarray) -> np.ndarray:
        """(r, U) the columns of rows (r, F) that tell chance, without gaps."""
        return np.nan_to_num(x[:, self.used].astype(np.float64), nan=GAP)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """(r, U) half of the last place of the numbers of these rows; 0 of full ones."""
        return _half_places(decimals(self.filled(self.flat[rows])))

    def chance(self, rows: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """(r,) how many rows would be within `apart` (r, U) of these by chance: see the module."""
        found = np.zeros(len(rows))
        x, n = self.filled(self.flat[rows]), len(self.flat)
        step = max(1, 4_000_000 // max(1, self.x.size))  # for memory's sake; s rows at once
        for at in range(0, len(rows), step):
            part = slice(at, at + step)
            low, high = x[part] - apart[part], x[part] + apart[part]
            same = (self.x >= low[:, None]) & (self.x <= high[:, None])  # (s, m, U)
            # the row itself, and its copies, tell nothing of chance: as if they differed everywhere
            same &= ~same.all(2, keepdims=True)

            # (s, U) how often a column is the same, and e_k (s, 1 + SHELLS) of the odds that it
            # differs, by one column after the other: the elementary symmetric polynomials
            share = np.maximum(same.sum(1), self.unseen) / len(self.x)
            e = np.zeros((len(same), SHELLS + 1))
            e[:, 0] = 1.0
            for odds in ((1 - share) / share).T:
                e[:, 1:] += e[:, :-1] * odds[:, None]

            # the largest of h_k / e_k, in rows of all n, over the nearest rows; and of what columns
            # that are independent of each other would give
            differ, nearer = (~same).sum(2), np.zeros(len(same))
            largest = n * share.prod(1)
            for k in range(1, SHELLS + 1):
                h = (differ == k).sum(1)
                scaled = n / len(self.x) * h / np.maximum(e[:, k], 1e-300)
                largest = np.where(nearer < NEAR, np.maximum(largest, scaled), largest)
                nearer += h
            found[part] = largest
        return found


def _informative(x: np.ndarray) -> np.ndarray:
    """The columns of x (n, F) that vary, without those that are another one in another unit."""
    varies = np.flatnonzero((x != x[:1]).any(0))
    varies = varies[:: max(1, len(varies) // MOST_COLUMNS)]
    ranks: list[np.ndarray] = [
        np.unique(x[:, j], return_inverse=True)[1].reshape(-1) for j in varies
    ]
    alike = np.abs(np.atleast_2d(np.corrcoef(ranks or [np.arange(2)]))) > SAME
    kept: list[int] = []
    for j in range(len(varies)):
        if not any(alike[j][k] for k in kept):
            kept.append(j)
    found: np.ndarray = varies[kept]
    return found


def _unseen(column: np.ndarray) -> float:
    counts = np.unique(column, return_counts=True)[1]
    return min(1.0, float((2 * (counts == 2).sum() + 1) / ((counts == 1).sum() + 1)))


# -- rounding --------------------------------------------------------------------------------------


def decimals(x: np.ndarray) -> np.ndarray:
    """The decimals that each number is written with, such as 2 for 0.25 and -1 for 120; `FULL` for
    more than 5, and for numbers so large that float32 does not tell their units.

    Example:
        >>> decimals(np.array([0.25, 120.0, 1 / 3])).tolist()
        [2, -1, 99]
    """
    found = np.full(x.shape, FULL)
    known = np.where(np.isfinite(x), x, 0.0).astype(np.float64)
    for places in range(5, -4, -1):
        times = known * 10.0**places
        noise = np.abs(times) * 1.2e-7 + 1e-9  # of float32
        found[(np.abs(times - np.round(times)) <= noise) & (noise < 0.1)] = places
    return found


def _half_places(places: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.where(places == FULL, 0.0, 0.5 * 10.0 ** -np.minimum(places, 9))
    return found


def _rounded(flat: np.ndarray, numbers: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(P, 2) pairs of different rows, of which the second is the first with numbers rounded."""
    none = np.zeros((0, 2), np.int64)
    if flat.size > LARGEST or flat.shape[1] != len(numbers):
        return none

    # the columns of numbers that may be rounded, that with the most different ones first
    x = np.nan_to_num(flat[first].astype(np.float64), nan=GAP)
    values = np.array([len(np.unique(column)) for column in x.T]) * numbers
    measured = np.argsort(-values, kind="stable")[: (values > MANY_VALUES).sum()]
    if len(measured) < 2:
        return none
    reach, half = NEAREST * x.std(0), _half_places(decimals(x))
    # first the column in which the fewest rows are near one another: of incomes nearly all are
    measured = np.array(
        sorted(
            measured,
            # rows that are rounded by more than the reach would not be found by this column
            key=lambda j: (1 + _neighbors(x[:, j], reach[j])) * (1 + (half[:, j] > reach[j]).sum()),
        )
    )

    # pairs of rows that are near in up to SEARCHED of them. Rows are sorted by the first column, in
    # which the k-th row after a row is never nearer than the one before: what is too far once is
    # not looked at again, and the search can end
    order = np.argsort(x[:, measured[0]], kind="stable")
    x, first, half = x[order], first[order], half[order][:, measured]
    m, reach, found, i = x[:, measured], reach[measured], [none], np.arange(len(x))
    for k in range(1, MOST_NEAR):  # row i and the k-th after it
        i = i[: np.searchsorted(i, len(x) - k)]
        i = i[m[i + k, 0] - m[i, 0] <= reach[0]]
        if not len(i):
            break
        near = i
        for j in range(1, min(len(measured), SEARCHED)):
            apart = np.abs(m[near + k, j] - m[near, j])
            near = near[apart <= np.maximum(reach[j], np.maximum(half[near, j], half[near + k, j]))]
        found.append(np.stack([near, near + k], axis=1))
    one, other = np.concatenate(found).T

    # of these, the pairs that are the same in all other columns, and in these but for rounding:
    # numbers with equally many decimals are not rounded ones of each other
    rest = np.delete(x, measured, axis=1)
    same = (rest[one] == rest[other]).all(1)
    one, other = one[same], other[same]
    places = decimals(m)
    least = np.minimum(places[one], places[other])
    tolerance = np.where(places[one] == places[other], 0.0, _half_places(least))
    near = np.abs(m[one] - m[other]) <= tolerance * (1 + 1e-6) + 3e-7 * np.abs(m[one])
    one, other = one[near.all(1)], other[near.all(1)]

    # the row with fewer decimals is the rounded one; the other is what is left of the sum of both
    coarse = np.where(places[one].sum(1) < places[other].sum(1), one, other)
    few = np.bincount(coarse, minlength=len(x))[coarse] <= MOST_OF_ONE
    one, other, coarse = one[few], other[few], coarse[few]
    return np.stack([first[one + other - coarse], first[coarse]], axis=1)


def _neighbors(column: np.ndarray, reach: float) -> int:
    """How many pairs of numbers (n,) are within a reach of each other."""
    ordered = np.sort(column)
    # of each number: those up to its reach, less those before it and itself
    upto = np.searchsorted(ordered, ordered + reach, side="right")
    return int((upto - np.arange(1, len(ordered) + 1)).sum())
