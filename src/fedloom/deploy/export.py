"""Export of a run's parties, each to a folder of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedloom import methods
from fedloom._version import __version__
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.evaluation import contribution, decide
from fedloom.core.party import Party
from fedloom.data.vertical import PartyView
from fedloom.deploy import folder as folders
from fedloom.deploy.deployed import exported, load_active, load_party
from fedloom.deploy.folder import ACTIVE, MANIFEST, STATE, digest
from fedloom.experiment import checkpoint
from fedloom.experiment.build import SETTINGS, build
from fedloom.experiment.config import RunConfig
from fedloom.experiment.plan import RunPlan
from fedloom.experiment.reading import check
from fedloom.experiment.session import fingerprint

TRIED = 256
"""Maximum number of test rows on which folders are compared with the run."""
CLOSE = 1e-5
"""Tolerance of probabilities, and of embeddings relative to their largest number."""


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: the target.
        sizes: bytes of each folder by its name.
        models: each party's network by its folder's name.
        round, rounds: completed and planned rounds.
        alone: whether a party can predict alone.
        tried: number of test rows on which the folders' predictions match the run.
    """

    folder: Path
    sizes: Mapping[str, int]
    models: Mapping[str, str]
    round: int
    rounds: int
    alone: bool
    tried: int


def export(run: str | Path, out: str | Path | None = None, *, force: bool = False) -> Exported:
    """Write one folder for each party of a run: `party-0`, `party-1`, …, and `active` with the classifier.

    Each holds the trained state of its owner, and nothing of another party: no rows, labels, weights or prototypes. The
    state is that of the run's newest checkpoint; each folder is loaded and compared with it.

    Args:
        run: a run's folder. Its data must still exist, because the recipes are computed from it.
        out: None for `export` in the run's folder.
        force: replace existing folders once the new ones are verified, and remove those of other parties.

    Raises:
        ConfigError: the run's method is not vertical, or folders already exist.
        CheckpointError: the run has no valid checkpoint.
        FedloomError: the run cannot be rebuilt.
    """
    run, target = Path(run), Path(run) / "export" if out is None else Path(out)
    config = _config(run)
    _refuse_horizontal(config)
    plan = build(config)
    done, states = _saved(run, plan)
    contributors = plan.method.contributors or tuple(range(len(plan.clients)))
    names = [*(f"party-{m}" for m in contributors), ACTIVE]
    existing = [name for name in names if (target / name / MANIFEST).exists()]
    if existing and not force:
        raise ConfigError(f"{target / existing[0]} already exists; add --force to replace it, or choose another --out")
    parties = _restored(plan, states, contributors)
    embedded = {m: _embeddings(plan, party) for m, party in parties.items() if m is not None}
    inputs: dict[int | None, Any] = {None: None, **{m: _input_spec(plan, m) for m in embedded}}
    data = [folders.encoded({"state": exported(party), **_scaling(plan, m)}) for m, party in parties.items()]
    page = _page(plan.run)
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
        "width": next(iter(embedded.values())).shape[1],
        "classes": plan.data.classes,
    }
    with _staging(target) as staging:  # only verified folders replace others
        for name, m, tensors in zip(names, parties, data, strict=True):
            own = {"role": ACTIVE if m is None else "party", "party": m, "inputs": inputs[m]}
            folders.write(staging / name, {**common, **own}, tensors)
        trust = [*plan.architectures, *([str(page)] if page else [])]
        tried = _verify(staging, parties, embedded, trust)
        _install(staging, target, names)
    return Exported(
        target,
        {name: sum(file.stat().st_size for file in (target / name).iterdir()) for name in names},
        {f"party-{m}": plan.architectures[m] for m in contributors},
        done,
        plan.rounds,
        hasattr(plan.method.client, "alone"),
        tried,
    )


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A temporary folder within the target."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".new-", dir=target)
    except OSError as error:
        raise ConfigError(f"{target} can't be written ({error.strerror}); choose another --out") from None
    with made as folder:
        yield Path(folder)


def _install(staging: Path, target: Path, names: Sequence[str]) -> None:
    """Move the new folders into place, and remove folders of other parties from an earlier export."""
    try:
        for card in target.glob(f"party-*/{MANIFEST}"):
            if card.parent.name not in names:
                card.unlink()
                (card.parent / STATE).unlink(missing_ok=True)
                if not any(card.parent.iterdir()):
                    card.parent.rmdir()
        for name in names:
            (target / name).mkdir(exist_ok=True)
            for file in (STATE, MANIFEST):
                os.replace(staging / name / file, target / name / file)
    except OSError as error:
        raise ConfigError(f"{target} can't be written ({error.strerror}); choose another --out") from None


