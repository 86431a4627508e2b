"""Test a paper's claims on our runs, by paired differences over seeds."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report.metrics import RunMetric
from fedloom_papers.results import TableResults
from fedloom_papers.spec import AT, Claim
from fedloom_papers.table import as_printed
from fedloom_papers.units import Unit
from fedloom_papers.verdicts import (
    OPPOSITE,
    RELEVANT,
    UNTESTED,
    WIDE,
    Decision,
    Rule,
    Verdict,
    conjunction,
    corrected,
    decide_claim,
    holm,
    on_stand_in,
    untested,
)

ROUNDING = 1e-12
"""Relative difference below which two sides are equal up to rounding."""
MACHINE = ("processor", "cores", "platform", "cuda")
"""Keys of a run's environment that tell its machine."""
Cells = list[tuple[str, str]]
Term = tuple[float, Cells, float]
"""A term of a difference: its factor, its cells, which are averaged, or a number if it has none."""


@dataclass(frozen=True)
class ClaimResult:
    """A claim and its verdict.

    Attributes:
        compared: the two sides of the difference.
        gate: name of the failed gate of a claim that could not be tested: interval, runs,
            comparable, tuning, test rows, machine, chance, headroom, spread, measured or finite.
        printed: the paper's difference in the unit, if it prints both sides, for the data that were
            used.
        seeds: difference by seed, in the unit; None if not finite.
        counted: number of seeds that count; later ones wait for the next look.
        needed: number of seeds that would decide an undecided claim.
        ratio: left divided by right, if the claim has a factor.
        left_out: columns without runs, if the claim names no columns.
        at_chance: columns left out of the mean, as a network there is not above always predicting
            the most frequent class.
        data: the data sets that were used, and those of the paper if they differ.
        found: the result in a few words.
        evidence: equal for claims decided by the same runs in the same way; empty if runs are
            missing.
        bed: the data sets that were used.
        stand_in: whether they stand in for the paper's.
        fact: whether it is about bytes or the data alone, and not about what a method learns.
        question: equal for claims that ask the same in different settings.
        beside: what a reader needs beside the verdict: alone, oracle, and the method's own
            diagnoses.
        settled: whether more seeds would be no further look.
        headline: whether it is on the overview of all papers.
    """

    text: str
    compared: str
    verdict: Verdict
    gate: str
    printed: float | None
    mean: float | None
    ends: tuple[float, float] | None
    seeds: Mapping[int, float | None]
    unit: str
    counted: int = 0
    needed: int | None = None
    ratio: float | None = None
    left_out: tuple[str, ...] = ()
    at_chance: tuple[str, ...] = ()
    data: str = ""
    found: str = ""
    evidence: str = ""
    rule: Rule = "more"
    bed: str = ""
    stand_in: bool = False
    fact: bool = False
    question: str = ""
    beside: str = ""
    settled: bool = True
    headline: bool = False

    @property
    def said(self) -> str:
        """The verdict in words: `not seen on Fashion-MNIST`; with the gate if one failed."""
        if self.gate:
            return f"{self.verdict} ({self.gate})"
        return (
            f"{self.verdict} on {self.bed}"
            if self.verdict in ("seen", "not seen")
            else self.verdict
        )


def check_claims(claims: Sequence[Claim], found: TableResults) -> tuple[ClaimResult, ...]:
    """Test the claims of a table, with Holm's correction over those that different runs decide."""
    every = [ClaimTest(claim, found) for claim in claims]
    decisions = [test.decision() for test in every]
    families: dict[str, list[int]] = {}
    for at, (test, decision) in enumerate(zip(every, decisions, strict=True)):
        if decision.verdict != UNTESTED or decision.gate == WIDE:
            families.setdefault(test.evidence, []).append(at)
    rejected = holm([decisions[same[0]].p for same in families.values()])
    for same, one in zip(families.values(), rejected, strict=True):
        for at in same:
            decisions[at] = corrected(decisions[at], one, len(families))
    return tuple(test.result(decision) for test, decision in zip(every, decisions, strict=True))


def check_claim(claim: Claim, found: TableResults) -> ClaimResult:
    """Test one claim alone."""
    test = ClaimTest(claim, found)
    return test.result(test.decision())


def _cells_of(parts: Sequence[Sequence[Term]]) -> Cells:
    """The distinct cells of all terms."""
    return list(dict.fromkeys(cell for part in parts for _, cells, _ in part for cell in cells))


