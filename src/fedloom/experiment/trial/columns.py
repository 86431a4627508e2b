"""A trial for partners with other columns of the same people: is the label told better by all
columns, or by one's own?

    clinic.csv, with the label    alone: models of its columns       joint: models of the columns of all files
    lab.csv                       joined by id; a person that it lacks has missing values there

Every row of the first file is predicted by models that did not see it, as in `run`: 3 repeats of 4
folds, and in each fold the candidates, for alone and joint, that are best on other rows. The gain
is told for all people, for those that a partner has, and with several partners for each one beside
the others. Rows count as in `evidence`.

`trial` calls it when it is given several files, and adds the recipe of a run to the result. In
shapes, C counts repeats, n people with a label in the order of the first file, K classes, and M
models: the black boxes, and their mean. A number to predict has no axis of K.
"""  # noqa: E501

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from fedloom import methods
from fedloom.core.errors import ConfigError, DataError, did_you_mean
from fedloom.core.rng import stream
from fedloom.data.alignment import near_misses, normalize
from fedloom.data.columns import RawColumn
from fedloom.data.copies import joined_codes
from fedloom.data.dataset import Dataset
from fedloom.data.hub import read_table, refuse_unknown_files
from fedloom.data.options import DataOptions
from fedloom.data.own import encoded, interpret
from fedloom.experiment.trial.candidates import Candidate, CandidateTraining, advance, on_one_thread
from fedloom.experiment.trial.choice import best
from fedloom.experiment.trial.contributions import scores_of, told
from fedloom.experiment.trial.decide import decide
from fedloom.experiment.trial.evidence import evidence
from fedloom.experiment.trial.folds import FOLDS, by_class, by_unit, of_first
from fedloom.experiment.trial.owners import FARTHEST, FEWEST_ROWS, raw_copies
from fedloom.experiment.trial.result import (
    OwnerCard,
    TrialConfig,
    TrialResult,
    calibrations,
    card_of,
    metric_for,
)
from fedloom.models.black_boxes import BLACK_BOXES, check_task

BOXES = ("logistic", "ridge", "forest", "boosting")
"""Those that can predict the label."""
REPEATS = 3
JOINT, ALONE = "joint", "alone"
Columns = Mapping[str, RawColumn]


@dataclass(frozen=True, eq=False)
class Parties:
    """What the files of a trial of columns hold, in the order of the first file's n rows.

    Attributes:
        own: the columns of the first file, with the label, without id and unit.
        partners: by the name of each other file, its columns, called such as "lab.glucose"; cells
            are missing for people that the partner lacks.
        units: (n,) the unit of each row, numbered from 0; None without one.
        notes: sentences on ids that differ in writing only.
    """

    own: dict[str, RawColumn]
    partners: dict[str, dict[str, RawColumn]]
    units: np.ndarray | None
    notes: list[str]


