"""The report of a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedloom.report import plots, words
from fedloom.report.page import Cell, Figure, Page, Section, Table, cells
from fedloom.report.plots import Dots, Level, Line
from fedloom.report.read import START, Run
from fedloom.report.schema import Comparison, Difference, MethodFound
from fedloom.report.single import partition, sent

ONE_SEED = "One seed says nothing about chance: repeat with other seeds before you call a method better."

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


def page(folder: Path, found: Comparison, runs: Sequence[Run], problem: str = "") -> Page:
    """The page of a comparison.

    Args:
        folder: where the page will lie; links are relative to it.
        found: what was found.
        runs: those runs of it whose files are there.
        problem: why the runs can't be paired, if so.
    """
    names = [method.name for method in found.methods]
    chances = [method.chance for method in found.methods]
    level = [] if problem or not chances else [Level("chance", float(np.mean(chances)))]
    missing = len(found.runs) - len(runs)
    sections = [_methods(found), _differences(found)]
    if runs:
        sections += [_learning(found, runs, level), *([] if problem else [_clients(found, runs)]), _runs(folder, runs)]
    lost = f"The folders of {words.times(missing, 'run')} are not here, so figures leave them out." if missing else ""
    return Page(
        title=found.title or words.capital(words.together(names)),
        subtitle=_subtitle(runs),
        lead=_lead(found),
        warning=f"Side by side only, without paired differences: {problem}." if problem else lost,
        sections=[section for section in sections if section],
        footer="Written by fedloom from comparison.json and the files of its runs' folders.",
    )


def _subtitle(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    every = [run.summary for run in runs]
    seeds = sorted({s.seed for s in every})
    clients = words.span({s.clients for s in every})
    return " · ".join(
        (
            words.together(sorted({s.dataset for s in every})),
            "1 client" if clients == "1" else f"{clients} clients",
            f"{words.span({s.iterations for s in every})} iterations",
            f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {words.together([str(s) for s in seeds])}",
        )
    )


def _lead(found: Comparison) -> str:
    """Who reached what, in a sentence."""
    methods = found.methods if len(found.methods) <= 5 else _ends(found.methods)
    many = any(len(m.seeds) > 1 for m in methods)
    each = [f"{m.name} {words.spread(m.accuracy.mean, m.accuracy.std_over_seeds if many else m.accuracy.std_over_clients)}" for m in methods]
    over = "seeds" if many else "clients"
    chance = float(np.mean([m.chance for m in found.methods]))
    start = "Reached on the global test set: " if methods is found.methods else "The lowest and the highest accuracy on the global test set: "
    return f"{start}{words.together(each)} (s.d. over {over}). Always answering the most frequent class gives {words.percent(chance)}."


def _ends(methods: Sequence[MethodFound]) -> list[MethodFound]:
    ordered = sorted(methods, key=lambda m: m.accuracy.mean)
    return [ordered[0], ordered[-1]]


def _methods(found: Comparison) -> Section:
    across = any(m.bytes.across for m in found.methods)
    rows = []
    for number, m in enumerate(found.methods):
        over_seeds = m.accuracy.std_over_seeds
        ways = (m.bytes.up, m.bytes.down, m.bytes.across)[: 3 if across else 2]
        rows.append(
            cells(
                Cell(m.name, title=m.method, key=plots.look(number).key("").sample),
                m.preset,
                words.percent(m.accuracy.mean),
                f"{100 * m.accuracy.std_over_clients:.1f}",
                "–" if over_seeds is None else f"{100 * over_seeds:.1f}",
                str(len(m.seeds)),
                *(Cell(words.size(way), words.exactly(way)) for way in ways),
                words.duration(m.seconds),
                words.whole(m.failures),
            )
        )
    columns = ("Method", "Preset", "Accuracy", "s.d. over clients", "s.d. over seeds", "Seeds", "Sent up", "Sent down")
    columns += ("Sent across",) if across else ()
    caption = "Accuracy on the global test set, mean over clients and seeds; bytes of tensor data and time for one run; failures in all runs"
    return Section("Methods", tables=[Table(caption, (*columns, "Time", "Failures"), rows, words=2)])


def _differences(found: Comparison) -> Section | None:
    if not found.differences:
        return None
    rows = []
    for d in found.differences:
        low, high = interval(d)
        rows.append(
            cells(
                f"{d.first} − {d.other}",
                "–" if d.mean is None else words.points(d.mean),
                "–" if d.std_over_seeds is None else f"{100 * d.std_over_seeds:.1f}",
                "–" if low is None or high is None else f"{words.points(low)} to {words.points(high)}",
                f"{d.clients_better}/{d.clients}",
                str(len(d.per_seed)),
            )
        )
    columns = ("Difference", "Points", "s.d. over seeds", "95 % interval", "Clients better", "Seeds")
    caption = "Accuracy of the first minus the other, in percentage points, on the same data, clients and seed"
    one = all(len(d.per_seed) == 1 for d in found.differences)
    return Section(
        "Paired differences",
        text=[ONE_SEED] if one else [],
        tables=[Table(caption, columns, rows)],
        points=[verdict(d) for d in found.differences],
    )


def interval(d: Difference) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of the mean difference by Student's t over seeds; nothing for fewer than two seeds."""
    seeds = len(d.per_seed)
    if d.mean is None or d.std_over_seeds is None or seeds < 2:
        return None, None
    freedom = seeds - 1
    quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom + 3 / freedom**2
    half = quantile * d.std_over_seeds / seeds**0.5
    return d.mean - half, d.mean + half


