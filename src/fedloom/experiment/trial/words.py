"""The result of a trial in words: scores, gains, decisions, and what to do next."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fedloom import methods
from fedloom.experiment.run.metrics import four_digits
from fedloom.experiment.trial.decide import FEWEST, Decision

if TYPE_CHECKING:
    from fedloom.experiment.trial.result import OwnerCard, TrialResult

HEADS: Final[Mapping[Decision, str]] = {
    "join": "Join",
    "alone": "Stay alone",
    "same": "No difference",
    "undecided": "Undecided",
    "too few": "Too few rows",
}
"""The decisions in words."""
RELATIVE = ("rmse", "mae")
"""Scores whose gain is the share by which they fall."""
LOSSES = (*RELATIVE, "log loss", "brier")
"""Scores of which less is better."""
NEARLY = 1.2
"""More rows by a smaller factor are not told as a number."""
NAMED = 4
"""Owners that a sentence names, at most."""
CONTENTS: Final[Mapping[str, str]] = {
    "rows": "numbers of rows",
    "t": "round",
    "all": "number of all rows",
}
"""Contents of messages whose names mislead -> what they are: no method of rows sends rows."""
COMPARE = "fedloom compare vertical-forest active-forest split --seeds 5 --config"
"""The command that measures methods of columns, before the recipe."""


def signed(value: float) -> str:
    """A difference of scores with its sign, such as "−0.012"."""
    return f"{value:+.3f}".replace("-", "−")


def score_name(metric: str) -> str:
    """The score in words."""
    return {"auc": "AUC", "brier": "Brier score", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}.get(
        metric, metric
    )


def gain_name(metric: str) -> str:
    """What a gain is in, such as "AUC" or "gain in RMSE"."""
    return f"gain in {score_name(metric)}" if metric in LOSSES else score_name(metric)


def shown_score(value: float | None, metric: str) -> str:
    """A score in a table: an error of numbers in their unit, a loss as it is, not negated."""
    if value is None:
        return "–"
    if metric in RELATIVE:
        return four_digits(-value)
    return f"{abs(value) if metric in LOSSES else value:.3f}".replace("-", "−")


def shown_gain(value: float, metric: str) -> str:
    """A gain, such as "+0.012"; for errors of numbers in percent of the error alone."""
    return f"{100 * value:+.1f} %".replace("-", "−") if metric in RELATIVE else signed(value)


def probability(value: float) -> str:
    """A probability in two digits, such as "0.93" or "> 0.99"."""
    return "> 0.99" if value > 0.995 else "< 0.01" if value < 0.005 else f"{value:.2f}"


def head(card: "OwnerCard") -> str:
    """The decision in words, never "Join" without what it holds under."""
    return f"{HEADS[card.decision]} {card.condition}".rstrip()


def heading(card: "OwnerCard") -> str:
    """The decision alone, such as "Join with fedboost" or "Undecided, leaning to join"."""
    if not _told(card):
        return HEADS["too few"]
    if card.decision == "join":
        return f"{head(card)}{',' * bool(card.condition)} with {card.method}"
    if card.by == "weight":
        return f"{HEADS['alone']}: federating adds nothing, own weight 1"
    leaning = {"join": "join", "alone": "stay alone", "same": "no difference"}.get(card.leaning)
    return f"{HEADS[card.decision]}, leaning to {leaning}" if leaning else HEADS[card.decision]


def evidence_of(card: "OwnerCard", metric: str) -> str:
    """What a decision rests on, such as "AUC +0.034 (95 % +0.010 to +0.058), P(gain) > 0.99"."""
    if not _told(card):
        others = {
            "join": ", but others gain",
            "alone": ", and others gain nothing that is worth it",
        }
        others["same"] = ", and for others it makes no difference"
        told = (
            f"{others[card.leaning]}: P(gain) {probability(card.p_gain)}"
            if card.leaning and card.p_gain
            else ""
        )
        if card.fewest >= FEWEST:
            return f"all are of one class; with {FEWEST} of another something can be said{told}"
        rarest = "" if metric in RELATIVE else " of the rarest class"
        return f"{card.fewest}{rarest}; from {FEWEST} on something can be said{told}"
    assert card.gain is not None and card.p_gain is not None
    assert card.p_worth is not None and card.p_same is not None
    interval = (
        ""
        if card.low is None or card.high is None
        else (f" (95 % {shown_gain(card.low, metric)} to {shown_gain(card.high, metric)})")
    )
    gain = f"{gain_name(metric)} {shown_gain(card.gain, metric)}{interval}"
    chances = {
        "alone": ("a gain that is worth it", card.p_worth),
        "same": ("no difference", card.p_same),
    }
    what, chance = chances.get(card.leaning or card.decision, ("gain", card.p_gain))
    if card.by == "weight":
        what, chance = "gain", card.p_gain
    more = f": {told}" if card.decision == "join" and (told := in_words(card.gain, metric)) else ""
    return f"{gain}, P({what}) {probability(chance)}{_by(card)}{more}"


def sentence(card: "OwnerCard", metric: str) -> str:
    """The card in one line, such as "Join with fedavg-ft: AUC +0.034 (95 % +0.010 to +0.058),
    P(gain) > 0.99".
    """
    return f"{heading(card)}: {evidence_of(card, metric)}"


def _told(card: "OwnerCard") -> bool:
    return card.decision != "too few" and card.gain is not None and card.p_gain is not None


def in_words(gain: float, metric: str) -> str:
    """A gain without the name of a score, such as "of 1,000 rows, 12 more are predicted right"; ""
    without words.
    """
    count = f"{round(1000 * abs(gain))} {'more' if gain > 0 else 'fewer'}"
    return {
        "auc": f"of 1,000 pairs of rows of two classes, {count} are ranked right",
        "accuracy": f"of 1,000 rows, {count} are predicted right",
        "balanced accuracy": f"of 1,000 rows with equally many of each class, {count} are predicted right",  # noqa: E501
    }.get(metric, "")


def _by(card: "OwnerCard") -> str:
    return ", with the rows of all owners" if card.by == "all" else ""


def _weight(card: "OwnerCard") -> str:
    """How much an owner's own model counts in its recipe; "" without weights of owners."""
    return "" if card.own_weight is None else f" (your own model counts {card.own_weight:g})"


