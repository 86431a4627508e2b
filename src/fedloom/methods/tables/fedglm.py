"""FedGLM: logistic and softmax regression by Newton's method, with the coefficients and errors of pooled rows.

Paper: P. McCullagh, J. A. Nelder, "Generalized Linear Models", 1989; sums over sites as in Y. Wu, X. Jiang, J. Kim,
L. Ohno-Machado, "Grid Binary LOgistic REgression (GLORE)", JAMIA 2012.

    agree     owners: numbers of each column by exponent, rows by class; sums, then squares about the mean
              server: mean and scale of each column
    round     owners: the log-likelihood, its gradient g and its negative Hessian H at the coefficients   | sums alone
              server: the coefficients plus (H + l2 I)^-1 (g - l2 beta); half the way back if the likelihood fell
    end       standard errors from the diagonal of (H + l2 I)^-1; no more messages once a step is below 1e-9

Columns are numbers, an indicator for each word of a category but the first, and with `owners = "fixed"` an indicator
for each owner but the first. Rows with a missing value are left out of the fit. Each row's part of a sum is rounded
before it is added (`fedloom.methods.tables.newton`), so that the model has the same bits however rows are split.

Messages: sums up; means, scales and coefficients down. A sum over one owner with few rows tells much of them.

Differs:
    Columns are standardized inside; reported coefficients are those of the columns as they are. `l2` penalizes the
        coefficients of standardized columns, not intercepts.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import Aggregator, Federation, LearnedTable, Method, MethodConfig, MethodError, Party, Shape
from fedloom.methods.tables import newton
from fedloom.methods.tables.steps import kept, refusal, tensors

SMALL_STEP = 1e-9
"""A step below this, of coefficients of standardized columns, is the last."""
SEPARATE = 1e-6
"""If the log-likelihood of a row is nearer to 0, columns separate the classes, and coefficients would grow forever."""


class FedGLMConfig(MethodConfig):
    """A round is one Newton step."""

    l2: float = Field(0.0, ge=0)
    """Penalty: half of it times the sum of squared coefficients of standardized columns is added to the negative
    log-likelihood."""
    owners: Literal["none", "fixed"] = "none"
    """Whether each owner but the first has an effect of its own."""
    level: float = Field(0.95, gt=0, lt=1)
    """Of confidence intervals."""

    def local_steps_of(self, rows: int) -> None:
        """None: a Newton step is taken by the coordinator."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return refusal(aggregator)

    @property
    def iterations_per_round(self) -> int:
        """20 rounds unless the run says otherwise; most fits need eight."""
        return 10


@final
class FedGLMClient(Party[FedGLMConfig]):
    """An owner of rows."""

    ROLE = "client"
    STATE = ("design", "beta")
    EXPORT = ("design", "beta")
    CALLS = ("exponents", "sums", "squares", "derivatives")
    MEANS = ("exponents", "sums", "squares", "derivatives")

    def setup(self) -> None:
        """No coefficients."""
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(self.context.classes - 1, 0, dtype=torch.float64)

    def exponents(self, *, t: int) -> dict[str, Tensor]:
        """The complete rows (K,) by class, all rows, and the columns' numbers (p, 256) by exponent, as asked in round
        t: a node adds up one answer with one set of others only."""
        x, y = complete(self)
        rows = np.bincount(y, minlength=self.context.classes)
        found = tensors(rows=rows, exponents=newton.exponents(x))
        return {**found, "all": self.context.row_count.cpu()}

    def sums(self, *, exponent: Tensor, rows: int) -> dict[str, Tensor]:
        """The sums (p,) of the columns in units of 2^exponent."""
        x, _ = complete(self)
        return tensors(sums=newton.added(np.ldexp(x, -exponent.numpy()), newton.bits_for(rows)))

    def squares(self, *, exponent: Tensor, mean: Tensor, rows: int) -> dict[str, Tensor]:
        """The sums (p,) of squared differences from the means, in units of 4^(exponent + 1)."""
        x, _ = complete(self)
        apart = np.ldexp(x - mean.numpy(), -exponent.numpy() - 1)
        return tensors(sums=newton.added(apart * apart, newton.bits_for(rows)))

    def derivatives(self, *, design: Any, beta: Tensor) -> dict[str, Tensor]:
        """The log-likelihood, gradient and negative Hessian at the coefficients beta (K - 1, p)."""
        self.design, self.beta = design, beta
        x, y = complete(self)
        return tensors(sums=newton.derivatives(standardized(x, design), y, beta.numpy(), design["rows"]))

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K) of rows x (n, ...); a missing value counts as the column's mean. 0 before the first round."""
        if not self.design:
            return torch.zeros(len(x), self.context.classes)
        z = standardized(columns(self, x), self.design)
        p = newton.probabilities(np.where(np.isnan(z), 0, z), self.beta.numpy())
        return torch.from_numpy(np.log(p.T)).float()


