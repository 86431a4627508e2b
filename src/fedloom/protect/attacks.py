"""Label inference: what a party with columns and no labels can read about labels from what it is told.

The attacker is curious and passive. It follows the protocol, and guesses the classes of the aligned people from what
it is told at one time. Who keeps what it is told over many rounds can do better, as fresh noise averages out. Each
function says what it is assumed to know. Symbols: n aligned people, Z classes, d numbers a row.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FITTING = 30
"""Steps of a logistic regression; each lowers its loss."""
PASSES = 10
"""Fits of `completion`, each with more of the unlabelled rows."""
RIDGE = 0.03
"""Weight of the squared coefficients in a logistic regression."""


def direct(gradients: Tensor) -> Tensor:
    """The coordinate with the lowest gradient.

    The attacker knows: the gradient (n, Z) of each row's cross-entropy by the logits that it sent, and that the home
    adds up all parties' logits. That gradient is p - onehot(label), p the home's answer: below 0 at the label alone.
    Source: C. Fu et al., "Label Inference Attacks Against Vertical Federated Learning", USENIX Security 2022.

    Returns:
        The guessed classes (n,).
    """
    return gradients.argmin(-1)


def nearest(received: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """The class of the nearest row by cosine among those whose class is known.

    The attacker knows: a vector for each row, (n, d), and the classes `labels` (k,) of the rows `known` (k,), such as
    one of each class. The vectors are gradients that it was sent: those of one class point the same way, as O. Li et
    al. found, "Label Leakage and Protection in Two-party Split Learning", ICLR 2022. Or they are its own embeddings:
    then this is a control, what these labels are worth to somebody who is told nothing.

    Returns:
        The guessed classes (n,).
    """
    return labels[_cosine(received, received[known]).argmax(-1)]


def to_prototypes(embedded: Tensor, prototypes: Tensor) -> Tensor:
    """The class of the nearest prototype by cosine.

    The attacker knows: its own embeddings (n, d), the prototypes (Z, d) that it was sent, and what it needs for the
    protocol itself, which class each of them stands for. It knows no label. A class without a prototype has zeros.

    Returns:
        The guessed classes (n,).
    """
    missing = prototypes.norm(dim=-1) == 0
    return _cosine(embedded, prototypes).masked_fill(missing, -torch.inf).argmax(-1)


def completion(embedded: Tensor, known: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Passive model completion: a head on the attacker's own extractor, learnt from few labels and many rows without.

    The attacker knows: its own embeddings (n, d), and the classes `labels` (k,) of the rows `known` (k,). It is told
    nothing: what helps it is that its extractor was trained in the federation. Rows that nobody asks about, such as its
    unaligned ones, may stand among the n.
    Source: C. Fu et al., as `direct`. They learn from rows without labels by MixMatch, and train the extractor on.
    Here it stays as it is, and a logistic regression learns from its own guesses: of those for each class the surest
    tenth, then the surest two tenths, until all count, together as much as the known rows do. That needs no step size
    and no chance, and takes a fraction of a second. What it finds is no bound on what the original would find.

    Returns:
        The guessed classes (n,).
    """
    x = embedded.double()
    x = F.pad((x - x.mean(0)) / x.std(0, correction=0).clamp_min(1e-12), (0, 1), value=1.0)
    guesses = torch.zeros(len(x), dtype=torch.long, device=x.device)
    weights = x.new_zeros(len(x))
    guesses[known], weights[known] = labels, 1.0
    for tenths in range(1, PASSES + 1):
        sureness, guesses = torch.softmax(x @ _logistic(x, guesses, weights, classes), -1).max(-1)
        sureness[known], guesses[known] = torch.inf, labels
        weights = _surest(sureness, guesses, classes, tenths / PASSES).to(x)
        weights[known] = 0.0
        weights[known] = weights.sum().clamp_min(1.0) / len(known)
    return (x @ _logistic(x, guesses, weights, classes)).argmax(-1)


def known_rows(labels: Tensor, each: int, rng: np.random.Generator) -> Tensor:
    """Numbers (k,) of rows whose labels (n,) an attacker is given: `each` of every class, or all that there are."""
    order = torch.from_numpy(rng.permutation(len(labels))).to(labels.device)
    picked = [order[labels[order] == label][:each] for label in set(labels.tolist())]
    return torch.cat(picked).sort().values


def success(guesses: Tensor, labels: Tensor, known: Tensor) -> float:
    """The share of right guesses (n,) among the rows whose labels (n,) were not known before."""
    return float((guesses == labels)[_others(labels, known)].double().mean())


def chance(labels: Tensor, known: Tensor) -> float:
    """The success of always guessing the class (n,) that is most frequent among the rows that are not known."""
    counts = torch.bincount(labels[_others(labels, known)])
    return float(counts.max() / counts.sum())


def _others(labels: Tensor, known: Tensor) -> Tensor:
    """A mask (n,) of the rows that are not known."""
    others = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    others[known] = False
    return others


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines (n, k) of the rows of a (n, d) and b (k, d); gradients may be too small to be squared as they are."""
    a, b = (x.double() for x in (a, b))
    return F.normalize(a, dim=-1, eps=1e-150) @ F.normalize(b, dim=-1, eps=1e-150).T


def _logistic(x: Tensor, labels: Tensor, weights: Tensor, classes: int) -> Tensor:
    """Coefficients (d, Z) of a logistic regression on rows x (n, d) of these classes (n,) with these weights (n,).

    Newton steps with one matrix that is never too small: D. Böhning, "Multinomial logistic regression algorithm", 1992.
    """
    x, labels, weights = x[weights > 0], labels[weights > 0], weights[weights > 0]
    targets, weighted = F.one_hot(labels, classes).to(x), (x * (weights / weights.sum())[:, None]).T
    bound = torch.linalg.cholesky(weighted @ x / 2 + RIDGE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device))
    found = x.new_zeros(x.shape[1], classes)
    for _ in range(FITTING):
        gradient = weighted @ (torch.softmax(x @ found, -1) - targets) + RIDGE * found
        found = found - torch.cholesky_solve(gradient, bound)
    return found


def _surest(sureness: Tensor, guesses: Tensor, classes: int, share: float) -> Tensor:
    """A mask (n,) of this share of the rows that are guessed to be of each class, the surest first."""
    taken = torch.zeros(len(guesses), dtype=torch.bool, device=guesses.device)
    for label in range(classes):
        rows = (guesses == label).nonzero()[:, 0]
        order = sureness[rows].argsort(descending=True, stable=True)
        taken[rows[order[: math.ceil(share * len(rows))]]] = True
    return taken
