"""FedGLM: linear, logistic, softmax and Poisson regression by Newton's method, as on pooled rows.

Paper: P. McCullagh, J. A. Nelder, "Generalized Linear Models", 1989; sums over sites as in Y. Wu,
X. Jiang, J. Kim, L. Ohno-Machado, "Grid Binary LOgistic REgression (GLORE)", JAMIA 2012.

    agree     owners: numbers of each column by exponent, rows by class; sums, then squares about the mean
              server: mean and scale of each column, and of a number to predict
    round     owners (Poisson): rows by the exponent of their largest part                              | sums alone
              owners: the log-likelihood, its gradient g and its negative Hessian H at the
                  coefficients | sums alone
              server: the coefficients plus (H + l2 I)^-1 (g - l2 beta); half the way back if the
                  likelihood fell
    round     (owners = "random") owners: the sums of fedloom.methods.tables.mixed at a ratio of variances | sums alone
              server: the coefficients, and the next ratio
    end       standard errors from the diagonal of (H + l2 I)^-1, for least squares times the residual variance; no
              more messages once a step is below 1e-9

Columns are numbers, an indicator for each word of a category but the first, and with `owners =
"fixed"` an indicator for each owner but the first; of those that have complete rows. Rows with a missing value are left out of the
fit, or have indicators (`missing`). Each row's part of a sum is rounded before it is added
(`fedloom.methods.tables.newton`), so that the model has the same bits however rows are split.

The server keeps two sets of coefficients: `beta`, which are tried next, and `accepted`, at which
the likelihood was the highest so far. Each round asks owners for the derivatives at `beta`, and
`newton_step` makes the next ones of them (for random effects `take_effects`). Both are of
standardized columns, (k, p): k linear predictors, one for each class but the first, or one; p
columns with the intercept. `findings` brings them back to the columns as they are.

Messages: sums up; means, scales and coefficients down. A sum over one owner with few rows tells
    much of them.

Differs:
    Columns are standardized inside; reported coefficients are those of the columns as they are.
        `l2` penalizes the coefficients of standardized columns, not intercepts. With `l1` besides
        (the elastic net of H. Zou, T. Hastie, 2005) a step is the minimum of the quadratic model
        and the penalty; many coefficients are then 0, and none has a standard error.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, final

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.page import (
    EVERY_TASK,
    Federation,
    LearnedTable,
    Method,
    MethodError,
    Party,
    Shape,
)
from fedloom.methods.tables import design as designs
from fedloom.methods.tables import inference, mixed, newton, own_models
from fedloom.methods.tables.steps import OwnModels, tensors

SEPARATE = 1e-6
"""If the log-likelihood of a row is nearer to 0, columns separate the classes, and coefficients
would grow forever.
"""


class FedGLMConfig(OwnModels, designs.LinearConfig):
    """A round is one Newton step."""

    # so that rows with missing values count
    TRIAL = (*designs.LinearConfig.TRIAL, ("missing", "indicator"))  # type: ignore[assignment]
    l1: float = Field(0.0, ge=0)
    """Penalty: times the sum of absolute coefficients of standardized columns it is added to the
    negative log-likelihood.
    """
    family: Literal["auto", "normal", "poisson"] = "auto"
    """For a number to predict: least squares (auto, normal), or Poisson with the logarithm as link.
    Classes always have a logistic, or softmax, regression.
    """
    missing: Literal["leave out", "indicator"] = "leave out"
    """Whether rows with a missing value are left out, or each column has an indicator of its
    missing values, which then count as the mean. Indicators that are never, or always, 1 are left
    out.
    """

    @model_validator(mode="after")
    def _check_random(self) -> Self:
        if self.owners == "random" and (self.l1 or self.l2 or self.family == "poisson"):
            raise ValueError(
                "owners = random is least squares: leave l1 and l2 at 0, and family at auto or "
                "normal"
            )
        return self


@final
class FedGLMClient(Party[FedGLMConfig]):
    """An owner of rows."""

    ROLE = "client"
    STATE = ("design", "beta")
    EXPORT = ("design", "beta")
    CALLS = ("exponents", "sums", "squares", "reach", "derivatives", "effects")
    MEANS = ("exponents", "sums", "squares", "reach", "derivatives", "effects")
    TELLS = (("by class", MEANS),)
    exponents = designs.exponents
    sums = designs.sums
    squares = designs.squares

    def setup(self) -> None:
        """No coefficients."""
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(predictors(self), 0, dtype=torch.float64)

    def reach(self, *, design: Mapping[str, Any], beta: Tensor) -> dict[str, Tensor]:
        """The rows (256,) by the exponent of their largest part in `derivatives`."""
        z, y = rows_of(self, design)
        return tensors(rows=newton.reach(newton.largest(family(self), z, y, beta.numpy())))

    def derivatives(
        self, *, design: Mapping[str, Any], beta: Tensor, bits: int
    ) -> dict[str, Tensor]:
        """The log-likelihood, gradient and negative Hessian at the coefficients beta (k, p)."""
        self.design, self.beta = dict(design), beta
        z, y = rows_of(self, design)
        return tensors(sums=newton.derivatives(family(self), z, y, beta.numpy(), bits))

    def effects(
        self, *, design: Mapping[str, Any], beta: Tensor, ratio: float, bits: int
    ) -> dict[str, Tensor]:
        """The part of the sums at this ratio of the variances of owners and residuals: see
        `mixed.effects`.
        """
        self.design, self.beta = {**design, "ratio": ratio}, beta
        return tensors(sums=mixed.effects(*rows_of(self, design), ratio, bits))

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K), or standardized numbers (n, 1), of rows x (n, ...); a missing value counts
        as the column's mean. 0 before the first round.
        """
        if not self.design:
            return torch.zeros(len(x), max(self.context.classes, 1))
        z = designs.standardized(designs.columns(self, x), self.design)
        z, beta = np.where(np.isnan(z), 0, z), self.beta.numpy()
        if family(self) == "classes":
            return own_models.mixed(
                self, torch.from_numpy(np.log(newton.probabilities(z, beta).T)).float(), x
            )
        eta = newton.predictor(z, beta[0])
        if "ratio" in self.design:
            eta = eta + mixed.effect(*rows_of(self, self.design), beta[0], self.design["ratio"])
        mean, scale = self.design["outcome"].tolist()
        assert self.context.target is not None
        found = self.context.target.standardized(
            mean + scale * eta if family(self) == "normal" else np.exp(eta)
        )
        return own_models.mixed(self, torch.from_numpy(found[:, None]), x)


