"""Export of a run's trained models, each to a folder of its own."""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.evaluation import decide
from fedloom.core.party import Party
from fedloom.deploy import folder as folders
from fedloom.deploy.deployed import embedded, exported, load_active, load_party
from fedloom.deploy.embeddings import Embeddings
from fedloom.deploy.export_models import WrittenModels, number_of, write_models
from fedloom.deploy.folder import ACTIVE, LIMITS, MANIFEST, STATE, digest
from fedloom.deploy.models import MODEL, NETWORK, PREDICT, WEIGHTS
from fedloom.experiment.config.foreign_code import refuse_foreign_code
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.session import fingerprint
from fedloom.support import toml

TRIED = 256
"""Maximum number of test rows on which folders are compared with the run."""
CLOSE = 1e-5
"""Tolerance of probabilities, and of embeddings relative to their largest number."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    sizes: Mapping[str, int]
    """Bytes of each folder by its name."""
    models: Mapping[str, str]
    """Each owner's network by its folder's name."""
    skipped: Mapping[str, str]
    """Owners without a folder, with the reason."""
    round: int
    rounds: int
    """Completed and planned rounds."""
    vertical: bool
    alone: bool
    """Whether the folders belong to a vertical federation, and whether its parties can predict
    alone.
    """
    bins: bool
    """Whether parties have bins of their columns in place of a network."""
    tried: int
    """Least number of rows on which a folder's predictions match the run."""
    on: str = "test rows"
    """Which rows these are."""


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    force: bool = False,
    trust: Collection[str] = (),
) -> Exported:
    """Write one folder for each trained model of a run, in the state of its newest checkpoint.

    Horizontal: one for each client, named by the owner of its rows, or else as in the ledger
    (`client-0`, …), with the model that its main metric evaluates; and `server`, if all clients
    share a model. Plain PyTorch opens them: see `fedloom.deploy.models`.

    Vertical: `party-0`, `party-1`, …, and `active` with the classifier. Each holds the state of its
    owner, and no rows, labels, weights or prototypes of another party.

    Each folder is loaded and compared with the run before it replaces another.

    Args:
        run: a run's folder. Its data must still exist, because the preprocessing is computed from
            it.
        out: None for `export` in the run's folder.
        force: replace existing folders once the new ones are verified, and remove the folders of
            other owners.
        trust: code that the config of a run outside the working folder may name.

    Raises:
        ConfigError: folders already exist, or the models are at nodes.
        CheckpointError: the run has no valid checkpoint, or none of its models has a folder that
            predicts as the run did.
        FedloomError: the run cannot be rebuilt.

    Example:
        >>> done = export("runs/digits", "models")
        >>> [*done.sizes]
        ['client-0', 'client-1', 'server']
    """
    run, target = Path(run), Path(run) / "export" if out is None else Path(out)
    plan = build(_config(run, trust))
    done, states = _saved(run, plan)
    existing = next((name for name in _owned(target)), None)
    if existing and not force:
        raise ConfigError(
            f"{target / existing} already exists; add --force (in Python force=True) to replace "
            "it, or choose another folder"
        )
    with _writable(target), tempfile.TemporaryDirectory(prefix=".new-", dir=target) as staging:
        work = _write_parties if plan.method.setting == "vertical" else write_models
        found = work(plan, states, done, Path(staging))
        if not found.names:
            reasons = [f"no folder for {name}: {why}" for name, why in found.skipped.items()]
            raise CheckpointError("\n".join([f"{run} cannot be exported", *reasons]))
        _install(Path(staging), target, found.names)  # only verified folders replace others
    return Exported(
        target,
        {
            name: sum(file.stat().st_size for file in (target / name).iterdir())
            for name in found.names
        },
        found.networks,
        found.skipped,
        done,
        plan.rounds,
        plan.method.setting == "vertical",
        hasattr(plan.method.client, "alone"),
        "no network" in plan.method.needs,
        found.tried,
        found.on,
    )


def _write_parties(
    plan: RunPlan, states: Mapping[str, Any], done: int, staging: Path
) -> WrittenModels:
    """Write and verify the folders of a vertical run."""
    contributors = plan.method.contributors or tuple(range(len(plan.clients)))
    names = [*(f"party-{m}" for m in contributors), ACTIVE]
    parties = _restored(plan, states, contributors)
    sent = {m: embedded(party, "test") for m, party in parties.items() if m is not None}
    tensors, inputs = zip(*(_content(plan, m, party) for m, party in parties.items()), strict=True)
    data = [message.encode(tree, LIMITS) for tree in tensors]
    file = Path(plan.run.method.partition(".py:")[0].removesuffix(".py") + ".py")
    page = file if plan.run.method_is_file else None
    common = {
        "fedloom": __version__,
        "parties": len(plan.clients),
        "needs": contributors,
        "federation": digest("".join(map(digest, data)).encode()),
        "round": done,
        "method": f"{page.name}:{plan.method.name}" if page else plan.method.name,
        "page_sha256": digest(page.read_bytes()) if page else None,
        "preset": plan.run.preset,
        "params": plan.cfg.model_dump(mode="json"),
        "width": max(part.shape[1] for part in sent.values()),
        "classes": plan.data.classes,
        **number_of(plan),
    }
    for name, m, spec, state in zip(names, parties, inputs, data, strict=True):
        own = {"role": ACTIVE if m is None else "party", "party": m, "inputs": spec}
        folders.write(staging / name, {**common, **own}, state)
    tried = _verify(staging, parties, sent, [*plan.architectures, *([str(page)] if page else [])])
    return WrittenModels(
        names, {f"party-{m}": plan.architectures[m] for m in contributors}, {}, tried, "test rows"
    )


