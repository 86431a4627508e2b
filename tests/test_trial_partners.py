"""Weights of an owner's own model, and partners."""

from dataclasses import replace

import numpy as np
import pytest

from fedloom.experiment.trial.choice import WEIGHTS, gains_of_weights, personal
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.evidence import evidence
from fedloom.experiment.trial.partners import help_of, partners_of
from tests.test_trial_statistics import of


def test_an_owner_that_differs_predicts_by_its_own_model_and_one_without_rows_as_the_others() -> (
    None
):
    rng = np.random.default_rng(0)
    w = np.array(WEIGHTS[:-1])[:, None]
    gains = 0.04 - np.square(w - np.array([0.25] * 5)) + 1e-4 * rng.random((4, 5))
    # owner 3 is unlike the others; 4 has rows of one class
    gains[:, 3], gains[:, 4] = -0.1 * (1 - w[:, 0]), np.nan
    spread, units = np.full((4, 5), 0.01), np.full(5, 100)
    assert personal(gains, spread, units).tolist() == [0.25, 0.25, 0.25, 1.0, 1.0]
    assert personal(gains[:, :3], spread[:, :3], units[:3]).tolist() == [0.25] * 3
    gains[:, 3] = np.nan  # without the one unlike the others, what to expect is their gain
    assert personal(gains, spread, units).tolist() == [0.25] * 5
    many = personal(
        np.stack([gains, -np.abs(gains)], axis=1),
        np.stack([spread] * 2, axis=1),
        np.stack([units] * 2),
    )
    assert many.shape == (2, 5) and many[1].tolist() == [1.0] * 5
    gains[:, 3] = -0.02  # less than what the others gain, but its own rows are against it
    assert personal(gains, np.full((4, 5), 0.04), units)[3] == 1.0
    noisy = personal(0.02 * rng.normal(size=(4, 5)), np.full((4, 5), 100.0), units)
    assert noisy.tolist() == [1.0] * 5  # no gain is likely
    assert personal(np.full((4, 2), np.nan), np.full((4, 2), np.nan), np.zeros(2)).tolist() == [
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("metric", ["auc", "rmse"])
def test_gains_of_weights_are_those_of_the_mixes_with_the_variance_of_units(metric: str) -> None:
    rng = np.random.default_rng(1)
    y, folds = np.arange(60) % 2, np.arange(60) // 2 % 3
    truth = 0.5 + 0.3 * (y - 0.5) if metric == "auc" else y.astype(float)
    shown = np.clip(truth + 0.2 * rng.normal(size=(2, 60)), 0, 1)
    one, other = np.stack([1 - shown, shown], axis=2) if metric == "auc" else shown
    gains, spread, units = gains_of_weights(metric, y, one, other, folds)
    whole = evidence(metric, y, one[None], (0.75 * other + 0.25 * one)[None], folds[None])
    assert gains[1] == pytest.approx(whole.gain) and units == 60 and (spread > 0).all()
    twice = [np.concatenate([each, each]) for each in (y, one, other, folds)]
    again = gains_of_weights(metric, twice[0], *twice[1:], unit=np.tile(np.arange(60), 2))
    assert again[2] == 60
    np.testing.assert_allclose(again[0], gains, atol=1e-12)
    np.testing.assert_allclose(again[1], spread, rtol=1e-9)
    assert np.isnan(gains_of_weights(metric, y[:0], one[:0], other[:0], folds[:0])[0]).all()


def predictions(groups: list[int], me: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of owner `me`, and probabilities by every owner's model: informative if they are of
    one group.
    """
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    logits = np.array(
        [
            (1.0 if g == groups[me] else -1.0) * (2 * y - 1) + 1.5 * rng.normal(size=n)
            for g in groups
        ]
    )
    p = 1 / (1 + np.exp(-logits))
    return y, np.stack([1 - p, p], axis=2)


def test_partners_are_the_owners_of_the_group() -> None:
    groups = [0, 0, 0, 1, 1, 1]
    names, folds = tuple("abcdef"), np.arange(200) % 4
    for me in (0, 4):
        y, p = predictions(groups, me, 200, seed=me)
        found = partners_of(me, names, "auc", y, p, folds, None, 0.01, (p[me], p.mean(0)))
        assert found.advised == tuple(
            name for name, g in zip(names, groups, strict=True) if g == groups[me]
        )
        assert found.gain is not None and found.gain > 0.1
        assert [value > 0 for value in found.help] == [g == groups[me] for g in groups]
        total = -np.log(p.mean(0)[np.arange(200), y]).mean()
        without = -np.log(np.delete(p, 1, axis=0).mean(0)[np.arange(200), y]).mean()
        assert help_of(y, p)[1] == pytest.approx(without - total)


def test_no_coalition_is_advised_among_owners_that_are_alike_or_two() -> None:
    y, p = predictions([0] * 6, 0, 200, seed=3)
    folds = np.arange(200) % 4
    found = partners_of(0, tuple("abcdef"), "auc", y, p, folds, None, 0.01, (p[0], p.mean(0)))
    assert found.advised == () and found.gain is None
    two = partners_of(0, ("a", "b"), "auc", y, p[:2], folds, None, 0.01, ())
    assert two.help == () and two.advised == () and len(two.scores) == 2


def test_an_owner_with_too_few_rows_of_a_class_hears_what_others_gain() -> None:
    silent = replace(of(float("nan"), 0.01), fewest=0)
    found = decide([silent, *[of(0.05, 0.01)] * 8], 0.01)[0]
    assert found.decision == "too few" and found.p_gain > 0.9 and found.leaning == "join"
    assert np.isnan(decide([silent, of(0.05, 0.01)], 0.01)[0].p_gain)
