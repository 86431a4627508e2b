"""Dis-PFL: peers with sparse models of one density, each with its own mask, which it updates every
round.

Paper: R. Dai, L. Shen, F. He, X. Tian, D. Tao, "DisPFL: Towards Communication-Efficient
Personalized Federated Learning via Decentralized Sparse Training", ICML 2022. AFIND+ (its Figure 5)
can select the neighbours: see `neighbour_selection`.

Each peer i has weights w_i and a mask m_i; w_i is 0 outside of it. Initially m_i is random, with
Erdős–Rényi densities by layer (ERK), and all start with one network, masked. A round:

    w_i <- local training of the entries in m_i
    each neighbour j sends w_j at the entries in m_j, and m_j
    g_i = the dense gradient at w_i, on one batch
    m'_i = m_i without the share α_t of each layer with the smallest |w_i|, plus as many entries
    with the largest |g_i| w_i <- m'_i ⊙ Σ_j a_j m_j ⊙ w_j / Σ_j a_j m_j,  j = i included
    m_i <- m'_i,   α_t = (anneal / 2) (1 + cos(π t / anneal_rounds))

a_j are equal, or AFIND+'s. Entries in no mask are 0. This is the paper's round, started one step
later: it averages, trains and updates the mask, and its first average is of equal weights.

Reading: ERK gives biases and the weights of norms a density of about 1, so here they are dense.
Initial masks differ, which is an option of the authors' code. A pruned entry may be regrown in the
same step, as there.

Differs:
    Local training is as in all methods here, without the authors' learning rate decay, weight decay
        and clipping, so that methods can be compared.
    With a personal head the head is dense and private; `density` counts the shared matrices and
    kernels. The gradient is computed in training mode, on a scratch copy of BatchNorm's statistics.
    With AFIND+ the probes send w_i with its zeros; only trained weights are sent packed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Federation,
    Method,
    Shape,
    Template,
    Tree,
    floats,
    weighted_mean,
)
from fedloom.methods import steps
from fedloom.methods.peer import mixing, selection
from fedloom.protect import labels


class DisPFLConfig(selection.SelectionConfig):
    """Local training and AFIND+'s neighbour selection as in `SelectionConfig`."""

    neighbour_selection: Literal["random", "afind"] = "random"
    """Neighbour selection: `random`, or AFIND+'s coreset."""
    neighbours: int | None = Field(10, ge=0)
    """Number of random neighbours that a peer requests models from in a round; None for all."""
    density: float = Field(0.5, gt=0, le=1)
    """Density of a mask: the share of entries of the shared matrices and kernels that are kept."""
    anneal: float = Field(0.5, ge=0, le=1)
    """Share of a mask that is updated in the first round; it decays along a cosine."""
    anneal_rounds: int = Field(500, ge=1)
    """Round after which masks are fixed; in the paper the number of rounds."""

    _possible = model_validator(mode="after")(selection.refuse_update_noise)


