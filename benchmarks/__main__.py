"""`make bench`: the benchmarks, and what they ran on. CPU seconds are those of one thread, beside plain PyTorch."""

import argparse
import platform
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from benchmarks import (
    afind,
    augfl,
    batched,
    fedal,
    fedavg,
    fewest,
    first_round,
    growth,
    lockstep,
    net,
    net_rounds,
    overhead,
    vertical,
    workers,
)


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


BENCHMARKS: dict[str, Callable[[], object]] = {
    "fedavg": lambda: fedavg.main(9),
    "fedal": lambda: fedal.main(9),
    "afind": lambda: afind.main(5),
    "vertical": lambda: vertical.main(5),
    "augfl": lambda: augfl.main(5),
    "fewest": lambda: fewest.main(5),
    "first_round": lambda: first_round.main(3),
    "batched": lambda: batched.main(5),
    "lockstep": lambda: lockstep.main(5),
    "workers": lambda: workers.main(9),
    "growth": lambda: growth.main(),
    "overhead": lambda: overhead.main((10, 100, 1_000)),
    "net": lambda: net.main(9),
    "net_rounds": lambda: net_rounds.main(),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"no benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    print(f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}")
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()
