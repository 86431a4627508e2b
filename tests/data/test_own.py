"""A user's own tables and pictures: the roles of columns, owners, missing numbers, test rows, and
clear refusals.
"""

from dataclasses import replace
from decimal import Decimal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.options import DataOptions
from fedloom.data.own import interpret, read_data, read_own
from fedloom.data.sources import load, load_raw
from fedloom.data.tables import RawTable
from fedloom.data.text_and_dates import HashedText

N = 60


def patients(**more: Any) -> dict[str, Any]:
    """60 rows of three hospitals: a number, a word and a class."""
    rng = np.random.default_rng(0)
    return {
        "patient_id": [f"p{row:03}" for row in range(N)],
        "hospital": ["north", "south", "east"] * (N // 3),
        "age": rng.integers(20, 90, N).astype(float),
        "sex": ["f", "m"] * (N // 2),
        "disease": ["no", "yes", "no"] * (N // 3),
        **more,
    }


def write_csv(path: Path, table: dict[str, Any]) -> Path:
    rows = zip(*table.values(), strict=True)
    text = "\n".join(",".join("" if v is None or v != v else str(v) for v in row) for row in rows)
    path.write_text(",".join(table) + "\n" + text + "\n")
    return path


def test_a_table_has_label_owners_and_features() -> None:
    data = read_data(patients(), label="disease", group="hospital")
    assert data.classes == ("no", "yes") and data.y.tolist() == [0, 1, 0] * 20
    assert data.owners == ("east", "north", "south") and data.groups is not None
    assert data.groups[:3].tolist() == [1, 2, 0]
    assert data.columns == ("age", "sex=f", "sex=m") and data.fill == "" and data.test is None
    assert data.x[:, 0].tolist() == patients()["age"].tolist() and data.x[0, 1:].tolist() == [1, 0]
    note = data.notes[0]
    assert note.startswith("Column 'patient_id' is dropped: it is an identifier by its name.")


def test_a_file_a_mapping_and_a_frame_are_one_data_set(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = patients(age=[None, *range(N - 1)])
    path = write_csv(tmp_path / "mine.csv", table)
    options: dict[str, Any] = {
        "label": "disease",
        "group": "hospital",
        "missing": "indicator",
        "name": "mine",
    }
    first, *others = [
        read_data(source, **options) for source in (path, str(path), table, pandas.DataFrame(table))
    ]
    frame = pandas.DataFrame(table).astype(
        {"age": "Int64", "sex": "category", "hospital": "string"}
    )
    others.append(read_data(frame, **options))
    if find_spec("polars") is not None:
        others.append(read_data(import_module("polars").DataFrame(table), **options))
    for other in others:
        np.testing.assert_array_equal(first.x, other.x)
        assert (first.columns, first.classes, first.owners) == (
            other.columns,
            other.classes,
            other.owners,
        )
        assert first.recipe == other.recipe and (first.y == other.y).all()
    assert first.columns == ("age", "age missing", "sex=f", "sex=m") and np.isnan(first.x[0, 0])


def test_arrays_are_a_data_set() -> None:
    x, y = np.arange(8, dtype=float).reshape(4, 2) ** 2, ["a", "b", "a", "b"]
    data = read_data((x, y))
    assert data.columns == ("x0", "x1") and data.classes == ("a", "b") and (data.x == x).all()
    table = patients()
    labels = table.pop("disease")
    assert read_data((table, labels), group="hospital").columns == ("age", "sex=f", "sex=m")
    pixels = np.zeros((4, 1, 5, 5), np.uint8)
    images = read_data((pixels, np.array([1, 0, 1, 1])))
    assert (
        images.kind == "image"
        and images.x.shape == (4, 1, 5, 5)
        and images.y.tolist() == [1, 0, 1, 1]
    )
    with pytest.raises(DataError, match="uint8"):
        read_data((pixels.astype(float), [1, 0, 1, 1]))


@pytest.mark.parametrize("how", ["median", "most-frequent", "indicator"])
def test_missing_numbers_are_filled_by_the_owner_s_training_rows(how: Any) -> None:
    age = np.array([10.0, 30.0, 30.0, np.nan, 1.0, 3.0, 5.0, np.nan])
    table = {"h": ["a"] * 4 + ["b"] * 4, "age": age, "w": [0.0, 1.0] * 4, "y": [0, 1] * 4}
    data = read_data(table, label="y", group="h", missing=how)
    assert np.isnan(data.x[[3, 7], 0]).all()
    own = data.standardized_by_owner(np.array([0, 1, 3, 4, 5, 7]))  # rows 2 and 6 are for testing
    fills = [fit[0][0] for fit in own.fits]
    assert fills == ([10, 1] if how == "most-frequent" else [20, 2])
    trained = np.array([10, 30, fills[0]])
    np.testing.assert_allclose(
        own.x[[0, 1, 3], 0], (trained - trained.mean()) / trained.std(), rtol=1e-6
    )
    np.testing.assert_allclose(own.x[2, 0], (30 - trained.mean()) / trained.std(), rtol=1e-6)
    whole = data.standardized(np.array([4, 5]))
    assert (
        whole.x[[3, 7], 0].tolist() == ([1, 1] if how == "most-frequent" else [2, 2])
        and whole.shift[0] == 2
    )
    assert ("age missing" in data.columns) == (how == "indicator")


def test_fits_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.impute")
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 3)).round(1)
    x[rng.random(x.shape) < 0.3] = np.nan
    x[0] = [1, 2, 3]
    table = {**{f"c{k}": x[:, k] for k in range(3)}, "y": [0, 1] * 20}
    for how in ("median", "most-frequent"):
        data = read_data(table, label="y", missing=how).standardized(np.arange(25))
        imputer = sklearn.SimpleImputer(strategy=how.replace("-", "_")).fit(x[:25])
        scaler = StandardScaler().fit(imputer.transform(x[:25]))
        wanted = scaler.transform(imputer.transform(x))
        np.testing.assert_allclose((data.x - data.shift) / data.scale, wanted, rtol=1e-4, atol=1e-5)


def test_an_owner_without_any_number_of_a_column_gets_zeros() -> None:
    table = {
        "h": ["a", "a", "b", "b"],
        "v": [np.nan, np.nan, 1.0, 2.0],
        "w": [1.0, 2.0, 3.0, 5.0],
        "y": [0, 1, 0, 1],
    }
    own = read_data(table, label="y", group="h", missing="median").standardized_by_owner(
        np.arange(4)
    )
    assert own.x[:2, 0].tolist() == [0, 0] and np.isfinite(own.x).all()


def test_one_missing_number_names_column_count_and_setting() -> None:
    table = patients(age=[None, *range(N - 1)], height=[None, None, *range(N - 2)])
    with pytest.raises(
        DataError,
        match=r"'height' of 'data' lacks 2 of 60 numbers, and so do age\. Set data\.missing",
    ):
        read_data(table, label="disease")


@pytest.mark.parametrize("spelling", [("train", "test"), ("0", "1"), (False, True), (0.0, 1.0)])
def test_a_column_says_which_rows_are_for_testing(spelling: tuple[Any, Any]) -> None:
    part = np.array([spelling[row % 4 == 0] for row in range(N)])
    data = read_data(patients(part=part), label="disease", test="part")
    assert (
        data.test is not None
        and data.test.tolist() == list(range(0, N, 4))
        and "part" not in str(data.columns)
    )


def test_rows_for_validation_are_left_out() -> None:
    part = ["train", "test", "val"] * (N // 3)
    data = read_data(patients(part=part), label="disease", test="part")
    assert (
        len(data.y) == 40 and data.test is not None and data.test.tolist() == list(range(1, 40, 2))
    )


def test_owners_are_held_out_or_unseen() -> None:
    data = read_data(patients(), label="disease", group="hospital", test=["east"], unseen=["north"])
    assert (
        data.owners == ("east", "south", "north")
        and data.groups is not None
        and data.test is not None
    )
    assert (data.groups[data.test] == 0).all() and len(data.test) == 20
    with pytest.raises(
        DataError, match=r"no owner 'eest' in column 'hospital'\. Did you mean 'east'"
    ):
        read_data(patients(), label="disease", group="hospital", test=["eest"])
    with pytest.raises(DataError, match=r"data\.group"):
        read_data(patients(), label="disease", test=["east"])


def test_what_is_guessed_is_reported() -> None:
    _, found = read_own(patients(), DataOptions())
    assert found.label == "disease" and found.guessed and found.group_guess == "hospital"
    assert any("label is taken to be 'disease'" in note for note in found.notes)
    assert found.settings() == {"label": "disease", "group": "hospital", "drop": ["patient_id"]}
    assert found.counts() == {"no": 40, "yes": 20}
    _, found = read_own(patients(), DataOptions(label="disease", group="hospital"))
    assert not found.guessed and found.owners() == {
        "east": [20, 0],
        "north": [20, 0],
        "south": [0, 20],
    }


@pytest.mark.parametrize(
    "options",
    [
        DataOptions("disease", "hospital"),
        DataOptions("disease", "hospital", id="patient_id", test="part", unseen=("north",)),
        DataOptions(
            "disease",
            "hospital",
            drop=("a*",),
            keep=("*", "patient_id", "notes"),
            missing="indicator",
        ),
    ],
)
def test_the_suggested_settings_give_the_same_columns(options: DataOptions) -> None:
    part = ["test", "train", "train"] * (N // 3)
    notes = [f"came back in week {row}" for row in range(N)]
    table = patients(part=part, notes=notes, height=[None, *range(N - 1)])
    if "notes" not in options.keep:
        del table["notes"]
    first, found = read_own(table, replace(options, missing="indicator"))
    suggested: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in found.settings().items()
        if k != "partition"
    }
    again, same = read_own(table, DataOptions(**suggested))
    assert again.columns == first.columns and same.label == found.label


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patientId", [1.5] * 30 + [2.5] * 30),
        ("MRN", ["a", "b"] * 30),
        ("Unnamed: 0", range(N)),
        ("row", range(100, 100 + N)),
        ("code", [f"x{row}" for row in range(N)]),
        ("e-mail", ["a@b", "c@d"] * 30),
    ],
)
def test_identifiers_are_dropped_with_a_sentence_unless_named(name: str, values: Any) -> None:
    table = patients(**{name: list(values)})
    found, _ = interpret(table, DataOptions(label="disease"))
    assert name not in found.table.columns and "an identifier" in found.dropped[name]
    assert any(f"'{name}'" in note and "data.keep" in note for note in found.notes)
    if name != "code":
        found, _ = interpret(table, DataOptions(label="disease", keep=("*", name)))
        assert name in found.table.columns and "patient_id" not in found.table.columns


@pytest.mark.parametrize("name", ["body_mass_index", "fluid", "COVID", "key_rate", "grid"])
def test_features_are_no_identifiers(name: str) -> None:
    found, _ = interpret(
        patients(w_phone=[0, 1] * (N // 2), has_id=[True, False] * (N // 2)),
        DataOptions(label="disease"),
    )
    assert {"w_phone", "has_id"} <= found.table.columns.keys()
    found, _ = interpret(
        patients(**{name: np.random.default_rng(2).normal(size=N)}), DataOptions(label="disease")
    )
    assert name in found.table.columns


def test_free_text_is_hashed() -> None:
    notes = [f"patient number {row} feels well today" for row in range(N)]
    with pytest.raises(
        DataError, match=r"60 different numbers such as '7,0': write digits and a decimal point"
    ):
        read_data(
            patients(weight=[f"7{row},0" if row else "7,0" for row in range(N)]), label="disease"
        )
    data = read_data(patients(notes=notes), label="disease", group="hospital")
    assert any("'notes' has 60 different texts, which are hashed" in note for note in data.notes)
    assert sum(column.startswith("notes#") for column in data.columns) == 32 and data.x.shape == (
        N,
        3 + 32,
    )
    np.testing.assert_allclose(np.linalg.norm(data.x[:, 3:], axis=1), 1, rtol=1e-5)
    assert read_data(patients(notes=notes), label="disease", drop=["not*", "hosp*"]).x.shape == (
        N,
        3,
    )
    again = TableEncoder.from_dict(data.recipe)
    assert (
        isinstance(again.columns[-1], HashedText) and again.to_dict().items() <= data.recipe.items()
    )


def test_a_saved_recipe_encodes_new_rows() -> None:
    table = patients(age=[None, *range(N - 1)])
    data = read_data(table, label="disease", group="hospital", missing="indicator")
    x = TableEncoder.from_dict(data.recipe).transform(
        {"age": np.array([np.nan, 4]), "sex": np.array(["m", "?"], object)}
    )
    np.testing.assert_array_equal(x, [[np.nan, 1, 0, 1], [4, 0, 0, 0]])


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        (
            {},
            {"label": "diseas"},
            r"data\.label names the column 'diseas', but 'data' has only 'patient_id'",
        ),
        ({}, {"label": "disease", "group": "clinic"}, r"data\.group names the column 'clinic'"),
        ({}, {"label": "disease", "drop": ["ages"]}, r"data\.drop names the column 'ages'"),
        ({}, {"label": "disease", "drop": ["disease"]}, r"data\.drop names the column 'disease'"),
        (
            {},
            {"label": "patient_id"},
            "60 different values in 60 rows: it looks like free text or an id",
        ),
        (
            {"y": np.arange(N) / 7},
            {"label": "y", "task": "classes"},
            r'decimal numbers, such as .* data.task = "number"',
        ),
        (
            {"y": ["a", "1"] * 30},
            {"label": "y", "task": "number"},
            "'y' must have numbers, but has 'a'",
        ),
        ({"y": [1.5] * N}, {"label": "y"}, "must have different numbers, but has 1"),
        (
            {"y": [f"1,{row}" for row in range(N)]},
            {"label": "y"},
            "numbers such as '1,0': write digits",
        ),
        ({"y": ["a;b", "a", "b"] * 20}, {"label": "y"}, "several labels in a row, such as 'a;b'"),
        ({"y": [["a", "b"], ["a"]] * 30}, {"label": "y"}, "several labels in a row"),
        ({"y": ["a"] * N}, {"label": "y"}, "at least 2 classes, but has 'a' only"),
        ({"y": [None] * N}, {"label": "y"}, "at least 2 classes, but has 'none' only"),
        (
            {"hospital": [*range(N)]},
            {"label": "sex", "group": "hospital"},
            "has 60 owners in 60 rows",
        ),
        ({"hospital": ["a"] * N}, {"label": "sex", "group": "hospital"}, "has 1 owners in 60 rows"),
        ({"part": ["train", "tset"] * 30}, {"label": "sex", "test": "part"}, "but has 'tset'"),
        (
            {"part": ["test"] * N},
            {"label": "sex", "test": "part"},
            "60 test rows of 60; both parts need rows",
        ),
        (
            {"v": ["1", "2", "x"] + ["3"] * 57},
            {"label": "sex"},
            "'v' has numbers, but 1 of its 60 values are not",
        ),
        ({"v": [[1, 2]] * N}, {"label": "sex"}, "'v' holds several values in a row"),
        ({"v": np.ones((N, 2))}, {"label": "sex"}, "'v' must have one value for each row"),
        ({7: ["a"] * N, "7": ["b"] * N}, {"label": "sex"}, "'7' repeats; rename all but one"),
    ],
)
def test_what_cannot_be_used_is_refused(
    more: dict[Any, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_data({**patients(), **more}, **options)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="empty"):
        read_data(tmp_path / "empty.csv")
    (tmp_path / "header.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="rows below its header"):
        read_data(tmp_path / "header.csv")
    with pytest.raises(DataError, match="no file or folder"):
        read_data(tmp_path / "none.csv")


def test_rows_without_a_label_are_left_out_with_a_sentence() -> None:
    data = read_data(patients(disease=[None, "no", "yes"] * 20), label="disease", group="hospital")
    assert len(data.y) == 40 and any(
        "20 of 60 rows have no label in 'disease'" in note for note in data.notes
    )
    assert data.groups is not None and set(data.groups.tolist()) == {0, 2}


def test_decimals_are_numbers() -> None:
    data = read_data(
        patients(price=[Decimal(row) / 4 for row in range(N)]), label="disease", group="hospital"
    )
    assert data.columns[-1] == "price" and data.x[:3, -1].tolist() == [0, 0.25, 0.5]


def test_constant_and_empty_columns_are_dropped() -> None:
    found, _ = interpret(patients(same=[1] * N, gone=[None] * N), DataOptions(label="disease"))
    assert found.dropped["same"] == "the same in every row" and found.dropped["gone"] == "empty"


def test_a_repeated_id_is_reported() -> None:
    data = read_data(
        patients(patient_id=[f"p{row // 2}" for row in range(N)]), label="disease", id="patient_id"
    )
    assert any("repeats in 30 rows" in note for note in data.notes)


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4), shade, np.uint8)).save(path)


