"""The clients of a run or comparison: their data and their accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedloom.experiment.metrics import OWN, TRAINING, group_of
from fedloom.experiment.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report import heatmaps, plots
from fedloom.report.page import Figure, PageSection, PageTable, cells
from fedloom.report.plots import Dots
from fedloom.report.read import Run
from fedloom.report.styles import series_style

WIDE = 12
"""Figures of more clients take the whole width of the page."""


def of_one(run: Run) -> PageSection:
    """The clients of a run: their accuracy on all classes and on their own mix, and their rows."""
    s = run.summary
    if s.eval_modes and s.own_accuracy:
        return _before_and_after(run)
    order, each = _order(run), s.accuracy.over(s.clients)
    series = [Dots(s.tested, each[order], series_style(0))]
    caption = f"Sorted by the accuracy on {s.tested}."
    if s.own_accuracy:
        own = s.own_accuracy.over(s.clients)[order]
        series.append(Dots("own class mix", own, replace(series_style(1), shape="diamond", filled=False)))
        caption += " The own class mix is that of a client's training rows, on test rows."
    alt = f"Accuracy of each client, {fmt.percent(np.nanmin(each))} to {fmt.percent(np.nanmax(each))}."
    return _section(run, order, series, alt, caption)


def _before_and_after(run: Run) -> PageSection:
    """The clients of a run on their own mix: in the first way, and as they are; those unseen first."""
    s = run.summary
    eval_mode, before = next(iter(s.eval_modes)), s.accuracies[OWN].over(s.clients)
    after = s.eval_modes[eval_mode].over(s.clients)
    if s.unseen:
        after = np.where(np.isnan(after), s.eval_modes[eval_mode + TRAINING].over(s.clients), after)
    order = np.lexsort((-after, ~np.isin(np.arange(s.clients), s.unseen)))
    series = [
        Dots(eval_mode, after[order], series_style(0)),
        Dots("as they are", before[order], replace(series_style(1), shape="diamond", filled=False)),
    ]
    better, worse = int((after > before).sum()), int((after < before).sum())
    gain = fmt.points(float(np.nanmean(after - before)))
    caption = (
        f"On test rows in each client's own class mix, sorted by the accuracy {eval_mode}: {gain} points over as they "
        f"are; better at {better} of {s.clients} clients, worse at {worse}."
    )
    caption += " Unseen clients come first." if s.unseen else ""
    alt = (
        f"Accuracy of each client on its own class mix; the means are {eval_mode} {fmt.percent(np.nanmean(after))} and "
    )
    alt += f"as they are {fmt.percent(np.nanmean(before))}."
    return _section(run, order, series, alt, caption, joined=True)


def of_several(found: Comparison, runs: Sequence[Run]) -> PageSection:
    """The clients under each method, in one seed: another seed deals client 3 other rows."""
    seed = runs[0].summary.seed
    same = {run.summary.name: run for run in runs if run.summary.seed == seed}
    first = same.get(found.reference, runs[0])
    order = _order(first, found.measure)
    number, measure = first.summary.clients, found.measure
    series = [
        Dots(method.name, same[method.name].summary.accuracies[measure].over(number)[order], series_style(n))
        for n, method in enumerate(found.methods)
        if method.name in same
    ]
    means = fmt.together([f"{s.label} {fmt.percent(s.values.mean())}" for s in series])
    alt = f"Accuracy of each client by method; the means are {means}."
    many = len({run.summary.seed for run in runs}) > 1
    caption = f"{fmt.capital(found.describe(found.measure))}, sorted by {first.summary.name}."
    caption += " Another seed deals other rows." if many else ""
    section = _section(first, order, series, alt, caption, f", seed {seed}" if many else "")
    return replace(section, tables=_by_model(found))


def _by_model(found: Comparison) -> list[PageTable]:
    """The accuracy by the clients' network or black box, where a method's clients have several, and the gains."""
    rows = [
        cells(name, str(count), *(fmt.with_gain(mean, gain) for mean, gain in values))
        for name, count, values in found.networks
    ]
    over = found.gains_over
    caption = f"Accuracy {found.describe(found.measure)} by the clients' model; mean over clients, in all seeds"
    caption += "; without unseen clients" if found.unseen and not group_of(found.measure) else ""
    caption += f"; in brackets the points over the same clients of {over}" if over and len(found.methods) > 1 else ""
    return [PageTable(caption, ["Model", "Clients", *(method.name for method in found.methods)], rows)] if rows else []


def _own_models(run: Run) -> list[PageTable]:
    """The same of one run."""
    s, names = run.summary, run.partition.architectures
    shown = {fmt.capital(s.describe(measure)): found.over(s.clients) for measure, found in s.accuracies.items()}
    for each, found in zip(shown.values(), s.accuracies.values(), strict=True):
        if found.clients is None:  # unseen clients never trained
            each[list(s.unseen)] = np.nan
    kinds = sorted(set(names))
    if len(kinds) < 2:
        return []
    rows = []
    for kind in kinds:
        of = [i for i, name in enumerate(names) if name == kind]
        means = [each[of][np.isfinite(each[of])] for each in shown.values()]
        count = len({*of} - {*s.unseen})
        rows.append(cells(kind, str(count), *(fmt.percent(m.mean()) if len(m) else fmt.NONE for m in means)))
    caption = "Accuracy by the clients' model, mean over clients"
    caption += "; unseen clients are only in what is of them alone" if s.unseen else ""
    return [PageTable(caption, ["Model", "Clients", *shown], rows)]


def _section(
    run: Run, order: np.ndarray, series: list[Dots], alt: str, caption: str, which: str = "", joined: bool = False
) -> PageSection:
    """Accuracies in an order of the clients, and the partition."""
    wide = len(order) > WIDE
    unseen = run.summary.unseen
    labels = [f"{run.names[i]} · {run.partition.architectures[i]}" + " · unseen" * (i in unseen) for i in order]
    svg, legend = plots.dots("clients", alt, labels, series, width="wide" if wide else "normal", joined=joined)
    figure = Figure(f"Accuracy of each client{which}", svg, legend, caption, wide)
    if run.partition.apart:
        caption = "Only its owner knows anything about a client's rows."
        return PageSection("Clients", text=[caption], figures=[figure], tables=_own_models(run))
    return PageSection("Clients", figures=[figure, _partition(run, which)], tables=_own_models(run))


def _order(run: Run, measure: str = "") -> np.ndarray:
    """(n,) the clients that a measure, or the main one, is of, from the best to the worst."""
    each = run.summary.accuracies[measure or run.summary.main].over(run.summary.clients)
    return np.argsort(-each, kind="stable")[: np.isfinite(each).sum()]


def _partition(run: Run, which: str) -> Figure:
    """Who holds how many rows of which class."""
    held = run.partition
    counts = np.array(held.counts)
    clients, kinds = counts.shape
    rows, of = counts.sum(1).tolist(), (counts > 0).sum(1).tolist()
    most = int(counts.max())
    alt = f"Rows of {kinds} classes at {clients} clients; a cell stands for at most {most}."
    svg = heatmaps.class_counts("partition", alt, counts, held.classes)
    caption = (
        f"Training rows by class and client. A client holds {fmt.span(rows)} rows of {fmt.span(of)} of "
        f"{fmt.times(kinds, 'class', 'classes')}. Beside them there are {fmt.whole(held.test)} test rows "
        f"and {fmt.whole(held.public)} unlabelled public rows."
    )
    caption += f" The server has {fmt.whole(held.server)} labelled rows of its own." if held.server else ""
    return Figure(f"Who holds what{which}", svg, (heatmaps.rows_legend(most),), caption, clients > WIDE)
