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
from fedloom.deploy.table_network import network_of
from fedloom.deploy.tables import table_network
from fedloom.methods.tables import fedextra, steps
from fedloom.protect.aggregators import Secure
from fedloom.trees import histograms, losses
from fedloom.trees.bins import Bins, own_edges, own_spread
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
    loss = SquaredError(20, int(np.frexp(np.abs(y).max())[1]))
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
    data = cast("Any", SimpleNamespace(recipe=None, input_shape=(5,)))
    settings, state = table_network(data, party)
    network = network_of(settings)
    network.load_state_dict(state, assign=True)
    assert torch.equal(network(torch.from_numpy(x)), party.infer(torch.from_numpy(x)))


# -- numbers of which a few are far from the others ------------------------------------------------


def skewed(kind: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 4) float32 and numbers (n,) with a long tail, that follow from the rows but for a
    little noise.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 4)).astype(np.float32)
    score = x[:, 0] + np.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3]
    score = score / score.std() + 0.3 * rng.standard_normal(n)
    if kind == "log-normal":
        return x, np.exp(1.5 * score)
    if kind == "Pareto":
        return x, 3 + score + np.where(rng.random(n) < 0.003, 100 * rng.pareto(1.0, n), 0)
    if kind == "owner":  # the first third has numbers of a larger unit
        x[:, 3] = np.arange(n) < n // 3
        return x, np.where(x[:, 3] == 1, 1e5, 1) * np.exp(score / 4)
    y = 10 + score
    y[n // 2] = 1e6
    return x, y


KINDS = ("log-normal", "Pareto", "owner", "outlier")


def beside_scikit_learn(kind: str, name: str, n: int) -> None:
    """The joint model's error on the lower half of the numbers, and on all, is nearly that of
    scikit-learn's model.
    """
    x, y = skewed(kind, n)
    mean, sd = y.mean(), y.std()
    z, low = ((y - mean) / sd).astype(np.float32), y <= np.median(y)
    places = tables.owners(x, np.zeros(n, int), [n // 3, n // 2], ((),) * 4, 1)
    how: dict[str, Any] = {"depth": 5, "min_rows": 20} if name == "fedboost" else {"lot": 10}
    if name == "fedforest":
        how |= {"columns": 3, "depth": 10}
    toy = federation(methods.find(name), tables.of_numbers(places, z), **how)
    ours = toy.run(40 if name == "fedboost" else 1).party(0).infer(torch.from_numpy(x))
    theirs = (
        HistGradientBoostingRegressor(
            max_iter=40,
            max_depth=5,
            max_leaf_nodes=None,
            l2_regularization=1,
            early_stopping=False,
            max_bins=63,
        )
        if name == "fedboost"
        else RandomForestRegressor(
            10, max_features=3, max_depth=10, min_samples_leaf=2, random_state=0
        )
    ).fit(x, z)
    errors = []
    for found in (ours[:, 0].double().numpy(), theirs.predict(x)):
        apart = np.abs(found * sd + mean - y)
        errors.append((np.median(apart[low] / y[low]), np.sqrt((apart**2).mean())))
    (relative, root), (their_relative, their_root) = errors
    assert relative <= 1.5 * their_relative + 0.02 and root <= 1.15 * their_root


@pytest.mark.parametrize(
    ("name", "kind", "n"),
    [
        ("fedboost", "outlier", 12_000),
        ("fedforest", "outlier", 3000),
        ("fedforest", "owner", 3000),
    ],
)
def test_small_numbers_beside_a_few_large_ones_are_predicted_as_well_as_by_scikit_learn(
    name: str, kind: str, n: int
) -> None:
    beside_scikit_learn(kind, name, n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "n"),
    [
        *((name, kind, 100_000) for name in FEW for kind in KINDS),
        ("fedboost", "log-normal", 1_000_000),
        ("fedboost", "outlier", 1_000_000),
    ],
)
def test_they_are_also_of_many_rows(name: str, kind: str, n: int) -> None:
    beside_scikit_learn(kind, name, n)


@pytest.mark.parametrize("name", [*FEW, "fedextra"])
def test_the_model_of_skewed_numbers_is_the_same_however_rows_are_split(name: str) -> None:
    x, _ = table(400)
    y = np.exp(3 * numbers(400)[1])
    y[7] = 1e6
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    method, few = methods.find(name), {"bins": 16, "depth": 3, **FEW.get(name, {})}
    found = {model(federation(method, owners(x, y, cuts), **few).run(2)) for cuts in splits(400)}
    found.add(model(federation(method, owners(x, y, [50, 200]), isolated=True, **few).run(2)))
    secure = federation(method, owners(x, y, [50, 200]), means=Secure(), **few).run(2)
    found.add(model(secure))
    assert len(found) == 1 and losses.coarse(-10, float(secure.server.spread))


@pytest.mark.parametrize("name", [*FEW, "fedextra"])
def test_trees_of_other_numbers_have_the_steps_and_bits_of_those_that_are_never_finer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = numbers(600)
    method, few = methods.find(name), {"depth": 3, **FEW.get(name, {})}
    found = federation(method, owners(x, y, [200]), **few).run(2)
    for module in (losses, fedextra):
        monkeypatch.setattr(module, "coarse", lambda exponent, spread: False)
    old = federation(method, owners(x, y, [200]), **few).run(2)
    assert model(found) == model(old)
    assert found.fed.ledger.sent("client") == old.fed.ledger.sent("client")


@pytest.mark.parametrize("rows", [100, 10_000, 200_000])
def test_residuals_of_normal_numbers_share_a_word_with_rows_and_those_of_a_long_tail_do_not(
    rows: int,
) -> None:
    normal = np.random.default_rng(0).standard_normal(rows).astype(np.float32)
    exponent = int(np.frexp(np.abs(normal).max())[1])
    plain = of_numbers(rows, exponent, own_spread(normal, 64))
    assert plain.bits == min(20, 30 - rows.bit_length()) and not plain.wide
    far = normal.copy()
    far[0] = 1e6
    exponent = int(np.frexp(np.abs(far).max())[1])
    fine = of_numbers(rows, exponent, own_spread(far, 64))
    assert fine.wide and 2.0 ** (exponent - fine.bits) < 0.001
    assert 2.0 ** (fine.bits + 1) * rows < 2**52  # so that floats hold their sums
    g, count = fine.opened(fine.words(np.zeros((1, rows), np.int64), far))
    assert np.abs(g * 2.0 ** (exponent - fine.bits) + far).max() < 0.001 and (count == 1).all()


def test_the_spread_is_the_least_distance_over_which_a_sixteenth_of_rows_lies() -> None:
    assert own_spread(np.full(50, 3.0, np.float32), 64) == np.inf
    assert own_spread(np.empty(0, np.float32), 64) == np.inf
    assert own_spread(np.array([5.0] * 999 + [9.0], np.float32), 64) == 4
    even = np.linspace(0, 1, 3200, dtype=np.float32)
    assert own_spread(even, 64) == pytest.approx(1 / 16, rel=0.1)
    counts = np.repeat(np.array([0, 1, 2, 3, 1000], np.float32), [600, 200, 100, 80, 1])
    assert own_spread(counts, 64) == 1


@pytest.mark.parametrize("cells", [1, 6, 7])
def test_sums_come_back_from_words(cells: int) -> None:
    rng = np.random.default_rng(0)
    for statistics, wide, most in ((3, False, 2**31), (2, False, 2**31), (2, True, 2**52)):
        sums = rng.integers(-(2**31), 2**31, (statistics, cells))
        sums[0] = rng.integers(-most, most, cells)
        words = histograms.sent(sums, wide)
        assert len(words) == histograms.words_sent(statistics, cells, wide)
        assert np.array_equal(histograms.received(words, statistics, cells, wide), sums)
        doubled = histograms.received(words + words, statistics, cells, wide)
        if wide:
            assert np.array_equal(doubled[0], 2 * sums[0])


def test_a_column_with_one_value_far_away_has_bins_for_the_others() -> None:
    x = np.random.default_rng(0).standard_normal((1000, 1)).astype(np.float32)
    x[3] = 1e9
    bins = Bins(own_edges(x, 32), np.zeros(1, bool)).of(x)
    assert np.bincount(bins[:, 0]).max() < 60
