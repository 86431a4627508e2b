"""The steps of DP-SGD at a client: differential privacy of its weights for each row.

Paper: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1. Each step
takes a random subset of the own rows, each included with probability q = batch_size / n; clips each
row's gradient to C; adds noise of standard deviation σ C to the sum; divides by q n. The weights
that a client sends are (ε, δ)-private for each of its rows, whatever weights it was sent, if
columns are scaled by public numbers.

Differs:
    ceil(n / batch_size) steps in an epoch, and `epochs` epochs in a round: the work of FedAvg.

Two methods take these steps: `fedavg-dp` (`averaging/fedavg_dp.py`), and gossip (`peer/gossip.py`),
whose peers average what they get without a look at their rows.
Privacy of each client as a whole is the run's `[aggregate.noise]`, see
`fedloom.protect.aggregators`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedloom.core.page import Guarantee, ModelError, Party
from fedloom.methods import steps
from fedloom.methods.settings import LocalSGD
from fedloom.protect.accountant import ABSENT, Releases, epsilon
from fedloom.protect.noise import Draws, charge, draws, or_nothing
from fedloom.protect.privacy import clipped_rows

ROWS = "private rows"
"""The note of the number of rows of a client that trained with `unit = "rows"`."""
AT_ONCE = 64
"""Rows whose gradients are in memory at once."""
LARGEST_STEP = 1e4
"""Largest lr σ C: with bounded weights at the start, noise cannot make them infinite."""


class RowPrivacy(BaseModel):
    """Differential privacy of the weights for each row."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sigma: float = Field(1.0, gt=0)
    """Noise multiplier σ: the noise has standard deviation σ C."""
    clip: float = Field(1.0, gt=0)
    """Clipping norm C of a row's gradient."""
    delta: float = Field(1e-5, gt=1e-10, lt=1)
    """δ at which ε is reported."""

    @property
    def protects_rows(self) -> bool:
        """Whether training has noise."""
        return True


class OptionalRowPrivacy(RowPrivacy):
    """The same, for a method that trains without noise unless it is asked for."""

    unit: Literal["none", "rows"] = "none"
    """What is protected: each row, by noise at its client (DP-SGD)."""

    @property
    def protects_rows(self) -> bool:
        """Whether the unit is a row."""
        return self.unit == "rows"


class PrivateTraining(LocalSGD, Protocol):
    """Settings of local training and of its privacy."""

    @property
    def dp(self) -> RowPrivacy:
        """Differential privacy of the weights."""


def guarantees(cfg: PrivateTraining) -> tuple[Guarantee, ...]:
    """The guarantee of a config with local training, `dp` and maybe a personal head."""
    dp = cfg.dp
    if not dp.protects_rows:
        return ()
    spent = lambda rows: epsilon(row_releases(cfg, rows), dp.delta)
    planned = lambda party, rounds: [float(len(party.data))] * rounds
    return (Guarantee("weights", ABSENT, dp.delta, ROWS, spent, planned=planned),)


def row_releases(cfg: PrivateTraining, rows: Sequence[float]) -> list[Releases]:
    """The releases of a client's training, from its number of rows in each round that it took part
    in.
    """
    epochs = cfg.epochs + (cfg.head_epochs if cfg.personal_head else 0)
    found = []
    for count, rounds in Counter(map(round, rows)).items():
        size, each = subset_steps(cfg, count)
        found.append(Releases(cfg.dp.sigma, rounds * epochs * each, size / count))
    return found


