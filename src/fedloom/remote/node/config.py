"""`node.toml`: what a node is called, where it listens, and what it lets others do.

All of it is the node's own decision. A run that does not fit is refused before any work, with the reason.
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
from fedloom.remote import rpc_errors
from fedloom.remote.config_file import FileSection, RelativeName, RelativePath, read_config
from fedloom.remote.credentials import Credentials, endpoint
from fedloom.remote.node.method_policy import MethodPolicy
from fedloom.remote.rpc_errors import CallRefused


class NodeData(FileSection):
    """`[data.NAME]`: what a run's `data.name` means here."""

    set: str | None = None
    """A data set that everybody has, of which a run gives this node its part."""
    root: RelativeName | None = None
    """A folder with data sets in the hub's layout; otherwise the variable FEDLOOM_DATA, then the hub (set)."""
    rows: RelativePath | None = None
    """A file or folder with this node's own rows: nobody else ever sees one."""
    public: RelativePath | None = None
    """A file with the rows that every party of a run holds (rows)."""
    id: str | None = None
    """The column of the ids by which people are matched with those of others; None for what the run calls it (rows)."""
    align: tuple[Literal["openmined", "plain"], ...] = ("openmined",)
    """How ids may be matched (rows). `plain` shows the coordinator a hash of each, from which they can be guessed."""
    most_ids: int = Field(1_000_000, ge=1, le=MOST)
    """Ids that a coordinator may match with these: of each it learns whether it is here (rows)."""

    @model_validator(mode="after")
    def _one(self) -> NodeData:
        if (self.set is None) == (self.rows is None):
            raise ValueError("give set, a data set that everybody has, or rows, a file of your own")
        if self.rows is None and self.public is not None:
            raise ValueError("public belongs to rows of your own; a set brings its public rows along")
        if self.rows is None and self.id is not None:
            raise ValueError("id is a column of rows of your own; the people of a set need no matching")
        if self.set is None and self.root is not None:
            raise ValueError("root is where a set is looked for: leave it out")
        return self


class NodeConfig(FileSection):
    """A node."""

    name: str = Field(min_length=1)
    """As in its certificate."""
    listen: str | None = None
    """host:port to take calls at."""
    relay: str | None = None
    """host:port of a relay, for a node that can't take calls from outside; instead of `listen`."""
    relay_name: str = "relay"
    """The name in the relay's certificate."""
    state: RelativePath = Path("state")
    """The folder that the node keeps its state in."""
    ca: RelativePath = Path("ca.pem")
    """Who signs the certificates of this federation."""
    certificate: RelativePath = Path("certificate.pem")
    """The node's own."""
    key: RelativePath = Path("key.pem")
    """The key of its certificate."""
    revoked: RelativePath | None = None
    """The list of certificates that count no more, as PEM; read again when it changes."""
    callers: tuple[str, ...] = ("coordinator",)
    """Who may start runs here, by the names in their certificates."""
    peers: Mapping[str, str] = Field(default_factory=dict)
    """Who may fetch what a run leaves here for it, and whom this node fetches from: names, or a table of names and
    host:port. Without an address, the coordinator says where a peer is."""
    methods: Mapping[str, MethodPolicy] = Field(min_length=1)
    """What may be run here: names, or tables with more conditions."""
    pages: tuple[RelativePath, ...] = ()
    """Method pages of your own that are installed here. A run names one by its method's name."""
    factories: tuple[str, ...] = ()
    """Networks and black boxes of your own, as `package.module:factory`, that a run may name."""
    data: Mapping[str, NodeData] = Field(min_length=1)
    """What a run may learn from, by the name that it calls it."""
    most_rounds: int = Field(1000, ge=1)
    """The longest run."""
    least_batch: int = Field(1, ge=1)
    """The smallest batch: the fewer rows in a step, the more it tells about each."""
    least_rows: int = Field(20, ge=1)
    """Of rows or columns of its own: the fewest rows that a run may train on, and the fewest that it may be tested on.
    Who starts a run chooses how they are held out, and of a single row a loss would tell all."""
    secret_noise: bool = True
    """Whether noise for privacy comes from a secret of this node. Otherwise the coordinator, who knows the seed, could
    take it away again; but only then are the numbers those of a run on one machine."""
    evaluate: bool = True
    """Whether the coordinator is told how good the node's model is."""
    notes: bool = True
    """Whether it is told what parties note in a round, such as the norms of gradients."""
    most_runs: int = Field(1, ge=1)
    """Runs at the same time."""
    lease: float = Field(60.0, gt=0)
    """Seconds after the last sign of life of a coordinator until its place may be given to another."""
    queue: int = Field(32, ge=1)
    """Calls that wait for their turn; further ones are told that the node is busy."""
    largest_mb: int = Field(1024, ge=1)
    """Megabytes of one call."""
    keep_runs: int = Field(10, ge=1)
    """How many runs' state is kept."""
    insecure: bool = False
    """No certificates: callers are who they say they are. Only at a loopback address, and only when asked by name."""

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
            raise ValueError("give listen, where others reach this node, or relay, where it can be reached through")
        if self.insecure and not (self.listen or "").startswith(("127.0.0.1:", "localhost:", "[::1]:")):
            raise ValueError("insecure is for a node that listens at a loopback address, such as 127.0.0.1:7443")
        return self

    @property
    def credentials(self) -> Credentials | None:
        """Its certificate; None in the insecure mode."""
        return None if self.insecure else Credentials(self.ca, self.certificate, self.key, self.revoked)


