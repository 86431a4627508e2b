"""Trials on planted data: who must join, and who must not."""

import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import methods
from fedloom.cli import main
from fedloom.core.errors import ConfigError, DataError, ModelError
from fedloom.data.dataset import Dataset, image_dataset, table_dataset
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.data.own import read_data
from fedloom.engines import LocalEngine
from fedloom.experiment.trial import (
    Owners,
    TrialConfig,
    TrialResult,
    owners_of,
    read_owners,
    run_trial,
)
from fedloom.experiment.trial import candidates as trial_candidates
from fedloom.experiment.trial import run as trial_run
from fedloom.experiment.trial import trial as real_trial
from fedloom.experiment.trial.candidates import (
    JOINT,
    MANY,
    Candidate,
    CandidateTraining,
    Outputs,
    candidates,
    default_methods,
    infeasible,
)
from fedloom.experiment.trial.decide import OwnerVerdict
from fedloom.experiment.trial.evidence import evidence
from fedloom.experiment.trial.folds import draw_folds, split
from fedloom.experiment.trial.owners import standardized
from fedloom.experiment.trial.predictions import PERSONAL, Predictions, Recipe
from fedloom.experiment.trial.result import card_of

PAGE = Path(__file__).parents[1] / "examples" / "fedprox.py"
"""A method of a user."""

# -- owners ----------------------------------------------------------------------------------------


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


def read(
    values: dict[str, Any],
    unit: str | None = None,
    time: tuple[str, ...] | None = (),
    **settings: Any,
) -> Owners:
    words: dict[str, Any] = {
        "label": "ill",
        "group": "hospital",
        "missing": "indicator",
        **settings,
    }
    return read_owners(values, DataOptions(**words), SplitColumns(unit, time))


def test_rows_without_a_label_are_left_out_and_features_are_standardized_by_their_owner() -> None:
    owners = read(table(), drop=("patient",))
    assert (
        owners.names == ("a", "b")
        and owners.data.classes == ("no", "yes")
        and len(owners.data.y) == 39
    )
    train = [owners.rows(i)[:10] for i in range(2)]
    x = standardized(owners, train).x
    assert x.shape == (39, 2 + 2 + 1) and np.isfinite(x).all()  # age with its gaps, sex, year
    ages = owners.data.x[train[0], 0]
    filled = np.where(np.isnan(ages), np.nanmedian(ages), ages)
    np.testing.assert_allclose(x[train[0], 0], (filled - filled.mean()) / filled.std(), atol=1e-5)
    other = owners.data.x.copy()
    other[owners.owner == 1, 0] = 1e6
    changed = Owners(replace(owners.data, x=other))
    np.testing.assert_array_equal(
        standardized(changed, train).x[owners.owner == 0], x[owners.owner == 0]
    )


def test_folds_hold_every_row_once_and_keep_units_together() -> None:
    owners = read(table(200), unit="patient", time=())
    folds = draw_folds(owners, 0, 0)
    assert set(folds) == {0, 1, 2, 3} and owners.unit is not None
    assert all(len(set(folds[owners.unit == unit])) == 1 for unit in np.unique(owners.unit))
    plain = read(table(200), drop=("patient",))
    folds = draw_folds(plain, 0, 0)
    for i in range(2):
        counts = [
            np.bincount(folds[(plain.owner == i) & (plain.data.y == k)], minlength=4)
            for k in range(2)
        ]
        assert all(np.ptp(each) <= 1 for each in counts)  # classes are spread evenly
    assert (draw_folds(plain, 0, 1) != folds).any() and (draw_folds(plain, 0, 0) == folds).all()
    parts = [split(plain, folds, k, 7) for k in range(4)]
    for i in range(2):
        assert sorted(np.concatenate([part.test[i] for part in parts])) == plain.rows(i).tolist()
        assert all(not set(part.train[i]) & set(part.test[i]) for part in parts)


