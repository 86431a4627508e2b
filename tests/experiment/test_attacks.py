"""What parties could infer about labels, measured in runs: hooks, metrics, and that looking changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.rng import stream
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.methods.features import class_means
from fedloom.methods.vertical.steps import batch_indices, labels, learn
from fedloom.protect.attacks import known_rows, nearest, success

ALIGNED = 70  # no multiple of the batch size
CONTROL = {"embeddings nearest", "completion", "chance"}


def config(method: str, attacks: int | None = 1, rounds: int = 2, **changes: Any) -> Any:
    values = {
        "method": method,
        "rounds": rounds,
        "data": {"clients": 3, "test_rows": 50},
        "columns": {"aligned": ALIGNED, "unaligned": 40},
        "models": {"pool": ["mlp"]},
        "evaluate": {} if attacks is None else {"attack_labels": attacks},
    }
    return check({"run": {**values, **changes}}).run


def shares(result: RunResult, round: int) -> dict[str, dict[str, float]]:
    """By attack and party; the mean has the party ""."""
    found: dict[str, dict[str, float]] = {}
    for at, _, _, party, what, value in result.metrics:
        if at == round and what.startswith("attack "):
            found.setdefault(what.removeprefix("attack ").removesuffix(" mean"), {})[party] = value
    return found


@contextmanager
def begun(run: Any, rounds: int = 1) -> Iterator[tuple[RunPlan, Federation]]:
    """A federation after some rounds."""
    run_plan = build(run)
    with start(run_plan) as engine:
        fed = Federation(engine, coordinator="active", colocated=run_plan.colocated)
        for t in range(rounds):
            fed.round = t
            assert list(
                run_plan.method.round(fed, run_plan.server, engine.ids, run_plan.cfg, t)
            ) == ["round"]
        yield run_plan, fed


def ask(fed: Federation, method: str, **arguments: Any) -> dict[int, Any]:
    return dict(
        zip(
            fed.engine.ids,
            fed.engine.call(fed.engine.ids, method, arguments, None, None),
            strict=True,
        )
    )


def test_logits_that_are_added_up_give_all_labels_away() -> None:
    result = execute(config("split", params={"top_model": "sum", "embedding_dim": 10}))
    for round in (0, 1, 2):
        found = shares(result, round)
        assert found["gradients direct"] == {"party-1": 1.0, "party-2": 1.0, "": 1.0}
        assert set(found) == {"gradients direct", "gradients nearest", *CONTROL}


def test_gradients_leak_more_than_the_labels_that_are_known_before_and_after_training() -> None:
    result = execute(config("split", rounds=3))
    for round in range(4):
        found = shares(result, round)
        assert set(found) == {"gradients nearest", *CONTROL}
        assert all(set(each) == {"party-1", "party-2", ""} for each in found.values())
        assert all(
            each[""] == pytest.approx((each["party-1"] + each["party-2"]) / 2)
            for each in found.values()
        )
        assert found["gradients nearest"][""] > found["embeddings nearest"][""] + 0.2
        assert found["chance"]["party-1"] == pytest.approx(0.1, abs=0.02)


def test_prototypes_leak_without_any_known_label() -> None:
    result = execute(config("proto-evfl", params={"steps": 2}))
    for round in range(3):
        found = shares(result, round)
        assert set(found) == {"prototypes", *CONTROL}
        assert found["prototypes"][""] > 0.4 > 0.2 > found["chance"][""]


def test_who_is_reported_nothing_can_only_try_the_controls() -> None:
    assert set(shares(execute(config("active-only", rounds=1)), 1)) == CONTROL


def test_exposed_gradients_are_those_of_the_joint_loss() -> None:
    with begun(config("split")) as (run_plan, fed):
        active: Any = run_plan.server
        parts = ask(fed, "contribution", on="aligned")
        exposed = active.exposed(parts)
        assert set(exposed) == {"gradients"} and set(exposed["gradients"]) == {0, 1, 2}
        sent = [parts[m].clone().requires_grad_() for m in parts]
        loss = torch.zeros(())
        for row, label in enumerate(labels(active)):
            joint = torch.stack([f[row] for f in sent])[None]
            loss = loss + F.cross_entropy(active.net.module(joint), label[None])
        (loss / run_plan.cfg.batch_size).backward()
        for m, f in zip(parts, sent, strict=True):
            assert exposed["gradients"][m].shape == (ALIGNED, run_plan.cfg.embedding_dim)
            assert torch.allclose(exposed["gradients"][m], f.grad, atol=1e-7)


def test_exposed_gradients_are_what_the_first_batch_brings() -> None:
    """Embeddings and gradients of the attack are, row by row, what crosses in training."""
    run = config("split", params={"batch_size": 16})
    with begun(run, rounds=0) as (run_plan, fed):
        active: Any = run_plan.server
        parts = ask(fed, "contribution", on="aligned")
        exposed, rows = active.exposed(parts)["gradients"], batch_indices(active, 0, 0)
        sent = ask(fed, "embed", number=0, step=0)
        messages = learn(active, sent, 0, 0)
        for m in parts:
            assert torch.equal(parts[m][rows], sent[m])
            assert torch.allclose(exposed[m][rows], messages[m]["cut"], atol=1e-7)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_exposed_prototypes_are_those_that_are_sent(noise: float) -> None:
    changes: dict[str, Any] = {
        "params": {"prototype_noise": noise, "steps": 1},
        "columns": {"aligned": ALIGNED, "rare_classes": [3]},
    }
    with begun(config("proto-evfl", **changes)) as (run_plan, fed):
        active: Any = run_plan.server
        parts = ask(fed, "contribution", on="aligned")
        messages = active.exposed(parts)["prototypes"]
        for m in parts:
            difference = messages[m] - active.prototypes[m]
            others = torch.arange(10) != 3
            # no aligned person is of this class, and the prior says so
            assert not messages[m][3].any()
            assert float(difference[others].std(correction=0)) == pytest.approx(noise, abs=0.1)
            assert torch.equal(difference[others], torch.zeros(9, run_plan.cfg.embedding_dim)) == (
                noise == 0
            )


def test_before_the_first_round_prototypes_are_those_that_it_would_begin_with() -> None:
    with begun(config("proto-evfl"), rounds=0) as (run_plan, fed):
        active: Any = run_plan.server
        parts = ask(fed, "contribution", on="aligned")
        messages = active.exposed(parts)["prototypes"]
        for m, f in parts.items():
            assert torch.equal(messages[m], class_means(f, labels(active), 10)[0])
        assert not active.begun and not active.prototypes.any()
        first = ask(fed, "introduce")
        assert all(torch.allclose(parts[m], first[m], atol=1e-6) for m in parts)


def test_a_party_attacks_with_its_own_embeddings_as_it_has_them() -> None:
    """Noise is on what leaves."""
    found: list[Tensor] = []
    for kappa in (0.0, 0.3):
        with begun(config("proto-evfl", params={"embedding_noise": kappa, "steps": 0})) as (_, fed):
            found.append(ask(fed, "contribution", on="aligned")[1])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("method", ["split", "active-only", "proto-evfl", "ss-vfl", "fedhssl"])
def test_looking_changes_no_state_and_sends_nothing(method: str) -> None:
    params = {"steps": 1} | ({"pretrain_rounds": 1} if method in ("ss-vfl", "fedhssl") else {})
    changes: dict[str, Any] = {} if method in ("split", "active-only") else {"params": params}
    without, with_ = (execute(config(method, attacks, **changes)) for attacks in (None, 3))
    assert with_.summary["state_sha256"] == without.summary["state_sha256"]
    assert with_.summary["bytes"] == without.summary["bytes"]
    assert [r for r in with_.metrics if not r[4].startswith("attack ")] == without.metrics
    assert len(with_.metrics) > len(without.metrics)


@pytest.mark.parametrize("method", ["split", "proto-evfl"])
def test_engines_agree(method: str) -> None:
    loop, apart = (
        shares(execute(config(method, engine={"name": name})), 2) for name in ("local", "isolated")
    )
    assert loop == apart
    together = shares(execute(config(method, engine={"name": "batched"})), 2)
    for what, each in loop.items():
        assert each[""] == pytest.approx(together[what][""], abs=0.1)


def test_permuted_labels_are_guessed_no_better_than_by_chance() -> None:
    """Gradients of other labels than those that are asked for tell nothing about these."""
    run = config("split", columns={"aligned": 600, "unaligned": 40})
    run_plan = build(run)
    truth = run_plan.data.parties.labels
    messages = labels(run_plan.server).numpy().copy()
    assert np.array_equal(truth, messages)
    data = run_plan.server.context.data
    data.labels[data.index] = torch.from_numpy(stream(0, "permuted").permutation(messages))
    with start(run_plan) as engine:
        fed = Federation(engine, coordinator="active", colocated=run_plan.colocated)
        parts = ask(fed, "contribution", on="aligned")
        active: Any = run_plan.server
        gradients = active.exposed(parts)["gradients"]
    for m in (1, 2):
        known = known_rows(torch.from_numpy(truth), 1, stream(0, "attack", m))
        guesses = nearest(gradients[m], known, torch.from_numpy(truth)[known])
        assert success(guesses, torch.from_numpy(truth), known) == pytest.approx(0.1, abs=0.06)


def test_a_method_whose_parties_have_labels_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"evaluate\.attack_labels: .*: leave it out, or use a vertical method"
    ):
        check({"run": {"method": "fedavg", "evaluate": {"attack_labels": 1}}})
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        config("split", 0)


def test_an_attacker_that_knows_all_has_nothing_to_find() -> None:
    with pytest.raises(ConfigError, match="with 50 of each class all labels are known: set fewer"):
        execute(config("split", 50))