def read(path: Path) -> NodeConfig:
    """A node's config; paths in it are relative to its folder.

    Raises:
        ConfigError: all that is wrong with it, a line each.
    """
    config = read_config(path, NodeConfig, "name a node's file, such as fedloom certs makes")
    if wrong := list(_wrong(config)):
        raise ConfigError("\n".join(f"{path}: {line}" for line in wrong))
    return config


def _wrong(config: NodeConfig) -> Iterator[str]:
    """A sentence for each name that means nothing: such a node would refuse everything."""
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
        yield from (f"methods.{name}.{line}" for line in policy.wrong(installed[name]))
    for name, data in config.data.items():
        for key, path in (("rows", data.rows), ("public", data.public)):
            if path is not None and not path.exists():
                yield f"[data.{name}] {key}: {path} is not there"


def pages(page: Path) -> dict[str, str]:
    """The methods of a page of one's own by name, and how a run on this machine calls them."""
    return {methods.load(page).name: str(page)}


def allow(config: NodeConfig, caller: str, run: RunConfig, method: Method, cfg: Any, rounds: int) -> None:
    """Hold a run to the policy.

    Raises:
        Refused: all that does not fit, and what would.
    """
    if caller not in config.callers:
        raise CallRefused(rpc_errors.REFUSED, "this node takes runs from others, not from you")
    policy = config.methods.get(method.name)
    if policy is None:
        raise CallRefused(rpc_errors.REFUSED, f"the method {method.name} is not allowed here")
    if reasons := [*_unfit(config, policy, run, method, cfg, rounds), *_unknown(config, run, method)]:
        raise CallRefused(rpc_errors.REFUSED, "; ".join(reasons))


def _unfit(
    config: NodeConfig, policy: MethodPolicy, run: RunConfig, method: Method, cfg: Any, rounds: int
) -> Iterator[str]:
    """What the policy does not let a run do."""
    if policy.presets is not None and run.preset not in policy.presets:
        presets = ", ".join(policy.presets)
        yield f"of {method.name} only the presets {presets} are allowed here, not {run.preset}"
    if policy.presets is not None and run.params:
        yield f"{method.name} is allowed here with its presets as they are: leave params out"
    if rounds > config.most_rounds:
        yield f"a run may have {config.most_rounds} rounds here, not {rounds}"
    batch = getattr(cfg, "batch_size", None)
    if isinstance(batch, int) and batch < config.least_batch:
        yield f"a batch has at least {config.least_batch} rows here, not {batch}"
    yield from policy.unmet(method.name, cfg)


def _unknown(config: NodeConfig, run: RunConfig, method: Method) -> Iterator[str]:
    """Why there is no data here of which a run can be."""
    if run.data.name not in config.data:
        yield f"there is no data called {run.data.name!r} here"
        return
    own = run.data.own or run.columns.own
    if own != (config.data[run.data.name].rows is not None):
        kind = "a set that everybody has" if own else "this node's own rows"
        section, say = SETTINGS[method.setting].own_data
        mend = f"leave {section} out" if own else say
        yield f"{run.data.name!r} is {kind} here: {mend}"


def enough(config: NodeConfig, trained: int, tested: int) -> None:
    """Hold a run to the policy by how many rows, or aligned people, of this node's own it is about.

    Raises:
        Refused: it trains on too few, or tests on too few; how many there are is not told.
    """
    if min(trained, tested) < config.least_rows:
        words = f"a run trains on at least {config.least_rows} rows of this node's own, and tests on as many others"
        raise CallRefused(rpc_errors.REFUSED, f"{words}: this one has too few (see data.test_rows, data.test_fraction)")
