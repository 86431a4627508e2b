"""`[local]`: how parties train their own networks, whatever the method."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom import models
from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.local import EVERY_LOCAL, LocalSetting, LocalTraining, Schedule
from fedloom.core.method import Method, MethodConfig
from fedloom.experiment.config.section import Section

REPLACED: dict[LocalSetting, tuple[str, ...]] = {
    "optimizer": ("optimizer", "momentum"),
    "weight_decay": ("weight_decay",),
}
"""The settings of methods that a setting takes the place of."""


class LocalConfig(Section):
    """`[local]`: how parties train their own networks, whatever the method; None for the method's
    own.
    """

    optimizer: Literal["sgd", "adam"] | None = None
    """SGD or Adam, at the method's learning rate."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD, with optimizer = "sgd"."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay: L2 regularization with SGD, decoupled with Adam (AdamW)."""
    clip: float | None = Field(None, gt=0)
    """The largest L2 norm of a step's gradient."""
    schedule: Schedule = "constant"
    """How the learning rate falls over the rounds: `cosine` to 0; `step`, to a tenth after 5/8, 6/8
    and 7/8 of them.
    """
    class_weights: Literal["balanced"] | dict[str, float] | None = None
    """How much a row of each class counts in the loss of labels, by the class; 1 for classes that
    are not named.
    `balanced`: by each party's own training rows, so that its classes count alike.
    """

    @field_validator("class_weights", mode="before")
    @classmethod
    def _as_written(cls, weights: Any) -> Any:
        """Weights above 0 by the class as text; in Python the number of a class will do."""
        if weights in (None, "balanced"):
            return weights
        if not isinstance(weights, Mapping) or not weights:
            raise ValueError('must be "balanced", or a table such as { ill = 3.0 }')
        for name, weight in weights.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 < weight < math.inf
            ):
                raise ValueError(
                    f"must be a number above 0 for each class, not {weight!r} for {str(name)!r}"
                )
        return {str(name): float(weight) for name, weight in weights.items()}

    @model_validator(mode="after")
    def _belongs(self) -> "LocalConfig":
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                'momentum belongs to SGD: add optimizer = "sgd", or leave momentum out'
            )
        return self

    @property
    def given(self) -> tuple[LocalSetting, ...]:
        """The settings that differ from the method's own."""
        return tuple(
            name
            for name in EVERY_LOCAL
            if getattr(self, name) != type(self).model_fields[name].default
        )

    def training(self, rounds: int, classes: Sequence[str]) -> LocalTraining:
        """What parties get, in a run of so many rounds with these classes; none for a number to
        predict.

        Raises:
            ConfigError: weights of classes that the label does not have.
        """
        weights, values = self.class_weights, self.model_dump(exclude={"class_weights"})
        if weights is not None and not classes:
            raise ConfigError(
                "local.class_weights: the label is a number, which has no classes: leave it out, "
                "or set "
                'data.task = "classes" if it has'
            )
        if isinstance(weights, dict):
            if unknown := [name for name in weights if name not in classes]:
                raise ConfigError(
                    "local.class_weights: the label has no class "
                    f"{unknown[0]!r}.{did_you_mean(unknown[0], classes)}"
                )
            return LocalTraining(
                **values, rounds=rounds, class_weights=tuple(weights.get(k, 1.0) for k in classes)
            )
        return LocalTraining(**values, rounds=rounds, class_weights=weights)


def check_local(
    section: LocalConfig,
    method: Method,
    cfg: MethodConfig,
    params: Collection[str],
    pool: Collection[str],
) -> None:
    """Check that a method takes the settings.

    Args:
        section: the settings.
        method, cfg: the method, with its config.
        params: the names in the run's `params`.
        pool: the networks that the run names.

    Raises:
        ConfigError: it does not, or `params` has the same setting.
    """
    for name in section.given:
        reason = cfg.refuses_local(name)
        if name not in method.local:
            reason = method.no_local or f"its page does not declare local = ({name!r}, …)"
        if reason:
            raise ConfigError(
                f"local.{name}: {method.name} does not take it, as {reason}: leave it out, or "
                "choose another method (docs/config.md#local-training)"
            )
        if both := [setting for setting in REPLACED.get(name, ()) if setting in params]:
            raise ConfigError(
                f"local.{name} takes the place of params.{both[0]}: set one of the two"
            )
        if boxes := sorted({*pool} & models.BLACK_BOXES.keys()):
            raise ConfigError(
                f"local.{name}: the black box {boxes[0]} is not trained in steps: leave it out "
                f"of models.pool, or leave local.{name} out"
            )
    if not cfg.guarantees:
        return
    if section.clip is not None:
        raise ConfigError(
            "local.clip: with differential privacy of rows, params.dp.clip bounds each row's "
            "gradient: set that one"
        )
    if section.class_weights == "balanced":
        raise ConfigError(
            'local.class_weights: "balanced" depends on the number of rows of each class, which '
            "the noise of params.dp does not hide: give weights that you know beforehand, such "
            'as { "ill" = 3.0 }'
        )
