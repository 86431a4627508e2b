"""The audit log of a node: what it answered to whom. Bytes and hashes, never contents.

Nothing of it is ever dropped. Refusals have a file of their own, as anybody with a certificate can cause them.

A line is on its way to the disk before the answer goes out. A node that can't write it gives no answer: the caller is
told that the node failed, and asks again.
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
"""Bytes of one file; the next line after so many goes to a new one."""

_NAME: Final = "%Y%m%dT%H%M%S.%fZ"


class AuditLog:
    """Files with one JSON object a line, appended to for ever, that only their owner can read.

    Attributes:
        path: what was answered. A full file is kept, under the time (UTC) in its name: `audit-….jsonl`.
        refusals: what was not. Of full ones the last is kept, as `refused.1.jsonl`.
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
            OSError: the disk refuses; then nothing may be answered.
        """
        self._append(self.path, what, caller, facts)

    def refuse(self, caller: str, **facts: Any) -> None:
        """Add a line on a call that was refused. Raises OSError."""
        self._append(self.refusals, "refused", caller, facts)

    def _append(self, path: Path, what: str, caller: str, facts: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        line = json.dumps({"time": now.isoformat(timespec="milliseconds"), "what": what, "caller": caller, **facts})
        with self._lock:
            if path.exists() and path.stat().st_size > LARGEST:
                os.replace(path, self._full(now) if path == self.path else path.with_suffix(".1.jsonl"))
            with open(path, "a", encoding="utf-8", opener=_private) as file:
                file.write(line + "\n")

    def _full(self, now: datetime) -> Path:
        """Where a full file goes: a name that there is not yet, also after a clock was set back."""
        names = (self.path.with_stem(f"{self.path.stem}-{now + timedelta(microseconds=n):{_NAME}}") for n in count())
        return next(name for name in names if not name.exists())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
