"""A party, and the active party's classifier, loaded from their folders.

They are the method's own parties and predict what they predicted at the end of the run.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom import methods, models
from fedloom.core import message
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.core.evaluation import PredictsAlone, Restorable, contribution, decide
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.core.task import Number
from fedloom.deploy import folder as folders
from fedloom.deploy.embeddings import Embeddings, order_digest
from fedloom.deploy.folder import ALL, WIDEST, PartyManifest, digest, validating
from fedloom.deploy.rows import RawRows, check_inputs, encode_rows


def load_party(folder: str | Path, *, trust: Collection[str] = ()) -> "DeployedParty":
    """Load a party from its folder; no other folder is needed.

    Args:
        folder: written by `export`.
        trust: your own networks (`package.module:factory`) and method pages (`FILE.py`) that the
            folder may name. Their code is executed; code that is not listed here never is.

    Raises:
        CheckpointError: the folder is incomplete, altered, or not a party's.
        ConfigError: it names code that is not in `trust`.
    """
    manifest, state, method = _load(Path(folder), "party", trust)
    if manifest.inputs and ":" in manifest.inputs.model and manifest.inputs.model not in trust:
        raise ConfigError(_untrusted(Path(folder), "network", manifest.inputs.model))
    with validating(Path(folder)):
        return DeployedParty(manifest, state, method)


def load_active(folder: str | Path, *, trust: Collection[str] = ()) -> "DeployedActive":
    """Load the active party's classifier from its folder; arguments and errors as `load_party`."""
    manifest, state, method = _load(Path(folder), "active", trust)
    with validating(Path(folder)):
        return DeployedActive(manifest, state, method)


class DeployedParty:
    """A party that embeds new rows.

    Attributes:
        manifest: the content of its `party.json`.
        inputs: how raw rows become numbers.
        number: its number in the federation.
        classes: Z names; () for a number.
        can_predict_alone: whether the method lets a party predict without the others.
    """

    def __init__(self, manifest: PartyManifest, state: Any, method: Method) -> None:
        assert manifest.inputs is not None and manifest.party is not None
        self.manifest, self.inputs = manifest, manifest.inputs
        self.number, self.classes = manifest.party, manifest.classes
        check_inputs(self.inputs)
        cfg = _config(manifest, method)
        model, shape, norm = self.inputs.model, self.inputs.shape, self.inputs.norm
        self._scaling = _scaling(state, shape)
        network = None
        if "no network" not in method.needs:
            _check_size(model, shape, norm, cfg.learned, state)
            network = partial(models.build, model, shape, cfg.learned, norm=norm, seed=0)
        self._tests: dict[str, Rows] = {}
        context = ClientContext(
            id=self.number,
            seed=secrets.randbits(32),  # nobody may know the seed of noise on embeddings
            parties=manifest.parties,
            classes=manifest.outputs,
            target=_target(manifest),
            data=self._rows(np.empty((0, *shape), np.float32)),
            network=network,
            tests=self._tests,
        )
        self._party = method.client(cfg, context)
        self.can_predict_alone = isinstance(self._party, PredictsAlone)
        _restore(self._party, state["state"])

    def embed(self, rows: RawRows, ids: Sequence[str] | None = None) -> Embeddings:
        """Embeddings (n, d) float32 of new rows, for the active party. See
        `fedloom.deploy.rows.RawRows`.

        Args:
            rows: n rows.
            ids: of the n people, by which the active party checks that all parties embed the same
                people in the same order. None leaves the order unchecked.

        Raises:
            DataError: the rows do not fit, or an id is missing or repeated.
        """
        name = secrets.token_hex(16)  # never the same, so that noise is never the same
        self._tests[name] = self._rows(encode_rows(self.inputs, rows))
        try:
            out = embedded(self._party, name)
        finally:
            del self._tests[name]
        if ids is not None and len(ids) != len(out):
            raise DataError(
                f"There must be one id for each of the {len(out)} rows, but there are {len(ids)}."
            )
        order = "" if ids is None else order_digest(ids)
        return Embeddings(
            self.number, self.manifest.federation, order, out.detach().cpu().float().numpy()
        )

    def predict_alone(self, rows: RawRows) -> np.ndarray:
        """Probabilities (n, Z) float32 of this party alone, from its prototypes and prior.

        Raises:
            ConfigError: the method's parties cannot predict alone.
            DataError: the rows do not fit.
        """
        if not isinstance(self._party, PredictsAlone):
            raise ConfigError(
                f"parties of {self.manifest.method} cannot predict alone; make embeddings "
                "(fedloom embed) and let the active party predict from those of all parties"
            )
        outputs = self.outputs(self._rows(encode_rows(self.inputs, rows)).every)
        return _probabilities(self._party.alone(outputs))

    def outputs(self, x: Tensor) -> Tensor:
        """Its network's outputs for inputs (n, ...): embeddings (n, d) before any noise."""
        return self._party.infer(x)

    def _rows(self, x: np.ndarray) -> Rows:
        return Rows(torch.from_numpy(x), None, torch.arange(len(x)), *self._scaling)


