"""fedloom and its peers from the registry at one job, each in an environment of its own: `python -m
benchmarks.peers`.

It makes the environments once (about 4 GB, from the requirements beside the jobs), runs all jobs in
turn, several times over, and prints a table of medians. It waits for a quiet machine, and of each
job's runs the half counts that other work disturbed least. On Linux the registry's torch brings
CUDA; PIP_EXTRA_INDEX_URL names another index. fedloom has one as well, or it would share its pages
of memory with whatever else runs in yours.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import measure, wait_for_quiet

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom" / "peers"
JOBS = [(name, workers) for name in ("fedloom", "pfl", "flower") for workers in (1, 2)]
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# in the table: what a run's line calls it, digits, and whether its least and most are shown as well
COLUMNS = {
    "first round ends after, s": ("first", 1, True),
    "a later round, s": ("later", 2, True),
    "a later round, CPU s": ("later CPU", 2, False),
    "all, CPU s": ("CPU", 1, False),
    "peak memory, MB": ("MB", 0, False),
    "final loss": ("loss", 4, False),
    "others' work, cores": ("others", 1, False),
}


@dataclass(frozen=True)
class Job:
    """A script here, with its number of workers, in the environment that its requirements file
    names.
    """

    name: str
    workers: int

    def command(self, environments: Path) -> list[str]:
        return [
            str(environments / self.name / "bin" / "python"),
            str(HERE / f"{self.name}_job.py"),
            "--workers",
            str(self.workers),
        ]


def main() -> None:
    arguments = parse()
    for requirements in sorted(HERE.glob("*.txt")):
        if any(job.name == requirements.stem for job in arguments.jobs):
            make_environment(arguments.envs / requirements.stem, requirements)
    runs: dict[Job, list[dict[str, Any]]] = {job: [] for job in arguments.jobs}
    for repeat in range(arguments.repeats + 1):
        for job in arguments.jobs:
            wait_for_quiet(arguments.patience if repeat else 0.0)
            measured = run(job, arguments.envs)
            print(json.dumps({"warm-up": repeat == 0, **measured}), file=sys.stderr, flush=True)
            if repeat:  # the first time, disks are slow
                runs[job].append(measured)
    losses = [measured["loss"] for measured in itertools.chain(*runs.values())]
    if max(losses) - min(losses) > 0.001:  # a batch of 32 more or less a round is five times that
        raise SystemExit(
            f"these jobs did not do the same work: they end at losses of {min(losses)} to "
            f"{max(losses)}"
        )
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{datetime.now(UTC):%Y-%m-%d}\n\n{table(runs)}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--envs", type=Path, default=CACHE, help=f"folder of the environments ({CACHE})"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="runs of each job that count, after one that does not",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        help="most seconds to wait for others' work before a run",
    )
    parser.add_argument("jobs", type=job_of, nargs="*", help="such as fedloom:1 pfl:2 (all)")
    arguments = parser.parse_args()
    arguments.envs = arguments.envs.absolute()
    arguments.jobs = arguments.jobs or [Job(*job) for job in JOBS]
    return arguments


def job_of(text: str) -> Job:
    name, _, workers = text.partition(":")
    if not (HERE / f"{name}_job.py").exists() or not (workers or "1").isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no job: name one like fedloom:1, pfl:2 or flower:2"
        )
    return Job(name, int(workers or 1))


def make_environment(folder: Path, requirements: Path) -> None:
    """A virtual environment with what the file asks for, unless it is there already."""
    made = folder / "requirements.txt"
    if made.exists() and made.read_text() == requirements.read_text():
        return
    print(f"Installing {requirements.name} into {folder} (once)...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    # a path in the file starts from here
    subprocess.run([*pip, "-r", requirements], cwd=HERE, check=True)
    made.write_text(requirements.read_text())


def run(job: Job, environments: Path) -> dict[str, Any]:
    """One run, as one line of figures."""
    with (
        tempfile.TemporaryDirectory(prefix="peers-") as place,
        open(Path(place) / "log", "w+") as log,
    ):
        own = {"FLWR_HOME": f"{place}/flwr", "RAY_TMPDIR": place}  # and nothing is left behind
        with open(Path(place) / "out", "w+") as out:
            environment = {**os.environ, **QUIET, **own, "OMP_NUM_THREADS": "1"}
            # pip compiled the peers; fedloom's own may stay as well
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            usage = measure(job.command(environments), environment, out, log)
            out.seek(0), log.seek(0)
            lines = out.read().splitlines()
        if usage.status or not lines:
            raise SystemExit(
                f"{job.name} with {job.workers} workers ended with status "
                f"{usage.status}:\n{log.read()[-4000:]}"
            )
    line = json.loads(lines[-1])
    marks = line["marks"]
    return {
        "job": job.name,
        "workers": job.workers,
        "versions": line["versions"],
        "first": round(marks[0] - usage.start, 3),
        "later": round(statistics.median(b - a for a, b in itertools.pairwise(marks)), 3),
        "later CPU": round(usage.cpu_between(marks[0], marks[-1]) / (len(marks) - 1), 3),
        "CPU": round(usage.cpu, 2),
        "MB": round(usage.memory / 1e6),
        "others": round(usage.others, 2),
        "loss before": line["loss before"],
        "loss": line["loss"],
    }


def table(runs: dict[Job, list[dict[str, Any]]]) -> str:
    """Medians in Markdown, over the half of each job's runs that other work on the machine
    disturbed least.
    """
    rows = [["", "workers", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for job, measured in runs.items():
        versions = ", ".join(f"{name} {number}" for name, number in measured[0]["versions"].items())
        calm = sorted(measured, key=lambda line: float(line["others"]))[: len(measured) // 2 + 1]
        cells = [median([line[key] for line in calm], *how) for key, *how in COLUMNS.values()]
        rows.append([versions, str(job.workers), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def median(values: Sequence[float], digits: int, spread: bool) -> str:
    text = f"{statistics.median(values):.{digits}f}"
    return f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})" if spread else text


if __name__ == "__main__":
    main()
