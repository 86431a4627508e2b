"""What a run sent, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.report import words
from fedloom.report.page import Cell, Section, Table, cells
from fedloom.report.read import Run
from fedloom.report.schema import Flow


def traffic(run: Run) -> Section:
    """All messages by kind, and wall time by phase."""
    kinds: dict[tuple[str, str, str], list[Flow]] = {}
    for flow in run.ledger:
        kinds.setdefault((flow.sender, flow.receiver, flow.kind), []).append(flow)
    columns = ("From → to", "Message", "What crosses", "Messages", "Tensor data", "On the wire")
    caption = "All messages of the run, by the method that they call or answer"
    tables = [Table(caption, columns, [_kind(flows) for flows in kinds.values()], words=3)] if kinds else []
    phases = {phase: seconds for phase, seconds in run.summary.seconds.items() if phase != "total"}
    if phases:
        tables.append(_times(phases))
    text = (
        "The ledger counts every message: nothing else crosses. "
        "On the wire, names and framing come on top of the tensor data."
    )
    return Section("Traffic and time", text=[text], tables=tables)


def _kind(flows: Sequence[Flow]) -> list[Cell]:
    """One row for the messages of a kind, whose content may change during the run."""
    contents = list(dict.fromkeys(flow.what for flow in flows))
    more = f", and {words.times(len(contents) - 1, 'other form')}" if len(contents) > 1 else ""
    count, size, wire = (sum(getattr(flow, key) for flow in flows) for key in ("count", "bytes", "wire_bytes"))
    return cells(
        f"{flows[0].sender} → {flows[0].receiver}",
        flows[0].kind,
        Cell(contents[0] + more, title=" | ".join(contents[:20]) if more else ""),
        words.whole(count),
        Cell(words.size(size), words.exactly(size)),
        Cell(words.size(wire), words.exactly(wire)),
    )


def _times(phases: dict[str, float]) -> Table:
    total = sum(phases.values()) or 1.0
    rows = [
        cells(phase, words.duration(seconds), Cell(words.percent(seconds / total), share=seconds / total))
        for phase, seconds in phases.items()
    ]
    return Table("Wall time by phase", ("Phase", "Time", "Share"), rows)
