"""Black boxes: models that offer only `fit` and `predict_proba`, or `predict` for a number.

`forest`, `boosting`, `logistic` (of classes), `ridge` (of a number) and `knn` are scikit-learn's,
seeded and on one thread; `lightgbm`, `xgboost`, `catboost` and `tabicl` are of libraries that are
extras of fedloom. One of yours is `package.module:factory`, which is called with `(input_shape,
classes)`, with 1 for a number, and returns an object with the two methods; rows are (n, d) float32.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from fedloom.core.errors import ModelError
from fedloom.core.task import EVERY_TASK, TaskKind
from fedloom.models import custom
from fedloom.trees import plain_models


@dataclass(frozen=True)
class BlackBoxSpec:
    """One black box of the registry."""

    title: str
    """A description in one line."""
    builder: Callable[[int, bool], Any]
    """The seed, and whether it predicts a number → the unfitted object."""
    extra: str = ""
    """The package that it needs, an extra of the same name."""
    tasks: tuple[TaskKind, ...] = EVERY_TASK
    """What it can predict."""


class _KNeighbors:
    """Up to five nearest neighbours, weighted by their inverse distance."""

    def fit(self, x: Any, y: Any) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        self._inner = KNeighborsClassifier(min(5, len(x)), weights="distance", n_jobs=1).fit(x, y)
        self.classes_ = self._inner.classes_

    def predict_proba(self, x: Any) -> Any:
        return self._inner.predict_proba(x)


class _KNeighborsOfNumbers:
    """The same for a number."""

    def fit(self, x: Any, y: Any) -> None:
        from sklearn.neighbors import KNeighborsRegressor

        self._inner = KNeighborsRegressor(min(5, len(x)), weights="distance", n_jobs=1).fit(x, y)

    def predict(self, x: Any) -> Any:
        return self._inner.predict(x)


def _lightgbm(seed: int, number: bool) -> Any:
    import lightgbm

    kind = lightgbm.LGBMRegressor if number else lightgbm.LGBMClassifier
    return kind(
        min_child_samples=5,
        random_state=seed,
        n_jobs=1,
        deterministic=True,
        force_row_wise=True,
        verbose=-1,
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


def _catboost(seed: int, number: bool) -> Any:
    import catboost

    kind = catboost.CatBoostRegressor if number else catboost.CatBoostClassifier
    return kind(
        iterations=200, random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False
    )


def _xgboost(seed: int, number: bool) -> Any:
    if not number:
        return _XGBoost(seed)
    from xgboost import XGBRegressor

    return XGBRegressor(random_state=seed, n_jobs=1, verbosity=0)


def _tabicl(seed: int, number: bool) -> Any:
    from tabicl import TabICLClassifier

    return TabICLClassifier(random_state=seed, device="cpu", n_jobs=1)


BLACK_BOXES: dict[str, BlackBoxSpec] = {
    "forest": BlackBoxSpec("random forest of 50 trees", plain_models.forest),
    "boosting": BlackBoxSpec(
        "30 rounds of gradient boosting, trees of at most 8 leaves", plain_models.boosting
    ),
    "logistic": BlackBoxSpec(
        "logistic regression with an L2 penalty, of classes",
        plain_models.linear,
        tasks=("classes",),
    ),
    "ridge": BlackBoxSpec(
        "linear regression with an L2 penalty, of a number", plain_models.linear, tasks=("number",)
    ),
    "knn": BlackBoxSpec(
        "5 nearest neighbours; others' answers as their most probable class",
        lambda seed, number: _KNeighborsOfNumbers() if number else _KNeighbors(),
    ),
    "lightgbm": BlackBoxSpec("LightGBM, 100 rounds", _lightgbm, "lightgbm"),
    "xgboost": BlackBoxSpec("XGBoost, 100 rounds", _xgboost, "xgboost"),
    "catboost": BlackBoxSpec("CatBoost, 200 rounds", _catboost, "catboost"),
    "tabicl": BlackBoxSpec(
        "TabICL, a pretrained network for tables that reads all rows at once, of classes",
        _tabicl,
        "tabicl",
        ("classes",),
    ),
}


def check_task(name: str, kind: TaskKind) -> None:
    """Raise ModelError if a black box of the registry cannot predict a number, or classes."""
    if kind not in BLACK_BOXES[name].tasks:
        able = ", ".join(other for other, spec in BLACK_BOXES.items() if kind in spec.tasks)
        raise ModelError(
            f"{name} cannot predict {'a number' if kind == 'number' else 'classes'}: choose one "
            f"of {able}"
        )


def check_installed(name: str) -> None:
    """Raise ModelError if a black box of the registry needs a package that is not installed."""
    extra = BLACK_BOXES[name].extra
    if extra and importlib.util.find_spec(extra) is None:
        raise ModelError(
            f"{name} needs the package {extra}, which is not installed; run: pip install -e "
            f"'.[{extra}]'"
        )


def is_black_box(
    name: str, input_shape: tuple[int, ...], classes: int, number: bool = False
) -> bool:
    """Whether a name of a pool is that of a black box, not of a network. A user's factory is called
    to find out.
    `number`: whether it is to predict a number.

    Raises:
        ModelError: the factory fails, it returns neither, or it returns the same object twice; or a
            black box cannot predict it.
    """
    if ":" not in name:
        if name in BLACK_BOXES:
            check_task(name, "number" if number else "classes")
        return name in BLACK_BOXES
    model, asked = custom.make(name, input_shape, classes), "predict" if number else "predict_proba"
    if isinstance(model, nn.Module):
        return False
    if not all(callable(getattr(model, method, None)) for method in ("fit", asked)):
        raise ModelError(
            f"{name!r} must return a torch.nn.Module, or an object with fit and {asked}, not a "
            f"{type(model).__name__}."
        )
    if custom.make(name, input_shape, classes) is model:
        raise ModelError(
            f"{name!r} must return a new object at each call, but returned the same one twice."
        )
    return True


def make(
    name: str, input_shape: tuple[int, ...], classes: int, seed: int, number: bool = False
) -> Any:
    """A new, unfitted object of this name, for a number if `number`. Raises ModelError."""
    return (
        custom.make(name, input_shape, classes)
        if ":" in name
        else BLACK_BOXES[name].builder(seed, number)
    )
