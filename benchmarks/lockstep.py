"""Many seeds of one FedAvg run in lock-step, against one after the other: CPU milliseconds of a
round of one run.

Networks are MLPs with a hidden layer of 64, on 8x8, 16x16 and 28x28 inputs. The three engines take
turns, so that a busy machine disturbs all alike; medians are printed, and the median ratio of the
loop's seconds to lock-step's.
"""

import statistics
import sys
import time
from functools import partial

import torch

from benchmarks.gpu import Job
from fedloom.engines import BatchedEngine, LocalEngine
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep

CASES = [((1, 8, 8), 10), ((1, 8, 8), 4), ((1, 16, 16), 10), ((1, 28, 28), 10)]
"""The shape of inputs, and the number of clients."""
SEEDS = (3, 10, 20)


def together(seeds: int, make: "partial[Job]") -> float:
    """CPU seconds of a round of all seeds, after one that does not count."""
    marks: list[float] = []

    def work(lane: Lane[None]) -> None:
        job = make(partial(LockstepEngine, lane=lane))
        for _ in range(2):
            job.round()
            if lane.number == 0:
                marks.append(time.process_time())

    for outcome in in_lockstep([work] * seeds):
        if isinstance(outcome, BaseException):
            raise outcome
    return marks[1] - marks[0]


def alone(job: Job) -> float:
    start = time.process_time()
    job.round()
    return time.process_time() - start


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    for shape, clients in CASES:
        make = partial(Job, architecture="mlp", clients=clients, shape=shape, device="cpu")
        jobs = {
            name: make(engine)
            for name, engine in (("local", LocalEngine), ("batched", BatchedEngine))
        }
        for job in jobs.values():
            job.round()
        for seeds in SEEDS:
            found: dict[str, list[float]] = {"local": [], "batched": [], "lock-step": []}
            for _ in range(pairs):
                for name, job in jobs.items():
                    found[name].append(alone(job))
                found["lock-step"].append(together(seeds, make) / seeds)
            ms = {name: 1e3 * statistics.median(values) for name, values in found.items()}
            ratios = statistics.median(
                a / b for a, b in zip(found["local"], found["lock-step"], strict=True)
            )
            print(
                f"{shape[1]}x{shape[2]} {clients:3} clients {seeds:3} seeds  local "
                f"{ms['local']:6.1f}  batched {ms['batched']:6.1f}  lock-step "
                f"{ms['lock-step']:6.1f} CPU ms/round and run  {ratios:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