def test_windows_of_time_are_predicted_by_models_of_earlier_rows() -> None:
    owners = read(table(200), drop=("patient",), time=("year",))
    folds, order = draw_folds(owners, 0, 0), owners.order
    assert order is not None and folds.min() == -1 and folds.max() >= 3
    for k in range(folds.max() + 1):
        part = split(owners, folds, k, 0)
        for train, test in zip(part.train, part.test, strict=True):
            assert not len(test) or order[train].max() < order[test].min()
    assert (order[folds == -1].max() + 1) * 2 == pytest.approx(order.max() + 1, abs=1)


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


def test_free_text_is_hashed_a_single_owner_refused_and_small_owners_left_out() -> None:
    notes = {**table(200), "note": [f"some words number {i % 90}" for i in range(200)]}
    assert "note#31" in read(notes, drop=("patient",)).data.columns
    with pytest.raises(DataError, match="at least 2"):
        read({**table(), "hospital": ["a"] * 40}, drop=("patient",))
    owners = read(
        {**table(), "hospital": [*["a", "b"] * 18, "c", "c", "c", "c"]}, drop=("patient",)
    )
    assert owners.names == ("a", "b") and "left out: c (4)" in owners.notes[-1]


# -- trials ----------------------------------------------------------------------------------------

QUICK = TrialConfig(
    repeats=2, methods=("fedavg-ft",), networks=("linear",), rates=(0.02,), points=(5, 10), alone=()
)


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
    return Owners(
        table_dataset("planted", rows, y, ("no", "yes"), head, groups=owner, owners=names)
    )


@pytest.fixture(scope="module")
def few() -> TrialResult:
    return run_trial(planted([160] * 6, [1] * 6), QUICK)


def test_owners_with_one_task_and_few_rows_join(few: TrialResult) -> None:
    assert {card.decision for card in few.owners.values()} == {"join"}
    assert few.overall["gain"] is not None and few.overall["gain"] > 0.05
    card = few.owners["owner-0"]
    assert card.method.startswith("fedavg-ft") and card.sent > 0 and card.received > 0
    assert card.pooled is not None and card.alone is not None and card.pooled > card.alone
    assert any(message["content"].startswith("weights") for message in few.revealed)


def test_the_result_is_json(few: TrialResult) -> None:
    content = json.loads(json.dumps(few.content(), allow_nan=False))
    assert content["owners"]["owner-0"]["decision"] == "join" and "Join with fedavg-ft" in str(few)
    assert content["recipe"] == {
        **content["recipe"],
        "method": "fedavg-ft",
        "models": {"pool": ["linear"]},
        "seed": 0,
    }


