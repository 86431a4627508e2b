"""The example pages against their algorithms, written by hand in plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import methods
from tests.toy import Toy, common

EXAMPLES = Path(__file__).parents[2] / "examples"
FEDPROX, SCAFFOLD = (methods.load(EXAMPLES / f"{name}.py") for name in ("fedprox", "scaffold"))
Weights = dict[str, Tensor]


def initial() -> Weights:
    return {k: p.detach().clone() for k, p in common().named_parameters()}


def gradient(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """The gradient of the cross-entropy on a batch."""
    module = common()
    module.load_state_dict(weights)
    names, params = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(module(x), y), params), strict=True))


def close(a: Weights, b: Weights, atol: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=atol) for k in a)


def fedprox_by_hand(toy: Toy, mu: float, lr: float, rounds: int) -> Weights:
    """Algorithm 2 with inexact local solutions by SGD: w - lr * (gradient + mu * (w - w_t))."""
    start = initial()
    for t in range(rounds):
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for context in toy.client_contexts:
            w = start
            for x, y in context.epochs(t, epochs=1, size=8):
                g = gradient(w, x, y)
                w = {k: v - lr * (g[k] + mu * (v - start[k])) for k, v in w.items()}
            total = {k: total[k] + len(context.rows) * w[k] for k in w}
        start = {k: v / sum(len(p.rows) for p in toy.client_contexts) for k, v in total.items()}
    return start


def scaffold_by_hand(toy: Toy, steps: int, lr: float, rounds: int) -> tuple[Weights, Weights]:
    """Algorithm 1, option II, with all clients: the server's weights and its control variate."""
    x0 = initial()
    zero = {k: torch.zeros_like(v) for k, v in x0.items()}
    c, own = zero, [zero] * len(toy.client_contexts)
    for t in range(rounds):
        ends: list[dict[str, Any]] = []
        controls = []
        for context, c_i in zip(toy.client_contexts, own, strict=True):
            w = x0
            for x, y in context.batches(t, steps=steps, size=8):
                g = gradient(w, x, y)
                w = {k: v - lr * (g[k] - c_i[k] + c[k]) for k, v in w.items()}
            ends.append(w)
            controls.append({k: c_i[k] - c[k] + (x0[k] - w[k]) / (steps * lr) for k in w})
        n = len(ends)
        c = {
            k: c[k] + sum(new[k] - old[k] for new, old in zip(controls, own, strict=True)) / n
            for k in c
        }
        x0 = {k: sum(e[k] for e in ends) / n for k in x0}
        own = controls
    return x0, c


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_fedprox_is_that_written_by_hand(mu: float, batched: bool) -> None:
    toy = Toy(FEDPROX, batched=batched, mu=mu, batch_size=8, lr=0.05).run(3)
    assert toy.server is not None
    assert close(toy.server.weights, fedprox_by_hand(toy, mu, 0.05, 3))
    assert not close(toy.server.weights, fedprox_by_hand(toy, 1.0 - mu, 0.05, 3), 1e-4)


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_scaffold_is_that_written_by_hand(batched: bool) -> None:
    toy = Toy(SCAFFOLD, batched=batched, steps=4, batch_size=8, lr=0.05).run(3)
    assert toy.server is not None
    weights, control = scaffold_by_hand(toy, 4, 0.05, 3)
    assert close(toy.server.weights, weights) and close(toy.server.control, control, 1e-5)
    assert max(float(c.abs().max()) for c in control.values()) > 1e-2  # the correction is not idle


@pytest.fixture(params=["flower_client", "pfllib_client"])
def page(request: pytest.FixtureRequest) -> Path:
    """An example that adapts another framework's client; PFLlib's is a stand-in of its shape, as it
    is no package.
    """
    if request.param == "flower_client":
        pytest.importorskip("flwr")
    return EXAMPLES / f"{request.param}.py"


@pytest.mark.filterwarnings("ignore:Protobuf gencode")
def test_a_client_of_another_framework_is_federated_averaging_by_hand(page: Path) -> None:
    toy = Toy(methods.load(page), batch_size=8, lr=0.05).run(2)
    assert toy.server is not None
    assert close(toy.server.weights, fedprox_by_hand(toy, 0.0, 0.05, 2))


@pytest.mark.filterwarnings("ignore:Protobuf gencode")
def test_a_client_of_another_framework_gives_the_same_bits_on_both_engines(page: Path) -> None:
    import fedloom

    small: dict[str, Any] = {"clients": 3, "models": "mlp", "rounds": 2, "params": {"epochs": 2}}
    results = [
        fedloom.run(str(page), engine=name, evaluate={"points": 1}, **small)
        for name in ("local", "isolated")
    ]
    assert results[0].summary["state_sha256"] == results[1].summary["state_sha256"]
    assert results[0].accuracy > 0.2 and results[0].summary["warnings"] == []
