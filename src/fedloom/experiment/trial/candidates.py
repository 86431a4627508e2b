"""The candidates of a trial: which methods are feasible, and the training of one of them.

A candidate runs on the core alone: parties, an engine, rounds. Nothing is written. Candidates and
splits of one method and network differ in numbers, not in operations, so they train in lock-step:
see `fedloom.engines.lockstep`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch

from fedloom import methods, models
from fedloom.core import graphs
from fedloom.core.black_box import libraries_on_one_thread
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.core.ledger import Ledger
from fedloom.core.method import NEEDS, Method, MethodConfig
from fedloom.core.party import Party
from fedloom.core.task import Number, TaskKind
from fedloom.data.dataset import Dataset, Kind
from fedloom.engines import Engine
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep
from fedloom.experiment.config.run import DEFAULT_ITERATIONS
from fedloom.experiment.plan.assignment import rows_of, target_of, training_labels
from fedloom.experiment.plan.networks import assign_groups
from fedloom.experiment.plan.settings.horizontal import raw_columns
from fedloom.experiment.run.execute import one_thread
from fedloom.models.black_boxes import BLACK_BOXES, make
from fedloom.trees.plain_models import can_split, quick, with_few_bins

FEASIBLE: Final = {"one network", "same feature dim", "architecture groups", "raw rows"}
"""Needs that owners with labeled rows alone can meet."""
MANY: Final = 12
"""The most owners with whom methods of quadratic time are tried by default."""
OWN_KINDS: Final[Mapping[str, str]] = {
    "logistic": "linear", "ridge": "linear", "forest": "forest", "boosting": "boosting",
}  # fmt: skip
"""Black boxes that a method may mix with the joint model, by kind: see `MethodConfig.mixing`."""
QUICK: Final = ("forest", "boosting")
"""Black boxes that train the same model in less time: see `quick`."""
BATCHES: Final = 12
"""Batches in an epoch of an owner of median size, if they have 16 to 128 rows."""


JOINT, OWN = "joint model", "own model"
"""Evaluation modes of a party that mixes the model of all with one of its own rows."""


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        method: a registered method, or the name of a black box for training alone.
        model: a network's name; "" for a black box or trees.
        params: settings of the method that differ from its defaults.
        note: a remark for people, such as "own heads".
        rate: the learning rate of SGD; None for a method without one.
    """

    method: str
    model: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    rate: float | None = None

    @property
    def label(self) -> str:
        """Its name in reports: method and remark."""
        return f"{self.method} ({self.note})" if self.note else self.method

    @property
    def text(self) -> str:
        """The label with model and rate."""
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.label}{f', {self.model}' if self.model else ''}{rate}"


@contextmanager
def on_one_thread() -> Iterator[None]:
    """As `one_thread`, with the libraries of black boxes, which are loaded first: later only the
    thread that limits them here could, and candidates train in others.
    """
    import_module("sklearn.linear_model")
    with one_thread():
        yield


def obstacle(method: Method, owners: int, task: TaskKind = "classes") -> str:
    """Why a trial cannot run a method; "" if it can."""
    if method.setting == "vertical":
        return "needs owners with different columns of the same rows, not different rows"
    if task not in method.tasks:
        return (
            f"predicts classes only{f', as {method.only_classes}' if method.only_classes else ''}"
        )
    for need in method.needs:
        if need not in FEASIBLE:
            meaning = NEEDS[need][1]
            return f"needs {need}: {meaning[0].lower()}{meaning[1:].rstrip('.')}"
    return f"needs at least {method.min_clients} owners" if method.min_clients > owners else ""


def infeasible(owners: int, task: TaskKind = "classes") -> dict[str, str]:
    """The methods that a trial cannot run, with the reason."""
    found = {name: obstacle(method, owners, task) for name, method in methods.registry().items()}
    return {name: reason for name, reason in found.items() if reason}


def baseline() -> str:
    """The method that trains networks alone."""
    return next(name for name, method in methods.registry().items() if method.trial_alone)


def settings(candidate: Candidate) -> Any:
    """The config of a candidate that is a method."""
    return methods.named(candidate.method).configure(params=dict(candidate.params))


