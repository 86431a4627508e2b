"""Test a paper's claims on our runs, by paired differences over seeds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report.statistics import confidence_interval
from fedloom.reproduce.measure import Unit, as_printed
from fedloom.reproduce.results import TableResults
from fedloom.reproduce.spec import AT, Claim

Verdict = Literal["held", "not seen", "not testable here"]
VERDICTS: tuple[Verdict, ...] = ("held", "not seen", "not testable here")
SEEDS = 3
"""Minimum number of seeds for the verdict `held`."""
ROUNDING = 1e-12
"""Relative difference below which two sides are equal up to rounding."""
RULE = (
    f"A claim is held if, over at least three seeds, the whole 95{fmt.NBSP}% confidence interval (Student's t) of the "
    "mean paired difference lies on the claimed side, beyond the margin if the claim has one. Differences that are "
    "infinite to one side in all seeds, because one method never reaches a level, lie beyond any margin. A claim is "
    "not testable here if its runs cannot be executed, a planned seed is missing, there is only one seed, or a "
    "difference is not a number or is infinite in some seeds only. Otherwise it is not seen, and the text says "
    "whether the opposite is. Within a column, the runs of a seed must have the same test rows. Columns differ by "
    "design, so comparisons across columns are paired by seed only."
)


@dataclass(frozen=True)
class Decision:
    """A verdict on paired differences.

    Attributes:
        mean: mean difference; None if infinite.
        ends: ends of its 95 % confidence interval; None if infinite or below two seeds.
        words: the reason if the claim is not held, and the infinite side if any.
    """

    verdict: Verdict
    mean: float | None
    ends: tuple[float, float] | None
    words: str = ""


@dataclass(frozen=True)
class ClaimResult:
    """A claim and its verdict.

    Attributes:
        compared: the two sides of the difference.
        seeds: difference by seed, in the unit; None if not finite.
        ratio: left divided by right, if the claim has a factor.
        left_out: columns without runs, if the claim names no columns.
        found: the result in a few words.
        evidence: equal for claims decided by the same runs in the same way; empty if runs are missing.
    """

    text: str
    compared: str
    verdict: Verdict
    mean: float | None
    ends: tuple[float, float] | None
    seeds: Mapping[int, float | None]
    unit: str
    ratio: float | None = None
    left_out: tuple[str, ...] = ()
    found: str = ""
    evidence: str = ""


def decide(differences: Sequence[float], rule: Literal["more", "less", "within"], by: float = 0.0) -> Decision:
    """Apply `RULE`.

    Args:
        differences: left minus right, one for each seed.
        rule, by: see `Claim`.
    """
    if not len(differences):
        return _untested("no seed is complete")
    if np.isnan(differences).any():
        return _untested("a difference is not a number, for example because no side reaches the level")
    infinite = bool(np.isinf(differences).any())
    if infinite and len({*differences}) > 1:
        return _untested(
            "a difference is infinite in some seeds only, for example because a level is not always reached"
        )
    mean = None if infinite else float(np.mean(differences))
    if len(differences) < 2:
        return Decision("not testable here", mean, None, "one seed cannot show significance")
    ends = None if infinite else confidence_interval(differences)
    low, high = ends or (differences[0], differences[0])
    if rule == "less":
        low, high = -high, -low
    if rule == "within":
        seen = -by <= low and high <= by
        against = "they differ by more" if low > by or high < -by else ""
    else:
        seen = low > by
        against = "the opposite" if high < 0 else "less than that" if by and high < by else ""
    held = seen and len(differences) >= SEEDS
    few = f"seen, but {len(differences)} seeds are too few" if seen and not held else ""
    why = "" if held else few or against or "not significant"
    if infinite:
        side = f"the {'first' if differences[0] > 0 else 'second'} is infinite in every seed"
        why = f"{why}: {side}" if why else side
    return Decision("held" if held else "not seen", mean, ends, why)


def _untested(why: str) -> Decision:
    return Decision("not testable here", None, None, why)


def _minus(left: float, right: float) -> float:
    """The difference without rounding errors; nan if both sides are equally infinite."""
    alike = math.isfinite(left) and math.isclose(left, right, rel_tol=ROUNDING)
    return 0.0 if alike else left - right


def check_claim(claim: Claim, found: TableResults) -> ClaimResult:
    """Test a claim on the runs of a reproduction."""
    unit = found.unit if claim.unit is None else Unit(claim.unit)
    columns, left_out = _columns(claim, found)
    left, right = _cells(claim.left, columns), _cells(claim.right, columns)
    why = claim.untestable.get(found.scale) or _missing([*left, *right], found) or ("" if left else _reason(found))
    why = why or _unpaired(left, right, found)
    if why:
        decision, seeds, ratio = _untested(why.rstrip(".")), dict[int, float](), None
    else:
        ours = _by_seed(left, claim, found, unit)
        theirs = _by_seed(right, claim, found, unit) if right else dict.fromkeys(ours, float(claim.right))
        both = sorted(ours.keys() & theirs.keys())
        seeds = {seed: _minus(ours[seed], claim.times * theirs[seed]) for seed in both}
        planned = {one.config.seed for at in (*left, *right) for one in found.places[at].attempts}
        if planned - seeds.keys():
            decision = _untested(f"{len(planned - seeds.keys())} of {len(planned)} seeds are missing")
        else:
            decision = decide([*seeds.values()], claim.rule, claim.by)
        ratio = _ratio([ours[s] for s in both], [theirs[s] for s in both]) if claim.times != 1 else None
    return ClaimResult(
        text=claim.text,
        compared=_compared(claim, columns, left_out, unit),
        verdict=decision.verdict,
        mean=decision.mean,
        ends=decision.ends,
        seeds={seed: value if math.isfinite(value) else None for seed, value in seeds.items()},
        unit=unit.name,
        ratio=ratio,
        left_out=left_out,
        found=_outcome_text(decision, unit, claim.by, ratio),
        evidence=_evidence(claim, left, right, found, unit),
    )


def _columns(claim: Claim, found: TableResults) -> tuple[list[str], tuple[str, ...]]:
    """The columns to average over, those of the claim or all with runs of its rows; and those without runs."""
    if claim.columns is not None:
        return list(claim.columns), ()
    rows = [side for side in (claim.left, claim.right) if isinstance(side, str) and AT not in side]
    every = [column.name for column in found.reproduction.columns]
    able = [c for c in every if all(not _untestable(found, row, c) for row in rows)]
    return able, tuple(c for c in every if c not in able) if rows else ()


def _untestable(found: TableResults, row: str, column: str) -> str:
    place = found.places.get((row, column))
    return place.cell.untestable if place else ""


def _cells(side: str | float, columns: Sequence[str]) -> list[tuple[str, str]]:
    """The cells of a side; empty for a number."""
    if not isinstance(side, str):
        return []
    row, _, column = side.partition(AT)
    return [(row, column)] if column else [(row, column) for column in columns]


def _missing(cells: Sequence[tuple[str, str]], found: TableResults) -> str:
    """Why a cell has no value; empty if all have one."""
    for at in cells:
        place, name = found.places.get(at), AT.join(at)
        if place is None:
            return f"{name} is not selected"
        if place.cell.untestable:
            return f"{name}: {place.cell.untestable}"
        if not place.runs:
            return f"{name}: {place.missing[0].problem if place.missing else 'not run'}"
    return ""


def _unpaired(left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]], found: TableResults) -> str:
    """Why cells of a column cannot be paired by seed; empty if they can."""
    for pair in ((at, other) for at in left for other in right if at[1] == other[1]):
        ours, theirs = (
            {run.summary.seed: (run.summary.dataset, run.summary.test_sha256) for run in found.places[at].runs}
            for at in pair
        )
        if any(ours[seed] != theirs[seed] for seed in ours.keys() & theirs.keys()):
            return "runs of one seed have different test rows"
    return ""


def _evidence(
    claim: Claim, left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]], found: TableResults, unit: Unit
) -> str:
    """A hash of the claim's runs, measure and rule."""
    places = [[found.places.get(at) for at in side] for side in (left, right)]
    if not left or any(place is None or not place.attempts for side in places for place in side):
        return ""
    runs = [sorted(one.folder.name for place in side if place for one in place.attempts) for side in places]
    measure = claim.measure or found.reproduction.measure
    number = None if isinstance(claim.right, str) else claim.right
    what = [runs, number, claim.rule, claim.by, claim.times, measure, unit.name]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _reason(found: TableResults) -> str:
    """Why no column remains."""
    why = [place.cell.untestable for place in found.places.values() if place.cell.untestable]
    return why[0] if why else "no column to compare"


