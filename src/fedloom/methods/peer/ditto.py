"""Ditto among peers: a shared model that neighbours average, and a personal one that is regularized
towards it.

Paper: T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1. AFIND+ (its Figure 5) can select the neighbours: see
`neighbour_selection`.

Each peer i has a shared model w_i and a personal one v_i. A round:

    v_i <- SGD on F_i(v) + λ/2 |v - w_i|², from v_i, for `personal_epochs`
    w_i <- local training from w_i
    w_i <- mean of the neighbours' w_j and its own: equal weights, or AFIND+'s

v_i is evaluated; it never leaves the peer, and w_i does not depend on it.

Reading: Algorithm 1 pulls v towards the model that the server broadcast, not towards the one
trained from it. So w_i in the first line is the shared model at the start of the round, the mean at
the end of the last one.

Differs:
    Each peer's mean over its neighbours replaces the server's mean over sampled clients. With all
    neighbours on a
        complete graph all w_i are equal: Ditto with full participation and equal weights.
    With a personal head w_i has its own head, which the proximal term covers too.
    The proximal term is part of the loss, so momentum includes it. All weights of v are updated
        together, and v has its own BatchNorm statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Aggregator,
    Federation,
    Method,
    Template,
    Tree,
    floats,
)
from fedloom.methods import steps
from fedloom.methods.peer import mixing, selection

PERSONAL = 2**31
"""First epoch number of personal training, so that it shares no shuffle with other training."""


class DittoConfig(selection.SelectionConfig):
    """Local training and AFIND+'s neighbour selection as in `SelectionConfig`."""

    neighbour_selection: Literal["random", "afind"] = "random"
    """Neighbour selection: `random`, or AFIND+'s coreset."""
    neighbours: int | None = Field(10, ge=0)
    """Number of random neighbours that a peer requests models from in a round; None for all."""
    lam: float = Field(1.0, ge=0)
    """λ: weight of the proximal term between the personal and the shared model."""
    personal_epochs: int = Field(1, ge=1)
    """Epochs of the personal model in a round."""

    @model_validator(mode="after")
    def _possible(self) -> "DittoConfig":
        return selection.refuse_update_noise(self)

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: AFIND+ weighs models."""
        return selection.refuses(self, aggregator) if self.neighbour_selection == "afind" else ""


@final
class DittoPeer(selection.SelectingPeer[DittoConfig]):
    """A peer with two models: its network is the shared one, `personal` the parameters and buffers
    of the other.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "neighbours", "replies", "personal")
    CALLS = ("choose", "candidates", "compare", "estimate", "update", "mix")
    TO_PEERS = ("request", "probe", "anchor", "give")
    MEANS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """Both models start as the initial network."""
        steps.init_network(self)
        selection.init(self)
        self.personal: dict[str, dict[str, Tensor]] = self.snapshot()

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the network's parameters and buffers."""
        parts = {"params": self.params, "buffers": self.buffers}
        return {
            part: {k: v.detach().clone() for k, v in values.items()}
            for part, values in parts.items()
        }

    def update(self, *, t: int) -> None:
        """Train the personal model towards the shared one of the round's start, then train the
        shared one.
        """
        self.personalize(t)
        steps.local_sgd(self, t=t)

    def personalize(self, t: int) -> None:
        """`personal_epochs` epochs on F_i(v) + λ/2 |v - w_i|², on a scratch copy."""
        epochs, shared = self.cfg.personal_epochs, self.snapshot()["params"]
        with self.scratch():
            self.load_personal()
            steps.reset_optimizer(self)
            for n in range(PERSONAL + t * epochs, PERSONAL + (t + 1) * epochs):
                self.train(
                    partial(self.proximal_loss, shared), self.epochs(n, size=self.cfg.batch_size)
                )
            self.personal = self.snapshot()
        distances = [(v - shared[k]).norm() for k, v in self.personal["params"].items()]
        self.note("distance to the shared model", torch.stack(distances).norm())

    def proximal_loss(self, shared: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """F_i(v) + λ/2 |v - w|² () on x (B, ...), y (B,), at the network's weights v."""
        distance = torch.stack([(v - shared[k]).square().sum() for k, v in self.live.items()]).sum()
        return steps.label_loss(self, x, y) + self.cfg.lam / 2 * distance

    def load_personal(self) -> None:
        """Load the personal model into the network."""
        self.params, self.buffers = self.personal["params"], self.personal["buffers"]

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights; with AFIND+ also their loss."""
        loss = (
            {"loss": selection.probe_loss(self, t)}
            if self.cfg.neighbour_selection == "afind"
            else {}
        )
        return {"weights": steps.shared_weights(self), **loss}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own shared weights and the weights of the neighbours that replied."""
        models = mixing.models_of(self, inbox)
        afind = self.cfg.neighbour_selection == "afind"
        shares = selection.mixing_shares(self, t, inbox) if afind else dict.fromkeys(models, 1.0)
        mixing.average(self, models, shares)
        self.replies = {"t": -1}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the personal model, and fine-tune it in the mode "tuned"."""
        self.load_personal()
        if eval_mode == steps.TUNED:
            steps.fine_tune(self)


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: DittoConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    random = cfg.neighbour_selection == "random"
    mixing.check_models(fed, cfg.neighbours if random else None)
    links = (
        fed.sample_peers(peers, cfg.neighbours, t)
        if random
        else selection.links(fed, peers, cfg, t)
    )
    fed.call(peers, "update", shared=now)
    loss = {"loss": floats()} if cfg.neighbour_selection == "afind" else {}
    answer: Template = {**steps.weights_template(fed, cfg.personal_head), **loss}
    fed.exchange(links, answer="give", take="mix", shared=now, expect=answer)
    yield "round"


DITTO = Method(
    name="ditto",
    title="A personal model near a shared one that random neighbours average",
    paper="T. Li et al.: Ditto: Fair and Robust Federated Learning Through Personalization, ICML "
    "2021",
    family="peer",
    config=DittoConfig,
    round=round,
    client=DittoPeer,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
)

METHODS = (
    replace(DITTO, trial_rank=3),
    replace(
        DITTO,
        name="ditto-afind",
        title="Ditto with AFIND+ selecting and weighting neighbours",
        fixed={"neighbour_selection": "afind"},
    ),
)
