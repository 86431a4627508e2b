"""Table 1 of several owners' rows before any training, and the schema with scale and words that it
agrees on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedloom.core.aggregate import MEAN
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import ConfigError, DataError, EngineError
from fedloom.core.federation import Federation
from fedloom.core.party import LearnedTable
from fedloom.core.task import Number
from fedloom.data.encoder import plain_own
from fedloom.data.grammar import MISSING_WORDS, Decimals
from fedloom.data.options import DataOptions, Task
from fedloom.data.own import interpret
from fedloom.engines import LocalEngine
from fedloom.experiment.cards import html_card, latex_table
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import one_thread
from fedloom.experiment.run.metrics import four_digits
from fedloom.experiment.run.session import Session
from fedloom.methods import find
from fedloom.methods.tables.stats import TARGET
from fedloom.protect.aggregators import Secure

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

FEWEST = 3
"""Owners from which on sums are secure."""


@dataclass(frozen=True, repr=False)
class Stats:
    """Sums over owners, as tables: the result of `stats`, and a card in a notebook.

    Example:
        >>> found.owners, [table.title for table in found.tables]  # of the example of `stats`
        (('a', 'b', 'c'), ['Numbers', 'Words'])

    Attributes:
        tables: numbers, then words and classes, as far as there are any.
        owners: names.
        schema: `[data.row_schema]` of a run whose rows stay with their owners.
        sent: bytes that an owner sends, on average.
        notes: on how columns were read.
    """

    tables: tuple[LearnedTable, ...]
    owners: tuple[str, ...]
    schema: Mapping[str, Any]
    sent: int
    notes: tuple[str, ...] = ()

    def to_frame(self) -> "pandas.DataFrame":
        """The first table, one row for each column; counts below the limit are text, such as "< 5".

        Example:
            >>> found.to_frame()["Column"].tolist()  # of the example of `stats`
            ['age']
        """
        import pandas

        return pandas.DataFrame(list(self.tables[0].rows), columns=list(self.tables[0].columns))

    def to_latex(self) -> str:
        """The tables as LaTeX (package booktabs), one after the other.

        Example:
            >>> found.to_latex().count("tabular")
            4
        """
        return "\n\\medskip\n\n".join(
            latex_table(table.columns, _counted(table)) for table in self.tables
        )

    def plot(self) -> "Figure":
        """How much of each column's variance lies between owners (drift), as a matplotlib Figure.

        Example:
            >>> found.plot().get_axes()[0].get_xlabel()
            'drift between owners'
        """
        from fedloom.experiment.pictures import BLUE, axes

        drifts: dict[str, float] = {}
        for table in self.tables:
            at = table.columns.index("Drift")
            drifts |= {str(row[0]): row[at] for row in table.rows if isinstance(row[at], float)}  # type: ignore[misc]
        figure, drawn = axes(len(drifts))
        drawn.barh(range(len(drifts)), [*drifts.values()], color=BLUE)
        drawn.set_yticks(range(len(drifts)), [*drifts])
        drawn.invert_yaxis()
        drawn.set(xlabel="drift between owners", xlim=(0, 1))
        return figure

    def _repr_html_(self) -> str:
        head = f"statistics of {len(self.owners)} owners, {self.sent:,} bytes sent by each"
        numbers, *others = self.tables
        cards = [html_card(head, list(self.notes), numbers.columns, _cells(numbers))]
        return "".join([*cards, *(html_card(t.title, [], t.columns, _cells(t)) for t in others)])

    def __repr__(self) -> str:
        return "\n".join(f"{row}" for table in self.tables for row in (table.columns, *table.rows))


def _counted(table: LearnedTable) -> list[list[Any]]:
    """The rows, in which counts are whole numbers."""
    counts = [column in ("Rows", "Missing") for column in table.columns]
    return [
        [
            int(c) if count and isinstance(c, float) else c
            for c, count in zip(row, counts, strict=True)
        ]
        for row in table.rows
    ]


def _cells(table: LearnedTable) -> list[list[str]]:
    """The rows as text: counts in full, other numbers with four digits."""
    return [
        [
            f"{c:,}"
            if isinstance(c, int)
            else four_digits(c)
            if isinstance(c, float)
            else str(c or "")
            for c in row
        ]
        for row in _counted(table)
    ]


def stats(
    data: Any,
    *,
    label: str | None = None,
    group: str | None = None,
    id: str | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    task: Task | None = None,
    missing_words: Sequence[str] = MISSING_WORDS,
    decimal: Decimals = ".",
    min_cell: int = 5,
) -> Stats:
    """Rows, missing values, means, s.d., quartiles, words and drift of all owners' rows, by the
    method `stats`.

    With three owners or more, sums are secure: only totals over owners are used.

    Args:
        data: a file, a folder, a frame or arrays, understood as by `fedloom data`.
        label, group, id, drop, keep, task, missing_words, decimal: see
        `fedloom.data.own.read_data`.
        min_cell: the smallest count that is shown.

    Example:
        >>> ages = {"age": [31, 45, 62, 58, 40, 37] * 5, "ill": ["no", "yes", "yes"] * 10, "site": ["a", "b", "c"] * 10}
        >>> found = stats(ages, label="ill", group="site")
        >>> found.owners
        ('a', 'b', 'c')
        >>> found.to_frame()[["Column", "Mean"]].values.tolist()
        [['age', 45.5]]

    Raises:
        DataError: see `fedloom.data.own.interpret`, the rows have no owners, or they are pictures.
    """  # noqa: E501
    if not (group is None or isinstance(group, str)):
        raise DataError(
            "Statistics need the owners in a column: give a data frame, and the column's name as "
            "group."
        )
    options = DataOptions(
        label,
        group,
        id,
        tuple(drop),
        tuple(keep),
        "median",
        task=task,
        missing_words=tuple(missing_words),
        decimal=decimal,
        missing_columns="allow",
    )
    found, images = interpret(data, options)
    fixed = [column for column, kind in found.kinds.items() if kind in ("text", "date")]
    if fixed:
        found, images = interpret(data, replace(options, drop=(*options.drop, *fixed)))
        note = f"Columns of texts and dates are left out: {', '.join(fixed)}."
        found = replace(found, notes=(*found.notes, note))
    if images is not None:
        raise DataError("Statistics are of tables, not of pictures.")
    if found.table.groups is None:
        guess = f", perhaps {found.group_guess!r}" if found.group_guess else ""
        raise DataError(
            f"Statistics over owners need the column of the owners: name it as group{guess}."
        )
    raw = dict(found.table.columns)
    found = replace(found, table=replace(found.table, columns={}))  # so that `raw` alone holds them
    dataset = plain_own(found, raw)
    contexts = parties(dataset)
    method, aggregator = find("stats"), Secure() if len(contexts) >= FEWEST else MEAN
    cfg = method.configure(params={"min_cell": min_cell})
    assert method.server is not None
    server = method.server(cfg, ClientContext(**{**vars(contexts[0]), "id": 0, "data": None}))
    with LocalEngine([method.client(cfg, context) for context in contexts]) as engine:
        fed = Federation(engine, aggregator=aggregator, means=method.client.MEANS)
        for _ in method.round(fed, server, engine.ids, cfg, 0):
            pass
    tables = tuple(server.findings())
    if not tables:
        raise DataError("Statistics failed: an owner's sums are missing.")
    sent = sum(entry.bytes for entry in fed.ledger if entry.receiver != "client") // len(contexts)
    columns = list(zip(dataset.columns, dataset.words, strict=True))
    schema = row_schema(columns, dataset.classes, str(found.label), tables)
    return Stats(tables, dataset.owners, schema, sent, dataset.notes)


def of_run(run: RunConfig, backend: Callable[..., Backend]) -> Sequence[LearnedTable]:
    """The tables of a run of `stats`, without scores: a node need not allow any.

    Args:
        run: the config.
        backend: see `fedloom.experiment.run.execute`.

    Raises:
        ConfigError, DataError, EngineError: the run cannot be built, or a node's sums are missing.
    """
    with one_thread():
        place = backend(run, None, resume=False, stop=lambda: False)
        plan = build(run, place.files, secret=place.secret)
        server = plan.server
        assert server is not None
        with place.start(plan) as engine:
            fed = Session(plan, engine, None).fed
            fed.round = 0
            for _ in plan.method.round(fed, server, engine.ids, plan.cfg, 0):
                pass
        if not (tables := server.findings()):
            said = [
                failure.trace or f"{failure.party}: {failure.reason}" for failure in fed.failures
            ]
            raise EngineError(
                f"no statistics, as sums are missing: {'; '.join(said[:3]) or 'no owner has rows'}"
            )
        return tables


def parties(dataset: Any) -> list[ClientContext]:
    """The owners of a data set with one column for each raw one, with all of their rows."""
    pool, labels = torch.from_numpy(dataset.x), torch.from_numpy(np.asarray(dataset.y))
    zero, one, count = torch.zeros(1), torch.ones(1), len(dataset.owners)
    return [
        ClientContext(
            id=i,
            parties=count,
            classes=max(len(dataset.classes), 1),
            class_names=dataset.classes,
            target=None if dataset.classes else Number(),
            columns=dataset.columns,
            words=dataset.words,
            offset=() if dataset.offset is None else dataset.offset.tolist(),
            data=Rows(
                pool, labels, torch.from_numpy(np.flatnonzero(dataset.groups == i)), zero, one
            ),
        )
        for i in range(count)
    ]


def row_schema(
    columns: Sequence[tuple[str, Sequence[str]]],
    classes: Sequence[str],
    label: str,
    tables: Sequence[LearnedTable | Any],
) -> dict[str, Any]:
    """`[data.row_schema]` with the agreed scale: mean and s.d. with six digits; s.d. 1 of a
    constant column.

    Raises:
        ConfigError: a column has too few rows for a scale.
    """
    scale: dict[str, list[float]] = {}
    of_label: dict[str, Any] = {"classes": list(classes)} if classes else {}
    for table in tables:
        if table.columns[1] == "Word":
            continue
        for name, _, _, mean, sd, *_ in table.rows:
            if mean is None:
                raise ConfigError(
                    f"the column {name!r} has too few rows for a scale: leave it out with drop"
                )
            agreed = [float(f"{mean:.6g}"), float(f"{sd or 1.0:.6g}")]
            if name == TARGET and not classes:
                of_label["label_scale"] = agreed
            else:
                scale[str(name)] = agreed
    listed = [
        {"name": name, "categories": list(words)} if words else name for name, words in columns
    ]
    return {"columns": listed, "label": label, **of_label, **({"scale": scale} if scale else {})}
