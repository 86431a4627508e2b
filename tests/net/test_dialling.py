"""Nodes dial the coordinator: no port of theirs is open, nobody else is believed, and what a break
lost comes again.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.api import execute
from fedloom.core.engine import Failure
from fedloom.core.errors import EngineError
from fedloom.remote import payload, rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.hub import NodeConnection, open_hub
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.sealed import SealedChannel
from tests.net.calls import Caller, Transport
from tests.net.nodes import free_port
from tests.net.processes import Machines, run_of, started, until
from tests.net.test_faults import after, in_background, same
from tests.net.wires import Pki, run


def listening(pid: int) -> set[str]:
    """The local addresses at which a process takes connections."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_a_node_in_a_run_listens_nowhere(field: Machines) -> None:
    with started(field.over(run_of("gossip"))) as engine:
        assert engine.call([0, 1, 2], "update", {"t": 0}, None, (0, 0)) == [None] * 3
        assert [listening(node.pid) for node in field.nodes] == [set()] * 3
        assert listening(os.getpid())  # the search finds what is there


def test_a_killed_node_is_noticed_when_its_connection_closes(field: Machines) -> None:
    with started(field.over(run_of("gossip"), silence=600.0)) as engine:  # so it is not the silence
        field.nodes[1].kill()
        until(lambda: not engine.presence()[1], "its absence")
        assert engine.call([1], "update", {"t": 0}, None, (0, 0)) == [Failure("unreachable")]
        field.nodes[1].start()
        until(lambda: engine.presence()[1], "the node")
        assert engine.call([1], "update", {"t": 0}, None, (0, 1)) == [None]


@pytest.mark.slow
def test_a_node_that_is_killed_and_returns_in_time_changes_no_number(
    field: Machines, tmp_path: Path
) -> None:
    """It is killed in the middle of its work, or before; the call comes again."""
    victim, struck = field.nodes[2], list[Any]()

    def strike() -> None:
        victim.kill()
        victim.start()

    run_ = run_of("fedavg-adam", rounds=6)
    steps = {t: lambda: struck.append(in_background(strike)) for t in (1, 4)} | {
        3: lambda: struck[0]()
    }
    there = execute(field.over(run_, reconnect=120.0), tmp_path / "run", progress=after(steps))
    for done in struck:
        done()
    same(there.summary, execute(run_).summary)
    assert (tmp_path / "run" / "failures.csv").read_text().count("\n") <= 1


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


def hub_and_client(
    pki: Pki,
    coordinator: Credentials,
    node: Credentials,
    test: Callable[[list[NodeConnection], RPCClient], Any],
) -> None:
    """A hub for a node named `node`, and what dials it under the name `hub`."""

    async def work() -> None:
        listen = f"127.0.0.1:{free_port()}"
        lines = await open_hub(
            ["node"], "r", lambda *_: None, listen=listen, credentials=coordinator
        )
        client = RPCClient(ServerAddress("hub", listen), node, session="s")
        try:
            await test(lines, client)
        finally:
            await client.close()
            for line in lines:
                await line.close()

    run(work())


