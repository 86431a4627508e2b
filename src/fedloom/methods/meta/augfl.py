"""AugFL: federated meta-learning regularized by a server's private pretrained model.

Paper: S. Yue, Z. Qin, Y. Deng, J. Ren, Y. Zhang, J. Zhang, "AugFL: Augmenting Federated Learning
with Pretrained Models". Equation and line numbers below are the paper's; lines are those of
Algorithm 1.

Clients and server look for one meta-model θ from which a step on a client's support half D^s does
well on its query half D^q, while the server regularizes θ towards its pretrained model θ_p, on
labeled rows of its own:

    min Σ w_i L_i(θ - α ∇L_i(θ, D_i^s), D_i^q) + λ R_h(θ, θ_p)                                        (2), (3)

It is split by inexact ADMM: each client keeps a dual variable y_i, and R_h is the server's matter
    alone:

    φ_i = θ - α ∇L_i(θ, D_i^s),    r_i = ∇L_i(φ_i, D_i^q),    g_i = ∇²L_i(θ, D_i^s) r_i                (7), (10)
    θ_i = θ - (y_i + w_i (r_i - α g_i)) / ρ                                                           (11)
    y_i <- y_i + ρ (θ_i - θ)                                                                          (12)
    θ <- (Σ (y_i + ρ θ_i) - λ ∇R_h(θ, θ_p)) / Σ ρ                                                     (13)

Messages: θ, ρ and Σ D_i down, u_i = y_i + ρ θ_i up, and once a client's number of rows. The
pretrained model and its features never leave the server; at λ = 0, or where R_h does not need it,
it is not even read.

After (12) y_i = -w_i (r_i - α g_i), so with full participation each round is a step of optimistic
gradient descent,

    θ <- θ - [Σ w_i (2 (r_i - α g_i) - (r_i - α g_i of the round before)) + λ ∇R_h] / Σ ρ

and 1 / Σ ρ is the rate of the meta-model: `meta_lr`. Given `rho` instead, it falls with the number
of clients. So does λ / Σ ρ, the rate of R_h, which can be given as `kd_lr` instead of λ.

R_h is a weighted sum: `crd` of section V, contrastive representation distillation (Tian et al.,
2020); `kl`, towards the pretrained model's answers; `l2`, |θ - θ_p|², as in Theorem 3; and `ce`,
cross-entropy with the labels of the server's rows, which needs no pretrained model at all. Of a
number these are half the squared errors, or the likelihood and the divergence of Gaussians, and in
CRD all other rows are negative, as the paper has it.

Differs:
    One vector goes up, not two: the server uses nothing but u_i.
    The Hessian-vector product is exact by default. `hvp = "fd"` is (10), with δ = 1 / (10 (t + 1) +
    100). With `clients_per_round` a client that was not drawn, or failed, counts with its last dual
        at the present θ: the server computes it from u_i. After a lost reply the two differ by a
        half, a quarter, … of the client's update, with each further reply. Without, clients that
        fail are left out of the sums, and λ falls in proportion. Clients that leave or join (churn)
        change w_i, and ρ if meta_lr is set.
    CRD (`crd.py`) has the normalization of the authors' code, which the paper does not mention. θ^0
        is the same at all clients; the authors' code averages models that each client drew for
        itself.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.core.context import epoch_plan, sample_plan
from fedloom.core.errors import ConfigError, MessageError, ModelError
from fedloom.core.page import (
    SGD,
    Aggregator,
    Federation,
    Method,
    Party,
    Shape,
    Tree,
    check_finite,
    map_tensors,
)
from fedloom.core.task import EVERY_TASK
from fedloom.methods import steps
from fedloom.methods.features import Features, linear
from fedloom.methods.meta import crd
from fedloom.methods.meta.steps import Hessian, MetaConfig, meta_gradient


class AugFLConfig(MetaConfig):
    """Defaults are ours; see the presets for the paper's and its code's."""

    hvp: Hessian = "exact"
    """Hessian-vector product (10): exact, by differences (fd, fd_normalized), or omitted
    (first_order).
    """
    meta_lr: float | None = Field(0.1, gt=0)
    """Learning rate of the meta-model, 1 / Σ ρ. Set this or rho."""
    rho: float | None = Field(None, gt=0)
    """ρ of each client; the learning rate then falls with the number of clients."""
    federated: bool = True
    """Whether clients take part in training."""
    lam: float | None = Field(5.0, ge=0)
    """λ: weight of R_h, whose learning rate is λ / Σ ρ. Set this or kd_lr."""
    kd_lr: float | None = Field(None, ge=0)
    """Learning rate of R_h, λ / Σ ρ, whatever ρ and the number of clients."""
    crd: float = Field(1.0, ge=0)
    """Weight of contrastive representation distillation in R_h."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the pretrained model's outputs in R_h, times kl_temperature
    squared.
    """
    ce: float = Field(0.0, ge=0)
    """Weight of the loss of labels, cross-entropy or half the squared error, on the server's rows
    in R_h.
    """
    l2: float = Field(0.0, ge=0)
    """Weight of |θ - θ_p|² in R_h; both models must have one architecture."""
    kl_temperature: float = Field(4.0, gt=0)
    """Temperature of both models in `kl`, for classes."""
    server_batch_size: int = Field(128, ge=1)
    """Batch size of the server."""
    server_batches: int | None = Field(1, ge=1)
    """Number of batches over which ∇R_h is averaged in a round; None for one epoch of the server's
    rows.
    """
    crd_negatives: int = Field(16384, ge=1)
    """N: number of negatives, rows of other classes, for each pair in CRD."""
    crd_temperature: float = Field(0.07, gt=0)
    """Temperature τ of CRD."""
    crd_dim: int = Field(128, ge=1)
    """Dimension of the space in which CRD compares both models' features."""
    crd_momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum of the entries of CRD's memory banks."""
    crd_lr: float = Field(0.05, gt=0)
    """Learning rate of CRD's two linear maps."""
    crd_weight_decay: float = Field(5e-4, ge=0)
    """Weight decay of CRD's two linear maps."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "AugFLConfig":
        if (self.meta_lr is None) == (self.rho is None):
            raise ValueError(
                'set exactly one of params.meta_lr and params.rho, and the other to "none"'
            )
        if (self.lam is None) == (self.kd_lr is None):
            raise ValueError(
                'set exactly one of params.lam and params.kd_lr, and the other to "none"'
            )
        if self.weight and not (self.on_rows or self.taught):
            terms = "set one of params.crd, kl, ce, l2 above 0, or params.lam=0"
            raise ValueError(f"{self.weight} weights no term: {terms}")
        return self

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: the server knows the u_i of absent clients, and the numbers
        of rows.
        """
        if aggregator.secure:
            return (
                ""
                if self.clients_per_round is None
                else 'set params.clients_per_round to "none": u_i are kept'
            )
        return "the numbers of rows are sent without noise" if aggregator.hidden else ""

    @property
    def rates(self) -> tuple[str, ...]:
        """The meta-model's, or ρ, which sets it."""
        return ("rho",) if self.meta_lr is None else ("meta_lr",)

    @property
    def exchanges(self) -> bool:
        """Whether clients take part."""
        return self.federated

    @property
    def weight(self) -> str:
        """The setting that weights R_h; empty if its weight is 0."""
        return next(
            (f"params.{k}={v}" for k, v in (("lam", self.lam), ("kd_lr", self.kd_lr)) if v), ""
        )

    @property
    def on_rows(self) -> bool:
        """Whether R_h needs the server's rows."""
        return bool(self.weight and (self.crd or self.kl or self.ce))

    @property
    def taught(self) -> bool:
        """Whether R_h needs the pretrained model."""
        return bool(self.weight and (self.crd or self.kl or self.l2))

    def penalty(self, clients: int) -> float:
        """ρ of each client, given their number."""
        return self.rho if self.rho is not None else 1 / (clients * (self.meta_lr or 1))


