"""What protections against a coordinator that lies cost in a call: `python -m benchmarks.mends
[CALLS]`.

A node without a network answers calls of FedAvg with DP-SGD, one step over 150 rows. Each
protection is left out in turn; the table has the CPU time of a call with all of them over that
without one, the median of three measurements.
"""

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.audit_epsilon import FORM, USUAL, Node, changed, config
from fedloom.methods.averaging import private
from fedloom.protect.noise import Draws
from fedloom.remote.node import task_runner
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.outgoing import OutgoingFilter

Change = tuple[Any, str, Any]
WITHOUT: dict[str, list[Change]] = {
    "bounded arguments (D2)": [(task_runner, "_bounded", lambda given: True)],
    "a call's turn in its round (K1)": [(task_runner, "_take_turn", lambda *_: None)],
    "a charge before the work (B3)": [(private, "charge", lambda *_, **__: None)],
    "clipping that withstands infinity (D1)": [
        (
            private,
            "clipped_rows",
            lambda each, most: each * (most / each.norm(dim=1, keepdim=True).clamp_min(most)),
        )
    ],
    "no slow tiny numbers (D5)": [(torch, "set_flush_denormal", lambda on: True)],
    "fresh noise on a lattice": [(Draws, "blur", lambda self, total, sigma, size: total)],
    "limits of replies (outgoing)": [(OutgoingFilter, "__call__", lambda self, reply: reply)],
    "audit log": [(AuditLog, "write", lambda *_, **__: None)],
}


def seconds(calls: int, *changes: Change) -> float:
    """CPU seconds of one of so many calls."""
    with tempfile.TemporaryDirectory() as folder, changed(*changes):
        node = Node(Path(folder) / "0", USUAL, config(4.0, calls + 1, FORM))
        try:
            sent = {
                "t": 0,
                "weights": {name: 0.1 * torch.ones_like(w) for name, w in node.weights.items()},
            }
            node.asked("update", 0, sent)
            begun = time.process_time()
            for t in range(1, calls + 1):
                assert node.asked("update", t, sent)[1] is not None
            return (time.process_time() - begun) / calls
        finally:
            node.close()


def main(calls: int = 100) -> None:
    """Print a line for each protection."""
    logging.disable()
    torch.set_num_threads(1)
    median: Callable[..., float] = lambda *changes: statistics.median(
        seconds(calls, *changes) for _ in range(3)
    )
    whole = median()
    print(
        f"| protection | CPU time of a call with it, over that without ({1e3 * whole:.1f} ms "
        "with all) |\n|---|---|"
    )
    for name, changes in WITHOUT.items():
        print(f"| {name} | {whole / median(*changes):.2f} |", flush=True)


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["100"])[0]))
