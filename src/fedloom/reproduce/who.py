"""Who holds what, and who chose whom, in the first seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report.heatmaps import class_counts, rows_legend
from fedloom.report.mixing import chosen
from fedloom.report.page import Figure
from fedloom.report.read import Run
from fedloom.reproduce.found import Found
from fedloom.reproduce.picture import Picture, picture


def holders(found: Found) -> Picture | None:
    """Who holds what in each column, in the first seed."""
    figures, rows, most = list[Figure](), list[Sequence[Any]](), 0
    header = ("column", "seed", "party", "class", "rows")
    for number, column in enumerate(found.columns):
        run = _first(found, column)
        if run is None or run.partition.apart:
            continue
        held = run.partition
        if held.parties is None:
            counts, names = np.array(held.counts), list[str]()
            parties = list(run.names)
        else:
            known = [p for p in held.parties.parties if p.unaligned_counts is not None and p.unaligned]
            counts = np.array([held.parties.aligned_counts, *(p.unaligned_counts for p in known)], dtype=int)
            parties = names = ["aligned", *(p.name for p in known)]
        most = max(most, int(counts.max()))
        kinds = fmt.times(counts.shape[1], "class", "classes")
        alt = f"{column}: rows of {kinds} at {fmt.times(len(counts), 'holder')}, at most {counts.max()} in a cell."
        svg = class_counts(f"holdings {number}", alt, counts, held.classes, names)
        figures.append(Figure(column, svg, (rows_legend(int(counts.max())),), wide=len(counts) > 20))
        rows += [
            (column, run.summary.seed, party, kind, int(count))
            for party, line in zip(parties, counts, strict=True)
            for kind, count in zip(held.classes, line, strict=True)
        ]
    text = "Training rows by class and holder in the first seed; seeds differ in who holds what."
    return picture("holdings", "Who holds what", text, figures, header, rows)


def choices(found: Found) -> Picture | None:
    """Whose models each client took, for the first row that notes it."""
    figures, rows, row = list[Figure](), list[Sequence[Any]](), ""
    header = ("row", "column", "seed", "round", "party", "other", "weight")
    for column in found.columns:
        mixed = [name for name in found.rows if (run := _first(found, column, name)) is not None and run.mixing]
        row = row or (mixed[0] if mixed else "")
        run = _first(found, column, row) if row in mixed else None
        section = None if run is None else chosen(run)
        if run is None or section is None:
            continue
        figures += [replace(figure, title=f"{column}: {figure.title}") for figure in section.figures[:1]]
        rows += [
            (row, column, run.summary.seed, round, run.names[i], run.names[j], float(weights[i, j]))
            for round, weights in run.mixing.items()
            for i, j in np.argwhere(weights > 0)
        ]
    return picture("choices", "Who chose whom", f"{row} in the first seed.", figures, header, rows)


def _first(found: Found, column: str, row: str | None = None) -> Run | None:
    """The run of the lowest seed in a column, of a row or of the first that has one."""
    names = found.rows if row is None else [row]
    runs = [run for name in names if (name, column) in found.places for run in found.places[name, column].runs]
    return min(runs, key=lambda run: run.summary.seed) if runs else None
