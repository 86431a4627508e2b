"""The frame format of the RPC protocol: gRPC with mutual TLS, and messages in small pieces.

A call is a head and its bytes, and so is the answer. A small call is one message each way; a larger
one, and the rest of a larger answer, is one stream. The first frame holds the head, after its
length in 4 bytes, and the first piece of the bytes; further frames are pieces. Each head gives the
number of bytes and their CRC-32. Both ends report how many bytes they already have, so a broken
connection resumes where it stopped. A call has an id, so its work is done once, however often it is
sent; its answer is kept until the caller confirms it. Heartbeats have a connection of their own, so
that a large transfer on a slow line does not delay them.

`rpc_server` answers calls and `rpc_client` makes them.
"""

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
"""Bytes of a piece: small, so that other calls pass in between."""
LARGEST_PIECE: Final = 1 << 20
WHOLE: Final = LARGEST_PIECE - (1 << 13)
"""Bytes of a call, or of the first piece of its answer, that are one message with their head. Such
a message takes half of the time and work of a stream.
"""
MOST_TAKEN: Final = 1 << 11
"""Characters of the ids of answers that a caller confirms in one call or heartbeat."""
LARGE: Final = "body"
"""The kind of a call whose answer is a large body: it has a connection of its own, as large calls
have.
"""
PULSE: Final = 2.0
"""Seconds between two heartbeats."""
SILENCE: Final = 6.0
"""Seconds without a heartbeat until the other end counts as unreachable."""
PATIENCE: Final = 30.0
"""Seconds that a node waits for the answer to a heartbeat; a busy coordinator answers late."""
RECONNECT: Final = 2.0
"""Seconds that a node whose connection broke may take to connect again."""
LARGEST: Final = 1 << 30
"""Default limit of an answer, in bytes."""
MOST_WORDS: Final = 300
"""Limit of an error sentence, in characters, sent or received."""

NAME: Final = "fedloom-name"
"""Metadata of the insecure mode: the name that the caller claims."""
CODE: Final = "fedloom-code"
"""Metadata of a refusal: its code. A status without it comes from gRPC, perhaps only because a
connection broke.
"""
SERVICE: Final = "fedloom.Node"
ASK: Final = f"/{SERVICE}/Ask"
TELL: Final = f"/{SERVICE}/Tell"
PULSES: Final = f"/{SERVICE}/Pulse"
STATUS: Final = {
    rpc_errors.PENDING: grpc.StatusCode.FAILED_PRECONDITION,
    rpc_errors.STOPPED: grpc.StatusCode.PERMISSION_DENIED,
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
"""The caller's last frame: it has the whole answer. The end of the stream alone may mean a broken
connection.
"""
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
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time for a connection to come up on a busy machine
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
    """An invalid frame."""


def printable(words: str) -> str:
    """A text from another party, shortened to `MOST_WORDS` and without control characters."""
    return "".join(c for c in words[:MOST_WORDS] if c.isprintable())


def digest(data: bytes | bytearray) -> str:
    """The BLAKE2b hash of some bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


async def total_of(data: bytes) -> int:
    """The CRC-32 of a body.

    TLS protects the bytes in transit. The CRC detects pieces of two bodies joined by mistake after
    a broken connection, at a tenth of the cost of a hash.
    """
    return (
        zlib.crc32(data)
        if len(data) <= LARGEST_PIECE
        else await asyncio.to_thread(zlib.crc32, data)
    )


def framed(head: Tree, data: bytes = b"", start: int = 0) -> Iterator[bytes]:
    """The frames of a head and of the data from `start`."""
    yield whole(head, memoryview(data)[start : start + PIECE])
    yield from pieces(data, start + PIECE)


def whole(head: Tree, data: bytes | memoryview = b"") -> bytes:
    """One frame of a head and of all of the data."""
    text = message.encode(head, _HEAD)
    return b"".join((len(text).to_bytes(4, "little"), text, data))


def pieces(data: bytes, start: int) -> Iterator[bytes]:
    """The frames of the data from `start`, without a head."""
    view = memoryview(data)
    for at in range(start, len(data), PIECE):
        yield bytes(view[at : at + PIECE])


def unframed(frame: bytes, **types: type) -> tuple[dict[str, Any], memoryview]:
    """The head in a first frame, checked against these types, and the data behind it.

    Raises:
        FrameError: the head is missing or invalid.
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
