"""A run under way: its rounds, what is measured between them, and the checkpoints it goes on from."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import CheckpointError, EngineError
from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.party import Note
from fedloom.engines import Engine, Lost
from fedloom.engines.memory import Spool
from fedloom.experiment import checkpoint, config
from fedloom.experiment.config import RunConfig
from fedloom.experiment.engine import account
from fedloom.experiment.evaluate import MEASURES, PartiesMissing
from fedloom.experiment.live import Live, Stopped
from fedloom.experiment.node_party import config_sha256
from fedloom.experiment.plan import RunPlan
from fedloom.experiment.record import Record, environment, write_json
from fedloom.experiment.summary import partition, summarise, traffic

MILESTONES = 20
"""How often a run is saved, if saving is quick."""
OFTEN = 60.0
"""Seconds after which it is saved between milestones."""
SPARING = 20
"""Saving takes at most one part in so many of the time, so that a kill costs at most so many times what a save does."""
AT_ONCE = 256
"""Parties whose saved states are in memory at once."""
LOSSES = 5
"""How often one round may lose a machine and begin again, until the run gives up."""


@dataclass(frozen=True)
class Status:
    """How far a run is.

    Attributes:
        round: rounds done, of `rounds`.
        iteration: the same in local steps of a client.
        measure: the accuracy that counts for the method: on the global test, or after fine-tuning on own rows.
        accuracy: its mean over clients at the last evaluation.
        failures: calls without a usable reply so far.
        milestone: whether this is one of some twenty evenly spaced rounds, at which the run is saved.
        where: engine, workers and device, in a few words.
    """

    run: RunConfig
    round: int
    rounds: int
    iteration: int
    measure: str
    accuracy: float
    failures: int
    milestone: bool
    where: str


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        summary: the content of `result.json`.
        metrics: rows of (round, iteration, stage, party, measure, value).
        folder: where its files are, if it wrote any.
    """

    summary: dict[str, Any]
    metrics: list[list[Any]]
    folder: Path | None

    @property
    def accuracy(self) -> float:
        """Mean over clients of the final accuracy on the global test set."""
        return float(self.summary["accuracy"]["mean"])


