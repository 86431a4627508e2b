"""The words of `[data]` in a node's file: the same rows as in a simulation, and errors before work
starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.party_files import PartyFile
from fedloom.data.schema import check_own, read_rows
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import NodeParty, build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.remote.node.config import NodeConfig, read
from fedloom.remote.rpc_errors import CallRefused
from tests.node.hosts import RunRequest, node, opening

WORDS: dict[str, Any] = {
    "label": "ill",
    "group": "hospital",
    "id": "case",
    "keep": ["*", "mrn"],
    "drop": ["after_*"],
    "missing": "median",
    "test": "part",
}
AT_NODES: dict[str, Any] = {
    **WORDS,
    "classes": ["0", "1"],
    "categories": {"ward": ["?", "north", "south"]},
}
SCHEMA: dict[str, Any] = {
    "columns": [
        "age",
        "pressure",
        {"name": "ward", "categories": ["?", "north", "south"]},
        "smoker",
        "mrn",
    ],
    "label": "ill",
    "classes": ["0", "1"],
}
HEADER = "case,hospital,age,pressure,ward,smoker,after_days,part,ill,mrn"
OWNERS = ("ann", "bob")


def table(path: Path, owners: tuple[str, ...] = OWNERS, *, empty: str = "") -> Path:
    """The rows of some of two hospitals, 60 each; every ninth age and every eleventh ward is
    missing, and a label.
    """
    rng, lines = np.random.default_rng(4), [HEADER]
    for owner in OWNERS:
        for row in range(60):
            ill = rng.integers(2)
            age = empty if row % 9 == 4 else f"{rng.normal(50 + 9 * ill, 8):.1f}"
            ward = empty if row % 11 == 3 else ("north", "south")[rng.integers(2)]
            part = ("train", "train", "Test", "validation")[row % 4]
            label = empty if row == 21 else f"{ill}.0"
            numbers = (
                f"{rng.normal(120, 20):.2f},{ward},{str(row % 3 == 0).lower()},{rng.integers(9)}"
            )
            cells = f"{owner}-{row},{owner},{age},{numbers},{part},{label},{rng.integers(10**6)}"
            lines += [cells] * (owner in owners)
    path.write_text("\n".join([*lines, ""]))
    return path


def at_nodes(**data: Any) -> Any:
    values = {"name": "wards", "clients": 2, "row_schema": SCHEMA, **data}
    return check(
        {"run": {"method": "local", "rounds": 1, "models": {"pool": ["linear"]}, "data": values}}
    ).run


def node_file(folder: Path, rows: Path, **words: Any) -> NodeConfig:
    return node(folder, methods=["local"], data={"wards": {"rows": rows, **words}})


def party(folder: Path, number: int, rows: Path, **words: Any) -> NodeParty:
    """The party of a node with these words in its file."""
    own = node_file(folder, rows, **words).data["wards"].own
    return build_party(
        for_nodes(build(at_nodes(), PrivateData())), number, PrivateData(rows=rows, own=own)
    )


@pytest.mark.parametrize("missing", ["median", "most-frequent"])
@pytest.mark.parametrize("alone", [True, False], ids=["a file each", "one file"])
def test_a_node_and_a_simulation_have_the_same_rows(
    missing: str, alone: bool, tmp_path: Path
) -> None:
    words = {**WORDS, "missing": missing}
    both = table(tmp_path / "both.csv")
    run = {
        "method": "local",
        "rounds": 1,
        "models": {"pool": ["linear"]},
        "data": {"name": str(both), **words},
    }
    simulated = build(check({"run": run}).run)
    for number, owner in enumerate(OWNERS):
        rows = table(tmp_path / f"{owner}.csv", (owner,)) if alone else both
        there = party(tmp_path, number, rows, **words, **({} if alone else {"owner": owner}))
        mine, theirs = there.party.context, simulated.clients[number]().context
        assert mine.data is not None and theirs.data is not None
        assert (
            torch.allclose(mine.data.every, theirs.data.every, atol=1e-5) and len(mine.data) == 29
        )
        assert torch.equal(labels(mine.data), labels(theirs.data))
        assert torch.allclose(mine.tests["own"].every, theirs.tests["own"].every, atol=1e-5)
        assert (
            torch.equal(labels(mine.tests["own"]), labels(theirs.tests["own"]))
            and len(mine.tests["own"]) == 15
        )
        assert there.notes == ("1 of 45 rows have no label in 'ill' and are left out.",)


def labels(rows: Any) -> torch.Tensor:
    found: torch.Tensor = rows.y(torch.arange(len(rows)))
    return found


def test_a_parquet_file_says_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = table(tmp_path / "ann.csv", ("ann",))
    pandas.read_csv(rows).to_parquet(tmp_path / "ann.parquet")
    one, other = (
        party(tmp_path, 0, path, **WORDS).party.context for path in (rows, tmp_path / "ann.parquet")
    )
    assert one.data is not None and other.data is not None
    assert torch.equal(one.data.every, other.data.every) and torch.equal(
        labels(one.data), labels(other.data)
    )


def test_the_owner_s_share_of_test_rows_replaces_the_run_s(tmp_path: Path) -> None:
    rows = table(tmp_path / "ann.csv", ("ann",))
    words = {**WORDS, "test": 0.5, "drop": ["after_*", "part"]}
    there = party(tmp_path, 0, rows, **words).party.context
    assert there.data is not None and abs(len(there.data) - len(there.tests["own"])) <= 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"columns": ["age"]}, "columns was renamed: write keep"),
        ({"label": "sick"}, "data.label names the column 'sick', but 'wards' has only"),
        ({"id": "cases"}, "data.id names the column 'cases'.*Did you mean 'case'"),
        ({"drop": ["before_*"]}, "data.drop names the column"),
        ({"keep": ["agee"]}, "data.keep names the column 'agee', but 'wards' has only 'age'"),
        ({"keep": ["case"]}, "data.keep names the column 'case', which is the id already"),
        (
            {"missing": "mean"},
            "data.wards.missing: must be 'refuse', 'median', 'most-frequent' or 'indicator'",
        ),
        ({"test": "ward"}, r"'ward' \(data.test\) must say train or test"),
        ({"test": 1.5}, "a share must be above 0 and below 1"),
        ({"test": ["ann"]}, "names of owners do not apply at a node"),
        (
            {"rows": "both.csv"},
            r"'hospital' \(data.group\) names 2 owners, but a node has the rows of one: set "
            r"owner in \[data.wards\]",
        ),
        (
            {"rows": "both.csv", "owner": "an"},
            "no owner 'an' in column 'hospital'. Did you mean 'ann'",
        ),
        ({"owner": "ann", "group": None}, "owner needs group"),
        ({"rows": None, "dataset": "digits", "id": None}, "keep needs rows; remove it"),
    ],
)
def test_a_wrong_word_is_refused_when_the_node_starts(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    table(tmp_path / "both.csv")
    table(tmp_path / "ann.csv", ("ann",))
    values = {"rows": "ann.csv", **WORDS, **changes}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value]
    (tmp_path / "node.toml").write_text(
        'name = "n"\nmethods = ["local"]\n[data.wards]\n' + "\n".join([*lines, ""])
    )
    with pytest.raises(ConfigError, match=why):
        read(tmp_path / "node.toml")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"keep": ["age", "ward"], "drop": []},
            "columns 'pressure', 'smoker', 'mrn' of wards are not allowed here; allowed: age, ward",
        ),
        (
            {"keep": []},
            "columns 'age', 'pressure', 'ward', 'smoker', 'mrn' of wards are not allowed here; "
            "allowed: none",
        ),
        (
            {"drop": ["smo*"]},
            "columns 'smoker' of wards are not allowed here; allowed: *, mrn, except smo*",
        ),
        (
            {"id": "age"},
            "columns 'age' of wards are not allowed here; allowed: *, mrn, except after_*",
        ),
        (
            {"missing": "indicator"},
            "missing of wards is 'indicator' here and 'refuse' in the run; indicator must be set "
            "in both or in neither, as it adds columns",
        ),
    ],
)
def test_a_run_gets_no_more_than_the_file_says(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    rows = table(tmp_path / "ann.csv", ("ann",))
    text = for_nodes(build(at_nodes(), PrivateData())).model_dump_json()
    asked = RunRequest(node_file(tmp_path, rows, **{**AT_NODES, **changes}))
    try:
        with pytest.raises(CallRefused) as refusal:
            asked("open", opening(text))
        assert refusal.value.words == why
    finally:
        asked.close()


def test_an_identifier_must_be_kept_by_name_and_gaps_are_refused(tmp_path: Path) -> None:
    rows = table(tmp_path / "ann.csv", ("ann",))
    with pytest.raises(
        DataError,
        match=r"The run uses column 'mrn', which is an identifier by its name. Name it in",
    ):
        party(tmp_path, 0, rows, **{**WORDS, "keep": ["*"]})
    refusing = {**AT_NODES, "keep": ["*"], "drop": ["after_*", "mrn"], "missing": "refuse"}
    with pytest.raises(
        DataError,
        match=r"'age' of .*lacks 6 of 44 numbers: set missing in \[data.wards\] to median",
    ):
        check_own(rows, "wards", node_file(tmp_path, rows, **refusing).data["wards"].own)
    party(tmp_path, 0, rows, **{**WORDS, "missing": "refuse"})  # a run does not fail by them
    images = at_nodes(
        row_schema={"kind": "image", "classes": ["0", "1"], "shape": [1, 2, 2]}
    ).data.row_schema.build()
    with pytest.raises(
        DataError,
        match=r"data.group, data.id, data.drop, data.keep, data.test of 'wards' apply to tables",
    ):
        read_rows(rows, images, "wards", node_file(tmp_path, rows, **WORDS).data["wards"].own)
    with pytest.raises(
        ConfigError,
        match=r"keep does not apply with row_schema: leave it out, as each node's owner",
    ):
        at_nodes(keep=["age"])


def test_keep_and_drop_choose_columns_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "lab.csv"
    path.write_text("person,name,iron,sugar\n1,Ann,2.5,3\n2,Bob,3.5,4\n")
    options = node_file(tmp_path, path, id="person", drop=["name"]).data["wards"].own.options
    assert set(PartyFile.passive(path, "person", "ill", options).columns) == {"iron", "sugar"}
    assert set(PartyFile.passive(path, "person", "ill").columns) == {"name", "iron", "sugar"}
    none = node_file(tmp_path, path, id="person", drop=["*"]).data["wards"].own.options
    with pytest.raises(DataError, match=r"leave no column"):
        PartyFile.passive(path, "person", "ill", none)
