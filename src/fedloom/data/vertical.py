"""What each party of a vertical federation holds: other columns of overlapping people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Kind


@dataclass(frozen=True, eq=False)
class PartyView:
    """What one party holds, as numbers.

    Raises:
        DataError: the arrays contradict each other, or a number is not finite.
    """

    name: str
    """"party-0", or the stem of a file's name."""
    x: np.ndarray
    """(n, C, H, W) uint8 images, or (n, F) float32 columns; C-contiguous. Only rows that are used."""
    shift: np.ndarray
    """(C,) or (F,) float32. What a network gets is (x - shift) / scale."""
    scale: np.ndarray
    """(C,) or (F,) float32, above 0."""
    aligned: np.ndarray
    """(N_a,) int64 row numbers of x: the same person at the same place for every party."""
    unaligned: np.ndarray
    """(N_u,) int64 row numbers of people that this party alone knows, in simulations; see where others come from."""
    test: np.ndarray
    """(T,) int64 row numbers of test rows: the same person at the same place for every party."""
    truth: np.ndarray | None
    """(N_u,) int64 classes of the unaligned rows where they are known. For measuring only: no method may see them."""
    recipe: dict[str, Any]
    """How raw rows become x, as JSON can hold it, for `fedloom.data.recipes.prepare`."""

    def __post_init__(self) -> None:
        for problem in _view_problems(self):
            raise DataError(f"Party {self.name!r}: {problem}.")

    @property
    def kind(self) -> Kind:
        """Whether the rows are images or rows of a table."""
        return "image" if self.x.ndim == 4 else "table"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row: (C, H, W) or (F,)."""
        return self.x.shape[1:]


@dataclass(frozen=True, eq=False)
class VerticalDataset:
    """A vertical federation's data. The first view is the active party's, the only one with labels.

    Raises:
        DataError: the views don't fit each other, or the labels don't fit them.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    """K names."""
    views: tuple[PartyView, ...]
    """One for each party, the active one first."""
    labels: np.ndarray
    """(N_a,) int64 classes of the aligned rows."""
    test_labels: np.ndarray
    """(T,) int64 classes of the test rows."""

    def __post_init__(self) -> None:
        for problem in _party_problems(self):
            raise DataError(f"Parties of {self.name!r}: {problem}.")


def _view_problems(view: PartyView) -> list[str]:
    """What is wrong with a view; the first counts, as a later check may rely on the earlier."""
    x, n = view.x, len(view.x)
    if (x.ndim, x.dtype) not in ((4, np.dtype(np.uint8)), (2, np.dtype(np.float32))):
        return [f"x must be (n, C, H, W) uint8 or (n, F) float32, but it is {x.shape} {x.dtype}; convert it first"]
    parts = {"aligned": view.aligned, "unaligned": view.unaligned, "test": view.test}
    odd = [name for name, rows in parts.items() if rows.dtype != np.int64 or rows.ndim != 1]
    if odd:
        return [f"{odd[0]} must be int64 row numbers, but it is {parts[odd[0]].dtype} {parts[odd[0]].shape}"]
    rows = np.concatenate(list(parts.values()))
    checks = [
        (x.flags.c_contiguous, "x must be C-contiguous; use np.ascontiguousarray"),
        (x[0:1].size > 0, f"x must have rows and columns, but it is {x.shape}"),
        (
            view.shift.shape == view.scale.shape == x.shape[1:2],
            f"shift and scale must be {x.shape[1:2]}, but they are {view.shift.shape} and {view.scale.shape}",
        ),
        (bool(np.isfinite(view.shift).all() and np.isfinite(view.scale).all()), "shift and scale must be finite"),
        (bool((view.scale > 0).all()), "scale must be above 0"),
        (view.kind == "image" or bool(np.isfinite(x).all()), "x holds numbers that are not finite; fill them in"),
        (
            len(rows) == 0 or (rows.min() >= 0 and rows.max() < n),
            f"aligned, unaligned and test must hold row numbers from 0 to {n - 1}",
        ),
        (
            len(np.unique(rows)) == len(rows),
            f"aligned, unaligned and test must share no row, but {len(rows) - len(np.unique(rows))} come again",
        ),
        (
            view.truth is None or (view.truth.dtype == np.int64 and view.truth.shape == view.unaligned.shape),
            f"truth must be int64 and give a class for each of the {len(view.unaligned)} unaligned rows",
        ),
        (_is_json(view.recipe), "the recipe must be what JSON can hold"),
    ]
    return [message for holds, message in checks if not holds]


def _party_problems(parties: VerticalDataset) -> list[str]:
    """What is wrong between the views; the first counts."""
    views = parties.views
    if len(views) < 2:
        return [f"there must be at least 2 parties, but there are {len(views)}"]
    names = [view.name for view in views]
    sizes = {"aligned": [len(view.aligned) for view in views], "test": [len(view.test) for view in views]}
    known = {"labels": parties.labels, "test_labels": parties.test_labels}
    checks = [
        (len(set(names)) == len(names), f"every party needs a name of its own, but they are {names}"),
        (len(parties.classes) >= 2, f"at least 2 classes are needed, but there are {parties.classes}"),
        *(
            (view.kind == parties.kind, f"all must hold {parties.kind}s, but {view.name!r} holds {view.kind}s")
            for view in views
        ),
        *(
            (
                len(set(counts)) == 1 and counts[0] > 0,
                f"all must have at least 1 {what} row, equally many, but have {counts}",
            )
            for what, counts in sizes.items()
        ),
        *(
            (
                labels.dtype == np.int64 and labels.shape == (len(rows),),
                f"{what} must be int64 and ({len(rows)},), but they are {labels.dtype} {labels.shape}",
            )
            for (what, labels), rows in zip(known.items(), (views[0].aligned, views[0].test), strict=True)
        ),
        *(
            (
                labels.min(initial=0) >= 0 and labels.max(initial=0) < len(parties.classes),
                f"{what} must lie in 0..{len(parties.classes) - 1}, one for each class, but run from "
                f"{labels.min(initial=0)} to {labels.max(initial=0)}",
            )
            for what, labels in [*known.items(), *((f"the truth of {v.name!r}", v.truth) for v in views)]
            if labels is not None
        ),
    ]
    return [message for holds, message in checks if not holds]


def _is_json(tree: Any) -> bool:
    try:
        json.dumps(tree, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
