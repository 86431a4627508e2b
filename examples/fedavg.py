"""FedAvg on one page: McMahan et al., "Communication-Efficient Learning of Deep Networks" (2017),
Algorithm 1.
"""

from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.message import Shape
from fedloom.core.optim import SGD


class Config(MethodConfig):
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.05

    @property
    def iterations_per_round(self):  # the unit of --iterations; without it a round counts as one
        return self.epochs


class Client(Party[Config]):
    # what survives between messages; assigning anything else is refused
    STATE = ("params", "buffers", "opt")
    MEANS = ("update",)  # what only enters a mean, which the run's [aggregate] says how to take
    # what a round may call; a node of another organization answers nothing else
    CALLS = ("receive", "update")
    # no reply is passed on, by class, or an answer about rows; without this nodes assume all three
    TELLS = ()

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))

    def receive(self, *, weights):
        self.params = weights

    def update(self, *, t):
        batches = self.epochs(t, epochs=self.cfg.epochs, size=self.cfg.batch_size)
        self.train(lambda x, y: F.cross_entropy(self.model(x), y), batches)
        return {"weights": self.params, "rows": self.row_count}


class Server(Party[Config]):
    STATE = ("weights",)

    def setup(self):
        self.weights = {name: p.detach() for name, p in self.context.build().named_parameters()}


def round(fed, server, clients, cfg, t):
    if t == 0:
        fed.call(clients, "receive", shared={"weights": server.weights})
    template = {"weights": server.weights, "rows": Shape("int64")}
    mean = fed.mean(
        clients,
        "update",
        shared={"t": t},
        expect=template,
        weight="rows",
        around={"weights": server.weights},
    )
    if mean is not None:
        server.weights = mean.value["weights"]
    fed.call(clients, "receive", shared={"weights": server.weights})
    yield "round"


ABOUT = ("fedavg-example", "Averaged weights", "McMahan et al. 2017", "example")
METHODS = (Method(*ABOUT, Config, round, Client, Server, needs=("one network",)),)
