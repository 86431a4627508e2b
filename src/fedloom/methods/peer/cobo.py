"""CoBo: peers learn, beside their models, which other models help them.

Paper: D. Hashemi, L. He, M. Jaggi, "CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS
2024, arXiv 2409.05539. The algorithm is that of the authors' code.

Each peer i has a model x_i and weights w_ij = w_ji in [0, 1], 1 at the start. The outer problem is
min Σ_i f_i(x_i) + ρ/2 Σ_{i<j} w_ij |x_i - x_j|²; the inner one maximizes w_ij ⟨∇f_i(z_ij),
∇f_j(z_ij)⟩. A round:

    for some pairs {i, j}, drawn at random:
        z_ij = (x_i + x_j) / 2;  g_i, g_j: gradients of f_i, f_j at z_ij, each on one batch
        w_ij <- clip(w_ij + γ ⟨g_i, g_j⟩, 0, 1)
    x_i <- x_i - η (∇f_i(x_i) + ρ Σ_k w_ik (x_i - x_k)), for `epochs`; all x_k are those before the
    round

⟨g_i, g_j⟩ has the scale of squared gradients, which fall as training proceeds, so γ must suit a
network and its stage. `similarity="cosine"` (ours) divides it by both lengths; the preset `cosine`
has γ = 0.5 and tests all pairs.

Reading, where the paper is silent:
    "mixed" pairs: the code tests a pair with probability 2/n at first, and with 1/√t after 0.2 % of
        the run; the text has 1/t. Here 2/n (at most 1) in the first round, then 1/√t.
    η ρ Σ_k w_ik must be below 1, or the pull overshoots: refused.

Differs:
    A round is `epochs` towards the x_k of its start, not one step. One step a round is the paper.
    The number of pairs is rounded and fixed for a round, not drawn for each pair.
    Momentum starts at 0 in each round and includes the pull, as in Ditto. The code has m <- 0.9 m +
    0.1 g. With a personal head x is the body; gradients are the body's, with each peer's own head.
    A pair of which only one peer gets the other's reply has different w from then on.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import sqrt
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Aggregator,
    Federation,
    Method,
    MethodError,
    Party,
    Template,
    Tree,
)
from fedloom.methods import steps
from fedloom.methods.peer import mixing

AT_ONCE = 128
"""Maximum number of replies held in memory at once in an exchange."""


class CoboConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    rho: float = Field(0.05, ge=0)
    """ρ: strength of the pull towards other models."""
    gamma: float = Field(0.01, gt=0)
    """γ: step size of the weights w."""
    similarity: Literal["product", "cosine"] = "product"
    """Whether w grows by the product of two gradients, or by their cosine (ours)."""
    pairs: Literal["mixed", "constant", "all"] = "mixed"
    """Share of pairs that is tested in a round: 2/n in the first round and then 1/√t (mixed), 2/n,
    or all.
    """

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: models are weighed by w."""
        return (
            ""
            if aggregator.weighs
            else 'CoBo weighs models by w: choose rule = "clip" or "centered"'
        )


