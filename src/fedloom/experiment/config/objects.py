"""Turns objects of a script or notebook into settings: arrays, frames, torch Datasets, modules,
factories and methods.

Each object is copied, held under a name made from its content (see `fedloom.core.objects`), and
named in the config.
"""

import copy
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedloom import methods
from fedloom.core.errors import DataError, ModelError, warn_once
from fedloom.core.method import Method
from fedloom.core.objects import hold
from fedloom.core.statistics import constant
from fedloom.data.columns import RawColumn, array_of, columns_of, joined, stacked
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import offset_of
from fedloom.data.grammar import MISSING_WORDS, MOST_NUMBERS, Grammar
from fedloom.data.hub import read_in, refuse_unknown_files
from fedloom.data.options import GUESS, DataOptions
from fedloom.data.own import read_data
from fedloom.data.roles import ALLOW, class_names, refuse_no_classes, unlabeled
from fedloom.data.split import rows_hash
from fedloom.data.tables import codes_of, numbers_of
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.section import validated

INPUTS = ("pixel_values", "input_ids", "image", "x", "input", "inputs", "features")
LABELS = ("labels", "label", "target", "y", "class")
"""Keys of the input and of the label in a Dataset whose items are mappings, by precedence."""
SPLIT = "split: training or test"
"""Name of the column that marks the rows of a frame of test rows."""
WIDE = 1000.0
"""Ratio of the largest to the smallest standard deviation of columns above which a warning asks to
standardize.
"""

UNLIKE = 50.0
"""Ratio of the largest numbers of clients' images above which a warning asks for one scale."""

# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labeled:
    """Rows x (n, ...) with n labels of any type."""

    x: np.ndarray
    y: RawColumn


