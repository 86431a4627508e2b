"""A Ray cluster started as docs/cluster.md says, and nodes that are slow or lost: `python -m benchmarks.cluster`.

Arguments: nodes (3), rounds (30).

Nodes are `ray start` processes of one CPU each on this machine. FedAL on digits runs in one process, on the cluster,
on the cluster while a worker node is slow (its processes stand still for some seconds in a round), and while a worker
node is killed in a round. Every run must end with the `state_sha256` of the first.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.kills import free_port
from fedloom.engines._ray_cluster import ENVIRONMENT

STILL = 8.0
"""Seconds that a slow node stands still."""
ONE_MACHINE = ["--num-cpus=1", "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
"""What keeps nodes on one machine apart; on machines of their own these words are left out."""


class Node:
    """A node of the cluster."""

    def __init__(self, *words: str, folder: Path, name: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block", *ONE_MACHINE]
        print("$", "ray start", *words)
        self.name = name
        with (folder / f"{name}.log").open("w") as log:
            env = {**ENVIRONMENT, **os.environ, "RAY_TMPDIR": str(folder)}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        self.log = folder / f"{name}.log"

    def wait(self) -> None:
        """Wait until it has started."""
        while "Ray runtime started" not in self.log.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} did not start: {self.log.read_text()}")
            time.sleep(0.2)

    def all_of_it(self) -> list[psutil.Process]:
        """Its processes."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def send(self, number: int) -> None:
        """A signal to all of its processes, the first one first, so that none is replaced."""
        for process in self.all_of_it():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


@contextmanager
def cluster(count: int, folder: Path) -> Iterator[tuple[str, list[Node]]]:
    """The address of a cluster of `count` nodes, the head among them, and the nodes."""
    port = free_port()
    nodes = [Node("--head", f"--port={port}", "--include-dashboard=false", folder=folder, name="head")]
    try:
        nodes[0].wait()
        printed = re.search(r"--address='([\w.:-]+)'", nodes[0].log.read_text())
        address = printed[1] if printed else f"127.0.0.1:{port}"
        for n in range(1, count):
            nodes.append(Node(f"--address={address}", folder=folder, name=f"node-{n}"))
            nodes[-1].wait()
        yield address, nodes
    finally:
        for node in reversed(nodes):
            node.send(signal.SIGKILL)
            node.process.wait()


def run(folder: Path, name: str, rounds: int, *words: str, in_round: Callable[[], None] | None = None) -> str:
    """Run FedAL; its `state_sha256`. `in_round` is called once, in a round of the middle."""
    settings = ["data.clients=6", "models.pool=['mlp']", "params.tau=5", "evaluate.points=2"]
    command = ["run", "fedal", "--rounds", str(rounds), "--out", name, *(w for s in settings for w in ("-s", s))]
    print("$", "fedloom", *command, *words, flush=True)
    start = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        env = {**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-m", "fedloom", *command, *words]
        process = subprocess.Popen(call, stdout=log, stderr=log, env=env, cwd=folder)
    while process.poll() is None:
        time.sleep(0.05)
        if in_round is not None and done(folder / name) >= rounds // 3:
            in_round()
            in_round = None
    if process.returncode or in_round is not None:
        raise RuntimeError(f"{name}: status {process.returncode}\n{(folder / f'{name}.log').read_text()}")
    result = json.loads((folder / name / "result.json").read_text())
    for line in (folder / f"{name}.log").read_text().splitlines():
        if "lost" in line or "repeating" in line:
            print("  ", line.strip())
    digest = str(result["state_sha256"])
    remarks = ", ".join(result["engine"]["remarks"]) or result["engine"]["engine"]
    print(f"  {digest[:16]}, {time.monotonic() - start:.0f} s, of which rounds and evaluations "
          f"{result['seconds']['total'] - result['seconds']['setup']:.1f} s; {remarks}", flush=True)  # fmt: skip
    return digest


def done(folder: Path) -> int:
    """Rounds that a run has completed."""
    try:
        return int(json.loads((folder / "live.json").read_text())["round"])
    except (OSError, ValueError, KeyError):
        return 0


def main(count: int = 3, rounds: int = 30) -> None:
    """Print what was typed, and whether each run has the bits of the first."""
    folder = Path(tempfile.mkdtemp(prefix="fl", dir="/tmp"))  # a socket's path must be short
    try:
        digests = {"in one process": run(folder, "local", rounds)}
        with cluster(count, folder) as (address, nodes):
            there = ("--engine", "ray", "--workers", str(count), "-s", f"engine.address={address}")
            digests["on the cluster"] = run(folder, "cluster", rounds, *there)

            def slow() -> None:
                print(f"   {nodes[-1].name} stands still for {STILL:g} s", flush=True)
                nodes[-1].send(signal.SIGSTOP)
                time.sleep(STILL)
                nodes[-1].send(signal.SIGCONT)

            digests["with a slow node"] = run(folder, "slow", rounds, *there, in_round=slow)

            def kill() -> None:
                print(f"   {nodes[-1].name} is killed: {len(nodes[-1].all_of_it())} processes", flush=True)
                nodes[-1].send(signal.SIGKILL)

            digests["with a node killed"] = run(folder, "killed", rounds, *there, in_round=kill)
        expected = digests["in one process"]
        for name, digest in digests.items():
            print(f"{name:<20} {digest[:16]} {'equal' if digest == expected else 'DIFFERENT'}")
        if set(digests.values()) != {expected}:
            raise SystemExit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
