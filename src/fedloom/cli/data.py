"""The commands `fedloom data` and `fedloom align`.

`fedloom data` shows one of three things: how the columns of a file are read
(`_print_understanding`), the sections for a run whose rows stay at nodes (`_print_sections`), or
how a partition divides the rows of a file or a data set over clients. The first two look at the
file as a run does, but leave out what a run would refuse: see `_first_look`.
"""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedloom.cli.listing import completing
from fedloom.cli.options import (
    AsJson,
    Seed,
    Settings,
    out,
    plain_table,
    print_plain,
    standard_input,
    written,
)
from fedloom.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from fedloom.data.options import DataOptions, Understanding
    from fedloom.experiment.config.data import DataConfig

SHOWN = 10
"""Names in a list."""
MOST_CLASSES = 8
"""Columns of the table of owners."""
KINDS = {"number": "numbers", "category": "categories", "text": "texts, hashed", "date": "dates"}


def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH",
            help="A data set: see fedloom list datasets.",
            autocompletion=completing("datasets"),
        ),
    ] = "digits",
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="For a file: the column to predict.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="For a file: the column of the owners.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients; default: 10, or one for each owner.")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Partition: see fedloom list partitions.", autocompletion=completing("partitions")
        ),
    ] = None,
    settings: Settings = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="File for a figure (PNG, SVG or PDF).")] = None,
    at_nodes: Annotated[
        bool,
        typer.Option(
            "--at-nodes", help="For a table: print the sections for a run whose rows stay at nodes."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a file's columns are interpreted, or how a partition assigns rows to clients.

    [bold]fedloom data my.csv[/]

    [bold]fedloom data my.csv --label disease --group hospital -s data.missing=median[/]

    [bold]fedloom data my.csv --label disease --at-nodes[/]  (sections for the run, and for
    node.toml)

    [bold]fedloom data digits --clients 10 -s data.options.alpha=0.1 --plot who.png[/]

    For a file, set other settings of \\[data] with -s: id, drop, keep, encode, missing, test,
    unseen. A partition is shown with --clients, --partition or --plot.
    """
    # from here on the name is that of a file with a copy of standard input
    piped, name = name == "-", standard_input(name, ".csv")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must end in .png, .svg or .pdf, not {plot}")
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot: the folder {plot.parent} does not exist")
    from fedloom.data.sources import check_name, is_path

    # only what was given, so that the config knows what was not, and checks it as in a run
    given = {"label": label, "group": group, "clients": clients, "partition": partition}
    values = {"name": name, **{key: value for key, value in given.items() if value is not None}}
    config, seed = _checked(values, seed or 0, settings or ())
    check_name(config.name)

    # a file alone: its columns
    if is_path(name) and clients is None and partition is None and plot is None:
        if at_nodes:
            _print_sections(name, config)
        else:
            _print_understanding(name, config.columns, as_json, piped)
        return
    if at_nodes:
        raise ConfigError(
            "--at-nodes needs a file with a table, and neither --clients, --partition nor --plot"
        )

    # a partition: the split of a run with these settings
    from fedloom.data.stats import describe, plot_counts
    from fedloom.experiment.plan.settings.rows import divided, number_of_owners
    from fedloom.report.formatting import clients_named, together

    # each owner is a client, unless --clients says fewer
    if config.group and config.partition == "natural" and "clients" not in config.model_fields_set:
        config = config.model_copy(update={"clients": number_of_owners(config)})
    if config.public_rows is None:  # of most methods
        config = config.model_copy(update={"public_rows": 0})
    dataset, split = divided(config, seed)
    # rows of each class at each client; of a number to predict, of parts of its range
    stats = describe(dataset.strata[0], split.shards, dataset.strata[1])
    unseen = config.unseen_clients(seed)
    if as_json:
        shown = {"dataset": dataset.name, "classes": stats.classes, "counts": stats.counts.tolist()}
        shown |= {"server": len(split.server), "unseen": unseen}
        print_plain(json.dumps(shown, ensure_ascii=False))
    else:
        what = f"{len(dataset.classes)} classes" if dataset.classes else "a number to predict"
        server = f"{len(split.server):,} at the server, " if len(split.server) else ""
        out.print(
            f"[bold]{dataset.name}[/]: {len(dataset.y):,} rows of shape {dataset.input_shape}, "
            f"{what}; {server}{len(split.public):,} public, {len(split.test):,} for the test"
        )
        rows = plain_table(*stats.HEADER)
        for row in stats.rows():
            rows.add_row(*row)
        out.print(rows)
        if unseen:
            named = (
                together(config.unseen)
                if isinstance(config.unseen, tuple)
                else clients_named(unseen)
            )
            out.print(f"unseen in training: {named}")
        out.print(
            f"distance between two clients' class mixes (total variation): {stats.pairwise:.2f}"
        )
    if plot is not None:
        plot_counts(stats, plot)
        written("figure", plot)


def align(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.csv...",
            help="One for each party, - for standard input; the active one first.",
        ),
    ],
    columns: Annotated[
        list[str],
        typer.Option(
            "--id", metavar="NAME", help="The id column: once for all files, or once for each."
        ),
    ],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write to.")],
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="openmined: private set intersection. plain: compares ids, not private.",
        ),
    ] = "openmined",
    force: Annotated[bool, typer.Option("--force", help="Replace existing results.")] = False,
) -> None:
    """Find the people that are in all parties' CSV files, and write each file's rows in one common
    order.

    [bold]fedloom align clinic.csv lab.csv --id patient --out aligned[/]

    [bold]fedloom align clinic.csv lab.csv --id patient --id subject_no --out aligned[/]

    For each file: aligned/clinic.aligned.csv, whose row i is the same person in all files, and
    aligned/clinic.unaligned.csv, the other rows. aligned/alignment.json has the counts, and the
    information that each side learned.
    """
    from rich.progress import Progress

    from fedloom.experiment.run.aligning import align_files

    files = [Path(standard_input(str(file), ".csv")) for file in files]
    with Progress(console=out, disable=not out.is_terminal, transient=True) as bars:
        task = bars.add_task("")

        def show(done: int, steps: int, what: str) -> None:
            bars.update(task, completed=done, total=steps, description=escape(what))
            # ten lines at most in a log
            if not out.is_terminal and 10 * done // steps > 10 * (done - 1) // steps:
                out.print(f"{done}/{steps}  {escape(what)}", soft_wrap=True)

        found = align_files(files, columns, folder, backend, show, force)
    table = plain_table("party", numbers=("rows", "aligned", "unaligned"))
    for party in found["parties"]:
        table.add_row(
            escape(party["name"]), *(f"{party[key]:,}" for key in ("rows", "aligned", "unaligned"))
        )
    out.print(table)
    if not found["parties"][0]["aligned"]:
        out.print(
            "[bold]No id is in every file.[/] Check that the id columns have the same kind of id."
        )
    for note in found["notes"]:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    out.print(f"what each side learned ({found['backend']}):")
    for sentence in found["learned"]:
        out.print(f"- {escape(sentence)}", soft_wrap=True)
    written("written", folder)


def _checked(
    values: dict[str, Any], seed: int, settings: Sequence[str]
) -> "tuple[DataConfig, int]":
    """The section `[data]` and the seed, with the settings of the command over them. It needs no
    PyTorch.
    """
    from fedloom.experiment.config.data import DataConfig
    from fedloom.experiment.config.overrides import override
    from fedloom.experiment.config.section import validated

    table: dict[str, Any] = {"data": values, "seed": seed}
    for text in settings:
        if not text.startswith(("data.", "seed=")):
            raise ConfigError(
                f"-s {text}: this command takes seed and settings of data, such as -s "
                "data.missing=median"
            )
        override(table, text)
    data, seed = dict(table["data"]), table["seed"]
    if not data.get("group") and isinstance(data.get("unseen"), list):
        raise ConfigError("data.unseen names owners: name their column with --group")
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be a whole number from 0 to 2**32 - 1, not {seed!r}")
    return validated(DataConfig, data, "data"), seed


def _print_understanding(name: str, options: "DataOptions", as_json: bool, piped: bool) -> None:
    """Print how the columns of a file, or of a copy of standard input, are interpreted, and with
    what settings a run reads them alike.
    """
    import tomli_w

    found, images = _first_look(name, options)
    # the copy is gone after this command, so its settings name a file that is still to be saved
    settings = {"data": {"name": Path(name).name if piped else name, **found.settings()}}
    # kind -> the features of it, in the order of the file
    kinds = {
        kind: [column for column, own in found.kinds.items() if own == kind]
        for kind in found.kinds.values()
    }
    if as_json:
        shown = {
            "rows": len(found.table.y),
            "label": found.label,
            "label_guessed": found.guessed,
            "classes": found.counts(),
            **({"number": found.spread()} if found.spread() else {}),
            "features": dict(found.kinds),
            "pictures": None if images is None else list(images.shape[1:]),
            "missing": dict(found.missing),
            "dropped": dict(found.dropped),
            "owners": found.owners(),
            "event": _event(found),
            "time": list(found.time_guess),
            "notes": list(found.notes),
            "settings": settings,
        }
        print_plain(json.dumps(shown, ensure_ascii=False))
        return

    # Text: a line begins with what it is about. A column's name is not markup, and lines are not
    # broken, so that they can be copied.
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    say(f"{found.table.name}: {len(found.table.y):,} rows")
    guess = " (a guess)" if found.guessed else ""
    say(f"label     {found.label}{guess}: {_label(found)}")
    if event := _event(found):
        say(f"event     {event}")
    if images is not None:  # (n, channels, height, width)
        say(
            f"pictures  {images.shape[2]}x{images.shape[3]}, "
            f"{'gray' if images.shape[1] == 1 else 'color'}"
        )
    for kind, columns in kinds.items():
        say(f"features  {KINDS[kind]} ({len(columns)}): {_listed(columns)}")
    if found.missing:
        most_first = sorted(found.missing, key=lambda column: -found.missing[column])
        say(
            f"missing   {_listed(f'{column} ({found.missing[column]:,})' for column in most_first)}"
        )
    # reason -> columns; label and owners are no features either, but have lines of their own
    dropped: dict[str, list[str]] = {}
    for column in sorted(found.dropped.keys() - {found.label, options.group}):
        dropped.setdefault(found.dropped[column], []).append(column)
    for reason, columns in dropped.items():
        say(f"dropped   {_listed(columns)}: {reason}")

    # the owners, with their rows of each class, or the mean and s.d. of a number to predict
    if owners := found.owners():
        of_number = [] if found.table.classes else [f"mean {found.label}", "s.d."]
        rows = plain_table("owner", "rows", *found.table.classes[:MOST_CLASSES], *of_number)
        for number, (owner, counts) in enumerate(owners.items()):
            spread = found.spread(number)  # empty for classes
            texts = (
                [f"{spread[key]:,.6g}" for key in ("mean", "sd")]
                if spread
                else [f"{n:,}" for n in counts]
            )
            rows.add_row(owner, f"{sum(counts):,}", *texts[:MOST_CLASSES])
        out.print(rows)
    elif found.group_guess:
        say(f"owners    perhaps {found.group_guess}: --group {found.group_guess}")

    # what is likely, but not taken for granted: time, and rows that belong together
    if found.day_guess and not found.time_guess:
        say(f"time      perhaps {found.day_guess}: fedloom trial --time orders rows by it")
    if found.time_guess:
        say(f"time      perhaps {', '.join(found.time_guess)}: fedloom trial orders rows by it")
    if found.unit_guess:
        say(
            f"unit      perhaps {found.unit_guess}: fedloom trial --unit keeps rows of one value "
            "together"
        )
    for note in found.notes:
        say(f"note      {note}")
    if piped:
        say(f"note      Settings name a file: save the rows as {Path(name).name} before a run.")

    # what to run next: a trial, if there may be owners, and a run
    if group := options.group or found.group_guess:
        asked = ["fedloom", "trial", name, "--label", found.label, "--group", group]
        asked += ["--unit", found.unit_guess] if found.unit_guess else []
        say(f"\nWho gains by learning together? {shlex.join(asked)}")
    say(
        "\nSettings that say the same; save them as my.toml, and start, with this or another "
        "method,"
    )
    say("fedloom run my.toml -s method=fedavg-ft:\n")
    say(tomli_w.dumps(settings).rstrip())


def _event(found: "Understanding") -> str:
    """Which of two classes `fedcox` would take as the event; "" where it is not likely to be run:
    without such a word, and without a column of times.
    """
    from fedloom.core.events import guessed_event

    classes = found.table.classes
    event = guessed_event(classes, found.label)
    if event is not None:
        return f"{event}, to fedcox (a guess: -s params.event={shlex.quote(event)} says so)"
    if len(classes) != 2 or found.kinds.get("time") != "number":
        return ""
    return f"to be named for fedcox: -s params.event={shlex.quote(classes[0])}, or {classes[1]}"


def _label(found: "Understanding") -> str:
    """The classes with their rows, or the range of a number to predict."""
    spread = found.spread()
    if not spread:
        return _listed(f"{k} ({n:,})" for k, n in found.counts().items())
    least, mean, deviation, largest = (
        f"{spread[key]:,.6g}" for key in ("min", "mean", "sd", "max")
    )
    return f"a number from {least} to {largest}, mean {mean}, s.d. {deviation}"


def _first_look(name: str, options: "DataOptions") -> "tuple[Understanding, np.ndarray | None]":
    """The interpretation of a file; unclear columns, with which no run starts, are left out with a
    note.
    """
    from fedloom.data.copies import notes_on_copies
    from fedloom.data.own import interpret
    from fedloom.data.roles import UnclearError

    try:
        found, images = interpret(name, options)
        return replace(found, notes=(*found.notes, *notes_on_copies(found.table))), images
    except UnclearError as error:
        columns, note = error.columns, str(error)
    found, images = interpret(name, replace(options, drop=(*options.drop, *columns)))
    dropped = {**found.dropped, **{column: f"unclear, {what}" for column, what in columns.items()}}
    notes = (*found.notes, *notes_on_copies(found.table), note)
    return replace(found, dropped=dropped, notes=notes), images


def _print_sections(name: str, config: "DataConfig") -> None:
    """Print `[data]` of a run whose rows stay at nodes, and the section of `node.toml` for this
    file.

    The run's section has the schema: columns in order, and all that owners must agree on before any
    row is read, as words of categories. A node's section allows these columns of its own file.
    """
    options = config.columns
    found, images = _first_look(name, options)
    # a column of owners is no feature in other owners' files, so a guess counts here
    if found.group_guess:
        options = replace(options, group=found.group_guess)
        found, images = _first_look(name, options)
    if images is not None:
        raise ConfigError(
            f"--at-nodes needs a table, but {name} has pictures: see docs/config.md for their "
            "schema"
        )
    table, title = found.table, Path(name).stem
    # the features in order, by how the schema writes them: texts and dates have a fixed encoding,
    # categories a list of words, and numbers, which are in neither, only a name
    used = list(table.columns)
    fixed = {column: kind for column, kind in found.kinds.items() if kind in ("text", "date")}
    words = {
        column: sorted({*table.columns[column]})
        for column in used
        if found.kinds[column] == "category"
    }

    # setting -> value in node.toml, in the order in which they are printed
    own: dict[str, Any] = {"rows": Path(name).name, "label": found.label}
    own |= {"classes": list(table.classes)} if table.classes else {}
    own |= {"keep": used}
    # of the settings that say the same, those that a node has, too: the rest is in the run's schema
    cells = ("id", "missing", "group", "missing_words", "decimal")
    own |= {key: value for key, value in found.settings().items() if key in cells}
    # a file of several owners: the first one's rows, as an example
    own |= {"owner": table.owners[0]} if options.group else {}
    own |= {"test": options.test} if isinstance(options.test, str) else {}
    own |= {"test": config.test_fraction} if "test_fraction" in config.model_fields_set else {}
    key = title if re.fullmatch(r"[A-Za-z0-9_-]+", title) else _toml(title)

    # the run's section: one line for each column of the schema
    lines = [
        "# For the run. List the words of all owners in categories, here and in node.toml; ? is "
        "a missing one."
    ]
    lines += ["[data]", f"name = {_toml(title)}", "", "[data.row_schema]", "columns = ["]
    lines += [
        f"    {_toml(column)}," for column in used if column not in words and column not in fixed
    ]
    lines += [
        f"    {{ name = {_toml(column)}, encode = {_toml(kind)} }},"
        for column, kind in fixed.items()
    ]
    lines += [
        f"    {{ name = {_toml(column)}, categories = {_toml(values)} }},"
        for column, values in words.items()
    ]
    lines += ["]", f"label = {_toml(found.label)}"]
    # a number to predict is learned in one unit at all owners; two digits tell little of the rows
    if spread := found.spread():
        own["label_scale"] = [float(f"{spread[key]:.2g}") for key in ("mean", "sd")]
        lines += ["# Mean and s.d. that all owners agree on; these are of this file, rounded."]
        lines += [f"label_scale = {_toml(own['label_scale'])}", ""]
    else:
        lines += [f"classes = {_toml(list(table.classes))}", ""]

    # the node's section; words and encodings are settings with a dot, one for each column
    lines += ["# For node.toml of each owner. A run may use what keep lists.", f"[data.{key}]"]
    lines += [
        "# score = true  # let the coordinator have models scored here; one node at least must"
    ]
    lines += [f"{setting} = {_toml(value)}" for setting, value in own.items()]
    lines += [f"categories.{_toml(column)} = {_toml(values)}" for column, values in words.items()]
    lines += [f"encode.{_toml(column)} = {_toml(kind)}" for column, kind in fixed.items()]
    out.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _toml(value: str | float | list[str] | list[float]) -> str:
    """A value in TOML, whose strings, numbers and lists are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (
        f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    )
