"""The job in Apple's pfl-research, by its own loop, sampler, weighting and aggregation.

pfl hands out a client's rows in slices of their stored order and would take 9 batches of 32 and one
of 12. Each client here has its first 20 rows once more, which makes the ten full batches that the
others take.
"""

import os
import socket
import subprocess
import sys

import job
import torch
from torch.nn import functional as F


def ranks(workers: int) -> None:
    """Be the first of `workers` processes and start the others, as pfl's guide does by hand; before
    it is imported.
    """
    if workers == 1 or "PFL_WORKER_RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port + n}" for n in range(workers))
    for n in range(1, workers):
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "PFL_WORKER_RANK": str(n)})
    os.environ["PFL_WORKER_RANK"] = "0"


def main() -> None:
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops.selector import get_framework_module
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.lenet5()

        def loss(self, x, y):
            return F.cross_entropy(self.net(x), y)

        def metrics(self, x, y):
            """No forward pass: pfl evaluates before and after the first round, and this can't be
            turned off.
            """
            return {"nothing": Weighted(0, len(x))}

    class RoundEnds(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            marks.mark()
            return False, Metrics()

    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 pfl draws from NumPy's global generator
    marks = job.Marks()
    short = -job.ROWS % job.BATCH
    users = [
        Dataset([torch.cat([part, part[:short]]) for part in client]) for client in job.clients()
    ]
    data = FederatedDataset(
        users.__getitem__, get_user_sampler("minimize_reuse", range(job.CLIENTS))
    )
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            job.ROUNDS,
            evaluation_frequency=job.ROUNDS,
            train_cohort_size=job.CLIENTS,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_batch_size=job.BATCH, local_num_epochs=1, local_learning_rate=job.LR
        ),
        callbacks=[RoundEnds()],
        send_metrics_to_platform=False,
    )
    if get_framework_module().distributed.global_rank == 0:
        job.report(marks, network.net.state_dict(), ("pfl",))


if __name__ == "__main__":
    ranks(job.workers())
    main()
