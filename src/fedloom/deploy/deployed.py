"""A party, and the active party's classifier, brought back from their folders.

They are the method's own parties: what they answer is what they answered at the end of the run.
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
from fedloom.core.context import Rows, Site
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.core.evaluation import PredictsAlone, contribution, decide
from fedloom.core.message import Template
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.deploy import folder as folders
from fedloom.deploy.folder import ALL, WIDEST, Card, InputSpec, digest, sound
from fedloom.deploy.rows import RawRows, check_inputs, encode_rows

KEPT = {"party": ("params", "buffers", "prototypes", "prior"), "active": ("params", "buffers")}
"""What of the state of each role is used after training. The active party's other memory is of other parties."""


def load_party(folder: str | Path, *, trust: Collection[str] = ()) -> DeployedParty:
    """A party from its folder; it needs no other's.

    Args:
        folder: as `export` wrote it.
        trust: networks (`package.module:factory`) and method pages (`FILE.py`) of one's own that the folder may name.
            Their code is run; so nothing is taken for granted that only the folder says.

    Raises:
        CheckpointError: the folder is torn, altered, or not a party's.
        ConfigError: it names code that is not in `trust`.
    """
    path = Path(folder)
    card, state = folders.read(path, "party")
    method = _method(path, card, trust)
    assert card.inputs is not None
    if ":" in card.inputs.model and card.inputs.model not in trust:
        raise ConfigError(_untrusted(path, "network", card.inputs.model))
    with sound(path):
        return DeployedParty(card, state, method)


def load_active(folder: str | Path, *, trust: Collection[str] = ()) -> DeployedActive:
    """The active party's classifier from its folder; it needs no other's.

    Args, Raises: as `load_party`.
    """
    path = Path(folder)
    card, state = folders.read(path, "active")
    method = _method(path, card, trust)
    with sound(path):
        return DeployedActive(card, state, method)


class DeployedParty:
    """A party that embeds new rows.

    Attributes:
        card: what its `party.json` says.
    """

    def __init__(self, card: Card, state: Any, method: Method) -> None:
        assert card.inputs is not None and card.party is not None
        self.card = card
        self._inputs: InputSpec = card.inputs
        check_inputs(card.inputs)
        cfg = _config(card, method)
        self._level = _level(state, card.inputs.shape)
        _small(card.inputs, cfg.learnt, state)
        self._tests: dict[str, Rows] = {}
        network = partial(models.build, card.inputs.model, card.inputs.shape, cfg.learnt, norm=card.inputs.norm, seed=0)
        site = Site(
            id=card.party,
            seed=secrets.randbits(32),  # of noise on what leaves, if the method adds some: nobody may know it
            parties=card.parties,
            classes=len(card.classes),
            data=self._rows(np.empty((0, *card.inputs.shape), np.float32)),
            network=network,
            tests=self._tests,
        )
        self._party = method.client(cfg, site)
        _restore(self._party, state["state"], "party")

    @property
    def number(self) -> int:
        """Which party it is."""
        return self.card.party or 0

    @property
    def classes(self) -> tuple[str, ...]:
        """Z names."""
        return self.card.classes

    @property
    def inputs(self) -> InputSpec:
        """How raw rows become numbers."""
        return self._inputs

    @property
    def can_predict_alone(self) -> bool:
        """Whether the method gives a party all it needs to predict."""
        return predicts_alone(type(self._party))

    def embed(self, rows: RawRows) -> np.ndarray:
        """Embeddings (n, d) float32 of new rows, for the active party. See `fedloom.deploy.rows.RawRows`.

        Raises:
            DataError: the rows don't fit.
        """
        return _array(self._embed(self._rows(encode_rows(self._inputs, rows))))

    def predict_alone(self, rows: RawRows) -> np.ndarray:
        """Probabilities (n, Z) float32 of this party's own, from its prototypes and prior.

        Raises:
            ConfigError: the method's parties can't do that.
            DataError: the rows don't fit.
        """
        if not isinstance(self._party, PredictsAlone):
            raise ConfigError(
                f"{self.card.method} gives no party what it needs to predict alone: make embeddings (fedloom embed) "
                "and let the active party predict from those of all"
            )
        embedded = self._party.infer(self._rows(encode_rows(self._inputs, rows)).every)
        return _array(torch.softmax(self._party.alone(embedded), -1))

    def answer(self, x: Tensor) -> Tensor:
        """What its network makes of inputs (n, ...): embeddings (n, d) before any noise."""
        return self._party.infer(x)

    def _embed(self, rows: Rows) -> Tensor:
        name = secrets.token_hex(16)  # never the same, so that noise is never the same
        self._tests[name] = rows
        try:
            out = contribution(self._party, on=name)
        finally:
            del self._tests[name]
        if not isinstance(out, Tensor) or out.dim() != 2:
            raise ConfigError(f"parties of {self.card.method} send no embeddings (n, d): they can't be used like this")
        return out

    def _rows(self, x: np.ndarray) -> Rows:
        return Rows(torch.from_numpy(x), None, torch.arange(len(x)), *self._level)


