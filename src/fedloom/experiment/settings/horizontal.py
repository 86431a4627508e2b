"""The horizontal setting: parties with different rows of the same columns, partitioned or private."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core import graphs
from fedloom.core.context import ClientContext, PublicSet, Rows
from fedloom.core.engine import Engine
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.method import Method
from fedloom.data.dataset import Dataset, DatasetInfo
from fedloom.data.flower import partition_at
from fedloom.data.schema import DataSchema, read_public, read_rows
from fedloom.data.sources import load
from fedloom.data.split import Split, hold_out, public_hash, rows_hash, split
from fedloom.data.stats import describe
from fedloom.experiment.assignment import DataAssignment, digest, rows_of, sample, schema
from fedloom.experiment.columns import ColumnsConfig
from fedloom.experiment.config import RunConfig
from fedloom.experiment.evaluate import (
    CHANCE,
    ask,
    check_score,
    groups,
    look,
    recalls,
    spread,
)
from fedloom.experiment.metrics import GLOBAL, OWN, TRAINING
from fedloom.experiment.networks import architectures_of, assign_groups, networks, replace_black_boxes
from fedloom.experiment.plan import Metric, RunPlan
from fedloom.experiment.private import PrivateData
from fedloom.experiment.result import Final, over_clients


class Horizontal:
    """The horizontal setting, see `Setting`."""

    exportable = False
    own_data = "[data.form]", "describe them with [data.form]"

    def check(self, run: RunConfig, method: Method, *, server: bool) -> None:
        """Refuse settings of the vertical setting."""
        if run.columns != ColumnsConfig():
            raise ConfigError(f"columns: {method.name} shares rows, not columns: leave the section out")
        if run.evaluate.attacks is not None:
            raise ConfigError(
                f"evaluate.attacks: {method.name} shares rows, and who has rows has their labels; leave it out, or "
                "take a method whose parties hold columns"
            )
        run.pretrained.check(method, server)

    def clients(self, run: RunConfig, nodes: int | None) -> int | None:
        """One for each node; None without nodes."""
        return nodes

    def server_name(self, plan: RunPlan) -> str:
        """The server's role, or "coordinator" without a server."""
        server = plan.server
        return (server.ROLE or type(server).__name__.lower()) if server is not None else "coordinator"

    def min_nodes(self, plan: RunPlan, nodes: int) -> int:
        """The method's `min_clients`."""
        return plan.method.min_clients

    # -- the plan --------------------------------------------------------------------------------------

    def build(
        self, run: RunConfig, method: Method, cfg: Any, rounds: int, files: PrivateData, at: int | None = None
    ) -> RunPlan:
        """The plan of a run: see `Setting`."""
        graph = run.topology.graph(run.data.clients, run.seed)
        clients = run.data.clients
        if run.data.own:
            data, own, public, tests = _private(run, files, at)
        else:
            data, own, public, tests = _partitioned(run, files)
        if "public rows" in method.needs and run.data.own and files.public is None:
            file, example = (
                "federation.toml" if at is None else "node.toml",
                f'[data.{run.data.name}] public = "public.csv"',
            )
            raise ConfigError(f"{method.name} learns from public rows: name their file in {file}, {example}")
        if "public rows" in method.needs and not len(public.rows):
            raise ConfigError(
                f"data.public: {method.name} learns from public rows, and there are none: set it to 1 or more"
            )
        assert data.dataset is not None
        architectures = architectures_of(run, method, data.dataset.kind)
        server_network, client_networks = networks(run, method, data.dataset, architectures)
        server = ClientContext(
            id=0,
            seed=run.seed,
            parties=clients,
            classes=len(data.classes),
            data=own(None),
            network=server_network,
            device=run.engine.device,
        )
        contexts = [
            replace(
                server,
                id=n,
                neighbours=graphs.Others(clients, n) if graph is None else graph[n],
                data=own(n),
                public=public,
                network=client_networks[n],
                tests=tests(n),
            )
            for n in range(clients)
        ]
        server, contexts = replace_black_boxes(run, method, data.dataset, architectures, server, contexts)
        if "architecture groups" in method.needs:
            server, contexts = assign_groups(server, contexts, client_networks, architectures)
        if "public rows at the server" in method.needs:
            server = replace(server, public=public)
        unseen = run.data.unseen_clients(run.seed)
        return RunPlan(run, method, cfg, rounds, self, data, architectures, graph, server, contexts, unseen=unseen)

    # -- evaluation ------------------------------------------------------------------------------------

    def main_measure(self, plan: RunPlan) -> str:
        """Accuracy on own rows in the method's first evaluation mode, or on the global test set."""
        return f"{OWN} {plan.cfg.eval_modes[0]}" if plan.cfg.eval_modes else GLOBAL

    def party_measures(self, plan: RunPlan) -> set[str]:
        """The main metric, over held-out and over training clients."""
        main = self.main_measure(plan)
        return {main, f"{main}{TRAINING}"}

    def evaluate(self, plan: RunPlan, engine: Engine) -> Iterator[Metric]:
        """Evaluate each client on the global test set, on its own rows, and there in each evaluation mode; with private
        rows, by the scores that clients compute."""
        broadcast = plan.server.broadcast() if plan.server is not None else {}
        return _by_scores(plan, engine, broadcast) if plan.run.data.own else _by_predictions(plan, engine, broadcast)

    def summarise(self, final: Final, parties: Sequence[str], plan: RunPlan) -> dict[str, Any]:
        """The accuracies of `RunSummary`, without and in each evaluation mode."""
        measured = [groups(f"{OWN} {eval_mode}", eval_mode, plan) for eval_mode in plan.cfg.eval_modes]
        eval_modes = {
            metric.removeprefix(f"{OWN} "): over_clients(final, metric, parties, clients)
            for those in zip(*(group.items() for group in measured), strict=True)
            for metric, clients in those
        }
        return {
            "accuracy": over_clients(final, GLOBAL, parties),
            "own_accuracy": over_clients(final, OWN, parties),
            "eval_modes": {eval_mode: found for eval_mode, found in eval_modes.items() if found is not None},
        }


