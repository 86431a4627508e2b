"""FedAL: black-box federated knowledge distillation enabled by adversarial learning.

Paper: P. Han, X. Shi and J. Huang, "FedAL: Black-Box Federated Knowledge Distillation Enabled by
Adversarial Learning". Equation and line numbers below are the paper's; lines are those of Algorithm
1.

Each client n keeps its network f_n, its labeled rows D_n and its architecture to itself. All hold
the same unlabeled public rows P. The server sees only logits on P: it averages them, and trains a
discriminator h to tell which client they are from. A client learns from its own labels, then
towards the others' mean and away from the features that identify it:

    V_loc = CE(y, f_n) + KL(p_n before this stage || p_n)                                            (17)
    V_glo = KL(mean of the others || p_n) + log h(p_n)[n] + KL(p_n before this stage || p_n)         (18)

Local, FedMD, FedMD-LF and FedAL without less-forgetting (LF) are configurations of this page: a
weight of 0 removes its term and the messages that only this term needs. FedDF-AL (`feddf_al`) calls
the functions of this page.

Differs:
    Lines 15-16: the server sends the mean of all clients, and each client removes its own logits
        from it, as (5) requires. With a `coding` other than float32 it removes its logits as the
        server decoded them.
    Line 13: the mean is over clients as well as rows, which is (8). The optimizer is Adam, because
        at the printed rate plain SGD leaves the discriminator where it began (preset `paper` has
        SGD).
    Line 18: a client caps each row of the server's gradient at the norm `gradient_cap`, because a
        server that may send any gradient could steer a client anywhere (preset `paper` has no cap).
    The LF term of a stage's first step is not computed, as its gradient is zero: with tau = 1 LF
    changes no bit. References are evaluation-mode outputs on the stage's batches, made once at its
    start.
"""  # noqa: E501

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.aggregate import Aggregator, Combined
from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    SGD,
    Adam,
    Federation,
    Method,
    Party,
    Tree,
    cap_rows,
)
from fedloom.methods.distillation import steps, trust
from fedloom.methods.features import gradient_variance
from fedloom.methods.steps import label_loss, reset_optimizer


class FedALConfig(trust.TrustSettings, steps.LogitsConfig):
    """Defaults are those of section VI-A; where the paper is silent, the recommended reading."""

    tau: int = Field(5, ge=1)
    """Steps of each stage (τ). The paper's FedMD has 1."""
    adam: Literal["kept", "stage"] = "kept"
    """Whether one Adam is kept for both stages and all rounds, or reset at the start of each stage.
    """
    kd: float = Field(1.0, ge=0)
    """Weight of the distillation term."""
    adv: float = Field(1.0, ge=0)
    """Weight of the adversarial term."""
    lf_local: float = Field(1.0, ge=0)
    """Weight of less-forgetting in the local stage, (13)."""
    lf_global: float = Field(1.0, ge=0)
    """Weight of less-forgetting in the transfer stage, (14)."""
    kd_temperature: float = Field(1.0, gt=0)
    """Temperature E in every KL."""
    disc_temperature: float = Field(2.0, gt=0)
    """Temperature E of the discriminator's input."""
    disc_hidden: tuple[int, ...] = (32, 256)
    """Hidden widths of the discriminator. The paper prints 32 and "265"."""
    disc_lr: float = Field(1e-4, gt=0)
    """Learning rate of the discriminator (η_d)."""
    disc_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the discriminator. The paper names none; Algorithm 1 has a plain gradient step.
    """
    include_self: bool | None = None
    """Whether a client's target is the mean of all clients instead of the mean of the others, (5);
    None for true with trust. With false, a client with trust is sent its own weights.
    """
    kl_direction: Literal["forward", "reverse"] = "forward"
    """KL(target || p), or KL(p || target)."""
    average: Literal["logits", "probabilities"] | None = None
    """Quantity that the server averages: logits, as in (5), or probabilities; None for logits if
    trust is uniform.
    """
    gradient_cap: float | None = Field(1.0, gt=0)
    """Clipping norm of each row of the server's gradient at a client; None for no clipping."""
    variances: bool = False
    """Whether parties note the variance of each term's gradient between batches, (46)-(51)."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: an adversary compares single answers, and a client may remove
        its own.
        """
        if self.adv and aggregator.hidden:
            return "the adversary compares single answers: set params.adv = 0"
        if not self.averages_logits and aggregator.secure:
            return 'clients send logits: set params.average = "logits"'
        whole = self.include_self is not False or not aggregator.even
        return (
            super().refuses(aggregator)
            if whole
            else "no client can remove its own answer: leave include_self out"
        )

    def stages_in_round(self, t: int) -> int:
        """The local stage, and the transfer stage if there is one."""
        return 2 if self.exchanges else 1

    @property
    def includes_self(self) -> bool:
        """`include_self` or its default."""
        return self.trust != "uniform" if self.include_self is None else self.include_self

    @property
    def averages_logits(self) -> bool:
        """Whether the server averages logits."""
        return self.trust == "uniform" if self.average is None else self.average == "logits"

    @property
    def looks_back(self) -> bool:
        """Whether less-forgetting has an effect in the transfer stage."""
        return self.lf_global > 0 and self.tau > 1

    @property
    def exchanges(self) -> bool:
        """Whether there is a transfer stage."""
        return self.kd > 0 or self.adv > 0


