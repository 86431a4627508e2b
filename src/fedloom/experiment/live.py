"""What a run shows of itself while it goes on: `live.json` in its folder, which `fedloom watch` reads.

The file is replaced as a whole, so that a reader never sees half of it, and not synced: who resumes a run does not need
it. It holds what a person asks of a run under way, and no trace: why a party's code raised is its own affair.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import FedloomError, Interrupted
from fedloom.experiment.view import FILE, Member, RecentFailure, View, own_process

if TYPE_CHECKING:
    from fedloom.core.federation import Federation
    from fedloom.engines import Engine
    from fedloom.experiment.plan import RunPlan
    from fedloom.experiment.record import Record

PAUSE = 0.5
"""Least seconds between two writes for rounds."""
SHARE = 0.02
"""Most of a run's time that writing may take."""
SOON = 0.2
"""Seconds until a party that comes or goes is in the file; all that come or go within them are written at once."""
POINTS, MEMBERS, MISHAPS = 200, 1000, 8
"""Most points of the curve, parties and failures in the file."""
WINDOW = 20
"""Rounds whose mean says how long the next ones take."""
WAITING = "while nodes were waited for"
"""How the net says that it was stopped in the middle of a round."""


class Stopped(Exception):
    """The run was asked to stop, and has saved what `--resume` needs."""

    def __init__(self, round: int, folder: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.round = round
        self.folder = folder


class Live:
    """Writes a run's `live.json`. That it can't be written is told once, and disturbs no run.

    Args:
        folder: the run's; None writes nothing.
        plan, engine, fed, record: the run's own, read between rounds.
        measure: the accuracy that counts.
        where: engine, workers and device, in a few words.
    """

    def __init__(
        self,
        folder: Path | None,
        plan: RunPlan,
        engine: Engine,
        fed: Federation,
        record: Record,
        measure: str,
        where: str,
    ) -> None:
        self._folder, self._engine, self._fed, self._record = folder, engine, fed, record
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._view: View | None = None
        self._ids = {engine.name(i): i for i in engine.ids}
        self._always = _always(plan, measure)
        self._about = {"measure": measure, "engine": where, "started": time(), "process": own_process()}
        self._of_party = plan.setting.party_measures(plan)
        self._coordinator = () if plan.server is None else (fed.coordinator,)
        self._points: dict[int, float] = {}
        self._accuracies: dict[str, float] = {}
        self._read = 0
        self._clock: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._next = 0.0
        self._told = False

    @contextlib.contextmanager
    def until_the_end(self, done: int) -> Iterator[None]:
        """Show that the run goes on after so many rounds, and at the end of the block how it ended."""
        self.show(done)
        try:
            yield
        except BaseException as error:
            self._end(*_ending(error))
            raise
        self._end("finished")

    def show(self, done: int) -> None:
        """Show that so many rounds are done; at most every half second, and the last in any case."""
        if self._folder is None:
            return
        now = monotonic()
        self._clock.append((done, now))
        if now >= self._next:
            self._put(self._look())
            took = monotonic() - now
            self._next = now + max(PAUSE, took / SHARE)

    def touch(self) -> None:
        """Show soon that a party came or went. Any thread may call it; it does not wait."""
        with self._lock:
            if self._view is None or self._view.state != "running" or self._timer is not None:
                return
            self._timer = threading.Timer(SOON, self._again)
            self._timer.daemon = True
            self._timer.start()

    def _again(self) -> None:
        """What the last round left, with those parties up that are now."""
        with self._lock:
            self._timer, view = None, self._view
            if view is not None and view.state == "running":
                self._write(view)

    def _end(self, state: str, words: str = "") -> None:
        if self._folder is not None:
            self._put(self._look().model_copy(update={"state": state, "words": words, "pace": None, "ends": None}))

    def _put(self, view: View) -> None:
        with self._lock:
            if self._timer is not None and view.state != "running":
                self._timer.cancel()
                self._timer = None
            self._view = view
            self._write(view)

    def _write(self, view: View) -> None:
        """Write the view with who is up now. The lock is held."""
        assert self._folder is not None
        there = self._engine.presence()
        parties = [m.model_copy(update={"up": there.get(self._ids.get(m.name, -1), True)}) for m in view.parties]
        up = sum(m.up for m in parties)
        kept = sorted(sorted(range(len(parties)), key=lambda i: parties[i].up)[:MEMBERS])
        found = {"parties": [parties[i] for i in kept], "up": up, "of": len(parties), "updated": time()}
        draft = self._folder / f".{FILE}.draft"
        try:
            draft.write_text(view.model_copy(update=found).model_dump_json(), encoding="utf-8")
            os.replace(draft, self._folder / FILE)
        except OSError as error:
            if not self._told:
                logging.getLogger("fedloom").warning("%s can't be written, so watch has no news: %s", FILE, error)
            self._told = True

    def _look(self) -> View:
        """All that there is to see now. Only the run's own thread may look."""
        for round, _, _, party, what, value in self._record.metrics[self._read :]:
            if not math.isfinite(value):
                continue
            if party and what in self._of_party:
                self._accuracies[party] = value
            elif what == f"{self._about['measure']} mean":
                self._points[round] = value
        self._read = len(self._record.metrics)
        (first, began), (done, now) = self._clock[0], self._clock[-1]
        pace = (now - began) / (done - first) if done > first else None
        left = self._always["rounds"] - done
        return View(
            **self._always,
            **self._about,
            round=done,
            updated=time(),
            pace=pace,
            ends=None if pace is None else time() + pace * left,
            accuracy=[*self._points.values()][-1] if self._points else None,
            points=thinned([*self._points.items()]),
            failures=len(self._fed.failures),
            mishaps=[
                RecentFailure(round=t.round + 1, party=t.party, kind=t.kind, reason=t.reason)
                for t in self._fed.failures[-MISHAPS:]
            ],
            **self._traffic(),
        )

    def _traffic(self) -> dict[str, Any]:
        """What crossed so far, in all and by party."""
        sent: dict[str, int] = {}
        received: dict[str, int] = {}
        total, coordinator = 0, self._fed.coordinator
        for (sender, receiver), (_, size) in self._fed.ledger.pairs.items():
            sent[sender] = sent.get(sender, 0) + size
            received[receiver] = received.get(receiver, 0) + size
            total += size
        up, down = received.get(coordinator, 0), sent.get(coordinator, 0)
        parties = [
            Member(
                name=name, accuracy=self._accuracies.get(name), sent=sent.get(name, 0), received=received.get(name, 0)
            )
            for name in (*self._coordinator, *self._ids)
        ]
        return {"parties": parties, "bytes": {"up": up, "down": down, "across": total - up - down}}


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` evenly spaced ones, and the last."""
    step = -(-len(points) // POINTS)
    return [*points[:: step or 1], *(points[-1:] if step > 1 and (len(points) - 1) % step else ())]


def _always(plan: RunPlan, measure: str) -> dict[str, Any]:
    """What does not change during a run."""
    run, held = plan.run, plan.data
    chance = plan.chance if measure == "accuracy" and "test" in held.labels else plan.own_chance()
    about = {"name": run.name or run.method, "method": plan.method.name, "dataset": held.name, "seed": run.seed}
    return {**about, "rounds": plan.rounds, "chance": chance}


def _ending(error: BaseException) -> tuple[str, str]:
    """The state that an error leaves a run in, and what of it may be told."""
    if isinstance(error, Stopped | KeyboardInterrupt):
        return "stopped", ""
    if isinstance(error, Interrupted):
        return "stopped", WAITING
    words = str(error).partition("\n")[0] if isinstance(error, FedloomError) else type(error).__name__
    return "failed", words[:300]
