"""`federation.toml`: the coordinator's address, its nodes, and its own certificate."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from fedloom.core.errors import ConfigError
from fedloom.remote.config_file import FileSection, RelativePath, read_config
from fedloom.remote.credentials import Credentials, endpoint, local
from fedloom.remote.frames import RECONNECT, SILENCE


class NodeEntry(FileSection):
    """`[[nodes]]`: a node. The k-th node runs the k-th party of a run that is not colocated with
    the coordinator.
    """

    name: str = Field(min_length=1)
    """As in its certificate."""
    max_rows: int | None = Field(None, ge=1)
    """The largest number of rows that this node may claim in a message; None for the federation's
    `max_rows`.
    """


class OwnFiles(FileSection):
    """`[data.NAME]`: the coordinator's own files, for a run whose parties have rows or columns of
    their own.
    """

    rows: RelativePath | None = None
    """The server's labeled rows, for a method whose server trains on rows; or the file of the
    active party, where parties hold different columns.
    """
    public: RelativePath | None = None
    """Public rows, for a method whose server needs them."""


class FederationConfig(FileSection):
    """The coordinator's view of a federation."""

    nodes: tuple[NodeEntry, ...] = Field(min_length=1)
    """The nodes, in the order of their parties."""
    listen: str
    """host:port that the coordinator listens at, and nodes dial; 0.0.0.0:7443 for all of IPv4."""
    ca: RelativePath = Path("ca.pem")
    """Certificates of the CA of this federation."""
    certificate: RelativePath = Path("certificate.pem")
    """The coordinator's certificate."""
    key: RelativePath = Path("key.pem")
    """The key of its certificate."""
    revoked: RelativePath | None = None
    """PEM list of revoked certificates (CRL), read again when it changes."""
    data: Mapping[str, OwnFiles] = Field(default_factory=dict)
    """The coordinator's own files, by `data.name` of a run."""
    wait: float = Field(60.0, gt=0)
    """Seconds to wait for unreachable nodes that a round needs."""
    deadline: float = Field(3600.0, gt=0)
    """Deadline of one call, in seconds."""
    max_rows: int | None = Field(None, ge=1)
    """The largest number of rows that a node may claim in a message, for a mean that is weighted by
    rows; a message that claims more is dropped. None for no limit.
    """
    silence: float = Field(SILENCE, gt=0)
    """Seconds without a sign of life until a node counts as unreachable."""
    reconnect: float = Field(RECONNECT, ge=0)
    """Seconds that a node whose connection broke may take to connect again, also after a restart:
    its calls are then repeated, so that nothing is lost.
    """
    secret: RelativePath = Path("secret")
    """The coordinator's secret file, created when first needed: see `secret_noise`."""
    secret_noise: bool = True
    """Whether the coordinator draws noise for privacy from its secret. Otherwise nodes, which know
    the seed, could subtract the noise. Set it to false only to reproduce a run on one machine.
    """
    secret_draw: bool = True
    """Whether the test rows are drawn from secret randomness. Otherwise nodes, which know the seed,
    could infer labels from the draw. Set it to false only to reproduce a run on one machine.
    """
    insecure: bool = False
    """No certificates; for nodes at loopback addresses only."""

    @model_validator(mode="after")
    def _sound(self) -> "FederationConfig":
        twice = [name for name, n in Counter(node.name for node in self.nodes).items() if n > 1]
        if twice:
            raise ValueError(f"nodes lists {twice[0]!r} twice; give every node its own name")
        try:
            endpoint(self.listen)
        except ConfigError as error:
            raise ValueError(f"listen: {error}") from None
        if self.insecure and not local(self.listen):
            raise ValueError(
                "insecure = true needs listen at a loopback address, such as 127.0.0.1:7443"
            )
        return self

    @property
    def credentials(self) -> Credentials | None:
        """The coordinator's certificate; None in the insecure mode."""
        return (
            None
            if self.insecure
            else Credentials(self.ca, self.certificate, self.key, self.revoked)
        )


def read(path: Path) -> FederationConfig:
    """The federation of a file; paths in it are relative to its folder.

    Raises:
        ConfigError: all errors in the file, one per line.
    """
    return read_config(
        path, FederationConfig, "give its path by --federation; fedloom certs writes one"
    )
