"""FedMosaic's page against its equations, written by hand: the loss and its weight, expertise,
votes, and faults.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.aggregate import Combined
from fedloom.core.context import ClientContext
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.methods.distillation.fedmosaic import FedMosaicClient, FedMosaicConfig, FedMosaicServer
from tests.toy import CLASSES, Toy, contexts, equal

MOSAIC, LOCAL = methods.find("fedmosaic"), methods.find("local")


def toy(n: int = 4, method: Any = MOSAIC, **params: Any) -> Toy:
    """The toy federation, with batches of 8, and a server that has the public rows."""
    places = contexts(n)
    side: dict[str, Any] = {} if method is LOCAL else {"server_side": {"public": places[0].public}}
    return Toy(method, client_contexts=places, batch_size=8, **side, **params)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def client(**params: Any) -> FedMosaicClient:
    return FedMosaicClient(FedMosaicConfig(**params), contexts(1)[0])


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 0], [-1, 2, -1, 2, 1]])
def test_the_gradient_is_that_of_the_loss_with_alpha_held(labels: list[int]) -> None:
    f = rand(11, CLASSES).requires_grad_()
    y = torch.arange(6) % CLASSES
    public = torch.tensor(labels)
    known = public >= 0
    private, pseudo = F.cross_entropy(f[:6], y), F.cross_entropy(f[6:][known], public[known])
    alpha = math.exp(-(pseudo.item() - private.item()) / private.item())
    (auto,) = torch.autograd.grad(private + alpha * pseudo, f)
    assert (client().loss_gradient(f.detach(), y, public) - auto).abs().max() < 1e-15


def test_without_labels_the_loss_is_that_of_own_rows() -> None:
    f, y = rand(9, CLASSES).requires_grad_(), torch.arange(6) % CLASSES
    (auto,) = torch.autograd.grad(F.cross_entropy(f[:6], y), f)
    found = client().loss_gradient(f.detach(), y, torch.full((3,), -1))
    assert (found - auto).abs().max() < 1e-15


def test_alpha_is_at_most_e_and_falls_to_0_where_public_labels_contradict() -> None:
    sure = 40 * torch.eye(CLASSES, dtype=torch.float64)
    y = torch.arange(CLASSES)
    flat = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    # ℓ_pseudo = 0: α = e, and nothing is left to learn
    pulled = client().loss_gradient(torch.cat([flat, sure]), y, y)
    assert pulled[CLASSES:].abs().max() < 1e-12
    wrong = client().loss_gradient(torch.cat([sure, sure]), y, y.roll(1))  # ℓ_priv near 0: α = 0
    assert wrong.isfinite().all() and wrong[CLASSES:].abs().max() == 0


def test_expertise_is_that_of_a_sure_and_of_a_clueless_client() -> None:
    logits = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    found = client().expertise(logits, logits.argmax(-1))
    p = logits[2].softmax(-1)
    assert found.tolist() == pytest.approx(
        [math.log(4), 0.0, math.log(4) + float((p * p.log()).sum())], abs=1e-6
    )
    one = client(expertise="frequency")
    y = one.data.y(torch.arange(len(one.data)))
    shares = torch.bincount(y, minlength=CLASSES) / len(y)
    assert torch.allclose(one.expertise(logits, torch.tensor([2, 0, 1])), shares[[2, 0, 1]])


def test_the_server_takes_the_vote_with_the_most_expertise() -> None:
    server = FedMosaicServer(FedMosaicConfig(), ClientContext(id=0, classes=CLASSES))
    votes = {
        3: {
            "classes": torch.tensor([0, 1, 2], dtype=torch.int16),
            "expertise": torch.tensor([0.5, 0.3, 0.0]),
        },
        5: {
            "classes": torch.tensor([1, 2, 2], dtype=torch.int16),
            "expertise": torch.tensor([0.4, 99.0, 0.0]),
        },
        8: {
            "classes": torch.tensor([1, 1, 0], dtype=torch.int16),
            "expertise": torch.tensor([0.2, 1.2, 0.0]),
        },
    }
    read = [server.read(n, vote) for n, vote in votes.items()]
    labels = server.label(Combined(sum(read) / 3, 3, tuple(votes), votes))
    assert labels.tolist() == [1, 1, -1]  # 0.6 > 0.5; 99 counts as ln 4 = 1.39 < 1.5; nobody knows


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_class_that_is_none_is_refused(wrong: int) -> None:
    server = FedMosaicServer(FedMosaicConfig(), ClientContext(id=0, classes=CLASSES))
    with pytest.raises(MessageError, match="classes must be 0 to 3"):
        server.check(0, {"classes": torch.tensor([0, wrong], dtype=torch.int16)})


def test_the_first_round_is_training_alone_and_then_labels_count() -> None:
    first, alone = toy(tau=5).run(1), toy(method=LOCAL, tau=5).run(1)
    for n in range(4):
        assert all(
            torch.allclose(x, alone.party(n).params[k], atol=1e-6)
            for k, x in first.party(n).params.items()
        )
        assert (first.party(n).labels >= 0).all()
    later, alone = toy(tau=5).run(2), toy(method=LOCAL, tau=5).run(2)
    assert not any(equal(later.party(n).params, alone.party(n).params) for n in range(4))


def test_votes_that_fail_leave_the_labels_as_they_are() -> None:
    found = toy(tau=2, faults=Faults(nan=1.0)).run(2)
    assert all((found.party(n).labels == -1).all() for n in range(4))
