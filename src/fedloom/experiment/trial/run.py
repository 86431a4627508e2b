"""Runs a trial: splits, choices on validation rows, scores on test rows."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from fedloom import methods
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.ledger import Ledger
from fedloom.core.scores import auc, balanced_accuracy
from fedloom.data.dataset import Dataset
from fedloom.experiment.run.execute import one_thread
from fedloom.experiment.run.lockstep import faster_in_lockstep
from fedloom.experiment.trial.candidates import (
    ALONE,
    FOREST,
    MANY,
    Candidate,
    CandidateTraining,
    Outputs,
    advance,
    candidates,
    default_methods,
    infeasible,
    obstacle,
)
from fedloom.experiment.trial.decide import FEWEST, decide_owners, gain
from fedloom.experiment.trial.owners import Owners, split_rows, split_time, standardized
from fedloom.experiment.trial.result import OwnerCard, TrialConfig, TrialResult

SPLITS, MOST_SPLITS, FEWEST_SPLITS = 10, 30, 5
"""Splits by default without a budget of time; and with one, at most and at least."""
WINDOW = 40
"""Rows of an owner of median size in a window of time, at least."""
CHOICES = 5
"""Number of times that the candidates are chosen along time."""
LOT, LOT_BYTES = 5, 1 << 28
"""Splits that train in lock-step, at most, and the bytes of their standardized rows."""
Choosing: TypeAlias = Generator[Sequence[CandidateTraining], list[Outputs], "Choice"]
"""Yields the trainings to advance, receives their outputs, and returns a choice."""


@dataclass(frozen=True)
class TrialSplit:
    """Row numbers of each owner: training rows, test rows, and the training rows in two parts, to fit and to choose;
    and the seed of weights and batches."""

    seed: int
    train: list[np.ndarray]
    test: list[np.ndarray]
    fit: list[np.ndarray]
    choose: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Choice:
    """A candidate with a number of rounds and an evaluation mode."""

    candidate: Candidate
    rounds: int
    mode: str

    @property
    def label(self) -> str:
        """Its name in reports."""
        return f"{self.candidate.label}{f', {self.mode}' if self.mode else ''}"


@dataclass(frozen=True, eq=False)
class Choices:
    """The best candidates for training alone, for federating and on pooled rows."""

    alone: Choice
    federated: Choice
    pooled: Choice


def run_trial(
    owners: Owners, config: TrialConfig | None = None, *, progress: Callable[[int, int, float], None] | None = None
) -> TrialResult:
    """Run a trial.

    Args:
        owners: their labeled rows.
        config: the settings; None for the defaults.
        progress: called after each lot of splits with the number of those that ended, of all, and the seconds so far.

    Raises:
        ConfigError: an unknown or infeasible method.
        DataError: rows are too few to split.
    """
    with one_thread():
        return _run(owners, config or TrialConfig(), progress or (lambda done, splits, seconds: None))


def _run(owners: Owners, config: TrialConfig, progress: Callable[[int, int, float], None]) -> TrialResult:
    started = perf_counter()
    impossible = infeasible(len(owners.names))
    notes, (names, left) = owners.notes, (config.methods, ()) if config.methods else default_methods(len(owners.names))
    if left:
        notes = (*notes, f"{', '.join(left)}: left out, as too slow with more than {MANY} owners; --method tries it.")
    for name in names:
        if why := obstacle(methods.named(name), len(owners.names)):
            raise ConfigError(f"{name} cannot be tried: it {why}")
    networks = config.networks or (("cnn-small",) if owners.data.kind == "image" else ("mlp", "linear"))
    typical = int(np.median(np.bincount(owners.owner)))
    together = candidates(names, networks, config.rates, typical)
    solo = [*candidates([ALONE], networks, config.rates, typical), *([Candidate(FOREST)] if config.forest else [])]
    metric = config.metric or ("auc" if len(owners.data.classes) == 2 else "balanced accuracy")
    most = config.splits or (SPLITS if config.seconds is None else MOST_SPLITS)
    if owners.order is not None and config.splits is None:  # windows of enough rows to tell a score
        most = max(FEWEST_SPLITS, min(most, int(2 * config.test * typical / WINDOW)))
    lockstep = all(faster_in_lockstep(name, owners.data.input_shape, len(owners.data.classes)) for name in networks)
    lot = max(1, min(LOT, LOT_BYTES // owners.data.x.nbytes)) if lockstep else 1
    count = most
    if config.seconds is not None:
        together, count, lot = _affordable(owners, config, together, solo, most, lot, lockstep)
    rows: list[np.ndarray] = []
    picks: list[Choices] = []
    ledgers: dict[str, Ledger] = {}
    ratios: list[np.ndarray] = []
    every = _every(owners, count)
    while len(rows) < count:
        numbers = range(len(rows), min(len(rows) + lot, count))
        splits = [_split(owners, config, r, count) for r in numbers]
        anew = [split for r, split in zip(numbers, splits, strict=True) if r % every == 0]
        picks += _choose(owners, config, metric, anew, together, solo, lockstep)
        chosen_for = [picks[r // every] for r in numbers]
        tested = _test(owners, config, metric, splits, chosen_for, lockstep)
        for split, choices, (scores, ledger) in zip(splits, chosen_for, tested, strict=True):
            ratios.append(np.array([len(a) / len(b) for a, b in zip(split.test, split.train, strict=True)]))
            rows.append(scores)
            ledgers[choices.federated.label] = ledger
        spent = perf_counter() - started
        progress(len(rows), count, spent)
        if config.seconds is not None and spent * min(len(rows) + lot, count) / len(rows) > config.seconds:
            break
    if len(rows) < min(count, FEWEST):
        notes = (*notes, f"The budget allowed {len(rows)} of {count} splits; fewer than {FEWEST} decide nothing.")
    chosen = Counter(choices.federated.label for choices in picks)
    ledger = ledgers[chosen.most_common(1)[0][0]]
    return _summary(
        owners, config, metric, np.stack(rows), np.mean(ratios, 0), chosen, ledger,
        Counter(choices.alone.candidate.text for choices in picks), together, names, impossible, notes,
        perf_counter() - started,
    )  # fmt: skip


def _every(owners: Owners, count: int) -> int:
    """After how many splits the candidates are chosen anew. Earlier windows of time are fair grounds for the choice in
    later ones; random splits are not, because their training rows are test rows of others."""
    return 1 if owners.order is None else -(-count // CHOICES)


def _choose(
    owners: Owners,
    config: TrialConfig,
    metric: str,
    splits: Sequence[TrialSplit],
    together: Sequence[Candidate],
    solo: Sequence[Candidate],
    lockstep: bool,
) -> list[Choices]:
    """For each split the best candidates on validation rows, trained on the other training rows."""
    judge = partial(score, metric)
    data = [standardized(owners, split.fit) for split in splits]
    truths = [_truth(rows, split.choose, split.fit) for rows, split in zip(data, splits, strict=True)]

    def best(tried: Sequence[Candidate], *, pooled: bool = False) -> list[Choice]:
        works = []
        for split, rows, truth in zip(splits, data, truths, strict=True):
            parts = (rows, *_parties(split.fit, split.choose, pooled), config.points, split.seed)
            works.append(_best(judge, truth, [CandidateTraining(candidate, *parts) for candidate in tried]))
        return _at_once(works, lockstep)

    choices = zip(best(solo), best(together), best(solo, pooled=True), strict=True)
    return [Choices(alone, federated, pooled) for alone, federated, pooled in choices]


def _test(
    owners: Owners,
    config: TrialConfig,
    metric: str,
    splits: Sequence[TrialSplit],
    choices: Sequence[Choices],
    lockstep: bool,
) -> list[tuple[np.ndarray, Ledger]]:
    """For each split the scores (N, 3) on test rows: alone, federated, pooled, each trained on all training rows; and
    the messages."""
    data = [standardized(owners, split.train) for split in splits]

    def outputs(picked: Sequence[Choice], *, pooled: bool = False) -> list[Outputs]:
        trainings = []
        for split, rows, choice in zip(splits, data, picked, strict=True):
            points = (choice.rounds,) if choice.rounds else config.points
            parties = _parties(split.train, split.test, pooled)
            trainings.append(CandidateTraining(choice.candidate, rows, *parties, points, split.seed))
        return advance(trainings, together=lockstep)

    results = []
    found = zip(
        outputs([c.alone for c in choices]),
        outputs([c.federated for c in choices]),
        outputs([c.pooled for c in choices], pooled=True),
        strict=True,
    )
    for split, rows, best, each in zip(splits, data, choices, found, strict=True):
        truth = _truth(rows, split.test, split.train)
        columns = []
        for choice, out in zip((best.alone, best.federated, best.pooled), each, strict=True):
            predictions = out.probabilities[choice.rounds, choice.mode]
            columns.append([score(metric, p, *t) for p, t in zip(predictions, truth, strict=True)])
        results.append((np.array(columns).T, each[1].ledger or Ledger()))
    return results


def _parties(fitted: list[np.ndarray], judged: list[np.ndarray], pooled: bool) -> tuple[list[Any], list[Any]]:
    """The training rows of each party, and the sets of rows that it predicts: the owners, or one with all rows."""
    return ([np.concatenate(fitted)], [judged]) if pooled else (fitted, [[rows] for rows in judged])


def _truth(
    data: Dataset, judged: Sequence[np.ndarray], fitted: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each owner the labels (n,) of the rows to predict, and the shares (K,) of the classes in training rows."""
    return [(data.y[a], _priors(data.y[b], len(data.classes))) for a, b in zip(judged, fitted, strict=True)]


