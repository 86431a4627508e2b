"""TensorBoard, MLflow and Weights & Biases behind one small interface.

Their own environment variables say where they write. They get a run's settings and metrics, and are asked to record
nothing else of the machine.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fedloom.core.errors import ConfigError, did_you_mean

Plain: TypeAlias = str | int | float | bool
PROJECT = "fedloom"
"""The default project or experiment."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker records of a run at its beginning.

    Attributes:
        folder: the run's.
        settings: by dotted key, as in its config.
        config: the whole as TOML.
        started: when it began, in milliseconds since 1970.
    """

    name: str
    folder: Path
    settings: Mapping[str, Plain]
    config: str
    started: int


class Tracker(Protocol):
    """Receives the metrics of one run. A method that fails raises whatever it likes."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """Begin or continue.

        Args:
            known: what an earlier `begin` returned, to continue there; empty for a new run.
            step: the last that was sent; -1 for none.

        Returns:
            The run's name there.
        """

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics after so many rounds. Steps rise."""

    def end(self, result: Mapping[str, float] | None) -> None:
        """The run is finished with these results, or with None may continue another day. Returns when all is sent."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run's own."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step + 1 if known else None)
        if not known:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in run.config.splitlines()))
        return "tensorboard"

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        if result is not None:
            lines = ["| result | |", "|---|---:|", *(f"| {name} | {value:.6g} |" for name, value in result.items())]
            self._writer.add_text("result", "\n".join(lines))
        self._writer.close()


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    BATCH = 100
    """Most settings or metrics in one request."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # they log how they make tables
            logging.getLogger(name).setLevel("WARNING")
        self._client, self._started = MlflowClient(), run.started
        if known:
            self._client.update_run(known, status="RUNNING")
            self._run = known
            return known
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(called)
        place = self._client.create_experiment(called) if experiment is None else experiment.experiment_id
        self._run = self._client.create_run(place, run_name=run.name, start_time=run.started).info.run_id
        params = [Param(_allowed(key), str(value)) for key, value in run.settings.items()]
        for batch in _batches(params, self.BATCH):
            self._client.log_batch(self._run, params=batch)
        return self._run

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        at = self._started + step  # a time that is the same if it is sent again: then it counts once
        metrics = [Metric(_allowed(name), value, at, step) for name, value in values.items()]
        for batch in _batches(metrics, self.BATCH):
            self._client.log_batch(self._run, metrics=batch)

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        for name, value in (result or {}).items():
            self._client.log_metric(self._run, _allowed(f"result/{name}"), value, self._started, 0)
        self._client.set_terminated(self._run, "KILLED" if result is None else "FINISHED")


class WandB:
    """A run of Weights & Biases in the project WANDB_PROJECT; with WANDB_MODE=offline a folder to be synced later."""

    def begin(self, run: RunInfo, known: str, step: int) -> str:
        """See `Tracker`."""
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=known or uuid.uuid4().hex[:12],
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            reinit="create_new",
            settings=quiet,
        )
        return str(self._run.id)

    def measure(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def end(self, result: Mapping[str, float] | None) -> None:
        """See `Tracker`."""
        for name, value in (result or {}).items():
            self._run.summary[f"result/{name}"] = value
        self._run.finish(exit_code=0)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
"""By the names of their extras and modules."""


def check(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once.

    Raises:
        ConfigError: one is unknown, or not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}.{did_you_mean(name, TRACKERS)}")
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder `wandb` of its own making is no package
            raise ConfigError(f"{name} needs an extra: pip install 'fedloom[{name}]'")
    return tuple(dict.fromkeys(names))


def _allowed(name: str) -> str:
    """With the characters that MLflow takes in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
