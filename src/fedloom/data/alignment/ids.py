"""Normalizes, validates and hashes ids, so that parties can compare them."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from fedloom.core.errors import DataError
from fedloom.data.grammar import is_number

_EXAMPLES = 3


def normalize(value: Any) -> str:
    """The normalized id for comparison; "" if it is missing: None, NaN, or only whitespace.

    Unicode's NFKC without case, no space at the ends and one where there were several. Whole
    numbers become text. Words such as "nan" and "null" are ids like others.

    Raises:
        TypeError: neither text nor a whole number.
    """
    if isinstance(value, str):
        if value.isascii():
            return " ".join(value.lower().split())
        # Case folding can decompose a character that NFKC composes, so NFKC is applied before and
        # after.
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
        return " ".join(folded.split())
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if value is None or (isinstance(value, Real) and value != value):
        return ""
    raise TypeError(f"ids must be text or whole numbers, not {type(value).__name__}")


def digests(
    lists: Sequence[Sequence[Any]], names: Sequence[str], local: Collection[int] = ()
) -> list[list[bytes]]:
    """The SHA-256 of every normalized id, 32 bytes each, for each party in the order of its own
    list.

    Args:
        lists: the ids of each party.
        names: of the parties, for errors.
        local: indices of the parties whose ids an error may show as examples.

    Raises:
        DataError: ids are missing, repeated after normalizing, or neither text nor whole numbers;
            one line for each party, with counts.
    """
    hashes, problems = [], []
    for place, (ids, name) in enumerate(zip(lists, names, strict=True)):
        try:
            texts = [normalize(value) for value in ids]
        except TypeError as error:
            problems.append(f"{name}: {error}.")
            continue
        problem = _problem(texts, show=place in local)
        if problem:
            problems.append(f"{name}: {problem}; give each row its own id, or drop those rows.")
        hashes.append(
            [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        )
    if problems:
        raise DataError("\n".join(problems))
    return hashes


def near_misses(lists: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    """For each party but the first, a sentence if ids that the first one lacks differ from one of
    its own in the writing of a number only, such as 01, 1.0 and 1.
    """
    first = {normalize(value) for value in lists[0]}
    numbers: dict[Decimal | None, str] = {
        n: text for text in first if (n := _number(text)) is not None
    }
    found = []
    for ids, name in zip(lists[1:], names[1:], strict=True):
        odd = [
            text for text in map(normalize, ids) if text not in first and _number(text) in numbers
        ]
        if odd:
            found.append(
                f"{len(odd):,} ids of {name} differ from one of {names[0]} in writing only, such "
                f"as {odd[0]!r} and {numbers[_number(odd[0])]!r}: they count as different "
                "people; write ids alike if they are the same"
            )
    return found


def _number(text: str) -> Decimal | None:
    """The value of an id that is a number, however it is written; else None."""
    return Decimal(text) if len(text) < 40 and is_number(text) else None


def _problem(texts: Sequence[str], show: bool) -> str:
    """The problem with one party's normalized ids, with counts; or ""."""
    parts = []
    missing = [row for row, text in enumerate(texts, 1) if not text]
    if missing:
        examples = f" ({_some(missing)}, counted from 1)" if show else ""
        parts.append(f"{len(missing):,} of {len(texts):,} rows lack an id{examples}")
    repeated = {text: number for text, number in Counter(texts).items() if text and number > 1}
    if repeated:
        examples = f": {_some([repr(text) for text in repeated])}" if show else ""
        rows = sum(repeated.values())
        parts.append(
            f"{rows:,} of {len(texts):,} rows share an id with others (such ids, "
            f"{len(repeated):,}{examples})"
        )
    return " and ".join(parts)


def _some(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_EXAMPLES])) + (", …" if len(values) > _EXAMPLES else "")
