"""Models of an owner's own rows alone: mixed with a joint model, or sent to other owners as arrays.

    linear    logistic or ridge regression, L2 penalty 1
    forest    50 trees
    boosting  30 trees of at most 8 leaves; it is mixed, never sent

Columns are numbers, an indicator for each word, and one of missing values for each raw column. Each
owner fills numbers with its own medians, and scales columns by its own means and standard
deviations: a model of one owner reads the rows of another in the other's units, and no scale is
    agreed. Columns that are constant at an owner stay out of its models.

A method page calls `mixed` when it predicts with the joint model. `exchange` sends models as arrays
(`template`, `sent`), and owners predict by those of others (`problem`, `prediction_of`) without
scikit-learn's objects, which are not sent. A fitted model is a pair: scikit-learn's object or
`Constant`, and `varies` (p,) bool, the columns that it reads; its column j is thus the j-th of
those that vary. K is the number of classes of the run, of which an owner may have a few; 1 of a
number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedloom.core.page import Shape
from fedloom.methods.tables.steps import InContext, MixesOwn, arrays, kept, own_weight, tensors
from fedloom.trees import plain_models

MAKERS: Final[Mapping[str, Callable[[int, bool], Any]]] = {
    "linear": plain_models.linear,
    "forest": plain_models.forest,
    "boosting": plain_models.boosting,
}
FARTHEST: Final = 10.0
"""Columns are clipped to this many standard deviations, so that one row does not dominate."""
NEVER: Final = -1e3
"""The logit of a class that an owner does not have."""
LEAST: Final = 1e-12
_AT_ONCE: Final = 2**21
"""Pairs of a row and a tree that are in memory at once."""


def mixed(party: MixesOwn, outputs: Tensor, x: Tensor) -> Tensor:
    """Logits (n, K), or standardized numbers (n, 1), of the joint model and the party's own ones
    together.
    """
    if not party.cfg.own:
        return outputs
    weight, own = own_weight(party), torch.from_numpy(own_prediction(party, x))
    if party.context.target is not None:
        return ((1 - weight) * outputs.double() + weight * own).float()
    p = (1 - weight) * torch.softmax(outputs.double(), -1) + weight * own
    return torch.log(p.clamp(min=LEAST)).float()


def own_prediction(party: MixesOwn, x: Tensor) -> np.ndarray:
    """The mean prediction of `own`: probabilities (n, K), or standardized numbers (n, 1), of raw
    rows x (n, ...).
    """
    rows = columns(party, x)
    found: np.ndarray = np.mean(
        [predicted(fitted(party, kind), rows, width(party)) for kind in party.cfg.own], axis=0
    )
    return found


# -- columns ---------------------------------------------------------------------------------------


def columns(party: InContext, x: Tensor) -> np.ndarray:
    """The columns (n, p) float32 of raw rows x (n, ...), filled and scaled by the
    party's own rows.
    """
    fill, mean, scale = scales(party)
    plain = _plain(party, x)
    found: np.ndarray = ((np.where(np.isnan(plain), fill, plain) - mean) / scale).clip(
        -FARTHEST, FARTHEST
    )
    return found.astype(np.float32)


def scales(party: InContext) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What fills each column (p,), and its mean and scale, by the party's own rows."""
    return kept(
        party.context, "own scales", "", lambda: _scales(_plain(party, party.context.rows.every))
    )


def count(party: InContext) -> int:
    """p, the number of columns."""
    return sum(len(words) or 1 for words in party.context.words) + len(party.context.words)


def _plain(party: InContext, x: Tensor) -> np.ndarray:
    raw = x.flatten(1).double().cpu().numpy()
    parts = [np.empty((len(raw), 0))]
    for values, words in zip(raw.T, party.context.words, strict=True):
        parts.append(
            (values[:, None] == np.arange(len(words))).astype(float) if words else values[:, None]
        )
        parts.append(np.isnan(values)[:, None].astype(float))
    return np.concatenate(parts, axis=1)


