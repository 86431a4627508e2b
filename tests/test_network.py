"""The flat network against torch's own modules and optimizers."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import models
from fedloom.core.context import Batches
from fedloom.core.errors import ModelError, StateError
from fedloom.core.network import Network
from fedloom.core.optim import SGD, Adam

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
        (
            SGD(0.1, 0.9, 0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
        (Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (
            Adam(0.01, (0.8, 0.95), 1e-6),
            lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
        ),
        (Adam(0.01, weight_decay=0.5), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5)),
    ],
    ids=["sgd", "momentum", "adam", "adam-other", "adamw"],
)
def test_steps_are_those_of_torch(ours: Any, theirs: Any, norm: bool) -> None:
    flat, module = Network(net(norm), ours), net(norm)
    optimizer = theirs(module.parameters())
    for i in range(12):
        rows = slice(i, i + 8)
        flat.minimize(lambda r: F.cross_entropy(flat(X[r]), Y[r]), rows)
        optimizer.zero_grad()
        F.cross_entropy(module(X[rows]), Y[rows]).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.allclose(flat.module.state_dict()[name], value, atol=1e-6), name
    assert torch.allclose(flat.infer(X), module.eval()(X), atol=1e-6)


def test_networks_of_one_size_can_be_trained_in_two_threads() -> None:
    meet = threading.Barrier(2, timeout=60)

    class Meeting(Adam):
        """Moves only when both threads have their gradient."""

        def move(self, *args: Any, **kwargs: Any) -> None:
            meet.wait()
            super().move(*args, **kwargs)

    def train(network: Network, rows: slice) -> Tensor:
        for _ in range(3):
            network.minimize(lambda: F.cross_entropy(network(X[rows]), Y[rows]))
        return network.flat

    halves = slice(0, 12), slice(12, 24)
    with ThreadPoolExecutor(2) as threads:
        together = [*threads.map(train, [Network(net(), Meeting(0.01)) for _ in halves], halves)]
    for both, half in zip(together, halves, strict=True):
        assert torch.equal(both, train(Network(net(), Adam(0.01)), half))


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
    for (name, a), b in zip(
        kept.module.state_dict().items(), forgotten.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_pass_is_not_reused_after_the_weights_moved() -> None:
    network = Network(net(), SGD(0.1))
    network.forward(X)
    network.minimize(lambda: F.cross_entropy(network(X), Y))
    twin = Network(copy.deepcopy(network.module), SGD(0.1))
    gradient = torch.ones(24, 3) * torch.tensor([1.0, -2.0, 1.0])
    network.descend(X, gradient)
    twin.descend(X, gradient)
    assert torch.equal(network.flat, twin.flat)


def test_descend_gives_the_same_bits_with_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of outputs and gradient is the fallback for a torch without the engine's
    function.
    """
    found = []
    for missing in (False, True):
        if missing:
            monkeypatch.setattr("fedloom.core.network._engine_run_backward", None)
        ours = Network(net(), Adam(0.01))
        for _ in range(3):
            ours.descend(X, (ours.forward(X) - 1).double() / 7)
        found.append(ours.flat.clone())
    assert torch.equal(*found)


def test_a_module_keeps_its_own_way_to_switch_to_evaluation() -> None:
    """A part that overrides `train`, such as a frozen one, is asked; else all parts
    are switched.
    """

    class Frozen(nn.Linear):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    for part, training in ((nn.Linear(5, 7), True), (Frozen(5, 7), False)):
        ours = Network(nn.Sequential(part, nn.Sequential(nn.ReLU()), nn.Linear(7, 3)), SGD(0.1))
        ours.infer(X)
        assert not any(m.training for m in ours.module.modules())
        ours(X)
        assert [m.training for m in ours.module.modules()] == [True, training, True, True, True]


