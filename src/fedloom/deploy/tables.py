"""The models of methods that read raw rows, and black boxes of trees or linear models, as the parts
of a `TableNetwork`.

A folder's `read_rows` encodes words one-hot, as for networks, so that the network first puts one
column together for each raw one.

Three forms of a row's columns occur here:

    inputs  (n, F) what `read_rows` gives: numbers, one-hot words, and marks of missing values
    raw     (n, G) one column for each raw one: numbers, and places of words (`TableNetwork.raw`)
    plain   (n, p) for each raw column its number, or an indicator of each word, and then a mark of
            missing values (`TableNetwork.plain`)

Trees of the federation read raw columns; linear models and an owner's own models read plain ones;
a black box reads the inputs as they are.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.black_box import FittedBlackBox
from fedloom.core.errors import ModelError
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import OneHot, TableEncoder, used_of
from fedloom.data.tables import MISSING
from fedloom.deploy.models import ModelInputs
from fedloom.deploy.table_network import TableSettings
from fedloom.methods.distillation.steps import BlackBoxParty, current_fit
from fedloom.methods.tables import design as designs
from fedloom.methods.tables import mixed, own_models, steps
from fedloom.methods.tables.exchange import ExchangeClient
from fedloom.methods.tables.fedcox import FedCoxClient
from fedloom.methods.tables.fedforest import FLOOR
from fedloom.methods.tables.fedglm import FedGLMClient, family, rows_of

BOXES = {"forest": "forest", "boosting": "boosting", "logistic": "linear", "ridge": "linear"}
"""Black boxes that are parts of a `TableNetwork`, by the kinds of `own_models`."""


class Parts:
    """The parts of a `TableNetwork` and their tensors, as they are added."""

    def __init__(self, data: Dataset, number: bool) -> None:
        self.columns, self.number = _raw_columns(data), number
        self.state: dict[str, Tensor] = {}
        self._parts: list[dict[str, Any]] = []

    def add(self, kind: str, weight: float, tensors: Any, link: str, **more: Any) -> None:
        """Add a part."""
        name = f"{kind}{len(self._parts)}"
        self._parts.append({"name": name, "kind": kind, "weight": weight, "link": link, **more})
        self.state |= {f"{name}_{key}": torch.as_tensor(x) for key, x in tensors.items()}

    def scales(self, name: str, *arrays: np.ndarray) -> None:
        """Set what fills columns (p,), and their means and scales."""
        for key, values in zip(("fill", "mean", "scale"), arrays, strict=True):
            self.state[f"{name}_{key}"] = torch.as_tensor(values, dtype=torch.float64)

    def model(
        self, kind: str, fitted: tuple[Any, np.ndarray], K: int, weight: float, **more: Any
    ) -> None:
        """Add a model of scikit-learn: see `own_models.fitted`."""
        if kind != "boosting":
            self.sent(kind, own_models.sent(kind, fitted, K), weight, **more)
        elif isinstance(fitted[0], own_models.Constant):
            self.sent("forest", own_models.sent("forest", fitted, K), weight, **more)
        else:
            link = "none" if self.number else "softmax"
            self.add("thresholds", weight, _boosted(*fitted, K), link, **more)

    def sent(self, kind: str, model: Any, weight: float, **more: Any) -> None:
        """Add a model that `own_models.sent` has made."""
        if kind == "linear":
            self.add(kind, weight, model, "none" if self.number else "softmax", **more)
        else:
            self.add("thresholds", weight, {**model, "share": _shares(model)}, "none", **more)

    def settled(self) -> tuple[TableSettings, dict[str, Tensor]]:
        """The settings and the tensors."""
        state = {name: x.contiguous().clone() for name, x in self.state.items()}
        tensors = {
            name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in state.items()
        }
        values = {"tensors": tensors, "columns": self.columns, "number": self.number}
        return TableSettings(**values, parts=self._parts), state


def table_network(data: Dataset, party: Any) -> tuple[TableSettings, dict[str, Tensor]]:
    """The settings and tensors of the network that predicts as a party without a network does.

    Raises:
        ModelError: it has no such model.
    """
    parts = Parts(data, party.context.target is not None)
    if isinstance(party, BlackBoxParty):
        _black_box(parts, party)
        return parts.settled()
    own = steps.own_kinds(party)  # kinds of models that an owner fits to its own rows
    weight = steps.own_weight(party) if own else 0.0
    K = own_models.width(party)

    # how its own models read plain columns: filled and scaled by its own rows
    if own or isinstance(party, ExchangeClient):
        fill, *moments = own_models.scales(party)
        at = 0  # the first plain column of a raw one
        for words in party.context.words:  # a missing word has no indicator
            fill = fill.copy()
            fill[at : at + len(words)] = 0 if words else fill[at : at + len(words)]
            at += (len(words) or 1) + 1
        parts.scales("own", fill, *moments)
    read: dict[str, Any] = {"scales": "own", "clip": own_models.FARTHEST}

    # the joint model: all owners' models in equal shares, a regression, or trees
    if isinstance(party, ExchangeClient) and party.models:
        kinds = party.cfg.means_of
        share = (1 - weight) / len(kinds) / len(party.models)
        for kind in kinds:
            for one in party.models:
                parts.sent(kind, one[kind], share, **read)
    elif isinstance(party, FedGLMClient | FedCoxClient) and party.design:
        _linear(parts, party, 1 - weight)
    elif "trees" in party.STATE and party.layout and len(party.trees["root"]):
        _trees(parts, party, 1 - weight)
    else:
        raise ModelError(
            "its method learns no model of rows: run another one, such as fedforest"
            if not {"trees", "beta", "models"} & {*party.STATE}
            else "it has no model yet, as it took part in no round: let the run go on"
        )

    # the owner's own models, with the weight that the joint one has left
    for kind in own:
        parts.model(kind, own_models.fitted(party, kind), K, weight / len(own), **read)
    return parts.settled()


def _black_box(parts: Parts, party: BlackBoxParty[Any]) -> None:
    """Add both fits of a party's black box, which reads standardized inputs."""
    box, K = party.context.black_box, own_models.width(party)
    assert box is not None
    if box.name not in BOXES:
        raise ModelError(
            f"it has a black box ({box.name}), which cannot be written as trees or weights: name "
            f"{', '.join([*BOXES][:-1])} or {[*BOXES][-1]} in models.pool, or predict in Python, "
            "with the result's models"
        )
    if party.fitted["iteration"] < 0:
        raise ModelError("its black box is not fitted yet: let the run go on")
    floor = 0.0 if parts.number else box.min_probability
    fits = current_fit(party)
    inputs = sum(width for width, *_ in parts.columns)
    parts.columns = [(inputs, inputs, False, -1)]
    for fit in [fits.odd] if fits.odd is fits.even else [fits.odd, fits.even]:
        weight = 1.0 if fits.odd is fits.even else 0.5
        parts.model(BOXES[box.name], _varying(fit, party), K, weight, floor=floor)


