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
import torch
from safetensors.torch import load_file

from fedloom.api import execute
from fedloom.core import message
from fedloom.core.evaluation import predictions
from fedloom.core.party import NETWORK_STATE
from fedloom.experiment.config.local import LocalConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.run.trained import TrainedModels
from fedloom.methods import registry
from fedloom.remote.node.store import _leaves
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
    here = execute(run, keep_models=True)
    net = run.engine.model_copy(update={"name": "net", "federation": str(nodes)})
    there = execute(run.model_copy(update={"engine": net}))
    same(there.summary, here.summary)
    same_metrics(there.metrics, here.metrics)
    assert here.trained is not None
    same_models(here.trained, nodes.parent)


def same_models(trained: TrainedModels, folder: Path) -> None:
    """Each node has a file of the model that the main metric is of, or none."""
    plan = trained._plan
    mode = plan.method.main_mode(plan.cfg)
    broadcast = {} if plan.server is None else plan.server.broadcast()
    for i in range(len(plan.clients)):
        runs = (folder / f"node-{i}").glob("run-*/run.json")
        path = max(runs, key=lambda p: p.stat().st_mtime_ns).parent / "model.safetensors"
        party, fresh = trained.party(i), plan.clients[i]()
        names = [name for name in party.EXPORT if name in party.state_names]
        assert path.exists() == bool(names)
        if not names:
            continue
        on = [*party.context.tests][-1]
        wanted = predictions(party, on=on, eval_mode=mode, broadcast=broadcast, probabilities=True)
        with party.scratch():
            party.prepare(eval_mode=mode, broadcast=broadcast)
            state = {name: message.map_tensors(torch.clone, party.state()[name]) for name in names}
        found = load_file(path)
        leaves = {
            where: leaf
            for name, tree in state.items()
            for where, leaf in _leaves(tree, "" if name in NETWORK_STATE else name)
            if isinstance(leaf, torch.Tensor)
        }
        assert found.keys() == leaves.keys()
        # trees, lines and ensembles are restored as they are
        if party._network is None or len(names) > 2:
            assert all(torch.equal(found[name], leaf) for name, leaf in leaves.items())
            continue
        fresh.params = {name: found[name] for name in fresh.params}
        fresh.buffers = {name: found[name] for name in fresh.buffers}
        again = party.context.task.soft(fresh.infer(party.context.tests[on].every))
        assert torch.equal(again, wanted["probabilities"])
