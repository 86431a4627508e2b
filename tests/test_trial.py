"""Trials on planted data: who must join, who must not; and the statistics of decisions."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import methods
from fedloom.cli import main
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.dataset import Dataset, image_dataset, table_dataset
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.experiment.trial import Owners, TrialConfig, TrialResult, read_owners, run_trial
from fedloom.experiment.trial import candidates as trial_candidates
from fedloom.experiment.trial import run as trial_run
from fedloom.experiment.trial.candidates import (
    FOREST,
    MANY,
    Candidate,
    CandidateTraining,
    Outputs,
    candidates,
    default_methods,
    infeasible,
)
from fedloom.experiment.trial.decide import ALPHA, Gain, decide_owners, gain, tail
from fedloom.experiment.trial.owners import split_rows, split_time, standardized
from fedloom.experiment.trial.run import Choice, score

PAGE = Path(__file__).parents[1] / "examples" / "fedprox.py"
"""A method of a user."""

# -- statistics ----------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_nadeau_and_bengio() -> None:
    """By hand: mean 0.2, s.d. 0.1, 1/4 + 1/3; t of 3 degrees of freedom is 3.1824463."""
    found = gain([0.1, 0.2, 0.3, 0.2], 1 / 3)
    deviation = np.std([0.1, 0.2, 0.3, 0.2], ddof=1)
    half = 3.182446305284263 * deviation * math.sqrt(1 / 4 + 1 / 3)
    assert found.mean == pytest.approx(0.2) and found.splits == 4
    assert found.low == pytest.approx(0.2 - half) and found.high == pytest.approx(0.2 + half)
    assert gain([0.1, math.nan, 0.3], 1 / 3).low == -math.inf  # two splits decide nothing


def test_the_corrected_interval_covers_and_the_plain_one_does_not() -> None:
    """Repeated splits of one sample of 60 numbers, whose mean over a test share estimates a true 0."""
    rng, plain, corrected = np.random.default_rng(0), 0, 0
    for _ in range(400):
        sample = rng.normal(size=60)
        means = [rng.permutation(sample)[:15].mean() for _ in range(20)]
        found = gain(means, 15 / 45)
        corrected += found.low <= 0 <= found.high
        half = 2.093 * np.std(means, ddof=1) / math.sqrt(20)
        plain += abs(np.mean(means)) <= half
    assert corrected / 400 > 0.93 and plain / 400 < 0.7


def of(mean: float, error: float, splits: int = 10) -> Gain:
    return Gain(mean, mean - 2.262 * error, mean + 2.262 * error, error, splits, 1 / 3)


OPEN = of(0.01, 0.05)
"""A mean gain over owners that decides nothing."""


def test_p_values_are_adjusted_as_by_benjamini_and_hochberg() -> None:
    gains = [of(0.02, 0.01), of(0.02, 0.01), of(0.05, 0.01), of(0.0, 0.01)]
    middle, small = tail(0.0, gains[0]), tail(0.0, gains[2])
    joins = [one.p_join for one in decide_owners(gains, 0.01, OPEN)]
    assert joins == pytest.approx([middle * 4 / 3, middle * 4 / 3, small * 4, 0.5])
    assert decide_owners([], 0.01, OPEN) == []


def test_decisions() -> None:
    gains = [of(0.05, 0.01), of(-0.03, 0.01), of(0.0, 0.002), of(0.02, 0.02), of(0.3, 0.01, splits=2)]
    verdicts = decide_owners(gains, 0.01, OPEN)
    assert [v.decision for v in verdicts] == ["join", "alone", "alone", "undecided", "undecided"]
    assert verdicts[3].p_join > ALPHA and verdicts[3].more_splits is None and verdicts[3].more_rows is not None
    assert verdicts[4].more_splits == 10
    assert tail(0.0, of(0.0, 0.0)) == 0.5 and tail(0.01, of(0.0, 0.0)) == 1.0
    assert decide_owners([of(0.0, 0.0)], 0.01, OPEN)[0].decision == "alone"  # federating changed nothing
    assert decide_owners([of(0.0, 0.0)], 0.0, OPEN)[0].decision == "undecided"


def test_owners_that_do_not_gain_together_stay_alone_unless_one_gains_by_itself() -> None:
    gains = [of(0.05, 0.005), of(0.05, 0.0175), *[of(0.0, 0.03)] * 18]  # the second: perhaps one of many by chance
    verdicts = decide_owners(gains, 0.01, of(-0.02, 0.01))
    assert [(v.decision, v.by) for v in verdicts[:3]] == [("join", "own"), ("undecided", ""), ("alone", "all")]
    assert {v.decision for v in decide_owners([of(0.0, 0.03)] * 3, 0.01, of(0.005, 0.01))} == {"undecided"}


def test_one_owner_of_many_that_gains_by_chance_is_not_told_to_join() -> None:
    lucky, rest = of(0.025, 0.01), [of(0.0, 0.02)] * 19
    assert decide_owners([lucky], 0.01, OPEN)[0].decision == "join"
    assert decide_owners([lucky, *rest], 0.01, OPEN)[0].decision == "undecided"


def test_more_splits_are_advised_only_where_they_would_decide() -> None:
    (near,) = decide_owners([gain([0.03, -0.02, 0.05, 0.03], 0.05)], 0.0, OPEN)
    assert near.decision == "undecided" and near.more_splits is not None
    again = gain(np.resize([0.03, -0.02, 0.05, 0.03], near.more_splits + 4).tolist(), 0.05)
    assert again.low > 0
    (never,) = decide_owners([gain([0.5, -0.5, 0.5, -0.49], 1 / 3)], 0.0, OPEN)
    assert never.more_splits is None and never.more_rows is None


@pytest.mark.parametrize(("metric", "expected"), [("auc", 0.75), ("accuracy", 0.5), ("balanced accuracy", 0.5)])
def test_scores_by_hand(metric: str, expected: float) -> None:
    positive = np.array([0.1, 0.6, 0.4, 0.9])  # pairs (0.4, 0.9) against (0.1, 0.6): 3 of 4 in order
    even = np.full(2, 0.5)
    assert score(metric, np.stack([1 - positive, positive], 1), np.array([0, 0, 1, 1]), even) == pytest.approx(expected)


def test_scores_without_a_class_or_after_divergence() -> None:
    probabilities, even = np.full((3, 2), 0.5), np.full(2, 0.5)
    assert math.isnan(score("auc", probabilities, np.zeros(3, int), even))
    assert score("auc", probabilities * np.nan, np.array([0, 1, 1]), even) == 0.0
    assert score("auc", probabilities, np.array([0, 1, 1]), even) == 0.5  # ties


def test_balanced_accuracy_corrects_for_the_shares_of_classes() -> None:
    """A rare class is predicted where its probability exceeds its share, which accuracy does not ask for."""
    probabilities, labels = np.array([[0.95, 0.05], [0.7, 0.3], [0.8, 0.2]]), np.array([0, 1, 1])
    shares = np.array([0.9, 0.1])
    assert score("balanced accuracy", probabilities, labels, shares) == 1.0
    assert score("accuracy", probabilities, labels, shares) == pytest.approx(1 / 3)


# -- owners --------------------------------------------------------------------------------------------------------


def table(rows: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "patient": [f"p{i // 2}" for i in range(rows)],
        "age": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(50, 9, rows)),
        "sex": rng.choice(["f", "m"], rows).tolist(),
        "year": np.arange(rows) // 4,
        "hospital": ["a", "b"] * (rows // 2),
        "ill": [None, *rng.choice(["no", "yes"], rows - 1)],
    }


def read(values: dict[str, Any], unit: str | None = None, time: tuple[str, ...] | None = (), **settings: Any) -> Owners:
    words: dict[str, Any] = {"label": "ill", "group": "hospital", "missing": "indicator", **settings}
    return read_owners(values, DataOptions(**words), SplitColumns(unit, time))


def test_rows_without_a_label_are_left_out_and_features_are_standardized_by_their_owner() -> None:
    owners = read(table(), drop=("patient",))
    assert owners.names == ("a", "b") and owners.data.classes == ("no", "yes") and len(owners.data.y) == 39
    train = [owners.rows(i)[:10] for i in range(2)]
    x = standardized(owners, train).x
    assert x.shape == (39, 2 + 2 + 1) and np.isfinite(x).all()  # age with its gaps, sex, year
    ages = owners.data.x[train[0], 0]
    filled = np.where(np.isnan(ages), np.nanmedian(ages), ages)
    np.testing.assert_allclose(x[train[0], 0], (filled - filled.mean()) / filled.std(), atol=1e-5)
    other = owners.data.x.copy()
    other[owners.owner == 1, 0] = 1e6
    changed = Owners(replace(owners.data, x=other))
    np.testing.assert_array_equal(standardized(changed, train).x[owners.owner == 0], x[owners.owner == 0])


def test_splits_keep_units_together_and_order_in_time() -> None:
    owners = read(table(), unit="patient", time=("year",))
    assert "patient" not in " ".join(owners.data.columns) and "year" in owners.data.columns
    for r in range(3):
        train, test = split_rows(owners, owners.rows(0), 0.25, 0, r)
        assert len(train) + len(test) == len(owners.rows(0)) and len(test)
        assert owners.unit is not None and not set(owners.unit[train]) & set(owners.unit[test])
        assert owners.order is not None
        early, late = split_time(owners, owners.rows(0), 0.25, r, 3)
        assert owners.order[early].max() < owners.order[late].min()


def test_columns_of_time_are_found_by_name_and_an_id_that_repeats_is_the_unit() -> None:
    days = [f"2024-01-{1 + i // 2:02d}" for i in range(40)]
    assert read({**table(), "date": days}, drop=("patient",), time=None).order is not None
    dated = {**table(), "month": np.arange(40) % 4}
    owners = read(dated, time=None, id="patient", unit="patient")
    assert owners.order is not None and owners.unit is not None and "--no-time" in owners.notes[-1]
    assert read(dated, drop=("patient",)).order is None
    apart = {**dated, "year": np.where(np.array(dated["hospital"]) == "a", 2000, 2020)}
    assert "not of the same time" in read(apart, drop=("patient",), time=None).notes[-1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"label": "il"}, "names the column 'il', but"),
        ({"group": None}, "perhaps 'hospital'"),
        ({"group": "patient", "drop": ()}, "at least 12 labeled rows"),
        ({"drop": ("nothing",)}, "names the column 'nothing'"),
        ({"drop": ("patient", "age", "sex", "year")}, "no column that can be a feature"),
        ({"unit": "ward"}, "no column 'ward'"),
        ({"missing": "refuse"}, "Set data.missing"),
    ],
)
def test_mistakes_in_a_table(change: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        read(table(), **{"drop": ("patient",), **change})


def test_free_text_and_a_single_owner_are_refused_and_small_owners_left_out() -> None:
    notes = {**table(200), "note": [f"some words number {i % 90}" for i in range(200)]}
    with pytest.raises(DataError, match="free text: 'note'"):
        read(notes, drop=("patient",))
    with pytest.raises(DataError, match="at least 2"):
        read({**table(), "hospital": ["a"] * 40}, drop=("patient",))
    owners = read({**table(), "hospital": [*["a", "b"] * 18, "c", "c", "c", "c"]}, drop=("patient",))
    assert owners.names == ("a", "b") and "left out: c (4)" in owners.notes[-1]


# -- trials --------------------------------------------------------------------------------------------------------

QUICK = TrialConfig(splits=8, methods=("fedavg-ft",), networks=("linear",), rates=(0.02,), points=(5, 10), forest=False)


def planted(counts: list[int], signs: list[int], columns: int = 150, seed: int = 0) -> Owners:
    """Owners whose label is the sign of one direction, or of its opposite."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=columns)
    owner = np.repeat(np.arange(len(counts)), counts)
    x = rng.normal(size=(len(owner), columns))
    y = (x @ direction * np.array(signs)[owner] + rng.normal(size=len(owner)) > 0).astype(np.int64)
    names = tuple(f"owner-{i}" for i in range(len(counts)))
    rows = x.astype(np.float32)
    head = tuple(f"c{j}" for j in range(columns))
    return Owners(table_dataset("planted", rows, y, ("no", "yes"), head, groups=owner, owners=names))


