"""The README's federation of two nodes and a coordinator on one machine, as a new user would start
it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.api import execute
from fedloom.experiment.plan.reading import read
from tests.net.processes import free_ports

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_four_commands_of_the_readme_give_the_bits_of_one_process(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.M | re.S)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    assert [shlex.split(line)[1] for line in lines] == ["certs", "node", "node", "run"]
    lines[0] += f" --address 127.0.0.1:{free_ports(1)[0]}"
    lines[3] += " --rounds 2 --out run"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    nodes = []
    try:
        for line in lines:
            words = [sys.executable, "-m", "fedloom", *shlex.split(line.removesuffix("&"))[1:]]
            process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
            if line.endswith("&"):
                nodes.append(process)
            else:
                assert process.wait(120) == 0, line
    finally:
        for process in nodes:
            process.send_signal(signal.SIGINT)
        for process in nodes:
            assert process.wait(30) == 0
    there = json.loads((tmp_path / "run" / "result.json").read_text())
    here = execute(read("fedal", ["data.clients=2", "rounds=2"], {}).run)
    assert there["state_sha256"] == here.summary["state_sha256"]
