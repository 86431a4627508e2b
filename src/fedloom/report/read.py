"""The files of a run or comparison folder, read back and checked."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from fedloom.errors import DataError
from fedloom.report.measures import GLOBAL, OWN
from fedloom.report.schema import Comparison, Flow, Measure, Mixing, Partition, Summary, Trouble

START = "start"
"""The stage of the measures before the first round."""

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Attributes:
        finished: whether there is a result; if not, `summary` is of the last evaluation.
        names: the N clients.
        measured: (iterations, values) for each (measure, party, stage), in the order of the rounds.
        mixing: by round, the weights (N, N) with which each client, a row, mixed everybody's models; empty if the
            method does not note them.
    """

    folder: Path
    finished: bool
    summary: Summary
    names: tuple[str, ...]
    measured: dict[tuple[str, str, str], tuple[list[int], list[float]]]
    partition: Partition
    ledger: tuple[Flow, ...]
    failures: tuple[Trouble, ...]
    config: str
    environment: dict[str, Any]
    mixing: dict[int, np.ndarray]

    @property
    def personal(self) -> bool:
        """Whether what counts is each client's accuracy on its own rows."""
        return bool(self.summary.ways or self.mixing)

    @property
    def last(self) -> str:
        """The last stage of a round."""
        return (self.stages or [START])[-1]

    @property
    def stages(self) -> list[str]:
        """Those after which the accuracy was measured, in order."""
        return [
            stage for what, party, stage in self.measured if (what, party) == ("accuracy mean", "") and stage != START
        ]

    def curve(self, measure: str, stage: str, party: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Iterations (n,) and values (n,) of a measure after one stage, from the start on."""
        parts = [self.measured.get((measure, party, s), ([], [])) for s in (START, stage)]
        x, y = ([value for part in parts for value in part[axis]] for axis in (0, 1))
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read_run(folder: Path) -> Run:
    """Read the folder of a run, finished or not.

    Raises:
        DataError: a file is missing, torn or contradicts another.
    """
    metrics = _table(folder / "metrics.csv", Measure)
    partition = _model(folder / "partition.json", Partition)
    ledger = _table(folder / "ledger.csv", Flow)
    failures = _table(folder / "failures.csv", Trouble)
    config = _text(folder / "config.toml")
    finished = (folder / "result.json").is_file()
    if finished:
        summary = _model(folder / "result.json", Summary)
    else:
        summary = _so_far(folder, config, metrics, ledger, len(failures), partition)
    measured: dict[tuple[str, str, str], tuple[list[int], list[float]]] = {}
    for m in metrics:
        x, y = measured.setdefault((m.measure, m.party, m.stage), ([], []))
        x.append(m.iteration)
        y.append(m.value)
    _whole(folder / "metrics.csv", measured)
    names = tuple(dict.fromkeys(m.party for m in metrics if m.measure == "accuracy"))
    numbers = [summary.clients, len(names), len(summary.accuracy.per_client)]
    numbers += [len(partition.counts), len(partition.architectures)]
    widths = {len(row) for row in partition.counts} | {len(partition.classes)}
    if len(set(numbers)) > 1 or len(widths) > 1:
        raise DataError(
            f"{folder}: the files must speak of the same clients and classes, but they count {numbers} clients "
            f"and {sorted(widths)} classes. They are of different runs: repeat the run in an empty folder."
        )
    return Run(
        folder=folder,
        finished=finished,
        summary=summary,
        names=names,
        measured=measured,
        partition=partition,
        ledger=ledger,
        failures=failures,
        config=config,
        environment=_parsed(folder / "environment.json"),
        mixing=_mixing(folder / "mixing.csv", names),
    )


def read_comparison(folder: Path) -> tuple[Comparison, list[Run]]:
    """Read a comparison, and the runs in its folder that are still there.

    Raises:
        DataError: a file is torn, a run folder lacks one, or holds another run than the comparison's.
    """
    found = _model(folder / "comparison.json", Comparison)
    there = [run for run in found.runs if run.folder and (folder / run.folder).is_dir()]
    runs = [read_run(folder / str(run.folder)) for run in there]
    clients: dict[int, int] = {}
    for said, run in zip(there, runs, strict=True):
        s = run.summary
        if (said.name, said.seed) != (s.name, s.seed) or clients.setdefault(s.seed, s.clients) != s.clients:
            raise DataError(
                f"{run.folder} must hold the run of {said.name} with seed {said.seed} that comparison.json names, but "
                f"holds {s.name} with seed {s.seed} and {s.clients} clients; repeat the comparison with --resume"
            )
    return found, runs


def _mixing(path: Path, names: Sequence[str]) -> dict[int, np.ndarray]:
    """The weights (N, N) of each round that is in the table; what is not finite counts as 0."""
    found: dict[int, np.ndarray] = {}
    numbers = {name: i for i, name in enumerate(names)}
    for line in _table(path, Mixing) if path.is_file() else ():
        matrix = found.setdefault(line.round, np.zeros((len(names), len(names))))
        try:
            for owner, weight in (pair.split(":") for pair in line.weights.split()):
                matrix[numbers[line.party], int(owner)] = float(weight)
        except (KeyError, IndexError, ValueError):
            raise _damaged(path, f"names unknown clients or weights at {line.party}, round {line.round}") from None
    return {round: np.nan_to_num(found[round], posinf=0.0, neginf=0.0) for round in sorted(found)}


def _whole(path: Path, measured: Mapping[tuple[str, str, str], tuple[list[int], list[float]]]) -> None:
    """Refuse a table in which an evaluation lacks a measure of the whole federation."""
    every = ("accuracy mean", "accuracy std", "loss mean", "bytes up", "bytes down", "bytes across")
    for stage in {stage for measure, _, stage in measured if measure in every} | {START}:
        found = [measured.get((measure, "", stage), ([], []))[0] for measure in every]
        if not found[0] or any(iterations != found[0] for iterations in found):
            raise _damaged(path, f"lacks a line: at the stage {stage!r} the measures differ in number")


def _so_far(
    folder: Path,
    config: str,
    metrics: Sequence[Measure],
    ledger: Sequence[Flow],
    failures: int,
    partition: Partition,
) -> Summary:
    """What `result.json` would hold of a run under way, at its last evaluation."""
    seen = [m for m in metrics if m.measure == "accuracy mean"]
    if not seen:
        raise DataError(f"{folder / 'metrics.csv'} holds no accuracy yet; go on with the run by --resume")
    try:
        asked = tomllib.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise _damaged(folder / "config.toml", f"is not valid TOML: {error}") from None
    last = seen[-1]
    then = {(m.measure, m.party): m.value for m in metrics if (m.round, m.stage) == (last.round, last.stage)}

    def over_clients(what: str) -> dict[str, Any] | None:
        each = [value for (measure, party), value in then.items() if measure == what and party]
        return {"mean": float(np.mean(each)), "std": float(np.std(each)), "per_client": each} if each else None

    prepared = dict.fromkeys(what for what, party in then if party and what.startswith(f"{OWN} "))
    method = str(asked.get("method", ""))
    values = {
        "name": asked.get("name") or method,
        "method": method,
        "title": "",
        "preset": asked.get("preset"),
        "seed": asked.get("seed"),
        "rounds": last.round,
        "iterations": last.iteration,
        "dataset": asked.get("data", {}).get("name"),
        "clients": asked.get("data", {}).get("clients"),
        "engine": None,
        "accuracy": over_clients(GLOBAL),
        "own_accuracy": over_clients(OWN),
        "ways": {what.removeprefix(f"{OWN} "): over_clients(what) for what in prepared},
        "agreement": then.get(("agreement", "")),
        "chance": partition.chance,
        "own_chance": partition.own_chance,
        "bytes": {way: then.get((f"bytes {way}", "")) for way in ("up", "down", "across")},
        "messages": sum(flow.count for flow in ledger),
        "seconds": {},
        "failures": failures,
        "public_sha256": None,
        "state_sha256": None,
    }
    return _checked(Summary, values, folder / "metrics.csv")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"a report needs {path.name}, but {path.parent} has none; bring it back, or repeat the run"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"can't be read: {error}") from None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise _damaged(path, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, f"must hold a JSON object, not {type(value).__name__}")
    return value


def _model(path: Path, model: type[T]) -> T:
    return _checked(model, _parsed(path), path)


def _table(path: Path, model: type[T]) -> tuple[T, ...]:
    """The lines of a table. A line with a cell too few or too many is damage, as is one of the wrong type."""
    lines = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        columns = next(lines, [])
        missing = [name for name in model.model_fields if name not in columns]
        if missing:
            raise _damaged(path, f"lacks the column {missing[0]!r}")
        where: Callable[[], str] = lambda: f" line {lines.line_num}"
        rows = []
        for line in lines:
            if len(line) != len(columns):
                raise _damaged(path, f"has {len(line)} cells in line {lines.line_num}, not {len(columns)}")
            rows.append(_checked(model, dict(zip(columns, line, strict=True)), path, where))
        return tuple(rows)
    except csv.Error as error:
        raise _damaged(path, f"is not valid CSV: line {lines.line_num}: {error}") from None


def _checked(model: type[T], values: dict[str, Any], path: Path, where: Callable[[], str] = lambda: "") -> T:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"is not as a run writes it:{where()} {key}: {first['msg']}") from None


def _damaged(path: Path, how: str) -> DataError:
    return DataError(f"{path} {how}; bring the file back, or repeat the run")
