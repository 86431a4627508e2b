"""A result as a card in a notebook, and a table as LaTeX."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_STYLE: Final = (
    "border:1px solid rgba(128,128,128,.4);border-left:4px solid #009e73;border-radius:8px;padding:.6em 1em;"
    "max-width:60em;overflow-x:auto;font-family:system-ui,sans-serif"
)
"""Colors of text and paper are the notebook's own, so that a card is read in light and in dark mode."""
_SPECIAL: Final[Mapping[str, str]] = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
"""Characters of LaTeX -> what prints them."""


def html_card(head: str, lines: Sequence[str], columns: Sequence[str] = (), rows: Sequence[Sequence[str]] = ()) -> str:
    """A card with a heading, lines of text and a table; texts are escaped."""
    parts = [f'<div style="{_STYLE}"><strong>{escape(head)}</strong>']
    parts += [f'<div style="margin-top:.3em">{escape(line)}</div>' for line in lines]
    if rows:
        side = ["left", *["right"] * (len(columns) - 1)]
        headings = "".join(f'<th style="text-align:{s}">{escape(c)}</th>' for s, c in zip(side, columns, strict=True))
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:{s}">{escape(c)}</td>' for s, c in zip(side, row, strict=True))
            + "</tr>"
            for row in rows
        )
        parts.append(f'<table style="margin-top:.6em"><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>')
    return "".join([*parts, "</div>"])


def latex_escaped(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(_SPECIAL.get(sign, sign) for sign in text)


def latex_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A `tabular` of the package booktabs; floats have three decimals, None is a dash."""
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in (columns, *rows)]
    head, *body = lines
    start = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"  \toprule", f"  {head}", r"  \midrule"]
    return "\n".join([*start, *(f"  {line}" for line in body), r"  \bottomrule", r"\end{tabular}", ""])


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "--"
    return f"{value:.3f}" if isinstance(value, float) else latex_escaped(str(value))
