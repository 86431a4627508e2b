"""Decisions: join, stay alone, no difference, or undecided.

An owner's own rows give one-sided p-values, adjusted over owners by Y. Benjamini and Y. Hochberg's
procedure (JRSS B 57, 1995). All owners together give probabilities: see `sharing`. The first that
holds:

    same        |gain| < worth is shown by own rows, or has probability 0.975
    join        gain > 0 is shown by own rows
    alone       gain < worth is shown by own rows
    join        by all: P(gain > worth) ≥ 0.5, and at least 19 times P(gain ≤ 0)
    alone       by all: P(gain < worth) ≥ 0.975, and own gain < worth
    undecided   otherwise

With fewer than `FEWEST` units of a class an owner is told so; if there are others, with the
probabilities that their gains give for a further owner of so many rows. An owner without others is
decided by its own rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fedloom.experiment.trial.evidence import Evidence, correlations, standard_errors
from fedloom.experiment.trial.sharing import FALL, share

Decision: TypeAlias = Literal["join", "alone", "same", "undecided", "too few"]
ALPHA = 0.025
"""One-sided error rate of a decision by own rows. Intervals cover 95 %, each on its own."""
SURE, WORTHWHILE = 0.975, 0.5
"""Probabilities that decide by all owners: of no difference, or of no gain that is worth it; at
least, of one that is, to tell one to join.
"""
ODDS = 19.0
"""The odds of a gain that is worth it against none, with which all owners tell one to join. Of
rules that tell as many to join that gain nothing, one by such odds tells the most of those whose
gain is worth it.
"""
FEWEST = 3
"""Units of a class below which nothing is said."""
SHARING = 2
"""Owners below which own rows decide alone."""
LIKELY = 0.8
"""The probability from which an undecided owner is said to lean."""
MOST = 100
"""Beyond so many times the rows, "more rows" is no advice."""
NODES = 60
"""Gains, and numbers of rows, that "more rows" looks at."""


@dataclass(frozen=True)
class OwnerVerdict:
    """The decision for one owner.

    Attributes:
        decision: see the module.
        by: whether the owner's own rows decided, or all owners together; "" if nothing is decided.
        gain: the estimate from own rows; nan if it is not known.
        low, high: its 95 % interval (t).
        p_gain, p_worth, p_same: P(gain > 0), P(gain > worth) and P(|gain| < worth), given all
            owners' rows.
        leaning: for an undecided owner, or one with too few rows, the decision of probability
            `LIKELY`; "" if there is none.
        more_rows: for an undecided owner, rows in all with which they decide with probability
            `LIKELY`; None if there is no realistic number.
    """

    decision: Decision
    by: Literal["own", "all", ""]
    gain: float
    low: float
    high: float
    p_gain: float
    p_worth: float
    p_same: float
    leaning: str = ""
    more_rows: int | None = None


NOTHING = OwnerVerdict("too few", "", math.nan, -math.inf, math.inf, math.nan, math.nan, math.nan)
UNKNOWN = 1e3
"""A standard error that tells nothing, of a gain of 0."""


def decide(
    owners: Sequence[Evidence], worth: float, *, errors_times: float = 1.0
) -> list[OwnerVerdict]:
    """The verdict for each owner.

    Args:
        owners: the evidence of each.
        worth: the smallest gain that is worth federating for, above 0.
        errors_times: what standard errors are multiplied by, to see what smaller ones would decide.
    """
    told = [i for i, one in enumerate(owners) if math.isfinite(one.gain) and one.fewest >= FEWEST]
    verdicts = [NOTHING] * len(owners)
    if not told:
        return verdicts
    from scipy import stats  # slow to import

    used = [owners[i] for i in told]
    gains, rows = np.array([one.gain for one in used]), np.array([one.rows for one in owners])
    errors, freedom = standard_errors(used)
    errors = errors * errors_times

    def not_above(value: float) -> np.ndarray:
        """The p-values (N,) of a gain of at most `value`; `not_below` of at least."""
        found: np.ndarray = stats.t.sf((gains - value) / errors, freedom)
        return found

    def not_below(value: float) -> np.ndarray:
        found: np.ndarray = stats.t.cdf((gains - value) / errors, freedom)
        return found

    joins, stays = not_above(0.0), not_below(worth)
    shown = {
        "same": stats.false_discovery_control(np.maximum(not_above(-worth), not_below(worth))),
        "join": stats.false_discovery_control(joins),
        "alone": stats.false_discovery_control(stays),
    }
    # the deviation of the t distribution
    heavier = errors * np.sqrt(freedom / np.maximum(freedom - 2, 0.5))
    known, errors_of_all = np.zeros(len(owners)), np.full(len(owners), UNKNOWN)
    known[told], errors_of_all[told] = gains, heavier
    alike = np.eye(len(owners))
    alike[np.ix_(told, told)] = correlations(used)
    all_of_them = share(known, errors_of_all, rows, worth, alike)
    expected = list(zip(all_of_them.mean.tolist(), all_of_them.deviation.tolist(), strict=True))
    sharing = len(told) >= SHARING
    half = stats.t.ppf(1 - ALPHA, freedom) * errors
    for i in range(len(owners)):
        gain, more, inside = (
            float(each[i])
            for each in (all_of_them.above_zero, all_of_them.above_worth, all_of_them.within_worth)
        )
        if i not in told:
            if sharing:
                verdicts[i] = replace(
                    NOTHING,
                    p_gain=gain,
                    p_worth=more,
                    p_same=inside,
                    leaning=_leaning(gain, more, inside),
                )
            continue
        j = told.index(i)
        decision: Decision = "undecided"
        by: Literal["own", "all", ""] = "own"
        if shown["same"][j] <= ALPHA:
            decision = "same"
        elif sharing and inside >= SURE:
            decision, by = "same", "all"
        elif shown["join"][j] <= ALPHA:
            decision = "join"
        elif shown["alone"][j] <= ALPHA:
            decision = "alone"
        elif sharing and more >= max(WORTHWHILE, ODDS * (1 - gain)):
            decision, by = "join", "all"
        elif sharing and 1 - more >= SURE and gains[j] < worth:
            decision, by = "alone", "all"
        else:
            by = ""
        open_ = decision == "undecided"
        verdicts[i] = OwnerVerdict(
            decision,
            by,
            float(gains[j]),
            float(gains[j] - half[j]),
            float(gains[j] + half[j]),
            gain,
            more,
            inside,
            _leaning(gain, more, inside) if open_ else "",
            _rows(used[j].rows, float(errors[j]), *expected[i], worth) if open_ else None,
        )
    return verdicts


def worth_repeating(
    owners: Sequence[Evidence], verdicts: Sequence[OwnerVerdict], worth: float
) -> bool:
    """Whether another repeat may decide for an owner that is undecided. It narrows standard errors
    at most as if all variance were that of pairs of rows, which repeats lower by little: see
    `evidence`.
    """
    now = owners[0].pairs_count
    then = replace(owners[0], repeats=owners[0].repeats + 1).pairs_count
    hoped = decide(owners, worth, errors_times=math.sqrt(then / now) if now else 1.0)
    pairs = zip(verdicts, hoped, strict=True)
    return any(now.decision == "undecided" and then.decision != "undecided" for now, then in pairs)


def _leaning(gain: float, more: float, inside: float) -> str:
    """The decision that is probable: of a worthwhile gain, of none, or of no difference."""
    for probability, name in (
        (more, "join"),
        (inside, "same"),
        (1 - more, "alone"),
        (gain, "join"),
    ):
        if probability >= LIKELY:
            return name
    return ""


def _rows(rows: int, error: float, mean: float, deviation: float, worth: float) -> int | None:
    """The least number of the owner's rows in all with which its own rows decide with probability
    `LIKELY`: its gain now has this mean and deviation and falls as in `sharing`; the standard error
        falls with the root of the rows.
    """
    from scipy.special import ndtr, ndtri  # slow to import

    least, gains = ndtri(1 - ALPHA), mean + deviation * ndtri((np.arange(NODES) + 0.5) / NODES)
    for factor in np.geomspace(1, MOST, NODES):
        then = error / math.sqrt(factor)
        fallen = gains * factor**-FALL
        shown = ndtr(fallen / then - least) + ndtr((worth - fallen) / then - least)
        if np.minimum(shown, 1.0).mean() >= LIKELY:
            return math.ceil(rows * float(factor))
    return None
