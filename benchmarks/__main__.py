"""`make bench`: every benchmark, with what it ran on."""

import platform
from datetime import UTC, datetime

import torch

from benchmarks import (
    afind,
    augfl,
    batched,
    fedal,
    fedavg,
    first_round,
    growth,
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


print(f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}")
fedavg.main(9)
fedal.main(9)
first_round.main(3)
batched.main(5)
workers.main(9)
growth.main()
overhead.main((10, 100, 1_000))
afind.main(5)
vertical.main(5)
augfl.main(5)
net.main(9)
net_rounds.main()
