"""What a node remembers, on its own disk: written before a reply goes out, whole or not at all.

A run has a folder. In it lie `run.json`, how the run began; `state`, what the party remembers, with the number of the
call that made it so and the reply to it; `mark-T`, the state as it was before round T, and `end`, how an earlier start
of the coordinator ended, for one that comes back from its last checkpoint. Every file carries its checksum. A call that
changed nothing leaves no trace: made again it gives the same reply.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.core.party import Party
from fedloom.core.paths import lock
from fedloom.experiment.checkpoint import write_atomically

UNPLACED: Final = -2
"""In place of a call's number: a party made anew for a start that resumes, before it is told where to go on."""
_LIMITS = Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_SUM = hashlib.blake2b().digest_size


@dataclass(frozen=True)
class StoredState:
    """What one file says.

    Attributes:
        start: of the coordinator whose call it was.
        call: the number of the call; -1 before the first, or `UNPLACED`.
        round: the round of it.
        reply: to it, as it was sent; what repeats of the call get.
        state: of the party.
    """

    start: int
    call: int
    round: int
    reply: bytes = b""
    state: Tree = None


class Store:
    """The folder of one run.

    Raises OSError, of whichever method, where the disk refuses: then nothing has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Remember how the run began. Last of all: a start that was cut short has not happened."""
        text = json.dumps({"version": __version__, **facts}, indent=2)
        write_atomically(self.folder / "run.json", text.encode())

    def facts(self) -> dict[str, Any] | None:
        """How the run began; None if there is none, or one of another version of fedloom."""
        try:
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("version") == __version__ else None

    def write(self, entry: StoredState, name: str = "state") -> None:
        """Put an entry down."""
        head: Tree = {"start": entry.start, "call": entry.call, "round": entry.round}
        parts = [message.encode(head), entry.reply, message.encode(entry.state, _LIMITS)]
        body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, [body, hashlib.blake2b(body).digest()])

    def read(self, name: str = "state") -> StoredState | None:
        """The entry of this name; None if there is none.

        Raises:
            CheckpointError: it is torn or altered.
        """
        path = self.folder / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        body = memoryview(data)[:-_SUM]
        if hashlib.blake2b(body).digest() != data[-_SUM:]:
            raise CheckpointError(f"{path} is torn or altered: its checksum does not match its content")
        parts: list[memoryview] = []
        while body:
            length = int.from_bytes(body[:8], "little")
            parts.append(body[8 : 8 + length])
            body = body[8 + length :]
        try:
            head: Any = message.decode(parts[0])
            return StoredState(
                head["start"], head["call"], head["round"], bytes(parts[1]), message.decode(parts[2], _LIMITS)
            )
        except (MessageError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no state of a node: {error}") from None

    def write_model(self, party: Party[Any], facts: Mapping[str, Any]) -> None:
        """Write the party's network, if it has one, as `model.safetensors`: for this node's own use, in any program."""
        if party._network is None:
            return
        state = party.net.state()
        tensors = {name: x.detach().clone().contiguous() for name, x in {**state["params"], **state["buffers"]}.items()}
        about = {name: str(facts[name]) for name in ("method", "network", "classes", "shape") if name in facts}
        write_atomically(self.folder / "model.safetensors", safetensors.torch.save(tensors, about))

    def forget(self) -> None:
        """Drop the run's folder, if all that it has is how the party was at first."""
        if {path.name for path in self.folder.glob("*")} <= {"run.json", "state"}:
            shutil.rmtree(self.folder, ignore_errors=True)

    def mark(self, round: int, keep: Collection[int]) -> None:
        """Keep the state as what it is before this round; drop marks but those that lead back to rounds to keep.

        A party that has no part in some rounds has no marks of them: the next one is as good.
        """
        self._link(round)
        marks = self._marks()
        needed = {round, *(min(m for m in marks if m >= k) for k in keep if k <= round)}
        self._unlink(set(marks) - needed)

    def before(self, round: int) -> StoredState | None:
        """The state as it was before this round of an earlier start; None if it is not known any more."""
        later = [m for m in self._marks() if m >= round]
        if later:
            return self.read(f"mark-{min(later)}")
        end = self.read("end")
        return end if end is not None and end.round < round else None

    def go_back(self, round: int, entry: StoredState) -> None:
        """Put an entry down as the state before this round; what was later has not happened."""
        self.write(entry)
        self._link(round)
        self._unlink(m for m in self._marks() if m > round)

    def _marks(self) -> list[int]:
        """The rounds that have one."""
        names = (path.name.removeprefix("mark-") for path in self.folder.glob("mark-*"))
        return [int(name) for name in names if name.isdecimal()]

    def _link(self, round: int) -> None:
        """Make the state a mark; a mark that there is lasts until it is replaced."""
        state, target, draft = self.folder / "state", self.folder / f"mark-{round}", self.folder / ".mark.draft"
        draft.unlink(missing_ok=True)
        try:
            os.link(state, draft)
        except OSError:  # a file system without links
            write_atomically(target, state.read_bytes())
            return
        os.replace(draft, target)
        draft.unlink(missing_ok=True)  # it is left where both were one file already

    def _unlink(self, rounds: Iterable[int]) -> None:
        for round in rounds:
            (self.folder / f"mark-{round}").unlink(missing_ok=True)

    def set_aside(self, *, marks: bool) -> None:
        """Drop the state, for another start of the run.

        Args:
            marks: keep what `before` needs: the marks, and how the last start ended that was not `UNPLACED`. Those of
                another version of fedloom are dropped, and so is a torn state.
        """
        state, end = self.folder / "state", self.folder / "end"
        marks = marks and self.facts() is not None
        if marks:
            with suppress(CheckpointError):
                last = self.read()
                if last is not None and last.call != UNPLACED:
                    os.replace(state, end)
        for path in [state] if marks else [state, end, *self.folder.glob("mark-*")]:
            path.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a node's folder: two processes that both work on it would undo each other's work.

    Raises:
        ConfigError: another one holds it, and is not to be waited for.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as file:
        if not lock(file, wait=wait):
            words = "stop that one, or give this one another folder as state"
            raise ConfigError(f"state: another process works on {folder}: {words}")
        yield


def prune(folder: Path, keep: int, using: Collection[str]) -> list[tuple[str, str]]:
    """Drop all but so many of the newest runs' folders of each coordinator, and none that is in use.

    Returns:
        The coordinator and the run of each that was dropped.
    """
    runs = [path for path in folder.glob("run-*") if path.is_dir() and path.name.removeprefix("run-") not in using]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    newer, dropped = Counter[str](), []
    for path in runs:
        caller = str((Store(path).facts() or {}).get("caller"))
        newer[caller] += 1
        if newer[caller] > keep:
            shutil.rmtree(path, ignore_errors=True)
            dropped.append((caller, path.name.removeprefix("run-")))
    return dropped
