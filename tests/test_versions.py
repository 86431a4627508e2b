"""The version is stated once, and each requirement states the lowest version that the nightly tests
install.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import fedloom
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan import node_party
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.run_digest import digest
from fedloom.experiment.run.session import fingerprint

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert f"\nversion: {fedloom.__version__}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )
    latest = re.search(
        r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    release, dev, _ = fedloom.__version__.partition(".dev")
    assert latest is not None
    assert latest[1] == (f"[Unreleased] ({release.removesuffix('.0')})" if dev else f"[{release}]")


def test_another_version_does_not_resume_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig.model_validate({"rounds": 1, "data": {"name": "digits", "clients": 2}})
    plan = build(run)
    before = digest(run), fingerprint(plan)
    monkeypatch.setattr(node_party, "__version__", "9.0")
    assert digest(run) != before[0] and fingerprint(plan) != before[1]


def test_every_requirement_states_one_lowest_version() -> None:
    project = tomllib.loads(TEXT)["project"]
    extras = [one for some in project["optional-dependencies"].values() for one in some]
    requirements = {
        one for one in [*project["dependencies"], *extras] if not one.startswith("fedloom[")
    }
    bounds = [
        re.fullmatch(r"(?P<name>[A-Za-z0-9._-]+)>=[0-9.a-z]+(,<[0-9.]+)?", one)
        for one in requirements
    ]
    assert len(requirements) > 40
    assert None not in bounds, [
        one for one, bound in zip(requirements, bounds, strict=True) if bound is None
    ]
    names = [bound["name"] for bound in bounds if bound]
    assert len(names) == len(set(names))


def test_pre_commit_has_the_tested_version_of_ruff() -> None:
    rev = re.search(
        r"ruff-pre-commit\n +rev: v(.+)",
        (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"),
    )
    assert rev is not None and f"\nruff=={rev[1]}\n" in (ROOT / "constraints.txt").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("subject", "refused"), [("x" * 72, False), ("x" * 73, True), ("é" * 72, False)]
)
def test_a_subject_of_a_commit_has_at_most_72_characters(subject: str, refused: bool) -> None:
    pattern = re.search(
        r"entry: '(.+)'", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    )
    assert pattern is not None
    body = (
        "\n\nA body whose lines are longer than a subject may be, which nobody minds, as it is "
        "read in a pager.\n"
    )
    assert bool(re.search(pattern[1], subject + body, re.MULTILINE)) == refused
