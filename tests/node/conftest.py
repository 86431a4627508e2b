from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.hosts import RunRequest, node


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., RunRequest]]:
    """Makes hosts of one state folder, with changes to its config."""
    made: list[RunRequest] = []

    def make(**values: Any) -> RunRequest:
        made.append(RunRequest(node(tmp_path, **values)))
        return made[-1]

    yield make
    for one in made:
        one.close()
