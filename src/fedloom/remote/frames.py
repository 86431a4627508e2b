"""What both sides of the wire agree on: the first frame of a call and of an answer, sizes, statuses, options.

A call is a head and its bytes, so is the answer. The first frame holds the head, after its length in 4 bytes, and as
much of the bytes as has room; further frames are bytes. Each head says how many there are and what they sum up to.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any, Final

import grpc

from fedloom.core import message
from fedloom.core.errors import MessageError
from fedloom.core.message import Limits, Tree
from fedloom.remote import rpc_errors

PIECE: Final = 1 << 17
"""Bytes of a piece: small ones let other calls pass in between."""
LARGEST_PIECE: Final = 1 << 20
PULSE: Final = 2.0
"""Seconds between two signs of life."""
SILENCE: Final = 6.0
"""Seconds without one until the other end counts as unreachable."""
LARGEST: Final = 1 << 30
"""Bytes that an answer may have, unless a link is told otherwise."""
MOST_WORDS: Final = 300
"""Characters of a refusal that are sent, and believed."""

NAME: Final = "fedloom-name"
"""Metadata of the insecure mode: who the caller says that it is."""
CODE: Final = "fedloom-code"
"""Metadata of a refusal: its code. A status without it is gRPC's own, and may say no more than that a line broke."""
SERVICE: Final = "fedloom.Node"
ASK: Final = f"/{SERVICE}/Ask"
PULSES: Final = f"/{SERVICE}/Pulse"
STATUS: Final = {
    rpc_errors.REFUSED: grpc.StatusCode.PERMISSION_DENIED,
    rpc_errors.MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    rpc_errors.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    rpc_errors.STALE: grpc.StatusCode.ABORTED,
    rpc_errors.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    rpc_errors.TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    rpc_errors.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    rpc_errors.TOO_LARGE: grpc.StatusCode.OUT_OF_RANGE,
    rpc_errors.FAILED: grpc.StatusCode.INTERNAL,
    rpc_errors.LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    rpc_errors.UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
}
TAKEN: Final = b"taken"
"""The last frame of a caller: it has the whole answer. The end of its stream alone may be that of the line."""
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", LARGEST_PIECE),
    ("grpc.max_send_message_length", LARGEST_PIECE),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
CLIENT: Final = (
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # so long may one take to come up: several round trips, on a busy machine
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 5_000),
)
SERVER: Final = (
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_HEAD: Final = Limits(max_bytes=1 << 12, max_depth=1, max_leaves=8)


class FrameError(Exception):
    """A frame that the other end should not have sent."""


def printable(words: str) -> str:
    """As much of another's words as is believed, without what would move a terminal's cursor or break a log's line."""
    return "".join(c for c in words[:MOST_WORDS] if c.isprintable())


def digest(data: bytes | bytearray) -> str:
    """Tells one content from another."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


async def total_of(data: bytes) -> int:
    """The CRC-32 of a body.

    TLS has proved every byte on its way. What is left to be found are pieces of two bodies put together as one, where
    a connection broke and one side is mistaken; for that a CRC will do, at a tenth of what a hash of 50 MB costs.
    """
    return zlib.crc32(data) if len(data) <= LARGEST_PIECE else await asyncio.to_thread(zlib.crc32, data)


def framed(head: Tree, data: bytes = b"", start: int = 0) -> Iterator[bytes]:
    """The frames of a head and of all data from `start` on."""
    text = message.encode(head, _HEAD)
    view = memoryview(data)
    yield b"".join((len(text).to_bytes(4, "little"), text, view[start : start + PIECE]))
    yield from pieces(data, start + PIECE)


def pieces(data: bytes, start: int) -> Iterator[bytes]:
    """The frames of data from `start` on, without a head."""
    view = memoryview(data)
    for at in range(start, len(data), PIECE):
        yield bytes(view[at : at + PIECE])


def unframed(frame: bytes, **types: type) -> tuple[dict[str, Any], memoryview]:
    """The head in a first frame, held to these types, and the data behind it.

    Raises:
        Garbled: there is no such head.
    """
    view = memoryview(frame)
    end = 4 + int.from_bytes(view[:4], "little")
    try:
        head = message.decode(view[4:end], _HEAD)
        message.check_like(head, types)
    except MessageError as error:
        raise FrameError(str(error)) from None
    assert isinstance(head, dict)
    return head, view[end:]
