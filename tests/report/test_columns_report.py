"""Reports of parties with different columns, from folders that are written by hand: no training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom import report
from fedloom.core.errors import DataError
from fedloom.experiment.run.compare import summarize
from fedloom.experiment.run.execute import RunResult
from fedloom.experiment.run.metrics import SCORES
from fedloom.report import results
from tests.report.test_report import (
    CONFIG,
    EVIL,
    FAILURES,
    LEDGER,
    METRICS,
    _dump,
    _table,
    checked,
    write_run,
    written,
)

PARTIES = ("party-0", "party-1", "party-2")
OFFSETS = {"accuracy": 0.0, "balanced accuracy": -0.25, "auc": 0.125}
"""The accuracy is what is given; the balanced one and the AUC follow it, and the log-loss is 1 less
it.
"""


def write_columns(
    folder: Path,
    *,
    name: str = "proto-evfl",
    seed: int = 0,
    dataset: str = "wine",
    accuracy: float = 0.75,
    classes: Sequence[str] = ("red", "white"),
    aligned: Sequence[int] = (12, 8),
    columns: Sequence[str] | None = ("age", "income"),
    known: bool = True,
    alone: bool = True,
    attacks: bool = False,
    collapsed: float = 0.0,
    unit: int = 1_000_000,
    finished: bool = True,
    failures: Sequence[tuple[int, str, str, str]] = (),
) -> Path:
    """A run of two rounds of five iterations by three parties, whose active one ends at the
    accuracy given.
    """
    folder.mkdir(parents=True)
    rows: list[tuple[Any, ...]] = []
    for t in (0, 1, 2):
        at, value = (t, 5 * t, "round" if t else "start"), accuracy * (t + 2) / 4
        rows += [
            (*at, "", "accuracy mean", value),
            (*at, "", "accuracy std", 0.0),
            (*at, "", "loss mean", 1 - value),
        ]
        rows += [(*at, "", "balanced accuracy", value - 0.25), (*at, "", "auc", value + 0.125)]
        rows += [
            (*at, "", f"recall {label}", 0.5 * (aligned[k] > 0)) for k, label in enumerate(classes)
        ]
        for m, party in enumerate(PARTIES):
            rows += [(*at, party, "accuracy alone", 0.5 + m / 16)] * alone
            rows += [(*at, party, "own accuracy alone", 0.25 + m / 16)] * (alone and known)
            if attacks and m:
                rows += [
                    (*at, party, "attack prototypes", 0.25 + m / 4),
                    (*at, party, "attack chance", 0.375),
                ]
        rows += [
            (*at, "", f"bytes {eval_mode}", t * unit * k)
            for eval_mode, k in (("up", 4), ("down", 1), ("across", 0))
        ]
        if t:
            rows += [
                (*at, "active", "loss", 0.5 / t),
                (*at, "", "collapsed", collapsed),
                (*at, "", "gamma", 0.125),
            ]
    _table(folder / "metrics.csv", METRICS, rows)
    flows: list[tuple[Any, ...]] = []
    for t in (0, 1):
        flows += [
            (t, "active", "party", "improve", "prior float32[2]", 2, unit, unit + 100),
            (
                t,
                "party",
                "active",
                "improve",
                "embedded float32[20,4]",
                2,
                4 * unit,
                4 * unit + 100,
            ),
        ]
    _table(folder / "ledger.csv", LEDGER, flows if unit else [])
    _table(folder / "failures.csv", FAILURES, failures)
    text = CONFIG.replace('"fedal"', '"proto-evfl"').format(
        name=json.dumps(name), dataset=json.dumps(dataset), seed=seed, clients=len(PARTIES)
    )
    (folder / "config.toml").write_text(text, encoding="utf-8")
    _dump(folder / "environment.json", {"fedloom": "0.1.0"})
    _dump(folder / "partition.json", _partition(classes, aligned, columns, known))
    if finished:
        _dump(
            folder / "result.json",
            _result(name, seed, dataset, accuracy, unit, alone, known, attacks, failures),
        )
    return folder


def _partition(
    classes: Sequence[str], aligned: Sequence[int], columns: Sequence[str] | None, known: bool
) -> dict[str, Any]:
    marks = {"gamma": 3.0, "classes_held": 2, "mid": 0.189, "cosine": 0.894} if known else {}
    nothing = dict.fromkeys(("gamma", "classes_held", "mid", "cosine"))
    rest = [2] * (len(classes) - 2)
    held = [
        {
            "name": party,
            "input_shape": [2] if columns else [1, 4, 6],
            "columns": columns,
            "aligned": sum(aligned),
            "unaligned": 8 + 2 * len(rest),
            "test": 16,
            "unaligned_counts": [6, 2, *rest] if known else None,
            **nothing,
            **marks,
        }
        for party in PARTIES
    ]
    parties = {
        "name": "wine",
        "kind": "table",
        "classes": list(classes),
        "aligned_counts": list(aligned),
        "test_counts": [12, 4, *rest],
        "parties": held,
        "all": {
            "gamma": None,
            "classes_held": None,
            "mid": None,
            "weighted_cosine": 0.912 if known else None,
        },
    }
    names = ["mlp-5"] * len(PARTIES)
    return {
        "classes": list(classes),
        "architectures": names,
        "chance": 0.625,
        "own_chance": None,
        "test": 16,
        "public": 0,
        "parties": parties,
    }


def _result(
    name: str,
    seed: int,
    dataset: str,
    accuracy: float,
    unit: int,
    alone: bool,
    known: bool,
    attacks: bool,
    failures: Sequence[Any],
) -> dict[str, Any]:
    def spread(values: Sequence[float]) -> dict[str, Any]:
        return {"mean": sum(values) / len(values), "std": 0.0, "per_client": list(values)}

    test, own = spread([0.5, 0.5625, 0.625]), spread([0.25, 0.3125, 0.375])
    found = {
        "prototypes": {"mean": 0.625, "per_party": {"party-1": 0.5, "party-2": 0.75}},
        "chance": {"mean": 0.375, "per_party": {"party-1": 0.375, "party-2": 0.375}},
    }
    scores = {what: accuracy + offset for what, offset in OFFSETS.items()}
    return {
        "name": name,
        "method": "proto-evfl",
        "title": "Prototypes down",
        "preset": "recommended",
        "seed": seed,
        "rounds": 2,
        "iterations": 10,
        "dataset": dataset,
        "clients": len(PARTIES),
        "accuracy": {"mean": accuracy, "std": 0.0, "per_client": [accuracy]},
        "own_accuracy": None,
        "eval_modes": {},
        "scores": {**scores, "log loss": 1 - accuracy},
        "alone": {"alone": {"test": test, "own": own if known else None}} if alone else {},
        "attacks": found if attacks else {},
        "agreement": None,
        "chance": 0.625,
        "own_chance": None,
        "engine": {"engine": "local", "workers": 1, "device": "cpu", "remarks": []},
        "messages": 8 if unit else 0,
        "bytes": {"up": 8 * unit, "down": 2 * unit, "across": 0},
        "seconds": {"total": 12.0, "round": 12.0},
        "failures": len(failures),
        "public_sha256": "00" * 32,
        "test_sha256": "ab" * 32,
        "state_sha256": "cd" * 32,
    }


def write_comparison(folder: Path, accuracies: Mapping[str, Sequence[float]], **more: Any) -> Path:
    """A comparison: each method's accuracy in seeds 0, 1, …; active-only sends nothing."""
    found = []
    for name, values in accuracies.items():
        for seed, value in enumerate(values):
            unit = 0 if name == "active-only" else 4000
            alone = name == "proto-evfl"
            run = folder / f"{name}-seed{seed}"
            write_columns(run, name=name, seed=seed, accuracy=value, unit=unit, alone=alone, **more)
            found.append(RunResult(json.loads((run / "result.json").read_text()), [], run))
    _dump(folder / "comparison.json", summarize("Columns", found))
    return folder


