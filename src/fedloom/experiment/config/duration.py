"""Durations as users write them."""

import re

from fedloom.core.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds_of(budget: str | float) -> float:
    """The seconds of a time budget: a number of seconds, or text such as "90s", "45min", "45m" or
    "10h".

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(budget, int | float):
        return float(budget)
    if budget.strip() == "0":
        return 0.0
    parts = _DURATION.fullmatch(budget.strip())
    if parts is None:
        raise ConfigError(f"budget must be a time such as 90s, 45min or 10h, not {budget!r}")
    return float(parts[1]) * _SECONDS[parts[2]]
