"""The node's side of a matching: which of its people the other parties of a run have too, before the run is opened.

Step by step, as `fedloom.data.alignment` describes it. What is kept in the end are row numbers, in the run's folder;
ids are in memory only, as hashes, and neither in a log nor in an answer but by the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import CheckpointError, FedloomError, MessageError
from fedloom.data.alignment import MOST, shard_count, shards
from fedloom.data.alignment.ids import digests
from fedloom.data.alignment.psi import PSIServer, follow, library
from fedloom.data.party_files import PartyFile
from fedloom.experiment.config import RunConfig
from fedloom.experiment.private import Matched, file_sha256
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig, NodeData, check_row_count
from fedloom.remote.node.store import Store
from fedloom.remote.rpc_errors import CallRefused, mismatch, refused, superseded

FILE: Final = "matched"
"""In a run's folder: whose rows are whose."""
CLASSES: Final = 100_000
"""The most classes."""
_STEP: Final = {"run": str, "start": int, "step": str}
_STEPS: Final = {
    "begin": {**_STEP, "protocol": int, "version": str, "party": int, "config": object, "rows": int},
    "shard": {**_STEP, "shard": int},
    "ids": _STEP,
    "leave": _STEP,
    "keep": {**_STEP, "mark": str, "classes": int},
}
_ROLES: Final = ("aligned", "test", "dealt", "unused")
_LARGE: Final = message.Limits(max_bytes=1 << 32)
_log = logging.getLogger("fedloom.node")
T = TypeVar("T")


