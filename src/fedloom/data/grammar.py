"""How the text of a cell is read, the same for every door: missing words, numbers, true and false,
dates.

Owners, labels, ids and units are never parsed: they are the text as written, without the spaces
around it.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fedloom.core.errors import DataError
from fedloom.data.amounts import amounts, is_pair
from fedloom.data.packed import disordered
from fedloom.data.standalone import DAY_OR_MONTH_FIRST, ISO_DATE, moment_of

Decimal = Literal[".", ","]
Decimals = Decimal | Mapping[str, Decimal]
"""One sign for all files, or those of files by name; a file without one has a point."""
Order = Literal["iso", "day", "month"]
"""The form of dates: ISO 8601; or day and month, in this order or the other, and year."""

MOST_NUMBERS = 20
"""Different numbers of a column beyond which they are no codes: a label is then a number to
predict.
"""
MISSING_WORDS = ("?", ".", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None")
"""Words that stand for a missing value, as an empty cell does."""
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
"""A number: digits, a decimal point, an exponent; no "_" and no signs between thousands."""
BOOLEANS = {"True": 1.0, "true": 1.0, "TRUE": 1.0, "False": 0.0, "false": 0.0, "FALSE": 0.0}
"""Words of a column of true and false, and the number of each as a feature."""
_NUMBER = re.compile(NUMBER)
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = r"((mon|tue|wed|thu|fri|sat|sun)[a-z]*[., ]+)?"
_CLOCK = r"\d\d?:\d\d(:\d\d(\.\d+)?)?"
_YEAR = r"(1[89]|2[01])\d\d"
_LIKE_DATE = (
    # 5-Jan-2022, January 5, 2022, 2022 Jan 5, 2022-01; 5. März 2022; 5/1/2022, 10:00 AM;
    # 20220105T1000
    re.compile(
        rf"{_DAY}((\d\d?(st|nd|rd|th)?[ ./-]+)?{_MONTH}[ .,/-]+(\d\d?(st|nd|rd|th)?[ "
        rf",/-]+)?(\d{{4}}|\d\d)|(\d\d?[ .]+)[^\W\d_]{{3,10}}[. "
        rf"]+{_YEAR}|\d{{4}}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.](\d{{4}}|\d\d))([ "
        rf",T]+{_CLOCK} ?([ap]\.?m\.?)?( ?[a-z]{{1,4}}([+-]\d+)?)?)?|\d{{4}}[ ./-]+{_MONTH}([ "
        rf"./-]+\d\d?)?|{_YEAR}[-/.](0[1-9]|1[0-2])|{_YEAR}[01]\d[0-3]\d[T ]\d{{4,6}}Z?|{_YEAR}[ "
        rf"-]?W[0-5]\d(-?\d)?|{_YEAR}[ /-]?Q[1-4]|Q[1-4][ /-]?{_YEAR}",
        re.I,
    )
)
_LIKE_TIME = re.compile(rf"{_CLOCK}( ?[ap]\.?m\.?)?", re.A | re.I)
_SPAN = (
    r"\d+([.,]\d+)? ?(y|yrs?|years?|mos?|months?|w|wks?|weeks?|d|h|hrs?|hours?|m|mins?|minutes?|"
    r"s|secs?|seconds?)"
)
_LIKE_SPAN = re.compile(
    rf"[-+]?\d+ days?,?( [-+]?{_CLOCK})?|P(?=\d|T\d)(\d+[YMWD])*(T(\d+[HMS])+)?|"
    # 1h 30m, 2 weeks and 3 days, 1h30
    rf"{_SPAN}((,? | and )?({_SPAN}|\d+ ?days?))+|\d+ ?days?((,? | and )?{_SPAN})+|\d+h\d\d",
    re.A | re.I,
)
_REPAIRS = {
    "numbers": "write digits and a decimal point only",
    "dates": "write them as 2022-01-31",
    "times of day": "write them as numbers, such as 13.5",
    "spans of time": "write them as numbers of hours or days",
    "pairs of numbers": "write each number in a column of its own",
}
_MONTHS: tuple[str, ...] = ("january", "february", "march", "april", "may", "june")
_MONTHS += ("july", "august", "september", "october", "november", "december")
_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\u200b-\u200f\u2060\ufeff\u00ad]")


@dataclass(frozen=True)
class Grammar:
    """The settings of a file's cells."""

    missing_words: tuple[str, ...] = MISSING_WORDS
    """Words that stand for a missing value; an empty cell always does."""
    decimal: Decimal = "."
    """The sign before the decimals of a number."""

    def is_number(self, word: str) -> bool:
        """Whether a word is a number."""
        return is_number(word if self.decimal == "." else word.replace(".", "_").replace(",", "."))


PLAIN = Grammar()
"""The usual grammar."""


def is_number(word: str) -> bool:
    """Whether a word is a number, with a decimal point."""
    return _NUMBER.fullmatch(word) is not None


def like_date(word: str) -> bool:
    """Whether a word has the form of a date."""
    return ISO_DATE.fullmatch(word) is not None or DAY_OR_MONTH_FIRST.fullmatch(word) is not None


def dated(words: Mapping[str, int]) -> bool:
    """Whether most rows of words -> rows hold dates."""
    return 2 * sum(rows for word, rows in words.items() if like_date(word)) > sum(words.values())


