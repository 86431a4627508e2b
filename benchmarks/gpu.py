"""fedloom on a GPU, in at most nine minutes: `python -m benchmarks.gpu` prints one JSON object.

It needs this repository, torch with CUDA and the dependencies of fedloom, on Python 3.11 or newer,
and no network. When the time is over, the rest of a section is left out; the error of a section is
part of the result:

machine     versions, processor, device and its memory
methods     every registered method: rounds on the device, in turn and batched, against the CPU's numbers, beside what
            the last bit of each initial weight does on the CPU alone; and whether a second run has
            the same bits
rules       every rule of aggregation, and noise, in the same way
speed       rounds in samples a second: a plain loop on the device, and the engines local, batched and lock-step
seeds       seconds of 1, 3, 10 and 20 seeds of one run in lock-step, against one by one
families    seconds of a round of a method of each family: the CPU's loop, and the device in turn and batched

`--device cpu --small` does all of it at a small size on any machine: what is then printed says
nothing about a GPU.
"""  # noqa: E501

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.toy import CLASSES, contexts
from fedloom import methods, models
from fedloom.core.context import ClientContext
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.core.method import Method
from fedloom.engines import BatchedEngine, Engine, LocalEngine
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep
from fedloom.engines.repeatable import repeatable
from fedloom.protect.robust import Rule

SECONDS = 540.0
"""The time for everything."""
TOLERANCE = 2e-3
"""The largest difference of a weight from the CPU's after two rounds, relative to 1 + its size."""
TIMES_ROUNDING = 10.0
"""Or this many times the difference between two CPU runs, one with the last bit of each initial
weight changed: Adam turns rounding noise of a gradient near 0 into steps of its rate.
"""
BATCH, LR, ROWS = 32, 0.01, 300
CASES = (
    ("100 clients, small CNN", "cnn-small", 100, (1, 28, 28)),
    ("8 peers, AFIND's CNN", "cnn", 8, (3, 32, 32)),
    ("10 clients, FedAL's LeNet-5", "lenet5", 10, (1, 28, 28)),
)
FAMILIES = ("fedavg", "fedal", "augfl", "afind-plus", "gossip", "fedboost", "split", "proto-evfl")
"""The methods that are timed."""
DRAWN_THERE = ("fedhssl", "ss-vfl")
"""The methods that draw views of rows with the device's own generator. They are compared with a
second run there.
"""


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def wait(device: str) -> None:
    """Until the device has done all queued work."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, repeats: int) -> float:
    """The median of some repetitions, after one that does not count."""
    taken = []
    for _ in range(1 + repeats):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def peak(device: str, work: Callable[[], object]) -> float | None:
    """The most megabytes of the device that some work held."""
    if device == "cpu":
        work()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 1e6


def machine(device: str) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_gb": properties.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return found


# -- every method against the CPU ------------------------------------------------------------------


def small_run(
    name: str,
    engine: Mapping[str, Any],
    clients: int = 4,
    rounds: int = 2,
    test_fraction: float = 0.85,
    aggregate: Mapping[str, Any] | None = None,
) -> Any:
    """A short run of a method on scikit-learn's digits."""
    from fedloom.experiment.plan.reading import check

    method = methods.registry()[name]
    small: dict[str, float] = {
        "tau": 2,
        "batch_size": 8,
        "epochs": 1,
        "steps": 2,
        "server_steps": 3,
    }
    small |= {"pretrain_rounds": 1, "local_rounds": 1}  # of two rounds in all
    params: dict[str, Any] = {
        k: v for k, v in small.items() if k in method.config.model_fields and k not in method.fixed
    }
    data: dict[str, Any] = {
        "name": "digits",
        "clients": clients,
        "public_rows": 60,
        "test_rows": 50,
        "own_test_rows": 20,
    }
    if name == "fedcox":  # which needs two classes and a time
        data = {"name": "breast_cancer", "clients": clients, "test_fraction": 0.5}
        params = {"time": "mean area", "event": "benign"}
    # for pixels at 0
    params |= (
        {"l2": 1.0} if method.family == "tables" and "l2" in method.config.model_fields else {}
    )
    values: dict[str, Any] = {
        "method": name,
        "rounds": rounds,
        "params": params,
        "models": {"pool": ["mlp"]},
    }
    values |= {"data": {"test_fraction": test_fraction, **data}, "engine": dict(engine)}
    values |= {"aggregate": dict(aggregate)} if aggregate else {}
    if "secure sums" in method.needs:
        values["aggregate"] = {"secure": True}
    if "pretrained server model" in method.needs or method.family == "meta":
        values |= {
            "pretrained": {"model": "mlp", "epochs": 1},
            "data": {**values["data"], "server_rows": 200},
        }
    if method.setting == "vertical":
        values["columns"], values["data"] = {"aligned": 24, "unaligned": 20}, data
    return check({"run": values}).run


