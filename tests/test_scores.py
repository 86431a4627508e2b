"""Scores of probabilities, against scikit-learn and closed forms."""

import numpy as np
import pytest

from fedloom.core.scores import auc, balanced_accuracy, calibration_error, log_loss
from fedloom.experiment.run.evaluate import classifier_metrics


def drawn(classes: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Every class occurs; probabilities are rounded, so that some are equal."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(classes, size=rows - classes)])
    p = rng.dirichlet(np.ones(classes), size=rows).round(2) + 1e-3
    return y, p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(classes: int, seed: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    y, p = drawn(classes, 80, seed)
    options = {"multi_class": "ovr", "average": "macro"} if classes > 2 else {}
    assert auc(y, p) == pytest.approx(
        metrics.roc_auc_score(y, p if classes > 2 else p[:, 1], **options)
    )
    predicted = p.argmax(axis=1)
    assert balanced_accuracy(y, predicted) == pytest.approx(
        metrics.balanced_accuracy_score(y, predicted)
    )
    assert log_loss(y, p) == pytest.approx(metrics.log_loss(y, p, labels=range(classes)))


def test_calibration_is_that_of_scikit_learn_s_curve() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    rng = np.random.default_rng(3)
    top = rng.uniform(0.51, 0.99, 500)
    y = (rng.random(500) < top**2).astype(int)
    p = np.stack([1 - top, top], axis=1)
    share, mean = calibration.calibration_curve(y, top, n_bins=10)
    rows = np.histogram(top, bins=np.linspace(0, 1, 11))[0]
    assert calibration_error(y, p) == pytest.approx(
        (np.abs(share - mean) * rows[rows > 0]).sum() / 500
    )


def test_classes_that_do_not_occur_do_not_count() -> None:
    y, p = drawn(3, 60, 0)
    kept = y != 2
    both = np.mean(
        [auc((y[kept] == k).astype(int), np.stack([1 - p[kept, k], p[kept, k]], 1)) for k in (0, 1)]
    )
    assert auc(y[kept], p[kept]) == pytest.approx(both)
    assert np.isnan(auc(np.zeros(5, int), np.full((5, 2), 0.5)))


def test_closed_forms() -> None:
    y = np.array([0, 0, 1, 1])
    sure = np.eye(2)[y]
    assert auc(y, sure) == 1 and auc(y, 1 - sure) == 0 and auc(y, np.full((4, 2), 0.5)) == 0.5
    assert calibration_error(y, sure) == 0 and calibration_error(y, 1 - sure) == 1
    assert calibration_error(y, np.array([[0.75, 0.25]] * 4)) == pytest.approx(0.25)
    assert (
        log_loss(y, np.full((4, 2), 0.5)) == pytest.approx(np.log(2))
        and log_loss(y, 1 - sure) < 16.2
    )
    assert balanced_accuracy(np.array([0, 0, 0, 1]), np.zeros(4, int)) == 0.5


def test_a_run_s_metrics_have_the_same_area() -> None:
    """One definition, also where a class has no row: the mean over those that do."""
    rng = np.random.default_rng(0)
    for classes in (2, 3, 5):
        p = rng.dirichlet([1.0] * classes, size=12)
        for y in (rng.integers(0, classes, 12), np.arange(12) % 2, np.zeros(12, dtype=int)):
            assert classifier_metrics(p, y).auc == pytest.approx(auc(y, p), nan_ok=True)
