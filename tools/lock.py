"""Write the hash-pinned requirements of a node's image, `examples/net/requirements.txt`.

    python tools/lock.py            # write the file again, after a change of constraints.txt
    python tools/lock.py --check    # fail if the registry has other files now than the file names

For Linux on x86-64 with the Python that runs this script (3.11 in the image): pip resolves the
dependencies of `fedloom[net]` with the versions of `constraints.txt`, and reports the SHA-256 of
each wheel that it would install.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "examples" / "net" / "requirements.txt"
TORCH = "https://download.pytorch.org/whl/cpu"
"""The index of PyTorch without CUDA. As every file has its hash, this index cannot slip in a
package of its own.
"""
HEAD = """\
# Every package of a node's image with the SHA-256 of its wheel (Linux, x86-64, Python 3.11).
# Written by tools/lock.py; do not edit.
"""


def wanted() -> list[str]:
    """The requirements of a node, and what builds fedloom itself."""
    values = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = values["project"]
    return [
        *project["dependencies"],
        *project["optional-dependencies"]["net"],
        *values["build-system"]["requires"],
    ]


def resolved(requirements: list[str]) -> list[dict[str, Any]]:
    """What pip would install for these, with the URL and hashes of each file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [
            "--dry-run",
            "--ignore-installed",
            "--only-binary",
            ":all:",
            "--report",
            str(report),
        ]
        indexes = ["--extra-index-url", TORCH, "-c", str(ROOT / "constraints.txt")]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", *options, *indexes, *requirements],
            check=True,
        )
        return list(json.loads(report.read_text(encoding="utf-8"))["install"])


def text(installed: list[dict[str, Any]]) -> str:
    """The requirements file of what pip would install."""
    lines = []
    for package in installed:
        metadata = package["metadata"]
        sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(
            f"{metadata['name'].lower().replace('_', '-')}=={metadata['version']} "
            f"--hash=sha256:{sha256}\n"
        )
    return HEAD + "".join(sorted(lines))


def main() -> int:
    """Write or check the file; 1 if it is out of date."""
    now = text(resolved(wanted()))
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(now, encoding="utf-8")
        return 0
    old = TARGET.read_text(encoding="utf-8")
    for line in sorted({*old.splitlines()} ^ {*now.splitlines()}):
        print("-" if line in old else "+", line)
    return int(old != now)


if __name__ == "__main__":
    sys.exit(main())