@final
class FedGLMServer(Party[FedGLMConfig]):
    """The server, which sees sums over owners. `beta` (K - 1, p) are the coefficients to try next; `accepted` the last
    ones that raised the likelihood, with its value, gradient step and covariance."""

    ROLE = "server"
    STATE = ("design", "beta", "accepted", "done")

    def setup(self) -> None:
        """No coefficients."""
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(self.context.classes - 1, 0, dtype=torch.float64)
        self.accepted: dict[str, Any] = {}
        self.done = False

    def take(self, sums: np.ndarray) -> None:
        """One step of Newton's method from the derivatives at `beta`."""
        beta, (k, p) = self.beta.numpy().ravel(), self.beta.shape
        value, gradient, hessian = newton.opened(sums, p, k + 1, self.design["rows"])
        penalty = self.cfg.l2 * np.tile(np.r_[0.0, np.ones(p - 1)], k)
        target = value - 0.5 * float(penalty @ (beta * beta))
        if self.accepted and target < self.accepted["target"] - 1e-9 * abs(target):
            self.beta = (self.beta + self.accepted["beta"]) / 2
            return
        covariance = newton.inverse(hessian + np.diag(penalty))
        if covariance is None or value > -SEPARATE * self.design["rows"]:
            raise MethodError(
                "no unique coefficients: columns are collinear, or separate the classes; leave a column out with "
                "data.drop, or set params.l2 above 0"
            )
        step = covariance @ (gradient - penalty * beta)
        self.done = bool(np.abs(step).max() < SMALL_STEP)
        numbers = tensors(beta=self.beta.numpy(), covariance=covariance)
        self.accepted = {**numbers, "target": target, "value": value}
        if not self.done:
            self.beta = self.beta + torch.from_numpy(step.reshape(k, p))

    def findings(self) -> Sequence[LearnedTable]:
        """Coefficients with standard errors, z, p-values and intervals, for each class but the first; and the fit."""
        if not self.accepted:
            return ()
        classes, level = self.context.classes, self.cfg.level
        beta, errors = estimates(self.design, self.accepted)
        width = NormalDist().inv_cdf(0.5 + level / 2)
        names = [
            "intercept",
            *(name for name, use in zip(labels(self), self.design["kept"].tolist(), strict=True) if use),
        ]
        head = ("Column", "Coefficient", "Std. error", "z", "p-value", f"{level:.0%} from", "to")
        tables = []
        for k in range(classes - 1):
            rows = [
                (name, b, s, b / s, math.erfc(abs(b / s) / math.sqrt(2)), b - width * s, b + width * s)
                for name, b, s in zip(names, beta[k].tolist(), errors[k].tolist(), strict=True)
            ]
            tables.append(LearnedTable(f"Coefficients of class {k + 1} against class 0", head, tuple(rows)))
        counts, value = self.design["by_class"].numpy(), self.accepted["value"]
        share = counts[counts > 0] / counts.sum()
        fit = (
            ("rows", float(counts.sum())),
            ("rows left out, with missing values", float(self.design["all"] - counts.sum())),
            ("log-likelihood", value),
            ("log-likelihood of intercepts alone", float(counts[counts > 0] @ np.log(share))),
            ("AIC", 2.0 * (beta.size - value)),
            ("converged", "yes" if self.done else "no: raise rounds"),
        )
        return (*tables, LearnedTable("Fit", ("", "Value"), fit))


def labels(party: Party[FedGLMConfig]) -> list[str]:
    """The names (p,) of all columns but the intercept, constant ones too."""
    names: list[str] = []
    for name, words in zip(party.context.columns, party.context.words, strict=True):
        names += [f"{name}={word}" for word in words[1:]] if words else [name]
    fixed = party.cfg.owners == "fixed"
    return names + [f"owner {i}" for i in range(1, party.context.parties)] * fixed


def columns(party: Party[FedGLMConfig], x: Tensor) -> np.ndarray:
    """The columns (n, p) float64 of rows x (n, ...), NaN where a value is missing: see `labels`."""
    raw = x.flatten(1).double().cpu().numpy()
    parts = []
    for values, words in zip(raw.T, party.context.words, strict=True):
        hot = (values[:, None] == np.arange(1, len(words))).astype(np.float64)
        parts.append(np.where(np.isnan(values)[:, None], np.nan, hot) if words else values[:, None])
    if party.cfg.owners == "fixed":
        own = np.arange(1, party.context.parties) == party.context.id
        parts.append(np.repeat(own[None].astype(np.float64), len(raw), axis=0))
    return np.concatenate(parts, axis=1)