def _by_predictions(plan: RunPlan, engine: Engine, broadcast: Mapping[str, Any]) -> Iterator[Metric]:
    labels, classes = plan.data.labels, plan.data.classes
    looks = [(on, "", GLOBAL if on == "test" else OWN) for on in labels]
    looks += [(list(labels)[-1], eval_mode, f"{OWN} {eval_mode}") for eval_mode in plan.cfg.eval_modes]
    for on, eval_mode, metric in looks:
        seen = look(engine, labels[on], len(classes), on, eval_mode, broadcast)
        accuracy = dict(zip(seen.clients, seen.accuracy, strict=True))
        for called, group in groups(metric, eval_mode, plan).items():
            yield from spread(called, {i: accuracy[i] for i in group if i in accuracy}, engine.name)
        if metric == GLOBAL:
            yield "loss mean", float(seen.loss.mean()), ""
            if np.isfinite(seen.agreement):
                yield "agreement", seen.agreement, ""
            yield from recalls(classes, seen.recall)


def _by_scores(plan: RunPlan, engine: Engine, broadcast: Mapping[str, Any]) -> Iterator[Metric]:
    for eval_mode in ("", *plan.cfg.eval_modes):
        scores = ask(engine, "score", {"on": "own", "eval_mode": eval_mode, "broadcast": broadcast}, check_score)
        for called, group in groups(f"{OWN} {eval_mode}" if eval_mode else GLOBAL, eval_mode, plan).items():
            yield from spread(called, {i: float(scores[i]["accuracy"]) for i in group if i in scores}, engine.name)
        if not eval_mode:
            yield "loss mean", float(np.mean([float(score["loss"]) for score in scores.values()])), ""
            yield CHANCE, float(np.mean([float(score["chance"]) for score in scores.values()])), ""


# -- assigning rows ----------------------------------------------------------------------------------------

_Assigned = tuple[DataAssignment, Callable[[int | None], Rows | None], PublicSet, Callable[[int], Mapping[str, Rows]]]
"""The assignment; a function from a client, or None for the server, to its training rows, if here; the public rows; and
a function from a client to its test rows by name."""


def _partitioned(run: RunConfig, files: PrivateData) -> _Assigned:
    """The rows of a partitioned data set, in one pool."""
    dataset, shares = data_of(run, files)
    public, rows = public_hash(dataset, shares), _pool(dataset, run.engine.device)
    test, y = rows(shares.test), dataset.y
    labels = {"test": [y[shares.test]] * len(shares.shards), "own": [y[part] for part in shares.own_test]}
    labels = {on: parts for on, parts in labels.items() if all(map(len, parts))}
    content = digest(f"{dataset.x.dtype.str}{dataset.x.shape}{public}", y, sample(dataset.x))
    data = DataAssignment(
        name=dataset.name,
        classes=dataset.classes,
        digest=content,
        common=content,
        public_digest=public,
        schema=lambda _: schema(dataset.kind, dataset.input_shape, dataset.classes, dataset.columns),
        describe=lambda: {
            "counts": describe(y, shares.shards, dataset.classes).counts.tolist(),
            "public": len(shares.public),
            "public_sha256": public,
            "server": len(shares.server),
            "server_sha256": digest("", shares.server.astype("<i8")) if len(shares.server) else None,
        },
        labels=labels,
        own_chances=np.array([np.bincount(y).max() / len(y) for y in labels["own"]]) if "own" in labels else None,
        dataset=dataset,
        split=shares,
        server_rows=shares.server,
    )
    return (
        data,
        lambda n: rows(shares.shards[n]) if n is not None else rows(shares.server) if len(shares.server) else None,
        PublicSet(rows(shares.public), run.seed, public),
        lambda n: {"test": test, "own": rows(shares.own_test[n])},
    )


