"""Parties with different columns, one by one: what they hold, what they can do alone, what they could find out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedloom.report import holdings as pictures
from fedloom.report import plots, words
from fedloom.report.looks import Look, look
from fedloom.report.measures import GLOBAL, OWN
from fedloom.report.page import Cell, Details, Figure, Section, Table, cells
from fedloom.report.plots import Level, Line
from fedloom.report.read import Run
from fedloom.report.schema_columns import Holding, Parties
from fedloom.report.svg import INK

ACROSS = "iterations"
MARKS = (
    "Γ is the number of unaligned rows of a party's largest class to that of its smallest; S, how many classes it has; "
    "MID, how uneven they are, from 0 (all alike) to 1 (one class has all); cos, how like its class mix is to that of "
    "all parties together. They need the classes of unaligned rows, known only where somebody has the labels, as in a "
    "simulation."
)
PSEUDO = (
    "Each party also answers by itself, from its own columns and what it was sent. What it answers on its unaligned "
    "rows are its pseudo-labels, which it may learn from. How many of these are right, the pseudo-label accuracy, is "
    "known only where somebody has the labels, as in a simulation: no party without labels can measure it."
)
LEAKS = "What parties could find out about labels"
GUESSES = (
    "A party without labels that follows the protocol may guess from what it is told which class each aligned row is "
    "of, judged on rows whose class it was not told. Where it is told some, they are evaluate.attacks rows of each "
    "class. Attackers that know different things are not comparable."
)
KNOWS = {
    "gradients direct": "The gradient of each row's loss by the logits that it sent, and that all logits are added up.",
    "gradients nearest": "The gradient that it was sent for each row, and the class of a few rows.",
    "prototypes": "Its own embeddings, the prototypes that it was sent, and which class each stands for; no label.",
    "embeddings nearest": "Its own embeddings and the class of a few rows. A control: what these labels alone tell.",
    "completion": "Its own embeddings, the class of a few rows, and many rows without.",
}
"""What an attacker is assumed to know, by the attack's name."""
GUESS = "chance"
"""Always guessing the most frequent class: listed among the attacks, and what they are held against."""
TOGETHER = Look(INK, dash=(8, 3, 2, 3))
"""What all parties reach together, beside what each reaches alone."""


def holdings(run: Run, which: str = "") -> Section:
    """Who holds which columns of how many rows, and how uneven the classes are; `which` run, if there are several."""
    held = run.partition.parties
    assert held is not None
    known = [p for p in held.parties if p.unaligned_counts is not None]
    together = held.all.weighted_cosine
    text = [
        "Aligned rows are the same people, or things, at all parties; unaligned ones only one party has. Only the "
        f"active party, whose own columns are those of {held.parties[0].name}, knows labels: those of the aligned rows."
    ]
    if any(p.gamma is not None for p in held.parties):
        text.append(MARKS + ("" if together is None else f" Weighted by rows, cos is {together:.3f} in all."))
    tables = [_table(run, held.parties, which)]
    details = [_columns(held.parties)] if any(_long(p) for p in held.parties) else []
    figures = [_picture(run, held, known)] if len(run.partition.classes) <= plots.ROWS else []
    return Section("Who holds what", text=text, tables=tables, figures=figures, details=details)


def _table(run: Run, parties: Sequence[Holding], which: str) -> Table:
    """A row for each party."""
    networks = len(set(run.partition.architectures)) > 1
    measured = any(p.gamma is not None for p in parties)
    headings = ["Party", "Holds", *(["Network"] if networks else []), "Aligned", "Unaligned"]
    headings += ["Γ", "S", "MID", "cos"] if measured else []
    rows = []
    for p, id, network in zip(parties, run.names, run.partition.architectures, strict=True):
        marks = ["gamma", "classes_held", "mid", "cosine"] if measured else []
        forms = {"gamma": ".2f", "classes_held": "d", "mid": ".3f", "cosine": ".3f"}
        values = [words.NONE if getattr(p, m) is None else format(getattr(p, m), forms[m]) for m in marks]
        counts = [words.whole(p.aligned), words.whole(p.unaligned)]
        name = p.name if p.name == id else f"{id}: {p.name}"
        rows.append(cells(name, _holds(p), *([network] if networks else []), *counts, *values))
    network = "" if networks else f"; each party's network is {run.partition.architectures[0]}"
    return Table(f"What each party holds{which}{network}", headings, rows, words=3 if networks else 2)


def _long(p: Holding) -> bool:
    return p.columns is not None and len(", ".join(p.columns)) > 50


def _holds(p: Holding) -> Cell:
    """Its columns by name, or how many they are; or the shape of its pictures."""
    if p.columns is None and not p.input_shape:
        return Cell("columns of its own", title="Nobody else knows them.")
    if p.columns is None:
        return Cell(" × ".join(map(str, p.input_shape)))
    names = ", ".join(p.columns)
    return Cell(words.times(len(p.columns), "column"), title=names) if _long(p) else Cell(names)


