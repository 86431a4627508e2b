"""A run whose parties hold different columns: what they predicted together, and how well."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fedloom.report import parties, plots, words
from fedloom.report.learning import panels
from fedloom.report.looks import look
from fedloom.report.measures import SCORES
from fedloom.report.page import Cell, Details, Figure, Section, Table, Tile, cells
from fedloom.report.plots import Level, Line
from fedloom.report.read import START, Run
from fedloom.report.traffic import by_round, traffic

ACROSS = "iterations"
ITERATION = "One iteration is one pass of the active party over the aligned rows."
AT_HOME = (
    "The first party's columns are the active party's own: what they say to each other crosses no border and is not "
    "counted. Neither is what an evaluation asks for."
)


def sections(run: Run) -> list[Section | None]:
    """All that the page of such a run has of its own."""
    flows = by_round(run)
    sent = traffic(run)
    return [
        learning(run),
        classes(run),
        parties.holdings(run),
        parties.alone(run),
        parties.attacks(run),
        _diagnostics(run),
        replace(sent, text=[*sent.text, AT_HOME], figures=[flows] if flows else []),
    ]


def lead(run: Run) -> str:
    """Who predicted what, how well, and what no knowledge gives."""
    s = run.summary
    more = [f"{_inside(name)} {SCORES[name].text(value)}" for name, value in s.scores.items() if name != "accuracy"]
    who = words.capital(words.times(s.clients, "party", "parties"))
    length = f"{words.whole(s.iterations)} iteration{'' if s.iterations == 1 else 's'}"
    alone = "" if s.messages else ", with no message between them"
    text = (
        f"{who} with different columns of the same rows, of whom one knows the labels, gave the right one of "
        f"{words.times(len(run.partition.classes), 'class', 'classes')} to {words.percent(s.accuracy.mean)} of "
        f"{words.whole(run.partition.test)} test rows of {s.dataset} ({', '.join(more)}) after {length}{alone}"
    )
    if s.chance is None:
        return f"{text}."
    return f"{text}; always answering the most frequent class gives {words.percent(s.chance)}."


def _inside(name: str) -> str:
    """The title of a score within a sentence."""
    title = SCORES[name].title
    return title if title.isupper() else title[:1].lower() + title[1:]


def tiles(run: Run) -> Iterable[Tile]:
    """The scores, each with what it is without knowledge."""
    s, number = run.summary, len(run.partition.classes)
    error = 100 * math.sqrt(s.accuracy.mean * (1 - s.accuracy.mean) / max(1, run.partition.test))
    frequent = np.array(run.partition.parties.test_counts if run.partition.parties else (1,), dtype=float)
    shares = frequent[frequent > 0] / frequent.sum()
    notes = {
        "accuracy": f"of {words.whole(run.partition.test)} test rows; standard error {error:.1f}",
        "balanced accuracy": f"mean over classes; guessing gives {words.percent(1 / len(shares))}",
        "auc": "guessing gives 0.5" + ("; mean over classes, each against all others" if number > 2 else ""),
        "log loss": f"less is better; the classes' frequencies give {-(shares * np.log(shares)).sum():.3f}",
        "seen accuracy": "on test rows of classes that the aligned people have many of",
        "rare recall": "on test rows of the others",
    }
    for name, value in s.scores.items():
        yield Tile(SCORES[name].title, SCORES[name].text(value), notes[name])
    if s.chance is not None:
        yield Tile("Chance", words.percent(s.chance), "always the most frequent class")


def learning(run: Run) -> Section:
    """The scores by iteration, and the accuracy by what it cost to send."""
    s, last = run.summary, run.last
    levels = [] if s.chance is None else [Level("chance", s.chance)]
    lines = [_line(run, name, number) for number, name in enumerate(("accuracy", "balanced accuracy"))]
    for number, stage in enumerate([stage for stage in run.stages if stage != last], 2):
        x, y = run.curve("accuracy mean", stage)
        style = replace(look(number), dash=(5, 3), filled=False)
        lines.append(Line(f"accuracy after the {stage} stage", x, y, style))
    first = lines[0]
    alt = f"Accuracy by iteration, from {words.percent(first.y[0])} to {words.percent(first.y[-1])}."
    svg, legend = plots.chart("learning", alt, lines, levels, across=ACROSS)
    figures = [Figure("Accuracy on the test rows", svg, legend, ITERATION)]
    figures += [_plain(run, name) for name in ("auc", "log loss") if name in s.scores]
    spent = run.curve("bytes up", last)[1] + run.curve("bytes down", last)[1] + run.curve("bytes across", last)[1]
    if spent[-1] > 0:
        alt = f"Accuracy by bytes sent, {words.size(spent[-1])} in all."
        line = replace(first, x=spent)
        svg, legend = plots.chart("bytes", alt, [line], levels, across="sent by all, up and down", form_x=plots.volume)
        figures.append(Figure("Accuracy by what it cost to send", svg, legend, "Tensor data, without framing."))
    return Section("Learning", figures=figures, details=[Details("The numbers behind the curves", table=_points(run))])


def _line(run: Run, name: str, number: int) -> Line:
    x, y = run.curve(SCORES[name].measure, run.last)
    style = look(number) if not number else replace(look(number), shape="diamond", dash=(5, 3), filled=False)
    return Line(SCORES[name].title.lower(), x, y, style)


def _plain(run: Run, name: str) -> Figure:
    """A chart of a score that is no accuracy; of the loss, beside that on the rows which it is lowered on."""
    score = SCORES[name]
    x, y = run.curve(score.measure, run.last)
    lines = [Line("on the test rows", x, y, look(0))]
    mine = run.curve("loss", run.last, "active")
    if name == "log loss" and len(mine[0]):
        lines.append(Line("on the last batch that the active party learnt from", *mine, replace(look(1), shape=None)))
    levels = [Level("guessing", 0.5)] if name == "auc" else []
    ends = f"from {score.text(y[0])} at the start to {score.text(y[-1])} at the end"
    svg, legend = plots.chart(name, f"{score.title} by iteration, {ends}.", lines, levels, across=ACROSS, form_y=None)
    return Figure(score.title, svg, legend if len(legend) > 1 else (), "Less is better." if score.lower else "")


def _points(run: Run) -> Table:
    """Every evaluation, as numbers."""
    names = list(run.summary.scores)
    whats = [*(SCORES[name].measure for name in names), "bytes up", "bytes down"]
    rows: list[tuple[int, list[Cell]]] = []
    for stage in (START, *run.stages):
        found = [run.measured.get((what, "", stage), ([], [])) for what in whats]
        for iteration, *values in zip(found[0][0], *(values for _, values in found), strict=True):
            scores = [SCORES[name].text(value) for name, value in zip(names, values, strict=False)]
            sent = [Cell(words.size(count), words.exactly(count)) for count in values[len(names) :]]
            rows.append((iteration, cells(words.whole(iteration), stage, *scores, *sent)))
    rows.sort(key=lambda row: row[0])
    headings = ("Iteration", "Stage", *(SCORES[name].title for name in names), "Sent up", "Sent down")
    return Table("Each evaluation on the test rows", headings, [row for _, row in rows], words=2)


def classes(run: Run) -> Section | None:
    """How many rows of each class are recognised, and classes that nobody could learn."""
    held, s = run.partition.parties, run.summary
    assert held is not None
    found = [run.measured.get((f"recall {name}", "", run.last)) for name in run.partition.classes]
    recall = np.array([series[1][-1] if series else math.nan for series in found])
    aligned, test = np.array(held.aligned_counts), np.array(held.test_counts)
    rows = [
        cells(
            name,
            words.whole(known),
            words.whole(tested),
            Cell(words.NONE if math.isnan(share) else words.percent(share), share=None if math.isnan(share) else share),
        )
        for name, known, tested, share in zip(run.partition.classes, aligned, test, recall, strict=True)
    ]
    heading = ("Class", "Aligned rows", "Test rows", "Recognised")
    table = Table("Share of each class's test rows that is recognised at the end", heading, rows)
    points = []
    missing = (aligned == 0) & (test > 0)
    if missing.any() and not missing.all():
        names = words.together([name for name, gone in zip(run.partition.classes, missing, strict=True) if gone])
        right = np.nan_to_num(recall) * test
        seen, unseen = (words.percent(right[which].sum() / max(1, test[which].sum())) for which in (~missing, missing))
        points.append(
            f"No aligned row is of the class {names}, so nothing teaches the active party to give it. On test rows of "
            f"the other classes it is right at {seen}, on those of {'this one' if missing.sum() == 1 else 'these'} at "
            f"{unseen}."
        )
    few = len(rows) <= plots.ROWS
    details = [] if few else [Details(f"All {s.dataset} classes", table=table)]
    return Section("Classes", tables=[table] if few else [], points=points, details=details)


def _diagnostics(run: Run) -> Section | None:
    """What the parties noted, and whether one collapsed."""
    figures = panels(run, across=ACROSS)
    if not figures:
        return None
    series = [values for (what, _, _), (_, values) in run.measured.items() if what == "collapsed"]
    bad = sum(value > 0 for values in series for value in values)
    points = []
    if series:
        seen = f"In {words.times(bad, 'round')} an extractor collapsed" if bad else "No extractor collapsed"
        points = [
            f"{seen}. In a collapse most rows of a party, or all its classes, come to look alike, which is the "
            "cheapest way to be near prototypes."
        ]
    return Section("Diagnostics", points=points, figures=figures, small=True)
