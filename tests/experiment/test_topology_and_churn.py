"""Who may speak to whom, who is there, and who begins with which network: as a run has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.cli import main
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, MethodError
from fedloom.core.message import leaves
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.config.sections import Absence, ChurnConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.experiment.run.session import Session, fingerprint

PAGE = """
import torch

from fedloom.core.method import Method, MethodConfig
from fedloom.core.optim import SGD
from fedloom.core.party import Party


class Peer(Party[MethodConfig]):
    STATE = ("params", "buffers", "opt")

    def setup(self):
        self.network(self.context.build(), SGD(0.1))

    def give(self):
        return self.params

    def mix(self, *, inbox):
        given = [self.params, *inbox.values()]
        self.params = {k: torch.stack([one[k] for one in given]).mean(0) for k in self.params}


def round(fed, server, clients, cfg, t):
    fed.exchange(fed.sample_peers(clients, None, t), answer="give", take="mix")
    yield "mixed"


def wrong(fed, server, clients, cfg, t):
    fed.exchange({0: [2]}, answer="give", take="mix")
    yield "mixed"


METHODS = (
    Method("mean", "Mean of the neighbours", "none", "peer", MethodConfig, round, Peer, Peer, needs=("one network",)),
    Method("alone", "Networks of their own", "none", "peer", MethodConfig, round, Peer),
    Method("wrong", "Asks a stranger", "none", "peer", MethodConfig, wrong, Peer),
)
"""  # noqa: E501
SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {"clients": 6, "public_rows": 60, "test_rows": 60, "own_test_rows": 10},
    "models": {"pool": ["linear"]},
    "evaluate": {"points": 4},
}
FEDAL = {
    "params": {"tau": 2, "batch_size": 8},
    "models": {"pool": ["mlp", "linear"], "norm": "batch"},
}


def run(**changes: Any) -> RunConfig:
    found: RunConfig = check({"run": {**SMALL, **changes}}).run
    return found


@pytest.fixture
def page(tmp_path: Path) -> str:
    file = tmp_path / "mean.py"
    file.write_text(PAGE)
    return str(file)


def neighbours(folder: Path) -> list[list[int]]:
    found: list[list[int]] = json.loads((folder / "partition.json").read_text())["neighbours"]
    return found


# -- the graph of a run ----------------------------------------------------------------------------


def test_a_run_exchanges_along_its_graph_and_says_which(page: str, tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("0,1\n1,2\n3,4\n")
    for n, topology in enumerate(
        [
            {"kind": "ring"},
            {"kind": "regular", "degree": 3},
            {"kind": "small-world", "degree": 2},
            {"kind": "edges", "file": str(tmp_path / "links.csv")},
        ]
    ):
        folder = tmp_path / str(n)
        plan = build(run(method=page, topology=topology))
        assert plan.graph == build(run(method=page, topology=topology)).graph is not None
        with start(plan) as engine:
            session = Session(plan, engine, folder)
            session.begin(resume=False)
            session.go(lambda _: None, lambda: False)
        assert tuple(make().context.neighbours for make in plan.clients) == plan.graph
        assert neighbours(folder) == [list(near) for near in plan.graph]
        asked = {(f"peer-{i}", f"peer-{j}") for i, near in enumerate(plan.graph) for j in near}
        assert set(session.fed.ledger.pairs) == asked
    assert neighbours(tmp_path / "3") == [[1], [0, 2], [1], [4], [3], []]


def test_a_full_graph_is_not_written_down(page: str, tmp_path: Path) -> None:
    plan = build(run(method=page))
    others = [tuple(make().context.neighbours) for make in plan.clients]
    assert (plan.graph, others) == (None, [tuple(j for j in range(6) if j != i) for i in range(6)])
    result = execute(run(method=page, rounds=1), tmp_path / "run")
    assert "neighbours" not in json.loads((tmp_path / "run" / "partition.json").read_text())
    assert result.summary["messages"] == 6 * 5


def test_a_link_outside_the_graph_stops_the_run(page: str) -> None:
    with pytest.raises(MethodError, match="peer 2 is not a neighbour of peer 0"):
        execute(run(method=f"{page}:wrong", topology={"kind": "ring"}))
    execute(run(method=f"{page}:wrong", rounds=1))


def test_another_seed_draws_another_graph_and_another_method_the_same(page: str) -> None:
    topology = {"kind": "regular", "degree": 3}
    graphs = [build(run(method=page, topology=topology, seed=seed)).graph for seed in (0, 0, 1)]
    assert graphs[0] == graphs[1] != graphs[2]
    assert build(run(method="fedal", topology=topology)).graph == graphs[0]


def test_a_graph_that_changed_is_not_resumed(page: str, tmp_path: Path) -> None:
    links = tmp_path / "links.csv"
    links.write_text("0,1\n1,2\n")
    config = run(method=page, topology={"kind": "edges", "file": str(links)})
    before = fingerprint(build(config))
    with pytest.raises(Stopped):
        execute(config, tmp_path / "run", stop=lambda: True)
    links.write_text("# the same in other words\n1 2\n1 0\n")
    assert fingerprint(build(config)) == before
    links.write_text("0,1\n1,3\n")
    with pytest.raises(CheckpointError, match="another configuration"):
        execute(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (
            {"kind": "rnig"},
            "topology.kind: must be 'full', 'regular', 'ring', 'small-world', 'groups' or 'edges'",
        ),
        (
            {"kind": "regular", "degree": 6},
            "topology: a peer of 6 cannot have 6 neighbours: take degree 1 to 5",
        ),
        (
            {"kind": "regular", "degree": 0},
            "topology.degree: must be greater than or equal to 1, not 0",
        ),
        (
            {"kind": "small-world", "degree": 3},
            "topology: the degree of a small world must be even",
        ),
        (
            {"kind": "small-world", "rewire": 1.5},
            "topology.rewire: must be less than or equal to 1",
        ),
        (
            {"kind": "ring", "degree": 2},
            "topology: degree applies to kind = regular or small-world, not ring",
        ),
        ({"rewire": 0.2}, "topology: rewire applies to kind = small-world, not full: leave it out"),
        ({"file": "x"}, "topology: file applies to kind = edges, not full"),
        ({"kind": "edges"}, "topology: kind = edges needs file"),
        (
            {"kind": "edges", "file": "nowhere"},
            "topology: cannot read nowhere (No such file or directory): name",
        ),
        ({"knd": "ring"}, "topology.knd: there is no such setting. Did you mean 'kind'?"),
    ],
)
def test_a_bad_topology_is_reported_with_all_the_rest(topology: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(topology=topology, sede=3)
    assert text in str(error.value)
    assert "sede: there is no such setting" in str(error.value)


def test_a_bad_file_of_links_is_reported_with_its_line(tmp_path: Path) -> None:
    links = tmp_path / "links.csv"
    for content, text in (
        (b"0,1\n2,6\n", "links.csv: line 2 links '2,6', but the ids of the 6 peers"),
        (b"\xff\xfe", "not UTF-8 text"),
    ):
        links.write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            run(topology={"kind": "edges", "file": str(links)})
        with pytest.raises(ConfigError, match=text):
            build(RunConfig(**{**SMALL, "topology": {"kind": "edges", "file": str(links)}}))
    links.write_text("\ufeff0,1\n")  # as spreadsheets write it
    assert build(run(topology={"kind": "edges", "file": str(links)})).graph[:3] == ((1,), (0,), ())


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "topology={kind='regular', degree=3}",
            "topology: no graph gives 9 peers 3 neighbours each",
        ),
        ("churn.away=[{client=9}]", "churn: away names client 9"),
    ],
)
def test_the_command_refuses_before_any_work(
    setting: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["fedloom", "run", "fedal", "-s", "data.clients=9", "-s", setting]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


# -- who is there ----------------------------------------------------------------------------------


def test_participants() -> None:
    churn = ChurnConfig(
        away=(
            Absence(client=0, start=2, end=4),
            Absence(client=3, end=1),
            Absence(client=1, start=3),
            Absence(client=0, start=5),
        )
    )
    assert [churn.present((3, 0, 1), t) for t in range(6)] == [
        (0, 1),
        (3, 0, 1),
        (3, 1),
        (3,),
        (3, 0),
        (3,),
    ]
    assert ChurnConfig().present(range(3), 7) == (0, 1, 2)


@pytest.mark.parametrize(
    ("away", "text"),
    [
        ([{"client": 6}], "churn: away names client 6; valid ids are 0–5"),
        (
            [{"client": 1, "start": 3, "end": 3}],
            "churn.away.0: end must be after start, but 3 is not after 3",
        ),
        ([{"start": 3}], "churn.away.0.client: must be set"),
        (
            [{"client": 0, "start": 3}, *({"client": i, "start": 1} for i in range(1, 6))],
            "churn: no client is present in round 3: keep at least one client",
        ),
    ],
)
def test_bad_churn_is_reported_with_all_the_rest(away: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        run(churn={"away": away}, sede=3)
    assert text in str(error.value)
    assert "sede" in str(error.value)


def test_an_empty_round_after_the_run_s_end_is_nobody_s_matter() -> None:
    everybody = {"away": [{"client": i, "start": 3} for i in range(6)]}
    assert run(churn=everybody, rounds=3).churn.away[5].start == 3
    with pytest.raises(ConfigError, match="no client is present in round 3"):
        run(churn=everybody)
    with pytest.raises(ConfigError, match="no client is present in round 3"):
        build(RunConfig(**{**SMALL, "churn": everybody}))
    run(churn={"away": [{"client": i, "start": i % 2, "end": i % 2 + 1} for i in range(6)]})


CHURN = {
    "away": [
        {"client": 2, "end": 2},
        {"client": 0, "start": 1, "end": 3},
        {"client": 4, "start": 2},
    ]
}
AWAY = {2: {0, 1}, 0: {1, 2}, 4: {2, 3}}


def test_who_is_away_keeps_its_state_and_gets_no_message() -> None:
    plan = build(run(**FEDAL, churn=CHURN))
    seen: list[dict[int, Any]] = []
    with start(plan) as engine:

        def look(*_: Any) -> None:
            kept = {
                i: message.map_tensors(torch.Tensor.clone, s) for i, s in engine.states().items()
            }
            seen.append({i: dict(leaves(s)) for i, s in kept.items()})

        session = Session(plan, engine, None)
        session.begin(resume=False)
        look()
        result = session.go(look, lambda: False)
    for t in range(4):
        for i in engine.ids:
            before, after = seen[t][i], seen[t + 1][i]
            same = before.keys() == after.keys() and all(
                torch.equal(v, after[k]) if isinstance(v, torch.Tensor) else v == after[k]
                for k, v in before.items()
            )
            assert same == (t in AWAY.get(i, ())), (t, i)
    evaluated = {(r[0], r[3]) for r in result.metrics if r[4] == "accuracy"}
    # also who is away
    assert evaluated == {(t, engine.name(i)) for t in range(5) for i in engine.ids}
    assert result.summary["failures"] == 0
    trained = {
        (e.round, e.receiver): e.count for e in session.fed.ledger if e.kind == "local_train"
    }
    assert [trained[t, "client"] for t in range(4)] == [
        6 - len({i for i in AWAY if t in AWAY[i]}) for t in range(4)
    ]


def test_a_run_with_churn_resumes_to_the_same_bits_on_every_engine(tmp_path: Path) -> None:
    whole = execute(run(**FEDAL, churn=CHURN), tmp_path / "a").summary
    assert execute(run(**FEDAL)).summary["state_sha256"] != whole["state_sha256"]
    for engine in ({}, {"name": "isolated"}, {"workers": 2}):
        folder = tmp_path / f"b{len(engine)}{engine.get('workers')}"
        config = run(**FEDAL, churn=CHURN, engine=engine)
        asked = iter((False, True))
        with pytest.raises(Stopped):
            execute(config, folder, stop=lambda asked=asked: next(asked))  # type: ignore[misc]
        again = execute(config, folder, resume=True).summary
        assert again["state_sha256"] == whole["state_sha256"]
        assert (folder / "metrics.csv").read_text() == (tmp_path / "a" / "metrics.csv").read_text()
    with pytest.raises(CheckpointError, match="another configuration"):
        execute(run(**FEDAL, churn={"away": CHURN["away"][:2]}), tmp_path / "a", resume=True)


def test_peers_don_t_ask_who_is_away(page: str) -> None:
    plan = build(
        run(method=page, rounds=1, topology={"kind": "ring"}, churn={"away": [{"client": 1}]})
    )
    with start(plan) as engine:
        session = Session(plan, engine, None)
        session.begin(resume=False)
        session.go(lambda _: None, lambda: False)
    ring = {(f"peer-{i}", f"peer-{(i + d) % 6}") for i in range(6) for d in (1, -1)}
    assert set(session.fed.ledger.pairs) == {pair for pair in ring if "peer-1" not in pair}


# -- one network for all ---------------------------------------------------------------------------


def weights(plan: Any) -> list[dict[str, torch.Tensor]]:
    return [make().params for make in plan.clients]


def test_a_method_that_averages_weights_begins_with_one_network(page: str) -> None:
    for pool, name in ((None, "cnn-small"), (["mlp"], "mlp"), (["linear", "linear"], "linear")):
        plan = build(run(method=page, models={"pool": pool} if pool else {}))
        assert plan.architectures == (name,) * 6
        first = plan.server.params
        assert all(p.keys() == first.keys() for p in weights(plan))
        assert all(torch.equal(p[k], first[k]) for p in weights(plan) for k in first)
    table = build(
        run(method=page, data={"name": "wine", "clients": 2, "public_rows": 10}, models={})
    )
    assert table.architectures == ("mlp", "mlp")
    a, b = (weights(build(run(method=page, seed=seed)))[0] for seed in (0, 1))
    assert not any(torch.equal(a[k], b[k]) for k in a if k.endswith("weight"))


def test_other_methods_begin_with_their_own(page: str) -> None:
    a, b, *_ = weights(build(run(method=f"{page}:alone")))
    assert a.keys() == b.keys() and not any(
        torch.equal(a[k], b[k]) for k in a if k.endswith("weight")
    )


def test_several_networks_cannot_be_averaged(page: str) -> None:
    with pytest.raises(
        ConfigError, match="pool: mean averages weights, so all clients need one network, not"
    ):
        run(method=page, models={"pool": ["mlp", "linear"]})
    run(method=f"{page}:alone", models={"pool": ["mlp", "linear"]})