@final
class CoboPeer(Party[CoboConfig]):
    """A peer, its model, its weights w (m,) in `helpers`, and what pulls it in this round: the sum
    of w in `mass` and the mean model by w in `target`.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "helpers", "target")
    CALLS = ("judge", "choose", "pull", "update")
    TO_PEERS = ("request", "test", "give")
    MEANS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network; w = 1 for all neighbours."""
        steps.init_network(self)
        w = torch.zeros(self.context.parties, dtype=torch.float64, device=self.context.device)
        w[list(self.context.neighbours)] = 1
        self.helpers: dict[str, Tensor] = {"w": w}
        self.target: dict[str, Any] = {}

    # -- w -----------------------------------------------------------------------------------------

    def request(self, *, t: int) -> dict[str, Tree]:
        """The own x_i."""
        return {"weights": steps.shared_weights(self)}

    def test(self, *, t: int, asked: Mapping[str, Any], by: Tensor) -> dict[str, Tree]:
        """At j: x_j, and g_j at the middle of x_i and x_j."""
        own = steps.shared_weights(self)
        return {"weights": own, "gradient": self.gradient_between(t, own, asked["weights"])}

    def gradient_between(
        self, t: int, own: Mapping[str, Tensor], other: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The gradient by name of the own loss at the middle of two models, on round t's batch."""
        x, y = self.sample_batch(t, size=self.cfg.batch_size)
        with self.scratch():
            steps.set_weights(self, {k: (a + other[k]) / 2 for k, a in own.items()})
            return self.gradient(partial(steps.label_loss, self), x, y, of=list(own))[1]

    def judge(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """w_ij <- clip(w_ij + γ ⟨g_i, g_j⟩, 0, 1) for each neighbour that replied."""
        if not inbox:
            return
        own = steps.shared_weights(self)
        w = self.helpers["w"].clone()
        for j, reply in inbox.items():
            mine = flat_gradient(self.gradient_between(t, own, reply["weights"]))
            agreement = similarity(mine, flat_gradient(reply["gradient"]), self.cfg.similarity)
            w[int(j)] = new_weight(w[int(j)], agreement, self.cfg.gamma)
        self.helpers = {"w": w}

    # -- x -----------------------------------------------------------------------------------------

    def choose(self, *, t: int, here: Tensor) -> Tensor:
        """The peers with w > 0, as a mask (m,)."""
        return self.helpers["w"] > 0

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own x_i."""
        return {"weights": steps.shared_weights(self)}

    def pull(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep Σ_k w_ik and the mean of the x_k by w_ik: Σ_k w_ik (x_i - x_k) is their distance
        times the sum.
        """
        row = torch.zeros_like(self.helpers["w"])
        if len(inbox) >= self.context.aggregator.least:
            w = self.helpers["w"][[int(j) for j in inbox]]
            models = [reply["weights"] for reply in inbox.values()]
            self.target = {
                "mass": w.sum().float(),
                "weights": mixing.mean_of(self, models, w.tolist()),
            }
            row[[int(j) for j in inbox]] = self.cfg.lr * self.cfg.rho * w
        row[self.context.id] = 1 - row.sum()
        self.note("mixing", row)
        self.note("helpers", len(inbox))

    def update(self, *, t: int) -> None:
        """`epochs` on f_i(x) + ρ/2 Σ_k w_ik |x - x_k|²."""
        steps.reset_optimizer(self)
        loss = (
            partial(self.pulled_loss, self.target)
            if self.target
            else partial(steps.label_loss, self)
        )
        for n, names in steps.local_epochs(self, t):
            self.train(loss, self.epochs(n, size=self.cfg.batch_size), only=names)
        self.target = {}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode."""
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)

    def pulled_loss(self, target: Mapping[str, Any], x: Tensor, y: Tensor) -> Tensor:
        """The loss () on x (B, ...), y (B,), up to a constant."""
        live = self.live
        distance = torch.stack(
            [(live[k] - mean).square().sum() for k, mean in target["weights"].items()]
        ).sum()
        pull: Tensor = self.cfg.rho / 2 * target["mass"] * distance
        return steps.label_loss(self, x, y) + pull


# -- the equations ---------------------------------------------------------------------------------


def flat_gradient(gradient: Mapping[str, Tensor]) -> Tensor:
    """A gradient (d,), its tensors one after the other."""
    return torch.cat([g.flatten() for g in gradient.values()])


def similarity(a: Tensor, b: Tensor, kind: str) -> Tensor:
    """⟨a, b⟩ () of gradients (d,), or their cosine, which is 0 for a zero vector."""
    if kind == "cosine":
        return F.normalize(a, dim=0) @ F.normalize(b, dim=0)
    return a @ b


def new_weight(w: Tensor, agreement: Tensor, gamma: float) -> Tensor:
    """clip(w + γ agreement, 0, 1) ()."""
    return (w + gamma * agreement).clamp(0, 1)


def tested(fed: Federation, peers: Sequence[int], cfg: CoboConfig, t: int) -> dict[int, list[int]]:
    """The pairs of neighbours that are tested in round t, as links in both directions."""
    pairs = [(i, j) for i, j in combinations(sorted(peers), 2) if j in fed.neighbours(i, (j,))]
    rate = (
        1.0
        if cfg.pairs == "all"
        else 1 / sqrt(t)
        if cfg.pairs == "mixed" and t
        else 2 / max(2, len(peers))
    )
    drawn = fed.sample(range(len(pairs)), pair_count(rate, len(pairs)), t)
    links: dict[int, list[int]] = {i: [] for i in peers}
    for i, j in (pairs[n] for n in drawn):
        links[i].append(j)
        links[j].append(i)
    return links


def pair_count(rate: float, pairs: int) -> int:
    """The number of pairs at this rate, at least one."""
    return min(pairs, max(1, int(rate * pairs + 0.5)))


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: CoboConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once.

    Raises:
        MethodError: η ρ Σ_k w_ik may be 1 or more.
    """
    if cfg.lr * cfg.rho * (len(peers) - 1) >= 1:
        raise MethodError(
            f"params.lr × params.rho × {len(peers) - 1} neighbours is "
            f"{cfg.lr * cfg.rho * (len(peers) - 1):g}, so a step may overshoot the other models; "
            "lower params.rho until the product is below 1"
        )
    mixing.check_models(fed, None)
    now, body = {"t": t}, steps.weights_template(fed, cfg.personal_head)
    answer: Template = {**body, "gradient": body["weights"]}
    steps_of = {"ask": "request", "answer": "test", "take": "judge"}
    links = tested(fed, peers, cfg, t)
    fed.exchange(links, **steps_of, shared=now, question=body, expect=answer, at_once=AT_ONCE)
    links = fed.choose_peers(peers, "choose", now)
    fed.exchange(links, answer="give", take="pull", shared=now, expect=body, at_once=AT_ONCE)
    fed.call(peers, "update", shared=now)
    yield "round"


METHODS = (
    Method(
        name="cobo",
        title="Peers are pulled towards those whose gradients agree with theirs",
        paper="D. Hashemi et al.: CoBo: Collaborative Learning via Bilevel Optimization, NeurIPS "
        "2024",
        family="peer",
        config=CoboConfig,
        round=round,
        client=CoboPeer,
        presets={"cosine": {"similarity": "cosine", "gamma": 0.5, "pairs": "all"}},
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
    ),
)
