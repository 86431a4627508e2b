"""One coordinator with many nodes: `python -m benchmarks.links [NODES…]`.

The coordinator is this process; all nodes are stubs in another one, each with a certificate and a connection of its
own, that echo 100 kB. After all are connected: rounds in which the coordinator asks all of them at once, the calls that
failed, and how often a node counted as absent, which none ever was.
"""

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.hub import open_hub
from fedloom.remote.loop import run
from fedloom.remote.node.process import CoordinatorLink
from fedloom.remote.rpc_errors import CallRefused

BYTES, ROUNDS = 100_000, 3


def credentials_of(folder: Path, name: str) -> Credentials:
    return Credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def names_of(count: int) -> list[str]:
    return [f"node-{n}" for n in range(count)]


class Stub:
    """A node's service that returns what it gets."""

    def __init__(self, name: str) -> None:
        self.config = SimpleNamespace(name=name, max_message_mb=64)

    def heard(self, caller: str, run: str) -> None:
        """A sign of life of the coordinator."""

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        return body


async def nodes(folder: Path, address: str, count: int) -> None:
    """All nodes, until standard input ends."""
    links = []
    for name in names_of(count):
        service: Any = Stub(name)
        links.append(CoordinatorLink(service, "coordinator", address, credentials_of(folder, name)))
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(link.close() for link in links))


async def measure(folder: Path, count: int) -> None:
    """A row of the table."""
    absent = []

    def changed(name: str, up: bool) -> None:
        if not up:
            absent.append(name)

    port = 20_000 + os.getpid() % 10_000
    address = f"127.0.0.1:{port}"
    own = credentials_of(folder, "coordinator")
    connections = await open_hub(names_of(count), "run", changed, listen=address, credentials=own)
    command = [sys.executable, "-m", "benchmarks.links", "nodes", str(folder), address, str(count)]
    start = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as others:
        up = await asyncio.gather(*(connection.wait(600) for connection in connections))
        connected = time.monotonic() - start
        assert all(up), f"{sum(up)} of {count} nodes connected"
        body, failed, took, spent = os.urandom(BYTES), 0, [], time.process_time()
        for _ in range(ROUNDS):
            start = time.monotonic()
            replies = await asyncio.gather(
                *(connection.ask("echo", body, deadline=600) for connection in connections), return_exceptions=True
            )
            took.append(time.monotonic() - start)
            failed += sum(isinstance(reply, CallRefused) for reply in replies)
            assert all(reply == body for reply in replies if not isinstance(reply, CallRefused))
        cpu = (time.process_time() - spent) / ROUNDS
        await asyncio.sleep(10)  # longer than the silence after which a node counts as absent
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {count:,} | {connected:.1f} | {sorted(took)[ROUNDS // 2]:.2f} | {cpu:.2f} "
            f"| {2 * count * BYTES / 1e6:.0f} | {failed} of {ROUNDS * count} | {len(absent)} | {memory:.0f} |",
            flush=True,
        )
        assert others.stdin is not None
        others.stdin.close()
    await asyncio.gather(*(connection.close() for connection in connections))


def main(counts: list[int]) -> None:
    """Print the table."""
    print(
        "| nodes | s to connect | s a round | CPU s at the coordinator | MB a round | failed calls | false absences "
        "| memory, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for count in counts:
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home)
            authority = CertificateAuthority.create(folder)
            for name in ("coordinator", *names_of(count)):
                certificate, key = authority.issue(name, 1)
                (folder / f"{name}.pem").write_bytes(certificate)
                (folder / f"{name}.key").touch(mode=0o600)
                (folder / f"{name}.key").write_bytes(key)
            run(measure(folder, count))


if __name__ == "__main__":
    if sys.argv[1:2] == ["nodes"]:
        asyncio.run(nodes(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        main([int(word) for word in sys.argv[1:]] or [100, 300, 1000])
