"""The provenance of a reproduction's numbers: versions, machine and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedloom.core.errors import FedloomError
from fedloom.report import formatting as fmt
from fedloom.report.read import Run
from fedloom.reproduce.cost import cost
from fedloom.reproduce.results import TableResults


def warnings(found: TableResults) -> Iterator[str]:
    """What a reader must know before the numbers."""
    yield from found.asked.warnings(found.reproduction.scale(found.scale).seeds)
    distinct = {one.folder for _, one in found.attempts}
    if lacking := len(distinct) - len(found.runs):
        yield f"{lacking} of {len(distinct)} runs are missing, and so is what depends on them."
    versions = sorted({str(run.environment.get("fedloom")) for run in found.runs.values()})
    if len(versions) > 1:
        names = fmt.together(versions)
        yield f"The runs were made by several versions of fedloom, {names}: differences between them may be of these."


def facts(found: TableResults) -> Iterator[tuple[str, str]]:
    """What the numbers may depend on and what they cost, as pairs of a name and a text."""
    runs = list(found.runs.values())
    about = found.reproduction.scale(found.scale).about
    yield "Scale", f"{found.scale}: {about}" if about else found.scale
    yield "Runs", f"{len(runs)} finished of {len({one.folder for _, one in found.attempts})}"
    if not runs:
        return
    started = sorted(str(run.environment.get("started", ""))[:10] for run in runs)
    yield "Date", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"
    names = {"fedloom": "fedloom", "python": "Python", "torch": "PyTorch", "numpy": "NumPy"}
    yield "Versions", fmt.together([f"{name} {_each(runs, key)}" for key, name in names.items()])
    yield "Machine", f"{_each(runs, 'platform')}, {_each(runs, 'processor')}, {_each(runs, 'cores')} cores"
    if accelerators := [name for name in {run.environment.get("cuda") for run in runs} if name]:
        yield "Accelerator", fmt.together(sorted(map(str, accelerators)))
    if passes := _passes(found):
        yield "Sample passes", f"about {passes:,.2g}, by an estimate; a row in a training step counts 3"
    yield "Wall time", fmt.duration(sum(run.summary.seconds.get("total", 0.0) for run in runs))
    sizes = [sum(getattr(run.summary.bytes, eval_mode) for run in runs) for eval_mode in ("up", "down", "across")]
    eval_modes = zip(("up", "down", "across"), sizes, strict=True)
    yield (
        "Tensor data",
        fmt.together([f"{fmt.size(size)} {eval_mode}" for eval_mode, size in eval_modes if size]) or "none",
    )


def _each(runs: Sequence[Run], key: str) -> str:
    """The values of a key of the runs' environments."""
    return " or ".join(sorted({str(run.environment.get(key, "unknown")) for run in runs}))


def _passes(found: TableResults) -> float:
    """Of the finished runs; 0 where nobody can tell."""
    each: dict[str, float] = {}
    total = 0.0
    for config in {one.folder: one.config for _, one in found.attempts if one.run}.values():
        alike = config.model_copy(update={"seed": 0}).model_dump_json()
        if alike not in each:
            try:
                each[alike] = cost(config).passes
            except FedloomError:
                return 0.0
        total += each[alike]
    return total
