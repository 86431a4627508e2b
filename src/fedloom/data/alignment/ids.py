"""Ids made comparable: one spelling, none missing, nobody twice, and then 32 bytes each."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

from fedloom.core.errors import DataError

_EXAMPLES = 3


def normalise(value: Any) -> str:
    """The normalised id for comparison; "" if it is missing: None, NaN, or only whitespace.

    Unicode's NFKC without case, no space at the ends and one where there were several. Whole numbers become text.
    Words such as "nan" and "null" are ids like others.

    Raises:
        TypeError: neither text nor a whole number.
    """
    if isinstance(value, str):
        if value.isascii():
            return " ".join(value.lower().split())
        # Case folding can decompose a character that NFKC composes, so NFKC is applied before and after.
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
        return " ".join(folded.split())
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if value is None or (isinstance(value, Real) and value != value):
        return ""
    raise TypeError(f"ids must be text or whole numbers, not {type(value).__name__}")


def digests(lists: Sequence[Sequence[Any]], names: Sequence[str], local: Collection[int] = ()) -> list[list[bytes]]:
    """The SHA-256 of every normalised id, 32 bytes each, for each party in the order of its own list.

    Args:
        lists: the ids of each party.
        names: their names in an error.
        local: the parties, by place, whose ids may be shown in an error as examples.

    Raises:
        DataError: ids are missing, are there twice after normalising, or are neither text nor whole numbers. One line
            for each party with its counts.
    """
    found, problems = [], []
    for place, (ids, name) in enumerate(zip(lists, names, strict=True)):
        try:
            texts = [normalise(value) for value in ids]
        except TypeError as error:
            problems.append(f"{name}: {error}")
            continue
        problem = _problem(texts, show=place in local)
        if problem:
            problems.append(f"{name}: {problem}; give every row an id of its own, or drop those rows")
        found.append([hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts])
    if problems:
        raise DataError("\n".join(problems))
    return found


def _problem(texts: Sequence[str], show: bool) -> str:
    """What is wrong with one party's normalised ids, with counts; "" if nothing is."""
    parts = []
    missing = [row for row, text in enumerate(texts, 1) if not text]
    if missing:
        examples = f" ({_some(missing)}, counted from 1)" if show else ""
        parts.append(f"{len(missing):,} of {len(texts):,} rows lack an id{examples}")
    counts = Counter(text for text in texts if text)
    if len(counts) + len(missing) < len(texts):
        twice = {text: count for text, count in counts.items() if count > 1}
        examples = f": {_some([repr(text) for text in twice])}" if show else ""
        rows = sum(twice.values())
        parts.append(f"{rows:,} of {len(texts):,} rows share an id with others (such ids, {len(twice):,}{examples})")
    return " and ".join(parts)


def _some(found: Sequence[object]) -> str:
    return ", ".join(map(str, found[:_EXAMPLES])) + (", …" if len(found) > _EXAMPLES else "")
