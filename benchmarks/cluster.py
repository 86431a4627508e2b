"""A Ray cluster started as docs/cluster.md says, and nodes that are slow or lost: `python -m
benchmarks.cluster`.

Arguments: nodes (3), rounds (30); or `large`, clients (10000), MB of a node's process (900).

Nodes are `ray start` processes of one CPU each on this machine. FedAL on digits runs in one
process, on the cluster, on the cluster while a worker node is slow (its processes stand still for
some seconds in a round), and while a worker node is killed in a round. Every run must end with the
`state_sha256` of the first.

`large` runs FedAvg of many small clients. A node's worker may have so much private memory
(`RLIMIT_DATA`) that the clients do not fit one node, whose run must stop with a sentence, but
three.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from benchmarks.kills import free_port
from fedloom.engines._ray_cluster import ENVIRONMENT

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Every shell of the cluster has it."""
STILL = 8.0
"""Seconds that a slow node stands still."""
ONE_MACHINE = [
    "--num-cpus=1",
    "--object-store-memory=80000000",
    "--min-worker-port=0",
    "--max-worker-port=0",
]
"""What keeps nodes on one machine apart; on machines of their own these words are left out."""


class Node:
    """A node of the cluster."""

    def __init__(self, *words: str, folder: Path, name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *words,
            "--block",
            *ONE_MACHINE,
        ]
        print("$", "ray start", *words)
        self.name = name
        with (folder / f"{name}.log").open("w") as log:
            env = {**ENVIRONMENT, **os.environ, **TOKEN, "RAY_TMPDIR": str(folder)}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )
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

    def workers(self) -> list[psutil.Process]:
        """Its processes that run parties."""
        found = []
        for process in self.all_of_it():
            with suppress(psutil.NoSuchProcess):
                if "ray::Shard" in " ".join(process.cmdline()):
                    found.append(process)
        return found

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
    nodes = [
        Node("--head", f"--port={port}", "--include-dashboard=false", folder=folder, name="head")
    ]
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


FEDAL = "fedal -s data.clients=6 -s models.pool=['mlp'] -s params.tau=5 -s evaluate.points=2"


def run(
    folder: Path,
    name: str,
    rounds: int,
    *words: str,
    job: str = FEDAL,
    watch: Callable[[], None] | None = None,
    in_round: Callable[[], None] | None = None,
) -> str:
    """Run a job; its `state_sha256`. `in_round` is called once, in a round of the middle, `watch`
    all the time. Raises RuntimeError, with the log, if the run fails.
    """
    method, *settings = job.split()
    command = ["run", method, "--rounds", str(rounds), "--out", name, *settings]
    print("$", "fedloom", *command, *words, flush=True)
    start = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        env = {**ENVIRONMENT, **os.environ, **TOKEN, "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-m", "fedloom", *command, *words]
        process = subprocess.Popen(call, stdout=log, stderr=log, env=env, cwd=folder)
    while process.poll() is None:
        time.sleep(0.05)
        if watch is not None:
            watch()
        if in_round is not None and done(folder / name) >= rounds // 3:
            in_round()
            in_round = None
    if process.returncode or in_round is not None:
        raise RuntimeError(
            f"{name}: status {process.returncode}\n{(folder / f'{name}.log').read_text()}"
        )
    result = json.loads((folder / name / "result.json").read_text())
    for line in (folder / f"{name}.log").read_text().splitlines():
        if "lost" in line or "repeating" in line:
            print("  ", line.strip())
    digest = str(result["state_sha256"])
    remarks = ", ".join(result["engine"]["remarks"]) or result["engine"]["engine"]
    print(f"  {digest[:16]}, {time.monotonic() - start:.0f} s, of which rounds and evaluations "
          f"{result['seconds']['total'] - result['seconds']['setup']:.1f} s; {remarks}", flush=True)  # fmt: skip  # noqa: E501
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
                print(
                    f"   {nodes[-1].name} is killed: {len(nodes[-1].all_of_it())} processes",
                    flush=True,
                )
                nodes[-1].send(signal.SIGKILL)

            digests["with a node killed"] = run(folder, "killed", rounds, *there, in_round=kill)
        expected = digests["in one process"]
        for name, digest in digests.items():
            print(f"{name:<20} {digest[:16]} {'equal' if digest == expected else 'DIFFERENT'}")
        if set(digests.values()) != {expected}:
            raise SystemExit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rows(file: Path, clients: int) -> None:
    """A CSV file with six rows of 20 numbers and a label for each client, and 600 to test on."""
    rng, count = np.random.default_rng(0), 6 * clients + 600
    x = rng.standard_normal((count, 20)).round(3)
    y = rng.random(count) < 1 / (1 + np.exp(-x[:, :3].sum(1)))
    names = ",".join([*(f"x{c}" for c in range(20)), "label"])
    np.savetxt(file, np.column_stack([x, y]), delimiter=",", fmt="%g", header=names, comments="")


def large(clients: int = 10_000, limit: int = 900) -> None:
    """Print what was typed, the memory of the workers, and whether three nodes have the bits of one
    process.
    """
    folder = Path(tempfile.mkdtemp(prefix="fl", dir="/tmp"))
    job = (
        f"fedavg -s data.name=rows.csv -s data.label=label -s data.clients={clients} -s "
        f"data.partition=iid -s data.test_fraction={600 / (6 * clients + 600):.5f} -s "
        "models.pool=['mlp'] -s evaluate.points=1"
    )
    try:
        rows(folder / "rows.csv", clients)
        digests = [run(folder, "local", 2, job=job)]
        for count in (1, 3):
            peaks = dict[int, int]()

            def watch() -> None:
                time.sleep(0.2)
                for worker in [w for node in nodes for w in node.workers()]:
                    with suppress(psutil.NoSuchProcess):
                        if worker.pid not in peaks:  # noqa: B023 - before it builds its parties
                            worker.rlimit(psutil.RLIMIT_DATA, (limit * 10**6, limit * 10**6))
                        peaks[worker.pid] = max(peaks.get(worker.pid, 0), worker.memory_info().data)  # noqa: B023

            with cluster(count, folder) as (address, nodes):
                there = (
                    "--engine",
                    "ray",
                    "--workers",
                    str(count),
                    "-s",
                    f"engine.address={address}",
                )
                try:
                    digests.append(run(folder, f"nodes-{count}", 2, *there, job=job, watch=watch))
                except RuntimeError as error:
                    print("  ", str(error).splitlines()[-1])
            print(
                f"   at most {limit} MB; workers had",
                ", ".join(f"{p / 1e6:.0f}" for p in peaks.values()),
                flush=True,
            )
        print(
            "equal" if len(digests) == 2 and len({*digests}) == 1 else f"NOT AS EXPECTED: {digests}"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["large"]:
        large(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
