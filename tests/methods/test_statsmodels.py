"""FedGLM and FedCox give the tables of statsmodels on pooled rows, on public data sets, whatever
the split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import ElasticNet

import fedloom
from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import MethodError
from fedloom.core.message import digest
from fedloom.core.page import LearnedTable
from tests.methods.tables import federation, of_numbers, owners, splits


def numbers_of(x: np.ndarray, y: np.ndarray, cuts: list[int]) -> list[ClientContext]:
    """Owners of columns of numbers, with a number to predict if y is one."""
    words = ((),) * x.shape[1]
    classes = 1 if y.dtype.kind == "f" else int(y.max()) + 1
    places = owners(
        x.astype(np.float32), np.zeros(len(y), int) if classes == 1 else y, cuts, words, classes
    )
    return places if classes > 1 else of_numbers(places, y)


def fitted(
    name: str, x: np.ndarray, y: np.ndarray, cuts: list[int], rounds: int = 20, **params: Any
) -> Any:
    return federation(methods.find(name), numbers_of(x, y, cuts), **params).run(rounds)


def column(table: LearnedTable, name: str) -> np.ndarray:
    return np.array([row[table.columns.index(name)] for row in table.rows], float)


def same(table: LearnedTable, ref: Any, statistic: str = "z") -> None:
    """Coefficients, errors, statistics, p-values and intervals are those of statsmodels' result, to
    1e-8.
    """
    errors = np.asarray(ref.bse)
    assert np.abs(column(table, "Coefficient") / ref.params - 1).max() < 1e-8
    assert np.abs(column(table, "Std. error") / errors - 1).max() < 1e-8
    assert np.abs(column(table, statistic) - ref.tvalues).max() < 1e-8 * np.abs(ref.tvalues).max()
    assert np.abs(column(table, "p-value") - ref.pvalues).max() < 1e-8
    ends = np.stack([column(table, "95% from"), column(table, "to")], 1)
    assert np.abs((ends - ref.conf_int()) / errors[:, None]).max() < 1e-7


def standardized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def exact(x: np.ndarray) -> np.ndarray:
    """The decimal numbers that float32 holds, as a table has them."""
    return np.array([float(str(v)) for v in x.astype(np.float32).ravel()]).reshape(x.shape)


def restricted(
    x: np.ndarray, y: np.ndarray, owner: np.ndarray, ratio: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The restricted log-likelihood at a ratio of variances, with coefficients and their errors,
    from the whole covariance matrix of all rows.
    """
    z, n = np.c_[np.ones(len(y)), x], len(y)
    v = np.eye(n) + ratio * (owner[:, None] == owner)
    inverse = np.linalg.inv(z.T @ np.linalg.solve(v, z))
    beta = inverse @ z.T @ np.linalg.solve(v, y)
    left, rest = n - z.shape[1], y - z @ beta
    residual = rest @ np.linalg.solve(v, rest) / left
    dets = np.linalg.slogdet(v)[1] - np.linalg.slogdet(inverse)[1]
    value = -0.5 * (left * np.log(2 * np.pi * residual) + dets + left)
    return float(value), beta, np.sqrt(residual * np.diag(inverse))


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.5])
def test_random_effects_of_owners(spread: float) -> None:
    rng = np.random.default_rng(1)
    sizes = np.array([12, 3, 40, 25, 1, 60, 18, 31])
    owner = np.repeat(np.arange(8), sizes)
    x = exact(rng.normal(50, 10, (len(owner), 2)))
    effect = spread * rng.normal(0, 1, 8) if spread else np.zeros(8)
    noise = rng.normal(0, 1, len(owner))
    if not spread:  # less between owners than by chance
        noise -= np.array([noise[owner == i].mean() for i in range(8)])[owner]
    y = (x @ [1.0, -0.5] + effect[owner] + noise).round(3)
    toy = fitted("fedglm", x, y, [*np.cumsum(sizes)[:-1]], owners="random")
    table, fit = toy.server.findings()
    found = dict(fit.rows)
    assert toy.server.done and found["owners"] == 8 and found["converged"] == "yes"
    ratio = found["variance of owners' effects"] / found["residual variance"]
    value, beta, errors = restricted(x, y, owner, ratio)
    assert abs(found["restricted log-likelihood"] - value) < 1e-6
    assert np.abs(column(table, "Coefficient") / beta - 1).max() < 1e-8
    assert np.abs(column(table, "Std. error") / errors - 1).max() < 1e-8
    assert all(
        value >= restricted(x, y, owner, max(ratio, 1e-6) * step)[0] - 1e-9
        for step in (0.99, 1.01, 3)
    )
    if spread:
        ref = sm.MixedLM(y, sm.add_constant(x), owner).fit(reml=True, gtol=1e-9)
        assert abs(found["restricted log-likelihood"] - ref.llf) < 1e-5
        assert np.abs(column(table, "Coefficient") / ref.fe_params - 1).max() < 1e-4
        assert abs(found["residual variance"] / ref.scale - 1) < 1e-3
        assert abs(found["variance of owners' effects"] / ref.cov_re[0, 0] - 1) < 1e-2
    else:
        assert ratio == 0.0


