"""SS-VFL: each party pretrains its extractor on its own rows, without labels; split learning then
continues from there.

T. Castiglia, S. Wang, S. Patterson, "Self-Supervised Vertical Federated Learning", NeurIPS 2022
workshop on federated
learning. Pictures: X. Chen, K. He, "Exploring Simple Siamese Representation Learning" (SimSiam),
CVPR 2021, equations 1-4. Tables: D. Bahri et al., "SCARF: Self-Supervised Contrastive Learning
using Random Feature Corruption", ICLR 2022, Algorithm 1.

Phase 1, rounds below `pretrain_rounds`: every party trains on all its own rows, aligned or not.
Nothing is sent but the
number of the round. Phase 2: split learning on the aligned rows, with the batches that `split` has
from its round 0 on, and a fresh optimizer. With `pretrain_rounds` at 0 it is `split` bit for bit.

Two views of a batch of pictures: each is shifted, gets noise, and has a rectangle erased, all cells
of a row alike. Without flips and changes of color, which digits and cells of pictures do not
tolerate. Two views of a batch of a
table: the batch, and the batch with a share of each row's columns replaced by other rows' values.

Differs:
    The paper's abstract names two algorithms, SS-VFL-I with one round of communication and SS-VFL-C
        with more. This is the form that Proto-EVFL compares with: extractors go on learning in
        phase 2, a gradient per batch.
    The paper leaves open which loss and views a party takes; the sources above are ours, with
    milder views. Heads are as wide as `projection_dim`, with one hidden layer, as in SimSiam's
    study of small pictures. SCARF draws a replaced value from all rows; here it comes from a row of
        the batch. A category that is spread over several columns is corrupted column by column.
    SCARF's loss has a further constant, -log B, which has no gradient.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import EVERY_TASK, Federation, Method, Party
from fedloom.methods.vertical import self_supervision as selfsup
from fedloom.methods.vertical import steps
from fedloom.methods.vertical.split import SplitActive


class SSVFLConfig(steps.SplitConfig):
    """Settings of SS-VFL."""

    pretrain_rounds: int = Field(5, ge=0)
    """Number of pretraining rounds, without labels. A run needs at least one round more."""
    steps: int = Field(50, ge=1)
    """Local steps of a party in each pretraining round."""
    pretrain_lr: float = Field(1e-3, gt=0)
    """Learning rate of pretraining."""
    projection_dim: int = Field(64, ge=4)
    """Dimension of a projection and of a projector's hidden layer; a predictor's hidden layer has a
    quarter.
    """
    shift: float = Field(1 / 8, ge=0, le=1)
    """Largest shift of an image view, as a share of its side; at least a pixel unless 0."""
    noise: float = Field(0.1, ge=0)
    """Standard deviation of Gaussian noise on the standardized pixels of an image view."""
    erase: float = Field(0.5, ge=0, le=1)
    """Largest side of the erased rectangle in an image view, as a share of the image's side."""
    corruption_rate: float = Field(0.6, gt=0, le=1)
    """Share of a row's columns that are corrupted in a table view, at least one column."""
    temperature: float = Field(1.0, gt=0)
    """Temperature τ of SCARF's loss."""

    @property
    def min_rounds(self) -> int:
        """Pretraining and one round with labels."""
        return self.pretrain_rounds + 1


def info_nce(z: Tensor, corrupted: Tensor, temperature: float) -> Tensor:
    """SCARF's loss () of projections (B, d): among all corrupted rows of the batch each row is to
    find its own.
    """
    s = F.normalize(z, dim=-1) @ F.normalize(corrupted, dim=-1).T / temperature
    return F.cross_entropy(s, torch.arange(len(s), device=s.device))


class PretrainedExtractor(steps.Extractor):
    """An extractor and its heads: for pictures a projector and a predictor, for tables
    a projector.
    """

    def __init__(
        self,
        body: nn.Module,
        cfg: SSVFLConfig,
        principal: steps.PrincipalComponents | None,
        *,
        pictures: bool,
    ) -> None:
        super().__init__(body, cfg.learned, cfg.centered, principal)
        self.projector = selfsup.projector(cfg.learned, cfg.projection_dim)
        self.predictor = selfsup.predictor(cfg.projection_dim) if pictures else nn.Identity()


@final
class SSVFLPassive(Party[SSVFLConfig]):
    """A party's part of the network, below the cut, which it pretrains alone."""

    STATE = ("params", "buffers", "opt", "supervised")
    ROLE = "party"
    CALLS = ("embed", "update", "teach")
    TELLS = ()

    def setup(self) -> None:
        """Its extractor, as `split` has it, and heads."""
        self.supervised = self.cfg.pretrain_rounds == 0
        body, pictures = self.context.build(), self.data.pool.dim() == 4
        with self.seeded("heads"):
            network = PretrainedExtractor(
                body, self.cfg, steps.principal_components(self), pictures=pictures
            )
        self.network(
            network, selfsup.ScheduledOptimizer(self.context.local.applied(self.cfg.optimize()))
        )

    def teach(self, *, t: int) -> None:
        """Phase 1: steps on batches of all own rows."""
        cfg = self.cfg
        self.opt = selfsup.at_rate(self.opt, cfg.pretrain_lr)
        batches = self.context.unlabeled(t, steps=cfg.steps, size=cfg.batch_size)
        losses = [self.minimize(self._loss, *selfsup.views(x, cfg)) for x in batches]
        self.note("pretraining loss", torch.stack(losses).mean())

    def _loss(self, one: Tensor, two: Tensor) -> Tensor:
        heads, fixed = self.net.module, self.cfg.pca_dim
        a, b = (heads.projector(self.model(x)[:, fixed:]) for x in (one, two))  # type: ignore[operator]
        if one.dim() == 2:
            return info_nce(a, b, self.cfg.temperature)
        return selfsup.siamese((heads.predictor(a), heads.predictor(b)), (a, b))  # type: ignore[operator]

    def embed(self, *, number: int, step: int) -> Tensor:
        """Phase 2: forward to the cut (B, d), at first with a fresh optimizer."""
        if not self.supervised:
            self.supervised, self.opt = True, selfsup.reset(self.opt, self.cfg.lr)
        return self.forward(steps.aligned_batch(self, number, step))

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient (B, d) of the loss by
        what was sent.
        """
        steps.backward(self, number=number, step=step, cut=cut)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) for a joint evaluation."""
        return steps.embeddings(self, on=on)


def round(
    fed: Federation, active: SplitActive, parties: Sequence[int], cfg: SSVFLConfig, t: int
) -> Iterator[str]:
    """Local pretraining in the first rounds; then split learning."""
    if t < cfg.pretrain_rounds:
        fed.call(parties, "teach", shared={"t": t}, expect=None)
    else:
        numbers = range(
            (t - cfg.pretrain_rounds) * cfg.epochs, (t - cfg.pretrain_rounds + 1) * cfg.epochs
        )
        steps.passes(
            fed,
            active,
            parties,
            numbers,
            width=cfg.embedding_dim,
            min_replies=active.context.parties,
        )
    yield "round"


METHODS = (
    Method(
        name="ss-vfl",
        title="SS-VFL: local self-supervised pretraining, then split learning",
        paper="T. Castiglia et al.: Self-Supervised Vertical Federated Learning, NeurIPS 2022 "
        "workshop",
        family="vertical",
        config=SSVFLConfig,
        round=round,
        client=SSVFLPassive,
        server=SplitActive,
        setting="vertical",
        tasks=EVERY_TASK,
        local=("optimizer", "weight_decay", "clip", "class_weights"),
        no_local="its pretraining has learning rates of its own",
    ),
)
