"""Runs a trial: every row is predicted by models that did not see it, and owners decide by their own rows."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Final

import numpy as np

from fedloom import methods
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.ledger import Ledger
from fedloom.data.dataset import Dataset, Kind
from fedloom.data.encoder import undo
from fedloom.experiment.run.execute import one_thread
from fedloom.experiment.run.lockstep import faster_in_lockstep
from fedloom.experiment.trial.candidates import (
    ALONE,
    JOINT,
    MANY,
    OWN,
    Candidate,
    CandidateTraining,
    Outputs,
    advance,
    candidates,
    default_methods,
    infeasible,
    obstacle,
)
from fedloom.experiment.trial.choice import WEIGHTS, best, choose, personal
from fedloom.experiment.trial.contributions import CLASS_SCORES, NUMBER_SCORES, contributions
from fedloom.experiment.trial.decide import OwnerVerdict, decide
from fedloom.experiment.trial.evidence import Evidence, evidence
from fedloom.experiment.trial.folds import Fold, draw_folds, split
from fedloom.experiment.trial.owners import Owners, standardized
from fedloom.experiment.trial.partners import Partners, losses, partners_of
from fedloom.experiment.trial.result import OwnerCard, TrialConfig, TrialResult
from fedloom.models.black_boxes import BLACK_BOXES, check_task

REPEATS = 3
"""Repeats of the folds, at most, by default; the last one only if an owner is undecided."""
BOXES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "table": ("logistic", "ridge", "forest", "boosting"),
    "image": ("forest",),
}
"""The black boxes that train alone by default, if they can predict the label."""
FEWEST_REPEATS = 2
"""Repeats before a decision, as the variance of one is unknown."""


@dataclass(frozen=True, order=True)
class Recipe:
    """One way to train and to predict: the number of a candidate, of rounds, and an evaluation mode."""

    candidate: int
    rounds: int
    mode: str


MIX = Recipe(-1, 0, "")
"""The mean of the probabilities of the black boxes."""
PERSONAL = "own weight for each owner"
"""The mode of a mix of the model of all with one of the owner's own rows, by weights of each owner: see `personal`."""
PARTNERS = 20
"""The most owners whose models are scored on each other's rows."""


