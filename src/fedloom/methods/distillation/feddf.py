"""FedDF: weights averaged among clients of one architecture, then every client's model teaches each average.

Paper: T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning",
NeurIPS 2020; its heterogeneous form, for clients of several architectures ("prototype groups"). p_g is what the model
of group g predicts, f_n are the logits of client n's model:

    start of g = mean of its clients' weights, weighted by rows
    loss of g  = KL(softmax(mean_n f_n) || p_g) on unlabelled public rows, the mean over all clients of all groups

Up and down cross a network's weights (d numbers), its statistics, and up a row count. The statistics are all float
buffers, such as BatchNorm's running means and variances: the server runs every client's model, and can't without them.
So no client is a black box here: the server knows every architecture and sees every weight. Nobody sends logits.

Without distillation it is FedAvg as FedAL's experiments need it beside the others, `fedavg-adam`: the local
training is the family's, and clients of different architectures are in one federation, each group for itself.

Differs:
    The server makes a fixed number of steps at a constant rate. The original, as we recall it, makes up to 10,000 with
        a falling rate and stops early by a validation set, which there is none of here.
    Adam is new for every fusion, as each is an optimisation of its own. At the clients it is the family's, kept for
        life; the original trains with SGD.
    What "the ensemble" is where architectures differ: all clients' models, as its authors answered a reader.
    A group of which nobody was heard keeps its model as its start, and is taught like the others.
    A model whose logits on the round's public rows are not finite is left out: it teaches nobody, and is in no mean.
        Nor is a mean taken over that is not finite itself: its group keeps the model that it had.
    FedAL's paper gives FedAvg no τ, and FedDF no number of server steps and no rate. Those here are our choice, with
        FedDF's τ for `fedavg-adam`.
    Teachers are in evaluation mode, the taught in training mode: so its statistics move on public rows.
    Whoever takes no part in a round is evaluated with the model of its group, which is not counted as a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.context import Site
from fedloom.core.federation import Federation
from fedloom.core.losses import kl
from fedloom.core.message import Shape, Tree, weighted_mean
from fedloom.core.method import Method
from fedloom.core.network import Network
from fedloom.core.optim import Adam
from fedloom.core.party import Party
from fedloom.methods.distiller import Distiller, DistillerConfig, copied

Model: TypeAlias = dict[str, dict[str, Tensor]]
"""What crosses of a network: its `weights` and its `statistics`, by name."""


class AveragedConfig(DistillerConfig):
    """Of `fedavg-adam`. τ is what FedAL's section VI-A gives FedDF."""

    tau: int = Field(10, ge=1)
    """Local steps of a round (τ)."""


class Config(AveragedConfig):
    """Of `feddf`."""

    server_steps: int = Field(50, ge=0)
    """Steps by which the server distils the model of each group in a round; 0 for averaging alone."""
    server_lr: float = Field(1e-3, gt=0)
    """Adam's rate at the server."""


ConfigT = TypeVar("ConfigT", bound=AveragedConfig)


class Client(Distiller[AveragedConfig]):
    """A client. It has the architecture of its group."""

    STATE: ClassVar[tuple[str, ...]] = (*Distiller.STATE, "group")
    CALLS = ("update",)

    def setup(self) -> None:
        """The network that its group begins with, and the group's number."""
        super().setup()
        self.group = self.site.group  # as state, so that an engine can do clients of several groups at once

    def update(self, *, t: int, weights: dict[str, Tensor], statistics: dict[str, Tensor]) -> dict[str, Tree]:
        """τ steps on own rows, from the group's model."""
        wear(self, weights, statistics)
        self.local_train(t=t)
        return {**model_of(self), "rows": self.row_count}

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """Before an evaluation: take the group's model."""
        if handout:
            wear(self, **handout[str(self.group)])  # type: ignore[arg-type]


class Averaging(Party[ConfigT]):
    """The server of `fedavg-adam`, and the model of each group by the group's number."""

    STATE = ("models",)

    def setup(self) -> None:
        """What each group begins with."""
        self.models = first_models(self.site)

    def handout(self) -> dict[str, Tree]:
        """Today's models."""
        return dict(self.models)

    def average(self, replies: Mapping[int, Any]) -> None:
        """The mean of each group's models."""
        self.models, refused = averaged(self.models, self.site.groups, replies)
        self.note("means left out", refused)


class Server(Averaging[Config]):
    """The server of `feddf`."""

    def ask(self, t: int, replies: Mapping[int, Any]) -> dict[int, Tensor]:
        """What each client's model answers to the public rows of round t (m, K), if that is finite."""
        x, _ = self.public_rows_once(t)
        teachers, logits = self.networks(), {}
        for n, reply in replies.items():
            teacher = teachers[str(self.site.groups[n])]
            put(teacher, reply)
            logits[n] = teacher.infer(x)
        fine = {n: f for n, f in logits.items() if f.isfinite().all()}
        self.note("teachers left out", len(logits) - len(fine))
        return fine

    def distil(self, t: int, logits: Mapping[int, Tensor]) -> None:
        """Teach the model of each group what the ensemble says of the public batches of round t."""
        x, batches = self.public_rows_once(t)
        target, models, losses = F.softmax(torch.stack([*logits.values()]).mean(0), -1), {}, []
        for g, network in self.networks().items():
            put(network, self.models[g])
            losses.append(learn(network, x, target, batches))
            models[g] = taken(network)
        self.models = models
        self.note("distillation loss", torch.stack(losses).mean())

    def public_rows_once(self, t: int) -> tuple[Tensor, Tensor]:
        """Round t's public rows (m, ...), each once as teachers need it, and batches (S, B) of their numbers."""
        plan = self.public_rows(t, steps=self.cfg.server_steps, size=self.cfg.batch_size)
        numbers, batches = torch.unique(plan.to(self.site.device), return_inverse=True)
        return self.public_set.rows.x(numbers), batches

    def networks(self) -> dict[str, Network]:
        """A network of each group, with an Adam that has made no step."""
        device, rate = self.site.device, self.cfg.server_lr
        return {str(g): Network(make().to(device), Adam(rate)) for g, make in enumerate(self.site.group_networks)}


