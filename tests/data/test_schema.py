"""Rows of one's own: what fits the form is taken as it is, all else refused without a word of what
it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from fedloom.core.errors import DataError
from fedloom.data.encoder import OneHot, RawNumber
from fedloom.data.schema import DataSchema, read_public, read_rows
from fedloom.experiment.config.data import SchemaConfig

TABLE = DataSchema(
    "table", ("well", "ill"), "outcome", (RawNumber("age"), OneHot("ward", ("north", "south", "?")))
)
PICTURES = DataSchema("image", ("cat", "dog"), shape=(1, 4, 5))


def csv(path: Path, *rows: str, header: str = "id,age,ward,outcome") -> Path:
    path.write_text("\n".join([header, *rows, ""]))
    return path


def pictures(folder: Path, *files: str, mode: str = "L", size: tuple[int, int] = (5, 4)) -> Path:
    for number, file in enumerate(files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new(mode, size, number if mode == "L" else (number, 0, 0)).save(folder / file)
    return folder


def test_a_table_is_encoded_by_the_form_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    rows = read_rows(
        csv(tmp_path / "a.csv", "x1,40,south,ill", "x2, 51.5 ,north,well", "x3,7,,ill"),
        TABLE,
        "wards",
    )
    assert rows.columns == ("age", "ward=north", "ward=south", "ward=?") and rows.classes == (
        "well",
        "ill",
    )
    assert rows.x.tolist() == [
        [40, 0, 1, 0],
        [51.5, 1, 0, 0],
        [7, 0, 0, 1],
    ] and rows.y.tolist() == [1, 0, 1]
    turned = csv(tmp_path / "b.csv", "ill,south,40", header="outcome,ward,age")
    assert read_rows(turned, TABLE, "wards").x.tolist() == [[40, 0, 1, 0]]
    one_class = csv(tmp_path / "c.csv", "x,1,north,well")  # a party need not have all classes
    assert read_rows(one_class, TABLE, "wards").y.tolist() == [0]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("x,secret,north,ill", "age"),
        ("x,,north,ill", "age"),
        ("x,inf,north,ill", "age"),
        ("x,1e300,north,ill", "age"),
        ("x,4,secret,ill", "ward"),
        ("x,4,north,secret", "outcome"),
        ("x,4,north,", "outcome"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_place_alone(
    row: str, column: str, tmp_path: Path
) -> None:
    path = csv(tmp_path / "rows.csv", "x,1,north,ill", row)
    with pytest.raises(
        DataError, match=rf"'{column}' must hold .*, but 1 of 2 don't \(row 2"
    ) as refused:
        read_rows(path, TABLE, "wards")
    assert "secret" not in str(refused.value)


def test_a_file_that_lacks_a_column_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'ward'"):
        read_rows(csv(tmp_path / "rows.csv", "1,ill", header="age,outcome"), TABLE, "wards")
    for missing in ("rows", "rows.parquet"):
        with pytest.raises(DataError, match="does not exist"):
            read_rows(tmp_path / missing, TABLE, "wards")
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.csv", TABLE, "wards")


def test_public_rows_need_no_labels(tmp_path: Path) -> None:
    x = read_public(csv(tmp_path / "p.csv", "40,south", "1,north", header="age,ward"), TABLE)
    assert x.tolist() == [[40, 0, 1, 0], [1, 1, 0, 0]] and x.dtype == np.float32
    with pytest.raises(DataError, match="must be a CSV file"):
        read_public(tmp_path / "p.parquet", TABLE)


def test_images_lie_in_folders_of_their_class(tmp_path: Path) -> None:
    # no cat here
    rows = read_rows(pictures(tmp_path / "a", "dog/1.png", "dog/2.png"), PICTURES, "pets")
    assert (
        rows.x.shape == (2, 1, 4, 5)
        and rows.y.tolist() == [1, 1]
        and rows.classes == ("cat", "dog")
    )
    both = read_rows(
        pictures(tmp_path / "b", "cat/z.png", "dog/a.png", mode="RGB"), PICTURES, "pets"
    )
    assert both.x.shape == (2, 1, 4, 5) and both.y.tolist() == [0, 1]
    with pytest.raises(DataError, match="not classes of the schema"):
        read_rows(pictures(tmp_path / "c", "bird/1.png"), PICTURES, "pets")
    with pytest.raises(DataError, match=r"shape \(1, 4, 5\), not \(1, 5, 5\)"):
        read_rows(pictures(tmp_path / "d", "cat/1.png", size=(5, 5)), PICTURES, "pets")
    (tmp_path / "e" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="has no such files"):
        read_rows(tmp_path / "e", PICTURES, "pets")
    public = pictures(tmp_path / "f", "b.png", "a.png")
    assert read_public(public, PICTURES)[:, 0, 0, 0].tolist() == [1, 0]  # by name
    with pytest.raises(DataError, match="folder of PNG"):
        read_public(tmp_path / "a", PICTURES)


def test_parquet_is_read_by_the_same_schema(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.parquet"
    columns = {"ward": ["south", None], "age": [40, 7], "outcome": ["ill", "well"], "id": [1, 2]}
    datasets.Dataset.from_dict(columns).to_parquet(str(file))
    rows = read_rows(file, TABLE, "wards")
    assert rows.x.tolist() == [[40, 0, 1, 0], [7, 0, 0, 1]] and rows.y.tolist() == [1, 0]
    with pytest.raises(DataError, match="must hold images"):
        read_rows(file, DataSchema("image", ("well", "ill"), "outcome", shape=(1, 4, 4)), "wards")


def test_the_scaling_is_that_of_the_rows_that_are_given() -> None:
    x = np.array([[1, 0, 0, 0], [3, 0, 1, 0]], dtype=np.float32)
    _, shift, scale = TABLE.scaling(x)
    assert shift.tolist() == [2, 0, 0.5, 0] and scale.tolist() == [1, 1, 0.5, 1]
    assert [v.tolist() for v in TABLE.scaling()] == [[0] * 4, [0] * 4, [1] * 4]
    assert [v.tolist() for v in PICTURES.scaling(x)[1:]] == [[127.5], [127.5]]


@pytest.mark.parametrize("missing", ["median", "most-frequent", "indicator"])
def test_missing_numbers_are_filled_by_own_rows_without_a_value_in_an_error(
    tmp_path: Path, missing: Any
) -> None:
    form = SchemaConfig(columns=("age", "dose"), label="y", classes=("a", "b")).build(missing)
    (tmp_path / "rows.csv").write_text("age,dose,y\n10,1,a\n,2,b\n30,NA,a\n30,4,b\n")
    data = read_rows(tmp_path / "rows.csv", form, "wards")
    width = 4 if missing == "indicator" else 2
    assert data.x.shape == (4, width) and len(form.columns) == width and data.fill
    fill, shift, scale = form.scaling(data.x)
    assert fill[[0, -2 if missing == "indicator" else -1]].tolist() == (
        [30, 1] if missing == "most-frequent" else [30, 2]
    )
    filled = np.where(np.isnan(data.x), fill, data.x)
    np.testing.assert_allclose((shift, scale), (filled.mean(0), filled.std(0)), rtol=1e-6)
    (tmp_path / "rows.csv").write_text("age,dose,y\n10,1,a\nsecret,2,b\n")
    with pytest.raises(
        DataError, match=r"'age' must hold a number, or nothing, .* 1 of 2"
    ) as error:
        read_rows(tmp_path / "rows.csv", form, "wards")
    assert "secret" not in str(error.value)
