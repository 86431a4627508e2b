"""What makes a comparison unfair: methods that train for different numbers of steps, on other
networks or rows, or of which only some were tuned.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom import methods
from fedloom.core.errors import FedloomError
from fedloom.experiment.run.result import RunSummary

TOLERANCE = 0.05
"""Relative difference of local steps below which they count as equal: numbers of rounds are rounded
up.
"""
HINT = "--tune tunes the learning rate of all alike"
"""What a comparison says whose methods were not tuned alike."""
SHOWN = 4
"""Maximum number of networks or settings in a sentence."""


def unequal(summaries: Sequence[RunSummary]) -> list[str]:
    """What gives a method more training, a larger network or more rows than another, each as a
    clause with the values; empty if nothing does.
    """
    first = _first(summaries)
    return (
        [*_steps(first), *_networks(first), *_rows(first), *_local(first)] if len(first) > 1 else []
    )


def remarks(summaries: Sequence[RunSummary]) -> list[str]:
    """How to make a comparison equal, and which settings differ that each method may need its own
    values of.
    """
    first = _first(summaries)
    if len(first) < 2:
        return []
    networks = (
        ["for equal networks add -s 'models.pool=[\"mlp\"]', or another network"]
        if _networks(first)
        else []
    )
    return [*_equal_steps(first), *networks, *_batches(first), *_settings(first)]


def _first(summaries: Sequence[RunSummary]) -> dict[str, RunSummary]:
    """One run of each method, by the method's name in the comparison."""
    first: dict[str, RunSummary] = {}
    for s in summaries:
        first.setdefault(s.name, s)
    return first


def _equal_steps(first: Mapping[str, RunSummary]) -> list[str]:
    """The rounds that give all methods as many local steps as the first, or as the longest round of
    a method, if they differ.
    """
    counted = {name: s for name, s in first.items() if s.local_steps}
    if len(counted) < 2 or not _steps(counted):
        return []
    each = {name: (s.local_steps or 1.0) / max(1, s.rounds) for name, s in counted.items()}
    wanted = max(next(iter(counted.values())).local_steps or 0.0, *each.values())
    rounds = {name: max(1, round(wanted / steps)) for name, steps in each.items()}
    entries = ", ".join(
        _toml({**(s.entry or {"method": s.method}), "rounds": rounds[name]})
        for name, s in counted.items()
    )
    return [f"for equal local steps write in a file: [compare] methods = [{entries}]"]


def _toml(value: object) -> str:
    """A value as TOML on one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def _steps(first: Mapping[str, RunSummary]) -> list[str]:
    """Local steps of a client; where they are unknown, as in vertical learning, the iterations that
    methods declare. Methods without steps, such as trees, are left out.
    """
    joint = any(s.scores for s in first.values())
    counts = {name: float(s.iterations) if joint else s.local_steps for name, s in first.items()}
    known = {name: count for name, count in counts.items() if count is not None}
    if len(known) < 2 or max(known.values()) - min(known.values()) <= TOLERANCE * max(
        known.values()
    ):
        return []
    what = "iterations" if joint else "local steps of a client"
    return [f"{what}: {', '.join(f'{name} {count:,.0f}' for name, count in known.items())}"]


def _networks(first: Mapping[str, RunSummary]) -> list[str]:
    """The networks of clients, if those of one seed differ."""
    found = {
        name: s.architectures
        for name, s in first.items()
        if s.architectures and not s.scores and s.local_steps
    }
    if len({tuple(each) for each in found.values()}) < 2:
        return []
    return [f"networks: {', '.join(f'{name} {_listed(each)}' for name, each in found.items())}"]


def _rows(first: Mapping[str, RunSummary]) -> list[str]:
    """The training rows of all clients."""
    rows = {name: s.training_rows for name, s in first.items() if s.training_rows is not None}
    if len({*rows.values()}) < 2:
        return []
    return [f"training rows: {', '.join(f'{name} {count:,}' for name, count in rows.items())}"]


def _local(first: Mapping[str, RunSummary]) -> list[str]:
    """The settings of local training."""
    found = {name: s.local for name, s in first.items() if s.local_steps or s.scores}
    if all(each == s for s in found.values() for each in found.values()):
        return []
    words = {
        name: ", ".join(f"{k} = {v}" for k, v in each.items()) or "its own"
        for name, each in found.items()
    }
    return [f"local training: {'; '.join(f'{name} {each}' for name, each in words.items())}"]


def _batches(first: Mapping[str, RunSummary]) -> list[str]:
    """The batch sizes, if they differ."""
    sizes = {
        name: s.params.get("batch_size")
        for name, s in first.items()
        if s.local_steps and not s.scores
    }
    if len({*sizes.values()}) < 2 or not all(isinstance(size, int) for size in sizes.values()):
        return []
    return [f"batch sizes differ: {', '.join(f'{name} {size}' for name, size in sizes.items())}"]


def _settings(first: Mapping[str, RunSummary]) -> list[str]:
    """The settings that only some methods have changed. Several entries of one method, as in an
    ablation, are meant.
    """
    if len({s.method for s in first.values()}) < len(first):
        return []
    found = {name: _changed(s) for name, s in first.items()}
    own = {name: each for name, each in found.items() if each}
    if not own or len(own) == len(found):
        return []
    shown = "; ".join(
        f"{name} {', '.join(f'{key} = {value}' for key, value in [*each.items()][:SHOWN])}"
        for name, each in own.items()
    )
    return [f"only some methods have settings of their own: {shown}; {HINT}"]


def _changed(s: RunSummary) -> dict[str, Any]:
    """The settings that differ from the preset of a registered method."""
    try:
        method = methods.registry()[s.method]
        default = method.configure(s.preset).model_dump(mode="json")
    except (FedloomError, KeyError):
        return {}
    return {
        key: value for key, value in s.params.items() if key in default and value != default[key]
    }


def _listed(names: Sequence[str]) -> str:
    """`mlp` or `mlp, cnn-small`, each network once."""
    each = [*dict.fromkeys(sorted(names))]
    return "/".join(each[:SHOWN]) + (f" and {len(each) - SHOWN} more" if len(each) > SHOWN else "")
