"""CFD: distillation through a model at the server, with soft labels in few bits.

Paper: F. Sattler, A. Marban, R. Rischke and W. Samek, "CFD: Communication-Efficient Federated Distillation via
Soft-Label Quantization and Delta Coding", IEEE Transactions on Network Science and Engineering 9(4), 2022. Without
quantisation it is MHAT (L. Hu et al., "MHAT: An efficient model-heterogenous aggregation training scheme for federated
learning", Information Sciences 560, 2021), as FedAL has both.

Each client n keeps its network, its rows and its architecture. All parties, the server too, hold the same unlabelled
public rows. Clients send their answers p_n on these; the server's own model g learns from their mean, and what it then
answers is what clients learn from:

    client  CE(y, p_n)              on own rows
    server  KL(mean of p_n || g)    on a public batch
    client  KL(g || p_n)            on the same batch

Answers cross as logits. With `bits` b they cross as quantised probabilities: multiples of 1/(2^b - 1) that sum to 1, in
ceil(B K b / 8) bytes, for b = 1 the predicted class as a one-hot row. With `delta` a row crosses only if it is another
than the one that was sent for it before, and one bit for each row says whether it does.

Differs:
    The paper exchanges the labels of all public rows once in a round, clients begin the next round with passes over
        these, and the server's model makes passes over them too. Here a round is τ local steps and τ exchanges of one
        public batch each, as in all methods of this family, and the server makes `server_steps` on a batch: FedAL
        compares its methods so.
    The paper compresses what is left by entropy coding. Here the bytes are those of the packed bits, and a row that
        changed crosses as it is, not as a difference.
    The preset `paper` has one bit up and delta coding; labels come down as logits.
    FedAL's paper gives neither τ for CFD nor the server's steps and rate: one step of each, and 1e-3, are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.losses import kl_gradient
from fedloom.core.message import Shape, Template, Tree
from fedloom.core.method import Method
from fedloom.core.optim import Adam
from fedloom.core.party import Party
from fedloom.methods.boxed import Boxed
from fedloom.methods.distiller import CodedConfig, Distiller, OnPublicRows
from fedloom.protect.labels import changes, checked, merged, pack, probabilities, quantised, size_of, unpack


class Config(CodedConfig):
    """Defaults are those of FedAL's comparison, where labels are not quantised."""

    server_steps: int = Field(1, ge=1)
    """Steps of the server's model on each batch."""
    server_lr: float = Field(1e-3, gt=0)
    """Adam's rate at the server."""
    bits: int | None = Field(None, ge=1, le=8)
    """Bits of a probability on its way up; None for logits as `coding` has them."""
    bits_down: int | None = Field(None, ge=1, le=8)
    """Bits of a probability on its way down; None for logits. With `bits_down` alone `coding` says the way up."""
    delta: bool = False
    """Whether a quantised row crosses only where it changed since it last did."""

    @model_validator(mode="after")
    def _quantised(self) -> Config:
        if self.bits is not None and self.coding != "float32":
            raise ValueError('bits already says how labels go up: take coding = "float32" with it')
        if self.delta and self.bits is None and self.bits_down is None:
            raise ValueError("delta = true compares quantised rows: set bits or bits_down")
        return self

    def answer_like(self, classes: int) -> Template:
        """Template of a client's answer on a batch."""
        if self.bits is None:
            return self.encoded_like(classes)
        if self.delta:
            return {"changed": Shape("uint8", size_of(self.batch_size, 1)), "rows": Shape("uint8", None)}
        return Shape("uint8", size_of(self.batch_size * classes, self.bits))

    def remembered(self, bits: int | None, party: Party[Config]) -> Tensor:
        """What a party remembers (|P|, K) of one that it sends to or hears from: nothing yet, or nothing ever (0, K).

        Raises:
            ConfigError: a batch could hold one row twice.
        """
        rows = len(party.public_set.rows) if self.delta and bits is not None else 0
        if 0 < rows < self.batch_size:
            raise ConfigError(
                f"params.delta: a batch of {self.batch_size} has some of the {rows} public rows twice; set data.public "
                "to the batch size at least"
            )
        return torch.zeros(rows, party.site.classes, dtype=torch.uint8, device=party.site.device)


