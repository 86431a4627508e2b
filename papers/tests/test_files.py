"""Every published table and figure that fedloom ships: it can be read, and all its runs can be
made.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from fedloom.core.errors import ConfigError
from fedloom.experiment.config.overrides import merged
from fedloom_papers.shipped import shipped
from fedloom_papers.spec import SCALES, Reproduction, Scale, parsed, read

PUBLISHED = [
    *(f"fedal-table-{n}" for n in (4, 5, 6, 7, 8, 9)),
    *(f"fedal-figure-{n}" for n in (2, 4, 6, 7, 8, 9, 10, 11)),
    *(f"fedal-section-{n}" for n in (5, 6)),
    *(f"afind-table-{n}" for n in (1, 2, 3, 4)),
    *(f"afind-figure-{n}" for n in (2, 4, 5, 8)),
    *(f"evfl-table-{n}" for n in (2, *range(4, 14))),
    *(f"evfl-figure-{n}" for n in (4, 5, 6, 7)),
    "evfl-section-5",
    "augfl-table-2",
    *(f"augfl-figure-{n}" for n in range(2, 10)),
    "augfl-section-3",
]
"""In the order in which they are shown."""
known = cache(read)


def test_every_published_table_and_figure_has_a_file() -> None:
    assert [*shipped()] == PUBLISHED


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_all_cells_are_valid_runs_on_shared_splits(
    name: str, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    for extra in (
        "torchvision",
        "transformers",
    ):  # where one figure's large models come from; not in the tests' environment
        monkeypatch.setitem(sys.modules, extra, ModuleType(extra))
    found = known(name)
    cells = [*found.cells(scale, None if scale == "small" else 1)]  # seeds differ in nothing else
    assert len(cells) == len(found.rows) * len(found.columns)
    assert found.place.split()[0].lower() == name.split("-")[1]
    assert not any("\n" in about for about in (found.about, found.small.about, found.paper.about))
    for cell in cells:
        assert cell.runs or cell.untestable, cell.name
        assert [run.seed for run in cell.runs] == [*range(len(cell.runs))]
        assert len(cell.runs) >= (3 if scale == "small" else 1) or cell.untestable
        for run in cell.runs[:1]:
            run.resolve()
    assert any(cell.runs for cell in cells)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_claimed_can_be_decided_or_it_says_why_not(name: str) -> None:
    found = known(name)
    assert found.claims or not any(row.published for row in found.rows)
    runnable = {cell.row.name for cell in found.cells("small", 1) if cell.runs}
    for claim in found.claims:
        for side in (claim.left, claim.right):
            row = side.partition(" @ ")[0] if isinstance(side, str) else None
            able = row is None or "small" in claim.untestable or row in runnable
            assert able, f"{claim.text}: {row} has no run at the small scale"


TEXT = """
title = "T"
system = "fedal"
place = "Table I"
[[rows]]
name = "A"
run = { method = "fedal", rounds = 2 }
published = { "one" = 70, "two" = [71.5, 0.4] }
[[rows]]
name = "B"
run = { method = "local" }
paper = { params = { lr = 0.1 } }
[[columns]]
name = "one"
run = { data = { partition = "pathological", options = { classes = 2 } } }
[[columns]]
name = "two"
untestable = { small = "no such data here" }
[[claims]]
text = "A beats B."
left = "A"
right = "B"
[small]
[small.run]
iterations = 10
[small.run.data]
clients = 4
options = { alpha = 0.5 }
[paper]
seeds = 5
run = { iterations = 100 }
"""


def made() -> Reproduction:
    return parsed(TEXT, "mine")


TABLE_I = {"ModelNet-10": 9, "Fashion-MNIST": 8, "Credit card default": 9, "Adult census income": 6}
"""Proto-EVFL's Table I: epochs (τ) by data set, one number for passive and active parties."""
VERTICAL_ROWS = {"active-only", "split", "ss-vfl", "fedhssl", "proto-evfl"}


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if name.startswith("evfl") and name != "evfl-table-2"]
)
def test_at_the_papers_scale_epochs_are_those_of_table_i(name: str) -> None:
    found, checked = known(name), 0
    for cell in found.cells("paper", 1):
        for run in cell.runs:
            if run.method not in VERTICAL_ROWS:
                continue
            epochs = TABLE_I[found.data(cell.row, cell.column, "paper")]
            assert run.params["epochs"] == epochs, cell.name
            if (
                run.method == "proto-evfl"
                and run.params.get("steps") != 0
                and "τ = 8" not in cell.row.name
            ):
                assert run.params["local_epochs"] in ("epochs", epochs), cell.name
            checked += 1
    assert checked


