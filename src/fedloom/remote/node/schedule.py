"""The calls that a node has answered in each round of a run: its method says how many there are,
not the caller.

The record is a file of lines, which survives a restart of the node and a return to an earlier
round. A round that is repeated then has the arguments that it had, so that going back asks nothing
new; with fresh noise later arguments differ, and are refused.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Final

from fedloom.remote.node.lines import Lines
from fedloom.remote.rpc_errors import refused

FILE: Final = "calls.jsonl"


class CallRecord:
    """The calls of one run.

    Args:
        folder: of the run.
        brief: the methods whose arguments matter in their round alone: those of sums that stand
            alone.
    """

    def __init__(self, folder: Path, brief: Collection[str] = ()) -> None:
        self._brief = brief
        # call, round, method, arguments; in order
        self._asked: list[tuple[int, int, str, str]] = []
        self._lines = Lines(folder / FILE)
        self._newest = -1  # of the rounds in _now
        # call number -> arguments
        self._now: dict[tuple[int, str, int], dict[int, str]] = defaultdict(dict)
        self._ever: dict[tuple[int, str, int], list[str]] = defaultdict(list)
        for line in self._lines.read():
            self._add(line)

    def take(
        self,
        call: int,
        round: int,
        method: str,
        asker: int,
        arguments: str,
        most: int,
        *,
        again: bool,
    ) -> None:
        """Record a call before it is answered.

        Args:
            call: its number; a call that is repeated has the same one.
            round: of the call.
            method: of the party.
            asker: the peer whose question it answers; -1 for none.
            arguments: their hash.
            most: how often a round calls this method, for each asker.
            again: whether equal arguments may be answered more often.

        Raises:
            CallRefused: the call is out of turn.
            OSError: the record cannot be written; nothing may be answered.
        """
        key = round, method, asker
        now, ever = self._now[key], self._ever[key]
        if now.get(call) == arguments or (again and arguments in now.values()):
            return
        if round < self._newest:
            raise refused(f"round {round} is over at this node")
        if len(now) >= most:
            raise refused(
                f"a round calls {method} {most} times, and this node has answered it that often"
            )
        if len(ever) >= most and arguments not in ever:
            raise refused(
                f"{method} was answered in round {round} with other arguments, before this node "
                "went back"
            )
        self._write([call, *key, arguments])

    def past(self, round: int, call: int = -1) -> str:
        """The hash of what this node was asked before, as of nodes that were asked alike, whether a
        sum was opened or
        not: a sum that is begun and dropped teaches a party, too.

        Args:
            round: of the sum.
            call: the number of the call to be summed, which is left out if it is the newest; -1 for
                none.
        """
        before = self._asked[:-1] if self._asked and self._asked[-1][0] == call else self._asked
        lines = [
            f"{at} {what} {how}\n"
            for _, at, what, how in before
            if at == round or what not in self._brief
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def back(self, round: int) -> None:
        """Record that the run continues before this round."""
        if self._ever:
            self._write([round])

    def _write(self, line: list[int | str]) -> None:
        self._lines.append(line)
        self._add(line)

    def _add(self, line: list[int | str]) -> None:
        if len(line) == 1:
            self._now = defaultdict(
                dict, {key: calls for key, calls in self._now.items() if key[0] < int(line[0])}
            )
            self._newest = max((known for known, *_ in self._now), default=-1)
            self._asked = [asked for asked in self._asked if asked[1] < int(line[0])]
            return
        call, round, method, asker, arguments = line
        key = int(round), str(method), int(asker)
        self._now[key][int(call)] = str(arguments)
        self._newest = max(self._newest, key[0])
        if asker == -1:
            self._asked.append((int(call), int(round), str(method), str(arguments)))
        if arguments not in self._ever[key]:
            self._ever[key].append(str(arguments))
