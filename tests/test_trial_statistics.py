"""The statistics of a trial: contributions of rows, evidence of owners, what they
share, decisions.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedloom.core.scores import auc, balanced_accuracy
from fedloom.experiment.trial.choice import best
from fedloom.experiment.trial.contributions import (
    CLASS_SCORES,
    NUMBER_SCORES,
    contributions,
    scores_of,
)
from fedloom.experiment.trial.decide import OwnerVerdict, decide
from fedloom.experiment.trial.evidence import Evidence, evidence, standard_errors
from fedloom.experiment.trial.sharing import COMMON, FALL, SPREAD, SPREADS, UNLIKE, share

METRICS = (*CLASS_SCORES, *NUMBER_SCORES)


def predicted(metric: str, n: int, seed: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions that tell something of them, with ties."""
    rng = np.random.default_rng(seed)
    if metric in NUMBER_SCORES:
        numbers = rng.normal(size=n)
        return numbers, numbers + rng.normal(size=n)
    y = rng.integers(0, classes, n)
    logits = np.round(rng.normal(size=(n, classes)) + np.eye(classes)[y], 1)
    return y, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


# -- contributions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_contributions_sum_to_zero_and_are_those_of_the_jackknife(metric: str) -> None:
    """The jackknife's influence of row j is S - S without j, less its mean."""
    y, p = predicted(metric, 150, seed=1)
    one_fold = np.zeros(len(y))
    _, parts = contributions(metric, y, p, one_fold)
    left_out = np.array(
        [
            contributions(metric, np.delete(y, j), np.delete(p, j, axis=0), one_fold[1:])[0]
            for j in range(len(y))
        ]
    )
    assert parts.sum() == pytest.approx(0, abs=1e-12)
    influence = left_out.mean() - left_out
    assert np.corrcoef(parts, influence)[0, 1] > 0.99
    assert parts.std() == pytest.approx(influence.std(), rel=0.05)


def test_scores_are_those_of_a_run() -> None:
    y, p = predicted("auc", 80, seed=2)
    one_fold = np.zeros(len(y))
    assert contributions("auc", y, p, one_fold)[0] == pytest.approx(auc(y, p))
    assert contributions("balanced accuracy", y, p, one_fold)[0] == pytest.approx(
        balanced_accuracy(y, p.argmax(1))
    )
    assert contributions("accuracy", y, p, one_fold)[0] == pytest.approx((p.argmax(1) == y).mean())


def test_the_area_compares_rows_of_one_fold_only() -> None:
    """Two models on other scales: within folds all pairs are in order, between folds half."""
    y, folds = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    positive = np.array([0.1, 0.2, 0.8, 0.9])
    p = np.stack([1 - positive, positive], axis=1)
    assert contributions("auc", y, p, folds)[0] == 1.0
    assert contributions("auc", y, p, np.zeros(4))[0] == 0.75
    score, parts = contributions("auc", np.zeros(4, np.int64), p, folds)
    assert np.isnan(score) and not parts.any()


def test_balanced_accuracy_corrects_for_the_shares_of_classes() -> None:
    """A rare class is predicted where its probability exceeds its share, which accuracy does not
    ask for.
    """
    p, y = np.array([[0.95, 0.05], [0.7, 0.3], [0.8, 0.2]]), np.array([0, 1, 1])
    shares = np.tile([0.9, 0.1], (3, 1))
    assert contributions("balanced accuracy", y, p, np.zeros(3), shares)[0] == 1.0
    assert contributions("accuracy", y, p, np.zeros(3), shares)[0] == pytest.approx(1 / 3)


# -- evidence --------------------------------------------------------------------------------------


