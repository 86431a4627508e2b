"""Writes the folders of a horizontal run: one for each client's model, and one for the model that
all share.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import models
from fedloom._version import __version__
from fedloom.core.errors import CheckpointError, ModelError
from fedloom.core.message import Tree
from fedloom.core.party import Party
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import TableEncoder
from fedloom.data.sources import load_raw
from fedloom.data.tables import RawTable
from fedloom.deploy import tables
from fedloom.deploy.folder import NumberInfo
from fedloom.deploy.models import NETWORK, ModelInputs, load_model, network_class, write_model
from fedloom.deploy.source import source, state_of, traced
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.trained import TrainedModels
from fedloom.methods.tables.fedglm import FedGLMClient

SERVER = "server"
"""The folder of the model that all clients share."""
ROWS = 256
"""Maximum number of test rows on which folders are compared with the run."""
CLOSE = 1e-4
"""Tolerance of probabilities."""


@dataclass(frozen=True)
class WrittenModels:
    """The folders that were written.

    Attributes:
        names: of the folders.
        networks: the network in each, by its folder's name.
        skipped: clients without a folder, with the reason.
        tried: number of test rows on which predictions were compared.
    """

    names: list[str]
    networks: dict[str, str]
    skipped: dict[str, str]
    tried: int


def write_models(
    plan: RunPlan, states: Mapping[str, Any], done: int, staging: Path
) -> WrittenModels:
    """Write and verify the folders of all models of a run, from the states of its parties after
    `done` rounds.

    Raises:
        DataError: a client's state is at its node.
        CheckpointError: a folder does not predict as the run did.
    """
    data = plan.data.dataset
    assert isinstance(data, Dataset)
    broadcast: Mapping[str, Tree] = {}
    if plan.server is not None:
        plan.server.load(states[plan.planner.server_name(plan)])
        broadcast = plan.server.broadcast()
    main = next(iter(plan.cfg.eval_modes), "")
    found = WrittenModels([], {}, {}, 0)
    trained = TrainedModels(plan, states)
    tried, shared, first = 0, _Shared(), None
    for i, name in enumerate(_folders(trained.names.values())):
        party = trained.party(i)
        if getattr(party.cfg, "own", ()):
            found.skipped[name] = (
                "it mixes models of the owner's own rows (params.own), which have no folder"
            )
            continue
        if plan.contexts[i].network is None and (
            tables.has_trees(party) or tables.is_linear(party)
        ):
            tried = max(tried, _write_trees(plan, data, name, party, done, staging))
            found.names.append(name)
            found.networks[name] = plan.architectures[i]
            continue
        if plan.contexts[i].network is None:
            black = f"a black box ({plan.architectures[i]}), whose state is not tensors"
            found.skipped[name] = (
                f"it has {black if plan.contexts[i].black_box else 'a model that is no network'}"
            )
            continue
        first = party if i == plan.training[0] else first
        tried = max(tried, _write(plan, data, i, name, party, main, broadcast, done, staging))
        found.names.append(name)
        found.networks[name] = plan.architectures[i]
        shared.add(party, broadcast)
    if found.names and first is None and not tables.is_joint(trained.party(plan.training[0])):
        found.skipped[SERVER] = (
            "each owner predicts by trees or an effect of its own besides; take an owner's folder"
        )
    elif found.names and first is None:  # all owners have the same trees
        _write_trees(plan, data, SERVER, trained.party(plan.training[0]), done, staging)
        found.names.append(SERVER)
        found.networks[SERVER] = plan.architectures[0]
    elif plan.server is not None and shared.same and not found.skipped:
        i = plan.training[0]
        if len(getattr(data, "fits", ())) > 1:
            found.skipped[SERVER] = (
                "each client standardizes rows by its own; take a client's folder"
            )
        elif first is not None:
            _write(plan, data, i, SERVER, first, "", broadcast, done, staging)
            found.names.append(SERVER)
            found.networks[SERVER] = plan.architectures[i]
    return WrittenModels(found.names, found.networks, found.skipped, tried)


def _folders(names: Iterable[str]) -> list[str]:
    """Names of folders for clients, such as of their owners, that are safe and differ also on disks
    without case.
    """
    found: list[str] = []
    for i, name in enumerate(names):
        safe = re.sub(r"[^\w.-]+", "_", name).strip("._") or f"client-{i}"
        taken = {SERVER, *(other.lower() for other in found)}
        found.append(f"{safe}-{i}" if safe.lower() in taken else safe)
    return found


class _Shared:
    """Whether all clients predict with equal weights, without any evaluation mode."""

    def __init__(self) -> None:
        self.same = True
        self._first: dict[str, Tensor] | None = None

    def add(self, party: Party[object], broadcast: Mapping[str, Tree]) -> None:
        """Compare the next client with the first."""
        with party.scratch():
            party.prepare(eval_mode="", broadcast=broadcast)
            own = {k: v.clone() for k, v in {**party.params, **party.buffers}.items()}
        first = self._first = self._first or own
        same = own.keys() == first.keys() and all(
            torch.equal(value, first[k]) for k, value in own.items()
        )
        self.same = self.same and same


def _write(
    plan: RunPlan,
    data: Dataset,
    i: int,
    name: str,
    party: Party[object],
    mode: str,
    broadcast: Mapping[str, Tree],
    done: int,
    staging: Path,
) -> int:
    """Write one folder, and compare it with the party; returns the number of rows compared."""
    tests = party.context.tests.get("test") or party.context.tests["own"]
    x = tests.x(torch.arange(min(ROWS, len(tests))))
    with party.scratch():
        party.prepare(eval_mode=mode, broadcast=broadcast)
        expected = plan.data.task.soft(party.infer(x))
        graph = traced(party)
        state = state_of(graph)
    model, norm = plan.architectures[i], plan.run.models.norm
    values = {
        "fedloom": __version__,
        "owner": name,
        "method": plan.method.name,
        "eval_mode": mode,
        "round": done,
        "classes": plan.data.classes,
        **number_of(plan),
        "model": model if _is_plain(model, data, plan.data.task.width, norm, state) else None,
        "norm": norm,
        "inputs": _inputs(plan, data, i),
    }
    write_model(staging / name, values, state, source(graph))
    plain = network_class(staging / name / NETWORK)()
    plain.load_state_dict(state)
    loaded = load_model(staging / name, trust=[NETWORK]).network
    for network in (plain.eval(), loaded):
        with torch.inference_mode():
            if float((plan.data.task.soft(network(x)) - expected).abs().max()) > CLOSE:
                raise CheckpointError(
                    f"the folder {name} does not predict as the run did: {plan.method.name} "
                    "predicts by more than one forward pass of a network in evaluation mode "
                    "(such as params.batchnorm=batch)"
                )
    return len(x)


def _write_trees(
    plan: RunPlan, data: Dataset, name: str, party: Party[object], done: int, staging: Path
) -> int:
    """As `_write`, for a party whose model are trees, or linear."""
    rows = party.context.tests.get("test") or party.context.tests["own"]
    x = rows.x(torch.arange(min(ROWS, len(rows))))
    if isinstance(party, FedGLMClient):
        source, state = tables.linear_network(data, party)
    else:
        source, state = tables.tree_network(data, party)
    values = {
        "fedloom": __version__,
        "owner": name,
        "method": plan.method.name,
        "eval_mode": "",
        "round": done,
        "classes": plan.data.classes,
        **number_of(plan),
        "model": None,
        "norm": None,
        "inputs": tables.inputs_of(data),
    }
    write_model(staging / name, values, state, source)
    with torch.inference_mode():
        found = load_model(staging / name, trust=[NETWORK]).network(tables.encoded(data, x))
    soft = plan.data.task.soft
    if float((soft(found) - soft(party.infer(x))).abs().max()) > CLOSE:
        raise CheckpointError(f"the folder {name} does not predict as the run did")
    return len(x)


def number_of(plan: RunPlan) -> dict[str, Any]:
    """What a manifest says of a number to predict; {} for classes."""
    target = plan.data.target
    if target is None:
        return {}
    return {
        "number": NumberInfo(
            label=plan.data.label, shift=target.shift, scale=target.scale, variance=target.variance
        )
    }


def _is_plain(
    model: str, data: Dataset, classes: int, norm: Any, state: Mapping[str, Tensor]
) -> bool:
    """Whether a network of fedloom by this name has exactly this state."""
    if model not in models.MODELS:
        return False
    try:
        with torch.device("meta"):
            built = models.build(model, data.input_shape, classes, norm).state_dict()
    except ModelError:
        return False
    return {k: v.shape for k, v in built.items()} == {k: v.shape for k, v in state.items()}


def _inputs(plan: RunPlan, data: Dataset, i: int) -> ModelInputs:
    """The preprocessing of client i's rows."""
    shift, scale, fill = data.shift, data.scale, np.zeros(0)
    fits = getattr(data, "fits", ())
    if fits:
        owner = 0
        if len(fits) > 1 and data.groups is not None and plan.data.split is not None:
            owner = int(data.groups[plan.data.split.shards[i][0]])
        fill, shift, scale = fits[owner]
    offset = getattr(data, "offset", None)
    if offset is not None:
        shift = shift.astype(np.float64) + offset
        fill = fill.astype(np.float64) + offset if len(fill) else fill
    columns: list[dict[str, Any]] = []
    recipe: Mapping[str, Any] = getattr(data, "recipe", {})
    if data.kind == "table":
        columns = list(recipe.get("columns", ())) or _columns(plan)
    return ModelInputs(
        kind=data.kind,
        shape=data.input_shape,
        columns=tuple(columns),
        **{key: recipe[key] for key in ("missing_words", "decimal", "optional") if key in recipe},
        fill=tuple(map(float, np.nan_to_num(fill))),
        mean=tuple(map(float, shift)),
        scale=tuple(map(float, scale)),
    )


def _columns(plan: RunPlan) -> list[dict[str, Any]]:
    """The rules of a registered table's raw columns."""
    root = plan.run.data.root
    raw = load_raw(plan.run.data.name, root=Path(root) if root else None)
    assert isinstance(raw, RawTable)
    columns: list[dict[str, Any]] = TableEncoder.plain(raw.columns).to_dict()["columns"]
    return columns