@final
class FedGLMServer(Party[FedGLMConfig]):
    """The server, which sees sums over owners. `beta` (k, p) are the coefficients to try next;
    `accepted` the last ones that raised the likelihood, with its value and covariance; `null` is
    the first value.
    """

    ROLE = "server"
    STATE = ("design", "beta", "accepted", "null", "done")

    def setup(self) -> None:
        """No coefficients."""
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(predictors(self), 0, dtype=torch.float64)
        self.accepted: dict[str, Any] = {}
        self.null: float | None = None
        self.done = False

    def begin(self, design: dict[str, Any]) -> None:
        """Take the agreed columns, and coefficients 0; for Poisson the intercept is that of the
        mean.
        """
        mean = float(design["outcome"][0])
        if self.cfg.owners == "random" and family(self) != "normal":
            raise MethodError(
                "params.owners random is for a number to predict: set it to fixed or none"
            )
        absent = [
            name
            for name, rows in zip(designs.class_names(self), design["by_class"], strict=False)
            if family(self) == "classes" and not rows
        ]
        if absent and not self.cfg.l1 and not self.cfg.l2:
            raise MethodError(
                f"no complete row is of {', '.join(absent)}, so that there is no odds of it: fill "
                "missing values, leave these rows' class out, or set params.l2 above 0"
            )
        if family(self) == "poisson" and (design["negative"] or mean <= 0):
            raise MethodError(
                f"params.family poisson predicts counts, but {design['negative']} numbers to "
                f"predict are below 0 and their mean is {mean:g}: set params.family to normal"
            )
        beta = torch.zeros(predictors(self), 1 + int(design["kept"].sum()), dtype=torch.float64)
        beta[0, 0] = np.log(mean) if family(self) == "poisson" else 0.0
        self.design, self.beta = dict(design), beta

    def back(self) -> None:
        """Go half the way back to the last accepted coefficients."""
        self.beta = (self.beta + self.accepted["beta"]) / 2

    def newton_step(self, value: float, gradient: np.ndarray, hessian: np.ndarray) -> None:
        """One step of Newton's method from the log-likelihood and its derivatives at `beta`: see
        `newton.opened`. `hessian` (k p, k p) is the negative one.
        """
        # penalties (k p,) of each coefficient, 0 of the intercepts, and what is to be maximized
        beta, (k, p) = self.beta.numpy().ravel(), self.beta.shape
        penalty = self.cfg.l2 * np.tile(np.r_[0.0, np.ones(p - 1)], k)
        l1 = self.cfg.l1 * np.tile(np.r_[0.0, np.ones(p - 1)], k)
        target = value - 0.5 * float(penalty @ (beta * beta)) - float(l1 @ np.abs(beta))

        # The step was too long; a fall as small as rounding is none.
        if self.accepted and target < self.accepted["target"] - 1e-9 * abs(target):
            return self.back()

        # The next step. The derivatives are of the penalized likelihood, without the l1, which has
        # none at 0: `newton.sparse` finds the best coefficients of the quadratic model with it.
        hessian, gradient = hessian + np.diag(penalty), gradient - penalty * beta
        if self.cfg.l1:
            covariance, found = np.zeros_like(hessian), newton.sparse(hessian, gradient, beta, l1)
            if found is None:
                raise MethodError(newton.NOT_SPARSE)
            step = found - beta
        else:
            # Least squares have coefficients unless columns are collinear; the others also grow for
            # ever where columns separate classes (each row's likelihood nears 1) or counts.
            inverse = (newton.inverse if family(self) == "normal" else newton.bounded)(hessian)
            if inverse is None or (
                family(self) == "classes" and value > -SEPARATE * self.design["rows"]
            ):
                raise MethodError(newton.not_unique(hessian, designs.names(self, self.design)))
            covariance, step = inverse, inverse @ gradient

        # These coefficients are accepted, also as the last ones: then the step is not taken.
        self.done = bool(np.abs(step).max() < newton.SMALL_STEP)
        numbers = tensors(beta=self.beta.numpy(), covariance=covariance)
        self.accepted = {**numbers, "target": target, "value": value}
        self.null = value if self.null is None else self.null  # at the first coefficients
        if not self.done:
            self.beta = self.beta + torch.from_numpy(step.reshape(k, p))

    def take_effects(self, sums: np.ndarray, ratio: float, bits: int) -> None:
        """The coefficients at a ratio of variances, and the next ratio; the last one is sent twice,
        so that owners have its coefficients.
        """
        fit = mixed.opened(sums, self.beta.shape[1], self.design["rows"], bits)
        if fit is None:
            raise MethodError(newton.NOT_UNIQUE)

        # the interval that has the best ratio, which each fit closes from one side
        low, high = (
            self.accepted.get(end, start)
            for end, start in (("low", mixed.LEAST), ("high", mixed.MOST))
        )
        following, low, high = mixed.following(fit, ratio, low, high)
        self.done = bool(self.accepted.get("best", False))
        self.beta = torch.from_numpy(fit.beta[None].copy())
        numbers = tensors(beta=fit.beta[None], covariance=fit.covariance)
        more = {"value": fit.value, "residual": fit.residual, "owners": fit.owners}
        self.accepted = {
            **numbers,
            **more,
            "ratio": following,
            "low": low,
            "high": high,
            "best": following == ratio,
        }

    def findings(self) -> Sequence[LearnedTable]:
        """Coefficients with standard errors, tests and intervals, for each class but the first; and
        the fit.
        """
        if not self.accepted:
            return ()

        # Coefficients and errors (k, p) of the columns as they are; `value` is the log-likelihood.
        # By least squares the number to predict is standardized still: coefficients are multiplied
        # by `scale`, and `mean` is added to the intercept (`np.eye(1, p)` is 1 there, and 0
        # elsewhere). `offsets` (p,) were subtracted from columns when they were read. The table of
        # the fit also says whether the steps have ended (`self.done`).
        beta, errors = inference.estimates(self.design, self.accepted, designs.offsets(self))
        value = self.accepted["value"]
        names = designs.names(self, self.design)
        level = self.cfg.level
        rows = self.design["rows"]
        k = len(beta)
        mean, scale = self.design["outcome"].tolist()
        first, *others = designs.class_names(self)
        titles = [f"Coefficients of {other} against {first}" for other in others]
        if designs.for_number(self):
            titles = ["Coefficients"]

        # with l1: no errors, as a coefficient of exactly 0 has none
        if self.cfg.l1:
            if family(self) == "normal":
                beta = scale * beta + mean * np.eye(1, beta.size)
            used = float((beta[:, 1:] != 0).sum())
            found = [
                inference.without_errors(title, names, own)
                for title, own in zip(titles, beta, strict=True)
            ]
            return (
                *found,
                inference.fit(self.design, [("coefficients that are not 0", used)], self.done),
            )

        # Least squares: the residual variance is estimated, with `left` degrees of freedom, hence
        # Student's t. `value` is half the negative sum of squares, in units of `scale`².
        if family(self) == "normal":
            left = rows - beta.size
            if left < 1:
                raise MethodError(
                    f"{rows} complete rows do not suffice for {beta.size} coefficients: leave "
                    "columns out"
                )
            beta = scale * beta + mean * np.eye(1, beta.size)
            if self.cfg.owners == "random":  # its covariance has the residual variance already
                table = inference.coefficients(titles[0], names, beta[0], errors[0] * scale, level)
                # the variances of owners' effects and of residuals
                more = inference.of_effects(self.design, self.accepted)
                return table, inference.fit(self.design, more, self.done)
            errors = errors * scale * np.sqrt(abs(2 * value) / left)
            table = inference.coefficients(
                titles[0], names, beta[0], errors[0], level, freedom=left
            )
            # from the sum of squared residuals, and that about the mean: rows times variance
            more = inference.of_numbers(rows, beta.size, -2 * value * scale**2, rows * scale**2)
            return table, inference.fit(self.design, more, self.done)

        # Classes and counts: a test against the likelihood of intercepts alone, which shares of
        # classes tell; of counts it is that at the first coefficients, which are the mean's.
        null = inference.of_classes(self.design["by_class"].numpy())
        if family(self) == "poisson":
            # set with the first accepted coefficients, hence not None here
            null = float(self.null or 0.0)
        tables = [
            inference.coefficients(title, names, own, error, level)
            for title, own, error in zip(titles, beta, errors, strict=True)
        ]
        return (
            *tables,
            # `k` parameters without columns: intercepts, of all classes but the first or of counts
            inference.fit(self.design, inference.likelihoods(value, null, beta.size, k), self.done),
        )


