"""Steps that the pages of several methods share: local SGD, adaptation, fine-tuning and averaging,
as functions.

A comparison is fair only where every method trains alike, so this is written once. A page's party
calls these functions where its algorithm has the line; they take the party, and read `alpha`, `lr`,
… from its config.

A network has a body and a head (its module `head`). With `personal_head` the head never leaves its
client, and local
training alternates: epochs that update only the head, then epochs that update only the body.
Otherwise all weights are updated together and all are shared. Local training starts with zero
momentum, because momentum belongs to the weights before averaging. BatchNorm statistics stay at the
client.

A client's rows are in two halves. Adaptation takes full-batch steps on the support half, φ = θ - α
∇L(θ, D^s), with one step size α for all compared methods, at clients that took part in training and
at unseen clients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from fedloom.core.page import (
    SGD,
    Federation,
    MethodConfig,
    ModelError,
    Party,
    Template,
    Tree,
    floats,
)
from fedloom.methods.settings import Adaptation, LocalSGD

TUNED = "tuned"
"""The evaluation mode after fine-tuning on the client's own rows."""
TUNING = 2**32 - 1
"""The last epoch number of fine-tuning, far from the numbers of training, so that no shuffle is
shared.
"""

Epoch: TypeAlias = tuple[int, Sequence[str] | None]
"""The number of an epoch, which seeds its shuffle, and the names of the parameters that it updates
(None: all).
"""


def _distinct(steps: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(steps)) < len(steps) or min(steps, default=0) < 0:
        raise ValueError(
            f"adapt_steps must be distinct integers >= 0, such as [1, 5, 0], not {list(steps)}"
        )
    return steps


AdaptSteps: TypeAlias = Annotated[tuple[int, ...], AfterValidator(_distinct)]


class LocalSGDConfig(MethodConfig):
    """Local training and evaluation of a client that shares weights. Defaults are those of the
    AFIND+ paper.
    """

    TRIAL = (("personal_head", False),)  # whole models
    alpha: float = Field(0.03, ge=0)
    """Step size of adaptation (α)."""
    adapt_steps: AdaptSteps = ()
    """Numbers of adaptation steps on the support half after which clients are evaluated; the first
    is reported.
    """
    batchnorm: Literal["own", "batch"] = "own"
    """BatchNorm statistics for prediction, which never leave a client: `own` takes its running
    statistics, as usual; `batch` takes those of the rows to predict, so that a prediction depends
    on the other rows.
    """
    epochs: int = Field(5, ge=1)
    """Epochs over the client's own rows in a round (K_w)."""
    head_epochs: int = Field(1, ge=0)
    """With a personal head: epochs before them that update only the head (K_β)."""
    batch_size: int = Field(128, ge=1)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    lr: float = Field(0.01, gt=0)
    """Learning rate of SGD."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    personal_head: bool = True
    """Whether the last layer is private to each client."""
    finetune_epochs: int = Field(1, ge=0)
    """Epochs of fine-tuning all weights before the evaluation mode "tuned"; 0 skips it."""

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """After adaptation, and after fine-tuning if `finetune_epochs` > 0."""
        return eval_modes(self.adapt_steps, self.finetune_epochs)


# -- weights ---------------------------------------------------------------------------------------


def trainable_weights(module: nn.Module, device: str = "cpu") -> dict[str, Tensor]:
    """The trainable parameters of a network by name, detached, on this device."""
    return {k: p.detach().to(device) for k, p in module.named_parameters() if p.requires_grad}


def shared_names(params: Mapping[str, Tensor], personal_head: bool) -> list[str]:
    """Names of the weights that clients share: all, or all but the weights of the module `head`.

    Raises:
        ModelError: `personal_head` needs a network with a body and a head.
    """
    if not personal_head:
        return list(params)
    body = [k for k in params if not k.startswith("head.")]
    if not body or len(body) == len(params):
        problem = "consists only of a head" if not body else "has no module named `head`"
        raise ModelError(
            "params.personal_head=true needs a network with a body and a module `head`, but this "
            f"network {problem}: choose another in models.pool, or set params.personal_head=false"
        )
    return body


def shared_weights(party: Party[LocalSGD]) -> dict[str, Tensor]:
    """The weights that the party sends to others, by name."""
    return {k: party.params[k] for k in shared_names(party.params, party.cfg.personal_head)}


def weights_template(fed: Federation, personal_head: bool) -> dict[str, Template]:
    """Template of a message of the shared weights."""
    return {
        "weights": {
            k: floats(*fed.param_shapes[k].shape)
            for k in shared_names(fed.param_shapes, personal_head)
        }
    }


def set_weights(party: Party[object], weights: Mapping[str, Any]) -> None:
    """Replace the named weights of the party's network; the others are kept."""
    party.params = {**party.params, **weights}


class GlobalWeights(Protocol):
    """A server with one set of weights, by name, that all clients receive."""

    weights: dict[str, Tensor]


