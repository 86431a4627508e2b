"""Units of the numbers of a table."""

import math

from fedloom_papers.units import Unit


def test_numbers_are_written_in_their_unit() -> None:
    percent, mega, raw = Unit("%"), Unit("MB"), Unit("")
    assert (percent.factor, mega.factor, raw.factor) == (100, 1e-6, 1)
    assert percent.spread(81.24, 0.66) == "81.2\u00a0±\u00a00.7"
    assert percent.spread(81.24, None) == "81.2"
    assert percent.difference(-2.06) == "−2.1"
    assert mega.spread(0.01234, 0.0001) == "0.0123\u00a0±\u00a00.0001"
    assert mega.number(1234.5) == "1,234"
    assert raw.number(math.inf) == "never"
    assert raw.number(0.0) == "0.00"
