"""The clients of a run or comparison: their accuracy and their data."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedloom.experiment.run.metrics import Metric, own_rows_of
from fedloom.experiment.run.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report import heatmaps, plots
from fedloom.report.page import Figure, PageSection, PageTable, cells
from fedloom.report.plots import Dots
from fedloom.report.read import Run
from fedloom.report.styles import HOLLOW, series_style

WIDE = 12
"""Figures of more clients take the whole width of the page."""


def clients_of_run(run: Run) -> PageSection:
    """The accuracy of each client of a run, on all classes and on its own class mix, and the
    partition.
    """
    s = run.summary
    if s.eval_modes and s.own:
        return _by_eval_mode(run)
    order, each, noun, share = _order(run), s.overall.over(s.clients), s.main.noun, s.main.share
    series = [Dots(s.tested, each[order], series_style(0))]
    caption = f"Clients are sorted by {noun} on {s.tested}."
    if s.own:
        series.append(
            Dots(
                s.mine,
                s.own.over(s.clients)[order],
                HOLLOW,
            )
        )
        if s.mine == own_rows_of(False):
            caption += (
                " The own class mix weights test rows by the classes of a client's training rows."
            )
    known = each[order]  # empty if training diverged at every client
    ends = (
        f"{fmt.metric(known.min(), share)} to {fmt.metric(known.max(), share)}"
        if len(known)
        else fmt.NONE
    )
    alt = f"{fmt.capital(noun)} of each client, {ends}."
    return _section(run, order, series, alt, caption)


def _by_eval_mode(run: Run) -> PageSection:
    """Accuracies on own class mixes, in the first evaluation mode and without it; unseen clients
    come first.
    """
    s = run.summary
    metric, before = next(iter(s.eval_modes)), s.accuracies[s.on_own].over(s.clients)
    noun, share, sign = metric.noun, metric.share, -1 if metric.lower_is_better else 1
    eval_mode, after = metric.eval_mode, s.eval_modes[metric].over(s.clients)
    if s.unseen:
        after = np.where(np.isnan(after), s.eval_modes[metric.training].over(s.clients), after)
    order = np.lexsort((-sign * after, ~np.isin(np.arange(s.clients), s.unseen)))
    series = [
        Dots(eval_mode, after[order], series_style(0)),
        Dots("unadapted", before[order], HOLLOW),
    ]
    better = int((sign * (after - before) > 0).sum())
    worse = int((sign * (after - before) < 0).sum())
    mine = (
        "test rows in {} client's own class mix"
        if s.mine == own_rows_of(False)
        else "{} client's own test rows"
    )
    caption = (
        f"{fmt.capital(noun)} on {mine.format('each')}, sorted by the {noun} {eval_mode}. The "
        f"mean {'gain over' if share else 'difference from'} unadapted models is "
        f"{fmt.difference(float(np.nanmean(after - before)), share)}{' points' * share}; "
        f"{better} of {s.clients} clients improve, and {worse} get worse."
    )
    caption += " Unseen clients come first." if s.unseen else ""
    means = [f"{one.label} {fmt.metric(np.nanmean(one.values), share)}" for one in series]
    alt = (
        f"{fmt.capital(noun)} of each client on {mine.format('the')}; the means are "
        f"{fmt.together(means)}."
    )
    return _section(run, order, series, alt, caption, joined=True)


def clients_of_comparison(found: Comparison, runs: Sequence[Run]) -> PageSection:
    """The accuracy of each client by method, in the first seed: seeds differ in their
    partitions.
    """
    # the runs of the first seed, by method; clients are sorted by the reference, if it has a run
    seed = runs[0].summary.seed
    same = {run.summary.name: run for run in runs if run.summary.seed == seed}
    first = same.get(found.reference, runs[0])
    order, clients = _order(first, found.metric), first.summary.clients
    # The values (clients,) of each method that measured the metric. Its number among all methods
    # gives it the color that it has in other figures.
    series = [
        Dots(
            method.name,
            each.over(clients)[order],
            series_style(number_of_method),
        )
        for number_of_method, method in enumerate(found.methods)
        if method.name in same and (each := same[method.name].summary.of(found.metric))
    ]
    share, title = found.metric.share, fmt.capital(found.metric.noun)
    means = fmt.together([f"{one.label} {fmt.metric(one.values.mean(), share)}" for one in series])
    # the figure, with a text in place of it for those who do not see it
    alt = f"{title} of each client by method; the means are {means}."
    many = len({run.summary.seed for run in runs}) > 1
    caption = f"{fmt.capital(found.measured_in)}. Clients are sorted by {first.summary.name}."
    caption += " Other seeds have other partitions." if many else ""
    section = _section(first, order, series, alt, caption, f", seed {seed}" if many else "")

    # A table by the network or black box that clients have, over all seeds, if there are several.
    # Without one the section has no table: `_section` made one of the first run alone.
    rows = [
        cells(name, str(count), *(fmt.with_gain(mean, gain, share) for mean, gain in values))
        for name, count, values in found.networks
    ]
    if not rows:
        return replace(section, tables=[])
    over = found.gains_over
    caption = (
        f"{title} {found.describe(found.metric)} by the clients' model; mean over clients and seeds"
    )
    caption += ", without unseen clients" if found.unseen and not found.metric.clients else ""
    caption += (
        f"; in brackets the gain{' in points' * share} over {over}"
        if over and len(found.methods) > 1
        else ""
    )
    return replace(
        section,
        tables=[PageTable(caption, ["Model", "Clients", *(m.name for m in found.methods)], rows)],
    )


def _by_model(run: Run) -> list[PageTable]:
    """The accuracies of a run by the clients' network or black box, if there are several."""
    s, names = run.summary, run.partition.architectures
    shown = {
        fmt.capital(s.describe(metric)): found.over(s.clients)
        for metric, found in s.accuracies.items()
    }
    for each, found in zip(shown.values(), s.accuracies.values(), strict=True):
        if found.clients is None:  # unseen clients never trained
            each[list(s.unseen)] = np.nan
    rows = []
    for name in sorted(set(names)):
        of = [i for i, own in enumerate(names) if own == name]
        means = [each[of][np.isfinite(each[of])] for each in shown.values()]
        count = len({*of} - {*s.unseen})
        rows.append(
            cells(
                name,
                str(count),
                *(fmt.metric(m.mean(), s.main.share) if len(m) else fmt.NONE for m in means),
            )
        )
    caption = f"{fmt.capital(s.main.noun)} by the clients' model, mean over clients"
    caption += "; unseen clients count only in the columns that name them" if s.unseen else ""
    return [PageTable(caption, ["Model", "Clients", *shown], rows)] if len(rows) > 1 else []


