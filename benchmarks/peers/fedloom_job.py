"""The job in fedloom: the README's page, on the rows as pixels, from which a client makes its
batches each round.
"""

from functools import partial
from pathlib import Path
from typing import Any

import job
import torch

from fedloom import ClientContext, Federation, Party, methods, models
from fedloom.core.context import Rows
from fedloom.engines import Engine, LocalEngine, WorkersEngine

PAGE = Path(__file__).parents[2] / "examples" / "fedavg.py"


def engine_of(parties: list[Party[Any]], workers: int) -> Engine:
    return LocalEngine(parties) if workers == 1 else WorkersEngine(parties, workers=workers, seed=0)


def main(workers: int) -> None:
    torch.set_num_threads(1)
    method = methods.load(PAGE)
    cfg = method.configure(params={"lr": job.LR, "batch_size": job.BATCH})
    network = partial(models.build, "lenet5", job.SHAPE, job.CLASSES, seed=0)
    x, y = job.pixels()
    half = torch.tensor(job.HALF)

    def client(n: int) -> Party[Any]:
        own = torch.arange(n * job.ROWS, (n + 1) * job.ROWS)
        context = ClientContext(
            n,
            parties=job.CLIENTS,
            classes=job.CLASSES,
            data=Rows(x, y, own, half, half),
            network=network,
        )
        return method.client(cfg, context)

    server = method.server(cfg, ClientContext(0, network=network))
    marks = job.Marks()
    with engine_of([client(n) for n in range(job.CLIENTS)], workers) as engine:
        fed = Federation(engine)
        for t in range(job.ROUNDS):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
            marks.mark()
    if fed.failures:
        raise RuntimeError(
            f"{len(fed.failures)} calls failed, the first one thus: {fed.failures[0]}"
        )
    job.report(marks, server.weights, ("fedloom",))


if __name__ == "__main__":
    main(job.workers())
