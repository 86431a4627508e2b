"""The outcome of each reproduction as a file, a page for each paper's questions, and an overview of
a few.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from fedloom._version import __version__
from fedloom.report import formatting as fmt
from fedloom.report.page import Figure, Page, PageCell, PageSection, PageTable, cells, render
from fedloom.support.paths import write_atomically
from fedloom_papers.claims import ClaimResult
from fedloom_papers.forest import can_be_drawn, file_of, forest
from fedloom_papers.markdown import markdown
from fedloom_papers.multiverse import Map, counted, draw
from fedloom_papers.ran import NOTHING, Ran, sentence, together
from fedloom_papers.selection import EVERYTHING, Selection
from fedloom_papers.shipped import SYSTEMS, shipped
from fedloom_papers.spec import Scale, System
from fedloom_papers.units import Unit
from fedloom_papers.verdicts import RULE, RULES, UNTESTED

FILE = "outcome.json"
PAGE, MARKDOWN = "index.html", "table.md"
MARKDOWN_OF_ALL, JSON = "claims.md", "claims.json"
OVERVIEW = "overview.svg"
SYSTEM_NAMES = {"fedal": "FedAL", "afind": "AFIND+", "evfl": "Proto-EVFL", "augfl": "AugFL"}
ONCE = (
    "A question is one comparison of methods; its settings are its rows, and rows that the same "
    "runs decide say so. Beside a verdict stand what owners reach alone, what the table's oracle "
    "reaches, and the method's own diagnoses."
)
FACTS = "Facts, bytes and formulas"
MAP = "Where the headline claim holds"
HOW = PageSection("How to read a verdict", text=[RULE], points=RULES)
INTERVAL = f"Difference (95{fmt.NBSP}% interval)"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a table or figure.

    Attributes:
        cells: number of cells with `all`, `some` or `none` of their runs, and of `untestable` ones.
        runs: number of finished runs.
        seconds: wall time of all runs; some may serve other tables too.
        versions: versions of fedloom that made the runs.
        asked: the selection on the command line.
        maps: where the headline claim holds.
        ran: data, networks, clients and steps of the runs.
    """

    name: str
    title: str
    place: str
    system: System
    scale: Scale
    claims: tuple[ClaimResult, ...]
    cells: Mapping[str, int]
    runs: int
    seconds: float
    versions: tuple[str, ...] = ()
    asked: Selection = EVERYTHING
    maps: tuple[Map, ...] = ()
    ran: Ran = NOTHING


Line = tuple[Outcome, ClaimResult, str]
"""A claim of an outcome, and the place where the same runs decided it before."""
_OUTCOME = TypeAdapter(Outcome)


def dumped(value: Outcome | Sequence[Mapping[str, Any]]) -> bytes:
    """Outcomes as strict JSON, without NaN and infinity."""
    plain = asdict(value) if isinstance(value, Outcome) else value
    return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_outcomes(folder: Path) -> tuple[list[Outcome], list[str]]:
    """All outcomes in subfolders, in the order of the papers; and the problems of
    unreadable files.
    """
    found, problems = list[Outcome](), list[str]()
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            outcome = _OUTCOME.validate_json(path.read_bytes())
            dumped(outcome)  # a number such as 1e999 cannot be written again
            found.append(outcome)
        except (OSError, ValueError):
            problems.append(
                f"{path.parent.name}/{path.name} is damaged. Repeat its fedloom reproduce."
            )
    order = {name: number for number, name in enumerate(shipped())}
    papers = [*SYSTEMS]
    found.sort(
        key=lambda one: (papers.index(one.system), order.get(one.name, len(order)), one.name)
    )
    return found, problems


def repeated(outcomes: Sequence[Outcome]) -> Iterator[Line]:
    """Every claim, with the place where the same runs were compared in the same way
    before, if any.
    """
    seen: dict[str, str] = {}
    for one in outcomes:
        for claim in one.claims:
            yield one, claim, seen.get(claim.evidence, "") if claim.evidence else ""
            seen.setdefault(claim.evidence, one.place)


def write_index(target: Path) -> Path:
    """Write the overview, `claims.md`, `claims.json`, a page for each paper in a folder of its own,
    and the figures of all outcomes in subfolders; returns the overview.
    """
    outcomes, problems = read_outcomes(target)
    lines = list(repeated(outcomes))
    notes = [*problems, *_notes(outcomes)]
    target.mkdir(parents=True, exist_ok=True)
    _write(target, _overview(outcomes, lines, notes), MARKDOWN_OF_ALL, {"": OVERVIEW})
    for system, own in _papers(outcomes).items():
        (target / system).mkdir(exist_ok=True)
        files = {"": f"../{system}.svg", MAP: f"../{system}-map.svg"}
        _write(target / system, _paper(system, own, lines, notes), MARKDOWN, files)
    write_atomically(target / JSON, dumped([_plain(one, lines) for one in outcomes]))
    return target / PAGE


