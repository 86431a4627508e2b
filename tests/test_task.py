"""What is predicted: losses, distillation and scores by numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.core.evaluation import MAX_ERROR, number_score
from fedloom.core.page import Classes, Number, Task
from fedloom.core.scores import chance_error, number_scores
from fedloom.core.task import TaskKind, refusal


def test_a_loss_of_classes_is_cross_entropy_to_the_bit() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(7, 3), torch.tensor([0, 1, 2, 2, 1, 0, 1])
    for how in ("mean", "sum", "none"):
        assert torch.equal(Classes(3).loss(z, y, how), F.cross_entropy(z, y, reduction=how))
    assert torch.equal(Classes(3).soft(z), torch.softmax(z, -1)) and torch.equal(
        Classes(3).predicted(z), z.argmax(-1)
    )


def test_losses_of_a_number() -> None:
    plain, outputs, y = Number(10.0, 2.0), torch.tensor([[1.0], [0.0]]), torch.tensor([3.0, -1.0])
    assert plain.loss(outputs, y).item() == 1.25 and plain.loss(outputs, y, "sum").item() == 2.5
    assert plain.loss(outputs, y, "none").tolist() == [2, 0.5] and plain.predicted(
        outputs
    ).tolist() == [1, 0]
    # With log variance 0 it is half the squared error; with log variance s it is (s + error / e^s)
    # / 2.
    both, spread = Number(variance=True), float(np.log(4))
    assert both.loss(torch.tensor([[1.0, 0.0]]), torch.tensor([3.0])).item() == 2
    assert both.loss(torch.tensor([[1.0, spread]]), torch.tensor([3.0])).item() == pytest.approx(
        (spread + 1) / 2
    )
    assert (plain.width, both.width) == (1, 2)


def test_what_a_student_learns_of_a_number() -> None:
    plain, both, wide = Number(), Number(variance=True), float(np.log(4))
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]])
    # numbers have no temperature
    assert plain.distill(a, b).item() == 2.5 and plain.distill(a, b, 3.0).item() == 2.5
    # KL(N(1, 1) || N(0, 4)) = ln 2 + (1 + 1) / 8 - 1 / 2
    of, by = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, wide]])
    assert both.distill(of, by).item() == pytest.approx(np.log(2) + 0.25 - 0.5, abs=1e-6)
    assert both.distill(of, of).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("task", [Classes(3), Number(), Number(variance=True)])
def test_a_gradient_of_distillation_is_that_of_its_loss(task: Task) -> None:
    torch.manual_seed(1)
    outputs = torch.randn(5, task.width, dtype=torch.float64, requires_grad=True)
    target = task.soft(torch.randn(5, task.width, dtype=torch.float64), 2.0)
    task.distill(target, outputs, 2.0).backward()
    torch.testing.assert_close(
        task.distill_gradient(target, outputs.detach(), 2.0) / 5, outputs.grad
    )
    # the other direction is the same divergence with its arguments exchanged
    if isinstance(task, Number):
        outputs.grad = None
        task.distill(outputs, target, 2.0).backward()
        torch.testing.assert_close(
            task.distill_gradient(target, outputs.detach(), reverse=True) / 5, outputs.grad
        )


def test_a_sure_gaussian_takes_steps_as_long_as_those_of_the_squared_error() -> None:
    both = Number(variance=True)
    for spread, slope in ((-10.0, 3.0), (0.0, 3.0), (float(np.log(4)), 0.75)):
        outputs = torch.tensor([[1.0, spread]], dtype=torch.float64, requires_grad=True)
        both.loss(outputs, torch.tensor([-2.0])).backward()
        assert outputs.grad is not None and outputs.grad[0, 0].item() == pytest.approx(slope)
    outputs = torch.tensor([[1.0, float(np.log(9))]], dtype=torch.float64, requires_grad=True)
    # the variance that fits the row stays the minimum
    both.loss(outputs, torch.tensor([-2.0])).backward()
    assert outputs.grad is not None and outputs.grad[0, 1].item() == pytest.approx(0, abs=1e-9)


def test_confidence_in_a_number_needs_a_variance() -> None:
    assert Classes(2).certainty(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).tolist() == pytest.approx(
        [-np.log(2), 0], abs=2e-3
    )
    assert Number(variance=True).certainty(torch.tensor([[0.0, 2.0]])).tolist() == [-1]
    with pytest.raises(ConfigError, match=r"models\.variance"):
        Number().certainty(torch.zeros(1, 1))


def test_a_number_keeps_its_unit() -> None:
    y = np.array([1e9 + 1, 1e9 + 3, 1e9 + 5])
    target = Number(1e9 + 3, 2.0)
    assert (
        target.standardized(y).tolist() == [-1, 0, 1] and target.standardized(y).dtype == np.float32
    )
    assert target.in_unit(target.standardized(y)).tolist() == y.tolist()


def test_scores_of_a_number() -> None:
    y, predicted = np.array([1.0, 2.0, 6.0]), np.array([1.0, 3.0, 4.0])
    found = number_scores(y, predicted)
    assert found == {
        "rmse": pytest.approx(np.sqrt(5 / 3)),
        "mae": 1.0,
        "r2": pytest.approx(1 - 5 / 14),
    }
    assert number_scores(y, np.full(3, 3.0)) == {"rmse": chance_error(y), "mae": 2.0, "r2": 0.0}
    assert np.isnan(number_scores(np.ones(2), np.ones(2))["r2"])


def test_a_private_score_says_three_decimals_and_has_limits() -> None:
    y = torch.tensor([0.0, 1.0, 2.0])
    found = number_score(torch.tensor([0.0, 1.00049, 2.0]), y)
    assert (
        found["squared"].item() == 0
        and found["chance"].item() == pytest.approx(0.667)
        and found["rows"] == 3
    )
    wild = number_score(torch.tensor([float("nan"), 1e9, 0.0]), y)  # two rows of 25, and one of 4
    assert wild["squared"].item() == 18 and wild["absolute"].item() == 4 and MAX_ERROR == 25
    far = number_score(torch.zeros(3), torch.tensor([0.0, float("inf"), 0.0]))
    assert all(isinstance(x, Tensor | int) and math.isfinite(x) for x in far.values())


def test_a_refusal_names_the_methods_that_can() -> None:
    tasks: dict[str, tuple[TaskKind, ...]] = {"a": ("classes",), "b": ("classes", "number")}
    assert refusal("b", "number", tasks, "") == "" and refusal("a", "classes", tasks, "") == ""
    assert refusal("a", "number", tasks, "it compares prototypes of classes") == (
        "a cannot predict a number, as it compares prototypes of classes. Methods that can: b"
    )
