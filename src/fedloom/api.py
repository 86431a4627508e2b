"""Run and compare from Python.

result = fedloom.run("fedal", rounds=20, seed=1)
result.accuracy, result.summary["bytes"]["up"]

comparison = fedloom.compare(["fedal", "fedmd", "local"], seeds=[0, 1, 2], iterations=200)
comparison["differences"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.experiment import run as runs
from fedloom.experiment.compare import execute_all
from fedloom.experiment.config import Experiment, RunConfig
from fedloom.experiment.reading import check, read
from fedloom.experiment.run import Result, Status, Stopped, settle

__all__ = ["Experiment", "Result", "RunConfig", "Status", "Stopped", "compare", "execute", "read", "run"]


def run(
    config: RunConfig | str,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    **settings: Any,
) -> Result:
    """Execute one run.

    Args:
        config: a `RunConfig`, the path of a TOML file, or the name of a method or experiment.
        out: the run folder; None writes nothing.
        resume: continue the run in `out`.
        progress: called after each round.
        **settings: top-level settings that override the config, such as `seed=1` or `data={"clients": 5}`. With a
            `RunConfig`, a table replaces the whole table.

    Raises:
        FedloomError: the config, data or checkpoint is invalid.
    """
    if isinstance(config, RunConfig):
        config = check({"run": {**config.model_dump(), **settings}}).run
    else:
        experiment = read(config, flags=settings)
        if experiment.compare is not None:
            raise ConfigError(f"{config} is a comparison: use fedloom.compare({config!r})")
        config = experiment.run
    folder = Path(out) if out is not None else None
    if folder is not None:
        settle(folder, resume=resume)
    return execute(config, folder, resume=resume, progress=progress)


def compare(
    methods: str | Sequence[str | dict[str, Any]],
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Execute several methods and seeds on identical splits; returns the content of `comparison.json`.

    Args:
        methods: names, or tables of `method`, `preset`, `params`, `name`; the first is the reference. Or the name
            or TOML file of a comparison.
        seeds: one run for each method and seed; None for those of the comparison, or 0.
        out, resume, progress, **settings: see `run`.

    Raises:
        FedloomError: see `run`.
    """
    if isinstance(methods, str):
        config = read(methods, flags=settings)
        if config.compare is None:
            raise ConfigError(f"{methods} is a single run: use fedloom.run({methods!r})")
        run_values, compared = config.run.model_dump(), config.compare.model_dump()
    else:
        run_values, compared = settings, {"methods": list(methods)}
    experiment = check({"run": run_values, "compare": {**compared, **({"seeds": list(seeds)} if seeds else {})}})
    folder = Path(out) if out is not None else None
    if folder is not None:
        settle(folder, resume=resume, several=True)
    return execute_all(experiment, folder, resume=resume, progress=progress, execute=execute)


def execute(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Execute one run of a checked config, on any engine: see `fedloom.experiment.run.execute`."""
    work = runs.execute
    if run.engine.name == "net":
        from fedloom.remote.coordinator import backend

        work = partial(work, backend=backend)
    return work(run, folder, resume=resume, progress=progress, stop=stop)
