"""Renders meshes from several sides: ModelNet's published OFF files become the views that a
manifest lists.

    render_archive(Path("ModelNet10.zip"), Path("modelnet10"))      # pictures, 12 views of each object
    make_manifest(Path("modelnet10"))                               # four parties with three views each

A mesh is drawn as points that are sampled evenly over its surface. A pixel shows the nearest point;
it is brighter the more the point's face is turned to the viewer. This needs NumPy alone; the files
are written with Pillow (extra `hub`).
"""  # noqa: E501

import hashlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from fedloom.core.errors import DataError

POINTS = 16
"""Points for each pixel of a picture."""
MARGIN = 0.95
"""Share of half a picture's side that the radius of a mesh has."""
DARKEST = 0.25
"""Brightness of a face that is seen from its edge."""


def read_off(text: str) -> tuple[np.ndarray, np.ndarray]:
    """A mesh in the OFF format: corners (n, 3) float, and triangles (m, 3) of their numbers.

    Polygons are cut into triangles that share their first corner. The counts may follow `OFF`
    without a space, as in some of ModelNet's files.

    Raises:
        DataError: the text is no OFF file, or a face names a corner that does not exist.
    """
    words = re.sub(r"#.*", "", text).split()
    if not words or not words[0].startswith("OFF"):
        raise DataError(
            f"an OFF file must start with OFF, not {' '.join(words[:1])!r}. Name a mesh in that "
            "format."
        )
    numbers = ([words[0][3:]] if words[0] != "OFF" else []) + words[1:]
    try:
        corners, faces = int(numbers[0]), int(numbers[1])
        points = np.array(numbers[3 : 3 + 3 * corners], dtype=float).reshape(corners, 3)
        triangles, at = [], 3 + 3 * corners
        for _ in range(faces):
            sides = int(numbers[at])
            face = [int(number) for number in numbers[at + 1 : at + 1 + sides]]
            triangles += [(face[0], face[k], face[k + 1]) for k in range(1, sides - 1)]
            at += 1 + sides
        found = np.array(triangles, dtype=np.int64).reshape(-1, 3)
    except (ValueError, IndexError):
        raise DataError(
            "the OFF file is cut short, or has other words than numbers. Fetch it again."
        ) from None
    if not len(found) or found.min() < 0 or found.max() >= corners or not np.isfinite(points).all():
        raise DataError(
            f"the OFF file has no faces, or names corners beyond its {corners}. Fetch it again."
        )
    return points, found


