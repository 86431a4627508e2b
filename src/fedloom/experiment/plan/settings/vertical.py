"""The vertical setting: parties with different columns of the same rows, split or private."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import models
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.method import Method
from fedloom.core.rng import stream
from fedloom.core.task import Number
from fedloom.data.encoder import TableEncoder
from fedloom.data.manifest import manifest
from fedloom.data.options import GUESS, DataOptions
from fedloom.data.party_files import OF_FILES, PartyFile, from_files
from fedloom.data.presence import RowPresence, complete_rows, read_presence
from fedloom.data.simulation import simulate
from fedloom.data.sources import is_path
from fedloom.data.stats import describe_parties
from fedloom.data.vertical import PartyView, VerticalDataset, scale_of
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.run import RunConfig, refuse_task
from fedloom.experiment.config.sections import SPLIT_SETTINGS, ColumnsConfig
from fedloom.experiment.plan.assignment import DataAssignment, digest, rows_of, sample, schema
from fedloom.experiment.plan.networks import EXTRACTORS
from fedloom.experiment.plan.private import Matched, PrivateData
from fedloom.experiment.plan.run_plan import RunPlan

ALIGNED, PARTIES = 200, 4
"""Default numbers of aligned rows and parties of a data set that is split."""


class Vertical:
    """The vertical setting, see `Planner`. Party 0 is colocated with the active party."""

    own_data = "columns.private", "set columns.private=true"

    def check(self, run: RunConfig, method: Method, *, server: bool) -> None:
        """Refuse settings of the horizontal setting."""
        own_file = (
            "natural" if run.data.group else "iid" if is_path(run.data.name) else ""
        )  # by itself: see `DataConfig`
        partitioned = run.data.partition not in (DataConfig().partition, own_file)
        for setting, given in (
            *(("server_rows", run.data.server_rows), ("unseen", run.data.unseen)),
            *(("partition", partitioned), ("options", run.data.options)),
        ):
            if given:
                raise ConfigError(
                    f"data.{setting}: {method.name} shares columns, not rows: leave it out"
                )
        if run.pretrained != PretrainedConfig():
            raise ConfigError(
                f"pretrained: {method.name} shares columns, not rows: leave the section out"
            )
        if run.data.own:
            raise ConfigError(
                f"data.row_schema: {method.name} shares columns: leave it out, and set "
                "columns.private=true"
            )
        if run.columns.incomplete and "pooled rows" in method.needs:
            raise ConfigError(
                f"columns.missing: {method.name} counts every row as complete; leave it out"
            )
        if run.columns.private and "pooled rows" in method.needs:
            raise ConfigError(
                f"columns.private: {method.name} needs all rows in one place; leave it out"
            )

    def clients(self, run: RunConfig, nodes: int | None) -> int | None:
        """One more than nodes; without nodes, the number of files, or `PARTIES`."""
        return (run.columns.number() or PARTIES) if nodes is None else nodes + 1

    def server_name(self, plan: RunPlan) -> str:
        """Always "active"."""
        return "active"

    def min_nodes(self, plan: RunPlan, nodes: int) -> int:
        """All nodes, or one for a method that predicts from any."""
        return min(1, nodes) if plan.method.any_contributor else nodes

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
        """The plan of a run. Only the active party's rows have labels."""
        data, columns = (
            _own_file(run, files, at or 0) if run.columns.private else _cut(run, method, cfg, files)
        )
        refuse_task(method, data.task.kind)
        if data.target is not None:
            _refuse_for_numbers(run)
        architectures = run.models.assigned(EXTRACTORS[columns.kind], columns.parties, run.seed)
        none = "no network" in method.needs
        if none:  # the method has models of its own
            architectures = (method.name,) * columns.parties
        server = ClientContext(
            id=0,
            seed=run.seed,
            parties=columns.parties,
            classes=data.task.width,
            target=data.target,
            aligned=columns.aligned,
            device=run.engine.device,
        )
        contexts = [replace(server, id=m) for m in range(columns.parties)]
        for m, view in columns.views.items():
            contexts[m] = _context(run, cfg, contexts[m], view, None if none else architectures[m])
        if columns.labels is not None:
            first, device = columns.views[0], run.engine.device
            labels = (
                columns.labels if data.target is None else data.target.standardized(columns.labels)
            )
            known = np.full(len(first.x), -1, labels.dtype)  # an unaligned row has none
            known[first.aligned] = labels
            server = replace(server, data=rows_of(first.x, first, first.aligned, device, known))
        return RunPlan(
            run,
            method,
            cfg,
            rounds,
            self,
            data,
            architectures,
            None,
            server,
            contexts,
            colocated=(0,),
        )


