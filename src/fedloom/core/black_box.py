"""Black boxes: classifiers that offer `fit` and `predict_proba`, and nothing inside to differentiate.

A box answers with log-probabilities, which are logits to whoever gets them. It learns from others only through one
more fit: on its own rows with their labels, and on public rows with the probabilities that others gave. What is fitted
never leaves and is never saved. It is made again wherever it is needed, from the same rows, targets and seed, and so it
is the same.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ModelError

TRIED = 4
"""Own rows that a fitted object is asked for at once: what can't answer should fail where it is fitted."""


@dataclass(frozen=True, eq=False)
class Box:
    """The equipment of a party that has a black box in the place of a network.

    Attributes:
        name: what error texts call it.
        make: makes an object with `fit(x, y)` and `predict_proba(x)`, which nothing was fitted to.
        classes: K.
        seed: of all chance while one is made, fitted and asked.
        learn: whether it is fitted to what others answer too, or teaches only.
        refit: local steps of a neural client between two fits.
        floor: the least probability that it answers with.
        public_weight: the weight of a public row in a fit; an own row has 1.
    """

    name: str
    make: Callable[[], Any]
    classes: int
    seed: int = 0
    learn: bool = True
    refit: int = 25
    floor: float = 1e-3
    public_weight: float = 1.0

    def fit(self, x: Tensor, y: Tensor, public: Tensor | None = None, targets: Tensor | None = None) -> Fit:
        """A new object, fitted to own rows and to what others said of public ones.

        Where its `fit` takes `sample_weight`, a public row stands there once for each class, weighed by its
        probability; classes at the floor are left out. Elsewhere it stands there once, as its most probable class.

        Args:
            x: (n, ...) own rows, flattened for the fit.
            y: (n,) their labels.
            public: (m, ...) public rows.
            targets: (m, K) probabilities.

        Raises:
            ModelError: the object can't be used as it is, or what it answers are no probabilities of its classes.
        """
        rows, labels, weights = flat(x), y.cpu().numpy().copy(), np.ones(len(y))
        with alone(self.seed):
            inner = self.make()
        weighs = takes_weights(inner.fit)
        if public is not None and targets is not None and len(public):
            which, classes, shares = soft_rows(targets.cpu().numpy(), self.floor, weighs)
            rows = np.concatenate([rows, flat(public)[which]])
            labels = np.concatenate([labels, classes])
            weights = np.concatenate([weights, self.public_weight * shares])
        seen = np.unique(labels)
        if len(seen) == 1:  # many objects refuse to fit one class
            return Fit(replace(self), None, seen)
        with alone(self.seed):  # once more: making it may have loaded a library that has threads
            inner.fit(rows, labels, **({"sample_weight": weights} if weighs else {}))
        fit = Fit(replace(self), inner, self._columns(inner))  # of its like: what is kept must not keep the box
        fit.probs(x[:TRIED])
        return fit

    def _columns(self, inner: Any) -> np.ndarray:
        """The class (k,) of each column of a fitted object's `predict_proba`."""
        every, found = np.arange(self.classes), getattr(inner, "classes_", None)
        if found is None:
            return every
        with contextlib.suppress(TypeError, ValueError), np.errstate(invalid="ignore"):
            told = np.asarray(found)
            columns = told.astype(np.int64)
            different = told.ndim == 1 and 0 < len(columns) == len(np.unique(columns))
            if different and (columns == told).all() and np.isin(columns, every).all():
                return columns
        raise ModelError(f"{self.name}: its classes_ after fit must be different labels from 0 to {self.classes - 1}")

    def present(self, key: bytes, make: Callable[[], Folds]) -> Folds:
        """The fits that `key` tells from all others of this box: made by `make`, unless this process made them last."""
        found = _PRESENT.get(self)
        if found is None or found[0] != key:
            found = _PRESENT[self] = (key, make())
        return found[1]


