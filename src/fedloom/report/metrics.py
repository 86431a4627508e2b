"""A number of a finished run.

A config names it by a text, with metrics as in a run's files:

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

`own accuracy main mode` is in the first evaluation mode of the run's method. For a run without evaluation modes, the own accuracy stands for the tuned one and for the one after
some steps. Any other metric is the last value in `metrics.csv`, or the mean over parties if the
federation has none.
"""  # noqa: E501

import math
import re
from dataclasses import dataclass

import numpy as np

from fedloom.experiment.run.metrics import ATTACK, GLOBAL, MAIN_MODE, OWN, SCORES, Metric, parse
from fedloom.report.learning import bytes_sent
from fedloom.report.read import Run

BEST, MEAN, LARGEST, FIRST, GAIN = "best", "mean over rounds of", "largest", "first", "gain of"
ON_MESSAGES = ("gradients direct", "gradients nearest", "prototypes")
"""Attacks on received messages: see `fedloom.experiment.run.attacks`."""
_OF_COLUMNS = {"imbalance degree": "mid", "class ratio": "gamma", "class cosine": "cosine"}
"""Metrics of a vertical party's data, and their keys in `partition.json`."""
NOT_OF_ROUNDS = ("total", "setup", "evaluate", "save")
"""Phases of a run's seconds besides the stages of rounds."""
_TEXT = re.compile(
    r"(?:(?P<cost>bytes|rounds|iterations|seconds) until (?:(?P<level>\d+(?:\.\d+)?) %|best)(?: "
    rf"|$)|(?P<statistic>{BEST}|{MEAN}|{LARGEST}|{FIRST}|{GAIN}) )?(?P<metric>.*?)(?: of client "
    r"(?P<client>\d+))?"
)
_PREPARED = re.compile(r"tuned|\d+ steps?")
"""Evaluation modes of the registered methods in the horizontal setting."""
_BYTES = {
    "bytes up": ("up",),
    "bytes down": ("down",),
    "bytes across": ("across",),
    "bytes sent": ("up", "across"),
    "bytes": ("up", "down", "across"),
}


@dataclass(frozen=True)
class RunMetric:
    """A number of a finished run. Its text names it in configs and archives: `best own accuracy of
    client 1`.

    Attributes:
        metric: what is measured.
        statistic: how its values over the rounds become one: `BEST`, `MEAN` and so on; "" for the
            last value.
        client: the client or party; None for the mean.
        cost: what is counted until the metric first reaches `level`: bytes, rounds, iterations or
            seconds; or "".
        level: the value to reach, in [0, 1]; None for the best value.
    """

    metric: Metric
    statistic: str = ""
    client: int | None = None
    cost: str = ""
    level: float | None = None

    def __str__(self) -> str:
        before = self.statistic
        if self.cost:
            before = (
                f"{self.cost} until {BEST if self.level is None else f'{100 * self.level:g} %'}"
            )
        client = "" if self.client is None else f"of client {self.client}"
        metric = "" if self.cost and self.metric == GLOBAL and not client else str(self.metric)
        return " ".join(part for part in (before, metric, client) if part)

    @classmethod
    def parse(cls, text: str) -> "RunMetric":
        """The number of a text: see the module."""
        found = _TEXT.fullmatch(text)
        assert found is not None  # every text is at least a metric
        return cls(
            parse(found["metric"]) if found["metric"] or not found["cost"] else GLOBAL,
            found["statistic"] or "",
            int(found["client"]) if found["client"] else None,
            found["cost"] or "",
            float(found["level"]) / 100 if found["level"] else None,
        )

    @property
    def lower(self) -> bool:
        """Whether lower is better."""
        return bool(self.cost) or self.metric.lower_is_better

    @property
    def exact(self) -> bool:
        """Whether it may be the same for all seeds, as it counts messages or rounds or depends on
        the data alone.
        """
        return (self.cost or self.metric.name).startswith(
            ("bytes", "rounds", "iterations", "skew", *_OF_COLUMNS)
        )

    @property
    def drawn(self) -> "RunMetric":
        """The number whose curve is drawn: the last value of the metric, or of the accuracy that a
        cost depends on.
        """
        if not self.cost and self.metric.name in (*_BYTES, "seconds"):
            return RunMetric(GLOBAL)
        return RunMetric(self.metric, client=self.client)

    @property
    def is_level(self) -> bool:
        """Whether it is a value of its curve, such as an accuracy, and not a cost."""
        return not self.cost and self.drawn.metric == self.metric


