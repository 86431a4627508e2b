"""A secret that noise for privacy depends on, so that nobody who knows a run's seed can take the noise away again."""

from __future__ import annotations

import secrets
from pathlib import Path

from fedloom.core.errors import ConfigError
from fedloom.experiment.checkpoint import write_atomically


def secret(path: Path) -> int:
    """128 bits that only this machine knows, the same for ever: those of the file, which is made if it is not there.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        write_atomically(path, secrets.token_hex(16).encode())
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise ConfigError(f"{path} is no secret: put back the file that there was, or remove it for a new one")
    return int(text, 16)
