"""From a run's folder to a tracker: what is new since the last time, as often as one likes.

`tracked-NAME.json` in the folder records what a tracker has; one process at a time writes it. Metrics are taken from
`metrics.csv`, which a run writes when it saves: so nothing is sent that a run, resumed after a kill, would do again, no
round is sent twice, and the runs of a pool's processes need not know of trackers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError, EngineError
from fedloom.core.paths import lock
from fedloom.experiment.metrics import GLOBAL, OWN
from fedloom.experiment.result import RunSummary
from fedloom.report.files import model, parsed, table, text
from fedloom.report.schema import MetricRow
from fedloom.report.track.trackers import TRACKERS, Plain, RunInfo, Tracker

PAUSE = 1.0
"""Seconds between two visits to folders that are followed."""


@dataclass
class UploadState:
    """What a tracker has of a run.

    Attributes:
        run: the run's name there.
        round: the last that was sent; -1 for none.
        finished: whether its result was.
    """

    run: str = ""
    round: int = -1
    finished: bool = False


class Sender:
    """Sends runs to one tracker, and keeps unfinished ones open.

    Args:
        name: of the tracker.
        wait: for another process that sends the same run to it; if not, that is an error.
    """

    def __init__(self, name: str, *, wait: bool) -> None:
        self.name = name
        self._wait = wait
        self._locks: dict[Path, int] = {}
        self._open: dict[Path, tuple[Tracker, UploadState]] = {}

    def send(self, folder: Path) -> int:
        """Send what is new in a run's folder; how many rounds that are.

        Raises:
            DataError: the folder is no run's, or damaged; or another process sends it.
            Exception: whatever the tracker raises.
        """
        self._lock(folder)
        tracker, state = self._open.get(folder, (None, None))
        state = state or sent_so_far(folder, self.name)
        result = None if state.finished else _result(folder)
        new = [] if state.finished else [(r, values) for r, values in rounds(folder) if r > state.round]
        if new or result is not None:
            if tracker is None:
                tracker = TRACKERS[self.name]()
                state.run = tracker.begin(info(folder), state.run, state.round)
                self._open[folder] = tracker, state
                self._record(folder, state)
            for number, values in new:
                tracker.measure(number, values)
                state.round = number
                self._record(folder, state)
            if result is not None:
                tracker.end(result)
                del self._open[folder]
                state.finished = True
                self._record(folder, state)
        if state.finished:
            os.close(self._locks.pop(folder))
        return len(new)

    def close(self) -> None:
        """Close unfinished runs, which may continue another day."""
        while self._open:
            _, (tracker, _) = self._open.popitem()
            tracker.end(None)
        self.release()

    def release(self) -> None:
        """Let other processes send the runs."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _lock(self, folder: Path) -> None:
        """From now on only this process sends the run to the tracker."""
        if folder in self._locks:
            return
        file = os.open(folder / f".{self.name}.lock", os.O_WRONLY | os.O_CREAT, 0o644)
        if not lock(file, wait=self._wait):
            os.close(file)
            raise DataError(f"{folder} is being sent to {self.name} by its run: wait for its end")
        self._locks[folder] = file

    def _record(self, folder: Path, state: UploadState) -> None:
        draft = folder / f".tracked-{self.name}.json.draft"
        draft.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / f"tracked-{self.name}.json")


def send(folder: Path, name: str) -> int:
    """Send all runs in a folder, once; how many rounds were new.

    Raises:
        DataError: there is no run in it, or a file is damaged.
        EngineError: the tracker is unavailable, or refuses.
    """
    found = runs(folder)
    if not found:
        raise DataError(f"{folder} holds no run: name the folder of a run, a comparison or a sweep")
    sender = Sender(name, wait=False)
    try:
        count = sum(sender.send(each) for each in found)
        sender.close()
    except DataError:
        raise
    except Exception as error:
        raise EngineError(f"{name} refuses {folder} ({reason(error)}): mend the cause, and send again") from None
    finally:
        sender.release()
    return count