def _section(
    run: Run,
    order: np.ndarray,
    series: list[Dots],
    alt: str,
    caption: str,
    which: str = "",
    joined: bool = False,
) -> PageSection:
    """Accuracies of the clients in an order, and the partition; `which` names the run if there are
    several.
    """
    wide, names = len(order) > WIDE, run.partition.architectures
    labels = [
        f"{run.display_names[i]} · {names[i]}" + " · unseen" * (i in run.summary.unseen)
        for i in order
    ]
    main, width = run.summary.main, "wide" if wide else "normal"
    form = plots.share if main.share else partial(fmt.metric, share=False)
    svg, legend = plots.dots("clients", alt, labels, series, width=width, joined=joined, form=form)
    figure = Figure(f"{fmt.capital(main.noun)} of each client{which}", svg, legend, caption, wide)
    if run.partition.private_clients:
        text = [
            "The rows of each client are private; this page knows only scores, to which nodes "
            "add noise."
        ]
        return PageSection("Clients", text=text, figures=[figure], tables=_by_model(run))
    return PageSection("Clients", figures=[figure, _partition(run, which)], tables=_by_model(run))


def _order(run: Run, metric: Metric | None = None) -> np.ndarray:
    """(n,) the clients with a metric, by default the main one, from the best to the worst."""
    found = run.summary.of(metric or run.summary.main)
    assert found is not None
    each = found.over(run.summary.clients)
    sign = -1 if (metric or run.summary.main).lower_is_better else 1
    return np.argsort(-sign * each, kind="stable")[: np.isfinite(each).sum()]


def _partition(run: Run, which: str) -> Figure:
    held = run.partition
    counts = np.array(held.counts)
    clients, classes = counts.shape
    most = int(counts.max())
    kinds = (
        ("class", "classes")
        if run.summary.task == "classes"
        else ("part of the target's range", "parts")
    )
    alt = f"Training rows of {classes} {kinds[1]} at {clients} clients, at most {most} in a cell."
    svg = heatmaps.class_counts("partition", alt, counts, held.classes)
    caption = (
        f"Training rows by {kinds[0]} and client. A client has "
        f"{fmt.span(counts.sum(1).tolist())} rows of {fmt.span((counts > 0).sum(1).tolist())} of "
        f"{fmt.times(classes, *kinds)}. There are also {fmt.whole(held.test)} test rows and "
        f"{fmt.whole(held.public)} unlabeled public rows."
    )
    caption += f" The server has {fmt.whole(held.server)} labeled rows." if held.server else ""
    return Figure(f"Partition{which}", svg, (heatmaps.rows_legend(most),), caption, clients > WIDE)
