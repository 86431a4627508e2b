"""A trial: should these owners federate, how, and who gains?

Every row is predicted by models that did not see it, in repeats of folds: by all candidates for
federating and for training alone. In each fold the candidates that are best on the other folds are
compared, so that no row is scored by a choice that it took part in, but for a small part in the
weights of owners. A score is a mean of rows'
contributions (`contributions`), which give each owner's gain its standard error (`evidence`); the
owners' gains inform each other (`sharing`); both decide (`decide`).

`trial` is the door of Python, and `fedloom trial` goes through it: it checks the settings, makes of
any kind of data either `Owners` with rows of their own, for `run_trial`, or files of partners with
columns of their own, for `trial_columns`, and adds to the result the settings that read this data.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.data.dataset import Dataset
from fedloom.data.grammar import MISSING_WORDS, Decimals
from fedloom.data.options import DataOptions, Kind, Missing, MissingColumns, SplitColumns, Task
from fedloom.experiment.config.duration import seconds_of
from fedloom.experiment.trial.columns import trial_columns
from fedloom.experiment.trial.owners import Owners, held_owners, in_doubt, owners_of, read_owners
from fedloom.experiment.trial.result import (
    METRICS,
    OwnerCard,
    TrialConfig,
    TrialResult,
    metric_named,
)
from fedloom.experiment.trial.run import run_trial

OF_FILES = ("decimal", "missing_words", "encode", "keep", "drop")
"""Settings of `[data]` that apply to files of partners with other columns."""

__all__ = [
    "METRICS",
    "OwnerCard",
    "Owners",
    "TrialConfig",
    "TrialResult",
    "owners_of",
    "read_owners",
    "run_trial",
    "trial",
    "trial_columns",
]


def trial(
    data: Any,
    *,
    label: str | None = None,
    group: Any = None,
    id: str | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    missing: Missing = "indicator",
    unit: str | None = None,
    time: str | Sequence[str] | None = None,
    task: Task | None = None,
    missing_words: Sequence[str] = MISSING_WORDS,
    decimal: Decimals = ".",
    encode: Mapping[str, Kind] = MappingProxyType({}),
    missing_columns: MissingColumns = "refuse",
    budget: str | float | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    **settings: Any,
) -> TrialResult:
    """Find out whether owners of data should federate, how, and who gains.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X, y = rng.normal(size=(120, 3)), np.arange(120) % 2
        >>> told = trial((X, y), group=np.repeat(["a", "b"], 60), repeats=1, methods=["fedglm"], alone=("logistic",))
        >>> [*told.owners]
        ['a', 'b']

    Args:
        data: the path of a CSV or Parquet file or of a folder of pictures, columns by name, or a
            data frame, with label and group. Or arrays (X, y) with group, a `Dataset` with groups,
            or a list with arrays, a frame or a torch Dataset for each owner. Or a list of CSV files
            of the same people with other columns, the first with the label, and id: whether the
            label is told better by all columns.
        label: the column of classes, or of numbers to predict.
        group: the column of owners, such as hospitals; or the owner (n,) of each row of arrays.
        id: the column that names each row, such as a patient; rows of one id are never split.
        drop, keep, missing, task, missing_words, decimal, encode, missing_columns: see
            `fedloom.data.own.read_data`.
        unit: a column, such as a recording, whose rows of one value are never split between
            training and test.
        time: columns by which rows are ordered, such as ["year", "month"]: test rows then come
            after training rows. None: columns that look like it; () for random splits.
        budget: time, such as "10m", or seconds; None for no limit, so that equal seeds give equal
            results.
        progress: called after each candidate in each repeat with the number of those that ended, of
            all, at most, and the seconds so far.
        **settings: of `TrialConfig`, such as `repeats=5`, `methods=["fedavg-ft"]`,
            `metric="accuracy"`, `worth=0.02`.

    Raises:
        DataError: the data cannot be read, or owners have too few rows.
        ConfigError: a setting is invalid, or a method cannot be tried.
    """  # noqa: E501
    # The settings of the trial. Those of earlier versions are taken over, or refused with what to
    # use in their place.
    known = TrialConfig.__dataclass_fields__
    if "splits" in settings:
        warnings.warn(
            "set repeats, not splits: every row is predicted once in each repeat of 4 folds",
            DeprecationWarning,
            2,
        )
        settings = {"repeats": settings["splits"]} | {
            k: value for k, value in settings.items() if k != "splits"
        }
    unknown = next((name for name in settings if name not in known), None)
    if unknown in ("test", "forest"):
        raise ConfigError(
            f"a trial has no setting {unknown!r} any more: every row is predicted once in each "
            "of `repeats` repeats of 4 folds; set repeats=3, and alone=() for no black boxes"
        )
    if unknown:
        raise ConfigError(f"a trial has no setting {unknown!r}; choose from {', '.join(known)}")
    # a frozen config holds tuples, while people write lists
    values: dict[str, Any] = {
        k: tuple(value) if isinstance(value, list) else value for k, value in settings.items()
    }
    values |= {"metric": metric_named(values["metric"])} if "metric" in values else {}
    config = TrialConfig(**values | ({} if budget is None else {"seconds": seconds_of(budget)}))

    # several files: partners with other columns of the same people
    if (
        isinstance(data, list | tuple)
        and len(data) > 1
        and all(isinstance(one, str | Path) for one in data)
    ):
        options = DataOptions(
            label,
            group,
            id,
            tuple(drop),
            tuple(keep),
            missing,
            task=task,
            missing_words=tuple(missing_words),
            decimal=decimal,
            encode=dict(encode),
        )
        if time:
            raise ConfigError(f"a trial of columns has random folds: leave out time, here {time!r}")
        result = trial_columns(
            [Path(one) for one in data], options, config, unit=unit, progress=progress
        )
        # The recipe is a run on the same people: `missing` is "files" there, as in the trial, so
        # that people whom a partner lacks stay in. It names only settings that differ from their
        # defaults, of those that a run with files has.
        files = {"files": [str(one) for one in data], "id": id, "label": label, "missing": "files"}
        given = {
            name: vars(options)[name]
            for name in OF_FILES
            if vars(options)[name] != getattr(DataOptions(), name)
        }
        method = next(
            name
            for name, one in methods.registry().items()
            if one.setting == "vertical" and one.trial_rank
        )
        return replace(result, recipe={"method": method, "columns": files, "data": given})

    # everything else becomes owners with rows of their own
    def tried(owners: Owners) -> TrialResult:
        # who names a time or a unit, or time = () for none, has said how rows depend on each other
        said = time is not None or unit is not None
        return run_trial(owners if said else in_doubt(owners), config, progress=progress)

    if isinstance(data, Dataset):
        return tried(owners_of(data))
    if isinstance(data, list | tuple):
        from fedloom.experiment.config.objects import data_settings, one_table

        grammar = DataOptions(missing_words=tuple(missing_words), decimal=decimal).grammar
        # A list with a frame for each owner becomes one table with a column of owners, which is
        # read below like a file. Frames of different columns, and lists of arrays, do not.
        frames = isinstance(data, list) and label is not None and group is None
        if frames and (found := one_table(data, grammar)):
            data, group = found
    if isinstance(data, list | tuple):  # still: objects in memory, held under a name
        held = data_settings(
            data, label=label, group=group, columns={"task": task} if task else {}
        )["name"]
        return tried(held_owners(held))
    # a file must say which column is what, while the folders of pictures say it by their names
    if (
        isinstance(data, str | Path)
        and not Path(data).expanduser().is_dir()
        and not (label and group)
    ):
        names = (("label, the column to predict", label), ("group, the column of owners", group))
        lacking = [what for what, value in names if not value]
        raise ConfigError(
            f"a trial of {data} needs {', and '.join(lacking)}: fedloom data {data} lists the "
            "columns"
        )
    if label is not None and not isinstance(label, str):
        raise ConfigError(f"label must be the name of one column, not {label!r}")
    options = DataOptions(
        label,
        group,
        id,
        tuple(drop),
        tuple(keep),
        missing,
        task=task,
        missing_words=tuple(missing_words),
        decimal=decimal,
        encode=dict(encode),
        missing_columns=missing_columns,
    )
    # None and () differ: the first looks for columns of time, the second splits at random
    order = (time,) if isinstance(time, str) else time if time is None else tuple(time)
    result = tried(read_owners(data, options, SplitColumns(unit or id, order)))
    if not isinstance(data, str | Path):
        return result  # a recipe is a file, and cannot name columns or a frame in memory

    # the recipe reads the same file in the same way; all rows are of owners, and none is public
    given = {
        name: value
        for name, value in vars(options).items()
        if value != getattr(DataOptions(), name)
    }
    return replace(
        result, recipe={**result.recipe, "data": {"name": str(data), **given, "public_rows": 0}}
    )
