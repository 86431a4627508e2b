"""`fedloom stats` over many nodes, a process each: `python -m benchmarks.stats_nodes [NODES]`, 50
by default.

Each node has 200 rows of ten numbers and a label of two classes, certificates, and a connection to
the coordinator, a process too. All run on this machine; nodes are forked from one process after its
imports, whose memory they share. It prints the seconds of the command, the bytes of all replies,
and whether the means are those of all rows.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.kills import free_port
from fedloom.cli.federation import certs
from fedloom.cli.remote import node as serve

ROWS, COLUMNS = 200, [f"x{i}" for i in range(10)]


def write(folder: Path, names: list[str]) -> np.ndarray:
    """The files of nodes and of the run; all rows (n, 10)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(names), ROWS, 10)).round(4)
    with (folder / "log").open("w") as log:
        certs(
            names,
            folder / "fed",
            ["stats"],
            Console(file=log),
            address=f"127.0.0.1:{free_port()}",
            here=True,
        )
    for name, rows in zip(names, x, strict=True):
        lines = [",".join(map(str, [*row, "no" if row[0] < 0 else "yes"])) for row in rows]
        own = folder / "fed" / name
        (own / "rows.csv").write_text("\n".join([",".join([*COLUMNS, "ill"]), *lines, ""]))
        allowed = (own / "node.toml").read_text().replace('approve = "ask"', 'approve = "off"')
        data = (
            '[data.stays]\nrows = "rows.csv"\nlabel = "ill"\nclasses = ["no", "yes"]\nkeep = '
            f"{COLUMNS}\n"
        )
        (own / "node.toml").write_text(f"{allowed}\n{data}")
    schema = f'columns = {COLUMNS}\nlabel = "ill"\nclasses = ["no", "yes"]\n'
    (folder / "run.toml").write_text(
        f'[data]\nname = "stays"\ntest_fraction = 0.2\n[data.row_schema]\n{schema}'
    )
    return x.reshape(-1, 10)


def started(config: Path) -> int:
    """The number of a process that serves a node."""
    if process := os.fork():
        return process
    try:
        with (config.parent / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            serve(config)
    finally:
        os._exit(0)


def main(count: int = 50) -> None:
    """Print the figures."""
    names = [f"node-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        folder = Path(home)
        x = write(folder, names)
        processes = [started(folder / "fed" / name / "node.toml") for name in names]
        try:
            call = [
                sys.executable,
                "-m",
                "fedloom",
                "stats",
                "run.toml",
                "--federation",
                "fed/federation.toml",
                "--json",
            ]
            begun = time.perf_counter()
            done = subprocess.run(
                call,
                cwd=folder,
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            seconds = time.perf_counter() - begun
            if done.returncode:
                raise SystemExit(done.stderr + (folder / "fed" / names[0] / "log").read_text())
        finally:
            for process in processes:
                os.kill(process, signal.SIGTERM)
            for process in processes:
                os.waitpid(process, 0)
        logs = [
            (folder / "fed" / name / "state" / "audit.jsonl").read_text().splitlines()
            for name in names
        ]
    sent = [sum(json.loads(line).get("bytes_out", 0) for line in log) for log in logs]
    table = json.loads(done.stdout)["tables"][0]
    rows, means = (
        np.array([row[table["columns"].index(name)] for row in table["rows"]])
        for name in ("Rows", "Mean")
    )
    near = np.abs(means - x.mean(0)).max() < 4 / np.sqrt(rows.min())
    print(
        f"{count} nodes, {int(rows[0]):,} rows to train on, means {'as' if near else 'NOT as'} "
        "those of all rows"
    )
    print(
        f"{sum(sent) / 1000:.1f} kB of replies from all; {seconds:.0f} s with the start, load "
        f"{os.getloadavg()[0]:.0f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
