"""Where the state of parties lives: in memory that forked processes share, and beyond a budget on disk.

The disk part is a file without a name, so that nothing is left behind however a process ends. The block of a
network is mapped from it: the kernel writes and reads its pages, and after each call we let go of them. What else a
party remembers is encoded into the file between its calls. All of it comes back bit-equal.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom import message
from fedloom.errors import ConfigError
from fedloom.message import Limits, Tree
from fedloom.party import Party

SLAB = 1 << 26
"""Bytes mapped at once. A page that nobody touches takes no room."""
_LIMITS = Limits(max_bytes=1 << 40, max_leaves=10_000_000)


class Arena:
    """The home of the state of CPU parties.

    Args:
        budget: bytes of state that may stay in memory; None for all.
        folder: where the file for the rest is made; None for the system's folder for such files.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        self._budget = float("inf") if budget is None else budget
        self._used = 0
        self._memory = _Slabs(None)
        self._folder = folder
        self._disk: _Slabs | None = None
        self._mapped: dict[int, _Place] = {}
        self._parked: dict[int, tuple[int, int, int]] = {}  # where in the file, of what length, in how much room

    def house(self, party: Party[Any]) -> None:
        """Take over a party's state: into memory while the budget lasts, then onto disk.

        Raises:
            ConfigError: the disk has no room for it.
        """
        self._used += message.size(party.state()).payload
        spill = self._used > self._budget
        if spill and self._disk is None:
            self._disk = _Slabs(tempfile.TemporaryFile(dir=self._folder))
        slabs = self._disk if spill and self._disk else self._memory
        if party._network is not None:
            place = slabs.block(party._network.memory.numel())
            party._network.move(place.memory)
            if spill:
                self._mapped[party.site.id] = place
        if spill:
            self._parked[party.site.id] = (0, 0, 0)
            self._rest(party)

    @property
    def spilled(self) -> int:
        """How many parties lie on disk."""
        return len(self._parked)

    @contextlib.contextmanager
    def awake(self, party: Party[Any]) -> Iterator[None]:
        """Within it all of a party's state is in memory."""
        if party.site.id not in self._parked:
            yield
            return
        self._wake(party)
        try:
            yield
        finally:
            self._rest(party)

    def state(self, party: Party[Any]) -> dict[str, Tree]:
        """A party's state, wherever it lies."""
        if party.site.id not in self._parked:
            return party.state()
        parked = self._read(party.site.id)
        return {k: parked[k] if k in parked else getattr(party, k) for k in party.STATE}

    def _wake(self, party: Party[Any]) -> None:
        for name, value in self._read(party.site.id).items():
            setattr(party, name, value)

    def _read(self, party: int) -> dict[str, Tree]:
        assert self._disk is not None
        start, length, _ = self._parked[party]
        tree = message.decode(self._disk.read(start, length), _LIMITS)
        assert isinstance(tree, dict)
        return tree

    def _rest(self, party: Party[Any]) -> None:
        assert self._disk is not None
        i = party.site.id
        data = message.encode(party.own_state(), _LIMITS)
        start, _, room = self._parked[i]
        if len(data) > room:
            room = 2 * len(data)
            start = self._disk.grow(room)
        self._disk.write(start, data)
        self._parked[i] = (start, len(data), room)
        for name in party.own_state():
            setattr(party, name, None)
        if party._network is not None:
            party._network.forget()
            self._mapped[i].release()


class _Place:
    """A block within a slab."""

    def __init__(self, slab: mmap.mmap, start: int, size: int) -> None:
        self._slab, self._start, self._size = slab, start, size
        self.memory: Tensor = torch.frombuffer(slab, dtype=torch.uint8, count=size, offset=start)

    def release(self) -> None:
        """Let go of the pages; their content is in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._slab.madvise(mmap.MADV_DONTNEED, self._start, self._size)


class _Slabs:
    """Blocks cut from large mappings, of a file or of memory that forked processes share."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._slab: mmap.mmap | None = None
        self._at = 0
        self._end = 0  # of the file

    def block(self, size: int) -> _Place:
        """A block of this many bytes, at the beginning of a page where it lies in a file."""
        step = mmap.PAGESIZE if self._file else 64
        if self._slab is None or self._at + size > len(self._slab):
            length = -(-max(SLAB, size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            if self._file:
                start = self.grow(length)
                self._slab = mmap.mmap(self._file.fileno(), length, offset=start)
            else:
                self._slab = mmap.mmap(-1, length)
            self._at = 0
        place = _Place(self._slab, self._at, size)
        self._at += -(-size // step) * step
        return place

    def grow(self, size: int) -> int:
        """Make the file longer; where the new part begins. The room is there, or an error says so now."""
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), start, size)
            else:
                os.ftruncate(self._file.fileno(), start + size)
        except OSError as error:
            raise ConfigError(
                f"no room on disk for {size / 1e6:.0f} MB of parties' state ({error.strerror}): raise engine.memory_mb, "
                "or let TMPDIR name a folder on a larger disk"
            ) from None
        self._end = start + size
        return start

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the file."""
        return os.pread(self._file.fileno(), length, start)

    def write(self, start: int, data: bytes) -> None:
        """Write bytes into the file."""
        os.pwrite(self._file.fileno(), data, start)
