"""The report of a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.report import plots, unseen, words
from fedloom.report.clients import of_several
from fedloom.report.learning import ACROSS, ITERATION, sent
from fedloom.report.looks import Look, look
from fedloom.report.measures import GLOBAL, OWN, shown, whose
from fedloom.report.neighbours import of_methods
from fedloom.report.page import Cell, Figure, Page, Section, Table, cells
from fedloom.report.plots import Level, Line
from fedloom.report.read import Run
from fedloom.report.schema import Comparison, Difference, MethodFound
from fedloom.report.words import NONE

BANDS = 5
"""The curves of more methods have no bands, which would cover each other."""
ONE_SEED = "One seed says nothing about chance: repeat with other seeds before you call a method better."
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


def page(folder: Path, found: Comparison, runs: Sequence[Run], problem: str = "") -> Page:
    """The page of a comparison.

    Args:
        folder: where the page will lie; links are relative to it.
        found: what was found.
        runs: those runs of it whose files are there.
        problem: why the runs can't be paired, if so.
    """
    sections = [_methods(found), *unseen.of_methods(found)]
    if found.differences:
        sections.append(_differences(found))
    if runs:
        sections.append(_learning(found, runs, bool(problem)))
        sections += [] if problem else [of_several(found, runs)]
        sections += of_methods(found, runs)
        sections.append(_runs(folder, runs))
    return Page(
        title=found.title or words.capital(words.together([m.name for m in found.methods])),
        subtitle=subtitle(runs),
        lead=_lead(found),
        warning=" ".join(_warnings(found, runs, problem)),
        sections=sections,
        footer="Made by fedloom from the files of the runs' folders.",
    )


def _warnings(found: Comparison, runs: Sequence[Run], problem: str) -> Iterable[str]:
    """What a reader must know before the numbers."""
    if problem:
        yield f"Side by side only, without paired differences: {problem}."
    lengths = {run.summary.iterations for run in runs}
    if len(lengths) > 1:
        yield f"The runs are of different length, {words.span(lengths)} iterations, which moves every difference."
    for remark in found.remarks:
        yield f"{words.capital(remark)}."
    missing = len(found.runs) - len(runs)
    if missing:
        yield f"The folders of {words.times(missing, 'run')} are not here: figures leave them out."


def subtitle(runs: Sequence[Run], one: str = "client", more: str = "clients") -> str:
    """What the runs share, or between what they range; of parties that are called so."""
    if not runs:
        return ""
    every = [run.summary for run in runs]
    clients, seeds = {s.clients for s in every}, sorted({s.seed for s in every})
    parts = (
        words.together(sorted({s.dataset for s in every})),
        f"{words.span(clients)} {one if clients == {1} else more}",
        f"{words.span({s.iterations for s in every})} iterations",
        f"seed{'' if len(seeds) == 1 else 's'} {words.together([str(seed) for seed in seeds])}",
    )
    return " · ".join(parts)


def _lead(found: Comparison) -> str:
    """Who reached what, in a sentence; of many methods, the best and the last."""
    ordered = sorted(found.methods, key=lambda m: -m.measures[found.measure].mean)
    over = "seeds" if any(len(m.seeds) > 1 for m in ordered) else "clients"

    def reached(m: MethodFound) -> str:
        accuracy = m.measures[found.measure]
        deviation = accuracy.std_over_seeds if over == "seeds" else accuracy.std_over_clients
        return f"{m.name} {words.spread(accuracy.mean, deviation)}"

    if len(ordered) <= 5:
        text = f"Accuracy {found.on(found.measure)}: {words.together([reached(m) for m in ordered])}"
    else:
        text = f"Accuracy {found.on(found.measure)}: from {reached(ordered[0])} to {reached(ordered[-1])}"
    chance = found.chance_of(found.measure)
    if chance is None:
        return f"{text} (s.d. over {over})."
    answer = found.frequent(found.measure)
    return f"{text} (s.d. over {over}); always answering {answer} gives {words.percent(chance)}."


def _points(share: float | None) -> str:
    """A standard deviation in percentage points."""
    return NONE if share is None else f"{100 * share:.1f}"


def _methods(found: Comparison) -> Section:
    """The table of methods; a column that would be empty for all is left out."""
    across = any(m.bytes.across for m in found.methods)
    several = any(len(m.seeds) > 1 for m in found.methods)
    others = [measure for measure in _others(found) if not found.unseen or whose(measure) != "unseen"]  # they follow
    columns = [
        "Method",
        "Preset",
        words.capital(found.on(found.measure)) if others else "Accuracy",
        "s.d. over clients",
        *(["s.d. over seeds", "Seeds"] if several else []),
        *(words.capital(found.on(measure)) for measure in others),
    ]
    columns += ["Sent up", "Sent down", *(["Sent across"] if across else []), "Time", "Failures"]
    rows = []
    for number, m in enumerate(found.methods):
        accuracy = m.measures[found.measure]
        over_seeds = [_points(accuracy.std_over_seeds), str(len(m.seeds))] if several else []
        further = [m.measures.get(measure) for measure in others]
        ways = [m.bytes.up, m.bytes.down, *([m.bytes.across] if across else [])]
        rows.append(
            cells(
                Cell(m.name, title=m.method, key=look(number).key("").sample),
                m.preset,
                words.percent(accuracy.mean),
                _points(accuracy.std_over_clients),
                *over_seeds,
                *(NONE if one is None else words.percent(one.mean) for one in further),
                *(Cell(words.size(way), words.exactly(way)) for way in ways),
                words.duration(m.seconds),
                words.whole(m.failures),
            )
        )
    caption = "Accuracy, and on which rows" if others else "Accuracy on the global test set"
    caption += "; tensor data and wall time of one run, failures in all runs"
    return Section("Methods", tables=[Table(caption, columns, rows, words=2)])


def _others(found: Comparison) -> list[str]:
    """The measures that stand beside the main one: all, where a method has ways; else none."""
    every = dict.fromkeys(measure for m in found.methods for measure in m.measures)
    measures = [found.measure, *(measure for measure in every if measure != found.measure)]
    return shown(measures, bool(found.unseen))[1:] if found.personal else []


def _differences(found: Comparison) -> Section:
    several = any(len(d.per_seed) > 1 for d in found.differences)
    further = {measure: found.further[measure] for measure in _others(found) if measure in found.further}
    tables = [_pairs(found, measure, pairs) for measure, pairs in {found.measure: found.differences, **further}.items()]
    points = [verdict(d) for d in found.differences] + ([] if several else [ONE_SEED])
    if further:
        points[0] = f"{words.capital(found.on(found.measure))}: {points[0]}"
    return Section("Paired differences", tables=tables, points=points)


def _pairs(found: Comparison, measure: str, differences: Sequence[Difference]) -> Table:
    """The differences of one measure."""
    several = any(len(d.per_seed) > 1 for d in differences)
    columns = ["Difference", "Points", *(["s.d. over seeds", "95 % interval", "Seeds"] if several else [])]
    rows = []
    for d in differences:
        ends = interval(d)
        between = f"{words.points(ends[0])} to {words.points(ends[1])}" if ends else NONE
        over_seeds = [_points(d.std_over_seeds), between, str(len(d.per_seed))] if several else []
        mean = NONE if d.mean is None else words.points(d.mean)
        better = f"{d.clients_better}/{d.clients}"
        rows.append(cells(f"{d.first} {words.MINUS} {d.other}", mean, *over_seeds, _points(d.std_over_clients), better))
    on = f"{words.capital(found.on(measure))}: accuracy" if found.personal else "Accuracy"
    caption = f"{on} of the first minus the other, in percentage points, on the same data and seed"
    return Table(caption, [*columns, "s.d. over clients", "Clients better"], rows)


def interval(d: Difference, most: float = 1.0) -> tuple[float, float] | None:
    """That of `student` over the seeds of a difference."""
    return student(d.per_seed, most)


def student(values: Sequence[float], most: float = np.inf) -> tuple[float, float] | None:
    """The 95 % interval of the mean of finite values by Student's t, within ±`most`; None below two values."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom + 3 / freedom**2
    mean, half = float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return max(-most, mean - half), min(most, mean + half)


