"""`node.toml`: a node's name, its address, and its policy.

The node's owner decides on all of it. A run that violates the policy is refused before any work, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedloom import methods
from fedloom.core.errors import ConfigError, did_you_mean
from fedloom.core.method import Method
from fedloom.data.alignment import MOST
from fedloom.experiment.build import SETTINGS
from fedloom.experiment.config import RunConfig
from fedloom.methods import registry
from fedloom.remote.config_file import FileSection, RelativeName, RelativePath, read_config
from fedloom.remote.credentials import Credentials, endpoint
from fedloom.remote.node.method_policy import MethodPolicy
from fedloom.remote.rpc_errors import refused


class NodeData(FileSection):
    """`[data.NAME]`: the data behind a run's `data.name`."""

    set: str | None = None
    """A public data set, of which a run assigns this node its part."""
    root: RelativeName | None = None
    """A folder with data sets in the hub's layout (set); default: the variable FEDLOOM_DATA, then the hub."""
    rows: RelativePath | None = None
    """A file or folder with this node's own rows, which never leave it."""
    public: RelativePath | None = None
    """A file with the run's public rows (rows)."""
    id: str | None = None
    """The column of ids for alignment (rows); None for the run's `columns.id`."""
    align: tuple[Literal["openmined", "plain"], ...] = ("openmined",)
    """Allowed backends of alignment (rows). `plain` sends the coordinator a hash of each id, which can be guessed."""
    most_ids: int = Field(1_000_000, ge=1, le=MOST)
    """Limit of the coordinator's ids in an alignment (rows): it learns of each whether it is here."""

    @model_validator(mode="after")
    def _one(self) -> NodeData:
        if (self.set is None) == (self.rows is None):
            raise ValueError("set exactly one of set (a public data set) and rows (a file of your own)")
        if self.rows is None and self.public is not None:
            raise ValueError("public needs rows; remove it, as a set has its own public rows")
        if self.rows is None and self.id is not None:
            raise ValueError("id needs rows; remove it, as a set needs no alignment")
        if self.set is None and self.root is not None:
            raise ValueError("root needs set; remove it")
        return self


class NodeConfig(FileSection):
    """A node's name, address and policy."""

    name: str = Field(min_length=1)
    """The name in its certificate."""
    listen: str | None = None
    """host:port to listen at."""
    relay: str | None = None
    """host:port of a relay, for a node without an open port; instead of `listen`."""
    relay_name: str = "relay"
    """The name in the relay's certificate."""
    state: RelativePath = Path("state")
    """The folder for the node's state."""
    ca: RelativePath = Path("ca.pem")
    """Certificates of the CA of this federation."""
    certificate: RelativePath = Path("certificate.pem")
    """The node's certificate."""
    key: RelativePath = Path("key.pem")
    """The key of its certificate."""
    revoked: RelativePath | None = None
    """PEM list of revoked certificates (CRL), read again when it changes."""
    callers: tuple[str, ...] = ("coordinator",)
    """Names of the coordinators that may start runs here."""
    peers: Mapping[str, str] = Field(default_factory=dict)
    """Peers that may fetch messages left for them here, and from which this node fetches: names, or a table of names
    and host:port. Without an address, the coordinator gives it."""
    methods: Mapping[str, MethodPolicy] = Field(min_length=1)
    """Allowed methods: names, or tables with more conditions."""
    pages: tuple[RelativePath, ...] = ()
    """Files of your own method pages. A run refers to one by its method's name."""
    factories: tuple[str, ...] = ()
    """Your own networks and black boxes that a run may use, as `package.module:factory`."""
    data: Mapping[str, NodeData] = Field(min_length=1)
    """The data for runs, by their `data.name`."""
    most_rounds: int = Field(1000, ge=1)
    """Limit of a run's rounds."""
    least_batch: int = Field(1, ge=1)
    """Smallest batch size: the fewer rows in a step, the more it reveals about each."""
    least_rows: int = Field(20, ge=1)
    """With rows or columns of its own: smallest number of rows that a run may train on, and test on. The coordinator
    chooses the split, and the loss of a single row would reveal it."""
    secret_noise: bool = True
    """Whether noise for privacy is drawn from a secret of this node. Otherwise the coordinator, which knows the seed,
    could subtract the noise. Set it to false only to reproduce a run on one machine."""
    evaluate: bool = True
    """Whether the coordinator may evaluate the node's model."""
    notes: bool = True
    """Whether the coordinator receives the party's notes, such as norms of gradients."""
    most_runs: int = Field(1, ge=1)
    """Limit of runs at the same time."""
    lease: float = Field(60.0, gt=0)
    """Seconds after a coordinator's last heartbeat until another run may take its slot."""
    queue: int = Field(32, ge=1)
    """Limit of waiting calls; further ones are refused as busy."""
    largest_mb: int = Field(1024, ge=1)
    """Limit of one call, in megabytes."""
    keep_runs: int = Field(10, ge=1)
    """Number of runs whose state is kept."""
    insecure: bool = False
    """No certificates; callers state their own names. For a loopback address only."""

    @field_validator("methods", mode="before")
    @classmethod
    def _names(cls, methods: Any) -> Any:
        return {name: {} for name in methods} if isinstance(methods, list | tuple) else methods

    @field_validator("peers", mode="before")
    @classmethod
    def _anywhere(cls, peers: Any) -> Any:
        return dict.fromkeys(peers, "") if isinstance(peers, list | tuple) else peers

    @model_validator(mode="after")
    def _reachable(self) -> NodeConfig:
        if self.listen is not None and self.relay is not None:
            raise ValueError("set either listen (a host:port of this machine) or relay (a relay's host:port), not both")
        if self.insecure and not (self.listen or "").startswith(("127.0.0.1:", "localhost:", "[::1]:")):
            raise ValueError("insecure = true needs listen at a loopback address, such as 127.0.0.1:7443")
        return self

    @property
    def credentials(self) -> Credentials | None:
        """The node's certificate; None in the insecure mode."""
        return None if self.insecure else Credentials(self.ca, self.certificate, self.key, self.revoked)