def test_a_trial_without_a_budget_of_time_repeats_exactly() -> None:
    config = TrialConfig(
        repeats=1, methods=("fedavg-ft", "ditto"), networks=("mlp",), rates=(0.02,), points=(2,)
    )
    first, second = (
        run_trial(planted([30] * 2, [1] * 2, columns=4), config).content() for _ in range(2)
    )
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_folds_in_lock_step_give_the_numbers_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four folds of four owners are batched; a network with convolutions would not be."""
    config = replace(QUICK, repeats=1, methods=("fedavg",), points=(1,))
    owners, sizes = planted([20, 16, 20, 16], [1] * 4, columns=4), list[int]()
    advance = trial_candidates.advance

    def counted(trainings: Sequence[CandidateTraining], *, together: bool) -> list[Outputs]:
        sizes.append(len(trainings) if together else 1)
        return advance(trainings, together=together)

    monkeypatch.setattr(trial_run, "advance", counted)
    fast = run_trial(owners, config)
    assert max(sizes) == 4
    monkeypatch.setattr(trial_run, "faster_in_lockstep", lambda *_: False)
    sizes.clear()
    slow = run_trial(owners, config)
    assert max(sizes) == 1
    for name, card in fast.owners.items():
        assert (card.federated, card.alone) == pytest.approx(
            (slow.owners[name].federated, slow.owners[name].alone)
        )
    assert (fast.chosen, fast.chosen_alone, fast.revealed) == (
        slow.chosen,
        slow.chosen_alone,
        slow.revealed,
    )


def test_later_repeats_train_what_the_rows_of_the_first_one_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All candidates in the first repeat; then one on either side for each fold. Labels of a fold
    do not choose for it: with other labels of the fold in the choice, the same is chosen.
    """
    config = TrialConfig(
        repeats=2, methods=("fedglm", "fedforest-mix"), alone=("logistic", "boosting")
    )
    run = trial_run.TrialRun(planted([40] * 3, [1] * 3, columns=4), config, lambda *_: None)
    trained: list[tuple[int, str, int]] = []
    into = trial_run.TrialRun._train_into

    def counted(
        self: trial_run.TrialRun,
        kind: Any,
        found: Any,
        number: int,
        ks: Sequence[int],
        c: int,
        d: Any,
    ) -> None:
        trained.append((c, kind.candidates[number].method, len(ks)))
        into(self, kind, found, number, ks, c, d)

    monkeypatch.setattr(trial_run.TrialRun, "_train_into", counted)
    result = run.run()
    assert (
        result.repeats == 2
        and sum(count for c, method, count in trained if c == 1 and method.startswith("fed")) == 4
    )
    first = {method for c, method, _ in trained if c == 0}
    assert first == {"fedglm", "fedforest-mix", "logistic", "boosting"}
    y, before = run.owners.data.y, run._choice(run.federated, 1)
    for k in range(4):
        y[run.folds[1] == k] = 1 - y[run.folds[1] == k]
        assert run._choice(run.federated, 1)[k] == before[k]
        y[run.folds[1] == k] = 1 - y[run.folds[1] == k]


def test_owners_with_plenty_of_rows_do_not_join() -> None:
    trial = run_trial(planted([800] * 2, [1] * 2, columns=5), QUICK)
    assert {card.decision for card in trial.owners.values()} <= {"same", "alone"}


def test_an_owner_with_opposite_labels_does_not_join() -> None:
    trial = run_trial(planted([160] * 7, [1] * 6 + [-1]), QUICK)
    assert trial.owners["owner-6"].decision == "alone"
    assert "join" in {card.decision for card in trial.owners.values()}


@pytest.mark.slow
def test_labels_at_random_are_rarely_a_reason_to_join() -> None:
    """Decisions by own rows may be wrong in 2.5 of 100 joins: see the rates in
    `test_trial_statistics`.
    """
    joins = []
    for seed in (1, 2):
        rng, owners = np.random.default_rng(seed), planted([80] * 5, [1] * 5, columns=40)
        noise = Owners(replace(owners.data, y=rng.integers(0, 2, 400)))
        joins += [card.decision == "join" for card in run_trial(noise, QUICK).owners.values()]
    assert sum(joins) <= 1


def test_a_budget_of_time_leaves_out_candidates_and_repeats() -> None:
    config = TrialConfig(seconds=1e-3, methods=("fedavg-ft",), networks=("linear",), points=(1,))
    trial = run_trial(planted([30] * 2, [1] * 2, columns=3), config)
    assert trial.repeats == 1 and len(trial.tried) == 1
    assert trial.notes[-2].startswith("Left out for lack of time: fedavg-ft, linear, rate 0.05")
    assert trial.notes[-1] == "The budget allowed 1 of 3 repeats."


def test_owners_of_one_class_and_tiny_classes_are_told_so() -> None:
    owners = planted([40] * 4, [1] * 4, columns=3)
    y = owners.data.y.copy()
    y[owners.owner == 0] = 1
    y[owners.owner == 1] = np.arange(40) == 0
    trial = run_trial(
        Owners(replace(owners.data, y=y)), replace(QUICK, alone=("logistic", "forest"))
    )
    decisions = [card.decision for card in trial.owners.values()]
    assert decisions[:2] == ["too few", "too few"] and "too few" not in decisions[2:]
    assert "Too few rows: 1 of the rarest class" in str(
        trial
    ) and "Too few rows: all are of one class" in str(trial)


