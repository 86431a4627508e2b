"""Partitions of rows among clients, as pure functions from labels to a sorted array of row numbers
for each client.

All take `labels` (n,) int64, the number of clients and a generator, and return a list of (m_i,)
int64 numbers into `labels`. No row belongs to two clients and no client is empty. Impossible
settings raise `DataError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data import allocation
from fedloom.data.allocation import check_classes, check_rows, deal, shuffled_by_class

PartitionFunction = Callable[..., list[np.ndarray]]
OptionValue = int | float | None


@dataclass(frozen=True)
class Option:
    """One option of a partition: a number above 0, or None where that is the default."""

    name: str
    type: type[int] | type[float]
    default: OptionValue
    text: str


@dataclass(frozen=True)
class PartitionScheme:
    """A registered partition with its options; `function` also takes `groups` if `needs_groups`."""

    title: str
    function: PartitionFunction
    options: tuple[Option, ...] = ()
    needs_groups: bool = False


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    rows: int | None = None,
    min_rows: int = 1,
) -> list[np.ndarray]:
    """Each client n draws its own class mix q_n ~ Dir(alpha, ..., alpha) over the K classes that
    occur.

    This is the split of FedAL (Section VI) and DisPFL. It is not the one that most code calls
    Dirichlet: see `dirichlet_classwise`.

    Args:
        labels: (n,) int64.
        clients: number of clients.
        rng: random generator of all draws.
        alpha: concentration, above 0; large is uniform, small gives each client few classes.
        rows: rows of each client, multinomial(rows, q_n) without replacement. If a class runs out,
            the shortfall is drawn from the other classes by q_n renormalized, or uniformly if q_n
            is 0 on all that are left. Clients
            take rows in turn: if nearly all rows are taken, mixes of the last clients are far from
            those drawn. None allocates every row, those of class k in proportion to q_n[k].
        min_rows: with rows=None, smaller clients get random rows of the largest client.
    """
    check_rows(labels, clients, rows or min_rows)
    queues = shuffled_by_class(labels, rng)
    mixes = rng.dirichlet(np.full(len(queues), alpha), size=clients)  # (N, K)
    if rows is not None:
        return deal(
            queues, allocation.fixed_counts(mixes, [len(queue) for queue in queues], rows, rng)
        )
    counts = [
        allocation.proportional(len(queue), mixes[:, k], rng) for k, queue in enumerate(queues)
    ]
    return allocation.fill_up(deal(queues, np.stack(counts, axis=1)), min_rows, rng)


def dirichlet_classwise(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.5,
    min_rows: int = 1,
) -> list[np.ndarray]:
    """Each class k is divided by its own p_k ~ Dir(alpha, ..., alpha) over the clients; every row
    is allocated.

    The split of NIID-Bench (Li et al., arXiv:2102.02079) and PFLlib. As there, a client that
    already holds its fair share n / N gets no rows of the remaining classes.

    Differs: they draw again until every client has enough rows, which may not terminate. Here
    clients with fewer than `min_rows` get random rows of the largest client.
    """
    check_rows(labels, clients, min_rows)
    queues = shuffled_by_class(labels, rng)
    held = np.zeros(clients, dtype=np.int64)
    counts = []
    for queue in queues:
        open_to = held < len(labels) / clients
        shares = np.where(open_to, rng.dirichlet(np.full(clients, alpha)), 0.0)
        counts.append(allocation.proportional(len(queue), shares, rng, open_to))
        held += counts[-1]
    return allocation.fill_up(deal(queues, np.stack(counts, axis=1)), min_rows, rng)


def pathological(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: int = 2,
    rows: int | None = None,
) -> list[np.ndarray]:
    """Each client holds exactly `classes` classes, each of which is divided evenly among its
    holders.

    Every class is held by the same number of clients, or by one more. Rows of a class without
    holders, which happens only if clients * classes is less than the number of classes, are
    dropped. `rows` limits the rows of a client, evenly over its classes.
    """
    check_rows(labels, clients, classes)
    queues = shuffled_by_class(labels, rng)
    check_classes(len(queues), classes)
    holders: list[list[int]] = [[] for _ in queues]
    for client in range(clients):
        # The classes with the fewest holders, at random among equals: always different, always
        # balanced.
        order = np.lexsort((rng.random(len(queues)), np.array([len(those) for those in holders])))
        for k in order[:classes]:
            holders[k].append(client)
    return _to_holders(queues, holders, clients, rows)


def groups(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    number: int = 5,
    rows: int | None = None,
) -> list[np.ndarray]:
    """Consecutive clients form `number` groups of about equal size; each group has classes of its
    own.

    The classes are assigned to groups at random, and each is divided evenly among the clients of
    its group. `rows` limits the rows of a client, evenly over its classes. The groups are the
    ground truth for methods that select neighbours.
    """
    check_rows(labels, clients, 1)
    queues = shuffled_by_class(labels, rng)
    if not number <= min(clients, len(queues)):
        raise DataError(
            f"{number} groups need at least {number} clients and classes, but there are "
            f"{clients} clients and {len(queues)} classes; use fewer groups."
        )
    members = np.array_split(np.arange(clients), number)
    holders: list[list[int]] = [[] for _ in queues]
    for those, mine in zip(
        members, np.array_split(rng.permutation(len(queues)), number), strict=True
    ):
        for k in mine:
            holders[k] = those.tolist()
    return _to_holders(queues, holders, clients, rows)


def label_sets(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    sets: Sequence[Sequence[int]],
    rows: int | None = None,
) -> list[np.ndarray]:
    """Client n holds the classes `sets[n]`, each of which is divided evenly among its holders.

    Rows of a class without holders are dropped. `rows` limits the rows of a client, evenly over its
    classes. A run names it `fedloom.data.partitions:label_sets`, because options of the registered
    partitions are numbers.
    """
    check_rows(labels, clients, 1)
    kinds = np.unique(labels).tolist()
    if (
        len(sets) != clients
        or not all(sets)
        or not {k for those in sets for k in those} <= {*kinds}
    ):
        raise DataError(
            f"sets must list the classes of each of {clients} clients, from {kinds[0]} to "
            f"{kinds[-1]}, not {sets!r}."
        )
    holders = [[n for n, those in enumerate(sets) if k in those] for k in kinds]
    return _to_holders(shuffled_by_class(labels, rng), holders, clients, rows)


def _to_holders(
    queues: list[np.ndarray], holders: list[list[int]], clients: int, rows: int | None
) -> list[np.ndarray]:
    """Divide each class evenly among its holders, with at most `rows` for a client."""
    counts = np.zeros((clients, len(queues)), dtype=np.int64)
    for k, (queue, those) in enumerate(zip(queues, holders, strict=True)):
        if len(queue) < len(those):
            raise DataError(
                f"Each client needs a row of each of its classes, but {len(those)} clients share "
                f"a class of {len(queue)} rows; use fewer clients or fewer classes for each."
            )
        if those:
            counts[those, k] = len(queue) // len(those)
            counts[those[: len(queue) % len(those)], k] += 1
    if rows is not None:
        kinds = (counts > 0).sum(1, keepdims=True)  # (N, 1) classes of each client
        nth = np.cumsum(counts > 0, axis=1)
        if rows < kinds.max():
            raise DataError(
                f"rows must be at least {kinds.max()}, the number of classes of a client, not "
                f"{rows}."
            )
        counts = np.minimum(counts, rows // kinds + (nth <= rows % kinds))
    return deal(queues, counts)


def random_classes(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, classes: int = 2, rows: int = 20
) -> list[np.ndarray]:
    """Each client holds D ~ U{rows, ..., 2 rows} rows, evenly of `classes` random classes, as in
    AugFL, section VI-A.

    The classes are drawn from those that still have enough rows. Other rows are dropped.
    """
    check_rows(labels, clients, rows)
    if rows < classes:
        raise DataError(
            f"rows must be at least {classes}, the number of classes of a client, not {rows}."
        )
    queues = shuffled_by_class(labels, rng)
    check_classes(len(queues), classes)
    left = np.array([len(queue) for queue in queues])
    counts = np.zeros((clients, len(queues)), dtype=np.int64)
    for client in range(clients):
        size = int(rng.integers(rows, 2 * rows, endpoint=True))
        each = np.full(classes, size // classes) + (np.arange(classes) < size % classes)
        able = np.flatnonzero(left >= each[0])
        if len(able) < classes:
            raise DataError(
                f"{clients} clients must hold {rows} to {2 * rows} rows of {classes} classes "
                f"each, but for client {client} only {len(able)} classes have {each[0]} of the "
                f"{len(labels)} rows left; use fewer clients, fewer rows or more data."
            )
        chosen = rng.choice(able, classes, replace=False)
        counts[client, chosen] = each
        left[chosen] -= each
    return deal(queues, counts)


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every row goes to a random client; sizes differ by at most one."""
    check_rows(labels, clients, 1)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def natural(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    groups: np.ndarray | None,
    min_rows: int = 1,
) -> list[np.ndarray]:
    """Each client is one owner of rows, such as a writer; a random sample if there are more owners
    than clients.

    Args:
        labels: (n,) int64.
        clients: number of clients.
        rng: random generator of all draws.
        groups: (n,) int64, the owner of each row.
        min_rows: owners of fewer rows are ignored.
    """
    check_rows(labels, clients, 1)
    if groups is None:
        raise DataError(
            "The partition 'natural' needs a data set whose rows have owners, which this one "
            "lacks; choose another partition."
        )
    owners, sizes = np.unique(groups, return_counts=True)
    able = owners[sizes >= min_rows]
    if len(able) < clients:
        raise DataError(
            f"{clients} clients need {clients} owners of at least {min_rows} rows, not "
            f"{len(able)}; use fewer clients or a smaller min_rows."
        )
    chosen = np.sort(rng.choice(able, clients, replace=False))
    order = np.argsort(groups, kind="stable")
    ends = np.searchsorted(groups[order], chosen, side="right")
    starts = np.searchsorted(groups[order], chosen, side="left")
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


