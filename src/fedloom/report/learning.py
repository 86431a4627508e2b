"""Learning curves and diagnostics of a run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedloom.experiment.run.metrics import (
    GLOBAL,
    SCORES,
    Metric,
    in_mode,
    own_rows_of,
    shown_metrics,
)
from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.page import Details, Figure, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import START, Run
from fedloom.report.styles import DASHES, SeriesStyle, series_style

ACROSS = "iterations of a client"
"""Label of the x axis in horizontal learning."""
ITERATION = (
    "One iteration is one local step of a client, or one pass over its rows if the method counts "
    "passes."
)
JOINT_ITERATION = "One iteration is one pass of the active party over the aligned rows."
STANDARD = (
    *(
        "accuracy",
        "own accuracy",
        "chance",
        "rmse",
        "own rmse",
        "mae",
        "own mae",
        "r2",
        "own r2",
        "balanced accuracy",
        "own balanced",
        "auc",
        "own auc",
        "calibration",
    ),
    *("own calibration", "attack", "loss", "own loss", "agreement", "recall", "bytes"),
)
"""Prefixes of the metrics of every run; all others are notes of parties."""

MEANINGS = {
    "agreement": "Share of test rows on which two clients predict the same class.",
    "loss mean": "Cross-entropy on the test rows in nats, or half the squared error of a standardized "  # noqa: E501
    "number; mean over clients.",
    "discriminator loss": "At ln N the server cannot tell the outputs of the N clients apart.",
    "discriminator accuracy": "Share of outputs that the server attributes to the right client; chance is 1/N.",  # noqa: E501
    "gamma": "γ, the weight of the global class prior in a party's own prior, mean over parties.",
    "share of the largest pseudo-class": "The share of a party's rows with the most frequent pseudo-label, mean over parties; "  # noqa: E501
    "near 1 the extractor has collapsed.",
    "cosine between pseudo-classes": "Mean cosine of the mean embeddings of two pseudo-classes of a party, mean over parties; "  # noqa: E501
    "near 1 the extractor has collapsed.",
    "cosine between prototypes": "Mean cosine of two class prototypes of a party, mean over parties.",  # noqa: E501
    "norm of prototypes": "Mean length of the class prototypes, mean over parties.",
    "collapsed": "The share of parties whose embeddings collapsed in a round.",
    "gradient norm": "Length of each term's gradient for a public row at the last step of a round, mean over "  # noqa: E501
    "rows and clients.",
}


def learning(run: Run) -> PageSection:
    """The main metric by iteration and by bytes sent, and all other scores by iteration."""
    s = run.summary
    levels = [] if s.chance is None else [Level("chance", s.chance)]
    lines = [
        _curve(run, number, stage) for number, stage in enumerate(reversed(run.stages or [START]))
    ]
    if s.scores and s.task == "classes":
        balanced = SCORES[Metric("balanced accuracy")]
        lines[1:1] = [
            Line(
                balanced.title.lower(), *run.curve(balanced.column, run.last), _dashed(1, "diamond")
            )
        ]
    main = lines[0]
    caption = "Tensor data" + ("" if s.scores else " sent by clients") + ", without framing."
    noun, form = s.on_test.noun, form_of(s.on_test)
    alt = f"Mean {noun} by iteration, {_ends(main, s.on_test)}."
    svg, legend = plots.chart(
        "learning", alt, lines, levels, across=iteration_axis(run), form_y=form
    )
    where = "the test rows" if s.scores else s.tested
    figures = [
        Figure(
            f"{fmt.capital(noun)} on {where}",
            svg,
            legend,
            JOINT_ITERATION if s.scores else ITERATION,
        )
    ]
    figures += [
        _score_figure(run, one) for one in (Metric("auc"), Metric("log loss")) if one in s.scores
    ]
    if run.personal and len(s.accuracies) > 1:
        main, levels, figure = _own(run)
        figures.insert(0, figure)
        caption += f" The {noun} is {s.describe(s.main)}."
    label = main.label if s.scores else "mean over clients ± s.d."
    cost = cost_figures(
        [replace(main, label=label)], [bytes_sent(run)], levels, senders(run), caption, s.on_test
    )
    details = [Details("Data of the curves", table=_evaluations(run))]
    return PageSection("Learning", figures=figures + cost, details=details)


def iteration_axis(run: Run) -> str:
    """The label of the iteration axis."""
    return "iterations" if run.summary.scores else ACROSS


def senders(run: Run) -> str:
    """The label of the axis of bytes sent."""
    return "sent by all, up and down" if run.summary.scores else "sent by all clients"


def bytes_sent(run: Run) -> np.ndarray:
    """Cumulative bytes (n,) at each evaluation: sent by clients; in vertical learning, sent by all
    parties.
    """
    directions = ("up", "down", "across") if run.summary.scores else ("up", "across")
    total: np.ndarray = np.sum(
        [run.curve(f"bytes {direction}", run.last)[1] for direction in directions], axis=0
    )
    return total


def cost_figures(
    curves: Sequence[Line],
    spent: Sequence[np.ndarray],
    levels: Sequence[Level],
    across: str,
    caption: str,
    metric: Metric = GLOBAL,
) -> list[Figure]:
    """The metric by bytes `spent`. A curve without bytes becomes a horizontal line."""
    pairs = list(zip(curves, spent, strict=True))
    lines = [replace(line, x=x) for line, x in pairs if x[-1] > 0]
    silent = [
        Level(
            f"{line.label} (sends nothing)",
            float(line.y[-1]),
            SeriesStyle(line.style.color, dash=(6, 3)),
        )
        for line, x in pairs
        if x[-1] == 0
    ]
    if not lines:
        return []
    ends = fmt.together(
        [f"{line.label} {fmt.size(line.x[-1])}" for line in lines]
        if pairs[1:]
        else [fmt.size(lines[0].x[-1])]
    )
    alt = f"Mean {metric.noun} by bytes {across}; in total {ends}."
    levels, form = [*levels, *silent], form_of(metric)
    svg, legend = plots.chart(
        "bytes", alt, lines, levels, across=across, form_x=plots.volume, form_y=form
    )
    return [Figure(f"{fmt.capital(metric.noun)} by bytes sent", svg, legend, caption)]


def _curve(run: Run, number: int, stage: str) -> Line:
    """The mean of the main metric after a stage; for number 0, the last stage, with the deviation
    over clients.
    """
    main = run.summary.on_test
    x, y = run.curve(main.mean, stage)
    if run.summary.scores:
        label, style = (
            (f"{main.noun} after the {stage} stage", _dashed(number + 1))
            if number
            else (main.noun, series_style(0))
        )
        return Line(label, x, y, style)
    label = f"after the {stage} stage" if len(run.stages) > 1 else "mean over clients"
    if number:
        return Line(label, x, y, _dashed(number, "square"))
    return Line(
        f"{label} ± s.d. over clients", x, y, series_style(0), run.curve(main.std, stage)[1]
    )


def _dashed(number: int, shape: str = "") -> SeriesStyle:
    style = replace(series_style(number), dash=(5, 3), filled=False)
    return replace(style, shape=shape) if shape else style


def _own(run: Run) -> tuple[Line, list[Level], Figure]:
    """The main line, its levels and the figure of accuracies on own rows, by evaluation mode."""
    s, lines = run.summary, list[Line]()
    for metric in shown_metrics(s.accuracies, bool(s.unseen)):
        if metric == s.on_test:
            continue
        x, y = run.curve(metric.mean, run.last)
        label = in_mode(metric, bool(s.unseen)) or "unadapted"
        if lines:
            lines.append(Line(label, x, y, _dashed(len(lines), "diamond")))
        else:
            band = run.curve(metric.std, run.last)[1]
            lines.append(Line(f"{label} ± s.d. over clients", x, y, series_style(0), band))
    main, chance = lines[0], s.chance_of(s.main)
    where = ", at unseen clients" if s.unseen and s.own else ""
    noun = s.main.noun
    levels = [] if chance is None else [Level(f"always {s.most_frequent(s.main)}{where}", chance)]
    title = f"on {s.mine}" if s.own else f"on {s.tested}, by evaluation mode"
    title = f"{fmt.capital(noun)} {title}"
    alt = f"Mean {noun} {s.describe(s.main)}, by iteration, {_ends(main, s.main)}."
    svg, legend = plots.chart(
        "own", alt, lines, levels, across=iteration_axis(run), form_y=form_of(s.main)
    )
    rows = "its own test rows" if s.mine == own_rows_of(True) else "test rows in its own class mix"
    caption = f"Each client on {rows}, mean over clients." if s.own else ""
    return main, levels, Figure(title, svg, legend, f"{caption} {ITERATION}".strip())


def form_of(metric: Metric) -> Callable[[float], str] | None:
    """The formatter of an axis of a metric: of shares, or None for numbers."""
    return plots.share if metric.share else None


def _ends(line: Line, metric: Metric) -> str:
    first, last = (fmt.metric(value, metric.share) for value in (line.y[0], line.y[-1]))
    return f"from {first} at the start to {last} at the end"


def _score_figure(run: Run, name: Metric) -> Figure:
    """A score by iteration; for the log loss, also the training loss of the active party."""
    score = SCORES[name]
    x, y = run.curve(score.column, run.last)
    lines = [Line("on the test rows", x, y, series_style(0))]
    own = run.curve("loss", run.last, "active")
    if name.name == "log loss" and len(own[0]):
        style = replace(series_style(1), shape=None)
        lines.append(Line("on the active party's last training batch", *own, style))
    levels = [Level("chance", 0.5)] if name.name == "auc" else []
    alt = (
        f"{score.title} by iteration, from {fmt.number(y[0])} at the start to "
        f"{fmt.number(y[-1])} at the end."
    )
    svg, legend = plots.chart(
        str(name), alt, lines, levels, across=iteration_axis(run), form_y=None
    )
    return Figure(
        score.title,
        svg,
        legend if len(legend) > 1 else (),
        "Lower is better." if score.lower else "",
    )


def _evaluations(run: Run) -> PageTable:
    s = run.summary
    columns: list[tuple[str, str, Callable[[float], str | PageCell]]]
    if s.scores:
        scores = [SCORES[name] for name in s.scores]
        columns = [
            (score.title, score.column, partial(fmt.metric, share=score.share)) for score in scores
        ]
        caption = "Each evaluation on the test rows"
    else:
        own = (
            [
                metric
                for metric in shown_metrics(s.accuracies, bool(s.unseen))
                if metric != s.on_test
            ]
            if run.personal
            else []
        )
        main, form = s.on_test, partial(fmt.metric, share=s.on_test.share)
        columns = [(fmt.capital(s.describe(metric)), metric.mean, form) for metric in own]
        columns += [(fmt.capital(main.noun), main.mean, form)]
        columns += [
            ("s.d. over clients", main.std, partial(fmt.standard_deviation, share=main.share)),
            ("Loss", "loss mean", fmt.number),
        ]
        caption = f"Each evaluation on {s.tested}" + (
            "; on own rows in the columns that say so" if own else ""
        )
    columns += [("Sent up", "bytes up", _size_cell), ("Sent down", "bytes down", _size_cell)]
    rows: list[tuple[int, list[PageCell]]] = []
    for stage in (START, *run.stages):
        found = [run.measured.get((column, "", stage), ([], [])) for _, column, _ in columns]
        for iteration, *values in zip(found[0][0], *(values for _, values in found), strict=True):
            texts = [form(value) for (_, _, form), value in zip(columns, values, strict=True)]
            rows.append((iteration, cells(fmt.whole(iteration), stage, *texts)))
    rows.sort(key=lambda row: row[0])
    return PageTable(
        caption,
        ("Iteration", "Stage", *(title for title, _, _ in columns)),
        [row for _, row in rows],
        words=2,
    )


def _size_cell(count: float) -> PageCell:
    return PageCell(fmt.size(count), fmt.exact_bytes(count))


def diagnostics(run: Run) -> PageSection | None:
    """Agreement, loss, accuracy by class, notes of parties, and collapses of extractors."""
    joint, points = bool(run.summary.scores), []
    figures = _panels(run, () if joint else ("agreement", "loss mean"))
    if joint and not figures:
        return None
    collapsed = [
        v
        for (name, _, _), (_, values) in run.measured.items()
        if name == "collapsed"
        for v in values
    ]
    if joint and collapsed:
        bad = sum(value > 0 for value in collapsed)
        seen = (
            f"In {fmt.times(bad, 'round')} an extractor collapsed"
            if bad
            else "No extractor collapsed"
        )
        points = [
            f"{seen}. A collapsed extractor maps most rows or all classes of a party to similar "
            "embeddings, which minimizes the distance to prototypes trivially."
        ]
    figures += [] if joint else _classes(run, run.last)
    return PageSection("Diagnostics", points=points, figures=figures, small=True)


def _panels(run: Run, first: Sequence[str]) -> list[Figure]:
    groups: dict[str, list[tuple[str, str, str]]] = {name: [] for name in first}
    for key in run.measured:
        metric, party, stage = key
        if metric in groups and (party, stage) == ("", run.last):
            groups[metric].append(key)
        elif not metric.startswith(STANDARD) and party not in run.names:
            name = "gradient norm" if metric.startswith("gradient norm ") else metric
            groups.setdefault(name, []).append(key)
    return [_panel(run, name, keys) for name, keys in groups.items() if keys]


def _panel(run: Run, name: str, keys: list[tuple[str, str, str]]) -> Figure:
    lines = []
    for number, (metric, party, stage) in enumerate(keys):
        x, y = run.curve(metric, stage, party)
        thin = SeriesStyle(series_style(number).color, dash=DASHES[number % len(DASHES)])
        lines.append(Line(metric.removeprefix(f"{name} "), x, y, thin))
    ends = fmt.together([f"{line.label} is {line.y[-1]:.3g}" for line in lines])
    shares, clients = "accuracy" in name or name == "agreement", run.summary.clients
    levels = {
        "discriminator loss": (f"ln {clients}", math.log(clients)),
        "discriminator accuracy": (f"1 / {clients}", 1 / clients),
    }
    title = fmt.capital(name.removesuffix(" mean"))
    svg, legend = plots.chart(
        f"note {name}",
        f"{title} by iteration; at the end {ends}.",
        lines,
        [Level(*levels[name])] if name in levels else [],
        across=iteration_axis(run),
        form_y=plots.share if shares else None,
        width="small",
    )
    return Figure(title, svg, legend if len(legend) > 1 else (), MEANINGS.get(name, ""))


def _classes(run: Run, stage: str) -> list[Figure]:
    found = [run.measured.get((f"recall {name}", "", stage)) for name in run.partition.classes]
    if not any(found) or len(found) > plots.ROWS:
        return []
    values = np.array([series[1][-1] if series else math.nan for series in found])
    low, high = fmt.percent(np.nanmin(values)), fmt.percent(np.nanmax(values))
    series = Dots("mean over clients", values, replace(series_style(0), dash=None))
    alt = f"Accuracy by class, {low} to {high}."
    svg, _ = plots.dots("classes", alt, run.partition.classes, [series], width="small")
    caption = "Recall by class on the global test set at the end, mean over clients."
    return [Figure("Accuracy by class", svg, (), caption)]
