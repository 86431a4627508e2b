"""The report of one run."""

from __future__ import annotations

from collections.abc import Iterable

from fedloom.report import columns, unseen, words
from fedloom.report.clients import of_one
from fedloom.report.learning import diagnostics, learning
from fedloom.report.measures import GLOBAL, TRAINING, after, shown
from fedloom.report.neighbours import chosen
from fedloom.report.page import Details, Page, Section, Table, Tile, cells
from fedloom.report.read import Run
from fedloom.report.schema import Summary
from fedloom.report.traffic import traffic


def page(run: Run) -> Page:
    """All that the folder of a run tells."""
    s = run.summary
    if s.scores:
        main = columns.sections(run)
    else:
        main = [learning(run), unseen.of_one(run), of_one(run), chosen(run), diagnostics(run), traffic(run)]
    parts = (*main, _failures(run), _repeat(run))
    return Page(
        title=f"{s.name} on {s.dataset}",
        subtitle=" · ".join(part for part in (s.title, f"preset {s.preset}", f"seed {s.seed}") if part),
        lead=columns.lead(run) if s.scores else lead(run),
        warning="" if run.finished else _unfinished(run),
        tiles=list(_tiles(run)),
        sections=[part for part in parts if part],
        footer=f"Made by fedloom {run.environment.get('fedloom', '')} from the files of this run's folder.",
    )


def lead(run: Run) -> str:
    """The result in a sentence."""
    s = run.summary
    if s.ways:
        return _lead_in_ways(s)
    reached, over = words.percent(s.accuracy.mean), ""
    if s.clients > 1:
        reached, over = words.spread(s.accuracy.mean, s.accuracy.std), " (s.d. over clients)"
    who = words.capital(words.times(s.clients, "client"))
    length = _length(s)
    text = f"{who} reached {reached}{over} on {s.dataset} after {length}"
    if s.chance is None:
        return f"{text}."
    return f"{text}; always answering the most frequent class gives {words.percent(s.chance)}."


def _lead_in_ways(s: Summary) -> str:
    """The same where a further way counts: on each client's own class mix, if it has test rows of its own."""
    way, own = next(iter(s.ways)), s.own_accuracy or s.accuracy
    if s.unseen:
        return _unseen_lead(s, way)
    new, old = (words.spread(a.mean, a.std if s.clients > 1 else None) for a in (s.ways[way], own))
    over = " (s.d. over clients)" if s.clients > 1 else ""
    who = words.times(s.clients, "client")
    text = f"{_rows(s)}, {who} reached {new}{over} {after(way)} and "
    text += f"{old} as they are, after {_length(s)}"
    chance = s.chance_of(s.main)
    if chance is None:
        return f"{text}."
    return f"{text}; always answering {s.frequent(s.main)} gives {words.percent(chance)}."


def _unseen_lead(s: Summary, way: str) -> str:
    """The same where some clients took no part."""
    over, training = s.ways[way], s.ways[way + TRAINING]
    who = words.times(len(over.per_client), "unseen client")
    text = f"{_rows(s)}, {who} reached {words.spread(over.mean, over.std)} {after(way)}, "
    text += f"{words.times(len(training.per_client), 'training client')} {words.spread(training.mean, training.std)}, "
    text += f"in {_length(s)} (s.d. over clients)"
    chance = s.chance_of(s.main)
    if chance is None:
        return f"{text}."
    where = "at those unseen, " if s.own_accuracy else ""
    return f"{text}; {where}always answering {s.frequent(s.main)} gives {words.percent(chance)}."


def _rows(s: Summary) -> str:
    """What the ways are measured on."""
    return f"On {'their own class mix' if s.own_accuracy else s.tested} of {s.dataset}"


def _length(s: Summary) -> str:
    return "one iteration" if s.iterations == 1 else f"{words.whole(s.iterations)} iterations"


