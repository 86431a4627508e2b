"""Sections on vertical learning: the joint prediction, each party's data, accuracy alone, and
attacks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fedloom.experiment.run.metrics import ATTACK, GLOBAL, OWN, SCORES, Metric
from fedloom.experiment.run.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report import heatmaps, plots
from fedloom.report.learning import iteration_axis
from fedloom.report.page import Details, Figure, PageCell, PageSection, PageTable, Tile, cells
from fedloom.report.plots import Level, Line
from fedloom.report.read import Run
from fedloom.report.schema import PartyData, VerticalPartition
from fedloom.report.styles import SeriesStyle, series_style
from fedloom.report.svg import INK

MARKS = (
    "Γ is the ratio of a party's largest class to its smallest in unaligned rows; S, its number "
    "of classes; MID, their imbalance from 0 (uniform) to 1 (one class); cos, the cosine "
    "similarity of its class mix and that of all parties. They need labels of unaligned rows, "
    "which only a simulation has."
)
PSEUDO = (
    "Each party also predicts alone, from its own columns and the messages it received. Its "
    "predictions on unaligned rows are its pseudo-labels, which it may learn from. The "
    "pseudo-label accuracy is the share of correct ones. It needs labels of unaligned rows, "
    "which only a simulation has."
)
LEAKS = "Label inference attacks"
GUESSES = (
    "A passive party that follows the protocol may infer the class of each aligned row from the "
    "messages it receives. The attack is scored on rows whose class the party does not know; if "
    "it knows some, these are evaluate.attack_labels rows of each class. Attackers with "
    "different knowledge are not comparable."
)
KNOWS = {
    "gradients direct": "The gradient of each row's loss by the logits it sent, and that all logits are summed.",  # noqa: E501
    "gradients nearest": "The gradient it received for each row, and the class of a few rows.",
    "prototypes": "Its own embeddings, the prototypes it received, and their classes; no label.",
    "embeddings nearest": "Its own embeddings and the class of a few rows. A control without messages.",  # noqa: E501
    "completion": "Its own embeddings, the class of a few rows, and many unlabeled rows.",
}
"""The assumed knowledge of the attacker, by attack."""
CHANCE_ATTACK = "chance"
"""Always guessing the most frequent class: listed among the attacks as their baseline."""
TOGETHER = SeriesStyle(INK, dash=(8, 3, 2, 3))
"""The style of the joint accuracy, beside those of single parties."""


def lead(run: Run, length: str) -> str:
    """The result in a sentence, after a length of training."""
    s = run.summary
    more = [
        f"{_inside(name)} {fmt.metric(v, SCORES[name].share)}"
        for name, v in s.scores.items()
        if name != s.on_test
    ]
    alone = "" if s.messages else ", without any message between them"
    number = len(run.partition.classes)
    what = f" with {fmt.times(number, 'class', 'classes')}" if s.task == "classes" else ""
    return (
        f"{fmt.capital(fmt.times(s.clients, 'party', 'parties'))} with different columns of the "
        f"same rows, one of which holds the labels, reached an {s.on_test.noun} of "
        f"{fmt.metric(s.overall.mean, s.on_test.share)} on {fmt.whole(run.partition.test)} test "
        f"rows of {s.dataset}{what} ({', '.join(more)}) after {length}{alone}"
    )


def _inside(name: Metric) -> str:
    title = SCORES[name].title
    return title if title.isupper() else title[:1].lower() + title[1:]


def tiles(run: Run) -> Iterable[Tile]:
    """The scores, each with its value at chance."""
    s, number = run.summary, len(run.partition.classes)
    if s.task == "number":
        unit = f"in the unit of {s.label}; lower is better" if s.label else "lower is better"
        about = {"rmse": unit, "mae": unit, "r2": "1 is perfect; the mean gives 0"}
        yield from (
            Tile(SCORES[one].title, fmt.metric(v, False), about[one.name])
            for one, v in s.scores.items()
        )
        if s.chance is not None:
            yield Tile("Chance", fmt.metric(s.chance, False), "RMSE of always the mean")
        return
    error = 100 * math.sqrt(s.overall.mean * (1 - s.overall.mean) / max(1, run.partition.test))
    frequent = np.array(
        run.partition.parties.test_counts if run.partition.parties else (1,), dtype=float
    )
    shares = frequent[frequent > 0] / frequent.sum()
    notes = {
        "accuracy": f"of {fmt.whole(run.partition.test)} test rows; standard error {error:.1f}",
        "balanced accuracy": f"mean over classes; chance gives {fmt.percent(1 / len(shares))}",
        "auc": "chance gives 0.5"
        + ("; mean over classes, each against all others" if number > 2 else ""),
        "log loss": f"lower is better; class frequencies give {-(shares * np.log(shares)).sum():.3f}",  # noqa: E501
        "calibration error": "lower is better; 0 is perfect",
        "seen accuracy": "on test rows of classes that are frequent in aligned rows",
        "rare recall": "on test rows of the other classes",
    }
    for name, value in s.scores.items():
        yield Tile(SCORES[name].title, fmt.metric(value, SCORES[name].share), notes[name.name])
    if s.chance is not None:
        yield Tile("Chance", fmt.percent(s.chance), "always the most frequent class")


def classes(run: Run) -> PageSection | None:
    """Recall by class, and classes without aligned rows."""
    held, s = run.partition.parties, run.summary
    assert held is not None
    if s.task == "number":
        return None
    found = [run.measured.get((f"recall {name}", "", run.last)) for name in run.partition.classes]
    recall = np.array([series[1][-1] if series else math.nan for series in found])
    aligned, test = np.array(held.aligned_counts), np.array(held.test_counts)
    rows = [
        cells(
            name,
            fmt.whole(known),
            fmt.whole(tested),
            PageCell(
                fmt.NONE if math.isnan(share) else fmt.percent(share),
                share=None if math.isnan(share) else share,
            ),
        )
        for name, known, tested, share in zip(
            run.partition.classes, aligned, test, recall, strict=True
        )
    ]
    heading = ("Class", "Aligned rows", "Test rows", "Recall")
    table = PageTable("Recall by class at the end", heading, rows)
    points = []
    missing = (aligned == 0) & (test > 0)
    if missing.any() and not missing.all():
        names = fmt.together(
            [name for name, gone in zip(run.partition.classes, missing, strict=True) if gone]
        )
        right = np.nan_to_num(recall) * test
        seen, unseen = (
            fmt.percent(right[which].sum() / max(1, test[which].sum()))
            for which in (~missing, missing)
        )
        points.append(
            f"No aligned row has the class {names}, so the active party cannot learn it. The "
            f"accuracy is {seen} on test rows of the other classes and {unseen} on those of "
            f"{'this one' if missing.sum() == 1 else 'these'}."
        )
    few = len(rows) <= plots.ROWS
    details = [] if few else [Details(f"All {s.dataset} classes", table=table)]
    return PageSection("Classes", tables=[table] if few else [], points=points, details=details)


def data_of_parties(run: Run, which: str = "") -> PageSection:
    """Columns, rows and class imbalance of each party; `which` names the run if there
    are several.
    """
    held = run.partition.parties
    assert held is not None
    known = [p for p in held.parties if p.unaligned_counts is not None]
    together = held.all.weighted_cosine
    text = [
        "Aligned rows are shared by all parties; an unaligned row belongs to one party. Only the "
        f"active party, which holds the columns of {held.parties[0].name}, has labels, for "
        "aligned rows only."
    ]
    if any(p.gamma is not None for p in held.parties):
        text.append(
            MARKS
            + ("" if together is None else f" The mean cos weighted by rows is {together:.3f}.")
        )
    tables = [_table(run, held.parties, which)]
    details = [_columns(held.parties)] if any(_long(p) for p in held.parties) else []
    figures = [_picture(run, held, known)] if len(run.partition.classes) <= plots.ROWS else []
    return PageSection(
        "Data of each party", text=text, tables=tables, figures=figures, details=details
    )


def _table(run: Run, parties: Sequence[PartyData], which: str) -> PageTable:
    networks = len(set(run.partition.architectures)) > 1
    measured = any(p.gamma is not None for p in parties)
    headings = ["Party", "Holds", *(["Network"] if networks else []), "Aligned", "Unaligned"]
    headings += ["Γ", "S", "MID", "cos"] if measured else []
    rows = []
    for p, id, called, network in zip(
        parties, run.names, run.display_names, run.partition.architectures, strict=True
    ):
        marks = ["gamma", "classes_held", "mid", "cosine"] if measured else []
        forms = {"gamma": ".2f", "classes_held": "d", "mid": ".3f", "cosine": ".3f"}
        values = [
            fmt.NONE if getattr(p, m) is None else format(getattr(p, m), forms[m]) for m in marks
        ]
        counts = [fmt.whole(p.aligned), fmt.whole(p.unaligned)]
        name = called if called == id else f"{id}: {called}"
        rows.append(cells(name, _holds(p), *([network] if networks else []), *counts, *values))
    network = "" if networks else f"; each party's network is {run.partition.architectures[0]}"
    return PageTable(
        f"Data of each party{which}{network}", headings, rows, words=3 if networks else 2
    )


def _long(p: PartyData) -> bool:
    return p.columns is not None and len(", ".join(p.columns)) > 50


def _holds(p: PartyData) -> PageCell:
    """The column names or their number, or the shape of images."""
    if p.columns is None and not p.input_shape:
        return PageCell("private columns", title="Known to the party only.")
    if p.columns is None:
        return PageCell(" × ".join(map(str, p.input_shape)))
    names = ", ".join(p.columns)
    return (
        PageCell(fmt.times(len(p.columns), "column"), title=names) if _long(p) else PageCell(names)
    )


def _columns(parties: Sequence[PartyData]) -> Details:
    rows = [cells(p.name, ", ".join(p.columns or ())) for p in parties]
    return Details(
        "Column names", table=PageTable("Each party's columns", ("Party", "Columns"), rows, words=2)
    )


def _picture(run: Run, held: VerticalPartition, known: Sequence[PartyData]) -> Figure:
    """Rows by class: aligned rows, and each party's unaligned rows if their classes are known."""
    shown = [p for p in known if p.unaligned]
    counts = np.array([held.aligned_counts, *(p.unaligned_counts for p in shown)], dtype=int)
    most = int(counts.max())
    alt = (
        f"Rows of {counts.shape[1]} classes, aligned and unaligned; a cell stands for at most "
        f"{most}."
    )
    svg = heatmaps.class_counts(
        "partition", alt, counts, run.partition.classes, ["aligned", *(p.name for p in shown)]
    )
    caption = "Aligned rows by class" + (
        ", then unaligned rows, whose classes no party knows." if shown else "."
    )
    caption += f" All parties also hold {fmt.whole(run.partition.test)} test rows."
    return Figure("Rows by class", svg, (heatmaps.rows_legend(most),), caption, len(shown) > 4)


