"""SS-VFL's page: its losses on hand numbers, its views, what crosses, and split learning as its
second phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.engines import LocalEngine
from fedloom.experiment.config.run import EngineConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.methods import find
from fedloom.methods.vertical.self_supervision import (
    ScheduledOptimizer,
    at_rate,
    corrupted,
    disagreement,
    erased,
    predictor,
    projector,
    reset,
    shifted,
    siamese,
    views,
)
from fedloom.methods.vertical.ss_vfl import SSVFLConfig, info_nce

SMALL: dict[str, Any] = {
    "pretrain_rounds": 1,
    "steps": 2,
    "epochs": 1,
    "embedding_dim": 8,
    "batch_size": 16,
}


class Vertical:
    """A small vertical federation in this process.

    Args:
        method: its name.
        data: "digits" for four parties, anything else for two.
        faults: ordered ones.
        relabel: whether the active party's labels are permuted before round 0.
        params: of the method, over small ones.
    """

    def __init__(
        self,
        method: str,
        data: str = "digits",
        *,
        faults: Faults | None = None,
        relabel: bool = False,
        **params: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.run_plan = run_plan(method, data, **params)
        self.cfg, active = self.run_plan.cfg, self.run_plan.server
        assert (
            active is not None
            and active.context.data is not None
            and active.context.data.labels is not None
        )
        if relabel:
            labels = (active.context.data.labels + 1) % active.context.classes
            context = replace(active.context, data=replace(active.context.data, labels=labels))
            active = self.run_plan.method.server(self.cfg, context)
        self.active: Any = active
        self.parties: list[Any] = [make() for make in self.run_plan.clients]
        self.engine = LocalEngine(self.parties, faults=faults)
        self.fed = Federation(self.engine, coordinator="active", colocated=self.run_plan.colocated)

    def run(self, rounds: int, first: int = 0, present: Sequence[int] | None = None) -> Vertical:
        for t in range(first, first + rounds):
            self.fed.round = t
            for _ in self.run_plan.method.round(
                self.fed, self.active, present or self.engine.ids, self.cfg, t
            ):
                pass
        return self

    def tensors(self, *parts: str) -> dict[str, Tensor]:
        """Copies of all tensors of the parties' states, or of these parts of them."""
        states = {
            str(i): {k: v for k, v in s.items() if not parts or k in parts}
            for i, s in self.states().items()
        }
        return {k: v.clone() for k, v in leaves(states) if isinstance(v, Tensor)}

    def states(self) -> dict[int, Any]:
        return self.engine.states()

    def bytes(self, *kinds: str) -> int:
        """What the messages of these kinds, or of all, come to."""
        return sum(e.bytes for e in self.fed.ledger if not kinds or e.kind in kinds)

    def accuracy(self) -> float:
        found = self.active.decide(
            {m: p.contribution(on="test") for m, p in enumerate(self.parties)}
        )
        return float((found.argmax(-1).numpy() == self.run_plan.data.labels["test"][0]).mean())


def run_plan(
    method: str, data: str = "digits", engine: dict[str, Any] | None = None, **params: Any
) -> RunPlan:
    """A plan with 64 aligned people and small settings under `params`."""
    known = find(method).config.model_fields
    small = {k: v for k, v in SMALL.items() if k in known}
    values = {
        "method": method,
        "rounds": 9,
        "data": {"name": data, "clients": 4 if data == "digits" else 2, "test_rows": 100},
        "columns": {"aligned": 64},
        "params": {**small, **params},
    }
    run = check({"run": values}).run
    return build(run.model_copy(update={"engine": EngineConfig(**(engine or {}))}))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- losses ----------------------------------------------------------------------------------------


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)


def test_losses_are_the_formulas_on_hand_numbers() -> None:
    p, z = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[4.0, 3.0], [0.0, 2.0]])
    assert disagreement(p, z).item() == pytest.approx(-(24 / 25 + 0) / 2)
    assert siamese((p, z), (p, z)).item() == pytest.approx(-(24 / 25 + 0) / 2)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 3))
    s = cosines(a, b) / 0.5
    by_hand = -np.mean([s[i, i] - np.log(np.exp(s[i]).sum()) for i in range(5)])
    assert info_nce(torch.tensor(a), torch.tensor(b), 0.5).item() == pytest.approx(by_hand)


