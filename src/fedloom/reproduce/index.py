"""The outcome of each reproduction as a file, and one page over all, with the claims of each paper."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from fedloom._version import __version__
from fedloom.core.errors import DataError
from fedloom.experiment.checkpoint import write_atomically
from fedloom.report import formatting as fmt
from fedloom.report.page import Page, PageCell, PageSection, PageTable, Tile, cells, render
from fedloom.reproduce import table
from fedloom.reproduce.claims import RULE, VERDICTS, ClaimResult
from fedloom.reproduce.selection import EVERYTHING, Selection
from fedloom.reproduce.spec import SYSTEMS, Scale, System, shipped

FILE = "outcome.json"
PAGE, TABLE, JSON = "index.html", "claims.md", "claims.json"


@dataclass(frozen=True)
class Outcome:
    """What a table or figure came to.

    Attributes:
        cells: how many have `all` their runs, `some` or `none` of them, or are `untestable`.
        runs: how many are finished.
        seconds: of all runs, wall time; some may serve other tables too.
        versions: of fedloom, that made the runs.
        asked: what was asked for beyond the file.
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


def dumped(value: Outcome | Sequence[Mapping[str, Any]]) -> bytes:
    """An outcome, or what was made of several, as JSON that every reader takes: without NaN and infinity."""
    plain = asdict(value) if isinstance(value, Outcome) else value
    return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_outcome(path: Path) -> Outcome:
    """An outcome from its file.

    Raises:
        DataError: it can't be read.
    """
    try:
        found = _OUTCOME.validate_json(path.read_bytes())
        dumped(found)  # with what JSON has no word for, such as 1e999, the page over all could not be written
    except (OSError, ValueError):
        raise DataError(f"{path.parent.name}/{path.name} can't be read: repeat its fedloom reproduce") from None
    return found


def read_outcomes(folder: Path) -> tuple[list[Outcome], list[str]]:
    """All outcomes in a folder's folders, in the order of the papers; and what can't be read."""
    found, problems = list[Outcome](), list[str]()
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            found.append(read_outcome(path))
        except DataError as error:
            problems.append(str(error))
    order = {name: number for number, name in enumerate(shipped())}
    papers = [*SYSTEMS]
    return sorted(
        found, key=lambda one: (papers.index(one.system), order.get(one.name, len(order)), one.name)
    ), problems


def repeated(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, ClaimResult, str]]:
    """Every claim, and where the same runs were compared in the same way before; empty at the first time."""
    seen: dict[str, str] = {}
    for one in outcomes:
        for claim in one.claims:
            yield one, claim, seen.get(claim.evidence, "") if claim.evidence else ""
            seen.setdefault(claim.evidence, one.place)


_OUTCOME = TypeAdapter(Outcome)


COUNTS = ("Paper", "Tables and figures", *(fmt.capital(verdict) for verdict in VERDICTS), "Time")
Line = tuple[Outcome, ClaimResult, str]
"""A claim of an outcome, and where it was counted before."""
ONCE = "Claims that the same runs decide in the same way are counted once."
CLAIMS = ("Claim", "Where", "Verdict", table.DIFFERENCE, "Seeds")


def write_index(target: Path) -> Path:
    """Write `index.html`, `claims.md` and `claims.json` of all outcomes in the folder's folders; returns the page."""
    outcomes, problems = read_outcomes(target)
    lines = list(repeated(outcomes))
    notes = [*problems, *_notes(outcomes)]
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / PAGE, render(_page(outcomes, lines, notes)).encode())
    write_atomically(target / TABLE, _markdown(outcomes, lines, notes).encode())
    write_atomically(target / JSON, dumped([_plain(one, lines) for one in outcomes]))
    return target / PAGE


def _plain(outcome: Outcome, lines: Sequence[Line]) -> dict[str, Any]:
    """An outcome whose claims say where their runs were counted before, if they were."""
    claims = [{**asdict(claim), "same_runs_as": before or None} for one, claim, before in lines if one is outcome]
    return {**asdict(outcome), "claims": claims}


