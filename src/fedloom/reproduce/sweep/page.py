"""What a sweep came to, as a page, as Markdown and as CSV; and the best setting as a config of its own."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedloom.experiment.checkpoint import write_atomically
from fedloom.experiment.config import toml
from fedloom.experiment.record import write_csv
from fedloom.report import formatting as fmt
from fedloom.report.formatting import MINUS, NBSP, NONE
from fedloom.report.page import Page, PageCell, PageSection, PageTable, cells, render
from fedloom.reproduce.claims import decide
from fedloom.reproduce.sweep.config import shown, told
from fedloom.reproduce.sweep.figures import pictures
from fedloom.reproduce.sweep.run import SweepResults, Trial
from fedloom.reproduce.table import grid, plain

BEST = "best.toml"
"""The best setting, for `fedloom run`."""


@dataclass(frozen=True)
class SettingDifference:
    """One setting minus another, seed by seed.

    Attributes:
        on: of which seeds.
    """

    first: str
    other: str
    on: str
    by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        """Over seeds, raw."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the 95 % interval of the mean; None below two seeds."""
        return decide([*self.by_seed.values()], "more").ends


def write(found: SweepResults, out: Path) -> Path:
    """Write `index.html`, `table.md`, `trials.csv` and, once there is a best setting, `best.toml`; the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "trials.csv", *_csv(found, out))
    if found.ranked:
        best = found.sweep.run(found.ranked[0].setting, found.sweep.config.seeds[0])
        write_atomically(out / BEST, toml(best).encode())
    else:  # of another sweep
        (out / BEST).unlink(missing_ok=True)
    page = _page(found, out)
    write_atomically(out / "table.md", _markdown(page).encode())
    write_atomically(out / "index.html", render(page).encode())
    return out / "index.html"


def lead(found: SweepResults) -> str:
    """The best setting and what it is worth, in a sentence or two."""
    if not found.ranked:
        return f"No setting is finished on all seeds with a finite {found.sweep.config.measure} yet."
    config, best, own = found.sweep.config, found.ranked[0], found.own
    text = f"The best of {fmt.times(len(found.ranked), 'setting')} by {config.measure}, "
    text += f"mean over {_seeds(config.seeds)}: {told(best.setting)}, with {worth(found, best)}; "
    if found.own_is_best:
        text += "that is the file's own setting, and none that was tried is better."
    else:
        text += f"the file's own setting has {worth(found, own)}."
    if found.confirmed and found.own_is_best:
        text += f" On {_seeds(config.confirm)} it has {worth(found, found.confirmed[0])}."
    elif found.confirmed:
        best, own = found.confirmed
        text += f" On {_seeds(config.confirm)}, which the search did not see: {worth(found, best)} and "
        text += f"{worth(found, own)}."
    return text


def worth(found: SweepResults, trial: Trial) -> str:
    """`86.7 ± 0.9 %`."""
    if math.isnan(trial.mean):
        return NONE
    unit = found.sweep.config.unit
    deviation = trial.deviation
    text = unit.spread(unit.factor * trial.mean, None if deviation is None else unit.factor * deviation)
    return f"{text}{NBSP}{unit.name}".strip()


def warning(found: SweepResults) -> str:
    """What a reader must know before the numbers."""
    return " ".join(_warnings(found))


def pairs(found: SweepResults) -> list[SettingDifference]:
    """The best minus the second, and minus the file's own; the latter on the seeds that confirm as well."""
    if not found.ranked:
        return []
    best, *others = found.ranked
    search = "search"
    known = {tuple(other.folders.values()): other for other in (*others[:1], found.own)}
    made = [_pair(best, other, search) for other in known.values() if other.folders != best.folders]
    if found.confirmed and found.confirmed[0].folders != found.confirmed[1].folders:
        made.append(_pair(*found.confirmed, "confirming"))
    return [pair for pair in made if pair is not None]