# -- a client's stages, lines 3-7 and 9-18 ---------------------------------------------------------


def local_stage(client: Party[FedALConfig], t: int) -> None:
    """Lines 3-7: τ steps on V_loc of (17) on own rows."""
    cfg, task = client.cfg, client.context.task
    batches = client.batches(t, steps=cfg.tau, size=cfg.batch_size)  # line 5
    if cfg.adam == "stage":
        reset_optimizer(client)
    before = steps.stage_logits(client, batches.x) if cfg.lf_local and cfg.tau > 1 else None
    for i, (x, y) in enumerate(batches):  # line 4
        anchor = before[i] if before is not None and i else None
        if cfg.variances and i == cfg.tau - 1:
            note_variance(client, "label", partial(label_loss, client), x, y)
            if anchor is not None:
                own = task.soft(anchor, cfg.kd_temperature)
                term = cfg.lf_local * task.distill_gradient(
                    own, client.infer(x), cfg.kd_temperature
                )
                note_variance(client, "lf local", partial(along, client), x, term)
        client.minimize(partial(local_loss, client), x, y, anchor)  # line 6
    if cfg.adam == "stage":
        reset_optimizer(client)  # for the transfer stage, whichever of its exchanges arrives first


def local_loss(client: Party[FedALConfig], x: Tensor, y: Tensor, before: Tensor | None) -> Tensor:
    """V_loc () of (17) on x (B, ...), y (B,); `before` (B, K) are the logits of the
    stage's start.
    """
    cfg, task, f = client.cfg, client.context.task, client.model(x)
    if before is None:
        return task.loss(f, y)
    target = task.soft(before, cfg.kd_temperature)
    return task.loss(f, y) + cfg.lf_local * task.distill(target, f, cfg.kd_temperature)


def transfer_reference(client: Party[FedALConfig], t: int) -> dict[str, Any]:
    """The frozen model of (14) at the start of round t's transfer stage: its logits (τ, B, K) on
    the public batches.
    """
    x = torch.stack([*client.public(t, steps=client.cfg.tau, size=client.cfg.batch_size)])
    return {"t": t, "logits": steps.stage_logits(client, x)}


