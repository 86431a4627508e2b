"""Log lines of a node: for a person, or as JSON for a machine."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the trace if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """A line that begins with the time; further lines of a message are set in, and control characters are left out.

    So nothing that a caller sent can look like a line of ours, or tell a terminal what to do.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, or several."""
        lines = super().format(record).splitlines()
        return "\n    ".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)


def begin(how: str, out: TextIO | None = None) -> None:
    """Send the log of fedloom's own parts to standard error.

    Args:
        how: "text" or "json".
        out: somewhere else to send it.
    """
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(JSONFormatter() if how == "json" else TextFormatter())
    root = logging.getLogger("fedloom")
    root.handlers, root.propagate = [handler], False
    root.setLevel("INFO")
