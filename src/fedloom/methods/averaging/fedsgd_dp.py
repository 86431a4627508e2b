"""Gradient descent on secure sums with shares of noise: every client adds a share of noise to its
clipped gradients before they are masked.

Paper: N. Agarwal, P. Kairouz, Z. Liu, "The Skellam Mechanism for Differentially Private Federated
Learning", NeurIPS 2021, whose steps these are; the sum is that of `fedloom.protect.masks`. A round
is one step of gradient descent on all rows of all clients:

    each client   g = sum over own rows of round(γ clip(∇, C)), plus Skellam noise of variance (σ Δ)² / (t - c)
    the server    w <- w - lr * sum of all g / (γ * number of all rows)

γ C is `STEPS`. Rounding is stochastic and moves a gradient by less than 1 in each of d numbers, so
that one row moves the sum by at most Δ = γ C + √d. A sum opens with t of the n clients
(`threshold`), of whom c may leave out their noise: so t - c shares have variance (σ Δ)², and what
anybody sees is private for each row, whatever weights the server sends.

Differs:
    No rotation and no modular clipping, as sums are modulo 2^64: they stay below 2^50.
    All rows in every step: no amplification by sampling, which others' choice of rows could spoil.
    The bound of rounding that always holds, in place of one by drawing again.
"""  # noqa: E501

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.fixed_point import threshold
from fedloom.core.page import (
    EVERY_TASK,
    ClientContext,
    Federation,
    Guarantee,
    Method,
    Party,
    Shape,
    Template,
    Tree,
)
from fedloom.methods import steps
from fedloom.methods.averaging import private
from fedloom.methods.averaging.fedavg import FedAvgServer
from fedloom.methods.averaging.private import AT_ONCE, PrivateTraining
from fedloom.protect.accountant import ABSENT, Releases, epsilon
from fedloom.protect.noise import charge, draws, or_nothing
from fedloom.protect.privacy import clipped_rows
from fedloom.protect.skellam import excess

STEPS: Final = 2**12
"""Steps of the grid within the clipping norm."""
NUMBERS = "private numbers"
"""The note of the count of numbers that a client released."""


class FedSGDDPConfig(steps.LocalSGDConfig):
    """The rate is `lr`. The server takes the only step of a round, so the other settings of local
    training have no effect.
    """

    lr: float = Field(1.0, gt=0)
    """Learning rate of the server's step along the mean of clipped gradients."""
    personal_head: Literal[False] = False
    """All weights are shared."""
    finetune_epochs: int = Field(0, ge=0)
    """Epochs of fine-tuning all weights before the evaluation mode "tuned"; 0 skips it."""
    dp: private.RowPrivacy = private.RowPrivacy()
    """Differential privacy of each row: sigma (noise multiplier), clip (C), delta (δ)."""

    @property
    def iterations_per_round(self) -> int:
        """One step."""
        return 1

    @property
    def sums_stand_alone(self) -> bool:
        """A client keeps nothing."""
        return True

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The privacy guarantee of the weights."""
        return guarantees(self)

    def charges(
        self, party: "Party[FedSGDDPConfig]", rounds: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`."""
        return [round_charge(party) for _ in rounds]

    def least_in_sum(self, context: ClientContext) -> int:
        """As many as the shares of noise are made for."""
        return threshold(context.parties, context.aggregator.colluders)


