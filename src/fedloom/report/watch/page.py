"""The live page, served to this machine only."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from time import time

from fedloom.core.errors import ConfigError, DataError
from fedloom.report.watch.snapshot import take

LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
"""Accepted host names; any other indicates DNS rebinding."""
PATIENCE = 10.0
"""Timeout of a request in seconds."""


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page of a run's or comparison's folder until interrupted.

    Args:
        folder: the folder of a run or comparison.
        port: the port; 0 for any free port.
        ready: called with the page's address.

    Raises:
        ConfigError: the port is not available.
    """
    with server(folder, port) as http:
        ready(f"http://127.0.0.1:{http.server_port}/")
        http.serve_forever()


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """The server, bound but not yet serving.

    Raises:
        ConfigError: the port is not available.
    """
    handler = type("Handler", (_Handler,), {"folder": folder})
    try:
        http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} is not available ({error.strerror}). Choose another with --port."
        ) from None
    http.daemon_threads = True
    return http


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and its data, and rejects all others."""

    folder: Path
    timeout = PATIENCE
    server_version = "fedloom"
    sys_version = ""

    def do_GET(self) -> None:
        """The page at /, its data at /live.json."""
        if not self._is_from_here():
            self._answer(
                403,
                "text/plain",
                b"This page is served to this machine only. Open it at 127.0.0.1.\n",
            )
        elif self.path == "/":
            page, policy = _page()
            self._answer(200, "text/html", page, policy)
        elif self.path == "/live.json":
            self._live()
        else:
            self._answer(404, "text/plain", b"Not found. Valid paths are / and /live.json.\n")

    def _refuse(self) -> None:
        self._answer(405, "text/plain", b"Method not allowed. Use GET.\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _is_from_here(self) -> bool:
        """Whether the Host header names this machine, against DNS rebinding."""
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and re.sub(r":\d{1,5}$", "", hosts[0].strip().lower()) in LOOPBACK

    def _live(self) -> None:
        try:
            self._answer(
                200, "application/json", take(self.folder, time()).model_dump_json().encode()
            )
        except DataError as error:
            self._answer(503, "application/json", json.dumps({"error": str(error)}).encode())

    def _answer(
        self, status: int, kind: str, body: bytes, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **({"Allow": "GET"} if status == 405 else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@cache
def _page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows only its own script and style."""
    own = files("fedloom.report.watch") / "page.html"
    shared = files("fedloom.report") / "shared.css"
    text = own.read_text(encoding="utf-8").replace(
        "/* shared.css */\n", shared.read_text(encoding="utf-8")
    )
    allowed = {
        kind: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        for kind in ("script", "style")
        if (found := re.search(f"<{kind}>(.*?)</{kind}>", text, re.S))
    }
    rules = {
        "default-src": "'none'",
        "script-src": f"'sha256-{allowed['script']}'",
        "style-src": f"'sha256-{allowed['style']}'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())
