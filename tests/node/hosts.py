"""A host without a wire, and what a coordinator would ask it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.templates import spell
from fedloom.experiment.plan.reading import check
from fedloom.methods import steps
from fedloom.remote import payload
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.service import NodeService
from fedloom.remote.rpc_errors import CallRefused

RUN = "0123456789abcdef" * 2
ROWS: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 3,
    "params": {"batch_size": 8},
    "data": {"clients": 3, "public_rows": 20, "own_test_rows": 10, "test_rows": 20},
    "models": {"pool": ["linear"]},
}
_CONFIG = check({"run": ROWS}).run.model_dump(mode="json")


def node(folder: Path, **values: Any) -> NodeConfig:
    given: dict[str, Any] = {
        "name": "node",
        "insecure": True,
        "state": folder / "state",
        "callers": ["hub", "second"],
        "peers": ["peer"],
        "methods": ["fedavg"],
        "approve": "off",
        "data": {"mine": {"dataset": "digits"}, "hidden-cohort": {"dataset": "wine"}},
    }
    return NodeConfig(**{**given, **values})


def config(**changes: Any) -> str:
    """The run's config as it crosses, with changes by dotted names."""
    values = json.loads(json.dumps(_CONFIG))
    for name, value in {"data.name": "mine", **changes}.items():
        *eval_mode, last = name.split(".")
        table = values
        for step in eval_mode:
            table = table[step]
        table[last] = value
    return json.dumps(values)


def opening(text: str | None = None, **changes: Any) -> bytes:
    given: dict[str, Any] = {
        "protocol": payload.PROTOCOL,
        "version": __version__,
        "run": RUN,
        "start": 1,
        "party": 0,
        "members": {},
        "config": config() if text is None else text,
        "resume": False,
        "answers": 0,
    }
    return payload.pack({**given, **changes})


def which(**changes: Any) -> bytes:
    return payload.pack({"run": RUN, "start": 1, **changes})


def doing(
    call: int,
    host: NodeService,
    *,
    round: int = 0,
    shared: Any = None,
    each: tuple[Any, ...] = (),
    **changes: Any,
) -> bytes:
    """A round's work of FedAvg, without weights where a method shares none; or with other shared
    arguments, and a task for each of further ones.
    """
    party: Any = host._node_runs[RUN].party
    if shared is None:
        shared = {
            "t": round,
            "weights": steps.shared_weights(party) if hasattr(party.cfg, "personal_head") else {},
        }
    task: dict[str, Any] = {"each": None, "reply_refs": {}, "fault": None, "seed": 7}
    head = {
        "run": RUN,
        "start": 1,
        "call": call,
        "round": round,
        "method": "update",
        "tasks": [{**task, "each": n} for n in range(1, len(each) + 1)] or [task],
        "leave": False,
        "expect": spell(None),
        "kept": [],
        "floor": 0,
        "deadline": 60.0,
        "mask": None,
    }
    return payload.pack({**head, **changes}, message.encode(shared), *map(message.encode, each))


def fetched(ask: RunRequest, key: str, name: str = "peer") -> bytes:
    """What a peer gets for a key, in the insecure mode."""
    head = {"peer": name, "run": RUN, "session": ""}
    told, _ = payload.unpack(ask("peer", payload.pack({**head}, b"")))
    _, rest = payload.unpack(
        ask("peer", payload.pack({**head, **told}, payload.pack({"key": key})))
    )
    return bytes(rest[0])


class RunRequest:
    """A host that is asked from the test's own thread.

    Attributes:
        host: it.
    """

    def __init__(self, cfg: NodeConfig) -> None:
        self.config = cfg
        self._loop = asyncio.new_event_loop()
        self.host = NodeService(cfg)

    def __call__(self, kind: str, body: bytes, caller: str = "hub") -> bytes:
        return self._loop.run_until_complete(
            asyncio.wait_for(self.host.answer(caller, kind, body), 120)
        )

    def refused(self, kind: str, body: bytes, caller: str = "hub") -> CallRefused:
        """Its refusal; anything else that comes out fails the test."""
        try:
            self(kind, body, caller)
        except CallRefused as refusal:
            assert refusal.words.isprintable()
            return refusal
        raise AssertionError("it was answered")

    def audited(self, name: str = "audit") -> list[dict[str, Any]]:
        path = self.config.state / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        self._loop.run_until_complete(self.host.close())
        self._loop.close()