def read(path: Path) -> NodeConfig:
    """A node's config; paths in it are relative to its folder.

    Raises:
        ConfigError: everything that is wrong with the file, one line each.
    """
    config = read_config(path, NodeConfig, "give the path of a node.toml; fedloom certs writes one")
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(f"{path}: {line}" for line in problems))
    return config


def _problems(config: NodeConfig) -> Iterator[str]:
    """A sentence for each invalid address, unknown method or missing file."""
    for name in ("listen", "relay"):
        try:
            endpoint(getattr(config, name) or "unix:")
        except ConfigError as error:
            yield f"{name}: {error}"
    installed = registry() | {methods.load(page).name: methods.load(page) for page in config.pages}
    for name, policy in config.methods.items():
        if name not in installed:
            yield f"methods: there is no method {name!r}.{did_you_mean(name, installed)}"
            continue
        yield from (f"methods.{name}.{line}" for line in policy.problems(installed[name]))
    for name, data in config.data.items():
        for key, path in (("rows", data.rows), ("public", data.public)):
            if path is not None and not path.exists():
                yield f"[data.{name}] {key}: {path} does not exist"


def check_policy(config: NodeConfig, caller: str, run: RunConfig, method: Method, cfg: Any, rounds: int) -> None:
    """Check a run against the policy.

    Raises:
        CallRefused: every violation, and what is allowed.
    """
    if caller not in config.callers:
        raise refused("you are not among this node's callers")
    policy = config.methods.get(method.name)
    if policy is None:
        raise refused(f"this node does not allow the method {method.name}")
    if violations := [*_violations(config, policy, run, method, cfg, rounds)]:
        raise refused("; ".join(violations))


def _violations(
    config: NodeConfig, policy: MethodPolicy, run: RunConfig, method: Method, cfg: Any, rounds: int
) -> Iterator[str]:
    """A sentence for each setting of a run that the policy does not allow, and for missing data."""
    if policy.presets is not None and run.preset not in policy.presets:
        yield f"preset {run.preset} of {method.name} is not allowed here; allowed: {', '.join(policy.presets)}"
    if policy.presets is not None and run.params:
        yield f"presets of {method.name} may not be changed here: leave params out"
    if rounds > config.most_rounds:
        yield f"the run has {rounds} rounds; this node allows at most {config.most_rounds}"
    batch = getattr(cfg, "batch_size", None)
    if isinstance(batch, int) and batch < config.least_batch:
        yield f"batch_size is {batch}; this node requires at least {config.least_batch}"
    yield from policy.violations(method.name, cfg)
    if run.data.name not in config.data:
        yield f"this node has no data {run.data.name!r}"
        return
    own = run.data.own or run.columns.own
    if own != (config.data[run.data.name].rows is not None):
        kind = "a public set" if own else "this node's own rows"
        section, hint = SETTINGS[method.setting].own_data
        yield f"{run.data.name!r} is {kind} here: {f'leave {section} out' if own else hint}"


def check_row_count(config: NodeConfig, trained: int, tested: int) -> None:
    """Check the numbers of this node's own rows, or aligned rows, in a run against the policy.

    Raises:
        CallRefused: too few to train or to test on; the message does not reveal how many there are.
    """
    if min(trained, tested) < config.least_rows:
        words = f"a run must train on at least {config.least_rows} rows of this node's own, and test on as many others"
        raise refused(f"{words}; this one has fewer: change data.test_rows or data.test_fraction")
