"""Reads a config from a file, a name and flags; reports all errors together, before any work."""

import contextlib
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom import methods
from fedloom.core.errors import ConfigError, DataError, FedloomError, did_you_mean
from fedloom.core.method import Method
from fedloom.core.problems import problems
from fedloom.core.vocabulary import meant
from fedloom.data.sources import SOURCES
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.foreign_code import refuse_foreign_code
from fedloom.experiment.config.overrides import ALTERNATIVE, override
from fedloom.experiment.config.pretrained import AUTO
from fedloom.experiment.config.run import FEDERATION, EngineConfig, Experiment, RunConfig
from fedloom.experiment.plan.build import PLANNERS, resolve
from fedloom.support import toml
from fedloom.support.extensions import presets


def read(
    source: str,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
) -> Experiment:
    """Read an experiment. In a comparison, an overriding seed replaces its seeds, and a method its
    methods.

    Example:
        >>> read("quickstart").runs()[0].method
        'fedal'

    Args:
        source: path of a TOML file, "-" for standard input, or name of an experiment or method. A
            file's top-level keys are those of `RunConfig`, and `title` and `[compare]`.
        overrides: `dotted.key=value`, with a TOML value or a bare word.
        flags: top-level keys and values from the command line; None is ignored.
        trust: code that a file outside the working folder may name, such as `mine.py` or
            `package.module:name`.

    Raises:
        ConfigError: with all errors, one on each line.
    """
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"read takes the name or file of an experiment, not a {type(source).__name__}"
        )
    values = read_values(str(source), overrides, flags, trust)
    for key, command in {"sweep": "sweep", "rows": "reproduce"}.items():
        if key in values:
            raise ConfigError(f"{source} has a table {key}: use fedloom {command} {source}")
    top: dict[str, Any] = {k: values.pop(k) for k in ("title", "compare") if k in values}
    given = {k for k, v in (flags or {}).items() if v is not None} | {
        o.partition("=")[0] for o in overrides
    }
    if "compare" in top and "seed" in given:
        top["compare"] = {**top["compare"], "seeds": [values["seed"]]}
    if "method" in given:
        top.pop("compare", None)
    return check({**top, "run": values})


def read_values(
    source: str,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    trust: Collection[str] = (),
) -> dict[str, Any]:
    """The values of `read` before they are checked; arguments as in `read`.

    Raises:
        ConfigError: an unknown file or name, invalid TOML, or an invalid override; or a file that
            names code.
    """
    values = _values(source)
    if source.endswith(".toml") or source == "-":
        refuse_foreign_code(values, Path(source), trust)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
            values.pop(ALTERNATIVE.get(key, ""), None)
    for text in overrides:
        override(values, text)
    return values


def check(values: Mapping[str, Any]) -> Experiment:
    """The checked experiment. Raises one ConfigError with all errors: keys, values, names and
    parameters.
    """
    errors: list[str] = []
    rest = dict(values)
    experiment = None
    while experiment is None:  # invalid values are removed, so that the rest is checked too
        try:
            experiment = Experiment(**rest)
        except ValidationError as error:
            errors += [
                _relocated(p.removeprefix("run."), rest) for p in problems(error, Experiment)
            ]
            before, rest = rest, _without(rest, [item["loc"] for item in error.errors()])
            if rest == before:
                raise ConfigError("\n".join(errors)) from None
    experiment = _with_clients(
        _with_server(experiment, data_invalid=any(e.startswith("data") for e in errors))
    )
    try:
        runs = experiment.runs()
    except ConfigError as error:
        errors.append(str(error))
        runs = []
    for run in runs:
        errors += [e for e in _errors(run) if e not in errors]
    if errors:
        raise ConfigError("\n".join(errors))
    return experiment


def _relocated(problem: str, values: Mapping[str, Any]) -> str:
    """The error on an unknown setting of the run or of [data], with its full name if it is one of
    another section, of the partition or of the method; also for the word of another library.
    """
    where, _, rest = problem.partition(": there is no such setting.")
    section, _, name = where.rpartition(".")
    if not rest or section not in ("", "data"):
        return problem
    run = values.get("run")
    run = run if isinstance(run, Mapping) else {}
    method = run.get("method", RunConfig.model_fields["method"].default)
    places = _places(name, str(method), run.get("data"), () if section else RunConfig.model_fields)
    return f"{where}: there is no such setting. Write {' or '.join(places)}." if places else problem


RARE = ("pretrained", "topology", "faults", "churn", "columns")
"""Sections whose settings a hint names only if no other has one of that name."""


