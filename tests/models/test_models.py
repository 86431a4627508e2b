from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.errors import ModelError
from fedloom.models import MODELS, Norm, build, check_name
from fedloom.models.parts import norm_groups
from fedloom.models.resnet import BasicBlock, PreActivationBlock

IMAGES = [name for name, spec in MODELS.items() if spec.inputs == ("image",)]
TABLES = [name for name, spec in MODELS.items() if "table" in spec.inputs]
DEEPER = ("resnet34", "resnet20", "resnet32x4")  # others, with more blocks
SMALL = [name for name in MODELS if name not in DEEPER]
NORMS: tuple[Norm, ...] = get_args(Norm)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the numbers of parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "classes", "norm", "expected"),
    [
        ("linear", (784,), 10, None, 7_850),
        ("mlp", (1, 28, 28), 10, None, 784 * 64 + 64 + 650),
        ("mlp", (30,), 2, "batch", 30 * 64 + 64 + 128 + 130),
        ("mlp-large", (1, 28, 28), 10, None, 199_210),  # the 2NN of McMahan et al.
        ("mlp-deep", (8,), 3, None, 8 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 3 + 3),
        ("lenet5", (1, 28, 28), 10, None, 61_706),
        ("lenet5", (1, 32, 32), 10, None, 61_706),
        ("lenet5", (3, 32, 32), 10, None, 62_006),
        ("lenet5", (1, 28, 28), 10, "batch", 61_706 - 22 + 44),
        ("lenet5", (1, 8, 8), 10, None, 156 + 2_416 + (64 * 120 + 120) + 10_164 + 850),
        ("lenet5", (1, 15, 15), 10, None, 156 + 2_416 + (144 * 120 + 120) + 10_164 + 850),
        ("lenet5", (1, 16, 16), 10, None, 156 + 2_416 + (64 * 120 + 120) + 10_164 + 850),
        ("cnn-small", (1, 8, 8), 10, None, 80 + 1_168 + 650),
        ("cnn-small", (3, 32, 32), 10, None, 224 + 1_168 + 10_250),
        ("cnn", (1, 28, 28), 10, None, 320 + 18_496 + (3_136 * 128 + 128) + 1_290),
        ("celeba-cnn", (3, 84, 84), 2, "none", 896 + 3 * 9_248 + 2_306),  # LEAF's, less its norms
        ("celeba-cnn", (3, 84, 84), 2, "batch", 864 + 3 * 9_216 + 4 * 64 + 2_306),
        ("resnet18", (3, 32, 32), 10, "batch", 11_173_962),
        ("resnet34", (3, 32, 32), 10, "batch", 21_282_122),
        ("resnet8", (1, 28, 28), 10, "batch", 77_754),
        ("resnet20", (1, 28, 28), 10, "batch", 272_186),
        ("resnet8x4", (1, 28, 28), 10, "batch", 1_209_834),
        ("resnet8x4", (3, 32, 32), 10, "group", 1_210_410),
        ("resnet32x4", (3, 32, 32), 10, "batch", 7_410_730),
    ],
)
def test_parameters(name: str, shape: Any, classes: int, norm: Any, expected: int) -> None:
    with torch.device("meta"):
        assert count(build(name, shape, classes, norm)) == expected


