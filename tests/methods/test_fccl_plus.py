"""FCCL+'s page against its paper: likeness of rows, the classes that are not the label, bytes,
faults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError, ModelError
from fedloom.core.evaluation import predictions
from fedloom.core.faults import Faults
from fedloom.core.losses import kl
from fedloom.methods.distillation.fccl import correlation_loss
from fedloom.methods.distillation.fccl_plus import (
    FCCLPlusClient,
    FeaturesAndLogits,
    cosines,
    others,
    others_kl,
    parted,
)
from fedloom.methods.distillation.steps import public_batch
from tests.toy import CLASSES, Toy, common, contexts, equal, rows

FCCL, PLUS, LOCAL = (methods.find(n) for n in ("fccl", "fccl-plus", "local"))


def two_parts(n: int, *, norm: bool = False) -> nn.Module:
    """Client n's own architecture: features of another width for each."""
    return common(norm=norm, width=5 + n)


def toy(n: int = 3, **params: Any) -> Toy:
    return Toy(PLUS, n, **{"batch_size": 8, "tau": 2, "make": two_parts, **params})


def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The clients' tensors by the names of their networks, whatever stands around these."""
    return {k.replace("network.", ""): v for k, v in tensors.items() if not k.startswith("server")}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- likeness of rows ------------------------------------------------------------------------------


def test_cosines_by_hand() -> None:
    f = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    half = 0.5**0.5
    assert torch.allclose(cosines(f), torch.tensor([[0.0, half], [0.0, half], [half, half]]))


def test_cosines_are_those_of_all_other_rows_in_order() -> None:
    f = rand(7, 4)
    found = cosines(f)
    assert found.shape == (7, 6)
    for i in range(7):
        rest = [j for j in range(7) if j != i]
        assert torch.allclose(found[i], F.cosine_similarity(f[i : i + 1], f[rest], dim=-1))


def test_rows_without_features_have_cosine_0_and_a_gradient() -> None:
    f = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, -1.0]], requires_grad=True)
    found = cosines(f)
    assert found[0].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(found.sum(), f)
    assert torch.isfinite(gradient).all()


def test_likeness_does_not_see_the_scale_of_features() -> None:
    assert torch.allclose(cosines(rand(5, 3)), cosines(7 * rand(5, 3)))


# -- the other classes -----------------------------------------------------------------------------


def test_the_other_classes_are_all_but_the_label() -> None:
    f, y = torch.arange(12.0).view(3, 4), torch.tensor([0, 2, 3])
    assert [sorted(r) for r in others(f, y).tolist()] == [[1, 2, 3], [4, 5, 7], [8, 9, 10]]


def test_divergence_of_the_others_is_numpy_s() -> None:
    before = rand(6, 5)
    f = rand(6, 5, seed=1)
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    temperature = 3.0
    total = 0.0
    for p, q, label in zip(before.numpy(), f.numpy(), y.tolist(), strict=True):
        p, q = (np.exp(np.delete(z, label) / temperature) for z in (p, q))
        p, q = p / p.sum(), q / q.sum()
        assert p.sum() == pytest.approx(1)
        total += float((p * np.log(p / q)).sum())
    found = others_kl(before, f, y, temperature)
    assert float(found) == pytest.approx(temperature**2 * total / 6, rel=1e-12)


def test_divergence_of_the_others_has_the_closed_gradient_and_none_at_the_label() -> None:
    """T (q - q_previous) / B at the K - 1 others."""
    before = rand(6, 5)
    f = rand(6, 5, seed=1).requires_grad_()
    y = torch.arange(6) % 5
    temperature = 3.0
    (auto,) = torch.autograd.grad(others_kl(before, f, y, temperature), f)
    label = F.one_hot(y, 5).bool()
    q, p = (
        z.detach().masked_fill(label, -torch.inf).div(temperature).softmax(-1) for z in (f, before)
    )
    assert (auto - temperature * (q - p) / 6).abs().max() < 1e-15
    assert auto[label].abs().max() == 0


def test_two_classes_leave_nothing_to_remember() -> None:
    assert float(others_kl(rand(4, 2), rand(4, 2, seed=1), torch.tensor([0, 1, 1, 0]), 3.0)) == 0


def test_losses_pass_gradcheck() -> None:
    before, f, y = rand(4, 3), rand(4, 3, seed=1).requires_grad_(), torch.tensor([0, 2, 1, 1])
    assert torch.autograd.gradcheck(lambda f: others_kl(before, f, y, 3.0), f)
    target, features = (rand(5, 4, seed=2) / 0.5).softmax(-1), rand(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: kl(target, cosines(f), 0.5), features)