def _refuse_for_numbers(run: RunConfig) -> None:
    """Raise ConfigError for settings that a number to predict does not allow."""
    for name, given in (
        ("attack_labels", run.evaluate.attack_labels is not None),
        ("leaks", run.evaluate.leaks),
    ):
        if given:
            raise ConfigError(
                f"evaluate.{name}: its attacks guess classes, and this label is a number: leave "
                "it out"
            )


# -- assigning columns -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns on this machine: views by party, the number of aligned rows, and their labels
    (N_a,), if here.
    """

    kind: str
    parties: int
    aligned: int
    labels: np.ndarray | None
    views: Mapping[int, PartyView]


def _cut(
    run: RunConfig, method: Method, cfg: Any, files: PrivateData
) -> tuple[DataAssignment, _Columns]:
    """The columns of all parties, from a data set or files; without incomplete rows unless the
    method uses them.
    """
    parties = parties_of(run, files, pooled="pooled rows" in method.needs)
    if run.columns.incomplete and getattr(cfg, "incomplete", "drop") == "drop":
        parties = complete_rows(parties, method.contributors)

    # own test rows are a party's unaligned ones; only if all parties' classes are known
    views, nothing = parties.views, digest("")
    truths = [view.truth for view in views if view.truth is not None and len(view.truth)]
    own = {"own": truths} if len(truths) == len(views) and parties.classes else {}

    # what identifies the data, as a digest; parts that a run does not have count for nothing
    rows = [
        part
        for v in views
        for part in (v.aligned, v.unaligned, v.test, v.shift, v.scale, sample(v.x))
    ]
    rows += [v.present for v in views if v.present is not None]
    content = digest(f"{[v.x.shape for v in views]}", parties.labels, parties.test_labels, *rows)
    data = DataAssignment(
        name=parties.name,
        classes=parties.classes,
        digest=content,
        common=content,
        public_digest=nothing,
        schema=lambda m: schema(parties.kind, views[m].input_shape, parties.classes),
        describe=lambda: {
            "classes": list(parties.parts[0]),
            "parties": describe_parties(parties),
            "public": 0,
            "public_sha256": nothing,
        },
        labels={"test": [parties.test_labels] * len(views), **own},
        parties=parties,
        target=None
        if parties.classes
        else Number(*(run.data.label_scale or parties.target), run.models.variance),
        label=parties.label,
    )
    return data, _Columns(
        parties.kind, len(views), len(parties.labels), parties.labels, dict(enumerate(views))
    )


def _own_file(run: RunConfig, files: PrivateData, party: int) -> tuple[DataAssignment, _Columns]:
    """The private columns of one party, for its aligned rows.

    Raises:
        ConfigError: rows have not been matched, or no file is named here.
        DataError: the file is invalid.
    """
    matched, label, name = files.matched, run.columns.label or "", run.data.name
    if files.rows is None:
        raise ConfigError(f"data.{name}: set rows to the file with the columns of party {party}")
    if matched is None:
        raise ConfigError(
            "columns.private: rows of private columns are matched by the net engine: add "
            "--engine net"
        )
    id = files.id or str(run.columns.id)
    options = GUESS if files.own is None else files.own.options
    held = (
        PartyFile.passive(files.rows, id, label, options)
        if party
        else PartyFile.active(
            files.rows, id, label, _of_active(run.data.columns.of_file(files.rows.name), options)
        )
    )
    everybody = np.concatenate([matched.aligned, matched.unaligned, matched.test])
    if len(everybody) and int(everybody.max()) >= len(held.ids):
        raise DataError(f"{files.rows} has fewer rows than were matched: start a new run.")
    view, nothing = held.view(matched.aligned, matched.unaligned, matched.test, None), digest("")
    aligned, test, count = len(matched.aligned), len(matched.test), matched.classes
    # class names are only at the active party
    classes = held.classes or tuple(map(str, range(count)))
    truth = () if party else (held.labels[matched.aligned], held.labels[matched.test])
    common = digest(f"{matched.mark}\n{count} {aligned} {test}")
    data = DataAssignment(
        name=name,
        classes=classes,
        digest=digest(common, *truth, view.aligned, view.unaligned, view.test, sample(view.x)),
        common=common,
        public_digest=nothing,
        schema=lambda _: {"kind": "table", "classes": count, "aligned": aligned, "test": test},
        describe=lambda: {
            "classes": list(held.strata[1]),
            "parties": _described(name, held, view, matched),
            "public": 0,
            "public_sha256": nothing,
        },
        labels={"test": [truth[1]] * run.data.clients} if truth else {},
        target=None if count else Number(*_scale(run, truth), run.models.variance),
        label=label,
    )
    return data, _Columns(
        "table", run.data.clients, aligned, truth[0] if truth else None, {party: view}
    )


def _of_active(run: DataOptions, own: DataOptions) -> DataOptions:
    """The run's settings of the active party's file, whose cells are read as its owner says, if the
    owner does.
    """
    said = {name: getattr(own, name) for name in ("missing_words", "decimal")}
    return replace(
        run, **{name: value for name, value in said.items() if value != getattr(GUESS, name)}
    )


def _scale(run: RunConfig, truth: tuple[np.ndarray, ...]) -> tuple[float, float]:
    """Mean and s.d. by which the active party standardizes a number; of no use at the others, which
    have no `truth`.
    """
    if run.data.label_scale is not None or not truth:
        return run.data.label_scale or (0.0, 1.0)
    return scale_of(truth[0])


def _described(name: str, held: PartyFile, view: PartyView, matched: Matched) -> dict[str, Any]:
    """The active party's columns, and the number of rows of the others."""
    encoder = TableEncoder.from_dict(view.recipe)
    unknown = {
        "unaligned_counts": None,
        "gamma": None,
        "classes_held": None,
        "mid": None,
        "cosine": None,
    }
    rows = {"aligned": len(view.aligned), "test": len(view.test), **unknown}
    mine = {
        "name": view.name,
        "input_shape": list(view.input_shape),
        "columns": list(encoder.names),
    }
    parties = [{**mine, "dropped": list(encoder.dropped), "unaligned": len(view.unaligned), **rows}]
    for m, unaligned in enumerate(matched.others, 1):
        theirs: dict[str, Any] = {
            "name": f"party-{m}",
            "input_shape": [],
            "columns": None,
            "dropped": None,
        }
        parties.append({**theirs, "unaligned": unaligned, **rows})
    parts, names = held.strata
    aligned, test = (
        np.bincount(parts[rows], minlength=len(names)).tolist()
        for rows in (matched.aligned, matched.test)
    )
    return {
        "name": name,
        "kind": "table",
        "classes": list(names),
        "aligned_counts": aligned,
        "test_counts": test,
        "parties": parties,
        "all": {"gamma": None, "classes_held": None, "mid": None, "weighted_cosine": None},
    }