def test_descend_moves_along_the_gradients_of_torch_s_backward() -> None:
    network, module = Network(net(), SGD(0.1)), net()
    scale = torch.tensor(2.0, requires_grad=True)
    # a constant, as for torch
    gradient = scale * torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    network.descend(X, gradient)
    module(X).backward(gradient)
    assert scale.grad is None
    for ours, theirs in zip(network.parameters.values(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * theirs.grad)


@pytest.mark.parametrize("shape", [(1, 3), (24, 1), (24,), (3, 24)])
def test_descend_refuses_a_gradient_of_another_shape(shape: tuple[int, ...]) -> None:
    network = Network(net(), SGD(0.1))
    before = network.flat.clone()
    with pytest.raises(
        ValueError, match=r"gradient of shape \(.*\) for outputs of shape \(24, 3\)"
    ):
        network.descend(X, torch.ones(shape))
    assert torch.equal(network.flat, before)


def test_rollback_restores_everything() -> None:
    network = Network(net(norm=True), Adam(0.01))
    before = {
        part: {k: v.clone() for k, v in tree.items()} for part, tree in network.state().items()
    }
    network.begin()
    network.minimize(lambda: F.cross_entropy(network(X), Y))
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
    module: Any = net()
    module[0].requires_grad_(False)
    network = Network(module, Adam(0.1))
    before = module[0].weight.clone()
    network.minimize(lambda: F.cross_entropy(network(X), Y))
    assert torch.equal(module[0].weight, before)
    assert set(network.state()["params"]) == {"2.weight", "2.bias"}


def test_what_does_not_fit_is_refused_by_name() -> None:
    network = Network(net(), SGD(0.1))
    with pytest.raises(StateError, match=r"0\.bias"):
        network.load(
            "params", {k: v for k, v in network.state()["params"].items() if k != "0.bias"}
        )
    wrong = dict(network.state()["params"])
    wrong["2.bias"] = torch.zeros(4)
    with pytest.raises(StateError, match=r"'2\.bias'.*\(3,\).*\(4,\)"):
        network.load("params", wrong)
    with pytest.raises(ModelError, match="no trainable parameters"):
        Network(nn.ReLU(), SGD(0.1))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ModelError, match="the same dtype"):
        Network(mixed, SGD(0.1))


# -- a step of some parameters alone ---------------------------------------------------------------

OPTIMIZERS = pytest.mark.parametrize(
    "optimizer", [SGD(0.1), SGD(0.1, 0.9), Adam(0.01)], ids=["sgd", "momentum", "adam"]
)
HEAD = ["2.weight", "2.bias"]


def cross_entropy(network: Network, rows: slice = slice(0, 24)) -> Tensor:
    return F.cross_entropy(network(X[rows]), Y[rows])


def values(network: Network) -> dict[str, Tensor]:
    """A copy of every tensor of the state, with each parameter's part of the optimizer's memory by
    its name.
    """
    state = network.state()
    found = {f"{part}.{k}": v for part in ("params", "buffers") for k, v in state[part].items()}
    found |= {
        f"{slot} of {k}": v for k, slots in network._moving.items() for slot, v in slots.items()
    }
    return {k: v.clone() for k, v in found.items()}


@OPTIMIZERS
def test_a_step_of_some_parameters_moves_nothing_else(optimizer: Any) -> None:
    """Neither the others nor their part of the optimizer's memory; and the named ones move as in a
    whole step.
    """
    some, whole = Network(net(), optimizer), Network(net(), optimizer)
    for network in (some, whole):
        # so that the memory holds something
        network.minimize(lambda n=network: cross_entropy(n, slice(0, 8)))
    before = values(some)
    loss = some.minimize(lambda: cross_entropy(some), only=HEAD)
    assert torch.equal(loss, whole.minimize(lambda: cross_entropy(whole)))
    after, expected = values(some), values(whole)
    of_the_head = {k for k in after if k.endswith(tuple(HEAD))}
    assert of_the_head and of_the_head != set(after)
    for k, v in after.items():
        if k in of_the_head:
            assert not torch.equal(v, before[k])
            assert torch.allclose(v, expected[k], rtol=0, atol=1e-7), k
        else:
            assert torch.equal(v, before[k]), k


