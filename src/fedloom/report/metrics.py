"""A metric of a finished run by its name, and its unit.

A metric is named as in a run's files:

accuracy, own accuracy, own accuracy MODE   as in `result.json`, mean over clients
accuracy, balanced accuracy, AUC, log loss  in the vertical setting
attack NAME                                 share of labels that an attack infers, mean over parties
attack on messages                          largest such share over the attacks on received messages
bytes up, bytes down, bytes across          tensor data; `bytes sent` is up and across, `bytes` all three
seconds                                     wall time of the run
best METRIC                                 best value at any evaluation
mean over rounds of METRIC                  mean over all evaluations but the one at the start
largest METRIC                              largest of these values
first METRIC, gain of METRIC                value at the first evaluation after the start; last value minus that
METRIC of client N                          last value of one client
bytes until 60 % [METRIC]                   bytes that clients had sent when the accuracy, or another metric, first
rounds until 60 % [METRIC]                  reached a level or its `best`; infinite if it never did
seconds until best [METRIC]                 likewise: the wall time of rounds, if all take the same time
skew                                        total variation between a client's class mix and that of all, mean
imbalance degree, class ratio               MID in [0, 1] and Γ of a vertical party's unaligned rows, mean over parties
class cosine                                likewise, cosine between a party's class mix and that of all parties

For a run without evaluation modes, the own accuracy stands for the tuned one and for the one after some steps. Any
other metric is the last value in `metrics.csv`, or the mean over parties if the federation has none.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from fedloom.experiment.run.metrics import ATTACK, GLOBAL, OWN, SCORES, Metric, parse
from fedloom.report import formatting as fmt
from fedloom.report.learning import bytes_sent
from fedloom.report.read import Run

FACTORS = {"%": 100.0, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9}
"""The factor from a raw value to each unit; 1 for any other unit."""
BEST = "best "
MEAN, LARGEST, FIRST, GAIN = "mean over rounds of ", "largest ", "first ", "gain of "
ON_MESSAGES = ("gradients direct", "gradients nearest", "prototypes")
"""Attacks on received messages: see `fedloom.experiment.run.attacks`."""
_OF_COLUMNS = {"imbalance degree": "mid", "class ratio": "gamma", "class cosine": "cosine"}
"""Metrics of a vertical party's data, and their keys in `partition.json`."""
NOT_OF_ROUNDS = ("total", "setup", "evaluate", "save")
"""Phases of a run's seconds besides the stages of rounds."""
_UNTIL = re.compile(r"(bytes|rounds|iterations|seconds) until (?:(\d+(?:\.\d+)?) %|best)(?: (.+))?")
_CLIENT = re.compile(r"(.+) of client (\d+)")
_PREPARED = re.compile(r"tuned|\d+ steps?")
"""Evaluation modes of the registered methods in the horizontal setting."""
_BYTES = {
    "bytes up": ("up",),
    "bytes down": ("down",),
    "bytes across": ("across",),
    "bytes sent": ("up", "across"),
    "bytes": ("up", "down", "across"),
}


def value_of(run: Run, metric: str) -> float | None:
    """A metric of a finished run: shares in [0, 1], bytes, seconds, or raw values; None if not measured."""
    s = run.summary
    found = _named(run, metric)
    if found in s.scores:
        return s.scores[found]
    if found in s.accuracies:
        return s.accuracies[found].mean
    if found.name == ATTACK and found.mode in s.attacks:
        return s.attacks[found.mode].mean
    if metric in _BYTES:
        return float(sum(getattr(s.bytes, direction) for direction in _BYTES[metric]))
    if metric == "seconds":
        return s.seconds.get("total")
    if metric == "attack on messages":
        return max((s.attacks[attack].mean for attack in ON_MESSAGES if attack in s.attacks), default=None)
    if metric.partition(" of client ")[0] in _OF_COLUMNS:
        return _of_columns(run, metric)
    return skew(run) if metric == "skew" else _derived(run, metric)


def _named(run: Run, text: str) -> Metric:
    """The metric of the run that a text names."""
    s, metric = run.summary, parse(text)
    if (score := parse(text.casefold())) in s.scores:
        return score
    prepared = metric.own and metric.name == OWN.name and _PREPARED.fullmatch(metric.mode)
    return OWN if prepared and not s.eval_modes and OWN in s.accuracies else metric


def _of_columns(run: Run, metric: str) -> float | None:
    """A metric of the data of one vertical party, or its mean over parties; None if a party's classes are unknown."""
    name, _, client = metric.partition(" of client ")
    parties = run.partition.parties.parties if run.partition.parties else ()
    values = [getattr(party, _OF_COLUMNS[name]) for party in parties]
    if client:
        return values[int(client)] if int(client) < len(values) else None
    return float(np.mean(values)) if values and None not in values else None


def _derived(run: Run, metric: str) -> float | None:
    """A metric derived from the values at evaluations."""
    if found := _UNTIL.fullmatch(metric):
        return _until(run, found[1], float(found[2]) / 100 if found[2] else None, found[3] or str(GLOBAL))
    inner = _plain(metric)
    x, y = curve(run, inner)
    if not len(y):
        return None
    known, after = y[np.isfinite(y)], y[x > 0]
    if metric.startswith(BEST):
        return _best(known, inner) if len(known) else None
    if inner == metric:
        return float(y[-1])
    if not len(after):
        return None
    statistics = {MEAN: after.mean(), LARGEST: after.max(), FIRST: after[0], GAIN: after[-1] - after[0]}
    return float(statistics[metric.removesuffix(inner)])