def _at_once(works: Sequence[Choosing], lockstep: bool) -> list[Choice]:
    """The choices of all works, whose trainings advance together."""
    choices: dict[int, Choice] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(works)))
    while answers:
        asked: dict[int, Sequence[CandidateTraining]] = {}
        for n, answer in answers.items():
            try:
                asked[n] = works[n].send(answer)
            except StopIteration as end:
                choices[n] = end.value
        found = iter(advance([one for each in asked.values() for one in each], together=lockstep))
        answers = {n: [next(found) for _ in each] for n, each in asked.items()}
    return [choices[n] for n in range(len(works))]


def _split(owners: Owners, config: TrialConfig, r: int, count: int) -> TrialSplit:
    """The r-th of `count` splits."""
    split = TrialSplit(config.seed * 10_007 + r, [], [], [], [])
    for i, name in enumerate(owners.names):
        rows = owners.rows(i)
        if owners.order is not None:
            early, late = split_time(owners, rows, config.test, r, count)
            by_time = early[np.argsort(owners.order[early], kind="stable")]
            cut = int(len(by_time) * (1 - config.test))
            first, last = np.sort(by_time[:cut]), np.sort(by_time[cut:])
        else:
            early, late = split_rows(owners, rows, config.test, config.seed, r, i, 0)
            first, last = split_rows(owners, early, config.test, config.seed, r, i, 1)
        if not len(first) or not len(last) or not (len(late) or owners.order is not None):
            raise DataError(f"Owner {name!r} has too few rows for split {r + 1}: add rows, or drop this owner.")
        for parts, part in zip(
            (split.train, split.test, split.fit, split.choose), (early, late, first, last), strict=True
        ):
            parts.append(part)
    return split


