"""Evaluates the parties of a run: predictions on test rows, their metrics, and a hash of all
states.

Evaluation is not part of a method: its messages are not counted, and no method reads a test row.

A party is asked by `call_all`: one in this process must answer, or the run ends with its error; a
node may be away or may refuse, and is left out. `client_metrics` and others make metrics of the
replies.
"""

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
from fedloom.core.scores import SCORED, auc, scored
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.metrics import ATTACK, GLOBAL, OWN, OWN_RMSE, RMSE, Metric

CHANCE = "chance"
"""Metric of the chance level, where only the clients know it."""
RESERVED = (
    *(
        str(GLOBAL),
        str(OWN),
        str(RMSE),
        str(OWN_RMSE),
        "mae",
        "r2",
        "loss mean",
        CHANCE,
        "agreement",
        "recall",
    ),
    *(
        ATTACK,
        "bytes",
        "balanced accuracy",
        "auc",
        "calibration error",
        "seen accuracy",
        "rare recall",
    ),
)
"""Prefixes of all metrics of a run. Notes of parties with such names are ignored."""
MAX_PROBABILITIES = 20_000_000
"""Maximum number of probabilities in memory."""
SCORE: Template = {"accuracy": floats(), "loss": floats(), "chance": floats(), "rows": int}
"""Template of the reply of a client whose labels are private."""
NOT_LOGGED = (UNREACHABLE, "failed", "busy", "late", "refused")
"""Reasons of failures that are not logged: an unreachable party, a failed machine, a node that
refuses evaluation.
"""
Check: TypeAlias = Callable[[int, Mapping[int, Any]], None]
"""Called with a party's number and all replies; raises MessageError if the party's reply is
invalid.
"""
Measured: TypeAlias = tuple[str, float, str]
"""A metric's name, its value, and its party; "" for the whole federation."""
_log = logging.getLogger("fedloom")


class PartiesMissing(Exception):
    """Parties that are needed for an evaluation did not reply."""


def check_score(i: int, scores: Mapping[int, Any]) -> None:
    """A `Check` of `SCORE`."""
    score = scores[i]
    message.check_like(score, SCORE)
    shares = float(score["accuracy"]), float(score["chance"])
    if not all(0 <= share <= 1 for share in shares) or score["rows"] < 1:
        raise MessageError("accuracy and chance must be between 0 and 1, rows at least 1")


def check_predictions(labels: Sequence[np.ndarray], **also: Template) -> Check:
    """A `Check` of the classes predicted for each party's labels (n,), and of further entries of
    the reply.
    """
    return lambda i, replies: message.check_like(
        replies[i], {"predicted": Shape(torch.int64, len(labels[i])), **also}
    )


def clients_by_metric(metric: Metric, plan: RunPlan) -> dict[Metric, list[int]]:
    """The clients of a metric, by metric: all; in an evaluation mode, unseen and training ones
    apart.
    """
    if not metric.mode or not plan.unseen:
        return {metric: list(range(len(plan.clients)))}
    return {metric: [*plan.unseen], metric.training: [*plan.training]}


def client_spread(
    metric: Metric, each: Mapping[int, float], name: Callable[[int], str]
) -> Iterator[tuple[str, float, str]]:
    """A metric of each client, and its mean and standard deviation; nothing without clients."""
    if each:
        yield from ((str(metric), value, name(i)) for i, value in each.items())
        yield metric.mean, float(np.mean([*each.values()])), ""
        yield metric.std, float(np.std([*each.values()])), ""


def recalls(classes: Sequence[str], recall: np.ndarray) -> Iterator[tuple[str, float, str]]:
    """The recall (K,) of each class that has rows."""
    for label, value in zip(classes, recall, strict=True):
        if np.isfinite(value):
            yield f"recall {label}", float(value), ""


