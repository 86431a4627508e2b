"""SCAFFOLD: S. P. Karimireddy et al., "Stochastic Controlled Averaging" (ICML 2020), Algorithm 1,
option II.
"""

import torch
from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.optim import SGD


class Config(MethodConfig):
    steps: int = 10
    batch_size: int = 32
    lr: float = 0.05

    @property
    def iterations_per_round(self):
        return self.steps


class Client(Party[Config]):
    STATE = ("params", "buffers", "opt", "control")
    CALLS = ("receive", "update")
    MEANS = ("update",)
    # no reply is passed on, by class, or an answer about rows; without this nodes assume all three
    TELLS = ()

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))
        self.control = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def receive(self, *, weights):
        self.params = weights

    def update(self, *, t, weights, control):
        self.params = weights
        own = self.control

        def loss(x, y):  # the gradient of the second term is c - c_i, which line 10 adds
            correction = sum(((control[n] - own[n]) * self.live[n]).sum() for n in own)
            return F.cross_entropy(self.model(x), y) + correction

        self.train(loss, self.batches(t, steps=self.cfg.steps, size=self.cfg.batch_size))
        scale = 1 / (self.cfg.steps * self.cfg.lr)
        # line 12
        self.control = {
            n: own[n] - control[n] + scale * (weights[n] - p) for n, p in self.params.items()
        }
        # line 13
        return {"weights": self.params, "control": {n: self.control[n] - own[n] for n in own}}


class Server(Party[Config]):
    STATE = ("weights", "control")

    def setup(self):
        self.weights = {name: p.detach() for name, p in self.context.build().named_parameters()}
        self.control = {name: torch.zeros_like(p) for name, p in self.weights.items()}

    def move(self, mean, share):  # lines 16 and 17, with a global step size of 1
        self.weights = mean["weights"]
        self.control = {n: c + share * mean["control"][n] for n, c in self.control.items()}


def round(fed, server, clients, cfg, t):
    sent = {"weights": server.weights, "control": server.control}
    still = {
        "weights": server.weights,
        "control": {n: torch.zeros_like(c) for n, c in server.control.items()},
    }
    mean = fed.mean(clients, "update", shared={"t": t, **sent}, expect=sent, around=still)
    if mean is not None:
        server.move(mean.value, len(mean.ids) / len(clients))
    fed.call(clients, "receive", shared={"weights": server.weights})
    yield "round"


ABOUT = ("scaffold", "Control variates", "Karimireddy et al. 2020", "example")
METHODS = (Method(*ABOUT, Config, round, Client, Server, needs=("one network",)),)
