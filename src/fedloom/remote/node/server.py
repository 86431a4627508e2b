"""`fedloom node`: a node's service behind an RPC server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial

from fedloom.core.errors import ConfigError
from fedloom.remote.connections import connect
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.service import NodeService
from fedloom.remote.node.store import alone
from fedloom.remote.rpc_server import RPCServer, serve
from fedloom.remote.tunnel import RelayedServer, expose

_log = logging.getLogger("fedloom.node")


class NodeServer:
    """A node's service with its RPC server; made by `start`.

    Attributes:
        host: answers the calls.
        port: the listening port.
    """

    def __init__(self, host: NodeService, server: RPCServer, exposure: RelayedServer | None) -> None:
        self.host = host
        self.port = server.port
        self._server = server
        self._exposure = exposure

    async def stop(self) -> None:
        """Accept no more calls, give those in progress a second, and close all connections."""
        if self._exposure is not None:
            await self._exposure.close()
        await self._server.stop()
        await self.host.close()


async def start(config: NodeConfig, host: NodeService | None = None) -> NodeServer:
    """Start to answer calls.

    Raises:
        ConfigError: the certificate is unusable, or the config has neither `listen` nor `relay`.
        EngineError: the address is not available.
    """
    if config.listen is None and config.relay is None:
        raise ConfigError("set listen (a host:port of this machine) or relay (a relay's host:port)")
    credentials = config.credentials
    link = partial(connect, credentials=credentials, own=config.name, largest=config.largest_mb << 20)
    host = host or NodeService(config, link)
    if config.listen is not None:
        return NodeServer(host, await serve(host, config.listen, credentials), None)
    assert config.relay is not None and credentials is not None
    server = await serve(host, "127.0.0.1:0", credentials)
    exposure = await expose(config.relay, config.relay_name, credentials, f"127.0.0.1:{server.port}")
    return NodeServer(host, server, exposure)


async def run(config: NodeConfig, ready: Callable[[NodeServer], None] = lambda _: None) -> None:
    """Answer calls until SIGINT or SIGTERM, with a lock on the node's folder.

    Raises:
        ConfigError, EngineError: see `start`; or another process uses the folder.
    """
    with alone(config.state):
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        node = await start(config)
        ready(node)
        _log.info("%s listens at %s", config.name, config.listen or f"{config.relay} (relay)")
        try:
            await stopped.wait()
        finally:
            await node.stop()
            _log.info("%s has stopped", config.name)
