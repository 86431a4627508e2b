"""A run's file with a table `[sweep]`: what is varied, over which values, and by what it is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from fedloom.core.errors import ConfigError
from fedloom.core.method import problems
from fedloom.experiment.config import RunConfig
from fedloom.experiment.reading import check, table
from fedloom.reproduce.measure import Unit, lower
from fedloom.reproduce.spec import merged

Setting: TypeAlias = dict[str, Any]
"""Values by dotted keys, such as `params.lr`."""
CHECKED = 2000
"""Up to so many combinations of all tables are checked before any work; else those of each table by itself."""
SHOWN = 20
"""At most so many combinations of values are named that make no run."""


class _SweepModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Range(_SweepModel):
    """Numbers between two ends, for random and tpe."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = False
    """Whether they are drawn evenly on a logarithmic scale."""
    int: bool = False
    """Whether they are whole numbers."""

    @model_validator(mode="after")
    def _order(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low must be less than high, but {self.low:g} is not less than {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"on a logarithmic scale low must be above 0, not {self.low:g}")
        if self.int and (self.low % 1 or self.high % 1):
            raise ValueError("low and high of whole numbers must be whole")
        return self

    def samples(self) -> list[float]:
        """The ends and a value between, which show whether it is a range of valid settings."""
        between = (self.low * self.high) ** 0.5 if self.log else self.low + 0.37 * (self.high - self.low)
        found = [self.low, between, self.high]
        return [round(value) for value in found] if self.int else found


Values: TypeAlias = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[Any], Tag("values")],
    Discriminator(lambda value: "range" if isinstance(value, Mapping | Range) else "values"),
]
Over: TypeAlias = dict[str, Values]
"""What is varied: values or a range by dotted key."""


class SweepConfig(_SweepModel):
    """`[sweep]`."""

    search: Literal["grid", "random", "tpe"] = "grid"
    """`grid`: all combinations. `random`: draws. `tpe`: Optuna's, draws where earlier ones did well."""
    over: list[Over] = Field(min_length=1)
    """What is varied. Several tables are searched one after the other, each with the best values of those before."""
    trials: int | None = Field(None, ge=1)
    """Random and tpe: how many settings are tried, of each table; None for 20."""
    together: int = Field(4, ge=1)
    """tpe: how many settings are chosen at once, so that they can run side by side. More learn less from each other."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Random and tpe: of the draws. Runs have `seeds`."""
    measure: str = Field("accuracy", min_length=1)
    """What a setting is judged by: see docs/sweep.md."""
    better: Literal["more", "less"] | None = None
    """Which is better; None for less of a loss, bytes, seconds or an attack, and more of all else."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """Each setting is run with each of them, and judged by the mean."""
    confirm: tuple[int, ...] = ()
    """Further seeds with which the best setting and the file's own are run at the end."""

    @field_validator("over", mode="before")
    @classmethod
    def _tables(cls, over: Any) -> Any:
        tables = over if isinstance(over, list) else [over]
        return [_flat(one) if isinstance(one, Mapping) else one for one in tables]

    @field_validator("seeds", "confirm")
    @classmethod
    def _once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if twice := sorted({s for s in seeds if seeds.count(s) > 1}):
            raise ValueError(f"holds {twice[0]} twice")
        return seeds

    @model_validator(mode="after")
    def _belongs(self) -> SweepConfig:
        keys = [key for over in self.over for key in over]
        if not all(self.over):
            raise ValueError("over holds a table without a setting: name what is varied, or leave it out")
        if twice := sorted({k for k in keys if keys.count(k) > 1}):
            raise ValueError(f"over has {twice[0]} in two tables: vary it in one")
        if {"rounds", "iterations"} <= {*keys}:
            raise ValueError("over has rounds and iterations, of which a run has one: vary one of them")
        for key, inner in product(keys, keys):
            if inner.startswith(f"{key}."):
                raise ValueError(f"over has {key} and {inner}, which is a part of it: vary one of them")
        for key in keys:
            if key.partition(".")[0] in NOT_VARIED:
                raise ValueError(f"over can't vary {key}: {NOT_VARIED[key.partition('.')[0]]}")
        for key, values in ((key, values) for over in self.over for key, values in over.items()):
            if isinstance(values, Range):
                if self.search == "grid":
                    raise ValueError(f"{key} is a range, which a grid has no values of: list them, or search at random")
            elif not values:
                raise ValueError(f"{key} has no values: list at least one")
            elif any(value in values[:i] for i, value in enumerate(values)):
                raise ValueError(f"{key} lists a value twice")
        if self.search == "grid" and self.trials is not None:
            raise ValueError("trials belongs to random and tpe: a grid has as many as it has combinations")
        if both := sorted({*self.seeds} & {*self.confirm}):
            raise ValueError(f"confirm needs seeds that the search does not see, but {both[0]} is one of its seeds")
        return self

    @property
    def less(self) -> bool:
        """Whether less of the measure is better."""
        return lower(self.measure) if self.better is None else self.better == "less"

    @property
    def unit(self) -> Unit:
        """In which the measure is written."""
        if "accuracy" in self.measure and not self.measure.startswith(("rounds", "iterations", "bytes")):
            return Unit("%")
        return Unit("MB" if self.measure.startswith("bytes") else "%" if self.measure.endswith("recall") else "")

    @property
    def keys(self) -> list[str]:
        """All that is varied, in order."""
        return [key for over in self.over for key in over]

    def trials_of(self, over: Over) -> int:
        """How many settings are tried of a table."""
        if self.search != "grid":
            return self.trials or 20
        return prod(len(values) for values in over.values() if isinstance(values, list))