def by_hand(depth: int, widen: int, channels: int, classes: int) -> int:
    """WRN-d-k from the paper's table 1: convolutions without bias, two numbers a
    channel for norms.
    """
    total, inputs = channels * 16 * 9, 16
    for width in (16 * widen, 32 * widen, 64 * widen):
        for _ in range((depth - 4) // 6):
            total += 2 * inputs + inputs * width * 9 + 2 * width + width * width * 9
            total += inputs * width if inputs != width else 0
            inputs = width
    return total + 2 * inputs + inputs * classes + classes


@pytest.mark.parametrize(
    ("name", "depth", "widen", "known"),
    [("wrn-10-1", 10, 1, 77_850), ("wrn-10-2", 10, 2, None), ("wrn-16-1", 16, 1, 175_066)],
)
def test_parameters_of_wide_resnets(name: str, depth: int, widen: int, known: int | None) -> None:
    expected = by_hand(depth, widen, channels=3, classes=10)
    assert known in (expected, None)
    for norm in ("group", "batch"):
        assert count(build(name, (3, 32, 32), 10, norm)) == expected


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("wrn-10-1", [16, 16, 8, 4]),
        ("wrn-16-1", [16, 16, 16, 8, 8, 4, 4]),
        ("resnet18", [16, 16, 16, 8, 8, 4, 4, 2, 2]),
        ("resnet8", [16, 16, 8, 4]),
        ("resnet20", [16, *[16] * 3, *[8] * 3, *[4] * 3]),
    ],
)
def test_stages_halve_the_image(name: str, sides: list[int]) -> None:
    body: Any = build(name, (1, 16, 16), 2).body
    x, found = noise(1, 1, 16, 16), []
    for layer in body[:-2]:
        x = layer(x)
        if not isinstance(layer, nn.GroupNorm | nn.ReLU):
            found.append(x.shape[-1])
    assert found == sides


def test_pre_activation_block_by_hand() -> None:
    """With its second convolution at zero, a block is its shortcut."""
    same, change = PreActivationBlock(2, 2, 1, "none"), PreActivationBlock(2, 3, 2, "none")
    x = noise(4, 2, 6, 6)
    for block in (same, change):
        nn.init.zeros_(block.conv2.weight), nn.init.zeros_(block.conv2.bias)
    assert torch.equal(same(x), x)
    assert torch.equal(change(x), change.shortcut(x.relu()))


def test_basic_block_by_hand() -> None:
    same, change = BasicBlock(2, 2, 1, "none"), BasicBlock(2, 3, 2, "none")
    x = noise(4, 2, 6, 6)
    for block in (same, change):
        nn.init.zeros_(block.conv2.weight), nn.init.zeros_(block.conv2.bias)
    assert torch.equal(same(x), x.relu())
    assert torch.equal(change(x), change.shortcut(x).relu())


# --- what every network does --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm"), [*((n, norm) for n in SMALL for norm in NORMS), *((n, None) for n in DEEPER)]
)
def test_shapes_parts_and_gradients(name: str, norm: Norm | None) -> None:
    model: Any = build(name, (3, 8, 8), 5, norm, seed=0)
    x = noise(4, 3, 8, 8)
    out = model(x)
    assert out.shape == (4, 5)
    assert model.features(x).shape == (4, model.head.in_features)
    model.eval()
    assert torch.equal(model(x), model.head(model.features(x)))
    model.train()
    model(x).square().sum().backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), parameter_name
        assert p.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("name", SMALL)
def test_a_batch_of_one_trains_as_a_row_of_many(name: str, norm: Norm) -> None:
    model = build(name, (1, 8, 8), 3, norm, seed=0)
    x = noise(3, 1, 8, 8)
    assert torch.allclose(model(x)[1:2], model(x[1:2]), atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_independent_in_evaluation(name: str) -> None:
    model = build(name, (1, 8, 8), 3, "batch", seed=0)
    model(noise(16, 1, 8, 8))  # moves the running statistics
    model.eval()
    x = noise(4, 1, 8, 8)
    before = model(x)
    x[1:] += 100
    assert torch.allclose(model(x)[0], before[0], atol=1e-5)
    assert not torch.allclose(model(x)[1], before[1], atol=1e-2)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 14, 28), (1, 4, 4), (3, 9, 17)])