def _best(
    judge: Callable[[np.ndarray, np.ndarray, np.ndarray], float],
    truth: Sequence[tuple[np.ndarray, np.ndarray]],
    running: Sequence[CandidateTraining],
) -> Choosing:
    """The choice with the highest mean score over owners on validation rows; the first of equal ones.

    Successive halving: after each number of rounds the better half of the candidates trains on (K. Jamieson and
    A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016). Owners count
    by how precisely their rows tell the score: by n_k n_l / n of their two largest classes.
    """
    best, highest = None, -math.inf
    weights = np.array([_precision(labels) for labels, _ in truth])
    while running:
        reached = []
        for training, outputs in zip(running, (yield running), strict=True):
            values = []
            for (rounds, mode), probabilities in outputs.probabilities.items():
                scores = np.array([judge(p, *t) for p, t in zip(probabilities, truth, strict=True)])
                known = np.isfinite(scores) & (weights > 0)
                values.append(float(np.average(scores[known], weights=weights[known])) if known.any() else 0.0)
                if values[-1] > highest + 1e-12:
                    best, highest = Choice(training.candidate, rounds, mode), values[-1]
            if values:
                reached.append((max(values), training))
        reached.sort(key=lambda one: -one[0])
        running = [training for _, training in reached[: -(-len(reached) // 2)]]
    assert best is not None
    return best


def _precision(labels: np.ndarray) -> float:
    first, second, *_ = (*sorted(np.bincount(labels).tolist(), reverse=True), 0, 0)
    return float(first * second / max(1, len(labels)))


def _priors(labels: np.ndarray, classes: int) -> np.ndarray:
    """The share (K,) of each class in an owner's training rows; 1 / K where it has none."""
    shares = np.bincount(labels, minlength=classes) / len(labels)
    return np.where(shares > 0, shares, 1 / classes)


def score(metric: str, probabilities: np.ndarray, labels: np.ndarray, priors: np.ndarray) -> float:
    """The score of predictions (n, K) of labels (n,): nan where it is not defined, 0 where training diverged.

    Balanced accuracy weighs all classes alike, so the prediction is the class whose probability exceeds its share
    (K,) in the owner's training rows most.
    """
    if not len(labels):
        return math.nan
    if not np.isfinite(probabilities).all():
        return 0.0
    if metric == "auc":
        return auc(labels, probabilities)
    if metric == "accuracy":
        return float((probabilities.argmax(1) == labels).mean())
    return balanced_accuracy(labels, (probabilities / priors).argmax(1))


def _affordable(
    owners: Owners,
    config: TrialConfig,
    together: Sequence[Candidate],
    solo: Sequence[Candidate],
    most: int,
    lot: int,
    lockstep: bool,
) -> tuple[list[Candidate], int, int]:
    """The first candidates of which five splits fit into the budget, the number of splits that then do, and how many to
    run at once.

    The time of a candidate that trains to the end is taken to be that of training alone once, and a half more.
    """
    assert config.seconds is not None
    clock, trainings = perf_counter(), []
    for r in range(lot):
        split = _split(owners, config, r, most)
        parties = _parties(split.fit, split.choose, pooled=False)
        trainings.append(
            CandidateTraining(solo[0], standardized(owners, split.fit), *parties, config.points, split.seed)
        )
    while any(outputs.probabilities for outputs in advance(trainings, together=lockstep)):
        pass
    runs = config.seconds * lot / 1.5 / max(perf_counter() - clock, 1e-6)
    kept = list(together[: max(2, int(2 * (runs / FEWEST_SPLITS - 3)) - 2 * len(solo))])
    choosing = (len(kept) + 2 * len(solo)) / 2  # half of the candidates stop early
    count = int(runs / (choosing + 3)) if owners.order is None else int((runs - CHOICES * choosing) / 3)
    return kept, min(most, max(FEWEST_SPLITS, count)), max(1, min(lot, count))


def _summary(
    owners: Owners,
    config: TrialConfig,
    metric: str,
    scores: np.ndarray,
    ratios: np.ndarray,
    chosen: Mapping[str, int],
    ledger: Ledger,
    chosen_alone: Mapping[str, int],
    together: Sequence[Candidate],
    names: Sequence[str],
    impossible: Mapping[str, str],
    notes: Sequence[str],
    seconds: float,
) -> TrialResult:
    """The result, from the scores (R, N, 3), and test rows per training row (N,)."""
    differences = scores[:, :, 1] - scores[:, :, 0]
    gains = [gain(differences[:, i], ratios[i]) for i in range(len(owners.names))]
    weights = np.array([_precision(owners.data.y[owners.rows(i)]) for i in range(len(owners.names))])
    common = gain([_weighted(row, weights) for row in differences], float(np.average(ratios, weights=weights)))
    verdicts = decide_owners(gains, config.worth, common)
    label = max(chosen, key=lambda name: chosen[name])
    cards = {}
    role = next((entry.sender for entry in ledger if entry.sender in ("client", "peer")), "client")
    for i, (name, one, verdict) in enumerate(zip(owners.names, gains, verdicts, strict=True)):
        alone, federated, pooled = (_mean(scores[:, i, k]) for k in range(3))
        rows = len(owners.rows(i))
        cards[name] = OwnerCard(
            decision=verdict.decision,
            by=verdict.by,
            method=label,
            rows=rows,
            gain=one.mean if one.splits else None,
            low=one.low if math.isfinite(one.low) else None,
            high=one.high if math.isfinite(one.high) else None,
            alone=alone,
            federated=federated,
            pooled=pooled,
            p_join=verdict.p_join,
            p_alone=verdict.p_alone,
            more_splits=verdict.more_splits,
            more_rows=None if verdict.more_rows is None else math.ceil(verdict.more_rows * rows),
            sent=ledger.sent(f"{role}-{i}"),
            received=ledger.received(f"{role}-{i}"),
        )
    tried = list(dict.fromkeys(candidate.method for candidate in together))
    return TrialResult(
        owners=cards,
        overall={
            "gain": common.mean,
            "low": common.low if math.isfinite(common.low) else None,
            "high": common.high if math.isfinite(common.high) else None,
            **{
                name: _mean([_weighted(row, weights) for row in scores[:, :, k]])
                for k, name in enumerate(("alone", "federated", "pooled"))
            },
        },
        metric=metric,
        worth=config.worth,
        seed=config.seed,
        splits=len(scores),
        chosen=dict(chosen),
        chosen_alone=dict(chosen_alone),
        tried=[candidate.text for candidate in together],
        not_tried=[name for name in methods.registry() if name not in impossible and name not in (*tried, ALONE)],
        infeasible=impossible,
        revealed=_revealed(ledger, len(owners.names)),
        per_split=[
            {name: [_plain(value) for value in row[i]] for i, name in enumerate(owners.names)} for row in scores
        ],
        notes=notes,
        seconds=seconds,
    )


def _revealed(ledger: Ledger, owners: int) -> list[dict[str, Any]]:
    """Messages by sender, receiver, kind and content, with their number and bytes for each owner."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for entry in ledger:
        parts = dict.fromkeys(part.split()[0].split(".")[0] for part in entry.what.split("; ") if " " in part)
        key = (entry.sender, entry.receiver, entry.kind, ", ".join(parts) or entry.what)
        total = found.setdefault(key, [0, 0])
        total[0] += entry.count
        total[1] += entry.bytes
    return [
        {**dict(zip(("sender", "receiver", "kind", "content"), key, strict=True)), "count": count, "bytes": size}
        for key, (count, size) in found.items()
        if size
    ]


def _weighted(values: np.ndarray, weights: np.ndarray) -> float:
    """The weighted mean of the known ones of (N,) values; nan if none is."""
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _mean(numbers: np.ndarray | Sequence[float]) -> float | None:
    values = np.asarray(numbers)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
