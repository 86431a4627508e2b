"""Parties together against parties in turn: FedAvg on MLP clients (CPU), and on a GPU a small CNN
and AFIND's CNN.

`python -m benchmarks.batched` needs nothing but the repository; on a machine with a GPU it runs
there as well.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.fedavg import BATCH, LR, plain
from benchmarks.timing import ratio
from benchmarks.toy import SHAPE, contexts
from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.engines import BatchedEngine, Engine, LocalEngine


def rounds(
    make: Callable[..., Engine],
    architecture: str,
    clients: int,
    rows: int,
    device: str,
    shape=SHAPE,
):
    """A function that runs one round."""
    method = methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")
    cfg = method.configure(params={"lr": LR, "batch_size": BATCH})
    places = contexts(clients, rows, architecture, shape=shape, device=device)
    fed = Federation(make([method.client(cfg, s) for s in places]))
    server = method.server(cfg, ClientContext(id=0, network=places[0].network, device=device))
    t = 0

    def run() -> None:
        nonlocal t
        fed.round = t
        for _ in method.round(fed, server, fed.engine.ids, cfg, t):
            pass
        t += 1

    return run


def twice(run: Callable[[], None]) -> Callable[[], None]:
    """As many rounds as the plain loop does at once."""

    def both() -> None:
        run()
        run()

    return both


def on_cpu(pairs: int) -> None:
    for architecture in ("mlp", "mlp-large"):
        for clients in (20, 100):
            together = rounds(BatchedEngine, architecture, clients, 300, "cpu")
            a, b, r = ratio(together, rounds(LocalEngine, architecture, clients, 300, "cpu"), pairs)
            line = (
                f"batched {architecture:9} {clients:4} clients  {a:.3f}  in turn {b:.3f} CPU "
                f"s/round  {1 / r:.2f}x"
            )
            if clients == 20:
                _, _, r = ratio(twice(together), plain(architecture), pairs)
                line += f"  (plain PyTorch: {1 / r:.2f}x)"
            print(line)


def on_gpu(repeats: int) -> None:
    """A hundred clients of a small CNN; and AFIND's CNN of four layers on CIFAR-10's shape."""
    name = torch.cuda.get_device_name()
    for architecture, clients, shape in (("cnn-small", 100, (1, 28, 28)), ("cnn", 20, (3, 32, 32))):
        found = {}
        for engine in (BatchedEngine, LocalEngine):
            run = rounds(engine, architecture, clients, 300, "cuda", shape)
            run()
            wall = []
            for _ in range(repeats):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                wall.append(time.perf_counter() - start)
            found[engine] = statistics.median(wall)
        samples = clients * -(-300 // BATCH) * BATCH
        a, b = found[BatchedEngine], found[LocalEngine]
        print(
            f"{name}: {clients} x {architecture}: together {samples / a:,.0f} samples/s, in turn "
            f"{samples / b:,.0f}, {b / a:.1f}x"
        )


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    on_cpu(pairs)
    if torch.cuda.is_available():
        on_gpu(pairs)
    else:
        print("no GPU here: run this on a machine that has one")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
