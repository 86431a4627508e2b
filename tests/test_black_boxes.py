"""Black boxes: what is fitted to what, what is refused, and that nothing but the inputs decides
what comes out.
"""

from __future__ import annotations

import gc
import pickle
import random
import sys
import weakref
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.core.black_box import (
    CHECKED_ROWS,
    BlackBoxModel,
    CrossFit,
    FittedBlackBox,
    accepts_weights,
    flatten_rows,
    hard_rows,
    reproducible,
)
from fedloom.core.errors import FedloomError, ModelError
from fedloom.experiment.trial.result import TrialConfig
from fedloom.models import BLACK_BOXES, build, check_name, is_black_box
from fedloom.models.black_boxes import make
from fedloom.trees import plain_models

K = 4
EXTRAS = {
    "lightgbm": "LGBMClassifier",
    "xgboost": "XGBClassifier",
    "catboost": "CatBoostClassifier",
    "tabicl": "TabICLClassifier",
}
"""Black boxes of packages that few have, and the class of each."""
HERE = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            bool(spec.extra) and find_spec(spec.extra) is None, reason=f"needs {name}"
        ),
    )
    for name, spec in BLACK_BOXES.items()
    # its weights are downloaded; for numbers: tests/experiment/test_numbers.py
    if name not in ("tabicl", "ridge")
]


class StandIn:
    """What fedloom needs of a class of another package, on a forest of scikit-learn's: it refuses
    unknown settings, and labels with gaps if it is XGBoost's.
    """

    KNOWN: ClassVar[dict[str, set[str]]] = {
        "lightgbm": {
            "min_child_samples",
            "random_state",
            "n_jobs",
            "deterministic",
            "force_row_wise",
            "verbose",
        },
        "xgboost": {"random_state", "n_jobs", "verbosity"},
        "catboost": {"iterations", "random_seed", "thread_count", "verbose", "allow_writing_files"},
        "tabicl": {"random_state", "device", "n_jobs"},
    }

    def __init__(self, package: str, **settings: Any) -> None:
        assert settings.keys() <= self.KNOWN[package], settings
        # a sum in another order has other bits
        assert settings.get("n_jobs", settings.get("thread_count")) == 1
        self.package, self.seed = package, settings.get("random_state", settings.get("random_seed"))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> StandIn:
        from sklearn.ensemble import RandomForestClassifier

        if self.package == "xgboost" and np.unique(y).tolist() != list(range(int(np.max(y)) + 1)):
            raise ValueError("Invalid classes inferred from unique values of `y`.")
        self.inner = RandomForestClassifier(10, random_state=self.seed).fit(X, y, sample_weight)
        self.classes_ = self.inner.classes_
        return self

    def predict_proba(self, X: Any) -> Any:
        return self.inner.predict_proba(X)


class Unweighted(StandIn):
    """The same without weights, as TabICL's."""

    def fit(self, X: Any, y: Any) -> StandIn:  # type: ignore[override]
        return super().fit(X, y)


@pytest.fixture(params=EXTRAS)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a black box whose package is a stand-in."""
    name: str = request.param
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    setattr(module, EXTRAS[name], partial(Unweighted if name == "tabicl" else StandIn, name))
    monkeypatch.setitem(sys.modules, name, module)
    return name


class Recorder:
    """Keeps what it was fitted to, and answers with the shares of the classes."""

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> None:
        self.x, self.y, self.weight = x, y, sample_weight
        self.classes_ = np.unique(y)

    def predict_proba(self, x: Any) -> Any:
        shares = np.array([self.weight[self.y == k].sum() for k in self.classes_])
        return np.tile(shares / shares.sum(), (len(x), 1))


class Plain(Recorder):
    """The same, but rows have no weights."""

    def fit(self, x: Any, y: Any) -> None:  # type: ignore[override]
        super().fit(x, y, np.ones(len(y)))


class Says:
    """Answers whatever it is told to, and has no classes_."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def fit(self, x: Any, y: Any) -> None: ...

    def predict_proba(self, x: Any) -> Any:
        return self.answer


