"""The report of a comparison of methods whose parties hold different columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.report import parties, plots, words
from fedloom.report.looks import look
from fedloom.report.measures import SCORES
from fedloom.report.page import Cell, Figure, Page, Section, Table, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import Run
from fedloom.report.schema import Comparison, Difference, MethodFound
from fedloom.report.several import BANDS, ONE_SEED, costs, interval, subtitle, verdict
from fedloom.report.words import NONE

LESS = "Of the log-loss less is better: a difference below 0 is in favour of the first."
ROUND = (
    "What a round is differs: a method may count local steps or passes, and send more or fewer messages. All bytes and "
    "seconds are in the table of methods."
)


def page(folder: Path, found: Comparison, runs: Sequence[Run], problem: str = "") -> Page:
    """The page of a comparison; arguments as those of `several.page`."""
    sections = [_methods(found)]
    if found.differences:
        sections.append(_differences(found))
    if runs:
        sections.append(_learning(found, runs))
        first = next((run for run in runs if run.summary.name == found.reference), runs[0])
        which = f" in the run {first.summary.name}, seed {first.summary.seed}"
        more = [_alone(found), _attacks(found, runs), None if problem else parties.holdings(first, which)]
        sections += [section for section in more if section]
        sections.append(_runs(folder, runs))
    return Page(
        title=found.title or words.capital(words.together([m.name for m in found.methods])),
        subtitle=subtitle(runs, "party", "parties"),
        lead=_lead(found, runs),
        warning=" ".join(_warnings(found, runs, problem)),
        sections=sections,
        footer="Made by fedloom from the files of the runs' folders.",
    )


def _warnings(found: Comparison, runs: Sequence[Run], problem: str) -> list[str]:
    """What a reader must know before the numbers."""
    told = [f"Side by side only, without paired differences: {problem}."] if problem else []
    lengths = {run.summary.rounds for run in runs}
    if len(lengths) > 1:
        told.append(f"The runs are of different length, {words.span(lengths)} rounds, which moves every difference.")
    missing = len(found.runs) - len(runs)
    if missing:
        told.append(f"The folders of {words.times(missing, 'run')} are not here: figures leave them out.")
    return told


def _lead(found: Comparison, runs: Sequence[Run]) -> str:
    """Who reached what, in a sentence; of many methods, the best and the last."""
    ordered = sorted(found.methods, key=lambda m: -m.accuracy.mean)
    several = any(len(m.seeds) > 1 for m in ordered)

    def reached(m: MethodFound) -> str:
        return f"{m.name} {words.spread(m.accuracy.mean, m.accuracy.std_over_seeds if several else None)}"

    if len(ordered) <= 5:
        text = f"Accuracy on the test rows: {words.together([reached(m) for m in ordered])}"
    else:
        text = f"Accuracy on the test rows: from {reached(ordered[0])} to {reached(ordered[-1])}"
    chance = found.chance_of("accuracy")
    over = " (s.d. over seeds)" if several else ""
    level = "" if chance is None else f"; always answering the most frequent class gives {words.percent(chance)}"
    return f"{text}{over}{level}."


def _scores(found: Comparison) -> list[str]:
    """The names of all scores that a method has, in their order."""
    return [name for name in SCORES if any(name in m.scores for m in found.methods)]


def _methods(found: Comparison) -> Section:
    """A row for each method: its scores, with their deviation over seeds, and what they cost."""
    names = _scores(found)
    several = any(len(m.seeds) > 1 for m in found.methods)
    across = any(m.bytes.across for m in found.methods)
    seeds = len({len(m.seeds) for m in found.methods}) > 1  # what all share has no column
    presets = len({m.preset for m in found.methods}) > 1
    columns = ["Method", *(["Preset"] if presets else []), *(SCORES[name].title for name in names)]
    columns += ["Seeds"] if seeds else []
    columns += ["Sent up", "Sent down", *(["Sent across"] if across else []), "Time", "Failures"]
    rows = []
    for number, m in enumerate(found.methods):
        each = [(SCORES[name], m.scores.get(name)) for name in names]
        scores = [NONE if a is None else score.spread(a.mean, a.std_over_seeds) for score, a in each]
        ways = [m.bytes.up, m.bytes.down, *([m.bytes.across] if across else [])]
        rows.append(
            cells(
                Cell(m.name, title=m.method, key=look(number).key("").sample),
                *([m.preset] if presets else []),
                *scores,
                *([str(len(m.seeds))] if seeds else []),
                *(Cell(words.size(way), words.exactly(way)) for way in ways),
                words.duration(m.seconds),
                words.whole(m.failures),
            )
        )
    caption = "The active party's answers on the test rows" + (", ± s.d. over seeds" if several else "")
    caption += "; tensor data and wall time of one run, failures in all runs"
    caption += "" if presets else f"; preset {found.methods[0].preset}"
    return Section("Methods", tables=[Table(caption, columns, rows, words=1 + presets)], figures=_dots(found))


def _dots(found: Comparison) -> list[Figure]:
    """Accuracy and balanced accuracy of the methods as dots."""
    names = [name for name in ("accuracy", "balanced accuracy") if all(name in m.scores for m in found.methods)]
    if len(found.methods) < 2 or not names:
        return []
    series = [
        Dots(
            SCORES[name].title.lower(),
            np.array([m.scores[name].mean for m in found.methods]),
            replace(look(number), shape="diamond" if number else "circle", filled=not number),
        )
        for number, name in enumerate(names)
    ]
    alt = words.together([f"{m.name} {words.percent(m.accuracy.mean)}" for m in found.methods])
    svg, legend = plots.dots("methods", f"Accuracy: {alt}.", [m.name for m in found.methods], series)
    return [Figure("Accuracy of the methods", svg, legend, "Mean over seeds; the number beside is the accuracy.")]


def _differences(found: Comparison) -> Section:
    """The differences of each score, with intervals, and what they let one say."""
    pairs = {found.measure: found.differences, **found.further}
    tables = [_pairs(name, pairs[name]) for name in SCORES if name in pairs]
    several = any(len(d.per_seed) > 1 for d in found.differences)
    points = [f"Accuracy: {verdict(d)}" for d in found.differences] + ([] if several else [ONE_SEED])
    if "log loss" in pairs:
        points.append(LESS)
    return Section("Paired differences", tables=tables, points=points)


def _pairs(name: str, differences: Sequence[Difference]) -> Table:
    """The differences of one score."""
    score, several = SCORES[name], any(len(d.per_seed) > 1 for d in differences)
    what = "Points" if score.share else "Difference"
    columns = ["First − other", what, *(["s.d. over seeds", "95 % interval", "Better in seeds"] if several else [])]
    rows = []
    for d in differences:
        ends = interval(d, 1.0 if score.share or name == "auc" else np.inf)
        better = sum((value < 0 if score.lower else value > 0) for value in d.per_seed)
        between = f"{score.difference(ends[0])} to {score.difference(ends[1])}" if ends else NONE
        over_seeds = [score.deviation(d.std_over_seeds), between, f"{better}/{len(d.per_seed)}"] if several else []
        mean = NONE if d.mean is None else score.difference(d.mean)
        rows.append(cells(f"{d.first} {words.MINUS} {d.other}", mean, *over_seeds))
    caption = f"{score.title} of the first minus the other{', in percentage points' if score.share else ''}"
    return Table(caption + ("; less is better" if score.lower else ""), columns, rows)


def _learning(found: Comparison, runs: Sequence[Run]) -> Section:
    """Each score by round, and the accuracy by bytes."""
    chance = found.chance_of("accuracy")
    named = [[run for run in runs if run.summary.name == method.name] for method in found.methods]
    groups = [(number, own) for number, own in enumerate(named) if own]
    figures = []
    for name in _scores(found):
        score = SCORES[name]
        curves = [_curve(own, number, score.measure) for number, own in groups if _has(own, score.measure)]
        if not curves:
            continue
        levels = [Level("chance", chance)] if name == "accuracy" and chance is not None else []
        shown = curves if len(curves) <= BANDS else [replace(line, band=None) for line in curves]
        ends = words.together([f"{line.label} {score.text(line.y[-1])}" for line in curves])
        alt = f"{score.title} by round; at the end {ends}."
        form = plots.share if score.share else None
        svg, legend = plots.chart(f"learning {name}", alt, shown, levels, across="rounds", form_y=form)
        banded = any(line.band is not None for line in shown)
        caption = ("Mean over seeds; the band is ± one s.d. over seeds. " if banded else "") + (
            "Less is better." if score.lower else ROUND if name == "accuracy" else ""
        )
        figures.append(Figure(score.title, svg, legend, caption.strip()))
    curves = [_curve(own, number, "accuracy mean") for number, own in groups]
    spent = [_spent(own, len(line.x)) for (_, own), line in zip(groups, curves, strict=True)]
    levels = [] if chance is None else [Level("chance", chance)]
    figures[1:1] = costs(curves, spent, levels, "sent by all, up and down")
    return Section("Learning", figures=figures)


def _has(runs: Sequence[Run], measure: str) -> bool:
    return all(len(run.curve(measure, run.last)[0]) for run in runs)


def _curve(runs: Sequence[Run], number: int, measure: str) -> Line:
    """A method's mean over seeds by round, with its deviation."""
    first = runs[0]
    curves = [run.curve(measure, run.last) for run in runs]
    points = min(len(x) for x, _ in curves)
    y = np.stack([y[:points] for _, y in curves])
    rounds = curves[0][0][:points] * (first.summary.rounds / max(1, first.summary.iterations))
    return Line(first.summary.name, rounds, y.mean(0), look(number), y.std(0, ddof=1) if len(y) > 1 else None)