def subset_steps(cfg: PrivateTraining, rows: int) -> tuple[int, int]:
    """The mean number of rows of a step, and the number of steps of an epoch over this
    many rows.
    """
    size = min(cfg.batch_size, rows)
    return size, -(-rows // size)


def round_charge(party: Party[PrivateTraining]) -> tuple[float, int, float]:
    """What a round charges to the budget of the party's rows."""
    cfg, rows = party.cfg, len(party.data)
    size, each = subset_steps(cfg, rows)
    return cfg.dp.sigma, len(steps.local_epochs(party, 0)) * each, size / rows


def charges(
    cfg: PrivateTraining, party: Party[PrivateTraining], rounds: Sequence[int]
) -> list[tuple[float, ...]]:
    """See `MethodConfig.charges`."""
    return [round_charge(party) for _ in rounds] if cfg.dp.protects_rows else []


def check(party: Party[PrivateTraining]) -> None:
    """Raise ModelError if a row's gradient depends on other rows, or steps are so long that weights
    may overflow.
    """
    cfg = party.cfg
    if not cfg.dp.protects_rows:
        return
    if cfg.lr * cfg.dp.sigma * cfg.dp.clip > LARGEST_STEP:
        raise ModelError(
            f"params.lr * params.dp.sigma * params.dp.clip is above {LARGEST_STEP:g}: lower one "
            "of them"
        )
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in party.net.module.modules()):
        raise ModelError(
            "params.dp bounds each row's own gradient, but this network has BatchNorm, by which "
            'rows affect each other: set models.norm = "group", or choose a network without it'
        )


# -- rows: at the client ---------------------------------------------------------------------------


def train(party: Party[PrivateTraining], *, t: int) -> None:
    """Round t's training on the party's own rows, with noise if `dp` asks for it."""
    (dp_sgd if party.cfg.dp.protects_rows else steps.local_sgd)(party, t=t)


def dp_sgd(party: Party[PrivateTraining], *, t: int) -> None:
    """Round t's training on the party's own rows with noise, from its current weights: see
    `steps.local_sgd`.
    """
    cfg, rows = party.cfg, len(party.data)
    size, each = subset_steps(cfg, rows)
    epochs = steps.local_epochs(party, t)
    charge(party, *round_charge(party))
    party.note(ROWS, float(rows))
    rng = draws(party, "dp-sgd", t)
    steps.reset_optimizer(party)
    for _, names in epochs:
        for _ in range(each):
            dp_step(party, rng, list(names or party.params), size)


def dp_step(party: Party[PrivateTraining], rng: Draws, names: Sequence[str], size: int) -> None:
    """One optimizer step along the noisy sum of clipped row gradients, divided by the mean size of
    a subset.
    """
    like = [party.params[k] for k in names]
    which = rng.included(len(party.data), size / len(party.data))
    flat = noisy_sum(party, rng, names, which).div(size).to(like[0].dtype)
    parts = flat.split([w.numel() for w in like])  # type: ignore[no-untyped-call]
    gradient = {k: part.view(w.shape) for k, part, w in zip(names, parts, like, strict=True)}
    party.minimize(
        lambda: torch.stack([(party.live[k] * g).sum() for k, g in gradient.items()]).sum(),
        only=names,
    )


def noisy_sum(
    party: Party[PrivateTraining], rng: Draws, names: Sequence[str], which: Tensor
) -> Tensor:
    """The clipped sum (d,) float64 of these own rows with noise; noise alone if it cannot be
    computed.
    """
    dp = party.cfg.dp
    nothing = torch.zeros(
        sum(party.params[k].numel() for k in names),
        dtype=torch.float64,
        device=party.context.device,
    )
    total = or_nothing(party, lambda: clipped_sum(party, names, which), nothing)
    return rng.blur(total, dp.sigma * dp.clip, dp.clip)


def clipped_sum(party: Party[PrivateTraining], names: Sequence[str], which: Tensor) -> Tensor:
    """The sum (d,) float64 of the gradients of these own rows, each clipped to norm C."""
    total = torch.zeros(
        sum(party.params[k].numel() for k in names),
        dtype=torch.float64,
        device=party.context.device,
    )
    for some in which.to(party.context.device).split(AT_ONCE):  # type: ignore[no-untyped-call]
        x, y = party.data.x(some), party.data.y(some)
        rows = party.row_gradients(partial(steps.label_loss, party), x, y, of=names)
        each = torch.cat([rows[k].flatten(1) for k in names], 1).double()
        total += clipped_rows(each, party.cfg.dp.clip).sum(0)
    return total
