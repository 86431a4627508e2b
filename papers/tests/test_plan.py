"""What is to be run for some tables: names, cells, runs that are shared, data that is missing."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from papers.tests.tiny import TINY

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.sources import load
from fedloom.experiment.config.overrides import override
from fedloom.experiment.pool.fetch import absent, fetch
from fedloom.experiment.pool.pool import digest
from fedloom_papers import plan as planning
from fedloom_papers.plan import plan, reproductions, run_plan, unlisted
from fedloom_papers.selection import dotted_settings
from fedloom_papers.spec import Reproduction, canonical, parsed


@pytest.fixture
def two() -> Mapping[str, Reproduction]:
    """Two tables: the second has one column of the first, and another one."""
    return {
        "one": parsed(TINY, "one"),
        "two": parsed(TINY.replace("α = 2", "α = 1").replace("2.0", "1.0"), "two"),
    }


def test_runs_that_are_equal_are_one(two: Mapping[str, Reproduction], tmp_path: Path) -> None:
    found = plan(two, tmp_path, "small")
    assert [len(one.runs) for one in found.planned] == [8, 8]
    assert len(found.runs) == 12  # 2 rows x 3 columns x 2 seeds
    assert all(digest(run) == key for key, run in found.runs.items())
    shared = found.uses(found.planned[1].cells[0].runs[1])
    assert [(one.name, cell.name) for one, cell in shared] == [
        ("one", "FedAL @ α = 5"),
        ("two", "FedAL @ α = 5"),
    ]
    assert found.folder(found.planned[0].cells[0].runs[0]).parent == tmp_path / "runs"
    assert found.pages / "one" == tmp_path / "small" / "one"
    assert not found.finished and not [*tmp_path.iterdir()]


def test_what_is_chosen_may_stand_in_one_of_them(
    two: Mapping[str, Reproduction], tmp_path: Path
) -> None:
    found = plan(two, tmp_path, "small", seeds=1, only=["fedal @ α = 1", "Large"])
    assert {one.name: [cell.name for cell in one.cells] for one in found.planned} == {
        "one": ["Large @ α = 5", "Large @ α = 2"],
        "two": ["FedAL @ α = 1", "Large @ α = 5", "Large @ α = 1"],
    }
    assert len(found.runs) == 1
    assert [one.name for one in plan(two, tmp_path, "small", only=["α = 2"]).planned] == ["one"]
    with pytest.raises(
        ConfigError, match=r"--only 'α = 3' matches no row, column or cell\. Did you mean"
    ):
        plan(two, tmp_path, "small", only=["α = 3"])


def test_what_is_not_the_whole_file_has_pages_of_its_own(
    two: Mapping[str, Reproduction], tmp_path: Path
) -> None:
    def pages(**asked: Any) -> Path:
        return plan(two, tmp_path, "small", **asked).pages

    whole = tmp_path / "small"
    assert pages() == pages(seeds=2) == pages(seeds=5) == pages(device="cuda") == whole
    assert pages(change={"engine": {"workers": 2}, "data": {"root": "/data"}}) == whole
    apart = {
        pages(seeds=1),
        pages(only=["α = 5"]),
        pages(change={"rounds": 3}),
        pages(change={"rounds": 4}),
    }
    assert len(apart) == 4 and {path.name[:6] for path in apart} == {"small-"}
    assert pages(change={"rounds": 3}, only=["α = 5"]) not in apart


def test_the_command_is_the_one_to_repeat(two: Mapping[str, Reproduction], tmp_path: Path) -> None:
    change = {"data": {"clients": 4, "partition": "dirichlet"}, "models": {"pool": ["linear"]}}
    one, _ = plan(
        two, tmp_path, "small", seeds=1, only=["Local", "* @ α = 5"], change=change
    ).planned
    command = one.asked.command(one.name, "small")
    assert command.startswith(
        "fedloom reproduce one.toml --scale small --only Local --only '* @ α = 5' --seeds 1 -s"
    )
    again: dict[str, Any] = {}
    typed = shlex.split(command)
    for flag, text in pairwise(typed):
        if flag == "-s":
            override(again, text)
    assert again == change
    assert one.asked.command("fedal-table-6", "paper").startswith(
        "fedloom reproduce fedal-table-6 --scale paper"
    )
    assert [*dotted_settings({"a": {"b": "1", "c": True, "d": [{"e": "x y"}]}})] == [
        'a.b="1"',
        "a.c=true",
        'a.d=[{ e = "x y" }]',
    ]
    odd: dict[str, Any] = {"a": math.inf, "b": [-math.inf, 1e-7], "c": "inf"}
    typed_again: dict[str, Any] = {}
    for text in dotted_settings({**odd, "nan": math.nan}):
        override(typed_again, text)
    assert math.isnan(typed_again.pop("nan")) and typed_again == odd


def test_settings_over_all_and_a_device_that_others_have(
    two: Mapping[str, Reproduction], tmp_path: Path
) -> None:
    found = plan(
        two, tmp_path, "small", change={"iterations": 15, "data": {"clients": 4}}, device="cuda"
    )
    assert {
        (r.rounds, r.iterations, r.data.clients, r.engine.device) for r in found.runs.values()
    } == {(None, 15, 4, "cuda")}
    assert not {*found.runs} & {*plan(two, tmp_path, "small", change={"iterations": 15}).runs}


def test_one_that_cannot_be_run_is_a_problem_of_its_own(
    two: Mapping[str, Reproduction], tmp_path: Path
) -> None:
    wrong = parsed(TINY.replace('"linear"', '"liner"'), "wrong")
    found = plan({"wrong": wrong, **two}, tmp_path, "small")
    assert [one.name for one in found.planned] == ["one", "two"]
    assert (
        "FedAL @ α = 5 at the small scale" in found.problems["wrong"]
        and "linear" in found.problems["wrong"]
    )


def test_names_are_of_one_or_of_a_paper_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = {"fedal-table-4": TINY, "fedal-figure-2": TINY, "evfl-table-4": TINY}
    monkeypatch.setattr(planning, "shipped", lambda: texts)
    monkeypatch.setattr(
        planning, "read", lambda name: parsed(texts[name], name) if name in texts else missing(name)
    )
    mine, broken = tmp_path / "mine.toml", tmp_path / "broken.toml"
    mine.write_text(TINY)
    broken.write_text("title = ")
    assert [*reproductions(["evfl-table-4", "fedal", str(mine), "fedal-table-4"])] == [
        "evfl-table-4",
        "fedal-table-4",
        "fedal-figure-2",
        "mine",
    ]
    assert [*reproductions([], every=True)] == [*texts]
    with pytest.raises(ConfigError) as error:
        reproductions(
            [
                "afind",
                "nope",
                str(broken),
                str(tmp_path / "none.toml"),
                str(mine),
                "fedal",
                str(mine),
            ]
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    for line, words in zip(
        lines,
        ("no table or figure of afind", "nope", "not valid TOML", "none.toml", "mine"),
        strict=True,
    ):
        assert words in line


def test_roman_numbers_and_any_case() -> None:
    assert [*reproductions(["fedal-table-VI", "FedAL-Figure-ix"])] == [
        "fedal-table-6",
        "fedal-figure-9",
    ]
    assert [canonical(f"evfl-table-{number}") for number in ("IV", "xi", "12")] == [
        f"evfl-table-{number}" for number in (4, 11, 12)
    ]
    with pytest.raises(ConfigError, match="unknown table or figure 'fedal-table-XL'"):
        canonical("fedal-table-XL")


def missing(name: str) -> Reproduction:
    raise ConfigError(f"there is no reproduction {name!r}")


def test_data_that_is_not_here_is_reported_before_any_work(
    two: Mapping[str, Reproduction], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert absent(plan(two, tmp_path, "small").runs) == []
    runs = plan(two, tmp_path, "paper", seeds=1).runs
    assert absent(runs) == [("svhn", None)]

    def offline(name: str, root: Path | None) -> object:
        if name == "svhn":
            raise DataError("the hub can't be reached")
        return load(name, root=root)

    monkeypatch.setattr("fedloom.experiment.pool.fetch.load", offline)
    fetch([("digits", None)])
    with pytest.raises(
        DataError, match=r"missing data: svhn\. .*hub.*FEDLOOM_DATA/ufldl-stanford/svhn"
    ):
        fetch([("svhn", None), ("digits", None)])
    (tmp_path / "ufldl-stanford" / "svhn").mkdir(parents=True)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert absent(runs) == []


def test_a_list_of_pictures_that_is_not_here_is_reported_before_any_work(tmp_path: Path) -> None:
    text = TINY.replace(
        '{ method = "local" }', '{ method = "split", columns = { manifest = "no.csv" } }'
    )
    text = text.replace('models = { pool = ["linear"] }\n', "")
    text = re.sub(
        r"data = \{ options = \{ alpha = (\d)\.0 \} \}", r"rounds = \1", text
    )  # these rows are not partitioned
    found = plan({"one": parsed(text, "one")}, tmp_path, "small", only=["Local"])
    assert [Path(path).name for path in unlisted(found.runs)] == ["no.csv"]
    with pytest.raises(DataError, match=r"missing manifest: .*no\.csv\. Create it"):
        run_plan(found)
    assert not (tmp_path / "runs").exists()
