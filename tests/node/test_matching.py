"""The steps of a matching at a node, asked by hand: what an honest coordinator gets, and what
nobody does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import CheckpointError
from fedloom.data.alignment.ids import digests
from fedloom.data.alignment.psi import PSIClient, announce
from fedloom.experiment.plan.private import Matched
from fedloom.experiment.plan.reading import check
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node import approval
from tests.node.hosts import RUN, RunRequest

THEIRS, OURS = [f"P{n}" for n in range(10)], [f"P{n}" for n in range(4, 16)]
COLUMNS: dict[str, Any] = {"private": True, "id": "patient", "label": "state"}
ROLES = {"aligned": [0, 3, 1], "test": [2, 5], "dealt": [], "unused": []}


def config(**columns: Any) -> str:
    values = {
        "method": "split",
        "data": {"name": "people", "clients": 2},
        "columns": {**COLUMNS, **columns},
    }
    return str(check({"run": values}).run.model_dump_json())


@pytest.fixture
def host(hosts: Callable[..., RunRequest], tmp_path: Path) -> Callable[..., RunRequest]:
    """Makes a host with a file of twelve people, six of whom are among the coordinator's."""
    path = tmp_path / "lab.csv"
    path.write_text("patient,a\n" + "".join(f"{id},{n}\n" for n, id in enumerate(OURS)))

    def make(min_rows: int = 1, **data: Any) -> RunRequest:
        return hosts(
            methods=["split"],
            data={"people": {"rows": path, "ids_total": 1000, **data}},
            min_rows=min_rows,
        )

    return make


def step(name: str, *rest: bytes, **head: Any) -> bytes:
    return payload.pack({"run": RUN, "start": 1, "step": name, **head}, *rest)


def begin(text: str | None = None, **head: Any) -> bytes:
    given = {
        "protocol": payload.PROTOCOL,
        "version": __version__,
        "party": 1,
        "config": text or config(),
        "rows": 10,
    }
    return step("begin", **{**given, **head})


def client(ids: list[str] = THEIRS) -> PSIClient:
    return PSIClient(sorted(digests([ids], ["ours"])[0]), most=len(OURS))


def keep(
    common: list[str] = OURS[:6], *, key: bytes = bytes(32), roles: Any = None, **head: Any
) -> bytes:
    """The last step, for these people."""
    places = (
        {name: torch.tensor(value) for name, value in ROLES.items()} if roles is None else roles
    )
    places = {
        name: torch.zeros(0, dtype=torch.int64) if isinstance(x, torch.Tensor) and not len(x) else x
        for name, x in places.items()
    }
    marks = announce(key, digests([common], ["ours"])[0])
    return step("keep", message.encode(places), *marks, **{"mark": "m" * 32, "classes": 2, **head})


def kept(asked: RunRequest) -> Matched | None:
    return Matched.load(asked.config.state / f"run-{RUN}" / "matched")


def test_no_id_is_matched_before_the_site_has_approved_the_run(
    host: Callable[..., RunRequest], hosts: Callable[..., RunRequest], tmp_path: Path
) -> None:
    host()  # which writes the file
    data = {"people": {"rows": tmp_path / "lab.csv", "ids_total": 1000}}
    asked = hosts(methods=["split"], data=data, min_rows=1, approve="ask")
    assert asked.refused("match", begin()).code == rpc_errors.PENDING
    assert not (asked.config.state / "budget.json").exists()
    shown = approval.find(asked.config.state, RUN)
    assert "Rows are matched by their ids" in shown.text and "Weakness W5" in shown.text
    assert "Ids are in the column 'patient'." in shown.text
    approval.decide(asked.config.state, shown, "approve", None)
    assert payload.unpack(asked("match", begin()))[0] == {"rows": 12}
    approval.decide(asked.config.state, shown, "stop", None)
    assert (
        asked.refused("match", step("shard", client().request(), shard=0)).code
        == rpc_errors.STOPPED
    )


def test_the_site_is_shown_which_column_a_coordinator_takes_for_ids(
    host: Callable[..., RunRequest], hosts: Callable[..., RunRequest], tmp_path: Path
) -> None:
    """Unless node.toml names it: of any column a matching tells which values are there."""
    host()
    for named, column in ((None, "a"), ("patient", "patient")):
        data = {"people": {"rows": tmp_path / "lab.csv", "id": named}}
        asked = hosts(methods=["split"], data=data, min_rows=1, approve="ask")
        assert asked.refused("match", begin(config(id="a"))).code == rpc_errors.PENDING
        assert f"Ids are in the column '{column}'." in approval.find(asked.config.state, RUN).text


