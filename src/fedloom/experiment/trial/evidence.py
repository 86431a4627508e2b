"""What an owner's own rows say about its gain: an estimate, and a standard error that owners help
each other to know.

Every row is predicted once in each of C repeats by models that did not see it (C repeats of K-fold
cross-fitting; P. Bayle, A. Bayle, L. Janson, L. Mackey, "Cross-validation Confidence Intervals for
Test Error", NeurIPS 2020). The gain is the score of federating minus that of training alone on the
same rows, averaged over repeats; for errors of numbers it is relative to the error alone. Its
variance has two parts:

    rows      the variance of the mean of contributions: see `contributions`
    pairs     what this misses. A row i that trains changes the loss of a row j that tests by about b(i, j), and to
              first order b(i, j) = b(j, i), as for squared and log loss -2 r_i r_j x_i H^-1 x_j.
              Both happen in one repeat if the two rows are in different folds, so the sum has 2
              b(i, j), with twice the variance that rows counted alone have. Redrawing folds parts a
              pair with probability q = (K - 1) / K, so that with V, the variance over repeats of
              what pairs add to the rows' contributions, the rows miss V ((K - 1) + 1 / C). More
              repeats do not remove the first part: no fold is needed for it.

V is estimated from the variance B of a repeat's gain, which pairs raise by 2 V. In the area under
the curve also the meeting of rows in a fold, whose variance W over repeats of contributions counts
twice what B has of it: with B = 2 V + M, W = V + 2 M. Both parts are known badly from few rows, so
each is shrunk to the mean over owners, with the weight of `PRIOR` units (as G. K. Smyth,
Statistical Applications in Genetics and Molecular Biology 3, 2004, does for variances of many small
samples). Few owners and repeats tell V badly, too, so that its share of the rows' variance is
shrunk to what is `USUAL`. Windows of time have no such part: of two rows only the earlier one
trains for the other.

Rows of a window of time may depend on each other. An owner's windows are few and tell a variance
badly, so the variance is that of rows, times the ratio of the variance by windows to that by rows
in all owners together, which is shrunk to 1 with the weight of `WINDOWS` windows. The ratio may be
below 1: placements in windows of few rows vary by the rows that they are compared with, too, which
    a window counts once.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.experiment.trial.contributions import CLASS_SCORES, contributions

PRIOR = 4.0
"""Units of other owners that count in an owner's variance."""
USUAL, WEIGHT = 0.2, 10.0
"""V as a share of the rows' variance, about its mean in simulated federations
(`benchmarks.decisions`), and the repeats of an owner that this counts as.
"""
MOST_ALIKE = 0.99
"""The largest correlation of owners' errors, so that their matrix has an inverse."""
WINDOWS = 20.0
"""Windows of time that count for rows that do not depend on each other."""


@dataclass(frozen=True, eq=False)
class Clusters:
    """What an owner's rows may share with those of others: the `names` (M,) of days or units, their
    numbers of `rows` (M,), and the `sums` (M,) of these rows' contributions.
    """

    names: np.ndarray
    rows: np.ndarray
    sums: np.ndarray


@dataclass(frozen=True, eq=False)
class Evidence:
    """The gain of one owner by its own rows.

    Strata are the classes; there is one for all rows if a score has no classes, or if units have
    several rows. In time a unit is a row.

    Attributes:
        gain: the mean over repeats; nan if the score is not defined.
        alone, federated: the mean scores; errors and losses are negated.
        strata: (S,) their numbers; -1 for one stratum of all rows.
        variances: (S,) the variance of one unit's contribution, times the squared number of units.
        floors: (S,) the least variance that so many rows of all owners could have shown, times that
            number of rows.
        units: (S,) number of units: rows or patients.
        freedom: (S,) effective degrees of freedom.
        pairs: V, what pairs of rows add to the contributions; nan with one repeat.
        folds: K.
        repeats: C.
        in_time: whether folds are windows of time.
        rows: n.
        fewest: the number of units of the rarest class; in time of windows with it.
        by_windows: the variance of the gain by windows of time; nan without windows.
        clusters: its days, or units; None without either.
    """

    gain: float
    alone: float
    federated: float
    strata: np.ndarray
    variances: np.ndarray
    floors: np.ndarray
    units: np.ndarray
    freedom: np.ndarray
    pairs: float
    folds: int
    repeats: int
    in_time: bool
    rows: int
    fewest: int
    by_windows: float = np.nan
    clusters: Clusters | None = None

    @property
    def pairs_count(self) -> float:
        """How often V is in the gain's variance beside that of rows: see the module."""
        return 0.0 if self.in_time else self.folds - 1 + 1 / self.repeats