def _plain(metric: str) -> str:
    """The metric without `best`, `first` and the like."""
    for before in (BEST, MEAN, LARGEST, FIRST, GAIN):
        metric = metric.removeprefix(before)
    return metric


def _best(values: np.ndarray, metric: str) -> float:
    return float(values.min() if lower(metric) else values.max())


def skew(run: Run) -> float | None:
    """Total variation in [0, 1] between a client's class mix and that of all rows, mean over clients with rows."""
    counts = np.array(run.partition.counts, dtype=float)
    if not counts.size:
        return None
    counts = counts[counts.sum(1) > 0]
    mixes = counts / counts.sum(1, keepdims=True)
    return float(np.abs(mixes - counts.sum(0) / counts.sum()).sum(1).mean() / 2)


def lower(metric: str) -> bool:
    """Whether lower is better."""
    plain = _plain(metric)
    return parse(plain).lower_is_better or plain.startswith(("bytes", "rounds", "iterations", "seconds"))


def is_exact(metric: str) -> bool:
    """Whether a metric may be the same for all seeds, as it counts messages or rounds or depends on the data alone."""
    return metric.startswith(("bytes", "rounds", "iterations", "skew", *_OF_COLUMNS))


def drawn(metric: str) -> str:
    """The metric of a curve: the metric itself, or the accuracy that it depends on."""
    if found := _UNTIL.fullmatch(metric):
        return found[3] or str(GLOBAL)
    return str(GLOBAL) if metric in (*_BYTES, "seconds") else _plain(metric)


def is_level(metric: str) -> bool:
    """Whether a metric is a value of its curve, such as an accuracy, and not a cost."""
    return drawn(metric) == _plain(metric)


def curve(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations (n,) and values (n,) of a metric after the last stage that has it; empty if not measured."""
    if found := _CLIENT.fullmatch(metric):
        name, client = str(_named(run, found[1])), int(found[2])
        return _of_party(run, name, run.names[client]) if client < len(run.names) else (np.array([]), np.array([]))
    known = _named(run, metric)
    name = str(known)
    if known in run.summary.scores:
        name = SCORES[known].column
    elif known in run.summary.accuracies:
        name = f"{known} mean"
    parties = list(dict.fromkeys(party for what, party, _ in run.measured if what == name))
    if not parties or "" in parties:
        return _of_party(run, name, "")
    at: dict[float, list[float]] = {}
    for party in parties:
        for x, y in zip(*_of_party(run, name, party), strict=True):
            at.setdefault(float(x), []).append(float(y))
    return np.array(sorted(at)), np.array([np.mean(at[x]) for x in sorted(at)])


def _of_party(run: Run, name: str, party: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric of a party, by its name in `metrics.csv`, after the last stage that has it."""
    stages = [stage for what, of, stage in run.measured if (what, of) == (name, party)]
    return run.curve(name, run.last if run.last in stages or not stages else stages[-1], party)


def _until(run: Run, what: str, level: float | None, metric: str) -> float | None:
    """The cost until a metric first reached a level, or its best value if None."""
    x, y = curve(run, metric)
    if not np.isfinite(y).any():
        return None
    goal = _best(y[np.isfinite(y)], metric) if level is None else level
    reached = np.flatnonzero(y <= goal if lower(metric) else y >= goal)
    if not len(reached):
        return math.inf
    first = x[reached[0]]
    if what == "bytes":
        return float(np.interp(first, run.curve("bytes up", run.last)[0], bytes_sent(run)))
    share = float(first) / max(1, run.summary.iterations)
    if what == "seconds":
        return share * sum(spent for phase, spent in run.summary.seconds.items() if phase not in NOT_OF_ROUNDS)
    return share * run.summary.rounds if what == "rounds" else float(first)


@dataclass(frozen=True)
class Unit:
    """The unit and format of a table's numbers. Arguments of the methods are in the unit.

    Attributes:
        name: %, kB, MB or GB, which scale raw values, or any other name.
    """

    name: str

    @property
    def factor(self) -> float:
        """The factor of raw values."""
        return FACTORS.get(self.name, 1.0)

    @property
    def apart(self) -> str:
        """The unit of differences, as a suffix."""
        noun = "points" if self.name == "%" else self.name
        return f"{fmt.NBSP}{noun}" if noun else ""

    def number(self, value: float, like: float | None = None) -> str:
        """`81.2`, with the decimals of `like`; `never` for infinity."""
        if math.isinf(value):
            return "never"
        return fmt.number(value, f",.{self.decimals(value if like is None else like)}f")

    def spread(self, mean: float, deviation: float | None) -> str:
        """`81.2 ± 0.7`, or the mean alone."""
        known = deviation is not None and math.isfinite(deviation)
        behind = f"{fmt.NBSP}±{fmt.NBSP}{self.number(deviation or 0.0, mean)}" if known else ""
        return f"{self.number(mean)}{behind}"

    def difference(self, value: float, like: float | None = None) -> str:
        """`+2.1`."""
        return fmt.number(value, f"+,.{self.decimals(value if like is None else like)}f")

    def decimals(self, size: float) -> int:
        """Number of decimals: one for percent, otherwise three significant digits."""
        if self.name == "%" or not math.isfinite(size):
            return 1
        return 2 if size == 0 else min(4, max(0, 2 - math.floor(math.log10(abs(size)))))
