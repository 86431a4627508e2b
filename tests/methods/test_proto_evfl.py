"""Proto-EVFL's page against its paper: equations, one whole round by hand, what crosses, collapse,
faults.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import Rows, aligned_plan
from fedloom.core.engine import Failure
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.evaluation import predictions_alone
from fedloom.core.faults import Faults
from fedloom.core.message import leaves
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import RunResult, Stopped, execute
from fedloom.methods.features import class_means
from fedloom.methods.vertical.proto_evfl import Fusion
from fedloom.methods.vertical.proto_evfl_steps import (
    TOO_ALIKE,
    ProtoEVFLConfig,
    collapse_share,
    likeness,
    local_steps,
    optimal_plan,
    perturbed,
    share_of_rarest,
    similarities,
    to_prototypes,
    to_rows,
    transport_cost,
)
from fedloom.methods.vertical.steps import aligned_rows, labels, sample_rows
from tests.methods.columns import CLASSES, TESTED, WIDTH, Columns, extractor, moved, same

PROTO = methods.find("proto-evfl")
Array = NDArray[np.float64]
SELECTIONS = ["both", "forward", "nearest", "optimal"]


# -- the equations, against NumPy ------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Array, Array, Array, ProtoEVFLConfig]:
    """Embeddings (n, d), prototypes (Z, d), a prior (Z,) with perhaps masked classes, and settings;
    in float64.
    """
    n, z, d = draw(st.integers(1, 12)), draw(st.integers(2, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    there = rng.random(z) < draw(st.sampled_from([1.0, 0.6]))
    there[rng.integers(z)] = True
    p = rng.random(z) * there + 1e-3 * there
    how = draw(st.sampled_from(["cosine", "dot"]))
    temperature = draw(st.sampled_from([0.1, 1.0, 3.0]))
    cfg = ProtoEVFLConfig(similarity=how, temperature=temperature)
    return rng.normal(size=(n, d)), rng.normal(size=(z, d)), p / p.sum(), cfg


def tensors(*arrays: Array) -> list[Tensor]:
    return [torch.from_numpy(a) for a in arrays]


def in_torch(f: Array, mu: Array, p: Array) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(f), torch.from_numpy(mu), torch.from_numpy(p)


def by_numpy(f: Array, mu: Array, p: Array, cfg: ProtoEVFLConfig) -> dict[str, Array]:
    """Equations 4 to 7 as they are printed, with p(μ_z) for p(μ_n) in 6."""
    cos = (f @ mu.T) / np.linalg.norm(f, axis=1)[:, None] / np.linalg.norm(mu, axis=1)[None]
    e = np.exp((cos if cfg.similarity == "cosine" else f @ mu.T) / cfg.temperature)
    pi = p * e / (p * e).sum(1, keepdims=True)  # 4
    with np.errstate(invalid="ignore"):
        q = p * e / (p * e).sum(0, keepdims=True)  # 6; 0/0 for a masked class
    c = 1 - cos
    terms = np.where(p > 0, p * (q * c).sum(0), 0.0)
    return {"c": c, "pi": pi, "forward": (pi * c).sum(1).mean(), "q": q, "reverse": terms.sum()}


@given(problems())
def test_plans_and_costs_are_those_of_the_printed_equations(
    problem: tuple[Array, Array, Array, ProtoEVFLConfig],
) -> None:
    f, mu, p, cfg = problem
    ours, found = tensors(f, mu, p), by_numpy(*problem)
    s = similarities(ours[0], ours[1], cfg)
    pi, q = to_prototypes(s, ours[2]).numpy(), to_rows(s).numpy()
    there = p > 0
    assert np.allclose(pi, found["pi"], atol=1e-12)
    assert np.allclose(q[:, there], found["q"][:, there], atol=1e-12)
    assert (pi[:, ~there] == 0).all()
    assert np.allclose(pi.sum(1), 1, atol=1e-12)  # each row goes somewhere
    assert np.allclose(q.sum(0), 1, atol=1e-12)  # each class comes from somewhere
    assert math.isclose((p * q.sum(0)).sum(), 1, abs_tol=1e-12)
    both = transport_cost(ours[0], ours[1], ours[2], cfg).item()
    forward = transport_cost(
        ours[0], ours[1], ours[2], cfg.model_copy(update={"transport": "forward"})
    ).item()
    assert math.isclose(forward, found["forward"], abs_tol=1e-10)
    assert math.isclose(both, found["forward"] + found["reverse"], abs_tol=1e-10)


@given(problems())
def test_the_nearest_prototype_is_one_that_exists(
    problem: tuple[Array, Array, Array, ProtoEVFLConfig],
) -> None:
    f, mu, p, cfg = problem
    ours = transport_cost(
        *in_torch(f, mu, p), cfg.model_copy(update={"transport": "nearest"})
    ).item()
    c = by_numpy(*problem)["c"]
    theirs = np.mean([min(c[n, z] for z in range(len(p)) if p[z] > 0) for n in range(len(f))])
    assert math.isclose(ours, theirs, abs_tol=1e-12)


@settings(max_examples=15)
@given(problems())
def test_the_optimal_plan_is_a_linear_program_s(
    problem: tuple[Array, Array, Array, ProtoEVFLConfig],
) -> None:
    pytest.importorskip("ot")
    from scipy.optimize import linprog

    f, mu, p, cfg = problem
    n, z = len(f), len(p)
    c = by_numpy(*problem)["c"]
    plan = optimal_plan(*tensors(c, p)).numpy()
    assert (plan >= 0).all() and np.allclose(plan.sum(1), 1 / n) and np.allclose(plan.sum(0), p)
    rows, columns = np.kron(np.eye(n), np.ones(z)), np.kron(np.ones(n), np.eye(z))
    marginals = np.concatenate([np.full(n, 1 / n), p])
    least = linprog(c.ravel(), A_eq=np.vstack([rows, columns]), b_eq=marginals, method="highs").fun
    assert math.isclose((plan * c).sum(), least, abs_tol=1e-9)
    ours = transport_cost(
        *in_torch(f, mu, p), cfg.model_copy(update={"transport": "optimal"})
    ).item()
    assert math.isclose(ours, least, abs_tol=1e-9)


def test_without_its_library_transport_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ot", None)
    with pytest.raises(MethodError, match=r'pip install -e ".\[ot\]"'):
        optimal_plan(torch.ones(2, 2), torch.ones(2) / 2)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("transport", SELECTIONS)
def test_the_cost_passes_gradcheck(transport: Any, similarity: Any) -> None:
    if transport == "optimal":
        pytest.importorskip("ot")
    rng = np.random.default_rng(0)
    f, mu, p = tensors(rng.normal(size=(6, 4)), rng.normal(size=(3, 4)), np.array([0.2, 0.0, 0.8]))
    cfg = ProtoEVFLConfig(transport=transport, similarity=similarity, temperature=0.5)
    assert torch.autograd.gradcheck(lambda f: transport_cost(f, mu, p, cfg), f.requires_grad_())


def test_a_step_against_the_gradient_brings_rows_nearer_to_prototypes() -> None:
    rng = np.random.default_rng(0)
    f, mu, p = tensors(rng.normal(size=(6, 4)), rng.normal(size=(3, 4)), np.full(3, 1 / 3))
    before = transport_cost(f.requires_grad_(), mu, p, ProtoEVFLConfig())
    (g,) = torch.autograd.grad(before, f)
    assert transport_cost(f - 0.01 * g, mu, p, ProtoEVFLConfig()) < before


def test_class_means_of_classes_with_and_without_rows() -> None:
    f, y = torch.randn(7, 2), torch.tensor([0, 2, 2, 0, 0, 2, 2])
    means, counts = class_means(f, y, 4)
    assert counts.tolist() == [3, 0, 4, 0]
    assert torch.allclose(means[0], f[y == 0].mean(0)) and torch.allclose(
        means[2], f[y == 2].mean(0)
    )
    assert (means[1] == 0).all() and (means[3] == 0).all()


def test_likeness_is_the_mean_cosine_of_two_different_rows() -> None:
    mu = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    assert likeness(mu).item() == pytest.approx((0 + math.sqrt(0.5) * 2) / 3)
    assert likeness(mu[:1]).item() == pytest.approx(0, abs=1e-6)


# -- priors ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.sampled_from([0.0, 1.0, 2.5]))
def test_gamma_is_at_most_an_equal_share(counts: list[int], smoothing: float) -> None:
    if sum(counts) + smoothing == 0:
        counts[0] = 1
    gamma = share_of_rarest(torch.tensor(counts), smoothing).item()
    assert 0 <= gamma <= 1 / len(counts) + 1e-7
    assert gamma == pytest.approx(
        (min(counts) + smoothing) / (sum(counts) + smoothing * len(counts))
    )


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["mixed", "local", "uniform"]),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
    st.sets(st.integers(0, CLASSES - 1), max_size=CLASSES - 1),
)
def test_priors_are_distributions_over_the_classes_that_there_are(
    seed: int, prior: str, gamma: float | None, masked: set[int]
) -> None:
    rng = np.random.default_rng(seed)
    toy = Columns(PROTO, prior=prior, gamma=gamma, steps=0)
    party = toy.party(1)
    mu = torch.from_numpy(rng.normal(size=(CLASSES, WIDTH))).float()
    overall = torch.from_numpy(rng.random(CLASSES)).float() + 0.01
    overall[list(masked)] = 0
    overall /= overall.sum()
    for t in range(2):
        found = party.improve(t=t, prototypes=mu, prior=overall)["prior"]
        assert found.sum().item() == pytest.approx(1, abs=1e-6) and (found >= 0).all()
        assert (found[list(masked)] == 0).all()
        there = CLASSES - len(masked)
        if prior == "uniform":
            assert found.max().item() == pytest.approx(1 / there)
        elif gamma == 1.0 and prior == "mixed":
            assert torch.allclose(found, overall)
        notes = party.take_notes()
        if prior != "uniform" and gamma is None:
            assert 0 <= notes["gamma"] <= 1 / there + 1e-6


def test_the_estimate_of_a_prior_by_numpy() -> None:
    """Equations 9 and 11, with γ from the counts of the pseudo-classes."""
    toy = Columns(PROTO, steps=0)
    party, rng = toy.party(2), np.random.default_rng(3)
    mu, overall = rng.normal(size=(CLASSES, WIDTH)), np.array([0.5, 0.2, 0.3])
    f = party.infer(party.data.every).double().numpy()
    belongs = by_numpy(f, mu, np.array([0.6, 0.1, 0.3]), party.cfg)["pi"]
    party.prior = torch.tensor([0.6, 0.1, 0.3])
    counts = np.bincount(belongs.argmax(1), minlength=CLASSES) + 1.0
    gamma = counts.min() / counts.sum()
    sent = party.improve(
        t=0, prototypes=torch.from_numpy(mu).float(), prior=torch.from_numpy(overall).float()
    )
    assert np.allclose(
        sent["prior"].numpy(), gamma * overall + (1 - gamma) * belongs.mean(0), atol=1e-6
    )
    assert party.take_notes()["gamma"] == pytest.approx(gamma)


def test_the_prior_is_estimated_from_so_many_own_rows() -> None:
    few, every = (Columns(PROTO, steps=0, prior="local", prior_rows=n).party(0) for n in (12, 50))
    mu, uniform = torch.randn(CLASSES, WIDTH), np.full(CLASSES, 1 / CLASSES)
    estimates = []
    for t in (0, 1):
        some = sample_rows(few, 12, "prior rows", t)
        for party, x in ((few, some), (every, every.data.every)):
            party.prior = torch.from_numpy(uniform).float()
            found = party.improve(t=t, prototypes=mu, prior=party.prior)["prior"].numpy()
            f = party.infer(x).double().numpy()
            assert np.allclose(
                found, by_numpy(f, mu.double().numpy(), uniform, party.cfg)["pi"].mean(0), atol=1e-6
            )
            estimates.append(found)
    assert not np.allclose(estimates[0], estimates[2])  # other rows each round
    assert np.array_equal(estimates[1], estimates[3])


# -- the active party's network --------------------------------------------------------------------


def fusion(**params: Any) -> Fusion:
    torch.manual_seed(5)
    return Fusion(3, WIDTH, CLASSES, ProtoEVFLConfig(**params))


def test_a_gate_that_has_learned_nothing_is_plain_concatenation() -> None:
    f = torch.randn(9, 3, WIDTH)
    net = fusion()
    assert torch.allclose(net(f), net.classifier(f.flatten(1)), atol=1e-6)
    printed = fusion(gate="plain")
    assert torch.allclose(printed(f), printed.classifier(f.flatten(1) / 3), atol=1e-6)
    none = fusion(gate="none")
    assert none.gate is None and torch.equal(none(f), none.classifier(f.flatten(1)))


def test_the_gate_weighs_parties_row_by_row() -> None:
    """Equation 13, with a gate that has learned something."""
    f, net = torch.randn(9, 3, WIDTH), fusion()
    assert net.gate is not None
    nn.init.normal_(net.gate.weight)
    w = torch.softmax(f.flatten(1) @ net.gate.weight.T, 1)
    assert w.std(0).min() > 0.01
    parts = [3 * w[:, m : m + 1] * f[:, m] for m in range(3)]
    assert torch.allclose(net(f), net.classifier(torch.cat(parts, 1)), atol=1e-6)


def test_adaptors_begin_as_the_identity() -> None:
    f = torch.randn(9, 3, WIDTH)
    assert torch.equal(fusion().adapt(f), f) and torch.equal(fusion(adapter="none").adapt(f), f)
    linear = fusion(adapter="linear")
    assert not torch.allclose(linear.adapt(f), f)
    assert torch.allclose(linear.adapt(f)[:, 1], linear.adaptors[1](f[:, 1]))


def test_adaptors_that_begin_as_the_identity_learn_all_the_same() -> None:
    toy = Columns(PROTO, active_lr=0.05).run(2)
    f = toy.active.embedded
    assert not torch.allclose(toy.active.net.module.adapt(f), f, atol=1e-3)


def test_the_fusion_passes_gradcheck() -> None:
    net = fusion().double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    f = torch.randn(4, 3, WIDTH, dtype=torch.float64).requires_grad_()
    y = torch.tensor([0, 2, 1, 0])
    assert torch.autograd.gradcheck(lambda f: F.cross_entropy(net(f), y), f)


# -- prototypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mean", "sum", "fixed"])
def test_prototypes_continue_as_their_closed_form_says(how: str) -> None:
    """With extractors and active party at rest, after t rounds: (1-ρ)^t μ + (1-(1-ρ)^t) c;  μ + t ρ
    c;  μ.
    """
    toy, t, rho = Columns(PROTO, prototypes=how, rho=0.3, steps=0, epochs=0), 4, 0.3
    toy.run(1)
    means = torch.stack(
        [class_means(f, labels(toy.active), CLASSES)[0] for f in toy.active.embedded.unbind(1)]
    )
    start = torch.randn_like(means)
    toy.active.prototypes = start
    toy.run(t, start=1)
    keep = (1 - rho) ** t
    closed = {
        "mean": keep * start + (1 - keep) * means,
        "sum": start + t * rho * means,
        "fixed": start,
    }[how]
    assert torch.allclose(toy.active.prototypes, closed, atol=1e-5)


def test_the_first_prototypes_are_class_means_of_the_first_embeddings() -> None:
    toy = Columns(PROTO).run(1)
    y, first, received = labels(toy.active), toy.sent("introduce", 0), toy.received("improve", 0)
    for m, f in first.items():
        for z in range(CLASSES):
            assert torch.allclose(received[m]["prototypes"][z], f[y == z].mean(0), atol=1e-6)
    assert torch.allclose(received[0]["prior"], torch.full((CLASSES,), 1 / CLASSES))


def test_prototypes_are_made_of_what_adaptors_give() -> None:
    toy = Columns(PROTO, active_lr=0.05, rho=1.0).run(2)
    adapted = toy.active.net.module.adapt(toy.active.embedded).detach()
    means = [class_means(f, labels(toy.active), CLASSES)[0] for f in adapted.unbind(1)]
    assert torch.allclose(toy.active.prototypes, torch.stack(means), atol=1e-6)


# -- one whole round, against the algorithm's box in plain torch -----------------------------------


class Box:
    """Algorithm 1 for all parties at once, written out from the paper and the page's list of
    differences.
    """

    def __init__(self, toy: Columns) -> None:
        self.cfg, self.toy = toy.cfg, toy
        self.nets = [copy.deepcopy(toy.party(m).net.module) for m in toy.engine.ids]
        self.top = copy.deepcopy(toy.active.net.module)
        cfg = self.cfg
        kind: Any = torch.optim.AdamW if cfg.optimizer == "adamw" else torch.optim.SGD
        self.opts = [
            kind(net.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay) for net in self.nets
        ]
        self.top_opt = kind(self.top.parameters(), lr=cfg.active_lr, weight_decay=0.0)
        self.x = [context.rows.every for context in toy.contexts]
        self.y = labels(toy.active)
        self.n = len(self.y)
        self.uniform = torch.full((CLASSES,), 1 / CLASSES)
        self.priors, self.prior = [self.uniform] * len(self.x), self.uniform
        for net, x in zip(self.nets, self.x, strict=True):
            if cfg.centered:
                raw = net.body(x).detach()
                net.centre.running_mean.copy_(raw.mean(0))
                net.centre.running_var.copy_(raw.var(0))
        self.mu = [self.means(self.embed(m, self.x[m])[: self.n]) for m in range(len(self.x))]

    def embed(self, m: int, x: Tensor) -> Tensor:
        out: Tensor = self.nets[m].eval()(x).detach()
        return out

    def means(self, f: Tensor) -> Tensor:
        return torch.stack([f[self.y == z].mean(0) for z in range(CLASSES)])

    def cosines(self, f: Tensor, mu: Tensor) -> Tensor:
        return (f @ mu.T) / f.norm(dim=1)[:, None] / mu.norm(dim=1)[None]

    def exponents(self, f: Tensor, mu: Tensor) -> Tensor:
        return self.cosines(f, mu) / 0.1 if self.cfg.similarity == "cosine" else f @ mu.T

    def plan(self, f: Tensor, mu: Tensor, p: Tensor) -> Tensor:
        e = p * self.exponents(f, mu).exp()
        return e / e.sum(1, keepdim=True)

    def round(self, t: int) -> None:
        cfg, f = self.cfg, []
        for m, x in enumerate(self.x):
            own = x if cfg.local_rows == "all" else x[self.n :]
            pi = self.plan(self.embed(m, own), self.mu[m], self.priors[m])
            counts = (
                torch.stack([(pi.argmax(1) == z).sum() for z in range(CLASSES)]).float()
                + cfg.smoothing
            )
            gamma = counts.min() / counts.sum()
            self.priors[m] = p = gamma * self.prior + (1 - gamma) * pi.mean(0)
            all_rows = cfg.local_rows == "all"
            number = local_steps(self.toy.party(m))
            for batch in self.toy.contexts[m].unlabeled(
                t, steps=number, size=cfg.batch_size, aligned=all_rows
            ):
                self.local_step(m, batch, p)
            f.append(self.embed(m, x)[: self.n])
        for number in range(t * cfg.epochs, (t + 1) * cfg.epochs):
            for rows in aligned_plan(0, number, self.n, cfg.batch_size):
                self.top_opt.zero_grad()
                F.cross_entropy(self.logits([g[rows] for g in f]), self.y[rows]).backward()
                self.top_opt.step()
        for m, g in enumerate(f):
            means = self.means(self.adapt(m, g).detach())
            mean = cfg.prototypes == "mean"
            self.mu[m] = 0.9 * self.mu[m] + 0.1 * means if mean else self.mu[m] + 0.1 * means
        self.prior = sum(self.priors) / len(self.priors)  # type: ignore[assignment]

    def local_step(self, m: int, x: Tensor, p: Tensor) -> None:
        f, mu = self.nets[m].train()(x), self.mu[m]
        c, e = 1 - self.cosines(f, mu), self.exponents(f, mu).exp()
        there = (self.plan(f, mu, p) * c).sum() / len(x)
        back = (p * (e / e.sum(0) * c).sum(0)).sum()
        self.opts[m].zero_grad()
        (there + back).backward()
        self.opts[m].step()

    def adapt(self, m: int, f: Tensor) -> Tensor:
        r = self.top.adaptors[m]
        if self.cfg.adapter == "linear":
            return f @ r.weight.T + r.bias
        hidden = (f @ r.inner.weight.T + r.inner.bias).clamp(min=0)
        return f + hidden @ r.outer.weight.T + r.outer.bias

    def logits(self, f: list[Tensor]) -> Tensor:
        adapted = [self.adapt(m, g) for m, g in enumerate(f)]
        w = torch.softmax(torch.cat(adapted, 1) @ self.top.gate.weight.T, 1)
        scale = len(f) if self.cfg.gate == "scaled" else 1
        h = torch.cat([scale * w[:, m : m + 1] * g for m, g in enumerate(adapted)], 1)
        out: Tensor = self.top.classifier(h)
        return out


@pytest.mark.parametrize(
    ("preset", "params"),
    [
        ("recommended", {"steps": 5, "lr": 1e-3}),
        # at the printed rates nothing would be seen to move
        ("paper", {"lr": 1e-2, "active_lr": 1e-2, "epochs": 3, "local_epochs": 1}),
    ],
)
def test_rounds_are_those_of_the_algorithm_s_box(preset: str, params: dict[str, Any]) -> None:
    toy = Columns(PROTO, preset=preset, **params)
    box, before = Box(toy), toy.states()
    for t in range(3):
        toy.run(1, start=t)
        box.round(t)
    after = toy.states()
    assert moved(before, after) == {"active", "0", "1", "2"}
    for m, net in enumerate(box.nets):
        for name, value in net.state_dict().items():
            part = "buffers" if name.startswith("centre") else "params"
            assert torch.allclose(after[f"{m}.{part}.{name}"], value, atol=1e-6), (m, name)
        assert torch.allclose(toy.party(m).prior, box.priors[m], atol=1e-6)
        assert torch.allclose(toy.active.prototypes[m], box.mu[m], atol=1e-6)
    for name, value in box.top.state_dict().items():
        assert torch.allclose(toy.active.params[name], value, atol=1e-6), name
    assert torch.allclose(toy.active.prior, box.prior, atol=1e-6)


@pytest.mark.parametrize("transport", SELECTIONS)
def test_each_selection_lowers_its_own_cost(transport: str) -> None:
    if transport == "optimal":
        pytest.importorskip("ot")
    toy = Columns(PROTO, transport=transport, lr=1e-2, steps=30).run(1)
    party, received = toy.party(1), toy.received("improve", 0)[1]
    p = party.prior

    def cost(net: nn.Module) -> float:
        with torch.no_grad():
            return transport_cost(
                net.train()(party.data.every), received["prototypes"], p, toy.cfg
            ).item()

    assert cost(copy.deepcopy(party.net.module)) < cost(Columns(PROTO).party(1).net.module)


def test_resting_extractors_stay_as_they_began() -> None:
    toy = Columns(PROTO, steps=0)
    body = {k: v for k, v in toy.states().items() if ".params." in k and not k.startswith("active")}
    after = toy.run(2).states()
    assert all(torch.equal(v, after[k]) for k, v in body.items())
    assert toy.active.net.slots["step"] > 0 and toy.cfg.iterations_per_round == toy.cfg.epochs


def test_local_training_can_keep_to_the_unaligned_rows() -> None:
    """The aligned rows of one party are replaced: only what it sends of them may change, not what
    it learns.
    """
    params: dict[str, Any] = {
        "local_rows": "unaligned",
        "prior": "uniform",
        "centered": False,
        "steps": 4,
    }
    toys = [Columns(PROTO, **params), Columns(PROTO, **params)]
    context = toys[1].contexts[1]
    context.rows.pool[context.rows.index[: context.aligned]] += 1
    mu, prior = torch.randn(CLASSES, WIDTH), torch.full((CLASSES,), 1 / CLASSES)
    sent = [w.party(1).improve(t=0, prototypes=mu, prior=prior)["embedded"] for w in toys]
    assert same(dict(toys[0].party(1).params), dict(toys[1].party(1).params))
    assert not torch.allclose(*sent)


@pytest.mark.parametrize("local_rows", ["all", "unaligned"])
def test_local_epochs_are_as_many_steps_as_cover_the_rows_so_often(local_rows: str) -> None:
    toy = Columns(PROTO, local_rows=local_rows, local_epochs=2)
    rows = len(toy.party(0).data) - (0 if local_rows == "all" else toy.contexts[0].aligned)
    number = math.ceil(2 * rows / toy.cfg.batch_size)
    assert number != toy.cfg.steps
    states = toy.run(2).states()
    assert same(states, Columns(PROTO, local_rows=local_rows, steps=number).run(2).states())
    shared = Columns(PROTO, local_rows=local_rows, local_epochs="epochs", epochs=2)
    assert same(
        shared.run(2).states(),
        Columns(PROTO, local_rows=local_rows, steps=number, epochs=2).run(2).states(),
    )


@pytest.mark.parametrize("epochs", [0, 1.5, True, "all"])
def test_local_epochs_are_a_number_or_those_of_the_active_party(epochs: object) -> None:
    with pytest.raises(ConfigError, match='must be a number of epochs of at least 1, or "epochs"'):
        PROTO.configure(params={"local_epochs": epochs})


def test_without_unaligned_rows_training_on_them_is_reported() -> None:
    toy = Columns(PROTO, unaligned=0, local_rows="unaligned")
    with pytest.raises(MethodError, match="has no unaligned rows"):
        toy.run(1)
    assert Columns(PROTO, unaligned=0).run(1).active.begun


# -- who learns what -------------------------------------------------------------------------------


def test_only_prototypes_and_priors_go_down_and_embeddings_and_priors_up() -> None:
    toy = Columns(PROTO, isolated=True).run(3)
    n, z, d = 30, CLASSES, WIDTH
    assert {(e.sender, e.receiver, e.kind, e.what) for e in toy.fed.ledger} == {
        ("active", "party", "introduce", "nothing"),
        ("party", "active", "introduce", f"float32[{n},{d}]"),
        ("active", "party", "improve", f"t int; prior float32[{z}]; prototypes float32[{z},{d}]"),
        ("party", "active", "improve", f"embedded float32[{n},{d}]; prior float32[{z}]"),
    }
    for heard in toy.heard:
        down = {
            k: tuple(v.shape) if isinstance(v, Tensor) else type(v) for k, v in heard.put.items()
        }
        assert down in ({}, {"t": int, "prior": (z,), "prototypes": (z, d)})
        for _, leaf in leaves({"put": dict(heard.put), "reply": heard.reply}):
            if isinstance(leaf, Tensor):
                assert not leaf.requires_grad and leaf.grad_fn is None
                assert leaf.dtype == torch.float32  # no class, no row number


def test_messages_between_colocated_parties_is_not_counted() -> None:
    toy = Columns(PROTO).run(2)
    assert {name for pair in toy.fed.ledger.pairs for name in pair} == {
        "active",
        "party-1",
        "party-2",
    }
    assert {h.party for h in toy.heard} == {0, 1, 2}


@pytest.mark.parametrize(("parties", "aligned"), [(2, 30), (4, 17)])
def test_bytes_are_those_of_the_formula(parties: int, aligned: int) -> None:
    """4 (N d + Z d + 2 Z) a round for each party that is counted, and 4 N d first."""
    toy = Columns(PROTO, parties, aligned=aligned, epochs=1, steps=2).run(3)
    counted, first = parties - 1, 4 * aligned * WIDTH
    each = 4 * (aligned * WIDTH + CLASSES * WIDTH + 2 * CLASSES)
    for t in range(3):
        found = sum(e.bytes for e in toy.fed.ledger if e.round == t)
        assert found == counted * (each + (first if t == 0 else 0))
    assert toy.fed.ledger.sent("active") == 3 * counted * 4 * (CLASSES * WIDTH + CLASSES)


def test_labels_reach_a_party_by_prototypes_and_no_other_way() -> None:
    def shuffled(y: Tensor) -> Tensor:
        return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]

    true, false = Columns(PROTO).run(1), Columns(PROTO, relabel=shuffled).run(1)
    assert not torch.equal(labels(true.active), labels(false.active))
    first = [w.sent("introduce", 0) for w in (true, false)]
    received = [w.received("improve", 0) for w in (true, false)]
    for m in (0, 1, 2):
        assert torch.equal(first[0][m], first[1][m])  # before prototypes: not one bit
        assert not torch.allclose(received[0][m]["prototypes"], received[1][m]["prototypes"])
        assert torch.equal(received[0][m]["prior"], received[1][m]["prior"])
    # and after them they differ
    assert moved(true.states(), false.states()) == {"active", "0", "1", "2"}
    toys = [Columns(PROTO), Columns(PROTO, relabel=shuffled)]
    for toy in toys:  # with the same prototypes they are one again
        for m in (0, 1, 2):
            toy.party(m).introduce()
            toy.party(m).improve(t=0, **{k: v for k, v in received[0][m].items() if k != "t"})
    assert moved(toys[0].states(), toys[1].states()) <= {"active"}
    assert not moved(true.states(), toys[0].states()) - {"active"}


def test_a_run_gives_labels_to_the_active_party_alone() -> None:
    run = check({"run": {"method": "proto-evfl", "data": {"clients": 4, "test_rows": 50}}}).run
    toy = build(run)
    for make in toy.clients:
        context = make().context
        held: list[Rows] = [context.rows, *context.tests.values()]
        assert all(rows.labels is None for rows in held)
    assert toy.server is not None
    labels = toy.server.context.rows.labels
    assert labels is not None and int((labels >= 0).sum()) == toy.server.context.aligned == 200


# -- noise -----------------------------------------------------------------------------------------


def test_no_noise_draws_nothing() -> None:
    x = torch.randn(3)
    assert perturbed(x, 0.0, None) is x


def test_noise_on_embeddings_has_the_stated_deviation_and_is_fresh_each_round() -> None:
    rest: dict[str, Any] = {
        "steps": 0,
        "epochs": 0,
        "prior": "uniform",
        "aligned": 500,
        "unaligned": 5,
    }
    plain = Columns(PROTO, **rest).run(2)
    noisy, again = (Columns(PROTO, **rest, embedding_noise=0.3).run(2) for _ in range(2))

    def noise(toy: Columns, method: str, t: int, m: int) -> Tensor:
        sent, without = (w.sent(method, t)[m] for w in (toy, plain))
        return sent - without if method == "introduce" else sent["embedded"] - without["embedded"]

    draws = [
        noise(noisy, method, t, m)
        for method, t in (("introduce", 0), ("improve", 0), ("improve", 1))
        for m in (0, 1)
    ]
    for n, draw in enumerate(draws):
        assert draw.std().item() == pytest.approx(0.3, rel=0.06)
        assert abs(draw.mean().item()) < 0.03
        assert all(
            abs(torch.corrcoef(torch.stack([draw.flatten(), d.flatten()]))[0, 1]) < 0.1
            for d in draws[:n]
        )
    assert same(noisy.states(), again.states())
    test = noisy.party(1).contribution(on="test") - plain.party(1).contribution(on="test")
    assert test.shape == (TESTED, WIDTH) and test.std().item() == pytest.approx(0.3, rel=0.25)


def test_noise_on_prototypes_touches_only_what_goes_down() -> None:
    rest: dict[str, Any] = {
        "steps": 0,
        "epochs": 0,
        "prior": "uniform",
        "embedding_dim": 64,
        "make": lambda m: extractor(m, 64),
    }
    plain, noisy = Columns(PROTO, **rest).run(2), Columns(PROTO, **rest, prototype_noise=0.2).run(2)
    assert torch.equal(plain.active.prototypes, noisy.active.prototypes)
    draws = [
        torch.stack(
            [
                noisy.received("improve", t)[m]["prototypes"]
                - plain.received("improve", t)[m]["prototypes"]
                for m in (0, 1, 2)
            ]
        )
        for t in (0, 1)
    ]
    for draw in draws:
        assert draw.std().item() == pytest.approx(0.2, rel=0.12)
    assert not torch.allclose(draws[0], draws[1], atol=0.1) and not torch.allclose(
        draws[0][0], draws[0][1], atol=0.1
    )


# -- classes and rows that are missing -------------------------------------------------------------


@pytest.mark.parametrize("preset", ["recommended", "paper"])
@pytest.mark.parametrize("transport", SELECTIONS)
def test_a_class_without_aligned_rows_has_no_prototype_and_no_prior(
    transport: str, preset: str
) -> None:
    if transport == "optimal":
        pytest.importorskip("ot")
    toy = Columns(PROTO, rare=(1,), transport=transport, preset=preset).run(3)
    assert (toy.active.prototypes[:, 1] == 0).all() and toy.active.prior[1] == 0
    for m in toy.engine.ids:
        for t in range(3):
            assert toy.sent("improve", t)[m]["prior"][1] == 0
        assert predictions_alone(toy.party(m), on="own")["predicted"].ne(1).all()
    assert all(torch.isfinite(v).all() for v in toy.states().values() if isinstance(v, Tensor))
    assert toy.active.prior.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_the_prototype_of_a_class_without_aligned_rows_stays(how: str) -> None:
    toy = Columns(PROTO, rare=(1,), prototypes=how).run(1)
    held = toy.active.prototypes.clone()
    held[:, 1] = torch.randn(3, WIDTH)
    toy.active.prototypes = held
    toy.run(2, start=1)
    assert torch.equal(toy.active.prototypes[:, 1], held[:, 1])
    assert not torch.equal(toy.active.prototypes[:, 0], held[:, 0])


@pytest.mark.parametrize(
    "odd",
    [
        {"batch_size": 2},
        {"batch_size": 7},
        {"aligned": 6, "batch_size": 16},
        {"unaligned": 0, "batch_size": 64},
    ],
    ids=[
        "smaller than Z",
        "a last partial batch",
        "fewer aligned than a batch",
        "fewer rows than a batch",
    ],
)
def test_odd_numbers_of_rows(odd: dict[str, Any]) -> None:
    toy = Columns(PROTO, **odd).run(2)
    assert all(torch.isfinite(v).all() for v in toy.states().values() if isinstance(v, Tensor))
    assert not toy.fed.failures and len(toy.sent("improve", 1)) == 3


# -- parties that are missing ----------------------------------------------------------------------


def test_what_a_silent_party_sent_before_continues_to_count() -> None:
    toy = Columns(PROTO).run(1)
    before = {k: v.clone() for k, v in (("f", toy.active.embedded), ("p", toy.active.priors))}
    there = toy.run(1, start=1, present=(0, 2)).sent("improve", 1)
    assert set(there) == {0, 2}
    assert torch.equal(toy.active.embedded[:, 1], before["f"][:, 1]) and torch.equal(
        toy.active.priors[1], before["p"][1]
    )
    for m in (0, 2):
        assert torch.equal(toy.active.embedded[:, m], there[m]["embedded"])
        assert not torch.equal(toy.active.embedded[:, m], before["f"][:, m])


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    toy = Columns(PROTO, faults=Faults(**{fault: 0.2}), steps=2, epochs=1).run(8)
    assert toy.active.begun and toy.fed.failures
    assert all(torch.isfinite(v).all() for k, v in toy.states().items() if isinstance(v, Tensor))
    failed = {(f.round, f.party) for f in toy.fed.failures if f.kind == "improve"}
    for m in toy.engine.ids:
        good = [
            h
            for h in toy.heard
            if h.method == "improve" and h.party == m and (h.round, f"party-{m}") not in failed
        ]
        assert good and not any(isinstance(h.reply, Failure) for h in good)
        assert torch.equal(toy.active.embedded[:, m], good[-1].reply["embedded"])


def test_a_party_that_is_silent_at_first_postpones_the_beginning() -> None:
    toy = Columns(PROTO)
    start = toy.states()
    toy.run(1, present=(0, 2))
    assert not toy.active.begun and not toy.sent("improve", 0)
    assert moved(start, toy.states()) <= {"0", "2"}  # which have measured their centering
    assert [f.reason for f in toy.fed.failures] == ["fewer than 3 replies"]
    toy.run(1, start=1)
    assert toy.active.begun and set(toy.sent("improve", 1)) == {0, 1, 2}
    toy.run(1, start=2)
    assert not toy.sent("introduce", 2)  # once is enough


# -- collapse --------------------------------------------------------------------------------------

DIGITS: dict[str, Any] = {
    "method": "proto-evfl",
    "rounds": 3,
    "data": {"name": "digits", "clients": 4, "test_rows": 200},
    "models": {"pool": ["mlp"]},
    "evaluate": {"points": 1},
}


def ran(params: Mapping[str, Any] | None = None, **changes: Any) -> RunResult:
    return execute(check({"run": {**DIGITS, **changes, "params": dict(params or {})}}).run)


def noted(result: RunResult, what: str) -> list[float]:
    """A note's mean over parties, round by round."""
    return [row[-1] for row in result.metrics if row[4] == what]


