"""A comparison for a paper: a LaTeX table, the BibTeX entries of its methods, and
figures as PDF.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedloom._version import __version__
from fedloom.core.statistics import confidence_interval
from fedloom.experiment.cards import latex_escaped
from fedloom.experiment.run.metrics import Score
from fedloom.experiment.run.result import Comparison
from fedloom.experiment.run.tuning import TUNED
from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.comparison_page import curves
from fedloom.report.learning import iteration_axis
from fedloom.report.plots import Level, Line
from fedloom.report.read import Run
from fedloom.report.results import metrics
from fedloom.report.svg import drawing
from fedloom.support.paths import write_atomically

SELF = f"""@software{{fedloom,
  author  = {{{{The fedloom developers}}}},
  title   = {{fedloom: federated learning beyond weight averaging}},
  version = {{{__version__}}},
  url     = {{https://github.com/fedloom/fedloom}}
}}
"""
"""The entry of this library."""


JOURNALS = ("JSAC", "TNSE", "TPAMI")
"""Venues that are no conferences."""


def write(folder: Path, found: Comparison, runs: Sequence[Run]) -> list[Path]:
    """Write `table.tex`, `references.bib` and, if the runs' files exist, `accuracy.pdf`; returns
    their paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"table.tex": latex(found).encode(), "references.bib": bibtex(found).encode()}
    for name, content in files.items():
        write_atomically(folder / name, content)
    written = [folder / name for name in files]
    if runs:
        written.append(folder / "accuracy.pdf")
        _figure(found, runs, written[-1])
    return written


def latex(found: Comparison) -> str:
    r"""The methods as a table of the package `booktabs`: the main metric and its standard deviation
    over seeds, the paired difference of the first method with its 95 % interval, and bytes sent.
    The caption says what was measured, and what was not equal; `\cite` keys are those of `bibtex`.
    """
    score = metrics(found)[found.metric]
    unit = r" (\%)" if score.share else ""
    differences = {d.other: d for d in found.differences}
    values = found.values(found.metric)
    means = [one.mean for one in values.values()]
    best = min(means) if score.lower else max(means)
    lines = []
    for m in found.methods:
        one, d = values[m.name], differences.get(m.name)
        value = _number(one.mean, one.std_over_seeds, score)
        shown = rf"\textbf{{{value}}}" if one.mean == best and len(values) > 1 else value
        keys = ",".join(dict.fromkeys(map(cite_key, cited(m.paper))))
        key = f"~\\cite{{{keys}}}" if keys else ""
        pair = "--" if d is None or d.mean is None else _interval(d.mean, d.per_seed, score)
        sent = fmt.size(m.bytes.sent, "~")
        lines.append(f"    {latex_escaped(m.name)}{key} & {shown} & {pair} & {sent} \\\\")
    lines += [
        f"    {latex_escaped(name)} & {how} & -- & -- \\\\"
        for name, how in found.without_result.items()
    ]
    return "\n".join(
        (
            r"% needs \usepackage{booktabs}; written by fedloom " + __version__,
            r"\begin{table}[t]",
            r"  \centering",
            r"  \setlength{\belowcaptionskip}{6pt}",
            f"  \\caption{{{_caption(found, score)}}}",
            r"  \label{tab:comparison}",
            r"  \begin{tabular}{lccr}",
            r"    \toprule",
            f"    Method & {latex_escaped(score.title)}{unit} & {latex_escaped(found.reference)} "
            "$-$ other & Sent \\\\",
            r"    \midrule",
            *lines,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        )
    )


def _number(mean: float, deviation: float | None, score: Score) -> str:
    scale, digits = (100, 1) if score.share else (1, 3)
    text = f"{scale * mean:.{digits}f}"
    return text if deviation is None else f"{text} $\\pm$ {scale * deviation:.{digits}f}"


def _interval(mean: float, per_seed: Sequence[float], score: Score) -> str:
    """`$+2.7$ [$+1.1$, $+4.3$]`, in percentage points of shares."""
    ends = confidence_interval(per_seed, score.largest)
    texts = [
        fmt.difference(mean, score.share),
        *(fmt.bound(end, score.share) for end in ends or ()),
    ]
    shown = [f"${text.replace(fmt.MINUS, '-')}$" for text in texts]
    return shown[0] if ends is None else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _caption(found: Comparison, score: Score) -> str:
    seeds = max(len(m.seeds) for m in found.methods)
    what = "Scores of the joint prediction" if found.joint else fmt.capital(found.measured_in)
    spread = f", mean $\\pm$ s.d.\\ over {seeds} seeds" if seeds > 1 else ", one seed"
    pair = "difference on the same data and seed" + (
        " with its 95\\,\\% interval" if seeds > 1 else ""
    )
    points = " in percentage points" if score.share else ""
    unfair = f" Not equal: {latex_escaped('; '.join(found.unequal))}." if found.unequal else ""
    alike = "".join(
        f" {fmt.capital(latex_escaped(text))}." for text in found.remarks if text.startswith(TUNED)
    )
    return (
        f"{latex_escaped(what)}{spread}; paired {pair}{points}; tensor data sent by all "
        f"clients.{alike}{unfair}"
    )


def cited(paper: str) -> list[str]:
    """The papers that a method's citation names, each as `A. Author, B. Author: Title,
    Venue 2024`.
    """
    parts = re.split(r"; (?:as )?", paper.removeprefix("of this library, after "))
    return [part.replace(" adapt it in: ", ": ") for part in parts if ": " in part]


def cite_key(paper: str) -> str:
    """The BibTeX key of a paper, such as `han2024fedal`."""
    authors, _, title = paper.partition(": ")
    name = unicodedata.normalize(
        "NFKD", authors.split(",")[0].split(" et al")[0].split()[-1].lower()
    )
    year = re.search(r"\b(19|20)\d\d\b", title)
    word = next((w for w in re.findall(r"[a-z]+", title.lower()) if len(w) > 3), "")
    return f"{re.sub(r'[^a-z]', '', name)}{year[0] if year else ''}{word}"


def bibtex(found: Comparison) -> str:
    """The BibTeX entries of the methods' papers, as `fedloom list methods` cites them, and of
    fedloom.
    """
    papers = {cite_key(paper): paper for m in found.methods for paper in cited(m.paper)}
    return "\n".join([*map(entry, papers.values()), SELF])


def entry(paper: str) -> str:
    """The BibTeX entry of a paper."""
    authors, _, rest = paper.partition(": ")
    title, venue, year = rest, "", ""
    if ending := re.search(r",\s*(?:([A-Z][^,\d]*?)\s+)?((?:19|20)\d\d)\b[^,]*$", rest):
        title, venue, year = rest[: ending.start()], ending[1] or "", ending[2]
    names = authors.replace(" et al.", ", others").split(", ")
    kind, place = (
        ("article", "journal")
        if venue in JOURNALS
        else ("inproceedings", "booktitle")
        if venue
        else ("misc", "")
    )
    fields = {"author": " and ".join(names), "title": f"{{{title}}}", place: venue, "year": year}
    shown = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
    return f"@{kind}{{{cite_key(paper)},\n" + ",\n".join(shown) + "\n}\n"


@drawing()
def _figure(found: Comparison, runs: Sequence[Run], path: Path) -> None:
    """The main metric by iteration, in the width of a column (3.4 inches), with fonts
    that print.
    """
    import matplotlib
    from matplotlib.figure import Figure

    main = found.on_test if found.joint else found.metric
    score = (
        metrics(found)[main] if found.joint else Score(main.mean, f"Mean {main.noun}", main.share)
    )
    lines, chance = curves(found, runs, main, score), found.chance_of(main)
    levels = [] if chance is None else [Level("chance", chance)]
    with matplotlib.rc_context({"font.size": 8, "pdf.fonttype": 42}):
        figure = Figure(figsize=(3.4, 2.3), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line)
        for level in levels:
            axes.axhline(
                level.y, color="black", linewidth=0.8, linestyle=(0, (1, 2)), label=level.label
            )
        form = plots.share if score.share else None
        plots.scale(axes, lines, levels, form)
        axes.set_xlabel("round" if found.joint else iteration_axis(runs[0]), color="black")
        axes.set_ylabel(score.title, color="black")
        axes.tick_params(colors="black")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, labelcolor="black")
        figure.savefig(
            path, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None}
        )


def _draw(axes: object, line: Line) -> None:
    style = replace(line.style, shape=None).options(0)
    axes.plot(line.x, line.y, linewidth=1.2, label=line.label, **style | {"clip_on": True})  # type: ignore[attr-defined]
    if line.band is not None:
        low, high = np.clip(line.y - line.band, 0, None), line.y + line.band
        axes.fill_between(line.x, low, high, color=line.style.color, alpha=0.16, linewidth=0)  # type: ignore[attr-defined]