def broadcast(server: GlobalWeights) -> dict[str, Tree]:
    """The hook `broadcast` of a server with global `weights`."""
    return dict(server.weights)


# -- local training --------------------------------------------------------------------------------


def init_network(party: Party[LocalSGD]) -> None:
    """Set the party's network, with the initial weights that all parties share, and SGD. For
    `setup`.

    Raises:
        ModelError: `personal_head` needs a network with a body and a head.
    """
    party.network(party.context.build(), SGD(party.cfg.lr, party.cfg.momentum))
    shared_names(party.params, party.cfg.personal_head)


def reset_optimizer(party: Party[object]) -> None:
    """Set the optimizer's state, such as momentum, to zero."""
    party.opt = {k: torch.zeros_like(v) for k, v in party.opt.items()}


def label_loss(party: Party[object], x: Tensor, y: Tensor) -> Tensor:
    """Mean loss () of the party's network on x (B, ...), y (B,), with its graph: the cross-entropy
    of classes, or half the squared error of a number.
    """
    return party.context.task.loss(party.model(x), y)


def local_sgd(party: Party[LocalSGD], *, t: int) -> None:
    """Round t's training on the party's own rows, from its current weights."""
    sgd_epochs(party, local_epochs(party, t))


def fine_tune(party: Party[LocalSGD]) -> None:
    """`finetune_epochs` epochs over the party's own rows that update all weights."""
    sgd_epochs(party, tuning_epochs(party))


def sgd_epochs(party: Party[LocalSGD], epochs: Iterable[Epoch]) -> None:
    """SGD with zero momentum at the start, on the mean loss."""
    reset_optimizer(party)
    for n, names in epochs:
        party.train(
            partial(label_loss, party), party.epochs(n, size=party.cfg.batch_size), only=names
        )


def local_epochs(party: Party[LocalSGD], t: int) -> list[Epoch]:
    """The epochs of round t: with a personal head `head_epochs` for the head, then `epochs` for the
    body.
    """
    cfg = party.cfg
    if not cfg.personal_head:
        return [(n, None) for n in range(t * cfg.epochs, (t + 1) * cfg.epochs)]
    body = shared_names(party.params, personal_head=True)
    head = [k for k in party.params if k not in body]
    first = t * (cfg.head_epochs + cfg.epochs)
    return [
        (first + n, head if n < cfg.head_epochs else body)
        for n in range(cfg.head_epochs + cfg.epochs)
    ]


def tuning_epochs(party: Party[LocalSGD]) -> list[Epoch]:
    """The epochs of fine-tuning."""
    return [(n, None) for n in range(TUNING - party.cfg.finetune_epochs, TUNING)]


# -- adaptation ------------------------------------------------------------------------------------


def weighted_loss(party: Party[object], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Weighted loss () on x (n, ...), y (n,) with row weights `weight` (n,) that sum to 1."""
    return (party.context.task.loss(party.model(x), y, "none") * weight).sum()


def adapt(party: Party[Adaptation], steps: int) -> None:
    """Full-batch gradient steps on the support half, which a party of one row lacks."""
    if steps:
        gradient_descent(party, steps, partial(weighted_loss, party), *party.context.support)


def gradient_descent(
    party: Party[Adaptation], steps: int, loss: Callable[..., Tensor], *batch: object
) -> None:
    """Steps of plain gradient descent at rate α on `loss(*batch)`."""
    for _ in range(steps):
        _, gradient = party.gradient(loss, *batch)
        party.params = {
            k: w.sub(gradient[k], alpha=party.cfg.alpha) for k, w in party.params.items()
        }


# -- evaluation ------------------------------------------------------------------------------------


def eval_modes(adapt_steps: Sequence[int], finetune_epochs: int = 0) -> tuple[str, ...]:
    """A config's evaluation modes: after each number of adaptation steps, and after fine-tuning if
    it has epochs.
    """
    return (*map(after, adapt_steps), *((TUNED,) if finetune_epochs else ()))


def after(steps: int) -> str:
    """Name of the evaluation mode after this number of adaptation steps."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def steps_of(cfg: Adaptation, eval_mode: str) -> int:
    """Number of adaptation steps in an evaluation mode."""
    return next((n for n in cfg.adapt_steps if after(n) == eval_mode), 0)


def load_and_adapt(
    party: Party[Adaptation], *, eval_mode: str, broadcast: Mapping[str, Tree]
) -> None:
    """Before an evaluation: load the broadcast weights, if any, and adapt as the mode says."""
    if broadcast:
        set_weights(party, broadcast)
    adapt(party, steps_of(party.cfg, eval_mode))


def prepare(party: Party[LocalSGD], *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
    """Before an evaluation: load the broadcast weights, if any; adapt or fine-tune, depending on
    the mode.
    """
    load_and_adapt(party, eval_mode=eval_mode, broadcast=broadcast)
    if eval_mode == TUNED:
        fine_tune(party)
