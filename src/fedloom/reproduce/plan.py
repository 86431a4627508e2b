"""The runs that tables and figures need, each once: data first, then the runs, then the pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError, DataError, FedloomError, did_you_mean
from fedloom.data.sources import ROOT_VARIABLE, SOURCES, load
from fedloom.experiment.config import RunConfig
from fedloom.experiment.pool import Ended, Job, Standing, digest, is_finished, run_all
from fedloom.experiment.run import Result, execute
from fedloom.reproduce.selection import Selection, flat
from fedloom.reproduce.spec import SYSTEMS, Cell, Reproduction, Scale, canonical, match, parsed, read, shipped

if TYPE_CHECKING:
    from fedloom.reproduce.index import Outcome


@dataclass(frozen=True)
class Planned:
    """One table or figure at one scale.

    Attributes:
        cells: those that were chosen.
        runs: what they need, by digest; cells, and other tables, may share some.
        asked: what was asked for beyond the file.
    """

    name: str
    reproduction: Reproduction
    scale: Scale
    cells: tuple[Cell, ...]
    runs: Mapping[str, RunConfig]
    asked: Selection


@dataclass(frozen=True)
class Plan:
    """Several of them.

    Attributes:
        out: the folder of all that is written.
        pages: that of all pages; where settings were changed or a part was chosen it is not that of the whole tables.
        digests: of every run of every cell, by its settings as JSON. What counts is what they were when it was planned:
            a page of one's own may be edited while runs are under way.
        problems: by name, why one can't be run here.
    """

    out: Path
    scale: Scale
    pages: Path
    planned: tuple[Planned, ...]
    digests: Mapping[str, str]
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, RunConfig]:
        """All different runs by digest, in the order in which they are first needed."""
        return {key: run for one in self.planned for key, run in one.runs.items()}

    def folder(self, run: RunConfig) -> Path:
        """Where a run writes to, whichever tables show it."""
        return self.out / "runs" / self.digests[run.model_dump_json()]

    def target(self, name: str) -> Path:
        """The folder of a table's page."""
        return self.pages / name

    @property
    def finished(self) -> set[str]:
        """The digests of runs whose results are there."""
        return {key for key, run in self.runs.items() if is_finished(run, self.out / "runs" / key)}

    def titles(self) -> dict[str, str]:
        """What a person calls each run, by digest: the first cell that needs it, and its seed."""
        titles: dict[str, str] = {}
        for one in self.planned:
            for cell in one.cells:
                for run in cell.runs:
                    titles.setdefault(self.folder(run).name, f"{one.name}: {cell.name}, seed {run.seed}")
        return titles


def reproductions(names: Sequence[str], every: bool = False) -> dict[str, Reproduction]:
    """The tables and figures that names stand for, by their own names, in the order given.

    Args:
        names: of one, such as `fedal-table-6`; of a paper, such as `fedal`, for all of it; or a file.toml.
        every: all that come with fedloom, too.

    Raises:
        ConfigError: a name stands for none, or a file is not valid; all of them at once.
    """
    known = shipped()
    found: dict[str, Reproduction] = {}
    wrong: list[str] = []
    for name in [*names, *(known if every else ())]:
        of = [n for n in known if n.startswith(f"{name}-")] if name in SYSTEMS else [name]
        if not of:
            wrong.append(f"there is no table or figure of {name} here")
        for one in of:
            try:
                if not one.endswith(".toml"):
                    found[one if one in known else canonical(one)] = read(one)
                elif (title := Path(one).stem) in known or title in found:
                    wrong.append(f"{one}: {title} is the name of another one: call the file otherwise")
                else:
                    found[title] = parsed(_text(Path(one)), one)
            except ConfigError as error:
                wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{file} can't be read: {reason}") from None