NOT_VARIED = {
    "seed": "a setting is judged over several seeds, which `seeds` lists",
    "name": "it moves no number",
    "title": "it moves no number",
    "engine": "it moves no number",
    "compare": "a sweep is of one run",
}
"""Keys that can't be varied, and why."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that is valid.

    Attributes:
        name: of its file.
        values: the run's own table, as in the file.
    """

    name: str
    title: str
    values: Mapping[str, Any]
    config: SweepConfig

    def run(self, setting: Setting, seed: int) -> RunConfig:
        """The run with a setting over the file's own.

        Raises:
            ConfigError: it is no valid run.
        """
        return check({"run": {**merged(self.values, nested(setting)), "seed": seed, "name": ""}}).run

    def own(self) -> RunConfig:
        """The run as the file has it."""
        return self.run({}, self.config.seeds[0])

    @property
    def moves_data(self) -> list[str]:
        """What of that which is varied changes who holds which rows, so that runs of one seed are not on the same."""
        return [key for key in self.config.keys if key.partition(".")[0] in ("data", "columns")]


def read(source: str, overrides: Sequence[str] = (), seeds: Sequence[int] | None = None) -> Sweep:
    """The sweep of a TOML file, with changes over it.

    Args:
        source: its path.
        overrides: `dotted.key=value`, of the run or of `sweep.…`.
        seeds: in place of the file's.

    Raises:
        ConfigError: with everything that is wrong, one problem a line: keys, values, and the combinations of values
            that make no run.
    """
    values = table(source, overrides)
    if "compare" in values:
        raise ConfigError("[compare] and [sweep] don't go together: leave one out")
    if "sweep" not in values:
        raise ConfigError(f"{source} has no table [sweep], which says what is varied: see docs/sweep.md")
    given, title = values.pop("sweep"), str(values.pop("title", ""))
    if seeds is not None and isinstance(given, dict):
        given = {**given, "seeds": list(seeds)}
    try:
        config = SweepConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(_plain(p) for p in problems(error, SweepConfig, "sweep"))) from None
    found = Sweep(Path(source).stem, title, values, config)
    found.own()
    if config.search != "grid":
        _needs_optuna(config.search)
    if wrong := [*_invalid(found)]:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise ConfigError("\n".join([*wrong[:SHOWN], *more]))
    return found


def _needs_optuna(search: str) -> None:
    if find_spec("optuna") is None:
        raise ConfigError(f"sweep.search: {search} needs an extra: pip install 'fedloom[sweep]'")


def told(setting: Setting) -> str:
    """`params.lr = 0.01, params.tau = 5`."""
    return ", ".join(f"{key} = {shown(value)}" for key, value in setting.items()) or "as in the file"


def shown(value: Any) -> str:
    """A value in a few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def nested(setting: Setting) -> dict[str, Any]:
    """Dotted keys as tables within tables."""
    found: dict[str, Any] = {}
    for key, value in setting.items():
        *path, last = key.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found


def _flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Tables within tables as dotted keys. A table with an end of a range is one."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{at}.{key}" if at else key
        inner = isinstance(value, Mapping) and value and not {"low", "high"} & value.keys()
        found |= _flat(value, name) if inner else {name: value}
    return found


def _plain(problem: str) -> str:
    """A problem of a value that may be a list or a range, without the word for which of both it was taken for."""
    return problem.replace(".range", "").replace(".values", "").replace("a valid list", "a list, or a table of a range")


def _invalid(sweep: Sweep) -> Iterator[str]:
    """The values, or combinations of values, that make no run, each with the reason."""
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
                sweep.run({key: values[key][at] for key, at in zip(values, places, strict=True)}, sweep.config.seeds[0])
            except ConfigError as error:
                for line in str(error).splitlines():
                    wrong.setdefault(line, []).append(places)
        for line, places_of in wrong.items():
            for setting in _fewest(values, places_of):
                yield f"{told(setting)}: {line}"


def _fewest(values: Mapping[str, Sequence[Any]], wrong: Sequence[tuple[int, ...]]) -> Iterator[Setting]:
    """The least that one must say of combinations to name those that are wrong and no other."""
    keys = [*values]
    for size in range(1, len(keys) + 1):
        for of in combinations(range(len(keys)), size):
            found = dict.fromkeys(tuple(places[i] for i in of) for places in wrong)
            others = prod(len(values[keys[i]]) for i in range(len(keys)) if i not in of)
            if len(found) * others == len(wrong):
                for places in found:
                    yield {keys[i]: values[keys[i]][at] for i, at in zip(of, places, strict=True)}
                return
