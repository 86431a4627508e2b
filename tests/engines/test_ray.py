"""A Ray cluster of two nodes on this machine: the loop's bits, what crosses, and a node that is
lost.
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom import methods, models
from fedloom.core import message
from fedloom.core.context import ClientContext, Rows
from fedloom.core.engine import Account, Engine, Failure, Lost
from fedloom.core.errors import ConfigError, EngineError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.party import Party
from fedloom.engines import LocalEngine
from fedloom.engines.ray import RayEngine, contiguous_pieces
from tests import test_three_pages as pages
from tests.engines.test_workers import ALL, LINKS, Gossip, outcome
from tests.toy import CLASSES, FEATURES, contexts, network, rows

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from fedloom.engines import _party_bundle, _ray_cluster  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
# Ray leaves its own processes and sockets to the collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(subprocess|unclosed).*:ResourceWarning"),
]
Builders = Sequence[Callable[[], Party[Any]]]


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    """Whatever else runs Ray here is left alone."""
    folder = tempfile.mkdtemp(prefix="fl", dir="/tmp")  # a socket's path must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        for name, value in _ray_cluster.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of one CPU."""
    cluster = Cluster()
    _ray_cluster._start(lambda: cluster.add_node(**NODE, include_dashboard=False))
    _ray_cluster._start(lambda: cluster.add_node(**NODE))
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def local(builders: Builders, **options: Any) -> Engine:
    return LocalEngine([build() for build in builders], **options)


def on(cluster: Cluster | None, **options: Any) -> Callable[..., RayEngine]:
    """Makes engines of two workers on this cluster, or on one of their own."""

    def make(builders: Builders, **more: Any) -> RayEngine:
        ids = [build.args[1].id for build in builders]  # type: ignore[attr-defined]
        address = cluster.address if cluster else None
        return RayEngine(builders, ids=ids, **{"workers": 2, "address": address, **options, **more})

    return make


def by_text(engine: Engine) -> dict[str, Any]:
    return {str(i): state for i, state in engine.states().items()}


def copied(states: Any) -> Any:
    return message.map_tensors(torch.Tensor.clone, states)


def pids(engine: RayEngine) -> list[int]:
    workers = engine._cluster.workers.values()
    return ray.get([w.__ray_call__.remote(lambda shard: os.getpid()) for w in workers])


def alive(pid: int) -> bool:
    try:
        # empty for one that waits to be reaped
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


# -- the same bits ---------------------------------------------------------------------------------


def fedal(
    make: Callable[..., Engine],
    client_contexts: Sequence[ClientContext],
    rounds: int,
    faults: Faults | None,
) -> dict[str, Any]:
    method = methods.find("fedal")
    cfg = method.configure(params={"batch_size": 8, "tau": 3})
    assert method.server is not None
    server = method.server(cfg, ClientContext(id=0, parties=len(client_contexts), classes=CLASSES))
    with make(
        [partial(method.client, cfg, client_context) for client_context in client_contexts],
        faults=faults,
    ) as engine:
        fed = Federation(engine)
        for t in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
        looks = engine.call(engine.ids, "predictions", {"on": "test"}, None, None)
        found = {
            **outcome(fed),
            "server": message.encode(server.state()),
            "looks": message.encode(looks),  # type: ignore[arg-type]
        }
        if isinstance(engine, RayEngine):
            account, processes = engine.account(), pids(engine)
            found.update(account=account, processes=processes)
        return found


def test_a_cluster_of_our_own_gives_the_loops_bits_and_is_gone_after() -> None:
    """All faults, BatchNorm, and rows of one pool that parties share."""
    pool = rows(100, 5)
    data = lambda i: Rows(
        pool.pool, pool.labels, torch.arange(20 + 10 * i).mul(7) % 100, pool.shift, pool.scale
    )
    client_contexts = lambda: contexts(5, make=partial(network, norm=True), data=data)
    expected = fedal(local, client_contexts(), 4, ALL)
    found = fedal(on(None), client_contexts(), 4, ALL)
    account, processes = found.pop("account"), found.pop("processes")
    assert len({reason for *_, reason in expected["failures"]}) >= 6
    assert found == expected
    assert account.engine == "ray" and account.workers == len(processes) == 2
    assert account.remarks == ("1 node",)
    assert not ray.is_initialized()
    end = time.monotonic() + 300
    while any(map(alive, processes)):
        assert time.monotonic() < end, "a worker outlived its engine"
        time.sleep(0.05)


