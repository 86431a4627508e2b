"""Whose rows are the same person's: the intersection, the common order, what crosses, and what is
refused.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import private_set_intersection.python as psi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.errors import ConfigError, DataError, MessageError
from fedloom.data.alignment import BACKENDS, Alignment, align, normalize
from fedloom.data.alignment import psi as psi_steps

KEY = bytes(range(32))
LISTS: list[list[str | int]] = [
    ["Ann", "bob", " Cy ", "Dee", "7"],
    ["cy", "ANN", "zed", 7],
    [7, "ann", "bob", "cy", "zed"],
]

some_ids = st.one_of(st.integers(-99, 99), st.text(max_size=6)).filter(normalize)


@st.composite
def parties(draw: st.DrawFn) -> list[list[Any]]:
    """Ids of two to four parties out of one pool, each in an order and with spaces of its own."""
    pool = draw(st.lists(some_ids, unique_by=normalize, max_size=25))
    few = st.lists(st.sampled_from(pool), unique_by=normalize) if pool else st.just([])
    lists = draw(st.lists(few, min_size=2, max_size=4))
    return [
        [draw(st.sampled_from([i, f" {i}\t"])) for i in draw(st.permutations(ids))] for ids in lists
    ]


def people(lists: Sequence[Sequence[Any]], found: Alignment) -> list[list[str]]:
    """Who stands at each place, as each party sees it."""
    return [
        [normalize(ids[row]) for row in rows]
        for ids, rows in zip(lists, found.aligned, strict=True)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(lists=parties())
def test_it_is_the_intersection_with_the_same_person_at_the_same_place(
    backend: str, lists: list[list[Any]]
) -> None:
    found = align(lists, backend=backend)
    common = set.intersection(*({normalize(i) for i in ids} for ids in lists))
    first, *others = people(lists, found)
    assert set(first) == common and len(first) == len(common)
    assert all(other == first for other in others)
    for ids, rows, rest, count in zip(lists, found.aligned, found.rest, found.counts, strict=True):
        assert rows.dtype == rest.dtype == np.int64
        assert sorted([*rows, *rest]) == list(range(len(ids))) and list(rest) == sorted(rest)
        assert count == (len(ids), len(common), len(ids) - len(common))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_is_that_of_the_hmacs(backend: str) -> None:
    found = align(LISTS, backend=backend, key=KEY)
    marks = {
        who: hmac.digest(KEY, hashlib.sha256(who.encode()).digest(), "sha256")
        for who in ("ann", "cy", "7")
    }
    order = sorted(marks, key=marks.__getitem__)
    assert people(LISTS, found) == [order] * 3
    assert [list(rest) for rest in found.rest] == [[1, 3], [2], [2, 4]]
    assert found.counts == ((5, 3, 2), (4, 3, 1), (5, 3, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_depends_on_the_key_and_on_nobodys_file(backend: str) -> None:
    lists = [[f"p{i}" for i in range(40)], [f"p{i}" for i in range(10, 60)]]
    once = people(lists, align(lists, backend=backend, key=KEY))[0]
    mixed = [random.Random(0).sample(ids, len(ids)) for ids in lists]
    assert people(mixed, align(mixed, backend=backend, key=KEY)) == [once, once]
    drawn = [people(lists, align(lists, backend=backend))[0] for _ in range(2)]
    assert sorted(drawn[0]) == sorted(drawn[1]) == sorted(once)
    assert drawn[0] != drawn[1] != once


def test_shards_change_nothing_but_the_messages() -> None:
    lists = [[f"p{i}" for i in range(n, 70 + n)] for n in (0, 20, 40)]
    lists[2] = lists[2][:1] + lists[2][-1:]  # so that most of its shards are empty
    told: list[tuple[int, int, str]] = []
    whole = align(lists, key=KEY)
    cut = align(lists, key=KEY, shard=10, progress=lambda *step: told.append(step))
    assert len(whole.aligned[0]) == 1
    for one, other in zip([*whole.aligned, *whole.rest], [*cut.aligned, *cut.rest], strict=True):
        np.testing.assert_array_equal(one, other)
    steps = 2 * 8 * 4  # two passive parties, 8 shards for 70 ids, 4 steps
    assert [(done, of) for done, of, _ in told] == [(n, steps) for n in range(1, steps + 1)]
    assert (
        told[0][2] == "party 1, shard 1 of 8: request"
        and told[-1][2] == "party 2, shard 8 of 8: intersection"
    )
    assert "in each of 8 shards" in " ".join(cut.learned) and "shards" not in " ".join(
        whole.learned
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("  Ann\u00a0 Lee ", "ann lee"),  # spaces
        ("ｐ１２", "P12"),  # full width
        ("e\u0301va", "ÉVA"),  # composed
        ("STRASSE", "straße"),
        ("\u03aa\u0301", "\u0390"),  # one folds to what is composed only afterwards
        (12, "12"),
        (np.int64(-3), "-3"),
        (10**30, "1" + "0" * 30),
        (np.str_("A"), "a"),
    ],
)
def test_the_same_id_in_another_spelling(one: Any, other: Any) -> None:
    assert normalize(one) == normalize(other) != ""
    found = align([["x", one], [other, "y"]], backend="plain")
    assert [list(rows) for rows in found.aligned] == [[1], [0]]


@pytest.mark.parametrize(
    ("one", "other"), [("007", 7), ("a b", "ab"), ("1.0", 1), ("a-b", "a_b"), ("nan", "null")]
)
def test_what_stays_different(one: Any, other: Any) -> None:
    assert align([[one], [other]], backend="plain").counts == ((1, 0, 1), (1, 0, 1))
    assert normalize(one) and normalize(other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_and_repeated_ids_are_counted_for_all_parties_and_shown_of_the_user_only(
    backend: str,
) -> None:
    lists: list[list[Any]] = [
        ["Ann", "ann ", "bob", "BOB", "c", "C", "d", " D", "e"],
        ["secret", "SECRET", None, float("nan"), " ", "", "nan", "None", "null"],
        ["fine"],
    ]
    with pytest.raises(DataError) as refused:
        align(lists, backend=backend, names=["clinic", "lab", "shop"])
    clinic, lab = str(refused.value).splitlines()
    assert clinic.startswith(
        "clinic: 8 of 9 rows share an id with others (such ids, 4: 'ann', 'bob', 'c', …); "
    )
    assert lab.startswith(
        "lab: 4 of 9 rows lack an id and 2 of 9 rows share an id with others (such ids, 1); "
    )
    with pytest.raises(DataError) as refused:
        align(lists, backend=backend, local=(1,))
    one, two = str(refused.value).splitlines()
    assert "ann" not in one
    assert (
        "rows lack an id (3, 4, 5, …, counted from 1)" in two and "(such ids, 1: 'secret')" in two
    )


@pytest.mark.parametrize("value", [1.5, True, b"a", ["a"], np.bool_(False)])
def test_ids_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(
        DataError, match=rf"party 1: ids must be text or whole numbers, not {type(value).__name__}"
    ):
        align([["a"], [value]])


def test_ids_that_no_file_holds_do_no_harm() -> None:
    odd = ["\ud800", "\x00", "a\x00b", "x" * 100_000]
    assert align([odd, odd[::-1]]).counts == ((4, 4, 0), (4, 4, 0))


@pytest.mark.parametrize(
    ("lists", "options", "text"),
    [
        ([["a"]], {}, "at least 2 parties, not 1"),
        ([["a"], ["a"]], {"backend": "openmind"}, "openmined or plain, not 'openmind'"),
        ([["a"], ["a"]], {"names": ["x", "x"]}, "2 different names, not x"),
        ([["a"], ["a"]], {"names": ["x"]}, "2 different names, not x"),
        ([["a"], ["a"]], {"key": b"short"}, "at least 16 bytes, not 5"),
        ([["a"], ["a"]], {"shard": 0}, "1 to 100,000 ids, not 0"),
        ([["a"], ["a"]], {"shard": 100_001}, "1 to 100,000 ids, not 100,001"),
    ],
)
def test_arguments_that_cannot_be(
    lists: list[list[Any]], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        align(lists, **options)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "private_set_intersection.python", None)
    with pytest.raises(DataError, match=r'pip install -e ".\[psi\]"'):
        align(LISTS)
    assert align(LISTS, backend="plain").counts[0].aligned == 3


def test_the_statement_says_who_learned_what() -> None:
    two = align(LISTS[:2], names=["clinic", "lab"]).learned
    assert "clinic learned how many ids lab has, and which of its own ids are among them." in two
    assert "lab learned how many ids clinic has, and which of its own ids clinic has." in two
    three = align(LISTS, names=["clinic", "lab", "shop"]).learned
    assert (
        "shop learned how many ids clinic has, and which of its own ids all parties have." in three
    )
    assert any("whom it shares with each party" in sentence for sentence in set(three) - set(two))
    plain = align(LISTS, backend="plain", names=["clinic", "lab", "shop"]).learned
    assert plain[0].startswith(
        "Nothing was private: one process had the lists of clinic, lab and shop"
    )


def digests(count: int, start: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d" % i).digest() for i in range(start, start + count)]


def test_the_roles_meet_in_messages_that_hold_no_id() -> None:
    own, other = digests(6), digests(6, start=4)
    client, server = psi_steps.PSIClient(own, most=6), psi_steps.PSIServer(other, most=6)
    request, setup = client.request(), server.setup()
    response = server.respond(request)
    assert client.intersection(setup, response) == [4, 5]
    for message in (request, setup, response):
        assert len(message) <= 6 * 35 + 9
        assert not any(digest in message for digest in own + other)
    assert psi_steps.PSIClient(own, most=6).request() != request  # a new key
    elements = list(psi.ServerSetup.FromString(setup).raw.encrypted_elements)
    assert elements == sorted(elements)  # not the order of the list


@given(junk=st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_messages_are_refused(junk: bytes) -> None:
    server = psi_steps.PSIServer(digests(2), most=2)
    client = psi_steps.PSIClient(digests(2), most=2)
    good = server.setup()
    with pytest.raises(MessageError):
        client.intersection(junk, server.respond(client.request()))
    with pytest.raises(MessageError):
        client.intersection(good, junk)
    try:
        answer = server.respond(junk)
    except MessageError:
        return
    assert not psi.Response.FromString(answer).encrypted_elements  # a message that asks for nobody


def test_messages_that_are_too_much_are_refused() -> None:
    client = psi_steps.PSIClient(digests(3), most=2)
    server = psi_steps.PSIServer(digests(3), most=2)
    request, setup = client.request(), server.setup()
    with pytest.raises(MessageError, match="more ids than the client stated"):
        server.respond(request)
    response = psi_steps.PSIServer(digests(3), most=3).respond(request)
    with pytest.raises(MessageError, match="more ids than the server stated"):
        client.intersection(setup, response)
    with pytest.raises(MessageError, match="4,000,000 bytes, but has 4,000,001"):
        server.respond(bytes(psi_steps.LARGEST + 1))


def test_dishonest_answers_are_refused() -> None:
    client, server = psi_steps.PSIClient(digests(3), most=3), psi.server.CreateWithNewKey(True)
    request = psi.Request.FromString(client.request())
    lossy = server.CreateSetupMessage(0.1, 3, digests(3), psi.DataStructure.GCS).SerializeToString()
    exact = server.CreateSetupMessage(0.1, 3, digests(3), psi.DataStructure.RAW).SerializeToString()
    honest = server.ProcessRequest(request)
    assert client.intersection(exact, honest.SerializeToString()) == [0, 1, 2]
    with pytest.raises(MessageError, match="must be exact"):
        client.intersection(lossy, honest.SerializeToString())
    first, second, _ = honest.encrypted_elements
    for answer in ([first, second], [first, second, second]):
        with pytest.raises(MessageError, match="must answer every id, once"):
            client.intersection(exact, psi.Response(encrypted_elements=answer).SerializeToString())
    points = psi.ServerSetup.FromString(exact).raw.encrypted_elements
    turned = psi.ServerSetup(raw=psi.ServerSetup.RawInfo(encrypted_elements=points[::-1]))
    with pytest.raises(MessageError, match="ascending"):
        client.intersection(turned.SerializeToString(), honest.SerializeToString())


def test_the_announced_order_is_read_with_suspicion(monkeypatch: pytest.MonkeyPatch) -> None:
    own = digests(5)
    key, marks = psi_steps.announce(KEY, own[1:4])
    assert key == KEY and len(marks) == 3 * 32
    rows = psi_steps.announced_rows([key, marks], own)
    assert sorted(rows) == [1, 2, 3]
    with pytest.raises(MessageError, match="truncated"):
        psi_steps.announced_rows([key, marks[:-1]], own)
    with pytest.raises(MessageError, match="not ascending"):
        psi_steps.announced_rows([key, marks[32:] + marks[:32]], own)
    with pytest.raises(MessageError, match="not ascending"):
        psi_steps.announced_rows([key, marks, marks[-32:]], own)
    with pytest.raises(MessageError, match="does not have"):
        psi_steps.announced_rows([key, marks], own[:3])
    monkeypatch.setattr(psi_steps, "LARGEST", 70)  # two marks a message
    pieces = psi_steps.announce(KEY, own[1:4])
    assert [len(piece) for piece in pieces] == [32, 64, 32]
    np.testing.assert_array_equal(psi_steps.announced_rows(pieces, own), rows)
