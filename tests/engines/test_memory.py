"""Parties' state on disk: it comes back bit-equal, memory keeps to its budget, a full disk is one
clear error.
"""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedloom import methods
from fedloom.core import message
from fedloom.core.context import ClientContext
from fedloom.core.engine import Failure
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.optim import SGD, Adam
from fedloom.core.party import Party
from fedloom.engines import LocalEngine
from fedloom.engines.memory import SLAB, Arena
from fedloom.experiment.run import checkpoint
from tests.test_three_pages import Peer, gossip
from tests.toy import Toy, contexts, network

FAULTS = Faults(dropout=0.1, crash=0.1, nan=0.1, late=0.1)


def spilling(engine: LocalEngine) -> int:
    return len(engine._arena.spilled) if engine._arena else 0


def everything(engine: LocalEngine) -> bytes:
    """All states, to the bit; what lies on disk is read from there, not from the kernel's memory of
    it.
    """
    slab = engine._arena._slabs.get(True) if engine._arena else None
    if slab is not None and hasattr(os, "posix_fadvise"):
        file = slab._file.fileno()
        os.fdatasync(file)  # os.fsync does nothing in tests
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return message.encode({str(i): state for i, state in engine.states().items()})


# -- the same numbers ------------------------------------------------------------------------------


def fedal(memory: int | None, params: dict[str, Any] | None = None) -> Toy:
    """FedAL with BatchNorm, momentum of Adam and faults: parties remember a pass
    between two calls.
    """
    client_contexts = contexts(4, make=partial(network, norm=True))
    toy = Toy(methods.find("fedal"), client_contexts=client_contexts, tau=3, **params or {})
    parties = (toy.method.client(toy.cfg, client_context) for client_context in client_contexts)
    toy.engine = LocalEngine(parties, faults=FAULTS, memory=memory)
    toy.fed = Federation(toy.engine)
    return toy


def half(engine: LocalEngine) -> int:
    """Bytes of half the parties' state."""
    return sum(message.size(state).payload for state in engine.states().values()) // 2


def test_a_budget_changes_no_number_of_fedal() -> None:
    plain = fedal(None).run(3)
    assert plain.fed.failures and {"2.1.running_mean"} <= plain.tensors().keys()
    for memory, low, high in ((0, 4, 4), (half(plain.engine), 1, 3), (1 << 30, 0, 0)):
        toy = fedal(memory).run(3)
        assert low <= spilling(toy.engine) <= high
        assert everything(toy.engine) == everything(plain.engine)
        assert toy.fed.failures == plain.fed.failures
        assert list(toy.fed.ledger) == list(plain.fed.ledger)


def test_a_budget_changes_no_number_of_an_exchange() -> None:
    engines = [
        LocalEngine((Peer(None, ClientContext(id=i)) for i in range(6)), memory=memory)
        for memory in (None, 0, 400)
    ]
    for engine in engines:
        fed = Federation(engine, coordinator="coordinator")
        for t in range(20):
            fed.round = t
            gossip(fed, engine.ids, t)
    assert [spilling(engine) for engine in engines[:2]] == [0, 6] and 0 < spilling(engines[2]) < 6
    assert everything(engines[0]) == everything(engines[1]) == everything(engines[2])


def test_spilled_parties_are_saved_and_resumed(tmp_path: Path) -> None:
    whole, first = fedal(None).run(4), fedal(0).run(2)
    states = {str(i): state for i, state in first.engine.states().items()}
    assert first.server is not None
    checkpoint.save(tmp_path, 2, "toy", {"server": first.server.state(), **states}, {})
    _, loaded, _ = checkpoint.load(next(tmp_path.glob("*.ckpt")), "toy")
    found = dict(loaded)
    resumed = fedal(0)
    assert resumed.server is not None and whole.server is not None
    resumed.server.load(found.pop("server"))
    resumed.engine.load({int(i): state for i, state in found.items()})
    resumed.run(2, start=2)
    assert everything(resumed.engine) == everything(whole.engine)
    assert message.encode(resumed.server.state()) == message.encode(whole.server.state())


# -- what a party remembers beside its network -----------------------------------------------------


class Keeper(Party[None]):
    """Remembers all sorts of things, more every round."""

    STATE = ("params", "opt", "kept", "seen")

    def setup(self) -> None:
        self.network(nn.Linear(2, 1), SGD(0.1, momentum=0.9))
        bits = torch.tensor([0x7FC00001, -0x80000000, 0x00000001], dtype=torch.int32)
        self.kept = {
            "odd": bits.view(torch.float32),  # a NaN with a payload, -0.0, the smallest number
            "half": torch.ones(3, dtype=torch.bfloat16),
            "flag": torch.tensor(True),
            "none": torch.empty(0, 3),
            "plain": [1, 2.5, "text", None, True, [], {}],
        }
        self.seen: Any = []

    def see(self, *, t: int) -> int:
        # in place, without an assignment
        self.seen.append({"t": t, "x": torch.full((500,), float(t))})
        return len(self.seen)

    def spoil(self) -> None:
        self.seen.clear()
        self.kept = {}
        self.params = {name: p + 1 for name, p in self.params.items()}
        raise RuntimeError("on purpose")


def keepers(memory: int | None) -> LocalEngine:
    def made() -> Iterator[Party[Any]]:
        for i in range(3):
            torch.manual_seed(i)
            yield Keeper(None, ClientContext(id=i))

    return LocalEngine(made(), memory=memory)


