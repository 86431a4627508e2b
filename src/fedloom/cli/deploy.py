"""The commands `fedloom export`, `embed` and `predict`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.tables import read_csv
from fedloom.deploy.deployed import load_active, load_party
from fedloom.deploy.embeddings import collect_embeddings, prediction_rows, write_embeddings, write_predictions
from fedloom.deploy.export import export as export_run
from fedloom.deploy.folder import ACTIVE, read_manifest
from fedloom.deploy.rows import read_rows

SHOWN = 10
"""Number of rows to print if no file is written."""


def export(run: Path, target: Path | None, force: bool, out: Console) -> None:
    """Write the folders, and print their owners."""
    found = export_run(run, target, force=force)
    table = Table("folder", "for", "holds", box=None, header_style="bold", pad_edge=False)
    table.add_column("kB", justify="right")
    own = "extractor, prototypes and prior" if found.alone else "extractor"
    for name, size in found.sizes.items():
        party = name.removeprefix("party-")
        owner = "the active party" if name in (ACTIVE, "party-0") else f"party {party}"
        holds = "the classifier of all embeddings" if name == ACTIVE else f"{own} ({escape(found.models[name])})"
        table.add_row(name, owner, holds, f"{size / 1000:,.0f}")
    out.print(table)
    if found.round < found.rounds:
        unfinished = f"{found.round} of {found.rounds} rounds"
        out.print(f"The run is not finished: the parties are those after {unfinished}.", soft_wrap=True)
    out.print(f"verified: predictions match the run on {found.tried} test rows")
    out.print(f"written  {found.folder}", soft_wrap=True)


def embed(
    folder: Path, rows: Path, id: str | None, target: Path, force: bool, trust: Collection[str], out: Console
) -> None:
    """Write a party's embeddings of new rows."""
    _free(target, force)
    party = load_party(folder, trust=trust)
    raw, ids = read_rows(rows, party.inputs, id)
    values = party.embed(raw)
    write_embeddings(target, party.manifest, values, ids)
    out.print(f"party {party.number}: {len(values):,} rows, {values.shape[1]} numbers each")
    if ids is None:
        out.print(
            "No --id: the active party cannot check that all parties' rows are of the same people in the same order.",
            soft_wrap=True,
        )
    out.print(f"written  {target}", soft_wrap=True)


def predict(
    folder: Path,
    rows: Path | None,
    embeddings: Sequence[str],
    id: str | None,
    target: Path | None,
    force: bool,
    trust: Collection[str],
    out: Console,
) -> None:
    """Predict with all parties, or with one alone; write or print the predictions."""
    if target is not None:
        _free(target, force)
    ids: list[str] | None
    if read_manifest(folder).role == ACTIVE:
        classes, found, ids = _jointly(folder, rows, embeddings, id, trust, out)
    else:
        if rows is None or embeddings:
            raise ConfigError(
                f"{folder} is the folder of one party, which predicts from its own rows: fedloom predict {folder} "
                "ROWS.csv; use --embeddings with the active party's folder"
            )
        party = load_party(folder, trust=trust)
        raw, ids = read_rows(rows, party.inputs, id)
        classes, found = party.classes, party.predict_alone(raw)
        out.print(f"party {party.number} alone, from its prototypes: {len(found):,} rows")
    heading, names = (id or "row", ids) if ids is not None else ("row", [str(n) for n in range(1, len(found) + 1)])
    if target is not None:
        write_predictions(target, heading, names, classes, found)
    else:
        _show(heading, names, classes, found, out)
    counts = Counter(found.argmax(1).tolist())
    table = Table("class", box=None, header_style="bold", pad_edge=False)
    for title in ("predicted", "mean probability"):
        table.add_column(title, justify="right")
    for number, name in enumerate(classes):
        table.add_row(escape(name), f"{counts[number]:,}", f"{found[:, number].mean():.3f}")
    out.print(table)
    if target is not None:
        out.print(f"written  {target}", soft_wrap=True)


def _jointly(
    folder: Path, rows: Path | None, embeddings: Sequence[str], id: str | None, trust: Collection[str], out: Console
) -> tuple[tuple[str, ...], np.ndarray, list[str] | None]:
    """Classes, probabilities (n, Z), and ids of the people if a file with them was given."""
    if not embeddings or (rows is None) != (id is None):
        raise ConfigError(
            f"{folder} is the active party's folder, which predicts from all parties' embeddings: give a file for "
            "each, --embeddings 0=e0.safetensors --embeddings 1=e1.safetensors …; a CSV file, for the ids of the rows, "
            "needs --id"
        )
    active = load_active(folder, trust=trust)
    ids = None if rows is None or id is None else read_csv(rows, needed=[id])[id]
    parts, sure = collect_embeddings(active.manifest, dict(map(_named, embeddings)), ids)
    found = active.predict(parts)
    if ids is not None and len(ids) != len(found):
        raise DataError(f"{rows} has {len(ids):,} rows, but the embeddings have {len(found):,}.")
    out.print(
        f"all {len(active.manifest.needs)} parties together: {len(found):,} rows" if len(parts) > 1 else "one party"
    )
    if not sure:
        out.print(
            "The embeddings were made without --id: whether their rows are of the same people was not checked.",
            soft_wrap=True,
        )
    return active.classes, found, ids


def _named(text: str) -> tuple[Path, int | None]:
    """`0=e0.safetensors`, or the file alone, which names its party."""
    number, equals, file = text.partition("=")
    return (Path(file), int(number)) if equals and number.isdecimal() else (Path(text), None)


def _show(heading: str, names: Sequence[str], classes: Sequence[str], found: np.ndarray, out: Console) -> None:
    """Print the first rows with the predicted class and its probability."""
    table = Table(escape(heading), "predicted", box=None, header_style="bold", pad_edge=False)
    table.add_column("probability", justify="right")
    rows = list(prediction_rows(names[:SHOWN], classes, found[:SHOWN], digits=3))
    for row, probabilities in zip(rows, found, strict=False):
        table.add_row(escape(row[0]), escape(row[1]), f"{probabilities.max():.3f}")
    out.print(table)
    if len(found) > SHOWN:
        out.print(
            f"… and {len(found) - SHOWN:,} more; --out predictions.csv writes all, with every class's probability"
        )


def _free(target: Path, force: bool) -> None:
    """Refuse to overwrite a file or folder."""
    if target.exists() and not (force and target.is_file()):
        problem = "already exists; add --force to replace it, or" if target.is_file() else "is a folder;"
        raise ConfigError(f"{target} {problem} choose another --out")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist; create it, or choose another --out")
