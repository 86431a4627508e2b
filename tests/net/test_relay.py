"""The relay and the two ends of its connections, with real gRPC servers and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rich.console import Console

from fedloom.cli.federation import certs, revoke
from fedloom.core.errors import ConfigError, EngineError
from fedloom.remote import relay as relays
from fedloom.remote import tunnel as tunnels
from fedloom.remote.connections import NodeAddress, connect
from fedloom.remote.credentials import Credentials
from fedloom.remote.relay import ACCEPT, DIAL, NUMBER, PIECE, TARGET, Relay, RelayConfig
from fedloom.remote.tunnel import RelayedServer, expose, reach

PATIENCE = 60.0
"""Seconds that something may take on a very busy machine before a test gives up."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the process that holds both ends may stand still for longer than a silence that counts."""
    monkeypatch.setattr(tunnels, "SILENCE", PATIENCE)


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "fed"
    certs(["node", "other", "stranger"], folder, ["fedal"], Console(file=io.StringIO()), relay="relay")
    return folder


def holder(fed: Path, name: str) -> Credentials:
    return Credentials(*(fed / name / file for file in ("ca.pem", "certificate.pem", "key.pem", "revoked.pem")))


class Tapped(Relay):
    """A relay that remembers what passes."""

    def __init__(self, config: RelayConfig) -> None:
        super().__init__(config)
        self.tapped = bytearray()

    def _count(self, connection: Any, piece: bytes, *, to_node: bool) -> None:
        self.tapped += piece
        super()._count(connection, piece, to_node=to_node)


def relay_config(fed: Path, port: int = 0, **changes: Any) -> RelayConfig:
    place = fed / "relay"
    values = {
        "listen": f"127.0.0.1:{port}",
        "ca": place / "ca.pem",
        "certificate": place / "certificate.pem",
        "key": place / "key.pem",
        "revoked": place / "revoked.pem",
        "nodes": ("node", "other"),
        "callers": ("coordinator", "other"),
    }
    return RelayConfig(**values | changes)


@dataclass
class Net:
    """A node behind a relay, whose gRPC server sends back what it gets."""

    fed: Path
    relay: Tapped
    exposure: RelayedServer
    at: str
    heard: list[str | None] = field(default_factory=list)

    @asynccontextmanager
    async def tunnel(self, caller: str = "coordinator", target: str = "node") -> AsyncIterator[str]:
        tunnel = await reach(self.at, "relay", target, holder(self.fed, caller))
        try:
            yield tunnel.address
        finally:
            await tunnel.close()

    async def call(self, address: str, data: bytes, caller: str = "coordinator", target: str = "node") -> bytes:
        named = ("grpc.ssl_target_name_override", target)
        options = (named, ("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.secure_channel(address, holder(self.fed, caller).channel(), options) as channel:
            answer: bytes = await channel.unary_unary("/test/Echo")(data, timeout=PATIENCE)
            return answer


@asynccontextmanager
async def net(fed: Path, **changes: Any) -> AsyncIterator[Net]:
    mine = holder(fed, "node")
    heard: list[str | None] = []

    async def echo(data: bytes, context: Any) -> bytes:
        heard.append(mine.caller(context.auth_context()))
        return data

    server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1),))
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", mine.server())
    await server.start()
    async with exposed(fed, f"127.0.0.1:{port}", **changes) as made:
        made.heard = heard
        yield made
    await server.stop(None)


