"""A secure sum is one of many nodes' answers to one question: to several questions there is no sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import MessageError
from fedloom.core.message import Shape
from fedloom.core.templates import spell
from fedloom.protect.masks import question, unmasked
from fedloom.remote import payload
from fedloom.remote.node.masking import SumKeeper, SumRecord
from fedloom.remote.rpc_errors import CallRefused
from tests.node.hosts import node
from tests.protect.test_masks import SUM, Sum

Q: list[bytes] = [question(0, "update", "rows", None, ["a"], {"weights": torch.tensor([float(k)])}) for k in (0, 1)]
D = 2000


def summed(n: int, asked: dict[str, bytes]) -> tuple[Sum, np.ndarray]:
    """The sum that a coordinator computes if each node is asked what this says, and all sign and open whom they can."""
    s = Sum(n)
    s.x = {
        name: x % np.uint64(2**30)
        for name, x in zip(s.names, np.random.default_rng(1).integers(0, 2**30, (n, D), np.uint64), strict=True)
    }
    s.keys(), s.shares()
    s.masked = {name: s.members[name].mask(s.x[name], asked[name], s.for_one(name)) for name in s.sealed}
    signed = s.signatures()
    alike = {name: [other for other in s.names if asked[other] == asked[name]] for name in s.names}
    opened = {}
    for name in s.names:
        try:
            opened[name] = s.members[name].open({other: signed[other] for other in alike[name]})
        except MessageError:
            continue
    found = [unmasked(s.listed, s.sealed, s.masked, opened, SUM, q) for q in {*asked.values()}]
    return s, np.stack(found)


def likeness(x: np.ndarray, y: np.ndarray) -> float:
    return abs(float(np.corrcoef(x.astype(float), y.astype(float))[0, 1]))


def test_two_questions_have_no_sum() -> None:
    names = Sum(6).names
    with pytest.raises(MessageError, match="0 of 6 parties stayed"):
        summed(6, {name: Q[k % 2] for k, name in enumerate(names)})


def test_seven_of_ten_do_not_open_an_eighth_that_was_asked_another_question() -> None:
    names = Sum(10).names
    s, found = summed(10, dict.fromkeys(names[:7], Q[0]) | dict.fromkeys(names[7:], Q[1]))
    truths = [s.x[names[7]], s.plain(), sum((s.x[name] for name in names[7:]), start=np.uint64(0) * s.x[names[0]])]
    assert all(likeness(total, truth) < 0.1 for total in found for truth in truths)
    s, found = summed(10, dict.fromkeys(names, Q[0]))
    assert likeness(found[0], s.plain()) > 0.999 and np.array_equal(found[0], s.plain())


@pytest.mark.parametrize(
    "changed",
    [{"round": 1}, {"method": "answer"}, {"weight": ""}, {"expect": 1}, {"names": ["a", "b"]}, {"shared": {"t": 1}}],
)
def test_a_question_has_everything_that_is_asked(changed: dict[str, Any]) -> None:
    plain = {"round": 0, "method": "update", "weight": "rows", "expect": 0, "names": ["a"], "shared": {"t": 0}}
    assert question(**plain) != question(**{**plain, **changed})  # type: ignore[arg-type]


def keepers(folder: Path, count: int, least: int = 3) -> list[SumKeeper]:
    names = [f"n{k}" for k in range(count)]
    made = []
    for name in names:
        cfg = node(folder / name, name=name, peers=[n for n in names if n != name], min_sum=least)
        (folder / name).mkdir(parents=True, exist_ok=True)
        members = {str(k): n for k, n in enumerate(names) if n != name}
        made.append(SumKeeper(cfg, None, members, "run/1", SumRecord(folder / name)))
    return made


def take(those: list[SumKeeper], sum_name: str, shared: Any, until: str = "open") -> None:
    """The steps of a sum in which no node is lost."""

    def step(one: SumKeeper, what: str, names: list[str], parts: list[bytes]) -> tuple[list[str], list[bytes]]:
        head, rest = payload.unpack(
            one.step({"sum": sum_name, "step": what, "names": names}, [memoryview(p) for p in parts])
        )
        return head["names"], [bytes(part) for part in rest]

    names = [one._own for one in those]
    listed = [part for one in those for part in step(one, "keys", [], [])[1]]
    sealed = {one._own: dict(zip(*step(one, "shares", names, listed), strict=True)) for one in those}
    expect = {"w": Shape("float32", 3), "rows": Shape("int64")}
    for one in those:
        others = [name for name in names if name != one._own]
        step(one, "deliver", others, [sealed[other][one._own] for other in others])
        request = {"round": 0, "method": "update", "expect": spell(expect), "mask": {"sum": sum_name, "weight": "rows"}}
        one.masked({"w": torch.ones(3), "rows": torch.tensor(4)}, request, shared)
    signatures = {one._own: step(one, "agree", names, [])[1][0] for one in those}
    for one in those:
        step(one, "open", [*signatures], [*signatures.values()])


def test_a_sum_of_fewer_nodes_than_the_owner_wants_is_refused(tmp_path: Path) -> None:
    take(keepers(tmp_path / "a", 5, least=5), "s", {"t": 0})
    with pytest.raises(CallRefused, match="at least 5 nodes"):
        take(keepers(tmp_path / "b", 6, least=5)[:3], "s", {"t": 0})  # three of the six peers


def test_the_same_question_has_one_set_of_nodes_over_all_runs(tmp_path: Path) -> None:
    six = keepers(tmp_path, 6)
    take(six, "first", {"t": 0})
    take(six, "again", {"t": 0})  # after a restart: the same sum
    for fewer in (six[:5], keepers(tmp_path, 6)[:5]):  # in this run, and in another
        with pytest.raises(CallRefused, match="same arguments in a sum of other nodes"):
            take(fewer, "one less", {"t": 0})
    take(six[:5], "another question", {"t": 1})
