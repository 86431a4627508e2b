"""Unseen clients: their accuracy beside that of training clients."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from fedloom.experiment.run.metrics import UNADAPTED
from fedloom.experiment.run.result import Comparison, RunSummary
from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.page import Figure, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Dots
from fedloom.report.read import Run
from fedloom.report.styles import HOLLOW, series_style

HEADING = "Unseen clients"
NAMED = 20
"""Maximum number of clients named."""


def unseen_of_run(run: Run) -> PageSection | None:
    """The unseen clients of a run, and the accuracy of both groups, unadapted and in each
    evaluation mode.
    """
    s = run.summary
    if not s.unseen:
        return None
    count = f"{fmt.capital(fmt.times(len(s.unseen), 'client'))} of {fmt.whole(s.clients)}"
    text = [
        f"{count} took part in no round, received no message, and are used for evaluation only: "
        f"{_listed(run.display_names[i] for i in s.unseen)}."
    ]
    pairs, share, unadapted = _pairs(s), s.main.share, replace(s.on_own, mode=UNADAPTED)
    if not pairs:
        return PageSection(HEADING, text=text)
    rows = [
        cells(
            eval_mode,
            _spread(a, share),
            _spread(b, share),
            fmt.difference(float(a.mean() - b.mean()), share),
        )
        for eval_mode, (a, b) in pairs.items()
    ]
    means = {eval_mode: (float(a.mean()), float(b.mean())) for eval_mode, (a, b) in pairs.items()}
    unseen, training = s.chance_of(unadapted), s.chance_of(unadapted.training)
    if unseen is not None and training is not None:
        chance = s.most_frequent(unadapted)
        means[chance] = unseen, training
        rows.append(cells(chance, fmt.metric(unseen, share), fmt.metric(training, share), fmt.NONE))
    columns = (
        "Evaluation mode",
        "Unseen clients",
        "Training clients",
        "Difference" + " in points" * share,
    )
    table = PageTable("Mean ± s.d. over clients", columns, rows)
    return PageSection(HEADING, text=text, figures=[_figure(s, means)], tables=[table])


def _figure(s: RunSummary, means: dict[str, tuple[float, float]]) -> Figure:
    values = np.array(list(means.values()))
    series = [
        Dots(fmt.times(len(s.unseen), "unseen client"), values[:, 0], series_style(0)),
        Dots(fmt.times(s.clients - len(s.unseen), "training client"), values[:, 1], HOLLOW),
    ]
    noun, form = s.main.noun, partial(fmt.metric, share=s.main.share)
    pairs = [f"{eval_mode} {form(a)} and {form(b)}" for eval_mode, (a, b) in means.items()]
    alt = f"Mean {noun} of unseen and of training clients: {fmt.together(pairs)}."
    svg, legend = plots.dots(
        "unseen", alt, list(means), series, joined=True, form=plots.share if s.main.share else form
    )
    rows = "in each client's own class mix" if s.own else f"of {s.tested}"
    caption = (
        f"{fmt.capital(noun)} at the end on test rows {rows}. The numbers on the right are those "
        "of unseen clients."
    )
    return Figure("Unseen and training clients", svg, legend, caption)


def unseen_of_comparison(found: Comparison) -> list[PageSection]:
    """The unseen clients of a comparison, and the accuracy of both groups by method and evaluation
    mode.
    """
    if not found.unseen:
        return []
    names = "; ".join(
        f"in seed {seed}, {_listed(map(str, clients))}" for seed, clients in found.unseen.items()
    )
    text = [
        "Some clients took part in no round, received no message, and are used for evaluation "
        f"only: {names}."
    ]
    every = in_order({metric.mode: None for m in found.methods for metric in m.eval_modes})
    tables = []
    unadapted, main = replace(found.on_own, mode=UNADAPTED), found.on_own
    for group, metric in (("Unseen", unadapted), ("Training", unadapted.training)):
        rows = []
        for number, m in enumerate(found.methods):
            each = [m.eval_modes.get(replace(metric, mode=eval_mode)) for eval_mode in every]
            bars = [PageCell(fmt.NONE) if a is None else _bar(a.mean, main.share) for a in each]
            rows.append(cells(PageCell(m.name, key=series_style(number).key("").sample), *bars))
        over = " and seeds" if any(len(m.seeds) > 1 for m in found.methods) else ""
        caption = f"{group} clients: {main.noun} {found.describe(main)}, mean over clients{over}"
        if (chance := found.chance_of(metric)) is not None:
            caption += (
                f"; always predicting {found.most_frequent(metric)} gives "
                f"{fmt.metric(chance, main.share)}"
            )
        tables.append(
            PageTable(caption, ("Method", *(fmt.capital(eval_mode) for eval_mode in every)), rows)
        )
    return [PageSection(HEADING, text=text, tables=tables if every else [])]


def _bar(value: float, share: bool) -> PageCell:
    return PageCell(fmt.metric(value, share), share=value if share else None)


def in_order(eval_modes: Iterable[str]) -> list[str]:
    """Evaluation modes by the number of steps at their start, as in `5 steps`; others keep their
    order.
    """
    numbers = [(re.match(r"\d+", eval_mode), eval_mode) for eval_mode in eval_modes]
    return [
        eval_mode
        for _, eval_mode in sorted(
            numbers, key=lambda pair: int(pair[0].group()) if pair[0] else -1
        )
    ]


def _pairs(s: RunSummary) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The accuracies of unseen and of training clients by evaluation mode, and unadapted unless
    that is a mode.
    """
    modes = {metric.mode: metric for metric in s.eval_modes if not metric.group}
    found = {
        eval_mode: (
            np.array(s.eval_modes[modes[eval_mode]].per_client),
            np.array(s.eval_modes[modes[eval_mode].training].per_client),
        )
        for eval_mode in in_order(modes)
    }
    if s.own and not any(eval_mode.startswith("0 ") for eval_mode in found):
        own, unseen = s.own.over(s.clients), np.isin(np.arange(s.clients), s.unseen)
        found = {"unadapted": (own[unseen], own[~unseen]), **found}
    return found


def _spread(each: np.ndarray, share: bool) -> str:
    return fmt.spread(float(each.mean()), float(each.std()) if len(each) > 1 else None, share)


def _listed(names: Iterable[str]) -> str:
    """All names, or the first few."""
    every = list(names)
    left = len(every) - NAMED
    return (
        fmt.together(every)
        if left <= 0
        else f"{', '.join(every[:NAMED])} and {fmt.whole(left)} more"
    )
