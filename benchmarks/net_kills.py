"""Random kills of a federation of real processes: `python -m benchmarks.net_kills MINUTES [SECONDS_BETWEEN] [SEED]`.

Three nodes and a coordinator run FedAL on digits. Every so often one process, drawn by chance, is killed with SIGKILL
and started again: nodes at once, the coordinator with --resume. At the end
the coordinator is told to stop. What is asked then: did any process end without being killed, are all failures of calls
those of a node that was away, is every node's state readable, did any process grow.
"""

import csv
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

from rich.console import Console

from fedloom.cli.federation import certs
from fedloom.methods import registry
from fedloom.remote.node.store import Store

NODES = ("a", "b", "c")
RUN = ["run", "fedal", "--engine", "net", "-s", "data.clients=3", "-s", "models.pool=['mlp']", "-s", "params.tau=2"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class NodeLocation:
    """A process that is started again whenever it is killed."""

    def __init__(self, name: str, words: list[str], folder: Path) -> None:
        self.name, self.words, self.log = name, words, folder / f"{name}.log"
        self.kills, self.largest = 0, 0
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedloom", *self.words], stdout=log, stderr=log, env=env, cwd=self.log.parent
            )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.kills += 1

    def measure(self) -> None:
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return
        found = [int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")]
        self.largest = max([self.largest, *found])


def main(minutes: float, between: float, seed: int) -> None:
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    quiet = Console(file=(folder / "certs.log").open("w"))
    certs(NODES, folder / "fed", list(registry()), quiet, address=f"127.0.0.1:{free_port()}")
    for name in NODES:
        policy = folder / "fed" / name / "node.toml"
        policy.write_text(policy.read_text().replace("max_rounds = 1000", "max_rounds = 1000000"))
    places = {name: NodeLocation(name, ["node", f"fed/{name}/node.toml"], folder) for name in NODES}
    out = ["--out", "run", "-s", "engine.federation=fed/federation.toml", "--rounds", str(int(60 * minutes * 20))]
    end = time.monotonic() + 60 * minutes
    coordinator = [*RUN, *out]
    places["coordinator"] = NodeLocation("coordinator", coordinator, folder)
    places["coordinator"].words = [*coordinator, "--resume"]
    following, begun, unasked = time.monotonic() + between, time.monotonic(), Counter[str]()
    while time.monotonic() < end:
        time.sleep(0.5)
        for place in places.values():
            place.measure()
            if place.process.poll() is not None:  # nobody killed it
                unasked[place.name] += 1
                place.start()
        if time.monotonic() > following:
            following += between
            victim = places[rng.choice(list(places))]
            victim.kill()
            victim.start()
    # a Ctrl-C, so that it says where it is, and one last start from there
    time.sleep(15)
    coordinator_ = places["coordinator"].process
    coordinator_.send_signal(signal.SIGTERM)
    stopped = coordinator_.wait(120)
    report(folder, places, unasked, stopped, time.monotonic() - begun)
    for place in places.values():
        if place.process.poll() is None:
            place.process.terminate()
            place.process.wait(20)


def report(folder: Path, places: dict[str, NodeLocation], unasked: Counter[str], stopped: int, seconds: float) -> None:
    live = json.loads((folder / "run" / "live.json").read_text())
    with (folder / "run" / "failures.csv").open() as file:
        reasons = Counter(row["reason"] for row in csv.DictReader(file))
    print(f"{seconds / 60:.1f} minutes, kills: " + ", ".join(f"{p.name} {p.kills}" for p in places.values()))
    print(f"ended without being killed: {dict(unasked) or 'nobody'}; the coordinator stopped with status {stopped}")
    print(f"rounds done {live['round']}, accuracy {live['accuracy']}")
    print(f"failed calls by reason: {dict(reasons)}")
    for name in NODES:
        for run in (folder / "fed" / name / "state").glob("run-*"):
            entry = Store(run).read()
            print(f"node {name}: state of round {entry.round if entry else '-'}, readable")
    print("largest memory, MB: " + ", ".join(f"{p.name} {p.largest / 1024:.0f}" for p in places.values()))
    print(folder)


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    main(*(given + [2.0, 30.0, 0.0][len(given) :]))  # type: ignore[arg-type]
