"""What an engineer reads who knows only `fedloom trial --help`: roles, notes, errors, cards and
next steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom as package
from fedloom.cli.trial_words import as_options
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.options import DataOptions, Understanding
from fedloom.data.own import interpret
from fedloom.experiment.trial import TrialConfig, TrialResult
from fedloom.experiment.trial.result import metric_named
from fedloom.experiment.trial.words import answer, contents, gain_name, shown_score
from fedloom.report import trial_page
from tests.command import Done, fedloom

__all__ = ["fedloom"]


def table(owners: int = 2, rows: int = 40) -> dict[str, Any]:
    """People with two rows each; the owners' names are numbers."""
    rng, n = np.random.default_rng(0), owners * rows
    x = rng.normal(size=n)
    return {
        "row_names": [*range(7, 3 * n + 7, 3)],
        "patient": [f"p{i // 2}" for i in range(n)],
        "age": x.round(3).tolist(),
        "ill": np.where(x + rng.normal(size=n) > 0, "yes", "no").tolist(),
        "site": np.repeat(np.arange(1, owners + 1), rows).tolist(),
    }


def understood(columns: dict[str, Any], **settings: Any) -> Understanding:
    return interpret(columns, DataOptions("ill", "site", **settings))[0]


@pytest.fixture(scope="module")
def found() -> TrialResult:
    settings: dict[str, Any] = {
        "methods": ["exchange"],
        "alone": ("logistic", "forest", "boosting"),
        "repeats": 1,
    }
    return package.trial(table(), label="ill", group="site", **settings)


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("data.keep = ['*', 'row id'] uses it", "--keep '*' --keep 'row id' uses it"),
        (
            "or take with data.encode.when it was = 'category'",
            "or take with --encode 'when it was=category'",
        ),
        (
            'set data.task = "classes", or data.missing_words',
            "set --task classes, or --missing-word",
        ),
        ("data.label names the column 'data.x'", "--label names the column 'data.x'"),
        ("worth must be above 0", "--worth must be above 0"),
        (
            "if they belong together, set unit = 'a b', or",
            "if they belong together, add --unit 'a b', or",
        ),
    ],
)
def test_notes_and_errors_name_the_options_of_the_command(setting: str, option: str) -> None:
    assert as_options(setting) == option


@pytest.mark.parametrize("text", ["AUC", "roc_auc", "auc"])
def test_scores_are_named_in_any_writing(text: str) -> None:
    assert (
        metric_named(text) == "auc"
        and metric_named("log-loss") == "log loss"
        and metric_named("R²") == "r2"
    )
    with pytest.raises(ConfigError, match="metric must be one of"):
        TrialConfig(metric=metric_named("f1"))


def test_losses_are_shown_as_they_are() -> None:
    assert shown_score(-0.5, "log loss") == "0.500" and gain_name("brier") == "gain in Brier score"
    assert shown_score(-12.5, "rmse") == "12.5" and gain_name("auc") == "AUC"


def test_rows_without_an_owner_are_left_out_with_a_note() -> None:
    columns = table()
    columns["site"] = [None, None, *columns["site"][2:]]
    found = understood(columns)
    assert len(found.kept) == 78 and found.table.owners == ("1", "2")
    assert "2 of 80 rows have no owner in 'site' and are left out." in found.notes


def test_a_count_of_the_rows_is_no_feature_although_some_lack_a_label() -> None:
    columns = table() | {"number": [*range(80)]}
    columns["ill"][3] = None
    found = understood(columns)
    assert found.dropped["number"] == "an identifier: it counts the rows"
    assert "identifier by its name" in found.dropped["row_names"]
    (note,) = [note for note in found.notes if "'row_names'" in note]
    again = understood(columns, keep=("*", "row_names"))
    assert (
        "data.keep = ['*', 'row_names'] uses it" in note
        and {"row_names", "age"} <= again.kinds.keys()
    )


def test_people_with_several_rows_are_noticed(found: TrialResult) -> None:
    assert any("set unit = 'patient'" in note for note in found.notes)
    once = table() | {"patient": [f"p{i}" for i in range(80)]}
    assert understood(once).unit_guess is None
    shared = table() | {"patient": [f"p{i % 40}" for i in range(80)]}  # of two owners
    assert understood(shared).unit_guess is None