@OPTIMIZERS
def test_a_mask_lets_single_entries_move(optimizer: Any) -> None:
    masked, whole = Network(net(), optimizer), Network(net(), optimizer)
    masks = {"0.weight": torch.arange(35).view(7, 5) % 2, "2.bias": torch.tensor([1.0, 0.0, 1.0])}
    before = values(masked)
    masked.minimize(lambda: cross_entropy(masked), only=masks)
    whole.minimize(lambda: cross_entropy(whole))
    once, moved = values(masked), values(whole)
    for _ in range(2):
        masked.minimize(lambda: cross_entropy(masked), only=masks)
    later = values(masked)
    for name, mask in masks.items():
        k, kept = f"params.{name}", mask == 0
        assert kept.any() and not kept.all()
        assert torch.allclose(once[k][~kept], moved[k][~kept], rtol=0, atol=1e-7)
        assert all(torch.equal(v[k][kept], before[k][kept]) for v in (once, later))
        assert not torch.equal(later[k][~kept], once[k][~kept])
    for k in ("params.0.bias", "params.2.weight"):
        assert torch.equal(later[k], before[k])


def test_what_was_frozen_for_a_step_learns_again_after_it() -> None:
    network = Network(net(), SGD(0.1))
    learning = []

    def loss() -> Tensor:
        learning.append([k for k, p in network.parameters.items() if p.requires_grad])
        return cross_entropy(network)

    def fails() -> Tensor:
        loss()
        raise RuntimeError

    network.minimize(loss, only=HEAD)
    before = network.flat.clone()
    with pytest.raises(RuntimeError):
        network.minimize(fails, only=HEAD)
    with pytest.raises(KeyError):
        network.minimize(loss, only=["nonsense"])
    assert torch.equal(network.flat, before)
    assert learning[:2] == [HEAD, HEAD]
    assert all(p.requires_grad and p.grad is None for p in network.parameters.values())
    network.minimize(loss)
    assert learning[-1] == list(network.parameters)


def test_statistics_move_with_a_step_of_some_parameters() -> None:
    """The passes are those of training, whatever learns."""
    some, whole = Network(net(norm=True), SGD(0.1)), Network(net(norm=True), SGD(0.1))
    some.minimize(lambda: cross_entropy(some), only=["3.bias"])
    whole.minimize(lambda: cross_entropy(whole))
    for name, b in some.state()["buffers"].items():
        assert torch.equal(b, whole.state()["buffers"][name])
    assert int(some.state()["buffers"]["1.num_batches_tracked"]) == 1


def test_train_passes_on_which_parameters_move() -> None:
    network = Network(net(), SGD(0.1, 0.9))
    before = values(network)
    loss = network.train(
        lambda x, y: F.cross_entropy(network(x), y),
        Batches(X.view(3, 8, 5), Y.view(3, 8)),
        only=HEAD,
    )
    assert loss.shape == ()
    assert {k for k, v in values(network).items() if torch.equal(v, before[k])} == {
        *("params.0.weight", "params.0.bias"),
        *("velocity of 0.weight", "velocity of 0.bias"),
    }


# -- a gradient without a step ---------------------------------------------------------------------


@pytest.mark.parametrize("of", [None, HEAD, ["0.weight"]], ids=["all", "head", "first"])
def test_a_gradient_is_torch_s_and_makes_no_step(of: list[str] | None) -> None:
    network, module = Network(net().double(), Adam(0.1)), net().double()
    before = values(network)
    value, gradients = network.gradient(
        lambda x, y: F.cross_entropy(network(x), y), X.double(), Y, of=of
    )
    names = of or [k for k, _ in module.named_parameters()]
    loss = F.cross_entropy(module(X.double()), Y)
    expected = torch.autograd.grad(loss, [module.get_parameter(k) for k in names])
    assert list(gradients) == names
    assert torch.allclose(value, loss, rtol=0, atol=1e-15) and not value.requires_grad
    for g, e in zip(gradients.values(), expected, strict=True):
        assert torch.allclose(g, e, rtol=0, atol=1e-15)
    assert all(torch.equal(v, before[k]) for k, v in values(network).items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters.values())


def test_what_the_loss_does_not_touch_has_a_gradient_of_zero() -> None:
    network = Network(net(), SGD(0.1))
    _, gradients = network.gradient(lambda: network.live["2.bias"].square().sum())
    assert torch.equal(gradients["2.bias"], 2 * network.live["2.bias"].detach())
    assert all(not g.any() for k, g in gradients.items() if k != "2.bias")


