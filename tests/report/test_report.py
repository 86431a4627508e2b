"""Reports of run folders that are written by hand: no training."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import report
from fedloom.core import ledger
from fedloom.core.errors import DataError
from fedloom.core.statistics import confidence_interval
from fedloom.experiment.run import record
from fedloom.experiment.run.compare import summarize
from fedloom.experiment.run.execute import RunResult
from fedloom.experiment.run.result import Comparison, PairedDifference
from fedloom.report import formatting as fmt
from fedloom.report import mixing, results, schema, styles

CONFIG = """name = {name}
method = "fedal"
preset = "recommended"
seed = {seed}

[data]
name = {dataset}
clients = {clients}
"""
METRICS = ("round", "iteration", "stage", "party", "metric", "value")
LEDGER = ("round", "sender", "receiver", "kind", "what", "count", "bytes", "wire_bytes")
FAILURES = ("round", "party", "kind", "reason")
EVIL = '<script>alert("x")</script>&\'$x_1$'


def write_run(
    folder: Path,
    *,
    name: str = "fedal",
    seed: int = 0,
    dataset: str = "digits",
    classes: Sequence[str] = ("cat", "dog"),
    accuracy: Sequence[float] = (0.75, 0.875, 0.625),
    counts: Sequence[Sequence[int]] | None = None,
    failures: Sequence[tuple[int, str, str, str]] = (),
    unit: int = 1_000_000,
    stages: Sequence[str] = ("local", "transfer"),
    finished: bool = True,
    public: str = "ab" * 32,
    tuned: bool = False,
    mixing: Sequence[tuple[int, str, str]] = (),
) -> Path:
    """A run of two rounds of five iterations, at whose end each client has the `accuracy` given."""
    folder.mkdir(parents=True)
    clients, last = len(accuracy), np.array(accuracy)
    metrics = _metrics(classes, last, stages, unit, tuned)
    _table(folder / "metrics.csv", METRICS, metrics)
    flows = [
        (t, "client", "server", "predict", "float32[4,2]", clients, unit, unit + 300)
        for t in (0, 1)
    ]
    _table(folder / "ledger.csv", LEDGER, flows if unit else [])
    _table(folder / "failures.csv", FAILURES, failures)
    if mixing:
        _table(folder / "mixing.csv", record.MIXING, mixing)
    quoted = {"name": json.dumps(name), "dataset": json.dumps(dataset)}
    (folder / "config.toml").write_text(
        CONFIG.format(**quoted, seed=seed, clients=clients), encoding="utf-8"
    )
    _dump(folder / "environment.json", {"fedloom": "0.1.0", "torch": "2.13.0", "cuda": None})
    rows = counts or [[10 + n] + [3] * (len(classes) - 1) for n in range(clients)]
    held = {
        "classes": list(classes),
        "counts": rows,
        "architectures": ["mlp"] * clients,
        "test": 40,
        "public": 30,
    }
    _dump(folder / "partition.json", held)
    if finished:
        result = {
            "name": name,
            "method": "fedal",
            "title": "Distillation",
            "preset": "recommended",
            "seed": seed,
            "rounds": 2,
            "iterations": 10,
            "dataset": dataset,
            "clients": clients,
            "accuracy": _spread(last),
            "own_accuracy": _spread(last / 2),
            "agreement": 0.4321,
            "chance": 0.512,
            "eval_modes": {"tuned": _spread(last * 3 / 4)} if tuned else {},
            "own_chance": 0.4375,
            "engine": {
                "engine": "batched",
                "workers": 1,
                "device": "cpu",
                "remarks": ["picked by auto"],
            },
            "messages": 1234,
            "bytes": {"up": 2 * unit, "down": 4 * unit, "across": 0},
            "seconds": {"total": 75.0, "setup": 15.0, "local": 60.0},
            "failures": len(failures),
            "public_sha256": public,
            "state_sha256": "cd" * 32,
        }
        _dump(folder / "result.json", result)
    return folder


def _metrics(
    classes: Sequence[str], last: np.ndarray, stages: Sequence[str], unit: int, tuned: bool
) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []

    def look(round: int, stage: str, each: np.ndarray) -> None:
        at = (round, 5 * round, stage)
        eval_modes = [("own accuracy tuned", each * 3 / 4)] if tuned else []
        for what, values in (("accuracy", each), ("own accuracy", each / 2), *eval_modes):
            rows.extend((*at, f"client-{n}", what, value) for n, value in enumerate(values))
            rows.extend(
                [(*at, "", f"{what} mean", values.mean()), (*at, "", f"{what} std", values.std())]
            )
        rows.extend([(*at, "", "loss mean", 2.0 - each.mean()), (*at, "", "agreement", 0.4321)])
        rows.extend((*at, "", f"recall {label}", 0.5) for label in classes)
        rows.extend(
            (*at, "", f"bytes {eval_mode}", round * unit * k)
            for eval_mode, k in (("up", 1), ("down", 2), ("across", 0))
        )

    look(0, "start", last / 4)
    for t in (1, 2):
        for stage in stages:
            look(t, stage, last * t / 2)
        rows.append((t, 5 * t, stages[-1], "server", "discriminator loss", 1.0))
        rows.append((t, 5 * t, stages[-1], "", "gradient norm kd", 0.1 * t))
    return rows


def write_comparison(
    folder: Path, accuracies: Mapping[str, Sequence[float]], title: str = "Two methods", **more: Any
) -> Path:
    """A comparison: each method's mean accuracy in seeds 0, 1, …"""
    found = []
    for name, means in accuracies.items():
        for seed, mean in enumerate(means):
            each = [mean - 0.125, mean, mean + 0.125]
            unit = 0 if name == "local" else 5000
            run = write_run(
                folder / f"{name}-seed{seed}",
                name=name,
                seed=seed,
                accuracy=each,
                unit=unit,
                **more,
            )
            found.append(RunResult(json.loads((run / "result.json").read_text()), [], run))
    _dump(folder / "comparison.json", summarize(title, found))
    return folder


