"""FedDF: weights averaged among clients of one architecture, then the ensemble of all clients
distilled into each.

Paper: T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble Distillation for Robust Model Fusion in
Federated Learning", NeurIPS 2020; its heterogeneous form, for clients of several architectures
("prototype groups"). p_g is what the model of group g predicts, f_n are the logits of client n's
model:

    start of g = mean of its clients' weights, weighted by rows
    loss of g  = KL(softmax(mean_n f_n) || p_g) on unlabeled public rows, the mean over all clients
    of all groups

Messages: a network's weights (d numbers) and statistics up and down, and a row count up. The
statistics are all float buffers, such as BatchNorm's running means and variances: the server needs
them to run every client's model. So no
client is a black box here: the server knows every architecture and sees every weight. Nobody sends
    logits.

Without distillation it is FedAvg as FedAL's experiments compare it, `fedavg-adam`: the local
training is that of the family, and clients of different architectures share a federation, but each
group averages only its own models.

Differs:
    The server makes a fixed number of steps at a constant rate. The original, as we recall it,
        makes up to 10,000 with a decaying rate and stops early by a validation set, which does not
        exist here.
    Adam is new for every fusion, as each is a separate optimization. The clients keep one Adam for
        the whole run, as in this family; the original trains with SGD.
    If architectures differ, "the ensemble" means all clients' models, as the authors answered a
    reader. A group without replies keeps its model as its start, and is taught like the others.
    A model whose logits on the round's public rows are not finite is excluded from the ensemble and
        from its group's mean. If a mean is not finite, its group keeps its previous model.
    FedAL's paper gives no τ for FedAvg, and neither server steps nor rate for FedDF. These are our
        choice, with FedDF's τ for `fedavg-adam`.
    Teachers are in evaluation mode, students in training mode: their statistics move on public
    rows. A client that is not sampled in a round is evaluated with the model of its group, which is
    not counted as a message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Adam,
    Aggregator,
    ClientContext,
    Combined,
    Federation,
    Method,
    Network,
    Party,
    Shape,
    Task,
    Tree,
    map_tensors,
)
from fedloom.methods.distillation import trust
from fedloom.methods.distillation.steps import TrainingConfig
from fedloom.methods.steps import label_loss

Model: TypeAlias = dict[str, dict[str, Tensor]]
"""The `weights` and the `statistics` of a network, by name, as they are sent."""


class FedAvgAdamConfig(TrainingConfig):
    """Settings of `fedavg-adam`. τ is that of FedDF in FedAL's section VI-A."""

    tau: int = Field(10, ge=1)
    """Local steps in a round (τ)."""


class FedDFConfig(trust.TrustSettings, TrainingConfig):
    """Settings of `feddf`. τ is that of FedAL's section VI-A."""

    tau: int = Field(10, ge=1)
    """Local steps in a round (τ)."""
    server_steps: int = Field(50, ge=0)
    """Distillation steps of the server for each group's model in a round; 0 for averaging only."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server's Adam."""

    def stages_in_round(self, t: int) -> int:
        """The average, and the distillation if the server takes steps."""
        return 2 if self.server_steps else 1

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: the server asks each client's model."""
        if aggregator.hidden:
            return (
                "the server distils the answers of each client's model: use fedavg-adam, which "
                "only averages"
            )
        return super().refuses(aggregator)


