"""The audit log of a node: every answer with its caller, its size and its hash, never its content.

Answered calls are never dropped. Refusals have a file of their own, as anybody with a certificate can cause them.

The line is written before the answer is sent. If writing fails, the call fails, and the caller may repeat it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

LARGEST = 64 << 20
"""Bytes after which a new file begins."""

_NAME: Final = "%Y%m%dT%H%M%S.%fZ"


class AuditLog:
    """Append-only files with one JSON object a line, readable by their owner only.

    Attributes:
        path: answered calls. A full file is kept as `audit-….jsonl` with the time (UTC) in its name.
        refusals: refused calls. The last full file is kept as `refused.1.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusals = path.with_name("refused.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def write(self, what: str, caller: str, **facts: Any) -> None:
        """Add a line.

        Args:
            what: opened, answered, handed over, …
            caller: the name in the certificate.
            facts: run, call, method, bytes, hashes.

        Raises:
            OSError: writing failed; the call must not be answered.
        """
        self._append(self.path, what, caller, facts)

    def refuse(self, caller: str, **facts: Any) -> None:
        """Add a line about a refused call. Raises OSError."""
        self._append(self.refusals, "refused", caller, facts)

    def _append(self, path: Path, what: str, caller: str, facts: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        line = json.dumps({"time": now.isoformat(timespec="milliseconds"), "what": what, "caller": caller, **facts})
        with self._lock:
            if path.exists() and path.stat().st_size > LARGEST:
                os.replace(path, self._full(now) if path == self.path else path.with_suffix(".1.jsonl"))
            with open(path, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(line + "\n")

    def _full(self, now: datetime) -> Path:
        """An unused name for a full file, even after the clock was set back."""
        names = (self.path.with_stem(f"{self.path.stem}-{now + timedelta(microseconds=n):{_NAME}}") for n in count())
        return next(name for name in names if not name.exists())
