"""The results of a comparison: its verdict, and the tables that the page and the terminal share.

A comparison is joint if its methods are vertical: all parties give one prediction together. Else
each client has a prediction, so a metric has a deviation over clients as well as over seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.statistics import confidence_interval
from fedloom.experiment.run.metrics import SCORES, Metric, Score, shown_metrics
from fedloom.experiment.run.result import Comparison, PairedDifference
from fedloom.report import formatting as fmt
from fedloom.report.formatting import NONE
from fedloom.report.page import PageCell, PageTable, cells
from fedloom.report.styles import series_style

ONE_SEED = (
    "One seed cannot tell a difference between methods from chance: repeat the comparison with "
    "other seeds."
)
LOWER = "A lower {} is better: a difference below 0 favors the first method."
"""With the names of such scores."""


EVERYBODY = "One model for everybody?"
"""The question that rows of everybody answer, where own rows lead."""


@dataclass(frozen=True)
class Verdict:
    """The best method of a comparison and its lead over the second best.

    Attributes:
        winner: the method with the best mean of the main metric.
        text: the lead, its 95 % interval and the number of seeds.
        decided: whether the interval excludes 0, and the methods were compared on equal terms.
    """

    winner: str
    text: str
    decided: bool


def verdict(found: Comparison) -> Verdict | None:
    """The verdict on the main metric; None if no two methods have a seed in common."""
    score, ranked = metrics(found)[found.metric], found.ranking
    if len(ranked) < 2:
        return None
    first, second = ranked[:2]
    lead = _paired(found, first.name, second.name)
    if not lead:
        return None
    lead = [-value for value in lead] if score.lower else lead
    mean, ends = float(np.mean(lead)), confidence_interval(lead, score.largest)
    gain = fmt.difference(mean, score.share)
    by = f"{first.name} lower by {gain} than" if score.lower else f"{first.name} {gain} over"
    by = f"{by if any(lead) else f'{first.name} level with'} {second.name} in {found.measured_in}"
    unfair = f"Not an equal comparison ({'; '.join(found.unequal)}): " if found.unequal else ""
    if ends is None:
        return Verdict(first.name, f"{unfair}{by}, 1 seed: too few to rule out chance", False)
    between = fmt.between(*ends, score.share)
    start = "" if ends[0] > 0 or unfair else "No clear winner: "
    text = f"{unfair}{start}{by}, 95{fmt.NBSP}% {between}, {len(lead)} seeds"
    return Verdict(first.name, text, ends[0] > 0 and not unfair)


def _paired(found: Comparison, first: str, second: str) -> list[float]:
    """The first method minus the second on their common seeds, from the differences to the
    reference.
    """
    a, b = found.below.get(first, {}), found.below.get(second, {})
    return [b[seed] - a[seed] for seed in a if seed in b]


def metrics(found: Comparison) -> dict[Metric, Score]:
    """The metrics to show, the main one first: all scores, or the main accuracy and those of
    evaluation modes.
    """
    if found.joint:
        return {
            name: score
            for name, score in SCORES.items()
            if any(name in m.scores for m in found.methods)
        }
    if not found.personal and not found.metric.own:
        return {
            found.metric: Score(
                found.metric.mean, fmt.capital(found.metric.noun), found.metric.share
            )
        }
    every = dict.fromkeys(
        [found.metric, *(metric for m in found.methods for metric in m.accuracies)]
    )
    if found.metric.own:  # the question on one model for everybody comes next
        every = dict.fromkeys([found.metric, found.on_test, *every])
    names = shown_metrics(every, bool(found.unseen))
    return {name: Score(name.mean, fmt.capital(found.describe(name)), name.share) for name in names}


def methods_table(found: Comparison, titles: Mapping[Metric, str]) -> PageTable:
    """A row for each method: the metrics in `titles`, the main one first, and costs; the best
    values are marked.

    Columns: Method, [Preset], [Mode]; for the main metric its title, s.d. over clients, [s.d. over
    seeds], for each other one its title; [Seeds]; bytes by direction, Time, Failures. Those in
    brackets are there if they tell methods apart. A row is built in the same order.
    """
    methods, several = found.methods, found.several_seeds
    # of joint methods the caption says how many seeds there are, unless their numbers differ
    seeds = several and (not found.joint or len({len(method.seeds) for method in methods}) > 1)
    presets = len({method.preset for method in methods}) > 1
    # by method, the evaluation mode of its main metric; empty if all have the same
    modes = {name: mode for mode, names in found.by_mode.items() for name in names}
    columns = ["Method", *(["Preset"] if presets else []), *(["Mode"] if modes else [])]
    main = next(iter(titles))
    for metric, title in titles.items():
        columns += [title, *([] if found.joint or metric != main else ["s.d. over clients"])]
        columns += ["s.d. over seeds"] if several and metric == main and not found.joint else []
    columns += ["Seeds"] if seeds else []
    # bytes between peers, where any method has such messages
    directions = [
        "up",
        "down",
        *(["across"] if any(method.bytes.across for method in methods) else []),
    ]
    columns += [*(f"Sent {direction}" for direction in directions), "Time", "Failures"]
    best = {
        metric: _best(metric, [spread.mean for spread in found.values(metric).values()])
        for metric in titles
    }

    rows = []
    for number, method in enumerate(methods):  # by number, its color in all figures
        # its method as the tooltip, and a sample of its line in figures, without text, as the key
        row = [PageCell(method.name, title=method.method, key=series_style(number).key("").sample)]
        row += cells(
            *([method.preset] if presets else []), *([modes[method.name]] if modes else [])
        )
        for metric in titles:
            # None: the method has no such metric; `share`: its values are shown in percent
            spread, share = method.of(metric), metric.share
            text = (
                NONE
                if spread is None
                else fmt.spread(spread.mean, spread.std_over_seeds if found.joint else None, share)
            )
            row.append(
                PageCell(
                    text,
                    best=spread is not None and len(methods) > 1 and spread.mean == best[metric],
                )
            )
            # The main metric of clients is one that every method has, so these cells are never
            # missing from a row.
            if metric == main and not found.joint and spread is not None:
                row += cells(fmt.standard_deviation(spread.std_over_clients, share))
                row += (
                    cells(fmt.standard_deviation(spread.std_over_seeds, share)) if several else []
                )
        row += cells(str(len(method.seeds))) if seeds else []
        sizes = [getattr(method.bytes, direction) for direction in directions]
        row += [PageCell(fmt.size(count), fmt.exact_bytes(count)) for count in sizes]
        row += cells(fmt.duration(method.seconds), fmt.whole(method.failures))
        rows.append(row)
    # methods all of whose runs were left out: a name, why, and empty cells to the end
    for lost, how in found.without_result.items():
        row = cells(lost, *[NONE] * (presets + bool(modes)), how)
        rows.append([*row, *cells(*[NONE] * (len(columns) - len(row)))])

    # The caption says what the rows have in common: whose predictions, of which rows. With several
    # metrics their titles say the rows.
    title = fmt.capital(main.noun)
    caption = (
        "Predictions of the active party on the test rows"
        if found.joint
        else f"{title} {found.describe(main)}"
    )
    caption = f"{title} by test rows" if not found.joint and len(titles) > 1 else caption
    caption += ", ± s.d. over seeds" if found.joint and several else ""
    caption += "; tensor data and wall time of one run, failures in all runs"
    caption += "" if presets else f"; preset {methods[0].preset}"
    # the first columns are words, which stand at the left; numbers stand at the right
    return PageTable(caption, columns, rows, words=1 + presets + bool(modes))


def _best(metric: Metric, values: Sequence[float]) -> float:
    return (min if metric.lower_is_better else max)(values, default=np.nan)


def difference_tables(found: Comparison) -> list[PageTable]:
    """The paired differences of each metric, with their intervals."""
    pairs = {found.metric: found.differences, **found.further}
    return [
        _pairs(found, name, score, pairs[name])
        for name, score in metrics(found).items()
        if name in pairs
    ]


def _pairs(
    found: Comparison, name: Metric, score: Score, differences: Sequence[PairedDifference]
) -> PageTable:
    several = any(len(d.per_seed) > 1 for d in differences)
    columns = [f"First {fmt.MINUS} other", "Points" if score.share else "Difference"]
    columns += ["s.d. over seeds", "95 % interval", "Better in seeds"] if several else []
    columns += [] if found.joint else ["s.d. over clients", "Clients better"]
    rows = []
    for d in differences:
        row = [
            f"{d.first} {fmt.MINUS} {d.other}",
            NONE if d.mean is None else fmt.difference(d.mean, score.share),
        ]
        if several:
            ends = confidence_interval(d.per_seed, score.largest)
            better = sum((value < 0 if score.lower else value > 0) for value in d.per_seed)
            between = fmt.between(*ends, score.share) if ends else NONE
            row += [
                fmt.standard_deviation(d.std_over_seeds, score.share),
                between,
                f"{better}/{len(d.per_seed)}",
            ]
        if not found.joint:
            row += [
                fmt.standard_deviation(d.std_over_clients, score.share),
                f"{d.clients_better}/{d.clients}",
            ]
        rows.append(cells(*row))
    apart = found.personal or found.metric.own
    caption = f"{score.title}{f': {name.noun}' if apart else ''} of the first minus the other"
    if name == found.on_test and found.metric.own:
        caption = f"{EVERYBODY} {caption}"
    caption += ", in percentage points" if score.share else ""
    caption += f", on the same data and seed{'; lower is better' if score.lower else ''}"
    return PageTable(caption, columns, rows)


def better_at(d: PairedDifference) -> str:
    """At how many clients the first method is better, `better at 3 of 5 clients`."""
    level = f" and level at {d.clients_level}" if d.clients_level else ""
    return f"better at {d.clients_better}{level} of {d.clients} clients"


def conclusions(found: Comparison) -> list[str]:
    """The conclusion that each difference of the main metric supports."""
    score = metrics(found)[found.metric]
    return [conclusion(d, score.share, score.lower, found.measured) for d in found.differences]


def conclusion(
    d: PairedDifference, share: bool = True, lower: bool = False, measured: str = ""
) -> str:
    """The conclusion that a difference of accuracies supports, or of errors in the label's unit, of
    which a `lower` one is better.
    """
    if d.mean is None:
        return f"{d.first} and {d.other} have no seed in common and cannot be paired."
    size = f"{100 * abs(d.mean):.1f} points" if share else fmt.metric(abs(d.mean), False)
    words = ("worse than", "better than") if lower else ("above", "below")
    by = f"{size} {words[d.mean < 0]}" if d.mean else "level with"
    other = f"{d.other} in {measured}" if measured else d.other
    ends = confidence_interval(d.per_seed, 1.0 if share else math.inf)
    if ends is None:
        better = f", and {better_at(d)}" if d.clients > 1 else ""
        return f"{d.first} is {by} {other} in the one seed{better}."
    start = f"Over {fmt.times(len(d.per_seed), 'seed')}, {d.first} is on average {by} {other}"
    between = f"95 % interval {fmt.between(*ends, share)}"
    if ends[0] <= 0 <= ends[1]:
        same = min(d.per_seed) > 0 or max(d.per_seed) < 0
        between += ", though all seeds agree in sign," if same else ""
        return f"{start}, but the {between} contains 0: these seeds do not show which is better."
    return (
        f"{start} ({between}): larger than the variation over seeds, on this data and in this "
        "setting."
    )