def test_the_interval_of_an_auc_s_gain_ends_at_one() -> None:
    y, folds = np.array([0] * 3 + [1] * 3), np.zeros((1, 6), int)
    even, right = np.full((1, 6, 2), 0.5), np.eye(2)[y][None]
    one = evidence("auc", y, even, right, folds)
    verdict = OwnerVerdict("undecided", "", one.gain, -1.5, 1.03, 0.9, 0.8, 0.1)
    more: dict[str, Any] = {
        "method": "m",
        "pooled": None,
        "own_weight": None,
        "partners": None,
        "sent": 0,
        "received": 0,
    }
    card, other = card_of(one, verdict, "auc", **more), card_of(one, verdict, "log loss", **more)
    assert (card.low, card.high) == (-1.0, 1.0) and (other.low, other.high) == (-1.5, 1.03)
    assert (card.gain, card.rows, card.decision) == (one.gain, one.rows, "undecided")


def test_a_class_with_one_row_at_an_owner_is_not_scored_there_and_named() -> None:
    """It would have told the owner that it has too few rows, whatever its other classes tell."""
    plain = planted([60] * 3, [1] * 3, columns=4)
    y = plain.data.y.copy()
    y[plain.rows(0)[0]] = y[plain.rows(1)[:9]] = y[plain.rows(2)[:9]] = 2
    owners = Owners(replace(plain.data, y=y, classes=("no", "yes", "rare")))
    config = TrialConfig(repeats=1, methods=("fedglm",), alone=("logistic",))
    trial = trial_run.TrialRun(owners, config, lambda *_: None)
    result = trial.run()
    assert [len(rows) for rows in trial.scored] == [59, 60, 60] and 2 not in y[trial.scored[0]]
    card = result.owners["owner-0"]
    assert (
        card.decision != "too few"
        and card.rows == 60
        and card.fewest > 20
        and card.gain is not None
    )
    assert any("not scored there: owner-0 (rare)" in note for note in result.notes)
    y[plain.rows(0)] = np.where(np.arange(60) < 2, 1, 0)  # no two classes remain
    assert (
        trial_run.TrialRun(owners, config, lambda *_: None).run().owners["owner-0"].decision
        == "too few"
    )


def test_a_mix_with_own_models_names_the_messages_of_the_joint_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TrialConfig(repeats=1, methods=("fedextra",), alone=("logistic",))
    trial = trial_run.TrialRun(planted([40] * 3, [1] * 3, columns=4), config, lambda *_: None)
    final = trial._final

    def weighted(kind: Predictions) -> Recipe:
        mixes = (one for one in kind.first if one.mode == PERSONAL)
        return next(mixes) if kind is trial.federated else final(kind)

    monkeypatch.setattr(trial, "_final", weighted)
    result = trial.run()
    assert result.revealed and all(card.sent > 0 for card in result.owners.values())


def test_the_mean_of_black_boxes_is_a_candidate_for_training_alone() -> None:
    trial = run_trial(
        planted([80] * 3, [1] * 3, columns=8),
        replace(QUICK, alone=("logistic", "forest"), repeats=1),
    )
    names = {*trial.chosen_alone, trial.alone}
    assert names <= {"logistic", "forest", "mean of logistic, forest", "alone", "alone, tuned"}
    with pytest.raises(ConfigError, match="alone must name some of forest"):
        TrialConfig(alone=("oak",))


