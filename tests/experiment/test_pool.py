"""Many runs side by side: failures, stops, kills, and what the same call does then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedloom.core.errors import ConfigError, EngineError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan import run_digest
from fedloom.experiment.plan.build import build
from fedloom.experiment.pool import job as _pool_job
from fedloom.experiment.pool import pool
from fedloom.experiment.pool import processes as _pool_processes
from fedloom.experiment.pool.pool import Job, Standing, digest, is_finished, run_all, usual_workers
from fedloom.experiment.run.execute import execute
from fedloom.experiment.run.session import fingerprint
from fedloom.experiment.run.view import FILE
from fedloom.support.paths import locked
from tests.experiment.waiting_page import PAGE, hold, rounds, write

DRIVER = """
import json, sys
from pathlib import Path
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.pool.pool import Job, run_all
jobs = json.loads(sys.argv[1])
run_all([Job(RunConfig.model_validate_json(run), Path(folder)) for run, folder in jobs], workers=2)
"""

PROGRESS = """
from tqdm import tqdm
from fedloom.experiment.pool.processes import Processes
processes = Processes(1)
processes._idle[0].submit(tqdm, disable=True).exception(60)
processes.close()
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write(tmp_path)


def a_run(page: Path, method: str = "counted", **changes: Any) -> RunConfig:
    values = {
        "method": f"{page}:{method}",
        "rounds": 40,
        "data": {"clients": 2},
        "models": {"pool": ["linear"]},
        "evaluate": {"points": 1},
    }
    return RunConfig(**{**values, **changes})


@pytest.mark.slow
def test_stopped_then_killed_then_done_and_nothing_is_done_twice(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(a_run(page, seed=seed), tmp_path / f"run-{seed}") for seed in range(3)]
    held = hold(page, 0, 5)

    def stop() -> bool:
        if "0 5" not in rounds(page):
            return False
        Thread(target=release, args=(held,)).start()
        return True

    def release(held: Path) -> None:
        while not list(tmp_path.glob(".stop-*")):
            time.sleep(0.01)
        held.unlink()

    stopped = run_all(jobs, workers=1, stop=stop)
    assert [one.state for one in stopped] == ["stopped", "left", "left"]
    assert (
        stopped[0].reason == f"stopped after round {len(rounds(page))}"
        and not jobs[2].folder.exists()
    )

    held = hold(page, 2, 3)
    messages = json.dumps([[job.run.model_dump_json(), str(job.folder)] for job in jobs])
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, messages], stderr=subprocess.PIPE
    ) as driver:
        while "2 3" not in rounds(page) or len(list(tmp_path.glob("run-*/result.json"))) < 2:
            assert driver.poll() is None, driver.stderr and driver.stderr.read()
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        driver.communicate(timeout=60)  # the workers hold its end of the pipe as long as they live
    held.unlink()
    assert [is_finished(job.run, job.folder) for job in jobs] == [True, True, False]
    since = [(job.folder / "result.json").stat().st_mtime_ns for job in jobs[:2]]

    seen: list[Standing] = []
    done = run_all(jobs, workers=1, progress=seen.append)
    assert [one.state for one in done] == ["kept", "kept", "finished"]
    assert [(job.folder / "result.json").stat().st_mtime_ns for job in jobs[:2]] == since
    counts = Counter(rounds(page))
    assert {*counts} == {f"{seed} {t}" for seed in range(3) for t in range(40)}
    # since its last checkpoint
    assert {one for one, count in counts.items() if count > 1} == {"2 2", "2 3"}
    assert not list(tmp_path.glob("run-*/checkpoints"))
    assert (seen[-1].done, seen[-1].kept, seen[-1].of, seen[-1].left) == (3, 2, 3, 0.0)
    for job in jobs:
        alone = execute(job.run).summary["state_sha256"]
        assert json.loads((job.folder / "result.json").read_text())["state_sha256"] == alone

    monkeypatch.setattr(pool, "Processes", None)  # no process is started
    assert {one.state for one in run_all(jobs)} == {"kept"}
    with pytest.raises(ConfigError, match="has a run with other settings"):
        run_all([Job(a_run(page, seed=0, rounds=41), jobs[0].folder)])


