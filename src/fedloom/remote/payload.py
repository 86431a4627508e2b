"""Bodies of calls: a head and further messages, each preceded by its length, so that none is
encoded twice.
"""

from collections.abc import Sequence
from typing import Any

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import MessageError
from fedloom.core.message import Limits, Template, Tree
from fedloom.remote.rpc_errors import mismatch

PROTOCOL = 5
"""Version of the calls between parties."""
VERSIONS = f"{PROTOCOL}/{__version__}"
"""Version of the protocol and of fedloom, with which numerical results may change."""
MOST = 100_000
"""Limit of the parts of one body."""
PIECE, MOST_PIECES = 16_000, 1_000
"""Characters of a piece of a long text, and the limit of its pieces."""


def pack(head: Tree, *rest: bytes) -> bytes:
    """The body of a call: an encoded head and further messages."""
    parts = [message.encode(head), *rest]
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))


def unpack(
    body: bytes, like: Template = object, limits: Limits = message.DEFAULT
) -> tuple[Any, list[memoryview]]:
    """The head, checked against a template and limits, and the further messages, not yet decoded.

    A large head takes long: call this outside the loop that listens.

    Raises:
        MessageError: the body is truncated, or the head does not fit the template or is too large.
    """
    view, parts = memoryview(body), list[memoryview]()
    while view:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 + length or len(parts) > MOST:
            raise MessageError("a body must be a sequence of messages, each preceded by its length")
        parts.append(view[8 : 8 + length])
        view = view[8 + length :]
    if not parts:
        raise MessageError("a body must have a head")
    head = message.decode(parts[0], limits)
    message.check_like(head, like)
    return head, parts[1:]


def check_versions(protocol: int, version: str) -> None:
    """Raise `CallRefused` unless the coordinator's versions are this node's."""
    theirs = f"{protocol}/{ascii(version)[1:-1][:40]}"
    if theirs != VERSIONS:
        raise mismatch(f"this node has protocol and version {VERSIONS}, the coordinator {theirs}")


def cut(text: str) -> list[str]:
    """A long text in pieces that fit into a message."""
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def joined(pieces: Any) -> str:
    """The text of these pieces, or of one string.

    Raises:
        MessageError: not a text, or too long.
    """
    whole = [pieces] if isinstance(pieces, str) else pieces
    if (
        not isinstance(whole, list)
        or len(whole) > MOST_PIECES
        or not all(isinstance(piece, str) for piece in whole)
    ):
        raise MessageError(f"a text must be a list of at most {MOST_PIECES} pieces")
    return "".join(whole)


def decoded(parts: Sequence[memoryview], index: Any) -> Any:
    """Part `index`, decoded; None for None.

    Raises:
        MessageError: there is no such part, or it is not a valid message.
    """
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(parts):
        raise MessageError("an index must refer to a part of the same body")
    return message.decode(parts[index])