@pytest.mark.each_time("fedboost-0", "fedglm-1")
@pytest.mark.parametrize(
    ("method", "variant"),
    [("fedforest", 0), ("fedforest-mix", 0), ("fedboost", 0), ("fedglm", 0), ("fedglm", 1)],
)
def test_a_method_of_pooled_rows_is_trained_at_once_with_the_predictions_of_all_parties(
    method: str, variant: int
) -> None:
    owners = planted([30, 24, 40], [1] * 3, columns=4)
    if variant:
        x = np.where(
            np.random.default_rng(1).random(owners.data.x.shape) < 0.2,
            np.float32(np.nan),
            owners.data.x,
        )
        owners = Owners(replace(owners.data, x=x, fill="median"))
    fold = split(owners, draw_folds(owners, 0, 0), 0, 7)
    candidate = candidates([method], ("linear",), (0.1,), 30)[variant]
    found = []
    for messages in (False, True):
        judged = [[rows] for rows in fold.test]
        training = CandidateTraining(
            candidate, owners.data, fold.train, judged, (1,), fold.seed, messages=messages
        )
        (out,) = trial_candidates.advance([training], together=False)
        assert (out.ledger is not None) == messages
        found.append([np.concatenate(parts) for parts in out.probabilities.values()])
    np.testing.assert_allclose(np.mean(found[0], axis=0), found[1][0], atol=1e-6)
    assert len(found[0]) == (2 if method.endswith("mix") else 1)


@pytest.mark.parametrize("mode", ["", JOINT, PERSONAL])
def test_a_run_trains_the_exchange_and_the_mix_that_a_trial_has_measured(mode: str) -> None:
    """On the training rows of a fold, the party of a run predicts what the trial has composed of
    models that owners
    trained alone: the same to rounding by linear models.
    """
    owners = planted([40] * 3, [1] * 3, columns=4)
    config = TrialConfig(repeats=1, methods=("exchange",), alone=("logistic", "forest"))
    trial = trial_run.TrialRun(owners, config, lambda *_: None)
    trial.run()
    number = next(n for n, c in enumerate(trial.federated.candidates) if c.note == "linear")
    recipe, fold = Recipe(number, 1, mode), trial.splits[0][0]
    weights = trial.federated.weights[replace(recipe, mode=PERSONAL)]
    params = {
        **trial._settings(recipe)["params"],
        **({"own_weight": weights.tolist()} if mode == PERSONAL else {}),
    }
    assert params["kinds"] == ("linear",) and params.get("own", []) == (
        [] if mode == JOINT else ["linear", "forest"]
    )
    if mode == PERSONAL:
        return  # weights differ between folds
    params |= {"own": ["linear"]} if params.get("own") else {}
    judged = [[rows] for rows in fold.test]
    candidate = replace(trial.federated.candidates[number], params=params)
    training = CandidateTraining(
        candidate, owners.data, fold.train, judged, (1,), fold.seed, messages=True
    )
    (out,) = trial_candidates.advance([training], together=False)
    rows, (found,) = np.concatenate(fold.test), out.probabilities.values()
    box = trial.boxes[0]
    expected = box.all[0][rows] if mode == JOINT else (box.all[0][rows] + box.own[0][rows]) / 2
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-3)
    assert out.ledger is not None and out.ledger.sent("client-0") > 0


def a_number() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    return {
        "a": x[:, 0],
        "b": x[:, 1],
        "y": x[:, 0] + 0.1 * rng.normal(size=90),
        "site": ["s", "t", "u"] * 30,
    }


def test_parties_of_a_trial_have_the_width_of_a_number() -> None:
    data = read_data(a_number(), label="y", group="site").with_target(np.arange(90))
    one, *_ = trial_candidates._contexts(data, [np.arange(60), np.arange(60, 90)], 0)
    method, rows = methods.named("fedboost"), [np.arange(60), np.arange(60, 90)]
    parties, server, _ = trial_candidates._federation(
        method, method.configure(), "", data, rows, 0, LocalEngine
    )
    assert server is not None and [
        one.classes,
        parties[0].context.classes,
        server.context.classes,
    ] == [1, 1, 1]