def some(n: int = 12, classes: int = K, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    x = rng.normal(size=(n, 2, 3)).astype(np.float32) + 2 * y[:, None, None]
    return torch.from_numpy(x), torch.from_numpy(y)


def named(name: str, **settings: Any) -> BlackBoxModel:
    return BlackBoxModel(name, partial(make, name, (2, 3), K, 5), K, 5, **settings)


# -- what a fit is made of -------------------------------------------------------------------------


def test_soft_rows_stand_for_their_probabilities() -> None:
    targets = np.array([[0.7, 0.2995, 0.0005, 0.0], [0.0, 0.0, 0.0, 1.0]])
    which, classes, weights = hard_rows(targets, 1e-3, True)
    assert which.tolist() == [0, 0, 1] and classes.tolist() == [0, 1, 3]
    assert weights.tolist() == [0.7, 0.2995, 1.0]
    which, classes, weights = hard_rows(targets, 1e-3, False)
    assert (
        which.tolist() == [0, 1] and classes.tolist() == [0, 3] and weights.tolist() == [1.0, 1.0]
    )


def test_no_row_is_lost_where_all_its_classes_are_below_the_floor() -> None:
    targets = np.full((2, 50), 0.02)
    which, _, _ = hard_rows(targets, 0.05, True)
    assert np.bincount(which).tolist() == [50, 50]


def test_a_fit_has_own_rows_and_weighed_public_ones() -> None:
    (x, y), public = some(), some(3, seed=1)[0]
    targets = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]])
    recorder = Recorder()
    BlackBoxModel("r", lambda: recorder, K, public_weight=2.0).fit(x, y, public, targets)
    assert recorder.x.shape == (12 + 2 + 1 + 4, 6) and recorder.x.dtype == np.float32
    assert np.array_equal(recorder.x[:12], flatten_rows(x)) and np.array_equal(
        recorder.x[12:15], flatten_rows(public)[[0, 0, 1]]
    )
    assert recorder.y.tolist() == [*y.tolist(), 0, 1, 3, 0, 1, 2, 3]
    assert recorder.weight.tolist() == [1.0] * 12 + [1.0, 1.0, 2.0] + [0.5] * 4


def test_without_weights_a_public_row_is_its_most_probable_class() -> None:
    (x, y), public = some(), some(2, seed=1)[0]
    plain = Plain()
    BlackBoxModel("p", lambda: plain, K).fit(
        x, y, public, torch.tensor([[0.6, 0.4, 0, 0], [0.1, 0.1, 0.1, 0.7]])
    )
    assert plain.y.tolist() == [*y.tolist(), 0, 3]


@pytest.mark.parametrize("floor", [1e-3, 0.01, 0.05])
def test_classes_at_the_floor_are_left_out(floor: float) -> None:
    """Where nobody thinks a class likely, rounding must not make a row of it."""
    answer = (
        BlackBoxModel("none", lambda: Says(None), K, min_probability=floor)
        .fit(*some(3, classes=1))
        .probs(some(1)[0])
    )
    mean = torch.stack([answer.log()] * 3).mean(0).softmax(-1)
    for told in (answer, mean, answer.double()):
        assert hard_rows(told.numpy(), floor, True)[1].tolist() == [0]


class Writes(Recorder):
    """Spoils all that it is given."""

    def fit(self, x: Any, y: Any, sample_weight: Any = None) -> None:
        super().fit(x.copy(), y.copy(), sample_weight)
        x[:], y[:] = -1, -1

    def predict_proba(self, x: Any) -> Any:
        x[:] = -2
        return super().predict_proba(x)


def test_an_object_that_writes_into_its_rows_changes_no_others() -> None:
    x, y = some()
    before = x.clone(), y.clone()
    BlackBoxModel("w", Writes, K).fit(x, y).probs(x)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        (lambda x, y, sample_weight=None: None, True),
        (lambda x, y, **params: None, False),
        (type, False),  # Python can't tell
        (min, False),
    ],
)
def test_weights_are_given_to_who_names_them(fit: Any, expected: bool) -> None:
    assert accepts_weights(fit) is expected


def test_soft_labels_teach_what_hard_ones_can_t() -> None:
    """A forest that never saw classes 2 and 3 of its own learns them from public rows."""
    x, y = some(40, classes=2)
    public, truth = some(80, seed=1)
    targets = torch.full((80, K), 0.02).scatter(1, truth[:, None], 0.94)
    test, labels = some(40, seed=2)
    for name in set(BLACK_BOXES) - set(EXTRAS) - {"ridge"}:
        box = named(name)
        alone_, taught = box.fit(x, y), box.fit(x, y, public, targets)
        right = [
            float((f.probs(test).argmax(1) == labels).float().mean()) for f in (alone_, taught)
        ]
        assert right[0] <= 0.5 and right[1] > 0.8, name


# -- what it answers -------------------------------------------------------------------------------


