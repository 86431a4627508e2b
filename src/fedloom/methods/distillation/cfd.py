"""CFD: distillation through a model at the server, with soft labels in few bits.

Paper: F. Sattler, A. Marban, R. Rischke and W. Samek, "CFD: Communication-Efficient Federated
Distillation via Soft-Label Quantization and Delta Coding", IEEE Transactions on Network Science and
Engineering 9(4), 2022. Without quantization it is MHAT (L. Hu et al., "MHAT: An efficient
model-heterogenous aggregation training scheme for federated learning", Information Sciences 560,
2021), as FedAL has both.

Each client n keeps its network, its rows and its architecture. All parties, the server too, hold
the same unlabeled public rows. Clients send their answers p_n on these; the server's own model g
learns from the mean of the answers, and clients learn from the answers of g:

    client  CE(y, p_n)              on own rows
    server  KL(mean of p_n || g)    on a public batch
    client  KL(g || p_n)            on the same batch

Answers are sent as logits. With `bits` b they are sent as quantized probabilities: multiples of
1/(2^b - 1) that sum to 1, in ceil(B K b / 8) bytes, for b = 1 the predicted class as a one-hot row.
With `delta_coding` a row is sent only if it changed since it was last sent, and one bit for each
row says whether it is sent.

Differs:
    The paper exchanges the labels of all public rows once in a round, clients begin the next round
        with passes over these, and the server's model makes passes over them too. Here a round is τ
        local steps and τ exchanges of one public batch each, and the server makes `server_steps` on
        a batch, as in FedAL's comparison.
    The paper adds entropy coding. Here the bytes are those of the packed bits, and a changed row is
        sent in full, not as a difference.
    The preset `paper` has one bit upstream and delta coding; the server's labels are sent as
    logits. FedAL's paper gives neither τ for CFD nor the server's steps and rate: one step of each,
    and 1e-3, are ours.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    Adam,
    Aggregator,
    Combined,
    ConfigError,
    Federation,
    Method,
    Party,
    Shape,
    Template,
    Tree,
    kl_gradient,
)
from fedloom.methods.distillation import steps, trust
from fedloom.methods.distillation.steps import LogitsConfig, public_batch, public_numbers
from fedloom.methods.steps import label_loss
from fedloom.protect.labels import (
    changes,
    checked,
    merged,
    pack,
    probabilities,
    quantized,
    size_of,
    unpack,
)


class CFDConfig(trust.TrustSettings, LogitsConfig):
    """Defaults are those of FedAL's comparison, where labels are not quantized."""

    server_steps: int = Field(1, ge=1)
    """Steps of the server's model on each public batch."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server's Adam."""
    bits: int | None = Field(None, ge=1, le=8)
    """Bits per probability in clients' labels; None for logits in the `coding`."""
    bits_down: int | None = Field(None, ge=1, le=8)
    """Bits per probability in the server's labels; None for logits."""
    delta_coding: bool = False
    """Delta coding: whether only rows that changed since they were last sent are sent."""

    @model_validator(mode="after")
    def _check_bits(self) -> "CFDConfig":
        if self.bits is not None and self.coding != "float32":
            raise ValueError(
                f'params.bits does not combine with params.coding = "{self.coding}": set coding '
                '= "float32"'
            )
        if self.delta_coding and self.bits is None and self.bits_down is None:
            raise ValueError(
                "params.delta_coding = true needs quantized labels: set params.bits or "
                "params.bits_down"
            )
        return self

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: quantized labels cannot be added."""
        if self.bits is not None and aggregator.secure:
            return "no single label is there to be decoded: leave params.bits out"
        return super().refuses(aggregator)

    def stages_in_round(self, t: int) -> int:
        """The local stage and the transfer stage."""
        return 2

    def answer_template(self, classes: int) -> Template:
        """Template of a client's answer on a batch; with secure sums probabilities."""
        if self.bits is None:
            return self.template(classes)
        if self.delta_coding:
            return {
                "changed": Shape("uint8", size_of(self.batch_size, 1)),
                "rows": Shape("uint8", None),
            }
        return Shape("uint8", size_of(self.batch_size * classes, self.bits))


# -- labels in few bits ----------------------------------------------------------------------------


def label_memory(party: Party[CFDConfig], bits: int | None) -> Tensor:
    """With `delta_coding` the last labels (|P|, K) of one client in one direction, zeros at first;
    without it (0, K).

    Raises:
        ConfigError: a batch could hold one row twice.
    """
    size = party.cfg.batch_size
    rows = len(party.public_set.rows) if party.cfg.delta_coding and bits is not None else 0
    if 0 < rows < size:
        raise ConfigError(
            f"params.delta_coding needs at least params.batch_size = {size} public rows, not "
            f"{rows}: raise data.public_rows or lower params.batch_size"
        )
    return torch.zeros(rows, party.context.classes, dtype=torch.uint8, device=party.context.device)


