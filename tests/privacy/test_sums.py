"""A secure sum is one of many nodes' answers to one question: to several questions
there is no sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from benchmarks import crafted

from fedloom.core.context import ClientContext
from fedloom.core.engine import WRONG_SHAPE, Failure
from fedloom.core.errors import MessageError
from fedloom.core.fixed_point import threshold
from fedloom.core.message import Shape
from fedloom.core.templates import spell
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry
from fedloom.methods.tables import design as designs
from fedloom.methods.tables import newton
from fedloom.methods.tables.steps import tensors
from fedloom.protect import masks
from fedloom.protect.masks import SumMember, question, unmasked
from fedloom.remote import payload
from fedloom.remote.node.masking import Participants, SumKeeper, SumRecord
from fedloom.remote.node.terms import weaknesses
from fedloom.remote.node_session import TaskResults
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.secure_sum import secure_sum
from tests.experiment.test_own_data import ALLOWED, FORM, rows, run
from tests.node.hosts import RUN, RunRequest, doing, node, opening
from tests.protect.test_masks import ASKED, SUM, Sum

Q: list[bytes] = [
    question(0, "update", "rows", None, ["a"], {"weights": torch.tensor([float(k)])})
    for k in (0, 1)
]
D = 2000


def summed(n: int, asked: dict[str, bytes]) -> tuple[Sum, np.ndarray]:
    """The sum that a coordinator computes if each node is asked what this says, and all sign and
    open whom they can.
    """
    s = Sum(n)
    s.x = {
        name: x % np.uint64(2**30)
        for name, x in zip(
            s.names, np.random.default_rng(1).integers(0, 2**30, (n, D), np.uint64), strict=True
        )
    }
    s.keys(), s.shares()
    s.masked = {
        name: s.members[name].mask(s.x[name], asked[name], s.for_one(name)) for name in s.sealed
    }
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
    truths = [
        s.x[names[7]],
        s.plain(),
        sum((s.x[name] for name in names[7:]), start=np.uint64(0) * s.x[names[0]]),
    ]
    assert all(likeness(total, truth) < 0.1 for total in found for truth in truths)
    s, found = summed(10, dict.fromkeys(names, Q[0]))
    assert likeness(found[0], s.plain()) > 0.999 and np.array_equal(found[0], s.plain())


def test_a_node_that_was_asked_another_question_has_not_signed_this_set() -> None:
    s = Sum(5)
    s.keys(), s.shares()
    asked = {name: Q[name == s.names[-1]] for name in s.names}
    s.masked = {
        name: s.members[name].mask(s.x[name], asked[name], s.for_one(name)) for name in s.sealed
    }
    signed = s.signatures()
    with pytest.raises(
        MessageError, match=f"'{s.names[-1]}' has not signed this set: the coordinator may have"
    ):
        s.members[s.names[0]].open(signed)


@pytest.mark.parametrize(
    "changed",
    [
        {"round": 1},
        {"method": "answer"},
        {"weight": ""},
        {"expect": 1},
        {"names": ["a", "b"]},
        {"shared": {"t": 1}},
        {"past": "x"},
    ],
)
def test_a_question_has_everything_that_is_asked(changed: dict[str, Any]) -> None:
    plain = {
        "round": 0,
        "method": "update",
        "weight": "rows",
        "expect": 0,
        "names": ["a"],
        "shared": {"t": 0},
    }
    assert question(**plain) != question(**{**plain, **changed})  # type: ignore[arg-type]


def keepers(
    folder: Path, count: int, least: int = 3, run: str = "run", quarantine: int = 0
) -> list[SumKeeper]:
    names = [f"n{k}" for k in range(count)]
    made = []
    for name in names:
        cfg = node(folder / name, name=name, peers=[n for n in names if n != name], min_sum=least)
        (folder / name).mkdir(parents=True, exist_ok=True)
        members = {str(k): n for k, n in enumerate(names) if n != name}
        (folder / name / run).mkdir(exist_ok=True)
        sets = Participants(folder / name / run, quarantine)
        record = SumRecord(folder / name)
        made.append(
            SumKeeper(
                cfg, None, members=members, context=f"{run}/1", record=record, participants=sets
            )
        )
    return made


def take(
    those: list[SumKeeper], sum_name: str, shared: Any, lost: tuple[str, ...] = (), round: int = 0
) -> None:
    """The steps of a sum in which the vectors of these nodes are lost."""

    def step(
        one: SumKeeper, what: str, names: list[str], parts: list[bytes]
    ) -> tuple[list[str], list[bytes]]:
        head, rest = payload.unpack(
            one.step(
                {"sum": sum_name, "step": what, "names": names, **call},
                [memoryview(p) for p in parts],
            )
        )
        return head["names"], [bytes(part) for part in rest]

    call: dict[str, Any] = {"round": round, "method": "update"}
    names = [one._own for one in those]
    listed = [part for one in those for part in step(one, "keys", names, [])[1][:4]]
    sealed = {
        one._own: dict(zip(*step(one, "shares", names, listed), strict=True)) for one in those
    }
    expect = {"w": Shape("float32", 3), "rows": Shape("int64")}
    for one in those:
        others = [name for name in names if name != one._own]
        step(one, "deliver", others, [sealed[other][one._own] for other in others])
        request = {
            **call,
            "call": 0,
            "expect": spell(expect),
            "mask": {"sum": sum_name, "weight": "rows"},
        }
        one.masked({"w": torch.ones(3), "rows": torch.tensor(4)}, request, shared)
    arrived = [one for one in those if one._own not in lost]
    signatures = {
        one._own: step(one, "agree", [n._own for n in arrived], [])[1][0] for one in arrived
    }
    for one in arrived:
        step(one, "open", [*signatures], [*signatures.values()])


def test_a_sum_of_fewer_nodes_than_the_owner_wants_is_refused(tmp_path: Path) -> None:
    take(keepers(tmp_path / "a", 5, least=5), "s", {"t": 0})
    with pytest.raises(CallRefused, match="at least 5 nodes"):
        take(keepers(tmp_path / "b", 6, least=5)[:3], "s", {"t": 0})  # three of the six peers


def test_a_sum_has_as_many_nodes_as_its_shares_of_noise_are_made_for(tmp_path: Path) -> None:
    six = keepers(tmp_path, 6)
    for one in six:
        one._least = SumKeeper(
            node(tmp_path / one._own, name=one._own, min_sum=3),
            None,
            members={},
            context="run/1",
            record=one._record,
            participants=one._participants,
            least=5,
        )._least
    take(six[:5], "enough", {"t": 0})
    with pytest.raises(CallRefused, match="at least 5 nodes"):
        take(six, "two lost", {"t": 1}, lost=("n4", "n5"))


def test_the_same_question_has_one_set_of_nodes_over_all_runs(tmp_path: Path) -> None:
    six = keepers(tmp_path, 6)
    take(six, "first", {"t": 0})
    take(six, "again", {"t": 0})  # after a restart: the same sum
    for fewer in (six[:5], keepers(tmp_path, 6)[:5]):  # in this run, and in another
        with pytest.raises(CallRefused, match="same arguments in a sum of other nodes"):
            take(fewer, "one less", {"t": 0})
    take(six[:5], "another question", {"t": 1})


def test_the_same_question_has_one_set_of_vectors_over_all_runs(tmp_path: Path) -> None:
    """The difference of a sum of six and of five of one list would be the answer of the sixth."""
    take(keepers(tmp_path, 6), "first", {"t": 0})
    # after a return to the round before, and in another run of the same seed
    for name in ("run", "next"):
        with pytest.raises(CallRefused, match="same arguments in a sum of other nodes"):
            take(keepers(tmp_path, 6, run=name), "without n5", {"t": 0}, lost=("n5",))


def test_a_lost_node_stays_out_for_the_quarantine_and_no_node_joins(tmp_path: Path) -> None:
    six = keepers(tmp_path, 6, quarantine=3)
    take(six[:5], "0", {"t": 0})
    with pytest.raises(CallRefused, match="'n5' is not in this run's first sum"):
        take(six, "1", {"t": 1}, round=1)
    take(six[:5], "2", {"t": 2}, lost=("n4",), round=2)
    for round in (2, 3, 5):  # also of a node that was restarted
        with pytest.raises(
            CallRefused,
            match="'n4' is not in this run's first sum, or was lost in the last 3 rounds",
        ):
            take(
                keepers(tmp_path, 6, quarantine=3)[:5],
                f"early {round}",
                {"t": 10 + round},
                round=round,
            )
    take(six[:4], "5", {"t": 5}, round=5)
    take(keepers(tmp_path, 6, quarantine=3)[:5], "6", {"t": 6}, round=6)
    take(keepers(tmp_path, 6, quarantine=3, run="next"), "other run", {"t": 20})


def test_a_vector_is_for_the_call_that_its_sum_began_for(tmp_path: Path) -> None:
    (one, *_) = keepers(tmp_path, 3)
    one.step({"sum": "s", "step": "keys", "names": [], "round": 9, "method": "update"}, [])
    request = {
        "round": 1,
        "method": "update",
        "expect": spell(None),
        "mask": {"sum": "s", "weight": ""},
    }
    with pytest.raises(CallRefused, match="began for another call"):
        one.masked({"w": torch.ones(3)}, request, {"t": 1})


class Session:
    """The coordinator's session with a node in this process."""

    def __init__(self, keeper: SumKeeper) -> None:
        self.keeper, self.name = keeper, keeper._own

    async def sum_step(
        self, name: str, step: str, call: tuple[int, str], names: Any = (), parts: Any = ()
    ) -> tuple[list[str], list[bytes]]:
        request = {
            "sum": name,
            "step": step,
            "names": [*names],
            "round": call[0],
            "method": call[1],
        }
        head, rest = payload.unpack(self.keeper.step(request, [memoryview(part) for part in parts]))
        return head["names"], [bytes(part) for part in rest]


