"""Checkpoints: written whole or not at all, checked when read, never trusted because of their name.

A file is a row of messages (safetensors and JSON, see `fedloom.core.message`), each after its length in 8 bytes: first
what the run has written down, then each party's state. The SHA-256 of all that ends it. The last two files are kept, so
that a torn one costs one interval and not the run. However many parties there are, one state at a time is in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fedloom.core import message
from fedloom.core.errors import CheckpointError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.core.paths import lock

KEEP = 2
_LIMITS = Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_CHUNK = 1 << 20  # bytes


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace `path` by `data`, perhaps in pieces: a reader, or a crash, sees the old file or the new one, whole. Those
    who write it at the same time take turns."""
    draft = path.with_name(f".{path.name}.draft")
    with _alone(draft) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
        os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _alone(draft: Path) -> Iterator[BinaryIO]:
    """The draft, empty, when nobody else writes it. What one who was killed left of it is used again."""
    while True:
        with draft.open("ab") as file:
            lock(file, wait=True)
            if _is(draft, file):  # else who had it before has made it the file itself
                file.truncate(0)
                yield file
                return


def _is(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def save(folder: Path, round: int, fingerprint: str, states: Mapping[str, Tree], records: Mapping[str, Any]) -> None:
    """Write the checkpoint after `round` rounds, and drop all but the newest two.

    Args:
        folder: the run's `checkpoints` folder.
        round: rounds done.
        fingerprint: of the config; only the same run may go on from here.
        states: every party's state by its name.
        records: what the run has written down so far; JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(json.dumps(records).encode()), dtype=torch.uint8)
    head: Tree = {"round": round, "fingerprint": fingerprint, "parties": list(states), "records": text}
    write_atomically(folder / f"round-{round:09d}.ckpt", _frames(chain([head], states.values())))
    for old in sorted(folder.glob("round-*.ckpt"))[:-KEEP]:
        old.unlink()


def _frames(trees: Iterable[Tree]) -> Iterator[bytes]:
    """The pieces of a file."""
    digest = hashlib.sha256()
    for tree in trees:
        data = message.encode(tree, _LIMITS)
        for piece in (len(data).to_bytes(8, "little"), data):
            digest.update(piece)
            yield piece
    yield digest.digest()


class _States(Mapping[str, Any]):
    """Every party's state by its name, read from the file when it is asked for."""

    def __init__(self, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        self._path = path
        self._places = places

    def __getitem__(self, party: str) -> Any:
        return _message(self._path, *self._places[party])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _message(path: Path, start: int, length: int) -> Any:
    with path.open("rb") as file:
        file.seek(start)
        return message.decode(file.read(length), _LIMITS)


def _places(path: Path) -> list[tuple[int, int]] | None:
    """Where the messages of a file are, and their lengths; None if it is torn or altered."""
    places, digest, end = [], hashlib.sha256(), path.stat().st_size - hashlib.sha256().digest_size
    with path.open("rb") as file:
        while (at := file.tell()) < end:
            length = int.from_bytes(size := file.read(8), "little")
            places.append((at + 8, length))
            digest.update(size)
            for start in range(0, min(length, end - at), _CHUNK):
                digest.update(file.read(min(_CHUNK, length - start)))
        return places if file.read() == digest.digest() and at == end else None


def load(path: Path, fingerprint: str) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
    """Round, states by the parties' names, and records of one checkpoint.

    Raises:
        CheckpointError: the file is torn, is not a checkpoint, or is of another run.
    """
    places = _places(path)
    if not places:
        raise CheckpointError(f"{path} is torn or altered: its checksum does not match its content")
    try:
        head = _message(path, *places[0])
        records = json.loads(head["records"].numpy().tobytes())
        found, round = head["fingerprint"], int(head["round"])
        states = _States(path, dict(zip(head["parties"], places[1:], strict=True)))
    except (MessageError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of fedloom: {error}") from None
    if found != fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run with another configuration, other data or another version of the code; resume "
            "with the settings in its folder's config.toml, or choose another --out"
        )
    return round, states, records


def newest(folder: Path, fingerprint: str) -> tuple[tuple[int, Mapping[str, Any], dict[str, Any]] | None, list[str]]:
    """The newest good checkpoint, if there is one, and a sentence for each that had to be passed over.

    Raises:
        CheckpointError: there are checkpoints, and none is good.
    """
    complaints: list[str] = []
    paths = sorted(folder.glob("round-*.ckpt"), reverse=True)
    for path in paths:
        try:
            return load(path, fingerprint), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    if paths:
        raise CheckpointError("\n".join(complaints))
    return None, complaints