@pytest.mark.parametrize("memory", [0, 1200])
def test_what_parties_remember_may_be_anything_and_grow(memory: int) -> None:
    plain, engine = keepers(None), keepers(memory)
    assert spilling(engine) > 0
    for t in range(12):
        counts = engine.call(engine.ids, "see", {"t": t}, None, (t, 0))
        assert counts == plain.call(plain.ids, "see", {"t": t}, None, (t, 0)) == [t + 1] * 3
        assert everything(engine) == everything(plain)


def test_a_failing_call_changes_nothing_on_disk() -> None:
    engine = keepers(0)
    engine.call(engine.ids, "see", {"t": 0}, None, (0, 0))
    before = everything(engine)
    replies = engine.call(engine.ids, "spoil", {}, None, (0, 1))
    assert all(isinstance(reply, Failure) and "on purpose" in reply.trace for reply in replies)
    assert everything(engine) == before


def test_between_calls_a_party_on_disk_remembers_nothing_in_memory() -> None:
    engine = keepers(0)
    assert all(
        party.own_state() == {"kept": None, "seen": None} for party in engine._parties.values()
    )
    assert engine.account().remarks == ("the state of 3 of 3 parties is on disk between calls",)
    assert keepers(None).account().remarks == ()


# -- memory and disk -------------------------------------------------------------------------------

WEIGHTS = 1 << 18
"""Float32 numbers of a large party: 1 MiB."""


class Large(Party[None]):
    STATE = ("params", "opt")

    def setup(self) -> None:
        self.network(nn.Linear(WEIGHTS, 1, bias=False), SGD(0.1))
        self.params = {"weight": torch.full((1, WEIGHTS), float(self.context.id))}

    def grow(self, *, by: float) -> float:
        self.params = {"weight": self.params["weight"] + by}
        return float(self.params["weight"][0, -1])


def resident() -> int:
    """Bytes of parties' state in memory: resident pages of the mappings that engines cut their
    blocks from.
    """
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("this system does not tell")
    found = re.findall(r"^(\w+)-(\w+) .*? (?s:.*?)^Rss: +(\d+) kB", maps.read_text(), re.MULTILINE)
    return sum(int(rss) << 10 for start, end, rss in found if int(end, 16) - int(start, 16) == SLAB)


def test_memory_stays_within_the_budget_and_is_given_back() -> None:
    n, most = 100, 0

    def made() -> Iterator[Party[Any]]:
        nonlocal most
        for i in range(n):
            yield Large(None, ClientContext(id=i))
            most = max(most, resident() if i % 10 == 0 else 0)

    start, files = resident(), len(os.listdir("/proc/self/fd"))
    engine = LocalEngine(made(), memory=20 << 20)
    assert 75 <= spilling(engine) <= 82  # a party takes a little more than its MiB
    for t in range(3):
        assert engine.call(engine.ids, "grow", {"by": 0.5}, None, (t, 0)) == [
            i + (t + 1) / 2 for i in range(n)
        ]
        most = max(most, resident())
    assert most - start < 25 << 20  # of 100 MiB
    weights = [state["params"]["weight"] for state in engine.states().values()]  # type: ignore[index,call-overload]
    assert all(bool((w == i + 1.5).all()) for i, w in enumerate(weights))
    del engine, weights, made
    gc.collect()
    assert resident() <= start
    assert len(os.listdir("/proc/self/fd")) <= files


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = keepers(0)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    words = (
        r"^no room on disk for \d+\.\d MB more of parties' state \(No space left on device\); "
        r"raise engine\.memory_mb"
    )
    with pytest.raises(ConfigError, match=words):
        keepers(0)
    keepers(1 << 20)  # all of it fits in memory
    with pytest.raises(ConfigError, match=words):  # what they remember outgrows its room
        for t in range(9):
            engine.call(engine.ids, "see", {"t": t}, None, (t, 0))


def test_the_file_lies_where_tmpdir_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no room on disk .*No such file or directory.*TMPDIR"):
        keepers(0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert spilling(keepers(0)) == 3
    assert not list(tmp_path.iterdir())  # it has no name, so nothing is left behind


def test_only_parties_on_the_cpu_are_housed() -> None:
    party = Large(None, ClientContext(id=0, device="meta"))
    with pytest.raises(ConfigError, match=r"engine\.memory_mb applies to parties on the CPU only"):
        Arena(0).adopt(party)


# -- blocks ----------------------------------------------------------------------------------------


class Small(Party[None]):
    STATE = ("params", "buffers", "opt")

    def setup(self) -> None:
        self.network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), Adam())


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("slab", [1, 4096, 9000])
def test_blocks_never_overlap_wherever_a_slab_ends(
    monkeypatch: pytest.MonkeyPatch, budget: int | None, slab: int
) -> None:
    monkeypatch.setattr("fedloom.engines.memory.SLAB", slab)
    arena, parties = Arena(budget), [Small(None, ClientContext(id=i)) for i in range(9)]
    for party in parties:
        arena.adopt(party)
    spans = sorted((p.net.memory.data_ptr(), p.net.memory.numel()) for p in parties)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert all(a % 64 == 0 for a, _ in spans)
    for i, party in enumerate(parties):
        with arena.swapped_in(party):
            party.net.memory.fill_(i)
    assert all(bool((p.net.memory == i).all()) for i, p in enumerate(parties))


@pytest.mark.parametrize("budget", [None, 0])
def test_another_process_cuts_from_a_slab_of_its_own(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    arena, parties = Arena(budget), [Small(None, ClientContext(id=i)) for i in range(2)]
    arena.adopt(parties[0])
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    arena.adopt(parties[1])
    distance = abs(parties[1].net.memory.data_ptr() - parties[0].net.memory.data_ptr())
    assert distance >= 1 << 28
