"""A run's parties, each into a folder of its own."""

from __future__ import annotations

import contextlib
import hashlib
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
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.deploy import folder as folders
from fedloom.deploy.deployed import kept, load_active, load_party, predicts_alone
from fedloom.deploy.folder import ACTIVE, CARD, STATE, digest
from fedloom.experiment import checkpoint
from fedloom.experiment.config import RunConfig
from fedloom.experiment.holdings import ByColumns
from fedloom.experiment.reading import check
from fedloom.experiment.session import fingerprint
from fedloom.experiment.world import World, build
from fedloom.methods.vertical.split import LocalActive

TRIED = 256
"""Test rows on which folders are compared with the run, at most."""
CLOSE = 1e-5
"""How far two probabilities, or numbers of an embedding of length about 1, may be apart."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: where.
        sizes: bytes of each folder by its name.
        models: each party's network by its folder's name.
        round, rounds: after so many of them.
        alone: whether a party can predict alone.
        tried: test rows on which the folders answered as the run does.
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

    Each holds what its owner needs after training, and nothing of another's: no row, no label, nobody else's weights
    or prototypes. They come from the run's newest checkpoint, and are read back and compared with it.

    Args:
        run: a run's folder. Its data must be where it was: that is where each party's recipe comes from.
        out: None for `export` in the run's folder.
        force: replace folders that are there, once the new ones were compared, and remove those of other parties.

    Raises:
        ConfigError: the run's method shares rows and not columns, or folders are there already.
        CheckpointError: the run has no checkpoint that can be used.
        FedloomError: the run can't be built again.
    """
    run, target = Path(run), Path(run) / "export" if out is None else Path(out)
    config = _config(run)
    _refuse_rows(config)
    world = build(config)
    done, states = _saved(run, world)
    needs = (0,) if isinstance(world.server, LocalActive) else tuple(range(len(world.clients)))
    names = [f"party-{m}" for m in needs] + [ACTIVE]
    there = [name for name in names if (target / name / CARD).exists()]
    if there and not force:
        raise ConfigError(f"{target / there[0]} is there already; add --force to replace it, or choose another --out")
    ends = _ends(world, states, needs)
    sent = {name: _sent(world, party) for name, party in ends.items() if name != ACTIVE}
    data = {name: folders.encoded(_content(world, name, party)) for name, party in ends.items()}
    federation = digest("".join(map(digest, data.values())).encode())
    common = _common(world, done, needs, federation, next(iter(sent.values())).shape[1])
    with _fresh(target) as fresh:  # what answers otherwise than the run is not to be used, nor to replace anything
        for name, party in ends.items():
            part = None if name == ACTIVE else party.site.id
            inputs = None if part is None else _inputs(world, part)
            role = ACTIVE if part is None else "party"
            folders.write(fresh / name, {**common, "role": role, "party": part, "inputs": inputs}, data[name])
        tried = _compared(world, fresh, ends, sent)
        _move(fresh, target, names)
    return Exported(
        target,
        {name: sum(file.stat().st_size for file in (target / name).iterdir()) for name in names},
        {f"party-{m}": world.architectures[m] for m in needs},
        done,
        world.rounds,
        predicts_alone(world.method.client),
        tried,
    )


@contextlib.contextmanager
def _fresh(target: Path) -> Iterator[Path]:
    """An empty folder within the target, for as long as it is needed."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".new-", dir=target)
    except OSError as error:
        raise ConfigError(f"{target} can't be written ({error.strerror}); choose another --out") from None
    with made as folder:
        yield Path(folder)


def _move(fresh: Path, target: Path, names: Sequence[str]) -> None:
    """Put the new folders' files where they belong, and remove what an earlier export wrote for other parties."""
    try:
        for card in target.glob(f"party-*/{CARD}"):
            if card.parent.name not in names:
                card.unlink()
                (card.parent / STATE).unlink(missing_ok=True)
                if not any(card.parent.iterdir()):
                    card.parent.rmdir()
        for name in names:
            (target / name).mkdir(exist_ok=True)
            for file in (STATE, CARD):
                os.replace(fresh / name / file, target / name / file)
    except OSError as error:
        raise ConfigError(f"{target} can't be written ({error.strerror}); choose another --out") from None


