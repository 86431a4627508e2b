"""Gradient descent with shares of noise: the sum of a step has the noise of the fewest nodes that
open it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.core.fixed_point import threshold
from fedloom.experiment.plan.reading import check
from fedloom.methods import find
from fedloom.methods.averaging import fedsgd_dp, private
from fedloom.protect.accountant import Releases, epsilon
from fedloom.protect.aggregators import Secure
from tests.toy import Toy, common, contexts

N = 5


def toy(*, sigma: float = 1.0, how: Any = None, **params: Any) -> Toy:
    given: dict[str, Any] = {"lr": 0.2, "dp": {"sigma": sigma, "clip": 0.5}, **params}
    return Toy(
        find("fedsgd-dp"), client_contexts=contexts(N, make=common), means=how or Secure(1), **given
    )


def test_a_round_is_a_step_along_the_clipped_gradients_of_all_rows() -> None:
    t = toy(sigma=1e-3)
    assert t.server is not None
    before = {k: w.clone() for k, w in t.server.weights.items()}
    total, rows = torch.zeros(sum(w.numel() for w in before.values()), dtype=torch.float64), 0
    for i in range(N):
        party: Any = t.party(i)
        party.params = dict(before)
        total += private.clipped_sum(party, list(before), torch.arange(len(party.data)))
        rows += len(party.data)
    t.run(1)
    moved = torch.cat([(before[k] - w).flatten() for k, w in t.server.weights.items()]).double()
    assert torch.allclose(moved, 0.2 * total / rows, atol=2e-4) and float(moved.norm()) > 10 * 2e-4
    kinds = {(e.kind, e.what) for e in t.fed.ledger if e.sender == "client"}
    assert {kind for kind, _ in kinds} == {"update", "masks"}
    assert all("int64" in what for kind, what in kinds if kind == "update")


def test_one_row_moves_the_rounded_sum_by_the_norm_at_most() -> None:
    party: Any = toy().party(0)
    names, ends = list(party.params), []
    party.params = {k: 3 * w for k, w in party.params.items()}  # gradients beyond the clipping norm
    for draw in (
        lambda n: torch.zeros(n).numpy(),
        lambda n: torch.full((n,), 1 - 1e-9).double().numpy(),
    ):
        ends.append(fedsgd_dp.rounded_sum(party, names, draw))
    d = len(ends[0])
    spread = (ends[1] - ends[0]).double().norm() / len(party.data)
    assert 0 < spread <= math.sqrt(d)
    whole = fedsgd_dp.rounded_sum(party, names, lambda n: torch.zeros(n).numpy())
    object.__setattr__(party, "context", _without_a_row(party.context))
    less = fedsgd_dp.rounded_sum(party, names, lambda n: torch.zeros(n).numpy())
    assert fedsgd_dp.STEPS / 2 < float((whole - less).double().norm()) <= fedsgd_dp.norm(d)


def _without_a_row(context: Any) -> Any:
    return replace(context, data=replace(context.data, index=context.data.index[1:]))


def test_the_fewest_nodes_of_a_sum_have_all_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = list[int]()
    monkeypatch.setattr(fedsgd_dp, "rounded_sum", lambda party, names, uniform: torch.zeros(1))
    t = toy(sigma=2.0)
    party: Any = t.party(0)
    d = sum(w.numel() for w in party.params.values())

    class Seen:
        simulated = True
        uniform = None

        def skellam(self, half: int, count: int) -> torch.Tensor:
            halves.append(half)
            return torch.zeros(count, dtype=torch.int64)

    monkeypatch.setattr(fedsgd_dp, "draws", lambda *_: Seen())
    party.update(t=0, weights=dict(party.params))
    honest = threshold(N, 1) - 1
    assert honest == 3 and party.cfg.least_in_sum(party.context) == 4
    assert 2 * halves[0] * honest >= (2.0 * fedsgd_dp.norm(d)) ** 2 > 2 * (halves[0] - 1) * honest


def test_epsilon_and_the_charge_are_those_of_all_steps() -> None:
    t, charged = toy(sigma=3.0), list[Any]()
    party: Any = t.party(0)
    d = sum(w.numel() for w in party.params.values())
    spend = lambda *of: charged.append(of)
    object.__setattr__(party, "context", replace(party.context, privacy_budget=spend, secret=7))
    party.update(t=0, weights=dict(t.server.weights))
    ((sigma, count, rate, excess),) = charged
    assert (sigma, count, rate) == (3.0, 1, 1.0) and 0 < excess < 1e-3
    (guarantee,) = party.cfg.guarantees
    assert guarantee.epsilon([float(d)] * 10) == pytest.approx(
        epsilon([Releases(3.0, 10, 1.0, excess)], 1e-5)
    )
    assert party.take_notes()[fedsgd_dp.NUMBERS] == d


def test_shares_without_a_sum_that_hides_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"aggregate\.secure = true"):
        check({"run": {"method": "fedsgd-dp"}})
    with pytest.raises(ConfigError, match="personal_head"):
        find("fedsgd-dp").configure(params={"personal_head": True})
