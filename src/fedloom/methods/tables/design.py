"""Columns of exact linear models: their names, the complete rows of an owner, and the agreement on
means and scales.

Columns are numbers, an indicator for each word of a category but the first, and with `owners =
"fixed"` an indicator for each owner but the first. Words and owners without a complete row have no
coefficient; the first one with a row is then the reference. Rows with a missing value are left out;
or, with `missing = "indicator"`, each column has an indicator of its missing values, which count as
the mean. A number to predict has a mean and a scale too.

An owner's columns are (n, p) in the order of `labels`, which all parties know from the run's
schema; a number to predict is one more at the end where sums are taken (`measured`). The server
calls `agree` once, before the first step; its three questions are the methods `exponents`, `sums`
and `squares` of the owners. What it returns is the `design`, of which owners get what they need
with each later question, so that all standardize alike:

    mean, scale, kept     (p,) of each column; `kept` says which are in the model
    outcome               (2,) mean and scale of a number to predict; zeros for classes
    rows, by_class, all   complete rows; those by class; with the incomplete ones
    negative              complete rows whose number to predict is below 0, which no count is
    left_out, reference   for the table of the fit: see `inference.fit`
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import Aggregator, Federation, MethodConfig, MethodError, Party, Shape
from fedloom.core.task import Number
from fedloom.methods.tables import newton
from fedloom.methods.tables.long_sums import decimal, shortest
from fedloom.methods.tables.steps import kept, refusal, tensors

GAP = "?"
"""The word of a missing value."""


class LinearConfig(MethodConfig):
    """A round is one Newton step."""

    TRIAL = (("l2", 1.0),)  # a fit exists where columns are collinear
    l2: float = Field(0.0, ge=0)
    """Penalty: half of it times the sum of squared coefficients of standardized columns is added to
    the negative log-likelihood.
    """
    owners: Literal["none", "fixed", "random"] = "none"
    """Whether each owner has an effect of its own: "fixed", one for each but the first; "random"
    (`fedglm`, least squares), drawn from a normal distribution whose variance is found by
    restricted maximum likelihood.
    """
    level: float = Field(0.95, gt=0, lt=1)
    """Of confidence intervals."""

    def local_steps_of(self, rows: int) -> None:
        """None: the coordinator computes from sums; owners take no optimizer steps."""

    @property
    def sums_stand_alone(self) -> bool:
        """Sums are of rows at the coefficients that the server sends."""
        return True

    @property
    def rows_add_up(self) -> bool:
        """Unless each owner has an effect of its own."""
        return self.owners != "fixed"

    def on_pooled_rows(self) -> tuple[Self, bool] | None:
        """See `MethodConfig.on_pooled_rows`: the owner's effect is that of a category."""
        if self.owners == "random":
            return None
        return self.model_copy(update={"owners": "none"}), self.owners == "fixed"

    @property
    def predicts_alike(self) -> bool:
        """See `MethodConfig.predicts_alike`."""
        return self.owners == "none"

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return refusal(aggregator)

    @property
    def iterations_per_round(self) -> int:
        """20 rounds unless the run says otherwise; most fits need eight."""
        return 10

    @property
    def min_rounds(self) -> int:
        """The second round accepts the first step."""
        return 2


def for_number(party: Party[object]) -> bool:
    """Whether the party predicts a number."""
    return party.context.target is not None


def class_names(party: Party[object]) -> list[str]:
    """The words of the classes; "class 0" if a word is a number."""
    names = party.context.class_names or range(max(party.context.classes, 1))
    return [f"class {name}" if str(name).isdecimal() else str(name) for name in names]


def time_column(party: Party[LinearConfig]) -> int | None:
    """The place of the column `time` of the settings, which is no covariate, or None without such a
    setting.
    """
    name = getattr(party.cfg, "time", None)
    if name is None:
        return None
    names = list(party.context.columns)
    if name not in names or party.context.words[names.index(name)]:
        numbers = [n for n, words in zip(names, party.context.words, strict=True) if not words]
        raise MethodError(
            f"params.time names the column of numbers with the times: {name!r} is none of {numbers}"
        )
    return names.index(name)