def _context(
    run: RunConfig, cfg: Any, context: ClientContext, view: PartyView, architecture: str | None
) -> ClientContext:
    """The client context of a party with these columns, and a network of this
    architecture, if any.
    """
    device = run.engine.device
    own = (
        {"own": _rows(view, view.unaligned, device)}
        if len(view.unaligned) and not run.columns.private
        else {}
    )
    return replace(
        context,
        data=_rows(view, np.concatenate([view.aligned, view.unaligned]), device),
        network=None
        if architecture is None
        else partial(
            models.build,
            architecture,
            view.input_shape,
            cfg.learned,
            norm=run.models.norm,
            seed=int(stream(run.seed, "initial weights", context.id).integers(2**31)),
        ),
        tests={"test": _rows(view, view.test, device), **own},
    )


def _rows(view: PartyView, which: np.ndarray, device: str) -> Rows:
    """The rows `which` (n,) of a view, and which of them the party has unless it has all."""
    rows, has = rows_of(view.x, view, which, device), view.has(which)
    return rows if has.all() else replace(rows, present=torch.from_numpy(has).to(device))


def parties_of(
    run: RunConfig, files: PrivateData | None = None, *, pooled: bool = False
) -> VerticalDataset:
    """The data of each party: columns of a data set, CSV files, or a manifest's images.

    Args:
        run: the config.
        files: see `data_of`.
        pooled: whether all rows are aligned and labeled; of a manifest, all rows that all parties
            have.

    Raises:
        DataError, ConfigError: the data cannot be read or split.
    """
    data, columns, files = run.data, run.columns, files or PrivateData()
    held_out: dict[str, Any] = {  # what all three sources take
        "test_fraction": data.test_share,
        "test_rows": data.test_rows,
        "validation": data.validation,
        "seed": run.seed,
    }

    # a file for each party
    if columns.files:
        if pooled:
            raise ConfigError(
                "columns.files: files do not have all columns of every row, which this method "
                "needs: leave them out"
            )
        # settings of `[data]` that have no meaning for them would be ignored in silence; GUESS has
        # the defaults, and OF_FILES names the settings that files have, too
        for name, value in vars(data.columns).items():
            if name not in OF_FILES and value != getattr(GUESS, name):
                raise ConfigError(
                    f"data.{name} does not apply to columns.files, whose ids and label are "
                    "columns.id and columns.label: leave it out"
                )
        return from_files(
            [Path(file) for file in columns.files],
            id=columns.id or "",
            label=columns.label or "",
            aligned=columns.aligned,  # number of people; None for all common ones
            options=data.columns,
            # matches the parties' ids, by the backend that `[columns]` names
            align=partial(_align, columns),
            # also people of the first file whom other files lack
            anybody=columns.missing == "files",
            # which party has which people, where absence is drawn or listed in a file, else None
            presence=_presence(
                run,
                len(columns.files),
                # people are named as in the active party's file, which is the first
                columns.id if isinstance(columns.id, str) else (columns.id or ("",))[0],
            ),
            **held_out,
        )

    # a manifest of images, which also tells how many parties there are
    if columns.manifest:
        # objects are named by `sample_id`; `number` counts the manifest's parties, and is None only
        # without a manifest and files
        presence = _presence(run, columns.number() or 0, "sample_id")
        aligned = None if pooled else columns.aligned
        return manifest(
            Path(columns.manifest),
            aligned=aligned,
            size=columns.image_size,
            presence=presence,
            **held_out,
        )

    # a data set whose columns are divided among parties
    # data set; this machine's own name and folder (`files`) come before the config's
    root = files.root or data.root
    return simulate(
        files.set or data.name,
        parties=data.clients,
        root=Path(root) if root else None,
        aligned=columns.aligned or ALIGNED,  # number of rows
        everything=pooled,
        options=data.columns,
        presence=_presence(run, data.clients, "row"),  # by row numbers
        **{name: getattr(columns, name) for name in SPLIT_SETTINGS},
        **held_out,
    )