class Session:
    """A run under way: the plan, its record and its folder."""

    def __init__(self, plan: RunPlan, engine: Engine, folder: Path | None) -> None:
        self.plan = plan
        self.engine = engine
        self.folder = folder
        self.coordinator = plan.setting.server_name(plan)
        graph = None if plan.graph is None else dict(enumerate(plan.graph))
        self.fed = Federation(
            engine,
            seed=plan.run.seed,
            coordinator=self.coordinator,
            graph=graph,
            param_shapes=plan.param_shapes,
            colocated=plan.colocated,
        )
        self.record = Record()
        self.done = 0
        self.main = plan.setting.main_measure(plan)
        self.accuracy = float("nan")
        self.where = account(engine, plan.run.engine)
        self.live = Live(folder, plan, engine, self.fed, self.record, self.main, str(self.where))
        engine.changed = self.live.touch
        self._mark: tuple[Any, ...] = ()
        self._warned: set[tuple[str, int]] = set()
        self._saved, self._cost = perf_counter(), 0.0

    def begin(self, resume: bool) -> None:
        """Begin, or go on from where the folder's run was."""
        self._open(resume)
        if not self.engine.durable:
            self._mark = self._snapshot()

    def _open(self, resume: bool) -> None:
        """Begin a folder, or go on in one."""
        if self.folder is None:
            return
        mark = fingerprint(self.plan)
        found = None
        if resume:
            found, complaints = checkpoint.newest(self.folder / "checkpoints", mark)
            for complaint in complaints:
                logging.getLogger("fedloom").warning("%s; using the one before", complaint)
        if found:
            self.done, states, records = found
            self.record.load(records, self.fed)
            self._load(states)
            self._restore()
            self.engine.saved(self.done)
            last = [r[-1] for r in self.record.metrics if r[4] == f"{self.main} mean"]
            self.accuracy = last[-1] if last else self.accuracy
            return
        if resume:
            self._restore()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = config.toml(self.plan.run)
        checkpoint.write_atomically(self.folder / "config.toml", text.encode())
        write_json(self.folder / "environment.json", {**environment(), "engine": str(self.where)})
        neighbours = {} if self.plan.graph is None else {"neighbours": self.plan.graph}
        write_json(self.folder / "partition.json", {**partition(self.plan), **neighbours})

    def go(self, progress: Callable[[Status], None], stop: Callable[[], bool]) -> Result:
        """The rounds that are left, and the end."""
        plan = self.plan
        points = _evenly(plan.run.evaluate.points or 100, plan.rounds)
        milestones = _evenly(MILESTONES, plan.rounds)
        step = plan.cfg.iterations_per_round
        if self.done == 0:
            self._surely(lambda: self._evaluate(0, 0, "start"))
        for t in range(self.done, plan.rounds):
            self._surely(partial(self._round, t, step, look_at=t + 1 in points))
            self.done = t + 1
            if self.done == plan.rounds or self._worth_saving(self.done in milestones):
                self._save()
            self.live.show(self.done)
            progress(
                Status(
                    plan.run,
                    self.done,
                    plan.rounds,
                    self.done * step,
                    self.main,
                    self.accuracy,
                    len(self.fed.failures),
                    self.done in milestones,
                    str(self.where),
                )
            )
            if self.done < plan.rounds and stop():
                self._save()
                raise Stopped(self.done, self.folder)
        self.where = account(self.engine, plan.run.engine)
        summary = summarise(plan, self.fed, self.record, self.done, self._digests(), self.where)
        if self.folder is not None:
            self.record.write(self.folder, self.fed)
            write_json(self.folder / "result.json", summary)
        return Result(summary, self.record.metrics, self.folder)

    def _surely(self, work: Callable[[], None]) -> None:
        """Do one round's work, again from the last round's state if a machine was lost in it."""
        losses = 0
        while True:
            try:
                if losses:
                    states, ledger, metrics, mixing, failures, self.accuracy = self._mark
                    self._load(states)
                    self.fed.ledger.rollback(ledger)
                    del self.record.metrics[metrics:], self.record.mixing[mixing:], self.fed.failures[failures:]
                work()
                if not self.engine.durable:
                    self._mark = self._snapshot()
                return
            except Lost as error:
                losses += 1
                if losses == LOSSES:
                    raise EngineError(
                        f"round {self.done + 1} lost its machines {LOSSES} times ({error}): if it needs more memory "
                        "than they have, take fewer workers per machine; then go on with --resume"
                    ) from None
                logging.getLogger("fedloom").warning("%s; round %d begins again", error, self.done + 1)

    def _latest(self) -> dict[str, dict[str, Tree]]:
        """Every party's state after the last round."""
        return self._mark[0] if self._mark else self._states()

    def _digests(self) -> dict[str, str]:
        """What every party's state after the last round comes to, in the order of `_states`."""
        if self._mark:
            return {who: message.digest(state) for who, state in self._mark[0].items()}
        own = {self.coordinator: message.digest(self.plan.server.state())} if self.plan.server else {}
        return {**own, **{self.engine.name(i): found for i, found in sorted(self.engine.digests().items())}}

    def _snapshot(self) -> tuple[Any, ...]:
        """All that a round changes."""
        states: Mapping[str, Tree] = self._states()
        if self.plan.run.engine.memory_mb is not None:
            states = Spool(states)
        else:
            states = {who: message.map_tensors(torch.Tensor.clone, state) for who, state in states.items()}
        counts = len(self.record.metrics), len(self.record.mixing), len(self.fed.failures)
        return states, self.fed.ledger.mark(), *counts, self.accuracy

    def _round(self, t: int, step: int, look_at: bool) -> None:
        self.fed.round = t
        clock = perf_counter()
        stage = ""
        plan, clients = self.plan, self.plan.run.churn.present(self.plan.training, t)
        for stage in plan.method.round(self.fed, plan.server, clients, plan.cfg, t):
            self.record.spend(stage, perf_counter() - clock)
            if look_at:
                self._evaluate(t + 1, (t + 1) * step, stage)
            clock = perf_counter()
        self._note(t + 1, (t + 1) * step, stage, look_at)

    def _worth_saving(self, milestone: bool) -> bool:
        """Whether to save now."""
        since = perf_counter() - self._saved
        return (milestone or since > OFTEN) and since > SPARING * self._cost

    def _note(self, round: int, iteration: int, stage: str, look_at: bool) -> None:
        """What the parties noted in this round: the server's own, the mean over clients, and who mixed whose models."""
        if self.plan.server is not None:
            for name, value in self.plan.server.take_notes().items():
                if not isinstance(value, list):
                    self.record.measure(round, iteration, stage, name, value, self.coordinator)
        gathered: dict[str, list[float]] = {}
        for party, notes in self.engine.notes().items():
            for name, value in notes.items():
                if name.startswith(MEASURES) or (name == "mixing" and not _weighs(value, len(self.engine.ids))):
                    self._leave_out(name, party)
                elif not isinstance(value, list):
                    gathered.setdefault(name, []).append(value)
                    self._warn(name, value, party)
                elif name == "mixing" and look_at:
                    self.record.mix(round, self.engine.name(party), value)
        for name, values in gathered.items():
            self.record.measure(round, iteration, stage, name, float(np.mean(values)))

    def _leave_out(self, note: str, party: int) -> None:
        """Tell the user, once for each party, of a note that can't be taken."""
        if ("", party) not in self._warned:
            self._warned.add(("", party))
            why = "is not one weight for each party" if note == "mixing" else "has the name of a measure of the run"
            logging.getLogger("fedloom").warning(
                "round %d: what %s notes as %r %s, and is left out", self.done + 1, self.engine.name(party), note, why
            )

    def _warn(self, note: str, value: float, party: int) -> None:
        """Tell the user, once for each party, of a note that means something is wrong."""
        text = self.plan.cfg.warnings.get(note)
        if text and value > 0 and (note, party) not in self._warned:
            self._warned.add((note, party))
            name = self.engine.name(party)
            logging.getLogger("fedloom").warning("round %d, %s %s: %s", self.done + 1, name, note, text)

    def _evaluate(self, round: int, iteration: int, stage: str) -> None:
        clock = perf_counter()
        try:
            found = [*self.plan.setting.evaluate(self.plan, self.engine)]
        except PartiesMissing as error:
            if round in (0, self.plan.rounds):  # a result needs the last one, and a curve its beginning
                raise EngineError(
                    f"{error}, which the run's result needs after round {round}: when it is back, go on with --resume"
                ) from None
            logging.getLogger("fedloom").warning("round %d, %s: not evaluated: %s", round, stage, error)
            return
        for what, value, party in found:
            self.record.measure(round, iteration, stage, what, value, party)
            if what == f"{self.main} mean":
                self.accuracy = value
        for direction, count in traffic(self.fed).items():
            self.record.measure(round, iteration, stage, f"bytes {direction}", count)
        self.record.spend("evaluate", perf_counter() - clock)

    def _states(self) -> dict[str, dict[str, Tree]]:
        """The state of every party, or of those that the engine has it of; the server's first, then by number."""
        own = {self.coordinator: self.plan.server.state()} if self.plan.server else {}
        return {**own, **{self.engine.name(i): s for i, s in sorted(self.engine.states().items())}}

    def _load(self, states: Mapping[str, Any]) -> None:
        if states.keys() != self._states().keys():
            raise CheckpointError("the checkpoint holds other parties than this run has")
        if self.plan.server is not None:
            self.plan.server.load(states[self.coordinator])
        held = [i for i in self.engine.ids if self.engine.name(i) in states]
        for start in range(0, len(held), AT_ONCE):
            self.engine.load({i: states[self.engine.name(i)] for i in held[start : start + AT_ONCE]})

    def _restore(self) -> None:
        """Tell parties that keep their state to themselves where the run goes on."""
        if self.engine.remote:
            self.engine.restore(self.done)

    def _save(self) -> None:
        if self.folder is None:
            return
        clock = perf_counter()
        mark = fingerprint(self.plan)
        records = self.record.state(self.fed)
        checkpoint.save(self.folder / "checkpoints", self.done, mark, self._latest(), records)
        self.engine.saved(self.done)
        self.record.write(self.folder, self.fed)
        self._saved = perf_counter()
        self._cost = self._saved - clock
        self.record.spend("save", self._cost)


def _weighs(note: Note, parties: int) -> bool:
    """Whether a note is a vector over all parties."""
    return isinstance(note, list) and len(note) == parties


def _evenly(points: int, rounds: int) -> set[int]:
    """At most `points` evenly spaced numbers of rounds; the last is always one."""
    points = min(points, rounds)
    return {round(rounds * k / points) for k in range(1, points + 1)}


def fingerprint(plan: RunPlan) -> str:
    """What must be equal for one run to go on from another's checkpoint: all that can move a number."""
    held = f"{plan.method.name}\n{plan.data.digest}\n{plan.graph}\n{plan.pretrained}"
    return hashlib.sha256(f"{config_sha256(plan.run, plan.cfg)}\n{held}".encode()).hexdigest()
