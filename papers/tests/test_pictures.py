"""The figures of a reproduction, and the tables behind them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from papers.tests.conftest import TEXT, Made

from fedloom.report.read import read_run
from fedloom_papers.figures import PlotSection, pictures, row_style
from fedloom_papers.results import TableResults
from fedloom_papers.spec import parsed

A = "AFIND+ | <i>"


@pytest.fixture(scope="module")
def drawn(made: Made) -> tuple[TableResults, dict[str, PlotSection]]:
    found = made.found()
    return found, {picture.name: picture for picture in pictures(found)}


def lines(picture: PlotSection) -> list[dict[str, Any]]:
    """The table behind a picture."""
    return [dict(zip(picture.header, row, strict=True)) for row in picture.rows]


def test_all_that_are_asked_for_are_drawn_in_order(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, every = drawn
    assert tuple(every) == found.reproduction.pictures
    assert [len(picture.section.figures) for picture in every.values()] == [2, 2, 1, 2, 2, 2]


def test_curves_end_at_the_numbers_of_the_table(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, every = drawn
    last: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line in lines(every["curves"]):
        last[line["row"], line["column"]][line["seed"]] = line["value"]
    assert {at: dict(n.by_seed) for at, n in found.numbers.items() if n.by_seed} == last
    (first, second), legend = every["curves"].section.figures, every["curves"].section.legend
    assert [key.text for key in legend] == [A, "Local", "chance: always the most frequent class"]
    assert not first.legend and not second.legend
    assert f"{found.numbers['Local', 'α = 5'].mean:.1f}" in first.svg


def test_what_was_sent_grows_and_who_sends_nothing_is_a_level(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, every = drawn
    sent = defaultdict(list)
    for line in lines(every["bytes"]):
        sent[line["row"], line["column"], line["seed"]].append(line["bytes"])
    assert all(values == sorted(values) for values in sent.values())
    for run in found.places[A, "α = 5"].runs:
        assert sent[A, "α = 5", run.summary.seed][-1] == run.summary.bytes.sent > 0
    assert {sum(values) for (row, *_), values in sent.items() if row == "Local"} == {0}
    assert "Local, which sends nothing" in [key.text for key in every["bytes"].section.legend]


@pytest.mark.parametrize("name", ["columns", "bars"])
def test_ours_stand_beside_the_papers(
    drawn: tuple[TableResults, dict[str, PlotSection]], name: str
) -> None:
    _, every = drawn
    (figure, *_), legend = every[name].section.figures, every[name].section.legend
    texts = [key.text for key in (*legend, *figure.legend)]
    assert any("paper" in text for text in texts)


def test_columns_stand_by_their_values(drawn: tuple[TableResults, dict[str, PlotSection]]) -> None:
    _, every = drawn
    (figure,) = every["columns"].section.figures
    assert figure.svg.index(">0.1<") < figure.svg.index(">5<")
    assert "spaced evenly" in figure.caption  # 5 is more than twenty times 0.1
    assert "at the last value" in figure.svg


def test_holdings_are_those_of_the_first_seed(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, every = drawn
    held = json.loads(
        (found.places["Local", "α = 0.1"].attempts[0].folder / "partition.json").read_text()
    )
    counts = [line["rows"] for line in lines(every["partition"]) if line["column"] == "α = 0.1"]
    assert counts == np.ravel(held["counts"]).tolist()


def test_choices_are_the_weights_of_the_first_seed(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, every = drawn
    weights: dict[tuple[str, int, str], float] = defaultdict(float)
    for line in lines(every["mixing"]):
        assert (line["row"], line["seed"]) == (A, 0)
        weights[line["column"], line["round"], line["party"]] += line["weight"]
    run = read_run(found.places[A, "α = 5"].attempts[0].folder)
    assert len(weights) == 2 * len(run.mixing) * len(run.names)
    assert list(weights.values()) == pytest.approx([1.0] * len(weights), abs=1e-4)


def test_a_row_looks_the_same_everywhere(
    drawn: tuple[TableResults, dict[str, PlotSection]],
) -> None:
    found, _ = drawn
    looks = [row_style(found, row) for row in found.rows]
    assert len({look.color for look in looks}) == len({look.shape for look in looks}) == 3


def test_without_runs_there_is_no_picture(made: Made) -> None:
    found = made.found()
    places = {at: replace(place, attempts=()) for at, place in found.places.items()}
    assert pictures(replace(found, places=places)) == []


def test_bytes_as_the_metric_are_drawn_as_bytes_and_learn_as_accuracy(made: Made) -> None:
    other = parsed(
        TEXT.replace(
            'across = "α"', 'across = "α"\nmetric = "bytes"\nunit = "MB"\nbetter = "lower"'
        ),
        "mine",
    )
    found = replace(made.found(), reproduction=other)
    every = {picture.name: picture for picture in pictures(found)}
    assert lines(every["curves"])[0]["unit"] == "%"
    (figure,) = every["columns"].section.figures
    assert "MB" in figure.svg or "kB" in figure.svg
    assert found.best("α = 5") == {"Local"}
    assert "chance" not in " ".join(key.text for key in figure.legend)