def test_the_coordinator_leaves_out_a_node_that_most_nodes_do_not_add_with(tmp_path: Path) -> None:
    expect = {"w": Shape("float32", 3), "rows": Shape("int64")}

    def summed(run: int, count: int, gone: str = "", steered: int = 0) -> tuple[Any, set[str]]:
        sessions: Any = [Session(one) for one in keepers(tmp_path, 6, quarantine=2)[:count]]
        for session in sessions[:steered]:
            session.keeper._past = lambda round, call: "another distil"

        async def run_masked(session: Any, mask: Any) -> TaskResults:
            if session.name == gone:
                return TaskResults([Failure("unreachable")])
            request = {
                "round": run,
                "method": "update",
                "call": run,
                "expect": spell(expect),
                "mask": mask,
            }
            reply = {"w": torch.ones(3), "rows": torch.tensor(4)}
            return TaskResults([session.keeper.masked(reply, request, {"t": run})])

        def asked(names: Any, past: str) -> bytes:
            return question(run, "update", "rows", spell(expect), names, {"t": run}, past)

        work = secure_sum(sessions, run_masked, "run/1", "rows", 4, asked, (run, "update"))
        total, _, lost = asyncio.run(work)
        return None if total is None else int(total[-1]), {*lost}

    assert summed(0, 6, gone="n2") == (20, {"n2"})
    assert summed(1, 6) == (20, {"n2"}) and summed(2, 6) == (20, {"n2"})
    assert summed(3, 6) == (24, set())
    # it was taught something else before, or missed a call
    assert summed(4, 6, steered=1) == (20, {"n0"})
    # of nodes that were asked alike; min_sum bounds their number
    assert summed(9, 6, steered=4) == (16, {"n4", "n5"})