@final
class DisPFLPeer(selection.SelectingPeer[DisPFLConfig]):
    """A peer, its sparse model, and its mask."""

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "neighbours", "replies", "mask")
    CALLS = ("choose", "candidates", "compare", "estimate", "update", "mix")
    TO_PEERS = ("request", "probe", "anchor", "give")
    TELLS = ()

    def setup(self) -> None:
        """A random mask, and the initial weights under it."""
        steps.init_network(self)
        selection.init(self)
        rng = self.stream("mask")
        mask = {}
        for name, count in kept_counts(self.params, self.cfg).items():
            chosen = torch.zeros(self.params[name].numel(), dtype=torch.bool)
            chosen[torch.from_numpy(rng.permutation(len(chosen))[:count])] = True
            mask[name] = chosen.view(self.params[name].shape).to(self.context.device)
        self.mask: dict[str, Tensor] = mask
        self.apply_mask()

    def apply_mask(self) -> None:
        """Set the weights outside of the mask to 0."""
        steps.set_weights(self, {k: self.params[k] * m for k, m in self.mask.items()})

    def train_masked(self, epochs: Iterable[steps.Epoch]) -> None:
        """SGD as in `steps.sgd_epochs`, where entries outside of the mask stay 0."""
        steps.reset_optimizer(self)
        masks = {
            k: self.mask.get(k, torch.ones_like(w, dtype=torch.bool))
            for k, w in self.params.items()
        }
        for n, names in epochs:
            batches = self.epochs(n, size=self.cfg.batch_size)
            self.train(
                partial(steps.label_loss, self), batches, only={k: masks[k] for k in names or masks}
            )

    def update(self, *, t: int) -> None:
        """Local training within the mask."""
        self.train_masked(steps.local_epochs(self, t))

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own weights within the mask, and the mask; with AFIND+ also their loss."""
        loss = (
            {"loss": selection.probe_loss(self, t)}
            if self.cfg.neighbour_selection == "afind"
            else {}
        )
        return {**packed(steps.shared_weights(self), self.mask), **loss}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Update the mask, and average under it the own model and the models of the neighbours that
        replied.
        """
        models, masks = {self.context.id: steps.shared_weights(self)}, {self.context.id: self.mask}
        for j, reply in inbox.items():
            if (sent := unpacked(reply, self.mask)) is not None:
                models[int(j)], masks[int(j)] = sent
        known = {j: reply for j, reply in inbox.items() if int(j) in models}
        afind = self.cfg.neighbour_selection == "afind"
        shares = selection.mixing_shares(self, t, known) if afind else dict.fromkeys(models, 1.0)
        self.update_mask(t)
        mean = intersection_mean(
            [models[j] for j in shares], [masks[j] for j in shares], list(shares.values())
        )
        steps.set_weights(
            self, {k: w * self.mask[k] if k in self.mask else w for k, w in mean.items()}
        )
        mixing.note_mixing(self, {j: share / sum(shares.values()) for j, share in shares.items()})
        self.replies = {"t": -1}

    def update_mask(self, t: int) -> None:
        """Prune the smallest weights of each layer, and regrow as many where the gradient is
        largest.
        """
        rate, names = renewal(t, self.cfg), list(self.mask)
        if not rate:
            return
        with self.scratch():
            x, y = self.sample_batch(t, size=self.cfg.batch_size)
            _, gradient = self.gradient(partial(steps.label_loss, self), x, y, of=names)
        mask = {k: renewed_mask(m, self.params[k], gradient[k], rate) for k, m in self.mask.items()}
        changed = sum((mask[k] != m).sum() for k, m in self.mask.items())
        self.note("updated mask entries", changed / 2)
        self.mask = mask

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune within the mask."""
        for _ in range(steps.steps_of(self.cfg, eval_mode)):
            steps.adapt(self, 1)
            self.apply_mask()
        if eval_mode == steps.TUNED:
            self.train_masked(steps.tuning_epochs(self))


# -- masks -----------------------------------------------------------------------------------------


def erk(shapes: Mapping[str, Sequence[int]], density: float) -> dict[str, float]:
    """Densities of layers in proportion to (sum of a shape) / (its product), at most 1 each; the
    mean over all entries is `density`.
    """
    size = {k: math.prod(s) for k, s in shapes.items()}
    raw = {k: sum(s) / size[k] for k, s in shapes.items()}
    sparse = list(shapes)
    while sparse:
        budget = density * sum(size.values()) - sum(n for k, n in size.items() if k not in sparse)
        scale = budget / sum(raw[k] * size[k] for k in sparse)
        most = max(raw[k] for k in sparse)
        if scale * most <= 1:
            break
        sparse = [k for k in sparse if raw[k] < most]
    return {k: scale * raw[k] if k in sparse else 1.0 for k in shapes}


def kept_counts(params: Mapping[str, Tensor], cfg: DisPFLConfig) -> dict[str, int]:
    """Number of entries of a mask, for each shared matrix and kernel: the same at all peers in all
    rounds.
    """
    shapes = {
        k: tuple(params[k].shape)
        for k in steps.shared_names(params, cfg.personal_head)
        if params[k].dim() > 1
    }
    return {
        k: max(1, int(d * math.prod(shapes[k]) + 0.5)) for k, d in erk(shapes, cfg.density).items()
    }


def renewal(t: int, cfg: DisPFLConfig) -> float:
    """α_t: the share of a mask that is updated in round t."""
    return cfg.anneal / 2 * (1 + math.cos(math.pi * min(t, cfg.anneal_rounds) / cfg.anneal_rounds))


def renewed_mask(mask: Tensor, weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """A mask (...) of as many entries, without the smallest weights and with the
    largest gradients.
    """
    new = mask.flatten().clone()
    count = math.ceil(rate * int(new.sum()))
    size = torch.where(new, weights.flatten().abs(), torch.inf)
    new[size.argsort(stable=True)[:count]] = False
    use = torch.where(new, -1.0, gradient.flatten().abs())
    new[use.argsort(stable=True, descending=True)[:count]] = True
    return new.view(mask.shape)


def intersection_mean(
    models: Sequence[Mapping[str, Tensor]],
    masks: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
) -> dict[str, Tensor]:
    """The weighted mean of each entry over the models whose mask has it, or 0; without a mask, over
    all models.
    """
    dense = [{k: x for k, x in model.items() if k not in masks[0]} for model in models]
    mean: dict[str, Tensor] = weighted_mean(dense, weights)  # type: ignore[assignment]
    for k in masks[0]:
        total, mass = torch.zeros_like(models[0][k]), torch.zeros_like(models[0][k])
        for a, model, mask in zip(weights, models, masks, strict=True):
            share = a * mask[k]
            total, mass = total + share * model[k], mass + share
        mean[k] = torch.where(mass > 0, total / mass, 0.0)
    return mean


# -- messages --------------------------------------------------------------------------------------


def packed(weights: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> dict[str, Tree]:
    """A message of sparse weights: the entries in the mask (n,), the mask's bits by name, and
    tensors without one.
    """
    return {
        "values": torch.cat([weights[k][m] for k, m in mask.items()]),
        "mask": {k: bits_of(m) for k, m in mask.items()},
        "dense": {k: w for k, w in weights.items() if k not in mask},
    }


def unpacked(
    reply: Mapping[str, Any], like: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Weights with their zeros, and the mask; `like` is a mask of the same shapes. None if the
    mask's size is not the number of values.
    """
    masks = {k: mask_of(reply["mask"][k], m.shape) for k, m in like.items()}
    counts = [int(m.sum()) for m in masks.values()]
    if sum(counts) != len(reply["values"]):
        return None
    weights = dict(reply["dense"])
    for (k, m), values in zip(masks.items(), reply["values"].split(counts), strict=True):
        weights[k] = values.new_zeros(m.shape).masked_scatter(m, values)
    return weights, masks


