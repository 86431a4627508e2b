"""A party, and the active party's classifier, loaded from their folders.

They are the method's own parties and predict what they predicted at the end of the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import methods, models
from fedloom.core import message
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.core.evaluation import PredictsAlone, contribution, decide
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.deploy import folder as folders
from fedloom.deploy.folder import ALL, WIDEST, InputSpec, PartyManifest, digest, validating
from fedloom.deploy.rows import RawRows, check_inputs, encode_rows
from fedloom.experiment.build import SETTINGS


def load_party(folder: str | Path, *, trust: Collection[str] = ()) -> DeployedParty:
    """A party from its folder; it needs no other's.

    Args:
        folder: as `export` wrote it.
        trust: networks (`package.module:factory`) and method pages (`FILE.py`) of one's own that the folder may name.
            Their code is executed, so no folder can name any on its own.

    Raises:
        CheckpointError: the folder is incomplete, altered, or not a party's.
        ConfigError: it names code that is not in `trust`.
    """
    path = Path(folder)
    manifest, state = folders.read(path, "party")
    method = _method(path, manifest, trust)
    assert manifest.inputs is not None
    if ":" in manifest.inputs.model and manifest.inputs.model not in trust:
        raise ConfigError(_untrusted(path, "network", manifest.inputs.model))
    with validating(path):
        return DeployedParty(manifest, state, method)


def load_active(folder: str | Path, *, trust: Collection[str] = ()) -> DeployedActive:
    """The active party's classifier from its folder; it needs no other's.

    Args, Raises: as `load_party`.
    """
    path = Path(folder)
    manifest, state = folders.read(path, "active")
    method = _method(path, manifest, trust)
    with validating(path):
        return DeployedActive(manifest, state, method)


class DeployedParty:
    """A party that embeds new rows.

    Attributes:
        manifest: the content of its `party.json`.
        inputs: how raw rows become numbers.
    """

    def __init__(self, manifest: PartyManifest, state: Any, method: Method) -> None:
        assert manifest.inputs is not None and manifest.party is not None
        self.manifest = manifest
        self.inputs: InputSpec = manifest.inputs
        check_inputs(self.inputs)
        cfg = _config(manifest, method)
        self._scaling = _scaling(state, self.inputs.shape)
        _check_size(self.inputs, cfg.learnt, state)
        self._tests: dict[str, Rows] = {}
        model, shape, norm = self.inputs.model, self.inputs.shape, self.inputs.norm
        context = ClientContext(
            id=manifest.party,
            seed=secrets.randbits(32),  # of noise on what is sent, if the method adds some: nobody may know it
            parties=manifest.parties,
            classes=len(manifest.classes),
            data=self._rows(np.empty((0, *shape), np.float32)),
            network=partial(models.build, model, shape, cfg.learnt, norm=norm, seed=0),
            tests=self._tests,
        )
        self._party = method.client(cfg, context)
        _restore(self._party, state["state"])

    @property
    def number(self) -> int:
        """Which party it is."""
        return self.manifest.party or 0

    @property
    def classes(self) -> tuple[str, ...]:
        """Z names."""
        return self.manifest.classes

    @property
    def can_predict_alone(self) -> bool:
        """Whether the method lets a party predict without the others."""
        return isinstance(self._party, PredictsAlone)

    def embed(self, rows: RawRows) -> np.ndarray:
        """Embeddings (n, d) float32 of new rows, for the active party. See `fedloom.deploy.rows.RawRows`.

        Raises:
            DataError: the rows don't fit.
        """
        name = secrets.token_hex(16)  # never the same, so that noise is never the same
        self._tests[name] = self._rows(encode_rows(self.inputs, rows))
        try:
            out = contribution(self._party, on=name)
        finally:
            del self._tests[name]
        if not isinstance(out, Tensor) or out.dim() != 2:
            raise ConfigError(f"parties of {self.manifest.method} send no embeddings (n, d), so there are none to make")
        return _array(out)

    def predict_alone(self, rows: RawRows) -> np.ndarray:
        """Probabilities (n, Z) float32 of this party's own, from its prototypes and prior.

        Raises:
            ConfigError: the method's parties can't do that.
            DataError: the rows don't fit.
        """
        if not isinstance(self._party, PredictsAlone):
            raise ConfigError(
                f"{self.manifest.method} gives no party what it needs to predict alone: make embeddings (fedloom "
                "embed) and let the active party predict from those of all"
            )
        embedded = self.outputs(self._rows(encode_rows(self.inputs, rows)).every)
        return _array(torch.softmax(self._party.alone(embedded), -1))

    def outputs(self, x: Tensor) -> Tensor:
        """Its network's outputs for inputs (n, ...): embeddings (n, d) before any noise."""
        return self._party.infer(x)

    def _rows(self, x: np.ndarray) -> Rows:
        return Rows(torch.from_numpy(x), None, torch.arange(len(x)), *self._scaling)


