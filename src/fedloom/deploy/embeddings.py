"""Files exchanged after training: embeddings, which parties send to the active one, and tables of predictions.

A file of embeddings is a message (`fedloom.core.message`). It names the party, the export, and the order of people as
the SHA-256 of their ids: enough to refuse mismatched files, without a list of people.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import DataError, MessageError
from fedloom.core.message import Limits, Template, Tree
from fedloom.data.alignment.ids import digests
from fedloom.deploy.folder import PartyManifest
from fedloom.experiment.checkpoint import write_atomically

FORMAT = "fedloom-embeddings/1"
_LIMITS = Limits(max_bytes=1 << 36)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The embeddings of some people at one party.

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


def order_digest(ids: Sequence[str], what: str = "The rows") -> str:
    """The SHA-256 over all ids in order, normalised as by `fedloom align`: without case and surplus space.

    Raises:
        DataError: an id is missing or repeated.
    """
    return hashlib.sha256(b"".join(digests([ids], [what], [0])[0])).hexdigest()


def write_embeddings(
    path: Path, manifest: PartyManifest, values: np.ndarray, ids: Sequence[str] | None = None
) -> Embeddings:
    """Write a party's embeddings (n, d) of people. The file has no ids, only the digest of their order.

    Raises:
        DataError: the file cannot be written, or an id is missing or repeated.
    """
    result = Embeddings(manifest.party or 0, manifest.federation, "" if ids is None else order_digest(ids), values)
    tree: Tree = {
        "format": FORMAT,
        "party": result.party,
        "federation": result.federation,
        "order": result.order,
        "embedded": torch.from_numpy(values),
    }
    _write(path, message.encode(tree, _LIMITS))
    return result


def read_embeddings(path: Path) -> Embeddings:
    """The embeddings of a file.

    Raises:
        DataError: it cannot be read, or is not a file of embeddings.
    """
    template: Template = {
        "format": str,
        "party": int,
        "federation": str,
        "order": str,
        "embedded": message.Shape("float32", None, None),
    }
    try:
        tree: Any = message.decode(path.read_bytes(), _LIMITS)
        message.check_like(tree, template)
        message.check_finite(tree)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}).") from None
    except MessageError as error:
        raise DataError(
            f"{path} is not a valid file of embeddings ({error}); create it again with fedloom embed."
        ) from None
    if tree["format"] != FORMAT:
        raise DataError(f"{path} is not a file of embeddings of this version; create it with fedloom embed.")
    return Embeddings(tree["party"], tree["federation"], tree["order"], tree["embedded"].numpy())


def collect_embeddings(
    manifest: PartyManifest, files: Mapping[Path, int | None], ids: Sequence[str] | None = None
) -> tuple[dict[int, np.ndarray], bool]:
    """All parties' embeddings by number, and whether their rows are known to be of the same people in one order.

    Args:
        manifest: the active party's.
        files: each with the expected party number, or None.
        ids: of the people, or None if unknown.

    Raises:
        DataError: a file cannot be read, or the files do not match.
    """
    found: dict[int, Embeddings] = {}
    for path, party in files.items():
        sent = read_embeddings(path)
        if party is not None and sent.party != party:
            raise DataError(f"{path} holds embeddings of party {sent.party}, not of party {party}.")
        if sent.federation != manifest.federation:
            raise DataError(
                f"{path} was made with a folder of another export, whose embeddings differ; use the folders of one "
                "fedloom export."
            )
        if sent.party in found:
            raise DataError(f"There are two files of party {sent.party}, the second is {path}; give one for each.")
        found[sent.party] = sent
    orders = {m: sent.order for m, sent in found.items()}
    own = None if ids is None else order_digest(ids)
    expected = own or next(iter(orders.values()), "")
    odd = [m for m, order in orders.items() if order != expected]
    without = [m for m, order in orders.items() if not order]
    if odd and without:
        known = next((f"Those of party {m}" for m, order in orders.items() if order), "The rows")
        raise DataError(
            f"{known} have ids, but the embeddings of party {without[0]} don't; make them with --id too, so that the "
            "order can be compared."
        )
    if odd:
        raise DataError(
            f"The embeddings of party {odd[0]} are of other people, or of the same in another order, than "
            f"{'the rows given' if own else f'those of party {next(iter(orders))}'}: bring all files into one order "
            "(fedloom align) and embed again."
        )
    return {m: sent.values for m, sent in found.items()}, bool(expected)


def write_predictions(
    path: Path, heading: str, names: Sequence[str], classes: Sequence[str], probabilities: np.ndarray
) -> None:
    """Write a CSV file: the id, the predicted class, and the probability of each class, from (n, Z) probabilities.

    Raises:
        DataError: it can't be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([heading, "predicted", *(f"p {name}" for name in classes)])
    writer.writerows(prediction_rows(names, classes, probabilities, digits=8))
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
        raise DataError(f"{path} can't be written ({error.strerror}); choose another --out.") from None
