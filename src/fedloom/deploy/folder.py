"""The folder of one party: a manifest, `party.json`, and tensors, `state.safetensors`.

The tensors are a message (`fedloom.core.message`): a safetensors file that holds no code, with one encoding. The
manifest names its SHA-256. Both are validated as untrusted input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.message import Limits, Tree
from fedloom.core.method import problems
from fedloom.experiment.checkpoint import write_atomically

MANIFEST, STATE = "party.json", "state.safetensors"
ACTIVE = "active"
WIDEST, ALL = 1 << 11, 1 << 18
"""Most numbers of an embedding, of one party and of all together, so that no manifest can ask for more memory."""
LARGEST_MANIFEST = 1 << 26
"""Most bytes of a `party.json`."""
_LIMITS = Limits(max_bytes=1 << 36)
_HEX = Field(pattern="^[0-9a-f]{64}$")


class InputSpec(BaseModel):
    """The input of a party's network, and the recipe that encodes raw rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    norm: Literal["group", "batch", "none"] | None
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    recipe: dict[str, Any]

    @model_validator(mode="after")
    def _size(self) -> InputSpec:
        values = 1
        for side in self.shape:
            values *= side
        if min(self.shape) < 1 or values > 1 << 24:
            raise ValueError("a row must have 1 to 2**24 numbers")
        return self


class PartyManifest(BaseModel):
    """The content of `party.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["fedloom-party/1"] = "fedloom-party/1"
    fedloom: str
    """The version that wrote it."""
    role: Literal["party", "active"]
    party: int | None = Field(ge=0)
    """Its number; None for the active party's classifier."""
    parties: int = Field(ge=1, le=1024)
    needs: tuple[int, ...] = Field(min_length=1)
    """The parties whose embeddings a joint prediction needs."""
    federation: str = _HEX
    """The same in all folders of one export, whose embeddings belong together."""
    round: int = Field(ge=0)
    method: str
    """A name of `fedloom list methods`, or `FILE.py:NAME`."""
    page_sha256: str | None = Field(pattern="^[0-9a-f]{64}$")
    """Of that file."""
    preset: str
    params: dict[str, Any]
    """All settings of the method, those of the preset too."""
    width: int = Field(ge=1, le=2 * WIDEST)
    """Dimension of an embedding."""
    classes: tuple[str, ...] = Field(min_length=2, max_length=1 << 16)
    inputs: InputSpec | None
    """Of a party."""
    state_sha256: str = _HEX
    state_bytes: int = Field(ge=8, le=_LIMITS.max_bytes)

    @model_validator(mode="after")
    def _role(self) -> PartyManifest:
        if (self.role == "party") != (self.party is not None and self.inputs is not None):
            raise ValueError("a party needs a number and inputs, the active party's classifier has neither")
        if max(self.party or 0, *self.needs) >= self.parties or min(self.needs) < 0:
            raise ValueError(f"valid parties are 0–{self.parties - 1}")
        return self


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def encoded(state: Tree) -> bytes:
    """The content of `state.safetensors`."""
    return message.encode(state, _LIMITS)


def write(folder: Path, values: Mapping[str, Any], state: bytes) -> None:
    """Write a folder: the state first, so that readers refuse what a crash in between leaves.

    Args:
        folder: made if it is not there.
        values: of a `PartyManifest`, except those of the state.
        state: from `encoded`.

    Raises:
        ConfigError: it can't be written there, or no reader would take it.
    """
    try:
        manifest = PartyManifest(**values, state_sha256=digest(state), state_bytes=len(state))
    except ValidationError as error:  # such as more parties than a manifest allows
        raise ConfigError("\n".join(["this run can't be exported:", *problems(error, PartyManifest)])) from None
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STATE, state)
        write_atomically(folder / MANIFEST, text.encode())
    except OSError as error:
        raise ConfigError(f"{folder} can't be written ({error.strerror}); choose another --out") from None


def read_manifest(folder: Path) -> PartyManifest:
    """The content of a folder's `party.json`.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    path = folder / MANIFEST
    if not path.is_file():
        inside = sorted(found.parent.name for found in folder.glob(f"*/{MANIFEST}"))
        hint = f": name one of its folders, {', '.join(inside)}" if inside else ""
        raise CheckpointError(
            f"{folder} is not a party's folder: it has no {MANIFEST}{hint or '; fedloom export writes them'}"
        )
    with _readable(path):
        if path.stat().st_size > LARGEST_MANIFEST:
            raise CheckpointError(
                f"{path} is larger than the {LARGEST_MANIFEST:,} bytes it may have; copy the folder again"
            )
        values = json.loads(path.read_bytes())
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object; copy the folder again")
    try:
        return PartyManifest(**values)
    except ValidationError as error:
        lines = (line[:300] for line in problems(error, PartyManifest))
        raise CheckpointError("\n".join([f"{path} is not valid:", *lines])) from None


def read(folder: Path, role: Literal["party", "active"]) -> tuple[PartyManifest, Tree]:
    """A folder's manifest and state, with its checksum verified and all numbers finite.

    Raises:
        CheckpointError: it is incomplete, altered, or of the other role.
    """
    manifest = read_manifest(folder)
    if manifest.role != role:
        whose = "the active party: load_active" if manifest.role == ACTIVE else "a party: load_party"
        raise CheckpointError(f"{folder} is the folder of {whose} reads it")
    path = folder / STATE
    with _readable(path):
        size = path.stat().st_size
        if size != manifest.state_bytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but {MANIFEST} says {manifest.state_bytes:,}; copy the folder again"
            )
        data = path.read_bytes()
    if digest(data) != manifest.state_sha256:
        raise CheckpointError(
            f"{path} is torn or altered: its checksum is not that of {MANIFEST}; copy the folder again"
        )
    with validating(folder):
        state = message.decode(data, _LIMITS)
        message.check_finite(state)
    return manifest, state


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); copy the folder again") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is not JSON in UTF-8 ({error}); copy the folder again") from None


@contextlib.contextmanager
def validating(folder: Path) -> Iterator[None]:
    """Any exception inside is due to the folder's content, and is raised as a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        text = text if len(text) <= 500 else f"{text[:500]} …"
        raise CheckpointError(
            f"{folder} does not hold together: {text}; copy it again, or export the run again"
        ) from error
