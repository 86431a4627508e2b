"""A sweep: what is refused before any work, what is tried, and what a killed or changed sweep does
not repeat.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedloom.cli import main
from fedloom.cli.progress import closing
from fedloom.core.errors import ConfigError, EngineError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import read as read_run_file
from fedloom.experiment.pool.pool import Ended, Job, Standing, is_finished
from fedloom.experiment.run.execute import execute
from fedloom.experiment.run.metrics import GLOBAL
from fedloom.report.formatting import NBSP
from fedloom.report.metrics import RunMetric, value_of
from fedloom.report.read import read_run
from fedloom.support.paths import write_atomically
from fedloom.sweep.config import SettingValues, Sweep, nested, read
from fedloom.sweep.run import OWN, SweepResults, Trial, _study, run_sweep

optuna = pytest.importorskip("optuna")

RUN = """
title = "How fast?"
method = "fedal"
rounds = 1
data.clients = 2
models.pool = ["linear"]
evaluate.points = 1
"""


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Sweep]:
    """A sweep of the text of its table."""

    def make(text: str, *overrides: str, seeds: Sequence[int] | None = None) -> Sweep:
        file = tmp_path / "mine.toml"
        file.write_text(f"{RUN}\n[sweep]\n{text}")
        return read(str(file), overrides, seeds)

    return make


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are done in this process; the names of those that were done."""
    done: list[str] = []

    def run_all(jobs: Sequence[Job], *, stop: Callable[[], bool], **_: Any) -> Iterator[Ended]:
        for job in jobs:
            if is_finished(job.run, job.folder):
                yield Ended(job, "kept")
            elif stop():
                yield Ended(job, "left")
            elif job.run.method == "local":
                yield Ended(job, "failed", "on purpose")
            else:
                execute(job.run, job.folder)
                done.append(job.name)
                yield Ended(job, "finished")

    monkeypatch.setattr("fedloom.sweep.run.run_all", run_all)
    return done


