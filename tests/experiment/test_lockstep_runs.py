"""Several runs in lock-step write the folders that each writes alone."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.reading import check
from fedloom.experiment.pool.pool import Job, run_all
from fedloom.experiment.run import lockstep
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.experiment.run.lockstep import advice, execute_lots, lots

SMALL: dict[str, Any] = {
    "method": "fedavg",
    "rounds": 2,
    "data": {"name": "digits", "clients": 4, "test_rows": 60},
    "models": {"pool": ["mlp"]},
    "engine": {"name": "batched"},
    "evaluate": {"points": 1},
}


def runs(*changes: dict[str, Any]) -> list[RunConfig]:
    return [check({"run": {**SMALL, **change}}).run for change in changes]


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
    return content


def test_a_comparison_in_lock_step_has_the_numbers_of_its_runs(tmp_path: Path) -> None:
    seeds = (0, 1, 2)
    fedloom.compare(
        ["fedavg"], seeds=seeds, out=tmp_path, **{k: v for k, v in SMALL.items() if k != "method"}
    )
    for run in runs(*({"seed": seed} for seed in seeds)):
        one, alone = result(tmp_path / f"fedavg-seed{run.seed}"), execute(run)
        assert one["engine"]["remarks"][0] == "in lock-step, runs: 3"
        # one row of test in 60
        assert one["accuracy"]["mean"] == pytest.approx(alone.accuracy, abs=0.02)
        assert one["bytes"] == alone.summary["bytes"] and one["rounds"] == 2


@pytest.mark.slow
def test_a_pool_runs_its_lots_and_keeps_what_is_finished(tmp_path: Path) -> None:
    jobs = [
        Job(run, tmp_path / str(n))
        for n, run in enumerate(runs({"seed": 1}, {"seed": 2}, {"seed": 3}))
    ]
    assert [ended.state for ended in run_all(jobs[:1], workers=1)] == ["finished"]
    ended = run_all(jobs, workers=1)
    assert [e.state for e in ended] == ["kept", "finished", "finished"]
    assert [result(job.folder)["engine"]["remarks"][0] for job in jobs[1:]] == [
        "in lock-step, runs: 2"
    ] * 2
    assert not (tmp_path / "1" / "checkpoints").exists()


@pytest.mark.slow
def test_a_failing_run_of_a_lot_fails_alone(tmp_path: Path) -> None:
    jobs = [
        Job(run, tmp_path / str(n))
        for n, run in enumerate(runs({"seed": 1}, {"seed": 2}, {"seed": 3}))
    ]
    jobs[2].folder.mkdir()
    (jobs[2].folder / "checkpoints").write_text("a file where its folder of checkpoints must be")
    ended = run_all(jobs, workers=1)
    assert [e.state for e in ended] == ["finished", "finished", "failed"] and ended[2].reason


def test_runs_that_are_stopped_resume_in_lock_step(tmp_path: Path) -> None:
    both, folders = runs({"seed": 1}, {"seed": 2}), [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(Stopped):
        execute_lots(both, folders, execute=execute, stop=lambda: True)
    for run, finished in zip(
        both, execute_lots(both, folders, execute=execute, resume=True), strict=True
    ):
        assert finished.summary["state_sha256"] == execute_lots([run], [None], execute=execute)[
            0
        ].summary["state_sha256"] or finished.accuracy == pytest.approx(
            execute(run).accuracy, abs=0.02
        )


def test_lots_are_runs_of_one_method_that_differ_in_numbers() -> None:
    many = runs(
        {"seed": 1},
        {"seed": 2},
        {"seed": 3, "params": {"lr": 0.5}, "data": {**SMALL["data"], "options": {"alpha": 5.0}}},
        {"seed": 1, "params": {"batch_size": 7}},
        {"seed": 1, "method": "ditto"},
        {"seed": 4, "engine": {"name": "local"}},
        {"seed": 5, "engine": {"name": "local"}},
        {"seed": 6, "models": {"pool": ["lenet5"]}},
        {"seed": 7, "models": {"pool": ["lenet5"]}},
        {"seed": 8, "models": {"pool": ["mlp-large"]}},  # too large to gain
        {"seed": 9, "models": {"pool": ["mlp-large"]}},
    )
    assert lots(many) == [[0, 1, 2], *([n] for n in range(3, len(many)))]


def test_lots_use_all_processes_of_a_cpu() -> None:
    many = runs(*({"seed": seed} for seed in range(8)))
    assert lots(many, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lots(many[:2], 2) == [[0], [1]]  # too few clients to be faster


def test_lock_step_is_recommended_where_it_would_be_faster() -> None:
    local = {"engine": {"name": "local"}}
    eight = [{"seed": seed, **local} for seed in range(8)]
    assert advice(runs(*eight)).startswith("8 of these runs can train together")
    assert "engine.name=auto" in advice(runs(*eight, {**local, "method": "ditto"}))
    assert not advice(runs(*eight[:7]))  # 28 clients
    assert not advice(runs(*eight), 2)  # of which each process would have 16
    assert not advice(runs(*({"seed": seed} for seed in range(8))))  # batched: they already do
    assert not advice(runs(*({**one, "models": {"pool": ["lenet5"]}} for one in eight)))


def test_on_a_gpu_all_runs_of_a_method_are_one_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    # which this machine need not have
    on_gpu = {"engine": EngineConfig(name="auto", device="cuda")}
    many = [run.model_copy(update=on_gpu) for run in runs(*({"seed": seed} for seed in range(5)))]
    assert lots(many, 2) == [[0, 1, 2, 3, 4]]
    monkeypatch.setattr(lockstep, "MOST", 3)
    assert lots(many, 2) == [[0, 1, 2], [3, 4]]
