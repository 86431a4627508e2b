"""Verdicts on planted numbers: intervals, looks, power, families and conjunctions."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from fedloom_papers.verdicts import (
    ALPHA,
    RULE,
    UNTESTED,
    WIDE,
    Decision,
    conjunction,
    corrected,
    decide_claim,
    holm,
    interval,
    look,
    on_stand_in,
    power,
    seeds_needed,
)

NEAR = [1.9, 2.0, 2.1]
"""Mean 2, s.d. 0.1: the interval is 2 ± 4.303 · 0.1 / √3 = 1.752 to 2.248."""
FAR = [1.0, 2.0, 3.0]
"""Ten times as wide: −0.48 to 4.48."""


@pytest.mark.parametrize(
    ("differences", "rule", "settings", "verdict", "why"),
    [
        (NEAR, "more", {"printed": 2.2}, "reproduced", ""),  # covers
        (NEAR, "more", {"printed": 1.0}, "reproduced", ""),  # exceeds
        (NEAR, "more", {"printed": 2.3}, "smaller than printed", "below the printed effect"),
        (NEAR, "less", {"printed": -1.0}, "not reproduced", "the opposite"),
        ([-d for d in NEAR], "less", {"printed": -2.0}, "reproduced", ""),
        (
            [-0.1, 0.0, 0.1],
            "more",
            {"printed": 1.0},
            "not reproduced",
            "excludes the printed effect, and not zero",
        ),
        (
            FAR,
            "more",
            {"printed": 5.0},
            "not reproduced",
            "excludes the printed effect, and not zero",
        ),
        (FAR, "more", {"printed": 4.0}, UNTESTED, "too wide; 6 seeds would decide"),
        (NEAR, "more", {}, "reproduced", ""),
        (NEAR, "more", {"by": 1.74}, "reproduced", ""),
        (NEAR, "more", {"by": 1.76}, UNTESTED, "too wide; 12 seeds would decide"),
        (NEAR, "more", {"by": 2.26}, "smaller than printed", "below the margin"),
        (
            [-0.1, 0.0, 0.1],
            "more",
            {"relevant": 2.0},
            "not reproduced",
            "excludes the 2 points, and not zero",
        ),
        (
            [-0.1, 0.0, 0.1],
            "more",
            {"by": 2.0},
            "not reproduced",
            "excludes the margin, and not zero",
        ),
        ([-0.1, 0.0, 0.1], "more", {}, UNTESTED, "too wide; too many seeds would be needed"),
        (NEAR, "within", {"by": 2.3}, "reproduced", ""),
        ([-d for d in NEAR], "within", {"by": 2.3}, "reproduced", ""),
        (NEAR, "within", {"by": 1.7}, "not reproduced", "they differ by more"),
        ([2.0], "more", {}, UNTESTED, "one seed has no interval"),
        ([], "more", {}, UNTESTED, "no seed is complete"),
        ([1.0, 2.0, math.inf], "more", {}, UNTESTED, "a level is not reached in some seeds only"),
        (
            [1.0, math.nan],
            "more",
            {},
            UNTESTED,
            "a difference is not a number: no side reaches the level",
        ),
        ([math.inf] * 3, "more", {"by": 9}, "reproduced", "the first is infinite in every seed"),
        ([math.inf] * 3, "less", {}, "not reproduced", "the first is infinite in every seed"),
        ([-math.inf] * 3, "more", {}, "not reproduced", "the second is infinite in every seed"),
        ([math.inf] * 2, "more", {}, UNTESTED, "the first is infinite in every seed"),
    ],
)
def test_the_rule(
    differences: Sequence[float], rule: Any, settings: Any, verdict: str, why: str
) -> None:
    found = decide_claim(differences, rule, planned=3, **settings)
    assert (found.verdict, found.why) == (verdict, why)


def test_the_plain_student_interval_decides() -> None:
    found = decide_claim(NEAR, "more", planned=3)
    half = float(t.ppf(1 - ALPHA / 2, 2)) * 0.1 / math.sqrt(3)
    assert found.ends == pytest.approx((2 - half, 2 + half))
    assert decide_claim([-d for d in NEAR], "less", planned=3).ends == pytest.approx(
        (-2 - half, -2 + half)
    )
    assert interval([1.0], 0.04) is None and "Student's t" in RULE


def test_the_width_of_later_looks_is_for_stopping_only() -> None:
    """A wider interval covers a printed effect more easily, so it must not decide; it says whether
    to run more.
    """
    values = [1.0, 2.0, 3.0, 2.0, 1.5, 1.9, 2.2, 1.4, 2.8, 1.6]
    two, one = decide_claim(values, "more", planned=5), decide_claim(values, "more", planned=10)
    assert two.ends == one.ends == pytest.approx(interval(values, ALPHA))
    near = [0.1, 0.3, 0.9, 0.2, 0.6, 0.5, -0.1, 0.4, -0.3, 0.1]
    late = decide_claim(near, "more", planned=5)
    assert (late.verdict, late.settled) == ("reproduced", False) and two.settled
    assert decide_claim(near, "more", planned=10).ends == late.ends


def test_the_paper_s_own_deviation_widens_its_effect() -> None:
    sure, unsure = (
        decide_claim(NEAR, "more", planned=3, printed=2.5, deviation=sd) for sd in (0.0, 0.4)
    )
    assert (sure.verdict, unsure.verdict) == ("smaller than printed", "reproduced")
    flat = [-0.1, 0.0, 0.1]
    sure, unsure = (
        decide_claim(flat, "more", planned=3, printed=1.0, deviation=sd) for sd in (0.0, 0.6)
    )
    assert (sure.verdict, unsure.verdict, unsure.gate) == ("not reproduced", UNTESTED, WIDE)


def test_on_other_data_a_claim_is_seen_or_not() -> None:
    words = [
        on_stand_in(Decision(verdict)).verdict
        for verdict in ("reproduced", "not reproduced", UNTESTED)
    ]
    assert words == ["seen", "not seen", UNTESTED]


def test_looks_are_at_doublings_and_their_rates_sum_to_alpha() -> None:
    assert [look(n, 5) for n in (3, 5, 9)] == [(3, 0.04), (5, 0.04), (5, 0.04)]
    assert [look(n, 5)[0] for n in (10, 19, 20, 79)] == [10, 10, 20, 40]
    rates = [look(5 * 2**k, 5)[1] for k in range(30)]
    assert rates[1:3] == pytest.approx([0.005, 0.0025]) and sum(rates) == pytest.approx(ALPHA)


def test_the_intervals_of_all_looks_cover_the_mean_together() -> None:
    """Whoever looks after every seed and stops when zero is excluded is wrong in at most 5 % of
    experiments.
    """
    draws = np.random.default_rng(0).normal(size=(1500, 40))
    looks, wrong = (5, 10, 20, 40), np.zeros(1500, dtype=bool)
    naive = np.zeros(1500, dtype=bool)
    for number in looks:
        values = draws[:, :number]
        distance = np.abs(values.mean(1)) / (values.std(1, ddof=1) / number**0.5)
        wrong |= distance > t.isf(look(number, 5)[1] / 2, number - 1)
        naive |= distance > t.isf(ALPHA / 2, number - 1)
    # at 95 % for each look, more than 8 % would be wrong
    assert wrong.mean() < 0.05 < 0.08 < naive.mean()


def test_seeds_between_two_looks_wait() -> None:
    values = [2.0, 2.1, 1.9, 2.0, 2.05, -50.0, -50.0]
    assert decide_claim(values, "more", planned=5).seeds == 5
    assert (
        decide_claim(values, "more", planned=5).ends
        == decide_claim(values[:5], "more", planned=5).ends
    )


def test_power_is_that_of_repeated_experiments() -> None:
    draws = np.random.default_rng(1).normal(1.0, 1.0, size=(4000, 8))
    low = draws.mean(1) - t.isf(0.02, 7) * draws.std(1, ddof=1) / 8**0.5
    assert power(8, 1.0, 1.0, 0.04) == pytest.approx((low > 0).mean(), abs=0.025)
    assert power(1, 9.0, 1.0, 0.04) == 0 and power(2, 1.0, 0.0, 0.04) == 1


def test_an_undecided_claim_says_how_many_seeds_would_decide() -> None:
    found = decide_claim([-3.0, 5.0, 1.0, 4.0, -2.0], "more", planned=5, printed=3.0)
    sd = float(np.std([-3.0, 5.0, 1.0, 4.0, -2.0], ddof=1))
    assert found.verdict == UNTESTED and found.needed == seeds_needed(5, 3.0, sd, after=5) == 40
    assert found.why == "too wide; 40 seeds would decide"
    assert power(40, 3.0, sd, look(40, 5)[1]) >= 0.8 > power(20, 3.0, sd, look(20, 5)[1])
    assert seeds_needed(5, 1e-6, 1.0) is None


def test_a_printed_effect_on_the_other_side_is_no_goal() -> None:
    """The paper's own numbers contradict its claim: only the direction counts."""
    assert decide_claim(NEAR, "more", planned=3, printed=-1.0).verdict == "reproduced"


