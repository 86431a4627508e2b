"""AFIND+: a round against the loop that one writes in plain PyTorch, and what rounds of many peers
cost.

The bar does what a faithful round does, for the same coresets: each neighbour's gradient at the
asker's body, its head pass and body pass with `torch.optim.SGD`, two losses, the weighted mean. The
scale table counts trainings, probes, messages and bytes, to be held against m (1 + |C|), m (1 +
|C|), 2 m |C| and 4 m |C| (2 d_w + d_φ).
"""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import compare
from benchmarks.toy import CLASSES, contexts
from fedloom import models
from fedloom.core import graphs
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.engines import BatchedEngine, LocalEngine
from fedloom.methods import find, steps
from fedloom.methods.peer import selection

PEERS, ROWS, BATCH, LR = 8, 150, 50, 0.02
IMAGE, SMALL = (1, 28, 28), (3, 32, 32)


def places(
    n: int, architecture: str, shape: tuple[int, ...], degree: int | None = None
) -> list[ClientContext]:
    """Peers that begin alike, on a complete or a random regular graph."""
    graph = None if degree is None else graphs.regular(n, degree)
    first = contexts(n, ROWS, architecture, shape=shape)
    near = [graphs.Others(n, i) if graph is None else graph[i] for i in range(n)]
    return [
        replace(s, network=first[0].network, neighbours=near[i], parties=n)
        for i, s in enumerate(first)
    ]


class Job:
    """A federation of AFIND+, and how to do one of its rounds."""

    def __init__(
        self, sites_: list[ClientContext], *, batched: bool = False, **params: Any
    ) -> None:
        self.method = find("afind-plus")
        self.cfg = self.method.configure(
            params={"batch_size": BATCH, "lr": LR, "epochs": 1, **params}
        )
        peers = [self.method.client(self.cfg, s) for s in sites_]
        self.engine = (BatchedEngine if batched else LocalEngine)(peers)
        form = {k: p.detach().to("meta") for k, p in sites_[0].build().named_parameters()}
        graph = {s.id: s.neighbours for s in sites_}
        self.fed = Federation(
            self.engine, coordinator="coordinator", graph=graph, param_shapes=form
        )
        self.t = 0

    def round(self) -> None:
        """The next one."""
        self.fed.round = self.t
        for _ in self.method.round(self.fed, None, self.engine.ids, self.cfg, self.t):
            pass
        self.t += 1


def plain(sites_: list[ClientContext]) -> Callable[[], None]:
    """A faithful round in which everybody asks everybody."""
    net = models.build("mlp", IMAGE, CLASSES, seed=0)
    states = [copy.deepcopy(net.state_dict()) for _ in sites_]
    data = [(s.data.every, s.data.y(torch.arange(ROWS))) for s in sites_ if s.data]
    body = [k for k in net.state_dict() if not k.startswith("head.")]
    layer = list(net.body.parameters())[-2:]

    def epoch(parameters: list[Tensor], x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.SGD(parameters, lr=LR, momentum=0.9)
        for batch in torch.randperm(ROWS).split(BATCH):
            net.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()

    def work(i: int, j: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, y = data[j]
        net.load_state_dict({**states[j], **{k: states[i][k] for k in body}})
        some = torch.randperm(ROWS)[:100]
        before = F.cross_entropy(net(x[some]), y[some])
        phi = torch.cat([g.flatten() for g in torch.autograd.grad(before, layer)])
        epoch(list(net.head.parameters()), x, y)
        epoch(list(net.body.parameters()), x, y)
        with torch.no_grad():
            loss = 0.1 * F.cross_entropy(net(x[some]), y[some]) + 0.9 * before
        return phi, loss.detach(), {k: v.clone() for k, v in net.state_dict().items()}

    def round() -> None:
        nonlocal states
        new = []
        for i in range(len(data)):
            found = [work(i, j) for j in range(len(data))]
            shares = torch.softmax(torch.stack([-loss for _, loss, _ in found]), 0)
            F.cosine_similarity(torch.stack([phi for phi, _, _ in found]), found[i][0][None])
            mixed = {
                k: sum(w * s[k] for w, (_, _, s) in zip(shares, found, strict=True)) for k in body
            }
            new.append({**found[i][2], **mixed})
        states = new

    return round


def against_plain(pairs: int) -> None:
    """Print the ratio to the bar, in turn and batched."""
    for batched in (False, True):
        same = places(PEERS, "mlp", IMAGE)
        job = Job(same, batched=batched, tau=1e-12)  # so that everybody is always asked
        work = f"AFIND+, mlp, {PEERS} peers{', batched' * batched}, a round"
        compare(work, "its algorithm in plain PyTorch", job.round, plain(same), pairs)


def scale(
    peers: int,
    architecture: str,
    shape: tuple[int, ...],
    degree: int | None,
    rounds: int,
    **params: Any,
) -> None:
    """Print one line for each round of many peers."""
    job = Job(places(peers, architecture, shape, degree), **params)
    peer: Any = job.engine._parties[0]
    weights = sum(v.numel() for v in steps.shared_weights(peer).values())
    phi = sum(peer.params[k].numel() for k in selection.proxy_names(peer.params))
    for t in range(rounds):
        start = time.process_time()
        job.round()
        spent = time.process_time() - start
        entries = [e for e in job.fed.ledger if e.round == t and e.receiver == e.sender == "peer"]
        pairs = sum(e.count for e in entries if e.kind == "request")
        notes = list(job.engine.notes().values())
        predicted = 4 * pairs * (2 * weights + phi)
        size = sum(e.bytes for e in entries)
        print(
            f"| {peers:,} {architecture} | {job.cfg.mode} | {t} | {pairs / peers:.1f} | "
            f"{sum(float(n['trainings']) for n in notes):,.0f} | "
            f"{sum(float(n['probes']) for n in notes):,.0f} | {sum(e.count for e in entries):,} "
            f"| {size / 1e6:,.1f} ({predicted / 1e6:,.1f}) | {spent:.1f} | "
            f"{1e3 * spent / peers:.1f} |",
            flush=True,
        )


def measure_selection(peers: int, width: int) -> None:
    """Print what choosing costs a peer: similarities, p, θ and the next coreset."""
    cfg = find("afind-plus").configure()
    phis = torch.randn(peers - 1, width)
    own = torch.randn(width)
    p = torch.full((peers - 1,), 1 / (peers - 1)).double()
    ids = torch.arange(peers - 1)
    start = time.process_time()
    for _ in range(20):
        s = selection.cosine(phis, own).double()
        p = selection.probabilities(p, ids, s, cfg.upsilon)
        (p >= selection.threshold(selection.entropy(s), len(s), cfg)).sum()
    spent = (time.process_time() - start) / 20
    print(f"choosing among {peers - 1} proxies of {width:,}: {1e3 * spent:.2f} CPU ms a peer")


def main(pairs: int) -> None:
    """Print everything."""
    torch.set_num_threads(1)
    against_plain(pairs)
    for peers, width in ((100, 8_256), (1_000, 4_160)):
        measure_selection(peers, width)
    print(
        "| peers | mode | round | |C| | trainings | probes | messages | MB (4m|C|(2d_w+d_φ)) | "
        "CPU s | ms/peer |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    scale(100, "cnn-small", SMALL, None, 3, mode="cheap", upsilon=0.05)
    scale(100, "cnn-small", SMALL, None, 3, explore_neighbours=10, upsilon=0.05)
    scale(1_000, "mlp", (64,), 20, 3, mode="cheap")
    scale(1_000, "mlp", (64,), 20, 2, explore_neighbours=5)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
