"""Memory that forked processes share, for the networks of their parties."""

import mmap

import torch

from fedloom.core._layout import ALIGNMENT
from fedloom.core.network import Network

SLAB = 1 << 28
"""Bytes mapped at once. Untouched pages use no memory."""


class SharedMemory:
    """Moves networks into memory that processes forked later share with this one."""

    def __init__(self) -> None:
        self._slab = mmap.mmap(-1, 1)
        self._at = len(self._slab)

    def adopt(self, network: Network) -> None:
        """Move a network's state into a block of its own."""
        size = network.memory.numel()
        if self._at + size > len(self._slab):
            self._slab, self._at = mmap.mmap(-1, max(SLAB, size)), 0
        network.move(torch.frombuffer(self._slab, dtype=torch.uint8, count=size, offset=self._at))
        self._at += -(-size // ALIGNMENT) * ALIGNMENT
