"""Workers that are killed are replaced, their round is repeated, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core import message
from fedloom.core.context import ClientContext
from fedloom.core.engine import Account
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.optim import SGD
from fedloom.core.party import Party
from fedloom.engines import Engine, LocalEngine, Lost, WorkersEngine
from fedloom.engines._worker_pool import DEATHS
from tests.engines.test_workers import Echo, Make, echoes, fedal, outcome, workers
from tests.toy import contexts

# a shell that runs us in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

# -- workers that die ------------------------------------------------------------------------------


class Fragile(Party[str]):
    """Kills its own process once: when the file that its config names is not there yet."""

    STATE = ("params", "opt", "steps")

    def setup(self) -> None:
        torch.manual_seed(self.context.id)
        self.network(nn.Linear(3, 2), SGD(0.1, momentum=0.9))
        self.steps = torch.zeros((), dtype=torch.int64)

    def learn(self, *, die: str, at: int) -> dict[str, Any]:
        if die == "before" and at == self.context.id:
            self.fall()
        self.steps = self.steps + 1
        x = torch.randn(8, 3)
        self.minimize(lambda: F.cross_entropy(self.model(x), torch.arange(8) % 2))
        if die == "after" and at == self.context.id:
            self.fall()
        self.note("steps", self.steps)
        return {"weights": self.params, "steps": self.steps}

    def meet(self, *, inbox: dict[str, Any], die: str, at: int) -> None:
        mean: Any = message.weighted_mean(
            [x["weights"] for x in inbox.values()], [1.0] * len(inbox)
        )
        self.params = mean

    def fall(self) -> None:
        mark = Path(self.cfg)
        if self.cfg == "always" or not mark.exists():
            if self.cfg != "always":
                mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def again(fed: Federation, rounds: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """What comes of some rounds, each repeated from its beginning where a worker is lost."""
    for t, work in enumerate(rounds):
        states: dict[int, Any] = {
            i: message.map_tensors(Tensor.clone, s) for i, s in fed.engine.states().items()
        }
        ledger, failures = fed.ledger.mark(), len(fed.failures)
        while True:
            fed.round = t
            try:
                work()
                break
            except Lost:
                fed.engine.load(states)
                fed.ledger.rollback(ledger)
                del fed.failures[failures:]
    return outcome(fed)


def fragile(make: Make, mark: str, die: str) -> dict[str, Any]:
    with make([Fragile(mark, ClientContext(id=i)) for i in range(6)]) as engine:
        fed = Federation(engine)
        shared = {"die": die, "at": 3}
        ring = {i: [(i + 1) % 6, (i + 2) % 6] for i in engine.ids}

        def work() -> None:
            fed.call(engine.ids, "learn", shared=shared)
            fed.exchange(ring, answer="learn", take="meet", shared=shared)

        return again(fed, [work, work])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("die", ["before", "after"])
def test_a_killed_worker_is_replaced_and_its_call_repeated(
    tmp_path: Path, n: int, die: str
) -> None:
    mark = tmp_path / "dead"
    found = fragile(workers(n), str(mark), die)
    assert mark.exists()
    assert found == fragile(LocalEngine, str(mark), die)


def test_a_worker_killed_in_an_exchange_costs_the_exchange_alone(tmp_path: Path) -> None:
    """The party that dies answers last, when replies of the same worker are left in its buffer
    already.
    """

    def run(make: Make) -> dict[str, Any]:
        with make(
            [Fragile(str(tmp_path / "dead"), ClientContext(id=i)) for i in range(4)]
        ) as engine:
            fed = Federation(engine)
            ring = {i: [j for j in range(4) if j != i] for i in range(4)}
            shared = {"die": "after", "at": 2}
            return again(
                fed, [lambda: fed.exchange(ring, answer="learn", take="meet", shared=shared)]
            )

    found = run(workers(1))
    assert (tmp_path / "dead").exists()
    assert found == run(LocalEngine)


def test_a_party_that_always_kills_its_worker_fails_and_the_run_continues() -> None:
    with WorkersEngine(
        [Fragile("always", ClientContext(id=i)) for i in range(4)], workers=2
    ) as engine:
        before = message.encode(engine.states()[1])
        fed = Federation(engine)
        replies: list[Any] = []

        def call() -> None:
            replies[:] = fed.call(engine.ids, "learn", shared={"die": "after", "at": 1})

        def exchange() -> None:
            fed.exchange(
                {0: [1, 2]}, answer="learn", take="meet", shared={"die": "before", "at": 1}
            )

        again(fed, [call])
        assert replies == [0, 2, 3]
        (failure,) = fed.failures
        assert failure.reason == "its process died" and "signal 9" in failure.trace
        assert message.encode(engine.states()[1]) == before
        again(fed, [exchange])
        assert [f.reason for f in fed.failures] == ["its process died"] * 2
        assert list(fed.call(engine.ids, "learn", shared={"die": "never", "at": 1})) == [0, 1, 2, 3]


def test_a_party_that_ends_its_process_says_why() -> None:
    with echoes() as engine:
        for _ in range(DEATHS):
            with pytest.raises(Lost, match="exit code 1"):
                engine.call([0], "stop", {}, None, (0, 0))
        failure: Any
        (failure,) = engine.call([0], "stop", {}, None, (0, 0))
        assert failure.reason == "its process died" and "SystemExit: 3" in failure.trace


def test_an_idle_worker_and_the_fork_server_may_be_killed() -> None:
    shared = {"die": "never", "at": 0}
    with WorkersEngine([Fragile("", ClientContext(id=i)) for i in range(4)], workers=2) as engine:
        fed, killed = Federation(engine), set[int]()

        def work() -> None:
            victims = [[], processes(engine)[1:2], processes(engine)[:3:2]][fed.round]
            if fed.round not in killed:
                killed.add(fed.round)
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
            assert len(fed.call(engine.ids, "learn", shared=shared)) == 4

        found = again(fed, [work] * 3)
        left = processes(engine)
    assert not any(map(alive, left))
    with LocalEngine([Fragile("", ClientContext(id=i)) for i in range(4)]) as loop:
        fed = Federation(loop)
        assert again(fed, [lambda: fed.call(loop.ids, "learn", shared=shared)] * 3) == found


# -- no process left -------------------------------------------------------------------------------


def processes(engine: Engine) -> list[int]:
    """The fork server and the workers."""
    pids = [slot.pid for slot in engine._pool.slots]  # type: ignore[attr-defined]
    return [os.getpgid(pids[0]), *pids]


def alive(pid: int) -> bool:
    """Whether there is such a process, be it a zombie of ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # an orphan may wait for an init that is slow to bury
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            or pid in children()
        )
    except OSError:
        return False