def opens_both(colluders: int) -> bool:
    """Whether a coordinator with four helpers of ten opens a fifth node: it shows three honest
    nodes all ten, and three all but the fifth, so that it gets shares of both of its secrets.
    """
    s = Sum(10, colluders=colluders)
    s.keys(), s.shares(), s.mask()
    helpers, victim = s.names[:4], s.names[4]
    try:
        for honest, arrived in (
            (s.names[4:7], s.names),
            (s.names[7:], [n for n in s.names if n != victim]),
        ):
            signed = {name: s.members[name].agree(arrived) for name in honest}
            signed |= {
                name: s.signers[name].sign(masks._set_text(SUM, ASKED, arrived)) for name in helpers
            }
            opened = [s.members[name].open(signed)[victim] for name in honest]
            assert len(opened) + len(helpers) >= threshold(10, colluders)
    except MessageError:
        return False
    return True


def test_a_threshold_that_counts_colluders_keeps_them_from_opening_two_sets() -> None:
    assert opens_both(0) and not opens_both(4)
    assert [threshold(n, c) for n, c in ((5, 0), (5, 1), (5, 2), (9, 2), (10, 4))] == [
        4,
        4,
        5,
        7,
        10,
    ]


class Helper:
    """Another node of a sum, of which only the keys are needed."""

    def __init__(self, name: str, sum_name: bytes) -> None:
        keys = SumMember(name, sum_name, lambda text: b"", lambda *_: True, 0).keys()
        self.parts = [keys.mask, keys.seal, keys.signature, b""]


