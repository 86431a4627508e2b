"""Who counts as absent, on a clock that the test turns: no second of it passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from fedloom.remote import payload
from fedloom.remote.frames import PULSE, SILENCE
from fedloom.remote.hub import Hub
from fedloom.remote.loop import AT_WORK, SMALL, ListeningLoop, ListeningSelector
from fedloom.remote.rpc_errors import CallRefused

LINKS = 300


class Turned(ListeningSelector):
    """Waits by turning the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self.now += max(0.0, timeout)
        self.waited += max(0.0, timeout)
        return []


class TurnedLoop(ListeningLoop):
    def __init__(self) -> None:
        self.turned = Turned()
        super().__init__(self.turned)

    def time(self) -> float:
        return self.turned.now


class Stubs:
    """A hub whose nodes' signs of life wait in one line, which it works off one by one."""

    def __init__(self, loop: TurnedLoop, cost: float) -> None:
        self.absent: list[tuple[str, float]] = []
        names = [f"node-{n}" for n in range(LINKS)]
        self.hub = Hub(names, "run", "", self._changed)
        self._loop, self._cost, self._silent = loop, cost, set[str]()
        self._line: asyncio.Queue[tuple[str, asyncio.Event]] = asyncio.Queue()
        for connection in self.hub.connections.values():
            connection.session = "s"
            connection.heard("s")
        self._tasks = [asyncio.ensure_future(self._live(name)) for name in names]
        self._tasks.append(asyncio.ensure_future(self._answer()))

    def _changed(self, name: str, up: bool) -> None:
        if not up:
            self.absent.append((name, self._loop.time()))

    async def _live(self, name: str) -> None:
        while name not in self._silent:
            told = asyncio.Event()
            self._line.put_nowait((name, told))
            await told.wait()
            await asyncio.sleep(PULSE)

    async def _answer(self) -> None:
        while True:
            name, told = await self._line.get()
            self._loop.turned.now += self._cost  # at work, and deaf
            self.hub.heard(name, "s")
            told.set()
            await asyncio.sleep(0)

    def silence(self, name: str) -> None:
        self._silent.add(name)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self.hub.connections.values():
            await connection.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=TurnedLoop) as runner:
        runner.run(work)


def loop() -> TurnedLoop:
    found = asyncio.get_running_loop()
    assert isinstance(found, TurnedLoop)
    return found


@pytest.mark.parametrize("cost", [0.0, 0.03, 0.1])
def test_a_slow_coordinator_takes_no_node_for_absent(cost: float) -> None:
    """With 0.03 s for each sign of life, one of each of 300 nodes takes longer than the silence."""

    async def work() -> None:
        stubs = Stubs(loop(), cost)
        await asyncio.sleep(60)
        assert stubs.absent == [] and all(c.up for c in stubs.hub.connections.values())
        await stubs.close()

    run(work())


def test_a_node_that_falls_silent_is_found_also_by_a_coordinator_that_never_rests() -> None:
    """After the silence where there is time to listen, and later at work."""

    async def work(cost: float, most: float) -> None:
        stubs = Stubs(loop(), cost)
        await asyncio.sleep(10)
        stubs.silence("node-7")
        begun = loop().time()
        while not stubs.absent and loop().time() < begun + 2 * most:
            await asyncio.sleep(0.1)
        (name, at) = stubs.absent[0]
        assert (
            name == "node-7" and SILENCE - 2 * PULSE < at - begun < most and len(stubs.absent) == 1
        )
        await stubs.close()

    run(work(0.0, SILENCE + PULSE + 1))
    run(work(0.02, SILENCE / AT_WORK + 20))


def test_the_clock_of_a_loop_counts_what_it_waits() -> None:
    async def work() -> None:
        here = loop()
        before = here.listened()
        await asyncio.sleep(5)
        assert here.listened() - before == pytest.approx(5)
        here.turned.now += 4  # work
        assert here.listened() - before == pytest.approx(5 + 4 * AT_WORK)

    run(work())


async def ask(hub: Hub, name: str, kind: str, head: dict[str, Any], *rest: bytes) -> bytes:
    return await hub.answer(name, kind, payload.pack(head, *rest))


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parser]:
    made = Parser()
    monkeypatch.setattr(payload, "unpack", made)
    yield made
    made.go.set()


class Parser:
    """`payload.unpack`, which stops at calls of `node-0` until `go`."""

    def __init__(self) -> None:
        self.real, self.go, self.stopped = payload.unpack, threading.Event(), threading.Semaphore(0)
        self.at_once = self.most = 0

    def __call__(self, body: bytes, *more: Any) -> Any:
        if b"slow" not in bytes(body):
            return self.real(body, *more)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.stopped.release()
        self.go.wait()
        self.at_once -= 1
        return self.real(body, *more)


def test_a_head_that_takes_long_delays_no_other_node_and_has_one_thread(parser: Parser) -> None:
    """The reply of another node arrives while the coordinator is still at the first one's."""

    async def work() -> None:
        hub = Hub(["node-0", "node-1"], "run", "", lambda *_: None)
        for connection in hub.connections.values():
            connection.session = "s"
            connection.heard("s")
        try:
            reply: dict[str, Any] = {"hub": hub.token, "number": 99, "code": "", "words": ""}
            large = b"slow" * SMALL
            slow = [
                asyncio.ensure_future(ask(hub, "node-0", "reply", reply, large)) for _ in range(20)
            ]
            await asyncio.to_thread(parser.stopped.acquire)
            call = asyncio.ensure_future(hub.connections["node-1"].ask("do", b"work", deadline=60))
            poll = {"hub": "", "last": -1, "session": "s", "limit": 1 << 20}
            head, _ = parser.real(await ask(hub, "node-1", "next", poll))
            await ask(hub, "node-1", "reply", {**reply, "number": head["number"]}, b"done")
            assert await call == b"done" and not any(one.done() for one in slow)
            parser.go.set()
            await asyncio.gather(*slow)
            assert parser.most == 1
        finally:
            parser.go.set()
            for connection in hub.connections.values():
                await connection.close()

    asyncio.run(work())


def test_a_large_head_of_a_node_is_refused_before_it_is_parsed() -> None:
    async def work() -> None:
        hub = Hub(["node-0"], "run", "", lambda *_: None)
        for head in ({"code": "x" * 4096, "words": "y" * 4096}, {"words": ["z"] * 9, "code": ""}):
            with pytest.raises(CallRefused) as refusal:
                await ask(hub, "node-0", "reply", {"hub": hub.token, "number": 0, **head})
            assert refusal.value.code == "malformed"
        await hub.connections["node-0"].close()

    asyncio.run(work())
