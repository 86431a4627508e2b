"""A PFLlib client as a fedloom party: its `train` trains, fedloom averages, compares and reports.

Replace `make` by your own client. PFLlib is no package: put its folder `system` on the path, and
return `clientAVG(args, id, train_samples=rows, test_samples=0)` with `load_train_data` set to a
function that returns the batches. A client is made anew in every round: what it keeps beside its
`model` is lost.
"""

from copy import deepcopy

import torch
from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.message import Shape
from fedloom.core.optim import SGD


class LikePFLlib:
    """The part of PFLlib's `clientAVG` that a round uses, for a first run without PFLlib."""

    def __init__(self, model, batches, rows, lr):
        self.model, self.train_samples = model, rows
        self.load_train_data = lambda: batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def set_parameters(self, model):
        for new, old in zip(model.parameters(), self.model.parameters(), strict=True):
            old.data = new.data.clone()

    def train(self):
        for x, y in self.load_train_data():
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def make(model, batches, rows, cfg):
    return LikePFLlib(model, batches, rows, cfg.lr)


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
    # no reply is passed on, by class, or an answer about rows; without this nodes assume all three
    TELLS = ()

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))

    def update(self, *, t, weights):
        batches = list(self.epochs(t, epochs=self.cfg.epochs, size=self.cfg.batch_size))
        model = self.context.build()
        model.load_state_dict(weights)
        client = make(deepcopy(model), batches, len(self.data), self.cfg)
        client.set_parameters(model)
        client.train()
        rows = torch.tensor(client.train_samples)
        return {
            "weights": {k: v.detach() for k, v in client.model.state_dict().items()},
            "rows": rows,
        }

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
    mean = fed.mean(
        clients,
        "update",
        shared=sent,
        expect=expect,
        weight="rows",
        around={"weights": server.weights},
    )
    if mean is not None:
        server.weights = mean.value["weights"]
    yield "round"


ABOUT = ("pfllib-client", "A PFLlib client", "of PFLlib", "example")
METHODS = (Method(*ABOUT, Config, round, Client, Server, needs=("one network",)),)
