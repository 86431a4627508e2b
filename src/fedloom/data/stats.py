"""Statistics of class counts: of a partition among clients, with a figure, and of a vertical
federation's parties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.vertical import PartyView, VerticalDataset


@dataclass(frozen=True, eq=False)
class PartitionStats:
    """Rows of each class at each client, and distances between the clients' class mixes.

    The total variation of two mixes is half the sum of their absolute differences: 0 if equal, 1 if
    no class is shared.
    """

    classes: tuple[str, ...]
    """K names."""
    counts: np.ndarray
    """(N, K) int64 rows of each class at each client."""
    sizes: np.ndarray
    """(N,) int64 rows of each client."""
    held: np.ndarray
    """(N,) int64 number of classes of each client."""
    entropy: np.ndarray
    """(N,) float64 entropy of each client's class mix in bits: from 0 for one class to log2(K) if
    uniform.
    """
    to_global: float
    """Mean over clients of the total variation between the client's mix and the mix of all their
    rows.
    """
    pairwise: float
    """Mean over pairs of clients of the total variation between their mixes; 0 for one client."""

    HEADER = ("client", "rows", "classes", "entropy", "most frequent")

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of one table row for each client, under `HEADER`."""
        top = self.counts.argmax(axis=1)
        share = self.counts.max(axis=1) / self.sizes
        return [
            (
                str(client),
                str(self.sizes[client]),
                str(self.held[client]),
                f"{self.entropy[client]:.2f}",
                f"{self.classes[top[client]]} ({share[client]:.0%})",
            )
            for client in range(len(self.sizes))
        ]


def describe(
    labels: np.ndarray, shards: Sequence[np.ndarray], classes: Sequence[str]
) -> PartitionStats:
    """Count each client's rows by class.

    Args:
        labels: (n,) int64 labels of the whole data set.
        shards: the row numbers of each client.
        classes: K names.

    Raises:
        DataError: there are no clients, or a client has no rows.
    """
    if not shards or not all(len(shard) for shard in shards):
        raise DataError(
            "Each client must have rows, but their numbers of rows are "
            f"{[len(shard) for shard in shards][:20]}."
        )
    counts = np.stack([np.bincount(labels[shard], minlength=len(classes)) for shard in shards])
    sizes = counts.sum(axis=1)
    mixes = counts / sizes[:, None]  # (N, K)
    logs = np.log2(mixes, out=np.zeros_like(mixes), where=mixes > 0)
    pairs = sum(float(_variation(mixes[i + 1 :], mixes[i]).sum()) for i in range(len(mixes)))
    return PartitionStats(
        classes=tuple(classes),
        counts=counts,
        sizes=sizes,
        held=(counts > 0).sum(axis=1),
        entropy=-(mixes * logs).sum(axis=1) + 0.0,  # + 0.0 turns -0.0 into 0.0
        to_global=float(_variation(mixes, counts.sum(axis=0) / counts.sum()).mean()),
        pairwise=2 * pairs / max(1, len(mixes) * (len(mixes) - 1)),
    )


def _variation(mixes: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """(N,) total variation of each of (N, K) mixes to one (K,) mix."""
    distance: np.ndarray = np.abs(mixes - mix).sum(axis=1) / 2
    return distance


def plot_counts(stats: PartitionStats, target: str | Path | IO[bytes]) -> None:
    """Draw discs over clients (x) and classes (y) whose area and shade are the number of rows.

    The color map is cividis, whose lightness is monotonic, so that it works for any color vision
    and in gray.

    Args:
        stats: from `describe`.
        target: a file name, whose suffix gives the format, or a binary buffer for a PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = stats.counts.shape
    width, height = np.clip([0.32 * clients, 0.32 * classes], 2.5, 16.0)
    figure = Figure(figsize=(width + 2.2, height + 1.0), layout="constrained")
    axes = figure.add_subplot()
    client, label = np.nonzero(stats.counts)
    rows = stats.counts[client, label]
    cell = 72 * min(width / clients, height / classes)  # points a side; there are 72 to the inch
    sizes = (0.9 * cell) ** 2 * rows / rows.max()
    disc = axes.scatter(
        client, label, s=sizes, c=rows, cmap="cividis_r", vmin=0, edgecolors="0.3", linewidths=0.4
    )
    axes.set(
        xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xlabel="client", ylabel="class"
    )
    axes.set_xticks(range(0, clients, -(-clients // 25)))
    step = -(-classes // 50)
    axes.set_yticks(range(0, classes, step), [name[:20] for name in stats.classes[::step]])
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    inch = 1 / (width + 2.2)
    ticks = MaxNLocator(nbins=8, integer=True)
    figure.colorbar(disc, ax=axes, label="rows", fraction=0.6 * inch, pad=0.2 * inch, ticks=ticks)
    figure.savefig(target, dpi=120, format=None if isinstance(target, str | Path) else "png")


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
    return sum(
        float(row.sum() / whole.sum()) * cosine(row, whole) for row in table if row.sum() > 0
    )


def describe_parties(parties: VerticalDataset) -> dict[str, Any]:
    """Each party's data and its class imbalance, as plain JSON values.

    "unaligned_counts" and the metrics are of a party's unaligned rows if their classes are known,
    as in a simulation, else None; "all" is of the unaligned rows of all parties. "aligned_counts"
    and "test_counts" are of the common rows. Γ is the ratio of the largest to the smallest class
    with rows, S the number of classes with rows. "dropped" are the columns of a table that are
    constant over a party's training rows.
    """
    names, aligned, test = parties.parts
    number = len(names)
    counts = [
        None if view.truth is None else np.bincount(view.truth, minlength=number)
        for view in parties.views
    ]
    known = [row for row in counts if row is not None]
    whole = np.sum(known, axis=0) if len(known) == len(counts) and np.sum(known) > 0 else None
    return {
        "name": parties.name,
        "kind": parties.kind,
        "classes": list(names),
        "aligned_counts": np.bincount(aligned, minlength=number).tolist(),
        "test_counts": np.bincount(test, minlength=number).tolist(),
        "parties": [
            _party(view, row, whole) for view, row in zip(parties.views, counts, strict=True)
        ],
        "all": {
            **_imbalance(whole),
            "weighted_cosine": None if whole is None else weighted_cosine(np.stack(known)),
        },
    }


def _party(view: PartyView, counts: np.ndarray | None, whole: np.ndarray | None) -> dict[str, Any]:
    """One party's entry of `describe_parties`; `whole` are the counts of all parties."""
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
        **_imbalance(rows),
        "cosine": None if rows is None or whole is None else cosine(rows, whole),
    }


def _imbalance(counts: np.ndarray | None) -> dict[str, float | int | None]:
    if counts is None:
        return {"gamma": None, "classes_held": None, "mid": None}
    return {
        "gamma": ratio(counts),
        "classes_held": int((counts > 0).sum()),
        "mid": imbalance_degree(counts),
    }


def _shares(counts: Sequence[float] | np.ndarray) -> np.ndarray:
    """(Z,) counts that sum to 1."""
    rows = np.asarray(counts, dtype=float)
    if (
        rows.ndim != 1
        or len(rows) < 2
        or not np.isfinite(rows).all()
        or rows.min() < 0
        or rows.sum() <= 0
    ):
        raise DataError(
            "counts must have at least 2 classes, no negative number and a positive sum, not "
            f"{counts}."
        )
    shares: np.ndarray = rows / rows.sum()
    return shares
