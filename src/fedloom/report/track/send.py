"""Incremental upload of a run's folder to a tracker.

`tracked-NAME.json` in the folder records the upload state; one process at a time writes it. Metrics
come from `metrics.csv`, which a run writes at checkpoints. Hence a round that a resumed run repeats
is not sent twice, and worker processes need not know about trackers.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError, EngineError
from fedloom.experiment.run.result import RunSummary
from fedloom.report.files import csv_rows, model, parsed, text
from fedloom.report.schema import MetricRow
from fedloom.report.track.trackers import TRACKERS, Plain, RunInfo, Tracker
from fedloom.support import toml
from fedloom.support.paths import lock, replace_text

PAUSE = 1.0
"""Seconds between two looks at a followed folder."""


@dataclass
class UploadState:
    """Progress of the upload of a run to a tracker.

    Attributes:
        run: the tracker's identifier of the run.
        round: the last round sent; -1 for none.
        finished: whether the final result has been sent.
    """

    run: str = ""
    round: int = -1
    finished: bool = False


class Sender:
    """Sends runs to one tracker and keeps unfinished runs open.

    Args:
        name: the tracker's name.
        wait: whether to wait for a run that another process is sending, or raise an error.
    """

    def __init__(self, name: str, *, wait: bool) -> None:
        self.name = name
        self._wait = wait
        self._locks: dict[Path, int] = {}
        self._open: dict[Path, tuple[Tracker, UploadState]] = {}

    def send(self, folder: Path) -> int:
        """Send the new rounds in a run's folder, and return their number.

        Raises:
            DataError: the folder holds no run or is damaged, or another process is sending it.
            Exception: any error of the tracker.
        """
        if folder not in self._locks:
            file = os.open(folder / f".{self.name}.lock", os.O_WRONLY | os.O_CREAT, 0o644)
            if not lock(file, wait=self._wait):
                os.close(file)
                raise DataError(
                    f"{folder} is being sent to {self.name} by another process. Wait until it ends."
                )
            self._locks[folder] = file
        tracker, state = self._open.get(folder, (None, None))
        state = state or sent_so_far(folder, self.name)
        result = None if state.finished else _result(folder)
        new = (
            []
            if state.finished
            else [(r, values) for r, values in rounds(folder) if r > state.round]
        )
        if new or result is not None:
            if tracker is None:
                tracker = TRACKERS[self.name]()
                state.run = tracker.begin(info(folder), state.run, state.round)
                self._open[folder] = tracker, state
                self._record(folder, state)
            for number, values in new:
                tracker.log_metrics(number, values)
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
        """Close unfinished runs, which may continue later, and release all locks."""
        while self._open:
            _, (tracker, _) = self._open.popitem()
            tracker.end(None)
        self.release()

    def release(self) -> None:
        """Release all locks, so that other processes can send the runs."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _record(self, folder: Path, state: UploadState) -> None:
        replace_text(
            folder / f"tracked-{self.name}.json", json.dumps(asdict(state), indent=2) + "\n"
        )


def send(folder: Path, name: str) -> int:
    """Send all runs in a folder once, and return the number of new rounds.

    Raises:
        DataError: the folder holds no run, or a file is damaged.
        EngineError: the tracker is unavailable or rejects the data.
    """
    folders = runs(folder)
    if not folders:
        raise DataError(
            f"{folder} holds no run. Name the folder of a run, a comparison or a sweep."
        )
    sender = Sender(name, wait=False)
    try:
        count = sum(sender.send(each) for each in folders)
        sender.close()
    except DataError:
        raise
    except Exception as error:
        raise EngineError(
            f"cannot send {folder} to {name} ({reason(error)}). Fix the cause and repeat."
        ) from None
    finally:
        sender.release()
    return count