def evidence(
    metric: str,
    y: np.ndarray,
    alone: np.ndarray,
    federated: np.ndarray,
    folds: np.ndarray,
    *,
    unit: np.ndarray | None = None,
    priors: np.ndarray | None = None,
    together: np.ndarray | None = None,
) -> Evidence:
    """The evidence of one owner's rows.

    Args:
        metric: see `contributions`.
        y: (n,) classes or numbers.
        alone, federated: (C, n, K) probabilities or (C, n) numbers, of models that did not see the
            row.
        folds: (C, n).
        unit: (n,) rows of one value belong together; None: each row is a unit.
        priors: (C, n, K) shares of the classes in each row's training rows; None: see
            `contributions`.
    """
    gains, scores, of_repeats = [], [], []
    for c, (own, shared, fold) in enumerate(zip(alone, federated, folds, strict=True)):
        of_rows = None if priors is None else priors[c]
        one = contributions(metric, y, own, fold, of_rows)
        other = contributions(metric, y, shared, fold, of_rows)
        gain, parts = difference(metric, one, other)
        gains.append(gain)
        of_repeats.append(parts)
        scores.append((one[0], other[0]))
    in_time = unit is not None and np.array_equal(unit, folds[0])
    classes = y if metric in CLASS_SCORES else np.zeros(len(y), np.int64)
    units = (
        np.arange(len(y)) if unit is None else np.unique(unit, return_inverse=True)[1].reshape(-1)
    )
    floor = {"accuracy": 1.0, "balanced accuracy": 1.0 / len(np.unique(y)) ** 2}.get(metric, 0.0)
    parts, by_windows = np.mean(of_repeats, axis=0), np.nan
    strata, variances, counts, freedom, fewest = _variances(parts, classes, units)
    if in_time:
        # The pairs of a window count in the placements of both rows: their sum is twice what it
        # moves the area by.
        by_windows = float(variances[0] / counts[0]) / (4 if metric == "auc" else 1)
        strata, variances, counts, freedom, _ = _variances(parts, classes, np.arange(len(y)))
    first, second = np.mean(scores, axis=0)
    return Evidence(
        gain=float(np.mean(gains)),
        alone=float(first),
        federated=float(second),
        strata=strata,
        variances=variances,
        floors=np.full(len(strata), floor),
        units=counts,
        freedom=freedom,
        pairs=_pairs(metric, gains, [np.bincount(units, parts) for parts in of_repeats]),
        folds=len(np.unique(folds[0])),
        repeats=len(gains),
        in_time=in_time,
        rows=len(y),
        fewest=fewest,
        by_windows=by_windows,
        clusters=None if together is None else _clusters(parts, together),
    )


def _clusters(parts: np.ndarray, together: np.ndarray) -> Clusters:
    names, place = np.unique(together, return_inverse=True)
    return Clusters(names, np.bincount(place.reshape(-1)), np.bincount(place.reshape(-1), parts))


def difference(
    metric: str, alone: tuple[float, np.ndarray], federated: tuple[float, np.ndarray]
) -> tuple[float, np.ndarray]:
    """The gain, and the contribution (n,) of each row to it, from two scores and their
    contributions.
    """
    (one, u_one), (other, u_other) = alone, federated
    if metric in ("rmse", "mae"):  # 1 - error / error alone; the delta method
        return 1 - other / one, (other / one * u_one - u_other) / one
    return other - one, u_other - u_one


def _pairs(metric: str, gains: Sequence[float], of_repeats: Sequence[np.ndarray]) -> float:
    """V of the module: what pairs of units add to contributions, from each repeat's gain and
    contributions (units,).
    """
    if len(gains) < 2:
        return np.nan
    whole = float(np.var(gains, ddof=1))
    if metric != "auc":
        return whole / 2
    within = float(np.var(of_repeats, axis=0, ddof=1).sum())
    return (whole - within / 2) / 1.5


