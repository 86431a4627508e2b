"""FedLP, as the AugFL paper calls a warm start: FedAvg from the server's pretrained model.

Paper: J. Nguyen, J. Wang, K. Malik, M. Sanjabi, M. Rabbat, "Where to Begin? On the Impact of
Pre-Training and Initialization in Federated Learning", ICLR 2023.

Round 0 broadcasts the pretrained weights, so the model does not stay private; the ledger counts
them like any others. All else is FedAvg (`averaging/fedavg.py`).

Differs:
    BatchNorm statistics of the pretrained model are not sent: see `fedloom.methods.steps`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

from torch import Tensor, nn

from fedloom.core.page import ModelError, Party
from fedloom.methods import steps
from fedloom.methods.averaging.fedavg import FEDAVG, FedAvgConfig


@final
class FedLPServer(Party[FedAvgConfig]):
    """The server and its global weights, which begin as those of its pretrained model."""

    ROLE = "server"
    STATE = ("weights",)
    broadcast = steps.broadcast

    def setup(self) -> None:
        """The pretrained weights, for the names that clients train and share."""
        network = self.context.build()
        names = steps.shared_names(steps.trainable_weights(network), self.cfg.personal_head)
        params = matching(
            dict(network.named_parameters()), dict(self.context.teacher().named_parameters())
        )
        self.weights = {k: params[k].detach() for k in names}


def matching(
    expected: Mapping[str, Tensor], pretrained: dict[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """The pretrained weights, if they have the names and shapes of `expected`.

    Raises:
        ModelError: they differ.
    """
    wrong = [k for k in {**expected, **pretrained} if k not in expected or k not in pretrained]
    wrong += [k for k in expected if k not in wrong and expected[k].shape != pretrained[k].shape]
    if wrong:
        raise ModelError(
            "this method starts from a pretrained model of the clients' architecture, but "
            f"{wrong[0]!r} differs: set pretrained.model to the network in models.pool, with the "
            "same norm"
        )
    return pretrained


METHODS = (
    replace(
        FEDAVG,
        name="fedlp",
        title="FedAvg from the server's pretrained model, which it broadcasts",
        paper="J. Nguyen et al.: Where to Begin? On the Impact of Pre-Training and Initialization "
        "in FL, ICLR 2023",
        server=FedLPServer,
        needs=("one network", "pretrained server model"),
    ),
)
