"""Results of a comparison in a terminal."""

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedloom.experiment.run.metrics import MAIN_MODE, SCORES, UNADAPTED, Metric
from fedloom.experiment.run.result import Comparison, PairedDifference
from fedloom.report import formatting as fmt
from fedloom.report.page import PageTable, cells
from fedloom.report.results import EVERYBODY, better_at, methods_table, metrics, verdict

SHORT = {
    "balanced accuracy": "balanced",
    "calibration error": "calib.",
    "seen accuracy": "seen",
    "rare recall": "rare",
}
"""Headings of scores, where the title is long."""
MOST_LEARNED = 40
"""Rows of a table of what was learned."""
OMITTED = (
    "s.d. over clients",
    "Seeds",
    "Time",
    "Sent across",
    "Sent down",
    "Sent up",
    "Preset",
    "s.d. over seeds",
)
"""Columns that move to a second table if the first is too wide, in this order."""


def show_comparison(content: Mapping[str, Any], out: Console, unseen: Sequence[str] = ()) -> None:
    """Show the content of `comparison.json`: the verdict, a row for each method, and paired
    differences.

    `unseen` names the owners that take part in no round, if the config does. The main metric comes
    first. Nothing is truncated; columns that do not fit stand in tables below.
    """
    found = Comparison(**content)
    best = verdict(found)
    if best is not None:
        out.print(f"\n[bold]{escape(_plain(best.text))}[/]", soft_wrap=True)
    titles = _scores(found) if found.joint else _accuracies(found)
    shown = methods_table(found, titles)
    if found.joint:  # deviations of the first score only, to fit 80 characters
        rows = [
            [*row[:2], *(replace(c, text=c.text.partition(f"{fmt.NBSP}±")[0]) for c in row[2:])]
            for row in shown.rows
        ]
        shown = replace(shown, rows=rows)
    failed = any(m.failures for m in found.methods)
    _show(shown, out, omitted=() if failed else ("Failures",))
    _show_networks(found, out)
    for seed, clients in found.unseen.items():
        out.print(
            f"seed {seed}: unseen in training: "
            f"{fmt.together(unseen) or fmt.clients_named(clients)}",
            soft_wrap=True,
        )
    first = found.methods[0]
    own = first.own_chances.get("unseen", first.own_chance)
    main = found.on_test
    mine = found.mine.replace("own class", "the own")
    on_own = f" (on {mine}: {_shown(main, own)})" if own is not None and len(titles) > 1 else ""
    what = found.most_frequent(main)
    out.print(f"always predicting {what}: {_shown(main, first.chance)}{on_own}", soft_wrap=True)
    for remark in found.remarks:
        out.print(remark, markup=False, soft_wrap=True)
    for m in found.methods:
        for eval_mode, on in m.alone.items():
            unaligned = "" if on.own is None else f", {_shown(main, on.own.mean)} on unaligned rows"
            text = (
                f"{m.name}, each party {eval_mode}: {_shown(main, on.test.mean)} on the test "
                f"rows{unaligned}"
            )
            out.print(text, markup=False, soft_wrap=True)
    if found.joint:
        _show_score_differences(found, titles, out)
        if lower := [SCORES[name].title.lower() for name in titles if SCORES[name].lower]:
            out.print(f"{fmt.together(lower)}: lower is better")
        return
    _show_differences(found, found.metric, found.differences, out)
    if found.for_everybody:
        out.print(f"{EVERYBODY} {fmt.capital(main.noun)} {found.describe(main)}:", markup=False)
        _show_differences(found, main, found.for_everybody, out)


def _show_differences(
    found: Comparison, metric: Metric, differences: Sequence[PairedDifference], out: Console
) -> None:
    """The paired differences of a metric, a line for each pair."""
    what, share = "" if metric == found.on_test else f" of {metric}", metric.share
    for d in differences:
        deviation = fmt.standard_deviation(d.std_over_seeds, share)
        spread = "" if d.std_over_seeds is None else f" ± {deviation} over {len(d.per_seed)} seeds"
        unit = " points" if share else f" {metric.noun}"
        mean = (
            "no common seed"
            if d.mean is None
            else f"{fmt.difference(d.mean, share)}{unit}{what}{spread}"
        )
        out.print(f"{d.first} - {d.other}: {mean}; {better_at(d)}", markup=False)


