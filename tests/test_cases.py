"""The cases of the documentation: their files are valid, their upper bound sees all rows, their table pairs seeds."""

from __future__ import annotations

import runpy
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import methods
from fedloom.experiment.plan.reading import check
from tests.methods.groups import planted
from tests.toy import Toy

CASES = Path(__file__).parents[1] / "examples" / "cases"
TABLE = runpy.run_path(str(CASES / "table.py"))


@pytest.mark.parametrize("file", sorted(CASES.glob("*.toml")), ids=lambda f: f.stem)
def test_a_case_is_a_valid_comparison(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES.parents[1])
    content = tomllib.loads(file.read_text())
    title, compare = content.pop("title"), content.pop("compare")
    assert len(compare["seeds"]) >= (1 if file.stem.endswith("-rates") else 5)  # a search, or the case itself
    if "columns" not in content:
        content["data"] = {"name": "digits", "clients": 4, "public_rows": content["data"]["public_rows"]}
    runs = check({"title": title, "run": content, "compare": compare}).runs()
    assert len(runs) == len(compare["seeds"]) * len(compare["methods"])
    assert all(run.resolve() for run in runs)


def test_pooled_rows_are_those_of_all_clients_and_one_model_results() -> None:
    method = methods.load(str(CASES / "pooled.py"))
    toy = Toy(method, client_contexts=planted(0, m=3, n=20), epochs=1, batch_size=8, lr=0.05).run(2)
    assert len(toy.server.y) == 60
    sent = sum(e.bytes for e in toy.fed.ledger if e.receiver == "server")
    assert sent == 60 * (6 * 4 + 8)
    before = toy.server.params
    assert not torch.equal(before["head.weight"], toy.party(0).params["head.weight"])
    toy.party(0).prepare(eval_mode="", broadcast=toy.server.broadcast())
    assert torch.equal(before["head.weight"], toy.party(0).params["head.weight"])


def test_differences_are_paired_by_seed_and_averaged_over_clients() -> None:
    a, b = [[3.0, 5.0], [4.0, 8.0], [2.0, 6.0]], [[1.0, 3.0], [1.0, 5.0], [1.0, 5.0]]
    seeds, clients = (TABLE["difference"](a, b, 0.0, over) for over in ("seeds", "clients"))
    assert seeds.mean == pytest.approx(2.0) == clients.mean
    assert seeds.low == pytest.approx(2 - 4.303 * 1 / 3**0.5, abs=1e-3)  # differences 2, 3 and 1


def test_seconds_are_of_rounds_and_shared_in_lockstep_and_auc_is_of_own_rows() -> None:
    result: dict[str, Any] = {"engine": {"remarks": ["in lock-step, runs: 5"]}, "scores": {}}
    result["seconds"] = {"total": 99.0, "setup": 1.0, "evaluate": 9.0, "save": 1.0, "local": 20.0, "transfer": 30.0}
    assert TABLE["seconds"](result) == pytest.approx(10.0)
    result["client_scores"] = {"auc": {"per_client": [0.1]}, "own auc": {"per_client": [0.5, 0.75]}}
    assert TABLE["values"](result, True) == [50.0, 75.0]
    assert TABLE["values"]({"scores": {"auc": 0.625}}, True) == [62.5]


def test_a_case_makes_its_table_and_picture(
    tmp_path: Path, fedloom: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CASES, tmp_path / "examples" / "cases")
    rows = ["hospital,age,disease"] + [f"{'ab'[i % 2]},{i % 7},{i % 3 % 2}" for i in range(80)]
    (tmp_path / "heart.csv").write_text("\n".join(rows))
    entries = '[{method="alone"}, {method="examples/cases/pooled.py", name="pooled"}]'
    some = [f"compare.methods={entries}", "compare.seeds=[0, 1, 2]", "data.public_rows=8", "rounds=1"]
    options = [part for value in some for part in ("-s", value)]
    fedloom("run", "examples/cases/heart.toml", "--quiet", "--out", "out", *options)
    found = TABLE["read"](tmp_path / "out")
    assert {name: sorted(results) for name, results in found.items()} == {"alone": [0, 1, 2], "pooled": [0, 1, 2]}
    monkeypatch.setattr("sys.argv", ["table.py", "out", "--picture", "a.svg"])
    TABLE["main"]()
    assert "| pooled |" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