def verdict(d: Difference) -> str:
    """What a difference lets one say, and no more."""
    if d.mean is None:
        return f"{d.first} and {d.other} have no seed in common: there is nothing to pair."
    by = f"{100 * abs(d.mean):.1f} points {'above' if d.mean > 0 else 'below'}" if d.mean else "level with"
    ends = interval(d)
    if ends is None:
        better = f", and better at {d.clients_better} of {d.clients} clients" if d.clients > 1 else ""
        return f"{d.first} is {by} {d.other} in the one seed{better}."
    start = f"Over {words.times(len(d.per_seed), 'seed')}, {d.first} is on average {by} {d.other}"
    between = f"95 % interval {words.points(ends[0])} to {words.points(ends[1])}"
    if ends[0] <= 0 <= ends[1]:
        same = min(d.per_seed) > 0 or max(d.per_seed) < 0
        between += ", though all seeds agree in sign," if same else ""
        return f"{start}, but the {between} holds 0: these seeds do not tell which is better."
    return f"{start} ({between}): more than the seeds vary, on this data and with this setting."


def _learning(found: Comparison, runs: Sequence[Run], apart: bool) -> Section:
    """All methods' accuracy by iteration and by what the clients sent; without a chance level for runs `apart`."""
    chance, personal = found.chance_of(found.measure), found.measure != GLOBAL
    name = f"always {found.frequent(found.measure)}" if personal else "chance"
    levels = [] if apart or chance is None else [Level(name, chance)]
    named = [[run for run in runs if run.summary.name == method.name] for method in found.methods]
    groups = [(number, own) for number, own in enumerate(named) if own]
    curves = [_mean_curve(own, number, found.measure) for number, own in groups]
    ends = words.together([f"{line.label} {words.percent(line.y[-1])}" for line in curves])
    shown = curves if len(curves) <= BANDS else [replace(line, band=None) for line in curves]
    alt = f"Mean accuracy by iteration; at the end {ends}."
    svg, legend = plots.chart("learning", alt, shown, levels, across=ACROSS)
    caption = f"{_what_bands_are({len(own) for _, own in groups}, len(curves))} {ITERATION}"
    figures = [Figure(f"Accuracy {found.on(found.measure)}", svg, legend, caption)]
    spent = [
        np.mean([sent(run)[: len(line.x)] for run in own], axis=0)
        for (_, own), line in zip(groups, curves, strict=True)
    ]
    way = "sent" if any(m.bytes.across for m in found.methods) else "sent up"
    return Section("Learning", figures=[*figures, *costs(curves, spent, levels, f"{way} by all clients")])


