"""Calls that come twice, late, out of turn, too large or from the wrong one, and disks that are
full: each is answered with words or not at all, a node lives on, and nothing is done twice or by
    halves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from time import time_ns
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from rich.console import Console

from fedloom.api import execute
from fedloom.cli import federation
from fedloom.core.engine import Failure
from fedloom.remote import payload, rpc_errors
from fedloom.remote.certs import CertificateAuthority, write
from fedloom.remote.frames import ASK, CLIENT, framed
from fedloom.remote.node.service import NodeService
from fedloom.remote.rpc_errors import CallRefused
from tests.net.calls import Caller, Transport
from tests.net.nodes import Loop, config, loop
from tests.net.processes import Machines, identity, open_files, resident, run_of, started, threads
from tests.net.test_faults import after, failures

RUN = run_of("gossip")
LONG = RUN.model_copy(update={"rounds": 1000})
"""The same with more rounds, for calls by hand."""
MIB = 1 << 20


@pytest.fixture(params=["a host", "a process"])
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    """Makes calls at a node of this process, and at a real one."""
    if request.param == "a process":
        field: Machines = request.getfixturevalue("field")
        wire = Transport(field)
        made = Caller(wire.ask, RUN)
        yield made
        made.close()
        wire.close()
        return
    with loop() as there:
        host = NodeService(config(tmp_path, "node-0", ["node-0"]))
        yield Caller(asking(there, host), RUN)
        there.run(host.close())


def asking(there: Loop, host: NodeService) -> Callable[[str, bytes, str], bytes]:
    """Calls of a host without a wire."""
    return lambda kind, body, id: there.run(host.answer("coordinator", kind, body))


def refused(work: Callable[[], Any]) -> tuple[str, str]:
    """How a call was refused: its code, and the words."""
    with pytest.raises(CallRefused) as caught:
        work()
    return caught.value.code, caught.value.words


def test_a_call_that_comes_twice_is_done_once(caller: Caller) -> None:
    caller.open()
    first = caller.sha256()
    id = secrets.token_hex(16)
    reply = caller.do(1, id=id)
    after_it = caller.sha256()
    assert after_it != first
    assert caller.do(1, id=id) == reply  # the same stream again
    assert caller.do(1) == reply  # a call of another id with its number
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: caller.do(1), range(8))) == {reply}
    assert caller.sha256() == after_it
    caller.open()  # the same start once more changes nothing
    assert caller.do(1) == reply
    assert caller.sha256() == after_it


def test_late_and_disordered_calls_are_refused(caller: Caller) -> None:
    caller.open()
    caller.do(5)
    now = caller.sha256()
    assert refused(lambda: caller.do(3))[0] == rpc_errors.STALE
    caller.do(9, t=1)
    assert refused(lambda: caller.do(5))[0] == rpc_errors.STALE
    assert caller.sha256() != now
    now = caller.sha256()
    start = caller.start
    caller.start = time_ns()
    # a start that was not announced
    assert refused(lambda: caller.do(10, t=2))[0] == rpc_errors.UNKNOWN
    caller.open(resume=True)
    newer, caller.start = caller.start, start
    assert refused(lambda: caller.do(10, t=2)) == (
        rpc_errors.STALE,
        "a newer start of this run has taken over",
    )
    assert refused(lambda: caller.open())[0] == rpc_errors.STALE
    caller.start = newer
    assert caller.sha256() != now  # as at first, until it is told where to go on


def test_calls_of_a_run_that_is_another_s(caller: Caller) -> None:
    caller.open()
    run, caller.run = caller.run, secrets.token_hex(16)
    assert refused(lambda: caller.do(1))[0] == rpc_errors.UNKNOWN
    words = (
        "another run is under way at this node: wait for it, resume it, or ask the node's owner "
        "to end it"
    )
    assert refused(lambda: caller.open()) == (rpc_errors.TAKEN, words)
    caller.run = run
    caller.do(1)


@pytest.mark.parametrize(
    "method", ["load", "state", "own_state", "__init__", "_network", "nonsense", "context"]
)
def test_a_call_of_what_is_not_the_page_s(method: str, caller: Caller) -> None:
    caller.open()
    before = caller.sha256()
    assert refused(lambda: caller.do(1, method))[0] in (rpc_errors.REFUSED, rpc_errors.MALFORMED)
    assert caller.sha256() == before


def test_a_node_killed_between_its_write_and_its_reply_works_once(tmp_path: Path) -> None:
    """A new host on the same folder is what a node is after a kill: nothing but the
    disk is left.
    """
    with loop() as there:
        host = NodeService(config(tmp_path, "node-0", ["node-0"]))
        caller = Caller(asking(there, host), RUN)
        caller.open()
        reply, sha = caller.do(1), caller.sha256()
        second = NodeService(config(tmp_path, "node-0", ["node-0"]))
        caller._ask = asking(there, second)
        assert caller.do(1) == reply
        assert caller.sha256() == sha
        assert refused(lambda: caller.do(0))[0] == rpc_errors.STALE
        other = caller.do(2, t=1)
        there.run(host.close())
        there.run(second.close())
        assert caller.sha256 and other
    with loop() as there:  # what one that never died comes to
        host = NodeService(config(tmp_path / "other", "node-0", ["node-0"]))
        undisturbed = Caller(asking(there, host), RUN)
        undisturbed.open()
        undisturbed.do(1)
        undisturbed.do(2, t=1)
        third = NodeService(config(tmp_path, "node-0", ["node-0"]))
        caller._ask = asking(there, third)
        assert caller.sha256() == undisturbed.sha256()
        there.run(host.close())
        there.run(third.close())


@pytest.mark.parametrize("rounds", [(0, 1, 2, 3), (0, 2, 3, 4), (0, 3), (0,)])
def test_a_node_goes_back_to_a_checkpoint_whatever_rounds_it_had_a_part_in(
    rounds: tuple[int, ...], tmp_path: Path
) -> None:
    """The coordinator has a checkpoint of one round, and is killed some rounds later."""
    with loop() as there:
        host = NodeService(config(tmp_path, "node-0", ["node-0"]))
        caller = Caller(asking(there, host), LONG)
        caller.open()
        wanted = ""
        for number, t in enumerate(rounds):
            if t == rounds[0]:
                caller.do(number, t=t)
                wanted = caller.sha256()
            else:
                caller.do(number, t=t, kept=[1])
        for _ in range(2):  # a coordinator may be killed again before it has done anything
            caller.start = time_ns()
            caller.open(resume=True)
            assert caller.sha256() != wanted
            caller.restore(1)
            assert caller.sha256() == wanted
        caller.do(7, t=6, kept=[1])
        caller.start = time_ns()
        caller.open(resume=True)
        caller.restore(1)
        assert caller.sha256() == wanted
        there.run(host.close())


def test_an_older_start_s_call_in_the_queue_is_not_done_after_a_takeover(tmp_path: Path) -> None:
    """It was let in, and waited for its turn while a newer start took over."""
    with loop() as there:
        host = NodeService(config(tmp_path, "node-0", ["node-0"]))
        caller = Caller(asking(there, host), RUN)
        caller.open()
        caller.do(1)
        wanted = caller.sha256()
        late = caller.body(2, t=1, kept=[1])
        caller.start = time_ns()

        async def both() -> list[Any]:
            opening = asyncio.ensure_future(
                host.answer("coordinator", "open", caller.opening(resume=True))
            )
            while not host._queued:  # until it is in the queue
                await asyncio.sleep(0)
            late_one = asyncio.ensure_future(host.answer("coordinator", "do", late))
            return [*await asyncio.gather(opening, late_one, return_exceptions=True)]

        opened, told = there.run(both())
        assert isinstance(opened, bytes)
        assert isinstance(told, CallRefused) and told.code == rpc_errors.STALE
        caller.restore(1)
        assert caller.sha256() == wanted
        there.run(host.close())


def test_more_calls_than_the_queue_holds_are_refused(tmp_path: Path) -> None:
    with loop() as there, ThreadPoolExecutor(1) as worker:
        host = NodeService(config(tmp_path, "node-0", ["node-0"], queue=3), worker=worker)
        caller = Caller(asking(there, host), RUN)
        caller.open()
        held = threading.Event()
        worker.submit(held.wait)
        which = payload.pack({"run": caller.run, "start": caller.start})

        async def many() -> list[Any]:
            asked = [asyncio.ensure_future(host._work(partial(int, n))) for n in range(8)]
            await asyncio.sleep(0)
            there.loop.call_soon(held.set)
            return await asyncio.gather(*asked, return_exceptions=True)

        replies = there.run(many())
        assert replies[:3] == [0, 1, 2]  # in the order in which they came
        assert {(type(r), r.code) for r in replies[3:]} == {(CallRefused, rpc_errors.BUSY)}
        there.run(host.answer("coordinator", "digest", which))  # there is room again
        there.run(host.close())


def test_two_peers_that_wait_for_each_other_both_get_what_they_want(
    tmp_path: Path, field: Machines
) -> None:
    """Both fetch from each other in the same moment, while each has work of its own in its one
    thread.
    """
    wire = Transport(field)

    def ask(n: int) -> Callable[[str, bytes, str], bytes]:
        return lambda kind, body, id: field.loop.run(
            wire.lines[n].ask(kind, body, deadline=60.0), 90
        )

    callers = [Caller(ask(n), LONG, n, {str(1 - n): f"node-{1 - n}"}) for n in (0, 1)]
    wire.line._hub.run = callers[0].run
    callers[1].run, callers[1].start = callers[0].run, callers[0].start
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Caller.open, callers))
        for t in range(10):
            left = [
                payload.unpack(c.do(3 * t, "give", t=t, leave=True))[0]["lines"][0] for c in callers
            ]
            inboxes = [
                {str(1 - n): [1 - n, left[1 - n]["reply_ref"], left[1 - n]["what"]]} for n in (0, 1)
            ]
            busy = [pool.submit(c.sha256) for c in callers for _ in range(2)]
            mixes = [
                pool.submit(c.do, 3 * t + 1, "mix", t=t, reply_refs={"inbox": i})
                for c, i in zip(callers, inboxes, strict=True)
            ]
            for answer in mixes:
                head = payload.unpack(answer.result(60))[0]
                assert head["missing"] == [] and "reply" in head["lines"][0]
            for other in busy:
                other.result(60)
    assert callers[0].sha256() == callers[1].sha256()  # the mean of both is one
    for one in callers:
        one.close()
    wire.close()


# -- what no caller of ours would send -------------------------------------------------------------


def raw(
    field: Machines, frames: list[bytes], name: str = "node-0", server_side: Path | None = None
) -> grpc.StatusCode:
    """Send frames to a coordinator as they are; how it ended."""

    async def talk() -> grpc.StatusCode:
        folder = server_side or field.folder / name
        pem = [(folder / file).read_bytes() for file in ("key.pem", "certificate.pem")]
        secure = grpc.ssl_channel_credentials((field.folder / "ca.pem").read_bytes(), *pem)
        options = [
            *CLIENT,
            ("grpc.ssl_target_name_override", "coordinator"),
            ("grpc.max_send_message_length", -1),
        ]
        async with grpc.aio.secure_channel(
            field.addresses["coordinator"], secure, options
        ) as channel:
            call = channel.stream_stream(ASK)(timeout=120)
            try:
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            return await call.code()

    code: grpc.StatusCode = field.loop.run(talk(), 60)
    return code


def head(size: int, **more: Any) -> bytes:
    """The first frame of a call."""
    said: dict[str, Any] = {
        "kind": "reply",
        "id": secrets.token_hex(8),
        "bytes": size,
        "sum": 0,
        "got": 0,
        "of": 0,
        "again": False,
    }
    return next(framed({**said, **more}))


def test_oversize_and_malformed_calls_leave_a_node_as_it_was(field: Machines) -> None:
    wire = Transport(field)
    caller = Caller(wire.ask, RUN)
    caller.open()
    before, chance = caller.sha256(), Random(3)
    memory = resident(field.nodes[0].pid)
    good = caller.body(1)
    streams = {
        "nothing": [],
        "noise": [chance.randbytes(1000)],
        "a frame of 8 MiB": [bytes(8 * MIB)],
        "a frame of 8 MiB in a call": [head(9 * MIB), bytes(8 * MIB)],
        "a call of a terabyte": [head(1 << 40)],
        "less than nothing": [head(-5)],
        "more than announced": [head(10), bytes(20)],
        "less than announced": [head(1000), bytes(20)],
        "an empty piece": [head(10), b""],
        "another sum": [head(len(good), sum=1), good],
        "a long id": [head(10, id="x" * 3000)],
        "no text": [head(10, kind=7)],
        "a sum that is none": [head(10, sum="x")],
    }
    for what, frames in streams.items():
        assert raw(field, frames) is not grpc.StatusCode.OK, what
    bodies = [
        chance.randbytes(200),
        b"",
        good[:-1],
        good + b"x",
        bytes(8),
        (1 << 63).to_bytes(8, "little"),
    ]
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        bodies.append(bytes(changed))
    for body in bodies:
        for kind in ("do", "open", "restore", "digest", "close", "peer", "nonsense"):
            if kind == "do" or body in bodies[:6]:
                try:
                    caller.raw(kind, body)
                except CallRefused as refusal:
                    assert refusal.code in rpc_errors.CODES and len(refusal.words) < 200
    for _ in range(20):  # no TLS at all
        host, _, port = field.addresses["coordinator"].partition(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(chance.randbytes(500))
    process = field.nodes[0].process
    assert process is not None and process.alive
    caller.do(10_000, t=1)
    assert caller.sha256() != before
    assert resident(field.nodes[0].pid) < memory + 150
    caller.close()
    wire.close()


# -- who is who ------------------------------------------------------------------------------------


def certificate(
    folder: Path, server_side: Path, name: str, begins: timedelta, ends: timedelta
) -> Path:
    """A certificate of this CA, for a time of one's choice."""
    server_side.mkdir()
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    pem, own = CertificateAuthority(folder).issue(name, 1)
    model = x509.load_pem_x509_certificate(pem)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(model.subject)
        .issuer_name(ca.subject)
        .public_key(model.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
    )
    for extension in model.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    write(server_side / "certificate.pem", builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    write(server_side / "key.pem", own, secret=True)
    return server_side


def test_certificates_that_do_not_count(field: Machines, tmp_path: Path) -> None:
    wire, body = Transport(field), head(0)
    day = timedelta(days=1)
    # one that counts: what it says is looked at
    assert raw(field, [body]) is grpc.StatusCode.INVALID_ARGUMENT
    homes = [
        certificate(field.folder, tmp_path / "expired", "node-0", -2 * day, -day),
        certificate(field.folder, tmp_path / "too early", "node-0", day, 2 * day),
    ]
    identity(tmp_path, "node-0", CertificateAuthority.create(tmp_path / "other"))
    for server_side in [*homes, tmp_path / "node-0"]:
        assert raw(field, [body], server_side=server_side) in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNAUTHENTICATED,
        ), server_side
    identity(field.folder, "stranger")
    assert raw(field, [body], "stranger") is grpc.StatusCode.PERMISSION_DENIED
    wire.close()