@pytest.fixture(scope="module")
def few() -> TrialResult:
    return run_trial(planted([160] * 6, [1] * 6), QUICK)


def test_owners_with_one_task_and_few_rows_join(few: TrialResult) -> None:
    assert {card.decision for card in few.owners.values()} == {"join"}
    assert few.overall["low"] is not None and few.overall["low"] > 0.05
    card = few.owners["owner-0"]
    assert card.method.startswith("fedavg-ft") and card.sent > 0 and card.received > 0
    assert card.pooled is not None and card.alone is not None and card.pooled > card.alone
    assert any(message["content"].startswith("weights") for message in few.revealed)


def test_the_result_is_json(few: TrialResult) -> None:
    content = json.loads(json.dumps(few.content(), allow_nan=False))
    assert content["owners"]["owner-0"]["decision"] == "join" and "join with fedavg-ft" in str(few)


def test_a_trial_counted_in_splits_repeats_exactly() -> None:
    config = TrialConfig(splits=3, methods=("fedavg-ft", "ditto"), networks=("mlp",), rates=(0.02,), points=(2,))
    first, second = (run_trial(planted([30] * 2, [1] * 2, columns=4), config).content() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_splits_in_lock_step_give_the_numbers_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rates and two splits of four owners are batched; a network with convolutions would not be."""
    config = replace(QUICK, splits=2, methods=("fedavg",), rates=(0.02, 0.03), points=(1,))
    owners, sizes = planted([20, 16, 20, 16], [1] * 4, columns=4), list[int]()
    advance = trial_candidates.advance

    def counted(trainings: Sequence[CandidateTraining], *, together: bool) -> list[Outputs]:
        sizes.append(len(trainings) if together else 1)
        return advance(trainings, together=together)

    monkeypatch.setattr(trial_run, "advance", counted)
    fast = run_trial(owners, config)
    assert max(sizes) == 4 and fast.splits == 2  # two rates of each split
    monkeypatch.setattr(trial_run, "faster_in_lockstep", lambda *_: False)
    sizes.clear()
    slow = run_trial(owners, config)
    assert max(sizes) == 1
    for name, card in fast.owners.items():
        assert (card.federated, card.alone) == pytest.approx((slow.owners[name].federated, slow.owners[name].alone))
    assert (fast.chosen, fast.chosen_alone, fast.revealed) == (slow.chosen, slow.chosen_alone, slow.revealed)


def test_owners_with_plenty_of_rows_do_not_join() -> None:
    trial = run_trial(planted([800] * 2, [1] * 2, columns=5), QUICK)
    assert {card.decision for card in trial.owners.values()} == {"alone"}


def test_an_owner_with_opposite_labels_does_not_join() -> None:
    trial = run_trial(planted([160] * 7, [1] * 6 + [-1]), QUICK)
    assert trial.owners["owner-6"].decision == "alone"
    assert "join" in {card.decision for card in trial.owners.values()}


def test_labels_at_random_are_never_a_reason_to_join() -> None:
    rng, owners = np.random.default_rng(1), planted([80] * 5, [1] * 5)
    noise = Owners(replace(owners.data, y=rng.integers(0, 2, 400)))
    assert "join" not in {card.decision for card in run_trial(noise, QUICK).owners.values()}


def test_a_budget_of_time_ends_the_trial() -> None:
    config = TrialConfig(splits=50, seconds=1e-3, methods=("fedavg-ft",), networks=("linear",), points=(1,))
    trial = run_trial(planted([30] * 2, [1] * 2, columns=3), config)
    assert trial.splits == 1 and {card.decision for card in trial.owners.values()} == {"undecided"}
    assert len(trial.tried) == 2  # of all that were asked for
    assert trial.notes[-1] == "The budget allowed 1 of 5 splits; fewer than 3 decide nothing."


def test_what_cannot_be_tried_has_a_reason() -> None:
    reasons = infeasible(2)
    assert "public rows" in reasons["fedal"] and "different columns" in reasons["split"]
    assert "fedavg" not in reasons
    with pytest.raises(ConfigError, match="fedal cannot be tried: it needs public rows"):
        run_trial(planted([30] * 2, [1] * 2), TrialConfig(methods=("fedal",)))
    with pytest.raises(ConfigError, match="metric must be one of"):
        TrialConfig(metric="f1")  # type: ignore[arg-type]
    assert {c.model for c in candidates(["fedproto"], ("linear", "mlp"), (0.1,), 100)} == {"mlp"}


def test_a_page_says_itself_whether_a_trial_tries_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [method.trial_rank for method in methods.registry().values() if method.trial_rank]
    assert sorted(ranks) == [*range(1, len(ranks) + 1)]
    assert default_methods(MANY) == (["fedavg-ft", "afind-plus", "ditto", "fedproto"], [])
    mine = replace(methods.load(PAGE), trial_rank=2, trial_variants={"strong": {"mu": 10.0}}, linear=True)
    known = {**methods.registry(), mine.name: mine}
    monkeypatch.setattr(methods, "registry", lambda: known)
    assert mine.name in default_methods(MANY)[0][1:3]
    found = [(c.model, c.note) for c in candidates([mine.name], ("linear", "mlp"), (0.1,), 100)]
    assert found == [("linear", ""), ("mlp", ""), ("mlp", "strong")]


def test_a_users_own_page_is_tried() -> None:
    config = TrialConfig(splits=1, methods=(str(PAGE),), networks=("mlp",), rates=(0.1,), points=(1,))
    trial = run_trial(planted([40] * 3, [1] * 3, columns=4), config)
    assert trial.tried[0].startswith(str(PAGE)) and trial.owners["owner-1"].federated is not None


@pytest.mark.parametrize("method", ["afind-plus", "ditto", "fedproto", "per-fedavg", "fd", "fedavg-adam", "pens"])
def test_other_families_run(method: str) -> None:
    config = TrialConfig(splits=1, methods=(method,), networks=("mlp",), rates=(0.1,), points=(1, 2))
    trial = run_trial(planted([40] * 3, [1] * 3, columns=4), config)
    assert trial.revealed and trial.owners["owner-1"].federated is not None


def chosen(curves: dict[str, list[float]], points: tuple[int, ...] = (5, 15, 30)) -> tuple[Choice, dict[str, int]]:
    """The choice among candidates with these scores after 5, 15 and 30 rounds, and the rounds that each trained."""
    trained = dict.fromkeys(curves, 0)

    def outputs(candidate: Candidate, *_: Any) -> Iterator[Outputs]:
        for rounds, value in zip(points, curves[candidate.method], strict=False):
            trained[candidate.method] = rounds
            yield Outputs({(rounds, ""): [np.array([value])]}, None)

    truth = [(np.array([0, 1]), np.array([0.5, 0.5]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_candidates, "train", outputs)
        nothing = image_dataset("none", np.zeros((1, 1, 1, 1), np.uint8), np.zeros(1, int), ("a", "b"))
        running = [CandidateTraining(Candidate(name), nothing, [], [], points, 0) for name in curves]
    work = trial_run._best(lambda found, *_: float(found[0]), truth, running)
    (best,) = trial_run._at_once([work], lockstep=False)
    return best, trained


def test_the_worse_half_of_the_candidates_stops_after_each_number_of_rounds() -> None:
    best, trained = chosen(
        {
            "late": [0.1, 0.9, 0.99],  # would win, but is among the worse three after 5 rounds
            "falls": [0.6, 0.5, 0.4],
            "worst": [0.0, 0.0, 0.0],
            "wins": [0.5, 0.7, 0.8],
            "odd": [0.4, 0.6, 0.7],
            "last": [0.2, 0.9, 0.99],
        }
    )
    assert trained == {"late": 5, "worst": 5, "last": 5, "falls": 15, "odd": 30, "wins": 30}
    assert (best.candidate.method, best.rounds) == ("wins", 30)


def test_a_candidate_is_chosen_at_its_best_number_of_rounds_even_if_it_stops() -> None:
    best, trained = chosen({"overfits": [0.9, 0.5, 0.4], "slow": [0.2, 0.8, 0.85], "bad": [0.1, 0.1, 0.1]})
    assert trained == {"overfits": 15, "slow": 30, "bad": 5}
    assert (best.candidate.method, best.rounds) == ("overfits", 5)
    assert chosen({"first": [0.5], "second": [0.5]})[0].candidate.method == "first"
    best, trained = chosen({FOREST: [0.9], "a": [0.5, 0.6, 0.7], "b": [0.4, 0.5, 0.6]})  # a forest has one score
    assert best.candidate.method == FOREST and trained == {FOREST: 5, "a": 30, "b": 5}


def test_costly_methods_are_left_out_with_many_owners_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(
        candidate: Candidate,
        data: Dataset,
        fitted: Sequence[np.ndarray],
        judged: Sequence[Sequence[np.ndarray]],
        points: Sequence[int],
        *_: Any,
    ) -> Iterator[Outputs]:
        yield Outputs({(points[0], ""): [np.full((len(part), 2), 0.5) for parts in judged for part in parts]}, None)

    monkeypatch.setattr(trial_candidates, "train", guess)
    config = TrialConfig(splits=1, networks=("mlp",), rates=(0.1,), forest=False)
    few, many = (run_trial(planted([16] * n, [1] * n, columns=2), config) for n in (MANY, MANY + 1))
    named = run_trial(planted([16] * (MANY + 1), [1] * (MANY + 1), columns=2), replace(config, methods=("afind-plus",)))
    assert set(few.tried) - set(many.tried) == {"afind-plus, mlp, rate 0.1"} and not set(many.tried) - set(few.tried)
    note = "afind-plus: left out, as too slow with more than 12 owners; --method tries it."
    assert [note in trial.notes for trial in (few, many, named)] == [False, True, False]
    assert "afind-plus" in many.not_tried and named.tried == ["afind-plus, mlp, rate 0.1"]


# -- the API and the command ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"splits": 3, "methods": ["fedavg"], "networks": ["linear"], "points": [2], "forest": False}


def test_a_frame_a_file_and_columns_give_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = {**table(60), "hospital": ["a", "b", "c"] * 20}
    frame = pandas.DataFrame(rows)
    frame.to_csv(tmp_path / "my.csv", index=False)
    words: dict[str, Any] = {"label": "ill", "group": "hospital", "drop": ["patient"]}
    results = [
        {**fedloom.trial(data, **words, **SMALL).content(), "seconds": 0}
        for data in (rows, frame, tmp_path / "my.csv", str(tmp_path / "my.csv"))
    ]
    assert all(json.dumps(result) == json.dumps(results[0]) for result in results)
    assert list(results[0]["owners"]) == ["a", "b", "c"] and results[0]["splits"] == 3


def test_images_arrays_and_a_list_with_one_for_each_owner() -> None:
    rng = np.random.default_rng(0)
    x, y, groups = rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, 60), np.arange(60) % 2
    data = image_dataset("pictures", x, y, ("a", "b", "c"), groups=groups, owners=("x", "y"))
    settings = {**SMALL, "networks": ["cnn-small"], "splits": 1}
    assert set(fedloom.trial(data, **settings).owners) == {"x", "y"}
    numbers = rng.normal(size=(60, 3)).astype(np.float32)
    words = np.where(groups == 0, "north", "south")
    found = fedloom.trial((numbers, y), group=words, **{**SMALL, "splits": 3})
    assert set(found.owners) == {"north", "south"}
    assert repr(found).startswith("trial of 2 owners, 3 splits, seed 0:") and len(repr(found).splitlines()) == 3
    parts = [(numbers[groups == i], y[groups == i]) for i in range(2)]
    assert set(fedloom.trial(parts, **{**SMALL, "splits": 1}).owners) == {"client-0", "client-1"}


def test_mistakes_in_settings() -> None:
    with pytest.raises(ConfigError, match="needs label"):
        fedloom.trial("my.csv")
    with pytest.raises(ConfigError, match="no setting 'rounds'"):
        fedloom.trial(table(), label="ill", group="hospital", rounds=3)
    with pytest.raises(ConfigError, match="a time such as 90s"):
        fedloom.trial(table(), label="ill", group="hospital", budget="soon")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(table(80)).to_csv(tmp_path / "my.csv", index=False)
    monkeypatch.chdir(tmp_path)

    def call(line: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", "trial", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        found = capsys.readouterr()
        return found.out, found.err

    words = "my.csv --label ill --group hospital --drop patient --method fedavg --splits"
    text, progress = call(f"{words} 3 --out t")
    assert (
        "mean over owners" in text
        and "revealed: client to server: weights, rows" in text
        and "split 3 of 3" in progress
    )
    content = json.loads((tmp_path / "t" / "trial.json").read_text())
    assert content["owners"]["a"]["decision"] in ("join", "alone", "undecided")
    html = (tmp_path / "t" / "trial.html").read_text()
    assert "Should they federate? my.csv" in html and html.count("<circle") == 2
    assert "already exists; add --force" in call(f"{words} 3 --out t", code=2)[1]
    text, progress = call(f"{words} 3 --json")
    assert {**json.loads(text), "seconds": 0} == {**content, "seconds": 0} and not progress
    text, progress = call(f"{words} 1 --quiet")
    assert [line.split(":")[0] for line in text.splitlines()] == ["a", "b"] and not progress
    assert "needs label, the column of classes, and group" in call("my.csv", code=2)[1]
    assert "the column of the owners" in call(".", code=2)[1]
