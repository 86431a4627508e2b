"""Progress in a terminal, plain lines elsewhere, and a stop that saves first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fedloom.experiment.config import Experiment
    from fedloom.experiment.run import Status


class Progress:
    """One bar a run in a terminal; one line an evaluation in a log."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._console = console
        self._runs = experiment.runs()
        self._several = len({run.seed for run in self._runs}) > 1
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, status: Status) -> None:
        """Told after each round."""
        run = status.run
        name = (run.name or run.method) + (f" seed {run.seed}" if self._several else "")
        news = f"accuracy {status.accuracy:.1%}" if status.accuracy == status.accuracy else ""
        if status.failures:
            news += f"  {status.failures} failures"
        if not self._console.is_terminal:
            if status.evaluated:
                self._console.print(f"{name}  round {status.round}/{status.rounds}  {news}", soft_wrap=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=status.rounds, news="")
        self._bars.update(self._tasks[name], completed=status.round, news=news)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C (or SIGTERM) asks the run to save and stop; the second stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, ask) for s in signals]
    try:
        yield lambda: asked
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)
