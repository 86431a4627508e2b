"""A node's answers, whatever the wire: runs that it takes part in, its party in each, and what it keeps of them.

Work is done by one thread, in the order in which it was asked for; all else is answered at once, so that two parties
that wait for each other's messages never wait for each other's work. What a call changes is on disk before the reply
goes out, so a killed node loses nothing, and a call that is repeated gets the reply that there was.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from time import monotonic
from typing import Any, Final, TypeVar

import torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import FedloomError, MessageError
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.experiment.build import resolve
from fedloom.experiment.config import RunConfig, validated
from fedloom.experiment.node_party import NodeParty, build_party, suspicious
from fedloom.experiment.private import PrivateData
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import NodeAddress
from fedloom.remote.node import config as policy
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.matching import Matcher, recall
from fedloom.remote.node.peer_fetcher import PeerClient, PeerFetcher
from fedloom.remote.node.run import NodeRun, light
from fedloom.remote.node.store import UNPLACED, Store, StoredState, prune
from fedloom.remote.node.task_runner import work
from fedloom.remote.rpc import MOST_WORDS, digest
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.secret import secret

LOOKS: Final = (*EVALUATIONS, "public_digest")
"""What the experiment asks of a party from outside the protocol: no page's own."""
_OPEN: Final = {
    "protocol": int,
    "version": str,
    "run": str,
    "start": int,
    "party": int,
    "members": object,
    "config": object,
    "resume": bool,
}
_WHICH: Final = {"run": str, "start": int}
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
}
_log = logging.getLogger("fedloom.node")
T = TypeVar("T")


