"""Trials of partners with other columns of the same people."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.core.errors import DataError, ModelError
from fedloom.data.options import DataOptions
from fedloom.experiment.trial import TrialConfig, trial_columns
from fedloom.experiment.trial.columns import read_parties
from fedloom.report import trial_page

OPTIONS = DataOptions(label="ill", id="patient", missing="indicator")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clinic with labels; a laboratory that tells them for three of four people; an archive that
    tells nothing.
    """
    folder, rng, n = tmp_path_factory.mktemp("columns"), np.random.default_rng(0), 160
    x = rng.normal(size=(n, 3)).round(3)
    ill = x[:, 0] + 2 * x[:, 1] + 0.5 * rng.normal(size=n) > 0
    tables = {
        "clinic": [["patient", "age", "ward", "ill"]]
        + [[f"p{i}", x[i, 0], f"w{i // 4}", "yes" if ill[i] else "no"] for i in range(n)],
        "lab": [["patient", "iron"]]
        + [[f"p{i}", x[i, 1]] for i in reversed(range(n)) if i % 4]
        + [["p999", 1.0]],
        "archive": [["patient", "shelf"]] + [[f"p{i}", x[i, 2]] for i in range(n)],
    }
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as out:
            csv.writer(out).writerows(rows)
    return {name: folder / f"{name}.csv" for name in tables}


def test_people_are_joined_by_id_and_those_that_a_partner_lacks_are_missing(
    files: dict[str, Path],
) -> None:
    found = read_parties([files["clinic"], files["lab"]], OPTIONS, "ward")
    assert list(found.own) == ["age", "ill"] and list(found.partners["lab"]) == ["lab.iron"]
    iron = found.partners["lab"]["lab.iron"].text
    with files["lab"].open() as lines:
        written = {row["patient"]: row["iron"] for row in csv.DictReader(lines)}
    assert [float(value) if value else None for value in iron] == [
        float(written[f"p{i}"]) if i % 4 else None for i in range(160)
    ]
    assert found.units is not None and (np.bincount(found.units) == 4).all()


def test_a_partner_that_tells_the_label_is_worth_joining_and_one_that_tells_nothing_is_not(
    files: dict[str, Path],
) -> None:
    config = TrialConfig(repeats=2, alone=("logistic",))
    result = trial_columns(list(files.values()), OPTIONS, config)
    titles = [
        "all people",
        "people that lab has",
        "by the columns of lab",
        "by the columns of archive",
    ]
    assert list(result.owners) == titles
    cards = result.owners
    assert cards["all people"].decision == cards["people that lab has"].decision == "join"
    assert (
        cards["by the columns of lab"].decision == "join"
        and cards["by the columns of archive"].decision != "join"
    )
    known, every = cards["people that lab has"].gain, cards["all people"].gain
    assert (
        known is not None
        and every is not None
        and known > every > 0.1
        and cards["all people"].rows == 160
    )
    json.dumps(result.content(), allow_nan=False)
    html = trial_page.html(result, "clinic.csv, lab.csv")
    calibration = cards["all people"].calibration
    assert calibration is not None and 0 < max(calibration) < 0.5
    assert f"{calibration[0]:.3f} → {calibration[1]:.3f}" in html and "joint; 0 is perfect" in html
    assert "people that lab has" in html and "lab has 120 of them" in result.notes[0]
    again = fedloom.trial(
        [str(file) for file in files.values()],
        label="ill",
        id="patient",
        repeats=2,
        alone=("logistic",),
    )
    recipe = again.content()["recipe"]
    assert {**again.content(), "seconds": 0, "recipe": {}} == {**result.content(), "seconds": 0}
    names = [str(files["clinic"]), str(files["lab"]), str(files["archive"])]
    assert recipe["columns"] == {
        "files": names,
        "id": "patient",
        "label": "ill",
        "missing": "files",
    }
    run = {**recipe, "rounds": 1, "params": {"lot": 5}}
    measured = fedloom.run(run.pop("method"), **run)
    assert measured.summary["method"] == "vertical-forest" and measured.summary["clients"] == 3


def test_rows_without_an_id_are_not_one_person(tmp_path: Path) -> None:
    ids = ["", *(f"p{i}" for i in range(1, 20))]
    for name, column in (("clinic", "ill"), ("lab", "iron")):
        rows = "".join(f"{one},{i % 2}\n" for i, one in enumerate(ids))
        (tmp_path / f"{name}.csv").write_text(f"patient,{column}\n{rows}")
    found = read_parties([tmp_path / "clinic.csv", tmp_path / "lab.csv"], OPTIONS, None)
    assert found.partners["lab"]["lab.iron"].text[:3] == ["", "1", "0"]


def test_a_number_is_told_better_by_the_columns_of_a_partner(
    files: dict[str, Path], tmp_path: Path
) -> None:
    rng, n = np.random.default_rng(0), 160
    iron = [line.split(",") for line in files["lab"].read_text().splitlines()[1:]]
    known = {patient: float(value) for patient, value in iron}
    lines = [
        f"p{i},{rng.normal():.3f},{30 + 5 * known.get(f'p{i}', 0.0) + rng.normal():.3f}"
        for i in range(n)
    ]
    (tmp_path / "stay.csv").write_text("\n".join(["patient,age,days", *lines]))
    options = replace(OPTIONS, label="days")
    found = [tmp_path / "stay.csv", files["lab"]]
    result = trial_columns(found, options, TrialConfig(repeats=2, alone=("ridge",)))
    card = result.owners["all people"]
    assert (
        result.metric == "rmse"
        and card.decision == "join"
        and card.gain is not None
        and card.gain > 0.3
    )
    with pytest.raises(ModelError, match="logistic cannot predict a number"):
        trial_columns(found, options, TrialConfig(repeats=1, alone=("logistic",)))


@pytest.mark.parametrize(
    ("names", "change", "text"),
    [
        (("clinic", "lab"), {"id": None}, "name id, the column that all files have"),
        (
            ("clinic", "lab"),
            {"group": "ward"},
            "Owners with other rows and other columns at once cannot be tried yet",
        ),
        (("lab", "clinic"), {}, "first file must have the label.*clinic.csv first"),
        (("clinic", "clinic"), {}, "different names"),
    ],
)
def test_mistakes(
    files: dict[str, Path], names: tuple[str, ...], change: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        trial_columns(
            [files[name] for name in names], replace(OPTIONS, **change), TrialConfig(repeats=1)
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patient,iron\np1,1\np1,2\n", "'p1' is there several times"),
        ("patient,iron\nx1,1\nx2,2\n", "fewer than 12 of the people"),
        ("patient,ill\np1,yes\n", "Only the first file may have the label"),
    ],
)
def test_mistakes_in_a_partners_file(
    files: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        trial_columns([files["clinic"], tmp_path / "other.csv"], OPTIONS, TrialConfig(repeats=1))
