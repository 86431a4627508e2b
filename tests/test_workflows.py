"""The workflows name make targets, scripts, modules and extras that exist, and every extra is
tested at its lowest.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOBS = {
    f"{name}/{job}": work for name, one in WORKFLOWS.items() for job, work in one["jobs"].items()
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
GATHERING = {"all", "dev", "trackers", "boxes", "papers"}
"""Extras of other extras, and the package that is installed from its folder."""


def scripts(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def settings(job: dict[str, Any]) -> list[dict[str, str]]:
    """The values of each run of a job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    return (
        list(matrix["include"])
        if "include" in matrix
        else [{key: one[0] for key, one in matrix.items()}]
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_job_names_what_exists(job: str) -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./-]+):(?!=)", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \??=", makefile, re.MULTILINE)) | {"TESTS"}
    for script in scripts(JOBS[job]):
        for words in re.findall(r"\bmake (\S.*)", script):
            named = words.split()
            assert {word for word in named if "=" not in word} <= targets, words
            assert {word.split("=")[0] for word in named if "=" in word} <= variables, words
        for module in re.findall(r"-m (benchmarks\.\w+)", script):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        for file in re.findall(r"\b(?:tools|src|tests|papers)/[\w./-]+", script):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("job", JOBS)
def test_the_scripts_of_a_job_are_bash(job: str) -> None:
    for script in scripts(JOBS[job]):
        plain = re.sub(r"\$\{\{.*?\}\}", "x", script)
        subprocess.run(["bash", "-n"], input=plain, text=True, check=True)


@pytest.mark.parametrize("job", JOBS)
def test_what_a_job_fills_in_is_set(job: str) -> None:
    """Each value of the matrix; and a job that another needs exists."""
    work = JOBS[job]
    known = {key for one in settings(work) for key in one}
    assert set(re.findall(r"\$\{\{ *matrix\.(\w+)", str(work))) <= known
    assert work.get("needs", job.split("/")[1]) in WORKFLOWS[job.split("/")[0]]["jobs"]


def test_every_extra_is_installed_with_the_lowest_versions_and_the_newest() -> None:
    installed: dict[str, set[str]] = {"lowest-direct": set(), "highest": set()}
    for one in settings(JOBS["nightly/versions"]):
        extras = set(one["extras"].split(","))
        assert extras <= EXTRAS.keys()
        installed[one["resolution"]] |= extras.union(*map(gathered, extras))
        assert all((ROOT / path).exists() for path in one.get("tests", "").split())
    assert installed["lowest-direct"] >= EXTRAS.keys() - GATHERING
    assert installed["highest"] >= {"all", "dev"}


def gathered(name: str) -> set[str]:
    """The other extras that an extra consists of."""
    return {
        one
        for text in EXTRAS[name]
        for found in re.findall(r"^fedloom\[(.+)\]$", text)
        for one in found.split(",")
    }
