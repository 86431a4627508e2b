"""A node's service, independent of the transport: its runs, its party in each, and their state.

One thread does the work, in the order of the calls; everything else is answered at once, so that
two parties that wait for each other's messages never wait for each other's work. Changes are on
disk before the reply is sent, so a killed node loses nothing, and a repeated call gets the same
reply.

A transport gives `answer` each call, with the name in the caller's certificate. The states of a run
here, by its calls and by what else happens:

                         open (fresh)
    nothing here ------------------------------------> open <--+  do, sum, digest: what they change
         |                                             ^ | ^   |  is on disk before the reply leaves
         +-- open, resume (fresh) --> unplaced --------+ | +---+
                                           restore       | |
                lease over, node restarted, undo failed, | |  any call of the same start, which
                or closed                                v |  goes on after the last one
                                                       on disk

    from any of them:  open with a newer start   as from nothing, but the party's earlier states are
                                                 set aside; calls of the older start are superseded
                       stopped by the site       each call is refused
                       rows aligned again        nothing is here

`unplaced` has a new party, until the coordinator says to which round it returns: see the picture in
`fedloom.remote.node.store`. `_node_runs` has the open runs; `NodeRun.over` marks one of which no
call in the queue may run any more. A start is a number of the coordinator: it has a new, larger one
whenever its process begins, and a node follows the newest one only.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any, Final, TypeVar

import torch

from fedloom import methods
from fedloom.core import message
from fedloom.core.errors import FedloomError, MessageError, PrivacyBudgetSpent
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.config.section import validated
from fedloom.experiment.plan.build import resolve
from fedloom.experiment.plan.node_party import NodeParty, build_party, suspicious
from fedloom.experiment.plan.private import PrivateData
from fedloom.protect.accountant import Releases
from fedloom.protect.noise import SIMULATED
from fedloom.remote import payload, rpc_errors
from fedloom.remote.frames import MOST_WORDS, digest
from fedloom.remote.loop import aside
from fedloom.remote.node import config as policy
from fedloom.remote.node import privacy_ledger
from fedloom.remote.node.approval import Approvals
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.budget import Budget
from fedloom.remote.node.config import NodeConfig, NodeData
from fedloom.remote.node.limits import Demand, OwnerLimits, demand
from fedloom.remote.node.looks import split_seed
from fedloom.remote.node.masking import MASK, REQUEST, Participants, SumKeeper, SumRecord
from fedloom.remote.node.matching import Matcher, recall
from fedloom.remote.node.outgoing import OutgoingFilter
from fedloom.remote.node.peer_fetcher import PEER, PeerFetcher
from fedloom.remote.node.run import NodeRun, Scored, light
from fedloom.remote.node.store import UNPLACED, Store, StoredState, prune
from fedloom.remote.node.task_runner import work
from fedloom.remote.node.terms import own_budget, own_epsilon, sha256, summary, terms
from fedloom.remote.node.time_limit import TimeLimit
from fedloom.remote.rpc_errors import CallRefused, mismatch, refused, superseded
from fedloom.remote.secret import secret

LOOKS: Final = (*EVALUATIONS, "public_digest")
"""Methods of evaluation, which the experiment calls and no page defines."""
_OPEN: Final = {
    "protocol": int,
    "version": str,
    "run": str,
    "start": int,
    "party": int,
    "members": object,
    "config": object,
    "resume": bool,
    "answers": int,
}
_WHICH: Final = {"run": str, "start": int}
_CLOSE: Final = {**_WHICH, "finished": bool}
_DO: Final = {
    **_WHICH,
    "call": int,
    "round": int,
    "method": str,
    "tasks": object,
    "leave": bool,
    "expect": object,
    "kept": object,
    "floor": int,
    "deadline": float,
    "mask": object,
}
_log = logging.getLogger("fedloom.node")
T = TypeVar("T")


class NodeService:
    """Answers a node's calls.

    Args:
        config: the node's.
        worker: does the work, in order; None for a thread of its own.
        certified: whether nodes reach each other and live for a whole run. Over a transport where
            they do not, runs
            whose messages need that are refused: nothing would seal them.
    """

    def __init__(
        self, config: NodeConfig, worker: Executor | None = None, *, certified: bool = True
    ) -> None:
        self._certified = certified
        self.config, self.credentials = config, config.credentials
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="fedloom-work")
        self._clock: Callable[[], float] = monotonic
        self._sleep: Callable[[float], None] = sleep
        self._queued = 0
        self._planned: dict[str, tuple[str, ...]] = {}  # of the newest text that was shown
        self._limit: TimeLimit | None = None
        self._working: NodeRun | None = None
        self._said = ""  # the last refusal in the log, which a loop of calls would repeat
        self._node_runs: dict[str, NodeRun] = {}
        self._opening = asyncio.Lock()
        self._folder = config.state
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self.audit = AuditLog(self._folder / "audit.jsonl")
        self.approvals = Approvals(config, self.credentials, self.audit)
        self.peers = PeerFetcher(config, self.credentials, self.audit)
        self._pages = {methods.load(page).name: str(page) for page in config.pages}
        self._secret = secret(self._folder / "secret") if config.secret_noise else None
        self.budget, self._sums = Budget(self._folder, config.anchor), SumRecord(self._folder)
        self._prune()
        if config.anchor is None and any(data.rows is not None for data in config.data.values()):
            _log.warning(
                "no anchor is set: an older copy of %s would reset what was spent, unnoticed",
                self._folder,
            )
        if problem := self.budget.problem():
            _log.warning("%s; until then no run may spend anything", problem)
        self._matcher = Matcher(
            config,
            self._folder,
            self.audit,
            self.budget,
            read=lambda caller, text: self._read_config(caller, text)[0],
            approve=self._approve,
            work=self._work,
            room=self._make_room,
            void=self._void,
        )

    # -- the interface of transports ---------------------------------------------------------------

    def heard(self, caller: str, run: str) -> None:
        """Record the coordinator's heartbeat for a run, which says nothing about its other runs."""
        node_run = self._node_runs.get(run)
        if node_run is not None and node_run.caller == caller:
            node_run.heard = monotonic()
        self._matcher.heard(caller, run)

    async def answer(
        self, caller: str, kind: str, body: bytes, roles: Collection[str] = ()
    ) -> bytes:
        """The answer to a call.

        Args:
            caller: by its certificate.
            kind: match, open, restore, do, sum, digest, close, or peer for a call of another node.
            body: see `fedloom.remote.payload`.
            roles: in its certificate.

        Raises:
            CallRefused: with words for the caller. Details are in the node's log only.
        """
        answers = {
            "match": self._match,
            "open": self._open,
            "restore": self._restore,
            "do": self._do,
            "sum": self._sum,
            "digest": self._digest,
            "close": self._close,
            "peer": self._peer,
        }
        try:
            if kind not in answers:
                raise CallRefused(rpc_errors.MALFORMED, "unknown kind of call")
            if caller not in self.config.callers:
                raise refused("you are not among this node's callers")
            may = self.config.roles.get(caller, ())
            if self.config.roles and not ("submit" in may and "submit" in roles):
                raise refused(
                    "your certificate, or this node's owner, does not give you the role submit"
                )
            return await answers[kind](caller, body)
        except CallRefused as refusal:
            error = refusal.bare()
        except MessageError as invalid:
            error = CallRefused(rpc_errors.MALFORMED, "invalid message", str(invalid))
        except OSError as problem:
            _log.error("the state could not be written: %s", problem)
            error = CallRefused(rpc_errors.FAILED, "this node cannot write its state at present")
        except Exception:
            _log.exception("a call of %s failed", caller)
            error = CallRefused(
                rpc_errors.FAILED, "this node failed to answer; the reason is in its log"
            )
        try:
            raise self._log_refusal(caller, error)
        finally:
            del error  # or a cycle of it and this frame would keep the call's bytes

    async def close(self) -> None:
        """Start no more work, and end what is under way; it changes nothing."""
        if self._limit is not None:
            self._limit.expire()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # -- start, resume, end of a run ---------------------------------------------------------------

    async def _match(self, caller: str, body: bytes) -> bytes:
        request, rest = await asyncio.to_thread(payload.unpack, body)
        if not isinstance(request, dict) or not isinstance(request.get("run"), str):
            raise MessageError("a step of an alignment must name its run")
        self.approvals.check_stop(_check_run_id(request["run"]))
        return await self._matcher.answer(caller, request, rest)

    def _approve(self, caller: str, run: str, text: str, own: Sequence[str] = ()) -> None:
        """Check that the site has approved a run of this config, if it is about own rows; `own` as
        in `summary`.
        """
        found, method, rounds = self._read_config(caller, text)
        if self.config.data[found.data.name].rows is None:
            self.approvals.check(run, caller, "")
            return
        cfg = found.resolve()[1]
        self.approvals.check(
            run, caller, summary(self.config, caller, found, method, cfg, rounds, own)
        )

    def _check_record(self, caller: str, text: str) -> None:
        """Refuse secure sums of own rows in a folder that is older than its anchor: the record of
        answered sums is as old, and the difference of two sums would be the answer of one node.
        """
        run, *_ = self._read_config(caller, text)
        own = self.config.data[run.data.name].rows is not None
        if own and run.aggregate.secure and (problem := self.budget.problem()):
            raise refused(problem)

    async def _own_epsilon(self, caller: str, run: str, text: str, party: int) -> tuple[str, ...]:
        """What a run with noise spends at most, for its approval. The file is read once for each
        text.
        """
        found, _, rounds = self._read_config(caller, text)
        data = self.config.data[found.data.name]
        if data.rows is None or self.config.approve == "off" or not found.resolve()[1].promises:
            return ()
        at = data.rows.stat()
        which = sha256(f"{text} {party} {at.st_size} {at.st_mtime_ns}")
        if which not in self._planned:
            facts = {"caller": caller, "party": party, "config": text}
            self._planned = {
                which: await self._work(lambda: self._planned_epsilon(facts, run, rounds))
            }
        return self._planned[which]

    def _planned_epsilon(self, facts: Mapping[str, Any], run: str, rounds: int) -> tuple[str, ...]:
        """See `_own_epsilon`. That there is no party, such as for too few rows, is for the site
        alone: a coordinator whose run nobody has approved learns nothing of rows.
        """
        try:
            place = self._build_party(facts, Store(self._folder / f"run-{run}"))
        except CallRefused as refusal:
            return (f"This run cannot begin here: {refusal.words}.",)
        config, *_ = self._read_config(facts["caller"], facts["config"])
        asked = demand(config, place.party, rounds, scored=False).releases
        taken = own_budget(asked, self.config.data[config.data.name])
        return (*own_epsilon(place.party, rounds), *taken)

    def stop_runs(self) -> None:
        """End the runs that the site has stopped since: work under way is interrupted and undone.
        And write down what an auditor has confirmed.
        """
        self.approvals.confirm()
        for run, node_run in [*self._node_runs.items()]:
            by = self.approvals.stopped(run)
            if not by:
                continue
            if self._working is node_run and self._limit is not None:
                self._limit.expire()
            self.audit.write("stopped", node_run.caller, run=run, by=by)
            _log.warning("run %s is stopped by this site", run[:8])
            self._drop(node_run)

    def _void(self, run: str) -> None:
        """Discard a run's party, as its rows are aligned again."""
        if run in self._node_runs:
            self._drop(self._node_runs[run])
        (self._folder / f"run-{run}" / "run.json").unlink(missing_ok=True)

    def _drop(self, node_run: NodeRun) -> None:
        """Remove a run from memory; its next call loads it from disk."""
        node_run.over = True
        if self._node_runs.get(node_run.run) is node_run:
            del self._node_runs[node_run.run]

    async def _open(self, caller: str, body: bytes) -> bytes:
        request, _ = await asyncio.to_thread(payload.unpack, body, _OPEN)
        payload.check_versions(request["protocol"], request["version"])
        run = _check_run_id(request["run"])
        text = payload.joined(request["config"])
        self._check_sums(caller, text, request["members"])
        own = await self._own_epsilon(caller, run, text, request["party"])
        self._approve(caller, run, text, own)
        self._check_record(caller, text)
        async with self._opening:
            now = self._node_runs.get(run)
            if now is not None and now.caller != caller:
                raise refused("this run is another coordinator's")
            if now is not None and now.start > request["start"]:
                raise superseded()
            self._make_room(run)
            facts = {"caller": caller, **{k: request[k] for k in ("start", "party", "members")}}
            facts["config"] = payload.joined(request["config"])
            store = Store(self._folder / f"run-{run}")
            before = store.facts()
            if before is not None and before["caller"] != caller:
                raise refused("this run is another coordinator's")
            resumed, newest = False, -1 if before is None else before["start"]
            if (
                newest == request["start"]
                and (last := await asyncio.to_thread(store.read)) is not None
            ):
                # perhaps of a newer start that was interrupted
                resumed, newest = last.start == newest, last.start
            if newest > request["start"]:
                raise superseded()
            now = self._node_runs.get(run)  # it may have been dropped meanwhile
            if now is None or now.over or now.start != request["start"] or not resumed:
                now = await self._start_party(
                    run,
                    facts,
                    store,
                    fresh=not resumed,
                    resume=request["resume"],
                    answers=request["answers"],
                )
            self.audit.write(
                "opened", caller, run=run, party=request["party"], method=now.place.facts["method"]
            )
            _log.info("%s opened run %s: %s", caller, run[:8], now.place.facts["method"])
            head: dict[str, Tree] = {
                "resumed": resumed,
                "call": now.last.call,
                "evaluates": self._evaluates(now),
            }
            return payload.pack({**head, "facts": dict(now.place.facts)})

    def _evaluates(self, node_run: NodeRun) -> bool:
        """Whether the coordinator may evaluate a run's party."""
        return self.config.evaluate and (node_run.scored is None or node_run.scored.data.score)

    async def _start_party(
        self,
        run: str,
        facts: Mapping[str, Any],
        store: Store,
        *,
        fresh: bool,
        resume: bool = False,
        answers: int = 0,
    ) -> NodeRun:
        """Build the party of a run: from disk, or `fresh`. With `resume`, states of earlier starts
        are kept, and what the run asks is counted once the round is known that it resumes from.

        Args:
            run: its id.
            facts: caller, start, party, members and config, as `run.json` has them.
            store: of the run.
            fresh: whether this is a new start; otherwise it continues after its last call.
            resume: of a fresh one, whether `restore` may follow.
            answers: rows of the coordinator that the run asks about.

        Raises:
            CallRefused: the run asks more than the owner allows, such as so many `answers`; nothing
                has changed.
        """
        members = facts["members"]

        def start() -> NodeRun:
            """The run with its party, in the worker. Until `over` is set, nothing has changed."""
            place = self._build_party(facts, store)
            last = None if fresh else store.read()
            config, method, rounds = self._read_config(facts["caller"], facts["config"])
            scored = self._scored(facts, place)

            # What the owner allows, and what the run asks from a round on. Both concern own rows
            # alone: `scored` is None for a public data set.
            limits = None
            if scored is not None:
                cohort = self.config.cohort(scored.data)
                limits = OwnerLimits(self.budget, cohort, scored.data, place.party)

            def asks(done: int) -> Demand:
                whole = answers if done == 0 else 0  # as if asked for in the first one
                shown = place.own and self.config.evaluate and scored.data.score  # type: ignore[union-attr]
                return demand(config, place.party, rounds, scored=shown, answers=whole, done=done)

            # A run to be resumed is checked by `restore`, which knows how many rounds are done.
            if fresh and not resume and limits is not None:
                self._afford(run, limits, asks(0))

            # The state: new, and on disk before the facts, without which there is no run; or as
            # the last call of this start left it.
            if fresh:
                if run in self._node_runs:  # an older start, or one whose state is lost
                    self._node_runs[run].over = True
                store.set_aside(marks=resume)
                last = StoredState(
                    facts["start"], UNPLACED if resume else -1, -1, state=place.party.state()
                )
                store.write(last)
                store.begin(facts)
            elif last is None or last.start != facts["start"]:
                raise CallRefused(rpc_errors.UNKNOWN, "this run is not open here: open it first")
            else:
                place.party.load(last.state)  # type: ignore[arg-type]

            # what a run keeps in memory besides: calls, messages for peers, the owner's limits
            node_run = NodeRun(
                run,
                facts["caller"],
                facts["start"],
                members,
                place,
                store,
                light(last),
                self.config.notes,
            )
            if fresh:  # the record of answered calls survives: a repeated round asks the same
                node_run.calls.back(0)
            if not fresh:  # a fresh one has no messages: `set_aside` has deleted them
                node_run.left = store.left()
            node_run.rounds, node_run.mode = rounds, method.main_mode(place.party.cfg)
            node_run.outgoing = OutgoingFilter(self.config.outgoing, store.folder)
            node_run.scored, node_run.asks = scored, asks
            if limits is not None:
                node_run.limits = limits
            # With a guarantee of its own noise no other note may leave, as it would tell of rows.
            if place.own and self._secret is not None and place.party.cfg.promises:
                node_run.covered = frozenset(
                    {SIMULATED, *(one.note for one in place.party.cfg.guarantees)}
                )

            # The run's sums. The hash of the terms is in their names: nodes to which a coordinator
            # showed other terms sign other names, so they have no sum together. What guards own
            # rows is left out for a public data set, which has no `counts`.
            agreed = sha256(terms(config, method, place.party.cfg, node_run.rounds))
            quarantine = 0 if place.counts is None else self.config.quarantine
            node_run.sums = SumKeeper(
                self.config,
                self.credentials,
                members=members,
                context=f"{run}/{facts['start']}/{agreed}",
                record=self._sums,
                participants=Participants(store.folder, quarantine),
                colluders=place.party.context.aggregator.colluders,
                least=place.party.cfg.least_in_sum(place.party.context),
                past=(lambda round, call: "") if place.counts is None else node_run.calls.past,
                always=node_run.summed,
            )
            return node_run

        node_run = await self._work(start)
        self._node_runs[run] = node_run
        await asyncio.to_thread(self._prune)
        return node_run

    def _afford(self, run: str, limits: OwnerLimits, demand: Demand) -> None:
        """Check that a run, and what runs under way will still ask about the same people, fit into
        the owner's limits together.
        """
        since = monotonic() - self.config.lease
        others = [
            other.asks(max(other.last.round, 0))
            for other in [*self._node_runs.values()]
            if other.run != run and not other.over and other.heard > since
            if other.limits is not None and other.limits.same(limits)
        ]
        try:
            limits.afford(demand, others)
        except PrivacyBudgetSpent as spent:
            raise refused(str(spent)) from None

    def _check_sums(self, caller: str, text: str, members: Any) -> None:
        """Check the members of a run, and that they are enough for its secure sums."""
        message.check_like(
            members, dict.fromkeys(members, str) if isinstance(members, dict) else {}
        )
        run, method, rounds = self._read_config(caller, text)
        policy.check_sums(self.config, run, method, run.resolve()[1], rounds, [*members.values()])

    def _prune(self) -> None:
        """Delete runs that need not be kept any more, each with a line in the audit log."""
        for owner, dropped in prune(
            self._folder, self.config.keep_runs, {*self._node_runs}, self.config.keep_days
        ):
            self.audit.write("dropped", owner, run=dropped)
            _log.info(
                "deleted run %s of %s and its model (keep_runs, keep_days)", dropped[:8], owner
            )

    def _read_config(self, caller: str, text: str) -> tuple[RunConfig, Method, int]:
        """The run of a config, its method, and its number of rounds, if the policy allows it."""
        try:
            run: RunConfig = validated(RunConfig, json.loads(text))
            for complaint in suspicious(run, self.config.factories):
                raise refused(complaint)
            if run.method not in self._pages and run.method not in methods.registry():
                raise mismatch(
                    "this node lacks the run's method: copy its page there and list it in pages "
                    "of node.toml, or use the same version of fedloom on both sides"
                )
            run = run.model_copy(update={"method": self._pages.get(run.method, run.method)})
            method, cfg, rounds, _ = resolve(run, at_node=True)
        except (FedloomError, ValueError, TypeError, RecursionError) as error:
            _log.warning("invalid config of %s: %s", caller, error)
            words = (
                "this node cannot read the run's config: use the same version of fedloom on both "
                "sides"
            )
            raise mismatch(words) from None
        policy.check_policy(self.config, caller, run, method, cfg, rounds)
        if not self._certified and (run.aggregate.secure or method.client.TO_PEERS):
            needs = (
                "aggregate.secure"
                if run.aggregate.secure
                else f"{method.name}, whose peers exchange messages,"
            )
            raise refused(
                f"{needs} needs certificates of nodes, which this transport lacks: use the "
                "engine net"
            )
        return run, method, rounds

    def _build_party(self, facts: Mapping[str, Any], store: Store) -> NodeParty:
        """The party of a run, from the run's facts."""
        caller, number = facts["caller"], facts["party"]
        run, *_ = self._read_config(caller, facts["config"])
        data = self.config.data[run.data.name]
        try:
            matched = recall(store.folder, facts, data) if run.columns.private else None
            seed = (
                None
                if self._secret is None or data.rows is None
                else split_seed(self._secret, data.rows)
            )
            own = None if data.rows is None else data.own
            files = PrivateData(
                data.dataset, data.root, data.rows, data.public, data.id, matched, seed, own
            )
            place = build_party(
                run, number, files, secret=self._secret, privacy_budget=self._privacy_budget(data),
                min_class_rows=1 if own is None else data.min_class_rows,
            )  # fmt: skip
        except FedloomError as error:
            _log.error("building the party for a run of %s failed: %s", caller, error)
            words = "this node failed to build its party; the reason is in its log"
            raise CallRefused(rpc_errors.FAILED, words) from None
        for note in place.notes:
            _log.warning("%s: %s", run.data.name, note)
        if place.counts is not None:
            policy.check_row_count(self.config, *place.counts)
        return place

    def _privacy_budget(self, data: NodeData) -> Callable[..., None] | None:
        """Charges private releases to the budget of this node's own rows; None for a public data
        set.
        """
        file = data.rows
        if file is None:
            return None

        def charge(sigma: float, count: int, rate: float, excess: float = 0.0) -> None:
            release = Releases(sigma, count, rate, excess)
            privacy_ledger.charge(
                self.budget, self.config.cohort(data), file, release, data.epsilon, data.delta
            )

        return charge

    def _scored(self, facts: Mapping[str, Any], place: NodeParty) -> Scored | None:
        """How a run's models may be scored on this node's own rows; None where it has none."""
        if not place.own:
            return None
        run, method, _ = self._read_config(facts["caller"], facts["config"])
        broadcasts = method.server is not None and method.server.broadcast is not Party.broadcast
        data = self.config.data[run.data.name]
        return Scored(data, self.config.cohort(data), self.budget, self._secret, broadcasts)

    def _make_room(self, run: str) -> None:
        """Drop runs whose coordinators gave no heartbeat within `lease`; refuse if `max_runs` are
        still left.
        """
        for other, node_run in [*self._node_runs.items()]:
            if other != run and monotonic() - node_run.heard > self.config.lease:
                _log.warning("run %s is set aside: no heartbeat from its coordinator", other[:8])
                self._drop(node_run)
        if len({*self._node_runs, *self._matcher.others(run)} - {run}) >= self.config.max_runs:
            words = (
                "another run is under way at this node: wait for it, resume it, or ask the "
                "node's owner to end it"
            )
            raise CallRefused(rpc_errors.TAKEN, words)

    async def _node_run(self, caller: str, which: Mapping[str, Any]) -> NodeRun:
        """The run of a call, loaded from disk if this node was restarted."""
        run = _check_run_id(which["run"])
        self.approvals.check_stop(run)
        node_run = self._node_runs.get(run)
        if node_run is None or node_run.over:
            async with self._opening:
                node_run = self._node_runs.get(run)
                if node_run is not None and node_run.over:
                    node_run = None
                store = Store(self._folder / f"run-{run}")
                facts = store.facts()
                mine = facts is not None and (facts["caller"], facts["start"]) == (
                    caller,
                    which["start"],
                )
                if node_run is None and facts is not None and mine:
                    self._make_room(run)
                    node_run = await self._start_party(run, facts, store, fresh=False)
                    _log.info("run %s continues after call %d", run[:8], node_run.last.call)
        if node_run is None or node_run.caller != caller:
            raise CallRefused(rpc_errors.UNKNOWN, "this run is not open here: open it first")
        if node_run.start < which["start"]:
            raise CallRefused(
                rpc_errors.UNKNOWN, "this start of the run is not open here: open it first"
            )
        if node_run.start > which["start"]:
            raise superseded()
        node_run.heard = monotonic()
        return node_run

    async def _restore(self, caller: str, body: bytes) -> bytes:
        request, _ = payload.unpack(body, {**_WHICH, "round": int})
        node_run = await self._node_run(caller, request)
        async with node_run.lock:

            def work() -> StoredState:
                # as it is
                first = request["round"] == 0 and node_run.last.call < 0 and node_run.last.round < 0
                before = node_run.store.read() if first else node_run.store.before(request["round"])
                if before is None:
                    words = f"this node no longer has its state of round {request['round']}"
                    raise CallRefused(rpc_errors.UNKNOWN, words)
                if node_run.limits is not None:
                    done = max(0, request["round"])
                    self._afford(node_run.run, node_run.limits, node_run.asks(done))
                try:
                    node_run.party.load(before.state)  # type: ignore[arg-type]
                    entry = StoredState(
                        node_run.start, -1, request["round"] - 1, state=node_run.party.state()
                    )
                    node_run.store.go_back(request["round"], entry)
                    node_run.calls.back(request["round"])
                except BaseException:
                    node_run.over = True  # memory and disk may differ
                    raise
                return entry

            node_run.last = light(await self._work(work, node_run))
            self.audit.write("restored", caller, run=node_run.run, round=request["round"])
            _log.info("run %s is back at round %d", node_run.run[:8], request["round"])
            return payload.pack({})

    async def _digest(self, caller: str, body: bytes) -> bytes:
        node_run = await self._node_run(caller, payload.unpack(body, _WHICH)[0])
        async with node_run.lock:
            # a hash answers any guess of rows
            if node_run.place.counts is not None and self._secret is not None:
                return payload.pack({"sha256": ""})
            sha256 = await self._work(lambda: message.digest(node_run.party.state()))
            self.audit.write("sent the state's hash", caller, run=node_run.run, hash=sha256)
            return payload.pack({"sha256": sha256})

    async def _close(self, caller: str, body: bytes) -> bytes:
        request, rest = await aside(len(body), lambda: payload.unpack(body, _CLOSE))
        node_run = self._node_runs.get(_check_run_id(request["run"]))
        if (
            node_run is not None
            and node_run.caller == caller
            and node_run.start == request["start"]
        ):

            def end() -> str:
                try:
                    placed = node_run.last.call != UNPLACED
                    ended = request["finished"] and placed and node_run.rounds > 0
                    # a client may be called in no round, and be evaluated with the shared model
                    if not ended and max(node_run.last.call, node_run.last.round) < 0:
                        node_run.store.forget()
                        return "it had no calls"
                    if not ended:
                        return "its coordinator closed it before the end, so no model is written"
                    return node_run.write_model(payload.decoded(rest, 0) if rest else {})
                finally:
                    node_run.over = True

            async with node_run.lock:
                outcome = await self._work(end, node_run)
            self.audit.write("closed", caller, run=node_run.run)
            _log.info("run %s is closed; %s", node_run.run[:8], outcome)
        return payload.pack({})

    # -- calls -------------------------------------------------------------------------------------

    async def _do(self, caller: str, body: bytes) -> bytes:
        begun = self._clock()
        request, rest = await aside(len(body), lambda: payload.unpack(body, _DO))
        node_run = await self._node_run(caller, request)
        self._check_call(node_run, request)
        return await self._answer_call(caller, node_run, request, rest, body, begun)

    def _hold(self, node_run: NodeRun, begun: float) -> None:
        """Keep the worker until the work since `begun` took a multiple of the owner's
        `reply_every`. In the worker: of a call that waits behind this one the reply would tell when
            the work ended.
        """
        every = (
            None
            if node_run.scored is None or not node_run.covered
            else node_run.scored.data.reply_every
        )
        if every is not None:
            elapsed = self._clock() - begun
            self._sleep(math.ceil(elapsed / every) * every - elapsed)

    async def _answer_call(
        self,
        caller: str,
        node_run: NodeRun,
        request: Mapping[str, Any],
        rest: Sequence[memoryview],
        body: bytes,
        begun: float,
    ) -> bytes:
        """The answer to a call whose method, round and receiver are right."""
        async with node_run.lock:
            if request["call"] < max(node_run.last.call, 0):
                raise CallRefused(rpc_errors.STALE, "a later call has been made")
            repeated = request["call"] == node_run.last.call
            if repeated:
                reply = node_run.last.reply
            else:
                fetched, missing = await self.peers.fetch(
                    node_run, request["tasks"], begun + request["deadline"]
                )
                most, end = 2 * self.config.max_message_mb << 20, begun + request["deadline"]

                def turn() -> bytes:
                    if self._clock() > end:
                        raise CallRefused(
                            rpc_errors.LATE, "the deadline passed before the call's turn"
                        )
                    most_seconds = self.config.max_call_seconds
                    # or the caller's deadline could tell how long the rows took
                    if not node_run.covered:
                        most_seconds = min(end - self._clock(), most_seconds)
                    self._limit, self._working, at = (
                        TimeLimit(most_seconds),
                        node_run,
                        self._clock(),
                    )
                    try:
                        return work(node_run, request, rest, fetched, missing, self._limit, most)
                    finally:  # a failure, too, would tell by its time
                        self._hold(node_run, at)

                reply = await self._work(turn, node_run)
            hashes = await aside(len(body) + len(reply), lambda: (digest(body), digest(reply)))
            self.audit.write(
                "answered again" if repeated else "answered",
                caller,
                run=node_run.run,
                call=request["call"],
                round=request["round"],
                method=request["method"],
                bytes_in=len(body),
                bytes_out=len(reply),
                hash_in=hashes[0],
                hash_out=hashes[1],
            )
            return reply

    async def _sum(self, caller: str, body: bytes) -> bytes:
        """A step of a secure sum: none of them has anything of the party in it."""
        request, rest = await aside(len(body), lambda: payload.unpack(body, REQUEST))
        node_run = await self._node_run(caller, request)
        assert node_run.sums is not None
        async with node_run.lock:
            reply = await asyncio.to_thread(node_run.sums.step, request, rest)
            facts = {"run": node_run.run, "sum": request["sum"][:32], "with": len(request["names"])}
            self.audit.write(f"sum: {request['step'][:16]}", caller, **facts)
            return reply

    def _check_call(self, node_run: NodeRun, request: Mapping[str, Any]) -> None:
        """Check a call's method, round and receiver, whatever its arguments.

        Three things in `request` must fit the method: `round`, -1 for an evaluation; `leave`,
        whether replies are kept for peers; `mask`, whether the reply is part of a secure sum.

        Raises:
            CallRefused: the coordinator may not make it.
        """
        method, party = request["method"], node_run.party
        if request["mask"] is not None:
            message.check_like(request["mask"], MASK)

        # Evaluations, which the page does not list. `public_digest` is none: it tells nothing of
        # own rows.
        if method in LOOKS:
            if method != "public_digest" and not self.config.evaluate:
                raise refused("this node's policy does not allow evaluation")
            if node_run.place.own and method == "predictions":
                raise refused(
                    "predictions on this node's own rows stay here; request the score instead"
                )
            if method == "score" and node_run.scored is not None and not node_run.scored.data.score:
                raise refused(
                    "scores of this node's own rows stay here: its owner has not set score = true"
                )
            if request["leave"] or request["round"] != -1:
                raise refused(
                    "an evaluation must have round -1, and its reply must be for the coordinator"
                )

        # Methods of the page: those that it lists, and none of `Party` itself, such as `state`.
        elif not party.CALLS and not party.TO_PEERS:
            raise refused("the method's page allows no call: list callable methods in CALLS")
        elif method not in (*party.CALLS, *party.TO_PEERS) or hasattr(Party, method):
            raise refused("the method's page lists no such method in CALLS")
        elif not 0 <= request["round"] < node_run.rounds:
            raise refused(f"this run has rounds 0 to {node_run.rounds - 1}, not {request['round']}")

        # In a run with secure sums whatever is averaged (MEANS) leaves masked, and nothing else
        # does. In any run a mask is for such a method alone, and for one reply: a node adds one
        # vector.
        elif party.context.aggregator.secure and (method in party.MEANS) != (
            request["mask"] is not None
        ):
            raise refused(
                "with aggregate.secure = true, replies of this method are sent as part of a sum "
                "only"
            )
        elif request["mask"] is not None and (
            method not in party.MEANS or len(request["tasks"]) != 1
        ):
            raise refused(f"replies of {method} cannot be part of a sum")

        # A reply for peers must not reach the coordinator, nor the other way around.
        elif request["leave"] != (method in party.TO_PEERS):
            receiver = "peers" if method in party.TO_PEERS else "the coordinator"
            raise refused(f"replies of {method} are for {receiver} only")

    async def _work(self, work: Callable[[], T], node_run: NodeRun | None = None) -> T:
        """Queue work for the worker thread; work of a run that is over by its turn is refused.

        A run that the work ends is dropped, even if nobody waits for the work any more.
        """
        loop = asyncio.get_running_loop()

        def turn() -> T:
            if node_run is not None and node_run.over:
                raise node_run.gone()
            if torch.get_num_threads() != 1:  # as in every engine
                torch.set_num_threads(1)
            covered = node_run is not None and bool(node_run.covered)
            torch.set_flush_denormal(covered)  # the slowness of tiny numbers would tell of rows
            try:
                return work()
            finally:
                if node_run is not None and node_run.over:
                    loop.call_soon_threadsafe(self._drop, node_run)

        if self._queued >= self.config.queue:
            raise CallRefused(
                rpc_errors.BUSY,
                f"{self.config.queue} calls are waiting at this node; try again later",
            )
        self._queued += 1
        try:
            return await loop.run_in_executor(self._worker, turn)
        finally:
            self._queued -= 1

    # -- peers -------------------------------------------------------------------------------------

    async def _peer(self, caller: str, body: bytes) -> bytes:
        """Give a peer the reply that was left for it, by a connection that is sealed from the
        coordinator.
        """
        request, rest = payload.unpack(body, PEER)
        name, run = request["peer"], _check_run_id(request["run"])
        node_run = self._node_runs.get(run)
        facts = Store(self._folder / f"run-{run}").facts() if node_run is None else None
        if facts is not None and facts["caller"] == caller and name in facts["members"].values():
            # as every other call after a restart
            node_run = await self._node_run(caller, {"run": run, "start": facts["start"]})
        known = (
            node_run is not None and node_run.caller == caller and name in node_run.members.values()
        )
        if node_run is None or not known or name not in self.config.peers or len(rest) != 1:
            raise refused(f"{name!a} is not a peer of this node in this run")
        if not request["session"]:
            return self.peers.greet(name, rest[0])
        sealed, sent = self.peers.finish(name, request["session"], rest[0])
        key, _ = payload.unpack(sent, {"key": str})
        if key["key"] not in node_run.left:
            raise CallRefused(rpc_errors.UNKNOWN, "there is no reply under this key")
        data = node_run.left[key["key"]][1]
        sha256, answer = await asyncio.to_thread(lambda: (digest(data), sealed.seal(data)))
        self.audit.write("handed over", name, run=node_run.run, bytes=len(data), hash=sha256)
        return payload.pack({"session": ""}, answer)

    def _log_refusal(self, caller: str, refusal: CallRefused) -> CallRefused:
        if refusal.code == rpc_errors.PENDING:  # the coordinator asks again and again
            return refusal
        said = f"refused a call of {caller}: {refusal.words}"
        if refusal.code in (rpc_errors.REFUSED, rpc_errors.MISMATCH) and said != self._said:
            self._said = said
            _log.warning("%s", f"{said}; {refusal.detail}" if refusal.detail else said)
        try:
            self.audit.refuse(caller, code=refusal.code, words=refusal.words[:MOST_WORDS])
        except OSError as error:  # the call is not answered, so this changes nothing
            _log.error("writing the audit log failed: %s", error)
        return refusal


def _check_run_id(text: str) -> str:
    """A run's id, which names a folder."""
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise CallRefused(rpc_errors.MALFORMED, "a run's id must have 32 hexadecimal digits")
    return text
