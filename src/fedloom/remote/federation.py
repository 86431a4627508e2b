"""`federation.toml`: what the coordinator of a federation knows: its nodes, where they are, and its own certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from fedloom.remote.config_file import FileSection, RelativePath, read_config
from fedloom.remote.connections import NodeAddress
from fedloom.remote.credentials import Credentials


class NodeEntry(FileSection):
    """`[[nodes]]`: a node. The first has party 0 of a run, or the first one that does not live with the coordinator."""

    name: str = Field(min_length=1)
    """As in its certificate."""
    address: str | None = None
    """host:port, where it takes calls."""
    relay: str | None = None
    """host:port of the relay through which it is reached, if it can't take calls."""
    relay_name: str = "relay"
    """The name in the relay's certificate."""

    @model_validator(mode="after")
    def _reachable(self) -> NodeEntry:
        if (self.address is None) == (self.relay is None):
            raise ValueError("give address, where the node is, or relay, through which it is reached")
        return self

    @property
    def member(self) -> NodeAddress:
        """The node as the engine takes it."""
        return NodeAddress(self.name, self.address or "", self.relay or "", self.relay_name)


class OwnFiles(FileSection):
    """`[data.NAME]`: the coordinator's own files of a run whose parties have rows or columns of their own."""

    rows: RelativePath | None = None
    """Labelled rows of the server, for a method whose server learns from such; or the file of the party that has the
    labels, where parties have columns of their own."""
    public: RelativePath | None = None
    """The rows that every party holds, for a method whose server needs them too."""


class FederationConfig(FileSection):
    """A federation as its coordinator knows it."""

    nodes: tuple[NodeEntry, ...] = Field(min_length=1)
    """Who takes part, in the order of their parties."""
    ca: RelativePath = Path("ca.pem")
    """Who signs the certificates of this federation."""
    certificate: RelativePath = Path("certificate.pem")
    """The coordinator's own."""
    key: RelativePath = Path("key.pem")
    """The key of its certificate."""
    revoked: RelativePath | None = None
    """The list of certificates that count no more, as PEM."""
    data: Mapping[str, OwnFiles] = Field(default_factory=dict)
    """The coordinator's own files, by `data.name` of a run."""
    wait: float = Field(60.0, gt=0)
    """Seconds to wait for nodes that are away, where a round can't do without them."""
    deadline: float = Field(3600.0, gt=0)
    """Seconds that the work of one call may take."""
    secret: RelativePath = Path("secret")
    """A file that only the coordinator has, made when it is first needed: see `secret_noise`."""
    secret_noise: bool = True
    """Whether the coordinator's own noise for privacy depends on its secret. Otherwise nodes, which know the seed,
    could take it away again; but only then are the numbers those of a run on one machine."""
    secret_draw: bool = True
    """Whether it is drawn by chance that nobody can repeat which of the people that all have are tested. Otherwise
    nodes, which know the seed, could find out labels from who is; but only then are the numbers those of a run on one
    machine."""
    insecure: bool = False
    """No certificates: only with nodes at loopback addresses, and only when asked by name."""

    @model_validator(mode="after")
    def _sound(self) -> FederationConfig:
        twice = [name for name, n in Counter(node.name for node in self.nodes).items() if n > 1]
        if twice:
            raise ValueError(f"nodes: {twice[0]!r} stands there twice; a certificate's name is one node's")
        if self.insecure and any(
            not (node.address or "").startswith(("127.0.0.1:", "localhost:", "[::1]:")) for node in self.nodes
        ):
            raise ValueError("insecure is for nodes at loopback addresses, such as 127.0.0.1:7443")
        return self

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's certificate; None in the insecure mode."""
        return None if self.insecure else Credentials(self.ca, self.certificate, self.key, self.revoked)


def read(path: Path) -> FederationConfig:
    """The federation of a file; paths in it are relative to its folder.

    Raises:
        ConfigError: all that is wrong with it, a line each.
    """
    return read_config(path, FederationConfig, "name the federation's file with --federation; fedloom certs makes one")
