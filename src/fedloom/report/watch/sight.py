"""What there is to see of a run's or a comparison's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from fedloom.core.errors import DataError
from fedloom.experiment.view import FILE, QUIET, View, alive, read, signs

State: TypeAlias = Literal["running", "quiet", "gone", "stopped", "finished", "failed"]
"""As the run says it, or that it shows no sign of life: `quiet`, or `gone` if its process is."""


class Brief(BaseModel):
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


class Sight(BaseModel):
    """A folder at one moment.

    Attributes:
        now: Unix time.
        folder: its name.
        state, news: of the run shown, as a word and as a sentence.
        over: whether nothing more will come.
        run: the one run, or of a comparison the one under way.
        runs: of a comparison, those that have begun, in that order.
    """

    model_config = ConfigDict(frozen=True)

    now: float
    folder: str
    state: State
    news: str
    over: bool
    run: View
    runs: list[Brief] = []


def newest(runs: Path) -> Path:
    """The run or comparison in a folder of such that was written to last.

    Raises:
        DataError: there is none.
    """
    written = {file.parent: file.stat().st_mtime for file in runs.glob(f"*/{FILE}")}
    for file in runs.glob(f"*/*/{FILE}"):
        folder = file.parent.parent
        written[folder] = max(file.stat().st_mtime, written.get(folder, 0.0))
    if not written:
        raise DataError(f"there is no run in {runs}/ to watch; start one with fedloom run, or name its folder")
    return max(written, key=lambda folder: written[folder])


def look(folder: Path, now: float) -> Sight:
    """What there is to see now.

    Raises:
        DataError: the folder is no run's and no comparison's, or is damaged.
    """
    inside = [] if (folder / FILE).is_file() else [file.parent for file in folder.glob(f"*/{FILE}")]
    views = {each: read(each) for each in inside or [folder]}
    states = {each: _state(view, now) for each, view in views.items()}
    shown = max(views, key=lambda each: (states[each] == "running", views[each].updated))
    order = sorted(inside, key=lambda each: views[each].started)
    view, state = views[shown], states[shown]
    return Sight(
        now=now,
        folder=folder.resolve().name,
        state=state,
        news=_news(view, state, now),
        over=_ended(folder, view, now) if inside and state == "finished" else state not in ("running", "quiet"),
        run=view,
        runs=[_brief(each, views[each], states[each]) for each in order],
    )


def _state(view: View, now: float) -> State:
    gone, quiet = signs(view, now)
    return "gone" if gone else view.state if quiet is None else "quiet"


def _news(view: View, state: State, now: float) -> str:
    """What a person must know of the state, if anything."""
    silent = f"no sign of life for {now - view.updated:.0f} s"
    return {
        "running": "",
        "quiet": f"{silent}: the machine of this run, or the way to its folder, may be down",
        "gone": f"{silent}: its process is gone; the same command with --resume goes on from the last checkpoint",
        "stopped": f"stopped after round {view.round}; the same command with --resume goes on from there"
        if not view.words
        else f"stopped after round {view.round} {view.words}; the same command with --resume goes on",
        "finished": "",
        "failed": f"failed after round {view.round}: {view.words}",
    }[state]


def _ended(folder: Path, last: View, now: float) -> bool:
    """Whether a comparison whose last run is finished has no other to come."""
    found, there = folder / "comparison.json", alive(last.process)
    if found.is_file() and found.stat().st_mtime > last.updated - 1:  # a file's time is coarser than a clock's
        return True
    return now - last.updated > QUIET if there is None else not there


def _brief(folder: Path, view: View, state: State) -> Brief:
    same = view.model_dump(include={"name", "seed", "round", "rounds", "measure", "accuracy"})
    return Brief(folder=folder.name, state=state, **same)
