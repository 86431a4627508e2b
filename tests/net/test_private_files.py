"""What a federation writes is its owner's alone; a node ends soon; claims of rows have a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.core.engine import Failure
from fedloom.core.errors import ConfigError
from fedloom.remote import federation, rpc_errors
from fedloom.remote.connections import Timeouts
from fedloom.remote.coordinator import node_set
from fedloom.remote.node_session import NodeSession, RunContext, claimed_rows

BUSY = """
import asyncio, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from fedloom.cli import remote
from fedloom.remote.node import process
begin = process.start
async def start(config):
    made = await begin(config)
    made.service._worker.submit(time.sleep, 600)  # work that nothing interrupts, as one long operation of PyTorch
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), getattr(signal, sys.argv[2]))
    return made
process.start = start
remote.node(__import__("pathlib").Path(sys.argv[1]), insecure=True)
"""  # noqa: E501


def test_certs_writes_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        done = CliRunner().invoke(
            app, ["certs", "a", "b", "--all-here", "--out", str(tmp_path / "fed")]
        )
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    made = [tmp_path / "fed", *(tmp_path / "fed").rglob("*")]
    assert len(made) > 15 and not [path for path in made if path.stat().st_mode & 0o077]


@pytest.mark.each_time("SIGTERM")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_node_ends_although_its_work_does_not(number: str, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        'name = "a"\ninsecure = true\ncallers = { coordinator = "127.0.0.1:9" }\nmethods = '
        '["fedavg"]\n[data.digits]\ndataset = "digits"\n'
    )
    before = os.umask(0o022)
    try:
        command = [sys.executable, "-c", BUSY, str(tmp_path / "node.toml"), number]
        # the work would take 600 s
        done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    finally:
        os.umask(before)
    assert done.returncode == 0 and "takes calls of" in done.stdout, done.stdout + done.stderr
    assert not [path for path in (tmp_path / "state").rglob("*") if path.stat().st_mode & 0o077]


def test_memory_has_a_limit_that_an_error_tells() -> None:
    script = (
        "import torch\nfrom fedloom.remote.node.process import limit_memory\n"
        "limit_memory(1024)\nassert torch.ones(1000).sum() == 1000\ntry:\n    torch.ones(1 << "
        "29)\nexcept (RuntimeError, MemoryError) as error:\n    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "refused\n", done.stderr


def test_a_claim_above_the_limit_is_dropped() -> None:
    from fedloom.core import message

    common = RunContext("0" * 32, 1, "", False, Timeouts(1.0, 1.0), {0: "a", 1: "b"}, {"a": 500})
    claims = lambda rows: [memoryview(message.encode({"weights": {}, "rows": rows}))]
    a, b = (NodeSession(k, name, None, common) for k, name in enumerate("ab"))
    assert a._result({"reply": 0}, claims(500), 1)["rows"] == 500
    assert a._result({"reply": 0}, claims(10**15), 1) == Failure(
        rpc_errors.REFUSED, "a claims 1000000000000000 rows; max_rows is 500"
    )
    assert b._result({"reply": 0}, claims(10**15), 1)["rows"] == 10**15
    assert claimed_rows({"counts": torch.tensor([3, 4])}) == 7
    assert claimed_rows(torch.ones(3)) == claimed_rows({"rows": torch.ones(3)}) == 0


def test_the_limit_is_that_of_the_node_or_else_of_the_federation(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        'listen = "127.0.0.1:9"\ninsecure = true\nmax_rows = 1000\n[[nodes]]\nname = '
        '"a"\nmax_rows = 50\n[[nodes]]\nname = "b"\n'
    )
    assert node_set(federation.read(tmp_path / "f.toml")).max_rows == {"a": 50, "b": 1000}
    (tmp_path / "f.toml").write_text(
        'listen = "127.0.0.1:9"\nmax_rows = 0\n[[nodes]]\nname = "a"\n'
    )
    with pytest.raises(ConfigError, match="max_rows"):
        federation.read(tmp_path / "f.toml")
