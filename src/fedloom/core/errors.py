"""The errors that fedloom raises on purpose, and warnings that are logged once.

A message says what is wrong, what is allowed, and what to do. Applications can catch `FedloomError`
and show its text to users unchanged.
"""

import difflib
import logging
from collections.abc import Iterable
from functools import lru_cache

from fedloom.core.vocabulary import meant

MOST_NAMES = 30
"""Names that a sentence may list."""


class FedloomError(Exception):
    """Base class of all errors that fedloom raises on purpose.

    Example:
        >>> import fedloom
        >>> try:
        ...     fedloom.run("fedall")
        ... except FedloomError as error:
        ...     print(error)
        unknown experiment or method 'fedall'. Did you mean 'fedal'?
    """


class ConfigError(FedloomError):
    """A configuration is invalid; the text lists all problems, one per line."""


class DataError(FedloomError):
    """A data set, partition or file cannot be used."""


class ModelError(FedloomError):
    """A network cannot be built, or does not fit its data."""


class MessageError(FedloomError):
    """A message cannot be encoded, or received bytes are not a valid message."""


class StateError(FedloomError):
    """A party assigned an undeclared attribute, or loaded a state that does not fit it."""


class MethodError(FedloomError):
    """A method page breaks its contract with the core."""


class TrainingDiverged(MethodError):
    """Predictions or replies are not finite; the text says which, and what to lower."""


class NotReady(MethodError):
    """A party cannot reply yet, for example because it was absent when training began; the call
    leaves it out.
    """


class PrivacyBudgetSpent(FedloomError):
    """A private release would exceed the budget of the rows' owner; nothing was released."""


class EngineError(FedloomError):
    """The machines or processes that run the parties are unavailable or lost."""


class Interrupted(EngineError):
    """The run was stopped while it waited for the machines."""


class CheckpointError(FedloomError):
    """A checkpoint is damaged, missing, or of another run."""


@lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Log a warning once in this process."""
    logging.getLogger("fedloom").warning("%s", text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: `" Did you mean 'x'?"`, also for the word of another library; or
    else all known names, or "" if there are none or more than `MOST_NAMES`.
    """
    names = sorted(known)
    if found := meant(word, names):
        return f" Did you mean {found!r}?"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if 0 < len(names) <= MOST_NAMES else ""
