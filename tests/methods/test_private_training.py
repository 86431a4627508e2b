"""DP-SGD and DP-FedAvg: sensitivities, degenerate cases, the same bits everywhere, and the ε that
is reported.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.context import Rows
from fedloom.core.errors import ConfigError, ModelError, PrivacyBudgetSpent
from fedloom.methods import find, steps
from fedloom.methods.averaging import private
from fedloom.methods.averaging.fedavg import FEDAVG
from fedloom.methods.averaging.fedavg_dp import FEDAVG_DP
from fedloom.protect.accountant import Releases, epsilon
from fedloom.protect.aggregators import Private
from fedloom.protect.noise import Draws
from tests.toy import Toy, common, contexts, rows

SMALL: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.1,
    "momentum": 0.0,
    "clients_per_round": None,
}
BY_ROWS: dict[str, Any] = {"sigma": 1.5, "clip": 0.5}
PEER_ROWS: dict[str, Any] = {"unit": "rows", **BY_ROWS}
"""The same at a peer, which has no noise unless it is asked for."""


def noisy(sigma: float, clip: float = 0.2) -> Private:
    """The mean of clipped changes with this noise, drawn from the key alone."""
    return Private(sigma, clip, lambda key: Draws(np.random.default_rng([*key])))


def changed(data: Rows, row: int, x: torch.Tensor, y: int) -> Rows:
    """These rows with one replaced."""
    assert data.labels is not None
    pool, labels = data.pool.clone(), data.labels.clone()
    pool[row], labels[row] = x, y
    return replace(data, pool=pool, labels=labels)


def test_a_row_moves_the_sum_by_the_clipping_norm_at_most() -> None:
    """A row that counts as nothing moves it by C, one that is replaced by up to 2 C; both are
    nearly reached.
    """
    data, far = rows(12, 0), 1e3 * torch.ones(6)
    cfg = FEDAVG_DP.configure(params={**SMALL, "dp": BY_ROWS})
    every = torch.arange(12)

    def total(data: Rows, which: torch.Tensor = every) -> torch.Tensor:
        party: Any = FEDAVG_DP.client(cfg, replace(contexts(1, make=common)[0], data=data))
        return private.clipped_sum(party, list(party.params), which)

    whole = total(changed(data, 3, far, 0))
    without = total(changed(data, 3, far, 0), every[every != 3])
    assert 0.99 * 0.5 < float((whole - without).norm()) <= 0.5 * (1 + 1e-6)
    moves = [
        float((total(changed(data, 3, s * far, y)) - whole).norm())
        for s in (1, -1)
        for y in range(4)
    ]
    assert 0.5 < max(moves) <= 2 * 0.5 * (1 + 1e-6)
    assert total(data, every[:0]).eq(0).all()
    assert torch.isfinite(total(changed(data, 3, torch.full((6,), 1e38), 0))).all()


def test_with_every_row_no_noise_and_no_clipping_a_step_is_one_of_gradient_descent() -> None:
    dp: dict[str, Any] = {"sigma": 1e-12, "clip": 1e4}
    # both take one step on all rows; the plain one repeats some to fill its batch, so it is done by
    # hand
    plain, noisy = (
        Toy(method, 3, **{**SMALL, "batch_size": 1000, **more}).run(2)
        for method, more in ((FEDAVG, {}), (FEDAVG_DP, {"dp": dp}))
    )
    party: Any = Toy(FEDAVG_DP, 3, **{**SMALL, "batch_size": 1000, "dp": dp}).party(1)
    before = {k: v.clone() for k, v in party.params.items()}
    x, y = party.data.every, party.data.y(torch.arange(len(party.data)))
    _, gradient = party.gradient(lambda x, y: steps.label_loss(party, x, y), x, y)
    private.dp_step(party, Draws(None), list(party.params), len(party.data))
    for k, w in party.params.items():
        assert torch.allclose(w, before[k] - 0.1 * gradient[k], atol=1e-6)
    assert plain.tensors().keys() == noisy.tensors().keys()


@pytest.mark.parametrize("unit", ["rows", "clients"])
@pytest.mark.parametrize("personal_head", [False, True])
def test_all_engines_give_the_same_bits_and_noise_changes_them(
    unit: str, personal_head: bool
) -> None:
    by: dict[str, Any] = {"dp": BY_ROWS} if unit == "rows" else {"means": noisy(0.5)}
    more: dict[str, Any] = (
        {"dp": {**BY_ROWS, "sigma": 5.0}} if unit == "rows" else {"means": noisy(5.0)}
    )
    given: dict[str, Any] = {**SMALL, "personal_head": personal_head, **by}
    method = FEDAVG_DP if unit == "rows" else FEDAVG
    loop, isolated, batched = (
        Toy(method, 3, isolated=i, batched=b, **given).run(2)
        for i, b in ((False, False), (True, False), (False, True))
    )
    found = loop.tensors()
    for other in (isolated, batched):
        assert all(torch.allclose(v, found[k], atol=1e-6) for k, v in other.tensors().items())
    assert all(torch.equal(v, found[k]) for k, v in isolated.tensors().items())
    louder = Toy(method, 3, **{**given, **more}).run(2).tensors()
    assert any(not torch.equal(v, found[k]) for k, v in louder.items())


def test_the_mean_of_updates_is_clipped_and_a_client_moves_it_by_the_norm_over_their_number() -> (
    None
):
    start = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    sent = [{k: w + 10.0**i for k, w in start.items()} for i in range(3)]

    def moved(replies: list[dict[str, torch.Tensor]], sigma: float = 1e-12) -> torch.Tensor:
        mean = noisy(sigma).combine(replies, [9.0, 1.0, 5.0], around=start)
        return torch.cat([(mean[k] - w).flatten() for k, w in start.items()])

    whole = moved(sent)
    assert float(whole.norm()) == pytest.approx(0.2, rel=1e-4)  # all point the same way
    opposite = {k: w - 1.0 for k, w in start.items()}
    assert float((moved([*sent[:2], opposite]) - whole).norm()) == pytest.approx(
        2 * 0.2 / 3, rel=1e-4
    )
    assert float((moved([*sent[:2], start]) - whole).norm()) == pytest.approx(0.2 / 3, rel=1e-4)
    server: Any = Toy(FEDAVG, 4, **SMALL, means=noisy(50.0)).run(1).server
    noise = torch.cat([w.flatten() for w in server.weights.values()])
    assert float(noise.std()) == pytest.approx(50 * 0.2 / 4, rel=0.2)


def test_epsilon_counts_every_step_of_the_rounds_in_which_a_client_takes_part() -> None:
    cfg = FEDAVG_DP.configure(params={**SMALL, "dp": BY_ROWS})
    (guarantee,) = cfg.guarantees
    assert guarantee.epsilon([20.0] * 3) == pytest.approx(
        epsilon([Releases(1.5, 3 * 2 * 3, 8 / 20)], 1e-5)
    )
    assert private.row_releases(cfg, [5.0, 5.0]) == [Releases(1.5, 4, 1.0)]
    heads = FEDAVG_DP.configure(
        params={**SMALL, "personal_head": True, "head_epochs": 1, "dp": BY_ROWS}
    )
    assert private.row_releases(heads, [20.0]) == [Releases(1.5, 9, 0.4)]
    seen: list[tuple[float, int, float]] = []
    client_contexts = [
        replace(c, secret=1, privacy_budget=lambda *of: seen.append(of))
        for c in contexts(2, make=common)
    ]
    Toy(FEDAVG_DP, client_contexts=client_contexts, **SMALL, dp=BY_ROWS).run(2)
    assert seen == [(1.5, 6, 8 / 20), (1.5, 8, 8 / 30)] * 2
    assert FEDAVG.configure().guarantees == ()


def test_a_peer_of_gossip_sends_the_weights_of_dp_sgd() -> None:
    """Its step is FedAvg's, every call is charged, and all engines give the same bits."""
    gossip, given = find("gossip"), {k: v for k, v in SMALL.items() if k != "clients_per_round"}
    places = contexts(3, make=common)
    alone: Any = Toy(gossip, client_contexts=places, **given, personal_head=False, dp=PEER_ROWS)
    client: Any = Toy(FEDAVG_DP, client_contexts=places, **SMALL, dp=BY_ROWS).party(1)
    client.update(t=0, weights=client.params)
    alone.party(1).update(t=0)
    sent = alone.party(1).give(t=0)["weights"]
    assert {*sent} == {*client.params} and all(
        torch.equal(w, client.params[k]) for k, w in sent.items()
    )
    loop, isolated, plain = (
        Toy(gossip, client_contexts=places, isolated=apart, **{**given, **more}).run(2).tensors()
        for more, apart in (({"dp": PEER_ROWS}, False), ({"dp": PEER_ROWS}, True), ({}, False))
    )
    assert all(torch.equal(x, isolated[k]) for k, x in loop.items())
    assert any(not torch.equal(x, plain[k]) for k, x in loop.items())
    seen: list[tuple[float, int, float]] = []
    charged = [replace(c, secret=1, privacy_budget=lambda *of: seen.append(of)) for c in places[:2]]
    Toy(gossip, client_contexts=charged, **given, personal_head=False, dp=PEER_ROWS).run(2)
    assert seen == [(1.5, 6, 8 / 20), (1.5, 8, 8 / 30)] * 2
    (guarantee,) = gossip.configure(
        params={**given, "personal_head": False, "dp": PEER_ROWS}
    ).guarantees
    assert guarantee.epsilon([20.0] * 3) == pytest.approx(
        epsilon([Releases(1.5, 18, 8 / 20)], 1e-5)
    )