def test_least_squares_on_diabetes() -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x = exact(x)
    coefficients, fit = fitted("fedglm", x, y, [100, 101, 300]).server.findings()
    ref = sm.OLS(y, sm.add_constant(x)).fit()
    same(coefficients, ref, "t")
    found = dict(fit.rows)
    expected = (ref.rsquared, ref.rsquared_adj, ref.fvalue, ref.llf, ref.aic, ref.df_resid)
    names = ("R squared", "adjusted R squared", "F", "log-likelihood", "AIC", "degrees of freedom")
    assert [found[name] for name in names] == pytest.approx(expected, rel=1e-9)
    assert found["its p-value"] == pytest.approx(ref.f_pvalue, rel=1e-6)


def test_ridge_is_that_of_standardized_columns() -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    z = standardized(exact(x))
    toy = fitted("fedglm", x, y, [200], l2=30.0)
    expected = np.linalg.solve(z.T @ z + 30 * np.eye(10), z.T @ (y - y.mean()))
    found = toy.server.accepted["beta"].numpy()[0, 1:] * toy.server.design["outcome"][1].item()
    assert np.abs(found / expected - 1).max() < 1e-9


@pytest.mark.parametrize(("l1", "l2"), [(40.0, 0.0), (20.0, 30.0)], ids=["lasso", "elastic net"])
def test_penalized_least_squares_are_those_of_scikit_learn(l1: float, l2: float) -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    toy = fitted("fedglm", x, y, [100, 101, 300], l1=l1, l2=l2)
    ref = ElasticNet(alpha=(l1 + l2) / len(y), l1_ratio=l1 / (l1 + l2), tol=1e-14, max_iter=100_000)
    ref.fit(standardized(exact(x)), standardized(y))
    found = toy.server.accepted["beta"].numpy()[0]
    assert toy.server.done and np.abs(found[1:] - ref.coef_).max() < 1e-9 and abs(found[0]) < 1e-9
    assert (found[1:] == 0).tolist() == (ref.coef_ == 0).tolist() and 0 < (ref.coef_ == 0).sum() < 9
    table, fit = toy.server.findings()
    slopes, ends = ref.coef_ * y.std() / exact(x).std(0), dict(fit.rows)
    assert column(table, "Coefficient")[1:] == pytest.approx(slopes, rel=1e-8)
    assert column(table, "Coefficient")[0] == pytest.approx(
        y.mean() - slopes @ exact(x).mean(0), rel=1e-8
    )
    assert (
        ends["coefficients that are not 0"] == (ref.coef_ != 0).sum() and ends["converged"] == "yes"
    )
    assert table.columns == ("Column", "Coefficient")


