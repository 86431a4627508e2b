"""Class imbalance of a vertical federation: measures, and a description for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.vertical import PartyView, VerticalDataset


def ratio(counts: Sequence[float] | np.ndarray) -> float:
    """Γ: ratio of the largest class to the smallest class with rows; 1 without rows."""
    rows = np.asarray(counts, dtype=float)
    rows = rows[rows > 0]
    return float(rows.max() / rows.min()) if len(rows) else 1.0


def imbalance_degree(counts: Sequence[float] | np.ndarray) -> float:
    """MID = 1 - H(p) / ln Z of Z classes: 0 if all have equally many rows, 1 if one class has all.

    Raises:
        DataError: fewer than two classes, a negative count, or no rows.
    """
    shares = _shares(counts)
    present = shares[shares > 0]
    return float(np.clip(1 + (present * np.log(present)).sum() / np.log(len(shares)), 0.0, 1.0))


def cosine(counts: Sequence[float] | np.ndarray, whole: Sequence[float] | np.ndarray) -> float:
    """cos(L, l): of two vectors of class counts; 1 if they are proportional.

    Raises:
        DataError: as `imbalance_degree`.
    """
    one, other = _shares(counts), _shares(whole)
    return float(np.clip(one @ other / np.sqrt((one @ one) * (other @ other)), 0.0, 1.0))


def weighted_cosine(counts: Sequence[Sequence[float]] | np.ndarray) -> float:
    """WCS = sum over parties of |l_m| / |L| cos(L, l_m), where L is the sum of all l_m.

    Args:
        counts: (M, Z) rows of each class at each party. A party without rows has weight 0.

    Raises:
        DataError: as `imbalance_degree`.
    """
    table = np.asarray(counts, dtype=float)
    whole = table.sum(axis=0)
    return sum(float(row.sum() / whole.sum()) * cosine(row, whole) for row in table if row.sum() > 0)


def describe_parties(parties: VerticalDataset) -> dict[str, Any]:
    """Each party's data and its class imbalance, as plain JSON values.

    "unaligned_counts" and the measures are of a party's unaligned rows if their classes are known, as in a simulation,
    else None; "all" is of the unaligned rows of all parties. "aligned_counts" and "test_counts" are of the common rows.
    Γ is the ratio of the largest to the smallest class with rows, S the number of classes with rows. "dropped" are the
    columns of a table that are constant over a party's training rows.
    """
    number = len(parties.classes)
    counts = [None if view.truth is None else np.bincount(view.truth, minlength=number) for view in parties.views]
    known = [row for row in counts if row is not None]
    whole = np.sum(known, axis=0) if len(known) == len(counts) and np.sum(known) > 0 else None
    return {
        "name": parties.name,
        "kind": parties.kind,
        "classes": list(parties.classes),
        "aligned_counts": np.bincount(parties.labels, minlength=number).tolist(),
        "test_counts": np.bincount(parties.test_labels, minlength=number).tolist(),
        "parties": [_party(view, row, whole) for view, row in zip(parties.views, counts, strict=True)],
        "all": {**_measures(whole), "weighted_cosine": None if whole is None else weighted_cosine(np.stack(known))},
    }


def _party(view: PartyView, counts: np.ndarray | None, whole: np.ndarray | None) -> dict[str, Any]:
    rows = None if counts is None or not counts.sum() else counts
    encoder = TableEncoder.from_dict(view.recipe) if view.recipe.get("kind") == "table" else None
    return {
        "name": view.name,
        "input_shape": list(view.input_shape),
        "columns": None if encoder is None else list(encoder.names),
        "dropped": None if encoder is None else list(encoder.dropped),
        "aligned": len(view.aligned),
        "unaligned": len(view.unaligned),
        "test": len(view.test),
        "unaligned_counts": None if counts is None else counts.tolist(),
        **_measures(rows),
        "cosine": None if rows is None or whole is None else cosine(rows, whole),
    }


def _measures(counts: np.ndarray | None) -> dict[str, float | int | None]:
    if counts is None:
        return {"gamma": None, "classes_held": None, "mid": None}
    return {"gamma": ratio(counts), "classes_held": int((counts > 0).sum()), "mid": imbalance_degree(counts)}


def _shares(counts: Sequence[float] | np.ndarray) -> np.ndarray:
    """(Z,) counts that sum to 1."""
    rows = np.asarray(counts, dtype=float)
    if rows.ndim != 1 or len(rows) < 2 or not np.isfinite(rows).all() or rows.min() < 0 or rows.sum() <= 0:
        raise DataError(f"counts must have at least 2 classes, no negative number and a positive sum, not {counts}.")
    shares: np.ndarray = rows / rows.sum()
    return shares
