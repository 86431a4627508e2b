"""Black boxes: classifiers that offer only `fit` and `predict_proba`, and cannot be differentiated.

A black box answers with log-probabilities, which the receiver treats as logits. It learns from
others only through
another fit: to its own rows with their labels, and to public rows with the probabilities that
others assigned to them. A fitted object is never sent and never saved. It is fitted again wherever
it is needed, from the same rows, targets and seed, so it is the same everywhere.
"""

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
from torch.utils.weak import WeakTensorKeyDictionary

from fedloom.core.errors import ModelError

CHECKED_ROWS = 4
"""Own rows that are predicted right after a fit, so that an object which cannot predict fails where
it is fitted.
"""


@dataclass(frozen=True, eq=False)
class BlackBoxModel:
    """The model of a party that has a black box instead of a network.

    For a number it has `fit(x, y)` and `predict(x)`, on standardized numbers.

    Attributes:
        name: its name in error messages.
        make: returns a new, unfitted object with `fit(x, y)` and `predict_proba(x)`, or
            `predict(x)` for a number.
        classes: K; 1 for a number.
        seed: seeds every random generator while an object is made, fitted and asked.
        learn: whether it is also fitted to the answers of others; otherwise it only teaches.
        refit_every: local steps of a neural client between two fits.
        min_probability: the smallest probability that it answers with.
        public_weight: weight of a public row in a fit; an own row has weight 1.
        number: whether it predicts a number.
    """

    name: str
    make: Callable[[], Any]
    classes: int
    seed: int = 0
    learn: bool = True
    refit_every: int = 25
    min_probability: float = 1e-3
    public_weight: float = 1.0
    number: bool = False

    def fit(
        self, x: Tensor, y: Tensor, public: Tensor | None = None, targets: Tensor | None = None
    ) -> "FittedBlackBox":
        """A new object, fitted to own rows and to public rows with soft labels.

        If its `fit` takes `sample_weight`, a public row appears once for each class, weighted by
        the probability of that class; classes at the floor are left out. Otherwise it appears once,
        with its most probable class.

        Args:
            x: (n, ...) own rows; they are flattened for the fit.
            y: (n,) their labels.
            public: (m, ...) public rows.
            targets: (m, K) their probabilities.

        Raises:
            ModelError: the object is unusable, or its answers are not probabilities of its classes.
        """
        rows, labels, weights = flatten_rows(x), y.cpu().numpy().copy(), np.ones(len(y))
        with reproducible(self.seed):
            inner = self.make()
        weighted = accepts_weights(inner.fit)
        if public is not None and targets is not None and len(public) and self.number:
            rows = np.concatenate([rows, flatten_rows(public)])
            labels = np.concatenate([labels, targets[:, 0].cpu().numpy()])
            weights = np.concatenate([weights, np.full(len(public), self.public_weight)])
        elif public is not None and targets is not None and len(public):
            which, classes, shares = hard_rows(
                targets.cpu().numpy(), self.min_probability, weighted
            )
            rows = np.concatenate([rows, flatten_rows(public)[which]])
            labels = np.concatenate([labels, classes])
            weights = np.concatenate([weights, self.public_weight * shares])
        seen = np.unique(labels)
        if len(seen) == 1 and not self.number:  # many classifiers refuse to fit a single class
            return FittedBlackBox(replace(self), None, seen)
        with reproducible(self.seed):  # again: `make` may have loaded a library that uses threads
            inner.fit(rows, labels, **({"sample_weight": weights} if weighted else {}))
        columns = np.arange(1) if self.number else self._columns(inner)
        # a copy: `_FITS` must not keep its own key
        fitted = FittedBlackBox(replace(self), inner, columns)
        fitted.outputs(x[:CHECKED_ROWS])
        return fitted

    def _columns(self, inner: Any) -> np.ndarray:
        """The class (k,) of each column of a fitted object's `predict_proba`."""
        every, declared = np.arange(self.classes), getattr(inner, "classes_", None)
        if declared is None:
            return every
        with contextlib.suppress(TypeError, ValueError), np.errstate(invalid="ignore"):
            labels = np.asarray(declared)
            columns = labels.astype(np.int64)
            distinct = labels.ndim == 1 and 0 < len(columns) == len(np.unique(columns))
            if distinct and (columns == labels).all() and np.isin(columns, every).all():
                return columns
        raise ModelError(
            f"{self.name}: its classes_ after fit must be different labels from 0 to "
            f"{self.classes - 1}"
        )

    def cached(self, key: bytes, make: "Callable[[], CrossFit]") -> "CrossFit":
        """The latest fits of this model in this process if they have this key, or else what `make`
        returns.
        """
        entry = _FITS.get(self)
        if entry is None or entry[0] != key:
            entry = _FITS[self] = (key, make())
        return entry[1]


