"""FedAvg, LeNet-5, 20 clients of 300 MNIST-shaped rows, batch 32, one epoch a round, one thread.

The bar is the loop that one writes in plain PyTorch: state dicts, `torch.optim.SGD`, batches by
index. Both do the same ten full batches a client and round.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.timing import compare
from benchmarks.toy import CLASSES, SHAPE, contexts
from fedloom import methods, models
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine

CLIENTS, ROWS, BATCH, LR, ROUNDS = 20, 300, 32, 0.01, 2


def plain(architecture: str) -> Callable[[], None]:
    places = contexts(CLIENTS, ROWS, architecture)
    net = models.build(architecture, SHAPE, CLASSES, seed=0)
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    data = [(s.data.every, s.data.y(torch.arange(ROWS))) for s in places if s.data]

    def rounds() -> None:
        nonlocal weights
        for _ in range(ROUNDS):
            total = {k: torch.zeros_like(v) for k, v in weights.items()}
            for x, y in data:
                net.load_state_dict(weights)
                optimizer = torch.optim.SGD(net.parameters(), lr=LR)
                order = torch.randperm(ROWS)
                order = torch.cat([order, order[: -ROWS % BATCH]])
                for batch in order.split(BATCH):
                    optimizer.zero_grad()
                    F.cross_entropy(net(x[batch]), y[batch]).backward()
                    optimizer.step()
                for k, v in net.state_dict().items():
                    total[k] += v / CLIENTS
            weights = total

    return rounds


def ours(architecture: str, rounds: int = ROUNDS) -> Callable[[], None]:
    method = methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")
    cfg = method.configure(params={"lr": LR, "batch_size": BATCH})
    places = contexts(CLIENTS, ROWS, architecture)
    server = method.server(cfg, ClientContext(id=0, network=places[0].network))
    fed = Federation(LocalEngine([method.client(cfg, s) for s in places]))
    t = 0

    def run() -> None:
        nonlocal t
        for _ in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, fed.engine.ids, cfg, t):
                pass
            t += 1

    return run


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    for architecture in ("lenet5", "mlp-large"):
        work = f"FedAvg, {architecture}, {CLIENTS} clients, a round"
        compare(
            work,
            "torch.optim and state dicts",
            ours(architecture),
            plain(architecture),
            pairs,
            ROUNDS,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
