"""FedCox: Cox's proportional hazards with standard errors, as on pooled rows, on agreed times.

Paper: D. R. Cox, "Regression Models and Life-Tables", JRSS B 1972; ties as in N. Breslow,
"Covariance Analysis of Censored Survival Data", Biometrics 1974; sums over sites as in C.-L. Lu et
al., "WebDISCO: a Web Service for Distributed Cox Model Learning without Patient-Level Data
Sharing", JAMIA 2015.

    agree     owners: numbers of each column by exponent, rows by class; sums, then squares about the mean; rows by time
              server: mean and scale of each column; the grid of times
              owners: the events d_t at each time of the grid, and the sum of z over all events
    round     owners: rows by the exponent of their largest part                                        | sums alone
              owners: sums of w, w z and w z z', w = exp(beta z), of the rows with each time            | sums alone
              server: S0, S1, S2 at t are the sums over all times >= t;
                      l = sum of beta z over events - sum_t d_t log S0, g and the negative Hessian H
                      alike; the coefficients plus (H + l2 I)^-1 (g - l2 beta); half the way back if
                      the likelihood fell
    end       standard errors from the diagonal of (H + l2 I)^-1; no more messages once a step is below 1e-9

A row's label says whether it had the event, whose word is `event`, or was censored; `time` names the column with its time. A
time counts as the largest time of the grid that is not above it, so with as many times as the rows
have (`times`), nothing is rounded.

Messages: sums up; means, scales, times and coefficients down. The server learns how many events
    happen at each time.

Differs:
    Columns are standardized inside; reported coefficients are those of the columns as they are.
        `l2` penalizes the coefficients of standardized columns.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, final

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedloom.core.events import guessed_event, which_event
from fedloom.core.page import (
    ClientContext,
    Federation,
    LearnedTable,
    Method,
    MethodError,
    Party,
    Shape,
)
from fedloom.methods.tables import design as designs
from fedloom.methods.tables import inference, newton
from fedloom.methods.tables.steps import tensors
from fedloom.trees import bins as binning
from fedloom.trees.bins import Agreement, Question
from fedloom.trees.exact import exp


class FedCoxConfig(designs.LinearConfig):
    """A round is one Newton step."""

    time: str = "time"
    """The column with each row's time, until the event or the end of observation."""
    event: str | None = None
    """The class that is the event; the other one is censored. None guesses it, but only from words
    that leave no doubt, such as dead, died or event, 1 of 0 and 1, or true.
    """
    times: int = Field(200, ge=2, le=5000)
    """The most times of the grid. A round sends as many sums of squares of columns."""

    @field_validator("event", mode="before")
    @classmethod
    def _word(cls, event: Any) -> Any:
        """1 and true are words of classes, too."""
        return str(event) if isinstance(event, bool | int) else event

    @model_validator(mode="after")
    def _check_owners(self) -> Self:
        if self.owners == "random":
            raise ValueError(
                "owners = random is for least squares (fedglm): set owners to fixed or none"
            )
        return self

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """At most once for each bit of a time's key."""
        return {"segments": 64}