_ALPHA = "concentration: small gives each client few classes, large is uniform"
_EACH = Option("rows", int, None, "rows of each client; none: all rows are allocated")
_MOST = Option(
    "rows", int, None, "maximum number of rows of each client; none: all rows are allocated"
)
_LEAST = Option("rows", int, 20, "minimum number of rows of a client; the maximum is twice as many")
_MIN_ROWS = Option("min_rows", int, 1, "minimum number of rows of a client")
_CLASSES = Option("classes", int, 2, "classes of each client")
_GROUPS = Option("number", int, 5, "number of groups")

PARTITIONS: dict[str, PartitionScheme] = {
    "dirichlet": PartitionScheme(
        "each client has its own Dirichlet class mix",
        dirichlet,
        (Option("alpha", float, 0.1, _ALPHA), _EACH, _MIN_ROWS),
    ),
    "dirichlet-classwise": PartitionScheme(
        "each class is divided by a Dirichlet draw over clients",
        dirichlet_classwise,
        (Option("alpha", float, 0.5, _ALPHA), _MIN_ROWS),
    ),
    "pathological": PartitionScheme(
        "each client has a fixed number of classes", pathological, (_CLASSES, _MOST)
    ),
    "groups": PartitionScheme(
        "groups of clients, each group with its own classes", groups, (_GROUPS, _MOST)
    ),
    "random-classes": PartitionScheme(
        "each client has few rows, evenly over random classes", random_classes, (_CLASSES, _LEAST)
    ),
    "iid": PartitionScheme("rows are assigned at random", iid),
    "natural": PartitionScheme(
        "each client is one owner of rows", natural, (_MIN_ROWS,), needs_groups=True
    ),
}


