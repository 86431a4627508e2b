"""Bodies of calls: what was packed is unpacked, and nothing else is."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import message
from fedloom.core.errors import MessageError
from fedloom.remote import payload


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(-5, 5)),
    st.lists(st.binary(max_size=20), max_size=4),
)
def test_what_was_packed_is_unpacked(head: dict[str, int], rest: list[bytes]) -> None:
    found, more = payload.unpack(payload.pack(head, *rest))
    assert found == head and [bytes(part) for part in more] == rest


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_any_bytes_are_a_body_or_refused(junk: bytes, start: int, end: int) -> None:
    good = payload.pack({"a": 1, "x": torch.zeros(2)}, message.encode([1]), b"")
    for body in (junk, good[:start] + junk + good[end:]):
        with contextlib.suppress(MessageError):
            head, rest = payload.unpack(body)
            assert payload.pack(head, *map(bytes, rest)) == body  # there is one encoding


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0" * 8,
        (2**63).to_bytes(8, "little"),
        (2**64 - 1).to_bytes(8, "little") + b"x",
        payload.pack({"a": 1})[:-1],
        payload.pack({"a": 1}) + b"\1",
        payload.pack({"a": "1"}),
        payload.pack({}),
        payload.pack([1]),
        payload.pack({"a": True}),
    ],
)
def test_what_is_torn_or_another_head_is_refused(body: bytes) -> None:
    with pytest.raises(MessageError):
        payload.unpack(body, {"a": int})


def test_very_many_parts_are_refused_before_they_fill_the_memory() -> None:
    body = payload.pack({}) + b"\0" * 8 * (payload.MOST * 10)
    tracemalloc.start()
    try:
        with pytest.raises(MessageError, match="sequence of messages"):
            payload.unpack(body)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_parts_are_found_by_their_number_only() -> None:
    _, rest = payload.unpack(payload.pack({}, message.encode([1, 2]), b"no message"))
    assert payload.decoded(rest, 0) == [1, 2] and payload.decoded(rest, None) is None
    for index in (-1, 1, 2, True, 0.0, "0", [0]):
        with pytest.raises(MessageError):
            payload.decoded(rest, index)
