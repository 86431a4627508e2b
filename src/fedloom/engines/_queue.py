"""The order in which workers take the tasks of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence


class Queue:
    """The tasks of a batch, by number. The tasks of one party run in order at one worker.

    A party goes to the worker that ran it last, which may have cached a pass of its network. An idle worker takes a
    party from the longest queue.

    Attributes:
        left: the number of tasks that no worker has taken.
    """

    def __init__(self, parties: Sequence[int], last: Mapping[int, int], workers: int) -> None:
        groups: dict[int, deque[int]] = {}
        for number, party in enumerate(parties):
            groups.setdefault(party, deque()).append(number)
        self._waiting: list[deque[deque[int]]] = [deque() for _ in range(workers)]
        self._begun: list[deque[int]] = [deque() for _ in range(workers)]
        for party, group in groups.items():
            (self._waiting[last[party]] if party in last else min(self._waiting, key=len)).append(group)
        self.left = len(parties)

    def take(self, worker: int, *, ahead: bool = False) -> int | None:
        """The worker's next task, or None; with `ahead`, a task of another party than its current one."""
        if ahead and self._begun[worker]:
            return None
        if not self._begun[worker]:
            own, most = self._waiting[worker], max(self._waiting, key=len)
            if not most:
                return None
            self._begun[worker] = own.popleft() if own else most.pop()
        self.left -= 1
        return self._begun[worker].popleft()
