"""What a reproduction came to, as other pages and tools read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedloom.core.errors import DataError
from fedloom.reproduce.asked import WHOLE, Asked
from fedloom.reproduce.claims import Judged
from fedloom.reproduce.read import SYSTEMS, Scale, System, shipped

FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """What a table or figure came to.

    Attributes:
        cells: how many have `all` their runs, `some` or `none` of them, or are `untestable`.
        runs: how many are finished.
        seconds: of all runs, wall time; some may serve other tables too.
        versions: of fedloom, that made the runs.
        asked: what was asked for beyond the file.
    """

    name: str
    title: str
    place: str
    system: System
    scale: Scale
    claims: tuple[Judged, ...]
    cells: Mapping[str, int]
    runs: int
    seconds: float
    versions: tuple[str, ...] = ()
    asked: Asked = WHOLE


def dumped(value: Outcome | Sequence[Mapping[str, Any]]) -> bytes:
    """An outcome, or what was made of several, as JSON that every reader takes: without NaN and infinity."""
    plain = asdict(value) if isinstance(value, Outcome) else value
    return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_outcome(path: Path) -> Outcome:
    """An outcome from its file.

    Raises:
        DataError: it can't be read.
    """
    try:
        found = _OUTCOME.validate_json(path.read_bytes())
        dumped(found)  # with what JSON has no word for, such as 1e999, the page over all could not be written
    except (OSError, ValueError):
        raise DataError(f"{path.parent.name}/{path.name} can't be read: repeat its fedloom reproduce") from None
    return found


def read_outcomes(folder: Path) -> tuple[list[Outcome], list[str]]:
    """All outcomes in a folder's folders, in the order of the papers; and what can't be read."""
    found, problems = list[Outcome](), list[str]()
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            found.append(read_outcome(path))
        except DataError as error:
            problems.append(str(error))
    order = {name: number for number, name in enumerate(shipped())}
    papers = [*SYSTEMS]
    return sorted(
        found, key=lambda one: (papers.index(one.system), order.get(one.name, len(order)), one.name)
    ), problems


def repeated(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, Judged, str]]:
    """Every claim, and where the same runs were compared in the same way before; empty at the first time."""
    seen: dict[str, str] = {}
    for one in outcomes:
        for claim in one.claims:
            yield one, claim, seen.get(claim.evidence, "") if claim.evidence else ""
            seen.setdefault(claim.evidence, one.place)


_OUTCOME = TypeAdapter(Outcome)
