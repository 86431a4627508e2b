"""Split learning against the joint network; what crosses; the two ends of the scale beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import aligned_plan
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.engines import LocalEngine
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.methods.vertical.steps import (
    aligned_rows,
    batch_indices,
    labels,
    learn,
    steps_per_pass,
)
from tests.methods.columns import CLASSES, WIDTH, Columns, extractor, moved, same

SPLIT, ALONE, POOLED = (methods.find(n) for n in ("split", "active-only", "pooled"))
OPTIMIZERS: dict[str, Any] = {
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    "two rates": {"optimizer": "adamw", "lr": 1e-2, "active_lr": 1e-3},
}
SUM: dict[str, Any] = {
    "top_model": "sum",
    "embedding_dim": CLASSES,
    "make": lambda m: extractor(m, CLASSES),
}


class Joint:
    """The network of all, as one: extractors side by side, and the active party's network on top.

    Args:
        bottoms, top: modules, copied as they are now.
        x, y: the aligned people's inputs for each bottom, and their labels.
        cfg: of the method.
    """

    def __init__(
        self, bottoms: Sequence[nn.Module], top: nn.Module, x: Sequence[Tensor], y: Tensor, cfg: Any
    ) -> None:
        self.bottoms = nn.ModuleList(copy.deepcopy(b) for b in bottoms)
        self.top: Any = copy.deepcopy(top)
        self.x, self.y, self.cfg = x, y, cfg
        every: list[dict[str, Any]] = [
            {"params": [*self.bottoms.parameters()]},
            {"params": [*self.top.parameters()], "lr": cfg.active_lr or cfg.lr},
        ]
        if cfg.optimizer == "adamw":
            self.step: Any = torch.optim.AdamW(every, cfg.lr, weight_decay=cfg.weight_decay)
        else:
            self.step = torch.optim.SGD(every, cfg.lr, cfg.momentum, weight_decay=cfg.weight_decay)

    def train(self, numbers: range, seed: int = 0) -> None:
        self.bottoms.train()
        for number in numbers:
            for rows in aligned_plan(seed, number, len(self.y), self.cfg.batch_size):
                f = torch.stack([b(x[rows]) for b, x in zip(self.bottoms, self.x, strict=True)], 1)
                logits = (
                    f.sum(1) + self.top.bias
                    if self.cfg.top_model == "sum"
                    else self.top(f.flatten(1))
                )
                self.step.zero_grad()
                F.cross_entropy(logits, self.y[rows]).backward()
                self.step.step()

    def far(self, parties: Sequence[Any], active: Any) -> float:
        """The largest difference of a weight or statistic to theirs."""
        pairs = [*zip(self.bottoms, parties, strict=True), (self.top, active)]
        gaps = [
            (
                value
                - {**party.params, **(party.buffers if party.net.state()["buffers"] else {})}[name]
            )
            .abs()
            .max()
            for net, party in pairs
            for name, value in net.state_dict().items()
        ]
        return max(float(gap) for gap in gaps)


def joint_of(parties: Sequence[Any], active: Any, cfg: Any) -> Joint:
    return Joint(
        [p.net.module for p in parties],
        active.net.module,
        [aligned_rows(p) for p in parties],
        labels(active),
        cfg,
    )


def parties_of(toy: Columns) -> list[Any]:
    return [toy.party(m) for m in toy.engine.ids]


# -- a step is the joint network's -----------------------------------------------------------------


@pytest.mark.parametrize("top_model", ["network", "sum"])
@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize("centered", [True, False], ids=["centered", "plain"])
def test_steps_are_those_of_the_joint_network(how: str, top_model: str, centered: bool) -> None:
    toy = Columns(
        SPLIT, centered=centered, epochs=2, **OPTIMIZERS[how], **(SUM if top_model == "sum" else {})
    )
    joint = joint_of(parties_of(toy), toy.active, toy.cfg)
    start = toy.states()
    toy.run(2)
    assert joint.far(parties_of(toy), toy.active) > 1e-2  # much was learned
    joint.train(range(4))
    assert joint.far(parties_of(toy), toy.active) < 1e-6
    assert moved(start, toy.states()) == {"active", "0", "1", "2"}


def test_pooled_is_the_joint_network_on_all_rows_of_all() -> None:
    """In the plan of a run: what is unaligned and unlabeled for others is neither here."""
    values: dict[str, Any] = {
        "data": {"name": "digits", "clients": 4},
        "columns": {"aligned": 30, "unaligned": 25},
        "models": {"pool": ["linear"]},
        "params": {"batch_size": 32, "optimizer": "sgd", "lr": 0.1, "embedding_dim": 4},
    }
    toys = {n: build(check({"run": {**values, "method": n}}).run) for n in ("pooled", "split")}
    toy, others = toys["pooled"], toys["split"]
    assert toy.server is not None and others.server is not None
    assert (toy.server.context.aligned, others.server.context.aligned) == (30 + 4 * 25, 30)
    assert torch.equal(labels(toy.server)[:30], labels(others.server))
    engine = LocalEngine([make() for make in toy.clients])
    # among all rows are each party's own of the other plan, at the same position everywhere
    for m in engine.ids:
        context = engine._parties[m].context
        assert (
            len(context.rows) == context.aligned
            and "own" not in context.tests
            and context.rows.labels is None
        )
        theirs = others.clients[m]().context
        assert torch.equal(raw(context.rows)[:30], raw(theirs.rows)[:30])
        assert torch.equal(raw(context.rows)[30 + 25 * m : 55 + 25 * m], raw(theirs.rows)[30:])
    y = labels(toy.server)
    truths = [v.truth for v in others.data.parties.views]
    assert y[30:].tolist() == np.concatenate(truths).tolist()
    fed = Federation(engine, coordinator="active", colocated=toy.colocated)
    joint = joint_of(list(engine._parties.values()), toy.server, toy.cfg)
    for _ in toy.method.round(fed, toy.server, engine.ids, toy.cfg, 0):
        pass
    joint.train(range(toy.cfg.epochs))
    assert joint.far(list(engine._parties.values()), toy.server) < 1e-6


def raw(rows: Any) -> Tensor:
    """Pixels as they are stored."""
    out: Tensor = rows.pool[rows.index]
    return out


def test_each_step_is_one_forward_pass_at_each_party() -> None:
    toy, count = Columns(SPLIT, epochs=1), [0, 0, 0]
    for m in toy.engine.ids:

        def forward(*_: Any, m: int = m) -> None:
            count[m] += 1

        toy.party(m).net.module.register_forward_hook(forward)
    context = toy.contexts[1]
    assert context.aligned_batch(0, 1, size=8) is context.aligned_batch(0, 1, size=8)
    toy.run(1)
    assert count == [4, 4, 4] and steps_per_pass(toy.active) == 4
    context.aligned_batch(9, 0, size=8)
    assert context.aligned_batch(0, 0, size=8) is not context.aligned_batch(0, 1, size=8)


def test_the_gradient_that_goes_down_is_the_loss_s_by_what_came_up() -> None:
    toy = Columns(SPLIT, epochs=1, batch_size=16, aligned=16)
    top = copy.deepcopy(toy.active.net.module)
    y = labels(toy.active, batch_indices(toy.active, 0, 0))
    toy.run(1)
    f = torch.stack([toy.sent("embed", 0)[m] for m in range(3)], 1).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(top(f), y), f)
    for m, received in toy.received("update", 0).items():
        assert torch.allclose(received["cut"], g[:, m], atol=1e-7)


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_gradients_lie_in_memory_as_they_come_off_a_wire(how: str) -> None:
    """Or matrix products would add up in another order here than there."""
    toys = [Columns(SPLIT, isolated=isolated, **OPTIMIZERS[how]) for isolated in (False, True)]
    assert same(*(toy.run(2).states() for toy in toys))
    active, parts = toys[0].active, {m: torch.randn(8, WIDTH) for m in range(3)}
    assert all(received["cut"].is_contiguous() for received in learn(active, parts, 0, 0).values())


# -- who learns what -------------------------------------------------------------------------------


def test_embeddings_go_up_and_their_gradients_down_and_never_a_label() -> None:
    toy = Columns(SPLIT, isolated=True).run(2)
    b = toy.cfg.batch_size
    assert {(e.sender, e.receiver, e.kind, e.what) for e in toy.fed.ledger} == {
        ("active", "party", "embed", "number int; step int"),
        ("party", "active", "embed", f"float32[{b},{WIDTH}]"),
        ("active", "party", "update", f"number int; step int; cut float32[{b},{WIDTH}]"),
        ("party", "active", "update", "none"),
    }
    for heard in toy.heard:
        for _, leaf in leaves({"put": dict(heard.put), "reply": heard.reply}):
            if isinstance(leaf, Tensor):
                assert (
                    not leaf.requires_grad and leaf.grad_fn is None and leaf.dtype == torch.float32
                )
    assert {name for pair in toy.fed.ledger.pairs for name in pair} == {
        "active",
        "party-1",
        "party-2",
    }


@pytest.mark.parametrize(("aligned", "rows"), [(30, 32), (32, 32), (6, 8)])
def test_bytes_are_two_floats_for_each_number_of_an_embedding(aligned: int, rows: int) -> None:
    """2 · 4 · N d for each passive party and pass, N the rows of its full batches."""
    toy = Columns(SPLIT, 4, aligned=aligned, epochs=2).run(3)
    for t in range(3):
        assert sum(e.bytes for e in toy.fed.ledger if e.round == t) == 3 * 2 * (
            2 * 4 * rows * WIDTH
        )
    assert toy.fed.ledger.sent("active") == toy.fed.ledger.received("active")


def test_a_party_s_gradient_shows_its_rows_labels_where_the_top_is_a_sum() -> None:
    """Why docs/vertical.md warns: the one negative number of a row's gradient stands
    at its label.
    """
    toy = Columns(SPLIT, epochs=1, **SUM).run(1)
    number, step = (toy.received("update", 0)[1][k] for k in ("number", "step"))
    cut = toy.received("update", 0)[1]["cut"]
    y = labels(toy.active, batch_indices(toy.active, number, step))
    assert torch.equal(cut.argmin(1), y) and ((cut < 0).sum(1) == 1).all()


# -- the active party alone ------------------------------------------------------------------------


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_alone_the_active_party_trains_its_own_network_and_sends_nothing(how: str) -> None:
    toy = Columns(ALONE, epochs=2, **OPTIMIZERS[how])
    joint = joint_of([toy.party(0)], toy.active, toy.cfg)
    start = toy.states()
    toy.run(2)
    joint.train(range(4))
    assert joint.far([toy.party(0)], toy.active) < 1e-6
    assert moved(start, toy.states()) == {"active", "0"}
    assert not list(toy.fed.ledger) and not toy.fed.ledger.pairs and not toy.fed.failures


def test_alone_it_decides_from_its_own_embeddings() -> None:
    toy = Columns(ALONE).run(1)
    parts = {m: toy.party(m).contribution(on="test") for m in toy.engine.ids}
    logits = toy.active.decide(parts)
    assert torch.equal(logits, toy.active.decide({**parts, 1: parts[1] + 1}))
    assert torch.equal(logits, toy.active.net.module(parts[0][:, None]).detach())


def test_alone_it_does_not_take_another_s_columns_while_its_own_are_away() -> None:
    toy = Columns(ALONE)
    start = toy.states()
    toy.run(1, present=(1, 2))
    assert not moved(start, toy.states()) and not toy.heard


# -- settings --------------------------------------------------------------------------------------


def test_a_sum_needs_a_number_for_each_class() -> None:
    with pytest.raises(MethodError, match=r"needs params\.embedding_dim=3"):
        Columns(SPLIT, top_model="sum", embedding_dim=4)


def test_what_a_method_fixes_and_presets() -> None:
    assert ALONE.server is not SPLIT.server and POOLED.needs == ("pooled rows",) and not SPLIT.needs
    paper = SPLIT.configure("paper")
    assert (paper.optimizer, paper.lr, paper.active_lr, paper.centered, paper.epochs) == (
        "sgd",
        1e-5,
        5e-4,
        False,
        8,
    )
    assert SPLIT.configure(params={"epochs": 4}).iterations_per_round == 4
    with pytest.raises(ConfigError, match=r"params\.epochs"):
        SPLIT.configure(params={"epochs": 0})


# -- odd numbers, missing parties, resuming --------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [{"batch_size": 2, "centered": False}, {"batch_size": 7}, {"aligned": 6, "batch_size": 16}],
)
def test_odd_numbers_of_rows(odd: dict[str, Any]) -> None:
    toy = Columns(SPLIT, **odd)
    joint = joint_of(parties_of(toy), toy.active, toy.cfg)
    toy.run(1)
    joint.train(range(toy.cfg.epochs))
    assert not toy.fed.failures and joint.far(parties_of(toy), toy.active) < 1e-5


def test_without_one_party_nobody_makes_a_step() -> None:
    toy = Columns(SPLIT)
    start = toy.states()
    toy.run(1, present=(0, 2))
    assert same(start, toy.states())
    assert {f.reason for f in toy.fed.failures} == {"fewer than 3 replies"}
    assert moved(start, toy.run(1, start=1).states()) == {"active", "0", "1", "2"}


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    toy = Columns(SPLIT, faults=Faults(**{fault: 0.1}))
    start = toy.states()
    toy.run(3)
    empty = fault in ("nan", "inf", "shape")  # the reply to an update has nothing to spoil
    assert {f.kind for f in toy.fed.failures} == {"embed", *([] if empty else ["update"])}
    assert moved(start, toy.states()) == {"active", "0", "1", "2"}
    assert all(torch.isfinite(v).all() for v in toy.states().values() if isinstance(v, Tensor))


@pytest.mark.parametrize("method", ["split", "active-only"])
def test_a_run_that_was_stopped_continues_to_the_same_bits(method: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "method": method,
        "rounds": 3,
        "data": {"name": "wine", "clients": 4},
        "columns": {"aligned": 24},
        "params": {"epochs": 1, "batch_size": 16},
        "faults": {"dropout": 0.05, "crash": 0.05},
    }
    run = check({"run": values}).run
    whole = execute(run)
    with pytest.raises(Stopped):
        execute(run, tmp_path, stop=lambda: True)
    resumed = execute(run, tmp_path, resume=True)
    assert resumed.summary["state_sha256"] == whole.summary["state_sha256"]
    assert resumed.metrics == whole.metrics


# -- learning --------------------------------------------------------------------------------------


def test_what_other_parties_hold_is_worth_something() -> None:
    """Digits, of which each party sees half: split learning above the active party alone, and that
    above chance.
    """

    def accuracy(method: str) -> float:
        found = []
        for seed in (0, 1):
            values = {
                "method": method,
                "seed": seed,
                "rounds": 5,
                "data": {"name": "digits", "clients": 4},
                "models": {"pool": ["mlp"]},
                "evaluate": {"points": 1},
            }
            rows = execute(check({"run": values}).run).metrics
            found.append(next(r[-1] for r in reversed(rows) if r[4] == "accuracy mean"))
        return float(np.mean(found))

    split, alone = accuracy("split"), accuracy("active-only")
    assert split > alone + 0.05 and alone > 0.3
