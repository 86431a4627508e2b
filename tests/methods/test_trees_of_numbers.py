"""FedBoost and FedForest with a number to predict: the same bits for every split, and an
independent recursion's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.message import digest
from fedloom.deploy.tables import tree_network
from fedloom.methods.tables import steps
from fedloom.protect.aggregators import Secure
from fedloom.trees.exact import STEP
from fedloom.trees.losses import SquaredError, of_numbers
from tests.methods import tables
from tests.methods.tables import federation, model, splits, table

BOOST, FOREST = methods.find("fedboost"), methods.find("fedforest")
FEW: dict[str, dict[str, Any]] = {
    "fedboost": {"bins": 16, "depth": 3},
    "fedforest": {"bins": 16, "depth": 5, "lot": 3},
}


def numbers(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `table`, and a number with mean about 0 and s.d. about 1."""
    x, _ = table(n, seed=seed)
    clean = np.nan_to_num(x)
    y = clean[:, 0] * clean[:, 2] + np.sin(3 * clean[:, 1]) + clean[:, 3] % 3 + clean[:, 4] / 4
    return x, ((y - y.mean()) / y.std()).astype(np.float32)


def owners(x: np.ndarray, y: np.ndarray, cuts: list[int]) -> list[ClientContext]:
    return tables.of_numbers(tables.owners(x, np.zeros(len(y), int), cuts), y)


@pytest.mark.parametrize("name", FEW)
def test_the_model_is_the_same_however_rows_are_split_also_by_secure_sums(name: str) -> None:
    x, y = numbers(400)
    order = np.random.default_rng(1).permutation(400)
    method, few = methods.find(name), FEW[name]
    found = {model(federation(method, owners(x, y, cuts), **few).run(2)) for cuts in splits(400)}
    found.add(model(federation(method, owners(x[order], y[order], [100]), **few).run(2)))
    found.add(model(federation(method, owners(x, y, [50, 200]), isolated=True, **few).run(2)))
    found.add(model(federation(method, owners(x, y, [50, 200]), means=Secure(), **few).run(2)))
    assert len(found) == 1


def slow(bins: np.ndarray, g: list[int], rows: list[int], depth: int, least: int, l2: float) -> Any:
    """A tree by recursion over rows, in integers: (column, bins that go left, left, right), or a
    leaf (G, rows).
    """
    total = lambda part: sum(g[i] for i in part)
    score = lambda part: total(part) ** 2 / (len(part) + l2)
    best: tuple[float, int, set[int]] = (0.0, -1, set())
    for gap in (set(), {0}) if depth else ():
        for f, words in enumerate(tables.WORDS):
            inside = {
                b: [i for i in rows if bins[i, f] == b]
                for b in sorted({*bins[:, f].tolist()} - {0})
            }
            order = list(inside)
            if words:
                means = {b: total(its) / (len(its) + l2 + 1) for b, its in inside.items()}
                order.sort(key=means.__getitem__)
            for end in range(1, len(order) + 1):
                goes = gap | {*order[:end]}
                left = [i for i in rows if bins[i, f] in goes]
                right = [i for i in rows if bins[i, f] not in goes]
                if min(len(left), len(right)) >= least:
                    gain = score(left) + score(right) - score(rows)
                    best = max(best, (gain, f, goes), key=lambda found: found[0])
    if best[1] < 0:
        return total(rows), len(rows)
    f, goes = best[1:]
    left = [i for i in rows if bins[i, f] in goes]
    right = [i for i in rows if bins[i, f] not in goes]
    return (
        f,
        goes,
        slow(bins, g, left, depth - 1, least, l2),
        slow(bins, g, right, depth - 1, least, l2),
    )


def test_trees_are_those_of_a_recursion_over_rows() -> None:
    x, y = numbers(200)
    toy = federation(BOOST, owners(x, y, [80]), bins=8, depth=3, min_rows=4).run(3)
    bins = steps.layout_of(toy.server.layout).of(x)
    loss = of_numbers(200, int(np.frexp(np.abs(y).max())[1]), np.inf)
    assert isinstance(loss, SquaredError)
    scores = np.zeros(200, np.int64)
    for _ in range(3):
        residual = (scores * STEP - y.astype(np.float64)) / 2.0**loss.exponent
        g = [round(float(r) * 2**loss.bits) for r in residual.clip(-2, 2)]
        tree = slow(bins, g, list(range(200)), 3, 4, 1.0)
        for i in range(200):
            leaf = tree
            while len(leaf) == 4:
                leaf = leaf[2 if bins[i, leaf[0]] in leaf[1] else 3]
            scores[i] += round(
                -0.1 * leaf[0] * 2.0 ** (loss.exponent - loss.bits) * 2**20 / (leaf[1] + 1.0)
            )
    found = np.concatenate([state["scores"][0].numpy() for state in toy.engine.states().values()])
    assert np.array_equal(found, scores)


