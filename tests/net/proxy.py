"""A bad line in front of an address: what goes in comes out later, slower, in part, or
not for now.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

from tests.net.nodes import Loop

CHUNK = 1 << 14
BUFFER = 1 << 16
"""Bytes that wait at the line, in a router's place; this machine alone would let megabytes wait."""
TO_NODE, TO_CALLER = 0, 1


class Proxy:
    """Passes connections on. Its attributes may be changed at any time, from any thread.

    Attributes:
        port: where it listens.
        delay: seconds that each byte is under way.
        rate: bytes a second in each direction, of all connections together; None for as many as
            come.
        budget: bytes after which a connection is cut, on average; None for never.
        tap: is told the direction and the bytes of all that passes.
        passed: bytes so far, to the node and to the caller.
        connections: how many were opened.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.port = 0
        self.delay = 0.0
        self.rate: float | None = None
        self.budget: float | None = None
        self.tap: Callable[[int, bytes], None] = lambda *_: None
        self.passed = [0, 0]
        self.connections = 0
        self._target = target
        self._chance = Random(seed)
        self._closed = [False, False]
        self._free = [0.0, 0.0]
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def straight(self) -> None:
        """A good line again."""
        self.delay, self.rate, self.budget = 0.0, None, None
        self.heal()

    def part(self, *directions: int) -> None:
        """From now on nothing comes through, and nobody is told."""
        for eval_mode in directions or (TO_NODE, TO_CALLER):
            self._closed[eval_mode] = True

    def heal(self) -> None:
        """Let through what was held back, and all that comes."""
        self._closed = [False, False]

    async def cut(self) -> None:
        """End all connections, as a firewall that has forgotten them."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def begin(self, port: int) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # what it accepts has the same
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        listening.bind(("127.0.0.1", port))
        self._server = await asyncio.start_server(self._take, sock=listening, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def end(self) -> None:
        self._server.close()
        await self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = [self._chance.expovariate(1.0) + 0.1]
        ends = [writer]
        self._writers.add(writer)
        try:
            back, there = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
            ends.append(there)
            self._writers.add(there)
            eval_modes = [
                # nodes dial the caller
                asyncio.ensure_future(self._pass(TO_CALLER, reader, there, left)),
                asyncio.ensure_future(self._pass(TO_NODE, back, writer, left)),
            ]
            try:
                await asyncio.wait(eval_modes, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for eval_mode in eval_modes:
                    eval_mode.cancel()
                await asyncio.gather(*eval_modes, return_exceptions=True)
        except OSError:
            pass  # nobody listens there
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()

    async def _pass(
        self,
        eval_mode: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: list[float],
    ) -> None:
        """One direction of one connection: one task reads, at the line's pace, the other hands over
        when it is time.
        """
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        loop = asyncio.get_running_loop()

        async def hand_over() -> None:
            while True:
                due, data = await line.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                while self._closed[eval_mode]:
                    await asyncio.sleep(0.01)
                if self.budget is not None:
                    left[0] -= len(data) / self.budget
                    if left[0] < 0:
                        return
                self.passed[eval_mode] += len(data)
                self.tap(eval_mode, data)
                writer.write(data)
                await writer.drain()

        async def read() -> None:
            while data := await reader.read(CHUNK):
                if self.rate is not None:
                    self._free[eval_mode] = (
                        max(self._free[eval_mode], loop.time()) + len(data) / self.rate
                    )
                    await asyncio.sleep(self._free[eval_mode] - loop.time())
                await line.put((loop.time() + self.delay, data))
            while not line.empty():
                await asyncio.sleep(0.01)

        both = [asyncio.ensure_future(hand_over()), asyncio.ensure_future(read())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


@contextmanager
def proxy(loop: Loop, target: int, port: int = 0, seed: int = 0) -> Iterator[Proxy]:
    """A proxy in the loop's thread."""
    line = Proxy(target, seed)
    loop.run(line.begin(port))
    try:
        yield line
    finally:
        loop.run(line.end())
