"""The results of a sweep as a page, Markdown and CSV, and the best setting as a config file."""

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.core.statistics import confidence_interval
from fedloom.experiment.config.run import toml
from fedloom.experiment.run.record import write_csv
from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.formatting import MINUS, NBSP, NONE
from fedloom.report.markdown import markdown
from fedloom.report.page import Figure, Page, PageCell, PageSection, PageTable, cells, render
from fedloom.report.plots import Level, Line
from fedloom.report.styles import SeriesStyle, series_style
from fedloom.support.paths import write_atomically
from fedloom.sweep.config import Range, setting_text, value_text
from fedloom.sweep.run import SweepResults, Trial

BEST = "best.toml"
"""The best setting, for `fedloom run`."""
LONG = 12
"""Maximum length of a value's name at an axis."""


@dataclass(frozen=True)
class SettingDifference:
    """One setting minus another, by seed, on the seeds of the search or on the confirming ones
    (`on`).
    """

    first: str
    other: str
    on: str
    by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        """The raw mean over seeds."""
        return float(np.mean([*self.by_seed.values()]))

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean; None below two seeds."""
        return confidence_interval([*self.by_seed.values()])


def write(found: SweepResults, out: Path) -> Path:
    """Write `index.html`, `table.md`, `trials.csv` and, once there is a best setting, `best.toml`;
    returns the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    header = [
        "trial",
        "table",
        *found.sweep.config.keys,
        "purpose",
        "seed",
        found.sweep.config.metric,
        "state",
    ]
    write_csv(out / "trials.csv", [*header, "folder"], _rows(found, out))
    if found.ranked:
        best = found.sweep.run(found.ranked[0].setting, found.sweep.config.seeds[0])
        write_atomically(out / BEST, toml(best).encode())
    else:  # left by another sweep
        (out / BEST).unlink(missing_ok=True)
    page = _page(found, out)
    write_atomically(out / "table.md", markdown(page).encode())
    write_atomically(out / "index.html", render(page).encode())
    return out / "index.html"


def _rows(found: SweepResults, out: Path) -> Iterator[list[object]]:
    """A row of raw values per trial and seed; `purpose` tells the search from the confirmation."""
    groups = [("search", [found.own, *found.trials]), ("confirm", found.confirmed or ())]
    for purpose, trial in ((purpose, trial) for purpose, trials in groups for trial in trials):
        setting = [trial.setting.get(key, "") for key in found.sweep.config.keys]
        stage = trial.stage if trial.number else ""
        for seed, folder in trial.folders.items():
            result = [
                trial.values.get(seed, ""),
                found.ended[folder].state,
                folder.relative_to(out).as_posix(),
            ]
            yield [trial.number, stage, *setting, purpose, seed, *result]


def lead(found: SweepResults) -> str:
    """The best setting and its value, in a sentence or two."""
    config = found.sweep.config
    if not found.ranked:
        return f"No setting is finished on all seeds with a finite {config.metric} yet."
    best = found.ranked[0]
    text = f"The best of {fmt.times(len(found.ranked), 'setting')} by {config.ranked_by}, "
    text += (
        f"mean over {_seeds(config.seeds)}: {setting_text(best.setting)}, with "
        f"{worth(found, best)}; "
    )
    if found.own_is_best:
        text += "that is the file's own setting, and none that was tried is better."
    else:
        text += f"the file's own setting has {worth(found, found.own)}."
    if found.confirmed:
        one, other = (worth(found, trial) for trial in found.confirmed)
        text += f" On {'test rows, with ' * bool(config.validation)}{_seeds(config.confirm)}"
        text += (
            f" it has {one}."
            if found.own_is_best
            else f", which the search did not see: {one} and {other}."
        )
    return text


def worth(found: SweepResults, trial: Trial) -> str:
    """`86.7 ± 0.9 %`."""
    if math.isnan(trial.mean):
        return NONE
    unit, deviation = found.sweep.config.unit, trial.deviation
    text = unit.spread(
        unit.factor * trial.mean, None if deviation is None else unit.factor * deviation
    )
    return f"{text}{NBSP}{unit.name}".strip()


def warning(found: SweepResults) -> str:
    """Limits of the numbers that a reader must know first."""
    return " ".join(_warnings(found))


def _warnings(found: SweepResults) -> Iterator[str]:
    config = found.sweep.config
    if found.stopped:
        yield "The sweep is not finished. Repeat the command to continue."
    if found.failed:
        yield (
            f"{fmt.capital(fmt.times(len(found.failed), 'run'))} failed. Repeat the command to "
            "try again."
        )
    if not found.ranked:
        return
    rows = "validation rows" if config.validation else "test rows"
    yield (
        f"The best setting was chosen by the {config.metric} shown here, on the same {rows} and "
        "seeds, so its value is optimistic, the more so the more settings were tried."
    )
    unseen = "test rows" if config.validation else "seeds that the search did not see"
    if found.confirmed is None:
        if not found.stopped:
            yield f"Report a value on {unseen}: add confirm = [10, 11, 12] to [sweep]."
    else:
        yield "Report the values on the confirming seeds."
        if _same_test(found):
            yield (
                "They use the same test rows as the search, as the data set fixes them, and stay "
                "optimistic in this."
            )
    if len(config.seeds) == 1:
        yield "One seed does not show the variation between seeds."
    if moved := found.sweep.moves_data:
        yield (
            f"{fmt.together(moved)} changes the data, so settings with the same seed use "
            "different rows."
        )


