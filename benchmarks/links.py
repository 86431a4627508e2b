"""One coordinator with many nodes and runs: `python -m benchmarks.links [NODES RUNS ROUNDS BYTES]`.

The coordinator is this process; all nodes are stubs in another one, each with a certificate and a
connection of its own, that echo their bytes. The nodes are dealt to the runs, each of which has its
own address, and rounds in which it asks all of its nodes at once. Of all calls: how many failed,
their time, and the coordinator's CPU; how often a node counted as absent, which none ever was; and
the coordinator's memory after a fifth and half of the rounds, and at the end.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.growth import resident
from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.hub import NodeConnection, open_hub
from fedloom.remote.loop import run
from fedloom.remote.node.process import CoordinatorLink
from fedloom.remote.rpc_errors import CallRefused

LINES = (
    (100, 1, 3, 100_000),
    (300, 1, 3, 100_000),
    (1_000, 1, 3, 100_000),
    (1_000, 100, 10, 10_000),
)
"""Nodes, runs, rounds, and bytes of a message each way."""


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

    async def answer(self, caller: str, kind: str, body: bytes, roles: object) -> bytes:
        return body


def dealt(count: int, runs: int) -> list[list[str]]:
    """The names of each run's nodes."""
    return [names_of(count)[n::runs] for n in range(runs)]


async def nodes(folder: Path, first: int, count: int, runs: int) -> None:
    """All nodes, until standard input ends."""
    links = []
    for n, names in enumerate(dealt(count, runs)):
        for name in names:
            service: Any = Stub(name)
            own = credentials_of(folder, name)
            links.append(CoordinatorLink(service, "coordinator", f"127.0.0.1:{first + n}", own))
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.gather(*(link.close() for link in links))


async def measure(folder: Path, count: int, runs: int, rounds: int, size: int) -> None:
    """A row of the table."""
    absent, took, memory, failed = list[str](), list[float](), dict[int, int](), 0
    marks = rounds // 5, rounds // 2

    def changed(name: str, up: bool) -> None:
        if not up:
            absent.append(name)

    first, own = 20_000 + os.getpid() % 10_000, credentials_of(folder, "coordinator")
    hubs = [
        await open_hub(names, f"run-{n}", changed, listen=f"127.0.0.1:{first + n}", credentials=own)
        for n, names in enumerate(dealt(count, runs))
    ]
    body = os.urandom(size)

    async def call(connection: NodeConnection) -> None:
        nonlocal failed
        start = time.monotonic()
        try:
            assert await connection.ask("echo", body, deadline=600) == body
            took.append(time.monotonic() - start)
        except CallRefused:
            failed += 1

    async def work(n: int) -> None:
        for t in range(rounds):
            await asyncio.gather(*map(call, hubs[n]))
            if t + 1 in marks:
                memory[t + 1] = resident("VmRSS")  # when the last of the runs is there

    every = [connection for hub in hubs for connection in hub]
    words = [str(folder), *map(str, (first, count, runs))]
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.links", "nodes", *words], stdin=subprocess.PIPE
    ) as others:
        up = await asyncio.gather(*(connection.wait(600) for connection in every))
        connected = time.monotonic() - start
        assert all(up), f"{sum(up)} of {count} nodes connected"
        start, spent = time.monotonic(), time.process_time()
        await asyncio.gather(*map(work, range(runs)))
        cpu, wall = time.process_time() - spent, time.monotonic() - start
        await asyncio.sleep(10)  # longer than the silence after which a node counts as absent
        cuts, total = statistics.quantiles(took, n=100), len(took) + failed
        cells = [
            *(f"{n:,}" for n in (count, runs, rounds, size)),
            f"{connected:.1f}",
            f"{failed} of {total:,}",
            f"{len(absent)}",
            f"{wall:.1f}",
            f"{cuts[49]:.2f}, {cuts[98]:.2f}, {max(took):.2f}",
            f"{1000 * cpu / total:.1f}",
            ", ".join(f"{size / 1e6:.0f}" for size in (*memory.values(), resident("VmRSS"))),
        ]
        print("|", " | ".join(cells), "|", flush=True)
        assert others.stdin is not None
        others.stdin.close()
    await asyncio.gather(*(connection.close() for connection in every))


def main(lines: Sequence[Sequence[int]]) -> None:
    """Print the table."""
    print(
        "| nodes | runs | rounds | bytes | s to connect | failed calls | false absences | s in all "
        "| s a call: median, 99 %, longest | CPU ms a call | memory, MB: fifth, half, end |"
    )
    print("|---" * 11 + "|")
    for count, *line in lines:
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home)
            authority = CertificateAuthority.create(folder)
            for name in ("coordinator", *names_of(count)):
                certificate, key = authority.issue(name, 1)
                (folder / f"{name}.pem").write_bytes(certificate)
                (folder / f"{name}.key").touch(mode=0o600)
                (folder / f"{name}.key").write_bytes(key)
            run(measure(folder, count, *line))


if __name__ == "__main__":
    if sys.argv[1:2] == ["nodes"]:
        asyncio.run(nodes(Path(sys.argv[2]), *map(int, sys.argv[3:])))
    else:
        main([[int(word) for word in sys.argv[1:]]] if sys.argv[1:] else LINES)
