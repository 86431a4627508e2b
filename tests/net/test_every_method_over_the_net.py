"""Every registered method at nodes, over real connections, against the loop: the same numbers to
the bit.

Those whose parties hold columns have one in the coordinator's house, which draws from the same
generator of torch's as
nodes in this process would: they meet processes of their own in `test_faults.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.api import execute
from fedloom.experiment.config.local import LocalConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.methods import registry
from tests.engines.test_every_method import run_of
from tests.methods.test_local import ALL
from tests.net.nodes import federation
from tests.net.test_faults import same, same_metrics

METHODS = sorted(name for name, method in registry().items() if method.setting == "horizontal")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A federation of four nodes, for all tests."""
    with federation(tmp_path_factory.mktemp("four"), 4) as (path, _):
        yield path


@pytest.mark.each_time("fedal", "afind-plus", "fedglm", "augfl")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_same_numbers_over_the_net(name: str, nodes: Path) -> None:
    compared(run_of(name, "none"), nodes)


def test_a_first_round_that_probes_asks_twice_over_the_net(nodes: Path) -> None:
    run = run_of("ditto-afind", "none")
    compared(
        run.model_copy(
            update={"params": {**run.params, "threshold": "calibrated", "explore_by": "probe"}}
        ),
        nodes,
    )


def test_local_training_is_the_same_over_the_net(nodes: Path) -> None:
    compared(run_of("fedal", "none").model_copy(update={"local": LocalConfig(**ALL)}), nodes)


def compared(run: RunConfig, nodes: Path) -> None:
    here = execute(run)
    net = run.engine.model_copy(update={"name": "net", "federation": str(nodes)})
    there = execute(run.model_copy(update={"engine": net}))
    same(there.summary, here.summary)
    same_metrics(there.metrics, here.metrics)
