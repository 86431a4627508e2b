"""Measures on this machine whether parties train faster batched than in turn, for the engine
`auto`.
"""

import copy
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedloom.core.context import ClientContext
from fedloom.core.engine import Engine
from fedloom.core.optim import Optimizer
from fedloom.core.party import Party
from fedloom.engines.batched import BatchedEngine
from fedloom.engines.local import LocalEngine

STEPS, BATCH, PAIRS = 2, 32, 5
MOST = 32
"""Maximum number of parties that are measured; more gain no less."""


class ProbeParty(Party[Optimizer]):
    """A party that takes a few steps with the network, optimizer and inputs of another one."""

    STATE = ("params", "buffers", "opt")
    CALLS = ("steps",)

    def setup(self) -> None:
        """Build the network."""
        self.network(self.context.build(), self.cfg)

    def steps(self) -> None:
        """Train on the mean square of the outputs, which needs no labels."""
        self.train(lambda x, _: self.model(x).square().mean(), self.epochs(0, epochs=1, size=BATCH))


def size(count: int) -> int:
    """How many parties are measured in place of `count`: the power of 2 below, at most `MOST`."""
    return min(1 << (count.bit_length() - 1), MOST)


def speedup(party: Party[Any], count: int) -> float:
    """CPU seconds of training in turn, divided by those of training batched: the median of five
    alternations.

    Args:
        party: one of the parties, with data; it is not changed.
        count: the number of parties.
    """
    data, module = party.data, party.net.module
    some = torch.arange(STEPS * BATCH) % len(data)
    labels = torch.zeros(len(data.pool), dtype=torch.int64)
    rows = replace(data, labels=labels, index=data.index[some], present=None)
    network = partial(copy.deepcopy, module)
    runs: list[Engine] = []
    with torch.random.fork_rng(devices=[]):
        for make in (LocalEngine, BatchedEngine):
            contexts = [ClientContext(id=n, data=rows, network=network) for n in range(size(count))]
            runs.append(make([ProbeParty(party.net.optimizer, context) for context in contexts]))
        found = []
        for n in range(1 + PAIRS):
            spent = []
            for engine in runs:
                start = time.process_time()
                engine.call(engine.ids, "steps", {}, None, (n, 0))
                spent.append(time.process_time() - start)
            found.append(spent[0] / spent[1])
    return statistics.median(found[1:])  # the first batched gradient of a process is much slower
