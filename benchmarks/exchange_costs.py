"""What an exchange costs in two versions: `python -m benchmarks.exchange_costs SOURCE SOURCE
[ROUNDS [KINDS…]]`.

A source is the `src` folder of a checkout, such as one of `git worktree add /tmp/before 7afc998`.
Three nodes and a coordinator are processes of that version, with certificates, on digits with an
MLP. Of each kind of run there is one of 5 rounds and one of ROUNDS more; the table has the
difference of the two, for each round more: CPU seconds of all four processes, and the bytes of the
ledger. So neither the start of processes nor the opening of a run counts.
"""

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.kills import free_port

NODES = ("a", "b", "c")
SHORT = 5
KINDS: dict[str, tuple[str, list[list[str]]]] = {
    "FedAvg, plain": ("fedavg", [[]]),
    "FedAvg, secure sum": ("fedavg", [["aggregate.secure=true"], ["params.secure=true"]]),
    "FedAvg, median": ("fedavg", [["aggregate.rule=median"], ["params.robust=median"]]),
    "FedAvg, DP-SGD": ("fedavg-dp", [[]]),
    "FedAL, plain": ("fedal", [["params.tau=2"]]),
    "FedAL, secure sum": ("fedal", [["params.tau=2", "params.adv=0", "aggregate.secure=true"]]),
}
"""A method, and its settings as one version or another spells them."""

Cost = tuple[float, float, float, float]
"""CPU milliseconds of the nodes and of the coordinator, kB of the messages, and kB of them on the
wire.
"""


def cpu(pids: list[int]) -> float:
    """User and system seconds of these processes."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def run(
    folder: Path,
    env: dict[str, str],
    method: str,
    settings: list[str],
    rounds: int,
    pids: list[int],
) -> Cost:
    """What one run cost.

    Raises:
        RuntimeError: the run did not end well.
    """
    out = folder / f"run-{len(list(folder.glob('run-*')))}"
    words = ["data.clients=3", "models.pool=['mlp']", "evaluate.points=1", *settings]
    command = [
        "run",
        method,
        "--rounds",
        str(rounds),
        "--federation",
        "fed/federation.toml",
        "--out",
        out.name,
    ]
    before = cpu(pids)
    with (folder / f"{out.name}.log").open("w") as log:
        asked = [sys.executable, "-m", "fedloom", *command, *(w for s in words for w in ("-s", s))]
        process = subprocess.Popen(asked, cwd=folder, env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError((folder / f"{out.name}.log").read_text()[-400:])
    with (out / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    bytes_, wire = (sum(int(row[name]) for row in rows) for name in ("bytes", "wire_bytes"))
    return (
        1e3 * (cpu(pids) - before),
        1e3 * (used.ru_utime + used.ru_stime),
        bytes_ / 1e3,
        wire / 1e3,
    )


def costs(source: Path, rounds: int, kinds: Sequence[str]) -> dict[str, Cost | None]:
    """The cost of a round of each kind of run; None where this version refuses it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "COLUMNS": "200"}
    fedloom = [sys.executable, "-m", "fedloom"]
    found: dict[str, Cost | None] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home, open(os.devnull, "w") as nowhere:
        folder = Path(home)
        certs = [
            *fedloom,
            "certs",
            *NODES,
            "--out",
            "fed",
            "--method",
            "fedavg",
            "--method",
            "fedal",
        ]
        certs += ["--address", f"127.0.0.1:{free_port()}"]
        if subprocess.run(
            [*certs, "--all-here"], cwd=folder, env=env, stdout=nowhere, stderr=nowhere
        ).returncode:
            subprocess.run(certs, cwd=folder, env=env, stdout=nowhere, check=True)
        if "min_sum" in (source / "fedloom/remote/node/config.py").read_text():
            for name in NODES:
                policy = folder / "fed" / name / "node.toml"
                policy.write_text("min_sum = 3\n" + policy.read_text())
        asked = [[*fedloom, "node", f"fed/{name}/node.toml"] for name in NODES]
        nodes = [
            subprocess.Popen(words, cwd=folder, env=env, stdout=nowhere, stderr=nowhere)
            for words in asked
        ]
        pids = [node.pid for node in nodes]
        try:
            run(folder, env, "fedavg", [], 1, pids)  # the nodes have started
            for kind in kinds:
                (method, spellings), found[kind] = KINDS[kind], None
                for settings in spellings:
                    try:
                        short = run(folder, env, method, settings, SHORT, pids)
                    except RuntimeError as error:
                        print(f"{source}, {kind}: {str(error).strip()[-200:]}", file=sys.stderr)
                        continue
                    long = run(folder, env, method, settings, SHORT + rounds, pids)
                    a, b, c, d = (
                        (more - less) / rounds for more, less in zip(long, short, strict=True)
                    )
                    found[kind] = (a, b, c, d)
                    break
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait()
    return found


def main(before: str, after: str, rounds: str = "40", *kinds: str) -> None:
    """Print a line for each kind of run."""
    load = os.getloadavg()[0]
    old, new = (
        costs(Path(source).resolve(), int(rounds), kinds or [*KINDS]) for source in (before, after)
    )
    print(f"load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end; {rounds} rounds\n")
    print(
        "| a round of | CPU ms, nodes | coordinator | ratio of both | kB | on the wire "
        "|\n|---|---|---|---|---|---|"
    )
    for kind in old:
        one, two = old[kind], new[kind]
        columns = [
            " → ".join(f"{cost[k]:.{digits}f}" if cost else "–" for cost in (one, two))
            for k, digits in ((0, 0), (1, 0), (2, 1), (3, 1))
        ]
        ratio = f"{(two[0] + two[1]) / (one[0] + one[1]):.2f}" if one and two else "–"
        print(f"| {kind} | {columns[0]} | {columns[1]} | {ratio} | {columns[2]} | {columns[3]} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
