"""From a file, a name and flags to valid config: everything that is wrong, at once, before any work."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom import methods
from fedloom.core.errors import ConfigError, DataError, FedloomError, did_you_mean
from fedloom.core.method import Method, problems
from fedloom.experiment.build import SETTINGS, resolve
from fedloom.experiment.config import FEDERATION, EngineConfig, Experiment, RunConfig
from fedloom.experiment.pretrained import AUTO


def read(source: str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of a TOML file, a named experiment, or a method's name, with changes over it.

    A file's top-level keys are those of `RunConfig`, beside `title` and `[compare]`.

    Args:
        source: path or name.
        overrides: `dotted.key=value`, the value in TOML's notation (a bare word is a string).
        flags: top-level keys and values that the command line gave; None values are ignored.

    In a comparison a seed, given either way, replaces its seeds, and a method its methods.

    Raises:
        ConfigError: with everything that is wrong, one problem a line.
    """
    values = table(source, overrides, flags)
    for key, command in {"sweep": "sweep", "rows": "reproduce"}.items():
        if key in values:
            raise ConfigError(f"{source} has a table {key}: it is for fedloom {command} {source}")
    top: dict[str, Any] = {k: values.pop(k) for k in ("title", "compare") if k in values}
    given = {k for k, v in (flags or {}).items() if v is not None} | {o.partition("=")[0] for o in overrides}
    if "compare" in top and "seed" in given:  # what is asked for speaks for the whole comparison
        top["compare"] = {**top["compare"], "seeds": [values["seed"]]}
    if "method" in given:
        top.pop("compare", None)
    return check({**top, "run": values})


