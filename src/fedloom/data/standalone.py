"""Fixed encodings of text and of dates, which no data decides, so that owners agree on them without
showing a word.

They need Python's standard library alone, because this page's source is written into exported
models.
"""

import math
import re
import unicodedata
from datetime import UTC, datetime, timedelta

VERSION = "ngrams-1"
"""The name of the hash; another one gives other columns."""
DATE_PARTS = (
    "year",
    "month sin",
    "month cos",
    "day sin",
    "day cos",
    "weekday sin",
    "weekday cos",
    "hour sin",
    "hour cos",
)
"""What a date is encoded as."""
LENGTHS = (3, 4)
"""Numbers of characters of an n-gram."""
ISO_DATE = re.compile(
    r"(\d{4})[-/.](\d\d?)[-/.](\d\d?)"
    r"(?:[T ](\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)? ?(Z|UTC|[+-]\d\d:?\d\d)?)?",
    re.A,
)
DAY_OR_MONTH_FIRST = re.compile(
    r"(\d\d?)([./-])(\d\d?)\2(\d{4}|\d\d)(?: (\d\d?):(\d\d)(?::(\d\d))?)?", re.A
)


def known_word(words: list[str] | dict[str, int], word: str) -> str:
    """The word itself if it is known, else the known one that differs by the ".0" that pandas
    writes.
    """
    other = word.removesuffix(".0") if word.endswith(".0") else f"{word}.0"
    same = word not in words and re.fullmatch("[+-]?[0-9]+([.]0)?", word) and other in words
    return other if same else word


def plain_text(text: str) -> str:
    """The text in one Unicode form, without capitals, each space one space, and one before and one
    behind it.
    """
    return f" {' '.join(unicodedata.normalize('NFKC', text).casefold().split())} "


def hashed_text(text: str, width: int) -> list[float]:
    """The n-grams of a text, each +1 or -1 in one of `width` columns, divided by the length of this
    vector.

    The hash of an n-gram is FNV-1a of its code points with the last steps of MurmurHash3; its
    lowest bit is the sign (Weinberger et al. 2009, arXiv:0902.2206), the others the column.
    """
    codes, sums = [ord(sign) for sign in plain_text(text)], [0] * width
    for n in LENGTHS:
        for at in range(len(codes) - n + 1):
            h = 0x811C9DC5
            for code in codes[at : at + n]:
                h = (h ^ code) * 0x01000193 & 0xFFFFFFFF
            h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
            h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
            h ^= h >> 16
            sums[(h >> 1) % width] += -1 if h & 1 else 1
    norm = math.sqrt(sum(number * number for number in sums))
    return [number / max(norm, 1.0) for number in sums]


def moment_of(word: str, order: str) -> datetime | None:
    """The moment in UTC that a word says, None if it is no date; a time without a zone is taken as
    UTC.

    A date is ISO 8601, or day and month, in the order "day" or "month", and year.

    Raises:
        ValueError: there is no such day or time.
    """
    if iso := ISO_DATE.fullmatch(word):
        year, month, day, hour, minute, second, fraction, zone = iso.groups()
    elif order != "iso" and (found := DAY_OR_MONTH_FIRST.fullmatch(word)) and len(found[4]) == 4:
        year = found[4]
        hour = found[5]
        minute = found[6]
        second = found[7]
        fraction = None
        zone = None
        day, month = (found[1], found[3]) if order == "day" else (found[3], found[1])
    else:
        return None
    at = datetime(
        int(year),
        int(month),
        int(day),
        int(hour or 0),
        int(minute or 0),
        int(second or 0),
        tzinfo=UTC,
    )
    at += timedelta(microseconds=int((fraction or "0").ljust(6, "0")[:6]))
    if zone and zone[0] in "+-":
        ahead = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        try:
            at = at - ahead if zone[0] == "+" else at + ahead
        except OverflowError as error:
            raise ValueError(f"{word} is before year 1 or after year 9999 in UTC") from error
    return at


def date_numbers(at: datetime) -> list[float]:
    """The numbers `DATE_PARTS` of a moment: years since 2000, and month, day, day of the week and
    hour on circles.
    """
    days = (at - datetime(2000, 1, 1, tzinfo=UTC)) / timedelta(days=1)
    turns = ((at.month - 1) / 12, (at.day - 1) / 31, at.weekday() / 7, at.hour / 24)
    circles = [round(f(2 * math.pi * turn), 6) for turn in turns for f in (math.sin, math.cos)]
    return [round(days / 365.2425, 9), *circles]
