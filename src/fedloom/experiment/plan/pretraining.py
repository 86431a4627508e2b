"""Trains the server's pretrained model on the server's rows, before a run.

Stochastic gradient descent as for the teachers of "Contrastive Representation Distillation" (Tian
et al., ICLR 2020) in
its code: momentum 0.9, weight decay 5e-4, and the learning rate divided by 10 after 5/8, 6/8 and
7/8 of the epochs (150, 180 and 210 of 240). Images are shifted by up to 4 pixels with zero padding,
small ones by 1/7 of their side, and color images are flipped at random. Every epoch is saved, so
that an interruption costs one epoch.

Differs: all batches of an epoch are full; the last one is filled up from the start of the epoch.
"""

import hashlib
import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import models
from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.context import epoch_plan
from fedloom.core.errors import CheckpointError, ConfigError, MessageError, ModelError, StateError
from fedloom.core.local import falling
from fedloom.core.message import Limits
from fedloom.core.network import Network
from fedloom.core.optim import SGD
from fedloom.core.rng import stream
from fedloom.core.task import Number, Task
from fedloom.data.dataset import Dataset
from fedloom.experiment.plan import weights
from fedloom.experiment.plan.assignment import task_of, training_labels
from fedloom.models.parts import Norm
from fedloom.support.paths import cache_folder, callable_at, locked, write_atomically

Progress: TypeAlias = Callable[[int, int, float], None]
"""Called after each epoch with its number, the number of epochs, and its mean loss."""
MOMENTUM, DECAY = 0.9, 5e-4
MARGIN = 4
HELD_OUT = 10_000
"""Maximum number of test rows."""
AT_ONCE = 1024
_LIMITS = Limits(max_bytes=1 << 36)
_VERSION = 2
"""Part of every cache key: increase it when the same settings give other weights."""
log = logging.getLogger("fedloom.pretraining")


@dataclass(frozen=True, eq=False)
class Training:
    """A training of a model on the server's rows.

    Attributes:
        dataset: with the standardization of the model's inputs, which must not depend on a run's
            seed.
        rows: (n,) indices of the server's rows.
        model: a name of `models.MODELS`, or `package.module:factory`.
        norm: normalization; None for the model's default.
        epochs, lr, batch_size, seed: of the training.
        device: where it runs.
        variance: whether the network also predicts the variance of a number.
    """

    dataset: Dataset
    rows: np.ndarray
    model: str
    norm: Norm | None
    epochs: int
    lr: float
    batch_size: int
    seed: int
    device: str = "cpu"
    variance: bool = False

    @property
    def task(self) -> Task:
        """What the model predicts."""
        return task_of(self.dataset, self.variance)

    @property
    def resolved_norm(self) -> Norm | None:
        """The model's normalization; None for a network of the user."""
        return self.norm or (None if ":" in self.model else models.MODELS[self.model].norm)

    def build(self) -> torch.nn.Module:
        """The network with its initial weights."""
        first = int(stream(self.seed, "pretrained initial weights").integers(2**31))
        return models.build(
            self.model, self.dataset.input_shape, self.task.width, norm=self.norm, seed=first
        )

    @cached_property
    def facts(self) -> dict[str, object]:
        """The values of a file's card."""
        number = (
            {}
            if self.dataset.classes
            else {"target": self.dataset.target, "variance": self.variance}
        )
        return {
            "model": self.model,
            "norm": self.resolved_norm,
            "shape": self.dataset.input_shape,
            "classes": len(self.dataset.classes),
            **number,
            "dataset": self.dataset.name,
            "content_sha256": weights.content(self.dataset),
            "rows": len(self.rows),
            "rows_sha256": weights.rows_digest(self.rows),
            "shift": tuple(self.dataset.shift.tolist()),
            "scale": tuple(self.dataset.scale.tolist()),
            "epochs": self.epochs,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    @cached_property
    def key(self) -> str:
        """Digest of everything that affects the weights; the name of the data set does not."""
        moving = {k: v for k, v in self.facts.items() if k != "dataset"}
        parts = [_VERSION, sorted(moving.items()), self._source()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _source(self) -> str:
        """Digest of the file that defines a network of the user; "" for other networks."""
        if ":" not in self.model:
            return ""
        with suppress(TypeError, OSError):
            path = inspect.getsourcefile(callable_at(self.model, ModelError))
            return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
        return ""


def cached(training: Training) -> Path:
    """The path of a trained model in the cache."""
    return cache_folder("models") / f"{training.key}.safetensors"


def trained_file(training: Training) -> Path:
    """The path of the trained model in the cache; it is trained first if missing. Progress is
    logged.

    Raises:
        ConfigError, ModelError: see `train`.
    """
    file = cached(training)
    with _writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        (lock := file.with_name(f"{file.name}.lock")).touch()
    with locked(lock, wait=True):  # another process waits, and then finds the file
        with suppress(CheckpointError):  # a corrupt file is trained again
            card = weights.read_card(file)
            if card is not None:
                weights.fill(file, training.build(), training.model, card)
                return file
        log.info(
            "pretraining %s on the server's %s rows, once: it is kept in %s",
            training.model,
            f"{len(training.rows):,}",
            file,
        )
        card = train(training, file, _log_epoch)
        log.info("pretrained %s: %s on rows it has not seen", training.model, card.score)
    return file


def _log_epoch(epoch: int, epochs: int, loss: float) -> None:
    if 10 * epoch // epochs > 10 * (epoch - 1) // epochs:  # ten lines at most
        log.info("pretraining: epoch %d/%d, loss %.3f", epoch, epochs, loss)


def train(training: Training, file: Path, progress: Progress) -> weights.Card:
    """Train and write the file. An interrupted training resumes after its last epoch, with the same
    result.

    Args:
        training: the model, rows and settings.
        file: to write; `file.part` has the completed epochs until then.
        progress: called after each epoch.

    Raises:
        ConfigError: the file cannot be written.
        ModelError: the network does not fit the rows, or training diverged.
    """
    part = file.with_name(f"{file.name}.part")
    with _writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        # fails now rather than after the first epoch
        tempfile.TemporaryFile(dir=file.parent).close()
    network, done = _begin(part, training)
    with _writing(file):
        for epoch in range(done, training.epochs):
            loss = _pass(training, network, epoch)
            if not np.isfinite(loss):
                raise ModelError(
                    f"pretraining {training.model} diverged in epoch {epoch + 1}: lower "
                    f"pretrained.lr (now {training.lr:g}), or change pretrained.norm"
                )
            tree: Any = {"key": training.key, "epoch": epoch + 1, **network.state()}
            write_atomically(part, message.encode(tree, _LIMITS))
            progress(epoch + 1, training.epochs, loss)
        values = {**training.facts, "fedloom": __version__, **_held_out(training, network)}
        card = weights.write(file, network.module, values)
        part.unlink(missing_ok=True)
    return card


def _optimizer(training: Training, epoch: int) -> SGD:
    return SGD(training.lr * falling(epoch, training.epochs), MOMENTUM, DECAY)


def _begin(part: Path, training: Training) -> tuple[Network, int]:
    """The network and the number of completed epochs, with the weights and momentum after these."""

    def first() -> Network:
        return Network(training.build().to(training.device), _optimizer(training, 0))

    network = first()
    if not part.exists():
        return network, 0
    with suppress(OSError, MessageError, StateError, KeyError, TypeError, ValueError):
        tree: Any = message.decode(part.read_bytes(), _LIMITS)
        if tree["key"] == training.key:
            epoch = int(tree["epoch"])
            for name in ("params", "buffers", "opt"):
                network.load(name, tree[name])
            log.info("resuming pretraining after epoch %d", epoch)
            return network, epoch
    log.warning("%s is damaged or from another training; pretraining starts again", part)
    return first(), 0  # the other may be partly loaded


def _pass(training: Training, network: Network, epoch: int) -> float:
    """One epoch; its mean loss."""
    data, device = training.dataset, training.device
    rng = stream(training.seed, "pretraining", epoch)
    network.optimizer = _optimizer(training, epoch)
    losses, labels, loss = [], training_labels(data), training.task.loss
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**31)))  # for dropout
        for which in epoch_plan(rng, len(training.rows), 1, training.batch_size).numpy():
            rows = training.rows[which]
            raw = torch.from_numpy(data.x[rows]).to(device)
            x = standardized(data, moved(raw, rng) if data.kind == "image" else raw)
            y = torch.from_numpy(labels[rows]).to(device)
            losses.append(network.minimize(lambda x, y: loss(network(x), y), x, y))
    return float(torch.stack(losses).mean())


