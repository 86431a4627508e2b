"""Convert matplotlib figures to inline SVG.

Colors become CSS variables, so that one figure serves light, dark and print; text stays text in the
page's font; ids are content hashes, so that equal runs give equal bytes.
"""

import contextlib
import io
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup, escape

INK, SOFT, GRID, PAPER, HEAT = "#010101", "#020202", "#030303", "#040404", "#050505"
"""Placeholder colors, replaced after drawing."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The color-blind-safe palette of Okabe and Ito."""
VARIABLES = {
    INK: "currentColor",
    SOFT: "var(--soft)",
    GRID: "var(--grid)",
    PAPER: "var(--card)",
    HEAT: "var(--heat)",
    **{color: f"var(--s{i})" for i, color in enumerate(SERIES, 1)},
}
TEXT = 12.0
"""Font size in CSS pixels at the figure's natural width."""

_COLOR = re.compile("|".join(VARIABLES))
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_NAMED = re.compile(r'(?:href="|url\()#([\w.-]+)')


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """matplotlib's settings as a context manager or decorator."""
    import matplotlib

    settings: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": TEXT,
        "text.color": INK,
        "text.parse_math": False,  # a class name may contain $
        "text.usetex": False,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": SOFT,
        "axes.unicode_minus": True,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "svg.fonttype": "none",
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser's fonts have more glyphs
        yield


def canvas(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> tuple[Any, Any]:
    """A figure and its axes. Sizes and margins are in pixels."""
    from matplotlib.figure import Figure

    # an SVG has 72 units to the inch
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    return figure, panel(figure, left, bottom, width - left - right, height - top - bottom)


def panel(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Axes at a position in pixels from the figure's lower left corner."""
    across, up = (72 * side for side in figure.get_size_inches())
    axes = figure.add_axes(
        (left / across, bottom / up, width / across, height / up), facecolor="none"
    )
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_linewidth(0.8)
    axes.tick_params(length=0, pad=6)
    axes.set_axisbelow(True)
    return axes


def inline(figure: Any, slug: str, alt: str, hover: dict[str, Any] | None = None) -> Markup:
    """The figure as an `<svg>` element.

    Args:
        figure: made by `canvas`.
        slug: a name, unique on the page.
        alt: description for screen readers.
        hover: the values to show under the pointer, for `page.js`.
    """
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": slug}):
        figure.savefig(
            target, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = target.getvalue()
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    named = set(_NAMED.findall(text))
    # tags only: names stay as they are
    text = re.sub(r"<[^>]*>", lambda tag: _tidied(tag[0], named), text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"<defs></defs>|<g></g>", "", text)
    width, height = (72 * side for side in figure.get_size_inches())
    head = f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {width:.0f} {height:.0f}"'
    if hover is not None and hover["points"]:
        head += (
            f' data-hover="{escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")))}"'
        )
    return Markup(f'{head} style="max-width:{1.15 * width:.0f}px">{text.strip()}')


def _tidied(tag: str, named: set[str]) -> str:
    """A tag without attributes that the page's style sheet sets."""
    tag = _COLOR.sub(lambda found: VARIABLES[found[0]], tag)
    tag = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in named else "", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    tag = tag.replace("xlink:href", "href")
    if "matrix(" not in tag:
        tag = _NUMBER.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), tag)
    return re.sub(r"\s+", " ", tag)
