"""FedGLM: coefficients and errors of pooled rows, against independent formulas, and the same bits
for every split.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import methods
from fedloom.core.errors import MethodError
from fedloom.core.message import digest
from fedloom.core.task import Number
from fedloom.methods.tables import inference, newton
from fedloom.methods.tables.design import as_read
from fedloom.methods.tables.inference import estimates
from fedloom.methods.tables.long_sums import decimal
from tests.methods.tables import federation, of_numbers, owners, splits

FEDGLM = methods.find("fedglm")
WORDS = ((), (), ("a", "b", "c"), ())


def table(n: int, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 4) with a large mean, words, a constant column and few gaps, and labels."""
    rng = np.random.default_rng(seed)
    x = np.stack(
        [rng.normal(2000, 3, n), rng.exponential(1e-3, n), rng.integers(0, 3, n), np.full(n, 7)], 1
    )
    scores = np.stack(
        [np.zeros(n), (x[:, 0] - 2000) / 3 - 0.5, 500 * x[:, 1] + (x[:, 2] == 1) - 1]
    )[:classes]
    y = (scores + rng.gumbel(size=scores.shape)).argmax(0)
    x[rng.random((n, 4)) < 0.02] = np.nan
    return x.astype(np.float32), y


def fitted(x: np.ndarray, y: np.ndarray, cuts: list[int], classes: int = 2, **params: Any) -> Any:
    return federation(FEDGLM, owners(x, y, cuts, WORDS, classes), **params).run(20)


