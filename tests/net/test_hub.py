"""Who counts as absent, on a clock that the test turns: no second of it passes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fedloom.remote.frames import PULSE, SILENCE
from fedloom.remote.hub import Hub
from fedloom.remote.loop import AT_WORK, ListeningLoop, ListeningSelector

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
        assert name == "node-7" and SILENCE - 2 * PULSE < at - begun < most and len(stubs.absent) == 1
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
