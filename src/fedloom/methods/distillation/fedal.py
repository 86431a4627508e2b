"""FedAL: black-box federated knowledge distillation enabled by adversarial learning.

Paper: P. Han, X. Shi and J. Huang, "FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial
Learning". Equation and line numbers below are the paper's; lines are those of Algorithm 1.

Each client n keeps its network f_n, its labelled rows D_n and its architecture to itself. All hold the same
unlabelled public rows P. The server sees nothing but logits on P: it averages them, and trains a discriminator h
to tell whose they are. A client learns from its own labels, then towards the others' mean and away from what
gives it away:

    V_loc = CE(y, f_n) + KL(p_n before this stage || p_n)                                            (17)
    V_glo = KL(mean of the others || p_n) + log h(p_n)[n] + KL(p_n before this stage || p_n)         (18)

Local, FedMD, FedMD-LF and FedAL without less-forgetting (LF) are points of the same page: a weight at 0 removes
its term, and with it what crosses for its sake.

Differs:
    Lines 15-16: the server sends the mean of all; each client takes itself out of it, which is what (5) asks for.
        With a `coding` other than float32 it takes out its logits as the server has them.
    Line 13: the mean over clients as well as rows, which is (8); with Adam, since at the printed rate plain SGD
        leaves the discriminator where it began (preset `paper` has SGD).
    Line 18: a client follows no row of the server's gradient further than `gradient_cap`, because a server that
        may send any gradient steers any client anywhere (preset `paper` has no cap).
    The LF term of a stage's first step has gradient zero, as the model still is its own reference: it is not
        computed, so that with tau = 1 LF changes no bit.
    References are evaluation-mode outputs on the stage's batches, made once at its start: no frozen copy of the
        model is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.losses import cap_rows, kl, kl_gradient, reverse_kl_gradient
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.core.optim import SGD, Adam
from fedloom.core.party import Party
from fedloom.methods.boxed import Boxed
from fedloom.methods.distiller import CodedConfig, Distiller, without
from fedloom.methods.variance import variance


class Config(CodedConfig):
    """Defaults are those of section VI-A; where the paper is silent, the recommended reading."""

    tau: int = Field(5, ge=1)
    """Steps of each stage (τ). The paper's FedMD has 1."""
    adam: Literal["kept", "stage"] = "kept"
    """Whether one Adam serves both stages for good, or its memory is zero at the start of each."""
    kd: float = Field(1.0, ge=0)
    """Weight of the distillation term."""
    adv: float = Field(1.0, ge=0)
    """Weight of the adversarial term."""
    lf_local: float = Field(1.0, ge=0)
    """Weight of less-forgetting in the local stage, (13)."""
    lf_global: float = Field(1.0, ge=0)
    """Weight of less-forgetting in the transfer stage, (14)."""
    kd_temperature: float = Field(1.0, gt=0)
    """E in every KL."""
    disc_temperature: float = Field(2.0, gt=0)
    """E of the discriminator's input."""
    disc_hidden: tuple[int, ...] = (32, 256)
    """Widths of the discriminator's hidden layers. The paper prints 32 and "265"."""
    disc_lr: float = Field(1e-4, gt=0)
    """The discriminator's rate (η_d)."""
    disc_optimizer: Literal["adam", "sgd"] = "adam"
    """The paper states none; Algorithm 1 writes a plain gradient step."""
    include_self: bool = False
    """Whether a client's target is the mean of all instead of the mean of the others, (5)."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """KL(target || p), or KL(p || target)."""
    average: Literal["logits", "probabilities"] = "logits"
    """What the server averages: logits, as (5) has it, or probabilities."""
    gradient_cap: float | None = Field(1.0, gt=0)
    """Largest L2 norm of a row of the server's gradient that a client follows; None for any."""
    variances: bool = False
    """Whether parties note how much each term's gradient varies from batch to batch, (46)-(51)."""

    @property
    def exchanges(self) -> bool:
        """Whether anything is learnt from others at all."""
        return self.kd > 0 or self.adv > 0


