"""Per-FedAvg: federated averaging of a model that is good after a step of adaptation.

Paper: A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1. A participant makes
`local_steps` steps (τ) on its own meta-objective, L(θ - α ∇L(θ, D^s), D^q), and the server
averages:

    θ <- θ - β (I - α ∇²L(θ, D^s)) ∇L(θ - α ∇L(θ, D^s), D^q)

The variants of the paper's section 5 are settings of `hvp`: FO, which leaves the Hessian out, is
`first_order`; HF, which takes a difference of gradients, is `fd`. With τ = 1 and full participation
a round is a step of gradient descent on the mean meta-objective, which is what AugFL extrapolates.

Differs:
    No batches: D^s and D^q are a client's whole halves, the same in every step. The paper draws
        three independent batches for each step, one for the Hessian.
    The Hessian-vector product is exact by default.
    The mean is weighted by rows, as everywhere here; the paper's clients count alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

from pydantic import Field
from torch import Tensor

from fedloom.core.page import EVERY_TASK, SGD, Federation, Method, Party, Shape, Template, Tree
from fedloom.methods import steps
from fedloom.methods.meta.steps import Hessian, MetaConfig, meta_gradient


class PerFedAvgConfig(MetaConfig):
    """The paper's step of adaptation, and its local steps. Rates are those of AugFL's
    experiments.
    """

    TRIAL = (("local_steps", 10),)
    local_steps: int = Field(1, ge=1)
    """Local steps in a round (τ). The paper's experiments have 4 and 10."""
    beta: float = Field(0.03, gt=0)
    """Learning rate of a local step (β)."""
    hvp: Hessian = "exact"
    """Hessian-vector product: exact, by differences (fd, fd_normalized), or omitted (first_order).
    """
    delta: float = Field(1e-3, gt=0)
    """Step of the difference of gradients (δ)."""

    @property
    def rates(self) -> tuple[str, ...]:
        """β."""
        return ("beta",)

    @property
    def sums_stand_alone(self) -> bool:
        """A client keeps no model between rounds."""
        return True

    @property
    def iterations_per_round(self) -> int:
        """τ."""
        return self.local_steps


@final
class PerFedAvgClient(Party[PerFedAvgConfig]):
    """A client, which keeps no model between rounds."""

    STATE = ("params", "buffers", "opt")
    ROLE = "client"
    CALLS = ("update",)
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """A network for local steps."""
        self.network(self.context.build(), SGD(self.cfg.beta))

    def update(self, *, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """Lines 5-8: τ steps from the server's weights."""
        cfg, theta = self.cfg, weights
        for _ in range(cfg.local_steps):
            gradient = meta_gradient(self, theta, cfg.hvp, cfg.delta)  # lines 6, 7
            theta = {k: w - cfg.beta * gradient[k] for k, w in theta.items()}  # line 8
        return {"weights": theta, "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the server's weights, and adapt."""
        steps.load_and_adapt(self, eval_mode=eval_mode, broadcast=broadcast)


@final
class PerFedAvgServer(Party[PerFedAvgConfig]):
    """The server and its global weights."""

    ROLE = "server"
    STATE = ("weights",)
    broadcast = steps.broadcast

    def setup(self) -> None:
        """The initial weights."""
        self.weights = steps.trainable_weights(self.context.build(), self.context.device)


def round(
    fed: Federation, server: PerFedAvgServer, clients: Sequence[int], cfg: PerFedAvgConfig, t: int
) -> Iterator[str]:
    """Algorithm 1 for one of the server's k."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)  # line 2
    template: Template = {"weights": dict(fed.param_shapes), "rows": Shape("int64")}
    sent = {"weights": server.weights}
    # lines 3-9
    mean = fed.mean(chosen, "update", shared=sent, expect=template, weight="rows", around=sent)
    if mean is not None:
        server.weights = mean.value["weights"]  # line 10
    yield "round"


METHODS = (
    Method(
        name="per-fedavg",
        title="A server averages weights that are good after a step of adaptation",
        paper="A. Fallah et al.: Personalized Federated Learning: A Model-Agnostic Meta-Learning "
        "Approach, 2020",
        family="meta",
        config=PerFedAvgConfig,
        round=round,
        client=PerFedAvgClient,
        server=PerFedAvgServer,
        tasks=EVERY_TASK,
        local=("class_weights",),
        no_local="its step is plain gradient descent along a meta-gradient (line 8)",
        needs=("one network",),
    ),
)