@pytest.fixture
def node_in_a_sum(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Any, Any]]]:
    """Nodes that are asked for their part of a sum."""
    made: list[RunRequest] = []

    def ask(row: str, crafted: bool) -> tuple[str, Any, Any]:
        (folder := tmp_path / f"{len(made)}").mkdir()
        return in_a_sum(folder, row, crafted, made)

    yield ask
    for one in made:
        one.close()


def in_a_sum(
    folder: Path, odd: str, crafted: bool, made: list[RunRequest], each: tuple[Any, ...] = ()
) -> tuple[str, Any, Any]:
    """What leaves a node with rows like this, asked with a model of which only an odd row makes
    numbers too large, or with arguments of its own; the notes; the party.
    """
    path = rows(folder / "own.csv", 80, 3)
    path.write_text("\n".join([*path.read_text().splitlines(), *[odd] * 10, ""]))
    names = ["n1", "n2", "n3", "node"]
    data = {"wards": {"rows": path, "test": 0.3, **ALLOWED}}
    ask = RunRequest(node(folder, methods=["fedavg"], data=data, peers=names[:3], min_sum=3))
    made.append(ask)
    scale = {"a": [0, 20], "b": [0, 20]}
    kind = run(
        method="fedavg", rounds=3, models={"pool": ["linear"]}, aggregate={"secure": True},
        params={"batch_size": 100, "epochs": 1, "clients_per_round": None},
        data={"clients": 4, "row_schema": {**FORM, "scale": scale}},
    )  # fmt: skip
    text = for_nodes(build(kind, PrivateData())).model_dump_json()
    ask("open", opening(text, members={str(k): name for k, name in enumerate(names[:3])}, party=3))
    (node_run,) = ask.host._node_runs.values()
    weights = {k: v.clone() for k, v in node_run.party.params.items()}
    if crafted:
        weights = {k: torch.zeros_like(v) for k, v in weights.items()}
        first = next(v for v in weights.values() if v.dim() == 2)
        first[:, 0] = torch.tensor([2e38, -2e38])
    where: dict[str, Any] = {"run": RUN, "start": 1, "sum": "s", "round": 0, "method": "update"}
    own = payload.unpack(ask("sum", payload.pack({**where, "step": "keys", "names": names})))[1]
    assert node_run.sums is not None
    others = [Helper(name, f"{node_run.sums._context}/s".encode()) for name in names[:3]]
    parts = [part for one in others for part in one.parts] + [bytes(part) for part in own[:4]]
    ask("sum", payload.pack({**where, "step": "list", "names": names}, *parts))
    like = {k: Shape("float32", *v.shape) for k, v in weights.items()}
    expect = spell({"weights": like, "rows": Shape("int64")})
    node_run.party.note("gradient norm", 3.0)
    mask = {"sum": "s", "weight": "rows"}
    body = doing(
        0, ask.host, shared={"t": 0, "weights": weights}, each=each, expect=expect, mask=mask
    )
    try:
        head, rest = payload.unpack(ask("do", body))
    except CallRefused as refusal:
        return f"{refusal.code}: {refusal.words}", None, node_run.party
    line = head["lines"][0]
    reply = payload.decoded(rest, 0) if "reply" in line else None
    return (
        f"{line} {getattr(reply, 'dtype', None)} {getattr(reply, 'shape', None)}",
        head["notes"],
        node_run.party,
    )


def test_a_question_of_a_sum_has_no_arguments_for_one_node(tmp_path: Path) -> None:
    made: list[RunRequest] = []
    told, *_ = in_a_sum(tmp_path, "0.1,9.0,x,one", crafted=False, made=made, each=({"t": 0},))
    made[0].close()
    assert "the same arguments for all nodes" in told


def test_a_node_makes_no_vector_that_no_message_could_carry(tmp_path: Path) -> None:
    """Nor zeros in place of a reply of another shape, which no row decides."""
    (one, *_) = keepers(tmp_path, 3)
    one._always = True
    one.step({"sum": "s", "step": "keys", "names": [], "round": 1, "method": "update"}, [])
    request = {"round": 1, "method": "update", "call": 0, "mask": {"sum": "s", "weight": ""}}
    for size, failed in ((2**31, Failure("raised")), (7, {"w": torch.ones(3)})):
        asked = {**request, "expect": spell({"w": Shape("float32", size)})}
        if size == 7:
            assert one.masked(failed, asked, {"t": 1}) == Failure(WRONG_SHAPE, ANY)
        else:
            with pytest.raises(MessageError, match="longer than a message"):
                one.masked(failed, asked, {"t": 1})


