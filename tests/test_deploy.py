"""Use after training: folders of parties, each on its own, that answer as the run did."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, DataError, FedloomError
from fedloom.core.party import Party
from fedloom.data.dataset import Dataset
from fedloom.data.sources import load_raw
from fedloom.data.split import hold_out
from fedloom.deploy import (
    Embeddings,
    Exported,
    export,
    load_active,
    load_party,
    read_embeddings,
    write_embeddings,
)
from fedloom.deploy.folder import MANIFEST, STATE, digest
from fedloom.deploy.rows import encode_rows
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import read
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.session import fingerprint
from fedloom.methods.vertical import steps

SMALL: dict[str, Any] = {
    "proto-evfl": {"steps": 4, "epochs": 2, "embedding_dim": 8},
    "split": {"epochs": 2, "embedding_dim": 8},
    "active-only": {"epochs": 1, "embedding_dim": 4},
    "fedhssl": {"embedding_dim": 4, "pretrain_rounds": 1, "steps": 1, "features": "concatenated"},
    "ss-vfl": {"embedding_dim": 4, "pretrain_rounds": 1, "steps": 1, "epochs": 1, "pca_dim": 2},
    "proto-student": {"embedding_dim": 8, "pca_dim": 3, "steps": 3, "epochs": 1},
}
CASES = [
    (method, data) for method in ("proto-evfl", "split") for data in ("digits", "breast_cancer")
]


@dataclass
class Trained:
    """A run, its parties as they ended, its folders, and its raw test rows."""

    folder: Path
    run_plan: RunPlan
    active_party: Party[Any]
    parties: list[Party[Any]]
    exported: Exported
    test: np.ndarray
    """Numbers of the test rows in the raw data."""

    @property
    def out(self) -> Path:
        return self.exported.folder

    def joint(self) -> np.ndarray:
        """The run's own probabilities on its test rows."""
        parties: list[Any] = self.parties
        active: Any = self.active_party
        parts = {m: party.contribution(on="test") for m, party in enumerate(parties)}
        return torch.softmax(active.decide(parts), -1).numpy()

    def alone(self, m: int) -> np.ndarray:
        """The same of one party alone."""
        party: Any = self.parties[m]
        return torch.softmax(
            party.alone(party.infer(party.context.tests["test"].every)), -1
        ).numpy()

    def raw(self) -> Any:
        """Raw test rows of all columns, or whole pictures."""
        data = load_raw(self.run_plan.run.data.name)
        if isinstance(data, Dataset):
            return data.x[self.test]
        return {name: values[self.test] for name, values in data.columns.items()}


def trained(folder: Path, method: str, data: str, **settings: Any) -> Trained:
    columns = {"aligned": 60, "unaligned": 40}
    values = {"data": {"name": data, "clients": 4, "test_rows": 50}, "columns": columns, **settings}
    fedloom.run(method, out=folder, params=SMALL[method], **{"rounds": 2, **values})
    exported = export(folder, folder.with_name(f"{folder.name}-parties"))
    run = read(str(folder / "config.toml")).run
    run_plan = build(run)
    found, _ = checkpoint.newest(folder / "checkpoints", fingerprint(run_plan))
    assert found is not None and run_plan.server is not None
    states = list(found[1].values())
    run_plan.server.load(states[0])
    parties = [make() for make in run_plan.clients]
    for party, state in zip(parties, states[1:], strict=True):
        party.load(state)
    raw = load_raw(data)
    test = hold_out(raw.y, raw.test, seed=run.seed, fraction=run.data.test_share, limit=50).kept
    return Trained(folder, run_plan, run_plan.server, parties, exported, test)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """A small run of a method on a data set, done once and not to be changed."""
    known: dict[tuple[str, str], Trained] = {}

    def get(method: str, data: str) -> Trained:
        if (method, data) not in known:
            known[method, data] = trained(
                tmp_path_factory.mktemp("runs") / f"{method}-{data}", method, data
            )
        return known[method, data]

    return get


@pytest.fixture
def proto(runs: Callable[[str, str], Trained]) -> Trained:
    return runs("proto-evfl", "breast_cancer")


@pytest.fixture
def folder(proto: Trained, tmp_path: Path) -> Path:
    """A copy of a party's folder, to be damaged."""
    return Path(shutil.copytree(proto.out / "party-1", tmp_path / "party-1"))


