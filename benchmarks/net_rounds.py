"""What a round costs more over the net than in one process: `python -m benchmarks.net_rounds
[METHOD] [ROUNDS]`.

Three nodes in processes of their own on this machine, with certificates; the coordinator is this
process. The three share the machine's cores with it, so the figure is the whole work of four
processes against that of one, not what machines of their own would show.

Nodes keep their state on disk, and then in memory: the difference is what syncing files takes. The
CPU milliseconds of an exchange are those of the threads of each process (Linux only), which a busy
machine changes less than wall seconds.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.kills import free_port
from fedloom.cli.federation import certs
from fedloom.core.federation import Federation
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.methods import registry
from fedloom.remote.coordinator import at_nodes, federation_of, node_set

NODES = ("a", "b", "c")


RUN = "the run's thread"
LOOP = "the asyncio loop"
WORKER = "other Python threads"
GRPC = "gRPC's threads"
MEMORY = Path("/dev/shm")


def threads(pid: int, loop: int) -> Counter[str]:
    """CPU milliseconds of a process so far, by what its threads do; `loop` is the thread of its
    asyncio loop.
    """
    spent = Counter[str]()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        name = (task / "comm").read_text().strip()
        known = {pid: RUN, loop: LOOP}
        part = known.get(int(task.name), WORKER if name.startswith(("python", "fedloom")) else GRPC)
        spent[part] += int((task / "schedstat").read_text().split()[0]) / 1e6
    return spent


def looping() -> int:
    """The number of the thread in which this process talks to nodes."""
    return next((t.native_id or 0 for t in threading.enumerate() if t.name == "fedloom-net"), 0)


def rounds(
    engine: dict[str, Any], method: str, count: int, look: Callable[[], None] = lambda: None
) -> tuple[list[float], int]:
    """Seconds of each round, and how many exchanges with parties one has. `look` is called before
    the first round and after the last.
    """
    values = {
        "method": method,
        "rounds": count,
        "data": {"clients": 3},
        "models": {"pool": ["mlp"]},
        "engine": engine,
    }
    run = check({"run": values}).run
    world, seconds = build(run), []
    with (
        at_nodes(world, node_set(federation_of(run)))
        if run.engine.name == "net"
        else start(world) as there
    ):
        fed = Federation(there, seed=0)
        look()
        for t in range(count):
            fed.round = t
            begun = time.perf_counter()
            for _ in world.method.round(fed, world.server, there.ids, world.cfg, t):
                pass
            seconds.append(time.perf_counter() - begun)
        look()
        return seconds, fed._calls


def over_the_net(method: str, count: int, at: Path) -> tuple[list[float], int, list[Counter[str]]]:
    """As `rounds`, with nodes whose folders are in `at`, and CPU milliseconds by thread of this
    process and of all nodes together.
    """
    with tempfile.TemporaryDirectory(dir=at) as home:
        folder = Path(home)
        seen: list[list[Counter[str]]] = []
        with (folder / "log").open("w") as log:
            certs(
                NODES,
                folder / "fed",
                list(registry()),
                Console(file=log),
                address=f"127.0.0.1:{free_port()}",
                here=True,
            )
            words = [
                [sys.executable, "-m", "fedloom", "node", f"fed/{name}/node.toml"] for name in NODES
            ]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            nodes = [
                subprocess.Popen(w, cwd=folder, env=env, stdout=log, stderr=log) for w in words
            ]

            def look() -> None:
                if Path("/proc/self/schedstat").exists():
                    every = [threads(node.pid, node.pid) for node in nodes]
                    seen.append([threads(os.getpid(), looping()), sum(every, Counter[str]())])

            try:
                engine = {"name": "net", "federation": str(folder / "fed/federation.toml")}
                seconds, exchanges = rounds(engine, method, count, look)
            finally:
                for node in nodes:
                    node.terminate()
                for node in nodes:
                    node.wait()
        return seconds, exchanges, [b - a for a, b in zip(*seen, strict=True)] if seen else []


def main(method: str = "fedal", count: int = 30) -> None:
    """Print the seconds and the table."""
    torch.set_num_threads(1)
    alone: list[float] = []
    here, exchanges = rounds({}, method, count, lambda: alone.append(time.process_time()))
    one = statistics.median(here[2:]) * 1e3
    cpu = 1e3 * (alone[1] - alone[0]) / count / exchanges
    print(f"{method}, 3 clients, {exchanges} exchanges a round, load {os.getloadavg()[0]:.1f}")
    print(f"one process: {one:.1f} ms a round, {cpu:.1f} CPU ms an exchange")
    for at in (Path("/var/tmp"), MEMORY):
        if not at.is_dir():
            continue
        seconds, _, spent = over_the_net(method, count, at)
        net = statistics.median(seconds[2:]) * 1e3
        print(
            f"nodes' folders in {at}: {net:.1f} ms a round, {(net - one) / exchanges:.1f} ms an "
            "exchange more"
        )
        for who, parts in zip(("the coordinator", "the three nodes"), spent, strict=False):
            each = {part: ms / count / exchanges for part, ms in parts.most_common()}
            words = ", ".join(f"{part} {ms:.2f}" for part, ms in each.items())
            print(f"  {who}: {sum(each.values()):.1f} CPU ms an exchange ({words})", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
