"""Vertical rounds against the loops that one writes in plain PyTorch: split learning, and
Proto-EVFL.

Four parties, each with two channels of 14x14 pixels, LeNet-5, 64 numbers an embedding; the bars
have the same networks, batches of 64 and `torch.optim.AdamW`. A round of split learning is one pass
over 1,024 aligned rows, one of Proto-EVFL 25 steps of each party and three passes of the active
party over 256 aligned rows.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import compare
from fedloom import models
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine
from fedloom.methods import find
from fedloom.methods.features import class_means
from fedloom.methods.vertical import steps
from fedloom.methods.vertical.proto_evfl import Fusion
from fedloom.methods.vertical.proto_evfl_steps import similarities, to_prototypes, transport_cost

PARTIES, CLASSES, WIDTH, BATCH, OWN = 4, 10, 64, 64, 4000


def places(aligned: int) -> tuple[ClientContext, list[ClientContext]]:
    """The home, and the parties, of random pixels."""
    chance = torch.Generator().manual_seed(0)
    shift = torch.full((1, 1, 1), 127.5)
    labels = torch.randint(CLASSES, (aligned,), generator=chance)
    common: dict[str, Any] = {"parties": PARTIES, "classes": CLASSES, "aligned": aligned}

    def rows(y: Tensor | None, n: int) -> Rows:
        pool = torch.randint(256, (n, 2, 14, 14), generator=chance, dtype=torch.uint8)
        return Rows(pool, y, torch.arange(n), shift, shift)

    network = [partial(models.build, "lenet5", (2, 14, 14), WIDTH, seed=m) for m in range(PARTIES)]
    contexts = [
        ClientContext(id=m, data=rows(None, aligned + OWN), network=network[m], **common)
        for m in range(PARTIES)
    ]
    return ClientContext(id=0, data=rows(labels, aligned), **common), contexts


class Job:
    """A method on those places, and how to do one of its rounds."""

    def __init__(self, name: str, aligned: int, **params: Any) -> None:
        method = find(name)
        self.cfg = method.configure(params=params)
        self.place, self.contexts = places(aligned)
        assert method.server is not None
        self.active: Any = method.server(self.cfg, self.place)
        self.fed = Federation(
            LocalEngine([method.client(self.cfg, s) for s in self.contexts]),
            coordinator="active",
            colocated=(0,),
        )
        self.method, self.t = method, 0

    def party(self, m: int) -> Any:
        """Party m."""
        return self.fed.engine._parties[m]  # type: ignore[attr-defined]

    def round(self) -> None:
        """The next one."""
        self.fed.round = self.t
        for _ in self.method.round(self.fed, self.active, self.fed.engine.ids, self.cfg, self.t):
            pass
        self.t += 1


def joint(job: Job) -> Callable[[], None]:
    """A pass of the joint network."""
    bottoms = [copy.deepcopy(job.party(m).net.module) for m in range(PARTIES)]
    top = copy.deepcopy(job.active.net.module)
    aligned = job.place.aligned
    x = [s.rows.every[:aligned] for s in job.contexts]
    y = steps.labels(job.active)
    whole = nn.ModuleList([*bottoms, top])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, weight_decay=1e-4)

    def one_pass() -> None:
        whole.train()
        for rows in torch.randperm(aligned).split(BATCH):
            optimizer.zero_grad()
            parts = [bottom(each[rows]) for bottom, each in zip(bottoms, x, strict=True)]
            F.cross_entropy(top(torch.stack(parts, 1)), y[rows]).backward()
            optimizer.step()

    return one_pass


def box(job: Job) -> Callable[[], None]:
    """A round of Proto-EVFL's algorithm box."""
    cfg, aligned, y = job.cfg, job.place.aligned, steps.labels(job.active)
    extractors = [copy.deepcopy(job.party(m).net.module) for m in range(PARTIES)]
    data = [s.rows.every for s in job.contexts]
    each = [
        torch.optim.AdamW(e.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        for e in extractors
    ]
    fusion = Fusion(PARTIES, WIDTH, CLASSES, cfg)
    active = torch.optim.AdamW(fusion.parameters(), lr=cfg.active_lr, weight_decay=0)
    prior = [torch.full((CLASSES,), 1 / CLASSES)] * PARTIES
    overall = prior[0]
    mu = [
        class_means(e.eval()(x[:aligned]).detach(), y, CLASSES)[0]
        for e, x in zip(extractors, data, strict=True)
    ]

    def round() -> None:
        nonlocal mu, overall
        sent = []
        for m, (extractor, x, optimizer) in enumerate(zip(extractors, data, each, strict=True)):
            some = x[torch.randperm(len(x))[: cfg.prior_rows]]
            extractor.eval()
            with torch.no_grad():
                belongs = to_prototypes(similarities(extractor(some), mu[m], cfg), prior[m])
            prior[m] = 0.01 * overall + 0.99 * belongs.mean(0)
            extractor.train()
            for _ in range(cfg.steps):
                optimizer.zero_grad()
                batch = x[torch.randint(len(x), (BATCH,))]
                transport_cost(extractor(batch), mu[m], prior[m], cfg).backward()
                optimizer.step()
            extractor.eval()
            with torch.no_grad():
                extractor(some)  # for the monitor
                sent.append(extractor(x[:aligned]))
        f = torch.stack(sent, 1)
        for _ in range(cfg.epochs):
            for rows in torch.randperm(aligned).split(BATCH):
                active.zero_grad()
                F.cross_entropy(fusion(f[rows]), y[rows]).backward()
                active.step()
        with torch.no_grad():
            adapted = fusion.adapt(f)
        mu = [
            0.9 * old + 0.1 * class_means(new, y, CLASSES)[0]
            for old, new in zip(mu, adapted.unbind(1), strict=True)
        ]
        overall = torch.stack(prior).mean(0)

    return round


def main(pairs: int) -> None:
    """Print both ratios."""
    torch.set_num_threads(1)
    for name, aligned, bar, params in (
        ("split", 1024, joint, {"epochs": 1}),
        ("proto-evfl", 256, box, {}),
    ):
        job = Job(name, aligned, **params)
        against = "the joint network" if name == "split" else "its algorithm box by hand"
        compare(f"{name}, lenet5, {PARTIES} parties, a round", against, job.round, bar(job), pairs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