@pytest.mark.parametrize("name", IMAGES)
def test_image_sizes_fit_or_are_refused(name: str, shape: tuple[int, ...]) -> None:
    if min(shape[1:]) < MODELS[name].smallest:
        with pytest.raises(ModelError, match="of at least 8x8 pixels"):
            build(name, shape, 10)
    elif "resnet" not in name:  # slow; they have no size of their own
        assert build(name, shape, 10)(noise(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("name", [name for name in IMAGES if name in SMALL])
def test_the_smallest_image_fits_with_any_norm(name: str) -> None:
    side = MODELS[name].smallest
    for norm in NORMS:
        model = build(name, (1, side, side), 2, norm, seed=0)
        x = noise(8, 1, side, side)
        assert model(x).std(0).min() > 1e-6, "the logits must depend on the image"


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_images_are_flattened_alike(name: str) -> None:
    flat, image = build(name, (48,), 3, seed=1), build(name, (3, 4, 4), 3, seed=1)
    x = noise(5, 3, 4, 4)
    assert torch.equal(flat(x.flatten(1)), image(x))


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn-small", "wrn-10-1", "resnet8"])
def test_it_can_learn(name: str) -> None:
    model = build(name, (1, 8, 8), 4, seed=0)
    x, y = noise(32, 1, 8, 8), torch.arange(32) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3  # chance: 1.39


def test_cifar_resnets_take_any_size_and_have_wide_features() -> None:
    model: Any = build("resnet8x4", (1, 28, 28), 10)
    assert model.features(noise(2, 1, 28, 28)).shape == (2, 256)


def test_without_a_norm_the_blocks_of_a_stage_share_one_block_s_strength() -> None:
    """Else 32 layers add up to ten times the usual logits, and stay at chance."""
    for name, each in (("resnet8x4", 1), ("resnet20", 3), ("resnet32x4", 5)):
        blocks = [
            m
            for m in build(name, (1, 8, 8), 10, "none", seed=0).modules()
            if isinstance(m, BasicBlock)
        ]
        assert len(blocks) == 3 * each
        for block in blocks:
            usual = (2 / (9 * block.conv2.out_channels)) ** 0.5  # fan_out
            assert block.conv2.weight.std().item() == pytest.approx(usual / each, rel=0.1)
    deep = build("resnet32x4", (3, 8, 8), 10, "none", seed=0)
    assert 0.01 < deep(noise(16, 3, 8, 8)).std().item() < 2


# --- normalization and seeds --------------------------------------------------------------------


@pytest.fixture
def without_memory() -> Iterator[None]:
    with torch.device("meta"):
        yield


def kinds(model: nn.Module) -> set[type]:
    known = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)
    return {type(m) for m in model.modules() if isinstance(m, known)}


@pytest.mark.usefixtures("without_memory")
def test_norms_are_what_they_say() -> None:
    shape = (3, 8, 8)
    for name in SMALL:
        batch = nn.BatchNorm1d if name in TABLES else nn.BatchNorm2d
        expected: dict[Norm, Any] = {"group": nn.GroupNorm, "batch": batch, "none": None}
        if name == "linear":
            expected = dict.fromkeys(NORMS)
        for norm in NORMS:
            assert kinds(build(name, shape, 2, norm)) == {expected[norm]} - {None}, (name, norm)
        default = expected[MODELS[name].norm]
        assert kinds(build(name, shape, 2)) == {default} - {None}, name


@pytest.mark.usefixtures("without_memory")
def test_convolutions_have_a_bias_only_without_norm() -> None:
    for name in IMAGES:
        for norm in NORMS:
            convolutions = [
                m for m in build(name, (3, 8, 8), 2, norm).modules() if isinstance(m, nn.Conv2d)
            ]
            assert convolutions
            assert all((c.bias is not None) == (norm == "none") for c in convolutions)


def test_groups() -> None:
    found = {n: norm_groups(n) for n in (1, 2, 6, 7, 8, 16, 64, 84, 120, 200)}
    assert found == {1: 1, 2: 1, 6: 3, 7: 1, 8: 4, 16: 8, 64: 8, 84: 7, 120: 8, 200: 8}


@pytest.mark.parametrize("name", ["mlp", "lenet5", "wrn-10-1"])
def test_seeds_decide_the_weights_and_touch_nothing_else(name: str) -> None:
    def weights(seed: int | None) -> Tensor:
        model = build(name, (1, 8, 8), 3, seed=seed)
        return nn.utils.parameters_to_vector(model.parameters())

    before = torch.get_rng_state()
    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(weights(None), weights(None))
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_generator_is_put_back_after_a_failure() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ModelError):
        build("lenet5", (3,), 2, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [check_name, lambda name: build(name, (4,), 2)])
