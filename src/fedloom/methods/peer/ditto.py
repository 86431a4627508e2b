"""Ditto among peers: a shared model that neighbours average, and a personal one that is held near it.

Paper: T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021, Algorithm 1. Here as a host of AFIND+ (its Figure 5): `friends` says who is asked.

Each peer i holds a shared model w_i and a personal one v_i. A round:

    v_i <- SGD on F_i(v) + λ/2 |v - w_i|², from v_i, for `personal_epochs`
    w_i <- local training from w_i
    w_i <- mean of the neighbours' w_j and its own: equal weights, or those of AFIND+

v_i is what is evaluated; it never leaves the peer, and nothing of it flows into w_i.

Reading: Algorithm 1 pulls v towards the model that the server handed out, not towards the one trained from it. So
w_i above is the shared model at the round's start: the mean that ended the last round.

Differs:
    The server's mean over sampled clients is replaced by each peer's mean over its neighbours. With all neighbours on
        a complete graph all w_i are one model: Ditto with full participation and equal weights.
    With a personal head w_i has a head of its own, and the pull covers it like the rest.
    The proximal term is in the loss, so that momentum sees it. All weights of v move together, and v has its own
        BatchNorm statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.federation import Federation
from fedloom.core.message import Template, Tree, floats
from fedloom.core.method import Method
from fedloom.methods.learner import TUNED, weights_like
from fedloom.methods.peer.afind import Chooser, Host, found

PERSONAL = 2**31
"""In place of a pass's number, counted up: the shuffles of personal training are those of no other pass."""


class Config(Host):
    """The local training is `LearnerConfig`'s, the choice of neighbours AFIND+'s."""

    lam: float = Field(1.0, ge=0)
    """λ: how strongly the personal model is pulled towards the shared one."""
    personal_epochs: int = Field(1, ge=1)
    """Passes over the own rows in a round that train the personal model."""


class Peer(Chooser[Config]):
    """A peer with two models; its network is the shared one, `personal` the other's parameters and buffers."""

    STATE: ClassVar[tuple[str, ...]] = (*Chooser.STATE, "personal")
    CALLS = (*Chooser.CALLS, "update", "mix")
    TO_PEERS: ClassVar[tuple[str, ...]] = (*Chooser.TO_PEERS, "give")

    def setup(self) -> None:
        """Both models begin as the common one."""
        self.start()
        self.befriend()
        self.personal: dict[str, dict[str, Tensor]] = self.snapshot()

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the network's parameters and buffers."""
        parts = {"params": self.params, "buffers": self.buffers}
        return {part: {k: v.detach().clone() for k, v in values.items()} for part, values in parts.items()}

    def update(self, *, t: int) -> None:
        """Train the personal model against the shared one as it came, then the shared one."""
        self.personalise(t)
        self.local_update(t)

    def personalise(self, t: int) -> None:
        """`personal_epochs` passes on F_i(v) + λ/2 |v - w_i|²; the network stays what it is."""
        passes, shared = self.cfg.personal_epochs, self.snapshot()["params"]
        with self.scratch():
            self.wear()
            self.rest()
            for n in range(PERSONAL + t * passes, PERSONAL + (t + 1) * passes):
                batches = self.epochs(n, size=self.cfg.batch_size)
                self.train(lambda x, y: self.loss(x, y) + self.pull(shared), batches)
            self.personal = self.snapshot()
        apart = [(v - shared[k]).norm() for k, v in self.personal["params"].items()]
        self.note("distance of the personal model", torch.stack(apart).norm())

    def pull(self, shared: Mapping[str, Tensor]) -> Tensor:
        """λ/2 |v - w|² () of the network's weights v."""
        return self.cfg.lam / 2 * torch.stack([(v - shared[k]).square().sum() for k, v in self.live.items()]).sum()

    def wear(self) -> None:
        """Put the personal model into the network."""
        self.params, self.buffers = self.personal["params"], self.personal["buffers"]

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights, to whoever asks; where AFIND+ weighs, with their loss."""
        loss = {"loss": self.own_loss(t)} if self.cfg.friends == "afind" else {}
        return {"weights": self.shared(), **loss}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own shared weights and those of the neighbours that answered."""
        models = self.models(inbox)
        afind = self.cfg.friends == "afind"
        self.average(models, self.shares(t, inbox) if afind else dict.fromkeys(models, 1.0))
        self.heard = {"t": -1}

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """The personal model is what is evaluated."""
        self.wear()
        if way == TUNED:
            self.fine_tune()


def round(fed: Federation, server: None, peers: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    links = found(fed, peers, cfg, t)
    fed.call(peers, "update", shared=now)
    answer: Template = {"weights": weights_like(fed, cfg), **({"loss": floats()} if cfg.friends == "afind" else {})}
    fed.exchange(links, answer="give", take="mix", shared=now, expect=answer)
    yield "round"


DITTO = Method(
    name="ditto",
    title="A personal model near a shared one, which random neighbours average",
    paper="T. Li et al.: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
    family="peer",
    config=Config,
    round=round,
    client=Peer,
    needs=("one network",),
)

METHODS = (
    DITTO,
    replace(
        DITTO,
        name="ditto-afind",
        title="Ditto whose neighbours AFIND+ chooses and weighs",
        fixed={"friends": "afind"},
    ),
)
