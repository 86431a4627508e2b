"""FedHSSL's page: whom each party agrees with, what moves in which step, the mean of tops, what
crosses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine
from fedloom.methods import find
from fedloom.methods.vertical.fedhssl import CROSS, HEAD, LOCAL, TOP, FedHSSLConfig, top_means
from fedloom.methods.vertical.steps import batch_indices, labels
from tests.methods.test_ss_vfl import Vertical, agree, cosines, same

FEW: dict[str, Any] = {"projection_dim": 8}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The names of what changed."""
    return {k for k, v in after.items() if not torch.equal(v, before[k])}


def copied(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in tree.items()}


def others(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 16, 8, generator=torch.Generator().manual_seed(seed))


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_the_cross_loss_is_the_mean_over_others_of_minus_the_mean_cosine(data: str) -> None:
    party = Vertical("fedhssl", data, **FEW).parties[0]
    z = others(3)
    heads, x = party.net.module, party.context.aligned_batch(0, 0, size=16)
    with torch.no_grad():
        p = heads.cross_predictor(heads.cross_projector(party.forward(x)[:, 0])).numpy()
    by_hand = -np.mean([np.diag(cosines(p, one.numpy())).mean() for one in z])
    party.agree(t=0, number=0, step=0, others=z)
    assert party.take_notes()["cross loss"] == pytest.approx(by_hand, abs=1e-6)


def test_the_local_loss_is_the_formula() -> None:
    party = Vertical(
        "fedhssl", "breast_cancer", local_ratio=0.7, constraint_ratio=0.2, **FEW
    ).parties[1]
    one, two = party.data.every[64:80], party.data.every[80:96]
    heads, p, z, g = party.net.module, [], [], []
    with torch.no_grad():
        for x in (one, two):
            f = party.forward(x)
            z.append(heads.local_projector(f[:, 1]))
            p.append(heads.local_predictor(z[-1]).numpy())
            g.append(heads.cross_projector(f[:, 0]).numpy())

    def d(a: Any, b: Any) -> float:
        return -float(np.diag(cosines(np.asarray(a), np.asarray(b))).mean())

    by_hand = 0.7 * (d(p[0], z[1]) + d(p[1], z[0])) + 0.2 * (d(p[0], g[0]) + d(p[1], g[1]))
    assert party._local_loss(one, two).item() == pytest.approx(by_hand, abs=1e-6)


def test_gradients_stop_at_projections_and_at_the_guide() -> None:
    party = Vertical("fedhssl", "breast_cancer", **FEW).parties[1]
    one, two = party.data.every[64:80], party.data.every[80:96]
    _, found = party.gradient(party._local_loss, one, two)
    touched = {k for k, g in found.items() if g.any()}
    assert touched and not any(k.startswith(CROSS) for k in touched)
    _, found = party.gradient(party._cross_loss, one, others(1).requires_grad_())
    assert not any(k.startswith(LOCAL) for k, g in found.items() if g.any())


def test_the_local_gradient_is_right_where_nothing_is_held_constant() -> None:
    """With the guide alone, in float64, against differences: the guide depends on no weight of the
    local part.
    """
    party = Vertical(
        "fedhssl", "breast_cancer", local_ratio=0.0, constraint_ratio=1.0, **FEW
    ).parties[0]
    module: nn.Module = party.net.module.double()
    views = [
        torch.randn(
            6,
            party.data.pool.shape[1],
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(s),
        )
        for s in (1, 2)
    ]
    weight = module.local_projector[0].weight  # type: ignore[index]
    (exact,) = torch.autograd.grad(party._local_loss(*views), [weight])
    numeric, step = torch.zeros_like(exact), 1e-6
    with torch.no_grad():
        for i in range(exact.numel()):
            values = []
            for sign in (1, -1):
                weight.view(-1)[i] += sign * step
                values.append(party._local_loss(*views))
                weight.view(-1)[i] -= sign * step
            numeric.view(-1)[i] = (values[0] - values[1]) / (2 * step)
    assert torch.allclose(exact, numeric, atol=1e-7)


# -- what moves, and what crosses ------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_each_step_moves_its_own_part(data: str) -> None:
    party = Vertical("fedhssl", data, **FEW).parties[1]
    before, buffers = copied(party.params), copied(party.buffers)
    sent = party.project(number=0, step=0)
    assert (
        sent.shape == (16, 8)
        and not moved(before, party.params)
        and not moved(buffers, party.buffers)
    )
    party.agree(t=0, number=0, step=0, others=others(1))
    assert {k for k in before if k.startswith(CROSS) and k.endswith("weight")} <= moved(
        before, party.params
    )
    assert all(k.startswith(CROSS) for k in moved(before, party.params))
    before = copied(party.params)
    party.improve(t=0)
    assert {k for k in before if k.startswith(LOCAL) and k.endswith("weight")} <= moved(
        before, party.params
    )
    assert all(k.startswith(LOCAL) for k in moved(before, party.params))