def adds_nothing(result: "TrialResult") -> bool:
    """Whether the recipe for federating is training alone for each owner."""
    return all(card.own_weight == 1.0 for card in result.owners.values())


def next_step(card: "OwnerCard", *, by_columns: bool = False) -> str:
    """What to do now, in one sentence."""
    if by_columns and card.decision == "join":
        return "Measure methods of columns with the recipe, and train the best."
    if card.decision == "join":
        if card.partners is not None and card.partners.advised:
            return (
                f"Train exchange with {', '.join(card.partners.advised)} only, and compare on "
                "your next rows."
            )
        return f"Train the recipe{_weight(card)}, and compare on your next rows."
    if card.decision == "alone":
        return "Train alone."
    if card.decision == "same":
        return "Do what is simpler; others may still gain from your rows."
    if card.decision == "too few":
        return (
            f"Collect {'rows of another class' if card.fewest >= FEWEST else 'more rows'}, and "
            "try again."
        )
    if card.more_rows is None:
        return "Decide by cost: not even 100 times these rows would surely tell."
    if card.more_rows < NEARLY * card.rows:
        return "These rows nearly decide: collect some more, and try again."
    digits = 10 ** max(0, len(str(card.more_rows)) - 2)
    return (
        f"About {-(-card.more_rows // digits) * digits:,} rows of yours would decide; there are "
        f"{card.rows:,}."
    )


def answer(result: "TrialResult") -> str:
    """The answer in a few sentences, for somebody who has never heard of federated learning."""
    if result.by_columns:
        said = {
            "join": "The partners' columns help: with them, predictions are better.",
            "alone": "The partners' columns do not help: train on your own.",
            "same": "The partners' columns make no difference.",
        }
        return said.get(
            result.owners["all people"].decision,
            "These rows do not decide whether the partners' columns help.",
        )
    owners = result.owners
    of = {kind: [name for name, card in owners.items() if card.decision == kind] for kind in HEADS}
    if len(of["undecided"]) == len(owners):
        return (
            "These rows do not decide whether any owner gains by learning "
            f"together.{_leaning(result)}"
        )
    conditions = {card.condition for card in owners.values() if card.condition}
    under = "".join(f", {condition}" for condition in sorted(conditions))
    told = [
        (f"{{}} gain{{s}} by learning together{under}: {{names}}.", of["join"]),
        ("For {} it makes no difference: {names}.", of["same"]),
        ("{} should train alone: {names}.", of["alone"]),
        (f"For {{}} these rows do not decide: {{names}}.{_leaning(result)}", of["undecided"]),
        ("{} {have} too few rows for an answer: {names}.", of["too few"]),
    ]
    return " ".join(_of_all(text, names, len(owners)) for text, names in told if names)


def _of_all(text: str, names: Sequence[str], count: int) -> str:
    """The text with the number of these owners, of all, and their names."""
    one = len(names) == 1 < count
    number = "all owners" if len(names) == count else f"{len(names)} of {count} owners"
    filled = text.format(
        number, names=some(names, NAMED), s="s" if one else "", have="has" if one else "have"
    )
    return filled[0].upper() + filled[1:]


def _leaning(result: "TrialResult") -> str:
    """How many undecided owners lean to what, such as " 4 lean to join."; "" if none do."""
    to = {"join": "join", "same": "no difference", "alone": "staying alone"}
    found = [card.leaning for card in result.owners.values() if card.decision == "undecided"]
    counts = [(found.count(kind), said) for kind, said in to.items() if kind in found]
    return (
        f" Probable, but not shown: {', '.join(f'{said} for {count}' for count, said in counts)}."
        if counts
        else ""
    )


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def titles(result: "TrialResult") -> list[str]:
    """The owners' names; beside numbers the name of their column, such as "site 3"."""
    column = result.recipe.get("data", {}).get("group")
    return [f"{column} {name}" if column and name.isdigit() else name for name in result.owners]


def method_title(result: "TrialResult") -> str:
    """What the best federated method is, in a sentence."""
    return methods.named(result.recipe["method"]).title


def contents(message: Mapping[str, Any]) -> str:
    """What a message of `TrialResult.revealed` has, in words that do not mislead."""
    return ", ".join(CONTENTS.get(name, name) for name in message["content"].split(", "))
