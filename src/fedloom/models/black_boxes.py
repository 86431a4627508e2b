"""Classifiers without a network: `fit` and `predict_proba` are all that they offer.

`forest`, `boosting` and `knn` are scikit-learn's, of one thread and seeded. One of yours is `package.module:factory`,
called with `(input_shape, classes)`, whose product has the two methods; rows come to it as (n, d) float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.core.errors import ModelError
from fedloom.models import custom


@dataclass(frozen=True)
class BlackBoxSpec:
    """One black box of the registry.

    Attributes:
        title: what it is, in a line.
        builder: the seed → the object, not fitted.
    """

    title: str
    builder: Callable[[int], Any]


def _forest(seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier  # it takes a second to import

    return RandomForestClassifier(50, n_jobs=1, random_state=seed)


def _boosting(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=30, learning_rate=0.2, max_leaf_nodes=8, min_samples_leaf=5, early_stopping=False, random_state=seed
    )


def _knn(seed: int) -> Any:
    return _Neighbours()


class _Neighbours:
    """The five nearest rows, or as many as there are; near ones count more."""

    def fit(self, x: Any, y: Any) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        self._inner = KNeighborsClassifier(min(5, len(x)), weights="distance", n_jobs=1).fit(x, y)
        self.classes_ = self._inner.classes_

    def predict_proba(self, x: Any) -> Any:
        return self._inner.predict_proba(x)


BLACK_BOXES: dict[str, BlackBoxSpec] = {
    "forest": BlackBoxSpec("random forest of 50 trees", _forest),
    "boosting": BlackBoxSpec("30 rounds of gradient boosting, trees of at most 8 leaves", _boosting),
    "knn": BlackBoxSpec("5 nearest neighbours; others' answers as their most probable class", _knn),
}


def is_black_box(name: str, input_shape: tuple[int, ...], classes: int) -> bool:
    """Whether a name of a pool means a black box and not a network. An own factory is tried.

    Raises:
        ModelError: an own factory can't be called so, or its product is neither; or it gives one object twice.
    """
    if ":" not in name:
        return name in BLACK_BOXES
    made = custom.make(name, input_shape, classes)
    if isinstance(made, nn.Module):
        return False
    if not offers(made):
        raise ModelError(
            f"{name!r} must return a torch.nn.Module, or an object with fit and predict_proba, not a "
            f"{type(made).__name__}"
        )
    if custom.make(name, input_shape, classes) is made:
        raise ModelError(f"{name!r} must return a new object at each call: it gave the same one twice")
    return True


def make(name: str, input_shape: tuple[int, ...], classes: int, seed: int) -> Any:
    """A new object of that name, not fitted. Raises ModelError."""
    return custom.make(name, input_shape, classes) if ":" in name else BLACK_BOXES[name].builder(seed)


def offers(made: object) -> bool:
    """Whether an object has what a black box needs."""
    return all(callable(getattr(made, method, None)) for method in ("fit", "predict_proba"))
