"""What `fedloom trial` prints: the answer, a card for each owner, and what to do next."""

import ast
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding

from fedloom.cli.options import out, plain_table

if TYPE_CHECKING:
    from fedloom.experiment.trial import TrialResult

COLORS = {
    "join": "green",
    "same": "blue",
    "alone": "yellow",
    "undecided": "cyan",
    "too few": "cyan",
}
MANY = 10
"""More owners have a line each, not a card."""
_SETTING = r"(?<![\w.'\"])data\.(label|group|id|drop|keep|missing_words|missing_columns|missing|task|decimal|encode)\b"  # noqa: E501
_NAMES = {"missing_words": "missing-word", "missing_columns": "missing-columns"}


def as_options(text: str) -> str:
    """A note or an error with the options of this command in place of settings of `[data]`.

    Example:
        >>> as_options("leave out with data.drop = ['a b'], or set data.encode.zip = 'category'")
        "leave out with --drop 'a b', or set --encode zip=category"
    """

    def listed(found: re.Match[str]) -> str:
        return " ".join(
            f"--{found[1]} {shlex.quote(str(value))}" for value in ast.literal_eval(found[2])
        )

    def named(found: re.Match[str]) -> str:
        return f"--{_NAMES.get(found[1], found[1])}"

    text = re.sub(
        r"data\.encode\.([^=]+?) = '(\w+)'",
        lambda m: f"--encode {shlex.quote(f'{m[1]}={m[2]}')}",
        text,
    )
    text = re.sub(r"^(metric|worth|budget|repeats|label|group|id)(?= must)", r"--\1", text)
    text = re.sub(r"\b(label|group|id)(?=, the column)", r"--\1", text)
    text = re.sub(
        r"\bset (unit|time) = '([^']*)'", lambda m: f"add --{m[1]} {shlex.quote(m[2])}", text
    )
    text = text.replace("time = ()", "--no-time").replace(
        "name time or unit", "add --time or --unit"
    )
    text = re.sub(r"data\.(drop|keep) = (\[[^\]]*\])", listed, text)
    text = re.sub(
        _SETTING + r" = [\"'](\w+)[\"']", lambda found: f"{named(found)} {found[2]}", text
    )
    return re.sub(_SETTING, named, text)


def show(result: "TrialResult", name: str, recipe: Path | None) -> None:
    """Print a result; `recipe` is the file that has the recipe, if one was written."""
    from fedloom.experiment.trial.words import answer, gain_name, shown_gain

    owners = "columns" if result.by_columns else f"{len(result.owners)} owners"
    out.print(
        f"[bold]{escape(name)}[/]: trial of {owners}, {result.split}, {result.seconds:.0f} s",
        soft_wrap=True,
    )
    out.print(escape(answer(result)))
    if len(result.owners) > MANY:
        _show_table(result)
    else:
        _show_cards(result)
    out.print()
    gain = result.overall["gain"]
    if gain is not None:
        title = "all people" if result.by_columns else "mean over owners"
        out.print(f"{title}: {gain_name(result.metric)} {shown_gain(gain, result.metric)}")
    out.print(f"best alone: {escape(result.alone)}")
    if not result.by_columns:
        _show_cost(result)
    for note in result.notes:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    _show_next(result, recipe)


def _show_cards(result: "TrialResult") -> None:
    """Print a card for each owner."""
    from fedloom.experiment.trial.words import (
        evidence_of,
        heading,
        next_step,
        score_name,
        shown_score,
        titles,
    )

    sides = ("alone", "joint") if result.by_columns else ("alone", "federated", "pooled")
    for title, card in zip(titles(result), result.owners.values(), strict=True):
        out.print(
            f"\n[bold]{escape(title)}[/]: [{COLORS[card.decision]}]{escape(heading(card))}[/]"
        )
        values = (card.alone, card.federated, card.pooled)
        scores = [
            f"{shown_score(v, result.metric)} {side}"
            for v, side in zip(values, sides, strict=False)
            if v is not None
        ]
        below = [evidence_of(card, result.metric), next_step(card, by_columns=result.by_columns)]
        below.append(
            "; ".join(
                [
                    f"{card.rows:,} rows",
                    *([] if card.own_weight is None else [f"own weight {card.own_weight:g}"]),
                    *([f"{score_name(result.metric)} {', '.join(scores)}"] if scores else []),
                ]
            )
        )
        if card.calibration:
            errors = ", ".join(
                f"{error:.3f} {side}" for error, side in zip(card.calibration, sides, strict=False)
            )
            below.append(f"calibration error {errors}")
        for line in below:
            out.print(Padding(escape(line[0].upper() + line[1:]), (0, 0, 0, 2), expand=False))


def _show_table(result: "TrialResult") -> None:
    """Print a line for each of many owners."""
    from fedloom.experiment.trial.words import gain_name, head, probability, shown_gain, titles

    table = plain_table("owner", "decision", numbers=("gain", "low", "high", "P(gain)", "rows"))
    for title, card in zip(titles(result), result.owners.values(), strict=True):
        gains = (
            "–" if v is None else shown_gain(v, result.metric)
            for v in (card.gain, card.low, card.high)
        )
        table.add_row(
            escape(title),
            f"[{COLORS[card.decision]}]{head(card)}[/]",
            *gains,
            "–" if card.p_gain is None else probability(card.p_gain),
            f"{card.rows:,}",
        )
    out.print(
        f"\n{gain_name(result.metric)} by each owner's own rows, with its 95 % interval; P(gain) "
        "by the rows of all"
    )
    out.print(table)


def _show_cost(result: "TrialResult") -> None:
    """What joining costs, and where the messages are listed."""
    from fedloom.experiment.trial.words import method_title
    from fedloom.report import formatting as fmt

    card = next(iter(result.owners.values()))
    out.print(f"best federated: {escape(card.method)}. {escape(method_title(result))}")
    sent, received = fmt.size(card.sent, " "), fmt.size(card.received, " ")
    out.print(
        f"in a run of it an owner sends {sent} and receives {received}, computed from "
        "rows; --json lists each message"
    )


def _show_next(result: "TrialResult", recipe: Path | None) -> None:
    """The command that trains, or how to get it."""
    from fedloom.experiment.trial.words import COMPARE, adds_nothing

    if not result.by_columns and adds_nothing(result):
        out.print(f"next: train alone, with {escape(result.alone)}: federating adds nothing")
    elif recipe is None:
        out.print("next: add --out FOLDER for a page with all details, and a recipe to train")
    elif result.by_columns:
        out.print(
            f"next: {COMPARE} {shlex.quote(str(recipe))}  measures methods of columns",
            soft_wrap=True,
        )
    else:
        run = f"fedloom run {shlex.quote(str(recipe))}"
        out.print(
            f"next: {escape(run)}  trains the best federated, here with all owners' rows",
            soft_wrap=True,
        )
