"""FedAL, 10 clients, batch 32, tau 5, one thread: fedloom against a loop written by hand for this
one method.

The bar keeps everything in one function: `torch.optim.Adam`, frozen copies of the models for the
less-forgetting terms, one forward and one backward pass a step. It has no messages, no ledger, no
checks.
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.timing import compare
from benchmarks.toy import CLASSES, contexts
from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine
from fedloom.methods.distillation.fedal import mlp

CLIENTS, ROWS, BATCH, TAU = 10, 200, 32, 5


def by_hand(architecture: str, rounds: int) -> Callable[[], None]:
    places = contexts(CLIENTS, ROWS, architecture)
    nets = [s.build() for s in places]
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    data = [(s.data.every, s.data.y(torch.arange(ROWS))) for s in places if s.data]
    public = places[0].public.rows.every  # type: ignore[union-attr]
    judge = mlp(CLASSES, 32, 256, CLIENTS)
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-4)
    author = torch.arange(CLIENTS).repeat_interleave(BATCH)

    def kl(reference: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return F.kl_div(F.log_softmax(z, -1), F.softmax(reference, -1), reduction="batchmean")

    def run() -> None:
        for _ in range(rounds):
            for net, optimizer, (x, y) in zip(nets, optimizers, data, strict=True):
                frozen = copy.deepcopy(net).eval()
                for _ in range(TAU):
                    rows = torch.randperm(ROWS)[:BATCH]
                    z = net(x[rows])
                    with torch.no_grad():
                        before = frozen(x[rows])
                    optimizer.zero_grad()
                    (F.cross_entropy(z, y[rows]) + kl(before, z)).backward()
                    optimizer.step()
            frozen_nets = [copy.deepcopy(net).eval() for net in nets]
            for _ in range(TAU):
                x = public[torch.randperm(len(public))[:BATCH]]
                outputs = [net(x) for net in nets]
                f = torch.stack([z.detach() for z in outputs])
                p = F.softmax(f / 2, -1).flatten(0, 1)
                judge_optimizer.zero_grad()
                F.cross_entropy(judge(p), author).backward()
                judge_optimizer.step()
                f.requires_grad_()
                u = -F.cross_entropy(
                    judge(F.softmax(f / 2, -1).flatten(0, 1)), author, reduction="sum"
                )
                (g,) = torch.autograd.grad(u, f)
                mean = f.detach().mean(0)
                for n, (net, z, optimizer) in enumerate(
                    zip(frozen_nets, outputs, optimizers, strict=True)
                ):
                    with torch.no_grad():
                        before = net(x)
                    target = (CLIENTS * mean - z.detach()) / (CLIENTS - 1)
                    optimizer.zero_grad()
                    (kl(target, z) + (g[n] * z).sum() / BATCH + kl(before, z)).backward()
                    optimizer.step()

    return run


def ours(architecture: str, rounds: int) -> Callable[[], None]:
    method = methods.find("fedal")
    cfg = method.configure()
    engine = LocalEngine([method.client(cfg, s) for s in contexts(CLIENTS, ROWS, architecture)])
    assert method.server is not None
    server = method.server(cfg, ClientContext(id=0, parties=CLIENTS, classes=CLASSES))
    fed = Federation(engine)
    t = 0

    def run() -> None:
        nonlocal t
        for _ in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
            t += 1

    return run


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    for architecture, rounds in (("lenet5", 2), ("mlp", 10)):
        work = f"FedAL, {architecture}, {CLIENTS} clients, an iteration"
        compare(
            work,
            "a loop by hand",
            ours(architecture, rounds),
            by_hand(architecture, rounds),
            pairs,
            rounds * TAU,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