def find_partition(name: str) -> PartitionScheme:
    """The partition with this name.

    Raises:
        DataError: the name is unknown.
    """
    if name not in PARTITIONS:
        raise DataError(f"Unknown partition {name!r}.{did_you_mean(name, PARTITIONS)}")
    return PARTITIONS[name]


def check_options(name: str, options: Mapping[str, Any]) -> dict[str, OptionValue]:
    """All options of a partition, with defaults for those not in `options`, converted to their
    types.

    Raises:
        DataError: an option is unknown, of the wrong type, or not above 0; the message lists every
            problem.
    """
    known = {option.name: option for option in find_partition(name).options}
    problems = [
        f"Unknown option {word!r} of partition {name!r}.{did_you_mean(word, known)}"
        for word in options
        if word not in known
    ]
    checked: dict[str, OptionValue] = {}
    for option in known.values():
        value = options.get(option.name, option.default)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        fits = whole or (option.type is float and isinstance(value, float | np.floating))
        if value is None and option.default is None:
            checked[option.name] = None
        elif fits and 0 < value < np.inf:
            checked[option.name] = option.type(value)
        else:
            kind = "a whole number" if option.type is int else "a number"
            problems.append(f"{name}.{option.name} must be {kind} above 0, not {value!r}.")
    if problems:
        raise DataError("\n".join(problems))
    return checked
