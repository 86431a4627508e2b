"""The figures of a reproduction, and the numbers behind each as a tidy table in its unit."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.reproduce.beside import along, bars
from fedloom.reproduce.curves import curves, spending
from fedloom.reproduce.found import Found
from fedloom.reproduce.picture import Picture
from fedloom.reproduce.who import choices, holders


def pictures(found: Found) -> list[Picture]:
    """Those that the reproduction asks for, as far as there are runs for them."""
    makers: dict[str, Callable[[Found], Picture | None]] = {
        "curves": curves,
        "bytes": spending,
        "columns": along,
        "bars": bars,
        "holdings": holders,
        "choices": choices,
    }
    made = (makers[name](found) for name in found.reproduction.pictures)
    return [picture for picture in made if picture is not None]
