"""What makes a run on a GPU repeat, as far as a machine without one shows it: `benchmarks.gpu`
shows the rest.
"""

import os

import pytest
import torch

from fedloom.engines.repeatable import WORKSPACE, repeatable


def test_sums_have_one_order_within_and_the_setting_from_before_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with repeatable("cuda:0"):
        assert torch.are_deterministic_algorithms_enabled()
        # a user's network may have no such kernel
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == WORKSPACE
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_setting_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with repeatable("cuda"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_run_on_the_cpu_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with repeatable("cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