def test_a_run_without_rounds_has_no_share(page: Path, tmp_path: Path) -> None:
    for number, share in ((0, 0.0), (4, 0.5)):
        (tmp_path / FILE).write_text(json.dumps({"round": number // 2, "rounds": number}))
        assert pool._share(Job(a_run(page), tmp_path)) == share


@pytest.mark.slow
def test_what_fails_is_reported_in_a_line_without_data_and_the_others_continue(
    page: Path, tmp_path: Path
) -> None:
    runs = {
        "killed": a_run(page, "bad", seed=1),
        "memory": a_run(page, "bad", seed=2),
        "error": a_run(page, "bad", seed=3),
        "data": a_run(page, data={"name": str(tmp_path / "nothing.csv"), "clients": 2}),
        "good": a_run(page, rounds=2),
    }
    jobs = [
        Job(run, tmp_path / name, name, cost=2.0 if name == "killed" else 1.0)
        for name, run in runs.items()
    ]
    torn = tmp_path / "good" / "checkpoints" / "round-000000001.ckpt"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"torn")
    seen: list[Standing] = []
    ended = {one.job.name: one for one in run_all(jobs[::-1], workers=2, progress=seen.append)}
    assert [*ended] == [*runs][::-1]
    assert {name: one.state for name, one in ended.items()} == dict.fromkeys(runs, "failed") | {
        "good": "finished"
    }
    assert seen[0].running == (("killed", 0.0),)  # it is the longest
    assert "was killed, perhaps out of memory" in ended["killed"].reason
    assert "out of memory" in ended["memory"].reason
    assert ended["error"].reason == "RuntimeError: see run.log in its folder"
    assert "there is no file or folder" in ended["data"].reason
    assert "row 17 is 0.25" in (tmp_path / "error" / "run.log").read_text()
    assert "starting again" in (tmp_path / "good" / "run.log").read_text()
    assert (
        sum(one.ended is not None and one.ended.state == "failed" for one in seen)
        == 4
        == seen[-1].failed
    )


def test_a_worker_that_cannot_start_is_an_error(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool_processes, "_begin", os._exit)
    with pytest.raises(EngineError, match="cannot start a worker process"):
        run_all([Job(a_run(page), tmp_path / "a")], workers=1)
    with pytest.raises(ConfigError, match="two runs share a folder"):
        run_all([Job(a_run(page), tmp_path / "a")] * 2)
    assert [
        one.state for one in run_all([Job(a_run(page), tmp_path / "a")], stop=lambda: True)
    ] == ["left"]


@pytest.mark.slow
def test_killed_workers_leave_no_semaphores_of_progress_bars() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRESS], capture_output=True, text=True, timeout=120, check=True
    )
    assert not done.stderr  # also of the process that looks for leaks, which ends last


def test_a_digest_tells_what_moves_a_number(page: Path) -> None:
    run = RunConfig(method="fedal", params={"tau": 5})
    same: Sequence[dict[str, Any]] = (
        {"name": "another"},
        {"params": {}},  # tau is 5 anyway
        {"engine": {"workers": 4}},
    )
    others: Sequence[dict[str, Any]] = (
        {"seed": 1},
        {"params": {"tau": 6}},
        {"rounds": 7},
        {"engine": {"name": "batched"}},
        {"evaluate": {"points": 3}},
        {"method": "fedmd"},
    )
    values = {"method": "fedal", "params": {"tau": 5}}
    assert {digest(RunConfig(**{**values, **change})) for change in same} == {digest(run)}
    assert (
        len({digest(run), *(digest(RunConfig(**{**values, **change})) for change in others)})
        == len(others) + 1
    )
    before = digest(a_run(page))
    assert (
        digest(a_run(page, "bad"))
        != before
        == digest(a_run(page, name="x", data={"clients": 2, "root": "/there"}))
    )
    assert digest(RunConfig(method=str(page))) == digest(RunConfig(method=f"{page}:counted"))
    page.write_text(PAGE + "# changed\n")
    assert digest(a_run(page)) != before and len(before) == 16


def test_a_checkpoint_is_of_one_method_of_a_page(page: Path) -> None:
    counted, bad, first = (build(a_run(page, method)) for method in ("counted", "bad", "counted"))
    assert fingerprint(counted) == fingerprint(first) != fingerprint(bad)


def test_a_pretrained_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "server.safetensors"
    file.write_bytes(b"a")
    run = RunConfig(method="fedlp", pretrained={"file": str(file)}, data={"server_rows": 100})
    before = digest(run)
    file.write_bytes(b"bb")
    assert digest(run) != before


def test_data_and_modules_of_the_user_count_by_what_is_in_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    table, folder, module = tmp_path / "a.csv", tmp_path / "many", tmp_path / "mynet_of_pool.py"
    folder.mkdir()
    runs = {
        table: RunConfig(method="fedal", data={"name": str(table)}),
        folder / "b.csv": RunConfig(method="fedal", data={"name": str(folder)}),
        module: RunConfig(
            method="fedal",
            models={"pool": ["mynet_of_pool:net"]},
            data={"partition": "no.such:part"},
        ),
    }
    for file, run in runs.items():
        file.write_text("")
        before = digest(run)
        assert digest(run) == before
        file.write_text("# more")
        assert digest(run) != before
    own = RunConfig(data={"partition": "fedloom.data.partitions:label_sets"})
    # nothing is read of a run that names no such file
    monkeypatch.setattr(run_digest, "_content", None)
    assert len({digest(own), digest(RunConfig())}) == 2