def _presence(run: RunConfig, parties: int, key: str) -> RowPresence | None:
    """Which rows the parties have; None if all have all, or the files tell.

    Raises:
        ConfigError, DataError: a probability for each of other parties, or an invalid file of
            presence.
    """
    columns = run.columns
    if not columns.incomplete or columns.missing == "files":
        return None
    if columns.presence:
        return RowPresence(listed=read_presence(Path(columns.presence), key, parties))
    test = columns.missing if columns.missing_test is None else columns.missing_test
    shares = [
        value if isinstance(value, tuple) else (value,) * parties
        for value in (columns.missing, test)
    ]
    for name, each in zip(("missing", "missing_test"), shares, strict=True):
        if len(each) != parties:
            raise ConfigError(
                f"columns.{name}: one value, or one for each of {parties} parties, not {len(each)}"
            )
    seed = run.seed if columns.missing_seed is None else columns.missing_seed
    return RowPresence(seed, shares[0], shares[1])


def _align(columns: ColumnsConfig, ids: Sequence[Sequence[str | int]]) -> list[np.ndarray]:
    from fedloom.data.alignment import align, near_misses

    stems = [Path(file).stem for file in columns.files]
    names = stems if len(set(stems)) == len(stems) else columns.files
    if columns.missing == "files":  # pair by pair
        names = ["the active party", "another party"]
    for sentence in near_misses(ids, names):
        logging.getLogger("fedloom").warning("%s", sentence)
    found = align(ids, backend=columns.backend, names=names, local=range(len(ids)))
    for sentence in found.learned:
        logging.getLogger("fedloom").info("alignment: %s", sentence)
    return list(found.aligned)
