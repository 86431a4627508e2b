"""The typed, frozen config of runs and comparisons. `fedloom.experiment.reading` reads it from files and flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from fedloom import methods, models
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.core.method import Method, problems
from fedloom.core.rng import stream
from fedloom.experiment.columns import ColumnsConfig
from fedloom.experiment.form import FormConfig
from fedloom.experiment.pretrained import PretrainedConfig
from fedloom.experiment.section import Section
from fedloom.experiment.topology import ChurnConfig, TopologyConfig

SHARED = ("root", "partition", "options", "own_test_rows")
"""Settings of partitioning a data set."""


class DataConfig(Section):
    """`[data]`: the data set and its partition."""

    name: str = "digits"
    """A name from `fedloom list datasets`, or the path of a folder, Parquet or CSV file."""
    root: str | None = None
    """Folder of data sets in the hub's layout. None: the environment variable FEDLOOM_DATA, then the hub."""
    clients: int = Field(10, ge=1, le=100_000)
    """Number of clients, or of parties in the vertical setting (default 4)."""
    partition: str = "dirichlet"
    """A name from `fedloom list partitions`, or `package.module:name`: see `fedloom.data.flower.partition_at`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the partition, such as alpha."""
    unseen: float = Field(0.0, ge=0, lt=1)
    """Share of held-out clients: they take part in no round and are only evaluated. Drawn from the seed."""
    server: int | Literal["auto"] | None = None
    """Number of labelled training rows at the server, the same rows for every seed. "auto": a quarter, at most 10,000.
    None: "auto" if a method of the experiment needs them, otherwise 0."""
    public: int | None = Field(None, ge=0)
    """Number of public rows; None for a fifth of the training rows, at most 1,000."""
    test_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of test rows, for data sets without an official test split."""
    test_rows: int | None = Field(None, ge=1)
    """Maximum number of test rows; None for all."""
    own_test_rows: int = Field(100, ge=0)
    """Number of test rows of each client with its own class mix."""
    form: FormConfig | None = None
    """The schema of private rows, where each party's rows stay at its node."""

    @field_validator("server", mode="before")
    @classmethod
    def _rows(cls, server: Any) -> Any:
        if server not in ("auto", None) and (type(server) is not int or server < 0):
            raise ValueError('must be a number of rows of at least 0, or "auto"')
        return server

    @model_validator(mode="after")
    def _some_unseen(self) -> DataConfig:
        count = self._number_unseen
        if self.unseen and not 0 < count < self.clients:
            problem = "leaves no clients to train" if count else "is less than one client"
            raise ValueError(f"unseen = {self.unseen:g} of {self.clients} clients {problem}: change unseen or clients")
        return self

    @model_validator(mode="after")
    def _apart(self) -> DataConfig:
        defaults = {k: f.get_default(call_default_factory=True) for k, f in type(self).model_fields.items()}
        unused = [name for name in SHARED if getattr(self, name) != defaults[name]]
        if self.own and unused:
            raise ValueError(f"{unused[0]} does not apply with form, as nothing is partitioned: leave it out")
        if self.own and self.server not in (None, 0, "auto"):
            raise ValueError('with form, the server\'s rows come from a file: set server to "auto", or leave it out')
        return self

    @property
    def own(self) -> bool:
        """Whether each party's rows are private."""
        return self.form is not None

    def server_rows(self, training: int) -> int:
        """The number of rows at the server, given the number of training rows."""
        return min(10_000, training // 4) if self.server == "auto" else self.server or 0

    @property
    def _number_unseen(self) -> int:
        return int(self.unseen * self.clients + 0.5)

    @property
    def training(self) -> int:
        """Number of clients that are not held out."""
        return self.clients - self._number_unseen

    def unseen_clients(self, seed: int) -> tuple[int, ...]:
        """Numbers of the held-out clients, ascending; the same for every method on this seed."""
        drawn = stream(seed, "unseen").choice(self.clients, self._number_unseen, replace=False)
        return tuple(sorted(drawn.tolist()))


class BlackBoxConfig(Section):
    """`[models.black_box]`: clients whose model has no gradients."""

    learn: bool = True
    """Whether they are refitted to others' predictions; if not, they only teach."""
    refit: int = Field(25, ge=1)
    """Local steps between two fits, counted as for a neural client: τ in a round."""
    floor: float = Field(1e-3, gt=0, lt=0.1)
    """Lower bound of predicted probabilities: a zero would dominate a mean of logits."""
    public_weight: float = Field(1.0, gt=0)
    """Weight of a public row in a fit; an own row has weight 1."""


class ModelsConfig(Section):
    """`[models]`: the networks of the clients."""

    pool: tuple[str, ...] | None = Field(None, min_length=1)
    """Networks that clients draw from: names from `fedloom list models`, or `package.module:factory`. None: four small
    ones for the kind of data."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalisation; None for each network's default."""
    black_box: BlackBoxConfig = BlackBoxConfig()


class EngineConfig(Section):
    """`[engine]`: where the parties run. Results are equal on all engines, up to the order of sums in `batched`."""

    name: Literal["local", "auto", "batched", "ray", "isolated", "net"] = "local"
    """`local`: in one process or `workers` processes. `batched`: parties of one architecture together, for GPUs and
    small networks without convolutions. `auto`: batched where that is faster, else local. `ray`: on a Ray cluster.
    `isolated`: each party rebuilt for every call, to check a method page. `net`: at nodes, beside their data."""
    workers: int = Field(1, ge=1, le=1024)
    """Number of processes, of one thread each (local, ray)."""
    device: str = "cpu"
    """A torch device."""
    chunk_size: int | None = Field(None, ge=1)
    """Maximum number of parties at a time (batched); None for as many as fit into memory."""
    memory_mb: int | None = Field(None, ge=0)
    """Maximum megabytes of parties' state in memory (local; ray: per worker); the rest is on disk. None: no limit."""
    address: str | None = None
    """Address of a running Ray cluster; None starts one on this machine."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """Share of a GPU for each worker (ray)."""
    federation: str | None = None
    """The file that lists the nodes, as `fedloom certs` writes it (net)."""


class EvaluateConfig(Section):
    """`[evaluate]`: when models are evaluated."""

    points: int | None = Field(None, ge=1)
    """Number of evenly spaced evaluations, the last one at the end; None for every round, at most 100."""
    attacks: int | None = Field(None, ge=1)
    """Attack the labels in a vertical run, with this many known labels of each class; None: no attacks."""


class RunConfig(Section):
    """One run of one method with one seed."""

    name: str = ""
    """Name of the run and its folder; "" for the method's name."""
    method: str = "fedal"
    """A name from `fedloom list methods`, or the path of a method page."""
    preset: str = "recommended"
    """Named set of the method's settings."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the method; they override the preset."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of all random draws."""
    rounds: int | None = Field(None, ge=0)
    """Number of rounds. Set this or iterations."""
    iterations: int | None = Field(None, ge=1)
    """Total local steps of a client (epochs, where a method counts those), to compare methods of different tau."""
    data: DataConfig = DataConfig()
    columns: ColumnsConfig = ColumnsConfig()
    models: ModelsConfig = ModelsConfig()
    pretrained: PretrainedConfig = PretrainedConfig()
    topology: TopologyConfig = TopologyConfig()
    churn: ChurnConfig = ChurnConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _length(self) -> RunConfig:
        if self.rounds is not None and self.iterations is not None:
            raise ValueError("give rounds or iterations, not both")
        return self

    def resolve(self) -> tuple[Method, Any, int]:
        """The method, its config and the number of rounds. `build.resolve` also calls `Setting.check`.

        Raises:
            ConfigError, MethodError: an unknown method, preset or parameter, an invalid value; or a pool, or numbers of
                clients or rounds, that the method does not support.
        """
        method = methods.load(self.method) if self.method_is_file else methods.find(self.method)
        cfg = method.configure(self.preset, self.params)
        pool = set(self.models.pool or ())
        if "one network" in method.needs and len(pool) > 1:
            raise ConfigError(f"models.pool: {method.name} averages weights, so all clients need one network: name one")
        refuse_black_boxes(method, pool & models.BLACK_BOXES.keys())
        if not any(name in models.BLACK_BOXES or ":" in name for name in pool):
            refuse_settings(self)
        if cfg.participants(self.data.training) < method.min_clients:
            raise ConfigError(
                f"{method.name} needs at least {method.min_clients} clients in a round, not "
                f"{cfg.participants(self.data.training)}: increase data.clients or params.clients_per_round"
            )
        rounds = self.rounds
        if rounds is None:
            rounds = -(-(self.iterations or DEFAULT_ITERATIONS) // cfg.iterations_per_round)
        if 0 < rounds < cfg.min_rounds:
            raise ConfigError(
                f"rounds: {method.name} with these settings needs at least {cfg.min_rounds} rounds, not {rounds}"
            )
        return method, cfg, rounds

    @property
    def method_is_file(self) -> bool:
        """Whether `method` is the path of a page."""
        return ".py" in self.method


FEDERATION = "federation.toml"
"""Default of `engine.federation`."""
DEFAULT_ITERATIONS = 200


def refuse_black_boxes(method: Method, black_boxes: Collection[str]) -> None:
    """Raise ConfigError if there are black boxes and the method does not support them."""
    if black_boxes and method.black_box is None:
        able = [m.name for m in methods.registry().values() if m.black_box]
        raise ConfigError(
            f"models.pool: {method.name} does not support the black box {min(black_boxes)}: leave it out, or use "
            f"{', '.join(able)}"
        )


def refuse_settings(run: RunConfig) -> None:
    """Raise ConfigError if `[models.black_box]` is set; for runs without black boxes."""
    if run.models.black_box != BlackBoxConfig():
        raise ConfigError(
            f"models.black_box: models.pool has no black box: add one ({', '.join(models.BLACK_BOXES)}, or your own "
            "factory), or leave the section out"
        )


class CompareConfig(Section):
    """`[compare]`: several methods and seeds on identical splits."""

    methods: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    """Names, or tables of `method`, `preset`, `params`, `name`. The first is the reference of all differences."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """One run for each method and seed."""


class Experiment(Section):
    """The content of a file: a run or a comparison."""

    title: str = ""
    """Title of the report."""
    run: RunConfig = RunConfig()
    compare: CompareConfig | None = None

    def runs(self) -> list[RunConfig]:
        """All runs, ordered by method, then by seed."""
        if self.compare is None:
            return [self.run]
        runs = []
        for entry in self.compare.methods:
            change: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
            change.setdefault("name", change.get("method", self.run.method))
            for seed in self.compare.seeds:
                both = {**self.run.model_dump(), **change, "seed": seed}
                both["params"] = {**self.run.params, **change.get("params", {})}
                runs.append(validated(RunConfig, both))
        return runs


def validated(model: type[Any], values: Mapping[str, Any]) -> Any:
    """`model(**values)`. Raises one ConfigError with all errors."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(problems(error, model))) from None


def toml(run: RunConfig) -> str:
    """The config as TOML, which `read` reads back."""
    values = run.model_dump()
    values["params"] = {k: "none" if v is None else v for k, v in values["params"].items()}
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    """Leave settings that are None out, as TOML has no null; they are None again when read."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