def _columns(parties: Sequence[Holding]) -> Details:
    """All columns by name."""
    rows = [cells(p.name, ", ".join(p.columns or ())) for p in parties]
    return Details("The columns by name", table=Table("Each party's columns", ("Party", "Columns"), rows, words=2))


def _picture(run: Run, held: Parties, known: Sequence[Holding]) -> Figure:
    """Rows by class: the aligned ones, and each party's unaligned ones where their classes are known."""
    shown = [p for p in known if p.unaligned]
    counts = np.array([held.aligned_counts, *(p.unaligned_counts for p in shown)], dtype=int)
    most = int(counts.max())
    alt = f"Rows of {counts.shape[1]} classes, aligned and unaligned; a cell stands for at most {most}."
    svg = pictures.holdings("partition", alt, counts, run.partition.classes, ["aligned", *(p.name for p in shown)])
    caption = "Aligned rows by class" + (
        ", then unaligned rows where their classes are on record; no party is told these." if shown else "."
    )
    caption += f" Beside them there are {words.whole(run.partition.test)} test rows, which all parties hold."
    return Figure("Rows by class", svg, (pictures.shades(most),), caption, len(shown) > 4)


def alone(run: Run) -> Section | None:
    """What each party answers by itself, in each way in which it can."""
    if not run.summary.alone:
        return None
    figures, tables = [], []
    for way, found in run.summary.alone.items():
        prefix = "" if way == "alone" else f"{words.capital(way)}: "
        chance = [] if run.summary.chance is None else [Level("chance", run.summary.chance)]
        levels = [Level("all together, at the end", run.summary.accuracy.mean, TOGETHER), *chance]
        figures.append(_by_party(run, f"{GLOBAL} {way}", f"{prefix}On the test rows", levels))
        if found.own is not None:
            title = f"{prefix}On its own unaligned rows: pseudo-label accuracy"
            figures.append(_by_party(run, f"{OWN} {way}", title, []))
        test, own = found.test.per_client, found.own.per_client if found.own else None
        rows = []
        for n, name in enumerate(run.called):
            others = [words.NONE, words.NONE] if own is None else [words.percent(own[n]), _most(run, n)]
            rows.append(cells(name, words.percent(test[n]), *others))
        headings = ("Party", "On the test rows", "On its unaligned rows", "Most frequent class of these")
        tables.append(Table(f"{prefix}Accuracy of each party alone at the end", headings, rows))
    return Section("Each party alone", text=[PSEUDO], tables=tables, figures=figures)


def _most(run: Run, n: int) -> str:
    """The share of the most frequent class among party n's unaligned rows."""
    held = run.partition.parties
    counts = held.parties[n].unaligned_counts if held else None
    return words.percent(max(counts) / sum(counts)) if counts and sum(counts) else words.NONE


def _by_party(run: Run, measure: str, title: str, levels: list[Level]) -> Figure:
    """A line for each party that has the measure."""
    curves = [run.curve(measure, run.last, id) for id in run.names]
    lines = [Line(run.called[n], x, y, look(n)) for n, (x, y) in enumerate(curves) if len(x)]
    ends = words.together([f"{line.label} {words.percent(line.y[-1])}" for line in lines])
    svg, legend = plots.chart(measure, f"{title} by iteration; at the end {ends}.", lines, levels, across=ACROSS)
    return Figure(title, svg, legend)


def attacks(run: Run) -> Section | None:
    """How many labels of aligned rows the parties could find out."""
    found = {kind: attack for kind, attack in run.summary.attacks.items() if kind != GUESS}
    if not found:
        return None
    chance = run.summary.attacks.get(GUESS)
    ids = [id for id in run.names if any(id in attack.per_party for attack in found.values())]
    names = [run.called[run.names.index(id)] for id in ids]
    rows = [
        cells(
            words.capital(kind),
            KNOWS.get(kind, words.NONE),
            *(words.percent(attack.per_party[id]) if id in attack.per_party else words.NONE for id in ids),
            Cell(words.percent(attack.mean), share=min(1.0, attack.mean)),
        )
        for kind, attack in found.items()
    ]
    heading = ("Attack", "What the attacker knows", *names, "Mean")
    level = (
        "" if chance is None else f" Always guessing the most frequent class is right at {words.percent(chance.mean)}."
    )
    levels = [] if chance is None else [Level("most frequent class", chance.mean)]
    figures = [
        _by_party(run, f"attack {kind}", words.capital(kind), levels)
        for kind in found
        if any(len(run.curve(f"attack {kind}", run.last, id)[0]) > 1 for id in ids)
    ]
    table = Table("Share of labels found out at the end", heading, rows, words=2)
    return Section(LEAKS, text=[GUESSES + level], tables=[table], figures=figures)
