"""The elements of a report page, and its rendering as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a sample of the line, and its meaning."""

    sample: Markup
    text: str


@dataclass(frozen=True)
class Figure:
    """A picture with its title, legend and caption; a wide one takes the whole width."""

    title: str
    svg: Markup
    legend: tuple[Key, ...] = ()
    caption: str = ""
    wide: bool = False


@dataclass(frozen=True)
class PageCell:
    """A cell of a table.

    Attributes:
        title: a tooltip, such as the exact number of bytes.
        href: where it leads.
        share: of a bar behind the number, in [0, 1].
        key: a sample of its line in figures.
        below: a second, smaller line.
        strong: whether it is set in bold.
    """

    text: str
    title: str = ""
    href: str = ""
    share: float | None = None
    key: Markup | None = None
    below: str = ""
    strong: bool = False


@dataclass(frozen=True)
class PageTable:
    """Rows under headings: the first `words` columns hold words, the others numbers. In `prose` words are sentences."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    words: int = 1
    prose: bool = False


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    note: str = ""
    title: str = ""


@dataclass(frozen=True)
class Details:
    """A text or a table, shown on demand."""

    summary: str
    text: str = ""
    table: PageTable | None = None


@dataclass(frozen=True)
class PageSection:
    """A part of the page under a heading; a `legend` is that of all its figures."""

    heading: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    legend: Sequence[Key] = ()
    tables: Sequence[PageTable] = ()
    points: Sequence[str] = ()
    command: str = ""
    details: Sequence[Details] = ()
    small: bool = False


@dataclass(frozen=True)
class Page:
    """A whole report.

    Attributes:
        lead: the result in one or two sentences.
        warning: what a reader must know first.
    """

    title: str
    subtitle: str
    lead: str
    sections: Sequence[PageSection]
    tiles: Sequence[Tile] = ()
    warning: str = ""
    footer: str = ""


def cells(*values: str | PageCell) -> list[PageCell]:
    """A row of a table."""
    return [value if isinstance(value, PageCell) else PageCell(value) for value in values]


def render(page: Page) -> str:
    """The page as HTML. All text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedloom.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(page=page) + "\n"
