"""A result as a card in a notebook, and a table as LaTeX."""

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_STYLE: Final = (
    "border:1px solid rgba(128,128,128,.4);border-left:4px solid "
    "#009e73;border-radius:8px;padding:.6em 1em;"
    "max-width:60em;overflow-x:auto;font-family:system-ui,sans-serif"
)
"""Colors of text and paper are the notebook's own, so that a card is read in light and in dark
mode.
"""
_SPECIAL: Final[Mapping[str, str]] = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{
        "\N{MINUS SIGN}": "$-$",
        "\N{EN DASH}": "--",
        "\N{EM DASH}": "---",
        "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    },
    **{
        "±": r"$\pm$",
        "×": r"$\times$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "≈": r"$\approx$",
        "→": r"$\to$",
    },
    **{
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "°": r"$^\circ$",
        "µ": r"$\mu$",
        "ς": r"$\varsigma$",
        "\N{NO-BREAK SPACE}": "~",
    },
}
"""Characters -> what prints them in LaTeX."""
FIT: Final = 6
"""Columns that probably fit a page."""
_CAPITALS: Final = (
    "GAMMA",
    "DELTA",
    "THETA",
    "LAMDA",
    "XI",
    "PI",
    "SIGMA",
    "UPSILON",
    "PHI",
    "PSI",
    "OMEGA",
)
"""Greek capitals that LaTeX has; the others look like Latin ones."""


def html_card(
    head: str, lines: Sequence[str], columns: Sequence[str] = (), rows: Sequence[Sequence[str]] = ()
) -> str:
    """A card with a heading, lines of text and a table, with words at the left; texts
    are escaped.
    """
    parts = [f'<div style="{_STYLE}"><strong>{escape(head)}</strong>']
    parts += [f'<div style="margin-top:.3em">{escape(line)}</div>' for line in lines]
    if rows:
        words = [
            all(not row[n] or row[n][0].isalpha() for row in rows) for n in range(len(columns))
        ]
        side = ["left" if n == 0 or word else "right" for n, word in enumerate(words)]
        headings = "".join(
            f'<th style="text-align:{s}">{escape(c)}</th>'
            for s, c in zip(side, columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{s}">{escape(c)}</td>'
                for s, c in zip(side, row, strict=True)
            )
            + "</tr>"
            for row in rows
        )
        parts.append(
            "<table "
            f'style="margin-top:.6em"><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>'
        )
    return "".join([*parts, "</div>"])


def latex_escaped(text: str) -> str:
    """The text with LaTeX's special characters escaped, and Greek letters, signs and raised numbers
    in its words. Other
    letters stay: pdfLaTeX prints those of Latin scripts.
    """
    return "".join(_SPECIAL.get(sign) or _in_math(sign) for sign in text)


def _in_math(sign: str) -> str:
    """β is beta, ² is ^{2}, and a letter is itself."""
    kind, _, name = unicodedata.name(sign, "").partition(" LETTER ")
    if kind == "GREEK SMALL" and name.isalpha() and name != "OMICRON":
        return f"$\\{name.lower().replace('lamda', 'lambda')}$"
    if kind == "GREEK CAPITAL" and name in _CAPITALS:
        return f"$\\{name.capitalize().replace('Lamda', 'Lambda')}$"
    how, _, code = unicodedata.decomposition(sign).partition(" ")
    if how in ("<super>", "<sub>") and " " not in code:
        return f"${'^' if how == '<super>' else '_'}{{{chr(int(code, 16))}}}$"
    return sign


def latex_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A `tabular` of the package booktabs, with words at the left and numbers at the right. Floats
    have three decimals, or two digits if they are tiny; None is a dash. A comment says what the
    table needs.
    """
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in (columns, *rows)]
    head, *body = lines
    words = [all(isinstance(row[n], str) for row in rows) for n in range(len(columns))]
    side = "".join("l" if n == 0 or word else "r" for n, word in enumerate(words))
    foreign = "".join(dict.fromkeys(sign for sign in "".join(lines) if sign > "\u017f"))
    needs = r"% needs \usepackage{booktabs}" + (
        f", and XeLaTeX with a font that has {foreign}" if foreign else ""
    )
    needs += (
        ""
        if len(columns) <= FIT
        else "; if it is too wide, \\resizebox{\\textwidth}{!}{...} of graphicx narrows it"
    )
    start = [needs, rf"\begin{{tabular}}{{{side}}}", r"  \toprule", f"  {head}", r"  \midrule"]
    return "\n".join(
        [*start, *(f"  {line}" for line in body), r"  \bottomrule", r"\end{tabular}", ""]
    )


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "--"
    if isinstance(value, str):
        return latex_escaped(value)
    if isinstance(value, float) and 0 < abs(value) < 0.0005:
        digits, power = f"{value:.1e}".split("e")
        return rf"${digits}\times10^{{{int(power)}}}$"
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f"${text}$" if text[0] == "-" else text
