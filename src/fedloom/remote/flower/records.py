"""Calls and answers as records of Flower's messages: a few strings, and the body as bytes."""

from typing import Any, Final

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.remote import rpc_errors
from fedloom.remote.rpc_errors import CallRefused

ACTION: Final = "fedloom"
"""The action of messages to a ClientApp."""
CALLER: Final = "superlink"
"""The caller's name at a node, as Flower does not say which account started a run."""
_TOP, _BODY, _BYTES = "fedloom", "body", "bytes"


def pack(top: dict[str, str], body: bytes = b"") -> Any:
    """The content of a message."""
    array = Array("uint8", (len(body),), "fedloom", body)  # as it is: Flower sends it in pieces
    return RecordDict({_TOP: ConfigRecord(dict(top)), _BODY: ArrayRecord({_BYTES: array})})


def unpack(content: Any, *names: str) -> tuple[list[str], bytes]:
    """The strings of these names in a content, and its bytes; raises CallRefused if it
    has others.
    """
    try:
        top, body = content[_TOP], content[_BODY][_BYTES].data
        words = [top[name] for name in names]
    except (KeyError, AttributeError, TypeError):
        raise CallRefused(rpc_errors.MALFORMED, "not a message of fedloom") from None
    if not isinstance(body, bytes) or not all(isinstance(word, str) for word in words):
        raise CallRefused(rpc_errors.MALFORMED, "not a message of fedloom")
    return words, body