def _spread(values: np.ndarray) -> dict[str, Any]:
    return {"mean": values.mean(), "std": values.std(), "per_client": values.tolist()}


def _table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def written(folder: Path) -> str:
    """The report of a folder, with plain spaces."""
    path = report.write(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8").replace(fmt.NBSP, " ")


class _Reader(HTMLParser):
    """Checks that tags balance, and collects ids, what is loaded and the fmt."""

    VOID = ("meta", "br", "img", "hr", "link", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key == "src" or (key == "href" and tag != "a"):
                self.loaded.append(value or "")
            if key == "href" and tag == "a":
                self.links.append(value or "")
            assert not key.startswith("on"), (tag, key)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def checked(text: str) -> _Reader:
    """The page read, after what must hold of every page was checked."""
    reader = _Reader()
    reader.feed(text)
    assert not reader.open
    assert reader.tags["h1"] == 1 and reader.tags["script"] == 1 and reader.tags["link"] == 0
    assert len(reader.ids) == len(set(reader.ids))
    assert all(found.startswith(("#", "data:")) for found in reader.loaded)
    script = re.search(r"<script>(.*?)</script>", text, flags=re.S)
    assert script and not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", script[1]
    )
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text  # the only script that the page may run
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)", text)
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") or root.get("aria-hidden") == "true"
        for used in re.findall(r'(?:href="|url\()#([^")]+)', svg):
            assert f'id="{used}"' in svg
    assert svgs and len(text) < 1_000_000
    return reader


def test_numbers_of_a_run_land_in_its_page(tmp_path: Path) -> None:
    failures = [(0, "client-1", "predict", "not finite"), (1, "client-2", "predict", "not finite")]
    page = written(write_run(tmp_path / "run", failures=failures))
    text = checked(page).text
    assert 'title="1,234 messages"' in page and "batched engine, one worker, cpu" in text
    assert (
        "Three clients reached 75.0 % ± 10.2 (s.d. over clients) on digits after 10 iterations;"
        in text
    )
    assert "always predicting the most frequent class gives 51.2 %." in text
    for number in ("37.5 %", "43.2 %", "2.00 MB", "4.00 MB", "75.0 s", "80.0 %", "87.5", "62.5"):
        assert number in text, number
    assert "client → server" in text and "float32[4,2]" in text
    assert "not finite" in text and "Calls without a valid reply" in text
    assert "fedloom run config.toml" in text and "cd" * 32 in text and "2.13.0" in text
    assert "after the transfer stage" in text and "after the local stage" in text
    assert "Discriminator loss" in text and "ln 3" in text and "Gradient norm" in text


