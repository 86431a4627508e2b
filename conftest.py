from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import tempfile
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.command import fedloom as fedloom

from fedloom.core.errors import warn_once

torch.set_num_threads(1)
# a test can kill a process, but not cut the power: what is written stays readable
os.fsync = lambda _: None
# nothing of a user's own is touched
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="fedloom-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ.pop("FEDLOOM_DATA", None)
# Ray would write a token into the user's home, and count its users over the network.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}

# A busy machine is no failure, and CI tries the same examples each time; elsewhere new ones are
# tried.
settings.register_profile(
    "fedloom",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("fedloom")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Flower's tests come first: one takes two minutes, in which the other processes would have
    nothing left to do.

    Where `each_time` names parameters of a test, by patterns of their ids, the others are marked
    slow.
    """
    items.sort(key=lambda item: "flower" not in item.path.parts)
    for item in items:
        named = item.get_closest_marker("each_time")
        if named is not None and not any(
            fnmatchcase(item.callspec.id, pattern) for pattern in named.args
        ):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: the collector need not look at it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _warnings_are_new() -> None:
    """A warning that another test has had is given again."""
    warn_once.cache_clear()