def test_the_transfer_loss_is_the_weighted_sum() -> None:
    client: FCCLPlusClient = toy(correlation=0.5, similarity=2.0).party(0)
    out, logits, like = torch.randn(8, 5 + CLASSES), torch.randn(8, CLASSES), torch.rand(8, 7)
    loss, terms = client.transfer_loss(out, {"logits": logits, "cosines": like})
    assert terms["correlation"] == correlation_loss(out[:, 5:], logits, 0.0051)
    target = (like / 0.02).softmax(-1)
    by_hand = (
        (target * (target.log() - (cosines(out[:, :5]) / 0.02).log_softmax(-1))).sum(-1).mean()
    )
    assert torch.allclose(terms["similarity"], by_hand, rtol=1e-5)
    assert torch.allclose(loss, 0.5 * terms["correlation"] + 2 * terms["similarity"])


# -- a round, against one in plain torch -----------------------------------------------------------


def plain(at: Toy, rounds: int) -> list[Any]:
    """The same rounds for all clients by torch.optim and whole copies of networks, each in two
    parts.
    """
    cfg, parties = at.cfg, [at.party(i) for i in at.engine.ids]
    nets: list[Any] = [p.context.build() for p in parties]
    adams = [torch.optim.Adam(net.parameters(), lr=cfg.lr) for net in nets]

    def step(n: int, loss: Tensor) -> None:
        adams[n].zero_grad()
        loss.backward()
        adams[n].step()

    def likeness(net: Any, x: Tensor) -> Tensor:
        f = net.features(x)
        f = f / f.norm(dim=-1, keepdim=True).clamp_min(1e-4)
        return torch.stack(
            [f[i] @ f[[j for j in range(len(f)) if j != i]].T for i in range(len(f))]
        )

    for t in range(rounds):
        for n, (net, party) in enumerate(zip(nets, parties, strict=True)):
            previous = party.context.build()
            previous.load_state_dict(net.state_dict())
            for x, y in party.batches(t, steps=cfg.tau, size=cfg.batch_size):
                f, memory = net(x), torch.zeros(())
                for p, q, label in zip(previous(x).detach(), f, y, strict=True):
                    rest = [c for c in range(CLASSES) if c != label]
                    p, q = (z[rest] / cfg.inter_temperature for z in (p, q))
                    memory = memory + (
                        p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))
                    ).sum() / len(y)
                step(n, F.cross_entropy(f, y) + cfg.inter * cfg.inter_temperature**2 * memory)
        for x in parties[0].public(t, steps=cfg.tau, size=cfg.batch_size):
            mean = torch.stack([net(x) for net in nets]).mean(0).detach()
            target = (
                torch.stack([likeness(net, x) for net in nets]).mean(0).detach() / 0.02
            ).softmax(-1)
            for n, net in enumerate(nets):
                alike = (
                    (target * (target.log() - (likeness(net, x) / 0.02).log_softmax(-1)))
                    .sum(-1)
                    .mean()
                )
                step(n, correlation_loss(net(x), mean, cfg.off_diagonal) + cfg.similarity * alike)
    return nets


def test_rounds_are_those_of_plain_torch() -> None:
    at = toy(inter=0.7).run(2)
    after = own(at.tensors())
    for n, net in enumerate(plain(at, 2)):
        for name, p in net.named_parameters():
            assert (after[f"{n}.{name}"] - p).abs().max() < 2e-5, (n, name)


# -- reductions ------------------------------------------------------------------------------------


def test_without_any_weight_it_is_local() -> None:
    alone = toy(inter=0.0, correlation=0.0, similarity=0.0).run(3)
    local = Toy(LOCAL, 3, make=two_parts, batch_size=8, tau=2).run(3)
    assert own(alone.tensors()).keys() == own(local.tensors()).keys()
    for k, v in own(local.tensors()).items():
        assert torch.allclose(v, own(alone.tensors())[k], atol=1e-6)
    assert all(e.bytes == 0 for e in alone.fed.ledger)


def test_without_likeness_and_memory_it_is_fccl_without_its_own() -> None:
    plus = toy(inter=0.0, similarity=0.0).run(2)
    fccl = Toy(FCCL, 3, make=two_parts, batch_size=8, tau=2, inter=0.0, pretrain_steps=0).run(2)
    for k, v in own(fccl.tensors()).items():
        assert torch.allclose(v, own(plus.tensors())[k], atol=1e-5)
    assert plus.fed.ledger.received("server") == fccl.fed.ledger.received("server")