def _notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What a reader must know before the counts."""
    changes = {change: None for one in outcomes for change in one.asked.moved}
    parts = {pattern: None for one in outcomes for pattern in one.asked.only}
    yield from Selection((*changes,), (*parts,)).warnings(0)
    for one in outcomes:
        if {*one.versions} - {__version__}:
            yield f"The runs of {one.name} are of fedloom {fmt.together(one.versions)}."


def _papers(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each paper, in the order of the papers."""
    each = {system: [one for one in outcomes if one.system == system] for system in SYSTEMS}
    return {system: own for system, own in each.items() if own}


def _counts(outcomes: Sequence[Outcome], lines: Sequence[Line]) -> list[list[str]]:
    """A line for each paper under `COUNTS`, and one for all."""
    papers = _papers(outcomes)
    groups = [(SYSTEMS[system], {system}, own) for system, own in papers.items()]
    groups += [("all", {*papers}, list(outcomes))] if len(papers) > 1 else []
    return [[name, str(len(own)), *map(str, _verdicts(lines, systems)), _time(own)] for name, systems, own in groups]


def _verdicts(lines: Sequence[Line], systems: Collection[str]) -> list[int]:
    """How many claims of papers have each verdict; those that are decided by the same runs count once."""
    counted = [claim for one, claim, before in lines if not before and one.system in systems]
    return [sum(claim.verdict == verdict for claim in counted) for verdict in VERDICTS]


def _time(outcomes: Sequence[Outcome]) -> str:
    return fmt.duration(sum(one.seconds for one in outcomes))


def _same(before: str) -> str:
    return f"same runs as {before}" if before else ""


def _verdict(claim: ClaimResult, before: str) -> str:
    return f"{claim.verdict} ({_same(before)})" if before else claim.verdict


def _scale(outcomes: Sequence[Outcome]) -> str:
    return fmt.together(sorted({one.scale for one in outcomes}))


def _page(outcomes: Sequence[Outcome], lines: Sequence[Line], notes: Sequence[str]) -> Page:
    counts = PageTable(
        "Claims by verdict, and the wall time of the runs", COUNTS, [cells(*line) for line in _counts(outcomes, lines)]
    )
    sections = [PageSection("Papers", text=[RULE, ONCE], tables=[counts])]
    for system, own in _papers(outcomes).items():
        rows = [
            cells(
                claim.text,
                PageCell(one.place, title=one.title, href=f"{quote(one.name)}/{PAGE}"),
                PageCell(claim.verdict, below=_same(before), strong=claim.verdict == "held" and not before),
                claim.found,
                str(len(claim.seeds) or fmt.NONE),
            )
            for one, claim, before in lines
            if one.system == system
        ]
        tables = [PageTable("What the paper claims of each table and figure", CLAIMS, rows, words=4, prose=True)]
        bare = [one for one in own if not one.claims]
        points = [f"{one.place}, {one.title}: no claim." for one in bare]
        sections.append(PageSection(SYSTEMS[system], tables=tables if rows else [], points=points))
    verdicts = _verdicts(lines, SYSTEMS)
    tiles = [
        Tile(fmt.capital(verdict), f"{count} of {sum(verdicts)}", "claims")
        for verdict, count in zip(VERDICTS, verdicts, strict=True)
    ]
    number = fmt.times(len(outcomes), "table or figure", "tables and figures")
    return Page(
        title="Tables and figures, reproduced",
        subtitle=f"{fmt.capital(_scale(outcomes))} scale · {number}",
        lead="What papers claim of their numbers, and whether it is seen in ours.",
        warning=" ".join(notes),
        tiles=tiles,
        sections=sections,
        footer=f"Made by fedloom {__version__}. {TABLE} has the same for Markdown, {JSON} all numbers.",
    )


def _markdown(outcomes: Sequence[Outcome], lines: Sequence[Line], notes: Sequence[str]) -> str:
    parts = [f"# Claims at the {_scale(outcomes)} scale", *(f"**{table.plain(note)}**" for note in notes)]
    parts += [RULE, ONCE, table.grid(COUNTS, _counts(outcomes, lines))]
    for system, own in _papers(outcomes).items():
        rows = [
            [claim.text, one.place, _verdict(claim, before), claim.found, str(len(claim.seeds) or fmt.NONE)]
            for one, claim, before in lines
            if one.system == system
        ]
        links = {one.place: f"{quote(one.name)}/{table.FILE}" for one in own}
        parts += [f"## {table.plain(SYSTEMS[system])}", *([table.grid(CLAIMS, rows, links=links)] if rows else [])]
    return "\n\n".join(parts) + "\n"
