"""`node.toml`: a node's name, the coordinators that it dials, and its policy.

The node's owner decides on all of it. A run that violates the policy is refused before any work,
with the reason.

`read` makes a `NodeConfig` of the file when the node starts. Whenever a coordinator sends a run's
config, `NodeService` calls `check_policy` with it, and `check_sums` once the run's other nodes are
known; `check_row_count` follows when the rows are read. All raise `CallRefused`, whose sentences
reach the coordinator: they name settings of both files, and tell nothing of rows.

Of the two configs, `config` is this node's and `run` the coordinator's. Both describe the columns
of this node's own rows, `[data.NAME]` here and `[data.row_schema]` there, and they must agree.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from fedloom import methods
from fedloom.core.errors import ConfigError, DataError, did_you_mean
from fedloom.core.faults import Faults
from fedloom.core.method import Method
from fedloom.data.alignment import MOST
from fedloom.data.grammar import MISSING_WORDS, Decimal
from fedloom.data.options import DataOptions, Encoding, Missing, OwnFile
from fedloom.data.roles import allowed
from fedloom.data.schema import check_own
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import PLANNERS
from fedloom.experiment.plan.demand import members_of_rounds
from fedloom.experiment.plan.settings.rows import unbounded
from fedloom.methods import registry
from fedloom.remote.config_file import FileSection, RelativeName, RelativePath, read_config
from fedloom.remote.credentials import Credentials, endpoint, local
from fedloom.remote.node.method_policy import MethodPolicy
from fedloom.remote.node.outgoing import Outgoing
from fedloom.remote.rpc_errors import refused

LEAST_SUM: Final = 3
"""The fewest nodes of a secure sum that an owner may allow."""
_log = logging.getLogger("fedloom.node")


class NodeData(FileSection):
    """`[data.NAME]`: the data behind a run's `data.name`."""

    dataset: str | None = None
    """A public data set, of which a run assigns this node its part."""
    root: RelativeName | None = None
    """A folder with data sets in the hub's layout (dataset); default: the variable FEDLOOM_DATA,
    then the hub.
    """
    rows: RelativePath | None = None
    """A file or folder with this node's own rows, which is never sent; what a method sends is
    computed from rows.
    """
    public: RelativePath | None = None
    """A file with the run's public rows (rows)."""
    id: str | None = None
    """The column that names each row (rows), never an input; where parties hold columns of their
    own, the column of ids for alignment; None for the run's `columns.id`.
    """
    align: tuple[Literal["openmined", "plain"], ...] = ("openmined",)
    """Allowed backends of alignment (rows). `plain` sends the coordinator a hash of each id, which
    can be guessed.
    """
    keep: tuple[str, ...] = ()
    """The only columns of a table that runs may use as input (rows); "*" stands for any text."""
    drop: tuple[str, ...] = ()
    """Columns that no run may use, of those in `keep` (rows)."""
    label: str | None = None
    """The column that runs may use as label (rows)."""
    classes: tuple[str, ...] = ()
    """The words of `label`: a run has these classes, and rows with another word are left out
    (rows).
    """
    label_scale: tuple[float, float] | None = None
    """Mean and s.d. of a `label` that is a number, which a run must have agreed on; in place of
    `classes` (rows).
    """
    categories: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    """The words of each column that is a category, "?" for a missing one: a run has these, and
    another word in the file counts as none of them (rows). Other columns in `keep` are numbers, but
    for those of `encode`.
    """
    encode: Mapping[str, Encoding] = Field(default_factory=dict)
    """The columns that are texts or dates: a run has the same (rows)."""
    lacks: tuple[str, ...] = ()
    """Columns that the file does not have: a run with `data.missing_columns = "allow"` may take
    them as missing here (rows).
    """
    group: str | None = None
    """The column of the rows' owners (rows)."""
    owner: str | None = None
    """The only owner in `group` whose rows are used (rows); None where the file has one owner."""
    missing: Missing | None = None
    """The replacement of a missing number (rows); None for the run's `data.missing`."""
    missing_words: tuple[str, ...] = MISSING_WORDS
    """Words that stand for a missing value, in every column of a table (rows); an empty cell always
    does.
    """
    decimal: Decimal = "."
    """The sign before the decimals of a number in a table, "." or "," (rows)."""
    test: float | str | None = None
    """The share of test rows, or the column that says train or test (rows); None for the run's
    `data.test_fraction`.
    """
    score: bool = False
    """Whether the coordinator may have its models scored on held-out rows of this file (rows)."""
    looks: int = Field(100, ge=0)
    """Limit of the scores of this file, over all runs and callers (rows)."""
    epsilon: float = Field(10.0, gt=0)
    """Limit of ε of all private messages about this file, over all runs and callers, while STATE is
    not replaced; inf for none (rows).
    """
    delta: float = Field(1e-5, gt=1e-10, lt=1)
    """The δ of `epsilon` (rows)."""
    reply_every: float | None = Field(None, gt=0)
    """Seconds: a reply with differential privacy leaves at a multiple of these after its work
    began, and no other work begins before, so that its time tells nothing of rows (rows). Set it
    above the slowest call; None sends each reply when it is ready.
    """
    people: str | None = None
    """The name of the people whose rows these are (rows): files about the same people share one
    budget. None for the name of this section.
    """
    min_class_rows: int = Field(10, ge=1)
    """The fewest rows of a class whose mean (prototype, logits) is sent: a smaller class is sent as
    absent (rows).
    """
    exact_distances: bool = False
    """Whether trust distances may be sent in float32, which reveals most about the own rows (rows).
    """
    max_answers: int | None = Field(None, ge=0)
    """Limit of the rows of coordinators that are answered, over all runs (rows); None for twice the
    public rows.
    """
    ids_total: int | None = Field(None, ge=1)
    """Limit of the coordinators' ids in all alignments together (rows); None for twice the own
    rows.
    """
    max_ids: int = Field(1_000_000, ge=1, le=MOST)
    """Limit of the coordinator's ids in one alignment (rows): it learns of each whether it is here.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_words(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "columns" in values:
            raise ValueError("columns was renamed: write keep, as in [data] of a run")
        return values

    @field_validator("test", mode="before")
    @classmethod
    def _check_test(cls, test: Any) -> Any:
        if isinstance(test, list | tuple):
            raise ValueError(
                "names of owners do not apply at a node, which has the rows of one owner: give a "
                "share, such as 0.3, or the column that says train or test"
            )
        if isinstance(test, bool) or (isinstance(test, int | float) and not 0 < test < 1):
            raise ValueError("a share must be above 0 and below 1")
        return test

    @model_validator(mode="after")
    def _one(self) -> "NodeData":
        if (self.dataset is None) == (self.rows is None):
            raise ValueError(
                "set exactly one of dataset (a public data set) and rows (a file of your own)"
            )
        if self.rows is None and self.public is not None:
            raise ValueError("public needs rows; remove it, as a dataset has its own public rows")
        if self.rows is None and self.id is not None:
            raise ValueError("id needs rows; remove it, as a dataset needs no alignment")
        if self.dataset is None and self.root is not None:
            raise ValueError("root needs dataset; remove it")
        words = (
            "keep",
            "drop",
            "label",
            "group",
            "owner",
            "missing",
            "test",
            "people",
            "max_answers",
            "ids_total",
            "classes",
            "categories",
            "encode",
            "lacks",
            "reply_every",
        )
        if self.rows is None and (given := [name for name in words if getattr(self, name)]):
            raise ValueError(f"{given[0]} needs rows; remove it, as a run says it of a dataset")
        if self.owner is not None and self.group is None:
            raise ValueError("owner needs group, the column that names the owner of each row")
        return self

    @property
    def own(self) -> OwnFile:
        """How to read the file of this node's own rows."""
        share, column = (None, self.test) if isinstance(self.test, str) else (self.test, None)
        options = DataOptions(
            self.label,
            self.group,
            self.id,
            self.drop,
            self.keep,
            test=column,
            missing_words=self.missing_words,
            decimal=self.decimal,
        )
        return OwnFile(
            options,
            self.owner,
            self.missing,
            share,
            self.classes,
            self.categories,
            self.encode,
            self.lacks,
        )


