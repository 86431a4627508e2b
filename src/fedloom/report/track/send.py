"""From a run's folder to a tracker: what is new since the last time, as often as one likes.

What a tracker was sent stands in the folder's `tracked-NAME.json`, which one process at a time writes. Measures are
taken from `metrics.csv`, which a run writes when it saves: so nothing is sent that a run, resumed after a kill, would
do again, and no round is sent twice.
"""

from __future__ import annotations

import csv
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
from fedloom.report.track.trackers import TRACKERS, Plain, Told, Tracker

PAUSE = 1.0
"""Seconds between two looks at folders that are followed."""
FINAL = ("accuracy", "own_accuracy")
"""Keys of `result.json` with a mean over clients."""


@dataclass
class Mark:
    """What a tracker has of a run.

    Attributes:
        run: what it is called there.
        round: the last that was sent; -1 for none.
        finished: whether its result was.
    """

    run: str = ""
    round: int = -1
    finished: bool = False


class Sender:
    """Sends runs to one tracker, and keeps those open that go on.

    Args:
        name: of the tracker.
        wait: for another process that sends the same run to it; if not, that is an error.
    """

    def __init__(self, name: str, *, wait: bool) -> None:
        self.name = name
        self._wait = wait
        self._open: dict[Path, tuple[Tracker, Mark]] = {}
        self._locks: dict[Path, int] = {}

    def send(self, folder: Path) -> int:
        """Send what is new in a run's folder; how many rounds that are.

        Raises:
            DataError: the folder is no run's, or damaged; or another process sends it.
            Exception: whatever the tracker raises.
        """
        self._lock(folder)
        mark = self._open[folder][1] if folder in self._open else known(folder, self.name)
        result = _result(folder)
        if mark.finished:
            self._unlock(folder)
            return 0
        if not (folder / "metrics.csv").is_file():
            return 0
        new = [(step, values) for step, values in rounds(folder) if step > mark.round]
        if not new and result is None:
            return 0
        tracker = self._tracker(folder, mark)
        for step, values in new:
            tracker.measure(step, values)
            mark.round = step
            _note(folder, self.name, mark)
        if result is not None:
            tracker.end(result)
            mark.finished = True
            del self._open[folder]
            _note(folder, self.name, mark)
            self._unlock(folder)
        return len(new)

    def close(self) -> None:
        """End what is open: those runs may go on another day."""
        while self._open:
            _, (tracker, _) = self._open.popitem()
            tracker.end(None)
        self.release()

    def release(self) -> None:
        """Let other processes send the runs."""
        for folder in [*self._locks]:
            self._unlock(folder)

    def _lock(self, folder: Path) -> None:
        """From now on only this process sends the run to the tracker."""
        if folder in self._locks:
            return
        file = os.open(folder / f".{self.name}.lock", os.O_WRONLY | os.O_CREAT, 0o644)
        if not lock(file, wait=self._wait):
            os.close(file)
            raise DataError(f"{folder} is being sent to {self.name} by its run: wait for its end")
        self._locks[folder] = file

    def _unlock(self, folder: Path) -> None:
        os.close(self._locks.pop(folder))

    def _tracker(self, folder: Path, mark: Mark) -> Tracker:
        if folder not in self._open:
            tracker = TRACKERS[self.name]()
            mark.run = tracker.begin(told(folder), mark.run, mark.round)
            _note(folder, self.name, mark)
            self._open[folder] = tracker, mark
        return self._open[folder][0]