def trial_columns(
    files: Sequence[Path],
    options: DataOptions,
    config: TrialConfig,
    *,
    unit: str | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> TrialResult:
    """Run a trial of several files of the same people, the first with the label.

    Args:
        files: CSV files with the column of ids.
        options: label and id, and how columns are read.
        config: repeats, metric, worth, seed, alone.
        unit: a column of the first file, rows of one value of which are never split.
        progress: as for `run_trial`.

    Raises:
        DataError: a file has no id, or an id twice; the label is in another file; too few people
            are in common.
    """
    started = perf_counter()

    # settings of trials of rows that have no meaning here are refused, not ignored
    if config.methods:
        raise ConfigError(
            "a trial of columns compares what all columns tell: leave out method, here "
            f"{config.methods[0]!r}, and compare methods with its recipe"
        )
    if config.seconds is not None:
        raise ConfigError(
            "a trial of columns has no limit of time: leave out budget, and set repeats for fewer"
        )
    parties = read_parties(files, options, unit)
    own, partners, units = parties.own, parties.partners, parties.units

    # The sets of columns that models are trained on: the first file's, and those of all files. With
    # several partners also all but one partner's, under that partner's name: what the joint set
    # tells beyond it is what this partner adds beside the others. With one partner that is ALONE.
    column_sets = {
        ALONE: own,
        JOINT: {
            **own,
            **{
                column_name: column
                for columns in partners.values()
                for column_name, column in columns.items()
            },
        },
    }
    if len(partners) > 1:
        for name in partners:
            rest = {
                column_name: column
                for other, columns in partners.items()
                if other != name
                for column_name, column in columns.items()
            }
            column_sets[name] = {**own, **rest}
    # the column of ids was taken out when files were joined, so reading must not look for it
    without_id = replace(options, id=None, group=None)
    data = {
        name: encoded(*interpret(columns, without_id, files[0].stem))
        for name, columns in column_sets.items()
    }

    # all sets are of the same people with the same labels, and differ in inputs only
    y, classes = data[ALONE].y, len(data[ALONE].classes)
    if min(len(y), *(len(one.y) for one in data.values())) < FEWEST_ROWS:
        raise DataError(
            f"A trial needs at least {FEWEST_ROWS} people with a label, but {files[0]} has "
            f"{len(y)}."
        )
    # Encoding leaves out people without a label, and this mask (of all people in the first file)
    # leaves out the same ones of units and partners. More rows left out would shift one against
    # the other.
    labeled = np.array([bool(text) for text in own[str(options.label)].text])
    if labeled.sum() != len(y):
        raise DataError(
            f"{files[0]} has rows that are left out beside those without {options.label!r}: "
            "remove them."
        )
    units, copy_notes = _with_copies(data, None if units is None else units[labeled])
    # by partner, (n,) whether it has anything on each labeled person
    known_to = {name: _any_value(columns)[labeled] for name, columns in partners.items()}

    # the settings that follow from the label: a score, and the black boxes that can predict it
    metric, task, repeats = metric_for(config, classes), data[ALONE].task, config.repeats or REPEATS
    for name in config.alone or ():
        check_task(name, task)
    boxes = (
        [name for name in BOXES if task in BLACK_BOXES[name].tasks]
        if config.alone is None
        else config.alone
    )
    if not boxes:
        raise DataError(
            "A trial of columns compares black boxes: name some as alone, or leave it out."
        )

    # (repeats, n): all sets share the folds, so that predictions of a row are paired
    folds = np.stack([_folds(y, units, config.seed, c) for c in range(repeats)])
    priors = _priors(y, folds, classes)

    # Predict all rows by each set. Progress counts each black box of the first repeat, and a later
    # repeat, which trains only chosen ones, as one.
    total, done = len(data) * (len(boxes) + repeats - 1), 0
    best_names, chosen = {}, {}  # by set; chosen (repeats, n, K), or (repeats, n) of numbers
    with on_one_thread():
        for name, one in data.items():
            side = _Side(metric, boxes, one, folds, priors, config.seed)
            for c in range(repeats):
                done += len(boxes) if c == 0 else 1
                side.repeat(c)
                if progress is not None:
                    progress(done, total, perf_counter() - started)
            chosen[name], best_names[name] = np.stack(side.chosen), side.best_name()
    tried = [*boxes, *[_mean_of(boxes)] * (len(boxes) > 1)]

    # The cards: title -> the set that the joint one is compared with, and the rows (n,) that count.
    # People that a partner has get a card only if they are enough, and not simply all people.
    shown = {"all people": (ALONE, np.ones(len(y), bool))}
    for name, known in known_to.items():
        if FEWEST_ROWS <= known.sum() < len(y):
            shown[f"people that {name} has"] = (ALONE, known)
        if len(partners) > 1:
            shown[f"by the columns of {name}"] = (name, np.ones(len(y), bool))
    cards = {
        title: _card(
            metric,
            y[rows],
            chosen[against][:, rows],
            chosen[JOINT][:, rows],
            folds[:, rows],
            priors[:, rows],
            None if units is None else units[rows],
            best_names[JOINT],
            config.worth,
        )
        for title, (against, rows) in shown.items()
    }
    of_all_people = cards["all people"]
    # No method was trained, so nothing was revealed or found infeasible, and the caller adds the
    # recipe. A set chooses anew in every fold, but only its best on all rows is named.
    return TrialResult(
        owners=cards,
        overall={
            "gain": of_all_people.gain,
            "alone": of_all_people.alone,
            "federated": of_all_people.federated,
        },
        metric=metric,
        worth=config.worth,
        seed=config.seed,
        repeats=repeats,
        folds=FOLDS,
        in_time=False,
        recipe={},
        alone=best_names[ALONE],
        chosen={best_names[JOINT]: repeats * FOLDS},
        chosen_alone={best_names[ALONE]: repeats * FOLDS},
        tried=tried,
        not_tried=[one.name for one in methods.registry().values() if one.setting == "vertical"],
        infeasible={},
        revealed=[],
        notes=[
            *_notes_on_people(files[0].stem, len(y), known_to),
            *parties.notes,
            *copy_notes,
            # both sets say the same of the first file's columns: each note once, in order
            *dict.fromkeys([*data[ALONE].notes, *data[JOINT].notes]),
        ],
        seconds=perf_counter() - started,
        by_columns=True,
    )


def read_parties(files: Sequence[Path], options: DataOptions, unit: str | None) -> Parties:
    """The columns of all files, the partners' joined to the first file's rows by id.

    Raises:
        DataError: see `trial_columns`.
    """
    # what the settings must and must not say
    if options.id is None or options.label is None:
        lacking = {
            "id, the column that all files have": options.id,
            "label, the column to predict": options.label,
        }
        raise DataError(
            "Several files are partners with other columns of the same people: name "
            f"{', and '.join(what for what, value in lacking.items() if value is None)}."
        )
    if options.group is not None:
        raise DataError(
            "Owners with other rows and other columns at once cannot be tried yet: try rows with "
            "one file and group, columns with several files and no group."
        )
    # partners, and the columns of each, are called by the file's name without folder and ending
    if len({file.stem for file in files}) < len(files):
        raise DataError(
            f"Files must have different names, not {', '.join(file.name for file in files)}."
        )
    refuse_unknown_files(options.decimals, files)

    # each file by its own grammar: files may differ in the sign before decimals
    tables = [
        read_table(file, needed=[options.id], grammar=options.of_file(file.name).grammar)
        for file in files
    ]
    if options.label not in tables[0]:
        holder = next(
            (file for file, table in zip(files, tables, strict=True) if options.label in table),
            None,
        )
        raise DataError(
            f"The first file must have the label, but {files[0]} has no column {options.label!r}."
            + (f" Name {holder} first." if holder else did_you_mean(options.label, tables[0]))
        )

    # Ids leave the tables, as they are no features. Normalized, " A1" and "a1" are one person.
    # `ids` has, for each file, the id of each of its rows.
    ids = [[*map(normalize, table.pop(options.id).text)] for table in tables]
    for file, file_ids in zip(files, ids, strict=True):
        if len(set(file_ids)) < len(file_ids):
            again = next(one for one in file_ids if file_ids.count(one) > 1)
            raise DataError(
                f"{options.id} must name each row of {file} once, but {again!r} is there several "
                "times: keep one row of each, such as the last, or one of their means."
            )

    # the unit says which rows stay together, and is no feature either
    own, units = tables[0], None
    if unit is not None:
        if unit not in own:
            raise DataError(f"{files[0]} has no column {unit!r} to keep rows together by.")
        units = np.unique(own.pop(unit).text, return_inverse=True)[1].reshape(-1)

    # bring each partner's rows into the order of the first file's
    partners = {}
    for file, table, file_ids in zip(files[1:], tables[1:], ids[1:], strict=True):
        if options.label in table:
            raise DataError(
                f"Only the first file may have the label {options.label!r}, but {file} has it: "
                "remove it."
            )
        # a row without an id is of nobody known: two such rows are not one person
        row_of = {one: number for number, one in enumerate(file_ids) if one}
        rows = [row_of.get(one) for one in ids[0]]  # None: the partner lacks this person
        if sum(row is not None for row in rows) < FEWEST_ROWS:
            raise DataError(
                f"{file} has fewer than {FEWEST_ROWS} of the people of {files[0]} by "
                f"{options.id}, such as {file_ids[0]!r} and {ids[0][0]!r}: write ids alike in all "
                "files."
            )
        # the prefix tells columns of one name in several files apart
        partners[file.stem] = {
            f"{file.stem}.{name}": _at_rows(column, rows) for name, column in table.items()
        }
    return Parties(
        own,
        partners,
        units,
        [f"{sentence}." for sentence in near_misses(ids, [file.stem for file in files])],
    )


def _with_copies(
    data: Mapping[str, Dataset], units: np.ndarray | None
) -> tuple[np.ndarray | None, list[str]]:
    """The unit (n,) of each person, one for those whose own or joint columns are copies; and a note
    on these.
    """
    # A copy in training gives the answer to the one in the test. Two people that only partners tell
    # apart do so for the models of ALONE, hence copies by either set of columns count.
    found = [raw_copies(data[name])[0].copies for name in (ALONE, JOINT)]
    copies = joined_codes(*found)
    if not (count := len(copies) - len(np.unique(copies))):
        return units, []
    note = (
        f"{count} of {len(copies)} people are copies of another one, equal or equal but for "
        "rounding or the label: they are kept in one fold, and count together."
    )
    return copies if units is None else joined_codes(units, copies), [note]


def _at_rows(column: RawColumn, rows: Sequence[int | None]) -> RawColumn:
    """The column's cells at these row numbers; a missing cell for None."""
    import pyarrow as pa

    return RawColumn.of(column.name, column.cells.take(pa.array(rows, pa.int64())), column.grammar)


def _any_value(columns: Columns) -> np.ndarray:
    """(n,) whether a person has any value in these columns."""
    # (columns, n) texts, where a missing cell is ""
    found: np.ndarray = (np.array([column.text for column in columns.values()]) != "").any(axis=0)
    return found


def _notes_on_people(name: str, people: int, known_to: Mapping[str, np.ndarray]) -> list[str]:
    common = "; ".join(
        f"{partner} has {int(known.sum()):,} of them" for partner, known in known_to.items()
    )
    return [
        f"{name} has {people:,} people with a label; {common}.",
        "Joint is what all columns in one place tell, which federating could reach; no method of "
        "columns is measured here.",
    ]


def _folds(y: np.ndarray, units: np.ndarray | None, seed: int, repeat: int) -> np.ndarray:
    """(n,) the fold of each row in this repeat, from 0 to `FOLDS` - 1."""
    rng = stream(seed, "trial.folds", repeat, 0)
    if units is None:
        return by_class(y, rng)
    pairs = len(np.unique(units)) > len(y) / 2  # most people are alone, and classes are spread
    return of_first(by_class(y, rng), units) if pairs else by_unit(units, rng)


def _priors(y: np.ndarray, folds: np.ndarray, classes: int) -> np.ndarray:
    """The shares (C, n, K) of the classes in each row's training rows; (C, n, 1) of a number."""
    found = np.ones((*folds.shape, max(classes, 1)))
    for c, fold in enumerate(folds):
        for k in range(FOLDS) if classes else ():
            counts = np.bincount(y[fold != k], minlength=classes)
            # probabilities are divided by these, so a class that no row trains has no share of 0
            found[c, fold == k] = np.where(counts > 0, counts / counts.sum(), 1 / classes)
    return found


@dataclass(eq=False)
class _Side:
    """The models of one set of columns, in repeats of folds: all in the first, and later those that
    it chooses.

    Attributes:
        boxes: the names of the black boxes.
        folds, priors: (C, n) and (C, n, K), of all repeats.
        first: (M, n, K) predictions of the first repeat, by each of the black boxes and, if there
            are several, by their mean as the last; (M, n) of numbers. All choices are made by it.
        chosen: for each repeat, (n, K) probabilities or (n,) numbers by models that did not see the
            row.
    """

    metric: str
    boxes: Sequence[str]
    data: Dataset
    folds: np.ndarray
    priors: np.ndarray
    seed: int
    first: np.ndarray = field(init=False)
    chosen: list[np.ndarray] = field(default_factory=list)

    def repeat(self, c: int) -> None:
        """Predict all rows once more."""
        if c == 0:
            found = np.stack([self._fitted(box, 0, range(FOLDS)) for box in self.boxes])
            self.first = (
                np.concatenate([found, found.mean(0, keepdims=True)])
                if len(self.boxes) > 1
                else found
            )
        # (FOLDS,) for each fold of this repeat, the number of the model that predicts best, in the
        # first repeat, the rows that are not in the fold
        scores = [self._scores(self.folds[c] != k) for k in range(FOLDS)]
        choice = best(np.stack(scores, axis=1), np.ones(1))  # the rows count as of one owner
        if c == 0:
            self.chosen.append(self.first[choice[self.folds[0]], np.arange(len(self.data.y))])
            return
        # Later repeats train a black box only in folds that chose it, or the mean, in which each
        # one has an equal part.
        mean, found = len(self.boxes), np.zeros_like(self.first[0])
        for m, box in enumerate(self.boxes):
            parts = {
                k: 1.0 if choice[k] == m else 1 / mean
                for k in range(FOLDS)
                if choice[k] in (m, mean)
            }
            fitted = self._fitted(box, c, [*parts])
            for k, part in parts.items():
                found[self.folds[c] == k] += part * fitted[self.folds[c] == k]
        self.chosen.append(found)

    def best_name(self) -> str:
        """The black box, or their mean, that is best on all rows."""
        m = int(best(self._scores(np.ones(len(self.data.y), bool)), np.ones(1)))
        return [*self.boxes, _mean_of(self.boxes)][m]

    def _fitted(self, box: str, c: int, ks: Sequence[int]) -> np.ndarray:
        """The predictions (n, ...) of a black box that is trained on the other folds, for these
        folds.
        """
        # one owner of all rows, who scales the columns by the rows that train
        data = replace(self.data, groups=np.zeros(len(self.data.y), np.int64), owners=("",))
        found = np.zeros((len(data.y), max(len(data.classes), 1)))
        for k in ks:
            train, test = np.flatnonzero(self.folds[c] != k), np.flatnonzero(self.folds[c] == k)
            rows = data if data.ready else data.standardized_by_owner(train)
            rows = replace(rows, x=np.clip(rows.x, -FARTHEST, FARTHEST))
            seed = self.seed * 10_007 + 101 * c + k  # another one for each fold of each repeat
            (out,) = advance(
                [CandidateTraining(Candidate(box), rows, [train], [[test]], (1,), seed)],
                together=False,
            )
            # one party with one set of rows to predict
            ((found[test],),) = out.probabilities.values()
        return told(found)

    def _scores(self, kept: np.ndarray) -> np.ndarray:
        """(M, K, 1) of the first repeat's rows that are kept (n,), as for `best`."""
        found = np.full((len(self.first), FOLDS, 1), np.nan)
        for k in range(FOLDS):
            rows = np.flatnonzero((self.folds[0] == k) & kept)
            if len(rows):
                found[:, k, 0] = scores_of(
                    self.metric, self.data.y[rows], self.first[:, rows], self.priors[0, rows]
                )
        return found


def _mean_of(boxes: Sequence[str]) -> str:
    return f"mean of {', '.join(boxes)}"


def _card(
    metric: str,
    y: np.ndarray,
    alone: np.ndarray,
    joint: np.ndarray,
    folds: np.ndarray,
    priors: np.ndarray,
    units: np.ndarray | None,
    method: str,
    worth: float,
) -> OwnerCard:
    one = evidence(metric, y, alone, joint, folds, unit=units, priors=priors)
    (verdict,) = decide([one], worth)
    return card_of(
        one,
        verdict,
        metric,
        method=f"{method} on all columns",
        pooled=None if math.isnan(one.federated) else one.federated,
        own_weight=None,
        partners=None,
        sent=0,
        received=0,
        calibration=calibrations(y, alone, joint),
    )
