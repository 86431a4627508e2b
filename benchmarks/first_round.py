"""From the start of a process to the end of the first round: FedAvg's LeNet-5 anchor, and FedAL on
bundled digits.

Then the first gradient of batched parties in a process, and what of it imports `torch._dynamo`,
which `torch.func.grad`
names: all of it is Python, which other threads wait for.
"""

import os
import resource
import subprocess
import sys
import time

JOBS = {
    "FedAvg lenet5": "from benchmarks.fedavg import ours; ours('lenet5', rounds=1)()",
    "FedAL digits": "import fedloom; fedloom.run('fedal', rounds=1)",
}
BATCHED = """
import sys, time, torch
from torch.func import grad, vmap

def spent(work):
    start, before = time.process_time(), len(sys.modules)
    work()
    return time.process_time() - start, len(sys.modules) - before

def gradient():
    vmap(grad(lambda w: (w * w).sum()))(torch.ones(8, 3))

vmap(torch.sum)(torch.ones(8, 3))
imported, modules = spent(lambda: __import__("torch._dynamo", fromlist=["compiled_autograd"]).compiled_autograd)
print(f"import of torch._dynamo {imported:.2f} CPU s, {modules} modules; then the first batched gradient "
      f"{1e3 * spent(gradient)[0]:.1f} CPU ms, the second {1e3 * spent(gradient)[0]:.2f}")
"""  # noqa: E501


def main(repeats: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, code in JOBS.items():
        wall, cpu = [], []
        for _ in range(repeats):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - start)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        print(
            f"{name}: first round after {sorted(wall)[repeats // 2]:.1f} s "
            f"({sorted(cpu)[repeats // 2]:.1f} CPU s)"
        )
    subprocess.run([sys.executable, "-c", BATCHED], check=True, env=environment)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
