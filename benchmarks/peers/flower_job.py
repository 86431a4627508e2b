"""The job in Flower's simulation on Ray, one actor a worker: its FedAvg, and plain PyTorch at the
client.

A client's rows and network are made once per actor and kept, which Flower leaves to its user.
"""

import functools

import job
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F


def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = kept_network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = job.clients()[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(net.parameters(), lr=job.LR)
    order = torch.randperm(len(x))
    for batch in torch.cat([order, order[: -len(x) % job.BATCH]]).split(job.BATCH):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(RecordDict(content), reply_to=message)


@functools.cache
def kept_network() -> torch.nn.Module:
    return job.lenet5()


def main(workers: int) -> None:
    torch.set_num_threads(1)
    marks = job.Marks()
    server, client = ServerApp(), ClientApp()
    client.train()(train)

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        def round_ends(round: int, arrays: ArrayRecord) -> None:
            if round:  # it is called once before the first
                marks.mark()

        result = FedAvg(fraction_evaluate=0.0).start(
            grid,
            ArrayRecord(job.lenet5().state_dict()),
            num_rounds=job.ROUNDS,
            evaluate_fn=round_ends,
        )
        weights.update(result.arrays.to_torch_state_dict())

    weights: dict[str, torch.Tensor] = {}
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local", "num_cpus": workers},
    }
    run_simulation(server, client, job.CLIENTS, backend_config=resources)
    job.report(marks, weights, ("flwr", "ray"))


if __name__ == "__main__":
    # By its name, so that the actors import the client's code and keep what it keeps.
    from flower_job import main as by_name

    by_name(job.workers())