def test_numbers_of_a_run_land_in_its_page(tmp_path: Path) -> None:
    page = written(write_columns(tmp_path / "run", failures=[(0, "party-1", "improve", "late")]))
    text = checked(page).text
    assert (
        "Three parties with different columns of the same rows, one of which holds the labels"
        in text
    )
    assert (
        "reached an accuracy of 75.0 % on 16 test rows of wine with two classes (balanced" in text
    )
    assert "accuracy 50.0 %, AUC 0.875, log-loss" in text
    assert (
        "0.250) after 10 iterations; always predicting the most frequent class gives 62.5 %."
        in text
    )
    # The classes' frequencies are 3/4 and 1/4: their entropy is 0.562. √(3/4 · 1/4 / 16) = 10.8 %.
    assert "class frequencies give 0.562" in text and "standard error 10.8" in text
    assert "chance gives 50.0 %" in text and "chance gives 0.5" in text
    assert (
        "8.00 MB" in text
        and "by the parties" in text
        and "client" not in text.replace("clients = 3", "")
    )
    assert "Calls without a valid reply" in text and "fedloom run config.toml" in text


def test_every_score_has_a_tile(tmp_path: Path) -> None:
    folder = write_columns(tmp_path / "run")
    path = folder / "result.json"
    found = json.loads(path.read_text())
    names = [str(score) for score in SCORES if str(score) not in ("rmse", "mae", "r2")]
    more = {*names} - found["scores"].keys()
    path.write_text(json.dumps({**found, "scores": dict.fromkeys(names, 0.5) | found["scores"]}))
    measured = (folder / "metrics.csv").read_text().splitlines()
    columns = [score.column for name, score in SCORES.items() if str(name) in more]
    rows = [
        row.replace(",auc,", f",{column},")
        for column in columns
        for row in measured
        if ",auc," in row
    ]
    (folder / "metrics.csv").write_text("\n".join([*measured, *rows, ""]))
    text = checked(written(folder)).text
    assert (
        all(score.title in text for name, score in SCORES.items() if str(name) in names)
        and "0 is perfect" in text
    )


