"""LASER-VFL: vertical learning in which any set of parties may have a row, in training and in
prediction.

P. Valdeira, S. Wang, Y. Chi, "Vertical Federated Learning with Missing Features During Training and
Inference", ICLR 2025, arXiv 2410.22564; its code Valdeira/LASER-VFL, methods/laser.py.

Party k embeds its columns with h_k. The head g classifies the mean of the embeddings of a set S of
parties, so that one head serves every set. A row that the parties O have, m of them, costs

    sum over k in O, sum over S with k in S, S within O, of (1 / |S|) l(g(mean of h_i over S), y)

which is sampled: for each k in O and each size j = 1 … m one set S of that size, uniformly among
those that contain k, with the weight C(m - 1, j - 1) / j. Its expectation is that sum, for m^2
evaluations of the head in place of m 2^(m - 1).

A party sends zeros for a row that it lacks, and zeros are read as absence: no other message states
which parties have a row. A party that does not answer is absent for the batch.

Differs: there is one head, at the active party, where the paper gives each party a head and hence
the labels; its own columns are party 0's and may be missing like any other's. The set is drawn for
each row; the code draws one for a batch. `weighing = "row"` divides a row's cost by 2^m - 1, the
sum of its weights, without which rows with more parties count more. The head is the network of
split learning, where the paper's is linear. A row that nobody has is not trained on, and is
predicted from zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import EVERY_LOCAL, EVERY_TASK, Federation, Method, Party, floats
from fedloom.methods.vertical import steps


class LaserConfig(steps.SplitConfig):
    """Settings of split learning, and how rows are weighed."""

    weighing: Literal["row", "paper"] = "row"
    """Weight of a row that m parties have: 1, or 2^m - 1."""
    incomplete: Literal["use"] = "use"
    """Rows that a party lacks are used."""
    top_model: Literal["network"] = "network"
    """The head: a network on a mean of embeddings."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of all parties."""


# -- sets of parties -------------------------------------------------------------------------------


