"""A sweep: what is refused before any work, what is tried, in which order, and what the page says
of it.
"""

from __future__ import annotations

import csv
import fcntl
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from fedloom.sweep import page
from fedloom.sweep.config import SettingValues, Sweep, nested, read
from fedloom.sweep.page import pictures
from fedloom.sweep.run import SweepResults, Trial, run_sweep
from fedloom.sweep.search import proposals

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
            "over = [{ rounds = [1, 2] }, { iterations = [3, 4] }]",
            "over lists both rounds and iterations",
        ),
        (
            'over = [{ "data.options.alpha" = [0.1] }, { "data.options" = [{ alpha = 5.0 }] }]',
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
        (GRID + "confirm = [0]", "both list 0"),
        ("over = {}", "over has an empty table"),
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
        ('over = [{ "params.tau" = [1] }, { "params.tau" = [2] }]', "params.tau in two tables"),
    ],
)
def test_what_is_wrong_is_reported(asked: Callable[..., Sweep], text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(text)
    assert said in str(error.value)


def test_values_that_make_no_run_are_all_reported_by_as_little_as_names_them(
    asked: Callable[..., Sweep],
) -> None:
    with pytest.raises(ConfigError) as error:
        asked(
            'over."params.tau" = [0, 1]\nover."params.lr" = [0.1, -1]\nover."params.batch_size" '
            "= [8, 16]"
        )
    one, two = str(error.value).splitlines()
    assert one.startswith("params.tau = 0: params.tau:") and two.startswith(
        "params.lr = -1: params.lr:"
    )
    with pytest.raises(ConfigError) as error:
        asked('over."params.coding" = ["top-k", "float32"]\nover."params.top_k" = ["none", 3]')
    starts = [line.partition(": ")[0] for line in str(error.value).splitlines()]
    assert starts == [
        "params.coding = top-k, params.top_k = none",
        "params.coding = float32, params.top_k = 3",
    ]


def test_a_file_without_a_sweep_and_one_with_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(RUN)
    with pytest.raises(ConfigError, match=r"has no table \[sweep\]"):
        read(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text(f"{RUN}\n[compare]\nmethods = ['fedal']\n[sweep]\n{GRID}")
    with pytest.raises(ConfigError, match="Remove one"):
        read(str(tmp_path / "b.toml"))


def test_a_missing_extra_is_reported_before_any_work(
    asked: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.sweep.config.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tpe needs Optuna. Install it: pip install -e '.\[sweep\]'"
    ):
        asked(GRID, "sweep.search=tpe")


def test_tables_within_tables_are_dotted_keys(asked: Callable[..., Sweep]) -> None:
    text = (
        "[sweep.over.params]\nlr = [0.001, 0.1]\ntau = [1, 3]\n[sweep.over.data.options]\nalpha "
        "= [0.1, 1.0]"
    )
    sweep = asked(text)
    assert sweep.config.keys == ["params.lr", "params.tau", "data.options.alpha"]
    assert sweep.config.trials_of(sweep.config.over[0]) == 8 and sweep.moves_data == [
        "data.options.alpha"
    ]
    run = sweep.run({"params.lr": 0.1, "data.options.alpha": 1.0}, 5)
    assert (run.params["lr"], run.data.options["alpha"], run.data.clients, run.seed) == (
        0.1,
        1.0,
        2,
        5,
    )
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_what_the_docs_show_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    text = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    shown = re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)
    tried = []
    for number, block in enumerate(shown):
        (tmp_path / f"{number}.toml").write_text(block)
        config = read(str(tmp_path / f"{number}.toml")).config
        tried.append(sum(map(config.trials_of, config.over)))
    assert tried == [4, 36, 40]


def test_without_validation_rows_settings_are_compared_on_the_test_rows(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path
) -> None:
    sweep = asked('over."params.lr" = [0.05]\nvalidation = 0')
    found = run_sweep(sweep, tmp_path)
    for trial in (found.own, *found.trials):
        (folder,) = trial.folders.values()
        assert json.loads((folder / "result.json").read_text())["validation"] == 0
    assert "on the same test rows and seeds" in page.warning(
        found
    ) and "by accuracy, mean" in page.lead(found)


def test_overrides_and_seeds(asked: Callable[..., Sweep]) -> None:
    sweep = asked(GRID, "sweep.better=lower", "data.clients=3", seeds=[4, 5])
    assert sweep.config.seeds == (4, 5) and sweep.config.less and sweep.own().data.clients == 3
    assert not asked(GRID).config.less
    assert asked(GRID, "sweep.metric=bytes up").config.unit.name == "MB"
    with pytest.raises(ConfigError, match=r"set validation in \[sweep\]"):
        asked(GRID, "data.validation=0.1")
    assert (
        asked(GRID, "sweep.metric=log loss").config.less
        and asked(GRID, "sweep.metric=bytes up").config.less
    )


def course(
    sweep: Sweep, value: Callable[[SettingValues], float], stage: int = 0
) -> list[list[SettingValues]]:
    """What is proposed, batch by batch, where settings have these values."""
    search, found = proposals(sweep.config, stage), []
    batch = next(search)
    while True:
        found.append(batch)
        try:
            batch = search.send([value(setting) for setting in batch])
        except StopIteration:
            return found


TPE = """
search = "tpe"
trials = 40
over."params.lr" = { low = 1e-4, high = 0.1, log = true }
over."params.tau" = { low = 1, high = 20, int = true }
over."models.pool" = [["linear"], ["mlp"]]
"""


def test_tpe_draws_the_same_again_and_learns(asked: Callable[..., Sweep]) -> None:
    pytest.importorskip("optuna")

    def value(setting: SettingValues) -> float:
        return -abs(math.log10(setting["params.lr"]) + 2) - (setting["models.pool"] == ["mlp"])

    one, two = (course(asked(TPE), value) for _ in range(2))
    assert one == two and [len(batch) for batch in one] == [4] * 10
    assert course(asked(TPE, "sweep.seed=1"), value)[0] != one[0]
    longer = course(asked(TPE, "sweep.trials=44"), value)
    assert longer[:10] == one
    every = [setting for batch in one for setting in batch]
    assert all(1e-4 <= s["params.lr"] <= 0.1 and s["params.tau"] in range(1, 21) for s in every)
    first, last = (sum(map(value, part)) for part in (every[:12], every[-12:]))
    assert last > first + 4
    assert course(asked(TPE), lambda s: math.nan)[0] == one[0]  # failures are no values


def test_random_draws_do_not_depend_on_values(asked: Callable[..., Sweep]) -> None:
    pytest.importorskip("optuna")
    signed = lambda sign, settings: sign * settings["params.lr"]
    one, two = (
        course(asked(TPE, "sweep.search=random"), partial(signed, sign)) for sign in (1, -1)
    )
    assert one == two and [len(batch) for batch in one] == [40]


def test_a_grid_in_two_stages_is_the_same_after_a_stop(
    asked: Callable[..., Sweep], here: list[str], tmp_path: Path
) -> None:
    text = (
        'seeds = [0, 1]\nconfirm = [7]\nover = [{ "params.lr" = [0.0001, 0.05] }, { '
        '"params.batch_size" = [16, 32] }]'
    )
    sweep, out = asked(text), tmp_path / "out"
    stopped = run_sweep(sweep, out, stop=lambda: len(here) >= 4)
    assert stopped.stopped and len(here) == 4
    page.write(stopped, out)
    assert "Repeat the command to continue" in (out / "table.md").read_text()
    found = run_sweep(sweep, out)
    # batch size 32 is the file's own
    assert not found.stopped and len(here) == len(set(here)) == 2 + 4 + 2 + 2
    assert [t.setting for t in found.trials] == [
        {"params.lr": 0.0001},
        {"params.lr": 0.05},
        {"params.lr": 0.05, "params.batch_size": 16},
        {"params.lr": 0.05, "params.batch_size": 32},
    ]
    best = found.ranked[0]
    assert best.setting["params.lr"] == 0.05 and len(found.ranked) == 4
    by_hand = [value_of(read_run(folder), RunMetric(GLOBAL)) for folder in best.folders.values()]
    assert best.mean == pytest.approx(sum(by_hand) / 2) and best.mean == max(
        t.mean for t in found.trials
    )
    assert found.confirmed is not None and [*found.confirmed[0].values] == [7]

    def tested_on(trials: Sequence[Trial]) -> set[tuple[float, str]]:
        results = [
            json.loads((at / "result.json").read_text())
            for t in trials
            for at in t.folders.values()
        ]
        return {(result["validation"], result["test_sha256"]) for result in results}

    searched, confirmed = tested_on([found.own, *found.trials]), tested_on(found.confirmed)
    assert {share for share, _ in searched} == {0.25} and {share for share, _ in confirmed} == {0.0}
    assert len(searched) == 2 and not searched & confirmed  # one set of rows for each seed

    page.write(found, out)
    text = (out / "table.md").read_text()
    assert "same test rows" not in text
    assert (
        "by accuracy on validation rows" in text and "on the same validation rows and seeds" in text
    )
    assert (
        "optimistic" in text
        and "which the search did not see" in text
        and "Report the values" in text
    )
    html = (out / "index.html").read_text()
    assert "How fast?" in html and html.count("<figure") == 2
    rows = [*csv.DictReader((out / "trials.csv").read_text().splitlines())]
    assert len(rows) == 2 + 4 * 2 + 2 and {row["purpose"] for row in rows} == {"search", "confirm"}
    assert all((out / row["folder"] / "result.json").is_file() for row in rows)
    pair = page.pairs(found)[-1]
    assert pair.on == "confirming"
    first, own = found.confirmed
    assert pair.mean == pytest.approx(first.mean - own.mean) and pair.ends is None
    again = read_run_file(str(out / "best.toml")).run
    assert (
        again.params["lr"] == 0.05 and tomllib.loads((out / "best.toml").read_text())["seed"] == 0
    )

    for trial in (best, *found.confirmed):
        for folder in trial.folders.values():  # as of a data set with test rows of its own
            result = json.loads((folder / "result.json").read_text())
            (folder / "result.json").write_text(json.dumps({**result, "test_sha256": "0"}))
    page.write(found, out)
    assert "They use the same test rows" in (out / "table.md").read_text()


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
    page.write(found, tmp_path / "b")
    assert "on purpose" in (tmp_path / "b" / "table.md").read_text()
    with pytest.raises(EngineError, match="no trial has a valid result"):
        run_sweep(asked('over.method = ["local"]'), tmp_path / "c")


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
    assert got == [1, 1]
    run_sweep(sweep, tmp_path)
    assert got == [1, 1, 0, 0] and len(here) == 2


def made(sweep: Sweep, folder: Path, values: Sequence[float]) -> SweepResults:
    """A sweep over one grid that came to these values; the file's own to the last."""
    (batch,) = course(sweep, lambda _: 0.0)
    trials = [
        Trial(n, 0, setting, {0: folder / "runs" / str(n)}, {0: value})
        for n, (setting, value) in enumerate(zip(batch, values, strict=False), 1)
    ]
    own = Trial(0, 0, {}, {0: folder / "runs" / "0"}, {0: values[-1]})
    ended = {
        at: Ended(Job(sweep.own(), at), "finished")
        for t in (own, *trials)
        for at in t.folders.values()
    }
    return SweepResults(sweep, own, trials, ended=ended)


def test_a_loss_is_less_and_has_no_percent_in_words_and_figures(
    asked: Callable[..., Sweep], tmp_path: Path
) -> None:
    found = made(asked(GRID, "sweep.metric=loss mean"), tmp_path, [0.25, 0.5, 1.5, 0.75, 2.0])
    assert found.ranked[0].number == 1 and found.sweep.config.unit.name == ""
    assert page.worth(found, found.ranked[0]) == "0.250"
    by_rate, by_tau = pictures(found)[0].figures
    assert "best with 0.001 0.250 and 0.05 0.750" in by_rate.svg
    assert "best with 1 0.250 and 3 0.500" in by_tau.svg
    more = made(asked(GRID), tmp_path, [0.25, 0.5, 0.5, 0.75, 0.1])
    assert page.worth(more, more.ranked[0]) == f"75.0{NBSP}%"
    assert "best with 0.001 50.0" in pictures(more)[0].figures[0].svg


def test_a_page_of_another_sweep_in_the_folder_is_gone(
    asked: Callable[..., Sweep], tmp_path: Path
) -> None:
    out = tmp_path / "my sweeps" / "x"
    found = made(asked(GRID), out, [0.25, 0.5, 0.5, 0.75, 0.1])
    page.write(found, out)
    assert (
        f"    fedloom run '{out}/best.toml'\n" in (out / "table.md").read_text()
        and (out / "best.toml").is_file()
    )
    with (out / "table.md").open() as text, (out / "index.html").open() as html:
        page.write(made(asked(GRID), out, [math.nan] * 5), out)
        # who reads has it whole
        assert "No setting" not in text.read() and "No setting" not in html.read()
    assert (
        "No setting is finished" in (out / "table.md").read_text()
        and not (out / "best.toml").exists()
    )


def test_what_people_call_things_is_no_markup(
    asked: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "RUN", RUN.replace("How fast?", "<script>alert(1)</script> *now*")
    )
    out = tmp_path / "x"
    page.write(made(asked(GRID, "sweep.metric=a <b>|c"), out, [0.25, 0.5, 0.5, 0.75, 0.1]), out)
    text = (out / "table.md").read_text()
    assert text.startswith("# \\<script\\>alert(1)\\</script\\> \\*now\\*\n")
    assert not re.search(r"(?<!\\)[<*]", text) and re.search(r"(?<!\\)\|c", text) is None
    assert (
        "\n| Setting | params.lr | params.tau | A \\<b\\>\\|c | Seed 0 |\n| --- | --- | --- | --: |"
        in text
    )


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
        ("higher", {0: 2.0, 1: math.inf, 2: 2.0, 3: 1.0}, 0),
        ("lower", {0: 2.0, 1: math.nan, 2: -math.inf, 3: 1.0}, 3),
        ("lower", {0: 1.0, 1: 2.0, 2: 1.0, 3: 3.0}, 0),
    ],
)
def test_the_files_own_setting_competes_and_what_is_not_finite_never_wins(
    asked: Callable[..., Sweep], tmp_path: Path, better: str, values: dict[int, float], best: int
) -> None:
    sweep = asked(GRID, f"sweep.better={better}")
    own, *trials = (
        Trial(
            n,
            0,
            {"params.tau": n} if n else {},
            {0: tmp_path / str(n)},
            {0: value} if value == value else {},
        )
        for n, value in values.items()
    )
    found = SweepResults(sweep, own, trials)
    assert found.ranked[0].number == best and all(math.isfinite(t.mean) for t in found.ranked)
    assert (
        "that is the file's own setting, and none that was tried is better" in page.lead(found)
    ) == (best == 0)
    pairs = [(pair.first, pair.other) for pair in page.pairs(found)]
    assert len(pairs) == len({*pairs})


