"""One process and all that it starts: how long, how much CPU, how much memory. Linux only."""

import bisect
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

INTERVAL = 0.5  # seconds between two looks; one costs up to 0.03 s of a core
PATIENCE = 20.0  # seconds that what a job leaves running has to end by itself
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Usage:
    """What a process tree used. Times are of `time.monotonic`, which all processes share.

    Attributes:
        start: when it was started.
        status: the first process's exit status.
        cpu: CPU seconds of all its processes; at least, by what could be counted.
        memory: peak of the sum of their proportional set sizes, bytes: a shared page counts once.
        others: cores that other work kept busy meanwhile, on average, ours of looking included.
        looks: (time, CPU seconds of all processes so far).
    """

    start: float = 0.0
    status: int = 0
    cpu: float = 0.0
    memory: int = 0
    others: float = 0.0
    looks: list[tuple[float, float]] = field(default_factory=list)

    def cpu_between(self, a: float, b: float) -> float:
        """CPU seconds from time `a` to `b`, straight between two looks."""
        return self._cpu_at(b) - self._cpu_at(a)

    def _cpu_at(self, t: float) -> float:
        i = min(max(bisect.bisect(self.looks, (t,)), 1), len(self.looks) - 1)
        (t0, c0), (t1, c1) = self.looks[i - 1], self.looks[i]
        return c0 + (c1 - c0) * (t - t0) / (t1 - t0)


def measure(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: TextIO,
    log: TextIO,
    limit: float = 900.0,
) -> Usage:
    """Run `command` to its end, `out` and `log` being its outputs. This process must have no other
    children.

    Raises:
        TimeoutError: it took longer than `limit` seconds; all its processes are killed.
    """
    adopt_orphans()
    before, busy = _cpu_of_the_dead(), _cpu_of_all()
    usage = Usage(start=time.monotonic())
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=dict(environment)
    )
    seen: dict[tuple[int, str], float] = {}
    try:
        while job.poll() is None:
            _look(usage, seen)
            if time.monotonic() - usage.start > limit:
                raise TimeoutError(f"{command[1]} took longer than {limit:.0f} s")
            time.sleep(INTERVAL)
        _look(usage, seen)
    finally:
        _end_all(0.0 if job.returncode is None else PATIENCE)
    usage.status = job.returncode
    # Each misses something: the kernel's sum, processes that nobody waited for, as Ray's; the
    # looks, short ones.
    usage.cpu = max(_cpu_of_the_dead() - before, usage.looks[-1][1])
    usage.others = max(0.0, _cpu_of_all() - busy - usage.cpu) / (time.monotonic() - usage.start)
    return usage


def wait_for_quiet(patience: float, cores: float = 0.2, seconds: float = 3.0) -> None:
    """Return once fewer than `cores` of the machine are busy, after `patience` seconds at the
    latest.
    """
    until = time.monotonic() + patience
    while time.monotonic() < until:
        busy, start = _cpu_of_all(), time.monotonic()
        time.sleep(seconds)
        if _cpu_of_all() - busy < cores * (time.monotonic() - start):
            return


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that they stay below us and their CPU
    time comes to us.
    """
    if sys.platform != "linux":
        raise SystemExit("the peers are measured by what Linux tells in /proc")
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _look(usage: Usage, seen: dict[tuple[int, str], float]) -> None:
    memory = 0
    for pid, born, cpu in _descendants():
        seen[pid, born] = cpu
        memory += _proportional_set_size(pid)
    usage.memory = max(usage.memory, memory)
    usage.looks.append((time.monotonic(), sum(seen.values())))


def _descendants() -> list[tuple[int, str, float]]:
    """(pid, when it was born, CPU seconds) of all processes below this one."""
    born: dict[int, str] = {}
    cpu: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            pid = int(entry.name)
            born[pid], cpu[pid] = fields[19], (int(fields[11]) + int(fields[12])) / TICKS
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    todo = children.get(os.getpid(), [])
    while todo:
        found += todo
        todo = [child for pid in todo for child in children.get(pid, [])]
    return [(pid, born[pid], cpu[pid]) for pid in found]


def _proportional_set_size(pid: int) -> int:
    """Bytes; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _end_all(patience: float) -> None:
    """Wait for every descendant, and kill those that still run after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > until:
                for pid, _, _ in _descendants():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _cpu_of_the_dead() -> float:
    """CPU seconds of all descendants that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_of_all() -> float:
    """CPU seconds that the machine has worked since it started, or was kept from by its host."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / TICKS