def test_an_honest_coordinator_learns_whom_both_have(host: Callable[..., RunRequest]) -> None:
    asked, mine = host(), client()
    head, _ = payload.unpack(asked("match", begin()))
    assert head == {"rows": 12}
    _, rest = payload.unpack(asked("match", step("shard", mine.request(), shard=0)))
    found = mine.intersection(bytes(rest[0]), bytes(rest[1]))
    ordered = sorted(THEIRS, key=lambda id: digests([[id]], ["ours"])[0][0])
    assert {ordered[place] for place in found} == {*OURS[:6]} and kept(asked) is None
    asked("match", keep())
    there = kept(asked)
    assert there is not None and there.caller == "hub" and there.party == 1 and there.classes == 2
    people = [*there.aligned.tolist(), *there.test.tolist()]
    assert (
        len({*people}) == 5
        and {*people} < {*range(6)}
        and {*there.unaligned.tolist()} == {*range(12)} - {*people}
    )
    assert asked.refused("match", keep()).code == rpc_errors.UNKNOWN  # it is over
    lines = {line["what"]: line for line in asked.audited()}
    assert lines["began to match"]["ids"] == 12 and lines["began to match"]["ids_of_caller"] == 10
    assert (
        lines["matched"]["aligned"],
        lines["matched"]["test"],
        lines["matched"]["unaligned"],
    ) == (3, 2, 7)
    assert "P4" not in json.dumps(asked.audited())


@pytest.mark.parametrize(
    ("text", "head", "data", "words"),
    [
        (None, {"rows": 0}, {}, "1 to 1000000 ids"),
        (None, {"rows": 51}, {"max_ids": 50}, "1 to 50 ids"),
        (None, {"party": 0}, {}, "no rows of this node"),
        (None, {"party": 2}, {}, "no rows of this node"),
        (None, {"version": "0"}, {}, "this node has protocol and version"),
        (config(align="plain"), {}, {}, "by openmined, not by plain"),
        (None, {}, {"align": ["plain"]}, "by plain, not by openmined"),
        (None, {}, {"id": "nobody"}, "failed to read its ids"),
        (
            json.dumps({"method": "split", "data": {"name": "people", "clients": 2}}),
            {},
            {},
            "set columns.private=true",
        ),
        ("{}", {}, {}, "does not allow the method fedal"),
        (None, {"rows": "ten"}, {}, "invalid message"),
    ],
)
def test_a_matching_is_begun_as_the_policy_has_it(
    text: str | None,
    head: dict[str, Any],
    data: dict[str, Any],
    words: str,
    host: Callable[..., RunRequest],
) -> None:
    asked = host(**data)
    assert words in asked.refused("match", begin(text, **head)).words
    assert (
        asked.refused("match", step("shard", client().request(), shard=0)).code
        == rpc_errors.UNKNOWN
    )


def test_ids_are_asked_for_once_and_no_more_than_were_stated(
    host: Callable[..., RunRequest],
) -> None:
    asked = host()
    asked("match", begin())
    for wrong in (
        step("shard", client().request(), shard=1),
        step("shard", shard=0),
        step("shard", client().request(), client().request(), shard=0),
        step("shard", client().request(), shard="0"),
        keep(),
        step("dance"),
    ):
        assert asked.refused("match", wrong).code == rpc_errors.MALFORMED
    assert asked.refused("match", step("ids")).code == rpc_errors.REFUSED
    for request in (client([f"P{n}" for n in range(11)]).request(), b"\xff" * 50):
        asked("match", begin(start=2))  # one that fails is over, too
        assert (
            asked.refused("match", step("shard", request, shard=0, start=2)).code
            == rpc_errors.MALFORMED
        )
        again = step("shard", client().request(), shard=0, start=2)
        assert asked.refused("match", again).code == rpc_errors.MALFORMED
    assert kept(asked) is None