def call_all(
    engine: Engine, method: str, arguments: dict[str, Any], check: Check, *, every: bool = False
) -> dict[int, Any]:
    """Call all parties, without injected faults; returns the replies by party number.

    A remote party that fails, or whose reply is invalid, is left out.

    Raises:
        MethodError: a party in this process fails.
        PartiesMissing: no party has replied, or with `every`, one has not.
    """
    # By party number, a reply or a `Failure`. The first None: no party has arguments of its own.
    # The second: the call is of no round, so no fault is injected.
    replies = dict(
        zip(engine.ids, engine.call(engine.ids, method, arguments, None, None), strict=True)
    )
    failed = {i: reply for i, reply in replies.items() if isinstance(reply, Failure)}
    # Nodes may run other versions or lie, so their replies are checked, while those of this process
    # cannot be wrong in form. Sorted, as a set has no order and failures are logged in this one.
    for i in sorted(replies.keys() - failed.keys()) if engine.remote else ():
        try:
            check(i, replies)
        except MessageError as error:
            failed[i] = Failure(
                "invalid reply", f"({error}): use the same version of fedloom at the node"
            )
    # What failed: an error of this program ends the run; of nodes only surprises are logged.
    for i, failure in failed.items():
        if failure.reason in NOT_LOGGED:
            continue
        if not engine.remote:
            raise MethodError(
                f"cannot evaluate {engine.name(i)}:\n{failure.trace or failure.reason}"
            )
        # a node sends no traceback: `trace` says what it refused, or where to read what happened
        why = f"{failure.reason} {failure.trace}".strip()
        _log.warning("%s is left out of an evaluation: %s", engine.name(i), why)

    # Too few replies. If every node refused, their owners' settings are the cause, and the node's
    # own words say more: such as that the budget of answers is spent.
    if (
        failed
        and all(failure.reason == "refused" for failure in failed.values())
        and len(failed) == len(replies)
    ):
        if said := sorted({failure.trace for failure in failed.values()} - {""}):
            raise PartiesMissing(f"no node evaluates now: {'; '.join(said)}")
        raise PartiesMissing(
            "no node allows evaluation: in node.toml of at least one, set evaluate = true, and "
            "score = true in [data.NAME]"
        )
    if failed and (every or len(failed) == len(replies)):
        raise PartiesMissing(f"cannot evaluate {', '.join(map(engine.name, sorted(failed)))}")
    return {i: reply for i, reply in replies.items() if i not in failed}


@dataclass(frozen=True)
class ClassifierMetrics:
    """Metrics of predictions.

    Attributes:
        accuracy: top-1.
        balanced: mean recall of the classes that have rows.
        auc: area under the ROC curve, as in `fedloom.core.scores.auc`.
        log_loss: mean cross-entropy in nats.
        recall: (K,) recall of each class; nan without rows.
    """

    accuracy: float
    balanced: float
    auc: float
    log_loss: float
    recall: np.ndarray


def classifier_metrics(probabilities: np.ndarray, labels: np.ndarray) -> ClassifierMetrics:
    """Metrics of predicted probabilities (n, K), given the labels (n,)."""
    classes = probabilities.shape[1]
    right = probabilities.argmax(1) == labels
    counts = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels, weights=right, minlength=classes)
    recall = np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0)
    likelihood = np.clip(
        probabilities[np.arange(len(labels)), labels].astype(np.float64), 1e-12, None
    )
    return ClassifierMetrics(
        float(right.mean()),
        float(np.nanmean(recall)),
        auc(labels, probabilities),
        float(-np.log(likelihood).mean()),
        recall,
    )


@dataclass(frozen=True)
class ClientMetrics:
    """Metrics of the reachable clients on one test set.

    Attributes:
        clients: numbers of the N reachable clients.
        accuracy: (N,) top-1 accuracy of each client.
        loss: (N,) mean cross-entropy in nats.
        agreement: share of equal predictions over all pairs of clients and all rows; nan with one
            client, or where clients have different test rows.
        recall: (K,) recall of each class over all clients; nan without rows.
    """

    clients: tuple[int, ...]
    accuracy: np.ndarray
    loss: np.ndarray
    agreement: float
    recall: np.ndarray


