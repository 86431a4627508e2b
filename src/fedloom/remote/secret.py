"""The secret for privacy noise, so that nobody who knows a run's seed can subtract the noise."""

import secrets
from pathlib import Path

from fedloom.core.errors import ConfigError
from fedloom.support.paths import write_atomically


def secret(path: Path) -> int:
    """The 128 random bits in a file, which is created if it does not exist.

    Raises:
        ConfigError: the file holds anything else.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        write_atomically(path, secrets.token_hex(16).encode())
    text = path.read_text(encoding="utf-8", errors="replace")
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise ConfigError(
            f"{path} is not a secret of 32 hexadecimal digits: restore the file, or remove it to "
            "get a new one"
        )
    return int(text, 16)
