"""Networks in memory that workers share: blocks of their own, wherever a slab ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from fedloom.core.context import ClientContext
from fedloom.core.optim import Adam
from fedloom.core.party import Party
from fedloom.engines.memory import SharedMemory


class Small(Party[None]):
    STATE = ("params", "buffers", "opt")

    def setup(self) -> None:
        self.network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Adam())


@pytest.mark.parametrize("slab", [1, 4096, 9000])
def test_blocks_never_overlap_wherever_a_slab_ends(
    monkeypatch: pytest.MonkeyPatch, slab: int
) -> None:
    monkeypatch.setattr("fedloom.engines.memory.SLAB", slab)
    shared, parties = SharedMemory(), [Small(None, ClientContext(id=i)) for i in range(9)]
    for party in parties:
        shared.adopt(party.net)
    spans = sorted((p.net.memory.data_ptr(), p.net.memory.numel()) for p in parties)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert all(a % 64 == 0 for a, _ in spans)
    for i, party in enumerate(parties):
        party.net.memory.fill_(i)
    assert all(bool((p.net.memory == i).all()) for i, p in enumerate(parties))


def test_a_network_keeps_its_numbers_when_it_moves() -> None:
    party = Small(None, ClientContext(id=0))
    before = party.net.memory.clone()
    SharedMemory().adopt(party.net)
    assert torch.equal(party.net.memory, before)
