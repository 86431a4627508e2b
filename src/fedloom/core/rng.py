"""Independent random streams."""

import hashlib
import operator
from zlib import crc32

import numpy as np

from fedloom.core.errors import ConfigError

_LIMIT = 2**32


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A generator for one purpose of one run, as in `stream(seed, "batches", round, client)`.

    Each (seed, purpose, keys) has its own stream, so an additional draw, client or round in one
    place changes no draw elsewhere. The stream depends on the arguments only and is the same on
    every machine. `purpose` is a name that no other caller uses; `keys` distinguish its streams.
    Raises ConfigError unless 0 <= seed, key < 2**32.
    """
    numbers = [_checked("seed", seed), *(_checked("key", key) for key in keys)]
    # NumPy pads short entropy with zeros: without the number of keys, [s, p] and [s, p, 0] would
    # give the same stream. Likewise the limit excludes numbers that NumPy would split into two
    # words.
    return np.random.default_rng([numbers[0], crc32(purpose.encode()), len(keys), *numbers[1:]])


def hidden_stream(secret: int, purpose: str, on: bytes) -> np.random.Generator:
    """A generator whose draws nobody can reproduce without the secret.

    The draws depend on no seed or number that others choose: anybody who could request new draws
    for the same content would recover it by averaging.
    Draws for different content `on` that they hide differ, so that differences reveal nothing.
    Raises ConfigError unless 0 <= secret < 2**128.
    """
    if not 0 <= secret < 2**128:
        raise ConfigError("The secret of a random stream must be an integer from 0 to 2**128 - 1.")
    digest = hashlib.blake2b(
        repr(purpose).encode() + on, key=secret.to_bytes(16, "little"), digest_size=32
    ).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _checked(what: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < _LIMIT:
        raise ConfigError(
            f"The {what} of a random stream must be an integer from 0 to 2**32 - 1, not {value!r}."
        )
    return number
