"""FedeRiCo: a peer explains its rows by a mixture of its neighbours' models, and averages with the
best ones.

Paper: Y. Sui, J. Wen, Y. Lau, B. L. Ross, J. C. Cresswell, "Find Your Friends: Personalized
Federated Learning with the Right Collaborators", 2022. Here as a baseline of AFIND+ (its section
4.1).

Peer i has a mixture weight π_ij for itself and each neighbour, and for each of its rows s the loss
l_ij(s) of each model that it has received. A round:

    train the own model, row s with the weight r_ii(s)                          M-step of the model
    request k neighbours, drawn by π_ij, or with probability ε uniformly
    l_ij(s) <- moving average of the losses, for these neighbours and itself
    r_ij(s) ∝ π_ij exp(-l_ij(s)), over all j with a known loss                  E-step
    π_ij <- mean over s of r_ij(s)                                              M-step of the mixture
    w_i <- Σ_j π_ij w_j / Σ_j π_ij, over these neighbours and itself

With k = 0 every peer trains alone.

Reading, where the papers are silent:
    π starts uniform. A neighbour that has never replied keeps its π, and the others share the rest.
    The first training, before any r, has equal row weights.
    Row weights are divided by their mean, so that steps are as long as in other methods.
    ε applies to each of the k draws. They are without replacement.
    `loss_momentum` is the weight of old losses.

Differs:
    The original predicts with the mixture of the models' outputs, and averages no weights. In
        AFIND+'s comparison all methods have one model, trained and fine-tuned alike, so here π
        weights the parameters.
    Only the peer's own model is evaluated on the rows that it was trained on. So π_ii grows towards
        1 and mixing fades; the rest of π distinguishes the neighbours.
    With a personal head a neighbour's body is evaluated with the peer's own head and BatchNorm
    statistics.
"""  # noqa: E501

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import EVERY_LOCAL, EVERY_TASK, Federation, Method, Party, Tree, epoch_plan
from fedloom.methods import steps
from fedloom.methods.peer import mixing

WORST = 100.0
"""Upper clip on losses, which also replaces NaN: large enough that π is 0, and finite, so that a
model can recover.
"""


class FedericoConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`, with weighted rows."""

    neighbours: int | None = Field(10, ge=0)
    """Number of neighbours that a peer requests models from in a round (k); None for all."""
    epsilon: float = Field(0.3, ge=0, le=1)
    """Probability of drawing a neighbour uniformly instead of by π (ε)."""
    loss_momentum: float = Field(0.5, ge=0, lt=1)
    """Weight of a row's previous loss in the moving average."""


@final
class FedericoPeer(Party[FedericoConfig]):
    """A peer, its model, and its mixture.

    Its state `mixture`, with m parties and n own rows: ln π (m,), as π itself could underflow to 0;
    a mask of known losses (m,); the losses (m, n); and the row weights (n,), whose mean is 1.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "mixture")
    CALLS = ("update", "choose", "mix")
    TO_PEERS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network; equal shares of the peer and its neighbours; no known losses; equal
        row weights.
        """
        steps.init_network(self)
        m, n, device = self.context.parties, len(self.data), self.context.device
        log_pi = torch.full((m,), -math.inf, dtype=torch.float64, device=device)
        log_pi[[self.context.id, *self.context.neighbours]] = -math.log(
            1 + len(self.context.neighbours)
        )
        self.mixture: dict[str, Any] = {
            "log_pi": log_pi,
            "known": torch.zeros(m, dtype=torch.bool, device=device),
            "losses": torch.zeros(m, n, device=device),
            "weights": torch.ones(n, device=device),
        }

    # -- the own model -----------------------------------------------------------------------------

    def update(self, *, t: int) -> None:
        """Local training, with the loss of each row times its weight."""
        weights = self.mixture["weights"]
        steps.reset_optimizer(self)
        for n, names in steps.local_epochs(self, t):
            plan = epoch_plan(self.stream("batches", n), len(self.data), 1, self.cfg.batch_size)
            for (x, y), w in zip(
                self.data.batches(plan), weights[plan.to(weights.device)], strict=True
            ):
                self.minimize(self.weighted_loss, x, y, w, only=names)

    def weighted_loss(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Mean () of w (B,) times the loss on x (B, ...), y (B,)."""
        return (w * self.context.task.loss(self.model(x), y, "none")).mean()

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights."""
        return {"weights": steps.shared_weights(self)}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode."""
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)

    # -- the neighbours ----------------------------------------------------------------------------

    def choose(self, *, t: int, here: Tensor) -> Tensor:
        """The selected neighbours as a mask (m,), given the available peers (m,)."""
        present, log_pi = here.tolist(), self.mixture["log_pi"].tolist()
        near = [j for j in self.context.neighbours if present[j]]
        k = len(near) if self.cfg.neighbours is None else self.cfg.neighbours
        mask = torch.zeros_like(self.mixture["known"])
        mask[
            draw_neighbours(
                self.stream("collaborators", t), {j: log_pi[j] for j in near}, k, self.cfg.epsilon
            )
        ] = True
        return mask

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """New losses, new π, and the mean by π of the own model and the models of the neighbours
        that replied.
        """
        models = mixing.models_of(self, inbox)
        ids = list(models)
        self.update_mixture(ids, self.losses(list(models.values())))
        shares = torch.softmax(self.mixture["log_pi"][ids], 0)
        mixing.average(self, models, dict(zip(ids, shares.tolist(), strict=True)))
        self.note("effective neighbours", 1 / (shares**2).sum())
        self.note("own weight in pi", self.mixture["log_pi"][self.context.id].exp())

    def losses(self, models: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The loss (k, n) of each model on each own row, in evaluation mode."""
        rows = self.data
        every = torch.arange(len(rows), device=self.context.device)
        x, y = rows.x(every), rows.y(every)
        losses: list[Tensor] = []
        for weights in models:
            with self.scratch():
                steps.set_weights(self, weights)
                # likelihoods
                losses.append(self.context.task.unweighted.loss(self.infer(x), y, "none"))
        return torch.nan_to_num(torch.stack(losses), nan=WORST).clamp(max=WORST)

    def update_mixture(self, ids: Sequence[int], losses: Tensor) -> None:
        """E-step, M-step of π, and the row weights, from the losses (k, n) of the models of peers
        `ids`.
        """
        m = self.mixture
        old, known = m["losses"].clone(), m["known"].clone()
        memory = self.cfg.loss_momentum * known[ids, None]
        old[ids] = memory * old[ids] + (1 - memory) * losses
        known[ids] = True
        log_pi, log_r = expectation(m["log_pi"][known], old[known].double())
        own = log_r[known[: self.context.id].sum()]
        weights = (own - own.max()).exp()
        self.mixture = {
            "log_pi": m["log_pi"].masked_scatter(known, log_pi),
            "known": known,
            "losses": old,
            "weights": (weights / weights.mean()).float(),
        }


def expectation(log_pi: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """New ln π (k,) and ln r (k, n) from ln π (k,) and losses (k, n). The sum of π is preserved."""
    log_r = torch.log_softmax(log_pi[:, None] - losses, 0)
    return torch.logsumexp(log_pi, 0) + torch.logsumexp(log_r, 1) - math.log(losses.shape[1]), log_r


def draw_neighbours(
    rng: np.random.Generator, log_pi: Mapping[int, float], k: int, epsilon: float
) -> list[int]:
    """`k` keys (all, if there are fewer) without replacement: each drawn by π, or with probability
    ε uniformly.
    """
    left = list(log_pi)
    drawn: list[int] = []
    while left and len(drawn) < k:
        p = np.exp(np.array([log_pi[j] for j in left]) - max(log_pi[j] for j in left))
        uniform = rng.random() < epsilon
        drawn.append(
            left.pop(rng.integers(len(left)) if uniform else rng.choice(len(left), p=p / p.sum()))
        )
    return drawn


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: FedericoConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    fed.call(peers, "update", shared=now)
    links = fed.choose_peers(peers, "choose", now)
    fed.exchange(
        links,
        answer="give",
        take="mix",
        shared=now,
        expect=steps.weights_template(fed, cfg.personal_head),
    )
    yield "round"


METHODS = (
    Method(
        name="federico",
        title="Peers mix the models that best explain their rows, by expectation and maximization",
        paper="Y. Sui et al.: Find Your Friends: Personalized Federated Learning with the Right "
        "Collaborators, 2022",
        family="peer",
        config=FedericoConfig,
        round=round,
        client=FedericoPeer,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
    ),
)
