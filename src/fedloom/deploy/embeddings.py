"""Files exchanged after training: embeddings, which parties send to the active one, and tables of
predictions.

A file of embeddings is a message (`fedloom.core.message`). It names the party, the export, and the
order of people as the SHA-256 of their ids: enough to refuse mismatched files, without a list of
people.
"""

import csv
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import DataError, MessageError
from fedloom.core.message import Template
from fedloom.data.alignment.ids import digests
from fedloom.deploy.folder import LIMITS
from fedloom.support.paths import write_atomically

FORMAT = "fedloom-embeddings/1"


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of some people, which one party made for the active party. NumPy takes it as
    an array.

    Attributes:
        party: its number.
        federation: identifies the export, see `PartyManifest`.
        order: digest of the order of the people, see `order_digest`; "" without ids.
        values: (n, d) float32.
    """

    party: int
    federation: str
    order: str
    values: np.ndarray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The values."""
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __len__(self) -> int:
        """n."""
        return len(self.values)


def order_digest(ids: Sequence[str]) -> str:
    """The SHA-256 over all ids in order, normalized as by `fedloom align`: without case and surplus
    space.

    Raises:
        DataError: an id is missing or repeated.
    """
    return hashlib.sha256(b"".join(digests([ids], ["The rows"], [0])[0])).hexdigest()


def write_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write a party's embeddings. The file has no ids, only the digest of their order.

    Raises:
        DataError: the file cannot be written.
    """
    tree: Any = {"format": FORMAT, **vars(embeddings)}
    tree["embedded"] = torch.from_numpy(tree.pop("values"))
    _write(path, message.encode(tree, LIMITS))


def read_embeddings(path: Path) -> Embeddings:
    """The embeddings of a file.

    Raises:
        DataError: it cannot be read, or is not a file of embeddings.
    """
    names: dict[str, Template] = {"format": str, "party": int, "federation": str, "order": str}
    template: Template = {**names, "embedded": message.Shape("float32", None, None)}
    try:
        tree: Any = message.decode(path.read_bytes(), LIMITS)
        message.check_like(tree, template)
        message.check_finite(tree)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from None
    except MessageError as error:
        raise DataError(
            f"{path} is not a valid file of embeddings ({error}); create it again with fedloom "
            "embed."
        ) from None
    if tree["format"] != FORMAT:
        raise DataError(
            f"{path} is not a file of embeddings of this version; create it with fedloom embed."
        )
    return Embeddings(tree["party"], tree["federation"], tree["order"], tree["embedded"].numpy())


def write_predictions(
    path: Path,
    heading: str,
    names: Sequence[str],
    classes: Sequence[str],
    probabilities: np.ndarray,
) -> None:
    """Write a CSV file: the id, the predicted class, and the probability of each class, from (n, Z)
    probabilities.

    Raises:
        DataError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([heading, "predicted", *(f"p {name}" for name in classes)])
    writer.writerows(prediction_rows(names, classes, probabilities, digits=8))
    _write(path, text.getvalue().encode())


def write_numbers(
    path: Path, heading: str, names: Sequence[str], labels: Sequence[str], numbers: np.ndarray
) -> None:
    """Write a CSV file: the id, and predicted numbers (n, W) under `labels`, in nine digits as by
    `predict.py`.

    Raises:
        DataError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([heading, *labels])
    writer.writerows(
        [name, *(f"{x:.9g}" for x in row)]
        for name, row in zip(names, numbers.tolist(), strict=True)
    )
    _write(path, text.getvalue().encode())


def prediction_rows(
    names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray, digits: int
) -> Iterator[list[str]]:
    """The text of each row: id, predicted class, probabilities."""
    for name, row in zip(names, probabilities, strict=True):
        yield [name, classes[int(row.argmax())], *(f"{p:.{digits}f}" for p in row)]


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}); choose another --out."
        ) from None