def indicated(party: Party[LinearConfig]) -> bool:
    """Whether missing values have indicators, and no row is left out for them."""
    return getattr(party.cfg, "missing", "") == "indicator"


def labels(party: Party[LinearConfig]) -> list[str]:
    """The names (p,) of all columns but the intercept, constant ones too."""
    names: list[str] = []
    for f, (name, words) in enumerate(zip(party.context.columns, party.context.words, strict=True)):
        if f != time_column(party):
            names += [f"{name}={words[place]}" for place in indicators(words)] if words else [name]
            names += [f"{name} is missing"] * indicated(party)
    fixed = party.cfg.owners == "fixed"
    return [*names, *(f"owner {owner}" for owner in owners(party)[1:] if fixed)]


def owners(party: Party[object]) -> Sequence[str]:
    """The names of the owners, or else their numbers."""
    return party.context.owners or [str(i) for i in range(party.context.parties)]


def levels(party: Party[LinearConfig]) -> list[tuple[str, list[str], int]]:
    """Of each category, and of owners with effects of their own: its name, its levels, and the
    place in `labels` of the second one's indicator.
    """
    found, at = [], 0
    for f, (name, words) in enumerate(zip(party.context.columns, party.context.words, strict=True)):
        if f == time_column(party):
            continue
        if words:
            found.append((name, [word for word in words if word != GAP], at))
        at += (len(indicators(words)) if words else 1) + indicated(party)
    if party.cfg.owners == "fixed":
        found.append(("owner", [*owners(party)], at))
    return found


def references(
    party: Party[LinearConfig], rows: np.ndarray, present: np.ndarray
) -> tuple[list[int], dict[str, str]]:
    """Which indicators to leave out, as the levels before theirs have no row among those that are
    fitted, so that theirs is the reference: their places, and the reference of each such category.

    Args:
        party: of the design.
        rows: (p,) the rows of each indicator, up to rounding.
        present: (p,) int64, the rows that have a value.
    """
    left_out, named = [], {}
    for name, words, at in levels(party):
        # the rows of each level but the first; if they are all rows that have a value, none is left
        # for the first one, and the indicators would add up to the intercept
        own = np.rint(rows[at : at + len(words) - 1])
        if len(own) and own.sum() == present[at]:
            first = int(np.flatnonzero(own)[0]) if own.any() else 0
            left_out.append(at + first)
            named[name] = words[1 + first]
    return left_out, named


def offsets(party: Party[LinearConfig]) -> np.ndarray:
    """What was subtracted from each column (p,) when it was read, so that float32 tells its numbers
    apart: see `labels`.
    """
    found: list[float] = []
    shifts = party.context.offset or (0.0,) * len(party.context.words)
    for f, (shift, words) in enumerate(zip(shifts, party.context.words, strict=True)):
        if f != time_column(party):
            found += [0.0] * len(indicators(words)) if words else [shift]
            found += [0.0] * indicated(party)
    return np.array([*found, *[0.0] * (len(labels(party)) - len(found))])


def indicators(words: Sequence[str]) -> list[int]:
    """The places of the words of a category that have an indicator: all but the first, and but that
    of a missing value, whose rows have none.
    """
    return [place for place, word in enumerate(words) if word != GAP][1:]


def columns(party: Party[LinearConfig], x: Tensor) -> np.ndarray:
    """The columns (n, p) float64 of rows x (n, ...), each contiguous, NaN where a value is missing:
    see `labels`. Numbers are the decimal ones that were read.
    """
    raw = decimal(np.asfortranarray(x.flatten(1).float().cpu().numpy()))
    parts, left_out = [np.empty((0, len(raw)))], time_column(party)
    for f, (values, words) in enumerate(zip(raw.T, party.context.words, strict=True)):
        if f == left_out:
            continue
        absent = np.isnan(values)
        hot = (values == np.array(indicators(words), np.float64)[:, None]).astype(np.float64)
        parts.append(np.where(absent, np.nan, hot) if words else values[None])
        if indicated(party):
            parts.append(absent[None].astype(np.float64))
    if party.cfg.owners == "fixed":
        own = np.arange(1, party.context.parties) == party.context.id
        parts.append(np.repeat(own[:, None].astype(np.float64), len(raw), axis=1))
    return np.concatenate(parts).T