def data_settings(
    data: Any,
    *,
    test: Any = None,
    label: str | None = None,
    group: Any = None,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The settings of `[data]` for an object.

    Args:
        data: arrays (X, y), a frame, a torch Dataset, a `fedloom` Dataset, or a list with one of
            these, or the path of a CSV or Parquet file, for each client; or a mapping of the
            clients' names to frames.
        test: the test rows in the same form, or the share of rows to hold out; of a frame also the
            column that says train or test, or names of owners.
        label: the label column of a frame.
        group: (n,) the owner of each row of arrays, or the column of a frame: each owner is a
            client.
        columns: for a frame: `id`, `drop`, `keep`, `missing`, `task`, `missing_words`, `decimal`,
            `encode`, `missing_columns`, and `unseen` with
            names of owners, see `read_data`; for arrays `task`.

    Raises:
        DataError: the object is none of these, or its rows are invalid.
        ConfigError: a value of `columns` is invalid.
    """
    # arguments that are written in several ways
    settings: dict[str, Any] = {}
    if label is not None and not isinstance(label, str):
        shown = (
            repr(label) if isinstance(label, list | int | float) else f"a {type(label).__name__}"
        )
        raise DataError(f"label must be the name of one column, not {shown}.")
    if isinstance(test, int | float):
        settings["test_fraction"], test = float(test), None
    # a label says that data is of frames: files are read as such, with "" for a label to be guessed
    if isinstance(data, list) and any(isinstance(part, str | Path) for part in data):
        label = "" if label is None else label
    names = [str(name) for name in data] if isinstance(data, Mapping) else None
    data = list(data.values()) if isinstance(data, Mapping) else data
    if label is not None:
        cells = _cells_of(columns)
        parts = data if isinstance(data, list) else [data]
        refuse_unknown_files(
            cells.decimals, [Path(part) for part in parts if isinstance(part, str | Path)]
        )
        data = (
            [_opened(part, cells) for part in data]
            if isinstance(data, list)
            else _opened(data, cells)
        )
    label = label or None

    # the data set: of frames, of a `Dataset` as it is, or of arrays, whose columns have no names
    if _is_frame(data):
        # `unseen` names owners here, which `read_data` checks
        validated(
            DataConfig, {key: value for key, value in columns.items() if key != "unseen"}, "data"
        )
        dataset = _frame(data, test, label, group, columns, names)
    elif label is not None:
        raise DataError(
            f"label={label!r} is for data frames and files: the labels of arrays are y."
        )
    elif columns.keys() - {"task"}:
        key, value = next((key, value) for key, value in columns.items() if key != "task")
        raise DataError(
            f"{key}={value!r} is for data frames and files: the columns of arrays have no names."
        )
    elif isinstance(data, Dataset) and test is None and group is None:
        dataset = data
    else:
        parts = list(data) if isinstance(data, list) else [data]
        rows = [_rows(part) for part in parts]
        _refuse_empty([len(part.y) for part in rows])
        owners = None if group is None else RawColumn.of("group", group)
        if isinstance(data, list):  # each part is a client
            owners = RawColumn.of(
                "group", np.repeat(np.arange(len(rows)), [len(part.y) for part in rows])
            )
        dataset = _dataset(
            _joined(rows), owners, None if test is None else _rows(test), columns.get("task")
        )

    # each owner of training rows is a client; test rows may have no owner (-1)
    if dataset.groups is not None:
        training = (
            dataset.groups if dataset.test is None else np.delete(dataset.groups, dataset.test)
        )
        settings |= {"partition": "natural", "clients": len(np.unique(training))}

    # a name made from the content: equal data has one name. What most data sets lack counts only
    # if it is there, so that their names stay as they are
    content = [
        rows_hash(dataset.x),
        rows_hash(dataset.y),
        repr(dataset.classes),
        repr(dataset.ready),
    ]
    content += [rows_hash(a) if a is not None else "" for a in (dataset.test, dataset.groups)]
    content += [dataset.fill] if dataset.fill else []
    content += [rows_hash(dataset.offset)] if dataset.offset is not None else []
    content += [repr((dataset.owners, dataset.columns, dataset.recipe))] if dataset.recipe else []
    about = {
        "rows": len(dataset.y),
        "shape": list(dataset.input_shape),
        "classes": list(dataset.classes),
    }
    return {"name": hold("data", "\n".join(content).encode(), dataset, **about), **settings}


def arrays(data: Any, test: Any, group: Any, task: str, classes: Sequence[str] = ()) -> Dataset:
    """The data set of arrays (X, y) and their test rows, whose classes are numbers, with the words
    of these; `group` and `task` as in `data_settings`.
    """
    owners = None if group is None else RawColumn.of("group", group)
    found = _dataset(_rows(data), owners, None if test is None else _rows(test), task)
    return replace(found, classes=tuple(classes)) if classes else found


def is_frames(data: object) -> bool:
    """Whether an object maps names to pandas, Polars or Arrow tables."""
    return isinstance(data, Mapping) and bool(data) and all(map(_is_frame, data.values()))


def _cells_of(settings: Mapping[str, Any]) -> DataOptions:
    """How cells are read, by the settings of a frame."""
    return DataOptions(
        missing_words=tuple(settings.get("missing_words", MISSING_WORDS)),
        decimal=settings.get("decimal", "."),
    )


def _opened(data: Any, cells: DataOptions) -> Any:
    """A Dataset of Hugging Face or a file as an Arrow table, a lazy frame as a frame; anything else
    as it is.
    """
    if isinstance(data, str | Path):
        import pyarrow as pa

        columns = read_in(Path(data), cells.grammar, cells.decimals)
        return pa.table({name: column.cells for name, column in columns.items()})
    if callable(getattr(data, "collect", None)):
        return data.collect()
    if (
        hasattr(data, "column_names")
        and hasattr(data, "with_format")
        and not hasattr(data, "columns")
    ):
        table = data.with_format("arrow")[:]
        for place, (name, feature) in enumerate(data.features.items()):
            # of class numbers, which clients may number otherwise
            if names := getattr(feature, "names", None):
                words = class_names(RawColumn.of(name, table.column(name)), names).cells
                table = table.set_column(place, name, words)
        return table
    return data


def _is_frame(data: Any) -> bool:
    """Whether an object is a pandas, Polars or Arrow table, or a list of them."""
    if isinstance(data, list):
        return bool(data) and all(map(_is_frame, data))
    return hasattr(data, "columns") and hasattr(data, "shape") and not isinstance(data, Dataset)


def _frame(
    data: Any,
    test: Any,
    label: str | None,
    group: str | None,
    options: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> Dataset:
    """The data set of a frame, or of a list with one for each client of these names; columns are
    encoded, see `read_data`.
    """
    # the test rows: a column or owners (`held_out`), or a frame (`test`)
    parts = data if isinstance(data, list) else [data]
    if isinstance(data, list) and group is not None:
        raise DataError("a list has one frame for each client: leave group out.")
    held_out = None
    if isinstance(test, str) or (
        isinstance(test, list | tuple) and all(isinstance(name, str) for name in test)
    ):
        held_out, test = test, None
    if test is not None and not _is_frame(test):
        raise DataError("test must be a frame, as data is, a share, a column, or names of owners.")
    if test is not None and isinstance(data, list):
        raise DataError("with one frame for each client, test must be a share of the rows.")
    _refuse_empty([len(part) for part in parts])

    # one table of all frames, that of the test rows last
    grammar = _cells_of(options).grammar
    tables = [columns_of(part, grammar) for part in (*parts, *([] if test is None else [test]))]
    first = [*tables[0]]
    for table in tables:
        if {*table} != {*first} and options.get("missing_columns") != "allow":
            raise DataError(
                f"all frames must have the columns {first}, but one has {[*table]}. {ALLOW}."
            )
    columns = stacked(tables)
    if isinstance(data, list):
        group = _with_clients(columns, [len(part) for part in parts], names)
    if test is None:
        return read_data(columns, label=label, group=group, test=held_out, **options)
    columns[SPLIT] = RawColumn.of(SPLIT, np.repeat(["train", "test"], [len(data), len(test)]))
    return read_data(columns, label=label, group=group, test=SPLIT, **options)


def _with_clients(
    columns: dict[str, RawColumn], sizes: Sequence[int], names: Sequence[str] | None = None
) -> str:
    """Add the column of the clients, each of so many rows, and return its name."""
    group = "client" if "client" not in columns else "client of the list"
    owners = np.repeat(names or [f"client-{i}" for i in range(len(sizes))], sizes)
    columns[group] = RawColumn.of(group, owners)
    return group


def one_table(data: Sequence[Any], grammar: Grammar) -> tuple[dict[str, RawColumn], str] | None:
    """The columns of a list with a frame for each client, and the name of that of the clients; None
    if it has other objects, or frames of different columns.
    """
    parts = [_opened(part, GUESS) for part in data]
    if not _is_frame(parts) or not all(map(len, parts)):
        return None
    tables = [columns_of(part, grammar) for part in parts]
    if any({*table} != {*tables[0]} for table in tables):
        return None
    columns = stacked(tables)
    return columns, _with_clients(columns, [len(part) for part in parts])


def _refuse_empty(sizes: Sequence[int]) -> None:
    """Raise DataError for no clients, or a client without rows, whose number another
    one would get.
    """
    if not sizes:
        raise DataError("data is an empty list: give the rows of at least one client.")
    if 0 in sizes:
        where = f"client-{sizes.index(0)} has" if len(sizes) > 1 else "data has"
        raise DataError(f"{where} no rows: give at least one, or leave the client out of the list.")


def _rows(data: Any) -> _Labeled:
    """The rows of one object."""
    if isinstance(data, Dataset):
        return _Labeled(
            data.x, RawColumn.of("y", np.array(data.classes, dtype=object)[data.y], Grammar(()))
        )
    if isinstance(data, tuple) and (len(data) != 2 or isinstance(data[0], tuple | Dataset)):
        raise DataError("a tuple must be (X, y): give the clients' rows as a list.")
    if isinstance(data, tuple):
        x, y = _array(data[0]), _label_column(data[1])
        if len(x) != len(y):
            raise DataError(
                f"X has {len(x)} rows, but y has {len(y)} labels: give one label for each row."
            )
        return _Labeled(x, y)
    if (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, str | dict | np.ndarray)
    ):
        items = [_item(data[i]) for i in range(len(data))]
        if not items:
            raise DataError("the Dataset is empty: give at least one row.")
        if len({x.shape for x, _ in items}) > 1:
            raise DataError(
                "the inputs of the Dataset differ in shape: resize or pad them in its transform."
            )
        return _Labeled(np.stack([x for x, _ in items]), _label_column([y for _, y in items]))
    raise DataError(
        "data must be arrays (X, y), a data frame, a torch Dataset, a list with one of these for "
        f"each client, a name or settings, not a {type(data).__name__}"
    )


def _item(item: Any) -> tuple[np.ndarray, Any]:
    """The input and label of one item of a Dataset."""
    if isinstance(item, Mapping):
        keys = [next((key for key in names if key in item), None) for names in (INPUTS, LABELS)]
        if None in keys:
            raise DataError(
                f"an item of the Dataset has the keys {sorted(map(str, item))}: name the input "
                f"one of {', '.join(INPUTS)}, and the label one of {', '.join(LABELS)}"
            )
        item = tuple(item[key] for key in keys)
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(
            f"an item of the Dataset must be (input, label), not a {type(item).__name__}: see "
            "TensorDataset"
        )
    label = item[1]
    if isinstance(label, Tensor | np.ndarray | np.generic | list | tuple):
        label = _array(label)
        if label.size != 1:
            raise DataError(
                f"the label of an item must be one class, not {label.size} numbers: use argmax."
            )
        label = label.item()
    return _array(item[0]), label


def _label_column(labels: Any) -> RawColumn:
    """The labels (n,) or (n, 1)."""
    shape: tuple[int, ...] = tuple(getattr(labels, "shape", ()))
    if len(shape) == 2 and shape[1] == 1:
        labels = _array(labels)[:, 0]
    elif len(shape) > 1:
        raise DataError(
            f"y must have one label for each row, not shape {shape}: use argmax for one-hot labels."
        )
    return RawColumn.of("y", labels)


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "toarray"):
        raise DataError("X is sparse: give X.toarray().")
    try:
        found = array_of(values)
        return (
            np.where(np.ma.getmaskarray(found), np.nan, found.data)
            if np.ma.isMaskedArray(found)
            else found
        )
    except ValueError:
        raise DataError(
            "the rows of X have different numbers of values: give each row as many."
        ) from None


def _joined(parts: Sequence[_Labeled]) -> _Labeled:
    shapes = {part.x.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"the clients' rows differ in shape: {sorted(map(str, shapes))}; give all the same "
            "columns."
        )
    if len({part.x.dtype == np.uint8 for part in parts}) > 1:
        kinds = ", ".join(dict.fromkeys(str(part.x.dtype) for part in parts))
        raise DataError(
            f"the rows have the types {kinds}: bytes of images become 0 to 1, and other numbers "
            "stay as they are; give all in one type."
        )
    largest = [
        float(np.abs(part.x).max())
        for part in parts
        if part.x.ndim > 2 and part.x.dtype.kind == "f"
    ]
    if len(largest) > 1 and max(largest) > UNLIKE * min(largest):
        logging.getLogger("fedloom").warning(
            "data: the largest number is %.3g in some clients' images and %.3g in others': give "
            "all on one scale",
            min(largest), max(largest),
        )  # fmt: skip
    return _Labeled(np.concatenate([part.x for part in parts]), joined([part.y for part in parts]))


def _dataset(
    rows: _Labeled, owners: RawColumn | None, test: _Labeled | None, task: str | None
) -> Dataset:
    """The data set of training rows and of test rows, if any; rows without a label are left out."""
    training = len(rows.y)
    if owners is not None and len(owners) != training:
        raise DataError(
            f"group has {len(owners)} owners for {training} rows: give one for each row."
        )
    if owners is not None and owners.missing.any():
        raise DataError(
            f"group must name an owner for each row, but {owners.missing.sum()} are missing."
        )

    # test rows come behind the training rows, so that both have the same classes
    if test is not None:
        rows = _joined([rows, test])
    y, classes = _targets(rows.y, task, few=rows.x.ndim == 2)
    groups: np.ndarray | None = None
    names: tuple[str, ...] = ()
    if owners is not None:
        known, words = codes_of(owners.words)
        groups = np.concatenate([known, np.full(len(y) - training, -1)])  # test rows have no owner
        # names stand for all numbers of `groups`, and -1 has none
        names = () if not owners.is_text or test is not None else words

    # rows without a label are left out
    kept = np.flatnonzero(~unlabeled(y))
    if not len(kept):
        raise DataError("y has no label in any row: give the classes or numbers to predict.")
    gone = len(y) - len(kept)
    x, shift, scale = _inputs(rows.x[kept] if gone else rows.x)
    note = f"{gone} of {len(y)} rows have no label and are left out."
    return Dataset(
        name="arrays",
        x=x,
        y=y[kept],
        classes=classes,
        shift=shift,
        scale=scale,
        test=np.flatnonzero(kept >= training) if test is not None else None,
        groups=None if groups is None else groups[kept],
        columns=() if x.ndim == 4 else tuple(f"x{k}" for k in range(x.shape[1])),
        owners=names,
        notes=(note,) if gone else (),
        ready=True,
    )


def _inputs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs as a network receives them, with shift and scale: as they are, but bytes of images as
    0 to 1.
    """
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        raise DataError(
            f"X must have numbers, one row for each label, not {x.dtype} of shape {x.shape}: "
            "encode categories first, or give a data frame"
        )
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x = x[:, None] if x.ndim == 3 else x
        # (n, H, W, C)
        x = np.moveaxis(x, -1, 1) if x.shape[1] not in (1, 3) and x.shape[-1] in (1, 3) else x
        channels = x.shape[1]
        return (
            np.ascontiguousarray(x),
            np.zeros(channels, np.float32),
            np.full(channels, 255, np.float32),
        )
    if x.ndim == 2 and any(offset_of(column.astype(np.float64)) for column in x.T):
        raise DataError(
            "X has numbers that float32 cannot tell apart: subtract a constant from them, or "
            "encode them."
        )
    if x.ndim > 2 and x.dtype.kind in "iu" and x.size and np.abs(x).max() >= 1 << 24:
        raise DataError(
            "X has whole numbers of 2**24 or more, which float32 cannot hold: rescale or encode "
            "them."
        )
    x = np.ascontiguousarray(x, dtype=np.float32)
    if x.ndim == 2 and len(x):
        deviations = x.std(axis=0)
        moving = deviations[~constant(x)]
        if len(moving) and moving.max() > WIDE * moving.min():
            logging.getLogger("fedloom").warning(
                "data: the standard deviations of the columns range from %.3g to %.3g, and "
                "arrays are used as they are: standardize them, or give a data frame, which "
                "fedloom standardizes",
                moving.min(),
                moving.max(),
            )
    return x, np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)


