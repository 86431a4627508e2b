"""A node's part in secure sums: its keys, checks and masks. See `fedloom.protect.masks` for the
protocol, with its cryptography in `SumMember`; here is what a node refuses to add, and with whom.

`NodeService` gives a run's `SumKeeper` each step that the coordinator (`fedloom.remote.secure_sum`)
asks for; the vector itself is the reply of a party's method, which `task_runner` has `masked`. A
sum at a node goes through these states:

    (none) --keys--> begun --shares--> shared --deliver--> dealt --mask--> sent --agree--> signed
                       |                                                                     |
                       |                                                                   open
                       |                                                                     v
                       +---list---> listed ------------------------mask------------------> over

    keys      the node's public keys; also whom it does not add with now (`Participants`)
    shares    the list of all keys comes; shares of this node's secrets go, sealed
    deliver   the shares that others sealed for this node come
    mask      a call of the party's method, whose reply leaves masked; `SumRecord` has its arguments
    agree     the names come whose vectors arrived; this node signs them
    open      the signatures come; shares go: of the own masks of those who arrived, of the mask
              keys of the others
    list      in place of shares, where the sum counts only if it is whole: nothing is ever opened

Each but `deliver` may be taken once, in this order; otherwise it is refused, and nothing secret
leaves. A restart drops a sum, and so do `MOST_SUMS` later ones: this node is then lost for it,
whatever its state.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fedloom.core import fixed_point, message
from fedloom.core.engine import NOT_FINITE, NOT_READY, WRONG_SHAPE, Failure, reply_problem
from fedloom.core.errors import MessageError
from fedloom.core.message import Template, Tree
from fedloom.core.templates import unspell
from fedloom.protect.masks import Keys, SumMember, question
from fedloom.remote import payload
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.lines import Lines
from fedloom.remote.rpc_errors import refused

FILE: Final = "sums.jsonl"
"""A node's record."""
SETS: Final = "sets.jsonl"
"""A run's record."""
MOST_SUMS: Final = 4
"""Sums of one run that a node remembers; a coordinator takes one after the other."""
REQUEST: Final = {
    "run": str, "start": int, "sum": str, "step": str, "names": object, "round": int, "method": str,
}  # fmt: skip
"""The fields of a step, whose further parts belong to `names`: see `SumKeeper.step`."""
MASK: Final = {"sum": str, "weight": str}
"""The fields of a call whose reply is masked: the sum, and the name of the weight, or ""."""

_NO_ROWS: Final = (NOT_FINITE, NOT_READY, WRONG_SHAPE)
"""Failures that depend on arguments, on the order of calls, or on settings, and on no row."""
_log = logging.getLogger("fedloom.node")


@dataclass
class _Sum:
    """A sum under way.

    Attributes:
        certificates, sealed: certificates and sealed shares by their owners' names.
        round, method: of the call that it is for.
        arguments: their hash, once they were answered.
        whole: whether all nodes of the list must be in it.
    """

    member: SumMember
    round: int
    method: str
    certificates: dict[str, bytes]
    sealed: dict[str, bytes] = field(default_factory=dict)
    arguments: str = ""
    whole: bool = False


