"""Client by client: who holds what, and how well each does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedloom.report import holdings, plots, words
from fedloom.report.looks import look
from fedloom.report.page import Figure, Section
from fedloom.report.plots import Dots
from fedloom.report.read import Run
from fedloom.report.schema import Comparison

WIDE = 12
"""Figures of more clients take the whole width of the page."""


def of_one(run: Run) -> Section:
    """The clients of a run: their accuracy on all classes and on their own mix, and their rows."""
    s, order = run.summary, _order(run)
    each = np.array(s.accuracy.per_client)
    series = [Dots("global test set", each[order], look(0))]
    caption = "Sorted by the accuracy on the global test set."
    if s.own_accuracy:
        own = np.array(s.own_accuracy.per_client)[order]
        series.append(Dots("own class mix", own, replace(look(1), shape="diamond", filled=False)))
        caption += " The own class mix is that of a client's training rows, on test rows."
    alt = f"Accuracy of each client, {words.percent(each.min())} to {words.percent(each.max())}."
    return _section(run, order, series, alt, caption)


def of_several(found: Comparison, runs: Sequence[Run]) -> Section:
    """The clients under each method, in one seed: another seed deals client 3 other rows."""
    seed = runs[0].summary.seed
    same = {run.summary.name: run for run in runs if run.summary.seed == seed}
    first = same.get(found.reference, runs[0])
    order = _order(first)
    series = [
        Dots(method.name, np.array(same[method.name].summary.accuracy.per_client)[order], look(number))
        for number, method in enumerate(found.methods)
        if method.name in same
    ]
    means = words.together([f"{s.label} {words.percent(s.values.mean())}" for s in series])
    alt = f"Accuracy of each client by method; the means are {means}."
    many = len({run.summary.seed for run in runs}) > 1
    caption = f"On the global test set, sorted by {first.summary.name}."
    caption += " Another seed deals other rows." if many else ""
    return _section(first, order, series, alt, caption, f", seed {seed}" if many else "")


def _section(run: Run, order: np.ndarray, series: list[Dots], alt: str, caption: str, which: str = "") -> Section:
    """Accuracies in an order of the clients, and the partition."""
    wide = run.summary.clients > WIDE
    labels = [f"{run.names[i]} · {run.partition.architectures[i]}" for i in order]
    svg, legend = plots.dots("clients", alt, labels, series, width="wide" if wide else "normal")
    figure = Figure(f"Accuracy of each client{which}", svg, legend, caption, wide)
    return Section("Clients", figures=[figure, _partition(run, which)])


def _order(run: Run) -> np.ndarray:
    """(N,) clients from the best to the worst."""
    return np.argsort(-np.array(run.summary.accuracy.per_client), kind="stable")


def _partition(run: Run, which: str) -> Figure:
    """Who holds how many rows of which class."""
    held = run.partition
    counts = np.array(held.counts)
    clients, kinds = counts.shape
    rows, of = counts.sum(1).tolist(), (counts > 0).sum(1).tolist()
    most = int(counts.max())
    alt = f"Rows of {kinds} classes at {clients} clients; a cell stands for at most {most}."
    svg = holdings.holdings("partition", alt, counts, held.classes)
    caption = (
        f"Training rows by class and client. A client holds {words.span(rows)} rows of {words.span(of)} of "
        f"{words.times(kinds, 'class', 'classes')}. Beside them there are {words.whole(held.test)} test rows "
        f"and {words.whole(held.public)} unlabelled public rows."
    )
    return Figure(f"Who holds what{which}", svg, (holdings.shades(most),), caption, clients > WIDE)