class Fit:
    """A box that was fitted.

    Args:
        box: the settings of the box that was fitted.
        inner: the fitted object; None where all rows had one class.
        columns: (k,) the class of each column of its `predict_proba`.
    """

    def __init__(self, box: Box, inner: Any, columns: np.ndarray) -> None:
        self._box, self._inner, self._columns = box, inner, columns

    def probs(self, x: Tensor) -> Tensor:
        """Probabilities (n, K) float32 of rows x (n, ...), none below the floor.

        Raises:
            ModelError: what the object answers are no probabilities of its classes.
        """
        p = np.zeros((len(x), self._box.classes))
        if self._inner is None:
            p[:, self._columns] = 1.0
        elif len(x):
            with alone(self._box.seed):
                p[:, self._columns] = self._checked(self._inner.predict_proba(flat(x)), len(x))
        p = self._box.floor + (1 - self._box.classes * self._box.floor) * p
        return torch.from_numpy(p.astype(np.float32)).to(x.device)

    def _checked(self, answer: Any, rows: int) -> np.ndarray:
        p, name = np.asarray(answer), self._box.name
        if p.shape != (rows, len(self._columns)):
            raise ModelError(
                f"{name}: predict_proba must give one column for each class in its classes_, or for all "
                f"{self._box.classes} classes if it has no classes_: ({rows}, {len(self._columns)}), not {p.shape}"
            )
        if p.dtype.kind not in "biuf" or not np.isfinite(p).all() or p.min() < 0 or p.max() > 1 + 1e-6:
            raise ModelError(f"{name}: predict_proba must give finite numbers from 0 to 1, and some are not")
        total = p.sum(1, keepdims=True, dtype=np.float64)
        if abs(total - 1).max() > 1e-3:
            raise ModelError(f"{name}: predict_proba must give rows that sum to 1, and some do not")
        divided: np.ndarray = p / total
        return divided


@dataclass(frozen=True, eq=False)
class Folds:
    """Two fits, the first to the public rows of odd numbers, the second to those of even ones, both to all own rows.

    A box may know by heart what it was fitted to. It would answer a public row with what others said of it, and they
    would take their own echo for one more opinion. So a public row is answered by the fit that did not hear of it.

    Attributes:
        odd, even: see above; one and the same where nothing was heard.
        replies: log-probabilities (n, K) for test rows, by their name: these rows stay, so it is asked once.
    """

    odd: Fit
    even: Fit
    replies: dict[str, Tensor] = field(init=False, default_factory=dict)

    def log_probs(self, x: Tensor) -> Tensor:
        """Log-probabilities (n, K) of rows x (n, ...) that are not public: of the mean of both."""
        if self.odd is self.even:
            return self.odd.probs(x).log()
        return ((self.odd.probs(x) + self.even.probs(x)) / 2).log()

    def public_log_probs(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Log-probabilities (n, K) of public rows x (n, ...), by their numbers (n,)."""
        if self.odd is self.even:
            return self.odd.probs(x).log()
        second = (numbers % 2 == 1).to(x.device)
        answers = self.odd.probs(x[~second]), self.even.probs(x[second])
        p = x.new_empty(len(x), answers[0].shape[1])
        p[~second], p[second] = answers
        return p.log()


_PRESENT: weakref.WeakKeyDictionary[Box, tuple[bytes, Folds]] = weakref.WeakKeyDictionary()


def soft_rows(targets: np.ndarray, floor: float, weighs: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with one class each that stand for rows with probabilities (m, K).

    Args:
        targets: see above.
        floor: classes at it are left out: that much has what nobody thinks likely. The most probable one stays.
        weighs: whether rows have weights; if not, each stands there once.

    Returns:
        Each (r,): the number of the row, its class, and its weight, which of one row come to about 1.
    """
    if not weighs:
        return np.arange(len(targets)), targets.argmax(1), np.ones(len(targets))
    above = targets > 1.001 * floor  # what was rounded is not above
    which, classes = np.nonzero(above | (targets == targets.max(1, keepdims=True)))
    return which, classes, targets[which, classes].astype(np.float64)


def flat(x: Tensor) -> np.ndarray:
    """Rows (n, ...) as (n, d) float32: a copy, which an object may change."""
    return x.reshape(len(x), -1).float().cpu().numpy().copy()


def takes_weights(fit: Callable[..., Any]) -> bool:
    """Whether a `fit` names `sample_weight`; not where Python can't tell its arguments."""
    try:
        return "sample_weight" in inspect.signature(fit).parameters
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def alone(seed: int) -> Iterator[None]:
    """Within it chance is seeded, whichever generator an object draws from, and libraries use one thread.

    More threads would add in another order, and a forked process must not use those of its parent.
    """
    legacy = np.random.mtrand  # NumPy's global generator is what others' objects draw from
    before = random.getstate(), legacy.get_state()
    random.seed(seed)
    legacy.seed(seed)
    try:
        with torch.random.fork_rng(devices=[]), _threads(len(sys.modules)).limit(limits=1):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before[0])
        legacy.set_state(before[1])


@lru_cache(maxsize=1)
def _threads(modules: int) -> Any:
    """What limits the threads of the libraries that are loaded, looked for anew when there are other `modules`."""
    from threadpoolctl import ThreadpoolController  # it comes with scikit-learn

    return ThreadpoolController()
