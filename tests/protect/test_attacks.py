"""Label inference on closed cases, where what an attack finds is known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.rng import stream
from fedloom.protect.attacks import (
    chance,
    completion,
    direct,
    known_rows,
    nearest,
    nearest_prototype,
    success,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(stream(seed, "test").standard_normal(shape)).float()


def mixture(
    distance: float, n: int = 400, classes: int = 4, d: int = 20, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows (n, d) around one corner for each class, so far from each other, and their
    classes (n,).
    """
    labels = torch.arange(n) % classes
    return distance * F.one_hot(labels, d) + normal(n, d, seed=seed), labels


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 30.0])
def test_the_gradient_by_logits_is_below_zero_at_the_label_alone(
    classes: int, scale: float
) -> None:
    logits, labels = scale * normal(200, classes), torch.arange(200) % classes
    logits = logits.double().requires_grad_()
    F.cross_entropy(logits, labels).backward()
    assert torch.equal(direct(logits.grad), labels)
    hidden = F.one_hot(labels, classes) * 0.02 + logits.grad  # more than 1/200, so the sign is lost
    assert success(direct(hidden), labels, torch.tensor([], dtype=torch.long)) == 0


def test_nearest_on_separable_rows_needs_one_of_each_class() -> None:
    x, labels = mixture(30.0)
    known = known_rows(labels, 1, stream(0, "attack"))
    # gradients shrink as a network learns
    lengths = torch.linspace(1e-30, 1e3, len(x), dtype=torch.float64)[:, None]
    assert torch.equal(nearest(x * lengths, known, labels[known]), labels)
    assert torch.equal(nearest(-x, known, labels[known]), labels)


def test_nearest_gives_known_rows_their_own_class_and_knows_no_other() -> None:
    x, labels = mixture(0.0)
    known = known_rows(labels, 1, stream(0, "attack"))
    assert torch.equal(nearest(x, known, labels[known])[known], labels[known])
    some = known[labels[known] != 3]
    assert 3 not in nearest(x, some, labels[some])


def test_prototypes_tell_as_much_as_they_were_made_to() -> None:
    """Three quarters of the rows point at their class's prototype, the others at the next one."""
    classes, n = 5, 200
    labels = torch.arange(n) % classes
    mu, _ = torch.linalg.qr(normal(8, classes))
    points = torch.where(torch.arange(n) < 150, labels, (labels + 1) % classes)
    embedded = mu.T[points] * torch.linspace(0.1, 9, n)[:, None]
    guesses = nearest_prototype(embedded, mu.T)
    nobody = torch.tensor([], dtype=torch.long)
    assert torch.equal(guesses, points) and success(guesses, labels, nobody) == 0.75


def test_a_class_without_a_prototype_is_never_guessed() -> None:
    """A cosine of 0 with nothing would be more than one below 0."""
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    embedded = torch.tensor([[-1.0, -2.0], [-2.0, -1.0], [3.0, 1.0]])
    assert nearest_prototype(embedded, prototypes).tolist() == [0, 2, 0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_completion_finds_what_rows_without_labels_tell(seed: int) -> None:
    """A few rows are a bad picture of their class; all rows together show where the classes are."""
    x, labels = mixture(3.5, seed=seed)
    known = known_rows(labels, 3, stream(seed, "attack"))
    few = success(nearest(x, known, labels[known]), labels, known)
    many = success(completion(x, known, labels[known], 4), labels, known)
    best = success(x[:, :4].argmax(-1), labels, known)  # where the corners are known
    assert few + 0.04 < many < best + 0.01


def test_completion_does_not_mind_units_and_constant_numbers() -> None:
    x, labels = mixture(5.0)
    known = known_rows(labels, 2, stream(0, "attack"))
    guesses = completion(x, known, labels[known], 4)
    other = torch.cat([x * torch.logspace(-4, 4, 20) + 7, torch.full((len(x), 3), 2.5)], 1)
    assert (completion(other, known, labels[known], 4) == guesses).float().mean() > 0.99
    assert torch.equal(completion(x, known, labels[known], 4), guesses)


def test_completion_finds_a_class_of_which_nothing_is_known_by_exclusion() -> None:
    x, labels = mixture(8.0)
    known = known_rows(labels, 1, stream(0, "attack"))
    some = known[labels[known] != 3]
    assert success(nearest(x, some, labels[some]), labels, some) < 0.76
    assert success(completion(x, some, labels[some], 4), labels, some) > 0.97


def test_labels_that_have_nothing_to_do_with_rows_are_not_found() -> None:
    n, classes = 4000, 5
    x, _ = mixture(5.0, n, classes)
    labels = torch.from_numpy(stream(3, "permuted").permutation(np.arange(n) % classes))
    known = known_rows(labels, 2, stream(0, "attack"))
    found = [nearest(x, known, labels[known]), completion(x, known, labels[known], classes)]
    found += [nearest_prototype(x, normal(classes, 20)), direct(x[:, :classes])]
    for guesses in found:
        assert success(guesses, labels, known) == pytest.approx(
            1 / classes, abs=4 * (0.16 / n) ** 0.5
        )


def test_known_rows_are_so_many_of_each_class_and_others_for_others() -> None:
    labels = torch.tensor([0] * 50 + [2] * 50 + [5] * 2)
    known = known_rows(labels, 3, stream(0, "attack", 1))
    assert (
        torch.bincount(labels[known]).tolist() == [3, 0, 3, 0, 0, 2]
        and len(set(known.tolist())) == 8
    )
    assert torch.equal(known, known_rows(labels, 3, stream(0, "attack", 1)))
    assert not torch.equal(known, known_rows(labels, 3, stream(0, "attack", 2)))


def test_success_and_chance_count_only_what_was_not_known() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    known = torch.tensor([0, 3])
    assert success(torch.tensor([0, 0, 1, 1, 0, 2]), labels, known) == 0.5
    # how known ones are guessed is no matter
    assert success(torch.tensor([1, 0, 1, 0, 0, 2]), labels, known) == 0.5
    assert chance(labels, known) == 0.5
