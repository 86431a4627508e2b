"""FedLP: FedAvg from the server's pretrained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core.errors import MethodError, ModelError
from tests.methods.test_fedavg import BODY, MODEL, by_hand, close
from tests.toy import Toy, common, equal

FEDLP, FEDAVG = (methods.find(n) for n in ("fedlp", "fedavg"))


def pretrained(norm: bool = False, width: int = 8) -> nn.Module:
    """The common network with weights of its own."""
    module = common(norm=norm, width=width)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.7).add_(0.1)
    return module


def weights() -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in pretrained().named_parameters()}


def toy(**settings: Any) -> Toy:
    return Toy(FEDLP, server_side={"pretrained": pretrained}, batch_size=8, **settings)


def test_round_0_hands_out_the_pretrained_weights() -> None:
    t = toy()
    assert t.server is not None and close(t.server.weights, weights(), 0.0)
    handed = t.server.broadcast()
    assert close(handed, weights(), 0.0)  # and so everybody is evaluated with them
    assert not close(dict(t.party(0).params), weights(), 0.01)


def test_two_rounds_are_fedavg_s_from_there() -> None:
    t = toy(epochs=2, lr=0.05).run(2)
    assert t.server is not None
    assert close(t.server.weights, by_hand(weights(), t.client_contexts, range(2), 2, 0.05, 0.9))
    assert t.fed.ledger.sent("server") == 2 * 4 * MODEL  # the pretrained model has left the server


def test_with_a_personal_head_only_the_pretrained_body_is_handed_out() -> None:
    t = toy(personal_head=True, epochs=1)
    assert t.server is not None
    assert close(
        t.server.weights, {k: v for k, v in weights().items() if k.startswith("body.")}, 0.0
    )
    assert t.run(1).fed.ledger.sent("server") == 4 * BODY


def test_from_the_clients_own_network_it_is_fedavg() -> None:
    server_side = {"pretrained": common}
    assert equal(
        Toy(FEDLP, server_side=server_side, batch_size=8).run(2).tensors(),
        Toy(FEDAVG, batch_size=8).run(2).tensors(),
    )


@pytest.mark.parametrize("other", [lambda: pretrained(width=9), lambda: pretrained(norm=True)])
def test_another_architecture_is_refused(other: Any) -> None:
    with pytest.raises(
        ModelError, match=r"'body.*' differs: set pretrained\.model to the network in models\.pool"
    ):
        Toy(FEDLP, server_side={"pretrained": other})


def test_without_a_pretrained_model_it_says_what_to_do() -> None:
    with pytest.raises(MethodError, match=r"\[pretrained\]"):
        Toy(FEDLP)


def test_fedavg_never_reads_it() -> None:
    def read() -> nn.Module:
        raise AssertionError("read")

    Toy(FEDAVG, server_side={"pretrained": read}, batch_size=8).run(1)