@pytest.mark.parametrize("which", ["diabetes", "friedman"])
def test_errors_are_nearly_those_of_scikit_learn(which: str) -> None:
    """R² on test rows is at most 0.04 below: the libraries differ in leaves, bins and draws."""
    if which == "diabetes":
        x, y = load_diabetes(return_X_y=True)
    else:
        x, y = make_friedman1(900, noise=1.0, random_state=0)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    x, cut = x.astype(np.float32), 3 * len(x) // 4
    words = ((),) * x.shape[1]

    def r2(predicted: np.ndarray) -> float:
        return 1 - float(((predicted - y[cut:]) ** 2).mean() / y[cut:].var())

    def ours(method: Any, rounds: int, **params: Any) -> float:
        places = tables.owners(x[:cut], np.zeros(cut, int), [cut // 3, cut // 2], words, 1)
        toy = federation(method, tables.of_numbers(places, y[:cut]), **params).run(rounds)
        return r2(toy.party(1).infer(torch.from_numpy(x[cut:])).numpy()[:, 0])

    theirs = HistGradientBoostingRegressor(
        max_iter=40, max_depth=4, l2_regularization=1, early_stopping=False, min_samples_leaf=5
    ).fit(x[:cut], y[:cut])
    forest = RandomForestRegressor(40, max_features="sqrt", min_samples_leaf=2, random_state=0).fit(
        x[:cut], y[:cut]
    )
    assert ours(BOOST, 40, depth=4, min_rows=5) > r2(theirs.predict(x[cut:])) - 0.04
    assert ours(FOREST, 2) > r2(forest.predict(x[cut:])) - 0.04


def test_an_outlier_is_clipped_and_a_declared_scale_far_from_the_rows_is_learned() -> None:
    loss = of_numbers(100, 10, np.inf)
    scores = np.zeros((1, 2), np.int64)
    words = loss.words(scores, np.array([1000.0, -1e9]))
    g, rows = loss.opened(words)
    assert rows.tolist() == [[1, 1]] and g.tolist() == [
        [-round(1000 / 1024 * 2**loss.bits), 2 * 2**loss.bits]
    ]
    x, y = numbers(300)
    toy = federation(BOOST, owners(x, 10 + 3 * y, [100]), bins=16, depth=3).run(80)
    predicted = toy.party(0).infer(torch.from_numpy(x)).numpy()[:, 0]
    assert ((predicted - 10 - 3 * y) ** 2).mean() < 0.5 * 9


@pytest.mark.parametrize("name", ["fedboost-mix", "fedforest-mix"])
def test_mixes_are_means_with_the_owner_s_own_trees(name: str) -> None:
    x, y = numbers(300)
    method, joint = methods.find(name), methods.find(name.removesuffix("-mix"))
    few = FEW[joint.name]
    rows = torch.from_numpy(x)
    both = federation(method, owners(x, y, [150]), **few, mix=4).run(2)
    alone = federation(joint, owners(x[:150], y[:150], []), **few).run(2)
    mean = federation(joint, owners(x, y, [150]), **few).run(2)
    assert digest(both.server.trees) == digest(mean.server.trees) != digest(alone.server.trees)
    own = 2 * both.party(0).infer(rows) - mean.party(0).infer(rows)
    truth = torch.from_numpy(y[:150])
    assert float(((own[:150, 0] - truth) ** 2).mean()) < float((truth**2).mean())


@pytest.mark.parametrize("name", FEW)
def test_the_exported_code_predicts_the_same_numbers(name: str) -> None:
    x, y = numbers(200)
    party = federation(methods.find(name), owners(x, y, [80]), **FEW[name]).run(2).party(0)
    source, state = tree_network(cast("Any", SimpleNamespace(recipe=None, input_shape=(5,))), party)
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(source, space)
    network = space["Network"]()
    network.load_state_dict(state)
    assert torch.equal(network(torch.from_numpy(x)), party.infer(torch.from_numpy(x)))
