"""Statistics and a figure of a partition's heterogeneity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fedloom.core.errors import DataError


@dataclass(frozen=True, eq=False)
class PartitionStats:
    """Rows of each class at each client, and distances between the clients' class mixes.

    The total variation of two mixes is half the sum of their absolute differences: 0 if equal, 1 if no class
    is shared.
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
    """(N,) float64 entropy of each client's class mix in bits: from 0 for one class to log2(K) if uniform."""
    to_global: float
    """Mean over clients of the total variation between the client's mix and the mix of all their rows."""
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


def describe(labels: np.ndarray, shards: Sequence[np.ndarray], classes: Sequence[str]) -> PartitionStats:
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
            f"Each client must have rows, but their numbers of rows are {[len(shard) for shard in shards][:20]}."
        )
    counts = np.stack([np.bincount(labels[shard], minlength=len(classes)) for shard in shards])
    sizes = counts.sum(axis=1)
    mixes = counts / sizes[:, None]  # (N, K)
    logs = np.log2(mixes, out=np.zeros_like(mixes), where=mixes > 0)
    overall = counts.sum(axis=0) / counts.sum()
    pairs = [_variation(mixes[i + 1 :], mixes[i]).sum() for i in range(len(mixes) - 1)]
    number = len(mixes) * (len(mixes) - 1) / 2
    return PartitionStats(
        classes=tuple(classes),
        counts=counts,
        sizes=sizes,
        held=(counts > 0).sum(axis=1),
        entropy=-(mixes * logs).sum(axis=1) + 0.0,  # + 0.0 turns -0.0 into 0.0
        to_global=float(_variation(mixes, overall).mean()),
        pairwise=float(sum(pairs) / number) if pairs else 0.0,
    )


def _variation(mixes: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """(N,) total variation of each of (N, K) mixes to one (K,) mix."""
    distance: np.ndarray = np.abs(mixes - mix).sum(axis=1) / 2
    return distance


def plot_counts(stats: PartitionStats, target: str | Path | IO[bytes]) -> None:
    """Draw discs over clients (x) and classes (y) whose area and shade are the number of rows.

    The colour map is cividis, whose lightness is monotonic, so that it works for any colour vision and in grey.

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
    disc = axes.scatter(
        client,
        label,
        s=(0.9 * cell) ** 2 * rows / rows.max(),
        c=rows,
        cmap="cividis_r",
        vmin=0,
        edgecolors="0.3",
        linewidths=0.4,
    )
    axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xlabel="client", ylabel="class")
    step = -(-clients // 25)
    axes.set_xticks(range(0, clients, step))
    step = -(-classes // 50)
    axes.set_yticks(range(0, classes, step), [name[:20] for name in stats.classes[::step]])
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    inch = 1 / (width + 2.2)
    ticks = MaxNLocator(nbins=8, integer=True)
    figure.colorbar(disc, ax=axes, label="rows", fraction=0.6 * inch, pad=0.2 * inch, ticks=ticks)
    figure.savefig(target, dpi=120, format=None if isinstance(target, str | Path) else "png")
