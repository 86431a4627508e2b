"""The command line, called within the process of a test."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    """What it printed."""

    stdout: str
    stderr: str


@pytest.fixture
def fedloom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command, called in the test's folder; `code` is the status that it must end with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    log = logging.getLogger("fedloom")  # which a node takes for itself
    for name in ("handlers", "propagate"):
        monkeypatch.setattr(log, name, getattr(log, name))
    from fedloom.cli import (
        # only here: this file is also read in Flower's environment, which lacks Typer's version
        main,
    )

    def call(*arguments: str, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        done = Done(*capsys.readouterr())
        assert (stop.value.code or 0) == code, done
        return done

    return call
