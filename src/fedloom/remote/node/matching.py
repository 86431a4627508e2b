"""The node's side of an alignment, before a run is opened: find the ids that other parties have
too.

`fedloom.data.alignment` describes the steps. The result is kept as row numbers in the run's folder.
Ids are in memory only, as hashes, and appear in no log, and in no answer except as the protocol
requires.
"""

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
from fedloom.core.errors import CheckpointError, FedloomError, MessageError, PrivacyBudgetSpent
from fedloom.data.alignment import MOST, shard_count, shards
from fedloom.data.alignment.ids import digests
from fedloom.data.alignment.psi import PSIServer, announced_rows, library
from fedloom.data.party_files import PartyFile
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.private import Matched, file_sha256
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.budget import Budget, Spent
from fedloom.remote.node.config import NodeConfig, NodeData, check_row_count
from fedloom.remote.node.store import Store
from fedloom.remote.rpc_errors import CallRefused, mismatch, refused, superseded

FILE: Final = "matched"
"""The file with the alignment, in the run's folder."""
CLASSES: Final = 100_000
"""Limit of the number of classes."""
_STEP: Final = {"run": str, "start": int, "step": str}
_STEPS: Final = {
    "begin": {
        **_STEP,
        "protocol": int,
        "version": str,
        "party": int,
        "config": object,
        "rows": int,
    },
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
    """An alignment in progress.

    Attributes:
        theirs: number of ids that the coordinator reports.
        own: hashes of this node's ids, in the order of the file.
        cut: their positions by shard; none for the backend `plain`.
        next: the next shard.
        asked: number of ids that the coordinator has sent so far.
        told: whether all steps that find common ids are answered.
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
    """Answers the steps of alignments.

    Args:
        config: the node's.
        folder: of its state.
        audit: its audit log.
        budget: of the ids that coordinators may match.
        read: parses a caller's config of a run, and checks it against the policy.
        approve: raises CallRefused unless the site has approved a caller's run with this config.
        work: runs work in the worker thread.
        room: raises CallRefused if another run would exceed `max_runs`.
        void: discards the state of a run, as its rows are aligned again.
    """

    def __init__(
        self,
        config: NodeConfig,
        folder: Path,
        audit: AuditLog,
        budget: Budget,
        *,
        read: Callable[[str, str], RunConfig],
        approve: Callable[[str, str, str], None],
        work: Callable[[Callable[[], Any]], Awaitable[Any]],
        room: Callable[[str], None],
        void: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._audit, self._budget = config, folder, audit, budget
        self._read, self._work, self._room, self._void = read, work, room, void
        self._approve = approve
        self._under_way: dict[str, _MatchingState] = {}

    def heard(self, caller: str, run: str) -> None:
        """Record the coordinator's heartbeat for a run."""
        matching = self._under_way.get(run)
        if matching is not None and matching.caller == caller:
            matching.heard = monotonic()

    def others(self, run: str) -> set[str]:
        """The other runs with an alignment in progress."""
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
            CallRefused, MessageError, OSError: the step failed or is not allowed.
        """
        step = request.get("step")
        if step not in _STEPS:
            raise MessageError("unknown step of an alignment")
        message.check_like(request, _STEPS[step])
        if step == "begin":
            return await self._begin(caller, request)
        matching = self._under_way.get(request["run"])
        if matching is None or matching.caller != caller or matching.start < request["start"]:
            raise CallRefused(
                rpc_errors.UNKNOWN, "no alignment of this run is in progress: begin one"
            )
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
            return await (
                self._shard(matching, request["shard"], rest)
                if step == "shard"
                else self._ids(matching)
            )

    async def _begin(self, caller: str, request: Mapping[str, Any]) -> bytes:
        """Read this node's ids, and answer their number."""
        payload.check_versions(request["protocol"], request["version"])
        run, start = request["run"], request["start"]
        config = self._read(caller, payload.joined(request["config"]))
        if not config.columns.private or not 0 < request["party"] < config.data.clients:
            raise mismatch("in this run no rows of this node are to be matched")
        data = self._config.data[config.data.name]
        self._allow(data, config.columns.backend, request["rows"])
        self._fence(caller, run, start)
        self._approve(caller, run, payload.joined(request["config"]))
        self._room(run)

        def prepare() -> _MatchingState:
            file, own = _ids(data, config)
            self._charge(data, request["rows"], len(own))
            cut: Sequence[Sequence[int]] = ()
            if config.columns.backend == "openmined":
                library()
                cut = shards(own, shard_count(request["rows"], len(own)))
            return _MatchingState(
                caller, run, start, request["party"], request["rows"], file, own, cut
            )

        matching = await self._try(prepare, "read its ids")
        self._fence(caller, run, start)  # another may have begun meanwhile
        self._room(run)
        facts = {"method": config.method, "data": config.data.name, "align": config.columns.backend}
        self._audit.write(
            "began to match",
            caller,
            run=run,
            **facts,
            ids=len(matching.own),
            ids_of_caller=matching.theirs,
        )
        _log.info("%s aligns %d ids with this node's for run %s", caller, matching.theirs, run[:8])
        self._under_way[run] = matching
        return payload.pack({"rows": len(matching.own)})

    def _allow(self, data: NodeData, backend: str, rows: int) -> None:
        """Check an alignment against the policy."""
        if not self._config.evaluate:
            words = (
                "evaluating this run needs all parties, and this node's policy does not allow "
                "evaluation"
            )
            raise refused(words)
        if backend not in data.align:
            raise refused(f"ids are matched here by {' or '.join(data.align)}, not by {backend}")
        if not 1 <= rows <= data.max_ids:
            raise refused(f"1 to {data.max_ids} ids are matched with those here, not {rows}")

    def _charge(self, data: NodeData, ids: int, own: int) -> None:
        """Count the ids that an alignment may test, also if the coordinator leaves it."""
        limit = 2 * own if data.ids_total is None else data.ids_total

        def change(spent: Spent) -> None:
            spent.ids += ids
            if spent.ids > limit:
                raise refused(
                    "the ids that coordinators may match here are used up: the owner must raise "
                    "ids_total"
                )

        assert data.rows is not None
        self._budget.spend(self._config.cohort(data), data.rows, change)

    def _fence(self, caller: str, run: str, start: int) -> None:
        """Refuse another coordinator's run, and an older start."""
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

    async def _shard(
        self, matching: _MatchingState, number: int, rest: Sequence[memoryview]
    ) -> bytes:
        """Answer one shard of the intersection; each is answered once, which limits the ids that a
        caller can test.
        """
        if number != matching.next or number >= len(matching.cut) or len(rest) != 1:
            raise MessageError("shards of an alignment must come in order, each once")
        request = bytes(rest[0])
        mine = [matching.own[place] for place in matching.cut[number]]

        def work() -> tuple[bytes, bytes, int]:
            matching.next += 1  # also if it fails, but not if the queue is full
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
        """The sorted hashes of all ids, where the policy allows `plain`."""
        if matching.cut:
            raise refused("this run aligns ids by private set intersection")
        answer = payload.pack({}, b"".join(sorted(matching.own)))
        matching.told = True
        self._audit.write(
            "showed ids",
            matching.caller,
            run=matching.run,
            ids=len(matching.own),
            bytes_out=len(answer),
        )
        return answer

    async def _keep(
        self, matching: _MatchingState, request: Mapping[str, Any], rest: Sequence[memoryview]
    ) -> bytes:
        """Keep the numbers of aligned, test and unaligned rows."""
        if not matching.told:
            raise MessageError("an alignment can be kept only after its last shard")
        if (
            request["classes"] == 1
            or not 0 <= request["classes"] <= CLASSES
            or not 8 <= len(request["mark"]) <= 64
        ):
            raise MessageError(
                "an alignment must have a mark, and two classes or more, or none of a number"
            )

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
        counts = {
            "aligned": len(found.aligned),
            "test": len(found.test),
            "unaligned": len(found.unaligned),
        }
        self._audit.write(
            "matched", matching.caller, run=matching.run, **counts, bytes_in=sum(map(len, rest))
        )
        _log.info(
            "run %s: %s",
            matching.run[:8],
            ", ".join(f"{n} rows {what}" for what, n in counts.items()),
        )
        if self._under_way.get(matching.run) is matching:
            del self._under_way[matching.run]
        return payload.pack({})

    async def _try(self, work: Callable[[], T], what: str) -> T:
        """Run work in the worker thread; errors of this node's own files go to its log only."""
        try:
            found: T = await self._work(work)
            return found
        except MessageError:
            raise
        except PrivacyBudgetSpent as error:
            raise refused(str(error)) from None
        except FedloomError as error:
            _log.error("this node failed to %s: %s", what, error)
            raise CallRefused(
                rpc_errors.FAILED, f"this node failed to {what}; the reason is in its log"
            ) from None


def recall(folder: Path, facts: Mapping[str, Any], data: NodeData) -> Matched:
    """The kept alignment of a run that is opened.

    Args:
        folder: of the run.
        facts: of the run: caller, start and party.
        data: the node's rows.

    Raises:
        CallRefused: there is no alignment, or the rows have changed since.
        CheckpointError: its file is damaged.
    """
    found = Matched.load(folder / FILE)
    if found is None or found.caller != facts["caller"] or found.party != facts["party"]:
        words = "this node has no alignment of this run: start the run again in another folder"
        raise mismatch(words)
    if found.start > facts["start"]:
        raise superseded()
    assert data.rows is not None
    if found.file != file_sha256(data.rows):
        raise mismatch(
            "this node's rows have changed since the alignment: start the run again in another "
            "folder"
        )
    return found


def _ids(data: NodeData, config: RunConfig) -> tuple[str, Sequence[bytes]]:
    """The SHA-256 of the file, and the hashes of its ids."""
    assert data.rows is not None
    file = file_sha256(data.rows)
    held = PartyFile.passive(
        data.rows, data.id or str(config.columns.id), config.columns.label or ""
    )
    (own,) = digests([held.ids], [str(data.rows)])
    if file != file_sha256(data.rows) or len(own) > MOST:
        raise CheckpointError(
            f"{data.rows} changed while it was read, or has more than {MOST:,} rows"
        )
    return file, own


def _roles(
    matching: _MatchingState, rest: Sequence[memoryview]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The aligned, unaligned and test rows, from positions among the common ids; raises
    MessageError if invalid.
    """
    if len(rest) < 2 or sum(map(len, rest[2:])) > 32 * min(matching.theirs, len(matching.own)):
        raise MessageError("an alignment must have positions, a key, and the marks of common ids")
    rows = announced_rows([bytes(part) for part in rest[1:]], matching.own)
    found: Any = message.decode(rest[0], _LARGE)
    message.check_like(found, dict.fromkeys(_ROLES, object))
    held = [found[name] for name in _ROLES]
    if not all(
        isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.dim() == 1 for x in held
    ):
        raise MessageError("positions must be whole numbers")
    aligned, test, dealt, unused = (x.numpy() for x in held)
    people = np.concatenate([aligned, test, dealt, unused])
    if len(np.unique(people)) < len(people) or not len(aligned) or not len(test):
        raise MessageError(
            "a position must have one role, and some must be aligned and some tested"
        )
    if people.min() < 0 or people.max() >= len(rows):
        raise MessageError("positions must be those of common ids")
    others = np.setdiff1d(np.arange(len(matching.own)), rows[people])
    return rows[aligned], np.concatenate([others, rows[dealt]]), rows[test]
