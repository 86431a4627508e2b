"""Tables for the tests of trees and exact models, split over owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedloom.core.context import ClientContext, Rows
from fedloom.core.message import digest
from fedloom.core.method import Method
from fedloom.core.task import Number
from tests.toy import Toy

WORDS = ((), (), (), tuple("abcdefg"), ())
"""Four columns of numbers, and one of words."""


def table(n: int, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, 5) with gaps, a frequent value and words, and labels (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 5)).astype(np.float32)
    x[:, 1] = np.where(rng.random(n) < 0.6, 0, x[:, 1])
    x[:, 3] = rng.integers(0, 7, n)
    score = x[:, 0] * x[:, 2] + np.sin(3 * x[:, 1]) + x[:, 3] % 3 + 0.5 * rng.standard_normal(n)
    y = np.digitize(score, np.quantile(score, np.arange(1, classes) / classes))
    x[rng.random((n, 5)) < 0.1] = np.nan
    return x, y


def owners(
    x: np.ndarray,
    y: np.ndarray,
    cuts: Sequence[int],
    words: Sequence[Sequence[str]] = WORDS,
    classes: int = 2,
) -> list[ClientContext]:
    """The owners of consecutive rows, that begin at the cuts."""
    parts = list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))
    zero, one = torch.zeros(1), torch.ones(1)
    return [
        ClientContext(
            id=i,
            parties=len(parts),
            classes=classes,
            columns=[f"x{f}" for f in range(len(words))],
            words=tuple(words),
            data=Rows(
                torch.from_numpy(a), torch.from_numpy(b).long(), torch.arange(len(b)), zero, one
            ),
        )
        for i, (a, b) in enumerate(parts)
    ]


def of_numbers(contexts: list[ClientContext], y: np.ndarray) -> list[ClientContext]:
    """The owners with numbers (n,) to predict in place of labels."""
    parts = np.split(y, np.cumsum([len(c.rows) for c in contexts])[:-1])
    return [
        replace(c, classes=1, target=Number(), data=replace(c.rows, labels=torch.from_numpy(part)))
        for c, part in zip(contexts, parts, strict=True)
    ]


def federation(method: Method, contexts: list[ClientContext], **more: Any) -> Toy:
    """A toy federation of these owners."""
    first = contexts[0]
    side = {
        "classes": first.classes,
        "target": first.target,
        "words": first.words,
        "columns": first.columns,
    }
    side["network"] = None
    return Toy(method, client_contexts=contexts, server_side=side, **more)


def splits(n: int) -> Iterator[list[int]]:
    """Cuts for one owner; four; 23; owners of 1, 1, 3 and all other rows; one without rows."""
    yield []
    yield [n // 4, n // 2, n // 2 + 5]
    yield np.linspace(0, n, 24).astype(int)[1:-1].tolist()
    yield [1, 2, 5]
    yield [n // 3, n // 3]


def model(toy: Any) -> str:
    """The SHA-256 of the server's bins and trees, which every owner has, too."""
    own = digest([toy.server.layout, toy.server.trees])
    assert all(
        digest([state["layout"], state["trees"]]) == own for state in toy.engine.states().values()
    )
    return own


def models_of_splits(method: Method, classes: int, rounds: int, **params: Any) -> set[str]:
    """The models of equal rows in two orders, of each of the `splits`, and of isolated owners."""
    x, y = table(400, classes)
    order = np.random.default_rng(1).permutation(400)
    found = {
        model(
            federation(method, owners(x[rows], y[rows], cuts, classes=classes), **params).run(
                rounds
            )
        )
        for rows in (np.arange(400), order)
        for cuts in splits(400)
    }
    isolated = federation(method, owners(x, y, [50], classes=classes), isolated=True, **params)
    return found | {model(isolated.run(rounds))}
