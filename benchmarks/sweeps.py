"""A sweep that is killed and repeated: `python -m benchmarks.sweeps`. Arguments: settings a side
(7), kills (3).

FedAvg on digits, with a grid of learning rates and batch sizes and four seeds: 200 runs with a side
of 7. The sweep runs once to its end, and once more while its processes are killed again and again
(SIGKILL), and the command is repeated. Every run of the second must end with the bits of the first,
and no finished run may be repeated.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SEEDS = 4
RUN = """\
method = "fedavg"
rounds = 2
[data]
clients = 4
[models]
pool = ["mlp"]
[evaluate]
points = 1
[sweep]
seeds = {seeds}
[sweep.over]
"params.lr" = {rates}
"params.batch_size" = {sizes}
"""


def start(folder: Path, out: str) -> subprocess.Popen[bytes]:
    """The command, with its output in a log."""
    command = [
        sys.executable,
        "-m",
        "fedloom",
        "sweep",
        "sweep.toml",
        "--out",
        out,
        "--workers",
        "1",
    ]
    print("$", "fedloom", *command[3:], flush=True)
    with (folder / f"{out}.log").open("a") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)


def finished(folder: Path) -> dict[str, tuple[str, int]]:
    """The bits of each finished run by its name, and when its result was written."""
    files = folder.glob("runs/*/result.json")
    return {
        f.parent.name: (json.loads(f.read_text())["state_sha256"], f.stat().st_mtime_ns)
        for f in files
    }


def killed(process: subprocess.Popen[bytes]) -> int:
    """Kill a command and its processes; how many."""
    every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in every:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    return len(every)


def main(side: int = 7, kills: int = 3) -> None:
    """Print the log, and whether the bits are equal."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        folder = Path(home)
        rates, sizes = [0.01 * 1.3**i for i in range(side)], [8 + 4 * i for i in range(side)]
        (folder / "sweep.toml").write_text(
            RUN.format(seeds=list(range(SEEDS)), rates=rates, sizes=sizes)
        )
        begun = time.monotonic()
        if start(folder, "whole").wait():
            raise SystemExit((folder / "whole.log").read_text())
        whole = finished(folder / "whole")
        print(f"  {len(whole)} runs, {time.monotonic() - begun:.0f} s", flush=True)
        seen: dict[str, tuple[str, int]] = {}
        for n in range(1, kills + 1):
            process = start(folder, "killed")
            while len(finished(folder / "killed")) < len(whole) * n // (kills + 1):
                if process.poll() is not None:
                    raise SystemExit((folder / "killed.log").read_text())
                time.sleep(0.2)
            count = killed(process)
            seen = finished(folder / "killed")
            print(f"  {count} processes killed after {len(seen)} runs", flush=True)
        if start(folder, "killed").wait():
            raise SystemExit((folder / "killed.log").read_text())
        again = finished(folder / "killed")
        repeated = sum(again[name] != before for name, before in seen.items())
        same = {k: bits for k, (bits, _) in again.items()} == {
            k: bits for k, (bits, _) in whole.items()
        }
        print(
            f"  {len(again)} runs, repeated after they had finished: {repeated}; bits "
            f"{'equal' if same else 'DIFFER'}"
        )
        if repeated or not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