class DeployedActive:
    """The active party's classifier, which predicts from the embeddings of all parties.

    Attributes:
        manifest: the content of its `party.json`.
        classes: Z names; () for a number.
    """

    def __init__(self, manifest: PartyManifest, state: Any, method: Method) -> None:
        assert method.server is not None
        self.manifest, self.classes = manifest, manifest.classes
        self._alone, self._any = hasattr(method.client, "alone"), method.any_contributor
        self._narrower = "no network" in method.needs
        classes, target = manifest.outputs, _target(manifest)
        # An active party is built where its rows are; one zero row of each class replaces those it
        # had.
        places, scaling = torch.arange(classes), (torch.zeros(1), torch.ones(1))
        rows = Rows(
            torch.zeros(classes, 1), places if target is None else places.float(), places, *scaling
        )
        context = ClientContext(
            id=0,
            parties=manifest.parties,
            classes=classes,
            target=target,
            data=rows,
            aligned=classes,
        )
        self._active = method.server(_config(manifest, method), context)
        message.check_like(state, {"state": object})
        _restore(self._active, state["state"])

    def predict(
        self, embeddings: Iterable[Embeddings], ids: Sequence[str] | None = None
    ) -> np.ndarray:
        """Probabilities (n, Z) float32 from the parties' embeddings of the same people in the same
        order. A number, and its s.d. if the network predicts the variance, are (n, 1 or 2) float64
        in the unit of the label.

        Args:
            embeddings: one of each party, from `DeployedParty.embed` or `read_embeddings`; of any
                parties, if the method predicts from any.
            ids: of the n people, to compare with the embeddings' ids.

        Raises:
            DataError: a needed party is missing, one is repeated, embeddings are of another export,
                or their people differ.
        """
        sent = self._by_party(embeddings)
        _check_order(
            {m: one.order for m, one in sent.items()}, None if ids is None else order_digest(ids)
        )
        parts = {m: self._tensor(sent[m]) for m in sorted(self.manifest.needs) if m in sent}
        sizes = {m: len(part) for m, part in parts.items()} | (
            {} if ids is None else {"ids": len(ids)}
        )
        if len(set(sizes.values())) > 1:
            raise DataError(
                "All parties must embed the same people, but their numbers of rows differ: "
                f"{sizes}."
            )
        return self.in_words_or_unit(decide(self._active, parts))

    def in_words_or_unit(self, outputs: Tensor) -> np.ndarray:
        """The active party's outputs (n, W) as probabilities, or as numbers in their unit."""
        number = self.manifest.number
        return _probabilities(outputs) if number is None else number.in_unit(outputs)

    def _by_party(self, embeddings: Iterable[Embeddings]) -> dict[int, Embeddings]:
        found: dict[int, Embeddings] = {}
        for one in embeddings:
            if not isinstance(one, Embeddings):
                kind = type(one).__name__
                raise DataError(
                    "Each must be an Embeddings, from embed(rows, ids) or read_embeddings, not "
                    f"{kind}."
                )
            if one.federation != self.manifest.federation:
                raise DataError(
                    f"Party {one.party}'s embeddings were made with a folder of another export; "
                    "use the folders of one."
                )
            if one.party in found:
                raise DataError(
                    f"Party {one.party} has more than one set of embeddings; give one for each "
                    "party."
                )
            found[one.party] = one
        missing = [m for m in self.manifest.needs if m not in found]
        if missing and (not self._any or len(missing) == len(self.manifest.needs)):
            raise DataError(self._missing(missing))
        return found

    def _tensor(self, sent: Embeddings) -> Tensor:
        part, width = np.asarray(sent.values), self.manifest.width
        fits = part.ndim == 2 and (
            part.shape[1] == width or (self._narrower and part.shape[1] < width)
        )
        if part.dtype != np.float32 or not fits or not len(part) or not np.isfinite(part).all():
            got = f"{part.shape} {part.dtype}"
            raise DataError(
                f"Party {sent.party}'s embeddings must be (n >= 1, {width}), finite, float32, "
                f"not {got}."
            )
        return torch.from_numpy(part.copy())

    def _missing(self, missing: Sequence[int]) -> str:
        parties = (
            f"party {missing[0]}"
            if len(missing) == 1
            else f"parties {', '.join(map(str, missing))}"
        )
        how = f"ask for them (fedloom embed party-{missing[0]} ROWS.csv)"
        alone = "any party can predict alone, from its prototypes: fedloom predict party-0 ROWS.csv"
        other = (
            f"Without them {alone}"
            if self._alone
            else f"Parties of {self.manifest.method} cannot predict alone"
        )
        needed = len(self.manifest.needs)
        return (
            f"Embeddings of {parties} are missing; a joint prediction needs those of all "
            f"{needed}: {how}. {other}."
        )


