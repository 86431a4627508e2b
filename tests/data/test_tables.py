from __future__ import annotations

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder


def encode_table(columns: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    encoder = TableEncoder.plain(columns)
    return encoder.transform(columns), encoder.names


def words(*values: str | list[str] | None) -> np.ndarray:
    return np.array(values, dtype=object)


def test_numbers_stay_and_words_become_columns() -> None:
    x, names = encode_table(
        {
            "age": np.array([39, 50, 7]),
            "work": words("state", " private", "state "),
            "rich": np.array([True, False, True]),
            "gain": np.array([0.5, -1.0, 2.0]),
        }
    )
    assert names == ("age", "work=private", "work=state", "rich", "gain")
    assert x.tolist() == [[39, 0, 1, 1, 0.5], [50, 1, 0, 0, -1.0], [7, 0, 1, 1, 2.0]]
    assert x.dtype == np.float32 and x.flags.c_contiguous


def test_missing_words_are_a_category() -> None:
    x, names = encode_table({"work": words("?", "state", None, "", "private")})
    assert names == ("work=?", "work=private", "work=state")
    assert x.argmax(axis=1).tolist() == [0, 2, 0, 0, 1]


def test_words_that_are_numbers_are_numbers_with_or_without_gaps() -> None:
    assert encode_table({"stage": words("1", "2")})[1] == ("stage",)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.array([1.0, np.nan, np.nan]), "'c' must hold a finite number in each row, but 2 of 3"),
        (np.array([1.0, 1e300, 2.0]), "'c' .* but 1 of 3"),
        (words("1.5", "?", "3"), "'c' .* but 1 of 3"),
        (words(["a", "b"], ["c"]), "holds several values"),
        (words(*(f"row {i}" for i in range(1001))), "has 1001 in 1001 rows"),
    ],
)
def test_other_columns_are_refused(column: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode_table({"c": column})


def test_a_table_needs_columns() -> None:
    with pytest.raises(DataError, match="at least one column"):
        encode_table({})
