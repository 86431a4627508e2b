"""Log lines of a node: for a person, or as JSON for a machine."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class JSONFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and any traceback."""

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
    """Lines that begin with the time, or as `form` says. Further lines of a message are indented and control characters
    replaced, so that nothing that a caller sent can imitate a log line or control a terminal."""

    def __init__(self, form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
        super().__init__(form)

    def format(self, record: logging.LogRecord) -> str:
        """The line, or several."""
        lines = super().format(record).splitlines()
        return "\n    ".join("".join(c if c.isprintable() else "�" for c in line) for line in lines)


def begin(how: str, out: TextIO | None = None) -> None:
    """Send fedloom's log to standard error.

    Args:
        how: "text" or "json".
        out: another stream.
    """
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(JSONFormatter() if how == "json" else TextFormatter())
    root = logging.getLogger("fedloom")
    root.handlers, root.propagate = [handler], False
    root.setLevel("INFO")
