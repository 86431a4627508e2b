"""`[local]`: the rule of each step against torch's own, and every method, which takes a setting or
says why not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import small_run
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.local import EVERY_LOCAL, LocalSetting, LocalTraining, balanced
from fedloom.core.message import leaves
from fedloom.core.network import Network
from fedloom.core.optim import SGD, Adam
from fedloom.core.task import Classes
from fedloom.experiment.config.local import LocalConfig
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.build import build, with_local
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import execute
from fedloom.experiment.run.fairness import unequal
from fedloom.experiment.run.lockstep import execute_lots
from fedloom.experiment.run.result import RunSummary
from fedloom.methods import registry

VALUES: dict[LocalSetting, dict[str, Any]] = {
    "optimizer": {"optimizer": "sgd", "momentum": 0.3},
    "weight_decay": {"weight_decay": 0.3},
    "clip": {"clip": 1e-3},
    "schedule": {"schedule": "cosine"},
    "class_weights": {"class_weights": {str(k): 2.0 + k for k in range(10)}},
}
"""A value of each setting that is no method's own."""

# -- the rule of a step ----------------------------------------------------------------------------

T = 7
TORCH: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (
        {"optimizer": "sgd", "momentum": 0.9},
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    ),
    "L2": (
        {"optimizer": "sgd", "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1),
    ),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.05)),
    "adamw": (
        {"optimizer": "adam", "weight_decay": 0.1, "clip": 0.3},
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    ),
    "clip": ({"clip": 0.05}, lambda p: torch.optim.SGD(p, 0.05)),
    "cosine": ({"schedule": "cosine"}, lambda p: torch.optim.SGD(p, 0.05)),
    "step": ({"schedule": "step"}, lambda p: torch.optim.SGD(p, 0.05)),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("only", [False, True])
def test_steps_are_torch_s(name: str, only: bool) -> None:
    settings, theirs = TORCH[name]
    local = LocalTraining(**settings, rounds=T)
    torch.manual_seed(0)
    x, y = torch.randn(T, 16, 5), torch.randint(3, (T, 16))
    own = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    other = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    other.load_state_dict(own.state_dict())
    network, optimizer = Network(own, local.applied(SGD(0.05))), theirs(other.parameters())
    at: Any = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T),
        "step": lambda: torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [-(-T * k // 8) for k in (5, 6, 7)]
        ),
    }.get(settings.get("schedule", ""), lambda: None)()
    for t in range(T):
        network.scale_rate(local.factor(t))
        network.minimize(
            lambda t=t: F.cross_entropy(network(x[t]), y[t]),
            only=list(network.parameters) if only else None,
        )
        optimizer.zero_grad()
        F.cross_entropy(other(x[t]), y[t]).backward()
        if "clip" in settings:
            nn.utils.clip_grad_norm_(other.parameters(), settings["clip"])
        optimizer.step()
        if at:
            at.step()
        for a, b in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), atol=1e-6, rtol=1e-5)


def test_what_is_not_set_is_the_page_s_own() -> None:
    for own in (SGD(0.1, 0.9, 1e-4), Adam(1e-3, weight_decay=1e-4)):
        assert LocalTraining().applied(own) is own
        assert LocalTraining(clip=1.0).applied(own).weight_decay == 1e-4
    assert LocalTraining(optimizer="sgd").applied(Adam(1e-3, weight_decay=1e-4)) == SGD(
        1e-3, 0.0, 1e-4
    )


def test_weights_of_classes() -> None:
    y = torch.tensor([0, 0, 0, 1])
    # as scikit-learn's "balanced"
    torch.testing.assert_close(balanced(y, 3), torch.tensor([4 / 6, 2.0, 1.0]))
    logits, weights = torch.randn(4, 3), torch.tensor([2.0, 0.5, 7.0])
    task = Classes(3, weights)
    each = F.cross_entropy(logits, y, reduction="none") * weights[y]
    torch.testing.assert_close(task.loss(logits, y), each.sum() / 4)
    torch.testing.assert_close(task.loss(logits, y, "sum"), each.sum())
    assert torch.equal(task.unweighted.loss(logits, y), F.cross_entropy(logits, y))


# -- every method ----------------------------------------------------------------------------------


def distinct() -> list[str]:
    """One method for each kind of parties and settings."""
    kinds = {
        (m.client, m.server, m.round, m.local): name for name, m in reversed([*registry().items()])
    }
    return sorted(kinds.values())


def small(name: str) -> RunConfig:
    """A run of few rows, in which clients train for two rounds."""
    clients = 3 if "secure sums" in registry()[name].needs else 2
    run = small_run(name, {"name": "local"}, clients=clients, test_fraction=0.95)
    fields = registry()[name].config.model_fields
    params = {
        k: n
        for k, n in {
            "epochs": 3,
            "local_rounds": 2,
            "pretrain_steps": 1,
            "aggregator_steps": 1,
        }.items()
        if k in fields
    }
    return run.model_copy(
        update={"rounds": 2 + ("local_rounds" in fields), "params": {**run.params, **params}}
    )


