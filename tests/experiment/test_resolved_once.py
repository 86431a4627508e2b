"""A run's method and its config are worked out once, from the command to the last round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.method import Method
from fedloom.experiment.config.run import RunConfig
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

SMALL: dict[str, Any] = {"rounds": 1, "models": {"pool": ["linear"]}, "data": {"clients": 3}}


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods that were configured, each time that one was."""
    names: list[str] = []
    configure = Method.configure

    def counted(self: Method, *arguments: Any, **settings: Any) -> Any:
        names.append(self.name)
        return configure(self, *arguments, **settings)

    monkeypatch.setattr(Method, "configure", counted)
    return names


def test_in_python(resolved: list[str], tmp_path: Path) -> None:
    fedloom.run("fedal", **SMALL, out=tmp_path / "run")
    assert resolved == ["fedal"]


def test_by_the_command(resolved: list[str], command: Callable[..., Done]) -> None:
    command(
        "run",
        "fedal",
        "--rounds",
        "1",
        "-s",
        "models.pool=['linear']",
        "-s",
        "data.clients=3",
        "--out",
        "run",
    )
    assert resolved == ["fedal"]


def test_in_a_comparison(resolved: list[str]) -> None:
    fedloom.compare(["fedal", "fedmd"], seeds=[0, 1], **SMALL)
    # a run of each seed, and the preset for the remarks
    assert sorted(resolved) == ["fedal"] * 3 + ["fedmd"] * 3


def test_a_copy_with_other_settings_is_resolved_anew() -> None:
    run = RunConfig.model_validate({**SMALL, "params": {"tau": 2}})
    assert run.resolve() is run.resolve() and run.resolve()[1].tau == 2
    other = run.model_copy(update={"params": {"tau": 3}, "rounds": 4})
    assert other.resolve()[1].tau == 3 and other.resolve()[2] == 4
    # one is resolved, the other is not
    assert run == RunConfig.model_validate({**SMALL, "params": {"tau": 2}})
    assert "_resolved" not in run.model_dump()