def _config(run: Path) -> RunConfig:
    """The config of a run's folder, to be run on this machine's CPU whatever it ran on."""
    path = run / "config.toml"
    if not path.is_file():
        inside = sorted(str(found.parent) for found in run.glob("*/config.toml"))
        hint = f"; these are: {', '.join(inside[:8])}" if inside else "; fedloom run … --out writes one"
        raise ConfigError(f"{run} is no run's folder: it has no config.toml{hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    values.pop("engine", None)
    return check({"run": values}).run


def _saved(run: Path, world: World) -> tuple[int, Mapping[str, Any]]:
    """The newest round that was saved, and the states of all after it."""
    try:
        found, _ = checkpoint.newest(run / "checkpoints", fingerprint(world))
    except CheckpointError as error:
        raise CheckpointError(
            f"{run} can't be exported: none of its checkpoints is sound and of the data, config.toml and version of "
            f"fedloom that are here now\n{error}"
        ) from None
    if found is None:
        raise CheckpointError(f"{run} has no checkpoint yet; let it do a round first")
    return found[0], found[1]


def _refuse_rows(config: RunConfig) -> None:
    method, _, _ = config.resolve()
    if method.setting == "horizontal":
        able = ", ".join(name for name, known in methods.registry().items() if known.setting == "vertical")
        raise ConfigError(
            f"{method.name} shares rows, not columns: there are no parties to take apart, as each client has a whole "
            f"model. What can be exported are runs of: {able}"
        )


def _ends(world: World, states: Mapping[str, Any], needs: Sequence[int]) -> dict[str, Party[Any]]:
    """The parties as they were after the last round, by the names of their folders."""
    assert world.server is not None
    home, *others = states  # the home's comes first, then by number
    world.server.load(states[home])
    ends: dict[str, Party[Any]] = {}
    for m in needs:
        party = ends[f"party-{m}"] = world.clients[m]()
        party.load(states[others[m]])
    return {**ends, ACTIVE: world.server}


def _sent(world: World, party: Party[Any]) -> torch.Tensor:
    """Embeddings (n, d) that the active party gets of test rows."""
    found = contribution(party, on="test")
    if not isinstance(found, torch.Tensor) or found.dim() != 2:
        raise ConfigError(f"parties of {world.method.name} send no embeddings (n, d), so they can't be used like this")
    return found


def _content(world: World, name: str, party: Party[Any]) -> dict[str, Any]:
    """The tensors of a folder."""
    if name == ACTIVE:
        return {"state": kept(party, ACTIVE)}
    view = _views(world)[party.site.id]
    level = {"shift": torch.from_numpy(view.shift), "scale": torch.from_numpy(view.scale)}
    return {"state": kept(party, "party"), **level}


def _inputs(world: World, m: int) -> dict[str, Any]:
    view = _views(world)[m]
    shape = view.input_shape
    return {"model": world.architectures[m], "norm": world.run.models.norm, "shape": shape, "recipe": view.recipe}


def _views(world: World) -> Sequence[Any]:
    assert isinstance(world.held, ByColumns)
    return world.held.parties.views


def _common(world: World, done: int, needs: Sequence[int], federation: str, width: int) -> dict[str, Any]:
    """What all folders say of the run."""
    page = _page(world.run, world.method)
    return {
        "fedloom": __version__,
        "parties": len(world.clients),
        "needs": needs,
        "federation": federation,
        "round": done,
        "method": f"{page.name}:{world.method.name}" if page else world.method.name,
        "page_sha256": hashlib.sha256(page.read_bytes()).hexdigest() if page else None,
        "preset": world.run.preset,
        "params": world.cfg.model_dump(mode="json"),
        "width": width,
        "classes": world.held.classes,
    }


def _page(run: RunConfig, method: Method) -> Path | None:
    """The file of a method page of the user's own."""
    return Path(run.method.partition(".py:")[0].removesuffix(".py") + ".py") if run.method_is_file else None


def _compared(world: World, target: Path, ends: Mapping[str, Party[Any]], sent: Mapping[str, torch.Tensor]) -> int:
    """Read the folders back and let them answer on test rows; how many there were.

    Raises:
        CheckpointError: they answer otherwise than the run's own parties.
    """
    page = _page(world.run, world.method)
    trust = [*world.architectures, *([str(page)] if page else [])]
    parts, rows = {}, 0
    for name, party in ends.items():
        if name == ACTIVE:
            continue
        tests = party.site.tests["test"]
        rows = min(TRIED, len(tests))
        x = tests.x(torch.arange(rows))
        _same(name, party.infer(x), load_party(target / name, trust=trust).answer(x))
        parts[party.site.id] = sent[name][:rows]
    joint = torch.softmax(decide(ends[ACTIVE], parts), -1)
    again = load_active(target / ACTIVE, trust=trust).predict({m: part.numpy() for m, part in parts.items()})
    _same(ACTIVE, joint, torch.from_numpy(again))
    return rows


def _same(name: str, run: torch.Tensor, folder: torch.Tensor) -> None:
    scale = max(1.0, float(run.abs().max()))
    if run.shape != folder.shape or float((run - folder).abs().max()) > CLOSE * scale:
        raise CheckpointError(
            f"the folder {name} answers otherwise than the run does: its method keeps what it predicts with elsewhere "
            "than in params, buffers, prototypes and prior, and can't be exported"
        )
