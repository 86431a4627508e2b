"""Looking at a federation from outside: what it answers on test rows, and a hash of all states.

Nothing here is part of a protocol: no message is counted, and no method reads a test row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import message
from fedloom.engines.base import Engine, Failure
from fedloom.errors import MethodError
from fedloom.experiment.attacked import leaks
from fedloom.experiment.world import World
from fedloom.message import Tree

GLOBAL, OWN = "accuracy", "own accuracy"
"""What the accuracy on the global test set, and on each client's own test rows, is called in `metrics.csv`."""
TRAINING = "training"
"""The last word of a measure over the clients that train, where others are unseen."""


def main_measure(world: World) -> str:
    """The accuracy that counts: on own rows in the method's first way, or on the global test set."""
    ways = world.cfg.ways
    return f"{OWN} {ways[0]}" if ways and not world.method.columns else GLOBAL


def measures(world: World, engine: Engine) -> Iterator[tuple[str, float, str]]:
    """All that an evaluation finds: (measure, value, party), the party "" where it is of the whole federation."""
    return _jointly(world, engine) if world.method.columns else _each(world, engine)


def _each(world: World, engine: Engine) -> Iterator[tuple[str, float, str]]:
    """Every client by itself, on the global test set, on its own rows, and there in each of the method's ways."""
    labels, classes = world.held.labels, world.held.classes
    looks = [(on, "", GLOBAL if on == "test" else OWN) for on in labels]
    looks += [(list(labels)[-1], way, f"{OWN} {way}") for way in world.cfg.ways]
    handout = world.server.handout() if world.server is not None else {}
    for on, way, what in looks:
        seen = look(engine, engine.ids, labels[on], len(classes), on, way, handout)
        for called, clients in groups(what, way, world).items():
            each = seen.accuracy[clients]
            yield from ((called, accuracy, engine.name(i)) for i, accuracy in zip(clients, each, strict=True))
            yield f"{called} mean", float(each.mean()), ""
            yield f"{called} std", float(each.std()), ""
        if what == GLOBAL:
            yield "loss mean", float(seen.loss.mean()), ""
            if np.isfinite(seen.agreement):
                yield "agreement", seen.agreement, ""
            yield from recalls(classes, seen.recall)


def groups(what: str, way: str, world: World) -> dict[str, list[int]]:
    """Whom a measure is of: all clients, or in a method's ways those unseen, and under another name the others."""
    if not way or not world.unseen:
        return {what: list(range(len(world.clients)))}
    return {what: [*world.unseen], f"{what} {TRAINING}": [*world.training]}


def recalls(classes: Sequence[str], recall: np.ndarray) -> Iterator[tuple[str, float, str]]:
    """The accuracy (K,) on the rows of each class; classes without rows are left out."""
    for label, value in zip(classes, recall, strict=True):
        if np.isfinite(value):
            yield f"recall {label}", float(value), ""


def _jointly(world: World, engine: Engine) -> Iterator[tuple[str, float, str]]:
    """The home's answers from what all parties contribute, and each party's own in the method's ways."""
    labels, classes, home = world.held.labels, world.held.classes, world.server
    assert home is not None
    parts = _ask(engine, "contribution", {"on": "test"})
    probabilities, y = torch.softmax(home.decide(parts), -1).cpu().numpy(), labels["test"][0]
    if not np.isfinite(probabilities).all():
        raise MethodError(
            "what the parties predict is not finite any more, as their training has diverged: lower params.lr"
        )
    found, rare = judge(probabilities, y), np.isin(y, world.run.columns.rare)
    yield "accuracy mean", found.accuracy, ""
    yield "accuracy std", 0.0, ""
    yield "loss mean", found.log_loss, ""
    yield "balanced accuracy", found.balanced, ""
    if np.isfinite(found.auc):
        yield "auc", found.auc, ""
    if rare.any() and not rare.all():  # apart: a mean over both hides that nothing rare is ever found
        right = probabilities.argmax(1) == y
        yield "seen accuracy", float(right[~rare].mean()), ""
        yield "rare recall", float(right[rare].mean()), ""
    yield from recalls(classes, found.recall)
    for way in world.cfg.ways:
        for on, what in {"test": GLOBAL, "own": OWN}.items():
            if on not in labels:
                continue
            replies = _ask(engine, "answers", {"on": on, "way": way, "handout": home.handout()})
            each = [
                float((reply["predicted"].cpu().numpy() == y).mean())
                for reply, y in zip(replies.values(), labels[on], strict=True)
            ]
            yield from ((f"{what} {way}", value, engine.name(i)) for i, value in zip(replies, each, strict=True))
            yield f"{what} {way} mean", float(np.mean(each)), ""
    if world.run.evaluate.attacks is not None:
        yield from leaks(world, _ask(engine, "contribution", {"on": "aligned"}), engine.name)


def _ask(engine: Engine, method: str, arguments: dict[str, Any], ids: Sequence[int] | None = None) -> dict[int, Any]:
    """The replies of those parties, or of all; an error if there is none: an evaluation has no faults."""
    ids = engine.ids if ids is None else ids
    found = dict(zip(ids, engine.call(ids, method, arguments, None, None), strict=True))
    for reply in found.values():
        if isinstance(reply, Failure):
            raise MethodError(f"a party could not be evaluated:\n{reply.trace or reply.reason}")
    return found


@dataclass(frozen=True)
class Judgement:
    """What predictions are worth.

    Attributes:
        accuracy: top-1.
        balanced: mean over the classes that occur of the accuracy on their rows.
        auc: area under the ROC curve; for K > 2 the mean over classes, each against all others; nan if one is missing.
        log_loss: mean cross-entropy in nats.
        recall: (K,) accuracy on the rows of each class; nan for a class without rows.
    """

    accuracy: float
    balanced: float
    auc: float
    log_loss: float
    recall: np.ndarray


def judge(probabilities: np.ndarray, labels: np.ndarray) -> Judgement:
    """Judge predicted probabilities (n, K) by the true classes (n,)."""
    from sklearn.metrics import roc_auc_score  # it takes a second to import

    classes = probabilities.shape[1]
    right = probabilities.argmax(1) == labels
    counts = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels, weights=right, minlength=classes)
    recall = np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0)
    auc = float("nan")
    if (counts > 0).all():
        against = [roc_auc_score(labels == k, probabilities[:, k]) for k in range(1 if classes == 2 else 0, classes)]
        auc = float(np.mean(against))
    sure = np.clip(probabilities[np.arange(len(labels)), labels].astype(np.float64), 1e-12, None)
    return Judgement(float(right.mean()), float(np.nanmean(recall)), auc, float(-np.log(sure).mean()), recall)


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
    replies = _ask(engine, "answers", {"on": on, "way": way, "handout": dict(handout or {})}, clients)
    predicted = [reply["predicted"].cpu().numpy() for reply in replies.values()]
    losses = [float(reply["loss"]) for reply in replies.values()]
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
