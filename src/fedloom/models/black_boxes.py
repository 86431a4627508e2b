"""Black boxes: classifiers that offer only `fit` and `predict_proba`.

`forest`, `boosting`, `logistic` and `knn` are scikit-learn's, seeded and on one thread. One of yours is
`package.module:factory`, which is called with `(input_shape, classes)` and returns an object with the two methods; rows
are (n, d) float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.core.errors import ModelError
from fedloom.models import custom


@dataclass(frozen=True)
class BlackBoxSpec:
    """One black box of the registry."""

    title: str
    """A description in one line."""
    builder: Callable[[int], Any]
    """The seed → the unfitted object."""


def _forest(seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier  # its import takes a second

    return RandomForestClassifier(50, n_jobs=1, random_state=seed)


def _boosting(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=30, learning_rate=0.2, max_leaf_nodes=8, min_samples_leaf=5, early_stopping=False, random_state=seed
    )


def _logistic(seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=200, random_state=seed)


class _KNeighbors:
    """Up to five nearest neighbours, weighted by their inverse distance."""

    def fit(self, x: Any, y: Any) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        self._inner = KNeighborsClassifier(min(5, len(x)), weights="distance", n_jobs=1).fit(x, y)
        self.classes_ = self._inner.classes_

    def predict_proba(self, x: Any) -> Any:
        return self._inner.predict_proba(x)


BLACK_BOXES: dict[str, BlackBoxSpec] = {
    "forest": BlackBoxSpec("random forest of 50 trees", _forest),
    "boosting": BlackBoxSpec("30 rounds of gradient boosting, trees of at most 8 leaves", _boosting),
    "logistic": BlackBoxSpec("logistic regression with an L2 penalty", _logistic),
    "knn": BlackBoxSpec(
        "5 nearest neighbours; others' answers as their most probable class", lambda seed: _KNeighbors()
    ),
}


def is_black_box(name: str, input_shape: tuple[int, ...], classes: int) -> bool:
    """Whether a name of a pool is that of a black box, not of a network. A user's factory is called to find out.

    Raises:
        ModelError: the factory fails, it returns neither, or it returns the same object twice.
    """
    if ":" not in name:
        return name in BLACK_BOXES
    model = custom.make(name, input_shape, classes)
    if isinstance(model, nn.Module):
        return False
    if not all(callable(getattr(model, method, None)) for method in ("fit", "predict_proba")):
        raise ModelError(
            f"{name!r} must return a torch.nn.Module, or an object with fit and predict_proba, not a "
            f"{type(model).__name__}."
        )
    if custom.make(name, input_shape, classes) is model:
        raise ModelError(f"{name!r} must return a new object at each call, but returned the same one twice.")
    return True


def make(name: str, input_shape: tuple[int, ...], classes: int, seed: int) -> Any:
    """A new, unfitted object of this name. Raises ModelError."""
    return custom.make(name, input_shape, classes) if ":" in name else BLACK_BOXES[name].builder(seed)
