"""Counts of nodes share words by the bits that each node's rows need."""

import numpy as np

from fedloom.trees.histograms import bundled_by, bundles_by, unbundled_by


def test_sums_of_words_are_those_of_counts() -> None:
    rng = np.random.default_rng(0)
    bits = np.repeat(np.array([31, 1, 7, 1, 12], np.uint8), [5, 40, 30, 3, 9])
    most = 2 ** bits.astype(np.int64) - 1
    whole = np.stack([rng.integers(0, most + 1) for _ in range(3)])
    first = np.stack([rng.integers(0, row + 1) for row in whole])
    words = bundled_by(first, bits) + bundled_by(whole - first, bits)
    assert len(words) == bundles_by(3, bits) == 8 + 3 + 10 + 6
    assert unbundled_by(words, 3, bits).tolist() == whole.tolist()
    assert (
        bundles_by(2, np.empty(0, np.uint8))
        == len(bundled_by(np.empty((2, 0), np.int64), np.empty(0, np.uint8)))
        == 0
    )
