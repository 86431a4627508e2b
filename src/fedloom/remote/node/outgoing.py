"""`[outgoing]` of `node.toml`: what may leave a node in replies, whatever a method sends.

A reply is refused by its names and shapes only, never by its numbers, so that a refusal tells
nothing about rows.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import torch
from pydantic import Field

from fedloom.core import message
from fedloom.core.message import Tree
from fedloom.remote.config_file import FileSection
from fedloom.remote.rpc_errors import refused
from fedloom.support.paths import write_atomically

FILE: Final = "sent"


class Outgoing(FileSection):
    """Limits of replies to methods' calls; scores have limits of their own."""

    megabytes: float | None = Field(None, gt=0)
    """Limit of what one run gets from this node in all replies, in megabytes of numbers; None for
    no limit.
    """
    numbers: int | None = Field(None, ge=1)
    """Limit of the numbers of one reply; None for no limit."""
    names: tuple[str, ...] | None = None
    """Allowed names of a reply's parts, such as "weights"; "*" stands for any text. None for any.
    """
    clip: float | None = Field(None, gt=0)
    """Numbers beyond ± clip are sent as ± clip; None for no clipping."""

    def __str__(self) -> str:
        said = [f"at most {self.megabytes:g} MB a run"] if self.megabytes is not None else []
        said += [f"at most {self.numbers:,} numbers a reply"] if self.numbers is not None else []
        said += [f"the parts {', '.join(self.names)}"] if self.names is not None else []
        said += [f"numbers up to ± {self.clip:g}"] if self.clip is not None else []
        return ", ".join(said) or "not limited in size"


class OutgoingFilter:
    """The limits of one run.

    Args:
        limits: the node's.
        folder: of the run, where the bytes that were sent are kept.
    """

    def __init__(self, limits: Outgoing, folder: Path) -> None:
        self._limits, self._path = limits, folder / FILE
        self._sent = int(self._path.read_text(encoding="utf-8")) if self._path.exists() else 0

    def __call__(self, reply: Tree) -> Tree:
        """The reply as it may leave.

        Raises:
            CallRefused: a name, or the size, is not allowed.
            OSError: its size cannot be recorded; nothing may be sent.
        """
        limits, parts = self._limits, reply if isinstance(reply, dict) else {}
        for name in parts if limits.names is not None else ():
            if not any(fnmatchcase(name, pattern) for pattern in limits.names or ()):
                raise refused(
                    f"this site lets no part {ascii(name)[:60]} of a reply out ([outgoing] names)"
                )
        count, size = 0, 0

        def clipped(x: torch.Tensor) -> torch.Tensor:
            nonlocal count, size
            count, size = count + x.numel(), size + x.numel() * x.element_size()
            return (
                x.clamp(-limits.clip, limits.clip)
                if limits.clip is not None and x.is_floating_point()
                else x
            )

        sent = message.map_tensors(clipped, reply)
        if limits.numbers is not None and count > limits.numbers:
            raise refused(
                f"this site sends at most {limits.numbers} numbers in a reply, and this one has "
                f"{count}"
            )
        if limits.megabytes is not None:
            if self._sent + size > limits.megabytes * 1e6:
                raise refused(
                    f"this site sends a run at most {limits.megabytes:g} MB ([outgoing] megabytes)"
                )
            self._sent += size
            write_atomically(self._path, str(self._sent).encode())
        return sent
