"""Results of a comparison in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedloom.experiment.metrics import GLOBAL, OWN, SCORES, TRAINING, Score
from fedloom.experiment.result import Comparison, MethodSummary, PairedDifference, SeedSpread
from fedloom.report import formatting as fmt

ACCURACY = Score("", "")
SHORT = {
    "balanced accuracy": "balanced",
    "auc": "AUC",
    "log loss": "log-loss",
    "seen accuracy": "seen",
    "rare recall": "rare",
}
"""Headings of scores."""
WIDE = 1000
"""A width that fits every table."""


def show_comparison(content: Mapping[str, Any], out: Console) -> None:
    """Show the content of `comparison.json`: one row per method, then paired differences.

    The main metric comes first, with its deviation. Names are never truncated; columns that do not fit are omitted.
    """
    found = Comparison(**content)
    if found.joint:
        _show_scores(found, out)
    else:
        _show_accuracies(found, out)


def _show_accuracies(found: Comparison, out: Console) -> None:
    """Horizontal methods: accuracies, also on own rows for methods with evaluation modes."""
    over = "seeds" if len(found.methods[0].seeds) > 1 else "clients"
    headings = _headings(found)
    order = sorted(headings, key=lambda name: name != found.measure)  # stable

    def table(costs: Sequence[str]) -> Table:
        table = _table("method", *(headings[name] for name in order), *costs)
        for m in found.methods:
            values = {name: m.accuracies.get(name) for name in order}
            deviation = getattr(values[order[0]], f"std_over_{over}", None)
            texts = [_value(value.mean if value else None) for value in values.values()]
            texts[0] += (
                "" if deviation is None or found.measure != order[0] else f" ±{fmt.standard_deviation(deviation)}"
            )
            table.add_row(m.name, *texts, *(_costs(m)[cost] for cost in costs))
        return table

    failed = ["failed"] * any(m.failures for m in found.methods)
    whole = table(["sent", "received", "s", *failed])
    out.print(whole if _fits(whole, out) else table(failed))
    _show_networks(found, out)
    for seed, clients in found.unseen.items():
        out.print(f"seed {seed}: held out from training: {fmt.clients_named(clients)}", soft_wrap=True)
    first = found.methods[0]
    own_chance = first.own_chances.get("unseen", first.own_chance)
    also = f" (on the own mix: {_value(own_chance)})" if len(headings) > 1 and own_chance is not None else ""
    out.print(f"± s.d. over {over}; always answering the most frequent class: {_value(first.chance)}{also}")
    for remark in found.remarks:
        out.print(remark, markup=False, soft_wrap=True)
    what = "" if found.measure == GLOBAL else f" of {found.measure}"
    for d in found.differences:
        spread = "" if d.std_over_seeds is None else f" ± {100 * d.std_over_seeds:.1f} over {len(d.per_seed)} seeds"
        mean = "no common seed" if d.mean is None else f"{fmt.points(d.mean)} points{what}{spread}"
        out.print(f"{d.first} - {d.other}: {mean}; better at {d.clients_better} of {d.clients} clients")


def _headings(found: Comparison) -> dict[str, str]:
    """The accuracies shown and their headings. With unseen clients, training clients have one column only, to fit 80
    characters."""
    names = {
        f"{OWN} {eval_mode}": eval_mode
        for eval_mode in dict.fromkeys(eval_mode for m in found.methods for eval_mode in m.eval_modes)
    }
    if not names:
        return {GLOBAL: "accuracy"}
    if not found.unseen:
        return {**names, OWN: "own", GLOBAL: "global"}
    trained = f"{found.measure}{TRAINING}"
    shown = {name: eval_mode for name, eval_mode in names.items() if not eval_mode.endswith(TRAINING)}
    shown |= {trained: "training"} if trained in names else {}
    return shown if found.measure in shown else {**shown, GLOBAL: "global"}


def _show_networks(found: Comparison, out: Console) -> None:
    """The accuracy by the clients' network or black box, and the gain over a method."""
    table = _table("model", "clients", *(m.name for m in found.methods))
    for name, count, values in found.networks:
        table.add_row(
            name, str(count), *("" if mean is None else fmt.with_gain(mean, gain, "") for mean, gain in values)
        )
    if found.networks and _fits(table, out):
        out.print(table)
        if found.gains_over and len(found.methods) > 1:
            out.print(
                f"in brackets: gain over {found.gains_over} in points, same clients", markup=False, soft_wrap=True
            )


def _show_scores(found: Comparison, out: Console) -> None:
    """Vertical methods: scores of the joint prediction, and paired differences."""
    methods, several = found.methods, len(found.methods[0].seeds) > 1
    names = list(dict.fromkeys(name for m in methods for name in m.scores))
    if "rare recall" in names:  # to fit 80 characters
        names = [name for name in names if name not in ("balanced accuracy", "auc")]
    costs = ["up", "down", "s", *(["failed"] if any(m.failures for m in methods) else [])]
    table = _table("method", *(SHORT.get(name, name) for name in names), *costs)
    for m in methods:
        scores = [_score(SCORES[name], m.scores.get(name), several and name == names[0]) for name in names]
        table.add_row(m.name, *scores, *list(_costs(m).values())[: len(costs)])
    out.print(table)
    spread = "± s.d. over seeds; " if several else ""
    out.print(f"{spread}always answering the most frequent class: {_value(methods[0].chance)}")
    if "log loss" in names:
        out.print("log-loss: less is better")
    for m in methods:
        for eval_mode, on in m.alone.items():
            own = "" if on.own is None else f", {_value(on.own.mean)} on its unaligned rows"
            out.print(f"{m.name}, each party {eval_mode}: {_value(on.test.mean)} on the test rows{own}")
    pairs = {name: each for name, each in {found.measure: found.differences, **found.further}.items() if name in names}
    if found.differences:
        table = _table("difference", *(SHORT.get(name, name) for name in pairs))
        for each in zip(*pairs.values(), strict=True):
            differences = [_score(SCORES[name], d, several) for name, d in zip(pairs, each, strict=True)]
            table.add_row(f"{each[0].first} - {each[0].other}", *differences)
        out.print(table)


def _score(score: Score, found: SeedSpread | PairedDifference | None, spread: bool) -> str:
    """A score, or a difference with its sign."""
    if found is None or found.mean is None:
        return ""
    text = fmt.difference(found.mean, score.share) if isinstance(found, PairedDifference) else _value(found.mean, score)
    shown = spread and found.std_over_seeds is not None
    return text + (f" ±{fmt.standard_deviation(found.std_over_seeds, score.share)}" if shown else "")


def _value(value: float | None, score: Score = ACCURACY) -> str:
    """`86.7%` or `0.962`."""
    return "" if value is None else fmt.metric(value, score.share).replace(fmt.NBSP, "")


def _costs(m: MethodSummary) -> dict[str, str]:
    """Bytes sent and received, seconds, and failed calls of a method."""
    sent, received = (fmt.size(count + m.bytes.across, " ") for count in (m.bytes.up, m.bytes.down))
    return {"sent": sent, "received": received, "s": f"{m.seconds:.0f}", "failed": str(m.failures)}


def _table(*headings: str) -> Table:
    """An empty table: a column of names, then columns of numbers."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _fits(table: Table, out: Console) -> bool:
    return out.measure(table, options=out.options.update(width=WIDE)).maximum <= out.width
