"""Fully connected and small convolutional networks.

McMahan et al. (2017), "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS: their "2NN" has two hidden layers of 200 (here `mlp-large`).

LeCun et al. (1998), "Gradient-Based Learning Applied to Document Recognition": LeNet-5.

Caldas et al. (2018), "LEAF: A Benchmark for Federated Settings": the network for CelebA.

The other networks represent the "small CNN" and "4-layer CNN" that papers use without giving their
layers. Pooling before a ReLU gives the same as after it, on a quarter of the pixels.
"""

import math
from itertools import pairwise

from torch import nn

from fedloom.models.parts import Classifier, Norm, conv, normalize


def mlp(shape: tuple[int, ...], classes: int, norm: Norm, hidden: tuple[int, ...]) -> Classifier:
    """Flattened inputs; linear, norm and ReLU for each hidden width; softmax regression without
    hidden layers.
    """
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), normalize(norm, outputs, dims=1), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), widths[-1], classes)


def cnn(
    shape: tuple[int, ...], classes: int, norm: Norm, widths: tuple[int, ...], hidden: int | None
) -> Classifier:
    """A 3x3 convolution, norm, 2x2 max pooling and ReLU for each width, then `hidden`
    ReLU units.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for outputs in widths:
        layers += [
            conv(channels, outputs, 3, norm),
            normalize(norm, outputs),
            nn.MaxPool2d(2),
            nn.ReLU(),
        ]
        channels, height, width = outputs, height // 2, width // 2
    return _flat(layers, channels * height * width, hidden, classes)


def strided(
    shape: tuple[int, ...], classes: int, norm: Norm, widths: tuple[int, ...], hidden: int
) -> Classifier:
    """The image halved, a 3x3 convolution of stride 2, norm and ReLU for each width, then `hidden`
    ReLU units.

    Both keep a step cheap, for many clients on few cores.
    """
    channels, height, width = shape[0], shape[1] // 2, shape[2] // 2
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for outputs in widths:
        layers += [conv(channels, outputs, 3, norm, stride=2), normalize(norm, outputs), nn.ReLU()]
        channels, height, width = outputs, -(-height // 2), -(-width // 2)
    return _flat(layers, channels * height * width, hidden, classes)


def celeba_cnn(shape: tuple[int, ...], classes: int, norm: Norm) -> Classifier:
    """Four times a 3x3 convolution of 32 channels, norm, 2x2 max pooling and ReLU.

    Pooling rounds up, as LEAF's does: 84 pixels become 42, 21, 11, 6.

    Differs: convolutions before a norm have no bias.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for inputs in (channels, 32, 32, 32):
        layers += [
            conv(inputs, 32, 3, norm),
            normalize(norm, 32),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.ReLU(),
        ]
    return _flat(layers, 32 * math.ceil(height / 16) * math.ceil(width / 16), None, classes)


def lenet5(shape: tuple[int, ...], classes: int, norm: Norm) -> Classifier:
    """Two convolutions 5x5 of 6 and 16 channels, each with pooling, then 120 and 84 units.

    Differs: ReLU, max pooling and a plain linear output, as in current papers. 28x28 images are
    padded to the original 32x32, which makes 61,706 parameters for 10 classes. Below 16 pixels the
    second convolution is padded as well, so that an 8x8 image keeps some pixels.
    """
    channels, height, width = shape
    pads = (0 if min(height, width) >= 32 else 2, 0 if min(height, width) >= 16 else 2)
    layers: list[nn.Module] = []
    for outputs, pad in zip((6, 16), pads, strict=True):
        layers += [
            nn.Conv2d(channels, outputs, 5, padding=pad, bias=norm == "none"),
            normalize(norm, outputs),
        ]
        layers += [nn.MaxPool2d(2), nn.ReLU()]
        channels, height, width = outputs, (height + 2 * pad - 4) // 2, (width + 2 * pad - 4) // 2
    layers += [
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    ]
    return Classifier(nn.Sequential(*layers), 84, classes)


def _flat(layers: list[nn.Module], size: int, hidden: int | None, classes: int) -> Classifier:
    """The layers, then their `size` outputs in a row, `hidden` ReLU units if any, and the head."""
    layers = [*layers, nn.Flatten()]
    if hidden is not None:
        layers += [nn.Linear(size, hidden), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), hidden or size, classes)
