"""Black boxes: classifiers that offer only `fit` and `predict_proba`.

`forest`, `boosting`, `logistic` and `knn` are scikit-learn's, seeded and on one thread. `lightgbm`, `xgboost`,
`catboost` and `tabicl` are of libraries that are extras of fedloom. One of yours is `package.module:factory`, which is
called with `(input_shape, classes)` and returns an object with the two methods; rows are (n, d) float32.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    extra: str = ""
    """The package that it needs, an extra of the same name."""


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


def _lightgbm(seed: int) -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(
        min_child_samples=5, random_state=seed, n_jobs=1, deterministic=True, force_row_wise=True, verbose=-1
    )


class _XGBoost:
    """XGBoost, for any classes: its own `fit` takes labels from 0 on only, none left out."""

    def __init__(self, seed: int) -> None:
        from xgboost import XGBClassifier

        self._inner = XGBClassifier(random_state=seed, n_jobs=1, verbosity=0)

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> None:
        self.classes_, places = np.unique(y, return_inverse=True)
        self._inner.fit(x, places, sample_weight=sample_weight)

    def predict_proba(self, x: Any) -> Any:
        return self._inner.predict_proba(x)


def _catboost(seed: int) -> Any:
    from catboost import CatBoostClassifier

    return CatBoostClassifier(
        iterations=200, random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False
    )


def _tabicl(seed: int) -> Any:
    from tabicl import TabICLClassifier

    return TabICLClassifier(random_state=seed, device="cpu", n_jobs=1)


BLACK_BOXES: dict[str, BlackBoxSpec] = {
    "forest": BlackBoxSpec("random forest of 50 trees", _forest),
    "boosting": BlackBoxSpec("30 rounds of gradient boosting, trees of at most 8 leaves", _boosting),
    "logistic": BlackBoxSpec("logistic regression with an L2 penalty", _logistic),
    "knn": BlackBoxSpec(
        "5 nearest neighbours; others' answers as their most probable class", lambda seed: _KNeighbors()
    ),
    "lightgbm": BlackBoxSpec("LightGBM, 100 rounds", _lightgbm, "lightgbm"),
    "xgboost": BlackBoxSpec("XGBoost, 100 rounds", _XGBoost, "xgboost"),
    "catboost": BlackBoxSpec("CatBoost, 200 rounds", _catboost, "catboost"),
    "tabicl": BlackBoxSpec("TabICL, a pretrained network for tables that reads all rows at once", _tabicl, "tabicl"),
}


def check_installed(name: str) -> None:
    """Raise ModelError if a black box of the registry needs a package that is not installed."""
    extra = BLACK_BOXES[name].extra
    if extra and importlib.util.find_spec(extra) is None:
        raise ModelError(
            f"{name} needs the package {extra}, which is not installed; run: pip install 'fedloom[{extra}]'"
        )


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