def bits_of(mask: Tensor) -> Tensor:
    """A mask as bytes (⌈n / 8⌉,) uint8, the first entry in the highest bit."""
    return labels.pack(mask.to(torch.uint8), 1)


def mask_of(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask of this shape from its bytes."""
    return labels.unpack(packed, 1, math.prod(shape), 1).bool().view(*shape)


def message_template(fed: Federation, cfg: DisPFLConfig) -> dict[str, Template]:
    """Template of a reply."""
    counts = kept_counts(fed.param_shapes, cfg)
    shared = steps.shared_names(fed.param_shapes, cfg.personal_head)
    return {
        "values": floats(sum(counts.values())),
        "mask": {k: Shape("uint8", -(-fed.param_shapes[k].numel() // 8)) for k in counts},
        "dense": {k: floats(*fed.param_shapes[k].shape) for k in shared if k not in counts},
        **({"loss": floats()} if cfg.neighbour_selection == "afind" else {}),
    }


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: DisPFLConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    random = cfg.neighbour_selection == "random"
    links = (
        fed.sample_peers(peers, cfg.neighbours, t)
        if random
        else selection.links(fed, peers, cfg, t)
    )
    fed.call(peers, "update", shared=now)
    fed.exchange(links, answer="give", take="mix", shared=now, expect=message_template(fed, cfg))
    yield "round"


DISPFL = Method(
    name="dispfl",
    title="Peers with sparse models average the entries that their masks share",
    paper="R. Dai et al.: DisPFL: Towards Communication-Efficient Personalized Federated Learning "
    "via Decentralized Sparse Training, ICML 2022",
    family="peer",
    config=DisPFLConfig,
    round=round,
    client=DisPFLPeer,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
)

METHODS = (
    DISPFL,
    replace(
        DISPFL,
        name="dispfl-afind",
        title="Dis-PFL with AFIND+ selecting and weighting neighbours",
        fixed={"neighbour_selection": "afind"},
    ),
)