def transfer_step(
    client: Party[FedALConfig],
    t: int,
    i: int,
    n: int,
    mean: Tree,
    gradient: Tree,
    share: Tensor | None,
    reference: Any,
) -> None:
    """Lines 17-18: one step on V_glo of (18). For the arguments see `FedALClient.distil`."""
    cfg, task, x = client.cfg, client.context.task, steps.public_batch(client, t, i)
    f, terms = client.forward(x), dict[str, Tensor]()
    if cfg.kd:
        target, reverse = target_of(f, mean, n, share, client), cfg.kl_direction == "reverse"
        terms["kd"] = cfg.kd * task.distill_gradient(target, f, cfg.kd_temperature, reverse=reverse)
    if gradient is not None:
        terms["adv"] = cfg.adv * capped(gradient, client)
    if cfg.lf_global and i:
        own = task.soft(reference["logits"][i], cfg.kd_temperature)
        terms["lf"] = cfg.lf_global * task.distill_gradient(own, f, cfg.kd_temperature)
    if cfg.variances and i == cfg.tau - 1:
        for name, term in terms.items():
            note_variance(client, name, partial(along, client), x, term)
    client.descend(x, torch.stack(tuple(terms.values())).sum(0) / len(x))
    if i == cfg.tau - 1:
        for name, term in terms.items():
            client.note(f"gradient norm {name}", term.norm(dim=-1).mean())


def target_of(
    f: Tensor, mean: Tree, n: int, share: Tensor | None, client: Party[FedALConfig]
) -> Tensor:
    """The others' answer p̄_{-n} (B, K) of (6), from the encoded mean of all n clients, the own
    logits f (B, K), and the own weights in the mean `share` (B,), or None where they are equal. Of
    another mean than (5) it is that itself.
    """
    cfg, classes, soft = client.cfg, client.context.classes, client.context.task.soft
    own = cfg.decode(cfg.encode(f), classes)
    average = cfg.decode_dense(mean, classes)
    temperature = cfg.kd_temperature
    value = own if cfg.averages_logits else soft(own, temperature)
    if share is not None:
        others = trust.without(value, average, share)
    else:
        whole = cfg.includes_self or client.context.aggregator.even
        others = average if whole else steps.mean_of_others(value, average, n)
    return soft(others, temperature) if cfg.averages_logits else others


def capped(gradient: Tree, client: Party[FedALConfig]) -> Tensor:
    """The server's gradient (B, K), decoded, its rows no longer than `gradient_cap`."""
    g = client.cfg.decode_dense(gradient, client.context.classes)
    return cap_rows(g, client.cfg.gradient_cap) if client.cfg.gradient_cap else g


def note_variance(
    party: Party[object], name: str, loss: Callable[..., Tensor], *batch: Tensor
) -> None:
    """Note the variance of a term's gradient with respect to the weights."""
    party.note(f"gradient variance {name}", gradient_variance(party, loss, *batch))


def along(party: Party[object], x: Tensor, term: Tensor) -> Tensor:
    """A scalar with the gradient of the mean of a `term`, given by each row's gradient (B, K) in
    the logits.
    """
    return (party.model(x) * term).sum() / len(x)


def build_discriminator(server: Party[FedALConfig]) -> None:
    """Line 1: h is an MLP K -> hidden -> N."""
    cfg = server.cfg
    optimizer = {"adam": Adam, "sgd": SGD}[cfg.disc_optimizer](cfg.disc_lr)
    with server.seeded("discriminator"):
        server.network(
            mlp(server.context.classes, *cfg.disc_hidden, server.context.parties), optimizer
        )


def averaged(party: Party[FedALConfig], f: Tensor) -> Tensor:
    """What is averaged of logits f (..., K)."""
    return f if party.cfg.averages_logits else party.context.task.soft(f, party.cfg.kd_temperature)


