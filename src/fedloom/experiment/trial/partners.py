"""Partners of each owner, from models that were trained already: who helps, what if one leaves,
whom to join with.

For each owner i and partner j, by the models that each owner trains alone:

    score    of j's model on i's rows, and how much it lies above that of i's own model
    help     how much the loss of i's rows rises if j's model leaves the mean of all owners' models
    advice   i and those that help, if the mean of their models, which the method exchange trains, is shown
             to be better for i than the best of training alone and of federating with all, on the same folds

Who helps is chosen on the other folds when the advice is scored. With every owner's model trained
once, this costs no
training: models are scored on the rows of others, which they have not seen; i's own models on the
    folds they have not.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.experiment.trial.contributions import LEAST_PROBABILITY, contributions
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.evidence import evidence


@dataclass(frozen=True)
class Partners:
    """The partners of one owner.

    Attributes:
        scores: of each owner's model on this owner's rows; losses are negated; None if it is not
            defined.
        help: how much the loss of this owner's rows rises without each owner's model; () with two
            owners.
        advised: the names of the owners to exchange models with, this one included, if that is
            shown to be better than training alone and than federating with all; else ().
        gain: how much it is better than the better of both, by the score; None if none is.
    """

    scores: Sequence[float | None]
    help: Sequence[float]
    advised: Sequence[str]
    gain: float | None


def losses(y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """The log loss (n,) of probabilities (n, K), or the squared error of numbers (n,)."""
    if predicted.ndim == 1:
        squared: np.ndarray = np.square(predicted - y)
        return squared
    found: np.ndarray = -np.log(np.clip(predicted[np.arange(len(y)), y], LEAST_PROBABILITY, 1.0))
    return found


def help_of(y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """How much the loss of the mean prediction rises without each of N owners' predictions (N, n,
    ...).
    """
    total, count = predicted.sum(0), len(predicted)
    base = losses(y, total / count).mean()
    return np.array([losses(y, (total - one) / (count - 1)).mean() - base for one in predicted])


def partners_of(
    me: int,
    names: Sequence[str],
    metric: str,
    y: np.ndarray,
    predicted: np.ndarray,
    folds: np.ndarray,
    priors: np.ndarray | None,
    worth: float,
    rivals: Sequence[np.ndarray],
    unit: np.ndarray | None = None,
) -> Partners:
    """The partners of owner number `me`.

    Args:
        me, names: the owner's number, and all owners' names.
        metric: see `contributions`.
        y: (n,) labels of its rows.
        predicted: (N, n, ...) by each owner's models; by its own, of folds they have not seen.
        folds: (n,).
        priors: as for `contributions`.
        worth: the smallest gain that matters.
        rivals: (n, ...) predictions by the best training alone, and by the best federating, on the
            same folds.
        unit: (n,) rows of one value belong together.
    """
    found = [contributions(metric, y, one, folds, priors)[0] for one in predicted]
    scores = [score if np.isfinite(score) else None for score in found]
    if len(names) == 2:
        return Partners(scores, (), (), None)
    whole, chosen = help_of(y, predicted), predicted.mean(0)
    for k in np.unique(folds):
        test = folds == k
        chosen[test] = predicted[_coalition(me, help_of(y[~test], predicted[:, ~test]))][
            :, test
        ].mean(0)
    gain, of = np.inf, None if priors is None else priors[None]
    for rival in rivals:
        shown = evidence(metric, y, rival[None], chosen[None], folds[None], unit=unit, priors=of)
        (verdict,) = decide([shown], worth)
        gain = min(gain, verdict.gain if verdict.decision == "join" else -np.inf)
    better = gain > worth
    advised = tuple(names[j] for j in _coalition(me, whole)) if better else ()
    return Partners(scores, whole.tolist(), advised, float(gain) if better else None)


def _coalition(me: int, help_: np.ndarray) -> list[int]:
    return [j for j, value in enumerate(help_) if value > 0 or j == me]
