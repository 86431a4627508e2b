"""Private data of a party: its files on this machine, and its rows that are aligned with other
parties'.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import CheckpointError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.data.options import OwnFile
from fedloom.support.paths import write_atomically

_LIMITS: Final = Limits(max_bytes=1 << 40)
_SUM: Final = hashlib.sha256().digest_size
_PLAIN: Final = {
    "run": str,
    "caller": str,
    "start": int,
    "party": int,
    "mark": str,
    "file": str,
    "classes": int,
    "others": object,
}
_ROWS: Final = ("aligned", "unaligned", "test")


@dataclass(frozen=True, eq=False)
class Matched:
    """Row indices of one party's file. Entry i of `aligned`, and of `test`, is the same person at
    every party.

    Attributes:
        run: the run's id at the nodes.
        caller: identity of the coordinator, at a node.
        start: number of the coordinator's start.
        party: number of the party.
        mark: identifier of the matching, equal at all parties.
        file: SHA-256 of the matched file.
        classes: number of classes; 0 for a number to predict.
        aligned, unaligned, test: (n,) int64.
        others: at the coordinator, the number of unaligned rows of each other party.
    """

    run: str
    caller: str
    start: int
    party: int
    mark: str
    file: str
    classes: int
    aligned: np.ndarray
    unaligned: np.ndarray
    test: np.ndarray
    others: tuple[int, ...] = ()

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        tree: dict[str, Tree] = {name: getattr(self, name) for name in _PLAIN} | {
            "others": list(self.others)
        }
        tree |= {name: torch.from_numpy(getattr(self, name)) for name in _ROWS}
        body = message.encode(tree, _LIMITS)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [body, hashlib.sha256(body).digest()])

    @classmethod
    def load(cls, path: Path) -> "Matched | None":
        """Read the file; None if it does not exist.

        Raises:
            CheckpointError: it is corrupt.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        body = data[:-_SUM]
        if hashlib.sha256(body).digest() != data[-_SUM:]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
        try:
            tree: Any = message.decode(body, _LIMITS)
            message.check_like(tree, {**_PLAIN, **dict.fromkeys(_ROWS, object)})
            rows = {name: tree[name].numpy() for name in _ROWS}
            return cls(
                **{name: tree[name] for name in _PLAIN} | rows | {"others": tuple(tree["others"])}
            )
        except (MessageError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is not a record of matched rows: {error}") from None


@dataclass(frozen=True)
class PrivateData:
    """The location of a run's data on this machine.

    Attributes:
        set: local name or path of the data set; None for the run's `data.name`.
        root: folder of data sets.
        rows: file with the private rows of the party, or of the server.
        public: file with the public rows.
        id: id column; None for the run's setting.
        matched: the aligned rows; None before matching.
        split_seed: by which private rows are split into training and test rows; None for the run's
            seed.
        own: the settings of the owner of `rows`, at a node.
        owners: names of the nodes, at the coordinator.
    """

    set: str | None = None
    root: str | None = None
    rows: Path | None = None
    public: Path | None = None
    id: str | None = None
    matched: Matched | None = None
    split_seed: int | None = None
    own: OwnFile | None = None
    owners: tuple[str, ...] = ()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
