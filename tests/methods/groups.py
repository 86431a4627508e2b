"""Planted groups of peers, and what a small network answers, by NumPy: for tests of peers that
choose peers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedloom.core.context import ClientContext, Rows
from tests.toy import CLASSES, Toy, common, contexts, rows


def planted(seed: int, m: int = 8, n: int = 40) -> list[ClientContext]:
    """Places of peers whose inputs are alike; odd and even ones disagree on every label."""

    def data(i: int) -> Rows:
        r = rows(n, 1000 * seed + i)
        return Rows(r.pool, (r.labels + 2 * (i % 2)) % CLASSES, r.index, r.shift, r.scale)

    return contexts(m, seed=seed, make=common, data=data)


def mates(i: int, m: int = 8) -> set[int]:
    """The others of a peer's group."""
    return set(range(i % 2, m, 2)) - {i}


def row_losses(weights: Mapping[str, Tensor], data: Rows) -> np.ndarray:
    """Cross-entropies (n,) of the toy's common network on all rows, in float64."""
    w = {k: v.double().numpy() for k, v in weights.items()}
    x, y = data.every.double().numpy(), data.labels[data.index].numpy()
    z = (
        np.maximum(x @ w["body.0.weight"].T + w["body.0.bias"], 0) @ w["head.weight"].T
        + w["head.bias"]
    )
    z = z - z.max(-1, keepdims=True)
    return np.log(np.exp(z).sum(-1)) - z[np.arange(len(y)), y]


def weights_of(toy: Toy) -> list[dict[str, Tensor]]:
    """A copy of every peer's parameters."""
    return [{k: v.clone() for k, v in toy.party(i).params.items()} for i in toy.engine.ids]


def asked(toy: Toy) -> dict[tuple[int, int], int]:
    """How often (who, whom) of the peers has got an answer so far."""
    found = {}
    for (sender, receiver), (count, _) in toy.fed.ledger.pairs.items():
        if "server" not in (sender, receiver):
            who, whom = (int(re.sub(r"\D", "", name)) for name in (receiver, sender))
            found[who, whom] = count
    return found


def received(toy: Toy) -> set[str]:
    """What the coordinator was told, as the ledger describes it."""
    return {e.what for e in toy.fed.ledger if e.receiver == "server" and e.bytes}


def accuracy(toy: Toy) -> float:
    """Of all peers on their own rows."""
    right = 0.0
    for i in toy.engine.ids:
        data = toy.party(i).data
        right += float(
            (toy.party(i).infer(data.every).argmax(-1) == data.labels[data.index]).double().mean()
        )
    return right / len(toy.engine.ids)