def _spent(runs: Sequence[Run], points: int) -> np.ndarray:
    """Bytes (points,) that crossed borders until each evaluation, mean over seeds."""
    ways = [[run.curve(f"bytes {way}", run.last)[1][:points] for way in ("up", "down", "across")] for run in runs]
    mean: np.ndarray = np.sum(ways, axis=1).mean(0)
    return mean


def _alone(found: Comparison) -> Section | None:
    """What parties answer by themselves, for the methods in which they can."""
    rows = []
    for m in found.methods:
        for way, on in m.alone.items():
            name = m.name if way == "alone" else f"{m.name}, {way}"
            own = NONE if on.own is None else words.spread(on.own.mean, on.own.std_over_seeds)
            rows.append(cells(name, words.spread(on.test.mean, on.test.std_over_seeds), own))
    columns = ("Method", "On the test rows", "On their unaligned rows")
    table = Table("Accuracy of the parties alone at the end, mean over parties", columns, rows)
    return Section("Each party alone", text=[parties.PSEUDO], tables=[table]) if rows else None


def _attacks(found: Comparison, runs: Sequence[Run]) -> Section | None:
    """What share of labels each attack finds out under each method, mean over parties and seeds."""
    rows = []
    for m in found.methods:
        own = [run.summary.attacks for run in runs if run.summary.name == m.name]
        for kind in dict.fromkeys(kind for attacks in own for kind in attacks if kind != parties.GUESS):
            means = [attacks[kind].mean for attacks in own if kind in attacks]
            deviation = float(np.std(means, ddof=1)) if len(means) > 1 else None
            guess = [attacks[parties.GUESS].mean for attacks in own if parties.GUESS in attacks]
            chance = words.percent(float(np.mean(guess))) if guess else NONE
            mean = words.spread(float(np.mean(means)), deviation)
            rows.append(cells(m.name, kind, parties.KNOWS.get(kind, NONE), mean, chance))
    columns = ("Method", "Attack", "What the attacker knows", "Labels found out", "Most frequent class")
    table = Table("Share of labels found out at the end, mean over parties", columns, rows, words=3)
    return Section(parties.LEAKS, text=[parties.GUESSES], tables=[table]) if rows else None


def _runs(folder: Path, runs: Sequence[Run]) -> Section:
    """Each run, with the way to its own report where there is one."""
    names = [name for name in SCORES if any(name in run.summary.scores for run in runs)]
    rows = []
    for run in runs:
        s, target = run.summary, run.folder / "report.html"
        href = quote(Path(os.path.relpath(target, folder)).as_posix()) if target.is_file() else ""
        values = [SCORES[name].text(s.scores[name]) if name in s.scores else NONE for name in names]
        state = Cell((s.state_sha256 or NONE)[:12], s.state_sha256 or "")
        rows.append(cells(Cell(s.name, href=href), str(s.seed), *values, words.whole(s.failures), state))
    columns = ("Run", "Seed", *(SCORES[name].title for name in names), "Failures", "State hash")
    linked = "; a name leads to the run's own report" if any(row[0].href for row in rows) else ""
    return Section("Runs", tables=[Table(f"Scores of each run{linked}", columns, rows)])
