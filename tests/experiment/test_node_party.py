"""A party made at a node equals the one in a run on one machine, and both sides can check it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.core import message
from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import (
    build_party,
    differences,
    expected,
    for_nodes,
    suspicious,
)
from fedloom.experiment.plan.pretrained import training_of
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.session import fingerprint
from fedloom.methods.averaging import fedavg

ROWS: dict[str, Any] = {
    "data": {"clients": 3, "public_rows": 60, "own_test_rows": 20},
    "models": {"pool": ["mlp", "linear"]},
}
COLUMNS: dict[str, Any] = {
    "data": {"name": "breast_cancer", "clients": 3},
    "columns": {"aligned": 24, "unaligned": 20, "blocks_per_party": 1},
}


def run(method: str, **changes: Any) -> RunConfig:
    common = COLUMNS if method in ("proto-evfl", "split") else ROWS
    return check({"run": {"method": method, "rounds": 2, **common, **changes}}).run


def sent(config: RunConfig) -> RunConfig:
    """As a node reads it."""
    return RunConfig(**json.loads(config.model_dump_json()))


ONE = {"models": {"pool": ["mlp"]}}
CASES: dict[str, dict[str, Any]] = {
    "fedal": {},
    "fedmd": {"models": {"pool": ["mlp", "knn"]}, "seed": 3},
    "feddf": {},
    "fedavg": ONE,
    "gossip": {**ONE, "topology": {"kind": "ring"}},
    "afind-plus": {**ONE, "topology": {"kind": "regular", "degree": 2}},
    "augfl": {**ONE, "pretrained": {"model": "mlp", "epochs": 1}},
    "fedpcl": {**ONE, "pretrained": {"model": "mlp", "epochs": 1}},
    "proto-evfl": {},
    "split": {},
}


@pytest.mark.parametrize("method", list(CASES))
def test_a_node_s_party_is_that_of_the_whole_plan(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # any training would fail
    monkeypatch.setattr("fedloom.experiment.plan.pretrained.trained_file", None)
    plan = build(run(method, **CASES[method]))
    for number in set(plan.names) - set(plan.colocated):
        own = plan.clients[number]()
        there = build_party(sent(for_nodes(plan)), number)
        assert type(there.party) is type(own) and there.party.context.id == number
        assert message.digest(there.party.state()) == message.digest(own.state())
        assert tuple(there.party.context.neighbours) == tuple(own.context.neighbours)
        assert message.digest(there.party.context.unlabeled(1, steps=1, size=4)) == message.digest(
            own.context.unlabeled(1, steps=1, size=4)
        )
        assert there.facts == expected(plan, number)
        assert there.facts["role"] == plan.names[number]
        assert json.loads(json.dumps(there.facts)) == there.facts
        assert (
            (own.context.encoder is None)
            == (there.party.context.encoder is None)
            == ("pretrained encoder" not in plan.method.needs)
        )
        if own.context.encoder and there.party.context.encoder:
            a, b = own.context.encoder().state_dict(), there.party.context.encoder().state_dict()
            assert message.digest(dict(a)) == message.digest(dict(b))


def test_what_only_the_coordinator_has_is_not_sent(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text((Path(__file__).parents[2] / "examples" / "fedavg.py").read_text())
    own = run(f"{page}", **ONE, engine={"workers": 2}, data={**ROWS["data"], "root": str(tmp_path)})
    plan = build(own)
    given = for_nodes(plan)
    assert str(tmp_path) not in given.model_dump_json() and given.method == plan.method.name
    assert given.engine.workers == 1 and given.data.root is None and given.params == own.params
    there = build_party(given.model_copy(update={"method": str(page)}), 1)
    assert there.facts == expected(plan, 1)
    page.write_text(page.read_text() + "\n")
    assert differences(expected(plan, 1), there.facts)[0].startswith(
        "its page of fedavg-example is not"
    )


def test_a_model_of_a_file_is_sent_by_its_name(tmp_path: Path) -> None:
    from fedloom.experiment.plan.build import data_of, pretrained_of
    from fedloom.experiment.plan.pretraining import train

    trained = run("fedpcl", **ONE, pretrained={"model": "mlp", "epochs": 1, "norm": "none"})
    dataset, shares = data_of(trained)
    file = tmp_path / "model.safetensors"
    train(
        training_of(pretrained_of(trained, "image"), dataset, shares.server, "cpu"),
        file,
        lambda *_: None,
    )
    plan = build(
        run(
            "fedpcl",
            **ONE,
            pretrained={"file": str(file)},
            data={**ROWS["data"], "server_rows": len(shares.server)},
        )
    )
    given = for_nodes(plan)
    assert (given.pretrained.file, given.pretrained.model, given.pretrained.norm) == (
        None,
        "mlp",
        "none",
    )
    known = expected(plan, 2)
    file.unlink()
    assert build_party(given, 2).facts == known
    assert for_nodes(build(run("fedavg", **ONE))).pretrained.model is None


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"topology": {"kind": "edges", "file": "EDGES"}}, "topology.file"),
        ({"data": {"name": "DATA", "clients": 3}}, "data.name"),
    ],
)
def test_a_run_that_needs_this_machine_s_files_is_refused(
    changes: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    edges, data = tmp_path / "edges", tmp_path / "rows.csv"
    edges.write_text("0,1\n1,2\n0,2\n")
    data.write_text("a,label\n" + "".join(f"{k / 2},{k % 2}\n" for k in range(80)))
    files = {"EDGES": str(edges), "DATA": str(data)}
    named = json.loads(
        json.dumps(changes), object_hook=lambda d: {k: files.get(str(v), v) for k, v in d.items()}
    )
    with pytest.raises(ConfigError, match=setting):
        for_nodes(build(run("gossip", models={"pool": ["linear"]}, **named)))


def test_a_difference_names_both_values() -> None:
    plan = build(run("fedal"))
    other = build(run("fedal", data={**ROWS["data"], "public_rows": 61}, seed=1))
    assert differences(expected(plan, 0), expected(plan, 0)) == []
    mine, theirs = expected(plan, 0), expected(other, 0)
    messages = differences(mine, theirs)
    assert {line.split(":")[0] for line in messages} >= {"config", "public", "data"}
    assert f"public: {mine['public'][:8]}… here, {theirs['public'][:8]}… there" in messages
    assert differences({"shape": [1, 8, 8]}, {"shape": [1, 9]}) == [
        "shape: number 2 of 3 is 8 here, of 2 9 there"
    ]
    assert differences({"a": [1]}, {"a": [1, 2]}) == [
        "a: number 2 of 1 is missing here, of 2 2 there"
    ]
    assert differences({"a": 1}, {"b": "x" * 500}) == [
        "a: 1 here, missing there",
        f"b: missing here, '{'x' * 59}… there",
    ]


def test_a_page_that_a_node_lacks_or_has_in_another_version_is_named_with_the_repair(
    tmp_path: Path,
) -> None:
    source = Path(fedavg.__file__).read_text()
    ours, theirs = tmp_path / "mine.py", tmp_path / "theirs.py"
    ours.write_text(source + "# ours\n")
    theirs.write_text(source)
    plan, old = build(run(f"{ours}:fedavg", **ONE)), build(run(f"{theirs}:fedavg", **ONE))
    mine = expected(plan, 0)
    without = build_party(sent(for_nodes(plan)), 0).facts  # a node finds the method by its name
    (line,) = differences(mine, without)
    repair = "copy the file there, and list it in pages of node.toml"
    shown = hashlib.sha256(ours.read_bytes()).hexdigest()[:8]
    assert (
        line == f"its page of fedavg is not the coordinator's: {repair} ({shown}… here, 'built in' "
        "there)"
    )
    (line,) = differences(mine, expected(old, 0))
    assert repair in line and line.count("…") == 2
    # as a node with this page does
    named = sent(for_nodes(plan)).model_copy(update={"method": str(ours)})
    assert differences(mine, build_party(named, 0).facts) == []


def test_a_party_that_does_not_exist_is_refused() -> None:
    given = for_nodes(build(run("split")))
    for number, why in ((0, "runs beside the server"), (3, "no party 3"), (-1, "no party -1")):
        with pytest.raises(ConfigError, match=why):
            build_party(given, number)


def test_what_could_run_code_or_read_files_is_found(tmp_path: Path) -> None:
    assert suspicious(for_nodes(build(run("fedal")))) == []
    bad: dict[str, dict[str, Any]] = {
        "method": {"method": "page.py"},
        "data.root": {"data": {"root": "/x"}},
        "data.partition": {"data": {"partition": "os:system"}},
        "models.pool": {"models": {"pool": ["os:system"]}},
        "topology.file": {"topology": {"kind": "edges", "file": "e"}},
        "pretrained.file": {"pretrained": {"file": "f"}},
        "pretrained.model": {"pretrained": {"model": "hf:somebody/model"}},
        "columns.files": {"columns": {"files": ["a", "b"], "id": "i", "label": "l"}},
        "columns.manifest": {"columns": {"manifest": "m"}},
        "engine.address": {"engine": {"address": "ray://x"}},
    }
    for setting, values in bad.items():
        (messages,) = suspicious(RunConfig(**values))
        assert messages.startswith(setting)
    assert suspicious(RunConfig(models={"pool": ["my.nets:small"]}), ["my.nets:small"]) == []


def test_where_a_node_has_folders_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cohort").mkdir()
    messages = {
        str(suspicious(RunConfig(pretrained={"model": m})))
        for m in ("hf:~", "hf:cohort", "hf:nothing")
    }
    assert len(messages) == 1 and tmp_path.name not in messages.pop()


def test_who_continues_must_have_the_same_settings() -> None:
    marks = {
        fingerprint(build(run("fedal", **c)))
        for c in ({}, {"engine": {"workers": 2}}, {"name": "other"})
    }
    assert len(marks) == 1
    assert fingerprint(build(run("fedal", seed=1))) not in marks
    assert fingerprint(build(run("fedal", params={"tau": 3}))) not in marks
