"""A network's weights as a safetensors file whose metadata, a card, says what it is and what it was trained on.

A file comes from anywhere, so nothing in it is believed: its size, names, shapes, types, checksum and numbers are
looked at, and it holds no code. One without a card is a plain `safetensors.torch.save_file` of a state dict.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedloom.core.errors import CheckpointError
from fedloom.data.dataset import Dataset
from fedloom.experiment.checkpoint import write_atomically

KEY = "fedloom"
"""Of the card in the file's metadata. It is the only one: with several, their order would be chance."""
LARGEST, LARGEST_CARD = 1 << 36, 1 << 26
"""Bytes."""
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}
_HEX = Field(pattern="^[0-9a-f]{64}$")


class Card(BaseModel):
    """What a file of `fedloom pretrain` says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["fedloom-pretrained/1"] = "fedloom-pretrained/1"
    fedloom: str
    """The version that wrote it."""
    model: str
    norm: Literal["group", "batch", "none"] | None
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    """Of one input."""
    classes: int = Field(ge=2)
    dataset: str
    content_sha256: str = _HEX
    """Of the data set: see `content`."""
    rows: int = Field(ge=1)
    """How many rows it was trained on."""
    rows_sha256: str = _HEX
    """Of their numbers: see `rows_digest`."""
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    """It was given (row - shift) / scale."""
    epochs: int
    lr: float
    batch_size: int
    seed: int
    accuracy: float
    """On `test_rows` rows that it was not trained on."""
    test_rows: int
    weights_sha256: str = _HEX

    @model_validator(mode="after")
    def _levels(self) -> Card:
        shift, scale = torch.tensor(self.shift), torch.tensor(self.scale)  # in the type that they are used in
        sound = bool(shift.isfinite().all() and scale.isfinite().all() and (scale > 0).all())
        if not (len(shift) == len(scale) == self.shape[0] and sound):
            raise ValueError("shift and scale must have a finite number for each channel or column, scale above 0")
        return self


def content(dataset: Dataset) -> str:
    """SHA-256 of a data set's content in its order: all labels, and up to 1,000 evenly spaced rows."""
    x, y = dataset.x, dataset.y
    digest = hashlib.sha256(f"{x.dtype.str} {x.shape} {len(dataset.classes)}".encode())
    for part in (y.astype("<i8"), x[:: max(1, len(x) // 1000)]):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def rows_digest(rows: np.ndarray) -> str:
    """SHA-256 of row numbers, in rising order."""
    return hashlib.sha256(np.sort(rows).astype("<i8").tobytes()).hexdigest()


def write(file: Path, module: nn.Module, values: Mapping[str, Any]) -> Card:
    """Write a module's weights and its card, whole or not at all; equal weights give equal bytes.

    Args:
        file: its folder is made if it is not there.
        module: whose state dict is written.
        values: of a `Card`, less the checksum.

    Raises:
        OSError: it can't be written there.
    """
    tensors = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in module.state_dict().items()}
    card = Card(**values, weights_sha256=_checksum(tensors))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save(tensors, {KEY: card.model_dump_json()}))
    return card


def read_card(file: Path) -> Card | None:
    """What a file says of itself; None if it is a plain file of weights. Reads its header alone.

    Raises:
        CheckpointError: it is missing, no safetensors file, or its card is not as `write` makes it.
    """
    with _opened(file) as opened:
        text = (opened.metadata() or {}).get(KEY)
    if text is None:
        return None
    if len(text) > LARGEST_CARD:
        raise CheckpointError(f"{file} has a card of more than {LARGEST_CARD:,} characters; copy the file again")
    try:
        return Card.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "its card"
        raise CheckpointError(
            f"{file} says something of itself that no fedloom of this version writes ({where}: {wrong['msg']}); make "
            "it again with fedloom pretrain"
        ) from None


def file_digest(file: Path, card: Card | None) -> str:
    """SHA-256 that tells one file from another: of the header and length, as a card has the weights' checksum; of the
    whole file where there is none."""
    with _opened(file), file.open("rb") as raw:
        if card is None:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        length = int.from_bytes(raw.read(8), "little")
        return hashlib.sha256(raw.read(length) + str(file.stat().st_size).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 of the names, sizes and times of a folder's files, which are not read."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    parts = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in sorted(found.items())]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()


def check(file: Path, module: nn.Module, what: str) -> None:
    """Refuse a file whose tensors are not those of the module, by names, shapes and types. Reads the header alone.

    Args:
        file: of weights.
        module: the architecture that they should fit.
        what: its name, for the text.

    Raises:
        CheckpointError: with the first tensor that does not fit.
    """
    wanted = module.state_dict()
    with _opened(file) as opened:
        held = set(opened.keys())
        if held != set(wanted):
            missing, further = sorted(set(wanted) - held), sorted(held - set(wanted))
            which = f"it lacks {missing[0]}" if missing else f"it has {further[0]}, which that network has not"
            raise CheckpointError(
                f"{file} does not hold the weights of {what}: {which}; name the model and norm that it was made with"
            )
        for name, tensor in wanted.items():
            part = opened.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if (shape, kind) != (tuple(tensor.shape), _TYPES.get(tensor.dtype)):
                single = shape == tuple(tensor.shape) and tensor.dtype == torch.float32
                mend = "save it as float32" if single else "name the model, norm and data that it was made with"
                raise CheckpointError(
                    f"{file} does not hold the weights of {what}: {name} is {kind} of shape {shape}, not "
                    f"{_TYPES.get(tensor.dtype)} of shape {tuple(tensor.shape)}; {mend}"
                )


def fill(file: Path, module: nn.Module, what: str, card: Card | None = None) -> None:
    """Read a file's weights into a module.

    Raises:
        CheckpointError: they don't fit, are not finite, or not those that the card was written with.
    """
    check(file, module, what)
    with _opened(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    if card is not None and card.weights_sha256 != _checksum(tensors):
        raise CheckpointError(f"{file} is torn or altered: its checksum is not that of its card; copy it again")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{file} holds numbers that are not finite, in {name}; take another file")
    module.load_state_dict(tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file's header and tensors, which are read when asked for."""
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}; fedloom pretrain makes one")
    if file.stat().st_size > LARGEST:
        raise CheckpointError(f"{file} is larger than the {LARGEST:,} bytes it may have; take a smaller model")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is no safetensors file ({error}); fedloom pretrain makes one, or "
            "safetensors.torch.save_file(model.state_dict(), file)"
        ) from None