def send(folder: Path, name: str) -> int:
    """Send all runs in a folder, once; how many rounds were new.

    Raises:
        DataError: there is no run in it, or a file is damaged.
        EngineError: the tracker can't be had, or refuses.
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
        raise EngineError(f"{name} can't be told of {folder} ({reason(error)}): mend it, and send again") from None
    finally:
        sender.release()
    return count


def follow(folder: Path, names: Sequence[str], over: Callable[[], bool]) -> None:
    """Send what is new in a folder until it is over, then the rest. A tracker that fails is left alone from then on,
    which is told once."""
    senders = [Sender(name, wait=True) for name in names]
    seen: dict[Path, tuple[int, ...]] = {}
    last = False
    while senders and not last:
        last = over()
        changed = [each for each in runs(folder) if seen.get(each) != _state(each)]
        seen |= {each: _state(each) for each in changed}
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
                    "%s can't be told any more (%s). The run goes on; send the rest with: fedloom track %s --to %s",
                    *(sender.name, reason(error), folder, sender.name),
                )
        if not last:
            time.sleep(PAUSE)


def runs(folder: Path) -> list[Path]:
    """The folders of runs in a folder: itself, those of a comparison, those of a sweep."""
    found = [file for pattern in ("", "*/", "*/*/") for file in folder.glob(f"{pattern}config.toml")]
    return sorted(file.parent for file in found)


def told(folder: Path) -> Told:
    """What there is to tell of a run at its beginning.

    Raises:
        DataError: its config is damaged.
    """
    try:
        config = (folder / "config.toml").read_text(encoding="utf-8")
        values = tomllib.loads(config)
        started = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["started"]
        began = int(1000 * datetime.fromisoformat(started).timestamp())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no run's folder, or damaged ({reason(error)})") from None
    name = f"{values.get('name') or values.get('method')} seed {values.get('seed')} ({folder.resolve().name})"
    return Told(name, folder, dict(_settings(values)), config, began)


def _settings(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Plain]]:
    """Settings by dotted key; lists as text."""
    for key, value in values.items():
        name = f"{at}{key}"
        if isinstance(value, Mapping):
            yield from _settings(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str | int | float | bool) else json.dumps(value, default=str)


def rounds(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """What was measured of the whole federation, and at its home, after each round.

    What was measured after an earlier stage of a round has the stage before its name: `local/accuracy mean`.

    Raises:
        DataError: the table is damaged.
    """
    found: dict[int, dict[str, dict[str, float]]] = {}
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if not row["party"].rpartition("-")[2].isdigit():  # one of many
                    stages = found.setdefault(int(row["round"]), {})
                    stages.setdefault(row["stage"], {})[row["measure"]] = float(row["value"])
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{folder / 'metrics.csv'} is damaged ({reason(error)}): repeat the run") from None
    return [(number, _joined(stages)) for number, stages in sorted(found.items())]


def _joined(stages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    last = [*stages][-1]
    return {
        what if stage == last else f"{stage}/{what}": value
        for stage, values in stages.items()
        for what, value in values.items()
    }


def _result(folder: Path) -> dict[str, float] | None:
    """The numbers that a finished run comes to."""
    file = folder / "result.json"
    if not file.is_file():
        return None
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        means = {key.replace("_", " "): result[key]["mean"] for key in FINAL if result.get(key)}
        ways = {f"own accuracy {way}": one["mean"] for way, one in result.get("ways", {}).items() if one}
        sent = {f"bytes {way}": float(count) for way, count in result["bytes"].items()}
        rest = {"seconds": result["seconds"]["total"], "failures": result["failures"], "chance": result["chance"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is damaged ({reason(error)}): repeat the run with --resume") from None
    return {**means, **ways, **result.get("scores", {}), **sent, **rest}


def known(folder: Path, name: str) -> Mark:
    """What a tracker has of a run.

    Raises:
        DataError: the file that says so is damaged.
    """
    file = folder / f"tracked-{name}.json"
    try:
        return Mark(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Mark()
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is damaged ({reason(error)}): remove it, and the run is sent anew") from None


def _note(folder: Path, name: str, mark: Mark) -> None:
    """Only for who has the lock."""
    draft = folder / f".tracked-{name}.json.draft"
    draft.write_text(json.dumps(asdict(mark), indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / f"tracked-{name}.json")


def _state(folder: Path) -> tuple[int, ...]:
    """Something that changes when there is news."""
    files = [folder / name for name in ("metrics.csv", "result.json")]
    return tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)


def reason(error: BaseException) -> str:
    """The beginning of what an error says, without the name and password of a URL."""
    text = re.sub(r"://[^/\s]*@", "://", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
