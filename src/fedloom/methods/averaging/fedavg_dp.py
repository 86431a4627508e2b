"""FedAvg whose clients train by DP-SGD: what a client sends is private for each of its rows.

Paper: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, whose
steps are in `averaging/private.py`. The server and the round are those of FedAvg
(`averaging/fedavg.py`); `fedlp-dp` begins with the server's pretrained model
(`averaging/fedlp.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from pydantic import Field
from torch import Tensor

from fedloom.core.page import ClientContext, Guarantee, Method, Party, Tree
from fedloom.methods import steps
from fedloom.methods.averaging import private
from fedloom.methods.averaging.fedavg import FEDAVG, FedAvgServer
from fedloom.methods.averaging.fedlp import FedLPServer


class FedAvgDPConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`, with noise in each step."""

    personal_head: bool = False
    """Whether the last layer is private to each client."""
    clients_per_round: int | None = Field(10, ge=1)
    """Number of participants in a round; None for all clients."""
    finetune_epochs: int = Field(0, ge=0)
    """Epochs of fine-tuning all weights before the evaluation mode "tuned"; 0 skips it. They are
    without noise, as a tuned model stays at its client.
    """
    dp: private.RowPrivacy = private.RowPrivacy()
    """Differential privacy of each row: sigma (noise multiplier), clip (C), delta (δ)."""

    @property
    def sums_stand_alone(self) -> bool:
        """A client keeps nothing but its personal head, if it has one."""
        return not self.personal_head

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The privacy guarantee of the weights."""
        return private.guarantees(self)

    def charges(
        self, party: "Party[FedAvgDPConfig]", rounds: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`."""
        return private.charges(self, party, rounds)

    def least_in_sum(self, context: ClientContext) -> int:
        """See `MethodConfig.least_in_sum`: each client's noise hides it by itself."""
        return 0


@final
class FedAvgDPClient(Party[FedAvgDPConfig]):
    """A client. Between rounds it keeps only its personal head, if it has one."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("update",)
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network."""
        steps.init_network(self)
        private.check(self)

    def update(self, *, t: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """ClientUpdate: train on own rows with noise, starting from the server's weights."""
        steps.set_weights(self, weights)
        private.dp_sgd(self, t=t)
        return {"weights": steps.shared_weights(self), "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the server's weights; adapt or fine-tune, depending on the
        mode.
        """
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


FEDAVG_DP = replace(
    FEDAVG,
    name="fedavg-dp",
    title="FedAvg; clients train by DP-SGD, so each row is private",
    paper="M. Abadi et al.: Deep Learning with Differential Privacy, CCS 2016",
    config=FedAvgDPConfig,
    client=FedAvgDPClient,
    server=FedAvgServer,
    fixed={},
)

METHODS: Sequence[Method] = (
    FEDAVG_DP,
    replace(
        FEDAVG_DP,
        name="fedlp-dp",
        title="FedLP; clients train by DP-SGD, so each row is private",
        server=FedLPServer,
        needs=("one network", "pretrained server model"),
    ),
)
