"""What trackers get of a run: each round once, whatever happens between, and no number of the run
moves.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from fedloom.cli import main
from fedloom.core.errors import ConfigError, DataError, EngineError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.report.track.background import tracking
from fedloom.report.track.send import Sender, follow, info, rounds, send, sent_so_far
from fedloom.report.track.trackers import TRACKERS, RunInfo, check

RUN = RunConfig(
    method="fedal",
    rounds=4,
    data={"clients": 2},
    models={"pool": ("linear",)},
    evaluate={"points": 2},
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "mine"
    execute(RUN, folder)
    return folder


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "mine"))


class Noted:
    """A tracker that remembers."""

    log: ClassVar[list[tuple[Any, ...]]] = []
    fails = False

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        self.log.append(("begin", run.settings["method"], known, step))
        return "abc"

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("no network\nand more")
        self.log.append(("log_metrics", step, dict(values)))

    def end(self, result: Mapping[str, float] | None) -> None:
        self.log.append(("end", result))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Noted]]:
    monkeypatch.setitem(TRACKERS, "tensorboard", Noted)
    monkeypatch.setattr(Noted, "log", [])
    monkeypatch.setattr(Noted, "fails", False)
    yield Noted


def steps(log: list[tuple[Any, ...]]) -> list[int]:
    return [entry[1] for entry in log if entry[0] == "log_metrics"]


def test_metrics_are_those_of_the_table_by_round(folder: Path) -> None:
    found = dict(rounds(folder))
    assert [*found] == [0, 1, 2, 3, 4]
    result = json.loads((folder / "result.json").read_text())
    assert found[4]["accuracy mean"] == result["accuracy"]["mean"]
    assert "local/accuracy mean" in found[4] and "discriminator loss" in found[4]
    assert "accuracy mean" not in found[1] and "accuracy" not in found[4]  # one client's


def test_a_finished_run_is_sent_once(folder: Path, noted: type[Noted]) -> None:
    assert send(folder, "tensorboard") == 5
    assert noted.log[0] == ("begin", "fedal", "", -1) and steps(noted.log) == [0, 1, 2, 3, 4]
    kind, result = noted.log[-1]
    assert kind == "end" and result["bytes up"] > 0 and 0 < result["accuracy"] < 1
    count = len(noted.log)
    assert send(folder, "tensorboard") == 0 and len(noted.log) == count
    assert sent_so_far(folder, "tensorboard").finished


def test_a_run_that_was_stopped_continues_in_the_same_place_without_doubled_steps(
    tmp_path: Path, noted: type[Noted], done: Path
) -> None:
    folder = tmp_path / "halves"
    asked: list[bool] = []
    with pytest.raises(Stopped):
        execute(RUN, folder, stop=lambda: bool(asked.append(True)) or len(asked) > 1)
    assert send(folder, "tensorboard") == 3 and noted.log[-1] == ("end", None)
    execute(RUN, folder, resume=True)
    assert send(folder, "tensorboard") == 2
    assert steps(noted.log) == [0, 1, 2, 3, 4]
    assert [entry for entry in noted.log if entry[0] == "begin"][1] == ("begin", "fedal", "abc", 2)
    one, two = (
        json.loads((each / "result.json").read_text())["state_sha256"] for each in (folder, done)
    )
    assert one == two


def test_a_comparison_s_runs_are_all_sent(folder: Path, noted: type[Noted]) -> None:
    shutil.copytree(folder, folder.parent / "more")
    assert send(folder.parent, "tensorboard") == 10


def test_a_tracker_that_fails_is_reported_once_and_continues_later(
    folder: Path, noted: type[Noted], caplog: pytest.LogCaptureFixture
) -> None:
    noted.fails = True
    looks = iter([False, False, True])
    follow(folder, ["tensorboard"], lambda: next(looks))
    (record,) = caplog.records
    assert "no network" in record.getMessage() and "and more" not in record.getMessage()
    assert "fedloom track" in record.getMessage()
    with pytest.raises(EngineError, match="OSError: no network"):
        send(folder, "tensorboard")
    noted.fails = False
    assert send(folder, "tensorboard") == 5


def test_what_was_sent_before_a_failure_is_not_sent_again(
    folder: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def log_metrics(self: Noted, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError("no answer of https://me:secret@there.org/a@b")
        self.log.append(("log_metrics", step, values))

    with (
        monkeypatch.context() as broken,
        pytest.raises(EngineError, match=r"of https://there\.org/a@b"),
    ):
        broken.setattr(Noted, "log_metrics", log_metrics)
        send(folder, "tensorboard")
    assert sent_so_far(folder, "tensorboard").round == 1
    assert send(folder, "tensorboard") == 3 and steps(noted.log) == [0, 1, 2, 3, 4]


def test_no_two_processes_send_one_run(folder: Path, noted: type[Noted]) -> None:
    other = Sender("tensorboard", wait=True)
    (folder / "result.json").unlink()
    assert other.send(folder) == 5
    with pytest.raises(DataError, match="is being sent to tensorboard by another process"):
        send(folder, "tensorboard")
    other.close()
    assert send(folder, "tensorboard") == 0 and steps(noted.log) == [0, 1, 2, 3, 4]


def test_two_trackers_know_each_what_they_have(
    folder: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS, "mlflow", Noted)
    send(folder, "tensorboard")
    assert sent_so_far(folder, "tensorboard").finished and sent_so_far(folder, "mlflow").run == ""
    assert send(folder, "mlflow") == 5
    assert sent_so_far(folder, "tensorboard").finished and sent_so_far(folder, "mlflow").finished
    assert send(folder, "tensorboard") == 0


def test_a_run_that_is_finished_holds_no_file_open(folder: Path, noted: type[Noted]) -> None:
    sender = Sender("tensorboard", wait=False)
    before = len(os.listdir("/dev/fd"))
    for _ in range(2):  # it is sent, and found to be
        sender.send(folder)
        assert len(os.listdir("/dev/fd")) <= before  # the collector may close files of others


def test_a_mark_that_cannot_be_opened_is_not_called_damaged(
    folder: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full, pytest.raises(OSError, match="Too many open files"):
        full.setattr(Path, "read_text", refuse)
        sent_so_far(folder, "tensorboard")


def test_what_follows_sees_a_run_that_begins_later(folder: Path, noted: type[Noted]) -> None:
    hidden, looks = folder.parent / "hidden", 0
    folder.rename(hidden)

    def over() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            hidden.rename(folder)
        return looks == 2

    follow(folder, ["tensorboard"], over)
    assert steps(noted.log) == [0, 1, 2, 3, 4]


def test_what_is_wrong_is_reported_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker 'wanddb'\. Did you mean 'wandb'\?"):
        check(["wanddb"])
    (tmp_path / "wandb").mkdir()  # as W&B itself makes one: no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check(["wandb"])
    monkeypatch.setattr("fedloom.report.track.trackers.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"mlflow is not installed. Install its extra: pip install -e '.\[mlflow\]'",
    ):
        check(["mlflow"])
    with pytest.raises(ConfigError), tracking(tmp_path, ["wandb"]):
        raise AssertionError
    with pytest.raises(DataError, match="holds no run"):
        send(tmp_path, "tensorboard")


def test_damaged_files_are_reported(folder: Path, noted: type[Noted]) -> None:
    for text in ("{", "[1]", '{"rounds": 3}'):
        (folder / "tracked-tensorboard.json").write_text(text)
        with pytest.raises(DataError, match=r"tracked-tensorboard.json is damaged"):
            send(folder, "tensorboard")
    (folder / "tracked-tensorboard.json").unlink()
    (folder / "metrics.csv").write_text(
        "round,iteration,stage,party,metric,value\n1,1,local,,accuracy,much\n"
    )
    with pytest.raises(DataError, match=r"metrics.csv is invalid: line 2 value"):
        send(folder, "tensorboard")


@pytest.mark.slow
def test_tensorboard_reads_what_a_run_beside_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: Path
) -> None:
    """In its own process, as `--track` has it; and the run's numbers are those of one without."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    page = [f"-s{key}" for key in ("data.clients=2", "models.pool=['linear']", "evaluate.points=2")]
    call = [
        "fedloom",
        "run",
        "fedal",
        "--rounds",
        "4",
        "--out",
        "a",
        *page,
        "--track",
        "tensorboard",
    ]
    monkeypatch.setattr(sys, "argv", call)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    table = {
        step: values["accuracy mean"] for step, values in rounds(done) if "accuracy mean" in values
    }
    sent = {event.step: event.value for event in events.Scalars("accuracy mean")}
    assert sent == pytest.approx(table, abs=1e-7)
    one, two = (
        json.loads((each / "result.json").read_text())["state_sha256"]
        for each in (tmp_path / "a", done)
    )
    assert one == two
    assert "track" not in (tmp_path / "a" / "config.toml").read_text()