def _pair(first: Trial, other: Trial, on: str) -> SettingDifference | None:
    both = [s for s in first.values if s in other.values]
    by_seed = {s: first.values[s] - other.values[s] for s in both}
    if not by_seed or not all(map(math.isfinite, by_seed.values())):
        return None
    name = "best" if on == "confirming" else f"best ({first.name})"
    return SettingDifference(name, other.name, on, by_seed)


def _page(found: SweepResults, out: Path) -> Page:
    sweep, config = found.sweep, found.sweep.config
    sections = []
    if found.ranked:
        text = [f"{fmt.capital(config.measure)} over seeds: see the table of all settings. To run the best alone:"]
        sections.append(PageSection("Best setting", text=text, command=shlex.join(["fedloom", "run", str(out / BEST)])))
    if differences := pairs(found):
        sections.append(_differences(found, differences))
    sections += pictures(found)
    sections.append(_all(found, out))
    if found.failed:
        rows = [cells(one.job.title, one.reason) for one in found.failed]
        sections.append(
            PageSection("Failed runs", tables=[PageTable("What failed, and why", ("Run", "Why"), rows, words=2)])
        )
    return Page(
        title=sweep.title or f"Sweep {sweep.name}",
        subtitle=" · ".join(
            (sweep.own().method, config.search, f"{fmt.times(len(found.trials), 'trial')}", _seeds(config.seeds))
        ),
        lead=lead(found),
        warning=warning(found),
        sections=sections,
        footer="Made by fedloom from the files of the runs' folders.",
    )


def _warnings(found: SweepResults) -> Iterator[str]:
    config = found.sweep.config
    if found.stopped:
        yield "The sweep is not finished: the same command goes on."
    if found.failed:
        yield f"{fmt.capital(fmt.times(len(found.failed), 'run'))} failed; the same command tries again."
    if not found.ranked:
        return
    yield (
        f"The best setting was chosen by the {config.measure} that it is shown with, on the same rows and seeds: that "
        "number is optimistic, the more so the more settings were tried."
    )
    if found.confirmed is None:
        if not found.stopped:
            yield "Quote one on seeds that the search did not see: add confirm = [10, 11, 12] to [sweep]."
    else:
        yield "Quote the numbers on the seeds that confirm."
        if _same_test(found):
            yield (
                "These too are of the same test rows, which the data set fixes for every seed: what the choice owes to "
                "them stays."
            )
    if len(config.seeds) == 1:
        yield "One seed says nothing about chance."
    if moved := found.sweep.moves_data:
        yield f"{fmt.together(moved)} moves the data itself, so settings of one seed are not on the same rows."


def _same_test(found: SweepResults) -> bool:
    """Whether all seeds, those that confirm too, were tested on the same rows."""
    trials = (found.ranked[0], *(found.confirmed or ()))
    files = [folder / "result.json" for trial in trials for folder in trial.folders.values()]
    tests = {json.loads(file.read_text())["test_sha256"] for file in files if file.is_file()}
    return len(tests) == 1


def _differences(found: SweepResults, differences: Sequence[SettingDifference]) -> PageSection:
    unit, factor = found.sweep.config.unit, found.sweep.config.unit.factor
    rows, points = [], []
    for pair in differences:
        mean, ends = factor * pair.mean, None if pair.ends is None else [factor * end for end in pair.ends]
        if ends is not None and unit.name == "%":
            ends = [max(-100.0, ends[0]), min(100.0, ends[1])]
        between = NONE if ends is None else " to ".join(unit.difference(end, mean) for end in ends)
        name = f"{pair.first} {MINUS} {pair.other}"
        rows.append(cells(name, pair.on, unit.difference(mean), between, str(len(pair.by_seed))))
        if ends is not None:
            tells = "these seeds do not tell which is better" if ends[0] <= 0 <= ends[1] else "more than the seeds vary"
            points.append(f"{name} on the {pair.on} seeds: {unit.difference(mean)}{unit.apart}; {tells}.")
    caption = f"Paired by seed, in {unit.apart.strip() or 'the units of the measure'}; 95 % interval of Student's t"
    columns = ("Difference", "Seeds of the", "Mean", "95 % interval", "Seeds")
    note = "On the seeds of the search the best is ahead by being chosen; only further seeds show by how much it is."
    table = PageTable(caption, columns, rows, words=2)
    return PageSection("Paired differences", text=[note], tables=[table], points=points)


