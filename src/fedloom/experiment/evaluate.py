"""Evaluation of a federation: predictions on test rows, their metrics, and a hash of all states.

It is outside the protocol: no message is counted, and no method reads a test row.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.engine import UNREACHABLE, Engine, Failure
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.message import Shape, Template, Tree, floats
from fedloom.experiment.metrics import ATTACK, GLOBAL, OWN, TRAINING
from fedloom.experiment.plan import RunPlan

CHANCE = "chance"
"""What the accuracy of always answering the most frequent class is called there, where only clients know it."""
MEASURES = (
    *(GLOBAL, OWN, "loss mean", CHANCE, "agreement", "recall", ATTACK.strip(), "bytes"),
    *("balanced accuracy", "auc", "seen accuracy", "rare recall"),
)
"""Prefixes of the names of all metrics of a run; no note of a party may have them."""
SCORE: Template = {"accuracy": floats(), "loss": floats(), "chance": floats(), "rows": int}
"""The reply of a client that alone has its labels."""
WITHHELD = (UNREACHABLE, "failed", "busy", "late", "refused")
"""Reasons for which a party is left out without a warning: it is unreachable, its machine has failed (such as by a full
disk), or its node does not allow evaluation."""


Check: TypeAlias = Callable[[int, Mapping[int, Any]], None]
"""Raises MessageError unless the reply of this party, given with all others, can be used."""
_log = logging.getLogger("fedloom")


class PartiesMissing(Exception):
    """Parties that an evaluation needs did not reply."""


def check_score(i: int, scores: Mapping[int, Any]) -> None:
    """A `Check` of a client's own score."""
    score = scores[i]
    message.check_like(score, SCORE)
    shares = float(score["accuracy"]), float(score["chance"])
    if not all(0 <= share <= 1 for share in shares) or score["rows"] < 1:
        raise MessageError("a share lies between 0 and 1, and there are rows")


def check_predictions(labels: Sequence[np.ndarray], **also: Template) -> Check:
    """A `Check` of the classes predicted for each party's labels (n,), and of what else a reply must have."""
    return lambda i, replies: message.check_like(replies[i], {"predicted": Shape(torch.int64, len(labels[i])), **also})


def groups(what: str, eval_mode: str, plan: RunPlan) -> dict[str, list[int]]:
    """Whom a measure is of: all clients, or in a method's ways those unseen, and under another name the others."""
    if not eval_mode or not plan.unseen:
        return {what: list(range(len(plan.clients)))}
    return {what: [*plan.unseen], f"{what}{TRAINING}": [*plan.training]}


def spread(what: str, each: Mapping[int, float], name: Callable[[int], str]) -> Iterator[tuple[str, float, str]]:
    """A measure of each client, and its mean and s.d. over them; nothing without clients."""
    if each:
        yield from ((what, value, name(i)) for i, value in each.items())
        yield f"{what} mean", float(np.mean([*each.values()])), ""
        yield f"{what} std", float(np.std([*each.values()])), ""


def recalls(classes: Sequence[str], recall: np.ndarray) -> Iterator[tuple[str, float, str]]:
    """The accuracy (K,) on the rows of each class; classes without rows are left out."""
    for label, value in zip(classes, recall, strict=True):
        if np.isfinite(value):
            yield f"recall {label}", float(value), ""


def ask(engine: Engine, method: str, arguments: dict[str, Any], check: Check, *, every: bool = False) -> dict[int, Any]:
    """The replies of those that can be reached, or of `every` party: an evaluation has no faults.

    What is wrong with a node, or with its reply, must not end the run of all others: it is left out. What is wrong with
    a party in this process is a mistake in the method's page, which must be seen.
    """
    found = dict(zip(engine.ids, engine.call(engine.ids, method, arguments, None, None), strict=True))
    failed = {i: reply for i, reply in found.items() if isinstance(reply, Failure)}
    for i in sorted(found.keys() - failed.keys()) if engine.remote else ():
        try:
            check(i, found)
        except MessageError as error:
            failed[i] = Failure("invalid reply", f"({error}): are both sides of one version?")
    for i, failure in failed.items():
        if failure.reason in WITHHELD:
            continue
        if not engine.remote:
            raise MethodError(f"a party could not be evaluated:\n{failure.trace or failure.reason}")
        why = f"{failure.reason} {failure.trace}".strip()
        _log.warning("%s is left out of an evaluation: %s", engine.name(i), why)
    if failed and (every or len(failed) == len(found)):
        raise PartiesMissing(f"cannot evaluate {', '.join(map(engine.name, sorted(failed)))}")
    return {i: reply for i, reply in found.items() if i not in failed}


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
    """Metrics of the reachable clients on one test set.

    Attributes:
        clients: the numbers of these N.
        accuracy: (N,) top-1 accuracy of each client.
        loss: (N,) mean cross-entropy in nats.
        agreement: how often two different clients give the same answer to a row, over all pairs and rows;
            nan with one client, or where each client has a test set of its own.
        recall: (K,) mean over clients of the accuracy on the rows of a class; nan for a class without rows.
    """

    clients: tuple[int, ...]
    accuracy: np.ndarray
    loss: np.ndarray
    agreement: float
    recall: np.ndarray


def look(
    engine: Engine,
    labels: Sequence[np.ndarray],
    classes: int,
    on: str,
    eval_mode: str = "",
    broadcast: Mapping[str, Tree] | None = None,
) -> Look:
    """Every client's predictions on the test rows named `on`, whose labels (n,) are given client by client.

    Args:
        engine: where the clients are.
        labels: see above.
        classes: how many there are.
        on: a name in `Site.tests`.
        way: how the clients are prepared before, one of the method's `eval_modes`; "" for as they are.
        handout: what the server hands out to everybody.
    """
    check = check_predictions(labels, loss=floats())
    replies = ask(engine, "predictions", {"on": on, "eval_mode": eval_mode, "broadcast": dict(broadcast or {})}, check)
    labels = [labels[i] for i in replies]
    predicted = [reply["predicted"].cpu().numpy() for reply in replies.values()]
    losses = [float(reply["loss"]) for reply in replies.values()]
    right = [p == y for p, y in zip(predicted, labels, strict=True)]
    shared = all(y is labels[0] for y in labels)
    everything, truth = np.concatenate(right), np.concatenate(labels)
    hits = np.bincount(truth, weights=everything, minlength=classes)
    counts = np.bincount(truth, minlength=classes)
    return Look(
        clients=tuple(replies),
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


def state_sha256(digests: Iterable[tuple[str, str]]) -> str:
    """One hash over the states of all parties: of their names and state digests (`message.digest`), in the
    order given."""
    return hashlib.sha256("".join(f"{party}:{found}\n" for party, found in digests).encode()).hexdigest()
