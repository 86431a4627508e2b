"""Messages and wall time of a run."""

from collections.abc import Sequence

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.page import Figure, PageCell, PageSection, PageTable, cells
from fedloom.report.plots import Line
from fedloom.report.read import Run
from fedloom.report.schema import LedgerRow
from fedloom.report.styles import series_style

ACTIVE_PARTY = (
    "The first party is colocated with the active party. Messages between them are not counted, "
    "nor are messages of an evaluation."
)


def traffic(run: Run) -> PageSection:
    """All messages by kind, and wall time by phase."""
    kinds: dict[tuple[str, str, str], list[LedgerRow]] = {}
    for flow in run.ledger:
        kinds.setdefault((flow.sender, flow.receiver, flow.kind), []).append(flow)
    columns = ("From → to", "Message", "Content", "Messages", "Tensor data", "On the wire")
    caption = "All messages of the run by called method"
    tables = (
        [PageTable(caption, columns, [_kind(flows) for flows in kinds.values()], words=3)]
        if kinds
        else []
    )
    phases = {phase: seconds for phase, seconds in run.summary.seconds.items() if phase != "total"}
    if phases:
        tables.append(_times(phases))
    text = (
        "The ledger counts the messages of the method, not evaluations. Sizes on the wire include "
        "names and framing."
    )
    if not run.summary.scores:
        return PageSection("Traffic and time", text=[text], tables=tables)
    flows = _by_round(run)
    return PageSection(
        "Traffic and time",
        text=[text, ACTIVE_PARTY],
        tables=tables,
        figures=[flows] if flows else [],
    )


def _by_round(run: Run) -> Figure | None:
    rounds = run.summary.rounds
    kinds: dict[str, np.ndarray] = {}
    for flow in run.ledger:
        if flow.round < rounds:
            name = f"{flow.sender} → {flow.receiver}: {flow.kind}"
            kinds.setdefault(name, np.zeros(rounds))[flow.round] += flow.bytes
    sizes_of = {name: sizes for name, sizes in kinds.items() if sizes.any()}
    if not sizes_of:
        return None
    x = np.arange(1.0, rounds + 1)
    seen = [np.where(sizes > 0, sizes, np.nan) for sizes in sizes_of.values()]
    lines = [
        Line(name, x, sizes, series_style(number))
        for number, (name, sizes) in enumerate(zip(sizes_of, seen, strict=True))
    ]
    most = fmt.together(
        [f"{name} at most {fmt.size(sizes.max())}" for name, sizes in sizes_of.items()]
    )
    alt = f"Tensor data by round: {most}."
    svg, legend = plots.chart("flows", alt, lines, across="round", form_y=plots.volume)
    return Figure("Tensor data of each round", svg, legend)


def _kind(flows: Sequence[LedgerRow]) -> list[PageCell]:
    """One row for the messages of a kind; their content may change during the run."""
    contents = list(dict.fromkeys(flow.what for flow in flows))
    more = f", and {fmt.times(len(contents) - 1, 'other form')}" if len(contents) > 1 else ""
    count, size, wire = (
        sum(getattr(flow, key) for flow in flows) for key in ("count", "bytes", "wire_bytes")
    )
    return cells(
        f"{flows[0].sender} → {flows[0].receiver}",
        flows[0].kind,
        PageCell(contents[0] + more, title=" | ".join(contents[:20]) if more else ""),
        fmt.whole(count),
        PageCell(fmt.size(size), fmt.exact_bytes(size)),
        PageCell(fmt.size(wire), fmt.exact_bytes(wire)),
    )


def _times(phases: dict[str, float]) -> PageTable:
    total = sum(phases.values()) or 1.0
    rows = [
        cells(
            phase,
            fmt.duration(seconds),
            PageCell(fmt.percent(seconds / total), share=seconds / total),
        )
        for phase, seconds in phases.items()
    ]
    return PageTable("Wall time by phase", ("Phase", "Time", "Share"), rows)
