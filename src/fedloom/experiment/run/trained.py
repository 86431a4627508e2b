"""The networks that a run has trained, as plain modules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError
from fedloom.core.message import Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.data.dataset import Dataset
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.plan.settings.rows import owner_names
from fedloom.models.custom import Logits


class Predictor(nn.Module):
    """The predictions of a party that has a black box, or whose method predicts by more than its
    network's logits, such as by prototypes. `network` is the network, if any.
    """

    def __init__(self, party: Party[MethodConfig]) -> None:
        super().__init__()
        self.network = None if party.context.network is None else party.net.module
        self._infer = party.infer

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, K) of rows x (n, ...), without a graph."""
        return self._infer(x)


class TrainedModels:
    """The parties of a finished run, built on demand.

    Args:
        plan: of the run; its server has the final state.
        states: the final state of each party, by name in the ledger.
    """

    def __init__(self, plan: RunPlan, states: Mapping[str, Any]) -> None:
        self._plan, self._states = plan, states

    def client(self, i: int, eval_mode: str | None = None) -> nn.Module:
        """The network of client i, in evaluation mode on the CPU, as its main metric is evaluated.

        Args:
            i: number of the client.
            eval_mode: one of the method's evaluation modes, or "" for the network before any; None
                for the main one.

        Raises:
            DataError: the client's state is at its node.
        """
        plan, party = self._plan, self.party(i)
        if plan.contexts[i].network is None:
            return Predictor(party)
        if plan.method.setting == "horizontal":
            mode = plan.method.main_mode(plan.cfg) if eval_mode is None else eval_mode
            self._prepare(party, mode)
        return plain_network(party)

    def party(self, i: int) -> Party[MethodConfig]:
        """Client i in its final state.

        Raises:
            DataError: the client's state is at its node.
        """
        name = self._plan.names[i]
        if name not in self._states:
            raise DataError(
                f"the model of {name} is at its node, as run-ID/model.safetensors: export it there"
            )
        party = self._plan.clients[i]()
        party.load(self._states[name])
        return party

    @property
    def names(self) -> dict[str, str]:
        """The names of the clients in the ledger -> those of the owners of their rows, if they are
        known.
        """
        plan, known = self._plan, tuple(self._plan.names.values())
        data, shares = plan.data.dataset, plan.data.split
        owners = (
            owner_names(data, shares) if isinstance(data, Dataset) and shares is not None else ()
        )
        return dict(zip(known, owners or known, strict=True))

    def parties(self) -> list[tuple[str, str, int]]:
        """Name in the ledger, network and number of training rows of each client."""
        plan = self._plan
        rows = [0 if context.data is None else len(context.data) for context in plan.contexts]
        return list(zip(plan.names.values(), plan.architectures, rows, strict=True))

    def common(self) -> nn.Module | None:
        """The model that all clients share, such as the server's average; None if each client has
        its own.
        """
        plan = self._plan
        if "one network" not in plan.method.needs or not self._states:
            return None
        if plan.server is not None and plan.server.broadcast():
            party = plan.clients[0]()
            self._prepare(party, "")
            return plain_network(party)
        first, *others = (self._states[plan.names[i]].get("params", {}) for i in plan.training)
        same = all(
            torch.equal(value, other[name]) for other in others for name, value in first.items()
        )
        return self.client(plan.training[0], "") if first and same else None

    def _prepare(self, party: Party[MethodConfig], eval_mode: str) -> None:
        server = self._plan.server
        broadcast: Mapping[str, Tree] = {} if server is None else server.broadcast()
        party.prepare(eval_mode=eval_mode, broadcast=broadcast)


def plain_network(party: Party[MethodConfig]) -> nn.Module:
    """A party's network in evaluation mode on the CPU, with memory of its own."""
    module = party.net.module.cpu()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    module.eval()
    if type(party).infer is not Party.infer:
        return Predictor(party).eval()
    return module.model if isinstance(module, Logits) else module