class Talker(Party[None]):
    """Answers anything, and says where it works."""

    STATE = ("heard",)

    def setup(self) -> None:
        self.heard = torch.zeros(1)

    def where(self) -> int:
        return os.getpid()

    def say(self, *, size: int) -> Tensor:
        return torch.full((size,), float(self.context.id))

    def hear(self, *, inbox: dict[str, Tensor], size: int) -> None:
        self.heard = torch.stack([x.sum() for x in inbox.values()])

    def echo(self, *, x: Any = None) -> Any:
        return x

    def odd(self) -> Any:
        return {"set": {1, 2}}

    def wrong(self) -> None:
        raise ValueError("patient 4711 is missing")


class Meter:
    """Counts the bytes that Ray hands to this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read = 0
        worker = type(ray._private.worker.global_worker)
        before = worker.deserialize_objects

        def counted(this: Any, serialized: Any, *args: Any, **options: Any) -> Any:
            for part in serialized:
                self.read += 0 if part.data is None else len(part.data)
            return before(this, serialized, *args, **options)

        patch.setattr(worker, "deserialize_objects", counted)


PEERS = range(10, 16)
NODES = range(3)
COLUMNS = (-2, -1)
GOSSIPS = range(20, 25)
TALKERS = range(30, 34)


def crowd() -> list[Callable[[], Party[Any]]]:
    """Parties of five kinds. Their pages find things of theirs by number, from the end where it is
    negative.
    """
    return [
        *(partial(Talker, None, ClientContext(id=i)) for i in TALKERS[:2]),
        *(partial(pages.Peer, None, ClientContext(id=i)) for i in PEERS),
        *(partial(pages.Node, None, ClientContext(id=i)) for i in NODES),
        *(
            partial(pages.Columns, None, ClientContext(id=i, network=partial(pages.bottom, i + 2)))
            for i in COLUMNS
        ),
        *(partial(Gossip, None, ClientContext(id=i)) for i in GOSSIPS),
        *(partial(Talker, None, ClientContext(id=i)) for i in TALKERS[2:]),
    ]


def gossip(engine: Engine, *, ask: bool) -> dict[str, Any]:
    weights = {k: floats(*v.shape) for k, v in Gossip(None, ClientContext(id=0)).params.items()}
    answer = {"mine": weights, "count": int}
    fed = Federation(engine, coordinator="coordinator")
    for t in range(3):
        fed.round = t
        if ask:
            words = {
                "ask": "question",
                "answer": "answer",
                "expect": {**answer, "weights": weights},
            }
        else:
            words = {"answer": "share", "expect": answer}
        links = {GOSSIPS[i]: [GOSSIPS[j] for j in others] for i, others in LINKS.items()}
        fed.exchange(links, take="take", shared={"boost": 0.5 + t}, **words)  # type: ignore[arg-type]
    return outcome(fed)


def three_pages(engine: Engine) -> dict[str, Any]:
    label = pages.Labels(None, ClientContext(id=9, network=pages.top))
    z = torch.zeros(2, dtype=torch.float64)
    fed = Federation(engine)
    for t in range(5):
        fed.round = t
        fed.exchange(
            {i: [10 + (i + d) % 6 for d in (3, 5)] for i in PEERS}, answer="share", take="average"
        )
        pages.split_step(fed, label, COLUMNS, torch.arange(t, t + 16))
        z = pages.admm(fed, tuple(NODES), z)
    return {**outcome(fed), "z": z.tolist(), "label": message.encode(label.state())}


@pytest.fixture(scope="class")
def resident(cluster: Cluster) -> Iterator[tuple[Engine, Any]]:
    with on(cluster)(crowd()) as engine:
        yield engine, copied(by_text(engine))


class TestResidents:
    """One engine for several tests, each from the first states again."""

    @pytest.fixture
    def engine(self, resident: tuple[RayEngine, Any]) -> RayEngine:
        engine, first = resident
        engine.load({i: first[str(i)] for i in engine.ids})
        engine._faults = None
        return engine

    def test_two_workers_live_on_two_nodes(self, engine: RayEngine) -> None:
        assert engine.account() == Account("ray", 2, "cpu", ("2 nodes",))
        assert engine.name(31) == "talker-31" and len(set(pids(engine))) == 2
        assert len(set(engine._where.values())) == 2

    @pytest.mark.parametrize("faults", [None, ALL], ids=["calm", "faults"])
    @pytest.mark.parametrize("ask", [False, True], ids=["tell", "ask"])
    def test_gossip_gives_the_loops_bits(
        self, engine: RayEngine, ask: bool, faults: Faults | None
    ) -> None:
        engine._faults = faults
        found = gossip(engine, ask=ask)
        assert found == gossip(local(crowd(), faults=faults), ask=ask)
        assert bool(found["failures"]) == (faults is not None)

    def test_three_pages_give_the_loops_bits(self, engine: RayEngine) -> None:
        found = three_pages(engine)
        assert found == three_pages(local(crowd())) and not found["failures"]

    def test_what_crosses(self, engine: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Payloads of an exchange never come here; messages of any size do; failures are those of
        the loop.
        """
        nan, loop = float("nan"), local(crowd())
        meter = Meter(monkeypatch)
        size, links = 1_000_000, {i: [j for j in TALKERS if j != i] for i in TALKERS}
        fed = Federation(engine)
        fed.exchange(links, answer="say", take="hear", shared={"size": size}, expect=floats(size))
        assert fed.ledger.sent("talker") == 12 * 4 * size and not fed.failures
        assert 0 < meter.read < 20_000
        states = engine.states()
        assert {i: states[i]["heard"].tolist() for i in TALKERS} == {
            i: [float(j * size) for j in links[i]] for i in TALKERS
        }
        there = [engine.call([i], "where", {}, None, None)[0] for i in TALKERS]
        assert there[0] == there[1] != there[2] == there[3] and os.getpid() not in there
        workers = engine._cluster.workers.values()
        left = ray.get([w.__ray_call__.remote(lambda shard: len(shard._left)) for w in workers])
        assert left == [0, 0]

        meter.read = 0
        (big,) = engine.call([32], "say", {"size": size}, None, (0, 0))
        assert isinstance(big, Tensor) and float(big.mean()) == 32 and meter.read > 4 * size

        shared: dict[str, Any]
        each: Any
        for shared, each in (
            ({"x": torch.arange(300_000)}, None),
            (
                {},
                {i: {"x": [None, True, 2.5, "ä", (1, {"a": torch.zeros(0, 3)})]} for i in TALKERS},
            ),
            ({}, {i: {"x": nan if i == 31 else 1.0} for i in TALKERS}),
            ({}, {i: {"x": torch.tensor([nan]) if i == 31 else torch.ones(1)} for i in TALKERS}),
            ({"x": nan}, None),
        ):
            there = engine.call(TALKERS, "echo", shared, each, (0, 1))
            here = loop.call(TALKERS, "echo", shared, each, (0, 1))
            for a, b in zip(there, here, strict=True):
                assert type(a) is type(b)
                if isinstance(a, Failure):
                    assert a == b
                else:
                    assert message.encode(a) == message.encode(b)  # type: ignore[arg-type]

        for method in ("odd", "wrong"):
            feds = [Federation(engine), Federation(loop)]
            for fed in feds:
                try:
                    fed.call(TALKERS, method)
                except MethodError as error:
                    assert method == "wrong" and "patient 4711" in str(error)
            assert feds[0].failures or method == "wrong"
            assert [f.reason for f in feds[0].failures] == [f.reason for f in feds[1].failures]
        with pytest.raises(MethodError, match="Talker has no method 'talk'"):
            engine.call(TALKERS, "talk", {}, None, (0, 2))
        assert engine.call([], "say", {}, None, (0, 3)) == []