def verdict(d: Difference) -> str:
    """What a difference lets one say, and no more."""
    if d.mean is None:
        return f"{d.first} and {d.other} have no seed in common: nothing can be paired."
    side = "above" if d.mean > 0 else "below" if d.mean < 0 else "level with"
    by = f"{words.points(abs(d.mean)).lstrip('+')} points {side}" if d.mean else side
    low, high = interval(d)
    if low is None or high is None:
        better = f"better at {d.clients_better} of {words.times(d.clients, 'client')}"
        return f"In the one seed {d.first} is {by} {d.other}, and {better}."
    seeds = words.times(len(d.per_seed), "seed")
    between = f"(95 % interval {words.points(low)} to {words.points(high)})"
    if low <= 0 <= high:
        return f"Over {seeds} {d.first} is on average {by} {d.other} {between}. The interval holds 0: these seeds do not tell which is better."
    return f"Over {seeds} {d.first} is {by} {d.other} {between}: more than the seeds vary, on this data and with these clients."


def _learning(found: Comparison, runs: Sequence[Run], level: list[Level]) -> Section:
    curves, costs, silent = [], [], list(level)
    several = False
    for number, method in enumerate(found.methods):
        own = [run for run in runs if run.summary.name == method.name]
        if not own:
            continue
        stage = (own[0].stages or [START])[-1]
        x = own[0].curve("accuracy mean", stage)[0]
        own = [run for run in own if np.array_equal(run.curve("accuracy mean", stage)[0], x)]
        means = np.stack([run.curve("accuracy mean", stage)[1] for run in own])
        several |= len(own) > 1
        band = means.std(0, ddof=1) if len(own) > 1 else own[0].curve("accuracy std", stage)[1]
        spent, look = np.mean([sent(run) for run in own], axis=0), plots.look(number)
        curves.append(Line(method.name, x, means.mean(0), look, band))
        if spent[-1] > 0:
            costs.append(Line(method.name, spent, means.mean(0), look))
        else:
            silent.append(Level(f"{method.name}, which sends nothing", float(means.mean(0)[-1]), plots.Look(look.colour, dash=(6, 3))))
    over = "seeds" if several else "clients"
    ends = ", ".join(f"{line.label} {words.percent(line.y[-1])}" for line in curves)
    svg, legend = plots.chart("learning", f"Mean accuracy by iteration; at the end {ends}.", curves, level, across="iterations of a client")
    caption = f"Mean over clients{' and seeds' if several else ''}; the band is ± one s.d. over {over}. One iteration is one local step of a client."
    figures = [Figure("Accuracy on the global test set", svg, legend, caption)]
    if costs:
        alt = "Mean accuracy by bytes that the clients sent; in all " + ", ".join(f"{line.label} {words.size(line.x[-1])}" for line in costs) + "."
        svg, legend = plots.chart("bytes", alt, costs, silent, across="sent by all clients", form_x=words.size)
        figures.append(Figure("Accuracy by what it cost to send", svg, legend, "Tensor data that the clients sent, without framing."))
    return Section("Learning", figures=figures)


def _clients(found: Comparison, runs: Sequence[Run]) -> Section | None:
    """Client by client in one seed: another seed deals other rows, so its client 3 is another client."""
    seed = runs[0].summary.seed
    same = {run.summary.name: run for run in runs if run.summary.seed == seed}
    first = same.get(found.reference, runs[0])
    order = np.argsort(-np.array(first.summary.accuracy.per_client), kind="stable")
    series = [
        Dots(method.name, np.array(same[method.name].summary.accuracy.per_client)[order], plots.look(number))
        for number, method in enumerate(found.methods)
        if method.name in same
    ]
    labels = [f"{first.names[i]}  {first.partition.architectures[i]}" for i in order]
    alt = "Accuracy of each client by method; mean " + ", ".join(f"{s.label} {words.percent(s.values.mean())}" for s in series) + "."
    svg, legend = plots.dots("clients", alt, labels, series, notes=False)
    several = len({run.summary.seed for run in runs}) > 1
    caption = f"Sorted by {first.summary.name}, on the global test set."
    caption += f" Seed {seed}; each seed deals other rows." if several else ""
    figure = Figure("Accuracy of each client", svg, legend, caption)
    return Section("Clients", figures=[figure, partition(first, f", seed {seed}" if several else "")])


def _runs(folder: Path, runs: Sequence[Run]) -> Section:
    rows = []
    for run in runs:
        s, target = run.summary, run.folder / "report.html"
        href = quote(Path(os.path.relpath(target, folder)).as_posix()) if target.is_file() else ""
        rows.append(
            cells(
                Cell(s.name, href=href),
                str(s.seed),
                words.spread(s.accuracy.mean, s.accuracy.std),
                words.percent(s.own_accuracy.mean) if s.own_accuracy else "–",
                words.percent(s.agreement) if s.agreement is not None else "–",
                words.whole(s.failures),
                Cell((s.state_sha256 or "–")[:12], s.state_sha256 or ""),
            )
        )
    columns = ("Run", "Seed", "Accuracy", "On own classes", "Agreement", "Failures", "State")
    linked = any(row[0].href for row in rows)
    caption = "Accuracy ± s.d. over clients" + ("; a name leads to the run's own report" if linked else "")
    return Section("Runs", tables=[Table(caption, columns, rows)])
