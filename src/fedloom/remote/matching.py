"""`[columns] own`: align the rows of the coordinator and of nodes before a run is built.

The coordinator is the active party, with labels and ids in its own file. By private set
intersection it learns which of its ids each node has. It draws aligned and test rows among the ids
that all parties have, and sends each node their positions in an order that both know. The result is
kept in the run's folder as row numbers, so a resumed run does not repeat the alignment.

The coordinator's side is `_MatchingSession`, the node's `fedloom.remote.node.matching`. The steps
at each node, all nodes at the same time:

    begin   the run's config and the number of ids goes; the node's number of ids comes
    shard   openmined: of each shard a blinded request of ids goes, the answer comes: the ids that
            both have
    ids     plain, in place of shards: the hashes of all of the node's ids come
    keep    the marks of all common ids in the announced order, and the node's roles by their
            positions in it
    leave   in place of keep, if the alignment failed

Three orders of rows are in use. `places` are positions in the coordinator's file, whose ids are
`own`. The announced order is that of `marks`, keyed hashes of the common ids, sorted: a node finds
its own rows by them, and learns which are common. Row numbers are those of a party's own file.
"""

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
from fedloom.data.alignment import MOST, learned_privately, shard_count, shards
from fedloom.data.alignment.ids import digests
from fedloom.data.alignment.psi import PSIClient, announce, announced_rows, library
from fedloom.data.party_files import PartyFile
from fedloom.data.vertical_split import VerticalSplit, split_parties
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.node_party import config_for_nodes
from fedloom.experiment.plan.private import Matched, PrivateData, file_sha256
from fedloom.remote import loop, payload, rpc_errors
from fedloom.remote.connections import NodeSet
from fedloom.remote.rpc_errors import CallRefused, mismatch
from fedloom.remote.starts import check_node_count, keep_start, next_start, run_id

if TYPE_CHECKING:
    from fedloom.remote.connections import Connection

FILE: Final = ".matching"
"""A file in the run's folder; the folder is no run until it has others."""
PARTING: Final = 5.0
"""Seconds to cancel an alignment at a node."""
TRIES: Final = 5
"""Limit of lost connections to a node in an alignment."""
_LARGE: Final = message.Limits(max_bytes=1 << 32)
_log = logging.getLogger("fedloom")
T = TypeVar("T")


def match(
    run: RunConfig, folder: Path | None, files: PrivateData, nodes: NodeSet, *, resume: bool
) -> PrivateData:
    """The coordinator's files, with the alignment of their rows.

    Args:
        run: a run whose parties hold different columns.
        folder: of the run; None for one that will not be resumed.
        files: the coordinator's own.
        nodes: the other parties.
        resume: whether an earlier alignment may be used.

    Raises:
        ConfigError: a file is missing, or a node refuses.
        DataError: a file is invalid or has changed since the alignment, or there are too few common
            ids.
        EngineError: a node is unreachable.
        CheckpointError: the earlier alignment's file is damaged.
    """
    if files.rows is None:
        raise ConfigError(
            f"data.{run.data.name}: set rows to the file of the active party (party 0) in the "
            "federation's file"
        )
    check_node_count(run.data.clients - 1, len(nodes.names), 1)
    method, cfg, _ = run.resolve()
    id, before = run_id(run, cfg, nodes.own, folder), None
    try:
        sha256 = file_sha256(files.rows)
    except OSError as error:
        raise DataError(f"{files.rows} cannot be read ({error.strerror}).") from None
    if folder is not None and resume:
        before = Matched.load(folder / FILE)
    if before is not None and before.run == id:
        if before.file != sha256:
            raise DataError(
                f"{files.rows} has changed since its rows were aligned for this run: restore the "
                "file, or start the run again in another folder."
            )
        return replace(files, matched=before)
    held = PartyFile.active(
        files.rows, files.id or str(run.columns.id), run.columns.label or "", run.data.columns
    )
    (own,) = digests([held.ids], [str(files.rows)])
    if run.columns.backend == "openmined":
        library()
    session = _MatchingSession(
        run,
        config_for_nodes(run, method, None).model_dump_json(),
        id,
        nodes,
        own,
        next_start(folder),
    )
    found = _in_a_loop(session.run(held, sha256))
    if folder is not None:
        keep_start(folder, found.start)
        found.save(folder / FILE)
    return replace(files, matched=found)


