"""What FedAL's MLP does beyond the fewest calls, counted: `python -m benchmarks.fedal_parts`.

Operations of torch (with those of gradients) and calls of Python functions in an iteration of ten clients, ours and of
`benchmarks.fewest`. Counts are equal on every machine, unlike seconds. Then the operations that we do more often.
"""

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import fedal
from benchmarks.fewest import distillation

ITERATIONS = 4
SHOWN = 12


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> Counter[str]:
    """Operations of some iterations."""
    with Operations() as counted:
        work()
    return counted.found


def calls(work: Callable[[], object]) -> int:
    """Calls of Python functions, and of compiled ones from Python."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    ours, bar = fedal.ours("mlp", ITERATIONS), distillation("mlp", ITERATIONS)
    ours()
    bar()
    more, less = operations(ours), operations(bar)
    print("| in an iteration | ours | fewest | ratio |\n|---|---|---|---|")
    for name, a, b in (("operations", more.total(), less.total()), ("calls from Python", calls(ours), calls(bar))):
        print(f"| {name} | {a / ITERATIONS:,.0f} | {b / ITERATIONS:,.0f} | {a / b:.2f} |")
    print("\n| operation | ours | fewest |\n|---|---|---|")
    most = sorted({*more, *less}, key=lambda name: less[name] - more[name])
    for name in (*most[:SHOWN], *(n for n in most[SHOWN:] if n.startswith("_fused"))):
        print(f"| {name} | {more[name] / ITERATIONS:,.0f} | {less[name] / ITERATIONS:,.0f} |")


if __name__ == "__main__":
    main()
