"""The ServerApp: a run with parties at SuperNodes, described by the app's config."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from flwr.serverapp import ServerApp

from fedloom.core.errors import ConfigError
from fedloom.engines import Engine
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.reading import read
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import Status, execute, settle
from fedloom.remote.connections import NodeSet, Timeouts, Transport
from fedloom.remote.coordinator import at_nodes
from fedloom.remote.flower.grid_transport import GridClient, GridTransport
from fedloom.remote.flower.records import CALLER

OWN: Final = {
    "experiment": str,
    "nodes": str,
    "out": str,
    "resume": bool,
    "wait": int,
    "deadline": int,
}
"""Keys of the app's config in addition to settings of a run, and their types."""
T = TypeVar("T")
_log = logging.getLogger("fedloom.flower")

app = ServerApp()


def main(grid: Any, context: Any) -> None:
    """Execute the run of the app's config.

    Raises:
        FedloomError: the run failed. Flower shows the message to the user.
    """
    _log_to_stdout()
    asked = RunRequest.of(context.run_config)
    if asked.folder is not None:
        settle(asked.folder, resume=asked.resume)
    transport = GridTransport(grid)
    try:
        there = partial(backend, asked=asked, transport=transport)
        work = partial(
            execute,
            asked.run,
            asked.folder,
            resume=asked.resume,
            progress=_log_round,
            backend=there,
        )
        result = _interruptibly(work)
    finally:
        transport.close()
    _log.info("state_sha256 %s", result.summary["state_sha256"])


app.main()(main)


@dataclass(frozen=True)
class RunRequest:
    """The run of an app's config.

    Attributes:
        run: its config.
        nodes: names of the SuperNodes, in the order of the parties.
        folder: for the results, on this machine; None writes nothing.
        resume: whether to resume the run in it.
        timeouts: for SuperNodes.
    """

    run: RunConfig
    nodes: tuple[str, ...]
    folder: Path | None
    resume: bool
    timeouts: Timeouts

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunRequest":
        """Read a config with `OWN` keys and any setting of a run under its dotted name.

        Raises:
            ConfigError: a key is missing or invalid.
        """
        own = {
            "out": "",
            "resume": False,
            "wait": 120,
            "deadline": 3600,
            **{k: config[k] for k in OWN if k in config},
        }
        for name, kind in OWN.items():
            if type(own.get(name)) is not kind:
                raise ConfigError(
                    f"{name}: set this {kind.__name__} in the app's config, as in examples/flower"
                )
        nodes = tuple(own["nodes"].replace(",", " ").split())
        if not nodes:
            raise ConfigError(
                'nodes: name the SuperNodes in the order of the parties, such as nodes = "alpha '
                'beta"'
            )
        found = read(
            own["experiment"],
            [f"{k}={_spelled(v)}" for k, v in sorted(config.items()) if k not in OWN],
        )
        if found.compare is not None:
            raise ConfigError(
                "experiment: a comparison has several runs; choose an experiment with one run"
            )
        if found.run.engine not in (EngineConfig(), EngineConfig(name="local")):
            raise ConfigError("engine must be left out, as parties are at SuperNodes")
        if found.run.aggregate.secure:
            raise ConfigError(
                "aggregate.secure needs certificates and sums that live in a node's memory, "
                "which SuperNodes lack: use the engine net, or leave it out and trust the "
                "SuperLink with each message"
            )
        run = found.run.model_copy(update={"engine": EngineConfig(name="local")})
        folder = Path(own["out"]) if own["out"] else None
        return cls(run, nodes, folder, own["resume"], Timeouts(own["wait"], own["deadline"]))


def backend(
    run: RunConfig,
    folder: Path | None,
    *,
    resume: bool,
    stop: Callable[[], bool],
    asked: RunRequest,
    transport: GridTransport,
) -> Backend:
    """Parties at SuperNodes.

    Raises:
        ConfigError: the method needs peers to reach each other, or a node's facts differ from the
            expected ones.
        EngineError: a SuperNode is not available.
    """

    async def connect(
        names: Sequence[str], run: str, changed: Callable[[str, bool], None]
    ) -> list[GridClient]:
        return [GridClient(transport, name, partial(changed, name)) for name in names]

    def start(plan: RunPlan) -> Engine:
        if plan.method.server is None or plan.method.client.TO_PEERS:
            raise ConfigError(
                f"{plan.method.name} needs peers to reach each other, which SuperNodes cannot: "
                "use the engine net"
            )
        return at_nodes(plan, nodes, folder, resume=resume)

    timeouts = replace(asked.timeouts, stop=stop)
    nodes = NodeSet(asked.nodes, Transport("flower", connect, peers=False), timeouts, CALLER)
    return Backend(start)


def _spelled(value: Any) -> str:
    """A value of Flower's config as text for `-s`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _interruptibly(work: Callable[[], T]) -> T:
    """Run work in another thread, so that this one can receive Flower's stop signal."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="fedloom-run", daemon=True).start()
    while not done.done():
        wait([done], 0.5)
    return done.result()


def _log_to_stdout() -> None:
    """Send the log to standard output, for `flwr log`."""
    log = logging.getLogger("fedloom")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)


def _log_round(status: Status) -> None:
    _log.info(
        "round %d of %d: %s %.3f", status.round, status.rounds, status.metric, status.accuracy
    )
