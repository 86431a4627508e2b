"""The report of a comparison.

Horizontal methods are compared by the accuracies of the clients, vertical ones by the scores of the
joint prediction.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.experiment.run.metrics import MAIN_MODE, SCORES, Metric, Score, shown_metrics
from fedloom.experiment.run.result import Comparison, MethodSummary
from fedloom.report import formatting as fmt
from fedloom.report import mixing, plots, unseen, vertical
from fedloom.report.clients import clients_of_comparison
from fedloom.report.formatting import NONE
from fedloom.report.learning import ITERATION, bytes_sent, cost_figures, iteration_axis, senders
from fedloom.report.page import Figure, Page, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import Run
from fedloom.report.results import (
    LOWER,
    ONE_SEED,
    conclusions,
    difference_tables,
    methods_table,
    metrics,
    verdict,
)
from fedloom.report.styles import series_style

BANDS = 5
"""Maximum number of curves with bands; more would overlap."""
ROUND = (
    "Methods differ in the local work and the messages of a round; the table of methods has all "
    "bytes and seconds."
)


def page(folder: Path, found: Comparison, runs: Sequence[Run], problem: str = "") -> Page:
    """The page of a comparison.

    Args:
        folder: where the page will lie; links are relative to it.
        found: the comparison.
        runs: its runs whose files exist.
        problem: why the runs cannot be paired, if they cannot.
    """
    titles = {
        name: score.title for name, score in metrics(found).items() if _in_first_table(found, name)
    }
    figures = _dots(found) if found.joint else []
    sections: list[PageSection | None] = [
        PageSection("Methods", tables=[methods_table(found, titles)], figures=figures),
        *unseen.unseen_of_comparison(found),
    ]
    if found.differences:
        sections.append(_differences(found))
    if runs:
        sections.append(_learning(found, runs, bool(problem)))
        if found.joint:
            first = next((run for run in runs if run.summary.name == found.reference), runs[0])
            which = f" in the run {first.summary.name}, seed {first.summary.seed}"
            sections += [vertical.alone_by_method(found), vertical.attacks_by_method(found, runs)]
            sections += [] if problem else [vertical.data_of_parties(first, which)]
        else:
            sections += [] if problem else [clients_of_comparison(found, runs)]
            sections += mixing.mixing_of_comparison(found, runs)
        sections.append(_runs(folder, found, runs))
    best = None if problem else verdict(found)
    return Page(
        title=found.title or fmt.together([m.name for m in found.methods]),
        subtitle=_subtitle(found, runs),
        lead=_lead(found),
        verdict=best.text if best else "",
        decided=best is not None and best.decided,
        warning=" ".join(_warnings(found, runs, problem)),
        sections=[section for section in sections if section],
        footer="Written by fedloom from the files in the runs' folders.",
    )


def _warnings(found: Comparison, runs: Sequence[Run], problem: str) -> Iterable[str]:
    if problem:
        yield f"The runs cannot be paired: {problem}."
    unit = "rounds" if found.joint else "iterations"
    lengths = {getattr(run.summary, unit) for run in runs}
    if len(lengths) > 1:
        yield (
            f"The runs differ in length ({fmt.span(lengths)} {unit}), which affects every "
            "difference."
        )
    for remark in found.remarks:
        yield f"{fmt.capital(remark)}."
    missing = len(found.runs) - len(runs)
    if missing:
        yield f"The folders of {fmt.times(missing, 'run')} are missing; figures omit these runs."


def _subtitle(found: Comparison, runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    summaries = [run.summary for run in runs]
    clients, seeds = {s.clients for s in summaries}, sorted({s.seed for s in summaries})
    one, more = ("party", "parties") if found.joint else ("client", "clients")
    parts = (
        fmt.together(sorted({s.dataset for s in summaries})),
        f"{fmt.span(clients)} {one if clients == {1} else more}",
        f"{fmt.span({s.iterations for s in summaries})} iterations",
        f"seed{'' if len(seeds) == 1 else 's'} {fmt.together([str(seed) for seed in seeds])}",
    )
    return " · ".join(parts)


def _lead(found: Comparison) -> str:
    """The accuracies of the methods; of many, the highest and the lowest."""
    over = "seeds" if found.several_seeds else "" if found.joint else "clients"
    main = found.on_test if found.joint else found.metric
    sign = -1 if main.lower_is_better else 1
    values = found.values(main)
    having = [m for m in found.methods if m.name in values]
    ordered = sorted(having, key=lambda m: -sign * values[m.name].mean)

    def reached(m: MethodSummary) -> str:
        accuracy = values[m.name]
        deviation = getattr(accuracy, f"std_over_{over}") if over else None
        return f"{m.name} {fmt.spread(accuracy.mean, deviation, main.share)}"

    title = fmt.capital(main.noun)
    where = found.measured_in.removeprefix(f"{main.noun} ")
    if len(ordered) <= BANDS:
        text = f"{title} {where}: {fmt.together([reached(m) for m in ordered])}"
    else:
        text = f"{title} {where}: from {reached(ordered[0])} to {reached(ordered[-1])}"
    text += f" (s.d. over {over})" if over else ""
    chance = found.chance_of(main)
    if chance is None:
        return f"{text}."
    return (
        f"{text}; always predicting {found.most_frequent(main)} gives "
        f"{fmt.metric(chance, main.share)}."
    )


def _in_first_table(found: Comparison, metric: Metric) -> bool:
    """Whether the table of methods has a metric; those over unseen clients have tables of their
    own.
    """
    return not found.unseen or metric == found.metric or metric.clients != "unseen"


def _differences(found: Comparison) -> PageSection:
    """The differences of each metric, and conclusions."""
    scores = [
        score
        for name, score in metrics(found).items()
        if name == found.metric or name in found.further
    ]
    main = f"{scores[0].title}: " if len(scores) > 1 else ""
    points = [main + text for text in conclusions(found)]
    points += [] if any(len(d.per_seed) > 1 for d in found.differences) else [ONE_SEED]
    titles = [score.title if found.joint else found.metric.noun for score in scores if score.lower]
    lower = dict.fromkeys(title if title[:2].isupper() else title.lower() for title in titles)
    points += [LOWER.format(" or ".join(lower))] if lower else []
    return PageSection("Paired differences", tables=difference_tables(found), points=points)


def _dots(found: Comparison) -> list[Figure]:
    names = [
        name
        for name in (found.on_test, Metric("balanced accuracy"))
        if all(name in m.scores for m in found.methods)
    ]
    if len(found.methods) < 2 or not names:
        return []
    series = [
        Dots(
            SCORES[name].title.lower(),
            np.array([m.scores[name].mean for m in found.methods]),
            replace(
                series_style(number), shape="diamond" if number else "circle", filled=not number
            ),
        )
        for number, name in enumerate(names)
    ]
    main = found.on_test
    form = partial(fmt.metric, share=main.share)
    alt = fmt.together([f"{m.name} {form(m.overall.mean)}" for m in found.methods])
    title, given = fmt.capital(main.noun), plots.share if main.share else form
    svg, legend = plots.dots(
        "methods", f"{title}: {alt}.", [m.name for m in found.methods], series, form=given
    )
    what = "accuracies" if main.share else "errors"
    return [
        Figure(
            f"{title} of the methods",
            svg,
            legend,
            f"Mean over seeds; the numbers on the right are {what}.",
        )
    ]


def _learning(found: Comparison, runs: Sequence[Run], problem: bool) -> PageSection:
    """The main accuracy or all scores by iteration or round, and the main one by bytes sent."""
    main = found.on_test if found.joint else found.metric
    chance = None if problem else found.chance_of(main)
    level = "chance" if main == found.on_test else f"always {found.most_frequent(main)}"
    levels = [] if chance is None else [Level(level, chance)]
    named = [[run for run in runs if run.summary.name == method.name] for method in found.methods]
    groups = [(number, own) for number, own in enumerate(named) if own]
    scores = (
        metrics(found) if found.joint else {main: Score(main.mean, f"Mean {main.noun}", main.share)}
    )
    figures = []
    for name, score in scores.items():
        having = [
            (number, own)
            for number, own in groups
            if all(len(_series(run, name, score)[0]) for run in own)
        ]
        curves = [_curve(own, number, name, score) for number, own in having]
        if curves:
            seeds = {len(own) for _, own in having}
            figures.append(
                _curves_figure(
                    found, name, score, curves, levels if name == main else [], seeds, runs[0]
                )
            )
    lines = [replace(_curve(own, number, main, scores[main]), band=None) for number, own in groups]
    spent = [
        np.mean([bytes_sent(run)[: len(line.x)] for run in own], axis=0)
        for (_, own), line in zip(groups, lines, strict=True)
    ]
    across = any(m.bytes.across for m in found.methods)
    direction = senders(runs[0]) if across or found.joint else "sent up by all clients"
    figures[1:1] = cost_figures(
        lines, spent, levels, direction, f"Tensor data {direction}, without framing.", main
    )
    return PageSection("Learning", figures=figures)


def _curves_figure(
    found: Comparison,
    name: Metric,
    score: Score,
    curves: Sequence[Line],
    levels: list[Level],
    seeds: set[int],
    run: Run,
) -> Figure:
    """One metric of all methods; `seeds` holds the numbers of seeds per method."""
    drawn = curves if len(curves) <= BANDS else [replace(line, band=None) for line in curves]
    if found.joint:
        title, slug, across, unit = score.title, f"learning {name}", "rounds", "round"
        bands = (
            "Mean over seeds; the band is ± one s.d. over seeds."
            if any(line.band is not None for line in drawn)
            else ""
        )
        more = "Lower is better." if score.lower else ROUND if name == found.on_test else ""
    else:
        title, slug, across, unit = (
            f"{fmt.capital(name.noun)} {found.describe(name)}",
            "learning",
            iteration_axis(run),
            "iteration",
        )
        bands, more = "Mean over clients" + ("" if seeds == {1} else " and seeds"), ITERATION
        if len(curves) <= BANDS:
            also = ", or over clients for methods with one seed" if 1 in seeds else ""
            bands += "; the band is ± one s.d. over " + (
                "clients" if seeds == {1} else f"seeds{also}"
            )
        bands += "."
    ends = fmt.together([f"{line.label} {fmt.metric(line.y[-1], score.share)}" for line in curves])
    alt = f"{score.title} by {unit}; at the end {ends}."
    form = plots.share if score.share else None
    svg, legend = plots.chart(slug, alt, drawn, levels, across=across, form_y=form)
    return Figure(title, svg, legend, f"{bands} {more}".strip())


def curves(found: Comparison, runs: Sequence[Run], metric: Metric, score: Score) -> list[Line]:
    """The curve of each method that has the metric, its mean over seeds."""
    named = [[run for run in runs if run.summary.name == method.name] for method in found.methods]
    having = [
        (number, own)
        for number, own in enumerate(named)
        if own and all(len(_series(r, metric, score)[0]) for r in own)
    ]
    return [_curve(own, number, metric, score) for number, own in having]


def _series(run: Run, metric: Metric, score: Score) -> tuple[np.ndarray, np.ndarray]:
    s = run.summary
    column = score.column if s.scores else s.called(metric).mean
    if metric.mode != MAIN_MODE or s.eval_modes or not s.unseen:
        return run.curve(column, run.last)
    name = str(s.called(metric))  # of the clients that a mode is of, of a method without one
    found = [run.curve(name, run.last, run.names[i]) for i in s.unseen]
    return found[0][0], np.mean([y for _, y in found], axis=0)


def _curve(runs: Sequence[Run], number: int, metric: Metric, score: Score) -> Line:
    """A method's mean over seeds, by iterations or, in vertical learning, by rounds. The band is
    the deviation over seeds or, with one seed, over clients.
    """
    first = runs[0]
    s, curves = first.summary, [_series(run, metric, score) for run in runs]
    points = min(len(x) for x, _ in curves)
    y = np.stack([y[:points] for _, y in curves])
    x, band = curves[0][0][:points], y.std(0, ddof=1) if len(y) > 1 else None
    if s.scores:
        x = x * (s.rounds / max(1, s.iterations))
    elif band is None:
        band = first.curve(s.called(metric).std, first.last)[1]
    return Line(s.name, x, y.mean(0), series_style(number), band)


def _runs(folder: Path, found: Comparison, runs: Sequence[Run]) -> PageSection:
    """All runs, linked to their reports: name, seed, metrics, failures, and a hash of all states.

    Metrics are the scores of a joint prediction; or for clients the mean of the main accuracy with
    its s.d. over clients, the means of the others, and how far clients agree. A row has its values
    in the order of `shown`.
    """
    # the columns of metrics: any that at least one run has
    if found.joint:
        shown = [score for score in SCORES if any(score in run.summary.scores for run in runs)]
        columns, caption = [SCORES[score].title for score in shown], "Scores of each run"
    else:
        # if the main metric is over unseen clients, `shown_metrics` keeps of those over training
        # clients the same one alone
        of_any_run = dict.fromkeys(  # each metric once, in the order in which runs have them
            metric
            for run in runs
            for metric in shown_metrics(run.summary.accuracies, bool(run.summary.unseen))
        )
        # on test rows and on own rows come first: their titles are short, and `describe` names the
        # others by mode and clients, in the first run's words, as a column has one title. `mine`
        # says what own test rows are.
        main, own = found.on_test, found.on_own
        shown = [main, own, *(metric for metric in of_any_run if metric not in (main, own))]
        prepared = [fmt.capital(runs[0].summary.describe(metric)) for metric in shown[2:]]
        title = fmt.capital(main.noun)
        columns = [title, f"On {found.mine}", *prepared, "Agreement"]
        caption = f"{title} ± s.d. over clients"

    rows = []
    for run in runs:
        # a link from the folder of this page; none before the run's report is written
        summary, report = run.summary, run.folder / "report.html"
        href = quote(Path(os.path.relpath(report, folder)).as_posix()) if report.is_file() else ""
        if found.joint:
            # `share`: a score is shown in percent
            values = [
                fmt.metric(summary.scores[score], SCORES[score].share)
                if score in summary.scores
                else NONE
                for score in shown
            ]
        else:
            # accuracies differ in rows and evaluation mode alone: all are shares (in percent), or
            # all are numbers, as `share` of that on test rows tells
            further = [summary.accuracies.get(metric) for metric in shown[1:]]
            values = [fmt.spread(summary.overall.mean, summary.overall.std, summary.on_test.share)]
            values += [
                NONE if spread is None else fmt.metric(spread.mean, summary.on_test.share)
                for spread in further
            ]
            values += [NONE if summary.agreement is None else fmt.percent(summary.agreement)]
        # the beginning of the hash tells runs apart; the whole is shown under the pointer
        state = PageCell((summary.state_sha256 or NONE)[:12], summary.state_sha256 or "")
        rows.append(
            cells(
                PageCell(summary.name, href=href),
                str(summary.seed),
                *values,
                fmt.whole(summary.failures),
                state,
            )
        )
    linked = "; names link to the reports of the runs" if any(row[0].href for row in rows) else ""
    columns = ["Run", "Seed", *columns, "Failures", "State hash"]
    return PageSection("Runs", tables=[PageTable(f"{caption}{linked}", columns, rows)])