def test_answers_are_probabilities_with_a_floor_also_of_classes_never_seen() -> None:
    x, y = some(6, classes=2)
    answer = BlackBoxModel("r", Recorder, K, min_probability=1e-2).fit(x, y).probs(x)
    p = torch.tensor([0.49, 0.49, 0.01, 0.01])
    assert answer.dtype == torch.float32 and answer.shape == (6, K)
    assert torch.allclose(answer, p.expand(6, K))


def test_one_class_needs_no_fit() -> None:
    """Many objects would refuse it; the answer is that class."""
    x, _ = some(5)
    box = BlackBoxModel("none", lambda: Says(None), K)
    answer = box.fit(x, torch.full((5,), 2)).probs(x)
    assert answer.argmax(1).tolist() == [2] * 5 and torch.allclose(answer.sum(1), torch.ones(5))


@pytest.mark.parametrize("name", HERE)
def test_few_rows_will_do(name: str) -> None:
    x, y = some(3)
    answer = named(name).fit(x, y).probs(x)
    assert torch.isfinite(answer).all() and torch.allclose(answer.sum(1), torch.ones(3))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.full((5, 3), 1 / 3), r"one column for each class.*\(4, 4\), not \(4, 3\)"),
        (np.full(5, 1.0), r"not \(4,\)"),
        (np.full((5, K), np.nan), "finite numbers from 0 to 1"),
        (np.full((5, K), -0.1), "finite numbers from 0 to 1"),
        (np.full((5, K), 2.0), "finite numbers from 0 to 1"),
        (np.full((5, K), "a"), "finite numbers from 0 to 1"),
        (np.full((5, K), 0.2), "rows that sum to 1"),
    ],
)
def test_what_is_no_probability_is_refused_as_soon_as_it_is_fitted(answer: Any, text: str) -> None:
    assert CHECKED_ROWS < 5
    with pytest.raises(ModelError, match=f"odd: predict_proba must give.*{text}"):
        BlackBoxModel("odd", lambda: Says(answer[:CHECKED_ROWS]), K).fit(*some(5))


def test_sums_are_1_to_a_rounding_and_then_exactly() -> None:
    x, y = some(CHECKED_ROWS)
    answer = (
        BlackBoxModel("b", lambda: Says(np.full((CHECKED_ROWS, K), 0.2502)), K).fit(x, y).probs(x)
    )
    assert torch.equal(answer, torch.full((CHECKED_ROWS, K), 0.25))


@pytest.mark.parametrize(
    "classes",
    [
        ["a", "b"],
        ["0", "1"],
        [0, 0],
        [0, 4],
        [-1, 0],
        [0.5, 1],
        [0, np.nan],
        [[0, 1]],
        [[0], [0, 1]],
        1,
        [],
    ],
)
def test_other_classes_than_it_was_given_are_refused(classes: Any) -> None:
    odd = Says(None)
    odd.classes_ = classes  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="classes_ after fit must be different labels from 0 to 3"):
        BlackBoxModel("odd", lambda: odd, K).fit(*some())


@pytest.mark.parametrize("classes", [np.array([2.0, 0.0]), [2, 0], np.array([2, 0], dtype=object)])
def test_classes_that_are_equal_to_labels_will_do(classes: Any) -> None:
    x, y = some(CHECKED_ROWS)
    odd = Says(np.tile([0.9, 0.1], (CHECKED_ROWS, 1)))
    odd.classes_ = classes  # type: ignore[attr-defined]
    assert BlackBoxModel("odd", lambda: odd, K).fit(x, y).probs(x)[0].argmax() == 2


class Fixed(FittedBlackBox):
    """Always gives the same probabilities."""

    def __init__(self, *p: float) -> None:
        super().__init__(BlackBoxModel("fixed", object, len(p)), None, np.arange(len(p)))
        self.p = torch.tensor(p)

    def probs(self, x: Tensor) -> Tensor:
        return self.p.expand(len(x), -1)


def test_a_public_row_is_answered_by_the_fit_that_did_not_hear_of_it() -> None:
    folds, x = CrossFit(odd=Fixed(0.9, 0.1), even=Fixed(0.2, 0.8)), torch.zeros(4, 3)
    answer = folds.public_log_probs(x, torch.tensor([2, 5, 7, 4])).exp()
    assert torch.allclose(answer[:, 0], torch.tensor([0.9, 0.2, 0.2, 0.9]))
    assert torch.allclose(
        folds.public_log_probs(x, torch.tensor([1, 3, 5, 7])).exp()[:, 0], torch.full((4,), 0.2)
    )
    assert torch.allclose(folds.log_probs(x).exp(), torch.tensor([0.55, 0.45]).expand(4, -1))
    one = CrossFit(folds.odd, folds.odd)
    assert torch.equal(one.log_probs(x), one.public_log_probs(x, torch.arange(4)))