def test_a_run_reports_epsilon_of_each_client(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": {"clients": 4}, "models": {"pool": ["linear"]}, "rounds": 3}
    params = {"clients_per_round": 2, "epochs": 1, "dp": BY_ROWS}
    result = fedloom.run("fedavg-dp", **settings, params=params, out=tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert saved == result.summary["privacy"] and len(saved) == 1
    one = saved[0]
    assert one["message"] == "weights" and one["simulated"] and one["delta"] == 1e-5
    assert "counts as nothing" in one["adjacency"]
    sent = one["epsilon"].get("clients", range(4))
    taken = [[t for t in range(3) if i in _participants(4, 2, t)] for i in sent]
    counts = list(map(sum, json.loads((tmp_path / "run" / "partition.json").read_text())["counts"]))
    cfg = FEDAVG_DP.configure(params=params)
    for i, rounds, found in zip(sent, taken, one["epsilon"]["per_client"], strict=True):
        assert found == pytest.approx(
            epsilon(private.row_releases(cfg, [counts[i]] * len(rounds)), 1e-5)
        )
    page = result.report().read_text() if hasattr(result, "report") else ""
    assert "Differential privacy" in page and "Simulated" in page


def test_a_run_with_noise_on_its_means_reports_epsilon_of_each_client(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": {"clients": 4}, "models": {"pool": ["linear"]}, "rounds": 3}
    noise = {"sigma": 0.5, "clip": 0.2, "delta": 1e-4}
    params = {"clients_per_round": 2, "epochs": 1}
    result = fedloom.run(
        "fedavg", **settings, params=params, aggregate={"noise": noise}, out=tmp_path / "run"
    )
    (one,) = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert one["message"] == "mean" and one["simulated"] and one["delta"] == 1e-4
    assert one["adjacency"] == "the updates of one client count as nothing"
    for i, found in zip(
        one["epsilon"].get("clients", range(4)), one["epsilon"]["per_client"], strict=True
    ):
        taken = [t for t in range(3) if i in _participants(4, 2, t)]
        assert found == pytest.approx(epsilon([Releases(0.5, len(taken))], 1e-4))
    page = result.report().read_text()
    assert "Differential privacy" in page and "Simulated" in page


def _participants(clients: int, k: int, t: int) -> list[int]:
    toy = Toy(FEDAVG, clients)
    return list(toy.fed.sample(range(clients), k, t))


def test_a_spent_budget_stops_the_call_with_its_reason() -> None:
    def spent(*_: Any) -> None:
        raise PrivacyBudgetSpent("the privacy budget of these rows is spent")

    client_contexts = [replace(c, secret=1, privacy_budget=spent) for c in contexts(2, make=common)]
    with pytest.raises(PrivacyBudgetSpent, match="budget"):
        Toy(FEDAVG_DP, client_contexts=client_contexts, **SMALL, dp=BY_ROWS).run(1)


def test_what_has_no_bound_is_refused() -> None:
    client_contexts = contexts(2, make=lambda i: common(i, norm=True))
    with pytest.raises(ModelError, match="BatchNorm"):
        Toy(FEDAVG_DP, client_contexts=client_contexts, dp=BY_ROWS)
    with pytest.raises(ConfigError, match="sigma"):
        FEDAVG_DP.configure(params={"dp": {"sigma": 0}})


def test_one_row_moves_a_proxy_by_no_more_than_its_bound_also_after_training() -> None:
    """At the own head, trained on the own rows, a row moves the gradients of the others too."""
    plus, far = find("afind-plus"), 40 * torch.ones(6)
    data = rows(20, 1)
    given: dict[str, Any] = {
        "epochs": 1,
        "head_epochs": 20,
        "lr": 0.5,
        "batch_size": 20,
        "probe_rows": 20,
    }

    def proxy(data: Rows, dp: dict[str, Any], head: str) -> torch.Tensor:
        from fedloom.methods.peer import selection

        client_context = replace(contexts(2, make=common)[1], data=data)
        peer: Any = plus.client(plus.configure(params={**given, "dp": dp}), client_context)
        body = {k: w.clone() for k, w in steps.shared_weights(peer).items()}
        steps.local_sgd(peer, t=0)  # trains the head
        steps.set_weights(peer, body)  # as the asker's
        if head == "initial":
            return selection.proxy(peer, 1)[0]
        x, y = peer.sample_batch(1, size=20)
        each = peer.row_gradients(
            lambda x, y: steps.label_loss(peer, x, y), x, y, of=selection.proxy_names(peer.params)
        )
        flat = torch.cat([g.flatten(1) for g in each.values()], 1)
        return (flat * (0.1 / flat.norm(dim=1).clamp_min(0.1))[:, None]).mean(0)

    dp: dict[str, Any] = {"target": "phi", "clip": 0.1}
    other = changed(data, 4, far, 0)
    moved = {
        head: float((proxy(data, dp, head) - proxy(other, dp, head)).norm())
        for head in ("initial", "own")
    }
    bound = 2 * 0.1 / 20
    assert moved["initial"] <= bound * (1 + 1e-5) and moved["own"] > 2 * bound
    cfg = plus.configure(params={"threshold": "anchored", "dp": {"target": "phi", "sigma": 2.0}})
    (guarantee,) = cfg.guarantees
    # replaced: half the multiplier
    assert guarantee.epsilon([1.0]) == pytest.approx(4.37718, rel=1e-5)
    assert guarantee.epsilon([1.0, 2.0, 20.0]) == pytest.approx(28.37, abs=0.01)
    assert math.isfinite(guarantee.epsilon([1e6]))
