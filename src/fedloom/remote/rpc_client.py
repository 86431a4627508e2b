"""RPC client: calls to one party, and its heartbeats."""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import grpc
import grpc.aio

from fedloom.core.errors import FedloomError
from fedloom.remote import rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import (
    ASK,
    CLIENT,
    CODE,
    LARGE,
    LARGEST,
    LARGEST_PIECE,
    MOST_TAKEN,
    NAME,
    PATIENCE,
    PULSE,
    PULSES,
    SILENCE,
    TAKEN,
    TELL,
    WHOLE,
    FrameError,
    framed,
    pieces,
    printable,
    total_of,
    unframed,
    whole,
)
from fedloom.remote.rpc_errors import CallRefused, refused

STRIKES: Final = 5
"""Number of invalid answers after which a call fails."""
PARTING: Final = 5.0
"""Seconds to end a stream after its answer."""
_PAUSES: Final = 0.02, 0.5
"""Seconds between two attempts: the first pause and the longest."""
_log = logging.getLogger("fedloom.net")


@dataclass(frozen=True)
class ServerAddress:
    """The address of a party.

    Attributes:
        name: in its certificate.
        at: host:port, or unix:path.
    """

    name: str
    at: str


@dataclass
class _Answer:
    """The received part of an answer.

    Attributes:
        of: the CRC-32 of the whole answer, which identifies it.
        sum: the CRC-32 of the received bytes.
    """

    data: bytearray = field(default_factory=bytearray)
    of: int = 0
    sum: int = 0

    def begin(self, of: int, start: int) -> None:
        """Continue this answer at its end so far, or begin another answer.

        Raises:
            FrameError: `start` is neither.
        """
        if start == 0:
            self.data.clear()
            self.of, self.sum = of, 0
        if start != len(self.data) or of != self.of:
            raise FrameError("an answer must continue where it stopped")

    def add(self, piece: bytes | memoryview, total: int) -> None:
        """Append the next piece.

        Raises:
            FrameError: the answer would have more than `total` bytes.
        """
        if len(self.data) + len(piece) > total:
            raise FrameError("an answer must have as many bytes as it announces")
        self.data += piece
        self.sum = zlib.crc32(piece, self.sum)


class _Broken(Exception):
    """A failed attempt that may be repeated.

    Attributes:
        refusal: the other end's error, if it sent one.
        strike: whether the other end, rather than the network, failed.
    """

    def __init__(self, refusal: CallRefused | None = None, *, strike: bool = False) -> None:
        super().__init__()
        self.refusal = refusal
        self.strike = strike


class _Late(Exception):
    """The deadline has passed."""


