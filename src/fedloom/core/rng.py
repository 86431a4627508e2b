"""Random streams that don't disturb each other."""

from __future__ import annotations

import hashlib
import operator
from zlib import crc32

import numpy as np

from fedloom.core.errors import ConfigError

_LIMIT = 2**32


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator for one purpose of one run, as in `stream(seed, "batches", round, client)`.

    Each (seed, purpose, keys) has a stream of its own, so that one more draw, client or round in
    one place moves nothing anywhere else. The stream depends on nothing but the arguments: it is
    the same on every machine.

    Args:
        seed: the run's seed, 0 <= seed < 2**32.
        purpose: what the draws are for; a word that no other caller uses.
        keys: numbers that tell the streams of one purpose apart, each 0 <= key < 2**32.

    Raises:
        ConfigError: a number is not an integer in that range.
    """
    numbers = [_checked("seed", seed), *(_checked("key", key) for key in keys)]
    # NumPy pads a short list of entropy with zeros: [s, p] and [s, p, 0] would give one and the
    # same stream. The number of keys keeps them apart. The limit does the same for numbers that
    # NumPy would cut into two words.
    return np.random.default_rng([numbers[0], crc32(purpose.encode()), len(keys), *numbers[1:]])


def hidden_stream(secret: int, purpose: str, on: bytes) -> np.random.Generator:
    """The same for draws that nobody without the secret can repeat.

    They depend on no seed or number that another may choose: whoever could ask for new draws on the same content would
    find that content as the mean of the answers.

    Args:
        secret: 0 <= secret < 2**128.
        purpose: as in `stream`.
        on: what the draws are to hide. Other content has other draws, so that a difference of two does not show it.

    Raises:
        ConfigError: the secret is not an integer in that range.
    """
    if not 0 <= secret < 2**128:
        raise ConfigError("The secret of a random stream must be an integer from 0 to 2**128 - 1.")
    words = repr(purpose).encode() + on
    found = hashlib.blake2b(words, key=secret.to_bytes(16, "little"), digest_size=32).digest()
    return np.random.default_rng(int.from_bytes(found, "little"))


def _checked(what: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < _LIMIT:
        raise ConfigError(f"The {what} of a random stream must be an integer from 0 to 2**32 - 1, not {value!r}.")
    return number