def write_rows(path: Path, columns: dict[str, np.ndarray], **more: list[str]) -> Path:
    """A CSV file of raw columns."""
    # all digits
    every = {name: np.asarray(values).tolist() for name, values in {**columns, **more}.items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(every)
        writer.writerows(zip(*every.values(), strict=True))
    return path


def change(folder: Path, **values: Any) -> None:
    """Set top-level values of a card."""
    card = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**card, **values}))


def put(folder: Path, state: Any) -> None:
    """Another state, with a card that agrees."""
    data = message.encode(state)
    (folder / STATE).write_bytes(data)
    change(folder, state_sha256=digest(data), state_bytes=len(data))


def content(folder: Path) -> Any:
    return message.decode((folder / STATE).read_bytes())


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "data"), CASES)
def test_raw_rows_get_the_predictions_of_the_run(
    method: str, data: str, runs: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    run = runs(method, data)
    rows = run.raw()
    if data == "breast_cancer":  # from a file, in another order, with columns that no party has
        names = list(rows)[::-1]
        rows = write_rows(
            tmp_path / "rows.csv",
            {n: rows[n] for n in names},
            patient=[f"p{i}" for i in range(len(run.test))],
        )
    parties = [load_party(run.out / f"party-{m}") for m in range(4)]
    active = load_active(run.out / "active")
    found = active.predict([party.embed(rows) for party in parties])
    np.testing.assert_allclose(found, run.joint(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    assert active.classes == run.run_plan.data.classes and found.shape == (50, len(active.classes))
    measured = fedloom_accuracy(run.folder)
    assert (
        abs(float((found.argmax(1) == run.run_plan.data.labels["test"][0]).mean()) - measured)
        < 1e-9
    )
    for m, party in enumerate(parties):
        assert (party.number, party.classes) == (m, active.classes)
        if method == "proto-evfl":
            np.testing.assert_allclose(party.predict_alone(rows), run.alone(m), rtol=0, atol=1e-6)
        else:
            with pytest.raises(ConfigError, match="parties of split cannot predict alone"):
                party.predict_alone(rows)


def fedloom_accuracy(folder: Path) -> float:
    """What the run itself measured at its end."""
    with (folder / "metrics.csv").open(newline="") as file:
        last = [row for row in csv.DictReader(file) if row["metric"] == "accuracy mean"][-1]
    return float(last["value"])


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("active-only", "breast_cancer"),
        ("fedhssl", "breast_cancer"),
        ("ss-vfl", "digits"),
        ("proto-student", "digits"),
    ],
)
def test_other_methods_come_back_too(method: str, data: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", method, data)
    needs = range(1) if method == "active-only" else range(4)
    assert set(run.exported.sizes) == {*(f"party-{m}" for m in needs), "active"}
    sent = [load_party(run.out / f"party-{m}").embed(run.raw()) for m in needs]
    np.testing.assert_allclose(
        load_active(run.out / "active").predict(sent), run.joint(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_every_folder_stands_on_its_own(
    data: str, runs: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    run = runs("proto-evfl", data)
    sent = []
    for m in range(4):
        place = tmp_path / f"only-{m}"
        shutil.copytree(run.out / f"party-{m}", place)
        party = load_party(place)
        sent.append(party.embed(run.raw()))
        np.testing.assert_allclose(party.predict_alone(run.raw()), run.alone(m), rtol=0, atol=1e-6)
        shutil.rmtree(place)
    shutil.copytree(run.out / "active", tmp_path / "classifier")
    np.testing.assert_allclose(
        load_active(tmp_path / "classifier").predict(sent), run.joint(), rtol=0, atol=1e-6
    )


def test_a_folder_holds_nothing_of_another_party(proto: Trained) -> None:
    party, active = content(proto.out / "party-1"), content(proto.out / "active")
    assert set(party) == {"state", "shift", "scale"}
    assert set(party["state"]) == {"params", "buffers", "prototypes", "prior"}
    # no embeddings of people, no priors
    assert set(active) == {"state"} and set(active["state"]) == {"params"}
    own = proto.parties[1]
    for part in ("params", "buffers"):
        assert all(
            torch.equal(x, getattr(own, part)[name]) for name, x in party["state"][part].items()
        )
    assert torch.equal(party["state"]["prototypes"], own.prototypes)  # type: ignore[attr-defined]
    labels, people = steps.labels(proto.active_party), proto.active_party.embedded  # type: ignore[attr-defined]
    for folder in proto.out.iterdir():
        assert {file.name for file in folder.iterdir()} == {MANIFEST, STATE}
        for _, leaf in message.leaves(content(folder)):
            assert isinstance(leaf, torch.Tensor)
            # a number for each of the people who were trained on
            assert len(labels) not in leaf.shape
        raw = (folder / STATE).read_bytes()
        every = [(m, p.params) for m, p in enumerate(proto.parties)] + [
            ("active", proto.active_party.params)
        ]
        for other, params in every:
            weight = max(params.values(), key=torch.numel).contiguous().numpy().tobytes()
            assert (weight in raw) == (folder.name in (f"party-{other}", other))
        assert people[0, 0].numpy().tobytes() not in raw
    recipes = [
        json.loads((proto.out / f"party-{m}" / MANIFEST).read_text())["inputs"]["recipe"]
        for m in range(4)
    ]
    held = [
        {rule["name"] for rule in recipe["columns"]} | set(recipe["dropped"]) for recipe in recipes
    ]
    assert held == [
        {c["name"] for c in v.recipe["columns"]} | set(v.recipe["dropped"])
        for v in proto.run_plan.data.parties.views
    ]


def test_noise_on_what_leaves_is_drawn_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    params = {**SMALL["proto-evfl"], "embedding_noise": 0.5}
    wine = {"name": "wine", "clients": 2}
    fedloom.run(
        "proto-evfl", out=folder, params=params, rounds=1, data=wine, columns={"aligned": 60}
    )
    out = export(folder).folder
    data = load_raw("wine")
    rows = {name: values[:20] for name, values in data.columns.items()}
    party, again = load_party(out / "party-1"), load_party(out / "party-1")
    one, two, three = party.embed(rows), party.embed(rows), again.embed(rows)
    assert not np.allclose(one, two) and not np.allclose(one, three)
    np.testing.assert_array_equal(party.predict_alone(rows), again.predict_alone(rows))
    assert 0.3 < np.std(one.values - two.values) < 1.2


# -- rows ------------------------------------------------------------------------------------------


def test_columns_by_name_in_any_order_and_any_form(proto: Trained, tmp_path: Path) -> None:
    party, rows = load_party(proto.out / "party-2"), proto.raw()
    first = party.embed(rows)
    names = [rule["name"] for rule in party.inputs.recipe["columns"]]
    as_lists = {name: rows[name].tolist() for name in reversed(names)}
    np.testing.assert_array_equal(party.embed(as_lists), first)
    texts = {name: [repr(float(v)) for v in rows[name]] for name in names}
    np.testing.assert_array_equal(party.embed(texts), first)
    np.testing.assert_array_equal(party.embed(str(write_rows(tmp_path / "r.csv", texts))), first)  # type: ignore[arg-type]

    class Frame:
        """As pandas has it: keys and columns, and no Mapping."""

        def keys(self) -> list[str]:
            return list(as_lists)

        def __getitem__(self, name: str) -> list[float]:
            return as_lists[name]

    np.testing.assert_array_equal(party.embed(Frame()), first)  # type: ignore[arg-type]


def test_rows_that_do_not_fit_get_a_sentence(proto: Trained, tmp_path: Path) -> None:
    party, rows = load_party(proto.out / "party-1"), proto.raw()
    names = [rule["name"] for rule in party.inputs.recipe["columns"]]
    good = {name: rows[name][:3] for name in names}
    less = {name: good[name] for name in names[2:]}
    file = write_rows(tmp_path / "less.csv", less)
    for bad, text in [
        (
            less,
            f"must have the {len(names)} columns of this party, but 2 are missing: '{names[0]}', "
            f"'{names[1]}'",
        ),
        (file, "less.csv must have the"),
        (
            {**good, names[0]: ["1", "two", "3"]},
            f"Column '{names[0]}' must have numbers, but has 'two'",
        ),
        ({**good, names[0]: [1, 2]}, "same number of rows"),
        ({**good, names[0]: 7.0}, f"Column '{names[0]}' must have one value for each row"),
        ({**good, names[0]: [1, 2, 1e99]}, "within"),
        ({**good, names[0]: [{}, 2, 3]}, "must have numbers, but has '{}'"),
        ({name: [] for name in names}, "At least one row"),
        (np.zeros((3, len(names)), np.float32), "rows of a table"),
        (tmp_path / "nowhere.csv", "is no file"),
        (tmp_path, "is no file"),
        (None, "rows of a table"),
    ]:
        with pytest.raises(DataError, match=r".*") as error:
            party.embed(bad)  # type: ignore[arg-type]
        assert text in str(error.value), (text, str(error.value))


def test_words_that_training_did_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two parties' own files. "7" is a word in a column of words, and a gap is told apart from a
    new word.
    """
    rng = np.random.default_rng(0)
    people = [f"p{i}" for i in range(160)]
    color = rng.choice(["red", "blue", "7"], 160)
    size = np.where(color == "red", 1.0, 3.0) + rng.normal(size=160) / 4
    write_rows(
        tmp_path / "a.csv",
        {"size": size},
        id=people,
        label=["yes" if c == "red" else "no" for c in color],
    )
    write_rows(
        tmp_path / "b.csv", {"weight": rng.normal(size=160)}, id=people, color=color.tolist()
    )
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    columns = {"files": files, "id": "id", "label": "label"}
    fedloom.run(
        "proto-evfl",
        out=tmp_path / "run",
        params=SMALL["proto-evfl"],
        rounds=1,
        data={"clients": 2},
        columns=columns,
    )
    party = load_party(export(tmp_path / "run").folder / "party-1")
    new = write_rows(
        tmp_path / "new.csv", {"color": np.array(["7", "7"]), "weight": np.array([0.1, 0.2])}
    )
    words = party.embed({"color": ["7", "7"], "weight": [0.1, 0.2]})
    np.testing.assert_array_equal(party.embed(new), words)
    assert not caplog.records
    unseen = party.embed({"color": ["green", "7"], "weight": [0.1, 0.2]})
    assert "1 of 2 rows hold words that training did not have, such as 'green'" in caplog.text
    np.testing.assert_array_equal(unseen.values[1], words.values[1])
    assert np.isfinite(unseen).all() and not np.array_equal(unseen.values[0], words.values[0])
    np.testing.assert_array_equal(party.embed({"color": [7, 7], "weight": [0.1, 0.2]}), words)
    first = party.embed({"color": [None, "7"], "weight": [None, 0.2]})
    missing: list[tuple[list[Any], list[Any]]] = [
        ([np.nan, "7"], [np.nan, 0.2]),
        (["", "7"], ["?", "0.2"]),
    ]
    for colors, weights in missing:
        both = {"color": np.array(colors, dtype=object), "weight": np.array(weights, dtype=object)}
        np.testing.assert_array_equal(party.embed(both), first)
    gone = {"color": [None, None], "weight": [0.1, 0.2]}
    np.testing.assert_array_equal(party.embed({**gone, "color": [np.nan] * 2}), party.embed(gone))
    for bad in (np.array(["a", 1.0], dtype=object), [10**400, None]):
        with pytest.raises(DataError, match=r"must have numbers|must be within"):
            party.embed({"color": ["7", "7"], "weight": bad})
    gap = write_rows(
        tmp_path / "gap.csv", {"color": np.array(["NA", "7"]), "weight": np.array(["", "0.2"])}
    )
    assert np.isfinite(party.embed(gap)).all()


def test_pictures_whole_or_cut_or_in_files(
    runs: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    from PIL import Image

    run = runs("proto-evfl", "digits")
    party, whole = load_party(run.out / "party-3"), run.raw()
    first = party.embed(whole)
    np.testing.assert_array_equal(party.embed(encode_rows(party.inputs, whole)), first)
    np.save(tmp_path / "rows.npy", whole)
    np.testing.assert_array_equal(party.embed(tmp_path / "rows.npy"), first)
    np.save(tmp_path / "own.npy", encode_rows(party.inputs, whole))
    # its pages can't be written to
    np.testing.assert_array_equal(party.embed(tmp_path / "own.npy"), first)
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for pixels, file in zip(whole, files, strict=False):
        Image.fromarray(pixels[0]).save(file)
    np.testing.assert_allclose(party.embed(files), first.values[:3], atol=1e-4)  # of 3 rows at once
    listing = write_rows(tmp_path / "list.csv", {"path": np.array([file.name for file in files])})
    np.testing.assert_allclose(party.embed(listing), first.values[:3], atol=1e-4)
    for bad, text in [
        (whole.astype(np.float32), "uint8"),
        (whole[:, :, :5], "Images must be"),
        (whole[:0], "At least one row"),
        ([], "At least one row"),
        ([1, 2], "list of files"),
        ([tmp_path / "no.png"], "cannot be decoded"),
        ({"path": ["a"]}, "This party takes images"),
        (write_rows(tmp_path / "x.csv", {"file": np.array(["a"])}), "'path'"),
        (tmp_path / "list.npy", "cannot be read"),
    ]:
        with pytest.raises(DataError) as error:
            party.embed(bad)
        assert text in str(error.value), (text, str(error.value))


# -- what is missing, and what does not belong together --------------------------------------------


@pytest.mark.parametrize("method", ["proto-evfl", "split"])
def test_a_missing_party_is_named_with_what_to_do(
    method: str, runs: Callable[[str, str], Trained]
) -> None:
    run = runs(method, "breast_cancer")
    rows = run.raw()
    sent = {m: load_party(run.out / f"party-{m}").embed(rows) for m in (0, 1, 3)}
    third = replace(sent[0], party=2)
    active = load_active(run.out / "active")
    with pytest.raises(DataError) as error:
        active.predict(sent.values())
    text = str(error.value)
    assert "Embeddings of party 2 are missing" in text and "those of all 4:" in text
    assert ("from its prototypes: fedloom predict party-0" in text) == (method == "proto-evfl")
    assert ("split cannot predict alone" in text) == (method == "split")
    with pytest.raises(DataError, match="parties 1, 2, 3"):
        active.predict([sent[0]])
    values = sent[0].values
    for bad, text in [
        (replace(third, values=values[:5]), "the same people"),
        (replace(third, values=values[:, :3]), r"\(n >= 1, 8\)"),
        (replace(third, values=values * np.nan), "finite"),
        (replace(third, values=values.astype(str)), "float32"),
        (replace(third, values=values[:0]), "n >= 1"),
        (values, "not ndarray"),
    ]:
        with pytest.raises(DataError, match=text):
            active.predict([*sent.values(), bad])  # type: ignore[list-item]


def test_files_of_embeddings_must_belong_together(
    proto: Trained, runs: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    rows, ids = proto.raw(), [f"P {n}" for n in range(50)]
    parties = [load_party(proto.out / f"party-{m}") for m in range(4)]
    sent = [
        party.embed(rows, [i.lower() for i in ids] if party.number else ids) for party in parties
    ]
    for one in sent:
        write_embeddings(tmp_path / f"e{one.party}", one)
    sent = [read_embeddings(tmp_path / f"e{m}") for m in range(4)]
    active = load_active(proto.out / "active")
    np.testing.assert_allclose(active.predict(sent, ids), proto.joint(), rtol=0, atol=1e-6)
    # each names its party
    np.testing.assert_array_equal(active.predict(reversed(sent)), active.predict(sent))
    e1 = tmp_path / "e1"
    assert b"p 1" not in e1.read_bytes()

    def refused(text: str, *given: Embeddings, ids: list[str] | None = None) -> None:
        with pytest.raises(DataError) as error:
            active.predict(given, ids)
        assert text in str(error.value), (text, str(error.value))

    backwards = {name: values[::-1] for name, values in rows.items()}
    turned, bare = parties[1].embed(backwards, ids[::-1]), parties[1].embed(rows)
    refused("in another order, than those of party 0", sent[0], turned, *sent[2:])
    refused("in another order, than the rows given", *sent, ids=ids[::-1])
    refused("Party 1's embeddings have no ids", sent[0], bare, *sent[2:])
    refused("Party 1 has more than one set", *sent, sent[1])
    refused("of party 2 are missing", sent[0], sent[1], sent[3])
    refused(
        "another export",
        load_party(runs("split", "breast_cancer").out / "party-0").embed(rows, ids),
        *sent[1:],
    )
    with pytest.raises(DataError, match="share an id"):
        parties[1].embed(rows, ["a"] * 50)
    with pytest.raises(DataError, match="one id for each of the 50 rows"):
        parties[1].embed(rows, ids[1:])
    with pytest.raises(DataError, match="cannot be read"):
        read_embeddings(tmp_path / "none")
    data = e1.read_bytes()
    for torn in (
        data[:-1],
        data[:40],
        b"",
        b"\0" * 64,
        data + b"x",
        proto.out.joinpath("active", STATE).read_bytes(),
    ):
        (tmp_path / "torn").write_bytes(torn)
        with pytest.raises(DataError, match="is not a valid file of embeddings"):
            read_embeddings(tmp_path / "torn")


# -- export ----------------------------------------------------------------------------------------


def test_what_cannot_be_exported(tmp_path: Path, proto: Trained) -> None:
    fedloom.run(
        "local", out=tmp_path / "rows", rounds=1, data={"clients": 2}, models={"pool": ["linear"]}
    )
    with pytest.raises(ConfigError, match="is not a run's folder"):
        export(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"choose one of: .*rows"):
        export(tmp_path)
    assert not (tmp_path / "out").exists()
    before = (proto.out / "party-0" / MANIFEST).stat().st_mtime_ns
    with pytest.raises(ConfigError, match="add --force"):
        export(proto.folder, proto.out)
    assert (proto.out / "party-0" / MANIFEST).stat().st_mtime_ns == before
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(proto.folder / "config.toml", bare)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        export(bare)
    shutil.copytree(proto.folder / "checkpoints", bare / "checkpoints")
    (bare / "config.toml").write_text(
        (bare / "config.toml").read_text().replace("seed = 0", "seed = 1", 1)
    )
    with pytest.raises(CheckpointError, match="cannot be exported"):
        export(bare)
    assert not (bare / "export").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        export(proto.folder, proto.folder / "config.toml")


def test_force_removes_other_parties_and_keeps_the_old_folders_if_it_fails(
    proto: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(proto.out, tmp_path / "out"))
    shutil.copytree(out / "party-3", out / "party-4")
    shutil.copytree(out / "party-3", out / "party-5")
    (out / "party-5" / "notes.txt").write_text("mine")
    (out / "party-1" / STATE).write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[export.__module__], "CLOSE", -1.0)
        with pytest.raises(CheckpointError, match="does not predict as the run did"):
            export(proto.folder, out, force=True)
    assert (out / "party-1" / STATE).read_bytes() == b"old" and len(list(out.iterdir())) == 7
    export(proto.folder, out, force=True)
    assert sorted(p.name for p in out.iterdir()) == [
        "active",
        "party-0",
        "party-1",
        "party-2",
        "party-3",
        "party-5",
    ]
    assert [path.name for path in (out / "party-5").iterdir()] == ["notes.txt"]
    load_party(out / "party-1")


def test_force_writes_the_same_again_and_a_torn_checkpoint_is_passed_over(
    proto: Trained, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(proto.out, tmp_path / "out"))
    (out / "party-2" / STATE).write_bytes(b"old")
    export(proto.folder, out, force=True)
    for name in ("party-2", "active"):
        for file in (MANIFEST, STATE):
            assert (out / name / file).read_bytes() == (proto.out / name / file).read_bytes()
    run = Path(shutil.copytree(proto.folder, tmp_path / "run"))
    last = sorted((run / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-9])
    found = export(run)
    assert (found.round, found.rounds) == (1, 2) and found.folder == run / "export"


# -- nothing is believed because it is there -------------------------------------------------------


@pytest.mark.parametrize("reader", [load_party, load_active])
def test_a_folder_of_the_wrong_kind(
    reader: Callable[[Path], object], proto: Trained, tmp_path: Path
) -> None:
    wrong = "active" if reader is load_party else "party-0"
    with pytest.raises(CheckpointError, match=f"load it with load_{wrong.partition('-')[0]}"):
        reader(proto.out / wrong)
    with pytest.raises(
        CheckpointError, match="choose one of its folders: active, party-0, party-1"
    ):
        reader(proto.out)
    with pytest.raises(CheckpointError, match="create one with fedloom export"):
        reader(tmp_path)


def test_torn_altered_and_oversize_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, state = (folder / MANIFEST).read_bytes(), (folder / STATE).read_bytes()

    def refused(text: str) -> None:
        with pytest.raises(CheckpointError) as error:
            load_party(folder)
        assert text in str(error.value) and len(str(error.value)) < 2000, str(error.value)
        (folder / MANIFEST).write_bytes(card)
        (folder / STATE).write_bytes(state)

    (folder / STATE).write_bytes(state[:-1])
    refused("is not the file that party.json describes")
    (folder / STATE).write_bytes(state + b"\0" * 1000)
    refused("is not the file that party.json describes")
    (folder / STATE).write_bytes(state[:-1] + bytes([state[-1] ^ 1]))
    refused("is not the file that party.json describes")
    (folder / STATE).unlink()
    refused("cannot be read")
    for text in (b"", b"{", card[:-20], b"\xff\xfe", b"[" * 100_000, b"[1]", b"null", b"9" * 5000):
        (folder / MANIFEST).write_bytes(text)
        refused("party.json")
    monkeypatch.setattr("fedloom.deploy.folder.LARGEST_MANIFEST", 100)
    refused("larger than 100 bytes")


CARDS: list[tuple[dict[str, Any], str]] = [
    ({"format": "fedloom-party/9"}, "format"),
    ({"extra": 1}, "there is no such setting"),
    ({"party": 4}, "valid parties are 0–3"),
    ({"party": -1}, "party"),
    ({"party": None}, "a party needs a number"),
    ({"parties": 10**9}, "parties"),
    ({"classes": ["a"]}, "classes"),
    ({"classes": ["a", "b", "c"]}, "is inconsistent"),
    ({"method": "no-such"}, "unknown method"),
    ({"method": "fedal"}, "is not a vertical method"),
    ({"method": "split"}, "is inconsistent"),
    ({"params": {"embedding_dim": 10**9}}, "params.embedding_dim must be"),
    ({"params": {"nonsense": 1}}, "nonsense"),
    ({"params": {"embedding_dim": 9}}, "is inconsistent"),
    ({"federation": "x"}, "federation"),
    ({"state_bytes": 10**12}, "state_bytes"),
    ({"state_sha256": "0" * 64}, "is not the file that party.json describes"),
    ({"width": "wide"}, "width"),
]
INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "no-such"}, "no model"),
    ({"model": "lenet5"}, "takes images"),
    ({"shape": [0]}, "2**24"),
    ({"shape": [10**9, 10**9]}, "2**24"),
    ({"shape": [5]}, "gives rows of shape"),
    ({"shape": []}, "shape"),
    ({"norm": "odd"}, "norm"),
    ({"recipe": {}}, "kind"),
    ({"recipe": {"kind": "table"}}, "are invalid"),
    ({"recipe": {"kind": "code"}}, "table, cells or pictures, not 'code'"),
    ({"recipe": {"kind": "table", "dropped": [], "columns": "abc"}}, "are invalid"),
    (
        {
            "recipe": {
                "kind": "table",
                "dropped": [],
                "columns": [{"name": "a", "log": 0, "fill": 10**400}],
            }
        },
        "is inconsistent",
    ),
    (
        {"recipe": {"kind": "cells", "shape": [1, 8, 8], "grid": [10**6, 10**6], "cells": [0]}},
        "cells",
    ),
    (
        {"recipe": {"kind": "cells", "shape": [1, 8, 8], "grid": [2, 2], "cells": [7]}},
        "is inconsistent",
    ),
    ({"recipe": {"kind": "pictures", "shape": [3], "views": [], "size": 1}}, "is inconsistent"),
]


@pytest.mark.parametrize(("values", "text"), CARDS)
def test_cards_that_lie(values: dict[str, Any], text: str, folder: Path) -> None:
    change(folder, **values)
    with pytest.raises(FedloomError) as error:
        load_party(folder)
    assert text in str(error.value), str(error.value)


@pytest.mark.parametrize(("values", "text"), INPUTS)
def test_inputs_that_lie(values: dict[str, Any], text: str, folder: Path) -> None:
    card = json.loads((folder / MANIFEST).read_text())
    change(folder, inputs={**card["inputs"], **values})
    with pytest.raises(CheckpointError) as error:
        load_party(folder)
    assert text in str(error.value), str(error.value)


def test_states_that_lie(folder: Path) -> None:
    """The checksum is right, and what it vouches for is wrong."""
    good = content(folder)
    inner = good["state"]
    first = next(iter(inner["params"]))
    wide = {**inner["params"], first: torch.zeros(200, 200)}
    nan = {**inner["params"], first: inner["params"][first] * float("nan")}
    for bad, text in [
        ({**good, "state": {**inner, "params": wide}}, "expected"),
        ({**good, "state": {**inner, "params": nan}}, "not finite"),
        ({**good, "state": {k: v for k, v in inner.items() if k != "prior"}}, "expected the keys"),
        ({**good, "state": {**inner, "opt": {}}}, "expected the keys"),
        ({**good, "state": {**inner, "prototypes": inner["prototypes"].double()}}, "expected"),
        ({**good, "scale": torch.zeros_like(good["scale"])}, "above 0"),
        ({**good, "shift": good["shift"][:1]}, "expected"),
        ({"state": inner}, "expected the keys"),
        ([], ""),
        ({**good, "state": 7}, ""),
    ]:
        put(folder, bad)
        with pytest.raises(CheckpointError) as error:
            load_party(folder)
        assert text in str(error.value) and "is inconsistent" in str(error.value), str(error.value)
    put(folder, good)
    load_party(folder)


def test_an_active_folder_that_lies(proto: Trained, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(proto.out / "active", tmp_path / "active"))
    card, good = (folder / MANIFEST).read_bytes(), content(folder)
    change_to: Any
    for change_to, text in [
        ({"needs": [0, 9]}, "valid parties are 0–3"),
        ({"needs": []}, "needs"),
        ({"parties": 3, "needs": [0]}, "is inconsistent"),
        ({"classes": ["a", "b", "c"]}, "is inconsistent"),
        (
            {"parties": 1024, "params": {"embedding_dim": 2000}},
            "params.embedding_dim must be at most 256",
        ),
        ({"inputs": {}}, "inputs"),
    ]:
        change(folder, **change_to)
        with pytest.raises(CheckpointError, match=text):
            load_active(folder)
        (folder / MANIFEST).write_bytes(card)
    bad: dict[str, Any]
    for bad in (
        {},
        {"state": {}},
        {"state": {**good["state"], "embedded": torch.zeros(3)}},
        {**good, "labels": 1},
    ):
        put(folder, bad)
        with pytest.raises(CheckpointError, match="is inconsistent"):
            load_active(folder)


def test_bytes_at_random_never_raise_anything_else(folder: Path) -> None:
    rng = np.random.default_rng(0)
    card = (folder / MANIFEST).read_bytes()
    for _ in range(150):
        data = bytearray(card)
        for place in rng.integers(len(data), size=rng.integers(1, 4)):
            data[place] = rng.integers(32, 127)
        (folder / MANIFEST).write_bytes(data)
        try:
            load_party(folder).embed({})
        except FedloomError:
            continue


# -- code of one's own -----------------------------------------------------------------------------

NETWORK = """
from torch import nn
def network(shape, width):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, width))
"""


def test_code_that_a_folder_names_is_run_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proto: Trained
) -> None:
    (tmp_path / "own_network_of_deploy.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "own_network_of_deploy:network"
    page = Path(fedloom.__file__).parent / "methods" / "vertical" / "split.py"
    copy = tmp_path / "mine.py"
    copy.write_text(page.read_text())
    run = tmp_path / "run"
    data = {"name": "breast_cancer", "clients": 2}
    fedloom.run(
        str(copy),
        out=run,
        rounds=1,
        params={"embedding_dim": 4},
        data=data,
        models={"pool": [name]},
    )
    out = export(run, trust=[str(copy), name]).folder
    assert json.loads((out / "party-1" / MANIFEST).read_text())["method"] == "mine.py:split"
    with pytest.raises(ConfigError, match=r"your own method page mine\.py, .*--trust mine\.py"):
        load_party(out / "party-1")
    with pytest.raises(ConfigError, match="your own network own_network_of_deploy:network"):
        load_party(out / "party-1", trust=[str(copy)])
    rows = proto.raw()
    sent = [load_party(out / f"party-{m}", trust=[str(copy), name]).embed(rows) for m in range(2)]
    assert load_active(out / "active", trust=[str(copy)]).predict(sent).shape == (50, 2)
    copy.write_text(page.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="is not the method page of"):
        load_active(out / "active", trust=[str(copy)])


ELSEWHERE = """
from dataclasses import replace
from fedloom.core.party import Party
from fedloom.methods.vertical import split, steps

class TurnedActive(Party):
    STATE = ("params", "opt", "turned")

    def setup(self):
        self.network(steps.top_model(self, self.context.parties * self.cfg.embedding_dim), self.cfg.optimize())
        self.turned = 1.0

    def decide(self, contributions):
        return self.turned * self.infer(steps.joint(contributions))

def round(fed, active, parties, cfg, t):
    active.turned = -1.0
    yield from split.round(fed, active, parties, cfg, t)

METHODS = (replace(split.SPLIT, name="elsewhere", server=TurnedActive, round=round),)
"""  # noqa: E501


def test_a_method_that_predicts_with_more_than_is_kept_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    data = {"name": "breast_cancer", "clients": 2}
    fedloom.run(
        str(tmp_path / "elsewhere.py"),
        out=tmp_path / "run",
        rounds=1,
        params={"embedding_dim": 4},
        data=data,
    )
    with pytest.raises(CheckpointError, match="the folder active does not predict as the run did"):
        export(tmp_path / "run", trust=[str(tmp_path / "elsewhere.py")])
    with pytest.raises(CheckpointError, match="is not a party's folder"):
        load_active(tmp_path / "run" / "export" / "active")