@dataclass(eq=False)
class Predictions:
    """What candidates predict.

    Attributes:
        candidates: in the order in which they are tried.
        guess: of a model that diverged: 1 / K, or the mean number.
        probabilities: for each recipe and repeat, (n, K) of all rows, by models that did not see the row; or numbers
            (n, 1).
        ledgers: the messages of one training, by recipe.
        dropped: numbers of the candidates that cannot be trained.
        elsewhere: for each black box, (N, n, K) of all rows by the models that each owner trains in the first repeat.
        weights: for each recipe of the mode `PERSONAL`, (N,) of the owners' own models.
    """

    candidates: list[Candidate]
    guess: float
    probabilities: dict[Recipe, list[np.ndarray]] = field(default_factory=dict)
    ledgers: dict[Recipe, Ledger] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    elsewhere: dict[int, np.ndarray] = field(default_factory=dict)
    weights: dict[Recipe, np.ndarray] = field(default_factory=dict)

    def add(self, recipe: Recipe, repeat: int, rows: np.ndarray, found: np.ndarray, total: int) -> None:
        """Set the predictions of these rows; a guess where training diverged."""
        of_repeats = self.probabilities.setdefault(recipe, [])
        if len(of_repeats) == repeat:
            of_repeats.append(np.full((total, found.shape[1]), self.guess))
        of_repeats[repeat][rows] = np.where(np.isfinite(found).all(1, keepdims=True), found, self.guess)

    def failed(self, number: int) -> bool:
        """Whether the candidate was dropped."""
        return number in self.dropped

    def drop(self, number: int) -> None:
        """Forget a candidate that cannot be trained."""
        self.dropped.add(number)
        for recipe in [one for one in self.probabilities if one.candidate == number]:
            del self.probabilities[recipe]

    def mix(self) -> None:
        """Add the mean of the black boxes, if there are several, in each repeat."""
        boxes = [
            each
            for recipe, each in self.probabilities.items()
            if recipe != MIX and not self.candidates[recipe.candidate].model
        ]
        if len(boxes) > 1:
            self.probabilities[MIX] = [np.mean(parts, axis=0) for parts in zip(*boxes, strict=True)]

    def mix_own(self, y: np.ndarray, owner: np.ndarray, folds: Sequence[np.ndarray]) -> None:
        """Add, to each candidate that has a joint and an own model, their mean, and their mix by weights of each owner.

        Args:
            y, owner: (n,) labels and owners of all rows.
            folds: of each repeat, (n,); -1 for rows that are not predicted.
        """
        shape = (len(folds), int(folds[0].max()) + 1, int(owner.max()) + 1)
        places = [(rows := np.flatnonzero(fold >= 0), fold[rows] * shape[2] + owner[rows]) for fold in folds]
        count = np.stack([np.bincount(place, minlength=shape[1] * shape[2]) for _, place in places]).reshape(shape)
        for recipe in [one for one in self.probabilities if one.mode == JOINT]:
            pairs = list(zip(self.probabilities[recipe], self.probabilities[replace(recipe, mode=OWN)], strict=True))
            self.probabilities[replace(recipe, mode="")] = [(joint + own) / 2 for joint, own in pairs]
            sums = [
                np.bincount(place, losses(y[rows], told((1 - w) * joint[rows] + w * own[rows])), shape[1] * shape[2])
                for w in WEIGHTS
                for (joint, own), (rows, place) in zip(pairs, places, strict=True)
            ]
            of_fold, of_all = personal(np.reshape(sums, (len(WEIGHTS), *shape)), count)
            mine, found = replace(recipe, mode=PERSONAL), []
            for (joint, own), fold, weight in zip(pairs, folds, of_fold, strict=True):
                w = np.where(fold >= 0, weight[fold, owner], 0.0)[:, None]
                found.append((1 - w) * joint + w * own)
            self.probabilities[mine], self.weights[mine] = found, of_all

    def label(self, recipe: Recipe) -> str:
        """Its name in reports, such as "fedavg-ft (own heads), fine-tuned"."""
        if recipe == MIX:
            boxes = [one.label for n, one in enumerate(self.candidates) if not one.model and not self.failed(n)]
            return f"mean of {', '.join(boxes)}"
        return f"{self.candidates[recipe.candidate].label}{f', {recipe.mode}' if recipe.mode else ''}"


@dataclass(frozen=True, eq=False)
class Choices:
    """For each fold of each repeat the recipe that the other folds choose; and the one that all choose."""

    of_fold: list[list[Recipe]]
    final: Recipe


def run_trial(
    owners: Owners, config: TrialConfig | None = None, *, progress: Callable[[int, int, float], None] | None = None
) -> TrialResult:
    """Run a trial.

    Args:
        owners: their labeled rows.
        config: the settings; None for the defaults.
        progress: called after each candidate in each repeat with the number of those that ended, of all, at most, and
            the seconds so far.

    Raises:
        ConfigError: an unknown or infeasible method.
        DataError: rows are too few to split.
    """
    with one_thread():
        return TrialRun(owners, config or TrialConfig(), progress or (lambda done, total, seconds: None)).run()


