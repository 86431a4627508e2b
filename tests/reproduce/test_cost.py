"""What a run is said to cost, against what is counted as it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom import models
from fedloom.data.sources import SOURCES, load
from fedloom.experiment.config import RunConfig
from fedloom.experiment.reading import check
from fedloom.experiment.run import execute
from fedloom.methods import registry
from fedloom.reproduce import cost as told
from fedloom.reproduce import speed as measured
from fedloom.reproduce.cost import Cost, cost, describe
from fedloom.reproduce.declared import DECLARED, STAGES
from fedloom.reproduce.speed import Operations, flops, speed

TINY: dict[str, Any] = {
    "rounds": 2,
    "data": {"clients": 3, "public": 60, "test_fraction": 0.7, "test_rows": 30, "own_test_rows": 10},
    "models": {"pool": ["mlp"]},
    "evaluate": {"points": 1},
}
SMALL = {"batch_size": 32, "epochs": 2, "steps": 3, "pretrain": 1, "server_steps": 5}
REPRESENTATIVE = (
    "local", "fedal", "fccl", "fedproto-public", "cfd", "feddf", "fedavg-ft", "afind-plus", "pens", "ditto-afind",
    "augfl", "per-fedavg", "fedcp", "split", "proto-evfl", "fedhssl",
)  # fmt: skip


def tiny(name: str, **changes: Any) -> RunConfig:
    """A run of a moment."""
    method = registry()[name]
    whole = {k for k, f in method.config.model_fields.items() if f.annotation in (int, int | None)}
    params = {k: v for k, v in SMALL.items() if k in whole and k not in method.fixed}
    values = {**TINY, "method": name, "params": params}
    if method.setting == "vertical":
        values |= {"columns": {"aligned": 60, "unaligned": 40}}
    if "pretrained server model" in method.needs:
        values |= {"pretrained": {"epochs": 1}}
    return check({"run": values | changes}).run


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_what_is_said_is_what_is_counted(name: str) -> None:
    run = tiny(name)
    if run.pretrained.given:  # it is kept, and so counts once for all runs
        execute(run)
    with Operations() as counted:
        execute(run)
    assert 1 / 1.6 < counted.total / cost(run).flops < 1.6


def test_every_method_declares_its_passes_and_no_other_does() -> None:
    assert DECLARED.keys() == registry().keys() >= STAGES.keys()


def test_fedal_costs_8_passes_where_local_costs_3_and_afind_a_training_of_each_friend() -> None:
    untested = {"evaluate": {"points": 1}, "data": {**TINY["data"], "test_rows": 1, "own_test_rows": 0}}
    fedal, local = (cost(tiny(name, rounds=500, **untested)).passes for name in ("fedal", "local"))
    assert fedal / local == pytest.approx(8 / 3, rel=0.01)
    faithful, cheap = (
        cost(tiny("afind-plus", params={"mode": mode, "open_every": 1, "epochs": 50}, rounds=50, **untested)).passes
        for mode in ("faithful", "cheap")
    )
    assert faithful / cheap == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("change", [{"rounds": 4}, {"data": {**TINY["data"], "clients": 6, "options": {"rows": 40}}}])
def test_twice_the_work_is_twice_the_cost(change: dict[str, Any]) -> None:
    once = {**TINY, "data": {**TINY["data"], "options": {"rows": 40}}}
    small = cost(check({"run": {**once, "method": "fedavg", "evaluate": {"points": 1}}}).run)
    large = cost(check({"run": {**once, "method": "fedavg", **change}}).run)
    assert 1.5 < large.flops / small.flops < 2.1


def test_a_paper_s_run_is_reckoned_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no data set that is not here a byte is asked for."""
    monkeypatch.setattr(told, "load", lambda *_: pytest.fail("data was read"))
    values = {
        "method": "fedal",
        "iterations": 2000,
        "data": {"name": "svhn"},
        "models": {"pool": ["wrn-10-1", "wrn-16-1"]},
    }
    found = cost(check({"run": values}).run, rate=1e11)
    assert found.passes > 1e6 and found.seconds > found.flops / 1e11 and found.gpu > found.flops / 1e13


def test_the_sizes_of_data_sets_are_those_that_come() -> None:
    assert told.KNOWN.keys() == SOURCES.keys()
    for name in ("digits", "breast_cancer", "wine"):
        data = load(name)
        assert told.KNOWN[name] == (data.input_shape, len(data.classes), len(data.train), 0)


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
    monkeypatch.setattr(measured, "_line", lambda *_: (1e-4, 1e-6))  # so small a network takes no time but noise
    like = speed("mlp", (1, 8, 8), 10, None)
    monkeypatch.setattr(measured, "LIKE", ("mlp", (1, 8, 8)))
    forward, trained, weights = flops(name, (3, 84, 84), 10, None)
    assert 2 * forward < trained < 3 * forward
    found = speed(name, (3, 84, 84), 10, None)
    assert found.trained / like.trained == pytest.approx(trained / like.training)
    assert found.step == like.step + measured.WEIGHT * weights
    speed.cache_clear()


def test_a_pretraining_that_runs_share_counts_once() -> None:
    one, other = (cost(tiny("augfl", seed=seed)) for seed in (0, 1))
    ((_, taught),) = one.once
    assert one.once == other.once and taught.passes > 0
    assert (one + other).whole().passes == one.passes + other.passes + taught.passes
    assert not cost(tiny("local-only")).once


def test_a_black_box_costs_nothing_that_is_counted() -> None:
    pool = {"models": {"pool": ["mlp", "forest"]}}
    assert 0 < cost(tiny("fedal", **pool)).flops < cost(tiny("fedal")).flops


def test_a_page_of_one_s_own_counts_as_if_its_clients_trained() -> None:
    found = cost(check({"run": {**TINY, "method": "examples/fedavg.py"}}).run)
    assert found.passes > 0


@pytest.mark.parametrize(
    ("seconds", "workers", "sentence"),
    [
        (1, 1, "2 runs, 2.0e8 sample passes, about 2 seconds on 1 core"),
        (840, 2, "2 runs, 2.0e8 sample passes, about 14 minutes on 2 cores"),
        (15.6e6, 2, "2 runs, 2.0e8 sample passes, about 4,300 hours on 2 cores, some 60 hours on one GPU (rough)"),
    ],
)
def test_it_is_told_in_a_sentence(seconds: float, workers: int, sentence: str) -> None:
    assert describe([Cost(passes=1e8, seconds=seconds, gpu=1.08e5)] * 2, workers) == sentence
