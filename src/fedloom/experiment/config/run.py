"""The typed, frozen config of runs and comparisons. `fedloom.experiment.plan.reading` reads it from
files and flags.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, field_validator, model_validator

from fedloom import methods, models
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.core.method import Method
from fedloom.core.rng import stream
from fedloom.core.task import TaskKind, refusal
from fedloom.experiment.config.aggregate import AggregateConfig, check_aggregate
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.local import LocalConfig, check_local
from fedloom.experiment.config.overrides import ALTERNATIVE
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.section import Section, validated
from fedloom.experiment.config.sections import ChurnConfig, ColumnsConfig, TopologyConfig


class BlackBoxConfig(Section):
    """`[models.black_box]`: clients whose model has no gradients."""

    learn: bool = True
    """Whether they are refitted to others' predictions; if not, they only teach."""
    refit_every: int = Field(25, ge=1)
    """Local steps between two fits, counted as for a neural client: τ in a round."""
    min_probability: float = Field(1e-3, gt=0, lt=0.1)
    """Lower bound of predicted probabilities: a zero would dominate a mean of logits."""
    public_weight: float = Field(1.0, gt=0)
    """Weight of a public row in a fit; an own row has weight 1."""


class ModelsConfig(Section):
    """`[models]`: the networks of the clients."""

    pool: tuple[str, ...] | None = Field(None, min_length=1)
    """Networks that clients draw from: names from `fedloom list models`, or
    `package.module:factory`. None: four small ones for the kind of data.
    """
    each: tuple[str, ...] | None = Field(None, min_length=1)
    """The network of each client, in order, in place of draws from `pool`."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalization; None for each network's default."""
    black_box: BlackBoxConfig = BlackBoxConfig()
    variance: bool = False
    """Whether networks that predict a number also predict its variance: they learn the likelihood
    of a Gaussian, and answers are compared as Gaussians.
    """

    @field_validator("pool", mode="before")
    @classmethod
    def _one_name(cls, pool: Any) -> Any:
        """One name is a pool of one network."""
        return (pool,) if isinstance(pool, str) and "," not in pool else pool

    @model_validator(mode="after")
    def _one_list(self) -> "ModelsConfig":
        if self.pool is not None and self.each is not None:
            raise ValueError("set pool or each, not both")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """All networks that the section names; () for the default ones."""
        return tuple(dict.fromkeys(self.each or self.pool or ()))

    def assigned(self, default: Sequence[str], clients: int, seed: int) -> tuple[str, ...]:
        """The network of each client: those of `each`, or draws from `pool` or the default one, as
        in section VI-A of FedAL.
        """
        pool = self.pool or default
        return self.each or tuple(
            pool[i] for i in stream(seed, "architectures").integers(len(pool), size=clients)
        )


