"""A Flower ClientApp as a fedloom party: your app trains, fedloom averages, compares and reports.

Replace `app` by your own (`from my_app.client_app import app`), and the line in which it loads its
rows by `ROWS[...]`. Its `context.state` is new in every round.
"""

from time import time

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import optim
from torch.nn import functional as F

from fedloom import Method, MethodConfig, Party
from fedloom.core.message import Shape
from fedloom.core.optim import SGD

ROWS = {}  # the network and the batches of each client, by its partition-id
app = ClientApp()


@app.train()
def train(msg, context):  # as in Flower's PyTorch quickstart
    net, batches = ROWS[context.node_config["partition-id"]]
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    examples = MetricRecord({"num-examples": sum(len(y) for _, y in batches)})
    return Message(
        RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": examples}), reply_to=msg
    )


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
        me = self.context.id
        ROWS[me] = (
            self.context.build(),
            list(self.epochs(t, epochs=self.cfg.epochs, size=self.cfg.batch_size)),
        )
        sent = {
            "arrays": ArrayRecord(weights),
            "config": ConfigRecord({"lr": self.cfg.lr, "server-round": t + 1}),
        }
        order = Metadata(
            0, "", 0, me, "", str(t + 1), created_at=time(), ttl=3600.0, message_type="train"
        )
        message = Message(RecordDict(sent), metadata=order)
        reply = app(
            message, Context(0, me, {"partition-id": me, "num-partitions": 0}, RecordDict(), {})
        )
        return {
            "weights": dict(reply.content["arrays"].to_torch_state_dict()),
            "rows": self.row_count,
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


ABOUT = ("flower-client", "A Flower ClientApp", "of Flower", "example")
METHODS = (Method(*ABOUT, Config, round, Client, Server, needs=("one network",)),)