@pytest.mark.slow
def test_trees_are_tried_with_a_number() -> None:
    trial = fedloom.trial(
        a_number(), label="y", group="site", repeats=1, methods=["fedboost"], alone=["ridge"]
    )
    assert trial.tried == ["fedboost"] and not [
        note for note in trial.notes if "is left out" in note
    ]


def test_numbers_are_tried_with_errors_in_their_unit() -> None:
    """Four owners of 60 rows and 20 columns: one model of all has less error. In another unit gains
    are the same.
    """
    rng = np.random.default_rng(0)
    x, owner = rng.normal(size=(240, 20)), np.arange(240) % 4
    y = 100 + 20 * (x @ rng.normal(size=20) + rng.normal(size=240))
    columns: dict[str, Any] = {f"c{j}": x[:, j] for j in range(20)} | {
        "site": [f"s{i}" for i in owner]
    }
    words: dict[str, Any] = {"label": "price", "group": "site", "repeats": 2, "methods": ["fedglm"]}
    trial = fedloom.trial({**columns, "price": y}, alone=["ridge"], **words)
    assert trial.metric == "rmse" and {card.decision for card in trial.owners.values()} == {"join"}
    card = trial.owners["s0"]
    assert (
        card.alone is not None
        and card.federated is not None
        and -45 < card.alone < card.federated < -19
    )
    assert "Join with fedglm: gain in RMSE +" in str(trial) and card.partners is not None
    assert not [note for note in trial.notes if "is left out" in note]
    cents = fedloom.trial({**columns, "price": 100 * y}, alone=["ridge"], **words)
    assert cents.owners["s0"].gain == pytest.approx(card.gain, rel=0.02)
    with pytest.raises(
        ConfigError, match="metric must be one of rmse, mae, r2 for a number to predict, not 'auc'"
    ):
        fedloom.trial({**columns, "price": y}, metric="auc", **words)
    with pytest.raises(
        ModelError, match=r"logistic cannot predict a number: choose one of .*ridge"
    ):
        fedloom.trial({**columns, "price": y}, alone=["logistic"], **words)
    with pytest.raises(ConfigError, match="fedal cannot be tried"):
        fedloom.trial({**columns, "price": y}, **{**words, "methods": ["fedal"]})


def test_what_cannot_be_tried_has_a_reason() -> None:
    reasons = infeasible(2)
    assert "public rows" in reasons["fedal"] and "different columns" in reasons["split"]
    assert "fedavg" not in reasons
    with pytest.raises(ConfigError, match="fedal cannot be tried: it needs public rows"):
        run_trial(planted([30] * 2, [1] * 2), TrialConfig(methods=("fedal",)))
    with pytest.raises(ConfigError, match="metric must be one of"):
        TrialConfig(metric="f1")  # type: ignore[arg-type]
    assert {c.model for c in candidates(["fedproto"], ("linear", "mlp"), (0.1,), 100)} == {"mlp"}


def test_a_page_says_itself_whether_a_trial_tries_its_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert default_methods(MANY, "image") == (["fedavg-ft", "afind-plus", "ditto", "fedproto"], [])
    assert default_methods(MANY, "table") == (["fedforest", "fedglm", "fedboost", "exchange"], [])
    mine = replace(
        methods.load(PAGE), trial_rank=2, trial_variants={"strong": {"mu": 10.0}}, linear=True
    )
    known = {**methods.registry(), mine.name: mine}
    monkeypatch.setattr(methods, "registry", lambda: known)
    assert mine.name in default_methods(MANY, "image")[0][1:3]
    found = [(c.model, c.note) for c in candidates([mine.name], ("linear", "mlp"), (0.1,), 100)]
    assert found == [("linear", ""), ("mlp", ""), ("mlp", "strong")]


