"""A simulated vertical federation: the columns of a data set divided among parties."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.data.dataset import Dataset
from fedloom.data.images import crop_cells, default_grid, grid_cells
from fedloom.data.options import GUESS, DataOptions
from fedloom.data.presence import RowPresence, had
from fedloom.data.sources import load_raw
from fedloom.data.split import check_settings, hold_out
from fedloom.data.tables import RawTable, typed
from fedloom.data.vertical import PartyView, VerticalDataset, blank, ranges, scale_of, table_view
from fedloom.data.vertical_split import alignment_order, deal_unaligned, first_rows, mixes


def simulate(
    name: str,
    *,
    parties: int,
    seed: int,
    root: Path | None = None,
    aligned: int = 200,
    unaligned: int | None = None,
    blocks_per_party: int | None = None,
    grid: tuple[int, int] | None = None,
    imbalance_ratio: float | Sequence[float] = 1.0,
    majority_classes: int = 1,
    rare_classes: Sequence[int] = (),
    rare_rows: int = 0,
    balanced: bool | None = None,
    test_fraction: float = 0.25,
    test_rows: int | None = None,
    validation: float = 0.0,
    everything: bool = False,
    options: DataOptions = GUESS,
    presence: RowPresence | None = None,
) -> VerticalDataset:
    """Divide the columns of a data set among parties.

    Images are cut into a grid of cells, and columns into blocks; party m holds `blocks_per_party`
    of them from number m on, cyclically. Draws have separate random streams: the test rows, those
    of `fedloom.data.split`, do not depend on the number of parties or of aligned rows, and 200
    aligned rows are the first of 600. Unaligned rows are of different people at each party, none of
    them aligned or tested.

    Args:
        name: as for `fedloom.data.sources.load`.
        parties: number of parties, at least 2.
        seed: of the run.
        root: the data root.
        aligned: number of aligned rows, labeled at the first party.
        unaligned: number of unaligned rows of each party; None for the largest possible.
        blocks_per_party: number of cells or blocks of each party; None for 2, or 1 for two parties.
        grid: cells of an image as (rows, columns); None for one for each party
            (`images.default_grid`).
        imbalance_ratio: majority class : minority class among the unaligned rows, for all parties
            or each; 1 is the mix of all rows.
        majority_classes: number of random majority classes of each party if the ratio is above 1;
            of two classes class 0.
        rare_classes: classes with at most `rare_rows` aligned rows; other classes replace them.
        rare_rows: 0 for zero-shot, a few for few-shot.
        balanced: whether the aligned rows are drawn evenly over the classes, as far as they have
            rows; None: for images only.
        test_fraction: the share of each class that is tested if there is no official test split.
        test_rows: maximum number of test rows, a random sample; None keeps all.
        validation: see `fedloom.data.split.hold_out`.
        everything: the upper bound: all unaligned rows become aligned and labeled, with all views.
        options: the meaning of a file's columns.
        presence: which aligned and test rows each party has, by their numbers in the data set; None
            for all.

    Raises:
        DataError: the data cannot be read, a setting is invalid, or there are too few rows.
    """
    # settings: `held` cells or blocks of each party, and the ratio of each
    data = load_raw(name, root=root, options=options)
    held = blocks_per_party if blocks_per_party is not None else min(2, parties - 1)
    ratio = imbalance_ratio
    ratios = (
        [float(value) for value in ratio]
        if isinstance(ratio, Sequence)
        else [float(ratio)] * parties
    )
    check_settings(
        (aligned >= 1, "aligned", "at least 1", aligned),
        (unaligned is None or unaligned >= 0, "unaligned", "at least 0", unaligned),
        (rare_rows >= 0, "rare_rows", "at least 0", rare_rows),
        (test_rows is None or test_rows >= 1, "test_rows", "at least 1", test_rows),
        (parties >= 2, "parties", "at least 2", parties),
        (
            data.test is not None or 0 < test_fraction < 1,
            "test_fraction",
            "between 0 and 1",
            test_fraction,
        ),
    )
    parts, names = data.strata  # classes, or of a number the parts of its range
    _check_classes(names, ratios, parties=parties, majority=majority_classes, rare=rare_classes)

    # the columns of each party: its cells of an image, or its columns by name
    columns_of = (
        _cells(data, parties, held, grid)
        if isinstance(data, Dataset)
        else _blocks(data, parties, held, grid, seed)
    )

    # the rows: `test` are numbers of all rows, all others places in the pool of those not held out
    out = hold_out(
        parts, data.test, seed=seed, fraction=test_fraction, limit=test_rows, validation=validation
    )
    pool, test = np.setdiff1d(np.arange(len(data.y)), out.apart), out.kept
    y = parts[pool]
    order = alignment_order(
        y, balanced=isinstance(data, Dataset) if balanced is None else balanced, seed=seed
    )
    chosen = first_rows(order, y, aligned, rare=rare_classes, rare_rows=rare_rows)
    shares = mixes(y, len(names), ratios=ratios, majority=majority_classes, seed=seed)
    own = deal_unaligned(order, y, chosen, shares, rows=unaligned, seed=seed, classes=names)
    if everything:
        chosen, own = np.concatenate([chosen, *own]), [np.empty(0, dtype=np.int64)] * parties
    views = [
        _view(
            data,
            f"party-{party}",
            part,
            pool[chosen],
            pool[rows],
            test,
            had(presence, party, pool[chosen].tolist(), len(rows), test.tolist()),
        )
        for party, (part, rows) in enumerate(zip(columns_of, own, strict=True))
    ]

    # the labels as they were read
    labels, range_parts = data.y[pool][chosen], None
    target = (0.0, 1.0)
    if not data.classes:
        target, range_parts = scale_of(labels), (names, y[chosen], parts[test])
    return VerticalDataset(
        data.name,
        views[0].kind,
        data.classes,
        tuple(views),
        labels,
        data.y[test],
        data.label,
        target,
        range_parts,
    )


def _check_classes(
    classes: tuple[str, ...],
    ratios: list[float],
    *,
    parties: int,
    majority: int,
    rare: Sequence[int],
) -> None:
    if len(ratios) != parties or not all(1 <= ratio < float("inf") for ratio in ratios):
        raise DataError(
            f"imbalance_ratio must be one number of at least 1, or one for each of {parties} "
            f"parties, not {ratios}."
        )
    if max(ratios) > 1 and not 1 <= majority < len(classes):
        raise DataError(
            f"majority_classes must be from 1 to {len(classes) - 1} for {len(classes)} classes, "
            f"not {majority}."
        )
    if not set(rare) < set(range(len(classes))):
        raise DataError(
            f"rare_classes must be a proper subset of the classes 0..{len(classes) - 1}, not "
            f"{list(rare)}."
        )


def _cells(
    data: Dataset, parties: int, held: int, grid: tuple[int, int] | None
) -> list[dict[str, Any]]:
    """The recipe of each party's cells."""
    rows, columns = grid or default_grid(parties)
    number = len(grid_cells((data.x.shape[2], data.x.shape[3]), (rows, columns)))
    _check_held(parties, held, number, f"cells of a {rows}x{columns} grid")
    shape = {"kind": "cells", "shape": list(data.input_shape), "grid": [rows, columns]}
    return [
        {**shape, "cells": [(party + step) % number for step in range(held)]}
        for party in range(parties)
    ]