def owner(
    metric: str = "auc",
    n: int = 200,
    gain: float = 0.0,
    seed: int = 0,
    repeats: int = 3,
    classes: int = 2,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Labels, and predictions alone and federated in each repeat, the second with a stronger signal
    by `gain`.
    """
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n) if metric in CLASS_SCORES else rng.normal(size=n)
    folds = np.stack([rng.permutation(n) % 4 for _ in range(repeats)])
    common = rng.normal(size=(n, classes))

    def model(strength: float) -> np.ndarray:
        noise = (
            common
            + 0.3 * rng.normal(size=(n, classes))
            + 0.05 * rng.normal(size=(repeats, n, classes))
        )
        if metric in NUMBER_SCORES:
            return y + noise[:, :, 0] / (1 + strength)
        logits = noise + strength * np.eye(classes)[y]
        return np.exp(logits) / np.exp(logits).sum(2, keepdims=True)

    return y, model(1.0), model(1.0 + gain), folds


def test_the_standard_error_of_one_fold_is_that_of_delong() -> None:
    """One repeat, one fold, one owner: the variance of placements of each class, divided by its
    number of rows.
    """
    y, alone, shared, _ = owner(n=400, repeats=1)
    one = evidence("auc", y, alone, shared, np.zeros((1, 400)))
    placed = []
    for p in (alone[0, :, 1], shared[0, :, 1]):
        wins = (p[y == 1][:, None] > p[y == 0][None]).astype(float)
        placed.append((wins.mean(1), wins.mean(0)))
    by_hand = sum(np.var(b - a, ddof=1) / len(a) for a, b in zip(*placed, strict=True))
    # no pair of rows trains and tests each other
    errors, freedom = standard_errors([replace(one, in_time=True)])
    assert errors[0] == pytest.approx(np.sqrt(by_hand), rel=1e-6)
    assert 350 < freedom[0] < 410


def test_rows_that_are_copies_tell_nothing_new_if_they_are_one_unit() -> None:
    y, alone, shared, folds = owner(n=120)
    twice = lambda x: np.repeat(x, 2, axis=x.ndim - (2 if x.ndim == 3 else 1))
    one = evidence("accuracy", y, alone, shared, folds)
    copies = evidence(
        "accuracy", twice(y), twice(alone), twice(shared), twice(folds), unit=twice(np.arange(120))
    )
    apart = evidence("accuracy", twice(y), twice(alone), twice(shared), twice(folds))
    error = lambda one: standard_errors([one])[0][0]
    assert error(copies) == pytest.approx(error(one), rel=0.05)
    assert error(apart) < 0.85 * error(one)


@pytest.mark.parametrize("metric", ["rmse", "mae"])
def test_the_relative_gain_of_an_error_does_not_depend_on_its_unit(metric: str) -> None:
    y, alone, shared, folds = owner(metric, gain=0.3)
    meters = evidence(metric, y, alone, shared, folds)
    feet = evidence(metric, 3.28 * y + 7, 3.28 * alone + 7, 3.28 * shared + 7, folds)
    assert feet.gain == pytest.approx(meters.gain) and meters.gain > 0.1
    assert standard_errors([feet])[0] == pytest.approx(standard_errors([meters])[0])


@pytest.mark.slow
def test_intervals_cover_the_true_gain() -> None:
    """400 owners whose models differ in nothing: their intervals contain 0 in 92 to 99 of 100
    cases.
    """
    found = [evidence("auc", *owner(n=60, seed=seed)) for seed in range(400)]
    inside = [v.low <= 0 <= v.high for v in (decide([one], 0.01)[0] for one in found)]
    assert 0.92 <= np.mean(inside) <= 0.99


def test_pairs_of_rows_that_train_and_test_each_other_count_in_the_error() -> None:
    """Least squares on 12 columns without signal against the mean: the true loss of coefficients b
    is 1 + |b|^2. The variance of rows counted alone is about half of the variance that the
    estimated gain has.
    """
    found, truth = [], []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(60, 12)), rng.normal(size=60)
        folds = np.stack([rng.permutation(60) % 4 for _ in range(3)])
        fitted, true = np.zeros((3, 60)), []
        for c in range(3):
            for k in range(4):
                test = folds[c] == k
                b = np.linalg.lstsq(x[~test], y[~test], rcond=None)[0]
                fitted[c, test] = x[test] @ b
                true.append(1 + b @ b)
        found.append(evidence("rmse", y, fitted, np.zeros((3, 60)), folds))
        truth.append(1 - 1 / np.sqrt(np.mean(true)))
    errors = standard_errors(found)[0]
    apart = standard_errors([replace(one, in_time=True) for one in found])[0]
    missed = np.square(np.array([one.gain for one in found]) - truth).mean()
    assert 0.8 < np.square(errors).mean() / missed < 1.4
    assert np.square(apart).mean() / missed < 0.7


# -- owners together -------------------------------------------------------------------------------


def test_owners_that_agree_help_each_other_and_one_that_differs_keeps_its_own_evidence() -> None:
    gains, errors, rows = np.full(12, 0.03), np.full(12, 0.02), np.full(12, 100)
    alike = share(gains, errors, rows, 0.01)
    assert (alike.above_zero > 0.99).all() and (alike.above_worth > 0.9).all()
    gains[0] = -0.2
    odd = share(gains, errors, rows, 0.01)
    assert odd.above_zero[0] < 0.01 and (odd.above_zero[1:] > 0.9).all()
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(share(gains[order], errors, rows, 0.01).mean, odd.mean[order])


def test_the_posterior_is_that_of_drawn_owners() -> None:
    """Owners drawn from the model, each with the weight of its estimates' density: one unlike the
    others, or none.
    """
    gains = np.array([0.09, 0.02, 0.03])
    errors = np.array([0.06, 0.03, 0.02])
    rows = np.array([50, 150, 300])
    rng, n = np.random.default_rng(0), 400_000
    size = (rows / np.exp(np.log(rows).mean())) ** -FALL
    # The grid of τ, and what its prior weighs
    weight = SPREADS / (1 + np.square(SPREADS / SPREAD))
    spread = rng.choice(SPREADS, n, p=weight / weight.sum())
    found = share(gains, errors, rows, 0.01)
    for i in range(3):
        z = spread[:, None] * rng.normal(size=(n, 3))
        z[:, i] += COMMON * rng.normal(size=n) * (rng.random(n) < UNLIKE)
        true = size * (COMMON * rng.normal(size=(n, 1)) + z)
        density = np.exp(-0.5 * np.square((gains - true) / errors).sum(1))
        assert found.above_zero[i] == pytest.approx(
            np.average(true[:, i] > 0, weights=density), abs=0.01
        )
        assert found.above_worth[i] == pytest.approx(
            np.average(true[:, i] > 0.01, weights=density), abs=0.01
        )
        assert found.mean[i] == pytest.approx(np.average(true[:, i], weights=density), abs=0.001)


def test_others_do_not_make_an_owner_sure_whose_own_rows_lean_away() -> None:
    """By 19 owners that gain 0.08 it would gain, too; but some owner is always unlike
    the others.
    """
    gains, errors, rows = np.full(20, 0.08), np.full(20, 0.03), np.full(20, 100)
    gains[0], errors[0] = -0.02, 0.06
    found = share(gains, errors, rows, 0.01)
    assert found.above_zero[0] < 0.97 and (found.above_zero[1:] > 0.99).all()


def test_the_gains_of_large_owners_tell_a_small_one_that_it_gains_more() -> None:
    rows = np.array([60, *[600] * 8])
    known = share(np.array([0.0, *[0.02] * 8]), np.array([10.0, *[0.005] * 8]), rows, 0.01)
    assert 0.08 < known.mean[0] < 0.02 * 10**FALL and known.above_zero[0] > 0.9


def of(gain: float, error: float, rows: int = 200) -> Evidence:
    """Evidence of a score without classes, with this standard error: in windows of time, which have
    no more.
    """
    return Evidence(
        gain=gain,
        alone=0.7,
        federated=0.7 + gain,
        strata=np.array([0]),
        variances=np.array([error**2 * rows]),
        floors=np.array([0.0]),
        units=np.array([float(rows)]),
        freedom=np.array([rows - 1.0]),
        pairs=0.0,
        folds=4,
        repeats=3,
        in_time=True,
        rows=rows,
        fewest=rows,
    )


def decisions(*owners: Evidence) -> list[tuple[str, str]]:
    return [(v.decision, v.by) for v in decide(owners, 0.01)]


def test_own_rows_decide() -> None:
    found = decide([of(0.05, 0.01), of(-0.05, 0.01)], 0.01)
    assert [(v.decision, v.by) for v in found] == [("join", "own"), ("alone", "own")]
    assert found[0].low < 0.05 < found[0].high and found[0].more_rows is None
    assert decisions(of(0.001, 0.002), of(0.0, 0.002)) == [("same", "own")] * 2


def test_all_owners_decide_where_own_rows_lean_the_same_way() -> None:
    assert decisions(*[of(0.03, 0.02)] * 12) == [("join", "all")] * 12
    assert decisions(*[of(0.03, 0.02)] * 2) == [("join", "all")] * 2
    assert decisions(of(0.03, 0.02)) == [("undecided", "")]  # no others to learn from
    against = decisions(*[of(0.03, 0.02)] * 12, of(-0.04, 0.03))
    assert against[0] == ("join", "all") and against[-1][0] != "join"
    # below 0, but no evidence of a loss
    by_chance = decisions(*[of(0.03, 0.02)] * 12, of(-0.01, 0.03))
    assert by_chance[-1] == ("join", "all")

    assert decisions(*[of(-0.01, 0.02)] * 12) == [("alone", "all")] * 12


def test_windows_of_time_have_the_standard_error_of_repeated_draws() -> None:
    """A unit that is all of a fold has all its pairs: each would count twice in the unit's sum."""
    rng, window = np.random.default_rng(0), np.repeat(np.arange(10), 12)
    gains, errors = [], []
    for _ in range(150):
        y = rng.integers(2, size=120)
        of = [1 / (1 + np.exp(-(y * strength + rng.normal(size=120)))) for strength in (0.7, 1.2)]
        own, shared = (np.stack([1 - p, p], axis=1)[None] for p in of)
        one = evidence("auc", y, own, shared, window[None], unit=window)
        gains.append(one.gain)
        errors.append(standard_errors([one])[0][0])
    assert 0.85 < np.mean(errors) / np.std(gains) < 1.2


def test_windows_that_depend_on_themselves_widen_the_standard_errors_of_all_owners() -> None:
    """Rows of a window share a part: rows alone would say that they tell more."""
    rng, window = np.random.default_rng(0), np.repeat(np.arange(10), 12)

    def owner_of(shared: float) -> Evidence:
        loss = 5 + rng.normal(size=(2, 120))
        loss[1] += shared * rng.normal(size=10)[window]
        return evidence("mae", np.zeros(120), loss[:1], loss[1:], window[None], unit=window)

    apart, together = ([owner_of(part) for _ in range(20)] for part in (0.0, 0.8))
    # (20 + 180 (2 + 12 · 0.64) / 2.64) / 200 is 1.84²
    for found, times in ((apart, 1.0), (together, 1.84)):
        by_rows = standard_errors([replace(one, by_windows=np.nan) for one in found])[0]
        errors, freedom = standard_errors(found)
        assert errors / by_rows == pytest.approx(np.full(20, times), rel=0.2)
        assert (freedom > 100).all()  # an owner's windows have 9


def test_a_small_owner_among_large_ones_is_not_told_to_stay_alone() -> None:
    """Large owners gain nothing; the small one's own rows say that it gains."""
    found = decisions(of(0.05, 0.03, rows=60), *[of(0.0, 0.003, rows=800)] * 8)
    assert found[0][0] not in ("alone", "same") and {one[0] for one in found[1:]} == {"same"}


def test_one_owner_of_many_that_gains_by_chance_is_not_told_to_join() -> None:
    assert decisions(of(0.025, 0.01), of(0.0, 0.02))[0] == ("join", "own")
    assert decisions(of(0.025, 0.01), *[of(-0.005, 0.02)] * 19)[0] == ("undecided", "")


def test_an_undecided_owner_hears_how_many_rows_would_decide() -> None:
    (found,) = decide([of(0.02, 0.02, rows=100)], 0.01)
    assert found.decision == "undecided" and found.more_rows is not None
    rng, decided = np.random.default_rng(0), []
    prior, error = 1 / (1 / 0.02**2 + 1 / COMMON**2), 0.02 * np.sqrt(100 / found.more_rows)
    # the gain is known by 100 rows and the prior; then new rows
    for gain in rng.normal(0.02, np.sqrt(prior), 200):
        gain *= (found.more_rows / 100) ** -FALL
        (again,) = decide([of(gain + error * rng.normal(), error, rows=found.more_rows)], 0.01)
        decided.append(again.decision != "undecided")
    assert 0.7 < np.mean(decided) < 0.9
    assert decide([of(0.005, 0.5)], 0.01)[0].more_rows is None


def test_with_fewer_than_three_rows_of_a_class_nothing_is_said() -> None:
    y, alone, shared, folds = owner(n=40, gain=3.0)
    y[:] = 0
    y[:2] = 1
    few = evidence("auc", y, alone, shared, folds)
    assert few.fewest == 2 and decide([few], 0.01)[0].decision == "too few"
    one_class = evidence("auc", np.zeros(40, np.int64), alone, shared, folds)
    assert (
        np.isnan(one_class.gain) and decide([one_class, of(0.05, 0.01)], 0.01)[1].decision == "join"
    )


@pytest.mark.parametrize("metric", METRICS)
def test_equal_predictions_are_never_a_reason_to_join(metric: str) -> None:
    y, alone, _, folds = owner(metric, n=30)
    verdicts = decide([evidence(metric, y, alone, alone, folds)] * 4, 0.01)
    assert {v.decision for v in verdicts} <= {"same", "undecided"} and verdicts[0].gain == 0
    if metric == "accuracy":  # 30 equal answers do not show that 0.01 of all are equal
        assert decide([evidence(metric, y, alone, alone, folds)], 0.01)[0].decision == "undecided"


def simulated(owners: int, n: int, gain: Callable[[int], float], seed: int) -> list[OwnerVerdict]:
    found = [
        evidence("auc", *owner(n=n, gain=gain(i), seed=1000 * seed + i)) for i in range(owners)
    ]
    return decide(found, 0.01)


def test_labels_that_nothing_predicts_better_are_rarely_a_reason_to_join() -> None:
    """Of 600 owners that gain nothing at most 3 % join; of 120 that gain 0.06 and more most do."""
    joins = [
        v.decision == "join" for seed in range(100) for v in simulated(6, 80, lambda i: 0.0, seed)
    ]
    assert np.mean(joins) <= 0.03
    gains = [
        v.decision == "join" for seed in range(20) for v in simulated(6, 80, lambda i: 0.5, seed)
    ]
    assert np.mean(gains) > 0.6


def test_the_order_of_owners_does_not_matter() -> None:
    found = [evidence("auc", *owner(n=60 + 20 * i, gain=0.2 * i, seed=i)) for i in range(6)]
    first, second = decide(found, 0.01), decide(found[::-1], 0.01)[::-1]
    assert [v.decision for v in first] == [v.decision for v in second]
    assert [v.p_gain for v in first] == pytest.approx([v.p_gain for v in second])


# -- the choice ------------------------------------------------------------------------------------


def test_the_best_candidate_is_best_over_owners_and_folds() -> None:
    rng = np.random.default_rng(0)
    scores, weights = rng.random((5, 2, 4, 3)), np.array([1.0, 2.0, 0.5])
    by_hand = np.average(scores.mean(2), axis=-1, weights=weights).argmax(0)
    np.testing.assert_array_equal(best(scores, weights), by_hand)
    scores[3] += 1
    assert (best(scores, weights) == 3).all() and best(scores[:, 0], weights) == 3
    scores[3, :, :, 1:] = np.nan  # undefined scores do not count
    assert (best(scores, weights) == 3).all()


@pytest.mark.parametrize("metric", METRICS)
def test_scores_to_choose_by_are_those_that_are_reported(metric: str) -> None:
    y, one = predicted(metric, 60, seed=3)
    models = np.stack([one, predicted(metric, 60, seed=4)[1], one])
    priors = np.full((60, 3), 1 / 3)
    by_hand = [contributions(metric, y, each, np.zeros(60), priors)[0] for each in models]
    np.testing.assert_allclose(scores_of(metric, y, models, priors), by_hand)
    if metric == "auc":
        assert np.isnan(scores_of(metric, np.zeros(60, np.int64), models)).all()


def test_decisions_on_evidence_do_not_change_with_equal_inputs() -> None:
    one = of(0.02, 0.01)
    assert decide([one, replace(one)], 0.01) == decide([one, replace(one)], 0.01)