def _same_test(found: SweepResults) -> bool:
    """Whether all seeds, including the confirming ones, were tested on the same rows."""
    trials = (found.ranked[0], *(found.confirmed or ()))
    files = [folder / "result.json" for trial in trials for folder in trial.folders.values()]
    return (
        len({json.loads(file.read_text())["test_sha256"] for file in files if file.is_file()}) == 1
    )


def pairs(found: SweepResults) -> list[SettingDifference]:
    """The best minus the second and minus the file's own setting; the latter on the confirming
    seeds too.
    """
    if not found.ranked:
        return []
    best, *others = found.ranked
    known = {tuple(other.folders.values()): other for other in (*others[:1], found.own)}
    chosen = [(best, other, "search", f"best ({best.name})") for other in known.values()]
    chosen += [(*found.confirmed, "confirming", "best")] if found.confirmed else []
    made = []
    for first, other, on, name in chosen:
        by_seed = {
            s: value - other.values[s] for s, value in first.values.items() if s in other.values
        }
        if first.folders != other.folders and by_seed and all(map(math.isfinite, by_seed.values())):
            made.append(SettingDifference(name, other.name, on, by_seed))
    return made


def _page(found: SweepResults, out: Path) -> Page:
    sweep, config = found.sweep, found.sweep.config
    sections = []
    if found.ranked:
        text = (
            f"{fmt.capital(config.metric)} by seed: see the table of all settings. To run the "
            "best setting:"
        )
        command = shlex.join(["fedloom", "run", str(out / BEST)])
        sections.append(PageSection("Best setting", text=[text], command=command))
    if differences := pairs(found):
        sections.append(_differences(found, differences))
    sections += [*pictures(found), _all(found, out)]
    if found.failed:
        rows = [cells(one.job.title, one.reason) for one in found.failed]
        table = PageTable("Failed runs and their errors", ("Run", "Reason"), rows, words=2)
        sections.append(PageSection("Failed runs", tables=[table]))
    trials = fmt.times(len(found.trials), "trial")
    return Page(
        title=sweep.title or f"Sweep {sweep.name}",
        subtitle=" · ".join((sweep.own().method, config.search, trials, _seeds(config.seeds))),
        lead=lead(found),
        warning=warning(found),
        sections=sections,
        footer="Made by fedloom from the folders of the runs.",
    )


def _differences(found: SweepResults, differences: Sequence[SettingDifference]) -> PageSection:
    unit, factor = found.sweep.config.unit, found.sweep.config.unit.factor
    rows, points = [], []
    for pair in differences:
        mean = factor * pair.mean
        ends = None if pair.ends is None else [factor * end for end in pair.ends]
        if ends is not None and unit.name == "%":
            ends = [max(-100.0, ends[0]), min(100.0, ends[1])]
        between = NONE if ends is None else " to ".join(unit.difference(end, mean) for end in ends)
        name = f"{pair.first} {MINUS} {pair.other}"
        rows.append(cells(name, pair.on, unit.difference(mean), between, str(len(pair.by_seed))))
        if ends is not None:
            apart = "not significant" if ends[0] <= 0 <= ends[1] else "significant at 95 %"
            points.append(
                f"{name} on the {pair.on} seeds: {unit.difference(mean)}{unit.apart}; {apart}."
            )
    caption = (
        f"Paired by seed, in {unit.apart.strip() or 'the units of the metric'}; 95 % interval of "
        "Student's t"
    )
    columns = ("Difference", "Seeds of the", "Mean", "95 % interval", "Seeds")
    note = (
        "On the seeds of the search, the best setting is ahead by selection; only further seeds "
        "show by how much."
    )
    table = PageTable(caption, columns, rows, words=2)
    return PageSection("Paired differences", text=[note], tables=[table], points=points)


def _all(found: SweepResults, out: Path) -> PageSection:
    """All settings, best first, then those with a missing run or no finite value."""
    config = found.sweep.config
    lacking = [t for t in [found.own, *found.trials] if not math.isfinite(t.mean)]
    seeds = config.seeds if len(config.seeds) <= 5 else ()
    rows = []
    for trial in [*found.ranked, *lacking]:
        settings = [
            value_text(trial.setting[key]) if key in trial.setting else "as in the file"
            for key in config.keys
        ]
        is_own = trial.number and trial.folders == found.own.folders
        name = PageCell(
            f"{trial.name}, {found.own.name}" if is_own else trial.name,
            strong=bool(found.ranked) and trial is found.ranked[0],
        )
        rows.append(
            cells(
                name,
                *settings,
                worth(found, trial),
                *(_seed_cell(found, trial, seed, out) for seed in seeds),
            )
        )
    columns = (
        "Setting",
        *config.keys,
        fmt.capital(config.metric),
        *(f"Seed {seed}" for seed in seeds),
    )
    caption = (
        f"{fmt.capital(config.metric)}, mean over {_seeds(config.seeds)} ± sample s.d.; best first"
    )
    return PageSection(
        "All settings", tables=[PageTable(caption, columns, rows, words=1 + len(config.keys))]
    )


