"""Regressions are of the rows and words that the reader thinks of: the event is named, all rows are
fitted, and words without rows are no levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from statsmodels.duration.hazard_regression import PHReg

import fedloom
from fedloom import FederatedClassifier, FederatedRegressor
from fedloom.core.errors import FedloomError
from fedloom.experiment.plan.reading import read
from fedloom.methods import registry

EVERY = [name for name, method in registry().items() if method.setting == "horizontal"]


def deaths(words: tuple[str, str] = ("living", "deceased")) -> pd.DataFrame:
    """120 rows of three sites with times, of which the second word has the event."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=120).round(3)
    died = rng.random(120) < 0.6
    time = np.ceil(rng.exponential(np.exp(-0.7 * x)) * 40)
    site = np.repeat(["a", "b", "c"], 40)
    return pd.DataFrame({"x": x, "time": time, "died": np.where(died, *words[::-1]), "site": site})


def cox(rows: pd.DataFrame, **params: Any) -> Any:
    given = {"times": 120, **params}
    return fedloom.run("fedcox", data=rows, label="died", group="site", rounds=12, params=given)


def hazard(rows: pd.DataFrame, event: str) -> float:
    status = (rows["died"].astype(str) == event).astype(int)
    return float(PHReg(rows["time"], rows[["x"]], status, ties="breslow").fit().params[0])


@pytest.mark.parametrize(
    ("words", "event"),
    [
        (("living", "deceased"), None),
        (("survived", "Died"), None),
        (("no event", "event"), None),
        (("0", "1"), None),
        (("2", "1"), "1"),
        (("1", "2"), "2"),
        (("none", "progressed"), "progressed"),
    ],
)
def test_the_event_is_the_word_that_says_so_or_that_is_named(
    words: tuple[str, str], event: str | None
) -> None:
    rows = deaths(words)
    found = cox(rows, **({} if event is None else {"event": event}))
    assert found.to_frame()["Coefficient"][0] == pytest.approx(hazard(rows, words[1]), rel=1e-7)
    said = dict(found.summary["learned"][1]["rows"])
    assert said["event"].startswith(words[1]) and said["events"] == (rows["died"] == words[1]).sum()
    assert ("a guess" in said["event"]) == (event is None)
    assert words[1] in found.summary["learned"][0]["title"]


def test_true_is_the_event_of_true_and_false() -> None:
    rows = deaths()
    rows["died"] = rows["died"] == "deceased"
    for params in ({}, {"event": True}, {"event": "true"}):
        found = cox(rows, **params)
        assert found.to_frame()["Coefficient"][0] == pytest.approx(hazard(rows, "True"), rel=1e-7)


@pytest.mark.parametrize(
    "words", [("no", "yes"), ("1", "2"), ("relapse", "death"), ("alive", "lost")]
)
def test_words_that_do_not_say_which_is_the_event_are_asked_for(words: tuple[str, str]) -> None:
    with pytest.raises(FedloomError, match=r"params\.event is needed") as raised:
        cox(deaths(words))
    assert all(repr(word) in str(raised.value) for word in words)
    with pytest.raises(FedloomError, match=r"params\.event is 'gone'"):
        cox(deaths(words), event="gone")


def test_1_of_a_label_of_survival_is_not_the_event() -> None:
    rows = deaths(("1", "0")).rename(columns={"died": "survived"})
    with pytest.raises(FedloomError, match=r"params\.event is needed"):
        fedloom.run("fedcox", data=rows, label="survived", group="site", rounds=4)


def test_an_estimator_finds_the_event_and_names_classes_and_owners() -> None:
    rows = deaths()
    X, site = rows[["x", "time"]].to_numpy(), rows["site"].to_numpy()
    params = {"time": "x1", "owners": "fixed", "times": 120}
    for words in (("living", "deceased"), ("censored", "dead")):
        y = np.where(rows["died"] == "deceased", *words[::-1])
        made = FederatedClassifier("fedcox", iterations=120, params=params).fit(X, y, groups=site)
        table, fit = made.summary_["learned"]
        assert words[1] in table["title"] and dict(fit["rows"])["events"] == (y == words[1]).sum()
        assert [row[0] for row in table["rows"]] == ["x0", "owner b", "owner c"]
        risk = made.predict_proba(X)[:, list(made.classes_).index(words[1])]
        assert np.corrcoef(risk, X[:, 0])[0, 1] > 0.5


