"""What a round costs more over the net than in one process: `python -m benchmarks.net_rounds [METHOD] [ROUNDS]`.

Three nodes in processes of their own on this machine, with certificates; the coordinator is this process. The three
share the machine's cores with it, so the figure is the whole work of four processes against that of one, not what
machines of their own would show.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
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


def rounds(engine: dict[str, Any], method: str, count: int) -> tuple[list[float], int]:
    """Seconds of each round, and how many exchanges with parties one has."""
    values = {"method": method, "rounds": count, "data": {"clients": 3}, "models": {"pool": ["mlp"]}, "engine": engine}
    run = check({"run": values}).run
    world, seconds = build(run), []
    with at_nodes(world, node_set(federation_of(run))) if run.engine.name == "net" else start(world) as there:
        fed = Federation(there, seed=0)
        for t in range(count):
            fed.round = t
            begun = time.perf_counter()
            for _ in world.method.round(fed, world.server, there.ids, world.cfg, t):
                pass
            seconds.append(time.perf_counter() - begun)
        return seconds, fed._calls


def main(method: str = "fedal", count: int = 30) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        folder = Path(home)
        with (folder / "log").open("w") as log:
            certs(
                NODES,
                folder / "fed",
                list(registry()),
                Console(file=log),
                address=f"127.0.0.1:{free_port()}",
                here=True,
            )
            words = [[sys.executable, "-m", "fedloom", "node", f"fed/{name}/node.toml"] for name in NODES]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            nodes = [subprocess.Popen(w, cwd=folder, env=env, stdout=log, stderr=log) for w in words]
            try:
                here, exchanges = rounds({}, method, count)
                there, _ = rounds({"name": "net", "federation": str(folder / "fed/federation.toml")}, method, count)
            finally:
                for node in nodes:
                    node.terminate()
                for node in nodes:
                    node.wait()
    one, net = (statistics.median(seconds[2:]) * 1e3 for seconds in (here, there))
    print(f"{method}, 3 clients, {exchanges} exchanges a round, load {os.getloadavg()[0]:.1f}")
    more = (net - one) / exchanges
    print(f"one process {one:.1f} ms a round, over the net {net:.1f} ms: {more:.1f} ms an exchange more")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
