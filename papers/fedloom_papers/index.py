"""The outcome of each reproduction as a file, and one page with the claims of all papers."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from fedloom._version import __version__
from fedloom.core.paths import write_atomically
from fedloom.report import formatting as fmt
from fedloom.report.markdown import markdown
from fedloom.report.page import Figure, Page, PageCell, PageSection, PageTable, Tile, cells, render
from fedloom_papers.claims import ClaimResult
from fedloom_papers.forest import can_be_drawn, file_of, forest, overview
from fedloom_papers.multiverse import Map, counted, draw
from fedloom_papers.selection import EVERYTHING, Selection
from fedloom_papers.shipped import SYSTEMS, shipped
from fedloom_papers.spec import Scale, System
from fedloom_papers.verdicts import RULE, RULES, VERDICTS

FILE = "outcome.json"
PAGE, MARKDOWN = "index.html", "table.md"
CLAIMS, JSON = "claims.md", "claims.json"
OVERVIEW = "overview.svg"
SYSTEM_NAMES = {"fedal": "FedAL", "afind": "AFIND+", "evfl": "Proto-EVFL", "augfl": "AugFL"}
ONCE = "Claims that the same runs decide in the same way are counted once."
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


Line = tuple[Outcome, ClaimResult, str]
"""A claim of an outcome, and the place where the same runs decided it before."""
_OUTCOME = TypeAdapter(Outcome)


def dumped(value: Outcome | Sequence[Mapping[str, Any]]) -> bytes:
    """Outcomes as strict JSON, without NaN and infinity."""
    plain = asdict(value) if isinstance(value, Outcome) else value
    return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_outcomes(folder: Path) -> tuple[list[Outcome], list[str]]:
    """All outcomes in subfolders, in the order of the papers; and the problems of unreadable files."""
    found, problems = list[Outcome](), list[str]()
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            outcome = _OUTCOME.validate_json(path.read_bytes())
            dumped(outcome)  # a number such as 1e999 cannot be written again
            found.append(outcome)
        except (OSError, ValueError):
            problems.append(f"{path.parent.name}/{path.name} is damaged. Repeat its fedloom reproduce.")
    order = {name: number for number, name in enumerate(shipped())}
    papers = [*SYSTEMS]
    found.sort(key=lambda one: (papers.index(one.system), order.get(one.name, len(order)), one.name))
    return found, problems


def repeated(outcomes: Sequence[Outcome]) -> Iterator[Line]:
    """Every claim, with the place where the same runs were compared in the same way before, if any."""
    seen: dict[str, str] = {}
    for one in outcomes:
        for claim in one.claims:
            yield one, claim, seen.get(claim.evidence, "") if claim.evidence else ""
            seen.setdefault(claim.evidence, one.place)


def write_index(target: Path) -> Path:
    """Write the page, `claims.md`, `claims.json` and the figures of all outcomes in subfolders; returns the page."""
    outcomes, problems = read_outcomes(target)
    lines = list(repeated(outcomes))
    page = _page(outcomes, lines, [*problems, *_notes(outcomes)])
    target.mkdir(parents=True, exist_ok=True)
    images: dict[str, list[tuple[Figure, str]]] = {}
    for number, section in enumerate(page.sections):
        for figure in section.figures:
            paper = [*_papers(outcomes)][number - 1]
            file = f"{paper}-map.svg" if figure.title == MAP else f"{paper}.svg" if number else OVERVIEW
            write_atomically(target / file, file_of(figure).encode())
            images.setdefault(section.heading, []).append((figure, file))
    write_atomically(target / PAGE, render(page).encode())
    write_atomically(target / CLAIMS, markdown(page, images).encode())
    write_atomically(target / JSON, dumped([_plain(one, lines) for one in outcomes]))
    return target / PAGE


def _plain(outcome: Outcome, lines: Sequence[Line]) -> dict[str, Any]:
    """An outcome whose claims name the place where the same runs decided them before."""
    claims = [{**asdict(claim), "same_runs_as": before or None} for one, claim, before in lines if one is outcome]
    return {**asdict(outcome), "claims": claims}


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Warnings above the counts."""
    changes = {change: None for one in outcomes for change in one.asked.moved}
    parts = {pattern: None for one in outcomes for pattern in one.asked.only}
    yield from Selection((*changes,), (*parts,)).warnings(0)
    for one in outcomes:
        if {*one.versions} - {__version__}:
            yield f"The runs of {one.name} used fedloom {fmt.together(one.versions)}."