def test_tensorboard_reads_each_round_once_of_a_run_whose_sender_was_killed(tmp_path: Path) -> None:
    """Between a round and its mark: the round is sent again, to another file of the folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "mine"
    looks = iter([False, True])
    with pytest.raises(Stopped):
        execute(RUN, folder, stop=lambda: next(looks))
    assert send(folder, "tensorboard") == 3
    (folder / "tracked-tensorboard.json").write_text('{"run": "tensorboard", "round": 1}')
    for file in (folder / "tensorboard").iterdir():
        # files are read in the order of names
        file.rename(file.with_name("events.out.tfevents.0000000001.first"))
    execute(RUN, folder, resume=True)
    assert send(folder, "tensorboard") == 3
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("discriminator loss")] == [1, 2, 3, 4]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)


def test_what_wandb_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []
    summary: dict[str, float] = {}
    ended: list[int] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(
            id=options["id"],
            log=lambda values, step: logged.append((step, values)),
            summary=summary,
            finish=lambda exit_code: ended.append(exit_code),
        )

    module(monkeypatch, "wandb", init=init, Settings=lambda **options: options)
    assert send(folder, "wandb") == 5
    (options,) = asked
    assert (
        options["resume"] == "allow"
        and options["config"]["data.clients"] == 2
        and options["project"] == "fedloom"
    )
    assert options["settings"]["disable_git"] and options["settings"]["x_disable_meta"]
    assert (
        [step for step, _ in logged] == [0, 1, 2, 3, 4]
        and summary["result/failures"] == 0
        and ended == [0]
    )
    assert sent_so_far(folder, "wandb").run == options["id"]


def test_what_mlflow_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            calls.append(("experiment", name))

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, place: str, run_name: str, start_time: int) -> Any:
            calls.append(("run", place, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_batch(self, run: str, params: Any = (), metrics: Any = ()) -> None:
            assert run == "r1" and len(params) <= 100 and len(metrics) <= 100
            calls.append(("batch", dict(params), list(metrics)))

        def log_metric(self, run: str, key: str, value: float, at: int, step: int) -> None:
            calls.append(("result", key))

        def set_terminated(self, run: str, status: str) -> None:
            calls.append(("over", status))

    pair: Callable[..., tuple[Any, ...]] = lambda *values: values
    module(monkeypatch, "mlflow")
    module(monkeypatch, "mlflow.entities", Param=pair, Metric=pair)
    module(monkeypatch, "mlflow.tracking", MlflowClient=Client)
    assert send(folder, "mlflow") == 5
    assert (
        calls[0] == ("experiment", "fedloom")
        and calls[1][:2] == ("run", "7")
        and "fedal seed 0" in calls[1][2]
    )
    assert calls[2][1]["data.clients"] == "2"
    every = [metric for call in calls if call[0] == "batch" for metric in call[2]]
    assert {step for *_, step in every} == {0, 1, 2, 3, 4}
    assert len({(name, step) for name, _, _, step in every}) == len(every)
    # the same whenever it is sent again
    assert {at - step for _, _, at, step in every} == {info(folder).started}
    assert calls[-1] == ("over", "FINISHED") and ("result", "result/accuracy") in calls
