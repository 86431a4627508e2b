"""`[columns] own`: whose rows are the same person's, found out with the nodes before a run is built.

The coordinator is the active party: it has labels and ids in its own file. It asks each node through a private set
intersection which of its ids are there, draws who of those whom all have is aligned and who is tested, and tells each
node by places in the order that both know. What is found is kept in the run's folder, as row numbers: a run that is
resumed matches nobody again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import ConfigError, DataError, EngineError, MessageError
from fedloom.core.message import Tree
from fedloom.data.alignment import MOST, learnt_privately, shard_count, shards
from fedloom.data.alignment.ids import digests
from fedloom.data.alignment.psi import PSIClient, announce, follow, library
from fedloom.data.party_files import PartyFile
from fedloom.data.vertical_split import VerticalSplit, split_parties
from fedloom.experiment.config import RunConfig
from fedloom.experiment.node_party import sent
from fedloom.experiment.private import Matched, PrivateData, file_sha256
from fedloom.remote import payload, rpc_errors
from fedloom.remote.coordinator import NodeSet, check_node_count, keep_start, next_start, run_id
from fedloom.remote.rpc_errors import CallRefused, mismatch

if TYPE_CHECKING:
    from fedloom.remote.connections import Connection, NodeAddress

FILE: Final = ".matching"
"""In a run's folder. Until the run is under way it is the only file there, and makes no run of it."""
PARTING: Final = 5.0
"""Seconds to tell a node that a matching has come to nothing."""
TRIES: Final = 5
"""How often a node may be lost in a matching."""
_LARGE: Final = message.Limits(max_bytes=1 << 32)
_log = logging.getLogger("fedloom")
T = TypeVar("T")


def match(run: RunConfig, folder: Path | None, files: PrivateData, nodes: NodeSet, *, resume: bool) -> PrivateData:
    """The coordinator's files, with what was found out about their rows.

    Args:
        run: whose columns are its parties' own.
        folder: of the run; None for one that will not be resumed.
        files: the coordinator's own.
        nodes: where the others are.
        resume: whether it may have been found before.

    Raises:
        ConfigError: a file is missing, or a node takes no part.
        DataError: a file can't be used, or has changed since; or there are too few people whom all have.
        EngineError: a node can't be reached, or answers what can't be.
        CheckpointError: what was found before is torn.
    """
    if files.rows is None:
        raise ConfigError(
            f"data.{run.data.name}: name the file with labels and columns of party 0 in the federation's file, as rows"
        )
    check_node_count(run.data.clients - 1, len(nodes.addresses), 1)
    method, cfg, _ = run.resolve()
    id, before = run_id(run, cfg, nodes.own, folder), None
    try:
        sha256 = file_sha256(files.rows)
    except OSError as error:
        raise DataError(f"{files.rows} can't be read ({error.strerror}).") from None
    if folder is not None and resume:
        before = Matched.load(folder / FILE)
    if before is not None and before.run == id:
        if before.file != sha256:
            raise DataError(
                f"{files.rows} has changed since its people were matched for this run: put the file back that there "
                "was, or begin the run anew in another folder."
            )
        return replace(files, matched=before)
    held = PartyFile.active(files.rows, files.id or str(run.columns.id), run.columns.label or "")
    (own,) = digests([held.ids], [str(files.rows)])
    if run.columns.backend == "openmined":
        library()
    meeting = _MatchingSession(run, sent(run, method, None).model_dump_json(), id, nodes, own, next_start(folder))
    found = _in_a_loop(meeting.hold(held, sha256))
    if folder is not None:
        keep_start(folder, found.start)
        found.save(folder / FILE)
    return replace(files, matched=found)


