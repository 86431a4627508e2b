"""The method `stats` and `fedloom stats`: the numbers of pandas and SciPy on pooled rows, from sums
alone.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats as tests
from typer.testing import CliRunner

import fedloom
from fedloom import methods
from fedloom.cli.app import app
from fedloom.core.errors import DataError
from fedloom.core.page import LearnedTable
from fedloom.core.task import Number
from fedloom.experiment.config.data import SchemaConfig
from fedloom.methods.tables.cells import (
    Placed,
    between,
    masked,
    neighbors,
    rounded,
    rows_below,
)
from fedloom.methods.tables.long_sums import parts
from fedloom.protect.aggregators import Secure
from tests.methods.tables import federation, of_numbers, owners, splits, table

STATS, CUTS = methods.find("stats"), [500, 700, 1500]


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose owners differ in one column; one column is far from 0, and one has
    whole numbers.
    """
    x, y = table(2000, seed=seed)
    x[:, 0] = 1e6 + 5 * x[:, 0]
    x[700:1500, 2] += 0.3
    x[:, 4] = np.round(10 * x[:, 4])
    return x, y


def tables(
    x: np.ndarray, y: np.ndarray, cuts: list[int], **how: Any
) -> tuple[LearnedTable, LearnedTable]:
    toy = federation(STATS, owners(x, y, cuts), **how).run(2)
    numbers, words = toy.server.findings()
    return numbers, words


def column(found: LearnedTable, name: str) -> list[Any]:
    return [row[found.columns.index(name)] for row in found.rows]


def test_numbers_are_those_of_pandas() -> None:
    x, y = rows()
    numbers, words = tables(x, y, CUTS)
    pooled = pd.DataFrame(x[:, [0, 1, 2, 4]].astype(float))
    assert column(numbers, "Rows") == pooled.count().tolist()
    assert column(numbers, "Missing") == pooled.isna().sum().tolist()
    assert column(numbers, "Mean") == pytest.approx(pooled.mean().tolist(), rel=1e-14)
    assert column(numbers, "S.d.") == pytest.approx(pooled.std().tolist(), rel=1e-12)
    span = pooled.quantile(0.75) - pooled.quantile(0.25)
    for name, q in (("25%", 0.25), ("Median", 0.5), ("75%", 0.75)):
        apart = np.abs(np.array(column(numbers, name)) - pooled.quantile(q))
        assert (apart <= 0.001 * span).all()
    assert column(numbers, "Median")[3] == pooled[3].median()  # whole numbers have a whole one
    counts = pd.Series(x[:, 3]).value_counts().sort_index()
    assert column(words, "Rows")[:7] == counts.tolist()
    assert column(words, "Share")[:7] == pytest.approx((counts / counts.sum()).tolist())
    assert column(words, "Rows")[7:] == [float(np.isnan(x[:, 3]).sum()), *np.bincount(y)]


