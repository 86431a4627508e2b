"""A coordinator by hand, one call at a time: for what no engine would say."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from typing import Any

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.message import Template, Tree
from fedloom.core.templates import spell
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.remote import payload
from fedloom.remote.hub import NodeConnection, open_hub
from tests.net.processes import Machines

Ask = Callable[[str, bytes, str], bytes]


class Caller:
    """Makes calls of one run at one node.

    Args:
        ask: makes a call of a kind, with a body, under an id.
    """

    def __init__(
        self, ask: Ask, run: RunConfig, party: int = 0, members: Mapping[str, str] | None = None
    ) -> None:
        self._ask = ask
        self._config = for_nodes(build(run)).model_dump_json()
        self._party = party
        self._members = dict(members or {})
        self.run, self.start = secrets.token_hex(16), time_ns()

    def raw(self, kind: str, body: bytes, id: str | None = None) -> bytes:
        return self._ask(kind, body, id or secrets.token_hex(16))

    def open(self, *, resume: bool = False) -> dict[str, Any]:
        """Begin the run; what the node says."""
        answer: dict[str, Any] = payload.unpack(self.raw("open", self.opening(resume=resume)))[0]
        return answer

    def opening(self, *, resume: bool = False) -> bytes:
        """The body of the call that begins the run."""
        head: Tree = {
            "protocol": payload.PROTOCOL,
            "version": __version__,
            "run": self.run,
            "start": self.start,
            "party": self._party,
            "members": self._members,
            "config": self._config,
            "resume": resume,
            "answers": 0,
        }
        return payload.pack(head)

    def restore(self, round: int) -> None:
        """Let the party go back to where it was after so many rounds."""
        self.raw("restore", payload.pack({"run": self.run, "start": self.start, "round": round}))

    def body(
        self,
        call: int,
        method: str = "update",
        *,
        t: int = 0,
        leave: bool = False,
        expect: Template = object,
        reply_refs: Mapping[str, Any] | None = None,
        deadline: float = 60.0,
        kept: Sequence[int] = (),
        look: bool = False,
        **arguments: Any,
    ) -> bytes:
        """Of a call of a method in round t, or a look from outside."""
        shared = arguments if look else {"t": t, **arguments}
        head: Tree = {
            "run": self.run,
            "start": self.start,
            "call": call,
            "round": -1 if look else t,
            "method": method,
            "tasks": [
                {"each": None, "reply_refs": dict(reply_refs or {}), "fault": None, "seed": call}
            ],
            "leave": leave,
            "expect": spell(expect),
            "kept": list(kept),
            "floor": 0,
            "deadline": deadline,
            "mask": None,
        }
        return payload.pack(head, message.encode(shared))

    def do(self, *args: Any, id: str | None = None, **more: Any) -> bytes:
        """The answer to such a call."""
        return self.raw("do", self.body(*args, **more), id)

    def sha256(self) -> str:
        """Of the party's state, as the node says it."""
        which = payload.pack({"run": self.run, "start": self.start})
        found: str = payload.unpack(self.raw("digest", which))[0]["sha256"]
        return found

    def close(self) -> None:
        head: Tree = {"run": self.run, "start": self.start, "finished": True}
        self.raw("close", payload.pack(head))


class Transport:
    """A coordinator's hub of a test's own, which hears all nodes and calls one."""

    def __init__(self, field: Machines, party: int = 0, name: str = "coordinator") -> None:
        self._loop = field.loop
        self.came_or_went: list[bool] = []
        names = [node.name for node in field.nodes]

        def changed(who: str, up: bool) -> None:
            if who == names[party]:
                self.came_or_went.append(up)

        async def reached() -> list[NodeConnection]:
            listen, credentials = (
                field.addresses[name],
                field.credentials("second" if name == "second" else "coordinator"),
            )
            made = await open_hub(
                names, "0" * 32, changed, listen=listen, credentials=credentials, wait=30
            )
            await asyncio.gather(*(line.wait(60) for line in made))
            return made

        self.lines = self._loop.run(reached(), 120)
        self.line = self.lines[party]
        field.hubs.append(self)

    def ask(self, kind: str, body: bytes, id: str) -> bytes:
        answer: bytes = self._loop.run(self.line.ask(kind, body, deadline=60.0), 90)
        return answer

    def close(self) -> None:
        for line in self.lines:
            self._loop.run(line.close())