def test_holm_steps_down_and_stops() -> None:
    # 0.005 ≤ .0125, 0.01 ≤ .0167, 0.03 > .025
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([]) == [] and holm([0.05]) == [True] and holm([0.051]) == [False]
    assert holm([0.02, 0.02, 0.02]) == [False] * 3  # a plain 5 % would reject all


def test_what_holm_does_not_reject_is_undecided() -> None:
    alone = decide_claim([1.0, 2.0, 3.0, 2.0, 1.5], "more", planned=5, printed=2.0)
    assert alone.verdict == "reproduced" and 0.001 < alone.p < 0.05
    kept, lost = corrected(alone, True, 3), corrected(alone, False, 3)
    assert kept is alone and (lost.verdict, lost.mean, lost.ends) == (
        UNTESTED,
        alone.mean,
        alone.ends,
    )
    assert lost.why == "reproduced alone, but not after Holm's correction over three claims"
    gated = Decision(UNTESTED, gate="chance")
    assert corrected(gated, False, 3) is gated


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "smaller than printed"], "smaller than printed"),
        (["smaller than printed", UNTESTED], UNTESTED),
        (["reproduced", UNTESTED], UNTESTED),
        ([UNTESTED, "not reproduced"], "not reproduced"),  # one counter-example is enough
    ],
)
def test_a_conjunction_is_as_strong_as_its_weakest_part(verdicts: list[Any], whole: str) -> None:
    parts = [
        Decision(verdict, mean=float(i), p=0.01 * i, seeds=5 + i)
        for i, verdict in enumerate(verdicts)
    ]
    found = conjunction(parts)
    assert (found.verdict, found.seeds) == (whole, 5)
    assert found.p == (parts[1].p if whole == "not reproduced" else 0.01)