def test_folders_of_owners_hold_folders_of_classes(tmp_path: Path) -> None:
    for shade, (owner, word) in enumerate(
        [("ann", "cat"), ("ann", "dog"), ("bob", "cat"), ("bob", "dog")] * 2
    ):
        picture(tmp_path / "pets" / owner / word / f"{shade}.png", shade)
    data = load(str(tmp_path / "pets"))
    assert (
        data.owners == ("ann", "bob") and data.classes == ("cat", "dog") and data.groups is not None
    )
    assert data.groups.tolist() == [0] * 4 + [1] * 4 and data.y.tolist() == [0, 0, 1, 1] * 2
    assert data.x[:, 0, 0, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_folder_of_pictures_may_have_a_list(tmp_path: Path) -> None:
    table = {"file_name": [], "digit": [], "speaker": []}  # type: dict[str, list[Any]]
    for row in range(8):
        picture(tmp_path / "spoken" / f"{row}.png", row)
        for column, value in zip(table, (f"{row}.png", row % 2, "st"[row // 4]), strict=True):
            table[column].append(value)
    write_csv(tmp_path / "spoken" / "metadata.csv", table)
    data = load(str(tmp_path / "spoken"), options=DataOptions(label="digit", group="speaker"))
    assert data.kind == "image" and data.owners == ("s", "t") and data.y.tolist() == [0, 1] * 4
    assert data.x[:, 0, 0, 0].tolist() == [*range(8)]


def test_a_cached_data_set_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_csv(tmp_path / "mine.csv", patients(age=[None, *range(N - 1)]))
    options = DataOptions(label="disease", group="hospital", missing="median")
    first = load(str(path), options=options)
    monkeypatch.setattr("fedloom.data.sources.read_own", None)
    again = load(str(path), options=options)
    np.testing.assert_array_equal(first.x, again.x)
    for name in ("classes", "columns", "owners", "fill", "notes", "recipe"):
        assert getattr(first, name) == getattr(again, name), name
    with pytest.raises(TypeError):
        load(str(path), options=DataOptions(label="disease"))


def test_a_registered_data_set_takes_no_settings_of_columns() -> None:
    with pytest.raises(
        DataError, match=r"registered data set.*leave out data\.label, data\.missing"
    ):
        load("wine", options=DataOptions(label="y", missing="median"))


def test_a_raw_table_keeps_the_roles(tmp_path: Path) -> None:
    table = load_raw(
        str(write_csv(tmp_path / "m.csv", patients())),
        options=DataOptions(label="disease", group="hospital"),
    )
    assert (
        isinstance(table, RawTable)
        and set(table.columns) == {"age", "sex"}
        and len(table.owners) == 3
    )