def pooled(
    x: np.ndarray, y: np.ndarray, classes: int, l2: float = 0.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Coefficients, standard errors and log-likelihood by Newton's method in float64 on the
    complete rows, written
    out: a design matrix, no integers, no standardized columns but for the penalty.
    """
    whole = ~np.isnan(x).any(1)
    x, y = decimal(x[whole]), y[whole]
    design = np.c_[np.ones(len(y)), x[:, :2], x[:, 2] == 1, x[:, 2] == 2]
    center = np.r_[0, design[:, 1:].mean(0)]
    center_free = design - center  # the same model with another intercept
    p, k = design.shape[1], classes - 1
    penalty = np.diag(np.tile(l2 * np.r_[0, design[:, 1:].var(0)], k))
    beta = np.zeros(k * p)
    hot = np.eye(classes)[y][:, 1:]
    for _ in range(30):
        e = np.exp(np.c_[np.zeros(len(y)), center_free @ beta.reshape(k, p).T])
        prob = e / e.sum(1, keepdims=True)
        own = prob[:, 1:]
        gradient = (center_free.T @ (hot - own)).T.ravel() - penalty @ beta
        hessian = penalty + np.block(
            [
                [
                    center_free.T @ (center_free * (own[:, a] * ((a == b) - own[:, b]))[:, None])
                    for b in range(k)
                ]
                for a in range(k)
            ]
        )
        beta = beta + np.linalg.solve(hessian, gradient)
    back = np.eye(p)
    back[0, 1:] = -center[1:]
    whole_back = np.kron(np.eye(k), back)
    errors = np.sqrt(np.diag(whole_back @ np.linalg.inv(hessian) @ whole_back.T))
    return (
        (whole_back @ beta).reshape(k, p),
        errors.reshape(k, p),
        float(np.log(prob[np.arange(len(y)), y]).sum()),
    )


@pytest.mark.parametrize(("classes", "l2"), [(2, 0.0), (3, 0.0), (2, 5.0)])
def test_coefficients_and_errors_are_those_of_pooled_rows(classes: int, l2: float) -> None:
    x, y = table(600, classes)
    toy = fitted(x, y, [100, 350], classes, l2=l2)
    beta, errors = estimates(toy.server.design, toy.server.accepted)
    expected, their_errors, likelihood = pooled(x, y, classes, l2)
    assert toy.server.done
    assert (
        np.abs(beta / expected - 1).max() < 1e-8 and np.abs(errors / their_errors - 1).max() < 1e-8
    )
    assert abs(toy.server.accepted["value"] - likelihood) < 1e-6


def test_the_bits_do_not_depend_on_the_split() -> None:
    x, y = table(300, 3, seed=1)
    order = np.random.default_rng(2).permutation(300)
    found = {digest(fitted(x, y, cuts, 3).server.accepted) for cuts in splits(300)}
    assert found == {digest(fitted(x[order], y[order], [80], 3).server.accepted)}


def test_missing_values_can_have_indicators_so_that_no_row_is_left_out() -> None:
    """Against scikit-learn on the filled design: numbers by the mean of all owners' values, words
    by no word.
    """
    from sklearn.linear_model import LogisticRegression

    x, y = table(400, seed=4)
    x[:, :2][np.random.default_rng(5).random((400, 2)) < 0.4] = np.nan
    x[300:, 1] = np.nan  # the last owner lacks a column
    toys = [fitted(x, y, cuts, missing="indicator", l2=1.0) for cuts in ([100, 300], [300], [])]
    assert len({digest(toy.server.accepted) for toy in toys}) == 1
    assert toys[0].server.design["rows"] == 400
    gaps = np.isnan(x[:, :3])
    spread = (x[:, :2] - np.nanmean(x[:, :2], 0)) / np.nanstd(x[:, :2], 0)
    hot = np.c_[x[:, 2] == 1, x[:, 2] == 2].astype(float)
    hot[gaps[:, 2]] = np.nan
    others = np.c_[gaps, np.isnan(x[:, 3])].astype(float)
    parts = [(part - np.nanmean(part, 0)) / np.nanstd(part, 0) for part in (hot, others)]
    design = np.nan_to_num(np.c_[spread, *parts])
    expected = LogisticRegression(tol=1e-10, max_iter=1000).fit(design, y).predict_proba(design)
    owner = toys[-1].party(0)
    np.testing.assert_allclose(
        torch.softmax(owner.infer(owner.context.rows.every), -1), expected, atol=1e-4
    )


@pytest.mark.parametrize("bits", [0, 20, 48])
def test_each_part_of_a_sum_is_rounded_also_where_parts_are_large(bits: int) -> None:
    """Parts below 2^51 steps are rounded by an addition, larger ones by themselves: both as Python
    rounds.
    """
    rng = np.random.default_rng(11)
    z = rng.standard_normal((500, 3)) * 2.0 ** rng.integers(-3, 4, (500, 3))
    weight = rng.random(500)
    z[:2, 0] = [0.5, -1.5]

    def rounded(parts: np.ndarray) -> int:
        return sum(round(float(part)) for part in parts)

    assert newton.added(z, bits).tolist() == [rounded(column * 2.0**bits) for column in z.T]
    scaled = z.T * (weight * 2.0**bits)
    expected = [rounded(scaled[j] * z[:, i]) for i in range(3) for j in range(i, 3)]
    assert newton.products(z, weight, bits).tolist() == expected


def test_decimals_are_those_of_an_early_end_for_each_number_by_itself() -> None:
    rng = np.random.default_rng(12)
    x = np.r_[
        rng.standard_normal(400) * 10.0 ** rng.integers(-30, 30, 400),
        rng.integers(0, 10**6, 100) / 100,
    ]
    x = np.r_[x, 0, np.nan, np.inf, 2.0**-149].astype(np.float32)
    expected = [float(str(v)) for v in x]  # NumPy prints the fewest digits
    np.testing.assert_allclose(decimal(x), expected, rtol=1e-15)
    np.testing.assert_array_equal(
        decimal(np.asfortranarray(np.c_[x, x])[::2]), np.c_[decimal(x), decimal(x)][::2]
    )


def test_the_table_is_that_of_statisticians() -> None:
    x, y = table(500, seed=3)
    toy = fitted(x, y, [200])
    coefficients, fit = toy.server.findings()
    beta, errors = estimates(toy.server.design, toy.server.accepted)
    # x3 is constant
    assert [row[0] for row in coefficients.rows] == ["intercept", "x0", "x1", "x2=b", "x2=c"]
    for row, b, s in zip(coefficients.rows, beta[0], errors[0], strict=True):
        z = b / s
        tail = math.erfc(abs(z) / math.sqrt(2))
        assert row[1:] == pytest.approx((b, s, z, tail, b - 1.959963985 * s, b + 1.959963985 * s))
    values = dict(fit.rows)
    assert (
        values["rows"] + values["rows left out, with missing values"] == 500
        and values["converged"] == "yes"
    )
    assert values["AIC"] == pytest.approx(2 * 5 - 2 * toy.server.accepted["value"])
    assert values["log-likelihood of intercepts alone"] < values["log-likelihood"]


def test_owners_may_have_effects_and_predictions_are_those_of_the_table() -> None:
    x, y = table(600, seed=4)
    y[:200] |= np.random.default_rng(5).random(200) < 0.7  # an owner with more of class 1
    toy = fitted(x, y, [200, 400], owners="fixed")
    beta, _ = estimates(toy.server.design, toy.server.accepted)
    names = [row[0] for row in toy.server.findings()[0].rows]
    assert names[-2:] == ["owner 1", "owner 2"] and beta[0, -2:].max() < -1
    new = table(50, seed=6)[0]
    new = new[~np.isnan(new).any(1)]
    design = np.c_[
        np.ones(len(new)),
        new[:, :2],
        new[:, 2] == 1,
        new[:, 2] == 2,
        np.ones(len(new)),
        np.zeros(len(new)),
    ]
    logits = toy.party(1).infer(torch.from_numpy(new)).double()
    assert np.abs((logits[:, 1] - logits[:, 0]).numpy() - design @ beta[0]).max() < 1e-4
    assert torch.isfinite(toy.party(1).infer(torch.full((2, 4), float("nan")))).all()


def test_no_messages_after_the_last_step_and_few_before() -> None:
    x, y = table(300, seed=7)
    toy = fitted(x, y, [100])
    sent = len(
        [
            entry
            for entry in toy.fed.ledger
            if entry.kind == "derivatives" and entry.receiver == "server"
        ]
    )
    assert 4 <= sent <= 9


def test_columns_without_unique_coefficients_are_refused() -> None:
    x, y = table(200, seed=8)
    x[:, 0] = np.round(x[:, 0], 1)
    x[:, 1] = 2 * x[:, 0]
    with pytest.raises(MethodError, match="collinear"):
        fitted(x, y, [100])
    assert fitted(x, y, [100], l2=1.0).server.done
    x, y = table(200, seed=9)
    x[:, 0] = 2000 + y  # the classes are separate
    with pytest.raises(MethodError, match="separate the classes"):
        fitted(x, y, [100])
    with pytest.raises(MethodError, match="no row is complete"):
        fitted(np.full_like(x, np.nan), y, [100])
    same = of_numbers(owners(x, y, [100], WORDS), np.ones(200, np.float32))
    with pytest.raises(MethodError, match="the same in all complete rows"):
        federation(methods.find("fedglm"), same).run(1)


def test_exponents_bound_all_numbers() -> None:
    x = np.array([[0.0, 3e38], [1.0, -1e-30], [-0.75, 0.0], [0.5, 4.0]])
    found = newton.largest_exponents(newton.exponents(x))
    assert found.tolist() == [1, 128] and (np.abs(x) < 2.0**found).all()
    assert newton.largest_exponents(newton.exponents(np.empty((0, 2)))).tolist() == [0, 0]


def test_numbers_that_were_standardized_are_those_that_were_read() -> None:
    rng = np.random.default_rng(0)
    for size in (1.0, 1e9, 0.01):
        for _ in range(20):
            counts = np.rint(rng.poisson(1.2, 50) * 100) * size
            target = Number(float(counts.mean()), float(counts.std()))
            found = as_read(target, target.standardized(counts))
            assert (found >= 0).all() and found == pytest.approx(counts, rel=1e-6, abs=0)


def test_a_hazard_ratio_that_no_float_holds_is_left_out() -> None:
    found = inference.coefficients(
        "", ["a"], np.array([1e41]), np.array([1e40]), 0.95, ratio="Hazard ratio"
    )
    assert found.rows[0][1:3] == (1e41, None)