class TrialRun:
    """A trial in progress."""

    def __init__(self, owners: Owners, config: TrialConfig, progress: Callable[[int, int, float], None]) -> None:
        self.owners, self.config, self.progress = owners, config, progress
        self.started, self.notes = perf_counter(), list(owners.notes)
        data, K, each = owners.data, len(owners.data.classes), [owners.rows(i) for i in range(len(owners.names))]
        self.infeasible = infeasible(len(each), data.task)
        self.metric = config.metric or ("rmse" if not K else "auc" if K == 2 else "balanced accuracy")
        if (self.metric in NUMBER_SCORES) != (data.task == "number"):
            able = ", ".join(NUMBER_SCORES if data.task == "number" else CLASS_SCORES)
            raise ConfigError(f"metric must be one of {able} for this label, not {self.metric!r}")
        self.weights = np.array([_precision(data.y[rows]) if K else float(len(rows)) for rows in each])
        relative = self.metric in ("rmse", "mae")  # owners' errors count by the spread of their numbers
        self.unit_of = np.array([max(float(data.y[rows].std()), 1e-12) if relative else 1.0 for rows in each])
        guess = 1 / K if K else float(data.y.mean())
        networks = config.networks or (("cnn-small",) if data.kind == "image" else ("mlp", "linear"))
        typical = int(np.median(np.bincount(owners.owner)))
        tried = candidates(self._methods(), networks, config.rates, typical)
        self.federated = Predictions(tried, guess)
        same = sorted({one.model for one in tried if one.model})
        self.raw = undo(data) if any("raw rows" in methods.named(one.method).needs for one in tried) else data
        solo = candidates([ALONE], same, config.rates, typical)
        for name in config.alone or ():
            check_task(name, data.task)
        usual = [name for name in BOXES[data.kind] if data.task in BLACK_BOXES[name].tasks]
        boxes = usual if config.alone is None else config.alone
        self.alone = Predictions([*(Candidate(name) for name in boxes), *solo], guess)
        self.lockstep = all(faster_in_lockstep(name, data.input_shape, max(K, 1)) for name in networks)
        self.repeats = 1 if owners.order is not None else config.repeats or REPEATS
        self.splits: list[list[Fold]] = []  # of each repeat
        self.folds: list[np.ndarray] = []  # of each repeat, (n,)
        self.priors: list[np.ndarray] = []  # of each repeat, (n, K)
        self.done = 0

    def _methods(self) -> Sequence[str]:
        count = len(self.owners.names)
        names, left = (
            (self.config.methods, ())
            if self.config.methods
            else default_methods(count, self.owners.data.kind, self.owners.data.task)
        )
        if left:
            self.notes.append(
                f"{', '.join(left)}: left out, as too slow with more than {MANY} owners; --method tries it."
            )
        for name in names:
            if why := obstacle(methods.named(name), count, self.owners.data.task):
                raise ConfigError(f"{name} cannot be tried: it {why}")
        return names

    def run(self) -> TrialResult:
        """Repeat until every owner is decided, or until repeats or time end."""
        while True:
            began = perf_counter()
            self._repeat(len(self.folds))
            alone, federated = self._choose(self.alone), self._choose(self.federated)
            found = self._evidence(alone, federated)
            verdicts = decide(found, self.config.worth)
            settled = "undecided" not in {verdict.decision for verdict in verdicts}
            if len(self.folds) == self.repeats or (settled and len(self.folds) >= FEWEST_REPEATS):
                break
            now = perf_counter()
            if self.config.seconds is not None and now - self.started + (now - began) > self.config.seconds:
                self.notes.append(f"The budget allowed {len(self.folds)} of {self.repeats} repeats.")
                break
        return self._result(found, verdicts, alone, federated)

    # -- training --------------------------------------------------------------------------------------------------

    def _repeat(self, c: int) -> None:
        """Train all candidates on all folds of the c-th repeat."""
        self._split(c)
        folds = self.splits[c]
        data = [standardized(self.owners, fold.train) for fold in folds]
        for kind in (self.alone, self.federated):
            for number, candidate in enumerate(list(kind.candidates)):
                if c == 0 and kind is self.federated and number and self._late():
                    left = [one.text for one in kind.candidates[number:]]
                    self.notes.append(f"Left out for lack of time: {', '.join(left)}. A larger --budget tries them.")
                    del kind.candidates[number:]
                    break
                if kind.failed(number):
                    continue
                try:
                    self._train_into(kind, number, folds, data, c)
                except MethodError as error:
                    kind.drop(number)
                    if len(kind.dropped) == len(kind.candidates):
                        raise
                    self.notes.append(f"{candidate.text} is left out: {error}")
                self.done += 1
                count = len(self.alone.candidates) + len(self.federated.candidates)
                self.progress(self.done, count * self.repeats, perf_counter() - self.started)
        self.alone.mix()
        self.federated.mix_own(self.owners.data.y, self.owners.owner, self.folds)

    def _train_into(
        self, kind: Predictions, number: int, folds: Sequence[Fold], data: Sequence[Dataset], c: int
    ) -> None:
        """Train a candidate on all folds of the c-th repeat, and add its predictions."""
        candidate = kind.candidates[number]
        reads_raw = kind is self.federated and "raw rows" in methods.named(candidate.method).needs
        of_folds = [self.raw] * len(folds) if reads_raw else data
        if c == 0 and kind is self.alone and not candidate.model and len(self.owners.names) <= PARTNERS:
            self._train_for_all(number, folds, data)
            return
        for fold, outputs in zip(folds, self._train(candidate, of_folds, folds), strict=True):
            for out in outputs:
                for (rounds, mode), found in out.probabilities.items():
                    recipe = Recipe(number, rounds, mode)
                    for rows, probabilities in zip(fold.test, found, strict=True):
                        kind.add(recipe, c, rows, probabilities, len(self.owners.owner))
                    if out.ledger is not None:
                        kind.ledgers[recipe] = out.ledger

    def _train_for_all(self, number: int, folds: Sequence[Fold], data: Sequence[Dataset]) -> None:
        """Train a black box of each owner in the first repeat; it predicts the rows of all owners."""
        kind, names = self.alone, self.owners.names
        every = [[np.concatenate(fold.test)] * len(names) for fold in folds]
        shape = (len(names), len(self.owners.owner), max(len(self.owners.data.classes), 1))
        kind.elsewhere[number] = np.full(shape, kind.guess)
        trainings = [
            CandidateTraining(kind.candidates[number], rows, fold.train, [[part] for part in parts], (1,), fold.seed)
            for rows, fold, parts in zip(data, folds, every, strict=True)
        ]
        for fold, parts, out in zip(folds, every, advance(trainings, together=False), strict=True):
            (found,) = out.probabilities.values()
            for i, (rows, probabilities) in enumerate(zip(parts, found, strict=True)):
                kind.elsewhere[number][i, rows] = probabilities
                kind.add(Recipe(number, 0, ""), 0, fold.test[i], probabilities[np.isin(rows, fold.test[i])], shape[1])

    def _split(self, c: int) -> None:
        """Draw the folds of the c-th repeat, with the shares of classes in their training rows."""
        classes = max(len(self.owners.data.classes), 1)
        numbers = draw_folds(self.owners, self.config.seed, c)
        seeds = [self.config.seed * 10_007 + 101 * c + k for k in range(numbers.max() + 1)]
        priors = np.ones((len(numbers), classes))
        folds = [split(self.owners, numbers, k, seed) for k, seed in enumerate(seeds)]
        for fold in folds:
            for train, test in zip(fold.train, fold.test, strict=True):
                if self.owners.data.classes:
                    priors[test] = _priors(self.owners.data.y[train], classes)
        self.splits.append(folds)
        self.folds.append(numbers)
        self.priors.append(priors)

    def _late(self) -> bool:
        """Whether another candidate would leave no time for a second repeat."""
        spent = perf_counter() - self.started
        return self.config.seconds is not None and (spent + spent / self.done) * FEWEST_REPEATS > self.config.seconds

    def _train(
        self, candidate: Candidate, data: Sequence[Dataset], folds: Sequence[Fold], *, pooled: bool = False
    ) -> list[list[Outputs]]:
        """For each fold the outputs after each number of rounds."""
        trainings = []
        for rows, fold in zip(data, folds, strict=True):
            fitted = [np.concatenate(fold.train)] if pooled else fold.train
            judged = [fold.test] if pooled else [[test] for test in fold.test]
            trainings.append(CandidateTraining(candidate, rows, fitted, judged, self.config.points, fold.seed))
        found: list[list[Outputs]] = [[] for _ in folds]
        while (outputs := advance(trainings, together=self.lockstep)) and outputs[0].probabilities:
            for into, out in zip(found, outputs, strict=True):
                into.append(out)
        return found

    # -- scores ----------------------------------------------------------------------------------------------------

    def _score(self, probabilities: np.ndarray, rows: np.ndarray, c: int) -> float:
        """The score of these rows of one fold and owner; nan if it is not defined."""
        if not len(rows):
            return math.nan
        labels, priors = self.owners.data.y[rows], self.priors[c][rows]
        score = contributions(self.metric, labels, told(probabilities[rows]), np.zeros(len(rows)), priors)[0]
        return float(score / self.unit_of[self.owners.owner[rows[0]]])

    def _choose(self, kind: Predictions) -> Choices:
        recipes = sorted(recipe for recipe in kind.probabilities if recipe.mode != OWN)
        scores = np.array(
            [
                [
                    [[self._score(kind.probabilities[recipe][c], rows, c) for rows in fold.test] for fold in of_repeat]
                    for c, of_repeat in enumerate(self.splits)
                ]
                for recipe in recipes
            ]
        )
        of_fold = [[recipes[m] for m in of_repeat] for of_repeat in choose(scores, self.weights)]
        return Choices(of_fold, recipes[best(scores, self.weights)])

    def _chosen(self, kind: Predictions, choices: Choices) -> np.ndarray:
        """The probabilities (C, n, K) of the recipes that were chosen without the rows."""
        found = np.stack([np.zeros_like(each) for each in next(iter(kind.probabilities.values()))])
        for c, of_repeat in enumerate(choices.of_fold):
            for k, recipe in enumerate(of_repeat):
                rows = self.folds[c] == k
                found[c, rows] = kind.probabilities[recipe][c][rows]
        return found

    def _evidence(self, alone: Choices, federated: Choices) -> list[Evidence]:
        """The evidence of each owner's predicted rows."""
        own, shared = self._chosen(self.alone, alone), self._chosen(self.federated, federated)
        folds, priors = np.stack(self.folds), np.stack(self.priors)
        unit = self.folds[0] if self.owners.order is not None else self.owners.unit  # windows of time are units
        found = []
        for i in range(len(self.owners.names)):
            rows = self.owners.rows(i)
            rows = rows[self.folds[0][rows] >= 0]
            found.append(
                evidence(
                    self.metric, self.owners.data.y[rows], told(own[:, rows]), told(shared[:, rows]), folds[:, rows],
                    unit=None if unit is None else unit[rows], priors=priors[:, rows],
                )
            )  # fmt: skip
        return found

    def _partners(self) -> list[Partners | None]:
        """The partners of each owner by the mean of its black boxes; None where they were not trained."""
        names, boxes = self.owners.names, list(self.alone.elsewhere.values())
        if not boxes:
            return [None] * len(names)
        found: list[Partners | None] = []
        for i in range(len(names)):
            rows = self.owners.rows(i)
            rows = rows[self.folds[0][rows] >= 0]
            predicted, y = np.mean([box[:, rows] for box in boxes], axis=0), self.owners.data.y[rows]
            of = (told(predicted), self.folds[0][rows], self.priors[0][rows])
            found.append(partners_of(i, names, self.metric, y, *of, self.config.worth))
        return found

    def _messages(self, candidate: Candidate) -> Ledger:
        """The ledger of one training by all owners, on the first fold."""
        fold, nothing = self.splits[0][0], np.zeros(0, np.int64)
        training = CandidateTraining(
            candidate, self.raw, fold.train, [[nothing]] * len(fold.train), self.config.points, fold.seed,
            messages=True,
        )  # fmt: skip
        (out,) = advance([training], together=False)
        return out.ledger or Ledger()

    def _pooled(self, alone: Choices) -> list[float | None]:
        """The score of each owner's rows by the best recipe for training alone on the rows of all owners, in the first
        repeat."""
        folds = self.splits[0]
        data = [standardized(self.owners, fold.train) for fold in folds]
        boxes = [one for n, one in enumerate(self.alone.candidates) if not one.model and not self.alone.failed(n)]
        wanted = boxes if alone.final == MIX else [self.alone.candidates[alone.final.candidate]]
        mean = np.zeros(self.priors[0].shape)
        for candidate in wanted:
            for fold, outputs in zip(folds, self._train(candidate, data, folds, pooled=True), strict=True):
                key = (alone.final.rounds, alone.final.mode)
                found = next(out.probabilities[key] for out in outputs if key in out.probabilities)
                for rows, probabilities in zip(fold.test, found, strict=True):
                    mean[rows] += np.nan_to_num(probabilities) / len(wanted)
        scores = []
        for i in range(len(self.owners.names)):
            rows = self.owners.rows(i)
            rows = rows[self.folds[0][rows] >= 0]
            y, priors = self.owners.data.y[rows], self.priors[0][rows]
            scores.append(_plain(contributions(self.metric, y, told(mean[rows]), self.folds[0][rows], priors)[0]))
        return scores

    # -- the result ------------------------------------------------------------------------------------------------

    def _result(
        self, found: Sequence[Evidence], verdicts: Sequence[OwnerVerdict], alone: Choices, federated: Choices
    ) -> TrialResult:
        best_of_all = federated.final
        method = self.federated.candidates[best_of_all.candidate]
        ledger = self.federated.ledgers.get(best_of_all, Ledger())
        if methods.named(method.method).pooled:
            ledger = self._messages(method)
        partners, weights = self._partners(), self.federated.weights.get(best_of_all)
        role = next((entry.sender for entry in ledger if entry.sender in ("client", "peer")), "client")
        names, pooled = self.owners.names, self._pooled(alone)
        cards = {
            name: OwnerCard(
                decision=verdict.decision,
                by=verdict.by,
                method=self.federated.label(best_of_all),
                rows=one.rows if self.owners.order is None else len(self.owners.rows(i)),
                fewest=one.fewest,
                gain=_plain(one.gain),
                low=_plain(verdict.low),
                high=_plain(verdict.high),
                alone=_plain(one.alone),
                federated=_plain(one.federated),
                pooled=pooled[i],
                p_gain=_plain(verdict.p_gain),
                p_worth=_plain(verdict.p_worth),
                p_same=_plain(verdict.p_same),
                leaning=verdict.leaning,
                more_rows=verdict.more_rows,
                own_weight=None if weights is None else float(weights[i]),
                partners=partners[i],
                sent=ledger.sent(f"{role}-{i}"),
                received=ledger.received(f"{role}-{i}"),
            )
            for i, (name, one, verdict) in enumerate(zip(names, found, verdicts, strict=True))
        }
        tried = list(dict.fromkeys(candidate.method for candidate in self.federated.candidates))
        return TrialResult(
            owners=cards,
            overall={
                key: _weighted([getattr(one, key) for one in found], self.weights)
                for key in ("gain", "alone", "federated")
            },
            metric=self.metric,
            worth=self.config.worth,
            seed=self.config.seed,
            repeats=len(self.folds),
            folds=int(self.folds[0].max()) + 1,
            in_time=self.owners.order is not None,
            recipe=_settings(method, best_of_all, self.config.seed, len(names), weights),
            alone=self.alone.label(alone.final),
            chosen=_counts(self.federated, federated),
            chosen_alone=_counts(self.alone, alone),
            tried=[candidate.text for candidate in self.federated.candidates],
            not_tried=[name for name in methods.registry() if name not in (*self.infeasible, *tried, ALONE)],
            infeasible=self.infeasible,
            revealed=_revealed(ledger),
            notes=self.notes,
            seconds=perf_counter() - self.started,
        )


