"""Small convolutional networks.

`celeba_cnn` is the network of LEAF for CelebA: Caldas et al. (2018), "LEAF: A Benchmark for Federated
Settings". The others represent the "small CNN" and "4-layer CNN" that papers use without giving their layers.
"""

from __future__ import annotations

import math

from torch import nn

from fedloom.models.parts import Classifier, Norm, conv, normalise


def cnn(shape: tuple[int, ...], classes: int, norm: Norm, widths: tuple[int, ...], hidden: int | None) -> Classifier:
    """A 3x3 convolution, norm, 2x2 max pooling and ReLU for each width, then `hidden` ReLU units.

    Pooling before the ReLU gives the same as after it, on a quarter of the pixels.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for outputs in widths:
        layers += [conv(channels, outputs, 3, norm), normalise(norm, outputs), nn.MaxPool2d(2), nn.ReLU()]
        channels, height, width = outputs, height // 2, width // 2
    layers += [nn.Flatten()]
    size = channels * height * width
    if hidden is None:
        return Classifier(nn.Sequential(*layers), size, classes)
    layers += [nn.Linear(size, hidden), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), hidden, classes)


def strided(shape: tuple[int, ...], classes: int, norm: Norm, widths: tuple[int, ...], hidden: int) -> Classifier:
    """The image halved, a 3x3 convolution of stride 2, norm and ReLU for each width, then `hidden` ReLU units.

    Both keep a step cheap, for many clients on few cores.
    """
    channels, height, width = shape[0], shape[1] // 2, shape[2] // 2
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for outputs in widths:
        layers += [conv(channels, outputs, 3, norm, stride=2), normalise(norm, outputs), nn.ReLU()]
        channels, height, width = outputs, -(-height // 2), -(-width // 2)
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), hidden, classes)


def celeba_cnn(shape: tuple[int, ...], classes: int, norm: Norm) -> Classifier:
    """Four times a 3x3 convolution of 32 channels, norm, 2x2 max pooling and ReLU.

    Pooling rounds up, as LEAF's does: 84 pixels become 42, 21, 11, 6.

    Differs: convolutions before a norm have no bias.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for inputs in (channels, 32, 32, 32):
        layers += [conv(inputs, 32, 3, norm), normalise(norm, 32)]
        layers += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
    layers += [nn.Flatten()]
    size = 32 * math.ceil(height / 16) * math.ceil(width / 16)
    return Classifier(nn.Sequential(*layers), size, classes)
