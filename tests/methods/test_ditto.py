"""Ditto's page against its paper: the proximal step, both models apart, and its reductions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.context import ClientContext, Rows
from fedloom.core.evaluation import predictions
from fedloom.methods import find, steps
from fedloom.methods.peer.ditto import PERSONAL
from fedloom.methods.peer.gossip import GossipConfig, GossipPeer
from tests.toy import Toy, common, contexts, equal, rows

DITTO, GOSSIP = find("ditto"), find("gossip")
ROWS = 24


def doubled(found: Rows) -> Rows:
    return replace(
        found, pool=found.pool.double(), shift=found.shift.double(), scale=found.scale.double()
    )


def client_contexts(n: int) -> list[ClientContext]:
    """In float64, all with equally many rows."""
    return contexts(n, make=lambda _: common().double(), data=lambda i: doubled(rows(ROWS, i)))


def by_hand(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The toy network's loss, written out."""
    hidden = (x @ params["body.0.weight"].T + params["body.0.bias"]).clamp_min(0)
    z = hidden @ params["head.weight"].T + params["head.bias"]
    return (torch.logsumexp(z, -1) - z[torch.arange(len(y)), y]).mean()


def gradient_by_hand(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    leaves = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
    found = torch.autograd.grad(by_hand(leaves, x, y), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def copied(tree: Any) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in tree.items()}


def test_the_personal_gradient_is_that_of_the_loss_plus_lam_times_the_distance() -> None:
    peer = Toy(DITTO, client_contexts=client_contexts(1), lam=0.7).party(0)
    w = copied(peer.params)
    noise = torch.Generator().manual_seed(0)
    peer.params = {
        k: x + 0.1 * torch.randn(x.shape, generator=noise, dtype=x.dtype) for k, x in w.items()
    }
    x, y = peer.sample_batch(0, size=ROWS)
    assert x.dtype == torch.float64
    value, found = peer.gradient(peer.proximal_loss, w, x, y)
    plain = gradient_by_hand(copied(peer.params), x, y)
    apart = sum(float((v - w[k]).square().sum()) for k, v in peer.params.items())
    assert float(value) == pytest.approx(
        float(by_hand(copied(peer.params), x, y)) + 0.35 * apart, rel=1e-12
    )
    for k, g in found.items():
        assert torch.allclose(g, plain[k] + 0.7 * (peer.params[k] - w[k]), atol=1e-14, rtol=0)


def test_two_rounds_of_the_personal_model_by_hand() -> None:
    """One full batch is one step: v <- v - η (∇F(v) + λ (v - w)), w as it was when the
    round began.
    """
    toy = Toy(DITTO, client_contexts=client_contexts(3), lam=2.0, lr=0.1, batch_size=ROWS)
    v = copied(toy.party(0).personal["params"])
    for t in range(2):
        peer = toy.party(0)
        w = copied(peer.params)
        x, y = (a[0] for a in _epoch(peer, PERSONAL + t))
        g = gradient_by_hand(v, x, y)
        v = {k: p - 0.1 * (g[k] + 2.0 * (p - w[k])) for k, p in v.items()}
        toy.run(1, start=t)
        for k, p in toy.party(0).personal["params"].items():
            assert torch.allclose(p, v[k], atol=1e-12, rtol=0), (t, k)
    assert any(not torch.equal(v[k], w[k]) for k in v)  # in round 1 the pull was no longer 0


def _epoch(peer: Any, n: int) -> tuple[Tensor, Tensor]:
    batches = peer.epochs(n, size=ROWS)
    return batches.x, batches.y


@pytest.mark.parametrize("personal_head", [False, True])
def test_the_shared_model_is_gossip_s_to_the_bit(personal_head: bool) -> None:
    common_: dict[str, Any] = {
        "personal_head": personal_head,
        "neighbours": 2,
        "batch_size": 8,
        "epochs": 2,
    }
    a, b = (Toy(method, 4, **common_).run(3) for method in (DITTO, GOSSIP))
    assert equal(a.tensors(), b.tensors())


def test_without_a_pull_the_personal_model_is_local_training_from_its_own_start() -> None:
    toy = Toy(DITTO, 3, lam=0.0, personal_epochs=2, batch_size=8).run(3)
    for i, client_context in enumerate(toy.client_contexts):
        alone = GossipPeer(GossipConfig(batch_size=8), client_context)
        for t in range(3):
            steps.sgd_epochs(alone, [(PERSONAL + 2 * t, None), (PERSONAL + 2 * t + 1, None)])
        assert equal(copied(alone.params), copied(toy.party(i).personal["params"]))


def test_the_stronger_the_pull_the_nearer_the_models() -> None:
    apart = []
    for lam in (0.0, 1.0, 10.0):
        toy = Toy(DITTO, 4, lam=lam, batch_size=8, lr=0.05, momentum=0.0).run(5)
        apart.append(sum(n["distance to the shared model"] for n in toy.engine.notes().values()))
    assert apart[0] > 1.5 * apart[1] > 1.5**2 * apart[2]


def test_with_all_neighbours_on_a_complete_graph_there_is_one_shared_model() -> None:
    toy = Toy(DITTO, 5, neighbours=None, personal_head=False, batch_size=8).run(3)
    first, *others = (toy.party(i) for i in range(5))
    for peer in others:
        for k, w in peer.params.items():
            assert torch.allclose(w, first.params[k], atol=1e-6)
    assert any(
        (a - b).abs().max() > 1e-2
        for a, b in zip(*(_flat(p) for p in (first, others[0])), strict=True)
    )


def _flat(peer: Any) -> list[Tensor]:
    return list(peer.personal["params"].values())


def test_the_personal_model_is_what_is_evaluated_with_its_own_statistics() -> None:
    peer = Toy(DITTO, 3, make=partial(common, norm=True), batch_size=8).run(3).party(0)
    v, shared = peer.personal, {**copied(peer.params), **copied(peer.buffers)}
    name = "body.1.running_mean"
    assert not torch.equal(v["buffers"][name], peer.buffers[name])
    module = common(norm=True).eval()
    module.load_state_dict({**v["params"], **v["buffers"]})
    test = peer.context.tests["test"]
    logits = module(test.every).detach()
    answer = predictions(peer, on="test")
    assert torch.equal(answer["predicted"], logits.argmax(-1))
    assert float(answer["loss"]) == pytest.approx(
        float(F.cross_entropy(logits, test.labels[test.index])), abs=1e-6
    )
    assert equal(shared, {**copied(peer.params), **copied(peer.buffers)})


def test_the_personal_model_does_not_flow_into_the_shared_one() -> None:
    a, b = (Toy(DITTO, 4, lam=lam, batch_size=8).run(3) for lam in (0.0, 5.0))
    assert equal(a.tensors(), b.tensors())
    assert not torch.equal(_flat(a.party(0))[0], _flat(b.party(0))[0])


def test_afind_s_mean_is_weighed_by_loss() -> None:
    toy = Toy(find("ditto-afind"), 4, batch_size=8)
    toy.run(1)
    rows_ = [n["mixing"] for n in toy.engine.notes().values()]
    assert all(len(set(row)) > 1 for row in rows_)
