"""The wire between two processes over loopback with mutual TLS, against a bare gRPC call of the
same bytes.

Wall milliseconds, the median and the best of some calls one after the other: up is a call with so
many bytes and an empty answer, down the other way round, both an echo. A busy machine shows in the
distance of the two figures.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_server import serve

SIZES = {"empty": 0, "40 KB": 40_000, "1 MB": 1_000_000, "50 MB": 50_000_000}
_BARE = "/bare/Call"
_LIMITS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def answer(kind: str, body: bytes) -> bytes:
    """What either server answers: as many bytes as the kind says, or the body itself."""
    return body if kind == "both" else bytes(int(kind))


class Mirror:
    """A handler that does no work."""

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        return answer(kind, body)

    def heard(self, caller: str, session: str) -> str:
        return ""

    def broke(self, caller: str, session: str) -> None:
        pass

    def limit(self, caller: str) -> int:
        return 1 << 30


async def serving(folder: Path) -> None:
    """Serve both until standard input ends."""
    credentials = credentials_of(folder, "node")
    server = await serve(Mirror(), "127.0.0.1:0", credentials)

    async def call(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return answer(dict(context.invocation_metadata() or ())["kind"], body)

    bare = grpc.aio.server(options=_LIMITS)
    rpc = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", rpc),))
    port = bare.add_secure_port("127.0.0.1:0", credentials.server())
    await bare.start()
    print(server.port, port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await bare.stop(0)
    await server.stop(0)


def credentials_of(folder: Path, name: str) -> Credentials:
    return Credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


async def timed(call: Callable[[], Awaitable[object]], times: int) -> tuple[float, float]:
    """Median and best milliseconds; one call first, uncounted."""
    await call()
    took = []
    for _ in range(times):
        start = time.perf_counter()
        await call()
        took.append(1000 * (time.perf_counter() - start))
    return statistics.median(took), min(took)


async def measure(folder: Path, port: int, bare_port: int, times: int) -> None:
    credentials = credentials_of(folder, "coordinator")
    link = RPCClient(ServerAddress("node", f"127.0.0.1:{port}"), credentials)
    assert await link.wait(10)
    named = ("grpc.ssl_target_name_override", "node")
    channel = grpc.aio.secure_channel(
        f"127.0.0.1:{bare_port}", credentials.channel(), options=(*_LIMITS, named)
    )
    bare = channel.unary_unary(_BARE)
    print(f"{'ms':8}{'to':6}{'fedloom':>10}{'best':>9}{'bare gRPC':>11}{'best':>9}")
    for name, size in SIZES.items():
        for direction in ("up", "down", "both") if size else ("both",):
            body = bytes(0 if direction == "down" else size)
            kind = {"up": "0", "down": str(size), "both": "both"}[direction]
            n = times if size > 10**7 else 10 * times
            ours = await timed(lambda: link.ask(kind, body, id=os.urandom(8).hex(), deadline=60), n)  # noqa: B023
            bar = await timed(lambda: bare(body, metadata=(("kind", kind),)), n)  # noqa: B023
            print(f"{name:8}{direction:6}{ours[0]:10.2f}{ours[1]:9.2f}{bar[0]:11.2f}{bar[1]:9.2f}")
    await channel.close()
    await link.close()


def main(times: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        authority = CertificateAuthority.create(folder)
        for name in ("node", "coordinator"):
            certificate, key = authority.issue(name, 1)
            (folder / f"{name}.pem").write_bytes(certificate)
            (folder / f"{name}.key").touch(mode=0o600)
            (folder / f"{name}.key").write_bytes(key)
        command = [sys.executable, "-m", "benchmarks.net", "serve", home]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            ports = [int(port) for port in server.stdout.readline().split()]
            asyncio.run(measure(folder, ports[0], ports[1], times))
            server.communicate("")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serving(Path(sys.argv[2])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
