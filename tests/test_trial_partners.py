"""Weights of an owner's own model, and partners."""

from dataclasses import replace

import numpy as np
import pytest

from fedloom.experiment.trial.choice import WEIGHTS, personal
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.partners import help_of, partners_of
from tests.test_trial_statistics import of


def test_an_owner_that_differs_predicts_by_its_own_model_and_no_fold_chooses_for_itself() -> None:
    rng = np.random.default_rng(0)
    w = np.array(WEIGHTS)[:, None, None]
    best = np.array([0.25, 0.25, 0.25, 1.0])  # owner 3 is unlike the others
    rows = np.full((4, 4), 50.0)
    losses = rows * (0.5 + np.square(w - best) + 1e-3 * rng.random((1, 4, 4)))
    of_fold, of_all = personal(losses, rows)
    assert of_all.tolist() == [0.25, 0.25, 0.25, 1.0] and of_fold.shape == (4, 4)
    changed = losses.copy()
    changed[:, 2] = rng.random((5, 4)) * 1e4
    np.testing.assert_array_equal(personal(changed, rows)[0][2], of_fold[2])
    few = personal(losses[:, :, 2:] / 50, rows[:, 2:] / 50)[1]
    assert few[1] < 1  # with one row a fold, the common weight counts


def predictions(groups: list[int], me: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of owner `me`, and probabilities by every owner's model: informative if they are of one group."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    logits = np.array([(1.0 if g == groups[me] else -1.0) * (2 * y - 1) + 1.5 * rng.normal(size=n) for g in groups])
    p = 1 / (1 + np.exp(-logits))
    return y, np.stack([1 - p, p], axis=2)


def test_partners_are_the_owners_of_the_group() -> None:
    groups = [0, 0, 0, 1, 1, 1]
    names, folds = tuple("abcdef"), np.arange(200) % 4
    for me in (0, 4):
        y, p = predictions(groups, me, 200, seed=me)
        found = partners_of(me, names, "auc", y, p, folds, None, 0.01)
        assert found.advised == tuple(name for name, g in zip(names, groups, strict=True) if g == groups[me])
        assert found.gain is not None and found.gain > 0.1
        assert [value > 0 for value in found.help] == [g == groups[me] for g in groups]
        total = -np.log(p.mean(0)[np.arange(200), y]).mean()
        without = -np.log(np.delete(p, 1, axis=0).mean(0)[np.arange(200), y]).mean()
        assert help_of(y, p)[1] == pytest.approx(without - total)


def test_no_coalition_is_advised_among_owners_that_are_alike_or_two() -> None:
    y, p = predictions([0] * 6, 0, 200, seed=3)
    found = partners_of(0, tuple("abcdef"), "auc", y, p, np.arange(200) % 4, None, 0.01)
    assert found.advised == () and found.gain is None
    two = partners_of(0, ("a", "b"), "auc", y, p[:2], np.arange(200) % 4, None, 0.01)
    assert two.help == () and two.advised == () and len(two.scores) == 2


def test_an_owner_with_too_few_rows_of_a_class_hears_what_others_gain() -> None:
    silent = replace(of(float("nan"), 0.01), fewest=0)
    found = decide([silent, *[of(0.05, 0.01)] * 8], 0.01)[0]
    assert found.decision == "too few" and found.p_gain > 0.9 and found.leaning == "join"
    assert np.isnan(decide([silent, of(0.05, 0.01)], 0.01)[0].p_gain)