def _blocks(
    data: RawTable, parties: int, held: int, grid: tuple[int, int] | None, seed: int
) -> list[dict[str, np.ndarray]]:
    """Each party's raw columns, in the order of the file."""
    if grid is not None:
        raise DataError(f"grid applies to images, but {data.name!r} is a table; leave it out.")
    names = list(data.columns)
    if len(names) < parties:
        raise DataError(
            f"{parties} parties need at least {parties} columns, but {data.name!r} has "
            f"{len(names)}."
        )
    _check_held(parties, held, parties, "blocks of columns")
    blocks = np.array_split(stream(seed, "columns.blocks").permutation(len(names)), parties)
    takes = [[blocks[(party + step) % parties] for step in range(held)] for party in range(parties)]
    columns = {name: typed(name, values) for name, values in data.columns.items()}
    return [
        {names[place]: columns[names[place]] for place in np.sort(np.concatenate(take))}
        for take in takes
    ]


def _check_held(parties: int, held: int, number: int, what: str) -> None:
    if not 1 <= held <= number or number < parties:
        raise DataError(
            f"{parties} parties with {held} each do not fit {number} {what}: at least {parties} "
            f"are needed, and blocks_per_party must be from 1 to {number}."
        )


def _view(
    data: Dataset | RawTable,
    name: str,
    part: dict[str, Any],
    aligned: np.ndarray,
    own: np.ndarray,
    test: np.ndarray,
    present: np.ndarray | None,
) -> PartyView:
    """One party's rows: aligned, unaligned, then test rows."""
    rows, parts = np.concatenate([aligned, own, test]), ranges(len(aligned), len(own), len(test))
    if isinstance(data, Dataset):
        x = crop_cells(data.x, tuple(part["grid"]), part["cells"], rows)
        shift, scale = (np.tile(level, len(part["cells"])) for level in (data.shift, data.scale))
        return PartyView(
            name, blank(x, present), shift, scale, *parts, data.strata[0][own], part, present
        )
    columns = {column: values[rows] for column, values in part.items()}
    return table_view(name, columns, *parts, data.strata[0][own], present)
