"""FedExtra: equal trees for every split of rows, sums of leaves, and with `dp` a bound, noise and
charges that hold.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom import methods
from fedloom.core.errors import ConfigError, FedloomError, MessageError, MethodError
from fedloom.core.fixed_point import threshold
from fedloom.core.message import Shape
from fedloom.core.scores import auc
from fedloom.methods.tables import steps
from fedloom.methods.tables.fedextra import NOISE, sensitivity
from fedloom.protect.accountant import Releases, epsilon
from fedloom.protect.aggregators import Secure
from fedloom.trees import random as random_trees
from fedloom.trees.bins import Bins
from fedloom.trees.exact import MOST_BITS, STEP, gradients
from tests.methods.tables import federation, model, models_of_splits, of_numbers, owners, table

FEDEXTRA = methods.find("fedextra")
SMALL: dict[str, Any] = {"bins": 16, "depth": 3}
GRID = {"x0": (-3.0, 3.0), "x1": (-3.0, 3.0), "x2": (-2.0, 2.0)}
DP: dict[str, Any] = {"sigma": 4.0, "grid": GRID}


def trees_of(toy: Any, seed: int = 0, depth: int = 3) -> Any:
    """New trees as a message."""
    layout, T = steps.layout_of(toy.server.layout), toy.party(0).scores.shape[0]
    return steps.trees_tree(random_trees.drawn(layout, T, depth, np.random.default_rng(seed)))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_model_is_the_same_however_rows_are_split(classes: int) -> None:
    assert len(models_of_splits(FEDEXTRA, classes, 3, **SMALL)) == 1


def numbers(x: np.ndarray, cuts: list[int], seed: int = 0) -> tuple[Any, np.ndarray]:
    """The owners of standardized numbers, in float32, of which some are far away."""
    rng = np.random.default_rng(seed)
    signal = np.nan_to_num(2 * x[:, 0] + x[:, 2]) + 0.2 * rng.standard_normal(len(x))
    y = (signal / signal.std()).astype(np.float32)
    y[::40] *= 5
    return of_numbers(owners(x, np.zeros(len(x), int), cuts), y), y


def test_the_model_of_a_number_is_the_same_however_rows_are_split_and_learns() -> None:
    x, _ = table(400, seed=2)
    toys = [
        federation(FEDEXTRA, numbers(x, cuts)[0], depth=4).run(25)
        for cuts in ([], [100, 200, 205], [1, 2, 5])
    ]
    assert len({model(toy) for toy in toys}) == 1
    y = numbers(x, [])[1]
    found = toys[0].party(0).infer(torch.from_numpy(x))
    assert found.shape == (400, 1)
    near = np.abs(y) < 2
    assert np.sqrt(((found[:, 0].numpy() - y)[near] ** 2).mean()) < 0.6 * y[near].std()


def test_leaves_of_a_number_are_means_of_residuals() -> None:
    x, _ = table(60, seed=3)
    contexts, y = numbers(x, [20])
    toy = federation(FEDEXTRA, contexts, rate=0.5, l2=2.0, **SMALL).run(1)
    trees = steps.trees_of(toy.server.trees)
    leaf = trees.leaves(steps.layout_of(toy.server.layout).of(x))[0]
    for node in set(leaf.tolist()):
        g = np.rint(-y[leaf == node].astype(np.float64) * 1024).sum() / 1024
        assert trees.value[node, 0] == round(-0.5 * g / ((leaf == node).sum() + 2.0) / STEP)


def test_splits_divide_what_is_left_of_a_column() -> None:
    layout = Bins(
        (np.arange(6), np.arange(4), np.empty(0, np.int64)), np.array([False, True, False])
    )
    trees = random_trees.drawn(layout, 20, 9, np.random.default_rng(0))
    assert trees.problem(3, 8) == "" and set(trees.feature.tolist()) == {-1, 0, 1}
    # each pair of bins has a leaf of its own
    assert {*np.diff([*trees.root, len(trees.feature)])} == {2 * 7 * 5 - 1}
    pairs = np.array([[a, b, 1] for a in range(1, 8) for b in range(1, 6)], np.uint8)
    assert all(len(set(leaf.tolist())) == 35 for leaf in trees.leaves(pairs))
    assert len({t.tobytes() for t in trees.leaves(pairs) - trees.root[:, None]}) == 20


def test_leaves_are_newton_steps_of_their_rows() -> None:
    x, y = table(90, seed=3)
    toy = federation(FEDEXTRA, owners(x, y, [30, 60]), rate=0.5, l2=2.0, **SMALL).run(2)
    bins = steps.layout_of(toy.server.layout).of(x)
    scores = np.zeros((1, 90), np.int64)
    for t in range(2):
        trees = steps.trees_of(toy.server.trees).before(t + 1).after(t)
        g, h = gradients(scores, y, MOST_BITS)
        leaf = trees.leaves(bins)[0]
        for node in set(leaf.tolist()):
            G, H = (
                sum(int(v) for v, at in zip(part[0], leaf, strict=True) if at == node)
                for part in (g, h)
            )
            assert trees.value[node, 0] == round(-0.5 * (G / 1024) / (H / 1024 + 2.0) / STEP)
        scores = scores + trees.value[leaf, 0]
    assert torch.equal(torch.from_numpy(scores[:, :30]), toy.party(0).scores)


def test_it_learns() -> None:
    x, y = table(1500, seed=4)
    toy = federation(FEDEXTRA, owners(x[:1000], y[:1000], [300, 600]), depth=5).run(30)
    p = toy.party(0).infer(torch.from_numpy(x[1000:])).softmax(-1).numpy()
    assert auc(y[1000:], p) > 0.8


# -- privacy ---------------------------------------------------------------------------------------


def exact(toy: Any, i: int, trees: Any) -> torch.Tensor:
    """The sums of an owner without its noise: what it sends at nearly none."""
    party = toy.party(i)
    object.__setattr__(
        party,
        "cfg",
        party.cfg.model_copy(update={"dp": party.cfg.dp.model_copy(update={"sigma": 1e-9})}),
    )
    found: torch.Tensor = party.sums(t=0, trees=trees)["sums"]
    return found


STRANGE = [
    [np.nan] * 5,
    [3e38, -3e38, 1e30, 6, -1e-40],
    [-np.inf, np.inf, 0.0, 99, 0.0],
    [0.1, 0.2, 0.3, 2, 0.4],
]
"""Rows of a liar, or of a file with mistakes."""


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_row_more_moves_the_sums_by_the_sensitivity_at_most(classes: int) -> None:
    """Over neighboring data sets, at any scores that a coordinator may have brought about."""
    x, y = table(40, classes, seed=5)
    moved = []
    for number, strange in enumerate(STRANGE):
        for label in range(classes):
            more = np.concatenate([x, np.array([strange], np.float32)])
            toys = [
                federation(FEDEXTRA, owners(a, b, [], classes=classes), dp=DP, **SMALL)
                for a, b in ((more, np.append(y, label)), (x, y))
            ]
            for seed, size in enumerate((0, 2**21, 2**45)):
                trees = trees_of(toys[0], seed + 10 * number)
                rng = np.random.default_rng(seed)
                scores = torch.from_numpy(
                    rng.integers(-size, size + 1, (toys[0].party(0).scores.shape[0], 41))
                )
                toys[0].party(0).scores, toys[1].party(0).scores = scores, scores[:, :40].clone()
                one, other = (exact(toy, 0, trees) for toy in toys)
                moved.append(float((one - other).double().norm()) / sensitivity(len(scores)))
    assert 0.9 < max(moved) <= 1


def test_a_row_with_a_number_moves_the_sums_by_the_sensitivity_at_most() -> None:
    x, _ = table(40, seed=5)
    moved = []
    for strange in STRANGE:
        more = np.concatenate([x, np.array([strange], np.float32)])
        for label in (0.0, 1.9, -3e38, np.inf):
            y = np.append(numbers(x, [])[1], np.float32(label)).astype(np.float32)
            toys = [
                federation(
                    FEDEXTRA,
                    of_numbers(owners(a, np.zeros(len(a), int), []), y[: len(a)]),
                    dp=DP,
                    **SMALL,
                )
                for a in (more, x)
            ]
            for seed, size in enumerate((0, 2**21, 2**45)):
                trees = trees_of(toys[0], seed)
                scores = torch.from_numpy(
                    np.random.default_rng(seed).integers(-size, size + 1, (1, 41))
                )
                toys[0].party(0).scores, toys[1].party(0).scores = scores, scores[:, :40].clone()
                one, other = (exact(toy, 0, trees) for toy in toys)
                moved.append(float((one - other).double().norm()) / sensitivity(1, number=True))
    assert 0.99 < max(moved) <= 1


def test_only_counts_of_owners_that_promise_nothing_are_sent() -> None:
    x, y = table(40, seed=6)
    toy = federation(FEDEXTRA, owners(x, y, [20]), dp=DP, **SMALL)
    toy.run(2)
    assert {entry.kind for entry in toy.fed.ledger} == {"begin", "sums"}
    with pytest.raises(MessageError, match="nothing is counted"):
        toy.party(0).words_of(sizes=torch.tensor([0, 0, 0, 7, 0]))
    with pytest.raises(MessageError, match="nothing is counted"):
        toy.party(0).segments(column=torch.zeros(1), start=torch.zeros(1), size=1, parts=1)
    layout = steps.layout_of(toy.server.layout)
    assert layout.widths.tolist() == [16, 16, 16, 9, 2]
    other = table(40, seed=7)
    assert (
        toy.server.layout["sha256"]
        == federation(FEDEXTRA, owners(*other, [20]), dp=DP, **SMALL).server.layout["sha256"]
    )


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_has_the_noise_that_is_counted(secure: bool) -> None:
    n = 6
    x, y = table(60, seed=8)
    how: dict[str, Any] = {"means": Secure()} if secure else {}
    drawn = []
    for seed in range(4):
        contexts = [replace(c, seed=seed) for c in owners(x, y, [10, 20, 30, 40, 50])]
        toy = federation(FEDEXTRA, contexts, dp=DP, depth=8, **how)
        trees, T = trees_of(toy, depth=8), 1
        shape = {"sums": Shape("int64", 2, len(trees["feature"]))}
        total = toy.fed.total(
            range(n), "sums", shared={"t": 0, "trees": trees}, expect=shape
        ).value["sums"]
        drawn.append((total - sum(exact(toy, i, trees) for i in range(n))).double().flatten())
    noise = torch.cat(drawn)
    each = 1 / (threshold(n) - 1) if secure else 1.0
    expected = DP["sigma"] * sensitivity(T) * math.sqrt(n * each)
    assert len(noise) > 2000 and abs(float(noise.std()) / expected - 1) < 5 / math.sqrt(
        2 * len(noise)
    )
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(len(noise))
    # without one owner's share, and those that may be lost
    assert (threshold(n) - 1) * each >= 1 if secure else True


def test_sums_are_charged_before_they_are_made_and_noise_is_fresh() -> None:
    x, y = table(40, seed=9)
    charged: list[tuple[float, int, float]] = []

    class Spent(FedloomError):
        pass

    def budget(sigma: float, count: int, rate: float) -> None:
        if len(charged) == 3:
            raise Spent
        charged.append((sigma, count, rate))

    contexts = [replace(c, secret=1, privacy_budget=budget) for c in owners(x, y, [])]
    toy = federation(FEDEXTRA, contexts, dp=DP, **SMALL)
    party, trees = toy.party(0), trees_of(toy)
    one, two = (party.sums(t=0, trees=trees)["sums"] for _ in range(2))
    assert charged == [(4.0, 1, 1.0)] * 2 and not torch.equal(one, two)
    # a failure looks like any other reply
    object.__setattr__(party, "context", replace(party.context, data=None))
    assert party.sums(t=0, trees=trees)["sums"].shape == one.shape
    with pytest.raises(Spent):
        party.sums(t=0, trees=trees)
    assert party.take_notes()[NOISE] == 4.0


def test_in_a_secure_sum_an_owner_is_charged_for_its_own_share() -> None:
    charged: list[float] = []
    x, y = table(40, seed=9)
    contexts = [
        replace(c, secret=1, privacy_budget=lambda *of: charged.append(of[0]))
        for c in owners(x, y, [10, 20, 30])
    ]
    federation(FEDEXTRA, contexts, dp=DP, means=Secure(), **SMALL).run(1)
    assert charged == [4.0 / math.sqrt(2)] * 4
    toy = federation(FEDEXTRA, contexts, dp=DP, means=Secure(), **SMALL).run(1, present=[0, 1])
    assert not len(toy.server.trees["root"])  # too few for the declared noise


def test_a_server_that_lies_gets_no_sums() -> None:
    x, y = table(40, seed=9)
    toy = federation(FEDEXTRA, owners(x, y, []), dp=DP, **SMALL)
    party, layout = toy.party(0), steps.layout_of(toy.server.layout)
    two = random_trees.drawn(layout, 2, 3, np.random.default_rng(0))
    circle = two.before(1)
    circle = replace(circle, child=np.where(circle.feature >= 0, 0, circle.child).astype(np.int32))
    for bad, why in (
        (two, "needs 1 trees, not 2"),
        (circle, "children must come after"),
        (two.before(0), "roots"),
    ):
        with pytest.raises(MessageError, match=why):
            party.sums(t=0, trees=steps.trees_tree(bad))


@pytest.mark.parametrize(
    ("dp", "why"),
    [
        ({"sigma": 1.0}, "grid"),
        ({"grid": GRID}, "sigma"),
        ({"sigma": 1.0, "grid": {"x0": (3.0, -3.0)}}, "the lower first, not 3, -3"),
        ({"sigma": 1.0, "grid": {"x0": (0.0, math.inf)}}, "the range of x0 must be two numbers"),
    ],
)
def test_settings_without_what_privacy_needs_are_refused(dp: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FEDEXTRA.configure(params={"dp": dp})
    with pytest.raises(ConfigError, match="owner_column"):
        FEDEXTRA.configure(params={"dp": DP, "owner_column": True})


def test_ranges_of_columns_that_are_not_there_are_refused() -> None:
    x, y = table(10)
    for grid, why in (
        ({}, "need declared ranges"),
        ({"x3": (0, 1)}, "'x3' is no column of numbers"),
        ({"age": (0, 1)}, "'age'"),
    ):
        with pytest.raises(MethodError, match=why):
            federation(FEDEXTRA, owners(x, y, []), dp={"sigma": 1.0, "grid": grid})


def test_a_run_reports_its_epsilon_and_nothing_without_dp() -> None:
    data = {"name": "breast_cancer", "clients": 4, "partition": "iid", "test_rows": 60}
    grid = {"mean radius": (5, 30), "worst perimeter": (50, 260), "worst concave points": (0, 0.3)}
    params = {"depth": 3, "dp": {"sigma": 10.0, "grid": grid}}
    result = fedloom.run(
        "fedextra", rounds=15, data=data, params=params, aggregate={"secure": True}
    )
    (spent,) = result.summary["privacy"]
    assert spent["message"] == "sums of leaves" and spent["simulated"]
    assert spent["epsilon"]["mean"] == pytest.approx(epsilon([Releases(10.0, 15)], 1e-5), rel=1e-6)
    plain = fedloom.run("fedextra", rounds=3, data=data, params={"depth": 3})
    assert not plain.summary["privacy"] and result.accuracy > 0.8
