"""Runs a trial: every row is predicted by models that did not see it, and owners decide by their
own rows.

`TrialRun` has two sides: `alone`, the candidates that each owner trains by itself (black boxes and
networks), and `federated`. Each is a `Predictions`, whose candidates have numbers, and whose
`Recipe`s say a candidate's number, after how many rounds, and in which evaluation mode.

    repeat 0        all candidates of both sides train on all folds: `first` has what every recipe
                    predicts of all rows
    choice          for each fold, the recipe that is best on the first repeat's other rows
    later repeats   only chosen candidates train, and only on the folds that chose them
    evidence        the chosen predictions of both sides, row by row and repeat by repeat

In shapes, n counts the rows of all owners, N owners, K classes (1 for a number to predict), and M
recipes. Of a repeat c, `splits[c][k]` has the rows to train on and to predict in fold k, for each
owner, and `folds[c]` (n,) the fold of each row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

import numpy as np

from fedloom import methods
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.ledger import Ledger
from fedloom.data.dataset import Dataset, Kind
from fedloom.data.encoder import undo
from fedloom.experiment.run.lockstep import faster_in_lockstep
from fedloom.experiment.trial.candidates import (
    JOINT,
    MANY,
    OWN,
    OWN_KINDS,
    Candidate,
    CandidateTraining,
    Outputs,
    advance,
    baseline,
    candidates,
    default_methods,
    infeasible,
    obstacle,
    on_one_thread,
    settings,
)
from fedloom.experiment.trial.choice import WEIGHTS, best, gains_of_weights, personal
from fedloom.experiment.trial.contributions import contributions, scores_of, told
from fedloom.experiment.trial.decide import FEWEST, OwnerVerdict, decide, worth_repeating
from fedloom.experiment.trial.evidence import Evidence, evidence
from fedloom.experiment.trial.folds import Fold, blocks, draw_folds, split
from fedloom.experiment.trial.owners import MOST_NAMED, Owners, distinct, standardized
from fedloom.experiment.trial.partners import Partners, partners_of
from fedloom.experiment.trial.predictions import MIX, PERSONAL, Boxes, Predictions, Recipe
from fedloom.experiment.trial.result import (
    TrialConfig,
    TrialResult,
    calibrations,
    card_of,
    metric_for,
)
from fedloom.experiment.trial.words import some
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
SUSPICIOUS = 0.99
"""A score of training alone above which a column may tell the label."""
INDEPENDENT = "if rows are independent"
"""What joining holds under, where nothing excludes that rows depend on each other."""
EXACT = 0.05
"""An RMSE of training alone, in standard deviations of the label, below which it is the same."""
PARTNERS = 20
"""The most owners whose models are scored on each other's rows."""


def run_trial(
    owners: Owners,
    config: TrialConfig | None = None,
    *,
    progress: Callable[[int, int, float], None] | None = None,
) -> TrialResult:
    """Run a trial.

    Args:
        owners: their labeled rows.
        config: the settings; None for the defaults.
        progress: called after each candidate in each repeat with the number of those that ended, of
            all, at most, and the seconds so far.

    Raises:
        ConfigError: an unknown or infeasible method.
        DataError: rows are too few to split.
    """
    with on_one_thread():
        return TrialRun(
            distinct(owners),
            config or TrialConfig(),
            progress or (lambda done, total, seconds: None),
        ).run()