@pytest.mark.parametrize("family", ["classes", "poisson"])
def test_sparse_coefficients_meet_the_conditions_of_an_optimum_with_more_columns_than_rows(
    family: str,
) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x, l1 = exact(np.concatenate([x, x**2 / 100], axis=1)[:50]), 2.0
    y = y[:50] if family == "classes" else np.round(x[:, 0] - x[:, 0].min())
    params = {} if family == "classes" else {"family": "poisson"}
    server = fitted("fedglm", x, y, [20, 35], rounds=40, l1=l1, **params).server
    beta, z = server.accepted["beta"].numpy()[0], standardized(x)
    eta = beta[0] + z @ beta[1:]
    rest = y - (1 / (1 + np.exp(-eta)) if family == "classes" else np.exp(eta))
    gradient, used = z.T @ rest, beta[1:] != 0
    assert server.done and 0 < used.sum() < 15 and abs(rest.sum()) < 1e-6
    assert np.abs(gradient[used] - l1 * np.sign(beta[1:][used])).max() < 1e-6
    assert np.abs(gradient[~used]).max() <= l1 + 1e-6


def test_logistic_regression_on_breast_cancer() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x = exact(x[:, [0, 1, 4, 8]])
    coefficients, fit = fitted("fedglm", x, y, [250]).server.findings()
    ref = sm.Logit(y, sm.add_constant(x)).fit(method="newton", tol=1e-10, disp=0)
    same(coefficients, ref)
    found = dict(fit.rows)
    assert found["log-likelihood"] == pytest.approx(ref.llf, rel=1e-10)
    assert found["likelihood ratio"] == pytest.approx(ref.llr, rel=1e-9)


def test_softmax_regression_on_the_election_of_1996() -> None:
    data = sm.datasets.anes96.load()
    x, y = exact(data.exog.to_numpy()[:, [0, 2, 3, 4]]), data.endog.to_numpy().astype(int)
    *tables, _ = fitted("fedglm", x, y, [300, 600]).server.findings()
    ref = sm.MNLogit(y, sm.add_constant(x)).fit(method="newton", tol=1e-14, disp=0)
    for k, table in enumerate(tables):
        assert np.abs(column(table, "Coefficient") / ref.params[:, k] - 1).max() < 1e-8
        assert np.abs(column(table, "Std. error") / ref.bse[:, k] - 1).max() < 1e-8


def test_poisson_regression_on_visits_to_doctors() -> None:
    data = sm.datasets.randhie.load()
    x, y = exact(data.exog.to_numpy()[:3000]), data.endog.to_numpy()[:3000].astype(float)
    coefficients, fit = fitted("fedglm", x, y, [1000, 1500], family="poisson").server.findings()
    ref = sm.GLM(y, sm.add_constant(x), family=sm.families.Poisson()).fit(tol=1e-15)
    same(coefficients, ref)
    found = dict(fit.rows)
    assert found["log-likelihood"] == pytest.approx(ref.llf, rel=1e-10)
    assert found["log-likelihood of intercepts alone"] == pytest.approx(ref.llnull, rel=1e-10)