def learn(network: Network, x: Tensor, target: Tensor, batches: Tensor) -> Tensor:
    """One step towards the target (n, K) on each batch (S, B) of numbers of rows x (n, ...); the last loss ()."""

    def loss(rows: Tensor) -> Tensor:
        return kl(target[rows], network(x[rows]))

    return [network.minimise(loss, rows) for rows in batches][-1]


# -- models of groups: also for other pages that average among clients of one architecture ------------------------


def first_models(site: Site) -> dict[str, Model]:
    """At a server: what the clients of each group begin with."""
    networks = [make().to(site.device) for make in site.group_networks]
    return {
        str(g): {
            "weights": {k: p.detach() for k, p in network.named_parameters() if p.requires_grad},
            "statistics": floats_of(dict(network.named_buffers())),
        }
        for g, network in enumerate(networks)
    }


def members(groups: Sequence[int], clients: Iterable[int]) -> dict[str, list[int]]:
    """Those clients by the number of their group."""
    found: dict[str, list[int]] = {}
    for n in clients:
        found.setdefault(str(groups[n]), []).append(n)
    return found


def averaged(
    models: Mapping[str, Model], groups: Sequence[int], replies: Mapping[int, Any]
) -> tuple[dict[str, Model], int]:
    """The mean of what each group's clients sent, weighted by rows; as it was where nobody was heard.

    A client that says it has no rows has no weight. A mean that is not finite, as finite numbers can have one, is not
    taken over either.

    Returns:
        The models, and of how many groups the mean was not finite.
    """
    means, refused = dict(models), 0
    heard = [n for n, reply in replies.items() if int(reply["rows"]) > 0]
    for group, who in members(groups, heard).items():
        sent = [{k: replies[n][k] for k in ("weights", "statistics")} for n in who]
        mean: Any = weighted_mean(sent, [int(replies[n]["rows"]) for n in who])
        if all(x.isfinite().all() for part in mean.values() for x in part.values()):
            means[group] = mean
        else:
            refused += 1
    return means, refused


def of_each(models: Mapping[str, Model], groups: Sequence[int], clients: Iterable[int]) -> dict[int, Model]:
    """The model of each client's group."""
    return {n: models[str(groups[n])] for n in clients}


def replies_like(models: Mapping[int, Model]) -> dict[int, Any]:
    """Template of what each client sends that has a model like this."""
    return {n: {**model, "rows": Shape("int64")} for n, model in models.items()}


def model_of(party: Party[Any]) -> Model:
    """What crosses of a party's network."""
    return {"weights": party.params, "statistics": floats_of(party.buffers)}


def wear(party: Party[Any], weights: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
    """Let a party's network be this model."""
    party.params = weights
    party.buffers = {**party.buffers, **statistics}


def put(network: Network, model: Mapping[str, Any]) -> None:
    """Let a network be this model."""
    network.load("params", model["weights"])
    network.load("buffers", {**network.state()["buffers"], **model["statistics"]})


def taken(network: Network) -> Model:
    """A copy of the model that a network is."""
    weights, statistics = network.state()["params"], floats_of(network.state()["buffers"])
    return {"weights": copied(weights), "statistics": copied(statistics)}


def floats_of(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float ones; counters stay where they are."""
    return {k: b for k, b in buffers.items() if b.is_floating_point()}


# -- the round ---------------------------------------------------------------------------------------------------


def trained(
    fed: Federation, server: Averaging[Any], clients: Sequence[int], cfg: AveragedConfig, t: int
) -> dict[int, Any]:
    """What the models of round t's clients have become."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    models = of_each(server.models, server.site.groups, chosen)
    return fed.call(chosen, "update", shared={"t": t}, each=models, expects=replies_like(models))


def average_round(
    fed: Federation, server: Averaging[Any], clients: Sequence[int], cfg: AveragedConfig, t: int
) -> Iterator[str]:
    """One round of `fedavg-adam`."""
    server.average(trained(fed, server, clients, cfg, t))
    yield "average"


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One pass of the algorithm's outer loop."""
    if not cfg.server_steps:
        yield from average_round(fed, server, clients, cfg, t)
        return
    replies = trained(fed, server, clients, cfg, t)
    logits = server.ask(t, replies)
    server.average({n: replies[n] for n in logits})
    yield "average"
    if logits:
        server.distil(t, logits)
    yield "distil"


FEDDF = Method(
    name="feddf",
    title="Weights averaged by architecture, then all clients' models teach each average",
    paper="T. Lin et al.: Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020",
    family="distillation",
    config=Config,
    round=round,
    client=Client,
    server=Server,
    needs=("public rows", "public rows at the server", "architecture groups"),
)

METHODS = (
    FEDDF,
    replace(
        FEDDF,
        name="fedavg-adam",
        title="FedAvg in FedAL's setting: τ steps of a kept Adam, averaged among clients of one architecture",
        paper="H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
        config=AveragedConfig,
        round=average_round,
        server=Averaging,
        needs=("architecture groups",),
    ),
)