def test_a_coordinator_whose_certificate_is_revoked_while_it_is_used(field: Machines) -> None:
    wire = Transport(field, name="second")
    caller = Caller(wire.ask, RUN)
    caller.open()
    caller.do(1)
    base = len(field.nodes[0].audit())
    federation.revoke(["second"], field.folder, Console(quiet=True))
    assert refused(lambda: caller.do(2, t=1))[0] == rpc_errors.UNREACHABLE  # on the same connection
    assert len(field.nodes[0].audit()) == base
    wire.close()
    first = Transport(field)
    other = Caller(first.ask, RUN)
    while True:  # until the place of the one that is gone is free
        try:
            other.open()
            break
        except CallRefused as refusal:
            assert refusal.code == rpc_errors.TAKEN
    other.close()
    first.close()
    identity(field.folder, "second")  # a new certificate, for the tests that follow


# -- a full disk -----------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="a process's limits can't be set from outside"
)
def test_a_full_disk_undoes_a_call(field: Machines, tmp_path: Path) -> None:
    """The node can't write: the call fails, the party is as it was; with room it goes on, also
    after a kill.
    """
    node = field.nodes[1]
    seen: dict[str, Any] = {}

    def room(size: int) -> None:
        resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def full() -> None:
        seen["before"] = node.stored_sha256()
        room(3000)  # for the audit log neither

    def free() -> None:
        assert node.stored_sha256() == seen["before"]
        room(resource.RLIM_INFINITY)

    def look() -> None:
        assert node.stored_sha256() != seen["before"]

    run = run_of("fedavg-adam", rounds=5)
    try:
        execute(field.over(run), tmp_path / "run", progress=after({2: full, 3: free, 4: look}))
    finally:
        room(resource.RLIM_INFINITY)
    assert failures(tmp_path / "run") == [(2, "client-1", "failed")]
    assert not list(node.runs()[-1].glob(".*"))  # no draft is left


