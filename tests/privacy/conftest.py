"""The hosts of `tests/node`."""

from tests.node.conftest import hosts

__all__ = ["hosts"]
