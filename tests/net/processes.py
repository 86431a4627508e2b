"""A federation of real processes on this machine, with certificates, and a proxy before each that
listens.

Nothing here waits for a time: for a line of output, a line of an audit log, or the end of a
    process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from rich.console import Console

from fedloom.cli import federation as commands
from fedloom.core import message
from fedloom.engines import Engine
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry
from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.coordinator import at_nodes, federation_of, node_set
from fedloom.remote.credentials import Credentials
from fedloom.remote.node.store import Store, StoredState
from tests.net.nodes import Loop, loop
from tests.net.proxy import Proxy, proxy

PATIENCE = 90.0
"""Seconds after which a test fails because nothing came; never how long something is meant to take.
"""
SETTINGS = """\
secret_noise = false
lease = 5
"""
SMALL = {"tau": 2, "batch_size": 16, "epochs": 1}
DATA = """
[data.breast_cancer]
dataset = "breast_cancer"
[data.wine]
dataset = "wine"
"""


def until(there: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Look again and again, until it is there; it."""
    end = monotonic() + seconds
    while not (found := there()):
        assert monotonic() < end, f"{what} did not come within {seconds:g} seconds"
        sleep(0.002)
    return found


def started(run: RunConfig) -> Engine:
    """The engine of a run at the nodes of its federation."""
    return at_nodes(build(run), node_set(federation_of(run)))


class Process:
    """A process of fedloom's, or of another module, and what it says.

    Args:
        words: of the command line after `python -m`.
    """

    def __init__(self, *words: str | Path) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        self._popen = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
            errors="replace",
        )
        self.pid = self._popen.pid
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All that it has said."""
        return "\n".join(self.lines)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def says(self, pattern: str) -> str:
        """Wait until it has said this; the line."""

        def found() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._news:
            there = self._news.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE)
        assert there and found(), f"it never said {pattern!r}, but:\n{self.text}"
        return str(found())

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self._popen.send_signal(number)

    def ends(self) -> int:
        """Wait for its end; how it ended."""
        code = self._popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        """End it as a power cut would."""
        self._popen.kill()
        self._popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


class Node:
    """A node's folder, its process, and the proxy through which it reaches the coordinator."""

    def __init__(self, folder: Path, name: str, line: Proxy) -> None:
        self.folder, self.name, self._line = folder, name, line
        self.process: Process | None = None
        self.lives: list[Process] = []

    @property
    def line(self) -> Proxy:
        """The line to it."""
        return self._line

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Begin its process, which may take a while to be ready."""
        self.process = Process("fedloom", "node", self.folder / "node.toml")
        self.lives.append(self.process)

    def ready(self) -> None:
        """Wait until it takes calls."""
        assert self.process is not None
        self.process.says("takes calls of")

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP; when it is done, nothing runs there any more."""
        assert self.process is not None
        self.process.send(signal.SIGSTOP)
        until(
            lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
            "SIGSTOP",
        )

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send(signal.SIGCONT)

    def audit(self, what: str = "answered", **facts: Any) -> list[dict[str, Any]]:
        """Lines of its audit log."""
        path = self.folder / "state" / "audit.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if line["what"] == what and facts.items() <= line.items()]

    def runs(self) -> list[Path]:
        """The folders of its runs, the newest last."""
        found = (self.folder / "state").glob("run-*")
        return sorted(
            (p for p in found if (p / "run.json").exists()),
            key=lambda p: (p / "run.json").stat().st_mtime_ns,
        )

    def stored(self, name: str = "state") -> StoredState:
        """What lies on its disk of the newest run."""
        entry = Store(self.runs()[-1]).read(name)
        assert entry is not None
        return entry

    def stored_sha256(self, name: str = "state") -> str:
        return message.digest(self.stored(name).state)


