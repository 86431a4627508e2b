"""Models of scikit-learn, seeded and on one thread, that black boxes and owners' own models share.

Each function takes the seed and whether a number is to be predicted, and returns the unfitted object.
"""

from typing import Any


def forest(seed: int, number: bool) -> Any:
    """A random forest of 50 trees."""
    from sklearn import ensemble  # its import takes a second

    kind = ensemble.RandomForestRegressor if number else ensemble.RandomForestClassifier
    return kind(50, n_jobs=1, random_state=seed)


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


def with_few_bins(model: Any, rows: int) -> Any:
    """The unfitted model; boosting gets no more bins than it has rows, which gives the same trees in less time."""
    if hasattr(model, "max_bins"):
        model.set_params(max_bins=min(model.max_bins, max(rows, 2)))
    return model
