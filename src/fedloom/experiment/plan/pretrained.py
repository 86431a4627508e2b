"""The server's pretrained model, from a file, from training on the server's rows, or a published
one. It is checked before any work and loaded when a method uses it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from fedloom import models
from fedloom.core.errors import ConfigError, warn_once
from fedloom.core.objects import is_object
from fedloom.core.rng import stream
from fedloom.core.task import Classes, Number, Task
from fedloom.data.dataset import Dataset, DatasetLike
from fedloom.experiment.config.pretrained import AUTO, TRAINING, PretrainedConfig
from fedloom.experiment.plan import weights
from fedloom.experiment.plan.assignment import task_of
from fedloom.experiment.plan.pretraining import Training, trained_file
from fedloom.models import external
from fedloom.models.parts import Norm
from fedloom.models.rescaled import Level, Rescaled

SEED = int(stream(0, "encoder's weights").integers(2**31))
"""Seed of an encoder's initial weights."""


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
    """The inputs and outputs of a network in a run: shape of a row, what is predicted, and
    standardization.
    """

    shape: tuple[int, ...]
    task: Task
    level: Level

    @classmethod
    def of(cls, dataset: DatasetLike, variance: bool) -> "_Inputs":
        """Those of a data set; `variance`: whether networks predict the variance of a number."""
        level = (tuple(dataset.shift.tolist()), tuple(dataset.scale.tolist()))
        return cls(dataset.input_shape, task_of(dataset, variance), level)

    def bare(self, model: str, norm: Norm | None, seed: int) -> nn.Module:
        """A network without rescaling of inputs."""
        return models.build(model, self.shape, self.task.width, norm=norm, seed=seed)

    def leveled(self, net: nn.Module, wanted: Level) -> nn.Module:
        """The network, rescaling these inputs to the standardization it was trained with."""
        return net if wanted == self.level else Rescaled(net, self.level, wanted, len(self.shape))

    def build(self, model: str, norm: Norm | None, level: Level) -> nn.Module:
        """A network for these inputs, with fixed initial weights."""
        return self.leveled(self.bare(model, norm, SEED), level)

    def fill(
        self, file: Path, card: weights.Card | None, model: str, norm: Norm | None
    ) -> nn.Module:
        """A network for these inputs, with the weights of a file."""
        net = self.bare(model, norm, 0)
        weights.fill(file, net, model, card)
        return self.leveled(net, self.level if card is None else (card.shift, card.scale))

    def train(self, training: Training) -> nn.Module:
        """The trained network from the cache; it is trained first if missing."""
        file = trained_file(training)
        return self.fill(file, weights.read_card(file), training.model, training.norm)


def server_pretrained(
    cfg: PretrainedConfig,
    dataset: DatasetLike,
    rows: np.ndarray,
    device: str,
    variance: bool = False,
) -> Pretrained | None:
    """The server's pretrained model, if any: checked, but loaded or trained only on use.

    Args:
        cfg: the section.
        dataset: of the run, or its schema.
        rows: (n,) indices of the server's rows.
        device: for training.
        variance: whether networks predict the variance of a number.

    Raises:
        ConfigError: the file's model was trained on other rows of this data set, on other inputs,
            or for another label.
        CheckpointError: the file is missing or invalid.
        ModelError: the network is unknown, or does not fit the rows.
    """
    inputs = _Inputs.of(dataset, variance)
    if cfg.file is not None:
        return _from_file(cfg, Path(cfg.file), dataset, rows, inputs)
    if cfg.model is None:
        return None
    encoder = architecture(cfg, dataset, variance)
    if cfg.to_train:
        assert isinstance(dataset, Dataset)  # its server has rows
        training = training_of(cfg, dataset, rows, device, variance)
        encoder()  # raises ModelError if it does not fit
        return Pretrained(partial(inputs.train, training), encoder, training.key)
    warn_once(
        f"pretrained: the training data of {cfg.model} are unknown: they may include client or "
        "test rows"
    )
    if is_object(cfg.model):
        return Pretrained(encoder, encoder, hashlib.sha256(cfg.model.encode()).hexdigest())
    foreign = partial(external.build, cfg.model, inputs.shape, inputs.task.width, *inputs.level)
    folder = Path(cfg.model.removeprefix("hf:"))
    held = weights.folder_digest(folder) if cfg.model.startswith("hf:") and folder.is_dir() else ""
    return Pretrained(foreign, encoder, hashlib.sha256(f"{cfg.model}{held}".encode()).hexdigest())


