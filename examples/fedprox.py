"""FedProx: T. Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Algorithm
2.
"""

from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.message import Shape
from fedloom.core.optim import SGD


class Config(MethodConfig):
    mu: float = 0.1
    """Weight of the proximal term; 0 gives FedAvg."""
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.05

    @property
    def iterations_per_round(self):  # the unit of --iterations; without it a round counts as one
        return self.epochs


class Client(Party[Config]):
    STATE = ("params", "buffers", "opt")
    CALLS = ("receive", "update")
    # the replies only enter a mean, which the run's [aggregate] says how to take
    MEANS = ("update",)
    # no reply is passed on, by class, or an answer about rows; without this nodes assume all three
    TELLS = ()

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))

    def receive(self, *, weights):
        self.params = weights

    def update(self, *, t, weights):
        self.params = weights

        # self.live has the graph that a term over parameters needs; self.params has none
        def loss(x, y):
            distance = sum((self.live[name] - weights[name]).square().sum() for name in weights)
            return F.cross_entropy(self.model(x), y) + self.cfg.mu / 2 * distance

        self.train(loss, self.epochs(t, epochs=self.cfg.epochs, size=self.cfg.batch_size))
        return {"weights": self.params, "rows": self.row_count}


class Server(Party[Config]):
    STATE = ("weights",)

    def setup(self):
        self.weights = {name: p.detach() for name, p in self.context.build().named_parameters()}


def round(fed, server, clients, cfg, t):
    sent = {"weights": server.weights}
    template = {**sent, "rows": Shape("int64")}
    mean = fed.mean(
        clients, "update", shared={"t": t, **sent}, expect=template, weight="rows", around=sent
    )
    if mean is not None:
        server.weights = mean.value["weights"]
    fed.call(clients, "receive", shared={"weights": server.weights})
    yield "round"


ABOUT = ("fedprox", "FedAvg with a proximal term", "Li et al. 2020", "example")
METHODS = (Method(*ABOUT, Config, round, Client, Server, needs=("one network",)),)
