"""What a run is, as typed and frozen config. `fedloom.experiment.reading` makes it from files and flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedloom import methods
from fedloom.errors import ConfigError
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
    """`[engine]`: where the parties run. It changes no number, but for the order of sums in `batched`."""

    name: Literal["local", "auto", "batched", "ray", "isolated"] = "local"
    """`local`: one after the other, or side by side in `workers` processes. `batched`: those of one architecture at
    once, for a GPU or small networks without convolutions. `auto`: batched where that is faster, else local. `ray`: a
    cluster. `isolated`: each rebuilt for every call, to check a method page."""
    workers: int = Field(1, ge=1, le=1024)
    """Processes that run parties, of one thread each (local, ray)."""
    device: str = "cpu"
    """A torch device."""
    chunk_size: int | None = Field(None, ge=1)
    """The most parties at once (batched); None for what fits into memory."""
    memory_mb: int | None = Field(None, ge=0)
    """Megabytes of parties' state that may stay in memory (local, ray: per worker); the rest lies on disk. None for
    all."""
    address: str | None = None
    """Of a Ray cluster that runs already; None starts one on this machine."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """The share of a GPU that a worker of the ray engine takes."""


class EvaluateConfig(_Section):
    """`[evaluate]`: when the test sets are looked at."""

    points: int | None = Field(None, ge=1)
    """Evenly spaced evaluations in a run, the last at its end; None for every round, but at most 100."""


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
    faults: Faults = Faults()

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


def toml(run: RunConfig) -> str:
    """The resolved config as TOML, to be read back by `read`."""
    values = run.model_dump(mode="json")
    values["params"] = {k: "none" if v is None else v for k, v in values["params"].items()}
    return _toml(values)


def _toml(table: Mapping[str, Any], at: str = "") -> str:
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) and v is not None}
    inner = {k: v for k, v in table.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in plain.items()]
    text = "\n".join(lines) + "\n" if lines else ""
    for k, v in inner.items():
        name = f"{at}.{k}" if at else k
        text += f"\n[{name}]\n" + _toml(v, name)
    return text