def test_a_gradient_leaves_no_stale_pass_behind() -> None:
    """BatchNorm's statistics moved: a pass remembered from before them must not be used."""
    network, twin = Network(net(norm=True), SGD(0.1)), Network(net(norm=True), SGD(0.1))
    network.forward(X)
    for n in (network, twin):
        n.gradient(lambda n=n: cross_entropy(n))
        n.descend(X, torch.ones(24, 3))
    assert torch.equal(network.memory, twin.memory)


@pytest.mark.parametrize("only", [None, HEAD], ids=["all", "some"])
def test_a_proximal_term_is_differentiated(only: list[str] | None) -> None:
    """μ/2 ‖w - a‖² in the loss adds μ (w - a) to each gradient, in float64."""
    network, plain = Network(net().double(), SGD(0.5)), Network(net().double(), SGD(0.5))
    anchor = {k: p.detach() - 0.3 for k, p in network.live.items()}

    def proximal(x: Tensor, y: Tensor) -> Tensor:
        far = sum((p - anchor[k]).square().sum() for k, p in network.live.items())
        return F.cross_entropy(network(x), y) + 0.35 * far

    _, gradients = network.gradient(proximal, X.double(), Y, of=only)
    _, without = plain.gradient(lambda x, y: F.cross_entropy(plain(x), y), X.double(), Y, of=only)
    for k, g in gradients.items():
        assert torch.allclose(g - without[k], torch.full_like(g, 0.7 * 0.3), rtol=0, atol=1e-14)
    start = {k: p.detach().clone() for k, p in network.live.items()}
    network.minimize(proximal, X.double(), Y, only=only)
    for k, p in network.live.items():
        expected = start[k] - 0.5 * gradients[k] if k in gradients else start[k]
        assert torch.allclose(p, expected, rtol=0, atol=1e-14)


# -- a scratch copy --------------------------------------------------------------------------------


def wreck(network: Network) -> None:
    """Change all that can be changed."""
    network.minimize(lambda: cross_entropy(network))
    network.minimize(lambda: cross_entropy(network), only=["3.bias"])
    network.descend(X, torch.ones(24, 3))
    for part, tree in network.state().items():
        network.load(part, {k: torch.ones_like(v) for k, v in tree.items()})


@OPTIMIZERS
def test_a_scratch_copy_leaves_no_trace(optimizer: Any) -> None:
    network = Network(net(norm=True), optimizer)
    network.minimize(lambda: cross_entropy(network))
    before, inside = network.memory.clone(), []
    with network.scratch():
        wreck(network)
        inside.append(network.memory.clone())
        with network.scratch():
            wreck(network)
            network.flat.zero_()
        # the inner one brought back what the outer one had made
        assert torch.equal(network.memory, inside[0])
    assert torch.equal(network.memory, before) and not torch.equal(inside[0], before)
    with pytest.raises(RuntimeError), network.scratch(), network.scratch():
        wreck(network)
        raise RuntimeError
    assert torch.equal(network.memory, before)
    twin = Network(net(norm=True), optimizer)
    twin.minimize(lambda: cross_entropy(twin))
    for n in (network, twin):
        n.minimize(lambda n=n: cross_entropy(n, slice(3, 11)))
    assert torch.equal(network.memory, twin.memory)  # it goes on as if nothing had been


def test_a_pass_remembered_on_a_scratch_copy_ends_with_it() -> None:
    network, twin = Network(net(), SGD(0.1)), Network(net(), SGD(0.1))
    with network.scratch():
        network.load(
            "params", {k: torch.zeros_like(v) for k, v in network.state()["params"].items()}
        )
        network.forward(X)
    for n in (network, twin):
        n.descend(X, torch.ones(24, 3) * torch.tensor([1.0, -2.0, 1.0]))
    assert torch.equal(network.flat, twin.flat)


