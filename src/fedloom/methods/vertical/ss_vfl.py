"""SS-VFL: each party teaches its extractor on its own rows, without labels; then split learning goes on from there.

T. Castiglia, S. Wang, S. Patterson, "Self-Supervised Vertical Federated Learning", NeurIPS 2022 workshop on federated
learning. Pictures: X. Chen, K. He, "Exploring Simple Siamese Representation Learning" (SimSiam), CVPR 2021, equations
1-4. Tables: D. Bahri et al., "SCARF: Self-Supervised Contrastive Learning using Random Feature Corruption", ICLR 2022,
Algorithm 1.

Phase 1, rounds below `pretrain`: every party trains on all its own rows, aligned or not. Nothing crosses but the number
of the round. Phase 2: split learning on the aligned rows, with the batches that `split` has from its round 0 on, and a
fresh optimiser. With `pretrain` at 0 it is `split` bit for bit.

Two views of a batch of pictures: each is shifted, gets noise, and has a rectangle erased, all cells of a row alike. No
flip and no change of colour: digits and cells of pictures don't bear them. Two views of a batch of a table: the batch,
and the batch with a share of each row's columns replaced by other rows' values.

Differs:
    The paper's abstract names two algorithms, SS-VFL-I with one round of communication and SS-VFL-C with more. This
        is the form that Proto-EVFL compares with: extractors go on learning in phase 2, a gradient a batch.
    Which loss and views a party takes is left open there; the sources above are ours, with milder views.
    Heads are as wide as `projection`, with one hidden layer, as in SimSiam's study of small pictures.
    SCARF draws a replaced value from all rows; here it comes from a row of the batch. A category that is spread over
        several columns is corrupted column by column.
    SCARF's loss has a further constant, -log B, which has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.core.optim import Optimiser, Rate
from fedloom.methods.holder import Extractor, Principal
from fedloom.methods.vertical import split
from fedloom.methods.vertical.split import Active, SplitConfig, passes


class PretrainConfig(SplitConfig):
    """Settings of a first phase without labels, and of split learning after it."""

    pretrain: int = Field(5, ge=0)
    """The first rounds, which need no label. A run takes more rounds than these, or nothing classifies."""
    steps: int = Field(50, ge=1)
    """Steps of a party on its own rows in each of them."""
    pretrain_lr: float = Field(1e-3, gt=0)
    """Rate of the first phase."""
    projection: int = Field(64, ge=4)
    """Numbers of a projection, and units of a projector's hidden layer; a predictor's has a quarter."""
    shift: float = Field(1 / 8, ge=0, le=1)
    """Views of pictures are moved by up to this share of a side, at least a pixel, unless it is 0."""
    noise: float = Field(0.1, ge=0)
    """Standard deviation of Gaussian noise on each number that the network sees of a picture."""
    erase: float = Field(0.5, ge=0, le=1)
    """The sides of the rectangle that becomes its channel's mean are drawn from 0 to this share of a picture's."""
    corrupt: float = Field(0.6, gt=0, le=1)
    """The share of a row's columns that are replaced, at least one."""

    @property
    def least_rounds(self) -> int:
        """One that has labels."""
        return self.pretrain + 1


class Config(PretrainConfig):
    """Settings of SS-VFL."""

    temperature: float = Field(1.0, gt=0)
    """Of SCARF's loss (τ)."""


# -- losses: p, z (B, d) predictions and projections ------------------------------------------------------------


def disagreement(p: Tensor, z: Tensor) -> Tensor:
    """SimSiam's D () of equations 1 and 3: minus the mean cosine of predictions and projections, held constant."""
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def siamese(p: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Tensor:
    """Equation 4 (): each view predicts the other's projection."""
    return disagreement(p[0], z[1]) / 2 + disagreement(p[1], z[0]) / 2


def info_nce(z: Tensor, corrupted: Tensor, temperature: float) -> Tensor:
    """SCARF's loss (): among all corrupted rows of the batch each row is to find its own."""
    s = F.normalize(z, dim=-1) @ F.normalize(corrupted, dim=-1).T / temperature
    return F.cross_entropy(s, torch.arange(len(s), device=s.device))


# -- views, drawn by torch's generator, which engines seed for each call ------------------------------------------


def views(x: Tensor, cfg: PretrainConfig) -> tuple[Tensor, Tensor]:
    """Two views of a batch: of pictures (B, C, H, W), or of rows of a table (B, F)."""
    return (pictured(x, cfg), pictured(x, cfg)) if x.dim() == 4 else (x, corrupted(x, cfg.corrupt))


def pictured(x: Tensor, cfg: PretrainConfig) -> Tensor:
    """A view (B, C, H, W) of pictures."""
    x = erased(shifted(x, cfg.shift), cfg.erase)
    return x + cfg.noise * torch.randn_like(x)


def shifted(x: Tensor, share: float) -> Tensor:
    """Each picture moved up or down, and left or right; its edge goes on outwards."""
    rows, _, height, width = x.shape
    down, right = math.ceil(height * share), math.ceil(width * share)
    wide = F.pad(x, (right, right, down, down), mode="replicate")
    top = torch.randint(2 * down + 1, (rows, 1), device=x.device) + torch.arange(height, device=x.device)
    left = torch.randint(2 * right + 1, (rows, 1), device=x.device) + torch.arange(width, device=x.device)
    row = torch.arange(rows, device=x.device)
    return wide[row[:, None, None], :, top[:, :, None], left[:, None, :]].movedim(-1, 1)


def erased(x: Tensor, share: float) -> Tensor:
    """Each picture with one rectangle at the mean of its channel."""

    def covered(side: int) -> Tensor:
        """Which of a side's places (B, side) a stretch of random length covers."""
        length = torch.randint(math.ceil(side * share) + 1, (len(x), 1), device=x.device)
        start = (torch.rand(len(x), 1, device=x.device) * (side - length + 1)).floor()
        place = torch.arange(side, device=x.device)
        return (place >= start) & (place < start + length)

    hole = covered(x.shape[2])[:, None, :, None] & covered(x.shape[3])[:, None, None, :]
    return torch.where(hole, x.mean((2, 3), keepdim=True), x)


def corrupted(x: Tensor, share: float) -> Tensor:
    """Each row (B, F) with so many of its columns replaced by what random rows of the batch have there."""
    which = torch.rand_like(x).argsort(1) < max(1, int(share * x.shape[1]))
    return torch.where(which, x.gather(0, torch.randint(len(x), x.shape, device=x.device)), x)


# -- heads, and a rate that changes --------------------------------------------------------------------------------


def normalised(inputs: int, outputs: int) -> list[nn.Module]:
    """A layer without bias and the BatchNorm after it, which keeps no statistics: a head is of no use later."""
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, track_running_stats=False)]