def alone(run: Run) -> PageSection | None:
    """The accuracy of each party alone, in each evaluation mode."""
    if not run.summary.alone:
        return None
    figures, tables = [], []
    for eval_mode, found in run.summary.alone.items():
        prefix = "" if eval_mode == "alone" else f"{fmt.capital(eval_mode)}: "
        chance = [] if run.summary.chance is None else [Level("chance", run.summary.chance)]
        levels = [Level("joint, at the end", run.summary.overall.mean, TOGETHER), *chance]
        figures.append(
            _by_party(run, replace(GLOBAL, mode=eval_mode), f"{prefix}On the test rows", levels)
        )
        if found.own is not None:
            title = f"{prefix}On its own unaligned rows: pseudo-label accuracy"
            figures.append(_by_party(run, replace(OWN, mode=eval_mode), title, []))
        test, own = found.test.per_client, found.own.per_client if found.own else None
        rows = []
        for n, name in enumerate(run.display_names):
            others = [fmt.NONE, fmt.NONE] if own is None else [fmt.percent(own[n]), _most(run, n)]
            rows.append(cells(name, fmt.percent(test[n]), *others))
        headings = (
            "Party",
            "On the test rows",
            "On its unaligned rows",
            "Most frequent class of those",
        )
        tables.append(PageTable(f"{prefix}Accuracy of each party alone at the end", headings, rows))
    return PageSection("Each party alone", text=[PSEUDO], tables=tables, figures=figures)


