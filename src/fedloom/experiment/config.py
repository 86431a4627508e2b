"""What a run is, as typed and frozen config. `fedloom.experiment.reading` makes it from files and flags."""

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
"""Settings of how a known data set is shared out."""


class DataConfig(Section):
    """`[data]`: which rows, and who holds them."""

    name: str = "digits"
    """A name of `fedloom list datasets`, or the path of a folder, Parquet or CSV file."""
    root: str | None = None
    """A folder with data sets in the hub's layout; otherwise the variable FEDLOOM_DATA, then the hub."""
    clients: int = Field(10, ge=1, le=100_000)
    """How many clients share the training rows; or parties the columns, 4 where nothing is said."""
    partition: str = "dirichlet"
    """A name of `fedloom list partitions`, or `package.module:name`: see `fedloom.data.flower.partition_at`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The partition's own settings, such as alpha and rows."""
    unseen: float = Field(0.0, ge=0, lt=1)
    """Share of the clients, drawn from the seed, that never take part in a round and are only evaluated."""
    server: int | Literal["auto"] | None = None
    """Labelled training rows that only the server holds, set aside before all else, the same for every seed. "auto": a
    quarter of them, at most 10,000. None is "auto" where a method of the experiment needs them, otherwise 0."""
    public: int | None = Field(None, ge=0)
    """Unlabelled rows that everybody holds, set aside before the partition; None for a fifth, at most 1,000."""
    test_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of the rows held out for the test, where the set has no official test split."""
    test_rows: int | None = Field(None, ge=1)
    """At most so many test rows; None for all."""
    own_test_rows: int = Field(100, ge=0)
    """Size of each client's test set with its own class mix."""
    form: FormConfig | None = None
    """What the rows of all parties look like, where each has its own at a node: then nobody else sees one."""

    @field_validator("server", mode="before")
    @classmethod
    def _rows(cls, server: Any) -> Any:
        if server not in ("auto", None) and (type(server) is not int or server < 0):
            raise ValueError('takes a number of rows, or "auto"')
        return server

    @model_validator(mode="after")
    def _some_unseen(self) -> DataConfig:
        count = self._number_unseen
        if self.unseen and not 0 < count < self.clients:
            found = "leaves no clients to train" if count else "is no client"
            raise ValueError(f"unseen = {self.unseen:g} of {self.clients} clients {found}: change unseen or clients")
        return self

    @model_validator(mode="after")
    def _apart(self) -> DataConfig:
        usual = {k: f.get_default(call_default_factory=True) for k, f in type(self).model_fields.items()}
        useless = [name for name in SHARED if getattr(self, name) != usual[name]]
        if self.own and useless:
            raise ValueError(
                f"with form each party's rows are its own, and nothing is shared out: leave {useless[0]} out"
            )
        if self.own and self.server not in (None, 0, "auto"):
            raise ValueError(
                'with form the server\'s rows are a file of its own: set server to "auto", or leave it out'
            )
        return self

    @property
    def own(self) -> bool:
        """Whether each party's rows are its own, and nobody else's."""
        return self.form is not None

    def server_rows(self, training: int) -> int:
        """How many rows the server gets, of so many for training."""
        return min(10_000, training // 4) if self.server == "auto" else self.server or 0

    @property
    def _number_unseen(self) -> int:
        return int(self.unseen * self.clients + 0.5)

    @property
    def training(self) -> int:
        """How many clients take part in rounds."""
        return self.clients - self._number_unseen

    def unseen_clients(self, seed: int) -> tuple[int, ...]:
        """Their numbers, rising: of so many clients, the same for every method on this seed."""
        drawn = stream(seed, "unseen").choice(self.clients, self._number_unseen, replace=False)
        return tuple(sorted(drawn.tolist()))


class BlackBoxConfig(Section):
    """`[models.black_box]`: how the clients of a pool that have no network take part."""

    learn: bool = True
    """Whether they are fitted again to what others answer; if not, they only teach."""
    refit: int = Field(25, ge=1)
    """Local steps of a neural client between two fits: a round is τ of them."""
    floor: float = Field(1e-3, gt=0, lt=0.1)
    """The least probability that one answers with: an exact zero would outweigh all others in a mean of logits."""
    public_weight: float = Field(1.0, gt=0)
    """The weight of a public row in a fit; an own row has 1."""


class ModelsConfig(Section):
    """`[models]`: each client draws its architecture from a list."""

    pool: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of `fedloom list models`, or `package.module:factory`; None for four small ones that fit the data."""
    norm: Literal["group", "batch", "none"] | None = None
    """Normalisation; None for each network's default."""
    black_box: BlackBoxConfig = BlackBoxConfig()


class EngineConfig(Section):
    """`[engine]`: where the parties run. It changes no number, but for the order of sums in `batched`."""

    name: Literal["local", "auto", "batched", "ray", "isolated", "net"] = "local"
    """`local`: one after the other, or side by side in `workers` processes. `batched`: those of one architecture at
    once, for a GPU or small networks without convolutions. `auto`: batched where that is faster, else local. `ray`: a
    cluster. `isolated`: each rebuilt for every call, to check a method page. `net`: at nodes of their own, each beside
    its own data."""
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
    federation: str | None = None
    """The file that says where the nodes are, such as `fedloom certs` makes (net)."""


class EvaluateConfig(Section):
    """`[evaluate]`: when models are evaluated."""

    points: int | None = Field(None, ge=1)
    """Evenly spaced evaluations in a run, the last at its end; None for every round, but at most 100."""
    attacks: int | None = Field(None, ge=1)
    """Measure what each party with columns could infer about labels if it knew so many of each class; None: don't."""


class RunConfig(Section):
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
    """Local steps of a client in all (passes over its rows, where a method counts those): the measure that is fair
    between methods of different tau."""
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
        """The method, its config and the number of rounds; `build.resolve` also checks what its setting forbids.

        Raises:
            ConfigError: the method, its preset or a parameter is not known or not valid; or the method averages
                weights, and the pool has several networks; or it does not support a black box of the pool; or black
                boxes have settings, and the pool has none; or too few clients take part.
        """
        method = methods.load(self.method) if self.method_is_file else methods.find(self.method)
        cfg = method.configure(self.preset, self.params)
        pool = set(self.models.pool or ())
        if "one network" in method.needs and len(pool) > 1:
            raise ConfigError(f"models.pool: {method.name} averages weights, so all need one network; name one")
        refuse_black_boxes(method, pool & models.BLACK_BOXES.keys())
        if not any(name in models.BLACK_BOXES or ":" in name for name in pool):
            refuse_settings(self)
        if cfg.participants(self.data.training) < method.min_clients:
            raise ConfigError(
                f"{method.name} learns from others' answers: let at least {method.min_clients} clients take part "
                "(data.clients, params.clients_per_round)"
            )
        rounds = self.rounds
        if rounds is None:
            rounds = -(-(self.iterations or DEFAULT_ITERATIONS) // cfg.iterations_per_round)
        if 0 < rounds < cfg.min_rounds:
            raise ConfigError(f"rounds: {method.name} with these settings needs at least {cfg.min_rounds} rounds")
        return method, cfg, rounds

    @property
    def method_is_file(self) -> bool:
        """Whether `method` names a file and not a registered method."""
        return ".py" in self.method


FEDERATION = "federation.toml"
"""The federation's file where a run names none."""
DEFAULT_ITERATIONS = 200


def refuse_black_boxes(method: Method, found: Collection[str]) -> None:
    """Refuse the black boxes of a pool if the method does not support them.

    Raises:
        ConfigError: with the methods that can.
    """
    if found and method.black_box is None:
        able = [m.name for m in methods.registry().values() if m.black_box]
        raise ConfigError(
            f"models.pool: {method.name} needs networks, and {min(found)} is a black box: leave it out, or take a "
            f"method that supports it: {', '.join(able)}"
        )


def refuse_settings(run: RunConfig) -> None:
    """Refuse settings of black boxes in a run that has none.

    Raises:
        ConfigError: some are set.
    """
    if run.models.black_box != BlackBoxConfig():
        raise ConfigError(
            f"models.black_box: models.pool has no black box: name one ({', '.join(models.BLACK_BOXES)}, or your own "
            "factory), or leave the section out"
        )


class CompareConfig(Section):
    """`[compare]`: the same run by several methods and seeds, on identical splits."""

    methods: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    """Names, or tables of `method`, `preset`, `params`, `name`. The first is the one compared with."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """One run for each method and seed."""


class Experiment(Section):
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
    values = run.model_dump()
    values["params"] = {k: "none" if v is None else v for k, v in values["params"].items()}
    return tomli_w.dumps(_without_none(values))


def _without_none(value: Any) -> Any:
    """TOML has no null: a setting that is None is left out, and is None again when it is read."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
