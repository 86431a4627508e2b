"""Reads PNG and JPEG files into one array of pixels, also from folders of classes; cuts images into
a grid of cells.
"""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError

_ENDINGS = {".png", ".jpg", ".jpeg"}
MOST_PIXELS = 89_478_485
"""Pixels of the largest image that is read: a file of some kilobytes can claim more than memory
holds.
"""
_GRAY = {"1", "L", "LA", "La"}
_COLOR = {"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}
MODES = tuple(sorted(_GRAY | _COLOR))
"""Pillow's names of what is read: 8 bits for each channel, in gray or color."""


def decode_images(
    files: Iterable[bytes | Path], *, size: int | None = None, channels: int | None = None
) -> np.ndarray:
    """Decode images to (n, C, H, W) uint8; all in gray (C = 1) or in color (C = 3).

    Args:
        files: the images, encoded, or as paths.
        size: side in pixels to which each image's central square is scaled. Without it all images
            must have one width and height.
        channels: 1 for gray, 3 for color; None for that of most images.

    Raises:
        DataError: no images, images of different shapes, or an invalid image.
    """
    planes = [_plane(number, file, size) for number, file in enumerate(files)]
    if not planes:
        raise DataError("At least one image is needed, but the list is empty.")
    shapes = Counter(plane.shape[:2] for plane in planes)
    if len(shapes) > 1:
        sizes = ", ".join(f"{h}x{w} ({number})" for (h, w), number in shapes.most_common(4))
        raise DataError(
            f"All images must have one height and width, but there are {len(shapes)}: {sizes}"
            f"{', ...' if len(shapes) > 4 else ''}. Scale them to one size first."
        )
    ((height, width),) = shapes
    gray = (
        2 * sum(plane.ndim == 2 for plane in planes) > len(planes)
        if channels is None
        else channels == 1
    )
    pixels = np.empty((len(planes), 1 if gray else 3, height, width), dtype=np.uint8)
    for number, plane in enumerate(planes):
        pixels[number] = _channels(plane, gray)
        planes[number] = pixels[number]  # so that a large set is not in memory twice
    return pixels


def _plane(number: int, file: bytes | Path, size: int | None) -> np.ndarray:
    """One image as (H, W) gray or (H, W, 3) color."""
    import PIL.Image
    import PIL.ImageOps

    where = f"Image {number}" if isinstance(file, bytes) else f"Image {file}"
    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise DataError(_too_large(where, f"{opened.width}x{opened.height}"))
            image = PIL.ImageOps.exif_transpose(opened)  # upright, where a camera was turned
            mode = image.mode
            if mode in MODES:
                plain = image.convert("L" if mode in _GRAY else "RGB")
                return np.asarray(PIL.ImageOps.fit(plain, (size, size)) if size else plain)
    except PIL.Image.DecompressionBombError:  # already on opening, at twice as many
        raise DataError(_too_large(where, f"more than {2 * MOST_PIXELS:,}")) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} cannot be decoded; replace or remove it ({error}).") from error
    raise DataError(
        f"{where} must have 8 bits per channel, in gray or color, but its Pillow mode is "
        f"{mode!r}; convert it first."
    )


def _too_large(where: str, pixels: str) -> str:
    return (
        f"{where} has {pixels} pixels; at most {MOST_PIXELS:,} are read: scale it down, or "
        "remove it."
    )


def _channels(plane: np.ndarray, gray: bool) -> np.ndarray:
    """One image as (1, H, W) or (3, H, W)."""
    import PIL.Image

    if gray:
        return (plane if plane.ndim == 2 else np.asarray(PIL.Image.fromarray(plane).convert("L")))[
            None
        ]
    return (
        np.broadcast_to(plane, (3, *plane.shape)) if plane.ndim == 2 else plane.transpose(2, 0, 1)
    )


def is_image(path: Path) -> bool:
    """Whether a file has a suffix of PNG or JPEG."""
    return path.suffix.lower() in _ENDINGS


def class_folders(path: Path) -> dict[str, list[Path]]:
    """Class name -> the image files in the folder of that name, both sorted by name."""
    folders = sorted(
        child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    return {folder.name: sorted(filter(is_image, folder.iterdir())) for folder in folders}


def list_class_folders(
    path: Path,
) -> tuple[list[Path], np.ndarray, tuple[str, ...], np.ndarray | None]:
    """The files of `<path>/<class>/*.png`, or of the same below `<path>/train` and, if any,
    `<path>/test`.

    Classes are numbered in the order of their names; rows are sorted by class and file name.

    Returns:
        The files, (n,) int64 labels, the names of the classes, and the row numbers of the test
        split, if there is one.

    Raises:
        DataError: fewer than two class folders, an empty one, or a test class without training
            images.
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
            raise DataError(
                f"Each class folder must have PNG or JPEG files, but {where / empty[0]} has none."
            )
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise DataError(
            f"{path / 'test'} has a class {unknown[0]!r} that {folder} lacks; add training "
            "images of it."
        )
    rows = [
        (file, classes.index(label))
        for part in (train, test)
        for label, files in part.items()
        for file in files
    ]
    held = sum(len(files) for files in test.values())
    y = np.array([number for _, number in rows], dtype=np.int64)
    return (
        [file for file, _ in rows],
        y,
        classes,
        np.arange(len(rows) - held, len(rows)) if held else None,
    )


def default_grid(parties: int) -> tuple[int, int]:
    """(rows, columns) of a grid with one cell for each party: two rows for an even number, else
    one.
    """
    return (2, parties // 2) if parties % 2 == 0 else (1, parties)


def grid_cells(shape: tuple[int, int], grid: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """The cells of an image (H, W) as (top, left, height, width), from each to a neighbour.

    Odd rows run right to left: a 2x2 grid is top left, top right, bottom right, bottom left. All
    cells have one size: a side that is not divisible is rounded up, and evenly spaced cells overlap
        by a pixel or two.

    Raises:
        DataError: the grid has more cells than the image has pixels, in height or width.
    """
    if not all(1 <= number <= side for number, side in zip(grid, shape, strict=True)):
        raise DataError(
            f"A grid of {grid[0]}x{grid[1]} cells does not fit an image of {shape[0]}x{shape[1]} "
            "pixels."
        )
    (tops, height), (lefts, width) = (
        _starts(side, number) for side, number in zip(shape, grid, strict=True)
    )
    return [
        (top, left, height, width)
        for row, top in enumerate(tops)
        for left in (lefts[::-1] if row % 2 else lefts)
    ]


def crop_cells(
    images: np.ndarray, grid: tuple[int, int], cells: Sequence[int], rows: np.ndarray | None = None
) -> np.ndarray:
    """Some cells of images, concatenated as channels.

    Args:
        images: (n, C, H, W).
        grid: cells in (rows, columns).
        cells: k numbers of cells in the order of `grid_cells`.
        rows: (r,) numbers of the images; None for all.

    Returns:
        (r, k * C, h, w), C-contiguous.
    """
    windows, parts = grid_cells((images.shape[2], images.shape[3]), grid), []
    for top, left, height, width in (windows[number] for number in cells):
        cell = images[:, :, top : top + height, left : left + width]
        parts.append(cell if rows is None else cell[rows])
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _starts(side: int, number: int) -> tuple[list[int], int]:
    """Starts and width of `number` equal windows that cover a side."""
    width = -(-side // number)
    return [round(k * (side - width) / max(number - 1, 1)) for k in range(number)], width
