"""A SuperLink with TLS and authentication of SuperNodes, and SuperNodes with nodes of fedloom, on
this machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
NODE = (
    'name = "{name}"\ncallers = ["superlink"]\nmethods = ["augfl", '
    '"gossip"]\n\n[data.digits]\ndataset = "digits"\n'
)
PATIENCE = 1500.0
"""Seconds until a run counts as stuck: on a busy machine an exchange takes half a minute."""


class Federation:
    """Processes in a folder: `superlink`, and one for each node, with a log each."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.port, *ports = _ports(1 + len(names))
        self._ports = dict(zip(names, ports, strict=True))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        subprocess.run(
            [sys.executable, ROOT / "examples" / "flower" / "keys.py", folder, *names], check=True
        )
        for name in names:
            (folder / f"node-{name}").mkdir()
            (folder / f"node-{name}" / "node.toml").write_text(NODE.format(name=name))
        (folder / "flwr").mkdir()
        link = f'default = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
        link += f'root-certificates = "{folder / "superlink.crt"}"\n'
        (folder / "flwr" / "config.toml").write_text("[superlink]\n" + link)

    def start(self) -> None:
        """Start everything, and wait until it is there."""
        tls = (
            ("certfile", "superlink.crt"),
            ("keyfile", "superlink.key"),
            ("ca-certfile", "superlink.crt"),
        )
        options = [f"--ssl-{option}={self.folder / file}" for option, file in tls]
        options += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self._spawn(
            "superlink", "flower-superlink", "--host=127.0.0.1", f"--port={self.port}", *options
        )
        for name in self._ports:
            self._until(
                lambda name=name: self.flwr(
                    "supernode", "register", f"{self.folder / name}.pub", "--name", name
                )
            )
            self.node(name)

    def node(self, name: str) -> None:
        """Start a SuperNode."""
        self._spawn(
            name,
            "flower-supernode",
            f"--superlink=127.0.0.1:{self.port}",
            f"--root-certificates={self.folder / 'superlink.crt'}",
            f"--auth-supernode-private-key={self.folder / name}",
            f"--port={self._ports[name]}",
            f'--node-config=fedloom="{self.folder / f"node-{name}" / "node.toml"}"',
        )

    def kill(self, name: str) -> None:
        """Kill a SuperNode with all that it started."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, **settings: Any) -> tuple[str, str]:
        """Do a run with these keys of the app's config changed; its status, and its log."""
        changes = " ".join(
            f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()
        )
        begun = self.flwr("run", str(ROOT / "examples" / "flower" / "app"), "--run-config", changes)
        assert begun is not None, "flwr run failed"
        run = str(begun["run-id"])
        over = re.compile(rf"Finished task \d+ of run {run}\b")
        # to ask for the status is a process each time
        self._until(lambda: over.search(self.log("superlink")))
        status: str = self._until(lambda: (now := self._status(run)).startswith("finished") and now)
        return status, self._do("log", run, "--show").stdout

    def flwr(self, *words: str) -> dict[str, Any] | None:
        """What a command of Flower's says; None if it failed."""
        said = self._do(*words, "--format", "json").stdout
        found: dict[str, Any] = json.loads(said[said.find("{") :] or "{}")
        return found if found.get("success") else None

    def log(self, name: str) -> str:
        """What a process wrote."""
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        """Stop everything."""
        for process in self._running.values():
            process.terminate()
        for name, process in list(self._running.items()):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill(name)

    def _status(self, run: str) -> str:
        found = self.flwr("list", "--run-id", run)
        return str(found["runs"][0]["status"]) if found else ""

    def _spawn(self, name: str, *command: str) -> None:
        (self.folder / f"home-{name}").mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=self._environment(self.folder / f"home-{name}"),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _do(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = self._environment(self.folder / "flwr")
        return subprocess.run(
            ["flwr", *words], env=environment, capture_output=True, text=True, timeout=300
        )

    def _environment(self, server_side: Path) -> dict[str, str]:
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        }
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return {
            **os.environ,
            **quiet,
            "FLWR_HOME": str(server_side),
            "PATH": path,
            "OMP_NUM_THREADS": "1",
        }

    def _until(self, true: Any) -> Any:
        end = monotonic() + PATIENCE
        while not (found := true()):
            assert monotonic() < end, f"nothing came of it: see the logs in {self.folder}"
            gone = [name for name, process in self._running.items() if process.poll() is not None]
            assert not gone, "\n".join(f"{name} has ended:\n{self.log(name)}" for name in gone)
            sleep(0.5)
        return found


@contextmanager
def federation(folder: Path, names: Sequence[str]) -> Iterator[Federation]:
    """A federation that runs until the end."""
    found = Federation(folder, names)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def _ports(count: int) -> list[int]:
    """Free ports."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
