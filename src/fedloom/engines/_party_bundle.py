"""Data sent to the workers of a cluster: encoded messages, specifications of parties, and their
rows.

The parties of a federation share pools of rows. A worker gets the union of its parties' rows, cut
from each pool once. Rows that all parties hold, such as a public set, are cut once for all workers.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core import message
from fedloom.core.context import ClientContext, PublicSet, Rows
from fedloom.core.errors import EngineError
from fedloom.core.message import Tree
from fedloom.core.party import Party
from fedloom.engines._shared_buffer import LIMITS

Packed: TypeAlias = NDArray[np.uint8]
"""An encoded message. As an array it goes through shared memory without a copy."""


class WorkerLost(Exception):
    """A worker died, or a reply that it held is lost. All other workers have completed
    their calls.
    """


def packed(tree: Tree) -> Packed:
    """Encode a tree. Raises MessageError."""
    return np.frombuffer(message.encode(tree, LIMITS), dtype=np.uint8)


def opened(data: Packed) -> Any:
    """Decode a tree, on the CPU."""
    return message.decode(data.data, LIMITS)


@dataclass(frozen=True)
class RowPool:
    """Rows cut from one pool, and the index (n,) in it of each row set, by its number."""

    x: NDArray[Any]
    y: NDArray[Any] | None
    shift: NDArray[Any]
    scale: NDArray[Any]
    sets: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class PartySpec:
    """The specification of one party, with numbers in place of its row sets."""

    kind: Callable[[Any, ClientContext], Party[object]]
    cfg: Any
    context: ClientContext
    rows: Mapping[str, int]  # by the names of `_row_sets`
    public: tuple[int, str] | None  # seed and digest


@dataclass(frozen=True)
class PartyBundle:
    """Some parties, the rows that only they hold, and the user's modules that they
    import by name.
    """

    specs: Sequence[PartySpec]
    pools: Sequence[RowPool]
    modules: Mapping[str, ModuleType]


class PartyBundler:
    """Bundles any of the parties for a worker, again if they must move. Raises EngineError if a
    builder is not `partial(party class, config, context)`.
    """

    def __init__(self, builders: Mapping[int, Callable[[], Party[object]]]) -> None:
        self._parts = {i: _parts(builder) for i, builder in builders.items()}
        by_party = [
            [rows for _, rows in _row_sets(context)] for _, _, context in self._parts.values()
        ]
        self._rows = list({id(r): r for sets in by_party for r in sets}.values())
        self._numbers = {id(r): n for n, r in enumerate(self._rows)}
        self._common = set.intersection(
            *({self._numbers[id(r)] for r in sets} for sets in by_party)
        )
        self.modules = own_modules(self._parts.values())

    def common(self) -> list[RowPool]:
        """The rows that all parties hold."""
        return pack({n: self._rows[n] for n in sorted(self._common)})

    def bundle(self, parties: Iterable[int]) -> PartyBundle:
        """These parties. Send the bundle within `by_value`."""
        chosen = [self._parts[i] for i in parties]
        own = {
            self._numbers[id(r)] for _, _, context in chosen for _, r in _row_sets(context)
        } - self._common
        named = {name for parts in chosen for name in _texts(parts)} & self.modules.keys()
        return PartyBundle(
            [self._spec(*parts) for parts in chosen],
            pack({n: self._rows[n] for n in sorted(own)}),
            {name: self.modules[name] for name in sorted(named)},
        )

    def rows(self, party: int) -> int:
        """The number of a party's own rows, at least 1."""
        data = self._parts[party][2].data
        return max(1, len(data)) if data is not None else 1

    @contextlib.contextmanager
    def by_value(self) -> Iterator[None]:
        """A context in which Ray pickles classes of the user's modules by value, as other nodes
        cannot import them.
        """
        import ray.cloudpickle  # Ray's own pickling of classes and functions

        known = ray.cloudpickle.list_registry_pickle_by_value()
        registered = [module for module in self.modules.values() if module.__name__ not in known]
        for module in registered:
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in registered:
                ray.cloudpickle.unregister_pickle_by_value(module)

    def _spec(self, kind: Any, cfg: Any, context: ClientContext) -> PartySpec:
        public = context.public
        return PartySpec(
            kind,
            cfg,
            replace(context, data=None, public=None, tests={}),
            {name: self._numbers[id(rows)] for name, rows in _row_sets(context)},
            None if public is None else (public.seed, public.digest),
        )


