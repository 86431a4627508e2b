"""A time limit that ends a party's work wherever it is, also in the middle of training."""

import ctypes
import sys
import threading
from contextlib import suppress
from time import sleep
from types import TracebackType
from typing import Self


class TimeExpired(BaseException):
    """The time limit has passed. No party's code catches it, as it is no `Exception`."""


class TimeLimit:
    """Raises `TimeExpired` in the thread that uses it in a `with`, after some seconds or when
    `expire` is called.

    It is raised between two steps of Python, so one long operation of PyTorch ends first.
    """

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(max(seconds, 0.0), self._raise)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._raised = False

    def __enter__(self) -> Self:
        _ignore_unraisable()
        self._thread = threading.get_ident()
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end()
        except TimeExpired:  # it came up in `_end`; the next one is half a second away
            self._end()
        if self._raised:  # another one may be on its way: take it here, and not somewhere behind
            with suppress(TimeExpired):
                for _ in range(100):
                    sleep(0.001)

    def _end(self) -> None:
        with self._lock:
            self._thread = None
        self._timer.cancel()

    def expire(self) -> None:
        """End the work soon; nothing happens if it is over."""
        threading.Thread(target=self._raise, daemon=True).start()

    def _raise(self) -> None:
        """Raise again until the work has ended: Python drops an error that comes up in a
        destructor.
        """
        while True:
            with self._lock:
                if self._thread is None:
                    return
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(TimeExpired)
                )
            sleep(0.5)


def _ignore_unraisable() -> None:
    """Report no `TimeExpired` that Python drops in a destructor or a callback of the collector: it
    is raised again.
    """
    report = sys.unraisablehook
    if getattr(report, "ignores_time_expired", False):
        return

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not TimeExpired:
            report(unraisable)

    hook.ignores_time_expired = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