@final
class AugFLClient(Party[AugFLConfig]):
    """A client and its dual variable."""

    STATE = ("params", "buffers", "opt", "dual")
    ROLE = "client"
    CALLS = ("size", "update")
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """Line 1: y_i = 0."""
        self.network(self.context.build(), SGD(self.cfg.alpha or 1.0))
        self.dual = {k: torch.zeros_like(p) for k, p in self.params.items()}

    def size(self) -> Tensor:
        """The number of rows () int64, for w_i."""
        return self.row_count

    def update(
        self, *, t: int, weights: dict[str, Tensor], rho: float, rows: int
    ) -> dict[str, Tree]:
        """Lines 5-8, with θ in `weights`, ρ in `rho`, and the number of rows of all clients."""
        w, y, delta = self.row_count.double() / rows, self.dual, 1 / (10 * (t + 1) + 100)
        gradient = meta_gradient(self, weights, self.cfg.hvp, delta)  # line 5, (10)
        slope = {k: y[k] + w * g for k, g in gradient.items()}
        # line 6, (11)
        local = {k: theta.sub(slope[k], alpha=1 / rho) for k, theta in weights.items()}
        # line 7, (12)
        self.dual = {k: y[k].add(local[k] - theta, alpha=rho) for k, theta in weights.items()}
        return {"u": {k: self.dual[k].add(x, alpha=rho) for k, x in local.items()}}  # line 8

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the meta-model, and adapt it."""
        steps.load_and_adapt(self, eval_mode=eval_mode, broadcast=broadcast)


@final
class AugFLServer(Party[AugFLConfig]):
    """The server: the meta-model θ, its own rows, and what R_h needs."""

    ROLE = "server"
    STATE = ("params", "buffers", "opt", "rows", "duals", "teacher", "crd")

    def setup(self) -> None:
        """Line 2: θ^0. The pretrained model is read when it is first needed."""
        cfg, device = self.cfg, self.context.device
        network = self.context.build()
        self.network(Features(network) if cfg.on_rows else network, SGD(1.0))
        # 0 where unknown
        self.rows = torch.zeros(self.context.parties, dtype=torch.int64, device=device)
        self.duals: dict[str, dict[str, Tensor]] = {}  # y_i as the server knows them, by client
        self.teacher: dict[str, Any] = {}  # θ_p's features and logits on own rows, or its weights
        self.crd: dict[str, Any] = {}  # maps, banks and log Z of `fedloom.methods.meta.crd`
        if cfg.taught and self.context.pretrained is None:
            raise ConfigError(
                f"{cfg.weight} needs a pretrained model: name one in [pretrained], or set "
                "params.lam=0"
            )
        if cfg.on_rows and self.context.data is None:
            raise ConfigError(
                f"{cfg.weight} needs rows at the server: set data.server_rows, or params.lam=0"
            )
        if cfg.taught and self.context.encoder is not None:
            self._check(self.context.encoder())

    def _check(self, model: nn.Module) -> None:
        """Check that R_h can use a pretrained model of this architecture."""
        if self.cfg.crd and not hasattr(model, "features"):
            raise ModelError(
                "params.crd needs a pretrained model with a method `features`: choose another "
                "model, or use params.kl"
            )
        shapes = {k: p.shape for k, p in model.named_parameters()}
        if self.cfg.l2 and shapes != {k: p.shape for k, p in self.theta.items()}:
            raise ConfigError(
                "params.l2 needs a pretrained model with the architecture in models.pool"
            )

    @property
    def theta(self) -> dict[str, Tensor]:
        """θ by the clients' names."""
        return {own(k): p for k, p in self.params.items()}

    def broadcast(self) -> dict[str, Tree]:
        """Line 14: the meta-model."""
        return dict(self.theta)

    def count(self, sizes: Mapping[int, Tensor]) -> None:
        """Store the numbers of rows of these clients."""
        which = torch.tensor(list(sizes), dtype=torch.int64)
        counts = [int(n) for n in sizes.values()]
        self.rows = self.rows.index_put((which.to(self.rows.device),), self.rows.new_tensor(counts))

    def step(self, t: int, replies: Mapping[int, Any], rho: float, clients: Sequence[int]) -> None:
        """Line 11, (13), from the participants' u_i, if there are any; `clients` are all of the
        sums.
        """
        theta, n = self.theta, len(clients)
        sent = [
            {k: u - rho * theta[k] for k, u in reply["u"].items()} for reply in replies.values()
        ]
        if self.cfg.clients_per_round is not None:
            sent += [
                self.duals[str(i)] for i in clients if i not in replies and str(i) in self.duals
            ]
            self._recover(replies, theta, rho)
        elif self.cfg.federated:
            n = len(replies)
        moved = total(sent, theta, self.context.aggregator)  # Σ (u_i - ρ θ)
        lam = (
            (self.cfg.lam or 0.0) if self.cfg.kd_lr is None else self.cfg.kd_lr * rho * len(clients)
        )
        for k, g in self.transfer(t).items():
            moved[k] -= lam * n / len(clients) * g
        self.params = {k: p + moved[own(k)] / (n * rho) for k, p in self.params.items()}

    def _recover(self, replies: Mapping[int, Any], theta: Mapping[str, Tensor], rho: float) -> None:
        """Compute each y_i from u_i = y_i + ρ θ_i = ρ θ + 2 y_i - (the last y_i)."""
        duals = {}
        for i, reply in replies.items():
            before = self.duals.get(str(i), {})
            duals[str(i)] = {
                k: (u - rho * theta[k] + before.get(k, 0.0)) / 2 for k, u in reply["u"].items()
            }
        self.duals = {**self.duals, **duals}

    # -- R_h, section V ----------------------------------------------------------------------------

    def transfer(self, t: int) -> dict[str, Tensor]:
        """∇R_h(θ, θ_p) by the clients' names, the mean over round t's batches of own rows; empty if
        λ is 0.
        """
        cfg, slope = self.cfg, dict[str, Tensor]()
        if cfg.taught and not self.teacher:
            self.teacher = self._teacher_outputs()
        if cfg.on_rows:
            plan = self._plan(t)
            for which in plan:
                for k, g in self._slope(which.to(self.context.device)).items():
                    slope[own(k)] = (
                        slope[own(k)] + g / len(plan) if own(k) in slope else g / len(plan)
                    )
        if cfg.weight and cfg.l2:
            for k, p in self.theta.items():
                slope[k] = slope.get(k, 0.0) + 2 * cfg.l2 * (p - self.teacher["weights"][k])
        return slope

    def _plan(self, t: int) -> Tensor:
        """Round t's batches (T, B) of indices of own rows."""
        cfg, rng, rows = self.cfg, self.stream("knowledge transfer", t), len(self.data)
        size, batches = min(cfg.server_batch_size, rows), cfg.server_batches
        return sample_plan(rng, rows, batches, size) if batches else epoch_plan(rng, rows, 1, size)

    def _teacher_outputs(self) -> dict[str, Any]:
        """The pretrained model's features (n, d') and logits (n, K) on own rows, and its weights,
        as R_h needs them.
        """
        cfg, model, outputs = self.cfg, self.context.teacher(), dict[str, Any]()
        self._check(model)
        with torch.no_grad():
            parts = (
                torch.split(torch.arange(len(self.data), device=self.context.device), 256)
                if cfg.on_rows
                else ()
            )
            if cfg.crd:
                features: Any = model.features
                outputs["features"] = torch.cat([features(self.data.x(part)) for part in parts])
            if cfg.kl:
                outputs["logits"] = torch.cat([model(self.data.x(part)) for part in parts])
        if cfg.l2:
            outputs["weights"] = {k: p.detach() for k, p in model.named_parameters()}
        try:
            check_finite(outputs)
        except MessageError as error:
            text = (
                f"the pretrained model's outputs on the server's rows are {error}: choose "
                "another model"
            )
            raise ModelError(text) from None
        return outputs

    def _slope(self, which: Tensor) -> dict[str, Tensor]:
        """The gradient of R_h, but for `l2`, on own rows `which` (B,), by the server's names of the
        parameters. The state of CRD is updated.
        """
        # The network gives features (B, d), as `setup` wraps it; its last layer makes logits of
        # them.
        cfg, task, y = self.cfg, self.context.task, self.data.y(which)
        features = self.model(self.data.x(which))
        logits = linear(features, self.live)
        terms, maps = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        if cfg.ce:
            terms["ce"] = cfg.ce * task.loss(logits, y)
        if cfg.kl:
            temperature = cfg.kl_temperature if task.kind == "classes" else 1.0  # numbers have none
            target = task.soft(self.teacher["logits"][which], temperature)
            # squared, as a temperature divides the gradient of the divergence by its square
            terms["kl"] = cfg.kl * temperature**2 * task.distill(target, logits, temperature)

        # CRD: both networks' features as unit vectors, by linear maps that learn besides θ. `maps`
        # are copies whose gradients are wanted; the state keeps tensors without.
        if cfg.crd:
            if not self.crd:  # the first batch, which knows the widths of the features
                with self.seeded("crd"):
                    teacher_width = self.teacher["features"].shape[1]
                    begun = crd.init(len(self.data), features.shape[1], teacher_width, cfg.crd_dim)
                self.crd = map_tensors(lambda x: x.to(self.context.device), begun)  # type: ignore[assignment]
            maps = {
                net: {k: w.clone().requires_grad_() for k, w in m.items()}
                for net, m in self.crd["maps"].items()
            }
            vectors = crd.embed(
                maps, {"student": features, "teacher": self.teacher["features"][which]}
            )
            # negative_rows (B, n): for each row of the batch those of other classes among all own
            # rows; of a number all others
            of, every = torch.arange(len(self.data), device=which.device), task.kind == "number"
            negative_rows = which[:, None] != of if every else y[:, None] != self.data.y(of)
            value, z = crd.loss(
                self.crd, vectors, which, negative_rows, cfg.crd_temperature, cfg.crd_negatives
            )
            terms["crd"] = cfg.crd * value

        # One backward pass for θ and the maps, whose names have a space, as no parameter's has. A
        # parameter that no term uses gets 0, such as those of the last layer with CRD alone.
        for name, term in terms.items():
            self.note(f"transfer {name}", term.detach())
        tuned = {**self.live, **{f"{net} {k}": w for net, m in maps.items() for k, w in m.items()}}
        total = torch.stack([*terms.values()]).sum()
        slopes = dict(
            zip(
                tuned,
                torch.autograd.grad(total, [*tuned.values()], materialize_grads=True),
                strict=True,
            )
        )

        # One step of the maps; the banks get the batch's vectors, by the maps before it.
        if cfg.crd:
            gradients = {net: {k: slopes.pop(f"{net} {k}") for k in m} for net, m in maps.items()}
            moved = crd.descend(self.crd["maps"], gradients, cfg.crd_lr, cfg.crd_weight_decay)
            banks = crd.update_banks(self.crd["banks"], which, vectors, cfg.crd_momentum)
            self.crd = {"maps": moved, "banks": banks, "z": z}
        return slopes


