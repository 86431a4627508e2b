"""FCCL's page against its paper: the correlation loss, both memories, pretraining,
bytes, faults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.core.evaluation import predictions
from fedloom.core.faults import Faults
from fedloom.methods.distillation.fccl import (
    EPS,
    FIRST,
    FCCLClient,
    correlation_loss,
    pretrain,
    pretrained_logits,
    standardized,
)
from tests.toy import CLASSES, Toy, contexts, equal, network, rows

FCCL, LOCAL = methods.find("fccl"), methods.find("local")
SMALL: dict[str, Any] = {"batch_size": 8, "pretrain_steps": 3}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the correlation loss --------------------------------------------------------------------------


def test_the_loss_on_numbers_by_hand() -> None:
    """Columns (-1, 0, 1) and its opposite have standard deviation 1: C = ±2/3, whatever the mean's
    scale.
    """
    f = torch.tensor([[-1.0, 1.0], [0.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    mean = 5 * f + 7
    assert float(correlation_loss(f, mean, 0.1)) == pytest.approx(
        (2 / 3 - 1) ** 2 * 2 + 0.1 * 2 / 9, abs=1e-4
    )
    assert float(correlation_loss(f, -mean, 0.1)) == pytest.approx(
        (2 / 3 + 1) ** 2 * (2 + 0.1 * 2), abs=1e-4
    )


def test_the_loss_is_that_of_numpy_s_correlations() -> None:
    """An unbiased deviation with a product over B: C is (1 - 1/B) times the correlation
    coefficients.
    """
    f, mean = rand(16, 5), rand(16, 5, seed=1)
    c = np.corrcoef(f.numpy().T, mean.numpy().T)[:5, 5:] * 15 / 16
    own = np.eye(5, dtype=bool)
    expected = ((c[own] - 1) ** 2).sum() + 0.0051 * ((c[~own] + 1) ** 2).sum()
    assert float(correlation_loss(f, mean, 0.0051)) == pytest.approx(expected, rel=1e-4)


def test_the_loss_passes_gradcheck() -> None:
    f, mean = rand(6, 4).requires_grad_(), rand(6, 4, seed=1)
    assert torch.autograd.gradcheck(lambda f: correlation_loss(f, mean, 0.3), f)


def test_the_gradient_is_the_closed_form() -> None:
    """dL/dZ = Z̄ Dᵀ / B with D = dL/dC, then through the standardization."""
    f, mean, off = rand(6, 4).requires_grad_(), rand(6, 4, seed=1), 0.3
    (auto,) = torch.autograd.grad(correlation_loss(f, mean, off), f)
    with torch.no_grad():
        z, other, scale = standardized(f), standardized(mean), (f.var(0) + EPS).rsqrt()
        c, own = z.T @ other / 6, torch.eye(4, dtype=torch.bool)
        slope = other @ torch.where(own, 2 * (c - 1), 2 * off * (c + 1)).T / 6
        closed = scale * (slope - slope.mean(0) - z * (slope * z).sum(0) / 5)
    assert (auto - closed).abs().max() < 1e-13
    assert auto.sum(0).abs().max() < 1e-14  # a shift of a class changes nothing


@pytest.mark.parametrize("whose", ["own", "mean", "both"])
def test_a_class_that_all_rows_have_alike_gives_no_nan(whose: str) -> None:
    f, mean = (
        torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(n)) for n in range(2)
    )
    if whose != "mean":
        f[:, 1] = 3.0
    if whose != "own":
        mean[:, 1] = -2.0
    f.requires_grad_()
    loss = correlation_loss(f, mean, 0.0051)
    (gradient,) = torch.autograd.grad(loss, f)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert standardized(f)[:, 1].abs().max() == 0 or whose == "mean"


@pytest.mark.parametrize("size", [5.6e28, 1.69e29, 1e30])
def test_a_huge_class_that_all_rows_have_alike_gives_no_nan_and_no_huge_gradient(
    size: float,
) -> None:
    f = torch.randn(32, CLASSES, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mean = torch.randn(32, CLASSES, generator=torch.Generator().manual_seed(1))
    mean[:, 1] = size
    assert standardized(mean).abs().max() <= 31**0.5 * 1.001
    (gradient,) = torch.autograd.grad(correlation_loss(f, mean, 0.0051), f)
    assert torch.isfinite(gradient).all() and gradient.abs().max() < 10


@pytest.mark.parametrize("size", [1.69e29, 1e30, 3e38])
def test_one_huge_answer_leaves_all_finite_and_learning(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FCCLClient.predict

    def predict(self: FCCLClient, *, t: int, i: int) -> Any:
        answer = honest(self, t=t, i=i)
        return torch.full_like(answer, size) if self.context.id == 1 and t == 0 else answer  # type: ignore[arg-type]

    monkeypatch.setattr(FCCLClient, "predict", predict)
    toy = Toy(FCCL, 3, tau=2, batch_size=32, pretrain_steps=3).run(1)
    before = toy.tensors()
    after = toy.run(1, start=1).tensors()
    assert not toy.fed.failures
    assert all(torch.isfinite(v).all() for v in after.values())
    for k, v in after.items():
        assert (v - before[k]).abs().max() > 1e-4, k  # Adam's steps are not frozen


def test_a_step_along_the_gradient_brings_classes_together() -> None:
    f, mean = rand(32, CLASSES).requires_grad_(), rand(32, CLASSES, seed=1)
    first = correlation_loss(f, mean, 0.0051)
    (gradient,) = torch.autograd.grad(first, f)
    assert correlation_loss(f - 0.1 * gradient, mean, 0.0051) < first


# -- a round, against one in plain torch -----------------------------------------------------------


def correlations(f: Tensor, mean: Tensor) -> Tensor:
    """The loss by another way: torch's covariances over the product of deviations."""
    k, n = f.shape[1], len(f)
    cov = torch.cov(torch.cat((f.T, mean.T)))
    deviation = (cov.diag() + EPS).sqrt()
    c = (cov / deviation[:, None] / deviation)[:k, k:] * (n - 1) / n
    return (c.diag() - 1).square().sum() + 0.0051 * (
        (c + 1).square().sum() - (c.diag() + 1).square().sum()
    )