def _seed_cell(found: SweepResults, trial: Trial, seed: int, out: Path) -> PageCell:
    """The value of one run, with a link to its folder."""
    if seed not in trial.values:
        ended = found.ended.get(trial.folders[seed])
        return PageCell(ended.state if ended else NONE)
    href = quote(Path(os.path.relpath(trial.folders[seed], out)).as_posix())
    unit = found.sweep.config.unit
    return PageCell(unit.number(unit.factor * trial.values[seed]), href=href)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {fmt.together([str(seed) for seed in seeds])}"


# -- figures ---------------------------------------------------------------------------------------


def pictures(found: SweepResults) -> list[PageSection]:
    """The metric by each setting; empty before a trial is finished."""
    figures = []
    for stage, over in enumerate(found.sweep.config.over):
        trials = [t for t in found.trials if t.stage == stage and math.isfinite(t.mean)]
        for key, values in over.items() if trials else ():
            if isinstance(values, Range):
                figures.append(_by_range(found, key, values, trials))
            else:
                figures.append(_by_value(found, key, values, trials))
    if not figures:
        return []
    text = "Each figure shows the trials of the table of [sweep] that varies the setting."
    legend = (
        figures[0].legend
        if len({tuple(key.text for key in f.legend) for f in figures}) == 1
        else ()
    )
    figures = [replace(figure, legend=()) for figure in figures] if legend else figures
    return [PageSection("Effect of each setting", text=[text], figures=figures, legend=legend)]


def _by_value(
    found: SweepResults, key: str, values: Sequence[object], trials: Sequence[Trial]
) -> Figure:
    """Listed values, evenly spaced: the best trial with each, and the mean of all
    trials with it.
    """
    best_of = min if found.sweep.config.less else max
    means = [[t.mean for t in trials if t.setting[key] == value] for value in values]
    best = np.array([best_of(m) if m else np.nan for m in means])
    x = np.arange(len(values), dtype=float)
    joined = all(isinstance(value, int | float) for value in values)
    lines = [Line("best trial with the value", x, best, _style(0, joined))]
    if any(len(m) > 1 for m in means):
        every = np.array([np.mean(m) if m else np.nan for m in means])
        lines.append(
            Line("mean of all trials with it", x, every, replace(_style(1, joined), filled=False))
        )
    ticks = {float(i): fmt.shortened(value_text(value), LONG) for i, value in enumerate(values)}
    texts = [
        f"{value_text(value)} {_written(found, y)}"
        for value, y in zip(values, best, strict=True)
        if np.isfinite(y)
    ]
    return _figure(found, key, lines, ticks, f"best with {fmt.together(texts)}")


def _by_range(found: SweepResults, key: str, one: Range, trials: Sequence[Trial]) -> Figure:
    """Values drawn from an interval: a dot per trial."""
    place = math.log10 if one.log else float
    x, y = np.array([place(t.setting[key]) for t in trials]), np.array([t.mean for t in trials])
    order = np.argsort(x)
    lines = [Line("a trial", x[order], y[order], _style(0, False))]
    best = next((t for t in trials if t.folders == found.ranked[0].folders), None)
    if best is not None:
        lines.insert(
            0,
            Line(
                "the best",
                np.array([place(best.setting[key])]),
                np.array([best.mean]),
                _style(1, False),
            ),
        )
    places = np.linspace(place(one.low), place(one.high), 5)
    if one.int and one.high - one.low < 4:
        places = np.array([place(value) for value in np.arange(one.low, one.high + 1)])
    ticks = {
        float(at): value_text(float(f"{10**at:.2g}") if one.log else float(f"{at:.3g}"))
        for at in places
    }
    text = (
        f"{fmt.times(len(trials), 'trial')}, from {_written(found, y.min())} to "
        f"{_written(found, y.max())}"
    )
    return _figure(found, key, lines, ticks, text)


def _style(number: int, joined: bool) -> SeriesStyle:
    """With a line through the points, or without, as words have no order."""
    style = series_style(number)
    return style if joined else replace(style, dash=None)


def _figure(
    found: SweepResults, key: str, lines: Sequence[Line], ticks: dict[float, str], text: str
) -> Figure:
    config = found.sweep.config
    levels = [Level("the file's own", found.own.mean)] if math.isfinite(found.own.mean) else []
    form = plots.share if config.unit.name == "%" else plots.volume if config.unit.name else None
    title = f"{fmt.capital(config.metric)} by {key}"
    svg, legend = plots.chart(
        f"by {key}", f"{title}: {text}.", lines, levels, across=key, form_y=form, ticks=ticks
    )
    return Figure(title, svg, legend)


def _written(found: SweepResults, value: float) -> str:
    unit = found.sweep.config.unit
    return f"{unit.number(unit.factor * value)}{NBSP}{unit.name}".strip()
