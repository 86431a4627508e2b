"""LASER-VFL: the sum over sets and its sample; rows that parties lack; parties that are away in
training and in use.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.engine import UNREACHABLE, Failure
from fedloom.core.errors import ConfigError
from fedloom.core.evaluation import contribution
from fedloom.core.faults import Faults
from fedloom.deploy import export, load_active, load_party
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import PartiesMissing
from fedloom.experiment.run.evaluation import evaluation_of
from fedloom.experiment.run.execute import execute
from fedloom.methods.vertical import laser, steps
from fedloom.methods.vertical.laser import draw_sets, present, subset_weights
from tests.methods.columns import CLASSES, WIDTH, Columns, moved, same
from tests.methods.test_split import joint_of, parties_of

LASER = methods.find("laser-vfl")


def lacking(toy: Columns, had: Tensor, tested: Tensor | None = None) -> Columns:
    """The federation where party m has the aligned row i if `had[i, m]`, and test rows by `tested`
    likewise.
    """
    for m in toy.engine.ids:
        context = toy.contexts[m]
        rest = torch.ones(len(context.rows) - len(had), dtype=torch.bool)
        data = replace(context.rows, present=torch.cat([had[:, m], rest]))
        tests = dict(context.tests)
        if tested is not None:
            tests["test"] = replace(tests["test"], present=tested[:, m])
        object.__setattr__(context, "data", data)
        object.__setattr__(context, "tests", tests)
    return toy


def some(rows: int, parties: int, share: float = 0.6, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((rows, parties)) < share)


def subsets(of: list[int]) -> list[tuple[int, ...]]:
    return [s for size in range(1, len(of) + 1) for s in combinations(of, size)]


# -- the sum over sets -----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "total"), [(1, 1), (2, 3), (3, 7), (4, 15), (5, 31)])
def test_the_weights_of_a_row_sum_to_the_number_of_sets(m: int, total: int) -> None:
    by_hand = sum(1 / len(s) for k in range(m) for s in subsets([*range(m)]) if k in s)
    sampled = sum(m * comb(m - 1, j - 1) / j for j in range(1, m + 1))
    assert by_hand == pytest.approx(total) and sampled == pytest.approx(total)
    here = torch.tensor([[False] + [True] * m + [False]])  # who lacks the row has no set
    _, weights = draw_sets(here, np.random.default_rng(0))
    assert float(weights.sum()) == pytest.approx(total)
    assert not weights[:, ~here[0]].any()


def test_weights_are_binomials_over_the_size() -> None:
    found = subset_weights(torch.tensor([0, 1, 3, 6]), 6)
    for row, m in zip(found, (0, 1, 3, 6), strict=True):
        assert row.tolist() == pytest.approx(
            [comb(m - 1, j) / (j + 1) if j < m else 0 for j in range(6)]
        )


def test_each_set_has_its_size_contains_its_party_and_nobody_who_lacks_the_row() -> None:
    here = some(200, 5)
    sets, weights = draw_sets(here, np.random.default_rng(1))
    for b, k, j in product(range(len(here)), range(5), range(5)):
        if weights[b, k, j] > 0:
            assert (
                sets[b, k, j].sum() == j + 1
                and sets[b, k, j, k]
                and not (sets[b, k, j] & ~here[b]).any()
            )
        else:
            assert not here[b, k] or j + 1 > here[b].sum()


def test_sets_of_one_size_are_drawn_equally_often() -> None:
    sets, _ = draw_sets(torch.ones(6000, 4, dtype=torch.bool), np.random.default_rng(2))
    codes = (sets[:, 0, 1].long() * torch.tensor([1, 2, 4, 8])).sum(-1)
    counts = codes.bincount(minlength=16)[[3, 5, 9]]
    assert int(counts.sum()) == 6000 and ((counts - 2000).abs() < 150).all()


def test_the_mean_over_all_draws_is_the_full_sum() -> None:
    """Three parties: two draws for each head, eight in all; in float64."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES).double()
    h = torch.randn(3, WIDTH, dtype=torch.float64)
    y = torch.tensor([1])

    def cost(members: tuple[int, ...]) -> Tensor:
        return F.cross_entropy(head(h[list(members)].mean(0, keepdim=True)), y)

    full = sum(cost(s) / len(s) for k in range(3) for s in subsets([0, 1, 2]) if k in s)
    pairs = [[s for s in combinations(range(3), 2) if k in s] for k in range(3)]
    draws: list[Any] = [
        sum(
            cost((k,)) + comb(2, 1) / 2 * cost(pair) + comb(2, 2) / 3 * cost((0, 1, 2))
            for k, pair in enumerate(chosen)
        )
        for chosen in product(*pairs)
    ]
    assert len(draws) == 8 and torch.allclose(
        torch.stack(draws).mean(), torch.as_tensor(full), atol=1e-14
    )
    toy = Columns(LASER, weighing="paper")  # and the page's cost is such a draw
    active, parts = toy.active, h[None].float()
    found = float(active.cost(parts, y, np.random.default_rng(3)).detach())
    head, h = active.net.module, h.float()
    totals = []
    for chosen in product(*pairs):
        with torch.no_grad():
            totals.append(
                sum(float(cost((k,)) + cost(s) + cost((0, 1, 2)) / 3) for k, s in enumerate(chosen))
            )
    assert min(abs(found - total) for total in totals) < 1e-5


