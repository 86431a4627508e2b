"""What one run measured over its iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedloom.report import plots, words
from fedloom.report.looks import DASHES, Look, look
from fedloom.report.measures import GLOBAL, in_way, shown
from fedloom.report.page import Cell, Details, Figure, Section, Table, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import START, Run

ACROSS = "iterations of a client"
ITERATION = "One iteration is one local step of a client, or one pass over its rows where a method counts passes."
STANDARD = ("accuracy", "own accuracy", "balanced accuracy", "auc", "attack", "loss", "agreement", "recall", "bytes")
"""First words of what every run measures; all else are notes of its parties."""

MEANINGS = {
    "agreement": "How often two different clients give the same answer to a test row.",
    "loss mean": "Cross-entropy on the test rows in nats, mean over clients.",
    "discriminator loss": "At ln N the server can't tell the answers of the N clients apart.",
    "discriminator accuracy": "How often the server names the author of an answer; guessing is right at 1/N.",
    "gamma": "γ, the weight of the mean class prior of all in a party's own, mean over parties.",
    "largest pseudo-class": "The share of a party's rows that look like one and the same class, mean over parties; "
    "near 1 its extractor has collapsed.",
    "likeness of pseudo-classes": "Mean cosine of the mean embeddings of two pseudo-classes at a party, mean over "
    "parties; near 1 its extractor has collapsed.",
    "likeness of prototypes": "Mean cosine of two class prototypes of a party, mean over parties.",
    "length of prototypes": "Mean length of the class prototypes, mean over parties.",
    "collapsed": "The share of parties whose embeddings had come to look alike in a round.",
    "gradient norm": "Length of each term's gradient for a public row at the last step of a round, mean over "
    "rows and clients.",
}


def learning(run: Run) -> Section:
    """Accuracy by iteration, stage by stage, and by what it cost to send."""
    levels = [Level("chance", run.summary.chance)] if run.summary.chance is not None else []
    lines = [_curve(run, number, stage) for number, stage in enumerate(reversed(run.stages or [START]))]
    main = lines[0]
    ends = _ends(main)
    svg, legend = plots.chart("learning", f"Mean accuracy by iteration, {ends}.", lines, levels, across=ACROSS)
    figures = [Figure(f"Accuracy on {run.summary.tested}", svg, legend, ITERATION)]
    if run.personal and len(run.summary.measures) > 1:
        main, levels, figure = _own(run)
        figures.insert(0, figure)
    spent = sent(run)
    if spent[-1] > 0:
        alt = f"Mean accuracy by bytes that the clients sent, {words.size(spent[-1])} in all, {_ends(main)}."
        line = replace(main, x=spent, label="mean over clients ± s.d.")
        across = "sent by all clients"
        svg, legend = plots.chart("bytes", alt, [line], levels, across=across, form_x=plots.volume)
        caption = "Tensor data that the clients sent, without framing."
        caption += f" The accuracy is {run.summary.on(run.summary.main)}." if len(figures) > 1 else ""
        figures.append(Figure("Accuracy by what it cost to send", svg, legend, caption))
    return Section("Learning", figures=figures, details=[Details("The numbers behind the curves", table=_points(run))])


def _curve(run: Run, number: int, stage: str) -> Line:
    """The mean after a stage; after the last one, number 0, with its band."""
    x, y = run.curve("accuracy mean", stage)
    label = f"after the {stage} stage" if len(run.stages) > 1 else "mean over clients"
    if number:
        return Line(label, x, y, replace(look(number), shape="square", dash=(5, 3), filled=False))
    return Line(f"{label} ± s.d. over clients", x, y, look(0), run.curve("accuracy std", stage)[1])


def _own(run: Run) -> tuple[Line, list[Level], Figure]:
    """The main line, its levels and the figure: on own rows in each way and as they are, after the last stage."""
    s, lines = run.summary, list[Line]()
    for measure in shown(s.measures, bool(s.unseen)):
        if measure == GLOBAL:
            continue
        x, y = run.curve(f"{measure} mean", run.last)
        label = in_way(measure, bool(s.unseen)) or "as they are"
        band = None if lines else run.curve(f"{measure} std", run.last)[1]
        style = look(0) if not lines else replace(look(len(lines)), shape="diamond", dash=(5, 3), filled=False)
        lines.append(Line(label + (" ± s.d. over clients" if not lines else ""), x, y, style, band))
    main, chance = lines[0], s.chance_of(s.main)
    where = ", at unseen clients" if s.unseen and s.own_accuracy else ""
    levels = [] if chance is None else [Level(f"always {s.frequent(s.main)}{where}", chance)]
    title = "Accuracy on own class mix" if s.own_accuracy else f"Accuracy on {s.tested}, by way"
    alt = f"Mean accuracy {s.on(s.main)}, by iteration, {_ends(main)}."
    svg, legend = plots.chart("own", alt, lines, levels, across=ACROSS)
    caption = "Each client on test rows in its own class mix, mean over clients." if s.own_accuracy else ""
    return main, levels, Figure(title, svg, legend, f"{caption} {ITERATION}".strip())


def _ends(line: Line) -> str:
    return f"from {words.percent(line.y[0])} at the start to {words.percent(line.y[-1])} at the end"


def sent(run: Run) -> np.ndarray:
    """Bytes (n,) that the clients had sent, to whomever, at each evaluation after the last stage."""
    total: np.ndarray = run.curve("bytes up", run.last)[1] + run.curve("bytes across", run.last)[1]
    return total


def _points(run: Run) -> Table:
    """Every evaluation, as numbers."""
    every = shown(run.summary.measures, bool(run.summary.unseen))
    own = [measure for measure in every if measure != GLOBAL] if run.personal else []
    whats = ("accuracy mean", "accuracy std", "loss mean", "bytes up", "bytes down", *(f"{what} mean" for what in own))
    rows: list[tuple[int, list[Cell]]] = []
    for stage in (START, *run.stages):
        found = [run.measured.get((what, "", stage), ([], [])) for what in whats]
        columns = zip(found[0][0], *(values for _, values in found), strict=True)
        for iteration, mean, deviation, loss, up, down, *others in columns:
            traffic = [Cell(words.size(count), words.exactly(count)) for count in (up, down)]
            numbers = [words.percent(mean), f"{100 * deviation:.1f}", f"{loss:.3f}"]
            shares = [words.percent(other) for other in others]
            rows.append((iteration, cells(words.whole(iteration), stage, *shares, *numbers, *traffic)))
    rows.sort(key=lambda row: row[0])
    prepared = [words.capital(run.summary.on(measure)) for measure in own]
    headings = ("Iteration", "Stage", *prepared, "Accuracy", "s.d. over clients", "Loss", "Sent up", "Sent down")
    caption = f"Each evaluation on {run.summary.tested}" + (" and, where a column says so, on own rows" if own else "")
    return Table(caption, headings, [row for _, row in rows], words=2)


def diagnostics(run: Run) -> Section:
    """Agreement, loss and accuracy by class, and whatever the parties noted."""
    figures = panels(run, ("agreement", "loss mean"))
    return Section("Diagnostics", figures=[*figures, *_classes(run, run.last)], small=True)


def panels(run: Run, first: Sequence[str] = (), across: str = ACROSS) -> list[Figure]:
    """A small chart of each of the `first` measures, and of whatever the parties noted."""
    groups: dict[str, list[tuple[str, str, str]]] = {name: [] for name in first}
    for key in run.measured:
        measure, party, stage = key
        if measure in groups and (party, stage) == ("", run.last):
            groups[measure].append(key)
        elif not measure.startswith(STANDARD) and party not in run.names:
            name = "gradient norm" if measure.startswith("gradient norm ") else measure
            groups.setdefault(name, []).append(key)
    return [_panel(run, name, keys, across) for name, keys in groups.items() if keys]


def _panel(run: Run, name: str, keys: list[tuple[str, str, str]], across: str) -> Figure:
    """A small chart of one measure, or of several of a kind."""
    lines = []
    for number, (measure, party, stage) in enumerate(keys):
        x, y = run.curve(measure, stage, party)
        thin = Look(look(number).colour, dash=DASHES[number % len(DASHES)])
        lines.append(Line(measure.removeprefix(f"{name} "), x, y, thin))
    ends = words.together([f"{line.label} is {line.y[-1]:.3g}" for line in lines])
    shares = "accuracy" in name or name == "agreement"
    title = words.capital(name.removesuffix(" mean"))
    svg, legend = plots.chart(
        f"note {name}",
        f"{title} by iteration; at the end {ends}.",
        lines,
        _reference(name, run.summary.clients),
        across=across,
        form_y=plots.share if shares else None,
        width="small",
    )
    return Figure(title, svg, legend if len(legend) > 1 else (), MEANINGS.get(name, ""))


def _reference(name: str, clients: int) -> list[Level]:
    """What a measure is where nothing can be told."""
    known = {"discriminator loss": ("ln", math.log(clients)), "discriminator accuracy": ("1 /", 1 / clients)}
    return [Level(f"{known[name][0]} {clients}", known[name][1])] if name in known else []


def _classes(run: Run, stage: str) -> list[Figure]:
    """Accuracy by class at the end, where there are not too many classes."""
    found = [run.measured.get((f"recall {name}", "", stage)) for name in run.partition.classes]
    if not any(found) or len(found) > plots.ROWS:
        return []
    values = np.array([series[1][-1] if series else math.nan for series in found])
    low, high = words.percent(np.nanmin(values)), words.percent(np.nanmax(values))
    series = Dots("mean over clients", values, replace(look(0), dash=None))
    alt = f"Accuracy by class, {low} to {high}."
    svg, _ = plots.dots("classes", alt, run.partition.classes, [series], width="small")
    caption = "Share of a class's rows in the global test set recognised at the end, mean over clients."
    return [Figure("Accuracy by class", svg, (), caption)]