def encode_answer(
    client: Party[CFDConfig], logits: Tensor, sent: Tensor, t: int, i: int, restart: bool
) -> tuple[Tree, Tensor]:
    """The message for a client's answers (B, K) on the i-th public batch, and the labels `sent`
    after it.

    If `restart`, the server holds none of this client's labels.
    """
    cfg = client.cfg
    if cfg.bits is None:
        return F.softmax(logits, -1) if client.context.aggregator.secure else cfg.encode(
            logits
        ), sent
    labels = quantized(F.softmax(logits, -1), cfg.bits)
    if not cfg.delta_coding:
        return pack(labels, cfg.bits), sent
    rows, before = public_numbers(client, t, i), torch.zeros_like(sent) if restart else sent
    return changes(labels, before[rows], cfg.bits), before.index_copy(0, rows, labels)


def decode_labels(
    client: Party[CFDConfig], message: Any, received: Tensor, t: int, i: int
) -> tuple[Tensor, Tensor]:
    """The server's probabilities (B, K) on the i-th public batch, and the labels `received` after
    them.
    """
    cfg, classes = client.cfg, client.context.classes
    if cfg.bits_down is None:
        return F.softmax(cfg.decode_dense(message, classes), -1), received
    if not cfg.delta_coding:
        labels = checked(unpack(message, cfg.bits_down, cfg.batch_size, classes), cfg.bits_down)
        return probabilities(labels), received
    rows = public_numbers(client, t, i)
    labels = merged(message, received[rows], cfg.bits_down)
    return probabilities(labels), received.index_copy(0, rows, labels)


# -- the parties -----------------------------------------------------------------------------------


@final
class CFDClient(Party[CFDConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "sent", "received")
    CALLS = ("local_train", "introduce", "predict", "distil")
    MEANS = ("predict",)
    TELLS = (("introduces", ("introduce",)),)
    introduce = trust.introduce

    def setup(self) -> None:
        """The network; `sent` and `received`: the label memories of both directions."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.sent, self.received = (
            label_memory(self, bits) for bits in (self.cfg.bits, self.cfg.bits_down)
        )

    def local_train(self, *, t: int) -> None:
        """Round t's τ steps on CE(y, p_n)."""
        batches = self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)
        self.train(partial(label_loss, self), batches)

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        """The answer to the public batch; see `encode_answer`."""
        logits = self.forward(public_batch(self, t, i))
        answer, self.sent = encode_answer(self, logits, self.sent, t, i, anew)
        return answer

    def distil(self, *, t: int, i: int, labels: Tree) -> None:
        """One step on KL(g || p_n); `labels` (B, K) are the server's, encoded."""
        target, self.received = decode_labels(self, labels, self.received, t, i)
        x = public_batch(self, t, i)
        self.descend(x, kl_gradient(target, self.forward(x)) / len(x))


@final
class CFDBlackBox(steps.BlackBoxParty[CFDConfig]):
    """A client without a network: its next fit has the server's labels."""

    ROLE = "client"
    STATE = ("targets", "fitted", "sent", "received")
    TELLS = (("introduces", ("introduce",)),)
    CALLS, MEANS = CFDClient.CALLS, CFDClient.MEANS
    introduce = trust.introduce

    def setup(self) -> None:
        """`targets` and `fitted`: see `steps.BlackBoxParty`; `sent` and `received`: the label
        memories.
        """
        super().setup()
        self.sent, self.received = (
            label_memory(self, bits) for bits in (self.cfg.bits, self.cfg.bits_down)
        )

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        """The answer to the public batch; see `encode_answer`."""
        logits = steps.public_log_probs(self, t, i)
        answer, self.sent = encode_answer(self, logits, self.sent, t, i, anew)
        return answer

    def distil(self, *, t: int, i: int, labels: Tree) -> None:
        """Keep the server's `labels` (B, K), encoded, for the next fit."""
        target, self.received = decode_labels(self, labels, self.received, t, i)
        steps.set_targets(self, target, t, i)