def render(
    points: np.ndarray,
    triangles: np.ndarray,
    *,
    azimuth: float,
    elevation: float,
    size: int,
    seed: int = 0,
) -> np.ndarray:
    """A picture (size, size) uint8 of a mesh: parallel rays, black ground, up is the third axis.

    Args:
        points, triangles: see `read_off`.
        azimuth, elevation: the viewer's direction in degrees, around the third axis and above the
            plane of the others.
        size: side in pixels.
        seed: of the points on the surface.

    Raises:
        DataError: the mesh has no surface.
    """
    a, b, c = (points[triangles[:, k]] for k in range(3))
    normals = np.cross(b - a, c - a)
    areas = np.linalg.norm(normals, axis=1)
    if not areas.sum() > 0:
        raise DataError("the mesh has no surface: all its faces are lines or points")
    rng = np.random.default_rng(seed)
    count = POINTS * size * size
    which = np.searchsorted(
        np.cumsum(areas) / areas.sum(), (np.arange(count) + rng.random(count)) / count
    )
    which = np.minimum(which, len(areas) - 1)
    u, v = rng.random((2, count, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    surface = a[which] + u * (b - a)[which] + v * (c - a)[which]
    middle = (points.min(0) + points.max(0)) / 2
    right, up, towards = _axes(azimuth, elevation)
    scale = MARGIN * size / 2 / np.linalg.norm(points - middle, axis=1).max()
    across, above, near = ((surface - middle) @ axis for axis in (right, up, towards))
    column = np.clip((size / 2 + scale * across).astype(int), 0, size - 1)
    row = np.clip((size / 2 - scale * above).astype(int), 0, size - 1)
    facing = np.abs(normals[which] @ towards) / areas[which]
    order = np.argsort(near, kind="stable")  # the nearest point of a pixel is written last
    picture = np.zeros((size, size))
    picture[row[order], column[order]] = DARKEST + (1 - DARKEST) * facing[order]
    return np.round(255 * picture).astype(np.uint8)


def _axes(azimuth: float, elevation: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors to the picture's right, up, and to the viewer."""
    turn, lift = np.radians([azimuth, elevation])
    right = np.array([-np.sin(turn), np.cos(turn), 0.0])
    towards = np.array([np.cos(lift) * np.cos(turn), np.cos(lift) * np.sin(turn), np.sin(lift)])
    return right, np.cross(towards, right), towards


def render_archive(
    source: Path,
    target: Path,
    *,
    views: int = 12,
    elevation: float = 30.0,
    size: int = 64,
    most: int | None = None,
) -> int:
    """Draw each mesh of `CLASS/{train,test}/OBJECT.off`, in a folder or a zip file, from all sides.

    The pictures are `TARGET/CLASS/{train,test}/OBJECT_ELEVATION_ANGLE_VIEW.png`, as
    `fedloom.data.manifest.make_manifest` reads them; finished ones are kept.

    Args:
        views: number of pictures of an object, at equal angles around it.
        elevation: the viewer's height in degrees.
        size: side of a picture in pixels.
        most: maximum number of objects for each class and part; None for all.

    Returns:
        The number of objects.

    Raises:
        DataError: there is no mesh, or one is damaged; the message names it.
    """
    from PIL import Image

    done, seen = 0, dict[tuple[str, str], int]()
    for place, text in _meshes(source):
        label, part = place.parts[-3:-1]
        seen[label, part] = seen.get((label, part), 0) + 1
        if most is not None and seen[label, part] > most:
            continue
        folder = target / label / part
        folder.mkdir(parents=True, exist_ok=True)
        angles = [360 * view / views for view in range(views)]
        files = [
            folder / f"{place.stem}_{elevation:g}_{angle:g}_{number}.png"
            for number, angle in enumerate(angles, 1)
        ]
        done += 1
        if all(file.is_file() for file in files):
            continue
        try:
            mesh = read_off(text)
            seed = int.from_bytes(hashlib.sha256(place.name.encode()).digest()[:4], "big")
            for file, angle in zip(files, angles, strict=True):
                picture = render(*mesh, azimuth=angle, elevation=elevation, size=size, seed=seed)
                Image.fromarray(picture).save(file)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
    if not done:
        raise DataError(
            f"{source} has no mesh CLASS/train/OBJECT.off or CLASS/test/OBJECT.off. Name "
            "ModelNet's archive."
        )
    return done


def _meshes(source: Path) -> Iterator[tuple[PurePosixPath, str]]:
    """Place and text of each OFF file in order."""

    def fits(place: PurePosixPath) -> bool:
        parts = place.parts
        return (
            place.suffix == ".off"
            and len(parts) > 2
            and parts[-2] in ("train", "test")
            and parts[0] != "__MACOSX"
        )

    if source.is_dir():
        for file in sorted(source.rglob("*.off")):
            place = PurePosixPath(file.relative_to(source).as_posix())
            if fits(place):
                yield place, file.read_text(encoding="latin-1")
        return
    try:
        with zipfile.ZipFile(source) as archive:
            for name in sorted(archive.namelist()):
                if fits(PurePosixPath(name)):
                    yield PurePosixPath(name), archive.read(name).decode("latin-1")
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"cannot read {source}: {type(error).__name__}. Name a zip file or a folder."
        ) from None
