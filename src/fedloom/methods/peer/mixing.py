"""Steps that peers share: each takes a mean of its own and its neighbours'."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.page import Federation, MethodError, Party
from fedloom.methods.settings import LocalSGD
from fedloom.methods.steps import set_weights, shared_weights


def models_of(
    party: Party[LocalSGD], inbox: Mapping[str, Mapping[str, Any]]
) -> dict[int, dict[str, Tensor]]:
    """Shared weights by peer id: the party's own, and those of the neighbours that replied."""
    return {
        party.context.id: shared_weights(party),
        **{int(j): reply["weights"] for j, reply in inbox.items()},
    }


def average(
    party: Party[LocalSGD], models: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]
) -> None:
    """Set the party's weights to the weighted mean of the models in `weights`, its own among them,
    as the run takes means, and note the mixing weights. With too few models for a robust rule it
    keeps its own.
    """
    if len(weights) < party.context.aggregator.least:
        weights = {party.context.id: 1.0}
    else:
        set_weights(party, mean_of(party, [models[j] for j in weights], [*weights.values()]))
    total = sum(weights.values())
    note_mixing(party, {j: weight / total for j, weight in weights.items()})


def mean_of(
    party: Party[LocalSGD], models: Sequence[Any], weights: Sequence[float]
) -> dict[str, Tensor]:
    """The weighted mean of models at a peer, as the run takes means: a robust rule is applied
    around its own weights.

    With `clip` this is ClippedGossip: L. He, S. P. Karimireddy, M. Jaggi, "Byzantine-Robust
    Decentralized Learning via ClippedGossip", 2022.
    """
    found: dict[str, Tensor] = party.context.aggregator.combine(
        models, weights, around=shared_weights(party)
    )
    return found


def check_models(fed: Federation, most: int | None) -> None:
    """Check that each peer can get as many models as the run's mean needs, its own among them.

    Args:
        fed: knows the graph.
        most: the largest number of neighbours that a peer asks; None for all.

    Raises:
        MethodError: a peer cannot.
    """
    everyone, how = fed.engine.ids, fed.aggregator
    for i in everyone if how.least > 1 else ():
        near = len(everyone) - 1 if fed.graph is None else len(fed.graph.get(i, ()))
        models = 1 + (near if most is None else min(near, most))
        if models < how.least:
            raise MethodError(
                f"aggregate: {how} needs {how.least} models at a peer, its own among them, but "
                f"peer {i} gets at most {models}: add neighbours, or choose another rule"
            )


def note_mixing(party: Party[object], shares: Mapping[int, float]) -> None:
    """Note the mixing weight of each peer's model, by peer id."""
    row = torch.zeros(party.context.parties, dtype=torch.float64)
    for i, share in shares.items():
        row[i] = share
    party.note("mixing", row)
