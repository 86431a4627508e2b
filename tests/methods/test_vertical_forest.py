"""The vertical forest: what crosses, parties that are away, rows that parties lack, folders, and
hostile bins.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom import methods
from fedloom.api import Stopped, execute
from fedloom.core import message
from fedloom.core.context import ClientContext
from fedloom.core.errors import CheckpointError, MessageError, MethodError
from fedloom.core.evaluation import contribution
from fedloom.deploy import export, load_active, load_party
from fedloom.deploy import folder as folders
from fedloom.experiment.plan.reading import check
from fedloom.methods.tables.steps import trees_of, trees_tree
from fedloom.methods.vertical.vertical_forest import VerticalForestActive
from fedloom.report import write
from fedloom.trees.model import Trees
from tests.methods.columns import CLASSES, FEATURES, Columns
from tests.methods.test_laser import lacking, some

FOREST, ALONE = methods.find("vertical-forest"), methods.find("active-forest")
BOOSTING = methods.find("vertical-boosting")
SMALL: dict[str, Any] = {"lot": 5, "bins": 8, "depth": 4}


def parts_of(toy: Columns, on: str = "test") -> dict[int, Any]:
    return {m: contribution(toy.party(m), on=on) for m in toy.engine.ids}


def test_bins_cross_once_and_nothing_comes_back() -> None:
    toy = Columns(FOREST, **SMALL).run(3)
    assert [(h.round, h.party, h.method, h.put) for h in toy.heard] == [
        (0, m, "bins", {}) for m in range(3)
    ]
    for m, bins in toy.sent("bins", 0).items():
        assert (
            bins.dtype == torch.uint8
            and bins.shape == (30, FEATURES)
            and bins.min() >= 1
            and bins.max() <= 7
        )
        rows = toy.contexts[m].rows.every
        for f in range(FEATURES):  # about equally many of all rows, and in the order of the values
            counts = np.bincount(toy.party(m).infer(rows)[:, f], minlength=8)
            assert counts[0] == 0 and counts.max() <= 10 and (counts > 0).sum() >= 5
            assert (np.diff(bins[rows[:30, f].argsort(), f].numpy().astype(int)) >= 0).all()
    sent = {entry.receiver: (entry.count, entry.bytes) for entry in toy.fed.ledger}
    # the active party's own bins stay at home
    assert sent == {"party": (2, 0), "active": (2, 2 * 30 * FEATURES)}


def test_parties_learn_nothing_of_labels() -> None:
    a, b = (
        Columns(FOREST, relabel=how, **SMALL).run(2)
        for how in (lambda y: y, lambda y: (y + 1) % CLASSES)
    )
    assert [(h.party, h.method, h.put) for h in a.heard] == [
        (h.party, h.method, h.put) for h in b.heard
    ]
    assert all(torch.equal(a.party(m).edges, b.party(m).edges) for m in range(3))
    assert a.active.exposed(parts_of(a, "aligned")) == {}


def test_values_do_not_count_only_their_order() -> None:
    """Other monotone scales of the columns give the same trees."""
    a, b = Columns(FOREST, **SMALL), Columns(FOREST, **SMALL)
    for m in range(3):
        rows = b.contexts[m].rows
        rows.pool.copy_(torch.expm1(rows.pool / 4))
        assert not torch.equal(rows.pool, a.contexts[m].rows.pool)
        b.engine._parties[m] = FOREST.client(b.cfg, b.contexts[m])
    assert message.digest(a.run(2).active.forests) == message.digest(b.run(2).active.forests)


def test_it_predicts_as_scikit_learn_s_forest_on_all_columns() -> None:
    from sklearn.ensemble import RandomForestClassifier

    toy = Columns(FOREST, aligned=120, seed=3, lot=60).run(2)
    x, tests = (torch.cat([c.every[:k] for c in parts], 1).numpy() for parts, k in (
        ([c.rows for c in toy.contexts], 120), ([c.tests["test"] for c in toy.contexts], 25)))  # fmt: skip  # noqa: E501
    y = toy.active.data.y(torch.arange(120)).numpy()
    theirs = (
        RandomForestClassifier(120, min_samples_leaf=2, random_state=0)
        .fit(x, y)
        .predict_proba(tests)
    )
    ours = toy.active.decide(parts_of(toy)).exp().numpy()
    assert abs(ours.sum(1) - 1).max() < 1e-5 and (ours.argmax(1) == theirs.argmax(1)).mean() > 0.8
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9


# -- parties that are away -------------------------------------------------------------------------


def test_without_the_others_the_active_party_predicts_as_alone() -> None:
    toy, alone = Columns(FOREST, **SMALL).run(2), Columns(ALONE, **SMALL).run(2)
    mine = {0: parts_of(toy)[0]}
    assert not [h for h in alone.heard if h.party] and set(alone.active.forests) == {"0"}
    assert torch.equal(toy.active.decide(mine), alone.active.decide(parts_of(alone)))
    assert set(toy.active.forests) == {"0", "1", "2", "0-1", "0-2", "1-2", "0-1-2"}


def test_a_row_is_predicted_by_the_parties_that_have_it() -> None:
    had, tested = some(30, 3), some(25, 3, seed=1)
    tested[:4] = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    toy = lacking(Columns(FOREST, **SMALL), had, tested).run(2)
    sent = toy.sent("bins", 0)
    assert all(
        torch.equal(bins.any(1), had[:, m]) and bool((bins[had[:, m]] > 0).all())
        for m, bins in sent.items()
    )
    parts, together = parts_of(toy), toy.active.decide(parts_of(toy))
    for i in range(25):
        here = [m for m in range(3) if tested[i, m]]
        if here:
            alone = toy.active.decide({m: parts[m][i : i + 1] for m in here})
            assert torch.equal(alone[0], together[i])
    # nobody has this row: the forest of all parties, to which everything is missing
    assert torch.equal(
        together[3],
        toy.active.decide({m: torch.zeros(1, FEATURES, dtype=torch.uint8) for m in range(3)})[0],
    )


def test_a_forest_is_grown_from_rows_that_one_of_its_parties_has() -> None:
    had = torch.ones(30, 3, dtype=torch.bool)
    had[20:, 1] = False
    toy = lacking(Columns(FOREST, **SMALL), had).run(1)
    other = lacking(
        Columns(FOREST, relabel=lambda y: torch.cat([y[:20], y[20:].flip(0)]), **SMALL), had
    ).run(1)
    one, two = toy.active.forests, other.active.forests
    assert message.digest(one["1"]) == message.digest(two["1"]) and message.digest(
        one["0"]
    ) != message.digest(two["0"])


# -- boosting --------------------------------------------------------------------------------------


def test_boosting_adds_the_trees_of_fedboost_s_rule() -> None:
    """One split of each of two rounds, by hand: the class with a third of the rows, from its
    residuals.
    """
    toy = Columns(BOOSTING, lot=1, bins=8, depth=1, min_rows=1, l2=1.0, rate=0.5).run(2)
    bins = np.concatenate([toy.active.sent[str(m)].numpy() for m in range(3)], axis=1)
    y, K = toy.active.data.y(torch.arange(30)).numpy(), CLASSES
    trees, one = trees_of(toy.active.forests["0-1-2"]), 2.0**-20
    assert len(trees) == 3 * K  # the shares of the classes, then a tree a class in each round
    scores = np.log((np.bincount(y, minlength=K) + 1) / (30 + K))[:, None].repeat(30, 1)
    for first in (K, 2 * K):
        p = np.exp(scores) / np.exp(scores).sum(0)
        g, h = p - (y == np.arange(K)[:, None]), p * (1 - p)
        for k in range(K):
            node = int(trees.root[first + k])
            left = np.unpackbits(trees.left[node])[bins[:, trees.feature[node]]].astype(bool)
            best = max(
                gained(g[k], h[k], bins[:, f] <= b)
                for f in range(bins.shape[1])
                for b in range(1, 7)
            )
            assert gained(g[k], h[k], left) == pytest.approx(best, rel=0.05)  # g and h are rounded
            for side, at in ((left, trees.child[node]), (~left, trees.child[node] + 1)):
                assert trees.value[at, 0] * one == pytest.approx(
                    -0.5 * g[k][side].sum() / (h[k][side].sum() + 1), abs=0.01
                )
                scores[k, side] += trees.value[at, 0] * one
    logits = toy.active.decide(parts_of(toy, "aligned")).numpy()
    ours = np.exp(scores) / np.exp(scores).sum(0)
    assert np.abs(np.exp(logits).T - ours).max() < 0.01


def gained(g: np.ndarray, h: np.ndarray, left: np.ndarray) -> float:
    """What a split gains, with l2 = 1."""
    score = [g[side].sum() ** 2 / (h[side].sum() + 1) for side in (left, ~left)]
    return float(sum(score))


def test_boosting_predicts_by_the_parties_that_are_there() -> None:
    toy = Columns(BOOSTING, lot=4, bins=8).run(2)
    assert set(toy.active.forests) == {"0", "1", "2", "0-1", "0-2", "1-2", "0-1-2"}
    parts, nothing = parts_of(toy), torch.zeros(25, FEATURES, dtype=torch.uint8)
    alone = toy.active.decide({0: parts[0]})
    assert torch.equal(alone, toy.active.decide({0: parts[0], 1: nothing, 2: nothing}))
    assert (
        not torch.equal(alone, toy.active.decide(parts))
        and abs(alone.exp().sum(1) - 1).max() < 1e-5
    )
    other = Columns(BOOSTING, relabel=lambda y: (y + 1) % CLASSES, lot=4, bins=8).run(2)
    assert [(h.party, h.method, h.put) for h in toy.heard] == [
        (h.party, h.method, h.put) for h in other.heard
    ]
    assert sum(toy.active.gains.sum(1)) > 0


def test_only_so_many_absent_parties_have_forests() -> None:
    toy = Columns(FOREST, absent=1, **SMALL).run(1)
    assert set(toy.active.forests) == {"0-1-2", "0-1", "0-2", "1-2"}
    parts, nothing = parts_of(toy), torch.zeros(25, FEATURES, dtype=torch.uint8)
    assert torch.equal(
        toy.active.decide({0: parts[0]}), toy.active.decide({0: parts[0], 1: nothing, 2: nothing})
    )
    context = ClientContext(id=0, parties=9, classes=2)
    with pytest.raises(
        MethodError, match="9 parties have 511 sets, and at most 255 may have forests"
    ):
        VerticalForestActive(FOREST.configure(), context)
    VerticalForestActive(FOREST.configure(params={"absent": 1}), context)


def test_a_party_that_was_away_takes_part_from_its_return_on() -> None:
    toy = Columns(FOREST, **SMALL).run(1, present=[0, 2])
    assert toy.active.widths.tolist() == [FEATURES, 0, FEATURES] and set(toy.active.forests) == {
        "0",
        "2",
        "0-2",
    }
    assert toy.active.decide(parts_of(toy)).isfinite().all()
    toy.run(1, start=1)
    assert [h.party for h in toy.heard if h.round == 1] == [1]
    trees = {name: len(tree["root"]) for name, tree in toy.active.forests.items()}
    assert trees == {"0": 10, "2": 10, "0-2": 10, "1": 5, "0-1": 5, "1-2": 5, "0-1-2": 5}
    untrained = Columns(FOREST, **SMALL).active.decide(
        {0: torch.ones(2, FEATURES, dtype=torch.uint8)}
    )
    assert untrained.std() < 1e-6


def test_hostile_bins_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    good = torch.ones(30, FEATURES, dtype=torch.uint8)
    for bad in (good * 8, good[:29], good.float(), good[:, :0], {"bins": good}):
        toy = Columns(FOREST, **SMALL)
        bins = type(toy.party(1)).bins
        monkeypatch.setattr(
            type(toy.party(1)),
            "bins",
            lambda self, bad=bad, bins=bins: bad if self.context.id == 1 else bins(self),
        )
        toy.run(1)
        assert [f.party for f in toy.fed.failures] == [
            "party-1"
        ] and toy.active.widths.tolist() == [
            FEATURES,
            0,
            FEATURES,
        ]
        monkeypatch.undo()
    toy = Columns(FOREST, **SMALL).run(1)
    parts = parts_of(toy)
    wide = {**parts, 1: torch.ones(25, FEATURES + 1, dtype=torch.uint8)}
    assert torch.equal(toy.active.decide(wide), toy.active.decide({0: parts[0], 2: parts[2]}))


# -- a whole run -----------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "method": "vertical-forest",
    "rounds": 3,
    "seed": 4,
    "params": {"lot": 4},
    "data": {"name": "breast_cancer", "clients": 4},
    "columns": {"aligned": 60, "missing": 0.2},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run") / "whole"
    values = {**RUN, "evaluate": {"leaks": True, "attack_labels": 1}}
    result = execute(check({"run": values}).run, folder)
    export(folder)
    return folder, result


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    ran: tuple[Path, Any], tmp_path: Path
) -> None:
    seen: list[int] = []
    run = check({"run": RUN}).run
    with pytest.raises(Stopped):
        execute(
            run,
            tmp_path,
            progress=lambda status: seen.append(status.round),
            stop=lambda: seen[-1] == 1,
        )
    again = execute(run, tmp_path, resume=True).summary
    assert (
        again["state_sha256"] == ran[1].summary["state_sha256"]
        and again["accuracy"] == ran[1].summary["accuracy"]
    )
    assert again["accuracy"]["mean"] > 0.85


def test_the_report_has_importance_and_the_leak(ran: tuple[Path, Any]) -> None:
    found = ran[1].summary
    parties, top = found["learned"]
    assert [row[0] for row in parties["rows"]] == [f"party {m}" for m in range(4)]
    assert sum(row[2] for row in parties["rows"]) == pytest.approx(1) and len(top["rows"]) == 10
    leaks = {(one["message"], one["attack"]): one["success"] for one in found["leaks"]}
    # places in columns tell nearly all of their values
    assert leaks["bins", "reconstruction"] > 0.8
    assert {message for message, attack in leaks if attack == "row labels"} == {
        "no message (completion)", "no message (own embeddings)"
    }  # fmt: skip
    page = write(ran[0]).read_text()
    assert "The most important columns" in page and "bins" in page


def test_folders_predict_as_the_run_did_with_any_party(ran: tuple[Path, Any]) -> None:
    from fedloom.data.sources import load_raw

    folder, table = ran[0] / "export", load_raw("breast_cancer")
    raw = {name: values.tolist() for name, values in table.columns.items()}
    active = load_active(folder / "active")
    sent = [load_party(folder / f"party-{m}").embed(raw) for m in range(4)]
    assert len({part.values.shape[1] for part in sent}) > 1
    for parts in (sent, sent[:1], sent[1:]):
        p = active.predict(parts)
        assert abs(p.sum(1) - 1).max() < 1e-5 and (p.argmax(1) == table.y).mean() > 0.85
    kept: Any = message.decode((folder / "active" / "state.safetensors").read_bytes())
    assert set(kept["state"]) == {
        "widths", "forests"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda t: replace(t, child=np.where(t.feature >= 0, 0, t.child).astype(np.int32)),
            "children must come after",
        ),
        (
            lambda t: replace(t, child=np.where(t.feature >= 0, 10**6, t.child).astype(np.int32)),
            "children must come",
        ),
        (
            lambda t: replace(t, feature=np.where(t.feature >= 0, 30000, -1).astype(np.int16)),
            "must look at a column",
        ),
        (lambda t: replace(t, left=t.left[:, :1]), "with a bit for each of 32 bins"),
        (lambda t: replace(t, root=t.root + 1), "roots must ascend from 0"),
        (lambda t: replace(t, value=t.value[:, :1]), "leaves must have 2 values"),
        (lambda t: replace(t, value=-t.value), "2 values from 0 to"),
    ],
)
def test_a_folder_with_other_trees_is_refused(
    change: Any, why: str, ran: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(ran[0] / "export" / "active", tmp_path / "active")
    state: Any
    manifest, state = folders.read(tmp_path / "active", "active")
    state["state"]["forests"]["0"] = trees_tree(change(trees_of(state["state"]["forests"]["0"])))
    folders.write(
        tmp_path / "active",
        manifest.model_dump(mode="json", exclude={"state_sha256", "state_bytes"}),
        message.encode(state),
    )
    with pytest.raises(CheckpointError, match=why):
        load_active(tmp_path / "active")


def test_widths_and_sets_of_a_folder_are_checked() -> None:
    toy = Columns(FOREST, **SMALL).run(1)
    state = {"widths": toy.active.widths, "forests": toy.active.forests}
    fresh = Columns(FOREST, **SMALL).active
    fresh.restore(state)
    assert torch.equal(fresh.decide(parts_of(toy)), toy.active.decide(parts_of(toy)))
    wrong: list[dict[str, Any]] = [
        {"widths": state["widths"] - 9},
        {"forests": {"0-9": state["forests"]["0"]}},
        {"forests": {"0": {}}},
    ]
    for bad in wrong:
        with pytest.raises(MessageError):
            fresh.restore({**state, **bad})


def test_trees_of_one_node_are_no_problem() -> None:
    one = Trees(
        np.zeros(1),
        np.full(1, -1, np.int16),
        np.zeros((1, 1), np.uint8),
        np.zeros(1, np.int32),
        np.ones((1, 2), np.int64),
    )
    assert one.problem(0, 8) == one.problem(0, 9) == ""  # leaves alone look at no bin


@pytest.mark.parametrize("name", ["breast_cancer", "wine"])
def test_boosted_trees_of_classes_are_exported(name: str, tmp_path: Path) -> None:
    from fedloom.data.sources import load_raw

    values = {
        **RUN,
        "method": "vertical-boosting",
        "rounds": 12,
        "params": {},
        "data": {"name": name, "clients": 2},
    }
    execute(check({"run": values}).run, tmp_path / "run")
    folder, table = export(tmp_path / "run").folder, load_raw(name)  # compared with the run
    raw = {column: values.tolist() for column, values in table.columns.items()}
    active = load_active(folder / "active")
    sent = [load_party(folder / f"party-{m}").embed(raw) for m in range(2)]
    assert len(active.classes) == len(table.classes)
    for parts in (sent, sent[:1], sent[1:]):
        p = active.predict(parts)
        assert abs(p.sum(1) - 1).max() < 1e-5 and (p.argmax(1) == table.y).mean() > 0.85


@pytest.mark.parametrize(
    ("method", "models"),
    [("vertical-forest", {}), ("vertical-boosting", {}), ("split", {"variance": True})],
)
def test_folders_predict_a_number_in_its_unit(
    method: str, models: dict[str, Any], tmp_path: Path
) -> None:
    rng, n = np.random.default_rng(0), 120
    age, iron = rng.normal(size=(2, n)).round(3)
    days = (40 + 3 * age + 6 * iron).round(2)
    lines = ["id,age,days", *(f"p{i},{age[i]},{days[i]}" for i in range(n))]
    (tmp_path / "clinic.csv").write_text("\n".join(lines))
    (tmp_path / "lab.csv").write_text(
        "\n".join(["id,iron", *(f"p{i},{iron[i]}" for i in range(n))])
    )
    files = [str(tmp_path / name) for name in ("clinic.csv", "lab.csv")]
    columns = {"files": files, "id": "id", "label": "days"}
    run = fedloom.run(method, columns=columns, rounds=3, models=models, out=tmp_path / "run")
    folder = export(tmp_path / "run").folder  # compared with the run
    active = load_active(folder / "active")
    sent = [
        load_party(folder / f"party-{m}").embed(
            {name: values.tolist()}, [f"p{i}" for i in range(n)]
        )
        for m, (name, values) in enumerate({"age": age, "iron": iron}.items())
    ]
    found = active.predict(sent)
    assert (
        active.classes == ()
        and found.shape == (n, 2 if models else 1)
        and 30 < found[:, 0].mean() < 50
    )
    if method != "split":
        test = run.summary["scores"]["rmse"]  # on rows that no tree has seen
        assert np.sqrt(((found[:, 0] - days) ** 2).mean()) < test < days.std()
        with pytest.raises(CheckpointError, match="leaves must have 1 values"):
            state: Any
            manifest, state = folders.read(folder / "active", "active")
            tree = trees_of(state["state"]["forests"]["0"])
            state["state"]["forests"]["0"] = trees_tree(
                replace(tree, value=tree.value.repeat(2, axis=1))
            )
            about = manifest.model_dump(mode="json", exclude={"state_sha256", "state_bytes"})
            folders.write(folder / "active", about, message.encode(state))
            load_active(folder / "active")
    else:
        assert (found[:, 1] > 0).all()