def default_methods(
    owners: int, kind: Kind, task: TaskKind = "classes"
) -> tuple[list[str], list[str]]:
    """The methods that a trial tries by default, in the order of their rank: on tables those of raw
    rows, which train in seconds. And those that are too slow with so many owners.
    """
    of_tables = kind == "table"
    ranked = [
        one
        for one in methods.registry().values()
        if one.trial_rank and ("raw rows" in one.needs) == of_tables
    ]
    ranked.sort(key=lambda one: one.trial_rank)
    slow = [one.name for one in ranked if one.quadratic and owners > MANY]
    return [
        one.name for one in ranked if one.name not in slow and not obstacle(one, owners, task)
    ], slow


def candidates(
    names: Sequence[str], networks: Sequence[str], rates: Sequence[float], rows: int
) -> list[Candidate]:
    """The candidates of methods, for each network and learning rate of SGD, for owners of so many
    rows.
    """
    found, batch_size = list[Candidate](), min(128, max(16, rows // BATCHES))
    for name in names:
        method = methods.named(name)
        raw = "raw rows" in method.needs
        settings_at = {
            rate: {
                key: value
                for key, value in method.config.in_trial(batch_size, rate).items()
                if key not in method.fixed
            }
            for rate in (None, *rates)
        }
        plain = settings_at.pop(None)
        if plain in settings_at.values():  # it does not train by SGD
            settings_at = {None: plain}
        found += [
            Candidate(name, network, {**params, **change}, note, rate)
            for note, change in {"": {}, **method.trial_variants}.items()
            for network in ("",) * raw or networks
            for rate, params in settings_at.items()
            if network != "linear" or (method.linear and not note)  # a linear model is all head
        ]
    return found


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a candidate predicts.

    Attributes:
        probabilities: by (rounds, evaluation mode), of each owner's rows (n_i, K), or numbers (n_i,
            1) in their unit; nan where training diverged.
        ledger: all messages; None for a black box.
    """

    probabilities: Mapping[tuple[int, str], list[np.ndarray]]
    ledger: Ledger | None


def train(
    candidate: Candidate,
    data: Dataset,
    fitted: Sequence[np.ndarray],
    judged: Sequence[Sequence[np.ndarray]],
    points: Sequence[int],
    seed: int,
    start: Callable[..., Engine],
    *,
    messages: bool = False,
) -> Iterator[Outputs]:
    """Train one candidate, and yield its outputs at each of `points`; those of a black box once.

    Args:
        candidate: the method, network and settings.
        data: the rows of all owners: standardized, or raw for a method that reads raw rows.
        fitted: training rows of each party.
        judged: for each party, the sets of rows to predict: its own; on pooled rows, those of all
            owners.
        points: numbers of rounds after which parties are evaluated.
        seed: of initial weights and batches.
        start: makes the engine of the parties, with the seed.
        messages: whether every party takes part, so that the ledger has all messages. Otherwise a
            method whose model is that of pooled rows is trained on all rows at once.
    """
    if candidate.method in BLACK_BOXES:
        found = [
            _black_box(candidate.method, data, *parts, seed)
            for parts in zip(fitted, judged, strict=True)
        ]
        yield Outputs({(0, ""): [part for parts in found for part in parts]}, None)
        return
    if not data.classes:
        data = data.with_target(np.concatenate(fitted))
    method = methods.named(candidate.method)
    cfg = method.configure(params=dict(candidate.params))
    if method.pooled and not messages and (pooled := cfg.on_pooled_rows()) is not None:
        if pooled[1]:
            data = _with_owner(data)
        yield _at_once(method, pooled[0], data, fitted, judged, seed, start)
        return
    parties, server, fed = _federation(method, cfg, candidate.model, data, fitted, seed, start)
    if "raw rows" in method.needs:
        points = (_rounds(cfg),)
    modes = ["", *(mode for mode in cfg.eval_modes if not mode.startswith("0 "))]
    pools = [
        [rows_of(data.x, data, part, "cpu", training_labels(data)) for part in sets]
        for sets in judged
    ]
    for t in range(max(points)):
        fed.round = t
        for _ in method.round(fed, server, tuple(range(len(parties))), cfg, t):
            pass
        if t + 1 in points:
            broadcast = server.broadcast() if server is not None else {}
            fed.engine.states()  # brings parties up to date that have answered as one
            results = {
                (t + 1, mode): [
                    part
                    for party, sets in zip(parties, pools, strict=True)
                    for part in _probabilities(party, sets, mode, broadcast)
                ]
                for mode in modes
            }
            yield Outputs(results, fed.ledger)


class CandidateTraining:
    """A candidate in training on one split: `train`, piece by piece, see `advance`.

    Attributes:
        candidate: what is trained.
    """

    def __init__(
        self,
        candidate: Candidate,
        data: Dataset,
        fitted: Sequence[np.ndarray],
        judged: Sequence[Sequence[np.ndarray]],
        points: Sequence[int],
        seed: int,
        *,
        messages: bool = False,
    ) -> None:
        self.candidate = candidate
        self._outputs = train(
            candidate, data, fitted, judged, points, seed, self._start, messages=messages
        )
        self._lane: Lane[Outputs] | None = None
        self._engine: LockstepEngine | None = None

    def _start(self, parties: Sequence[Party[object]], *, seed: int) -> Engine:
        assert self._lane is not None
        self._engine = LockstepEngine(parties, self._lane, seed=seed)
        return self._engine

    def advance(self, lane: Lane[Outputs]) -> Outputs:
        """Train up to the next point in this lane; the outputs there, nothing after the last."""
        self._lane = lane
        if self._engine is not None:
            self._engine.enter(lane)
        return next(self._outputs, Outputs({}, None))


def advance(trainings: Sequence[CandidateTraining], *, together: bool) -> list[Outputs]:
    """Train each up to its next point; the outputs there. With `together` all do in lock-step."""
    found: list[Outputs] = []
    for lot in [trainings] if together else [[one] for one in trainings]:
        for outcome in in_lockstep([one.advance for one in lot], everything=False):
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
    return found


def _rounds(cfg: Any) -> int:
    """The rounds of a method of raw rows, which has no learning rate and ends by itself."""
    found: int = -(-DEFAULT_ITERATIONS // cfg.iterations_per_round)
    return found


def _at_once(
    method: Method,
    cfg: Any,
    data: Dataset,
    fitted: Sequence[np.ndarray],
    judged: Sequence[Sequence[np.ndarray]],
    seed: int,
    start: Callable[..., Engine],
) -> Outputs:
    """Train on the rows of all parties at once, and predict as each party would.

    A method in which owners mix the model with one of their own gives two evaluation modes: `JOINT`
    and `OWN`.
    """
    pooled, server, fed = _federation(method, cfg, "", data, [np.concatenate(fitted)], seed, start)
    rounds = _rounds(cfg)
    if method.at_once is not None:
        method.at_once(fed, server, pooled[0], cfg, rounds)
    else:
        for t in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, (0,), cfg, t):
                pass
    parts = {JOINT: 0.0, OWN: 1.0} if cfg.mixes else {"": None}
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    # what a party computes from its own rows is kept by its context
    contexts = _contexts(data, fitted, seed)
    for mode, own in parts.items():
        setting = cfg if own is None else cfg.model_copy(update=cfg.mixing(weight=own))
        parties = [method.client(setting, context) for context in contexts]
        for party in parties:
            for name in party.EXPORT:
                setattr(party, name, getattr(pooled[0], name))
        found[rounds, mode] = [
            part
            for party, sets in zip(parties, judged, strict=True)
            for part in _probabilities(
                party,
                [rows_of(data.x, data, rows, "cpu", training_labels(data)) for rows in sets],
                "",
                {},
            )
        ]
    return Outputs(found, None)


def _with_owner(data: Dataset) -> Dataset:
    """The data set with the number of each row's owner as its last column, a category."""
    assert data.groups is not None
    x = np.column_stack([data.x.reshape(len(data.x), -1), data.groups]).astype(np.float32)
    columns, names = raw_columns(data), tuple(map(str, range(int(data.groups.max()) + 1)))
    return replace(
        data,
        x=x,
        columns=(*columns["columns"], "owner"),
        words=(*columns["words"], names),
        offset=None if data.offset is None else np.append(data.offset, 0.0),
        shift=np.zeros(x.shape[1], np.float32),
        scale=np.ones(x.shape[1], np.float32),
    )


def _contexts(data: Dataset, fitted: Sequence[np.ndarray], seed: int) -> list[ClientContext]:
    """The contexts of parties that read raw rows."""
    target = target_of(data)
    classes = len(data.classes) if target is None else target.width
    shared: dict[str, Any] = {
        "seed": seed,
        "parties": len(fitted),
        "classes": classes,
        "target": target,
        **raw_columns(data),
    }
    return [
        ClientContext(
            id=i,
            data=rows_of(data.x, data, rows, "cpu", training_labels(data)),
            neighbours=graphs.Others(len(fitted), i),
            **shared,
        )
        for i, rows in enumerate(fitted)
    ]


def _federation(
    method: Method,
    cfg: Any,
    model: str,
    data: Dataset,
    fitted: Sequence[np.ndarray],
    seed: int,
    start: Callable[..., Engine],
) -> tuple[list[Party[MethodConfig]], Party[MethodConfig] | None, Federation]:
    count, target = len(fitted), target_of(data)
    classes = len(data.classes) if target is None else target.width
    build = partial(models.build, model, data.input_shape, classes, seed=seed) if model else None
    columns = {} if model else raw_columns(data)
    server_context = ClientContext(
        id=0, seed=seed, parties=count, classes=classes, target=target, network=build, **columns
    )
    contexts = [
        replace(
            server_context,
            id=i,
            neighbours=graphs.Others(count, i),
            data=rows_of(data.x, data, rows, "cpu", training_labels(data)),
        )
        for i, rows in enumerate(fitted)
    ]
    if build is not None and "architecture groups" in method.needs:
        server_context, contexts = assign_groups(
            server_context, contexts, [build] * count, [model] * count
        )
    parties = [method.client(cfg, context) for context in contexts]
    server = method.server(cfg, server_context) if method.server else None
    shapes = {}
    if build is not None and "one network" in method.needs:
        shapes = {
            k: p.detach().to("meta") for k, p in build().named_parameters() if p.requires_grad
        }
    name = "coordinator" if server is None else server.ROLE or type(server).__name__.lower()
    fed = Federation(start(parties, seed=seed), seed=seed, coordinator=name, param_shapes=shapes)
    return parties, server, fed


def _probabilities(
    party: Party[object], sets: Sequence[Rows], mode: str, broadcast: Mapping[str, Any]
) -> Iterator[np.ndarray]:
    with party.scratch():
        party.prepare(eval_mode=mode, broadcast=broadcast)
        for rows in sets:
            task = party.context.task
            outputs = party.infer(rows.every) if len(rows) else torch.zeros(0, task.width)
            if isinstance(task, Number):
                yield task.in_unit(task.predicted(outputs).double().cpu().numpy())[:, None]
            else:
                yield torch.softmax(outputs, -1).double().cpu().numpy()


def _black_box(
    name: str, data: Dataset, fitted: np.ndarray, sets: Sequence[np.ndarray], seed: int
) -> list[np.ndarray]:
    """The predictions of a black box that is fitted to these rows, for each set of rows. Columns
    that it cannot use, as they are constant in the fitted rows, stay out of it, which saves time.
    """
    classes, flat = len(data.classes), data.x.reshape(len(data.x), -1)
    rows, y = flat[fitted], data.y[fitted]
    # nothing to learn, and some models refuse one class
    if classes and len(seen := np.unique(y)) == 1:
        return [np.tile(np.eye(classes)[seen[0]], (len(one), 1)) for one in sets]

    def made(shape: tuple[int, ...]) -> Any:
        return (
            quick(name)(seed, not classes)
            if name in QUICK
            else make(name, shape, classes, seed, not classes)
        )

    model, used = made(data.input_shape), np.ones(flat.shape[1], bool)
    if data.kind == "table":
        used = can_split(model, rows)
        model = model if used.all() else made((int(used.sum()),))
    if not used.any():
        shares = np.bincount(y, minlength=classes) / len(y) if classes else y.mean()[None]
        return [np.tile(shares, (len(one), 1)) for one in sets]
    model, found = (
        with_few_bins(model, len(rows)),
        [np.zeros((len(one), max(classes, 1))) for one in sets],
    )
    with libraries_on_one_thread():  # `make` may have loaded one
        model.fit(rows[:, used], y)
        for into, one in zip(found, sets, strict=True):
            if len(one) and classes:
                into[:, model.classes_] = model.predict_proba(flat[one][:, used])
            elif len(one):
                into[:, 0] = model.predict(flat[one][:, used])
    return found