class NodeService:
    """What a node answers.

    Args:
        config: the node's.
        connect: makes connections to peers; None where there are none, as on a wire that only knows a server.
        worker: does the work, in order; None for a thread of its own.
    """

    def __init__(
        self,
        config: NodeConfig,
        connect: Callable[[NodeAddress], Awaitable[PeerClient]] | None = None,
        worker: Executor | None = None,
    ) -> None:
        self.config = config
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="fedloom-work")
        self._waiting = 0
        self._node_runs: dict[str, NodeRun] = {}
        self._opening = asyncio.Lock()
        self._folder = config.state
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self.audit = AuditLog(self._folder / "audit.jsonl")
        self.peers = PeerFetcher(config, connect, self.audit)
        self._pages = {name: path for page in config.pages for name, path in policy.pages(page).items()}
        self._secret = secret(self._folder / "secret") if config.secret_noise else None
        self._matcher = Matcher(
            config,
            self._folder,
            self.audit,
            read=lambda caller, text: self._asked_for(caller, text)[0],
            work=self._work,
            room=self._make_room,
            void=self._void,
        )

    # -- what a wire calls --------------------------------------------------------------------------------

    def heard(self, caller: str, run: str) -> None:
        """A sign of life of a run: those of another one of the same coordinator say nothing of this one."""
        node_run = self._node_runs.get(run)
        if node_run is not None and node_run.caller == caller:
            node_run.heard = monotonic()
        self._matcher.heard(caller, run)

    def most(self, caller: str) -> int:
        """The most bytes that a call of this caller may have."""
        if caller not in (*self.config.callers, *self.config.peers):
            raise self._refusal(caller, CallRefused(rpc_errors.REFUSED, "this node does not know you"))
        return self.config.largest_mb << 20 if caller in self.config.callers else 1 << 16

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        """The answer to a call.

        Args:
            caller: by its certificate.
            kind: match, open, restore, do, digest, close, or of a peer fetch.
            body: see `fedloom.remote.payload`.

        Raises:
            Refused: with words for the caller. What else goes wrong is this node's own affair, and in its log.
        """
        answers = {
            "match": self._match,
            "open": self._open,
            "restore": self._restore,
            "do": self._do,
            "digest": self._digest,
            "close": self._close,
            "fetch": self._fetch,
        }
        try:
            if kind not in answers:
                raise CallRefused(rpc_errors.MALFORMED, "there is no such call")
            if kind != "fetch" and caller not in self.config.callers:
                raise CallRefused(rpc_errors.REFUSED, "this node takes runs from others, not from you")
            return await answers[kind](caller, body)
        except CallRefused as refusal:
            raise self._refusal(caller, refusal) from None
        except MessageError as error:
            raise self._refusal(
                caller, CallRefused(rpc_errors.MALFORMED, "this is not a valid message", str(error))
            ) from None
        except OSError as error:
            _log.error("the disk refused: %s", error)
            raise self._refusal(
                caller, CallRefused(rpc_errors.FAILED, "this node can't keep its state at present")
            ) from None
        except Exception:
            _log.exception("a call of %s could not be answered", caller)
            raise self._refusal(
                caller, CallRefused(rpc_errors.FAILED, "this node could not answer; its log says why")
            ) from None

    async def close(self) -> None:
        """Let go of the connections to peers."""
        await self.peers.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # -- a run begins, goes on, ends -------------------------------------------------------------------------

    async def _match(self, caller: str, body: bytes) -> bytes:
        asked, rest = payload.unpack(body)
        if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
            raise MessageError("a step of a matching names its run")
        _run_id(asked["run"])
        return await self._matcher.answer(caller, asked, rest)

    def _void(self, run: str) -> None:
        """Forget what a run's party was, as its rows are matched anew."""
        if run in self._node_runs:
            self._drop(self._node_runs[run])
        (self._folder / f"run-{run}" / "run.json").unlink(missing_ok=True)

    def _drop(self, node_run: NodeRun) -> None:
        """Give up a sitting; the next call of the run takes it up from disk."""
        node_run.over = True
        if self._node_runs.get(node_run.run) is node_run:
            del self._node_runs[node_run.run]

    async def _open(self, caller: str, body: bytes) -> bytes:
        asked, _ = payload.unpack(body, _OPEN)
        mine, theirs = f"{payload.PROTOCOL}/{__version__}", f"{asked['protocol']}/{ascii(asked['version'])[1:-1][:40]}"
        if mine != theirs:
            raise CallRefused(
                rpc_errors.MISMATCH, f"this node has protocol and version {mine}, the coordinator {theirs}"
            )
        run = _run_id(asked["run"])
        async with self._opening:
            now = self._node_runs.get(run)
            if now is not None and now.caller != caller:
                raise CallRefused(rpc_errors.REFUSED, "this run is another coordinator's")
            if now is not None and now.start > asked["start"]:
                raise CallRefused(rpc_errors.STALE, "a newer start of this run has taken over")
            self._make_room(run)
            facts = {"caller": caller, **{k: asked[k] for k in ("start", "party", "members")}}
            facts["config"] = payload.joined(asked["config"])
            store = Store(self._folder / f"run-{run}")
            before = store.facts()
            if before is not None and before["caller"] != caller:
                raise CallRefused(rpc_errors.REFUSED, "this run is another coordinator's")
            goes_on, newest = False, -1 if before is None else before["start"]
            if newest == asked["start"] and (last := await asyncio.to_thread(store.read)) is not None:
                goes_on, newest = last.start == newest, last.start  # that of a newer one which was cut short
            if newest > asked["start"]:
                raise CallRefused(rpc_errors.STALE, "a newer start of this run has taken over")
            now = self._node_runs.get(run)  # it may have been given up meanwhile
            if now is None or now.over or now.start != asked["start"] or not goes_on:
                now = await self._start_party(run, facts, store, fresh=not goes_on, resume=asked["resume"])
            self.audit.write("opened", caller, run=run, party=asked["party"], method=now.place.facts["method"])
            _log.info("%s opened run %s: %s", caller, run[:8], now.place.facts["method"])
            return payload.pack(
                {
                    "goes_on": goes_on,
                    "call": now.last.call,
                    "tells": self.config.evaluate,
                    "facts": dict(now.place.facts),
                }
            )

    async def _start_party(
        self, run: str, facts: Mapping[str, Any], store: Store, *, fresh: bool, resume: bool = False
    ) -> NodeRun:
        """Make the party of a run: as it was, or as it is at first, with a way back to an earlier start to `resume`."""
        members = facts["members"]
        form = dict.fromkeys(("name", "at", "relay", "relay_name"), str)
        message.check_like(members, dict.fromkeys(members, form) if isinstance(members, dict) else {})
        others = {number: NodeAddress(**member) for number, member in members.items()}

        def make() -> NodeRun:
            made = self._place(facts, store)
            last = None if fresh else store.read()
            if fresh:
                if run in self._node_runs:
                    self._node_runs[run].over = True
                store.set_aside(marks=resume)
                last = StoredState(facts["start"], UNPLACED if resume else -1, -1, state=made.party.state())
                store.write(last)
                store.begin(facts)
            elif last is None or last.start != facts["start"]:
                raise CallRefused(rpc_errors.UNKNOWN, "there is no such run here: open it first")
            else:
                made.party.load(last.state)  # type: ignore[arg-type]
            notes = self.config.notes
            return NodeRun(run, facts["caller"], facts["start"], others, made, store, light(last), notes)

        node_run = await self._work(make)
        self._node_runs[run] = node_run
        for who, dropped in await asyncio.to_thread(prune, self._folder, self.config.keep_runs, {*self._node_runs}):
            self.audit.write("dropped", who, run=dropped)
            _log.info("run %s of %s is dropped, its model too: keep_runs are kept", dropped[:8], who)
        return node_run

    def _asked_for(self, caller: str, text: str) -> tuple[RunConfig, Method]:
        """The run that a config asks for, if the policy has it so."""
        try:
            run: RunConfig = validated(RunConfig, json.loads(text))
            for complaint in suspicious(run, self.config.factories):
                raise CallRefused(rpc_errors.REFUSED, complaint)
            run = run.model_copy(update={"method": self._pages.get(run.method, run.method)})
            method, cfg, rounds, _ = resolve(run, at_node=True)
        except (FedloomError, ValueError, TypeError, RecursionError) as error:
            _log.warning("the config of %s can't be run here: %s", caller, error)
            raise CallRefused(
                rpc_errors.MISMATCH, "this node can't read the run's config: are both of one version?"
            ) from None
        policy.allow(self.config, caller, run, method, cfg, rounds)
        return run, method

    def _place(self, facts: Mapping[str, Any], store: Store) -> NodeParty:
        """The party of a run, by how it began."""
        caller, number = facts["caller"], facts["party"]
        run, _ = self._asked_for(caller, facts["config"])
        data = self.config.data[run.data.name]
        try:
            matched = recall(store.folder, facts, data) if run.columns.own else None
            files = PrivateData(data.set, data.root, data.rows, data.public, data.id, matched)
            found = build_party(run, number, files, secret=self._secret)
        except FedloomError as error:
            _log.error("a party for %s's run can't be made: %s", caller, error)
            raise CallRefused(rpc_errors.FAILED, "this node can't make its party; its log says why") from None
        if found.counts is not None:
            policy.enough(self.config, *found.counts)
        return found

    def _make_room(self, run: str) -> None:
        """Give up the place of a coordinator that is gone, if another needs it."""
        others = {r: s for r, s in self._node_runs.items() if r != run}
        for other, node_run in others.items():
            if monotonic() - node_run.heard > self.config.lease:
                _log.warning("run %s is set aside: its coordinator gives no sign of life", other[:8])
                self._drop(node_run)
        if len({*self._node_runs, *self._matcher.others(run)} - {run}) >= self.config.most_runs:
            words = "another run is under way here: wait, resume that one, or ask who runs the node"
            raise CallRefused(rpc_errors.TAKEN, words)

    async def _node_run(self, caller: str, which: Mapping[str, Any]) -> NodeRun:
        """The run that a call is of, taken up again if this node was restarted."""
        run = _run_id(which["run"])
        node_run = self._node_runs.get(run)
        if node_run is None or node_run.over:
            async with self._opening:
                node_run = self._node_runs.get(run)
                if node_run is not None and node_run.over:
                    node_run = None
                store = Store(self._folder / f"run-{run}")
                facts = store.facts()
                mine = facts is not None and (facts["caller"], facts["start"]) == (caller, which["start"])
                if node_run is None and facts is not None and mine:
                    self._make_room(run)
                    node_run = await self._start_party(run, facts, store, fresh=False)
                    _log.info("run %s goes on after call %d", run[:8], node_run.last.call)
        if node_run is None or node_run.caller != caller:
            raise CallRefused(rpc_errors.UNKNOWN, "there is no such run here: open it first")
        if node_run.start != which["start"]:
            newer = which["start"] > node_run.start
            code = rpc_errors.UNKNOWN if newer else rpc_errors.STALE
            raise CallRefused(code, "open the run first" if newer else "a newer start of this run has taken over")
        node_run.heard = monotonic()
        return node_run

    async def _restore(self, caller: str, body: bytes) -> bytes:
        asked, _ = payload.unpack(body, {**_WHICH, "round": int})
        node_run = await self._node_run(caller, asked)
        async with node_run.lock:

            def work() -> StoredState:
                first = asked["round"] == 0 and node_run.last.call < 0 and node_run.last.round < 0  # as it is
                found = node_run.store.read() if first else node_run.store.before(asked["round"])
                if found is None:
                    raise CallRefused(rpc_errors.UNKNOWN, f"this node has not kept its state of round {asked['round']}")
                try:
                    node_run.party.load(found.state)  # type: ignore[arg-type]
                    entry = StoredState(node_run.start, -1, asked["round"] - 1, state=node_run.party.state())
                    node_run.store.go_back(asked["round"], entry)
                except BaseException:
                    node_run.over = True  # what is in memory may not be what is on disk
                    raise
                return entry

            node_run.last = light(await self._work(work, node_run))
            self.audit.write("restored", caller, run=node_run.run, round=asked["round"])
            _log.info("run %s is back at round %d", node_run.run[:8], asked["round"])
            return payload.pack({})

    async def _digest(self, caller: str, body: bytes) -> bytes:
        node_run = await self._node_run(caller, payload.unpack(body, _WHICH)[0])
        async with node_run.lock:
            sha256 = await self._work(lambda: message.digest(node_run.party.state()))
            self.audit.write("told the state's hash", caller, run=node_run.run, hash=sha256)
            return payload.pack({"sha256": sha256})

    async def _close(self, caller: str, body: bytes) -> bytes:
        asked, _ = payload.unpack(body, _WHICH)
        node_run = self._node_runs.get(_run_id(asked["run"]))
        if node_run is not None and node_run.caller == caller and node_run.start == asked["start"]:

            def end() -> str:
                try:
                    if max(node_run.last.call, node_run.last.round) < 0:
                        node_run.store.forget()
                        return "nothing was done in it"
                    node_run.store.write_model(node_run.party, node_run.place.facts)
                    return f"the node's own model is in {node_run.store.folder}"
                finally:
                    node_run.over = True

            async with node_run.lock:
                told = await self._work(end, node_run)
            self.audit.write("closed", caller, run=node_run.run)
            _log.info("run %s is closed; %s", node_run.run[:8], told)
        return payload.pack({})

    # -- calls -----------------------------------------------------------------------------------------------

    async def _do(self, caller: str, body: bytes) -> bytes:
        begun = monotonic()
        asked, rest = payload.unpack(body, _DO)
        node_run = await self._node_run(caller, asked)
        self._may(node_run, asked)
        async with node_run.lock:
            if asked["call"] < max(node_run.last.call, 0):
                raise CallRefused(rpc_errors.STALE, "a later call has been made")
            again = asked["call"] == node_run.last.call
            if again:
                reply = node_run.last.reply
            else:
                brought, missing = await self.peers.bring(node_run, asked["tasks"], begun + asked["deadline"])
                reply = await self._work(
                    lambda: work(node_run, asked, rest, brought, missing, begun, 2 * self.config.largest_mb << 20),
                    node_run,
                )
            hashes = await asyncio.to_thread(lambda: (digest(body), digest(reply)))
            self.audit.write(
                "answered again" if again else "answered",
                caller,
                run=node_run.run,
                call=asked["call"],
                round=asked["round"],
                method=asked["method"],
                bytes_in=len(body),
                bytes_out=len(reply),
                hash_in=hashes[0],
                hash_out=hashes[1],
            )
            return reply

    def _may(self, node_run: NodeRun, asked: Mapping[str, Any]) -> None:
        """Refuse a call that the coordinator may not make, whatever its arguments.

        Raises:
            Refused: with what it may.
        """
        method, party = asked["method"], node_run.party
        if method in LOOKS:
            if method != "public_digest" and not self.config.evaluate:
                raise CallRefused(rpc_errors.REFUSED, "this node does not tell how good its model is")
            if node_run.place.own and method == "predictions":
                raise CallRefused(
                    rpc_errors.REFUSED, "what a model says of this node's own rows stays here; ask for the score"
                )
            if asked["leave"] or asked["round"] != -1:
                raise CallRefused(rpc_errors.REFUSED, "a look from outside is not for peers, and of no round")
        elif not party.CALLS and not party.TO_PEERS:
            raise CallRefused(
                rpc_errors.REFUSED, "the method's page must name in CALLS what the home may call; it names nothing"
            )
        elif method not in (*party.CALLS, *party.TO_PEERS) or hasattr(Party, method):
            raise CallRefused(
                rpc_errors.REFUSED, "a call may ask for what the method's page names in CALLS, and nothing else"
            )
        elif not 0 <= asked["round"] < self.config.most_rounds:
            raise CallRefused(
                rpc_errors.REFUSED, f"a run may have {self.config.most_rounds} rounds here, counted from 0"
            )
        elif asked["leave"] != (method in party.TO_PEERS):
            whom = "peers alone" if method in party.TO_PEERS else "the coordinator, not for peers"
            raise CallRefused(rpc_errors.REFUSED, f"the replies of {method} are for {whom}")

    async def _work(self, work: Callable[[], T], node_run: NodeRun | None = None) -> T:
        """Do something in the thread for work, when its turn comes; of a sitting, if it is not over by then.

        A sitting that the work leaves over is dropped, also if nobody waits for the work any more.
        """
        loop = asyncio.get_running_loop()

        def turn() -> T:
            if node_run is None:
                return _steadily(work)
            if node_run.over:
                raise node_run.gone()
            try:
                return _steadily(work)
            finally:
                if node_run.over:
                    loop.call_soon_threadsafe(self._drop, node_run)

        if self._waiting >= self.config.queue:
            raise CallRefused(rpc_errors.BUSY, "too many calls wait here already")
        self._waiting += 1
        try:
            return await loop.run_in_executor(self._worker, turn)
        finally:
            self._waiting -= 1

    # -- peers -------------------------------------------------------------------------------------------------

    async def _fetch(self, caller: str, body: bytes) -> bytes:
        asked, _ = payload.unpack(body, {"run": str, "key": str})
        node_run = self._node_runs.get(_run_id(asked["run"]))
        known = node_run is not None and caller in {m.name for m in node_run.members.values()}
        if node_run is None or not known or caller not in self.config.peers:
            raise CallRefused(rpc_errors.REFUSED, "you are no peer of this node in this run")
        found = node_run.left.get(asked["key"])
        if found is None:
            raise CallRefused(rpc_errors.UNKNOWN, "there is nothing under this key any more")
        data = found[1]
        sha256 = await asyncio.to_thread(digest, data)
        self.audit.write("handed over", caller, run=node_run.run, bytes=len(data), hash=sha256)
        return data

    def _refusal(self, caller: str, refusal: CallRefused) -> CallRefused:
        try:
            self.audit.refuse(caller, code=refusal.code, words=refusal.words[:MOST_WORDS])
        except OSError as error:  # nothing was answered
            _log.error("the audit log can't be written: %s", error)
        return refusal


def _run_id(text: str) -> str:
    """A run's id, which names a folder."""
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise CallRefused(rpc_errors.MALFORMED, "a run's id has 32 hexadecimal digits")
    return text


def _steadily(work: Callable[[], T]) -> T:
    """In the thread for work: one thread of torch's, as in every engine."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    return work()