def value_of(run: Run, wanted: RunMetric) -> float | None:
    """A number of a finished run: shares in [0, 1], bytes, seconds, or raw values; None if not
    measured.
    """
    s, metric = run.summary, _in_run(run, wanted.metric)
    if wanted.cost:
        return _until(run, wanted)
    if metric.name in _OF_COLUMNS and not wanted.statistic:
        return _of_columns(run, metric.name, wanted.client)
    if wanted.statistic or wanted.client is not None:
        return _over_rounds(run, wanted)
    if metric in s.scores:
        return s.scores[metric]
    if metric in s.accuracies:
        return s.accuracies[metric].mean
    if metric.name == ATTACK and metric.mode in s.attacks:
        return s.attacks[metric.mode].mean
    if metric.name in _BYTES:
        return float(sum(getattr(s.bytes, direction) for direction in _BYTES[metric.name]))
    if metric.name == "seconds":
        return s.seconds.get("total")
    if metric == Metric(ATTACK, "on messages"):
        return max(
            (s.attacks[kind].mean for kind in ON_MESSAGES if kind in s.attacks), default=None
        )
    return skew(run) if metric.name == "skew" else _over_rounds(run, wanted)


def _in_run(run: Run, metric: Metric) -> Metric:
    """The metric that a run has for it."""
    s = run.summary
    if metric.mode == MAIN_MODE:
        return s.called(metric)
    if (score := Metric(str(metric).casefold())) in s.scores:
        return score
    prepared = metric.own and metric.name == OWN.name and _PREPARED.fullmatch(metric.mode)
    return OWN if prepared and not s.eval_modes and OWN in s.accuracies else metric


def _of_columns(run: Run, name: str, party: int | None) -> float | None:
    """A metric of the data of one vertical party, or its mean over parties; None if a party's
    classes are unknown.
    """
    parties = run.partition.parties.parties if run.partition.parties else ()
    values = [getattr(party, _OF_COLUMNS[name]) for party in parties]
    if party is not None:
        return values[party] if party < len(values) else None
    return float(np.mean(values)) if values and None not in values else None


def _over_rounds(run: Run, wanted: RunMetric) -> float | None:
    """A number from the values at evaluations."""
    x, y = curve(run, wanted)
    if not len(y):
        return None
    if not wanted.statistic:
        return float(y[-1])
    known, after = y[np.isfinite(y)], y[x > 0]
    if wanted.statistic == BEST:
        return _best(known, wanted.metric) if len(known) else None
    if not len(after):
        return None
    statistics = {
        MEAN: after.mean(),
        LARGEST: after.max(),
        FIRST: after[0],
        GAIN: after[-1] - after[0],
    }
    return float(statistics[wanted.statistic])


def _best(values: np.ndarray, metric: Metric) -> float:
    return float(values.min() if metric.lower_is_better else values.max())


def skew(run: Run) -> float | None:
    """Total variation in [0, 1] between a client's class mix and that of all rows, mean over
    clients with rows.
    """
    counts = np.array(run.partition.counts, dtype=float)
    if not counts.size:
        return None
    counts = counts[counts.sum(1) > 0]
    mixes = counts / counts.sum(1, keepdims=True)
    return float(np.abs(mixes - counts.sum(0) / counts.sum()).sum(1).mean() / 2)


def curve(run: Run, wanted: RunMetric) -> tuple[np.ndarray, np.ndarray]:
    """Iterations (n,) and values (n,) of the metric after the last stage that has it; empty if not
    measured.
    """
    metric, s = _in_run(run, wanted.metric), run.summary
    column = str(metric)
    if wanted.client is not None:
        known = wanted.client < len(run.names)
        return (
            _of_party(run, column, run.names[wanted.client])
            if known
            else (np.array([]), np.array([]))
        )
    if metric in s.scores:
        column = SCORES[metric].column
    elif metric in s.accuracies:
        column = metric.mean
    parties = list(dict.fromkeys(party for what, party, _ in run.measured if what == column))
    if not parties or "" in parties:
        return _of_party(run, column, "")
    at: dict[float, list[float]] = {}
    for party in parties:
        for x, y in zip(*_of_party(run, column, party), strict=True):
            at.setdefault(float(x), []).append(float(y))
    return np.array(sorted(at)), np.array([np.mean(at[x]) for x in sorted(at)])


def _of_party(run: Run, column: str, party: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric of a party, by its name in `metrics.csv`, after the last stage that has it."""
    stages = [stage for what, of, stage in run.measured if (what, of) == (column, party)]
    return run.curve(column, run.last if run.last in stages or not stages else stages[-1], party)


def _until(run: Run, wanted: RunMetric) -> float | None:
    """The cost until the metric first reached the level, or its best value."""
    x, y = curve(run, wanted)
    if not np.isfinite(y).any():
        return None
    goal = _best(y[np.isfinite(y)], wanted.metric) if wanted.level is None else wanted.level
    reached = np.flatnonzero(y <= goal if wanted.metric.lower_is_better else y >= goal)
    if not len(reached):
        return math.inf
    first = x[reached[0]]
    if wanted.cost == "bytes":
        return float(np.interp(first, run.curve("bytes up", run.last)[0], bytes_sent(run)))
    share = float(first) / max(1, run.summary.iterations)
    if wanted.cost == "seconds":
        return share * sum(
            spent for phase, spent in run.summary.seconds.items() if phase not in NOT_OF_ROUNDS
        )
    return share * run.summary.rounds if wanted.cost == "rounds" else float(first)
