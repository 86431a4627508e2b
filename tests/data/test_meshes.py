"""Pictures of meshes that the tests make: what is seen where, and the way to a manifest."""

import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.data.manifest import make_manifest, manifest
from fedloom.data.meshes import DARKEST, MARGIN, read_off, render, render_archive

CORNERS = [*itertools.product((-1, 1), (-1, 1), (-1, 1))]
FACES = ["4 0 1 3 2", "4 4 5 7 6", "4 0 1 5 4", "4 2 3 7 6", "4 0 2 6 4", "4 1 3 7 5"]


def box(x: float = 1, y: float = 1, z: float = 1, header: str = "OFF\n") -> str:
    """A box of these half sides."""
    corners = "\n".join(f"{a * x} {b * y} {c * z}" for a, b, c in CORNERS)
    return f"{header}8 6 0\n{corners}\n" + "\n".join(FACES) + "\n"


def test_polygons_become_triangles_whatever_the_header() -> None:
    for header in ("OFF\n", "OFF", "OFF # a box\n"):
        points, triangles = read_off(box(header=header))
        assert points.shape == (8, 3) and triangles.shape == (12, 3)
        a, b, c = (points[triangles[:, k]] for k in range(3))
        assert np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2 == pytest.approx(24)


@pytest.mark.parametrize("azimuth", [0, 90, 180, 270])
def test_a_black_box_from_one_side_is_its_bright_face(azimuth: int) -> None:
    x, y, z, size = 0.5, 1.0, 2.0, 64
    picture = render(*read_off(box(x, y, z)), azimuth=azimuth, elevation=0, size=size)
    unit = MARGIN * size / 2 / np.sqrt(x * x + y * y + z * z)
    rows, columns = np.nonzero(picture)
    half = y if azimuth % 180 == 0 else x
    assert np.ptp(columns) + 1 == pytest.approx(2 * half * unit, abs=2)
    assert np.ptp(rows) + 1 == pytest.approx(2 * z * unit, abs=2)
    inner = picture[rows.min() + 1 : rows.max(), columns.min() + 1 : columns.max()]
    assert (inner > 0).mean() > 0.99 and np.median(inner) == 255


def test_from_above_the_nearer_face_hides_the_other_and_is_less_bright() -> None:
    """At 30 degrees a flat plate's top shows with sin 30 of its light."""
    picture = render(*read_off(box(1, 1, 0.001)), azimuth=0, elevation=30, size=32)
    assert np.median(picture[picture > 0]) == pytest.approx(
        255 * (DARKEST + (1 - DARKEST) * 0.5), abs=1
    )
    rows, columns = np.nonzero(picture)
    assert (np.ptp(rows) + 1) / (np.ptp(columns) + 1) == pytest.approx(0.5, abs=0.08)


def test_a_mesh_looks_the_same_each_time_and_different_from_each_side() -> None:
    mesh = read_off(box(0.4, 1, 0.7))
    one, same, other = (
        render(*mesh, azimuth=a, elevation=30, size=32, seed=3) for a in (30, 30, 60)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)


DAMAGED = {
    "nothing": "",
    "another format": "PLY",
    "cut short": "OFF\n8 6 0\n1 2",
    "corners that do not exist": "OFF\n1 1 0\n0 0 0\n3 0 1 2",
    "a word": "OFF\n3 1 0\n0 0 0\n1 x 0\n0 1 0\n3 0 1 2",
    "no face": "OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="OFF"):
        read_off(text)


def test_an_archive_becomes_parties(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    source = tmp_path / "ModelNet10.zip"
    with zipfile.ZipFile(source, "w") as archive:
        for label, (a, b, c) in {"bed": (1, 0.6, 0.2), "night_stand": (0.4, 0.4, 0.8)}.items():
            for part, numbers in (("train", range(1, 7)), ("test", range(7, 9))):
                for number in numbers:
                    name, grown = f"{label}/{part}/{label}_{number:04}.off", 1 + 0.05 * number
                    archive.writestr(f"ModelNet10/{name}", box(grown * a, grown * b, grown * c))
                    archive.writestr(f"__MACOSX/{name}", "not a mesh")
    assert render_archive(source, tmp_path / "views", views=4, size=16) == 16
    rows = make_manifest(tmp_path / "views", views_to_party=2)
    assert len(rows) == 16 * 4 and {row["party"] for row in rows} == {"0", "1"}
    parties = manifest(tmp_path / "views" / "manifest.csv", seed=0, aligned=6, size=16)
    assert (
        parties.classes == ("bed", "night_stand")
        and [view.input_shape for view in parties.views] == [(2, 16, 16)] * 2
    )
    assert len(parties.labels) == 6 and len(parties.test_labels) == 4
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.png")}
    assert render_archive(source, tmp_path / "views", views=4, size=16) == 16
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.png")} == before


def test_a_source_without_meshes_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no mesh"):
        render_archive(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="cannot read"):
        render_archive(tmp_path / "none.zip", tmp_path / "out")