class FittedBlackBox:
    """A fitted black box.

    Attributes:
        inner: the object; None if all rows had one class.
        columns: the class (k,) of each column of its `predict_proba`.
    """

    def __init__(self, model: BlackBoxModel, inner: Any, columns: np.ndarray) -> None:
        self._model, self.inner, self.columns = model, inner, columns

    def probs(self, x: Tensor) -> Tensor:
        """Probabilities (n, K) float32 of rows x (n, ...), none below the floor. Raises ModelError
        if the object's answers are not probabilities of its classes.
        """
        p = np.zeros((len(x), self._model.classes))
        if self.inner is None:
            p[:, self.columns] = 1.0
        elif len(x):
            with reproducible(self._model.seed):
                p[:, self.columns] = self._checked(
                    self.inner.predict_proba(flatten_rows(x)), len(x)
                )
        p = (
            self._model.min_probability
            + (1 - self._model.classes * self._model.min_probability) * p
        )
        return torch.from_numpy(p.astype(np.float32)).to(x.device)

    @property
    def number(self) -> bool:
        """Whether it predicts a number."""
        return self._model.number

    def answers(self, x: Tensor) -> Tensor:
        """Probabilities (n, K), or numbers (n, 1), which are averaged as they are."""
        return self.numbers(x) if self.number else self.probs(x)

    def outputs(self, x: Tensor) -> Tensor:
        """Log-probabilities (n, K), or numbers (n, 1), float32 of rows x (n, ...). Raises
        ModelError as `probs`.
        """
        return self.numbers(x) if self._model.number else self.probs(x).log()

    def numbers(self, x: Tensor) -> Tensor:
        """Standardized numbers (n, 1) float32 of rows x (n, ...). Raises ModelError if the answers
        are none.
        """
        found = np.zeros(len(x))
        if len(x):
            with reproducible(self._model.seed):
                found = np.asarray(self.inner.predict(flatten_rows(x)))
        if (
            found.shape not in ((len(x),), (len(x), 1))
            or found.dtype.kind not in "biuf"
            or not np.isfinite(found).all()
        ):
            raise ModelError(
                f"{self._model.name}: predict must give a finite number for each row, ({len(x)},)"
            )
        return torch.from_numpy(found.reshape(-1, 1).astype(np.float32)).to(x.device)

    def _checked(self, answer: Any, rows: int) -> np.ndarray:
        p, name = np.asarray(answer), self._model.name
        if p.shape != (rows, len(self.columns)):
            raise ModelError(
                f"{name}: predict_proba must give one column for each class in its classes_, or "
                f"for all {self._model.classes} classes if it has no classes_: ({rows}, "
                f"{len(self.columns)}), not {p.shape}"
            )
        if (
            p.dtype.kind not in "biuf"
            or not np.isfinite(p).all()
            or p.min() < 0
            or p.max() > 1 + 1e-6
        ):
            raise ModelError(
                f"{name}: predict_proba must give finite numbers from 0 to 1, and some are not"
            )
        total = p.sum(1, keepdims=True, dtype=np.float64)
        if abs(total - 1).max() > 1e-3:
            raise ModelError(f"{name}: predict_proba must give rows that sum to 1, and some do not")
        divided: np.ndarray = p / total
        return divided


