from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.images import decode_images
from fedloom.data.sources import load

PIL_Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PIL_Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


GRAY = np.array([[0, 10, 20], [30, 40, 255]], dtype=np.uint8)  # (H, W) = (2, 3)
COLOR = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)


def test_gray_images_keep_their_pixels() -> None:
    pixels = decode_images([png(GRAY), png(GRAY[::-1])])
    assert pixels.shape == (2, 1, 2, 3) and pixels.dtype == np.uint8
    assert pixels[0, 0].tolist() == GRAY.tolist()
    assert pixels[1, 0].tolist() == GRAY[::-1].tolist()


def test_color_images_have_channels_first() -> None:
    pixels = decode_images([png(COLOR)])
    assert pixels.shape == (1, 3, 2, 3)
    assert pixels[0, 1, 0, 2] == COLOR[0, 2, 1]


def test_the_majority_decides_between_gray_and_color() -> None:
    most_color = decode_images([png(COLOR), png(GRAY), png(COLOR)])
    assert most_color.shape == (3, 3, 2, 3)
    assert all((channel == GRAY).all() for channel in most_color[1])
    most_gray = decode_images([png(np.full((2, 3, 3), 90, np.uint8)), png(GRAY), png(GRAY)])
    assert most_gray.shape == (3, 1, 2, 3)
    assert (most_gray[0] == 90).all()


def test_images_are_scaled_only_when_asked_for() -> None:
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 200  # the middle square
    pixels = decode_images([png(wide), png(np.full((6, 6), 50, np.uint8))], size=2)
    assert pixels.shape == (2, 1, 2, 2) and (pixels[1] == 50).all()
    assert (pixels[0] > 180).all()  # the whole picture would give about 100


def test_images_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"there are 2: 2x3 \(2\), 3x2 \(1\)"):
        decode_images([png(GRAY), png(GRAY.T.copy()), png(GRAY)])


def test_a_broken_image_is_named() -> None:
    with pytest.raises(DataError, match="Image 1 cannot be decoded"):
        decode_images([png(GRAY), png(GRAY)[:40]])
    with pytest.raises(DataError, match="Image 0 cannot be decoded"):
        decode_images([b"nonsense"])


@pytest.mark.parametrize(
    ("side", "words"), [(30_000, "more than 178,956,970"), (10_000, "10000x10000")]
)
def test_an_image_larger_than_memory_is_refused_before_it_is_decoded(side: int, words: str) -> None:
    """A PNG's header claims the size; its few bytes hold no such pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, from half its limit on
        with pytest.raises(
            DataError, match=f"Image 0 has {words} pixels; at most 89,478,485 are read"
        ):
            decode_images([bomb])


def test_16_bit_images_are_refused_instead_of_clipped() -> None:
    with pytest.raises(DataError, match="8 bits"):
        decode_images([png(np.full((2, 3), 4000, dtype=np.uint16))])


def test_no_images_are_refused() -> None:
    with pytest.raises(DataError, match="At least one image"):
        decode_images([])


def class_folders(root: Path, **levels: list[int]) -> Path:
    """One folder for each class with one 2x3 image for each level of gray."""
    for label, grays in levels.items():
        (root / label).mkdir(parents=True)
        for number, gray in enumerate(grays):
            (root / label / f"{number}.png").write_bytes(png(np.full((2, 3), gray, np.uint8)))
    return root


def test_class_folders(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "pets", dog=[1, 2], cat=[3])
    (folder / "notes.txt").write_text("not a class")
    data = load(str(folder))
    assert (data.name, data.classes, data.test) == ("pets", ("cat", "dog"), None)
    assert data.y.tolist() == [0, 1, 1]
    assert data.x[:, 0, 0, 0].tolist() == [3, 1, 2]


def test_class_folders_below_train_and_test(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", dog=[1, 2], cat=[3])
    class_folders(tmp_path / "test", dog=[4])
    data = load(str(tmp_path))
    assert data.y.tolist() == [0, 1, 1, 1]
    assert data.x[:, 0, 1, 2].tolist() == [3, 1, 2, 4]
    assert data.test is not None and data.test.tolist() == [3]


def test_class_folders_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = class_folders(tmp_path / "pets", dog=[1, 2], cat=[3])
    first = load(str(folder))

    def refuse(*_: object, **__: object) -> np.ndarray:
        raise AssertionError("decoded again")

    monkeypatch.setattr("fedloom.data.own.decode_images", refuse)
    again = load(str(folder))
    assert (again.x == first.x).all() and again.classes == first.classes
    (folder / "cat" / "new.png").write_bytes(png(GRAY))
    with pytest.raises(AssertionError, match="decoded again"):
        load(str(folder))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"dog": [1]}, {}, "at least 2 classes"),
        ({"dog": [1], "cat": []}, {}, "cat has none"),
        ({"dog": [1], "cat": [2]}, {"cow": [3]}, "'cow'"),
    ],
)
def test_incomplete_class_folders_are_refused(
    tmp_path: Path, train: dict[str, list[int]], test: dict[str, list[int]], message: str
) -> None:
    class_folders(tmp_path / "train", **train)
    class_folders(tmp_path / "test", **test)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path))