def test_centered_extractors_do_not_collapse(caplog: pytest.LogCaptureFixture) -> None:
    quiet = ran()
    assert noted(quiet, "collapsed") == [0, 0, 0]
    assert max(noted(quiet, "cosine between pseudo-classes")) < TOO_ALIKE
    assert max(noted(quiet, "share of the largest pseudo-class")) < 0.6
    assert not caplog.records


def test_without_centering_they_do_and_the_user_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fedloom"):
        loud = ran({"centered": False, "lr": 1e-3, "rollback": False})
    assert noted(loud, "collapsed") == [1, 1, 1]
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 4 and all(
        any(f"party-{m} collapsed" in text for text in said) for m in range(4)
    )
    assert all("params.rollback=true" in text for text in said)


def test_a_collapsed_extractor_goes_back_bit_for_bit() -> None:
    """A prior that leaves room for one class makes it take all rows."""

    def toy(rollback: bool) -> Columns:
        return Columns(PROTO, steps=5, lr=1e-2, gamma=1.0, rollback=rollback).run(1)

    def network(party: Any) -> dict[str, Tensor]:
        return {
            k: v.clone()
            for part in ("params", "buffers", "opt")
            for k, v in getattr(party, part).items()
        }

    prior = torch.tensor([1 - 2e-6, 1e-6, 1e-6])
    mu = torch.zeros(CLASSES, WIDTH)
    mu[0] = 1
    party, free = toy(True).party(1), toy(False).party(1)
    assert party.take_notes()["collapsed"] == free.take_notes()["collapsed"] == 0
    before, f = network(party), party.infer(aligned_rows(party))
    assert {"mean", "square", "step", "centre.running_mean", "centre.num_batches_tracked"} <= set(
        before
    )
    sent = party.improve(t=1, prototypes=mu, prior=prior)
    notes = party.take_notes()
    assert notes["collapsed"] == notes["share of the largest pseudo-class"] == 1
    assert same(before, network(party))
    assert torch.equal(sent["embedded"], f)  # and that is what it sends
    # what it was told stays
    assert torch.equal(party.prototypes, mu) and torch.allclose(party.prior, prior)
    free.improve(t=1, prototypes=mu, prior=prior)
    assert free.take_notes()["collapsed"] == 1
    assert all(not torch.equal(v, before[k]) for k, v in network(free).items())


