"""`[pretrained]`: the server's pretrained model, from a file, from training on the server's rows, or a published one.
It is checked before any work and loaded when a method uses it.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, field_validator, model_validator
from torch import nn

from fedloom import models
from fedloom.core.errors import ConfigError, ModelError, warn_once
from fedloom.core.method import Method
from fedloom.core.objects import is_object
from fedloom.core.rng import stream
from fedloom.data.dataset import Dataset, DatasetLike
from fedloom.experiment.config.section import Section
from fedloom.experiment.plan.pretraining import Training, trained_file
from fedloom.experiment.run import weights
from fedloom.models import external
from fedloom.models.parts import Norm
from fedloom.models.rescaled import Level, Rescaled

AUTO = "auto"
"""As the name of a model: the clients' network."""
SEED = int(stream(0, "encoder's weights").integers(2**31))
"""Seed of an encoder's initial weights."""
TRAINING = ("epochs", "lr", "batch_size", "seed")
"""Settings of training, which do not apply to existing models."""


class PretrainedConfig(Section):
    """`[pretrained]`: the server's pretrained model: a file, a published model, or one trained on the server's rows."""

    file: str | None = None
    """A safetensors file, as `fedloom pretrain` writes it. A plain one of a state dict needs `model` and `norm`."""
    model: str | None = None
    """A network to train on the server's rows: a name from `fedloom list models`, or `package.module:factory`; "auto":
    the network of models.pool, or the default one if it has several. Or a published model: `torchvision:NAME`,
    `hf:NAME`, `hf:FOLDER` (extra vision). None: "auto" if a method of the experiment needs a pretrained model and
    data.server_rows is not 0."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalization; None for the network's default, or that of models.norm for "auto"."""
    epochs: int = Field(20, ge=1)
    """Passes over the server's rows."""
    lr: float = Field(0.05, gt=0)
    """Learning rate of SGD, divided by 10 after 5/8, 6/8 and 7/8 of the epochs."""
    batch_size: int = Field(64, ge=1)
    """Batch size."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the training, independent of the run's seed, so that all seeds use one model."""

    @field_validator("file")
    @classmethod
    def _whole(cls, file: str | None) -> str | None:
        """Make the path absolute, as the config may be read from another folder."""
        return (
            None if file is None else str(Path(os.path.expanduser(file)).absolute())
        )  # Path's own raises for users unknown

    @field_validator("model")
    @classmethod
    def _folder(cls, model: str | None) -> str | None:
        folder = Path(os.path.expanduser((model or "").removeprefix("hf:")))
        return f"hf:{folder.absolute()}" if model and model.startswith("hf:") and folder.is_dir() else model

    @model_validator(mode="after")
    def _one_source(self) -> "PretrainedConfig":
        published = self.model is not None and (external.is_external(self.model) or is_object(self.model))
        if published and (self.file is not None or self.norm is not None):
            raise ValueError(f"{self.model} is a published model, so file and norm do not apply: leave them out")
        if published and self.changed:
            raise ValueError(self._untrained)
        if self.norm is not None and ":" in (self.model or ""):
            raise ValueError(
                f"norm does not apply to {self.model}, which chooses its own normalization: leave norm out"
            )
        return self

    @property
    def _untrained(self) -> str:
        return f'{", ".join(self.changed)} apply to training: set model to the network to train, or to "auto"'

    @property
    def changed(self) -> list[str]:
        """Settings of the training that differ from their defaults; a saved config contains all settings."""
        return [name for name in TRAINING if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def given(self) -> bool:
        """Whether there is a pretrained model."""
        return self.file is not None or self.model is not None

    @property
    def to_train(self) -> bool:
        """Whether it is trained on the server's rows."""
        existing = self.model is None or external.is_external(self.model) or is_object(self.model)
        return self.file is None and not existing

    def like(self, network: str, norm: Norm | None) -> "PretrainedConfig":
        """The section with a clients' network and its norm in place of "auto".

        Raises:
            ConfigError: a norm is set for a network of the user.
        """
        if self.model != AUTO:
            return self
        if self.norm is not None and ":" in network:
            raise ConfigError(
                f"pretrained.norm does not apply to {network}, which chooses its own normalization: leave it out"
            )
        return self.model_copy(update={"model": network, "norm": self.norm or norm})

    def check(self, method: Method, server: bool) -> None:
        """Refuse contradictory settings, before anything is read.

        Args:
            method: of the run.
            server: whether the server has rows.

        Raises:
            ConfigError: the settings contradict each other.
        """
        if not self.given and self.norm is not None:
            raise ConfigError("pretrained.norm needs a model: set pretrained.model, or leave norm out")
        if not self.given and self.changed:
            raise ConfigError(f"pretrained: {self._untrained}")
        if "pretrained encoder" in method.needs and not self.given:
            raise ConfigError(
                f"pretrained: {method.name} needs a pretrained model at the server: set pretrained.file, or "
                "pretrained.model to train one on the server's rows, such as pretrained.model=resnet8x4"
            )
        if self.model not in (AUTO, None):
            try:
                (external if external.is_external(self.model) else models).check_name(self.model)
            except ModelError as error:
                raise ConfigError(f"pretrained.model: {error}") from None
        if self.to_train and not server:
            raise ConfigError(
                f"pretrained.model: {self.model} is trained on the server's rows, but the server has none: set "
                "data.server_rows, such as data.server_rows=1000"
            )

    def training(self, dataset: Dataset, rows: np.ndarray, device: str) -> Training:
        """The training of the model on the server's rows (n,) of a data set."""
        assert self.model not in (AUTO, None)
        settings = {name: getattr(self, name) for name in TRAINING}
        return Training(dataset, rows, self.model, self.norm, **settings, device=device)


@dataclass(frozen=True)
class Pretrained:
    """The server's pretrained model in a run.

    Attributes:
        teacher: builds the model with its pretrained weights.
        encoder: builds the same architecture with fixed initial weights.
        digest: of the model.
    """

    teacher: Callable[[], nn.Module]
    encoder: Callable[[], nn.Module]
    digest: str


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a network in a run: shape of a row, number of classes, and standardization."""

    shape: tuple[int, ...]
    classes: int
    level: Level

    @classmethod
    def of(cls, dataset: DatasetLike) -> "_Inputs":
        """The inputs of a data set."""
        level = (tuple(dataset.shift.tolist()), tuple(dataset.scale.tolist()))
        return cls(dataset.input_shape, len(dataset.classes), level)

    def bare(self, model: str, norm: Norm | None, seed: int) -> nn.Module:
        """A network without rescaling of inputs."""
        return models.build(model, self.shape, self.classes, norm=norm, seed=seed)

    def leveled(self, net: nn.Module, wanted: Level) -> nn.Module:
        """The network, rescaling these inputs to the standardization it was trained with."""
        return net if wanted == self.level else Rescaled(net, self.level, wanted, len(self.shape))

    def build(self, model: str, norm: Norm | None, level: Level) -> nn.Module:
        """A network for these inputs, with fixed initial weights."""
        return self.leveled(self.bare(model, norm, SEED), level)

    def fill(self, file: Path, card: weights.Card | None, model: str, norm: Norm | None) -> nn.Module:
        """A network for these inputs, with the weights of a file."""
        net = self.bare(model, norm, 0)
        weights.fill(file, net, model, card)
        return self.leveled(net, self.level if card is None else (card.shift, card.scale))

    def train(self, training: Training) -> nn.Module:
        """The trained network from the cache; it is trained first if missing."""
        file = trained_file(training)
        return self.fill(file, weights.read_card(file), training.model, training.norm)


def server_pretrained(cfg: PretrainedConfig, dataset: DatasetLike, rows: np.ndarray, device: str) -> Pretrained | None:
    """The server's pretrained model, if any: checked, but loaded or trained only on use.

    Args:
        cfg: the section.
        dataset: of the run, or its schema.
        rows: (n,) indices of the server's rows.
        device: for training.

    Raises:
        ConfigError: the file's model was trained on other rows of this data set, or on other inputs or classes.
        CheckpointError: the file is missing or invalid.
        ModelError: the network is unknown, or does not fit the rows.
    """
    inputs = _Inputs.of(dataset)
    if cfg.file is not None:
        return _from_file(cfg, Path(cfg.file), dataset, rows, inputs)
    if cfg.model is None:
        return None
    encoder = architecture(cfg, dataset)
    if cfg.to_train:
        assert isinstance(dataset, Dataset)  # its server has rows
        training = cfg.training(dataset, rows, device)
        encoder()  # raises ModelError if it does not fit
        return Pretrained(partial(inputs.train, training), encoder, training.key)
    warn_once(f"pretrained: the training data of {cfg.model} are unknown: they may include client or test rows")
    if is_object(cfg.model):
        return Pretrained(encoder, encoder, hashlib.sha256(cfg.model.encode()).hexdigest())
    foreign = partial(external.build, cfg.model, inputs.shape, inputs.classes, *inputs.level)
    folder = Path(cfg.model.removeprefix("hf:"))
    held = weights.folder_digest(folder) if cfg.model.startswith("hf:") and folder.is_dir() else ""
    return Pretrained(foreign, encoder, hashlib.sha256(f"{cfg.model}{held}".encode()).hexdigest())


def architecture(cfg: PretrainedConfig, dataset: DatasetLike) -> Callable[[], nn.Module]:
    """A function that builds the section's network with fixed initial weights; reads no file and trains nothing."""
    inputs = _Inputs.of(dataset)
    assert cfg.model not in (AUTO, None)
    if external.is_external(cfg.model):
        return partial(external.build, cfg.model, inputs.shape, inputs.classes, *inputs.level, seed=SEED)
    return partial(inputs.build, cfg.model, cfg.norm, inputs.level)


def _from_file(
    cfg: PretrainedConfig, file: Path, dataset: DatasetLike, rows: np.ndarray, inputs: _Inputs
) -> Pretrained:
    card = weights.read_card(file)
    if card is not None:
        _suits(card, cfg, file, inputs)
        _disjoint(card, file, dataset, rows)
    elif cfg.model is None:
        raise ConfigError(
            f"pretrained.file: {file} does not name its network: set pretrained.model and pretrained.norm, or "
            "write the file with fedloom pretrain"
        )
    else:
        warn_once(f"pretrained: the training data of {file} are unknown: they may include client or test rows")
    model, norm = (cfg.model, cfg.norm) if card is None else (card.model, card.norm)
    assert model is not None
    models.check_name(model)
    level = inputs.level if card is None else (card.shift, card.scale)
    encoder = partial(inputs.build, model, norm, level)
    weights.check(file, inputs.bare(model, norm, SEED), model)
    teacher = partial(inputs.fill, file, card, model, norm)
    return Pretrained(teacher, encoder, weights.file_digest(file, card))


def named(cfg: PretrainedConfig, dataset: DatasetLike) -> PretrainedConfig:
    """The section with the network's name only, for nodes, which have no file.

    Raises:
        ConfigError: the file's model was trained with another standardization, or the model is in a folder.
        CheckpointError: the file is missing or invalid.
    """
    if cfg.model is not None and cfg.model.startswith("hf:") and Path(cfg.model.removeprefix("hf:")).is_absolute():
        raise ConfigError(f"pretrained.model: nodes cannot read the folder {cfg.model}: name a published model")
    card = None if cfg.file is None else weights.read_card(Path(cfg.file))
    if card is None:
        return PretrainedConfig(model=cfg.model, norm=cfg.norm)
    if (card.shift, card.scale) != _Inputs.of(dataset).level:
        raise ConfigError(
            f"pretrained.file: {cfg.file} was trained with another standardization of {card.dataset}, which nodes do "
            "not have: pretrain a model with this config"
        )
    return PretrainedConfig(model=card.model, norm=card.norm)


def _suits(card: weights.Card, cfg: PretrainedConfig, file: Path, inputs: _Inputs) -> None:
    """Refuse a file whose card contradicts the config or the run's inputs."""
    for setting in ("model", "norm", *cfg.changed):
        named, own = getattr(cfg, setting), getattr(card, setting)
        if named not in (None, own):
            raise ConfigError(
                f"pretrained.{setting}: {file} was made with {'none' if own is None else own}, not {named}: leave the "
                "setting out, or pretrain a new model"
            )
    if (card.shape, card.classes) != (inputs.shape, inputs.classes):
        raise ConfigError(
            f"pretrained.file: {file} is for inputs of shape {card.shape} and {card.classes} classes ({card.dataset}), "
            f"not {inputs.shape} and {inputs.classes}; pretrain one on this data set"
        )


def _disjoint(card: weights.Card, file: Path, dataset: DatasetLike, rows: np.ndarray) -> None:
    """Refuse a model that was trained on other rows of this data set than the server's."""
    if not isinstance(dataset, Dataset) or card.content_sha256 != weights.content(dataset):
        warn_once(
            f"pretrained: {file} was trained on {card.dataset}, whose content differs from this run's {dataset.name}: "
            "its training rows may include client or test rows"
        )
    elif card.rows_sha256 != weights.rows_digest(rows):
        raise ConfigError(
            f"pretrained.file: {file} was trained on {card.rows:,} rows of {card.dataset} which are not the "
            f"{len(rows):,} rows of this run's server, so they may include client or test rows: "
            f"set data.server_rows={card.rows}, or pretrain it with this config "
            f"(fedloom pretrain CONFIG --model {card.model})"
        )
