"""Writes `live.json`, the progress of a run, which `fedloom watch` reads.

The file is replaced atomically but not synced, as resuming does not need it. It contains no
tracebacks of parties.
"""

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import FedloomError, Interrupted
from fedloom.experiment.run.evaluation import evaluation_of
from fedloom.experiment.run.metrics import Metric
from fedloom.experiment.run.view import FILE, PartyStatus, RecentFailure, View, own_process
from fedloom.support.paths import replace_text

if TYPE_CHECKING:
    from fedloom.core.federation import Federation
    from fedloom.engines import Engine
    from fedloom.experiment.plan.run_plan import RunPlan
    from fedloom.experiment.run.record import Record

MIN_INTERVAL = 0.5
"""Minimum seconds between two writes."""
MAX_SHARE = 0.02
"""Maximum share of a run's time that writes may take."""
DELAY = 0.2
"""Seconds between a party's connecting or disconnecting and the write, which covers all changes
until then.
"""
POINTS, PARTIES, RECENT_FAILURES = 200, 1000, 8
"""Maximum numbers of points of the curve, of parties and of failures in the file."""
WINDOW = 20
"""Rounds over which the pace is averaged."""
WAITING = "while waiting for nodes"
"""Reason of a run that was stopped before its nodes had connected."""


class Stopped(Exception):
    """The run was stopped by request, after saving a checkpoint."""

    def __init__(self, round: int, folder: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round
        self.folder = folder


class Live:
    """Writes a run's `live.json`. A failed write is logged once and does not stop the run.

    Args:
        folder: the run folder; None writes nothing.
        plan, engine, fed, record: the parts of the run, read between rounds.
        metric: the main metric.
        where: engine, workers and device, as text.
    """

    def __init__(
        self,
        folder: Path | None,
        plan: "RunPlan",
        engine: "Engine",
        fed: "Federation",
        record: "Record",
        metric: Metric,
        where: str,
    ) -> None:
        self._folder, self._engine, self._fed, self._record = folder, engine, fed, record
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._view: View | None = None
        self._ids = {engine.name(i): i for i in engine.ids}
        self._owners = {engine.name(i): engine.owner(i) for i in engine.ids if engine.owner(i)}
        self._constants = _constants(plan, metric)
        self._main = metric
        self._about = {
            "metric": str(metric),
            "engine": where,
            "started": time(),
            "process": own_process(),
        }
        self._of_party = {str(one) for one in evaluation_of(plan).party_metrics(plan)}
        self._coordinator = () if plan.server is None else (fed.coordinator,)
        self._points: dict[int, float] = {}
        self._accuracies: dict[str, float] = {}
        self._read = 0
        self._clock: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._next = 0.0
        self._warned = False

    @contextlib.contextmanager
    def reporting(self, done: int) -> Iterator[None]:
        """Write the state `running` after `done` rounds; when the block ends, write how the run
        ended.
        """
        self.show(done)
        try:
            yield
        except BaseException as error:
            self._end(*_ending(error))
            raise
        self._end("finished")

    def show(self, done: int) -> None:
        """Write the progress after `done` rounds, at most every `MIN_INTERVAL` seconds."""
        if self._folder is None:
            return
        now = monotonic()
        self._clock.append((done, now))
        if now >= self._next:
            self._publish(self._current_view())
            took = monotonic() - now
            self._next = now + max(MIN_INTERVAL, took / MAX_SHARE)

    def touch(self) -> None:
        """Schedule a write after a party has connected or disconnected. Thread-safe; returns at
        once.
        """
        with self._lock:
            if self._view is None or self._view.state != "running" or self._timer is not None:
                return
            self._timer = threading.Timer(DELAY, self._rewrite)
            self._timer.daemon = True
            self._timer.start()

    def _rewrite(self) -> None:
        """Write the last view again, with the parties that are connected now."""
        with self._lock:
            self._timer, view = None, self._view
            if view is not None and view.state == "running":
                self._write(view)

    def _end(self, state: str, reason: str = "") -> None:
        if self._folder is not None:
            self._publish(
                self._current_view().model_copy(
                    update={"state": state, "reason": reason, "pace": None, "ends": None}
                )
            )

    def _publish(self, view: View) -> None:
        with self._lock:
            if self._timer is not None and view.state != "running":
                self._timer.cancel()
                self._timer = None
            self._view = view
            self._write(view)

    def _write(self, view: View) -> None:
        """Write the view with the parties that are connected now. The caller holds the lock."""
        assert self._folder is not None
        presence = self._engine.presence()
        parties = [
            m.model_copy(update={"up": presence.get(self._ids.get(m.name, -1), True)})
            for m in view.parties
        ]
        up = sum(m.up for m in parties)
        listed = sorted(sorted(range(len(parties)), key=lambda i: parties[i].up)[:PARTIES])
        shown = [
            m.model_copy(update={"name": self._owners.get(m.name, m.name)})
            for m in map(parties.__getitem__, listed)
        ]
        failures = [
            f.model_copy(update={"party": self._owners.get(f.party, f.party)})
            for f in view.recent_failures
        ]
        changes = {
            "parties": shown,
            "recent_failures": failures,
            "up": up,
            "of": len(parties),
            "updated": time(),
        }
        try:
            replace_text(self._folder / FILE, view.model_copy(update=changes).model_dump_json())
        except OSError as error:
            if not self._warned:
                logging.getLogger("fedloom").warning(
                    "cannot write %s, so fedloom watch shows no progress: %s", FILE, error
                )
            self._warned = True

    def _current_view(self) -> View:
        """The current view. Called only from the run's own thread."""
        for round, _, _, party, metric, value in self._record.metrics[self._read :]:
            if not math.isfinite(value):
                continue
            if party and metric in self._of_party:
                self._accuracies[party] = value
            elif metric == self._main.mean:
                self._points[round] = value
        self._read = len(self._record.metrics)
        (first, began), (done, now) = self._clock[0], self._clock[-1]
        pace = (now - began) / (done - first) if done > first else None
        left = self._constants["rounds"] - done
        return View(
            **self._constants,
            **self._about,
            round=done,
            updated=time(),
            pace=pace,
            ends=None if pace is None else time() + pace * left,
            accuracy=[*self._points.values()][-1] if self._points else None,
            points=thinned([*self._points.items()]),
            failures=len(self._fed.failures),
            recent_failures=[
                RecentFailure(round=t.round + 1, party=t.party, kind=t.kind, reason=t.reason)
                for t in self._fed.failures[-RECENT_FAILURES:]
            ],
            **self._traffic(),
        )

    def _traffic(self) -> dict[str, Any]:
        """Bytes sent so far, in total and by party."""
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        total, coordinator = 0, self._fed.coordinator
        for (sender, receiver), (_, size) in self._fed.ledger.pairs.items():
            sent[sender] = sent.get(sender, 0) + size
            received[receiver] = received.get(receiver, 0) + size
            total += size
        up, down = received.get(coordinator, 0), sent.get(coordinator, 0)
        parties = [
            PartyStatus(
                name=name,
                accuracy=self._accuracies.get(name),
                sent=sent.get(name, 0),
                received=received.get(name, 0),
            )
            for name in (*self._coordinator, *self._ids)
        ]
        return {"parties": parties, "bytes": {"up": up, "down": down, "across": total - up - down}}


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` evenly spaced points, and the last one."""
    step = -(-len(points) // POINTS)
    return [*points[:: step or 1], *(points[-1:] if step > 1 and (len(points) - 1) % step else ())]


def _constants(plan: "RunPlan", metric: Metric) -> dict[str, Any]:
    """The fields of a view that do not change during a run."""
    run, data = plan.run, plan.data
    chance = (
        plan.chance
        if not metric.own and not metric.mode and "test" in data.labels
        else plan.own_chance()
    )
    names = {"name": run.label, "method": plan.method.name, "dataset": data.name}
    return {**names, "seed": run.seed, "rounds": plan.rounds, "chance": chance}


def _ending(error: BaseException) -> tuple[str, str]:
    """The state of a run after an error, and a reason without private content."""
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "stopped", ""
    if isinstance(error, Interrupted):
        return "stopped", WAITING
    reason = (
        str(error).partition("\n")[0] if isinstance(error, FedloomError) else type(error).__name__
    )
    return "failed", reason[:300]
