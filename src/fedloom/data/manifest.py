"""A vertical federation of images: each party has its own views of an object, listed in a CSV file
(manifest).

Its columns are `sample_id,party,view,path,label`, and optionally `split`. Party 0 is the active
one, and only its rows have labels; paths are relative to the file's folder. All views of an object
at a party become channels of one image, sorted by the views' names (numbers by size).
"""

import csv
import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn
from fedloom.data.dataset import pixel_scaling
from fedloom.data.images import decode_images, is_image
from fedloom.data.presence import RowPresence, had
from fedloom.data.tables import class_numbers, read_csv
from fedloom.data.vertical import PartyView, VerticalDataset, blank, ranges
from fedloom.data.vertical_split import split_parties

COLUMNS = ("sample_id", "party", "view", "path", "label")
PATTERN = r"(?P<sample>.+_[^_]+)_[^_]+_[^_]+_(?P<view>[^_]+)\.(png|jpe?g)"
"""`<class>_<object>_<elevation>_<angle>_<view>.png`, where a class's name may hold "_"."""


_Files: TypeAlias = Mapping[int, Mapping[str, Mapping[str, Path]]]
"""Party -> object -> view -> file."""


class _Problems(defaultdict[str, list[object]]):
    """Problem -> examples, reported in one error."""

    def raise_any(self, where: Path) -> None:
        lines = [
            f"{what}: {len(all_)}, such as {', '.join(map(str, all_[:3]))}"
            for what, all_ in self.items()
        ]
        if lines:
            raise DataError("\n".join([f"{where} is invalid; correct these:", *lines]))


@dataclass(frozen=True, eq=False)
class _Listing:
    """A valid manifest."""

    files: list[dict[str, dict[str, Path]]]
    """For each party, object -> view -> file."""
    views: list[list[str]]
    """For each party, its views in order."""
    labels: dict[str, str]
    """Object -> class, of the first party's objects; "" for no label."""
    test: set[str] | None
    """Objects of the test split, or None without a column `split`."""


def manifest(
    path: Path,
    *,
    seed: int,
    aligned: int | None = None,
    test_fraction: float = 0.25,
    test_rows: int | None = None,
    validation: float = 0.0,
    size: int = 32,
    presence: RowPresence | None = None,
) -> VerticalDataset:
    """Read the parties' images from a manifest; only images that are used are decoded.

    Objects with a label that all parties have are aligned or tested; other objects are unaligned at
    the parties that have them, unless they are in the test split. A party has an object if it has
    all views of it; objects with missing views are ignored at that party, with a warning. The split
    is by object, not by image.

    Args:
        path: the CSV file.
        seed: of the run.
        aligned: number of aligned objects, drawn evenly over the classes as far as they have
            objects; None for all common objects. The others are assigned in turn, each to one party
            as unaligned.
        test_fraction: the share of each class's objects that is tested, without a column `split`
            (train or test).
        test_rows: maximum number of test objects, a random sample; None keeps all.
        validation: see `fedloom.data.split.hold_out`.
        size: side in pixels to which each image's central square is scaled.
        presence: which aligned and test objects each party has, by their sample_id; None for all.

    Raises:
        DataError: the manifest is inconsistent, an image is invalid, or there are too few objects.
    """
    path = Path(path)
    listing = _read(path)

    # the class of each object of the first party
    names = sorted(listing.labels)
    y, classes = class_numbers(
        RawColumn.of("label", [listing.labels[name] for name in names]), f"Column 'label' of {path}"
    )
    class_of = dict(zip(names, y.tolist(), strict=True))  # -1 without a label
    at_all = set(names).intersection(*listing.files)
    # a test object that cannot be tested is left out: as unaligned it would be trained on
    useless = {name for name in listing.test or () if name not in at_all or class_of[name] < 0}

    # rows: at each party, an object's row is its place in the party's `held`
    held = [sorted(set(files) - useless) for files in listing.files]
    common = sorted(at_all - useless)
    row_of = [{name: row for row, name in enumerate(objects)} for objects in held]
    split = split_parties(
        [np.array([rows[name] for name in common], dtype=np.int64) for rows in row_of],
        [
            np.array([class_of.get(name, -1) for name in objects], dtype=np.int64)
            for objects in held
        ],
        seed=seed,
        official=None
        if listing.test is None
        else np.array([name in listing.test for name in common], dtype=bool),
        aligned=aligned,
        test_fraction=test_fraction,
        test_rows=test_rows,
        balanced=True,
        validation=validation,
    )

    # only now are pictures decoded: those of each party's aligned, unaligned and test objects
    views = []
    for party, (objects, *parts) in enumerate(
        zip(held, split.aligned, split.unaligned, split.test, strict=True)
    ):
        ids = [[objects[row] for row in rows] for rows in parts]
        files = [[listing.files[party][name] for name in rows] for rows in ids]
        present = had(presence, party, ids[0], len(ids[1]), ids[2])
        views.append(
            _view(f"party-{party}", files, listing.views[party], size, split.truth[party], present)
        )
    return VerticalDataset(
        path.resolve().parent.name, "image", classes, tuple(views), split.labels, split.test_labels
    )


