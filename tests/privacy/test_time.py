"""A call with a guarantee takes the same time whatever rows are in a region, as far as tiny numbers
go (F4).

Some processors compute subnormal numbers slowly, others do not. So the test counts them in place of
seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.audit_epsilon import FORM, USUAL, Node, config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.core.engine import run_task
from fedloom.core.scores import auc
from fedloom.remote.node import task_runner

CALLS = 40
SMALLEST = 0x00800000
"""The bits of the smallest normal float32."""


class Tiny(TorchDispatchMode):
    """Counts the subnormal numbers that operations make."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                # by bits: a processor that flushes sees zeros
                bits = x.detach().numpy().view(np.int32) & 0x7FFFFFFF
                self.count += int(((bits > 0) & (bits < SMALLEST)).sum())
        return out


def crafted(like: dict[str, Tensor], above: float) -> dict[str, Tensor]:
    """Weights that are normal numbers, whose products are subnormal for rows with a first column
    above this, and 0 for all others.
    """
    weights = {name: torch.zeros_like(w) for name, w in like.items()}
    first, *others = (name for name, w in like.items() if w.dim() == 2)
    weights[first][:, 0] = 1e-20
    weights[first.replace("weight", "bias")][:] = -above * 1e-20
    for name in others:
        weights[name][:] = 1e-21
    return weights


def told(folder: Path) -> float:
    """The AUC by which the tiny numbers of a call tell whether all rows are above a threshold, or
    none.
    """
    run: Any = config(4.0, CALLS, FORM)
    run = run.model_copy(update={"models": run.models.model_copy(update={"pool": ("mlp",)})})
    node, honest, counted = Node(folder, USUAL, run), run_task, list[int]()

    def counting(*arguments: Any) -> Any:
        with Tiny() as tiny:
            reply = honest(*arguments)
        counted.append(tiny.count)
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_runner, "run_task", counting)
        try:
            like, above = node.weights, np.arange(CALLS) % 2 == 0
            for t, all_rows in enumerate(above):
                weights = crafted(like, -9.0 if all_rows else 9.0)
                assert node.asked("update", t, {"t": 0, "weights": weights})[1] is not None
        finally:
            node.close()
    score = np.array(counted, float)
    return auc(above.astype(int), np.stack([-score, score], 1))


def test_tiny_numbers_do_not_tell_which_rows_are_in_a_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush tiny numbers")
    assert told(tmp_path / "with") <= 0.6
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)
    assert told(tmp_path / "without") > 0.9  # so the protection is what hides it
