"""Verdicts on claims: the printed effect against the confidence interval of our paired
differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedloom.report import formatting as fmt

Verdict = Literal[
    "reproduced",
    "smaller than printed",
    "not reproduced",
    "seen",
    "not seen",
    "could not be tested here",
]
UNTESTED: Verdict = "could not be tested here"
VERDICTS: tuple[Verdict, ...] = (
    "reproduced",
    "smaller than printed",
    "not reproduced",
    "seen",
    "not seen",
    UNTESTED,
)
Rule = Literal["more", "less", "within"]
ALPHA, FIRST = 0.05, 0.04
"""The error rate of a claim over all looks at its seeds, and the part that the first look spends.
"""
POWER = 0.8
NORMAL = 1.96
"""Standard deviations of a printed effect that its 95 % interval reaches."""
RELEVANT = 2.0
"""Percentage points that count as an effect if the paper prints none for the data."""
OPPOSITE = "the opposite"
"""The reason of a claim whose other side is found."""
WIDE = "interval"
"""The gate of a claim whose interval is too wide."""
MOST_LOOKS = 8
"""Looks ahead in the search for the number of seeds that would decide."""
RULE = (
    "A verdict comes from the 95 % confidence interval of our mean paired difference over seeds "
    "(Student's t), and its words from the data: a claim is judged on the data for which the "
    "paper prints it, and only seen or not on others."
)
RULES = (
    "reproduced: on the paper's data, the interval lies on the claimed side, beyond the margin "
    "if the claim has one, and covers or exceeds the printed effect, which has the printed "
    "standard deviations if there are any.",
    "smaller than printed: on the paper's data, it lies on the claimed side, below the printed "
    "effect.",
    "not reproduced: on the paper's data, it excludes the printed effect, and does not exclude "
    "zero or the other side.",
    "seen, not seen on NAME: other data stand in for the paper's. The printed effect is not "
    "compared: seen is an interval on the claimed side, and beyond the claim's margin; not seen "
    "one that covers zero and no effect of 2 points, or lies on the other side. The same words "
    "are used on the paper's data if the printed effect could not have appeared there.",
    "could not be tested here: a gate failed, which the text names: the interval is too wide, "
    "runs are missing, a network is not above always predicting the most frequent class, or the "
    "bed has no headroom.",
    "Headroom: smaller, not reproduced and not seen need a row of the same table, such as an "
    "oracle trained on all rows, that is at least the effect above the lower side of the claim: "
    "the printed one on the paper's data, or 2 points. So does the other side of a claim, unless "
    "it is as far from zero as the effect. Without room for the printed effect the side alone is "
    "judged: seen or not, and the text says that the printed size could not have appeared.",
    "The plain 95 % interval decides. Whether to run more seeds is decided by a wider one: the "
    "planned seeds are the first look at a claim and spend 4 of the 5 percent; each doubling of "
    "the seeds is a further look, which spends half of the rest. Within a table, Holm's "
    "correction keeps the error rate of all its verdicts together at 5 %.",
    "A mean over columns leaves out those in which a compared network is not above always "
    "predicting the most frequent class, and names them, unless the claim is about accuracy and "
    "only its better side is that low. This rule was made after the first runs: before it, such "
    "a column made the whole claim untestable.",
    "How many settings were tried for a row is what its file says; the searches of the first "
    "runs were not archived.",
    "Within a column, the runs of a seed must have the same test rows; columns differ by design, "
    "so comparisons across columns are paired by seed only.",
)
"""What a verdict means, as pages explain it: the first sentence, and a list."""


@dataclass(frozen=True)
class Decision:
    """A verdict on paired differences.

    Attributes:
        mean: mean difference; None if infinite or unknown.
        ends: ends of its confidence interval; None if infinite or below two seeds.
        why: the reason in a few words.
        gate: name of the failed gate; "" if none failed.
        p: smallest error rate at which the interval is not too wide; 1 if there is none.
        seeds: number of seeds that count; later ones wait for the next look.
        needed: number of seeds with a power of 0.8 to decide a claim whose interval is too wide;
            None if unknown.
        settled: whether the wider interval of the look, which covers whenever a reader stops,
            decides too.
    """

    verdict: Verdict
    mean: float | None = None
    ends: tuple[float, float] | None = None
    why: str = ""
    gate: str = ""
    p: float = 1.0
    seeds: int = 0
    needed: int | None = None
    settled: bool = True


def untested(gate: str, why: str) -> Decision:
    """The verdict if a gate fails."""
    return Decision(UNTESTED, why=why, gate=gate)


def look(seeds: int, planned: int) -> tuple[int, float]:
    """The number of seeds at the latest look, and the error rate that it spends.

    Looks are at `planned`, 2 · `planned`, 4 · `planned`, … seeds. The rates of all looks sum to
    `ALPHA`, so that intervals at all looks together cover the mean with probability 0.95, whenever
    a reader stops (a union bound).
    """
    number, rate = max(planned, 1), FIRST
    if seeds >= 2 * number:
        rate = ALPHA - FIRST
        while seeds >= 2 * number:
            number, rate = 2 * number, rate / 2
    return min(seeds, number), rate


def interval(values: Sequence[float], rate: float) -> tuple[float, float] | None:
    """The confidence interval of the mean (Student's t) with an error rate; None below
    two values.
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean, half = float(np.mean(values)), float(t.isf(rate / 2, len(values) - 1)) * _error(values)
    return mean - half, mean + half


def _error(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _p_value(values: Sequence[float], against: float, deviation: float = 0.0) -> float:
    """Two-sided p-value of a mean against a number, which may have a standard deviation."""
    from scipy.stats import t

    error, distance = math.hypot(_error(values), deviation), abs(float(np.mean(values)) - against)
    return 2 * float(t.sf(distance / error, len(values) - 1)) if error else float(distance == 0)


def power(seeds: int, effect: float, deviation: float, rate: float) -> float:
    """The probability that the interval of differences with a mean `effect` and an s.d. lies above
    0.
    """
    if seeds < 2:
        return 0.0
    if not deviation:
        return float(effect > 0)
    from scipy.stats import nct, t

    return float(nct.sf(t.isf(rate / 2, seeds - 1), seeds - 1, effect / deviation * seeds**0.5))


def seeds_needed(planned: int, effect: float, deviation: float, after: int = 0) -> int | None:
    """The smallest look after `after` seeds with a power of at least `POWER`; None beyond
    `MOST_LOOKS` looks.
    """
    for number in (planned << k for k in range(MOST_LOOKS)):
        if number > after and power(number, effect, deviation, look(number, planned)[1]) >= POWER:
            return number
    return None


def decide_claim(
    differences: Sequence[float],
    rule: Rule,
    *,
    planned: int,
    by: float = 0.0,
    printed: float | None = None,
    deviation: float = 0.0,
    relevant: float | None = None,
) -> Decision:
    """Apply `RULES` to one claim on the paper's data; see `on_stand_in` for others.

    Args:
        differences: left minus right by seed, in the order of seeds.
        rule: the claimed side; `within` for a difference of at most `by`.
        planned: number of seeds of the first look.
        by: the margin of the claim.
        printed: the paper's left minus right; None if it prints none.
        deviation: the standard deviation of the printed effect; 0 if it prints none.
        relevant: the smallest effect that counts without a printed one; None if there is none.
    """
    if not len(differences):
        return untested("runs", "no seed is complete")
    if np.isnan(differences).any():
        return untested("measured", "a difference is not a number: no side reaches the level")
    if np.isinf(differences).any():
        return _infinite(differences, rule)
    count, rate = look(len(differences), planned)
    sign = -1.0 if rule == "less" else 1.0
    values = [sign * value for value in differences[:count]]
    mean, ends, wider = float(np.mean(values)), interval(values, ALPHA), interval(values, rate)
    if ends is None or wider is None:
        why = "one seed has no interval"
        return Decision(
            UNTESTED,
            sign * mean,
            None,
            why,
            WIDE,
            seeds=count,
            needed=max(3, planned),
            settled=False,
        )
    effect = None if printed is None else sign * printed
    goal = max(effect, by) if effect is not None and effect > 0 else by or relevant

    def judged(ends: tuple[float, float]) -> tuple[Verdict, str]:
        return (
            _within(ends, by)
            if rule == "within"
            else _directed(mean, ends, by, effect, deviation, goal)
        )

    verdict, why = judged(ends)
    of_printed = deviation if goal == effect else 0.0
    bounds = {
        "reproduced": [(by, 0.0), (-by, 0.0)] if rule == "within" else [(by, 0.0)],
        "smaller than printed": [(0.0, 0.0), (0.0, 0.0) if goal is None else (goal, of_printed)],
        "not reproduced": [(by if mean > 0 else -by, 0.0)]
        if rule == "within"
        else [(goal or 0.0, of_printed)],
    }
    p = max((_p_value(values, *bound) for bound in bounds.get(verdict, ())), default=1.0)
    needed = None
    if verdict == UNTESTED:
        distance = (
            by
            if rule == "within"
            else goal - by
            if goal is not None and goal > by
            else abs(mean - by)
        )
        needed = seeds_needed(planned, distance, float(np.std(values, ddof=1)), len(differences))
        why = (
            f"{why}; "
            f"{f'{needed} seeds would decide' if needed else 'too many seeds would be needed'}"
        )
    shown = ends if sign > 0 else (-ends[1], -ends[0])
    gate, settled = WIDE if verdict == UNTESTED else "", judged(wider)[0] != UNTESTED
    return Decision(verdict, sign * mean, shown, why, gate, p, count, needed, settled)


def _directed(
    mean: float,
    ends: tuple[float, float],
    by: float,
    effect: float | None,
    deviation: float,
    goal: float | None,
) -> tuple[Verdict, str]:
    """The verdict on a claim of more, and its reason."""
    low, high = ends
    highest = mean + math.hypot(high - mean, NORMAL * deviation)
    if low > by and (effect is None or highest >= effect):
        return "reproduced", ""
    if low > 0 and effect is not None and highest < effect:
        return "smaller than printed", "below the printed effect"
    if low > 0 and high < by:
        return "smaller than printed", "below the margin"
    if high < 0:
        return "not reproduced", OPPOSITE
    if low <= 0 and goal is not None and (highest if goal == effect else high) < goal:
        name = (
            "printed effect" if goal == effect else "margin" if goal == by else f"{goal:g} points"
        )
        return "not reproduced", f"excludes the {name}, and not zero"
    return UNTESTED, "too wide"


def _within(ends: tuple[float, float], by: float) -> tuple[Verdict, str]:
    """The verdict on a claim of equality within a margin, and its reason."""
    low, high = ends
    if -by <= low and high <= by:
        return "reproduced", ""
    return (
        ("not reproduced", "they differ by more")
        if low > by or high < -by
        else (UNTESTED, "too wide")
    )


def _infinite(differences: Sequence[float], rule: Rule) -> Decision:
    """The verdict if a side never reaches a level: decided if that is so in all of at least three
    seeds.
    """
    if len({*differences}) > 1:
        return untested("finite", "a level is not reached in some seeds only")
    first = differences[0] > 0
    why = f"the {'first' if first else 'second'} is infinite in every seed"
    if len(differences) < 3:
        return Decision(
            UNTESTED, why=why, gate=WIDE, seeds=len(differences), needed=3, settled=False
        )
    claimed = rule != "within" and first == (rule == "more")
    return Decision(
        "reproduced" if claimed else "not reproduced", why=why, p=0.0, seeds=len(differences)
    )


def on_stand_in(decision: Decision) -> Decision:
    """The words of a decision on other data than the paper's, made without a printed effect."""
    words: dict[Verdict, Verdict] = {
        "reproduced": "seen",
        "smaller than printed": "not seen",
        "not reproduced": "not seen",
    }
    return replace(decision, verdict=words.get(decision.verdict, decision.verdict))


def conjunction(parts: Sequence[Decision]) -> Decision:
    """The verdict on a claim that holds if all its parts hold, each tested at the full error rate:
    the weakest.
    """
    order: tuple[Verdict, ...] = (
        "not reproduced",
        "not seen",
        UNTESTED,
        "smaller than printed",
        "reproduced",
        "seen",
    )
    weakest = min(parts, key=lambda part: (order.index(part.verdict), -part.p))
    p = weakest.p if weakest.verdict in order[:2] else max(part.p for part in parts)
    return replace(
        weakest,
        p=p,
        seeds=min(part.seeds for part in parts),
        settled=all(one.settled for one in parts),
    )


def holm(p_values: Sequence[float], rate: float = ALPHA) -> list[bool]:
    """Whether each of a family's hypotheses is rejected by Holm's step-down procedure."""
    rejected = [False] * len(p_values)
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[at] > rate / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected


def corrected(decision: Decision, rejected: bool, family: int) -> Decision:
    """The decision after Holm's correction over a family of claims."""
    if rejected or decision.verdict == UNTESTED:
        return decision
    why = (
        f"{decision.verdict} alone, but not after Holm's correction over "
        f"{fmt.times(family, 'claim')}"
    )
    return replace(decision, verdict=UNTESTED, why=why, gate=WIDE, needed=None, settled=False)