@final
class FedDFClient(Party[TrainingConfig]):
    """A client, also of `fedavg-adam`. It has the architecture of its group."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "group")
    CALLS = ("introduce", "update")
    MEANS = ("update",)
    TELLS = (("introduces", ("introduce",)),)
    introduce = trust.introduce

    def setup(self) -> None:
        """The group's initial network, and the group's number."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        # as state, so that an engine can batch clients of several groups
        self.group = self.context.group

    def update(
        self, *, t: int, weights: dict[str, Tensor], statistics: dict[str, Tensor]
    ) -> dict[str, Tree]:
        """τ steps on own rows, from the group's model."""
        set_model(self.net, weights, statistics)
        self.train(
            partial(label_loss, self), self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)
        )
        return {**model_of(self.net), "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the group's model."""
        if broadcast:
            set_model(self.net, **broadcast[str(self.group)])  # type: ignore[arg-type]


@final
class FedDFServer(trust.TrustingServer[FedDFConfig]):
    """The server of `feddf`."""

    ROLE = "server"
    STATE = ("models",)
    models: dict[str, Model]

    def setup(self) -> None:
        """`models`: the model of each group by the group's number, with its initial weights."""
        self.models = first_models(self.context)
        trust.init(self)

    def broadcast(self) -> dict[str, Tree]:
        """The groups' models."""
        return dict(self.models)

    def ensemble(self, t: int, replies: Mapping[int, Any]) -> dict[int, Tensor]:
        """Each client's logits (m, K) on the public rows of round t, if they are finite."""
        x = self.public_set.rows.x(distinct_rows(self, t)[0])
        teachers, logits = group_networks(self), {}
        for n, reply in replies.items():
            teacher = teachers[str(self.context.groups[n])]
            set_model(teacher, reply["weights"], reply["statistics"])
            logits[n] = teacher.infer(x)
        finite = {n: f for n, f in logits.items() if f.isfinite().all()}
        self.note("rejected teachers", len(logits) - len(finite))
        return finite

    def distil(self, t: int, logits: Mapping[int, Tensor]) -> None:
        """Distil the ensemble into the model of each group, on the public batches of round t."""
        numbers, batches = distinct_rows(self, t)
        x, f, losses = self.public_set.rows.x(numbers), torch.stack([*logits.values()]), []
        task = self.context.task
        if self.cfg.trust == "uniform":
            target = task.soft(self.context.aggregator.combine(list(f), kind="logits"))
        else:
            target, _ = trust.average(self, list(logits), lambda: numbers, task.soft(f), f)
        models: dict[str, Any] = {}
        for g, network in group_networks(self).items():
            set_model(network, **self.models[g])
            losses.append(distil(task, network, x, target, batches))
            models[g] = map_tensors(torch.clone, model_of(network))
        self.models = models
        self.note("distillation loss", torch.stack(losses).mean())


@final
class FedAvgAdamServer(Party[FedAvgAdamConfig]):
    """The server of `fedavg-adam`: that of `feddf` without its distillation."""

    ROLE = "averaging"
    STATE = ("models",)
    models: dict[str, Model]
    broadcast = FedDFServer.broadcast

    def setup(self) -> None:
        """`models`, as those of `feddf`."""
        self.models = first_models(self.context)


def distinct_rows(server: Party[FedDFConfig], t: int) -> tuple[Tensor, Tensor]:
    """The numbers (m,) of round t's public rows without repetition, and batches (S, B) of positions
    among them.
    """
    plan = server.public_rows(t, steps=server.cfg.server_steps, size=server.cfg.batch_size)
    numbers, batches = torch.unique(plan.to(server.context.device), return_inverse=True)
    return numbers, batches


def group_networks(server: Party[FedDFConfig]) -> dict[str, Network]:
    """A network of each group, with a new Adam."""
    device, rate = server.context.device, server.cfg.server_lr
    return {
        str(g): Network(make().to(device), Adam(rate))
        for g, make in enumerate(server.context.group_networks)
    }


def distil(task: Task, network: Network, x: Tensor, target: Tensor, batches: Tensor) -> Tensor:
    """One step towards the target (n, K) on each batch (S, B) of numbers of rows x (n, ...); the
    last loss ().
    """

    def loss(rows: Tensor) -> Tensor:
        return task.distill(target[rows], network(x[rows]))

    return [network.minimize(loss, rows) for rows in batches][-1]


# -- models of groups, also for FedDF-AL -----------------------------------------------------------


def first_models(context: ClientContext) -> dict[str, Model]:
    """At a server: the initial model of each group."""
    networks = [make().to(context.device) for make in context.group_networks]
    return {
        str(g): {
            "weights": {k: p.detach() for k, p in network.named_parameters() if p.requires_grad},
            "statistics": floats_of(dict(network.named_buffers())),
        }
        for g, network in enumerate(networks)
    }


class GroupModels(Protocol):
    """A server with a model of each group of clients, by the group's number."""

    models: dict[str, Model]

    @property
    def context(self) -> ClientContext:
        """The server's context, with the group of each client."""

    def note(self, name: str, value: Tensor | float) -> None:
        """Record a diagnostic of this round."""


def replace_models(server: GroupModels, means: Mapping[str, Combined]) -> None:
    """Replace the model of each group by the mean of its clients' models; not by one that is not
    finite, as the mean of finite numbers may be. A group without a mean keeps its model.
    """
    finite = {
        g: mean.value
        for g, mean in means.items()
        if all(x.isfinite().all() for part in mean.value.values() for x in part.values())
    }
    server.models = {**server.models, **finite}
    server.note("rejected means", len(means) - len(finite))


def group_means(
    fed: Federation, server: GroupModels, replies: Mapping[int, Any]
) -> dict[str, Combined]:
    """The mean of each group's models in these replies, weighted by rows; without groups of too few
    replies.
    """
    found: dict[str, Combined] = {}
    for g, ids in members(server, replies).items():
        mean = fed.combine({n: replies[n] for n in ids}, weight="rows", around=server.models[g])
        if mean is not None:
            found[g] = mean
    return found


def members(server: GroupModels, clients: Iterable[int]) -> dict[str, list[int]]:
    """These clients, by the group's number."""
    found: dict[str, list[int]] = {}
    for n in clients:
        found.setdefault(str(server.context.groups[n]), []).append(n)
    return found


def models_of(server: GroupModels) -> dict[str, Any]:
    """For `fed.means`: replies are models of groups, changed from the server's, and weighted by
    rows.
    """
    expect = {g: {**model, "rows": Shape("int64")} for g, model in server.models.items()}
    return {"expect": expect, "weight": "rows", "around": server.models}


def of_each(
    models: Mapping[str, Model], groups: Sequence[int], clients: Iterable[int]
) -> dict[int, Model]:
    """The model of each client's group."""
    return {n: models[str(groups[n])] for n in clients}


def replies_like(models: Mapping[int, Model]) -> dict[int, Any]:
    """Template of the reply of each client that has a model like this."""
    return {n: {**model, "rows": Shape("int64")} for n, model in models.items()}


def model_of(network: Network) -> Model:
    """The model of a network: views of its tensors."""
    state = network.state()
    return {"weights": state["params"], "statistics": floats_of(state["buffers"])}


def set_model(
    network: Network, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]
) -> None:
    """Load a model into a network."""
    network.load("params", weights)
    network.load("buffers", {**network.state()["buffers"], **statistics})