Role = Literal["submit", "approve", "stop", "audit"]


class NodeConfig(FileSection):
    """A node's name, coordinators and policy."""

    name: str = Field(min_length=1)
    """The name in its certificate."""
    state: RelativePath = Path("state")
    """The folder for the node's state."""
    ca: RelativePath = Path("ca.pem")
    """Certificates of the CA of this federation."""
    certificate: RelativePath = Path("certificate.pem")
    """The node's certificate."""
    key: RelativePath = Path("key.pem")
    """The key of its certificate."""
    revoked: RelativePath | None = None
    """PEM list of revoked certificates (CRL), read again when it changes; required with own rows.
    """
    anchor: RelativePath | None = None
    """A file outside `state`, best on another disk, with the number of the newest budget: an older
    copy of `state` is noticed. Then, or if the file is deleted, nothing more is charged until
    `fedloom node NODE.toml --accept-restored`, which counts all limits. `--new-anchor` makes the
    file. None for none.
    """
    callers: Mapping[str, tuple[str, ...]] = Field(default={"coordinator": ()}, min_length=1)
    """The coordinators that may start runs here, by name, with the host:port that this node dials,
    or several. A list of names, without addresses, is for a transport of another kind, such as
    Flower's.
    """
    peers: tuple[str, ...] = ()
    """Names of the peers that may fetch messages left for them here, and from which this node
    fetches.
    """
    approve: Literal["ask", "auto", "off"] = "ask"
    """Whether a run on own rows waits until it is approved here (fedloom node --approve): "ask" for
    each run, "auto" not for one whose summary equals that of an approved one, "off" for none. The
    summary does not hold the whole config.
    """
    roles: Mapping[str, tuple[Role, ...]] = Field(default_factory=dict)
    """Who may do what here, by the name in a certificate, which must have the role, too: submit
    runs, approve or stop
    one, audit. Empty: each of `callers` may submit, and users of this machine may do the rest.
    """
    outgoing: Outgoing = Outgoing()
    """Limits of what may leave this node in replies, whatever a method sends."""
    methods: Mapping[str, MethodPolicy] = Field(min_length=1)
    """Allowed methods: names, or tables with more conditions."""
    pages: tuple[RelativePath, ...] = ()
    """Files of your own method pages. A run refers to one by its method's name."""
    factories: tuple[str, ...] = ()
    """Your own networks and black boxes that a run may use, as `package.module:factory`."""
    data: Mapping[str, NodeData] = Field(min_length=1)
    """The data for runs, by their `data.name`."""
    max_rounds: int = Field(1000, ge=1)
    """Limit of a run's rounds."""
    min_batch_size: int = Field(1, ge=1)
    """Smallest batch size: the fewer rows in a step, the more it reveals about each."""
    min_rows: int = Field(20, ge=1)
    """With rows or columns of its own: smallest number of rows that a run may train on, and test
    on. The coordinator chooses the split, and the loss of a single row would reveal it.
    """
    min_sum: int = Field(5, ge=LEAST_SUM)
    """Smallest number of nodes of a secure sum: the fewer there are, the more a sum tells about
    each. A coordinator that does not follow the protocol can learn single messages all the same.
    """
    colluders: int = Field(0, ge=0)
    """Number of nodes of a secure sum that may help the coordinator; a run's `aggregate.colluders`
    must be as large.
    """
    quarantine: int = Field(5, ge=0)
    """With rows or columns of its own: rounds for which a node that was lost in a secure sum stays
    out of the run's sums; 0 for none, so that each round may have other nodes.
    """
    secret_noise: bool = True
    """Whether noise for privacy is drawn from a secret of this node. Otherwise the coordinator,
    which knows the seed, could subtract the noise. Set it to false only to reproduce a run on one
    machine.
    """
    evaluate: bool = True
    """Whether the coordinator may evaluate the node's model."""
    notes: bool = True
    """Whether the coordinator receives the party's notes, such as norms of gradients."""
    max_runs: int = Field(1, ge=1)
    """Limit of runs at the same time."""
    lease: float = Field(60.0, gt=0)
    """Seconds after a coordinator's last heartbeat until another run may take its slot."""
    queue: int = Field(32, ge=1)
    """Limit of waiting calls; further ones are refused as busy."""
    max_message_mb: int = Field(1024, ge=1)
    """Limit of one call, in megabytes."""
    max_call_seconds: float = Field(3600.0, gt=0)
    """Limit of the work of one call, in seconds: it is interrupted and undone."""
    max_memory_mb: int | None = Field(None, ge=1024)
    """Limit of the memory that this process may allocate, in megabytes (Linux): a call that needs
    more fails, and changes nothing. None for no limit.
    """
    keep_runs: int = Field(10, ge=1)
    """Number of runs whose state is kept."""
    keep_days: int | None = Field(None, ge=1)
    """Days after its last call for which a run's state and model are kept; None for no limit."""
    insecure: bool = False
    """No certificates; names are not verified. For loopback addresses only."""

    @field_validator("methods", mode="before")
    @classmethod
    def _names(cls, methods: Any) -> Any:
        return {name: {} for name in methods} if isinstance(methods, list | tuple) else methods

    @field_validator("callers", mode="before")
    @classmethod
    def _addresses(cls, callers: Any) -> Any:
        if isinstance(callers, list | tuple):
            return dict.fromkeys(callers, ())
        if isinstance(callers, Mapping):
            return {name: (at,) if isinstance(at, str) else at for name, at in callers.items()}
        return callers

    @model_validator(mode="after")
    def _reachable(self) -> "NodeConfig":
        for name, address in (
            (name, at) for name, addresses in self.callers.items() for at in addresses
        ):
            try:
                endpoint(address)
            except ConfigError as error:
                raise ValueError(f"callers.{name}: {error}") from None
            if self.insecure and not local(address):
                raise ValueError(
                    "insecure = true needs callers at loopback addresses, such as 127.0.0.1:7443"
                )
        if self.roles and self.insecure:
            raise ValueError(
                "roles: the insecure mode has no certificates, so nobody has a role: leave roles "
                "out"
            )
        dials = any(self.callers.values()) and not self.insecure
        if (
            dials
            and self.revoked is None
            and any(data.rows is not None for data in self.data.values())
        ):
            raise ValueError(
                "revoked: a node with own rows needs the list of revoked certificates: copy "
                "revoked.pem of the CA here, which fedloom certs --list renews"
            )
        return self

    def cohort(self, data: NodeData) -> str:
        """The name of the people of these rows."""
        return data.people or next(name for name, one in self.data.items() if one is data)

    @property
    def credentials(self) -> Credentials | None:
        """The node's certificate; None in the insecure mode."""
        return (
            None
            if self.insecure
            else Credentials(self.ca, self.certificate, self.key, self.revoked)
        )