def _scales(plain: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The median, 0 where all are missing, mean and standard deviation (p,) of columns (n, p); 1
    for a constant.
    """
    empty = np.isnan(plain).all(0)
    fill = np.nanmedian(np.where(empty, 0.0, plain), axis=0)
    filled = np.where(np.isnan(plain), fill, plain)
    spread = filled.std(0)
    return fill, filled.mean(0), np.where(spread > 0, spread, 1.0)


# -- models ----------------------------------------------------------------------------------------


def width(party: InContext) -> int:
    """Predicted numbers of a row: K, or 1."""
    return 1 if party.context.target is not None else int(party.context.classes)


class Constant:
    """The model of labels y (n,) of one class, or of rows without a column that varies."""

    def __init__(self, y: np.ndarray, number: bool) -> None:
        self.classes_, counts = np.unique(y, return_counts=True)
        self._shares, self._mean, self._number = counts / len(y), float(y.mean()), number

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean of the labels for each row."""
        return np.full(len(x), self._mean)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """The share of each class for each row."""
        return np.tile(self._shares, (len(x), 1))


def fitted(party: InContext, kind: str) -> tuple[Any, np.ndarray]:
    """The party's own model of this kind, and the columns (p,) bool that vary at the party, which
    it reads.
    """

    def make() -> tuple[Any, np.ndarray]:
        rows, number = party.context.rows, party.context.target is not None
        x = columns(party, rows.every)
        y = rows.y(torch.arange(len(rows), device=party.context.device)).cpu().numpy()
        varies = x.max(0) > x.min(0)
        if not varies.any() or (not number and len(np.unique(y)) < 2):
            return Constant(y, number), varies
        model = plain_models.with_few_bins(MAKERS[kind](party.context.seed, number), len(x))
        return model.fit(x[:, varies], y), varies

    return kept(party.context, f"own {kind}", "", make)


def predicted(model: tuple[Any, np.ndarray], x: np.ndarray, K: int) -> np.ndarray:
    """Probabilities (n, K), or numbers (n, 1), of columns x (n, p)."""
    if not len(x):
        return np.zeros((0, K))
    box, varies = model
    if K == 1:
        return np.asarray(box.predict(x[:, varies]), np.float64)[:, None]
    found = np.zeros((len(x), K))
    found[:, box.classes_] = box.predict_proba(x[:, varies])
    return found


# -- models as arrays ------------------------------------------------------------------------------


def template(kind: str, p: int, K: int) -> dict[str, Shape]:
    """The arrays of a model of this kind, which `sent` makes."""
    if kind == "linear":
        return {"weight": Shape("float64", K, p), "bias": Shape("float64", K)}
    nodes = {"left": "int32", "right": "int32", "feature": "int32", "threshold": "float64"}
    return {
        "root": Shape("int32", None),
        **{name: Shape(dtype, None) for name, dtype in nodes.items()},
        "value": Shape("float32", None, K),
    }


def sent(kind: str, model: tuple[Any, np.ndarray], K: int) -> dict[str, Tensor]:
    """A fitted model as arrays over all p columns and K classes: see `template`.

    "linear": logits (K,), or the number, as weight (K, p) x + bias (K,). "forest": the nodes (m,)
    of all trees one after the other, each tree's first in `root`; `feature`, `left` and `right` are
    -1 of a leaf, and leaves alone have a `value` (K,).
    """
    box, varies = model
    used = np.flatnonzero(varies)  # the column, of all p, of each one that the model reads
    if kind == "linear":
        weight, bias = np.zeros((K, len(varies))), np.full(K, 0.0 if K == 1 else NEVER)
        if isinstance(box, Constant):  # it predicts the same of any row, such as of this one
            if K == 1:
                bias[:] = box.predict(np.zeros((1, 1)))
            else:
                bias[box.classes_] = np.log(box.predict_proba(np.zeros((1, 1)))[0])
        elif K == 1:
            weight[0, used], bias[0] = box.coef_, box.intercept_
        elif len(box.classes_) == 2:  # one row, of the second class against the first
            weight[box.classes_[1], used], bias[box.classes_] = (
                box.coef_[0],
                (0.0, box.intercept_[0]),
            )
        else:
            weight[np.ix_(box.classes_, used)], bias[box.classes_] = box.coef_, box.intercept_
        return tensors(weight=weight, bias=bias)

    # a forest of one tree that is one leaf
    if isinstance(box, Constant):
        leaf = predicted((box, varies), np.zeros((1, len(varies)), np.float32), K)
        end = np.full(1, -1, np.int32)
        return tensors(
            root=np.zeros(1, np.int32),
            left=end,
            right=end,
            feature=end,
            threshold=np.zeros(1),
            value=leaf.astype("f4"),
        )

    # Each tree's nodes after those of the trees before; `at` is the number of its first one.
    parts, roots, at = list[dict[str, np.ndarray]](), list[int](), 0
    for one in (each.tree_ for each in box.estimators_):
        inner = one.children_left >= 0
        value = np.zeros((one.node_count, K), np.float32)
        found = one.value[:, 0]  # (nodes, own classes) rows or shares by class; (nodes, 1) a mean
        value[:, np.arange(K) if K == 1 else box.classes_] = (
            found if K == 1 else found / found.sum(1, keepdims=True)
        )
        # What inner nodes predict, and a leaf's column and threshold, mean nothing, so they are not
        # sent. The threshold stays float64: rounded, it could send a row of its value to the other
        # side.
        parts.append(
            {
                "left": np.where(inner, one.children_left + at, -1),
                "right": np.where(inner, one.children_right + at, -1),
                "feature": np.where(inner, used[one.feature.clip(min=0)], -1),
                "threshold": np.where(inner, one.threshold, 0.0),
                "value": np.where(inner[:, None], np.float32(0), value),
            }
        )
        roots.append(at)
        at += one.node_count
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    whole = {name: joined[name].astype(np.int32) for name in ("left", "right", "feature")}
    return tensors(root=np.array(roots, np.int32), **{**joined, **whole})


def problem(kind: str, model: Mapping[str, Tensor], p: int) -> str:
    """What is wrong with a model of unknown origin that fits its template; "" if it can predict."""
    if kind == "linear":
        return ""
    tree = arrays(model)
    m, inner, own = len(tree["feature"]), tree["feature"] >= 0, np.arange(len(tree["feature"]))
    if not m or {len(tree[name]) for name in ("left", "right", "threshold", "value")} != {m}:
        return "all arrays of nodes must have one length above 0"
    if not len(tree["root"]) or tree["root"].min() < 0 or tree["root"].max() >= m:
        return f"roots must be from 0 to {m - 1}"
    if (tree["feature"] >= p).any():
        return f"a node must look at a column below {p}"
    children = np.stack([tree["left"], tree["right"]])[:, inner]
    if children.size and ((children <= own[inner]) | (children >= m)).any():
        return "children must come after their node"
    return ""


def prediction_of(kind: str, model: Mapping[str, Tensor], x: np.ndarray) -> np.ndarray:
    """Probabilities (n, K), or numbers (n, 1), by a model that `sent` has made, of columns x (n,
    p).
    """
    tree = arrays(model)
    if kind == "linear":
        found: np.ndarray = x.astype(np.float64) @ tree["weight"].T + tree["bias"]
        if found.shape[1] == 1:
            return found
        e = np.exp(found - found.max(1, keepdims=True))
        return np.asarray(e / e.sum(1, keepdims=True))
    some = max(_AT_ONCE // len(tree["root"]), 1)
    parts = [_of_trees(tree, x[first : first + some]) for first in range(0, len(x), some)]
    return np.concatenate([np.zeros((0, tree["value"].shape[1])), *parts])


def _of_trees(tree: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The mean (n, K) over trees of the leaves' values."""
    node = np.repeat(tree["root"][:, None], len(x), axis=1)
    rows = np.broadcast_to(np.arange(len(x)), node.shape)
    open_ = np.arange(node.size)
    at, row = node.ravel(), rows.ravel()
    while len(open_ := open_[tree["feature"][at[open_]] >= 0]):
        now = at[open_]
        goes = x[row[open_], tree["feature"][now]] <= tree["threshold"][now]
        at[open_] = np.where(goes, tree["left"][now], tree["right"][now])
    found: np.ndarray = tree["value"][at].reshape(*node.shape, -1).astype(np.float64).mean(0)
    return found


def mean_of(kinds: Sequence[str], models: Sequence[Mapping[str, Any]], x: np.ndarray) -> np.ndarray:
    """The mean prediction of these kinds of models of all owners, each kind with the
    same weight.
    """
    found: np.ndarray = np.mean(
        [prediction_of(kind, one[kind], x) for kind in kinds for one in models], axis=0
    )
    return found
