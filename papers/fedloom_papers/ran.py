"""What was run: data, networks, clients and steps, and their share of the paper's, in
one sentence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.report import formatting as fmt
from fedloom_papers.results import TableResults
from fedloom_papers.spec import Reproduction

NETWORKS = {
    "mlp": "multilayer perceptrons",
    "linear": "linear models",
    "cnn": "small convolutional networks",
}
"""Plain names of the networks of the small scale, by the first word of a model's name."""


@dataclass(frozen=True)
class Ran:
    """What the finished runs of a table or figure used.

    Attributes:
        data: titles of the data sets.
        networks: names of the models.
        clients: numbers of clients or parties.
        called: `clients` or `parties`.
        rows: numbers of training rows of a client, or of aligned rows, where the settings give one.
        steps: numbers of iterations or rounds.
        unit: which of the two.
        shares: these by the paper's number, for the same cell.
        seeds: numbers of seeds.
    """

    data: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    called: str = "clients"
    rows: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    unit: str = "rounds"
    shares: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()


NOTHING = Ran()
"""No runs."""


def ran(found: TableResults) -> Ran:
    """What the runs of the table's cells used; the oracle's own number of clients and rows is left
    out.
    """
    about, vertical = found.reproduction, found.reproduction.system == "evfl"
    data, networks, units = dict[str, None](), dict[str, None](), dict[str, None]()
    clients = set[int]()
    rows = set[int]()
    steps = set[int]()
    shares = set[float]()
    seeds = set[int]()
    for (row, column), place in found.places.items():
        if not place.records:
            continue
        run = place.attempts[0].config
        data |= dict.fromkeys(found.beds({column}) or ())
        seeds.add(len(place.records))
        unit = "iterations" if run.iterations is not None else "rounds"
        number = run.iterations if run.iterations is not None else run.rounds
        if row == about.oracle or not number:
            continue
        networks |= dict.fromkeys(run.models.pool or ())
        units[unit] = None
        steps.add(number)
        clients.add(run.data.clients)
        known = run.columns.aligned if vertical else run.data.options.get("rows")
        rows |= {known} if isinstance(known, int) else set()
        paper = _paper_steps(about, row, column, unit)
        shares |= {round(number / paper, 4)} if paper else set()
    ends = (tuple(sorted(values)) for values in (clients, rows, steps))
    called, of = "parties" if vertical else "clients", next(iter(units), "rounds")
    used, given, taken = ends
    return Ran(
        (*data,),
        (*networks,),
        used,
        called,
        given,
        taken,
        of,
        tuple(sorted(shares)),
        tuple(sorted(seeds)),
    )


def _paper_steps(about: Reproduction, row: str, column: str, unit: str) -> int | None:
    """The paper's number of steps for a cell; None if it counts others."""
    of_row = next(one for one in about.rows if one.name == row)
    of_column = next(one for one in about.columns if one.name == column)
    number = about.settings(of_row, of_column, "paper").get(unit)
    return number if isinstance(number, int) else None


def together(parts: Sequence[Ran]) -> Ran:
    """What several tables used."""

    def every(name: str) -> tuple[object, ...]:
        return (*dict.fromkeys(value for one in parts for value in getattr(one, name)),)

    def ordered(name: str) -> tuple[float, ...]:
        return tuple(sorted(value for value in every(name) if isinstance(value, int | float)))

    first = parts[0] if parts else NOTHING
    data, networks = (tuple(map(str, every(name))) for name in ("data", "networks"))
    clients, rows, steps, seeds = (
        tuple(map(int, ordered(name))) for name in ("clients", "rows", "steps", "seeds")
    )
    return Ran(
        data,
        networks,
        clients=clients,
        rows=rows,
        steps=steps,
        seeds=seeds,
        called=first.called,
        unit=first.unit,
        shares=ordered("shares"),
    )


def sentence(one: Ran) -> str:
    """`Run here: Fashion-MNIST, with multilayer perceptrons, 6 clients with 200 rows each, 60 to
    140 iterations (2 % of the paper's), 5 to 10 seeds.`
    """
    if not one.data:
        return "Nothing was run here."
    kinds = dict.fromkeys(NETWORKS.get(name.partition("-")[0], name) for name in one.networks)
    parts = [fmt.together([*one.data])]
    parts += [f"with {fmt.together([*kinds])}"] if kinds else []
    if one.clients:
        kind = "aligned rows" if one.called == "parties" else "rows each"
        of = f" with {_span(one.rows)} {kind}" if one.rows else ""
        parts.append(f"{_span(one.clients)} {one.called}{of}")
    if one.steps:
        share = f" ({_percent(one.shares)} of the paper's)" if one.shares else ""
        parts.append(f"{_span(one.steps)} {one.unit}{share}")
    parts += [f"{_span(one.seeds)} seeds"] if one.seeds else []
    return f"Run here: {', '.join(parts)}."


def _span(values: Iterable[float]) -> str:
    low, high = min(values := [*values]), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _percent(shares: Sequence[float]) -> str:
    low, high = (f"{100 * share:.3g}" for share in (shares[0], shares[-1]))
    return f"{low}{fmt.NBSP}%" if low == high else f"{low} to {high}{fmt.NBSP}%"