@final
class FedCoxClient(Party[FedCoxConfig]):
    """An owner of rows."""

    ROLE = "client"
    STATE = ("design", "beta")
    EXPORT = ("design", "beta")
    CALLS = ("exponents", "sums", "squares", "segments", "events", "reach", "hazards")
    MEANS = CALLS
    TELLS = (("by class", MEANS),)
    exponents = designs.exponents
    sums = designs.sums
    squares = designs.squares

    def setup(self) -> None:
        """No coefficients."""
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(0, dtype=torch.float64)

    def segments(self, *, start: Tensor, size: int, parts: int) -> dict[str, Tensor]:
        """The complete rows (s, parts) in segments of times' keys: see `fedloom.trees.bins`."""
        begins = start.cpu().numpy()
        keys = np.sort(binning.keys(designs.complete(self)[2]))
        return tensors(
            rows=binning.count(
                [keys], Question(np.zeros(len(begins), np.int64), begins, size, parts)
            )
        )

    def events(self, *, design: Mapping[str, Any]) -> dict[str, Tensor]:
        """The events (T,) at each time, and the sum (p,) of the columns of all events."""
        z, y, place = rows_of(self, design)
        had = y == event_of(self)
        happened = np.bincount(place[had], minlength=len(design["edges"]) + 1)
        return tensors(events=happened, sums=newton.added(z[had], newton.bits_for(design["rows"])))

    def reach(self, *, design: Mapping[str, Any], beta: Tensor) -> dict[str, Tensor]:
        """The rows (256,) by the exponent of their largest part in `hazards`."""
        z, _, _ = rows_of(self, design)
        eta = newton.predictor(z, beta.numpy())
        far = np.abs(eta) > newton.FARTHEST_MEAN
        side = np.maximum(np.abs(z).max(1, initial=0), 1)
        return tensors(
            rows=newton.reach(np.where(far, np.inf, exp(np.where(far, 0, eta)) * side * side))
        )

    def hazards(self, *, design: Mapping[str, Any], beta: Tensor, bits: int) -> dict[str, Tensor]:
        """The sums (T, 1 + p + p (p + 1) / 2) of w, w z and w z z' over the rows with each time."""
        self.design, self.beta = dict(design), beta
        z, _, place = rows_of(self, design)
        w, p, T = exp(newton.predictor(z, beta.numpy())), z.shape[1], len(design["edges"]) + 1
        i, j = np.triu_indices(p)
        order = np.argsort(place, kind="stable")
        parts = np.concatenate(
            [w[:, None], w[:, None] * z, w[:, None] * z[:, i] * z[:, j]], axis=1
        )[order]
        whole = np.rint(parts * 2.0**bits).astype(np.int64)
        before = np.concatenate([np.zeros((1, whole.shape[1]), np.int64), np.cumsum(whole, axis=0)])
        ends = np.searchsorted(place[order], np.arange(T), side="right")
        return tensors(sums=np.diff(before[np.r_[0, ends]], axis=0))

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, 2) of rows x (n, ...): 0 for censored, and the logarithm of the hazard against
        that of the columns' means for the event. A missing value counts as the mean. 0 before the
        first round.
        """
        if not self.design:
            return torch.zeros(len(x), 2)
        z = designs.standardized(designs.columns(self, x), self.design)[:, 1:]
        eta = newton.predictor(np.where(np.isnan(z), 0, z), self.beta.numpy())
        logits = np.stack([np.zeros(len(x)), eta], 1)
        return torch.from_numpy(logits[:, :: 1 if event_of(self) else -1].copy()).float()


@final
class FedCoxServer(Party[FedCoxConfig]):
    """The server, which sees sums over owners. `beta` (p,) are the coefficients to try next;
    `accepted` the last ones that raised the likelihood, with its value and covariance; `null` is
    the value at 0.
    """

    ROLE = "server"
    STATE = ("design", "beta", "accepted", "null", "done")

    def setup(self) -> None:
        """No coefficients."""
        if self.context.classes != 2:
            named = ", ".join(self.context.class_names[:8])
            raise MethodError(
                f"fedcox needs two classes, censored and event, not {self.context.classes}"
                f"{f': {named}' if named else ''}"
            )
        designs.time_column(self)
        event_of(self)
        self.design: dict[str, Any] = {}
        self.beta = torch.zeros(0, dtype=torch.float64)
        self.accepted: dict[str, Any] = {}
        self.null = 0.0
        self.done = False

    def back(self) -> None:
        """Go half the way back to the last accepted coefficients."""
        self.beta = (self.beta + self.accepted["beta"]) / 2

    def newton_step(self, sums: np.ndarray, bits: int) -> None:
        """One step of Newton's method from the sums (T, 1 + p + p (p + 1) / 2) at `beta`."""
        beta, p = self.beta.numpy(), len(self.beta)
        at_risk = np.cumsum(sums[::-1], axis=0)[::-1] * 2.0**-bits
        d, of_events = self.design["events"].numpy(), self.design["sums"].numpy()
        d, at_risk = d[d > 0], at_risk[d > 0]
        s0, s1, s2 = at_risk[:, 0], at_risk[:, 1 : 1 + p], newton.square(at_risk[:, 1 + p :], p)
        mean = s1 / s0[:, None]
        value = float(of_events @ beta - d @ np.log(s0))
        gradient = of_events - d @ mean
        hessian = np.einsum("t,tij->ij", d / s0, s2) - np.einsum("t,ti,tj->ij", d, mean, mean)
        target = value - 0.5 * self.cfg.l2 * float(beta @ beta)
        if self.accepted and target < self.accepted["target"] - 1e-9 * abs(target):
            return self.back()
        self.null = self.null if self.accepted else value
        covariance = newton.bounded(hessian + self.cfg.l2 * np.eye(p))
        if covariance is None:
            raise MethodError(newton.NOT_UNIQUE)
        step = covariance @ (gradient - self.cfg.l2 * beta)
        self.done = bool(np.abs(step).max() < newton.SMALL_STEP)
        self.accepted = {
            **tensors(beta=beta, covariance=covariance),
            "target": target,
            "value": value,
        }
        if not self.done:
            self.beta = self.beta + torch.from_numpy(step)

    def findings(self) -> Sequence[LearnedTable]:
        """Coefficients with hazard ratios, standard errors, tests and intervals; and the fit."""
        if not self.accepted:
            return ()
        scale = self.design["scale"].numpy()[self.design["kept"].numpy()]
        beta = self.accepted["beta"].numpy() / scale
        errors = np.sqrt(np.diag(self.accepted["covariance"].numpy())) / scale
        names, level = designs.names(self, self.design)[1:], self.cfg.level
        event = classes_of(self)[event_of(self)]
        table = inference.coefficients(
            f"Coefficients, event {event}", names, beta, errors, level, ratio="Hazard ratio"
        )
        how = event if self.cfg.event else f"{event}, a guess: params.event names it"
        events: list[tuple[str, str | float]] = [
            ("events", float(self.design["events"].sum())),
            ("event", how),
        ]
        more = inference.likelihoods(self.accepted["value"], self.null, len(beta), 0)
        return table, inference.fit(self.design, [*events, *more], self.done)