def test_tables_name_classes_and_owners() -> None:
    rows = deaths(("no", "yes")).drop(columns="time")
    found = fedloom.run(
        "fedglm", data=rows, label="died", group="site", rounds=8, params={"owners": "fixed"}
    )
    table = found.summary["learned"][0]
    assert table["title"] == "Coefficients of yes against no"
    assert [row[0] for row in table["rows"]] == ["intercept", "x", "owner b", "owner c"]
    assert "owner b" in found.to_latex()
    words = fedloom.run("stats", data=rows, label="died", group="site", rounds=1).summary
    assert {row[1] for row in words["learned"][1]["rows"] if row[0] == "class"} == {"no", "yes"}


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_only_methods_that_read_public_rows_set_some_aside(name: str) -> None:
    method = registry()[name]
    rounds = method.configure().min_rounds + 1
    secure = {"aggregate": {"secure": True}} if "secure sums" in method.needs else {}
    # the settings that a run would have
    data = read(name, flags={"rounds": rounds, **secure}).run.data
    assert (data.public_rows == 0) != any("public" in need for need in method.needs)
    assert (data.test_fraction == 0) == (name in ("fedglm", "fedcox", "stats"))


@pytest.mark.parametrize("number", [False, True])
def test_estimators_without_groups_fit_every_row(number: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(101, 2))
    y = X @ [1.0, -2.0] + rng.normal(size=101)
    made = (FederatedRegressor if number else FederatedClassifier)("fedglm", iterations=100)
    made.fit(X, y if number else y > 0)
    assert dict(made.summary_["learned"][-1]["rows"])["rows"] == 101


def test_regressions_fit_all_rows_unless_a_test_part_is_asked_for() -> None:
    rows = deaths(("no", "yes")).drop(columns="time")
    ref = sm.Logit(rows["died"] == "yes", sm.add_constant(rows[["x"]])).fit(disp=0)

    def glm(**test: Any) -> tuple[Any, dict[str, Any]]:
        made = fedloom.run("fedglm", data=rows, label="died", group="site", rounds=8, **test)
        return made, dict(made.summary["learned"][1]["rows"])

    for test in ({}, {"test": 0}, {"test_fraction": 0.0}):
        made, said = glm(**test)
        assert made.to_frame()["Coefficient"].to_numpy() == pytest.approx(ref.params, rel=1e-7)
        assert said["rows"] == 120 and "rows left out, for the test" not in said
        assert "rows that were fitted" in repr(made) and not made.summary.get("own_accuracy")
    said = glm(test=0.25)[1]
    assert (said["rows"], said["rows left out, for the test"]) == (90, 30)
    said = glm(test=0.25, test_rows=10)[1]
    assert (said["rows"], said["rows left out, for the test"]) == (90, 30)
    said = glm(public_rows=20, unseen=["c"])[1]
    assert said["rows left out, as public rows"] == 20
    assert said["rows"] + said["rows left out, of unseen clients"] == 100


def test_statistics_say_which_rows_they_leave_out() -> None:
    rows = deaths(("no", "yes"))
    given = {"data": rows, "label": "died", "group": "site", "rounds": 1}
    tables = fedloom.run("stats", **given).summary["learned"]
    assert [table["title"] for table in tables] == ["Numbers", "Words"]
    tables = fedloom.run("stats", test=0.25, **given).summary["learned"]
    assert tables[2]["rows"] == [["rows left out, for the test", 30.0]]


