"""Format numbers and lists for reports and terminals.

A non-breaking space `NBSP` separates values from units; terminals pass another `space`.
"""

import math
from collections.abc import Iterable, Sequence

NBSP = "\u00a0"
MINUS = "\u2212"
NONE = "–"

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def percent(share: float, space: str = NBSP) -> str:
    """`86.7 %` of 0.867."""
    return f"{_signed(100 * share, '.1f')}{space}%"


def points(difference: float) -> str:
    """`+2.7` percentage points of 0.027; zero has no sign."""
    text = _signed(100 * difference, "+.1f")
    return "0.0" if text in ("+0.0", f"{MINUS}0.0") else text


def with_gain(mean: float | None, gain: float | None, share: bool = True) -> str:
    """A metric and its gain, `86.7 % (+2.7)`."""
    return (
        NONE
        if mean is None
        else metric(mean, share) + ("" if gain is None else f" ({difference(gain, share)})")
    )


def number(value: float, form: str = ".3f") -> str:
    """`0.962`; zero has no sign."""
    text = _signed(value, form)
    return (
        text
        if any(c in text for c in "123456789") or not math.isfinite(value)
        else text.lstrip(f"+{MINUS}")
    )


def value(found: str | float | None) -> str:
    """A value of a table: text, a number with four digits or all before the point, or a dash."""
    if found is None or isinstance(found, str):
        return "–" if found is None else found
    return number(found, ".0f" if 1e3 <= abs(found) < 1e15 else ".4g")


def metric(value: float, share: bool = True, space: str = NBSP) -> str:
    """A share in percent, `86.7 %`, or any other metric as a number, `0.962`, `12.35`
    or `18,230`.
    """
    return percent(value, space) if share else number(value, _form(value))


def spread(mean: float, deviation: float | None, share: bool = True) -> str:
    """`86.7 % ± 2.0` or `0.962 ± 0.010`; the mean alone without a deviation."""
    return metric(mean, share) + (
        f"{NBSP}±{NBSP}{standard_deviation(deviation, share)}" if deviation is not None else ""
    )


def standard_deviation(value: float | None, share: bool = True) -> str:
    """`2.0` percentage points, or `0.010`."""
    return NONE if value is None else f"{100 * value:.1f}" if share else f"{value:{_form(value)}}"


def difference(value: float, share: bool = True) -> str:
    """`+2.7` percentage points, or `+0.012`."""
    return points(value) if share else number(value, f"+{_form(value)}")


def between(low: float, high: float, share: bool = True) -> str:
    """`−0.3 to +1.5`, the ends of an interval; one that is near 0 has digits enough to show on
    which side it is.
    """
    return f"{bound(low, share)} to {bound(high, share)}"


def bound(value: float, share: bool = True) -> str:
    """An end of an interval: see `between`."""
    text, shown = difference(value, share), 100 * value if share else value
    if text.strip("0.") or not value:
        return text
    return next(
        (f for digits in (2, 3, 4) if (f := _signed(shown, f"+.{digits}f")).strip(f"+{MINUS}0.")),
        text,
    )


def size(count: float, space: str = NBSP) -> str:
    """Bytes in three digits and a decimal unit: `7.68 MB`."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}{space}{units[0]}"


def whole(count: float) -> str:
    """`7,680,000`."""
    return f"{count:,.0f}"


def exact_bytes(count: float) -> str:
    """`7,680,000 bytes`."""
    return f"{whole(count)} bytes"


def duration(seconds: float, space: str = NBSP, tenths_below: float = 99.95) -> str:
    """`63.3 s`, `12 min 3 s`, `3 h 12 min`; in whole seconds from `tenths_below`."""
    if seconds < 99.95:
        return f"{seconds:.{1 if seconds < tenths_below else 0}f}{space}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes}{space}min {rest}{space}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{whole(hours)}{space}h {minutes}{space}min"


def estimate(seconds: float) -> str:
    """A rough time: `5 min`, `3 h`, `4 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} days"


def times(number: int, noun: str, plural: str = "") -> str:
    """`ten clients`, `one client`, `20 clients`."""
    word = _NUMBERS[number] if 0 <= number < len(_NUMBERS) else whole(number)
    return f"{word} {noun if number == 1 else plural or noun + 's'}"


def together(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return (
        " and ".join(part for part in (", ".join(items[:-1]), items[-1]) if part) if items else ""
    )


def clients_named(clients: Sequence[int]) -> str:
    """`client 1`, or `clients 1, 4`."""
    return f"client{'' if len(clients) == 1 else 's'} {', '.join(map(str, clients))}"


def span(values: Iterable[int]) -> str:
    """`600`, or `100 to 600` if the values differ."""
    low, *_, high = sorted(values) * 2
    return whole(low) if low == high else f"{whole(low)} to {whole(high)}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def shortened(text: str, longest: int) -> str:
    """The text in printable characters, with an ellipsis in the middle if too long."""
    text = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in text)
    half = (longest - 1) // 2
    return (
        text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[len(text) - half :]}"
    )


def _form(value: float) -> str:
    """Three decimals, or four digits of a number of 10 or more, or whole numbers from 1,000."""
    size = abs(value)
    return ".3f" if not size >= 10 else ".2f" if size < 100 else ".1f" if size < 1000 else ",.0f"


def _signed(number: float, form: str) -> str:
    return f"{number:{form}}".replace("-", MINUS) if math.isfinite(number) else "not a number"
