"""The models of methods that read raw rows, trees and regressions, as plain PyTorch: the code of a
folder's network.

A folder's `read_rows` encodes words one-hot, as for networks, so that these classes first put one
column together for each raw one.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.party import Party
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import OneHot, TableEncoder, used_of
from fedloom.data.tables import MISSING
from fedloom.deploy.models import ModelInputs
from fedloom.methods.tables import mixed, steps
from fedloom.methods.tables.design import indicators
from fedloom.methods.tables.fedboost import own_trees
from fedloom.methods.tables.fedforest import FLOOR as FOREST_FLOOR
from fedloom.methods.tables.fedforest import FedForestClient, own_forest
from fedloom.methods.tables.fedglm import FedGLMClient, family, rows_of
from fedloom.trees.model import Trees, joined

# `TreeNetwork` is written into folders as `Network`, with values of these names before it.
BUFFERS: dict[str, tuple[str, tuple[int, ...]]] = {}
"""The dtype and shape of each tensor."""
COLUMNS: list[tuple[int, int, bool, int]] = []
"""Of each raw column its inputs, how many of them are used, whether they are words, and the place
of a missing word.
"""
OUTPUTS = 1
"""Sums of leaves of a row."""
FLOOR = 0.0
"""The smallest probability of a forest; 0 for boosting."""


DIVISOR = 0
"""For a standardized number what the sum of leaves is divided by; 0 for classes."""
OWNER = -1
"""The owner's number, if it is the last column."""
OWN_WEIGHT = 0.0
"""The weight of the owner's own trees, the buffers `own_root` and so on, in the mean with the joint
ones.
"""
OWN_DIVISOR = 0
"""As `DIVISOR`, of the owner's own trees."""


class TreeNetwork(nn.Module):
    """Trees over bins: logits (n, K), or a standardized number (n, 1), of rows (n, F)."""

    edges: torch.Tensor
    lengths: torch.Tensor
    category: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, shape) in BUFFERS.items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, K), or a number (n, 1)."""
        columns, at = [], 0
        for width, used, words, missing in COLUMNS:
            part, at = x[:, at : at + width], at + width
            if words:
                place = part.argmax(1).float()
                gap = (part.sum(1) == 0) | (place == missing)
                part = torch.where(gap, torch.tensor(float("nan")), place)[:, None]
            columns.append(part[:, :used])
        if OWNER >= 0:
            columns.append(torch.full((len(x), 1), float(OWNER)))
        raw = torch.cat(columns, 1)
        signed = (raw + 0.0).view(torch.int32).long() & 0xFFFFFFFF
        keys = torch.where(signed >= 2**31, 2**32 - 1 - signed, signed + 2**31)
        bins = torch.zeros(raw.shape, dtype=torch.long)
        for f, edges in enumerate(torch.split(self.edges, self.lengths.tolist())):
            place = torch.searchsorted(edges, keys[:, f].contiguous(), right=True)
            if self.category[f] and len(edges):
                same = raw[:, f, None] == edges
                place = torch.where(same.any(1), same.int().argmax(1), len(edges))
            elif self.category[f]:
                place = torch.zeros_like(place)
            bins[:, f] = torch.where(raw[:, f].isnan(), 0, place + 1)
        joint = self.outputs(bins, "", DIVISOR)
        if not OWN_WEIGHT:
            return joint
        own = self.outputs(bins, "own_", OWN_DIVISOR)
        if DIVISOR:
            return (1 - OWN_WEIGHT) * joint + OWN_WEIGHT * own
        return torch.log((1 - OWN_WEIGHT) * joint.softmax(-1) + OWN_WEIGHT * own.softmax(-1))

    def outputs(self, bins: torch.Tensor, which: str, divisor: int) -> torch.Tensor:
        """Logits (n, K), or a number (n, 1), of bins (n, F) by the joint trees, or those of the
        owner's rows alone.
        """
        root, feature, left, child, value = (
            self.get_buffer(which + name) for name in ("root", "feature", "left", "child", "value")
        )
        total = torch.zeros(len(bins), OUTPUTS, dtype=torch.long)
        for t, first in enumerate(root.tolist()):
            node = torch.full((len(bins),), first)
            while bool((feature[node] >= 0).any()):
                column = feature[node].long()
                place = bins.gather(1, column.clamp(min=0)[:, None])[:, 0]
                goes = (left[node, place // 8] >> (7 - place % 8)) & 1
                node = torch.where(column >= 0, child[node].long() + 1 - goes, node)
            if value.shape[1] == 1:
                total[:, t % OUTPUTS] += value[node, 0]
            else:
                total += value[node]
        if divisor:
            return (total.double() * 2.0**-20 / divisor).float()
        if FLOOR:
            p = total / total.sum(1, keepdim=True)
            return torch.log(FLOOR + (1 - OUTPUTS * FLOOR) * p)
        s = (total * 2.0**-20).float()
        return torch.cat([torch.zeros_like(s), s], 1) if OUTPUTS == 1 else s


FAMILY = ""
"""Of a linear model: "classes", "normal" or "poisson"."""
STANDARD = (0.0, 1.0)
"""Mean and s.d. of a number to predict."""


class LinearNetwork(nn.Module):
    """A linear model: logits (n, K), or a standardized number (n, 1), of rows (n, F). A missing
    value counts as its column's mean.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    fill: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, shape) in BUFFERS.items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, K), or a number (n, 1)."""
        parts, at = [], 0
        for width, _, words, missing in COLUMNS:
            part, fill = x[:, at : at + width].double(), self.fill[at : at + width]
            gap = part.isnan()
            if words:
                gap = ((part.sum(1) == 0) | (part.argmax(1) == missing))[:, None]
            parts.append(torch.where(gap, fill, part))
            at += width
        eta = torch.cat(parts, 1) @ self.weight.T + self.bias
        if FAMILY == "classes":
            return torch.cat([torch.zeros_like(eta[:, :1]), eta], 1).log_softmax(1).float()
        found = eta.exp() if FAMILY == "poisson" else eta
        return ((found - STANDARD[0]) / STANDARD[1]).float()


