"""Bins from sums of counts: the same however rows are split, and right in degenerate columns."""

from __future__ import annotations

import numpy as np

from fedloom.trees.bins import Agreement, Bins, count, frequent, keys

NO_WORDS = np.zeros(1, bool)


def agreed(parts: list[np.ndarray], bins: int) -> tuple[np.ndarray, int]:
    """The edges of one column and the number of questions."""
    own = [[np.sort(keys(x[~np.isnan(x)]))] for x in parts]
    agreement, questions = Agreement([0], bins), 0
    while agreement.question is not None:
        agreement.answer(sum(count(columns, agreement.question) for columns in own))  # type: ignore[arg-type]
        questions += 1
    return agreement.edges(0), questions


def column(n: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = np.where(
        rng.random(n) < 0.3, 0.0, rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    ).astype(np.float32)
    x[rng.random(n) < 0.1] = np.nan
    return x


def test_keys_have_the_order_of_the_numbers() -> None:
    x = np.array([-np.inf, -3e38, -1.5, -1e-45, 0, 1e-45, 2, 3e38, np.inf], np.float32)
    assert (np.diff(keys(x)) > 0).all() and keys(x).min() >= 0 and keys(x).max() < 2**32
    assert keys(np.array([-0.0], np.float32)) == keys(np.array([0.0], np.float32))


def test_edges_do_not_depend_on_the_split() -> None:
    x = column()
    edges, questions = agreed([x], 32)
    assert len(edges) <= 30 and (np.diff(edges) > 0).all() and questions <= 6
    for cuts in ([1000, 2000, 3000], [1, 2, 5], range(100, 4000, 170)):
        parts = np.split(np.random.default_rng(1).permutation(x), cuts)
        # an owner without rows changes nothing
        assert (agreed([*parts, x[:0]], 32)[0] == edges).all()


def test_a_frequent_value_has_a_bin_and_leaves_the_others_theirs() -> None:
    x = column()
    bins = Bins((agreed([x], 32)[0],), NO_WORDS).of(x[:, None])[:, 0]
    assert (bins[np.isnan(x)] == 0).all() and (bins[~np.isnan(x)] > 0).all()
    (zeros,) = set(bins[x == 0])
    rows = np.bincount(bins, minlength=32)
    assert len(rows) == 32 and rows[zeros] < 1.1 * (x == 0).sum()
    others = np.delete(rows[1:], zeros - 1)
    assert others.max() < 3 * others.mean()


def test_degenerate_columns() -> None:
    empty, constant = np.full(50, np.nan, np.float32), np.full(50, 3, np.float32)
    assert len(agreed([empty], 16)[0]) == len(agreed([constant], 16)[0]) == 0
    layout = Bins((np.empty(0, np.int64),), NO_WORDS)
    assert (layout.of(empty[:, None]) == 0).all() and (layout.of(constant[:, None]) == 1).all()
    two, _ = agreed([np.repeat(np.array([1, 2], np.float32), 20)], 16)
    assert Bins((two,), NO_WORDS).of(np.array([[1], [2], [0], [9]], np.float32))[:, 0].tolist() == [
        1,
        2,
        1,
        2,
    ]
    assert Agreement([], 16).question is None


def test_frequent_words_have_bins_and_new_ones_share_the_last() -> None:
    words = frequent(np.array([3, 0, 9, 3, 1]), 5)
    assert words.tolist() == [2, 0, 3]  # by rows, then by number
    layout = Bins((words,), np.ones(1, bool))
    x = np.array([[2], [0], [3], [4], [1], [77], [np.nan]], np.float32)
    assert layout.of(x)[:, 0].tolist() == [1, 2, 3, 4, 4, 4, 0]
    assert Bins((frequent(np.zeros(3), 5),), np.ones(1, bool)).of(x)[:, 0].tolist() == [1] * 6 + [0]
