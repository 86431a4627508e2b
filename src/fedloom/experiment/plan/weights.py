"""A network's weights as a safetensors file, with a card in its metadata that describes model and
training data.

Files are untrusted: size, names, shapes, types, checksum and values are checked, and no code is
loaded. A file without a card is a plain `safetensors.torch.save_file` of a state dict.
"""

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
from fedloom.support.paths import write_atomically

KEY = "fedloom"
"""Key of the card, the only one in the metadata: the order of several would not be deterministic.
"""
MAX_BYTES, MAX_CARD_BYTES = 1 << 36, 1 << 26
"""Bytes."""
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}
_HEX = Field(pattern="^[0-9a-f]{64}$")


class Card(BaseModel):
    """The description of a file of `fedloom pretrain`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["fedloom-pretrained/1"] = "fedloom-pretrained/1"
    fedloom: str
    """Version that wrote the file."""
    model: str
    norm: Literal["group", "batch", "none"] | None
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    """Shape of one input."""
    classes: int = Field(ge=0)
    """K; 0 for a number to predict."""
    target: tuple[float, float] | None = None
    """Mean and s.d. by which a number to predict is standardized; None for classes."""
    variance: bool = False
    """Whether the network also predicts the variance of the number."""
    dataset: str
    content_sha256: str = _HEX
    """Digest of the data set, see `content`."""
    rows: int = Field(ge=1)
    """Number of training rows."""
    rows_sha256: str = _HEX
    """Digest of their indices, see `rows_digest`."""
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    """Inputs are (row - shift) / scale."""
    epochs: int
    lr: float
    batch_size: int
    seed: int
    accuracy: float | None = None
    """On `test_rows` rows outside the training rows; None for a number to predict."""
    rmse: float | None = None
    """The root mean squared error of a number to predict, in its unit, on the same rows; None for
    classes.
    """
    test_rows: int
    weights_sha256: str = _HEX

    @property
    def score(self) -> str:
        """Its accuracy or error, for people."""
        return f"accuracy {self.accuracy:.1%}" if self.rmse is None else f"RMSE {self.rmse:.4g}"

    @model_validator(mode="after")
    def _levels(self) -> "Card":
        shift, scale = torch.tensor(self.shift), torch.tensor(self.scale)  # as float32, as used
        sound = bool(shift.isfinite().all() and scale.isfinite().all() and (scale > 0).all())
        if not (len(shift) == len(scale) == self.shape[0] and sound):
            raise ValueError(
                "shift and scale must have a finite number for each channel or column, scale "
                "above 0"
            )
        if (
            (self.classes < 2)
            if self.target is None
            else (self.classes > 0 or not self.target[1] > 0)
        ):
            raise ValueError(
                "it must have at least two classes, or the mean and the s.d. (above 0) of a number"
            )
        return self


def content(dataset: Dataset) -> str:
    """SHA-256 of a data set's content in its order: all labels, and up to 1,000 evenly
    spaced rows.
    """
    x, y = dataset.x, dataset.y
    digest = hashlib.sha256(f"{x.dtype.str} {x.shape} {len(dataset.classes)}".encode())
    for part in (y.astype("<f8" if y.dtype.kind == "f" else "<i8"), x[:: max(1, len(x) // 1000)]):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def rows_digest(rows: np.ndarray) -> str:
    """SHA-256 of row indices, sorted."""
    return hashlib.sha256(np.sort(rows).astype("<i8").tobytes()).hexdigest()


def write(file: Path, module: nn.Module, values: Mapping[str, Any]) -> Card:
    """Write a module's weights and card atomically; equal weights give equal bytes.

    Args:
        file: the path; its folder is created if missing.
        module: its state dict is written.
        values: of a `Card`, without the checksum.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {
        k: v.detach().cpu().clone(memory_format=torch.contiguous_format)
        for k, v in module.state_dict().items()
    }
    card = Card(**values, weights_sha256=_checksum(tensors))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save(tensors, {KEY: card.model_dump_json()}))
    return card


def read_card(file: Path) -> Card | None:
    """The card of a file; None for a plain file of weights. Reads only the header.

    Raises:
        CheckpointError: the file is missing or not safetensors, or its card is invalid.
    """
    with _opened(file) as opened:
        text = (opened.metadata() or {}).get(KEY)
    if text is None:
        return None
    if len(text) > MAX_CARD_BYTES:
        raise CheckpointError(
            f"{file} has a card of more than {MAX_CARD_BYTES:,} characters: copy the file again"
        )
    try:
        return Card.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "its card"
        raise CheckpointError(
            f"{file} has an invalid card ({where}: {wrong['msg']}): write it again with fedloom "
            "pretrain"
        ) from None


def file_digest(file: Path, card: Card | None) -> str:
    """SHA-256 of the header and length of a file with a card, which has a checksum; of the whole
    file otherwise.
    """
    with _opened(file), file.open("rb") as raw:
        if card is None:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        length = int.from_bytes(raw.read(8), "little")
        return hashlib.sha256(raw.read(length) + str(file.stat().st_size).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 of the names, sizes and times of a folder's files."""
    found = {
        str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()
    }
    parts = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in sorted(found.items())]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()


def check(file: Path, module: nn.Module, what: str) -> None:
    """Check that names, shapes and types of a file's tensors fit a module. Reads only the header.

    Args:
        file: of weights.
        module: the network.
        what: the network's name, for error messages.

    Raises:
        CheckpointError: a tensor does not fit.
    """
    wanted = module.state_dict()
    with _opened(file) as opened:
        held = set(opened.keys())
        if held != set(wanted):
            missing, further = sorted(set(wanted) - held), sorted(held - set(wanted))
            which = (
                f"{missing[0]} is missing" if missing else f"{further[0]} is not in that network"
            )
            raise CheckpointError(
                f"{file} does not have the weights of {what}: {which}; set the model and norm it "
                "was trained with"
            )
        for name, tensor in wanted.items():
            part = opened.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            if (shape, kind) != (tuple(tensor.shape), _TYPES.get(tensor.dtype)):
                single = shape == tuple(tensor.shape) and tensor.dtype == torch.float32
                mend = (
                    "save it as float32"
                    if single
                    else "set the model, norm and data it was trained with"
                )
                raise CheckpointError(
                    f"{file} does not have the weights of {what}: {name} is {kind} of shape "
                    f"{shape}, not {_TYPES.get(tensor.dtype)} of shape {tuple(tensor.shape)}; "
                    f"{mend}"
                )


def fill(file: Path, module: nn.Module, what: str, card: Card | None = None) -> None:
    """Load a file's weights into a module.

    Raises:
        CheckpointError: they do not fit, are not finite, or differ from the card's checksum.
    """
    check(file, module, what)
    with _opened(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    if card is not None and card.weights_sha256 != _checksum(tensors):
        raise CheckpointError(
            f"{file} is damaged: its checksum differs from that of its card; copy it again"
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{file} has non-finite values in {name}: use another file")
    module.load_state_dict(tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file's header and tensors, which are read lazily."""
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}: write one with fedloom pretrain")
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{file} is larger than {MAX_BYTES:,} bytes: use a smaller model")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file ({error}): write one with fedloom pretrain, or with "
            "safetensors.torch.save_file(model.state_dict(), file)"
        ) from None