class Machines:
    """Nodes; made by `machines`.

    Attributes:
        nodes: in the order of parties.
        federation: the file for the coordinator.
        addresses: where coordinators listen, by name; "spare" for a second process of the first.
        loop: where proxies run, and hubs of tests.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[Node], addresses: dict[str, str], there: Loop
    ) -> None:
        self.folder, self.nodes, self.addresses, self.loop = folder, nodes, addresses, there
        self.federation = folder / "federation.toml"
        self.hubs: list[Any] = []

    def credentials(self, name: str = "coordinator") -> Credentials:
        """Of one of those who may have some."""
        server_side = self.folder / name
        return Credentials(
            server_side / "ca.pem", server_side / "certificate.pem", server_side / "key.pem"
        )

    def over(self, run: RunConfig, at: str = "coordinator", **settings: float) -> RunConfig:
        """A run, over the net; by a coordinator that listens at another address, or has other
        settings, if told.
        """
        path = self.folder / f"federation-{at}{'-'.join(settings)}.toml"
        text = self.federation.read_text().replace(
            self.addresses["coordinator"], self.addresses[at]
        )
        path.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()) + text)
        return run.model_copy(update={"engine": EngineConfig(name="net", federation=str(path))})

    def straight(self) -> None:
        """Good lines again, and all processes that are needed: what a test begins with."""
        while self.hubs:  # of a test that failed
            self.hubs.pop().close()
        for node in self.nodes:
            node.line.straight()
            if node.process is None or not node.process.alive:
                node.start()
            node.thaw()
        for node in self.nodes:
            node.ready()


def run_of(method: str, rounds: int = 3, clients: int = 3, **changes: Any) -> RunConfig:
    """A run of a second or less."""
    values: dict[str, Any] = {
        "method": method,
        "rounds": rounds,
        "data": {
            "name": "digits",
            "clients": clients,
            "public_rows": 60,
            "test_rows": 50,
            "own_test_rows": 20,
        },
        "models": {"pool": ["mlp"], "norm": "none"},
        "params": {
            name: SMALL[name] for name in SMALL if name in registry()[method].config.model_fields
        },
    }
    return check({"run": {**values, **changes}}).run


@contextmanager
def machines(
    folder: Path, count: int, *, settings: str = SETTINGS, begin: bool = True
) -> Iterator[Machines]:
    """A federation. Every process of it ends with the block."""
    names = [f"node-{n}" for n in range(count)]
    with ExitStack() as stack:
        there = stack.enter_context(loop())
        ports = dict(zip(("coordinator", "spare", "second"), free_ports(3), strict=True))
        addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        commands.certs(
            names,
            folder,
            sorted(registry()),
            Console(quiet=True),
            address=addresses["coordinator"],
            here=True,
        )
        identity(folder, "second")
        federation = folder / "federation.toml"
        federation.write_text("wait = 240\nsecret_draw = false\n" + federation.read_text())
        nodes = []
        for k, name in enumerate(names):
            line = stack.enter_context(proxy(there, ports["coordinator"], seed=k))
            path = folder / name / "node.toml"
            lines = [x for x in path.read_text().splitlines() if not x.startswith("callers")]
            lines += [
                "[callers]",
                f'coordinator = ["127.0.0.1:{line.port}", "{addresses["spare"]}"]',
            ]
            lines += [f'second = "{addresses["second"]}"']
            path.write_text(settings + "\n".join(lines) + DATA)
            nodes.append(Node(folder / name, name, line))
        made = Machines(folder, nodes, addresses, there)
        stack.callback(_end, made)
        if begin:
            made.straight()
        yield made


@contextmanager
def coordinator(run: RunConfig, config: Path, out: Path, *more: str) -> Iterator[Process]:
    """`fedloom run` of a config, as a process of its own."""
    from fedloom.experiment.config import run as configs

    config.write_text(configs.toml(run))
    process = Process("fedloom", "run", config, "--out", out, *more)
    try:
        yield process
    finally:
        process.kill()
        sys.stdout.write(process.text)  # pytest shows it where a test fails


def identity(folder: Path, name: str, authority: CertificateAuthority | None = None) -> None:
    """A folder with a certificate that has this name, of the CA in that folder or of
    another one.
    """
    certificate, key = (authority or CertificateAuthority(folder)).issue(name, 30)
    server_side = folder / name
    server_side.mkdir(exist_ok=True)
    files = {"certificate.pem": certificate, "key.pem": key}
    if authority is None:
        files["ca.pem"] = (folder / "ca.pem").read_bytes()
    for file, data in files.items():
        (server_side / file).write_bytes(data)
        (server_side / file).chmod(0o600)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, and that no connection is given by chance."""
    chance = Random(os.getpid() * 1000 + threading.get_native_id() + int(monotonic() * 1000))
    found = dict[int, None]()
    while len(found) < count:
        port = chance.randrange(20000, 32000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            found[port] = None
    return list(found)


def open_files(pid: int) -> int:
    """How many a process has, sockets among them."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def resident(pid: int) -> int:
    """Megabytes of memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) >> 10


def _end(made: Machines) -> None:
    everything: Collection[Process] = [life for node in made.nodes for life in node.lives]
    for process in everything:
        process.kill()
        sys.stdout.write(process.text)
