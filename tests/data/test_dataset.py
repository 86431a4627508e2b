from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, image_dataset, table_dataset


def images() -> Dataset:
    x = np.arange(4 * 3 * 2 * 2, dtype=np.uint8).reshape(4, 3, 2, 2)
    return image_dataset("pictures", x, np.array([0, 1, 1, 0]), ("a", "b"), test=np.array([3, 1]))


def table() -> Dataset:
    x = np.array([[1, 5], [3, 5], [5, 5], [100, 7]], dtype=np.float32)
    return table_dataset("sheet", x, np.array([0, 1, 1, 0]), ("a", "b"), ("u", "v"))


def test_images_reach_a_network_between_minus_one_and_one() -> None:
    data = images()
    assert (data.kind, data.input_shape) == ("image", (3, 2, 2))
    extremes = (np.array([0, 255]) - data.shift[0]) / data.scale[0]
    assert extremes.tolist() == [-1.0, 1.0]
    assert data.shift.shape == (3,)


def test_train_is_what_test_leaves() -> None:
    assert images().train.tolist() == [0, 2]
    assert table().train.tolist() == [0, 1, 2, 3]


def test_standardized_uses_the_given_rows_only() -> None:
    data = table().standardized(np.array([0, 1, 2]))
    assert data.shift.tolist() == [3.0, 5.0]
    # the constant column keeps scale 1
    assert data.scale.tolist() == pytest.approx([np.sqrt(8 / 3), 1.0])
    assert data.x is not None and data.x[3, 0] == 100.0
    inputs = (data.x[:3] - data.shift) / data.scale
    assert inputs.mean(axis=0) == pytest.approx([0, 0], abs=1e-6)
    assert inputs[:, 0].std() == pytest.approx(1)


def test_standardized_statistics_are_those_of_64_bits() -> None:
    """Sums of many float32 numbers would lose the mean of a large column."""
    x = np.full((4000, 2), 1e6 + 0.5, dtype=np.float32)
    x[::2, 0] += 1
    data = table_dataset("long", x, np.arange(4000) % 2, ("a", "b"), ("u", "v")).standardized(
        np.arange(4000)
    )
    assert data.shift.tolist() == [1e6 + 1, 1e6 + 0.5]
    assert data.scale.tolist() == [0.5, 1.0]
    assert data.scale.dtype == data.shift.dtype == np.float32


def test_images_are_not_standardized() -> None:
    data = images()
    assert data.standardized(np.arange(2)) is data


def test_standardizing_over_no_rows_is_refused() -> None:
    with pytest.raises(DataError, match="at least one row"):
        table().standardized(np.array([], dtype=np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((4, 2))}, "float64; convert"),
        ({"x": np.zeros((4, 2, 2), np.uint8)}, "must be"),
        ({"x": np.zeros((2, 4), np.float32).T}, "C-contiguous"),
        ({"y": np.array([0, 1, 1])}, r"x has 4 rows, but y has the shape \(3,\)"),
        ({"y": np.array([0, 1, 2, 0])}, r"0\.\.1, one for each class, but range from 0 to 2"),
        ({"y": np.array([0, 1, -1, 0])}, "from -1 to 1"),
        ({"y": np.zeros(4, np.int32)}, "int64"),
        ({"classes": ("a",)}, "at least 2 classes"),
        ({"scale": np.array([1.0, 0.0])}, "scale must be above 0"),
        ({"shift": np.array([np.nan, 0.0])}, "finite"),
        ({"shift": np.zeros(3)}, r"shift and scale must be \(2,\)"),
        ({"groups": np.zeros(3, np.int64)}, "owner for each of the 4 rows"),
        ({"test": np.array([0, 4])}, "from 0 to 3"),
        ({"test": np.array([1, 1])}, "distinct row numbers"),
        ({"test": np.array([0.0])}, "row numbers"),
        ({"columns": ("u",)}, "2 columns, but 1 column names"),
        ({"x": np.array([[1, np.inf]] * 4, dtype=np.float32)}, "not finite"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        replace(table(), **change)
    assert "'sheet'" in str(caught.value)


def test_no_rows_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        replace(table(), x=np.zeros((0, 2), np.float32), y=np.zeros(0, np.int64))