def _check_order(orders: Mapping[int, str], own: str | None) -> None:
    """Raise DataError unless all digests of the order of people, and of the caller's ids, are
    equal.
    """
    expected = next(iter(orders.values()), "") if own is None else own
    odd = next((m for m, order in orders.items() if order != expected), None)
    if odd is not None:
        without = next((m for m, order in orders.items() if not order), None)
        raise DataError(
            f"Party {without}'s embeddings have no ids, but those of others do; embed its rows "
            "with --id (embed(rows, ids)), so that the order of people can be compared."
            if without is not None
            else f"Party {odd}'s embeddings are of other people, or of the same in another order, "
            f"than {'the rows given' if own else f'those of party {next(iter(orders))}'}; "
            "bring all files into one order (fedloom align) and embed again."
        )


def embedded(party: Party[object], on: str) -> Tensor:
    """A party's embeddings (n, d) of the test rows named `on`, as the active party
    receives them.
    """
    found = contribution(party, on=on)
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise ConfigError(
            f"{type(party).__name__} has no embeddings (n, d), so it cannot be used after training"
        )
    return found


def exported(party: Party[object]) -> dict[str, Any]:
    """The state of a party that is used after training."""
    return {name: value for name, value in party.state().items() if name in party.EXPORT}


def _restore(party: Party[object], state: Any) -> None:
    """Give a party the state of its folder, if it has the form that the party exports.

    Raises:
        MessageError: it has another form.
    """
    if isinstance(party, Restorable):
        message.check_like(state, dict.fromkeys(party.EXPORT, object))
        party.restore(state)
        return
    message.check_like(state, exported(party))
    for name, value in state.items():
        setattr(party, name, value)


def _target(manifest: PartyManifest) -> Number | None:
    number = manifest.number
    return None if number is None else Number(number.shift, number.scale, number.variance)


def _config(manifest: PartyManifest, method: Method) -> Any:
    cfg, widest = method.configure(params=manifest.params), min(WIDEST, ALL // manifest.parties)
    width = getattr(cfg, cfg.FEATURE_DIM, 0)
    if width > widest:
        raise CheckpointError(f"params.{cfg.FEATURE_DIM} must be at most {widest}, not {width}")
    return cfg


def _check_size(model: str, shape: tuple[int, ...], norm: Any, outputs: int, state: Any) -> None:
    """Refuse a network larger than its state before memory is allocated for it."""
    if ":" in model:
        return
    with torch.device("meta"):
        claimed = sum(p.numel() for p in models.build(model, shape, outputs, norm).parameters())
    saved = sum(leaf.numel() for _, leaf in message.leaves(state) if isinstance(leaf, Tensor))
    if claimed > saved:
        raise CheckpointError(
            f"its network has {claimed:,} parameters, but the state has {saved:,} numbers"
        )


def _scaling(state: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Shift and scale of each channel or column, shaped to broadcast over a row."""
    numbers = message.floats(shape[0])
    message.check_like(state, {"state": object, "shift": numbers, "scale": numbers})
    if not (state["scale"] > 0).all():
        raise CheckpointError("its scale must be above 0")
    broadcast = (-1, *[1] * (len(shape) - 1))
    return state["shift"].view(broadcast), state["scale"].view(broadcast)


def _load(
    path: Path, role: Literal["party", "active"], trust: Collection[str]
) -> tuple[PartyManifest, message.Tree, Method]:
    """A folder's manifest, state and method: one of fedloom's, or one whose page is trusted."""
    manifest, state = folders.read(path, role)
    if ".py" not in manifest.method:
        with validating(path):
            method = methods.find(manifest.method)
    else:
        file, _, name = manifest.method.partition(".py:")
        page = next((page for page in trust if Path(page).name == f"{file}.py"), None)
        if page is None:
            raise ConfigError(_untrusted(path, "method page", f"{file}.py"))
        if not Path(page).is_file() or digest(Path(page).read_bytes()) != manifest.page_sha256:
            raise ConfigError(
                f"{page} is not the method page of {path}; give the file that it was trained with"
            )
        method = methods.load(f"{page}:{name}")
    if method.setting != "vertical":
        raise CheckpointError(f"{path} names {method.name}, which is not a vertical method")
    return manifest, state, method


def _untrusted(path: Path, kind: str, name: str) -> str:
    return (
        f"{path} needs your own {kind} {name}, whose code would be executed; if you trust it, "
        f"add --trust {name}, or trust=[{name!r}]"
    )


def _probabilities(logits: Tensor) -> np.ndarray:
    out: np.ndarray = torch.softmax(logits, -1).detach().cpu().float().numpy()
    return out
