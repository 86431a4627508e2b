"""Boosted trees and scikit-learn's on five sets, with the same settings: `python -m
benchmarks.trees_accuracy`.

Scores are of all rows, each predicted by trees of the other four fifths: accuracy, AUC for two
classes, R² of a number, in percent. Repetitions deal the rows anew; of the differences the mean,
the least and the largest are shown. scikit-learn's `HistGradientBoosting*` is fitted to the bins
that fedloom agrees on, and to the columns as they are. Its trees have all leaves to the depth, as
fedloom's. Trees of several owners are those of one to the bit (`tests/methods/test_fedboost.py`),
so rows are in one place here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import KFold

from fedloom.trees import boosting, losses
from fedloom.trees.bins import Bins, frequent, own_edges, own_spread
from fedloom.trees.exact import STEP, probabilities
from fedloom.trees.histograms import cells_of
from fedloom.trees.model import joined

ROUNDS, DEPTH, RATE, L2, BINS = 100, 6, 0.1, 1.0, 64


def made() -> tuple[np.ndarray, np.ndarray]:
    """2,000 rows with two categories and a tenth of the numbers missing."""
    x, y = datasets.make_classification(
        2000, 12, n_informative=8, n_redundant=2, flip_y=0.05, random_state=0
    )
    rng = np.random.default_rng(0)
    x[:, 10:] = np.digitize(x[:, 10:], [-2, -1, 0, 1, 2])
    x[:, :10][rng.random((2000, 10)) < 0.1] = np.nan
    return x, y


SETS: dict[str, tuple[Callable[[], tuple[np.ndarray, np.ndarray]], tuple[int, ...], int]] = {
    "breast cancer": (lambda: datasets.load_breast_cancer(return_X_y=True), (), 5),
    "wine": (lambda: datasets.load_wine(return_X_y=True), (), 5),
    "digits": (lambda: datasets.load_digits(return_X_y=True), (), 1),
    "diabetes": (lambda: datasets.load_diabetes(return_X_y=True), (), 5),
    "made, with gaps and words": (made, (10, 11), 5),
}
"""Rows and labels, the columns that are categories, and repetitions."""


def layout_of(x: np.ndarray, words: tuple[int, ...]) -> Bins:
    """The bins of rows x (n, F)."""
    category = np.isin(np.arange(x.shape[1]), words)
    edges = list(own_edges(x, BINS))
    for f in words:
        edges[f] = frequent(np.bincount(x[~np.isnan(x[:, f]), f].astype(int)), BINS)
    return Bins(tuple(edges), category)


def ours(layout: Bins, bins: np.ndarray, y: np.ndarray, new: np.ndarray, least: int) -> np.ndarray:
    """Probabilities (n, K), or numbers (n,), of new rows, as FedBoost predicts."""
    number = y.dtype.kind == "f"
    mean, sd = (y.mean(), y.std()) if number else (0.0, 1.0)
    z = ((y - mean) / sd).astype(np.float32) if number else y
    most = int(np.ceil(np.log2(np.abs(z).max() + 1e-9))) if number else 0
    if number:
        loss: losses.Loss = losses.of_numbers(len(y), most, own_spread(z, BINS))
    else:
        loss = losses.of_classes(len(y))
    first = boosting.base(None if number else np.bincount(y))
    scores = np.repeat(first.value, len(y), axis=1)
    how = boosting.BoostingSettings(DEPTH, least, RATE, L2)
    parts, _ = boosting.grow(layout, bins, cells_of(bins, layout), z, scores, loss, ROUNDS, how)
    found = joined([first, *parts]).scores(new, len(scores))
    if number:
        return mean + sd * STEP * found[0]
    p = probabilities(found)
    return np.stack([1 - p[0], p[0]], 1) if len(p) == 1 else p.T


def theirs(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, least: int, words: tuple[int, ...]
) -> np.ndarray:
    """As `ours`, by scikit-learn."""
    kind: Any = (
        HistGradientBoostingRegressor if y.dtype.kind == "f" else HistGradientBoostingClassifier
    )
    model = kind(
        max_iter=ROUNDS,
        learning_rate=RATE,
        l2_regularization=L2,
        max_depth=DEPTH,
        max_leaf_nodes=None,
        min_samples_leaf=least,
        early_stopping=False,
        categorical_features=list(words) or None,
    ).fit(x, y)
    found: np.ndarray = model.predict(new) if y.dtype.kind == "f" else model.predict_proba(new)
    return found


def gaps(bins: np.ndarray) -> np.ndarray:
    """Bins as numbers for scikit-learn, NaN for missing values."""
    return np.where(bins == 0, np.nan, bins.astype(np.float64))


def scores(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """In percent, by name."""
    if y.dtype.kind == "f":
        return {"R²": 100 * float(r2_score(y, p))}
    found = {"accuracy": 100 * float(accuracy_score(y, p.argmax(1)))}
    return {**found, "AUC": 100 * float(roc_auc_score(y, p[:, 1]))} if p.shape[1] == 2 else found


def repeated(name: str) -> Iterator[list[dict[str, float]]]:
    """The scores of ours, of theirs on the same bins, and of theirs on the columns, for each
    repetition.
    """
    make, words, repetitions = SETS[name]
    x, y = make()
    x = x.astype(np.float32)
    for seed in range(repetitions):
        found: list[list[np.ndarray]] = [[], [], []]
        order = []
        for train, test in KFold(5, shuffle=True, random_state=seed).split(x):
            layout, least = layout_of(x[train], words), 20 if len(train) >= 2000 else 5
            own, new = layout.of(x[train]), layout.of(x[test])
            found[0].append(ours(layout, own, y[train], new, least))
            found[1].append(theirs(gaps(own), y[train], gaps(new), least, words))
            found[2].append(theirs(x[train], y[train], x[test], least, words))
            order.append(test)
        truth = y[np.concatenate(order)]
        yield [scores(truth, np.concatenate(parts)) for parts in found]


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| set | score | ours | scikit-learn, same bins | ours minus it | scikit-learn, its bins "
        "| ours minus it |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or SETS:
        runs = list(repeated(name))
        for score in runs[0][0]:
            mine, same, plain = (np.array([run[i][score] for run in runs]) for i in range(3))
            apart = [
                f"{(a := mine - b).mean():+.2f} ({a.min():+.2f} to {a.max():+.2f})"
                for b in (same, plain)
            ]
            cells = [
                f"{mine.mean():.2f}",
                f"{same.mean():.2f}",
                apart[0],
                f"{plain.mean():.2f}",
                apart[1],
            ]
            print(f"| {name}, {len(runs)} times | {score} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