# -- the same every time ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE)
def test_a_fit_is_the_same_again(name: str) -> None:
    x, y = some(40)
    public, targets = some(30, seed=1)[0], torch.softmax(some(30, seed=2)[0].flatten(1)[:, :K], 1)
    first = named(name).fit(x, y, public, targets).probs(public)
    np.random.default_rng().random()
    torch.rand(3)
    assert torch.equal(first, named(name).fit(x, y, public, targets).probs(public))


def test_chance_is_seeded_within_and_untouched_outside() -> None:
    def numpy_state() -> list[int]:
        return np.random.mtrand.get_state(legacy=False)["state"]["key"].tolist()

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.mtrand.random_sample()), float(torch.rand(()))

    before = random.getstate(), numpy_state(), torch.get_rng_state()
    with reproducible(3):
        first = drawn()
    with pytest.raises(KeyError), reproducible(3):
        assert drawn() == first
        raise KeyError
    assert random.getstate() == before[0] and numpy_state() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_fit_is_kept_until_another_is_asked_for_and_dies_with_its_black_box() -> None:
    made = []

    def fit(box: BlackBoxModel) -> CrossFit:
        made.append(1)
        return CrossFit(*[box.fit(*some())] * 2)

    box = named("knn")
    first = box.cached(b"a", lambda: fit(box))
    assert box.cached(b"a", lambda: fit(box)) is first and len(made) == 1
    assert box.cached(b"b", lambda: fit(box)) is not first and len(made) == 2
    sent = pickle.loads(pickle.dumps(box))  # as a cluster sends it: the equipment alone
    sent.cached(b"b", partial(fit, sent))
    assert len(made) == 3
    kept = weakref.ref(sent)
    del sent
    gc.collect()
    assert kept() is None


# -- names -----------------------------------------------------------------------------------------


def own_box(shape: tuple[int, ...], classes: int) -> Recorder:
    return Recorder()