def test_a_users_own_page_is_tried() -> None:
    config = TrialConfig(
        repeats=1, methods=(str(PAGE),), networks=("mlp",), rates=(0.1,), points=(1,)
    )
    trial = run_trial(planted([40] * 3, [1] * 3, columns=4), config)
    assert trial.tried[0].startswith(str(PAGE)) and trial.owners["owner-1"].federated is not None


@pytest.mark.each_time("afind-plus", "fedproto")
@pytest.mark.parametrize(
    "method", ["afind-plus", "ditto", "fedproto", "per-fedavg", "fd", "fedavg-adam", "pens"]
)
def test_other_families_run(method: str) -> None:
    config = TrialConfig(
        repeats=1, methods=(method,), networks=("mlp",), rates=(0.1,), points=(1, 2)
    )
    trial = run_trial(planted([40] * 3, [1] * 3, columns=4), config)
    assert trial.revealed and trial.owners["owner-1"].federated is not None


def test_costly_methods_are_left_out_with_many_owners_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def guess(
        candidate: Candidate,
        data: Dataset,
        fitted: Sequence[np.ndarray],
        judged: Sequence[Sequence[np.ndarray]],
        points: Sequence[int],
        *_: Any,
        messages: bool = False,
    ) -> Iterator[Outputs]:
        yield Outputs(
            {(points[0], ""): [np.full((len(part), 2), 0.5) for parts in judged for part in parts]},
            None,
        )

    monkeypatch.setattr(trial_candidates, "train", guess)
    config = TrialConfig(repeats=1, networks=("cnn-small",), rates=(0.1,), alone=())

    def pictures(owners: int) -> Owners:
        y, groups = np.arange(16 * owners) % 2, np.repeat(np.arange(owners), 16)
        x = np.zeros((len(y), 1, 8, 8), np.uint8)
        return owners_of(
            image_dataset(
                "p", x, y, ("a", "b"), groups=groups, owners=tuple(map(str, range(owners)))
            )
        )

    few, many = (run_trial(pictures(n), config) for n in (MANY, MANY + 1))
    named = run_trial(pictures(MANY + 1), replace(config, methods=("afind-plus",)))
    assert set(few.tried) - set(many.tried) == {"afind-plus, cnn-small, rate 0.1"}
    assert not set(many.tried) - set(few.tried)
    note = "afind-plus: left out, as too slow with more than 12 owners; --method tries it."
    assert [note in trial.notes for trial in (few, many, named)] == [False, True, False]
    assert "afind-plus" in many.not_tried and named.tried == ["afind-plus, cnn-small, rate 0.1"]


# -- the API and the command -----------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "repeats": 1,
    "methods": ["fedavg"],
    "networks": ["linear"],
    "points": [2],
    "alone": (),
}


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
    assert [result["recipe"].pop("data", {}).get("name") for result in results[2:]] == [
        str(tmp_path / "my.csv")
    ] * 2
    assert all(json.dumps(result) == json.dumps(results[0]) for result in results)
    assert list(results[0]["owners"]) == ["a", "b", "c"] and results[0]["repeats"] == 1


def test_images_arrays_and_a_list_with_one_for_each_owner() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)
    y = rng.integers(0, 3, 60)
    groups = np.arange(60) % 2
    data = image_dataset("pictures", x, y, ("a", "b", "c"), groups=groups, owners=("x", "y"))
    settings = {**SMALL, "networks": ["cnn-small"]}
    assert set(fedloom.trial(data, **settings).owners) == {"x", "y"}
    numbers = rng.normal(size=(60, 3)).astype(np.float32)
    words = np.where(groups == 0, "north", "south")
    found = fedloom.trial((numbers, y), group=words, **SMALL)
    assert set(found.owners) == {"north", "south"}
    assert (
        repr(found).startswith("trial of 2 owners, 1 repeat of 4 folds, seed 0:")
        and len(repr(found).splitlines()) == 3
    )
    parts = [(numbers[groups == i], y[groups == i]) for i in range(2)]
    assert set(fedloom.trial(parts, **{**SMALL}).owners) == {"client-0", "client-1"}


