"""Vertical runs between organizations: each party's columns are its own file, and people are
matched over the wire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.api import Stopped, execute
from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.private import Matched, PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry
from fedloom.remote.coordinator import federation_of, node_set
from fedloom.remote.matching import FILE, _MatchingSession, match
from fedloom.remote.node import approval
from fedloom.remote.node.process import RunningNode
from fedloom.remote.starts import run_id
from fedloom.report import write
from tests.net.nodes import federation
from tests.net.processes import Machines, machines, until

PEOPLE = 120
SAME = (
    "state_sha256",
    "accuracy",
    "scores",
    "test_sha256",
    "bytes",
    "messages",
    "failures",
    "alone",
)
SMALL = {
    "batch_size": 16,
    "embedding_dim": 16,
    "pca_dim": 4,
    "epochs": 1,
    "pretrain_rounds": 1,
    "server_steps": 5,
    "stage1_rounds": 1,
    "lot": 4,
}


def table(path: Path, who: Any, seed: int, *, id: str, label: str = "") -> Path:
    """A party's file of these people: two columns that tell something of the class,
    one of words.
    """
    rng = np.random.default_rng(seed)
    lines = [",".join([id, f"a{seed}", f"b{seed}", "word", *([label] if label else [])])]
    for n in who:
        y = n % 3 == 0
        values = [
            f"P{n:04}",
            f"{rng.normal(loc=2 * y):.3f}",
            f"{rng.normal(scale=5):.3f}",
            "xy"[int(rng.integers(2))],
        ]
        lines.append(
            ",".join([*values, *(["" if n == 30 else ("ill" if y else "well")] if label else [])])
        )
    path.write_text("\n".join(lines) + "\n")
    return path


class Died(Exception):
    """As if a process had."""


def _shown(state: Path) -> list[Any]:
    return [one for one, _ in approval.runs(state)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The clinic knows 0..99, a laboratory 20..119 backwards, another all even people; 30 has no
    label.
    """
    folder = tmp_path_factory.mktemp("files")
    return [
        table(folder / "clinic.csv", range(100), 1, id="patient", label="state"),
        table(folder / "lab.csv", range(PEOPLE - 1, 19, -1), 2, id="subject"),
        table(folder / "scan.csv", range(0, PEOPLE, 2), 3, id="patient"),
    ]


def nodes_of(files: list[Path], **policy: Any) -> Any:
    """What the nodes know of their files."""
    data = {
        "node-0": {"rows": files[1], "id": "subject", "ids_total": 100_000, **policy},
        "node-1": {"rows": files[2], "ids_total": 100_000, **policy},
    }
    return lambda name: {"data": {"people": data[name]}, "min_rows": 4}


def federated(path: Path, files: list[Path], *, secret: bool = False) -> Path:
    """The coordinator's own file, in the federation's."""
    text = path.read_text().replace("secret_draw = false\n", "")
    path.write_text(
        f'secret_draw = {str(secret).lower()}\n{text}\n[data.people]\nrows = "{files[0]}"\n'
    )
    return path


@pytest.fixture(scope="module")
def there(
    files: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[RunningNode]]]:
    with federation(tmp_path_factory.mktemp("nodes"), 2, nodes_of(files)) as (path, nodes):
        yield federated(path, files), nodes


def run_of(
    method: str = "split",
    federation: Path | None = None,
    files: list[Path] | None = None,
    **columns: Any,
) -> Any:
    """A run over the net, or on this machine with all files."""
    own = (
        {"private": True, "id": "patient"}
        if federation
        else {"files": files, "id": ["patient", "subject", "patient"]}
    )
    values = {
        "method": method,
        "rounds": 3,
        "seed": 5,
        "data": {"clients": 3, **({"name": "people"} if federation else {})},
        "columns": {**own, "label": "state", **columns},
        "models": {"pool": ["mlp"]},
        "params": {
            name: SMALL[name] for name in SMALL if name in registry()[method].config.model_fields
        },
        **({"engine": {"name": "net", "federation": str(federation)}} if federation else {}),
    }
    return check({"run": json.loads(json.dumps(values, default=str))}).run


def matched(run: RunConfig, files: list[Path]) -> Matched:
    """A matching without a run."""
    found = match(
        run, None, PrivateData(rows=files[0]), node_set(federation_of(run)), resume=False
    ).matched
    assert found is not None
    return found


def rows(found: Matched) -> list[list[int]]:
    return [found.aligned.tolist(), found.unaligned.tolist(), found.test.tolist()]


