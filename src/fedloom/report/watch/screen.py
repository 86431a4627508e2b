"""A run in progress, in a terminal."""

from collections.abc import Sequence
from datetime import datetime

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedloom.experiment.run.metrics import parse
from fedloom.experiment.run.view import View
from fedloom.report import formatting as fmt
from fedloom.report.watch.snapshot import Snapshot

COLORS = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "quiet": "red",
    "gone": "red",
    "failed": "red",
}
BAR, CURVE = 28, 5
"""Width of the progress bar in characters, and height of the chart in lines."""
RUNS, FAILED, LONGEST = 12, 3, 40
"""Maximum number of runs, of failures, and of characters of a name shown."""


def draw(snapshot: Snapshot, out: Console, height: int | None) -> RenderableType:
    """The whole view. Parties that do not fit into `height` lines are only counted."""
    view = snapshot.run
    above = [*_head(snapshot), *_runs(snapshot), *_accuracy(view, min(out.width - 8, 72))]
    below = [*_traffic(view), *_failures(view), _foot(snapshot)]
    room = None
    if height is not None:
        room = max(3, height - 3 - sum(len(out.render_lines(part)) for part in (*above, *below)))
    return Group(*above, *_parties(view, room), *below)


def line(snapshot: Snapshot) -> str:
    """The view in one line, for a log."""
    view = snapshot.run
    parts = [_clean(view.name), f"round {view.round}/{view.rounds}"]
    parts += [f"{_clean(view.metric)} {_shown(view.metric, view.accuracy)}"] * (
        view.accuracy is not None
    )
    parts += [f"{view.up}/{view.of} up", f"{_size(sum(view.bytes.values()))} sent"]
    parts += [f"{view.failures} failures"] * bool(view.failures)
    return "  ".join(parts)


def _head(snapshot: Snapshot) -> list[RenderableType]:
    view, color = snapshot.run, COLORS[snapshot.state]
    word = {"gone": "no update", "quiet": "no update"}.get(snapshot.state, snapshot.state)
    method = "" if view.method == view.name else f"{_clean(view.method)} "
    title = Text.assemble(
        (_clean(view.name), "bold"), f"  {method}on {_clean(view.dataset)}, seed {view.seed}  "
    )
    title.append(word, f"bold {color}")
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(view.rounds, 1), completed=view.round, width=BAR)
    grid.add_row(bar, f"round {view.round}/{view.rounds}", Text(_pace(snapshot), "dim"))
    news = [Text(_clean(snapshot.news, 400), color)] if snapshot.news else []
    return [title, *news, grid, Text()]


def _pace(snapshot: Snapshot) -> str:
    """Time per round and time left; the total time of a finished run."""
    view = snapshot.run
    if snapshot.state != "running":
        return (
            f"{_time(view.updated - view.started)} in all" if snapshot.state == "finished" else ""
        )
    if view.pace is None or view.ends is None:
        return "first round in progress"
    speed = (
        f"{_time(view.pace)} a round"
        if view.pace >= 1
        else f"{1 / max(view.pace, 1e-6):.0f} rounds a second"
    )
    return f"{speed}, {_time(max(0.0, view.ends - snapshot.now))} to go"


def _runs(snapshot: Snapshot) -> list[RenderableType]:
    if not snapshot.runs:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("run", "state", "round", _clean(snapshot.run.metric)):
        table.add_column(
            Text(name),
            justify="left" if name in ("run", "state") else "right",
            no_wrap=name == "run",
        )
    for run in snapshot.runs[-RUNS:]:
        called = Text(_clean(f"{run.name} seed {run.seed}"))
        table.add_row(
            called,
            Text(run.state, COLORS[run.state]),
            f"{run.round}/{run.rounds}",
            _shown(snapshot.run.metric, run.accuracy),
        )
    more = len(snapshot.runs) - RUNS
    return [*([Text(f"{more} earlier runs", "dim")] if more > 0 else []), table, Text()]


