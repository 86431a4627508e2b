"""From a world to the engine that runs its parties: what `[engine]` asks for, or what `auto` picks."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Any, Final

from fedloom.core.engine import Account
from fedloom.core.errors import ConfigError, EngineError
from fedloom.engines import BatchedEngine, Engine, IsolatedEngine, LocalEngine
from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.config import EngineConfig, RunConfig
from fedloom.experiment.place import config_sha256, differences, expected, for_nodes
from fedloom.experiment.world import World

if TYPE_CHECKING:
    from fedloom.remote.members import Member, Waiting, Wire

START: Final = ".start"
"""In a run's folder: the number of its newest start."""


def start(
    world: World, folder: Path | None = None, *, resume: bool = False, stop: Callable[[], bool] = lambda: False
) -> Engine:
    """The engine of a run, its parties made. Close it at the end.

    Args:
        world: of the run.
        folder: of the run, by which nodes know it again; None for a run that will not be resumed.
        resume: whether it may have begun before.
        stop: asked while nodes are waited for; when it says so, that is an EngineError.

    Raises:
        ConfigError, EngineError: it can't be had here.
    """
    run, asked = world.run, world.run.engine
    check(asked)
    if asked.name == "net":
        return _net(world, folder, resume, stop)
    common = {"seed": run.seed, "faults": run.faults}
    memory = None if asked.memory_mb is None else asked.memory_mb * 10**6
    parties = (make() for make in world.clients)
    if asked.name == "isolated":
        return IsolatedEngine(world.clients, **common)  # type: ignore[arg-type]
    if asked.name == "ray":
        from fedloom.engines.ray import RayEngine

        return RayEngine(
            world.clients,
            ids=range(len(world.clients)),
            workers=asked.workers,
            address=asked.address,
            gpus=asked.gpus_per_worker,
            memory=memory,
            **common,  # type: ignore[arg-type]
        )
    if asked.workers > 1:
        from fedloom.engines.workers import WorkersEngine

        return WorkersEngine(parties, workers=asked.workers, memory=memory, **common)  # type: ignore[arg-type]
    if asked.name == "batched" or (asked.name == "auto" and memory is None):
        everything = asked.name == "batched"
        return BatchedEngine(parties, chunk_size=asked.chunk_size, everything=everything, **common)  # type: ignore[arg-type]
    return LocalEngine(parties, memory=memory, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reached:
    """The nodes of a run's federation.

    Attributes:
        members: in the order of the parties.
        wire: how they are reached.
        waiting: how long to wait for them.
        own: what they call us.
        secret_draw: see `fedloom.remote.federation`.
    """

    members: Sequence[Member]
    wire: Wire
    waiting: Waiting
    own: str
    secret_draw: bool = True


def reached(run: RunConfig) -> Reached:
    """Where the federation's file of a run says that the nodes are.

    Raises:
        ConfigError: it can't be used.
        EngineError: the extra is missing.
    """
    try:
        from fedloom.remote.federation import DEFAULT, read
        from fedloom.remote.members import Waiting, Wire, connect
    except ImportError as error:
        raise EngineError(f"the net engine needs an extra ({error}): pip install 'fedloom[net]'") from None
    found = read(Path(run.engine.federation or DEFAULT))
    credentials = found.credentials
    own = credentials.name if credentials is not None else "coordinator"
    wire = Wire("net", partial(connect, credentials=credentials, own=own))
    members = [node.member for node in found.nodes]
    return Reached(members, wire, Waiting(found.wait, found.deadline), own, found.secret_draw)


def _net(world: World, folder: Path | None, resume: bool, stop: Callable[[], bool]) -> Engine:
    """The parties at their nodes."""
    found = reached(world.run)
    waiting = replace(found.waiting, stop=stop)
    return at_nodes(world, found.members, found.wire, waiting, own=found.own, folder=folder, resume=resume)


def check_seats(guests: int, nodes: int, house: int) -> None:
    """Refuse another number of nodes than there are parties for, beside those of the home's house.

    Raises:
        ConfigError: with what to change.
    """
    if guests != nodes:
        raise ConfigError(
            f"the run has {guests} parties that live at nodes, but {nodes} nodes are named: "
            f"set data.clients to {nodes + house}, or name as many nodes"
        )


def run_id(run: RunConfig, cfg: Any, own: str, folder: Path | None) -> str:
    """What nodes call a run: the same if it is resumed in its folder; without one always another."""
    which = str(folder.absolute()) if folder is not None else secrets.token_hex(16)
    marked = f"{own}\n{which}\n{config_sha256(run, cfg)}"
    return hashlib.sha256(marked.encode()).hexdigest()[:32]


def next_start(folder: Path | None) -> int:
    """The number of another start of a run, by which nodes know which is newer: the time in nanoseconds, but above the
    number of the one before, as a clock may have been set back."""
    before = folder / START if folder is not None else None
    return max(time_ns(), int(before.read_text()) + 1 if before is not None and before.exists() else 0)


def keep_start(folder: Path, start: int) -> None:
    """Remember the number of a start, once nodes have taken part in it: what fails before leaves no folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / START, str(start).encode())


def at_nodes(
    world: World,
    members: Sequence[Member],
    wire: Wire,
    waiting: Waiting,
    *,
    own: str,
    folder: Path | None = None,
    resume: bool = False,
) -> Engine:
    """An engine whose parties are at nodes, but for those of the home's house.

    Args:
        world: of the run.
        members: the nodes, in the order of the parties.
        wire: how they are reached.
        waiting: how long to wait for them; how many a round needs is found here.
        own: what the nodes call us.
        folder, resume: see `start`.

    Raises:
        ConfigError, EngineError: it can't be had here.
    """
    from fedloom.remote.engine import NetEngine

    run = world.run
    if run.evaluate.attacks is not None:
        raise ConfigError(
            "evaluate.attacks: nodes show their embeddings of the people that all learn from to nobody; leave it away, "
            "and measure attacks in a run on one machine"
        )
    guests = [i for i in range(len(world.clients)) if i not in world.house]
    check_seats(len(guests), len(members), len(world.house))
    fewest = len(guests) if world.method.columns else world.method.least
    number = next_start(folder)
    engine = NetEngine(
        dict(zip(guests, members, strict=True)),
        [world.clients[i]() for i in world.house],
        world.names,
        config=for_nodes(world).model_dump_json(),
        differences=lambda i, theirs: differences(expected(world, i), theirs, run.data.name if run.data.own else ""),
        run=world.known_as or run_id(run, world.cfg, own, folder),
        wire=wire,
        resume=resume,
        start=number,
        waiting=replace(waiting, fewest=fewest),
        seed=run.seed,
        faults=run.faults,
    )
    if folder is not None:
        keep_start(folder, number)
    return engine


def account(engine: Engine, asked: EngineConfig) -> Account:
    """Where the parties are, and whether that was picked for the user."""
    found = engine.account()
    return replace(found, remarks=("picked by auto", *found.remarks)) if asked.name == "auto" else found


def check(asked: EngineConfig) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: with what to change.
    """
    one_process = {
        "batched": "it does many parties at once in one process",
        "isolated": "it is a check, in one process",
        "net": "each party works at its own node",
    }
    if asked.name in one_process and asked.workers > 1:
        raise ConfigError(
            f"the {asked.name} engine takes one worker, not {asked.workers}: {one_process[asked.name]}. "
            "Leave workers away, or take the engine local"
        )
    if asked.name in ("local", "auto") and asked.workers > 1 and asked.device != "cpu":
        raise ConfigError(
            f"workers are processes on the CPU; on {asked.device!r} take the engine batched with one worker, "
            "or ray with gpus_per_worker"
        )
    if asked.name == "ray" and asked.device != "cpu":
        raise ConfigError(
            f"the ray engine places its workers itself: give gpus_per_worker, such as 0.25, not {asked.device!r}"
        )
    if asked.name in ("isolated", "net") and asked.device != "cpu":
        raise ConfigError(f"the {asked.name} engine works on the CPU only, not on {asked.device!r}")
    for name, engines in (
        ("address", ("ray",)),
        ("federation", ("net",)),
        ("gpus_per_worker", ("ray",)),
        ("chunk_size", ("batched", "auto")),
        ("memory_mb", ("local", "auto", "ray")),
    ):
        if getattr(asked, name) and asked.name not in engines:
            raise ConfigError(f"{name} belongs to the engine {engines[0]}, not to {asked.name}: leave it away")
    if asked.memory_mb is not None and asked.device != "cpu":
        raise ConfigError("memory_mb bounds parties' state in main memory; leave it away with another device")