def test_exact_bytes_are_in_titles(tmp_path: Path) -> None:
    text = written(write_run(tmp_path / "run"))
    assert 'title="2,000,000 bytes"' in text and 'title="2,000,600 bytes"' in text


def test_a_run_that_sends_nothing_and_fails_nowhere(tmp_path: Path) -> None:
    text = checked(written(write_run(tmp_path / "run", unit=0, stages=("local",)))).text
    assert "0 B" in text and "Calls without" not in text and "by bytes sent" not in text
    assert "after the local stage" not in text


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    first = report.write(folder).read_bytes()
    assert report.write(folder).read_bytes() == first


def test_a_page_is_current_until_a_file_of_its_folder_or_the_version_changes(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run")
    assert report.current(folder) is None
    page = report.write(folder)
    assert report.current(folder) == page
    later = page.stat().st_mtime_ns + 1
    os.utime(folder / "metrics.csv", ns=(later, later))
    assert report.current(folder) is None
    os.utime(page, ns=(later + 1, later + 1))
    assert report.current(folder) == page
    page.write_text(
        page.read_text(encoding="utf-8").replace('"fedloom ', '"fedloom 0.'), encoding="utf-8"
    )
    os.utime(page, ns=(later + 2, later + 2))
    assert report.current(folder) is None


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    failures = [(0, "client-1", EVIL, EVIL)]
    folder = write_run(
        tmp_path / "run", name=EVIL, dataset=EVIL, classes=(EVIL, "b\x01"), failures=failures
    )
    reader = checked(written(folder))
    assert EVIL in reader.text
    out = report.write_many([folder], tmp_path / "many.html").read_text(encoding="utf-8")
    assert EVIL in checked(out).text


def test_words_in_figures_are_kept_as_they_are(tmp_path: Path) -> None:
    classes = ("#0072b2", 'id="axes_1" 1.23456', "日本 $\\frac$")
    text = checked(written(write_run(tmp_path / "run", classes=classes))).text
    assert all(text.count(name) == 2 for name in classes)


def test_an_unfinished_run_is_reported(tmp_path: Path) -> None:
    text = checked(written(write_run(tmp_path / "run", finished=False))).text
    assert "This run is unfinished" in text and "--resume" in text
    assert "Three clients reached 75.0 % ± 10.2" in text and "after 10 iterations." in text
    assert "most frequent" not in text


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (30, 3), (300, 60)])
def test_any_number_of_clients_and_classes(tmp_path: Path, clients: int, classes: int) -> None:
    names = [f"class {k}" for k in range(classes)]
    folder = write_run(
        tmp_path / "run", classes=names, accuracy=np.linspace(0, 1, clients).tolist()
    )
    assert "Partition" in checked(written(folder)).text


def test_a_run_that_was_only_looked_at(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join(line for line in lines if line[0] in "r0"))
    assert "Accuracy on the global test set" in checked(written(folder)).text


def test_diverged_metrics_are_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(
        re.sub(r"(,loss mean,|,gradient norm kd,)\d[\d.]*", r"\1nan", text)
    )
    checked(written(folder))


FILES = (
    "result.json",
    "metrics.csv",
    "ledger.csv",
    "failures.csv",
    "partition.json",
    "config.toml",
)