def judge(
    server: trust.TrustingServer[FedALConfig], found: Combined, t: int, i: int
) -> tuple[Tree, dict[int, dict[str, Tree]]]:
    """Lines 12-16, from the mean answer (B, K) and each client's logits (B, K), encoded, on the
    i-th public batch.

    Returns:
        The mean answer (B, K), and for each client its `gradient` (B, K), all encoded, but no
        gradient with adv = 0; with trust its `share` (B,) of the mean, if it is to remove its own
        answer.
    """
    cfg = server.cfg
    average = found.value
    each = dict[int, dict[str, Tree]]((n, {}) for n in found.ids)
    if cfg.trust == "uniform" and not cfg.adv:
        return cfg.encode_dense(average), each  # line 15 alone
    # (n, B, K)
    f = torch.stack([cfg.decode(z, server.context.classes) for z in found.replies.values()])
    if cfg.trust != "uniform":
        numbers = partial(steps.public_numbers, server, t, i)
        average, shares = trust.average(server, found.ids, numbers, averaged(server, f), f)
        if not cfg.includes_self:
            each = {n: {"share": share.float()} for n, share in zip(found.ids, shares, strict=True)}
    if not cfg.adv:
        return cfg.encode_dense(average), each
    author_of = partial(author_loss, server)
    author = torch.tensor(found.ids, device=f.device).repeat_interleave(f.shape[1])
    if cfg.variances:  # (51) is about each client's rows
        pairs = zip(f, author.view(len(f), -1), strict=True)
        variances = torch.stack([gradient_variance(server, author_of, *own) for own in pairs])
        server.note("gradient variance discriminator", variances.mean())
    server.minimize(author_of, f.flatten(0, 1), author)  # line 13: ascent on U is descent on -U
    f.requires_grad_()
    u = -author_of(f.flatten(0, 1), author, reduction="sum")  # line 16: U with the new weights
    (gradients,) = torch.autograd.grad(u, f)  # (n, B, K): each row's own, not averaged
    for n, gradient in zip(found.ids, gradients, strict=True):
        each[n]["gradient"] = cfg.encode_dense(gradient)
    return cfg.encode_dense(average), each


def author_loss(
    server: Party[FedALConfig], f: Tensor, author: Tensor, reduction: str = "mean"
) -> Tensor:
    """-U of (7), (8): cross-entropy of h(softmax(f / E)) (m, N) against the authors (m,)."""
    guess = server.model(server.context.task.soft(f, server.cfg.disc_temperature))
    loss = F.cross_entropy(guess, author, reduction=reduction)
    if reduction == "mean":
        server.note("discriminator loss", loss.detach())
        server.note("discriminator accuracy", (guess.argmax(-1) == author).float().mean())
    return loss


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    return nn.Sequential(
        *[layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())][:-1]
    )


