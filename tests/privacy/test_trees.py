"""A coordinator that chooses bins and trees: an owner answers within the bins, levels and trees of
its run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import crafted

from fedloom.core.errors import MessageError
from fedloom.methods import registry
from fedloom.methods.tables import steps
from fedloom.trees.bins import SIZES, Bins
from tests.methods.tables import owners, table

CATEGORY = np.array([False, False, False, True, False])
EDGES = tuple(np.arange(n) for n in (5, 4, 3, 2, 1))


def party(name: str, **params: Any) -> Any:
    method = registry()[name]
    (context,) = owners(*table(60), [])
    return method.party_at(context)(method.configure("recommended", params), context)


def begin(owner: Any, edges: tuple[np.ndarray, ...], category: np.ndarray = CATEGORY) -> None:
    trees = {name: x[:0] for name, x in owner.trees.items()}
    owner.begin(layout=steps.layout_tree(Bins(edges, category)), first=0, trees=trees)


@pytest.mark.parametrize("name", ["fedboost", "fedforest", "fedextra"])
def test_an_owner_takes_one_set_of_bins_that_fits_its_columns(name: str) -> None:
    owner = party(name, bins=8)
    wrong = {
        "at most 8 bins": (np.arange(7), *EDGES[1:]),
        "must ascend": (np.array([2, 1]), *EDGES[1:]),
        "of 5 columns": EDGES[:4],
    }
    for why, edges in wrong.items():
        with pytest.raises(MessageError, match=why):
            begin(owner, edges)
    with pytest.raises(MessageError, match="of 5 columns"):
        begin(owner, EDGES, ~CATEGORY)
    begin(owner, EDGES), begin(owner, EDGES)
    with pytest.raises(MessageError, match="one set of bins"):
        begin(owner, (EDGES[0] + 1, *EDGES[1:]))


@pytest.mark.parametrize("name", ["fedboost", "fedforest", "fedextra"])
def test_segments_are_counted_before_the_bins_are_agreed(name: str) -> None:
    owner = party(name)
    zero = torch.zeros(1, dtype=torch.int64)
    for size, parts in SIZES.items():
        assert owner.segments(column=zero, start=zero, size=size, parts=parts)["rows"].shape == (
            1,
            parts,
        )
    with pytest.raises(MessageError, match="sizes of the agreement"):
        owner.segments(column=zero, start=zero, size=1, parts=4096)
    begin(owner, EDGES)
    with pytest.raises(MessageError, match="before the bins are agreed"):
        owner.segments(column=zero, start=zero, size=2**20, parts=4096)


def test_a_round_has_as_many_questions_as_its_trees_have_levels() -> None:
    for name, depth in (("fedboost", 6), ("fedforest", 12)):
        owner = party(name)
        assert owner.cfg.calls_in_round(owner.context)["histograms"] == depth
        assert owner.cfg.calls_in_round(owner.context)["segments"] == 6
    begin(owner, EDGES)
    with pytest.raises(MessageError, match="a round has 20 trees, not 21"):
        owner.histograms(
            numbers=torch.arange(21),
            unit={},
            splits={},
            asked=torch.zeros(1),
            tree=torch.zeros(1),
            columns=None,
        )


def test_bins_of_two_values_and_leaves_of_one_row_read_no_row() -> None:
    """Before, 95 % of the rows in eight rounds."""
    assert next(crafted.from_trees(0))[3] < 0.01
