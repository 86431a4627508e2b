"""FedAvg's LeNet-5 anchor with two worker processes: wall seconds against the plain loop, memory,
and the first round.

Wall seconds want a machine with two cores that nobody else uses; a busy one shows in the spread
that is printed.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.fedavg import BATCH, CLIENTS, LR, ROUNDS, ROWS, plain
from benchmarks.toy import contexts
from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.engines import WorkersEngine

WORKERS = 2
JOB = "from benchmarks.workers import ours; engine, run = ours(rounds={}); run(); engine.close()"


def ours(
    architecture: str = "lenet5", workers: int = WORKERS, rounds: int = ROUNDS
) -> tuple[WorkersEngine, Callable]:
    """The engine, to be closed, and what does some rounds."""
    torch.set_num_threads(1)
    method = methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")
    cfg = method.configure(params={"lr": LR, "batch_size": BATCH})
    places = contexts(CLIENTS, ROWS, architecture)
    server = method.server(cfg, ClientContext(id=0, network=places[0].network))
    engine = WorkersEngine((method.client(cfg, s) for s in places), workers=workers)
    fed = Federation(engine)
    t = 0

    def run() -> None:
        nonlocal t
        for _ in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, fed.engine.ids, cfg, t):
                pass
            t += 1

    return engine, run


def wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speed(pairs: int) -> None:
    torch.set_num_threads(1)
    engine, run = ours()
    with engine:
        loop = plain("lenet5")
        wall(loop), wall(run)
        runs = [(wall(run) / ROUNDS, wall(loop) / ROUNDS) for _ in range(pairs)]
    ratios = sorted(a / b for a, b in runs)
    a, b = (statistics.median(r[k] for r in runs) for k in (0, 1))
    print(
        f"FedAvg lenet5, {WORKERS} workers: ours {a:.3f}  plain {b:.3f} wall s/round  "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def first_round(repeats: int) -> None:
    runs = sorted(
        wall(lambda: subprocess.run(command(1), check=True, env=environment()))
        for _ in range(repeats)
    )
    print(
        f"FedAvg lenet5, {WORKERS} workers: first round after {runs[repeats // 2]:.1f} s from "
        "process start"
    )


def memory() -> None:
    """The most that all processes held at once, looked at ten times a second; Linux only."""
    most, count = 0.0, 0
    with subprocess.Popen(command(4), env=environment()) as job:
        while job.poll() is None:
            tree = descendants(job.pid)
            used = sum(map(proportional, tree)) + boxes(job.pid)
            most, count = max((most, count), (used, len(tree)))
            time.sleep(0.1)
    print(
        f"FedAvg lenet5, {WORKERS} workers: {most / 1e6:.0f} MB PSS at most, in {count} processes"
    )


def command(rounds: int) -> list[str]:
    return [sys.executable, "-c", JOB.format(rounds)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                found += map(int, task.read_text().split())
    return found


def proportional(pid: int) -> int:
    """Bytes of a process, shared pages divided among those that share them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def boxes(pid: int) -> int:
    """Bytes of the files in memory that are mapped nowhere, so that no process counts them."""
    try:
        files = [f for f in Path(f"/proc/{pid}/fd").iterdir() if "memfd:fedloom" in os.readlink(f)]
        return sum(f.stat().st_blocks * 512 for f in files)
    except OSError:
        return 0


def main(pairs: int) -> None:
    speed(pairs)
    first_round(3)
    memory()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