def _varying(fit: FittedBlackBox, party: BlackBoxParty[Any]) -> tuple[Any, np.ndarray]:
    """A fitted black box as `own_models.fitted` gives a model."""
    inputs = party.data.every.flatten(1).shape[1]
    box = fit.inner if fit.inner is not None else own_models.Constant(fit.columns, fit.number)
    return box, np.ones(inputs, bool)


def inputs_of(data: Dataset) -> ModelInputs:
    """How rows are read for a model of raw columns: words one-hot, numbers as they are."""
    rules = [*data.recipe.get("columns", ())]
    shape = (len(TableEncoder.from_dict(data.recipe).names),) if rules else data.input_shape
    plain = _encoded_offset(data) or (0.0,) * shape[0], (1.0,) * shape[0]
    mean, scale = (
        plain
        if data.kind == "table"
        else (tuple(map(float, data.shift)), tuple(map(float, data.scale)))
    )
    if data.kind == "table" and not rules:
        rules = [{"name": name, "gaps": True} for name in data.columns]
    return ModelInputs(
        kind=data.kind,
        shape=shape,
        columns=tuple(rules),
        mean=mean,
        scale=scale,
        **{
            key: data.recipe[key]
            for key in ("missing_words", "decimal", "optional")
            if key in data.recipe
        },
    )


