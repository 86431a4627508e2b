"""What a person sees at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def show_comparison(found: dict[str, Any], out: Console) -> None:
    """The end of a run: one row for each method; the accuracies on own rows too, where a method tells ways apart.

    The measure that counts comes first and has its spread. Names are never cut: they tell methods apart. Where there is
    no room for what was sent and how long it took, the report has it.
    """
    methods = found["methods"]
    if methods[0].get("scores"):
        _show_scores(found, out)
        return
    several = len(methods[0]["seeds"]) > 1
    over = "seeds" if several else "clients"
    spread = f"std_over_{over}"

    first, names = found["measure"], _accuracies(found)
    order = sorted(names, key=lambda name: name != first)  # stable

    def drawn(costs: Sequence[str]) -> Table:
        table = _table("method", *(names[name] for name in order), *costs)
        for m in methods:
            values = {name: m["ways"].get(name.removeprefix("own accuracy ")) for name in names}
            values |= {"accuracy": m["accuracy"], "own accuracy": m["own_accuracy"]}
            accuracies = [
                "" if (v := values[n]) is None else f"{v['mean']:.1%}" + f" ±{100 * v[spread]:.1f}" * (n == first)
                for n in order
            ]
            table.add_row(m["name"], *accuracies, *(_costs(m)[cost] for cost in costs))
        return table

    failed = ["failed"] * any(m["failures"] for m in methods)
    table = drawn(["sent", "received", "s", *failed])
    wanted = out.measure(table, options=out.options.update(width=1000)).maximum
    out.print(table if wanted <= out.width else drawn(failed))
    _show_models(methods, found.get("gains_over", ""), out)
    for seed, clients in found["unseen"].items():
        out.print(f"seed {seed}: in no round, only evaluated: {named(clients)}", soft_wrap=True)
    chance = methods[0]["chance"]
    own_chance = methods[0]["own_chances"].get("unseen", methods[0]["own_chance"])
    also = f" (on the own mix: {own_chance:.1%})" if len(names) > 1 and own_chance is not None else ""
    out.print(f"± s.d. over {over}; always answering the most frequent class: {chance:.1%}{also}")
    for remark in found["remarks"]:
        out.print(remark, markup=False, soft_wrap=True)
    what = "" if found["measure"] == "accuracy" else f" of {found['measure']}"
    for d in found["differences"]:
        _show_difference(d, what, out)


def _show_models(methods: Sequence[dict[str, Any]], over: str, out: Console) -> None:
    """The accuracy by the clients' network or black box, where they have several, and the points over a method."""
    names = sorted({name for m in methods for name in m["networks"]})
    if not names:
        return
    table = _table("model", "clients", *(m["name"] for m in methods))
    for name in names:
        each = [(m["networks"].get(name), over not in ("", m["name"])) for m in methods]
        count = max(one["clients"] for one, _ in each if one)
        table.add_row(name, str(count), *(_gain(one, shown) for one, shown in each))
    if out.measure(table, options=out.options.update(width=1000)).maximum <= out.width:
        out.print(table)  # of many methods, the report has it
        if over and len(methods) > 1:
            out.print(f"in brackets: points over the same clients of {over}", markup=False, soft_wrap=True)


def _gain(one: dict[str, Any] | None, shown: bool) -> str:
    """An accuracy, and what it is more than that of the method compared with."""
    if one is None:
        return ""
    gain = one.get("gain")
    return f"{one['mean']:.1%}" + (f" ({round(100 * gain, 1) + 0.0:+.1f})" if shown and gain is not None else "")


def _accuracies(found: dict[str, Any]) -> dict[str, str]:
    """The accuracies that are shown, and their headings. Where clients are unseen, those that train have one, for the
    way that counts: 80 columns have no room for all, and the report has them."""
    ways = list(dict.fromkeys(way for m in found["methods"] for way in m["ways"]))
    if not ways:
        return {"accuracy": "accuracy"}
    trained = f"{found['measure']} training"
    names = {f"own accuracy {way}": way for way in ways}
    if found["unseen"]:
        names = {name: way for name, way in names.items() if not way.endswith(" training")} | (
            {trained: "training"} if trained in names else {}
        )
        return names if found["measure"] in names else {**names, "accuracy": "global"}
    return {**names, "own accuracy": "own", "accuracy": "global"}


