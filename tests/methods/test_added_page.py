"""A method is added by adding one file: the docs' example page, dropped into a family, works
everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHOD = "fedavg-example"


@pytest.fixture
def fedloom(tmp_path: Path) -> Callable[..., str]:
    """The command of a copy of fedloom that has one page more."""
    shutil.copytree(
        ROOT / "src" / "fedloom", tmp_path / "fedloom", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(
        ROOT / "examples" / "fedavg.py",
        tmp_path / "fedloom" / "methods" / "averaging" / "example.py",
    )

    def call(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "fedloom", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.slow
def test_a_file_in_a_family_is_a_method_of_every_command(
    fedloom: Callable[..., str], tmp_path: Path
) -> None:
    listed = [line["name"] for line in json.loads(fedloom("list", "methods", "--json"))]
    # family by family, file by file
    assert METHOD in listed and listed.index(METHOD) < listed.index("fedavg")
    assert "params.lr" in fedloom("list", METHOD)

    small = ["-s", "data.clients=3", "-s", "models.pool=['mlp']", "--rounds", "2"]
    for engine in ("local", "isolated"):
        fedloom("run", METHOD, *small, "--engine", engine, "--out", engine)
    results = {
        name: json.loads((tmp_path / name / "result.json").read_text())
        for name in ("local", "isolated")
    }
    assert results["local"]["method"] == METHOD and results["local"]["bytes"]["up"] > 0
    assert results["local"]["state_sha256"] == results["isolated"]["state_sha256"]
    fedloom("report", "local")
    assert "Averaged weights" in (tmp_path / "local" / "report.html").read_text()
