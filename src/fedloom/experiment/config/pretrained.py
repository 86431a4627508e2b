"""`[pretrained]`: the settings of the server's pretrained model."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedloom import models
from fedloom.core.errors import ConfigError, ModelError
from fedloom.core.method import Method
from fedloom.core.objects import is_object
from fedloom.experiment.config.section import Section
from fedloom.models import external
from fedloom.models.parts import Norm

AUTO = "auto"
"""As the name of a model: the clients' network."""
TRAINING = ("epochs", "lr", "batch_size", "seed")
"""Settings of training, which do not apply to existing models."""


class PretrainedConfig(Section):
    """`[pretrained]`: the server's pretrained model: a file, a published model, or one trained on
    the server's rows.
    """

    file: str | None = None
    """A safetensors file, as `fedloom pretrain` writes it. A plain one of a state dict needs
    `model` and `norm`.
    """
    model: str | None = None
    """A network to train on the server's rows: a name from `fedloom list models`, or
    `package.module:factory`; "auto": the network of models.pool, or the default one if it has
    several. Or a published model: `torchvision:NAME`, `hf:NAME`, `hf:FOLDER` (extra vision). None:
    "auto" if a method of the experiment needs a pretrained model and data.server_rows is not 0.
    """
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
        return (
            f"hf:{folder.absolute()}"
            if model and model.startswith("hf:") and folder.is_dir()
            else model
        )

    @model_validator(mode="after")
    def _one_source(self) -> "PretrainedConfig":
        published = self.model is not None and (
            external.is_external(self.model) or is_object(self.model)
        )
        if published and (self.file is not None or self.norm is not None):
            raise ValueError(
                f"{self.model} is a published model, so file and norm do not apply: leave them out"
            )
        if published and self.changed:
            raise ValueError(self._untrained)
        if self.norm is not None and ":" in (self.model or ""):
            raise ValueError(
                f"norm does not apply to {self.model}, which chooses its own normalization: "
                "leave norm out"
            )
        return self

    @property
    def _untrained(self) -> str:
        return (
            f"{', '.join(self.changed)} apply to training: set model to the network to train, or "
            'to "auto"'
        )

    @property
    def changed(self) -> list[str]:
        """Settings of the training that differ from their defaults; a saved config contains all
        settings.
        """
        return [
            name
            for name in TRAINING
            if getattr(self, name) != type(self).model_fields[name].default
        ]

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
                f"pretrained.norm does not apply to {network}, which chooses its own "
                "normalization: leave it out"
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
            raise ConfigError(
                "pretrained.norm needs a model: set pretrained.model, or leave norm out"
            )
        if not self.given and self.changed:
            raise ConfigError(f"pretrained: {self._untrained}")
        if "pretrained encoder" in method.needs and not self.given:
            raise ConfigError(
                f"pretrained: {method.name} needs a pretrained model at the server: set "
                "pretrained.file, or pretrained.model to train one on the server's rows, such as "
                "pretrained.model=resnet8x4"
            )
        if self.model not in (AUTO, None):
            try:
                (external if external.is_external(self.model) else models).check_name(self.model)
            except ModelError as error:
                raise ConfigError(f"pretrained.model: {error}") from None
        if self.to_train and not server:
            raise ConfigError(
                f"pretrained.model: {self.model} is trained on the server's rows, but the server "
                "has none: set data.server_rows, such as data.server_rows=1000"
            )