def _show_difference(d: dict[str, Any], what: str, out: Console) -> None:
    spread = d["std_over_seeds"]
    over = "" if spread is None else f" ± {100 * spread:.1f} over {len(d['per_seed'])} seeds"
    out.print(
        f"{d['first']} - {d['other']}: {100 * d['mean']:+.1f} points{what}{over}; "
        f"better at {d['clients_better']} of {d['clients']} clients"
    )


def _table(*headings: str) -> Table:
    """A table of names and numbers."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _costs(m: dict[str, Any]) -> dict[str, str]:
    """What a method sent and received, seconds, and failed calls."""
    sent, received = (size(m["bytes"][way] + m["bytes"]["across"]) for way in ("up", "down"))
    return {"sent": sent, "received": received, "s": f"{m['seconds']:.0f}", "failed": str(m["failures"])}


SHORT = {
    "balanced accuracy": "balanced",
    "auc": "AUC",
    "log loss": "log-loss",
    "seen accuracy": "seen",
    "rare recall": "rare",
}
"""Headings of scores."""


def _show_scores(found: dict[str, Any], out: Console) -> None:
    """The same where parties hold different columns: scores of the active party's answers, and paired differences."""
    methods = found["methods"]
    several = len(methods[0]["seeds"]) > 1
    names = list(dict.fromkeys(name for m in methods for name in m["scores"]))
    if "rare recall" in names:  # 80 columns have no room for all; the report has them
        names = [name for name in names if name not in ("balanced accuracy", "auc")]
    headings = [SHORT.get(name, name) for name in names]
    failed = any(m["failures"] for m in methods)  # the table fits 80 columns without
    table = _table("method", *headings, "up", "down", "s", *(["failed"] if failed else []))
    for m in methods:
        scores = [_score(name, m["scores"].get(name), several and name == names[0]) for name in names]
        table.add_row(m["name"], *scores, *list(_costs(m).values())[: None if failed else -1])
    out.print(table)
    spread = "± s.d. over seeds; " if several else ""
    out.print(f"{spread}always answering the most frequent class: {methods[0]['chance']:.1%}")
    if "log loss" in names:
        out.print("of log-loss less is better")
    for m in methods:
        for way, on in m["alone"].items():
            own = "" if on["own"] is None else f", {on['own']['mean']:.1%} on its unaligned rows"
            out.print(f"{m['name']}, each party {way}: {on['test']['mean']:.1%} on the test{own}")
    pairs = {found["measure"]: found["differences"], **found["further"]}
    pairs = {name: each for name, each in pairs.items() if name in names}
    if found["differences"]:
        table = _table("difference", *(SHORT.get(name, name) for name in pairs))
        for each in zip(*pairs.values(), strict=True):
            names_of = f"{each[0]['first']} - {each[0]['other']}"
            table.add_row(names_of, *(_score(name, d, several, "+") for name, d in zip(pairs, each, strict=True)))
        out.print(table)


def _score(name: str, found: dict[str, Any] | None, spread: bool, sign: str = "") -> str:
    """A score, or a difference with its `sign`: accuracies in percent, others as they are."""
    if found is None or found["mean"] is None:
        return ""
    mean, deviation = found["mean"], found["std_over_seeds"]
    if name.endswith(("accuracy", "recall")):
        text = f"{round(100 * mean, 1) + 0.0:{sign}.1f}" + ("" if sign else "%")
        return text + (f" ±{100 * deviation:.1f}" if spread and deviation is not None else "")
    return f"{round(mean, 3) + 0.0:{sign}.3f}" + (f" ±{deviation:.3f}" if spread and deviation is not None else "")


def named(clients: Sequence[int]) -> str:
    """`client 1`, or `clients 1, 4`."""
    return f"client{'' if len(clients) == 1 else 's'} {', '.join(map(str, clients))}"


def size(count: float) -> str:
    """Bytes for people: 1.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
