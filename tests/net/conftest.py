"""Real nodes, started once for all tests that do not need others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.net.processes import Machines, machines


@pytest.fixture(scope="session")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("three"), 3) as made:
        yield made


@pytest.fixture
def field(_three: Machines) -> Machines:
    """Three nodes as real processes, all up, behind good lines."""
    _three.straight()
    return _three
