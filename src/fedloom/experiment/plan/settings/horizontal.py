"""The horizontal setting: parties with different rows of the same columns, partitioned
or private.

`Horizontal.build` makes the plan of a run. Rows come in one of two ways, and both give `_Assigned`:
`_partitioned` divides a data set that is all here among clients of a simulation; `_private` reads
the one file that is here, as all others are at their owners.

Methods that need "raw rows" (trees, exact regressions) get columns as they were read, with words as
numbers and gaps as NaN; networks get words one-hot, without gaps, and scaled by shift and scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedloom.core import graphs
from fedloom.core.context import ClientContext, PublicSet, Rows
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.method import Method, MethodConfig
from fedloom.data.dataset import Dataset, DatasetInfo, DatasetLike, Fill
from fedloom.data.encoder import decoded
from fedloom.data.options import DataOptions, OwnFile
from fedloom.data.schema import DataSchema, read_public, read_rows
from fedloom.data.split import hold_out, public_hash, rows_hash
from fedloom.data.standalone import VERSION
from fedloom.data.stats import describe
from fedloom.data.text_and_dates import DateParts, HashedText
from fedloom.experiment.config.run import RunConfig, refuse_task
from fedloom.experiment.config.sections import ColumnsConfig
from fedloom.experiment.plan.assignment import (
    DataAssignment,
    chance,
    digest,
    rows_of,
    sample,
    schema,
    target_of,
    training_labels,
)
from fedloom.experiment.plan.networks import (
    architectures_of,
    assign_groups,
    networks,
    replace_black_boxes,
)
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.plan.settings.rows import (
    basis,
    data_of,
    left_out,
    number_of_owners,
    owner_names,
    unbounded,
)


class Horizontal:
    """The horizontal setting, see `Planner`."""

    own_data = "[data.row_schema]", "describe them with [data.row_schema]"

    def check(self, run: RunConfig, method: Method, *, server: bool) -> None:
        """Refuse settings of the vertical setting."""
        if run.columns != ColumnsConfig():
            raise ConfigError(
                f"columns: {method.name} shares rows, not columns: leave the section out"
            )
        if run.evaluate.attack_labels is not None:
            raise ConfigError(
                f"evaluate.attack_labels: the parties of {method.name} have the labels of their "
                "rows: leave it out, or use a vertical method"
            )
        if run.evaluate.leaks and run.data.own:
            raise ConfigError(
                "evaluate.leaks needs all rows here, and those of [data.row_schema] are at their "
                "owners: set it in a run on one machine"
            )
        if run.data.test_fraction == 0 and not method.every_row:
            raise ConfigError(
                f"data.test_fraction: {method.name} needs rows to test on, so that its score is "
                "not that of the rows it has learned: set it above 0"
            )
        run.pretrained.check(method, server)

    def clients(self, run: RunConfig, nodes: int | None) -> int | None:
        """One for each node, or for each owner of a file's rows; else None."""
        if nodes is not None or run.data.group is None or run.data.partition != "natural":
            return nodes
        return number_of_owners(run.data)

    def server_name(self, plan: RunPlan) -> str:
        """The server's role, or "coordinator" without a server."""
        server = plan.server
        return (
            (server.ROLE or type(server).__name__.lower()) if server is not None else "coordinator"
        )

    def min_nodes(self, plan: RunPlan, nodes: int) -> int:
        """The method's `min_clients`."""
        return plan.method.min_clients

    # -- the plan ----------------------------------------------------------------------------------

    def build(
        self,
        run: RunConfig,
        method: Method,
        cfg: Any,
        rounds: int,
        files: PrivateData,
        at: int | None = None,
    ) -> RunPlan:
        """The plan of a run: see `Planner`."""
        graph = run.topology.graph(run.data.clients, run.seed)
        clients, raw = run.data.clients, "raw rows" in method.needs

        # the rows, and whether the method gets what it needs of them
        if run.data.own:
            if not raw and (words := unbounded(run, cfg, files.public is not None)):
                raise ConfigError(words)
            assigned = _private(run, files, at, cfg.promises, raw)
        else:
            assigned = _partitioned(run, files, raw)
        data, public = assigned.data, assigned.public
        if "public rows" in method.needs and run.data.own and files.public is None:
            file, example = (
                "federation.toml" if at is None else "node.toml",
                f'[data.{run.data.name}] public = "public.csv"',
            )
            raise ConfigError(
                f"{method.name} learns from public rows: name their file in {file}, {example}"
            )
        if "public rows" in method.needs and not len(public.rows):
            raise ConfigError(
                f"data.public_rows: {method.name} learns from public rows, and there are none: "
                "set it to 1 or more"
            )
        assert data.dataset is not None
        refuse_task(method, data.task.kind)
        if data.target is not None:
            refuse_for_numbers(run, cfg)

        # the networks, as functions that build them
        architectures = architectures_of(run, method, data.dataset.kind)
        server_network, client_networks = networks(
            run, method, data.dataset, data.task.width, architectures
        )
        if raw:  # the method has models of its own
            architectures = (method.name,) * clients

        # the server's context; a client's differs in its number, its rows and its network
        server = ClientContext(
            id=0,
            seed=run.seed,
            parties=clients,
            classes=data.task.width,
            target=data.target,
            data=assigned.training(None),
            network=None if raw else server_network,
            device=run.engine.device,
            left_out=data.left_out if at is None else {},
            owners=data.owners or files.owners or tuple(f"client-{n}" for n in range(clients)),
            **(raw_columns(data.dataset) if raw else {}),
        )
        contexts = [
            replace(
                server,
                id=n,
                neighbours=graphs.Others(clients, n) if graph is None else graph[n],
                data=assigned.training(n),
                public=public,
                network=None if raw else client_networks[n],
                tests=assigned.tests(n),
                left_out=data.left_out if run.data.own and n == at else {},
            )
            for n in range(clients)
        ]

        # what changes the contexts of all: black boxes for networks, groups, public rows
        server, contexts = replace_black_boxes(
            run, method, data.dataset, data.task, architectures, server, contexts
        )
        if "architecture groups" in method.needs:
            server, contexts = assign_groups(server, contexts, client_networks, architectures)
        if "public rows at the server" in method.needs or cfg.server_reads_public:
            server = replace(server, public=public)
        unseen = run.data.unseen_clients(run.seed)
        return RunPlan(
            run,
            method,
            cfg,
            rounds,
            self,
            data,
            architectures,
            graph,
            server,
            contexts,
            unseen=unseen,
        )


