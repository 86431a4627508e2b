"""The command line's work from Python.

result = fedloom.run("fedal", rounds=20, seed=1)
result.accuracy, result.summary["bytes"]["up"]

found = fedloom.compare(["fedal", "fedmd", "local"], seeds=[0, 1, 2], iterations=200)
found["differences"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedloom.experiment.compare import execute_all
from fedloom.experiment.config import Experiment, RunConfig
from fedloom.experiment.reading import check, read
from fedloom.experiment.run import Result, Status, Stopped, execute, settle

__all__ = ["Experiment", "Result", "RunConfig", "Status", "Stopped", "compare", "read", "run"]


def run(
    config: RunConfig | str,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    **settings: Any,
) -> Result:
    """Do one run.

    Args:
        config: typed config, the path of a TOML file, or the name of a method or experiment.
        out: the run's folder; None writes nothing.
        resume: go on with the run in `out`.
        progress: told after each round.
        **settings: top-level settings over the config, such as `seed=1` or `data={"clients": 5}`; a table
            replaces the whole table.

    Raises:
        FedloomError: the config, data or checkpoint can't be used; the text says how to mend it.
    """
    if isinstance(config, RunConfig):
        config = check({"run": {**config.model_dump(), **settings}}).run
    else:
        config = read(config, flags=settings).run
    folder = Path(out) if out is not None else None
    if folder is not None:
        settle(folder, resume=resume)
    return execute(config, folder, resume=resume, progress=progress)


def compare(
    methods: Sequence[str | dict[str, Any]],
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Several methods and seeds on identical splits; the content of `comparison.json`.

    Args:
        methods: names, or tables of `method`, `preset`, `params`, `name`. The first is compared with the rest.
        seeds: one run for each method and seed.
        out, resume, progress, **settings: as in `run`.

    Raises:
        FedloomError: as `run`.
    """
    experiment = check({"run": settings, "compare": {"methods": list(methods), "seeds": list(seeds)}})
    folder = Path(out) if out is not None else None
    if folder is not None:
        settle(folder, resume=resume)
    return execute_all(experiment, folder, resume=resume, progress=progress)