def children() -> set[int]:
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for found in lists for pid in found.read_text().split()}


def gone(pids: Sequence[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_close_leaves_no_process_and_may_be_repeated() -> None:
    engine = echoes()
    pids = processes(engine)
    assert len(set(pids)) == 3 and all(map(alive, pids)) and os.getpgid(0) != pids[0]
    engine.close()
    engine.close()
    assert not any(map(alive, pids))


def test_an_engine_that_is_forgotten_leaves_no_process() -> None:
    engine = echoes()
    pids = processes(engine)
    del engine
    assert not any(map(alive, pids))


def test_an_exception_leaves_no_process() -> None:
    with pytest.raises(ZeroDivisionError), echoes() as engine:
        pids = processes(engine)
        _ = 1 // 0
    assert not any(map(alive, pids))


def test_a_keyboard_interrupt_in_a_long_call_leaves_no_process() -> None:
    engine = echoes()
    pids = processes(engine)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine.call(engine.ids, "slow", {}, None, (0, 0))
    assert not any(map(alive, pids))


SCRIPT = """
from tests.engines.test_workers_die import echoes, processes
with echoes() as engine:
    print(*processes(engine), flush=True)
    engine.call([0], "echo", {"x": 1}, None, (0, 0))
    print("begun", flush=True)
    engine.call(engine.ids, "slow", {}, None, (0, 1))
"""


@pytest.mark.each_time("9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_run_leaves_no_process(number: signal.Signals) -> None:
    """SIGINT as a terminal sends it, to the whole group; the others to the run alone."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        pids = list(map(int, run.stdout.readline().split()))
        assert run.stdout.readline() == "begun\n" and all(map(alive, pids))
        (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)
        assert run.wait(30) != 0
        assert gone(pids)
        assert ("KeyboardInterrupt" in run.stderr.read()) == (number == signal.SIGINT)


# -- where and how ---------------------------------------------------------------------------------


def test_a_parent_that_trained_with_threads_may_still_have_workers() -> None:
    torch.set_num_threads(2)
    try:
        x = torch.randn(400, 400, requires_grad=True)
        (x @ x).square().mean().backward()
        nn.Conv2d(3, 8, 3)(torch.randn(8, 3, 32, 32)).mean().backward()
        found = fedal(workers(2), contexts(3), rounds=1)
    finally:
        torch.set_num_threads(1)
    assert found == fedal(LocalEngine, contexts(3), rounds=1)


def test_a_torch_that_refuses_to_train_in_forks_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )

    monkeypatch.setattr(Tensor, "backward", refuse)
    engine = echoes()
    pids = processes(engine)
    with pytest.raises(ConfigError, match="trained beside a GPU before it started workers"):
        engine.call([0], "echo", {"x": 1}, None, (0, 0))
    assert not any(map(alive, pids))


def test_two_engines_live_side_by_side() -> None:
    first, second = echoes(), echoes()
    with first, second:
        for engine in (first, second):
            assert engine.call([0], "echo", {"x": 1}, None, (0, 0)) == [{"x": 1, "own": None}]
        pids = processes(first)
        first.close()
        assert not any(map(alive, pids))
        assert second.call([0], "echo", {"x": 2}, None, (0, 0)) == [{"x": 2, "own": None}]


def test_the_account_and_what_is_refused() -> None:
    with echoes(3, workers(8)) as engine:
        assert engine.account() == Account("local", workers=3)
    with pytest.raises(ConfigError, match="at least 1"):
        echoes(3, workers(0))
    with pytest.raises(ConfigError, match="use the engine batched"):
        WorkersEngine([Echo(None, ClientContext(id=0, device="meta"))], workers=2)
