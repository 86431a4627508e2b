"""What a run is said to cost, against what is counted as it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom import models
from fedloom.data.sources import NOISE, SOURCES, load, load_raw
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry
from fedloom.support.paths import cache_folder
from fedloom_papers.estimate import cost as costs
from fedloom_papers.estimate import speed as speeds
from fedloom_papers.estimate.cost import Cost, cost, describe, measured, miniature, unmeasured
from fedloom_papers.estimate.speed import flops, speed

TINY: dict[str, Any] = {
    "rounds": 5,
    "data": {
        "clients": 3,
        "public_rows": 60,
        "test_fraction": 0.7,
        "test_rows": 30,
        "own_test_rows": 10,
    },
    "models": {"pool": ["mlp"]},
    "evaluate": {"points": 1},
}
SMALL = {"batch_size": 32, "epochs": 2, "steps": 3, "pretrain": 1, "server_steps": 5}
REPRESENTATIVE = (
    "local",
    "fedal",
    "fccl",
    "feddf",
    "afind-plus",
    "ditto-afind",
    "augfl",
    "fedpcl",
    "proto-evfl",
)


def tiny(name: str, **changes: Any) -> RunConfig:
    """A run of a moment."""
    method = registry()[name]
    whole = {k for k, f in method.config.model_fields.items() if f.annotation in (int, int | None)}
    params = {k: v for k, v in SMALL.items() if k in whole and k not in method.fixed}
    values = {**TINY, "method": name, "params": params}
    if method.setting == "vertical":
        values |= {"columns": {"aligned": 60, "unaligned": 40}}
    if {"pretrained server model", "pretrained encoder"} & {*method.needs}:
        values |= {"pretrained": {"epochs": 1}}
    return check({"run": values | changes}).run


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_what_is_reported_is_what_is_counted(name: str) -> None:
    run = tiny(name)
    with_counter = run.model_copy(
        update={"models": run.models.model_copy(update={"pool": (costs.STAND_IN,)})}
    )
    if run.pretrained.given:  # it is kept, and so counts once for all runs
        execute(with_counter)
    before = costs._CountRows.total
    execute(with_counter)
    counted = costs._CountRows.total.minus(before)
    assert 1 / 1.5 < (counted.asked + 3 * counted.trained) / cost(run).passes < 1.5


def test_fedal_costs_8_passes_where_local_costs_3() -> None:
    untested = {
        "evaluate": {"points": 1},
        "data": {**TINY["data"], "test_rows": 1, "own_test_rows": 0},
    }
    fedal, local = (cost(tiny(name, rounds=500, **untested)).passes for name in ("fedal", "local"))
    assert fedal / local == pytest.approx(8 / 3, rel=0.02)


@pytest.mark.parametrize(
    "change", [{"rounds": 10}, {"data": {**TINY["data"], "clients": 6, "options": {"rows": 40}}}]
)
def test_twice_the_work_is_twice_the_cost(change: dict[str, Any]) -> None:
    once = {**TINY, "data": {**TINY["data"], "options": {"rows": 40}}}
    small = cost(check({"run": {**once, "method": "fedavg"}}).run)
    large = cost(check({"run": {**once, "method": "fedavg", **change}}).run)
    assert 1.5 < large.passes / small.passes < 2.1


def test_a_paper_s_run_is_measured_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no data set that is not here a byte is asked for; and of a hundred clients sixteen are
    timed.
    """
    read = []
    monkeypatch.setattr(
        "fedloom.experiment.plan.settings.rows.load",
        lambda name, **rest: read.append(name) or load(name, **rest),
    )
    values = {
        "method": "fedavg",
        "iterations": 2000,
        "data": {"name": "cifar10", "clients": 100, "options": {"rows": 20}},
        "models": {"pool": ["cnn-small"]},
        "topology": {"kind": "regular", "degree": 50},
    }
    run = check({"run": values}).run
    assert miniature(run).data.clients == costs.CLIENTS
    found = cost(run)
    assert found.passes > 1e6 and found.gpu > 1e6 * found.passes / 1e13
    assert read and all(NOISE.fullmatch(name) for name in read)


def test_what_was_measured_is_kept_and_shared_by_runs_of_other_networks_lengths_and_seeds() -> None:
    run = tiny("local", params={"tau": 3})
    assert unmeasured([run]) == 1
    cost(run)
    others = [
        tiny("local", params={"tau": 3}, rounds=50, seed=4, models={"pool": ["mlp-deep"]}),
        tiny("local", params={"tau": 3}, data={**TINY["data"], "options": {"alpha": 7.0}}),
    ]
    assert unmeasured([run, *others]) == 0
    assert unmeasured([tiny("local", params={"tau": 4})]) == 1
    (kept,) = (
        f for f in cache_folder("costs").iterdir() if f.name == costs._kept(miniature(run)).name
    )
    there = measured(miniature(run))
    kept.write_text("damaged")
    again = measured(miniature(run))
    assert [p.trained for p in again] == [p.trained for p in there]


