"""Log lines of a node: for a person, or as JSON for a machine."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from fedloom.support.log_lines import TextFormatter


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