def follow(folder: Path, names: Sequence[str], over: Callable[[], bool]) -> None:
    """Send what is new in a folder until it is over, then the rest. A tracker that fails is warned of once, and gets no
    more."""
    senders = [Sender(name, wait=True) for name in names]
    seen: dict[Path, tuple[int, ...]] = {}
    last = False
    while senders and not last:
        last = over()
        changed = [each for each in runs(folder) if seen.get(each) != _times(each)]
        seen |= {each: _times(each) for each in changed}
        for sender in [*senders]:
            try:
                for each in changed:
                    sender.send(each)
                if last:
                    sender.close()
            except Exception as error:
                senders.remove(sender)
                sender.release()
                logging.getLogger("fedloom").warning(
                    "%s gets no more metrics (%s). The run continues; send the rest with: fedloom track %s --to %s",
                    *(sender.name, reason(error), folder, sender.name),
                )
        if not last:
            time.sleep(PAUSE)


def runs(folder: Path) -> list[Path]:
    """The folders of runs in a folder: itself, those of a comparison, those of a sweep."""
    return sorted(file.parent for pattern in ("", "*/", "*/*/") for file in folder.glob(f"{pattern}config.toml"))


def _times(folder: Path) -> tuple[int, ...]:
    """When the files were written that say what is new."""
    files = [folder / name for name in ("metrics.csv", "result.json")]
    return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)


def info(folder: Path) -> RunInfo:
    """What a tracker records of a run at its beginning.

    Raises:
        DataError: its config is damaged.
    """
    try:
        config = text(folder / "config.toml")
        values = tomllib.loads(config)
        started = datetime.fromisoformat(parsed(folder / "environment.json")["started"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no run's folder, or damaged ({reason(error)})") from None
    name = f"{values.get('name') or values.get('method')} seed {values.get('seed')} ({folder.resolve().name})"
    return RunInfo(name, folder, dict(_settings(values)), config, int(1000 * started.timestamp()))


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Settings by dotted key; lists as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str | int | float | bool) else json.dumps(value, default=str)


def rounds(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What was measured of the whole federation, and at its home, after each round that is saved.

    The name of a metric after an earlier stage of a round has the stage before it: `local/accuracy mean`.

    Raises:
        DataError: the table is damaged.
    """
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in table(folder / "metrics.csv", MetricRow) if (folder / "metrics.csv").is_file() else ():
        if not row.party.rpartition("-")[2].isdigit():  # one of many
            found.setdefault(row.round, {}).setdefault(row.stage, {})[row.measure] = row.value
    return [
        (
            number,
            {
                metric if stage == [*stages][-1] else f"{stage}/{metric}": value
                for stage, values in stages.items()
                for metric, value in values.items()
            },
        )
        for number, stages in sorted(found.items())
    ]


def _result(folder: Path) -> dict[str, float] | None:
    """The final numbers of a finished run."""
    if not (folder / "result.json").is_file():
        return None
    s = model(folder / "result.json", RunSummary)
    means = {name: s.accuracies[name].mean for name in (GLOBAL, OWN, *s.accuracies) if name in s.accuracies}
    sent = {f"bytes {eval_mode}": float(count) for eval_mode, count in s.bytes}
    rest = {"seconds": s.seconds["total"], "failures": s.failures, "chance": s.chance}
    return {**means, **s.scores, **sent, **{name: value for name, value in rest.items() if value is not None}}


def sent_so_far(folder: Path, name: str) -> UploadState:
    """What a tracker has of a run.

    Raises:
        DataError: the file that says so is damaged.
    """
    file = folder / f"tracked-{name}.json"
    try:
        return UploadState(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return UploadState()
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is damaged ({reason(error)}): remove it, and the run is sent anew") from None


def reason(error: BaseException) -> str:
    """The beginning of an error's message, without the name and password of a URL."""
    message = re.sub(r"://[^/\s]*@", "://", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