def test_the_first_party_learns_of_all_others_and_they_of_the_first() -> None:
    toy = Vertical("fedhssl", **FEW)
    sent = [p.project(number=0, step=0) for p in toy.parties]
    heard: dict[int, Tensor] = {}
    call = toy.fed.call

    def spied(parties: Any, method: str, **how: Any) -> Any:
        if method == "agree" and not heard:
            heard.update({m: how["each"][m]["others"] for m in parties})
        return call(parties, method, **how)

    toy.fed.call = spied
    toy.run(1)
    assert torch.equal(heard[0], torch.stack(sent[1:]))
    assert all(torch.equal(heard[m], sent[0][None]) for m in (1, 2, 3))


def test_tops_become_the_mean_and_the_rest_stays() -> None:
    alone = Vertical("fedhssl", aggregate=False, **FEW).run(1)
    together = Vertical("fedhssl", **FEW).run(1)
    for name, value in alone.parties[0].params.items():
        if name.startswith(TOP):
            mean = torch.stack([p.params[name] for p in alone.parties]).mean(0)
            assert all(torch.allclose(p.params[name], mean, atol=1e-6) for p in together.parties)
            assert not name.endswith("0.weight") or not torch.allclose(value, mean, atol=1e-4)
        else:
            for p, q in zip(alone.parties, together.parties, strict=True):
                assert torch.equal(p.params[name], q.params[name])
    assert same(alone.tensors("buffers", "opt"), together.tensors("buffers", "opt"))
    # there is a bottom
    assert any(k.startswith("local.body.body") for k in alone.parties[0].params)


def test_means_are_weighted_by_rows_among_tops_of_one_shape() -> None:
    widths, values, rows = (3, 3, 4), (1.0, 5.0, 7.0), {0: 30, 1: 10, 2: 5}
    tops = {
        m: {
            f"{HEAD}weight": torch.full((2, width), v),
            "local_projector.0.weight": torch.tensor([v]),
        }
        for m, (width, v) in enumerate(zip(widths, values, strict=True))
    }
    replies = {m: {"top": top, "rows": torch.tensor(rows[m])} for m, top in tops.items()}
    found: Any = top_means(Federation(LocalEngine([])), replies)
    for m, expected in enumerate((2.0, 2.0, 7.0)):
        assert all((v == expected).all() for v in found[m]["top"].values())
        assert found[m]["top"][f"{HEAD}weight"].shape == (2, widths[m])


def test_rows_that_count_are_those_of_the_local_loss() -> None:
    party = Vertical("fedhssl", **FEW).parties[0]
    assert int(party.top()["rows"]) == len(party.data) - 64 > 0


def test_labels_reach_no_party_before_fine_tuning_and_the_classifier_waits() -> None:
    toys = [
        Vertical("fedhssl", pretrain_rounds=2, relabel=relabel, **FEW) for relabel in (False, True)
    ]
    top = copied(toys[0].active.params)
    a, b = (toy.run(2).tensors() for toy in toys)
    assert same(a, b) and same(top, toys[0].active.params)
    c, d = (toy.run(1, first=2).tensors("params") for toy in toys)
    assert not same(c, d)


@pytest.mark.parametrize("features", ["mean", "concatenated"])
def test_bytes_are_the_formula_and_no_gradient_crosses_in_pretraining(features: str) -> None:
    toy = Vertical("fedhssl", pretrain_rounds=2, epochs=2, features=features, **FEW).run(2)
    outside, batches, batch, width, p = 3, 4, 16, 8, 8
    top = sum(v.numel() for k, v in toy.parties[0].params.items() if k.startswith(TOP)) * 4
    exchanged = 2 * 2 * batches * outside * batch * p * 4
    assert toy.bytes("project") == toy.bytes("agree") == exchanged
    assert toy.bytes("top") == 2 * outside * (top + 8) and toy.bytes("share") == 2 * outside * top
    assert toy.bytes() == 2 * exchanged + 2 * outside * (2 * top + 8)
    assert {e.kind for e in toy.fed.ledger} == {"project", "agree", "improve", "top", "share"}
    sent = width * (1 if features == "mean" else 2)
    toy.run(1, first=2)
    assert toy.bytes("embed") == toy.bytes("update") == 2 * batches * outside * batch * sent * 4


# -- fine-tuning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["mean", "concatenated"])
def test_fine_tuning_is_a_step_of_the_joint_network(features: str) -> None:
    settings = {
        "features": features,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "pretrain_rounds": 0,
        "batch_size": 64,
        **FEW,
    }
    toy, joint = (Vertical("fedhssl", "breast_cancer", **settings) for _ in range(2))
    toy.run(1)
    rows, parts = batch_indices(joint.active, 0, 0), []
    for party in joint.parties:
        features_of = party.net.module(party.context.aligned_batch(0, 0, size=64))
        parts.append(party.pooled(features_of))
    logits = joint.active.net.module(torch.stack(parts, 1))
    nn.functional.cross_entropy(logits, labels(joint.active, rows)).backward()
    for party, after in zip(
        [*joint.parties, joint.active], [*toy.parties, toy.active], strict=True
    ):
        for name, w in party.net.module.named_parameters():
            step = 0 if w.grad is None else toy.cfg.lr * w.grad
            assert torch.allclose(after.params[name], w.detach() - step, atol=1e-6), name
    assert moved(joint.parties[1].params, toy.parties[1].params) >= {
        "cross.body.head.weight",
        "local.body.head.weight",
    }


