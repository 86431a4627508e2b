"""Commands and preset files that other installed packages add to fedloom, by entry points.

fedloom.commands   the command NAME: a function with Typer's annotations
fedloom.presets    a function that returns the texts of TOML files by name
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any


def commands() -> dict[str, Callable[..., Any]]:
    """The added commands by name."""
    return {entry.name: entry.load() for entry in entry_points(group="fedloom.commands")}


def presets() -> dict[str, str]:
    """The texts of the added preset files by name."""
    return {name: text for entry in entry_points(group="fedloom.presets") for name, text in entry.load()().items()}