def test_a_method_that_fedloom_does_not_know_has_a_cost(tmp_path: Path) -> None:
    page = Path("examples/fedavg.py").read_text()
    (tmp_path / "mine.py").write_text(page)
    assert cost(check({"run": {**TINY, "method": str(tmp_path / "mine.py")}}).run).passes > 0


def test_the_sizes_of_data_sets_are_those_that_come() -> None:
    assert costs.KNOWN.keys() == SOURCES.keys()
    for name in ("digits", "breast_cancer", "wine"):
        data = load(name)
        assert costs.KNOWN[name] == (data.input_shape, len(data.classes), len(data.train), 0)


def test_noise_has_the_size_it_is_asked_for() -> None:
    images, table = load("noise:50x1x8x8:10"), load("noise:40x7:3")
    assert (
        images.x.shape == (50, 1, 8, 8)
        and len(images.classes) == 10
        and {*images.y} <= {*range(10)}
    )
    assert table.x.shape == (40, 7) and len(table.classes) == 3
    assert (load("noise:40x7:3").x == table.x).all()
    assert len(load_raw("noise:40x7:3").columns) == 7


def test_the_operations_of_a_pass_are_those_of_its_layers() -> None:
    forward, trained, weights = flops("mlp", (1, 8, 8), 10, None)
    assert forward == 2 * (64 * 64 + 64 * 10)
    assert trained == 3 * forward - 2 * 64 * 64  # nothing goes back to the pixels
    assert weights == 64 * 65 + 65 * 10


@pytest.mark.parametrize("name", ["cnn", "resnet8", "wrn-10-1"])
def test_operations_are_counted_without_being_done_and_yet_right(name: str) -> None:
    network = models.build(name, (3, 16, 16), 10)
    with FlopCounterMode(display=False) as counted:
        network(torch.zeros(2, 3, 16, 16))
    assert flops(name, (3, 16, 16), 10, None)[0] == counted.get_total_flops() / 2


@pytest.mark.parametrize("name", ["resnet8x4", "resnet18"])
def test_a_large_network_is_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds, and gigabytes: one that is alike says how fast it is."""
    speed.cache_clear()
    # so small a network takes no time but noise
    monkeypatch.setattr(speeds, "_line", lambda *_: (1e-4, 1e-6))
    like = speed("mlp", (1, 8, 8), 10, None)
    monkeypatch.setattr(speeds, "REFERENCE", ("mlp", (1, 8, 8)))
    forward, trained, weights = flops(name, (3, 84, 84), 10, None)
    assert 2 * forward < trained < 3 * forward
    found = speed(name, (3, 84, 84), 10, None)
    assert found.trained / like.trained == pytest.approx(trained / like.training)
    assert found.step == like.step + speeds.WEIGHT * weights
    speed.cache_clear()


def test_a_pretraining_that_runs_share_counts_once() -> None:
    one, other = (cost(tiny("augfl", seed=seed)) for seed in (0, 1))
    ((_, pretraining),) = one.once
    assert one.once == other.once and pretraining.passes > 0
    assert (one + other).whole().passes == one.passes + other.passes + pretraining.passes
    assert not cost(tiny("local-only")).once


def test_a_black_box_costs_nothing_that_is_counted() -> None:
    pool = {"models": {"pool": ["mlp", "forest"]}}
    assert 0 < cost(tiny("fedal", **pool)).passes < cost(tiny("fedal")).passes


@pytest.mark.parametrize(
    ("seconds", "workers", "sentence"),
    [
        (1, 1, "2 runs, 2.0e8 sample passes, about 2 seconds on 1 core with parties one by one"),
        (
            840,
            2,
            "2 runs, 2.0e8 sample passes, about 14 minutes on 2 cores with parties one by one",
        ),
        (
            15.6e6,
            2,
            "2 runs, 2.0e8 sample passes, about 4,300 hours on 2 cores with parties one by one, "
            "some 60 hours on one GPU (rough)",
        ),
    ],
)
def test_it_is_reported_in_a_sentence(seconds: float, workers: int, sentence: str) -> None:
    assert describe([Cost(passes=1e8, seconds=seconds, gpu=1.08e5)] * 2, workers) == sentence
