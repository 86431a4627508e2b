"""A file of lines of JSON that only grows: a record costs one line, however long the run is."""

import json
import os
from pathlib import Path
from typing import Any


class Lines:
    """The file.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Any]:
        """All lines. The rest of a line that a killed process began is removed: what it records was
        not done.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, line: object) -> None:
        """Add a line, which is on disk afterwards. Raises OSError."""
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