def test_the_answer_counts_decisions_and_leanings(found: TrialResult) -> None:
    one, other = found.owners.values()
    cards = {
        "a": replace(one, decision="join", leaning=""),
        "b": replace(other, decision="undecided", leaning="same"),
    }
    assert answer(replace(found, owners=cards)) == (
        "1 of 2 owners gains by learning together: a. For 1 of 2 owners these rows do not "
        "decide: b. Probable, but not shown: no difference for 1."
    )
    cards["b"] = replace(other, decision="too few")
    assert "1 of 2 owners has too few rows for an answer: b." in answer(
        replace(found, owners=cards)
    )


def test_a_page_has_the_command_and_whole_names(found: TrialResult) -> None:
    page = trial_page.html(found, "my.csv", "out/a b/recipe.toml")
    assert "fedloom run &#39;out/a b/recipe.toml&#39;" in page and "Notes on the data" in page
    assert contents({"content": "sums, rows"}) == "sums, numbers of rows"
    long = {"Research_and_Development": next(iter(found.owners.values()))}
    before, _, _ = trial_page.html(replace(found, owners=long), "my").partition(
        '" text-anchor="end"'
    )
    assert float(re.findall(r'x="([0-9.]+)"', before)[-1]) >= 8 * len("Research_and_Development")


def test_the_command_says_what_next(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    columns = table(owners=11, rows=12)
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    (tmp_path / "my.csv").write_text("\n".join(lines))
    words = [
        "trial",
        "my.csv",
        "--label",
        "ill",
        "--group",
        "site",
        "--unit",
        "patient",
        "--method",
        "exchange",
        "--repeats",
        "1",
    ]
    text = fedloom(*words, "--metric", "log-loss").stdout
    assert (
        text.startswith("my.csv: trial of 11 owners")
        and "site 11" in text
        and "add --out FOLDER" in text
    )
    assert "revealed" not in text and "computed from" in text
    assert "Did you mean 'patient'?" in fedloom(*words[:6], "--unit", "patien", code=2).stderr
    assert "--label, the column to predict" in fedloom("trial", "my.csv", code=2).stderr
    assert "Did you mean 'my.csv'?" in fedloom("trial", "mi.csv", code=2).stderr
    assert "COLUMN=KIND" in fedloom(*words, "--encode", "age", code=2).stderr
    assert "--worth must be above 0" in fedloom(*words, "--worth", "5", code=2).stderr
    assert (
        "fedloom trial my.csv --label ill --group site --unit patient"
        in fedloom("data", "my.csv", "--label", "ill", "--group", "site").stdout
    )
    columns = {"patient": columns["row_names"], "age": columns["age"], "ill": columns["ill"]}
    for name, ids in (
        ("clinic", columns["patient"]),
        ("lab", [f"{i:05}" for i in columns["patient"]]),
    ):
        rows = zip(
            ids, columns["age"], columns["ill"] if name == "clinic" else columns["age"], strict=True
        )
        head = "patient,age,ill" if name == "clinic" else "patient,iron,zinc"
        (tmp_path / f"{name}.csv").write_text(
            "\n".join([head, *(",".join(map(str, row)) for row in rows)])
        )
    words = ["trial", "clinic.csv", "lab.csv", "--id", "patient", "--label"]
    assert "write ids alike" in fedloom(*words, "ill", code=2).stderr
    assert "Did you mean 'ill'?" in fedloom(*words, "il", code=2).stderr
    assert "leave out method" in fedloom(*words, "ill", "--method", "fedavg", code=2).stderr


def test_too_few_people_in_common_are_shown_two_ids(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,x,y\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(30))
    )
    (tmp_path / "b.csv").write_text("id,z\n" + "".join(f"p-{i},{i % 5}\n" for i in range(30)))
    with pytest.raises(DataError, match="such as 'p-0' and '0': write ids alike"):
        package.trial([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], id="id", label="y")