def follow(folder: Path, names: Sequence[str], over: Callable[[], bool]) -> None:
    """Send new rounds of all runs in a folder until `over()`, then the rest; a tracker that fails
    is dropped.
    """
    senders = [Sender(name, wait=True) for name in names]
    seen: dict[Path, list[int]] = {}
    last = False
    while senders and not last:
        last = over()
        times = {each: [file.stat().st_mtime_ns for file in _files(each)] for each in runs(folder)}
        changed = [each for each in times if seen.get(each) != times[each]]
        seen = times
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
                    "%s failed (%s) and receives no more metrics. The run continues. Send the "
                    "rest with: fedloom track %s --to %s",
                    *(sender.name, reason(error), folder, sender.name),
                )
        if not last:
            time.sleep(PAUSE)


def runs(folder: Path) -> list[Path]:
    """The run folders in the folder of a run, a comparison or a sweep."""
    return sorted(
        file.parent
        for pattern in ("", "*/", "*/*/")
        for file in folder.glob(f"{pattern}config.toml")
    )


def _files(folder: Path) -> list[Path]:
    return [file for file in (folder / "metrics.csv", folder / "result.json") if file.is_file()]


def info(folder: Path) -> RunInfo:
    """The metadata of a run.

    Raises:
        DataError: the folder holds no run, or its config is damaged.
    """
    try:
        config = text(folder / "config.toml")
        values = toml.loads(config)
        started = datetime.fromisoformat(parsed(folder / "environment.json")["started"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} holds no run or is damaged ({reason(error)}). Name a run's folder."
        ) from None
    name = (
        f"{values.get('name') or values.get('method')} seed {values.get('seed')} "
        f"({folder.resolve().name})"
    )
    return RunInfo(name, folder, dict(_settings(values)), config, int(1000 * started.timestamp()))


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Settings by dotted key; lists as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield (
                prefix + key,
                value
                if isinstance(value, str | int | float | bool)
                else json.dumps(value, default=str),
            )


def rounds(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """The metrics of the whole federation and of its server or active party, after each saved
    round.

    Metrics of earlier stages of a round carry the stage as a prefix: `local/accuracy mean`.

    Raises:
        DataError: `metrics.csv` is damaged.
    """
    by_round: dict[int, dict[str, dict[str, float]]] = {}
    for row in (
        csv_rows(folder / "metrics.csv", MetricRow) if (folder / "metrics.csv").is_file() else ()
    ):
        if not row.party.rpartition("-")[2].isdigit():  # skip numbered clients
            by_round.setdefault(row.round, {}).setdefault(row.stage, {})[row.metric] = row.value
    return [
        (
            number,
            {
                metric if stage == [*stages][-1] else f"{stage}/{metric}": value
                for stage, values in stages.items()
                for metric, value in values.items()
            },
        )
        for number, stages in sorted(by_round.items())
    ]


def _result(folder: Path) -> dict[str, float] | None:
    """The final numbers of a run; None for an unfinished run."""
    if not (folder / "result.json").is_file():
        return None
    s = model(folder / "result.json", RunSummary)
    means = {
        str(one): s.accuracies[one].mean
        for one in (s.on_test, s.on_own, *s.accuracies)
        if one in s.accuracies
    }
    scores = {str(score): value for score, value in s.scores.items()}
    sent = {f"bytes {direction}": float(count) for direction, count in s.bytes}
    rest = {"seconds": s.seconds["total"], "failures": s.failures, "chance": s.chance}
    return {
        **means,
        **scores,
        **sent,
        **{name: value for name, value in rest.items() if value is not None},
    }


def sent_so_far(folder: Path, name: str) -> UploadState:
    """The upload state of a run, as `tracked-NAME.json` records it.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / f"tracked-{name}.json"
    try:
        return UploadState(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return UploadState()
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{file} is damaged ({reason(error)}). Remove it to send the run again."
        ) from None


def reason(error: BaseException) -> str:
    """The first line of an error's message, without the credentials of a URL."""
    message = re.sub(r"://[^/\s]*@", "://", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
