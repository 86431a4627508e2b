"""The table `[sweep]` of a run's file: varied settings, their values, and the metric."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from fedloom.core.errors import ConfigError
from fedloom.core.problems import problems
from fedloom.experiment.config.overrides import merged
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.reading import check, read_values
from fedloom.experiment.run.metrics import MAIN, MAIN_MODE
from fedloom.report.metrics import RunMetric, Unit

SettingValues: TypeAlias = dict[str, Any]
"""Values by dotted keys, such as `params.lr`."""
CHECKED = 2000
"""Maximum number of combinations checked in advance; above it, only those within each table are
checked.
"""
SHOWN = 20
"""Maximum number of invalid combinations listed."""


class _SweepModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(_SweepModel):
    """An interval, for random and tpe."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = False
    """Whether to draw uniformly on a logarithmic scale."""
    int: bool = False
    """Whether to draw integers."""

    @model_validator(mode="after")
    def _order(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(
                f"low must be less than high, but low is {self.low:g} and high {self.high:g}"
            )
        if self.log and self.low <= 0:
            raise ValueError(f"low must be above 0 on a logarithmic scale, not {self.low:g}")
        if self.int and (self.low % 1 or self.high % 1):
            raise ValueError("low and high must be integers if int = true")
        return self

    def samples(self) -> list[float]:
        """The ends and a value between, to check that the interval is valid."""
        between = (
            (self.low * self.high) ** 0.5 if self.log else self.low + 0.37 * (self.high - self.low)
        )
        found = [self.low, between, self.high]
        return [round(value) for value in found] if self.int else found


Values: TypeAlias = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[Any], Tag("values")],
    Discriminator(lambda value: "range" if isinstance(value, Mapping | Range) else "values"),
]
Over: TypeAlias = dict[str, Values]
"""Varied settings: values or an interval by dotted key."""


class SweepConfig(_SweepModel):
    """`[sweep]`."""

    search: Literal["grid", "random", "tpe"] = "grid"
    """`grid`: all combinations. `random`: random search. `tpe`: Optuna's tree-structured Parzen
    estimator.
    """
    over: list[Over] = Field(min_length=1)
    """Varied settings. Several tables are searched in sequence, each with the best values of the
    earlier ones.
    """
    trials: int | None = Field(None, ge=1)
    """random and tpe: number of trials per table; None for 20."""
    together: int = Field(4, ge=1)
    """tpe: number of trials proposed at a time, which can run in parallel; more make the search
    less informed.
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """random and tpe: seed of the draws. Seeds of runs are `seeds`."""
    metric: str = Field("accuracy", min_length=1)
    """The metric to optimize: see docs/sweep.md. If the file names none, it is that by which
    methods are compared: the own accuracy of natural owners, or of a method with evaluation modes
    in the first.
    """
    better: Literal["higher", "lower"] | None = None
    """Direction; None for lower of a loss, an error, bytes, rounds, seconds or an attack, and
    higher of all others.
    """
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Seeds of each trial, which is ranked by its mean."""
    validation: float = Field(0.25, ge=0, lt=1)
    """Share of the training rows on which settings are compared; 0 compares them on the test rows.
    """
    confirm: tuple[int, ...] = ()
    """Further seeds, to run the best and the file's own setting with at the end, on all training
    rows and the test rows.
    """

    @field_validator("over", mode="before")
    @classmethod
    def _tables(cls, over: Any) -> Any:
        tables = over if isinstance(over, list) else [over]
        return [_flat(one) if isinstance(one, Mapping) else one for one in tables]

    @field_validator("seeds", "confirm")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if twice := sorted({s for s in seeds if seeds.count(s) > 1}):
            raise ValueError(f"lists {twice[0]} twice")
        return seeds

    @model_validator(mode="after")
    def _belongs(self) -> "SweepConfig":
        keys = [key for over in self.over for key in over]
        if not all(self.over):
            raise ValueError("over has an empty table. List settings to vary, or remove it.")
        if twice := sorted({k for k in keys if keys.count(k) > 1}):
            raise ValueError(f"over lists {twice[0]} in two tables. Keep one.")
        if {"rounds", "iterations"} <= {*keys}:
            raise ValueError("over lists both rounds and iterations. Keep one.")
        for key, inner in product(keys, keys):
            if inner.startswith(f"{key}."):
                raise ValueError(f"over lists {key} and {inner}, which is part of it. Keep one.")
        for key in keys:
            if key.partition(".")[0] in NOT_VARIED:
                raise ValueError(f"over cannot vary {key}: {NOT_VARIED[key.partition('.')[0]]}")
        for key, values in ((key, values) for over in self.over for key, values in over.items()):
            if isinstance(values, Range):
                if self.search == "grid":
                    raise ValueError(
                        f"{key} is an interval, but a grid needs a list of values. List them, or "
                        "set search = 'random'."
                    )
            elif not values:
                raise ValueError(f"{key} has no values. List at least one.")
            elif any(value in values[:i] for i, value in enumerate(values)):
                raise ValueError(f"{key} lists a value twice")
        if self.search == "grid" and self.trials is not None:
            raise ValueError(
                "trials is valid for random and tpe only; a grid runs all combinations. Remove it."
            )
        if both := sorted({*self.seeds} & {*self.confirm}):
            raise ValueError(f"confirm must not share seeds with seeds, but both list {both[0]}")
        return self

    @property
    def ranked(self) -> RunMetric:
        """The metric as a value."""
        return RunMetric.parse(self.metric)

    @property
    def less(self) -> bool:
        """Whether lower is better."""
        return self.ranked.lower if self.better is None else self.better == "lower"

    @property
    def unit(self) -> Unit:
        """The unit of the metric."""
        name = self.ranked.cost or self.ranked.metric.name
        if name.startswith("bytes"):
            return Unit("MB")
        return Unit("%" if "accuracy" in name or name.endswith("recall") else "")

    @property
    def ranked_by(self) -> str:
        """`accuracy on validation rows`."""
        return f"{self.metric} on validation rows" if self.validation else self.metric

    @property
    def keys(self) -> list[str]:
        """All varied settings, in order."""
        return [key for over in self.over for key in over]

    def trials_of(self, over: Over) -> int:
        """The number of trials of a table."""
        if self.search != "grid":
            return self.trials or 20
        return prod(len(values) for values in over.values() if isinstance(values, list))