def draw_sets(here: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """For each row, one set of each size around each party that has the row.

    The draws of the first parties do not depend on the number of further ones.

    Args:
        here: (B, M) bool, which parties have a row.
        rng: for B M^3 numbers.

    Returns:
        Sets (B, M, M, M) bool: member i of the set of size j + 1 around party k, at [row, k, j, i].
        Their weights (B, M, M), C(m - 1, j) / (j + 1) for the m parties that have the row; 0 where
        k lacks it or j + 1 > m.
    """
    rows, parties = here.shape
    order = sorted(product(range(parties), repeat=3), key=max)
    draws = torch.empty(rows, parties, parties, parties, dtype=torch.float64)
    draws[:, *torch.tensor(order).T] = torch.from_numpy(rng.random((len(order), rows))).T
    draws = draws.to(here.device)
    draws = torch.where(here[:, None, None, :], draws, 2.0)  # who lacks the row comes last
    # and k itself first
    draws = draws - 2 * torch.eye(parties, dtype=draws.dtype, device=draws.device)[:, None, :]
    place = draws.argsort(-1).argsort(-1)
    sizes = torch.arange(parties, device=here.device)
    sets = (place <= sizes[:, None]) & here[:, None, None, :]
    return sets, torch.where(
        here[:, :, None], subset_weights(here.sum(1), parties)[:, None, :], 0.0
    )


def subset_weights(m: Tensor, parties: int) -> Tensor:
    """C(m - 1, j) / (j + 1) for j = 0 … M - 1 and each m (B,): (B, M) float64, 0 where j >= m."""
    j = torch.arange(parties, device=m.device, dtype=torch.float64)
    top = (m[:, None] - 1).double()
    logs = (
        torch.lgamma(top.clamp(min=0) + 1)
        - torch.lgamma(j + 1)
        - torch.lgamma((top - j).clamp(min=0) + 1)
    )
    return torch.where(j < m[:, None], logs.exp().round() / (j + 1), 0.0)


def set_means(parts: Tensor, sets: Tensor) -> Tensor:
    """The means (B, …, d) of the embeddings (B, M, d) of the members of each set (B, …, M); zeros
    of an empty set.
    """
    members = sets.reshape(len(sets), -1, sets.shape[-1]).to(parts.dtype)
    means = members @ parts / members.sum(-1, keepdim=True).clamp(min=1)
    return means.reshape(*sets.shape[:-1], parts.shape[-1])


def present(parts: Tensor) -> Tensor:
    """(B, M) bool, which parties have each row: those whose embedding (B, M, d) is not
    all zeros.
    """
    return (parts != 0).any(-1)


# -- the parties -----------------------------------------------------------------------------------


@final
class LaserPassive(Party[LaserConfig]):
    """A party's extractor h_k."""

    STATE = ("params", "buffers", "opt")
    ROLE = "party"
    CALLS = ("embed", "update")
    TELLS = ()

    def setup(self) -> None:
        """Its extractor."""
        self.network(steps.extractor(self), self.cfg.optimize())

    def embed(self, *, number: int, step: int) -> Tensor:
        """Embeddings (B, d) of this batch, zeros for the rows that it lacks."""
        return steps.embed_batch(self, number, step)

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient (B, d) of the loss by
        what was sent.
        """
        steps.backward(self, number=number, step=step, cut=cut)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) for a joint evaluation."""
        return steps.embeddings(self, on=on)


@final
class LaserActive(Party[LaserConfig]):
    """The active party: the labels, and the head g."""

    STATE = ("params", "opt")
    ROLE = "active"

    def setup(self) -> None:
        """A classifier of one mean embedding."""
        self.network(steps.top_model(self, self.cfg.embedding_dim), self.cfg.optimize(active=True))

    def cost(self, parts: Tensor, y: Tensor, rng: np.random.Generator) -> Tensor:
        """The sampled cost () of a batch: the mean over its rows (B, M, d), y (B,) that somebody
        has.
        """
        here = present(parts)
        sets, weights = draw_sets(here, rng)
        if self.cfg.weighing == "row":
            weights = weights / (2.0 ** here.sum(1) - 1).clamp(min=1)[:, None, None]
        used = weights > 0
        outputs = self.model(set_means(parts, sets)[used])
        losses = self.context.task.loss(outputs, y[used.nonzero()[:, 0]], "none")
        return (losses * weights[used].to(losses.dtype)).sum() / here.any(1).sum()

    def learn(
        self, parts: Mapping[int, Tensor], number: int, step: int
    ) -> dict[int, dict[str, Tensor]]:
        """One step of the head; the gradient (B, d) for each party that has a row of the batch."""
        embedded = steps.joint(parts)
        who = {m: bool(has) for m, has in zip(parts, present(embedded).any(0), strict=True)}
        if not any(who.values()):
            return {}
        embedded.requires_grad_()
        y = steps.labels(self, steps.batch_indices(self, number, step))
        rng = self.stream("sets", number, step)
        self.note("loss", self.minimize(lambda: self.cost(embedded, y, rng)))
        assert embedded.grad is not None
        cuts = dict(zip(parts, embedded.grad.unbind(1), strict=True))
        return {m: {"cut": cuts[m].contiguous()} for m, has in who.items() if has}

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of the available parties."""
        parts = steps.joint(contributions)
        return self.infer(set_means(parts, present(parts)))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The gradients (N_a, d) that each party would receive for the aligned rows."""
        parts = steps.joint(contributions).requires_grad_()
        with self.scratch():
            loss = (
                self.cost(parts, steps.labels(self), self.stream("exposed sets"))
                * len(parts)
                / self.cfg.batch_size
            )
            (cut,) = torch.autograd.grad(loss, parts)
        return {"gradients": dict(zip(contributions, cut.unbind(1), strict=True))}


def round(
    fed: Federation, active: LaserActive, parties: Sequence[int], cfg: LaserConfig, t: int
) -> Iterator[str]:
    """Epochs over the aligned rows, with the parties that answer."""
    template = floats(cfg.batch_size, cfg.embedding_dim)
    for number in range(t * cfg.epochs, (t + 1) * cfg.epochs):
        for step in range(steps.steps_per_pass(active)):
            which = {"number": number, "step": step}
            parts = fed.call(parties, "embed", shared=which, expect=template)
            cuts = active.learn(parts, number, step) if parts else {}
            fed.call(cuts, "update", shared=which, each=cuts, expect=None)
    yield "round"


PAPER = {
    "weighing": "paper",
    "epochs": 1,
    "batch_size": 128,
    "lr": 1e-4,
    "weight_decay": 1e-3,
    "centered": False,
}

METHODS = (
    Method(
        name="laser-vfl",
        title="LASER-VFL: any set of parties, in training and in prediction",
        paper="P. Valdeira et al.: Vertical Federated Learning with Missing Features During "
        "Training and Inference, ICLR 2025",
        family="vertical",
        config=LaserConfig,
        round=round,
        client=LaserPassive,
        server=LaserActive,
        presets={"paper": PAPER},
        setting="vertical",
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        any_contributor=True,
    ),
)
