"""Attacks on what clients send, each against chance: labels, class shares, membership,
reconstruction.

The attacker is honest but curious: it reads the messages of a kind of all clients, and knows
labeled rows of the same distribution. Each function states what else it knows. Stronger attackers
exist, so a success near chance is no proof
of privacy. Symbols: N clients, K classes, n rows, d numbers per class or row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.core.scores import auc
from fedloom.core.statistics import confidence_interval

Predict = Callable[[Tensor], Tensor]
"""Log-probabilities (n, K) of rows (n, ...), by a model that a client sent or that imitates it."""
RIDGE = 0.1
"""Weight of the squared norm in a kernel regression."""
PENALTIES = np.logspace(-2, 6, 9)
"""Weights of the squared coefficients of a linear probe; that with the least leave-one-out error is
taken.
"""


@dataclass(frozen=True)
class Leak:
    """The success of an attack on messages of a kind.

    Attributes:
        message: what was attacked.
        attack: `labels`, `class shares`, `membership`, `row labels` or `reconstruction`.
        success: mean over clients: the share of right guesses of the most frequent class; the
            overlap of the guessed and the true class shares; the AUC; the share of rows whose label
            is guessed right; the explained share of the variance of rows.
        chance: that of an attacker that reads no message.
        gain: 95 % interval over clients of the success less chance; None for one client.
        parties: number of attacked clients.
    """

    message: str
    attack: str
    success: float
    chance: float
    gain: tuple[float, float] | None
    parties: int


def leak(message: str, attack: str, each: Sequence[float], chance: Sequence[float] | float) -> Leak:
    """The mean success over clients, with each client's chance. The interval is Student's t of the
    differences, or Wilson's for `labels`, where each client is right or wrong.
    """
    by_client = np.broadcast_to(np.asarray(chance, dtype=float), len(each))
    mean = float(np.mean(by_client))
    gain = confidence_interval(list(np.asarray(each) - by_client))
    if attack == "labels" and len(each) > 1:
        from scipy.stats import binomtest  # slow to import

        found = binomtest(round(sum(each)), len(each)).proportion_ci(method="wilson")
        gain = float(found.low) - mean, float(found.high) - mean
    return Leak(message, attack, float(np.mean(each)), mean, gain, len(each))


def guessed_shares(probabilities: Tensor, overall: Tensor) -> Tensor:
    """Class shares (N, K) of each client, from its mean predictions (N, K) on rows that are the
    same for all.

    A model trained on rows with other class shares is biased by their ratio: the shares are those
    over all clients, `overall` (K,), times the ratio of a client's mean prediction to the mean over
    clients.
    """
    shares = overall * probabilities / probabilities.mean(0).clamp_min(1e-12)
    return shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)


def labels(message: str, guessed: Tensor, true: Tensor) -> Leak:
    """The most frequent class of each client, from guessed and true class shares (N, K).

    Chance always guesses the class that is most frequent at the most clients.
    """
    most = true.argmax(-1)
    chance = int(torch.bincount(most).max()) / len(most)
    return leak(message, "labels", (guessed.argmax(-1) == most).double().tolist(), chance)


def class_shares(message: str, guessed: Tensor, true: Tensor, overall: Tensor) -> Leak:
    """The class shares (N, K) of each client: their overlap with the guess, 1 less the total
    variation distance.

    Chance guesses the class shares over all clients, `overall` (K,).
    """

    def overlap(guess: Tensor) -> Tensor:
        return 1 - (guess - true).abs().sum(-1) / 2

    return leak(message, "class shares", overlap(guessed).tolist(), overlap(overall).tolist())


def membership(
    message: str,
    predict: Sequence[Predict],
    members: Sequence[tuple[Tensor, Tensor]],
    others: Sequence[tuple[Tensor, Tensor]],
    references: int = 8,
) -> Leak:
    """Whether a client trained on a row, from the log-probability of its class by that client's
    model, less the mean by the models of up to `references` other clients: rows that are easy for
    everybody tell nothing.

    The AUC is within classes, weighted by members, so that the class shares of a client do not
    count. Chance is 0.5.
    Source: L. Watson et al., "On the Importance of Difficulty Calibration in Membership Inference
        Attacks", ICLR 2022.

    Args:
        predict: the model of each client.
        members, others: for each client, inputs and labels of rows that it trained on, and of rows
            that nobody did.
    """
    each = []
    for i, ((x, y), (x_, y_)) in enumerate(zip(members, others, strict=True)):
        inputs, classes = torch.cat([x, x_]), torch.cat([y, y_])
        ids = [i, *[j for j in range(len(predict)) if j != i][:references]]
        found = torch.stack(
            [predict[j](inputs).gather(1, classes[:, None])[:, 0].double() for j in ids]
        )
        scores = found[0] - (found[1:].mean(0) if len(found) > 1 else 0)
        each.append(_within_classes(scores, torch.arange(len(inputs)) < len(x), classes))
    each = [value for value in each if np.isfinite(value)]
    return leak(message, "membership", each or [0.5], 0.5)


def _within_classes(scores: Tensor, member: Tensor, classes: Tensor) -> float:
    """The AUC of the scores (n,) for membership (n,), within each class, weighted by members."""
    found, weights = [], []
    for k in sorted({*classes.tolist()}):
        of = classes == k
        y, s = member[of].numpy().astype(int), scores[of].numpy()
        if 0 < y.sum() < len(y):
            found.append(auc(y, np.stack([-s, s], 1)))
            weights.append(y.sum())
    return float(np.average(found, weights=weights)) if found else float("nan")


def explained(sent: Tensor, rows: Tensor, known: tuple[Tensor, Tensor]) -> float:
    """Private rows from what was sent of them, by a linear probe: the share of their variance that
    it explains.

    Chance, the mean of the known rows, is 0.

    Args:
        sent, rows: sent vectors (m, d), and the private rows (m, p) behind them.
        known: the same of n rows that the attacker knows, from which the probe learns.
    """
    from sklearn.linear_model import RidgeCV  # slow to import

    x, y = (part.double() for part in known)
    scale = x.std(0)
    scale[scale <= 1e-3 * scale.max()] = torch.inf  # a number that hardly varied tells nothing
    probe = RidgeCV(PENALTIES).fit((x / scale).numpy(), y.numpy())
    error = torch.from_numpy(probe.predict((sent.double() / scale).numpy())).view_as(rows) - rows
    return float(1 - error.square().sum() / (y.mean(0) - rows).square().sum().clamp_min(1e-12))


def explained_by_bins(sent: Tensor, rows: Tensor, known: tuple[Tensor, Tensor]) -> float:
    """Private rows from the bins of their columns: the share of their variance that is explained by
    the mean of the known rows in the same bin, or else between the nearest bins with known rows.

    Args:
        sent, rows: bins and the private rows (m, p) behind them.
        known: the same of n rows that the attacker knows.
    """
    guesses = torch.empty_like(rows, dtype=torch.float64)
    for f in range(rows.shape[1]):
        places, bin_of = np.unique(known[0][:, f].numpy(), return_inverse=True)
        means = np.bincount(bin_of, known[1][:, f].numpy()) / np.bincount(bin_of)
        guesses[:, f] = torch.from_numpy(np.interp(sent[:, f].numpy(), places, means))
    error, spread = guesses - rows, known[1].double().mean(0) - rows
    return float(1 - error.square().sum() / spread.square().sum().clamp_min(1e-12))


def imitation(x: Tensor, answers: Tensor) -> Predict:
    """A model that imitates a client from its answers (n, K), log-probabilities, on rows (n, ...):
    kernel regression with a Gaussian kernel whose width is the median distance.
    """
    known, mean = x.flatten(1).double(), answers.double().mean(0)
    distances = torch.cdist(known, known)
    width = distances[distances > 0].median() if len(known) > 1 else torch.ones(())
    kernel = torch.exp(-((distances / width) ** 2))
    weights = torch.linalg.solve(kernel + RIDGE * torch.eye(len(kernel)), answers.double() - mean)

    def predict(rows: Tensor) -> Tensor:
        near = torch.exp(-((torch.cdist(rows.flatten(1).double(), known) / width) ** 2))
        guessed: Tensor = near @ weights + mean
        return guessed.log_softmax(-1)

    return predict