def total(trees: Sequence[Any], like: Mapping[str, Tensor], how: Aggregator) -> dict[str, Tensor]:
    """The sum of trees like `like`; by a robust rule their number times their aggregate, around
    zero.
    """
    found = {k: torch.zeros_like(x) for k, x in like.items()}
    if how.even and trees:
        return {k: len(trees) * x for k, x in how.combine(trees, around=found).items()}
    for tree in trees:
        for k, x in tree.items():
            found[k] += x
    return found


def own(name: str) -> str:
    """A client's name of the parameter that the server calls `name`."""
    return name.removeprefix("network.")


def round(
    fed: Federation, server: AugFLServer, clients: Sequence[int], cfg: AugFLConfig, t: int
) -> Iterator[str]:
    """Algorithm 1, lines 3-13, for one t."""
    if not cfg.federated:
        server.step(t, {}, cfg.penalty(len(clients)), clients)
        yield "round"
        return
    server.count(
        fed.call([i for i in clients if not server.rows[i]], "size", expect=Shape("int64"))
    )
    known = [i for i in clients if server.rows[i]]
    chosen = fed.sample(known, cfg.clients_per_round, t)
    rho = cfg.penalty(max(1, len(known)))
    rows = server.rows[known]  # of which a robust rule takes the median as each one's
    count = int(len(rows) * rows.median() if fed.aggregator.even and len(rows) else rows.sum())
    shared = {"t": t, "weights": server.theta, "rho": rho, "rows": count}
    # lines 4-10
    found = fed.mean(chosen, "update", shared=shared, expect={"u": dict(fed.param_shapes)})
    if found is not None:  # line 11: the sum also has the last u_i of absent clients
        replies = dict.fromkeys(found.ids, found.value) if fed.aggregator.secure else found.replies
        server.step(t, replies, rho, known)
    yield "round"