def divergence(p: Tensor, f: Tensor) -> Tensor:
    p = p.softmax(-1)
    return (p * (p.log() - f.log_softmax(-1))).sum(-1).mean()


def plain(toy: Toy, rounds: int) -> list[nn.Module]:
    """The same rounds for all clients by torch.optim and whole copies of networks."""
    cfg, parties = toy.cfg, [toy.party(i) for i in toy.engine.ids]
    nets = [p.context.build() for p in parties]
    adams = [torch.optim.Adam(net.parameters(), lr=cfg.lr) for net in nets]

    def step(n: int, loss: Tensor) -> None:
        adams[n].zero_grad()
        loss.backward()
        adams[n].step()

    for n, (net, party) in enumerate(zip(nets, parties, strict=True)):
        for k in range(cfg.pretrain_steps):
            batch = party.batches(FIRST - k, steps=1, size=cfg.batch_size)
            step(n, F.cross_entropy(net(batch.x[0]), batch.y[0]))
    frozen = [p.context.build() for p in parties]
    for net, copy in zip(nets, frozen, strict=True):
        copy.load_state_dict(net.state_dict())
    for t in range(rounds):
        for n, (net, party) in enumerate(zip(nets, parties, strict=True)):
            previous = party.context.build()
            previous.load_state_dict(net.state_dict())
            for x, y in party.batches(t, steps=cfg.tau, size=cfg.batch_size):
                f = net(x)
                memory = cfg.inter * divergence(previous(x).detach(), f)
                memory = memory + cfg.intra * divergence(frozen[n](x).detach(), f)
                step(n, F.cross_entropy(f, y) + memory)
        for x in parties[0].public(t, steps=cfg.tau, size=cfg.batch_size):
            mean = torch.stack([net(x) for net in nets]).mean(0).detach()
            for n, net in enumerate(nets):
                step(n, correlations(net(x), mean))
    return nets


def test_rounds_are_those_of_plain_torch() -> None:
    toy = Toy(FCCL, 3, tau=3, inter=0.7, intra=0.4, **SMALL).run(2)
    after = toy.tensors()
    for n, net in enumerate(plain(toy, 2)):
        for name, p in net.named_parameters():
            assert (after[f"{n}.{name}"] - p).abs().max() < 1e-5, (n, name)


def test_pretraining_comes_before_the_first_round_and_never_again() -> None:
    toy = Toy(FCCL, 3, tau=2, **SMALL)
    assert all(toy.party(i).pretrained == {} for i in range(3))
    toy.run(1)
    kept = {
        i: {k: v.clone() for k, v in toy.party(i).pretrained["params"].items()} for i in range(3)
    }
    assert int(toy.party(0).opt["step"]) == 3 + 2 + 2
    toy.run(2, start=1)
    assert int(toy.party(0).opt["step"]) == 3 + 3 * (2 + 2)
    for i, first in kept.items():
        assert equal(first, toy.party(i).pretrained["params"])
        assert not equal(first, {k: v.clone() for k, v in toy.party(i).params.items()})


def test_who_comes_later_pretrains_then() -> None:
    toy = Toy(FCCL, 4, tau=2, **SMALL).run(2, present=[0, 1, 2])
    assert toy.party(3).pretrained == {}
    toy.run(1, start=2)
    assert int(toy.party(3).opt["step"]) == 3 + 2 + 2