# -- assigning rows --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Assigned:
    """Which rows each party has, and these, as far as they are here."""

    data: DataAssignment
    """What the plan and its result say of the data."""
    training: Callable[[int | None], Rows | None]
    """Of a client, or None for the server, its training rows; None if they are not here."""
    public: PublicSet
    """The public rows."""
    tests: Callable[[int], Mapping[str, Rows]]
    """Of a client, its test rows by name: "own", and of a partitioned data set "test", the same for
    all; {} if they are not here.
    """


def raw_columns(dataset: DatasetLike) -> dict[str, Any]:
    """The names of a data set's columns, the words of each that is a category, and what was
    subtracted from each; and its classes and label. Pixels are numbered.
    """
    size = math.prod(dataset.input_shape)
    names = dataset.columns if len(dataset.columns) == size else tuple(map(str, range(size)))
    offset = getattr(dataset, "offset", None)
    return {
        "columns": names,
        "words": dataset.words or ((),) * size,
        "offset": () if offset is None else tuple(offset.tolist()),
        "class_names": dataset.classes,
        "label": dataset.label,
    }


def _partitioned(run: RunConfig, files: PrivateData, raw: bool) -> _Assigned:
    """The rows of a partitioned data set, in one pool; neither scaled nor filled if `raw`."""
    # `rows` gives rows by their numbers, all from one copy on the device
    dataset, shares = data_of(run, files, raw=raw)
    public, rows = public_hash(dataset, shares), _pool(dataset, run.engine.device)
    test, y, (strata, names) = rows(shares.test), dataset.y, dataset.strata

    def training(n: int | None) -> Rows | None:
        if n is None:
            return rows(shares.server) if len(shares.server) else None
        own = rows(shares.shards[n])
        # such a faulty client has class K - 1 - k for class k, and -y for a number y
        if run.faults.mislabels(n) and own.labels is not None:
            own = replace(
                own, labels=(len(dataset.classes) - 1 if dataset.classes else 0) - own.labels
            )
        return own

    # name of test rows -> for each client, their labels; without any of a name of which some client
    # has no row
    labels = {
        "test": [y[shares.test]] * len(shares.shards),
        "own": [y[part] for part in shares.own_test],
    }
    labels = {on: parts for on, parts in labels.items() if all(map(len, parts))}
    content = digest(f"{dataset.x.dtype.str}{dataset.x.shape}{public}", y, sample(dataset.x))
    owners = owner_names(dataset, shares) if run.data.partition == "natural" else ()
    data = DataAssignment(
        name=dataset.name,
        classes=dataset.classes,
        digest=content,
        common=content,
        public_digest=public,
        schema=lambda _: schema(
            dataset.kind, dataset.input_shape, dataset.classes, dataset.columns
        ),
        describe=lambda: {
            "counts": describe(strata, shares.shards, names).counts.tolist(),
            **({} if dataset.classes else {"classes": list(names)}),
            "owners": list(owners),
            "standardized_by": "" if raw else basis(dataset, shares),
            "notes": list(dataset.notes),
            "public": len(shares.public),
            "public_sha256": public,
            "server": len(shares.server),
            "server_sha256": digest("", shares.server.astype("<i8"))
            if len(shares.server)
            else None,
        },
        labels=labels,
        own_chances=np.array([chance(y) for y in labels["own"]]) if "own" in labels else None,
        target=target_of(dataset, run.models.variance),
        label=dataset.label,
        dataset=dataset,
        split=shares,
        server_rows=shares.server,
        left_out=left_out(run.data, run.seed, dataset, shares),
        owners=owners,
    )
    return _Assigned(
        data,
        training,
        PublicSet(rows(shares.public), run.seed, public),
        lambda n: {"test": test, "own": rows(shares.own_test[n])},
    )


