"""A node's state on disk, written atomically before the reply is sent.

Each run has a folder: `run.json` describes the run; `state` has the party's state, the number of
the call that produced it and its reply; `left-N` has the replies that call N left for peers;
`mark-T` is the state before round T; `end` is the last state of an earlier start of the
coordinator, for one that resumes from its last checkpoint. Every state file carries its checksum. A
call that changed nothing writes nothing: repeated, it gives the same reply.

How a coordinator that was killed resumes from its checkpoint of 4 rounds (0 to 3), while this node
was in round 7 (`kept` was 2, 4), with the node's files after each step:

    coordinator                     node                        state       marks     end
    killed                                                      call 90     2, 4, 7   -
    open: a newer start, resume --> set_aside                   -           2, 4, 7   call 90
                                    write, begin                UNPLACED    2, 4, 7   call 90
    restore: 4 -------------------> before(4) reads mark-4
                                    go_back(4)                  call -1     2, 4      call 90
    do, in round 4 ---------------> mark(4), then write         call 97     4         call 90

A mark is made when the first call of its round comes, and holds the state before it; a round in
which the party was not called has none, and the next mark is as good. Where there is no later one,
`end` is. Each call names the rounds that the coordinator may return to (`kept`, those of its last
two checkpoints); marks that none of them needs are deleted. An interrupted step leaves UNPLACED, or
no `state`: the coordinator then opens the run again, and `end` stays as it is.
"""

import csv
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, Final

import safetensors.torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.core.party import NETWORK_STATE
from fedloom.remote import payload
from fedloom.remote.payload import VERSIONS
from fedloom.support.paths import lock, write_atomically

UNPLACED: Final = -2
"""In place of a call's number: a new party for a start that resumes, before `restore`."""
_LIMITS = Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_SUM = hashlib.blake2b().digest_size


@dataclass(frozen=True)
class StoredState:
    """The content of one state file.

    Attributes:
        start: of the coordinator whose call it was.
        call: the number of the call; -1 before the first, or `UNPLACED`.
        round: the round of it.
        reply: to it, as it was sent, and sent again if the call is repeated.
        state: of the party.
    """

    start: int
    call: int
    round: int
    reply: bytes = b""
    state: Tree = None