@final
class CFDServer(trust.TrustingServer[CFDConfig]):
    """The server: a model of its own, which learns from the clients' mean answer."""

    ROLE = "server"
    STATE = ("params", "buffers", "opt", "held", "told")

    def setup(self) -> None:
        """`held` and `told` (N, |P|, K): the label memories of all clients, from and to them."""
        self.network(self.context.build(), Adam(self.cfg.server_lr))
        trust.init(self)
        self.held, self.told = (
            label_memory(self, bits).repeat(self.context.parties, 1, 1)
            for bits in (self.cfg.bits, self.cfg.bits_down)
        )

    def restarts(self, clients: Sequence[int]) -> dict[int, dict[str, bool]]:
        """With `delta_coding`: whether each client restarts without memory, that is with zeros,
        which no label has.
        """
        if not len(self.held[0]):
            return {}
        return {n: {"anew": not self.held[n].any()} for n in clients}

    def check(self, n: int, sent: Any, *, t: int, i: int) -> None:
        """Check that a reply of client n holds labels.

        Raises:
            MessageError: it does not.
        """
        if self.cfg.bits is not None:
            self._labels(n, sent, t, i)

    def read(self, n: int, sent: Any, *, t: int, i: int) -> Tensor:
        """Client n's probabilities (B, K), from a checked reply."""
        if self.cfg.bits is None:
            return F.softmax(self.cfg.decode(sent, self.context.classes), -1)
        labels = self._labels(n, sent, t, i)
        if self.cfg.delta_coding:
            self.held[n, public_numbers(self, t, i)] = labels
        return probabilities(labels)

    def restart(self, clients: Iterable[int]) -> None:
        """Ask these clients for all labels again, as their last ones may be lost."""
        if len(self.held[0]):
            self.held[list(clients)] = 0

    def _labels(self, n: int, sent: Any, t: int, i: int) -> Tensor:
        """Client n's quantized labels (B, K)."""
        cfg = self.cfg
        assert cfg.bits is not None
        if cfg.delta_coding:
            return merged(sent, self.held[n, public_numbers(self, t, i)], cfg.bits)
        return checked(unpack(sent, cfg.bits, cfg.batch_size, self.context.classes), cfg.bits)

    def learn(self, found: Combined, *, t: int, i: int) -> None:
        """Steps on KL(mean || g) from the clients' mean probabilities (B, K), by trust if it is not
        uniform.
        """
        x, mean = public_batch(self, t, i), found.value
        if self.cfg.trust != "uniform":
            p = torch.stack([self.read(n, sent, t=t, i=i) for n, sent in found.replies.items()])
            numbers, logits = partial(public_numbers, self, t, i), p.clamp_min(1e-30).log()
            mean, _ = trust.average(self, found.ids, numbers, p, logits)
        for _ in range(self.cfg.server_steps):
            self.descend(x, kl_gradient(mean, self.forward(x)) / len(x))

    def teach(
        self, clients: Iterable[int], *, t: int, i: int
    ) -> tuple[dict[str, Tree], dict[int, dict[str, Tree]]]:
        """The labels (B, K) of g in evaluation mode, encoded; with `delta_coding`, one message for
        each client.
        """
        cfg, logits = self.cfg, self.infer(public_batch(self, t, i))
        if cfg.bits_down is None:
            return {"labels": cfg.encode_dense(logits)}, {}
        labels = quantized(F.softmax(logits, -1), cfg.bits_down)
        if not cfg.delta_coding:
            return {"labels": pack(labels, cfg.bits_down)}, {}
        rows = public_numbers(self, t, i)
        each: dict[int, dict[str, Tree]] = {}
        for n in clients:
            each[n] = {"labels": changes(labels, self.told[n, rows], cfg.bits_down)}
            self.told[n, rows] = labels
        return {}, each

    def forget(self, clients: Iterable[int]) -> None:
        """Send all labels again to these clients, which may have missed the last ones."""
        if len(self.told[0]):
            self.told[list(clients)] = 0


def round(
    fed: Federation, server: CFDServer, clients: Sequence[int], cfg: CFDConfig, t: int
) -> Iterator[str]:
    """One round: τ local steps, then τ exchanges."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    trust.meet(fed, server, chosen)
    template = cfg.answer_template(server.context.classes)
    for i in range(cfg.tau):
        batch, each = {"t": t, "i": i}, server.restarts(chosen)
        how: Any = {"check": partial(server.check, **batch), "read": partial(server.read, **batch)}
        found = fed.mean(
            chosen, "predict", shared=batch, each=each, expect=template, kind="probabilities", **how
        )
        replied = () if found is None else found.ids
        server.restart({*chosen} - {*replied})
        if found is None:
            continue
        server.learn(found, **batch)
        labels, differences = server.teach(replied, **batch)
        taught = fed.call(replied, "distil", shared={**batch, **labels}, each=differences)
        server.forget({*replied} - taught.keys())
    yield "transfer"


METHODS = (
    Method(
        name="cfd",
        title="Distillation through the server's own model, with soft labels in few bits",
        paper="F. Sattler, A. Marban, R. Rischke, W. Samek: CFD: Communication-Efficient Federated "
        "Distillation via Soft-Label Quantization and Delta Coding, TNSE 2022",
        only_classes="it codes the probabilities of classes",
        local=EVERY_LOCAL,
        family="distillation",
        config=CFDConfig,
        round=round,
        client=CFDClient,
        server=CFDServer,
        black_box=CFDBlackBox,
        presets={"paper": {"bits": 1, "delta_coding": True}, **trust.PRESETS},
        needs=("public rows", "public rows at the server"),
    ),
)
