"""Three tiny methods of other families, on the core as it is.

Each stands here as a user would write it, and each is held to a closed form: gossip averaging on a
ring, a split network between a label party and two column parties, and consensus ADMM on
quadratics.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.optim import SGD
from fedloom.core.party import Party
from fedloom.engines import IsolatedEngine, LocalEngine

ENGINES = ["local", "isolated"]


def engine(kind: str, party: type[Party[None]], contexts: list[ClientContext]) -> LocalEngine:
    builders = [partial(party, None, context) for context in contexts]
    return LocalEngine([b() for b in builders]) if kind == "local" else IsolatedEngine(builders)


# -- gossip averaging on a ring --------------------------------------------------------------------


class Peer(Party[None]):
    STATE = ("value",)

    def setup(self) -> None:
        self.value = torch.full((3,), float(self.context.id), dtype=torch.float64)

    def share(self) -> Tensor:
        return self.value

    def average(self, *, inbox: dict[str, Tensor]) -> None:
        self.value = torch.stack([self.value, *inbox.values()]).mean(0)


def gossip(fed: Federation, peers: tuple[int, ...], t: int) -> None:
    ring = {i: [peers[i - 1], peers[(i + 1) % len(peers)]] for i in peers}
    fed.exchange(ring, answer="share", take="average")


@pytest.mark.parametrize("kind", ENGINES)
def test_gossip_reaches_the_mean_and_the_coordinator_holds_nothing(kind: str) -> None:
    n = 6
    fed = Federation(
        engine(kind, Peer, [ClientContext(id=i) for i in range(n)]), coordinator="coordinator"
    )
    for t in range(60):
        fed.round = t
        gossip(fed, fed.engine.ids, t)
    states: list[Any] = [*fed.engine.states().values()]
    values = torch.stack([s["value"] for s in states])
    assert torch.allclose(values, torch.full_like(values, (n - 1) / 2), atol=1e-9)
    assert fed.ledger.sent("coordinator") == fed.ledger.received("coordinator") == 0
    assert fed.ledger.sent("peer") == 60 * n * 2 * 3 * 8
    assert set(fed.ledger.pairs) == {
        (f"peer-{i}", f"peer-{(i + d) % n}") for i in range(n) for d in (1, -1)
    }


# -- one network split between a label party and two column parties --------------------------------


class Columns(Party[None]):
    STATE = ("params", "opt")

    def setup(self) -> None:
        self.network(self.context.build(), SGD(lr=0.1))

    def embed(self, *, rows: Tensor) -> Tensor:
        return self.forward(X[self.context.id][rows])

    def update(self, *, rows: Tensor, cut: Tensor) -> None:
        self.descend(X[self.context.id][rows], cut)


class Labels(Party[None]):
    STATE = ("params", "opt")

    def setup(self) -> None:
        self.network(self.context.build(), SGD(lr=0.1))

    def learn(self, parts: dict[int, Tensor], rows: Tensor) -> dict[int, dict[str, Tensor]]:
        joint = torch.cat(list(parts.values()), -1).requires_grad_()
        (cuts,) = torch.autograd.grad(F.cross_entropy(self.model(joint), Y[rows]), joint)
        self.minimize(lambda: F.cross_entropy(self.model(joint.detach()), Y[rows]))
        return {m: {"cut": c} for m, c in zip(parts, cuts.chunk(len(parts), -1), strict=True)}


def split_step(fed: Federation, label: Labels, columns: tuple[int, ...], rows: Tensor) -> None:
    parts = fed.call(
        columns, "embed", shared={"rows": rows}, expect=floats(len(rows), 4), min_replies=2
    )
    fed.call(parts, "update", shared={"rows": rows}, each=label.learn(parts, rows))


X = [torch.randn(40, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
Y = (X[0][:, 0] + X[1][:, 1] > 0).long()


def bottom(i: int) -> nn.Module:
    torch.manual_seed(i)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def top() -> nn.Module:
    torch.manual_seed(9)
    return nn.Linear(8, 2)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_split_step_is_the_step_of_the_joint_network(kind: str) -> None:
    contexts = [ClientContext(id=i, network=partial(bottom, i)) for i in range(2)]
    label = Labels(None, ClientContext(id=9, network=top))
    fed = Federation(engine(kind, Columns, contexts), coordinator="labels")
    bottoms, head = nn.ModuleList([bottom(0), bottom(1)]), top()
    joint = torch.optim.SGD([*bottoms.parameters(), *head.parameters()], lr=0.1)
    for t in range(20):
        rows = torch.arange(t, t + 16)
        split_step(fed, label, fed.engine.ids, rows)
        joint.zero_grad()
        F.cross_entropy(
            head(torch.cat([b(x[rows]) for b, x in zip(bottoms, X, strict=True)], -1)), Y[rows]
        ).backward()
        joint.step()
    states: list[Any] = [*fed.engine.states().values()]
    split = [p for s in states for p in s["params"].values()]
    for ours, theirs in zip(
        [*split, *label.params.values()], [*bottoms.parameters(), *head.parameters()], strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)
    down = {e.what for e in fed.ledger if e.receiver == "columns"}
    assert down == {"rows int64[16]", "rows int64[16]; cut float32[16,4]"}  # and never a label


# -- consensus ADMM on quadratics ------------------------------------------------------------------

RHO = 2.0
CURVATURE = torch.tensor([[1.0, 4.0], [3.0, 0.5], [2.0, 2.0]], dtype=torch.float64)
CENTRE = torch.tensor([[0.0, 1.0], [5.0, -2.0], [-1.0, 3.0]], dtype=torch.float64)


class Node(Party[None]):
    """Holds f_i(x) = 1/2 Σ a (x - c)², its own x and its dual y."""

    STATE = ("x", "dual")

    def setup(self) -> None:
        self.x = torch.zeros(2, dtype=torch.float64)
        self.dual = torch.zeros(2, dtype=torch.float64)

    def solve(self, *, z: Tensor) -> Tensor:
        a, c = CURVATURE[self.context.id], CENTRE[self.context.id]
        self.x = (a * c - self.dual + RHO * z) / (a + RHO)  # argmin f(x) + y·(x - z) + ρ/2 |x - z|²
        return self.dual + RHO * self.x

    def ascend(self, *, z: Tensor) -> None:
        self.dual = self.dual + RHO * (self.x - z)


def admm(fed: Federation, nodes: tuple[int, ...], z: Tensor) -> Tensor:
    u = fed.call(nodes, "solve", shared={"z": z}, expect=z, min_replies=len(nodes))
    z = torch.stack(list(u.values())).mean(0) / RHO
    fed.call(nodes, "ascend", shared={"z": z})
    return z


@pytest.mark.parametrize("kind", ENGINES)
def test_admm_converges_to_the_closed_form(kind: str) -> None:
    fed = Federation(engine(kind, Node, [ClientContext(id=i) for i in range(3)]))
    z = torch.zeros(2, dtype=torch.float64)
    for t in range(120):
        fed.round = t
        z = admm(fed, fed.engine.ids, z)
    assert torch.allclose(z, (CURVATURE * CENTRE).sum(0) / CURVATURE.sum(0), atol=1e-8)
    duals: list[Any] = [s["dual"] for s in fed.engine.states().values()]
    assert torch.allclose(torch.stack(duals).sum(0), torch.zeros(2, dtype=torch.float64), atol=1e-8)
