"""Bodies of calls: a head and further messages, each after its length, so that none is encoded twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedloom.core import message
from fedloom.core.errors import MessageError
from fedloom.core.message import Template, Tree

PROTOCOL = 1
"""Of the calls between parties; other than the version of fedloom, with which numbers may change."""
MOST = 100_000
"""Parts of one body."""
PIECE, MOST_PIECES = 16_000, 1_000
"""Characters of a piece of a long text, and how many pieces one has."""


def pack(head: Tree, *rest: bytes) -> bytes:
    """One body."""
    parts = [message.encode(head), *rest]
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))


def unpack(body: bytes, like: Template = object) -> tuple[Any, list[memoryview]]:
    """The head, held to a template, and the further messages, not yet decoded.

    Raises:
        MessageError: the body is torn, or the head is none such.
    """
    view, parts = memoryview(body), list[memoryview]()
    while view:
        length = int.from_bytes(view[:8], "little")
        if len(view) < 8 + length or len(parts) > MOST:
            raise MessageError("a body must be a row of messages, each after its length")
        parts.append(view[8 : 8 + length])
        view = view[8 + length :]
    if not parts:
        raise MessageError("a body must have a head")
    head = message.decode(parts[0])
    message.check_like(head, like)
    return head, parts[1:]


def cut(text: str) -> list[str]:
    """A long text as a message can hold it."""
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def joined(pieces: Any) -> str:
    """The text that was cut, or that stands there whole.

    Raises:
        MessageError: it is none, or too long.
    """
    whole = [pieces] if isinstance(pieces, str) else pieces
    if not isinstance(whole, list) or len(whole) > MOST_PIECES or not all(isinstance(piece, str) for piece in whole):
        raise MessageError(f"a text must be a list of at most {MOST_PIECES} pieces")
    return "".join(whole)


def decoded(parts: Sequence[memoryview], index: Any) -> Any:
    """Part `index`, decoded; None for None.

    Raises:
        MessageError: there is no such part, or it is no message.
    """
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(parts):
        raise MessageError("a body must refer to its own parts only")
    return message.decode(parts[index])
