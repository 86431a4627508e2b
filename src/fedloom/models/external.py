"""Pretrained networks of other libraries, with the interface of `fedloom.models.parts`: features
and head.

`torchvision:resnet50` is a network of torchvision with its best published weights. `hf:NAME` is one
of the Hugging Face hub, or of a local folder; only safetensors files are read, and no code runs.
Both need the extra `vision` and take
images: a run's images are converted to color, resized and standardized as in the network's
    training.
"""

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ModelError
from fedloom.models.parts import seeded

LIBRARIES = {"torchvision": "torchvision", "hf": "transformers"}
"""The prefix of a name, and the package that it needs."""
HALF = ([0.5] * 3, [0.5] * 3)
"""Default mean and standard deviation of a network of the hub."""
SIDE = 224
"""Its default image size, in pixels."""
_NO_CODE = {"trust_remote_code": False}
"""Without it transformers asks the user whether downloaded code may run."""


@dataclass(frozen=True)
class _Loaded:
    """A network without its head (B, 3, *size) → (B, d), its head if there is one, and the format
    of its inputs.
    """

    body: nn.Module
    head: nn.Linear | None
    size: tuple[int, int]
    mean: list[float]
    std: list[float]


class External(nn.Module):
    """A network of another library for a run's standardized images (B, C, H, W)."""

    shift: Tensor
    scale: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        name: str,
        loaded: _Loaded,
        classes: int,
        shift: tuple[float, ...],
        scale: tuple[float, ...],
    ):
        super().__init__()
        self.name, self.size = name, loaded.size
        self.body = loaded.body
        self.head = (
            loaded.head if loaded.head is not None and loaded.head.out_features == classes else None
        )
        levels = {"shift": shift, "scale": scale, "mean": loaded.mean, "std": loaded.std}
        for key, values in levels.items():
            self.register_buffer(key, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def prepare(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) in the format of the network's training: (B, 3, *size)."""
        pixels = (x * self.scale + self.shift) / (self.scale + self.shift)  # 0 to 1
        color = pixels.expand(-1, 3, -1, -1)
        sized = F.interpolate(
            color, self.size, mode="bilinear", align_corners=False, antialias=True
        )
        return (sized - self.mean) / self.std

    def features(self, x: Tensor) -> Tensor:
        """The input (B, d) of the last layer."""
        out: Tensor = self.body(self.prepare(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K).

        Raises:
            ModelError: it was trained for another number of classes.
        """
        if self.head is None:
            raise ModelError(
                f"{self.name} was not trained on this run's classes, so it gives features but no "
                "logits; use a method that learns from features alone, or a model trained on the "
                "server's rows."
            )
        out: Tensor = self.head(self.features(x))
        return out


def is_external(name: str) -> bool:
    """Whether the name is that of a network of another library."""
    library, colon, rest = name.partition(":")
    return bool(colon and rest) and library in LIBRARIES


def check_name(name: str) -> None:
    """Raise ModelError unless the library of the name is installed."""
    needed = LIBRARIES[name.partition(":")[0]]
    with contextlib.suppress(ValueError):  # a loaded module without a spec
        if find_spec(needed) is None:
            raise ModelError(
                f"{name} needs {needed}, which is not installed; run: pip install -e '.[vision]'"
            )


def build(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    shift: tuple[float, ...],
    scale: tuple[float, ...],
    seed: int | None = None,
) -> External:
    """A network of another library for images (C, H, W) that are given as (pixel - shift) / scale.

    Args:
        name: `torchvision:NAME` or `hf:NAME`.
        input_shape: of one image.
        classes: K of the run.
        shift, scale: (C,) each.
        seed: of random weights; None for the published ones.

    Raises:
        ModelError: the network does not exist or cannot be loaded, or it does not fit.
    """
    check_name(name)
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise ModelError(
            f"{name} takes gray or color images, not rows of shape {input_shape}; choose another "
            "model."
        )
    library, _, what = name.partition(":")
    with torch.random.fork_rng(devices=[]), seeded(seed):
        try:
            loaded = (
                _torchvision(what, seed is None)
                if library == "torchvision"
                else _hub(what, seed is None)
            )
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        # libraries raise many types for a wrong name, a missing file, a lost connection
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")[:300]
            raise ModelError(
                f"{name} cannot be loaded ({type(error).__name__}: {text}); check its name, and "
                "for the hub that it has a safetensors file."
            ) from error
    model = External(name, loaded, classes, shift, scale).eval()
    with torch.no_grad():
        width = tuple(model.features(torch.zeros(2, *input_shape)).shape)
    if len(width) != 2 or (loaded.head is not None and width[1] != loaded.head.in_features):
        raise ModelError(
            f"{name} gives features of shape {width[1:]} for an image, but they must be (d,); "
            f"{_OTHER}."
        )
    return model


_OTHER = "take another network, such as torchvision:resnet50"


def _torchvision(name: str, trained: bool) -> _Loaded:
    from torchvision.models import get_model, get_model_weights

    weights = get_model_weights(name).DEFAULT
    net, takes = get_model(name, weights=weights if trained else None), weights.transforms()
    side = takes.crop_size[0]
    return _Loaded(net, _cut_head(net), (side, side), list(takes.mean), list(takes.std))


def _cut_head(net: nn.Module) -> nn.Linear:
    """Replace the last linear layer by the identity, and return it."""
    linear = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
    if not linear or not linear[-1][0]:
        raise ModelError(f"the network must end in a linear layer, but has none; {_OTHER}.")
    name, head = linear[-1]
    net.set_submodule(name, nn.Identity())
    return head


class _Hub(nn.Module):
    """A network of transformers that outputs a tensor (B, d)."""

    def __init__(self, net: nn.Module, classifies: bool) -> None:
        super().__init__()
        self.net, self.classifies = net, classifies

    def forward(self, x: Tensor) -> Tensor:
        """The input of the head that was cut off; without a head, the pooled state or that of the
        first token.
        """
        out: Any = self.net(pixel_values=x)
        pooled = out.logits if self.classifies else getattr(out, "pooler_output", None)
        features: Tensor = out.last_hidden_state[:, 0] if pooled is None else pooled
        return features.flatten(1)


def _hub(name: str, trained: bool) -> _Loaded:
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    folder = Path(name).expanduser()
    where = str(folder) if folder.is_dir() else name
    config = AutoConfig.from_pretrained(where, **_NO_CODE)
    classifies = any(kind.endswith("ForImageClassification") for kind in config.architectures or ())
    kind = AutoModelForImageClassification if classifies else AutoModel
    if trained:
        net, info = kind.from_pretrained(
            where, use_safetensors=True, output_loading_info=True, **_NO_CODE
        )
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"the file lacks {len(missing)} weights of the network, such as {missing[0]}, "
                "which would be random; use a checkpoint that has all weights."
            )
    else:
        net = kind.from_config(config, **_NO_CODE)
    size, mean, std = _input_format(where, config)
    return _Loaded(
        _Hub(net.float(), classifies), _cut_head(net) if classifies else None, size, mean, std
    )


def _input_format(where: str, config: Any) -> tuple[tuple[int, int], list[float], list[float]]:
    """Size, mean and standard deviation of the images that a network of the hub expects, by its
    preprocessor file.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(where)
    except OSError:  # there is no such file
        settings = {}
    side = (
        settings.get("crop_size")
        or settings.get("size")
        or getattr(config, "image_size", None)
        or SIDE
    )
    if isinstance(side, dict):
        side = side.get("shortest_edge") or (side["height"], side["width"])
    height, width = (side, side) if isinstance(side, int) else side
    return (
        (height, width),
        settings.get("image_mean") or HALF[0],
        settings.get("image_std") or HALF[1],
    )
