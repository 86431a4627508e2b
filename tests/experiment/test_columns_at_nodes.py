"""Nodes with texts, dates and different columns: as in a simulation, and no more than their owners
said.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.schema import check_own
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.rpc_errors import CallRefused
from tests.node.hosts import RunRequest, node, opening

FIXED = {"note": "text", "seen": "date"}
SCHEMA: dict[str, Any] = {
    "columns": [
        "age",
        {"name": "ward", "categories": ["?", "north", "south"]},
        {"name": "note", "encode": "text"},
        {"name": "seen", "encode": "date"},
    ],
    "label": "ill",
    "classes": ["0", "1"],
}
ANN = {
    "label": "ill",
    "classes": ["0", "1"],
    "keep": ["age", "note", "seen"],
    "encode": FIXED,
    "lacks": ["ward"],
    "missing": "indicator",
    "test": "part",
}
BOB = {**ANN, "keep": ["ward", "note"], "encode": {"note": "text"}, "lacks": ["age", "seen"],
       "categories": {"ward": ["?", "north", "south"]}}  # fmt: skip


def table(path: Path, owner: str) -> Path:
    """Forty rows; ann lacks `ward`, bob `age` and `seen`."""
    lines = []
    for row in range(40):
        ward = ("north", "south")[row % 3 % 2]
        age = str(50 + row * 7 % 30)
        seen = f"{row % 28 + 1:02}.02.2024"
        note = ("", f"coughs {row}")[row % 5 > 0]
        own = (age, note, seen) if owner == "ann" else (ward, note)
        lines.append(",".join([*own, "test" if row % 4 == 2 else "train", str(row * 3 % 7 % 2)]))
    header = "age,note,seen,part,ill" if owner == "ann" else "ward,note,part,ill"
    path.write_text("\n".join([header, *lines, ""]))
    return path


def run_of(data: dict[str, Any]) -> Any:
    values = {"method": "local", "rounds": 1, "models": {"pool": ["linear"]}, "data": data}
    return check({"run": values}).run


def at_nodes(**change: Any) -> Any:
    return run_of(
        {"name": "wards", "clients": 2, "missing_columns": "allow", "row_schema": SCHEMA, **change}
    )


def node_file(folder: Path, rows: Path, **words: Any) -> NodeConfig:
    return node(folder, methods=["local"], data={"wards": {"rows": rows, **words}})


def test_nodes_with_different_columns_have_the_rows_of_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    files = {owner: table(tmp_path / f"{owner}.csv", owner) for owner in ("ann", "bob")}
    for owner, file in files.items():  # the simulation reads a folder, whose files name their owner
        header, *rows = file.read_text().splitlines()
        text = "\n".join([f"site,{header}", *(f"{owner},{row}" for row in rows), ""])
        (tmp_path / "both" / f"{owner}.csv").write_text(text)
    simulated = build(
        run_of(
            {
                "name": str(tmp_path / "both"),
                "label": "ill",
                "group": "site",
                "encode": FIXED,
                "missing_columns": "allow",
                "test": "part",
            }
        )
    )
    assert simulated.data.dataset is not None
    names = simulated.data.dataset.columns
    for number, (owner, words) in enumerate((("ann", ANN), ("bob", BOB))):
        own = node_file(tmp_path, files[owner], **words).data["wards"].own
        assert check_own(files[owner], "wards", own) == ()
        plan = for_nodes(build(at_nodes(), PrivateData()))
        mine = build_party(plan, number, PrivateData(rows=files[owner], own=own)).party.context
        theirs = simulated.clients[number]().context
        assert mine.data is not None and theirs.data is not None
        columns = at_nodes().data.row_schema.build("indicator", "allow").columns
        for name in names:
            one = mine.data.every[:, columns.index(name)]
            other = theirs.data.every[:, names.index(name)]
            assert torch.allclose(one, other[:40] if number == 0 else other[-40:], atol=1e-4), name


@pytest.mark.parametrize(
    ("run", "words", "problem"),
    [
        (
            {"missing_columns": "refuse", "missing": "indicator"},
            ANN,
            "columns 'ward' of wards are missing here",
        ),
        ({}, {**ANN, "lacks": []}, "columns 'ward' of wards are not allowed here"),
        (
            {},
            {**ANN, "encode": {"note": "text"}},
            "encode of 'seen' must be that of this node: none",
        ),
        ({"missing": "median"}, ANN, "missing of wards is 'indicator' here"),
    ],
)
def test_a_node_refuses_what_its_owner_did_not_say(
    run: dict[str, Any], words: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    text = for_nodes(build(at_nodes(**run), PrivateData())).model_dump_json()
    asked = RunRequest(node_file(tmp_path, table(tmp_path / "ann.csv", "ann"), **words))
    try:
        with pytest.raises(CallRefused) as refusal:
            asked("open", opening(text))
        assert problem in refusal.value.words
    finally:
        asked.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"lacks": ["age"]}, "lacks names the column 'age', which"),
        ({"encode": {"note": "date"}}, "'note' has dates, but also 'coughs 1'"),
        ({"encode": {"seen": "date"}}, r"set encode\.note there"),
        ({"encode": {"none": "date"}}, r"data\.encode names the column 'none'"),
    ],
)
def test_an_owner_is_told_when_the_node_starts(
    words: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    rows = table(tmp_path / "ann.csv", "ann")
    with pytest.raises(DataError, match=problem):
        check_own(
            rows,
            "wards",
            node_file(
                tmp_path,
                rows,
                **{**ANN, "keep": ["*", "note"], "drop": ["part"], "test": 0.5, **words},
            )
            .data["wards"]
            .own,
        )


def test_an_agreed_scale_leaves_texts_and_circles_and_scales_the_years_of_dates(
    tmp_path: Path,
) -> None:
    rows = table(tmp_path / "ann.csv", "ann")
    run = at_nodes(row_schema={**SCHEMA, "scale": {"age": [60, 10], "seen": [2024.5, 0.5]}})
    own = node_file(tmp_path, rows, **ANN).data["wards"].own
    found = build_party(
        for_nodes(build(run, PrivateData())), 0, PrivateData(rows=rows, own=own)
    ).party.context.data
    assert found is not None
    form = run.data.row_schema.build("indicator", "allow")
    x = dict(zip(form.columns, found.every.T, strict=True))
    assert float(x["seen year"][0]) == pytest.approx((24 + 31 / 366 - 24.5) / 0.5, abs=0.01)
    fixed = torch.stack(
        [x[name] for name in form.columns if "#" in name or " sin" in name or " cos" in name]
    )
    assert float(fixed.abs().max()) <= 1 and float(fixed[:32, 1].norm()) == pytest.approx(
        1, abs=1e-5
    )
    assert (x["ward=?"] == 1).all() and (x["seen missing"] == 0).all()
    with pytest.raises(ConfigError, match="each column of numbers or dates and of no other"):
        at_nodes(row_schema={**SCHEMA, "scale": {"age": [60, 10]}})