def test_who_holds_what(tmp_path: Path) -> None:
    text = checked(written(write_columns(tmp_path / "run"))).text
    assert "age, income" in text and "each party's network is mlp-5" in text
    assert all(mark in text for mark in ("3.00", "0.189", "0.894", "cos weighted by rows is 0.912"))
    assert "Aligned rows by class, then unaligned rows, whose classes no party knows" in text
    many = [f"a rather long column {i}" for i in range(9)]
    text = checked(written(write_columns(tmp_path / "many", columns=many))).text
    assert "nine columns" in text and "Column names" in text and many[8] in text
    text = checked(written(write_columns(tmp_path / "pictures", columns=None))).text
    assert "1 × 4 × 6" in text


def test_parties_are_called_by_their_files(tmp_path: Path) -> None:
    folder = write_columns(tmp_path / "run", attacks=True)
    text = (folder / "partition.json").read_text()
    for id, name in (("party-0", "clinic"), ("party-2", "lab")):
        text = text.replace(f'"name": "{id}"', f'"name": "{name}"')
    (folder / "partition.json").write_text(text)
    page = written(folder)
    assert "party-0: clinic" in checked(page).text
    assert "at the end clinic 50.0 %, party-1 56.2 % and lab 62.5 %" in page
    assert "at the end party-1 50.0 % and lab 75.0 %" in page
    for table in ("metrics.csv", "result.json"):  # a page of one's own may call the role otherwise
        (folder / table).write_text((folder / table).read_text().replace("party-", "holder-"))
    assert "at the end clinic 50.0 %, party-1 56.2 % and lab 62.5 %" in written(folder)
    (folder / "result.json").unlink()
    assert "at the end clinic 50.0 %, party-1 56.2 % and lab 62.5 %" in written(folder)


def test_labels_that_nobody_knows_are_not_shown(tmp_path: Path) -> None:
    text = checked(written(write_columns(tmp_path / "run", known=False))).text
    assert "MID" not in text and "Aligned rows by class. All parties also hold 16 test rows" in text
    assert "Accuracy of each party alone at the end" in text and "pseudo-label accuracy" in text
    assert "On its own unaligned rows" not in text


def test_each_party_alone(tmp_path: Path) -> None:
    text = checked(written(write_columns(tmp_path / "run"))).text
    assert "which only a simulation has" in text and "joint, at the end" in text
    # party 1 on the test, party 2 on its own, their most frequent class
    for number in ("56.2 %", "37.5 %", "75.0 %"):
        assert number in text
    assert (
        "Each party alone"
        not in checked(written(write_columns(tmp_path / "split", alone=False))).text
    )


