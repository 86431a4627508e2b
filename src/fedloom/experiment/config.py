"""What a run is: a TOML file (or flags that say the same) read into typed, frozen config.

Everything that is wrong is found before any work starts, and told at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedloom import methods
from fedloom.errors import ConfigError, FedloomError, did_you_mean
from fedloom.faults import Faults
from fedloom.method import Method, problems


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataConfig(_Section):
    """`[data]`: which rows, and who holds them."""

    name: str = "digits"
    """A name of `fedloom list datasets`, or the path of a folder, Parquet or CSV file."""
    root: str | None = None
    """A folder with data sets in the hub's layout; otherwise the variable FEDLOOM_DATA, then the hub."""
    clients: int = Field(10, ge=1, le=100_000)
    """How many clients share the training rows."""
    partition: str = "dirichlet"
    """A name of `fedloom list partitions`, or `package.module:name`: see `fedloom.data.flower.partition_at`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The partition's own settings, such as alpha and rows."""
    public: int | None = Field(None, ge=0)
    """Unlabelled rows that everybody holds, set aside before the partition; None for a fifth, at most 1,000."""
    test_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of the rows held out for the test, where the set has no official test split."""
    test_rows: int | None = Field(None, ge=1)
    """At most so many test rows; None for all."""
    own_test_rows: int = Field(100, ge=0)
    """Size of each client's test set with its own class mix."""


class ModelsConfig(_Section):
    """`[models]`: each client draws its architecture from a list."""

    pool: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of `fedloom list models`, or `package.module:factory`; None for four small ones that fit the data."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalisation; None for each network's default."""


class EngineConfig(_Section):
    """`[engine]`: where the parties run. It changes no number."""

    name: Literal["local", "isolated"] = "local"
    """`local` is the loop; `isolated` rebuilds a party for every call, to check a method page."""
    workers: int = Field(1, ge=1, le=1)
    """Processes. One, in this version."""
    device: str = "cpu"
    """A torch device."""


class EvaluateConfig(_Section):
    """`[evaluate]`: when the test sets are looked at."""

    points: int = Field(20, ge=1)
    """Evenly spaced evaluations in a run; the last is at its end."""


class FaultsConfig(_Section):
    """`[faults]`: probabilities of ordered misbehaviour, per call and party."""

    dropout: float = Field(0.0, ge=0, le=1)
    crash: float = Field(0.0, ge=0, le=1)
    nan: float = Field(0.0, ge=0, le=1)
    inf: float = Field(0.0, ge=0, le=1)
    shape: float = Field(0.0, ge=0, le=1)
    type: float = Field(0.0, ge=0, le=1)
    late: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _sum(self) -> FaultsConfig:
        Faults(**self.model_dump())
        return self

    def policy(self) -> Faults:
        """The same, as the engines take it."""
        return Faults(**self.model_dump())


