"""Checkpoints: written whole or not at all, checked when read, never trusted because of their name.

A file is one message (safetensors and JSON, see `fedloom.message`) followed by the 32 bytes of its SHA-256. The
last two are kept, so that a torn one costs one interval and not the run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedloom import message
from fedloom.errors import CheckpointError, MessageError
from fedloom.message import Limits, Tree

KEEP = 2
_LIMITS = Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_DIGEST = hashlib.sha256().digest_size


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees the old file or the new one, whole."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(folder: Path, round: int, fingerprint: str, states: Tree, records: Mapping[str, Any]) -> None:
    """Write the checkpoint after `round` rounds, and drop all but the newest two.

    Args:
        folder: the run's `checkpoints` folder.
        round: rounds done.
        fingerprint: of the config; only the same run may go on from here.
        states: every party's state.
        records: what the run has written down so far; JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(json.dumps(records).encode()), dtype=torch.uint8)
    tree: Tree = {"round": round, "fingerprint": fingerprint, "states": states, "records": text}
    data = message.encode(tree, _LIMITS)
    write_atomically(folder / f"round-{round:09d}.ckpt", data + hashlib.sha256(data).digest())
    for old in sorted(folder.glob("round-*.ckpt"))[:-KEEP]:
        old.unlink()


def load(path: Path, fingerprint: str) -> tuple[int, Any, dict[str, Any]]:
    """Round, states and records of one checkpoint.

    Raises:
        CheckpointError: the file is torn, is not a checkpoint, or is of another run.
    """
    data = path.read_bytes()
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise CheckpointError(f"{path} is torn or altered: its checksum does not match its content")
    try:
        tree = message.decode(body, _LIMITS)
        assert isinstance(tree, dict)
        records = json.loads(tree["records"].numpy().tobytes())
        found, round, states = tree["fingerprint"], tree["round"], tree["states"]
    except (MessageError, AssertionError, KeyError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of fedloom: {error}") from None
    if found != fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run with another configuration, other data or another version of the code; resume "
            "with the settings in its folder's config.toml, or choose another --out"
        )
    return int(round), states, records


def newest(folder: Path, fingerprint: str) -> tuple[tuple[int, Any, dict[str, Any]] | None, list[str]]:
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
