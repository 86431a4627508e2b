from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.manifest import PATTERN, make_manifest, manifest, read_views
from fedloom.data.vertical import VerticalDataset, encode_new_rows

PIL_Image = pytest.importorskip("PIL.Image")


def picture(path: Path, level: int, color: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL_Image.fromarray(np.full((6, 8, 3) if color else (6, 8), level, np.uint8)).save(path)


def level_of(number: int, view: int) -> int:
    """The one gray of a picture: it says which object and view it is."""
    return 10 * number + view


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, one with "_" in its name, 8 training and 2 test objects each, 4 views each."""
    for place, label in enumerate(["flower_pot", "lamp"]):
        for n in range(10):
            for view in range(1, 5):
                name = f"{label}_{n:04}_030_{view * 30:03}_{view:03}.png"
                picture(
                    tmp_path / label / ("test" if n >= 8 else "train") / name,
                    level_of(10 * place + n, view),
                )
    return tmp_path


def edit(path: Path, change: Any) -> None:
    """Rewrite the manifest: `change` gets its rows and gives the new ones."""
    with path.open(newline="") as file:
        rows = change(list(csv.DictReader(file)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def number(name: str, rows: list[dict[str, str]], party: str = "0") -> int:
    """Which row is the first of an object at a party."""
    return next(
        n for n, row in enumerate(rows) if f"/{name}_" in row["path"] and row["party"] == party
    )


def objects(parties: VerticalDataset, party: int, part: str) -> list[int]:
    view = parties.views[party]
    return [int(x[0].mean()) // 10 for x in view.x[getattr(view, part)]]


def test_from_folders_to_parties(folder: Path) -> None:
    rows = make_manifest(folder, views_to_party=2)
    order = [row["label"] for row in rows if row["party"] == "0" and row["view"] == "001"]
    assert (
        len(rows) == 80
        and len(order) == 20
        and order not in (sorted(order), sorted(order, reverse=True))
    )
    assert {row["sample_id"] for row in rows} == {f"{n:02}" for n in range(20)}
    assert next(row for row in rows if row["path"].endswith("pot_0008_030_030_001.png")) == {
        "sample_id": rows[number("flower_pot_0008", rows)]["sample_id"],
        "party": "0",
        "view": "001",
        "path": "flower_pot/test/flower_pot_0008_030_030_001.png",
        "label": "flower_pot",
        "split": "test",
    }
    assert {row["label"] for row in rows if row["party"] == "1"} == {""}
    with pytest.raises(DataError, match="exists already; replace it with force=True"):
        make_manifest(folder, views_to_party=2)
    assert make_manifest(folder, views_to_party=2, force=True) == rows
    parties = manifest(folder / "manifest.csv", seed=0, size=4)
    assert parties.kind == "image" and parties.classes == ("flower_pot", "lamp")
    assert [view.x.shape for view in parties.views] == [(20, 2, 4, 4)] * 2
    assert [len(view.unaligned) for view in parties.views] == [0, 0]
    for part, labels in (("aligned", parties.labels), ("test", parties.test_labels)):
        who = objects(parties, 0, part)
        assert objects(parties, 1, part) == who and labels.tolist() == [n // 10 for n in who]
        for party, view in enumerate(parties.views):
            grays = view.x[getattr(view, part)][:, :, 0, 0]
            assert grays.tolist() == [
                [level_of(n, 2 * party + 1), level_of(n, 2 * party + 2)] for n in who
            ]
    assert sorted(objects(parties, 0, "test")) == [8, 9, 18, 19]


def test_fewer_aligned_objects(folder: Path) -> None:
    make_manifest(folder, views_to_party=2)
    path = folder / "manifest.csv"
    whole = manifest(path, seed=1, size=4)
    few = manifest(path, seed=1, aligned=6, test_rows=2, size=4)
    assert objects(few, 0, "aligned") == objects(whole, 0, "aligned")[:6]
    assert np.bincount(few.labels).tolist() == [3, 3] and set(objects(few, 0, "test")) < set(
        objects(whole, 0, "test")
    )
    own = [objects(few, party, "unaligned") for party in range(2)]
    assert [len(who) for who in own] == [5, 5] and not set(own[0]) & set(own[1])
    assert all(view.truth is not None for view in few.views)
    assert [view.truth.tolist() for view in few.views if view.truth is not None] == [
        [n // 10 for n in w] for w in own
    ]


def test_without_a_split_objects_are_drawn(folder: Path) -> None:
    make_manifest(folder, views_to_party=2)
    edit(
        folder / "manifest.csv",
        lambda rows: [{k: v for k, v in row.items() if k != "split"} for row in rows],
    )
    parties = manifest(folder / "manifest.csv", seed=0, test_fraction=0.3, size=4)
    assert np.bincount(parties.test_labels).tolist() == [3, 3] and np.bincount(
        parties.labels
    ).tolist() == [7, 7]
    assert not set(objects(parties, 0, "test")) & set(objects(parties, 0, "aligned"))


def test_objects_that_a_party_lacks_are_unaligned(folder: Path) -> None:
    """Object 1 is at party 0 alone, 2 has no label, and 8, of the test split, is at party 1 alone:
    it is not used.
    """
    make_manifest(folder, views_to_party=2)

    def change(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        kept = [row for row in rows if not ("pot_0001" in row["path"] and row["party"] == "1")]
        kept = [row for row in kept if not ("pot_0008" in row["path"] and row["party"] == "0")]
        return [row | {"label": ""} if "pot_0002" in row["path"] else row for row in kept]

    edit(folder / "manifest.csv", change)
    parties = manifest(folder / "manifest.csv", seed=0, size=4)
    assert objects(parties, 0, "unaligned") == [1, 2] and objects(parties, 1, "unaligned") == [2]
    assert parties.views[0].truth is None and len(parties.labels) == 14
    assert sorted(objects(parties, 1, "test")) == [9, 18, 19]


def test_an_object_that_lacks_a_view_is_not_the_partys(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Object 1 lacks a view at party 1, and 3 at party 0, whose label is not used then."""
    make_manifest(folder, views_to_party=2)
    lost = ("pot_0001_030_120_004.png", "pot_0003_030_030_001.png")
    edit(
        folder / "manifest.csv",
        lambda rows: [row for row in rows if not row["path"].endswith(lost)],
    )
    parties = manifest(folder / "manifest.csv", seed=0, size=4)
    assert objects(parties, 0, "unaligned") == [1] and objects(parties, 1, "unaligned") == [3]
    assert len(parties.labels) == 14 and [view.x.shape[1] for view in parties.views] == [2, 2]
    assert len(caplog.records) == 1 and "2 of 40 objects lack a view at a party" in caplog.text
    edit(
        folder / "manifest.csv",
        lambda rows: [row | {"view": row["sample_id"] + row["view"]} for row in rows],
    )
    with pytest.raises(
        DataError, match="parties that have all their views of no object: 2, such as 0, 1"
    ):
        manifest(folder / "manifest.csv", seed=0, size=4)


def test_color_pictures_and_new_objects(folder: Path) -> None:
    # one among gray ones
    picture(folder / "lamp" / "train" / "lamp_0000_030_030_001.png", 77, color=True)
    make_manifest(folder, views_to_party={"001": 0, "002": 0, "003": 0, "004": 1})
    parties = manifest(folder / "manifest.csv", seed=0, size=4)
    view = parties.views[0]
    assert [one.input_shape for one in parties.views] == [(3, 4, 4), (1, 4, 4)]
    assert view.recipe == {
        "kind": "pictures",
        "views": ["001", "002", "003"],
        "size": 4,
        "shape": [3, 4, 4],
    }
    files = {
        name: folder / "lamp" / "train" / f"lamp_0000_030_{n:03}_{name}.png"
        for name, n in [("003", 90), ("001", 30), ("002", 60)]
    }
    new = read_views(view.recipe, [files])
    assert new[0, :, 0, 0].tolist() == [77, level_of(10, 2), level_of(10, 3)]
    assert (encode_new_rows(view.recipe, new) == new).all()
    with pytest.raises(DataError, match="1 are missing, such as '002'"):
        read_views(view.recipe, [{name: file for name, file in files.items() if name != "002"}])


def test_problems_are_reported_together(folder: Path) -> None:
    make_manifest(folder, views_to_party=2)

    def change(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        lamps = [number(f"lamp_{n:04}", rows) for n in range(6)]
        twice = rows[lamps[5]], rows[lamps[5] + 1]
        rows[number("flower_pot_0000", rows)] |= {"label": "lamp"}
        rows[number("flower_pot_0001", rows, "1")] |= {"label": "lamp"}
        rows[lamps[0]] |= {"party": "one"}
        rows[lamps[1]] |= {"path": "nowhere.png"}
        rows[lamps[2]] |= {"split": "later"}
        rows[lamps[3]] |= {"sample_id": ""}
        rows[lamps[4]] |= {"split": "test"}
        return [*rows, *twice]

    edit(folder / "manifest.csv", change)
    with pytest.raises(DataError) as error:
        manifest(folder / "manifest.csv", seed=0)
    text = str(error.value)
    for part in (
        "party numbers that are not 0, 1, ...: 1, such as 'one'",
        "labels outside party 0's rows: 1",
        "objects with several labels: 1, such as ",
        " ['flower_pot', 'lamp']",
        "repeated combinations of sample, party and view: 2",
        "splits that are neither train nor test: 1, such as 'later'",
        "rows without sample_id, view or path: 1",
        "objects with several splits: 1",
        "files that are missing: 1",
    ):
        assert part in text


def test_a_party_without_rows(folder: Path) -> None:
    make_manifest(folder, views_to_party={"001": 0, "002": 0, "003": 2, "004": 2})
    with pytest.raises(DataError, match=r"parties without rows .*: 1, such as 1"):
        manifest(folder / "manifest.csv", seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views_to_party": 3}, "4 views .* cannot be divided"),
        ({"views_to_party": 4}, "cannot be divided"),
        ({"views_to_party": {"001": 0}}, "lacks .'002', '003', '004'"),
        ({"pattern": "("}, "not a valid regular expression"),
        ({"pattern": ".*"}, "named groups"),
        (
            {"pattern": r"(?P<sample>lamp_\d+)_\d+_\d+_(?P<view>\d+).png"},
            "do not match the pattern: 40, such as flower_pot",
        ),
    ],
)
def test_what_cannot_be_listed(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_manifest(folder, **options)
    assert not (folder / "manifest.csv").exists()


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has none"):
        make_manifest(tmp_path)


def test_a_manifest_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("lists") / "all.csv"
    rows = make_manifest(folder, PATTERN, views_to_party=2, target=target)
    assert rows[0]["path"].startswith("../")
    assert len(manifest(target, seed=0, size=4).labels) == 16
