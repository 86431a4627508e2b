"""FedPCL's page against its loss and algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import epoch_plan
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.rng import stream
from fedloom.methods.meta import fedpcl
from tests.methods.test_fedproto import few
from tests.toy import CLASSES, FEATURES, Toy, common, contexts, equal

FEDPCL = methods.find("fedpcl")
INNER, WIDTH = 8, 16
ENCODER = 4 * (FEATURES * INNER + INNER + 4 * INNER) + 8
"""Bytes of a body with BatchNorm."""


def pretrained() -> nn.Module:
    """A model with BatchNorm, whose weights and statistics are not those that `encoder` makes."""
    module = common(norm=True)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.3)
    module.train()
    for seed in range(3):
        module(few(seed).every)
    return module


def encoder() -> nn.Module:
    return common(norm=True)


def toy(n: int = 3, **settings: Any) -> Toy:
    client_contexts = [replace(p, encoder=encoder) for p in contexts(n, data=few)]
    server_side = {"pretrained": pretrained}
    return Toy(
        FEDPCL,
        client_contexts=client_contexts,
        server_side=server_side,
        **{"batch_size": 4, "projection_dim": WIDTH, "lr": 0.01, **settings},
    )


def term(z: Tensor, own: int, prototypes: dict[int, Tensor], tau: float) -> Tensor:
    """-log( exp(z·C^(y)/τ) / Σ_{j≠y} exp(z·C^(j)/τ) ) of one row."""
    others = torch.stack([(z @ c / tau).exp() for k, c in prototypes.items() if k != own]).sum()
    return -((z @ prototypes[own] / tau).exp() / others).log()


Prototypes = dict[int, Tensor]


def loss_by_hand(z: Tensor, y: Tensor, sets: dict[int, Prototypes], tau: float) -> Tensor:
    """L_g + L_p, the mean over rows."""
    classes = sorted({k for one in sets.values() for k in one})
    mean = {k: torch.stack([one[k] for one in sets.values() if k in one]).mean(0) for k in classes}
    each = [{**mean, **one} for one in sets.values()]
    rows = []
    for row, own in zip(z, y.tolist(), strict=True):
        several = torch.stack([term(row, own, one, tau) for one in each]).mean()
        rows.append(term(row, own, mean, tau) + several)
    return torch.stack(rows).mean()


def features(x: Tensor) -> Tensor:
    with torch.no_grad():
        network: Any = pretrained().eval()
        return network.features(x)


def project(weights: dict[str, Tensor], e: Tensor) -> Tensor:
    return F.normalize(
        F.relu(F.linear(e, weights["projector.weight"], weights["projector.bias"])), dim=-1
    )


def means(z: Tensor, y: Tensor) -> Prototypes:
    return {k: z[y == k].detach().mean(0) for k in y.unique().tolist()}


def test_the_loss_is_the_one_written_by_hand() -> None:
    torch.manual_seed(0)
    z = F.normalize(torch.rand(9, WIDTH, dtype=torch.float64), dim=-1)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    known = torch.tensor([True, True, True, False])
    sets = torch.rand(3, CLASSES, WIDTH, dtype=torch.float64)
    whole = {m: {k: sets[m, k] for k in range(3)} for m in range(3)}
    found = fedpcl.contrast(z, y, sets, known, 0.07)
    for i in range(9):
        expected = torch.stack([term(z[i], int(y[i]), one, 0.07) for one in whole.values()]).mean()
        assert torch.allclose(found[i], expected)
    assert torch.autograd.gradcheck(
        lambda z: fedpcl.contrast(z, y, sets, known, 0.07), z.requires_grad_()
    )


def test_rows_with_nothing_to_be_told_from_give_nothing() -> None:
    z, y = torch.rand(2, WIDTH, requires_grad=True), torch.tensor([0, 3])
    one = torch.tensor([True, False, False, False])
    found = fedpcl.contrast(z, y, torch.rand(2, CLASSES, WIDTH), one, 0.07)
    assert found.tolist() == [0.0, 0.0]
    found.sum().backward()
    assert z.grad is not None and not z.grad.any()


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_three_rounds_are_those_written_by_hand(batched: bool) -> None:
    """The first learns nothing, as there are no prototypes. Clients lack classes, and nobody has
    the last one.
    """
    t = toy(epochs=2, batched=batched)
    weights = [
        {k: p.detach().clone().requires_grad_() for k, p in t.party(i).params.items()}
        for i in range(3)
    ]
    own = [features(p.rows.every) for p in t.client_contexts]
    labels = [p.rows.y(torch.arange(len(p.rows))) for p in t.client_contexts]
    sets: dict[int, Prototypes] = {}
    for number in range(3):
        sent = {}
        for i, (w, e, y) in enumerate(zip(weights, own, labels, strict=True)):
            optimizer = torch.optim.AdamW(w.values(), lr=0.01, weight_decay=1e-4)
            for n in range(number * 2, number * 2 + 2) if sets else ():
                for which in epoch_plan(stream(0, "batches", i, n), len(y), 1, 4):
                    optimizer.zero_grad()
                    loss_by_hand(project(w, e[which]), y[which], sets, 0.07).backward()
                    optimizer.step()
            sent[i] = means(project(w, e), y)
        sets = sent
        t.run(1, start=number)
        assert t.server is not None and not t.fed.failures
        for i, w in enumerate(weights):
            assert all(torch.allclose(t.party(i).params[k], p, atol=1e-6) for k, p in w.items())
            for k in range(CLASSES):
                assert bool(t.server.known[i, k]) == (k in sets[i])
                assert k not in sets[i] or torch.allclose(
                    t.server.prototypes[i, k], sets[i][k], atol=1e-6
                )
    lesson = t.server.all_prototypes()
    assert lesson["known"].tolist() == [True, True, True, False]
    assert torch.allclose(lesson["mean"][2], sets[1][2], atol=1e-6)
    assert torch.equal(lesson["each"][0, 2], lesson["mean"][2])  # client 0 has none of class 2


def test_every_client_is_given_the_encoder_once_and_the_ledger_counts_it() -> None:
    t = toy().run(3)
    messages = CLASSES * WIDTH * 4 * (1 + 3) + CLASSES
    assert t.fed.ledger.sent("server") == 3 * (ENCODER + 2 * messages)
    assert t.fed.ledger.received("server") == 3 * 3 * (CLASSES * WIDTH * 4 + CLASSES)
    assert sum(e.bytes for e in t.fed.ledger if e.kind == "equip") == 3 * ENCODER
    late = toy().run(2, present=[0]).run(2, start=2)
    assert sum(e.bytes for e in late.fed.ledger if e.kind == "equip") == 3 * ENCODER


def test_who_did_not_get_the_encoder_is_sent_it_again() -> None:
    t = toy(6, faults=Faults(dropout=0.5))
    assert t.server is not None
    t.run(1)
    missing = [i for i in range(6) if not t.server.equipped[i]]
    assert missing and len(missing) < 6
    assert all(len(t.party(i).features) == 0 and not t.server.known[i].any() for i in missing)
    t.run(16, start=1)
    assert t.server.equipped.all() and t.server.known.any(1).all()


def test_the_encoder_is_frozen() -> None:
    """Its statistics do not move, and a client's features are those of the pretrained model in
    evaluation mode.
    """
    t = toy().run(3)
    for i, client_context in enumerate(t.client_contexts):
        party = t.party(i)
        assert torch.allclose(party.features, features(client_context.rows.every), atol=1e-6)
        known = {
            k.removeprefix("encoder."): v
            for k, v in party.buffers.items()
            if k.startswith("encoder.")
        }
        assert known.keys() == pretrained().state_dict().keys()
        assert all(
            torch.equal(v, known[k])
            for k, v in pretrained().state_dict().items()
            if not k.startswith("head.")
        )
    assert set(t.party(0).state()["params"]) == {"projector.weight", "projector.bias"}


def test_who_fails_counts_with_what_it_sent_last() -> None:
    t = toy().run(2)
    assert t.server is not None
    before = t.server.prototypes.clone()
    t.run(1, start=2, present=[0])
    assert torch.equal(t.server.prototypes[1:], before[1:]) and not torch.equal(
        t.server.prototypes[0], before[0]
    )
    poor = toy(6, faults=Faults(nan=0.3, shape=0.2)).run(4)
    assert poor.server is not None and poor.fed.failures
    assert torch.isfinite(poor.server.prototypes).all()


@pytest.mark.parametrize("i", [0, 3], ids=["seen", "unseen"])
def test_prototypes_of_the_own_support_half_answer(i: int) -> None:
    t = toy(4, alpha=0.1, isolated=True).run(2, present=[0, 1, 2])
    assert t.server is not None
    before, client_context, lesson = t.tensors(), t.client_contexts[i], t.server.all_prototypes()
    x, y, _ = client_context.support
    e, test = features(x), client_context.tests["test"]
    sets = {
        m: {k: c for k, c in enumerate(one) if lesson["known"][k]}
        for m, one in enumerate(lesson["each"])
    }
    first = dict(t.engine.states()[i]["params"])
    for eval_mode, steps in {"0 steps": 0, "1 step": 1, "5 steps": 5}.items():
        w = {k: p.detach().clone().requires_grad_() for k, p in first.items()}
        for _ in range(steps):
            gradients = torch.autograd.grad(
                loss_by_hand(project(w, e), y, sets, 0.07), list(w.values())
            )
            w = {
                k: (p - 0.1 * g).detach().requires_grad_()
                for (k, p), g in zip(w.items(), gradients, strict=True)
            }
        own = means(project(w, e), y)
        names = torch.tensor(list(own))
        cosines = F.cosine_similarity(
            project(w, features(test.every))[:, None], torch.stack(list(own.values())), dim=-1
        )
        words = {"on": "test", "eval_mode": eval_mode, "broadcast": t.server.broadcast()}
        (found,) = t.engine.call([i], "predictions", words, None, None)
        assert torch.equal(found["predicted"], names[cosines.argmax(-1)])
        assert torch.isfinite(found["loss"])
    assert equal(t.tensors(), before)


def test_what_is_missing_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"\[pretrained\]"):
        Toy(FEDPCL)
    with pytest.raises(MethodError, match=r"\[pretrained\]"):
        Toy(FEDPCL, server_side={"pretrained": pretrained})
