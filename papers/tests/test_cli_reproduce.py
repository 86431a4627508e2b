"""`fedloom reproduce` as a person would type it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from papers.tests.tiny import TINY
from rich.console import Console

from fedloom.cli.listing import completing
from fedloom.cli.progress import PoolProgress
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.pool.pool import Ended, Job, Standing
from fedloom.report.formatting import estimate
from fedloom_papers.shipped import shipped
from tests.command import Done
from tests.experiment.waiting_page import hold, rounds, write


@pytest.fixture(autouse=True)
def table(tmp_path: Path) -> None:
    """A table of one's own in the test's folder."""
    (tmp_path / "tiny.toml").write_text(TINY)


def test_a_plan_runs_nothing(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    shown = fedloom("reproduce", "tiny.toml", "--plan").stdout
    assert "4 of 6     8     0" in shown and "8 runs, 0 finished, 8 to do" in shown
    assert "2 cells of tiny cannot be run at this scale: " in shown
    assert "sample passes, about" in shown
    shown = fedloom("reproduce", "tiny.toml", "--plan", "--scale", "paper").stdout
    assert "missing data: svhn" in shown
    shown = fedloom(
        "reproduce", "tiny.toml", "--plan", "-s", "models.pool=['liner']", code=2
    ).stdout
    assert shown.startswith("cannot be run") and "linear" in shown
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.toml"]


def test_a_full_disk_is_a_line(
    fedloom: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_plan(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "out/page")

    monkeypatch.setattr("fedloom_papers.plan.run_plan", run_plan)
    done = fedloom("reproduce", "tiny.toml", code=2)
    hint = "free some space and repeat the command, a run with --resume"
    assert done.stderr == f"error  No space left on device: out/page; {hint}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "fedloom list reproductions"),
        (["fedal-table-99"], "unknown table or figure 'fedal-table-99'"),
        (
            ["nothing"],
            "unknown table or figure 'nothing'. List all with: fedloom list reproductions",
        ),
        (["."], ". is a folder. Name a .toml file"),
        (["tiny.toml", "--scale", "big"], "--scale must be small or paper"),
        (["tiny.toml", "--only", "FedAll"], "Did you mean 'FedAL'"),
        (["tiny.toml", "-s", "seed=3"], "--seeds"),
        (["tiny.toml", "-s", "roundss=3"], "roundss"),
        (["--all", "--gpus", "1"], "No such option '--gpus'"),
        (["tiny.toml", "--gpus-per-run", "1"], "--gpus-per-run needs --ray"),
        (["tiny.toml", "--out", "tiny.toml"], "is a file"),
        (["tiny.toml", "--out", "tiny.toml/a/b"], "tiny.toml is a file; --out takes a folder"),
    ],
)
def test_mistakes_are_reported_before_any_work(
    arguments: list[str], text: str, fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    done = fedloom("reproduce", *arguments, code=2)
    assert text in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.slow
def test_ctrl_c_writes_the_page_and_the_same_command_does_what_is_left(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    page = write(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY.replace('method = "fedal"', f'method = "{page}"'))
    command = [
        "reproduce",
        "tiny.toml",
        "--only",
        "α = 5",
        "--seeds",
        "1",
        "--workers",
        "1",
        "-s",
        "rounds=60",
    ]
    shown = fedloom(*command, "--plan").stdout
    assert "timing a few small rounds of" in shown
    page.with_name("rounds").unlink()  # those of the timing
    held = hold(page, 0, 5)
    with subprocess.Popen(
        [sys.executable, "-m", "fedloom", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while "0 5" not in rounds(page):
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # until the worker knows
        held.unlink()
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (
        errors
        == "Stopping after the rounds in progress, each saved first. Press Ctrl-C again to stop "
        "at once.\n"
    )
    assert shown.endswith("Stopped. Repeat the command to continue.\n")
    (pages,) = (tmp_path / "reproduced").glob("small-*/tiny")
    shown = (pages / "index.html").read_text()
    assert "Settings differ from the file: rounds=60." in shown
    assert (
        "fedloom reproduce tiny.toml --scale small --only" in shown
        and "--seeds 1 -s rounds=60" in shown
    )
    assert json.loads((pages / "outcome.json").read_text())["runs"] < 2
    before = rounds(page)
    done = fedloom(*command).stdout
    assert len(before) < 60 and rounds(page) == [f"0 {t}" for t in range(60)]
    assert "2/2 runs" in done and f"page  {pages.relative_to(tmp_path)}/index.html" in done
    assert re.search(r"could not be tested here \(runs\) +Large is the best\.", done)
    assert "FedAL is more accurate than Local." in done
    assert json.loads((pages / "outcome.json").read_text())["runs"] == 2


def test_its_command_and_lists_are_those_of_fedloom(fedloom: Callable[..., Done]) -> None:
    assert "reproduce" in fedloom("--help").stdout
    rows = json.loads(fedloom("list", "reproductions", "--json").stdout)
    assert [row["name"] for row in rows] == [*shipped()] and rows[2]["place"] == "Table VI"
    assert [name for name, _ in completing("reproductions")("fedal-table-6")] == ["fedal-table-6"]
    done = fedloom("run", "fedal-table-6", code=2)
    assert (
        done.stderr
        == "error  fedal-table-6 has a table rows: use fedloom reproduce fedal-table-6\n"
    )


def test_help_teaches(fedloom: Callable[..., Done]) -> None:
    shown = fedloom("reproduce", "--help").stdout
    assert "fedloom reproduce fedal --plan" in shown and "--scale" in shown


def test_progress_in_a_log_is_short_and_tells_each_failure_once() -> None:
    file = StringIO()
    job = Job(RunConfig(), Path("x"), "fedal-table-6: FedAL [α]")
    with PoolProgress(Console(file=file, width=200)) as many:
        many.show(Standing(100, 20, 20, 0, ended=Ended(job, "kept")))
        for done in range(21, 101):
            many.show(Standing(100, done - 1, 20, 0, (("x", 0.5),), 300.0))
            many.show(Standing(100, done, 20, 0, (), 300.0, Ended(job, "finished")))
        many.show(Standing(101, 100, 20, 1, ended=Ended(job, "failed", "out of [memory]")))
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[1:3] == ["30/100 runs  5 min left", "40/100 runs  5 min left"]
    assert lines[-1] == "failed  fedal-table-6: FedAL [α]: out of [memory]"


def test_progress_in_a_terminal_shows_what_runs() -> None:
    file = StringIO()
    with PoolProgress(Console(file=file, width=200, force_terminal=True)) as many:
        many.show(Standing(8, 2, 0, 0, (("a", 0.25), ("b", 0.0), ("c", 0.5)), 100.0))
    assert (
        "2/8" in file.getvalue()
        and "2 min left  a 25%, b and 1 more" in file.getvalue().replace(", and", " and")
    )


def test_numbers_for_people() -> None:
    assert [estimate(s) for s in (5, 600, 7200, 864000)] == ["5 s", "10 min", "2 h", "10 days"]