def training_of(
    cfg: PretrainedConfig, dataset: Dataset, rows: np.ndarray, device: str, variance: bool = False
) -> Training:
    """The training of the section's model on the server's rows (n,) of a data set."""
    assert cfg.model not in (AUTO, None)
    settings = {name: getattr(cfg, name) for name in TRAINING}
    return Training(
        dataset, rows, cfg.model, cfg.norm, **settings, device=device, variance=variance
    )


def architecture(
    cfg: PretrainedConfig, dataset: DatasetLike, variance: bool = False
) -> Callable[[], nn.Module]:
    """A function that builds the section's network with fixed initial weights; reads no file and
    trains nothing.
    """
    inputs = _Inputs.of(dataset, variance)
    assert cfg.model not in (AUTO, None)
    if external.is_external(cfg.model):
        return partial(
            external.build, cfg.model, inputs.shape, inputs.task.width, *inputs.level, seed=SEED
        )
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
            f"pretrained.file: {file} does not name its network: set pretrained.model and "
            "pretrained.norm, or write the file with fedloom pretrain"
        )
    else:
        warn_once(
            f"pretrained: the training data of {file} are unknown: they may include client or "
            "test rows"
        )
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
        ConfigError: the file's model was trained with another standardization, or the model is in a
            folder.
        CheckpointError: the file is missing or invalid.
    """
    if (
        cfg.model is not None
        and cfg.model.startswith("hf:")
        and Path(cfg.model.removeprefix("hf:")).is_absolute()
    ):
        raise ConfigError(
            f"pretrained.model: nodes cannot read the folder {cfg.model}: name a published model"
        )
    card = None if cfg.file is None else weights.read_card(Path(cfg.file))
    if card is None:
        return PretrainedConfig(model=cfg.model, norm=cfg.norm)
    if (card.shift, card.scale) != _Inputs.of(dataset, False).level:
        raise ConfigError(
            f"pretrained.file: {cfg.file} was trained with another standardization of "
            f"{card.dataset}, which nodes do not have: pretrain a model with this config"
        )
    return PretrainedConfig(model=card.model, norm=card.norm)


def _suits(card: weights.Card, cfg: PretrainedConfig, file: Path, inputs: _Inputs) -> None:
    """Refuse a file whose card contradicts the config or the run's inputs."""
    for setting in ("model", "norm", *cfg.changed):
        named, own = getattr(cfg, setting), getattr(card, setting)
        if named not in (None, own):
            raise ConfigError(
                f"pretrained.{setting}: {file} was made with {'none' if own is None else own}, "
                f"not {named}: leave the setting out, or pretrain a new model"
            )
    made = Classes(card.classes) if card.target is None else Number(*card.target, card.variance)
    if (card.shape, made) != (inputs.shape, inputs.task):
        raise ConfigError(
            f"pretrained.file: {file} is for inputs of shape {card.shape} and {_said(made)} "
            f"({card.dataset}), not {inputs.shape} and {_said(inputs.task)}; pretrain one on "
            "this data set"
        )


def _said(task: Task) -> str:
    if isinstance(task, Classes):
        return f"{task.width} classes"
    return (
        f"a number of mean {task.shift:g} and s.d. "
        f"{task.scale:g}{' with its variance' if task.variance else ''}"
    )


def _disjoint(card: weights.Card, file: Path, dataset: DatasetLike, rows: np.ndarray) -> None:
    """Refuse a model that was trained on other rows of this data set than the server's."""
    if not isinstance(dataset, Dataset) or card.content_sha256 != weights.content(dataset):
        warn_once(
            f"pretrained: {file} was trained on {card.dataset}, whose content differs from this "
            f"run's {dataset.name}: its training rows may include client or test rows"
        )
    elif card.rows_sha256 != weights.rows_digest(rows):
        raise ConfigError(
            f"pretrained.file: {file} was trained on {card.rows:,} rows of {card.dataset} which "
            f"are not the {len(rows):,} rows of this run's server, so they may include client or "
            f"test rows: set data.server_rows={card.rows}, or pretrain it with this config "
            f"(fedloom pretrain CONFIG --model {card.model})"
        )