def test_what_could_be_found_out(tmp_path: Path) -> None:
    text = checked(written(write_columns(tmp_path / "run", attacks=True))).text
    assert "Label inference attacks" in text and "and their classes; no label" in text
    assert "Always guessing the most frequent class gives 37.5 %." in text and "62.5 %" in text
    assert "Prototypes by iteration; at the end party-1 50.0 % and party-2 75.0 %." in (
        (tmp_path / "run" / "report.html").read_text().replace("\u00a0", " ")
    )
    assert "Label inference" not in checked(written(write_columns(tmp_path / "none"))).text


def test_a_class_that_nobody_could_learn(tmp_path: Path) -> None:
    run = write_columns(tmp_path / "run", classes=("red", "white", "rosé"), aligned=(12, 8, 0))
    text = checked(written(run)).text
    assert "No aligned row has the class rosé, so the active party cannot learn it." in text
    assert (
        "The accuracy is 50.0 % on test rows of the other classes and 0.0 % on those of this one."
        in text
    )


def test_a_collapse_is_reported(tmp_path: Path) -> None:
    assert "No extractor collapsed." in checked(written(write_columns(tmp_path / "a"))).text
    assert (
        "In two rounds an extractor collapsed."
        in checked(written(write_columns(tmp_path / "b", collapsed=0.5))).text
    )


def test_traffic_of_each_round(tmp_path: Path) -> None:
    page = written(write_columns(tmp_path / "run"))
    assert (
        "Tensor data by round: active → party: improve at most 1.00 MB and party → active: "
        "improve at most" in page
    )
    assert "Messages between them are not counted" in checked(page).text
    silent = checked(written(write_columns(tmp_path / "silent", unit=0))).text
    assert (
        "without any message between them" in silent and "Tensor data of each round" not in silent
    )
    assert "by bytes sent" not in silent


def test_an_unfinished_run_is_reported(tmp_path: Path) -> None:
    text = checked(written(write_columns(tmp_path / "run", finished=False, attacks=True))).text
    assert (
        "This run is unfinished" in text
        and "of 75.0 % on 16 test rows" in text
        and "AUC 0.875" in text
    )
    assert (
        "Each party alone" in text
        and "Always guessing the most frequent class gives 37.5 %." in text
    )


def test_an_unfinished_run_of_files_is_called_by_its_parties(tmp_path: Path) -> None:
    # what `data.name` is by default
    folder = write_columns(tmp_path / "run", dataset="digits", finished=False)
    config = (folder / "config.toml").read_text()
    assert "clients = 3" in config
    (folder / "config.toml").write_text(config.replace("clients = 3", "clients = 4"))
    assert "Three parties" in checked(written(folder)).text
    assert "on 16 test rows of wine with" in checked(written(folder)).text


def test_guessing_is_among_the_classes_that_are_tested(tmp_path: Path) -> None:
    folder = write_columns(tmp_path / "run", classes=("red", "white", "rose"), aligned=(12, 8, 0))
    path = folder / "partition.json"
    held = json.loads(path.read_text())
    held["parties"]["test_counts"] = [12, 4, 0]
    _dump(path, held)
    assert "mean over classes; chance gives 50.0 %" in checked(written(folder)).text


def test_a_run_that_was_only_looked_at(tmp_path: Path) -> None:
    folder = write_columns(tmp_path / "run", attacks=True)
    lines = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join(line for line in lines if line[0] in "r0"))
    assert "Accuracy on the test rows" in checked(written(folder)).text


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    run = write_columns(
        tmp_path / "run", name=EVIL, dataset=EVIL, classes=(EVIL, "b"), columns=(EVIL, "x")
    )
    assert EVIL in checked(written(run)).text
    out = report.write_many([run], tmp_path / "many.html").read_text(encoding="utf-8")
    assert EVIL in checked(out).text


def test_many_classes_are_shown_on_demand(tmp_path: Path) -> None:
    names = [f"class {k}" for k in range(50)]
    text = checked(written(write_columns(tmp_path / "run", classes=names, aligned=[2] * 50))).text
    assert "class 49" in text and "Rows by class" not in text


