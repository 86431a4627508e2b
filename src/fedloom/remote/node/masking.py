"""A node's part in secure sums: its keys, checks and masks. See `fedloom.protect.masks` for the protocol."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from fedloom.core import fixed_point, message
from fedloom.core.engine import Failure, reply_problem
from fedloom.core.errors import MessageError
from fedloom.core.message import Tree
from fedloom.core.paths import write_atomically
from fedloom.core.templates import unspell
from fedloom.protect.masks import Keys, SumMember, question
from fedloom.remote import payload
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.rpc_errors import refused

FILE: Final = "sums.json"
MOST_SUMS: Final = 4
"""Sums of one run that a node remembers; a coordinator takes one after the other."""
REQUEST: Final = {"run": str, "start": int, "sum": str, "step": str, "names": object}
MASK: Final = {"sum": str, "weight": str}
"""The fields of a call whose reply is masked: the sum, and the name of the weight, or ""."""


@dataclass
class _Sum:
    """A sum under way: certificates and sealed shares by their owners' names."""

    member: SumMember
    certificates: dict[str, bytes]
    sealed: dict[str, bytes] = field(default_factory=dict)


class SumRecord:
    """The arguments that a node has answered in secure sums, over all runs, with the nodes of each sum: the difference
    of two sums for equal arguments would be the answer of those in one of them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def keep(self, arguments: str, names: Sequence[str]) -> None:
        """Record a sum, on disk before its vector is sent.

        Args:
            arguments: hash of the method and its arguments.
            names: of the sum's nodes.

        Raises:
            CallRefused: the arguments were answered in a sum of other nodes.
            OSError, ValueError: the record cannot be read or written; nothing may be sent.
        """
        seen = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        if seen.setdefault(arguments, [*names]) != [*names]:
            raise refused("this node has answered the same arguments in a sum of other nodes")
        write_atomically(self._path, json.dumps(seen, indent=1).encode())


class SumKeeper:
    """The secure sums of one run at a node. They live in memory only: a node that was restarted is lost for the sum
    under way, and the others' shares replace it.

    Args:
        config: the node's.
        credentials: its certificate; None for the insecure mode, in which signatures are empty.
        members: the names of the run's other nodes.
        context: of the run and its start, part of every sum's name.
        record: of the sums that this node took part in.
    """

    def __init__(
        self,
        config: NodeConfig,
        credentials: Credentials | None,
        members: Mapping[str, str],
        context: str,
        record: "SumRecord",
    ) -> None:
        self._own, self._credentials, self._context, self._record = config.name, credentials, context, record
        self._least = config.min_sum
        self._allowed = {config.name, *({*config.peers} & {*members.values()})}
        self._sums: dict[str, _Sum] = {}

    def step(self, request: Mapping[str, Any], rest: Sequence[memoryview]) -> bytes:
        """The reply to a step of a sum that is not the masked vector itself.

        Raises:
            MessageError, CallRefused: the step is invalid, or its names are not this node's peers.
        """
        names, parts = request["names"], [bytes(part) for part in rest]
        if not isinstance(names, list) or len({*map(str, names)}) < len(names):
            raise MessageError("the names of a sum must be a list without repetitions")
        for name in names:
            if name not in self._allowed:
                raise refused(f"{name!a} is not a peer of this node in this run, so this node adds nothing with it")
        step = request["step"]
        if step in ("shares", "agree") and len(names) < self._least:
            raise refused(f"this node adds with at least {self._least} nodes (min_sum), not {len(names)}")
        if step == "keys":
            return self._begin(request["sum"])
        now = self._sum(request["sum"])
        if len(parts) != (4 * len(names) if step == "shares" else 0 if step == "agree" else len(names)):
            raise MessageError("a step of a sum has another number of parts")
        if step == "shares":
            now.certificates.update(zip(names, parts[3::4], strict=True))
            keys = map(Keys, parts[0::4], parts[1::4], parts[2::4])
            sealed = now.member.shares(dict(zip(names, keys, strict=True)))
            return payload.pack({"names": [*sealed]}, *sealed.values())
        if step == "deliver":
            now.sealed = dict(zip(names, parts, strict=True))
            return payload.pack({"names": []})
        if step == "agree":
            return payload.pack({"names": []}, now.member.agree(names))
        if step == "open":
            opened = now.member.open(dict(zip(names, parts, strict=True)))
            del self._sums[request["sum"]]
            return payload.pack({"names": [*opened]}, *opened.values())
        raise MessageError(f"a sum has no step {step!a}")

    def masked(self, reply: Tree | Failure, request: Mapping[str, Any], shared: Tree) -> Tree | Failure:
        """The masked form of a party's reply, (d + 1,) int64; or the reason why it cannot be added.

        Args:
            reply: of the party.
            request: the head of the call.
            shared: its arguments.

        Raises:
            MessageError: the sum's steps before are missing.
            CallRefused: these arguments were answered in a sum of other nodes.
        """
        now, weight = self._sum(request["mask"]["sum"]), request["mask"]["weight"] or None
        expect, names = unspell(request["expect"]), now.member.names
        if (failure := reply_problem(reply, expect)) is not None:
            return failure
        assert not isinstance(reply, Failure)
        try:
            x = fixed_point.encoded(reply, weight, len(now.certificates))
        except (MessageError, KeyError, TypeError) as error:
            return Failure("not a message", str(error))
        asked = question(request["round"], request["method"], weight or "", request["expect"], names, shared)
        self._record.keep(message.digest({"method": request["method"], "shared": shared}), names)
        return torch.from_numpy(now.member.mask(x, asked, now.sealed).view("int64"))

    def _begin(self, name: str) -> bytes:
        if name in self._sums:
            raise MessageError("a sum begins once")
        while len(self._sums) >= MOST_SUMS:
            del self._sums[next(iter(self._sums))]
        certificates: dict[str, bytes] = {}

        def verify(other: str, text: bytes, signature: bytes) -> bool:
            if self._credentials is None:
                return other in self._allowed
            return self._credentials.signed(other, certificates.get(other, b""), text, signature)

        member = SumMember(self._own, f"{self._context}/{name}".encode(), self._sign, verify)
        self._sums[name] = _Sum(member, certificates)
        keys, shown = member.keys(), b"" if self._credentials is None else self._credentials.shown
        return payload.pack({"names": []}, keys.mask, keys.seal, keys.signature, shown)

    def _sum(self, name: str) -> _Sum:
        if name not in self._sums:
            raise MessageError("this sum has not begun here, or is over")
        return self._sums[name]

    def _sign(self, text: bytes) -> bytes:
        return b"" if self._credentials is None else self._credentials.sign(text)
