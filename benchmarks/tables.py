"""CPU seconds and peak memory of reading a large table beside pandas and Polars: `python -m
benchmarks.tables 1000000`.

The table has 50 columns: 45 of numbers, four of words and a label of two classes. Each reader is a
process of its own; its imports are counted. Polars is added if it is installed.

`python -m benchmarks.tables --large 10000000` prints the same of `fedloom stats` on a CSV and a
Parquet file of that many rows of ten numbers, a label and ten owners, beside pandas' reading of
them and `fedloom stats` on a few rows: peak memory, and what the numbers have as float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import csv, parquet

PART = 1_000_000
"""Rows of a large table that are made at once."""
READERS = {
    "pandas": "import pandas; pandas.read_{pandas}({file!r})",
    "Polars": "import polars; polars.read_{polars}({file!r})",
    "fedloom data": "import sys; sys.argv = ['fedloom', 'data', {file!r}, '--label', 'label']; "
    "from fedloom.cli import main; main()",
    "start of a run": "from fedloom.experiment.plan.reading import check; from fedloom.experiment.plan.build "  # noqa: E501
    "import build; build(check({{'run': {{'method': 'fedavg', 'data': {{'name': {file!r}, "
    "'label': 'label', 'clients': 4, 'partition': 'iid'}}}}}}).run)",
}
"""The code of each reader."""


def write(folder: Path, rows: int) -> dict[str, Path]:
    """The table as CSV and as Parquet, by format."""
    rng = np.random.default_rng(0)
    columns = {f"x{i}": rng.normal(size=rows).round(4) for i in range(45)}
    words = np.array(["north", "south", "east", "west"])
    columns |= {f"w{i}": words[rng.integers(4, size=rows)] for i in range(4)}
    columns["label"] = np.where(columns["x0"] > 0, "yes", "no")
    table = pyarrow.table(columns)
    files = {"csv": folder / "table.csv", "parquet": folder / "table.parquet"}
    csv.write_csv(table, files["csv"])
    parquet.write_table(table, files["parquet"])
    return files


def measured(code: str) -> tuple[float, float]:
    """CPU seconds and peak memory in GB of a process that runs this code.

    The kernel's `ru_maxrss` would count this process's memory, too, from which the other one is
    forked.
    """
    peak = (
        "import atexit; atexit.register(lambda: print(open('/proc/self/status').read(), "
        "file=open({file!r}, 'w'))); "
    )
    with tempfile.NamedTemporaryFile("r") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", peak.format(file=file.name) + code], stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"failed: {code}")
        (line,) = (
            line for line in Path(file.name).read_text().splitlines() if line.startswith("VmHWM")
        )
    return used.ru_utime + used.ru_stime, int(line.split()[1]) / 1e6


STATS = (
    "import sys; sys.argv = ['fedloom', 'stats', {file!r}, '--label', 'label', '--group', "
    "'owner']; from fedloom.cli import main; main()"
)


def write_large(folder: Path, rows: int) -> dict[str, Path]:
    """A table of ten numbers, a label and ten owners as CSV and as Parquet, by format."""
    rng = np.random.default_rng(0)
    names = [*(f"x{i}" for i in range(10)), "label", "owner"]
    schema = pyarrow.schema(
        zip(names, [pyarrow.float64()] * 10 + [pyarrow.int8()] * 2, strict=True)
    )
    files = {kind: folder / f"{rows}.{kind}" for kind in ("csv", "parquet")}
    with (
        csv.CSVWriter(files["csv"], schema) as text,
        parquet.ParquetWriter(files["parquet"], schema) as binary,
    ):
        for first in range(0, rows, PART):
            n = min(PART, rows - first)
            columns = [rng.normal(size=n).round(4) for _ in range(10)]
            own = [(columns[0] > 0).astype(np.int8), rng.integers(10, size=n, dtype=np.int8)]
            part = pyarrow.table([*columns, *own], schema=schema)
            text.write_table(part)
            binary.write_table(part)
    return files


def large(rows: int) -> None:
    """Print a row for each reader of a large table and format."""
    with tempfile.TemporaryDirectory() as folder:
        files, few = write_large(Path(folder), rows), write_large(Path(folder), 1000)
        sizes = ", ".join(
            f"{kind} {file.stat().st_size / 1e9:.2f} GB" for kind, file in files.items()
        )
        print(
            f"{rows:,} rows of ten numbers: {rows * 80 / 1e9:.2f} GB as float64; files: {sizes}\n",
            flush=True,
        )
        print(
            "| reader | CSV, CPU s | CSV, peak GB | Parquet, CPU s | Parquet, peak GB "
            "|\n|---|---|---|---|---|"
        )
        pandas = {
            kind: f"import pandas; pandas.read_{kind}({str(file)!r})"
            for kind, file in files.items()
        }
        stats = {kind: STATS.format(file=str(file)) for kind, file in files.items()}
        start = {kind: STATS.format(file=str(file)) for kind, file in few.items()}
        for name, codes in {"pandas": pandas, "stats": stats, "stats, 1,000 rows": start}.items():
            cells = [measured(code) for code in codes.values()]
            print(
                f"| {name} |",
                " | ".join(f"{seconds:.0f} | {memory:.2f}" for seconds, memory in cells),
                "|",
                flush=True,
            )


def main() -> None:
    """Print a row for each reader and format."""
    if sys.argv[1:2] == ["--large"]:
        return large(int(sys.argv[2]))
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"{rows:,} rows, 50 columns\n")
    print("| reader | CSV, CPU s | CSV, GB | Parquet, CPU s | Parquet, GB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), rows)
        for name, code in READERS.items():
            if name == "Polars" and find_spec("polars") is None:
                continue
            cells = [
                measured(code.format(file=str(file), pandas=kind, polars=kind))
                for kind, file in files.items()
            ]
            print(
                f"| {name} |",
                " | ".join(f"{seconds:.1f} | {memory:.1f}" for seconds, memory in cells),
                "|",
            )


if __name__ == "__main__":
    main()