class Store:
    """The folder of one run. Any method may raise OSError; then nothing has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of a run, as the last step of its start: an interrupted start leaves
        none.
        """
        text = json.dumps({"version": VERSIONS, **facts}, indent=2)
        write_atomically(self.folder / "run.json", text.encode())

    def facts(self) -> dict[str, Any] | None:
        """The facts of the run; None if there are none, or another version of fedloom
        wrote them.
        """
        try:
            facts = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) and facts.get("version") == VERSIONS else None

    def write(self, entry: StoredState, name: str = "state") -> None:
        """Write an entry."""
        head: Tree = {"start": entry.start, "call": entry.call, "round": entry.round}
        parts = [message.encode(head), entry.reply, message.encode(entry.state, _LIMITS)]
        pieces = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
        checksum = hashlib.blake2b()
        for piece in pieces:
            checksum.update(piece)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / name, [*pieces, checksum.digest()])

    def read(self, name: str = "state") -> StoredState | None:
        """The entry of this name; None if it does not exist.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self.folder / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        body = memoryview(data)[:-_SUM]
        if hashlib.blake2b(body).digest() != data[-_SUM:]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
        parts: list[memoryview] = []
        while body:
            length = int.from_bytes(body[:8], "little")
            parts.append(body[8 : 8 + length])
            body = body[8 + length :]
        try:
            head: Any = message.decode(parts[0])
            return StoredState(
                head["start"],
                head["call"],
                head["round"],
                bytes(parts[1]),
                message.decode(parts[2], _LIMITS),
            )
        except (MessageError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a node's state: {error}") from None

    def write_model(self, state: Mapping[str, Tree], about: Mapping[str, Any]) -> Path:
        """Write a party's exported state to `model.safetensors`, for the node's owner.

        Weights have the names of the network's, other tensors their path, such as `trees.root`;
        what is no tensor is JSON in the metadata, by its path. `about` is in it, too.
        """
        tensors: dict[str, Tensor] = {}
        other: dict[str, str] = {}
        for name, tree in state.items():
            for at, leaf in _leaves(tree, "" if name in NETWORK_STATE else name):
                if isinstance(leaf, Tensor):
                    tensors[at] = leaf.detach().cpu().clone().contiguous()
                else:
                    other[at] = json.dumps(leaf)
        said = {name: str(value) for name, value in about.items()}
        path = self.folder / "model.safetensors"
        write_atomically(path, safetensors.torch.save(tensors, {**other, **said}))
        return path

    def write_scores(self, round: int, model: str, scores: Mapping[str, float]) -> None:
        """Append exact scores of a model on the node's own rows to `scores.csv`, for the node's
        owner.
        """
        path = self.folder / "scores.csv"
        lines = [] if path.exists() else [["round", "model", *scores]]
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [*lines, [round + 1, model, *(f"{value:.6g}" for value in scores.values())]]
            )

    def keep_left(self, call: int, left: Mapping[str, bytes]) -> None:
        """Write the replies that a call has left for peers, by their keys."""
        data = payload.pack({"keys": [*left]}, *left.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"left-{call}", data)

    def left(self) -> dict[str, tuple[int, bytes]]:
        """All replies that calls have left for peers, with the call, by key."""
        found: dict[str, tuple[int, bytes]] = {}
        for path in self.folder.glob("left-*"):
            with suppress(MessageError):  # peers then miss a message, as of a node that is away
                head, parts = payload.unpack(path.read_bytes(), limits=_LIMITS)
                call = int(path.name.removeprefix("left-"))
                found |= {
                    key: (call, bytes(part)) for key, part in zip(head["keys"], parts, strict=True)
                }
        return found

    def drop_left(self, but: Collection[int]) -> None:
        """Delete the replies left for peers, but those of these calls."""
        for path in self.folder.glob("left-*"):
            if int(path.name.removeprefix("left-")) not in but:
                path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete the run's folder if it holds the initial state only."""
        if {path.name for path in self.folder.glob("*")} <= {"run.json", "state"}:
            shutil.rmtree(self.folder, ignore_errors=True)

    def mark(self, round: int, keep: Collection[int]) -> None:
        """Mark the state as the one before this round, and delete marks that no round in `keep`
        needs.

        A round in which the party did not take part has no mark; the next mark holds the same
        state.
        """
        self._link(round)
        marks = self._marks()
        # for each round to keep, the state before it: the first mark from it on
        needed = {round, *(min(m for m in marks if m >= k) for k in keep if k <= round)}
        self._unlink(set(marks) - needed)

    def before(self, round: int) -> StoredState | None:
        """The state before this round of an earlier start; None if it was deleted."""
        later = [m for m in self._marks() if m >= round]
        if later:
            return self.read(f"mark-{min(later)}")
        end = self.read("end")
        return end if end is not None and end.round < round else None

    def go_back(self, round: int, entry: StoredState) -> None:
        """Write an entry as the state before this round, and delete later marks."""
        self.write(entry)
        self._link(round)
        self._unlink(m for m in self._marks() if m > round)

    def _marks(self) -> list[int]:
        """The rounds that have a mark."""
        names = (path.name.removeprefix("mark-") for path in self.folder.glob("mark-*"))
        return [int(name) for name in names if name.isdecimal()]

    def _link(self, round: int) -> None:
        """Mark the state; an existing mark is replaced atomically."""
        state = self.folder / "state"
        target = self.folder / f"mark-{round}"
        draft = self.folder / ".mark.draft"
        draft.unlink(missing_ok=True)
        try:
            os.link(state, draft)
        except OSError:  # a file system without links
            write_atomically(target, state.read_bytes())
            return
        os.replace(draft, target)
        draft.unlink(missing_ok=True)  # os.replace leaves it if both are the same file

    def _unlink(self, rounds: Iterable[int]) -> None:
        for round in rounds:
            (self.folder / f"mark-{round}").unlink(missing_ok=True)

    def set_aside(self, *, marks: bool) -> None:
        """Delete the state, for another start of the run.

        Args:
            marks: keep what `before` needs: the marks, and the last state that was not `UNPLACED`
                as `end`. Files of another version of fedloom are deleted, and so is a damaged
                state.
        """
        state, end = self.folder / "state", self.folder / "end"
        marks = marks and self.facts() is not None
        if marks:
            with suppress(CheckpointError):
                last = self.read()
                if last is not None and last.call != UNPLACED:
                    os.replace(state, end)
        self.drop_left(())
        for path in [state] if marks else [state, end, *self.folder.glob("mark-*")]:
            path.unlink(missing_ok=True)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    if isinstance(tree, Mapping | list | tuple) and len(tree):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, tree


@contextmanager
def lock_folder(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a node's folder against other processes.

    Raises:
        ConfigError: another process holds the lock, and `wait` is false.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as file:
        if not lock(file, wait=wait):
            raise ConfigError(
                f"state: another process uses {folder}: stop it, or set state to another folder"
            )
        yield


def prune(
    folder: Path, keep: int, using: Collection[str], days: int | None = None
) -> list[tuple[str, str]]:
    """Delete the folders of all but the newest `keep` runs of each coordinator, except those in
    use.

    Args:
        folder: the node's.
        keep: number of runs.
        using: runs in use.
        days: also delete runs that have not changed for so many days; None for none.

    Returns:
        The coordinator and the run of each deleted folder.
    """
    runs = [
        path
        for path in folder.glob("run-*")
        if path.is_dir() and path.name.removeprefix("run-") not in using
    ]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    newer, dropped = Counter[str](), []
    for path in runs:
        caller = str((Store(path).facts() or {}).get("caller"))
        newer[caller] += 1
        old = days is not None and time() - path.stat().st_mtime > days * 86_400
        if newer[caller] > keep or old:
            shutil.rmtree(path, ignore_errors=True)
            dropped.append((caller, path.name.removeprefix("run-")))
    return dropped