def test_gradients_are_right_and_stop_where_they_should() -> None:
    torch.manual_seed(0)
    f, g, z = (torch.randn(6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    head = nn.Sequential(projector(8, 8), predictor(8)).double()
    assert torch.autograd.gradcheck(lambda x: disagreement(head(x), z.detach()), f)
    assert torch.autograd.gradcheck(lambda x, y: info_nce(x, y, 0.7), (f, g))
    siamese((f, g), (z, 2 * z)).backward()
    assert z.grad is None  # held constant
    cos = (
        (g * z).sum(-1, keepdim=True) / g.norm(dim=-1, keepdim=True) / z.norm(dim=-1, keepdim=True)
    )
    unit = z / z.norm(dim=-1, keepdim=True), g / g.norm(dim=-1, keepdim=True)
    assert g.grad is not None
    assert torch.allclose(g.grad, -(unit[0] - cos * unit[1]) / g.norm(dim=-1, keepdim=True) / 6 / 2)


# -- views -----------------------------------------------------------------------------------------


def test_corruption_takes_values_of_the_same_column_and_leaves_the_rest() -> None:
    x = torch.arange(600.0).view(60, 10)
    torch.manual_seed(1)
    y = corrupted(x, 0.3)
    changed = x != y
    assert changed.sum(1).max() == 3 and changed.any(0).all()
    assert all(set(y[:, j].tolist()) <= set(x[:, j].tolist()) for j in range(10))
    assert ((corrupted(x, 1e-9) != x).sum(1) <= 1).all() and (corrupted(x, 1e-9) != x).any()


def test_a_shift_moves_all_channels_alike_and_repeats_the_edge() -> None:
    x = torch.arange(2 * 2 * 8 * 8.0).view(2, 2, 8, 8).expand(40, 2, 2, 8, 8).reshape(80, 2, 8, 8)
    torch.manual_seed(2)
    y = shifted(x, 1 / 8)
    wide = nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    seen = set()
    for n in range(80):
        found = [
            (i, j)
            for i in range(3)
            for j in range(3)
            if torch.equal(y[n], wide[n, :, i : i + 8, j : j + 8])
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 9
    assert torch.equal(shifted(x, 0.0), x)


def test_an_erased_rectangle_has_its_channel_s_mean() -> None:
    torch.manual_seed(3)
    x = torch.randn(60, 2, 6, 6)
    y = erased(x, 0.5)
    hole = (x != y).all(1)
    assert torch.equal((x != y).any(1), hole)
    assert hole.any(1).sum(-1).max() == 3 and hole.any(2).sum(-1).max() == 3
    assert torch.equal(hole, hole.any(1)[:, None, :] & hole.any(2)[:, :, None])  # a rectangle
    assert torch.equal(y, torch.where(hole[:, None], x.mean((2, 3), keepdim=True), x))
    assert torch.equal(erased(x, 0.0), x)


@pytest.mark.parametrize("shape", [(9, 2, 5, 4), (9, 7)], ids=["pictures", "table"])
def test_views_depend_on_nothing_but_the_generator(shape: tuple[int, ...]) -> None:
    x, found = torch.randn(shape), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(views(x, SSVFLConfig()))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][1], found[2][1]) and found[0][0].shape == x.shape


# -- a rate that changes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "sgd", "momentum": 0.9}], ids=["adamw", "sgd"]
)
def test_a_rated_optimizer_is_the_optimizer_of_that_rate(settings: dict[str, Any]) -> None:
    torch.manual_seed(4)
    start, gradients = torch.randn(50), torch.randn(6, 50)
    rated, w = ScheduledOptimizer(SSVFLConfig(**settings).optimize()), start.clone()
    slots = at_rate(rated.slots(w), 0.01)
    for g in gradients[:3]:
        rated.move(w, g, slots, *rated.tick(slots))
    slots = reset(slots, 1e-3)
    for g in gradients[3:]:
        rated.move(w, g, slots, *rated.tick(slots))
    v = start.clone()
    for lr, some in ((0.01, gradients[:3]), (1e-3, gradients[3:])):
        plain = SSVFLConfig(**settings, lr=lr).optimize()
        own = plain.slots(v)
        for g in some:
            plain.move(v, g, own, *plain.tick(own))
    assert torch.equal(w, v)


