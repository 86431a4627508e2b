"""A cluster that a run starts for itself cannot be reached from another machine, nor without Ray's
token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("ray")

SCRIPT = """
import json, os, sys
import psutil
from fedloom.engines._ray_cluster import _join, ray
_join(None, 1)
mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
open_to = {c.laddr.ip.removeprefix("::ffff:") for p in mine for c in p.net_connections() if c.status == "LISTEN"}
token = os.path.expanduser("~/.ray/auth_token")
print(json.dumps({"listens": sorted(open_to), "mode": os.environ.get("RAY_AUTH_MODE"),
                  "token": oct(os.stat(token).st_mode & 0o777), "dashboard": ray._private.worker.get_dashboard_url()}))
ray.shutdown()
"""  # noqa: E501


@pytest.mark.slow
def test_it_listens_on_loopback_only_with_a_token_and_no_dashboard() -> None:
    with tempfile.TemporaryDirectory(
        prefix="fl", dir="/tmp", ignore_cleanup_errors=True
    ) as server_side:  # a short path
        env = {
            "HOME": server_side,
            "RAY_TMPDIR": server_side,
            "PYTHONPATH": ":".join(sys.path),
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"listens": ["127.0.0.1"], "mode": "token", "token": "0o600", "dashboard": ""}


@pytest.mark.parametrize(
    "cause", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_parties_that_do_not_fit_a_node_are_a_sentence(cause: Exception) -> None:
    """As of `benchmarks.cluster large`: the run printed a traceback."""
    from ray import exceptions

    from fedloom.core.errors import EngineError
    from fedloom.engines._ray_cluster import _cause

    found = _cause(exceptions.RayTaskError("states", "Traceback …", cause), "node-7")
    assert isinstance(found, EngineError)
    assert (
        "node-7" in str(found)
        and "raise engine.workers" in str(found)
        and "Traceback" not in str(found)
    )