def _variances(
    parts: np.ndarray, classes: np.ndarray, units: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Strata, their variances, numbers of units, degrees of freedom; and the units of the rarest
    class.
    """
    names = np.unique(classes)
    sums, counts, freedom = np.zeros(len(names)), np.zeros(len(names)), np.zeros(len(names))
    for s, k in enumerate(names):
        size = np.bincount(units[classes == k])
        sums[s] = np.square(np.bincount(units, parts * (classes == k))).sum()
        counts[s] = (size > 0).sum()
        # units of equal size: their number - 1
        freedom[s] = max(size.sum() ** 2 / np.square(size).sum() - 1, 0.0)
    fewest, number = int(counts.min()), int(units.max()) + 1
    if number == len(parts):
        return names, _unbiased(sums, counts), counts, np.minimum(freedom, counts - 1), fewest
    # Classes of one unit are not independent, so all rows are one stratum; its freedom is
    # Satterthwaite's.
    one = np.array([float(number)])
    whole = np.array([np.square(np.bincount(units, parts)).sum()])
    spread = np.square(sums) / np.maximum(freedom, 0.5)
    shared = np.array([sums.sum() ** 2 / max(spread.sum(), 1e-30)])
    return np.array([-1]), _unbiased(whole, one), one, np.minimum(shared, one - 1), fewest


def _unbiased(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    found: np.ndarray = sums * np.square(counts) / np.maximum(counts - 1, 1)
    return found


def standard_errors(owners: Sequence[Evidence]) -> tuple[np.ndarray, np.ndarray]:
    """The standard error (N,) of each owner's gain, and its degrees of freedom (N,)."""
    common = {k: _common(owners, k) for k in {int(k) for one in owners for k in one.strata}}
    rows, freedom = np.zeros(len(owners)), np.zeros(len(owners))
    for i, one in enumerate(owners):
        shared = np.array([common[int(k)] for k in one.strata])
        shrunk = (PRIOR * shared + one.freedom * one.variances) / (PRIOR + one.freedom) / one.units
        rows[i] = shrunk.sum()
        freedom[i] = rows[i] ** 2 / (np.square(shrunk) / (PRIOR + one.freedom)).sum()
    times, most = _times_by_windows(owners, rows)
    rows, freedom = rows * times, np.minimum(freedom, most)
    pairs = np.array([one.pairs for one in owners])
    seen = np.array([one.repeats - 1 for one in owners])
    pairs, seen = np.where(np.isfinite(pairs), pairs, 0.0), np.where(np.isfinite(pairs), seen, 0)
    # repeats of owners of equal variance
    told = (seen * rows).sum() ** 2 / max((seen * np.square(rows)).sum(), 1e-300)
    ratio = max(
        (WEIGHT * USUAL + told * (seen * pairs).sum() / max((seen * rows).sum(), 1e-300))
        / (WEIGHT + told),
        0.0,
    )
    shrunken = np.maximum((seen * pairs + PRIOR * ratio * rows) / (seen + PRIOR), 0.0)
    return np.sqrt(rows + np.array([one.pairs_count for one in owners]) * shrunken), freedom


def correlations(owners: Sequence[Evidence]) -> np.ndarray:
    """The correlations (N, N) of the errors of the owners' gains.

    Those of owners i and k are ρ c_ik: c_ik is the cosine of their numbers of rows in clusters, and
    ρ what the products of their sums of contributions tell in all pairs of owners together.
    """
    clusters = [one.clusters for one in owners if one.clusters is not None]
    if len(clusters) < len(owners):
        return np.eye(len(owners))
    names = np.unique(np.concatenate([each.names for each in clusters]))
    rows, sums = np.zeros((2, len(owners), len(names)))
    for i, each in enumerate(clusters):
        at = np.searchsorted(names, each.names)
        rows[i, at], sums[i, at] = each.rows, each.sums
    shared, seen = (each @ each.T for each in (_unit_length(rows), _unit_length(sums)))
    pairs = np.triu_indices(len(owners), 1)
    of_all = np.clip(seen[pairs].sum() / max(shared[pairs].sum(), 1e-12), 0.0, MOST_ALIKE)
    found: np.ndarray = of_all * shared
    np.fill_diagonal(found, 1.0)
    return found


def _unit_length(of: np.ndarray) -> np.ndarray:
    found: np.ndarray = of / np.maximum(np.linalg.norm(of, axis=1, keepdims=True), 1e-300)
    return found


def _times_by_windows(owners: Sequence[Evidence], rows: np.ndarray) -> tuple[float, float]:
    """How many times the variances (N,) by rows those by windows of time are, and the ratio's
    degrees of freedom.
    """
    told = [
        i
        for i, one in enumerate(owners)
        if np.isfinite(one.by_windows) and one.folds > 1 and rows[i] > 0
    ]
    if not told:
        return 1.0, np.inf
    free = np.array([owners[i].folds - 1 for i in told], float)
    ratios = np.array([owners[i].by_windows / rows[i] for i in told])
    most = WINDOWS + free.sum()
    return float((WINDOWS + free @ ratios) / most), float(most)


def _common(owners: Sequence[Evidence], stratum: int) -> float:
    """The mean over owners of a unit's variance, by degrees of freedom; at least what no difference
    in all rows leaves possible (the rule of succession), so that equal predictions of few rows do
    not count as exact.
    """
    values, weights, units, floor = [], [], 0.0, 0.0
    for one in owners:
        for s in np.flatnonzero(one.strata == stratum):
            values.append(one.variances[s])
            weights.append(max(float(one.freedom[s]), 0.1))
            units, floor = units + float(one.units[s]), max(floor, float(one.floors[s]))
    return max(float(np.average(values, weights=weights)), floor / (units + 2), 1e-10)
