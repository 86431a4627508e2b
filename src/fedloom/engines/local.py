"""The loop: all parties in this process, one after the other. It defines what the others must give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedloom import message
from fedloom.engines.base import CallId, Delivery, Failure, fault_of, run, verdict
from fedloom.errors import MethodError
from fedloom.faults import Faults
from fedloom.message import Size, Template, Tree
from fedloom.party import Party


class LocalEngine:
    """Parties in this process. A message's tensors are handed over uncopied; a reply's are copied."""

    def __init__(self, parties: Iterable[Party[Any]], *, seed: int = 0, faults: Faults | None = None) -> None:
        self._parties = {p.site.id: p for p in parties}
        self.ids = tuple(self._parties)
        self._names = {i: f"{type(p).__name__.lower()}-{i}" for i, p in self._parties.items()}
        self._seed = seed
        self._faults = faults

    def name(self, party: int) -> str:
        """Role and number: `client-3`."""
        self._party(party)
        return self._names[party]

    def call(
        self, parties: Sequence[int], method: str, messages: Sequence[dict[str, Tree]], call: CallId
    ) -> list[Tree | Failure]:
        """Run `method` at each party with its message; one reply or failure each, in order."""
        return [self._run(i, method, m, call) for i, m in zip(parties, messages, strict=True)]

    def exchange(
        self,
        links: Mapping[int, Sequence[int]],
        ask: str | None,
        answer: str,
        take: str,
        shared: dict[str, Tree],
        expect: Template,
        call: CallId,
    ) -> list[Delivery]:
        """All ask, then all answer, then all take: nobody sees a neighbour's next state."""
        log: list[Delivery] = []
        questions = {i: self._run(i, ask, shared, call) for i in links} if ask else {}
        answers: dict[tuple[int, int], Tree | Failure] = {}
        once: dict[int, Tree | Failure] = {}  # without a question, one answer serves all who ask
        for i, neighbours in links.items():
            for j in neighbours:
                if ask is None:
                    if j not in once:
                        once[j] = self._run(j, answer, shared, call)
                    answers[i, j] = once[j]
                elif _deliver(log, i, j, ask, questions[i], object):
                    put = {**shared, "asked": questions[i], "by": i}
                    answers[i, j] = self._run(j, answer, put, call)  # type: ignore[arg-type]
        for i, neighbours in links.items():
            inbox = {
                str(j): answers[i, j]
                for j in neighbours
                if (i, j) in answers and _deliver(log, j, i, answer, answers[i, j], expect)
            }
            taken = self._run(i, take, {**shared, "inbox": inbox}, call)  # type: ignore[dict-item]
            if isinstance(taken, Failure):
                log.append(Delivery(i, i, take, "", Size(0, 0), taken))
        return log

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views, not copies."""
        return {i: p.state() for i, p in self._parties.items()}

    def load(self, states: Mapping[int, dict[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        for i, state in states.items():
            self._party(i).load(state)

    def notes(self) -> dict[int, dict[str, float]]:
        """What the parties noted since the last call."""
        return {i: p.take_notes() for i, p in self._parties.items()}

    def _party(self, party: int) -> Party[Any]:
        if party not in self._parties:
            raise MethodError(f"there is no party {party}; there are {list(self._parties)}")
        return self._parties[party]

    def _run(self, party: int, method: str, put: dict[str, Tree], call: CallId) -> Tree | Failure:
        fault = fault_of(self._faults, self._seed, call, party)
        return run(self._party(party), method, put, fault)


def _deliver(
    log: list[Delivery], sender: int, receiver: int, kind: str, payload: Tree | Failure, expect: Template
) -> bool:
    """Log one message between peers; whether the receiver may use it."""
    failure = verdict(payload, expect)
    if failure is None:
        what, size = message.describe(payload), message.size(payload)  # type: ignore[arg-type]
    else:
        what, size = "", Size(0, 0)
    log.append(Delivery(sender, receiver, kind, what, size, failure))
    return failure is None
