"""Units of the numbers of a table."""

import math
from dataclasses import dataclass

from fedloom.report import formatting as fmt

FACTORS = {"%": 100.0, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9}
"""The factor from a raw value to each unit; 1 for any other unit."""


@dataclass(frozen=True)
class Unit:
    """The unit and format of a table's numbers. Arguments of the methods are in the unit.

    Attributes:
        name: %, kB, MB or GB, which scale raw values, or any other name.
    """

    name: str

    @property
    def factor(self) -> float:
        """The factor of raw values."""
        return FACTORS.get(self.name, 1.0)

    @property
    def apart(self) -> str:
        """The unit of differences, as a suffix."""
        noun = "points" if self.name == "%" else self.name
        return f"{fmt.NBSP}{noun}" if noun else ""

    def number(self, value: float, like: float | None = None) -> str:
        """`81.2`, with the decimals of `like`; `never` for infinity."""
        if math.isinf(value):
            return "never"
        return fmt.number(value, f",.{self.decimals(value if like is None else like)}f")

    def spread(self, mean: float, deviation: float | None) -> str:
        """`81.2 ± 0.7`, or the mean alone."""
        known = deviation is not None and math.isfinite(deviation)
        behind = f"{fmt.NBSP}±{fmt.NBSP}{self.number(deviation or 0.0, mean)}" if known else ""
        return f"{self.number(mean)}{behind}"

    def difference(self, value: float, like: float | None = None) -> str:
        """`+2.1`."""
        return fmt.number(value, f"+,.{self.decimals(value if like is None else like)}f")

    def decimals(self, size: float) -> int:
        """Number of decimals: one for percent, otherwise three significant digits."""
        if self.name == "%" or not math.isfinite(size):
            return 1
        return 2 if size == 0 else min(4, max(0, 2 - math.floor(math.log10(abs(size)))))