def plan(
    found: Mapping[str, Reproduction],
    out: Path,
    scale: Scale,
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    change: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Plan:
    """What to run for these tables and figures.

    Args:
        found: by name.
        out: the folder of all that is written.
        scale: small or paper.
        seeds: how many, from 0; None for as many as each scale has.
        only: names of rows, columns or `row @ column`, with * and ?; each must be in one of them. Those that have none
            are left away. Empty for all.
        change: settings over all others.
        device: a torch device that only those have who do the runs; None for what the settings say.

    Raises:
        ConfigError: an `only` fits nowhere.
    """
    fitting = {
        name: [pattern for pattern in only if any(match(each, pattern) for each in one.names)]
        for name, one in found.items()
    }
    for pattern in only:
        if not any(pattern in each for each in fitting.values()):
            names = {name for one in found.values() for name in one.names}
            raise ConfigError(f"--only {pattern!r} is no row, column or cell.{did_you_mean(pattern, names)}")
    asked = Selection((*flat(change or {}), *([f"engine.device={device}"] if device else [])), tuple(only), seeds)
    pages = out / asked.folder(scale, max((one.scale(scale).seeds for one in found.values()), default=1))
    planned, digests, problems = [], dict[str, str](), dict[str, str]()
    for name, one in found.items():
        if only and not fitting[name]:
            continue
        try:
            cells = tuple(_moved(cell, device) for cell in one.cells(scale, seeds, fitting[name], change))
            each = {run.model_dump_json(): run for cell in cells for run in cell.runs}
            digests |= {text: digest(run) for text, run in each.items() if text not in digests}
            runs = {digests[text]: run for text, run in each.items()}
        except FedloomError as error:
            problems[name] = str(error)
        else:
            planned.append(Planned(name, one, scale, cells, runs, replace(asked, only=tuple(fitting[name]))))
    return Plan(out, scale, pages, tuple(planned), digests, problems)


def _moved(cell: Cell, device: str | None) -> Cell:
    """The cell with its runs on a device."""
    if device is None:
        return cell
    runs = [run.model_copy(update={"engine": run.engine.model_copy(update={"device": device})}) for run in cell.runs]
    return replace(cell, runs=tuple(runs))


# -- data -------------------------------------------------------------------------------------------------


def absent(runs: Mapping[str, RunConfig]) -> list[tuple[str, str | None]]:
    """The data sets of runs, each with its root, that are in no folder here: they are to be had from the hub, or from
    what was kept of it."""
    sets = {(run.data.name, run.data.root): None for run in runs.values() if not run.data.own and not _listed(run)}
    return [(name, root) for name, root in sets if name in SOURCES and not _here(name, root)]


def unlisted(runs: Mapping[str, RunConfig]) -> list[str]:
    """The manifests that runs name and that are not there."""
    named = {run.columns.manifest for run in runs.values() if run.columns.manifest}
    return sorted(path for path in named if not Path(path).exists())


def _listed(run: RunConfig) -> bool:
    """Whether its rows are in files that its columns name."""
    return bool(run.columns.own or run.columns.manifest or run.columns.files)


def _here(name: str, root: str | None) -> bool:
    hub, folder = SOURCES[name].hub, root or os.environ.get(ROOT_VARIABLE)
    return hub is None or bool(folder and (Path(folder).expanduser() / hub).is_dir())


def fetch(sets: Sequence[tuple[str, str | None]]) -> None:
    """Get data sets once, before many processes want them at the same time.

    Raises:
        DataError: some can't be had; how they can be.
    """
    wrong: dict[str, str] = {}
    for name, root in sets:
        try:
            load(name, root=None if root is None else Path(root))
        except DataError as error:
            wrong[name] = str(error)
    if wrong:
        places = ", ".join(f"$FEDLOOM_DATA/{SOURCES[name].hub}" for name in wrong)
        raise DataError(
            "\n".join(f"{name}: {reason}" for name, reason in wrong.items())
            + f"\nnot here: {', '.join(wrong)}. Install the extra (pip install 'fedloom[hub]') and run with a network "
            f"once, or put their files into {places}"
        )


@dataclass(frozen=True)
class PlanOutcome:
    """What came of a plan.

    Attributes:
        ended: how each run ended.
        outcomes: what each table or figure comes to, with what there is of it.
        page: the page to open.
    """

    ended: Sequence[Ended]
    outcomes: Sequence[Outcome]
    page: Path


def run_plan(
    plan: Plan,
    *,
    workers: int | None = None,
    ray: str | None = None,
    gpus: float = 0.0,
    costs: Sequence[float] = (),
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., Result] = execute,
) -> PlanOutcome:
    """Do the runs that are not finished, and write the pages of all tables and figures.

    Args:
        plan: what to do.
        workers, ray, gpus, progress, stop, execute: see `fedloom.experiment.pool.run_all`.
        costs: how long each of the plan's runs takes, in any unit; empty for alike.

    Raises:
        ConfigError: something of the plan can't be run here.
        DataError: a data set can't be had.
        EngineError: no process can be started.
    """
    if plan.problems:
        raise ConfigError("\n".join(f"{name}: {reason}" for name, reason in plan.problems.items()))
    runs, kept, titles = plan.runs, plan.finished, plan.titles()
    left = {key: run for key, run in runs.items() if key not in kept}
    if lists := unlisted(left):
        raise DataError(
            f"{', '.join(lists)}: not here. Make such a list of pictures first (docs/vertical.md), or leave its "
            "columns out with --only"
        )
    fetch(absent(left))
    each = costs or [1.0] * len(runs)
    jobs = [
        Job(run, plan.out / "runs" / key, titles[key], cost, key)
        for (key, run), cost in zip(runs.items(), each, strict=True)
    ]
    ended = run_all(jobs, workers=workers, ray=ray, gpus=gpus, progress=progress, stop=stop, execute=execute)
    outcomes = write_pages(plan, {one.job.folder: one.reason for one in ended if one.state == "failed"})
    from fedloom.reproduce.index import write_index

    page = write_index(plan.pages)
    return PlanOutcome(ended, outcomes, plan.target(outcomes[0].name) / page.name if len(outcomes) == 1 else page)


def write_pages(plan: Plan, problems: Mapping[Path, str]) -> list[Outcome]:
    """The pages of a plan's tables and figures, from the runs that are finished. Of others it is said why they failed,
    by folder."""
    from fedloom.reproduce import page

    return [
        page.write(one.reproduction, one.scale, one.cells, plan.folder, plan.target(one.name), problems, one.asked)
        for one in plan.planned
    ]