@dataclass(frozen=True, eq=False)
class CrossFit:
    """Two fits to all own rows, `odd` to the public rows of odd numbers and `even` to the others.

    A classifier may memorize its training rows. It would then answer a public row with the labels
    that others gave it, and they would count their own answers twice. So a public row is answered
    by the fit that did not see it.

    Attributes:
        odd, even: see above; the same object if no public row has a label.
    """

    odd: FittedBlackBox
    even: FittedBlackBox
    _known: WeakTensorKeyDictionary = field(init=False, default_factory=WeakTensorKeyDictionary)

    def log_probs(self, x: Tensor) -> Tensor:
        """Log-probabilities (n, K), or numbers (n, 1), of other rows x (n, ...): of the mean of
        both fits.

        They are remembered as long as the tensor `x` lives, because test rows stay the same.
        """
        if x not in self._known:
            first = self.odd.answers(x)
            mean = first if self.odd is self.even else (first + self.even.answers(x)) / 2
            self._known[x] = mean if self.odd.number else mean.log()
        known: Tensor = self._known[x]
        return known

    def public_log_probs(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Log-probabilities (n, K), or numbers (n, 1), of public rows x (n, ...), given their row
        numbers (n,).
        """
        if self.odd is self.even:
            return self.odd.outputs(x)
        second = (numbers % 2 == 1).to(x.device)
        answers = self.odd.answers(x[~second]), self.even.answers(x[second])
        p = x.new_empty(len(x), answers[0].shape[1])
        p[~second], p[second] = answers
        return p if self.odd.number else p.log()


_FITS: weakref.WeakKeyDictionary[BlackBoxModel, tuple[bytes, CrossFit]] = (
    weakref.WeakKeyDictionary()
)


def hard_rows(
    targets: np.ndarray, floor: float, weighted: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with one class each that stand for rows with soft labels (m, K): arrays (r,) of the
    row's number, class and weight; the weights of one row sum to about 1.

    Classes at the floor are left out, except the most probable one. Unless `weighted`,
    each row appears once.
    """
    if not weighted:
        return np.arange(len(targets)), targets.argmax(1), np.ones(len(targets))
    above = targets > 1.001 * floor  # with a tolerance for rounding
    which, classes = np.nonzero(above | (targets == targets.max(1, keepdims=True)))
    return which, classes, targets[which, classes].astype(np.float64)


def flatten_rows(x: Tensor) -> np.ndarray:
    """Rows (n, ...) as (n, d) float32: a copy, which an object may change."""
    return x.reshape(len(x), -1).float().cpu().numpy().copy()


def accepts_weights(fit: Callable[..., Any]) -> bool:
    """Whether a `fit` names `sample_weight` among its arguments; False if Python cannot inspect
    them.
    """
    try:
        return "sample_weight" in inspect.signature(fit).parameters
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Within it the global generators of Python, NumPy and torch are seeded, and libraries use one
    thread.

    More threads would sum in another order, and a forked process must not use the threads of its
    parent.
    """
    legacy = np.random.mtrand  # NumPy's global generator, which other libraries draw from
    before = random.getstate(), legacy.get_state()
    random.seed(seed)
    legacy.seed(seed)
    try:
        with torch.random.fork_rng(devices=[]), libraries_on_one_thread():
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before[0])
        legacy.set_state(before[1])


@contextlib.contextmanager
def libraries_on_one_thread() -> Iterator[None]:
    """Within it NumPy, and the libraries that are loaded so far, use one thread."""
    with _threads(len(sys.modules)).limit(limits=1):
        yield


@lru_cache(maxsize=1)
def _threads(modules: int) -> Any:
    """A controller of the threads of all loaded libraries, made anew when the number of `modules`
    changes.
    """
    from threadpoolctl import ThreadpoolController  # it comes with scikit-learn

    return ThreadpoolController()