def _most(run: Run, n: int) -> str:
    """The share of the most frequent class among party n's unaligned rows."""
    held = run.partition.parties
    counts = held.parties[n].unaligned_counts if held else None
    return fmt.percent(max(counts) / sum(counts)) if counts and sum(counts) else fmt.NONE


def _by_party(run: Run, metric: Metric, title: str, levels: list[Level]) -> Figure:
    curves = [run.curve(str(metric), run.last, id) for id in run.names]
    lines = [
        Line(run.display_names[n], x, y, series_style(n))
        for n, (x, y) in enumerate(curves)
        if len(x)
    ]
    ends = fmt.together([f"{line.label} {fmt.percent(line.y[-1])}" for line in lines])
    svg, legend = plots.chart(
        str(metric),
        f"{title} by iteration; at the end {ends}.",
        lines,
        levels,
        across=iteration_axis(run),
    )
    return Figure(title, svg, legend)


def attacks(run: Run) -> PageSection | None:
    """Attacks on the labels of aligned rows."""
    found = {kind: attack for kind, attack in run.summary.attacks.items() if kind != CHANCE_ATTACK}
    if not found:
        return None
    chance = run.summary.attacks.get(CHANCE_ATTACK)
    ids = [id for id in run.names if any(id in attack.per_party for attack in found.values())]
    names = [run.display_names[run.names.index(id)] for id in ids]
    rows = [
        cells(
            fmt.capital(kind),
            KNOWS.get(kind, fmt.NONE),
            *(
                fmt.percent(attack.per_party[id]) if id in attack.per_party else fmt.NONE
                for id in ids
            ),
            PageCell(fmt.percent(attack.mean), share=min(1.0, attack.mean)),
        )
        for kind, attack in found.items()
    ]
    heading = ("Attack", "Attacker's knowledge", *names, "Mean")
    level = (
        ""
        if chance is None
        else f" Always guessing the most frequent class gives {fmt.percent(chance.mean)}."
    )
    levels = [] if chance is None else [Level("most frequent class", chance.mean)]
    figures = [
        _by_party(run, Metric(ATTACK, kind), fmt.capital(kind), levels)
        for kind in found
        if any(len(run.curve(str(Metric(ATTACK, kind)), run.last, id)[0]) > 1 for id in ids)
    ]
    table = PageTable("Share of labels inferred at the end", heading, rows, words=2)
    return PageSection(LEAKS, text=[GUESSES + level], tables=[table], figures=figures)