class Client(Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt", "reference")
    CALLS: ClassVar[tuple[str, ...]] = ("local_train", "predict", "distil")

    def setup(self) -> None:
        """Line 1. `reference` is (14)'s: round t, and its frozen model's logits (τ, B, K) on P's batches."""
        self.start(self.site.build())
        self.reference: dict[str, Any] = {"t": -1, "logits": torch.empty(0)}

    def local_train(self, *, t: int) -> None:
        """Lines 3-7: τ steps on own rows."""
        cfg, batches = self.cfg, self.own_batches(t)  # line 5
        if cfg.adam == "stage":
            self.rest()
        before = self.outputs_of(batches.x) if cfg.lf_local and cfg.tau > 1 else None
        for i, (x, y) in enumerate(batches):  # line 4
            anchor = before[i] if before is not None and i else None
            if cfg.variances and i == cfg.tau - 1:
                self.vary("label", self.local_loss, x, y)
                if anchor is not None:
                    own = F.softmax(anchor / cfg.kd_temperature, -1)
                    term = cfg.lf_local * kl_gradient(own, self.infer(x), cfg.kd_temperature)
                    self.vary("lf local", self.along, x, term)
            self.minimise(self.anchored_loss, x, y, anchor)  # line 6
        if cfg.adam == "stage":
            self.rest()  # for the transfer stage, whichever of its exchanges comes first

    def vary(self, name: str, loss: Callable[..., Tensor], *batch: Tensor) -> None:
        """Note the variance of a term's gradient in the weights."""
        self.note(f"gradient variance {name}", variance(self, loss, *batch))

    def along(self, x: Tensor, term: Tensor) -> Tensor:
        """A scalar with the gradient of the mean of a `term`, given by each row's gradient (B, K) in the logits."""
        return (self.model(x) * term).sum() / len(x)

    def anchored_loss(self, x: Tensor, y: Tensor, before: Tensor | None) -> Tensor:
        """V_loc of (17) on x (B, ...), y (B,); `before` (B, K) are the logits of the stage's start."""
        cfg, f = self.cfg, self.model(x)
        loss = F.cross_entropy(f, y)
        if before is None:
            return loss
        target = F.softmax(before / cfg.kd_temperature, -1)
        return loss + cfg.lf_local * kl(target, f, cfg.kd_temperature)

    def predict(self, *, t: int, i: int) -> Tree:
        """Lines 9-11: logits (B, K) on the public batch."""
        cfg, batches = self.cfg, self.public_batches(t)
        if cfg.lf_global and cfg.tau > 1 and self.reference["t"] != t:  # line 7: the transfer stage begins
            self.reference = {"t": t, "logits": self.outputs_of(torch.stack(batches))}
        sent: Tree = cfg.encoded(self.forward(batches[i]))
        return sent

    def distil(self, *, t: int, i: int, n: int, mean: Tree, gradient: Tree = None) -> None:
        """Lines 17-18: one step on V_glo of (18).

        Args:
            t, i: which public batch.
            n: how many clients the mean is over.
            mean: (B, K) their mean answer, encoded for the way down.
            gradient: (B, K) the server's ∂U_n/∂f_n per row, of (21), encoded for the way down.
        """
        cfg = self.cfg
        x = self.public_batches(t)[i]
        f = self.forward(x)
        terms = {}
        if cfg.kd:
            seen = cfg.decoded(cfg.encoded(f), self.site.classes)  # what the mean holds of this client
            target = target_of(seen, cfg.decoded_whole(mean, self.site.classes), n, cfg)
            terms["kd"] = cfg.kd * kd_gradient(target, f, cfg)
        if gradient is not None:
            g = cfg.decoded_whole(gradient, self.site.classes)
            terms["adv"] = cfg.adv * (cap_rows(g, cfg.gradient_cap) if cfg.gradient_cap else g)
        if cfg.lf_global and i:
            own = F.softmax(self.reference["logits"][i] / cfg.kd_temperature, -1)
            terms["lf"] = cfg.lf_global * kl_gradient(own, f, cfg.kd_temperature)
        if cfg.variances and i == cfg.tau - 1:
            for name, term in terms.items():
                self.vary(name, self.along, x, term)
        self.descend(x, torch.stack(tuple(terms.values())).sum(0) / len(x))
        if i == cfg.tau - 1:
            for name, term in terms.items():
                self.note(f"gradient norm {name}", term.norm(dim=-1).mean())


class BlackBox(Boxed[Config]):
    """A client without a network. What V_glo of (18) asks of its answers, it gets as soft labels of the next fit."""

    CALLS = Client.CALLS

    def predict(self, *, t: int, i: int) -> Tree:
        """Lines 9-11: log-probabilities (B, K) on the public batch."""
        sent: Tree = self.cfg.encoded(self.outputs(t, i))
        return sent

    def distil(self, *, t: int, i: int, n: int, mean: Tree, gradient: Tree = None) -> None:
        """Lines 17-18, arguments as a client's. The rows should have softmax(f*), f* = T_n - G_n adv / kd: the others'
        answer T_n, and from there a step against what gives this client away. There is no less-forgetting."""
        cfg = self.cfg
        f = self.outputs(t, i)
        if cfg.kd:
            seen = cfg.decoded(cfg.encoded(f), self.site.classes)  # what the mean holds of this client
            target = target_of(seen, cfg.decoded_whole(mean, self.site.classes), n, cfg)
            f = cfg.kd_temperature * target.clamp_min(self.box.floor).log()
        if gradient is not None:
            g = cfg.decoded_whole(gradient, self.site.classes)
            f = f - cfg.adv / (cfg.kd or 1.0) * (cap_rows(g, cfg.gradient_cap) if cfg.gradient_cap else g)
        self.learn(F.softmax(f, -1), t, i)


class Server(Party[Config]):
    """The server: the mean of the answers, and a discriminator h: R^K -> R^N of their authors."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "opt")

    def setup(self) -> None:
        """Line 1: h is an MLP K -> hidden -> N."""
        cfg = self.cfg
        optimiser = {"adam": Adam, "sgd": SGD}[cfg.disc_optimizer](cfg.disc_lr)
        with self.seeded("discriminator"):
            self.network(mlp(self.site.classes, *cfg.disc_hidden, self.site.parties), optimiser)

    def judge(self, logits: Mapping[int, Tree]) -> tuple[Tree, dict[int, dict[str, Tree]]]:
        """Lines 12-16.

        Args:
            logits: each client's (B, K), encoded, by its number.

        Returns:
            The mean answer (B, K), and for each client its `gradient` (B, K), all encoded for the way down; no
            gradients at adv = 0.
        """
        cfg = self.cfg
        f = torch.stack([cfg.decoded(z, self.site.classes) for z in logits.values()])  # (n, B, K)
        mean = cfg.encoded_whole((f if cfg.average == "logits" else F.softmax(f / cfg.kd_temperature, -1)).mean(0))
        if not cfg.adv:
            return mean, {n: {} for n in logits}
        author = torch.tensor(list(logits), device=f.device).repeat_interleave(f.shape[1])
        if cfg.variances:  # (51) is about each client's rows
            each = zip(f, author.view(len(f), -1), strict=True)
            found = torch.stack([variance(self, self.author_loss, *own) for own in each])
            self.note("gradient variance discriminator", found.mean())
        self.minimise(self.author_loss, f.flatten(0, 1), author)  # line 13: ascent on U is descent on -U
        f.requires_grad_()
        u = -self.author_loss(f.flatten(0, 1), author, reduction="sum")  # line 16: U with the new weights
        (gradients,) = torch.autograd.grad(u, f)  # (n, B, K): each row's own, not averaged
        return mean, {n: {"gradient": cfg.encoded_whole(g)} for n, g in zip(logits, gradients, strict=True)}

    def author_loss(self, f: Tensor, author: Tensor, reduction: str = "mean") -> Tensor:
        """-U of (7), (8): cross-entropy of h(softmax(f / E)) (m, N) against the authors (m,)."""
        guess = self.model(F.softmax(f / self.cfg.disc_temperature, -1))
        loss = F.cross_entropy(guess, author, reduction=reduction)
        if reduction == "mean":
            self.note("discriminator loss", loss.detach())
            self.note("discriminator accuracy", (guess.argmax(-1) == author).float().mean())
        return loss


def target_of(f: Tensor, mean: Tensor, n: int, cfg: Config) -> Tensor:
    """The others' answer p̄_{-n} (B, K) of (6), from the mean of all n and the own logits f as the server has them."""
    temperature = cfg.kd_temperature
    if cfg.average == "logits":
        return F.softmax((mean if cfg.include_self else without(f, mean, n)) / temperature, -1)
    return mean if cfg.include_self else without(F.softmax(f / temperature, -1), mean, n)


def kd_gradient(target: Tensor, f: Tensor, cfg: Config) -> Tensor:
    """Gradient (B, K) per row of the distillation term of (18)."""
    gradient = kl_gradient if cfg.kl_direction == "forward" else reverse_kl_gradient
    return gradient(target, f, cfg.kd_temperature)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Algorithm 1, lines 2-21, for one t."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})  # lines 3-7
    yield "local"
    if not cfg.exchanges:
        return
    for i in range(cfg.tau):  # line 8
        batch = {"t": t, "i": i}
        answer = cfg.encoded_like(server.site.classes)
        logits = fed.call(chosen, "predict", shared=batch, expect=answer, need=2)  # lines 9-11
        if not logits:
            continue  # nobody to learn from
        mean, gradients = server.judge(logits)  # lines 12-16
        shared = {**batch, "n": len(logits), "mean": mean}
        fed.call(logits, "distil", shared=shared, each=gradients)  # lines 17-18
    yield "transfer"


FEDAL = Method(
    name="fedal",
    title="Distillation with an adversarial server and less-forgetting",
    paper="P. Han, X. Shi, J. Huang: FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial Learning",
    family="distillation",
    config=Config,
    round=round,
    client=Client,
    server=Server,
    black_box=BlackBox,
    presets={"paper": {"disc_optimizer": "sgd", "gradient_cap": None}},
    needs=("public rows",),
    min_clients=2,
)

METHODS = (
    FEDAL,
    replace(
        FEDAL,
        name="fedmd-lf",
        title="FedMD with less-forgetting: FedAL without its adversary",
        fixed={"adv": 0.0},
    ),
    replace(
        FEDAL,
        name="fedmd",
        title="Distillation towards the mean answer of the others (Li and Wang, 2019)",
        fixed={"adv": 0.0, "lf_local": 0.0, "lf_global": 0.0, "tau": 1},
    ),
    replace(
        FEDAL,
        name="local",
        title="Every client alone: the lower bound",
        fixed={"kd": 0.0, "adv": 0.0, "lf_local": 0.0, "lf_global": 0.0},
        needs=(),
        min_clients=1,
    ),
)
