"""The ledger: the sender, receiver, content, number and bytes of all messages.

Reports take their communication figures from it, and privacy tests read it: every message of a
method has an entry.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedloom.core import message
from fedloom.core.message import Size, Tree


@dataclass
class Entry:
    """Messages of one kind between two roles in one round.

    Attributes:
        sender, receiver: roles, such as `client` and `server`.
        kind: the method that the message calls, or whose reply it is.
        what: names, dtypes and shapes of the content.
        count: messages.
        bytes: tensor data, as papers count it.
        wire_bytes: the exact size of the encoded messages, names and framing included.
    """

    round: int
    sender: str
    receiver: str
    kind: str
    what: str
    count: int = 0
    bytes: int = 0
    wire_bytes: int = 0


COLUMNS = tuple(f.name for f in fields(Entry))


class Ledger:
    """All messages of a run: by round, roles, kind and content; and for each (sender, receiver), in
    `pairs`, the number of messages and the bytes of tensor data.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str, str, str, str], Entry] = {}
        self.pairs: dict[tuple[str, str], list[int]] = {}

    def record(self, round: int, sender: str, receiver: str, kind: str, tree: Tree) -> None:
        """Count one message between two parties, with names such as `client-3`."""
        self.add(round, sender, receiver, kind, *message.measured(tree))

    def add(self, round: int, sender: str, receiver: str, kind: str, what: str, size: Size) -> None:
        """Count one message whose content and sizes are known."""
        key = (round, role(sender), role(receiver), kind, what)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(*key)
        entry.count += 1
        entry.bytes += size.payload
        entry.wire_bytes += size.wire
        pair = self.pairs.setdefault((sender, receiver), [0, 0])
        pair[0] += 1
        pair[1] += size.payload

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def sent(self, party: str) -> int:
        """Bytes of tensor data that a party (`client-3`), or all of a role (`client`), sent."""
        return sum(
            size for (sender, _), (_, size) in self.pairs.items() if party in (sender, role(sender))
        )

    def received(self, party: str) -> int:
        """Bytes of tensor data that a party, or all of a role, received."""
        return sum(
            size
            for (_, receiver), (_, size) in self.pairs.items()
            if party in (receiver, role(receiver))
        )

    def state(self) -> dict[str, Any]:
        """Everything as plain lists, for a checkpoint."""
        entries = [[getattr(e, c) for c in COLUMNS] for e in self]
        return {"entries": entries, "pairs": [[*pair, *sums] for pair, sums in self.pairs.items()]}

    def mark(self) -> tuple[int, dict[tuple[str, str], list[int]]]:
        """The position between two rounds, for `rollback`. Unlike `state` it does not copy past
        rounds.
        """
        return len(self._entries), {pair: [*sums] for pair, sums in self.pairs.items()}

    def rollback(self, mark: tuple[int, dict[tuple[str, str], list[int]]]) -> None:
        """Drop all messages of the rounds since `mark`."""
        count, pairs = mark
        for key in [*self._entries][count:]:
            del self._entries[key]
        self.pairs = {pair: [*sums] for pair, sums in pairs.items()}

    def load(self, state: dict[str, Sequence[Iterable[Any]]]) -> None:
        """Restore the result of `state()`."""
        entries = [Entry(*row) for row in state["entries"]]
        self._entries = {(e.round, e.sender, e.receiver, e.kind, e.what): e for e in entries}
        self.pairs = {(a, b): [count, size] for a, b, count, size in state["pairs"]}


def role(party: str) -> str:
    """The role in a party's name: `client` of `client-3`, `server` of `server`."""
    return party.partition("-")[0]