def _config(run: Path) -> RunConfig:
    """The config in a run's folder, for this machine's CPU."""
    path = run / "config.toml"
    if not path.is_file():
        inside = sorted(str(found.parent) for found in run.glob("*/config.toml"))
        hint = f"; choose one of: {', '.join(inside[:8])}" if inside else "; fedloom run … --out writes one"
        raise ConfigError(f"{run} is not a run's folder: it has no config.toml{hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    values.pop("engine", None)
    return check({"run": values}).run


def _saved(run: Path, plan: RunPlan) -> tuple[int, Mapping[str, Any]]:
    """The number of rounds in the newest checkpoint, and all parties' states after them."""
    try:
        found, _ = checkpoint.newest(run / "checkpoints", fingerprint(plan))
    except CheckpointError as error:
        raise CheckpointError(
            f"{run} can't be exported: none of its checkpoints is valid for the present data, config.toml and "
            f"version of fedloom\n{error}"
        ) from None
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet; let it finish a round first")
    return found[0], found[1]


def _refuse_horizontal(config: RunConfig) -> None:
    method, _, _ = config.resolve()
    if not SETTINGS[method.setting].exportable:
        able = ", ".join(name for name, known in methods.registry().items() if SETTINGS[known.setting].exportable)
        raise ConfigError(
            f"{method.name} is a horizontal method, whose clients have a whole model each; only runs of vertical "
            f"methods can be exported: {able}"
        )


def _restored(plan: RunPlan, states: Mapping[str, Any], contributors: Sequence[int]) -> dict[int | None, Party[Any]]:
    """The parties as they were after the last round, by number; None is the active party."""
    assert plan.server is not None
    active, *others = states  # the active party's comes first, then by number
    plan.server.load(states[active])
    parties: dict[int | None, Party[Any]] = {m: plan.clients[m]() for m in contributors}
    for m in contributors:
        parties[m].load(states[others[m]])
    return {**parties, None: plan.server}


def _embeddings(plan: RunPlan, party: Party[Any]) -> torch.Tensor:
    """Embeddings (n, d) of the test rows, as the active party receives them."""
    found = contribution(party, on="test")
    if not isinstance(found, torch.Tensor) or found.dim() != 2:
        raise ConfigError(f"parties of {plan.method.name} send no embeddings (n, d), so they can't be exported")
    return found


def _view(plan: RunPlan, m: int) -> PartyView:
    assert plan.data.parties is not None
    return plan.data.parties.views[m]


def _scaling(plan: RunPlan, m: int | None) -> dict[str, torch.Tensor]:
    """Shift and scale of a passive party."""
    if m is None:
        return {}
    view = _view(plan, m)
    return {"shift": torch.from_numpy(view.shift), "scale": torch.from_numpy(view.scale)}


def _input_spec(plan: RunPlan, m: int) -> dict[str, Any]:
    view = _view(plan, m)
    norm = plan.run.models.norm
    return {"model": plan.architectures[m], "norm": norm, "shape": view.input_shape, "recipe": view.recipe}


def _page(run: RunConfig) -> Path | None:
    """The file of a method page of the user's own."""
    return Path(run.method.partition(".py:")[0].removesuffix(".py") + ".py") if run.method_is_file else None


def _verify(
    folder: Path, parties: Mapping[int | None, Party[Any]], embedded: Mapping[int, torch.Tensor], trust: Sequence[str]
) -> int:
    """Load the folders and compare what they predict with the run's parties; return the number of test rows.

    Raises:
        CheckpointError: the predictions differ.
    """
    rows = 0
    for m in embedded:
        tests = parties[m].context.tests["test"]
        rows = min(TRIED, len(tests))
        x = tests.x(torch.arange(rows))
        _compare(f"party-{m}", parties[m].infer(x), load_party(folder / f"party-{m}", trust=trust).outputs(x))
    parts = {m: values[:rows] for m, values in embedded.items()}
    joint = torch.softmax(decide(parties[None], parts), -1)
    again = load_active(folder / ACTIVE, trust=trust).predict({m: part.numpy() for m, part in parts.items()})
    _compare(ACTIVE, joint, torch.from_numpy(again))
    return rows


def _compare(name: str, run: torch.Tensor, folder: torch.Tensor) -> None:
    scale = max(1.0, float(run.abs().max()))
    if run.shape != folder.shape or float((run - folder).abs().max()) > CLOSE * scale:
        raise CheckpointError(
            f"the folder {name} predicts otherwise than the run: its party uses state that it does not export; name "
            "all of it in EXPORT on the method's page"
        )
