"""Where our CPU time goes beyond the fewest calls: `python -m benchmarks.where [WORK …] [SECONDS]`.

Ours and the loop of `benchmarks.fewest` run in turn. A timer that counts this process's CPU time looks a thousand times
a second at what runs, so a busy machine changes the shares little. The columns are CPU milliseconds of the work: ours,
the bar's, and the difference as a share of the bar, which add up to the ratio less 1.
"""

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

import torch

from benchmarks import afind, augfl, fedal, fedavg, vertical
from benchmarks.fewest import adapting, averaging, choosing, distillation, splitting

EVERY = 0.001
"""CPU seconds between two looks."""
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("the gradient", ("backward", "grad", "_engine_run_backward", "engine_backward")),
    ("optimizer's step", ("move", "tick", "flattened", "_step", "step", "clipped")),
    ("evaluation passes", ("infer",)),
    ("copies that undo a failed call", ("_keep", "transaction", "own_state", "begin", "end")),
    ("checks of messages", ("check_finite", "reply_problem", "check", "check_like", "_finite", "check_callable")),
    ("the ledger", ("_record", "_record_down", "_record_shared", "measured", "record")),
    ("batches, seeded", ("batches", "epochs", "public", "sample_batch", "aligned_batch", "x", "plan", "stream")),
    ("forward pass", ("_call_impl", "_wrapped_call_impl", "functional_call")),
    ("mean of replies", ("combine", "weighted_mean")),
    ("losses and targets", ("cross_entropy", "loss", "distill", "distill_gradient", "soft", "softmax", "kl", "capped")),
    ("a call's seed, copy of its reply, errors", ("run_task", "map_tensors", "_task", "arguments")),
    ("calls of parties", ("_call", "call", "_run", "exchange", "_each", "_leave")),
)
"""Each part with the functions whose time it has; the innermost of them on the stack counts."""
PART = {name: part for part, names in PARTS for name in names}
REST = "the page, or the loop by hand"


def part_of(frame: FrameType | None) -> str:
    """The part that a stack belongs to."""
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        ours = "benchmarks" not in file
        if name in PART and (ours or name == "step"):
            return PART[name]
        if "methods" in file or not ours:
            return REST
        frame = frame.f_back
    return REST


def looked(work: Callable[[], object], found: Counter[str]) -> None:
    """Run some work, and count what it did in `found`."""

    def look(_: int, frame: FrameType | None) -> None:
        found[part_of(frame)] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def pair(work: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and the bar of a line of `benchmarks.fewest`."""
    if work.startswith("fedavg"):
        architecture = "lenet5" if work == "fedavg-lenet5" else "mlp-large"
        return fedavg.ours(architecture), averaging(architecture)
    if work.startswith("fedal"):
        architecture, rounds = ("lenet5", 1) if work == "fedal-lenet5" else ("mlp", 4)
        return fedal.ours(architecture, rounds), distillation(architecture, rounds)
    if work == "split":
        split = vertical.Job("split", 1024, epochs=1)
        return split.round, splitting(split)
    if work == "augfl":
        cnn = augfl.Job("cnn-strided")
        return cnn.round, adapting(cnn)
    same = afind.places(afind.PEERS, "mlp", afind.IMAGE)
    return afind.Job(same, tau=1e-12).round, choosing(same)


WORKS = ("fedal", "split", "afind", "augfl", "fedal-lenet5", "fedavg")


def table(work: str, seconds: float) -> str:
    """The table of one line."""
    ours, bar = pair(work)
    ours(), bar()
    found, spent, times = (Counter[str](), Counter[str]()), [0.0, 0.0], 0
    while sum(spent) < seconds:
        for n, run in enumerate((ours, bar)):
            start = time.process_time()
            looked(run, found[n])
            spent[n] += time.process_time() - start
        times += 1
    a, b = (s / times * 1e3 for s in spent)
    each = [s / max(1, sum(one.values())) for s, one in zip((a, b), found, strict=True)]
    lines = [f"| {work} | ours, ms | fewest, ms | of the fewest |\n|---|---|---|---|"]
    rows = [(part, found[0][part] * each[0], found[1][part] * each[1]) for part in {*found[0], *found[1]}]
    for part, x, y in sorted(rows, key=lambda row: row[2] - row[1]):
        lines.append(f"| {part} | {x:.1f} | {y:.1f} | {(x - y) / b:+.2f} |")
    return "\n".join([*lines, f"| all | {a:.1f} | {b:.1f} | {a / b - 1:+.2f} |"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = sys.argv[1:]
    limit = float(words.pop()) if words and words[-1].replace(".", "").isdigit() else 10.0
    for name in words or WORKS:
        print(table(name, limit), flush=True)