def read_views(recipe: Mapping[str, Any], objects: Sequence[Mapping[str, Path]]) -> np.ndarray:
    """(n, V * C, size, size) uint8 images of new objects, view -> file each, for a party's recipe.

    Raises:
        DataError: a view is missing, or an image is invalid.
    """
    names, size = list(recipe["views"]), int(recipe["size"])
    lacking = [name for files in objects for name in names if name not in files]
    if lacking:
        raise DataError(
            f"Each object needs the views {names}, but {len(lacking)} are missing, such as "
            f"{lacking[0]!r}."
        )
    files = [views[name] for views in objects for name in names]
    pixels = decode_images(files, size=size, channels=int(recipe["shape"][0]) // len(names))
    return pixels.reshape(len(objects), -1, size, size)


def make_manifest(
    root: Path,
    pattern: str = PATTERN,
    *,
    views_to_party: Mapping[str, int] | int = 3,
    target: Path | None = None,
    force: bool = False,
) -> list[dict[str, str]]:
    """Write a manifest of the images in `<root>/<class>/{train,test}/`, for simulations.

    An object's `sample_id` is an opaque number, and only party 0's rows have labels, but paths
    still name the class.

    Args:
        root: the folder of the class folders.
        pattern: a regular expression that matches whole file names, with the groups `sample` (one
            object of its class) and `view`.
        views_to_party: view -> party, or the number of consecutive views of each party.
        target: the CSV file; None for `<root>/manifest.csv`.
        force: replace an existing file.

    Returns:
        The rows of the file.

    Raises:
        DataError: the pattern lacks a group, files do not match it, views cannot be divided, or the
            target exists.
    """
    root = Path(root)
    target = root / "manifest.csv" if target is None else Path(target)
    if target.exists() and not force:
        raise DataError(
            f"{target} exists already; replace it with force=True, or choose another target."
        )
    try:
        fits = re.compile(pattern)
    except re.error as error:
        raise DataError(
            f"The pattern {pattern!r} is not a valid regular expression ({error}); correct it."
        ) from error
    if not {"sample", "view"} <= set(fits.groupindex):
        raise DataError(
            f"The pattern {pattern!r} must have the named groups (?P<sample>...) and (?P<view>...)."
        )
    problems, files = _Problems(list), []
    for file in sorted(
        file for split in ("train", "test") for file in root.glob(f"*/{split}/*") if is_image(file)
    ):
        match = fits.fullmatch(file.name)
        if match is None:
            problems["file names that do not match the pattern"].append(file.relative_to(root))
        else:
            files.append((file, match["sample"], match["view"]))
    problems.raise_any(root)
    if not files:
        raise DataError(
            f"{root} must have PNG or JPEG files in <class>/train or <class>/test, but has none."
        )
    parties = _assign_views({view for _, _, view in files}, views_to_party)
    objects = {(file.parent.parent.name, sample) for file, sample, _ in files}
    # Reproducible numbers, in whose order classes are mixed.
    mixed = sorted(objects, key=lambda names: hashlib.sha256("/".join(names).encode()).digest())
    numbers = {names: f"{number:0{len(str(len(mixed)))}}" for number, names in enumerate(mixed)}
    rows = []
    for file, sample, view in files:
        split, label, party = file.parent.name, file.parent.parent.name, parties[view]
        path = Path(os.path.relpath(file, target.parent)).as_posix()
        values = (
            numbers[label, sample],
            str(party),
            view,
            path,
            label if party == 0 else "",
            split,
        )
        rows.append(dict(zip((*COLUMNS, "split"), values, strict=True)))
    rows.sort(key=lambda row: (row["sample_id"], int(row["party"])))  # files are sorted by class
    with target.open("w", newline="", encoding="utf-8") as file_out:
        writer = csv.DictWriter(file_out, (*COLUMNS, "split"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def _read(path: Path) -> _Listing:
    """The manifest's rows, validated individually and jointly: all problems are in one error."""
    table = {name: column.text for name, column in read_csv(path, needed=COLUMNS).items()}
    splits = table.get("split", [""] * len(table["path"]))
    problems = _Problems(list)
    # party -> object -> view -> file; and the labels and splits that an object's rows name
    files: dict[int, dict[str, dict[str, Path]]] = defaultdict(lambda: defaultdict(dict))
    labels: dict[str, set[str]] = defaultdict(set)
    splits_of: dict[str, set[str]] = defaultdict(set)

    # each row by itself; the first problem of a row is reported
    for row, split in zip(
        zip(*(table[name] for name in COLUMNS), strict=True), splits, strict=True
    ):
        sample, party, view, place, label = row
        if not (sample and view and place):
            problems["rows without sample_id, view or path"].append(row)
        elif not re.fullmatch("[0-9]{1,4}", party):
            problems["party numbers that are not 0, 1, ..."].append(repr(party))
        # this look-up makes an entry, also for a row that is refused below: all rows are then
        elif view in files[int(party)][sample]:
            problems["repeated combinations of sample, party and view"].append(
                (sample, party, view)
            )
        elif label and int(party):
            problems["labels outside party 0's rows"].append((sample, party, label))
        elif split not in ("train", "test", ""):
            problems["splits that are neither train nor test"].append(repr(split))
        else:
            files[int(party)][sample][view] = path.parent / place
            splits_of[sample].add(split or "train")
            labels[sample] |= {label} - {""}  # makes an entry, empty if no row has a label

    # rows of one object, and rows of one party, together
    for where, values in {"labels": labels, "splits": splits_of}.items():
        for sample, different in values.items():
            if len(different) > 1:
                problems[f"objects with several {where}"].append(f"{sample} {sorted(different)}")
    views = {
        party: _in_order({view for images in objects.values() for view in images})
        for party, objects in files.items()
    }
    complete = {  # the objects of which a party has all its views
        party: {
            sample: images for sample, images in objects.items() if len(images) == len(views[party])
        }
        for party, objects in files.items()
    }
    for party in set(range(max([*files, 1]) + 1)) - set(files):  # there are at least 0 and 1
        problems["parties without rows (they are numbered 0, 1, ...)"].append(party)
    for party, objects in files.items():
        if not complete[party]:
            problems["parties that have all their views of no object"].append(party)
        images = (file for views in objects.values() for file in views.values())
        if missing := [file for file in images if not file.is_file()]:
            problems["files that are missing"] += missing
    problems.raise_any(path)

    # objects that a party has some views of are no error, but are not used there
    lacking = [
        (sample, party)
        for party in sorted(files)
        for sample in files[party]
        if sample not in complete[party]
    ]
    if lacking:
        logging.getLogger("fedloom").warning(
            "%s: %d of %d objects lack a view at a party, such as %s at party %d; they are "
            "ignored there",
            path, len(lacking), sum(map(len, files.values())), *lacking[0],
        )  # fmt: skip
    test = {sample for sample, found in splits_of.items() if "test" in found}
    label_of = {sample: "".join(labels[sample]) for sample in complete[0]}  # one label, or none
    order = sorted(files)  # rows may name parties in any order
    return _Listing(
        [complete[k] for k in order],
        [views[k] for k in order],
        label_of,
        test if "split" in table else None,
    )


def _in_order(views: set[str]) -> list[str]:
    """Numbers by size, then other names as text."""
    return sorted(
        views, key=lambda view: (not view.isdecimal(), int(view) if view.isdecimal() else 0, view)
    )


def _assign_views(views: set[str], shares: Mapping[str, int] | int) -> dict[str, int]:
    """View -> party."""
    names = _in_order(views)
    if isinstance(shares, int):
        if shares < 1 or len(names) % shares or len(names) < 2 * shares:
            raise DataError(
                f"{len(names)} views {names[:20]} cannot be divided among 2 or more parties with "
                f"{shares} each; map each view to its party with views_to_party."
            )
        return {name: place // shares for place, name in enumerate(names)}
    lacking = [name for name in names if name not in shares]
    if lacking:
        raise DataError(
            f"Each view needs a party, but views_to_party lacks {lacking[:20]}; add them."
        )
    return {name: int(shares[name]) for name in names}


def _view(
    name: str,
    parts: Sequence[Sequence[Mapping[str, Path]]],
    views: list[str],
    size: int,
    truth: np.ndarray | None,
    present: np.ndarray | None,
) -> PartyView:
    """One party's images of aligned, unaligned and test objects."""
    files = [objects[view] for part in parts for objects in part for view in views]
    pixels = decode_images(files, size=size)
    x = pixels.reshape(-1, len(views) * pixels.shape[1], size, size)
    recipe = {"kind": "pictures", "views": views, "size": size, "shape": list(x.shape[1:])}
    scaling, rows = pixel_scaling(x.shape[1]), ranges(*map(len, parts))
    return PartyView(name, blank(x, present), *scaling, *rows, truth, recipe, present)
