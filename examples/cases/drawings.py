"""Make the folders of docs/cases/drawers.md from a Parquet file of Omniglot: `image` (28 × 28),
`alphabet`, `drawer` from 1, and `label`, the character from 0.

    python examples/cases/drawings.py omniglot.parquet
"""

import io
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image


def smaller(picture: bytes) -> bytes:
    """The mean of 2 × 2 pixels of a grey picture, as PNG."""
    pixels = np.asarray(Image.open(io.BytesIO(picture)), dtype=float)  # (H, W)
    means = pixels.reshape(len(pixels) // 2, 2, -1, 2).mean((1, 3))
    made = io.BytesIO()
    Image.fromarray(np.rint(means).astype(np.uint8)).save(made, "PNG")
    return made.getvalue()


def main() -> None:
    """Write `drawings`, and `drawings-rates` without its test rows."""
    rows = pd.read_parquet(sys.argv[1])
    rows["image"] = [{"bytes": smaller(image["bytes"]), "path": None} for image in rows["image"]]
    left = (rows["label"] + rows["drawer"]) % 4
    for name, tested, kept in (("drawings", 0, rows), ("drawings-rates", 1, rows[left != 0])):
        Path(name).mkdir(exist_ok=True)
        parts = kept.assign(part=np.where(left[kept.index] == tested, "test", "train"))
        parts.to_parquet(Path(name) / "train.parquet", index=False)


if __name__ == "__main__":
    main()
