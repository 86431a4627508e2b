"""Plan and execute the runs of tables and figures: fetch data, run each run once, write pages."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError, DataError, FedloomError, did_you_mean
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.pool.fetch import absent, fetch
from fedloom.experiment.pool.pool import Ended, Job, Standing, digest, is_finished, run_all
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.report.read import read_run
from fedloom_papers.archive import Archive, record_of
from fedloom_papers.keys import archive_key
from fedloom_papers.selection import Selection, dotted_settings
from fedloom_papers.shipped import SYSTEMS, shipped
from fedloom_papers.spec import (
    Cell,
    Reproduction,
    Scale,
    canonical,
    matches_pattern,
    own_file,
    read,
)

if TYPE_CHECKING:
    from fedloom_papers.index import Outcome


@dataclass(frozen=True)
class Planned:
    """One table or figure at one scale.

    Attributes:
        cells: the selected cells.
        runs: their runs by digest; cells and tables may share runs.
        asked: the selection on the command line.
    """

    name: str
    reproduction: Reproduction
    scale: Scale
    cells: tuple[Cell, ...]
    runs: Mapping[str, RunConfig]
    asked: Selection


@dataclass(frozen=True)
class Plan:
    """Several tables and figures.

    Attributes:
        out: the output folder.
        pages: the folder of all pages; changed settings or a selection have a separate one.
        digests: digest of every run by its settings as JSON, taken at planning time, because a
            method page may be edited while runs are in progress.
        settings: likewise, digest in the archive of every run, by the settings that its table
            gives: equal runs of two tables differ there if one gives a default.
        problems: reasons why a table or figure cannot be run, by name.
        archive: the archive of finished runs.
        archived: digests of the runs for which each of these tables and figures finds in it what it
            needs.
    """

    out: Path
    scale: Scale
    pages: Path
    planned: tuple[Planned, ...]
    digests: Mapping[str, str]
    settings: Mapping[str, str]
    problems: Mapping[str, str]
    archive: Archive
    archived: Set[str]

    @property
    def runs(self) -> dict[str, RunConfig]:
        """All distinct runs by digest, in order of first use."""
        return {key: run for one in self.planned for key, run in one.runs.items()}

    def archive_key(self, run: RunConfig) -> str:
        """The digest of a run in the archive."""
        return self.settings[_given(run)]

    def folder(self, run: RunConfig) -> Path:
        """The output folder of a run, shared by all tables."""
        return self.out / "runs" / self.digests[run.model_dump_json()]

    @property
    def finished(self) -> set[str]:
        """The digests of finished runs, here or in the archive."""
        return {
            key
            for key, run in self.runs.items()
            if key in self.archived or is_finished(run, self.out / "runs" / key)
        }

    def uses(self, run: RunConfig) -> list[tuple[Planned, Cell]]:
        """The tables and figures that need a run, of any seed, each with its first
        cell that does.
        """
        return [*self._cells.get(_without_seed(run), {}).values()]

    def title(self, run: RunConfig) -> str:
        """`fedal-table-6: FedAL @ α = 5, seed 0`, by its first use."""
        one, cell = self.uses(run)[0]
        return f"{one.name}: {cell.name}, seed {run.seed}"

    @cached_property
    def _cells(self) -> dict[str, dict[str, tuple[Planned, Cell]]]:
        found: dict[str, dict[str, tuple[Planned, Cell]]] = {}
        for one in self.planned:
            for cell in one.cells:
                for run in cell.runs[:1]:
                    found.setdefault(_without_seed(run), {}).setdefault(one.name, (one, cell))
        return found

    def archiving(self, progress: Callable[[Standing], None]) -> Callable[[Standing], None]:
        """`progress` that first archives a run that has just finished, because a long command may
        be killed.
        """

        def archive(job: Job) -> None:
            try:
                run = read_run(job.folder)
            except DataError:  # the page says so
                return
            for one, cell in self.uses(job.run):
                own = cell.runs[0].model_copy(update={"seed": job.run.seed})
                key = self.settings.get(_given(own)) or archive_key(own)
                self.archive.add(
                    one.scale, one.name, [record_of(run, own, key, cell.name, one.reproduction)]
                )

        def archive_and_show(standing: Standing) -> None:
            if standing.ended and standing.ended.state == "finished":
                archive(standing.ended.job)
            progress(standing)

        return archive_and_show


def unlisted(runs: Mapping[str, RunConfig]) -> list[str]:
    """The manifests of runs that do not exist."""
    named = {run.columns.manifest for run in runs.values() if run.columns.manifest}
    return sorted(path for path in named if not Path(path).exists())


def _without_seed(run: RunConfig) -> str:
    return run.model_copy(update={"seed": 0}).model_dump_json()


def _given(run: RunConfig) -> str:
    return run.model_dump_json(exclude_unset=True)


def reproductions(names: Sequence[str], every: bool = False) -> dict[str, Reproduction]:
    """Tables and figures by name, in the given order.

    Args:
        names: of a table or figure, such as `fedal-table-6`; of a paper, such as `fedal`; or a TOML
            file.
        every: whether to add all that fedloom ships.

    Raises:
        ConfigError: names are unknown or files invalid; the message lists all problems.
    """
    known = shipped()
    found: dict[str, Reproduction] = {}
    wrong: list[str] = []
    for name in [*names, *(known if every else ())]:
        of = [n for n in known if n.startswith(f"{name}-")] if name in SYSTEMS else [name]
        if not of:
            wrong.append(f"fedloom ships no table or figure of {name}")
        for one in of:
            try:
                if not one.endswith(".toml"):
                    found[one if one in known else canonical(one)] = read(one)
                elif (title := Path(one).stem) in known or title in found:
                    wrong.append(f"{one}: the name {title} is taken. Rename the file.")
                else:
                    found[title] = own_file(one)
            except ConfigError as error:
                wrong.append(str(error))
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
                wrong.append(f"cannot read {one}: {reason}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found


def plan(
    found: Mapping[str, Reproduction],
    out: Path,
    scale: Scale,
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    change: Mapping[str, Any] | None = None,
    device: str | None = None,
    archive: Path | None = None,
) -> Plan:
    """Plan the runs of tables and figures.

    Args:
        found: by name.
        out: the output folder.
        scale: small or paper.
        seeds: number of seeds, from 0; None for that of the scale.
        only: patterns of rows, columns or `row @ column`, with * and ?; empty for all. Each must
            match; tables without a match are dropped.
        change: settings that override all others.
        device: torch device of the workers; None for that of the settings.
        archive: the folder of the archive; None for one in `out`.

    Raises:
        ConfigError: a pattern of `only` matches nothing.
        DataError: the archive is damaged.
    """
    fitting = {
        name: [
            pattern for pattern in only if any(matches_pattern(each, pattern) for each in one.names)
        ]
        for name, one in found.items()
    }
    for pattern in only:
        if not any(pattern in each for each in fitting.values()):
            names = {name for one in found.values() for name in one.names}
            raise ConfigError(
                f"--only {pattern!r} matches no row, column or cell.{did_you_mean(pattern, names)}"
            )
    asked = Selection(
        (*dotted_settings(change or {}), *([f"engine.device={device}"] if device else [])),
        tuple(only),
        seeds,
    )
    pages = out / asked.folder(
        scale, max((one.scale(scale).seeds for one in found.values()), default=1)
    )
    planned, digests, given, problems = [], dict[str, str](), dict[str, str](), dict[str, str]()
    kept, archived, lacking = Archive(archive or out / "archive"), set[str](), set[str]()
    for name, one in found.items():
        if only and not fitting[name]:
            continue
        try:
            known = {*kept.usable(scale, name, one)}
            cells = tuple(
                _on_device(cell, device) for cell in one.cells(scale, seeds, fitting[name], change)
            )
            if seeds is None:
                cells = tuple(_with_finished_seeds(cell, known, out) for cell in cells)
            every = [
                (run.model_dump_json(), _given(run), run) for cell in cells for run in cell.runs
            ]
            digests |= {text: digest(run) for text, _, run in every if text not in digests}
            given |= {words: archive_key(run) for _, words, run in every if words not in given}
            runs = {digests[text]: run for text, _, run in every}
            archived |= runs.keys()
            lacking |= {digests[text] for text, words, _ in every if given[words] not in known}
        except FedloomError as error:
            problems[name] = str(error)
        else:
            planned.append(
                Planned(name, one, scale, cells, runs, replace(asked, only=tuple(fitting[name])))
            )
    return Plan(
        out, scale, pages, tuple(planned), digests, given, problems, kept, archived - lacking
    )


def _on_device(cell: Cell, device: str | None) -> Cell:
    """The cell with its runs on a device, which this machine need not have."""
    if device is None:
        return cell
    runs = [
        run.model_copy(update={"engine": run.engine.model_copy(update={"device": device})})
        for run in cell.runs
    ]
    return replace(cell, runs=tuple(runs))


def _with_finished_seeds(cell: Cell, archived: Set[str], out: Path) -> Cell:
    """The cell with the further seeds that are finished."""
    runs = list(cell.runs)
    while runs:
        run = runs[0].model_copy(update={"seed": len(runs)})
        if (
            archive_key(run) not in archived
            and not (out / "runs" / digest(run) / "result.json").is_file()
        ):
            break
        runs.append(run)
    return replace(cell, runs=tuple(runs))


@dataclass(frozen=True)
class PlanOutcome:
    """The result of a plan.

    Attributes:
        ended: the end state of each run.
        outcomes: the outcome of each table or figure, from its finished runs.
        page: the page to open.
    """

    ended: Sequence[Ended]
    outcomes: "Sequence[Outcome]"
    page: Path


def run_plan(
    plan: Plan,
    *,
    workers: int | None = None,
    ray: str | None = None,
    gpus: float = 0.0,
    costs: Sequence[float] = (),
    execute_runs: bool = True,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., RunResult] = execute,
) -> PlanOutcome:
    """Execute unfinished runs, and write the pages of all tables and figures.

    Args:
        plan: the plan.
        workers, ray, gpus, progress, stop, execute: see `fedloom.experiment.pool.pool.run_all`.
        costs: relative duration of each run of the plan; empty for equal durations.
        execute_runs: False to write the pages of finished runs only.

    Raises:
        ConfigError: a table or figure cannot be run.
        DataError: a data set is not available.
        EngineError: no worker process can be started.
    """
    if plan.problems:
        raise ConfigError("\n".join(f"{name}: {reason}" for name, reason in plan.problems.items()))
    runs, kept = plan.runs, plan.finished
    left = {key: run for key, run in runs.items() if key not in kept} if execute_runs else {}
    if lists := unlisted(left):
        raise DataError(
            f"missing manifest: {', '.join(lists)}. Create it (see docs/vertical.md), or exclude "
            "its columns with --only."
        )
    fetch(absent(left))
    each = dict(zip(runs, costs or [1.0] * len(runs), strict=True))
    here = (
        {key: run for key, run in runs.items() if key in left or plan.folder(run).is_dir()}
        if left
        else left
    )
    jobs = [
        Job(run, plan.out / "runs" / key, plan.title(run), each[key], key)
        for key, run in here.items()
    ]
    ended = run_all(
        jobs,
        workers=workers,
        ray=ray,
        gpus=gpus,
        progress=plan.archiving(progress),
        stop=stop,
        execute=execute,
    )
    problems = {one.job.folder: one.reason for one in ended if one.state == "failed"}
    from fedloom_papers.index import write_index
    from fedloom_papers.page import write

    outcomes = [
        write(
            one.reproduction,
            one.scale,
            one.cells,
            plan.folder,
            plan.pages / one.name,
            problems,
            one.asked,
            plan.archive,
            plan.archive_key,
        )
        for one in plan.planned
    ]
    page = write_index(plan.pages)
    return PlanOutcome(
        ended, outcomes, plan.pages / outcomes[0].name / page.name if len(outcomes) == 1 else page
    )
