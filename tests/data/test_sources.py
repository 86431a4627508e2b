from __future__ import annotations

import gc
import io
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data import hub
from fedloom.data.sources import SOURCES, load


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the caches nor the data of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)


@pytest.fixture
def hf(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `datasets`, with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
    return datasets


@pytest.fixture
def collected() -> Iterator[None]:
    """Files that were left open are closed before the next test."""
    yield
    gc.collect()


def leaky(test: Callable[..., None]) -> Callable[..., None]:
    """For tests with a CSV that `datasets` fails to read: it leaves the file open."""
    ignore = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
    marked: Callable[..., None] = ignore(pytest.mark.usefixtures("collected")(test))
    return marked


def pictures(shape: tuple[int, ...], number: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(number, *shape)).astype(np.uint8)


def png(pixels: np.ndarray) -> dict[str, Any]:
    """An image as the hub's Parquet files hold it."""
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(pixels).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write(hf: Any, path: Path, features: dict[str, Any], **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = hf.Dataset.from_dict(columns, features=hf.Features(features))
    table.to_parquet(str(path))


def write_mnist(hf: Any, root: Path, pixels: np.ndarray) -> None:
    """Four training rows and two test rows."""
    features = {"image": hf.Image(), "label": hf.ClassLabel(names=["zero", "one", "two"])}
    folder = root / "ylecun" / "mnist" / "mnist"
    images = [png(image) for image in pixels]
    write(
        hf, folder / "train-00000-of-00001.parquet", features, image=images[:4], label=[2, 0, 1, 2]
    )
    write(hf, folder / "test-00000-of-00001.parquet", features, image=images[4:], label=[1, 1])


def forbid(*_: object, **__: object) -> Any:
    raise AssertionError("this should not have been called")


# Bundled sets


def test_digits_are_the_ones_of_scikit_learn() -> None:
    import sklearn.datasets

    data, theirs = load("digits"), sklearn.datasets.load_digits()
    assert data.input_shape == (1, 8, 8) and data.x.dtype == np.uint8 and data.test is None
    assert (data.x.reshape(-1, 64) == theirs.data).all()
    assert (data.y == theirs.target).all() and data.classes == tuple("0123456789")
    assert (data.x.max() - data.shift[0]) / data.scale[0] == 1.0


@pytest.mark.parametrize(
    ("name", "rows", "features", "classes"), [("wine", 178, 13, 3), ("breast_cancer", 569, 30, 2)]
)
def test_bundled_tables(name: str, rows: int, features: int, classes: int) -> None:
    data = load(name)
    assert data.x.shape == (rows, features) and len(data.classes) == classes
    assert len(data.columns) == features
    scaled = data.standardized(np.arange(rows))
    assert ((scaled.x - scaled.shift) / scaled.scale).std(axis=0) == pytest.approx(
        np.ones(features), rel=1e-4
    )


def test_the_registry_says_what_a_set_needs() -> None:
    assert (
        SOURCES["digits"].bundled
        and SOURCES["digits"].extra is None
        and SOURCES["digits"].test is None
    )
    assert not SOURCES["svhn"].bundled and SOURCES["svhn"].extra == "hub"
    assert (SOURCES["svhn"].hub, SOURCES["svhn"].config) == (
        "ufldl-stanford/svhn",
        "cropped_digits",
    )
    assert SOURCES["tiny-imagenet"].test == "valid"
    assert {name for name, source in SOURCES.items() if source.kind == "table"} == {
        "adult",
        "breast_cancer",
        "credit",
        "wine",
    }


# Folders in the hub's layout


def test_a_named_set_is_read_from_the_root(hf: Any, tmp_path: Path) -> None:
    pixels = pictures((5, 4), 6)
    write_mnist(hf, tmp_path, pixels)
    data = load("mnist", root=tmp_path)
    assert (data.x[:, 0] == pixels).all() and data.x.shape == (6, 1, 5, 4)
    assert data.y.tolist() == [2, 0, 1, 2, 1, 1]
    assert data.classes == ("zero", "one", "two")
    assert data.test is not None and data.test.tolist() == [4, 5]
    assert (data.name, data.groups) == ("mnist", None)


def test_the_root_may_come_from_the_environment(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert load("mnist").y.tolist() == [2, 0, 1, 2, 1, 1]


def test_the_second_time_needs_no_decoding_and_no_datasets(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    first = load("mnist", root=tmp_path)
    monkeypatch.setattr(hub, "decode_images", forbid)
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = load("mnist", root=tmp_path)
    for field in ("x", "y", "test", "shift", "scale"):
        one, other = getattr(first, field), getattr(again, field)
        assert (one == other).all() and one.dtype == other.dtype, field
    assert (again.name, again.classes) == (first.name, first.classes)
    assert type(again.x) is np.ndarray and again.x.flags.writeable


def test_changed_files_are_decoded_again(hf: Any, tmp_path: Path) -> None:
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    load("mnist", root=tmp_path)
    changed = pictures((6, 6), 6)
    write_mnist(hf, tmp_path, changed)
    assert (load("mnist", root=tmp_path).x[:, 0] == changed).all()


@pytest.mark.parametrize("damage", ["cut", "empty", "other rows", "no words"])
def test_a_damaged_cache_is_rewritten(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    pixels = pictures((5, 4), 6)
    write_mnist(hf, tmp_path, pixels)
    load("mnist", root=tmp_path)
    (entry,) = (cache / "fedloom" / "data").iterdir()
    whole = (entry / "x.npy").read_bytes()
    if damage == "other rows":
        np.save(entry / "y.npy", np.zeros(5, dtype=np.int64))
    elif damage == "no words":
        (entry / "words.json").write_text("{")
    else:
        (entry / "x.npy").write_bytes(whole[:-7] if damage == "cut" else b"")
    assert (load("mnist", root=tmp_path).x[:, 0] == pixels).all()
    assert (entry / "x.npy").read_bytes() == whole
    assert [path.name for path in (cache / "fedloom" / "data").iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_is_no_error(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    assert len(load("mnist", root=tmp_path).y) == 6


def test_an_override_chooses_between_two_kinds_of_label(hf: Any, tmp_path: Path) -> None:
    features = {
        "img": hf.Image(),
        "fine_label": hf.ClassLabel(names=["rose", "tulip", "shark"]),
        "coarse_label": hf.ClassLabel(names=["flower", "fish"]),
    }
    pixels = pictures((4, 4, 3), 3)
    columns: dict[str, Any] = {
        "img": [png(image) for image in pixels],
        "fine_label": [2, 0, 1],
        "coarse_label": [1, 0, 0],
    }
    folder = tmp_path / "uoft-cs" / "cifar100"
    for split in ("train", "test"):
        write(hf, folder / f"{split}.parquet", features, **columns)
    data = load("cifar100", root=tmp_path)
    assert data.classes == ("rose", "tulip", "shark") and data.y.tolist() == [2, 0, 1] * 2
    assert (data.x[:3] == pixels.transpose(0, 3, 1, 2)).all()
    with pytest.raises(DataError, match=r"'fine_label', 'coarse_label' of its columns"):
        load(str(folder))


def test_natural_owners_and_truth_values_as_labels(hf: Any, tmp_path: Path) -> None:
    """CelebA: a folder of its own for its one version, a third split, large pictures."""
    features = {"image": hf.Image(), "celeb_id": hf.Value("int64"), "Smiling": hf.Value("bool")}
    folder = tmp_path / "flwrlabs" / "celeba" / "img_align+identity+attr"
    images = [png(image) for image in pictures((120, 100, 3), 3)]
    for split, owners in {"train": [900, 7, 900], "valid": [1, 2, 3], "test": [30, 30, 31]}.items():
        write(
            hf,
            folder / f"{split}-00000-of-00001.parquet",
            features,
            image=images,
            celeb_id=owners,
            Smiling=[True, False, True],
        )
    data = load("celeba", root=tmp_path)
    assert data.x.shape == (6, 3, 84, 84)
    assert data.classes == ("False", "True") and data.y.tolist() == [1, 0, 1] * 2
    assert data.groups is not None and data.groups.tolist() == [3, 0, 3, 1, 1, 2]


def test_a_version_of_a_set_has_its_own_folder(hf: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ufldl-stanford" / "svhn"
    features = {"image": hf.Image(), "label": hf.ClassLabel(names=["0", "1"])}
    images = [png(image) for image in pictures((4, 4, 3), 2)]
    for split in ("train", "test", "extra"):
        write(
            hf, folder / "cropped_digits" / f"{split}.parquet", features, image=images, label=[1, 0]
        )
    write(hf, folder / "full_numbers" / "train.parquet", {"other": hf.Value("int64")}, other=[1])
    data = load("svhn", root=tmp_path)
    assert data.y.tolist() == [1, 0, 1, 0] and len(data.test if data.test is not None else []) == 2


def test_an_official_test_split_must_exist(hf: Any, tmp_path: Path) -> None:
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    (tmp_path / "ylecun" / "mnist" / "mnist" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"'train' and 'test', but has \['train'\]"):
        load("mnist", root=tmp_path)


def test_own_files_use_validation_where_there_is_no_test(hf: Any, tmp_path: Path) -> None:
    features = {"a": hf.Value("float32"), "target": hf.Value("int64")}
    write(hf, tmp_path / "train.parquet", features, a=[1.0, 2.0], target=[30, 20])
    write(hf, tmp_path / "validation.parquet", features, a=[3.0], target=[30])
    data = load(str(tmp_path))
    assert data.test is not None and data.test.tolist() == [2]
    assert data.classes == ("20", "30") and data.y.tolist() == [1, 0, 1]
    assert data.x[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_single_parquet_with_whole_number_labels(hf: Any, tmp_path: Path) -> None:
    features = {"pic": hf.Image(), "labels": hf.Value("int32"), "other": hf.Value("int32")}
    pixels = pictures((3, 3), 3)
    images = [png(image) for image in pixels]
    write(hf, tmp_path / "mine.parquet", features, pic=images, labels=[5, 3, 5], other=[0, 0, 1])
    data = load(str(tmp_path / "mine.parquet"))
    assert (data.name, data.classes, data.y.tolist()) == ("mine", ("3", "5"), [1, 0, 1])
    assert (data.x[:, 0] == pixels).all()


def test_table_columns_of_class_type_are_words(hf: Any, tmp_path: Path) -> None:
    features = {"town": hf.ClassLabel(names=["Ulm", "Bonn"]), "income": hf.Value("string")}
    folder = tmp_path / "scikit-learn" / "adult-census-income"
    write(hf, folder / "train.parquet", features, town=[1, 0, None], income=["no", "yes", "no"])
    data = load("adult", root=tmp_path)
    assert data.columns == ("town=?", "town=Bonn", "town=Ulm")
    assert data.x.argmax(axis=1).tolist() == [1, 2, 0]


def bad_parquets(hf: Any) -> dict[str, tuple[dict[str, Any], dict[str, list[Any]], str]]:
    image, names = hf.Image(), hf.ClassLabel(names=["a", "b"])
    small, large = (png(pixels) for pixels in (pictures((2, 2), 1)[0], pictures((3, 2), 1)[0]))
    number = hf.Value("int64")
    return {
        "shapes": (
            {"i": image, "l": names},
            {"i": [small, large], "l": [0, 1]},
            r"2x2 \(1\), 3x2 \(1\)",
        ),
        "broken": (
            {"i": image, "l": names},
            {"i": [small, {"bytes": b"x"}], "l": [0, 1]},
            "Image 1",
        ),
        "gap": ({"i": image, "l": names}, {"i": [small, None], "l": [0, 1]}, "must have an image"),
        "unlabeled": (
            {"i": image, "l": names},
            {"i": [small, small], "l": [0, -1]},
            "has .a. only",
        ),
        "no label": (
            {"i": image, "n": number},
            {"i": [small, small], "n": [0, 1]},
            "none of its columns",
        ),
        "half labeled": (
            {"i": image, "l": names},
            {"i": [small, small], "l": [0, None]},
            "has .a. only",
        ),
        "two pictures": (
            {"i": image, "j": image, "l": names},
            {"i": [small], "j": [small], "l": [0]},
            "'i', 'j'",
        ),
        "lists": (
            {"v": hf.Sequence(number), "label": number},
            {"v": [[1, 2], [3, 4]], "label": [0, 1]},
            "'v' holds several values",
        ),
        "two labels": (
            {"label": number, "target": number, "v": number},
            {"label": [0, 1], "target": [0, 1], "v": [1, 2]},
            r"'label', 'target' of its columns",
        ),
    }


BAD = (
    "shapes",
    "broken",
    "gap",
    "unlabeled",
    "no label",
    "half labeled",
    "two pictures",
    "lists",
)


@pytest.mark.parametrize("case", [*BAD, "two labels"])
def test_unusable_parquets_are_refused(hf: Any, tmp_path: Path, case: str) -> None:
    features, columns, message = bad_parquets(hf)[case]
    write(hf, tmp_path / "bad.parquet", features, **columns)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / "bad.parquet"))


def test_a_file_that_is_no_parquet_is_refused(hf: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not really")
    with pytest.raises(DataError, match=r"bad.parquet cannot be read as a data set.*Parquet"):
        load(str(tmp_path / "bad.parquet"))


# CSV


def csv(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_adult_with_missing_values(hf: Any, tmp_path: Path) -> None:
    csv(
        tmp_path / "scikit-learn" / "adult-census-income" / "adult.csv",
        "age,workclass,hours,income",
        "39,State,40,<=50K",
        "50,?,13,>50K",
        "38,Private,40,<=50K",
    )
    data = load("adult", root=tmp_path)
    assert data.columns == ("age", "workclass=?", "workclass=Private", "workclass=State", "hours")
    assert data.x.tolist() == [[39, 0, 0, 1, 40], [50, 1, 0, 0, 13], [38, 0, 1, 0, 40]]
    assert data.classes == ("<=50K", ">50K") and data.y.tolist() == [0, 1, 0]
    assert data.kind == "table" and data.test is None


def test_credit_drops_the_number_of_the_row(hf: Any, tmp_path: Path) -> None:
    csv(
        tmp_path / "scikit-learn" / "credit-card-clients" / "c.csv",
        '"ID","LIMIT_BAL","default.payment.next.month"',
        "1,20000.5,1",
        "2,120000,0",
    )
    data = load("credit", root=tmp_path)
    assert data.columns == ("LIMIT_BAL",) and data.x.tolist() == [[20000.5], [120000.0]]
    assert data.y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("header", "column"), [("a,Class,b", 1), ("target,a,b", 0), ("a,b,outcome", 2), ("a,y,b", 1)]
)
def test_the_label_of_a_csv_goes_by_name_else_is_last(
    hf: Any, tmp_path: Path, header: str, column: int
) -> None:
    data = load(csv(tmp_path / "x.csv", header, "1,2,1", "2,1,2", "2,2,1"))
    rows = np.array([[1, 2, 1], [2, 1, 2], [2, 2, 1]])
    assert (data.y + 1).tolist() == rows[:, column].tolist()
    assert data.x.tolist() == np.delete(rows, column, axis=1).tolist()
    assert data.columns == tuple(np.delete(header.split(","), column))


@leaky
def test_a_csv_may_change_its_mind_about_a_column(hf: Any, tmp_path: Path) -> None:
    """`datasets` settles the type of a column after 10,000 rows; what comes later may not fit."""
    lines = [f"{i},{i % 999},{i % 2}" for i in range(10_050)]
    late = csv(tmp_path / "decimal.csv", "a,b,label", *lines, "7,0.5,1")
    assert load(late).x[[3, -1]].tolist() == [[3, 3], [7, 0.5]]
    gap = csv(tmp_path / "gap.csv", "a,b,label", *lines, "7,?,1")
    with pytest.raises(DataError, match=r"'b' of 'gap' lacks 1 of 10051 numbers"):
        load(gap)


@leaky
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("a,label", "1,0", "2,1", ",1"), "'a' of 'bad' lacks 1 of 3 numbers"),
        (("a,label", "1,x", "2,"), "at least 2 classes, but has 'x' only"),
        (("label", "1", "2"), "no column that can be a feature"),
        (("a,label", "1,0", "2,1,3", "2,1"), r"line 3: expected 2 values"),
        (("a,label", "1,0", "2,0"), "at least 2 classes"),
    ],
)
def test_unusable_csvs_are_refused(
    hf: Any, tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(csv(tmp_path / "bad.csv", *lines))


# The hub


def fake_hub(hf: Any, pixels: np.ndarray) -> Callable[..., Any]:
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b"])})

    def load_dataset(repository: str, name: str | None = None) -> Any:
        assert (repository, name) == ("tanganke/emnist_letters", "emnist-letters")
        columns: dict[str, Any] = {"image": [png(image) for image in pixels], "label": [0, 1]}
        part = hf.Dataset.from_dict(columns, features=features)
        return hf.DatasetDict({"train": part, "test": part})

    return load_dataset


def test_the_hub_is_asked_where_there_is_no_folder(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = pictures((4, 4), 2)
    monkeypatch.setattr(hf, "load_dataset", fake_hub(hf, pixels))
    data = load("emnist", root=tmp_path)
    assert (data.x[:2, 0] == pixels).all() and data.y.tolist() == [0, 1, 0, 1]
    monkeypatch.setattr(hub, "decode_images", forbid)
    # the fingerprint is the same, so nothing is decoded again
    assert (load("emnist").x == data.x).all()
    monkeypatch.setattr(hf, "load_dataset", fake_hub(hf, pixels + 1))
    with pytest.raises(AssertionError, match="should not have been called"):
        load("emnist")


def test_progress_bars_are_as_before(
    hf: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_mnist(hf, tmp_path, pictures((5, 4), 6))
    capfd.readouterr()
    before = hf.are_progress_bars_disabled()
    load("mnist", root=tmp_path)
    assert capfd.readouterr() == ("", "")
    assert hf.are_progress_bars_disabled() == before


@pytest.mark.parametrize("with_root", [True, False])
def test_a_missing_set_without_a_network_is_one_clear_sentence(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_root: bool
) -> None:
    def offline(*_: object, **__: object) -> Any:
        raise ConnectionError(
            "Couldn't reach 'ylecun/mnist' on the Hub (OfflineModeIsEnabled)\nand so on"
        )

    monkeypatch.setattr(hf, "load_dataset", offline)
    with pytest.raises(DataError) as caught:
        load("mnist", root=tmp_path if with_root else None)
    text = str(caught.value)
    where = str(tmp_path / "ylecun" / "mnist") if with_root else "FEDLOOM_DATA"
    assert text.startswith("Data set 'mnist' is neither in") and text.count("\n") == 0
    for part in (where, "'ylecun/mnist'", "OfflineModeIsEnabled", "run once with a network"):
        assert part in text


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` would repeat each request five times, for half a minute."""
    tried = []

    def refused(address: tuple[str, int], *_: object) -> Any:
        tried.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        DataError, match="nor available from the Hugging Face hub as 'ylecun/mnist'"
    ):
        load("mnist")
    assert tried == [("huggingface.co", 443)] and not hf.config.HF_HUB_OFFLINE


def test_without_datasets_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'pip install -e ".\[hub\]"'):
        load("mnist")
    # a CSV needs no package
    assert load(csv(tmp_path / "x.csv", "a,label", "1,0", "2,1")).y.tolist() == [0, 1]


def test_a_folder_of_csv_files_has_the_splits_of_its_names(tmp_path: Path) -> None:
    csv(tmp_path / "pets" / "train-1.csv", "tame,age,label", "True,1,cat", "False,2,dog")
    csv(tmp_path / "pets" / "train-2.csv", "tame,age,label", "True,3,dog")
    csv(tmp_path / "pets" / "test" / "0.csv", "age,tame,label", "4,False,cat")
    csv(tmp_path / "pets" / "notes.csv", "word", "hello")
    data = load(str(tmp_path / "pets"))
    assert (
        data.columns == ("tame", "age")
        and data.classes == ("cat", "dog")
        and data.y.tolist() == [0, 1, 1, 0]
    )
    assert (
        data.x.tolist() == [[1, 1], [0, 2], [1, 3], [0, 4]]
        and data.test is not None
        and data.test.tolist() == [3]
    )
    csv(tmp_path / "pets" / "train-3.csv", "tame,label", "True,dog")
    with pytest.raises(DataError, match=r"must have the columns .*train-3.csv has others"):
        load(str(tmp_path / "pets"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("mnits", "Did you mean 'mnist'"), ("no/such/thing", "there is no file or folder")],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(name)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="folder of class folders"):
        load(str(tmp_path))
    with pytest.raises(DataError, match="folder of class folders"):
        load(str(tmp_path / "notes.txt"))


def test_a_parquet_file_is_read_as_datasets_reads_it(
    hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        "int": hf.Value("int32"),
        "flag": hf.Value("bool"),
        "word": hf.Value("string"),
        "half": hf.Value("float32"),
    }
    features = hf.Features({**kinds, "kind": hf.ClassLabel(names=["b", "a"]), "pic": hf.Image()})
    values: dict[str, Any] = {
        "int": [1, None, 3],
        "flag": [True, False, None],
        "word": ["x", None, "y"],
        "half": [0.5, None, 1.5],
    }
    write(
        hf,
        tmp_path / "one.parquet",
        features,
        **values,
        kind=[1, None, 0],
        pic=[png(pixels) for pixels in pictures((4, 5), 3)],
    )
    mine = hub.read_content(tmp_path / "one.parquet", "one")
    write(hf, tmp_path / "odd.parquet", hf.Features({"a": hf.Array2D((1, 1), "int8")}), a=[[[1]]])
    assert hub._read_parquet_file(tmp_path / "odd.parquet", "odd") is None
    monkeypatch.setattr(hub, "_read_parquet_file", lambda *_: None)
    theirs = hub.read_content(tmp_path / "one.parquet", "one")
    assert [*mine.columns] == [*theirs.columns] and mine.named == theirs.named == {
        "kind": ["b", "a"]
    }
    assert (
        mine.images is not None and theirs.images is not None and [*mine.images] == [*theirs.images]
    )
    for column in mine.columns:
        np.testing.assert_array_equal(
            mine.columns[column].values, theirs.columns[column].values, strict=True
        )