class TrialRun:
    """A trial in progress."""

    def __init__(
        self, owners: Owners, config: TrialConfig, progress: Callable[[int, int, float], None]
    ) -> None:
        self.owners, self.config, self.progress = owners, config, progress
        self.started, self.notes = perf_counter(), list(owners.notes)
        data = owners.data
        K = len(owners.data.classes)
        each = [owners.rows(i) for i in range(len(owners.names))]
        self.infeasible = infeasible(len(each), data.task)
        self.metric = metric_for(config, K)
        self.weights = np.array(
            [_precision(data.y[rows]) if K else float(len(rows)) for rows in each]
        )
        # owners' errors count by the spread of their numbers
        relative = self.metric in ("rmse", "mae")
        self.unit_of = np.array(
            [max(float(data.y[rows].std()), 1e-12) if relative else 1.0 for rows in each]
        )
        guess = 1 / K if K else float(data.y.mean())
        networks = config.networks or (
            ("cnn-small",) if data.kind == "image" else ("mlp", "linear")
        )
        typical = int(np.median(np.bincount(owners.owner)))
        tried = candidates(self._methods(), networks, config.rates, typical)
        self.federated = Predictions(tried, guess)
        same = sorted({one.model for one in tried if one.model})
        self.raw = (
            undo(data)
            if any("raw rows" in methods.named(one.method).needs for one in tried)
            else data
        )
        solo = candidates([baseline()], same, config.rates, typical)
        for name in config.alone or ():
            check_task(name, data.task)
        usual = [name for name in BOXES[data.kind] if data.task in BLACK_BOXES[name].tasks]
        boxes = usual if config.alone is None else config.alone
        self.alone = Predictions([*(Candidate(name) for name in boxes), *solo], guess)
        self.lockstep = all(
            faster_in_lockstep(name, data.input_shape, max(K, 1)) for name in networks
        )
        self.repeats = 1 if owners.order is not None else config.repeats or REPEATS
        self.splits: list[list[Fold]] = []  # of each repeat
        self.folds: list[np.ndarray] = []  # of each repeat, (n,)
        self.priors: list[np.ndarray] = []  # of each repeat, (n, K)
        self.boxes: list[Boxes] = []  # of each repeat
        self.scored: list[np.ndarray] = []  # of each owner
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
                f"{', '.join(left)}: left out, as too slow with more than {MANY} owners; "
                "--method tries it."
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
            found = self._evidence()
            verdicts = decide(found, self.config.worth)
            if len(self.folds) == self.repeats:
                break
            if len(self.folds) >= FEWEST_REPEATS and not worth_repeating(
                found, verdicts, self.config.worth
            ):
                break
            now = perf_counter()
            if (
                self.config.seconds is not None
                and now - self.started + (now - began) > self.config.seconds
            ):
                self.notes.append(
                    f"The budget allowed {len(self.folds)} of {self.repeats} repeats."
                )
                break
        return self._result(found, verdicts)

    # -- training ----------------------------------------------------------------------------------

    def _repeat(self, c: int) -> None:
        """Train all candidates on all folds in the first repeat, and in a later one those that the
        first chose.
        """
        self._split(c)
        self.boxes.append(Boxes())
        data = [standardized(self.owners, fold.train) for fold in self.splits[c]]
        if c == 0:
            for kind in (self.alone, self.federated):
                self._first(kind, data)
        # those of all owners first: they predict more rows
        for kind in (self.federated, self.alone):
            while not self._chosen(kind, c, data):
                pass

    def _first(self, kind: Predictions, data: Sequence[Dataset]) -> None:
        """Train all candidates of one side in the first repeat."""
        for number in range(len(kind.candidates)):
            if kind is self.federated and number and self._late():
                left = [one.text for one in kind.candidates[number:]]
                self.notes.append(
                    f"Left out for lack of time: {', '.join(left)}. A larger --budget tries them."
                )
                del kind.candidates[number:]
                break
            try:
                self._train_into(kind, kind.first, number, range(len(self.splits[0])), 0, data)
            except MethodError as error:
                self._drop(kind, number, error)
            self._progress()
        if kind is self.alone and len(kind.boxes()) > 1:
            kind.first[MIX] = kind.composed(MIX, kind.first, np.zeros(0))
        for recipe in [one for one in kind.first if one.mode == JOINT]:
            mine = replace(recipe, mode=PERSONAL)
            own, kind.weights[mine] = self._own_weights(kind, recipe, 0)
            for mixed in (replace(recipe, mode=""), mine):
                kind.first[mixed] = kind.composed(mixed, kind.first, own)

    def _drop(self, kind: Predictions, number: int, error: MethodError) -> None:
        kind.drop(number, error)
        reason = str(error).partition("; traceback")[0]
        self.notes.append(
            f"{kind.candidates[number].text} is left out: {reason}; fedloom run shows where."
        )

    def _progress(self) -> None:
        self.done += 1
        count = len(self.alone.candidates) + len(self.federated.candidates)
        self.progress(self.done, count + 2 * (self.repeats - 1), perf_counter() - self.started)

    def _chosen(self, kind: Predictions, c: int, data: Sequence[Dataset]) -> bool:
        """Choose the recipe of each fold of the c-th repeat, and train it unless the first repeat
        has; False if one could not be trained, and was dropped.
        """
        choice = self._choice(kind, c)
        each: dict[Recipe, np.ndarray] = kind.first if c == 0 else {}
        for number in (
            sorted({number for recipe in choice for number in kind.trained(recipe)}) if c else ()
        ):
            try:
                ks = [k for k, recipe in enumerate(choice) if number in kind.trained(recipe)]
                self._train_into(kind, each, number, ks, c, data)
            except MethodError as error:
                self._drop(kind, number, error)
                return False
        found = np.zeros_like(next(iter(kind.first.values())))
        for recipe in set(choice):
            rows = np.isin(self.folds[c], [k for k, one in enumerate(choice) if one == recipe])
            own = np.zeros(0)
            if recipe.mode == PERSONAL:
                own, _ = self._own_weights(kind, replace(recipe, mode=JOINT), c)
            found[rows] = kind.composed(recipe, each, own)[rows]
        kind.choices.append(choice)
        kind.chosen.append(found)
        if c:
            self._progress()
        return True

    def _train_into(
        self,
        kind: Predictions,
        into: dict[Recipe, np.ndarray],
        number: int,
        ks: Sequence[int],
        c: int,
        data: Sequence[Dataset],
    ) -> None:
        """Train a candidate on these folds of the c-th repeat, and set its predictions.

        Args:
            kind: the side that the candidate is of.
            into: takes, for each recipe of the candidate, (n, K) of all rows; rows of other folds
                stay as they are.
            number: of the candidate.
            ks: the folds.
            c: the repeat.
            data: for each fold of the repeat, all rows, scaled by its training rows.
        """
        candidate, folds = kind.candidates[number], [self.splits[c][k] for k in ks]
        # A black box alone. In the first repeat each owner's also predicts the others' rows: this
        # shows who could be partners.
        if kind is self.alone and not candidate.model:
            into[Recipe(number, 0, "")] = self._trained_boxes(
                number, ks, c, data, on_all_rows=c == 0
            ).own[number]
            return
        if exchanged := self._sent(candidate):
            # owners send each other the very black boxes that they train alone: nothing new trains.
            # `.all[box]` (n, K) has for each row the mean prediction of all owners' boxes.
            means = [
                self._trained_boxes(box, ks, c, data, on_all_rows=True).all[box]
                for box in exchanged
            ]
            # the one round is the exchange
            into[Recipe(number, 1, "")] = np.mean(means, axis=0)
        else:
            # a method of tables encodes columns itself, so it reads them as they are in the file
            reads_raw = "raw rows" in methods.named(candidate.method).needs
            of_folds = [self.raw if reads_raw else data[k] for k in ks]
            for fold, outputs in zip(folds, self._train(candidate, of_folds, folds), strict=True):
                for out in outputs:  # one after each number of rounds
                    for (rounds, mode), found in out.probabilities.items():
                        recipe = Recipe(number, rounds, mode)
                        for rows, probabilities in zip(fold.test, found, strict=True):
                            kind.set(into, recipe, rows, probabilities, len(self.owners.owner))
                        # the messages of one training stand for those of all folds
                        if out.ledger is not None:
                            kind.ledgers[recipe] = out.ledger

        # A method whose owners may mix the joint model with black boxes of their own: the trial
        # keeps both, as modes JOINT and OWN, and mixes them itself with several weights.
        boxes = self._own_boxes()  # numbers of candidates
        if (
            kind is self.federated
            and boxes
            and methods.named(candidate.method).config.mixing() is not None
        ):
            own = np.mean(
                [
                    self._trained_boxes(box, ks, c, data, on_all_rows=False).own[box]
                    for box in boxes
                ],
                axis=0,
            )
            for recipe in [one for one in into if one.candidate == number and one.mode == ""]:
                into[replace(recipe, mode=JOINT)], into[replace(recipe, mode=OWN)] = (
                    into.pop(recipe),
                    own,
                )

    def _own_boxes(self) -> list[int]:
        """The numbers of the black boxes that a run can mix with a joint model."""
        return [n for n in self.alone.boxes() if self.alone.candidates[n].method in OWN_KINDS]

    def _sent(self, candidate: Candidate) -> list[int]:
        """The numbers of the black boxes whose models the owners exchange; [] for another method,
        or if one of them is not trained alone.
        """
        kinds = settings(candidate).means_of
        found = [
            n for n in self._own_boxes() if OWN_KINDS[self.alone.candidates[n].method] in kinds
        ]
        return found if len(found) == len(kinds) else []

    def _trained_boxes(
        self, number: int, ks: Sequence[int], c: int, data: Sequence[Dataset], *, on_all_rows: bool
    ) -> Boxes:
        """The black boxes of the c-th repeat, after this one of each owner is trained on these
        folds; with `on_all_rows` each owner's predicts the rows of all owners.

        Predictions are kept, so that a box that several recipes need is trained once.
        """
        boxes, names, n = self.boxes[c], self.owners.names, len(self.owners.owner)
        done, shape = boxes.done.setdefault(number, {}), (n, max(len(self.owners.data.classes), 1))
        # `guess` stands where nothing is predicted yet: 1 / K, or the mean number to predict
        for predictions in (boxes.own, boxes.all):
            predictions.setdefault(number, np.full(shape, self.alone.guess))
        # what the box of each of N owners predicts of all n rows: (N, n, K) is large with many
        # owners, whose partners are not looked for
        if c == 0 and len(names) <= PARTNERS:
            boxes.elsewhere.setdefault(number, np.full((len(names), *shape), self.alone.guess))
        for k in ks:
            # a box that has predicted its own rows only is trained again if all rows are wanted
            if k in done and (done[k] or not on_all_rows):
                continue
            fold, done[k] = self.splits[c][k], on_all_rows
            all_rows = np.concatenate(fold.test)  # owner after owner
            # for each owner's model a list of the sets of rows that it predicts, here of one set
            judged = [[all_rows] if on_all_rows else [rows] for rows in fold.test]
            candidate = self.alone.candidates[number]
            # (1,): outputs after one round only, as a black box has no more
            training = CandidateTraining(candidate, data[k], fold.train, judged, (1,), fold.seed)
            # a black box has one output, with one array for each owner's model: of the owner's
            # test rows, or of all in which those of owner i are from ends[i] to ends[i + 1]; one
            # training alone has no other to be in lock-step with, hence not `together`
            (out,) = advance([training], together=False)
            (found,) = out.probabilities.values()
            ends = np.cumsum([0, *map(len, fold.test)])
            for i, rows in enumerate(fold.test):
                boxes.own[number][rows] = (
                    found[i][ends[i] : ends[i + 1]] if on_all_rows else found[i]
                )
                if on_all_rows and number in boxes.elsewhere:
                    boxes.elsewhere[number][i, all_rows] = found[i]
            if on_all_rows:
                boxes.all[number][all_rows] = np.mean(found, axis=0)
        return boxes

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
        if c == 0:
            self.scored = self._scored_rows()
        self.priors.append(priors)

    def _late(self) -> bool:
        """Whether another candidate would leave no time for a second repeat."""
        spent = perf_counter() - self.started
        return (
            self.config.seconds is not None
            and (spent + spent / self.done) * FEWEST_REPEATS > self.config.seconds
        )

    def _train(
        self,
        candidate: Candidate,
        data: Sequence[Dataset],
        folds: Sequence[Fold],
        *,
        pooled: bool = False,
    ) -> list[list[Outputs]]:
        """For each fold the outputs after each number of rounds."""
        trainings = []
        for rows, fold in zip(data, folds, strict=True):
            fitted = [np.concatenate(fold.train)] if pooled else fold.train
            judged = [fold.test] if pooled else [[test] for test in fold.test]
            trainings.append(
                CandidateTraining(candidate, rows, fitted, judged, self.config.points, fold.seed)
            )
        found: list[list[Outputs]] = [[] for _ in folds]
        while (outputs := advance(trainings, together=self.lockstep)) and outputs[0].probabilities:
            for into, out in zip(found, outputs, strict=True):
                into.append(out)
        return found

    # -- scores ------------------------------------------------------------------------------------

    def _scores(self, predicted: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The scores (M, K, N) of predictions (M, n, ...) of the first repeat in its K folds, of
        the rows that are kept (n,); nan where they are not defined.
        """
        found = np.full((len(predicted), len(self.splits[0]), len(self.owners.names)), math.nan)
        for f, fold in enumerate(self.splits[0]):
            for i, rows in enumerate(fold.test):
                if len(rows := rows[kept[rows]]):
                    y, priors = self.owners.data.y[rows], self.priors[0][rows]
                    found[:, f, i] = (
                        scores_of(self.metric, y, predicted[:, rows], priors) / self.unit_of[i]
                    )
        return found

    def _recipes(self, kind: Predictions) -> tuple[list[Recipe], np.ndarray]:
        """The recipes to choose from, and their predictions (M, n, ...) in the first repeat."""
        recipes = sorted(recipe for recipe in kind.first if recipe.mode != OWN)
        return recipes, told(np.stack([kind.first[recipe] for recipe in recipes]))

    def _choice(self, kind: Predictions, c: int) -> list[Recipe]:
        """For each fold of the c-th repeat, the best recipe by the first repeat, on the rows that
        are not in the fold.
        """
        recipes, predicted = self._recipes(kind)
        scores = [self._scores(predicted, self.folds[c] != k) for k in range(len(self.splits[c]))]
        return [recipes[m] for m in best(np.stack(scores, axis=1), self.weights)]

    def _final(self, kind: Predictions) -> Recipe:
        """The best recipe by all rows of the first repeat."""
        recipes, predicted = self._recipes(kind)
        return recipes[int(best(self._scores(predicted, self.folds[0] >= 0), self.weights))]

    def _own_weights(
        self, kind: Predictions, recipe: Recipe, c: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The weights (n,) of own models in the folds of the c-th repeat, by the first repeat's
        predictions of other rows; and those (N,) by all rows.
        """
        joint, own = told(kind.first[recipe]), told(kind.first[replace(recipe, mode=OWN)])
        fold, K, N = self.folds[c], int(self.folds[c].max()) + 1, len(self.owners.names)
        gains = np.zeros((len(WEIGHTS) - 1, K + 1, N))
        spread = np.zeros((len(WEIGHTS) - 1, K + 1, N))
        units, together = [], self.owners.together
        for k in range(K + 1):  # without fold k; at last with all
            for i in range(N):
                rows = self.owners.rows(i)
                rows = rows[(self.folds[0][rows] >= 0) & (fold[rows] != k)]
                gains[:, k, i], spread[:, k, i], count = gains_of_weights(
                    self.metric,
                    self.owners.data.y[rows],
                    own[rows],
                    joint[rows],
                    self.folds[0][rows],
                    unit=None if together is None else together[rows],
                    priors=self.priors[0][rows],
                )
                units.append(count)
        found = personal(gains, spread, np.reshape(units, (K + 1, N)))
        return np.where(fold >= 0, found[fold, self.owners.owner], 0.0), found[K]

    def _scored_rows(self) -> list[np.ndarray]:
        """The rows of each owner that are scored: those that models predict, without classes of
        which an owner has too few units, if two others remain. A note names these classes.
        """
        owners, y, found, left = self.owners, self.owners.data.y, [], []
        unit = self.folds[0] if owners.order is not None else owners.together
        for i, name in enumerate(owners.names):
            rows = owners.rows(i)
            rows = rows[self.folds[0][rows] >= 0]
            classes = np.unique(y[rows]) if owners.data.classes else ()
            units = {
                k: len(rows[y[rows] == k] if unit is None else np.unique(unit[rows[y[rows] == k]]))
                for k in classes
            }
            few = [k for k, count in units.items() if count < FEWEST]
            if few and len(units) - len(few) > 1:
                rows = rows[~np.isin(y[rows], few)]
                left.append(f"{name} ({', '.join(owners.data.classes[k] for k in few)})")
            found.append(rows)
        if left:
            self.notes.append(
                f"Classes of which an owner has fewer than {FEWEST} are not scored there: "
                f"{some(left, MOST_NAMED)}."
            )
        return found

    def _evidence(self) -> list[Evidence]:
        """The evidence of each owner's predicted rows."""
        own, shared = np.stack(self.alone.chosen), np.stack(self.federated.chosen)
        folds, priors = np.stack(self.folds), np.stack(self.priors)
        # windows of time are units
        unit = self.folds[0] if self.owners.order is not None else self.owners.together
        together = self.owners.together if self.owners.order is None else blocks(self.owners.order)
        found = []
        for rows in self.scored:
            found.append(
                evidence(
                    self.metric,
                    self.owners.data.y[rows],
                    told(own[:, rows]),
                    told(shared[:, rows]),
                    folds[:, rows],
                    unit=None if unit is None else unit[rows],
                    priors=priors[:, rows],
                    together=None if together is None else together[rows],
                )
            )
        return found

    def _calibration(self, i: int) -> tuple[float, float] | None:
        """How far the probabilities of owner i's rows are from what comes true, alone and
        federated.
        """
        rows = self.scored[i]
        sides = (told(np.stack(kind.chosen)[:, rows]) for kind in (self.alone, self.federated))
        return calibrations(self.owners.data.y[rows], *sides)

    def _partners(self) -> list[Partners | None]:
        """The partners of each owner by the mean of its black boxes; None where they were not
        trained.
        """
        names, boxes = self.owners.names, list(self.boxes[0].elsewhere.values())
        if not boxes:
            return [None] * len(names)
        found: list[Partners | None] = []
        together = self.owners.together if self.owners.order is None else self.folds[0]
        for i, rows in enumerate(self.scored):
            predicted = np.mean([box[:, rows] for box in boxes], axis=0)
            y = self.owners.data.y[rows]
            of = (told(predicted), self.folds[0][rows], self.priors[0][rows])
            sides = [told(kind.chosen[0])[rows] for kind in (self.alone, self.federated)]
            unit = None if together is None else together[rows]
            found.append(partners_of(i, names, self.metric, y, *of, self.config.worth, sides, unit))
        return found

    def _messages(self, candidate: Candidate) -> Ledger:
        """The ledger of one training by all owners, on the first fold."""
        fold, nothing = self.splits[0][0], np.zeros(0, np.int64)
        training = CandidateTraining(
            candidate,
            self.raw,
            fold.train,
            [[nothing]] * len(fold.train),
            self.config.points,
            fold.seed,
            messages=True,
        )
        (out,) = advance([training], together=False)
        return out.ledger or Ledger()

    def _pooled(self, alone: Recipe) -> list[float | None]:
        """The score of each owner's rows by models of the rows of all owners, in the first repeat:
        by the best candidate that trains them at once; without one, by the best recipe for training
        alone.
        """
        # (n, K) what such models predict
        kind, pooled = self.federated, np.zeros(self.priors[0].shape)
        # A pooled method's model has the same bits whether rows are at one place or at many, so
        # what it predicted is what one place would. An own model mixed into it is of one owner
        # only: where there is a recipe JOINT without it, the mix (mode "") does not count.
        of_pooled_methods = [
            recipe
            for recipe in kind.first
            if methods.named(kind.candidates[recipe.candidate].method).pooled
            and (
                recipe.mode == JOINT
                or (not recipe.mode and replace(recipe, mode=JOINT) not in kind.first)
            )
        ]
        if of_pooled_methods:
            # the best on all rows that are predicted: -1 is the fold of those that only train
            scores = self._scores(
                told(np.stack([kind.first[recipe] for recipe in of_pooled_methods])),
                self.folds[0] >= 0,
            )
            pooled = kind.first[of_pooled_methods[int(best(scores, self.weights))]]
        else:
            # train the recipe for training alone once more, on the training rows of all owners; it
            # is one candidate, or the mean of several black boxes
            folds = self.splits[0]
            data = [standardized(self.owners, fold.train) for fold in folds]
            wanted = [self.alone.candidates[number] for number in self.alone.trained(alone)]
            for candidate in wanted:
                for fold, outputs in zip(
                    folds, self._train(candidate, data, folds, pooled=True), strict=True
                ):
                    # the recipe's number of rounds is among those after which there are outputs
                    key = (alone.rounds, alone.mode)
                    found = next(
                        out.probabilities[key] for out in outputs if key in out.probabilities
                    )
                    # each candidate adds its part of the mean; one that diverged adds 0
                    for rows, probabilities in zip(fold.test, found, strict=True):
                        pooled[rows] += np.nan_to_num(probabilities) / len(wanted)
        scored = []
        for rows in self.scored:  # of each owner; `told` drops the axis of a number to predict
            y, priors = self.owners.data.y[rows], self.priors[0][rows]
            score, _ = contributions(
                self.metric, y, told(pooled[rows]), self.folds[0][rows], priors
            )
            scored.append(_plain(score))
        return scored

    # -- the result --------------------------------------------------------------------------------

    def _result(self, found: Sequence[Evidence], verdicts: Sequence[OwnerVerdict]) -> TrialResult:
        """The result, given each owner's evidence and verdict."""
        # Each fold chose its own recipe; what is reported and advised is the best by all rows.
        best_of_all, best_alone = self._final(self.federated), self._final(self.alone)

        # The messages of the recipe. A method that was trained on all rows at once, or by the black
        # boxes of training alone, has sent none yet: it trains once more by messages.
        # Evaluation modes are of one training, whose messages are under the mode "".
        method = self.federated.candidates[best_of_all.candidate]
        ledger = self.federated.ledgers.get(replace(best_of_all, mode=""), Ledger())
        if methods.named(method.method).pooled or settings(method).means_of:
            ledger = self._messages(method)
        # Partners (N,) of owners are those whose models help on its rows; None if not looked for.
        # Weights (N,) of own models; None if the recipe has no weight for each owner
        partners, weights = self._partners(), self.federated.weights.get(best_of_all)
        # owner i is "client-i" in the ledger, or "peer-i" of a method without a server
        role = next(
            (entry.sender for entry in ledger if entry.sender in ("client", "peer")), "client"
        )
        # `pooled` (N,): each owner's score by models that were trained on all owners' rows at once
        names, pooled = self.owners.names, self._pooled(best_alone)

        # A column that gives the label away. Scores are higher if better, and errors negative: an
        # RMSE is small (above -EXACT) beside the label's deviation, `unit_of` (N,).
        # Without any known error -1 stands for one that is not small; an error is never 0, as
        # `contributions` takes an RMSE as at least 1e-12.
        # `_weighted` is the mean over the owners, by `self.weights` (N,).
        alone = _weighted([one.alone for one in found], self.weights)
        errors = [one.alone / unit for one, unit in zip(found, self.unit_of, strict=True)]
        exact = self.metric == "rmse" and (_weighted(errors, self.weights) or -1.0) > -EXACT
        if exact or (
            alone is not None
            and alone > SUSPICIOUS
            and self.metric in ("auc", "accuracy", "balanced accuracy")
        ):
            self.notes.append(
                "Predictions are nearly perfect already: check that no column tells what is "
                "known only after the label, and leave such columns out with data.drop."
            )

        cards = {
            name: card_of(
                one,
                verdict,
                self.metric,
                method=self.federated.label(best_of_all),
                rows=len(self.owners.rows(i)),
                pooled=pooled[i],
                own_weight=None if weights is None else float(weights[i]),
                partners=partners[i],
                # bytes of tensors
                sent=ledger.sent(f"{role}-{i}"),
                received=ledger.received(f"{role}-{i}"),
                # how far probabilities are from what comes true, alone and federated
                calibration=self._calibration(i),
                # in doubt: nothing excludes that rows depend on each other, as those of a day do
                condition=INDEPENDENT if self.owners.doubt and verdict.decision == "join" else "",
            )
            for i, (name, one, verdict) in enumerate(zip(names, found, verdicts, strict=True))
        }
        # a method may have several candidates: named once, in the order in which they were tried
        tried = list(dict.fromkeys(candidate.method for candidate in self.federated.candidates))
        return TrialResult(
            owners=cards,
            overall={
                key: _weighted([getattr(one, key) for one in found], self.weights)
                for key in ("gain", "alone", "federated")
            },
            metric=self.metric,
            worth=self.config.worth,  # the smallest gain that is worth federating for
            seed=self.config.seed,
            repeats=len(self.folds),
            folds=int(self.folds[0].max()) + 1,
            # with a place in time of each row, folds are windows of time
            in_time=self.owners.order is not None,
            recipe=self._settings(best_of_all),
            alone=self.alone.label(best_alone),
            # how often each recipe was chosen, in folds of all repeats
            chosen=self.federated.counts(),
            chosen_alone=self.alone.counts(),
            tried=[candidate.text for candidate in self.federated.candidates],
            not_tried=[
                name
                for name in methods.registry()
                if name not in (*self.infeasible, *tried, baseline())
            ],
            infeasible=self.infeasible,
            # messages by sender, receiver, kind and content, with number and bytes
            revealed=_revealed(ledger),
            notes=self.notes,
            seconds=perf_counter() - self.started,
        )

    def _settings(self, recipe: Recipe) -> dict[str, Any]:
        """The settings of a run that trains the recipe, without its data; the number of
        participants is that of owners.
        """
        candidate = self.federated.candidates[recipe.candidate]
        weights = self.federated.weights.get(recipe)
        count = len(self.owners.names)
        params = {
            name: count if value is None else value for name, value in candidate.params.items()
        }
        # a mix with models of the owner's own rows
        if replace(recipe, mode=JOINT) in self.federated.first:
            cfg = settings(candidate)
            if not cfg.mixes and recipe.mode != JOINT:
                boxes = [self.alone.candidates[n].method for n in self._own_boxes()]
                params |= cfg.mixing([OWN_KINDS[box] for box in boxes])
            if recipe.mode == PERSONAL or (cfg.mixes and recipe.mode == JOINT):
                params |= cfg.mixing(weight=0.0 if weights is None else weights.tolist())
        found: dict[str, Any] = {
            "method": candidate.method,
            "rounds": recipe.rounds,
            "seed": self.config.seed,
        }
        found |= {"params": params} if params else {}
        return found | ({"models": {"pool": [candidate.model]}} if candidate.model else {})


def _precision(labels: np.ndarray) -> float:
    """How precisely an owner's rows tell a score: n_k n_l / n of their two largest classes."""
    first, second, *_ = (*sorted(np.bincount(labels).tolist(), reverse=True), 0, 0)
    return float(first * second / max(1, len(labels)))


def _priors(labels: np.ndarray, classes: int) -> np.ndarray:
    """The share (K,) of each class in an owner's training rows; 1 / K where it has none."""
    shares = np.bincount(labels, minlength=classes) / len(labels)
    return np.where(shares > 0, shares, 1 / classes)


def _revealed(ledger: Ledger) -> list[dict[str, Any]]:
    """Messages by sender, receiver, kind and content, with their number and bytes for
    each owner.
    """
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for entry in ledger:
        parts = dict.fromkeys(
            part.split()[0].split(".")[0] for part in entry.what.split("; ") if " " in part
        )
        key = (entry.sender, entry.receiver, entry.kind, ", ".join(parts) or entry.what)
        total = found.setdefault(key, [0, 0])
        total[0] += entry.count
        total[1] += entry.bytes
    return [
        {
            **dict(zip(("sender", "receiver", "kind", "content"), key, strict=True)),
            "count": count,
            "bytes": size,
        }
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
