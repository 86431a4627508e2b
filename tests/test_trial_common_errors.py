"""Owners whose rows are of the same days, or of the same patients: their errors have a part in
common.
"""

from dataclasses import replace

import numpy as np
import pytest

from fedloom.experiment.trial import sharing
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.evidence import Evidence, correlations, evidence

DAYS = np.repeat(np.arange(100), 2)


def owners_of(
    count: int, alike: float, rng: np.random.Generator, worth: float = 0.0
) -> list[Evidence]:
    """Owners with rows of the same days, which move the gains of all of them: their errors have
    this correlation.
    """
    weather = rng.normal(size=100)[DAYS] / np.sqrt(2)
    found = []
    for _ in range(count):
        gains = (
            worth
            + np.sqrt(alike) * weather
            + np.sqrt(1 - alike) * rng.normal(size=100)[DAYS] / np.sqrt(2)
        )
        alone, shared = 5.0 + np.stack([gains + rng.normal(size=200) / 2, np.zeros(200)])
        folds = DAYS // 10
        one = evidence(
            "mae", np.zeros(200), alone[None], shared[None], folds[None], unit=folds, together=DAYS
        )
        found.append(one)  # its gain is relative: a fifth of `worth`
    return found


def test_the_common_part_of_errors_is_found() -> None:
    """Beside the weather rows have a noise of their own: a third of the variance of a day's sum."""
    rng = np.random.default_rng(0)
    for alike in (0.0, 0.3, 0.8):
        found = [correlations(owners_of(8, alike, rng))[0, 1] for _ in range(20)]
        assert np.mean(found) == pytest.approx(alike * 0.8, abs=0.05)


def test_only_owners_that_share_days_have_common_errors() -> None:
    first, second, third = owners_of(3, 0.8, np.random.default_rng(1))
    assert third.clusters is not None
    elsewhere = replace(third, clusters=replace(third.clusters, names=third.clusters.names + 1000))
    found = correlations([first, second, elsewhere])
    assert found[0, 1] > 0.3 and found[0, 2] == found[1, 2] == 0
    np.testing.assert_array_equal(correlations([first, elsewhere]), np.eye(2))
    np.testing.assert_array_equal(correlations([first, replace(second, clusters=None)]), np.eye(2))


def test_days_in_common_do_not_count_as_evidence_of_each_owner() -> None:
    """12 owners without a gain, on the same days: nearly all of them join, or none. Taken as
    independent they join in more than twice as many federations.
    """
    rng = np.random.default_rng(2)
    worlds = [owners_of(12, 0.7, rng) for _ in range(50)]

    def joins(owners: list[Evidence]) -> float:
        return float(np.mean([verdict.decision == "join" for verdict in decide(owners, 0.01)]))

    known = np.mean([joins(owners) for owners in worlds])
    independent = np.mean(
        [joins([replace(one, clusters=None) for one in owners]) for owners in worlds]
    )
    assert known < 0.1 and independent > 2 * known
    gain = [joins(owners_of(12, 0.7, rng, worth=1.0)) for _ in range(20)]
    assert np.mean(gain) > 0.9


def test_the_posterior_is_that_of_one_normal_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one spread, and owners that are all alike, gains and estimates are jointly normal."""
    rng, spread = np.random.default_rng(3), 0.03
    monkeypatch.setattr(sharing, "SPREADS", np.array([spread]))
    monkeypatch.setattr(sharing, "UNLIKE", 1e-30)
    gains = rng.normal(size=5) * 0.05
    errors = rng.uniform(0.01, 0.05, 5)
    rows = rng.integers(50, 500, 5)
    alike = np.full((5, 5), 0.4) + 0.6 * np.eye(5)
    found = sharing.share(gains, errors, rows, 0.01, alike)
    size = (rows / np.exp(np.log(rows).mean())) ** -sharing.FALL
    prior = sharing.COMMON**2 * np.outer(size, size) + np.diag((spread * size) ** 2)
    told = prior @ np.linalg.inv(prior + np.outer(errors, errors) * alike)
    np.testing.assert_allclose(found.mean, told @ gains, rtol=1e-6)
    np.testing.assert_allclose(np.square(found.deviation), np.diag(prior - told @ prior), rtol=1e-6)


def test_errors_that_are_not_correlated_are_independent() -> None:
    gains, errors, rows = np.array([0.03, 0.01, -0.02]), np.full(3, 0.02), np.array([60, 90, 200])
    plain, none = (sharing.share(gains, errors, rows, 0.01, alike) for alike in (None, np.eye(3)))
    np.testing.assert_array_equal(plain.above_zero, none.above_zero)