GRID = 'over."params.lr" = [0.001, 0.05]\nover."params.tau" = [1, 3]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "over = { rounds = [1, 2], iterations = [3, 4] }",
            "over lists both rounds and iterations",
        ),
        (
            'over = { "data.options.alpha" = [0.1], "data.options" = [{ alpha = 5.0 }] }',
            "over lists data.options and data.options.alpha, which is part of it",
        ),
        (
            'search = "tpe"\nover."params.lr" = { low = 0.1, high = inf }',
            "params.lr.high: must be a finite number",
        ),
        (
            'search = "tpe"\nover."params.lr" = { low = -inf, high = 1 }',
            "params.lr.low: must be a finite number",
        ),
        (
            GRID + "saerch = 'grid'",
            "sweep.saerch: there is no such setting. Did you mean 'search'?",
        ),
        (GRID + "trials = 3", "trials is valid for random and tpe only"),
        (GRID + "seeds = [1, 1]", "lists 1 twice"),
        (GRID + "confirm = [10]", "sweep.confirm: there is no such setting"),
        ("over = {}", "sweep.over: "),
        ("", "sweep.over: must be set"),
        ('over."params.lr" = []', "params.lr has no values"),
        ('over."params.lr" = [0.1, 0.1]', "lists a value twice"),
        (
            'over."params.lr" = 0.1',
            "params.lr: must be a list or an interval, such as [0.1], not 0.1",
        ),
        (
            'over."params.lr" = { low = 0.1, high = 1.0 }',
            "params.lr is an interval, but a grid needs a list",
        ),
        (
            'search = "tpe"\nover."params.lr" = { low = 1, high = 0.1 }',
            "params.lr: low must be less than high",
        ),
        (
            'search = "tpe"\nover."params.lr" = { low = 0, high = 1, log = true }',
            "low must be above 0",
        ),
        (
            'search = "tpe"\nover."params.lr" = { low = 0.1, hihg = 1 }',
            "hihg: there is no such setting",
        ),
        (
            'search = "tpe"\nover."params.tau" = { low = 1, high = 9 }',
            "params.tau = 3.96: params.tau:",
        ),
        ("over.seed = [1, 2]", "over cannot vary seed"),
        ('over."data.validation" = [0.1, 0.2]', "set validation in [sweep]"),
        (GRID + "validation = 1.0", "validation: must be less than 1"),
        ('over."engine.workers" = [1, 2]', "over cannot vary engine.workers"),
        ('over = [{ "params.tau" = [1] }, { "params.lr" = [2] }]', "sweep.over: must be one table"),
    ],
)
def test_what_is_wrong_is_reported(asked: Callable[..., Sweep], text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(text)
    assert said in str(error.value)


def test_each_error_of_the_values_is_reported_once_with_a_setting_that_has_it(
    asked: Callable[..., Sweep],
) -> None:
    with pytest.raises(ConfigError) as error:
        asked(
            'over."params.tau" = [0, 1]\nover."params.lr" = [0.1, -1]\nover."params.batch_size" '
            "= [8, 16]"
        )
    one, two = str(error.value).splitlines()
    assert one.startswith("params.tau = 0, params.lr = 0.1, params.batch_size = 8: params.tau:")
    assert "params.lr = -1" in two and ": params.lr:" in two
    assert one.endswith("(and with 3 more)") and two.endswith("(and with 3 more)")


def test_a_large_grid_is_checked_value_by_value(asked: Callable[..., Sweep]) -> None:
    rates = [0.1 + n / 1000 for n in range(70)]
    with pytest.raises(ConfigError, match=r"params\.tau = 0: params\.tau:"):
        asked(f'over."params.lr" = {rates}\nover."params.tau" = {[*range(1, 60), 0]}')


def test_a_file_without_a_sweep_and_one_with_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(RUN)
    with pytest.raises(ConfigError, match=r"has no table \[sweep\]"):
        read(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text(f"{RUN}\n[compare]\nmethods = ['fedal']\n[sweep]\n{GRID}")
    with pytest.raises(ConfigError, match="Remove one"):
        read(str(tmp_path / "b.toml"))


@pytest.mark.parametrize("search", ["grid", "tpe"])
def test_a_missing_extra_is_reported_before_any_work(
    asked: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    monkeypatch.setattr("fedloom.sweep.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'Install it: pip install "fedloom\[sweep\]"'):
        asked(GRID, f"sweep.search={search}")


def test_tables_within_tables_are_dotted_keys(asked: Callable[..., Sweep]) -> None:
    text = (
        "[sweep.over.params]\nlr = [0.001, 0.1]\ntau = [1, 3]\n[sweep.over.data.options]\nalpha "
        "= [0.1, 1.0]"
    )
    sweep = asked(text)
    assert [*sweep.config.over] == ["params.lr", "params.tau", "data.options.alpha"]
    assert sweep.config.number == 8
    run = sweep.run({"params.lr": 0.1, "data.options.alpha": 1.0}, 5)
    assert (run.params["lr"], run.data.options["alpha"], run.data.clients, run.seed) == (
        0.1,
        1.0,
        2,
        5,
    )
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_what_the_docs_show_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    shown = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    tried = []
    for number, block in enumerate(shown):
        (tmp_path / f"{number}.toml").write_text(block)
        tried.append(read(str(tmp_path / f"{number}.toml")).config.number)
    assert tried == [4, 40]


def test_without_validation_rows_settings_are_compared_on_the_test_rows(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path
) -> None:
    sweep = asked('over."params.lr" = [0.05]\nvalidation = 0')
    found = run_sweep(sweep, tmp_path)
    for trial in found.trials:
        (job,) = trial.jobs
        assert json.loads((job.folder / "result.json").read_text())["validation"] == 0


def test_overrides_and_seeds(asked: Callable[..., Sweep]) -> None:
    sweep = asked(GRID, "sweep.better=lower", "data.clients=3", seeds=[4, 5])
    assert sweep.config.seeds == (4, 5) and sweep.config.less and sweep.own().data.clients == 3
    assert not asked(GRID).config.less
    with pytest.raises(ConfigError, match=r"set validation in \[sweep\]"):
        asked(GRID, "data.validation=0.1")
    assert (
        asked(GRID, "sweep.metric=log loss").config.less
        and asked(GRID, "sweep.metric=bytes up").config.less
    )


TPE = """
search = "tpe"
trials = 40
over."params.lr" = { low = 1e-4, high = 0.1, log = true }
over."params.tau" = { low = 1, high = 20, int = true }
over."models.pool" = [["linear"], ["mlp"]]
"""


@pytest.fixture
def valued(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RunConfig], float]], list[Path]]:
    """Makes runs of a value and no work; returns the folders of those that are done."""

    def make(value: Callable[[RunConfig], float]) -> list[Path]:
        runs: dict[Path, RunConfig] = {}
        done: list[Path] = []

        def run_all(jobs: Sequence[Job], *, stop: Callable[[], bool], **_: Any) -> Iterator[Ended]:
            for job in jobs:
                if stop():
                    yield Ended(job, "left")
                    continue
                runs[job.folder] = job.run
                yield Ended(job, "kept" if job.folder in done else "finished")
                done.extend([] if job.folder in done else [job.folder])

        monkeypatch.setattr("fedloom.sweep.run.run_all", run_all)
        monkeypatch.setattr("fedloom.sweep.run._value", lambda _, folder: value(runs[folder]))
        return done

    return make


def near(run: RunConfig) -> float:
    """Best at a rate of .01 and a linear model."""
    return -abs(math.log10(run.params.get("lr", 1.0)) + 2) - (run.models.pool == ("mlp",))


def settings(found: SweepResults) -> list[SettingValues]:
    """Those of the trials, in order."""
    return [trial.setting for trial in found.trials if trial.number != OWN]


def test_tpe_draws_the_same_again_and_learns(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    valued(near)
    drawn = settings(run_sweep(asked(TPE), tmp_path / "a"))
    assert drawn == settings(run_sweep(asked(TPE), tmp_path / "b")) and len(drawn) == 40
    assert all(1e-4 <= s["params.lr"] <= 0.1 and s["params.tau"] in range(1, 21) for s in drawn)
    assert all(s["models.pool"] in (["linear"], ["mlp"]) for s in drawn)
    other = settings(run_sweep(asked(TPE, "sweep.seed=1", "sweep.trials=8"), tmp_path / "a"))
    assert other[:4] != drawn[:4]
    first, last = (
        sum(-abs(math.log10(s["params.lr"]) + 2) - (s["models.pool"] == ["mlp"]) for s in part)
        for part in (drawn[:12], drawn[-12:])
    )
    assert last > first + 4


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_a_stopped_search_goes_on_as_it_would_have(
    asked: Callable[..., Sweep],
    valued: Callable[..., list[Path]],
    tmp_path: Path,
    search: str,
) -> None:
    short = asked(TPE, f"sweep.search={search}", "sweep.trials=10")
    done = valued(near)
    whole = run_sweep(short, tmp_path / "whole")
    done.clear()
    assert run_sweep(short, tmp_path / "cut", stop=lambda: len(done) >= 7).stopped
    more = run_sweep(asked(TPE, f"sweep.search={search}", "sweep.trials=12"), tmp_path / "cut")
    assert settings(more)[:10] == settings(whole) and len(settings(more)) == 12
    assert len(done) == len({*done}) == 13


def test_random_draws_do_not_depend_on_values(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    text = TPE.replace("tpe", "random")
    valued(lambda run: run.params.get("lr", 0.0))
    one = settings(run_sweep(asked(text), tmp_path / "a"))
    valued(lambda run: -run.params.get("lr", 0.0))
    assert settings(run_sweep(asked(text), tmp_path / "b")) == one


def test_a_trial_that_a_kill_left_without_its_settings_is_drawn_again(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    valued(near)
    sweep = asked(GRID)
    study = _study(sweep, tmp_path)
    study.ask()  # and no more
    found = run_sweep(sweep, tmp_path)
    assert [trial.number for trial in found.trials] == [OWN, 1, 2, 3, 4]
    assert settings(found) == [
        {"params.lr": rate, "params.tau": tau} for rate in (0.001, 0.05) for tau in (1, 3)
    ]


@pytest.mark.parametrize("more", ['{"op_code":5,"wor', '{"op_code":5,"wor\n{}\n', ""])
def test_a_damaged_journal_is_named(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path, more: str
) -> None:
    valued(near)
    run_sweep(asked(GRID), tmp_path)
    with (tmp_path / "study.log").open("a") as file:
        file.write(more)
    if more:
        with pytest.raises(EngineError, match=r"study\.log is damaged .* Delete it"):
            run_sweep(asked(GRID), tmp_path)
        (tmp_path / "study.log").unlink()
    assert all(one.state == "kept" for one in run_sweep(asked(GRID), tmp_path).ended.values())


def test_the_study_has_the_values_and_a_changed_file_another_study(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    done = valued(near)
    found = run_sweep(asked(GRID), tmp_path)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    )
    (one,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=one.study_name, storage=storage)
    assert study.best_value == found.ranked[0].mean
    assert [t.value for t in study.trials] == [t.mean for t in found.trials[1:]]
    count = len(done)
    larger = 'over."params.lr" = [0.001, 0.05]\nover."params.tau" = [1, 3, 7]\n'
    run_sweep(asked(larger), tmp_path)
    assert len(done) == count + 2 and len(optuna.get_all_study_summaries(storage)) == 2


def test_a_grid_is_the_same_after_a_stop(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path
) -> None:
    text = 'seeds = [0, 1]\nover = { "params.lr" = [0.0001, 0.05], "params.batch_size" = [16, 32] }'
    sweep, out = asked(text), tmp_path / "out"
    stopped = run_sweep(sweep, out, stop=lambda: len(here) >= 4)
    assert stopped.stopped and len(here) == 4
    stopped.write(out)
    found = run_sweep(sweep, out)
    assert not found.stopped and len(here) == len(set(here)) == 10
    assert settings(found) == [
        {"params.lr": rate, "params.batch_size": size}
        for rate in (0.0001, 0.05)
        for size in (16, 32)
    ]
    best = found.ranked[0]
    assert best.setting["params.lr"] == 0.05 and len(found.ranked) == 5
    by_hand = [value_of(read_run(job.folder), RunMetric(GLOBAL)) for job in best.jobs]
    assert best.mean == pytest.approx(sum(by_hand) / 2) and best.mean == max(
        t.mean for t in found.trials
    )
    results = [
        json.loads((job.folder / "result.json").read_text()) for t in found.trials for job in t.jobs
    ]
    assert {result["validation"] for result in results} == {0.25}
    found.write(out)
    rows = [*csv.DictReader((out / "trials.csv").read_text().splitlines())]
    assert len(rows) == 5 * 2 and [row["trial"] for row in rows[::2]] == ["own", *"0123"]
    assert all((out / row["folder"] / "result.json").is_file() for row in rows)
    again = read_run_file(str(out / "best.toml")).run
    assert again.params["lr"] == 0.05 and again.data.validation == 0 and again.seed == 0


def test_a_metric_that_no_run_has_and_runs_that_fail(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"runs have no metric 'acuracy'. Valid metrics are .*accuracy"
    ):
        run_sweep(asked(GRID + "metric = 'acuracy'"), tmp_path / "a")
    sweep = asked('over.method = ["local", "fedmd"]')
    found = run_sweep(sweep, tmp_path / "b")
    assert {t.setting.get("method", "") for t in found.ranked} == {"fedmd", ""} and found.failed[
        0
    ].reason == "on purpose"
    states = [trial.state.name for trial in _study(sweep, tmp_path / "b").trials]
    assert states == ["RUNNING", "COMPLETE"]  # the next command tries it again
    found.trials = found.trials[1:2]
    found.write(tmp_path / "b")
    (row,) = csv.DictReader((tmp_path / "b" / "trials.csv").read_text().splitlines())
    assert row["state"] == "failed" and not (tmp_path / "b" / "best.toml").exists()


def test_data_are_got_for_what_is_to_do_alone(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    monkeypatch.setattr("fedloom.sweep.run.absent", lambda runs: [*runs])
    monkeypatch.setattr("fedloom.sweep.run.fetch", lambda runs: got.append(len(runs)))
    sweep = asked('over."params.lr" = [0.001, 0.05]')  # 0.001 is FedAL's own rate
    run_sweep(sweep, tmp_path, stop=lambda: True)
    assert got == []
    run_sweep(sweep, tmp_path)
    run_sweep(sweep, tmp_path)
    assert got == [2, 0] and len(here) == 2


def test_values_have_the_unit_of_the_metric(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    valued(lambda run: 0.25 if run.seed else 0.75)
    for name, worth in (
        ("loss mean", "0.500 ± 0.354"),
        ("best accuracy", "50.0 % ± 35.4"),
        ("rounds until best", "0.500 ± 0.354"),
        ("bytes until best", "0 B"),
    ):
        found = run_sweep(asked(GRID, f"sweep.metric={name}", seeds=[0, 1]), tmp_path)
        assert found.worth(found.trials[0]) == worth.replace(" ", NBSP)


def test_two_who_write_one_file_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    (tmp_path / ".index.html.draft").write_text("what one who was killed left")
    other = Thread(target=write_atomically, args=(path, b"other"))

    def pieces() -> Iterator[bytes]:
        yield b"one "
        other.start()
        other.join(0.2)  # it would end here if it did not wait
        yield b"whole"

    write_atomically(path, pieces())
    other.join()
    assert path.read_bytes() == b"other" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("states", "words", "status"),
    [
        ([("kept", ""), ("finished", "")], "", 0),
        ([("failed", "x"), ("finished", "")], "", 1),
        (
            [("failed", "x"), ("left", "another process is at it")],
            "Some runs are in progress in another process",
            1,
        ),
        ([("left", ""), ("left", "another process is at it")], "Stopped. Repeat the command", 130),
        ([("stopped", "after round 3"), ("finished", "")], "Stopped. Repeat the command", 130),
    ],
)
def test_how_a_command_ends(states: list[tuple[Any, str]], words: str, status: int) -> None:
    job = Job(RunConfig(), Path("x"))
    said, code = closing(Ended(job, state, reason) for state, reason in states)
    assert said.startswith(words) and bool(said) == bool(words) and code == status


@pytest.mark.parametrize(
    ("better", "values", "best"),
    [
        ("higher", [2.0, math.inf, 2.0, 1.0], OWN),
        ("lower", [2.0, math.nan, -math.inf, 1.0], 2),
        ("lower", [1.0, 2.0, 1.0, 3.0], OWN),
    ],
)
def test_the_files_own_setting_competes_and_what_is_not_finite_never_wins(
    asked: Callable[..., Sweep], tmp_path: Path, better: str, values: list[float], best: int
) -> None:
    sweep = asked(GRID, f"sweep.better={better}")
    trials = [
        Trial(n, {}, [Job(sweep.own(), tmp_path / str(n))], {0: value})
        for n, value in enumerate(values, OWN)
    ]
    found = SweepResults(sweep, trials)
    assert found.ranked[0].number == best and all(math.isfinite(t.mean) for t in found.ranked)


def test_without_a_finite_value_there_is_no_best(
    asked: Callable[..., Sweep], valued: Callable[..., list[Path]], tmp_path: Path
) -> None:
    valued(lambda run: math.nan)
    sweep = asked(GRID)
    with pytest.raises(EngineError, match="no trial has a valid result"):
        run_sweep(sweep, tmp_path)
    assert {trial.state.name for trial in _study(sweep, tmp_path).trials} == {"FAIL"}


def test_how_far_the_whole_is(
    asked: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Standing] = []

    def run_all(
        jobs: Sequence[Job], *, progress: Callable[[Standing], None], **_: Any
    ) -> list[Ended]:
        for i in range(1, len(jobs) + 1):
            progress(Standing(len(jobs), i, 0, 0, left=1.0))
        return [Ended(job, "finished") for job in jobs]

    monkeypatch.setattr("fedloom.sweep.run.run_all", run_all)
    monkeypatch.setattr("fedloom.sweep.run._value", lambda *_: 0.5)
    text = 'search = "tpe"\ntrials = 3\ntogether = 2\nover."params.lr" = { low = 0.1, high = 0.2 }'
    run_sweep(asked(text), tmp_path / "out", progress=told.append)
    assert [(one.done, one.of, one.left) for one in told] == [
        (1, 4, None),
        (2, 4, None),
        (3, 4, None),
        (4, 4, 1.0),
    ]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of the pool, as a user would have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.toml").write_text(f'{RUN}\n[sweep]\nover."params.lr" = [0.001, 0.05]\n')

    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedloom", "sweep", "mine.toml", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        return capsys.readouterr().out

    plan = call("--plan")
    assert "3 runs at most" in plan and "in sweeps/mine" in plan
    assert not (tmp_path / "sweeps").exists()
    first = call("--workers", "1")
    assert "best  sweeps/mine/best.toml" in first and "trial 1  " in first
    # 0.001 is FedAL's own rate: one run serves both
    assert len([*(tmp_path / "sweeps" / "mine" / "runs").iterdir()]) == 2
    run = next((tmp_path / "sweeps" / "mine" / "runs").iterdir())
    (run / "result.json").unlink()
    with (run / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = call("--workers", "1", code=1)
    assert text.endswith(
        "Some runs are in progress in another process. Repeat the command for the rest.\n"
    )