def _private(
    run: RunConfig, files: PrivateData, at: int | None, promises: bool, raw: bool
) -> _Assigned:
    """The private rows of party `at`, or of the server (None); and the public rows. Rows of other
    parties are not here.

    Columns are standardized by the agreed scale, or else by the public rows, or else by each
    party's own training rows, which also fill the missing numbers of the party's own rows. If
    `raw`, they stay as they are.

    Raises:
        ConfigError: a required file is not named.
        DataError: the rows do not fit the schema, or are too few.
    """
    # how rows are encoded: `form` is the same at all parties, and encodes public rows; `own_form`
    # differs in how this party's gaps are filled alone, as a node refuses a run that would give it
    # other columns than itself (an indicator of gaps)
    assert run.data.row_schema is not None
    may_lack = run.data.missing_columns
    form = run.data.row_schema.build(run.data.missing, may_lack)
    name = run.data.name
    device = run.engine.device
    owner = files.own or OwnFile(DataOptions())
    how = owner.missing or run.data.missing
    if how == "refuse" and files.own is not None:
        # a run that failed would tell of a gap; a node's owner is told when it starts
        how = "median"
    own_form = run.data.row_schema.build(how, may_lack)

    # the rows as encoded, with gaps, and numbers of the training and test rows; a server without
    # rows of its own (`server_rows`) has none
    public, own = _public(run, files, form), None
    if files.rows is not None and (at is not None or run.data.server_rows):
        own = read_rows(files.rows, own_form, name, files.own)
    if own is None and (at is not None or run.data.server_rows):
        whose = "the server" if at is None else f"party {at}"
        raise ConfigError(f"data.{name}: set rows to the file with the rows of {whose}")
    train, test = (
        (np.arange(0), np.arange(0))
        if own is None
        else _held_out(run, own, at, files.split_seed, owner, promises)
    )

    # gaps are filled, and columns scaled, by what all parties have if possible. A raw method gets
    # rows as they are; `scaling(None)` then gives the agreed scale, or 0 and 1
    fitted = public if len(public) else None if own is None else own.x[train]
    public_fill, shift, scale = (form if len(public) else own_form).scaling(None if raw else fitted)
    if form.fill and not raw:
        public = np.where(np.isnan(public), public_fill, public)
    if own_form.fill and own is not None and not raw:
        own = replace(own, x=np.where(np.isnan(own.x), own_form.scaling(fitted)[0], own.x), fill="")
    # numbers far from an agreed mean are cut off: see `SchemaConfig.scale`
    public, own = form.cut(public), None if own is None else replace(own, x=form.cut(own.x))
    known = DatasetInfo(name, form.kind, form.input_shape, form.classes, form.columns, shift, scale,
                        target=form.target, label=form.label)  # fmt: skip

    # one column for each raw one again, where words were one-hot: from (n, F) to (n, G)
    if raw and form.kind == "table":
        # no rows are needed for the columns' names and words
        _, words, columns = decoded(form.table, np.empty((0, len(form.columns)), np.float32))
        shift, scale = np.zeros(len(columns), np.float32), np.ones(len(columns), np.float32)
        known = replace(
            known,
            input_shape=(len(columns),),
            columns=columns,
            shift=shift,
            scale=scale,
            words=words,
        )
        public = decoded(form.table, public)[0]
        if own is not None:
            x = decoded(own_form.table, own.x)[0]
            fill: Fill = "median" if np.isnan(x).any() else ""
            own = replace(
                own, x=x, shift=shift, scale=scale, columns=columns, words=words, fill=fill
            )

    # the rows for this party's context
    mine, tests = None, {}
    if own is not None:
        own = replace(own, shift=shift, scale=scale)
        rows = _pool(own, device)
        mine, tests = rows(train), {"own": rows(test)}

    # what all parties must have in common, to the byte: the schema, and the public rows. Of the
    # server's rows the digest of the run tells, too; a party's own rows count for nothing
    of_public, server_rows = rows_hash(public), 0 if own is None or at is not None else len(own.y)
    server = rows_hash(own.x) if own is not None and server_rows else ""
    about = schema(form.kind, form.input_shape, form.classes, form.columns)
    about |= (
        {"encoder": VERSION}
        if any(isinstance(rule, HashedText | DateParts) for rule in form.table)
        else {}
    )
    about |= {} if form.classes else {"target": list(form.target)}
    common = digest(f"{about}\n{of_public}")
    data = DataAssignment(
        name=name,
        classes=form.classes,
        digest=digest(f"{common}\n{server}"),
        common=common,
        public_digest=of_public,
        schema=lambda _: about,
        describe=lambda: {
            "private_clients": run.data.clients,
            "public": len(public),
            "public_sha256": of_public,
            "server": server_rows,
            "server_sha256": server or None,
        },
        dataset=own or known,
        server_rows=train,
        target=target_of(known, run.models.variance),
        label=known.label,
        left_out={"test": len(own.y) - len(train)} if own is not None and at is not None else {},
    )
    return _Assigned(
        data,
        lambda n: mine if n == at else None,  # of the server, n and `at` are None
        PublicSet(rows_of(public, known, np.arange(len(public)), device), run.seed, of_public),
        lambda n: tests if n == at else {},
    )