def test_how_far_the_whole_is(
    asked: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Standing] = []

    def run_all(
        jobs: Sequence[Job], *, progress: Callable[[Standing], None], **_: Any
    ) -> list[Ended]:
        for i, job in enumerate(jobs, 1):
            execute(job.run, job.folder)
            progress(Standing(len(jobs), i, 0, 0, left=1.0))
        return [Ended(job, "finished") for job in jobs]

    monkeypatch.setattr("fedloom.sweep.run.run_all", run_all)
    run_sweep(asked('over."params.batch_size" = [8, 16]'), tmp_path / "out", progress=told.append)
    assert [(one.done, one.of, one.left) for one in told] == [
        (1, 3, None),
        (2, 3, 1.0),
        (3, 3, 1.0),
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
    assert "3 runs at most, in sweeps/mine" in plan and not (tmp_path / "sweeps").exists()
    first = call("--workers", "1")
    assert "page  sweeps/mine/index.html" in first and "params.lr = 0.05" in first
    # 0.001 is FedAL's own rate: one run serves both
    assert len([*(tmp_path / "sweeps" / "mine" / "runs").iterdir()]) == 2
    assert "finished" not in call("--plan")  # nothing is left
    # the file's own
    assert "1 finished; left at most" in call("--plan", "-s", "sweep.over={'params.tau' = [3]}")
    assert "0 finished; left at most" in call("--plan", "-s", "rounds=2")
    run = next((tmp_path / "sweeps" / "mine" / "runs").iterdir())
    (run / "result.json").unlink()
    with (run / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = call("--workers", "1", code=1)
    assert text.endswith(
        "Some runs are in progress in another process. Repeat the command for the rest.\n"
    )
