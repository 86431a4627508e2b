"""The steps of each party in private set intersection (PSI). Messages are bytes of bounded size,
validated on receipt.

`PSIClient` and `PSIServer` are the two sides of one shard, on top of openmined.psi (ECDH; the exact
data structure, without false positives). `announce` and `follow` are the last step, which gives all
parties one order. A network may carry the messages unchanged over an encrypted channel.
"""

import hmac
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, MessageError

LARGEST = 4_000_000
"""Maximum number of bytes of a message: about 114,000 ids, and below gRPC's default limit."""

_MARK = 32  # bytes of an HMAC-SHA256


class PSIClient:
    """The side that learns which of its ids the other side has. Each object has a new key.

    Args:
        digests: 32 bytes each, distinct; in an order that may be revealed.
        most: the number of ids that the server stated.
    """

    def __init__(self, digests: Sequence[bytes], most: int) -> None:
        self._digests, self._most = digests, most
        self._library = library()
        self._role = self._library.client.CreateWithNewKey(True)

    def request(self) -> bytes:
        """The message to the server: the ids under the client's key."""
        return bytes(self._role.CreateRequest(list(self._digests)).SerializeToString())

    def intersection(self, setup: bytes, response: bytes) -> list[int]:
        """Positions of the client's digests that the server has too, ascending.

        Args:
            setup: the server's ids under its key.
            response: the client's ids under both keys.

        Raises:
            MessageError: a message is too large or invalid.
        """
        theirs = _parse(self._library.ServerSetup, setup)
        mine = _parse(self._library.Response, response)
        if theirs.WhichOneof("data_structure") != "raw":
            raise MessageError(
                "the setup of an intersection must be exact (raw), but is of another structure"
            )
        points, own = theirs.raw.encrypted_elements, mine.encrypted_elements
        _expect(len(points) <= self._most, "the setup holds more ids than the server stated")
        _expect(_ascends(points), "the setup must be in ascending order")
        _expect(
            len(own) == len(set(own)) == len(self._digests),
            "the response must answer every id, once",
        )
        places: list[int] = _refuse(self._role.GetIntersection, theirs, mine)
        return sorted(places)


class PSIServer:
    """The side whose ids the client compares with its own; it learns their number. Each object has
    a new key.

    Args:
        digests: 32 bytes each, distinct.
        most: the number of ids that the client stated; a request for more is refused.

    Attributes:
        asked: number of ids in the requests.
    """

    def __init__(self, digests: Sequence[bytes], most: int) -> None:
        self._digests, self._most = digests, most
        self.asked = 0
        self._library = library()
        self._role = self._library.server.CreateWithNewKey(True)

    def setup(self) -> bytes:
        """The message to the client: the ids under the server's key, sorted."""
        ids, exact = list(self._digests), self._library.DataStructure.RAW
        return bytes(self._role.CreateSetupMessage(1e-9, len(ids), ids, exact).SerializeToString())

    def respond(self, request: bytes) -> bytes:
        """The client's ids under both keys, in the order of the request.

        Raises:
            MessageError: the request is too large, has more ids than stated, or is invalid.
        """
        asked = _parse(self._library.Request, request)
        self.asked += len(asked.encrypted_elements)
        _expect(self.asked <= self._most, "the request holds more ids than the client stated")
        return bytes(_refuse(self._role.ProcessRequest, asked).SerializeToString())


def announce(key: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """The active party's messages to every other one: the session key, then the marks of the
    aligned ids in order.

    A mark is the HMAC-SHA256 of a digest under the key; marks are sorted, so that their order
    depends only on the key and on the aligned ids. Each message holds at most `LARGEST` bytes.
    """
    marks = sorted(_marks(key, digests))
    size = LARGEST // _MARK
    return [key, *(b"".join(marks[start : start + size]) for start in range(0, len(marks), size))]


def announced_rows(messages: Sequence[bytes], digests: Sequence[bytes]) -> np.ndarray:
    """A party's own rows in the announced order.

    Args:
        messages: from `announce`.
        digests: of all ids of this party.

    Returns:
        (N,) int64 positions in `digests`.

    Raises:
        MessageError: the marks are truncated, out of order, or of ids that this party does not
            have.
    """
    key, *pieces = messages
    sent = b"".join(pieces)
    _expect(len(sent) % _MARK == 0, "the announced order is truncated")
    marks = [sent[start : start + _MARK] for start in range(0, len(sent), _MARK)]
    _expect(_ascends(marks), "the announced order is not ascending")
    own = {mark: place for place, mark in enumerate(_marks(key, digests))}
    _expect(
        all(mark in own for mark in marks),
        "the announced order names ids that this party does not have",
    )
    return np.fromiter((own[mark] for mark in marks), np.int64, len(marks))


def library() -> ModuleType:
    """The package openmined.psi. Raises DataError if it is not installed."""
    try:
        import private_set_intersection.python as module
    except ImportError as error:
        raise DataError(
            "The backend openmined needs the package openmined.psi, which cannot be imported "
            f"({error}); "
            'run: pip install -e ".[psi]"'
        ) from error
    return module  # type: ignore[no-any-return]


def _marks(key: bytes, digests: Sequence[bytes]) -> list[bytes]:
    return [hmac.digest(key, digest, "sha256") for digest in digests]


def _ascends(values: Sequence[bytes]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _parse(kind: Any, message: bytes) -> Any:
    """A message of the library from untrusted bytes."""
    if len(message) > LARGEST:
        raise MessageError(
            f"a message of an intersection must have at most {LARGEST:,} bytes, but has "
            f"{len(message):,}"
        )
    return _refuse(kind.FromString, message)


def _refuse(function: Any, *args: Any) -> Any:
    """Call the library with untrusted bytes; raise its errors as MessageError."""
    try:
        return function(*args)
    # protobuf's DecodeError, the library's RuntimeError for an invalid point
    except Exception as error:
        raise MessageError(
            f"invalid message of a private intersection: {str(error).splitlines()[0]}"
        ) from error


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise MessageError(otherwise)
