"""The estimators keep scikit-learn's contract, and train by owners."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.model_selection import GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from fedloom import FederatedClassifier, FederatedRegressor

X, Y = load_iris(return_X_y=True)
OWNERS = np.array(["north", "south", "west"])[np.arange(150) % 3]
EXCEPTIONS = {"check_regressors_train": "two iterations are too few for the R² of 0.5 that it wants"}
"""Checks that do not hold, and why."""
FAST = FederatedClassifier("fedavg", iterations=2, clients=2)
NUMBERS = FederatedRegressor("fedavg", iterations=2, clients=2)


@pytest.mark.parametrize("made", [FAST, NUMBERS], ids=["classes", "numbers"])
def test_the_contract_of_estimators_holds(made: FederatedClassifier | FederatedRegressor) -> None:
    failed = {}
    for estimator, check in estimator_checks_generator(made):
        name = check.func.__name__ if hasattr(check, "func") else str(check)
        try:
            check(estimator)
        except SkipTest:  # a check of what is not installed here
            continue
        except Exception as error:
            failed[name] = error
    assert failed.keys() <= EXCEPTIONS.keys(), failed


def test_it_learns_in_a_pipeline_and_cross_validation() -> None:
    model = FederatedClassifier(random_state=0)
    piped = make_pipeline(StandardScaler(), model)
    folds = {"cv": GroupKFold(3), "groups": np.arange(150) // 10 % 3}
    found = cross_validate(piped, X, Y, params={"federatedclassifier__groups": OWNERS}, **folds)
    assert found["test_score"].mean() > 0.8


def test_owners_ask_their_own_models_if_the_method_gives_them_any() -> None:
    skewed = np.array(["a", "b", "c"])[Y]  # each owner has one class
    alone = FederatedClassifier("local", iterations=20, models="mlp", random_state=0).fit(X, Y, groups=skewed)
    assert len(alone.models_) == 3 and [*alone.owners_] == ["a", "b", "c"]
    assert (alone.predict(X, groups=skewed) == Y).mean() > 0.95
    assert (alone.predict(X, groups=np.full(150, "a")) == 0).mean() > 0.95
    assert np.allclose(alone.predict_proba(X).sum(axis=1), 1)
    with pytest.raises(ValueError, match="took no part in training"):
        alone.predict(X, groups=np.full(150, "d"))


def test_equal_seeds_give_equal_models_and_mistakes_are_value_errors() -> None:
    first, again = (FAST.__sklearn_clone__().set_params(random_state=3).fit(X, Y) for _ in range(2))
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    with pytest.raises(ValueError, match="unknown experiment or method"):
        FederatedClassifier("fedavgg").fit(X, Y)
    with pytest.raises(ValueError, match="inconsistent"):
        FAST.fit(X, Y, groups=OWNERS[:10])


def test_numbers_are_predicted_in_their_own_unit() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(120, 2))
    price = 1e6 + 1000 * (rows @ [3, -2]) + np.repeat([0, 5000], 60)
    owners = np.repeat(["a", "b"], 60)
    linear: dict[str, Any] = {"models": "linear", "params": {"lr": 0.1}, "random_state": 0}
    shared = FederatedRegressor("fedavg", **linear).fit(rows, price, groups=owners)
    assert 0.5 < shared.score(rows, price) < 0.95  # the owners' levels differ


def test_weights_of_classes_go_by_the_labels() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    settings = {"local": {"class_weights": {"c": 50.0}, "optimizer": "adam"}}
    weighted, plain = (
        FederatedClassifier(iterations=3, settings=each, random_state=0).fit(X, names) for each in (settings, {})
    )
    assert weighted.predict_proba(X)[:, 2].mean() > plain.predict_proba(X)[:, 2].mean() + 0.1
    assert weighted.summary_["local"]["class_weights"] == {"2": 50.0}
    with pytest.raises(ValueError, match="y has no class 'd', but a, b, c"):
        FederatedClassifier(settings={"local": {"class_weights": {"d": 2.0}}}).fit(X, names)
