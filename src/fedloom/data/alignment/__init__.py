"""Entity alignment: the rows of several parties that are of the same person, found without
revealing other ids.

The first party is the active one. With the backend `openmined` the parties exchange, in order:

1. Active and passive party tell each other how many ids they have. Both split theirs by SHA-256
   into the same number of shards, a power of two, so that the larger side has at most about 100,000
   in each. The steps below run once for each shard; each side therefore sees the sizes of the
   other's shards.
2. Active → passive: its ids hashed to points of an elliptic curve and multiplied by its secret key
   (35 bytes an id).
3. Passive → active: its own ids likewise under its own key, sorted; and the active party's points
   under both keys, in the order in which they came. The active party removes its key and sees which
   of its ids the passive party has too. Neither can remove the other's key; keys are new for every
   shard.
4. The active party repeats this with every passive one. It learns each pairwise intersection and
   takes the ids common to all.
5. Active → every passive: a session key of 32 random bytes, and the HMAC-SHA256 under it of each id
   common to all, sorted (32 bytes an id). A passive party computes the HMACs of its own ids and
   finds its rows. It learns that all others have these ids too, and nothing else.

The order is that of the HMACs, so it reveals nothing about the order of a file. An eavesdropper on
step 5 could test ids, so the channel must be encrypted. The protocol is secure against
honest-but-curious parties: a party that adds invented ids to its list learns whether the other side
has them.

The work is not parallel: openmined.psi holds the GIL, and between organizations every pair has two
    machines anyway.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.data.alignment.ids import digests, near_misses, normalize
from fedloom.data.alignment.psi import PSIClient, PSIServer, announce, announced_rows, library

__all__ = [
    "BACKENDS",
    "MOST",
    "SHARD",
    "Alignment",
    "align",
    "learned_privately",
    "near_misses",
    "normalize",
    "shard_count",
    "shards",
]

BACKENDS = ("openmined", "plain")
SHARD = 100_000
"""Approximate maximum number of ids of the larger side in a shard."""
MOST = 10_000_000
"""Maximum number of ids of a party between organizations."""

Progress = Callable[[int, int, str], None]
"""Called after each step with the steps done, their total, and the name of the step."""

_STEPS = 4  # of a shard: request, setup, response, intersection
_HERE = (
    "The above holds for the messages. All roles ran on this machine, whose user had every list."
)
_PLAIN = (
    "Nothing was private: one process had the lists of {} and {} and compared them.",
    "Every party can learn from its rows which of its ids all parties have.",
    "Between organizations use the backend openmined.",
)


class Count(NamedTuple):
    """Numbers of a party's rows: all, aligned, and unaligned."""

    rows: int
    aligned: int
    unaligned: int


@dataclass(frozen=True)
class Alignment:
    """The aligned rows of every party, and the rest."""

    aligned: tuple[np.ndarray, ...]
    """For each party (N,) int64 positions in its own list; entry i is the same person for all."""
    rest: tuple[np.ndarray, ...]
    """For each party its other positions, int64, ascending."""
    backend: str
    """How they were found."""
    learned: tuple[str, ...]
    """Sentences on what each side has learned."""

    @property
    def counts(self) -> tuple[Count, ...]:
        """One for each party."""
        pairs = zip(self.aligned, self.rest, strict=True)
        return tuple(Count(len(rows) + len(rest), len(rows), len(rest)) for rows, rest in pairs)


def align(
    ids: Sequence[Sequence[str | int]],
    *,
    backend: str = "openmined",
    names: Sequence[str] | None = None,
    local: Collection[int] = (0,),
    key: bytes | None = None,
    shard: int = SHARD,
    progress: Progress = lambda done, steps, what: None,
) -> Alignment:
    """Find the people whom all parties have, and put them into one order.

    All roles run in this process. Between organizations each runs its own: see
    `fedloom.data.alignment.psi`.

    Args:
        ids: for each of M >= 2 parties its ids, text or whole numbers; the first party is the
            active one. They are compared after `normalize`.
        backend: "openmined" (private) or "plain" (a set intersection, not private).
        names: of the parties; by default "party 0" and so on.
        local: indices of the parties whose ids an error may show as examples.
        key: 16 bytes or more, to reproduce an order; by default random.
        shard: approximate maximum number of ids of the larger side in a shard; at most SHARD.
        progress: called after each step.

    Raises:
        ConfigError: fewer than two parties, or an argument is invalid.
        DataError: ids are missing or repeated, for all parties at once; or openmined.psi is not
            installed.
    """
    names = [f"party {m}" for m in range(len(ids))] if names is None else list(names)
    _check(ids, names, backend, key, shard)
    if backend == "openmined":
        library()
    active, *passive = everyone = digests(ids, names, local)
    private = backend == "openmined"
    cuts = [shard_count(len(active), len(other), shard) if private else 1 for other in passive]
    steps, done = (_STEPS if private else 1) * sum(cuts), count(1)
    common = set(range(len(active)))
    for name, other, number in zip(names[1:], passive, cuts, strict=True):
        if private:
            common &= _intersect(
                active, other, number, lambda what: progress(next(done), steps, what), name
            )
        else:
            known = set(other)
            common = {place for place in common if active[place] in known}
            progress(next(done), steps, name)
    messages = announce(key or secrets.token_bytes(32), [active[place] for place in common])
    rows = tuple(announced_rows(messages, own) for own in everyone)
    rest = tuple(
        np.delete(np.arange(len(own), dtype=np.int64), mine)
        for own, mine in zip(everyone, rows, strict=True)
    )
    plainly = [text.format(", ".join(names[:-1]), names[-1]) for text in _PLAIN]
    return Alignment(
        rows, rest, backend, (*learned_privately(names, cuts), _HERE) if private else tuple(plainly)
    )