def test_a_node_believes_no_other_coordinator(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    for name, authority in (("mallory", pki), ("hub", other)):

        async def test(lines: list[NodeConnection], client: RPCClient) -> None:
            assert not await client.wait(2.0)
            assert not lines[0].up

        hub_and_client(pki, authority.of(name), pki.of("node", revoked=True), test)


def test_a_stranger_is_no_node(pki: Pki) -> None:
    async def test(lines: list[NodeConnection], client: RPCClient) -> None:
        assert not await client.wait(1.0)  # its heartbeats are refused
        assert not lines[0].up

    hub_and_client(pki, pki.of("hub"), pki.of("stranger"), test)


def poll(session: str, last: int = -1, hub: str = "") -> bytes:
    return payload.pack({"hub": hub, "last": last, "session": session, "limit": 1 << 20})


def test_a_second_process_of_one_name_is_refused_while_the_first_is_connected(pki: Pki) -> None:
    async def test(lines: list[NodeConnection], client: RPCClient) -> None:
        assert await client.wait(10)
        first = asyncio.ensure_future(client.ask("next", poll("s"), id="s/1", deadline=30))
        assert await lines[0].wait(10)
        with pytest.raises(CallRefused) as refusal:
            await client.ask("next", poll("t"), id="t/1", deadline=30)
        assert refusal.value.code == rpc_errors.TAKEN
        asked = asyncio.ensure_future(lines[0].ask("do", b"body", deadline=30))
        head, rest = payload.unpack(await first)
        assert bytes(rest[0]) == b"body"
        again, _ = payload.unpack(await client.ask("next", poll("s"), id="s/2", deadline=30))
        assert again == head  # a process that has not heard of it gets it again
        for _ in range(2):  # the second comes too late, and is dropped
            reply = {"hub": head["hub"], "number": head["number"], "code": "", "words": ""}
            await client.ask("reply", payload.pack(reply, b"answer"), id=f"s/{_ + 3}", deadline=30)
        assert await asked == b"answer"
        for kind in ("next", "reply", "body", "peer", "do"):
            with pytest.raises(CallRefused) as refusal:
                await client.ask(kind, b"rubbish", id=f"s/{kind}", deadline=30)
            assert refusal.value.code == rpc_errors.MALFORMED

    hub_and_client(pki, pki.of("hub"), pki.of("node"), test)


def test_a_node_that_is_revoked_gets_no_call(pki: Pki) -> None:
    async def test(lines: list[NodeConnection], client: RPCClient) -> None:
        assert await client.wait(10)
        polled = asyncio.ensure_future(client.ask("next", poll("s"), id="s/1", deadline=60))
        assert await lines[0].wait(10)
        pki.authority.revoke("node")
        with pytest.raises(CallRefused) as refusal:
            await lines[0].ask("do", b"secret", deadline=60)
        assert refusal.value.code == rpc_errors.UNREACHABLE
        with pytest.raises(CallRefused):
            await polled

    hub_and_client(pki, pki.of("hub", revoked=True), pki.of("node"), test)


def handshake(one: SealedChannel, other: SealedChannel, request: bytes) -> bytes:
    """The request as the other end reads it."""
    other.shake(one.shake(other.shake(one.shake())) + one.seal(request))
    return other.open()


def test_a_sealed_connection_stands_between_these_two_alone(pki: Pki) -> None:
    a, b = pki.of("a", revoked=True), pki.of("b", revoked=True)
    one, other = SealedChannel(a, "b", server=False), SealedChannel(b, "a", server=True)
    assert handshake(one, other, b"key") == b"key"
    sealed = other.seal(b"weights" * 100_000)
    assert b"weights" not in sealed and one.open(sealed) == b"weights" * 100_000
    with pytest.raises(CallRefused, match="not trusted as b"):  # bytes that were altered on the way
        one.open(sealed[:-1] + bytes([sealed[-1] ^ 1]))


@pytest.mark.parametrize(
    ("asks", "answers", "revoked"),
    [("mallory", "b", ""), ("a", "mallory", ""), ("a", "b", "a"), ("a", "b", "b")],
)
def test_a_sealed_connection_with_another_does_not_come_about(
    asks: str, answers: str, revoked: str, pki: Pki
) -> None:
    """Such as with the coordinator, which carries the bytes and has a certificate of
    the same CA.
    """
    one = SealedChannel(pki.of(asks, revoked=True), "b", server=False)
    other = SealedChannel(pki.of(answers, revoked=True), "a", server=True)
    if revoked:
        pki.authority.revoke(revoked)
        one = SealedChannel(pki.of(asks, revoked=True), "b", server=False)
        other = SealedChannel(pki.of(answers, revoked=True), "a", server=True)
    with pytest.raises(CallRefused, match="not trusted"):
        handshake(one, other, b"key")


def test_the_coordinator_cannot_fetch_in_a_peer_s_name(field: Machines) -> None:
    wire = Transport(field)
    caller = Caller(wire.ask, run_of("gossip"), members={"1": "node-1"})
    caller.open()
    left = payload.unpack(caller.do(1, "give", leave=True))[0]["lines"][0]
    sealed = SealedChannel(field.credentials("coordinator"), "node-0", server=False)
    head = {"peer": "node-1", "run": caller.run, "session": ""}
    told, rest = payload.unpack(caller.raw("peer", payload.pack({**head}, sealed.shake())))
    request = sealed.shake(rest[0]) + sealed.seal(payload.pack({"key": left["reply_ref"]}))
    with pytest.raises(CallRefused, match="not trusted as node-1"):
        caller.raw("peer", payload.pack({**head, **told}, request))
    with pytest.raises(CallRefused, match="not a peer"):
        caller.raw("peer", payload.pack({**head, "peer": "coordinator"}, sealed.shake()))
    caller.close()
    wire.close()


def test_a_port_in_use_is_waited_for_and_then_named(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match="cannot listen at"):
            run(
                open_hub(
                    ["node"],
                    "r",
                    lambda *_: None,
                    listen=listen,
                    credentials=pki.of("hub"),
                    wait=0.1,
                )
            )