def test_with_one_step_the_previous_model_changes_no_bit() -> None:
    assert equal(toy(tau=1).run(3).tensors(), toy(tau=1, inter=0.0).run(3).tensors())


def test_likeness_has_no_gradient_in_the_logits_and_correlation_none_in_the_features() -> None:
    client = toy().party(0)
    out = client.forward(public_batch(client, 0, 0))
    mean = {"logits": torch.randn(8, CLASSES), "cosines": torch.rand(8, 7)}
    for name, part in (("similarity", 0), ("correlation", 1)):
        alone = toy(**dict[str, Any]({name: 0.0})).party(0)
        left = {k: v for k, v in mean.items() if (k == "logits") == (name == "similarity")}
        gradient, _ = torch.func.grad(alone.transfer_loss, has_aux=True)(out, left)
        assert parted(gradient, CLASSES)[part].abs().max() == 0
        assert parted(gradient, CLASSES)[1 - part].abs().max() > 0


def test_the_memory_holds_a_client_back() -> None:
    how: dict[str, Any] = {"tau": 6, "lr": 0.02, "correlation": 0.0, "similarity": 0.0}
    begun = toy(**how).tensors()
    moved = []
    for inter in (20.0, 0.0):
        after = toy(**how, inter=inter).run(2).tensors()
        moved.append(sum(float((after[k] - begun[k]).norm()) for k in begun))
    assert moved[0] < 0.9 * moved[1]


def test_equal_clients_learn_no_likeness_from_each_other() -> None:
    client_contexts = contexts(3, make=lambda n: two_parts(0), data=lambda n: rows(8, 5))
    at = Toy(
        PLUS, client_contexts=client_contexts, batch_size=8, tau=1, correlation=0.0, inter=0.0
    ).run(1)
    assert all(notes["similarity loss"] < 1e-6 for notes in at.engine.notes().values())


# -- the network -----------------------------------------------------------------------------------


def test_a_client_answers_with_its_logits_alone() -> None:
    party = toy().party(1)
    x = torch.randn(9, 6)
    net = party.context.build().eval()
    features, logits = parted(party.net.infer(x), CLASSES)
    assert torch.allclose(logits, net(x), atol=1e-6) and torch.allclose(
        features, net.features(x), atol=1e-6
    )
    assert torch.equal(party.infer(x), logits)


def test_a_network_that_is_not_in_two_parts_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a network's features"):
        FeaturesAndLogits(nn.Linear(3, 2))


