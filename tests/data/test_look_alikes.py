"""Words and numbers that look like others: names that are no amounts, codes that are no events,
counts that are no dates, rounded rows."""

import numpy as np
import pytest

from fedloom.core.events import guessed_event
from fedloom.data.amounts import amounts
from fedloom.data.copies import copies_of
from fedloom.data.grammar import is_number
from fedloom.data.packed import disordered


@pytest.mark.parametrize("label", ["event_free", "relapse-free", "no_event", "not_dead"])
def test_codes_of_a_label_that_says_the_opposite_are_no_guess(label: str) -> None:
    assert guessed_event(["0", "1"], label) is None
    assert guessed_event(["False", "True"], label) is None


@pytest.mark.parametrize("form", ["rs{}", "{}th street"])
def test_names_with_numbers_are_no_amounts(form: str) -> None:
    words = {form.format(number): 3 for number in range(24, 60)}
    assert amounts(words, is_number) == set()


def test_rupees_are_amounts() -> None:
    assert amounts({f"Rs {number}": 1 for number in range(5)}, is_number)


@pytest.mark.parametrize("start", [10100, 20100, 110100])
def test_a_few_counts_are_no_dates(start: int) -> None:
    rng = np.random.default_rng(0)
    for size in (3, 6, 12):
        counts = start + rng.choice(1199, size, replace=False)
        assert disordered([str(count) for count in np.sort(counts)]) == ""


@pytest.mark.parametrize("parts", [53, 366])
def test_weeks_and_days_before_their_year_are_not_in_order(parts: int) -> None:
    words = [f"{part}{year}" for year in (2020, 2021) for part in range(1, parts, 7)]
    assert disordered(words) == "dates with the year last"


def test_copies_are_found_though_rounding_levels_some_columns() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 8)) * [0.02, 0.02, 0.02, 0.02, 50, 20, 20, 20]
    found = copies_of(np.concatenate([x, x[:30].round(1)]), np.ones(8, bool))
    assert found.copies[200:].tolist() == list(range(30))


def test_two_columns_of_coarse_numbers_hold_no_copies() -> None:
    x = np.random.default_rng(7).normal(size=(500, 2)).round(1)
    assert not copies_of(x, np.ones(2, bool)).any