def test_a_mask_for_each_row_is_a_loop_over_rows() -> None:
    toy = Columns(LASER)
    parts, y = torch.randn(6, 3, WIDTH) * some(6, 3)[:, :, None], torch.arange(6) % CLASSES
    here = present(parts)
    sets, weights = draw_sets(here, np.random.default_rng(4))
    total, rows = 0.0, 0
    for b in range(6):
        m = int(here[b].sum())
        rows += m > 0
        for k, j in product(range(3), range(3)):
            if weights[b, k, j] > 0:
                mean = parts[b, sets[b, k, j]].mean(0, keepdim=True)
                loss = F.cross_entropy(toy.active.net.module(mean).detach(), y[b : b + 1])
                total += float(weights[b, k, j] * loss) / (2**m - 1)
    assert float(toy.active.cost(parts, y, np.random.default_rng(4)).detach()) == pytest.approx(
        total / rows, abs=1e-5
    )
    logits = toy.active.decide(dict(enumerate(parts.unbind(1))))
    for b in range(6):
        mean = parts[b, here[b]].mean(0, keepdim=True) if here[b].any() else torch.zeros(1, WIDTH)
        assert torch.allclose(logits[b : b + 1], toy.active.net.module(mean), atol=1e-6)


def test_the_first_parties_draws_do_not_depend_on_further_ones() -> None:
    here = torch.cat([some(20, 3), torch.zeros(20, 1, dtype=torch.bool)], 1)
    wide, more = draw_sets(here, np.random.default_rng(5))
    narrow, less = draw_sets(here[:, :3], np.random.default_rng(5))
    kept = less > 0
    assert torch.equal(wide[:, :3, :3, :3][kept], narrow[kept]) and torch.equal(
        more[:, :3, :3], less
    )
    assert not wide[..., 3][more > 0].any() and not more[:, 3].any()


# -- a step ----------------------------------------------------------------------------------------


