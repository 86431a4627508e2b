"""LeNet-5: LeCun et al. (1998), "Gradient-Based Learning Applied to Document Recognition".

Differs: ReLU, max pooling and a plain linear output, as in current papers. 28x28 images are
padded to the original 32x32, which makes 61,706 parameters for 10 classes. Below 16 pixels the second
convolution is padded as well, so that an 8x8 image keeps some pixels.
"""

from __future__ import annotations

from torch import nn

from fedloom.models.parts import Classifier, Norm, normalise


def lenet5(shape: tuple[int, ...], classes: int, norm: Norm) -> Classifier:
    """Two convolutions 5x5 of 6 and 16 channels, each with pooling, then 120 and 84 units."""
    channels, height, width = shape
    first = 0 if min(height, width) >= 32 else 2
    second = 0 if min(height, width) >= 16 else 2
    plain = norm == "none"

    def side(pixels: int) -> int:
        return ((pixels + 2 * first - 4) // 2 + 2 * second - 4) // 2

    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=first, bias=plain),
        normalise(norm, 6),
        nn.MaxPool2d(2),  # before the ReLU: the same result on a quarter of the pixels
        nn.ReLU(),
        nn.Conv2d(6, 16, 5, padding=second, bias=plain),
        normalise(norm, 16),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * side(height) * side(width), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Classifier(body, 84, classes)