def _places(name: str, method: str, data: Any, top: Collection[str]) -> list[str]:
    """The full names of the settings that are called `name`, or stand for it, beside those at the
    `top`; those of the sections `RARE` only if there is no other.
    """
    from fedloom.data.partitions import PARTITIONS

    kinds = {key: field.annotation for key, field in RunConfig.model_fields.items()}
    sections: dict[str, Collection[str]] = {
        key: fields
        for key, kind in kinds.items()
        if (fields := getattr(kind, "model_fields", None))
    }
    scheme = PARTITIONS.get(
        str((data if isinstance(data, Mapping) else {}).get("partition", "dirichlet"))
    )
    sections["data.options"] = [option.name for option in scheme.options] if scheme else []
    with contextlib.suppress(FedloomError):
        sections["params"] = methods.find(method).config.model_fields
    rare = {key: sections.pop(key) for key in RARE if key in sections}
    if own := [f"{key}.{name}" for key, known in sections.items() if name in known]:
        return own
    if found := meant(name, top):
        return [found]
    own = [f"{key}.{word}" for key, known in sections.items() if (word := meant(name, known))]
    return own or [f"{key}.{name}" for key, known in rare.items() if name in known]


def _with_clients(experiment: Experiment) -> Experiment:
    """Set the default number of clients of the method's setting."""
    run, known = experiment.run, _methods(experiment)
    planner = PLANNERS[known[0].setting if known else "horizontal"]
    try:
        nodes = None
        if run.engine.name == "net":
            text = Path(run.engine.federation or FEDERATION).read_text(encoding="utf-8")
            nodes = len(toml.loads(text)["nodes"])
        clients = planner.clients(run, nodes)
    # reported where the file is used
    except (FedloomError, OSError, ValueError, KeyError, TypeError):
        return experiment
    if clients is None or "clients" in run.data.model_fields_set:
        return experiment
    data = run.data.model_copy(update={"clients": clients})
    return experiment.model_copy(update={"run": run.model_copy(update={"data": data})})


def _with_server(experiment: Experiment, data_invalid: bool) -> Experiment:
    """Set the defaults of test rows, public rows, the server's rows and a pretrained model by what
    the methods need: in all runs, for equal splits. With an invalid [data] section, a model to
    train gets rows too, to avoid a misleading error.
    """
    data, own, known = experiment.run.data, experiment.run.pretrained, _methods(experiment)
    data = data.model_copy(update=shared_out(data, known))
    if data.server_rows == 0:
        return experiment.model_copy(
            update={"run": experiment.run.model_copy(update={"data": data})}
        )
    pretrains = any(
        {"pretrained server model", "pretrained encoder"} & {*method.needs} for method in known
    )
    if pretrains and not own.given:
        own = own.model_copy(update={"model": AUTO})
    if data.server_rows is None and (
        ((pretrains or data_invalid) and own.to_train)
        or any("server rows" in method.needs for method in known)
    ):
        data = data.model_copy(update={"server_rows": "auto"})
    return experiment.model_copy(
        update={"run": experiment.run.model_copy(update={"data": data, "pretrained": own})}
    )


def shared_out(data: DataConfig, known: Sequence[Method]) -> dict[str, Any]:
    """The numbers of rows that are set aside, where the settings leave them to the methods: no
    public rows that none of them reads, and no test rows that nobody asked for if all of them
    describe rows.

    Example:
        >>> shared_out(DataConfig(), [methods.named("fedglm")])
        {'public_rows': 0, 'test_fraction': 0.0}
        >>> shared_out(DataConfig(), [methods.named("fedglm"), methods.named("fedmd")])
        {}
    """
    found: dict[str, Any] = {}
    if not known or any(method.setting == "vertical" for method in known):
        return found
    # a file of public rows also scales columns
    if data.public_rows is None and not data.own and not any(m.reads_public for m in known):
        found["public_rows"] = 0
    asked = data.test_fraction, data.test, data.test_rows, data.validation or None
    if asked == (None,) * len(asked) and all(method.every_row for method in known):
        found["test_fraction"] = 0.0
    return found


def _methods(experiment: Experiment) -> list[Method]:
    """The known methods of an experiment; `_errors` reports the others."""
    run, known = experiment.run, []
    for entry in experiment.compare.methods if experiment.compare else (run.method,):
        name = str(entry if isinstance(entry, str) else entry.get("method", run.method))
        with contextlib.suppress(FedloomError):
            known.append(methods.named(name))
    return known


