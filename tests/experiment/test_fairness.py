"""A comparison says what is not equal, tunes all methods alike if asked, and becomes a table of a
paper.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.experiment.cards import latex_escaped, latex_table
from fedloom.experiment.plan.reading import seeds_from, seeds_of
from fedloom.experiment.run.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report import paper
from fedloom.report.quick import comparison_card
from fedloom.report.results import verdict
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

SMALL: dict[str, Any] = {
    "clients": 3,
    "public_rows": 40,
    "test_rows": 60,
    "models": "mlp",
    "evaluate": {"points": 1},
}
STEPS = """
from fedloom.methods.averaging import fedavg
from dataclasses import replace
METHODS = tuple(replace(m, name="mine") for m in fedavg.METHODS if m.name == "fedavg")
"""


DOCUMENT = r"""\documentclass{article}\usepackage{booktabs}\usepackage{graphicx}
\begin{document}\input{table.tex}\input{more.tex}\par\includegraphics{accuracy.pdf}
\bibliographystyle{plain}\bibliography{references}\end{document}"""


@pytest.fixture(scope="module")
def by_rounds() -> Comparison:
    return Comparison(**fedloom.compare(["fedal", "fedmd", "local"], seeds=2, rounds=2, **SMALL))


def test_equal_rounds_of_unequal_steps_stand_in_the_headline_with_the_numbers(
    by_rounds: Comparison,
) -> None:
    assert by_rounds.unequal == ["local steps of a client: fedal 10, fedmd 2, local 10"]
    found = verdict(by_rounds)
    assert found is not None and not found.decided
    assert found.text.startswith(
        "Not an equal comparison (local steps of a client: fedal 10, fedmd 2, local 10): "
    )
    assert '{ method = "fedmd", rounds = 10 }' in by_rounds.remarks[0]
    card = comparison_card(by_rounds, found.text)
    assert "give methods=[{ &quot;method&quot;: &quot;fedal&quot;" in card
    assert '<td style="text-align:left">fedmd</td><td style="text-align:right">' in card


def test_rounds_of_an_entry_make_the_steps_equal() -> None:
    methods: list[Any] = ["fedal", {"method": "fedmd", "rounds": 10}]
    found = Comparison(**fedloom.compare(methods, iterations=10, **SMALL))
    assert found.unequal == [] and found.remarks == []


def test_epochs_count_as_the_steps_that_they_take(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STEPS)
    entries: list[Any] = ["fedal", {"method": str(tmp_path / "mine.py"), "params": {"epochs": 20}}]
    found = fedloom.compare(entries, iterations=20, partition="iid", **SMALL)
    rows = 1797 - 449 - 40  # of the digits, without test and public rows
    steps = 20 * -(-(rows // 3) // 128)
    assert found["unequal"] == [f"local steps of a client: fedal 20, mine {steps}"]
    assert any(
        text.startswith("batch sizes differ: fedal 32, mine 128") for text in found["remarks"]
    )
    # its method's name would not be found, nor its file without the folder
    page = tmp_path / "mine.py"
    assert f'{{ method = "{page}", params = {{ epochs = 20 }}, rounds = 1 }}' in found["remarks"][0]


def test_other_networks_and_lone_settings_are_named() -> None:
    settings = {**SMALL, "models": {"pool": None}}
    entries: list[Any] = [{"method": "fedmd", "params": {"lr": 0.01}}, "feddf", "fedavg"]
    found = fedloom.compare(entries, iterations=1, **settings)
    assert any(re.match(r"networks: .*fedavg cnn-small", text) for text in found["unequal"])
    assert any("fedmd lr = 0.01" in text and "--tune" in text for text in found["remarks"])
    ablation: list[Any] = [{"name": "a", "method": "fedmd", "params": {"lr": 0.01}}, "fedmd"]
    assert fedloom.compare(ablation, iterations=1, **SMALL)["remarks"] == []


def test_tuning_chooses_each_rate_on_validation_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.experiment.run import tuning

    # a rate that learns nothing, and one that learns
    monkeypatch.setattr(tuning, "FACTORS", (1e-6, 10.0))
    found = fedloom.compare(["fedmd", "local"], iterations=20, tune=True, **SMALL)
    assert "fedmd 0.01, local 0.01" in found["remarks"][0] and found["unequal"] == []
    assert "rate that was tried is the best of fedmd, local" in found["remarks"][1]
    assert "Tuned alike: the learning rate" in paper.latex(Comparison(**found))
    with pytest.raises(ConfigError, match=r"data\.validation"):
        fedloom.compare(["fedmd", "local"], rounds=1, tune=True, validation=0.2, **SMALL)
    with pytest.raises(ConfigError, match="the seed 9999"):
        fedloom.compare(["fedmd", "local"], rounds=1, tune=True, seeds=[9999], **SMALL)


def test_a_stopped_comparison_does_not_tune_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.experiment.run import tuning
    from fedloom.experiment.run.execute import Status, Stopped

    monkeypatch.setattr(tuning, "FACTORS", (1.0, 3.0))
    given: dict[str, Any] = {"rounds": 2, "tune": True, "out": tmp_path / "mine", **SMALL}
    seen: list[tuple[str, int]] = []

    def show(status: Status) -> None:
        seen.append((status.run.label, status.round))
        if status.run.label == "local-lr0.003" and status.round == 1:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Stopped)):
        fedloom.compare(["fedmd", "local"], progress=show, **given)
    assert seen[:2] == [("fedmd-lr0.001", 1), ("fedmd-lr0.001", 2)] and len(seen) == 7
    seen.clear()
    found = fedloom.compare(
        ["fedmd", "local"],
        progress=lambda s: seen.append((s.run.label, s.round)),
        resume=True,
        **given,
    )
    assert not any(label.startswith("fedmd-lr") for label, _ in seen) and ("fedmd", 2) in seen
    whole = fedloom.compare(["fedmd", "local"], **{**given, "out": None})
    assert found["remarks"] == whole["remarks"] and found["differences"] == whole["differences"]


def test_a_plan_counts_the_runs_that_tune(command: Callable[..., Done]) -> None:
    said = command(
        "compare", "fedmd", "local", "--seeds", "3", "--iterations", "5", "--tune", "--plan"
    ).stdout
    assert "16 runs of " in said


def test_an_interval_near_0_shows_on_which_side_it_is() -> None:
    assert (
        fmt.between(0.0003, 0.015) == "+0.03 to +1.5"
        and fmt.between(-0.0004, 0.0) == "−0.04 to 0.0"
    )
    assert (
        fmt.between(-0.003, 0.0201) == "−0.3 to +2.0"
        and fmt.between(0.0, 1.2, share=False) == "0.000 to +1.200"
    )


def test_a_number_of_seeds_is_that_many() -> None:
    assert seeds_of("5") == [0, 1, 2, 3, 4] == seeds_from(5) and seeds_of("0,5") == [0, 5]
    assert seeds_of("0") == [0] and seeds_of("7-7") == [7]
    for wrong in (0, -1, True, 2026):
        with pytest.raises(ConfigError, match="list the seeds"):
            seeds_from(wrong)


def test_a_comparison_becomes_a_table_and_references(by_rounds: Comparison) -> None:
    table, references = paper.latex(by_rounds), paper.bibtex(by_rounds)
    cited = {key for keys in re.findall(r"\\cite\{([\w,]+)\}", table) for key in keys.split(",")}
    assert cited and cited <= set(re.findall(r"^@\w+\{(\w+),", references, re.M))
    assert table.count(r"\\") == 4 and table.count("$ [$") == 2
    assert "Not equal: local steps of a client" in table
    for text in (table, references):
        assert text.count("{") == text.count("}")


def test_signs_and_letters_become_what_latex_prints() -> None:
    assert latex_escaped("50 % of a_b & #1") == r"50 \% of a\_b \& \#1"
    assert latex_escaped("β₂ − Δx² ≥ 3 µg") == r"$\beta$$_{2}$ $-$ $\Delta$x$^{2}$ $\geq$ 3 $\mu$g"
    assert latex_escaped("λΛ größe <ο>") == r"$\lambda$$\Lambda$ größe $<$ο$>$"
    lines = latex_table(
        ["Owner", "Decision", "Gain"],
        [["北京", "join", -0.5], ["b", "same", 1e-6], ["c", "–", None]],
    )
    said, begin, *rows = lines.splitlines()
    assert said.endswith("a font that has 北京") and begin == r"\begin{tabular}{llr}"
    assert rows[3:6] == [
        r"  北京 & join & $-0.500$ \\",
        r"  b & same & $1.0\times10^{-6}$ \\",
        r"  c & -- & -- \\",
    ]


def test_every_method_has_entries_with_keys_of_its_papers() -> None:
    from fedloom.methods import registry

    titles: dict[str, str] = {}
    for name, method in registry().items():
        for one in paper.cited(method.paper):
            entry, key = paper.entry(one), paper.cite_key(one)
            assert entry.startswith(
                (f"@misc{{{key},", f"@inproceedings{{{key},", f"@article{{{key},")
            ), name
            assert re.search(
                r"author = \{\w.*title = \{\{[^;]+\}\}.*year = \{\d{4}\}", entry, re.S
            ), entry
            assert titles.setdefault(key, entry) == entry  # one key for each paper
    assert (
        len(paper.cited(registry()["fedforest"].paper)) == 2
        and paper.cited(registry()["local"].paper) == []
    )


def compile_latex(folder: Path, more: str) -> None:
    """The table, the references, the figure and a further table as a PDF, without a warning."""
    (folder / "more.tex").write_text(more)
    (folder / "all.tex").write_text(DOCUMENT)
    for program in ("pdflatex", "bibtex", "pdflatex", "pdflatex"):
        words = (
            ["all"]
            if program == "bibtex"
            else ["-interaction=nonstopmode", "-halt-on-error", "all.tex"]
        )
        done = subprocess.run(
            [program, *words], cwd=folder, capture_output=True, text=True, errors="replace"
        )
        assert done.returncode == 0, done.stdout
    assert not re.findall(r"(?:Warning|Overfull|undefined).*", done.stdout)
    for file in folder.glob("*.*"):
        if file.stem in ("all", "more"):
            file.unlink()


def test_the_command_counts_iterations_and_writes_the_files_of_a_paper(
    tmp_path: Path, command: Callable[..., Done]
) -> None:
    small = (
        "-s",
        "data.clients=3",
        "-s",
        "models.pool=mlp",
        "-s",
        "data.public_rows=40",
        "-s",
        "evaluate.points=1",
    )
    done = command(
        "compare",
        "fedmd",
        "local",
        "--iterations",
        "5",
        "--seeds",
        "2",
        "--latex",
        "--out",
        "c",
        *small,
    )
    assert "Not an equal" not in done.stdout and "table.tex" in done.stdout
    pdf = (tmp_path / "c" / "paper" / "accuracy.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf
    assert {p.name for p in (tmp_path / "c" / "paper").iterdir()} == {
        "table.tex",
        "references.bib",
        "accuracy.pdf",
    }
    if shutil.which("pdflatex"):
        columns = ["β₂ > 3 µg/l", "50 %", "s_d", "p", "from", "to", "größe"]
        compile_latex(
            tmp_path / "c" / "paper", latex_table(columns, [["a & b", -0.5, 1e-6, None, 1, 2, "é"]])
        )
    wrong = command("compare", "fedmd", "local", "--iterations", "5", "--rounds", "2", code=2)
    assert "--rounds or --iterations, not both" in wrong.stderr
    assert "no comparison.json" in command("report", "nowhere", "--latex", code=2).stderr
