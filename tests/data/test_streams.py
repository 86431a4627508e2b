from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import ConfigError
from fedloom.core.rng import stream

numbers = st.integers(0, 2**32 - 1)
places = st.tuples(numbers, st.text(max_size=5), st.lists(numbers, max_size=4).map(tuple))


def draws(seed: int, purpose: str, keys: tuple[int, ...]) -> list[int]:
    return stream(seed, purpose, *keys).integers(2**62, size=3).tolist()


def test_stream_is_fixed_for_all_time() -> None:
    """A run that is repeated years later, on another machine, draws the same numbers."""
    assert stream(7, "batches", 3, 1).integers(1000, size=4).tolist() == [727, 368, 462, 137]


@given(places)
def test_same_arguments_same_draws(place: tuple[int, str, tuple[int, ...]]) -> None:
    assert draws(*place) == draws(*place)


@given(places, places)
def test_other_arguments_other_draws(
    one: tuple[int, str, tuple[int, ...]], other: tuple[int, str, tuple[int, ...]]
) -> None:
    assert (draws(*one) == draws(*other)) == (one == other)


def test_a_key_of_zero_is_not_no_key() -> None:
    """NumPy alone would give both the same stream: it pads its entropy with zeros."""
    assert len({tuple(draws(1, "x", (0,) * number)) for number in range(6)}) == 6


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "3", None])
def test_numbers_out_of_range_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"seed .* integer from 0"):
        stream(bad, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"key .* integer from 0"):
        stream(0, "x", bad)  # type: ignore[arg-type]


def test_numpy_integers_count_as_integers() -> None:
    assert draws(np.int64(5), "x", (np.uint8(2),)) == draws(5, "x", (2,))  # type: ignore[arg-type]