def client_scores(
    engine: Engine,
    labels: Sequence[np.ndarray],
    classes: int,
    on: str,
    broadcast: Mapping[str, Tree] | None = None,
) -> dict[str, dict[int, float]]:
    """The scores of `SCORED` of every reachable client on its test rows `on`, by name and client;
    arguments as in `client_metrics`. A client whose rows have one class has no AUC; one that has
    diverged, or whose node sends no valid reply, has no score.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in SCORED}
    arguments: dict[str, Tree] = {
        "on": on,
        "broadcast": dict(broadcast or {}),
        "probabilities": True,
    }
    size = max(1, MAX_PROBABILITIES // max(1, classes * max(map(len, labels))))
    for start in range(0, len(engine.ids), size):
        ids = engine.ids[start : start + size]
        replies: Sequence[Any] = engine.call(ids, "predictions", arguments, None, None)
        for i, reply in zip(ids, replies, strict=True):
            if isinstance(reply, Failure):
                continue  # `client_metrics` has reported it
            y = labels[i]
            try:
                check_predictions(labels, loss=floats(), probabilities=floats(len(y), classes))(
                    i, {i: reply}
                )
            except MessageError as error:
                if not engine.remote:
                    raise
                _log.warning("%s has no scores: %s", engine.name(i), error)
                continue
            p = reply["probabilities"].cpu().numpy().astype(np.float64)
            if not np.isfinite(p).all():  # the client has diverged
                continue
            for name, value in scored(y, p).items():
                if np.isfinite(value):
                    found[name][i] = value
    return found


def client_metrics(
    engine: Engine,
    labels: Sequence[np.ndarray],
    classes: int,
    on: str,
    eval_mode: str = "",
    broadcast: Mapping[str, Tree] | None = None,
) -> ClientMetrics:
    """Evaluate every client on its test rows `on`.

    Args:
        engine: of the run.
        labels: (n,) labels for each client.
        classes: their number K.
        on: a name in `ClientContext.tests`.
        eval_mode: one of the method's `eval_modes`; "" for the unchanged model.
        broadcast: of the server.
    """
    check = check_predictions(labels, loss=floats())
    replies = call_all(
        engine,
        "predictions",
        {"on": on, "eval_mode": eval_mode, "broadcast": dict(broadcast or {})},
        check,
    )
    labels = [labels[i] for i in replies]
    predicted = [reply["predicted"].cpu().numpy() for reply in replies.values()]
    losses = [float(reply["loss"]) for reply in replies.values()]
    right = [p == y for p, y in zip(predicted, labels, strict=True)]
    shared = all(y is labels[0] for y in labels)
    everything, truth = np.concatenate(right), np.concatenate(labels)
    hits = np.bincount(truth, weights=everything, minlength=classes)
    counts = np.bincount(truth, minlength=classes)
    return ClientMetrics(
        clients=tuple(replies),
        accuracy=np.array([r.mean() for r in right]),
        loss=np.array(losses, dtype=float),
        agreement=agreement(np.stack(predicted), classes) if shared else float("nan"),
        recall=np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0),
    )


def agreement(predicted: np.ndarray, classes: int) -> float:
    """The share of equal predictions over all pairs of clients and all rows, given predictions (N,
    n).
    """
    n = len(predicted)
    if n < 2:
        return float("nan")
    votes = np.stack([(predicted == k).sum(0) for k in range(classes)])  # (K, n)
    return float((votes * (votes - 1)).sum() / (predicted.shape[1] * n * (n - 1)))


def state_sha256(digests: Iterable[tuple[str, str]]) -> str | None:
    """One hash of the names and state digests (`message.digest`) of all parties, in the given
    order; None if a party with rows of its own keeps its digest.
    """
    digests = list(digests)
    if not all(digest for _, digest in digests):
        return None
    return hashlib.sha256(
        "".join(f"{party}:{digest}\n" for party, digest in digests).encode()
    ).hexdigest()