def test_owners_of_one_row_count_where_nothing_is_held_out() -> None:
    rows = deaths(("no", "yes")).drop(columns="time")
    rows["site"] = np.r_[["d", "e", "e"], rows["site"][3:]]
    made = fedloom.run("fedglm", data=rows, label="died", group="site", rounds=8)
    assert dict(made.summary["learned"][1]["rows"])["rows"] == 120
    assert made.summary["clients"] == 5


def test_other_methods_need_test_rows(tmp_path: Path) -> None:
    rows = deaths(("no", "yes"))
    with pytest.raises(FedloomError, match="fedavg needs rows to test on"):
        fedloom.run("fedavg", data=rows, label="died", group="site", test=0, rounds=1)


# -- words without rows ----------------------------------------------------------------------------


def wards(gone: tuple[str, ...]) -> pd.DataFrame:
    """Rows of four wards, of which those of some lack x."""
    rng = np.random.default_rng(5)
    ward = rng.permutation(np.repeat(["east", "north", "south", "west"], 25))
    x = rng.normal(size=100).round(3)
    y = (x + (ward == "south") + rng.normal(size=100)).round(3)
    x[np.isin(ward, gone)] = np.nan
    return pd.DataFrame({"x": x, "ward": ward, "y": y, "site": np.repeat(["a", "b"], 50)})


@pytest.mark.parametrize("gone", [("east",), ("north",), ("east", "north"), ("east", "west")])
def test_words_without_rows_are_no_levels(gone: tuple[str, ...]) -> None:
    rows = wards(gone)
    made = fedloom.run(
        "fedglm", data=rows, label="y", group="site", rounds=4, task="number", missing="median"
    )
    left = rows.dropna()
    x = pd.get_dummies(left[["x", "ward"]], columns=["ward"], drop_first=True).astype(float)
    ref = sm.OLS(left["y"], sm.add_constant(x)).fit()
    table = made.to_frame()
    assert table["Column"].tolist() == ["intercept", *(c.replace("_", "=") for c in x.columns)]
    assert table["Coefficient"].to_numpy() == pytest.approx(ref.params.to_numpy(), rel=1e-6)
    assert table["Std. error"].to_numpy() == pytest.approx(ref.bse.to_numpy(), rel=1e-6)
    said = dict(made.summary["learned"][1]["rows"])
    if "east" in gone:
        assert said["reference of ward"] == min({"east", "north", "south", "west"} - {*gone})


def test_words_without_rows_are_no_levels_of_hazards() -> None:
    rows = deaths()
    rng = np.random.default_rng(7)
    rows["ward"] = rng.permutation(np.repeat(["east", "north", "south"], 40))
    rows.loc[rows["ward"] == "east", "x"] = np.nan
    made = fedloom.run(
        "fedcox",
        data=rows,
        label="died",
        group="site",
        rounds=12,
        missing="median",
        params={"times": 120},
    )
    left = rows.dropna()
    x = np.c_[left["x"], left["ward"] == "south"].astype(float)
    ref = PHReg(left["time"], x, left["died"] == "deceased", ties="breslow").fit()
    assert made.to_frame()["Coefficient"].to_numpy() == pytest.approx(ref.params, rel=1e-6)


def test_an_owner_without_complete_rows_has_no_effect() -> None:
    rows = wards(()).assign(site=np.repeat(["a", "b", "c", "d"], 25))
    rows.loc[rows["site"] == "a", "x"] = np.nan
    made = fedloom.run(
        "fedglm",
        data=rows,
        label="y",
        group="site",
        rounds=4,
        task="number",
        missing="median",
        params={"owners": "fixed"},
    )
    names = made.to_frame()["Column"].tolist()
    assert names[-2:] == ["owner c", "owner d"]
    assert dict(made.summary["learned"][1]["rows"])["reference of owner"] == "b"


def test_a_class_without_complete_rows_is_named() -> None:
    rows = deaths(("no", "yes")).drop(columns="time")
    rows.loc[rows["died"] == "yes", "x"] = np.nan
    with pytest.raises(FedloomError, match="no complete row is of yes"):
        fedloom.run("fedglm", data=rows, label="died", group="site", rounds=4, missing="median")
