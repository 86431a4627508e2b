"""Sections of a run's config: columns of vertical runs, peers, and absences."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedloom.core import graphs
from fedloom.core.errors import ConfigError
from fedloom.core.graphs import Graph
from fedloom.data.tables import read_csv
from fedloom.experiment.config.section import Section

SPLIT_SETTINGS = (
    "unaligned",
    "blocks_per_party",
    "grid",
    "balanced",
    "imbalance_ratio",
    "majority_classes",
    "rare_classes",
    "rare_rows",
)
"""Settings that apply only if a data set is split, not to files or manifests."""


class ColumnsConfig(Section):
    """`[columns]`: a data set whose columns are split; or a CSV file for each party, here or at its
    node; or a manifest of images.
    """

    aligned: int | None = Field(None, ge=1)
    """Number of aligned rows, labeled at the active party; None for 200, or all that files have in
    common.
    """
    unaligned: int | None = Field(None, ge=0)
    """Number of unaligned rows of each party; None for all that remain."""
    blocks_per_party: int | None = Field(None, ge=1)
    """Number of column blocks, or image cells, at each party, from its own on; None for 2, or 1 at
    two parties.
    """
    grid: tuple[int, int] | None = None
    """Rows and columns of cells of an image; None for (2, 2) at four parties, else for one that
    fits.
    """
    balanced: bool | None = None
    """Whether aligned rows are balanced over classes; None: for images only."""
    imbalance_ratio: float | tuple[float, ...] = 1.0
    """Γ: ratio of unaligned rows of a majority class to those of another class; one value, or one
    for each party.
    """
    majority_classes: int = Field(1, ge=1)
    """Number of majority classes of a party. With two classes it is the first one."""
    rare_classes: tuple[int, ...] = ()
    """Indices of the classes that are rare among the aligned rows."""
    rare_rows: int = Field(0, ge=0)
    """Number of aligned rows of each rare class: 0 for zero-shot, a few for few-shot."""
    missing: float | tuple[float, ...] | Literal["files"] = 0.0
    """Probability that a party lacks its columns of an aligned row; one value, or one for each
    party. "files": a party lacks the people that are in the active party's file and not in its own.
    """
    missing_test: float | tuple[float, ...] | None = None
    """The same for test rows; None for that of `missing`."""
    missing_seed: int | None = Field(None, ge=0)
    """Seed of these draws; None for the run's."""
    presence: str | None = None
    """CSV file of which party has which row, instead of `missing`. Its first column is the id of
    files, sample_id of a manifest, or row (the number of a row in a data set); then a column for
    each party, with 1 or 0. All parties have the rows that it does not name.
    """
    files: tuple[str, ...] = ()
    """CSV file of each party, the active party's first; instead of `data.name`."""
    id: str | tuple[str, ...] | None = None
    """Id column for aligning rows: one name for all files, or one for each."""
    label: str | None = None
    """Label column of the active party's file."""
    align: Literal["plain", "openmined"] | None = None
    """How ids are aligned: in plain text, or by private set intersection (extra `psi`). None: plain
    for files on this machine, private for nodes.
    """
    private: bool = False
    """Whether files are private: the active party's at the coordinator, the others at nodes. Then
    `id` is the active party's column, and the default of nodes (net).
    """
    manifest: str | None = None
    """CSV file that lists images: sample_id, party, view, path, label; instead of `data.name`."""
    image_size: int = Field(32, ge=1)
    """Side length in pixels of the manifest's images."""

    @field_validator("files", "manifest", "presence")
    @classmethod
    def _whole(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Make paths absolute, as the config may be read from another folder."""
        if isinstance(value, tuple):
            return tuple(_absolute(path) for path in value)
        return _absolute(value) if value else value

    @model_validator(mode="after")
    def _sources(self) -> "ColumnsConfig":
        """Columns come from one source: a data set that is split, files or a manifest here, or
        files at nodes (private); each has settings that the others have not.
        """
        # one source
        if self.files and self.manifest:
            raise ValueError("set files or manifest, not both")
        if self.private and (self.files or self.manifest):
            raise ValueError(
                "with private = true each node names its own file: leave files and manifest out"
            )

        # files have an id and a label, and nothing else has: a manifest has columns of fixed names
        if (self.files or self.private) and (self.id is None or self.label is None):
            raise ValueError(
                "files need id (the column that identifies a row) and label (the column to predict)"
            )
        if not (self.files or self.private) and (self.id is not None or self.label is not None):
            raise ValueError(
                "id and label are columns of files: set files too, or leave id and label out"
            )
        if self.private and isinstance(self.id, tuple):
            raise ValueError(
                "with private = true, id is one name, the active party's column: each node names "
                "its own in node.toml"
            )
        if isinstance(self.id, tuple) and len(self.id) != len(self.files):
            raise ValueError(
                f"id must be one name, or one for each of {len(self.files)} files, not "
                f"{len(self.id)}"
            )
        self._check_missing()

        # nothing but a data set is split: files and manifests say which party has what
        if self.own_data and (useless := [name for name in SPLIT_SETTINGS if self._differs(name)]):
            source = "a manifest" if self.manifest else "files"
            raise ValueError(
                f"{', '.join(useless)} cannot be set with {source}, only for a data set that is "
                "split"
            )
        return self

    def _check_missing(self) -> None:
        """Refuse settings of missing rows that contradict each other."""
        for name in ("missing", "missing_test"):
            value = getattr(self, name)
            shares = (
                value if isinstance(value, tuple) else (value,) if isinstance(value, float) else ()
            )
            if not all(0 <= share <= 1 for share in shares):
                raise ValueError(f"{name} must be from 0 to 1, not {value}")
        drawn = [
            name for name in ("missing", "missing_test", "missing_seed") if self._differs(name)
        ]
        if self.presence and drawn:
            raise ValueError(f"presence says which rows are missing: leave {', '.join(drawn)} out")
        if self.missing == "files" and (not self.files or len(drawn) > 1):
            raise ValueError('missing = "files" needs files, and no missing_test or missing_seed')
        if self.missing == "files" and self.backend != "plain":
            raise ValueError('missing = "files" compares ids in plain text: leave align out')
        if self.private and self.incomplete:
            raise ValueError(
                "with private = true only rows that all nodes have are aligned: leave missing out"
            )

    @property
    def incomplete(self) -> bool:
        """Whether a party may lack aligned or test rows."""
        return bool(self.presence) or any(
            self._differs(name) for name in ("missing", "missing_test")
        )

    def _differs(self, name: str) -> bool:
        """Whether a setting differs from its default; a saved config contains all settings."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def own_data(self) -> bool:
        """Whether the data comes from files, here or at nodes."""
        return bool(self.files or self.manifest or self.private)

    @property
    def backend(self) -> Literal["plain", "openmined"]:
        """How ids are aligned."""
        return self.align or ("openmined" if self.private else "plain")

    def number(self) -> int | None:
        """The number of parties of the files or manifest; None for a data set.

        Raises:
            DataError: the manifest cannot be read.
        """
        if self.manifest:
            return len(set(read_csv(Path(self.manifest), needed=["party"])["party"].text))
        return len(self.files) or None


def _absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).absolute())


