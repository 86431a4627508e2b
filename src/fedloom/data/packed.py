"""Dates that are packed into numbers, such as 31012022, and are as numbers not in order.

A form counts if all numbers have it, if it gives another order than the numbers themselves, and if
its parts vary as years, months and days do. Dates that begin with the year, days that are counted
from a first one, and seconds since 1970 are in order as they are.
"""

from collections.abc import Collection

import numpy as np

_YEARS = 1900, 2100
_MONTHS = 1, 12
_DAYS = 1, 31
_OF_YEAR = 1, 366
_MOST = 10**14  # numbers with more digits than 31122022235959 has are none of these dates
_EXCEL = 20_000, 70_000
"""Days since 1900, as Excel counts them, from 1954 to 2091."""
_LAST, _LACKS = "dates with the year last", "dates whose months or days lack zeros"
_SHORT = "dates of two digits for the year"


def disordered(words: Collection[str]) -> str:
    """What words that are numbers are, if they are dates that have another order as numbers; else
    "".
    """
    values = np.unique([float(word) for word in words])
    if len(values) < 2 or values[0] < 0 or values[-1] >= _MOST:
        return ""
    if (values == np.floor(values)).all():
        short = all(len(word) == 2 for word in words) and any(word[0] == "0" for word in words)
        if short and values[-1] >= 70 and not _between(values[values > 30], 31, 69).any():
            return "years of two digits"
        return _whole(values.astype(np.int64))
    return _decimal([repr(float(word)) if "e" in word.lower() else word for word in words])


def _whole(values: np.ndarray) -> str:
    """As `disordered`, of ascending whole numbers (n,)."""
    for clock in (0, 4, 6):  # digits of hours, minutes and seconds behind a date
        days, time = np.divmod(values, 10**clock)
        rest, year = np.divmod(days, 10_000)
        # of 2022045, the 45th day of a year, the last digits vary most
        year_last = _is_clock(time, clock) and _many(year) <= _many(rest)
        if year_last and _all(year, _YEARS) and _day_first_or_month_first(year, rest, time):
            return _LAST
    part, year = np.divmod(values, 10_000)  # a month, a week, or a day of the year
    if _all(part, _OF_YEAR) and _all(year, _YEARS) and _falls(year * 1000 + part):
        return _LAST
    digits = np.floor(np.log10(np.maximum(values, 1))).astype(np.int64) + 1
    if (
        digits[0] >= 5
        and digits[0] < digits[-1] <= 8
        and _all(values // 10 ** (digits - 4), _YEARS)
    ):
        return _LACKS
    return _two_digits(values)


def _two_digits(values: np.ndarray) -> str:
    """As `_whole`, of dates whose year has two digits or is left out."""
    rest, last = np.divmod(values, 100)
    first, middle = np.divmod(rest, 100)
    year_first = _all(middle, _MONTHS) and _all(last, _DAYS) and values[-1] < 10**6
    if year_first and len(values) >= 5 and first[0] <= 30 and first[-1] >= 70:
        return _SHORT  # 991231 comes before 101, the first of January 2000
    if year_first and _like_days(last) and (not _like_days(first) or _many(last) > _many(first)):
        return ""
    counted = values[0] >= _EXCEL[0] and values[-1] < _EXCEL[1]
    # all of 10100 to 11299 have the form, as 10 January 1900 and others
    most = _many(rest) / (2 if _many(first) == 1 else 1)
    if not counted and _many(last) <= most and _day_first_or_month_first(last, rest, last * 0):
        return _SHORT
    years = (last + 50) % 100  # 99 and 00 are neighbors
    few = _many(last) <= 12 and 2 * _many(last) <= len(values) and _many(rest) >= _many(last)
    few = few and np.ptp(years) < _many(years)
    if few and _all(rest, _MONTHS) and (last.min() >= 10 or last.max() > 12):
        return _SHORT if _falls(years * 100 + rest) else ""
    if few and _all(rest, _DAYS) and _all(last, _MONTHS) and _many(rest) > 12:
        return "dates with the day first" if _falls(last * 100 + rest) else ""
    return ""


def _decimal(words: list[str]) -> str:
    """As `disordered`, of words some of which have a decimal point."""
    # the digits in front of the point, and behind it; without a sign, and with digits on both sides
    parts = [word.split(".") for word in words]
    if not all(len(part) == 2 and all(part) and part[0].isdigit() for part in parts):
        return ""
    before, behind = np.array([int(part[0]) for part in parts]), [part[1] for part in parts]
    lengths = {len(part) for part in behind}

    # 2022.1, 2022.2, ..., 2022.10: as a number October is before February. Years in front
    # show it; without them, many words of which none has more than 12 behind the point
    if not any(part[0] == "0" for part in behind) and lengths == {1, 2}:
        most = max(map(int, behind))
        weeks = most <= 53 and _many(np.array([int(part) for part in behind])) > 12
        if (_all(before, _YEARS) and (most <= 12 or weeks)) or (most <= 12 and len(words) >= 10):
            return "months or weeks behind a point without zeros"

    # 01.2022 (month and year) and 31.12 (day and month), which may have lost zeros at the end, as
    # 01.202 of 2020 and 31.1 of October; days and months need more words, as prices are like them
    order = np.argsort([float(word) for word in words], kind="stable")
    for digits, low, high, fewest in ((4, _MONTHS, _YEARS, 3), (2, _DAYS, _MONTHS, 10)):
        if max(lengths) <= digits and len(words) >= fewest and _all(before, low):
            later = np.array([int(part.ljust(digits, "0")) for part in behind])
            # dates only if in the order of the numbers they go back in time somewhere
            if _all(later, high) and _falls((later * 100 + before)[order]):
                return _LAST if digits == 4 else "dates with the day first"
    return ""


def _day_first_or_month_first(year: np.ndarray, rest: np.ndarray, time: np.ndarray) -> bool:
    """Whether years, and two parts of two digits, are dates that are not in order."""
    parts = np.divmod(rest, 100)
    return any(
        _all(month, _MONTHS)
        and _all(day, _DAYS)
        and _falls(((year * 100 + month) * 100 + day) * 10**6 + time)
        for day, month in (parts, parts[::-1])
    )


def _is_clock(time: np.ndarray, digits: int) -> bool:
    """Whether numbers are hours and minutes (4 digits), with seconds (6), or nothing (0)."""
    hours, rest = np.divmod(time, 10 ** max(digits - 2, 0))
    return not digits or (
        _all(hours, (0, 23))
        and _all(rest // 10 ** (digits - 4), (0, 59))
        and _all(rest % 100, (0, 59))
    )


def _like_days(part: np.ndarray) -> bool:
    """Whether a part of dates (n,) is one number or varies much, as days do and years do not."""
    return _many(part) == 1 or _many(part) >= min(12, len(part) / 3)


def _many(part: np.ndarray) -> int:
    """How many different numbers there are."""
    return len(np.unique(part))


def _between(part: np.ndarray, low: int, high: int) -> np.ndarray:
    inside: np.ndarray = (part >= low) & (part <= high)
    return inside


def _all(part: np.ndarray, bounds: tuple[int, int]) -> bool:
    return bool(_between(part, *bounds).all())


def _falls(times: np.ndarray) -> bool:
    """Whether some time (n,) is before the one in front of it."""
    return bool((np.diff(times) < 0).any())
