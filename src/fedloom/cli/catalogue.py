"""The registries as rows of plain values, for `fedloom list`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from fedloom.core.method import Method

LONG = ("paper", "source", "public_set")
"""Columns that only --json prints."""


def rows(kind: str) -> list[dict[str, Any]]:
    """One row for each entry of a registry; or, for a method's name, for each of its settings.

    Raises:
        ConfigError: the name is neither a registry nor a method.
    """
    kinds = {
        "methods": _methods,
        "models": _models,
        "datasets": _datasets,
        "partitions": _partitions,
        "experiments": _experiments,
        "reproductions": _reproductions,
    }
    if kind in kinds:
        return kinds[kind]()
    from fedloom.methods import registry

    known = registry()
    if kind not in known:
        raise ConfigError(f"unknown list {kind!r}.{did_you_mean(kind, [*kinds, *known])}")
    return _settings(known[kind])


def _settings(method: Method) -> list[dict[str, Any]]:
    values = method.configure().model_dump(mode="json")
    fields = method.config.model_fields
    return [
        {"name": f"params.{name}", "default": json.dumps(value), "what": fields[name].description}
        for name, value in values.items()
    ]


def _methods() -> list[dict[str, Any]]:
    from fedloom.methods import registry

    return [
        {
            "name": m.name,
            "what": m.title,
            "family": m.family,
            "presets": ["recommended", *m.presets],
            "public_set": "public rows" in m.needs,
            "paper": m.paper,
        }
        for m in registry().values()
    ]


def _models() -> list[dict[str, Any]]:
    from fedloom.models import BLACK_BOXES, MODELS

    boxes = {"inputs": ["table", "image"], "norm": "", "source": "scikit-learn; docs/black-boxes.md"}
    return [
        {"name": name, "what": m.title, "inputs": list(m.inputs), "norm": m.norm, "source": m.source}
        for name, m in MODELS.items()
    ] + [{"name": name, "what": f"black box: {box.title}", **boxes} for name, box in BLACK_BOXES.items()]


def _datasets() -> list[dict[str, Any]]:
    from fedloom.data.sources import SOURCES

    return [
        {"name": name, "what": s.title, "bundled": s.bundled, "hub": s.hub, "extra": s.extra}
        for name, s in SOURCES.items()
    ]


def _partitions() -> list[dict[str, Any]]:
    from fedloom.data.partitions import PARTITIONS

    return [
        {"name": name, "what": p.title, "options": [f"{o.name}={o.default}" for o in p.options]}
        for name, p in PARTITIONS.items()
    ]


def _experiments() -> list[dict[str, Any]]:
    import tomllib

    from fedloom.experiment.reading import experiments

    return [{"name": name, "what": tomllib.loads(text).get("title", "")} for name, text in experiments().items()]


def _reproductions() -> list[dict[str, Any]]:
    from fedloom.reproduce.spec import read, shipped

    each = {name: read(name) for name in shipped()}
    return [{"name": name, "place": one.place, "title": one.title} for name, one in each.items()]