@dataclass
class _MatchingState:
    """One that is under way.

    Attributes:
        theirs: ids that the coordinator says it has.
        own: the hashes of our ids, in the order of the file.
        cut: their places by shard; none where ids are compared in the open.
        next: the shard that comes next.
        asked: ids that were asked for so far.
        told: whether all was answered that finds who is common.
    """

    caller: str
    run: str
    start: int
    party: int
    theirs: int
    file: str
    own: Sequence[bytes]
    cut: Sequence[Sequence[int]]
    next: int = 0
    asked: int = 0
    told: bool = False
    heard: float = field(default_factory=monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Matcher:
    """Answers the steps of matchings.

    Args:
        config: the node's.
        folder: of its state.
        audit: its audit log.
        read: a run's config from a caller's text, if the policy has it so.
        work: does something in the thread for work.
        room: raises CallRefused if there is no place for another run.
        void: forgets what there was of a run, as its rows are matched anew.
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        audit: AuditLog,
        *,
        read: Callable[[str, str], RunConfig],
        work: Callable[[Callable[[], Any]], Awaitable[Any]],
        room: Callable[[str], None],
        void: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._audit = config, folder, audit
        self._read, self._work, self._room, self._void = read, work, room, void
        self._under_way: dict[str, _MatchingState] = {}

    def heard(self, caller: str, run: str) -> None:
        """A sign of life of a run."""
        matching = self._under_way.get(run)
        if matching is not None and matching.caller == caller:
            matching.heard = monotonic()

    def others(self, run: str) -> set[str]:
        """The other runs whose rows are being matched."""
        for other, matching in [*self._under_way.items()]:
            if monotonic() - matching.heard > self._config.lease:
                del self._under_way[other]
        return {*self._under_way} - {run}

    async def answer(self, caller: str, request: Any, rest: Sequence[memoryview]) -> bytes:
        """The answer to a step.

        Args:
            caller: by its certificate, allowed to start runs.
            request: the head, whose run is an id.
            rest: further messages.

        Raises:
            CallRefused, MessageError, OSError: it is not answered.
        """
        step = request.get("step")
        if step not in _STEPS:
            raise MessageError("there is no such step of a matching")
        message.check_like(request, _STEPS[step])
        if step == "begin":
            return await self._begin(caller, request)
        matching = self._under_way.get(request["run"])
        if matching is None or matching.caller != caller or matching.start < request["start"]:
            raise CallRefused(rpc_errors.UNKNOWN, "no rows are being matched for this run: begin")
        if matching.start > request["start"]:
            raise superseded()
        matching.heard = monotonic()
        if step == "leave":
            del self._under_way[request["run"]]
            self._audit.write("left a matching", caller, run=request["run"])
            return payload.pack({})
        async with matching.lock:
            if step == "keep":
                return await self._keep(matching, request, rest)
            return await (self._shard(matching, request["shard"], rest) if step == "shard" else self._ids(matching))

    async def _begin(self, caller: str, request: Mapping[str, Any]) -> bytes:
        """Read the own ids, and say how many there are."""
        payload.check_versions(request["protocol"], request["version"])
        run, start = request["run"], request["start"]
        config = self._read(caller, payload.joined(request["config"]))
        if not config.columns.own or not 0 < request["party"] < config.data.clients:
            raise mismatch("in this run no rows of this node are to be matched")
        data = self._config.data[config.data.name]
        self._allow(data, config.columns.backend, request["rows"])
        self._fence(caller, run, start)
        self._room(run)

        def prepare() -> _MatchingState:
            file, own = _ids(data, config)
            cut: Sequence[Sequence[int]] = ()
            if config.columns.backend == "openmined":
                library()
                cut = shards(own, shard_count(request["rows"], len(own)))
            return _MatchingState(caller, run, start, request["party"], request["rows"], file, own, cut)

        matching = await self._try(prepare, "read its ids")
        self._fence(caller, run, start)  # another may have begun meanwhile
        self._room(run)
        facts = {"method": config.method, "data": config.data.name, "align": config.columns.backend}
        self._audit.write(
            "began to match", caller, run=run, **facts, ids=len(matching.own), ids_of_caller=matching.theirs
        )
        _log.info("%s matches %d ids with ours for run %s", caller, matching.theirs, run[:8])
        self._under_way[run] = matching
        return payload.pack({"rows": len(matching.own)})

    def _allow(self, data: NodeData, backend: str, rows: int) -> None:
        """Hold a matching to the policy."""
        if not self._config.evaluate:
            words = "this run is judged by what all parties contribute, and this node contributes to no evaluation"
            raise refused(words)
        if backend not in data.align:
            raise refused(f"ids are matched here by {' or '.join(data.align)}, not by {backend}")
        if not 1 <= rows <= data.most_ids:
            raise refused(f"1 to {data.most_ids} ids are matched with those here, not {rows}")

    def _fence(self, caller: str, run: str, start: int) -> None:
        """Refuse another's run, and an older start of one."""
        folder = self._folder / f"run-{run}"
        now, facts = self._under_way.get(run), Store(folder).facts()
        try:
            kept = Matched.load(folder / FILE)
        except CheckpointError as error:
            _log.warning("%s", error)
            kept = None
        seen = [(found.caller, found.start) for found in (now, kept) if found is not None]
        seen += [] if facts is None else [(facts["caller"], facts["start"])]
        if any(who != caller for who, _ in seen):
            raise refused("this run is another coordinator's")
        if any(since > start for _, since in seen):
            raise superseded()

    async def _shard(self, matching: _MatchingState, number: int, rest: Sequence[memoryview]) -> bytes:
        """Our side of the intersection in one shard: each is answered once, so that nobody asks on and on."""
        if number != matching.next or number >= len(matching.cut) or len(rest) != 1:
            raise MessageError("the shards of a matching come one after the other, each once")
        request = bytes(rest[0])
        mine = [matching.own[place] for place in matching.cut[number]]

        def work() -> tuple[bytes, bytes, int]:
            matching.next += 1  # also if it fails; but not for a queue that is full
            server = PSIServer(mine, most=matching.theirs - matching.asked)
            response = server.respond(request)
            return server.setup(), response, server.asked

        setup, response, asked = await self._try(work, "answer a step of the matching")
        matching.asked += asked
        matching.told = matching.next == len(matching.cut)
        answer = payload.pack({}, setup, response)
        self._audit.write(
            "matched a shard",
            matching.caller,
            run=matching.run,
            shard=number,
            ids_of_caller=asked,
            bytes_in=len(request),
            bytes_out=len(answer),
        )
        return answer

    async def _ids(self, matching: _MatchingState) -> bytes:
        """The hashes of all our ids, sorted, where the policy allows `plain`."""
        if matching.cut:
            raise refused("ids are matched privately in this run")
        answer = payload.pack({}, b"".join(sorted(matching.own)))
        matching.told = True
        self._audit.write("showed ids", matching.caller, run=matching.run, ids=len(matching.own), bytes_out=len(answer))
        return answer

    async def _keep(self, matching: _MatchingState, request: Mapping[str, Any], rest: Sequence[memoryview]) -> bytes:
        """Keep which of our rows are aligned, tested, and our own."""
        if not matching.told:
            raise MessageError("a matching is kept after its last shard")
        if not 2 <= request["classes"] <= CLASSES or not 8 <= len(request["mark"]) <= 64:
            raise MessageError("a matching has a mark, and two classes or more")

        def work() -> Matched:
            aligned, unaligned, test = _roles(matching, rest)
            return Matched(
                matching.run,
                matching.caller,
                matching.start,
                matching.party,
                request["mark"],
                matching.file,
                request["classes"],
                aligned,
                unaligned,
                test,
            )

        found = await self._try(work, "find its rows")
        check_row_count(self._config, len(found.aligned), len(found.test))
        self._void(matching.run)
        await self._work(lambda: found.save(self._folder / f"run-{matching.run}" / FILE))
        counts = {"aligned": len(found.aligned), "test": len(found.test), "unaligned": len(found.unaligned)}
        self._audit.write("matched", matching.caller, run=matching.run, **counts, bytes_in=sum(map(len, rest)))
        _log.info("run %s: %s", matching.run[:8], ", ".join(f"{n} rows {what}" for what, n in counts.items()))
        if self._under_way.get(matching.run) is matching:
            del self._under_way[matching.run]
        return payload.pack({})

    async def _try(self, work: Callable[[], T], what: str) -> T:
        """Do something in the thread for work; what is wrong with our own files is for our own log alone."""
        try:
            found: T = await self._work(work)
            return found
        except MessageError:
            raise
        except FedloomError as error:
            _log.error("this node can't %s: %s", what, error)
            raise CallRefused(rpc_errors.FAILED, f"this node can't {what}; its log says why") from None


def recall(folder: Path, facts: Mapping[str, Any], data: NodeData) -> Matched:
    """Which of the rows are whose in a run that is opened.

    Args:
        folder: of the run.
        facts: of the run: caller, start and party.
        data: where the rows are.

    Raises:
        CallRefused: nobody matched them, or they have changed since.
        CheckpointError: what was kept is torn.
    """
    found = Matched.load(folder / FILE)
    if found is None or found.caller != facts["caller"] or found.party != facts["party"]:
        words = "this node does not know whose rows were matched in this run: begin the run anew"
        raise mismatch(words)
    if found.start > facts["start"]:
        raise superseded()
    assert data.rows is not None
    if found.file != file_sha256(data.rows):
        raise mismatch("the rows of this node have changed since they were matched: begin the run anew")
    return found


def _ids(data: NodeData, config: RunConfig) -> tuple[str, Sequence[bytes]]:
    """The SHA-256 of our file, and the hashes of its ids."""
    assert data.rows is not None
    file = file_sha256(data.rows)
    held = PartyFile.passive(data.rows, data.id or str(config.columns.id), config.columns.label or "")
    (own,) = digests([held.ids], [str(data.rows)])
    if file != file_sha256(data.rows) or len(own) > MOST:
        raise CheckpointError(f"{data.rows} changes while it is read, or has more than {MOST:,} rows")
    return file, own


def _roles(matching: _MatchingState, rest: Sequence[memoryview]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Our aligned, unaligned and test rows, from positions among those that all have.

    Raises:
        MessageError: there are no such positions, or no such rows.
    """
    if len(rest) < 2 or sum(map(len, rest[2:])) > 32 * min(matching.theirs, len(matching.own)):
        raise MessageError("a matching is kept by positions, a key and the marks of those whom all have")
    rows = follow([bytes(part) for part in rest[1:]], matching.own)
    found: Any = message.decode(rest[0], _LARGE)
    message.check_like(found, dict.fromkeys(_ROLES, object))
    held = [found[name] for name in _ROLES]
    if not all(isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.dim() == 1 for x in held):
        raise MessageError("positions must be whole numbers")
    aligned, test, dealt, unused = (x.numpy() for x in held)
    people = np.concatenate([aligned, test, dealt, unused])
    if len(np.unique(people)) < len(people) or not len(aligned) or not len(test):
        raise MessageError("a position must have one role, and some must be aligned and some tested")
    if people.min() < 0 or people.max() >= len(rows):
        raise MessageError("positions must be of people whom all have")
    others = np.setdiff1d(np.arange(len(matching.own)), rows[people])
    return rows[aligned], np.concatenate([others, rows[dealt]]), rows[test]
