from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.stats import PartitionStats, describe, plot_counts

LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 0])


def small() -> PartitionStats:
    """Two clients: rows 0-3 hold (2, 2, 0), rows 4 and 5 hold (0, 0, 2)."""
    return describe(LABELS, [np.arange(4), np.array([4, 5])], ("cat", "dog", "emu"))


def test_by_hand() -> None:
    stats = small()
    assert stats.counts.tolist() == [[2, 2, 0], [0, 0, 2]]
    assert stats.sizes.tolist() == [4, 2] and stats.held.tolist() == [2, 1]
    assert stats.entropy.tolist() == [1.0, 0.0]
    assert str(stats.entropy[1]) == "0.0"  # not -0.0
    assert stats.pairwise == 1.0
    # All rows: (1/3, 1/3, 1/3). Client 0 is (1/6 + 1/6 + 1/3) / 2 away, client 1 (1/3 + 1/3 + 2/3)
    # / 2.
    assert stats.to_global == pytest.approx((1 / 3 + 2 / 3) / 2)


def test_lines_of_a_table() -> None:
    assert PartitionStats.HEADER == ("client", "rows", "classes", "entropy", "most frequent")
    assert small().rows() == [
        ("0", "4", "2", "1.00", "cat (50%)"),
        ("1", "2", "1", "0.00", "emu (100%)"),
    ]


def test_one_client_is_no_pair() -> None:
    stats = describe(LABELS, [np.arange(8)], ("cat", "dog", "emu"))
    assert (stats.pairwise, stats.to_global) == (0.0, 0.0)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=2, max_size=6))
def test_against_the_definitions(held: list[list[int]]) -> None:
    labels = np.array([label for client in held for label in client])
    ends = np.cumsum([len(client) for client in held])
    stats = describe(labels, np.split(np.arange(len(labels)), ends[:-1]), "abcde")
    shares = [[client.count(label) / len(client) for label in range(5)] for client in held]
    gaps = [
        sum(abs(a - b) for a, b in zip(shares[i], shares[j], strict=True)) / 2
        for i in range(len(held))
        for j in range(i)
    ]
    assert stats.pairwise == pytest.approx(sum(gaps) / len(gaps))
    common = [labels.tolist().count(label) / len(labels) for label in range(5)]
    far = [sum(abs(a - b) for a, b in zip(share, common, strict=True)) / 2 for share in shares]
    assert stats.to_global == pytest.approx(sum(far) / len(far))
    assert stats.held.tolist() == [len(set(client)) for client in held]
    assert (stats.entropy <= np.log2(stats.held) + 1e-9).all() and (stats.entropy >= 0).all()


def test_clients_without_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[4, 0\]"):
        describe(LABELS, [np.arange(4), np.arange(0)], ("cat", "dog", "emu"))
    with pytest.raises(DataError, match=r"\[\]"):
        describe(LABELS, [], ("cat", "dog", "emu"))


def test_the_picture_shows_who_holds_what(tmp_path: Path) -> None:
    """A large disc for client 1 and class 0, below on the right; a small one above on the left."""
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    labels = np.array([0] * 50 + [1])
    plot_counts(describe(labels, [np.array([50]), np.arange(50)], ("few", "many")), buffer)
    pixels = np.asarray(image.open(buffer).convert("RGB")).astype(int)
    colored = np.ptp(pixels, axis=2) > 40  # text, lines and grid are gray
    height, width = colored.shape
    # without the scale
    inside = colored[: int(0.85 * height), int(0.15 * width) : int(0.72 * width)]
    halves = np.array_split(inside, 2)
    quarters = [[int(part.sum()) for part in np.array_split(half, 2, axis=1)] for half in halves]
    assert quarters[0][1] == quarters[1][0] == 0
    assert 0 < 20 * quarters[0][0] < quarters[1][1]
    plot_counts(small(), tmp_path / "counts.svg")
    drawing = (tmp_path / "counts.svg").read_text()
    assert drawing.startswith("<?xml") and "client" in drawing


def test_many_clients_and_classes_fit() -> None:
    labels = np.arange(110 * 30) % 30
    buffer = io.BytesIO()
    names = [f"a class with a rather long name {k}" for k in range(30)]
    plot_counts(describe(labels, np.split(np.arange(len(labels)), 110), names), buffer)
    assert buffer.getvalue().startswith(b"\x89PNG")