@pytest.mark.slow
def test_memory_threads_and_files_stay_as_they_are_over_many_calls(field: Machines) -> None:
    """Of an engine and a node, over 5,000 calls: work that is written, looks, and calls that cost
    nothing.
    """
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    node = field.nodes[0]
    nothing = payload.pack({"run": secrets.token_hex(16), "start": 1, "finished": True})
    wire = Transport(field, name="second")

    async def ask(count: int) -> None:
        numbers = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in numbers:
                await wire.line.ask("close", nothing, id=secrets.token_hex(16), deadline=60.0)

        await asyncio.gather(*(one_after_the_other() for _ in range(16)))

    with started(field.over(LONG)) as engine:

        def calls(rounds: range) -> None:
            for t in rounds:
                replies = engine.call(engine.ids, "public_digest", {}, None, None)
                if t % 5 == 0:
                    replies += engine.call(engine.ids, "update", {"t": t}, None, (t, 0))
                assert not [r for r in replies if isinstance(r, Failure)]
            field.loop.run(ask(40 * len(rounds)), 600)

        def counts() -> list[tuple[int, int, int]]:
            return [
                (resident(pid), threads(pid), open_files(pid)) for pid in (node.pid, os.getpid())
            ]

        calls(range(20))
        before = counts()
        calls(range(20, 120))
        for (memory, running, files), (memory2, running2, files2) in zip(
            before, counts(), strict=True
        ):
            assert memory2 < memory + 15
            assert running2 <= running + 2
            assert files2 <= files + 3
    wire.close()


def test_a_call_that_is_cancelled_before_it_begins_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC logs it as an unhandled exception; other exceptions stay in the log."""
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    for error in (asyncio.CancelledError(), ValueError("a fault")):
        try:
            raise error
        except (asyncio.CancelledError, ValueError):
            grpc_log.exception("Exception not handled by _handle_exceptions in servicer method")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]