def _settings(
    candidate: Candidate, recipe: Recipe, seed: int, owners: int, weights: np.ndarray | None
) -> dict[str, Any]:
    """The settings of a run that trains the recipe, without its data; the number of participants is that of owners."""
    found: dict[str, Any] = {"method": candidate.method, "rounds": recipe.rounds, "seed": seed}
    if candidate.params:
        found["params"] = {name: owners if value is None else value for name, value in candidate.params.items()}
    if recipe.mode in (JOINT, PERSONAL):
        found.setdefault("params", {})["own_weight"] = 0.0 if weights is None else weights.tolist()
    if candidate.model:
        found["models"] = {"pool": [candidate.model]}
    return found


def _counts(kind: Predictions, choices: Choices) -> dict[str, int]:
    """How often each was chosen, in folds of all repeats."""
    return dict(Counter(kind.label(recipe) for of_repeat in choices.of_fold for recipe in of_repeat))


def told(predicted: np.ndarray) -> np.ndarray:
    """Probabilities (..., K) as they are; numbers (..., 1) as (...)."""
    return predicted[..., 0] if predicted.shape[-1] == 1 else predicted


def _precision(labels: np.ndarray) -> float:
    """How precisely an owner's rows tell a score: n_k n_l / n of their two largest classes."""
    first, second, *_ = (*sorted(np.bincount(labels).tolist(), reverse=True), 0, 0)
    return float(first * second / max(1, len(labels)))


def _priors(labels: np.ndarray, classes: int) -> np.ndarray:
    """The share (K,) of each class in an owner's training rows; 1 / K where it has none."""
    shares = np.bincount(labels, minlength=classes) / len(labels)
    return np.where(shares > 0, shares, 1 / classes)


def _revealed(ledger: Ledger) -> list[dict[str, Any]]:
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


def _weighted(values: Sequence[float], weights: np.ndarray) -> float | None:
    """The weighted mean of the known ones of (N,) values; None if none is."""
    array = np.array(values)
    known = np.isfinite(array) & (weights > 0)
    return float(np.average(array[known], weights=weights[known])) if known.any() else None


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
