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
from fedloom.core.context import Rows
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
from fedloom.experiment.run.summary import fitted
from fedloom.experiment.run.trained import TrainedModels

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
        tried: the least number of rows on which the predictions of a folder were compared.
        on: which rows these are, such as "test rows".
    """

    names: list[str]
    networks: dict[str, str]
    skipped: dict[str, str]
    tried: int
    on: str


def write_models(
    plan: RunPlan, states: Mapping[str, Any], done: int, staging: Path
) -> WrittenModels:
    """Write and verify the folders of all models of a run, from the states of its parties after
    `done` rounds. A client whose folder cannot be written, or does not predict as the run did, has
    none.

    Raises:
        DataError: a client's state is at its node.
    """
    data = plan.data.dataset
    assert isinstance(data, Dataset)
    broadcast: Mapping[str, Tree] = {}
    if plan.server is not None:
        plan.server.load(states[plan.planner.server_name(plan)])
        broadcast = plan.server.broadcast()
    main = next(iter(plan.cfg.eval_modes), "")
    networks, skipped = dict[str, str](), dict[str, str]()
    compared: list[tuple[str, int]] = []
    trained, shared, first = TrainedModels(plan, states), _Shared(), None

    def write(i: int, name: str, mode: str) -> Party[Any] | None:
        party = trained.party(i)
        try:
            compared.append(_write(plan, data, i, name, party, mode, broadcast, done, staging))
        except (CheckpointError, ModelError) as error:  # other clients may have a folder
            skipped[name] = str(error)
            return None
        networks[name] = plan.architectures[i]
        return party

    for i, name in enumerate(_folders(trained.names.values())):
        party = write(i, name, main)
        if party is None:
            continue
        first = i if first is None and i in plan.training else first
        if plan.contexts[i].network is not None:
            shared.add(party, broadcast)
    raw = "raw rows" in plan.method.needs
    if first is not None and raw and not trained.party(first).cfg.predicts_alike:
        skipped[SERVER] = (
            "each owner predicts by models or an effect of its own besides; take an owner's folder"
        )
    elif first is not None and (
        raw or (plan.server is not None and shared.count == len(plan.contexts))
    ):
        if not raw and len(getattr(data, "fits", ())) > 1:
            skipped[SERVER] = "each client standardizes rows by its own; take a client's folder"
        else:
            write(first, SERVER, "")
    which = sorted({on for on, _ in compared}, reverse=True)
    return WrittenModels(
        [*networks],
        networks,
        skipped,
        min((rows for _, rows in compared), default=0),
        f"{' or '.join(which)} rows",
    )


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
    """How many clients have networks that predict with equal weights, without any evaluation
    mode, as the first one does.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[str, Tensor] | None = None

    def add(self, party: Party[object], broadcast: Mapping[str, Tree]) -> None:
        """Compare the next client with the first."""
        with party.scratch():
            party.prepare(eval_mode="", broadcast=broadcast)
            own = {k: v.clone() for k, v in {**party.params, **party.buffers}.items()}
        first = self._first = self._first or own
        self.count += own.keys() == first.keys() and all(
            torch.equal(value, first[k]) for k, value in own.items()
        )


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
) -> tuple[str, int]:
    """Write one folder, and compare it with the party on rows that it has; which rows these are,
    and how many.

    Raises:
        ModelError: the model cannot be written, or there are no rows.
        CheckpointError: the folder does not predict as the run did.
    """
    on, rows = compared_rows(party)
    x = rows.x(torch.arange(min(ROWS, len(rows))))
    raw = "raw rows" in plan.method.needs
    model, norm, code, table = plan.architectures[i], plan.run.models.norm, "", None
    with party.scratch():
        party.prepare(eval_mode=mode, broadcast=broadcast)
        expected = plan.data.task.soft(party.infer(x))
        if plan.contexts[i].network is None:
            table, state = tables.table_network(data, party)
        else:
            graph = traced(party)
            state, code = state_of(graph), source(graph)
    plain = table is None and _is_plain(model, data, plan.data.task.width, norm, state)
    values = {
        "fedloom": __version__,
        "owner": name,
        "method": plan.method.name,
        "eval_mode": mode,
        "round": done,
        "classes": plan.data.classes,
        **number_of(plan),
        "model": model if plain else None,
        "norm": None if table else norm,
        "table": table,
        "inputs": tables.inputs_of(data) if raw else _inputs(plan, data, i),
    }
    write_model(staging / name, values, state, code)
    alone = network_class(staging / name / NETWORK)()
    alone.load_state_dict(state)
    loaded = load_model(staging / name, trust=[NETWORK]).network
    inputs = tables.encoded(data, x) if raw else x
    for network in (alone.eval(), loaded):
        with torch.inference_mode():
            apart = (plan.data.task.soft(network(inputs)) - expected).abs().max()
        if not float(apart) <= CLOSE:  # also of a number that is not finite
            why = (
                ""
                if raw
                else (
                    f": {plan.method.name} predicts by more than one forward pass of a network in "
                    "evaluation mode (such as params.batchnorm=batch); predict in Python, with the "
                    "result's models"
                )
            )
            raise CheckpointError(f"its folder does not predict as the run did{why}")
    # where no row was held out, the run's test rows are those that it was fitted to
    return "training" if fitted(plan) else on, len(x)


def compared_rows(party: Party[object]) -> tuple[str, Rows]:
    """Rows of a party on which its folder is compared with it, and which they are: test rows, or
    training rows where there are none.

    Raises:
        ModelError: it has no rows.
    """
    c = party.context
    found = {"test": c.tests.get("test"), "own test": c.tests.get("own"), "training": c.data}
    for on, rows in found.items():
        if rows is not None and len(rows):
            return on.removeprefix("own "), rows
    raise ModelError(
        "it has no row on which its folder can be compared with the run: set data.test_fraction "
        "or data.own_test_rows above 0 and run again"
    )


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
