"""The page of a reproduction: our numbers beside the paper's, its claims, figures and
provenance.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from fedloom._version import __version__
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.run.record import write_csv
from fedloom.report import formatting as fmt
from fedloom.report.page import Details, Page, PageCell, PageSection, PageTable, Tile, cells, render
from fedloom.support.paths import write_atomically
from fedloom_papers import table
from fedloom_papers.archive import Archive
from fedloom_papers.claims import ClaimResult, check_claims
from fedloom_papers.figures import PlotSection, pictures, row_style
from fedloom_papers.index import (
    FILE,
    INTERVAL,
    MARKDOWN,
    PAGE,
    Outcome,
    dumped,
    seeds_cell,
    verdict_cell,
)
from fedloom_papers.keys import archive_key
from fedloom_papers.markdown import markdown
from fedloom_papers.multiverse import maps
from fedloom_papers.ran import ran, sentence
from fedloom_papers.results import TableResults, gather, missing, seeds, untestable
from fedloom_papers.selection import EVERYTHING, Selection
from fedloom_papers.shipped import SYSTEMS
from fedloom_papers.spec import Cell, Reproduction, Scale
from fedloom_papers.units import Unit
from fedloom_papers.verdicts import RULE

NUMBERS = "table.csv"
"""The numbers of the table; some pictures have a CSV file beside it."""


def write(
    reproduction: Reproduction,
    scale: Scale,
    cells: Iterable[Cell],
    folder_of: Callable[[RunConfig], Path],
    target: Path,
    problems: Mapping[Path, str] | None = None,
    asked: Selection = EVERYTHING,
    archive: Archive | None = None,
    key_of: Callable[[RunConfig], str] = archive_key,
) -> Outcome:
    """Write `index.html`, `table.md`, `table.csv`, a CSV file for some pictures, and
    `outcome.json`.

    Args:
        cells: the selected cells.
        folder_of: the folder of a run; the page lists runs that are missing or unfinished.
        target: the folder to write to, named like the reproduction.
        problems: why runs failed, by folder.
        asked: the selection on the command line, which led to `cells`.
        archive: has the numbers of runs without a folder, and gets those of runs with one.
        key_of: the digest of a run, by which it is archived.
    """
    archived = archive.usable(scale, target.name, reproduction) if archive else {}
    found = gather(
        target.name, reproduction, scale, cells, folder_of, problems or {}, asked, archived, key_of
    )
    if archive:
        archive.add(scale, target.name, found.records.values())
    claims = check_claims(reproduction.claims, found)
    shown = pictures(found)
    target.mkdir(parents=True, exist_ok=True)
    made = page(found, claims, shown, target)
    write_atomically(target / PAGE, render(made).encode())
    write_atomically(target / MARKDOWN, markdown(made).encode())
    write_csv(target / NUMBERS, table.HEADER, table.rows(found))
    for picture in shown:
        if picture.header:
            write_csv(target / f"{picture.name}.csv", picture.header, picture.rows)
    outcome = _outcome(found, claims)
    write_atomically(target / FILE, dumped(outcome))
    return outcome


def _outcome(found: TableResults, claims: tuple[ClaimResult, ...]) -> Outcome:
    kinds = dict.fromkeys(("all", "some", "none", "untestable"), 0)
    for place in found.places.values():
        done = "all" if not place.missing else "some" if place.records else "none"
        kinds["untestable" if place.cell.untestable else done] += 1
    r = found.reproduction
    versions = tuple(
        sorted({str(one.environment.get("fedloom")) for one in found.records.values()})
    )
    about = found.name, r.title, r.place, r.system, found.scale
    return Outcome(
        *about,
        claims,
        kinds,
        len(found.records),
        found.seconds,
        versions,
        found.asked,
        maps(found),
        ran(found),
    )


def page(
    found: TableResults, claims: Sequence[ClaimResult], shown: Sequence[PlotSection], target: Path
) -> Page:
    """The page, to be written to the folder `target`."""
    r = found.reproduction
    sections = [_numbers(found)]
    if claims:
        sections.append(_claims(claims))
    sections += [picture.section for picture in shown]
    sections += [_provenance(found), _runs(found, target)]
    return Page(
        title=r.title,
        subtitle=f"{fmt.capital(found.scale)} scale · {r.place} of {SYSTEMS[r.system]}",
        lead=sentence(ran(found)),
        warning=" ".join(_warnings(found)),
        tiles=list(_tiles(found)),
        sections=sections,
        footer=f"Made by fedloom {__version__} from the folders of the runs. The numbers are in "
        f"{NUMBERS}"
        + "".join(f", {picture.name}.csv" for picture in shown if picture.header)
        + f"; {MARKDOWN} has the page as Markdown.",
    )


def _tiles(found: TableResults) -> Iterator[Tile]:
    measured = sum(number.mean is not None for number in found.numbers.values())
    yield Tile("Cells", f"{measured} of {len(found.places)}", "measured")
    yield Tile("Seeds", fmt.span(seeds(found)) if seeds(found) else fmt.NONE, "per cell")
    yield Tile(
        "Time",
        fmt.duration(found.seconds),
        f"total wall time of {fmt.times(len(found.records), 'run')}",
    )


def _numbers(found: TableResults) -> PageSection:
    """The table, and why cells are empty."""
    r = found.reproduction
    text = [t for t in (r.about, r.scale(found.scale).about) if t]
    rows = [_row(found, row) for row in found.rows]
    chances = [table.chance(found, column) for column in found.columns]
    if any(chances):
        rows.append(
            cells(
                PageCell("chance", "always the most frequent class"),
                *(c or fmt.NONE for c in chances),
            )
        )
    corner = f"By {r.across}" if r.across else "Row"
    shown = PageTable(table.caption(found), [corner, *map(found.heading, found.columns)], rows)
    tables = [shown, *_printed(found)]
    return PageSection(
        "Numbers", text=text, tables=tables, points=[*untestable(found), *missing(found)]
    )


def _printed(found: TableResults) -> Iterator[PageTable]:
    """The paper's numbers for columns in which other data stand in: they are no measure of ours."""
    columns = [column for column in found.columns if found.stands_in({column})]
    rows = [
        cells(row, *(table.printed(found, row, column) for column in columns))
        for row in found.rows
        if any(
            found.numbers[at].paper for column in columns if (at := (row, column)) in found.numbers
        )
    ]
    if rows:
        caption = "The paper's numbers for these columns, on its own data, which were not used here"
        yield PageTable(caption, ["Row", *columns], rows)