@pytest.mark.parametrize("error", [RuntimeError("row 7"), MessageError("row 7")])
def test_a_call_beside_sums_that_answers_nothing_fails_unseen(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as the training between two sums: that it failed, once for a row, would be a message of
    one node.
    """
    data = {"wards": {"rows": rows(tmp_path / "own.csv", 80, 3), "test": 0.3, **ALLOWED}}
    ask = RunRequest(
        node(tmp_path, methods=["fedextra"], data=data, peers=["n1", "n2", "n3"], min_sum=3)
    )
    kind = run(
        method="fedextra",
        rounds=3,
        models={},
        params={},
        aggregate={"secure": True},
        data={"clients": 4},
    )
    text = for_nodes(build(kind, PrivateData())).model_dump_json()
    ask("open", opening(text, party=3, members={"0": "n1", "1": "n2", "2": "n3"}))
    (node_run,) = ask.host._node_runs.values()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    answers = []
    for call, name in enumerate(("an honest one", "failing")):
        with monkeypatch.context() as patch:
            patch.setattr(
                type(node_run.party), "begin", fail if name == "failing" else lambda *_, **__: None
            )
            answers.append(
                ask("do", doing(call, ask.host, round=call, method="begin", shared={"first": 0}))
            )
    ask.close()
    assert answers[0] == answers[1] and "begin changed nothing: " in caplog.text


def test_no_row_decides_whether_a_node_is_in_a_sum(
    node_in_a_sum: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would be a message of one node, which the sum does not hide."""
    usual, odd = "0.1,9.0,x,one", "40.0,9.0,x,one"
    honest, notes, _ = node_in_a_sum(odd, crafted=False)
    assert "int64" in honest and notes == {}  # notes of one node are no part of a sum
    assert "counts as nothing" not in caplog.text
    before, *_ = node_in_a_sum(usual, crafted=True)
    assert "counts as nothing" not in caplog.text
    after, _, party = node_in_a_sum(odd, crafted=True)
    assert before == after == honest
    assert "counts as nothing" in caplog.text  # its owner is told
    assert all(x.isfinite().all() for x in party.params.values())


def test_25_crafted_questions_of_fedglm_tell_few_rows() -> None:
    """As many as a run of 25 rounds has: a node answers one in a round, and none in
    further rounds.
    """
    cfg = registry()["fedglm"].configure()
    assert cfg.calls_in_round(ClientContext(0)).get("derivatives", 1) == 1
    assert 0.01 < next(crafted.from_sums(0))[3] < 0.06


def test_effects_of_owners_tell_the_means_of_each_owner_also_in_a_sum() -> None:
    """W8: of the honest first round of `fedglm` with effects of owners."""
    values: dict[str, Any] = {"method": "fedglm", "rounds": 2, "params": {"owners": "fixed"}}
    values |= {
        "data": {"name": "wine", "clients": 3, "partition": "iid"},
        "aggregate": {"secure": True},
    }
    plan = build(check({"run": values}).run)
    assert not plan.cfg.rows_add_up and "W8" in weaknesses(plan.run, plan.method, plan.cfg)
    parties: list[Any] = [plan.clients[k]() for k in range(3)]
    x = [designs.complete(party)[0] for party in parties]
    whole = np.concatenate(x)
    scale = np.where(whole.std(0) > 0, whole.std(0), 1)
    design = {
        "mean": whole.mean(0),
        "scale": scale,
        "kept": np.ones(whole.shape[1], bool),
        "outcome": np.zeros(2),
    }
    shared: Any = {**tensors(**design), "rows": len(whole)}
    p, k = whole.shape[1] + 1, plan.server_context.classes - 1
    bits, beta = newton.bits_for(len(whole), 64), torch.zeros(k, p, dtype=torch.float64)
    sums = sum(party.derivatives(design=shared, beta=beta, bits=bits)["sums"] for party in parties)
    _, _, hessian = newton.opened(sums.numpy(), p, k, bits)
    own = p - 2  # the effect of owner 1
    back = hessian[own, :p] * scale[own - 1] + hessian[0, :p] * whole.mean(0)[own - 1]
    means = back[1 : p - 2] / back[0] * scale[: p - 3] + whole.mean(0)[: p - 3]
    assert np.abs(means - x[1].mean(0)[: p - 3]).max() < 1e-6