def moved(raw: Tensor, rng: np.random.Generator) -> Tensor:
    """Images (B, C, H, W), randomly shifted with zero padding; color images are also randomly
    flipped.
    """
    count, channels, height, width = raw.shape
    margin = min(MARGIN, min(height, width) // 7)
    windows = F.pad(raw, [margin] * 4).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.from_numpy(rng.integers(2 * margin + 1, size=(2, count))).to(raw.device)
    found = windows[torch.arange(count, device=raw.device), :, down, right]
    if channels == 1:
        return found
    mirrored = torch.from_numpy(rng.random(count) < 0.5).to(raw.device)
    return torch.where(mirrored[:, None, None, None], found.flip(3), found)


def standardized(data: Dataset, raw: Tensor) -> Tensor:
    """Standardize rows (B, ...)."""
    level = (-1, *[1] * (raw.dim() - 2))
    shift, scale = (
        torch.from_numpy(a).to(raw.device).view(level) for a in (data.shift, data.scale)
    )
    return raw.sub(shift).div_(scale)


def _held_out(training: Training, network: Network) -> dict[str, float | int]:
    """Accuracy, or the error of a number, on the official test rows, or on all rows not at the
    server; and the number of these rows, as the values of a card.
    """
    data = training.dataset
    others = (
        np.setdiff1d(np.arange(len(data.y)), training.rows)
        if data.test is None
        else np.sort(data.test)
    )
    others = others[:: -(-len(others) // HELD_OUT)] if len(others) else others
    labels, task, total = training_labels(data), training.task, 0.0
    for start in range(0, len(others), AT_ONCE):
        rows = others[start : start + AT_ONCE]
        x = standardized(data, torch.from_numpy(data.x[rows]).to(training.device))
        found, y = task.predicted(network.infer(x)).cpu().numpy(), labels[rows]
        total += (
            float(((found - y) ** 2).sum()) if task.kind == "number" else int((found == y).sum())
        )
    mean = total / max(1, len(others))
    score = {"rmse": mean**0.5 * task.scale} if isinstance(task, Number) else {"accuracy": mean}
    return {**score, "test_rows": len(others)}


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {file} ({error.strerror}): choose another --out, or free disk space"
        ) from None
