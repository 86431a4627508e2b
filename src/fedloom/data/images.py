"""PNG and JPEG files to one array of pixels."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedloom.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_GREY = {"1", "L", "LA", "La"}
_COLOUR = {"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}


def decode_images(
    files: Callable[[], Iterable[bytes | Path]], *, size: int | None = None
) -> np.ndarray:
    """Decode images to (n, C, H, W) uint8; all in grey (C = 1) or all in colour (C = 3), as most of them are.

    Args:
        files: gives the images, encoded, or as paths; it is called twice, so that they need not all be in memory.
        size: the middle square of each image is scaled to size x size pixels. Without it all must have one shape.

    Raises:
        DataError: no images, images of different shapes, or one that can't be decoded.
    """
    heads = [
        _opened(number, file, lambda image: (image.mode, image.size))
        for number, file in enumerate(files())
    ]
    mode = _common_mode([mode for mode, _ in heads])
    width, height = (size, size) if size else _common_size([shape for _, shape in heads])
    channels = 1 if mode == "L" else 3
    pixels = np.empty((len(heads), channels, height, width), dtype=np.uint8)
    for number, file in enumerate(files()):
        image = _opened(number, file, lambda image: _prepared(image, mode, size))
        plane = np.asarray(image)  # (H, W) or (H, W, 3)
        pixels[number] = plane if channels == 1 else plane.transpose(2, 0, 1)
    return pixels


def _opened(number: int, file: bytes | Path, use: Callable[[Image], T]) -> T:
    """What `use` makes of an opened image; the trouble that decoders have is told in one way."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            return use(image)
    except (OSError, SyntaxError, ValueError) as error:
        where = f"Image {number}" if isinstance(file, bytes) else f"Image {file}"
        raise DataError(f"{where} can't be decoded; replace or remove it ({error}).") from error


def _prepared(image: Image, mode: str, size: int | None) -> Image:
    import PIL.ImageOps

    image = image.convert(mode)
    return PIL.ImageOps.fit(image, (size, size)) if size else image


def _common_mode(modes: list[str]) -> str:
    if not modes:
        raise DataError("At least one image is needed, but there are none.")
    strange = sorted(set(modes) - _GREY - _COLOUR)
    if strange:
        raise DataError(
            f"Images must have 8 bits a channel, in grey or colour, but some have Pillow's mode {strange[0]!r}; "
            "convert them first."
        )
    grey = sum(mode in _GREY for mode in modes)
    return "L" if 2 * grey > len(modes) else "RGB"


def _common_size(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    counts = Counter(sizes)
    if len(counts) > 1:
        found = ", ".join(
            f"{width}x{height} ({number})" for (width, height), number in counts.most_common(4)
        )
        raise DataError(
            f"All images must have one width and height, but there are {len(counts)}: {found}"
            f"{', ...' if len(counts) > 4 else ''}. Scale them to one size first."
        )
    return sizes[0]