def test_numbers_that_float32_does_not_tell_apart_have_the_statistics_of_pandas() -> None:
    n = np.arange(360)
    far = pd.DataFrame(
        {"word": np.array(["u", "v"])[n % 2], "x": 1_000_000_000.0 + n % 3, "z": n % 7}
    )
    found = (
        fedloom.stats(far.assign(ill=n % 2, site=n // 120), label="ill", group="site")
        .to_frame()
        .set_index("Column")
    )
    for name in ("x", "z"):
        assert found.loc[name, "Mean"] == pytest.approx(far[name].mean(), rel=1e-14)
        assert found.loc[name, "S.d."] == pytest.approx(far[name].std(), rel=1e-9)
        assert (
            found.loc[name, ["25%", "Median", "75%"]].tolist()
            == far[name].quantile([0.25, 0.5, 0.75]).tolist()
        )


def test_runs_know_what_was_subtracted_from_a_column(tmp_path: Path) -> None:
    n = np.arange(360)
    near = pd.DataFrame(
        {"word": np.array(["u", "v"])[n % 2], "x": n % 5, "ill": n // 3 % 2, "site": n // 90}
    )
    found = {}
    for name, frame_ in (("near", near), ("far", near.assign(x=near["x"] + 10**9))):
        frame_.to_csv(tmp_path / f"{name}.csv", index=False)
        data = {"name": str(tmp_path / f"{name}.csv"), "label": "ill", "group": "site"}
        runs = [fedloom.run(method, rounds=4, data=data, seed=1) for method in ("stats", "fedglm")]
        found[name] = [next(iter(run.summary["learned"]))["rows"] for run in runs]
    (statistics, _), (far_statistics, beta) = found["near"], found["far"]
    assert [cell + 10**9 for cell in statistics[0][5:8]] == far_statistics[0][5:8]
    assert statistics[0][3] + 10**9 == pytest.approx(far_statistics[0][3], rel=1e-15)
    by_name, near_by_name = ({row[0]: row[1] for row in rows} for rows in (beta, found["near"][1]))
    assert by_name["x"] == pytest.approx(near_by_name["x"], rel=1e-9)
    assert by_name["intercept"] == pytest.approx(
        near_by_name["intercept"] - 1e9 * by_name["x"], rel=1e-9
    )


def test_drift_is_that_of_scipy_s_tests() -> None:
    x, y = rows()
    numbers, words = tables(x, y, CUTS)
    parts_ = np.split(x.astype(float), CUTS)
    for place, name in ((0, 0), (2, 2)):
        groups = [part[~np.isnan(part[:, name]), name] for part in parts_]
        assert column(numbers, "p-value")[place] == pytest.approx(
            tests.f_oneway(*groups).pvalue, rel=1e-6
        )
    assert column(numbers, "p-value")[2] < 1e-4 < column(numbers, "p-value")[0]
    seen = np.array([[(part[:, 3] == w).sum() for w in range(7)] for part in parts_])
    assert column(words, "Drift")[0] == pytest.approx(tests.contingency.association(seen), rel=1e-9)
    assert column(words, "p-value")[0] == pytest.approx(
        tests.chi2_contingency(seen).pvalue, rel=1e-9
    )


def test_all_but_drift_has_the_same_bits_for_every_split_and_secure_sums_change_none() -> None:
    x, y = (a[:400] for a in rows())

    def without_drift(found: tuple[LearnedTable, ...]) -> list[Any]:
        return [row[:-2] for one in found for row in one.rows]

    whole = without_drift(tables(x, y, []))
    assert all(without_drift(tables(x, y, cuts)) == whole for cuts in splits(400))
    plain, isolated = tables(x, y, [100, 200]), tables(x, y, [100, 200], isolated=True)
    assert plain == isolated == tables(x, y, [100, 200], means=Secure())


def test_small_counts_are_hidden_and_so_is_what_would_tell_them() -> None:
    assert masked([0, 3, 50, 10], 5) == [0, "< 5", 50, "hidden"]
    assert masked([4, 3, 50, 10], 5) == ["< 5", "< 5", 50, 10]
    x, y = (a[:60] for a in rows())
    x[:, 1] = np.nan
    x[:3, 1] = 7
    x[:57, 2], x[57:, 2] = 1, np.nan
    x[:, 3] = np.arange(60) % 3
    x[:2, 3] = np.nan
    numbers, words = tables(x, y, [20, 40])
    own = [row[1:4] for row in words.rows if row[0] == words.rows[0][0]]
    assert [cell for _, cell, _ in own if isinstance(cell, str)] == ["hidden", "< 5"] and own[-1][
        0
    ] == "missing"
    # a share of all words would tell how many are missing
    assert all(share is None for *_, share in own)
    # all rows are known from another column
    assert numbers.rows[1][1:] == ("< 5", "hidden", *[None] * 7)
    assert numbers.rows[2][1:3] == ("hidden", "< 5")
    assert numbers.rows[2][3:8] == (1, 0, 1, 1, 1)


def test_the_largest_numbers_of_float32_have_statistics() -> None:
    x, y = rows()
    x[:, 0] *= np.float32(3e31)  # about 3e37
    pooled = pd.Series(x[:, 0].astype(float))
    numbers, _ = tables(x, y, CUTS)
    assert column(numbers, "Mean")[0] == pytest.approx(pooled.mean(), rel=1e-14)
    assert column(numbers, "S.d.")[0] == pytest.approx(pooled.std(), rel=1e-12)


def test_parts_of_a_sum_are_exact() -> None:
    x = np.array([1e30, -1e30, 3.5, -(2.0**-40), 1e-5])
    found = parts(x, -60, 5)
    assert (np.abs(found) < 2**36).all()
    back = [sum(int(p) * 2 ** (36 * k) for k, p in enumerate(row)) / 2**60 for row in found]
    assert back == pytest.approx(x.tolist(), rel=1e-12)
    assert (
        rounded(49.97, 50.02) == 50
        and rounded(0.12341, 0.12359) == 0.1235
        and rounded(1.0, 1.0) == 1.0
    )


def frame() -> pd.DataFrame:
    x, y = rows(3)
    found = pd.DataFrame(x[:300, [0, 1, 4]], columns=["size", "level", "visits"])
    found["kind"] = [None if np.isnan(v) else "abcdefg"[int(v)] for v in x[:300, 3]]
    return found.assign(
        ill=np.where(y[:300] == 1, "yes", "no"), clinic=np.repeat(["A", "B", "C"], 100)
    )


def test_a_frame_has_statistics_and_an_agreed_schema() -> None:
    found = fedloom.stats(frame(), label="ill", group="clinic")
    shown = found.to_frame().set_index("Column")
    assert shown.loc["level", "Mean"] == pytest.approx(frame()["level"].mean(), rel=1e-6)
    assert found.owners == ("A", "B", "C") and 0 < found.sent < 20_000
    assert found.to_latex().count(r"\toprule") == 2 and r"size & 269 & 31 &" in found.to_latex()
    card = found._repr_html_()
    assert "statistics of 3 owners" in card and card.count("<table") == 2 and ">269<" in card
    assert [row[1] for row in found.tables[1].rows if row[0] == "class"] == ["no", "yes"]
    schema = SchemaConfig(**found.schema)  # as a run reads it
    assert schema.label == "ill" and schema.classes == ("no", "yes")
    assert schema.scale is not None and schema.scale["size"][0] == pytest.approx(
        frame()["size"].mean(), rel=1e-5
    )
    with pytest.raises(DataError, match="name it as group"):
        fedloom.stats(frame(), label="ill")


def test_the_command_shows_tables_and_writes_the_schema(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "rows.csv", index=False)
    words = ["stats", str(tmp_path / "rows.csv"), "--label", "ill", "--group", "clinic"]
    shown = CliRunner().invoke(
        app, [*words, "--schema", str(tmp_path / "schema.toml")], catch_exceptions=False
    )
    assert shown.exit_code == 0 and "Median" in shown.output and "visits" in shown.output
    schema = tomllib.loads((tmp_path / "schema.toml").read_text())["data"]["row_schema"]
    assert SchemaConfig(**schema).scale is not None
    found = json.loads(
        CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).output.splitlines()[-1]
    )
    assert [one["title"] for one in found["tables"]] == ["Numbers", "Words"] and found[
        "row_schema"
    ] == schema


def test_one_row_far_away_leaves_the_quartiles_of_frame_file_and_command(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    income = np.rint(50_000 + 10_000 * rng.standard_normal(400))
    income[7] = 1e9
    rows_ = pd.DataFrame({"income": income, "ill": np.arange(400) % 2, "site": np.arange(400) % 4})
    truth = rows_["income"].quantile([0.25, 0.5, 0.75]).to_numpy()
    near = 0.001 * (truth[2] - truth[0])
    rows_.to_csv(tmp_path / "rows.csv", index=False)
    words = ["stats", str(tmp_path / "rows.csv"), "--label", "ill", "--group", "site", "--json"]
    said = CliRunner().invoke(app, words, catch_exceptions=False).output.splitlines()[-1]
    for found in (
        fedloom.stats(rows_, label="ill", group="site").tables[0].rows[0],
        fedloom.stats(tmp_path / "rows.csv", label="ill", group="site").tables[0].rows[0],
        json.loads(said)["tables"][0]["rows"][0],
    ):
        assert np.abs(np.array(found[5:8]) - truth).max() <= near


def test_methods_of_raw_rows_are_compared_with_networks_that_have_public_rows() -> None:
    found = fedloom.compare(
        ["local", "stats"], data="breast_cancer", rounds=1, seeds=[0], clients=3
    )
    assert [m["name"] for m in found["methods"]] == ["local", "stats"]


def test_fifty_owners_send_120_kb() -> None:
    """Ten columns of numbers and classes: tensor bytes up of a plain run and of one with secure
    sums, which takes keys of 136 bytes for each of five sums besides.
    """
    x = np.random.default_rng(0).standard_normal((5000, 10)).astype(np.float32)
    y = np.arange(5000) % 2
    found = {}
    for name, means in (("plain", {}), ("secure", {"means": Secure()})):
        cuts = np.linspace(0, 5000, 51).astype(int)[1:-1].tolist()
        toy = federation(STATS, owners(x, y, cuts, words=((),) * 10), **means).run(1)
        found[name] = toy.server.findings(), toy.fed.ledger.sent("client")
    assert found["plain"][0] == found["secure"][0]
    assert (
        found["plain"][1] == 83_600 and found["secure"][1] == 83_600 + 50 * 5 * (136 + 8) < 120_000
    )


def test_only_sums_without_room_are_asked_for_again() -> None:
    x, y = rows()
    x[:, 2] *= 1e9
    toy = federation(STATS, owners(x, y, CUTS)).run(1)
    assert toy.server.found["wide"].tolist() == [0, 0, 4, 0]
    assert [e.what for e in toy.fed.ledger if e.kind == "wide"] == [
        "column int64[1]",
        "sums int64[1,4]; squares int64[1,7]",
    ]
    pooled = pd.DataFrame(x[:, [0, 1, 2, 4]].astype(float))
    numbers, _ = toy.server.findings()
    assert column(numbers, "Mean") == pytest.approx(pooled.mean().tolist(), rel=1e-14)
    assert column(numbers, "S.d.") == pytest.approx(pooled.std().tolist(), rel=1e-12)


def shapes(n: int) -> dict[str, np.ndarray]:
    """Columns (n,) of many kinds."""
    rng = np.random.default_rng(3)
    normal, row = rng.standard_normal(n), np.arange(n)
    return {
        "log-normal": np.exp(2.5 * normal),
        "one of 1e9": np.where(row == 7, 1e9, 50_000 + 13_000 * normal),
        "one of -1e30": np.where(row == 7, -1e30, normal),
        "whole numbers": rng.integers(0, 10, n),
        "counts": rng.poisson(0.4, n),
        "mostly 0": np.where(rng.random(n) < 0.8, 0, np.exp(normal)),
        "mostly 0.0003": np.where(rng.random(n) < 0.6, 0.0003, normal),
        "constant": np.full(n, 3.75),
        "constant but for one": np.where(row == 5, 9.0, 5.0),
        "negative": -np.exp(2 * normal),
        "ties at the smallest": np.where(
            rng.random(n) < 0.4, 19171.375, 19171.375 + 1e4 * normal**2
        ),
        "small": 1e-12 * normal,
        "smaller": 1e-30 * np.exp(normal),
        "large": 3e37 * normal,
        "far from 0": 4096.0 + normal,
        "missing": np.where(rng.random(n) < 0.6, np.nan, normal),
        "few rows": np.where(row < 20, np.exp(3 * normal), np.nan),
        "no mean": rng.standard_cauchy(n),
    }


@pytest.mark.parametrize("of_float32", [True, False])
def test_quartiles_are_those_of_pandas_also_where_numbers_are_far_from_each_other(
    of_float32: bool,
) -> None:
    """Within a thousandth of their distance, in one run of all columns; also of a number to predict
    with a scale of its own.
    """
    n, cuts = 1500, [500, 900]
    every = np.stack([*shapes(n).values()], axis=1).astype(np.float32)
    if of_float32:
        places = owners(every, np.arange(n) % 2, cuts, words=((),) * every.shape[1])
    else:
        y = np.exp(2.5 * np.random.default_rng(4).standard_normal(n))
        y[3] = 1e7
        target = Number(float(y.mean()), float(y.std()))
        y32 = target.standardized(y)
        places = of_numbers(owners(every[:, :2], np.zeros(n, int), cuts, words=((), ())), y32)
        places = [replace(place, target=target) for place in places]
        every = np.column_stack([every[:, :2], target.in_unit(y32)])
    toy = federation(STATS, places).run(1)
    numbers = toy.server.findings()[0]
    pooled = pd.DataFrame(every.astype(float))
    low, middle, high = (pooled.quantile(q).to_numpy() for q in (0.25, 0.5, 0.75))
    for name, truth in (("25%", low), ("Median", middle), ("75%", high)):
        apart = np.abs(np.array(column(numbers, name), float) - truth)
        assert (apart <= 0.001 * (high - low) + 1e-7 * np.abs(truth)).all()
    assert (np.array(column(numbers, "25%")) >= pooled.min() - 1e-7 * pooled.min().abs()).all()
    assert sum(e.kind == "finer" for e in toy.fed.ledger) <= 2 * 16  # a question and its answers


def test_only_known_digits_are_shown_and_each_quartile_is_asked_until_it_is_known() -> None:
    rank = 1001
    values = np.sort(np.exp(3 * np.random.default_rng(0).standard_normal(2001)))
    known = Placed(0, rank, -1e6, 1e9, 0, len(values), by_size=True)
    asked = 0
    while not known.known(10.0):
        cuts = known.cuts()
        counts = np.diff(rows_below(values, cuts))
        assert (np.diff(cuts) >= 0).all()
        known, asked = known.after(cuts, counts), asked + 1
    assert known.low <= values[rank - 1] < known.high <= known.low + 0.01 and asked < 16
    assert between(known, known, 0.5) == rounded(known.low, known.high)
    assert neighbors(0.25, 5) == (2, 2, 0) and neighbors(0.5, 4) == (2, 3, 0.5)