def trained(
    plan: RunPlan, local: Mapping[str, Any], engine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All states after the plan's rounds, with these settings of local training."""
    changes = {"local": LocalConfig(**local), "engine": EngineConfig(**engine or {})}
    plan = with_local(replace(plan, run=plan.run.model_copy(update=changes)))
    with start(plan) as there:
        fed = Federation(there, param_shapes=plan.param_shapes, colocated=plan.colocated)
        for t in range(plan.rounds):
            fed.round = t
            for _ in plan.method.round(fed, plan.server, there.ids, plan.cfg, t):
                pass
        assert not fed.failures, fed.failures[0].trace
        parties: dict[str, Any] = {str(i): dict(s) for i, s in there.states().items()}
        if plan.server is not None:
            parties["server"] = dict(plan.server.state())
        return {k: v.clone() for k, v in leaves(parties) if isinstance(v, Tensor)}


def differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    shared = [k for k in a if k in b and ".opt." not in f".{k}."]
    return any(a[k].shape != b[k].shape or not torch.equal(a[k], b[k]) for k in shared)


@pytest.mark.parametrize("name", distinct())
def test_a_method_takes_a_setting_or_says_why_not(name: str) -> None:
    method, run = registry()[name], small(name)
    for setting in EVERY_LOCAL:
        if setting not in method.local:
            with pytest.raises(
                ConfigError,
                match=re.escape(f"{name} does not take it, as {method.no_local}: leave"),
            ):
                run.model_copy(update={"local": LocalConfig(**VALUES[setting])}).resolve()
    if method.local:
        plan = build(run)
        own = trained(plan, {})
        for setting in method.local:
            assert differ(own, trained(plan, VALUES[setting])), setting


def test_every_method_declares_known_settings_and_a_reason_for_the_others() -> None:
    for name, method in registry().items():
        assert {*method.local} <= {*EVERY_LOCAL}, name
        assert bool(method.no_local) == ({*method.local} != {*EVERY_LOCAL}), name


def test_the_table_of_methods_is_the_registry_s() -> None:
    text = (
        (Path(__file__).parents[2] / "docs" / "config.md")
        .read_text()
        .partition("## Local training")[2]
    )
    rows = [
        row.split("|")[1:3]
        for row in text.partition("\n## ")[0].splitlines()
        if row.startswith("| `")
    ]
    said = {
        name: re.findall(r"`(\w+)`", takes)
        for names, takes in rows
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert said == {
        name: [*method.local] for name, method in registry().items() if method.local != EVERY_LOCAL
    }


# -- runs ------------------------------------------------------------------------------------------

ALL: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 0.01,
    "clip": 0.5,
    "schedule": "cosine",
    "class_weights": "balanced",
}


@pytest.mark.parametrize("name", ["fedavg", "fedal", "dispfl", "split"])
def test_engines_agree(name: str) -> None:
    """Exactly, or with batching up to the order of sums."""
    plan = build(small(name))
    loop = trained(plan, ALL)
    for engine in ({"workers": 2}, {"name": "isolated"}):
        other = trained(plan, ALL, engine)
        assert loop.keys() == other.keys() and all(torch.equal(loop[k], other[k]) for k in loop), (
            engine
        )
    batched = trained(plan, ALL, {"name": "batched"})
    assert all(torch.allclose(loop[k].float(), batched[k].float(), atol=1e-5) for k in loop)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(subprocess|unclosed).*:ResourceWarning")
def test_ray_agrees() -> None:
    pytest.importorskip("ray")
    plan = build(small("fedavg"))
    own = trained(plan, {})
    loop = trained(plan, ALL)
    ray = trained(plan, ALL, {"name": "ray", "workers": 2})
    assert (
        differ(own, loop)
        and loop.keys() == ray.keys()
        and all(torch.equal(loop[k], ray[k]) for k in loop)
    )


def test_runs_in_lockstep_have_their_own_settings() -> None:
    """Of one engine: other weights of classes, another rate, and none."""
    changes: list[dict[str, Any]] = [
        ALL,
        {**ALL, "class_weights": {"3": 4.0}},
        {"schedule": "cosine"},
        {},
    ]
    runs = [small("fedavg").model_copy(update={"local": LocalConfig(**local)}) for local in changes]
    batched = EngineConfig(name="batched")
    lot = [run.model_copy(update={"engine": batched}) for run in runs]
    together = execute_lots(lot, [None] * len(lot), execute=execute)
    assert together[0].summary["engine"]["remarks"][0] == "in lock-step, runs: 4"
    for run, found in zip(runs, together, strict=True):
        alone = execute(run)
        assert found.summary["accuracy"] == alone.summary["accuracy"], run.local
        for a, b in zip(found.metrics, alone.metrics, strict=True):
            assert a[5] == pytest.approx(b[5], abs=1e-4), a


def digits(method: str, local: Mapping[str, Any] | None = None, **settings: Any) -> RunConfig:
    data = {
        "name": "digits",
        "clients": 3,
        "test_fraction": 0.9,
        "test_rows": 40,
        "public_rows": 20,
        "own_test_rows": 0,
    }
    values: dict[str, Any] = {
        "method": method,
        "rounds": 4,
        "data": data,
        "models": {"pool": ["linear"]},
        **settings,
    }
    return check({"run": {**values, "local": local or {}}}).run


def test_a_stopped_run_resumes_with_its_momentum(tmp_path: Path) -> None:
    """A client of FedAL keeps its optimizer for the whole run."""
    from fedloom.experiment.run.execute import Stopped

    run, count = digits("fedal", ALL), 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 2

    with pytest.raises(Stopped):
        execute(run, tmp_path, stop=stop)
    resumed = execute(run, tmp_path, resume=True).summary
    assert resumed["state_sha256"] == execute(run).summary["state_sha256"]
    assert resumed["local"] == ALL


def test_balanced_weights_are_each_owner_s() -> None:
    plan = build(digits("fedavg", {"class_weights": "balanced"}))
    for context in plan.contexts:
        y = context.rows.y(torch.arange(len(context.rows)))
        assert isinstance(context.task, Classes) and context.task.weights is not None
        torch.testing.assert_close(context.task.weights, balanced(y, 10))
    assert plan.server_context.task == Classes(10) and plan.server_context.local == LocalTraining()


def test_a_node_trains_as_the_run_says() -> None:
    from fedloom.experiment.plan.node_party import build_party

    party = build_party(digits("fedavg", ALL), 1).party
    party.at_round(2)
    assert party.net.optimizer == SGD(0.01 / 2, 0.9, 0.01, 0.5)  # of the four rounds half the rate
    party.at_round(-1)
    assert party.net.optimizer.lr == 0.01


PRIVATE = {"dp": {"sigma": 1.0, "clip": 1.0}}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "momentum alone": (
        "fedavg",
        {"momentum": 0.9},
        {},
        r'momentum belongs to SGD: add optimizer = "sgd"',
    ),
    "twice": (
        "fedavg",
        {"optimizer": "adam"},
        {"params": {"momentum": 0.5}},
        r"takes the place of params\.momentum",
    ),
    "no weight": (
        "fedavg",
        {"class_weights": {"3": 0}},
        {},
        "a number above 0 for each class, not 0 for '3'",
    ),
    "two clips": (
        "fedavg-dp",
        {"clip": 1.0},
        {"params": PRIVATE},
        r"params\.dp\.clip bounds each row's gradient",
    ),
    "counts": (
        "fedavg-dp",
        {"class_weights": "balanced"},
        {"params": PRIVATE},
        "give weights that you know beforehand",
    ),
    "sums": (
        "fedsgd-dp",
        {"optimizer": "adam"},
        {"params": PRIVATE, "aggregate": {"secure": True}},
        "the server takes each step",
    ),
    "forest": (
        "fedal",
        {"clip": 1.0},
        {"models": {"pool": ["forest", "mlp"]}},
        "the black box forest is not trained",
    ),
    "unknown": ("fedavg", {"schedule": "linear"}, {}, r"local\.schedule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_apply_are_refused(name: str) -> None:
    method, local, settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        digits(method, local, **settings).resolve()


def test_classes_that_a_label_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local\.class_weights: the label has no class '12'"):
        build(digits("fedavg", {"class_weights": {12: 2.0}}))


def test_noise_goes_with_given_weights_and_adam() -> None:
    found = execute(
        digits("fedavg-dp", {"optimizer": "adam", "class_weights": {"3": 2.0}}, params=PRIVATE)
    ).summary
    assert found["privacy"] and found["local"]["optimizer"] == "adam"


def test_numbers_have_no_classes() -> None:
    import numpy as np
    import pandas as pd

    import fedloom

    x = np.random.default_rng(0).normal(size=(90, 2))
    frame = pd.DataFrame(
        {
            "a": x[:, 0],
            "b": x[:, 1],
            "price": x @ [3.0, -2.0],
            "owner": np.repeat(["a", "b", "c"], 30),
        }
    )
    given: dict[str, Any] = {
        "label": "price",
        "group": "owner",
        "rounds": 2,
        "public_rows": 0,
        "models": {"pool": ["linear"]},
    }
    found = fedloom.run(
        "fedavg", data=frame, local={k: v for k, v in ALL.items() if k != "class_weights"}, **given
    )
    assert 0 < found.rmse < np.inf
    with pytest.raises(ConfigError, match="the label is a number, which has no classes"):
        fedloom.run("fedavg", data=frame, local={"class_weights": "balanced"}, **given)


def test_a_comparison_names_other_settings() -> None:
    values: dict[str, Any] = {
        "method": "fedmd",
        "title": "",
        "preset": "",
        "seed": 0,
        "rounds": 1,
        "iterations": 1,
        "local_steps": 1.0,
    }
    base = RunSummary.model_construct(
        **values, training_rows=5, architectures=["mlp"], scores={}, params={}
    )
    one, other = (
        base.model_copy(update={"name": n, "local": each})
        for n, each in (("a", {}), ("b", {"clip": 1.0}))
    )
    assert unequal([one, other]) == ["local training: a its own; b clip = 1.0"]
    assert unequal([one, one.model_copy(update={"name": "c"})]) == []