def test_an_unknown_name_is_answered_with_a_known_one(function: Any) -> None:
    with pytest.raises(ModelError, match=r"no model 'lenet-5'\. Did you mean 'lenet5'\?"):
        function("lenet-5")


def test_known_names_pass() -> None:
    for name in MODELS:
        check_name(name)


def test_a_misfit_names_what_fits() -> None:
    with pytest.raises(ModelError) as caught:
        build("lenet5", (30,), 2)
    assert str(caught.value) == (
        "lenet5 takes images (channels, height, width) of at least 4x4 pixels, not rows of shape "
        "(30,). These fit: linear, mlp, mlp-large, mlp-deep, mlp-5."
    )
    with pytest.raises(
        ModelError, match=r"8x8 pixels.*fit: .*lenet5, cnn-small, cnn, cnn-strided, wrn-10-1"
    ):
        build("resnet18", (3, 7, 8), 2)
    with pytest.raises(ModelError, match=r"\(28, 28, 1\)"):
        build("cnn", (28, 28, 1), 10)


@pytest.mark.parametrize(
    ("shape", "classes"), [((), 2), ((0,), 2), ((4,), 0), ((4.0,), 2), ((True,), 2), ((4,), "2")]
)
def test_lengths_are_natural_numbers(shape: Any, classes: Any) -> None:
    with pytest.raises(ModelError, match="must be positive integers"):
        build("mlp", shape, classes)


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(ModelError, match="group, batch, none, not 'layer'"):
        build("mlp", (4,), 2, norm="layer")  # type: ignore[arg-type]


# --- networks of the user -----------------------------------------------------------------------

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.fc = nn.Linear(input_shape[0], classes)
        self.norm = nn.BatchNorm1d(classes)

    def forward(self, x):
        return self.norm(self.fc(x))

def factory(input_shape, classes):
    return nn.Linear(*input_shape, classes)

def crooked(input_shape, classes):
    return nn.Linear(*input_shape, classes + 1)

def tuples(input_shape, classes):
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()

def wrong_input(input_shape, classes):
    return nn.Linear(99, classes)

def not_a_module(input_shape, classes):
    return "net"

def no_arguments():
    return nn.Linear(1, 1)

NUMBER = 3
"""


@pytest.fixture
def mynets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets.py").write_text(SOURCE)
    (tmp_path / "brokennets.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mynets", "brokennets"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("mynets")
@pytest.mark.parametrize("name", ["mynets:factory", "mynets:Net"])
def test_own_networks(name: str) -> None:
    check_name(name)
    before = torch.get_rng_state()
    a, b = (build(name, (6,), 3, norm="group", seed=2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert a.training and a(noise(4, 6)).shape == (4, 3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    if name == "mynets:Net":
        assert build(name, (6,), 3).norm.num_batches_tracked == 0  # the trial leaves no trace


@pytest.mark.usefixtures("mynets")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        (":factory", "must have the form package.module:name"),
        ("mynets:", "must have the form package.module:name"),
        ("no_such_package.x:factory", "cannot import no_such_package.*PYTHONPATH"),
        ("brokennets:factory", "nothing_of_that_name"),
        (
            "hf:google/vit",
            "a pretrained model of another library, which only pretrained.model takes",
        ),
        ("mynets:missing", "missing must be a function or class, but is missing"),
        ("mynets:NUMBER", "but is of type int"),
        ("mynets:not_a_module", "must return a torch.nn.Module, not a str"),
        ("mynets:no_arguments", r"failed when called with \(\(6,\), 3\) \(TypeError"),
        ("mynets:wrong_input", r"fails on a batch of shape \(2, 6\)"),
        ("mynets:crooked", r"logits of shape \(2, 3\) for 2 rows, not \(2, 4\)"),
        ("mynets:tuples", "not a tuple"),
    ],
)
def test_own_networks_that_do_not_work(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        build(name, (6,), 3)