def family(party: Party[FedGLMConfig]) -> str:
    """See `newton.likelihood`."""
    if not designs.for_number(party):
        return "classes"
    return "poisson" if party.cfg.family == "poisson" else "normal"


def predictors(party: Party[FedGLMConfig]) -> int:
    """k, the number of linear predictors."""
    return max(party.context.classes - 1, 1)


def rows_of(party: FedGLMClient, design: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The standardized columns with an intercept (n, p) of the party's complete rows, and what is
    to be predicted (n,): labels, counts, or standardized numbers.
    """
    x, y, _ = designs.complete(party)
    mean, scale = design["outcome"].tolist()
    z = designs.standardized(x, design)
    if designs.indicated(party):
        z[np.isnan(z)] = 0
    return z, (y - mean) / scale if family(party) == "normal" else y


def round(
    fed: Federation, server: FedGLMServer, clients: Sequence[int], cfg: FedGLMConfig, t: int
) -> Iterator[str]:
    """One step of Newton's method.

    Every sum needs all owners (`all_of_them`): of fewer it would be another model. A round in which
    one is missing changes nothing, and the next one asks the same.
    """
    if server.done:
        return

    # the first round: columns, means and scales; coefficients 0
    if not server.design:
        design = designs.agree(fed, server, clients, t)
        if not design:
            return
        if family(server) == "normal" and not design["outcome"][1] > 0:
            raise MethodError(
                "the number to predict is the same in all complete rows: there is nothing to fit"
            )
        server.begin(design)

    # What owners need to standardize their rows. Parts of a sum have `bits` behind the point, so
    # that no sum overflows; for classes and least squares a row's part is at most 64 on average.
    all_of_them, (k, p) = len(clients), server.beta.shape
    design = {name: server.design[name] for name in ("mean", "scale", "kept", "outcome", "rows")}
    shared = {"design": design, "beta": server.beta}
    bits = newton.bits_for(server.design["rows"], 64)

    # Poisson parts have no bound beforehand, so the owners count theirs by exponent; where one is
    # beyond all, the step was too long.
    if family(server) == "poisson":
        shape = {"rows": Shape("int64", 256)}
        reached = fed.total(clients, "reach", shared=shared, expect=shape, min_replies=all_of_them)
        if reached is None:
            return
        found_bits = newton.bits_of(reached.value["rows"].numpy())
        if found_bits is None:
            server.back()
            yield "round"
            return
        bits = found_bits
    if cfg.owners == "random":
        ratio = float(server.accepted.get("ratio", mixed.START))
        expect = {"sums": Shape("int64", mixed.size(p))}
        asked = {**shared, "ratio": ratio, "bits": bits}
        found = fed.total(clients, "effects", shared=asked, expect=expect, min_replies=all_of_them)
        if found is not None:
            server.take_effects(found.value["sums"].numpy(), ratio, bits)
        yield "round"
        return
    expect = {"sums": Shape("int64", newton.size(p, k))}
    found = fed.total(
        clients,
        "derivatives",
        shared={**shared, "bits": bits},
        expect=expect,
        min_replies=all_of_them,
    )
    if found is not None:
        server.newton_step(*newton.opened(found.value["sums"].numpy(), p, k, bits))
    yield "round"


def at_once(
    fed: Federation, server: FedGLMServer, client: FedGLMClient, cfg: FedGLMConfig, rounds: int
) -> None:
    """See `Method.at_once`: sums in floating point, which are faster than exact ones."""
    design = designs.agree(fed, server, (0,), 0)
    server.begin(design)
    z, y = rows_of(client, design)
    for _ in range(rounds):
        if not server.done:
            # slope (k, n), weight (k, k, n); the Hessian has a block (p, p) for each two predictors
            value, slope, weight = newton.likelihood(family(client), z, y, server.beta.numpy())
            k = len(slope)
            blocks = [[(z.T * weight[a, b]) @ z for b in range(k)] for a in range(k)]
            server.newton_step(float(value.sum()), (slope @ z).ravel(), np.block(blocks))
    client.design, client.beta = dict(design), server.accepted["beta"]


METHODS = (
    Method(
        name="fedglm",
        title="Linear, logistic, softmax or Poisson regression with standard errors, as on pooled "
        "rows",
        paper="Y. Wu et al.: Grid Binary LOgistic REgression (GLORE), 2012",
        family="tables",
        config=FedGLMConfig,
        tasks=EVERY_TASK,
        no_local="it solves for the exact coefficients by Newton's method",
        round=round,
        client=FedGLMClient,
        server=FedGLMServer,
        needs=("raw rows",),
        every_row=True,
        pooled=True,
        at_once=at_once,
        trial_rank=2,
        trial_variants={"effects of owners": {"owners": "fixed"}},
    ),
)