def test_a_cell_is_made_of_scale_column_and_row() -> None:
    found = made()
    one, two, *_ = found.cells("small")
    run = one.runs[2]
    assert (run.method, run.rounds, run.iterations, run.seed) == ("fedal", 2, None, 2)
    assert (run.data.clients, run.data.partition, run.data.options) == (
        4,
        "pathological",
        {"classes": 2},
    )
    assert (two.runs, two.untestable, two.published) == ((), "no such data here", (71.5, 0.4))
    assert one.published == (70.0, None)
    last = [*found.cells("paper", only=["b @ *"])]
    assert [(c.name, len(c.runs), c.runs[0].params["lr"]) for c in last] == [
        ("B @ one", 5, 0.1),
        ("B @ two", 5, 0.1),
    ]


def test_a_manifest_is_named_by_its_data() -> None:
    found = known("evfl-table-6")
    titles = [found.data(found.rows[0], found.columns[0], scale) for scale in SCALES]
    assert titles == ["Fashion-MNIST", "ModelNet-10"]


def test_settings_over_all_others_win() -> None:
    (cell,) = made().cells(
        "small", seeds=1, only=["A @ one"], change={"iterations": 5, "data": {"clients": 3}}
    )
    assert (cell.runs[0].iterations, cell.runs[0].rounds, cell.runs[0].data.clients) == (5, None, 3)
    assert len(cell.runs) == 1


def test_a_cell_that_is_no_valid_run_is_named() -> None:
    with pytest.raises(ConfigError, match=r"A @ one at the small scale: .*params"):
        [*made().cells("small", change={"params": {"no_such": 1}})]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "B"', 'name = "A"', "two rows have the name 'A'"),
        ('name = "two"', 'name = "one"', "two columns have the name 'one'"),
        ('"two" = [71.5', '"three" = [71.5', "published number for the unknown column 'three'"),
        ('right = "B"', 'right = "C"', "names the unknown row or cell 'C'"),
        ('left = "A"', 'left = "A @ four"', "names the unknown row or cell 'A @ four'"),
        ('left = "A"', 'left = "A"\ncolumns = ["four"]', "names the unknown column 'four'"),
        ('system = "fedal"', 'system = "fedal"\npictures = ["pie"]', "unknown picture 'pie'"),
        (
            'system = "fedal"',
            'system = "fedal"\npictures = ["columns"]',
            "needs a value in each column",
        ),
        ('name = "A"', 'name = "A @ B"', "must not contain ' @ '"),
        (
            'place = "Table I"',
            'place = "Table I"\nunit = "Mb"',
            "unknown unit 'Mb'. Did you mean 'MB'",
        ),
        ('right = "B"', 'right = "B"\nunit = "KB"', "unknown unit 'KB'. Did you mean 'kB'"),
        ("[small]", "[small", "mine is not valid TOML"),
    ],
)
def test_a_file_that_contradicts_itself_says_where(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) >= 1
    with pytest.raises(ConfigError, match=message):
        parsed(TEXT.replace(old, new), "mine")


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown table or figure .fedal-table-66.\. Did you mean"
    ):
        read("fedal-table-66")


def test_merging_keeps_the_tables_below() -> None:
    under: dict[str, Any] = {
        "rounds": 3,
        "data": {"clients": 4, "partition": "dirichlet", "options": {"alpha": 1.0}},
    }
    assert merged(under, {"iterations": 9, "data": {"clients": 5}}) == {
        "iterations": 9,
        "data": {"clients": 5, "partition": "dirichlet", "options": {"alpha": 1.0}},
    }
    assert merged(under, {"data": {"partition": "iid"}})["data"] == {
        "clients": 4,
        "partition": "iid",
        "options": {},
    }
    assert under["data"]["options"] == {"alpha": 1.0}
    assert merged({}, {"rounds": 1, "iterations": 2}) == {"rounds": 1, "iterations": 2}
    with pytest.raises(ConfigError, match="set rounds or iterations, not both"):
        [*made().cells("small", change={"rounds": 1, "iterations": 2})]