def _row(found: TableResults, row: str) -> list[PageCell]:
    """One row of the table: in each column our number above the paper's."""
    shown = [PageCell(row, key=row_style(found, row).key("").sample)]
    for column in found.columns:
        at = (row, column)
        if at not in found.places:
            shown.append(PageCell(fmt.NONE, title="not selected"))
            continue
        best = found.numbers[at].mean is not None and row in found.best(column)
        below = table.theirs(found, *at)
        shown.append(
            PageCell(
                table.ours(found, *at), title=found.places[at].remark, below=below, strong=best
            )
        )
    return shown


def _claims(claims: Sequence[ClaimResult]) -> PageSection:
    """Each claim with its verdict."""
    rows = [
        cells(
            PageCell(c.text, below=c.data),
            c.compared,
            verdict_cell(c),
            c.found,
            c.beside or fmt.NONE,
            seeds_cell(c),
            _each_seed(c),
        )
        for c in claims
    ]
    columns = (
        "Claim",
        "Compared",
        "Verdict",
        INTERVAL,
        "Beside it",
        "Seeds",
        "Differences by seed",
    )
    shown = PageTable(
        "The paper's claims about these results, tested on our runs",
        columns,
        rows,
        words=7,
        prose=True,
    )
    return PageSection("Claims", text=[RULE], tables=[shown])


def _each_seed(claim: ClaimResult) -> str:
    unit = Unit(claim.unit)
    return ", ".join(
        "infinite" if value is None else unit.difference(value) for value in claim.seeds.values()
    )


