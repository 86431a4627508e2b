"""The command `fedloom trial`: options and files around `fedloom.experiment.trial.trial`, which
does the work. Its errors and notes name settings, and are printed with the options of this command
in their place (`as_options`).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from fedloom.cli.options import (
    AsJson,
    Force,
    IdColumn,
    Seed,
    err,
    print_plain,
    standard_input,
    written,
)
from fedloom.cli.trial_words import as_options, show
from fedloom.core.errors import ConfigError, DataError, did_you_mean


def trial(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA.csv...",
            help="All owners' rows: CSV, Parquet, a folder of pictures, or - for standard input. "
            "Several: other columns of the same people.",
        ),
    ],
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="For a table: the column to predict.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="For a table: the column of owners, such as hospitals."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="A column that is no feature, such as an id. Repeatable."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="The only features; '*' stands for any text. Repeatable."
        ),
    ] = None,
    id: IdColumn = None,
    missing: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="Missing numbers: refuse, median, most-frequent or indicator."
        ),
    ] = "indicator",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help="classes: whole numbers in the label are names of classes."
        ),
    ] = None,
    missing_word: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="The only words for a missing value. Repeatable."),
    ] = None,
    decimal: Annotated[
        str, typer.Option(metavar="SIGN", help="The sign before decimals, '.' or ','.")
    ] = ".",
    missing_columns: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="allow: files of a folder may have different columns. Default: refuse.",
        ),
    ] = "refuse",
    encode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=KIND",
            help="Take a column as a number, category, text or date. Repeatable.",
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Rows of one value, such as a patient's, are never split."
        ),
    ] = None,
    time: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Order in time: test after training. Repeatable. Default: found by name.",
        ),
    ] = None,
    no_time: Annotated[
        bool, typer.Option("--no-time", help="Random splits, also of rows that have a time.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Such as 90s, 10m or 2h. Default: 10m, or none with --repeats."
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Repeats of the 4 folds, at most. Without --budget, results repeat exactly."
        ),
    ] = None,
    splits: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A method to try. Repeatable. Default: a short list."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="auc, accuracy, 'balanced accuracy', 'log loss', brier, rmse, mae or r2. "
            "Default: by the label.",
        ),
    ] = None,
    worth: Annotated[
        float, typer.Option(help="The smallest gain that is worth federating for.")
    ] = 0.01,
    seed: Seed = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="A folder for trial.json, trial.html and recipe.toml."),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print one line for each owner and nothing else.")
    ] = False,
    force: Force = False,
) -> None:
    """Find out whether owners should federate, how, and who gains.

    [bold]fedloom trial heart.csv --label disease --group hospital[/]

    [bold]fedloom trial watch.csv --label activity --group person --unit recording --out
    trials/watch[/]

    [bold]fedloom trial days.csv --label tomorrow --group station --time year --time month --time
    day[/]

    [bold]fedloom trial pictures[/]  (a folder for each owner, and in it one for each class)

    [bold]fedloom trial clinic.csv lab.csv --id patient --label disease[/]  (other columns of the
    same people)

    Columns are understood as by [bold]fedloom data[/], which lists them.

    Each owner gets one card: join, stay alone, no difference, or undecided, with probabilities and
    what to do next. It compares the best method for federating with the best training alone, by
    predictions of rows that they were not trained on. [bold]fedloom run trials/watch/recipe.toml[/]
    trains what was advised.
    """
    if splits is not None:
        err.print(
            "--splits is deprecated: set --repeats. Every row is predicted once in each repeat "
            "of 4 folds."
        )
        repeats = repeats or splits
    from fedloom.data.grammar import MISSING_WORDS, Decimal
    from fedloom.data.options import Missing, MissingColumns, Task

    # Everything that can be refused is refused before the trial, which takes minutes. These options
    # are words of a few, which typer cannot know without importing the library for --help.
    for name, value, kind in (
        ("missing", missing, Missing), ("task", task, Task), ("decimal", decimal, Decimal),
        ("missing-columns", missing_columns, MissingColumns),
    ):  # fmt: skip
        if value is not None and value not in get_args(kind):
            raise ConfigError(f"--{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
    # what the result is called; from then on `files` has a copy in place of standard input
    name = ", ".join("standard input" if str(data) == "-" else data.name for data in files)
    piped = any(str(data) == "-" for data in files)
    files = [Path(standard_input(str(data), ".csv")) for data in files]
    for data in files:
        if not data.expanduser().exists():
            beside = [one.name for one in data.parent.glob("*")] if data.parent.is_dir() else []
            raise ConfigError(
                f"there is no file or folder {data}.{did_you_mean(data.name, beside)}"
            )
    # in this order: the result, its page, and the settings of the run that it advises
    written_files = (
        []
        if folder is None
        else [folder / name for name in ("trial.json", "trial.html", "recipe.toml")]
    )
    existing = next((file for file in written_files if file.exists()), None)
    if existing and not force:
        raise ConfigError(
            f"{existing} already exists; add --force to replace it, or choose another --out"
        )

    from fedloom.experiment.trial import trial as run

    def progress(done: int, count: int, spent: float) -> None:
        # to standard error, so that the answer alone can be piped
        if not (quiet or as_json):
            err.print(f"{done} of at most {count} trainings, {spent:.0f} s")

    # None is not passed on: the trial has its own number of repeats
    limits: dict[str, Any] = {} if repeats is None else {"repeats": repeats}
    try:
        result = run(
            files[0] if len(files) == 1 else files,
            label=label,
            group=group,
            drop=drop or (),
            keep=keep or (),
            id=id,
            missing=cast(Missing, missing),
            task=cast(Task | None, task),
            missing_words=MISSING_WORDS if missing_word is None else missing_word,
            decimal=cast(Decimal, decimal),
            missing_columns=cast(MissingColumns, missing_columns),
            encode=_kinds(encode or ()),
            unit=unit,
            time=() if no_time else time,
            # without a limit equal seeds give equal results, which is what --repeats asks for; a
            # trial of columns takes no limit
            budget=budget or (None if repeats or len(files) > 1 else "10m"),
            progress=progress,
            methods=tuple(method or ()),
            metric=metric,
            worth=worth,
            seed=seed or 0,
            **limits,
        )
    # the same kind of error in other words; anything else is a fault of the program
    except (DataError, ConfigError) as error:
        of_settings = isinstance(error, ConfigError)
        raise (ConfigError if of_settings else DataError)(as_options(str(error))) from None
    result = replace(result, notes=[as_options(note) for note in result.notes])
    text = json.dumps(result.content(), indent=1, ensure_ascii=False, allow_nan=False)
    if folder is not None:
        import tomli_w

        from fedloom.report import trial_page

        folder.mkdir(parents=True, exist_ok=True)
        written_files[0].write_text(text + "\n", encoding="utf-8")
        written_files[1].write_text(
            trial_page.html(result, name, str(written_files[2])), encoding="utf-8"
        )
        if result.recipe:
            recipe = dict(result.recipe)
            if piped:  # the copy of standard input is gone when the recipe is run
                recipe["data"] = {**recipe["data"], "name": "rows.csv"}
                err.print("recipe.toml: save the rows as rows.csv beside you before you run it")
            written_files[2].write_text(tomli_w.dumps(recipe), encoding="utf-8")
        else:  # data in memory, which no file of settings can name
            del written_files[2]

    # what is printed: everything, a line for each owner, or cards and the files that were written
    if as_json:
        print_plain(text)
    elif quiet:
        print_plain(str(result))
    else:
        show(result, name, written_files[2] if len(written_files) > 2 else None)
        for file in written_files:
            written("written", file)


def _kinds(encode: Sequence[str]) -> dict[str, Any]:
    """Column -> its kind, of entries such as "zip=category"."""
    from fedloom.data.options import Kind

    found = {}
    for entry in encode:
        column, _, kind = entry.rpartition("=")
        if not column or kind not in get_args(Kind):
            raise ConfigError(
                f"--encode must be COLUMN=KIND, with a kind of {', '.join(get_args(Kind))}, not "
                f"{entry!r}"
            )
        found[column] = kind
    return found
