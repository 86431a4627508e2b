"""Graphs between peers: what they promise, what they refuse, and that a seed settles them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import graphs
from fedloom.core.errors import ConfigError
from fedloom.core.graphs import Graph, Others, edges, regular, ring, small_world
from fedloom.data import partitions


def reached(graph: Graph) -> set[int]:
    """Whom a word from peer 0 reaches."""
    found, new = {0}, {0}
    while new:
        new = {j for i in new for j in graph[i]} - found
        found |= new
    return found


def sound(graph: Graph, m: int) -> bool:
    """Symmetric, rising, without loops, of m peers."""
    links = {(i, j) for i, near in enumerate(graph) for j in near}
    return (
        len(graph) == m
        and all((j, i) in links and i != j for i, j in links)
        and all(list(near) == sorted(set(near)) for near in graph)
    )


def test_everybody_but_one_is_a_sequence_of_its_own() -> None:
    for but in range(5):
        others = Others(5, but)
        plain = tuple(i for i in range(5) if i != but)
        assert tuple(others) == plain == others[:]
        assert (len(others), others[-1], others[1:3]) == (4, plain[-1], plain[1:3])
        assert [i in others for i in range(-1, 6)] == [i in plain for i in range(-1, 6)]
        with pytest.raises(IndexError):
            others[4]
    assert len(Others(1, 0)) == 0
    assert sys.getsizeof(Others(10**6, 3)) < 200


def test_a_ring() -> None:
    assert ring(5) == ((1, 4), (0, 2), (1, 3), (2, 4), (0, 3))
    assert (ring(1), ring(2), ring(3)) == (((),), ((1,), (0,)), ((1, 2), (0, 2), (0, 1)))


@pytest.mark.parametrize(
    ("m", "degree"), [(2, 1), (5, 4), (10, 3), (10, 8), (31, 4), (100, 50), (100, 49)]
)
def test_a_regular_graph_is_connected_and_regular(m: int, degree: int) -> None:
    graph = regular(m, degree, seed=3)
    assert sound(graph, m) and len(reached(graph)) == m
    assert {len(near) for near in graph} == {degree}


@pytest.mark.parametrize(
    ("m", "degree"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (7, 4), (10, 4), (100, 49)]
)
def test_half_of_the_others_is_made_feasible(m: int, degree: int) -> None:
    graph = regular(m)
    assert sound(graph, m) and {len(near) for near in graph} == {degree}


def test_a_small_world_lies_between_the_ring_and_chance() -> None:
    lattice = small_world(12, 4, 0.0)
    assert lattice == tuple(
        tuple(sorted({(i + d) % 12 for d in (-2, -1, 1, 2)})) for i in range(12)
    )
    graph = small_world(60, 4, 0.3, seed=1)
    assert sound(graph, 60) and len(reached(graph)) == 60
    assert sum(map(len, graph)) == 60 * 4  # a link that is led elsewhere is still one link
    moved = sum(
        min((i - j) % 60, (j - i) % 60) > 2 for i, near in enumerate(graph) for j in near
    ) / (60 * 4)
    assert 0.15 < moved < 0.45
    assert [{len(n) for n in small_world(m, rewire=0.0)} for m in (3, 4, 5, 9)] == [
        {2},
        {2},
        {4},
        {4},
    ]


@pytest.mark.parametrize(
    "draw", [lambda seed: regular(20, 4, seed=seed), lambda seed: small_world(20, 4, seed=seed)]
)
def test_a_seed_settles_the_graph(draw: Callable[[int], Graph]) -> None:
    drawn = [draw(seed) for seed in range(6)]
    assert drawn == [draw(seed) for seed in range(6)]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: regular(9, 3),
            "no graph gives 9 peers 3 neighbours each, as the product is odd: take degree 4",
        ),
        (lambda: regular(5, 5), "a peer of 5 cannot have 5 neighbours: take degree 1 to 4"),
        (lambda: regular(5, 0), "a peer of 5 cannot have 0 neighbours"),
        (
            lambda: regular(6, 1),
            "no regular graph of degree 1 with 6 peers was connected in 100 draws: raise",
        ),
        (
            lambda: small_world(9, 3),
            "the degree of a small world must be even, half to each side, not 3",
        ),
        (lambda: small_world(2), "a small world needs at least 3 peers, not 2"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(make: Callable[[], Graph], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_networkx_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    for make in (regular, small_world):
        with pytest.raises(ConfigError, match=r'not installed; run: pip install -e ".\[graphs\]"'):
            make(10)
    assert len(ring(10)) == 10


def test_links_of_a_text() -> None:
    text = "# mine\n\n0,1\n1 , 0   # the same again\n3\t1\n 2 3 \r\n"
    assert edges(text, 6) == ((1,), (0, 3), (3,), (1, 2), (), ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "0,1\nsource,target",
            "line 2 must have the ids of two peers, such as 0,1, not 'source,target'",
        ),
        ("\n0,1,0.5", "line 2 must have"),
        ("0", "line 1 must have"),
        ("-1,2", "line 1 must have"),
        ("01²,2", "line 1 must have"),
        ("0,1\n\n1 5", "line 3 links '1 5', but the ids of the 5 peers are 0 to 4"),
        ("0," + "9" * 6000, "line 1 links '0,999"),
        ("0,1\n2,2", "line 2 links peer 2 to itself: remove it"),
        ("# nothing\n", "the file has no links"),
    ],
)
def test_a_text_of_links_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        edges(text, 5)
    assert problem in str(error.value)


@given(
    st.integers(2, 8).flatmap(
        lambda m: st.tuples(st.just(m), st.sets(st.tuples(*[st.integers(0, m - 1)] * 2)))
    )
)
def test_every_graph_survives_its_text(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    m, pairs = drawn
    links = {(a, b) for a, b in pairs if a != b}
    if not links:
        return
    graph = edges("\n".join(f"{a},{b}" for a, b in links), m)
    assert sound(graph, m)
    assert {frozenset((i, j)) for i, near in enumerate(graph) for j in near} == {
        frozenset(pair) for pair in links
    }


def test_what_is_checked_is_what_is_drawn() -> None:
    """The check before the work settles the same degree as the graph."""
    for m in range(3, 12):
        assert graphs.regular_degree(m, None) == len(regular(m)[0])
        assert graphs.small_world_degree(m, None) == len(small_world(m, rewire=0.0)[0])


def test_groups_are_cliques_one_after_the_other() -> None:
    assert graphs.groups(5, 2) == ((1, 2), (0, 2), (0, 1), (4,), (3,))
    assert graphs.groups(3, 3) == ((), (), ())
    with pytest.raises(ConfigError, match="take at most"):
        graphs.groups(2, 3)


def test_groups_are_those_of_the_partition_of_that_name() -> None:
    labels = np.repeat(np.arange(10), 20)
    parts = partitions.groups(labels, 13, np.random.default_rng(0), number=4)
    held = [set(labels[part].tolist()) for part in parts]
    for i, near in enumerate(graphs.groups(13, 4)):
        assert {j for j in range(13) if j != i and held[j] == held[i]} == set(near)
