"""Models of scikit-learn, seeded and on one thread, that black boxes and owners' own models share.

Each function takes the seed and whether a number is to be predicted, and returns the unfitted
object.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

TREES = 50
"""Trees of a random forest."""


def forest(seed: int, number: bool) -> Any:
    """A random forest of 50 trees."""
    from sklearn import ensemble  # its import takes a second

    kind = ensemble.RandomForestRegressor if number else ensemble.RandomForestClassifier
    return kind(TREES, n_jobs=1, random_state=seed)


class QuickForest:
    """The forest that `forest` is, in a quarter of its time on few rows, where checks before each
    tree take most of it.

    The shares of classes are the means of their indicators, and the squared errors of these add up
    to Gini's impurity, so that regression trees find the same splits; rounding may choose another
    one of equal splits.
    """

    def __init__(self, seed: int, number: bool) -> None:
        self._seed, self._number = seed, number

    def fit(self, x: np.ndarray, y: np.ndarray) -> "QuickForest":
        """Grow all trees on rows x (n, d) with labels y (n,)."""
        from sklearn.tree._criterion import MSE
        from sklearn.tree._splitter import BestSplitter
        from sklearn.tree._tree import DepthFirstTreeBuilder, Tree

        target = y.astype(np.float64)[:, None]
        if not self._number:
            self.classes_, place = np.unique(y, return_inverse=True)
            target = np.eye(len(self.classes_))[place]
        rows, (n, d), K = np.ascontiguousarray(x, np.float32), x.shape, target.shape[1]
        draw, self._trees = np.random.RandomState(self._seed), list[Any]()
        # seeded anew for each tree: a new one takes as long as a small tree
        state = np.random.RandomState(0)
        # What a DecisionTreeRegressor makes for each fit: leaves of one row, no limit of depth or
        # of gains.
        splitter = BestSplitter(
            MSE(K, n), d if self._number else max(1, int(np.sqrt(d))), 1, 0.0, state, None
        )
        builder = DepthFirstTreeBuilder(splitter, 2, 1, 0.0, np.iinfo(np.int32).max, 0.0)
        for seed in draw.randint(np.iinfo(np.int32).max, size=TREES):
            state.seed(seed)
            counts = np.bincount(state.randint(0, n, n, dtype=np.int32), minlength=n).astype(
                np.float64
            )
            state.seed(seed)
            tree = Tree(d, np.ones(K, np.intp), K)
            builder.build(tree, rows, target, counts, None)
            self._trees.append(tree)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The numbers (n,) of rows x (n, d)."""
        found: np.ndarray = self._mean(x)[:, 0]
        return found

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """The probabilities (n, K) of rows x (n, d)."""
        return self._mean(x)

    def _mean(self, x: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(x, np.float32)
        found: np.ndarray = np.mean(
            [tree.predict(rows).reshape(len(x), -1) for tree in self._trees], axis=0
        )
        return found


def boosting(seed: int, number: bool) -> Any:
    """Gradient boosting of 30 trees of at most 8 leaves."""
    from sklearn import ensemble

    kind = (
        ensemble.HistGradientBoostingRegressor
        if number
        else ensemble.HistGradientBoostingClassifier
    )
    return kind(
        max_iter=30,
        learning_rate=0.2,
        max_leaf_nodes=8,
        min_samples_leaf=5,
        early_stopping=False,
        random_state=seed,
    )


def quick_boosting(seed: int, number: bool) -> Any:
    """The same as `boosting`, with equal bits, in two thirds of its time on few rows."""
    plain = boosting(seed, number)
    return _quickly_binned(type(plain))(**plain.get_params())  # type: ignore[arg-type]


@cache
def _quickly_binned(kind: Any) -> Any:
    """A kind of gradient boosting that finds the borders of bins of all columns at once: each
    column as a task of its own takes as long as the trees.
    """

    class Quick(kind):  # type: ignore[misc]
        def _bin_data(self, x: np.ndarray, *how: Any, **more: Any) -> Any:
            mapper = self._bin_mapper
            if len(x) > mapper.subsample or not np.isfinite(x).all():
                return super()._bin_data(x, *how, **more)
            borders = _midpoints(x)
            many = [f for f, found in enumerate(borders) if len(found) >= mapper.n_bins - 1]
            if many:
                found = (
                    type(mapper)(mapper.n_bins, n_threads=mapper.n_threads)
                    .fit(x[:, many])
                    .bin_thresholds_
                )
                for f, quantiles in zip(many, found, strict=True):
                    borders[f] = quantiles
            mapper.bin_thresholds_, mapper.missing_values_bin_idx_ = borders, mapper.n_bins - 1
            mapper.n_bins_non_missing_ = np.array([len(found) + 1 for found in borders], np.uint32)
            mapper.is_categorical_ = np.zeros(len(borders), np.uint8)
            return mapper.transform(x)

    return Quick


def _midpoints(x: np.ndarray) -> list[np.ndarray]:
    """For each column of x (n, d), the midpoints between its values, ascending."""
    ordered = np.sort(x, axis=0).T
    middle, differs = (ordered[:, 1:] + ordered[:, :-1]) / 2, ordered[:, 1:] != ordered[:, :-1]
    return [found[which] for found, which in zip(middle, differs, strict=True)]


@cache
def quick(name: str) -> Callable[[int, bool], Any]:
    """`QuickForest` or `quick_boosting`, which use parts of scikit-learn that are not public;
    `forest` or `boosting` if these have changed in the installed version.
    """
    plain, other = {"forest": (forest, QuickForest), "boosting": (boosting, quick_boosting)}[name]
    x = np.random.RandomState(0).normal(size=(40, 3)).astype(np.float32)
    try:
        found, known = (kind(0, True).fit(x, x[:, 0]).predict(x) for kind in (other, plain))
        same = np.abs(found - known).mean() < 0.1  # of ties, rounding may choose another
    except Exception:  # whatever a changed signature brings
        return plain
    return other if same else plain


def linear(seed: int, number: bool) -> Any:
    """Ridge regression of a number, or logistic regression with an L2 penalty."""
    from sklearn import linear_model

    if number:
        return linear_model.Ridge(random_state=seed)
    return linear_model.LogisticRegression(max_iter=200, random_state=seed)


def can_split(model: Any, rows: np.ndarray) -> np.ndarray:
    """Which columns (d,) of rows (n, d) a model can use: those that vary, and in boosting by enough
    rows for a leaf.
    """
    least = min(
        getattr(model, "min_samples_leaf", 1) if hasattr(model, "max_bins") else 1, len(rows)
    )
    ordered = np.partition(rows, [least - 1, len(rows) - least], axis=0)
    found: np.ndarray = ordered[least - 1] < ordered[len(rows) - least]
    return found


def with_few_bins(model: Any, rows: int) -> Any:
    """The unfitted model; boosting gets no more bins than it has rows, which gives the same trees
    in less time.
    """
    if hasattr(model, "max_bins"):
        model.set_params(max_bins=min(model.max_bins, max(rows, 2)))
    return model