def _without(values: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    """The table without the values at the paths; without the whole section if a path does not
    exist.
    """
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


def _errors(run: RunConfig) -> list[str]:
    """Errors in the names and parameters of a run whose types are valid."""
    from fedloom import models
    from fedloom.data import flower, partitions

    errors, rounds = [], 0
    try:
        _, _, rounds, _ = resolve(run)
        errors += _count_errors(run)
    except FedloomError as error:
        errors.append(str(error))
    tests: list[tuple[str, Callable[[], object]]] = [
        ("engine", partial(_check_engine, run.engine)),
        *(
            ()
            if run.data.own or run.columns.private
            else (("data.name", partial(_check_data, run)),)
        ),
        ("data.partition", partial(flower.partition_at, run.data.partition))
        if ":" in run.data.partition
        else (
            "data.options",
            partial(partitions.check_options, run.data.partition, run.data.options),
        ),
        *(
            ("models.pool", partial(models.check_name, name, black_boxes=True))
            for name in run.models.names
        ),
        ("topology", partial(run.topology.check, run.data.clients)),
        (
            "churn",
            partial(run.churn.check, run.data.clients, rounds, run.data.unseen_clients(run.seed)),
        ),
    ]
    for setting, test in tests:
        try:
            test()
        except FedloomError as error:
            errors.append(f"{setting}: {error}")
    return errors


def _count_errors(run: RunConfig) -> list[str]:
    """Errors in the number of parties in files or a manifest. A missing manifest is accepted: it
    may be made later.
    """
    if run.columns.manifest and not Path(run.columns.manifest).exists():
        return []
    try:
        number = run.columns.number()
    except FedloomError as error:
        return [f"columns.manifest: {error}"]
    if number in (None, run.data.clients):
        return []
    source = "columns.files" if run.columns.files else "columns.manifest"
    return [
        f"data.clients: {source} has {number} parties, not {run.data.clients}: leave clients out"
    ]


def _check_data(run: RunConfig) -> None:
    """Raise DataError if the data set is unknown."""
    from fedloom.data.sources import check_name

    try:
        check_name(run.data.name)
    except DataError as error:
        if run.engine.name != "net":
            raise
        hint = f"If {run.data.name!r} is the nodes' own rows, describe them with [data.row_schema]."
        raise DataError(f"{error} {hint}") from None


def _check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError if the engine's settings are contradictory or its device is missing."""
    import torch

    engine.check()
    if engine.name == "ray":  # the cluster decides
        return
    try:
        torch.empty(0, device=engine.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device {engine.device!r} is not available here ({reason}): use cpu"
        ) from None


def _values(source: str) -> dict[str, Any]:
    """The values of a file, a shipped experiment, or a method."""
    path = Path(source)
    if source == "-":
        return _parsed(sys.stdin.read(), "standard input")
    if source.endswith(".toml"):
        if not path.is_file():
            raise ConfigError(
                f"{source} is a folder, not a file"
                if path.is_dir()
                else f"there is no file {source}"
            )
        return _parsed(path.read_text(encoding="utf-8"), source)
    if ".py" in source:
        return {"method": source}
    shipped = {**experiments(), **presets()}
    if source in shipped:
        return _parsed(shipped[source], source)
    known = methods.registry()
    if source in known:
        return {"method": source}
    names = [*shipped, *known]
    if source in SOURCES:
        raise ConfigError(
            f"{source} is a data set, not a method: fedloom run fedal -s data.name={source}"
        )
    if Path(source).is_file():
        raise ConfigError(
            f"{source} is neither a config (.toml) nor a method page (.py). If it is data, "
            f"fedloom data {source} writes the settings of a run"
        )
    if "," in source:
        raise ConfigError(
            f"{source} is no name: separate methods by spaces, as in fedloom compare fedal fedmd"
        )
    hint = did_you_mean(source, names) or (
        " fedloom list methods and fedloom list experiments name all; a page of yours is a path "
        "such as ./mine.py."
    )
    raise ConfigError(f"unknown experiment or method {source!r}.{hint}")


def experiments() -> dict[str, str]:
    """The texts of the preset files in the package, by name."""
    folder = resources.files("fedloom") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".toml")
    }


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return toml.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def seeds_of(text: str) -> list[int]:
    """Parse a number of seeds, `5` for 0 to 4, or the seeds themselves, `0,2`, `0-4` or a mix.
    Raises ConfigError.
    """
    if text.strip().isdecimal() and int(text) > 0:
        return seeds_from(int(text))
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            seeds += range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            seeds = []
        if not seeds:
            raise ConfigError(
                "--seeds takes a number of seeds, such as 5, or seeds such as 0,1,2 or 0-4 (one: "
                f"7-7), not {text!r}"
            )
    return seeds


MOST_SEEDS = 1000
"""Maximum number of seeds that a single number may ask for: a larger one is a seed, such as a year.
"""


def seeds_from(seeds: int | Sequence[int]) -> list[int]:
    """The seeds 0, 1, … of a number of seeds; a list as it is. Raises ConfigError."""
    if isinstance(seeds, Iterable):
        return list(seeds)
    if not isinstance(seeds, int):
        raise ConfigError(
            f"seeds must be a number of seeds, or a list such as [0, 1, 2], not {seeds!r}"
        )
    if isinstance(seeds, bool) or not 0 < seeds <= MOST_SEEDS:
        raise ConfigError(
            f"{seeds} is no number of seeds from 1 to {MOST_SEEDS}: list the seeds themselves, "
            "such as 0,1,2 on the command line and [0, 1, 2] in Python"
        )
    return list(range(seeds))