@contextmanager
def rounds_of(run: Any) -> Iterator[tuple[Callable[[], None], Callable[[], dict[str, Any]]]]:
    """A function that does the next round, and one that reads every leaf of every party's state."""
    from fedloom.experiment.plan.build import build
    from fedloom.experiment.run.engine import start

    plan = build(run)
    with start(plan) as there:
        graph = None if plan.graph is None else dict(enumerate(plan.graph))
        fed = Federation(
            there,
            graph=graph,
            param_shapes=plan.param_shapes,
            colocated=plan.colocated,
            aggregator=plan.aggregator,
            means=plan.method.client.MEANS,
        )
        numbers = iter(range(run.rounds))

        def step() -> None:
            fed.round = t = next(numbers)
            for _ in plan.method.round(fed, plan.server, there.ids, plan.cfg, t):
                pass
            if fed.failures:
                raise RuntimeError(f"{fed.failures[0].reason}\n{fed.failures[0].trace}")

        def read() -> dict[str, Any]:
            states = {str(i): state for i, state in there.states().items()}
            return dict(
                leaves({**states, **({"server": plan.server.state()} if plan.server else {})})
            )

        yield step, read


def final_states(
    method: str, aggregate: Mapping[str, Any] | None = None, **engine: Any
) -> dict[str, Any]:
    """Every leaf of every party's state after two rounds."""
    run = small_run(method, engine, 6 if aggregate else 4, aggregate=aggregate)  # Krum needs five
    with rounds_of(run) as (step, read):
        step()
        step()
        return read()


@contextmanager
def last_bits_changed() -> Iterator[None]:
    """Within it, each initial weight of every network is the next larger number."""
    build = ClientContext.build

    def changed(context: ClientContext) -> nn.Module:
        network = build(context)
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
        return network

    ClientContext.build = changed  # type: ignore[assignment]
    try:
        yield
    finally:
        ClientContext.build = build


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The largest difference of two states' numbers, relative to 1 + their size."""
    assert a.keys() == b.keys()
    most = 0.0
    for path, x in a.items():
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            y = b[path].detach().cpu().double()
            most = max(most, float(((x.detach().cpu().double() - y).abs() / (1 + y.abs())).max()))
    return most


def every_method(device: str, clock: Clock, small: bool) -> dict[str, Any]:
    """The difference from the CPU's loop, by method."""
    found: dict[str, Any] = {}
    names = list(methods.registry())
    for name in names[:: 8 if small else 1]:
        if clock.left < 0:
            return {
                "tolerance": TOLERANCE,
                "methods": found,
                "left_out": [n for n in names if n not in found],
            }
        found[name] = compared(name, device)
    bad = [name for name, one in found.items() if not one["ok"]]
    return {"tolerance": TOLERANCE, "checked": len(found), "not_ok": bad, "methods": found}