def test_a_call_that_only_scratches_has_changed_nothing() -> None:
    network = Network(net(norm=True), Adam(0.01))
    copies: list[Tensor] = []
    network.begin(lambda memory: copies.append(memory.clone()) or copies[-1])
    with network.scratch():
        wreck(network)
    assert not network.changed and not copies
    network.minimize(lambda: cross_entropy(network))
    assert network.changed and len(copies) == 1
    after = network.memory.clone()
    with network.scratch():
        wreck(network)
    assert torch.equal(network.memory, after)
    network.rollback()
    network.end()
    assert torch.equal(network.memory, copies[0])


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (6,)), ("cnn-small", (3, 8, 8)), ("celeba-cnn", (3, 16, 16))]
)
def test_gradients_of_single_rows_are_those_of_batches_of_one(
    name: str, shape: tuple[int, ...], norm: str
) -> None:
    net = Network(models.build(name, shape, 4, norm=norm, seed=0), SGD(0.1))  # type: ignore[arg-type]
    x, y = torch.randn(5, *shape), torch.tensor([0, 1, 2, 3, 0])
    before = net.memory.clone()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    names = list(net.parameters)[-4:]
    rows = net.row_gradients(loss, x, y, names)
    for n in range(5):
        _, one = net.gradient(loss, x[n : n + 1], y[n : n + 1], of=names)
        for k in names:
            assert not rows[k].requires_grad and rows[k].shape == (5, *net.parameters[k].shape)
            assert torch.allclose(rows[k][n], one[k], atol=1e-5)
    assert torch.equal(net.memory, before)


MODELS = [
    ("mlp-deep", (6,), "none"),
    ("cnn-small", (3, 8, 8), "group"),
    ("resnet8", (3, 8, 8), "group"),
]


@pytest.mark.parametrize(("name", "shape", "norm"), [*MODELS, ("mlp-deep", (6,), "batch")])
def test_gradients_and_curvature_at_other_weights_are_torch_s(
    name: str, shape: tuple[int, ...], norm: str
) -> None:
    network = Network(models.build(name, shape, 4, norm=norm, seed=0), SGD(0.1))  # type: ignore[arg-type]
    other = models.build(name, shape, 4, norm=norm, seed=1)  # type: ignore[arg-type]
    x, y = torch.randn(7, *shape), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    weights = {k: p.detach() for k, p in other.named_parameters()}
    v = {k: torch.randn_like(w) for k, w in weights.items()}
    before = network.flat.clone()
    heard: list[dict[str, Tensor]] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        heard.append(dict(network.live))
        return F.cross_entropy(network(x), y)

    value, gradient, product = network.curvature_at(weights, loss, x, y)
    want = F.cross_entropy(other(x), y)
    slopes = torch.autograd.grad(want, list(other.parameters()), create_graph=True)
    bent = torch.autograd.grad(slopes, list(other.parameters()), list(v.values()))
    found = product(v)
    again = network.gradient_at(weights, loss, x, y)
    assert torch.allclose(value, want, atol=1e-6) and torch.allclose(again[0], want, atol=1e-6)
    for (k, w), g, h in zip(weights.items(), slopes, bent, strict=True):
        assert torch.equal(heard[0][k], w)  # `live` is at those weights too
        assert torch.allclose(gradient[k], g, atol=1e-5) and torch.allclose(
            again[1][k], g, atol=1e-5
        )
        assert torch.allclose(found[k], h, atol=1e-4, rtol=1e-3)
        assert not gradient[k].requires_grad and not found[k].requires_grad and not w.requires_grad
    assert torch.equal(network.flat, before)
    assert all(network.live[k] is network.parameters[k] for k in weights)


def test_a_loss_that_is_linear_has_no_curvature_and_one_that_fails_leaves_the_own_weights() -> None:
    network = Network(nn.Linear(5, 3), SGD(0.1))
    weights = {k: torch.randn_like(p) for k, p in network.parameters.items()}
    _, gradient, product = network.curvature_at(weights, lambda: network.live["weight"].sum())
    assert torch.equal(gradient["weight"], torch.ones(3, 5)) and not gradient["bias"].any()
    assert not any(
        g.any() for g in product({k: torch.ones_like(w) for k, w in weights.items()}).values()
    )

    def fail() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        network.gradient_at(weights, fail)
    assert (
        network.module.weight is network.parameters["weight"]
        and network.live["weight"] is network.module.weight
    )


def test_statistics_move_with_a_gradient_at_other_weights_and_a_call_that_fails_takes_it_back() -> (
    None
):
    network = Network(net(norm=True), SGD(0.1))
    before = network.memory.clone()
    network.begin()
    network.gradient_at(dict(network.parameters), lambda: F.cross_entropy(network(X), Y))
    assert not torch.equal(network.memory, before)
    network.rollback()
    network.end()
    assert torch.equal(network.memory, before)
