"""An asyncio loop that knows how long it has listened.

A coordinator with a thousand nodes may have more to do than it can do at once. Heartbeats then wait
in a queue with the replies, and time in which the loop did not listen is no evidence that a node is
gone.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Final, TypeVar

T = TypeVar("T")
SMALL: Final = 1 << 14
"""Bytes that are read at once: some 15 ms at worst, while a thread costs 1 ms on a busy machine."""
AT_WORK: Final = 0.1
"""Weight of a second of work: not 0, so that a loop that is never idle still detects nodes that are
gone.
"""


class ListeningSelector(selectors.DefaultSelector):
    """Adds up how long it waited because there was nothing to do.

    Attributes:
        waited: seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Wait for events."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        begun = monotonic()
        try:
            return super().select(timeout)
        finally:
            self.waited += monotonic() - begun


class ListeningLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with a clock of the time in which it listened."""

    def __init__(self, selector: ListeningSelector | None = None) -> None:
        self._listening = selector or ListeningSelector()
        super().__init__(self._listening)

    def listened(self) -> float:
        """Seconds on a clock that runs while the loop waits, and at `AT_WORK` of its speed while
        the loop works.
        """
        return self._listening.waited + AT_WORK * (self.time() - self._listening.waited)


def clock() -> Callable[[], float]:
    """The clock of silence of the running loop: `ListeningLoop.listened`, or the time in another
    loop.
    """
    loop = asyncio.get_running_loop()
    return loop.listened if isinstance(loop, ListeningLoop) else loop.time


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a `ListeningLoop`."""
    with asyncio.Runner(loop_factory=ListeningLoop) as runner:
        return runner.run(work)


async def aside(size: int, work: Callable[[], T]) -> T:
    """The result of reading `size` bytes, in a thread of its own where it could keep the loop from
    listening.
    """
    return work() if size <= SMALL else await asyncio.to_thread(work)
