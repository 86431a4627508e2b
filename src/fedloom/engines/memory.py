"""Storage of the parties' state: in memory that forked processes share, and beyond a budget on
disk.

The file on disk has no name, so it disappears however a process ends. A network's block is mapped
from it; its pages are released after each call. The rest of a party's state is stored there,
encoded, between calls. Restored state is bit-identical.
"""

import contextlib
import ctypes
import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core._layout import ALIGNMENT
from fedloom.core.errors import ConfigError
from fedloom.core.message import Limits, Tree
from fedloom.core.party import Party

SLAB = 1 << 28
"""Bytes mapped at once. Untouched pages use neither memory nor disk."""
TRIM_EVERY = 1 << 24
"""Bytes of adopted state after which freed memory is returned to the system."""
_LIMITS = Limits(max_bytes=1 << 40, max_leaves=10_000_000)


class Arena:
    """The memory and disk that hold the state of CPU parties.

    Args:
        budget: bytes of state kept in memory; None for all.
        folder: the folder of the file; None for TMPDIR, or else the system's folder for large
            temporary files.

    Attributes:
        on_disk: bytes of disk in use.
        spilled: the ids of the parties on disk, with the places of their state.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        self._left = math.inf if budget is None else budget
        self.on_disk = 0
        self._moved = 0  # bytes since the heap was trimmed
        self._folder = folder
        self._slabs: dict[bool, _Slab] = {}  # the current slab on disk (True) and in memory (False)
        self.spilled: dict[int, _SwapSlot] = {}

    def adopt(self, party: Party[object]) -> None:
        """Move a party's state into memory if the budget has room for it, else onto disk. Raises
        ConfigError if the disk has no room for it, or it is on another device than the CPU.
        """
        network = party._network
        if network is not None and network.memory.device.type != "cpu":
            raise ConfigError(
                "engine.memory_mb applies to parties on the CPU only, not on "
                f"{party.context.device!r}; remove it"
            )
        block = 0 if network is None else network.memory.numel()
        size = block + message.size(party.own_state()).wire
        spill = size > self._left
        self._left -= 0 if spill else size
        own_block = None
        if network is not None:
            own_block = self._cut(block, spill)
            network.move(own_block.memory)
        if spill:
            self.spilled[party.context.id] = _SwapSlot(own_block)
            self._swap_out(party)
        self._moved += size
        if self._moved > TRIM_EVERY:
            self._moved = 0
            # building a party leaves holes of its size, which the C library would keep
            if sys.platform == "linux":
                getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)

    @contextlib.contextmanager
    def swapped_in(self, party: Party[object]) -> Iterator[None]:
        """A context in which all of a party's state is in memory."""
        slot = self.spilled.get(party.context.id)
        if slot is None:
            yield
            return
        vars(party).update(slot.read())
        try:
            yield
        finally:
            self._swap_out(party)

    def state(self, party: Party[object]) -> dict[str, Tree]:
        """A party's state, from memory or disk."""
        slot = self.spilled.get(party.context.id)
        if slot is None:
            return party.state()
        stored = slot.read()
        return {
            name: stored[name] if name in stored else getattr(party, name)
            for name in party.state_names
        }

    def _swap_out(self, party: Party[object]) -> None:
        """Store a party's state outside its network, and release all pages."""
        slot, own = self.spilled[party.context.id], party.own_state()
        if own:
            data = message.encode(own, _LIMITS)
            if slot.own is None or len(data) > slot.own.size:
                # doubled, so that growing state seldom moves
                slot.own = self._cut(2 * len(data), spill=True)
            slot.own.mapped[slot.own.start : slot.own.start + len(data)] = data
            slot.length = len(data)
        self.release(party)

    def release(self, party: Party[object]) -> None:
        """Release the memory of a party on disk without storing its state. For forks, whose parent
        stores it.
        """
        slot = self.spilled.get(party.context.id)
        if slot is None:
            return
        vars(party).update(dict.fromkeys(party.own_state()))
        if party._network is not None:
            party._network.forget()
        for block in filter(None, (slot.network, slot.own)):
            block.release()

    def _cut(self, size: int, spill: bool) -> "_Block":
        """A new block in memory or on disk. A forked process never cuts from its parent's slab."""
        slab = self._slabs.get(spill)
        try:
            if slab is None or not slab.fits(size):
                folder = self._folder or _folder()
                slab = self._slabs[spill] = _Slab(
                    max(SLAB, size),
                    tempfile.TemporaryFile(dir=folder) if spill else None,  # noqa: SIM115
                )
            block = slab.cut(size)
        except OSError as error:
            if not spill:
                raise
            raise ConfigError(
                f"no room on disk for {size / 1e6:.1f} MB more of parties' state "
                f"({error.strerror}); raise engine.memory_mb, or set TMPDIR to a folder on a "
                "larger disk"
            ) from None
        self.on_disk += size if spill else 0
        return block


def swapped_in(
    arena: Arena | None, party: Party[object]
) -> contextlib.AbstractContextManager[None]:
    """A context in which all of a party's state is in memory, whether or not an arena holds it."""
    return contextlib.nullcontext() if arena is None else arena.swapped_in(party)


@dataclass
class _Block:
    """A block of a mapping, which it keeps alive."""

    mapped: mmap.mmap
    start: int
    size: int

    @property
    def memory(self) -> Tensor:
        """The block as a tensor (size,) uint8."""
        return torch.frombuffer(self.mapped, dtype=torch.uint8, count=self.size, offset=self.start)

    def release(self) -> None:
        """Release the pages; the file keeps their content."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED, self.start, self.size)


@dataclass
class _SwapSlot:
    """A party's state on disk: its network's block, and the rest of its state, encoded."""

    network: _Block | None
    own: _Block | None = None
    length: int = 0

    def read(self) -> Any:
        """The state outside the network, by name."""
        if self.own is None:
            return {}
        return message.decode(
            self.own.mapped[self.own.start : self.own.start + self.length], _LIMITS
        )


class _Slab:
    """A mapping of a file, or of memory that forked processes share, from which blocks are cut."""

    def __init__(self, length: int, file: IO[bytes] | None) -> None:
        self._file = file
        self._length = length
        self._at = 0
        self._process = os.getpid()
        if file is not None:
            weakref.finalize(self, file.close)
            os.ftruncate(file.fileno(), length)
        self._mapped = mmap.mmap(-1 if file is None else file.fileno(), length)

    def fits(self, size: int) -> bool:
        """Whether this process can cut a block of this many bytes."""
        return self._process == os.getpid() and self._at + size <= self._length

    def cut(self, size: int) -> _Block:
        """The next block. Reserves its room on disk, so that a lack raises OSError here and not in
        a party's call.
        """
        if self._file is not None:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._at, size)
            else:
                os.pwrite(self._file.fileno(), bytes(size), self._at)
        block = _Block(self._mapped, self._at, size)
        step = ALIGNMENT if self._file is None else mmap.PAGESIZE
        self._at += -(-size // step) * step
        return block


class Spool(Mapping[str, Any]):
    """Trees by name, in an unnamed temporary file instead of in memory."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self._file = tempfile.TemporaryFile(dir=_folder())  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, int]] = {}
        for name, tree in trees.items():
            data = message.encode(tree, _LIMITS)
            self._places[name] = self._file.tell(), len(data)
            self._file.write(data)

    def __getitem__(self, name: str) -> Tree:
        start, length = self._places[name]
        self._file.seek(start)
        return message.decode(self._file.read(length), _LIMITS)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _folder() -> str | None:
    """TMPDIR, or else /var/tmp, as /tmp is in memory on many machines."""
    return os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
