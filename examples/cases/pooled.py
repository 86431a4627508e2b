"""The upper bound of a horizontal case: every client sends its rows to one server, which trains on
all of them.

Nobody would federate like this: it is what federating avoids. The local training is that of the
other methods, on the union of the rows; the ledger says what sending them costs. Each client's rows
are standardized by the client, as in the other runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from fedloom.core.page import EVERY_TASK, Federation, Method, Party, Tree
from fedloom.methods import steps


class PooledConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`, at the server."""


@final
class PooledClient(Party[PooledConfig]):
    """A client, which only sends its rows."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("rows",)
    setup, prepare = steps.init_network, steps.prepare

    def rows(self) -> dict[str, Tree]:
        """All own rows: x (n, ...), y (n,)."""
        return {
            "x": self.data.every,
            "y": self.data.y(torch.arange(len(self.data), device=self.context.device)),
        }


@final
class PooledServer(Party[PooledConfig]):
    """The server, its model, and everybody's rows."""

    ROLE = "server"
    STATE = ("params", "buffers", "opt", "x", "y")

    def setup(self) -> None:
        """The initial network; no rows."""
        steps.init_network(self)
        self.x: Tensor = torch.zeros(0, device=self.context.device)
        self.y: Tensor = torch.zeros(0, device=self.context.device)

    def keep(self, replies: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Store the union of the clients' rows."""
        self.x = torch.cat([reply["x"] for reply in replies.values()])
        self.y = torch.cat([reply["y"] for reply in replies.values()])

    def train_pooled(self, t: int) -> None:
        """Round t's epochs over all rows."""
        steps.reset_optimizer(self)
        for epoch in range(self.cfg.epochs):
            order = torch.from_numpy(self.stream("order", t, epoch).permutation(len(self.y)))
            batches = [(self.x[rows], self.y[rows]) for rows in order.split(self.cfg.batch_size)]
            self.train(partial(steps.label_loss, self), batches)

    def broadcast(self) -> dict[str, Tree]:
        """The weights, which every client predicts with."""
        return dict(self.params)


def round(
    fed: Federation, server: Any, clients: Sequence[int], cfg: PooledConfig, t: int
) -> Iterator[str]:
    """Round 0 collects the rows; every round trains."""
    if t == 0:
        server.keep(fed.call(clients, "rows"))
    server.train_pooled(t)
    yield "round"


METHODS = (
    Method(
        name="pooled-rows",
        title="All rows in one place: the upper bound",
        paper="none",
        family="averaging",
        config=PooledConfig,
        round=round,
        client=PooledClient,
        server=PooledServer,
        fixed={"personal_head": False},
        needs=("one network",),
        tasks=EVERY_TASK,
    ),
)
