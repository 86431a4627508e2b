"""The report of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fedloom.report import plots, words
from fedloom.report.page import Cell, Details, Figure, Page, Section, Table, Tile, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import START, Run

STANDARD = ("accuracy", "own accuracy", "loss", "agreement", "recall", "bytes")
"""First words of what every run measures; all else are notes of its parties."""

MEANINGS = {
    "agreement": "How often two different clients give the same answer to a row of the global test set.",
    "loss mean": "Cross-entropy on the global test set in nats, mean over clients.",
    "discriminator loss": "At ln N the server can't tell the N clients' answers apart.",
    "discriminator accuracy": "How often the server names the author of an answer. Guessing is right 1 time in N.",
    "gradient norm": "Length of each term's gradient for a public row, at the round's last step: mean over rows "
    "and clients.",
}


def page(run: Run) -> Page:
    """All that the folder of a run tells."""
    s = run.summary
    seed = f"seed {s.seed}"
    return Page(
        title=f"{s.name} on {s.dataset}",
        subtitle=" · ".join(part for part in (s.title, f"preset {s.preset}", seed) if part),
        lead=lead(run),
        warning="" if run.finished else _unfinished(run),
        tiles=list(_tiles(run)),
        sections=[part for part in (_learning(run), _clients(run), _diagnostics(run), _traffic(run), _failures(run), _repeat(run)) if part],
        footer=f"Written by fedloom {run.environment.get('fedloom', '')} from the files of this run's folder.",
    )


def lead(run: Run) -> str:
    """The result in a sentence."""
    s = run.summary
    several = s.clients > 1
    reached = words.spread(s.accuracy.mean, s.accuracy.std if several else None)
    over = " (s.d. over clients)" if several else ""
    text = f"{words.capital(words.times(s.clients, 'client'))} reached {reached}{over} on {s.dataset} "
    text += f"after {words.times(s.iterations, 'iteration') if s.iterations == 1 else words.whole(s.iterations) + ' iterations'}"
    if s.chance is None:
        return text + "."
    return f"{text}; always answering the most frequent class gives {words.percent(s.chance)}."


def _unfinished(run: Run) -> str:
    done = words.times(run.summary.rounds, "round")
    return (
        f"This run is unfinished. What follows is its last evaluation, after {done}; the command that started it, "
        "with --resume added, goes on from the last checkpoint."
    )


def _tiles(run: Run) -> Iterable[Tile]:
    s = run.summary
    yield Tile("Accuracy", words.percent(s.accuracy.mean), f"± {100 * s.accuracy.std:.1f} s.d. over clients")
    if s.own_accuracy:
        yield Tile("On own classes", words.percent(s.own_accuracy.mean), f"± {100 * s.own_accuracy.std:.1f} s.d. over clients")
    if s.chance is not None:
        yield Tile("Chance", words.percent(s.chance), "always the most frequent class")
    if s.agreement is not None:
        yield Tile("Agreement", words.percent(s.agreement), "of answers, between two clients")
    ways = [("Sent up", s.bytes.up, "by the clients"), ("Sent down", s.bytes.down, "to the clients")]
    if s.bytes.across:
        ways.append(("Sent across", s.bytes.across, "between clients"))
    for label, count, note in ways:
        yield Tile(label, words.size(count), note, words.exactly(count))
    if s.seconds:
        total = s.seconds.get("total", sum(s.seconds.values()))
        yield Tile("Time", words.duration(total), f"{words.whole(s.messages)} messages", f"{total:,.2f} seconds")
    yield Tile("Failures", words.whole(s.failures), "calls without a usable reply")


def _learning(run: Run) -> Section:
    stages, s = run.stages, run.summary
    lines = []
    for number, stage in enumerate(reversed(stages or [START])):
        x, y = run.curve("accuracy mean", stage)
        _, deviation = run.curve("accuracy std", stage)
        main = number == 0
        label = f"after the {stage} stage" if len(stages) > 1 else "mean over clients"
        style = plots.look(number) if main else plots.Look(plots.look(number).colour, "square", (5, 3), False)
        lines.append(Line(label + (" ± s.d. over clients" if main else ""), x, y, style, deviation if main else None))
    levels = [Level("chance", s.chance)] if s.chance is not None else []
    main = lines[0]
    alt = f"Mean accuracy by iteration, from {words.percent(main.y[0])} at the start to {words.percent(main.y[-1])} at the end."
    svg, legend = plots.chart("learning", alt, lines, levels, across="iterations of a client")
    figures = [
        Figure("Accuracy on the global test set", svg, legend, "One iteration is one local step of a client.")
    ]
    spent = sent(run)
    if spent[-1] > 0:
        alt = f"Mean accuracy by bytes that the clients sent, {words.size(spent[-1])} in all."
        line = Line("mean ± s.d. over clients", spent, main.y, main.look, main.band)
        svg, legend = plots.chart("bytes", alt, [line], levels, across="sent by all clients", form_x=words.size)
        figures.append(Figure("Accuracy by what it cost to send", svg, legend, "Tensor data, without framing."))
    return Section("Learning", figures=figures, details=[Details("The numbers behind the curves", table=_points(run))])


def sent(run: Run) -> np.ndarray:
    """Bytes (n,) that the clients had sent at each evaluation after the last stage."""
    stage = (run.stages or [START])[-1]
    return run.curve("bytes up", stage)[1] + run.curve("bytes across", stage)[1]


def _points(run: Run) -> Table:
    rows = []
    for stage in [START, *run.stages]:
        seen = {what: run.measured.get((what, "", stage), ([], [])) for what in ("accuracy mean", "accuracy std", "loss mean", "bytes up", "bytes down")}
        x = seen["accuracy mean"][0]
        for i, iteration in enumerate(x):
            mean, deviation, loss, up, down = (values[i] for _, values in seen.values())
            rows.append((iteration, cells(words.whole(iteration), stage, words.percent(mean), f"{100 * deviation:.1f}", f"{loss:.3f}",
                                          Cell(words.size(up), words.exactly(up)), Cell(words.size(down), words.exactly(down)))))  # fmt: skip
    rows.sort(key=lambda row: row[0])
    columns = ("Iteration", "After stage", "Accuracy", "s.d. over clients", "Loss", "Sent up", "Sent down")
    return Table("Each evaluation on the global test set", columns, [row for _, row in rows], words=2)


def _clients(run: Run) -> Section:
    s, held = run.summary, run.partition
    each = np.array(s.accuracy.per_client)
    order = np.argsort(-each, kind="stable")
    series = [Dots("global test set", each[order], plots.look(0))]
    if s.own_accuracy:
        own = np.array(s.own_accuracy.per_client)[order]
        series.append(Dots("its own class mix", own, plots.Look(plots.look(1).colour, "diamond", filled=False)))
    levels = [Level("chance", s.chance)] if s.chance is not None else []
    labels = [f"{run.names[i]}  {held.architectures[i]}" for i in order]
    alt = f"Accuracy of each client, from {words.percent(each.min())} to {words.percent(each.max())}."
    svg, legend = plots.dots("clients", alt, labels, series, levels)
    caption = "Sorted by the accuracy on the global test set."
    if s.own_accuracy:
        caption += " A client's own class mix is that of its training rows; the test rows are others."
    figures = [Figure("Accuracy of each client", svg, legend, caption)]
    recalls = [run.measured.get((f"recall {c}", "", (run.stages or [START])[-1])) for c in held.classes]
    if any(recalls) and len(recalls) <= plots.ROWS:
        values = np.array([found[1][-1] if found else math.nan for found in recalls])
        alt = f"Accuracy by class, from {words.percent(np.nanmin(values))} to {words.percent(np.nanmax(values))}."
        svg, legend = plots.dots("classes", alt, held.classes, [Dots("mean over clients", values, plots.look(2))])
        figures.append(Figure("Accuracy by class", svg, legend, "Of the global test set's rows of a class, how many a client recognises."))
    return Section("Clients", figures=[*figures, partition(run)])


def partition(run: Run, note: str = "") -> Figure:
    """Who holds how many rows of which class."""
    held = run.partition
    counts = np.array(held.counts)
    rows = counts.sum(1)
    kinds = (counts > 0).sum(1)
    low, high = kinds.min(), kinds.max()
    most = f"{low}" if low == high else f"{low} to {high}"
    caption = (
        "Training rows by client and class; above, each client's total. A client holds "
        f"{words.whole(rows.min())} to {words.whole(rows.max())} rows of {most} of {len(held.classes)} classes. "
        f"Beside these there are {words.whole(held.test)} test rows and {words.whole(held.public)} unlabelled public rows."
    )
    alt = f"Rows of {len(held.classes)} classes at {len(counts)} clients; a cell holds at most {counts.max()}."
    svg = plots.holdings("partition", alt, counts, held.classes)
    return Figure("Who holds what" + note, svg, (plots.shades(counts.max()),), caption, wide=True)


def _diagnostics(run: Run) -> Section | None:
    groups: dict[str, list[tuple[str, str, str]]] = {"agreement": [], "loss mean": []}
    for key in run.measured:
        measure, party, stage = key
        if measure in groups and (party, stage) == ("", (run.stages or [START])[-1]):
            groups[measure].append(key)
        elif not measure.startswith(STANDARD) and party not in run.names:
            name = "gradient norm" if measure.startswith("gradient norm ") else measure
            groups.setdefault(name, []).append(key)
    figures = []
    for number, (name, keys) in enumerate((k, v) for k, v in groups.items() if v):
        lines = []
        for i, (measure, party, stage) in enumerate(keys):
            x, y = run.curve(measure, stage, party)
            label = measure.removeprefix(f"{name} ")
            lines.append(Line(label, x, y, plots.Look(plots.look(i).colour, dash=plots.DASHES[i % len(plots.DASHES)])))
        shares = "accuracy" in name or name == "agreement"
        levels = _reference(name, run.summary.clients)
        ends = " and ".join(f"{line.label} {line.y[-1]:.3g}" for line in lines)
        svg, legend = plots.chart(
            f"note{number}", f"{name} by iteration; at the end {ends}.", lines, levels,
            across="iterations of a client", form_y=plots.share if shares else None, small=True,
        )  # fmt: skip
        figures.append(Figure(words.capital(name), svg, legend if len(legend) > 1 else (), MEANINGS.get(name, "")))
    return Section("Diagnostics", figures=figures, small=True) if figures else None


def _reference(name: str, clients: int) -> list[Level]:
    """What a measure would be if nothing could be told."""
    if name == "discriminator loss":
        return [Level(f"ln {clients}", math.log(clients))]
    return [Level(f"1/{clients}", 1 / clients)] if name == "discriminator accuracy" else []


def _traffic(run: Run) -> Section:
    kinds: dict[tuple[str, str, str], list[tuple[str, int, int, int]]] = {}
    for flow in run.ledger:
        kinds.setdefault((flow.sender, flow.receiver, flow.kind), []).append((flow.what, flow.count, flow.bytes, flow.wire_bytes))
    rows = []
    for (sender, receiver, kind), found in kinds.items():
        contents = list(dict.fromkeys(what for what, *_ in found))
        more = f", and {words.times(len(contents) - 1, 'other content')}" if len(contents) > 1 else ""
        count, size, wire = (sum(row[i] for row in found) for i in (1, 2, 3))
        rows.append(cells(f"{sender} → {receiver}", kind, Cell(contents[0] + more, "; ".join(contents[:20])), words.whole(count),
                          Cell(words.size(size), words.exactly(size)), Cell(words.size(wire), words.exactly(wire))))  # fmt: skip
    columns = ("From → to", "Message", "What crosses", "Messages", "Tensor data", "On the wire")
    tables = [Table("All messages of the run, by the method that they call or answer", columns, rows, words=3)]
    phases = {k: v for k, v in run.summary.seconds.items() if k != "total"}
    if phases:
        total = sum(phases.values()) or 1.0
        times = [cells(phase, words.duration(t), Cell(words.percent(t / total), share=t / total)) for phase, t in phases.items()]
        tables.append(Table("Wall time by phase", ("Phase", "Time", "Share"), times))
    text = "Nothing else crosses: the ledger counts every message. On the wire, names and framing come on top of the tensor data."
    return Section("Traffic and time", text=[text], tables=tables)


def _failures(run: Run) -> Section | None:
    if not run.failures:
        return None
    groups: dict[tuple[str, str], list[str]] = {}
    for trouble in run.failures:
        groups.setdefault((trouble.reason, trouble.kind), []).append(trouble.party)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [cells(reason, kind, words.whole(len(who)), words.whole(len(set(who)))) for (reason, kind), who in ordered]
    text = "A reply that is missing or not usable is dropped; the round goes on with the others."
    table = Table("Calls without a usable reply", ("Reason", "Call", "Calls", "Parties"), rows, words=2)
    return Section("Failures", text=[text], tables=[table])


def _repeat(run: Run) -> Section:
    s = run.summary
    known = {**run.environment, "public_sha256": s.public_sha256, "state_sha256": s.state_sha256}
    rows = [cells(key, str(value)) for key, value in known.items() if value is not None]
    table = Table("Where the run was made, and hashes of the public rows and of the parties' last states", ("", "Value"), rows, words=2)
    return Section(
        "Repeat it",
        text=["From this folder, with the same version on a like machine, this gives the same numbers and the same state_sha256:"],
        command="fedloom run config.toml",
        details=[Details("Resolved config", run.config), Details("Environment and hashes", table=table)],
    )
