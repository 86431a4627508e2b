"""The table `[sweep]` of a run's file: varied settings, their values, and the metric."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import permutations, product
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
from fedloom.report.metrics import RunMetric

SettingValues: TypeAlias = dict[str, Any]
"""Values by dotted keys, such as `params.lr`."""
CHECKED = 2000
"""Maximum number of combinations that are checked in advance; of more, each value is, once."""


class _SweepModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(_SweepModel):
    """An interval, for `random` and `tpe`."""

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
    """`grid`: all combinations of listed values. `random`: Optuna's `RandomSampler`. `tpe`: its
    `TPESampler`, a tree-structured Parzen estimator.
    """
    over: Over = Field(min_length=1)
    """Varied settings, each with its values or an interval."""
    trials: int | None = Field(None, ge=1)
    """random and tpe: number of trials; None for 20."""
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

    @field_validator("over", mode="before")
    @classmethod
    def _dotted(cls, over: Any) -> Any:
        if isinstance(over, list):
            raise ValueError(
                "must be one table, [sweep.over], not a list of tables. For a second stage, "
                "sweep the best.toml of the first."
            )
        return _flat(over) if isinstance(over, Mapping) else over

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if twice := sorted({s for s in seeds if seeds.count(s) > 1}):
            raise ValueError(f"lists {twice[0]} twice")
        return seeds

    @model_validator(mode="after")
    def _belongs(self) -> "SweepConfig":
        if {"rounds", "iterations"} <= self.over.keys():
            raise ValueError("over lists both rounds and iterations. Keep one.")
        for key, inner in permutations(self.over, 2):
            if inner.startswith(f"{key}."):
                raise ValueError(f"over lists {key} and {inner}, which is part of it. Keep one.")
        for key, values in self.over.items():
            if why := NOT_VARIED.get(key.partition(".")[0]):
                raise ValueError(f"over cannot vary {key}: {why}")
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
    def number(self) -> int:
        """The number of trials."""
        if self.search != "grid":
            return self.trials or 20
        return prod(len(values) for values in self.over.values() if isinstance(values, list))


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

    def samples(self) -> list[SettingValues]:
        """The combinations of a grid, and of the ends and a value between of each interval. If
        they are too many, so few that each value is in one.
        """
        over = self.config.over
        values = [one.samples() if isinstance(one, Range) else one for one in over.values()]
        if prod(map(len, values)) <= CHECKED:
            return [dict(zip(over, each, strict=True)) for each in product(*values)]
        return [
            {key: one[n % len(one)] for key, one in zip(over, values, strict=True)}
            for n in range(max(map(len, values)))
        ]


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
    given, _ = values.pop("sweep"), values.pop("title", "")
    if seeds is not None and isinstance(given, dict):
        given = {**given, "seeds": list(seeds)}
    try:
        config = SweepConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_plain(p) for p in problems(error, SweepConfig, "sweep"))
        ) from None
    found = Sweep("sweep" if source == "-" else Path(source).stem, values, config)
    if isinstance(given, Mapping) and "metric" not in given:
        main = _main_metric(
            found.own(), moves=config.over.keys() & {"method", "params.adapt_steps"}
        )
        found = replace(found, config=config.model_copy(update={"metric": main}))
    if found.own().data.validation or "data.validation" in config.over:
        raise ConfigError(
            "data.validation is set by the sweep itself: set validation in [sweep] in its place"
        )
    if find_spec("optuna") is None:
        raise ConfigError('a sweep needs Optuna. Install it: pip install "fedloom[sweep]"')
    if wrong := [*_invalid(found)]:
        raise ConfigError("\n".join(wrong))
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
    """Each error of a combination of values, with the first combination that has it."""
    wrong: dict[str, list[SettingValues]] = {}
    for setting in sweep.samples():
        try:
            sweep.run(setting, sweep.config.seeds[0])
        except ConfigError as error:
            for line in str(error).splitlines():
                wrong.setdefault(line, []).append(setting)
    for line, settings in wrong.items():
        more = f" (and with {len(settings) - 1} more)" if settings[1:] else ""
        yield f"{setting_text(settings[0])}: {line}{more}"
