"""A class of few rows is no class for others: its mean would be the rows themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.context import ClientContext, Rows
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.methods import find
from fedloom.protect.aggregators import Secure
from fedloom.remote import payload
from tests.experiment.test_own_data import ALLOWED, FORM, run
from tests.node.hosts import RunRequest, doing, opening
from tests.toy import CLASSES, Toy, common, contexts
from tests.toy import rows as toy_rows

Hosts = Callable[..., RunRequest]


def with_class(counts: list[int], seed: int) -> Rows:
    """So many rows of each class."""
    every = toy_rows(300, seed)
    y = every.y(torch.arange(300))
    which = torch.cat([torch.nonzero(y == k)[:count, 0] for k, count in enumerate(counts)])
    return Rows(every.pool, every.labels, which, every.shift, every.scale)


def party(name: str, counts: list[int], least: int, **params: Any) -> Any:
    context = replace(contexts(1, make=common)[0], data=with_class(counts, 3), min_class_rows=least)
    method = find(name)
    return method.party_at(context)(method.configure(params={"batch_size": 8, **params}), context)


def test_fedproto_and_fd_send_a_class_of_few_rows_as_absent() -> None:
    counts = [12, 9, 30, 10]
    sent = party("fedproto", counts, 10).update(t=0, received={})
    assert sent["counts"].tolist() == [12, 0, 30, 10] and not sent["prototypes"][1].any()
    assert sent["prototypes"][0].any() and sent["prototypes"][3].any()
    sent = party("fd", counts, 10, tau=9).update(t=0)
    assert sent["present"].tolist() == [True, False, True, True] and not sent["means"][1].any()
    assert party("fedproto", counts, 1).update(t=0, received={})["counts"].tolist() == counts


def test_a_node_s_owner_says_how_many_rows_a_class_needs(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    words = ["rare" if k < 8 else "one" if k % 2 else "two" for k in range(120)]
    path.write_text(
        "\n".join(["a,b,c,kind", *(f"{k}.5,10,x,{word}" for k, word in enumerate(words)), ""])
    )
    form = {**FORM, "classes": ["one", "two", "rare"], "scale": {"a": [60, 40], "b": [10, 5]}}
    kind = run(
        method="fedproto",
        models={"pool": ["mlp"]},
        params={"batch_size": 8},
        data={"row_schema": form},
    )
    text = for_nodes(build(kind, PrivateData())).model_dump_json()
    found: list[Any] = []
    for least in ({}, {"min_class_rows": 1}):
        data = {"wards": {"rows": path, **ALLOWED, "classes": ["one", "two", "rare"], **least}}
        ask = hosts(
            methods=["fedproto"], data=data, max_runs=9, state=tmp_path / f"state{len(found)}"
        )
        ask("open", opening(text))
        _, rest = payload.unpack(ask("do", doing(0, ask.host, shared={"t": 0, "received": {}})))
        reply: Any = payload.decoded(rest, 0)
        found.append(reply["counts"].tolist())
    assert found[0][2] == 0 < found[1][2] < 8 and found[0][:2] == found[1][:2]


def secure(counts: Callable[[int], list[int]]) -> Any:
    places: list[ClientContext] = contexts(5, make=common, data=lambda i: with_class(counts(i), i))
    toy = Toy(find("fedproto"), client_contexts=places, means=Secure(), batch_size=40).run(1)
    assert toy.server is not None
    return toy.server.prototypes


@pytest.mark.parametrize(
    ("owners", "known"), [((4,), False), ((1, 4), True)], ids=["one node", "two nodes"]
)
def test_a_class_of_one_node_is_not_in_a_secure_sum(owners: tuple[int, ...], known: bool) -> None:
    found = secure(lambda i: [12, 12, 12, 20 if i in owners else 0])
    assert found["known"].tolist() == [True] * (CLASSES - 1) + [known]
    assert bool(found["prototypes"][-1].any()) == known