@pytest.mark.parametrize("name", [*FILES, "environment.json"])
def test_each_missing_or_torn_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", failures=[(0, "client-0", "predict", "late")])
    whole = (folder / name).read_bytes()
    if name != "config.toml":
        (folder / name).write_bytes(whole[: len(whole) - 8])
        with pytest.raises(DataError, match=name):
            report.write(folder)
    (folder / name).write_bytes(b"\xff\xfe" + whole)
    with pytest.raises(DataError, match=name):
        report.write(folder)
    (folder / name).unlink()
    if name != "result.json":  # without it the run is unfinished
        with pytest.raises(DataError, match=name):
            report.write(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "say"),
    [
        ("result.json", '"chance": 0.512', '"chance": "high"', "chance"),
        ("result.json", '"clients": 3', '"clients": 4', "the files disagree"),
        ("result.json", '"mean"', '"meen"', "accuracy.mean"),
        ("result.json", "{", "[{", "JSON"),
        ("partition.json", "[10, 3]", "[10, 3, 1]", "the files disagree"),
        ("partition.json", '"counts"', '"count"', "counts"),
        ("metrics.csv", "metric,value", "metric,number", "column 'value'"),
        ("metrics.csv", "0,0,start,,loss mean,", "0,0,start,,loss man,", "'start'"),
        (
            "metrics.csv",
            "0,0,start,,accuracy mean,",
            "0,zero,start,,accuracy mean,",
            "line 5 iteration",
        ),
        ("ledger.csv", "client,server", "client server", "line 2"),
        ("ledger.csv", "predict", '"predict', "CSV"),
    ],
)
def test_damage_inside_a_file_is_reported(
    tmp_path: Path, name: str, old: str, new: str, say: str
) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=re.escape(say)):
        report.write(folder)


def test_a_folder_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"result\.json, metrics\.csv or comparison\.json"):
        report.write(tmp_path)
    with pytest.raises(DataError, match="nothing-here"):
        report.write(tmp_path / "nothing-here")


def test_an_unfinished_run_with_a_broken_config(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "config.toml").write_text("name = ")
    with pytest.raises(DataError, match=r"config\.toml"):
        report.write(folder)


def test_a_comparison_with_one_seed_claims_nothing(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"fedal": [0.75], "local": [0.5]})
    report.write(folder / "fedal-seed0")
    reader = checked(written(folder))
    text = reader.text
    assert (
        "Accuracy on the global test set: fedal 75.0 % ± 10.2 and local 50.0 % ± 10.2 (s.d. over "
        "clients)" in text
    )
    assert (
        "fedal is 25.0 points above local in accuracy on the global test set in the one seed, and "
        "better at 3 of 3 clients." in text
    )
    assert results.ONE_SEED in text
    assert "s.d. over seeds" not in text and "95 %" not in text
    assert "+25.0" in text and "3/3" in text and "local (sends nothing)" in text
    assert reader.links == ["fedal-seed0/report.html"]


def test_a_comparison_with_three_seeds(tmp_path: Path) -> None:
    folder = write_comparison(
        tmp_path / "c", {"fedal": [0.5, 0.625, 0.75], "local": [0.5, 0.375, 0.625]}
    )
    text = checked(written(folder)).text
    # The differences are 0, 0.25 and 0.125: mean 12.5, s.d. 12.5, interval 12.5 ± 4.303 * 12.5 /
    # sqrt(3).
    assert "62.5 % ± 12.5" in text and "seeds 0, 1 and 2" in text and results.ONE_SEED not in text
    assert "+12.5" in text and "−18.6 to +43.6" in text and "6/9" in text
    assert "these seeds do not show which is better" in text and "agree in sign" not in text
    assert "Accuracy of each client, seed 0" in text and "the band is ± one s.d. over seeds" in text


def test_comparisons_are_deterministic_too(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"fedal": [0.5], "fedmd": [0.5]})
    first = report.write(folder).read_bytes()
    assert report.write(folder).read_bytes() == first


def test_runs_whose_folders_are_gone_are_left_out(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"fedal": [0.75], "local": [0.5]})
    (folder / "local-seed0").rename(tmp_path / "away")
    text = checked(written(folder)).text
    assert "The folders of one run are missing" in text and "50.0 %" in text
    (folder / "fedal-seed0").rename(tmp_path / "away too")
    text = written(folder)
    assert "The folders of two runs" in text and "Partition" not in text


def test_a_comparison_whose_folder_holds_another_run(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"fedal": [0.75], "local": [0.5]})
    (folder / "local-seed0").rename(tmp_path / "away")
    for other in ({"name": "fedmd"}, {"name": "local", "accuracy": [0.5]}):
        write_run(folder / "local-seed0", **other)
        with pytest.raises(DataError, match="lists local with seed 0"):
            report.write(folder)
        (folder / "local-seed0").rename(tmp_path / str(len(other)))


