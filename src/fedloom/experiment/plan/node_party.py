"""Builds one party at a node, and compares the facts that coordinator and node must share."""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError
from fedloom.core.method import Method, MethodConfig
from fedloom.core.party import Party
from fedloom.data.dataset import Dataset, DatasetLike
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.build import (
    pretrained_of,
    resolve,
    with_aggregator,
    with_local,
    with_secret,
)
from fedloom.experiment.plan.pretrained import architecture, named
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.models import external

SHOWN = 60
"""Maximum characters of a value in a message."""
HASH = re.compile(r"[0-9a-f]{64}")
"""A SHA-256, shown shortened."""
BUILT_IN = "built in"
"""In place of a page's SHA-256 for a method that is installed with fedloom."""


@dataclass(frozen=True)
class NodeParty:
    """A party at a node.

    Attributes:
        facts: plain values that must be equal at coordinator and node; none is private.
        own: whether its rows are private.
        counts: numbers of training (or aligned) rows and of test rows, of private data; None for a
            data set.
        notes: what was decided when private rows were read, for the node's owner.
    """

    party: Party[MethodConfig]
    facts: Mapping[str, Any]
    own: bool = False
    counts: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


def build_party(
    run: RunConfig,
    number: int,
    files: PrivateData | None = None,
    *,
    device: str = "cpu",
    secret: int | None = None,
    privacy_budget: Callable[..., None] | None = None,
    min_class_rows: int = 1,
) -> NodeParty:
    """Build one party of a run, without a server or other parties.

    Args:
        run: from the coordinator, see `for_nodes`.
        number: of the party.
        files: the party's data on this machine; None for the run's own names.
        device: a torch device.
        secret, privacy_budget, min_class_rows: see `ClientContext`.

    Raises:
        ConfigError, DataError, ModelError: the party does not exist, or cannot be built here.
    """
    method, cfg, rounds, planner = resolve(run, at_node=True)
    if not 0 <= number < run.data.clients:
        raise ConfigError(f"there is no party {number}; valid numbers are 0–{run.data.clients - 1}")
    here = run.model_copy(update={"engine": EngineConfig(device=device)})
    plan = with_secret(
        planner.build(here, method, cfg, rounds, files or PrivateData(), at=number), secret
    )
    plan = with_local(with_aggregator(plan))
    if number in plan.colocated:
        raise ConfigError(f"party {number} runs beside the server, not at a node")
    if "pretrained encoder" in method.needs and plan.data.dataset is not None:
        encoder = architecture(
            pretrained_of(run, plan.data.dataset.kind), plan.data.dataset, run.models.variance
        )
        plan.contexts[number] = replace(plan.contexts[number], encoder=encoder)
    context = plan.contexts[number]
    plan.contexts[number] = replace(
        context, privacy_budget=privacy_budget, min_class_rows=min_class_rows
    )
    party = plan.clients[number]()
    notes = (
        plan.data.dataset.notes if run.data.own and isinstance(plan.data.dataset, Dataset) else ()
    )
    return NodeParty(
        party, _facts(run, plan, number), run.data.own, _counts(run, party.context), notes
    )


def _counts(run: RunConfig, context: ClientContext) -> tuple[int, int] | None:
    if run.data.own:
        return len(context.rows), len(context.tests["own"])
    return (context.aligned, len(context.tests["test"])) if run.columns.private else None


def expected(plan: RunPlan, number: int) -> dict[str, Any]:
    """The `facts` that the node of party `number` must have."""
    return _facts(for_nodes(plan).model_copy(update={"method": plan.run.method}), plan, number)


def _facts(run: RunConfig, plan: RunPlan, number: int) -> dict[str, Any]:
    return {
        "fedloom": __version__,
        "method": plan.method.name,
        "page": hashlib.sha256(_page(run)).hexdigest() if run.method_is_file else BUILT_IN,
        "config": config_sha256(run, plan.cfg),
        "role": plan.names[number],
        "network": plan.architectures[number],
        **plan.data.schema(number),
        "public": plan.data.public_digest,
        "data": plan.data.common,
    }


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], own: str = "") -> list[str]:
    """A message for each fact that differs, with both values.

    Args:
        mine: facts of the coordinator.
        theirs: facts of a node.
        own: the run's `data.name` if rows are private, otherwise "".
    """
    keys = list(dict.fromkeys([*mine, *theirs]))
    different = [key for key in keys if mine.get(key) != theirs.get(key)]
    messages = []
    if own and "public" in different:
        mend = f"copy the file of [data.{own}] public again"
        both = _both(mine.get("public"), theirs.get("public"))
        messages = [f"its public rows are not the coordinator's: {mend} ({both})"]
        # data is a hash of public too
        different = [key for key in different if key not in ("public", "data")]
    if "page" in different and mine.get("method") == theirs.get("method"):
        messages.append(
            f"its page of {mine['method']} is not the coordinator's: copy the file there, and "
            f"list it in pages of node.toml ({_both(mine.get('page'), theirs.get('page'))})"
        )
        # config is a hash of the page too
        different = [key for key in different if key not in ("page", "config")]
    return messages + [
        f"{key[:SHOWN]}: {_both(mine.get(key), theirs.get(key))}" for key in different
    ]


