"""scikit-learn estimators that train by a federation on this machine: in pipelines, searches and cross-validation.

model = fedloom.FederatedClassifier("fedavg", iterations=300)
model.fit(X, y, groups=hospital)
model.predict_proba(X_new)
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import nn

from fedloom.api import run
from fedloom.core.errors import FedloomError


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier trained by a federation whose clients are the `groups` of the rows.

    The rows are standardized by their mean and standard deviation. Every row trains: `score` needs rows of its own, as
    in cross-validation. If the method gives all clients one model, that predicts; otherwise the mean of the
    probabilities of all clients' models does, and `predict(X, groups=…)` asks the model of each row's owner.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = FederatedClassifier(iterations=20, models="mlp").fit(X, y, groups=np.arange(150) % 3)
        >>> model.predict_proba(X[:2]).shape
        (2, 3)

    Args:
        method: a horizontal method: its name or page.
        iterations: local steps or epochs, as the method counts them: see `fedloom.run`.
        clients: number of clients, to which rows are assigned at random if `fit` gets no groups.
        models: the network of the clients, as in `fedloom.run`; None for a small multilayer perceptron.
        params: settings of the method, such as {"lr": 0.01}.
        settings: further settings of the run, such as {"aggregate": {"rule": "median"}}.
        random_state: seed of all draws.

    Attributes:
        classes_: (K,) the labels.
        models_: the trained networks, one for all or one for each client, for standardized rows.
        owners_: the groups, in the order of the clients; None if `fit` got no groups.
        summary_: the content of the run's `result.json`; its accuracies are on the training rows.
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

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X (n, d) with labels y (n,), whose owners are `groups` (n,).

        Raises:
            ValueError: the rows, or a setting, are invalid.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self.mean_, spread = X.mean(axis=0), X.std(axis=0)
        self.scale_ = np.where(spread > 0, spread, 1.0)
        self.owners_, self.models_, self.summary_ = None, [], {}
        owners: dict[str, Any] = {"clients": min(self.clients, len(X)), "partition": "iid"}
        if groups is not None:
            groups = column_or_1d(groups)
            check_consistent_length(X, groups)
            self.owners_, numbers = np.unique(groups, return_inverse=True)
            owners = {"group": numbers}
        if len(self.classes_) == 1:  # nothing to learn
            return self
        rows = self._standardized(X), codes
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        settings: dict[str, Any] = {"evaluate": {"points": 1}, **owners, **(self.settings or {})}
        settings |= {"iterations": self.iterations, "seed": seed, "params": dict(self.params or {})}
        try:
            result = run(self.method, data=rows, test=rows, task="classes", models=self.models or "mlp", **settings)
            self.models_ = [result.model] if result.model is not None else result.models
        except FedloomError as error:
            raise ValueError(str(error)) from error
        self.summary_ = result.summary
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
        x = torch.from_numpy(self._standardized(X))
        if groups is None or len(self.models_) == 1:
            return np.asarray(np.mean([_probabilities(model, x) for model in self.models_], axis=0))
        groups = column_or_1d(groups)
        check_consistent_length(X, groups)
        if self.owners_ is None or not np.isin(groups, self.owners_).all():
            raise ValueError("groups names an owner that took no part in training; leave groups out to ask all models")
        found = np.empty((len(X), len(self.classes_)))
        for number in np.unique(where := np.searchsorted(self.owners_, groups)):
            found[where == number] = _probabilities(self.models_[number], x[where == number])
        return found

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class (n,) of each row; `groups` as in `predict_proba`."""
        best = self.predict_proba(X, groups).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def _standardized(self, X: np.ndarray) -> np.ndarray:
        return np.asarray((X - self.mean_) / self.scale_, dtype=np.float32)


def _probabilities(model: nn.Module, x: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return torch.softmax(model(x), -1).double().numpy()