def _warnings(found: TableResults) -> Iterator[str]:
    """Limits of the numbers that a reader must know first."""
    yield from found.asked.warnings(found.reproduction.scale(found.scale).seeds)
    planned = {one.folder for _, one in found.attempts}
    if lacking := len(planned) - len(found.records):
        yield (
            f"{lacking} of {len(planned)} runs are missing, and with them the results that need "
            "them."
        )
    versions = sorted({str(one.environment.get("fedloom")) for one in found.records.values()})
    if len(versions) > 1:
        yield (
            f"The runs used several versions of fedloom ({fmt.together(versions)}), which may "
            "explain differences."
        )


def _provenance(found: TableResults) -> PageSection:
    """Versions, machine, cost, and the command that repeats the table."""
    rows = [cells(*pair) for pair in _facts(found)]
    return PageSection(
        "Provenance",
        tables=[PageTable("Versions, machine and cost", ("Item", "Value"), rows, words=2)],
        command=found.asked.command(found.name, found.scale),
    )


def _facts(found: TableResults) -> Iterator[tuple[str, str]]:
    """Pairs of a name and a text."""
    records = list(found.records.values())
    about = found.reproduction.scale(found.scale).about
    yield "Scale", f"{found.scale}: {about}" if about else found.scale
    yield "Runs", f"{len(records)} finished of {len({one.folder for _, one in found.attempts})}"
    if not records:
        return

    def each(key: str) -> str:
        return " or ".join(sorted({str(one.environment.get(key) or "unknown") for one in records}))

    started = sorted(str(one.environment.get("started") or "")[:10] for one in records)
    yield "Date", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"
    names = {"fedloom": "fedloom", "python": "Python", "torch": "PyTorch", "numpy": "NumPy"}
    yield "Versions", fmt.together([f"{name} {each(key)}" for key, name in names.items()])
    yield "Commit", each("commit")[:12]
    configs = sorted({one.config for one in records})
    yield "Configs", f"{len(configs)}: {', '.join(configs[:8])}{', …' * (len(configs) > 8)}"
    tests = {(one.dataset, one.test_sha256 or "") for one in records}
    used = fmt.together(sorted({dataset for dataset, _ in tests}))
    yield (
        "Data",
        f"{used}; {fmt.times(len(tests), 'fingerprint')} of test rows, by run in the archive",
    )
    yield "Machine", f"{each('platform')}, {each('processor')}, {each('cores')} cores"
    if accelerators := {
        str(one.environment["cuda"]) for one in records if one.environment.get("cuda")
    }:
        yield "Accelerator", fmt.together(sorted(accelerators))
    yield "Wall time", fmt.duration(found.seconds)
    sizes = {to: sum(one.bytes[to] for one in records) for to in ("up", "down", "across")}
    sent = [f"{fmt.size(size)} {to}" for to, size in sizes.items() if size]
    yield "Tensor data", fmt.together(sent) or "none"


def _runs(found: TableResults, target: Path) -> PageSection:
    """Each run: cell, seed, value, hash and folder."""
    rows = []
    for place, one in found.attempts:
        number = found.numbers[place.cell.row.name, place.cell.column.name].by_seed.get(
            one.config.seed
        )
        folder = quote(Path(os.path.relpath(one.folder, target)).as_posix())
        report = "report.html" if (one.folder / "report.html").is_file() else ""
        link = PageCell("archived" if one.record else one.problem)
        if one.run:
            link = PageCell(one.folder.name, href=f"{folder}/{report}")
        value = fmt.NONE if number is None else found.unit.number(number)
        state = (one.record.state_sha256 if one.record else None) or fmt.NONE
        seconds = fmt.duration(one.record.seconds) if one.record else fmt.NONE
        row = (
            place.cell.row.name,
            place.cell.column.name,
            link,
            str(one.config.seed),
            value,
            seconds,
        )
        rows.append(cells(*row, PageCell(state[:12], state)))
    columns = ("Row", "Column", "Folder", "Seed", table.title(found), "Time", "State hash")
    every = PageTable(
        "config.toml in a folder repeats its run: fedloom run config.toml", columns, rows, words=3
    )
    return PageSection(
        "Runs", details=[Details(f"All {len(rows)} runs", table=every)] if rows else []
    )