def projector(inputs: int, width: int) -> nn.Sequential:
    """Features (B, inputs) to projections (B, width)."""
    return nn.Sequential(*normalised(inputs, width), nn.ReLU(), *normalised(width, width))


def predictor(width: int) -> nn.Sequential:
    """Projections (B, width) to predictions (B, width), through a bottleneck."""
    return nn.Sequential(*normalised(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width))


@dataclass(frozen=True)
class Rated:
    """The optimiser of a config, with its rate among its slots, so that a party can change it."""

    cfg: SplitConfig

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The optimiser's own, and the rate ()."""
        rate = torch.tensor(self.cfg.lr, dtype=torch.float64, device=flat.device)
        return {**self.cfg.optimise().slots(flat), "rate": rate}

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """The rate, and this step's other numbers."""
        rate = float(slots["rate"])
        return rate, *_optimiser(self.cfg, rate).tick(slots)

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """A step of the optimiser at this rate."""
        rate, *others = rates
        _optimiser(self.cfg, float(rate)).move(w, g, slots, *others)


@lru_cache(maxsize=64)
def _optimiser(cfg: SplitConfig, rate: float) -> Optimiser:
    return cfg.model_copy(update={"lr": rate}).optimise()


def at_rate(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """These slots at another rate."""
    return {**opt, "rate": torch.full_like(opt["rate"], rate)}


def afresh(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """Slots that remember nothing, at this rate."""
    return at_rate({k: torch.zeros_like(x) for k, x in opt.items()}, rate)


# -- the parties and the round -------------------------------------------------------------------------------------


class Taught(Extractor):
    """An extractor, and the heads that teach it: of pictures a projector and a predictor, of tables a projector."""

    def __init__(self, body: nn.Module, cfg: PretrainConfig, principal: Principal | None, *, pictures: bool) -> None:
        super().__init__(body, cfg.learnt, cfg.centred, principal)
        self.projector = projector(cfg.learnt, cfg.projection)
        self.predictor = predictor(cfg.projection) if pictures else nn.Identity()


class Party(split.Party):
    """A party's part of the network, below the cut, which it may teach by itself first."""

    cfg: Config
    STATE = ("params", "buffers", "opt", "supervised")
    CALLS = (*split.Party.CALLS, "teach")

    def setup(self) -> None:
        """Its extractor, as `split` has it, and heads."""
        self.supervised = self.cfg.pretrain == 0
        body = self.site.build()
        with self.seeded("heads"):
            taught = Taught(body, self.cfg, self.components(), pictures=self.data.pool.dim() == 4)
        self.network(taught, Rated(self.cfg))

    def teach(self, *, t: int) -> None:
        """Phase 1: steps on batches of all own rows."""
        self.opt = at_rate(self.opt, self.cfg.pretrain_lr)
        batches = self.site.unlabelled(t, steps=self.cfg.steps, size=self.cfg.batch_size)
        losses = [self.minimise(self._loss, *views(x, self.cfg)) for x in batches]
        self.note("pretraining loss", torch.stack(losses).mean())

    def _loss(self, one: Tensor, two: Tensor) -> Tensor:
        heads, fixed = self.net.module, self.cfg.principal
        a, b = (heads.projector(self.model(x)[:, fixed:]) for x in (one, two))  # type: ignore[operator]
        if one.dim() == 2:
            return info_nce(a, b, self.cfg.temperature)
        return siamese((heads.predictor(a), heads.predictor(b)), (a, b))  # type: ignore[operator]

    def embed(self, *, number: int, step: int) -> Tensor:
        """Phase 2: forward to the cut (B, d)."""
        if not self.supervised:
            self.supervised, self.opt = True, afresh(self.opt, self.cfg.lr)
        return super().embed(number=number, step=step)


def round(fed: Federation, active: Active, parties: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Each party by itself; later, some passes over the aligned rows."""
    if t < cfg.pretrain:
        fed.call(parties, "teach", shared={"t": t}, expect=None)
    else:
        first = (t - cfg.pretrain) * cfg.epochs
        passes(fed, active, parties, cfg, range(first, first + cfg.epochs))
    yield "round"


METHODS = (
    Method(
        name="ss-vfl",
        title="SS-VFL: each party teaches its extractor without labels, then split learning",
        paper="T. Castiglia et al.: Self-Supervised Vertical Federated Learning, NeurIPS 2022 workshop",
        family="vertical",
        config=Config,
        round=round,
        client=Party,
        server=Active,
        setting="vertical",
    ),
)
