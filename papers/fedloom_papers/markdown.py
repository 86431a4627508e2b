"""Write a report page as Markdown."""

from collections.abc import Mapping, Sequence

from fedloom.report.page import Figure, Page, PageCell, PageTable


def markdown(page: Page, images: Mapping[str, Sequence[tuple[Figure, str]]] | None = None) -> str:
    """The text, tables and commands of a page. Links to pages lead to their Markdown files.

    Args:
        page: the page.
        images: each figure of a section and its file, by heading.
    """
    parts = [f"# {escape_markdown(page.title)}", escape_markdown(page.subtitle)]
    parts += [f"> {escape_markdown(page.warning)}"] if page.warning else []
    parts.append(escape_markdown(page.lead))
    for section in page.sections:
        if section.details or (section.figures and not section.tables):
            continue
        parts += [f"## {escape_markdown(section.heading)}", *map(escape_markdown, section.text)]
        for figure, file in (images or {}).get(section.heading, ()):
            parts += [
                f"![{escape_markdown(figure.title)}]({file})",
                *([escape_markdown(figure.caption)] * bool(figure.caption)),
            ]
        for table in section.tables:
            parts += [f"{escape_markdown(table.caption)}.", grid(table)]
        parts += (
            ["\n".join(f"- {escape_markdown(point)}" for point in section.points)]
            if section.points
            else []
        )
        parts += [f"    {section.command}"] if section.command else []
    return "\n\n".join(parts) + "\n"


def grid(table: PageTable) -> str:
    """A table; columns of numbers are aligned to the right."""
    rule = ["---" if number < table.words else "--:" for number in range(len(table.columns))]
    lines: list[Sequence[str]] = [[escape_markdown(text) for text in table.columns], rule]
    lines += [[_cell(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: PageCell) -> str:
    text = escape_markdown(cell.text)
    text = f"[{text}]({cell.href.replace('index.html', 'table.md')})" if cell.href else text
    return f"{text}<br>{escape_markdown(cell.below)}" if cell.below else text


def escape_markdown(text: str) -> str:
    """The text with all Markdown syntax escaped."""
    for mark in "\\`*_|<>[]#$~":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", "<br>")