def audits(nodes: list[RunningNode], what: str) -> list[dict[str, Any]]:
    """The lines of all nodes on one thing, node by node."""
    files = [
        file
        for node in nodes
        for file in (node.service.audit.path, node.service.audit.refusals)
        if file.exists()
    ]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in map(json.loads, lines) if line["what"] == what]


def test_no_id_is_written_down_and_no_row_leaves(
    there: tuple[Path, list[RunningNode]], tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("DEBUG")
    execute(run_of("split", there[0]), tmp_path / "run")
    for node in there[1]:
        for path in node.service.config.state.rglob("*"):
            if path.is_file():
                assert b"P00" not in path.read_bytes(), path
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"P00" not in path.read_bytes(), path
    assert "P00" not in caplog.text
    begun, shards, kept = (
        [audits([node], what)[-1] for node in there[1]]
        for what in ("began to match", "matched a shard", "matched")
    )
    assert sorted(line["ids"] for line in begun) == [60, 100] and {
        line["ids_of_caller"] for line in begun
    } == {100}
    assert all(line["bytes_in"] > 35 * 100 and line["caller"] == "coordinator" for line in shards)
    assert {(line["aligned"] + line["test"]) for line in kept} == {39}


def test_a_secret_draw_has_other_people_each_time(files: list[Path], tmp_path: Path) -> None:
    with federation(tmp_path, 2, nodes_of(files)) as (path, nodes):
        federated(path, files, secret=True)
        run = run_of("split", path)
        one, two = (matched(run, files) for _ in range(2))
        path.write_text(path.read_text().replace("secret_draw = true", "secret_draw = false"))
        assert rows(matched(run, files)) == rows(matched(run, files))
    assert sorted([*one.aligned, *one.test]) == sorted([*two.aligned, *two.test])
    assert one.test.tolist() != two.test.tolist() and one.aligned.tolist() != two.aligned.tolist()
    assert len(one.test) == len(two.test) and one.mark != two.mark
    assert len(audits(nodes, "matched")) == 8


def test_one_approval_holds_for_the_matching_and_the_run(files: list[Path], tmp_path: Path) -> None:
    own = nodes_of(files)
    with federation(tmp_path, 2, lambda name: {**own(name), "approve": "ask"}) as (path, nodes):
        states = [node.service.config.state for node in nodes]
        with ThreadPoolExecutor(1) as worker:
            work = worker.submit(execute, run_of("split", federated(path, files)))
            for state in states:
                (shown,) = until(partial(_shown, state), "a run that waits")
                approval.decide(state, shown, "approve", None)
            assert work.result(120).summary["rounds"] == 3
        assert [len(audits([node], "approved")) for node in nodes] == [1, 1]


def test_who_is_matched_stays_so_when_a_run_continues(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the coordinator's clock was set back meanwhile."""
    with federation(tmp_path / "fed", 2, nodes_of(files)) as (path, nodes):
        run, out = run_of("split", federated(path, files, secret=True)), tmp_path / "run"
        seen: list[int] = []
        with pytest.raises(Stopped):
            execute(
                run,
                out,
                progress=lambda status: seen.append(status.round),
                stop=lambda: seen[-1] == 2,
            )
        before = Matched.load(out / FILE)
        assert before is not None and len(audits(nodes, "matched")) == 2
        for node in nodes:  # as if it was restarted
            node.service._node_runs.clear()
        monkeypatch.setattr("fedloom.remote.starts.time_ns", lambda: 1)
        result = execute(run, out, resume=True)
        after = Matched.load(out / FILE)
        assert (
            after is not None and after.mark == before.mark and len(audits(nodes, "matched")) == 2
        )
        assert result.summary["rounds"] == 3


def test_a_file_that_has_changed_is_refused(files: list[Path], tmp_path: Path) -> None:
    mine = [tmp_path / path.name for path in files]
    for path, copy in zip(files, mine, strict=True):
        copy.write_text(path.read_text())
    with federation(tmp_path, 2, nodes_of(mine)) as (path, nodes):
        run, out = run_of("split", federated(path, mine)), tmp_path / "run"
        execute(run, out)
        mine[2].write_text(mine[2].read_text().replace(",x", ",y", 1))
        with pytest.raises(
            ConfigError, match=r"node-1 refuses the run: this node's rows have changed"
        ):
            execute(run, out, resume=True)
        mine[2].write_text(files[2].read_text())
        mine[0].write_text(mine[0].read_text() + "P0999,1,1,x,well\n")
        with pytest.raises(DataError, match="has changed since its rows were aligned"):
            execute(run, out, resume=True)
        mine[0].write_text(files[0].read_text())
        execute(run, out, resume=True)
        id = run_id(run, run.resolve()[1], node_set(federation_of(run)).own, out)
        (nodes[0].service.config.state / f"run-{id}" / "matched").unlink()
        with pytest.raises(ConfigError, match="has no alignment of this run"):
            execute(run, out, resume=True)


@pytest.mark.parametrize(
    ("policy", "change", "words"),
    [
        ({}, {"align": "plain"}, "matched here by openmined, not by plain"),
        ({"align": ["plain"]}, {}, "matched here by plain, not by openmined"),
        ({"max_ids": 99}, {}, "1 to 99 ids are matched with those here, not 100"),
    ],
)
def test_a_node_s_policy_comes_before_any_id(
    policy: dict[str, Any], change: dict[str, Any], words: str, files: list[Path], tmp_path: Path
) -> None:
    with federation(tmp_path, 2, nodes_of(files, **policy)) as (path, nodes):
        with pytest.raises(ConfigError, match=words) as caught:
            execute(run_of("split", federated(path, files), **change))
        assert "node-0" in str(caught.value) and "node-1" in str(caught.value)
        assert not audits(nodes, "began to match") and len(audits(nodes, "refused")) == 2


def test_plain_where_all_allow_it_is_the_same(
    files: list[Path], there: tuple[Path, list[RunningNode]], tmp_path: Path
) -> None:
    private = rows(matched(run_of("split", there[0]), files))
    with federation(tmp_path, 2, nodes_of(files, align=["plain", "openmined"])) as (path, nodes):
        found = rows(matched(run_of("split", federated(path, files), align="plain"), files))
        assert [line["ids"] for line in audits(nodes, "showed ids")] == [100, 60]
    assert found == private


def test_a_node_that_forgets_in_the_middle_is_matched_again(
    files: list[Path], there: tuple[Path, list[RunningNode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, calls = there[1][0].service._matcher, []
    answer = type(matcher).answer

    async def once(self: Any, caller: str, asked: Any, rest: Any) -> bytes:
        if self is matcher:
            calls.append(asked["step"])
            if calls.count(asked["step"]) == 1 and asked["step"] != "begin":
                self._under_way.clear()
        return await answer(self, caller, asked, rest)

    monkeypatch.setattr(type(matcher), "answer", once)
    found = rows(matched(run_of("split", there[0]), files))
    assert calls == ["begin", "shard", "begin", "shard", "keep", "begin", "shard", "keep"]
    monkeypatch.undo()
    assert found == rows(matched(run_of("split", there[0]), files))


def test_a_coordinator_that_dies_in_the_middle_begins_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path / "fed", 2, nodes_of(files)) as (path, nodes):
        run, out = run_of(federation=federated(path, files)), tmp_path / "run"
        ask = _MatchingSession._ask

        async def until_the_second_keeps(
            self: Any, guest: Any, step: str, *rest: Any, **more: Any
        ) -> Any:
            if step == "leave" or (step == "keep" and guest.party == 2):
                raise Died
            return await ask(self, guest, step, *rest, **more)

        monkeypatch.setattr(_MatchingSession, "_ask", until_the_second_keeps)
        with pytest.raises(Died):
            execute(run, out)
        monkeypatch.undo()
        assert not (out / FILE).exists() and nodes[1].service._matcher.others("")
        execute(run, out, resume=True)
        marks = {
            Matched.load(next(n.service.config.state.glob("run-*/matched"))).mark for n in nodes
        }
        assert marks == {Matched.load(out / FILE).mark}


@pytest.fixture(scope="module")
def processes(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Real ones: where parties of one process share torch's chance, methods that draw by it give
    other numbers.
    """
    with machines(tmp_path_factory.mktemp("processes"), 2, begin=False) as made:
        for node, file, id in zip(made.nodes, files[1:], ("subject", "patient"), strict=True):
            config = node.folder / "node.toml"
            people = f'[data.people]\nrows = "{file}"\nid = "{id}"\nids_total = 100000\n'
            text = config.read_text().replace('approve = "ask"', 'approve = "off"')
            config.write_text(f"min_rows = 4\n{text}{people}")
        federated(made.federation, files)
        made.straight()
        yield made


@pytest.mark.each_time("split-columns0", "proto-evfl-*")
@pytest.mark.parametrize(
    ("method", "columns"),
    [
        ("split", {}),
        ("split", {"aligned": 20}),
        ("proto-evfl", {"aligned": 20}),
        ("proto-student", {}),
        ("ss-vfl", {}),
    ],
)
def test_it_gives_the_numbers_of_a_run_on_one_machine(
    method: str, columns: dict[str, Any], files: list[Path], processes: Machines, tmp_path: Path
) -> None:
    here = execute(run_of(method, files=files, **columns), tmp_path / "local")
    there = execute(run_of(method, processes.federation, **columns), tmp_path / "run")
    for key in SAME:
        assert there.summary[key] == here.summary[key], key
    held, known = (
        json.loads((tmp_path / folder / "partition.json").read_text())["parties"]
        for folder in ("run", "local")
    )
    for count in ("aligned", "unaligned", "test"):
        assert [party[count] for party in held["parties"]] == [
            party[count] for party in known["parties"]
        ], count
    assert (
        held["parties"][1]["columns"] is None
        and held["parties"][0]["columns"] == known["parties"][0]["columns"]
    )
    assert "private columns" in write(tmp_path / "run").read_text()


def test_a_number_over_columns_of_nodes_is_that_of_one_machine(
    files: list[Path], processes: Machines, tmp_path: Path
) -> None:
    """Nodes learn neither the number nor its scale."""
    header, *lines = files[0].read_text().splitlines()
    cells = [line.split(",") for line in lines]
    priced = tmp_path / "clinic.csv"
    told = [",".join([*c[:-1], c[-1] and f"{1e4 + 100 * float(c[1]):.2f}"]) for c in cells]
    priced.write_text("\n".join([header, *told]) + "\n")
    path = processes.federation.with_name("priced.toml")
    path.write_text(processes.federation.read_text().replace(str(files[0]), str(priced)))
    here = execute(run_of("split", files=[priced, *files[1:]]), tmp_path / "local")
    over = execute(run_of("split", path), tmp_path / "run")
    assert (
        over.summary["task"] == "number"
        and over.summary["rmse"]["mean"] < 2 * over.summary["chance"]
    )
    for key in ("state_sha256", "rmse", "scores", "test_sha256", "bytes", "messages", "failures"):
        assert over.summary[key] == here.summary[key], key
    assert "private columns" in write(tmp_path / "run").read_text()


def test_a_forest_over_columns_of_nodes_is_that_of_one_machine(
    files: list[Path], there: tuple[Path, list[RunningNode]], tmp_path: Path
) -> None:
    """It draws by no generator of torch's, so nodes of this process will do."""
    here = execute(run_of("vertical-forest", files=files, aligned=20))
    over = execute(run_of("vertical-forest", there[0], aligned=20))
    for key in SAME:
        assert over.summary[key] == here.summary[key], key


def test_a_node_that_is_killed_in_the_middle_is_matched_again(
    files: list[Path], processes: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    keep = _MatchingSession._keep

    async def first_killed(self: Any, guest: Any, *rest: Any) -> None:
        if guest.party == 2 and not killed:
            killed.append(processes.nodes[1].pid)
            await asyncio.to_thread(processes.nodes[1].kill)
            await asyncio.to_thread(processes.nodes[1].start)
        await keep(self, guest, *rest)

    monkeypatch.setattr(_MatchingSession, "_keep", first_killed)
    found = execute(run_of(federation=processes.federation)).summary
    assert killed and found["state_sha256"] == execute(run_of(files=files)).summary["state_sha256"]


def test_what_cannot_be_is_reported(
    files: list[Path], there: tuple[Path, list[RunningNode]], tmp_path: Path
) -> None:
    run: RunConfig = run_of("split", there[0])
    with pytest.raises(ConfigError, match="add --engine net"):
        execute(run.model_copy(update={"engine": type(run.engine)()}))
    for columns, why in (
        ({"manifest": "a.csv"}, "leave files and manifest out"),
        ({"label": None}, "files need id"),
        ({"blocks_per_party": 2}, "only for a data set that is split"),
    ):
        with pytest.raises(ConfigError, match=why):
            run_of("split", there[0], **columns)
    four = run.model_copy(update={"data": run.data.model_copy(update={"clients": 4})})
    with pytest.raises(ConfigError, match=r"set data\.clients to 3"):
        execute(four)
    with pytest.raises(ConfigError, match="set rows to the file of the active party"):
        match(run, None, PrivateData(), node_set(federation_of(run)), resume=False)
    other = table(tmp_path / "other.csv", range(500, 600), 4, id="patient", label="state")
    with pytest.raises(DataError, match="0 people in common"):
        match(run, None, PrivateData(rows=other), node_set(federation_of(run)), resume=False)
    assert len(audits(there[1], "left a matching")) == 2 and not there[1][
        0
    ].service._matcher.others("")
