"""Errors of calls between parties: a code and a sentence for the caller, never the text of an
exception.
"""

from typing import Final

REFUSED: Final = "refused"
"""The caller may not make this call."""
MISMATCH: Final = "mismatch"
"""The two sides have different versions, settings, schemas or rows."""
UNKNOWN: Final = "unknown"
"""No such run, or no reply under this key."""
STALE: Final = "stale"
"""A newer start of the same coordinator has taken over, or a later call has been made."""
BUSY: Final = "busy"
"""The queue is full; try again soon."""
TAKEN: Final = "taken"
"""Another run is under way."""
MALFORMED: Final = "malformed"
"""An invalid or unknown message."""
TOO_LARGE: Final = "too large"
"""More bytes than the limit."""
FAILED: Final = "failed"
"""The other end failed; the reason is in its own log."""
UNREACHABLE: Final = "unreachable"
"""No heartbeat for longer than `frames.SILENCE`."""
LATE: Final = "late"
"""No answer within the deadline."""
PENDING: Final = "pending"
"""The run waits for approval at the node's site."""
STOPPED: Final = "stopped"
"""The node's site has stopped the run."""
CODES: Final = (
    PENDING,
    STOPPED,
    REFUSED,
    MISMATCH,
    UNKNOWN,
    STALE,
    BUSY,
    TAKEN,
    MALFORMED,
    TOO_LARGE,
    FAILED,
    UNREACHABLE,
    LATE,
)


class CallRefused(Exception):
    """A refused or failed call.

    Attributes:
        code: one of `CODES`.
        words: a sentence for the caller, without private facts or the text of an exception.
        detail: for the local log only.
    """

    def __init__(self, code: str, words: str, detail: str = "") -> None:
        super().__init__(words)
        self.code = code
        self.words = words
        self.detail = detail

    def bare(self) -> "CallRefused":
        """The same without the frames that it went through, which hold the bytes of the call."""
        return CallRefused(self.code, self.words, self.detail)


def refused(words: str, detail: str = "") -> CallRefused:
    """The error for a call that the caller may not make; `detail` is for the local log only."""
    return CallRefused(REFUSED, words, detail)


def mismatch(words: str) -> CallRefused:
    """The error for two sides that do not fit together."""
    return CallRefused(MISMATCH, words)


def superseded() -> CallRefused:
    """The error for a call of an older start of a run."""
    return CallRefused(STALE, "a newer start of this run has taken over")