@contextlib.contextmanager
def _writable(target: Path) -> Iterator[None]:
    """Create the folder; an operating system's error inside is a `ConfigError` about it."""
    new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            if new and not any(target.iterdir()):  # no folder was written
                target.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}); choose another --out"
        ) from None


def _owned(target: Path) -> list[str]:
    """The folders in `target` that an export wrote."""
    return sorted(
        found.parent.name for kind in (MANIFEST, MODEL) for found in target.glob(f"*/{kind}")
    )


def _install(staging: Path, target: Path, names: Sequence[str]) -> None:
    """Move the new folders into place, and remove the files of earlier ones."""
    for name in _owned(target):
        for file in (MANIFEST, STATE, MODEL, WEIGHTS, NETWORK, PREDICT):
            (target / name / file).unlink(missing_ok=True)
        if not any((target / name).iterdir()):
            (target / name).rmdir()
    for name in names:
        (target / name).mkdir(exist_ok=True)
        # the manifest last
        for made in sorted((staging / name).iterdir(), key=lambda path: path.suffix == ".json"):
            if made.is_file():
                os.replace(made, target / name / made.name)


def _config(run: Path, trust: Collection[str]) -> RunConfig:
    """The config in a run's folder, for this machine's CPU."""
    path = run / "config.toml"
    if not path.is_file():
        inside = sorted(str(found.parent) for found in run.glob("*/config.toml"))
        hint = (
            f"choose one of: {', '.join(inside[:8])}"
            if inside
            else "name the folder that a run wrote"
        )
        raise ConfigError(f"{run} is not a run's folder: it has no config.toml; {hint}")
    try:
        values = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    refuse_foreign_code(values, path, trust)
    config = check({"run": {**values, "engine": {}}}).run
    if config.data.own or config.columns.private:
        raise ConfigError(
            f"{run} is a run at nodes: each node has its own model, as run-ID/model.safetensors"
        )
    return config


def _saved(run: Path, plan: RunPlan) -> tuple[int, Mapping[str, Any]]:
    """The number of rounds in the newest checkpoint, and all parties' states after them."""
    try:
        found, _ = checkpoint.newest(run / "checkpoints", fingerprint(plan))
    except CheckpointError as error:
        raise CheckpointError(
            f"{run} cannot be exported: no checkpoint is valid for the present data, config.toml "
            f"and version of fedloom; run it again\n{error}"
        ) from None
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet; let it finish a round first")
    return found[0], found[1]


def _restored(
    plan: RunPlan, states: Mapping[str, Any], contributors: Sequence[int]
) -> dict[int | None, Party[object]]:
    """The parties as they were after the last round, by number; None is the active party."""
    assert plan.server is not None
    active, *others = states  # the active party's comes first, then by number
    plan.server.load(states[active])
    parties: dict[int | None, Party[object]] = {}
    for m in contributors:
        parties[m] = plan.clients[m]()
        parties[m].load(states[others[m]])
    return {**parties, None: plan.server}


def _content(
    plan: RunPlan, m: int | None, party: Party[object]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A party's exported tensors, and its `InputSpec`; None for the active party."""
    state = {"state": exported(party)}
    if m is None or plan.data.parties is None:
        return state, None
    view = plan.data.parties.views[m]
    scaling = {"shift": torch.from_numpy(view.shift), "scale": torch.from_numpy(view.scale)}
    network = {
        "model": plan.architectures[m],
        "norm": plan.run.models.norm,
        "shape": view.input_shape,
    }
    return {**state, **scaling}, {**network, "recipe": view.recipe}


def _verify(
    folder: Path,
    parties: Mapping[int | None, Party[object]],
    sent: Mapping[int, torch.Tensor],
    trust: Sequence[str],
) -> int:
    """Compare the folders' predictions with the predictions of the run's parties; return the number
    of test rows.
    """
    rows = 0
    if not all(len(values) for values in sent.values()):
        raise CheckpointError(
            "the run has no test row on which folders can be compared with it: set "
            "data.test_fraction above 0 and run again"
        )
    for m in sent:
        tests = parties[m].context.tests["test"]
        rows = min(TRIED, len(tests))
        x = tests.x(torch.arange(rows))
        _compare(
            f"party-{m}",
            parties[m].infer(x),
            load_party(folder / f"party-{m}", trust=trust).outputs(x),
        )
    parts = {m: values[:rows] for m, values in sent.items()}
    active = load_active(folder / ACTIVE, trust=trust)
    joint = active.in_words_or_unit(decide(parties[None], parts))
    again = [
        Embeddings(m, active.manifest.federation, "", part.float().numpy())
        for m, part in parts.items()
    ]
    _compare(ACTIVE, torch.from_numpy(joint), torch.from_numpy(active.predict(again)))
    return rows


def _compare(name: str, run: torch.Tensor, folder: torch.Tensor) -> None:
    scale = max(1.0, float(run.abs().max()))
    same = run.shape == folder.shape and float((run - folder).abs().max()) <= CLOSE * scale
    if not same:  # also of a number that is not finite
        raise CheckpointError(
            f"the folder {name} does not predict as the run did: its party uses state that it "
            "does not export; add it to EXPORT on the method's page"
        )