class Mean(nn.Module):
    """A head on the mean of all embeddings (B, d) put side by side (B, M d)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, f: Tensor) -> Tensor:
        out: Tensor = self.head(f.unflatten(1, (-1, WIDTH)).mean(1))
        return out


@pytest.mark.parametrize("centered", [True, False])
def test_with_every_row_and_the_largest_set_alone_it_is_split_learning_with_a_mean(
    centered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest(here: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        sets = here[:, None, None, :].expand(-1, here.shape[1], here.shape[1], -1)
        weights = torch.zeros(sets.shape[:3], dtype=torch.float64)
        weights[:, 0, 0] = 7.0  # that of all the row's sets
        return sets, weights

    toy = Columns(LASER, centered=centered, epochs=2)
    monkeypatch.setattr(laser, "draw_sets", largest)
    joint = joint_of(parties_of(toy), toy.active, toy.cfg)
    joint.top = Mean(joint.top)
    every = [*joint.bottoms.parameters(), *joint.top.parameters()]
    joint.step = torch.optim.AdamW(every, toy.cfg.lr, weight_decay=toy.cfg.weight_decay)
    start = toy.states()
    toy.run(2)
    joint.train(range(4))
    joint.top = joint.top.head
    assert joint.far(parties_of(toy), toy.active) < 1e-5
    assert moved(start, toy.states()) == {"active", "0", "1", "2"}


def test_a_party_that_is_never_present_does_not_move_and_the_others_are_as_without_it() -> None:
    had = torch.cat([some(30, 3), torch.zeros(30, 1, dtype=torch.bool)], 1)
    wide, narrow = (lacking(Columns(LASER, n), had[:, :n]) for n in (4, 3))
    start = wide.states()
    wide.run(2)
    narrow.run(2)
    a, b = wide.states(), narrow.states()
    assert moved(start, a) == {"active", "0", "1", "2"}
    assert all(torch.allclose(x, a[k], atol=1e-5) for k, x in b.items() if x.is_floating_point())
    assert not any(h.party == 3 and h.method == "update" for h in wide.heard)


def test_a_party_that_does_not_answer_is_absent_for_the_batch() -> None:
    toy = Columns(LASER)
    start = toy.states()
    toy.run(1, present=(0, 2))
    assert moved(start, toy.states()) == {"active", "0", "2"} and not toy.fed.failures
    toy.run(1, start=1, present=(1,))
    assert moved(start, toy.states()) == {"active", "0", "1", "2"}


def test_a_party_sends_zeros_for_what_it_lacks_and_its_blank_inputs_count_nothing() -> None:
    had = some(30, 3)
    toy, other = lacking(Columns(LASER), had), lacking(Columns(LASER), had)
    pool = other.contexts[1].rows
    pool.pool[pool.index[:30][~had[:, 1]]] = 99.0
    assert same(toy.run(2).states(), other.run(2).states())
    for received in toy.heard:
        if received.method == "embed":
            number, step = received.put["number"], received.put["step"]
            here = steps.held(toy.party(received.party), number, step)
            assert torch.equal((received.reply != 0).any(1), here)


def test_bytes_are_an_embedding_up_and_its_gradient_down() -> None:
    toy = Columns(LASER, epochs=1).run(1)
    assert sum(e.bytes for e in toy.fed.ledger) == 2 * 2 * (4 * 32 * WIDTH)
    assert {e.what for e in toy.fed.ledger} == {
        "number int; step int",
        f"float32[8,{WIDTH}]",
        f"number int; step int; cut float32[8,{WIDTH}]",
        "none",
    }


@pytest.mark.parametrize("fault", ["dropout", "nan", "shape"])
def test_a_fault_is_an_absence(fault: str) -> None:
    toy = lacking(Columns(LASER, faults=Faults(**{fault: 0.2})), some(30, 3)).run(3)
    assert {f.kind for f in toy.fed.failures} >= {"embed"}
    assert all(torch.isfinite(v).all() for v in toy.states().values() if isinstance(v, Tensor))


def test_the_isolated_engine_gives_the_same_bits() -> None:
    a, b = (
        lacking(Columns(LASER, isolated=isolated), some(30, 3)).run(2).states()
        for isolated in (False, True)
    )
    assert same(a, b)


# -- use -------------------------------------------------------------------------------------------


def test_the_order_of_parties_changes_no_prediction() -> None:
    toy = lacking(Columns(LASER), some(30, 3), some(25, 3)).run(1)
    parts: dict[int, Any] = {m: contribution(toy.party(m), on="test") for m in toy.engine.ids}
    assert torch.allclose(
        toy.active.decide(parts), toy.active.decide(dict(reversed(parts.items()))), atol=1e-6
    )
    assert torch.equal(parts[1][~some(25, 3)[:, 1]].abs().sum(), torch.tensor(0.0))


def test_settings() -> None:
    with pytest.raises(ConfigError, match=r"params\.top_model"):
        LASER.configure(params={"top_model": "sum"})
    with pytest.raises(ConfigError, match=r"params\.incomplete"):
        LASER.configure(params={"incomplete": "drop"})
    assert LASER.configure("paper").weighing == "paper" and LASER.any_contributor


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A short real run on half of the blocks, exported."""
    out = tmp_path_factory.mktemp("laser")
    values: dict[str, Any] = {
        "method": "laser-vfl",
        "rounds": 8,
        "data": {"name": "breast_cancer", "clients": 3},
        "columns": {"aligned": 200, "unaligned": 10, "blocks_per_party": 1, "missing": 0.3},
        "params": {"embedding_dim": 16, "lr": 3e-3},
    }
    result = execute(check({"run": values}).run, out / "run")
    export(out / "run", out / "parties")
    return out / "parties", result


