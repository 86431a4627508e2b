"""Whether a run opens depends on the run, the node's config and the number of rows, and on no value
in the file.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.schema import DataSchema, read_rows
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.remote.node.config import read
from fedloom.remote.rpc_errors import CallRefused
from tests.experiment.test_own_data import ALLOWED, FORM, rows, run
from tests.node.hosts import RunRequest, node, opening

WORDS = ("x", "y", "z", "?")
ODD = (
    "1.5,9.0,z,three",
    ",,,",
    "many,-inf,x,one",
    "1e39,1e300,unheard of,two",
    "1000000001,1000000002,y,one",
    "7,7,?,",
)


def opened(folder: Path, path: Path, text: str) -> tuple[str, ...]:
    """What the coordinator sees of a run that it opens."""
    data = {"wards": {"rows": path, **ALLOWED, "categories": {"c": ["x", "y"]}}}
    ask = RunRequest(node(folder, methods=["local"], data=data))
    try:
        return ("answered", repr(ask("open", opening(text))))
    except CallRefused as refusal:
        return (refusal.code, refusal.words)
    finally:
        ask.close()


def replaced(path: Path, cells: str) -> Path:
    """The file with another row."""
    lines = rows(path, 80, 3).read_text().splitlines()
    path.write_text("\n".join([*lines[:8], cells, *lines[9:], ""]))
    return path


def texts() -> dict[str, str]:
    """Runs with every subset of the words of a category, and of the classes."""
    found: dict[str, Any] = {}
    for count in range(1, len(WORDS) + 1):
        for words in combinations(WORDS, count):
            found["categories " + " ".join(words)] = {
                "columns": ["a", "b", {"name": "c", "categories": words}]
            }
    for classes in (("one", "two"), ("two", "one"), ("one", "three"), ("one", "two", "three")):
        found["classes " + " ".join(classes)] = {"classes": classes}
    found["numbers"] = {"columns": ["a", "b", "c"]}
    return {
        name: for_nodes(
            build(run(method="local", data={"row_schema": {**FORM, **form}}), PrivateData())
        ).model_dump_json()
        for name, form in found.items()
    }


def test_every_choice_of_words_opens_alike_whatever_a_row_has(tmp_path: Path) -> None:
    usual = rows(tmp_path / "usual.csv", 80, 3)
    other = [replaced(tmp_path / f"{n}.csv", c) for n, c in enumerate(ODD)]
    outcomes = {}
    for name, text in texts().items():
        each = [opened(tmp_path / f"{name} {path.stem}", path, text) for path in (usual, *other)]
        assert len({*each}) == 1, f"{name}: {[one[1][:60] for one in each]}"
        outcomes[name] = each[0][0]
    assert [name for name, code in outcomes.items() if code == "answered"] == [
        "categories x y", "classes one two", "classes two one",
    ]  # fmt: skip


OTHER = (
    ",,,",
    "nan,inf,nan,7",
    "1e39,0000-00-00,\x1b[2J,1e300",
    "-0,31.02.2021,,-5",
    "1e400,99999-01-01,y,1e39",
    "x,y,z,nan",
)


@pytest.mark.parametrize("scale", [None, {"a": (0, 1), "day": (2015, 5)}])
def test_numbers_dates_and_texts_open_alike_whatever_a_row_has(scale: Any, tmp_path: Path) -> None:
    """Also the number to predict: no value of it is read before the run begins."""
    rng = np.random.default_rng(3)
    draw = rng.integers(1, 9, (80, 3))
    lines = [f"{a}.5,201{b}-0{c}-1{a},word {b},{c}.25" for a, b, c in draw]
    columns = ["a", {"name": "day", "encode": "date"}, {"name": "text", "encode": "text"}]
    form = {
        "columns": columns,
        "label": "y",
        "label_scale": (1, 2),
        "classes": (),
        **({"scale": scale} if scale else {}),
    }
    kind = run(
        method="local", models={"pool": ["linear"]}, data={"row_schema": form, "missing": "median"}
    )
    text = for_nodes(build(kind, PrivateData())).model_dump_json()
    seen = set()
    for k, cells in enumerate(("1.5,2020-01-31,hello world,3.0", *OTHER)):
        (path := tmp_path / f"{k}.csv").write_text(
            "\n".join(["a,day,text,y", *lines[:8], cells, *lines[9:], ""])
        )
        own = {
            "keep": ["a", "day", "text"],
            "label": "y",
            "label_scale": (1, 2),
            "missing": "median",
        }
        data = {"wards": {"rows": path, **own, "encode": {"day": "date", "text": "text"}}}
        ask = RunRequest(node(tmp_path / f"{k}", methods=["local"], data=data))
        seen.add(repr(ask("open", opening(text))))
        ask.close()
    assert len(seen) == 1


def test_a_value_outside_is_no_word_and_a_foreign_label_leaves_its_row_out(tmp_path: Path) -> None:
    own = node(tmp_path, data={"wards": {"rows": tmp_path / "a.csv", **ALLOWED}}).data["wards"].own
    sent = for_nodes(build(run(method="local"), PrivateData()))
    counts = []
    for cells in ("0.5,9.0,z,one", "0.5,9.0,x,three"):
        place = build_party(sent, 0, PrivateData(rows=replaced(tmp_path / "a.csv", cells), own=own))
        assert place.counts is not None and place.party.context.data is not None
        pool = place.party.context.data.pool
        counts.append(sum(place.counts))
        assert torch.isfinite(pool).all() and int((pool[:, 2:].sum(1) == 0).sum()) == ("z" in cells)
    assert counts == [80, 79]


def test_a_picture_of_a_foreign_class_is_left_out(tmp_path: Path) -> None:
    for label, count in (("one", 4), ("two", 4), ("three", 1)):
        (tmp_path / "own" / label).mkdir(parents=True)
        for k in range(count):
            Image.fromarray(np.full((2, 2), 40 * k, np.uint8)).save(
                tmp_path / "own" / label / f"{k}.png"
            )
    form = DataSchema("image", ("one", "two"), shape=(1, 2, 2))
    own = (
        node(tmp_path, data={"wards": {"rows": tmp_path / "own", "label": None}}).data["wards"].own
    )
    assert len(read_rows(tmp_path / "own", form, "wards", own).y) == 8
    with pytest.raises(DataError, match="1 folders that are not classes"):
        read_rows(tmp_path / "own", form, "wards")


@pytest.mark.parametrize(
    ("cells", "change", "why"),
    [
        ("old,9.0,x,one", {}, "'a' must hold a finite number in each row, but 1 of 80"),
        (",9.0,x,one", {}, r"'a' of .* lacks 1 of 80 numbers: set missing in \[data.wards\]"),
        ("1e39,9.0,x,one", {"missing": "median"}, "'a' must hold a finite number"),
        (
            "0.1,9.0,x,one",
            {"categories": {}},
            "'c' must hold a finite number .* list its words in categories",
        ),
        ("0.1,9.0,x,one", {"classes": []}, "label needs classes"),
        (
            "0.1,9.0,x,one",
            {"categories": {"c": ["x", "y"], "d": ["x"]}},
            "categories names the column 'd'",
        ),
    ],
)
def test_its_owner_learns_at_the_start_what_does_not_fit(
    cells: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    replaced(tmp_path / "own.csv", cells)
    with pytest.raises(ConfigError, match=why):
        read(written(tmp_path, change))


def test_values_outside_are_in_the_log_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replaced(tmp_path / "own.csv", "0.1,9.0,z,three")
    read(written(tmp_path, {}))
    assert "1 of 80 rows have a label outside classes and are left out" in caplog.text
    assert "1 of 79" not in caplog.text  # the word z is in a row that is left out
    replaced(tmp_path / "own.csv", "0.1,9.0,z,one")
    read(written(tmp_path, {}))
    assert "1 of 80 values of column 'c' are outside its categories" in caplog.text


def written(folder: Path, change: dict[str, Any]) -> Path:
    """A node's config file."""
    values = {**ALLOWED, **change}
    lines = [
        'name = "node"',
        "insecure = true",
        'callers = ["hub"]',
        'methods = ["local"]',
        "[data.wards]",
    ]
    lines += ['rows = "own.csv"'] + [
        f"{key} = {value!r}" for key, value in values.items() if key != "categories"
    ]
    lines += [
        "[data.wards.categories]",
        *(f"{key} = {value!r}" for key, value in values["categories"].items()),
    ]
    (folder / "node.toml").write_text("\n".join(lines).replace("'", '"'))
    return folder / "node.toml"
