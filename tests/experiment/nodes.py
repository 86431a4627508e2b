"""Parties that keep their state to themselves, in this process: what a run sees of nodes, without a
network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedloom.core import message
from fedloom.core.engine import UNREACHABLE, Failure, ReplyRef, Task
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note
from fedloom.engines import Account, Engine, LocalEngine
from fedloom.experiment.plan.node_party import NodeParty, expected, for_nodes
from fedloom.experiment.plan.run_plan import RunPlan


class Nodes(Engine):
    """The parties of a plan that run at nodes, each built by `build_party`, and the coordinator's.

    Args:
        plan: the coordinator's.
        place: makes the place of a party from the config that it is sent.
        kept: state by round, which outlives this engine as a node's disk does.
        away: whether a party can't be reached at a call of this method in this round, -1 for a look
            from outside.
    """

    remote = True

    def __init__(
        self,
        run_plan: RunPlan,
        context: Callable[..., NodeParty],
        kept: dict[int, dict[int, bytes]],
        away: Callable[[int, int, str], bool] = lambda party, round, method: False,
    ) -> None:
        sent = type(run_plan.run).model_validate_json(for_nodes(run_plan).model_dump_json())
        guests = [i for i in run_plan.names if i not in run_plan.colocated]
        self.places = {i: context(sent, i) for i in guests}
        for i, there in self.places.items():
            assert there.facts == expected(run_plan, i)
        colocated = {i: run_plan.clients[i]() for i in run_plan.colocated}
        every = [colocated[i] if i in colocated else self.places[i].party for i in run_plan.names]
        self._inner, self._colocated = LocalEngine(every, seed=run_plan.run.seed), tuple(colocated)
        self._kept, self._away, self._round = kept, away, -1
        self.calls: list[str] = []
        super().__init__(run_plan.names, seed=run_plan.run.seed, faults=run_plan.run.faults)
        self._mark(0)

    def _mark(self, round: int) -> None:
        self._kept[round] = {i: message.encode(p.party.state()) for i, p in self.places.items()}

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [self._done(task) for task in tasks]

    def _done(self, task: Task) -> Tree | Failure:
        if task.round > self._round:
            self._mark(task.round)
            self._round = task.round
        self.calls.append(task.method)
        if self._away(task.party, task.round, task.method):
            return Failure(UNREACHABLE)
        (reply,) = self._inner._call([task])
        return reply

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        return self._inner._leave(tasks, expect)

    def states(self) -> dict[int, dict[str, Tree]]:
        found = self._inner.states()
        return {i: found[i] for i in self._colocated}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        assert set(states) <= set(self._colocated)
        self._inner.load(states)

    def digests(self) -> dict[int, str]:
        return self._inner.digests()

    def saved(self, round: int) -> None:
        self.calls.append(f"saved {round}")
        self._mark(round)

    def restore(self, round: int) -> None:
        self.calls.append(f"restore {round}")
        for i, state in self._kept[round].items():
            self.places[i].party.load(message.decode(state))  # type: ignore[arg-type]
        self._round = round - 1

    def notes(self) -> dict[int, dict[str, Note]]:
        return self._inner.notes()

    def account(self) -> Account:
        return Account("nodes")