def test_the_pretrained_model_has_its_own_statistics() -> None:
    """With BatchNorm its answers are those of its own statistics, and looking at it changes
    nothing.
    """
    toy = Toy(FCCL, 3, tau=2, make=lambda n: network(n, norm=True), **SMALL).run(3)
    party = toy.party(0)
    assert not equal(dict(party.pretrained["buffers"]), dict(party.buffers))
    before = toy.tensors()
    x = party.batches(3, steps=2, size=party.cfg.batch_size).x
    answer = pretrained_logits(party, party.pretrained, x)
    assert equal(before, toy.tensors())
    copy = party.context.build()
    copy.load_state_dict({**party.pretrained["params"], **party.pretrained["buffers"]})
    assert torch.allclose(answer, copy.eval()(x.flatten(0, 1)).view(answer.shape), atol=1e-6)


# -- reductions ------------------------------------------------------------------------------------


def test_without_any_weight_it_is_local() -> None:
    off: dict[str, Any] = {"pretrain_steps": 0, "inter": 0.0, "intra": 0.0, "correlation": 0.0}
    toy = Toy(FCCL, tau=3, batch_size=8, **off).run(3)
    local = Toy(LOCAL, tau=3, batch_size=8).run(3).tensors()
    assert equal(toy.tensors(), {k: v for k, v in local.items() if not k.startswith("server")})
    assert all(e.bytes == 0 for e in toy.fed.ledger)


def test_with_one_step_the_previous_model_changes_no_bit() -> None:
    a = Toy(FCCL, tau=1, **SMALL).run(3).tensors()
    assert equal(a, Toy(FCCL, tau=1, inter=0.0, **SMALL).run(3).tensors())


def test_without_pretraining_there_is_no_pretrained_model() -> None:
    a = Toy(FCCL, tau=3, batch_size=8, pretrain_steps=0).run(3)
    assert equal(
        a.tensors(), Toy(FCCL, tau=3, batch_size=8, pretrain_steps=0, intra=0.0).run(3).tensors()
    )
    assert a.party(0).pretrained == {"done": True}


@pytest.mark.parametrize("term", ["inter", "intra"])
def test_each_memory_holds_a_client_back(term: str) -> None:
    how: dict[str, Any] = {
        "tau": 6,
        "batch_size": 8,
        "pretrain_steps": 20,
        "lr": 0.02,
        "correlation": 0.0,
        "inter": 0.0,
        "intra": 0.0,
    }
    start = Toy(FCCL, **how)
    free = Toy(FCCL, **how).run(2).tensors()
    held = Toy(FCCL, **{**how, term: 20.0}).run(2).tensors()
    start.run(0)
    for i in start.engine.ids:
        pretrain(start.party(i))
    begun = start.tensors()
    moved = [sum(float((to[k] - begun[k]).norm()) for k in begun) for to in (held, free)]
    assert moved[0] < 0.8 * moved[1]


def test_equal_clients_stay_equal() -> None:
    toy = Toy(
        FCCL,
        client_contexts=contexts(3, make=lambda n: network(0), data=lambda n: rows(8, 5)),
        tau=2,
        **SMALL,
    )
    first = toy.run(2).party(0)
    # a batch holds all 8 rows, in an order of each client's own
    for i in (1, 2):
        for name, value in first.params.items():
            assert torch.allclose(value, toy.party(i).params[name], atol=1e-4), name


