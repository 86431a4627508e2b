"""Label inference: a passive party guesses labels from the messages that it receives.

The attacker is honest but curious. It follows the protocol, and guesses the classes of the aligned
samples from the messages of one moment. An attacker that keeps messages of many rounds can do
better, because fresh noise averages out. Each function states the attacker's knowledge. Symbols: n
aligned samples, Z classes, d numbers per row.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FITTING = 30
"""Newton steps of a logistic regression; each lowers its loss."""
PASSES = 10
"""Fits of `completion`, each with more of the unlabeled rows."""
RIDGE = 0.03
"""Weight of the squared coefficients in a logistic regression."""


def direct(gradients: Tensor) -> Tensor:
    """The coordinate with the smallest gradient.

    The attacker knows: the gradient (n, Z) of each row's cross-entropy in the logits that it sent,
    and that the active party sums all parties' logits. That gradient is p - onehot(label), p the
    prediction: negative only at the label.
    Source: C. Fu et al., "Label Inference Attacks Against Vertical Federated Learning", USENIX
        Security 2022.

    Returns:
        The guessed classes (n,).
    """
    return gradients.argmin(-1)


def nearest(received: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """The class of the nearest row by cosine, among rows of known class.

    The attacker knows: a vector for each row, (n, d), and the classes `labels` (k,) of the rows
    `known` (k,), such as one of each class. The vectors are gradients that it received: those of
    one class point in the same direction, see O. Li et al., "Label Leakage and Protection in
    Two-party Split Learning", ICLR 2022. With its own embeddings as
    vectors this is a control: the success of the same known labels without any message.

    Returns:
        The guessed classes (n,).
    """
    return labels[_cosine(received, received[known]).argmax(-1)]


def nearest_prototype(embedded: Tensor, prototypes: Tensor) -> Tensor:
    """The class of the nearest prototype by cosine.

    The attacker knows: its own embeddings (n, d), the prototypes (Z, d) that it received, and the
    class of each, which the protocol needs. It knows no label. A class without a prototype has
    zeros.

    Returns:
        The guessed classes (n,).
    """
    missing = prototypes.norm(dim=-1) == 0
    return _cosine(embedded, prototypes).masked_fill(missing, -torch.inf).argmax(-1)


def completion(embedded: Tensor, known: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Passive model completion: a head on the attacker's own extractor, learned from few labeled
    and many other rows.

    The attacker knows: its own embeddings (n, d), and the classes `labels` (k,) of the rows `known`
        (k,). It uses no
    message: its advantage is an extractor that was trained in the federation. The n rows may
    include others, such as its unaligned ones.
    Source: C. Fu et al., see `direct`. They use MixMatch for the unlabeled rows, and train the
    extractor further. Here it is frozen, and a logistic regression learns from its own guesses: the
    most confident tenth of each class, then two tenths, until all count, with the same total weight
    as the known rows. That needs neither a step size nor randomness, and takes a fraction of a
    second. Its success is no bound on that of the original.

    Returns:
        The guessed classes (n,).
    """
    x = embedded.double()
    x = F.pad((x - x.mean(0)) / x.std(0, correction=0).clamp_min(1e-12), (0, 1), value=1.0)
    guesses = torch.zeros(len(x), dtype=torch.long, device=x.device)
    weights = x.new_zeros(len(x))
    guesses[known], weights[known] = labels, 1.0
    for tenths in range(1, PASSES + 1):
        sureness, guesses = torch.softmax(x @ logistic(x, guesses, weights, classes), -1).max(-1)
        sureness[known], guesses[known] = torch.inf, labels
        weights = _surest(sureness, guesses, classes, tenths / PASSES).to(x)
        weights[known] = 0.0
        weights[known] = weights.sum().clamp_min(1.0) / len(known)
    return (x @ logistic(x, guesses, weights, classes)).argmax(-1)


def known_rows(labels: Tensor, each: int, rng: np.random.Generator) -> Tensor:
    """Numbers (k,) of rows whose labels (n,) an attacker is given: `each` of every class, or all of
    a smaller class.
    """
    order = torch.from_numpy(rng.permutation(len(labels))).to(labels.device)
    picked = [order[labels[order] == label][:each] for label in set(labels.tolist())]
    return torch.cat(picked).sort().values


def success(guesses: Tensor, labels: Tensor, known: Tensor) -> float:
    """The share of correct guesses (n,) among the rows whose labels (n,) were not known."""
    return float((guesses == labels)[_others(labels, known)].double().mean())


def chance(labels: Tensor, known: Tensor) -> float:
    """The success of always guessing the class (n,) that is most frequent among the rows that are
    not known.
    """
    counts = torch.bincount(labels[_others(labels, known)])
    return float(counts.max() / counts.sum())


def _others(labels: Tensor, known: Tensor) -> Tensor:
    """A mask (n,) of the rows that are not known."""
    others = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    others[known] = False
    return others


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines (n, k) of the rows of a (n, d) and b (k, d), in float64: small gradients underflow
    when squared.
    """
    a, b = (x.double() for x in (a, b))
    return F.normalize(a, dim=-1, eps=1e-150) @ F.normalize(b, dim=-1, eps=1e-150).T


def logistic(x: Tensor, labels: Tensor, weights: Tensor, classes: int) -> Tensor:
    """Coefficients (d, Z) of a logistic regression on rows x (n, d) of these classes (n,) with
    these weights (n,).

    Newton steps with one upper bound of the Hessian: D. Böhning, "Multinomial logistic regression
    algorithm", 1992.
    """
    x, labels, weights = x[weights > 0], labels[weights > 0], weights[weights > 0]
    targets, weighted = F.one_hot(labels, classes).to(x), (x * (weights / weights.sum())[:, None]).T
    bound = torch.linalg.cholesky(
        weighted @ x / 2 + RIDGE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    )
    found = x.new_zeros(x.shape[1], classes)
    for _ in range(FITTING):
        gradient = weighted @ (torch.softmax(x @ found, -1) - targets) + RIDGE * found
        found = found - torch.cholesky_solve(gradient, bound)
    return found


def _surest(sureness: Tensor, guesses: Tensor, classes: int, share: float) -> Tensor:
    """A mask (n,) of this share of the rows of each guessed class, the most confident first."""
    taken = torch.zeros(len(guesses), dtype=torch.bool, device=guesses.device)
    for label in range(classes):
        rows = (guesses == label).nonzero()[:, 0]
        order = sureness[rows].argsort(descending=True, stable=True)
        taken[rows[order[: math.ceil(share * len(rows))]]] = True
    return taken