def test_the_first_step_of_a_stage_has_no_previous_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken there: with BatchNorm the gradient would else not be 0."""
    loss, seen = FCCLPlusClient.private_loss, []

    def watched(
        self: FCCLPlusClient, x: Tensor, y: Tensor, previous: Tensor | None, *more: Tensor
    ) -> Tensor:
        seen.append((self.context.id, previous is not None))
        return loss(self, x, y, previous, *more)

    monkeypatch.setattr(FCCLPlusClient, "private_loss", watched)
    toy(tau=3).run(2)
    assert [later for who, later in seen if who == 1] == [False, True, True] * 2


# -- bytes, who sees what --------------------------------------------------------------------------


def test_bytes_are_those_of_logits_and_cosines_each_way() -> None:
    """τ B (K + B - 1) floats a client and round."""
    at = toy(4, tau=3).run(5)
    expected = 3 * 8 * (CLASSES + 7) * 4 * 4 * 5
    assert at.fed.ledger.received("server") == expected
    assert at.fed.ledger.sent("server") == expected


def test_the_server_receives_nothing_but_logits_and_cosines() -> None:
    what = {e.what for e in toy().run(2).fed.ledger if e.receiver == "server"}
    assert len(what) == 2 and "none" in what
    (answer,) = what - {"none"}
    assert f"float32[8,{CLASSES}]" in answer and "float32[8,7]" in answer
    widths = {f"float32[8,{5 + n}]" for n in range(3)} - {"float32[8,7]"}
    assert not any(w in answer for w in widths)  # no features


@pytest.mark.parametrize("off", ["correlation", "similarity"])
def test_what_has_no_weight_does_not_cross(off: str) -> None:
    at = toy(**dict[str, Any]({off: 0.0})).run(2)
    width = 7 if off == "correlation" else CLASSES
    assert at.fed.ledger.received("server") == 2 * 8 * width * 4 * 3 * 2


@pytest.mark.parametrize(
    ("coding", "logits", "cosine"), [("float16", 8, 14), ("int8", 8, 11), ("top-k", 8, 14)]
)
def test_shorter_messages_have_the_bytes_of_their_coding(
    coding: str, logits: int, cosine: int
) -> None:
    more = {"top_k": 2} if coding == "top-k" else {}
    at = toy(coding=coding, **more).run(2)
    assert at.fed.ledger.received("server") == (logits + cosine) * 8 * 2 * 3 * 2
    assert all(torch.isfinite(v).all() for v in at.tensors().values())


# -- engines, participation, faults ----------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: two_parts(n, norm=norm))
    loop, strict = (
        toy(client_contexts=client_contexts).run(3),
        toy(client_contexts=client_contexts, isolated=True).run(3),
    )
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()


def test_clients_of_one_architecture_can_be_done_together() -> None:
    client_contexts = contexts(3, make=lambda n: two_parts(0))
    loop, batched = (
        toy(client_contexts=client_contexts).run(2),
        toy(client_contexts=client_contexts, batched=True).run(2),
    )
    assert not [r for r in batched.engine.account().remarks if "in turn" in r]
    for k, v in batched.tensors().items():
        assert torch.allclose(v, loop.tensors()[k], atol=2e-5)


def test_a_federation_of_one_learns_alone_and_says_why() -> None:
    at = toy(1).run(2)
    assert {t.reason for t in at.fed.failures} == {"fewer than 2 replies"}
    assert equal(at.tensors(), toy(1, correlation=0.0, similarity=0.0).run(2).tensors())


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    at = toy(5, faults=Faults(**{fault: 0.3})).run(4)
    assert at.fed.failures
    assert all(torch.isfinite(v).all() for v in at.tensors().values())


@pytest.mark.parametrize("size", [1.69e29, 1e30, 3e38])
def test_one_huge_answer_leaves_all_finite_and_learning(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FCCLPlusClient.predict

    def predict(self: FCCLPlusClient, *, t: int, i: int) -> Any:
        answer: Any = honest(self, t=t, i=i)
        return (
            {k: torch.full_like(v, size) for k, v in answer.items()}
            if (self.context.id, t) == (1, 0)
            else answer
        )

    monkeypatch.setattr(FCCLPlusClient, "predict", predict)
    at = toy(batch_size=32).run(1)
    before = at.tensors()
    after = at.run(1, start=1).tensors()
    assert not at.fed.failures
    assert all(torch.isfinite(v).all() for v in after.values())
    assert all((v - before[k]).abs().max() > 1e-4 for k, v in after.items())


def test_a_sick_client_is_kept_out_of_the_means() -> None:
    client_contexts = contexts(4, make=two_parts)
    at = toy(client_contexts=client_contexts)
    with torch.no_grad():
        at.party(3).net.flat.fill_(float("nan"))
    healthy = {k: v for k, v in at.run(2).tensors().items() if not k.startswith("3.")}
    assert equal(healthy, toy(client_contexts=client_contexts[:3]).run(2).tensors())


def test_who_fails_in_the_private_stage_sits_out_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = FCCLPlusClient.local_train

    def fails(self: FCCLPlusClient, *, t: int) -> None:
        if self.context.id == 1:
            raise RuntimeError("no rows today")
        works(self, t=t)

    monkeypatch.setattr(FCCLPlusClient, "local_train", fails)
    at = toy()
    start, after = at.tensors(), at.run(1).tensors()
    assert {t.party for t in at.fed.failures} == {"client-1"}
    assert all(torch.equal(start[k], after[k]) for k in start if k.startswith("1."))
    assert at.fed.ledger.received("server") == 2 * 8 * (CLASSES + 7) * 4 * 2


def test_it_learns() -> None:
    at = toy(tau=5, lr=0.02, batch_size=16)
    test = at.client_contexts[0].tests["test"]
    labels = test.y(torch.arange(len(test)))

    def right() -> float:
        return float(
            np.mean(
                [
                    (predictions(at.party(i), on="test")["predicted"] == labels).float().mean()
                    for i in range(3)
                ]
            )
        )

    before = right()
    at.run(12)
    assert right() > max(0.55, before + 0.2)  # of four classes


# -- config ----------------------------------------------------------------------------------------


def test_defaults_are_the_codes() -> None:
    cfg = PLUS.configure()
    assert (cfg.tau, cfg.batch_size, cfg.off_diagonal, cfg.similarity) == (5, 32, 0.0051, 3.0)
    assert (cfg.similarity_temperature, cfg.inter_temperature, cfg.iterations_per_round) == (
        0.02,
        3.0,
        5,
    )


def test_errors_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        PLUS.configure(params={"batch_size": 1, "similarity_temperature": 0, "pretrain_steps": 100})
    text = str(error.value)
    assert (
        "params.batch_size" in text
        and "params.similarity_temperature" in text
        and "pretrain_steps" in text
    )
