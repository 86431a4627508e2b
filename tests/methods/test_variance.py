"""The variance of a batch's gradient, and that asking for it changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.optim import SGD
from fedloom.core.party import Party
from fedloom.methods.features import gradient_variance
from tests.toy import CLASSES, FEATURES, Toy, equal

FEDAL = methods.find("fedal")


class One(Party[None]):
    """A party whose loss is linear in its weights, so that a row's gradient is the row."""

    STATE = ("params", "opt")

    def setup(self) -> None:
        self.network(nn.Linear(FEATURES, 1, bias=False), SGD(0.1))

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).mean()


def test_it_is_that_of_a_mean_over_a_batch() -> None:
    party = One(None, ClientContext(id=0, parties=1, classes=CLASSES))
    noise = torch.Generator().manual_seed(1)
    spread = torch.arange(1.0, 1 + FEATURES)
    found = [
        float(
            gradient_variance(party, party.loss, spread * torch.randn(8, FEATURES, generator=noise))
        )
        for _ in range(800)
    ]
    assert sum(found) / len(found) == pytest.approx(float(spread.square().sum()) / 8, rel=0.05)


@pytest.mark.parametrize("batched", [False, True])
def test_fedal_notes_the_variance_of_each_term_and_trains_as_it_would(batched: bool) -> None:
    plain, asked = (
        Toy(FEDAL, batched=batched, tau=3, batch_size=8, variances=v) for v in (False, True)
    )
    assert equal(plain.run(2).tensors(), asked.run(2).tensors())
    assert asked.server is not None
    server, clients = asked.server.take_notes(), asked.engine.notes()
    names = {f"gradient variance {term}" for term in ("label", "lf local", "kd", "adv", "lf")}
    for notes in clients.values():
        found = {
            name: value for name, value in notes.items() if name.startswith("gradient variance ")
        }
        assert found.keys() == names
        assert all(isinstance(value, float) and value > 0 for value in found.values())
    assert isinstance(value := server["gradient variance discriminator"], float) and value > 0
    assert not any("variance" in name for notes in plain.engine.notes().values() for name in notes)
