"""The page of a reproduction, its table as Markdown and CSV, and the page over several."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from papers.tests.conftest import Made, value
from papers.tests.tiny import TINY

from fedloom.experiment.config.run import RunConfig
from fedloom_papers import page
from fedloom_papers.index import Outcome, dumped, read_outcomes, write_index
from fedloom_papers.selection import Selection
from fedloom_papers.spec import parsed

A = "AFIND+ | <i>"


class Tables(HTMLParser):
    """The texts of all cells, table by table; and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._inside = True
        elif tag == "span" and self._inside:
            self.tables[-1][-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")


@pytest.fixture(scope="module")
def written(made: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    target = tmp_path_factory.mktemp("small") / "afind-table-1"
    return target, page.write(made.reproduction, "small", made.cells, made.folder, target)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_says_what_the_runs_and_the_paper_do(
    made: Made, written: tuple[Path, Outcome]
) -> None:
    target, _ = written
    lines = {(line["row"], line["column"]): line for line in table(target / "table.csv")}
    assert len(lines) == len(made.cells)
    for cell in made.cells:
        line = lines[cell.row.name, cell.column.name]
        ours = [100 * (value(made.folder(run), "accuracy") or 0) for run in cell.runs]
        assert int(line["seeds"]) == len(ours)
        if ours:
            assert float(line["mean"]) == pytest.approx(np.mean(ours))
            assert float(line["sd"]) == pytest.approx(np.std(ours, ddof=1))
        else:
            assert (line["mean"], line["remark"]) == ("", "needs ImageNet models")
        paper = [] if cell.published is None else [str(cell.published[0])]
        assert [line["paper"]] == (paper or [""])
        if ours and cell.published:
            assert float(line["difference"]) == pytest.approx(np.mean(ours) - cell.published[0])
    best = {
        (at[1], kind)
        for at, line in lines.items()
        for kind in ("best", "paper best")
        if line[kind] == "1"
    }
    assert best == {("α = 5", "best"), ("α = 0.1", "best"), ("α = 5", "paper best")}
    assert lines["Large", "α = 5"]["paper best"] == "1"


def test_the_page_shows_the_same_table(written: tuple[Path, Outcome]) -> None:
    target, _ = written
    shown, *_ = Tables((target / "index.html").read_text()).tables
    head, *rows = shown
    assert head == ["By α", "α = 5", "α = 0.1"]
    cells = {
        (row[0].strip(), column): text
        for row in rows
        for column, text in zip(head[1:], row[1:], strict=True)
    }
    for line in table(target / "table.csv"):
        text = cells[line["row"], line["column"]]
        if line["mean"]:
            assert text.startswith(f"{float(line['mean']):.1f} ± {float(line['sd']):.1f}")
            assert ("★" in text) == (line["best"] == "1")
        else:
            assert text.startswith("cannot be run here")
        assert ("☆" in text) == (line["paper best"] == "1")
        if line["paper"]:
            assert f"paper {float(line['paper']):g}" in text
        if line["difference"]:
            assert f"{float(line['difference']):+.1f}".replace("-", "−") in text
    assert cells["chance", "α = 5"] == f"{float(table(target / 'table.csv')[0]['chance']):.1f}"


def test_the_page_stands_alone_and_escapes_all_text(written: tuple[Path, Outcome]) -> None:
    text = (written[0] / "index.html").read_text()
    found = Tables(text)
    tags = [tag for tag, _ in found.tags]
    assert tags.count("script") == 1 and "i" not in tags  # only that of all reports
    assert "Skew &lt;script&gt;alert(1)&lt;/script&gt; &amp; noise" in text
    outside = [v for _, attrs in found.tags for k, v in attrs.items() if k in ("src", "href") and v]
    assert not [link for link in outside if re.match(r"\w+:|//", link)]
    pictures = [attrs for tag, attrs in found.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(pictures) == 11 and all(len(attrs["aria-label"] or "") > 30 for attrs in pictures)
    for text_of_page in (
        "Table I of Smart Sampling",
        "Digits stand in.",
        "PyTorch",
        "fedloom reproduce afind-table-1",
    ):
        assert text_of_page in text
    assert 'class="warning"' not in text


def test_every_run_is_listed_and_its_folder_exists(
    made: Made, written: tuple[Path, Outcome]
) -> None:
    target, outcome = written
    found = Tables((target / "index.html").read_text())
    *_, runs = found.tables
    assert len(runs) == 1 + 12 == 1 + outcome.runs
    for cell in made.cells:
        for run in cell.runs:
            accuracy = f"{100 * (value(made.folder(run), 'accuracy') or 0):.1f}"
            folder = made.folder(run)
            state = json.loads((folder / "result.json").read_text())["state_sha256"][:12]
            start = [cell.row.name, cell.column.name, folder.name, str(run.seed), accuracy]
            assert [row for row in runs if row[:5] == start and row[-1] == state]
    links = [attrs["href"] for tag, attrs in found.tags if tag == "a"]
    assert len(links) == 12 and all((target / str(link)).is_dir() for link in links)


def test_the_claims_are_reported(written: tuple[Path, Outcome]) -> None:
    target, outcome = written
    assert [claim.verdict for claim in outcome.claims] == [
        "reproduced",
        "could not be tested here",
        "reproduced",
    ]
    _, claims, *_ = Tables((target / "index.html").read_text()).tables
    assert [row[2] for row in claims[1:]] == [
        "reproduced",
        "could not be tested here (runs)",
        "reproduced",
    ]
    assert claims[2][3:] == ["needs ImageNet models", "–", "–", ""]
    assert outcome.cells == {"all": 4, "some": 0, "none": 0, "untestable": 2}


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table in Markdown."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables_of(text: str) -> Iterator[list[list[str]]]:
    for block in text.split("\n\n"):
        if block.startswith("|"):
            yield [cells_of(line) for line in block.splitlines()]


def test_the_markdown_has_whole_tables(written: tuple[Path, Outcome]) -> None:
    text = (written[0] / "table.md").read_text()
    numbers, claims, facts = tables_of(text)
    assert {len(line) for line in numbers} == {3} and {len(line) for line in claims} == {7}
    assert [line[0] for line in numbers] == [
        "By α",
        "---",
        r"AFIND+ \| \<i\>",
        "Local",
        "Large",
        "chance",
    ]
    mean = float(table(written[0] / "table.csv")[0]["mean"])
    assert numbers[2][1].startswith(f"{mean:.1f}") and "<br>paper\u00a078" in numbers[2][1]
    assert "<script>" not in text and facts[5][0] == "Versions"
    assert [line[2] for line in claims[2:]] == [
        "reproduced",
        "could not be tested here (runs)",
        "reproduced",
    ]


def test_what_is_missing_or_failed_is_reported(made: Made, tmp_path: Path) -> None:
    """One run is gone, one is of another version, one is damaged, and one failed."""
    every = [run for cell in made.cells for run in cell.runs]

    def folder(run: RunConfig) -> Path:
        return tmp_path / "runs" / made.folder(run).name

    for run in every:
        shutil.copytree(made.folder(run), folder(run), dirs_exist_ok=True)
    gone, other, damaged, failed = every[0], every[1], every[3], every[6]
    shutil.rmtree(folder(gone))
    path = folder(other) / "environment.json"
    path.write_text(path.read_text().replace('"fedloom": "', '"fedloom": "9.'))
    (folder(damaged) / "ledger.csv").unlink()
    (folder(failed) / "result.json").unlink()
    target = tmp_path / "small" / "afind-table-1"
    told = {folder(failed): "the loss is <not> a number"}
    bare = made.reproduction.model_copy(update={"pictures": ()})
    outcome = page.write(bare, "small", made.cells, folder, target, told)
    text = (target / "index.html").read_text()
    assert outcome.cells == {"all": 1, "some": 3, "none": 0, "untestable": 2} and outcome.runs == 9
    assert "3 of 12 runs are missing" in text and "several versions of fedloom" in text
    shown, *_ = Tables(text).tables
    assert shown[1][1].endswith("2 of 3 seeds")
    assert f"{A.replace('<', '&lt;').replace('>', '&gt;')} @ α = 5, seed 0: not run" in text
    assert "Local @ α = 5, seed 0: failed: the loss is &lt;not&gt; a number" in text
    assert "has no ledger.csv. Restore the file" in text
    assert (outcome.claims[0].verdict, outcome.claims[0].found) == (
        "could not be tested here",
        "1 of 3 seeds are missing",
    )
    assert len(outcome.versions) == 2


def test_a_page_without_any_run_says_why(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "afind-table-1"
    outcome = page.write(
        made.reproduction, "small", made.cells, lambda run: tmp_path / "runs" / run.method, target
    )
    assert (outcome.runs, outcome.seconds) == (0, 0)
    assert {claim.verdict for claim in outcome.claims} == {"could not be tested here"}
    shown, *_ = Tables((target / "index.html").read_text()).tables
    assert shown[1][1:] == ["not run\npaper 78", "not run\npaper 74.4 ± 0.7"]
    assert not [*target.glob("curves.csv")]


def test_the_pages_are_the_same_whenever_they_are_written(
    made: Made, written: tuple[Path, Outcome]
) -> None:
    target, _ = written
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    page.write(made.reproduction, "small", made.cells, made.folder, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_paper_s_page_has_every_claim_in_a_line_and_says_first_what_was_run(
    written: tuple[Path, Outcome],
) -> None:
    target, outcome = written
    path = write_index(target.parent)
    assert path == target.parent / "index.html"
    paper = target.parent / "afind"
    found = Tables((paper / "index.html").read_text())
    questions, facts, every = found.tables
    assert [row[3] for row in [*questions[1:], *facts[1:]]] == [
        claim.said for claim in sorted(outcome.claims, key=lambda claim: claim.fact)
    ]
    assert [row[0].strip() for row in facts[1:]] == [f"{A} against Local: bytes"] and len(
        every
    ) == 2
    links = [str(attrs["href"]) for tag, attrs in found.tags if tag == "a"]
    assert links == ["../afind-table-1/index.html"] * 4 and (paper / links[0]).is_file()
    text = (paper / "table.md").read_text()
    lead = text.split("\n\n")[2]
    assert lead.startswith(
        "Run here: Handwritten digits, with multilayer perceptrons, 4 clients, 2 rounds, 3 seeds."
    )
    assert "[Table I](../afind-table-1/table.md)" in text
    (one,) = json.loads((path.parent / "claims.json").read_text())
    assert [claim.pop("same_runs_as") for claim in one["claims"]] == [None] * 3
    assert one == json.loads((target / "outcome.json").read_text())
    assert [claim["verdict"] for claim in one["claims"]] == [
        claim.verdict for claim in outcome.claims
    ]


def test_the_overview_has_the_chosen_questions_with_their_beds_and_no_counts(
    written: tuple[Path, Outcome], tmp_path: Path
) -> None:
    _, outcome = written
    chosen = replace(outcome.claims[2], headline=True, bed="Digits", verdict="not seen")
    put(tmp_path, replace(outcome, claims=(*outcome.claims[:2], chosen)))
    papers, questions = Tables(write_index(tmp_path).read_text()).tables
    assert len(papers) == 2 and "Run here: Handwritten digits" in papers[1][1]
    assert [row[2:4] for row in questions[1:]] == [["Digits", "not seen on Digits"]]
    counts = re.compile(r"\d+ (of \d+ claims|reproduced|not seen|could not)")
    assert not counts.search((tmp_path / "claims.md").read_text())
    assert (tmp_path / "overview.svg").is_file()


def put(folder: Path, outcome: Outcome) -> None:
    (folder / outcome.name).mkdir(parents=True)
    (folder / outcome.name / "outcome.json").write_bytes(dumped(outcome))


def test_the_index_is_of_all_outcomes_that_are_present(
    written: tuple[Path, Outcome], tmp_path: Path
) -> None:
    _, outcome = written
    for name, place in (
        ("mine", "Table Z"),
        ("afind-figure-2", "Figure 2"),
        ("afind-table-2", "Table II"),
    ):
        put(
            tmp_path,
            replace(outcome, name=name, place=place, versions=("0.0.1",) if name == "mine" else ()),
        )
    good = dumped(outcome).decode()
    strange = {
        "torn": "{",
        "paper": good.replace('"system": "afind"', '"system": "mine"'),
        "endless": re.sub(r'"seconds": [\d.e-]+', '"seconds": 1e999', good),
    }
    for name, text in strange.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "outcome.json").write_text(text)
    found, problems = read_outcomes(tmp_path)
    assert [one.name for one in found] == ["afind-table-2", "afind-figure-2", "mine"]
    assert [problem.partition(" ")[0] for problem in problems] == [
        f"{name}/outcome.json" for name in sorted(strange)
    ]
    assert (
        replace(found[0], name=outcome.name, place=outcome.place, versions=outcome.versions)
        == outcome
    )
    text = write_index(tmp_path).read_text()
    assert "torn/outcome.json is damaged" in text and "The runs of mine used fedloom 0.0.1." in text
    questions, facts, _ = Tables((tmp_path / "afind" / "index.html").read_text()).tables
    told = [row[3].partition("\n")[2] for row in [*questions[1:], *facts[1:]]]
    again = ["same runs as Table II"] * 2
    assert sorted(told) == ["", "", "", "", "", *again, *again]  # what cannot be run is no evidence
    assert len([row for row in questions[1:] if row[0].strip()]) == 2, "a question is named once"
    assert [
        one["claims"][0]["same_runs_as"]
        for one in json.loads((tmp_path / "claims.json").read_text())
    ] == [
        None,
        "Table II",
        "Table II",
    ]
    assert "reproduced<br>same runs as Table II" in (tmp_path / "afind" / "table.md").read_text()
    assert (tmp_path / "claims.md").read_text().count("## How to read a verdict\n") == 1


def test_what_was_asked_for_is_on_the_pages(made: Made, tmp_path: Path) -> None:
    asked = Selection(("data.clients=4",), ("Local",), 2)
    cells = made.reproduction.cells("small", 2, ["Local"])
    target = tmp_path / "small-1" / "afind-table-1"
    outcome = page.write(made.reproduction, "small", cells, made.folder, target, asked=asked)
    command = (
        "fedloom reproduce afind-table-1 --scale small --only Local --seeds 2 -s data.clients=4"
    )
    changed = "Settings differ from the file: data.clients=4."
    shown, text = (target / "index.html").read_text(), (target / "table.md").read_text()
    assert command in shown and command in text and changed in text and changed in shown
    assert "Only Local was selected." in shown and "Two seeds instead of the file&#39;s 3." in shown
    assert outcome.asked == asked == read_outcomes(target.parent)[0][0].asked
    assert changed in (write_index(target.parent).parent / "claims.md").read_text()


def test_the_caption_is_no_markup(tmp_path: Path) -> None:
    one = parsed('metric = "a <b> loss"\n' + TINY, "mine")
    page.write(
        one, "small", [*one.cells("small")], lambda run: tmp_path / run.method, tmp_path / "mine"
    )
    text = (tmp_path / "mine" / "table.md").read_text()
    assert "A \\<b\\> loss" in text and "<b>" not in text