def test_it_learns_from_incomplete_rows(folders: tuple[Path, Any]) -> None:
    metrics = {row[4]: row[-1] for row in folders[1].metrics}
    assert metrics["accuracy mean"] > 0.8


def test_any_of_the_folders_predict(folders: tuple[Path, Any]) -> None:
    from fedloom.data.sources import load_raw
    from fedloom.data.tables import RawTable

    table = load_raw("breast_cancer")
    assert isinstance(table, RawTable)
    columns, y = dict(table.columns), table.y
    parties = [load_party(folders[0] / f"party-{m}") for m in range(3)]
    active = load_active(folders[0] / "active")
    sent = [party.embed(columns) for party in parties]
    accuracy = {
        who: float((active.predict([sent[m] for m in who]).argmax(1) == y).mean())
        for who in subsets([0, 1, 2])
    }
    assert min(accuracy.values()) > 0.75 and accuracy[0, 1, 2] > 0.85
    assert accuracy[0, 1, 2] >= accuracy[0,] - 0.01


def test_a_party_that_has_gone_is_left_out_of_the_evaluation() -> None:
    """All rows are predicted by those that remain, better than by the active party alone."""
    toy = Columns(LASER, aligned=120, epochs=5, lr=1e-2, seed=3).run(6)
    parts = {m: contribution(toy.party(m), on="test") for m in toy.engine.ids}
    classes = people_tested(toy)

    def accuracy(*who: int) -> float:
        found = toy.active.decide({m: parts[m] for m in who})
        assert found.shape == (25, CLASSES)
        return float((found.argmax(1) == classes).float().mean())

    assert accuracy(0, 1) > accuracy(0) - 0.05 and accuracy(0, 1, 2) > 0.6


def people_tested(toy: Columns) -> Tensor:
    """The classes (25,) of the tested people: drawn last by `tests.methods.columns.people`."""
    rng = np.random.default_rng(3)
    rng.integers(CLASSES, size=120)
    return torch.from_numpy(rng.integers(CLASSES, size=25))


@pytest.mark.parametrize("method", ["laser-vfl", "split"])
def test_an_evaluation_continues_without_a_node_where_any_party_suffices(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"method": method, "data": {"name": "wine", "clients": 3}, "columns": {"aligned": 60}}
    plan = build(check({"run": values}).run)
    with start(plan) as engine:
        call = engine.call

        def without(ids: Any, name: str, *rest: Any) -> list[Any]:
            return [
                Failure(UNREACHABLE) if i == 1 else r
                for i, r in zip(ids, call(ids, name, *rest), strict=True)
            ]

        monkeypatch.setattr(engine, "call", without)
        if method == "laser-vfl":
            assert (
                dict(m[:2] for m in evaluation_of(plan).evaluate(plan, engine))["accuracy mean"] > 0
            )
            assert plan.planner.min_nodes(plan, 2) == 1
        else:
            assert plan.planner.min_nodes(plan, 2) == 2
            with pytest.raises(PartiesMissing, match="party-1"):
                [*evaluation_of(plan).evaluate(plan, engine)]
