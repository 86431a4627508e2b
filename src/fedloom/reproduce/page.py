"""The page of a reproduction: our numbers beside the paper's, what is claimed of them, and how they were made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from fedloom._version import __version__
from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.config import RunConfig
from fedloom.experiment.record import write_csv
from fedloom.report import formatting as fmt
from fedloom.report.page import Details, Page, PageCell, PageSection, PageTable, Tile, cells, render
from fedloom.reproduce import table
from fedloom.reproduce.claims import RULE, VERDICTS, ClaimResult, check_claim
from fedloom.reproduce.figures import PlotSection, pictures, row_look
from fedloom.reproduce.index import FILE, Outcome, dumped
from fedloom.reproduce.provenance import facts, warnings
from fedloom.reproduce.results import TableResults, gather, missing, seeds, untestable
from fedloom.reproduce.selection import EVERYTHING, Selection
from fedloom.reproduce.spec import SYSTEMS, Reproduction, Scale
from fedloom.reproduce.spec import Cell as CellResults

PAGE, NUMBERS = "index.html", "table.csv"
"""The files of a reproduction's folder; each picture has a CSV beside them."""


def write(
    reproduction: Reproduction,
    scale: Scale,
    cells: Iterable[CellResults],
    folder_of: Callable[[RunConfig], Path],
    target: Path,
    problems: Mapping[Path, str] | None = None,
    asked: Selection = EVERYTHING,
) -> Outcome:
    """Write `index.html`, `table.md`, `table.csv`, a CSV for each picture and `outcome.json`.

    Args:
        cells: the places of the table that were asked for.
        folder_of: where a run is; if it is not there, or not finished, the page says so.
        target: the folder to write into, called like the reproduction.
        problems: by a run's folder, why it failed.
        asked: what was asked for beyond the file, by which `cells` were chosen.
    """
    found = gather(target.name, reproduction, scale, cells, folder_of, problems or {}, asked)
    claims = tuple(check_claim(claim, found) for claim in reproduction.claims)
    shown = pictures(found)
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / PAGE, render(page(found, claims, shown, target)).encode())
    write_atomically(target / table.FILE, table.markdown(found, claims).encode())
    write_csv(target / NUMBERS, table.HEADER, table.rows(found))
    for picture in shown:
        write_csv(target / f"{picture.name}.csv", picture.header, picture.rows)
    outcome = _outcome(found, claims)
    write_atomically(target / FILE, dumped(outcome))
    return outcome


def _outcome(found: TableResults, claims: tuple[ClaimResult, ...]) -> Outcome:
    kinds = dict.fromkeys(("all", "some", "none", "untestable"), 0)
    for place in found.places.values():
        done = "all" if not place.missing else "some" if place.runs else "none"
        kinds["untestable" if place.cell.untestable else done] += 1
    r = found.reproduction
    spent = sum(run.summary.seconds.get("total", 0.0) for run in found.runs.values())
    versions = tuple(sorted({str(run.environment.get("fedloom")) for run in found.runs.values()}))
    about = found.name, r.title, r.place, r.system, found.scale
    return Outcome(*about, claims, kinds, len(found.runs), spent, versions, found.asked)


def page(found: TableResults, claims: Sequence[ClaimResult], shown: Sequence[PlotSection], target: Path) -> Page:
    """The page, which will lie in the folder `target`."""
    r = found.reproduction
    sections = [_numbers(found)]
    if claims:
        sections.append(_claims(claims))
    sections += [picture.section for picture in shown]
    sections += [_made(found), _runs(found, target)]
    return Page(
        title=r.title,
        subtitle=f"{fmt.capital(found.scale)} scale · {r.place} of {SYSTEMS[r.system]}",
        lead=_lead(claims),
        warning=" ".join(warnings(found)),
        tiles=list(_tiles(found, claims)),
        sections=sections,
        footer=f"Made by fedloom {__version__} from the folders of the runs. The numbers are in {NUMBERS}"
        + "".join(f", {picture.name}.csv" for picture in shown)
        + f"; {table.FILE} has the table for Markdown.",
    )


def _lead(claims: Sequence[ClaimResult]) -> str:
    if not claims:
        return "The paper claims nothing of these numbers that seeds could decide."
    return f"{fmt.capital(counted(claims))}."