def _targets(
    labels: RawColumn, task: str | None, *, few: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Class numbers (n,), -1 for a missing label, and names; or numbers to predict (n,) float64,
    NaN for a missing one. Whole numbers that begin with 0 keep their values; `few`: whether many
    different ones are numbers to predict.
    """
    if task == "number":
        return numbers_of("y", labels), ()
    numbers = np.empty(0) if labels.is_text or labels.values.dtype.kind != "f" else labels.values
    known = numbers[~np.isnan(numbers)]
    fractions = known[known != np.floor(known)]
    many = len(different := np.unique(known)) > MOST_NUMBERS and few
    if task is None and (len(fractions) or many):
        if not len(fractions):
            warn_once(
                f"y has {len(different)} different whole numbers in {len(known)} rows, and is "
                "taken to be a number to "
                'predict: set task="number", or task="classes" if they are numbers of classes.'
            )
        return numbers_of("y", labels), ()
    if len(fractions):
        raise DataError(
            f'y has fractions, such as {fractions[0]:g}: set task="number", or give class labels.'
        )
    if len(known) and known.min() == 0 and known.max() < 1000:
        return np.nan_to_num(numbers, nan=-1).astype(np.int64), tuple(
            map(str, range(int(known.max()) + 1))
        )
    if task is None and few and not len(known):
        refuse_no_classes(labels, "y")
    return codes_of(labels.words)


# -- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Factory:
    """Builds a network from a module, or a black box from an estimator, which are copied; or calls
    the user's factory.
    """

    source: Any

    def __call__(self, input_shape: tuple[int, ...], classes: int) -> Any:
        """A new network, or a black box. A factory without parameters is called without any."""
        if isinstance(self.source, nn.Module) or hasattr(self.source, "get_params"):
            return copy.deepcopy(self.source)
        return self.source(input_shape, classes) if _required(self.source) else self.source()


def models_settings(models: Any) -> dict[str, Any]:
    """The settings of `[models]` for names, modules and factories: one for all, or a list with one
    for each client.

    Raises:
        ModelError: an entry is none of these.
    """
    if isinstance(models, Sequence) and not isinstance(models, str | nn.Module):
        names = [model_name(model) for model in models]
        if not names:
            raise ModelError("models is an empty list: give at least one module, factory or name")
        return {"pool": names} if len(names) == 1 else {"each": names}
    return {"pool": [model_name(models)]}


def model_name(model: Any) -> str:
    """The name of a model in a config."""
    if isinstance(model, str):
        return model
    if isinstance(model, nn.Module):
        label = type(model).__name__
        if isinstance(model, torch.jit.ScriptModule):
            raise ModelError(
                f"{label} is scripted, and cannot be copied: give the module that it was made of"
            )
        if any(
            isinstance(p, UninitializedParameter | UninitializedBuffer)
            for p in (*model.parameters(), *model.buffers())
        ):
            raise ModelError(
                f"{label} has lazy layers, whose sizes are not known: call it once on a batch first"
            )
        frozen = copy.deepcopy(model)
        count = sum(p.numel() for p in frozen.parameters())
        return hold(
            type(model).__name__, _module_content(frozen), Factory(frozen), parameters=count
        )
    # an estimator of scikit-learn
    if all(hasattr(model, name) for name in ("fit", "predict_proba", "get_params")):
        label = type(model).__name__
        return hold(
            label, f"{label} {model.get_params()!r}".encode(), Factory(model), estimator=label
        )
    if hasattr(model, "fit") and hasattr(model, "predict"):
        raise ModelError(
            f"{type(model).__name__} has no predict_proba, which federations of classifiers need"
        )
    if callable(model):
        inner: Any = model.func if isinstance(model, functools.partial) else model
        label = getattr(inner, "__name__", type(inner).__name__).strip("<>")
        if len(_required(model)) not in (0, 2):
            raise ModelError(
                f"{label} must take (input_shape, classes), or no parameters: wrap it in a lambda"
            )
        return hold(label, _code(model).encode(), Factory(model), factory=label)
    raise ModelError(
        f"a model must be a module, an estimator, a factory or a name, not a {type(model).__name__}"
    )


def _required(factory: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a factory needs."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ["input_shape", "classes"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def pretrained_settings(model: Any) -> dict[str, Any]:
    """The settings of `[pretrained]` for a trained module, or for a name.

    Raises:
        ModelError: it is neither.
    """
    if isinstance(model, str | nn.Module):
        return {"model": model_name(model)}
    raise ModelError(
        f"pretrained must be a trained module, a name or settings, not a {type(model).__name__}"
    )


def _module_content(module: nn.Module) -> bytes:
    """Bytes that identify a module's class, structure and weights."""
    digest = hashlib.sha256(f"{_code(type(module))}\n{module!r}".encode())
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.digest()


# -- methods ---------------------------------------------------------------------------------------


def method_name(method: Method) -> str:
    """The name of a method object in a config: its own if it is registered, else one made from its
    code.
    """
    if methods.registry().get(method.name) is method:
        return method.name
    source = inspect.getsourcefile(method.round)
    if source and Path(source).is_file():
        code = Path(source).read_text(encoding="utf-8")
    else:  # in a notebook
        parts = (method.round, method.client, method.server, method.black_box, method.config)
        code = "\n".join(_code(part) for part in parts if part is not None)
    return hold(
        method.name,
        f"{method.name}\n{dict(method.fixed)}\n{code}".encode(),
        method,
        method=method.name,
    )


def _code(thing: Any) -> str:
    """Text that identifies a class or function: its source, else its bytecode; and values that it
    is bound to.
    """
    if isinstance(thing, functools.partial):
        return f"{_code(thing.func)} {thing.args!r} {sorted(thing.keywords.items())!r}"
    name = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"  # noqa: E501
    bound = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    plain = [
        repr(value) for value in bound if isinstance(value, str | int | float | bool | tuple | list)
    ]
    try:
        return f"{name} {plain}\n{inspect.getsource(thing)}"
    except (OSError, TypeError):
        functions: Iterable[Any] = vars(thing).values() if isinstance(thing, type) else [thing]
        codes = [f.__code__ for f in functions if hasattr(f, "__code__")]
        return f"{name} {plain} {[(code.co_code.hex(), repr(code.co_consts)) for code in codes]}"