PAPER = {"alpha": 0.03, "meta_lr": None, "rho": 0.7, "lam": 5.0, "hvp": "fd", "crd_lr": 0.002}
AUGFL = Method(
    name="augfl",
    title="Federated meta-learning regularized by a server's private pretrained model",
    paper="S. Yue, Z. Qin et al.: AugFL: Augmenting Federated Learning with Pretrained Models, 2025",  # noqa: E501
    tasks=EVERY_TASK,
    local=("class_weights",),
    no_local="its clients solve (11) in closed form, without an optimizer",
    family="meta",
    config=AugFLConfig,
    round=round,
    client=AugFLClient,
    server=AugFLServer,
    presets={
        "paper": PAPER,
        "authors_code": {
            **PAPER,
            "alpha": 0.05,
            "ce": 1.0,
            "crd": 0.8,
            "server_batches": None,
            "batchnorm": "batch",
        },
    },
    needs=("one network", "server rows", "pretrained server model"),
)

METHODS = (
    AUGFL,
    replace(
        AUGFL, name="kd-only", local=(), no_local="no client trains",
        title="AugFL without its clients: the server distils its pretrained model",
        fixed={"federated": False},
    ),
    replace(
        AUGFL, name="server-ce-only", local=(), no_local="no client trains",
        title="AugFL without clients and pretrained model: the server trains on its own labels",
        fixed={"federated": False, "crd": 0.0, "ce": 1.0}, needs=("one network", "server rows"),
    ),
    replace(
        AUGFL, name="local-only", local=(), no_local="no client trains",
        title="Every client adapts the initial weights: the lower bound for methods that adapt",
        fixed={"federated": False, "lam": 0.0}, needs=("one network",),
    ),
)  # fmt: skip
