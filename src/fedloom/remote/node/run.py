"""A run at a node: its party, its store, and the messages that peers may fetch."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from fedloom.core.errors import CheckpointError
from fedloom.core.evaluation import exact_scores, prepared_state
from fedloom.core.message import Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.experiment.plan.node_party import NodeParty
from fedloom.remote import rpc_errors
from fedloom.remote.node.budget import Budget
from fedloom.remote.node.config import NodeData
from fedloom.remote.node.limits import Demand, OwnerLimits
from fedloom.remote.node.looks import OWN
from fedloom.remote.node.masking import SumKeeper
from fedloom.remote.node.schedule import CallRecord
from fedloom.remote.node.store import Store, StoredState
from fedloom.remote.rpc_errors import CallRefused, superseded

_log = logging.getLogger("fedloom.node")
ABOUT: Final = ("method", "network", "classes", "shape")
"""The facts of a party that its model's file has."""
_KEY: Final = 256
"""Bytes that every reply left for peers counts in addition to its own."""


@dataclass(frozen=True)
class Scored:
    """The conditions under which a run's models are scored on this node's own rows.

    Attributes:
        data: the file and its limits.
        cohort: its people.
        budget: of looks.
        secret: for noise; None for exact scores.
        broadcasts: whether the method's server sends clients a model to be scored by.
    """

    data: NodeData
    cohort: str
    budget: Budget
    secret: int | None
    broadcasts: bool


@dataclass
class NodeRun:
    """A run that this node takes part in.

    Attributes:
        members: names of the other parties' nodes, by the party's number.
        last: the newest call and its reply.
        left: call number and bytes of replies that peers may fetch, by a secret key.
        left_bytes: size of all of them.
        heard: time of the coordinator's last heartbeat.
        scored: the conditions of scores of its own rows; None where there are none.
        sums: the run's secure sums.
        calls: the calls that were answered in each round.
        rounds: the run's number of rounds.
        mode: the evaluation mode of its main metric.
        limits: what a call lets out is counted there, and refused if there would be more than the
            node's owner allows; None for a public data set.
        asks: what the run asks from a number of done rounds on.
        outgoing: applies the site's limits to a reply.
        covered: the notes that may be sent of a party whose messages have a guarantee; empty for
            any other party.
        over: whether the run has ended here, such as for a newer start; calls still in the queue
            are refused.
    """

    run: str
    caller: str
    start: int
    members: Mapping[str, str]
    place: NodeParty
    store: Store
    last: StoredState
    notes: bool
    left: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    left_bytes: int = 0
    heard: float = field(default_factory=monotonic)
    scored: "Scored | None" = None
    sums: SumKeeper | None = None
    covered: frozenset[str] = frozenset()
    rounds: int = 0
    mode: str = ""
    limits: OwnerLimits | None = None
    asks: Callable[[int], Demand] = field(init=False)
    outgoing: Callable[[Tree], Tree] = lambda reply: reply
    calls: CallRecord = field(init=False)
    over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        brief = self.party.MEANS if self.party.cfg.sums_stand_alone else ()
        self.calls = CallRecord(self.store.folder, brief)

    @property
    def party(self) -> Party[MethodConfig]:
        """The node's party."""
        return self.place.party

    @property
    def summed(self) -> bool:
        """Whether sums, and no noise, hide messages about this node's own rows: whatever else
        leaves it may then not depend on them. With noise, failures depend on arguments alone.
        """
        return (
            self.place.counts is not None
            and self.party.context.aggregator.secure
            and not self.covered
        )

    def leave(self, call: int, data: bytes) -> str:
        """Keep a reply for peers, and return its key."""
        key = secrets.token_hex(16)
        self.left[key] = (call, data)
        self.left_bytes += len(data) + _KEY
        return key

    def left_by(self, call: int) -> dict[str, bytes]:
        """The replies that a call has left for peers, by key."""
        return {key: data for key, (by, data) in self.left.items() if by == call}

    def hold(self, first: int, end: int) -> None:
        """Drop replies left for peers, except the replies of calls `first` to `end - 1`."""
        kept = {key: left for key, left in self.left.items() if first <= left[0] < end}
        if kept.keys() != self.left.keys():
            self.store.drop_left({call for call, _ in kept.values()})
        self.left = kept
        self.left_bytes = sum(len(data) + _KEY for _, data in self.left.values())

    def write_model(self, broadcast: Mapping[str, Tree]) -> str:
        """Write the model that the run's main metric is of, and its exact scores, for the node's
        owner.

        Args:
            broadcast: what the party got for the last evaluation.

        Returns:
            A clause that says where it is, or why there is none.
        """
        if self.party.context.black_box is not None:
            return "its model is a black box, of which there is no file"
        names = [name for name in self.party.EXPORT if name in self.party.state_names]
        if not names:
            return f"there is no model to write: the page of {self.place.facts['method']} has none"
        how: dict[str, Any] = {"eval_mode": self.mode, "broadcast": dict(broadcast)}
        whose = "the shared model" if broadcast else "this node's model"
        model = f"{whose}, {self.mode}" if self.mode else whose
        try:
            state = prepared_state(self.party, names, **how)
        # of the page, or of what was sent
        except Exception as error:
            _log.warning("run %s: %s cannot be prepared: %s", self.run[:8], model, error)
            return f"{model} could not be prepared, so there is no file"
        facts = {name: self.place.facts[name] for name in ABOUT if name in self.place.facts}
        path = self.store.write_model(state, {**facts, "model": model, "rounds": self.rounds})
        if self.place.own:
            self.write_scores({"on": OWN, **how}, model)
        return f"{model}, as the run evaluates it, is in {path}"

    def write_scores(self, asked: Mapping[str, Any], model: str = "") -> None:
        """Write exact scores on this node's own test rows for its owner: of the model that the
        coordinator `asked` to be scored, by this name. A page may fail to predict; then a warning
        is logged.
        """
        how = {k: asked[k] for k in ("on", "eval_mode", "broadcast") if k in asked}
        name = model or str(how.get("eval_mode") or "as evaluated")
        try:
            self.store.write_scores(self.last.round, name, exact_scores(self.party, **how))
        # of the page, or a full disk: the owner's copy must not end the call
        except Exception as error:
            _log.warning("the scores of run %s were not written: %s", self.run[:8], error)

    def undo(self) -> None:
        """Restore the state on disk; if that fails, the run is over here until the next call loads
        it again.
        """
        try:
            before = self.store.read()
            if before is None:
                raise CheckpointError(f"{self.store.folder} no longer has a state")
            self.party.load(before.state)  # type: ignore[arg-type]
        except BaseException:
            self.over = True
            raise

    def gone(self) -> CallRefused:
        """The error for calls after the end of the run here: a newer start, or the run must be
        opened again.
        """
        facts = self.store.facts()
        if facts is not None and facts["start"] > self.start:
            return superseded()
        return CallRefused(rpc_errors.UNKNOWN, "this run was set aside here: open it again")


def light(entry: StoredState) -> StoredState:
    """An entry without the state, which the party holds."""
    return StoredState(entry.start, entry.call, entry.round, entry.reply)
