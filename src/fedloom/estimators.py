"""scikit-learn estimators that train by a federation on this machine: in pipelines, searches and
cross-validation.

model = fedloom.FederatedClassifier("fedavg", iterations=300)
model.fit(X, y, groups=hospital)
model.predict_proba(X_new)
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import nn

from fedloom.api import run
from fedloom.core.errors import FedloomError
from fedloom.core.method import Method
from fedloom.core.statistics import constant, deviations
from fedloom.experiment.config.objects import arrays
from fedloom.methods import named

SHOWN = 10
"""Maximum number of classes in a message."""


class _Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators have in common: the parameters, standardized rows, and the run that
    trains.
    """

    def __init__(
        self,
        method: str = "fedavg",
        *,
        iterations: int = 200,
        clients: int = 3,
        models: Any = None,
        params: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.iterations = iterations
        self.clients = clients
        self.models = models
        self.params = params
        self.settings = settings
        self.random_state = random_state

    def _prepare(self, X: np.ndarray, groups: Any) -> None:
        """Fit the standardization, and remember the owners."""
        self.mean_, self.scale_, self._same = X.mean(axis=0), deviations(X), constant(X)
        self.owners_: Any = None
        self.models_: list[Any] = []
        self.summary_: dict[str, Any] = {}
        if groups is not None:
            groups = column_or_1d(groups)
            check_consistent_length(X, groups)
            self.owners_ = np.unique(groups)

    def _train(self, X: np.ndarray, y: np.ndarray, groups: Any, **task: Any) -> None:
        """Run the federation on standardized rows. All of them train, but those that a method
        shares as public rows.

        Raises:
            ValueError: a setting is invalid, or the method trains no model that predicts.
        """
        owners: dict[str, Any] = {"clients": min(self.clients, len(X)), "partition": "iid"}
        group = None
        if self.owners_ is not None:
            owners, group = {}, np.searchsorted(self.owners_, column_or_1d(groups))
        rows = self._standardized(X), y
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        settings: dict[str, Any] = {
            "evaluate": {"points": 1},
            **task,
            **owners,
            **(self.settings or {}),
        }
        settings |= {"iterations": self.iterations, "seed": seed, "params": dict(self.params or {})}
        if isinstance(local := settings.get("local"), Mapping):
            settings["local"] = self._worded(local)
        try:
            method = self.method if isinstance(self.method, Method) else named(self.method)
            if method.setting == "vertical":
                raise ValueError(
                    f"{method.name} joins columns of several parties: choose a method of rows, "
                    "as 'fedavg'"
                )
            held = None if method.every_row else rows
            known = [str(label) for label in getattr(self, "classes_", ())]
            dataset = arrays(rows, held, group, task["task"], known)
            result = run(self.method, data=dataset, models=self.models or "mlp", **settings)
            self.models_ = [result.model] if result.model is not None else result.models
        except FedloomError as error:
            raise ValueError(str(error)) from error
        self.summary_ = result.summary
        if self.owners_ is not None:
            names = {f"owner client-{i}": f"owner {name}" for i, name in enumerate(self.owners_)}
            for table in self.summary_.get("learned", ()):
                table["rows"] = [[names.get(cell, cell), *row] for cell, *row in table["rows"]]

    def _outputs(
        self, X: np.ndarray, groups: Any, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> np.ndarray:
        """Outputs (n, k): of the one model, of the model of each row's owner, or the mean over all
        models.
        """
        x = torch.from_numpy(self._standardized(X))
        if groups is None or len(self.models_) == 1:
            return np.asarray(np.mean([_asked(model, x, read) for model in self.models_], axis=0))
        groups = column_or_1d(groups)
        check_consistent_length(X, groups)
        if self.owners_ is None or not np.isin(groups, self.owners_).all():
            raise ValueError(
                "groups names an owner that took no part in training; leave groups out to ask "
                "all models"
            )
        numbers = np.searchsorted(self.owners_, groups)
        every = np.stack([_asked(model, x, read) for model in self.models_])
        return np.asarray(every[numbers, np.arange(len(x))])

    def _worded(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of local training with the words of classes, by which the run knows them.

        Raises:
            ValueError: weights of a class that is not among the labels.
        """
        weights = local.get("class_weights")
        names = [str(label) for label in getattr(self, "classes_", ())]
        if not isinstance(weights, Mapping) or not names:
            return {**local}
        if unknown := [str(label) for label in weights if str(label) not in names]:
            raise ValueError(
                f"local.class_weights: y has no class {unknown[0]!r}, but "
                f"{', '.join(names[:SHOWN])}"
            )
        return {
            **local,
            "class_weights": {str(label): weight for label, weight in weights.items()},
        }

    def _standardized(self, X: np.ndarray) -> np.ndarray:
        """(n, d) float32; 0 in columns that were constant in training."""
        rows = np.where(self._same, 0.0, (X - self.mean_) / self.scale_)
        return np.asarray(rows, dtype=np.float32)


def _asked(
    model: nn.Module, x: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(read(model(x)).double().numpy())


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """A classifier trained by a federation whose clients are the `groups` of the rows.

    The rows are standardized by their mean and standard deviation. Every row trains, unless the
    method shares some as public rows: `score` needs rows of its own, as in cross-validation. If the
    method gives all clients one model, that predicts; otherwise the mean of the probabilities of
    all clients' models does, and `predict(X, groups=…)` asks the model of each row's owner.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = FederatedClassifier(iterations=20).fit(X, y, groups=np.arange(150) % 3)
        >>> model.predict_proba(X[:2]).shape, model.predict(X[:2]).shape
        ((2, 3), (2,))

    Args:
        method: a method of rows, also of trees or linear models: its name or page. Of `fedglm` and
            `fedcox`, 10 iterations are a Newton step.
        iterations: local steps or epochs, as the method counts them: see `fedloom.run`.
        clients: number of clients, to which rows are assigned at random if `fit` gets no groups.
        models: the network of the clients, as in `fedloom.run`; None for a small multilayer
            perceptron.
        params: settings of the method, such as {"lr": 0.01}.
        settings: further settings of the run, such as {"aggregate": {"rule": "median"}}.
        random_state: seed of all draws.

    Attributes:
        classes_: (K,) the labels.
        models_: the trained networks, one for all or one for each client, for standardized rows.
        owners_: the groups, in the order of the clients; None if `fit` got no groups.
        summary_: the content of the run's `result.json`; its accuracies are on the training rows.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X (n, d) with labels y (n,), whose owners are `groups` (n,).

        Raises:
            ValueError: the rows, or a setting, are invalid.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self._prepare(X, groups)
        if len(self.classes_) > 1:  # else there is nothing to learn
            self._train(X, codes, groups, task="classes")
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """Probabilities (n, K) of the classes; with `groups`, by the model of each row's owner.

        Raises:
            ValueError: an owner took no part in training, or the rows are invalid.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if not self.models_:
            return np.ones((len(X), 1))
        return self._outputs(X, groups, lambda logits: torch.softmax(logits, -1))

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class (n,) of each row; `groups` as in `predict_proba`."""
        best = self.predict_proba(X, groups).argmax(axis=1)
        return np.asarray(self.classes_[best])


class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """A model of numbers trained by a federation whose clients are the `groups` of the rows.

    Rows and numbers are standardized by their mean and standard deviation. Parameters and
    attributes are those of `FederatedClassifier`, without `classes_`.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> model = FederatedRegressor(iterations=20, models="linear").fit(X, y, groups=np.arange(len(y)) % 3)
        >>> model.predict(X[:2]).shape
        (2,)
    """  # noqa: E501

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X (n, d) with numbers y (n,), whose owners are `groups` (n,).

        Raises:
            ValueError: the rows, or a setting, are invalid.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        if y.dtype.kind not in "biuf":
            raise ValueError("y must have numbers, not text: FederatedClassifier predicts classes")
        self._prepare(X, groups)
        self.level_, self.spread_ = float(y.mean()), float(deviations(y))
        if not constant(y):  # else there is nothing to learn
            self._train(
                X, (y - self.level_) / self.spread_, groups, task="number", label_scale=(0.0, 1.0)
            )
        return self

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The numbers (n,) of the rows; with `groups`, by the model of each row's owner.

        Raises:
            ValueError: an owner took no part in training, or the rows are invalid.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if not self.models_:
            return np.full(len(X), self.level_)
        return self.level_ + self.spread_ * self._outputs(X, groups, lambda out: out[:, :1])[:, 0]