def counted(claims: Sequence[ClaimResult]) -> str:
    """`of three claims: two held and one not seen`."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    texts = [fmt.times(count, verdict, verdict) for verdict, count in counts.items() if count]
    return f"of {fmt.times(len(claims), 'claim')}: {fmt.together(texts)}"


def _tiles(found: TableResults, claims: Sequence[ClaimResult]) -> Iterator[Tile]:
    if claims:
        held = sum(claim.verdict == "held" for claim in claims)
        yield Tile("Claims held", f"{held} of {len(claims)}", "by paired differences over seeds")
    numbers = [n for n in found.numbers.values() if n.mean is not None]
    yield Tile("Cells", f"{len(numbers)} of {len(found.places)}", "have a number of ours")
    yield Tile("Seeds", fmt.span(seeds(found)) if seeds(found) else fmt.NONE, "of each cell")
    spent = sum(run.summary.seconds.get("total", 0.0) for run in found.runs.values())
    yield Tile("Time", fmt.duration(spent), f"wall time of {fmt.times(len(found.runs), 'run')}, one after the other")


def _numbers(found: TableResults) -> PageSection:
    """The table, and why cells are empty."""
    text = [t for t in (found.reproduction.about, found.reproduction.scale(found.scale).about) if t]
    rows = [_row(found, row) for row in found.rows]
    chances = [table.chance(found, column) for column in found.columns]
    if any(chances):
        rows.append(cells(PageCell("chance", "always the most frequent class"), *(c or fmt.NONE for c in chances)))
    shown = PageTable(table.caption(found), [table.corner(found), *found.columns], rows)
    points = [*untestable(found), *missing(found)]
    return PageSection("The numbers", text=text, tables=[shown], points=points)


def _row(found: TableResults, row: str) -> list[PageCell]:
    """One method: in each column our number over the paper's."""
    shown = [PageCell(row, key=row_look(found, row).key("").sample)]
    for column in found.columns:
        at = (row, column)
        if at not in found.places:
            shown.append(PageCell(fmt.NONE, title="not asked for"))
            continue
        place = found.places[at]
        best = found.numbers[at].mean is not None and row in found.best(column)
        why = place.cell.untestable or "; ".join(dict.fromkeys(one.problem for one in place.missing))
        shown.append(PageCell(table.ours(found, *at), title=why, below=table.theirs(found, *at), strong=best))
    return shown


def _claims(claims: Sequence[ClaimResult]) -> PageSection:
    """Each claim with its verdict."""
    rows = [
        cells(
            c.text, c.compared, PageCell(c.verdict, strong=c.verdict == "held"), c.found, str(len(c.seeds) or fmt.NONE)
        )
        for c in claims
    ]
    columns = ("Claim", "Compared", "Verdict", table.DIFFERENCE, "Seeds")
    shown = PageTable("What the paper claims of these numbers, and what ours say", columns, rows, words=4, prose=True)
    return PageSection("What the paper claims", text=[RULE], tables=[shown])


def _made(found: TableResults) -> PageSection:
    """The machine, what it cost, and how to repeat it."""
    rows = [cells(*pair) for pair in facts(found)]
    return PageSection(
        "How it was made",
        tables=[PageTable("What the numbers may depend on, and what they cost", ("What", "Which"), rows, words=2)],
        command=found.asked.command(found.name, found.scale),
    )


def _runs(found: TableResults, target: Path) -> PageSection:
    """Every run: its cell, seed, value, hash and folder."""
    rows = []
    for place, one in found.attempts:
        number = found.numbers[place.cell.row.name, place.cell.column.name].by_seed.get(one.config.seed)
        folder = quote(Path(os.path.relpath(one.folder, target)).as_posix())
        report = "report.html" if (one.folder / "report.html").is_file() else ""
        link = PageCell(one.folder.name, href=f"{folder}/{report}") if one.run else PageCell(one.problem)
        value = fmt.NONE if number is None else found.unit.number(number)
        state = (one.run.summary.state_sha256 if one.run else None) or fmt.NONE
        spent = fmt.duration(one.run.summary.seconds.get("total", 0.0)) if one.run else fmt.NONE
        row = (place.cell.row.name, place.cell.column.name, link, str(one.config.seed), value, spent)
        rows.append(cells(*row, PageCell(state[:12], state)))
    columns = ("Row", "Column", "Folder", "Seed", table.shown(found), "Time", "State hash")
    every = PageTable("A folder's config.toml repeats its run: fedloom run config.toml", columns, rows, words=3)
    return PageSection("Runs", details=[Details(f"All {len(rows)} runs, one by one", table=every)] if rows else [])