def test_a_folder_that_another_process_is_at_is_left_and_its_result_kept(
    page: Path, tmp_path: Path
) -> None:
    run, folder = a_run(page, rounds=1), tmp_path / "a"
    folder.mkdir()
    order = (run.model_dump_json(), str(folder), str(tmp_path / "flag"), execute)
    with locked(folder / ".lock") as held:
        ended = _pool_job.do(*order)
        assert held and (ended["state"], ended["reason"]) == (
            "left",
            "another process is running it",
        )
        assert [file.name for file in folder.iterdir()] == [".lock"]
    states = [_pool_job.do(*order)["state"] for _ in range(2)]
    assert states == ["finished", "kept"]


def test_a_folder_that_cannot_be_written_to_fails_alone(page: Path, tmp_path: Path) -> None:
    jobs = [
        Job(a_run(page, rounds=1), tmp_path / "good"),
        Job(a_run(page, rounds=1), tmp_path / "bad", cost=2.0),
    ]
    (tmp_path / "bad" / ".lock").mkdir(parents=True)
    good, bad = run_all(jobs, workers=1)
    assert (good.state, bad.state) == ("finished", "failed")
    assert bad.reason == f"Is a directory: {tmp_path / 'bad' / '.lock'}"


@pytest.mark.slow
def test_a_run_whose_page_is_edited_meanwhile_fails_and_leaves_no_result(
    page: Path, tmp_path: Path
) -> None:
    """Of three: under way when the page is edited, not begun yet, and of another page."""
    (tmp_path / "other").mkdir()
    runs = [
        a_run(page, rounds=4, seed=0),
        a_run(page, rounds=4, seed=1),
        a_run(write(tmp_path / "other"), rounds=1),
    ]
    jobs = [Job(run, tmp_path / str(n), cost=3.0 - n) for n, run in enumerate(runs)]
    held = hold(page, 0, 2)

    def edit() -> bool:
        if held.exists() and "0 2" in rounds(page):
            page.write_text(PAGE + "# changed\n")
            held.unlink()
        return False

    ended = run_all(jobs, workers=1, stop=edit)
    assert [(one.state, "changed since" in one.reason) for one in ended] == [
        ("failed", True),
        ("failed", True),
        ("finished", False),
    ]
    assert not jobs[1].folder.exists() and not (jobs[0].folder / "result.json").exists()
    planned = Job(runs[1], tmp_path / "4", digest="0" * 16)
    assert [one.state for one in run_all([planned], workers=1)] == [
        "failed"
    ] and not planned.folder.exists()


def test_one_run_at_a_time_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5}, raising=False)
    assert usual_workers([RunConfig()]) == 3
    assert usual_workers([RunConfig(), RunConfig(engine={"device": "cuda"})]) == 1


def test_time_left_goes_by_the_cost_of_what_finished(page: Path, tmp_path: Path) -> None:
    runs = [a_run(page, seed=seed) for seed in range(3)]
    jobs = [Job(run, tmp_path / "x", cost=2.0**n, digest=digest(run)) for n, run in enumerate(runs)]
    seen: list[Standing] = []
    board = pool.Board(jobs, seen.append, workers=2)
    board.end(jobs[1], "kept")
    assert seen[-1].left is None  # of what was there before nobody knows how long it took
    board.end(jobs[0], "finished", seconds=3.0)
    assert seen[-1].left == pytest.approx(12.0)
    assert seen[-1].ended is not None and seen[-1].ended.job is jobs[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(subprocess|unclosed).*:ResourceWarning")
def test_the_same_on_a_ray_cluster(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="fl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        names = {"good": a_run(page, seed=0, rounds=2), "killed": a_run(page, "bad", seed=1)}
        jobs = [Job(run, tmp_path / name) for name, run in names.items()]
        long = Job(a_run(page, seed=5, rounds=4000), tmp_path / "long")
        ended = [0]

        def count(now: Standing) -> None:
            ended[0] = now.done + now.failed

        first = run_all(
            [*jobs, long],
            ray="local",
            workers=2,
            progress=count,
            stop=lambda: ended[0] == 2 and "5 3" in rounds(page),
        )
        assert [one.state for one in first] == ["finished", "failed", "stopped"]
        assert first[1].reason == "lost by the cluster (WorkerCrashedError)"
        assert (long.folder / "checkpoints").is_dir() and not list(tmp_path.glob(".stop*"))
    assert run_all(jobs[:1])[0].state == "kept"