def test_mistakes_in_settings() -> None:
    with pytest.raises(ConfigError, match="needs label"):
        fedloom.trial("my.csv")
    with pytest.raises(ConfigError, match="no setting 'forest' any more"):
        fedloom.trial(table(), label="ill", group="hospital", forest=True)
    with pytest.raises(ConfigError, match="no setting 'rounds'"):
        fedloom.trial(table(), label="ill", group="hospital", rounds=3)
    with pytest.raises(ConfigError, match="a time such as 90s"):
        fedloom.trial(table(), label="ill", group="hospital", budget="soon")


def test_splits_of_an_older_version_are_repeats() -> None:
    settings = {k: value for k, value in SMALL.items() if k != "repeats"}
    with pytest.warns(DeprecationWarning, match="set repeats, not splits"):
        found = fedloom.trial(table(), label="ill", group="hospital", splits=1, **settings)
    assert found.repeats == 1


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(table(80)).to_csv(tmp_path / "my.csv", index=False)
    monkeypatch.chdir(tmp_path)
    # repeating is test_a_trial_without_a_budget_of_time_repeats_exactly
    held: dict[str, TrialResult] = {}

    def kept(name: str, *, progress: Any, **settings: Any) -> TrialResult:
        progress(1, 1, 0.0)
        few = {"networks": ("linear",), "points": (2,)}
        key = repr((name, settings))
        held[key] = held.get(key) or real_trial(name, **settings | few)
        return held[key]

    monkeypatch.setattr("fedloom.experiment.trial.trial", kept)

    def call(line: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", "trial", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        found = capsys.readouterr()
        return found.out, found.err

    words = "my.csv --label ill --group hospital --drop patient --method fedavg --repeats"
    text, progress = call(f"{words} 1 --out t")
    assert "mean over owners" in text and "trainings, " in progress
    assert "2 owners" in text.splitlines()[0] and "next: fedloom run t/recipe.toml" in text
    assert (
        len(re.findall(r"^  Calibration error 0\.\d+ alone, 0\.\d+ federated$", text, re.MULTILINE))
        == 2
    )
    content = json.loads((tmp_path / "t" / "trial.json").read_text())
    assert content["owners"]["a"]["decision"] in ("join", "alone", "same", "undecided")
    html = (tmp_path / "t" / "trial.html").read_text()
    assert "Should they federate? my.csv" in html and html.count("<circle") == 2
    assert "weights, numbers of rows" in html and "fedloom run t/recipe.toml" in html
    assert "already exists; add --force" in call(f"{words} 1 --out t", code=2)[1]
    text, progress = call(f"{words} 1 --json")
    assert {**json.loads(text), "seconds": 0} == {**content, "seconds": 0} and not progress
    piped = io.TextIOWrapper(io.BytesIO((tmp_path / "my.csv").read_bytes()))
    monkeypatch.setattr(sys, "stdin", piped)
    text, progress = call(f"-{words.removeprefix('my.csv')} 1 --quiet --out piped")
    assert "save the rows as rows.csv" in progress
    assert (
        tomllib.loads((tmp_path / "piped" / "recipe.toml").read_text())["data"]["name"]
        == "rows.csv"
    )
    text, progress = call(f"{words} 1 --quiet")
    assert [line.split(":")[0] for line in text.splitlines()] == ["a", "b"] and not progress
    assert (
        "needs --label, the column to predict, and --group, the column of owners"
        in call("my.csv", code=2)[1]
    )
    assert "the column of the owners" in call(".", code=2)[1]
    monkeypatch.setattr(
        sys, "argv", ["fedloom", "run", "t/recipe.toml", "--out", "t/trained", "-s", "rounds=1"]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code and (tmp_path / "t" / "trained" / "result.json").exists()
