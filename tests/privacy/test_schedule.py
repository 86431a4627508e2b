"""A node answers what its method's round asks: so often, in turn, and from whom it must come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.context import ClientContext
from fedloom.methods import registry
from fedloom.remote.node.schedule import CallRecord
from fedloom.remote.rpc_errors import REFUSED, CallRefused
from tests.node.hosts import RunRequest, config, doing, opening, which

Hosts = Callable[..., RunRequest]
PAGES = {
    name: method
    for name, method in registry().items()
    if method.client.CALLS or method.client.TO_PEERS
}
ANSWERED = {
    call for method in PAGES.values() for call in (*method.client.CALLS, *method.client.TO_PEERS)
}


@pytest.mark.parametrize("name", PAGES)
def test_every_call_has_its_number_of_turns_in_a_round(name: str, tmp_path: Path) -> None:
    """Of every page: further calls with other arguments, and calls of rounds that are over, are
    refused.
    """
    page = PAGES[name]
    context = ClientContext(0, parties=4, aligned=70)
    times = page.configure("recommended").calls_in_round(context)
    record, number = CallRecord(tmp_path), 0
    for method in (*page.client.CALLS, *page.client.TO_PEERS):
        most, peers = times.get(method, 1), method in page.client.TO_PEERS
        for turn in range(most):
            record.take(number := number + 1, 3, method, -1, f"{turn}", most, again=peers)
        with pytest.raises(CallRefused, match="has answered it that often"):
            record.take(number + 1, 3, method, -1, "another", most, again=peers)
        with pytest.raises(CallRefused, match="round 2 is over"):
            record.take(number + 1, 2, method, -1, "0", most, again=peers)
    assert {*times} <= ANSWERED  # pages that share a config answer some of its calls each


def test_a_round_that_is_repeated_asks_what_it_asked(tmp_path: Path) -> None:
    record = CallRecord(tmp_path)
    record.take(1, 0, "update", -1, "a", 1, again=False)
    record.take(1, 0, "update", -1, "a", 1, again=False)  # the same call, as its reply was lost
    record.take(2, 1, "update", -1, "b", 1, again=False)
    record.back(1)
    for same in (record, CallRecord(tmp_path)):  # also after a restart of the node
        with pytest.raises(CallRefused, match="with other arguments"):
            same.take(9, 1, "update", -1, "c", 1, again=False)
    record.take(9, 1, "update", -1, "b", 1, again=False)
    with pytest.raises(CallRefused, match="that often"):
        record.take(10, 1, "update", -1, "b", 1, again=False)


def test_twelve_questions_of_one_peer_in_a_round_are_one(tmp_path: Path) -> None:
    record, refused = CallRecord(tmp_path), 0
    for number in range(12):
        try:
            record.take(number, 0, "test", 4, f"point {number}", 1, again=True)
        except CallRefused:
            refused += 1
    assert refused == 11
    record.take(20, 0, "test", 5, "point of another peer", 1, again=True)


def test_a_node_answers_an_update_once_a_round_and_no_other_after_going_back(hosts: Hosts) -> None:
    ask = hosts()
    ask("open", opening())
    ask("do", doing(0, ask.host))
    party: Any = next(iter(ask.host._node_runs.values())).party
    other = {"t": 0, "weights": {k: torch.zeros_like(v) for k, v in party.params.items()}}
    assert "that often" in ask.refused("do", doing(1, ask.host, shared=other)).words
    ask("do", doing(2, ask.host, round=1))
    assert "round 0 is over" in ask.refused("do", doing(3, ask.host)).words
    ask("restore", which(round=0))
    assert "other arguments" in ask.refused("do", doing(4, ask.host, shared=other)).words


def test_one_call_is_no_way_to_ask_the_same_many_times(hosts: Hosts) -> None:
    ask = hosts(methods=["fedavg"])
    ask("open", opening(config(method="fedavg")))
    asked = ask.refused("do", doing(0, ask.host, each=({}, {})))
    assert asked.words == "a call of update is one task: only answers to peers are several"


@pytest.mark.parametrize("place", ["each", "shared"])
def test_the_coordinator_cannot_speak_for_a_peer(place: str, hosts: Hosts) -> None:
    ask = hosts(methods=["gossip"])
    ask("open", opening(config(method="gossip", params={"personal_head": False})))
    party: Any = next(iter(ask.host._node_runs.values())).party
    inbox = {"inbox": {"1": {"weights": {k: torch.zeros_like(v) for k, v in party.params.items()}}}}
    given: dict[str, Any] = {"each": (inbox,)} if place == "each" else {}
    shared = {"t": 0} if place == "each" else {"t": 0, **inbox}
    refusal = ask.refused("do", doing(0, ask.host, method="mix", shared=shared, **given))
    assert refusal.code == REFUSED and "must come from them" in refusal.words


@pytest.mark.parametrize(
    ("refs", "each"),
    [
        # a question of one peer, as if of another
        ({"asked": [2, "0" * 32, "x"]}, {"by": torch.tensor(1)}),
        ({"asked": [2, "0" * 32, "x"]}, {}),
        ({}, {"by": torch.tensor(1)}),
        ({"inbox": {"1": [2, "0" * 32, "x"]}}, {}),
    ],
)
def test_a_message_is_from_whom_it_is_said_to_be(refs: Any, each: Any, hosts: Hosts) -> None:
    ask = hosts(methods=["gossip"])
    ask("open", opening(config(method="gossip", params={"personal_head": False})))
    task = {"each": 1 if each else None, "reply_refs": refs, "fault": None, "seed": 7}
    more: Any = {"each": (each,)} if each else {}
    how: Any = {"method": "mix"} if "inbox" in refs else {"method": "give", "leave": True}
    refusal = ask.refused("do", doing(0, ask.host, tasks=[task], shared={"t": 0}, **how, **more))
    assert refusal.code == REFUSED and "must come from the peer" in refusal.words


def test_nodes_that_were_taught_something_else_have_another_past_until_they_go_back(
    tmp_path: Path,
) -> None:
    """Steering: a coordinator teaches nodes apart, and then asks all of them the same question."""
    records = []
    for name, taught in (("a", "mean"), ("b", "another mean"), ("c", "mean")):
        (tmp_path / name).mkdir()
        record = CallRecord(tmp_path / name, ["predict"])
        record.take(0, 0, "local_train", -1, "t0", 1, again=False)
        if name != "c":  # which is lost for a sum
            record.take(1, 0, "predict", -1, "batch", 1, again=False)
        record.take(2, 0, "distil", -1, taught, 1, again=False)
        records.append(record)
    a, b, c = records
    assert a.past(1) == c.past(1) != b.past(1) == CallRecord(tmp_path / "b", ["predict"]).past(1)
    for record in records:
        record.back(0)
        record.take(5, 0, "local_train", -1, "t0", 1, again=False)
    assert a.past(1) == b.past(1) == c.past(1)


def test_a_sum_that_was_begun_and_dropped_is_part_of_the_past(tmp_path: Path) -> None:
    """Steering by sums: a coordinator asks nodes apart in a sum that never opens, and then all of
    them the same.
    """

    def asked(name: str, how: str, brief: tuple[str, ...]) -> CallRecord:
        (tmp_path / name).mkdir()
        record = CallRecord(tmp_path / name, brief)
        record.take(1, 0, "update", -1, how, 1, again=False)
        return record

    # what a party keeps of a sum; and sums that stand alone
    for brief, number in (((), 0), (("update",), 1)):
        a, b = asked(f"a{number}", "weights", brief), asked(f"b{number}", "crafted", brief)
        assert a.past(0) != b.past(0)  # of a further sum in the round
        assert (a.past(1) == b.past(1)) == bool(brief)
        # before the sum itself
        assert a.past(0, call=1) == b.past(0, call=1) == CallRecord(tmp_path).past(0)
        for record in (a, b):
            record.take(2, 1, "update", -1, "same", 1, again=False)
        assert (a.past(1, call=2) == b.past(1, call=2)) == bool(brief)
        for record in (a, b):  # a number that is used again after that hides no earlier call
            record.back(1)
            record.take(1, 1, "update", -1, "same", 1, again=False)
        assert (a.past(1, call=1) == b.past(1, call=1)) == bool(brief)
