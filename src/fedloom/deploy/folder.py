"""The folder of one party: a manifest, `party.json`, and tensors, `state.safetensors`.

The tensors are a message (`fedloom.core.message`), a safetensors file without code, and the
manifest has its SHA-256. Both are validated as untrusted input.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.message import Limits, Tree
from fedloom.core.problems import problems
from fedloom.support.paths import write_atomically

MANIFEST, STATE = "party.json", "state.safetensors"
ACTIVE = "active"
WIDEST, ALL = 1 << 11, 1 << 18
"""Largest embedding of one party, and of all together: the limit on the memory that a manifest can
claim.
"""
LARGEST_MANIFEST = 1 << 26
"""Maximum bytes of a `party.json`."""
LIMITS = Limits(max_bytes=1 << 36)
_HEX = Field(pattern="^[0-9a-f]{64}$")


class InputSpec(BaseModel):
    """The input of a party's network, and the recipe that encodes raw rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    norm: Literal["group", "batch", "none"] | None
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    recipe: dict[str, Any]

    @model_validator(mode="after")
    def _size(self) -> "InputSpec":
        if min(self.shape) < 1 or math.prod(self.shape) > 1 << 24:
            raise ValueError("a row must have 1 to 2**24 numbers")
        return self


class NumberInfo(BaseModel):
    """How a network's outputs become a number: output * scale + shift, in the unit of the label."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    label: str
    shift: float
    scale: float = Field(gt=0)
    variance: bool = False
    """Whether a second output is the logarithm of the variance."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of a prediction: the label, and its s.d. if the network predicts it."""
        return (self.label or "number", *(("s.d.",) if self.variance else ()))

    def in_unit(self, outputs: Tensor) -> np.ndarray:
        """Outputs (n, W) as numbers, and their s.d., in the unit of the label: (n, W) float64."""
        found: np.ndarray = outputs.detach().cpu().double().numpy()
        found[:, 0] = found[:, 0] * self.scale + self.shift
        if self.variance:
            found[:, 1] = np.exp(found[:, 1] / 2) * self.scale
        return found


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
    """The file's digest; None for a name."""
    preset: str
    params: dict[str, Any]
    """All settings of the method, also the preset's."""
    width: int = Field(ge=1, le=2 * WIDEST)
    """Dimension of an embedding."""
    classes: tuple[str, ...] = Field(max_length=1 << 16)
    number: NumberInfo | None = None
    """In place of classes, for a number to predict."""
    inputs: InputSpec | None
    """The rows that a party reads; None for the active party."""
    state_sha256: str = _HEX
    state_bytes: int = Field(ge=8, le=LIMITS.max_bytes)

    @property
    def outputs(self) -> int:
        """The width of the active party's outputs."""
        return len(self.classes) if self.number is None else len(self.number.names)

    @model_validator(mode="after")
    def _label(self) -> "PartyManifest":
        if (len(self.classes) < 2) if self.number is None else bool(self.classes):
            raise ValueError("must have at least two classes, or a number and none")
        return self

    @model_validator(mode="after")
    def _role(self) -> "PartyManifest":
        if (self.role == "party") != (self.party is not None and self.inputs is not None):
            raise ValueError(
                "a party needs a number and inputs, the active party's classifier has neither"
            )
        if max(self.party or 0, *self.needs) >= self.parties or min(self.needs) < 0:
            raise ValueError(f"valid parties are 0–{self.parties - 1}")
        return self


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, values: Mapping[str, Any], state: bytes) -> None:
    """Write a folder: the state first, so that readers refuse an incomplete one.

    Args:
        folder: created if missing.
        values: of a `PartyManifest`, except the state's digest and size.
        state: an encoded message.

    Raises:
        ConfigError: the folder cannot be written, or the manifest is invalid.
    """
    try:
        manifest = PartyManifest(**values, state_sha256=digest(state), state_bytes=len(state))
    except ValidationError as error:  # such as more parties than a manifest allows
        raise ConfigError(
            "\n".join(["this run cannot be exported:", *problems(error, PartyManifest)])
        ) from None
    text = (
        json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / STATE, state)
        write_atomically(folder / MANIFEST, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); choose another --out"
        ) from None


def read_manifest(folder: Path) -> PartyManifest:
    """The content of a folder's `party.json`.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    path = folder / MANIFEST
    if not path.is_file():
        above = folder if folder.is_dir() else folder.parent
        inside = sorted(
            found.parent.name
            for kind in (MANIFEST, "model.json")
            for found in above.glob(f"*/{kind}")
        )
        these = "its folders" if folder.is_dir() else f"the folders in {above}"
        hint = (
            f"choose one of {these}: {', '.join(inside)}"
            if inside
            else "create one with fedloom export"
        )
        reason = f"it has no {MANIFEST}" if folder.is_dir() else "it does not exist"
        raise CheckpointError(f"{folder} is not a party's folder: {reason}; {hint}")
    with readable(path):
        if path.stat().st_size > LARGEST_MANIFEST:
            raise CheckpointError(
                f"{path} is larger than {LARGEST_MANIFEST:,} bytes; copy the folder again"
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
        owner = "the active party" if manifest.role == ACTIVE else "a party"
        raise CheckpointError(
            f"{folder} is the folder of {owner}; load it with load_{manifest.role}"
        )
    path = folder / STATE
    with readable(path):
        data = path.read_bytes() if path.stat().st_size == manifest.state_bytes else b""
    if digest(data) != manifest.state_sha256:
        raise CheckpointError(
            f"{path} is not the file that {MANIFEST} describes; copy the folder again"
        )
    with validating(folder):
        state = message.decode(data, LIMITS)
        message.check_finite(state)
    return manifest, state


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise an error of the file system, or of JSON, inside as a `CheckpointError`
    about the file.
    """
    try:
        yield
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # also of JSON
        raise CheckpointError(f"{path} cannot be read ({error}); copy the folder again") from None


@contextlib.contextmanager
def validating(folder: Path) -> Iterator[None]:
    """Raise any exception inside as a `CheckpointError` about the folder's content."""
    try:
        yield
    except Exception as error:
        text = (str(error) or type(error).__name__)[:500]
        raise CheckpointError(
            f"{folder} is inconsistent: {text}; copy it again, or export the run again"
        ) from error
