"""What a round costs besides its steps, for federations of 10 to 10,000: `python -m
benchmarks.overhead`.

Stubs have no network: they return the ten numbers that they are sent, so a call is all overhead
(faults, checks, templates, the ledger). Clients of the FedAvg example take one step of softmax
regression on 8 rows; their overhead is the CPU time of a round less that of the same steps alone.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedloom import methods, models
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.party import Party
from fedloom.engines import LocalEngine

NUMBERS = (10, 100, 1_000, 10_000)
FEATURES, CLASSES, BATCH = 64, 10, 8


class Stub(Party[None]):
    """A party that returns what it is sent."""

    def echo(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The message."""
        return {"x": x}


def cpu(work: Callable[[], object], repeats: int) -> float:
    """The median of the CPU seconds of some repetitions, after one that does not count."""
    taken = []
    for _ in range(1 + repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def stubs(count: int, repeats: int) -> tuple[float, float, float]:
    """CPU microseconds, and bytes of data and on the wire, of one message and its reply."""
    fed = Federation(LocalEngine(Stub(None, ClientContext(id=i)) for i in range(count)))
    message = {"x": torch.zeros(10)}

    def round() -> None:
        fed.round += 1
        assert (
            len(fed.call(range(count), "echo", shared=message, expect={"x": floats(10)})) == count
        )

    spent = cpu(round, repeats) / count
    last = [entry for entry in fed.ledger if entry.round == fed.round]
    return 1e6 * spent, sum(e.bytes for e in last) / count, sum(e.wire_bytes for e in last) / count


def clients(count: int, repeats: int) -> tuple[float, float]:
    """CPU microseconds of a client's round, and of its step alone."""
    method = methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")
    cfg = method.configure(params={"batch_size": BATCH})
    chance = torch.Generator().manual_seed(0)
    pool = torch.randn(1000, FEATURES, generator=chance)
    labels = torch.randint(CLASSES, (1000,), generator=chance)
    rows = partial(Rows, pool, labels, shift=torch.zeros(1), scale=torch.ones(1))
    network = partial(models.build, "linear", (FEATURES,), CLASSES, seed=0)
    places = [
        ClientContext(
            id=i,
            parties=count,
            classes=CLASSES,
            network=network,
            data=rows(torch.arange(i % 900, i % 900 + 8)),
        )
        for i in range(count)
    ]
    parties: list[Any] = [method.client(cfg, place) for place in places]
    fed = Federation(LocalEngine(parties))
    assert method.server is not None
    server = method.server(cfg, ClientContext(id=0, network=network))
    x, y = pool[:BATCH], labels[:BATCH]

    def round() -> None:
        fed.round += 1
        for _ in method.round(fed, server, fed.engine.ids, cfg, fed.round):
            pass

    def steps() -> None:
        for party in parties:
            party.net.minimize(lambda x, y, party=party: F.cross_entropy(party.model(x), y), x, y)

    return 1e6 * cpu(round, repeats) / count, 1e6 * cpu(steps, repeats) / count


def main(numbers: Sequence[int] = NUMBERS) -> None:
    """Print the table, in CPU microseconds and bytes per party."""
    torch.set_num_threads(1)
    print(
        "| parties | a stub's call | bytes | on the wire | a client's round | its step alone | "
        "overhead |"
    )
    print("|---|---|---|---|---|---|---|")
    for count in numbers:
        repeats = max(1, min(9, 3_000 // count))
        call, data, wire = stubs(count, repeats)
        whole, step = clients(count, repeats)
        print(
            f"| {count:,} | {call:.0f} | {data:.0f} | {wire:.0f} | {whole:.0f} | {step:.0f} | "
            f"{whole - step:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or NUMBERS)
