"""FedForest: the same trees however rows are split, and those of an independent recursion over
rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom import methods
from fedloom.methods.tables import steps
from fedloom.methods.tables.fedforest import FedForestConfig, growth
from fedloom.trees.bins import Bins
from fedloom.trees.exact import PARTS, copies
from tests.methods.tables import WORDS, federation, model, models_of_splits, owners, table

FEDFOREST, MIX = methods.find("fedforest"), methods.find("fedforest-mix")
SMALL = {"bins": 16, "depth": 5, "lot": 4}


@pytest.mark.parametrize("classes", [2, 3])
def test_the_model_is_the_same_however_rows_are_split(classes: int) -> None:
    assert len(models_of_splits(FEDFOREST, classes, 2, **SMALL)) == 1


def slow(
    bins: np.ndarray, y: list[int], drawn: list[int], rows: list[int], depth: int, least: int
) -> Any:
    """A tree of all columns by recursion over rows, in Python's integers: (column, bins that go
    left, left, right), or a leaf [N_0, N_1].
    """
    sums = lambda part: [sum(drawn[i] for i in part if y[i] == k) for k in range(2)]
    score = lambda n: (n[0] ** 2 + n[1] ** 2) / max(sum(n), 1)
    best: tuple[float, int, set[int]] = (0.0, -1, set())
    for gap in (set(), {0}) if depth else ():
        for f, words in enumerate(WORDS):
            inside = {
                b: sums([i for i in rows if bins[i, f] == b])
                for b in sorted({*bins[:, f].tolist()} - {0})
            }
            order = (
                sorted(inside, key=lambda b: inside[b][0] / (sum(inside[b]) + 1))
                if words
                else list(inside)
            )
            for end in range(1, len(order) + 1):
                goes = gap | {*order[:end]}
                left, right = (
                    sums([i for i in rows if (bins[i, f] in goes) == way]) for way in (True, False)
                )
                if min(sum(left), sum(right)) >= least:
                    gain = score(left) + score(right) - score(sums(rows))
                    best = max(best, (gain, f, goes), key=lambda found: found[0])
    if best[1] < 0:
        return sums(rows)
    f, goes = best[1:]
    parts = ([i for i in rows if (bins[i, f] in goes) == way] for way in (True, False))
    return f, goes, *(slow(bins, y, drawn, part, depth - 1, least) for part in parts)


def leaf(tree: Any, bins: np.ndarray) -> list[int]:
    """The classes of the leaf of a row with bins (F,)."""
    return (
        tree if isinstance(tree, list) else leaf(tree[2 if bins[tree[0]] in tree[1] else 3], bins)
    )


def test_the_trees_are_those_of_a_recursion_over_rows() -> None:
    x, y = table(120, seed=3)
    toy = federation(
        FEDFOREST, owners(x, y, [40, 60]), bins=8, depth=3, lot=2, columns=5, min_rows=3
    ).run(1)
    bins, trees = steps.layout_of(toy.server.layout).of(x), steps.trees_of(toy.server.trees)
    for t in range(2):
        drawn = copies(bins, y, t, 0).tolist()
        tree = slow(bins, y.tolist(), drawn, list(range(len(y))), 3, 3)
        expected = [
            [n * PARTS // max(sum(found), 1) for n in found]
            for found in (leaf(tree, b) for b in bins)
        ]
        assert trees.before(t + 1).after(t).scores(bins, 2).T.tolist() == expected


def test_it_predicts_as_well_as_scikit_learn() -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import roc_auc_score

    x, y = table(2400, seed=4)
    toy = federation(FEDFOREST, owners(x[:1600], y[:1600], [500, 900])).run(3)
    ours = toy.party(0).infer(torch.from_numpy(x[1600:])).exp()[:, 1].numpy()
    assert abs(toy.party(0).infer(torch.from_numpy(x[1600:])).exp().sum(1) - 1).max() < 1e-5
    theirs = RandomForestClassifier(60, max_depth=12, random_state=0).fit(x[:1600], y[:1600])
    assert (
        roc_auc_score(y[1600:], ours)
        > roc_auc_score(y[1600:], theirs.predict_proba(x[1600:])[:, 1]) - 0.01
    )


def test_nodes_draw_their_columns() -> None:
    layout = Bins((np.arange(1),) * 9, np.zeros(9, bool))
    trees = growth(FedForestConfig(), layout, np.random.default_rng(0), False)
    assert trees.columns.shape == (20, 3) and len({*map(tuple, trees.columns.tolist())}) > 10
    assert growth(
        FedForestConfig(columns=50), layout, np.random.default_rng(0), False
    ).columns.shape == (20, 9)


def test_the_mean_with_an_own_forest_is_from_own_rows() -> None:
    x, y = table(300, seed=8)
    new = torch.from_numpy(table(100, seed=9)[0])
    plain = federation(FEDFOREST, owners(x, y, [100, 200]), **SMALL).run(2)
    mixed = federation(MIX, owners(x, y, [100, 200]), mix=6, **SMALL).run(2)
    assert model(plain) == model(mixed)
    p, q, r = (toy.party(i).infer(new).exp() for toy, i in ((plain, 0), (mixed, 0), (mixed, 1)))
    own = 2 * q - p
    assert not torch.equal(q, r) and own.min() > 0 and abs(own.sum(1) - 1).max() < 1e-4