def floats_of(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float buffers, without counters."""
    return {k: b for k, b in buffers.items() if b.is_floating_point()}


# -- the round -------------------------------------------------------------------------------------


def trained(
    fed: Federation, server: GroupModels, clients: Sequence[int], cfg: TrainingConfig, t: int
) -> dict[int, Any]:
    """The models of round t's clients after local training."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    models = of_each(server.models, server.context.groups, chosen)
    return fed.call(chosen, "update", shared={"t": t}, each=models, expects=replies_like(models))


def average_round(
    fed: Federation, server: GroupModels, clients: Sequence[int], cfg: FedAvgAdamConfig, t: int
) -> Iterator[str]:
    """One round of `fedavg-adam`."""
    groups = members(server, fed.sample(clients, cfg.clients_per_round, t))
    means = fed.means(groups, "update", shared={"t": t}, each=server.models, **models_of(server))
    replace_models(server, means)
    yield "average"


def round(
    fed: Federation, server: FedDFServer, clients: Sequence[int], cfg: FedDFConfig, t: int
) -> Iterator[str]:
    """One round of `feddf`; without server steps, one of `fedavg-adam`."""
    trust.meet(
        fed, server, fed.sample(clients, cfg.clients_per_round, t) if cfg.server_steps else ()
    )
    replies = trained(fed, server, clients, cfg, t)
    logits = server.ensemble(t, replies) if cfg.server_steps else {}
    kept = {n: replies[n] for n in logits} if cfg.server_steps else replies
    replace_models(server, group_means(fed, server, kept))
    yield "average"
    if not cfg.server_steps:
        return
    if len(logits) >= fed.aggregator.least:
        server.distil(t, logits)
    yield "distil"


FEDDF = Method(
    name="feddf",
    title="Weights averaged by architecture, then all clients' models distilled into each",
    paper="T. Lin et al.: Ensemble Distillation for Robust Model Fusion in Federated Learning, "
    "NeurIPS 2020",
    family="distillation",
    config=FedDFConfig,
    round=round,
    client=FedDFClient,
    server=FedDFServer,
    presets=trust.PRESETS,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("public rows", "public rows at the server", "architecture groups"),
)

METHODS = (
    FEDDF,
    replace(
        FEDDF,
        name="fedavg-adam",
        local=("weight_decay", "clip", "schedule", "class_weights"),
        no_local="its optimizer is Adam by definition",
        title="FedAvg in FedAL's setting: τ steps of Adam, averaged among clients of one "
        "architecture",
        paper="H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from "
        "Decentralized Data, 2017",
        config=FedAvgAdamConfig,
        round=average_round,
        server=FedAvgAdamServer,
        needs=("architecture groups",),
    ),
)
