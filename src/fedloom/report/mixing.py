"""Mixing weights: whose models each client averages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.experiment.run.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.heatmaps import draw_shades, shade_legend
from fedloom.report.page import Details, Figure, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Level, Line
from fedloom.report.read import Run
from fedloom.report.styles import series_style
from fedloom.report.svg import HEAT, INK, SERIES, SOFT, TEXT, canvas, drawing, inline, panel

MAPS = 4
"""Maximum number of rounds with a map."""
MAX_CLIENTS = 100
"""With more clients, maps show means over blocks of clients."""
STATISTICS = ("Own weight", "Effective number of others", "Overlap", "Overlap at equal weights")
MIX = SERIES[2]
"""Color of class mixes."""


@dataclass(frozen=True)
class MixingStatistics:
    """Statistics (N,) of the models that clients took from others in a round; nan for a client
    without any.

    Attributes:
        overlap: weighted mean overlap of the client's class mix with those of the others.
        number: effective number of others, 1 / Σw² with their weights scaled to sum to 1; 0 for
            none.
        own: weight of the client's own model; nan for a client that did not mix.
    """

    overlap: np.ndarray
    number: np.ndarray
    own: np.ndarray


def overlaps(counts: np.ndarray) -> np.ndarray:
    """Overlaps (N, N) of class mixes, Σ over classes of the smaller share, from rows (N, K) by
    class.
    """
    mixes = counts / np.maximum(1, counts.sum(1, keepdims=True))
    return np.stack([np.minimum(mixes, mix).sum(1) for mix in mixes])


def equal_weight_overlap(alike: np.ndarray) -> float:
    """The mean overlap with all other clients, given overlaps (N, N): that at equal weights."""
    others = ~np.eye(len(alike), dtype=bool)
    return float(alike[others].mean()) if len(alike) > 1 else float("nan")


def mixing_statistics(weights: np.ndarray, alike: np.ndarray) -> MixingStatistics:
    """Statistics of mixing weights (N, N), given overlaps of class mixes (N, N)."""
    others = weights * ~np.eye(len(weights), dtype=bool)
    total = others.sum(1)
    takes = total > 0
    shares = np.divide(others, total[:, None], out=np.zeros_like(others), where=takes[:, None])
    number = np.divide(1.0, (shares**2).sum(1), out=np.zeros(len(shares)), where=takes)
    mixed = weights.any(1)
    return MixingStatistics(
        overlap=np.where(takes, (shares * alike).sum(1), np.nan),
        number=np.where(mixed, number, np.nan),
        own=np.where(mixed, weights.diagonal(), np.nan),
    )


def similarity_order(alike: np.ndarray) -> np.ndarray:
    """An order (N,) of clients that places similar ones, by overlap (N, N), next to each other.

    It starts at the client with the least overlap and continues with the client most similar to the
    last.
    """
    order = [int(alike.sum(1).argmin())]
    left = np.ones(len(alike), dtype=bool)
    left[order] = False
    while left.any():
        order.append(int(np.where(left, alike[order[-1]], -1.0).argmax()))
        left[order[-1]] = False
    return np.array(order)


def mixing_of_run(run: Run) -> PageSection | None:
    """The section of a run whose clients mix models; None for other runs."""
    if not run.mixing or len(run.names) < 2 or run.partition.private_clients:
        return None
    alike = overlaps(np.array(run.partition.counts))
    found = {round: mixing_statistics(weights, alike) for round, weights in run.mixing.items()}
    base = equal_weight_overlap(alike)
    last = list(found.values())[-1]
    figures = [
        _maps(run, similarity_order(alike)),
        _overlap(found, base),
        _number(found, len(alike)),
    ]
    details = Details("Values by round", table=_table(found, base))
    return PageSection(
        "Mixing weights", text=[_sentence(last, base)], figures=figures, details=[details]
    )


def mixing_of_comparison(found: Comparison, runs: Sequence[Run]) -> list[PageSection]:
    """Mixing statistics of methods in the last round, mean over clients and seeds."""
    rows = []
    for method in found.methods:
        mixed = [
            run
            for run in runs
            if run.summary.name == method.name and run.mixing and run.partition.counts
        ]
        own = [run for run in mixed if len(run.names) > 1]
        if not own:
            continue
        alike = [overlaps(np.array(run.partition.counts)) for run in own]
        last = [
            mixing_statistics(list(run.mixing.values())[-1], near)
            for run, near in zip(own, alike, strict=True)
        ]
        rows.append(
            _row(method.name, last, float(np.mean([equal_weight_overlap(near) for near in alike])))
        )
    columns = ("Method", *STATISTICS)
    caption = "Models of other clients in the last round, mean over clients; overlap of class mixes"
    return (
        [PageSection("Mixing weights", tables=[PageTable(caption, columns, rows)])] if rows else []
    )


def _mean(values: Sequence[np.ndarray]) -> float:
    every = np.concatenate(values)
    return float(np.nanmean(every)) if np.isfinite(every).any() else float("nan")


def _row(name: str, found: Sequence[MixingStatistics], base: float) -> list[PageCell]:
    own, number, overlap = (
        _mean([getattr(one, key) for one in found]) for key in ("own", "number", "overlap")
    )
    texts = [
        (own, f"{own:.3f}"),
        (number, f"{number:.2f}"),
        (overlap, fmt.percent(overlap)),
        (base, fmt.percent(base)),
    ]
    return cells(name, *(text if np.isfinite(value) else fmt.NONE for value, text in texts))


def _sentence(last: MixingStatistics, base: float) -> str:
    """The result of the last round in a sentence."""
    if np.isnan(last.overlap).all():
        return "In the last round no client used another's model."
    return (
        f"At the end a client averages the models of {np.nanmean(last.number):.1f} others "
        "(effective number, mean over clients) with its own, which has weight "
        f"{np.nanmean(last.own):.2f}. The overlap of their class mixes with its own is "
        f"{fmt.percent(np.nanmean(last.overlap))}; equal weights would give {fmt.percent(base)}."
    )


def _line(
    label: str, found: Mapping[int, MixingStatistics], values: Sequence[np.ndarray], number: int
) -> Line:
    kept = [v[np.isfinite(v)] for v in values]
    mean, deviation = (
        np.array([f(v) if len(v) else np.nan for v in kept]) for f in (np.mean, np.std)
    )
    return Line(
        f"{label} ± s.d. over clients",
        np.array(list(found), dtype=float),
        mean,
        series_style(number),
        deviation,
    )


def _overlap(found: Mapping[int, MixingStatistics], base: float) -> Figure:
    line = _line("models of others", found, [one.overlap for one in found.values()], 2)
    alt = (
        f"Overlap of class mixes by round: at the end {fmt.percent(line.y[-1])}, against "
        f"{fmt.percent(base)}."
    )
    svg, legend = plots.chart(
        "overlap", alt, [line], [Level("equal weights", base)], across="rounds"
    )
    caption = (
        "Overlap of class mixes, Σ over classes of the smaller of two shares, between a client "
        "and those whose models it uses, weighted, without its own model."
    )
    return Figure("Class overlap with the models used", svg, legend, caption)


def _number(found: Mapping[int, MixingStatistics], clients: int) -> Figure:
    line = _line("other clients", found, [one.number for one in found.values()], 0)
    alt = (
        f"Effective number of others whose models a client uses: {line.y[-1]:.1f} of "
        f"{clients - 1} at the end."
    )
    svg, legend = plots.chart("others", alt, [line], across="rounds", form_y=None)
    caption = (
        f"1 / Σw² over the weights of others, scaled to sum to 1; {clients - 1} at equal weights."
    )
    return Figure("Effective number of other models", svg, legend, caption)


def _table(found: Mapping[int, MixingStatistics], base: float) -> PageTable:
    rows = [_row(fmt.whole(round), [one], base) for round, one in found.items()]
    columns = ("Round", *STATISTICS)
    return PageTable("Means over clients; all weights are in mixing.csv", columns, rows)


def _maps(run: Run, order: np.ndarray) -> Figure:
    """Class mixes, and weights at some rounds, with clients in one order."""
    rounds = list(run.mixing)
    at = sorted({round((len(rounds) - 1) * part) for part in (0, 0.2, 0.5, 1)})
    shown = {
        f"round {fmt.whole(rounds[k])}": run.mixing[rounds[k]][np.ix_(order, order)] for k in at
    }
    counts = np.array(run.partition.counts)[order]
    mixes = counts / np.maximum(1, counts.sum(1, keepdims=True))
    block = -(-len(order) // MAX_CLIENTS)
    diagonal = np.eye(len(order), dtype=bool)
    most = max(float(weights[~diagonal].max()) for weights in shown.values())
    keys = [shade_legend("class mix, 0 to 100 %", MIX)]
    caption = (
        "Rows are clients, columns the owners of the models. Clients with similar class mixes "
        "are adjacent."
    )
    if block > 1:
        shown = {
            name: _blocks(np.where(diagonal, 0.0, weights), block)
            for name, weights in shown.items()
        }
        mixes = _mean_rows(mixes, block)
        most = max(float(weights.max()) for weights in shown.values())
        keys.append(shade_legend(f"weight of a block of others, 0 to {most:.2g}"))
        caption += (
            f" A cell covers {block} × {block} clients: the weight that a client of the row "
            "gives to all clients of "
        )
        caption += "the column, on average, without its own model."
    else:
        keys += [
            shade_legend(f"weight of another's model, 0 to {most:.2g}"),
            shade_legend("of its own, 0 to 1", SOFT),
        ]
    names = [fmt.whole(i) for i in order] if block == 1 else []
    alt = f"Mixing weights of {len(order)} clients at {fmt.together(list(shown))}."
    svg = _draw("mixing", alt, mixes, shown, most or 1.0, names)
    return Figure("Mixing weights between clients", svg, tuple(keys), caption, wide=True)


def _mean_rows(values: np.ndarray, block: int) -> np.ndarray:
    """Means (⌈N / block⌉, K) over blocks of rows (N, K)."""
    starts = np.arange(0, len(values), block)
    sizes = np.diff([*starts, len(values)])
    means: np.ndarray = np.add.reduceat(values, starts) / sizes[:, None]
    return means


def _blocks(weights: np.ndarray, block: int) -> np.ndarray:
    """Weights (B, B) of blocks: sums over the columns, means over the rows, of weights (N, N)."""
    return _mean_rows(np.add.reduceat(weights, np.arange(0, len(weights), block), axis=1), block)


@drawing()
def _draw(
    slug: str,
    alt: str,
    mixes: np.ndarray,
    maps: Mapping[str, np.ndarray],
    most: float,
    names: Sequence[str],
) -> Markup:
    """Class mixes (N, K) and maps (N, N) in [0, most], side by side; `names` label the rows, if not
    empty.
    """
    left, gap, top, bottom, narrow = 46.0, 16.0, 28.0, 42.0, 130.0
    side = (1080 - left - narrow - gap * MAPS - 6) / MAPS
    width = left + narrow + (gap + side) * len(maps) + 6
    figure, axes = canvas(
        width, top + side + bottom, left=left, right=width - left - narrow, top=top, bottom=bottom
    )
    draw_shades(axes, mixes, MIX, most=400)
    _frame(
        axes,
        mixes.shape,
        "class mix",
        "class",
        (narrow, side),
        names,
        [str(k) for k in range(mixes.shape[1])],
    )
    axes.set_ylabel("client", loc="top", fontsize=TEXT - 1)
    for number, (title, weights) in enumerate(maps.items()):
        axes = panel(figure, left + narrow + gap + (gap + side) * number, bottom, side, side)
        own = np.diag(weights.diagonal()) if names else np.zeros_like(weights)
        draw_shades(axes, np.clip((weights - own) / most, 0, 1), HEAT, most=400)
        draw_shades(axes, np.clip(own, 0, 1), SOFT, ground=False)
        _frame(axes, weights.shape, title, "owner of the model", (side, side), [], names)
    return inline(figure, slug, alt)


def _frame(
    axes: Any,
    shape: tuple[int, int],
    title: str,
    across: str,
    size: tuple[float, float],
    rows: Sequence[str],
    columns: Sequence[str],
) -> None:
    """Limits, labels, and ticks if all names fit."""
    axes.set(xlim=(-0.5, shape[1] - 0.5), ylim=(shape[0] - 0.5, -0.5))
    axes.spines["bottom"].set_visible(False)
    ticks = (columns, size[0], 16, axes.set_xticks), (rows, size[1], 12, axes.set_yticks)
    for names, room, each, put in ticks:
        fits = bool(names) and room / len(names) >= each
        put(range(len(names)) if fits else [], names if fits else [], fontsize=TEXT - 2)
    axes.set_title(title, fontsize=TEXT, loc="left", color=INK, pad=8)
    axes.set_xlabel(across, loc="right", fontsize=TEXT - 1)