def test_a_run_s_table_is_that_of_the_frame_as_it_was_read() -> None:
    """From decimal numbers in a frame, over float32 rows and a standardized number to predict."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    rng = np.random.default_rng(0)
    frame["target"] += rng.integers(0, 100, len(frame)) / 100
    frame["clinic"], frame["split"] = (
        rng.choice(list("ABC"), len(frame)),
        rng.choice(["train", "test"], len(frame)),
    )
    how: dict[str, Any] = {
        "label": "target",
        "group": "clinic",
        "task": "number",
        "test": "split",
        "public_rows": 0,
    }
    found = fedloom.run("fedglm", data=frame, rounds=5, **how).to_frame()
    train = frame[frame["split"] == "train"]
    ref = sm.OLS(train["target"].to_numpy(), sm.add_constant(train.iloc[:, :10].to_numpy())).fit()
    assert np.abs(found["Coefficient"] / ref.params - 1).max() < 1e-8
    assert np.abs(found["p-value"] - ref.pvalues).max() < 1e-8


@pytest.mark.parametrize("family", ["normal", "classes", "softmax", "poisson"])
def test_gaps_in_numbers_and_words_leave_rows_out(family: str) -> None:
    """A missing word is none of a category's words: its rows are left out, and it is not the first
    of the words.
    """
    pandas, rng, n = pytest.importorskip("pandas"), np.random.default_rng(0), 400
    words, flag = rng.choice(["x", "y", "z"], n).astype(object), rng.random(n) < 0.4
    age, pressure = rng.normal(50, 12, n).round(1), rng.normal(120, 15, n).round(1)
    eta = -3 + 0.05 * age + 0.01 * pressure + 0.7 * (words == "y") - 0.4 * flag
    choice = np.c_[np.zeros(n), eta - 1, 1 - 0.3 * eta] + rng.gumbel(size=(n, 3))
    of_family: dict[str, Any] = {
        "normal": (eta + rng.normal(0, 1, n)).round(3),
        "poisson": rng.poisson(np.exp(eta / 3)),
    }
    of_family |= {"classes": np.array(["a", "b"])[choice[:, :2].argmax(1)]}
    y = of_family.get(family, np.array(["a", "b", "c"])[choice.argmax(1)])
    pressure[rng.random(n) < 0.07] = np.nan
    words[rng.random(n) < 0.05] = None
    frame = pandas.DataFrame(
        {"age": age, "pressure": pressure, "ward": words, "flag": flag, "y": y}
    )
    frame["site"], frame["part"] = (
        rng.choice(list("ABC"), n),
        np.where(np.arange(n) % 10 > 0, "train", "test"),
    )
    number = family in ("normal", "poisson")
    how: dict[str, Any] = {
        "label": "y",
        "group": "site",
        "test": "part",
        "missing": "median",
        "public_rows": 0,
    }
    how |= {
        "task": "number" if number else "classes",
        "params": {"family": family if number else "auto"},
    }
    found = fedloom.run("fedglm", data=frame, rounds=20, **how).to_frame()
    whole = frame[frame["part"] == "train"].dropna()
    x = [whole["age"], whole["pressure"], whole["ward"] == "y", whole["ward"] == "z", whole["flag"]]
    z = sm.add_constant(np.stack([column.to_numpy(float) for column in x], 1))
    codes = whole["y"].to_numpy() if number else np.unique(whole["y"], return_inverse=True)[1]
    model = {"normal": sm.OLS, "classes": sm.Logit, "softmax": sm.MNLogit, "poisson": sm.Poisson}[
        family
    ](codes, z)
    ref = (
        model.fit()
        if family == "normal"
        else model.fit(method="newton", maxiter=100, tol=1e-14, disp=0)
    )
    for name, theirs in (
        ("Coefficient", ref.params),
        ("Std. error", ref.bse),
        ("p-value", ref.pvalues),
    ):
        ours, theirs = found[name].to_numpy(), np.asarray(theirs).T.ravel()
        assert np.abs(ours - theirs).max() < 1e-8 * max(1, np.abs(theirs).max()), name


def survival() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Age and its square, the event, and the survival time of the Stanford heart transplants, with
    ties.
    """
    data = sm.datasets.heart.load()
    age, time = data.exog.to_numpy().astype(float).ravel(), np.ceil(data.endog.to_numpy() / 30)
    return np.stack([age, age**2 / 50, time], 1), data.censors.to_numpy().astype(int), time


def test_cox_s_model_on_heart_transplants() -> None:
    x, event, time = survival()
    x = exact(x)
    toy = fitted("fedcox", x, event, [20, 50], time="x2", times=200)
    coefficients, fit = toy.server.findings()
    model = sm.PHReg(time, x[:, :2] - x[:, :2].mean(0), status=event, ties="breslow")
    ref = model.fit(tol=1e-14, disp=0)
    assert len(toy.server.design["edges"]) + 1 == len(np.unique(time)) < len(time)
    same(coefficients, ref)
    assert np.allclose(column(coefficients, "Hazard ratio"), np.exp(ref.params), rtol=1e-8)
    found = dict(fit.rows)
    assert found["log-likelihood"] == pytest.approx(ref.llf, rel=1e-10)
    assert found["log-likelihood without columns"] == pytest.approx(
        model.loglike(np.zeros(2)), rel=1e-10
    )
    assert found["events"] == event.sum()


