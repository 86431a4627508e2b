"""`[topology]` and `[churn]`: which clients may speak to each other, and which take part in which rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from fedloom.core import graphs
from fedloom.core.errors import ConfigError
from fedloom.core.graphs import Graph
from fedloom.experiment.section import Section


class TopologyConfig(Section):
    """`[topology]`: which clients may speak to each other. Methods with a server ignore it."""

    kind: Literal["full", "regular", "ring", "small-world", "groups", "edges"] = "full"
    """`full`: everybody to everybody. `regular`: each to `degree` others, drawn by chance. `ring`: to the two next to
    it. `small-world`: a ring of Watts and Strogatz. `groups`: to all of its group, as the partition of that name has
    them. `edges`: as a file says."""
    degree: int | None = Field(None, ge=1)
    """Neighbours of a client (regular, small-world); None for half of the others, in a small world for 4."""
    rewire: float = Field(0.1, ge=0, le=1)
    """The probability that a link is led elsewhere (small-world)."""
    number: int = Field(5, ge=1)
    """How many groups (groups)."""
    file: str | None = None
    """One link per line, as two ids from 0 such as `0,1` (edges)."""

    @model_validator(mode="after")
    def _belongs(self) -> TopologyConfig:
        owners = {
            "degree": ("regular", "small-world"),
            "rewire": ("small-world",),
            "number": ("groups",),
            "file": ("edges",),
        }
        for name, kinds in owners.items():
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and self.kind not in kinds:
                raise ValueError(f"{name} belongs to the kind {' or '.join(kinds)}, not to {self.kind}: leave it out")
        if self.kind == "edges" and self.file is None:
            raise ValueError("the kind edges reads its links from a file: name it with file")
        return self

    def check(self, clients: int) -> None:
        """Refuse a graph that there can't be, without drawing it.

        Raises:
            ConfigError: with what to change.
        """
        if self.kind == "regular":
            graphs.regular_degree(clients, self.degree)
        elif self.kind == "small-world":
            graphs.small_world_degree(clients, self.degree)
        elif self.kind == "groups":
            graphs.groups(clients, self.number)
        elif self.kind == "edges":
            self._edges(clients)

    def graph(self, clients: int, seed: int) -> Graph | None:
        """The neighbours of each client; None where everybody is everybody's.

        Raises:
            ConfigError: there is no such graph.
        """
        if self.kind == "ring":
            return graphs.ring(clients)
        if self.kind == "groups":
            return graphs.groups(clients, self.number)
        if self.kind == "regular":
            return graphs.regular(clients, self.degree, seed=seed)
        if self.kind == "small-world":
            return graphs.small_world(clients, self.degree, self.rewire, seed=seed)
        return self._edges(clients) if self.kind == "edges" else None

    def _edges(self, clients: int) -> Graph:
        try:
            text = Path(self.file or "").read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{self.file} can't be read ({reason}): name a file with one link a line") from None
        try:
            return graphs.edges(text, clients)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None


class Away(Section):
    """A client is not there from round `start` to before round `end`. The first round is 0."""

    client: int = Field(ge=0)
    """Its number."""
    start: int = Field(0, ge=0)
    """The first round without it. One that joins late is away from 0."""
    end: int | None = Field(None, ge=0)
    """The first round with it again; None for good."""

    @model_validator(mode="after")
    def _order(self) -> Away:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end must be after start, but {self.end} is not after {self.start}")
        return self

    def covers(self, t: int) -> bool:
        """Whether it is away in round t."""
        return self.start <= t and (self.end is None or t < self.end)


class ChurnConfig(Section):
    """`[churn]`: clients that join late, leave, or are gone for a while. A round never calls a client that is away."""

    away: tuple[Away, ...] = ()
    """Who is away when. A client may be named several times."""

    def present(self, clients: Sequence[int], t: int) -> tuple[int, ...]:
        """The clients that are present in round t, in their order."""
        gone = {a.client for a in self.away if a.covers(t)}
        return tuple(i for i in clients if i not in gone)

    def check(self, clients: int, rounds: int, unseen: Sequence[int] = ()) -> None:
        """Refuse an absence of an unknown client, and a round without any training client.

        Raises:
            ConfigError: with what to change.
        """
        named = {a.client for a in self.away}
        if named and max(named) >= clients:
            raise ConfigError(f"away names client {max(named)}; valid ids are 0–{clients - 1}")
        training = sorted({*range(clients)} - {*unseen})
        if named.issuperset(training):
            for t in sorted({a.start for a in self.away}):  # the round with the fewest begins an absence
                if t < rounds and not self.present(training, t):
                    raise ConfigError(f"no client is present in round {t}: keep at least one client")
