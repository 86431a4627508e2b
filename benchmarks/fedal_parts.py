"""What FedAL's MLP does beyond the fewest calls, counted: `python -m benchmarks.fedal_parts`.

Operations of torch (with those of gradients) and calls of Python functions in an iteration of ten
clients, ours and of `benchmarks.fewest`. Counts are equal on every machine, unlike seconds. Then
the operations that we do more often.

`python -m benchmarks.fedal_parts --without fedal` (or `split`, `afind`): CPU milliseconds of ours
while part after part is taken out, and of the fewest calls in the same pair. What is left computes
what the fewest calls compute, by our classes.
"""

import cProfile
import pstats
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import afind, fedal, vertical
from benchmarks.fewest import Adam as Fused
from benchmarks.fewest import choosing, distillation, splitting
from benchmarks.timing import cpu
from fedloom.core import context, federation, message
from fedloom.core.context import Rows
from fedloom.core.federation import Federation
from fedloom.core.network import Network
from fedloom.core.optim import Adam
from fedloom.core.party import Party
from fedloom.engines import local
from fedloom.methods.distillation import fedal as page

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


def nothing(*_: object, **__: object) -> None:
    """In place of a check or a record."""


def called(party: Any, task: Any, arguments: Any) -> Any:
    """A call without seed, copies of its reply, and the handling of errors."""
    return getattr(party, task.method)(**arguments)


def local_stage(client: Any, t: int) -> None:
    """The local stage with the gradient of its loss written down."""
    batches = client.batches(t, steps=client.cfg.tau, size=client.cfg.batch_size)
    own = F.softmax(page.steps.stage_logits(client, batches.x), -1)
    labels = F.one_hot(batches.y, client.context.classes).float()
    for i, (x, _) in enumerate(batches):
        p = F.softmax(client.forward(x), -1)
        client.descend(x, (p - labels[i] if i == 0 else 2 * p - labels[i] - own[i]) / len(x))


def transfer_step(
    client: Any, t: int, i: int, n: int, mean: Any, gradient: Any, share: Any, reference: Any
) -> None:
    """The transfer stage without settings that are 1 here."""
    x = page.steps.public_batch(client, t, i)
    f = client.forward(x)
    p = F.softmax(f, -1)
    g = p - F.softmax((n * mean - f) / (n - 1), -1) + page.cap_rows(gradient, 1.0)
    client.descend(x, (g + p - F.softmax(reference["logits"][i], -1) if i else g) / len(x))


def descend(net: Any, x: Tensor, gradient: Tensor) -> None:
    """A step by the gradient itself in place of that of its product with the outputs, whose first
    use loads SymPy.
    """
    outputs, net._sent = net._pass(x)[1], None
    grads = torch.autograd.grad(outputs, list(net.parameters.values()), gradient)
    net.optimizer.move(
        net.flat, torch.cat([g.flatten() for g in grads]), net.slots, *net.optimizer.tick(net.slots)
    )


fused: dict[int, Fused] = {}


def move(adam: Adam, w: Tensor, g: Tensor, slots: dict[str, Tensor], *_: object) -> None:
    """Adam by torch's private fused kernel, whose last bits are others."""
    kept = fused.setdefault(id(slots), Fused([w], adam.lr))
    kept.step([g])


ADAM, COMMON = "separate operations of Adam", 5
PARTS: dict[str, list[tuple[Any, str, Any]]] = {
    "checks of finiteness, structure and shape": [
        (message, "check_finite", nothing),
        (federation, "reply_problem", nothing),
    ],
    "the ledger": [(Federation, "_record", nothing), (Federation, "_record_down", nothing)],
    "the copies that undo a failed call": [
        (Network, "_keep", nothing),
        (Party, "transaction", lambda *_, **__: nullcontext()),
    ],
    "a call's seed, copy of its reply, errors": [(local, "run_task", called)],
    "switching to evaluation": [(Network, "_mode", nothing)],
    "seeded draws, pixels to floats": [
        (context, "sample_plan", lambda _, rows, steps, size: torch.randint(rows, (steps, size))),
        (
            Rows,
            "x",
            lambda rows, which: rows.__dict__.setdefault(
                "floats", rows.pool[rows.index] / 127.5 - 1
            )[which],
        ),
    ],
    "autograd of the losses, settings that are 1": [
        (page, "local_stage", local_stage),
        (page, "transfer_step", transfer_step),
    ],
    "products of outputs and gradients": [(Network, "descend", descend)],
    ADAM: [(Adam, "move", move)],
}
"""What is taken out, in this order; the first `COMMON` are parts of every method."""


@contextmanager
def without(names: list[str]) -> Iterator[None]:
    """Within it, these parts are taken out."""
    changed = [mock.patch.object(*change) for name in names for change in PARTS[name]]
    for change in changed:
        change.start()
    try:
        yield
    finally:
        for change in reversed(changed):
            change.stop()


def ladder(work: str, pairs: int = 5) -> None:
    """Print CPU milliseconds of some work without more and more parts."""
    names = [*PARTS]
    if work == "fedal":
        ours, bar = fedal.ours("mlp", ITERATIONS), distillation("mlp", ITERATIONS)
    elif work == "split":
        job = vertical.Job("split", 1024, epochs=1)
        ours, bar, names = job.round, splitting(job), [*names[:COMMON], ADAM]
    else:
        same = afind.places(afind.PEERS, "mlp", afind.IMAGE)
        ours, bar, names = afind.Job(same, tau=1e-12).round, choosing(same), names[:COMMON]
    ours(), bar()
    print(f"| {work} without | ours, ms | the fewest calls, ms | ratio |\n|---|---|---|---|")
    for n in range(len(names) + 1):
        with without(names[:n]):
            ours()
            each = [(cpu(ours), cpu(bar)) for _ in range(pairs)]
        a, b = (1e3 * statistics.median(column) for column in zip(*each, strict=True))
        ratio = statistics.median(x / y for x, y in each)
        print(
            f"| {names[n - 1] if n else 'nothing'} | {a:.1f} | {b:.1f} | {ratio:.2f} |", flush=True
        )


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    ours, bar = fedal.ours("mlp", ITERATIONS), distillation("mlp", ITERATIONS)
    ours()
    bar()
    more, less = operations(ours), operations(bar)
    print("| in an iteration | ours | fewest | ratio |\n|---|---|---|---|")
    for name, a, b in (
        ("operations", more.total(), less.total()),
        ("calls from Python", calls(ours), calls(bar)),
    ):
        print(f"| {name} | {a / ITERATIONS:,.0f} | {b / ITERATIONS:,.0f} | {a / b:.2f} |")
    print("\n| operation | ours | fewest |\n|---|---|---|")
    most = sorted({*more, *less}, key=lambda name: less[name] - more[name])
    for name in (*most[:SHOWN], *(n for n in most[SHOWN:] if n.startswith("_fused"))):
        print(f"| {name} | {more[name] / ITERATIONS:,.0f} | {less[name] / ITERATIONS:,.0f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ladder(sys.argv[2]) if sys.argv[1:2] == ["--without"] else main()