@pytest.mark.parametrize(
    ("name", "old", "new", "say"),
    [
        ("result.json", '"auc"', '"area"', "scores"),
        ("result.json", '"clients": 3', '"clients": 4', "the files disagree"),
        ("result.json", '"scores": {', '"score": {', "the files disagree"),
        ("partition.json", '"parties": {', '"party": {', "exactly one of counts"),
        (
            "partition.json",
            '"aligned_counts": [12, 8]',
            '"aligned_counts": [12]',
            "the files disagree",
        ),
        ("partition.json", '"mid": 0.189', '"mid": "even"', "mid"),
        ("metrics.csv", "0,0,start,,balanced accuracy,", "0,0,start,,balanced,", "'start'"),
        ("ledger.csv", "0,active", "zero,active", "line 2 round"),
    ],
)
def test_damage_inside_a_file_is_reported(
    tmp_path: Path, name: str, old: str, new: str, say: str
) -> None:
    folder = write_columns(tmp_path / "run")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=re.escape(say)):
        report.write(folder)


@pytest.mark.parametrize(
    "name", ["metrics.csv", "ledger.csv", "partition.json", "config.toml", "failures.csv"]
)
def test_each_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_columns(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        report.write(folder)


def test_a_comparison_of_two_seeds(tmp_path: Path) -> None:
    runs = {"proto-evfl": [0.5, 0.75], "split": [0.5, 0.625], "active-only": [0.375, 0.375]}
    folder = write_comparison(tmp_path / "c", runs, attacks=True)
    report.write(folder / "split-seed1")
    reader = checked(written(folder))
    text = reader.text
    assert (
        "Accuracy on the test rows: proto-evfl 62.5 % ± 17.7, split 56.2 % ± 8.8 and active-only "
        "37.5 % ± 0.0" in text
    )
    # AUC, log-loss
    assert "0.750 ± 0.177" in text and "0.375 ± 0.177" in text and "; preset recommended" in text
    # The differences to split are 0 and 0.125: of the log-loss 0 and -0.125.
    assert (
        "Over two seeds, proto-evfl is on average 6.2 points above split in accuracy on the test "
        "rows, but the 95 % interval" in text
    )
    assert (
        "Log-loss of the first minus the other, on the same data and seed; lower is better" in text
        and results.ONE_SEED not in text
    )
    assert "−0.062" in text and "+0.062" in text and "1/2" in text and "2/2" in text
    assert "favors the first" in text and "active-only (sends nothing)" in text
    assert "the band is ± one s.d. over seeds" in text and "in the run proto-evfl, seed 0" in text
    assert "On their unaligned rows" in text and "31.2 % ± 0.0" in text and "62.5 % ± 0.0" in text
    assert reader.links == ["split-seed1/report.html"]
    first = report.write(folder).read_bytes()
    assert report.write(folder).read_bytes() == first


def test_one_seed_claims_nothing(tmp_path: Path) -> None:
    text = checked(
        written(write_comparison(tmp_path / "c", {"proto-evfl": [0.75], "split": [0.5]}))
    ).text
    assert (
        "proto-evfl is 25.0 points above split in accuracy on the test rows in the one seed."
        in text
        and results.ONE_SEED in text
    )
    assert "s.d. over seeds" not in text and "95 %" not in text


def test_runs_whose_folders_are_gone_are_left_out(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"proto-evfl": [0.75], "split": [0.5]})
    (folder / "proto-evfl-seed0").rename(tmp_path / "away")
    assert "The folders of one run are missing" in checked(written(folder)).text
    (folder / "split-seed0").rename(tmp_path / "away too")
    assert "The folders of two runs are missing" in written(folder)


def test_runs_made_one_by_one_are_paired(tmp_path: Path) -> None:
    runs = [
        write_columns(tmp_path / "a"),
        write_columns(tmp_path / "b", name="split", accuracy=0.5, alone=False),
    ]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert (
        "proto-evfl is 25.0 points above split in accuracy on the test rows in the one seed."
        in text
    )
    runs[1] = write_columns(tmp_path / "c", name="split", dataset="adult")
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert "The runs cannot be paired" in text and "Paired differences" not in text


def test_columns_and_rows_have_no_page_in_common(tmp_path: Path) -> None:
    runs = [write_columns(tmp_path / "a"), write_run(tmp_path / "b")]
    with pytest.raises(DataError, match="cannot compare horizontal runs"):
        report.write_many(runs, tmp_path / "many.html")
