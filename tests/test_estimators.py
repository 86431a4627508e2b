"""The estimators keep scikit-learn's contract, and train by owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import SkipTest

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from fedloom import FederatedClassifier, FederatedRegressor

X, Y = load_iris(return_X_y=True)
OWNERS = np.array(["north", "south", "west"])[np.arange(150) % 3]
FAST = FederatedClassifier("fedavg", iterations=2, clients=2)
NUMBERS = FederatedRegressor("fedavg", iterations=60, clients=2)
BEHIND = {
    "classes": FAST,
    "numbers": NUMBERS,
    "trees": FederatedClassifier("fedforest", iterations=3, clients=2),
    "boosted numbers": FederatedRegressor("fedboost", iterations=12, clients=2),
    "linear": FederatedClassifier("fedglm", iterations=30, clients=2, params={"l2": 1.0}),
    "linear numbers": FederatedRegressor("fedglm", iterations=30, clients=2, params={"l2": 1e-3}),
}
"""Networks, trees and linear models behind the estimators."""


@pytest.mark.each_time("classes", "boosted numbers")
@pytest.mark.parametrize("made", BEHIND.values(), ids=BEHIND)
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
    assert not failed


def test_it_learns_in_a_pipeline_and_cross_validation() -> None:
    model = FederatedClassifier(random_state=0)
    piped = make_pipeline(StandardScaler(), model)
    folds = {"cv": GroupKFold(3), "groups": np.arange(150) // 10 % 3}
    found = cross_validate(piped, X, Y, params={"federatedclassifier__groups": OWNERS}, **folds)
    assert found["test_score"].mean() > 0.8


def test_searches_frames_and_files_keep_it_as_it_is(tmp_path: Path) -> None:
    rows = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    names = pd.Series(Y).map({0: "s", 1: "v", 2: "w"})
    forest = FederatedClassifier("fedforest", iterations=3, random_state=0)
    search = GridSearchCV(forest, {"params": [{"depth": 2}, {"depth": 4}]}, cv=GroupKFold(3))
    search.fit(rows, names, groups=np.arange(150) % 3)  # of the folds
    assert (
        search.best_score_ > 0.8
        and clone(search.best_estimator_).get_params()["params"] == search.best_params_["params"]
    )
    piped = make_pipeline(StandardScaler().set_output(transform="pandas"), clone(forest)).fit(
        rows, names
    )
    assert [*piped[-1].feature_names_in_] == ["a", "b", "c", "d"]
    joblib.dump(piped, tmp_path / "model.joblib")
    assert (joblib.load(tmp_path / "model.joblib").predict(rows) == piped.predict(rows)).all()
    with pytest.raises(ValueError, match="feature names should match"):
        piped[-1].predict(rows.rename(columns={"a": "z"}))
    with pytest.raises(TypeError, match="sample_weight"):
        piped[-1].fit(rows, names, sample_weight=np.ones(150))
    with config_context(enable_metadata_routing=True):
        routed = make_pipeline(StandardScaler(), clone(forest).set_fit_request(groups=True))
        assert (
            cross_validate(routed, X, Y, cv=3, params={"groups": OWNERS})["test_score"].mean() > 0.8
        )


def test_owners_ask_their_own_models_if_the_method_gives_them_any() -> None:
    skewed = np.array(["a", "b", "c"])[Y]  # each owner has one class
    alone = FederatedClassifier("local", iterations=20, models="mlp", random_state=0).fit(
        X, Y, groups=skewed
    )
    assert len(alone.models_) == 3 and [*alone.owners_] == ["a", "b", "c"]
    assert (alone.predict(X, groups=skewed) == Y).mean() > 0.95
    assert (alone.predict(X, groups=np.full(150, "a")) == 0).mean() > 0.95
    assert np.allclose(alone.predict_proba(X).sum(axis=1), 1)
    with pytest.raises(ValueError, match="took no part in training"):
        alone.predict(X, groups=np.full(150, "d"))


def test_equal_seeds_give_equal_models_and_mistakes_are_value_errors() -> None:
    first, again = (FAST.__sklearn_clone__().set_params(random_state=3).fit(X, Y) for _ in range(2))
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    with pytest.raises(ValueError, match="unknown method"):
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
        FederatedClassifier(iterations=3, settings=each, random_state=0).fit(X, names)
        for each in (settings, {})
    )
    assert weighted.predict_proba(X)[:, 2].mean() > plain.predict_proba(X)[:, 2].mean() + 0.1
    assert weighted.summary_["local"]["class_weights"] == {"c": 50.0}
    with pytest.raises(ValueError, match="y has no class 'd', but a, b, c"):
        FederatedClassifier(settings={"local": {"class_weights": {"d": 2.0}}}).fit(X, names)