class TopologyConfig(Section):
    """`[topology]`: the graph of peers. Methods with a server ignore it."""

    kind: Literal["full", "regular", "ring", "small-world", "groups", "edges"] = "full"
    """`full`: all peers. `regular`: a random graph of one `degree`. `ring`. `small-world`: Watts
    and Strogatz.
    `groups`: all peers of a group, as in the partition `groups`. `edges`: from a file.
    """
    degree: int | None = Field(None, ge=1)
    """Number of neighbours (regular, small-world); None for half of the others, or 4 in a small
    world.
    """
    rewire: float = Field(0.1, ge=0, le=1)
    """Probability of rewiring a link (small-world)."""
    groups: int = Field(5, ge=1)
    """Number of groups (groups)."""
    file: str | None = None
    """File with one link on each line, as two ids from 0 such as `0,1` (edges)."""

    @model_validator(mode="after")
    def _belongs(self) -> "TopologyConfig":
        owners = {
            "degree": ("regular", "small-world"),
            "rewire": ("small-world",),
            "groups": ("groups",),
            "file": ("edges",),
        }
        for name, kinds in owners.items():
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and self.kind not in kinds:
                raise ValueError(
                    f"{name} applies to kind = {' or '.join(kinds)}, not {self.kind}: leave it out"
                )
        if self.kind == "edges" and self.file is None:
            raise ValueError("kind = edges needs file, a file with one link per line")
        return self

    def check(self, clients: int) -> None:
        """Raise ConfigError if the graph cannot exist, without drawing it."""
        if self.kind == "regular":
            graphs.regular_degree(clients, self.degree)
        elif self.kind == "small-world":
            graphs.small_world_degree(clients, self.degree)
        elif self.kind == "groups":
            graphs.groups(clients, self.groups)
        elif self.kind == "edges":
            self._edges(clients)

    def graph(self, clients: int, seed: int) -> Graph | None:
        """The neighbours of each client; None for the full graph. Raises ConfigError if the graph
        cannot exist.
        """
        if self.kind == "ring":
            return graphs.ring(clients)
        if self.kind == "groups":
            return graphs.groups(clients, self.groups)
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
            raise ConfigError(
                f"cannot read {self.file} ({reason}): name a file with one link per line"
            ) from None
        try:
            return graphs.edges(text, clients)
        except ConfigError as error:
            raise ConfigError(f"{self.file}: {error}") from None


class Absence(Section):
    """An absence of a client from round `start` up to, but not including, round `end`. Rounds count
    from 0.
    """

    client: int = Field(ge=0)
    """Id of the client."""
    start: int = Field(0, ge=0)
    """First round of the absence; 0 for a client that joins late."""
    end: int | None = Field(None, ge=0)
    """First round after the absence; None if it does not return."""

    @model_validator(mode="after")
    def _order(self) -> "Absence":
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end must be after start, but {self.end} is not after {self.start}")
        return self

    def covers(self, t: int) -> bool:
        """Whether the client is absent in round t."""
        return self.start <= t and (self.end is None or t < self.end)


class ChurnConfig(Section):
    """`[churn]`: clients that join late, leave, or are absent for some rounds. An absent client
    receives no message.
    """

    away: tuple[Absence, ...] = ()
    """Absences. A client may have several."""

    def present(self, clients: Sequence[int], t: int) -> tuple[int, ...]:
        """The clients that are present in round t, in the given order."""
        absent = {a.client for a in self.away if a.covers(t)}
        return tuple(i for i in clients if i not in absent)

    def check(self, clients: int, rounds: int, unseen: Sequence[int] = ()) -> None:
        """Raise ConfigError for an absence of an unknown client, or a round without training
        clients.
        """
        named = {a.client for a in self.away}
        if named and max(named) >= clients:
            raise ConfigError(f"away names client {max(named)}; valid ids are 0–{clients - 1}")
        training = sorted({*range(clients)} - {*unseen})
        if named.issuperset(training):
            for t in sorted(
                {a.start for a in self.away}
            ):  # the number of present clients is lowest where an absence begins
                if t < rounds and not self.present(training, t):
                    raise ConfigError(
                        f"no client is present in round {t}: keep at least one client"
                    )