@asynccontextmanager
async def exposed(fed: Path, target: str, **changes: Any) -> AsyncIterator[Net]:
    """A relay, and a node with any server at `target`."""
    relay = Tapped(relay_config(fed, **changes))
    await relay.start()
    at = f"127.0.0.1:{relay.port}"
    exposure = await expose(at, "relay", holder(fed, "node"), target)
    made = Net(fed, relay, exposure, at)
    try:
        await until(lambda: exposure.up)
        yield made
    finally:
        await exposure.close()
        await made.relay.stop()


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happens():
            await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_large_messages_pass_both_ways_sealed(fed: Path) -> None:
    line = b"a row of a patient, in plain words; "
    data = line * (20_000_000 // len(line))

    async def test() -> None:
        async with net(fed) as made, made.tunnel() as address:
            assert await made.call(address, data) == data
            assert made.heard == ["coordinator"]
            assert len(made.relay.tapped) > 2 * len(data)
            assert line[:12] not in made.relay.tapped
            shown = await holder(fed, "coordinator").check_server(address, "node")
            assert shown == (fed / "node" / "certificate.pem").read_bytes()

    run(test)


def test_a_relay_or_another_node_can_not_pose_as_the_node(fed: Path) -> None:
    """What answers at the other end must have the node's certificate: whom a relay leads to proves nothing."""

    async def test() -> None:
        async with net(fed) as made, made.tunnel() as address:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made.call(address, b"", target="other")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(EngineError, match="is not trusted as other"):
                await holder(fed, "coordinator").check_server(address, "other")
            assert made.heard == []

    run(test)


async def refused(net: Net, who: Credentials, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """How the relay answers a stream."""
    options = (("grpc.ssl_target_name_override", "relay"), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(net.at, who.channel(), options) as channel:
        call = channel.stream_stream(method)(metadata=metadata, timeout=PATIENCE)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        code: grpc.StatusCode = await call.code()
        return code


def test_only_those_on_the_lists_listen_and_dial(fed: Path) -> None:
    denied = grpc.StatusCode.PERMISSION_DENIED

    async def test() -> None:
        async with net(fed) as made:
            coordinator, stranger = holder(fed, "coordinator"), holder(fed, "stranger")
            assert await refused(made, stranger, DIAL, (TARGET, "node")) is denied
            assert await refused(made, coordinator, DIAL, (TARGET, "stranger")) is denied
            assert await refused(made, coordinator, DIAL) is denied
            assert await refused(made, coordinator, DIAL, (TARGET, "other")) is grpc.StatusCode.UNAVAILABLE
            assert await refused(made, stranger, ACCEPT, (NUMBER, "1")) is denied
            assert await refused(made, holder(fed, "node"), ACCEPT, (NUMBER, "7")) is grpc.StatusCode.NOT_FOUND
            assert await refused(made, holder(fed, "node"), ACCEPT, (NUMBER, "x")) is grpc.StatusCode.NOT_FOUND
            posing = await expose(made.at, "relay", stranger, "127.0.0.1:9")
            await asyncio.sleep(0.5)
            assert not posing.up and made.relay.nodes == ("node",)
            await posing.close()

    run(test)


def test_a_connection_is_fetched_by_nobody_but_its_node(fed: Path) -> None:
    async def test() -> None:
        relay = Relay(relay_config(fed))
        await relay.start()
        made = Net(fed, relay, None, f"127.0.0.1:{relay.port}")  # type: ignore[arg-type]
        options = (("grpc.ssl_target_name_override", "relay"),)
        async with grpc.aio.secure_channel(made.at, holder(fed, "node").channel(), options) as channel:
            listening = channel.unary_stream(relays.LISTEN)(b"")
            assert await listening.read() == b""
            dialling = asyncio.create_task(refused(made, holder(fed, "coordinator"), DIAL, (TARGET, "node")))
            while not (number := await listening.read()):
                pass
            told = (NUMBER, number.decode())
            assert await refused(made, holder(fed, "other"), ACCEPT, told) is grpc.StatusCode.NOT_FOUND
            assert relay.open == 1
            call = channel.stream_stream(ACCEPT)(metadata=(told,))
            await call.done_writing()
            assert await dialling is grpc.StatusCode.OK
        await relay.stop()

    run(test)


def test_a_node_that_does_not_fetch_keeps_nobody_waiting(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "PAIRING", 0.2)

    async def test() -> None:
        async with net(fed) as made:
            made.exposure._fetch = lambda number: None  # type: ignore[method-assign]
            code = await refused(made, holder(fed, "coordinator"), DIAL, (TARGET, "node"))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert made.relay.open == 0

    run(test)


def test_open_connections_are_bounded(fed: Path) -> None:
    async def test() -> None:
        async with silent(fed, most_open=2) as made, made.tunnel() as address:
            held = [await asyncio.open_unix_connection(address.removeprefix("unix:")) for _ in range(2)]
            await until(lambda: made.relay.open == 2)
            busy = grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await refused(made, holder(fed, "coordinator"), DIAL, (TARGET, "node")) is busy
            assert await refused(made, holder(fed, "other"), DIAL, (TARGET, "node")) is busy
            for _, writer in held:
                writer.close()
            await until(lambda: made.relay.open == 0)

    run(test)


@asynccontextmanager
async def silent(fed: Path, **changes: Any) -> AsyncIterator[Net]:
    """A node whose server takes connections and reads nothing."""

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(hold, "127.0.0.1", 0, limit=1024)
    async with exposed(fed, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", **changes) as made:
        yield made
    server.close()
    for writer in held:
        writer.close()


def test_a_sender_waits_for_a_slow_reader(fed: Path) -> None:
    """What is under way is bounded: by the windows of two connections, and the kernel's buffers."""

    async def test() -> None:
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                writer.write(bytes(PIECE))
                await writer.drain()
                sent += PIECE

        async with silent(fed) as made, made.tunnel() as address:
            _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            sending = asyncio.create_task(send())
            before = -1
            while sent != before or not sent:
                before = sent
                await asyncio.sleep(1.0)
            sending.cancel()
            assert sent < 40_000_000
            writer.transport.abort()

    run(test)


def test_the_last_bytes_arrive_before_the_end(fed: Path, tmp_path: Path) -> None:
    """Whoever closes has been heard to the end, at either side."""
    data = os.urandom(3_000_000)
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"<":
            writer.write(data)
            await writer.drain()
        else:
            got.append(await reader.read())
        writer.close()

    async def test() -> None:
        path = tmp_path / "s"
        server = await asyncio.start_unix_server(serve, path)
        async with exposed(fed, f"unix:{path}") as made, made.tunnel() as address:
            for _ in range(3):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
                writer.write(b"<")
                assert await reader.read() == data
                writer.close()
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
                writer.write(b">" + data)
                await writer.drain()
                writer.close()
                await until(lambda: bool(got))
                assert got.pop() == data
        server.close()

    run(test)


def test_the_address_is_private_and_goes_with_the_tunnel(fed: Path) -> None:
    async def test() -> None:
        async with net(fed) as made:
            async with made.tunnel() as address:
                path = Path(address.removeprefix("unix:"))
                assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
            assert not path.parent.exists()

    run(test)


def test_without_unix_sockets_a_loopback_port_does(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(asyncio, "start_unix_server")

    async def test() -> None:
        async with net(fed) as made, made.tunnel() as address:
            assert address.startswith("127.0.0.1:")
            assert await made.call(address, b"hello") == b"hello"

    run(test)


def test_who_is_of_another_ca_or_revoked_is_refused(fed: Path, tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    certs(["node", "other"], tmp_path / "other", ["fedal"], quiet)
    mine = tmp_path / "mine"
    certs(["node", "other"], mine, ["fedal"], quiet, relay="relay")
    foreign = holder(tmp_path / "other", "coordinator")

    async def test() -> None:
        async with net(mine) as made:
            assert await refused(made, foreign, DIAL, (TARGET, "node")) is grpc.StatusCode.UNAVAILABLE
            tunnel = await reach(made.at, "relay", "node", foreign)
            reader, writer = await asyncio.open_unix_connection(tunnel.address.removeprefix("unix:"))
            assert await reader.read() == b""
            writer.close()
            await tunnel.close()
            no = grpc.StatusCode.UNAUTHENTICATED
            coordinator = holder(mine, "coordinator")
            revoke(["coordinator"], mine, quiet)
            assert await refused(made, coordinator, DIAL, (TARGET, "node")) is no
            revoke(["node"], mine, quiet)
            assert await refused(made, holder(mine, "node"), ACCEPT, (NUMBER, "1")) is no
            asked = await refused(made, holder(mine, "other"), DIAL, (TARGET, "node"))
            assert asked is grpc.StatusCode.UNAVAILABLE  # it listens still, but it does not count any more

    run(test)


def test_a_revoked_node_is_let_go_of_and_both_sides_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet = Console(file=io.StringIO())
    mine = tmp_path / "mine"
    certs(["node"], mine, ["fedal"], quiet, relay="relay")
    caplog.set_level(logging.INFO, "fedloom")

    async def test() -> None:
        async with net(mine, nodes=("node",), callers=("coordinator",)) as made, made.tunnel() as address:
            assert await made.call(address, b"a") == b"a"
            revoke(["node"], mine, quiet)
            await until(lambda: not made.exposure.up and made.relay.nodes == ())
            await until(lambda: "let go of node: its certificate is revoked" in caplog.text)
            words = "any more: it closed the connection; is this node's certificate revoked?"
            await until(lambda: words in caplog.text)

    run(test)


def test_a_line_through_a_relay_says_why_nobody_is_there(fed: Path) -> None:
    coordinator, silence = holder(fed, "coordinator"), f"127.0.0.1:{free_port()}"

    async def problem(relay: str, target: str, name: str = "relay") -> str:
        line = await connect(NodeAddress(target, relay=relay, relay_name=name), credentials=coordinator)
        await until(lambda: line.tunnel is not None and bool(line.tunnel.problem))
        words = line.problem
        await line.close()
        return words

    async def test() -> None:
        async with net(fed) as made:
            assert (await problem(made.at, "other")).startswith("it is not connected to the relay; is fedloom node")
            assert await problem(made.at, "stranger") == "'stranger' is not reached through this relay"
            assert "correct the name or the address in federation.toml" in await problem(made.at, "node", "relais")
            line = await connect(NodeAddress("node", relay=made.at), credentials=coordinator)
            line.tunnel.problem = "old"  # type: ignore[union-attr]
            await until(lambda: line.problem == "")
            line.problem = "of its own"
            assert line.problem == "of its own"
            await line.close()
        assert await problem(silence, "node") == "the relay does not answer"

    run(test)


def test_a_revoked_relay_is_not_used(tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    mine = tmp_path / "mine"
    certs(["node", "other"], mine, ["fedal"], quiet, relay="relay")

    async def test() -> None:
        async with net(mine) as made:
            revoke(["relay"], mine, quiet)
            again = await expose(made.at, "relay", holder(mine, "other"), "127.0.0.1:9")
            await until(lambda: not made.exposure.up)  # who was connected has noticed, so the other had the time to
            assert not again.up and "other" not in made.relay.nodes
            await again.close()

    run(test)


def test_a_relay_that_is_revoked_is_let_go_of_by_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = Console(file=io.StringIO())
    mine = tmp_path / "mine"
    certs(["node", "other"], mine, ["fedal"], quiet, relay="relay")
    monkeypatch.setattr(tunnels, "BEAT", 0.1)
    monkeypatch.setattr(tunnels, "SILENCE", 6.0)  # an end that stops reading in time ends by its silence

    async def test() -> None:
        async with net(mine) as made, made.tunnel() as address:
            _, first = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            await until(lambda: made.relay.open == 1 and bool(made.exposure._carried))
            revoke(["relay"], mine, quiet)
            await until(lambda: not made.exposure.up and not made.exposure._carried)
            await until(lambda: made.relay.nodes == () and not made.relay.open)
            _, second = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            await until(lambda: re.search(f"no way to node through the relay at .*{why}", caplog.text) is not None)
            for writer in (first, second):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    why = "the certificate of relay does not count any more"
    run(test)
    assert why in caplog.text


def test_the_words_of_a_relay_can_not_move_a_terminal_s_cursor() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, nothing, nothing, "\x1b[2Jgo\nhome")
    assert tunnels._why(error) == "[2Jgohome"


def test_after_a_restart_of_the_relay_the_node_is_reached_again(fed: Path) -> None:
    async def test() -> None:
        async with net(fed) as made, made.tunnel() as address:
            assert await made.call(address, b"one") == b"one"
            port = made.relay.port
            await made.relay.stop()
            await until(lambda: not made.exposure.up)
            with pytest.raises(grpc.aio.AioRpcError):
                await made.call(address, b"none")
            made.relay = Tapped(relay_config(fed, port))
            await made.relay.start()
            await until(lambda: made.exposure.up)
            assert await made.call(address, b"two") == b"two"

    run(test)


def test_a_node_that_comes_back_takes_the_place_of_its_former_self(fed: Path) -> None:
    async def test() -> None:
        async with net(fed) as made, made.tunnel() as address:
            target = f"127.0.0.1:{made.exposure._local[1]}"
            again = await expose(made.at, "relay", holder(fed, "node"), target)
            await until(lambda: again.up and not made.exposure.up)
            assert made.relay.nodes == ("node",)
            assert await made.call(address, b"hello") == b"hello"
            await again.close()

    run(test)


def books(net: Net) -> tuple[int, ...]:
    """What grows if connections are not cleared away: files, tasks, threads, entries."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), threading.active_count(), net.relay.open


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_connections_come_and_go_without_growth(fed: Path, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def one(address: str) -> None:
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()

    async def test() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # by itself it grows with the load
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        async with exposed(fed, f"unix:{tmp_path / 's'}") as made, made.tunnel() as address:
            await asyncio.gather(*(one(address) for _ in range(10)))
            await until(lambda: made.relay.open == 0)
            gc.collect()
            await asyncio.sleep(2.0)  # a connection is closed when it has been idle for a second
            before = books(made)
            gc.disable()  # nothing may depend on when Python tidies up
            try:
                for _ in range(20):
                    await asyncio.gather(*(one(address) for _ in range(10)))
                await until(lambda: all(now <= then for now, then in zip(books(made), before, strict=True)))
            finally:
                gc.enable()
        server.close()

    run(test)


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_frozen_relay_is_noticed_and_a_killed_one_comes_back(
    fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "SILENCE", 3 * tunnels.BEAT)
    config = fed / "relay" / "here.toml"
    names = 'nodes = ["node"]\ncallers = ["coordinator"]\nrevoked = "revoked.pem"\n'

    def start() -> subprocess.Popen[bytes]:
        code = f"from pathlib import Path; relay(Path({str(config)!r}), Console())"
        head = "from rich.console import Console; from fedloom.cli.federation import relay; "
        return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    async def test() -> None:
        free = Relay(relay_config(fed))
        await free.start()
        await free.stop()
        config.write_text(f'listen = "127.0.0.1:{free.port}"\n{names}')
        process = start()
        exposure = await expose(f"127.0.0.1:{free.port}", "relay", holder(fed, "node"), "127.0.0.1:9")
        try:
            await until(lambda: exposure.up)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not exposure.up)
            process.send_signal(signal.SIGCONT)
            await until(lambda: exposure.up)
            process.kill()
            process.communicate()
            await until(lambda: not exposure.up)
            process = start()
            await until(lambda: exposure.up)
            process.terminate()
            told, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0
            assert told.decode().startswith("relay relays at 127.0.0.1:") and "Traceback" not in told.decode()
        finally:
            process.kill()
            process.communicate()
            await exposure.close()

    run(test)


def test_a_relay_s_config_says_all_that_is_wrong(fed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedloom certs --relay"):
        relays.read(tmp_path / "relay.toml")
    path = tmp_path / "relay.toml"
    path.write_text("listen = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        relays.read(path)
    path.write_text('listen = "a:1"\nnode = ["a"]\nmost_open = 0\ncallers = []\n')
    with pytest.raises(ConfigError) as caught:
        relays.read(path)
    assert all(word in str(caught.value) for word in ("nodes", "most_open", "node"))
    path.write_text('listen = "a"\nnodes = []\ncallers = []\n')
    with pytest.raises(ConfigError, match="host:port"):
        relays.read(path)


def test_a_relay_needs_no_pytorch() -> None:
    code = "import sys, fedloom.cli.federation, fedloom.remote.node.logs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("how", ["text", "json"])
def test_the_command_logs_as_a_node_does(fed: Path, tmp_path: Path, how: str) -> None:
    path = fed / "relay" / "relay.toml"
    place = f"127.0.0.1:{free_port()}"
    path.write_text(re.sub("(?m)^listen = .*", f'listen = "{place}"', path.read_text()))
    command = [sys.executable, "-m", "fedloom", "relay", str(path.parent), "--log", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "relays at" in process.stdout.readline()

            async def test() -> None:
                exposure = await expose(place, "relay", holder(fed, "node"), "127.0.0.1:9")
                await until(lambda: exposure.up)
                await exposure.close()

            run(test)
        finally:
            process.terminate()
        told = process.communicate(timeout=PATIENCE)[1].splitlines()
    if how == "json":
        assert json.loads(told[0])["message"] == "node listens"
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ INFO fedloom.relay: node listens", told[0])


def test_a_taken_port_is_an_error_in_words(fed: Path) -> None:
    async def test() -> None:
        first = Relay(relay_config(fed))
        await first.start()
        second = Relay(relay_config(fed, first.port))
        with pytest.raises(EngineError, match="can't be listened at"):
            await second.start()
        await first.stop()

    run(test)
