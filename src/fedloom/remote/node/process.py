"""`fedloom node`: a node's service and its connections to coordinators, which the node dials."""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from fedloom.core.errors import ConfigError, MessageError
from fedloom.core.message import Tree
from fedloom.remote import payload, rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import LARGE
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.service import NodeService
from fedloom.remote.node.store import lock_folder
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_errors import CallRefused

MOST_CALLS: Final = 256
"""Limit of one coordinator's calls at the same time."""
STOPS: Final = 0.5
"""Seconds between two looks for runs that the site has stopped."""
_POLL: Final = 86_400.0
"""Seconds that a poll for the next call may wait."""
_CALL: Final = {"hub": str, "run": str, "number": int, "kind": str}
_log = logging.getLogger("fedloom.node")


class CoordinatorLink:
    """A node's connection to one address of a coordinator: takes calls there and sends the replies.

    Args:
        service: answers the calls.
        name: the coordinator's, as in its certificate.
        address: host:port.
        credentials: the node's certificate; None for the insecure mode.

    Attributes:
        run: the run of the coordinator that answered last.
    """

    def __init__(
        self, service: NodeService, name: str, address: str, credentials: Credentials | None
    ) -> None:
        self.name, self.run = name, ""
        self._service, self._session = service, secrets.token_hex(8)
        self._limit = service.config.max_message_mb << 20
        self._room = asyncio.Semaphore(MOST_CALLS)
        self._client = RPCClient(
            ServerAddress(name, address),
            credentials,
            own=service.config.name,
            largest=self._limit + (1 << 16),
            changed=self._changed,
            session=self._session,
            heard=self._heard,
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._task = asyncio.ensure_future(self._serve())

    @property
    def up(self) -> bool:
        """Whether the coordinator is connected."""
        return self._client.up

    async def ask(self, kind: str, body: bytes, deadline: float) -> bytes:
        """The coordinator's answer; raises CallRefused."""
        return await self._client.ask(
            kind, body, id=f"{self._session}/{secrets.token_hex(8)}", deadline=deadline
        )

    async def close(self) -> None:
        """Close the connection; calls in progress are not answered."""
        tasks = {self._task, *self._calls}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _changed(self, up: bool) -> None:
        _log.info(
            "%s at %s is %s",
            self.name,
            self._client.address.at,
            "connected" if up else "disconnected",
        )

    def _heard(self, run: str) -> None:
        self.run = run
        self._service.heard(self.name, run)

    async def _serve(self) -> None:
        """Take calls until cancelled."""
        hub, last, problem = "", -1, ""
        while True:
            try:
                if not await self._client.wait(1.0):
                    raise CallRefused(
                        rpc_errors.UNREACHABLE, self._client.problem or "no answer yet"
                    )
                request: Tree = {
                    "hub": hub,
                    "last": last,
                    "session": self._session,
                    "limit": self._limit,
                }
                head, rest = payload.unpack(
                    await self.ask("next", payload.pack(request), _POLL), _CALL
                )
                problem = ""
            except (CallRefused, MessageError) as error:
                if str(error) != problem and getattr(error, "code", "") != rpc_errors.LATE:
                    problem = str(error)
                    _log.warning(
                        "no connection to %s at %s: %s", self.name, self._client.address.at, problem
                    )
                await asyncio.sleep(0.2)
                continue
            hub, last = head["hub"], head["number"]
            self._heard(head["run"])
            if head["kind"] and not self._client.revoked:
                await self._room.acquire()
                task = asyncio.ensure_future(self._answer(head, bytes(rest[0]) if rest else None))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
                task.add_done_callback(lambda _: self._room.release())

    async def _answer(self, call: dict[str, Any], body: bytes | None) -> None:
        """Answer a call, whose body comes apart if it is large, and send the reply while it may be
        wanted.
        """
        which: dict[str, Tree] = {"hub": call["hub"], "number": call["number"]}
        try:
            if body is None and not (body := await self._ask(LARGE, payload.pack(which))):
                return
            roles = self._client.roles
            reply = await self._service.answer(self.name, call["kind"], body, roles)
            code = ""
            words = ""
        except CallRefused as refusal:
            reply, code, words = b"", refusal.code, str(refusal)
        with suppress(CallRefused):
            await self._ask("reply", payload.pack({**which, "code": code, "words": words}, reply))

    async def _ask(self, kind: str, body: bytes) -> bytes:
        """The coordinator's answer, also after its connection was lost for a while; raises
        CallRefused.
        """
        while True:
            try:
                return await self.ask(kind, body, _POLL)
            except CallRefused as refusal:
                if refusal.code not in (rpc_errors.UNREACHABLE, rpc_errors.LATE):
                    raise
            await self._client.wait(10.0)


class RunningNode:
    """A node's service with its connections; made by `start`.

    Attributes:
        service: answers the calls.
        links: to coordinators.
    """

    def __init__(self, service: NodeService) -> None:
        self.service = service
        config, credentials = service.config, service.credentials
        self.links = [
            CoordinatorLink(service, name, address, credentials)
            for name, addresses in config.callers.items()
            for address in addresses
        ]
        service.peers.reach = self._reach
        self._watch = asyncio.ensure_future(self._watch_stops())

    async def _watch_stops(self) -> None:
        """End runs soon after their site has stopped them."""
        while True:
            await asyncio.sleep(STOPS)
            self.service.stop_runs()

    async def _reach(self, coordinator: str, run: str, body: bytes, deadline: float) -> bytes:
        """The answer of a peer in a run of a coordinator."""
        for link in self.links:
            if link.up and (link.name, link.run) == (coordinator, run):
                return await link.ask("peer", body, deadline)
        raise CallRefused(rpc_errors.UNREACHABLE, f"{coordinator} is unreachable")

    async def stop(self) -> None:
        """Take no more calls, and close all connections."""
        self._watch.cancel()
        await asyncio.gather(
            *(link.close() for link in self.links), self._watch, return_exceptions=True
        )
        await self.service.close()


def limit_memory(megabytes: int) -> None:
    """Limit what this process may allocate from now on; an allocation beyond it raises an error in
    the party's code.

    Raises:
        ConfigError: this system has no such limit.
    """
    try:
        import resource
    except ImportError:
        raise ConfigError(
            "max_memory_mb needs Linux: leave it out, and limit the process by other means"
        ) from None
    resource.setrlimit(
        resource.RLIMIT_DATA, (megabytes << 20, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )


async def start(config: NodeConfig, service: NodeService | None = None) -> RunningNode:
    """Start to dial coordinators and to answer their calls.

    Raises:
        ConfigError: the certificate is unusable, or no caller has an address.
    """
    if not any(config.callers.values()):
        raise ConfigError(
            'callers: give each coordinator\'s address: callers = { coordinator = "host:7443" }'
        )
    return RunningNode(service or NodeService(config))


async def run_node(
    config: NodeConfig,
    ready: Callable[[RunningNode], None] = lambda _: None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Answer calls until SIGINT, SIGTERM or SIGHUP, with a lock on the node's folder.

    Args:
        config: the node's.
        ready: called when it begins to dial.
        stopping: called when one of these signals has come.

    Raises:
        ConfigError: see `start`; or another process uses the folder.
    """
    if config.max_memory_mb is not None:
        limit_memory(config.max_memory_mb)
    with lock_folder(config.state):
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stopped.set)
        node = await start(config)
        ready(node)
        try:
            await stopped.wait()
            stopping()
        finally:
            await node.stop()
            _log.info("%s has stopped", config.name)