def _both(mine: Any, theirs: Any) -> str:
    """Two different values; of lists, their lengths and the first different entries."""
    if isinstance(mine, list) and isinstance(theirs, list):
        pairs = zip([*mine, None], [*theirs, None], strict=False)
        at, (one, other) = next((k, pair) for k, pair in enumerate(pairs) if pair[0] != pair[1])
        return (
            f"number {at + 1} of {len(mine)} is {_short(one)} here, of {len(theirs)} "
            f"{_short(other)} there"
        )
    return f"{_short(mine)} here, {_short(theirs)} there"


def _short(value: Any) -> str:
    if isinstance(value, str) and HASH.fullmatch(value):
        return f"{value[:8]}…"
    text = "missing" if value is None else ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def config_sha256(run: RunConfig, cfg: Any) -> str:
    """SHA-256 of all settings that affect results, and of the method's page if it is the user's
    own.
    """
    left_out = {"engine", "name", "preset", "params", "method"}
    method = _page(run) if run.method_is_file else run.method.encode()
    placeless = run.model_copy(update={"data": run.data.model_copy(update={"root": None})})
    values = placeless.model_dump_json(exclude=left_out) + cfg.model_dump_json()
    return hashlib.sha256(f"{__version__}\n{values}\n".encode() + method).hexdigest()


def _page(run: RunConfig) -> bytes:
    """The source of the user's own page."""
    return Path(run.method.partition(".py:")[0].removesuffix(".py") + ".py").read_bytes()


def for_nodes(plan: RunPlan) -> RunConfig:
    """The config for nodes, without local paths.

    Raises:
        ConfigError: it depends on a local file.
    """
    return config_for_nodes(plan.run, plan.method, plan.data.dataset)


def config_for_nodes(run: RunConfig, method: Method, known: DatasetLike | None) -> RunConfig:
    """See `for_nodes`. `known`: the data set or its schema."""
    for setting, wrong, mend in (
        (
            "columns.files",
            run.columns.files,
            "set columns.private=true instead: then each node names its own file",
        ),
        ("columns.manifest", run.columns.manifest, "private images at nodes are not supported"),
        (
            "topology.file",
            run.topology.file,
            "nodes cannot read it: use a kind that is drawn from the seed",
        ),
        (
            "data.name",
            Path(run.data.name).name != run.data.name,
            "nodes know data by a name, not by a path",
        ),
    ):
        if wrong:
            raise ConfigError(f"{setting}: {mend}")
    model = PretrainedConfig()
    if "pretrained encoder" in method.needs and known is not None:
        model = named(pretrained_of(run, known.kind), known)
    changes = {"method": method.name, "engine": EngineConfig(), "pretrained": model}
    return run.model_copy(update={**changes, "data": run.data.model_copy(update={"root": None})})


def suspicious(run: RunConfig, allowed: Collection[str] = ()) -> list[str]:
    """A message for each setting with which a received config would run code, read files, or
    download models here. `data.name` is not checked, as nodes map it to their own data.

    Args:
        run: the config.
        allowed: names of permitted factories, partitions and models.
    """
    model = run.pretrained.model or ""
    names = [("models.pool", name) for name in run.models.names]
    names += [("data.partition", run.data.partition), ("pretrained.model", model)]
    files = {
        "method": run.method if run.method_is_file else None,
        "data.root": run.data.root,
        "columns.files": run.columns.files,
        "columns.manifest": run.columns.manifest,
        "topology.file": run.topology.file,
        "pretrained.file": run.pretrained.file,
        "engine.address": run.engine.address,
    }
    found = [
        f"{setting}: a received config must not name local files"
        for setting, value in files.items()
        if value
    ]
    for setting, name in names:
        if name not in allowed and (":" in name or external.is_external(name)):
            # pretrained.model may now be the path of a folder here, which the coordinator must not
            # learn
            which = "this model" if setting == "pretrained.model" else _short(name)
            found.append(
                f"{setting}: {which} would run or load code here: the node's owner must allow it "
                "by name"
            )
    return found
