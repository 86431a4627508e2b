"""Topologies: undirected graphs of m peers, numbered from 0. Random ones depend only
on the seed.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fedloom.core.errors import ConfigError
from fedloom.core.rng import stream

Graph: TypeAlias = tuple[tuple[int, ...], ...]
"""The sorted neighbours of each peer. It is undirected: if j is a neighbour of i, i is a neighbour
of j.
"""

DRAWS = 100
"""Maximum number of draws of a random graph until one is connected."""


class Others(Sequence[int]):
    """All peers but one, sorted: the neighbours in a complete graph of m peers, without storing
    them.
    """

    def __init__(self, m: int, but: int) -> None:
        self._numbers, self._but = range(m - 1), but

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return tuple(n + (n >= self._but) for n in self._numbers[k])
        n = self._numbers[k]
        return n + (n >= self._but)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, peer: object) -> bool:
        return peer != self._but and peer in range(len(self) + 1)


def ring(m: int) -> Graph:
    """Each peer is linked to the previous and the next one."""
    return tuple(tuple(sorted({(i - 1) % m, (i + 1) % m} - {i})) for i in range(m))


def groups(m: int, number: int) -> Graph:
    """Complete groups without links between them: consecutive peers, group sizes as equal as
    possible. Raises ConfigError if there are fewer peers than groups.
    """
    if number > m:
        raise ConfigError(f"{m} peers cannot form {number} groups: take at most {m} groups")
    ends = [m // number * g + min(g, m % number) for g in range(number + 1)]
    group = [g for g in range(number) for _ in range(ends[g], ends[g + 1])]
    return tuple(
        tuple(j for j in range(ends[g], ends[g + 1]) if j != i) for i, g in enumerate(group)
    )


def regular(m: int, degree: int | None = None, *, seed: int = 0) -> Graph:
    """A connected random graph in which every peer has `degree` neighbours; None for half of the
    others. Raises ConfigError if there is no such graph, or none of those drawn is connected.
    """
    degree, networkx = regular_degree(m, degree), _networkx()
    few = min(degree, m - 1 - degree)  # the complement of a regular graph is regular

    def draw(seed: int) -> Any:
        graph = networkx.random_regular_graph(few, m, seed=seed)
        return graph if few == degree else networkx.complement(graph)

    return _connected(m, draw, seed, f"no regular graph of degree {degree}")


def small_world(m: int, degree: int | None = None, rewire: float = 0.1, *, seed: int = 0) -> Graph:
    """A ring that links each peer to its `degree` nearest; each link is rewired with probability
    `rewire`.

    Watts and Strogatz, "Collective dynamics of small-world networks", Nature 1998. Connected. None
    is degree 4, or less if there are too few peers. Raises ConfigError if there is no such graph,
    or none of those drawn is connected.
    """
    degree, networkx = small_world_degree(m, degree), _networkx()

    def draw(seed: int) -> Any:
        return networkx.watts_strogatz_graph(m, degree, rewire, seed=seed)

    return _connected(m, draw, seed, f"no small world of degree {degree}")


def edges(text: str, m: int) -> Graph:
    """The graph of a text with one link per line: two ids, separated by a comma or blanks. `#`
    starts a comment.

    A peer without links learns alone; the graph need not be connected. Raises ConfigError if a line
    is invalid; the message has its number.
    """
    near: list[set[int]] = [set() for _ in range(m)]
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        link = re.fullmatch(r"([0-9]+)(?:\s*,\s*|\s+)([0-9]+)", content, re.ASCII)
        if link is None:
            raise ConfigError(
                f"line {number} must have the ids of two peers, such as 0,1, not {content[:40]!r}"
            )
        a, b = (int(word) if len(word) < 10 else m for word in link.groups())
        if max(a, b) >= m:
            raise ConfigError(
                f"line {number} links {content[:40]!r}, but the ids of the {m} peers are 0 to "
                f"{m - 1}"
            )
        if a == b:
            raise ConfigError(f"line {number} links peer {a} to itself: remove it")
        near[a].add(b)
        near[b].add(a)
    if not any(near):
        raise ConfigError("the file has no links; write one per line, such as 0,1")
    return tuple(tuple(sorted(peers)) for peers in near)


def regular_degree(m: int, degree: int | None) -> int:
    """The degree of `regular`. Raises ConfigError if there is no such graph, or networkx is not
    installed.
    """
    _networkx()
    if degree is None:
        half = max((m - 1) // 2, min(2, m - 1))
        return half + half * m % 2
    _in_range(m, degree)
    if degree * m % 2:
        raise ConfigError(
            f"no graph gives {m} peers {degree} neighbours each, as the product is odd: take "
            f"degree {degree + 1}, or one more client"
        )
    return degree


def small_world_degree(m: int, degree: int | None) -> int:
    """The degree of `small_world`. Raises ConfigError if there is no such graph, or networkx is not
    installed.
    """
    _networkx()
    if degree is None:
        degree = min(4, (m - 1) // 2 * 2)
        if m < 3:
            raise ConfigError(f"a small world needs at least 3 peers, not {m}: take the kind full")
        return degree
    _in_range(m, degree)
    if degree % 2:
        raise ConfigError(
            f"the degree of a small world must be even, half to each side, not {degree}"
        )
    return degree


def _in_range(m: int, degree: int) -> None:
    if not 0 < degree < m:
        raise ConfigError(
            f"a peer of {m} cannot have {degree} neighbours: take degree 1 to {m - 1}, or more "
            "clients"
        )


def _connected(m: int, draw: Callable[[int], Any], seed: int, what: str) -> Graph:
    """The first connected graph that `draw` returns."""
    rng, networkx = stream(seed, "topology"), _networkx()
    for _ in range(DRAWS):
        graph = draw(int(rng.integers(2**31)))
        if networkx.is_connected(graph):
            return tuple(tuple(sorted(graph[i])) for i in range(m))
    raise ConfigError(
        f"{what} with {m} peers was connected in {DRAWS} draws: raise topology.degree"
    )


def _networkx() -> Any:
    try:
        import networkx
    except ImportError:
        raise ConfigError(
            "random topologies need networkx, which is not installed; run: pip install -e "
            '".[graphs]"'
        ) from None
    return networkx