def _by_seed(cells: Sequence[tuple[str, str]], claim: Claim, found: TableResults, unit: Unit) -> dict[int, float]:
    """The mean over cells, for each seed that all cells have."""
    if claim.measure is None and claim.unit is None:
        each = [found.numbers[at].by_seed for at in cells]
    else:
        measure = claim.measure or found.reproduction.measure
        each = [found.number(*at, measure, unit.name).by_seed for at in cells]
    both = set[int].intersection(*({*one} for one in each))
    return {seed: float(np.mean([one[seed] for one in each])) for seed in sorted(both)}


def _ratio(left: Sequence[float], right: Sequence[float]) -> float | None:
    """The ratio of the means; None if undefined."""
    above, below = float(np.sum(left)), float(np.sum(right))
    return above / below if below and math.isfinite(above) and math.isfinite(below) else None


def _compared(claim: Claim, columns: Sequence[str], left_out: Sequence[str], unit: Unit) -> str:
    """`FedAL − FedMD, mean of 3 columns`, without columns that have no runs."""
    right = claim.right if isinstance(claim.right, str) else f"{as_printed(claim.right, None)}{unit.apart}"
    times = f"{claim.times:g} × " if claim.times != 1 else ""
    rows = [side for side in (claim.left, claim.right) if isinstance(side, str) and AT not in side]
    over = ""
    if rows and columns:
        over = f", {columns[0]}" if len(columns) == 1 else f", mean of {len(columns)} columns"
        over += f" (without {fmt.together(left_out)})" if left_out else ""
    margin = f"; margin {as_printed(claim.by, None)}{unit.apart}" if claim.by else ""
    measure = f"{claim.measure}: " if claim.measure else ""
    return f"{measure}{claim.left} {fmt.MINUS} {times}{right}{over}{margin}"


def _outcome_text(decision: Decision, unit: Unit, by: float, ratio: float | None) -> str:
    """`the opposite: −2.1 points (−3.0 to −1.2)`."""
    if decision.mean is None:
        return decision.words
    decimals = unit.decimals(decision.mean)
    ends = decision.ends or ()
    edges = (0.0, by, -by)
    while decimals < 4 and any(
        e != edge and round(e, decimals) == round(edge, decimals) for e in ends for edge in edges
    ):
        decimals += 1  # show on which side of the edge the end lies
    mean, *others = (fmt.number(value, f"+,.{decimals}f") for value in (decision.mean, *ends))
    text = f"{mean}{unit.apart}" + (f" ({' to '.join(others)})" if others else "")
    text += f", {ratio:,.3g} times" if ratio is not None else ""
    return f"{decision.words}: {text}" if decision.words else text
