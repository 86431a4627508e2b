"""FedBoost: the same trees however rows are split, and those of an independent
recursion over rows.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom import methods
from fedloom.core.faults import Faults
from fedloom.core.message import decode, digest, encode
from fedloom.methods.tables import steps
from fedloom.methods.tables.fedboost import FedBoostConfig
from fedloom.trees.exact import STEP, bits_for, gradients
from tests.methods.tables import WORDS, federation, model, models_of_splits, owners, table

FEDBOOST, MIX = methods.find("fedboost"), methods.find("fedboost-mix")
SMALL = {"bins": 16, "depth": 3, "min_rows": 4}


@pytest.mark.parametrize("classes", [2, 3])
def test_the_model_is_the_same_however_rows_are_split(classes: int) -> None:
    assert len(models_of_splits(FEDBOOST, classes, 3, **SMALL)) == 1


def slow(
    bins: np.ndarray, g: list[int], h: list[int], rows: list[int], depth: int, cfg: FedBoostConfig
) -> Any:
    """A tree by recursion over rows, in Python's integers: (column, bins that go left, left,
    right), or a leaf (G, H). No histogram and no subtraction.
    """
    penalty = cfg.l2 * 2.0 ** bits_for(len(bins))
    G, H = sum(g[i] for i in rows), sum(h[i] for i in rows)
    score = lambda part: sum(g[i] for i in part) ** 2 / (sum(h[i] for i in part) + penalty)
    best: tuple[float, int, set[int]] = (0.0, -1, set())
    for gap in (set(), {0}) if depth else ():
        for f, words in enumerate(WORDS):
            inside = {
                b: [i for i in rows if bins[i, f] == b]
                for b in sorted({*bins[:, f].tolist()} - {0})
            }
            order = list(inside)
            if words:
                rank = lambda b, inside=inside: (
                    sum(g[i] for i in inside[b]) / (sum(h[i] for i in inside[b]) + penalty + 1)
                )
                order.sort(key=rank)
            for end in range(1, len(order) + 1):
                goes = gap | {*order[:end]}
                left = [i for i in rows if bins[i, f] in goes]
                right = [i for i in rows if bins[i, f] not in goes]
                if min(len(left), len(right)) >= (cfg.min_rows or 0):
                    gain = score(left) + score(right) - G**2 / (H + penalty)
                    best = max(best, (gain, f, goes), key=lambda found: found[0])
    if best[1] < 0:
        return G, H
    f, goes = best[1:]
    left = [i for i in rows if bins[i, f] in goes]
    right = [i for i in rows if bins[i, f] not in goes]
    return f, goes, slow(bins, g, h, left, depth - 1, cfg), slow(bins, g, h, right, depth - 1, cfg)


def leaf(tree: Any, bins: np.ndarray) -> tuple[int, int]:
    """The sums (G, H) of the leaf of a row with bins (F,)."""
    return tree if len(tree) == 2 else leaf(tree[2 if bins[tree[0]] in tree[1] else 3], bins)


def test_the_trees_are_those_of_a_recursion_over_rows() -> None:
    x, y = table(120, seed=3)
    cfg = FedBoostConfig(bins=8, depth=3, min_rows=5)
    toy = federation(
        FEDBOOST, owners(x, y, [40, 60]), **cfg.model_dump(include={"bins", "depth", "min_rows"})
    ).run(3)
    trees = steps.trees_of(toy.server.trees)
    bins = steps.layout_of(toy.server.layout).of(x)
    p = (np.bincount(y) + 1) / (len(y) + 2)
    scores = np.full((1, len(y)), round(float(np.log(p[1] / p[0])) / STEP))
    penalty = cfg.l2 * 2.0 ** bits_for(len(y))
    for t in range(3):
        g, h = gradients(scores, y, bits_for(len(y)))
        tree = slow(bins, g[0].tolist(), h[0].tolist(), list(range(len(y))), cfg.depth, cfg)
        ours = trees.before(t + 2).after(t + 1)
        values = [
            round(-cfg.rate * G / (H + penalty) / STEP)
            for G, H in (leaf(tree, row) for row in bins)
        ]
        assert ours.scores(bins, 1)[0].tolist() == values and len(ours.feature) > 5
        scores = scores + np.array(values)
    assert (toy.party(0).scores == torch.from_numpy(scores[:, :40])).all()


def test_it_predicts_as_well_as_scikit_learn() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    x, y = table(6000, seed=4)
    toy = federation(FEDBOOST, owners(x[:4000], y[:4000], [1000, 1500])).run(60)
    ours = toy.party(0).infer(torch.from_numpy(x[4000:])).softmax(-1)[:, 1].numpy()
    theirs = HistGradientBoostingClassifier(
        max_iter=60, max_depth=6, max_leaf_nodes=None, l2_regularization=1, early_stopping=False,
        categorical_features=[3],
    ).fit(x[:4000], y[:4000]).predict_proba(x[4000:])[:, 1]  # fmt: skip
    assert roc_auc_score(y[4000:], ours) > roc_auc_score(y[4000:], theirs) - 0.005


def test_degenerate_tables() -> None:
    x, y = table(90, seed=5)
    x[:, 0], x[:, 2] = np.nan, 4  # no value at all, one value alone
    # owners with one class
    toy = federation(FEDBOOST, owners(x, np.sort(y), [30, 60]), **SMALL).run(2)
    trees = steps.trees_of(toy.server.trees)
    assert not {0, 2} & {*trees.feature.tolist()}
    new = x[:3].copy()
    new[:, 3] = 99  # a word that nobody had
    assert torch.isfinite(toy.party(0).infer(torch.from_numpy(new))).all()
    every = federation(
        FEDBOOST, owners(np.full((9, 5), np.nan, np.float32), y[:9], [3, 6]), **SMALL
    ).run(2)
    assert (steps.trees_of(every.server.trees).feature == -1).all()


def test_tables_that_are_hard_to_bin_have_one_model_however_they_are_split() -> None:
    x, y = table(300, seed=6)
    rng = np.random.default_rng(6)
    x[:, 0] = rng.choice(np.array([1e38, -3e38, 0, 1e-45], np.float32), 300)
    x[:, 1] *= np.float32(1e30)
    x[:, 3] = rng.integers(0, 300, 300)
    words = ((), (), (), tuple(map(str, range(300))), ())
    order = np.argsort(y, kind="stable")  # most owners have one class
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {
            model(federation(FEDBOOST, owners(x[order], y[order], cuts, words), **SMALL).run(2))
            for cuts in ([], [1, 2, 5], [100, 100], [50, 100, 150, 200])
        }
    assert len(found) == 1


def test_a_round_in_which_an_owner_fails_adds_no_trees_and_the_owner_catches_up() -> None:
    x, y = table(200, seed=6)
    toy = federation(
        FEDBOOST,
        owners(x, y, [50, 100]),
        faults=Faults(dropout=0.02, late=0.02, crash=0.02),
        **SMALL,
    )
    grown = []
    for t in range(25):
        before, failures = digest(toy.server.trees), len(toy.fed.failures)
        toy.run(1, start=t)
        failed = {failure.kind for failure in toy.fed.failures[failures:]}
        grown.append(digest(toy.server.trees) != before)
        assert grown[-1] == (not failed & {"segments", "words_of", "histograms"})
    assert any(grown) and not all(grown)
    for i in range(3):
        party = toy.party(i)
        known = steps.trees_of(party.trees)
        assert digest(party.trees) == digest(
            steps.trees_tree(steps.trees_of(toy.server.trees).before(len(known)))
        )
        assert (known.scores(steps.binned(party).bins, 1) == party.scores.numpy()).all()


def test_messages_are_sums_of_words_and_have_twelve_bytes_a_cell() -> None:
    x, y = table(300, seed=7)
    toy = federation(FEDBOOST, owners(x, y, [100, 200]), **SMALL).run(1)
    cells = steps.layout_of(toy.server.layout).cells
    up = [entry for entry in toy.fed.ledger if entry.receiver == "server"]
    assert {entry.kind for entry in up} == {
        "segments",
        "words_of",
        "rows",
        "begin",
        "histograms",
        "learn",
    }
    assert not [entry.what for entry in up if "float" in entry.what]
    asked = [entry.bytes / entry.count / 12 / cells for entry in up if entry.kind == "histograms"]
    assert cells <= 4 * 16 + 9 and {round(nodes) for nodes in asked} <= {1, 2, 4}
    assert all(abs(nodes - round(nodes)) < 0.01 for nodes in asked)


def test_personal_variants_are_from_own_rows() -> None:
    x, y = table(300, seed=8)
    new = torch.from_numpy(table(100, seed=9)[0])
    contexts = partial(owners, x, y, [100, 200])
    plain = federation(FEDBOOST, contexts(), **SMALL).run(3)
    mixed = federation(MIX, contexts(), mix=5, **SMALL).run(3)
    own = federation(FEDBOOST, owners(x[:100], y[:100], []), **SMALL).run(5)
    p, q = (toy.party(0).infer(new).softmax(-1) for toy in (plain, own))
    assert model(plain) == model(mixed)
    assert mixed.party(0).infer(new).softmax(-1).shape == p.shape and not torch.equal(p, q)
    more = federation(FEDBOOST, contexts(), own_trees=4, **SMALL).run(3)
    assert model(plain) == model(more)
    logits = [more.party(i).infer(new) for i in range(3)]
    assert not torch.equal(logits[0], logits[1]) and torch.equal(
        logits[0], more.party(0).infer(new)
    )
    named = federation(FEDBOOST, contexts(), owner_column=True, **SMALL).run(8)
    assert len(named.server.layout["lengths"]) == 6


def test_what_is_remembered_of_test_rows_is_right() -> None:
    x, y = table(200, seed=10)
    new = torch.from_numpy(table(50, seed=11)[0])
    toy = federation(FEDBOOST, owners(x, y, [100]), **SMALL)
    assert (toy.party(0).infer(new) == 0).all()
    for t in range(3):
        toy.run(1, start=t)
        seen = [toy.party(i).infer(new) for i in range(2)]
        assert torch.equal(seen[0], seen[1]) and torch.equal(
            seen[0], toy.party(0).infer(new.clone())
        )


def test_a_run_that_continues_from_its_saved_state_gives_the_same_bits() -> None:
    x, y = table(200, seed=12)
    whole = federation(FEDBOOST, owners(x, y, [50, 120]), **SMALL).run(5)
    first = federation(FEDBOOST, owners(x, y, [50, 120]), **SMALL).run(2)
    states, server = (
        decode(encode({str(i): state for i, state in first.engine.states().items()})),
        decode(encode(first.server.state())),
    )
    second = federation(FEDBOOST, owners(x, y, [50, 120]), **SMALL)
    second.engine.load({int(i): state for i, state in states.items()})
    second.server.load(server)
    assert digest(second.run(3, start=2).server.state()) == digest(whole.server.state())
    assert model(second) == model(whole)


def test_a_run_whose_last_round_adds_no_trees_has_a_result() -> None:
    data = {"name": "breast_cancer", "clients": 3, "partition": "iid", "test_rows": 40}
    result = fedloom.run("fedboost", rounds=1, data=data, faults={"dropout": 1.0})
    assert 0 < result.accuracy < 1 and result.summary["failures"] >= 3