@final
class FedALClient(Party[FedALConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "reference")
    CALLS = ("local_train", "introduce", "predict", "distil")
    MEANS = ("predict",)
    TELLS = (("introduces", ("introduce",)),)
    introduce = trust.introduce

    def setup(self) -> None:
        """Line 1. `reference` is (14)'s frozen model: a round t, and the logits (τ, B, K) on its
        public batches.
        """
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.reference: dict[str, Any] = {"t": -1, "logits": torch.empty(0)}

    def local_train(self, *, t: int) -> None:
        """Lines 3-7: τ steps on own rows."""
        local_stage(self, t)

    def predict(self, *, t: int, i: int) -> Tree:
        """Lines 9-11: logits (B, K) on the public batch."""
        if self.cfg.looks_back and self.reference["t"] != t:  # line 7: the transfer stage begins
            self.reference = transfer_reference(self, t)
        return self.cfg.encode(self.forward(steps.public_batch(self, t, i)))

    def distil(
        self,
        *,
        t: int,
        i: int,
        n: int,
        mean: Tree,
        gradient: Tree = None,
        share: Tensor | None = None,
    ) -> None:
        """Lines 17-18: one step on V_glo of (18).

        Args:
            t, i: which public batch.
            n: the number of clients in the mean.
            mean: (B, K) their mean answer, encoded.
            gradient: (B, K) the server's ∂U_n/∂f_n per row, of (21), encoded.
            share: (B,) the own weights in the mean, if they are to be removed.
        """
        transfer_step(self, t, i, n, mean, gradient, share, self.reference)


@final
class FedALBlackBox(steps.BlackBoxParty[FedALConfig]):
    """A client without a network: the minimizer of V_glo of (18) is the soft label for its next
    fit.
    """

    ROLE = "client"
    STATE = ("targets", "fitted")
    TELLS = (("introduces", ("introduce",)),)
    CALLS, MEANS = FedALClient.CALLS, FedALClient.MEANS
    introduce = trust.introduce

    def predict(self, *, t: int, i: int) -> Tree:
        """Lines 9-11: log-probabilities (B, K) on the public batch."""
        return self.cfg.encode(steps.public_log_probs(self, t, i))

    def distil(
        self,
        *,
        t: int,
        i: int,
        n: int,
        mean: Tree,
        gradient: Tree = None,
        share: Tensor | None = None,
    ) -> None:
        """Lines 17-18, with the arguments of a client. The soft labels are softmax(f*), f* = T_n -
        G_n adv / kd: the others' answer T_n, and from there a step against the discriminator's
            gradient. There is no less-forgetting.
        """
        cfg, f = self.cfg, steps.public_log_probs(self, t, i)
        if cfg.kd:
            f = steps.outputs_of(self, target_of(f, mean, n, share, self), cfg.kd_temperature)
        if gradient is not None:
            f = f - cfg.adv / (cfg.kd or 1.0) * capped(gradient, self)
        steps.set_targets(self, self.context.task.soft(f), t, i)


@final
class FedALServer(trust.TrustingServer[FedALConfig]):
    """The server: the mean of the answers, and a discriminator h: R^K -> R^N of their authors."""

    ROLE = "server"
    STATE = ("params", "opt")

    def setup(self) -> None:
        """Line 1: the discriminator."""
        build_discriminator(self)
        trust.init(self)


def round(
    fed: Federation,
    server: trust.TrustingServer[FedALConfig],
    clients: Sequence[int],
    cfg: FedALConfig,
    t: int,
) -> Iterator[str]:
    """Algorithm 1, lines 2-21, for one t."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})  # lines 3-7
    yield "local"
    if not cfg.exchanges:
        return
    trust.meet(fed, server, chosen)
    how: dict[str, Any] = {"expect": cfg.template(server.context.classes), "min_replies": 2}
    how["read"] = lambda n, sent: averaged(server, cfg.decode(sent, server.context.classes))
    how["kind"] = "logits" if cfg.averages_logits else "probabilities"
    for i in range(cfg.tau):  # line 8
        batch = {"t": t, "i": i}
        found = fed.mean(chosen, "predict", shared=batch, **how)  # lines 9-11, 15
        if found is not None:
            mean, each = judge(server, found, t, i)  # lines 12-16
            # lines 17-18
            fed.call(
                found.ids, "distil", shared={**batch, "n": len(found.ids), "mean": mean}, each=each
            )
    yield "transfer"


FEDAL = Method(
    name="fedal",
    title="Distillation with an adversarial server and less-forgetting",
    paper="P. Han et al.: FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial "
    "Learning, JSAC 2024",
    family="distillation",
    config=FedALConfig,
    round=round,
    client=FedALClient,
    server=FedALServer,
    black_box=FedALBlackBox,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    presets={"paper": {"disc_optimizer": "sgd", "gradient_cap": None}, **trust.PRESETS},
    needs=("public rows",),
    min_clients=2,
)

METHODS = (
    FEDAL,
    replace(
        FEDAL,
        name="fedmd-lf",
        title="FedMD with less-forgetting, FedAL without adversary",
        fixed={"adv": 0.0},
    ),
    replace(
        FEDAL,
        name="fedmd",
        title="Distillation towards the mean answer of the others (Li and Wang, 2019)",
        paper="D. Li, J. Wang: FedMD: Heterogenous Federated Learning via Model Distillation, 2019",
        fixed={"adv": 0.0, "lf_local": 0.0, "lf_global": 0.0, "tau": 1},
    ),
    replace(
        FEDAL,
        name="local",
        title="Every client alone: the lower bound",
        paper="",
        fixed={"kd": 0.0, "adv": 0.0, "lf_local": 0.0, "lf_global": 0.0},
        needs=(),
        min_clients=1,
    ),
)
