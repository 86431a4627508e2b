"""The coordinator of a run with parties at nodes: reads the federation's file and makes the engine."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import time_ns
from typing import Any, Final

from fedloom.core.errors import ConfigError
from fedloom.engines import Engine
from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.config import FEDERATION, RunConfig
from fedloom.experiment.engine import Backend, check
from fedloom.experiment.node_party import config_sha256, differences, expected, for_nodes
from fedloom.experiment.plan import RunPlan
from fedloom.experiment.private import PrivateData
from fedloom.remote.connections import NodeAddress, Timeouts, Transport, connect
from fedloom.remote.engine import NetEngine
from fedloom.remote.federation import FederationConfig, read
from fedloom.remote.secret import secret

START: Final = ".start"
"""In a run's folder: the number of its newest start."""


@dataclass(frozen=True)
class NodeSet:
    """The nodes of a run's federation.

    Attributes:
        addresses: in the order of the parties.
        wire: how to reach them.
        waiting: how long to wait for them.
        own: the coordinator's name at the nodes.
        secret_draw: see `fedloom.remote.federation`.
    """

    addresses: Sequence[NodeAddress]
    wire: Transport
    waiting: Timeouts
    own: str
    secret_draw: bool = True


def backend(
    run: RunConfig, folder: Path | None = None, *, resume: bool = False, stop: Callable[[], bool] = lambda: False
) -> Backend:
    """The nodes of the run's federation file, and the coordinator's own files; arguments as those of `execute`.

    Rows of parties that hold different columns are matched with the nodes first.

    Raises:
        ConfigError, DataError, EngineError: the federation or its files cannot be used, or matching failed.
    """
    check(run.engine)
    federation = federation_of(run)
    nodes = node_set(federation, stop=stop)
    own = federation.data.get(run.data.name)
    files = PrivateData() if own is None else PrivateData(rows=own.rows, public=own.public)
    if run.columns.own:
        from fedloom.remote.matching import match

        files = match(run, folder, files, nodes, resume=resume)
    noise = secret(federation.secret) if federation.secret_noise else None
    return Backend(partial(at_nodes, nodes=nodes, folder=folder, resume=resume), files, noise)


def federation_of(run: RunConfig) -> FederationConfig:
    """The federation that the run's config names.

    Raises:
        ConfigError: its file cannot be used.
    """
    return read(Path(run.engine.federation or FEDERATION))


def node_set(federation: FederationConfig, *, stop: Callable[[], bool] = lambda: False) -> NodeSet:
    """The nodes of a federation; `stop` ends any wait for them."""
    credentials = federation.credentials
    own = credentials.name if credentials is not None else "coordinator"
    wire = Transport("net", partial(connect, credentials=credentials, own=own))
    waiting = Timeouts(federation.wait, federation.deadline, stop=stop)
    return NodeSet([node.node_address for node in federation.nodes], wire, waiting, own, federation.secret_draw)


def at_nodes(plan: RunPlan, nodes: NodeSet, folder: Path | None = None, *, resume: bool = False) -> Engine:
    """An engine whose parties are at nodes, except those colocated with the coordinator.

    Args:
        plan: of the run.
        nodes: where the parties are; how many of them a round needs is found here.
        folder: of the run, by which nodes recognise it; None for a run that will not be resumed.
        resume: whether the run may have begun before.

    Raises:
        ConfigError: the run has a setting that nodes cannot fulfil, or another number of parties than there are nodes.
        EngineError: a node cannot be reached.
    """
    run = plan.run
    if run.evaluate.attacks is not None:
        raise ConfigError(
            "evaluate.attacks needs embeddings of aligned rows, which nodes never send. Leave it out here, and measure "
            "attacks in a run on one machine"
        )
    remote = [i for i in range(len(plan.clients)) if i not in plan.colocated]
    check_node_count(len(remote), len(nodes.addresses), len(plan.colocated))
    number = next_start(folder)
    engine = NetEngine(
        dict(zip(remote, nodes.addresses, strict=True)),
        [plan.clients[i]() for i in plan.colocated],
        plan.names,
        config=for_nodes(plan).model_dump_json(),
        differences=lambda i, theirs: differences(expected(plan, i), theirs, run.data.name if run.data.own else ""),
        run=plan.known_as or run_id(run, plan.cfg, nodes.own, folder),
        wire=nodes.wire,
        resume=resume,
        start=number,
        waiting=replace(nodes.waiting, fewest=plan.setting.min_nodes(plan, len(remote))),
        seed=run.seed,
        faults=run.faults,
    )
    if folder is not None:
        keep_start(folder, number)
    return engine


def check_node_count(parties: int, nodes: int, colocated: int) -> None:
    """Refuse a number of nodes that differs from the number of parties not colocated with the coordinator.

    Raises:
        ConfigError: with what to change.
    """
    if parties != nodes:
        raise ConfigError(
            f"the run has {parties} parties at nodes, but the federation has {nodes} nodes: "
            f"set data.clients to {nodes + colocated}, or list {parties} nodes"
        )


def run_id(run: RunConfig, cfg: Any, own: str, folder: Path | None) -> str:
    """The run's id at nodes: the same if it is resumed in its folder; without a folder, a new one each time."""
    place = str(folder.absolute()) if folder is not None else secrets.token_hex(16)
    return hashlib.sha256(f"{own}\n{place}\n{config_sha256(run, cfg)}".encode()).hexdigest()[:32]


def next_start(folder: Path | None) -> int:
    """A number for this start of a run: the time in nanoseconds, but above that of the previous start in any case."""
    before = folder / START if folder is not None else None
    return max(time_ns(), int(before.read_text()) + 1 if before is not None and before.exists() else 0)


def keep_start(folder: Path, start: int) -> None:
    """Save the number of a start, once nodes take part in it: an earlier failure leaves no folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / START, str(start).encode())
