"""The coordinator of a run with parties at nodes: reads the federation's file and
makes the engine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedloom.core.errors import ConfigError
from fedloom.engines import Engine
from fedloom.experiment.config.run import FEDERATION, RunConfig
from fedloom.experiment.plan.node_party import differences, expected, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import Backend
from fedloom.remote.connections import NodeSet, Timeouts, Transport
from fedloom.remote.engine import NetEngine
from fedloom.remote.federation import FederationConfig, read
from fedloom.remote.hub import open_hub
from fedloom.remote.matching import match
from fedloom.remote.node.terms import sha256, terms
from fedloom.remote.secret import secret
from fedloom.remote.starts import check_node_count, keep_start, next_start, run_id


def backend(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Backend:
    """The nodes of the run's federation file, and the coordinator's own files; arguments as of
    `execute`.

    Rows of parties that hold different columns are matched with the nodes first.

    Raises:
        ConfigError, DataError, EngineError: the federation or its files cannot be used, or matching
        failed.
    """
    run.engine.check()
    federation = federation_of(run)
    nodes = node_set(federation, stop=stop)
    own = federation.data.get(run.data.name)
    files = PrivateData(owners=tuple(nodes.names))
    if own is not None:
        files = replace(files, rows=own.rows, public=own.public)
    if run.columns.private:
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
    connect = partial(
        open_hub,
        listen=federation.listen,
        credentials=credentials,
        wait=federation.wait,
        silence=federation.silence,
        reconnect=federation.reconnect,
    )
    timeouts = Timeouts(federation.wait, federation.deadline, stop=stop)
    names = [node.name for node in federation.nodes]
    limits = {node.name: node.max_rows or federation.max_rows for node in federation.nodes}
    max_rows = {name: limit for name, limit in limits.items() if limit is not None}
    return NodeSet(
        names, Transport("net", connect), timeouts, own, federation.secret_draw, max_rows
    )


def at_nodes(
    plan: RunPlan, nodes: NodeSet, folder: Path | None = None, *, resume: bool = False
) -> Engine:
    """An engine whose parties are at nodes, except those colocated with the coordinator.

    Args:
        plan: of the run.
        nodes: where the parties are; how many of them a round needs is found here.
        folder: of the run, by which nodes recognize it; None for a run that will not be resumed.
        resume: whether the run may have begun before.

    Raises:
        ConfigError: the run has a setting that nodes cannot fulfill, or another number of parties
            than there are nodes.
        EngineError: a node cannot be reached.
    """
    run = plan.run
    if run.evaluate.attack_labels is not None:
        raise ConfigError(
            "evaluate.attack_labels needs embeddings of aligned rows, which nodes never send. "
            "Leave it out here, and measure attacks in a run on one machine"
        )
    if run.evaluate.leaks:
        raise ConfigError(
            "evaluate.leaks needs the rows of all parties, which nodes never send. Leave it out "
            "here, and set it in a run on one machine"
        )
    remote = [i for i in range(len(plan.clients)) if i not in plan.colocated]
    check_node_count(len(remote), len(nodes.names), len(plan.colocated))
    number, told = next_start(folder), for_nodes(plan)
    engine = NetEngine(
        dict(zip(remote, nodes.names, strict=True)),
        [plan.clients[i]() for i in plan.colocated],
        plan.names,
        config=told.model_dump_json(),
        differences=lambda i, theirs: differences(
            expected(plan, i), theirs, run.data.name if run.data.own else ""
        ),
        run=plan.known_as or run_id(run, plan.cfg, nodes.own, folder),
        transport=nodes.transport,
        resume=resume,
        start=number,
        timeouts=replace(nodes.timeouts, fewest=plan.planner.min_nodes(plan, len(remote))),
        seed=run.seed,
        faults=run.faults,
        max_rows=nodes.max_rows,
        terms=sha256(terms(told, plan.method, plan.cfg, plan.rounds)),
        colluders=run.aggregate.colluders,
        answers=_answers(plan),
    )
    if folder is not None:
        keep_start(folder, number)
    return engine


def _answers(plan: RunPlan) -> int:
    """How many rows of the server's a run asks each node about."""
    rows = plan.server_context.data
    return (
        len(rows) if rows is not None and dict(plan.method.client.TELLS or ()).get("answers") else 0
    )