def test_a_shard_for_which_there_was_no_room_can_be_asked_for_again(
    host: Callable[..., RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, shard = host(), step("shard", client().request(), shard=0)
    asked("match", begin())
    with monkeypatch.context() as full:
        full.setattr(asked.host, "_queued", asked.config.queue)
        assert asked.refused("match", shard).code == rpc_errors.BUSY
    asked("match", shard)
    assert asked.refused("match", shard).code == rpc_errors.MALFORMED


def test_who_may_continue_with_a_matching(host: Callable[..., RunRequest]) -> None:
    asked = host()
    asked("match", begin(start=5))
    shard = step("shard", client().request(), shard=0, start=5)
    assert asked.refused("match", shard, caller="second").code == rpc_errors.UNKNOWN
    assert asked.refused("match", shard, caller="peer").code == rpc_errors.REFUSED
    assert asked.refused("match", begin(start=4)).code == rpc_errors.STALE
    assert asked.refused("match", begin(start=6), caller="second").code == rpc_errors.REFUSED
    assert asked.refused("match", begin(run="1" * 32), caller="second").code == rpc_errors.TAKEN
    assert (
        asked.refused("match", step("shard", client().request(), shard=0, start=6)).code
        == rpc_errors.UNKNOWN
    )
    asked("match", shard)
    asked("match", begin(start=6))  # a newer start takes over
    assert asked.refused("match", keep(start=5)).code == rpc_errors.STALE
    asked("match", step("leave", start=6))
    asked("match", begin(run="1" * 32), caller="second")


WRONG_ROWS: list[dict[str, list[int]]] = [
    {"aligned": [0, 0]},
    {"aligned": [2]},
    {"test": [6]},
    {"test": [-1]},
    {"test": []},
]


@pytest.mark.parametrize(
    "change",
    [
        {"roles": {**ROLES, "aligned": [0, 1]}},
        {"roles": {**ROLES, "aligned": torch.tensor([0.0, 1.0])}},
        {"roles": {**ROLES, "aligned": torch.tensor([[0, 1]])}},
        {"roles": {"aligned": torch.tensor([0]), "test": torch.tensor([1])}},
        *(
            {
                "roles": {
                    name: torch.tensor(rows, dtype=torch.int64)
                    for name, rows in {**ROLES, **wrong}.items()
                }
            }
            for wrong in WRONG_ROWS
        ),
        {"common": ["P0", *OURS[:6]]},
        {"common": [*OURS, "P0", "P1"]},
        {"classes": 1},
        {"mark": ""},
        {"mark": "m" * 100},
    ],
)
def test_roles_that_cannot_be_are_refused(
    change: dict[str, Any], host: Callable[..., RunRequest]
) -> None:
    asked = host()
    asked("match", begin())
    asked("match", step("shard", client().request(), shard=0))
    assert asked.refused("match", keep(**change)).code == rpc_errors.MALFORMED
    assert kept(asked) is None
    asked("match", keep())
    assert kept(asked) is not None


def test_few_people_are_refused_and_not_counted(host: Callable[..., RunRequest]) -> None:
    asked = host(min_rows=3)
    asked("match", begin())
    asked("match", step("shard", client().request(), shard=0))
    for aligned, test in (([0, 1, 2], [3, 4]), ([0, 1], [2, 3, 4])):
        roles = {name: torch.tensor(ROLES[name], dtype=torch.int64) for name in ("dealt", "unused")}
        roles |= {"aligned": torch.tensor(aligned), "test": torch.tensor(test)}
        refusal = asked.refused("match", keep(roles=roles))
        assert (
            refusal.code == rpc_errors.REFUSED
            and "at least 3 rows" in refusal.words
            and "2" not in refusal.words
        )
        assert kept(asked) is None
    asked("match", keep(roles=roles | {"aligned": torch.tensor([0, 1, 5])}))
    there = kept(asked)
    assert there is not None and (len(there.aligned), len(there.test)) == (3, 3)


def test_a_torn_file_is_no_matching(host: Callable[..., RunRequest]) -> None:
    asked = host()
    asked("match", begin())
    asked("match", step("shard", client().request(), shard=0))
    asked("match", keep())
    path = asked.config.state / f"run-{RUN}" / "matched"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        kept(asked)
    asked("match", begin())  # which is no way out of a new one


def test_a_node_that_tells_no_evaluation_is_not_evaluated(
    hosts: Callable[..., RunRequest], tmp_path: Path
) -> None:
    asked = hosts(
        methods=["split"], data={"people": {"rows": tmp_path / "lab.csv"}}, evaluate=False
    )
    assert "does not allow evaluation" in asked.refused("match", begin()).words