NOT_VARIED = {
    "seed": "list seeds in `seeds`",
    "name": "it changes no result",
    "title": "it changes no result",
    "engine": "it changes no result",
    "compare": "a sweep has one run",
}
"""Keys that cannot be varied, and why."""


@dataclass(frozen=True)
class Sweep:
    """A validated sweep.

    Attributes:
        name: the file's name without suffix.
        values: the run's settings in the file.
    """

    name: str
    title: str
    values: Mapping[str, Any]
    config: SweepConfig

    def run(self, setting: SettingValues, seed: int, *, validation: float = 0.0) -> RunConfig:
        """The run with a setting over the file's values.

        Args:
            validation: share of the training rows to test on in place of the test rows.

        Raises:
            ConfigError: the run is invalid.
        """
        values = merged(self.values, nested(setting))
        values = merged(values, {"data": {"validation": validation}}) if validation else values
        return check({"run": {**values, "seed": seed, "name": ""}}).run

    def own(self) -> RunConfig:
        """The run with the file's own setting."""
        return self.run({}, self.config.seeds[0])

    @property
    def moves_data(self) -> list[str]:
        """Varied settings that change the data, so that runs of one seed have different rows."""
        return [key for key in self.config.keys if key.partition(".")[0] in ("data", "columns")]


