"""Packages that add commands and preset files: a broken one takes nothing else away."""

import logging
from importlib.metadata import EntryPoint

import pytest

from fedloom.support import extensions


def test_a_package_that_cannot_be_imported_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    added = {
        "fedloom.commands": [("broken", "no_such_module:main"), ("works", "json:dumps")],
        "fedloom.presets": [("odd", "json:loads"), ("texts", f"{__name__}:texts")],
    }
    monkeypatch.setattr(
        extensions,
        "entry_points",
        lambda group: [EntryPoint(name, value, group) for name, value in added[group]],
    )
    with caplog.at_level(logging.WARNING, "fedloom"):
        assert [*extensions.commands()] == ["works"]
        assert extensions.presets() == {"mine": "rounds = 1"}
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "an installed package adds broken to fedloom",
        "an installed package adds odd to fedloom",
    ]
    assert (
        "No module named 'no_such_module'): repair or uninstall it"
        in caplog.records[0].getMessage()
    )


def texts() -> dict[str, str]:
    return {"mine": "rounds = 1"}
