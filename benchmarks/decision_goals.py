"""The outcomes of simulated trials: archives, decisions by true gain, and the goals of
`benchmarks.decisions`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from scipy import stats

from fedloom.experiment.trial.decide import Decision

Key: TypeAlias = tuple[str, str, int, int]
"""Score, design, seed and number of a federation."""
BANDS = ((-np.inf, 0.0), (0.0, 0.01), (0.01, 0.03), (0.03, np.inf))
BAND_NAMES = ("≤ 0", "0 to .01", ".01 to .03", "≥ .03")
WORTH = 0.01
FALSE_JOINS, WRONG_ALONES, COVERAGE, JOINS = 0.025, 0.01, (0.94, 0.97), (0.5, 0.7)
"""The goals: shares of owners with a gain of 0 or less that join, and of those with a gain of
`WORTH` or more that are told to stay alone, at most; of intervals that hold the true gain; of the
upper two `BANDS` that join, at least.
"""


@dataclass(frozen=True)
class Outcome:
    """What one owner is told, and what is true.

    Attributes:
        decision, gain, low, high: as told.
        true: the true gain.
        own, all: the power of the best tests by its own rows and by those of all owners: see
            `benchmarks.decisions`.
        mixed: the true gain of the model of all rows with a weight of the own model for each owner.
        p_gain: P(gain > 0) as told.
    """

    decision: Decision
    gain: float
    low: float
    high: float
    true: float
    own: float
    all: float
    mixed: float
    p_gain: float


def line_of(key: Key, owners: Sequence[Outcome]) -> str:
    """A federation as a line of an archive; a number that is not known is null."""
    rounded = [
        [x if isinstance(x, str) else round(x, 5) if np.isfinite(x) else None for x in astuple(o)]
        for o in owners
    ]
    line = {**dict(zip(("score", "design", "seed", "number"), key, strict=True)), "owners": rounded}
    return json.dumps(line, separators=(",", ":")) + "\n"


def read(files: Sequence[Path]) -> dict[Key, list[Outcome]]:
    """The federations of archives; nothing of a file that does not exist yet."""
    found: dict[Key, list[Outcome]] = {}
    for file in files:
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            line = json.loads(text)
            owners = [
                Outcome(one[0], *(np.nan if x is None else x for x in one[1:]))
                for one in line["owners"]
            ]
            found[line["score"], line["design"], line["seed"], line["number"]] = owners
    return found


def by_design(found: Mapping[Key, Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """The owners of each design, and at last of all."""
    designs: dict[str, list[Outcome]] = {}
    for (_, design, _, _), owners in found.items():
        designs.setdefault(design, []).extend(owners)
    return {**designs, "all": [one for owners in designs.values() for one in owners]}


def table(found: Mapping[Key, Sequence[Outcome]]) -> str:
    """Decisions by true gain, for each design and for all. Last, what joining by the model of all
    rows with a weight
    for each owner costs at most: how many lose more than `WORTH`, and more than half of their own
        95 % interval, too.
    """
    bands = ", ".join(BAND_NAMES)
    lines = [
        f"| design | owners | by true gain: {bands} | join | same | alone | undecided | mix: < "
        "−.01, < −noise, least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, owners in by_design(found).items():
        true = np.array([one.true for one in owners])
        mixed = np.array([one.mixed for one in owners])
        decision = np.array([one.decision for one in owners])
        noise = np.array([one.high - one.gain for one in owners])
        inside = [(true > low) & (true <= high) for low, high in BANDS]
        shares = (
            " ".join(
                f"{(decision[band] == kind).mean():.3f}" if band.any() else "–" for band in inside
            )
            for kind in ("join", "same", "alone", "undecided")
        )
        lines.append(
            f"| {name} | {len(owners)} | {' '.join(str(band.sum()) for band in inside)} | "
            f"{' | '.join(shares)} | {(mixed < -WORTH).mean():.3f} "
            f"{(mixed < -np.maximum(noise, WORTH)).mean():.3f} {np.nanmin(mixed):+.3f} |"
        )
    return "\n".join(lines)


def at_most(count: int, of: int) -> float:
    """The upper limit of the exact 95 % interval of a share."""
    return 1.0 if count == of else float(stats.beta.ppf(0.975, count + 1, of - count))


def rate(count: int, of: int, goal: float) -> str:
    """A share that is to be at most `goal`, its upper limit, and whether the goal is met."""
    if not of:
        return "no such owner"
    limit = at_most(count, of)
    said = "met" if limit <= goal else "so far" if count / of <= goal else "**not met**"
    return f"{count} of {of} (≤ {limit:.3f}), {said}"


def share(values: Sequence[bool], ceiling: Sequence[float], goal: float) -> str:
    """A share that is to be at least `goal`, what the best rule reaches, and whether the goal is
    met.
    """
    if not values:
        return "no such owner"
    found, most = float(np.mean(values)), float(np.mean(ceiling))
    return (
        f"{found:.2f} of {len(values)}, best {most:.2f}, "
        f"{'met' if found >= goal else '**not met**'}"
    )


def goals(found: Mapping[Key, Sequence[Outcome]]) -> str:
    """For each design which goals are met, and which joins are false: see the module, and
    `benchmarks.decisions` for the best rule.
    """
    low, high = COVERAGE
    lines = [
        f"| design | joins with gain ≤ 0, ≤ {FALSE_JOINS:.1%} | of joins | alone with gain ≥ .01, "
        f"≤ {WRONG_ALONES:.0%} | coverage, {low} to {high} | joins of .01 to .03, ≥ {JOINS[0]} "
        f"| joins of ≥ .03, ≥ {JOINS[1]} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, owners in by_design(found).items():
        none = [one for one in owners if one.true <= 0]
        large = [one for one in owners if one.true >= WORTH]
        told = [one.low <= one.true <= one.high for one in owners if np.isfinite(one.gain)]
        covered = float(np.mean(told)) if told else np.nan
        upper = [
            share(
                [one.decision == "join" for one in band],
                [max(one.own, one.all) for one in band],
                goal,
            )
            for band, goal in (
                ([one for one in owners if BANDS[2][0] < one.true <= BANDS[2][1]], JOINS[0]),
                ([one for one in owners if one.true > BANDS[3][0]], JOINS[1]),
            )
        ]
        joined, wrongly = (sum(one.decision == "join" for one in some) for some in (owners, none))
        false = f"{rate(wrongly, len(none), FALSE_JOINS)} | {wrongly} of {joined}"
        wrong = rate(sum(one.decision == "alone" for one in large), len(large), WRONG_ALONES)
        said = "met" if low <= covered <= high else "above" if covered > high else "**not met**"
        lines.append(
            f"| {name} | {false} | {wrong} | {covered:.3f}, {said} | {' | '.join(upper)} |"
        )
    small = [owners[0] for (_, design, _, _), owners in found.items() if design == "one small"]
    gaining = [one for one in small if one.true >= WORTH]
    if gaining:
        of = {kind: sum(one.decision == kind for one in gaining) for kind in ("join", "alone")}
        lines.append(
            f"\nThe small owner among large ones, of {len(gaining)} that gain .01: {of['join']} "
            f"join, {of['alone']} alone."
        )
    return "\n".join(lines)
