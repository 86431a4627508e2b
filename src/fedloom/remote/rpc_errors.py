"""What parties may say to each other when a call can't be answered: a fixed set of words, never an exception's text."""

from __future__ import annotations

from typing import Final

REFUSED: Final = "refused"
"""The caller may not ask for this here."""
MISMATCH: Final = "mismatch"
"""The two sides have different versions, settings, schemas or rows."""
UNKNOWN: Final = "unknown"
"""There is no such run, or nothing left under this key."""
STALE: Final = "stale"
"""A newer start of the same coordinator has taken over, or a later call has been made."""
BUSY: Final = "busy"
"""Too much waits already: try again soon."""
TAKEN: Final = "taken"
"""Another run is under way."""
MALFORMED: Final = "malformed"
"""What arrived is no valid message, or none that is understood."""
TOO_LARGE: Final = "too large"
"""More bytes than are taken here."""
FAILED: Final = "failed"
"""The other end could not answer; its own log says why."""
UNREACHABLE: Final = "unreachable"
"""No sign of life, for longer than `wire.SILENCE`."""
LATE: Final = "late"
"""No answer within the deadline."""
CODES: Final = (REFUSED, MISMATCH, UNKNOWN, STALE, BUSY, TAKEN, MALFORMED, TOO_LARGE, FAILED, UNREACHABLE, LATE)


class CallRefused(Exception):
    """A call that is not answered, and why.

    Attributes:
        code: one of `CODES`.
        words: a sentence for the caller: nothing private, no text of an exception.
        detail: what only the own log may say.
    """

    def __init__(self, code: str, words: str, detail: str = "") -> None:
        super().__init__(words)
        self.code = code
        self.words = words
        self.detail = detail
