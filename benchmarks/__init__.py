"""Benchmarks. Each, run as `python -m benchmarks.NAME`, first says on standard error what it ran
on, and when.
"""

import os
import platform
import sys
from datetime import UTC, datetime

SAID = "FEDLOOM_BENCHMARK"
"""Set once the line is printed, so that processes of a benchmark do not repeat it."""


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """`AMD EPYC, 2 cores, load 1.3, Python 3.11.7, torch 2.13.0, 2026-11-27`."""
    from importlib.metadata import version

    load = f"load {os.getloadavg()[0]:.1f}"
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return (
        f"{processor()}, {os.cpu_count()} cores, {load}, {versions}, {datetime.now(UTC):%Y-%m-%d}"
    )


if sys.argv[0] == "-m" and SAID not in os.environ:  # a module of this package is about to run
    os.environ[SAID] = "1"
    print(machine(), file=sys.stderr, flush=True)
