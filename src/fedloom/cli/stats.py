"""The command `fedloom stats`."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.markup import escape

from fedloom.cli.options import AsJson, Force, IdColumn, out, standard_input, written
from fedloom.core.errors import ConfigError

if TYPE_CHECKING:
    from fedloom.core.party import LearnedTable


def stats(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.csv|RUN.toml",
            help="All owners' rows, - for standard input; or, for rows at nodes, the file of a "
            "run.",
        ),
    ],
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column to predict.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column of the owners.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column to leave out. Repeatable.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="The only columns. Repeatable.")
    ] = None,
    id: IdColumn = None,
    missing_word: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="The only words for a missing value. Repeatable."),
    ] = None,
    decimal: Annotated[
        str, typer.Option(metavar="SIGN", help="The sign before decimals, '.' or ','.")
    ] = ".",
    min_cell: Annotated[int, typer.Option(min=1, help="The smallest count that is shown.")] = 5,
    federation: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="With RUN.toml: the nodes that have the rows."),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml", help=r"Write \[data.row_schema] with the agreed scale and words."
        ),
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Show Table 1 over owners before training: rows, missing values, means, quartiles, words, and
    drift.

    [bold]fedloom stats heart.csv --label disease --group hospital[/]

    [bold]fedloom stats heart.csv --label disease --group hospital --schema schema.toml[/]

    [bold]fedloom stats run.toml --federation fed/federation.toml[/]  (rows stay at nodes; add
    --schema for the scale)

    Only sums over owners are used, from three owners on secure ones. Small counts are hidden. Drift
    is the share of a column's variance that lies between owners, and Cramér's V for words.
    """
    if schema is not None and schema.exists() and not force:
        raise ConfigError(f"{schema} already exists; add --force to replace it")
    data = Path(standard_input(str(data), ".csv"))
    if not data.expanduser().exists():
        raise ConfigError(f"there is no file or folder {data}")
    if data.suffix == ".toml":
        if given := [
            f"--{name}" for name, value in (("label", label), ("group", group), ("id", id)) if value
        ]:
            raise ConfigError(f"{', '.join(given)}: the file of a run says this in [data]")
        tables, agreed = _at_nodes(data, federation, min_cell)
    else:
        if federation is not None:
            raise ConfigError(
                "--federation needs the file of a run: fedloom stats run.toml --federation "
                "FILE.toml"
            )
        tables, agreed = _here(
            data, label, group, drop, keep, id, missing_word, decimal, min_cell, as_json
        )
    if as_json:
        shown = {"tables": tables, "row_schema": agreed}
        typer.echo(json.dumps(shown, ensure_ascii=False, allow_nan=False))
    else:
        from fedloom.report.terminal import show_learned

        show_learned(tables, out)
    if schema is not None:
        import tomli_w

        schema.write_text(tomli_w.dumps({"data": {"row_schema": agreed}}), encoding="utf-8")
        if not as_json:
            written("written", schema)


def _here(
    data: Path,
    label: str | None,
    group: str | None,
    drop: list[str] | None,
    keep: list[str] | None,
    id: str | None,
    missing_word: list[str] | None,
    decimal: str,
    min_cell: int,
    as_json: bool,
) -> tuple[list[dict[str, Any]], Any]:
    """The tables and the schema of a file with all owners' rows."""
    from fedloom.data.grammar import MISSING_WORDS, Decimal
    from fedloom.experiment.stats import stats as run

    if decimal not in get_args(Decimal):
        raise ConfigError(
            f"--decimal must be one of {', '.join(get_args(Decimal))}, not {decimal!r}"
        )
    found = run(
        data,
        label=label,
        group=group,
        drop=drop or (),
        keep=keep or (),
        id=id,
        missing_words=MISSING_WORDS if missing_word is None else missing_word,
        decimal=cast(Decimal, decimal),
        min_cell=min_cell,
    )
    if not as_json:
        for note in found.notes:
            out.print(f"note: {escape(note)}", soft_wrap=True)
        out.print(
            f"{data.name}: {len(found.owners)} owners, each of which sends {found.sent:,} bytes"
        )
    return [plain(table) for table in found.tables], found.schema


def _at_nodes(
    config: Path, federation: Path | None, min_cell: int
) -> tuple[list[dict[str, Any]], Any]:
    """The tables and the schema of a run whose rows may stay at nodes."""
    from fedloom.experiment.plan.reading import read
    from fedloom.experiment.run.engine import Backend, local_backend
    from fedloom.experiment.stats import FEWEST, of_run, row_schema

    engine = {"name": "net", "federation": str(federation)} if federation is not None else None
    flags = {"method": "stats", "rounds": 1, "engine": engine}
    asked = (f"params.min_cell={min_cell}",)
    run = read(str(config), asked, flags).run
    if run.data.clients >= FEWEST and not run.aggregate.secure:
        run = read(str(config), (*asked, "aggregate.secure=true"), flags).run
    form = run.data.row_schema
    place: Callable[..., Backend] = local_backend
    if run.engine.name == "net":
        from fedloom.remote import coordinator

        place = coordinator.backend
    tables = list(of_run(run, place))
    if form is None:
        return [plain(table) for table in tables], None
    columns = [(column.name, column.categories) for column in form.columns]
    return [plain(table) for table in tables], row_schema(columns, form.classes, form.label, tables)


def plain(table: "LearnedTable") -> dict[str, Any]:
    """The table as JSON has it."""
    return asdict(table)