class ClaimTest:
    """A claim on the runs of a table."""

    def __init__(self, claim: Claim, found: TableResults) -> None:
        self.claim, self.found = claim, found
        self.unit = found.unit if claim.unit is None else Unit(claim.unit)
        self.metric = RunMetric.parse(claim.metric) if claim.metric else found.reproduction.measured
        self.timed = "seconds" in (self.metric.cost, self.metric.metric.name)
        self.columns, self.left_out = self._columns()
        self.at_chance, self.low = self._at_chance()
        self.columns = [column for column in self.columns if column not in self.at_chance]
        self.parts = self._parts()
        self.cells = _cells_of(self.parts)
        self.effects = self._printed()
        columns = {column for _, column in self.cells}
        # What is sent until an accuracy is reached depends on what a method learns. Bytes do not,
        # nor on the data.
        self.fact = self.metric.exact and not self.metric.cost
        self.stand_in = found.stands_in(columns) and not (
            self.fact and self.metric.metric.name.startswith("bytes")
        )
        known = [effect for effect in self.effects if effect is not None]
        least = max if claim.rule == "less" else min
        self.printed = least(known) if len(known) == len(self.parts) and not self.stand_in else None
        self.evidence = self._evidence()
        self.differences: list[dict[int, float]] = []

    def _columns(self) -> tuple[list[str], tuple[str, ...]]:
        """The columns to average over, those of the claim or all with runs of its rows; and those
        without runs.
        """
        claim, places = self.claim, self.found.places
        if claim.columns is not None:
            return list(claim.columns), ()
        rows = [side for side in claim.sides if AT not in side]
        every = [column.name for column in self.found.reproduction.columns]
        able = [
            c
            for c in every
            if not any(at in places and places[at].cell.untestable for at in ((r, c) for r in rows))
        ]
        return able, tuple(c for c in every if c not in able) if rows else ()

    def _parts(self) -> list[list[Term]]:
        """The terms of each difference."""
        return [self._terms(right) for right in self.claim.rights]

    def _terms(self, right: str | float) -> list[Term]:
        """The terms of left minus right, less the difference of the contrast."""
        signed: list[tuple[float, str | float]] = [
            (1.0, self.claim.left),
            (-self.claim.times, right),
        ]
        if self.claim.than is not None:
            signed += [(-1.0, self.claim.than[0]), (1.0, self.claim.than[1])]
        return [
            (factor, self._cells(side), 0.0 if isinstance(side, str) else side)
            for factor, side in signed
        ]

    def _cells(self, side: str | float) -> Cells:
        """The cells of a side; empty for a number."""
        if not isinstance(side, str):
            return []
        row, _, column = side.partition(AT)
        return [(row, column)] if column else [(row, column) for column in self.columns]

    def _printed(self) -> list[float | None]:
        """The paper's difference in each part; None if it does not print all cells."""
        if (
            self.claim.printed is not None
            or self.claim.metric is not None
            or self.claim.unit is not None
        ):
            # it is that of all columns
            return [None if self.at_chance else self.claim.printed] * len(self.parts)
        published = {
            (row.name, column): value[0] if isinstance(value, tuple) else value
            for row in self.found.reproduction.rows
            for column, value in row.published.items()
        }
        if not self.cells or any(cell not in published for cell in self.cells):
            return [None] * len(self.parts)
        return [
            sum(
                factor * (float(np.mean([published[c] for c in cells])) if cells else n)
                for factor, cells, n in part
            )
            for part in self.parts
        ]

    def _deviation(self, part: Sequence[Term]) -> float:
        """The standard deviation of the printed difference; 0 if the paper prints none, or the file
        the difference.
        """
        if self.claim.printed is not None or self.stand_in:
            return 0.0
        rows = {row.name: row.published for row in self.found.reproduction.rows}
        total = 0.0
        for factor, cells, _ in part:
            for row, column in cells:
                value = rows[row].get(column)
                total += (factor * value[1] / len(cells)) ** 2 if isinstance(value, tuple) else 0.0
        return math.sqrt(total)

    def _evidence(self) -> str:
        """A hash of the claim's runs, metric and rule."""
        places = [self.found.places.get(at) for at in self.cells]
        if not self.cells or any(place is None or not place.attempts for place in places):
            return ""
        names = {
            at: [one.folder.name for one in self.found.places[at].attempts] for at in self.cells
        }
        terms = [
            [[f, sorted(n for c in cells for n in names[c]), x] for f, cells, x in part]
            for part in self.parts
        ]
        key = [
            terms,
            self.claim.rule,
            self.claim.by,
            self.printed,
            str(self.metric),
            self.unit.name,
        ]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def decision(self) -> Decision:
        """The verdict before any correction."""
        claim, found = self.claim, self.found
        if claim.incomparable:
            return untested("comparable", claim.incomparable.rstrip("."))
        if why := claim.untestable.get(found.scale) or self._missing():
            return untested("runs", why.rstrip("."))
        tuned = {row: found.row(row).tuned.get(found.scale, 0) for row, _ in self.cells}
        if len({*tuned.values()}) > 1:
            return untested(
                "tuning", f"settings tried: {', '.join(f'{row} {n}' for row, n in tuned.items())}"
            )
        if self._unpaired():
            return untested("test rows", "runs of one seed have different test rows")
        if self.timed and self._machines() > 1:
            return untested("machine", "times of one seed are from different machines")
        self.differences = [self._by_seed(part) for part in self.parts]
        attempts = [one for at in self.cells for one in found.places[at].attempts]
        seeds = {one.config.seed for one in attempts[: self._planned()]} | {*range(self._planned())}
        if lacking := len(seeds - set[int].intersection(*({*part} for part in self.differences))):
            return untested("runs", f"{lacking} of {len(seeds)} seeds are missing")
        if self.low:
            return untested("chance", self.low)
        parts = zip(self.parts, self.differences, self.effects, strict=True)
        return conjunction([self._part(*part) for part in parts])

    def _part(
        self, part: Sequence[Term], by_seed: Mapping[int, float], printed: float | None
    ) -> Decision:
        """The verdict on one difference."""
        claim, differences = self.claim, [*by_seed.values()]
        ours = [*self._mean(part[0]).values()]
        if (
            claim.rule == "more"
            and len(ours) > 1
            and not any(ours)
            and self.unit.name == "%"
            and claim.than is None
        ):
            zero = Decision(
                "not reproduced",
                float(np.mean(differences)),
                None,
                "0 in every seed",
                p=0.0,
                seeds=len(ours),
            )
            return on_stand_in(zero) if self.stand_in else zero
        constant = (
            len(differences) > 1 and len({*differences}) == 1 and math.isfinite(differences[0])
        )
        if constant and not self.metric.exact:
            return untested("spread", "all seeds have the same difference")
        size = None if self.stand_in else printed
        decision = self._decided(part, differences, size)
        room, unit = self._headroom(part), self.unit
        goal = abs(size) if size is not None else claim.by or RELEVANT
        if room is not None and room < goal and self._doubtful(decision, goal):
            above = f"no row is more than {unit.number(max(0.0, room), goal)}{unit.apart} above"
            if size is not None:
                # The size could not appear. The side can, as on data for which none is printed.
                side = self._decided(part, differences, None)
                enough = room >= (claim.by or RELEVANT)
                if side.verdict == "reproduced" or (side.verdict != UNTESTED and enough):
                    known = f"{side.why}; " if side.why else ""
                    why = f"{known}{unit.difference(size)} could not have appeared, as {above}"
                    return replace(on_stand_in(side), why=why)
            if not self.stand_in:
                above = f"the effect needs {unit.number(goal)}, and {above}"
            return replace(
                decision, verdict=UNTESTED, gate="headroom", why=above, p=1.0, needed=None
            )
        return on_stand_in(decision) if self.stand_in else decision

    def _decided(
        self, part: Sequence[Term], differences: Sequence[float], printed: float | None
    ) -> Decision:
        """The verdict of the interval, before the gate of headroom."""
        claim = self.claim
        decision = decide_claim(
            differences,
            claim.rule,
            planned=self._planned(),
            by=claim.by,
            printed=printed,
            deviation=self._deviation(part),
            relevant=RELEVANT if self.unit.name == "%" else None,
        )
        if decision.why != OPPOSITE or claim.times == 1:
            return decision
        # A factor that is not reached is no opposite, if the sides are in the claimed order.
        left, right = (float(np.mean([*self._mean(term).values()])) for term in part[:2])
        ordered = left > right if claim.rule == "more" else left < right
        return replace(decision, why="less than the claimed factor") if ordered else decision

    @staticmethod
    def _doubtful(decision: Decision, goal: float) -> bool:
        """Whether a verdict needs a row that is as far above as the effect. The other side of a
        claim needs none if it is as far away itself.
        """
        opposite = decision.why == OPPOSITE and abs(decision.mean or 0.0) >= goal
        return decision.verdict not in ("reproduced", UNTESTED) and not opposite

    def _planned(self) -> int:
        """The number of seeds of the first look."""
        file = self.found.reproduction.scale(self.found.scale).seeds
        return file if self.found.asked.seeds is None else min(file, self.found.asked.seeds)

    def _missing(self) -> str:
        """Why a cell has no value; empty if all have one."""
        for at in self.cells:
            place, name = self.found.places.get(at), AT.join(at)
            if place is None:
                return f"{name} is not selected"
            if place.cell.untestable:
                return f"{name}: {place.cell.untestable}"
            if not place.records:
                return f"{name}: {place.missing[0].problem if place.missing else 'not run'}"
        if not self.cells:
            why = [
                place.cell.untestable
                for place in self.found.places.values()
                if place.cell.untestable
            ]
            return why[0] if why else "no column to compare"
        return ""

    def _unpaired(self) -> bool:
        """Whether cells of a column have different test rows in one seed."""
        tests: dict[tuple[str, int], set[tuple[str, str | None]]] = {}
        for at in self.cells:
            for record in self.found.places[at].records:
                tests.setdefault((at[1], record.seed), set()).add(
                    (record.dataset, record.test_sha256)
                )
        return any(len(rows) > 1 for rows in tests.values())

    def _machines(self) -> int:
        """The largest number of machines that made the runs of one seed."""
        made: dict[int, set[tuple[object, ...]]] = {}
        for record in (record for at in self.cells for record in self.found.places[at].records):
            made.setdefault(record.seed, set()).add(
                tuple(record.environment.get(name) for name in MACHINE)
            )
        return max(map(len, made.values()))

    def _mean(self, term: Term) -> dict[int, float]:
        """The mean over a term's cells, for each seed that all have; empty for a number."""
        own = self.claim.metric is None and self.claim.unit is None
        each = [
            (
                self.found.numbers[at]
                if own
                else self.found.number(*at, self.metric, self.unit.name)
            ).by_seed
            for at in term[1]
        ]
        both = set[int].intersection(*({*one} for one in each)) if each else set[int]()
        return {seed: float(np.mean([one[seed] for one in each])) for seed in sorted(both)}

    def _by_seed(self, part: Sequence[Term]) -> dict[int, float]:
        """The difference for each seed, without rounding errors; nan if both sides are equally
        infinite.
        """
        known = [(term[0], self._mean(term), term[2]) for term in part]
        seeds = set[int].intersection(
            *({*values} for term, (_, values, _) in zip(part, known, strict=True) if term[1])
        )
        found = {}
        for seed in sorted(seeds):
            terms = [factor * values.get(seed, number) for factor, values, number in known]
            total = sum(terms)
            size = max(map(abs, terms))
            found[seed] = 0.0 if math.isfinite(size) and abs(total) <= ROUNDING * size else total
        return found

    def _at_chance(self) -> tuple[tuple[str, ...], str]:
        """The columns to leave out of a mean, as a network there is at chance; and why the claim
        fails the gate, if so.

        It fails if no column is left, and if a column that were left out would speak against the
        claim.
        """
        parts = self._parts()
        low = {at: why for at in _cells_of(parts) if (why := self._low(at))}
        columns = tuple(column for column in self.columns if any(at[1] == column for at in low))
        if any(AT in side for side in self.claim.sides) or len(columns) == len(self.columns):
            return (), next(iter(low.values()), "")
        against = [
            column for column in columns if any(self._against(part, column, low) for part in parts)
        ]
        if against and self.metric.is_level:
            return (), next(why for at, why in low.items() if at[1] == against[0])
        return columns, ""

    def _low(self, at: tuple[str, str]) -> str:
        """How far the accuracy of a cell with all seeds is below always predicting the most
        frequent class, or equal; empty if it is above.
        """
        if at not in self.found.places or len(self.found.places[at].records) < self._planned():
            return ""
        chance = self.found.chance(at[1], self.metric)
        mean = self.found.number(*at, self.metric.drawn, "%").mean if chance is not None else None
        if chance is None or mean is None or mean > 100 * chance:
            return ""
        frequent = f"always predicting the most frequent class has {100 * chance:.1f} %"
        return f"{AT.join(at)} has {mean:.1f} %, and {frequent}"

    def _against(self, part: Sequence[Term], column: str, low: Collection[tuple[str, str]]) -> bool:
        """Whether in a column the claimed side of a difference is at chance and the other is above
        it; for a claim of equality, whether one side is.
        """
        more, less = (
            [
                any(at in low for at in cells if at[1] == column)
                for factor, cells, _ in part
                if sign * factor > 0
            ]
            for sign in (1, -1)
        )
        up, down = (any(one) and not all(other) for one, other in ((more, less), (less, more)))
        return {"more": up, "less": down, "within": up or down}[self.claim.rule]

    def _headroom(self, part: Sequence[Term]) -> float | None:
        """Points between the lower side of the claim and the best row of the table, which may be an
        oracle, in the same columns; of a difference of differences, in the first of them. None if
        the claim is not of this kind.
        """
        claim, found = self.claim, self.found
        low = part[1] if claim.rule == "more" else part[0]
        if claim.rule == "within" or claim.times != 1 or self.unit.name != "%" or not low[1]:
            return None
        measured = self.metric.metric.name.casefold()
        if measured != "auc" and ("accuracy" not in measured or "discriminator" in measured):
            return None
        tops = [self._known((row, column) for row in found.rows) for _, column in low[1]]
        return float(np.mean([max(top) for top in tops])) - float(
            np.mean([*self._mean(low).values()])
        )

    def _known(self, cells: Iterable[tuple[str, str]]) -> list[float]:
        """The finite means of cells that were run, in the metric and unit of the claim."""
        own = self.claim.metric is None and self.claim.unit is None
        found = [
            (
                self.found.numbers[at]
                if own
                else self.found.number(*at, self.metric, self.unit.name)
            ).mean
            for at in cells
            if at in self.found.places
        ]
        return [value for value in found if value is not None and math.isfinite(value)]

    def _beside(self) -> str:
        """`alone 62.7, oracle 74.9, discriminator accuracy 0.17`: means over the columns of the
        claim.
        """
        about, texts = self.found.reproduction, []
        columns = list(dict.fromkeys(column for _, column in self.cells))
        if self.unit.name == "%" and self.metric.is_level:
            for name, row in (("alone", about.alone), ("oracle", about.oracle)):
                known = self._known((row, column) for column in columns)
                if known and len(known) == len(columns):
                    texts.append(f"{name} {self.unit.number(float(np.mean(known)))}")
        row = self.claim.left.partition(AT)[0]
        for name in about.diagnoses:
            cells = [
                self.found.number(row, c, RunMetric.parse(name), "").mean
                for c in columns
                if self._has(row, c)
            ]
            values = [value for value in cells if value is not None]
            if values and len(values) == len(columns):
                texts.append(f"{name} {fmt.number(float(np.mean(values)), '.2f')}")
        return ", ".join(texts)

    def _has(self, row: str, column: str) -> bool:
        return (row, column) in self.found.places

    def _question(self) -> str:
        """What the claim asks, without its setting: the rows without their variants, such as `FedAL
        against FedMD`.
        """
        claim = self.claim
        rights = [right.partition(AT)[0] for right in claim.rights if isinstance(right, str)]
        left = claim.left.partition(AT)[0]
        if not rights:
            return f"{left}: {self._measured()}"
        if {left} == {*rights}:
            return f"{left}, {self.found.reproduction.across or 'settings'} against each other"
        if claim.than is not None:
            return f"where {left} gains most over {rights[0]}"
        plain, others = left.partition(",")[0], [right.partition(",")[0] for right in rights]
        against = fmt.together(rights if [plain] == others else others)
        text = f"{left if [plain] == others else plain} against {against}"
        return f"{text}: {self._measured()}" if self.metric.exact else text

    def _measured(self) -> str:
        """`bytes until an accuracy`, `bytes up`, or an accuracy's name."""
        if self.metric.cost:
            return f"{self.metric.cost} until an accuracy"
        return self.metric.metric.name if self.metric.exact else str(self.metric.drawn)

    def result(self, decision: Decision) -> ClaimResult:
        """The claim with its verdict, for the page."""
        by_seed = self.differences[0] if self.differences else {}
        if len(self.differences) > 1:  # the part that decides
            means = {
                at: float(np.mean([*part.values()])) for at, part in enumerate(self.differences)
            }
            by_seed = self.differences[
                min(means, key=lambda at: abs(means[at] - (decision.mean or 0.0)))
            ]
        ratio = None
        if self.claim.times != 1 and self.differences:
            counted = [*self.differences[0]][: decision.seeds or None]
            sides = (self._mean(term) for term in self.parts[0][:2])
            above, below = (sum(values.get(seed, 0.0) for seed in counted) for values in sides)
            ratio = (
                above / below if below and math.isfinite(above) and math.isfinite(below) else None
            )
        return ClaimResult(
            text=self.claim.text,
            compared=self._compared(),
            verdict=decision.verdict,
            gate=decision.gate,
            printed=self.printed,
            mean=decision.mean,
            ends=decision.ends,
            seeds={
                seed: value if math.isfinite(value) else None for seed, value in by_seed.items()
            },
            unit=self.unit.name,
            counted=decision.seeds,
            needed=decision.needed,
            ratio=ratio,
            left_out=self.left_out,
            at_chance=self.at_chance,
            data=self.found.data_used({column for _, column in self.cells}),
            found=self._sentence(decision, ratio),
            evidence=self.evidence,
            rule=self.claim.rule,
            bed=fmt.together(self.found.beds({column for _, column in self.cells})),
            stand_in=self.stand_in,
            fact=self.fact,
            question=self._question(),
            beside=self._beside() if self.differences else "",
            settled=decision.settled,
            headline=self.claim.headline,
        )

    def _compared(self) -> str:
        """`FedAL − FedMD, mean of 3 columns`, without columns that have no runs or are
        at chance.
        """
        claim, unit = self.claim, self.unit
        rights = [
            right if isinstance(right, str) else f"{as_printed(right, None)}{unit.apart}"
            for right in claim.rights
        ]
        times = f"{claim.times:g} × " if claim.times != 1 else ""
        each = f"each of {fmt.together(rights)}" if len(rights) > 1 else rights[0]
        text = f"{claim.left} {fmt.MINUS} {times}{each}"
        if claim.than is not None:
            text = f"({text}) {fmt.MINUS} ({claim.than[0]} {fmt.MINUS} {claim.than[1]})"
        if any(AT not in side for side in claim.sides) and self.columns:
            text += (
                f", {self.columns[0]}"
                if len(self.columns) == 1
                else f", mean of {len(self.columns)} columns"
            )
            few = len(self.left_out) <= 3
            names = (
                fmt.together(self.left_out)
                if few
                else f"{len(self.left_out)} columns that were not run"
            )
            without = [f"without {names}"] if self.left_out else []
            without += (
                [f"without {fmt.together(self.at_chance)}: at chance"] if self.at_chance else []
            )
            text += f" ({'; '.join(without)})" if without else ""
        margin = f"; margin {as_printed(claim.by, None)}{unit.apart}" if claim.by else ""
        return f"{claim.metric}: {text}{margin}" if claim.metric else f"{text}{margin}"

    def _sentence(self, decision: Decision, ratio: float | None) -> str:
        """`+0.5 points (−0.8 to +1.8), printed +6.9: excludes the printed effect, and not zero`."""
        if decision.mean is None:
            return decision.why
        decimals = self.unit.decimals(decision.mean)
        ends, edges = decision.ends or (), (0.0, self.claim.by, -self.claim.by, self.printed or 0.0)
        while decimals < 4 and any(
            end != edge and round(end, decimals) == round(edge, decimals)
            for end in ends
            for edge in edges
        ):
            decimals += 1  # show on which side of the edge the end lies
        mean, *others = (fmt.number(value, f"+,.{decimals}f") for value in (decision.mean, *ends))
        text = f"{mean}{self.unit.apart}" + (f" ({' to '.join(others)})" if others else "")
        text += f", {ratio:,.3g} times" if ratio is not None else ""
        text += " on one machine" if self.timed else ""
        text += (
            f", printed {self.unit.difference(self.printed)}" if self.printed is not None else ""
        )
        return f"{text}: {decision.why}" if decision.why else text
