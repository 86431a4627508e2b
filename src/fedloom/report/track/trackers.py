"""TensorBoard, MLflow and Weights & Biases behind one small interface.

Each is configured by its own environment variables, receives a run's settings and metrics, and
records nothing else about the machine.
"""

import logging
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeAlias

from fedloom.core.errors import ConfigError, did_you_mean

Plain: TypeAlias = str | int | float | bool
PROJECT = "fedloom"
"""The default project or experiment."""


@dataclass(frozen=True)
class RunInfo:
    """The metadata of a run.

    Attributes:
        folder: the run's folder.
        settings: the run's config by dotted key.
        config: the whole config as TOML.
        started: start time in milliseconds since 1970.
    """

    name: str
    folder: Path
    settings: Mapping[str, Plain]
    config: str
    started: int


class Tracker(Protocol):
    """Receives the metrics of one run. Methods may raise any exception."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """Create or continue a run.

        Args:
            known: the return value of an earlier `begin`, to continue that run; empty for a new
                run.
            step: the last step sent; -1 for none.

        Returns:
            The tracker's identifier of the run.
        """

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics at a step, which increases from call to call."""

    def end(self, result: Mapping[str, float] | None) -> None:
        """Close the run and wait for the upload; with `result` None, it is unfinished and may
        continue later.
        """


class TensorBoard:
    """Event files in the subfolder `tensorboard` of the run's folder."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=step + 1 if known else None
        )
        if not known:
            self._writer.add_text(
                "config", "\n".join(f"    {line}" for line in run.config.splitlines())
            )
        return "tensorboard"

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        if result is not None:
            lines = [
                "| result | |",
                "|---|---:|",
                *(f"| {name} | {value:.6g} |" for name, value in result.items()),
            ]
            self._writer.add_text("result", "\n".join(lines))
        self._writer.close()


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    BATCH = 100
    """Maximum number of settings or metrics per request."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # they log their database migrations
            logging.getLogger(name).setLevel("WARNING")
        self._client, self._started = MlflowClient(), run.started
        if known:
            self._client.update_run(known, status="RUNNING")
            self._run = known
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        self._run = self._client.create_run(
            experiment_id, run_name=run.name, start_time=run.started
        ).info.run_id
        params = [Param(_allowed(key), str(value)) for key, value in run.settings.items()]
        for start in range(0, len(params), self.BATCH):
            self._client.log_batch(self._run, params=params[start : start + self.BATCH])
        return self._run

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        # the same at every upload, so that MLflow drops duplicates
        timestamp = self._started + step
        metrics = [Metric(_allowed(name), value, timestamp, step) for name, value in values.items()]
        for start in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + self.BATCH])

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        for name, value in (result or {}).items():
            self._client.log_metric(self._run, _allowed(f"result/{name}"), value, self._started, 0)
        self._client.set_terminated(self._run, "KILLED" if result is None else "FINISHED")


class WandB:
    """A run of Weights & Biases in the project WANDB_PROJECT; with WANDB_MODE=offline, a folder for
    `wandb sync`.
    """

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        import wandb

        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        quiet |= {"x_disable_meta": True, "x_disable_stats": True, "x_save_requirements": False}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=known or uuid.uuid4().hex[:12],
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**quiet),
        )
        return str(self._run.id)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        for name, value in (result or {}).items():
            self._run.summary[f"result/{name}"] = value
        self._run.finish(exit_code=0)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
"""By name, which is also that of the extra and of the module."""


def check(names: Sequence[str]) -> tuple[str, ...]:
    """The names without duplicates.

    Raises:
        ConfigError: a tracker is unknown or not installed.
    """
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise ConfigError(
                f"unknown tracker {name!r}.{hint} Valid names are {', '.join(TRACKERS)}."
            )
        spec = find_spec(name)
        # without an origin: a data folder that wandb itself created
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{name} is not installed. Install its extra: pip install -e '.[{name}]'"
            )
    return tuple(dict.fromkeys(names))


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)
