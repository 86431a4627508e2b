"""Small pictures that a notebook shows without pyplot."""

import io
from typing import Any

from matplotlib.figure import Figure

BLUE = "#0072b2"


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_svg_(self) -> str:
        target = io.StringIO()
        self.savefig(target, format="svg")
        return target.getvalue()


def axes(rows: int = 0) -> tuple[Figure, Any]:
    """An empty figure and its axes, high enough for so many named rows."""
    figure = Picture(figsize=(6, max(3.2, 0.3 * rows)), layout="constrained")
    made = figure.add_subplot()
    made.spines[["top", "right"]].set_visible(False)
    return figure, made