@dataclass
class _RemoteParty:
    """A node in an alignment.

    Attributes:
        rows: number of ids that it reports.
        cuts: the number of shards.
        places: positions in the coordinator's list of common ids.
        lost: whether the node lost this alignment.
    """

    party: int
    name: str
    link: "Connection"
    rows: int = 0
    cuts: int = 1
    places: frozenset[int] = frozenset()
    lost: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _MatchingSession:
    """The active party's side of an alignment with all nodes.

    Args:
        run: its config.
        config: the config that nodes receive, as text.
        id: of the run, at nodes.
        nodes: the other parties.
        own: hashes of the coordinator's ids, in the order of the file.
        start: see `next_start`.
    """

    def __init__(
        self, run: RunConfig, config: str, id: str, nodes: NodeSet, own: Sequence[bytes], start: int
    ) -> None:
        self._run, self._config, self._id, self._nodes, self._own = run, config, id, nodes, own
        self._start = start
        self._numbers = count()

    async def run(self, held: PartyFile, sha256: str) -> Matched:
        """Align with all nodes; returns the coordinator's rows.

        Args:
            held: the coordinator's file.
            sha256: of its content, by which a later resume sees that it has not changed.
        """
        parties: list[_RemoteParty] = []
        try:
            # Which of the coordinator's ids each node has. The coordinator itself is party 0.
            names = self._nodes.names
            links = await self._nodes.transport.connect(names, self._id, lambda *_: None)
            parties += map(_RemoteParty, range(1, len(names) + 1), names, links)
            await self._all(parties, self._find)

            # Announce the ids that all have, by marks with a new key, and find the own rows in this
            # order as a node does. `mark` names the alignment, so that a party can tell two apart.
            common = sorted(frozenset.intersection(*(party_node.places for party_node in parties)))
            key, mark = secrets.token_bytes(32), secrets.token_hex(16)
            marks = await asyncio.to_thread(announce, key, [self._own[place] for place in common])
            mine = await asyncio.to_thread(announced_rows, marks, self._own)

            # Draw roles. `parts` (rows,) are classes, or ranges of a number; -1 without a label.
            parts, _ = held.strata
            roles, labeled = self._roles(parts, mine), parts[mine] >= 0
            positions = [_positions(roles, party_node.party, labeled) for party_node in parties]
            head: dict[str, Tree] = {"mark": mark, "classes": len(held.classes)}

            async def keep(party_node: _RemoteParty) -> None:
                await self._keep(
                    party_node,
                    head,
                    [message.encode(positions[party_node.party - 1], _LARGE), *marks],
                )

            await self._all(parties, keep)
            self._log_learned(parties)
        except BaseException:
            # Tell the nodes that have begun, which would else wait for their lease to end.
            goodbyes = (
                self._ask(party_node, "leave", {}, deadline=PARTING)
                for party_node in parties
                if party_node.rows and party_node.link.up
            )
            await asyncio.gather(*goodbyes, return_exceptions=True)
            raise
        finally:
            await asyncio.gather(
                *(party_node.link.close() for party_node in parties), return_exceptions=True
            )

        # the unaligned rows of each node: all but the common ones with a label, and what it was
        # dealt
        others = [
            party_node.rows - int(labeled.sum()) + len(tree["dealt"])
            for party_node, tree in zip(parties, positions, strict=True)
        ]
        rows = roles.aligned[0], roles.unaligned[0], roles.test[0]
        return Matched(
            self._id, "", self._start, 0, mark, sha256, len(held.classes), *rows, tuple(others)
        )

    def _roles(self, y: np.ndarray, mine: np.ndarray) -> VerticalSplit:
        """The aligned, test and unaligned rows: row numbers for the coordinator, positions in
        `mine` for the others.

        Test rows are drawn by class, or by parts of a number's range. With `secret_draw`, the order
        of rows and the seed of the draw are secret, so that nobody who knows the run's seed can
        infer classes. Otherwise rows keep the order of the file.
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
            test_fraction=data.test_share,
            test_rows=data.test_rows,
            balanced=False,
            validation=data.validation,
        )

    async def _find(self, party_node: _RemoteParty) -> None:
        """Find which of the coordinator's ids a node has: `places`, and `rows` and `cuts` on the
        way. A node that lost the alignment is asked again, and must answer the same.
        """
        begin: dict[str, Tree] = {
            "protocol": payload.PROTOCOL,
            "version": __version__,
            "party": party_node.party,
        }
        begin |= {"config": payload.cut(self._config), "rows": len(self._own)}
        head, _ = await self._ask(party_node, "begin", begin, like={"rows": int})
        if not 1 <= head["rows"] <= MOST:
            raise MessageError(f"a node must have 1 to {MOST:,} ids")
        party_node.rows = head["rows"]

        # plain: 32 bytes, the SHA-256, of each of its ids, one after the other
        if self._run.columns.backend == "plain":
            _, rest = await self._ask(party_node, "ids", {})
            shown = bytes(rest[0]) if len(rest) == 1 else b""
            if len(shown) != 32 * party_node.rows:
                raise MessageError("a node must send as many ids as it reports")
            theirs = {shown[start : start + 32] for start in range(0, len(shown), 32)}
            places = {place for place, digest in enumerate(self._own) if digest in theirs}

        # openmined: both sides cut their ids by their hashes into as many shards, each matched on
        # its own; `mine` are the places of a shard's ids. The reply has two messages: the node's
        # ids of the shard under its key, and the request under both keys.
        else:
            party_node.cuts, places = shard_count(len(self._own), party_node.rows), set()
            for number, mine in enumerate(shards(self._own, party_node.cuts)):
                client = PSIClient([self._own[place] for place in mine], most=party_node.rows)
                request = await asyncio.to_thread(client.request)
                _, rest = await self._ask(party_node, "shard", {"shard": number}, request)
                if len(rest) != 2:
                    raise MessageError("a node must answer a shard by two messages")
                found = await asyncio.to_thread(client.intersection, bytes(rest[0]), bytes(rest[1]))
                places |= {mine[place] for place in found}
        if party_node.lost and party_node.places != places:
            raise mismatch("its rows changed during the alignment")
        party_node.places = frozenset(places)

    async def _keep(
        self, party_node: _RemoteParty, head: Mapping[str, Tree], rest: Sequence[bytes]
    ) -> None:
        """Send a node the roles of its rows; a node that lost the alignment repeats it first."""
        if party_node.lost:
            await self._find(party_node)
            party_node.lost = False
        try:
            await self._ask(party_node, "keep", head, *rest)
        except CallRefused as error:
            party_node.lost = error.code == rpc_errors.UNKNOWN
            raise

    async def _ask(
        self,
        party_node: _RemoteParty,
        step: str,
        head: Mapping[str, Tree],
        *rest: bytes,
        like: Any = object,
        deadline: float | None = None,
    ) -> tuple[Any, list[memoryview]]:
        """Make one step at a node."""
        whole: Tree = {"run": self._id, "start": self._start, "step": step, **head}
        body = payload.pack(whole, *rest)
        call = f"{self._id}/{self._start}/match/{next(self._numbers)}"
        answer = await party_node.link.ask(
            "match", body, id=call, deadline=deadline or self._nodes.timeouts.call
        )
        return await asyncio.to_thread(payload.unpack, answer, like)

    async def _all(
        self, parties: Sequence[_RemoteParty], work: Callable[[_RemoteParty], Awaitable[None]]
    ) -> None:
        """Run a step with all nodes at the same time, and report all problems together."""
        ends = await asyncio.gather(
            *(self._patiently(g, partial(work, g)) for g in parties), return_exceptions=True
        )
        away, wrong = [], []
        for party_node, end in zip(parties, ends, strict=True):
            name = party_node.name
            if isinstance(end, CallRefused) and end.code == rpc_errors.UNREACHABLE:
                away.append(f"{name}: {party_node.link.problem or 'no answer'}")
            elif isinstance(end, CallRefused):
                wrong.append(f"{name} refuses: {end.words}")
            elif isinstance(end, MessageError):
                wrong.append(
                    f"{name} sent an invalid answer ({end}); use the same version of fedloom there"
                )
            elif isinstance(end, BaseException):
                raise end
        if away:
            raise EngineError(
                "\n".join(
                    [
                        "unreachable nodes: start fedloom node there; its log says why it cannot "
                        "connect",
                        *away,
                    ]
                )
            )
        if wrong:
            raise ConfigError("\n".join(wrong))

    async def _patiently(
        self, party_node: _RemoteParty, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a step with a node, and repeat it from the start if the node was unreachable,
        restarted or busy.
        """
        loop, patience, lost = asyncio.get_running_loop(), self._nodes.timeouts.start, 0
        end, told = loop.time() + patience, False
        while True:
            if not await party_node.link.wait(max(0.0, end - loop.time())):
                raise CallRefused(rpc_errors.UNREACHABLE, "unreachable")
            began = loop.time()
            try:
                return await work()
            except CallRefused as error:
                if loop.time() - began > patience:
                    end = loop.time() + patience
                lost += error.code in (rpc_errors.UNREACHABLE, rpc_errors.UNKNOWN)
                if error.code == rpc_errors.PENDING:  # a person decides, perhaps tomorrow
                    if not told:
                        _log.warning("waiting for %s: %s", party_node.name, error.words)
                    told, end = True, loop.time() + patience
                    self._nodes.timeouts.check_stop()
                    await asyncio.sleep(0.5)
                    continue
                again = (
                    error.code in (rpc_errors.UNREACHABLE, rpc_errors.UNKNOWN, rpc_errors.TAKEN)
                    and lost < TRIES
                )
                if not again or loop.time() >= end:
                    raise
                _log.warning("alignment with %s starts again: %s", party_node.name, error.words)
            await asyncio.sleep(0.5)

    def _log_learned(self, parties: Sequence[_RemoteParty]) -> None:
        """Log what each side has learned."""
        names = ["the coordinator", *(party_node.name for party_node in parties)]
        if self._run.columns.backend == "openmined":
            sentences = learned_privately(names, [party_node.cuts for party_node in parties])
        else:
            sentences = [
                f"The coordinator received a hash of every id of {name}, and can guess ids."
                for name in names[1:]
            ]
        for sentence in sentences:
            _log.info("alignment: %s", sentence)


def _positions(roles: VerticalSplit, party: int, labeled: np.ndarray) -> dict[str, Any]:
    """A node's aligned, test, unaligned (`dealt`) and unused rows, as positions in the announced
    order. Other common rows have no label.
    """
    aligned, test, rest = roles.aligned[party], roles.test[party], roles.unaligned[party]
    dealt = rest[labeled[rest]]
    unused = np.setdiff1d(np.flatnonzero(labeled), np.concatenate([aligned, test, dealt]))
    held = {"aligned": aligned, "test": test, "dealt": dealt, "unused": unused}
    return {name: torch.from_numpy(places) for name, places in held.items()}


def _in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run work in a new asyncio loop in another thread, as this thread may have a loop already."""
    begun: dict[str, Any] = {}

    async def whole() -> T:
        begun.update(loop=asyncio.get_running_loop(), task=asyncio.current_task())
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="fedloom-match") as thread:
        future = thread.submit(lambda: loop.run(whole()))
        try:
            return future.result()
        except BaseException:
            if begun and not future.done():
                begun["loop"].call_soon_threadsafe(begun["task"].cancel)
            raise