def own_network(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Linear(shape[0], classes)


ONE = Recorder()


def always_the_same(shape: tuple[int, ...], classes: int) -> Recorder:
    return ONE


def neither(shape: tuple[int, ...], classes: int) -> int:
    return 3


def test_a_name_is_a_black_box_or_a_network() -> None:
    assert all(is_black_box(name, (6,), K) for name in {*BLACK_BOXES} - {"ridge"})
    assert not is_black_box("mlp", (6,), K)
    assert is_black_box(f"{__name__}:own_box", (6,), K)
    assert not is_black_box(f"{__name__}:own_network", (6,), K)
    with pytest.raises(
        ModelError, match=r"must return a torch.nn.Module, or an object with fit and predict_proba"
    ):
        is_black_box(f"{__name__}:neither", (6,), K)
    with pytest.raises(ModelError, match="must return a new object at each call"):
        is_black_box(f"{__name__}:always_the_same", (6,), K)


def test_no_network_is_built_of_a_black_box() -> None:
    with pytest.raises(ModelError, match="forest is a black box, but a network is needed here"):
        build("forest", (6,), K)
    check_name("forest", black_boxes=True)
    with pytest.raises(ModelError, match="Did you mean 'forest'"):
        check_name("forrest", black_boxes=True)
    with pytest.raises(ModelError, match=r"must return a torch\.nn\.Module"):
        build(f"{__name__}:own_box", (6,), K)


# -- packages that are extras ----------------------------------------------------------------------


def test_an_extra_fits_any_classes_and_is_the_same_again(stand_in: str) -> None:
    check_name(stand_in, black_boxes=True)
    x, y = some(40)
    some_classes = torch.where(y == 1, 3, y)  # class 1 is missing, and 3 comes after 2
    first, again = (named(stand_in).fit(x, some_classes).probs(x) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (40, K)
    assert (first.argmax(1) == some_classes).all() and (first[:, 1] < 0.002).all()
    public, targets = some(30, seed=1)[0], torch.softmax(some(30, seed=2)[0].flatten(1)[:, :K], 1)
    assert named(stand_in).fit(x, y, public, targets).probs(public).isfinite().all()


def test_an_extra_trains_alone_in_a_run(stand_in: str) -> None:
    data = {"name": "wine", "clients": 2, "partition": "iid", "public_rows": 20}
    result = fedloom.run("local", rounds=1, data=data, models={"pool": [stand_in]})
    assert result.accuracy > 0.8


@pytest.mark.parametrize("name", EXTRAS)
def test_without_its_package_the_error_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ModelError, match=rf"{name} needs the package {name}.*pip install -e '.\[{name}\]'"
    ):
        check_name(name, black_boxes=True)
    with pytest.raises(FedloomError, match=rf"pip install -e '.\[{name}\]'"):
        fedloom.run("local", rounds=1, data={"name": "wine"}, models={"pool": [name]})
    with pytest.raises(ModelError, match=f"needs the package {name}"):
        TrialConfig(alone=(name,))
    check_name("forest", black_boxes=True)


def test_tabicl_itself_predicts_with_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, where it is installed, with a tiny network in place of its
    downloaded one.
    """
    classifier = pytest.importorskip("tabicl._sklearn.classifier")
    from tabicl._model.tabicl import TabICL

    narrow = dict.fromkeys(("col_num_blocks", "row_num_blocks", "icl_num_blocks", "ff_factor"), 1)
    heads = dict.fromkeys(("col_nhead", "row_nhead", "icl_nhead", "row_num_cls"), 2)
    config = {"max_classes": K, "embed_dim": 8, "col_num_inds": 4, **narrow, **heads}
    torch.save(
        {"config": config, "state_dict": TabICL(**config).state_dict()}, tmp_path / "weights"
    )
    monkeypatch.setattr(classifier, "hf_hub_download", lambda **_: tmp_path / "weights")
    (x, y), public = some(40), some(4, seed=1)[0]
    answers = [
        named("tabicl").fit(x, y, public, torch.full((4, K), 1 / K)).probs(some(6, seed=2)[0])
        for _ in range(2)
    ]
    assert answers[0].shape == (6, K) and torch.equal(*answers)
    assert answers[0].sum(1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)


def test_a_trial_s_models_are_the_plain_ones_where_scikit_learn_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They use parts of it that are not public."""
    chosen = plain_models.quick.__wrapped__  # without the cache
    assert (
        chosen("forest") is plain_models.QuickForest
        and chosen("boosting") is plain_models.quick_boosting
    )
    monkeypatch.setattr("sklearn.tree._splitter.BestSplitter", lambda criterion, columns: None)
    assert chosen("forest") is plain_models.forest
    # another answer
    monkeypatch.setattr(plain_models, "_midpoints", lambda x: [np.zeros(0) for _ in x.T])
    assert chosen("boosting") is plain_models.boosting


@pytest.mark.parametrize("kind", ["two classes", "three classes", "a number"])
def test_a_trial_s_models_predict_what_black_boxes_do_in_less_time(kind: str) -> None:
    """The same forest, but for ties; boosting without the columns that no leaf of five rows can
    split; and the same boosting from borders of bins that are found at once, also in columns of
    more values than bins.
    """
    rng = np.random.default_rng(0)
    x, number = rng.normal(size=(60, 8)).astype(np.float32), kind == "a number"
    signal = x[:, 0] + rng.normal(size=60)
    y = signal if number else np.digitize(signal, [0.0] if kind == "two classes" else [-0.5, 0.5])

    def predicted(model: Any, rows: np.ndarray) -> Any:
        return model.predict(rows) if number else model.predict_proba(rows)

    quick = plain_models.QuickForest(3, number).fit(x, y)
    forest = plain_models.forest(3, number).fit(x, y)
    apart = np.abs(predicted(quick, x) - predicted(forest, x))
    assert apart.max() <= 0.05 and np.mean(apart < 1e-9) > 0.8
    x[:, 5], x[:, 6], x[:4, 6] = 1, 0, 1  # a constant, and one that varies in four rows
    boosting = plain_models.boosting(3, number)
    used = plain_models.can_split(boosting, x)
    assert used.tolist() == [True] * 5 + [False] * 2 + [True]
    assert plain_models.can_split(forest, x).tolist() == [True] * 5 + [False, True, True]
    found = predicted(plain_models.boosting(3, number).fit(x[:, used], y), x[:, used])
    np.testing.assert_array_equal(found, predicted(boosting.fit(x, y), x))
    x[:, 1] = np.round(x[:, 1])
    for bins in (60, 20):
        plain, quick = plain_models.boosting(3, number), plain_models.quick_boosting(3, number)
        found = [
            predicted(model.set_params(max_bins=bins).fit(x, y), x) for model in (plain, quick)
        ]
        np.testing.assert_array_equal(*found)
