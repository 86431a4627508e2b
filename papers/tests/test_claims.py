"""Verdicts on claims about the cells of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from papers.tests.conftest import Made, value

from fedloom_papers.claims import ClaimResult, check_claim, check_claims
from fedloom_papers.results import CellValue, TableResults, gather
from fedloom_papers.spec import Claim
from fedloom_papers.verdicts import RULES, UNTESTED

FEW = {"small": "too few clients"}


A, LOCAL = "AFIND+ | <i>", "Local"


def planted(
    made: Made, numbers: Mapping[tuple[str, str], Sequence[float]], chance: float | None = None
) -> TableResults:
    """The table with these numbers by seed, from 0, and a chance level in [0, 1]."""
    found = made.found()
    put = {
        at: CellValue(dict(enumerate(values)), found.numbers[at].paper)
        for at, values in numbers.items()
    }
    found.__dict__["numbers"] = {**found.numbers, **put}
    found.__dict__["chance"] = lambda *_: chance
    return found


def at_chance(made: Made, *low: tuple[str, str]) -> TableResults:
    """A table whose cells have about 60 %, Local's 50 %, but for some at the chance
    level of 10 %.
    """
    ten = {at: [10, 9, 11] for at in low}
    found = planted(
        made,
        {**table([60, 61, 62.5], [60, 61, 62.4], [50, 51, 52], [50, 51, 52]), **ten},
        chance=0.1,
    )
    found.__dict__["number"] = lambda row, column, *_: found.numbers[row, column]
    return found


def claims(
    made: Made, numbers: Mapping[tuple[str, str], Sequence[float]], **claim: Any
) -> ClaimResult:
    """A claim on a table with these numbers by seed, from 0."""
    return check_claim(
        Claim(text="So it is.", **{"left": A, "right": LOCAL, **claim}), planted(made, numbers)
    )


def table(
    a5: Sequence[float], a01: Sequence[float], l5: Sequence[float], l01: Sequence[float]
) -> Any:
    return {(A, "α = 5"): a5, (A, "α = 0.1"): a01, (LOCAL, "α = 5"): l5, (LOCAL, "α = 0.1"): l01}


def test_rows_are_compared_by_their_mean_over_columns_seed_by_seed(made: Made) -> None:
    numbers = table([10, 20, 30], [12, 22, 32], [8, 18, 28], [8.2, 17.8, 28])
    found = claims(made, numbers)
    assert found.seeds == pytest.approx({0: 2.9, 1: 3.1, 2: 3.0})
    assert found.verdict == "reproduced" and found.printed is None  # Local has no number at α = 0.1
    assert found.compared == f"{A} − Local, mean of 2 columns"
    assert found.found == "+3.0\u00a0points (+2.8 to +3.2)"  # 3 ± 4.303 · 0.1 / √3
    one = claims(made, numbers, columns=("α = 0.1",), rule="less")
    assert one.seeds == pytest.approx({0: 3.8, 1: 4.2, 2: 4.0})
    assert (one.verdict, one.found) == (
        "not reproduced",
        "+4.0\u00a0points (+3.5 to +4.5): the opposite",
    )
    assert one.compared == f"{A} − Local, α = 0.1"


def test_the_paper_s_own_difference_is_the_metric(made: Made) -> None:
    """It prints 78 and 80.25 at α = 5: 2.25 points less."""
    near = table([10, 10.1, 9.9], [1, 2, 3], [12, 12.4, 12], [1, 2, 3])
    found = claims(made, near, columns=("α = 5",), rule="less")
    assert found.printed == pytest.approx(-2.25) and found.verdict == "reproduced"
    assert found.found == "−2.1\u00a0points (−2.5 to −1.8), printed −2.2"
    room = {**near, ("Large", "α = 5"): [20, 20, 20]}
    less = claims(made, room, columns=("α = 5",), rule="less", printed=-5.0)
    assert (less.verdict, less.printed) == ("smaller than printed", -5.0)
    none = claims(made, near, columns=("α = 5",), rule="less", metric="own accuracy")
    assert none.printed is None


def test_cells_and_numbers_stand_on_either_side(made: Made) -> None:
    numbers = table([10, 10.1, 9.9], [1, 2, 3], [0, 0.1, 0], [0, 0.1, 0])
    cell = claims(made, numbers, left=f"{A} @ α = 5", right=8.0, by=1.5)
    assert cell.seeds == pytest.approx({0: 2, 1: 2.1, 2: 1.9})
    assert cell.verdict == "smaller than printed" and cell.printed == 70  # it prints 78
    assert cell.compared == f"{A} @ α = 5 − 8\u00a0points; margin 1.5\u00a0points"
    both = claims(made, numbers, left=f"{A} @ α = 5", right=f"{A} @ α = 0.1")
    assert both.seeds == pytest.approx({0: 9, 1: 8.1, 2: 6.9}) and both.printed == pytest.approx(
        3.6
    )


def test_times_multiply_the_right(made: Made) -> None:
    numbers = table([100, 101, 99], [100, 101, 99], [2, 2, 2], [2, 2, 2])
    found = claims(made, numbers, times=49)
    assert found.seeds == pytest.approx({0: 2, 1: 3, 2: 1})
    assert found.ratio == pytest.approx(50)
    assert (
        found.found == "+2.0\u00a0points (−0.5 to +4.5), 50 times: too wide; 12 seeds would decide"
    )
    more = claims(
        made,
        {**numbers, (A, "α = 5"): [100, 101, 99, 100], (A, "α = 0.1"): [100, 101, 99, 100]},
        times=49,
    )
    assert more.ratio == found.ratio, "of the seeds that both sides have"


def test_an_end_near_an_edge_shows_on_which_side_it_lies(made: Made) -> None:
    numbers = table([0.1, 0.2, 0.15], [0.1, 0.2, 0.15], [0, 0, 0.01], [0, 0, 0.01])
    assert claims(made, numbers).found == "+0.15\u00a0points (+0.02 to +0.27)"


def test_a_difference_of_differences(made: Made) -> None:
    """AFIND+ gains 2, 2.2 and 1.8 points more over Local at α = 5 than at α = 0.1."""
    numbers = table([10, 20, 30], [6, 16, 26.4], [5, 15, 25], [3, 13.2, 23.2])
    found = claims(
        made,
        numbers,
        left=f"{A} @ α = 5",
        right="Local @ α = 5",
        than=(f"{A} @ α = 0.1", "Local @ α = 0.1"),
    )
    assert found.seeds == pytest.approx({0: 2, 1: 2.2, 2: 1.8}) and found.verdict == "reproduced"
    assert found.compared == f"({A} @ α = 5 − Local @ α = 5) − ({A} @ α = 0.1 − Local @ α = 0.1)"


def test_a_claim_about_each_of_several_needs_all(made: Made) -> None:
    numbers = table([10, 10.1, 9.9], [14, 14.1, 13.8], [8, 8, 8], [15, 15.2, 15])
    numbers |= {("Large", column): [99.0] * 3 for column in ("α = 5", "α = 0.1")}
    low, high = "Local @ α = 5", "Local @ α = 0.1"
    both = claims(made, numbers, left=f"{A} @ α = 0.1", right=(low, high))
    assert both.verdict == "not reproduced" and both.seeds == pytest.approx(
        {0: -1, 1: -1.1, 2: -1.2}
    )
    assert both.compared == f"{A} @ α = 0.1 − each of {low} and {high}"
    assert (
        claims(made, numbers, left=f"{A} @ α = 0.1", right=(low, f"{A} @ α = 5")).verdict
        == "reproduced"
    )
    with pytest.raises(ValueError, match="has no right side"):
        Claim(text="So it is.", left=A, right=())


def test_a_missing_seed_fails_the_gate(made: Made) -> None:
    found = claims(made, table([10, 20, 30], [10, 20, 30], [8, 18], [8, 18, 28]))
    assert (found.verdict, found.gate, found.found) == (
        "could not be tested here",
        "runs",
        "1 of 3 seeds are missing",
    )


def test_a_network_at_chance_fails_the_gate(made: Made) -> None:
    claim = Claim(text="So it is.", left=f"{A} @ α = 5", right="Local @ α = 5")
    found = check_claim(claim, at_chance(made, (LOCAL, "α = 5")))
    assert (found.verdict, found.gate) == (
        "could not be tested here",
        "chance",
    ) and "Local @ α = 5 has" in found.found
    assert check_claim(claim, at_chance(made)).verdict == "reproduced"


def test_a_column_at_chance_is_left_out_of_a_mean_and_named(made: Made) -> None:
    claim, alone = (
        Claim(text="So it is.", left=A, right=LOCAL, columns=c) for c in (None, ("α = 0.1",))
    )
    for low in ([(LOCAL, "α = 5")], [(LOCAL, "α = 5"), (A, "α = 5")]):
        found, one = (check_claim(each, at_chance(made, *low)) for each in (claim, alone))
        assert (found.verdict, found.seeds, found.evidence) == (
            "reproduced",
            one.seeds,
            one.evidence,
        )
        assert found.at_chance == ("α = 5",)
        assert found.compared == f"{A} − Local, α = 0.1 (without α = 5: at chance)"
    assert check_claim(claim, at_chance(made)).at_chance == ()
    none = check_claim(claim, at_chance(made, (LOCAL, "α = 5"), (LOCAL, "α = 0.1")))
    assert (none.gate, none.at_chance) == ("chance", ())


def test_the_printed_effect_is_that_of_the_columns_that_remain(made: Made) -> None:
    low = at_chance(made, (LOCAL, "α = 0.1"))
    assert check_claim(Claim(text="So it is.", left=A, right=LOCAL), low).printed == 78 - 80.25
    whole = Claim(text="So it is.", left=A, right=LOCAL, printed=5.0)
    assert (
        check_claim(whole, low).printed is None and check_claim(whole, at_chance(made)).printed == 5
    )


@pytest.mark.parametrize(
    ("claim", "low", "gate"),
    [
        ({}, A, "chance"),
        ({}, LOCAL, ""),
        ({"rule": "less"}, A, ""),
        ({"rule": "less"}, LOCAL, "chance"),
        ({"rule": "within", "by": 100}, A, "chance"),
        ({"rule": "within", "by": 100}, LOCAL, "chance"),
        ({"right": 10.0}, A, "chance"),
        ({"right": (LOCAL, LOCAL)}, A, "chance"),
        ({"metric": "best accuracy"}, A, "chance"),
        ({"metric": "bytes until best"}, A, ""),
    ],
)
def test_nobody_wins_by_having_a_failure_left_out(
    made: Made, claim: dict[str, Any], low: str, gate: str
) -> None:
    found = check_claim(
        Claim(text="So it is.", **{"left": A, "right": LOCAL, **claim}),
        at_chance(made, (low, "α = 5")),
    )
    assert (found.gate == "chance") == (gate == "chance") and found.at_chance == (
        () if gate else ("α = 5",)
    )


def test_a_column_without_all_seeds_is_not_left_out(made: Made) -> None:
    low = at_chance(made, (LOCAL, "α = 5"))
    at = (LOCAL, "α = 5")
    attempts = (
        replace(low.places[at].attempts[0], record=None, run=None),
        *low.places[at].attempts[1:],
    )
    some = replace(low, places={**low.places, at: replace(low.places[at], attempts=attempts)})
    some.__dict__.update({name: low.__dict__[name] for name in ("chance", "number", "numbers")})
    some.__dict__["numbers"] = {**low.numbers, at: CellValue({1: 9.0, 2: 11.0})}
    found = check_claim(Claim(text="So it is.", left=A, right=LOCAL), some)
    assert (found.gate, found.at_chance) == ("runs", ())


def test_without_headroom_nothing_can_be_seen(made: Made) -> None:
    """A claim that is not seen needs a row that is at least the effect above the lower side."""
    mid = table([50, 50.1, 50.2], [50, 50.1, 50.2], [50, 50.2, 50.1], [50, 50.2, 50.1])
    claim = Claim(text="So it is.", left=A, right=LOCAL)
    found = planted(made, mid, chance=0.1)
    one = check_claim(claim, found)
    assert (one.verdict, one.gate) == (UNTESTED, "headroom")
    told = (
        "0.0\u00a0points (−0.2 to +0.2): the effect needs 2.0, and no row is more than "
        "0.0\u00a0points above"
    )
    assert one.found == told
    for top, verdict in ((51.0, UNTESTED), (53.0, "not reproduced")):
        oracle = {("Large", column): [top] * 3 for column in ("α = 5", "α = 0.1")}
        assert check_claim(claim, planted(made, {**mid, **oracle}, chance=0.1)).verdict == verdict
    opposite = table([40, 40.1, 40.2], [40, 40.1, 40.2], [50, 50.2, 50.1], [50, 50.2, 50.1])
    assert check_claim(claim, planted(made, opposite, chance=0.1)).verdict == "not reproduced"
    slightly = table([49, 49.1, 49.2], [49, 49.1, 49.2], [50, 50.2, 50.1], [50, 50.2, 50.1])
    # whether or not the archive has the accuracy of the most frequent class
    for known in (0.1, None):
        one = check_claim(claim, planted(made, slightly, chance=known))
        assert (one.verdict, one.gate) == (UNTESTED, "headroom"), (
            "a row below all others shows no effect of 2 points"
        )


def test_without_room_for_the_printed_size_the_side_alone_is_judged(made: Made) -> None:
    """Both facts stand in one sentence; a claim on other data with the same runs has the same
    words.
    """
    above = planted(made, table([52, 52.1, 52.2], [52, 52.1, 52.2], [50] * 3, [50] * 3), chance=0.1)
    level = planted(made, table([50, 50.1, 49.9], [50, 50.1, 49.9], [50] * 3, [50] * 3), chance=0.1)
    large = Claim(text="So it is.", left=A, right=LOCAL, printed=16.0)
    one = check_claim(large, above)
    assert (one.verdict, one.gate) == ("seen", "")
    assert one.found.endswith(
        "printed +16.0: +16.0 could not have appeared, as no row is more than 2.1\u00a0points above"
    )
    assert (check_claim(large, level).verdict, check_claim(large, level).gate) == (
        UNTESTED,
        "headroom",
    ), "no row is 2 points above, either"
    small = large.model_copy(update={"printed": 2.0})
    assert check_claim(small, above).verdict == "reproduced"


def test_a_factor_that_is_not_reached_is_no_opposite(made: Made) -> None:
    found = planted(made, table([15, 15.1, 15.2], [15, 15.1, 15.2], [1] * 3, [1] * 3))
    far = Claim(text="So it is.", left=A, right=LOCAL, times=100)
    other = Claim(text="So it is.", left=LOCAL, right=A)
    assert "less than the claimed factor" in check_claim(far, found).found
    assert "the opposite" in check_claim(other, found).found


def test_on_other_data_a_claim_is_seen_or_not_and_the_printed_effect_is_not_shown(
    made: Made,
) -> None:
    numbers = table([10, 10.1, 9.9], [1, 2, 3], [12, 12.4, 12], [1, 2, 3])
    found = planted(made, numbers)
    found.__dict__["_data"] = lambda *_: ("Fashion-MNIST", "CIFAR-10")
    less, more = (
        Claim(text="So it is.", left=A, right=LOCAL, columns=("α = 5",), rule=r)
        for r in ("less", "more")
    )
    seen, unseen = check_claim(less, found), check_claim(more, found)
    assert (seen.said, unseen.said) == ("seen on Fashion-MNIST", "not seen on Fashion-MNIST")
    assert seen.printed is None and "printed" not in seen.found and seen.stand_in
    fact = check_claim(
        Claim(text="So it is.", left=A, right=LOCAL, metric="bytes", unit="kB", by=1), found
    )
    assert fact.fact and fact.said == "reproduced", "bytes are the same on any data"


def test_a_question_is_the_same_in_all_its_settings(made: Made) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"left": f"{A} @ α = 5", "right": "Local @ α = 5"},
        {"metric": "own accuracy"},
        {"by": 3},
    ]
    assert {claims(made, {}, **each).question for each in settings} == {f"{A} against Local"}
    others = (
        {"right": 50.0},
        {"left": f"{A} @ α = 5", "right": f"{A} @ α = 0.1"},
        {"metric": "bytes"},
    )
    assert len({claims(made, {}, **each).question for each in others} | {f"{A} against Local"}) == 4


def test_alone_oracle_and_diagnoses_stand_beside_the_verdict(made: Made) -> None:
    named = {"alone": LOCAL, "oracle": A, "diagnoses": ("accuracy", "no such metric")}
    found = replace(made.found(), reproduction=made.reproduction.model_copy(update=named))
    one = check_claim(Claim(text="So it is.", left=A, right=LOCAL), found)
    values = [
        np.mean([*found.numbers[A, column].by_seed.values()]) for column in ("α = 5", "α = 0.1")
    ]
    assert f"oracle {np.mean(values):.1f}" in one.beside and "alone " in one.beside
    assert f"accuracy {np.mean(values) / 100:.2f}" in one.beside and "no such" not in one.beside


def test_equal_differences_in_all_seeds_fail_the_gate_unless_they_count_messages(
    made: Made,
) -> None:
    same = table([3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1])
    assert claims(made, same).gate == "spread"
    assert claims(made, {}, metric="bytes", unit="kB").gate == ""
    zero = claims(made, table([0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]))
    assert (zero.verdict, zero.found) == ("not reproduced", "−1.0\u00a0points: 0 in every seed")


def test_rows_that_cannot_be_compared_fail_the_gate(made: Made) -> None:
    numbers = table([10, 10.1, 9.9], [14, 14.1, 13.8], [8, 8, 8], [1, 1, 1])
    found = claims(made, numbers, incomparable="Local has a random head for new clients.")
    assert (found.gate, found.found) == ("comparable", "Local has a random head for new clients")
    rows = [
        row.model_copy(update={"tuned": {"small": 9} if row.name == A else {}})
        for row in made.reproduction.rows
    ]
    tuned = replace(
        made.found(), reproduction=made.reproduction.model_copy(update={"rows": tuple(rows)})
    )
    one = check_claim(Claim(text="So it is.", left=A, right=LOCAL), tuned)
    assert (one.verdict, one.gate, one.found) == (
        "could not be tested here",
        "tuning",
        f"settings tried: {A} 9, Local 0",
    )


def test_holm_counts_claims_with_the_same_runs_once(made: Made) -> None:
    strong = table([10, 10.1, 9.9], [14, 14.1, 13.8], [8, 8, 8], [1, 1.1, 1])
    found = planted(made, strong)
    clear, vague = (
        Claim(text=name, left=A, right=right)
        for name, right in (("clear", LOCAL), ("vague", f"{A} @ α = 0.1"))
    )
    (one,) = check_claims([clear], found)
    assert (
        [c.verdict for c in check_claims([clear, clear], found)]
        == [one.verdict] * 2
        == ["reproduced"] * 2
    )
    weak = planted(made, table([10, 11.5, 11], [14, 9, 13.8], [8, 8, 8.7], [14.1, 14.1, 13.9]))
    alone = check_claim(Claim(text="So it is.", left=f"{A} @ α = 5", right="Local @ α = 5"), weak)
    pair = check_claims(
        [Claim(text="So it is.", left=f"{A} @ α = 5", right="Local @ α = 5"), vague], weak
    )
    assert (
        alone.verdict == "reproduced"
        and pair[0].verdict == "could not be tested here"
        and "Holm" in pair[0].found
    )


def test_runs_of_a_seed_in_one_column_must_have_the_same_test_rows(made: Made) -> None:
    found = made.found()
    place = found.places[LOCAL, "α = 5"]
    assert place.attempts[1].record
    for change in ({"test_sha256": "0" * 64}, {"dataset": "another"}):
        record = place.attempts[1].record.model_copy(update=change)
        attempts = (
            place.attempts[0],
            replace(place.attempts[1], record=record),
            *place.attempts[2:],
        )
        moved = replace(
            found, places={**found.places, (LOCAL, "α = 5"): replace(place, attempts=attempts)}
        )
        by_rows, by_cells = (
            Claim(text="So it is.", left=A, right=right) for right in (LOCAL, "Local @ α = 5")
        )
        why = {
            (check_claim(claim, moved).gate, check_claim(claim, moved).found)
            for claim in (by_rows, by_cells)
        }
        assert why == {("test rows", "runs of one seed have different test rows")}
        across = Claim(text="So it is.", left="Local @ α = 5", right="Local @ α = 0.1")
        assert check_claim(across, moved).gate != "test rows" and "paired by seed only" in RULES[-1]


def test_times_are_compared_on_one_machine_only(made: Made) -> None:
    found = made.found()
    place = found.places[LOCAL, "α = 5"]
    assert place.attempts[1].record
    environment = {**place.attempts[1].record.environment, "processor": "another"}
    record = place.attempts[1].record.model_copy(update={"environment": environment})
    attempts = (place.attempts[0], replace(place.attempts[1], record=record), *place.attempts[2:])
    moved = replace(
        found, places={**found.places, (LOCAL, "α = 5"): replace(place, attempts=attempts)}
    )
    timed = Claim(text="So it is.", left=A, right=LOCAL, metric="seconds", unit="s")
    assert check_claim(timed, moved).gate == "machine" != check_claim(timed, found).gate
    assert "on one machine" in check_claim(timed, found).found
    assert check_claim(timed.model_copy(update={"metric": "bytes"}), moved).gate == ""


def test_infinite_differences(made: Made) -> None:
    found = claims(
        made, table([10, 20, math.inf], [1, 2, 3], [1, 2, 3], [1, 2, 3]), columns=("α = 5",)
    )
    assert (found.verdict, found.gate, found.seeds[2], found.mean) == (
        "could not be tested here",
        "finite",
        None,
        None,
    )
    never = claims(made, table([1, 2, 3], [1, 2, 3], [math.inf] * 3, [1, 2, 3]), rule="less")
    assert (never.verdict, never.mean, never.ends) == ("reproduced", None, None)
    assert never.found == "the second is infinite in every seed"
    both = claims(
        made, table([math.inf] * 3, [1, 2, 3], [math.inf] * 3, [1, 2, 3]), rule="within", by=1
    )
    assert (both.verdict, both.gate) == ("could not be tested here", "measured")
    assert both.seeds == never.seeds == dict.fromkeys(range(3))


def test_rounding_errors_are_no_difference(made: Made) -> None:
    numbers = table([0.3] * 3, [0.3] * 3, [0.1] * 3, [0.1] * 3)
    found = claims(made, numbers, times=3, rule="less")
    assert 0.3 - 3 * 0.1 < 0 and (found.gate, found.seeds) == (
        "spread",
        dict.fromkeys(range(3), 0.0),
    )


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
    one = claims(made, {}, columns=("α = 5",))
    cells = claims(made, {}, left=f"{A} @ α = 5", right="Local @ α = 5")
    assert one.evidence == cells.evidence and len(one.evidence) == 16
    changes: list[dict[str, Any]] = [
        {},
        {"rule": "less"},
        {"by": 1},
        {"metric": "own accuracy"},
        {"times": 2},
        {"right": 2.0},
    ]
    assert len({one.evidence, *(claims(made, {}, **each).evidence for each in changes)}) == 1 + len(
        changes
    )
    assert claims(made, {}, left="Large").evidence == ""
    kilo, mega = (
        claims(made, {}, metric="bytes", unit=unit, by=1).evidence for unit in ("kB", "MB")
    )
    assert kilo != mega


def test_columns_in_which_a_row_cannot_be_run_are_left_out_and_named(made: Made) -> None:
    found = made.found()
    at = (LOCAL, "α = 0.1")
    cell = replace(found.places[at].cell, runs=(), untestable="no such data here")
    some = replace(
        found, places={**found.places, at: replace(found.places[at], cell=cell, attempts=())}
    )
    one = check_claim(Claim(text="So it is.", left=A, right=LOCAL), some)
    assert one.left_out == ("α = 0.1",) and one.compared == f"{A} − Local, α = 5 (without α = 0.1)"
    named = check_claim(Claim(text="So it is.", left=A, right=LOCAL, columns=("α = 5",)), some)
    assert named.left_out == () and named.seeds == one.seeds


def test_what_is_not_here_cannot_be_tested(made: Made) -> None:
    large = claims(made, {}, left="Large")
    assert (large.verdict, large.gate, large.seeds) == ("could not be tested here", "runs", {})
    cell = claims(made, {}, right="Large @ α = 5")
    assert cell.found == "Large @ α = 5: needs ImageNet models" and "ImageNet" in large.found
    named = claims(made, {}, untestable=FEW)
    assert (named.gate, named.found) == ("runs", "too few clients")


def test_a_cell_without_runs_is_named(made: Made) -> None:
    found = made.found()
    rest = {at: place for at, place in found.places.items() if at != (LOCAL, "α = 5")}
    some = TableResults(found.name, found.reproduction, found.scale, rest)
    claim = Claim(text="So it is.", left=A, right=LOCAL)
    assert check_claim(claim, some).found == "Local @ α = 5 is not selected"


def test_another_metric_has_a_unit_of_its_own(made: Made) -> None:
    claim, *_ = made.reproduction.claims
    found = check_claim(claim, made.found())
    assert (found.verdict, found.unit) == ("reproduced", "kB")
    assert found.compared == f"bytes: {A} − Local, mean of 2 columns; margin 1\u00a0kB"
    assert all(difference > 1 for difference in found.seeds.values())


def test_another_metric_without_a_unit_has_that_of_the_table(made: Made) -> None:
    found = claims(made, {}, metric="own accuracy", right=200.0, rule="less")
    first = found.seeds[0] + 200
    runs = [made.folder(cell.runs[0]) for cell in made.cells if cell.row.name == A]
    assert first == pytest.approx(100 * sum(value(run, "own accuracy") or 0 for run in runs) / 2)
    assert (found.verdict, found.unit) == ("reproduced", "%")


def test_a_metric_that_a_side_does_not_have_is_no_zero(made: Made) -> None:
    found = gather("t", made.reproduction, "small", made.cells, made.folder, {})
    rows = [row.name for row in made.reproduction.rows]
    for claim in (
        Claim(text="c", left=rows[0], right=rows[1], metric="no such metric"),
        Claim(text="c", left=rows[0], right=50.0, metric="no such metric"),
    ):
        result = check_claim(claim, found)
        assert (result.verdict, result.gate) == ("could not be tested here", "runs")