def test_of_two_classes_one_may_be_rare() -> None:
    def limit(*prior: float) -> float:
        return collapse_share(torch.tensor(prior))

    assert limit(0.5, 0.5) == 0.98 and limit(0.1, 0.1, 0.8) == pytest.approx(
        0.9
    )  # of three one may be frequent, and known
    assert limit(0.3, 0.3, 0.4) == pytest.approx(0.7) and limit(*[0.1] * 10) == 0.6


# -- evaluation, presets, resuming, learning -------------------------------------------------------


def test_a_party_alone_answers_with_prototypes_and_prior() -> None:
    toy = Columns(PROTO).run(2)
    party = toy.party(1)
    f = party.infer(party.context.tests["test"].every)
    f64, mu, p = (a.double().numpy() for a in (f, party.prototypes, party.prior))
    belongs = by_numpy(f64, mu, p, toy.cfg)["pi"]
    assert predictions_alone(party, on="test")["predicted"].tolist() == belongs.argmax(1).tolist()
    assert np.allclose(torch.softmax(party.alone(f), -1).numpy(), belongs, atol=1e-5)


def test_the_paper_s_preset_is_the_printed_one() -> None:
    paper, ours = PROTO.configure("paper"), PROTO.configure()
    assert (paper.lr, paper.active_lr, paper.batch_size, paper.weight_decay, paper.rho) == (
        1e-5,
        5e-4,
        64,
        0.1,
        0.1,
    )
    assert (paper.similarity, paper.temperature, paper.prototypes, paper.adapter) == (
        "dot",
        1.0,
        "sum",
        "linear",
    )
    assert (ours.similarity, ours.temperature, ours.prototypes, ours.rho, ours.centered) == (
        "cosine",
        0.1,
        "mean",
        0.1,
        True,
    )
    assert ours.eval_modes == ("alone",) and set(ours.warnings) == {"collapsed"}


