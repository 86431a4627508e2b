"""The time limit of a call."""

from __future__ import annotations

import sys
from time import sleep

import pytest

from fedloom.remote.node.time_limit import TimeExpired, TimeLimit


def test_an_exception_dropped_in_a_destructor_is_raised_again_and_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[type[BaseException] | None] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_type)
    )
    ended: list[str] = []

    class Blocking:
        """Its destructor runs until the exception comes up in it, where Python drops it."""

        def __init__(self, error: type[Exception] | None = None) -> None:
            self.error = error

        def __del__(self) -> None:
            if self.error is not None:
                raise self.error
            try:
                limit.expire()
                while True:
                    sleep(0.001)
            finally:
                ended.append("destructor")

    with pytest.raises(TimeExpired), TimeLimit(600.0) as limit:
        Blocking(ValueError)
        Blocking()
        ended.append("raised again")
        while True:
            sleep(0.001)
    assert ended == ["destructor", "raised again"]
    assert reported == [ValueError]  # what others drop is reported as ever