def unread(words: Mapping[str, int], grammar: "Grammar") -> str:
    """What words -> rows are, and the repair, if most rows hold numbers, dates or times that the
    grammar does not read; else "".
    """
    rows = sum(words.values())
    known = sum(count for word, count in words.items() if grammar.is_number(word))
    like = amounts(words, grammar.is_number)
    forms: tuple[Callable[[str], object], ...] = (
        lambda word: is_number(word) or word in like,
        _LIKE_DATE.fullmatch,
        _LIKE_TIME.fullmatch,
        _LIKE_SPAN.fullmatch,
        lambda word: len(words) > MOST_NUMBERS and is_pair(word),
    )
    for what, form in zip(_REPAIRS, forms, strict=True):
        odd = [word for word in words if form(word) and not grammar.is_number(word)]
        if (
            odd
            and 2 * (sum(words[word] for word in odd) + (known if what == "numbers" else 0)) > rows
        ):
            repair = _REPAIRS[what]
            if what == "numbers" and grammar.decimal == ",":
                repair = repair.replace("point", "comma")
            elif what == "numbers" and "," in odd[0]:
                repair += ", or set data.decimal = ','"
            return f"{what} such as {odd[0][:40]!r}: {repair}"
    return ""


def plain_name(name: object) -> str:
    """A column's name in one Unicode form, without spaces around it and invisible signs."""
    return unicodedata.normalize("NFC", _INVISIBLE.sub("", str(name))).strip()


def in_order(names: Iterable[str]) -> list[str]:
    """Names sorted as numbers if all are numbers, else as text."""
    names = list(names)
    return (
        sorted(names, key=lambda name: (float(name), name))
        if all(map(is_number, names))
        else sorted(names)
    )


def nearly_equal(names: Iterable[str]) -> list[list[str]]:
    """Groups of different names that are one but for case, spaces, invisible signs, Unicode form,
    or the writing of a number or of true and false.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", _INVISIBLE.sub("", name)).casefold()
        folded = {"true": "1", "false": "0"}.get(" ".join(folded.split()), " ".join(folded.split()))
        groups.setdefault(repr(float(folded)) if is_number(folded) else folded, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


# -- times -----------------------------------------------------------------------------------------


def moments(words: Collection[str], column: str) -> Mapping[str, float]:
    """Word -> a number that grows with time, for words that are all numbers, all dates of one form,
    or all months.

    Dates are ISO 8601 (2022-01-31, with or without a time), or day, month and year (31.01.2022,
    31/01/2022); where slashes leave open whether the day or the month is first, they are refused.

    Raises:
        DataError: the words are none of these, or may be read in two ways.
    """
    if all(map(is_number, words)):
        refuse_disordered(words, column)
        return {word: float(word) for word in words}
    names = {word: _month(word) for word in words}
    if all(names.values()):
        return {word: float(number) for word, number in names.items()}
    if any(map(like_date, words)):
        order = date_order(words, column)
        return {word: _seconds(word, column, order) for word in words}
    odd = next(word for word in words if not is_number(word))
    raise DataError(
        f"Column {column!r} must order the rows in time, but has values such as {odd[:40]!r}, "
        "which is neither a number nor a date: write dates as 2022-01-31, months as numbers, or "
        "name other columns."
    )


def refuse_disordered(words: Collection[str], column: str) -> None:
    """Raise DataError if words that are numbers are dates that have another order as numbers."""
    if form := disordered(words):
        raise DataError(
            f"Column {column!r} has numbers such as {next(iter(words))[:40]!r}, which may be "
            f"{form}: as numbers they are not in the order of time. Write dates as 2022-01-31, or "
            "name other columns."
        )


def _month(word: str) -> int:
    """1 to 12 for the name of a month in English, or its first three letters; else 0."""
    name = word.casefold().rstrip(".")
    return next((k for k, month in enumerate(_MONTHS, 1) if name in (month[:3], month)), 0)


def date_order(words: Collection[str], column: str) -> Order:
    """The form of words that are all dates, as `moments` reads them.

    Raises:
        DataError: a word is no date, the words have several forms, or day and month may be
            confused.
    """
    iso = {word: match for word in words if (match := ISO_DATE.fullmatch(word))}
    first = {word: match for word in words if (match := DAY_OR_MONTH_FIRST.fullmatch(word))}
    if odd := next((word for word in words if word not in iso and word not in first), None):
        raise DataError(
            f"Column {column!r} has dates, but also {odd[:40]!r}: write it as 2022-01-31, or "
            f"leave it empty, or list it in data.missing_words; or set data.encode.{column} = "
            "'text'."
        )
    if iso and first:
        raise DataError(
            f"Column {column!r} has dates of several forms, such as {next(iter(iso))!r} and "
            f"{next(iter(first))!r}: write all as 2022-01-31."
        )
    if first:
        return _order(first, column)
    _refuse_mixed_zones(iso, column)
    return "iso"


def _refuse_mixed_zones(found: Mapping[str, re.Match[str]], column: str) -> None:
    if len({bool(match[8]) for match in found.values()}) > 1:
        raise DataError(
            f"Column {column!r} has times with and without a time zone; write all in one way."
        )


def _order(found: Mapping[str, re.Match[str]], column: str) -> Order:
    some = next(iter(found))
    if any(len(match[4]) == 2 for match in found.values()):
        raise DataError(
            f"Column {column!r} has years of two digits, such as {some!r}: write dates as "
            "2022-01-31."
        )
    day_first = any(int(match[1]) > 12 or match[2] == "." for match in found.values())
    month_first = any(int(match[3]) > 12 for match in found.values())
    if day_first == month_first:
        raise DataError(
            f"Column {column!r} has dates such as {some!r}, whose day and month may be confused: "
            "write them as 2022-01-31."
        )
    return "day" if day_first else "month"


def _seconds(word: str, column: str, order: Order) -> float:
    """Seconds since 1970; a time without a zone is taken as UTC."""
    try:
        at = moment_of(word, order)
    except ValueError as error:
        raise DataError(
            f"Column {column!r} has {word!r}, which is no date ({error}); correct it."
        ) from None
    assert at is not None
    return at.timestamp()
