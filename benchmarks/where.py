"""Where our CPU time goes beyond the fewest calls: `python -m benchmarks.where [SECONDS]`.

Ours and the loop of `benchmarks.fewest` run in turn. A timer that counts this process's CPU time
looks a thousand times a second at what runs, so a busy machine changes the shares little. A column
is a work, its rows what a part takes more than in the fewest calls, as a share of all of their
time: they add up to the ratio less 1.
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
REST = "optimizer, losses, the page's own lines"
"""Of the bar: all but passes, as its loop has them in one."""
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "forward and backward passes",
        (
            "_call_impl",
            "_wrapped_call_impl",
            "functional_call",
            "infer",
            "backward",
            "_engine_run_backward",
            "grad",
        ),
    ),
    (
        REST,
        (
            "move",
            "tick",
            "flattened",
            "_step",
            "step",
            "clipped",
            "loss",
            "distill",
            "soft",
            "_backward",
        ),
    ),
    (
        "seeded batches, pixels to floats",
        ("batches", "epochs", "public", "sample_batch", "aligned_batch", "x", "stream"),
    ),
    ("a call's seed, copy of its reply, errors", ("run_task", "map_tensors", "_task", "arguments")),
    ("copies that undo a failed call", ("_keep", "transaction", "own_state", "begin", "end")),
    ("checks of messages", ("check_finite", "reply_problem", "check", "check_like", "_finite")),
    (
        "ledger, order of calls, means",
        (
            "_record",
            "_record_down",
            "_record_shared",
            "measured",
            "_call",
            "call",
            "_run",
            "exchange",
            "combine",
        ),
    ),
)
"""Each part with the functions whose time it has; the innermost of them on the stack counts."""
PART = {name: part for part, names in PARTS for name in names}


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


def excess(work: str, seconds: float) -> tuple[dict[str, float], float]:
    """What each part takes more than in the fewest calls, as a share of them; and the ratio."""
    ours, bar = pair(work)
    ours(), bar()
    found, spent = (Counter[str](), Counter[str]()), [0.0, 0.0]
    while sum(spent) < seconds:
        for n, run in enumerate((ours, bar)):
            start = time.process_time()
            looked(run, found[n])
            spent[n] += time.process_time() - start
    a, b = (
        time_spent / max(1, sum(one.values())) for time_spent, one in zip(spent, found, strict=True)
    )
    return {part: (found[0][part] * a - found[1][part] * b) / spent[1] for part, _ in PARTS}, spent[
        0
    ] / spent[1]


def main(seconds: float) -> None:
    """Print the table."""
    columns = [excess(work, seconds) for work in WORKS]
    print(f"| | {' | '.join(WORKS)} |\n|---{'|---' * len(WORKS)}|")
    for part, _ in PARTS:
        print(f"| {part} | {' | '.join(f'{shares[part]:+.2f}' for shares, _ in columns)} |")
    print(
        "| the fewest calls take 1; ours | "
        f"{' | '.join(f'**{ratio:.2f}**' for _, ratio in columns)} |"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
