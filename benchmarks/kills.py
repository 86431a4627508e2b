"""Random kills, and the same bits: `python -m benchmarks.kills [KILLS] [SEED] [ROUNDS]`.

Runs of FedAL on digits, in turn at three nodes (real processes) and with two workers. After random
times one process,
drawn by chance, is killed with SIGKILL: a node, the coordinator, a worker, or the main process of a
run with workers. Nodes are started again at once, coordinators and main processes with --resume; a
run replaces its dead workers itself. Each run must end with the `state_sha256` of an undisturbed
run in one process, and no process may end without being killed.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from rich.console import Console

from fedloom.cli.federation import certs

NODES = ("a", "b", "c")
SECONDS = (0.1, 3.0)
"""Least and most seconds of progress before a kill."""
MOST = 25
"""Kills in one run."""
AT_ONCE = 0.0005
"""Probability, each 20 ms, of a kill without progress since the last one, which hits processes that
start.
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Place:
    """A process that is started again whenever it is killed."""

    def __init__(self, words: list[str], again: list[str], log: Path) -> None:
        self.again, self.log = again, log
        self.start(words)

    def start(self, words: list[str] | None = None) -> None:
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "fedloom", *(words or self.again)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=self.log.parent
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()


def words(seed: int, rounds: int, out: str) -> list[str]:
    """The command line of a run."""
    settings = ["data.clients=3", "models.pool=['mlp']", "params.tau=2", f"seed={seed}"]
    return [
        "run",
        "fedal",
        "--rounds",
        str(rounds),
        "--out",
        out,
        *(w for s in settings for w in ("-s", s)),
    ]


def workers_of(pid: int) -> list[int]:
    """The workers of a run: children of its fork server."""
    try:
        servers = psutil.Process(pid).children()
        return [child.pid for server in servers for child in server.children()]
    except psutil.NoSuchProcess:
        return []


def federation(folder: Path, rounds: int) -> None:
    """Certificates and configs: nodes that allow the run, a coordinator that waits for
    lost nodes.
    """
    with (folder / "certs.log").open("w") as log:
        certs(
            NODES,
            folder / "fed",
            ["fedal"],
            Console(file=log),
            address=f"127.0.0.1:{free_port()}",
            here=True,
        )
    for name in NODES:
        policy = folder / "fed" / name / "node.toml"
        policy.write_text(
            "lease = 5\n"
            + policy.read_text().replace("max_rounds = 1000", f"max_rounds = {max(rounds, 1000)}")
        )
    text = (folder / "fed" / "federation.toml").read_text()
    (folder / "fed" / "federation.toml").write_text(f"wait = 600\nreconnect = 600\n{text}")


def disturbed(
    folder: Path, seed: int, rounds: int, at_nodes: bool, most: int, chance: random.Random
) -> Counter[str]:
    """A run, and at most so many kills; how often each kind of process was killed.

    Raises:
        RuntimeError: a process ended that nobody had killed.
    """
    out, kills = f"run-{seed}", Counter[str]()
    engine = ["--federation", "fed/federation.toml"] if at_nodes else ["-s", "engine.workers=2"]
    command = [*words(seed, rounds, out), *engine]
    role = "coordinator" if at_nodes else "main process"
    nodes = [
        Place(w := ["node", f"fed/{name}/node.toml"], w, folder / f"{name}.log")
        for name in NODES
        if at_nodes
    ]
    run = Place(command, [*command, "--resume"], folder / f"{out}.log")
    due, before = 0.0, round_of(folder / out)
    try:
        while run.process.poll() is None:
            time.sleep(0.02)
            if any(node.process.poll() is not None for node in nodes):
                raise RuntimeError(f"a node ended by itself; see {folder}")
            if not due and (round_of(folder / out) > before or chance.random() < AT_ONCE):
                due = time.monotonic() + chance.uniform(*SECONDS)
            if not due or time.monotonic() < due or kills.total() >= most:
                continue
            due, before = 0.0, round_of(folder / out)
            if chance.random() < 0.25:
                kills[role] += 1
                # One that dies before it has made its folder is started as the first time.
                run.again = [*command, "--resume"] if (folder / out).exists() else command
                run.kill()
            elif at_nodes:
                kills["node"] += 1
                chance.choice(nodes).kill()
            elif workers := workers_of(run.process.pid):
                kills["worker"] += 1
                os.kill(chance.choice(workers), signal.SIGKILL)
        if run.process.returncode:
            raise RuntimeError(
                f"the {role} ended with status {run.process.returncode}; see "
                f"{folder / f'{out}.log'}"
            )
    finally:
        for place in (*nodes, run):
            place.process.kill()
            place.process.wait()
    return kills


def round_of(out: Path) -> int:
    """The last completed round of a run."""
    try:
        return int(json.loads((out / "live.json").read_text())["round"])
    except (OSError, ValueError):
        return 0


def sha256(folder: Path, out: str) -> str:
    return str(json.loads((folder / out / "result.json").read_text())["state_sha256"])


def main(count: int, seed: int, rounds: int) -> None:
    """Print a line for each run, and the sum."""
    chance, total, different, start = random.Random(seed), Counter[str](), 0, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    federation(folder, rounds)
    number = 0
    while total.total() < count:
        alone = f"alone-{number}"
        quiet = subprocess.run(
            [sys.executable, "-m", "fedloom", *words(number, rounds, alone)],
            cwd=folder,
            capture_output=True,
            check=False,
        )
        if quiet.returncode:
            raise RuntimeError(quiet.stderr.decode())
        kills = disturbed(
            folder, number, rounds, number % 2 == 0, min(MOST, count - total.total()), chance
        )
        same = sha256(folder, f"run-{number}") == sha256(folder, alone)
        different += not same
        total += kills
        print(
            f"run {number}: {dict(kills)}, {'the same bits' if same else 'OTHER BITS'}", flush=True
        )
        number += 1
    minutes = (time.monotonic() - start) / 60
    print(
        f"{total.total()} kills in {number} runs, {minutes:.1f} minutes: {dict(total)}; "
        f"{different} with other bits"
    )
    print(folder)
    if different:
        sys.exit(1)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [100, 0, 600][len(given) :]))