def _unfinished(run: Run) -> str:
    done = words.times(run.summary.rounds, "round")
    return (
        f"This run is unfinished: what follows is its last evaluation, after {done}. The command that started "
        "it, with --resume added, goes on from the last checkpoint."
    )


def _tiles(run: Run) -> Iterable[Tile]:
    yield from columns.tiles(run) if run.summary.scores else _accuracies(run.summary)
    yield from _costs(run.summary)


def _accuracies(s: Summary) -> Iterable[Tile]:
    for measure in shown(s.measures, bool(s.unseen)):
        found = s.measures[measure]
        label = "Accuracy" if measure == GLOBAL and not s.ways else words.capital(s.on(measure))
        note = f"±{words.NBSP}{100 * found.std:.1f} s.d. over clients" if len(found.per_client) > 1 else ""
        yield Tile(label, words.percent(found.mean), note)
    chance = s.chance_of(s.main)
    if chance is not None:
        yield Tile("Chance", words.percent(chance), f"always {s.frequent(s.main)}")
    if s.agreement is not None:
        yield Tile("Agreement", words.percent(s.agreement), "of answers, between two clients")


def _costs(s: Summary) -> Iterable[Tile]:
    who = "parties" if s.scores else "clients"
    ways = [("Sent up", s.bytes.up, f"by the {who}"), ("Sent down", s.bytes.down, f"to the {who}")]
    if s.bytes.across:
        ways.append(("Sent across", s.bytes.across, f"between {who}"))
    for label, count, note in ways:
        yield Tile(label, words.size(count), note, words.exactly(count))
    if s.seconds:
        total = s.seconds.get("total", sum(s.seconds.values()))
        e = s.engine
        where = f"{e.engine} engine, {words.times(e.workers, 'worker')}, {e.device}" if e else ""
        yield Tile("Time", words.duration(total), where, f"{total:,.2f} seconds")
    yield Tile(
        "Failures", words.whole(s.failures), "calls without a usable reply", f"{words.whole(s.messages)} messages"
    )


def _failures(run: Run) -> Section | None:
    """Which calls gave no usable reply, and why."""
    if not run.failures:
        return None
    groups: dict[tuple[str, str], list[str]] = {}
    for trouble in run.failures:
        groups.setdefault((trouble.reason, trouble.kind), []).append(trouble.party)
    rows = [
        cells(reason, kind, words.whole(len(who)), words.whole(len(set(who))))
        for (reason, kind), who in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    text = "A reply that is missing or not usable is dropped; the round goes on with the others."
    table = Table("Calls without a usable reply", ("Reason", "Call", "Calls", "Parties"), rows, words=2)
    return Section("Failures", text=[text], tables=[table])


def _pretrained(s: Summary) -> Iterable[str]:
    """Which model the server had from the start."""
    own = s.pretrained
    if own is not None:
        model = f"{own.model or 'one'}{f' (norm {own.norm})' if own.norm else ''}"
        source = f", from the file {own.file}" if own.file else ""
        yield f"The server's pretrained model is {model}{source}; its digest begins with {own.digest[:12]}."


def _repeat(run: Run) -> Section:
    s = run.summary
    known = {**run.environment, "public_sha256": s.public_sha256, "state_sha256": s.state_sha256}
    rows = [cells(key, str(value)) for key, value in known.items() if value is not None]
    rows += [cells("engine", remark) for remark in (s.engine.remarks if s.engine else ())]
    caption = "Where the run was made, and hashes of the public rows and of all parties' last states"
    text = "In this folder, with the same versions on a like machine, this command gives the same numbers"
    return Section(
        "Repeat it",
        text=[f"{text} and the same state_sha256." if s.state_sha256 else f"{text}.", *_pretrained(s)],
        command="fedloom run config.toml",
        details=[
            Details("Resolved config", run.config),
            Details("Environment and hashes", table=Table(caption, ("Name", "Value"), rows, words=2)),
        ],
    )
