"""Commands and preset files that other installed packages add to fedloom, by entry points.

fedloom.commands   the command NAME: a function with Typer's annotations
fedloom.presets    a function that returns the texts of TOML files by name
"""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedloom.core.errors import warn_once


def commands() -> dict[str, Callable[..., Any]]:
    """The added commands by name."""
    return dict(_loaded("fedloom.commands", lambda entry: entry.load()))


def presets() -> dict[str, str]:
    """The texts of the added preset files by name."""
    each = _loaded("fedloom.presets", lambda entry: dict(entry.load()()))
    return {name: text for _, texts in each for name, text in texts.items()}


def _loaded(group: str, load: Callable[[EntryPoint], Any]) -> Iterator[tuple[str, Any]]:
    """Each entry of a group with what it loads. A broken package gives a warning, and takes nothing
    else away.
    """
    for entry in entry_points(group=group):
        try:
            yield entry.name, load(entry)
        except Exception as error:
            package = (
                "an installed package" if entry.dist is None else f"the package {entry.dist.name}"
            )
            warn_once(
                f"{package} adds {entry.name} to fedloom, but it cannot be imported "
                f"({type(error).__name__}: {error}): repair or uninstall it"
            )
