"""Every error that fedloom raises on purpose.

A message says what must hold, what was found instead, and how to mend it. Whoever embeds fedloom can catch
`FedloomError` and show the text to a person as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """Base of all errors that fedloom raises on purpose."""


class ConfigError(FedloomError):
    """A configuration can't be run; the text lists every problem found, one a line."""


class DataError(FedloomError):
    """A data set, partition or file can't be used."""


class ModelError(FedloomError):
    """A network can't be built, or does not fit the data that it is given."""


class MessageError(FedloomError):
    """A message can't be encoded, or what arrived is not a valid message."""


class StateError(FedloomError):
    """A party assigned something that it did not declare, or was given a state that is not its own."""


class MethodError(FedloomError):
    """A method page breaks its contract with the core."""


class NotReady(MethodError):
    """A party has no answer yet, such as one that was away when it should have begun; it is left out until it has."""


class EngineError(FedloomError):
    """The machines or processes that should run the parties can't be had, or are lost."""


class Interrupted(EngineError):
    """We were told to stop while we waited for them."""


class CheckpointError(FedloomError):
    """A checkpoint is torn, foreign or missing."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A short hint for an unknown name: `" Did you mean 'x'?"`, or the known names, or nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""