# -- the phases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_without_a_first_phase_it_is_split_learning_bit_for_bit(data: str) -> None:
    ours, plain = Vertical("ss-vfl", data, pretrain_rounds=0).run(2), Vertical("split", data).run(2)
    expected, found = plain.tensors("params", "buffers"), ours.tensors("params", "buffers")
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert {k.split(".")[2] for k in found.keys() - expected.keys()} <= {"projector", "predictor"}
    assert same(ours.active.params, plain.active.params)
    assert list(ours.fed.ledger) == list(plain.fed.ledger)


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_the_second_phase_is_split_learning_from_its_first_batch_with_a_fresh_optimizer(
    data: str,
) -> None:
    ours, plain = Vertical("ss-vfl", data), Vertical("split", data).run(2)
    begun = [
        {
            part: {k: v.clone() for k, v in getattr(p, part).items()}
            for part in ("params", "buffers")
        }
        for p in ours.parties
    ]
    ours.run(1)
    assert float(ours.parties[0].opt["step"]) == 2
    for party, state in zip(ours.parties, begun, strict=True):
        party.params, party.buffers = state["params"], state["buffers"]
    ours.run(2, first=1)
    expected, found = plain.tensors("params", "buffers"), ours.tensors("params", "buffers")
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert same(ours.active.params, plain.active.params)


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_the_first_phase_teaches_parties_without_the_active_party_and_sends_the_clock_alone(
    data: str,
) -> None:
    toy = Vertical("ss-vfl", data)
    top, before = {k: v.clone() for k, v in toy.active.params.items()}, toy.tensors("params")
    toy.run(1)
    assert same(toy.active.params, top)
    assert not any(
        torch.equal(v, before[k]) for k, v in toy.tensors("params").items() if k.endswith("weight")
    )
    assert {(e.sender, e.receiver, e.kind, e.what) for e in toy.fed.ledger} == {
        ("active", "party", "teach", "t int"),
        ("party", "active", "teach", "none"),
    }
    assert toy.bytes() == 0


def test_labels_reach_no_party_before_the_second_phase() -> None:
    toys = [
        Vertical("ss-vfl", pretrain_rounds=2, relabel=relabel).run(2) for relabel in (False, True)
    ]
    assert same(toys[0].tensors(), toys[1].tensors())
    a, b = (toy.run(1, first=2).tensors("params") for toy in toys)
    assert not same(a, b)


def test_bytes_are_those_of_the_second_phase() -> None:
    toy = Vertical("ss-vfl").run(3)
    rounds, others, batches, batch, width = 2, 3, 4, 16, 8
    assert (
        toy.bytes("embed") == toy.bytes("update") == rounds * others * batches * batch * width * 4
    )
    assert toy.bytes() == 2 * toy.bytes("embed")


def test_self_supervision_makes_its_loss_smaller() -> None:
    for data in ("digits", "breast_cancer"):
        toy, losses = Vertical("ss-vfl", data, pretrain_rounds=3, steps=15), []
        for t in range(3):
            losses.append(
                [n["pretraining loss"] for n in toy.run(1, first=t).engine.notes().values()]
            )
        assert (np.array(losses[2]) < np.array(losses[0])).all()


def test_principal_components_are_sent_and_not_learned() -> None:
    toy = Vertical("ss-vfl", "breast_cancer", pca_dim=3).run(2)
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


def test_it_learns() -> None:
    assert Vertical("ss-vfl", steps=15, embedding_dim=32, epochs=10).run(3).accuracy() > 0.6
    assert (
        Vertical("ss-vfl", "breast_cancer", steps=15, embedding_dim=32, epochs=5).run(3).accuracy()
        > 0.85
    )


def test_a_missing_reply_breaks_no_round() -> None:
    toy = Vertical(
        "ss-vfl", faults=Faults(dropout=0.1, crash=0.1, nan=0.1, shape=0.1), pretrain_rounds=2
    ).run(4)
    assert {f.kind for f in toy.fed.failures} >= {"teach", "embed"}
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())
    toy.run(1, first=0, present=[2, 3])
    toy.run(1, first=2, present=[2, 3])


@pytest.mark.each_time("digits-*isolated*", "breast_cancer-*workers*", "digits-*batched*")
@pytest.mark.parametrize(
    "engine", [{"name": "isolated"}, {"workers": 2}, {"name": "batched"}], ids=str
)
@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_engines_agree(data: str, engine: dict[str, Any]) -> None:
    agree("ss-vfl", data, engine)


def agree(method: str, data: str, engine: dict[str, Any]) -> None:
    """What all parties come to on this engine is what they come to in the loop: exactly, or to
    rounding if batched.
    """
    toy = Vertical(method, data).run(3)
    there_world = run_plan(method, data, engine=engine)
    with start(there_world) as there:
        fed = Federation(there, coordinator="active", colocated=there_world.colocated)
        for t in range(3):
            fed.round = t
            for _ in there_world.method.round(
                fed, there_world.server, there.ids, there_world.cfg, t
            ):
                pass
        if engine.get("name") != "batched":
            assert state_sha256((str(i), s) for i, s in there.digests().items()) == state_sha256(
                (str(i), s) for i, s in toy.engine.digests().items()
            )
        found = {
            k: v
            for k, v in leaves({str(i): s for i, s in there.states().items()})
            if isinstance(v, Tensor)
        }
        assert all(
            torch.allclose(v.double(), found[k].double(), atol=1e-4)
            for k, v in toy.tensors("params").items()
        )
    assert fed.ledger.state() == toy.fed.ledger.state()
    assert not fed.failures and not toy.fed.failures
