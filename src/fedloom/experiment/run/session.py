"""A run in progress: its rounds, the metrics between them, and its checkpoints.

`execute` makes a `Session` of a plan, an engine and a folder, calls `begin` and then `go`:

    begin   a new folder, or the newest checkpoint
    go      round 0: metrics before training, of the stage "start"
            each round: the method's stages, metrics after each if the round is evaluated, notes of
            parties, and from time to time a checkpoint
            the end: warnings, `result.json`, and the end of the engine

A step of a client is an iteration, and `step` of them are a round: metrics are drawn over
iterations, so that methods with other rounds are comparable. A round that loses a machine is
repeated from a copy of all states, the snapshot, and a run that was stopped continues from its
checkpoint; both give the bits of a run without.
"""

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
from fedloom.core.errors import (
    CheckpointError,
    EngineError,
    MessageError,
    MethodError,
    TrainingDiverged,
)
from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.objects import described
from fedloom.engines import Engine, Lost
from fedloom.experiment.config import run as config
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.demand import evaluated, evenly
from fedloom.experiment.plan.node_party import config_sha256
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.engine import account
from fedloom.experiment.run.evaluate import RESERVED, PartiesMissing
from fedloom.experiment.run.evaluation import evaluation_of
from fedloom.experiment.run.live import Live, Stopped
from fedloom.experiment.run.mistakes import check_replies, warnings
from fedloom.experiment.run.privacy import CONTRIBUTIONS, privacy_notes
from fedloom.experiment.run.record import Record, environment, refuse_extension, write_json
from fedloom.experiment.run.result import RunSummary
from fedloom.experiment.run.summary import partition, summarize, traffic
from fedloom.experiment.run.trained import TrainedModels
from fedloom.support.paths import write_atomically

_log = logging.getLogger("fedloom")
MILESTONES = 20
"""Number of evenly spaced checkpoints, if saving is quick."""
SAVE_INTERVAL = 60.0
"""Seconds after which a run is also saved between these."""
SAVE_RATIO = 20
"""Minimum ratio of the time between two saves to the time of one."""
LOAD_CHUNK = 256
"""Number of states read from a checkpoint at a time."""
MAX_LOST = 5
"""Number of losses of machines in one round after which the run fails."""