@final
class FedSGDDPClient(Party[FedSGDDPConfig]):
    """A client. It keeps nothing between rounds."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("update",)
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network."""
        steps.init_network(self)
        private.check(self)

    def update(self, *, t: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """The sum of the own rows' gradients at the server's weights, with a share of noise."""
        steps.set_weights(self, weights)
        honest = self.cfg.least_in_sum(self.context) - self.context.aggregator.colluders
        return {
            "gradient": noisy_gradient(self, list(weights), honest, t=t),
            "rows": self.row_count,
        }

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the server's weights; adapt or fine-tune, depending on the
        mode.
        """
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


def guarantees(cfg: PrivateTraining) -> tuple[Guarantee, ...]:
    """The guarantee of the weights."""

    def spent(counts: Sequence[float]) -> float:
        sizes = Counter(map(int, counts))
        return epsilon([release(cfg, d, rounds) for d, rounds in sizes.items()], cfg.dp.delta)

    planned = lambda party, rounds: [float(sum(w.numel() for w in party.params.values()))] * rounds
    return (Guarantee("weights", ABSENT, cfg.dp.delta, NUMBERS, spent, planned=planned),)


def release(cfg: PrivateTraining, d: int, count: int = 1) -> Releases:
    """Releases of sums of d numbers."""
    return Releases(cfg.dp.sigma, count, 1.0, excess(cfg.dp.sigma, norm(d), d))


def round_charge(party: Party[PrivateTraining]) -> tuple[float, int, float, float]:
    """What a round charges to the budget of the party's rows."""
    one = release(party.cfg, sum(w.numel() for w in party.params.values()))
    return one.sigma, one.count, one.rate, one.excess


def norm(d: int) -> float:
    """Δ: how far one row moves a sum of d integers, at most."""
    return STEPS + math.sqrt(d)


def noisy_gradient(
    party: Party[PrivateTraining], names: Sequence[str], honest: int, *, t: int
) -> dict[str, Tensor]:
    """The sum of the own rows' gradients as int64 tensors by name, with a share of noise for so
    many honest parties.
    """
    cfg, like = party.cfg, [party.params[k] for k in names]
    d = sum(w.numel() for w in like)
    charge(party, *round_charge(party))
    party.note(NUMBERS, float(d))
    rng = draws(party, "shares", t)
    nothing = torch.zeros(d, dtype=torch.int64)
    total = or_nothing(party, lambda: rounded_sum(party, names, rng.uniform), nothing)
    half = math.ceil((cfg.dp.sigma * norm(d)) ** 2 / honest / 2)
    flat = total + rng.skellam(half, d)
    parts = flat.split([w.numel() for w in like])  # type: ignore[no-untyped-call]
    return {k: part.view(w.shape) for k, part, w in zip(names, parts, like, strict=True)}


def rounded_sum(party: Party[PrivateTraining], names: Sequence[str], uniform: Any) -> Tensor:
    """The sum (d,) int64 of all own rows' gradients, each clipped, scaled and rounded at random to
    integers.
    """
    rows, clip = torch.arange(len(party.data)), party.cfg.dp.clip
    total = torch.zeros(sum(party.params[k].numel() for k in names), dtype=torch.int64)
    for some in rows.to(party.context.device).split(AT_ONCE):  # type: ignore[no-untyped-call]
        x, y = party.data.x(some), party.data.y(some)
        found = party.row_gradients(partial(steps.label_loss, party), x, y, of=names)
        each = clipped_rows(
            torch.cat([found[k].flatten(1) for k in names], 1).double(), clip
        ).cpu() * (STEPS / clip)
        lift = torch.from_numpy(np.asarray(uniform(each.numel()))).view(each.shape)
        total += (each + lift).floor().to(torch.int64).sum(0)
    return total


def round(
    fed: Federation, server: FedAvgServer, clients: Sequence[int], cfg: FedSGDDPConfig, t: int
) -> Iterator[str]:
    """One step along the sum of all clients' gradients, if it has enough shares of noise."""
    sent: Mapping[str, Tensor] = server.weights
    template: Template = {
        "gradient": {k: Shape("int64", *w.shape) for k, w in sent.items()},
        "rows": Shape("int64"),
    }
    found = fed.total(
        clients,
        "update",
        expect=template,
        shared={"t": t, "weights": sent},
        min_replies=cfg.least_in_sum(server.context),
    )
    if found is not None and int(found.value["rows"]) > 0:
        rate = cfg.lr * cfg.dp.clip / STEPS / int(found.value["rows"])
        server.weights = {
            k: w - (found.value["gradient"][k].double() * rate).to(w.dtype) for k, w in sent.items()
        }
    yield "round"


METHODS = (
    Method(
        name="fedsgd-dp",
        title="Gradient descent on secure sums, to which each client adds a share of noise",
        paper="N. Agarwal, P. Kairouz, Z. Liu: The Skellam Mechanism for Differentially Private "
        "Federated Learning, NeurIPS 2021",
        family="averaging",
        config=FedSGDDPConfig,
        round=round,
        client=FedSGDDPClient,
        server=FedAvgServer,
        fixed={"personal_head": False},
        tasks=EVERY_TASK,
        local=("class_weights",),
        no_local="the server takes each step, along the sum of gradients",
        needs=("one network", "secure sums"),
        linear=True,
    ),
)