def costs(curves: Sequence[Line], spent: Sequence[np.ndarray], levels: list[Level], across: str) -> list[Figure]:
    """Accuracy by bytes `spent`; a method that sends nothing is a level."""
    pairs = list(zip(curves, spent, strict=True))
    lines = [replace(line, x=x, band=None) for line, x in pairs if x[-1] > 0]
    silent = [
        Level(f"{line.label}, which sends nothing", float(line.y[-1]), Look(line.look.colour, dash=(6, 3)))
        for line, x in pairs
        if x[-1] == 0
    ]
    if not lines:
        return []
    ends = words.together([f"{line.label} {words.size(line.x[-1])}" for line in lines])
    alt = f"Mean accuracy by bytes {across}; in all {ends}."
    levels = [*levels, *silent]
    svg, legend = plots.chart("bytes", alt, lines, levels, across=across, form_x=plots.volume)
    return [Figure("Accuracy by what it cost to send", svg, legend, f"Tensor data {across}, without framing.")]


def _what_bands_are(seeds: set[int], methods: int) -> str:
    """The caption, given the numbers of seeds that there are."""
    mean = "Mean over clients" if seeds == {1} else "Mean over clients and seeds"
    if methods > BANDS:
        return f"{mean}."
    if seeds == {1}:
        return f"{mean}; the band is ± one s.d. over clients."
    rest = ", or over clients where there is one seed" if 1 in seeds else ""
    return f"{mean}; the band is ± one s.d. over seeds{rest}."


def _mean_curve(runs: Sequence[Run], number: int, measure: str) -> Line:
    """A method's mean over seeds with their deviation; with one seed, the deviation over clients."""
    curves = [run.curve(f"{measure} mean", run.last) for run in runs]
    points = min(len(x) for x, _ in curves)
    y = np.stack([y[:points] for _, y in curves])
    band = y.std(0, ddof=1) if len(y) > 1 else runs[0].curve(f"{measure} std", runs[0].last)[1]
    return Line(runs[0].summary.name, curves[0][0][:points], y.mean(0), look(number), band)


def _runs(folder: Path, runs: Sequence[Run]) -> Section:
    """Each run, with the way to its own report where there is one."""
    rows = []
    every = dict.fromkeys(m for run in runs for m in shown(run.summary.measures, bool(run.summary.unseen)))
    ways = [measure.removeprefix(f"{OWN} ") for measure in every if measure not in (GLOBAL, OWN)]
    for run in runs:
        s, target = run.summary, run.folder / "report.html"
        href = quote(Path(os.path.relpath(target, folder)).as_posix()) if target.is_file() else ""
        rows.append(
            cells(
                Cell(s.name, href=href),
                str(s.seed),
                words.spread(s.accuracy.mean, s.accuracy.std),
                words.percent(s.own_accuracy.mean) if s.own_accuracy else NONE,
                *(words.percent(s.ways[way].mean) if way in s.ways else NONE for way in ways),
                words.percent(s.agreement) if s.agreement is not None else NONE,
                words.whole(s.failures),
                Cell((s.state_sha256 or NONE)[:12], s.state_sha256 or ""),
            )
        )
    prepared = [words.capital(runs[0].summary.on(f"{OWN} {way}")) for way in ways]
    columns = ("Run", "Seed", "Accuracy", "On own class mix", *prepared, "Agreement", "Failures", "State hash")
    linked = "; a name leads to the run's own report" if any(row[0].href for row in rows) else ""
    return Section("Runs", tables=[Table(f"Accuracy ± s.d. over clients{linked}", columns, rows)])