# -- what is sent once -----------------------------------------------------------------------------


def test_a_page_and_a_network_of_the_users_own_come_along(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other node has these files: nor has this one, by the time the workers start."""
    (tmp_path / "own_help.py").write_text("WIDTH = 7\ndef width():\n    return WIDTH\n")
    (tmp_path / "own_nets.py").write_text(
        "import logging\nfrom torch import nn\nfrom own_help import width\nlog = "
        "logging.getLogger('own')\ndef make(shape, classes):\n    log.debug('made')\n    return "
        "nn.Sequential(nn.Linear(shape[0], width()), nn.ReLU(), nn.Linear(width(), classes))\n"
    )
    example = Path(__file__).parents[2] / "examples" / "fedavg.py"
    (tmp_path / "own_page.py").write_text(example.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    method = methods.load(tmp_path / "own_page.py")
    build = partial(models.build, "own_nets:make", (FEATURES,), CLASSES, seed=3)
    build()
    for name in ("own_help", "own_nets", "fedloom_page_own_page"):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # and away again after the test
    for file in tmp_path.glob("*.py"):
        file.unlink()
    cfg = method.configure()
    found = []
    for make in (local, on(cluster)):
        client_contexts = [
            ClientContext(id=i, parties=4, classes=CLASSES, data=rows(20, i), network=build)
            for i in range(4)
        ]
        assert method.server is not None
        server = method.server(cfg, ClientContext(id=0, classes=CLASSES, network=build))
        with make(
            [partial(method.client, cfg, client_context) for client_context in client_contexts]
        ) as engine:
            fed = Federation(engine)
            for t in range(2):
                fed.round = t
                list(method.round(fed, server, engine.ids, cfg, t))
            found.append((outcome(fed), message.encode(server.state())))
    assert found[0] == found[1]
    assert not ray.cloudpickle.list_registry_pickle_by_value()


def test_rows_are_cut_from_their_pools_and_keep_their_content() -> None:
    pool = rows(100, 5)
    one, two, three = (
        Rows(pool.pool, pool.labels, torch.tensor(index, dtype=torch.int64), pool.shift, pool.scale)
        for index in ([90, 3, 3, 50], [50, 7], [])
    )
    other = rows(4, 6)
    cut = _party_bundle.pack({0: one, 5: two, 6: other, 7: three})
    assert [len(p.x) for p in cut] == [4, 4] and cut[0].y is not None and cut[0].y.dtype == np.int64
    found = _party_bundle.unpack(cut, "cpu")
    for number, before in {0: one, 5: two, 6: other, 7: three}.items():
        which = torch.arange(len(before))
        assert torch.equal(found[number].x(which), before.x(which))
        assert torch.equal(found[number].y(which), before.y(which))
    assert found[0].pool is found[5].pool is not found[6].pool


def test_rows_without_labels_arrive_without_labels() -> None:
    """Also where another party holds the same pool with labels, as the active party does."""
    pool = rows(20, 5)
    hidden, known = (
        Rows(pool.pool, labels, torch.tensor([7, 2, 11]), pool.shift, pool.scale)
        for labels in (None, pool.labels)
    )
    found = _party_bundle.unpack(_party_bundle.pack({0: hidden, 1: known}), "cpu")
    assert found[0].labels is None and torch.equal(found[0].every, hidden.every)
    assert torch.equal(found[1].y(torch.arange(3)), known.y(torch.arange(3)))
    with pytest.raises(MethodError, match="no labels here"):
        found[0].y(torch.arange(3))


def test_parties_are_dealt_by_their_rows() -> None:
    assert contiguous_pieces([1] * 6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert contiguous_pieces([10, 1, 1, 1, 1, 6], 2) == [range(0, 1), range(1, 6)]
    assert contiguous_pieces([1, 1, 100], 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert contiguous_pieces([100, 1, 1], 2) == [range(0, 1), range(1, 3)]
    assert contiguous_pieces([1, 100], 1) == [range(0, 2)]
    weights = np.random.default_rng(0).integers(1, 50, 500).tolist()
    pieces = contiguous_pieces(weights, 7)
    assert [i for piece in pieces for i in piece] == list(range(500))
    loads = [sum(weights[i] for i in piece) for piece in pieces]
    assert max(loads) - min(loads) <= 100


# -- a node is lost --------------------------------------------------------------------------------


def snapshot(fed: Federation, server: Party[Any]) -> Any:
    return (
        copied({"server": server.state(), **by_text(fed.engine)}),
        fed.ledger.mark(),
        len(fed.failures),
    )


def back(fed: Federation, server: Party[Any], mark: Any) -> None:
    states, ledger, failures = mark
    server.load(states["server"])
    fed.engine.load({i: states[str(i)] for i in fed.engine.ids})
    fed.ledger.rollback(ledger)
    del fed.failures[failures:]


def test_a_run_outlives_its_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node goes in the middle of a round, then a worker before one, and the run ends with the
    loop's bits.

    For the first there is no room: the others take over. For the second there is: a new one comes.
    """
    method = methods.find("fedal")
    cfg = method.configure(params={"batch_size": 8, "tau": 2})
    assert method.server is not None
    third = cluster.add_node(**NODE)
    builders = [partial(method.client, cfg, client_context) for client_context in contexts(5)]
    found = []
    for engine in (local(builders, faults=ALL), on(cluster, workers=3)(builders, faults=ALL)):
        server = method.server(cfg, ClientContext(id=0, parties=5, classes=CLASSES))
        with engine:
            fed = Federation(engine)
            lost: list[str] = []
            mark = snapshot(fed, server)
            for t in range(5):
                fed.round = t
                for attempt in range(3):
                    try:
                        for n, _ in enumerate(method.round(fed, server, engine.ids, cfg, t)):
                            if isinstance(engine, RayEngine) and (t, n, attempt) == (1, 0, 0):
                                monkeypatch.setattr(_ray_cluster, "PATIENCE", 1.0)
                                cluster.remove_node(third)
                        if isinstance(engine, RayEngine) and (t, attempt) == (2, 0):
                            monkeypatch.setattr(_ray_cluster, "PATIENCE", 60.0)
                            ray.kill(engine._cluster.workers[max(engine._cluster.workers)])
                        mark = snapshot(fed, server)
                        break
                    except Lost as error:
                        lost.append(str(error))
                        fed.round = t
                        back(fed, server, mark)
            found.append({**outcome(fed), "server": message.encode(server.state())})
            if isinstance(engine, RayEngine):
                assert (
                    len(lost) == 2
                    and "the remaining workers rebuilt" in lost[0]
                    and "new workers rebuilt" in lost[1]
                )
                account = engine.account()
                assert account.workers == 2 and account.remarks[0] == "2 nodes"
                assert account.remarks[1] == "workers lost and their parties rebuilt: 2"
    assert found[0] == found[1]


def test_a_cluster_without_any_room_left_is_reported_in_a_sentence(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = cluster.add_node(**{**NODE, "num_cpus": 2})
    builders = [partial(Talker, None, ClientContext(id=i)) for i in range(2)]
    with on(cluster, workers=1, cpus=2.0)(builders) as engine:
        monkeypatch.setattr(_ray_cluster, "START", 2.0)
        cluster.remove_node(large)
        with pytest.raises(
            EngineError, match=r"all workers are lost, .* add nodes with `ray start"
        ):
            engine.call([0], "echo", {}, None, (0, 0))


# -- one clear sentence ----------------------------------------------------------------------------


def refused(address: str | None = None, **options: Any) -> str:
    builders = [partial(Talker, None, ClientContext(id=i)) for i in range(8)]
    with pytest.raises((EngineError, ConfigError)) as error:
        RayEngine(builders, ids=range(8), **{"workers": 1, "address": address, **options})
    text = str(error.value)
    assert "\n" not in text and not ray.is_initialized()
    return text


def test_a_start_that_timed_out_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    failures = [RuntimeError("The current node timed out during startup.")] * 2

    def start() -> None:
        if failures:
            raise failures.pop()

    _ray_cluster._start(start)
    assert not failures and caplog.text.count("trying again") == 2
    failures += [RuntimeError("no memory")] * 2
    with pytest.raises(RuntimeError, match="no memory"):
        _ray_cluster._start(start)
    assert len(failures) == 1


def test_a_bad_address_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setattr(_ray_cluster, "KNOCK", 1.0)
        busy = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"no Ray cluster at '{busy}' (timed out)" in refused(busy)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            link, _ = other.accept()
            with link:
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        busy = f"127.0.0.1:{other.getsockname()[1]}"
        assert "another service listens there" in refused(busy)
        thread.join()
    assert "Connection refused" in refused(busy)
    for nonsense in ("nonsense", "ray://10.0.0.1:10001", ":6379", "host:port"):
        assert "must be host:port of the cluster's head" in refused(nonsense)
    assert "no Ray cluster at 'bad..name:1'" in refused("bad..name:1")


def test_too_small_a_cluster_is_reported_with_what_there_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(cluster.address, workers=3)
    assert "2 CPUs and 0 GPUs on 2 nodes, too little for 3 workers of 1 CPU and 0 GPUs each" in text
    assert "too little for 1 worker of 1 CPU and 0.5 GPUs each" in refused(
        cluster.address, gpus=0.5
    )
    monkeypatch.setattr(_ray_cluster, "START", 1.0)
    text = refused(cluster.address, cpus=2.0)  # two in all, but one each
    assert (
        "only 0 of 1 worker of 2 CPUs and 0 GPUs each started within 1 s" in text
        and "2 CPUs and 0 GPUs are free" in text
    )
    assert "at least 1, not 0" in refused(cluster.address, workers=0)


def test_other_versions_are_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ray._private.utils.compute_version_info", lambda: ("2.1.0", "3.9.7"))
        text = refused(cluster.address)
        assert "install the same Ray and Python here and on the cluster" in text and "2.1.0" in text
    monkeypatch.setattr(_ray_cluster, "versions", lambda: {"fedloom": "9.9", "torch": "9.8"})
    text = refused(cluster.address)
    assert "this one has fedloom 9.9 and torch 9.8; install the same versions on every node" in text


def test_a_node_without_fedloom_is_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = SimpleNamespace(
        __name__="not_there", Shard=type("Shard", (), {"about": lambda self: {}})
    )
    away.Shard.__module__, away.Shard.__qualname__ = "not_there", "Shard"
    monkeypatch.setitem(sys.modules, "not_there", away)
    monkeypatch.setattr(_ray_cluster, "Shard", away.Shard)
    text = refused(cluster.address)
    assert "ModuleNotFoundError: No module named 'not_there'" in text and "install fedloom" in text


def test_what_cannot_be_sent_is_reported(cluster: Cluster) -> None:
    lock: Any = threading.Lock()
    builders = [partial(Talker, None, ClientContext(id=0, network=lambda: lock))]
    with pytest.raises(EngineError, match="keep open files and locks out of its class"):
        on(cluster, workers=1)(builders)
    assert not ray.is_initialized()
    with pytest.raises(EngineError, match=r"each builder must be partial\(class, cfg, context\)"):
        RayEngine([lambda: Talker(None, ClientContext(id=0))], ids=[0], workers=1)


def test_a_missing_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("_ray_cluster", "_shard"):
        monkeypatch.delitem(sys.modules, f"fedloom.engines.{name}")
        monkeypatch.delattr(importlib.import_module("fedloom.engines"), name)
    assert "pip install -e '.[ray]'" in refused()
