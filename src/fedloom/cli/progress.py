"""Progress bars, and a stop that saves first."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedloom.cli.options import out
from fedloom.experiment.run.metrics import parse
from fedloom.report.formatting import estimate, metric

if TYPE_CHECKING:
    from fedloom.experiment.config.run import Experiment
    from fedloom.experiment.pool.pool import Ended, Standing
    from fedloom.experiment.run.execute import Status

LINES_OF_ONE = 4
"""Number of progress lines in a log of one run."""
LINES = 10
"""Maximum number of progress lines in a log of many runs."""


class RunProgress(Progress):
    """A bar for each run in a terminal; in a log, four lines for one run, or one line for each of
    several.
    """

    def __init__(self, experiment: "Experiment", console: Console, quiet: bool = False) -> None:
        texts = TextColumn("{task.description}"), TextColumn("{task.fields[news]}")
        bar = BarColumn(bar_width=28), MofNCompleteColumn()
        left = TimeRemainingColumn(elapsed_when_finished=True)
        super().__init__(
            texts[0],
            *bar,
            texts[1],
            left,
            console=console,
            disable=quiet or not console.is_terminal,
        )
        runs = experiment.runs()
        self._quiet, self._several = quiet, len({run.seed for run in runs}) > 1
        self._lines = LINES_OF_ONE if len(runs) == 1 else 1
        self._logged = 0
        self._runs: dict[str, TaskID] = {}

    def show(self, status: "Status") -> None:
        """Show the status of a run after a round."""
        run = status.run
        name = run.label + (f" seed {run.seed}" if self._several else "")
        value = metric(status.accuracy, parse(status.metric).share, "")
        news = f"{status.metric} {value}" if status.accuracy == status.accuracy else ""
        if status.failures:
            news += f"  {status.failures} failures"
        news += f"  ({status.where})"
        if not self.console.is_terminal:
            reached = self._lines * status.round // status.rounds
            if not self._quiet and reached > self._logged:
                self.console.print(
                    f"{name}  round {status.round}/{status.rounds}  {news}", soft_wrap=True
                )
            self._logged = 0 if status.round == status.rounds else reached
            return
        if name not in self._runs:
            self._runs[name] = self.add_task(name, total=status.rounds, news="")
        self.update(self._runs[name], completed=status.round, news=news)


class PoolProgress(Progress):
    """Progress of many runs: a bar in a terminal, about ten lines in a log; each failure once."""

    def __init__(self, console: Console) -> None:
        bar = (
            TextColumn("runs"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
        )
        super().__init__(*bar, console=console, disable=not console.is_terminal)
        self._runs = self.add_task("runs", total=None, news="")
        self._logged = 0

    def show(self, now: "Standing") -> None:
        """Show the progress after a change."""
        if now.ended is not None and now.ended.reason and now.ended.state in ("failed", "left"):
            title, reason = escape(now.ended.job.title), escape(now.ended.reason)
            self.console.print(f"[bold red]{now.ended.state}[/]  {title}: {reason}", soft_wrap=True)
        over = now.done + now.failed
        left = "" if now.left is None or over == now.of else f"{estimate(now.left)} left"
        if self.console.is_terminal:
            under_way = [
                f"{name} {share:.0%}" if share else name for name, share in now.running[:2]
            ]
            more = [f"and {len(now.running) - 2} more"] if len(now.running) > 2 else []
            news = "  ".join(filter(None, [left, ", ".join([*under_way, *more])]))
            self.update(self._runs, completed=over, total=now.of, news=escape(news))
        elif (
            now.ended is not None
            and now.ended.state != "kept"
            and LINES * over // now.of > self._logged
        ):
            self._logged = LINES * over // now.of
            failed = f", {now.failed} failed" if now.failed else ""
            self.console.print(f"{now.done}/{now.of} runs{failed}  {left}".rstrip(), soft_wrap=True)


def exit_after(ended: "Iterable[Ended]") -> None:
    """End a command with many runs: print the closing line, and exit with its status unless that is
    0.
    """
    line, status = closing(ended)
    if line:
        out.print(line)
    if status:
        raise typer.Exit(status)


def closing(ended: "Iterable[Ended]") -> tuple[str, int]:
    """The closing line and the exit status of a command with many runs.

    Returns:
        An empty line and status 0 if all runs are finished; status 1 if a run failed or is locked
        by another process; 130 if the command was stopped.
    """
    every = [*ended]
    if any(one.state == "stopped" or (one.state == "left" and not one.reason) for one in every):
        return "Stopped. Repeat the command to continue.", 130
    if any(one.state == "left" for one in every):
        return "Some runs are in progress in another process. Repeat the command for the rest.", 1
    return "", int(any(one.state == "failed" for one in every))


@contextlib.contextmanager
def stop_on_signal(
    after: str = "this round, and any pretraining in it",
) -> Iterator[Callable[[], bool]]:
    """Within the context, the first Ctrl-C (or SIGTERM) requests a stop `after` a step, and the
    second stops at once.

    Yields:
        Whether a stop has been requested.
    """
    requested = False

    def request_stop(number: int, frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        with contextlib.suppress(OSError):  # not print, which is not reentrant
            os.write(2, f"Stopping after {after}. Press Ctrl-C again to stop at once.\n".encode())

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, request_stop) for s in signals]
    try:
        yield lambda: requested
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