@dataclass(frozen=True)
class Status:
    """Progress of a run after a round.

    Attributes:
        round: completed rounds, of `rounds`.
        iteration: completed local steps of a client.
        metric: the method's main metric: accuracy on the global test set, or in an evaluation mode
            on own rows.
        accuracy: its mean over clients at the last evaluation.
        failures: calls without a usable reply so far.
        milestone: whether this is one of about twenty evenly spaced rounds.
        where: engine, workers and device, as text.
    """

    run: RunConfig
    round: int
    rounds: int
    iteration: int
    metric: str
    accuracy: float
    failures: int
    milestone: bool
    where: str


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: the content of `result.json`.
        metrics: rows of (round, iteration, stage, party, metric, value).
        folder: the run folder; None if nothing was written.
        trained: the trained networks, if they were kept.
    """

    summary: dict[str, Any]
    metrics: list[list[Any]]
    folder: Path | None
    trained: TrainedModels | None = None

    @property
    def accuracy(self) -> float:
        """Mean over clients of the final accuracy on the global test set, or of the error of a
        number to predict.
        """
        return float(RunSummary(**self.summary).overall.mean)


class Session:
    """A run in progress: its plan, engine, record and folder."""

    def __init__(self, plan: RunPlan, engine: Engine, folder: Path | None) -> None:
        self.plan = plan
        self.engine = engine
        self.folder = folder
        self.coordinator = plan.planner.server_name(plan)
        graph = None if plan.graph is None else dict(enumerate(plan.graph))
        self.fed = Federation(
            engine,
            seed=plan.run.seed,
            coordinator=self.coordinator,
            graph=graph,
            param_shapes=plan.param_shapes,
            colocated=plan.colocated,
            aggregator=plan.aggregator,
            means=plan.method.client.MEANS,
        )
        self.record = Record()
        self.done = 0
        self.evaluation = evaluation_of(plan)
        self.main = self.evaluation.main_metric(plan)
        self.accuracy = float("nan")
        self.where = account(engine, plan.run.engine)
        self.live = Live(folder, plan, engine, self.fed, self.record, self.main, str(self.where))
        engine.changed = self.live.touch
        self._snapshot: tuple[Any, ...] = ()
        self._warned: set[tuple[str, int]] = set()
        self._last_save, self._save_seconds = perf_counter(), 0.0

    def begin(self, resume: bool) -> None:
        """Start the run; with `resume`, continue from the newest checkpoint of its folder."""
        self._open(resume)
        if not self.engine.durable:
            self._snapshot = self._take_snapshot()

    def _open(self, resume: bool) -> None:
        """Create the folder, or load its newest checkpoint."""
        if self.folder is None:
            return
        saved = None
        if resume:
            refuse_extension(self.folder, self.plan.rounds)
            saved, problems = checkpoint.newest(self.folder / "checkpoints", fingerprint(self.plan))
            for problem in problems:
                _log.warning("%s; using the checkpoint before it", problem)
        if saved:
            self.done, states, records = saved
            self.record.load(records, self.fed)
            self._load(states)
            self._restore()
            self.engine.saved(self.done)
            last = [r[-1] for r in self.record.metrics if r[4] == self.main.mean]
            self.accuracy = last[-1] if last else self.accuracy
            return
        if resume:
            self._restore()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = config.toml(self.plan.run)
        write_atomically(self.folder / "config.toml", text.encode())
        write_json(self.folder / "environment.json", {**environment(), "engine": str(self.where)})
        if objects := self._objects(text):
            write_json(self.folder / "objects.json", objects)
        neighbours = {} if self.plan.graph is None else {"neighbours": self.plan.graph}
        owners = [self.engine.owner(i) for i in self.engine.ids]
        known = {"owners": owners} if any(owners) else {}
        write_json(self.folder / "partition.json", {**partition(self.plan), **neighbours, **known})

    def go(
        self,
        progress: Callable[[Status], None],
        stop: Callable[[], bool],
        keep_models: bool = False,
    ) -> RunResult:
        """Run the remaining rounds and return the result, with the trained networks if
        `keep_models`.
        """
        plan = self.plan
        points = evaluated(plan.run, plan.rounds)  # the numbers of done rounds to evaluate after
        milestones = evenly(MILESTONES, plan.rounds)  # rounds to save after, if saving is quick
        step = plan.cfg.iterations_per_round
        # Rows of metrics need a round, an iteration and a stage; a resumed run has these already.
        # `_recorded` repeats the work if a machine is lost; if it fails, failures.csv has the call.
        if self.done == 0:
            self._recorded(lambda: self._evaluate(0, 0, "start"))

        for t in range(self.done, plan.rounds):  # from 0; `done` counts from 1
            try:
                self._recorded(partial(self._round, t, step, evaluate=t + 1 in points))
            except (MethodError, ArithmeticError, RuntimeError, ValueError) as error:
                # An error in a page is shown as it is, but where a weight is not finite, that is
                # its cause. States of nodes are not looked at: they are not here.
                if isinstance(error, TrainingDiverged) or self.engine.remote or self._finite():
                    raise
                raise TrainingDiverged(
                    "weights are not finite, as training diverged: lower the learning rate "
                    f"({error})"
                ) from error
            # the round counts only now that all of it is recorded
            self.done = t + 1
            # saved after the last round, and at milestones or after a minute if saving is quick
            if self.done == plan.rounds or self._should_save(self.done in milestones):
                self._save()
            self.live.show(self.done)  # writes live.json
            progress(
                Status(
                    plan.run,
                    self.done,
                    plan.rounds,
                    self.done * step,
                    # the main metric's name, and its mean over clients at the last evaluation
                    str(self.main),
                    self.accuracy,
                    len(self.fed.failures),  # calls without a usable reply
                    self.done in milestones,
                    str(self.where),  # engine, workers and device
                )
            )
            # a run that was asked to stop in its last round is finished, not stopped
            if self.done < plan.rounds and stop():
                self._save()
                raise Stopped(self.done, self.folder)

        # The end. Where it ran is asked again, as machines may have joined or left.
        self.where = account(self.engine, plan.run.engine)
        # The final states are passed as a function, which is called only if a warning needs them.
        mistakes = warnings(plan, self.fed, self._final_states)
        for text in mistakes:
            _log.warning("%s", text)
        # how well the attacks on this run's messages do, if asked for
        leaks = self.evaluation.leaks(plan, self.engine) if plan.run.evaluate.leaks else ()
        # the digests are hashes of every party's final state
        summary = summarize(
            plan, self.fed, self.record, self.done, self._digests(), self.where, mistakes, leaks
        )
        # result.json is last: a folder with it is that of a finished run
        if self.folder is not None:
            self.record.write(self.folder, self.fed)
            write_json(self.folder / "result.json", summary)
        # tells remote parties that the run has ended, with what the server sends last
        self.engine.finish({} if plan.server is None else plan.server.broadcast())
        trained = TrainedModels(plan, self._final_states()) if keep_models else None
        return RunResult(summary, self.record.metrics, self.folder, trained)

    def _recorded(self, work: Callable[[], None]) -> None:
        """Run one round. If it ends the run, `failures.csv` says which call failed."""
        try:
            self._with_recovery(work)
        except Exception:
            if self.folder is not None:
                self.record.write(self.folder, self.fed)
            raise

    def _finite(self) -> bool:
        """Whether all parties' states are finite."""
        try:
            message.check_finite(self._states())
        except MessageError:
            return False
        return True

    def _objects(self, text: str) -> dict[str, Any]:
        """The description of each object that the config names, with the parameter counts of
        networks.
        """
        found = described(text)
        for name, context in zip(self.plan.architectures, self.plan.contexts, strict=True):
            if name in found and "parameters" not in found[name] and context.network is not None:
                found[name]["parameters"] = sum(p.numel() for p in context.build().parameters())
        return found

    def _with_recovery(self, work: Callable[[], None]) -> None:
        """Run one round. If a machine is lost, restore the state before the round and repeat it."""
        losses = 0
        while True:
            try:
                if losses:
                    states, ledger, metrics, mixing, failures, self.accuracy = self._snapshot
                    self._load(states)
                    self.fed.ledger.rollback(ledger)
                    del (
                        self.record.metrics[metrics:],
                        self.record.mixing[mixing:],
                        self.fed.failures[failures:],
                    )
                work()
                if not self.engine.durable:
                    self._snapshot = self._take_snapshot()
                return
            except Lost as error:
                losses += 1
                if losses == MAX_LOST:
                    raise EngineError(
                        f"round {self.done + 1} lost its machines {MAX_LOST} times ({error}): if "
                        "memory ran out, use fewer workers per machine; then add --resume"
                    ) from None
                _log.warning("%s; repeating round %d", error, self.done + 1)

    def _final_states(self) -> Mapping[str, Tree]:
        """The state of each party after the last round, by name."""
        return self._snapshot[0] if self._snapshot else self._states()

    def _digests(self) -> dict[str, str]:
        """Digest of every party's state after the last round, in the order of `_states`."""
        if self._snapshot:
            return {party: message.digest(state) for party, state in self._snapshot[0].items()}
        own = (
            {self.coordinator: message.digest(self.plan.server.state())} if self.plan.server else {}
        )
        return {
            **own,
            **{self.engine.name(i): digest for i, digest in sorted(self.engine.digests().items())},
        }

    def _take_snapshot(self) -> tuple[Any, ...]:
        """A copy of everything that a round changes, to repeat it."""
        states = {
            party: message.map_tensors(torch.Tensor.clone, state)
            for party, state in self._states().items()
        }
        counts = len(self.record.metrics), len(self.record.mixing), len(self.fed.failures)
        return states, self.fed.ledger.mark(), *counts, self.accuracy

    def _round(self, t: int, step: int, evaluate: bool) -> None:
        self.fed.round, failures = t, len(self.fed.failures)
        clock = perf_counter()
        stage = ""
        plan, clients = self.plan, self.plan.run.churn.present(self.plan.training, t)
        for stage in plan.method.round(self.fed, plan.server, clients, plan.cfg, t):
            if not isinstance(stage, str):
                raise MethodError(
                    f"round {t} of {plan.method.name} yielded {stage!r}: yield the stage's name, "
                    "as in yield 'train'"
                )
            self.record.spend(stage, perf_counter() - clock)
            check_replies(plan, self.fed, failures)
            if evaluate:
                self._evaluate(t + 1, (t + 1) * step, stage)
            clock = perf_counter()
        check_replies(plan, self.fed, failures)
        # a round that ended early, as when trees lack an owner, or one after the last step
        if not stage and evaluate:
            stage = "round"
            self._evaluate(t + 1, (t + 1) * step, stage)
        self._record_notes(t + 1, (t + 1) * step, stage, evaluate)

    def _should_save(self, milestone: bool) -> bool:
        since = perf_counter() - self._last_save
        return (milestone or since > SAVE_INTERVAL) and since > SAVE_RATIO * self._save_seconds

    def _record_notes(self, round: int, iteration: int, stage: str, evaluate: bool) -> None:
        """Record the notes of this round: the server's, means over clients, each client's on
        privacy, and mixing weights.

        A note is a number that a party's page wrote under a name, or a list of numbers. Of lists
        only "mixing" is recorded: a client's weight for the model of each party.
        """
        # names of notes that are recorded for each party, not as a mean: a mean of privacy losses
        # says nothing about anybody
        privacy = privacy_notes(self.plan)
        # read in any case, which clears them for the next round
        if self.plan.server is not None:
            for name, value in self.plan.server.take_notes().items():
                if not isinstance(value, list) and name not in privacy:
                    self.record.add_metric(round, iteration, stage, name, value, self.coordinator)
        values_by_note: dict[str, list[float]] = {}
        for party, notes in self.engine.notes().items():
            for name, value in notes.items():
                # a page must not write over a metric of the run, nor give too few or many weights
                if name.startswith(RESERVED) or (
                    name == "mixing"
                    and not (isinstance(value, list) and len(value) == len(self.engine.ids))
                ):
                    self._warn_ignored(name, party)
                elif name in privacy and not isinstance(value, list):
                    self.record.add_metric(
                        round, iteration, stage, name, value, self.engine.name(party)
                    )
                elif not isinstance(value, list):
                    values_by_note.setdefault(name, []).append(value)
                    self._warn(name, value, party)
                # N numbers for each of N parties are too many to keep after every round
                elif name == "mixing" and evaluate:
                    self.record.mix(round, self.engine.name(party), value)
        # over the parties that wrote the note, without a party: a metric of the whole federation
        for name, values in values_by_note.items():
            self.record.add_metric(round, iteration, stage, name, float(np.mean(values)))
        # with noise on means, how many of this round's each party was part of: ε is counted by it
        if self.plan.run.aggregate.noise is not None:
            for party, means in sorted(self.fed.contributions.items()):
                self.record.add_metric(
                    round, iteration, stage, CONTRIBUTIONS, means, self.engine.name(party)
                )

    def _warn_ignored(self, note: str, party: int) -> None:
        """Warn once per party that a note is ignored."""
        if ("", party) not in self._warned:
            self._warned.add(("", party))
            why = (
                "it must have one weight per party"
                if note == "mixing"
                else "a metric of the run has this name"
            )
            _log.warning(
                "round %d: ignored note %r of %s: %s",
                self.done + 1,
                note,
                self.engine.name(party),
                why,
            )

    def _warn(self, note: str, value: float, party: int) -> None:
        """Show the method's warning for a positive note, once per party and note."""
        text = self.plan.cfg.warnings.get(note)
        if text and value > 0 and (note, party) not in self._warned:
            self._warned.add((note, party))
            _log.warning("round %d, %s %s: %s", self.done + 1, self.engine.name(party), note, text)

    def _evaluate(self, round: int, iteration: int, stage: str) -> None:
        clock = perf_counter()
        try:
            metrics = [*self.evaluation.evaluate(self.plan, self.engine, round == self.plan.rounds)]
        except PartiesMissing as error:
            if round in (0, self.plan.rounds):  # the result needs both
                raise EngineError(
                    f"{error}, but the result needs the metrics after round {round}: restart it, "
                    "then add --resume"
                ) from None
            _log.warning("round %d, %s: not evaluated: %s", round, stage, error)
            return
        for metric, value, party in metrics:
            self.record.add_metric(round, iteration, stage, metric, value, party)
            if metric == self.main.mean:
                self.accuracy = value
        for direction, count in traffic(self.fed).items():
            self.record.add_metric(round, iteration, stage, f"bytes {direction}", count)
        self.record.spend("evaluate", perf_counter() - clock)

    def _states(self) -> dict[str, dict[str, Tree]]:
        """States by party name, the server's first, then by number; without parties that keep their
        own state.
        """
        own = {self.coordinator: self.plan.server.state()} if self.plan.server else {}
        return {**own, **{self.engine.name(i): s for i, s in sorted(self.engine.states().items())}}

    def _load(self, states: Mapping[str, Any]) -> None:
        if states.keys() != self._states().keys():
            raise CheckpointError(
                "the parties in the checkpoint are not those of this run: choose another --out"
            )
        if self.plan.server is not None:
            self.plan.server.load(states[self.coordinator])
        ids = [i for i in self.engine.ids if self.engine.name(i) in states]
        for start in range(0, len(ids), LOAD_CHUNK):
            self.engine.load(
                {i: states[self.engine.name(i)] for i in ids[start : start + LOAD_CHUNK]}
            )

    def _restore(self) -> None:
        """Tell remote parties, which keep their own state, the round to continue after."""
        if self.engine.remote:
            self.engine.restore(self.done)

    def _save(self) -> None:
        if self.folder is None:
            return
        clock = perf_counter()
        states = self._snapshot[0] if self._snapshot else self._states()
        folder, records = self.folder / "checkpoints", self.record.state(self.fed)
        checkpoint.save(folder, self.done, fingerprint(self.plan), states, records)
        self.engine.saved(self.done)
        self.record.write(self.folder, self.fed)
        self._last_save = perf_counter()
        self._save_seconds = self._last_save - clock
        self.record.spend("save", self._save_seconds)


def fingerprint(plan: RunPlan) -> str:
    """SHA-256 of everything that affects results. A checkpoint is loaded only by a run with the
    same fingerprint.
    """
    inputs = f"{plan.method.name}\n{plan.data.digest}\n{plan.graph}\n{plan.pretrained}"
    return hashlib.sha256(f"{config_sha256(plan.run, plan.cfg)}\n{inputs}".encode()).hexdigest()
