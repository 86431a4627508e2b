"""The commands `fedloom export`, `embed` and `predict`.

`fedloom export` makes two kinds of folders. Of a horizontal run each has a model, which predicts
from rows. Of a vertical run each is of one party: the active one predicts from the embeddings that
`fedloom embed` makes of every party's rows, or another one alone, where the method allows it.
Functions import what needs PyTorch themselves, so that --help is fast.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedloom.cli.options import Force, IdColumn, Trust, out, plain_table, standard_input, written
from fedloom.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

    from fedloom.deploy.deployed import DeployedActive
    from fedloom.deploy.embeddings import Embeddings

SHOWN = 10
"""Number of rows to print if no file is written."""


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="The folder to write to. Default: RUN/export.")
    ] = None,
    force: Force = False,
    trust: Trust = None,
) -> None:
    """Export each trained model to a folder of its own, for use on new rows.

    [bold]fedloom run fedavg -s data.name=breast_cancer --out runs/mine[/]

    [bold]fedloom export runs/mine --out models[/]  (models/client-0, client-1, …, and server)

    Plain PyTorch opens them: python models/server/predict.py ROWS.csv. So does fedloom predict
        models/server ROWS.csv.

    A vertical run gives parties/party-0, party-1, …, and active. A folder holds nothing of another
    party: no row, no
    label, no weight. Then: fedloom embed, fedloom predict.
    """
    from fedloom.deploy.export import export as export_run
    from fedloom.deploy.export_models import SERVER
    from fedloom.deploy.folder import ACTIVE

    exported = export_run(run, folder, force=force, trust=trust or ())
    table = plain_table("folder", "for", "holds", numbers=("kB",))
    own = "extractor, prototypes and prior" if exported.alone else "extractor"
    for name, size in exported.sizes.items():
        if not exported.vertical:
            shared = name == SERVER
            holds = f"the {'shared model' if shared else 'model'} ({escape(exported.models[name])})"
            table.add_row(name, "everybody" if shared else name, holds, f"{size / 1000:,.0f}")
            continue
        owner = (
            "the active party"
            if name in (ACTIVE, "party-0")
            else f"party {name.removeprefix('party-')}"
        )
        if exported.bins:
            holds = (
                "the forests over all parties' bins"
                if name == ACTIVE
                else "the bins of its columns"
            )
        else:
            holds = (
                "the classifier of all embeddings"
                if name == ACTIVE
                else f"{own} ({escape(exported.models[name])})"
            )
        table.add_row(name, owner, holds, f"{size / 1000:,.0f}")
    out.print(table)
    for name, reason in exported.skipped.items():
        out.print(f"no folder for {escape(name)}: {escape(reason)}", soft_wrap=True)
    if exported.round < exported.rounds:
        out.print(
            f"The run is unfinished: the folders hold the models after {exported.round} of "
            f"{exported.rounds} rounds.",
            soft_wrap=True,
        )
    out.print(f"verified: predictions match the run on {exported.tried} {exported.on}")
    written("written", exported.folder)


def embed(
    folder: Annotated[
        Path, typer.Argument(metavar="PARTY_FOLDER", help="A party's folder, from fedloom export.")
    ],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS.csv",
            help="New rows with the party's own columns, - for standard input; or a list of "
            "images, or .npy.",
        ),
    ],
    target: Annotated[Path, typer.Option("--out", help="The file to write.")],
    id_: IdColumn = None,
    force: Force = False,
    trust: Trust = None,
) -> None:
    """Embed new rows at one party, for the active party to predict from.

    [bold]fedloom embed parties/party-1 lab.csv --id patient --out e1.safetensors[/]

    Columns may be in any order, and others are ignored.

    With --id the file has a digest of the order of the people, so that mismatched rows are refused;
    it has no id.

    Images: a CSV file that lists files, in the column path or one for each view; or uint8 (n, C, H,
        W) in a .npy.
    """
    from fedloom.deploy.deployed import load_party
    from fedloom.deploy.embeddings import write_embeddings
    from fedloom.deploy.rows import read_rows

    _refuse_overwrite(target, force)
    party = load_party(folder, trust=trust or ())
    raw, ids = read_rows(Path(standard_input(str(rows), ".csv")), party.inputs.recipe, id_)
    embeddings = party.embed(raw, ids)
    write_embeddings(target, embeddings)
    out.print(
        f"party {party.number}: {len(embeddings):,} rows, {embeddings.values.shape[1]} numbers each"
    )
    if ids is None:
        out.print(
            "No --id: the active party cannot check that all parties' rows are of the same "
            "people in the same order.",
            soft_wrap=True,
        )
    written("written", target)


def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of fedloom export.")],
    rows: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROWS.csv",
            help="New rows, - for standard input; at active, a file with the ids.",
        ),
    ] = None,
    embeddings: Annotated[
        list[str] | None,
        typer.Option(
            "--embeddings", "-e", metavar="N=FILE", help="A party's embeddings, from fedloom embed."
        ),
    ] = None,
    id_: IdColumn = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", help="A CSV file to write. Default: print the first rows."),
    ] = None,
    force: Force = False,
    trust: Trust = None,
) -> None:
    """Predict new rows: with a client's model, jointly at the active party, or at one party alone.

    [bold]fedloom predict models/server new.csv --out predictions.csv[/]

    [bold]fedloom predict parties/active -e 0=e0.safetensors -e 1=e1.safetensors --out
    predictions.csv[/]

    [bold]fedloom predict parties/active clinic.csv --id patient -e 0=e0.safetensors -e
    1=e1.safetensors[/]

    [bold]fedloom predict parties/party-1 lab.csv --id patient[/]  (alone, from its prototypes:
    proto-evfl)

    The CSV file has the id or the row's number, the predicted class, and a probability for each
    class; or the predicted number, in the unit of the label.
    """
    from fedloom.deploy.deployed import load_party
    from fedloom.deploy.embeddings import write_predictions
    from fedloom.deploy.folder import ACTIVE, read_manifest
    from fedloom.deploy.models import MODEL, load_model
    from fedloom.deploy.rows import read_rows

    if target is not None:
        _refuse_overwrite(target, force)
    # "-" is read into a file, which is removed at the end
    rows = None if rows is None else Path(standard_input(str(rows), ".csv"))

    # By the kind of folder: `classes` (K names), `shares` (n, K) with the probability of each, or
    # (n, …) of numbers, which are shown at once; and the ids of the n rows, None if they have none.
    ids: list[str] | None
    if (folder / MODEL).is_file():
        if rows is None or embeddings:
            raise ConfigError(
                f"{folder} has a model, which predicts from rows: fedloom predict {folder} ROWS.csv"
            )
        # `trust` names the folder's network.py, whose code is run only then
        model = load_model(folder, trust=trust or ())
        raw, ids = read_rows(rows, model.recipe, id_)
        classes, shares = model.classes, model.predict(raw)
        out.print(f"{model.manifest.owner}, {model.manifest.method}: {len(shares):,} rows")
        if model.manifest.number is not None:
            _numbers(model.manifest.number.names, shares, ids, id_, target)
            return
    elif read_manifest(folder).role == ACTIVE:
        active, shares, ids = _jointly(folder, rows, embeddings or (), id_, trust or ())
        classes = active.classes
        if active.manifest.number is not None:
            _numbers(active.manifest.number.names, shares, ids, id_, target)
            return
    else:
        if rows is None or embeddings:
            raise ConfigError(
                f"{folder} is the folder of one party, which predicts from its own rows: fedloom "
                f"predict {folder} ROWS.csv; use --embeddings with the active party's folder"
            )
        party = load_party(folder, trust=trust or ())
        raw, ids = read_rows(rows, party.inputs.recipe, id_)
        classes, shares = party.classes, party.predict_alone(raw)
        out.print(f"party {party.number} alone, from its prototypes: {len(shares):,} rows")

    # probabilities of classes: a table in a file, or the first rows; and how often each class is
    # the most probable one
    heading, names = (
        ("row", [str(n) for n in range(1, len(shares) + 1)]) if ids is None else (id_ or "row", ids)
    )
    if target is not None:
        write_predictions(target, heading, names, classes, shares)
    else:
        _show(heading, names, classes, shares)
    counts = Counter(shares.argmax(1).tolist())
    table = plain_table("class", numbers=("predicted", "mean probability"))
    for number, name in enumerate(classes):
        table.add_row(escape(name), f"{counts[number]:,}", f"{shares[:, number].mean():.3f}")
    out.print(table)
    if target is not None:
        written("written", target)


def _jointly(
    folder: Path,
    rows: Path | None,
    embeddings: Sequence[str],
    id: str | None,
    trust: Collection[str],
) -> "tuple[DeployedActive, np.ndarray, list[str] | None]":
    """The active party, probabilities (n, Z) or numbers, and ids of the people if a file with them
    was given.
    """
    from fedloom.data.hub import read_table
    from fedloom.deploy.deployed import load_active

    if not embeddings or (rows is None) != (id is None):
        raise ConfigError(
            f"{folder} is the active party's folder, which predicts from all parties' "
            "embeddings: give a file for each, --embeddings 0=e0.safetensors --embeddings "
            "1=e1.safetensors …; a CSV file, for the ids of the rows, needs --id"
        )
    active = load_active(folder, trust=trust)
    ids = None if rows is None or id is None else read_table(rows, needed=[id])[id].text
    parts = [_read_embeddings(text) for text in embeddings]
    shares = active.predict(parts, ids)
    needed = len(active.manifest.needs)
    who = (
        f"all {needed} parties together"
        if len(parts) == needed
        else f"{len(parts)} of {needed} parties"
    )
    out.print(f"{who}: {len(shares):,} rows" if needed > 1 else "one party")
    if not parts[0].order:
        out.print(
            "The embeddings were made without --id: whether their rows are of the same people "
            "was not checked.",
            soft_wrap=True,
        )
    return active, shares, ids


def _read_embeddings(text: str) -> "Embeddings":
    """The embeddings of `0=e0.safetensors`, or of a file that names its party itself."""
    from fedloom.deploy.embeddings import read_embeddings

    number, equals, file = text.partition("=")
    numbered = bool(equals) and number.isdecimal()
    path = Path(file if numbered else text)
    embeddings = read_embeddings(path)
    if numbered and embeddings.party != int(number):
        raise DataError(
            f"{path} holds embeddings of party {embeddings.party}, not of party {number}."
        )
    return embeddings


def _numbers(
    labels: Sequence[str],
    numbers: "np.ndarray",
    ids: Sequence[str] | None,
    id: str | None,
    target: Path | None,
) -> None:
    """Write predicted numbers (n, W), or print the first rows, and their range."""
    from fedloom.deploy.embeddings import write_numbers

    heading, names = (
        ("row", [str(n) for n in range(1, len(numbers) + 1)]) if ids is None else (id or "row", ids)
    )
    if target is not None:
        write_numbers(target, heading, names, labels, numbers)
    else:
        table = plain_table(escape(heading), numbers=tuple(escape(label) for label in labels))
        for name, row in zip(names[:SHOWN], numbers, strict=False):
            table.add_row(escape(name), *(f"{value:,.6g}" for value in row))
        out.print(table)
        if len(numbers) > SHOWN:
            out.print(f"… and {len(numbers) - SHOWN:,} more; --out predictions.csv writes all")
    first = numbers[:, 0]
    out.print(
        f"{escape(labels[0])} from {first.min():,.6g} to {first.max():,.6g}, mean "
        f"{first.mean():,.6g}"
    )
    if target is not None:
        written("written", target)


def _show(heading: str, names: Sequence[str], classes: Sequence[str], shares: "np.ndarray") -> None:
    """Print the first rows with the predicted class and its probability."""
    from fedloom.deploy.embeddings import prediction_rows

    table = plain_table(escape(heading), "predicted", numbers=("probability",))
    rows = prediction_rows(names[:SHOWN], classes, shares[:SHOWN], digits=3)
    for row, probabilities in zip(rows, shares, strict=False):
        table.add_row(escape(row[0]), escape(row[1]), f"{probabilities.max():.3f}")
    out.print(table)
    if len(shares) > SHOWN:
        out.print(
            f"… and {len(shares) - SHOWN:,} more; --out predictions.csv writes all, with every "
            "class's probability"
        )


def _refuse_overwrite(target: Path, force: bool) -> None:
    if target.exists() and not (force and target.is_file()):
        problem = (
            "already exists; add --force to replace it, or" if target.is_file() else "is a folder;"
        )
        raise ConfigError(f"{target} {problem} choose another --out")
    if not target.absolute().parent.is_dir():
        raise ConfigError(
            f"the folder {target.parent} does not exist; create it, or choose another --out"
        )
