"""From the start of a process to the end of the first round: FedAvg's LeNet-5 anchor, and FedAL on bundled digits."""

import os
import resource
import subprocess
import sys
import time

JOBS = {
    "FedAvg lenet5": "from benchmarks.fedavg import ours; ours('lenet5', rounds=1)()",
    "FedAL digits": "import fedloom; fedloom.run('fedal', rounds=1)",
}


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
        print(f"{name}: first round after {sorted(wall)[repeats // 2]:.1f} s ({sorted(cpu)[repeats // 2]:.1f} CPU s)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