def _papers(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each paper that has any."""
    papers = {system: [one for one in outcomes if one.system == system] for system in SYSTEMS}
    return {system: own for system, own in papers.items() if own}


def _page(outcomes: Sequence[Outcome], lines: Sequence[Line], notes: Sequence[str]) -> Page:
    papers = _papers(outcomes)
    groups = [(SYSTEMS[system], {system}, own) for system, own in papers.items()]
    groups += [("all", {*papers}, [*outcomes])] if len(papers) > 1 else []
    rows = [
        cells(
            name,
            str(len(own)),
            *map(str, _verdicts(lines, systems)),
            fmt.duration(sum(one.seconds for one in own)),
        )
        for name, systems, own in groups
    ]
    heads = ("Paper", "Tables and figures", *(fmt.capital(verdict) for verdict in VERDICTS), "Time")
    caption = "Claims by verdict, and the wall time of the runs; those that several tables share count in each"
    counts = PageTable(caption, heads, rows, prose=True)
    each = {name: dict(zip(VERDICTS, _verdicts(lines, [name]), strict=True)) for name in papers}
    svg = overview("overview", {SYSTEM_NAMES[name]: numbers for name, numbers in each.items()})
    figures = [Figure("Claims by verdict", svg, wide=True)] if outcomes else []
    sections = [PageSection("Papers", text=[ONCE], figures=figures, tables=[counts])]
    sections += [_paper(system, own, lines) for system, own in papers.items()]
    sections.append(HOW)
    verdicts = _verdicts(lines, SYSTEMS)
    informative = sum(verdicts[:3])
    found = [f"{count} {verdict}" for verdict, count in zip(VERDICTS[:3], verdicts, strict=False) if count]
    scale = fmt.together(sorted({one.scale for one in outcomes}))
    number = fmt.times(len(outcomes), "table or figure", "tables and figures")
    return Page(
        title="Reproduced tables and figures",
        subtitle=f"{fmt.capital(scale)} scale · {number}",
        lead=f"The claims of papers about their results, tested on our runs: {informative} of {sum(verdicts)} have an "
        f"informative verdict{': ' if found else ''}{fmt.together(found)}.",
        warning=" ".join(notes),
        tiles=[
            Tile(fmt.capital(verdict), f"{count} of {sum(verdicts)}", "claims")
            for verdict, count in zip(VERDICTS, verdicts, strict=True)
        ],
        sections=sections,
        footer=f"Made by fedloom {__version__}. {CLAIMS} has the page as Markdown, {JSON} all numbers.",
    )


def _paper(system: str, own: Sequence[Outcome], lines: Sequence[Line]) -> PageSection:
    """The claims of a paper."""
    rows = []
    for one, claim, before in lines:
        if one.system == system:
            place = PageCell(one.place, title=one.title, href=f"{quote(one.name)}/{PAGE}")
            rows.append(
                cells(
                    PageCell(claim.text, below=_below(claim)),
                    place,
                    verdict_cell(claim, before),
                    claim.found,
                    seeds_cell(claim),
                )
            )
    columns = ("Claim", "Place", "Verdict", INTERVAL, "Seeds")
    table = PageTable("The paper's claims about each table and figure", columns, rows, words=4, prose=True)
    points = [f"{one.place}, {one.title}: no claim." for one in own if not one.claims]
    drawn = [(c, one.place) for one, c, before in lines if one.system == system and not before and can_be_drawn(c)]
    figures = []
    if drawn:
        caption = (
            "Line: our interval. Marker: our mean. Hollow diamond: the paper's effect. The axis ends at 40 points."
        )
        figures.append(Figure("Our intervals and the paper's effects", *forest(system, drawn), caption, wide=True))
    shown = [each for one in own for each in one.maps]
    text = []
    if shown:
        text = [f"{MAP}: {counted(shown)}"]
        caption = "Difference in percentage points, mean over seeds, by reading and data."
        figures.append(Figure(MAP, *draw(f"{system}-map", shown), caption, wide=True))
    return PageSection(SYSTEMS[system], text=text, figures=figures, tables=[table] if rows else [], points=points)


def _below(claim: ClaimResult) -> str:
    """`Fashion-MNIST; without Credit #200: at chance`."""
    without = f"without {fmt.together(claim.at_chance)}: at chance" if claim.at_chance else ""
    return "; ".join(text for text in (claim.data, without) if text)


def verdict_cell(claim: ClaimResult, before: str = "") -> PageCell:
    """The verdict with the failed gate, and the place where the same runs decided it `before`."""
    text = f"{claim.verdict} ({claim.gate})" if claim.gate else claim.verdict
    strong = claim.verdict in ("reproduced", "refuted") and not before
    return PageCell(text, below=f"same runs as {before}" if before else "", strong=strong)


def seeds_cell(claim: ClaimResult) -> str:
    """`5`, or `5 of 7` if later seeds wait for the next look."""
    if not claim.seeds:
        return fmt.NONE
    return f"{claim.counted} of {len(claim.seeds)}" if 0 < claim.counted < len(claim.seeds) else str(len(claim.seeds))


def _verdicts(lines: Sequence[Line], systems: Collection[str]) -> list[int]:
    """The number of claims of papers with each verdict; claims decided by the same runs count once."""
    counted = [claim for one, claim, before in lines if not before and one.system in systems]
    return [sum(claim.verdict == verdict for claim in counted) for verdict in VERDICTS]