def _write(folder: Path, page: Page, text: str, files: Mapping[str, str]) -> None:
    """A page as HTML, as Markdown in the file `text`, and its figures by title; "" for any other
    title.
    """
    images: dict[str, list[tuple[Figure, str]]] = {}
    for section in page.sections:
        for figure in section.figures:
            file = files.get(figure.title, files[""])
            write_atomically(folder / file, file_of(figure).encode())
            images.setdefault(section.heading, []).append((figure, file))
    write_atomically(folder / PAGE, render(page).encode())
    write_atomically(folder / text, markdown(page, images).encode())


def _plain(outcome: Outcome, lines: Sequence[Line]) -> dict[str, Any]:
    """An outcome whose claims name the place where the same runs decided them before."""
    claims = [
        {**asdict(claim), "same_runs_as": before or None}
        for one, claim, before in lines
        if one is outcome
    ]
    return {**asdict(outcome), "claims": claims}


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Warnings above the counts."""
    changes = {change: None for one in outcomes for change in one.asked.moved}
    parts = {pattern: None for one in outcomes for pattern in one.asked.only}
    yield from Selection((*changes,), (*parts,)).warnings(0)
    older: dict[tuple[str, ...], list[str]] = {}
    for one in outcomes:
        if {*one.versions} - {__version__}:
            older.setdefault(one.versions, []).append(one.name)
    for versions, names in older.items():
        which = fmt.together(names) if len(names) <= 3 else f"{len(names)} tables and figures"
        yield f"The runs of {which} used fedloom {fmt.together(versions)}."


def _papers(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each paper that has any."""
    papers = {system: [one for one in outcomes if one.system == system] for system in SYSTEMS}
    return {system: own for system, own in papers.items() if own}


def _overview(outcomes: Sequence[Outcome], lines: Sequence[Line], notes: Sequence[str]) -> Page:
    """The questions that a reader asks first, each with its bed."""
    chosen = [(one, claim) for one, claim, _ in lines if claim.headline]
    rows = [
        cells(
            PageCell(claim.text, below=f"{SYSTEM_NAMES[one.system]}: {claim.compared}"),
            PageCell(one.place, title=one.title, href=f"{quote(one.name)}/{PAGE}"),
            claim.bed or fmt.NONE,
            verdict_cell(claim),
            claim.found,
            _elsewhere(one.system, claim, lines),
            claim.beside or fmt.NONE,
        )
        for one, claim in chosen
    ]
    columns = ("Question", "Place", "Bed", "Verdict", INTERVAL, "In all settings", "Beside it")
    table = PageTable("Questions that a reader asks first", columns, rows, words=7, prose=True)
    drawn = [(claim, SYSTEM_NAMES[one.system]) for one, claim in chosen if can_be_drawn(claim)]
    figures = (
        [Figure("A few questions", *forest("overview", drawn), CAPTION, wide=True)] if drawn else []
    )
    papers = _papers(outcomes)
    every = [
        cells(
            PageCell(SYSTEMS[system], href=f"{system}/{PAGE}"),
            _ran(own),
            str(len({claim.question for one in own for claim in one.claims if not claim.fact})),
            fmt.duration(sum(one.seconds for one in own)),
        )
        for system, own in papers.items()
    ]
    heads = ("Paper", "What was run", "Questions", "Time")
    whole = PageTable("Each paper's page has all its questions", heads, every, words=2, prose=True)
    scale = fmt.together(sorted({one.scale for one in outcomes}))
    number = fmt.times(len(outcomes), "table or figure", "tables and figures")
    return Page(
        title="Reproduced tables and figures",
        subtitle=f"{fmt.capital(scale)} scale · {number}",
        lead="What runs of published tables showed on the data that were at hand, and what could "
        "not be tested there.",
        warning=" ".join(notes),
        sections=[
            PageSection("Papers", tables=[whole]),
            PageSection(
                "Questions",
                text=[ELSEWHERE] if rows else [],
                figures=figures,
                tables=[table] if rows else [],
            ),
            HOW,
        ],
        footer=f"Made by fedloom {__version__}. {MARKDOWN_OF_ALL} has the page as Markdown, {JSON} "
        "all numbers.",
    )


CAPTION = (
    "Line: our 95 % interval. Marker: our mean. Hollow diamond: the paper's effect, where the "
    "data are the paper's. An interval beyond 40 points is cut there, and ends in an arrow."
)
ELSEWHERE = (
    "The last but one column has the smallest and the largest mean of all settings of the question."
)


