"""The flat network against torch's own modules and optimisers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedloom.errors import ModelError, StateError
from fedloom.network import Network
from fedloom.optim import SGD, Adam

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(7)] if norm else []
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.ReLU(), nn.Linear(7, 3))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (SGD(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
        (Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (Adam(0.01, (0.8, 0.95), 1e-6), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6)),
    ],
    ids=["sgd", "momentum", "adam", "adam-other"],
)
def test_steps_are_those_of_torch(ours: Any, theirs: Any, norm: bool) -> None:
    flat, module = Network(net(norm), ours), net(norm)
    optimiser = theirs(module.parameters())
    for i in range(12):
        rows = slice(i, i + 8)
        flat.minimise(lambda r: F.cross_entropy(flat(X[r]), Y[r]), rows)
        optimiser.zero_grad()
        F.cross_entropy(module(X[rows]), Y[rows]).backward()
        optimiser.step()
    for name, value in module.state_dict().items():
        assert torch.allclose(flat.module.state_dict()[name], value, atol=1e-6), name
    assert torch.allclose(flat.infer(X), module.eval()(X), atol=1e-6)


def test_parameters_are_views_of_one_vector() -> None:
    flat = Network(net(), SGD(0.1))
    assert flat.flat.numel() == 5 * 7 + 7 + 7 * 3 + 3
    flat.flat.zero_()
    assert all((p == 0).all() for p in flat.module.parameters())


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_descend_gives_the_same_with_and_without_its_remembered_pass(norm: bool) -> None:
    kept, forgotten = Network(net(norm), Adam(0.01)), Network(net(norm), Adam(0.01))
    for i in range(5):
        x = X[i : i + 8]
        for network in (kept, forgotten):
            z = network.forward(x)
            if network is forgotten:
                network.forget()
            network.descend(x, z - F.one_hot(Y[i : i + 8], 3))
    for (name, a), b in zip(kept.module.state_dict().items(), forgotten.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_pass_is_not_reused_after_the_weights_moved() -> None:
    network = Network(net(), SGD(0.1))
    network.forward(X)
    network.minimise(lambda: F.cross_entropy(network(X), Y))
    twin = Network(copy.deepcopy(network.module), SGD(0.1))
    gradient = torch.ones(24, 3) * torch.tensor([1.0, -2.0, 1.0])
    network.descend(X, gradient)
    twin.descend(X, gradient)
    assert torch.equal(network.flat, twin.flat)


def test_rollback_restores_everything() -> None:
    network = Network(net(norm=True), Adam(0.01))
    before = {part: {k: v.clone() for k, v in tree.items()} for part, tree in network.state().items()}
    network.begin()
    network.minimise(lambda: F.cross_entropy(network(X), Y))
    assert not torch.equal(network.state()["params"]["0.weight"], before["params"]["0.weight"])
    network.rollback()
    for part, tree in network.state().items():
        for name, value in tree.items():
            assert torch.equal(value, before[part][name]), (part, name)


def test_inference_keeps_rows_apart_and_moves_nothing() -> None:
    network = Network(net(norm=True), SGD(0.1))
    whole = network.infer(X.repeat(30, 1))  # more than one chunk
    assert whole.shape == (720, 3)
    assert torch.allclose(whole[:24], network.infer(X), atol=1e-6)
    assert int(network.state()["buffers"]["1.num_batches_tracked"]) == 0


def test_frozen_parameters_stay_out() -> None:
    module = net()
    module[0].requires_grad_(False)
    network = Network(module, Adam(0.1))
    before = module[0].weight.clone()
    network.minimise(lambda: F.cross_entropy(network(X), Y))
    assert torch.equal(module[0].weight, before)
    assert set(network.state()["params"]) == {"2.weight", "2.bias"}


def test_what_does_not_fit_is_refused_by_name() -> None:
    network = Network(net(), SGD(0.1))
    with pytest.raises(StateError, match=r"0\.bias"):
        network.load("params", {k: v for k, v in network.state()["params"].items() if k != "0.bias"})
    wrong = dict(network.state()["params"])
    wrong["2.bias"] = torch.zeros(4)
    with pytest.raises(StateError, match=r"'2\.bias'.*\(3,\).*\(4,\)"):
        network.load("params", wrong)
    with pytest.raises(ModelError, match="nothing to learn"):
        Network(nn.ReLU(), SGD(0.1))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ModelError, match="one dtype"):
        Network(mixed, SGD(0.1))