def test_the_encoders_of_a_party_begin_differently_and_the_cross_one_is_split_s() -> None:
    party, plain = Vertical("fedhssl", **FEW).parties[2], Vertical("split").parties[2]
    for name, w in plain.params.items():
        assert torch.equal(party.params[f"cross.{name}"], w)
        assert not torch.equal(party.params[f"local.{name}"], w)


def test_the_rate_falls_along_a_cosine() -> None:
    cfg = FedHSSLConfig(
        pretrain_rounds=4, batch_size=128, pretrain_lr=0.1, local_ratio=0.5, constraint_ratio=0.5
    )
    assert [cfg.rate(t) for t in range(4)] == pytest.approx(
        [0.025, 0.02133883, 0.0125, 0.00366117], rel=1e-5
    )
    toy = Vertical("fedhssl", pretrain_rounds=2, **FEW).run(2)
    assert all(float(p.opt["rate"]) == toy.cfg.rate(1) for p in toy.parties)
    toy.run(1, first=2)
    assert all(float(p.opt["rate"]) == toy.cfg.lr for p in toy.parties)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for params, text in (
        (
            {"local_ratio": 0, "constraint_ratio": 0},
            "params.local_ratio or params.constraint_ratio",
        ),
        ({"features": "concatenated", "top_model": "sum"}, "params.features"),
    ):
        with pytest.raises(ConfigError, match=text):
            find("fedhssl").configure(params=params)


def test_a_network_without_a_last_layer_is_refused_only_where_it_is_averaged() -> None:
    toy = Vertical("fedhssl", **FEW)
    context = replace(
        toy.parties[0].context, network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 8))
    )
    kind = toy.run_plan.method.client
    with pytest.raises(MethodError, match="layer `head`"):
        kind(toy.cfg, context)
    party: Any = kind(toy.cfg.model_copy(update={"aggregate": False}), context)
    party.improve(t=0)


# -- runs ------------------------------------------------------------------------------------------


def test_principal_components_are_sent_and_not_learned() -> None:
    toy = Vertical("fedhssl", "breast_cancer", pca_dim=3).run(2)
    fixed = [p.contribution(on="test")[:, :3] for p in toy.parties]
    assert (
        toy.active.decide({m: p.contribution(on="test") for m, p in enumerate(toy.parties)})
        .isfinite()
        .all()
    )
    toy.run(1, first=2)
    assert all(
        torch.equal(p.contribution(on="test")[:, :3], x)
        for p, x in zip(toy.parties, fixed, strict=True)
    )


@pytest.mark.slow
def test_it_learns() -> None:
    params: dict[str, Any] = {"pretrain_rounds": 1, "steps": 10, "embedding_dim": 32, "epochs": 10}
    assert Vertical("fedhssl", **params).run(3).accuracy() > 0.6
    assert Vertical("fedhssl", "breast_cancer", **{**params, "epochs": 5}).run(3).accuracy() > 0.85


def test_parties_come_to_agree() -> None:
    toy = Vertical("fedhssl", pretrain_rounds=3, epochs=5, pretrain_lr=0.5, projection_dim=16)
    losses = []
    for t in range(3):
        losses.append([n["cross loss"] for n in toy.run(1, first=t).engine.notes().values()])
    assert (np.array(losses[2]) < np.array(losses[0])).all()


def test_a_missing_reply_breaks_no_round() -> None:
    faults = Faults(dropout=0.1, crash=0.1, nan=0.1, shape=0.1, type=0.05)
    toy = Vertical("fedhssl", faults=faults, pretrain_rounds=3, **FEW).run(4)
    assert {f.kind for f in toy.fed.failures} >= {"project", "agree", "improve", "top", "embed"}
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())
    toy = Vertical("fedhssl", **FEW).run(1, present=[2, 3])
    # without the first nobody has anything to agree with
    assert not toy.bytes("agree") and toy.bytes("share")
    toy.run(1, present=[0, 3])
    assert toy.bytes("agree")


@pytest.mark.each_time("digits-*isolated*", "breast_cancer-*workers*", "digits-*batched*")
@pytest.mark.parametrize(
    "engine", [{"name": "isolated"}, {"workers": 2}, {"name": "batched"}], ids=str
)
@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_engines_agree(data: str, engine: dict[str, Any]) -> None:
    agree("fedhssl", data, engine)