def alone_by_method(found: Comparison) -> PageSection | None:
    """The accuracy of parties alone, by method."""
    rows = []
    for m in found.methods:
        for eval_mode, on in m.alone.items():
            name = m.name if eval_mode == "alone" else f"{m.name}, {eval_mode}"
            own = fmt.NONE if on.own is None else fmt.spread(on.own.mean, on.own.std_over_seeds)
            rows.append(cells(name, fmt.spread(on.test.mean, on.test.std_over_seeds), own))
    columns = ("Method", "On the test rows", "On their unaligned rows")
    table = PageTable("Accuracy of the parties alone at the end, mean over parties", columns, rows)
    return PageSection("Each party alone", text=[PSEUDO], tables=[table]) if rows else None


def attacks_by_method(found: Comparison, runs: Sequence[Run]) -> PageSection | None:
    """The share of labels that each attack infers under each method, mean over parties
    and seeds.
    """
    rows = []
    for m in found.methods:
        own = [run.summary.attacks for run in runs if run.summary.name == m.name]
        for kind in dict.fromkeys(
            kind for attacks in own for kind in attacks if kind != CHANCE_ATTACK
        ):
            means = [attacks[kind].mean for attacks in own if kind in attacks]
            deviation = float(np.std(means, ddof=1)) if len(means) > 1 else None
            guess = [attacks[CHANCE_ATTACK].mean for attacks in own if CHANCE_ATTACK in attacks]
            chance = fmt.percent(float(np.mean(guess))) if guess else fmt.NONE
            mean = fmt.spread(float(np.mean(means)), deviation)
            rows.append(cells(m.name, kind, KNOWS.get(kind, fmt.NONE), mean, chance))
    columns = ("Method", "Attack", "Attacker's knowledge", "Labels inferred", "Most frequent class")
    table = PageTable(
        "Share of labels inferred at the end, mean over parties", columns, rows, words=3
    )
    return PageSection(LEAKS, text=[GUESSES], tables=[table]) if rows else None
