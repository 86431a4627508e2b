"""Tables of exact linear models as statisticians expect them: errors, tests, intervals
and the fit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.core.page import LearnedTable
from fedloom.methods.tables import newton
from fedloom.methods.tables.drift import finite

LEFT_OUT = {
    "test": "rows left out, for the test",
    "public": "rows left out, as public rows",
    "server": "rows left out, at the server",
    "unseen": "rows left out, of unseen clients",
    "partition": "rows left out, by the partition",
}
"""Reasons why rows are left out, by their keys in `ClientContext.left_out`."""


def left_out(rows: Mapping[str, int]) -> list[tuple[str, float]]:
    """The rows that were left out before, for each reason that there is."""
    return [(text, float(rows[key])) for key, text in LEFT_OUT.items() if rows.get(key)]


def estimates(
    design: Mapping[str, Any], accepted: Mapping[str, Any], offset: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and standard errors (k, 1 + p) of the columns as they are, from those of
    standardized columns. A number's are in its own unit. `offset` was subtracted from all columns
    when they were read.
    """
    use = design["kept"].numpy()
    mean, scale = (design["mean"].numpy() + offset)[use], design["scale"].numpy()[use]
    beta, covariance = newton.raw_scale(
        accepted["beta"].numpy(), accepted["covariance"].numpy(), mean, scale
    )
    errors: np.ndarray = np.sqrt(np.diag(covariance)).reshape(beta.shape)
    return beta, errors


def coefficients(
    title: str,
    names: Sequence[str],
    beta: np.ndarray,
    errors: np.ndarray,
    level: float,
    *,
    freedom: float | None = None,
    ratio: str = "",
) -> LearnedTable:
    """A row for each coefficient: its value, standard error, z (or t), two-sided p-value and
    confidence interval.

    Args:
        names, beta, errors: (p,).
        level: of the intervals.
        freedom: degrees of freedom of Student's t; None for the normal distribution.
        ratio: the heading of a column with e to the coefficient; "" for none.
    """
    from scipy import stats  # slow to import, here and below

    law = stats.norm if freedom is None else stats.t(freedom)
    # errors of 0 where numbers are fitted exactly
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic, width = beta / errors, law.ppf(0.5 + level / 2)
    more = (ratio,) if ratio else ()
    head = (
        "Column",
        "Coefficient",
        *more,
        "Std. error",
        "z" if freedom is None else "t",
        "p-value",
    )
    with np.errstate(over="ignore"):  # e to the coefficient of a column of tiny numbers
        ratios = [np.exp(beta)] if ratio else []
    values = [beta, *ratios, errors, statistic, 2 * law.sf(np.abs(statistic))]
    rows = np.stack([*values, beta - width * errors, beta + width * errors], 1)
    cells = tuple((name, *map(finite, row)) for name, row in zip(names, rows.tolist(), strict=True))
    return LearnedTable(title, (*head, f"{level:.0%} from", "to"), cells)


def without_errors(title: str, names: Sequence[str], beta: np.ndarray) -> LearnedTable:
    """A row for each coefficient (p,): its value."""
    return LearnedTable(
        title, ("Column", "Coefficient"), tuple(zip(names, beta.tolist(), strict=True))
    )


def fit(
    design: Mapping[str, Any], more: Sequence[tuple[str, str | float]], done: bool
) -> LearnedTable:
    """The numbers of rows, these further values, rows left out before for a reason, categories
    whose first word has no row, and whether the steps have ended.
    """
    rows = float(design["rows"])
    cells = (
        ("rows", rows),
        ("rows left out, with missing values", float(design["all"]) - rows),
        *more,
        *left_out(design["left_out"]),
        *((f"reference of {name}", word) for name, word in design["reference"].items()),
        ("converged", "yes" if done else "no: raise rounds"),
    )
    return LearnedTable("Fit", ("", "Value"), cells)


def likelihoods(
    value: float, null: float, parameters: int, without: int
) -> list[tuple[str, float]]:
    """The log-likelihood and its test against the model without columns, which has `without`
    parameters.
    """
    from scipy.stats import chi2

    alone = "log-likelihood of intercepts alone" if without else "log-likelihood without columns"
    more = [("log-likelihood", value), (alone, null)]
    if parameters > without:
        ratio = 2 * (value - null)
        more += [
            ("likelihood ratio", ratio),
            ("its p-value", float(chi2.sf(ratio, parameters - without))),
        ]
    return [*more, ("AIC", 2.0 * (parameters - value))]


def of_classes(counts: np.ndarray) -> float:
    """The log-likelihood of intercepts alone, from the rows (K,) by class."""
    some = counts[counts > 0]
    return float(some @ np.log(some / some.sum()))


def of_effects(design: Mapping[str, Any], accepted: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The variances of owners' effects and of residuals, and the restricted log-likelihood, of the
    columns as they are.
    """
    scale, use = float(design["outcome"][1]), design["kept"].numpy()
    ratio = float(accepted["ratio"])
    residual, left = accepted["residual"] * scale**2, design["rows"] - 1 - int(use.sum())
    value = accepted["value"] - left * np.log(scale) - np.log(design["scale"].numpy()[use]).sum()
    return [
        ("owners", float(accepted["owners"])),
        ("variance of owners' effects", ratio * residual),
        ("residual variance", residual),
        ("share of owners in the variance", ratio / (1 + ratio)),
        ("restricted log-likelihood", float(value)),
    ]


def of_numbers(
    rows: int, parameters: int, residual: float, total: float
) -> list[tuple[str, float]]:
    """The fit of least squares, from the sum of squared residuals and that about the mean."""
    from scipy.stats import f as law

    left = rows - parameters
    share = 1 - residual / total
    found = [
        ("residual std. error", float(np.sqrt(max(residual, 0.0) / left))),
        ("degrees of freedom", float(left)),
        ("R squared", share),
        ("adjusted R squared", 1 - (1 - share) * (rows - 1) / left),
    ]
    if residual <= 0:  # all numbers are fitted exactly, so that there is no likelihood
        return found
    if parameters > 1:
        statistic = (total - residual) / residual * left / (parameters - 1)
        found += [("F", statistic), ("its p-value", float(law.sf(statistic, parameters - 1, left)))]
    value = -0.5 * rows * (np.log(2 * np.pi * residual / rows) + 1)
    return [*found, ("log-likelihood", float(value)), ("AIC", 2.0 * (parameters - float(value)))]