def read(
    source: str,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    trust: Collection[str] = (),
) -> Sweep:
    """Read a sweep from a TOML file.

    Args:
        source: path of the file, or "-" for standard input.
        overrides: `dotted.key=value`, for the run or for `sweep.…`.
        seeds: override the file's seeds.
        trust: code that a file outside the working folder may name.

    Raises:
        ConfigError: keys, values or combinations of values are invalid; the message lists all
            problems, one per line.
    """
    values = read_values(source, overrides, trust=trust)
    if "compare" in values:
        raise ConfigError("[compare] and [sweep] cannot be combined. Remove one.")
    if "sweep" not in values:
        raise ConfigError(
            f"{source} has no table [sweep]. Add one that lists the settings to vary (see "
            "docs/sweep.md)."
        )
    given, title = values.pop("sweep"), str(values.pop("title", ""))
    if seeds is not None and isinstance(given, dict):
        given = {**given, "seeds": list(seeds)}
    try:
        config = SweepConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_plain(p) for p in problems(error, SweepConfig, "sweep"))
        ) from None
    found = Sweep("sweep" if source == "-" else Path(source).stem, title, values, config)
    if isinstance(given, Mapping) and "metric" not in given:
        main = _main_metric(found.own(), moves={*config.keys} & {"method", "params.adapt_steps"})
        found = replace(found, config=config.model_copy(update={"metric": main}))
        config = found.config
    if found.own().data.validation or "data.validation" in config.keys:
        raise ConfigError(
            "data.validation is set by the sweep itself: set validation in [sweep] in its place"
        )
    if config.search != "grid" and find_spec("optuna") is None:
        raise ConfigError(
            f"sweep.search: {config.search} needs Optuna. Install it: pip install -e '.[sweep]'"
        )
    if wrong := [*_invalid(found)]:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise ConfigError("\n".join([*wrong[:SHOWN], *more]))
    return found


def _main_metric(run: RunConfig, moves: Collection[str]) -> str:
    """The metric by which a comparison compares the run, as `shared_metrics` of its result;
    `moves` are the varied settings that may move its evaluation mode.
    """
    method, settings, _ = run.resolve()
    main, own = MAIN["number" if run.data.task == "number" else "classes"]
    if method.setting == "vertical":
        return str(main)
    natural = run.data.partition == "natural" and run.data.own_test_rows != 0
    if settings.eval_modes:
        return str(replace(own, mode=MAIN_MODE if moves else settings.eval_modes[0]))
    return str(own if natural else main)


def setting_text(setting: SettingValues) -> str:
    """`params.lr = 0.01, params.tau = 5`."""
    return (
        ", ".join(f"{key} = {value_text(value)}" for key, value in setting.items())
        or "as in the file"
    )


def value_text(value: Any) -> str:
    """A value in at most four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def nested(setting: SettingValues) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    found: dict[str, Any] = {}
    for key, value in setting.items():
        *path, last = key.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def _flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys. A table with `low` or `high` is an interval."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{at}.{key}" if at else key
        inner = isinstance(value, Mapping) and value and not {"low", "high"} & value.keys()
        found |= _flat(value, name) if inner else {name: value}
    return found


def _plain(problem: str) -> str:
    """A validation message without the tag of the union of lists and intervals."""
    if problem.startswith("sweep.over."):
        problem = problem.replace(
            ": must be a list, such as", ": must be a list or an interval, such as"
        )
    return problem.replace(".range", "").replace(".values", "")


def _invalid(sweep: Sweep) -> Iterator[str]:
    """Invalid values or combinations of values, each with the reason."""
    tables = [
        {key: one.samples() if isinstance(one, Range) else one for key, one in over.items()}
        for over in sweep.config.over
    ]
    together = {key: values for each in tables for key, values in each.items()}
    if prod(map(len, together.values())) <= CHECKED:
        tables = [together]
    for values in tables:
        wrong: dict[str, list[tuple[int, ...]]] = {}
        for places in product(*(range(len(each)) for each in values.values())):
            try:
                sweep.run(
                    {key: values[key][at] for key, at in zip(values, places, strict=True)},
                    sweep.config.seeds[0],
                )
            except ConfigError as error:
                for line in str(error).splitlines():
                    wrong.setdefault(line, []).append(places)
        for line, places_of in wrong.items():
            for setting in _fewest(values, places_of):
                yield f"{setting_text(setting)}: {line}"


def _fewest(
    values: Mapping[str, Sequence[Any]], wrong: Sequence[tuple[int, ...]]
) -> Iterator[SettingValues]:
    """The smallest sets of values that describe exactly the invalid combinations."""
    keys = [*values]
    for size in range(1, len(keys) + 1):
        for of in combinations(range(len(keys)), size):
            found = dict.fromkeys(tuple(places[i] for i in of) for places in wrong)
            others = prod(len(values[keys[i]]) for i in range(len(keys)) if i not in of)
            if len(found) * others == len(wrong):
                for places in found:
                    yield {keys[i]: values[keys[i]][at] for i, at in zip(of, places, strict=True)}
                return