@pytest.mark.parametrize("faults", [{}, {"dropout": 0.15, "nan": 0.1}], ids=["calm", "faults"])
def test_a_run_that_was_stopped_continues_to_the_same_bits(
    faults: dict[str, float], tmp_path: Path
) -> None:
    values = {
        **DIGITS,
        "rounds": 4,
        "faults": faults,
        "params": {"steps": 3, "epochs": 1, "embedding_noise": 0.1},
    }
    values["columns"] = {"aligned": 40, "unaligned": 30}
    run = check({"run": values}).run
    whole = execute(run)
    for _ in range(2):  # each gets one round further
        with pytest.raises(Stopped):
            execute(run, tmp_path, resume=True, stop=lambda: True)
    resumed = execute(run, tmp_path, resume=True)
    assert resumed.summary["state_sha256"] == whole.summary["state_sha256"]
    assert resumed.summary["bytes"] == whole.summary["bytes"]
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns(seed: int) -> None:
    """Its parties alone as well, which never saw a label. No more than that is claimed: see
    docs/vertical.md.
    """
    final = {(r[4], r[3]): r[-1] for r in ran(seed=seed, rounds=4).metrics}
    assert final["accuracy mean", ""] > 0.3
    assert final["accuracy alone mean", ""] > 0.3
