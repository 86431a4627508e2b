"""Images in folders that are called after their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.images import decode_images

_ENDINGS = {".png", ".jpg", ".jpeg"}


def is_image(path: Path) -> bool:
    """Whether a file's name ends like a PNG's or a JPEG's."""
    return path.suffix.lower() in _ENDINGS


def read_class_folders(path: Path, *, name: str) -> Dataset:
    """Read `<path>/<class>/*.png`, or the same below `<path>/train` and, if any, `<path>/test`.

    Classes are numbered in the order of their names, and rows come in the order of class and file
    name.

    Raises:
        DataError: fewer than two class folders, one without images, or a test class that training
            lacks.
    """
    split = (path / "train").is_dir()
    train = _listing(path / "train" if split else path)
    test = _listing(path / "test") if split and (path / "test").is_dir() else {}
    classes = tuple(train)
    if len(classes) < 2:
        raise DataError(f"{path} must hold a folder for each of at least 2 classes, but it has {classes}.")
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise DataError(f"{path / 'test'} has a class {unknown[0]!r} that {path / 'train'} lacks; add it there.")
    rows = [(file, classes.index(label)) for part in (train, test) for label, files in part.items() for file in files]
    held = sum(len(files) for files in test.values())
    return image_dataset(
        name,
        decode_images(file for file, _ in rows),
        np.array([number for _, number in rows], dtype=np.int64),
        classes,
        test=np.arange(len(rows) - held, len(rows)) if held else None,
    )


def _listing(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its image files, both in the order of their names."""
    classes = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    found = {child.name: sorted(filter(is_image, child.iterdir())) for child in classes}
    empty = [label for label, files in found.items() if not files]
    if empty:
        raise DataError(
            f"Each class folder must hold PNG or JPEG files, but {folder / empty[0]} holds none; remove it or fill it."
        )
    return found