def _elsewhere(system: str, claim: ClaimResult, lines: Sequence[Line]) -> str:
    """`−1.5 to +0.6, 14 settings`: the means of all settings of a question, in points of an
    accuracy.
    """
    means = [
        other.mean
        for one, other, before in lines
        if not before
        and (one.system, other.question) == (system, claim.question)
        and can_be_drawn(other)
    ]
    known = [mean for mean in means if mean is not None]
    if len(known) < 2:
        return fmt.NONE
    low, high = (Unit(claim.unit).difference(value) for value in (min(known), max(known)))
    return f"{low} to {high}, {len(known)} settings"


def _paper(
    system: str, own: Sequence[Outcome], lines: Sequence[Line], notes: Sequence[str]
) -> Page:
    """The questions of a paper, each with its settings as rows, and apart the facts."""
    mine = [line for line in lines if line[0].system == system]
    asked: dict[str, list[Line]] = {}
    for line in mine:
        if not line[1].fact:
            asked.setdefault(line[1].question, []).append(line)
    rows = [
        _row(line, question if not number else "")
        for question, settings in asked.items()
        for number, line in enumerate(settings)
    ]
    columns = ("Question", "Setting", "Place", "Verdict", INTERVAL, "Beside it", "Seeds")
    table = PageTable("Each question once, with its settings", columns, rows, words=6, prose=True)
    facts = [_row(line, line[1].question) for line in mine if line[1].fact]
    apart = PageTable(
        "What messages and data are, whatever a method learns", columns, facts, words=6, prose=True
    )
    drawn = [
        (c, one.place) for one, c, before in mine if not c.fact and not before and can_be_drawn(c)
    ]
    figures = [Figure("Our intervals", *forest(system, drawn), CAPTION, wide=True)] if drawn else []
    sections = [
        PageSection("Questions", text=[ONCE], figures=figures, tables=[table] if rows else [])
    ]
    sections += [PageSection(FACTS, tables=[apart])] if facts else []
    shown = [each for one in own for each in one.maps]
    if shown:
        caption = "Difference in percentage points, mean over seeds, by reading and data."
        figure = Figure(MAP, *draw(f"{system}-map", shown), caption, wide=True)
        sections.append(
            PageSection(MAP, text=[counted(shown)], figures=[figure], tables=[_legend(shown)])
        )
    points = [
        PageCell(f"{one.place}, {one.title}", href=f"../{quote(one.name)}/{PAGE}") for one in own
    ]
    every = PageTable(
        "All tables and figures",
        ("Place and title", "What was run"),
        [cells(point, sentence(one.ran)) for point, one in zip(points, own, strict=True)],
        words=2,
        prose=True,
    )
    sections += [PageSection("Tables and figures", tables=[every]), HOW]
    return Page(
        title=SYSTEMS[system],
        subtitle=f"{fmt.capital(own[0].scale)} scale · {fmt.times(len(asked), 'question')}",
        lead=_ran(own),
        warning=" ".join(notes),
        sections=sections,
        footer=f"Made by fedloom {__version__}. {MARKDOWN} has the page as Markdown.",
    )


def _ran(own: Sequence[Outcome]) -> str:
    """What was run of a paper, but for tables of facts alone, whose runs are short."""
    learned = [
        one.ran for one in own if not one.claims or not all(claim.fact for claim in one.claims)
    ]
    return sentence(together(learned))


def _legend(shown: Sequence[Map]) -> PageTable:
    """The maps by name, with their numbers of readings and data."""
    rows = [cells(one.title, str(len(one.rows)), str(len(one.columns))) for one in shown]
    return PageTable("The maps", ("Map", "Readings", "Data"), rows, prose=True)


def _row(line: Line, question: str) -> list[PageCell]:
    """A setting of a question."""
    one, claim, before = line
    return cells(
        PageCell(question, strong=True),
        PageCell(claim.compared, below=claim.data),
        PageCell(one.place, title=one.title, href=f"../{quote(one.name)}/{PAGE}"),
        verdict_cell(claim, before),
        claim.found,
        claim.beside or fmt.NONE,
        seeds_cell(claim),
    )


def verdict_cell(claim: ClaimResult, before: str = "") -> PageCell:
    """The verdict with its bed or the failed gate, and the place where the same runs decided it
    `before`.
    """
    strong = claim.verdict != UNTESTED and not before
    return PageCell(claim.said, below=f"same runs as {before}" if before else "", strong=strong)


def seeds_cell(claim: ClaimResult) -> str:
    """`5`, or `5 of 7` if later seeds wait for the next look."""
    if not claim.seeds:
        return fmt.NONE
    return (
        f"{claim.counted} of {len(claim.seeds)}"
        if 0 < claim.counted < len(claim.seeds)
        else str(len(claim.seeds))
    )