def complete(party: Party[LinearConfig]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns (n, p), what is to be predicted (n,) and the times (n,), 0 without any, of the
    party's own rows without a missing value.
    """

    def make() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, at = party.context.rows, time_column(party)
        x, raw = columns(party, rows.every), rows.every.flatten(1).double().cpu().numpy()
        y = rows.y(torch.arange(len(rows), device=party.context.device)).cpu().numpy()
        if (target := party.context.target) is not None:
            y = as_read(target, y)
        time = np.zeros(len(x)) if at is None else raw[:, at]
        gaps = np.zeros(len(x), bool) if indicated(party) else np.isnan(x).any(1)
        whole = ~(gaps | np.isnan(time) | np.isnan(y))
        return x.T[:, whole].T, y[whole], time[whole]

    return kept(
        party.context,
        "complete",
        f"{party.cfg.owners} {time_column(party)} {indicated(party)}",
        make,
    )


def as_read(target: Number, y: np.ndarray) -> np.ndarray:
    """The decimal numbers (n,) float64 that were read as these standardized ones, such
    as counts.
    """
    reach = target.scale * 2.0**-24 * np.maximum(np.abs(y.astype(np.float64)), 2.0**-20)
    return shortest(target.in_unit(y), reach)


def measured(party: Party[LinearConfig]) -> np.ndarray:
    """The columns whose means and scales are agreed: those of the complete rows, and a number to
    predict.
    """
    x, y, _ = complete(party)
    return np.c_[x, y] if for_number(party) else x


def standardized(x: np.ndarray, design: Mapping[str, Any]) -> np.ndarray:
    """An intercept and the columns that are not constant, (n, 1 + p), with mean 0 and s.d. 1 over
    all owners' rows.
    """
    use = design["kept"].numpy()
    z = np.ones((len(x), 1 + int(use.sum())), order="F")
    np.subtract(x[:, use], design["mean"].numpy()[use], out=z[:, 1:])
    z[:, 1:] /= design["scale"].numpy()[use]
    return z


def names(server: Party[LinearConfig], design: Mapping[str, Any]) -> list[str]:
    """The names of the intercept and of the columns that are not constant."""
    return [
        "intercept",
        *(n for n, use in zip(labels(server), design["kept"].tolist(), strict=True) if use),
    ]


# -- an owner --------------------------------------------------------------------------------------


def exponents(party: Party[LinearConfig], *, t: int) -> dict[str, Tensor]:
    """The complete rows (K,) by class, all rows, those whose number to predict is below 0, and the
    columns' numbers (p, 256) by exponent, as asked in round t: a node adds up one answer with one
    set of others only. With indicators also the rows (p,) that have a value. And the rows that are
    held out for a test, at a node.
    """
    _, y, _ = complete(party)
    x = measured(party)
    rows = (
        np.array([len(y)]) if for_number(party) else np.bincount(y, minlength=party.context.classes)
    )
    found = tensors(
        rows=rows, exponents=newton.exponents(np.nan_to_num(x)), negative=np.array((y < 0).sum())
    )
    if indicated(party):
        found |= tensors(present=(~np.isnan(x)).sum(0))
    held = np.array(party.context.left_out.get("test", 0))
    return {**found, **tensors(held=held), "all": party.context.row_count.cpu()}


def sums(party: Party[LinearConfig], *, exponent: Tensor, rows: int) -> dict[str, Tensor]:
    """The sums (p,) of the columns in units of 2^exponent."""
    x = np.nan_to_num(measured(party))
    return tensors(sums=newton.added(np.ldexp(x, -exponent.numpy()), newton.bits_for(rows)))


def squares(
    party: Party[LinearConfig], *, exponent: Tensor, mean: Tensor, rows: int
) -> dict[str, Tensor]:
    """The sums (p,) of squared differences from the means, in units of 4^(exponent + 1)."""
    apart = np.ldexp(np.nan_to_num(measured(party) - mean.numpy()), -exponent.numpy() - 1)
    return tensors(sums=newton.added(apart * apart, newton.bits_for(rows)))


# -- the server ------------------------------------------------------------------------------------


def agree(
    fed: Federation, server: Party[LinearConfig], clients: Sequence[int], t: int
) -> dict[str, Any]:
    """Mean, scale and use of each column, for a number to predict `outcome` (2,), its mean and
    scale, the rows by class, all rows, those left out by the reason, and the references of
    categories whose first word has no row; {} if an owner's sums are missing.
    """
    # First question: rows, and how large each column's numbers are, by exponent. The unit in which
    # a column is added up follows from the largest one.
    number, K = for_number(server), server.context.classes
    p = len(labels(server)) + number  # here a number to predict is the last column
    count = Shape("int64")
    expect = {"rows": Shape("int64", 1 if number else K), "exponents": Shape("int64", p, 256)}
    if indicated(server):
        expect["present"] = Shape("int64", p)
    counted = fed.total(
        clients,
        "exponents",
        shared={"t": t},
        expect={**expect, "negative": count, "held": count, "all": count},
        min_replies=len(clients),
    )
    if counted is None:
        return {}
    by_class = counted.value["rows"]
    rows = int(by_class.sum())
    exponent = newton.largest_exponents(counted.value["exponents"].numpy())
    if not rows:
        raise MethodError(
            "no row is complete: fill missing values, or leave the columns that lack them out"
        )

    # Second question: sums, hence means. With indicators a mean is over the rows that have a value
    # (`present` (p,), at least 1 of a column that nobody has); otherwise all rows have all values.
    shared, of_columns = {**tensors(exponent=exponent), "rows": rows}, {"sums": Shape("int64", p)}
    found = fed.total(clients, "sums", shared=shared, expect=of_columns, min_replies=len(clients))
    if found is None:
        return {}
    present = np.maximum(counted.value["present"].numpy(), 1) if indicated(server) else rows
    unit = 2.0 ** -newton.bits_for(rows)
    mean = np.ldexp(found.value["sums"].numpy() * unit / present, exponent)

    # Third question: squares about the means, hence scales, precise also where the mean is large.
    # Owners halve the differences (`squares`), which may be twice as large as a number.
    about = {**shared, **tensors(mean=mean)}
    found = fed.total(clients, "squares", shared=about, expect=of_columns, min_replies=len(clients))
    if found is None:
        return {}
    scale = np.ldexp(np.sqrt(found.value["sums"].numpy() * unit / present), exponent + 1)

    # Leave out columns that are constant up to rounding, and indicators that became a reference.
    # The sum of an indicator is its rows.
    kept_columns = scale > 1e-9 * np.abs(mean)
    of_reference, named = references(server, mean * present, np.broadcast_to(present, p))
    kept_columns[of_reference] = False

    outcome = np.array([mean[-1], scale[-1]]) if number else np.zeros(2)
    end = p - number
    numbers = tensors(mean=mean[:end], scale=scale[:end], kept=kept_columns[:end], outcome=outcome)
    known = server.context.left_out  # by reason; at nodes the owners alone know their test rows
    left_out = {**known, "test": known.get("test", 0) + int(counted.value["held"])}
    of_rows = {"rows": rows, "by_class": by_class, "all": int(counted.value["all"])}
    negative = int(counted.value["negative"])
    return {**numbers, **of_rows, "negative": negative, "left_out": left_out, "reference": named}
