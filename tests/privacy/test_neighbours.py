"""The choice of neighbours tells no more about rows than φ with its noise does, whatever proxies a
peer sends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.methods import find
from fedloom.methods.peer import selection
from fedloom.protect import noise
from tests.toy import Toy, common, contexts, rows

TRIALS = 40
PARAMS: dict[str, Any] = {
    "threshold": "anchored",
    "dp": {"target": "phi", "sigma": 20.0, "clip": 0.1},
}


def peer(label: int) -> Any:
    """A peer at a node, whose row 4 has this label."""
    data = rows(40, 0)
    assert data.labels is not None
    labels = data.labels.clone()
    labels[4] = label
    context = replace(contexts(3, make=common)[0], data=replace(data, labels=labels), secret=7)
    method = find("afind-plus")
    return method.party_at(context)(method.configure("recommended", PARAMS), context)


def between(one: Tensor, other: Tensor) -> Tensor:
    """A direction whose cosine is above the threshold for the one vector, and below
    for the other.
    """
    one, other = F.normalize(one, dim=0), F.normalize(other, dim=0)
    middle = F.normalize(one + other, dim=0)
    across = F.normalize(one - other, dim=0)
    return middle / 2 + across * 0.75**0.5


def test_two_labels_are_not_told_apart_by_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selection.SIMILAR == 0.5
    phis = [selection.initial_proxy(peer(label)) for label in (0, 1)]
    question = between(*phis)
    here = torch.tensor([False, True, False])
    rng = np.random.default_rng(0)
    monkeypatch.setattr(noise, "_normal", rng.standard_normal)
    right = 0
    for trial in range(TRIALS):
        label, party = trial % 2, peer(trial % 2)
        party.compare(t=0, inbox={"1": {"phi": question}})
        right += bool(party.choose(here=here, open=False)[1]) == (label == 0)
    assert abs(right - TRIALS / 2) <= 8, right  # 40 of 40 by a φ without noise


def test_the_own_proxy_is_charged_once_and_is_the_one_that_is_sent() -> None:
    party, charges = peer(0), list[Any]()
    object.__setattr__(
        party, "context", replace(party.context, privacy_budget=lambda *of: charges.append(of))
    )
    party.compare(t=0, inbox={"1": {"phi": party.anchor(t=0)["phi"]}})
    assert charges == [(20.0, 1, 1.0)] and float(party.neighbours["cosines"][1]) == pytest.approx(
        1.0
    )
    assert torch.equal(party.anchor(t=5)["phi"], party.neighbours["phi"]) and len(charges) == 1


@pytest.mark.parametrize("threshold", ["eq13", "calibrated", "anchored"])
def test_only_a_choice_at_the_initial_network_has_a_guarantee(threshold: str) -> None:
    cfg = find("afind-plus").configure("recommended", {**PARAMS, "threshold": threshold})
    assert len(cfg.guarantees) == (threshold == "anchored") == cfg.promises


@pytest.mark.parametrize("mode", ["faithful", "cheap"])
def test_a_run_releases_no_more_proxies_than_planned(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ε that an officer approves is that of the planned number; here all peers ask all others
    in each round.
    """
    monkeypatch.setattr(selection, "largest_gap", lambda cosines: -1.0)
    toy = Toy(
        find("afind-plus"), client_contexts=contexts(3, make=common), **PARAMS, mode=mode
    ).run(3)
    for i in toy.engine.ids:
        party = toy.party(i)
        (guarantee,) = party.cfg.guarantees
        (planned,) = guarantee.planned(party, 3)
        sent = int(party.neighbours["sent"])
        assert sent == 1 + 3 * 2 <= planned, sent  # the own one is sent to all
        assert guarantee.epsilon([sent]) <= guarantee.epsilon([planned])
