"""The networks of the papers, as plain `nn.Module`s: `(B, ...)` → logits `(B, K)`.

`build` makes one by its name, or a user's by its import path. `fedloom.models.parts` states the
conventions of the networks; `fedloom.models.black_boxes` has models that are no networks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torch import nn

from fedloom.core.errors import ModelError, did_you_mean
from fedloom.models import custom, external
from fedloom.models.black_boxes import BLACK_BOXES, check_installed, is_black_box
from fedloom.models.parts import Classifier, Norm, seeded
from fedloom.models.resnet import cifar_resnet, resnet, wide_resnet
from fedloom.models.small import celeba_cnn, cnn, lenet5, mlp, strided

__all__ = [
    "BLACK_BOXES",
    "MODELS",
    "Classifier",
    "ModelSpec",
    "Norm",
    "build",
    "check_name",
    "is_black_box",
]

Kind = Literal["table", "image"]


@dataclass(frozen=True)
class ModelSpec:
    """One network of the registry.

    Attributes:
        title: a description in one line.
        builder: `(input_shape, classes, norm)` → the network.
        source: the paper that uses it, or "none".
        inputs: "table" `(d,)`, "image" `(C, H, W)`.
        norm: the default normalization of each convolution, or of each hidden layer of a network
            without convolutions.
        smallest: the smallest height and width of an image.
    """

    title: str
    builder: Callable[[tuple[int, ...], int, Norm], Classifier]
    source: str
    inputs: tuple[Kind, ...] = ("image",)
    norm: Norm = "none"
    smallest: int = 1

    def fits(self, input_shape: tuple[int, ...]) -> bool:
        """Whether the network takes rows of this shape."""
        if "table" in self.inputs:
            return True
        return len(input_shape) == 3 and min(input_shape[1:]) >= self.smallest


_AFIND = "AFIND+ (a CNN of 4 layers; sizes are ours)"
_OURS = "none; docs/peers.md"
_LEAF = "LEAF (Caldas et al. 2018); FedAL, CelebA"
_WRN = "Zagoruyko and Komodakis 2016; FedAL, SVHN"
_RESNET = "He et al. 2016; FedAL, CIFAR-10; AFIND+, CIFAR-100"
_CRD = "Tian et al. 2020 (CRD); AugFL"
_BOTH: tuple[Kind, ...] = ("table", "image")


def _mlp(title: str, source: str, *hidden: int) -> ModelSpec:
    return ModelSpec(title, partial(mlp, hidden=hidden), source, _BOTH)


def _wrn(depth: int, widen: int) -> ModelSpec:
    builder = partial(wide_resnet, depth=depth, widen=widen)
    return ModelSpec(f"wide ResNet {depth}-{widen}", builder, _WRN, norm="group", smallest=4)


def _resnet(title: str, *depths: int) -> ModelSpec:
    return ModelSpec(title, partial(resnet, depths=depths), _RESNET, norm="group", smallest=8)


def _cifar(title: str, depth: int, *widths: int) -> ModelSpec:
    return ModelSpec(
        title, partial(cifar_resnet, depth=depth, widths=widths), _CRD, norm="group", smallest=8
    )


def _cnn(
    title: str, source: str, builder: Callable[..., Classifier], *widths: int, hidden: int | None
) -> ModelSpec:
    return ModelSpec(title, partial(builder, widths=widths, hidden=hidden), source, smallest=4)


MODELS: dict[str, ModelSpec] = {
    "linear": _mlp("softmax regression", "none"),
    "mlp": _mlp("one hidden layer of 64", "none", 64),
    "mlp-large": _mlp("two hidden layers of 200 (2NN)", "McMahan et al. 2017", 200, 200),
    "mlp-deep": _mlp("three hidden layers of 64", "none", 64, 64, 64),
    "mlp-5": _mlp(
        "four hidden layers of 64", "Proto-EVFL, tables; widths are ours", 64, 64, 64, 64
    ),
    "lenet5": ModelSpec("LeNet-5", lenet5, "LeCun et al. 1998; FedAL, Proto-EVFL", smallest=4),
    "cnn-small": _cnn("two convolutions, 8 and 16 channels", "none", cnn, 8, 16, hidden=None),
    "cnn": _cnn(
        "two convolutions, 32 and 64 channels, then 128 units", _AFIND, cnn, 32, 64, hidden=128
    ),
    "cnn-strided": _cnn(
        "image halved, two strided convolutions of 16 and 32 channels, 64 units",
        _OURS,
        strided,
        16,
        32,
        hidden=64,
    ),
    "celeba-cnn": ModelSpec(
        "four convolutions of 32 channels", celeba_cnn, _LEAF, norm="group", smallest=8
    ),
    "wrn-10-1": _wrn(10, 1),
    "wrn-10-2": _wrn(10, 2),
    "wrn-16-1": _wrn(16, 1),
    "resnet18": _resnet("ResNet-18 for small images", 2, 2, 2, 2),
    "resnet34": _resnet("ResNet-34 for small images", 3, 4, 6, 3),
    "resnet8": _cifar("ResNet of 8 layers, 16 to 64 channels", 8, 16, 16, 32, 64),
    "resnet20": _cifar("ResNet of 20 layers, 16 to 64 channels", 20, 16, 16, 32, 64),
    "resnet8x4": _cifar("ResNet of 8 layers, 32 to 256 channels", 8, 32, 64, 128, 256),
    "resnet32x4": _cifar("ResNet of 32 layers, 32 to 256 channels", 32, 32, 64, 128, 256),
}


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    norm: Norm | None = None,
    seed: int | None = None,
) -> nn.Module:
    """A network for rows of `input_shape` and `classes` logits.

    Args:
        name: a key of `MODELS`, or the import path `package.module:factory` of a function or class
            that is called with `(input_shape, classes)`.
        input_shape: of one row: `(d,)` or `(C, H, W)`.
        classes: K, the number of logits.
        norm: the normalization; None is the network's default. It does not apply to `linear` or to
            your own networks.
        seed: of the initial weights: equal seeds give equal weights, and torch's global generator
            does not change. None draws from the global generator.

    Raises:
        ModelError: the name is unknown, the shape does not fit, or a network of yours does not
            output logits.
    """
    input_shape = tuple(input_shape)
    check_name(name)
    if not input_shape or not all(type(n) is int and n >= 1 for n in (*input_shape, classes)):
        raise ModelError(
            f"input_shape and classes must be positive integers, not {input_shape} and {classes!r}."
        )
    if norm is not None and norm not in get_args(Norm):
        raise ModelError(f"norm must be one of {', '.join(get_args(Norm))}, not {norm!r}.")
    with seeded(seed):
        if ":" in name:
            return custom.build(name, input_shape, classes)
        spec = MODELS[name]
        if not spec.fits(input_shape):
            fitting = ", ".join(other for other, s in MODELS.items() if s.fits(input_shape))
            raise ModelError(
                f"{name} takes images (channels, height, width) of at least "
                f"{spec.smallest}x{spec.smallest} pixels, not rows of shape {input_shape}. These "
                f"fit: {fitting}."
            )
        return spec.builder(input_shape, classes, norm or spec.norm)


def check_name(name: str, *, black_boxes: bool = False) -> None:
    """Check the name of a model.

    Args:
        name: a key of `MODELS`, or an import path.
        black_boxes: whether a key of `BLACK_BOXES` is valid too.

    Raises:
        ModelError: the name is unknown, its package is not installed, or its import path does not
            lead to a callable.
    """
    known = {**MODELS, **(BLACK_BOXES if black_boxes else {})}
    if external.is_external(name):
        raise ModelError(
            f"{name!r} is a pretrained model of another library, which only pretrained.model "
            f"takes; here choose one of {', '.join(known)}, or write package.module:factory for "
            "a function that loads it."
        )
    if ":" in name:
        custom.find(name)
    elif name in BLACK_BOXES and not black_boxes:
        raise ModelError(
            f"{name} is a black box, but a network is needed here; choose one of "
            f"{', '.join(MODELS)}."
        )
    elif name in BLACK_BOXES:
        check_installed(name)
    elif name not in known:
        raise ModelError(
            f"there is no model {name!r}.{did_you_mean(name, known)} Name yours as "
            "package.module:factory."
        )