class RunConfig(_Section):
    """One run of one method with one seed."""

    name: str = ""
    """What the run is called; its folder's name. Default: the method's."""
    method: str = "fedal"
    """A name of `fedloom list methods`, or the path of a method page."""
    preset: str = "recommended"
    """A named set of the method's settings."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings, over the preset."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Every random draw derives from it."""
    rounds: int | None = Field(None, ge=0)
    """Passes of the method's outer loop. Give this or iterations."""
    iterations: int | None = Field(None, ge=1)
    """Local steps of a client in all: the measure that is fair between methods of different tau."""
    data: DataConfig = DataConfig()
    models: ModelsConfig = ModelsConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    faults: FaultsConfig = FaultsConfig()

    @model_validator(mode="after")
    def _length(self) -> RunConfig:
        if self.rounds is not None and self.iterations is not None:
            raise ValueError("give rounds or iterations, not both")
        return self

    def resolve(self) -> tuple[Method, Any, int]:
        """The method, its config and the number of rounds.

        Raises:
            ConfigError: the method, its preset or a parameter is not known or not valid.
        """
        method = methods.load(self.method) if self.method_is_file else methods.find(self.method)
        cfg = method.configure(self.preset, self.params)
        if self.rounds is not None:
            return method, cfg, self.rounds
        iterations = self.iterations or DEFAULT_ITERATIONS
        return method, cfg, -(-iterations // cfg.iterations_per_round)

    @property
    def method_is_file(self) -> bool:
        """Whether `method` names a file and not a registered method."""
        return ".py" in self.method


DEFAULT_ITERATIONS = 200


class CompareConfig(_Section):
    """`[compare]`: the same run by several methods and seeds, on identical splits."""

    methods: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    """Names, or tables of `method`, `preset`, `params`, `name`. The first is the one compared with."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """One run for each method and seed."""


class Experiment(_Section):
    """A file: one run, or a comparison."""

    title: str = ""
    """What a reader sees above the report."""
    run: RunConfig = RunConfig()
    compare: CompareConfig | None = None

    def runs(self) -> list[RunConfig]:
        """The single runs, method by method, seed by seed."""
        if self.compare is None:
            return [self.run]
        found = []
        for entry in self.compare.methods:
            change: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
            change.setdefault("name", change.get("method", self.run.method))
            for seed in self.compare.seeds:
                both = {**self.run.model_dump(), **change, "seed": seed}
                both["params"] = {**self.run.params, **change.get("params", {})}
                found.append(validated(RunConfig, both))
        return found


def validated(model: type[Any], values: Mapping[str, Any]) -> Any:
    """`model(**values)`, or one ConfigError that lists everything that is wrong."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(problems(error, model))) from None


def read(source: str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of a TOML file, a named experiment, or a method's name, with changes over it.

    A file's top-level keys are those of `RunConfig`, beside `title` and `[compare]`.

    Args:
        source: path or name.
        overrides: `dotted.key=value`, the value in TOML's notation (a bare word is a string).
        flags: top-level keys and values that the command line gave; None values are ignored. In a comparison a
            seed replaces its seeds, and a method its methods.

    Raises:
        ConfigError: with everything that is wrong, one problem a line.
    """
    values = _values(source)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = value
            for other in {"rounds": ["iterations"], "iterations": ["rounds"]}.get(key, []):
                values.pop(other, None)
    for override in overrides:
        _override(values, override)
    top: dict[str, Any] = {k: values.pop(k) for k in ("title", "compare") if k in values}
    if "compare" in top and flags:  # a flag speaks for the whole comparison
        if flags.get("seed") is not None:
            top["compare"] = {**top["compare"], "seeds": [flags["seed"]]}
        if flags.get("method") is not None:
            del top["compare"]
    return check({**top, "run": values})


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


def _without(values: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    """The table less what stands at the paths; less the whole first part where a path leads nowhere."""
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
    from fedloom.data import flower, partitions, sources

    found = []
    try:
        run.resolve()
    except FedloomError as error:
        found.append(str(error))
    tests: list[tuple[str, Callable[[], object]]] = [
        ("engine", partial(_check_engine, run.engine)),
        ("data.name", partial(sources.check_name, run.data.name)),
        ("data.partition", partial(flower.partition_at, run.data.partition))
        if ":" in run.data.partition
        else ("data.options", partial(partitions.check_options, run.data.partition, run.data.options)),
        *(("models.pool", partial(models.check_name, name)) for name in run.models.pool or ()),
    ]
    for where, test in tests:
        try:
            test()
        except FedloomError as error:
            found.append(f"{where}: {error}")
    return found


def _check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError unless the device is there, and the engine can use it."""
    import torch

    try:
        torch.empty(0, device=engine.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {engine.device!r} can't be used here ({reason}); `cpu` always can") from None
    if engine.name == "isolated" and engine.device != "cpu":
        raise ConfigError(f"the isolated engine works on the CPU only, not on {engine.device!r}")


def _values(source: str) -> dict[str, Any]:
    """The raw table of a path or name."""
    path = Path(source)
    if source.endswith(".toml"):
        if not path.is_file():
            raise ConfigError(f"there is no file {source}")
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


def _override(values: dict[str, Any], text: str) -> None:
    """Apply `a.b.c=value` in place."""
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override has the form dotted.key=value, not {text!r}")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
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


def toml(run: RunConfig) -> str:
    """The resolved config as TOML, to be read back by `read`."""
    return _toml({k: v for k, v in run.model_dump(mode="json").items() if v is not None})


def _toml(table: Mapping[str, Any], at: str = "") -> str:
    import json

    plain = {k: v for k, v in table.items() if not isinstance(v, dict) and v is not None}
    inner = {k: v for k, v in table.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in plain.items()]
    text = "\n".join(lines) + "\n" if lines else ""
    for k, v in inner.items():
        name = f"{at}.{k}" if at else k
        text += f"\n[{name}]\n" + _toml(v, name)
    return text
