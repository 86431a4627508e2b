"""A fork server: it starts the worker processes and ends them all.

The server is a process that is forked once, before training, and only forks workers. A replacement
worker therefore starts from the same image as the first one, whatever this process has done since:
torch refuses to train in a fork of a process that trained beside a GPU. The server outlives this
process briefly, however it ends, to end the workers.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, TypeAlias

from fedloom.core.errors import ConfigError
from fedloom.engines._shared_buffer import receive_exactly

Work: TypeAlias = Callable[[int, socket.socket], None]
"""The main function of a worker, called with its number and its socket."""
_REQUEST: Final = struct.Struct("<qq")  # number of the worker, process to reap
_ANSWER: Final = struct.Struct("<qq")  # process of the worker, how the other one ended
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_PATIENCE: Final = 5.0  # seconds for the server to exit before it is killed


class ForkServer:
    """Forks processes that run `work`, and ends them all. Raises ConfigError if this system cannot
    fork.
    """

    def __init__(self, work: Work) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("this system cannot fork processes; set engine.workers to 1")
        self._control, theirs = socket.socketpair()
        gc.freeze()  # keeps existing objects in shared pages, untouched by garbage collection
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            owner, pid = os.getpid(), _fork()
            if not pid:
                self._control.close()
                _run_and_exit(lambda: _serve(theirs, owner, work))
            self._end = weakref.finalize(self, _end, owner, pid, self._control)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        with contextlib.suppress(OSError):  # it does so too, but possibly too late
            os.setpgid(pid, pid)

    def spawn(self, number: int, dead: int = 0) -> tuple[int, socket.socket, int]:
        """End and reap the process `dead`, then fork worker `number`: the new process id, its
        socket, and the exit code of `dead`, negative for a signal. Raises OSError if the server has
        ended.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [_REQUEST.pack(number, dead)], [theirs.fileno()])
            answer = receive_exactly(self._control, _ANSWER.size)
            if answer is None:
                raise ConnectionError("the fork server has ended")
        except BaseException:
            ours.close()
            raise
        pid, code = _ANSWER.unpack(answer)
        return pid, ours, code

    def close(self) -> None:
        """Kill every process and wait until it has ended."""
        self._end()


def _end(owner: int, server: int, control: socket.socket) -> None:
    if os.getpid() != owner:  # a fork of the owner has a copy of this handle
        return
    gc.unfreeze()
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # closing is not enough: forks may hold it open
    control.close()
    try:  # wait without reaping, so that the process group id stays reserved
        deadline = time.monotonic() + (_PATIENCE if hasattr(os, "waitid") else 0)
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline and not os.waitid(
                os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT
            ):
                time.sleep(0.001)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(server, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(server, 0)


def _serve(control: socket.socket, parent: int, work: Work) -> None:
    """Fork on request, until the parent ends or closes the socket."""
    os.setpgid(0, 0)  # signals of a terminal, such as Ctrl-C, then reach the parent only
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    children: set[int] = set()
    for number, dead, fd in _requests(control, parent):
        code = _reap(dead) if dead in children else 0
        with socket.socket(fileno=fd) as theirs:
            pid = _fork()
            if not pid:
                control.close()
                _run_and_exit(lambda: work(number, theirs))  # noqa: B023
        children = children - {dead} | {pid}
        control.sendall(_ANSWER.pack(pid, code))
    for pid in children:
        _reap(pid)
    os.killpg(0, signal.SIGKILL)  # this process, and any processes that workers started


def _requests(control: socket.socket, parent: int) -> Iterator[tuple[int, int, int]]:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == parent:  # forks of the parent may hold the socket open after it ends
        if poll.poll(1000):
            request, fds, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            if len(request) < _REQUEST.size:
                return
            yield (*_REQUEST.unpack(request), fds[0])


def _reap(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_and_exit(work: Callable[[], None]) -> NoReturn:
    """Run `work` and exit without returning to the parent's code."""
    try:
        work()
    finally:
        os._exit(1)


def _fork() -> int:
    # Python warns if other threads run; the fork needs none of them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