class Labelled(OnPublicRows[Config]):
    """What clients of both kinds do: they put their answers into few bits, and read the server's."""

    CALLS = ("local_train", "predict", "distil")
    sent: Tensor
    heard: Tensor

    def remember(self) -> None:
        """With `delta`: `sent` and `heard`, the last labels of each public row on either way, at first zeros."""
        self.sent = self.cfg.remembered(self.cfg.bits, self)
        self.heard = self.cfg.remembered(self.cfg.bits_down, self)

    def answer(self, logits: Tensor, t: int, i: int, anew: bool) -> Tree:
        """Answers (B, K) on the public batch, encoded. If `anew`, the server holds none of this client's labels."""
        cfg = self.cfg
        if cfg.bits is None:
            sent: Tree = cfg.encoded(logits)
            return sent
        labels = quantised(F.softmax(logits, -1), cfg.bits)
        if not cfg.delta:
            return pack(labels, cfg.bits)
        rows, before = self.public_numbers(t, i), torch.zeros_like(self.sent) if anew else self.sent
        self.sent = before.index_copy(0, rows, labels)
        return changes(labels, before[rows], cfg.bits)

    def target(self, sent: Any, t: int, i: int) -> Tensor:
        """The server's probabilities (B, K)."""
        cfg, classes = self.cfg, self.site.classes
        if cfg.bits_down is None:
            return F.softmax(cfg.decoded_whole(sent, classes), -1)
        if not cfg.delta:
            return probabilities(checked(unpack(sent, cfg.bits_down, cfg.batch_size, classes), cfg.bits_down))
        rows = self.public_numbers(t, i)
        labels = merged(sent, self.heard[rows], cfg.bits_down)
        self.heard = self.heard.index_copy(0, rows, labels)
        return probabilities(labels)