class SumRecord:
    """The arguments that a node has answered in secure sums, over all runs, with the nodes of each
    sum: the difference of two sums for equal arguments would be the answer of those in one of them.
    A coordinator can change an argument that changes no answer, such as the round. A line for each,
    in one file.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / FILE)
        self._seen: dict[tuple[str, str], str] | None = None

    def list_once(self, arguments: str, names: Collection[str]) -> None:
        """Record the list of a sum, on disk before the vector is sent, or refuse.

        Args:
            arguments: hash of the method and its arguments.
            names: of the sum's nodes.

        Raises:
            CallRefused: the arguments were answered in a sum of other nodes.
            OSError, ValueError: the record cannot be read or written; nothing may be sent.
        """
        self._once("list", arguments, names)

    def agree_once(self, arguments: str, arrived: Collection[str]) -> None:
        """Record whose vectors are in a sum, on disk before the set is signed, or refuse. Raises as
        `list_once`.
        """
        self._once("set", arguments, arrived)

    def _once(self, what: str, arguments: str, names: Collection[str]) -> None:
        # (list or set, hash of the arguments) -> hash of the names; read when it is first needed
        if self._seen is None:
            self._seen = {(kind, key): nodes for kind, key, nodes in self._lines.read()}
        nodes = message.digest({"names": sorted(names)})[:32]
        if self._seen.get((what, arguments), nodes) != nodes:
            raise refused("this node has answered the same arguments in a sum of other nodes")
        if (what, arguments) not in self._seen:  # disk first: what is not on disk is not answered
            self._lines.append([what, arguments, nodes])
            self._seen[what, arguments] = nodes


class Participants:
    """The nodes of a run's sums, by method: those of the first one. One that was lost returns after
    `quarantine` rounds, so that only few differences of two sums are those of one node.

    Args:
        folder: of the run.
        quarantine: rounds; 0 for none.
    """

    def __init__(self, folder: Path, quarantine: int) -> None:
        self._lines, self._quarantine = Lines(folder / SETS), quarantine
        self._first: dict[str, list[str]] = {}
        # (method, name) -> the round in which it was lost
        self._lost: dict[tuple[str, str], int] = {}
        for line in self._lines.read():
            self._add(*line)

    def unwanted(self, method: str, round: int, names: Collection[str]) -> list[str]:
        """Those of the names that this node does not add with in this round."""
        first = self._first.get(method, names)  # before a method's first sum, anybody
        return [
            name
            for name in names
            if self._quarantine and (name not in first or self._away(method, round, name))
        ]

    def admit(self, method: str, round: int, names: Collection[str]) -> None:
        """Record the nodes of a sum's list, or those whose vectors arrived; whoever of the first
        sum is not among them is lost as of this round.

        Raises:
            CallRefused: this node does not add with one of them in this round.
            OSError: the record cannot be written.
        """
        if unwanted := self.unwanted(method, round, names):
            raise refused(
                f"{unwanted[0]!a} is not in this run's first sum, or was lost in the last "
                f"{self._quarantine} rounds"
            )
        first = self._first.get(method, [*names])
        lost = [name for name in first if name not in names and not self._away(method, round, name)]
        if self._quarantine and (method not in self._first or lost):
            self._lines.append([method, round, first, lost])
            self._add(method, round, first, lost)

    def _add(self, method: str, round: int, first: list[str], lost: list[str]) -> None:
        self._first.setdefault(method, first)
        for name in lost:
            self._lost[method, name] = round

    def _away(self, method: str, round: int, name: str) -> bool:
        lost = self._lost.get((method, name))
        return lost is not None and round <= lost + self._quarantine


class SumKeeper:
    """The secure sums of one run at a node. They live in memory only: a node that was restarted is
    lost for the sum under way, and the others' shares replace it.

    Args:
        config: the node's.
        credentials: its certificate; None for the insecure mode, in which signatures are empty.
        members: the names of the run's other nodes.
        context: of the run and its start, part of every sum's name.
        record: of the sums that this node took part in.
        participants: of the run's sums.
        colluders: of the run: see `threshold`.
        least: the fewest nodes of a sum that the run's method needs.
        past: the hash of what this node was asked before the sum of a round and call: see
            `CallRecord.past`.
        always: whether a reply that cannot be added counts as nothing: that there is none would be
            a message of this node alone.
    """

    def __init__(
        self,
        config: NodeConfig,
        credentials: Credentials | None,
        *,
        members: Mapping[str, str],
        context: str,
        record: SumRecord,
        participants: Participants,
        colluders: int = 0,
        least: int = 0,
        past: Callable[[int, int], str] = lambda round, call: "",
        always: bool = False,
    ) -> None:
        self._own = config.name
        self._credentials = credentials
        self._context = context
        self._record = record
        self._participants, self._colluders = participants, colluders
        self._least, self._past = max(config.min_sum, least), past
        self._allowed = {config.name, *({*config.peers} & {*members.values()})}
        self._sums: dict[str, _Sum] = {}
        self._always, self._most_bytes = always, config.max_message_mb << 20

    def step(self, request: Mapping[str, Any], rest: Sequence[memoryview]) -> bytes:
        """The reply to a step of a sum that is not the masked vector itself.

        Args:
            request: the fields of `REQUEST`; `names` are the nodes that the step is about.
            rest: by step, in the order of `names`: nothing for "keys" and "agree"; four parts of
                each node for "shares" and "list", its three `Keys` and its certificate; one of each
                for "deliver", its sealed share, and "open", its signature.

        Raises:
            MessageError, CallRefused: the step is invalid, or its names are not this node's peers.
        """
        names, parts = request["names"], [bytes(part) for part in rest]

        # whom this node adds with at all, and at least how many
        if not isinstance(names, list) or len({*map(str, names)}) < len(names):
            raise MessageError("the names of a sum must be a list without repetitions")
        for name in names:
            if name not in self._allowed:
                raise refused(
                    f"{name!a} is not a peer of this node in this run, so this node adds nothing "
                    "with it"
                )
        step = request["step"]
        if step in ("shares", "list", "agree") and len(names) < self._least:
            raise refused(
                f"this node adds with at least {self._least} nodes (min_sum), not {len(names)}"
            )

        # "keys" does not refuse unwanted nodes, but names them: the coordinator then leaves out
        # those that most nodes name.
        if step == "keys":
            return self._begin(
                request, self._participants.unwanted(request["method"], request["round"], names)
            )
        now = self._sum(request["sum"])

        # By round and method as the sum began, not as this step says. Whoever was in the list and
        # is not among those who arrived ("agree") is lost.
        if step in ("shares", "list", "agree"):
            self._participants.admit(now.method, now.round, names)

        if len(parts) != (
            4 * len(names) if step in ("shares", "list") else 0 if step == "agree" else len(names)
        ):
            raise MessageError("a step of a sum has another number of parts")
        if step in ("shares", "list"):
            # certificates first: `SumMember` verifies the keys' signatures by them (`_begin`)
            now.certificates.update(zip(names, parts[3::4], strict=True))
            keys = dict(zip(names, map(Keys, parts[0::4], parts[1::4], parts[2::4]), strict=True))
            if step == "list":
                now.member.list_all(keys)
                now.whole = True
                return payload.pack({"names": []})
            sealed = now.member.shares(keys)
            return payload.pack({"names": [*sealed]}, *sealed.values())
        if step == "deliver":
            now.sealed = dict(zip(names, parts, strict=True))
            return payload.pack({"names": []})
        if step == "agree":
            # on disk before it is signed: with a second set the difference would tell of a few
            self._record.agree_once(now.arguments, names)
            return payload.pack({"names": []}, now.member.agree(names))
        if step == "open":
            opened = now.member.open(dict(zip(names, parts, strict=True)))
            del self._sums[request["sum"]]  # the last step: nothing of it is kept
            return payload.pack({"names": [*opened]}, *opened.values())
        raise MessageError(f"a sum has no step {step!a}")

    def masked(
        self, reply: Tree | Failure, request: Mapping[str, Any], shared: Tree
    ) -> Tree | Failure:
        """The masked form of a party's reply, (d,) int64 for d of `fixed_point.size`; or the reason
        why it cannot be added.

        Args:
            reply: of the party.
            request: the head of the call.
            shared: its arguments.

        Raises:
            MessageError: the sum's steps before are missing, or the template has no size.
            CallRefused: these arguments were answered in a sum of other nodes.
        """
        now, weight = self._sum(request["mask"]["sum"]), request["mask"]["weight"] or None
        if (request["round"], request["method"]) != (now.round, now.method):
            raise refused("this sum began for another call")

        # The reply as integers (d,), whose size the coordinator's template says. Where a failure
        # would tell of rows, zeros stand for it.
        expect, names = unspell(request["expect"]), now.member.names
        if 8 * (d := fixed_point.size(expect, weight)) > self._most_bytes:
            raise MessageError(f"a sum of {d} numbers is longer than a message")
        x = _encoded(reply, expect, weight, len(now.certificates))
        if isinstance(x, Failure):
            if not self._always or x.reason in _NO_ROWS:
                return x
            _log.error(
                "a reply to %s counts as nothing in its sum: %s\n%s", now.method, x.reason, x.trace
            )
            x = np.zeros(d, np.uint64)

        # Masks cancel only among nodes that were asked the same, hence the question in them.
        asked = question(
            request["round"], request["method"], weight or "", request["expect"], names, shared,
            self._past(request["round"], request["call"]),
        )  # fmt: skip
        now.arguments = message.digest({"method": request["method"], "shared": shared})
        self._record.list_once(now.arguments, names)
        if now.whole:  # this was the last step; int64, as messages have no uint64
            del self._sums[request["mask"]["sum"]]
            return torch.from_numpy(now.member.mask_all(x, asked).view("int64"))
        return torch.from_numpy(now.member.mask(x, asked, now.sealed).view("int64"))

    def _begin(self, request: Mapping[str, Any], unwanted: Sequence[str]) -> bytes:
        """The reply to "keys": five parts, three `Keys`, the certificate, and the hash of what this
        node was asked before.
        """
        name = request["sum"]
        if name in self._sums:
            raise MessageError("a sum begins once")
        while len(self._sums) >= MOST_SUMS:  # the oldest goes: they come one after the other
            del self._sums[next(iter(self._sums))]
        certificates: dict[str, bytes] = {}  # filled when the list comes: see `step`

        def verify(other: str, text: bytes, signature: bytes) -> bool:
            if self._credentials is None:
                return other in self._allowed
            return self._credentials.signed(other, certificates.get(other, b""), text, signature)

        member = SumMember(
            self._own, f"{self._context}/{name}".encode(), self._sign, verify, self._colluders
        )
        self._sums[name] = _Sum(member, request["round"], request["method"], certificates)
        keys, shown = member.keys(), b"" if self._credentials is None else self._credentials.shown
        past = self._past(request["round"], -1).encode()
        return payload.pack(
            {"names": [*unwanted]}, keys.mask, keys.seal, keys.signature, shown, past
        )

    def _sum(self, name: str) -> _Sum:
        if name not in self._sums:
            raise MessageError("this sum has not begun here, or is over")
        return self._sums[name]

    def _sign(self, text: bytes) -> bytes:
        return b"" if self._credentials is None else self._credentials.sign(text)


def _encoded(
    reply: Tree | Failure, expect: Template, weight: str | None, parties: int
) -> np.ndarray | Failure:
    """The integers of a reply, or why there are none."""
    if (failure := reply_problem(reply, expect)) is not None:
        return failure
    try:
        return fixed_point.encoded(reply, weight, parties)
    except (MessageError, KeyError, TypeError) as error:
        return Failure("not a message", str(error))