def _private(run: RunConfig, files: PrivateData, at: int | None) -> _Assigned:
    """The private rows of party `at`, or of the server; and the public rows.

    Columns are standardised by the public rows, or without them by each party's own training rows.

    Raises:
        ConfigError: a required file is not named.
        DataError: the rows do not fit the schema, or are too few.
    """
    assert run.data.form is not None
    form, name, device = run.data.form.form(), run.data.name, run.engine.device
    public = _public(run, files, form)
    own = None if files.rows is None or (at is None and not run.data.server) else read_rows(files.rows, form, name)
    if own is None and (at is not None or run.data.server):
        whose = "the server" if at is None else f"party {at}"
        raise ConfigError(f"data.{name}: name the file with the rows of {whose} here, as rows")
    train, test = (np.arange(0), np.arange(0)) if own is None else _held_out(run, own, at)
    shift, scale = form.scaling(public if len(public) else None if own is None else own.x[train])
    known = DatasetInfo(name, form.kind, form.input_shape, form.classes, form.columns, shift, scale)
    mine, tests = None, {}
    if own is not None:
        own = replace(own, shift=shift, scale=scale)
        rows = _pool(own, device)
        mine, tests = rows(train), {"own": rows(test)}
    of_public, server_rows = rows_hash(public), 0 if own is None or at is not None else len(own.y)
    server = rows_hash(own.x) if own is not None and server_rows else ""
    about = schema(form.kind, form.input_shape, form.classes, form.columns)
    common = digest(f"{about}\n{of_public}")
    data = DataAssignment(
        name=name,
        classes=form.classes,
        digest=digest(f"{common}\n{server}"),
        common=common,
        public_digest=of_public,
        schema=lambda _: about,
        describe=lambda: {
            "apart": run.data.clients,
            "public": len(public),
            "public_sha256": of_public,
            "server": server_rows,
            "server_sha256": server or None,
        },
        dataset=own or known,
        server_rows=train,
    )
    return (
        data,
        lambda n: mine if n == at else None,
        PublicSet(rows_of(public, known, np.arange(len(public)), device), run.seed, of_public),
        lambda n: tests if n == at else {},
    )


def _public(run: RunConfig, files: PrivateData, form: DataSchema) -> np.ndarray:
    """The public rows (n, ...), or the first `data.public` of them."""
    if files.public is None or run.data.public == 0:
        return np.empty((0, *form.input_shape), np.uint8 if form.kind == "image" else np.float32)
    found = read_public(files.public, form)
    if run.data.public is not None and run.data.public > len(found):
        raise DataError(f"{files.public} must hold {run.data.public} rows (data.public), but has {len(found)}.")
    return found[: run.data.public]


def _held_out(run: RunConfig, own: Dataset, at: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Indices of a party's training and test rows. The server trains on all its rows."""
    if at is None:
        return np.arange(len(own.y)), np.arange(0)
    data = run.data
    every, test = hold_out(own.y, own.test, seed=run.seed, fraction=data.test_fraction, limit=data.test_rows)
    train = np.setdiff1d(np.arange(len(own.y)), every)
    if not len(train) or not len(test):
        raise DataError(f"{len(own.y)} rows are too few to split into training and test rows: add more.")
    return train, test


def _pool(dataset: Dataset, device: str) -> Callable[[np.ndarray], Rows]:
    """A function from indices (n,) to rows of the data set, in one pool on this device."""
    every = rows_of(dataset.x, dataset, np.arange(len(dataset.y)), device, dataset.y)
    return lambda which: replace(every, index=torch.from_numpy(which).to(device))


def data_of(run: RunConfig, files: PrivateData | None = None) -> tuple[Dataset, Split]:
    """The data set of a run and its partition.

    Args:
        run: the config.
        files: the data set's location on this machine, if not the run's.

    Raises:
        DataError: the data set can't be read or partitioned.
    """
    data, files = run.data, files or PrivateData()
    root = files.root or data.root
    dataset = load(files.set or data.name, root=Path(root) if root else None)
    server = data.server_rows(len(dataset.train))
    training = len(dataset.train) - server
    training = int(training * (1 - data.test_fraction)) if dataset.test is None else training
    shares = split(
        dataset,
        clients=data.clients,
        seed=run.seed,
        partition=partition_at(data.partition) if ":" in data.partition else data.partition,
        options=data.options,
        server=server,
        public=min(1000, max(0, training) // 5) if data.public is None else data.public,
        test_fraction=data.test_fraction,
        test_rows=data.test_rows,
        own_test_rows=data.own_test_rows,
    )
    # Standardised by the server's rows, which are equal for all seeds; else by the public rows; else by all.
    known = next(rows for rows in (shares.server, shares.public, np.concatenate(shares.shards)) if len(rows))
    return dataset.standardised(known), shares