def _all(found: SweepResults, out: Path) -> PageSection:
    """All settings, the file's own too: the best first, then those that lack a run or a finite value."""
    config = found.sweep.config
    lacking = [t for t in [found.own, *found.trials] if not math.isfinite(t.mean)]
    rows = []
    for trial in [*found.ranked, *lacking]:
        settings = [shown(trial.setting[key]) if key in trial.setting else "as in the file" for key in config.keys]
        each = [_seed_cell(found, trial, seed, out) for seed in config.seeds] if len(config.seeds) <= 5 else []
        called = trial.name
        if trial.number and trial.folders == found.own.folders:
            called += f", {found.own.name}"
        name = PageCell(called, strong=bool(found.ranked) and trial is found.ranked[0])
        rows.append(cells(name, *settings, worth(found, trial), *each))
    seeds = [f"Seed {seed}" for seed in config.seeds] if len(config.seeds) <= 5 else []
    columns = ("Setting", *config.keys, fmt.capital(config.measure), *seeds)
    caption = f"{fmt.capital(config.measure)}, mean over {_seeds(config.seeds)}, ± s.d. of a sample; best first"
    return PageSection("All settings", tables=[PageTable(caption, columns, rows, words=1 + len(config.keys))])


def _seed_cell(found: SweepResults, trial: Trial, seed: int, out: Path) -> PageCell:
    """The value of one run, which leads to its folder."""
    if seed not in trial.values:
        ended = found.ended.get(trial.folders[seed])
        return PageCell(ended.state if ended else NONE)
    href = quote(Path(os.path.relpath(trial.folders[seed], out)).as_posix())
    unit = found.sweep.config.unit
    return PageCell(unit.number(unit.factor * trial.values[seed]), href=href)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {fmt.together([str(seed) for seed in seeds])}"


def _csv(found: SweepResults, out: Path) -> tuple[Sequence[str], list[list[Any]]]:
    """A row for each trial and seed, values raw; `purpose` says whether the search saw the seed."""
    keys = found.sweep.config.keys
    header = ["trial", "table", *keys, "purpose", "seed", found.sweep.config.measure, "state", "folder"]
    rows = []
    groups = [("search", [found.own, *found.trials]), ("confirm", found.confirmed or ())]
    for purpose, trials in groups:
        for trial in trials:
            setting = [trial.setting.get(key, "") for key in keys]
            for seed, folder in trial.folders.items():
                state = found.ended[folder].state
                value = trial.values.get(seed, "")
                at = [trial.number, trial.stage if trial.number else "", *setting, purpose, seed]
                rows.append([*at, value, state, folder.relative_to(out).as_posix()])
    return header, rows


def _markdown(page: Page) -> str:
    """The words and tables of the page."""
    parts = [f"# {plain(page.title)}", plain(page.subtitle)]
    parts += [f"> {plain(page.warning)}"] if page.warning else []
    parts += [plain(page.lead)]
    for section in page.sections:
        if section.figures and not section.tables:
            continue
        parts += [f"## {plain(section.heading)}", *map(plain, section.text)]
        parts += [f"    {section.command}"] if section.command else []
        for table in section.tables:
            lines = [[cell.text for cell in row] for row in table.rows]
            numbers = table.words < len(table.columns)
            parts += [f"{plain(table.caption)}.", grid(table.columns, lines, numbers=numbers)]
        parts += ["\n".join(f"- {plain(point)}" for point in section.points)] if section.points else []
    return "\n\n".join(parts) + "\n"