@dataclass
class _RemoteParty:
    """A node that is matched with.

    Attributes:
        rows: how many ids it says it has.
        cuts: the number of shards.
        places: in our own list, of ids that it has too.
        lost: whether it has forgotten what it was asked.
    """

    party: int
    node: NodeAddress
    link: Connection
    rows: int = 0
    cuts: int = 1
    places: frozenset[int] = frozenset()
    lost: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _MatchingSession:
    """The active party's side of a matching with all nodes.

    Args:
        run: its config, and as nodes are sent it.
        id: of the run, at nodes.
        nodes: where they are.
        own: the hashes of our ids, in the order of the file.
        start: see `next_start`.
    """

    def __init__(self, run: RunConfig, config: str, id: str, nodes: NodeSet, own: Sequence[bytes], start: int) -> None:
        self._run, self._config, self._id, self._nodes, self._own = run, config, id, nodes, own
        self._start = start
        self._numbers = count()

    async def hold(self, held: PartyFile, sha256: str) -> Matched:
        """All of it; what is left for us."""
        guests: list[_RemoteParty] = []
        try:
            for party, node in enumerate(self._nodes.addresses, 1):
                link = await self._nodes.wire.connect(node, lambda *_: None)
                link.run = self._id
                guests.append(_RemoteParty(party, node, link))
            await self._all(guests, self._find)
            common = sorted(frozenset.intersection(*(guest.places for guest in guests)))
            key, mark = secrets.token_bytes(32), secrets.token_hex(16)
            marks = await asyncio.to_thread(announce, key, [self._own[place] for place in common])
            mine = await asyncio.to_thread(follow, marks, self._own)
            roles = self._roles(held.labels, mine)
            labelled = held.labels[mine] >= 0
            told = [_told(roles, guest.party, labelled) for guest in guests]
            head: dict[str, Tree] = {"mark": mark, "classes": len(held.classes)}

            async def keep(guest: _RemoteParty) -> None:
                await self._keep(guest, head, [message.encode(told[guest.party - 1], _LARGE), *marks])

            await self._all(guests, keep)
            self._tell(guests)
        except BaseException:
            goodbyes = (
                self._ask(guest, "leave", {}, deadline=PARTING) for guest in guests if guest.rows and guest.link.up
            )
            await asyncio.gather(*goodbyes, return_exceptions=True)
            raise
        finally:
            await asyncio.gather(*(guest.link.close() for guest in guests), return_exceptions=True)
        others = [
            guest.rows - int(labelled.sum()) + len(tree["dealt"]) for guest, tree in zip(guests, told, strict=True)
        ]
        rows = roles.aligned[0], roles.unaligned[0], roles.test[0]
        return Matched(self._id, "", self._start, 0, mark, sha256, len(held.classes), *rows, tuple(others))

    def _roles(self, y: np.ndarray, mine: np.ndarray) -> VerticalSplit:
        """Who is aligned, tested, or left to one party: our own rows, and of each other party places in `mine`.

        Who is tested is drawn class by class. So that nobody who knows the seed can tell classes from it, people then
        stand in an order that nobody knows, and the draw has another seed. Otherwise they stand as in our file.
        """
        secret, data = self._nodes.secret_draw, self._run.data
        order = np.argsort(mine)
        if secret:
            order = np.array(SystemRandom().sample(range(len(mine)), len(mine)), dtype=np.int64)
        others = self._run.data.clients - 1
        return split_parties(
            [mine[order], *[order] * others],
            [y, *[y[mine]] * others],
            seed=secrets.randbits(32) if secret else self._run.seed,
            aligned=self._run.columns.aligned,
            test_fraction=data.test_fraction,
            test_rows=data.test_rows,
            balanced=False,
        )

    async def _find(self, guest: _RemoteParty) -> None:
        """Which of our ids a node has."""
        begin: dict[str, Tree] = {"protocol": payload.PROTOCOL, "version": __version__, "party": guest.party}
        begin |= {"config": payload.cut(self._config), "rows": len(self._own)}
        head, _ = await self._ask(guest, "begin", begin, like={"rows": int})
        if not 1 <= head["rows"] <= MOST:
            raise MessageError(f"a node has 1 to {MOST:,} ids")
        guest.rows = head["rows"]
        if self._run.columns.backend == "plain":
            _, rest = await self._ask(guest, "ids", {})
            shown = bytes(rest[0]) if len(rest) == 1 else b""
            if len(shown) != 32 * guest.rows:
                raise MessageError("a node must show as many ids as it says it has")
            theirs = {shown[start : start + 32] for start in range(0, len(shown), 32)}
            places = {place for place, digest in enumerate(self._own) if digest in theirs}
        else:
            guest.cuts, places = shard_count(len(self._own), guest.rows), set()
            for number, mine in enumerate(shards(self._own, guest.cuts)):
                client = PSIClient([self._own[place] for place in mine], most=guest.rows)
                request = await asyncio.to_thread(client.request)
                _, rest = await self._ask(guest, "shard", {"shard": number}, request)
                if len(rest) != 2:
                    raise MessageError("a node answers a shard by two messages")
                found = await asyncio.to_thread(client.intersection, bytes(rest[0]), bytes(rest[1]))
                places |= {mine[place] for place in found}
        if guest.lost and guest.places != places:
            raise mismatch("its rows have changed while they were matched")
        guest.places = frozenset(places)

    async def _keep(self, guest: _RemoteParty, head: Mapping[str, Tree], rest: Sequence[bytes]) -> None:
        """Tell a node which of its rows are whose. One that has forgotten is matched with again."""
        if guest.lost:
            await self._find(guest)
            guest.lost = False
        try:
            await self._ask(guest, "keep", head, *rest)
        except CallRefused as why:
            guest.lost = why.code == rpc_errors.UNKNOWN
            raise

    async def _ask(
        self,
        guest: _RemoteParty,
        step: str,
        head: Mapping[str, Tree],
        *rest: bytes,
        like: Any = object,
        deadline: float | None = None,
    ) -> tuple[Any, list[memoryview]]:
        """A step at one node."""
        whole: Tree = {"run": self._id, "start": self._start, "step": step, **head}
        body = payload.pack(whole, *rest)
        call = f"{self._id}/{self._start}/match/{next(self._numbers)}"
        answer = await guest.link.ask("match", body, id=call, deadline=deadline or self._nodes.waiting.call)
        return payload.unpack(answer, like)

    async def _all(self, guests: Sequence[_RemoteParty], work: Callable[[_RemoteParty], Awaitable[None]]) -> None:
        """Do something with all nodes at the same time; whatever keeps them from it is told at once."""
        ends = await asyncio.gather(*(self._patiently(g, partial(work, g)) for g in guests), return_exceptions=True)
        away, wrong = [], []
        for guest, end in zip(guests, ends, strict=True):
            name = guest.node.name
            if isinstance(end, CallRefused) and end.code == rpc_errors.UNREACHABLE:
                away.append(f"{name} at {guest.link.where}: {guest.link.problem or 'no answer'}")
            elif isinstance(end, CallRefused):
                wrong.append(f"{name} takes no part: {end.words}")
            elif isinstance(end, MessageError):
                wrong.append(f"what {name} answers when rows are matched can't be used ({end}): is it of this version?")
            elif isinstance(end, BaseException):
                raise end
        if away:
            raise EngineError("\n".join(["these nodes can't be reached; is each one running?", *away]))
        if wrong:
            raise ConfigError("\n".join(wrong))

    async def _patiently(self, guest: _RemoteParty, work: Callable[[], Awaitable[None]]) -> None:
        """Do something with a node, again and from the beginning where it was away, or restarted, or busy."""
        loop, patience, lost = asyncio.get_running_loop(), self._nodes.waiting.start, 0
        end = loop.time() + patience
        while True:
            if not await guest.link.wait(max(0.0, end - loop.time())):
                raise CallRefused(rpc_errors.UNREACHABLE, "no sign of life")
            began = loop.time()
            try:
                return await work()
            except CallRefused as why:
                if loop.time() - began > patience:
                    end = loop.time() + patience
                lost += why.code in (rpc_errors.UNREACHABLE, rpc_errors.UNKNOWN)
                again = why.code in (rpc_errors.UNREACHABLE, rpc_errors.UNKNOWN, rpc_errors.TAKEN) and lost < TRIES
                if not again or loop.time() >= end:
                    raise
                _log.warning("matching with %s begins again: %s", guest.node.name, why.words)
            await asyncio.sleep(0.5)

    def _tell(self, guests: Sequence[_RemoteParty]) -> None:
        """Write down what each side has learnt."""
        names = ["the coordinator", *(guest.node.name for guest in guests)]
        if self._run.columns.backend == "openmined":
            said = learnt_privately(names, [guest.cuts for guest in guests])
        else:
            said = [
                f"The coordinator was shown a hash of every id of {name}, and can try out any id." for name in names[1:]
            ]
        for sentence in said:
            _log.info("alignment: %s", sentence)


def _told(roles: VerticalSplit, party: int, labelled: np.ndarray) -> dict[str, Any]:
    """What a node is told: places, in the announced order, of those who are aligned, tested, left to it alone, or
    unused there. Anybody else whom all have has no label."""
    aligned, test, rest = roles.aligned[party], roles.test[party], roles.unaligned[party]
    dealt = rest[labelled[rest]]
    unused = np.setdiff1d(np.flatnonzero(labelled), np.concatenate([aligned, test, dealt]))
    held = {"aligned": aligned, "test": test, "dealt": dealt, "unused": unused}
    return {name: torch.from_numpy(places) for name, places in held.items()}


def _in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """What comes of some work, in an asyncio loop of its own: this thread may have one already."""
    begun: dict[str, Any] = {}

    async def whole() -> T:
        begun.update(loop=asyncio.get_running_loop(), task=asyncio.current_task())
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="fedloom-match") as thread:
        future = thread.submit(lambda: asyncio.run(whole()))
        try:
            return future.result()
        except BaseException:
            if begun and not future.done():
                begun["loop"].call_soon_threadsafe(begun["task"].cancel)
            raise