def test_a_coarse_grid_gives_the_model_of_rounded_times() -> None:
    x, event, time = survival()
    toy = fitted("fedcox", x, event, [30], time="x2", times=6)
    edges = toy.server.design["edges"].numpy().astype(np.uint32)
    floors = np.where(edges >> 31, edges & np.uint32(2**31 - 1), ~edges).view(np.float32).ravel()
    rounded = np.searchsorted(floors, time.astype(np.float32), side="right")
    ref = sm.PHReg(rounded, exact(x)[:, :2], status=event, ties="breslow").fit(tol=1e-14, disp=0)
    assert len(floors) <= 5
    same(toy.server.findings()[0], ref)


def test_the_bits_of_all_models_do_not_depend_on_the_split() -> None:
    x, event, _ = survival()
    visits = np.round(x[:, 2] / 10)
    for name, y, params in (
        ("fedglm", x[:, 2] * 1.5, {}),
        ("fedglm", visits, {"family": "poisson"}),
        ("fedcox", event, {"time": "x2", "times": 20}),
    ):
        columns = x if name == "fedcox" else x[:, :2]
        cuts = list(splits(len(x)))[:4]
        assert (
            len(
                {digest(fitted(name, columns, y, cut, 9, **params).server.accepted) for cut in cuts}
            )
            == 1
        )


def test_what_has_no_model_is_refused() -> None:
    x, event, time = survival()
    with pytest.raises(MethodError, match="'x9' is none of"):
        fitted("fedcox", x, event, [20], time="x9")
    with pytest.raises(MethodError, match="no complete row has an event"):
        fitted("fedcox", np.r_[x, [[np.nan] * 3]], np.r_[event * 0, 1], [20], time="x2")
    with pytest.raises(MethodError, match=r"1 numbers to predict are below 0"):
        fitted("fedglm", x, np.r_[time[1:], -1.0], [20], family="poisson")
    with pytest.raises(MethodError, match=r"no unique coefficients.*; begin with (x0, x1|x1, x0)$"):
        fitted("fedglm", np.c_[x, x[:, 0]][:, [0, 3, 2]], event, [20])
    with pytest.raises(MethodError, match="no unique coefficients"):
        fitted("fedcox", np.c_[x, x[:, 0]], event, [20], time="x2")


def test_predictions_are_those_of_the_table() -> None:
    x, event, time = survival()
    rows = torch.from_numpy(x.astype(np.float32))
    for family in ("normal", "poisson"):
        toy = fitted("fedglm", x[:, :2], time, [20], family=family)
        eta = np.c_[np.ones(len(x)), exact(x)[:, :2]] @ column(
            toy.server.findings()[0], "Coefficient"
        )
        expected = eta if family == "normal" else np.exp(eta)
        assert toy.party(0).infer(rows[:, :2]).numpy()[:, 0] == pytest.approx(expected, rel=1e-5)
    toy = fitted("fedcox", x, event, [20], time="x2")
    risk = toy.party(0).infer(rows).double().numpy()
    expected = (exact(x)[:, :2] - exact(x)[:, :2].mean(0)) @ column(
        toy.server.findings()[0], "Coefficient"
    )
    assert risk[:, 1] - risk[:, 0] == pytest.approx(expected, abs=1e-5)


def test_tables_without_a_finite_fit_have_a_sentence_or_no_test() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, 2, 90), rng.standard_normal(90).round(2)], 1).astype(float)
    with pytest.raises(MethodError, match="separate the classes, counts of 0 or events"):
        fitted("fedglm", x, rng.poisson(2, 90) * x[:, 0], [30, 60], rounds=40, family="poisson")
    # the larger, the earlier
    time = 1 + np.argsort(np.argsort(-x[:, 1], kind="stable")).astype(float)
    with pytest.raises(MethodError, match="separate the classes, counts of 0 or events"):
        fitted(
            "fedcox",
            np.c_[x, time],
            np.arange(90) % 5 > 0,
            [30, 60],
            rounds=40,
            time="x2",
            times=200,
        )
    coefficients, fit = fitted("fedglm", x, 2 * x[:, 0] + 3, [30, 60]).server.findings()
    assert coefficients.rows[1][1] == pytest.approx(2) and dict(fit.rows)[
        "R squared"
    ] == pytest.approx(1)
    assert all(x is None or np.isfinite(x) for _, *cells in coefficients.rows for x in cells)