def compared(
    method: str, device: str, aggregate: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The differences of a method's states from the CPU's loop, and whether a second run has the
    same bits.
    """
    try:
        drawn_there = device if method in DRAWN_THERE else "cpu"
        loop = final_states(method, aggregate, device=drawn_there)
        found: dict[str, Any] = {}
        repeats = []
        for engine in ("local", "batched"):
            states = [final_states(method, aggregate, name=engine, device=device) for _ in range(2)]
            found[engine] = difference(states[0], loop)
            repeats.append(difference(*states) == 0)
        apart = max(found.values())
        with last_bits_changed():
            rounding = difference(final_states(method, aggregate), loop)
        near = apart <= max(TOLERANCE, TIMES_ROUNDING * rounding)
        return found | {"rounding": rounding, "repeats": all(repeats), "ok": near and all(repeats)}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}


def rules(device: str, clock: Clock, small: bool) -> dict[str, Any]:
    """`compared` for each rule of `[aggregate]`, of FedAvg."""
    found: dict[str, Any] = {}
    every: dict[str, dict[str, Any]] = {rule: {"rule": rule} for rule in get_args(Rule)}
    every |= {"secure": {"secure": True}, "noise": {"noise": {"sigma": 1.0}}}
    for name, aggregate in [*every.items()][:: 4 if small else 1]:
        if clock.left > 0:
            found[name] = compared("fedavg", device, aggregate)
    return {"not_ok": [name for name, one in found.items() if not one["ok"]], "rules": found}


def families(device: str, clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Seconds of a round of a method of each family: perceptrons and 20 clients, or the parties of
    a vertical run.
    """
    repeats = 1 if small else 5
    for name in FAMILIES[:: 4 if small else 1]:
        if clock.left < 0:
            return
        row: dict[str, Any] = {"method": name}
        for title, engine in {
            "cpu": {"name": "local"},
            "local": {"name": "local", "device": device},
            "batched": {"name": "batched", "device": device},
        }.items():
            clients = 4 if small or methods.registry()[name].setting == "vertical" else 20
            run = small_run(name, engine, clients, 1 + repeats, test_fraction=0.2)
            with rounds_of(run) as (step, _):
                row[title] = seconds_of(step, device, repeats)
        yield row


# -- speed -----------------------------------------------------------------------------------------


def plain(
    architecture: str, clients: int, shape: tuple[int, ...], device: str
) -> Callable[[], None]:
    """A round of FedAvg as one writes it in plain PyTorch, with all rows on the device."""
    places = contexts(clients, ROWS, architecture, shape=shape, device=device)
    net = models.build(architecture, shape, CLASSES, seed=0).to(device)
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    every = torch.arange(ROWS, device=device)
    data = [(s.rows.x(every), s.rows.y(every)) for s in places]

    def round() -> None:
        nonlocal weights
        total = {k: torch.zeros_like(v) for k, v in weights.items()}
        for x, y in data:
            net.load_state_dict(weights)
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            order = torch.randperm(ROWS)
            order = torch.cat([order, order[: -ROWS % BATCH]]).to(device)
            for batch in order.split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
            for k, v in net.state_dict().items():
                total[k] += v / clients
        weights = total

    return round


@cache
def _fedavg() -> Method:
    """The example page, loaded once: parties of two classes would not be batched together."""
    return methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")


class Job:
    """FedAvg, and its rounds."""

    def __init__(
        self,
        make: Callable[..., Engine],
        architecture: str,
        clients: int,
        shape: tuple[int, ...],
        device: str,
    ) -> None:
        self.method = _fedavg()
        self.cfg = self.method.configure(params={"lr": LR, "batch_size": BATCH})
        places = contexts(clients, ROWS, architecture, shape=shape, device=device)
        self.fed = Federation(make([self.method.client(self.cfg, place) for place in places]))
        assert self.method.server is not None
        self.server = self.method.server(
            self.cfg, ClientContext(id=0, network=places[0].network, device=device)
        )
        self.t = 0

    def round(self) -> None:
        """The next one."""
        self.fed.round = self.t
        for _ in self.method.round(self.fed, self.server, self.fed.engine.ids, self.cfg, self.t):
            pass
        self.t += 1


def lockstep_seconds(
    runs: int, rounds: int, make: Callable[[Callable[..., Engine]], Job], device: str
) -> float:
    """Seconds of a round of several runs in lock-step, after one that does not count."""
    marks: list[float] = []

    def work(lane: Lane[None]) -> None:
        job = make(partial(LockstepEngine, lane=lane))
        for _ in range(1 + rounds):
            job.round()
            if lane.number == 0:
                wait(device)
                marks.append(time.perf_counter())

    for outcome in in_lockstep([work] * runs):
        if isinstance(outcome, BaseException):
            raise outcome
    return (marks[-1] - marks[0]) / rounds


def speed(device: str, clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """The cases, each with samples a second, ratios to the plain loop, and memory."""
    repeats = 1 if small else 3
    for title, architecture, whole, shape in CASES:
        if clock.left < 0:
            return
        clients = 2 if small else whole
        samples = clients * -(-ROWS // BATCH) * BATCH
        row: dict[str, Any] = {"case": title, "clients": clients, "samples_per_round": samples}
        every: dict[str, Callable[[], None]] = {
            "plain": plain(architecture, clients, shape, device),
            "local": Job(LocalEngine, architecture, clients, shape, device).round,
            "batched": Job(BatchedEngine, architecture, clients, shape, device).round,
        }
        taken = {}
        for name, work in every.items():
            memory = peak(device, work)
            taken[name] = seconds_of(work, device, repeats)
            row[name] = {
                "seconds": taken[name],
                "samples_per_second": samples / taken[name],
                "memory_mb": memory,
            }
        runs = 2 if small else 5
        make = partial(Job, architecture=architecture, clients=clients, shape=shape, device=device)
        spent = lockstep_seconds(runs, repeats, make, device)
        row["lockstep"] = {
            "runs": runs,
            "seconds": spent,
            "samples_per_second": runs * samples / spent,
        }
        row["times_plain"] = {
            name: row[name]["samples_per_second"] / row["plain"]["samples_per_second"]
            for name in ("local", "batched", "lockstep")
        }
        yield row


def seeds(device: str, clock: Clock, small: bool) -> Iterator[dict[str, Any]]:
    """Seconds of a round of many seeds in lock-step, and of as many batched runs one after the
    other.
    """
    clients = 4 if small else 10
    make = partial(Job, architecture="cnn-small", clients=clients, shape=(1, 28, 28), device=device)
    alone = seconds_of(make(BatchedEngine).round, device, 1 if small else 3)
    for count in (1, 3) if small else (1, 3, 10, 20, 100):
        if clock.left < 0:
            return
        spent = lockstep_seconds(count, 1 if small else 3, make, device)
        yield {"seeds": count, "clients": clients, "seconds": spent, "one_by_one": count * alone}


def main() -> int:
    """Run all sections; 1 if one failed or a method is not ok."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="a torch device (default: cuda)")
    parser.add_argument("--small", action="store_true", help="a small size, to try the script")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"time for everything (default: {SECONDS:g})"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of gpu.json")
    given = parser.parse_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; add --device cpu --small to try the script")
    clock, device, small = Clock(given.seconds), given.device, given.small
    torch.set_num_threads(1)
    # as exact as the CPU
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    sections: dict[str, Callable[[], Any]] = {
        "machine": lambda: machine(device),
        "speed": lambda: [*speed(device, clock, small)],
        "seeds": lambda: [*seeds(device, clock, small)],
        "methods": lambda: every_method(device, clock, small),
        "rules": lambda: rules(device, clock, small),
        "families": lambda: [*families(device, clock, small)],
    }
    for name, work in sections.items():
        start = time.monotonic()
        try:
            with repeatable(device):
                found[name] = work()
        except Exception:  # the other sections are still worth having
            found[name] = {"error": traceback.format_exc()}
        found.setdefault("seconds", {})[name] = time.monotonic() - start
        (given.out / "gpu.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    failed = [name for name, one in found.items() if isinstance(one, dict) and "error" in one]
    return int(bool(failed or found["methods"].get("not_ok") or found["rules"].get("not_ok")))


if __name__ == "__main__":
    sys.exit(main())
