"""Read and validate the files of a run's folder."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedloom.core.errors import DataError

T = TypeVar("T", bound=BaseModel)


def text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path.parent} has no {path.name}. Restore the file or repeat the run."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"cannot be read: {error}") from None


def parsed(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DataError if the file holds none."""
    try:
        value = json.loads(text(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise damaged(path, f"must hold a JSON object, not {type(value).__name__}")
    return value


def model(path: Path, kind: type[T]) -> T:
    """A JSON object, validated by a model. Raises DataError if invalid."""
    return checked(kind, parsed(path), path)


def csv_rows(path: Path, model: type[T]) -> tuple[T, ...]:
    """The rows of a CSV file, validated by a model. Raises DataError if a row or
    column is invalid.
    """
    lines = csv.reader(io.StringIO(text(path), newline=""), strict=True)
    try:
        columns = next(lines, [])
        needed = [name for name, field in model.model_fields.items() if field.is_required()]
        missing = [name for name in needed if name not in columns]
        if missing:
            raise damaged(path, f"has no column {missing[0]!r}")
        where: Callable[[], str] = lambda: f" line {lines.line_num}"
        rows = []
        for line in lines:
            if len(line) != len(columns):
                raise damaged(
                    path, f"has {len(line)} cells in line {lines.line_num}, not {len(columns)}"
                )
            rows.append(checked(model, dict(zip(columns, line, strict=True)), path, where))
        return tuple(rows)
    except csv.Error as error:
        raise damaged(path, f"is not valid CSV: line {lines.line_num}: {error}") from None


def checked(
    model: type[T], values: dict[str, Any], path: Path, where: Callable[[], str] = lambda: ""
) -> T:
    """A model of values at the position `where` of a file. Raises DataError if they are invalid."""
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f" {part}" for part in [".".join(str(part) for part in first["loc"])] if part)
        raise damaged(path, f"is invalid:{where()}{key}: {first['msg']}") from None


def damaged(path: Path, how: str) -> DataError:
    """The error for a damaged file."""
    return DataError(f"{path} {how}. Restore the file or repeat the run.")