def show_learned(tables: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Show the tables of what a server has learned, of each the first `MOST_LEARNED` rows; no
    number is cut off.
    """
    say = partial(out.print, markup=False, highlight=False, soft_wrap=True)
    for found in tables:
        lines = [
            found["columns"],
            *(list(map(fmt.value, row)) for row in found["rows"][:MOST_LEARNED]),
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        out.print(f"\n[bold]{escape(found['title'])}[/]")
        for name, *cells_ in lines:
            say(
                f"  {name:<{widths[0]}}  "
                f"{'  '.join(f'{c:>{w}}' for c, w in zip(cells_, widths[1:], strict=True))}"
            )
        if (rest := len(found["rows"]) - MOST_LEARNED) > 0:
            say(f"  … and {rest} more rows, in the report and in result.json")


def line(content: Mapping[str, Any]) -> str:
    """The result in `comparison.json` in one line: the verdict or, without one, the main metric of
    each method.
    """
    found = Comparison(**content)
    best, score = verdict(found), metrics(found)[found.metric]
    values = found.values(found.metric)
    texts = [
        f"{name}: {found.metric} {_plain(fmt.metric(value.mean, score.share))}"
        for name, value in values.items()
    ]
    return _plain(best.text) if best else "; ".join(texts)


def _accuracies(found: Comparison) -> dict[Metric, str]:
    """The accuracies of horizontal methods and their headings. With unseen clients, training
    clients have one column only, to fit 80 characters.
    """
    names = {metric: metric.eval_mode for m in found.methods for metric in m.eval_modes}
    private = any(m.private_rows for m in found.methods)  # there is no global test set
    tested = "own" if private else "global"
    beside = {**({} if private else {found.on_own: "own"}), found.on_test: tested}
    if found.unseen and names:
        trained = found.metric.training
        kept = {metric: heading for metric, heading in names.items() if not metric.group}
        kept |= {trained: "training"} if trained in names else {}
        names = kept if found.metric in kept else {**kept, found.on_test: tested}
    elif names:
        names |= beside
    elif found.metric.own:
        names = dict(beside)
    if found.by_mode:
        names = {
            found.metric: MAIN_MODE,
            **({} if found.unseen or private else {found.on_own: UNADAPTED}),
            found.on_test: tested,
        }
    names = names or {found.on_test: fmt.capital(found.on_test.noun)}
    return dict(sorted(names.items(), key=lambda pair: pair[0] != found.metric))


def _scores(found: Comparison) -> dict[Metric, str]:
    """The scores of vertical methods and their headings."""
    scores = metrics(found)
    if Metric("rare recall") in scores:  # to fit 80 characters
        scores = {
            one: score
            for one, score in scores.items()
            if one.name not in ("balanced accuracy", "auc")
        }
    return {one: SHORT.get(one.name, score.title) for one, score in scores.items()}


def _show(shown: PageTable, out: Console, omitted: Collection[str] = ()) -> None:
    """Print a table of the page without the columns `omitted`. In a narrow terminal, columns that
    `OMITTED` names, and then all that do not fit, stand in further tables below it, each with the
    first column.
    """
    every = [n for n, name in enumerate(shown.columns) if name not in omitted]
    later = [n for name in OMITTED for n in every if shown.columns[n] == name]
    for count in range(len(later) + 1):
        kept = [n for n in every if n not in later[:count]]
        if _fits(shown, kept, out):
            break
    for columns in _pieces(shown, [*kept[1:], *(n for n in every if n not in kept)], out):
        out.print(_table(shown, [0, *columns], fold=not _fits(shown, [0, *columns], out)))


def _pieces(shown: PageTable, columns: Sequence[int], out: Console) -> Iterator[list[int]]:
    """Groups of columns, each as many as fit beside the first column, and at least one."""
    piece: list[int] = []
    for n in columns:
        if piece and not _fits(shown, [0, *piece, n], out):
            yield piece
            piece = []
        piece.append(n)
    if piece:
        yield piece


def _fits(shown: PageTable, kept: Sequence[int], out: Console) -> bool:
    return (
        out.measure(_table(shown, kept), options=out.options.update(width=1000)).maximum
        <= out.width
    )


def _table(shown: PageTable, kept: Sequence[int], fold: bool = False) -> Table:
    """The columns `kept` of a table of the page; with `fold` cells that are wider than the terminal
    are continued in the next line.
    """
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for n in kept:
        heading = textwrap.fill(shown.columns[n], 10)
        table.add_column(
            heading,
            justify="left" if n < shown.words else "right",
            no_wrap=not fold or n > 0,
            overflow="fold",
        )
    for row in shown.rows:
        texts = [escape(_plain(row[n].text)) for n in kept]
        table.add_row(
            *(
                f"[bold]{text}[/]" if row[n].best else text
                for n, text in zip(kept, texts, strict=True)
            )
        )
    return table


def _show_networks(found: Comparison, out: Console) -> None:
    """The accuracy by the clients' network or black box, and the gain over a method."""
    rows = [
        cells(
            name,
            str(count),
            *(fmt.with_gain(mean, gain, found.metric.share) for mean, gain in values),
        )
        for name, count, values in found.networks
    ]
    table = PageTable("", ["model", "clients", *(m.name for m in found.methods)], rows)
    if not rows:
        return
    _show(table, out)
    if found.gains_over and len(found.methods) > 1:
        text = (
            f"in brackets: gain over {found.gains_over}{' in points' * found.metric.share}, same "
            "clients"
        )
        out.print(text, markup=False, soft_wrap=True)


def _show_score_differences(found: Comparison, titles: Mapping[Metric, str], out: Console) -> None:
    """The paired differences of all scores, a row for each pair."""
    every = {found.metric: found.differences, **found.further}
    pairs = {name: every[name] for name in titles if name in every}
    rows = []
    for each in zip(*pairs.values(), strict=True):
        texts = [f"{each[0].first} - {each[0].other}"]
        for name, d in zip(pairs, each, strict=True):
            share = SCORES[name].share
            spread = (
                ""
                if d.std_over_seeds is None
                else f" ±{fmt.standard_deviation(d.std_over_seeds, share)}"
            )
            texts.append("" if d.mean is None else fmt.difference(d.mean, share) + spread)
        rows.append(cells(*texts))
    if rows:
        _show(PageTable("", ["Difference", *(titles[name] for name in pairs)], rows), out)


def _shown(metric: Metric, value: float) -> str:
    return fmt.metric(value, metric.share, "")


def _plain(text: str) -> str:
    """The text without non-breaking spaces, which a terminal breaks at: `86.7% ±2.0`, `7.68 MB`."""
    return text.replace(f"{fmt.NBSP}%", "%").replace(f"±{fmt.NBSP}", "±").replace(fmt.NBSP, " ")