def _accuracy(view: View, width: int) -> list[RenderableType]:
    if view.accuracy is None:
        return []
    metric = parse(view.metric)
    what = "the most frequent class" if metric.share else "the mean"
    chance = (
        ""
        if view.chance is None
        else f"  (always predicting {what}: {_shown(view.metric, view.chance)})"
    )
    head = Text.assemble(
        f"{_clean(view.metric)} ", (_shown(view.metric, view.accuracy), "bold"), (chance, "dim")
    )
    if len(view.points) < 2 or width < 20:
        return [head, Text()]
    values = [value for _, value in view.points]
    if metric.share:
        low, high = np.floor(min(values) * 20) / 20, np.ceil(max(values) * 20) / 20
        high = max(high, low + 0.05)
    else:
        low, high = min(values), max(max(values), min(values) * 1.05 + 1e-9)
    rows = braille_curve(view.points, width, CURVE, (low, high), max(view.rounds, 1))
    form = ".0%" if metric.share else ".4g"
    marks = {0: f"{high:{form}}", CURVE - 1: f"{low:{form}}"}
    lines = [
        Text.assemble((f"{marks.get(i, ''):>5} ", "dim"), (row, "cyan"))
        for i, row in enumerate(rows)
    ]
    axis = Text(f"{'':6}round 0{view.rounds:>{width - 7}}", "dim")
    return [head, *lines, axis, Text()]


def braille_curve(
    points: Sequence[tuple[int, float]],
    width: int,
    height: int,
    span: tuple[float, float],
    rounds: int,
) -> list[str]:
    """A line through (round, value), drawn in braille characters of 2 by 4 dots.

    Args:
        points: at least one, in order of rounds.
        width, height: size in characters.
        span: values at the bottom and at the top.
        rounds: round at the right end; the left end is round 0.
    """
    dots = np.zeros((4 * height, 2 * width), dtype=bool)
    last = max(1, round(points[-1][0] / rounds * (2 * width - 1)) + 1)
    at = np.linspace(0, points[-1][0], last)
    values = np.interp(at, [round for round, _ in points], [value for _, value in points])
    rows = (
        ((values - span[0]) / (span[1] - span[0]) * (4 * height - 1))
        .round()
        .astype(int)
        .clip(0, 4 * height - 1)
    )
    for x, (before, row) in enumerate(zip([rows[0], *rows], rows, strict=False)):
        dots[min(before, row) : max(before, row) + 1, x] = True
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    signs = (dots[::-1].reshape(height, 4, width, 2).transpose(0, 2, 1, 3) * bits).sum((2, 3))
    return ["".join(chr(0x2800 + sign) for sign in row) for row in signs]


def _parties(view: View, room: int | None) -> list[RenderableType]:
    """A table of parties. If not all fit, those that are down come first."""
    members = view.parties
    if room is not None and len(members) > room:
        kept = sorted(range(len(members)), key=lambda i: members[i].up)[:room]
        members = [members[i] for i in sorted(kept)]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(f"party ({view.up} of {view.of} up)", no_wrap=True)
    for name in ("", _clean(parse(view.metric).noun), "sent", "received"):
        table.add_column(name, justify="right" if name else "left")
    for m in members:
        mark = Text("● up", "green") if m.up else Text("○ down", "bold red")
        table.add_row(
            Text(_clean(m.name)),
            mark,
            _shown(view.metric, m.accuracy),
            _size(m.sent),
            _size(m.received),
        )
    hidden = view.of - len(members)
    return [table, *([Text(f"and {hidden} more", "dim")] if hidden > 0 else [])]


def _traffic(view: View) -> list[RenderableType]:
    parts = [
        f"{_size(view.bytes[way])} {way}" for way in ("up", "down", "across") if view.bytes.get(way)
    ]
    return [Text(), Text(f"sent so far: {', '.join(parts) or 'nothing'}")]


def _failures(view: View) -> list[RenderableType]:
    if not view.failures:
        return []
    last = [
        Text(
            f"  round {m.round}, {_clean(m.party)}, {_clean(m.kind)}: {_clean(m.reason)}",
            "dim",
            no_wrap=True,
        )
        for m in view.recent_failures[: -FAILED - 1 : -1]
    ]
    return [Text(f"failed calls: {view.failures}; most recent:", "yellow"), *last]


def _foot(snapshot: Snapshot) -> RenderableType:
    view = snapshot.run
    started, updated = (
        datetime.fromtimestamp(at).strftime("%H:%M:%S") for at in (view.started, view.updated)
    )
    return Text(f"{_clean(view.engine)}; started {started}, updated {updated}", "dim")


def _shown(metric: str, value: float | None) -> str:
    return "" if value is None else fmt.metric(value, parse(metric).share, "")


def _size(count: float) -> str:
    return fmt.size(count, " ")


def _time(seconds: float) -> str:
    return fmt.duration(seconds, " ", tenths_below=9.95)


def _clean(text: str, longest: int = LONGEST) -> str:
    """The text without control characters, shortened."""
    return fmt.shortened(text, longest)