def _encoded_offset(data: Dataset) -> tuple[float, ...]:
    """What was subtracted from each input (F,) of a folder's network when rows were read; () for
    nothing.
    """
    if data.offset is None or not data.recipe:
        return () if data.offset is None else tuple(data.offset.tolist())
    found, at = list[float](), 0
    for width, used, is_words, _ in _raw_columns(data):
        found += (
            [0.0] * width
            if is_words
            else [*data.offset[at : at + used].tolist(), *[0.0] * (width - used)]
        )
        at += used
    return tuple(found)


def encoded(data: Dataset, x: Tensor) -> Tensor:
    """Raw columns x (n, G) as the inputs (n, F) of a folder's network."""
    if not data.recipe:
        return x
    parts, at = list[Tensor](), 0
    for rule in TableEncoder.from_dict(data.recipe).columns:
        width = len(rule.names)
        if isinstance(rule, OneHot):
            words = x[:, at, None] == torch.arange(width)
            if MISSING in rule.words:
                words[:, rule.words.index(MISSING)] |= x[:, at].isnan()
            parts, at = [*parts, words.float()], at + 1
        else:
            used = used_of(rule)
            marks = [x[:, at : at + 1].isnan().float()] * (width - used)
            parts, at = [*parts, x[:, at : at + used], *marks], at + used
    return torch.cat(parts, 1)


def _raw_columns(data: Dataset) -> list[tuple[int, int, bool, int]]:
    """See `COLUMNS`."""
    rules = TableEncoder.from_dict(data.recipe).columns if data.recipe else ()
    return [
        (len(rule.names), 1, True, rule.words.index(MISSING) if MISSING in rule.words else -1)
        if isinstance(rule, OneHot)
        else (len(rule.names), used_of(rule), False, -1)
        for rule in rules
    ] or [(int(np.prod(data.input_shape)), int(np.prod(data.input_shape)), False, -1)]


def _shares(model: Any) -> Tensor:
    """The share of each tree in the mean of all."""
    return torch.full((len(model["root"]),), 1 / len(model["root"])).double()


def _boosted(box: Any, varies: np.ndarray, K: int) -> dict[str, Tensor]:
    """Boosted trees as `own_models.sent` makes a forest, with values to be added; the first node is
    the baseline, a tree of its own.
    """
    used, classes = np.flatnonzero(varies), getattr(box, "classes_", np.arange(1))
    places = classes[1:] if len(classes) == 2 else classes
    first = np.full((1, K), 0.0 if K == 1 else own_models.NEVER)
    first[0, classes] = 0
    first[0, places] = np.ravel(box._baseline_prediction)
    values, trees = [first], [(k, t) for lot in box._predictors for k, t in zip(places, lot)]  # noqa: B905
    sizes = [1, *(len(tree.nodes) for _, tree in trees)]
    starts = np.cumsum(sizes) - sizes
    for k, tree in trees:
        values.append(np.zeros((len(tree.nodes), K)))
        values[-1][:, k] = tree.nodes["value"]
    nodes = np.concatenate([tree.nodes for _, tree in trees])
    inner, at = nodes["is_leaf"] == 0, np.repeat(starts[1:], sizes[1:])

    def array(found: np.ndarray, leaf: float, dtype: Any) -> np.ndarray:
        return np.array([leaf, *np.where(inner, found, leaf)], dtype)

    return steps.tensors(
        root=starts.astype(np.int32),
        share=np.ones(len(starts)),
        left=array(nodes["left"] + at, -1, np.int32),
        right=array(nodes["right"] + at, -1, np.int32),
        feature=array(used[np.where(inner, nodes["feature_idx"], 0)], -1, np.int32),
        threshold=array(nodes["num_threshold"], 0, np.float64),
        value=np.concatenate(values),
    )