def is_linear(party: Party[object]) -> bool:
    """Whether a party's model is linear in the columns of its rows, and has coefficients."""
    return (
        isinstance(party, FedGLMClient) and party.cfg.missing == "leave out" and bool(party.design)
    )


def has_trees(party: Party[object]) -> bool:
    """Whether a party's model are trees."""
    return "trees" in party.STATE


def is_joint(party: Party[object]) -> bool:
    """Whether a party's trees, or linear model, are the same at all owners."""
    own = any(getattr(party.cfg, name, 0) for name in ("mix", "owner_column", "own_trees"))
    return not own and getattr(party.cfg, "owners", "none") == "none"


def own_of(party: Any) -> Trees | None:
    """The trees of the party's own rows alone with which it predicts a mean, if any."""
    if not getattr(party.cfg, "mix", 0):
        return None
    return (
        own_forest(party) if isinstance(party, FedForestClient) else own_trees(party, party.cfg.mix)
    )


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


def linear_network(data: Dataset, party: FedGLMClient) -> tuple[str, dict[str, Tensor]]:
    """As `tree_network`, for a party whose model is linear, with the owner's own effect, if it has
    one.
    """
    design, beta, target = party.design, party.beta.numpy(), party.context.target
    kept, mean, scale = (design[name].numpy() for name in ("kept", "mean", "scale"))
    weight = np.zeros((len(beta), len(kept)))
    weight[:, kept] = beta[:, 1:] / scale[kept]
    bias = beta[:, 0] - weight @ mean
    own = range(1, party.context.parties) if party.cfg.owners == "fixed" else ()
    bias = bias + weight[:, len(kept) - len(own) :] @ np.array(
        [float(i == party.context.id) for i in own]
    )
    kind = family(party)
    if kind == "normal":
        y_mean, y_scale = design["outcome"].tolist()
        if "ratio" in design:
            bias = bias + mixed.effect(*rows_of(party, design), beta[0], design["ratio"])
        weight, bias = y_scale * weight, y_mean + y_scale * bias
    inputs, at, column = [], 0, 0
    raw = 0
    for width, used, is_words, _ in _raw_columns(data):
        places = indicators(party.context.words[raw]) if is_words else list(range(used))
        inputs += [at + place for place in places]
        at, column, raw = at + width, column + len(places), raw + used
    whole, fill = np.zeros((len(beta), at)), np.zeros(at)
    whole[:, inputs], fill[inputs] = weight[:, :column], mean[:column]
    state = {
        "weight": torch.from_numpy(whole),
        "bias": torch.from_numpy(bias),
        "fill": torch.from_numpy(fill),
    }
    values = {
        "BUFFERS": {
            k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in state.items()
        },
        "COLUMNS": _raw_columns(data),
        "FAMILY": kind,
        "STANDARD": (0.0, 1.0) if target is None else (target.shift, target.scale),
    }
    text = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    source = inspect.getsource(LinearNetwork).replace("class LinearNetwork", "class Network")
    return f"{text}\n\n{source}", {name: x.contiguous() for name, x in state.items()}


def tree_network(data: Dataset, party: Any) -> tuple[str, dict[str, Tensor]]:
    """The source of a class `Network` and its state, for a party whose model are trees: the joint
    ones, and those of its own rows with which it predicts.
    """
    cfg, joint, own = party.cfg, party.trees, own_of(party)
    if more := getattr(cfg, "own_trees", 0):
        both = [steps.trees_of(joint), own_trees(party, more, start=party.scores)]
        joint = steps.trees_tree(joined(both))
    state = {name: x for name, x in {**party.layout, **joint}.items() if isinstance(x, Tensor)}
    if own is not None:
        state |= {f"own_{name}": x for name, x in steps.trees_tree(own).items()}
    columns = _raw_columns(data)
    number, forest = party.context.target is not None, party.trees["value"].shape[1] > 1
    averages = "drawn" in party.STATE  # a forest
    values = {
        "BUFFERS": {
            k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in state.items()
        },
        "COLUMNS": columns,
        "OUTPUTS": party.context.classes if forest or party.context.classes > 2 else 1,
        "FLOOR": FOREST_FLOOR if forest else 0.0,
        "DIVISOR": (len(party.trees["root"]) if averages else 1) if number else 0,
        "OWNER": party.context.id if cfg.owner_column else -1,
        "OWN_WEIGHT": float(steps.own_weight(party)) if own is not None else 0.0,
        "OWN_DIVISOR": (len(own) if averages else 1) if number and own is not None else 0,
    }
    text = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    source = inspect.getsource(TreeNetwork).replace("class TreeNetwork", "class Network")
    return f"{text}\n\n{source}", {name: x.contiguous() for name, x in state.items()}
