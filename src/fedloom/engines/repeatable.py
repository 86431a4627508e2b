"""Makes runs on a GPU repeat to the bit."""

import contextlib
import os
from collections.abc import Iterator

import torch

WORKSPACE = ":4096:8"
"""A workspace with which cuBLAS adds in one order, from NVIDIA's documentation of
`CUBLAS_WORKSPACE_CONFIG`.
"""


def add_in_one_order(device: str) -> None:
    """Let kernels of a GPU add in one order from now on, as they do on a CPU with one thread.

    An operation of a user's network that has no such kernel runs as usual, with PyTorch's warning.
    A process must call this before its first product of matrices on the GPU;
    `CUBLAS_WORKSPACE_CONFIG` is kept if it is set.
    """
    if _on_gpu(device):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True, warn_only=True)


@contextlib.contextmanager
def repeatable(device: str) -> Iterator[None]:
    """`add_in_one_order` within it; on exit the process has its setting from before."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    add_in_one_order(device)
    try:
        yield
    finally:
        # on a CPU there is nothing to restore, and the call would load torch's compiler
        if _on_gpu(device):
            torch.use_deterministic_algorithms(before, warn_only=only_warned)


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"