def read(path: Path) -> NodeConfig:
    """A node's config; paths in it are relative to its folder.

    Raises:
        ConfigError: all errors in the file, one per line.
    """
    config = read_config(path, NodeConfig, "give the path of a node.toml; fedloom certs writes one")
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(f"{path}: {line}" for line in problems))
    return config


def _problems(config: NodeConfig) -> Iterator[str]:
    """A sentence for each unknown method or missing file."""
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
        if data.label is not None and bool(data.classes) == (data.label_scale is not None):
            yield (
                f"[data.{name}] label needs classes, all that runs may have, such as classes = "
                '["no", "yes"], or of a '
                "number label_scale = [mean, s.d.]"
            )
        if (
            data.rows is not None
            and data.rows.suffix == ".csv"
            and data.rows.exists()
            and data.own.options.given()
        ):
            try:
                for note in check_own(data.rows, name, data.own):
                    _log.warning("[data.%s] %s", name, note)
            except DataError as error:
                yield f"[data.{name}] {error}"


def check_policy(
    config: NodeConfig, caller: str, run: RunConfig, method: Method, cfg: Any, rounds: int
) -> None:
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
    """A sentence for each setting of a run that the policy does not allow, and for missing data.

    Args:
        config: the node's.
        policy: its conditions for this method.
        run: the coordinator's config.
        method, cfg, rounds: of the run, with its preset and params resolved.
    """
    # the method: preset, size, the owner's own bounds of its settings
    if policy.presets is not None and run.preset not in policy.presets:
        yield (
            f"preset {run.preset} of {method.name} is not allowed here; allowed: "
            f"{', '.join(policy.presets)}"
        )
    if policy.presets is not None and run.params:
        yield f"presets of {method.name} may not be changed here: leave params out"
    if rounds > config.max_rounds:
        yield f"the run has {rounds} rounds; this node allows at most {config.max_rounds}"
    batch = getattr(cfg, "batch_size", None)  # which some methods do not have
    if isinstance(batch, int) and batch < config.min_batch_size:
        yield f"batch_size is {batch}; this node requires at least {config.min_batch_size}"
    yield from policy.violations(method.name, cfg, secure=run.aggregate.secure)

    # A sum must withstand as many helpers of the coordinator as the owner fears, or more.
    if run.aggregate.secure and run.aggregate.colluders < config.colluders:
        yield (
            f"aggregate.colluders is {run.aggregate.colluders}; this node requires at least "
            f"{config.colluders}"
        )

    # All that follows depends on which data the run is about: own rows, or a public data set.
    if run.data.name not in config.data:
        yield f"this node has no data {run.data.name!r}"
        return
    data, schema = config.data[run.data.name], run.data.row_schema
    own_rows = data.rows is not None

    # Of two sums over different nodes the difference tells of single ones. `quarantine` keeps a
    # run's sums among the same nodes, so that drawing some of them each round cannot work.
    draws = run.aggregate.secure and cfg.participants(run.data.training) < run.data.training
    if draws and config.quarantine and own_rows:
        yield (
            "with secure sums all nodes take part in each round: set params.clients_per_round to "
            "none"
        )

    # The coordinator knows the run's seed, hence noise that is drawn from it.
    if own_rows and cfg.promises and not config.secret_noise:
        yield (
            "a run that promises an ε needs noise that nobody knows: this node's owner must set "
            "secret_noise = true"
        )
    if own_rows and run.faults != Faults():
        yield "faults are for tests on public data sets: leave [faults] out"

    # the columns of a table of own rows; a file of images has none
    if schema is not None and schema.kind == "table" and own_rows:
        # the owner's own settings of columns, where `keep` names those that runs may use; `ascii`
        # quotes the coordinator's words, with control signs and letters beyond ASCII escaped
        options = data.own.options
        lacking = [column.name for column in schema.columns if column.name in data.lacks]
        if lacking and run.data.missing_columns != "allow":
            names = ", ".join(map(ascii, lacking))
            yield (
                f"columns {names} of {run.data.name} are missing here: leave them out, or set "
                "data.missing_columns"
            )
        present = [column for column in schema.columns if column.name not in lacking]
        if forbidden := [column.name for column in present if not allowed(column.name, options)]:
            kept = ", ".join(data.keep) + (f", except {', '.join(data.drop)}" if data.drop else "")
            names = ", ".join(map(ascii, forbidden))
            yield (
                f"columns {names} of {run.data.name} are not allowed here; allowed: "
                f"{kept if data.keep else 'none'}"
            )
        # Other replacements of missing numbers may differ between nodes; None leaves it to the run.
        if data.missing is not None and (data.missing == "indicator") != (
            run.data.missing == "indicator"
        ):
            yield (
                f"missing of {run.data.name} is {data.missing!r} here and {run.data.missing!r} "
                "in the run; indicator must be set in both or in neither, as it adds columns"
            )
        # A method of raw rows gets columns as they are, so no single row can move their scale. Of
        # others `unbounded` says what to set if the run promises an ε without an agreed scale, ""
        # if nothing; public rows of this node (the last argument) may give the scale instead.
        if "raw rows" not in method.needs and (
            problem := unbounded(run, cfg, data.public is not None)
        ):
            yield problem
        if schema.label != data.label:
            yield (
                f"label {schema.label!a} of {run.data.name} is not allowed here; allowed: "
                f"{data.label or 'none'}"
            )
        # The words are the owner's, so that a coordinator learns nothing of rows by words that it
        # chose. Their order is free. A number has none on both sides.
        for column in present:
            own_words = data.categories.get(column.name, ())
            if {*column.categories} != {*own_words}:
                yield (
                    f"categories of {column.name!a} must be those of this node: "
                    f"{_listed(own_words)}"
                )
            if column.encode != data.encode.get(column.name):
                yield (
                    f"encode of {column.name!a} must be that of this node: "
                    f"{data.encode.get(column.name) or 'none'}"
                )

    # what is predicted, for images as well: classes, or a number with its mean and s.d.
    if schema is not None and own_rows and schema.label_scale != data.label_scale:
        yield (
            f"label_scale of {run.data.name} must be that of this node, "
            f"{data.label_scale or 'none'}"
        )
    if schema is not None and own_rows and {*schema.classes} != {*data.classes}:
        yield f"classes of {run.data.name} must be those of this node: {_listed(data.classes)}"

    # Both sides must mean the same by the name: rows of the node's own, or a public data set. How a
    # run says that rows are the nodes' own depends on the method's setting.
    wants_own = run.data.own or run.columns.private
    if wants_own != own_rows:
        kind = "a public set" if wants_own else "this node's own rows"
        section, hint = PLANNERS[method.setting].own_data
        yield f"{run.data.name!r} is {kind} here: {f'leave {section} out' if wants_own else hint}"


