"""Fully connected networks. They flatten their inputs, so tables and images both fit.

McMahan et al. (2017), "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS: their "2NN" has two hidden layers of 200 (here `mlp-large`).
"""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from fedloom.models.parts import Classifier, Norm, normalise


def mlp(shape: tuple[int, ...], classes: int, norm: Norm, hidden: tuple[int, ...]) -> Classifier:
    """Linear, norm and ReLU for each hidden width; softmax regression without hidden layers."""
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), normalise(norm, outputs, dims=1), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), widths[-1], classes)
