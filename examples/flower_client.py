"""A Flower client as a fedloom party: your `NumPyClient` trains, fedloom averages, compares and reports.

Replace `FlowerClient` by your own, which takes a network and a list of batches.
"""

import torch
from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.message import Shape
from fedloom.core.optim import SGD


class FlowerClient:  # as in Flower's PyTorch quickstart: (flwr.client.NumPyClient)
    def __init__(self, net, batches, lr):
        self.net, self.batches, self.lr = net, batches, lr

    def fit(self, parameters, config):
        state = {k: torch.tensor(v) for k, v in zip(self.net.state_dict(), parameters, strict=True)}
        self.net.load_state_dict(state)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=self.lr)
        for x, y in self.batches:
            optimizer.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            optimizer.step()
        return [v.numpy() for v in self.net.state_dict().values()], len(self.batches), {}


class Config(MethodConfig):
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.05

    @property
    def iterations_per_round(self):
        return self.epochs


class Client(Party[Config]):
    STATE = ("params", "buffers", "opt")
    CALLS = ("update",)
    MEANS = ("update",)

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))

    def update(self, *, t, weights):
        batches = list(self.epochs(t, epochs=self.cfg.epochs, size=self.cfg.batch_size))
        client = FlowerClient(self.context.build(), batches, self.cfg.lr)
        arrays, _, _ = client.fit([w.numpy() for w in weights.values()], {"server_round": t + 1})
        return {"weights": dict(zip(weights, map(torch.from_numpy, arrays), strict=True)), "rows": self.row_count}

    def prepare(self, *, eval_mode, broadcast):
        self.params = broadcast["weights"]


class Server(Party[Config]):
    STATE = ("weights",)

    def setup(self):
        self.weights = {k: v.detach() for k, v in self.context.build().state_dict().items()}

    def broadcast(self):
        return {"weights": self.weights}


def round(fed, server, clients, cfg, t):
    expect = {"weights": server.weights, "rows": Shape("int64")}
    sent = {"t": t, "weights": server.weights}
    mean = fed.mean(clients, "update", shared=sent, expect=expect, weight="rows", around={"weights": server.weights})
    if mean is not None:
        server.weights = mean.value["weights"]
    yield "round"


METHODS = (
    Method(
        "flower-client",
        "A Flower client",
        "of Flower",
        "example",
        Config,
        round,
        Client,
        Server,
        needs=("one network",),
    ),
)