class EngineConfig(Section):
    """`[engine]`: where the parties run. Results are equal on all engines, up to the order of sums
    in `batched`.
    """

    name: Literal["local", "auto", "batched", "ray", "isolated", "net"] = "local"
    """`local`: in one process or `workers` processes. `batched`: parties of one architecture
    together, for GPUs and small networks without convolutions. `auto`: batched where that is
    faster, else local. `ray`: on a Ray cluster.
    `isolated`: each party rebuilt for every call, to check a method page. `net`: at nodes, beside
        their data.
    """
    workers: int = Field(1, ge=1, le=1024)
    """Number of processes, of one thread each (local, ray)."""
    device: str = "cpu"
    """A torch device."""
    chunk_size: int | None = Field(None, ge=1)
    """Maximum number of parties at a time (batched); None for as many as fit into memory."""
    address: str | None = None
    """Address of a running Ray cluster; None starts one on this machine."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """Share of a GPU for each worker (ray)."""
    federation: str | None = None
    """The file that lists the nodes, as `fedloom certs` writes it (net)."""

    def check(self) -> None:
        """Refuse contradictory settings.

        Raises:
            ConfigError: two settings contradict each other.
        """
        one_process = {
            "batched": "it runs many parties at once in one process",
            "isolated": "it checks a method page in one process",
            "net": "each party runs at its own node",
        }
        if self.name in one_process and self.workers > 1:
            raise ConfigError(
                f"the {self.name} engine takes one worker, not {self.workers}: "
                f"{one_process[self.name]}. Leave workers out, or use engine.name = local"
            )
        if self.name in ("local", "auto") and self.workers > 1 and self.device != "cpu":
            raise ConfigError(
                f"workers run on the CPU, not on {self.device!r}: use the engine batched with "
                "one worker, or ray with gpus_per_worker"
            )
        if self.name == "ray" and self.device != "cpu":
            raise ConfigError(
                f"the ray engine assigns devices itself, not {self.device!r}: set "
                "gpus_per_worker, such as 0.25"
            )
        if self.name in ("isolated", "net") and self.device != "cpu":
            raise ConfigError(
                f"the {self.name} engine runs on the CPU only, not on {self.device!r}: leave "
                "device out"
            )
        for name, engines in (
            ("address", ("ray",)),
            ("federation", ("net",)),
            ("gpus_per_worker", ("ray",)),
            ("chunk_size", ("batched", "auto")),
        ):
            if getattr(self, name) and self.name not in engines:
                raise ConfigError(
                    f"{name} belongs to the engine {engines[0]}, not to {self.name}: leave it out"
                )


class EvaluateConfig(Section):
    """`[evaluate]`: when models are evaluated."""

    points: int | None = Field(None, ge=1)
    """Number of evenly spaced evaluations, the last one at the end; None for every round, at most
    100.
    """
    attack_labels: int | None = Field(None, ge=1)
    """Attack the labels in a vertical run, with this many known labels of each class; None: no
    attacks.
    """
    leaks: bool = False
    """Attack all messages at the end of the run, and report what each told against chance."""


class RunConfig(Section):
    """One run of one method with one seed.

    Example:
        >>> config = RunConfig(method="fedavg", rounds=3)
        >>> config.label, config.method_is_file, config.resolve()[2]
        ('fedavg', False, 3)
    """

    name: str = ""
    """Name of the run and its folder, without / and \\; "" for the method's name."""
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
    """Total local steps of a client (epochs, where a method counts those), to compare methods of
    different tau.
    """
    data: DataConfig = DataConfig()
    columns: ColumnsConfig = ColumnsConfig()
    models: ModelsConfig = ModelsConfig()
    pretrained: PretrainedConfig = PretrainedConfig()
    topology: TopologyConfig = TopologyConfig()
    churn: ChurnConfig = ChurnConfig()
    local: LocalConfig = LocalConfig()
    aggregate: AggregateConfig = AggregateConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    faults: Faults = Faults()

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_name(cls, engine: Any) -> Any:
        """The name of an engine stands for the table."""
        return {"name": engine} if isinstance(engine, str) else engine

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        """A name is one folder in runs/, never a path out of it."""
        if name in (".", "..") or not name.isprintable() or {*"/\\"} & {*name}:
            raise ValueError("must be the name of one folder, without / and \\")
        return name

    @model_validator(mode="after")
    def _length(self) -> "RunConfig":
        if self.rounds is not None and self.iterations is not None:
            raise ValueError("set rounds or iterations, not both")
        return self

    def resolve(self) -> tuple[Method, Any, int]:
        """The method, its config and the number of rounds, worked out once. `build.resolve` also
        calls `Planner.check`.

        Raises:
            ConfigError, MethodError: an unknown method, preset or parameter, an invalid value; or a
                pool, or numbers of clients or rounds, that the method does not support.

        Example:
            >>> method, settings, rounds = RunConfig(method="fedavg", iterations=30, params={"epochs": 2}).resolve()
            >>> method.name, settings.epochs, rounds
            ('fedavg', 2, 15)
        """  # noqa: E501
        return self._resolved

    @cached_property
    def _resolved(self) -> tuple[Method, Any, int]:
        method = methods.named(self.method)
        cfg = method.configure(self.preset, self.params)
        pool = set(self.models.names)
        if self.models.each and len(self.models.each) != self.data.clients:
            raise ConfigError(
                f"models.each: there are {len(self.models.each)} networks for "
                f"{self.data.clients} clients: name one for each client, or give models.pool, "
                "from which clients draw"
            )
        if "one network" in method.needs and len(pool) > 1:
            raise ConfigError(
                f"models.pool: {method.name} averages weights, so all clients need one network, "
                f"not {len(pool)}"
            )
        if "secure sums" in method.needs and not self.aggregate.secure:
            raise ConfigError(
                f"aggregate.secure: {method.name} hides rows in secure sums alone: set "
                "aggregate.secure = true"
            )
        refuse_black_boxes(method, pool & models.BLACK_BOXES.keys())
        if not any(name in models.BLACK_BOXES or ":" in name for name in pool):
            refuse_settings(self)
        if cfg.participants(self.data.training) < method.min_clients:
            raise ConfigError(
                f"{method.name} needs at least {method.min_clients} clients in a round, not "
                f"{cfg.participants(self.data.training)}: increase data.clients or "
                "params.clients_per_round"
            )
        # the active party's own columns take no part
        others = self.aggregate.secure and method.setting == "vertical"
        check_aggregate(self.aggregate, method, cfg, cfg.participants(self.data.training) - others)
        check_local(self.local, method, cfg, self.params, pool)
        rounds = self.rounds
        if rounds is None:
            rounds = -(-(self.iterations or DEFAULT_ITERATIONS) // cfg.iterations_per_round)
        if 0 < rounds < cfg.min_rounds:
            raise ConfigError(
                f"rounds: {method.name} with these settings needs at least {cfg.min_rounds} "
                f"rounds, not {rounds}"
            )
        return method, cfg, rounds

    @property
    def method_is_file(self) -> bool:
        """Whether `method` is the path of a page."""
        return ".py" in self.method

    @property
    def label(self) -> str:
        """The run's name, or its method's; of a page, the name after the colon or the file's
        without its folder.
        """
        file, _, name = self.method.partition(".py:")
        return self.name or name or (Path(file).stem if self.method_is_file else self.method)


def folder_name(run: RunConfig) -> str:
    """A run's folder within a comparison: `fedal-seed0`."""
    return f"{run.label}-seed{run.seed}".replace("/", "_")


FEDERATION = "federation.toml"
"""Default of `engine.federation`."""
DEFAULT_ITERATIONS = 200


def refuse_black_boxes(method: Method, black_boxes: Collection[str]) -> None:
    """Raise ConfigError if there are black boxes and the method does not support them."""
    if black_boxes and method.black_box is None:
        able = [m.name for m in methods.registry().values() if m.black_box]
        raise ConfigError(
            f"models.pool: {method.name} does not support the black box {min(black_boxes)}: "
            f"leave it out, or use {', '.join(able)}"
        )


def refuse_task(method: Method, kind: TaskKind) -> None:
    """Raise ConfigError if the method cannot predict what the label is."""
    tasks = {m.name: m.tasks for m in methods.registry().values() if m.setting == method.setting}
    if reason := refusal(
        method.name, kind, {**tasks, method.name: method.tasks}, method.only_classes
    ):
        hint = (
            'set data.task = "classes" if the label has classes'
            if kind == "number"
            else "choose another"
        )
        raise ConfigError(f"method: {reason}; {hint}")


def refuse_settings(run: RunConfig) -> None:
    """Raise ConfigError if `[models.black_box]` is set; for runs without black boxes."""
    if run.models.black_box != BlackBoxConfig():
        raise ConfigError(
            "models.black_box: models.pool has no black box: add one "
            f"({', '.join(models.BLACK_BOXES)}, or your own factory), or leave the section out"
        )


class CompareConfig(Section):
    """`[compare]`: several methods and seeds on identical splits."""

    methods: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    """Names, or tables of `method`, `preset`, `params`, `name`, `rounds`. The first is the
    reference.
    """
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """One run for each method and seed."""


class Experiment(Section):
    """The content of a file: a run or a comparison.

    Example:
        >>> [run.seed for run in Experiment(compare={"methods": ["fedavg"], "seeds": [0, 1]}).runs()]
        [0, 1]
    """  # noqa: E501

    title: str = ""
    """Title of the report."""
    run: RunConfig = RunConfig()
    compare: CompareConfig | None = None

    def runs(self) -> list[RunConfig]:
        """All runs, ordered by method, then by seed."""
        return [*self._runs]

    @cached_property
    def _runs(self) -> tuple[RunConfig, ...]:
        if self.compare is None:
            return (self.run,)
        runs = []
        for entry in self.compare.methods:
            change: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
            method = change.get("method", self.run.method)
            change.setdefault(
                "name", RunConfig(method=method).label if isinstance(method, str) else ""
            )
            for seed in self.compare.seeds:
                both = {**self.run.model_dump(), **change, "seed": seed}
                for length in ALTERNATIVE.keys() & change.keys():
                    both[ALTERNATIVE[length]] = change.get(ALTERNATIVE[length])
                both["params"] = {**self.run.params, **change.get("params", {})}
                runs.append(validated(RunConfig, both))
        names = [folder_name(run) for run in runs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two runs are called {twice[0]!r}: name each method and each seed once; in a "
                "file, entries of one method with other settings have a `name` each"
            )
        return tuple(runs)


def toml(run: RunConfig) -> str:
    """The config as TOML, which `read` reads back."""
    values = run.model_dump()
    values["params"] = {k: "none" if v is None else v for k, v in values["params"].items()}
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    """Leave out settings that are None, as TOML has no null; they are None again when read."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
