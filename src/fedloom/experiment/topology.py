"""`[topology]` and `[churn]`: the graph of peers, and the clients that are present in each round."""

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
    """`[topology]`: the graph of peers. Methods with a server ignore it."""

    kind: Literal["full", "regular", "ring", "small-world", "groups", "edges"] = "full"
    """`full`: all peers. `regular`: a random graph of one `degree`. `ring`. `small-world`: Watts and Strogatz.
    `groups`: all peers of a group, as in the partition `groups`. `edges`: from a file."""
    degree: int | None = Field(None, ge=1)
    """Number of neighbours (regular, small-world); None for half of the others, or 4 in a small world."""
    rewire: float = Field(0.1, ge=0, le=1)
    """Probability of rewiring a link (small-world)."""
    number: int = Field(5, ge=1)
    """Number of groups (groups)."""
    file: str | None = None
    """File with one link on each line, as two ids from 0 such as `0,1` (edges)."""

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
        """Raise ConfigError if the graph can't exist, without drawing it."""
        if self.kind == "regular":
            graphs.regular_degree(clients, self.degree)
        elif self.kind == "small-world":
            graphs.small_world_degree(clients, self.degree)
        elif self.kind == "groups":
            graphs.groups(clients, self.number)
        elif self.kind == "edges":
            self._edges(clients)

    def graph(self, clients: int, seed: int) -> Graph | None:
        """The neighbours of each client; None for the full graph. Raises ConfigError if the graph can't exist."""
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
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{self.file} can't be read ({reason}): name a file with one link a line") from None
        try:
            return graphs.edges(text, clients)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None


class Away(Section):
    """An absence of a client from round `start` up to, but not including, round `end`. Rounds count from 0."""

    client: int = Field(ge=0)
    """Id of the client."""
    start: int = Field(0, ge=0)
    """First round of the absence; 0 for a client that joins late."""
    end: int | None = Field(None, ge=0)
    """First round after the absence; None if it does not return."""

    @model_validator(mode="after")
    def _order(self) -> Away:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end must be after start, but {self.end} is not after {self.start}")
        return self

    def covers(self, t: int) -> bool:
        """Whether the client is absent in round t."""
        return self.start <= t and (self.end is None or t < self.end)


class ChurnConfig(Section):
    """`[churn]`: clients that join late, leave, or are absent for some rounds. An absent client gets no message."""

    away: tuple[Away, ...] = ()
    """Absences. A client may have several."""

    def present(self, clients: Sequence[int], t: int) -> tuple[int, ...]:
        """The clients that are present in round t, in the given order."""
        absent = {a.client for a in self.away if a.covers(t)}
        return tuple(i for i in clients if i not in absent)

    def check(self, clients: int, rounds: int, unseen: Sequence[int] = ()) -> None:
        """Raise ConfigError for an absence of an unknown client, or a round without training clients."""
        named = {a.client for a in self.away}
        if named and max(named) >= clients:
            raise ConfigError(f"away names client {max(named)}; valid ids are 0–{clients - 1}")
        training = sorted({*range(clients)} - {*unseen})
        if named.issuperset(training):
            for t in sorted({a.start for a in self.away}):  # the number present is lowest where an absence begins
                if t < rounds and not self.present(training, t):
                    raise ConfigError(f"no client is present in round {t}: keep at least one client")
