"""Images cut into a grid of cells for vertical parties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedloom.core.errors import DataError


def default_grid(parties: int) -> tuple[int, int]:
    """(rows, columns) of a grid with one cell for each party: two rows for an even number, else one."""
    return (2, parties // 2) if parties % 2 == 0 else (1, parties)


def grid_cells(shape: tuple[int, int], grid: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """The cells of an image (H, W) as (top, left, height, width), in the order of a walk through neighbours.

    The walk goes left to right through the first row, right to left through the second, and so on, so that a 2x2
    grid is top left, top right, bottom right, bottom left. All cells have one size: if a side is not divisible, it is
    rounded up, and evenly spaced cells overlap by a pixel or two.

    Raises:
        DataError: the grid has more cells than the image has pixels, in height or width.
    """
    if not all(1 <= number <= side for number, side in zip(grid, shape, strict=True)):
        raise DataError(f"A grid of {grid[0]}x{grid[1]} cells does not fit an image of {shape[0]}x{shape[1]} pixels.")
    (tops, height), (lefts, width) = (_starts(side, number) for side, number in zip(shape, grid, strict=True))
    return [(top, left, height, width) for row, top in enumerate(tops) for left in (lefts[::-1] if row % 2 else lefts)]


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
    places = grid_cells((images.shape[2], images.shape[3]), grid)
    taken = np.arange(len(images)) if rows is None else rows
    parts = []
    for cell in cells:
        top, left, height, width = places[cell]
        parts.append(images[:, :, top : top + height, left : left + width][taken])
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _starts(side: int, number: int) -> tuple[list[int], int]:
    """Starts and width of `number` equal windows that cover a side."""
    width = -(-side // number)
    return [round(k * (side - width) / max(number - 1, 1)) for k in range(number)], width
