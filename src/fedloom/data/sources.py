"""Sources of data: registered names, and the user's files."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.core.objects import find, is_object
from fedloom.data.cache import files_key, from_cache, key_of
from fedloom.data.dataset import Dataset, Kind, image_dataset
from fedloom.data.encoder import encode_table
from fedloom.data.hub import Hints, open_from_hub, read_files
from fedloom.data.options import GUESS, DataOptions
from fedloom.data.own import interpret, read_own
from fedloom.data.tables import RawTable

ROOT_VARIABLE = "FEDLOOM_DATA"


@dataclass(frozen=True)
class Source:
    """A registered data set."""

    title: str
    kind: Kind
    hub: str | None = None
    """"owner/name" on the Hugging Face hub, or None for scikit-learn's."""
    config: str | None = None
    """The hub's configuration name, if there are several."""
    hints: Hints = field(default_factory=Hints)

    @property
    def bundled(self) -> bool:
        """True if it needs no download."""
        return self.hub is None

    @property
    def test(self) -> str | None:
        """The split that is the official test set, or None."""
        return self.hints.test

    @property
    def extra(self) -> str | None:
        """The extra of fedloom that it needs, or None."""
        return None if self.bundled else "hub"


def _hub(
    kind: Kind, title: str, repository: str, config: str | None = None, **hints: Any
) -> Source:
    """A data set of the Hugging Face hub, with the fields of its `Hints`."""
    return Source(title, kind, repository, config, Hints(**hints))


# CelebA is 84x84 as in the LEAF benchmark (Caldas et al., arXiv:1812.01097), which federated papers
# follow. The hub's images of Mini-ImageNet have many sizes; Vinyals et al. (arXiv:1606.04080) made
# them 84x84.
SOURCES: dict[str, Source] = {
    "digits": Source("Handwritten digits, 8x8 gray, 10 classes", "image"),
    "breast_cancer": Source("Breast cancer, 30 measurements, 2 classes", "table"),
    "wine": Source("Wine recognition, 13 measurements, 3 classes", "table"),
    "mnist": _hub("image", "MNIST digits, 28x28 gray, 10 classes", "ylecun/mnist", test="test"),
    "fashion_mnist": _hub(
        "image",
        "Fashion-MNIST, 28x28 gray, 10 classes",
        "zalando-datasets/fashion_mnist",
        test="test",
    ),
    "emnist": _hub(
        "image",
        "EMNIST letters, 28x28 gray, 26 classes",
        "tanganke/emnist_letters",
        "emnist-letters",
        test="test",
    ),
    "femnist": _hub(
        "image",
        "FEMNIST characters by writer, 28x28 gray, 62 classes",
        "flwrlabs/femnist",
        label="character",
        groups="writer_id",
    ),
    "cifar10": _hub("image", "CIFAR-10, 32x32 color, 10 classes", "uoft-cs/cifar10", test="test"),
    "cifar100": _hub(
        "image",
        "CIFAR-100, 32x32 color, 100 classes",
        "uoft-cs/cifar100",
        test="test",
        label="fine_label",
    ),
    "svhn": _hub(
        "image",
        "Street view house numbers, 32x32 color, 10 classes",
        "ufldl-stanford/svhn",
        "cropped_digits",
        test="test",
    ),
    "cinic10": _hub("image", "CINIC-10, 32x32 color, 10 classes", "flwrlabs/cinic10", test="test"),
    "celeba": _hub(
        "image",
        "CelebA by celebrity, smiling or not, 84x84 color, 2 classes",
        "flwrlabs/celeba",
        test="test",
        label="Smiling",
        groups="celeb_id",
        size=84,
    ),
    "tiny-imagenet": _hub(
        "image", "Tiny ImageNet, 64x64 color, 200 classes", "zh-plus/tiny-imagenet", test="valid"
    ),
    "mini-imagenet": _hub(
        "image",
        "Mini-ImageNet, 84x84 color, 100 classes",
        "timm/mini-imagenet",
        test="test",
        size=84,
    ),
    "adult": _hub(
        "table",
        "Adult census income, 14 features, 2 classes",
        "scikit-learn/adult-census-income",
        label="income",
    ),
    "credit": _hub(
        "table",
        "Credit card default, 23 features, 2 classes",
        "scikit-learn/credit-card-clients",
        label="default.payment.next.month",
        drop=("ID",),
    ),
}


NOISE = re.compile(r"noise:(\d+)x(\d+(?:x\d+x\d+)?):(\d+)")
"""`noise:ROWSxSHAPE:CLASSES`, such as noise:1000x1x8x8:10: synthetic rows, to measure the cost of a
run without its data set.
"""


ENDINGS = {".csv", ".tsv", ".txt", ".parquet", ".json", ".xlsx", ".zip", ".gz"}
"""Endings of a name that is meant as a file."""


def check_name(name: str) -> None:
    """Raise DataError unless the name is registered, an object of this process, or an existing
    path.
    """
    if is_object(name):
        find(name, DataError)
    elif name not in SOURCES and not NOISE.fullmatch(name) and not Path(name).expanduser().exists():
        if Path(name).suffix in ENDINGS or {"/", "\\"} & {*name}:
            if "://" in name:
                raise DataError(f"{name} is an address: download the file, and give its path")
            raise DataError(
                f"there is no file or folder {name}: give its path from {Path.cwd()}, or the "
                "whole path"
            )
        raise DataError(
            f"{name!r} is neither a registered data set nor an existing file or "
            f"folder.{did_you_mean(name, SOURCES)}"
        )


