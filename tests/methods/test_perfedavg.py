"""Per-FedAvg's page against its algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.core.context import ClientContext
from fedloom.core.faults import Faults
from fedloom.methods.meta import augfl
from fedloom.protect.aggregators import Robust
from fedloom.protect.robust import Rule
from tests.methods.test_fedavg import MODEL, close, initial
from tests.toy import Toy, common, equal

PER_FEDAVG = methods.find("per-fedavg")
Weights = dict[str, Tensor]


def gradient(
    client_context: ClientContext, theta: Weights, half: str, graph: bool = False
) -> Weights:
    x, y, _ = getattr(client_context, half)
    at = {k: w if w.requires_grad else w.detach().requires_grad_() for k, w in theta.items()}
    loss = F.cross_entropy(functional_call(common(), at, (x,)), y)
    return dict(
        zip(at, torch.autograd.grad(loss, list(at.values()), create_graph=graph), strict=True)
    )


def meta_gradient(
    client_context: ClientContext, theta: Weights, alpha: float, how: str, delta: float
) -> Weights:
    """The gradient of L(θ - α ∇L(θ, D^s), D^q), by differentiating through the step itself if
    exactly.
    """
    if how == "exact":
        at = {k: w.detach().requires_grad_() for k, w in theta.items()}
        s = gradient(client_context, at, "support", graph=True)
        phi = {k: at[k] - alpha * s[k] for k in at}
        x, y, _ = client_context.query
        loss = F.cross_entropy(functional_call(common(), phi, (x,)), y)
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))
    s = gradient(client_context, theta, "support")
    r = gradient(client_context, {k: theta[k] - alpha * s[k] for k in theta}, "query")
    if how == "first_order":
        return r
    ahead, behind = (
        gradient(client_context, {k: theta[k] + sign * delta * r[k] for k in theta}, "support")
        for sign in (1, -1)
    )
    return {k: r[k] - alpha * (ahead[k] - behind[k]) / (2 * delta) for k in r}


def by_hand(
    theta: Weights,
    client_contexts: list[ClientContext],
    steps: int,
    how: str,
    alpha: float,
    beta: float,
) -> Weights:
    """One round of Algorithm 1 with all clients."""
    total = {k: torch.zeros_like(w, dtype=torch.float64) for k, w in theta.items()}
    for client_context in client_contexts:
        local = theta
        for _ in range(steps):
            found = meta_gradient(client_context, local, alpha, how, 0.01)
            local = {k: w - beta * found[k] for k, w in local.items()}
        for k, w in local.items():
            total[k] += len(client_context.rows) * w.double()
    return {k: (v / sum(len(p.rows) for p in client_contexts)).float() for k, v in total.items()}


@pytest.mark.parametrize("how", ["exact", "fd", "first_order"])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_two_rounds_are_those_written_by_hand(how: str, batched: bool) -> None:
    toy = Toy(PER_FEDAVG, batched=batched, local_steps=2, hvp=how, delta=0.01, alpha=0.3, beta=0.2)
    assert toy.server is not None
    theta = initial()
    for t in range(2):
        toy.run(1, start=t)
        theta = by_hand(theta, toy.client_contexts, 2, how, 0.3, 0.2)
        assert close(toy.server.weights, theta, 1e-5 if how == "fd" else 1e-6)
    assert not close(theta, initial(), 1e-2)


def after(how: str, **params: Any) -> Weights:
    toy = Toy(PER_FEDAVG, hvp=how, **{"alpha": 0.3, "beta": 0.2, **params}).run(2)
    assert toy.server is not None
    return toy.server.weights


def test_the_variants_differ_and_at_alpha_0_they_are_steps_on_the_query_half() -> None:
    assert not close(after("exact"), after("first_order"), 1e-4)
    plain = after("exact", alpha=0.0)
    assert close(plain, after("first_order", alpha=0.0), 0.0)
    client_contexts = Toy(PER_FEDAVG).client_contexts
    theta = initial()
    for _ in range(2):
        each = [gradient(p, theta, "query") for p in client_contexts]
        counts = torch.tensor([len(p.rows) for p in client_contexts])
        mean = {
            k: sum(n * g[k] for n, g in zip(counts, each, strict=True)) / counts.sum()
            for k in theta
        }
        theta = {k: w - 0.2 * mean[k] for k, w in theta.items()}
    assert close(plain, theta)


def test_a_first_step_is_augfl_s_halved() -> None:
    """With y = 0 AugFL's first step is twice gradient descent's on the same objective, (11) to
    (13).
    """
    assert augfl.AUGFL.configure().hvp == PER_FEDAVG.configure().hvp
    ours = Toy(PER_FEDAVG, beta=0.2, alpha=0.1).run(1)
    theirs = Toy(augfl.AUGFL, lam=0.0, meta_lr=0.1, alpha=0.1).run(1)
    assert ours.server is not None and theirs.server is not None
    assert close(ours.server.weights, theirs.server.theta)


def test_a_round_costs_two_models_a_participant_and_a_row_count() -> None:
    toy = Toy(PER_FEDAVG, 5, clients_per_round=3).run(2)
    assert toy.fed.ledger.sent("server") == 2 * 3 * MODEL
    assert toy.fed.ledger.received("server") == 2 * 3 * (MODEL + 8)


def test_who_fails_is_left_out() -> None:
    toy = Toy(PER_FEDAVG, 6, faults=Faults(nan=0.3, dropout=0.2)).run(3)
    assert toy.server is not None and toy.fed.failures
    assert all(torch.isfinite(v).all() for v in toy.server.weights.values())
    nobody = Toy(PER_FEDAVG, faults=Faults(dropout=1.0)).run(1)
    assert nobody.server is not None and close(nobody.server.weights, initial(), 0.0)


def test_evaluation_adapts_the_server_s_weights_on_the_support_half() -> None:
    """Of a client that never took part, too."""
    toy = Toy(PER_FEDAVG, alpha=0.3).run(2, present=[0, 1])
    assert toy.server is not None
    before = toy.tensors()
    theta, client_context = toy.server.weights, toy.client_contexts[3]
    for eval_mode, steps in {"1 step": 1, "5 steps": 5, "0 steps": 0}.items():
        words = {"on": "test", "eval_mode": eval_mode, "broadcast": toy.server.broadcast()}
        (found,) = toy.engine.call([3], "predictions", words, None, None)
        phi = theta
        for _ in range(steps):
            s = gradient(client_context, phi, "support")
            phi = {k: w - 0.3 * s[k] for k, w in phi.items()}
        test = client_context.tests["test"]
        expected = functional_call(common(), phi, (test.every,))
        assert torch.allclose(found["loss"], F.cross_entropy(expected, test.labels), atol=1e-5)
    assert equal(toy.tensors(), before)


@pytest.mark.each_time("median-fedcp", "multikrum-per-fedavg")
@pytest.mark.parametrize("method", ["per-fedavg", "fedcp"])
@pytest.mark.parametrize("rule", ["median", "multikrum", "centered"])
def test_a_robust_rule_keeps_a_liar_from_the_weights(method: str, rule: Rule) -> None:
    """One of seven clients sends its weights times a million."""

    def weights(how: Aggregator, **faults: Any) -> Weights:
        toy = Toy(methods.find(method), 7, faults=Faults(**faults), means=how).run(2)
        assert toy.server is not None
        return dict(toy.server.weights)

    liars = {"liars": (2,), "lie": "huge"}
    honest = weights(Robust(rule))
    kept = weights(Robust(rule), **liars)
    lost = weights(MEAN, **liars)
    assert max(float((kept[k] - v).abs().max()) for k, v in honest.items()) < 1
    assert max(float(v.abs().max()) for v in lost.values()) > 1e3
