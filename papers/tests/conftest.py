"""Two methods, two degrees of skew and three seeds on digits: a small table whose runs are really
made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.run.execute import execute
from fedloom.report.metrics import RunMetric, value_of
from fedloom.report.read import read_run
from fedloom_papers.results import TableResults, gather
from fedloom_papers.spec import Cell, Reproduction, parsed

TEXT = """
title = "Skew <script>alert(1)</script> & noise"
system = "afind"
place = "Table I"
about = "One | number is a slip."
across = "α"
pictures = ["curves", "bytes", "columns", "bars", "partition", "mixing"]
[[rows]]
name = "AFIND+ | <i>"
run = { method = "afind", params = { epochs = 1 } }
published = { "α = 5" = 78, "α = 0.1" = [74.4, 0.7] }
[[rows]]
name = "Local"
run = { method = "local" }
published = { "α = 5" = 80.25 }
[[rows]]
name = "Large"
published = { "α = 5" = 91 }
untestable = { small = "needs ImageNet models" }
[[columns]]
name = "α = 5"
value = 5
run = { data = { options = { alpha = 5.0 } } }
[[columns]]
name = "α = 0.1"
value = 0.1
run = { data = { options = { alpha = 0.1 } } }
[[claims]]
text = "AFIND+ sends at least 1 kB more than Local, which sends nothing."
left = "AFIND+ | <i>"
right = "Local"
metric = "bytes"
unit = "kB"
by = 1
[[claims]]
text = "Large is the best."
left = "Large"
right = "Local"
[[claims]]
text = "Local alone stays below 200 %."
left = "Local @ α = 5"
right = 200
rule = "less"
[small]
about = "Digits stand in."
seeds = 3
[small.run]
rounds = 2
models = { pool = ["mlp"] }
data = { clients = 4, public_rows = 269 }
evaluate = { points = 2 }
[paper]
run = { iterations = 10 }
"""


def value(folder: Path, metric: str) -> float | None:
    """A metric of a run's folder."""
    return value_of(read_run(folder), RunMetric.parse(metric))


@dataclass(frozen=True)
class Made:
    """The reproduction, its cells at the small scale, and where each run is."""

    reproduction: Reproduction
    cells: tuple[Cell, ...]
    folder: Callable[[RunConfig], Path]

    def found(self) -> TableResults:
        """What its runs came to, read anew."""
        return gather("afind-table-1", self.reproduction, "small", self.cells, self.folder, {})


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("runs")

    def folder(run: RunConfig) -> Path:
        return out / f"{run.method}-{run.data.options['alpha']}-{run.seed}"

    reproduction = parsed(TEXT, "mine")
    cells = tuple(reproduction.cells("small"))
    for cell in cells:
        for run in cell.runs:
            execute(run, folder(run))
    return Made(reproduction, cells, folder)