def pack(rows: Mapping[int, Rows]) -> list[RowPool]:
    """Row sets by number, cut from their pools."""
    pools: dict[tuple[int, ...], dict[int, Rows]] = {}
    for number, r in rows.items():
        pools.setdefault((id(r.pool), id(r.labels), id(r.shift), id(r.scale)), {})[number] = r
    cut = []
    for members in pools.values():
        first = next(iter(members.values()))
        used = torch.unique(torch.cat([r.index for r in members.values()]))  # sorted
        x, shift, scale = (a.cpu().numpy() for a in (first.pool[used], first.shift, first.scale))
        y = None if first.labels is None else first.labels[used].cpu().numpy()
        sets = {n: torch.searchsorted(used, r.index).cpu().numpy() for n, r in members.items()}
        cut.append(RowPool(x, y, shift, scale, sets))
    return cut


def unpack(pools: Iterable[RowPool], device: str) -> dict[int, Rows]:
    """The row sets by number; each pool is moved to the device once."""
    rows = {}
    with warnings.catch_warnings():
        # arrays in shared memory are read-only, and never written to
        warnings.simplefilter("ignore")
        for pool in pools:
            x, shift, scale = (
                torch.from_numpy(a).to(device) for a in (pool.x, pool.shift, pool.scale)
            )
            y = None if pool.y is None else torch.from_numpy(pool.y).to(device)
            for number, index in pool.sets.items():
                rows[number] = Rows(x, y, torch.from_numpy(index).to(device), shift, scale)
    return rows


def place(
    spec: PartySpec, rows: Mapping[int, Rows], publics: dict[int, PublicSet], device: str
) -> ClientContext:
    """A specification's context with its row sets. `publics` keeps one public set for all parties
    of a process.
    """
    own = {name: rows[number] for name, number in spec.rows.items()}
    data, public = own.pop("data", None), own.pop("public", None)
    shared = None
    if public is not None and spec.public is not None:
        shared = publics.setdefault(spec.rows["public"], PublicSet(public, *spec.public))
    tests = {name.removeprefix("test "): own_rows for name, own_rows in own.items()}
    return replace(spec.context, data=data, public=shared, tests=tests, device=device)


def _parts(builder: Any) -> tuple[Any, Any, ClientContext]:
    match builder:
        case partial(func=kind, args=(cfg, ClientContext() as context), keywords={}):
            return kind, cfg, context
    raise EngineError(
        "the ray engine builds parties on its workers: each builder must be partial(class, cfg, "
        "context)"
    )


def _row_sets(context: ClientContext) -> list[tuple[str, Rows]]:
    public = None if context.public is None else context.public.rows
    tests = [(f"test {on}", rows) for on, rows in context.tests.items()]
    return [
        *(
            (name, rows)
            for name, rows in (("data", context.data), ("public", public))
            if rows is not None
        ),
        *tests,
    ]


# -- modules that another machine does not have ----------------------------------------------------


def own_modules(things: Iterable[Any]) -> dict[str, ModuleType]:
    """The user's modules that define these objects, and the user's modules that those import."""
    own: dict[str, ModuleType] = {}
    queue = sorted({name for thing in things for name in (*_origins(thing), *_texts(thing))})
    while queue:
        name = queue.pop()
        module = sys.modules.get(name)
        if name in own or module is None or not _is_own(module):
            continue
        own[name] = module
        for value in vars(module).values():
            queue.append(
                value.__name__
                if isinstance(value, ModuleType)
                else getattr(value, "__module__", None) or ""
            )
    return own


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the user's: not Python's, installed, or fedloom's. Ray pickles `__main__`
    by value anyway.
    """
    root, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    if file is None or root in ("fedloom", "__main__") or root in sys.stdlib_module_names:
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _parts_of(thing: Any) -> Iterator[Any]:
    """The classes, functions and values that a builder consists of."""
    if isinstance(thing, partial):
        thing = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, ClientContext):
        thing = (thing.network, thing.encoder, thing.black_box and thing.black_box.make)
    if not isinstance(thing, tuple):
        yield thing
        return
    for part in thing:
        yield from _parts_of(part)


def _origins(thing: Any) -> Iterator[str]:
    """Names of the modules of the classes and functions in a builder's parts."""
    for part in _parts_of(thing):
        if getattr(part, "__qualname__", None) and not isinstance(part, type):
            yield part.__module__ or ""
        else:
            yield from (
                kind.__module__ for kind in (part if isinstance(part, type) else type(part)).__mro__
            )


def _texts(thing: Any) -> Iterator[str]:
    """Names of modules in import paths such as `package.module:factory`, which the
    worker resolves.
    """
    return (
        part.partition(":")[0] for part in _parts_of(thing) if isinstance(part, str) and ":" in part
    )
