"""The elements of a report page, and its rendering as an HTML file."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup

from fedloom._version import __version__


@dataclass(frozen=True)
class Key:
    """A legend entry: a sample of the line and its label."""

    sample: Markup
    text: str


@dataclass(frozen=True)
class Figure:
    """A figure with title, legend and caption; if `wide`, over the whole width of the page."""

    title: str
    svg: Markup
    legend: tuple[Key, ...] = ()
    caption: str = ""
    wide: bool = False


@dataclass(frozen=True)
class PageCell:
    """A cell of a table.

    Attributes:
        title: tooltip, such as the exact number of bytes.
        href: link target.
        share: length of a bar behind the number, in [0, 1].
        key: sample of the series' line in figures.
        below: second, smaller line of text.
        strong: whether the text is bold.
        best: whether it is marked as the best of its column.
    """

    text: str
    title: str = ""
    href: str = ""
    share: float | None = None
    key: Markup | None = None
    below: str = ""
    strong: bool = False
    best: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table. The first `words` columns hold text, sentences if `prose`, and the
    others numbers.
    """

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
    """A collapsible text or table."""

    summary: str
    text: str = ""
    table: PageTable | None = None


@dataclass(frozen=True)
class PageSection:
    """A section of the page; `legend` is shared by all its figures."""

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
    """A report.

    Attributes:
        lead: the result in one or two sentences.
        verdict: the best method and its lead, for a comparison.
        decided: whether the verdict is larger than chance.
        warning: a warning above all results.
    """

    title: str
    subtitle: str
    lead: str
    sections: Sequence[PageSection]
    tiles: Sequence[Tile] = ()
    verdict: str = ""
    decided: bool = False
    warning: str = ""
    footer: str = ""


def cells(*values: str | PageCell) -> list[PageCell]:
    """A row of a table."""
    return [value if isinstance(value, PageCell) else PageCell(value) for value in values]


def render(page: Page) -> str:
    """The page as HTML. All text is escaped, and the page's policy allows its own script only."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    script = (files("fedloom.report") / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    loader = PackageLoader("fedloom.report", ".")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html").render(
        page=page, script=Markup(script), script_hash=f"sha256-{digest}", version=__version__
    )
    return text + "\n"