def check_sums(
    config: NodeConfig, run: RunConfig, method: Method, cfg: Any, rounds: int, others: Sequence[str]
) -> None:
    """Check that a run's secure sums can be of enough nodes, all of them this node's peers.

    Args:
        config: the node's.
        run, method, cfg, rounds: of the run.
        others: names of the run's other nodes.

    Raises:
        CallRefused: they cannot.
    """
    if not run.aggregate.secure or not method.client.MEANS:
        return
    if strangers := sorted({*others} - {*config.peers}):
        raise refused(
            f"this node adds with its peers alone, and {', '.join(map(ascii, strangers))} is not "
            f"in peers ({', '.join(config.peers) or 'none'}): ask its owner to add them",
            "to allow it, add them to peers of node.toml, and start this node again",
        )
    count = min([1 + len(others), *members_of_rounds(run, cfg, rounds)])
    if count < config.min_sum:
        enough = f"set min_sum = {count}" if count >= LEAST_SUM else f"wait for {LEAST_SUM} nodes"
        raise refused(
            f"this node adds with at least {config.min_sum} nodes (min_sum), and this run has "
            f"sums of {count}: run it with more nodes in each round, or ask its owner to "
            f"{enough}",
            f"to allow it, {enough} in node.toml, and start this node again"
            if count >= LEAST_SUM
            else "",
        )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(ascii, words)) or "none"


def check_row_count(config: NodeConfig, trained: int, tested: int) -> None:
    """Check the numbers of this node's own rows, or aligned rows, in a run against the policy.

    Raises:
        CallRefused: too few to train or to test on; the message does not reveal how many there are.
    """
    if min(trained, tested) < config.min_rows:
        words = (
            f"a run must train on at least {config.min_rows} rows of this node's own, and test "
            "on as many others"
        )
        raise refused(f"{words}; this one has fewer: change data.test_rows or data.test_fraction")
