"""Checkpoints: written atomically, verified when read.

A file is a sequence of messages (safetensors and JSON, see `fedloom.core.message`), each preceded
by its length in 8
bytes: first the run's records, then each party's state. Their SHA-256 ends the file. The last two
files are kept, so a corrupt one costs one interval and not the run. States are read and written one
at a time.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fedloom.core import message
from fedloom.core.errors import CheckpointError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.support.paths import write_atomically

KEEP = 2
_LIMITS = Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_CHUNK = 1 << 20  # bytes


def save(
    folder: Path,
    round: int,
    fingerprint: str,
    states: Mapping[str, Tree],
    records: Mapping[str, Any],
) -> None:
    """Write the checkpoint after `round` rounds, and delete all but the newest two.

    Args:
        folder: the run's `checkpoints` folder.
        round: rounds done.
        fingerprint: of the run; `load` requires the same.
        states: by party name.
        records: JSON values, see `Record.state`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(json.dumps(records).encode()), dtype=torch.uint8)
    head: Tree = {
        "round": round,
        "fingerprint": fingerprint,
        "parties": list(states),
        "records": text,
    }
    write_atomically(folder / f"round-{round:09d}.ckpt", _frames(chain([head], states.values())))
    for old in sorted(folder.glob("round-*.ckpt"))[:-KEEP]:
        old.unlink()


def _frames(trees: Iterable[Tree]) -> Iterator[bytes]:
    """The parts of a file."""
    digest = hashlib.sha256()
    for tree in trees:
        data = message.encode(tree, _LIMITS)
        for piece in (len(data).to_bytes(8, "little"), data):
            digest.update(piece)
            yield piece
    yield digest.digest()


class _States(Mapping[str, Any]):
    """States by party name, each read from the file on access."""

    def __init__(self, path: Path, spans: Mapping[str, tuple[int, int]]) -> None:
        self._path, self._spans = path, spans

    def __getitem__(self, party: str) -> Any:
        return _message(self._path, *self._spans[party])

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def _message(path: Path, start: int, length: int) -> Any:
    with path.open("rb") as file:
        file.seek(start)
        return message.decode(file.read(length), _LIMITS)


def _spans(path: Path) -> list[tuple[int, int]] | None:
    """(offset, length) of each message of a file; None if its checksum is wrong."""
    spans, digest, end = [], hashlib.sha256(), path.stat().st_size - hashlib.sha256().digest_size
    with path.open("rb") as file:
        while (at := file.tell()) < end:
            length = int.from_bytes(size := file.read(8), "little")
            spans.append((at + 8, length))
            digest.update(size)
            for start in range(0, min(length, end - at), _CHUNK):
                digest.update(file.read(min(_CHUNK, length - start)))
        return spans if file.read() == digest.digest() and at == end else None


def load(path: Path, fingerprint: str) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
    """The round, the states by party name, and the records of a checkpoint.

    Raises:
        CheckpointError: the file is corrupt, is not a checkpoint, or has another fingerprint.
    """
    spans = _spans(path)
    if not spans:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    try:
        head = _message(path, *spans[0])
        records = json.loads(head["records"].numpy().tobytes())
        saved_by, round = head["fingerprint"], int(head["round"])
        states = _States(path, dict(zip(head["parties"], spans[1:], strict=True)))
    except (MessageError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a fedloom checkpoint: {error}") from None
    if saved_by != fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run with another configuration, other data or another version "
            "of fedloom: resume with the config.toml of its folder, or choose another --out"
        )
    return round, states, records


def newest(
    folder: Path, fingerprint: str
) -> tuple[tuple[int, Mapping[str, Any], dict[str, Any]] | None, list[str]]:
    """The newest valid checkpoint, if any, and an error message for each newer invalid one.

    Raises:
        CheckpointError: there are checkpoints, but none is valid.
    """
    problems: list[str] = []
    paths = sorted(folder.glob("round-*.ckpt"), reverse=True)
    for path in paths:
        try:
            return load(path, fingerprint), problems
        except CheckpointError as error:
            problems.append(str(error))
    if paths:
        raise CheckpointError("\n".join(problems))
    return None, problems