def test_the_first_step_of_a_stage_has_no_previous_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken there: with BatchNorm the gradient would else not be 0."""
    loss, seen = FCCLClient.private_loss, []

    def watched(
        self: FCCLClient, x: Tensor, y: Tensor, previous: Tensor | None, *more: Tensor
    ) -> Tensor:
        seen.append((self.context.id, previous is not None))
        return loss(self, x, y, previous, *more)

    monkeypatch.setattr(FCCLClient, "private_loss", watched)
    Toy(FCCL, 3, tau=3, **SMALL).run(2)
    assert [later for who, later in seen if who == 1] == [False, True, True] * 2


# -- bytes, who sees what --------------------------------------------------------------------------


def test_bytes_are_those_of_one_batch_of_logits_each_way() -> None:
    toy = Toy(FCCL, 4, tau=3, **SMALL).run(5)
    iteration = 8 * CLASSES * 4 * 4 * 3 * 5
    assert toy.fed.ledger.received("server") == iteration
    assert toy.fed.ledger.sent("server") == iteration


def test_the_server_receives_nothing_but_logits() -> None:
    toy = Toy(FCCL, 4, tau=2, **SMALL).run(2)
    assert {e.what for e in toy.fed.ledger if e.receiver == "server"} == {
        f"float32[8,{CLASSES}]",
        "none",
    }


@pytest.mark.parametrize(
    ("coding", "up", "down"), [("float16", 2 * 4, 2 * 4), ("int8", 4 + 4, 4 + 4), ("top-k", 8, 8)]
)
def test_shorter_messages_have_the_bytes_of_their_coding(coding: str, up: int, down: int) -> None:
    more: dict[str, Any] = {"top_k": 2} if coding == "top-k" else {}
    toy = Toy(FCCL, 3, tau=2, coding=coding, **more, **SMALL).run(2)
    assert toy.fed.ledger.received("server") == up * 8 * 3 * 2 * 2
    assert toy.fed.ledger.sent("server") == down * 8 * 3 * 2 * 2
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


# -- engines, participation, faults ----------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: network(n, norm=norm, dropout=False))
    loop = Toy(FCCL, client_contexts=client_contexts, tau=3, **SMALL).run(3)
    strict = Toy(FCCL, client_contexts=client_contexts, tau=3, isolated=True, **SMALL).run(3)
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()


def test_clients_of_one_architecture_can_be_done_together() -> None:
    client_contexts = contexts(3, make=lambda n: network(0))
    loop = Toy(FCCL, client_contexts=client_contexts, tau=3, **SMALL).run(2)
    batched = Toy(FCCL, client_contexts=client_contexts, tau=3, batched=True, **SMALL).run(2)
    assert not [r for r in batched.engine.account().remarks if "in turn" in r]
    for k, v in batched.tensors().items():
        assert torch.allclose(v, loop.tensors()[k], atol=1e-5)


def test_only_the_sampled_learn() -> None:
    toy = Toy(FCCL, 6, clients_per_round=2, tau=2, **SMALL)
    start, after = toy.tensors(), toy.run(1).tensors()
    changed = {k.split(".")[0] for k in start if not torch.equal(start[k], after[k])}
    assert changed == {str(i) for i in toy.fed.sample(range(6), 2, 0)}


def test_a_federation_of_one_learns_alone_and_says_why() -> None:
    toy = Toy(FCCL, 1, tau=2, **SMALL).run(2)
    assert {t.reason for t in toy.fed.failures} == {"fewer than 2 replies"}
    alone = Toy(FCCL, 1, tau=2, correlation=0.0, **SMALL).run(2)
    assert equal(toy.tensors(), alone.tensors())


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    toy = Toy(FCCL, 5, faults=Faults(**{fault: 0.3}), tau=2, **SMALL).run(4)
    assert toy.fed.failures
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


def test_a_sick_client_is_kept_out_of_the_mean() -> None:
    client_contexts = contexts(4)
    toy = Toy(FCCL, client_contexts=client_contexts, tau=2, **SMALL)
    with torch.no_grad():
        toy.party(3).net.flat.fill_(float("nan"))
    healthy = {k: v for k, v in toy.run(2).tensors().items() if not k.startswith("3.")}
    assert equal(
        healthy, Toy(FCCL, client_contexts=client_contexts[:3], tau=2, **SMALL).run(2).tensors()
    )


def test_who_fails_in_the_private_stage_sits_out_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = FCCLClient.local_train

    def fails(self: FCCLClient, *, t: int) -> None:
        if self.context.id == 1:
            raise RuntimeError("no rows today")
        works(self, t=t)

    monkeypatch.setattr(FCCLClient, "local_train", fails)
    toy = Toy(FCCL, 3, tau=2, **SMALL)
    start, after = toy.tensors(), toy.run(1).tensors()
    assert {t.party for t in toy.fed.failures} == {"client-1"}
    assert all(torch.equal(start[k], after[k]) for k in start if k.startswith("1."))
    assert toy.fed.ledger.received("server") == 8 * CLASSES * 4 * 2 * 2


def test_it_learns() -> None:
    toy = Toy(FCCL, 3, tau=5, lr=0.02, batch_size=16, pretrain_steps=20)
    test = toy.client_contexts[0].tests["test"]
    labels = test.y(torch.arange(len(test)))

    def right() -> float:
        return float(
            np.mean(
                [
                    (predictions(toy.party(i), on="test")["predicted"] == labels).float().mean()
                    for i in range(3)
                ]
            )
        )

    before = right()
    toy.run(8)
    assert right() > max(0.55, before + 0.2)  # of four classes


# -- config ----------------------------------------------------------------------------------------


def test_defaults_are_the_papers() -> None:
    cfg = FCCL.configure()
    assert (cfg.tau, cfg.batch_size, cfg.pretrain_steps, cfg.off_diagonal) == (5, 32, 100, 0.0051)
    assert (cfg.inter, cfg.intra, cfg.correlation, cfg.iterations_per_round) == (1, 1, 1, 5)


def test_errors_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        FCCL.configure(params={"batch_size": 1, "pretrain_steps": -1, "off_diag": 1.0})
    text = str(error.value)
    assert (
        "params.batch_size" in text and "params.pretrain_steps" in text and "'off_diagonal'" in text
    )
