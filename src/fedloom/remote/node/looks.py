"""Looks at a node's own rows: how many there may be of each file, and how exact they are.

A coordinator chooses the model that is scored, so exact counts of right answers would reveal rows
one by one. Counts and losses therefore get noise, keyed by the node's secret and by what was asked:
a repeated look tells nothing new. A budget for each file, kept on disk, bounds the number of looks
of all runs and callers together. That bounds what is told about test rows. A model that the node
trained itself depends on its training rows, and its score does, too.
"""

import hashlib
import hmac
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from fedloom.core import message
from fedloom.core.evaluation import MAX_ERROR, MAX_LOSS
from fedloom.core.message import Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.remote.node.budget import Budget, Spent
from fedloom.remote.rpc_errors import refused

OWN: Final = "own"
"""The name of a party's own test rows."""
SCALE: Final = 2.0
"""Scale of the noise, in rows: of two files that differ in one test row, no count is e^(1 / SCALE)
times likelier.
"""


def split_of(party: Party[MethodConfig], on: str) -> str:
    """A hash of the number of test rows and of the most frequent class of them, for the node's own
    record; "" for a number to predict, whose chance level does not depend on rows.
    """
    if party.context.target is not None:
        return ""
    rows = party.context.tests[on]
    counts = rows.y(torch.arange(len(rows), device=party.context.device)).bincount()
    return hashlib.sha256(f"{len(rows)} {int(counts.max())}".encode()).hexdigest()[:32]


def look(budget: Budget, cohort: str, file: Path, limit: int, split: str = "") -> None:
    """Record a look, on disk before it is made. The first one at another `split` than the first
    counts as two: its chance level is a third number.

    Raises:
        CallRefused: there would be more than the limit.
        PrivacyBudgetSpent, OSError: the record allows nothing, or cannot be written.
    """

    budget.spend(cohort, file, partial(take_looks, count=1, limit=limit, split=split))


def take_looks(spent: Spent, *, count: int, limit: int, split: str) -> None:
    """Count so many looks: see `look`."""
    before = spent.looks
    spent.looks += count + bool(count and spent.splits and split and split not in spent.splits)
    spent.splits = [*dict.fromkeys([*spent.splits, *([split] if split else [])])]
    if spent.looks > limit and count <= 1:
        raise refused(
            f"the {limit} looks at these rows are used up: the node's owner must raise looks"
        )
    if spent.looks > limit:
        raise refused(
            f"this run takes {spent.looks - before} looks, and {max(0, limit - before)} of the "
            f"{limit} looks at these rows are left (looks): set evaluate.points to fewer, or ask "
            f"the node's owner to set looks = {spent.looks}"
        )


def split_seed(secret: int, file: Path) -> int:
    """The seed by which a file's rows are split into training and test rows: the same
    in every run.
    """
    return int.from_bytes(_keyed(secret, b"split", str(file.resolve()).encode())[:4], "little")


def blurred(
    score: Mapping[str, Any], secret: int, asked: Mapping[str, Tree], state: Mapping[str, Tree]
) -> Tree:
    """Add noise to a score's number of correct predictions, to its loss and to the chance level,
    and round them. The chance level always has the same noise, as no model changes it.

    Args:
        score: of `fedloom.core.evaluation.score`.
        secret: the node's.
        asked: the arguments of the call.
        state: of the party.
    """
    rows = int(score["rows"])
    key = _keyed(secret, message.digest(dict(asked)).encode(), message.digest(dict(state)).encode())
    if "squared" in score:
        return _blurred_number(score, rows, key)
    exact = float(score["chance"])
    chance = exact + _laplace(_keyed(secret, b"chance", f"{rows} {exact!r}".encode())[:8]) / rows
    right = round(float(score["accuracy"]) * rows) + _laplace(key[:8])
    loss = float(score["loss"]) + MAX_LOSS / rows * _laplace(key[8:16])
    return {
        "accuracy": torch.tensor(min(max(round(right), 0), rows) / rows),
        "loss": torch.tensor(min(max(round(loss, 1), 0.0), MAX_LOSS)),
        "chance": torch.tensor(min(max(round(chance, 1), 0.0), 1.0)),
        "rows": rows,
    }


def _blurred_number(score: Mapping[str, Any], rows: int, key: bytes) -> Tree:
    """As `blurred`, for a number: noise on means of squared and absolute errors, of which a row
    moves the former by `MAX_ERROR` / rows. The chance level is that of the agreed s.d.: one row
    could move that of own rows by any amount.
    """
    squared = float(score["squared"]) + MAX_ERROR / rows * _laplace(key[:8])
    absolute = float(score["absolute"]) + MAX_ERROR**0.5 / rows * _laplace(key[8:16])
    found = {"squared": (squared, MAX_ERROR), "absolute": (absolute, MAX_ERROR**0.5)}
    return {
        **{
            name: torch.tensor(min(max(round(value, 1), 0.0), most))
            for name, (value, most) in found.items()
        },
        "chance": torch.tensor(1.0),
        "rows": rows,
    }


def _keyed(secret: int, *parts: bytes) -> bytes:
    """32 bytes that nobody without the secret can tell from random ones."""
    whole = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.new(secret.to_bytes(16, "little"), whole, hashlib.sha256).digest()


def _laplace(key: bytes) -> float:
    """A draw from the Laplace distribution with scale `SCALE`."""
    u = ((int.from_bytes(key, "little") >> 12) + 0.5) / 2.0**52 - 0.5
    return -SCALE * math.copysign(math.log1p(-2 * abs(u)), u)
