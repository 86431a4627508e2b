"""What `partition.json` says of parties that hold different columns."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from fedloom.report.files import Read


class Holding(Read):
    """What one party has: columns of a table by name, or a picture's shape; rows; and how uneven its classes are."""

    name: str
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] | None
    aligned: int
    unaligned: int
    unaligned_counts: tuple[int, ...] | None
    gamma: float | None
    classes_held: int | None
    mid: float | None
    cosine: float | None


class Together(Read):
    """How uneven the unaligned rows of all parties are together."""

    weighted_cosine: float | None


class Parties(Read):
    """What parties with different columns hold; the rows (K,) of each class among those that all have."""

    aligned_counts: tuple[int, ...]
    test_counts: tuple[int, ...]
    parties: tuple[Holding, ...] = Field(min_length=1)
    all: Together

    def ids(self, seen: Iterable[str]) -> tuple[str, ...]:
        """What the tables of a run call the parties, given those names that are seen there: by role and number."""
        role = next((name.rpartition("-")[0] for name in seen if "-" in name), "party")
        return tuple(f"{role}-{m}" for m in range(len(self.parties)))
