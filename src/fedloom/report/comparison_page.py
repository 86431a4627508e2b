"""The report of a comparison: the blocks that its methods have.

Clients with different rows are compared by their accuracies, each by itself; parties with different columns by the
scores of the one prediction that they give together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.experiment.metrics import GLOBAL, OWN, SCORES, Score, group_of, shown
from fedloom.experiment.result import Comparison, MethodSummary, PairedDifference, SeedSpread, Traffic
from fedloom.report import formatting as fmt
from fedloom.report import mixing, plots, unseen, vertical
from fedloom.report.clients import of_several
from fedloom.report.formatting import NONE
from fedloom.report.learning import ITERATION, cost_figures, iteration_axis, senders, sent
from fedloom.report.page import Figure, Page, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import Run
from fedloom.report.statistics import confidence_interval
from fedloom.report.styles import series_style

BANDS = 5
"""The curves of more methods have no bands, which would cover each other."""
ONE_SEED = "One seed says nothing about chance: repeat with other seeds before you call a method better."
LESS = "Of the log-loss less is better: a difference below 0 is in favour of the first."
ROUND = (
    "What a round is differs: a method may count local steps or passes, and send more or fewer messages. All bytes and "
    "seconds are in the table of methods."
)


def page(folder: Path, found: Comparison, runs: Sequence[Run], problem: str = "") -> Page:
    """The page of a comparison.

    Args:
        folder: where the page will lie; links are relative to it.
        found: the comparison.
        runs: those of its runs whose files exist.
        problem: why the runs can't be paired, if so.
    """
    sections: list[PageSection | None] = [_methods(found), *unseen.of_methods(found)]
    if found.differences:
        sections.append(_differences(found))
    if runs:
        sections.append(_learning(found, runs, bool(problem)))
        if found.joint:
            first = next((run for run in runs if run.summary.name == found.reference), runs[0])
            which = f" in the run {first.summary.name}, seed {first.summary.seed}"
            sections += [vertical.alone_by_method(found), vertical.attacks_by_method(found, runs)]
            sections += [] if problem else [vertical.holdings(first, which)]
        else:
            sections += [] if problem else [of_several(found, runs)]
            sections += mixing.of_methods(found, runs)
        sections.append(_runs(folder, found, runs))
    return Page(
        title=found.title or fmt.capital(fmt.together([m.name for m in found.methods])),
        subtitle=_subtitle(found, runs),
        lead=_lead(found),
        warning=" ".join(_warnings(found, runs, problem)),
        sections=[section for section in sections if section],
        footer="Made by fedloom from the files of the runs' folders.",
    )


def _warnings(found: Comparison, runs: Sequence[Run], problem: str) -> Iterable[str]:
    """Warnings before the numbers."""
    if problem:
        yield f"Side by side only, without paired differences: {problem}."
    unit = "rounds" if found.joint else "iterations"
    lengths = {getattr(run.summary, unit) for run in runs}
    if len(lengths) > 1:
        yield f"The runs are of different length, {fmt.span(lengths)} {unit}, which moves every difference."
    for remark in found.remarks:
        yield f"{fmt.capital(remark)}."
    missing = len(found.runs) - len(runs)
    if missing:
        yield f"The folders of {fmt.times(missing, 'run')} are not here: figures leave them out."


def _subtitle(found: Comparison, runs: Sequence[Run]) -> str:
    """Dataset, clients, iterations and seeds, or their ranges."""
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
    """The accuracies in a sentence; of many methods, the highest and the lowest."""
    over = "seeds" if found.several_seeds else "" if found.joint else "clients"
    main = GLOBAL if found.joint else found.measure
    ordered = sorted(found.methods, key=lambda m: -m.accuracies[main].mean)

    def reached(m: MethodSummary) -> str:
        accuracy = m.accuracies[main]
        return f"{m.name} {fmt.spread(accuracy.mean, getattr(accuracy, f'std_over_{over}') if over else None)}"

    where = "on the test rows" if found.joint else found.describe(main)
    if len(ordered) <= BANDS:
        text = f"Accuracy {where}: {fmt.together([reached(m) for m in ordered])}"
    else:
        text = f"Accuracy {where}: from {reached(ordered[0])} to {reached(ordered[-1])}"
    text += f" (s.d. over {over})" if over else ""
    chance = found.chance_of(main)
    if chance is None:
        return f"{text}."
    return f"{text}; always answering {found.most_frequent(main)} gives {fmt.percent(chance)}."


def _metrics(found: Comparison) -> dict[str, Score]:
    """The metrics of the tables, the main one first: all scores; or the main accuracy and, where a method has ways, all
    others."""
    if found.joint:
        return {name: score for name, score in SCORES.items() if any(name in m.scores for m in found.methods)}
    if not found.personal:
        return {found.measure: Score(f"{found.measure} mean", "Accuracy")}
    every = dict.fromkeys([found.measure, *(metric for m in found.methods for metric in m.accuracies)])
    names = shown(every, bool(found.unseen))
    return {name: Score(f"{name} mean", fmt.capital(found.describe(name))) for name in names}


def _methods(found: Comparison) -> PageSection:
    """A row for each method: its metrics, with their deviations, and what they cost."""
    metrics, methods = _metrics(found), found.methods
    titles, columns, values = [score.title for score in metrics.values()], ["Method"], []
    presets = not found.joint or len({m.preset for m in methods}) > 1  # what all share has no column
    columns += ["Preset"] if presets else []
    several, caption = found.several_seeds, "Accuracy on the global test set"
    if found.joint:
        seeds = len({len(m.seeds) for m in methods}) > 1
        columns += [*titles, *(["Seeds"] if seeds else [])]
        caption = "The active party's answers on the test rows" + (", ± s.d. over seeds" if several else "")
        for m in methods:
            scores = [_spread(m.scores.get(name), score) for name, score in metrics.items()]
            values.append([*scores, *([str(len(m.seeds))] if seeds else [])])
    else:
        main, *others = [
            name for name in metrics if not found.unseen or name == found.measure or group_of(name) != "unseen"
        ]
        columns += [titles[0], "s.d. over clients", *(["s.d. over seeds", "Seeds"] if several else [])]
        columns += [metrics[name].title for name in others]
        caption = "Accuracy, and on which rows" if others else caption
        for m in methods:
            accuracy, further = m.accuracies[main], [m.accuracies.get(name) for name in others]
            over_seeds = [fmt.standard_deviation(accuracy.std_over_seeds), str(len(m.seeds))] if several else []
            numbers = [fmt.percent(accuracy.mean), fmt.standard_deviation(accuracy.std_over_clients), *over_seeds]
            values.append([*numbers, *(NONE if one is None else fmt.percent(one.mean) for one in further)])
    directions = ["up", "down", *(["across"] if any(m.bytes.across for m in methods) else [])]
    rows = [
        cells(
            PageCell(m.name, title=m.method, key=series_style(number).key("").sample),
            *([m.preset] if presets else []),
            *own,
            *_sizes(m.bytes, directions),
            fmt.duration(m.seconds),
            fmt.whole(m.failures),
        )
        for number, (m, own) in enumerate(zip(methods, values, strict=True))
    ]
    columns += [*(f"Sent {direction}" for direction in directions), "Time", "Failures"]
    caption += "; tensor data and wall time of one run, failures in all runs"
    caption += "" if presets else f"; preset {methods[0].preset}"
    table = PageTable(caption, columns, rows, words=1 + presets)
    return PageSection("Methods", tables=[table], figures=_dots(found) if found.joint else [])


def _sizes(traffic: Traffic, directions: Sequence[str]) -> list[PageCell]:
    return [
        PageCell(fmt.size(count), fmt.exactly(count))
        for count in (getattr(traffic, direction) for direction in directions)
    ]


def _spread(found: SeedSpread | None, score: Score) -> str:
    return NONE if found is None else fmt.spread(found.mean, found.std_over_seeds, score.share)


def _dots(found: Comparison) -> list[Figure]:
    """Accuracy and balanced accuracy of the methods as dots."""
    names = [name for name in ("accuracy", "balanced accuracy") if all(name in m.scores for m in found.methods)]
    if len(found.methods) < 2 or not names:
        return []
    series = [
        Dots(
            SCORES[name].title.lower(),
            np.array([m.scores[name].mean for m in found.methods]),
            replace(series_style(number), shape="diamond" if number else "circle", filled=not number),
        )
        for number, name in enumerate(names)
    ]
    alt = fmt.together([f"{m.name} {fmt.percent(m.accuracy.mean)}" for m in found.methods])
    svg, legend = plots.dots("methods", f"Accuracy: {alt}.", [m.name for m in found.methods], series)
    return [Figure("Accuracy of the methods", svg, legend, "Mean over seeds; the number beside is the accuracy.")]


def _differences(found: Comparison) -> PageSection:
    """The differences of each metric, their intervals, and conclusions."""
    pairs = {found.measure: found.differences, **found.further}
    metrics = {name: score for name, score in _metrics(found).items() if name in pairs}
    main = f"{metrics[found.measure].title}: " if len(metrics) > 1 else ""
    points = [main + verdict(d) for d in found.differences]
    points += [] if any(len(d.per_seed) > 1 for d in found.differences) else [ONE_SEED]
    points += [LESS] if any(score.lower for score in metrics.values()) else []
    tables = [_pairs(found, name, score, pairs[name]) for name, score in metrics.items()]
    return PageSection("Paired differences", tables=tables, points=points)


def _pairs(found: Comparison, name: str, score: Score, differences: Sequence[PairedDifference]) -> PageTable:
    """The differences of one metric."""
    several = any(len(d.per_seed) > 1 for d in differences)
    columns = ["First − other", "Points" if score.share else "Difference"]
    columns += ["s.d. over seeds", "95 % interval", "Better in seeds"] if several else []
    columns += [] if found.joint else ["s.d. over clients", "Clients better"]
    rows = []
    for d in differences:
        row = [f"{d.first} {fmt.MINUS} {d.other}", NONE if d.mean is None else fmt.difference(d.mean, score.share)]
        if several:
            ends = confidence_interval(d.per_seed, 1.0 if score.share or name == "auc" else np.inf)
            better = sum((value < 0 if score.lower else value > 0) for value in d.per_seed)
            between = " to ".join(fmt.difference(end, score.share) for end in ends) if ends else NONE
            over_seeds = fmt.standard_deviation(d.std_over_seeds, score.share)
            row += [over_seeds, between, f"{better}/{len(d.per_seed)}"]
        if not found.joint:
            row += [fmt.standard_deviation(d.std_over_clients), f"{d.clients_better}/{d.clients}"]
        rows.append(cells(*row))
    caption = f"{score.title}{': accuracy' if found.personal else ''} of the first minus the other"
    caption += ", in percentage points" if score.share else ""
    caption += f", on the same data and seed{'; less is better' if score.lower else ''}"
    return PageTable(caption, columns, rows)


def verdict(d: PairedDifference) -> str:
    """The conclusion that a difference of accuracies supports."""
    if d.mean is None:
        return f"{d.first} and {d.other} have no seed in common: there is nothing to pair."
    by = f"{100 * abs(d.mean):.1f} points {'above' if d.mean > 0 else 'below'}" if d.mean else "level with"
    ends = confidence_interval(d.per_seed, 1.0)
    if ends is None:
        better = f", and better at {d.clients_better} of {d.clients} clients" if d.clients > 1 else ""
        return f"{d.first} is {by} {d.other} in the one seed{better}."
    start = f"Over {fmt.times(len(d.per_seed), 'seed')}, {d.first} is on average {by} {d.other}"
    between = f"95 % interval {fmt.points(ends[0])} to {fmt.points(ends[1])}"
    if ends[0] <= 0 <= ends[1]:
        same = min(d.per_seed) > 0 or max(d.per_seed) < 0
        between += ", though all seeds agree in sign," if same else ""
        return f"{start}, but the {between} contains 0: these seeds do not show which is better."
    return f"{start} ({between}): larger than the variation over seeds, on this data and in this setting."


def _learning(found: Comparison, runs: Sequence[Run], problem: bool) -> PageSection:
    """The main accuracy, or every score, by iteration or round, and the main one by what was sent; runs that can't be
    paired have no chance level in common."""
    main = GLOBAL if found.joint else found.measure
    chance = None if problem else found.chance_of(main)
    level = "chance" if main == GLOBAL else f"always {found.most_frequent(main)}"
    levels = [] if chance is None else [Level(level, chance)]
    named = [[run for run in runs if run.summary.name == method.name] for method in found.methods]
    groups = [(number, own) for number, own in enumerate(named) if own]
    scores = _metrics(found) if found.joint else {main: Score(f"{main} mean", "Mean accuracy")}
    figures = []
    for name, score in scores.items():
        having = [(number, own) for number, own in groups if all(len(_series(run, score)[0]) for run in own)]
        curves = [_curve(own, number, score) for number, own in having]
        if curves:
            seeds = {len(own) for _, own in having}
            figures.append(_curves_figure(found, name, score, curves, levels if name == main else [], seeds, runs[0]))
    lines = [replace(_curve(own, number, scores[main]), band=None) for number, own in groups]
    spent = [
        np.mean([sent(run)[: len(line.x)] for run in own], axis=0) for (_, own), line in zip(groups, lines, strict=True)
    ]
    across = any(m.bytes.across for m in found.methods)
    direction = senders(runs[0]) if across or found.joint else "sent up by all clients"
    figures[1:1] = cost_figures(lines, spent, levels, direction, f"Tensor data {direction}, without framing.")
    return PageSection("Learning", figures=figures)


def _curves_figure(
    found: Comparison, name: str, score: Score, curves: Sequence[Line], levels: list[Level], seeds: set[int], run: Run
) -> Figure:
    """One metric of all methods, given the numbers of seeds that there are, and one of the runs."""
    drawn = curves if len(curves) <= BANDS else [replace(line, band=None) for line in curves]
    if found.joint:
        title, slug, across, unit = score.title, f"learning {name}", "rounds", "round"
        bands = (
            "Mean over seeds; the band is ± one s.d. over seeds."
            if any(line.band is not None for line in drawn)
            else ""
        )
        more = "Less is better." if score.lower else ROUND if name == GLOBAL else ""
    else:
        title, slug, across, unit = f"Accuracy {found.describe(name)}", "learning", iteration_axis(run), "iteration"
        bands, more = "Mean over clients" + ("" if seeds == {1} else " and seeds"), ITERATION
        if len(curves) <= BANDS:
            also = ", or over clients where there is one seed" if 1 in seeds else ""
            bands += "; the band is ± one s.d. over " + ("clients" if seeds == {1} else f"seeds{also}")
        bands += "."
    ends = fmt.together([f"{line.label} {fmt.metric(line.y[-1], score.share)}" for line in curves])
    alt = f"{score.title} by {unit}; at the end {ends}."
    form = plots.share if score.share else None
    svg, legend = plots.chart(slug, alt, drawn, levels, across=across, form_y=form)
    return Figure(title, svg, legend, f"{bands} {more}".strip())


def _series(run: Run, score: Score) -> tuple[np.ndarray, np.ndarray]:
    return run.curve(score.column, run.last)


def _curve(runs: Sequence[Run], number: int, score: Score) -> Line:
    """A method's mean over seeds with their deviation; of one seed, the deviation over clients, if there are such. Of
    parties with different columns by rounds, otherwise by iterations."""
    first = runs[0]
    s, curves = first.summary, [_series(run, score) for run in runs]
    points = min(len(x) for x, _ in curves)
    y = np.stack([y[:points] for _, y in curves])
    x, band = curves[0][0][:points], y.std(0, ddof=1) if len(y) > 1 else None
    if s.scores:
        x = x * (s.rounds / max(1, s.iterations))
    elif band is None:
        band = first.curve(f"{score.column.removesuffix(' mean')} std", first.last)[1]
    return Line(s.name, x, y.mean(0), series_style(number), band)


def _runs(folder: Path, found: Comparison, runs: Sequence[Run]) -> PageSection:
    """Each run, linked to its own report if it has one."""
    if found.joint:
        names = [name for name in SCORES if any(name in run.summary.scores for run in runs)]
        columns, caption = [SCORES[name].title for name in names], "Scores of each run"
    else:
        every = dict.fromkeys(m for run in runs for m in shown(run.summary.accuracies, bool(run.summary.unseen)))
        names = [GLOBAL, OWN, *(metric for metric in every if metric not in (GLOBAL, OWN))]
        prepared = [fmt.capital(runs[0].summary.describe(metric)) for metric in names[2:]]
        columns, caption = ["Accuracy", "On own class mix", *prepared, "Agreement"], "Accuracy ± s.d. over clients"
    rows = []
    for run in runs:
        s, target = run.summary, run.folder / "report.html"
        href = quote(Path(os.path.relpath(target, folder)).as_posix()) if target.is_file() else ""
        if found.joint:
            values = [fmt.metric(s.scores[n], SCORES[n].share) if n in s.scores else NONE for n in names]
        else:
            further = [s.accuracies.get(name) for name in names[1:]]
            values = [fmt.spread(s.accuracy.mean, s.accuracy.std)]
            values += [NONE if one is None else fmt.percent(one.mean) for one in further]
            values += [NONE if s.agreement is None else fmt.percent(s.agreement)]
        state = PageCell((s.state_sha256 or NONE)[:12], s.state_sha256 or "")
        rows.append(cells(PageCell(s.name, href=href), str(s.seed), *values, fmt.whole(s.failures), state))
    linked = "; a name leads to the run's own report" if any(row[0].href for row in rows) else ""
    columns = ["Run", "Seed", *columns, "Failures", "State hash"]
    return PageSection("Runs", tables=[PageTable(f"{caption}{linked}", columns, rows)])
