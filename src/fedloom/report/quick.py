"""Pictures and cards of results in a notebook."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from fedloom.experiment import pictures
from fedloom.experiment.cards import html_card
from fedloom.experiment.config.spoken import in_python
from fedloom.experiment.run.metrics import GLOBAL
from fedloom.experiment.run.result import Comparison, RunSummary
from fedloom.report import formatting as fmt
from fedloom.report.results import conclusions, metrics


def learning(rows: Sequence[Sequence[Any]], s: RunSummary) -> Figure:
    """The main metric of a run by iteration, with ± one standard deviation over clients, and the
    chance level.
    """
    main = GLOBAL if s.scores else s.main
    points = {(row[1], row[4]): row[5] for row in rows if row[3] == ""}
    x = sorted({iteration for iteration, metric in points if metric == main.mean})
    y = [points[at, main.mean] for at in x]
    figure, axes = pictures.axes()
    axes.plot(x, y, marker="o" if len(x) < 30 else None, color=pictures.BLUE)
    if all((at, main.std) in points for at in x):
        spread = [points[at, main.std] for at in x]
        ends = [[value + sign * d for value, d in zip(y, spread, strict=True)] for sign in (-1, 1)]
        axes.fill_between(x, *ends, color=pictures.BLUE, alpha=0.16, linewidth=0)
    if (chance := s.chance_of(main)) is not None:
        axes.axhline(chance, color="gray", linestyle=":", label=f"always {s.most_frequent(main)}")
        axes.legend(frameon=False)
    axes.set(xlabel="iteration", ylabel="accuracy", title=f"{s.name}: accuracy {s.describe(main)}")
    return figure


def methods(found: Comparison) -> Figure:
    """The mean of the main metric of each method, with ± one standard deviation over seeds."""
    values = found.values(found.metric)
    figure, axes = pictures.axes()
    for number, one in enumerate(values.values()):
        axes.errorbar(
            one.mean, number, xerr=one.std_over_seeds, marker="o", color=pictures.BLUE, capsize=4
        )
    axes.set_yticks(range(len(values)), [*values])
    axes.invert_yaxis()
    axes.set(
        xlabel=fmt.capital(found.measured),
        title="Mean ± s.d. over seeds" if found.several_seeds else "One seed",
    )
    return figure


def comparison_card(found: Comparison, verdict: str) -> str:
    """The verdict, a row for each method, and what the differences support, as HTML."""
    score, values = metrics(found)[found.metric], found.values(found.metric)
    rows = []
    for m in found.methods:
        one = values[m.name]
        shown = fmt.spread(one.mean, one.std_over_seeds, score.share)
        rows.append(
            [m.name, shown, str(len(m.seeds)), fmt.size(m.bytes.sent), fmt.duration(m.seconds)]
        )
    rows += [
        [name, how, fmt.NONE, fmt.NONE, fmt.NONE] for name, how in found.without_result.items()
    ]
    lines = [] if found.joint else conclusions(found)
    return html_card(
        verdict,
        [*lines, *map(in_python, found.remarks)],
        ["method", score.title, "seeds", "sent", "time"],
        rows,
    )
