"""Looking at a federation from outside: accuracy per client, agreement, and a hash of all states.

Nothing here is part of a protocol: no message is counted, and no method reads a test row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom import message
from fedloom.engines.base import Engine, Failure
from fedloom.errors import MethodError
from fedloom.message import Tree


@dataclass(frozen=True)
class Look:
    """What all clients answer on one test set.

    Attributes:
        accuracy: (N,) top-1 accuracy of each client.
        loss: (N,) mean cross-entropy in nats.
        agreement: how often two different clients give the same answer to a row, over all pairs and rows;
            nan with one client, or where each client has a test set of its own.
        recall: (K,) mean over clients of the accuracy on the rows of a class; nan for a class without rows.
    """

    accuracy: np.ndarray
    loss: np.ndarray
    agreement: float
    recall: np.ndarray


def look(
    engine: Engine,
    clients: Sequence[int],
    labels: Sequence[np.ndarray],
    classes: int,
    on: str,
    way: str = "",
    handout: Mapping[str, Tree] | None = None,
) -> Look:
    """Every client's answers on the test rows named `on`, whose labels (n,) are given client by client.

    Args:
        engine: where the clients are.
        clients: their numbers.
        labels: see above.
        classes: how many there are.
        on: a name in `Site.tests`.
        way: how the clients are prepared before, one of the method's `ways`; "" for as they are.
        handout: what the home hands out to everybody.
    """
    replies = engine.call(clients, "answers", {"on": on, "way": way, "handout": dict(handout or {})}, None, None)
    predicted, losses = [], []
    for reply in replies:
        if isinstance(reply, Failure):
            raise MethodError(f"a client could not be evaluated:\n{reply.trace or reply.reason}")
        assert isinstance(reply, dict) and isinstance(reply["predicted"], Tensor)
        predicted.append(reply["predicted"].cpu().numpy())
        losses.append(float(reply["loss"]))
    right = [p == y for p, y in zip(predicted, labels, strict=True)]
    shared = all(y is labels[0] for y in labels)
    everything, truth = np.concatenate(right), np.concatenate(labels)
    hits = np.bincount(truth, weights=everything, minlength=classes)
    counts = np.bincount(truth, minlength=classes)
    return Look(
        accuracy=np.array([r.mean() for r in right]),
        loss=np.array(losses, dtype=float),
        agreement=agreement(np.stack(predicted), classes) if shared else float("nan"),
        recall=np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0),
    )


def agreement(predicted: np.ndarray, classes: int) -> float:
    """Share of equal answers (N, n) over all pairs of different clients and all rows."""
    n = len(predicted)
    if n < 2:
        return float("nan")
    votes = np.stack([(predicted == k).sum(0) for k in range(classes)])  # (K, n)
    return float((votes * (votes - 1)).sum() / (predicted.shape[1] * n * (n - 1)))


def state_sha256(states: Iterable[tuple[str, Mapping[str, Tree]]]) -> str:
    """One hash over the states of all parties, in the order given: names, dtypes, shapes, bytes."""
    digest = hashlib.sha256()
    for party, state in states:
        for path, leaf in _leaves(state):
            digest.update(f"{party}/{path}:".encode())
            if isinstance(leaf, Tensor):
                array = leaf.detach().cpu().contiguous()
                digest.update(f"{array.dtype}{tuple(array.shape)}".encode())
                digest.update(array.flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(state: Mapping[str, Tree]) -> Iterator[tuple[str, object]]:
    return message.leaves(dict(state))