class Client(Labelled, Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    STATE = ("params", "buffers", "opt", "sent", "heard")

    def setup(self) -> None:
        """The network, and what is remembered."""
        self.start(self.site.build())
        self.remember()

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        """The answer to the public batch."""
        return self.answer(self.forward(self.public_batches(t)[i]), t, i, anew)

    def distil(self, *, t: int, i: int, labels: Tree) -> None:
        """One step on KL(g || p_n); `labels` (B, K) are the server's, encoded."""
        x, target = self.public_batches(t)[i], self.target(labels, t, i)
        self.descend(x, kl_gradient(target, self.forward(x)) / len(x))


class BlackBox(Labelled, Boxed[Config]):
    """A client without a network: its next fit has the server's labels."""

    STATE = ("targets", "fitted", "sent", "heard")

    def setup(self) -> None:
        """The box, and what is remembered."""
        super().setup()
        self.remember()

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        """The answer to the public batch."""
        return self.answer(self.outputs(t, i), t, i, anew)

    def distil(self, *, t: int, i: int, labels: Tree) -> None:
        """Learn the server's `labels` (B, K), encoded."""
        self.learn(self.target(labels, t, i), t, i)


class Server(OnPublicRows[Config]):
    """The server: a model of its own, which learns from the clients' mean answer."""

    STATE = ("params", "buffers", "opt", "held", "told")

    def setup(self) -> None:
        """With `delta`: `held` and `told` (N, |P|, K), the last labels of each client's rows on either way."""
        cfg, n = self.cfg, self.site.parties
        self.network(self.site.build(), Adam(cfg.server_lr))
        self.held = cfg.remembered(cfg.bits, self).repeat(n, 1, 1)
        self.told = cfg.remembered(cfg.bits_down, self).repeat(n, 1, 1)

    def questions(self, clients: Sequence[int]) -> dict[int, dict[str, bool]]:
        """With `delta`: whether each client has to begin anew. A row is never all zeros, so zeros mean nothing held."""
        if not len(self.held[0]):
            return {}
        return {n: {"anew": not self.held[n].any()} for n in clients}

    def check(self, n: int, sent: Any, *, t: int, i: int) -> None:
        """Refuse a reply of client n that holds no labels.

        Raises:
            MessageError: with what is wrong.
        """
        if self.cfg.bits is not None:
            self._labels(n, sent, t, i)

    def read(self, asked: Sequence[int], replies: Mapping[int, Any], *, t: int, i: int) -> dict[int, Tensor]:
        """Probabilities (B, K) by client, of replies that were checked."""
        cfg, classes = self.cfg, self.site.classes
        if cfg.bits is None:
            return {n: F.softmax(cfg.decoded(sent, classes), -1) for n, sent in replies.items()}
        found = {n: self._labels(n, sent, t, i) for n, sent in replies.items()}
        if cfg.delta:
            rows = self.public_numbers(t, i)
            for n, labels in found.items():
                self.held[n, rows] = labels
            self.held[[n for n in asked if n not in found]] = 0  # what these sent may be lost: they begin anew
        return {n: probabilities(labels) for n, labels in found.items()}

    def _labels(self, n: int, sent: Any, t: int, i: int) -> Tensor:
        """Client n's quantised labels (B, K)."""
        cfg = self.cfg
        assert cfg.bits is not None
        if cfg.delta:
            return merged(sent, self.held[n, self.public_numbers(t, i)], cfg.bits)
        return checked(unpack(sent, cfg.bits, cfg.batch_size, self.site.classes), cfg.bits)

    def learn(self, answers: Mapping[int, Tensor], *, t: int, i: int) -> None:
        """Steps on KL(mean || g) from the clients' probabilities (B, K)."""
        x, mean = self.public_batches(t)[i], torch.stack([*answers.values()]).mean(0)
        for _ in range(self.cfg.server_steps):
            self.descend(x, kl_gradient(mean, self.forward(x)) / len(x))

    def teach(self, clients: Iterable[int], *, t: int, i: int) -> tuple[dict[str, Tree], dict[int, dict[str, Tree]]]:
        """The labels (B, K) of the server's model in evaluation mode, encoded: for all, and with `delta` for each."""
        cfg, logits = self.cfg, self.infer(self.public_batches(t)[i])
        if cfg.bits_down is None:
            return {"labels": cfg.encoded_whole(logits)}, {}
        labels = quantised(F.softmax(logits, -1), cfg.bits_down)
        if not cfg.delta:
            return {"labels": pack(labels, cfg.bits_down)}, {}
        rows = self.public_numbers(t, i)
        each: dict[int, dict[str, Tree]] = {}
        for n in clients:
            each[n] = {"labels": changes(labels, self.told[n, rows], cfg.bits_down)}
            self.told[n, rows] = labels
        return {}, each

    def lost(self, clients: Iterable[int]) -> None:
        """These may not have got their labels: from now they are told all of them again."""
        if len(self.told[0]):
            self.told[list(clients)] = 0


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One round: τ local steps, then τ exchanges."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    answer = cfg.answer_like(server.site.classes)
    for i in range(cfg.tau):
        batch, anew = {"t": t, "i": i}, server.questions(chosen)
        check = partial(server.check, **batch)
        replies = fed.call(chosen, "predict", shared=batch, each=anew, expect=answer, check=check, need=1)
        answers = server.read(chosen, replies, **batch)
        if not answers:
            continue  # nobody to learn from
        server.learn(answers, **batch)
        labels, each = server.teach(answers, **batch)
        taught = fed.call(answers, "distil", shared={**batch, **labels}, each=each)
        server.lost(answers.keys() - taught.keys())
    yield "transfer"


METHODS = (
    Method(
        name="cfd",
        title="Distillation through the server's own model, with soft labels in few bits",
        paper="F. Sattler, A. Marban, R. Rischke, W. Samek: CFD: Communication-Efficient Federated Distillation via "
        "Soft-Label Quantization and Delta Coding",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        black_box=BlackBox,
        presets={"paper": {"bits": 1, "delta": True}},
        needs=("public rows", "public rows at the server"),
    ),
)
