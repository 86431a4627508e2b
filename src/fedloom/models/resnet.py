"""Residual networks for small images.

Zagoruyko, Komodakis (2016), "Wide Residual Networks", BMVC: WRN-d-k has three stages of (d - 4) / 6
blocks and 16k, 32k, 64k channels, with normalization before each convolution.

He et al. (2016), "Deep Residual Learning for Image Recognition", CVPR: ResNet-18 and -34, here with
the
usual stem for 32x32 images: one 3x3 convolution with stride 1 and no pooling. Their networks for
CIFAR-10 have 6n + 2 layers: three stages of n blocks. Tian, Krishnan, Isola (2020), "Contrastive
Representation Distillation", ICLR, use 1x1 convolutions as shortcuts, and "8x4" networks of 32, 64,
128, 256 channels, the teachers and students of many papers on distillation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedloom.models.parts import Classifier, Norm, conv, normalize


class PreActivationBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))): `(B, C, H, W)` → `(B, C', H / s, W / s)`."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.conv1 = normalize(norm, inputs), conv(inputs, outputs, 3, norm, stride)
        self.norm2, self.conv2 = normalize(norm, outputs), conv(outputs, outputs, 3, norm)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else conv(inputs, outputs, 1, norm, stride)

    def forward(self, x: Tensor) -> Tensor:
        """A shortcut that changes the shape starts after the first activation, as the authors'
        does.
        """
        active = torch.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = kept + self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return out


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))): `(B, C, H, W)` → `(B, C', H / s, W / s)`."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, norm, stride), normalize(norm, outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, norm), normalize(norm, outputs)
        same = inputs == outputs and stride == 1
        reshape = (
            nn.Identity()
            if same
            else nn.Sequential(conv(inputs, outputs, 1, norm, stride), normalize(norm, outputs))
        )
        self.shortcut = reshape

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.conv2(out)))


def wide_resnet(
    shape: tuple[int, ...], classes: int, norm: Norm, depth: int, widen: int
) -> Classifier:
    """WRN-`depth`-`widen`, without dropout."""
    widths = [16 * widen, 32 * widen, 64 * widen]
    blocks = _blocks(PreActivationBlock, 16, widths, [(depth - 4) // 6] * 3, norm)
    last = [normalize(norm, widths[-1]), nn.ReLU()]
    return _classifier([conv(shape[0], 16, 3, norm), *blocks, *last], widths[-1], classes)


def resnet(shape: tuple[int, ...], classes: int, norm: Norm, depths: tuple[int, ...]) -> Classifier:
    """Stages of `depths` basic blocks with 64, 128, 256, … channels."""
    widths = [64 << i for i in range(len(depths))]
    stem = [conv(shape[0], 64, 3, norm), normalize(norm, 64), nn.ReLU()]
    blocks = _blocks(BasicBlock, 64, widths, depths, norm)
    return _classifier([*stem, *blocks], widths[-1], classes)


def cifar_resnet(
    shape: tuple[int, ...], classes: int, norm: Norm, depth: int, widths: tuple[int, ...]
) -> Classifier:
    """Three stages of n = (depth - 2) / 6 basic blocks; `widths` are the channels of the stem and
    of each stage.

    Without a norm the second convolution of each block starts at 1 / n of its usual weights, so
    that the sum over a
    stage does not grow with n: otherwise 32 layers would stay at chance accuracy. With n = 1
        nothing changes.
    """
    first, *stages = widths
    each = (depth - 2) // 6
    stem = [conv(shape[0], first, 3, norm), normalize(norm, first), nn.ReLU()]
    model = _classifier(
        [*stem, *_blocks(BasicBlock, first, stages, [each] * 3, norm)], stages[-1], classes
    )
    if norm == "none":
        for module in model.modules():
            if isinstance(module, BasicBlock):
                module.conv2.weight.data.div_(each)
    return model


def _blocks(
    block: type[PreActivationBlock | BasicBlock],
    inputs: int,
    widths: list[int],
    depths: Sequence[int],
    norm: Norm,
) -> list[nn.Module]:
    """The blocks of all stages; each stage but the first starts by halving the image."""
    blocks: list[nn.Module] = []
    for stage, (outputs, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            blocks.append(block(inputs, outputs, stride, norm))
            inputs = outputs
    return blocks


def _classifier(layers: list[nn.Module], width: int, classes: int) -> Classifier:
    """Global average pooling, a head, and the initial weights of both papers."""
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = Classifier(nn.Sequential(*layers, *pool), width, classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.zeros_(model.head.bias)
    return model