def _linear(parts: Parts, party: FedGLMClient | FedCoxClient, weight: float) -> None:
    """Add a regression; the owner's own effect, if it has one, is in the bias.

    Its q columns are those of `designs.labels`: of raw columns first, then with `owners = "fixed"`
    an indicator of each owner but the first. It has k linear predictors: one for each class but the
    first, or one.
    """
    design, target = party.design, party.context.target
    kept, mean, scale = (design[name].numpy() for name in ("kept", "mean", "scale"))  # (q,) each
    fixed = range(0) if party.cfg.rows_add_up else range(1, party.context.parties)

    # slopes (k, q) of standardized columns, 0 for those that were left out; beta has a row for each
    # predictor, the intercept first, and Cox's has neither rows nor an intercept
    beta = party.beta.numpy()
    beta = np.r_[0.0, beta][None] if isinstance(party, FedCoxClient) else beta
    slopes = np.zeros((len(beta), len(kept)))
    slopes[:, kept] = beta[:, 1:]

    # the indicators of owners are the same in all rows of one: standardized, they are in the bias
    effects = np.array([float(i == party.context.id) for i in fixed])
    end = len(kept) - len(fixed)
    own = np.where(kept[end:], (effects - mean[end:]) / np.where(kept, scale, 1)[end:], 0)
    bias = beta[:, 0] + slopes[:, end:] @ own

    # the place of each other column among the p plain ones: the word of reference and the times
    # have none, and marks of missing values only if the method has an indicator of them
    places, at = list[int](), 0
    for f, words in enumerate(party.context.words):
        width = len(words) or 1
        if f != designs.time_column(party):
            places += [at + place for place in designs.indicators(words)] if words else [at]
            places += [at + width] * designs.indicated(party)
        at += width + 1
    # a column that was left out, whose scale may be 0, has slopes of 0: any scale does for it
    centers, spread = np.zeros(at), np.ones(at)
    centers[places], spread[places] = mean[:end], np.where(kept, scale, 1)[:end]
    plain_slopes = np.zeros((len(beta), at))
    plain_slopes[:, places] = slopes[:, :end]

    # the sums as the network needs them: with the first class, whose sum is 0, or in the unit of
    # the number to predict, with the owner's random effect
    kind = "classes" if isinstance(party, FedCoxClient) else family(party)
    more: dict[str, Any] = {} if target is None else {"standard": (target.shift, target.scale)}
    if kind == "classes":
        plain_slopes, bias = np.r_[np.zeros((1, at)), plain_slopes], np.r_[0.0, bias]
    elif kind == "normal":
        y_mean, y_scale = design["outcome"].tolist()
        if "ratio" in design and isinstance(party, FedGLMClient):
            bias = bias + mixed.effect(*rows_of(party, design), beta[0], design["ratio"])
        plain_slopes, bias = y_scale * plain_slopes, y_mean + y_scale * bias
    parts.scales("joint", centers, centers, spread)  # a missing value counts as the mean
    link = {"classes": "softmax", "poisson": "exp"}.get(kind, "none")
    tensors = {"weight": plain_slopes, "bias": bias}
    parts.add("linear", weight, tensors, link, scales="joint", **more)


def _trees(parts: Parts, party: Any, weight: float) -> None:
    """Add the joint trees, and those of the owner's own rows."""
    forest, K = "drawn" in party.STATE, own_models.width(party)
    for name in ("edges", "lengths", "category"):
        parts.state[f"bins_{name}"] = party.layout[name]
    how: dict[str, Any] = {"link": "none"} if parts.number else {"link": "softmax"}
    if forest and not parts.number:
        how = {"link": "shares", "floor": FLOOR}
    for trees, share_of_lot in party.lots():
        inner = trees.feature >= 0
        value = trees.value * 2.0**-20
        if value.shape[1] < K:  # tree t adds to output t, of two classes to the second
            sizes = np.diff([*trees.root, len(value)])
            places = np.arange(len(trees)) % (K - (K == 2)) + (K == 2)
            value = value * np.eye(K)[np.repeat(places, sizes)]
        share = 1 / len(trees) if forest and parts.number else 1.0
        tensors = steps.tensors(
            root=trees.root,
            share=np.full(len(trees), share),
            left=np.where(inner, trees.child, -1).astype(np.int32),
            right=np.where(inner, trees.child + 1, -1).astype(np.int32),
            feature=trees.feature.astype(np.int32),
            threshold=trees.left,
            value=value,
        )
        owner = -1 if party.cfg.rows_add_up else party.context.id
        parts.add("bins", weight * share_of_lot, tensors, **how, owner=owner)