class DeployedActive:
    """What the active party needs to predict from everybody's embeddings.

    Attributes:
        card: what its `party.json` says.
    """

    def __init__(self, card: Card, state: Any, method: Method) -> None:
        self.card = card
        self._alone = predicts_alone(method.client)
        classes = len(card.classes)
        # A home is made where its rows are. One made-up row of each class stands for those it had.
        made_up = Rows(torch.zeros(classes, 1), torch.arange(classes), torch.arange(classes), *_PLAIN)
        site = Site(id=0, parties=card.parties, classes=classes, data=made_up, aligned=classes)
        assert method.server is not None
        self._home = method.server(_config(card, method), site)
        message.check_like(state, {"state": object})
        _restore(self._home, state["state"], "active")

    @property
    def classes(self) -> tuple[str, ...]:
        """Z names."""
        return self.card.classes

    def predict(self, embeddings: Mapping[int, np.ndarray]) -> np.ndarray:
        """Probabilities (n, Z) float32 from each party's embeddings (n, d) of the same people in the same order.

        Raises:
            DataError: some are missing, or don't fit.
        """
        needs, card = self.card.needs, self.card
        missing = [m for m in needs if m not in embeddings]
        if missing:
            raise DataError(self._missing(missing))
        unknown = [m for m in embeddings if m not in range(card.parties)]
        if unknown:
            raise DataError(f"There is no party {unknown[0]}: the {card.parties} have the numbers from 0.")
        parts = {m: self._part(m, embeddings[m]) for m in sorted(needs)}
        sizes = {m: len(part) for m, part in parts.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"All parties must embed the same people, but they sent so many rows: {sizes}.")
        return _array(torch.softmax(decide(self._home, parts), -1))

    def _part(self, m: int, values: np.ndarray) -> Tensor:
        try:
            part = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError):
            raise DataError(
                f"Party {m}'s embeddings must be an array of numbers, not {type(values).__name__}."
            ) from None
        if part.ndim != 2 or part.shape[1] != self.card.width or not len(part):
            raise DataError(f"Party {m}'s embeddings must be (n, {self.card.width}), n from 1, but are {part.shape}.")
        if not np.isfinite(part).all():
            raise DataError(f"Party {m}'s embeddings must be finite, but some are not; let it embed its rows again.")
        return torch.from_numpy(part.copy())

    def _missing(self, missing: Sequence[int]) -> str:
        who = f"party {missing[0]}" if len(missing) == 1 else f"parties {', '.join(map(str, missing))}"
        all_of = f"all {len(self.card.needs)} parties" if len(self.card.needs) > 1 else "this party"
        other = (
            "any party can predict alone, from its prototypes: fedloom predict party-0 ROWS.csv, or "
            "load_party(...).predict_alone(rows)"
            if self._alone
            else f"there is no prediction: {self.card.method} has no other way"
        )
        return (
            f"Embeddings of {who} are missing, and a joint prediction needs those of {all_of}: ask for them "
            f"(fedloom embed party-{missing[0]} ROWS.csv). Without them {other}."
        )


_PLAIN = torch.zeros(1), torch.ones(1)


def predicts_alone(kind: type[Party[Any]]) -> bool:
    """Whether parties of this class predict from what they hold themselves."""
    return hasattr(kind, "alone")


def kept(party: Party[Any], role: str) -> dict[str, Any]:
    """What of a party's state is used after training."""
    return {name: value for name, value in party.state().items() if name in KEPT[role]}


def _restore(party: Party[Any], state: Any, role: str) -> None:
    """Give a party what its folder holds, if that is what it keeps."""
    message.check_like(state, kept(party, role))
    for name, value in state.items():
        setattr(party, name, value)


def _config(card: Card, method: Method) -> Any:
    cfg = method.configure(params=card.params)
    if cfg.width > WIDEST or cfg.width * card.parties > ALL:
        raise CheckpointError(f"width may be {min(WIDEST, ALL // card.parties)} at most, not {cfg.width}")
    return cfg


def _small(inputs: InputSpec, width: int, state: Any) -> None:
    """Refuse a network that is larger than the state that is to go into it, before there is memory for it."""
    if ":" in inputs.model:
        return
    with torch.device("meta"):
        claimed = sum(p.numel() for p in models.build(inputs.model, inputs.shape, width, inputs.norm).parameters())
    there = sum(leaf.numel() for _, leaf in message.leaves(state) if isinstance(leaf, Tensor))
    if claimed > there:
        raise CheckpointError(f"its network has {claimed:,} parameters, but the state has {there:,} numbers")


def _level(state: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Shift and scale, a number for each channel or column, laid out to fit a row."""
    level = message.floats(shape[0])
    template: Template = {"state": object, "shift": level, "scale": level}
    message.check_like(state, template)
    if not (state["scale"] > 0).all():
        raise CheckpointError("its scale must be above 0")
    laid_out = (-1, *[1] * (len(shape) - 1))
    return state["shift"].view(laid_out), state["scale"].view(laid_out)


def _method(path: Path, card: Card, trust: Collection[str]) -> Method:
    """The method that a card names: one of fedloom's, or one whose page is trusted."""
    if ".py" not in card.method:
        with sound(path):
            method = methods.find(card.method)
    else:
        file, _, name = card.method.partition(".py:")
        pages = [page for page in trust if Path(page).name == f"{file}.py"]
        if not pages:
            raise ConfigError(_untrusted(path, "method page", f"{file}.py"))
        if not Path(pages[0]).is_file() or digest(Path(pages[0]).read_bytes()) != card.page_sha256:
            raise ConfigError(f"{pages[0]} is not the page that {path} was trained with; name that one")
        method = methods.load(f"{pages[0]}:{name}")
    if method.setting == "horizontal":
        raise CheckpointError(f"{path} names the method {method.name}, whose parties don't hold columns")
    return method


def _untrusted(path: Path, what: str, name: str) -> str:
    return (
        f"{path} needs a {what} that is not fedloom's, {name}, and its code would be run: if it is yours or you have "
        f"read it, say so with --trust {name}, or trust=[{name!r}]"
    )


def _array(x: Tensor) -> np.ndarray:
    out: np.ndarray = x.detach().cpu().float().numpy()
    return out