class DeployedActive:
    """The active party's classifier, which predicts from the embeddings of all parties.

    Attributes:
        manifest: the content of its `party.json`.
    """

    def __init__(self, manifest: PartyManifest, state: Any, method: Method) -> None:
        assert method.server is not None
        self.manifest = manifest
        self._alone = hasattr(method.client, "alone")
        classes = len(manifest.classes)
        # An active party is built where its rows are; one zero row of each class replaces those it had.
        labels, scaling = torch.arange(classes), (torch.zeros(1), torch.ones(1))
        rows = Rows(torch.zeros(classes, 1), labels, labels, *scaling)
        context = ClientContext(id=0, parties=manifest.parties, classes=classes, data=rows, aligned=classes)
        self._active = method.server(_config(manifest, method), context)
        message.check_like(state, {"state": object})
        _restore(self._active, state["state"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Z names."""
        return self.manifest.classes

    def predict(self, embeddings: Mapping[int, np.ndarray]) -> np.ndarray:
        """Probabilities (n, Z) float32 from each party's embeddings (n, d) of the same people in the same order.

        Raises:
            DataError: some are missing, or don't fit.
        """
        needed, parties = self.manifest.needs, self.manifest.parties
        missing = [m for m in needed if m not in embeddings]
        if missing:
            raise DataError(self._missing(missing))
        unknown = [m for m in embeddings if m not in range(parties)]
        if unknown:
            raise DataError(f"There is no party {unknown[0]}; valid numbers are 0–{parties - 1}.")
        parts = {m: self._checked(m, embeddings[m]) for m in sorted(needed)}
        sizes = {m: len(part) for m, part in parts.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"All parties must embed the same people, but their numbers of rows differ: {sizes}.")
        return _array(torch.softmax(decide(self._active, parts), -1))

    def _checked(self, m: int, values: np.ndarray) -> Tensor:
        width = self.manifest.width
        try:
            part = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError):
            kind = type(values).__name__
            raise DataError(f"Party {m}'s embeddings must be an array of numbers, not {kind}.") from None
        if part.ndim != 2 or part.shape[1] != width or not len(part):
            raise DataError(f"Party {m}'s embeddings must be (n, {width}) with n >= 1, but are {part.shape}.")
        if not np.isfinite(part).all():
            raise DataError(f"Party {m}'s embeddings must be finite, but some are not; embed its rows again.")
        return torch.from_numpy(part.copy())

    def _missing(self, missing: Sequence[int]) -> str:
        who = f"party {missing[0]}" if len(missing) == 1 else f"parties {', '.join(map(str, missing))}"
        needed = len(self.manifest.needs)
        other = (
            "any party can predict alone, from its prototypes: fedloom predict party-0 ROWS.csv, or "
            "load_party(...).predict_alone(rows)"
            if self._alone
            else f"there is no prediction: {self.manifest.method} has no other way"
        )
        return (
            f"Embeddings of {who} are missing, and a joint prediction needs those of "
            f"{f'all {needed} parties' if needed > 1 else 'this party'}: ask for them (fedloom embed "
            f"party-{missing[0]} ROWS.csv). Without them {other}."
        )


def exported(party: Party[Any]) -> dict[str, Any]:
    """The state of a party that is used after training."""
    return {name: value for name, value in party.state().items() if name in party.EXPORT}


def _restore(party: Party[Any], state: Any) -> None:
    """Give a party the state of its folder, if it has the form that the party exports."""
    message.check_like(state, exported(party))
    for name, value in state.items():
        setattr(party, name, value)


def _config(manifest: PartyManifest, method: Method) -> Any:
    cfg = method.configure(params=manifest.params)
    widest = min(WIDEST, ALL // manifest.parties)
    if cfg.width > widest:
        raise CheckpointError(f"width must be at most {widest}, but is {cfg.width}")
    return cfg


def _check_size(inputs: InputSpec, width: int, state: Any) -> None:
    """Refuse a network that is larger than the state to load into it, before memory is allocated for it."""
    if ":" in inputs.model:
        return
    with torch.device("meta"):
        claimed = sum(p.numel() for p in models.build(inputs.model, inputs.shape, width, inputs.norm).parameters())
    there = sum(leaf.numel() for _, leaf in message.leaves(state) if isinstance(leaf, Tensor))
    if claimed > there:
        raise CheckpointError(f"its network has {claimed:,} parameters, but the state has {there:,} numbers")


def _scaling(state: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Shift and scale, a number for each channel or column, shaped to broadcast over a row."""
    numbers = message.floats(shape[0])
    message.check_like(state, {"state": object, "shift": numbers, "scale": numbers})
    if not (state["scale"] > 0).all():
        raise CheckpointError("its scale must be above 0")
    broadcast = (-1, *[1] * (len(shape) - 1))
    return state["shift"].view(broadcast), state["scale"].view(broadcast)


def _method(path: Path, manifest: PartyManifest, trust: Collection[str]) -> Method:
    """The method that a folder names: one of fedloom's, or one whose page is trusted."""
    if ".py" not in manifest.method:
        with validating(path):
            method = methods.find(manifest.method)
    else:
        file, _, name = manifest.method.partition(".py:")
        pages = [page for page in trust if Path(page).name == f"{file}.py"]
        if not pages:
            raise ConfigError(_untrusted(path, "method page", f"{file}.py"))
        if not Path(pages[0]).is_file() or digest(Path(pages[0]).read_bytes()) != manifest.page_sha256:
            raise ConfigError(f"{pages[0]} is not the page that {path} was trained with; name that one")
        method = methods.load(f"{pages[0]}:{name}")
    if not SETTINGS[method.setting].exportable:
        raise CheckpointError(f"{path} names {method.name}, which is not a vertical method")
    return method


def _untrusted(path: Path, what: str, name: str) -> str:
    return (
        f"{path} needs a {what} that is not fedloom's, {name}, whose code would be executed; if you trust it, add "
        f"--trust {name}, or trust=[{name!r}]"
    )


def _array(x: Tensor) -> np.ndarray:
    out: np.ndarray = x.detach().cpu().float().numpy()
    return out