def load(name: str, *, root: Path | None = None, options: DataOptions = GUESS) -> Dataset:
    """Load a data set by its name in `SOURCES`, or from files.

    A data set of the Hugging Face hub is read from the folder `<root>/<owner>/<name>` if it exists,
    else from the hub. Decoded data is cached on disk (`fedloom.data.cache`). Splits other than
    training and test are ignored.

    A path may be a .parquet or .csv file, a folder of them in the hub's layout, a folder of PNG or
    JPEG files that its metadata.csv lists as file_name, or a folder of class folders of such files:
    with or without train/ and test/ above, or in one folder for each owner. See
    `fedloom.data.own.read_data` for the columns of a table.

    Example:
        >>> digits = load("digits")
        >>> digits.x.shape, len(digits.classes)
        ((1797, 1, 8, 8), 10)

    Args:
        name: a registered name, or a path. Names take precedence: write "./mnist" for a folder
            called mnist.
        root: the data root; None for the environment variable FEDLOOM_DATA.
        options: the meaning of the columns, for a path.

    Raises:
        DataError: the name is unknown, or the data is missing, unreadable or inconsistent.
    """
    if not isinstance(name, str):
        raise DataError(
            f"load takes the name or path of a data set as text, not a {type(name).__name__}."
        )
    if is_path(name):
        check_name(name)
        path = Path(name).expanduser()
        return from_cache(files_key(path, "own", repr(options)), lambda: read_own(path, options)[0])
    if options != GUESS:
        raise DataError(
            f"{name!r} is a registered data set, whose columns are known: leave out "
            f"{options.given()}."
        )
    key, read = _reader(name, root)
    return from_cache(key, lambda: _encoded(read())) if key else _encoded(read())


def _encoded(data: Dataset | RawTable) -> Dataset:
    return encode_table(data) if isinstance(data, RawTable) else data


def is_path(name: str) -> bool:
    """Whether the name is that of a user's file or folder, not of a registered data set."""
    return name not in SOURCES and not NOISE.fullmatch(name) and not is_object(name)


def load_raw(
    name: str, *, root: Path | None = None, options: DataOptions = GUESS
) -> Dataset | RawTable:
    """Like `load`, but a table is not encoded.

    Raises:
        DataError: as `load`.
    """
    if is_path(name):
        check_name(name)
        found, images = interpret(name, options)
        if images is not None:
            return load(name, root=root, options=options)
        if fixed := [column for column, kind in found.kinds.items() if kind in ("text", "date")]:
            raise DataError(
                f"Columns {fixed} of {name!r} hold texts or dates, which methods for columns do "
                "not encode: leave them out with data.drop, or set data.encode to category for "
                "them."
            )
        return found.table
    if is_object(name) and isinstance(data := find(name, DataError), Dataset) and data.x.ndim == 2:
        columns = {column: data.x[:, k] for k, column in enumerate(data.columns)}
        return RawTable(data.name, columns, data.y, data.classes, data.test, data.groups)
    source = SOURCES.get(name)
    return (
        _reader(name, root)[1]()
        if source is None or source.kind == "table"
        else load(name, root=root)
    )


def _reader(name: str, root: Path | None) -> tuple[str, Callable[[], Dataset | RawTable]]:
    """The cache key of a data set, "" if it is not cached, and a function that reads it."""
    if sizes := NOISE.fullmatch(name):
        rows, shape, classes = int(sizes[1]), tuple(map(int, sizes[2].split("x"))), int(sizes[3])
        return "", lambda: _noise(name, rows, shape, classes)
    if is_object(name):
        return "", lambda: find(name, DataError)
    source = SOURCES[name]
    if source.hub is None:  # scikit-learn takes seconds to import, its data a moment to read
        return key_of(name, version("scikit-learn")), lambda: _load_bundled(name)
    root = root or (Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None)
    folder, hints, config = root and root.expanduser() / source.hub, source.hints, source.config
    if folder is None or not folder.is_dir():
        return open_from_hub(source.hub, name=name, hints=hints, config=config, folder=folder)
    key = files_key(folder, name, config, repr(hints))
    return key, lambda: read_files(folder, name=name, hints=hints, config=config)


def _noise(name: str, rows: int, shape: tuple[int, ...], classes: int) -> Dataset | RawTable:
    """Random images (C, H, W) or table rows (F,): the sum of a part shared by the class and a part
    of the row.
    """
    rng = np.random.default_rng(0)
    y, names = rng.integers(classes, size=rows), tuple(map(str, range(classes)))
    if len(shape) == 3:
        x = rng.integers(128, size=(classes, *shape), dtype=np.uint8)[y]
        return image_dataset(name, x + rng.integers(128, size=x.shape, dtype=np.uint8), y, names)
    columns = rng.standard_normal((*shape, classes), dtype=np.float32)[:, y]
    columns += rng.standard_normal(columns.shape, dtype=np.float32)
    return RawTable(
        name, {f"column {number}": column for number, column in enumerate(columns)}, y, names, None
    )


def _load_bundled(name: str) -> Dataset | RawTable:
    import sklearn.datasets

    data = getattr(sklearn.datasets, f"load_{name}")()
    y = data.target.astype(np.int64)
    classes = tuple(str(label) for label in data.target_names)
    if name == "digits":
        images = data.images.astype(np.uint8)[:, None]  # (n, 1, 8, 8), 0..16
        return image_dataset(name, images, y, classes, half_range=8.0)
    columns = {
        str(column): data.data[:, k].astype(np.float32)
        for k, column in enumerate(data.feature_names)
    }
    return RawTable(name, columns, y, classes, None)
