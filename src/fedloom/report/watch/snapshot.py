"""The state of a run's or a comparison's folder at one moment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from fedloom.core.errors import DataError
from fedloom.experiment.view import FILE, QUIET, View, alive, read, signs

State: TypeAlias = Literal["running", "quiet", "gone", "stopped", "finished", "failed"]
"""As the run says it, or that it shows no sign of life: `quiet`, or `gone` if its process is."""


class RunBrief(BaseModel):
    """One run of a comparison."""

    model_config = ConfigDict(frozen=True)

    folder: str
    name: str
    seed: int
    state: State
    round: int
    rounds: int
    measure: str
    accuracy: float | None


class Snapshot(BaseModel):
    """A folder at one moment.

    Attributes:
        now: Unix time.
        folder: its name.
        state, news: of the run shown, as a word and as a sentence.
        over: whether nothing more will come.
        run: the one run, or of a comparison the one in progress.
        runs: of a comparison, those that have begun, in that order.
    """

    model_config = ConfigDict(frozen=True)

    now: float
    folder: str
    state: State
    news: str
    over: bool
    run: View
    runs: list[RunBrief] = []


def newest(runs: Path) -> Path:
    """The run or comparison in a folder of runs that was written to last.

    Raises:
        DataError: there is none.
    """
    files = [(file.stat().st_mtime, file.parent) for file in runs.glob(f"*/{FILE}")]
    files += [(file.stat().st_mtime, file.parent.parent) for file in runs.glob(f"*/*/{FILE}")]
    if not files:
        raise DataError(f"there is no run in {runs}/ to watch; start one with fedloom run, or name its folder")
    return max(files)[1]


def take(folder: Path, now: float) -> Snapshot:
    """The state of a folder now.

    Raises:
        DataError: the folder is no run's and no comparison's, or is damaged.
    """
    inside = [] if (folder / FILE).is_file() else [file.parent for file in folder.glob(f"*/{FILE}")]
    views = {each: read(each) for each in inside or [folder]}
    states = {each: _state(view, now) for each, view in views.items()}
    shown = max(views, key=lambda each: (states[each] == "running", views[each].updated))
    view, state = views[shown], states[shown]
    return Snapshot(
        now=now,
        folder=folder.resolve().name,
        state=state,
        news=_news(view, state, now),
        over=_ended(folder, view, now) if inside and state == "finished" else state not in ("running", "quiet"),
        run=view,
        runs=[
            RunBrief(**{**views[each].model_dump(), "folder": each.name, "state": states[each]})
            for each in sorted(inside, key=lambda each: views[each].started)
        ],
    )


def _state(view: View, now: float) -> State:
    gone, quiet = signs(view, now)
    return "gone" if gone else view.state if quiet is None else "quiet"


def _news(view: View, state: State, now: float) -> str:
    """What a person must know of the state, if anything."""
    silent = f"no sign of life for {now - view.updated:.0f} s"
    resume = "the same command with --resume continues"
    return {
        "running": "",
        "quiet": f"{silent}: the machine of this run, or the connection to its folder, may be down",
        "gone": f"{silent}: its process is gone; {resume} from the last checkpoint",
        "stopped": f"stopped after round {view.round}{view.words and ' '}{view.words}; {resume}"
        + ("" if view.words else " from there"),
        "finished": "",
        "failed": f"failed after round {view.round}: {view.words}",
    }[state]


def _ended(folder: Path, last: View, now: float) -> bool:
    """Whether a comparison whose last run is finished has no other to come."""
    found, there = folder / "comparison.json", alive(last.process)
    if found.is_file() and found.stat().st_mtime > last.updated - 1:  # a file's time is coarser than a clock's
        return True
    return now - last.updated > QUIET if there is None else not there
