"""Reads PNG and JPEG files into one array of pixels, also from folders named after classes."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, image_dataset

_ENDINGS = {".png", ".jpg", ".jpeg"}
_GREY = {"1", "L", "LA", "La"}
_COLOUR = {"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}


def decode_images(files: Iterable[bytes | Path], *, size: int | None = None, channels: int | None = None) -> np.ndarray:
    """Decode images to (n, C, H, W) uint8; all in grey (C = 1) or in colour (C = 3).

    Args:
        files: the images, encoded, or as paths.
        size: side in pixels to which each image's central square is scaled. Without it all images must have one
            width and height.
        channels: 1 for grey, 3 for colour; None for that of most images.

    Raises:
        DataError: no images, images of different shapes, or an invalid image.
    """
    planes = [_plane(number, file, size) for number, file in enumerate(files)]
    if not planes:
        raise DataError("At least one image is needed, but the list is empty.")
    height, width = _common_shape([plane.shape[:2] for plane in planes])
    grey = 2 * sum(plane.ndim == 2 for plane in planes) > len(planes) if channels is None else channels == 1
    pixels = np.empty((len(planes), 1 if grey else 3, height, width), dtype=np.uint8)
    for number, plane in enumerate(planes):
        pixels[number] = _channels(plane, grey)
        planes[number] = pixels[number]  # so that a large set is not in memory twice
    return pixels


def _plane(number: int, file: bytes | Path, size: int | None) -> np.ndarray:
    """One image as (H, W) grey or (H, W, 3) colour."""
    import PIL.Image
    import PIL.ImageOps

    where = f"Image {number}" if isinstance(file, bytes) else f"Image {file}"
    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            mode = image.mode
            if mode in _GREY | _COLOUR:
                plain = image.convert("L" if mode in _GREY else "RGB")
                return np.asarray(PIL.ImageOps.fit(plain, (size, size)) if size else plain)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} cannot be decoded; replace or remove it ({error}).") from error
    raise DataError(
        f"{where} must have 8 bits per channel, in grey or colour, but its Pillow mode is {mode!r}; convert it first."
    )


def _channels(plane: np.ndarray, grey: bool) -> np.ndarray:
    """One image as (1, H, W) or (3, H, W)."""
    import PIL.Image

    if grey:
        return (plane if plane.ndim == 2 else np.asarray(PIL.Image.fromarray(plane).convert("L")))[None]
    return np.broadcast_to(plane, (3, *plane.shape)) if plane.ndim == 2 else plane.transpose(2, 0, 1)


def _common_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    counts = Counter(shapes)
    if len(counts) > 1:
        sizes = ", ".join(f"{h}x{w} ({number})" for (h, w), number in counts.most_common(4))
        raise DataError(
            f"All images must have one height and width, but there are {len(counts)}: {sizes}"
            f"{', ...' if len(counts) > 4 else ''}. Scale them to one size first."
        )
    return shapes[0]


def is_image(path: Path) -> bool:
    """Whether a file has a suffix of PNG or JPEG."""
    return path.suffix.lower() in _ENDINGS


def class_folders(path: Path) -> dict[str, list[Path]]:
    """Class name -> the image files in the folder of that name, both sorted by name."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return {folder.name: sorted(filter(is_image, folder.iterdir())) for folder in folders}


def read_class_folders(path: Path, *, name: str) -> Dataset:
    """Read `<path>/<class>/*.png`, or the same below `<path>/train` and, if any, `<path>/test`.

    Classes are numbered in the order of their names; rows are sorted by class and file name.

    Raises:
        DataError: fewer than two class folders, an empty one, or a test class without training images.
    """
    folder = path / "train" if (path / "train").is_dir() else path
    train = class_folders(folder)
    test = class_folders(path / "test") if folder != path and (path / "test").is_dir() else {}
    classes = tuple(train)
    if len(classes) < 2:
        raise DataError(f"{path} must have folders for at least 2 classes, but has {classes}.")
    for where, folders in ((folder, train), (path / "test", test)):
        empty = [label for label, files in folders.items() if not files]
        if empty:
            raise DataError(f"Each class folder must have PNG or JPEG files, but {where / empty[0]} has none.")
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise DataError(f"{path / 'test'} has a class {unknown[0]!r} that {folder} lacks; add training images of it.")
    rows = [(file, classes.index(label)) for part in (train, test) for label, files in part.items() for file in files]
    held = sum(len(files) for files in test.values())
    return image_dataset(
        name,
        decode_images(file for file, _ in rows),
        np.array([number for _, number in rows], dtype=np.int64),
        classes,
        test=np.arange(len(rows) - held, len(rows)) if held else None,
    )