class RPCClient:
    """A connection to one party: calls and heartbeats. Make and use it in one asyncio loop.

    With a revocation list, the other end's certificate is checked before each connection, which
    then accepts that certificate only. Every heartbeat checks it against the current list.

    Args:
        address: of the other end, whose certificate must have the name.
        credentials: the local certificate; None for the insecure mode.
        own: the local name, in the insecure mode.
        largest: limit of an answer, in bytes.
        changed: called with True when the other end becomes reachable, with False when it no longer
            is.
        session: of this process, as heartbeats name it.
        heard: called with the answer to each heartbeat.

    Attributes:
        sent, received: bytes of calls and answers; pieces sent twice count twice.
        problem: why the last heartbeat failed, for the local log.
    """

    def __init__(
        self,
        address: ServerAddress,
        credentials: Credentials | None,
        *,
        own: str = "",
        largest: int = LARGEST,
        changed: Callable[[bool], None] = lambda _: None,
        session: str = "",
        heard: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address = address
        self.sent = self.received = 0
        self.problem = ""
        self._session, self._heard = session.encode(), heard
        self._credentials = credentials
        self._metadata = ((NAME, own),) if credentials is None else ()
        self._largest = largest
        self._changed = changed
        self._life = -PATIENCE
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._only: bytes | None = None
        self._calls: grpc.aio.Channel | None = None
        self._large: grpc.aio.Channel | None = None
        self._lives: grpc.aio.Channel | None = None
        self._loose: set[asyncio.Future[None]] = set()
        self._told: set[Any] = set()  # small calls in progress
        self._taken: list[str] = []  # ids of answers that are still to be confirmed
        self._pulses = asyncio.ensure_future(self._listen())

    @property
    def up(self) -> bool:
        """Whether the other end is reachable."""
        return self._up.is_set()

    async def wait(self, seconds: float) -> bool:
        """Wait until the other end is reachable, and return whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), seconds)
        return self.up

    async def close(self) -> None:
        """Close all connections; calls in progress fail as unreachable."""
        self._up.clear()
        self._down.set()
        self._hang_up()
        self._pulses.cancel()
        await asyncio.gather(self._pulses, return_exceptions=True)
        self._hang_up()
        await asyncio.gather(*self._loose, return_exceptions=True)

    # -- calls -------------------------------------------------------------------------------------

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """Make a call, repeat it where the connection breaks, and return the answer.

        Args:
            kind: of the call.
            body: see `fedloom.remote.payload`.
            id: of the call: unique, and the same if the call is repeated.
            deadline: seconds from now.

        Raises:
            CallRefused: with `UNREACHABLE` after `PATIENCE` seconds without a heartbeat, `LATE`
                after the deadline, or the other end's error.
        """
        end, pause, strikes = monotonic() + deadline, _PAUSES[0], 0
        head = {"kind": kind, "id": id, "bytes": len(body), "sum": await total_of(body)}
        answer, again = _Answer(), False
        last = CallRefused(rpc_errors.LATE, f"{self.address.name} did not answer in time")
        while True:
            if not self.up:
                raise CallRefused(rpc_errors.UNREACHABLE, f"{self.address.name} is unreachable")
            try:
                if not again and len(body) <= WHOLE and kind != LARGE:
                    if await self._tell(head, body, answer, end - monotonic()):
                        return bytes(answer.data)
                    again = True  # the rest of the answer
                if await self._while_up(
                    self._attempt({**head, "again": again}, body, answer, end - monotonic())
                ):
                    return bytes(answer.data)
            except _Late:
                raise last from None
            except _Broken as broken:
                strikes += broken.strike
                last = broken.refusal or last
                if strikes >= STRIKES:
                    raise CallRefused(
                        rpc_errors.MALFORMED, f"{self.address.name} sent invalid answers"
                    ) from None
                if monotonic() + pause > end:
                    raise last from None
            again = True
            # not beyond the time at which it counts as unreachable
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._down.wait(), pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _while_up(self, attempt: Any) -> bool:
        """Whether an attempt finished before the other end became unreachable."""
        tasks = asyncio.ensure_future(attempt), asyncio.ensure_future(self._down.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
                return True
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def _attempting(self, call: Any) -> Iterator[None]:
        """If an attempt fails, cancel `call`, and raise `_Broken`, `_Late` or the refusal."""
        try:
            yield
        except FrameError:
            call.cancel()
            raise _Broken(strike=True) from None
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except asyncio.CancelledError:
            call.cancel()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _Broken from None  # the connection was closed, not the call cancelled

    async def _tell(
        self, head: dict[str, Any], body: bytes, answer: _Answer, timeout: float
    ) -> bool:
        """Make a small call by one message, and confirm earlier answers with it. Whether the answer
        is complete.
        """
        if self._calls is None:
            raise _Broken
        taken = self._confirmed()
        frame = whole({**head, "taken": " ".join(taken)}, body)
        tell = self._calls.unary_unary(TELL)
        call = tell(
            frame, timeout=max(timeout, 0.001), metadata=self._metadata, wait_for_ready=True
        )
        self._told.add(call)
        with self._attempting(call):
            try:
                told = await call
                self.sent += len(frame)
                self.received += len(told)
                self._alive()
                self._forget(taken)
                total = self._begin(answer, told)
                if len(answer.data) != min(total, WHOLE):
                    raise FrameError("an answer must come whole, or its first piece")
                if len(answer.data) < total:
                    return False
                self._check_sum(answer)
            except FrameError:
                answer.data.clear()
                raise
            finally:
                self._told.discard(call)
        self._taken.append(head["id"])
        return True

    def _confirmed(self) -> list[str]:
        """The ids of answers to confirm by the next message."""
        length, ids = 0, list[str]()
        for id in self._taken:
            length += len(id) + 1
            if length > MOST_TAKEN:
                break
            ids.append(id)
        return ids

    def _forget(self, ids: list[str]) -> None:
        """Confirm these answers no more."""
        self._taken = [id for id in self._taken if id not in ids]

    async def _attempt(
        self, head: dict[str, Any], body: bytes, answer: _Answer, timeout: float
    ) -> None:
        """Make a call once, and append the received pieces to the answer."""
        channel = self._large if len(body) > LARGEST_PIECE or head["kind"] == LARGE else self._calls
        if channel is None:  # the other end has just become unreachable
            raise _Broken
        stub = channel.stream_stream(ASK)
        call = stub(timeout=max(timeout, 0.001), metadata=self._metadata, wait_for_ready=True)
        sending: asyncio.Future[None] | None = None
        head |= {"got": len(answer.data), "of": answer.of}
        with self._attempting(call):
            try:
                if head["again"]:
                    await self._send(call, framed(head))
                    have, _ = unframed(await self._read(call), have=int)
                    if not 0 <= have["have"] <= len(body):
                        raise FrameError("the other end has more bytes of the call than were sent")
                    sending = asyncio.ensure_future(self._send(call, pieces(body, have["have"])))
                else:
                    sending = asyncio.ensure_future(self._send(call, framed(head, body)))
                await self._receive(call, answer)
                await sending
                self._aside(_part(call))
            finally:
                if sending is not None:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)

    async def _receive(self, call: Any, answer: _Answer) -> None:
        total = self._begin(answer, await self._read(call))
        while len(answer.data) < total:
            piece = await self._read(call)
            if not piece:
                raise FrameError("empty piece")
            answer.add(piece, total)
        self._check_sum(answer)

    def _begin(self, answer: _Answer, frame: bytes) -> int:
        """Take the first frame of an answer, or of its rest; the bytes of the whole answer."""
        head, piece = unframed(frame, **{"bytes": int, "sum": int, "from": int})
        total: int = head["bytes"]
        if not 0 <= total <= self._largest:
            raise CallRefused(
                rpc_errors.TOO_LARGE,
                f"{self.address.name} sent an answer of {total} bytes; the limit is "
                f"{self._largest}",
            )
        answer.begin(head["sum"], head["from"])
        answer.add(piece, total)
        return total

    @staticmethod
    def _check_sum(answer: _Answer) -> None:
        if answer.sum != answer.of:
            answer.data.clear()
            raise FrameError("an answer must have the CRC-32 that it announces")

    async def _send(self, call: Any, frames: Iterator[bytes]) -> None:
        for frame in frames:
            try:
                await call.write(frame)
            # the other end has ended the call; the next read gives its error
            except asyncio.InvalidStateError:
                return
            self.sent += len(frame)

    async def _read(self, call: Any) -> Any:
        frame = await call.read()
        if frame is grpc.aio.EOF:
            raise FrameError("the call ended without an answer")
        self.received += len(frame)
        self._alive()
        return frame

    def _error(self, error: grpc.aio.AioRpcError) -> CallRefused | _Broken | _Late:
        """The error that the status of a failed attempt stands for."""
        status, name = error.code(), self.address.name
        # a list of its pairs, as gRPC 1.66 does not find the keys that it gives dict()
        code = str(dict([*(error.trailing_metadata() or ())]).get(CODE, "")).replace("-", " ")
        if code in rpc_errors.CODES:
            refusal = CallRefused(code, printable(error.details() or ""))
            return _Broken(refusal) if code == rpc_errors.BUSY else refusal
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return _Late()
        if status is grpc.StatusCode.UNAUTHENTICATED:
            return refused(f"{name} does not accept this certificate")
        return _Broken(
            strike=status not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        )

    # -- heartbeats --------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Request heartbeats until cancelled."""
        while True:
            begun = monotonic()
            try:
                if self.revoked:
                    self.problem = (
                        f"the certificate of {self.address.name} is revoked or has expired"
                    )
                    self._lost()
                pulse = (self._lives or await self._dial()).unary_unary(PULSES)
                taken = self._confirmed()
                body = b" ".join((self._session, *(id.encode() for id in taken)))
                told = await pulse(
                    body, timeout=PATIENCE, metadata=self._metadata, wait_for_ready=self.up
                )
                self._alive()
                self._forget(taken)
                self._heard(told[:64].decode("ascii", "replace"))
            except grpc.aio.AioRpcError as error:
                self.problem = printable(error.details() or "") or error.code().name
            except (FedloomError, OSError) as error:
                self.problem = str(error)
            except Exception as error:  # heartbeats must continue after any error
                previous, self.problem = self.problem, f"{type(error).__name__}: {error}"
                if self.problem != previous:
                    _log.exception("heartbeat of %s failed", self.address.name)
            if monotonic() - self._life > PATIENCE and (self.up or self._only is not None):
                self._lost()
            await asyncio.sleep(max(0.05, begun + (PULSE if self.up else PULSE / 4) - monotonic()))

    async def _dial(self) -> grpc.aio.Channel:
        """Open all connections to an end that is not revoked, and return the one for heartbeats.

        Large calls fill the buffers of a slow line, so small calls have a connection of their own.

        Raises:
            EngineError: the other end is unreachable, or has another certificate.
        """
        if self._credentials is not None and self._credentials.revoked is not None:
            self._only = await self._credentials.check_server(
                self.address.at, self.address.name, SILENCE
            )
        self._calls, self._large, self._lives = self._channel(), self._channel(), self._channel()
        return self._lives

    def _channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address.at, options=CLIENT)
        options = (*CLIENT, ("grpc.ssl_target_name_override", self.address.name))
        return grpc.aio.secure_channel(
            self.address.at, self._credentials.channel(self._only), options=options
        )

    @property
    def revoked(self) -> bool:
        """Whether the other end's certificate was revoked, or has expired, since the connection was
        made.
        """
        return self._only is not None and self._revoked(self._only)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in the other end's certificate; none where it was not checked by a list of
        revoked ones.
        """
        return (
            ()
            if self._only is None or self._credentials is None
            else self._credentials.roles_in(self._only)
        )

    def _revoked(self, certificate: bytes) -> bool:
        assert self._credentials is not None
        return self._credentials.caller({"x509_pem_cert": [certificate]}) is None

    def _alive(self) -> None:
        self._life = monotonic()
        if not self.up and self._calls is not None:
            self._up.set()
            self._down.clear()
            self._changed(True)

    def _lost(self) -> None:
        """End calls in progress and close the connections, which the next heartbeat opens anew."""
        was = self.up
        self._up.clear()
        self._down.set()
        self._hang_up()
        if was:
            self._changed(False)

    def _hang_up(self) -> None:
        for call in [*self._told]:
            call.cancel()
        for channel in (self._calls, self._large, self._lives):
            if channel is not None:
                self._aside(channel.close())
        self._calls = self._large = self._lives = self._only = None

    def _aside(self, work: Any) -> None:
        """Start some work without waiting for it."""
        task = asyncio.ensure_future(work)
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)


async def _part(call: Any) -> None:
    """Confirm the answer and end the stream."""
    try:
        async with asyncio.timeout(PARTING):
            await call.write(TAKEN)
            await call.read()
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