def complete(party: Party[FedGLMConfig]) -> tuple[np.ndarray, np.ndarray]:
    """The columns (n, p) and labels (n,) of the party's own rows without a missing value."""

    def make() -> tuple[np.ndarray, np.ndarray]:
        rows = party.context.rows
        x = columns(party, rows.every)
        y = rows.y(torch.arange(len(rows), device=party.context.device)).cpu().numpy()
        whole = ~np.isnan(x).any(1)
        return x[whole], y[whole]

    return kept(party.context, "complete", party.cfg.owners, make)


def standardized(x: np.ndarray, design: Any) -> np.ndarray:
    """An intercept and the columns that are not constant, (n, 1 + p), with mean 0 and s.d. 1 over all owners' rows."""
    use = design["kept"].numpy()
    z = (x[:, use] - design["mean"].numpy()[use]) / design["scale"].numpy()[use]
    return np.concatenate([np.ones((len(x), 1)), z], axis=1)


def estimates(design: Any, accepted: Any) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and standard errors (K - 1, 1 + p) of the columns as they are."""
    use = design["kept"].numpy()
    mean, scale = design["mean"].numpy()[use], design["scale"].numpy()[use]
    beta, covariance = newton.raw_scale(accepted["beta"].numpy(), accepted["covariance"].numpy(), mean, scale)
    errors: np.ndarray = np.sqrt(np.diag(covariance)).reshape(beta.shape)
    return beta, errors


def agree(fed: Federation, server: FedGLMServer, clients: Sequence[int], t: int) -> bool:
    """Set the server's `design`: mean and scale of each column; False if an owner's sums are missing."""
    p, K = len(labels(server)), server.context.classes
    expect = {"rows": Shape("int64", K), "exponents": Shape("int64", p, 256), "all": Shape("int64")}
    counted = fed.total(clients, "exponents", shared={"t": t}, expect=expect)
    if counted is None:
        return False
    by_class = counted.value["rows"]
    rows, exponent = int(by_class.sum()), newton.largest_exponents(counted.value["exponents"].numpy())
    if not rows:
        raise MethodError("no row is complete: fill missing values, or leave the columns that lack them out")
    shared, sums = {**tensors(exponent=exponent), "rows": rows}, {"sums": Shape("int64", p)}
    found = fed.total(counted.ids, "sums", shared=shared, expect=sums)
    if found is None or found.ids != counted.ids:
        return False
    unit = 2.0 ** -newton.bits_for(rows)
    mean = np.ldexp(found.value["sums"].numpy() * unit / rows, exponent)
    found = fed.total(counted.ids, "squares", shared={**shared, **tensors(mean=mean)}, expect=sums)
    if found is None or found.ids != counted.ids:
        return False
    scale = np.ldexp(np.sqrt(found.value["sums"].numpy() * unit / rows), exponent + 1)
    use = scale > 1e-9 * np.abs(mean)
    numbers = tensors(mean=mean, scale=scale, kept=use)
    server.design = {**numbers, "rows": rows, "by_class": by_class, "all": int(counted.value["all"])}
    server.beta = torch.zeros(K - 1, 1 + int(use.sum()), dtype=torch.float64)
    return True


def round(fed: Federation, server: FedGLMServer, clients: Sequence[int], cfg: FedGLMConfig, t: int) -> Iterator[str]:
    """One step of Newton's method."""
    if server.done or (not server.design and not agree(fed, server, clients, t)):
        return
    shared = {"design": {name: server.design[name] for name in ("mean", "scale", "kept", "rows")}, "beta": server.beta}
    size = newton.size(server.beta.shape[1], server.context.classes)
    found = fed.total(clients, "derivatives", shared=shared, expect={"sums": Shape("int64", size)})
    if found is not None and len(found.ids) == len(clients):
        server.take(found.value["sums"].numpy())
    yield "round"


METHODS = (
    Method(
        name="fedglm",
        title="Logistic or softmax regression with standard errors, as on pooled rows",
        paper="Y. Wu et al.: Grid Binary LOgistic REgression (GLORE), 2012",
        family="tables",
        config=FedGLMConfig,
        round=round,
        client=FedGLMClient,
        server=FedGLMServer,
        needs=("raw rows",),
        trial_rank=2,
    ),
)
