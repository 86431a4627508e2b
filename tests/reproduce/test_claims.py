"""Whether a claim is held: the rule on numbers, and on the cells of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedloom.reproduce.claims import RULE, ClaimResult, check_claim, decide
from fedloom.reproduce.results import CellValue, TableResults
from fedloom.reproduce.spec import Claim
from tests.reproduce.conftest import Made, value

NEAR = [1.9, 2.0, 2.1]
"""Mean 2, s.d. 0.1: the interval is 2 ± 4.303 · 0.1 / √3 = 1.752 to 2.248."""
SOME = "a difference is infinite in some seeds only, for example because a level is not always reached"
NEITHER = "a difference is not a number, for example because no side reaches the level"
FAR = [1.0, 2.0, 3.0]
"""Ten times as wide: −0.484 to 4.484."""


@pytest.mark.parametrize(
    ("differences", "rule", "by", "verdict", "said"),
    [
        (NEAR, "more", 0, "held", ""),
        (NEAR, "more", 1.75, "held", ""),
        (NEAR, "more", 1.76, "not seen", "not significant"),
        (NEAR, "more", 2.3, "not seen", "less than that"),
        (NEAR, "less", 0, "not seen", "the opposite"),
        ([-d for d in NEAR], "less", 1.75, "held", ""),
        ([-d for d in NEAR], "less", 2.3, "not seen", "less than that"),
        ([-d for d in NEAR], "more", 0, "not seen", "the opposite"),
        (NEAR, "within", 2.25, "held", ""),
        ([-d for d in NEAR], "within", 2.25, "held", ""),
        (NEAR, "within", 2, "not seen", "not significant"),
        (NEAR, "within", 1.7, "not seen", "they differ by more"),
        (FAR, "more", 0, "not seen", "not significant"),
        ([0.0, 0.0, 0.0], "more", 0, "not seen", "not significant"),
        ([0.0, 0.0, 0.0], "within", 0, "held", ""),
        ([2.0, 2.0, 2.0], "more", 1, "held", ""),
        ([2.0, 2.0], "more", 1, "not seen", "seen, but 2 seeds are too few"),
        ([2.0], "more", 1, "not testable here", "one seed cannot show significance"),
        ([], "more", 0, "not testable here", "no seed is complete"),
        ([1.0, 2.0, math.inf], "more", 0, "not testable here", SOME),
        ([math.inf, math.inf, -math.inf], "more", 0, "not testable here", SOME),
        ([math.inf] * 3, "more", 9, "held", "the first is infinite in every seed"),
        ([-math.inf] * 3, "less", 9, "held", "the second is infinite in every seed"),
        ([math.inf] * 3, "less", 0, "not seen", "the opposite: the first is infinite in every seed"),
        ([-math.inf] * 3, "more", 0, "not seen", "the opposite: the second is infinite in every seed"),
        ([math.inf] * 3, "within", 9, "not seen", "they differ by more: the first is infinite in every seed"),
        ([math.inf] * 2, "more", 0, "not seen", "seen, but 2 seeds are too few: the first is infinite in every seed"),
        ([math.inf], "more", 0, "not testable here", "one seed cannot show significance"),
        ([math.inf, 2.0, math.nan], "more", 0, "not testable here", NEITHER),
    ],
)
def test_the_rule(differences: Sequence[float], rule: Any, by: float, verdict: str, said: str) -> None:
    found = decide(differences, rule, by)
    assert (found.verdict, found.words) == (verdict, said)


def test_the_interval_is_that_of_student() -> None:
    found = decide(NEAR, "more")
    assert found.mean == pytest.approx(2)
    assert found.ends == pytest.approx((1.75157, 2.24843), abs=1e-4)
    assert "at least three seeds" in RULE


A, LOCAL = "AFIND+ | <i>", "Local"


def claims(made: Made, numbers: Mapping[tuple[str, str], Sequence[float]], **claim: Any) -> ClaimResult:
    """A claim on a table with these numbers by seed, from 0."""
    found = made.found()
    put = {at: CellValue(dict(enumerate(values))) for at, values in numbers.items()}
    found.__dict__["numbers"] = {**found.numbers, **put}
    return check_claim(Claim(text="So it is.", **{"left": A, "right": LOCAL, **claim}), found)


def table(a5: Sequence[float], a01: Sequence[float], l5: Sequence[float], l01: Sequence[float]) -> Any:
    return {(A, "α = 5"): a5, (A, "α = 0.1"): a01, (LOCAL, "α = 5"): l5, (LOCAL, "α = 0.1"): l01}


def test_rows_are_compared_by_their_mean_over_columns_seed_by_seed(made: Made) -> None:
    numbers = table([10, 20, 30], [12, 22, 32], [8, 18, 28], [8.2, 17.8, 28])
    found = claims(made, numbers)
    assert found.seeds == pytest.approx({0: 2.9, 1: 3.1, 2: 3.0})
    assert found.verdict == "held"
    assert found.compared == f"{A} − Local, mean of 2 columns"
    assert found.found == "+3.0\u00a0points (+2.8 to +3.2)"  # 3 ± 4.303 · 0.1 / √3
    one = claims(made, numbers, columns=("α = 0.1",), rule="less")
    assert one.seeds == pytest.approx({0: 3.8, 1: 4.2, 2: 4.0})
    assert one.found == "the opposite: +4.0\u00a0points (+3.5 to +4.5)"
    assert one.compared == f"{A} − Local, α = 0.1"


def test_cells_and_numbers_stand_on_either_side(made: Made) -> None:
    numbers = table([10, 10.1, 9.9], [1, 2, 3], [0, 0, 0], [0, 0, 0])
    cell = claims(made, numbers, left=f"{A} @ α = 5", right=8.0, by=1.5)
    assert cell.seeds == pytest.approx({0: 2, 1: 2.1, 2: 1.9})
    assert cell.verdict == "held"
    assert cell.compared == f"{A} @ α = 5 − 8\u00a0points; margin 1.5\u00a0points"
    both = claims(made, numbers, left=f"{A} @ α = 5", right=f"{A} @ α = 0.1")
    assert both.seeds == pytest.approx({0: 9, 1: 8.1, 2: 6.9})


def test_times_multiply_the_right(made: Made) -> None:
    numbers = table([100, 101, 99], [100, 101, 99], [2, 2, 2], [2, 2, 2])
    found = claims(made, numbers, times=49)
    assert found.seeds == pytest.approx({0: 2, 1: 3, 2: 1})
    assert found.ratio == pytest.approx(50)
    assert found.found == "not significant: +2.0\u00a0points (−0.5 to +4.5), 50 times"


def test_an_end_near_an_edge_shows_on_which_side_it_lies(made: Made) -> None:
    numbers = table([0.1, 0.2, 0.15], [0.1, 0.2, 0.15], [0, 0, 0], [0, 0, 0])
    assert claims(made, numbers).found == "+0.15\u00a0points (+0.03 to +0.27)"
    assert claims(made, numbers, by=0.03).verdict == "not seen"


def test_a_seed_that_a_cell_lacks_leaves_the_claim_open(made: Made) -> None:
    found = claims(made, table([10, 20, 30], [10, 20, 30], [8, 18], [8, 18, 28]))
    assert (found.verdict, found.found, found.mean) == ("not testable here", "1 of 3 seeds are missing", None)


def test_runs_of_a_seed_in_one_column_must_have_the_same_test_rows(made: Made) -> None:
    found = made.found()
    place = found.places[LOCAL, "α = 5"]
    assert place.attempts[1].run
    for change in ({"test_sha256": "0" * 64}, {"dataset": "another"}):
        run = replace(place.attempts[1].run, summary=place.attempts[1].run.summary.model_copy(update=change))
        attempts = (place.attempts[0], replace(place.attempts[1], run=run), *place.attempts[2:])
        moved = replace(found, places={**found.places, (LOCAL, "α = 5"): replace(place, attempts=attempts)})
        by_rows, by_cells = (Claim(text="So it is.", left=A, right=right) for right in (LOCAL, "Local @ α = 5"))
        said = {check_claim(claim, moved).found for claim in (by_rows, by_cells)}
        assert said == {"runs of one seed have different test rows"}
        across = Claim(text="So it is.", left="Local @ α = 5", right="Local @ α = 0.1")
        assert check_claim(across, moved).mean is not None and "paired by seed only" in RULE


def test_what_is_infinite_is_no_number(made: Made) -> None:
    found = claims(made, table([10, 20, math.inf], [1, 2, 3], [1, 2, 3], [1, 2, 3]), columns=("α = 5",))
    assert (found.verdict, found.seeds[2], found.mean) == ("not testable here", None, None)
    never = claims(made, table([1, 2, 3], [1, 2, 3], [math.inf] * 3, [1, 2, 3]), rule="less")
    assert (never.verdict, never.mean, never.ends) == ("held", None, None)
    assert never.found == "the second is infinite in every seed" and "infinite to one side" in RULE
    both = claims(made, table([math.inf] * 3, [1, 2, 3], [math.inf] * 3, [1, 2, 3]), rule="within", by=1)
    assert (both.verdict, both.found) == ("not testable here", NEITHER)
    assert both.seeds == never.seeds == dict.fromkeys(range(3))


def test_what_rounding_leaves_is_no_difference(made: Made) -> None:
    numbers = table([0.3] * 3, [0.3] * 3, [0.1] * 3, [0.1] * 3)
    found = claims(made, numbers, times=3, rule="less")
    assert 0.3 - 3 * 0.1 < 0 and (found.verdict, found.seeds) == ("not seen", dict.fromkeys(range(3), 0.0))
    assert claims(made, table([1e-9] * 3, [1e-9] * 3, [0.0] * 3, [0.0] * 3)).verdict == "held"


def test_no_number_is_not_the_best(made: Made) -> None:
    found = made.found()
    for a, local in ((math.nan, 2.0), (2.0, math.nan)):
        put = {(A, "α = 5"): CellValue({0: a}), (LOCAL, "α = 5"): CellValue({0: local})}
        found.__dict__["numbers"] = {**found.numbers, **put}
        assert found.best("α = 5") == set()
    third = {("Large", "α = 5"): CellValue({0: 1.0})}
    found.__dict__["numbers"] = {**found.numbers, **third}
    assert found.best("α = 5") == {A}


def test_the_same_runs_compared_in_the_same_way_are_the_same_evidence(made: Made) -> None:
    one, cells = claims(made, {}, columns=("α = 5",)), claims(made, {}, left=f"{A} @ α = 5", right="Local @ α = 5")
    assert one.evidence == cells.evidence and len(one.evidence) == 16
    eval_modes = [{}, {"rule": "less"}, {"by": 1}, {"measure": "own accuracy"}, {"times": 2}, {"right": 2.0}]
    assert len({one.evidence, *(claims(made, {}, **eval_mode).evidence for eval_mode in eval_modes)}) == 1 + len(
        eval_modes
    )
    assert claims(made, {}, left="Large").evidence == ""
    kilo, mega = (claims(made, {}, measure="bytes", unit=unit, by=1).evidence for unit in ("kB", "MB"))
    assert kilo != mega


def test_columns_in_which_a_row_can_not_be_run_are_left_out_and_named(made: Made) -> None:
    found = made.found()
    at = (LOCAL, "α = 0.1")
    cell = replace(found.places[at].cell, runs=(), untestable="no such data here")
    some = replace(found, places={**found.places, at: replace(found.places[at], cell=cell, attempts=())})
    one = check_claim(Claim(text="So it is.", left=A, right=LOCAL), some)
    assert one.left_out == ("α = 0.1",) and one.compared == f"{A} − Local, α = 5 (without α = 0.1)"
    named = check_claim(Claim(text="So it is.", left=A, right=LOCAL, columns=("α = 5",)), some)
    assert named.left_out == () and named.seeds == one.seeds


def test_what_is_not_here_can_not_be_tested(made: Made) -> None:
    large = claims(made, {}, left="Large")
    assert (large.verdict, large.found, large.seeds) == ("not testable here", "needs ImageNet models", {})
    cell = claims(made, {}, right="Large @ α = 5")
    assert cell.found == "Large @ α = 5: needs ImageNet models"
    told = claims(made, {}, untestable={"small": "too few clients"})
    assert (told.verdict, told.found) == ("not testable here", "too few clients")


def test_a_cell_without_runs_is_named(made: Made) -> None:
    found = made.found()
    rest = {at: place for at, place in found.places.items() if at != (LOCAL, "α = 5")}
    some = TableResults(found.name, found.reproduction, found.scale, rest)
    claim = Claim(text="So it is.", left=A, right=LOCAL)
    assert check_claim(claim, some).found == "Local @ α = 5 is not selected"


def test_another_measure_has_a_unit_of_its_own(made: Made) -> None:
    claim, *_ = made.reproduction.claims
    found = check_claim(claim, made.found())
    assert (found.verdict, found.unit) == ("held", "kB")
    assert found.compared == f"bytes: {A} − Local, mean of 2 columns; margin 1\u00a0kB"
    assert all(difference > 1 for difference in found.seeds.values())


def test_another_measure_without_a_unit_has_that_of_the_table(made: Made) -> None:
    found = claims(made, {}, measure="own accuracy", right=200.0, rule="less")
    first = found.seeds[0] + 200
    runs = [made.folder(cell.runs[0]) for cell in made.cells if cell.row.name == A]
    assert first == pytest.approx(100 * sum(value(run, "own accuracy") or 0 for run in runs) / 2)
    assert (found.verdict, found.unit) == ("held", "%")