def classes_of(party: Party[FedCoxConfig]) -> Sequence[str]:
    """The words of the two classes."""
    return party.context.class_names or ("0", "1")


def event_of(party: Party[FedCoxConfig]) -> int:
    """The number of the class that is the event.

    Raises:
        MethodError: the setting names none of the two classes, or is needed, as their words do not
            say which it is.
    """
    names, given = classes_of(party), party.cfg.event
    if given is None:
        found = guessed_event(names, party.context.label)
    else:
        found = which_event(names, given)
    if found is None:
        said = "is needed" if given is None else f"is {given!r}"
        raise MethodError(
            f"params.event {said}: set it to the class that is the event, {names[0]!r} or "
            f"{names[1]!r}; the other one counts as censored"
        )
    return names.index(found)


def rows_of(
    party: FedCoxClient, design: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The standardized columns (n, p) of the party's complete rows, their labels (n,) and places
    (n,) in the grid.
    """
    x, y, time = designs.complete(party)
    place = np.searchsorted(design["edges"].numpy(), binning.keys(time), side="right")
    return designs.standardized(x, design)[:, 1:], y, place


def agree(fed: Federation, server: FedCoxServer, clients: Sequence[int], t: int) -> dict[str, Any]:
    """The agreed columns, `edges` (T - 1,), the keys of all times of the grid but the first,
    `events` (T,) at each, and the `sums` (p,) of the columns over events; {} if an owner's sums are
    missing.
    """
    design = designs.agree(fed, server, clients, t)
    if not design:
        return {}
    agreement = Agreement([0], server.cfg.times + 1)
    while (asked := agreement.question) is not None:
        shared = {**tensors(start=asked.start), "size": asked.size, "parts": asked.parts}
        shape = {"rows": Shape("int64", len(asked.start), asked.parts)}
        counted = fed.total(
            clients, "segments", shared=shared, expect=shape, min_replies=len(clients)
        )
        if counted is None:
            return {}
        agreement.answer(counted.value["rows"].numpy())
    design |= tensors(edges=agreement.edges(0))
    p, T = int(design["kept"].sum()), len(design["edges"]) + 1
    if not p:
        raise MethodError(
            "every column is constant over the complete rows: there is no coefficient to find"
        )
    expect = {"events": Shape("int64", T), "sums": Shape("int64", p)}
    found = fed.total(
        clients, "events", shared={"design": sent(design)}, expect=expect, min_replies=len(clients)
    )
    if found is None:
        return {}
    if not found.value["events"].any():
        event = classes_of(server)[event_of(server)]
        raise MethodError(
            f"no complete row has an event ({event}): fill missing values, or leave the columns "
            "that lack them out"
        )
    sums = found.value["sums"].numpy() * 2.0 ** -newton.bits_for(design["rows"])
    return {**design, "events": found.value["events"], **tensors(sums=sums)}


def sent(design: dict[str, Any]) -> dict[str, Any]:
    """The part of the design that owners need."""
    return {name: design[name] for name in ("mean", "scale", "kept", "rows", "edges")}


def round(
    fed: Federation, server: FedCoxServer, clients: Sequence[int], cfg: FedCoxConfig, t: int
) -> Iterator[str]:
    """One step of Newton's method."""
    if server.done:
        return
    if not server.design:
        server.design = agree(fed, server, clients, t)
        if not server.design:
            return
        server.beta = torch.zeros(int(server.design["kept"].sum()), dtype=torch.float64)
    shared, n = {"design": sent(server.design), "beta": server.beta}, len(clients)
    reached = fed.total(
        clients, "reach", shared=shared, expect={"rows": Shape("int64", 256)}, min_replies=n
    )
    if reached is None:
        return
    bits = newton.bits_of(reached.value["rows"].numpy())
    p = len(server.beta)
    T = len(server.design["edges"]) + 1
    if bits is None:
        server.back()
        yield "round"
        return
    expect = {"sums": Shape("int64", T, 1 + p + p * (p + 1) // 2)}
    found = fed.total(
        clients, "hazards", shared={**shared, "bits": bits}, expect=expect, min_replies=n
    )
    if found is not None:
        server.newton_step(found.value["sums"].numpy(), bits)
    yield "round"


METHODS = (
    Method(
        name="fedcox",
        title="Cox's proportional hazards with standard errors, as on pooled rows",
        paper="C.-L. Lu et al.: WebDISCO: Distributed Cox Model Learning, 2015",
        family="tables",
        config=FedCoxConfig,
        only_classes="its label says whether an event happened",
        no_local="it solves for the exact coefficients by Newton's method",
        round=round,
        client=FedCoxClient,
        server=FedCoxServer,
        needs=("raw rows",),
        every_row=True,
    ),
)