def test_a_damaged_comparison(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", {"fedal": [0.75], "local": [0.5]})
    whole = (folder / "comparison.json").read_text()
    for bad in ("", whole[:-9], "{}", whole.replace('"reference"', '"referee"')):
        (folder / "comparison.json").write_text(bad)
        with pytest.raises(DataError, match=r"comparison\.json"):
            report.write(folder)


def test_many_methods_show_the_ends(tmp_path: Path) -> None:
    names = {f"m{i}": [0.25 + i / 32] for i in range(9)}
    text = checked(written(write_comparison(tmp_path / "c", names))).text
    assert "from m8 50.0 % ± 10.2 to m0 25.0 % ± 10.2" in text


def test_runs_made_one_by_one_are_paired(tmp_path: Path) -> None:
    a = write_run(tmp_path / "x" / "a", accuracy=[0.75, 0.5])
    b = write_run(tmp_path / "x" / "b", name="fedmd", accuracy=[0.25, 0.625])
    report.write(b)
    out = report.write_many([a, b], tmp_path / "many.html")
    reader = checked(out.read_text(encoding="utf-8"))
    assert (
        "fedal is 18.8 points above fedmd in accuracy on the global test set in the one seed, and "
        "better at 1 of 2 clients." in reader.text
    )
    assert reader.links == ["x/b/report.html"]


def test_runs_of_one_name_are_reported_apart_by_folder(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / at, accuracy=[0.5, mean])
        for at, mean in (("a/run", 0.5), ("b/run", 0.75))
    ]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert "a/run is 12.5 points below b/run" in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"dataset": "wine"}, "dataset is digits and wine"),
        ({"public": "00" * 32}, "public_sha256"),
        ({"accuracy": [0.5, 0.5]}, "different rows"),
        ({"counts": [[1, 2], [3, 4], [5, 6]]}, "different rows"),
    ],
)
def test_runs_on_other_data_stand_side_by_side(
    tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", name="fedmd", **other)]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert "The runs cannot be paired" in text and why in text
    assert "Paired differences" not in text and "Partition" not in text and "fedmd" in text


def test_costs_that_are_orders_apart_share_a_figure(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", unit=4000),
        write_run(tmp_path / "b", name="fedmd", unit=50_000_000),
    ]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    ticks = [f"{size}{fmt.NBSP}{unit}" for size in (10, 100) for unit in ("kB", "MB")]
    assert all(tick in text for tick in ticks)


def test_runs_of_different_length_are_reported(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", name="fedmd")]
    text = (runs[1] / "result.json").read_text()
    (runs[1] / "result.json").write_text(text.replace('"iterations": 10', '"iterations": 2500'))
    out = report.write_many(runs, tmp_path / "new" / "many.html").read_text(encoding="utf-8")
    assert "The runs differ in length (10 to 2,500 iterations)" in checked(out).text


def test_runs_without_a_seed_in_common(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", name="fedmd", seed=1)]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert "fedal and fedmd have no seed in common" in text


def test_what_cannot_be_gathered(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one run"):
        report.write_many([], tmp_path / "many.html")
    run = write_run(tmp_path / "a", finished=False)
    with pytest.raises(DataError, match="unfinished"):
        report.write_many([run], tmp_path / "many.html")


def _difference(*per_seed: float) -> PairedDifference:
    return PairedDifference(
        first="a",
        other="b",
        mean=float(np.mean(per_seed)) if per_seed else None,
        std_over_seeds=float(np.std(per_seed, ddof=1)) if len(per_seed) > 1 else None,
        std_over_clients=0.0,
        clients_better=1,
        clients=2,
        per_seed=per_seed,
    )


@pytest.mark.parametrize(
    ("seeds", "quantile"),
    [(2, 12.706), (3, 4.303), (11, 2.228), (12, 2.201), (21, 2.086), (61, 2.000), (500, 1.965)],
)
def test_the_interval_is_student_s(seeds: int, quantile: float) -> None:
    values = [float(v) for v in 0.01 * np.sin(np.arange(seeds))]
    half = quantile * np.std(values, ddof=1) / seeds**0.5
    expected = (np.mean(values) - half, np.mean(values) + half)
    np.testing.assert_allclose(confidence_interval(values), expected, rtol=1e-3, atol=1e-5)


def test_an_interval_is_within_what_can_be_and_needs_two_seeds() -> None:
    assert confidence_interval((0.5, 0.1), 1.0) == (-1.0, 1.0)
    assert confidence_interval([0.5]) is None and confidence_interval([]) is None


def _verdict(folder: Path, accuracies: Mapping[str, Sequence[float]]) -> results.Verdict | None:
    """The verdict of a comparison written by hand; seeds are 0, 1, …"""
    write_comparison(folder, accuracies)
    return results.verdict(Comparison(**json.loads((folder / "comparison.json").read_text())))


def test_the_verdict_names_the_best_its_lead_and_the_interval(tmp_path: Path) -> None:
    """The differences are 0.1, 0.125 and 0.15: mean 12.5, s.d. 2.5, interval 12.5 ± 4.303 * 2.5 /
    sqrt(3).
    """
    best = _verdict(tmp_path / "a", {"fedal": (0.5, 0.525, 0.55), "local": (0.4, 0.4, 0.4)})
    assert best == results.Verdict(
        "fedal",
        "fedal +12.5 over local in accuracy on the global test set, "
        f"95{fmt.NBSP}% +6.3 to +18.7, 3 seeds",
        True,
    )
    turned = _verdict(tmp_path / "b", {"local": (0.4, 0.4, 0.4), "fedal": (0.5, 0.525, 0.55)})
    assert turned == best  # whichever is the reference
    others = {"fedmd": (0.25, 0.25, 0.25), "local": (0.4, 0.4, 0.4), "fedal": (0.5, 0.525, 0.55)}
    assert _verdict(tmp_path / "c", others) == best  # none of the two is the reference


def test_the_verdict_is_open_if_the_interval_contains_0_or_there_is_one_seed(
    tmp_path: Path,
) -> None:
    near = _verdict(tmp_path / "a", {"fedal": (0.5, 0.25, 0.5), "local": (0.25, 0.5, 0.25)})
    assert (
        near is not None
        and near.text.startswith("No clear winner: fedal +8.3 over local in accuracy on the g")
        and not near.decided
    )
    one = _verdict(tmp_path / "b", {"fedal": (0.5,), "local": (0.25,)})
    assert one == results.Verdict(
        "fedal",
        "fedal +25.0 over local in accuracy on the global test set, 1 seed: too few to rule out "
        "chance",
        False,
    )
    level = _verdict(tmp_path / "c", {"fedal": (0.5, 0.5), "local": (0.5, 0.5)})
    assert level is not None and level.text.startswith("No clear winner: ") and not level.decided
    assert _verdict(tmp_path / "d", {"fedal": (0.5, 0.5)}) is None


def test_the_verdict_pairs_common_seeds_only(tmp_path: Path) -> None:
    """Three seeds of the reference, two of each other: the first two are common."""
    found = _verdict(
        tmp_path / "a", {"fedmd": (0.25, 0.25, 0.75), "fedal": (0.6, 0.65), "local": (0.5, 0.5)}
    )
    assert found is not None and found.winner == "fedal"
    assert found.text.startswith("fedal +12.5 over local") or found.text.startswith(
        "No clear winner: fedal +12.5 over"
    )
    assert found.text.endswith("2 seeds")


def test_verdicts_say_no_more_than_the_seeds() -> None:
    assert "larger than the variation over seeds" in results.conclusion(
        _difference(0.20, 0.21, 0.22)
    )
    agree = results.conclusion(_difference(0.05, 0.30, 0.10))
    assert "though all seeds agree in sign" in agree and "do not show" in agree
    assert results.conclusion(_difference(0.0)).startswith("a is level with b in the one seed")
    assert "10.0 points below" in results.conclusion(_difference(-0.1))


def test_numbers_as_words() -> None:
    plain = lambda text: text.replace(fmt.NBSP, " ")
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1.00 kB",
        7_680_000: "7.68 MB",
        999_600: "1.00 MB",
        15_360_000: "15.4 MB",
    }
    assert {count: plain(fmt.size(count)) for count in sizes} == sizes
    times = {
        0.04: "0.0 s",
        63.28: "63.3 s",
        99.96: "1 min 40 s",
        7199.6: "2 h 0 min",
        11_520: "3 h 12 min",
    }
    assert {seconds: plain(fmt.duration(seconds)) for seconds in times} == times
    assert (
        plain(fmt.percent(0.86744)) == "86.7 %"
        and plain(fmt.percent(float("nan"))) == "not a number %"
    )
    assert [fmt.points(p) for p in (0.0273, -0.5, -0.0001, 0.0)] == ["+2.7", "−50.0", "0.0", "0.0"]
    assert (
        fmt.together([]) == ""
        and fmt.together(["a"]) == "a"
        and fmt.together(["a", "b", "c"]) == "a, b and c"
    )
    assert fmt.times(1, "client") == "one client" and fmt.times(1200, "client") == "1,200 clients"
    assert (
        fmt.span([600, 600]) == "600" and fmt.span([3, 1, 2]) == "1 to 3" and fmt.span([4]) == "4"
    )


@given(st.text(max_size=60), st.integers(5, 40))
def test_shortened_names_fit_and_print(text: str, longest: int) -> None:
    short = fmt.shortened(text, longest)
    assert len(short) <= longest and short.isprintable()
    assert len(short) == min(len(text), longest)


def test_looks_differ() -> None:
    seen = {(x.color, x.shape, x.dash) for x in map(styles.series_style, range(24))}
    assert len(seen) == 24


def test_tables_are_read_as_runs_write_them() -> None:
    assert set(schema.MetricRow.model_fields) <= set(record.METRICS)
    assert set(schema.FailureRow.model_fields) <= set(record.FAILURES)
    assert set(schema.MixingRow.model_fields) <= set(record.MIXING)
    assert set(schema.LedgerRow.model_fields) <= set(ledger.COLUMNS)


# -- personalized methods --------------------------------------------------------------------------

CHOICES = [
    (1, "client-0", "0:0.5 1:0.25 2:0.25"),
    (1, "client-1", "1:1"),
    (2, "client-0", "0:0.5 2:0.5"),
]


def test_own_accuracy_leads_where_there_is_an_evaluation_mode(tmp_path: Path) -> None:
    text = checked(written(write_run(tmp_path / "run", tuned=True))).text
    # Own accuracy is half of the global one, tuned three quarters: 75 / 2 and 75 * 3 / 4.
    assert (
        "On their own class mix of digits, three clients reached 56.2 % ± 7.7 (s.d. over "
        "clients) tuned and" in text
    )
    assert "37.5 % ± 5.1 unadapted" in text and "one's own most frequent class gives 43.8 %" in text
    assert "On own class mix, tuned" in text and "unadapted" in text
    assert (
        "gain over unadapted models is +18.8 points; 3 of 3 clients improve, and 0 get worse."
        in text
    )
    assert "Mixing weights" not in text


def test_an_unfinished_run_has_its_evaluation_modes(tmp_path: Path) -> None:
    text = checked(written(write_run(tmp_path / "run", tuned=True, finished=False))).text
    assert (
        "This run is unfinished" in text
        and "reached 56.2 % ± 7.7 (s.d. over clients) tuned" in text
    )


def test_who_learns_from_whom(tmp_path: Path) -> None:
    counts = [[4, 0], [0, 4], [1, 3]]
    folder = write_run(tmp_path / "run", counts=counts, mixing=CHOICES)
    text = checked(written(folder)).text
    # In round 2 client 0 takes one other, with whom it shares a quarter; the three pairs share 0,
    # 1/4 and 3/4.
    assert "averages the models of 1.0 others" in text and "which has weight 0.50" in text
    assert "own is 25.0 %; equal weights would give 33.3 %" in text
    assert "round 1" in text and "round 2" in text


def test_nobody_takes_anything(tmp_path: Path) -> None:
    text = checked(
        written(write_run(tmp_path / "run", mixing=[(1, "client-0", "0:1"), (1, "client-1", "")]))
    ).text
    assert "no client used another's model" in text


@pytest.mark.parametrize("clients", [60, 230])
def test_maps_of_many_clients(tmp_path: Path, clients: int) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 30, (clients, 10)).tolist()
    near = [
        (t, f"client-{i}", f"{i}:0.5 {(i + t) % clients}:0.5")
        for t in (1, 2, 3)
        for i in range(clients)
    ]
    folder = write_run(
        tmp_path / "run",
        accuracy=[0.5] * clients,
        counts=counts,
        classes=list("abcdefghij"),
        mixing=near,
    )
    text = checked(written(folder)).text
    assert ("3 × 3 clients" in text) == (clients > mixing.MAX_CLIENTS)


@pytest.mark.parametrize("weights", ["0:x", "9:0.5", "0 0.5", "-1:0.5"])
def test_a_damaged_table_of_mixing(tmp_path: Path, weights: str) -> None:
    with pytest.raises(DataError, match=r"mixing\.csv"):
        report.write(write_run(tmp_path / "run", mixing=[(1, "client-0", weights)]))


def test_what_is_taken_by_hand() -> None:
    alike = mixing.overlaps(np.array([[2, 0], [0, 5], [5, 5]]))
    np.testing.assert_allclose(alike, [[1, 0, 0.5], [0, 1, 0.5], [0.5, 0.5, 1]])
    assert mixing.equal_weight_overlap(alike) == pytest.approx(1 / 3)
    found = mixing.mixing_statistics(np.array([[0.6, 0.1, 0.3], [0, 1, 0], [0, 0, 0]]), alike)
    np.testing.assert_allclose(found.overlap, [0.375, np.nan, np.nan])
    np.testing.assert_allclose(found.number, [1.6, 0, np.nan])
    np.testing.assert_allclose(found.own, [0.6, 1, np.nan])


def test_alike_clients_stand_side_by_side() -> None:
    groups = np.arange(12) % 3
    order = mixing.similarity_order(mixing.overlaps(np.eye(3)[groups] * 9))
    assert sorted(order) == list(range(12))
    assert np.count_nonzero(np.diff(groups[order])) == 2


def test_blocks_keep_what_is_taken() -> None:
    weights = np.random.default_rng(1).random((7, 7))
    blocks = mixing._blocks(weights, 3)
    assert blocks.shape == (3, 3)
    np.testing.assert_allclose(blocks[0].sum(), weights[:3].sum(1).mean())
    np.testing.assert_allclose(blocks[2, 1], weights[6, 3:6].sum())


def test_a_comparison_of_personal_methods(tmp_path: Path) -> None:
    accuracies = {"alike": [0.75, 0.625], "all": [0.5, 0.375]}
    folder = write_comparison(tmp_path / "c", accuracies, tuned=True, mixing=CHOICES)
    found = json.loads((folder / "comparison.json").read_text())
    assert found["metric"] == "own accuracy tuned" and set(found["further"]) == {
        "own accuracy",
        "accuracy",
    }
    eval_modes = {"own accuracy tuned": 0.75, "own accuracy": 0.5, "accuracy": 1.0}
    for metric, part in eval_modes.items():
        (d,) = found["differences"] if metric == found["metric"] else found["further"][metric]
        assert d["mean"] == pytest.approx(0.25 * part)
    text = checked(written(folder)).text
    assert (
        "Accuracy on own class mix, tuned: alike 51.6 % ± 6.6 and all 32.8 % ± 6.6 (s.d. over "
        "seeds)" in text
    )
    assert (
        "On own class mix, tuned: Over two seeds, alike is on average 18.8 points above all" in text
    )
    assert "On the global test set: accuracy of the first minus the other" in text
    assert "Mixing weights" in text and "Overlap at equal weights" in text


def test_each_method_leads_with_its_main_mode_and_global_rows_have_their_question(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(tmp_path / "a", tuned=True),
        write_run(tmp_path / "b", name="local", accuracy=[0.5, 0.5, 0.5]),
    ]
    text = checked(report.write_many(runs, tmp_path / "many.html").read_text(encoding="utf-8")).text
    assert (
        "Accuracy on own class mix, each in its main mode (fedal: tuned; local: unadapted): "
        "fedal 56.2" in text
    )
    assert f"{results.EVERYBODY} On the global test set: accuracy of the first minus" in text


def test_values_of_tables_have_no_powers_of_ten_where_people_write_none() -> None:
    shown = [fmt.value(x) for x in (53678.4, 1e9 + 1, 0.81794, -1234.5, 2e-5, 3e20, "a", None)]
    assert shown == [
        "53678",
        "1000000001",
        "0.8179",
        f"{fmt.MINUS}1234",
        f"2e{fmt.MINUS}05",
        "3e+20",
        "a",
        "–",
    ]
