"""Nodes in this process, over real connections: for tests of what they answer, not of what kills
them.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.methods import registry
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.process import RunningNode, start
from fedloom.remote.node.service import NodeService


class Loop:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def loop() -> Iterator[Loop]:
    there = Loop()
    try:
        yield there
    finally:
        there.close()


def config(folder: Path, name: str, names: list[str], **values: Any) -> NodeConfig:
    given = {
        "name": name,
        "insecure": True,
        "state": folder / name,
        "peers": [n for n in names if n != name],
        "methods": list(registry()),
        "data": {n: {"dataset": n} for n in ("digits", "breast_cancer", "wine")},
        "secret_noise": False,
        "approve": "off",
        "min_sum": 3,
    }
    return NodeConfig(**{**given, **values})


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


@contextmanager
def federation(
    folder: Path, count: int, change: Callable[[str], dict[str, Any]] = lambda _: {}
) -> Iterator[tuple[Path, list[RunningNode]]]:
    """So many nodes, and the coordinator's file. One worker does the work of all: torch's chance is
    one.
    """
    names, address = [f"node-{n}" for n in range(count)], f"127.0.0.1:{free_port()}"
    worker = ThreadPoolExecutor(1)
    with loop() as there:

        async def begin(name: str) -> RunningNode:
            cfg = config(
                folder, name, names, **{"callers": {"coordinator": address}, **change(name)}
            )
            return await start(cfg, NodeService(cfg, worker))

        nodes = [there.run(begin(name)) for name in names]
        lines = ["insecure = true", "wait = 120", "secret_noise = false", f'listen = "{address}"']
        lines += [f'[[nodes]]\nname = "{n}"' for n in names]
        path = folder / "federation.toml"
        path.write_text("\n".join(lines))
        try:
            yield path, nodes
        finally:
            for node in nodes:
                there.run(node.stop())
            worker.shutdown()