def table(source: str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `read` reads, with the changes, before anything is checked; arguments as those of `read`.

    Raises:
        ConfigError: there is no such file or name, or it or an override is not written as it must be.
    """
    values = _values(source)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
            for other in {"rounds": ["iterations"], "iterations": ["rounds"]}.get(key, []):
                values.pop(other, None)
    for text in overrides:
        override(values, text)
    return values


def check(values: Mapping[str, Any]) -> Experiment:
    """A valid experiment, or one ConfigError with all problems: keys, values, names and parameters."""
    found: list[str] = []
    rest = dict(values)
    experiment = None
    while experiment is None:  # what is wrong by type is put aside, so that the rest is checked as well
        try:
            experiment = Experiment(**rest)
        except ValidationError as error:
            found += [p.removeprefix("run.") for p in problems(error, Experiment)]
            before, rest = rest, _without(rest, [item["loc"] for item in error.errors()])
            if rest == before:
                raise ConfigError("\n".join(found)) from None
    experiment = _served(_counted(experiment), unknown=any(problem.startswith("data") for problem in found))
    try:
        runs = experiment.runs()
    except ConfigError as error:
        found.append(str(error))
        runs = []
    for run in runs:
        found += [p for p in _names(run) if p not in found]
    if found:
        raise ConfigError("\n".join(found))
    return experiment


def _counted(experiment: Experiment) -> Experiment:
    """The experiment, with as many parties as its setting has if the config names no number."""
    run, known = experiment.run, _methods(experiment)
    setting = SETTINGS[known[0].setting if known else "horizontal"]
    try:
        nodes = _nodes(run) if run.engine.name == "net" else None
        clients = setting.clients(run, nodes)
    except (FedloomError, OSError, ValueError, KeyError, TypeError):  # whoever needs them reports it
        return experiment
    if clients is None or "clients" in run.data.model_fields_set:
        return experiment
    data = run.data.model_copy(update={"clients": clients})
    return experiment.model_copy(update={"run": run.model_copy(update={"data": data})})


def _nodes(run: RunConfig) -> int:
    """How many nodes the file of the run's federation lists. All else in it is for who calls them."""
    return len(tomllib.loads(Path(run.engine.federation or FEDERATION).read_text(encoding="utf-8"))["nodes"])


def _served(experiment: Experiment, unknown: bool) -> Experiment:
    """The experiment, with rows and a pretrained model at the server where one of its methods needs them and nothing is
    said: in all its runs, which so have the same split. And with rows for a model to train where what was said of the
    data is `unknown`, as it was wrong and is reported."""
    data, own, known = experiment.run.data, experiment.run.pretrained, _methods(experiment)
    if data.server == 0:
        return experiment
    teaches = any({"pretrained server model", "pretrained encoder"} & {*method.needs} for method in known)
    if teaches and not own.given:
        own = own.model_copy(update={"model": AUTO})
    if data.server is None and (
        ((teaches or unknown) and own.to_train) or any("server rows" in method.needs for method in known)
    ):
        data = data.model_copy(update={"server": "auto"})
    return experiment.model_copy(update={"run": experiment.run.model_copy(update={"data": data, "pretrained": own})})


def _methods(experiment: Experiment) -> list[Method]:
    """The methods of its runs; unknown ones are left out, as the check of names reports them."""
    run, found = experiment.run, []
    for entry in experiment.compare.methods if experiment.compare else (run.method,):
        name = str(entry if isinstance(entry, str) else entry.get("method", run.method))
        with contextlib.suppress(FedloomError):
            found.append(methods.load(name) if ".py" in name else methods.find(name))
    return found


def _without(values: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    """The table without the values at the paths; without the whole section if a path does not exist."""
    left = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for path in paths:
        if path[0] == "run" and len(path) > 1 and isinstance(left.get("run"), dict):
            inner = left["run"].get(path[1])
            if len(path) > 2 and isinstance(inner, Mapping) and path[2] in inner:
                left["run"][path[1]] = {k: v for k, v in inner.items() if k != path[2]}
            else:
                left["run"].pop(path[1], None)
        else:
            left.pop(str(path[0]), None)
        if path == ("run",):
            left.pop("run", None)
    return left


def _names(run: RunConfig) -> list[str]:
    """What is wrong with the names and parameters of a run that is valid by its types."""
    from fedloom import models
    from fedloom.data import flower, partitions

    found, rounds = [], 0
    try:
        _, _, rounds, _ = resolve(run)
        found += _miscounted(run)
    except FedloomError as error:
        found.append(str(error))
    tests: list[tuple[str, Callable[[], object]]] = [
        ("engine", partial(_check_engine, run.engine)),
        *(() if run.data.own or run.columns.own else (("data.name", partial(_check_data, run)),)),
        ("data.partition", partial(flower.partition_at, run.data.partition))
        if ":" in run.data.partition
        else ("data.options", partial(partitions.check_options, run.data.partition, run.data.options)),
        *(("models.pool", partial(models.check_name, name, black_boxes=True)) for name in run.models.pool or ()),
        ("topology", partial(run.topology.check, run.data.clients)),
        ("churn", partial(run.churn.check, run.data.clients, rounds, run.data.unseen_clients(run.seed))),
    ]
    for where, test in tests:
        try:
            test()
        except FedloomError as error:
            found.append(f"{where}: {error}")
    return found


def _miscounted(run: RunConfig) -> list[str]:
    """Whether files or a manifest have other parties than are asked for, or can't be read. A manifest that is not there
    yet may still come: a plan can be made before the data."""
    if run.columns.manifest and not Path(run.columns.manifest).exists():
        return []
    try:
        number = run.columns.number()
    except FedloomError as error:
        return [f"columns.manifest: {error}"]
    if number in (None, run.data.clients):
        return []
    source = "columns.files" if run.columns.files else "columns.manifest"
    return [f"data.clients: {source} has {number} parties, not {run.data.clients}: leave clients out"]


def _check_data(run: RunConfig) -> None:
    """Raise DataError unless the data set is known here."""
    from fedloom.data.sources import check_name

    try:
        check_name(run.data.name)
    except DataError as error:
        if run.engine.name != "net":
            raise
        hint = f"If {run.data.name!r} is the nodes' own rows, describe them with [data.form]."
        raise DataError(f"{error} {hint}") from None


def _check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError unless the device is there, and the engine can use it."""
    import torch

    from fedloom.experiment.engine import check

    check(engine)
    if engine.name == "ray":  # what counts is what the cluster has
        return
    try:
        torch.empty(0, device=engine.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {engine.device!r} can't be used here ({reason}); `cpu` always can") from None


def _values(source: str) -> dict[str, Any]:
    """The raw table of a path or name."""
    path = Path(source)
    if source.endswith(".toml"):
        if not path.is_file():
            raise ConfigError(f"{source} is a folder, not a file" if path.is_dir() else f"there is no file {source}")
        return _parsed(path.read_text(encoding="utf-8"), source)
    if ".py" in source:
        return {"method": source}
    shipped = experiments()
    if source in shipped:
        return _parsed(shipped[source], source)
    known = methods.registry()
    if source in known:
        return {"method": source}
    names = [*shipped, *known]
    raise ConfigError(f"there is no experiment or method {source!r}.{did_you_mean(source, names)}")


def experiments() -> dict[str, str]:
    """The experiment files that come with fedloom: their text by name."""
    folder = resources.files("fedloom") / "experiments"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None


def seeds_of(text: str) -> list[int]:
    """`0,2` or `0-4`, or both.

    Raises:
        ConfigError: it is not written so.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            found += range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            found = []
        if not found:
            raise ConfigError(f"--seeds takes numbers such as 0,1,2 or 0-4, not {text!r}")
    return found


def override(values: dict[str, Any], text: str) -> None:
    """Apply `a.b.c=value` in place.

    Raises:
        ConfigError: it is not written so.
    """
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override has the form dotted.key=value, not {text!r}")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        if raw.startswith(("[", "{")):
            raise ConfigError(f"{key}: {raw} can't be read; a shell needs quotes, as in -s '{key}=[\"mlp\"]'") from None
        value = raw  # a bare word
    *path, last = key.split(".")
    table = values
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {part!r} holds a value, not a table")
    table[last] = value
    for other in {"rounds": "iterations", "iterations": "rounds"}.get(key, "").split():
        values.pop(other, None)
