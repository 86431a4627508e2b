"""Messages between processes of one machine, by frames and shared buffers.

A *frame* is sent over a socket: a few facts and some bytes. The facts are JSON rather than a
message, because they change in every frame, and a message's header is cached only while it is the
same. A *shared buffer* is a file in memory that one process writes and all can read, so messages go
from worker to worker without the parent.
"""

import json
import os
import socket
import struct
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, Final

from fedloom.core.errors import MessageError
from fedloom.core.message import Limits

LIMITS: Final = Limits(max_bytes=1 << 40, max_depth=64, max_leaves=10_000_000)
"""Limits of messages between processes. Replies of parties have the narrower limits of `message`.
"""
KEPT: Final = 1 << 26
"""Bytes up to which a trimmed shared buffer keeps its memory."""
_LENGTHS: Final = struct.Struct("<IQ")
_dumps: Final = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class SharedBuffer:
    """A file in memory with one writer, for all processes that are forked later.

    Attributes:
        end: the position of the next message.
        reach: the end of all messages since the last trim, as far as this process knows.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file: Any = open(os.memfd_create("fedloom"), "r+b", buffering=0)  # noqa: SIM115
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.end = self.reach = 0

    def write(self, data: bytes) -> tuple[int, int]:
        """Append a message; its start and length."""
        start, view = self.end, memoryview(data)
        while view:
            count = os.pwrite(self._file.fileno(), view, self.end)
            self.end += count
            view = view[count:]
        self.reach = max(self.reach, self.end)
        return start, len(data)

    def read(self, start: int, length: int) -> bytes:
        """The message at this position."""
        data = os.pread(self._file.fileno(), length, start)
        while len(data) < length:  # Linux reads 2 GB at a time
            more = os.pread(self._file.fileno(), length - len(data), start + len(data))
            if not more:
                raise MessageError(
                    f"a shared buffer holds only {len(data)} bytes of a message of {length}"
                )
            data += more
        return data

    def trim(self) -> None:
        """Drop all messages. Their memory is reused, or freed if it exceeds `KEPT`."""
        if self.reach > KEPT:
            os.ftruncate(self._file.fileno(), 0)
        self.end = self.reach = 0

    def close(self) -> None:
        """Close it in this process."""
        self._file.close()


def send(to: socket.socket, facts: Mapping[str, Any], *parts: bytes) -> None:
    """Send one frame: facts that JSON can hold, and bytes."""
    text = _dumps(facts).encode()
    pieces = (_LENGTHS.pack(len(text), sum(map(len, parts))), text, *parts)
    sent = to.sendmsg(pieces)
    for piece in pieces:
        if sent < len(piece):
            to.sendall(memoryview(piece)[sent:])
        sent = max(sent - len(piece), 0)


def receive(sender: socket.socket) -> tuple[dict[str, Any], memoryview] | None:
    """The next frame; None if its sender ended before it was whole."""
    lengths = receive_exactly(sender, _LENGTHS.size)
    if lengths is None:
        return None
    facts, length = _LENGTHS.unpack(lengths)
    text, body = receive_exactly(sender, facts), receive_exactly(sender, length)
    return None if text is None or body is None else (json.loads(bytes(text)), body)


def receive_exactly(sender: socket.socket, length: int) -> memoryview | None:
    """Exactly `length` bytes, or None if the sender ended before."""
    data, received = memoryview(bytearray(length)), 0
    while received < length:
        try:
            count = sender.recv_into(data[received:])
        except ConnectionError:
            return None
        if not count:
            return None
        received += count
    return data
