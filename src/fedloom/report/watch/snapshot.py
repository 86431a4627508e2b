"""The state of the folder of a run or comparison at one time."""

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from fedloom.core.errors import DataError
from fedloom.experiment.run.view import FILE, SILENCE, View, alive, liveness, read

State: TypeAlias = Literal["running", "quiet", "gone", "stopped", "finished", "failed"]
"""As the run reports it, or, without a recent update, `quiet`, or `gone` if its process has ended.
"""


class RunBrief(BaseModel):
    """One run of a comparison."""

    model_config = ConfigDict(frozen=True)

    folder: str
    name: str
    seed: int
    state: State
    round: int
    rounds: int
    metric: str
    accuracy: float | None


class Snapshot(BaseModel):
    """The state of a folder at one time.

    Attributes:
        now: Unix time.
        folder: the folder's name.
        state, news: the state of `run`, as a word and as a sentence.
        over: whether no further update is expected.
        run: the run, or the run of a comparison that is in progress.
        runs: the runs of a comparison that have started, in order.
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
    """The most recently updated run or comparison in a folder of runs.

    Raises:
        DataError: the folder holds no run.
    """
    files = [(file.stat().st_mtime, file.parent) for file in runs.glob(f"*/{FILE}")]
    files += [(file.stat().st_mtime, file.parent.parent) for file in runs.glob(f"*/*/{FILE}")]
    if not files:
        raise DataError(
            f"no run to watch in {runs}/. Start one with fedloom run, or name its folder."
        )
    return max(files)[1]


def take(folder: Path, now: float) -> Snapshot:
    """The state of a folder at the time `now`.

    Raises:
        DataError: the folder holds neither a run nor a comparison, or is damaged.
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
        over=_ended(folder, view, now)
        if inside and state == "finished"
        else state not in ("running", "quiet"),
        run=view,
        runs=[
            RunBrief(**{**views[each].model_dump(), "folder": each.name, "state": states[each]})
            for each in sorted(inside, key=lambda each: views[each].started)
        ],
    )


def _state(view: View, now: float) -> State:
    gone, quiet = liveness(view, now)
    return "gone" if gone else view.state if quiet is None else "quiet"


def _news(view: View, state: State, now: float) -> str:
    """An explanation of the state, if it needs one."""
    silent = f"no update for {now - view.updated:.0f} s"
    resume = "repeat the command with --resume to continue"
    return {
        "running": "",
        "quiet": f"{silent}: the run's machine or the connection to its folder may be down",
        "gone": f"{silent}: the run's process has ended; {resume} from the last checkpoint",
        "stopped": f"stopped after round {view.round}{view.reason and ' '}{view.reason}; {resume}"
        + ("" if view.reason else " from there"),
        "finished": "",
        "failed": f"failed after round {view.round}: {view.reason}",
    }[state]


def _ended(folder: Path, last: View, now: float) -> bool:
    """Whether a comparison whose last run is finished has no further runs."""
    file, process_alive = folder / "comparison.json", alive(last.process)
    # file times are coarser than the clock
    if file.is_file() and file.stat().st_mtime > last.updated - 1:
        return True
    return now - last.updated > SILENCE if process_alive is None else not process_alive