def _public(run: RunConfig, files: PrivateData, form: DataSchema) -> np.ndarray:
    """The public rows (n, ...), or the first `data.public_rows` of them."""
    if files.public is None or run.data.public_rows == 0:
        return np.empty((0, *form.input_shape), np.uint8 if form.kind == "image" else np.float32)
    found = read_public(files.public, form)
    if run.data.public_rows is not None and run.data.public_rows > len(found):
        raise DataError(
            f"{files.public} must hold {run.data.public_rows} rows (data.public_rows), but has "
            f"{len(found)}."
        )
    return found[: run.data.public_rows]


def refuse_for_numbers(run: RunConfig, cfg: MethodConfig) -> None:
    """Raise ConfigError for settings that a number to predict does not allow."""
    promised = cfg.promises or run.aggregate.noise is not None
    if promised and not run.data.own and run.data.label_scale is None:
        what = "params.trust_epsilon" if getattr(cfg, "trust_epsilon", 0) else "its noise"
        raise ConfigError(
            f"{run.method} promises differential privacy ({what}), but without an agreed scale "
            "each row's label moves those of all others: set data.label_scale = [mean, s.d.], in "
            "the unit of the label, to numbers that the owners know beforehand"
        )
    if run.evaluate.leaks:
        raise ConfigError(
            "evaluate.leaks: its attacks guess classes, and this label is a number: leave it out"
        )


def _held_out(
    run: RunConfig, own: Dataset, at: int | None, seed: int | None, owner: OwnFile, promises: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a party's training and test rows. The server trains on all its rows.

    If the method `promises` a guarantee, labels do not count: one of them would move other rows
    between the two.
    """
    if at is None:
        return np.arange(len(own.y)), np.arange(0)
    data = run.data
    held = hold_out(
        np.zeros(len(own.y), np.int64) if promises else own.strata[0],
        own.test,
        seed=run.seed if seed is None else seed,
        fraction=data.test_share if owner.test_fraction is None else owner.test_fraction,
        limit=data.test_rows,
    )
    train, test = np.setdiff1d(np.arange(len(own.y)), held.apart), held.kept
    if not len(train) or not len(test):
        raise DataError(
            f"{len(own.y)} rows are too few to split into training and test rows: add more."
        )
    return train, test


def _pool(dataset: Dataset, device: str) -> Callable[[np.ndarray], Rows]:
    """A function from indices (n,) to rows of the data set, in one pool on this device."""
    every = rows_of(dataset.x, dataset, np.arange(len(dataset.y)), device, training_labels(dataset))
    return lambda which: replace(every, index=torch.from_numpy(which).to(device))
