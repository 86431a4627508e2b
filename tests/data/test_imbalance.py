from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.simulation import simulate
from fedloom.data.stats import cosine, describe_parties, imbalance_degree, ratio, weighted_cosine

COUNTS = st.lists(st.integers(0, 10**6), min_size=2, max_size=12).filter(any)


@pytest.mark.parametrize(
    ("counts", "degree"),
    [
        ([5, 5, 5], 0.0),
        ([9, 0, 0], 1.0),
        ([4.7, 1], 0.330),
        ([1, 8.2], 0.504),
        ([5.2, 1], 0.363),
        ([3.5, 1], 0.236),
        ([12] * 4 + [1] * 6, 0.227),
    ],
)
def test_imbalance_degree(counts: list[float], degree: float) -> None:
    assert imbalance_degree(counts) == pytest.approx(degree, abs=5e-4)


def test_empty_classes_count_in_the_number_of_classes() -> None:
    assert imbalance_degree([1, 1, 0, 0]) == pytest.approx(0.5)
    assert ratio([6, 0, 2]) == 3.0 and ratio([0, 0]) == 1.0


@given(COUNTS)
def test_between_none_and_one(counts: list[int]) -> None:
    assert 0 <= imbalance_degree(counts) <= 1 and ratio(counts) >= 1
    assert imbalance_degree([3 * count for count in counts]) == pytest.approx(
        imbalance_degree(counts), abs=1e-9
    )
    assert cosine(counts, [2 * count for count in counts]) == pytest.approx(1)


def test_weighted_cosine() -> None:
    assert weighted_cosine([[1, 2, 3], [10, 20, 30], [0, 0, 0]]) == pytest.approx(1)
    assert weighted_cosine([[3, 0], [0, 1]]) == pytest.approx(
        0.75 * 3 / np.sqrt(10) + 0.25 / np.sqrt(10)
    )


@pytest.mark.parametrize("counts", [[], [1], [0, 0], [1, -1], [1, float("nan")], [[1, 2]]])
def test_what_are_no_counts(counts: list[float]) -> None:
    with pytest.raises(DataError, match="at least 2 classes"):
        imbalance_degree(counts)


def test_a_description() -> None:
    parties = simulate("breast_cancer", parties=4, seed=0, aligned=40, imbalance_ratio=[5, 2, 3, 4])
    found = json.loads(json.dumps(describe_parties(parties)))
    first = found["parties"][0]
    assert first["gamma"] == pytest.approx(5, rel=0.1) and first["classes_held"] == 2
    assert first["mid"] == pytest.approx(imbalance_degree(first["unaligned_counts"]))
    assert (
        len(first["columns"]) == first["input_shape"][0]
        and sum(first["unaligned_counts"]) == first["unaligned"]
    )
    assert found["all"]["weighted_cosine"] > 0.95 and sum(found["aligned_counts"]) == 40
    blind = replace(parties, views=tuple(replace(view, truth=None) for view in parties.views))
    found = describe_parties(blind)
    assert found["all"]["mid"] is None and found["parties"][0]["unaligned_counts"] is None
    assert found["parties"][0]["unaligned"] == first["unaligned"]


def test_a_description_of_images_and_of_the_upper_boundary() -> None:
    found = describe_parties(
        simulate("digits", parties=4, seed=0, aligned=50, unaligned=20, everything=True)
    )
    assert found["parties"][1]["columns"] is None and found["parties"][1]["input_shape"] == [
        2,
        4,
        4,
    ]
    assert found["parties"][1]["unaligned_counts"] == [0] * 10 and found["all"]["gamma"] is None