def _intersect(
    active: Sequence[bytes],
    passive: Sequence[bytes],
    cuts: int,
    report: Callable[[str], None],
    name: str,
) -> set[int]:
    """Positions in the active party's list that the passive one has too; the two exchange only
    messages.
    """
    common: set[int] = set()
    pairs = zip(shards(active, cuts), shards(passive, cuts), strict=True)
    for number, (own, other) in enumerate(pairs, 1):
        where = f"{name}, shard {number} of {cuts}"
        client = PSIClient([active[place] for place in own], most=len(passive))
        server = PSIServer([passive[place] for place in other], most=len(active))
        request = client.request()
        report(f"{where}: request")
        setup = server.setup()
        report(f"{where}: setup")
        response = server.respond(request)
        report(f"{where}: response")
        common |= {own[place] for place in client.intersection(setup, response)}
        report(f"{where}: intersection")
    return common


def shard_count(one: int, other: int, shard: int = SHARD) -> int:
    """The number of shards, a power of two: the larger side has at most about `shard`
    ids in each.
    """
    return 1 << max(0, -(-max(one, other) // shard) - 1).bit_length()


def shards(digests: Sequence[bytes], cuts: int) -> list[list[int]]:
    """Positions by shard, and within it by digest: neither reveals the order of the list."""
    positions: list[list[int]] = [[] for _ in range(cuts)]
    for place in sorted(range(len(digests)), key=digests.__getitem__):
        positions[int.from_bytes(digests[place][-8:], "big") % cuts].append(place)
    return positions


def learned_privately(names: Sequence[str], cuts: Sequence[int]) -> list[str]:
    """What each side learns from a private alignment.

    Args:
        names: of the parties, the active one first.
        cuts: for each passive party, its number of shards.
    """
    active, *passive = names
    learned = [
        f"{active} learned how many ids {name} has, and which of its own ids are among them."
        for name in passive
    ]
    if len(passive) > 1:
        learned.append(
            f"So {active} knows whom it shares with each party, not only whom all parties share."
        )
    whose = "all parties have" if len(passive) > 1 else f"{active} has"
    learned += [
        f"{name} learned how many ids {active} has, and which of its own ids {whose}."
        for name in passive
    ]
    learned += [
        f"{active} and {name} also saw how many ids the other has in each of {count} shards, cut "
        "by a hash of the id."
        for name, count in zip(passive, cuts, strict=True)
        if count > 1
    ]
    return [
        *learned,
        "No party was shown an id that it does not have, as long as all follow the protocol: one "
        "that adds invented ids to its list learns whether the other side has them.",
    ]


def _check(
    ids: Sequence[Sequence[str | int]],
    names: Sequence[str],
    backend: str,
    key: bytes | None,
    shard: int,
) -> None:
    if len(ids) < 2:
        raise ConfigError(f"An alignment needs at least 2 parties, not {len(ids)}.")
    if len(set(names)) != len(ids) or len(names) != len(ids):
        raise ConfigError(
            f"{len(ids)} parties need {len(ids)} different names, not {', '.join(names)}."
        )
    if backend not in BACKENDS:
        raise ConfigError(f"The backend must be openmined or plain, not {backend!r}.")
    if key is not None and len(key) < 16:
        raise ConfigError(f"The session key must have at least 16 bytes, not {len(key)}.")
    if not 1 <= shard <= SHARD:
        raise ConfigError(f"A shard must hold 1 to {SHARD:,} ids, not {shard:,}.")
