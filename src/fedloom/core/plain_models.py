"""Models of scikit-learn, seeded and on one thread, that black boxes and owners' own models share.

Each function takes the seed and whether a number is to be predicted, and returns the unfitted object.
"""

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
    """The forest that `forest` is, in half of its time on few rows, where checks between trees take most of it.

    The shares of classes are the means of their indicators, and the squared errors of these add up to Gini's impurity,
    so that regression trees find the same splits; rounding may choose another one of equal splits.
    """

    def __init__(self, seed: int, number: bool) -> None:
        self._seed, self._number = seed, number

    def fit(self, x: np.ndarray, y: np.ndarray) -> "QuickForest":
        """Grow all trees on rows x (n, d) with labels y (n,)."""
        import sklearn
        from sklearn.tree import DecisionTreeRegressor

        target = y.astype(np.float64)[:, None]
        if not self._number:
            self.classes_, place = np.unique(y, return_inverse=True)
            target = np.eye(len(self.classes_))[place]
        rows, columns, n = np.ascontiguousarray(x, np.float32), None if self._number else "sqrt", len(y)
        draw, self._trees = np.random.RandomState(self._seed), list[Any]()
        state = np.random.RandomState(0)  # seeded anew for each tree: a new one takes as long as a small tree
        with sklearn.config_context(skip_parameter_validation=True, assume_finite=True):
            for seed in draw.randint(np.iinfo(np.int32).max, size=TREES):
                state.seed(seed)
                counts = np.bincount(state.randint(0, n, n, dtype=np.int32), minlength=n).astype(np.float64)
                state.seed(seed)
                tree = DecisionTreeRegressor(max_features=columns, random_state=state)
                self._trees.append(tree.fit(rows, target, counts, check_input=False).tree_)
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
        found: np.ndarray = np.mean([tree.predict(rows).reshape(len(x), -1) for tree in self._trees], axis=0)
        return found


def boosting(seed: int, number: bool) -> Any:
    """Gradient boosting of 30 trees of at most 8 leaves."""
    from sklearn import ensemble

    kind = ensemble.HistGradientBoostingRegressor if number else ensemble.HistGradientBoostingClassifier
    return kind(
        max_iter=30, learning_rate=0.2, max_leaf_nodes=8, min_samples_leaf=5, early_stopping=False, random_state=seed
    )


def linear(seed: int, number: bool) -> Any:
    """Ridge regression of a number, or logistic regression with an L2 penalty."""
    from sklearn import linear_model

    if number:
        return linear_model.Ridge(random_state=seed)
    return linear_model.LogisticRegression(max_iter=200, random_state=seed)


def can_split(model: Any, rows: np.ndarray) -> np.ndarray:
    """Which columns (d,) of rows (n, d) a model can use: those that vary, and in boosting by enough rows for a leaf."""
    least = min(getattr(model, "min_samples_leaf", 1) if hasattr(model, "max_bins") else 1, len(rows))
    ordered = np.partition(rows, [least - 1, len(rows) - least], axis=0)
    found: np.ndarray = ordered[least - 1] < ordered[len(rows) - least]
    return found


def with_few_bins(model: Any, rows: int) -> Any:
    """The unfitted model; boosting gets no more bins than it has rows, which gives the same trees in less time."""
    if hasattr(model, "max_bins"):
        model.set_params(max_bins=min(model.max_bins, max(rows, 2)))
    return model
