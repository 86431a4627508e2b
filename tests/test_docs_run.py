"""Every command and snippet of the README and the docs is executed, page by page, with one round on
small data.

The blocks of a page run from top to bottom in one folder, so that later ones find what earlier ones
wrote. `NOT_RUN` lists the lines that a test of one process cannot run; `tests/test_docs.py` parses
these, too. Pages in `AT_NIGHT` are
marked slow: what they say is understood with every change (`tests/test_docs.py`), and run every
    night.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import textwrap
import tomllib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from pyarrow import csv, parquet
from sklearn.datasets import load_breast_cancer

from fedloom.cli import main
from fedloom.experiment import trial
from fedloom.experiment.config import run as config
from fedloom.experiment.plan import reading
from fedloom.experiment.plan.reading import check
from fedloom.experiment.pool import pool
from fedloom.experiment.pool.job import do_all
from fedloom.remote.federation import read as read_federation
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.config import read as read_node
from fedloom.sweep.config import read as read_sweep
from tests.test_docs import PAGES, ROOT

NOT_RUN = {
    r"make |pip install|python3 -m venv|(\.venv/bin/)?(ruff|pytest|python -m benchmarks)": "installs, or checks",  # noqa: E501
    r"useradd|python3\.11|install -|cp |docker|head ": "changes the system, or is a tool of the system",  # noqa: E501
    r"fedloom certs|fedloom node|fedloom run.*--federation": "needs several processes: tests/net/test_readme.py",  # noqa: E501
    r"fedloom .*(--engine ray|--ray )": "needs a cluster: tests/engines/test_ray.py",
    r"fedloom .*(--device |device=)cuda": "needs a GPU",
    r"fedloom .*(mlflow|wandb)": "needs the extra trackers, which CI lacks: tests/track",
    r"fedloom \w+ src/|fedloom copy fd src/": "writes into the package: tests/methods/test_added_page.py",  # noqa: E501
}
OWNERS = (
    "-s data.name=heart.csv -s data.label=disease -s data.group=hospital -s data.drop=[] -s "
    "data.keep=[]"
)
MORE = {
    r"run fedal -s data.name=mnist": "-s data.name=digits",
    r"(run|pretrain) meta-fashion": "-s data.name=digits -s data.server_rows=60 -s pretrained.epochs=1",  # noqa: E501
    r"run fedal-(field|bytes)": "-s data.name=digits -s data.test_rows=100 -s models.pool=mlp -s data.public_rows=40",  # noqa: E501
    r"run vertical-fashion": "-s data.name=digits -s data.test_rows=100 -s columns.unaligned=60",
    r"run peers-groups": "-s data.name=digits -s data.test_rows=100 -s data.own_test_rows=20",
    r"run \S+(adult|credit)": "-s data.name=wine -s data.test_rows=40 -s columns.aligned=60 -s columns.unaligned=9",  # noqa: E501
    r"run \S+/(?!adult|credit|devices|views)[\w-]+\.toml": f"{OWNERS} -s data.public_rows=8 -s data.test=0.25",  # noqa: E501
    r"run \S+newcomers": "-s data.server_rows=20",
    r"run \S+(devices|views)\.toml": "-s columns.aligned=60",
    r"sweep ": "-s data.clients=2",
}
"""Arguments that make a command small, or put data that is here into the place of the hub's or of a
download.
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks, each with its language."""
    found = re.findall(r"^( *)```([\w{}-]*)\n(.*?)^\1```", page.read_text(), re.M | re.S)
    return [(language, textwrap.dedent(text)) for _, language, text in found]


def table(numbers: str, **words: str) -> str:
    """A CSV file of 120 rows: columns of numbers, then columns that repeat some words; "" numbers
    the rows.
    """
    rng, names = np.random.default_rng(0), numbers.split(",")
    lists = [column.split(",") for column in words.values()]
    rows = [
        [*rng.standard_normal(len(names)).round(2), *(w[i % len(w)] or f"P{i}" for w in lists)]
        for i in range(120)
    ]
    return "\n".join(",".join(map(str, row)) for row in [[*names, *words], *rows])


HEART = table(
    "age,chest_pain,max_rate", disease="0,1,1", hospital="cleveland,hungarian,switzerland,va"
)
VIEWS = {f"view{k}.csv": table("a,b", id="", **({} if k else {"digit": "0,1,2"})) for k in range(6)}
DEVICES = {
    "phone.csv": table("x,y", window="", activity="sit,walk"),
    "watch.csv": table("x,y,z", window=""),
}
CANCER = {"new.csv": table(",".join(load_breast_cancer().feature_names), patient="")}
FILES: dict[str, dict[str, str]] = {
    "README.md": {"my.csv": HEART},
    "docs/alignment.md": {
        "clinic.csv": table("age", patient=""),
        "lab.csv": table("iron", subject_no=""),
    },
    "docs/cases/activity.md": DEVICES,
    "docs/cases/views.md": VIEWS,
    "docs/data.md": {"heart.csv": HEART},
    "docs/export.md": CANCER,
    "docs/method.md": {"mine.py": (ROOT / "examples" / "fedavg.py").read_text()},
    "docs/partners.md": {
        "clinic.csv": table("age", patient="", ill="0,1,1"),
        "lab.csv": table("iron", patient=""),
    },
    "skills/fedloom/SKILL.md": {"my.csv": HEART},
    "docs/numbers.md": {
        "homes.csv": table("rooms,area", price="101.5,250.25,199.75,320.5", city="a,b")
    },
    "docs/tables.md": {"heart.csv": HEART},
    "docs/sweep.md": {"my.toml": blocks(ROOT / "docs" / "sweep.md")[0][1]},
    "docs/trial.md": {
        "heart.csv": HEART,
    },
    "docs/vertical.md": {
        "clinic.csv": table("age", patient=""),
        "lab.csv": table("iron", patient=""),
    },
}
"""What a reader has before, by page; the cases of owners share the hospitals' table."""
FILES = {
    f"docs/cases/{page.name}": {"heart.csv": HEART} for page in PAGES if page.parent.name == "cases"
} | FILES
AT_NODES = {
    "wards.csv": table("age,pressure", ward="north,south", outcome="well,ill"),
    "lab.csv": table("iron", subject_no=""),
    "clinic.csv": HEART,
    "public.csv": HEART,
}
"""Files that sections of a node or a federation name."""
BEFORE = {
    "docs/vertical.md": "fedloom run proto-evfl -s data.name=breast_cancer -s data.clients=2 --out runs/clinic"  # noqa: E501
}
"""What a page takes for granted."""


def lines(text: str) -> list[tuple[str, bool]]:
    """The commands of a block, each with whether an error follows; if one begins with "$ ", other
    lines are output.
    """
    joined = re.sub(r"\\\n\s*", " ", text).splitlines()
    if text.startswith("$ "):
        beside = zip(joined, [*joined[1:], ""], strict=True)
        return [
            (line[2:], after.startswith("error "))
            for line, after in beside
            if line.startswith("$ ")
        ]
    return [(line, False) for line in joined if line.strip()]


DONE: set[str] = set()
"""Commands without files of their own that another page has shown."""


def why_not(line: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, line)), "")


class Here:
    """Runs the jobs of a pool in this process, so that they are small, too."""

    room = 1

    def submit(self, *order: Any, gpus: float) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(do_all(*order))
        return done

    def wait(self, running: list[Future[Any]]) -> set[Future[Any]]:
        return {*running}

    def result(self, done: Future[Any], jobs: int) -> Any:
        return done.result()

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture
def small(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the examples, in which runs have one round, comparisons two methods, and trials
    one repeat.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    # a file of another folder would not be trusted
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    resolve, checked, run_trial = config.RunConfig.resolve, reading.check, trial.run_trial

    def one_round(self: config.RunConfig) -> Any:
        method, cfg, rounds = resolve(self)
        # a check or an estimate has few
        return method, cfg, rounds if rounds < 5 else max(1, cfg.min_rounds)

    def few(values: Any) -> config.Experiment:
        """Five clients, two methods, one seed; three of a case, whose table has intervals."""
        found = checked(values)
        data = found.run.data.model_copy(update={"clients": min(5, found.run.data.clients)})
        change: dict[str, Any] = {"run": found.run.model_copy(update={"data": data})}
        if found.compare is not None:
            seeds = found.compare.seeds[: 3 if "cases" in page.parts else 1]
            change["compare"] = config.CompareConfig(methods=found.compare.methods[:2], seeds=seeds)
        return found.model_copy(update=change)

    def short(owners: Any, settings: Any, **more: Any) -> Any:
        tiny = {
            "repeats": 1,
            "seconds": None,
            "points": (1,),
            "rates": (0.05,),
            "networks": ("linear",),
            "alone": (),
        }
        return run_trial(
            owners,
            replace(settings, methods=settings.methods[:1] or ("fedavg-ft",), **tiny),
            **more,
        )

    monkeypatch.setattr(config.RunConfig, "resolve", one_round)
    monkeypatch.setattr(reading, "check", few)
    monkeypatch.setattr(trial, "run_trial", short)
    monkeypatch.setattr(pool, "_executor", lambda *_: Here())


def main_with(*arguments: str) -> Any:
    """The exit status of `fedloom ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["fedloom", *arguments])
        main()
    return stop.value.code or 0


def run_line(line: str, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
    """Run `fedloom …` or `python FILE …` in this process."""
    words = shlex.split(re.sub(r"^\.venv/bin/", "", line), comments=True)
    program, *arguments = [word for word in words if word != "&"]
    if program == "python":
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.syspath_prepend(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        return
    assert program == "fedloom", line
    arguments += [
        word
        for pattern, more in MORE.items()
        if re.match(pattern, shlex.join(arguments))
        for word in shlex.split(more)
    ]
    assert bool(main_with(*arguments)) == fails, line


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "__docs__"}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.name} block", "exec"), names)
        elif language in ("", "sh"):
            for line, fails in lines(text):
                command = line.partition("  #")[0].removeprefix(".venv/bin/").strip()
                if why_not(line) or command in DONE:
                    continue
                run_line(line, monkeypatch, fails)
                if not re.search(r"[/.]|--out", command):
                    DONE.add(command)


AT_NIGHT = {
    "aggregate",
    "augfl",
    "black-boxes",
    "cite",
    "differential-privacy",
    "fedal",
    "method",
    "peers",
    "sweep",
}
AT_NIGHT |= {"SKILL", "trackers", "trust-weighted", "vertical", "vertical-trees"}
"""Pages that take several CPU seconds, and are not where a new user begins; all cases, too."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=pytest.mark.slow if page.stem in AT_NIGHT or page.parent.name == "cases" else (),
        )
        for page in PAGES
    ],
)
def test_commands_and_snippets_run(
    page: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(page.relative_to(ROOT))
    for file, content in FILES.get(name, {}).items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(content)
        if file.endswith(".parquet"):
            parquet.write_table(csv.read_csv(file), file)
    if name in BEFORE:
        run_line(BEFORE[name], monkeypatch)
    run_page(page, monkeypatch)


def settings_of(page: Path, text: str, folder: Path) -> None:
    """Read the settings of a block by the reader of their file, with what the block leaves out."""
    values = tomllib.loads(text)
    policy = {*values} <= {*NodeConfig.model_fields} and {*values} != {"data"}
    if "# federation.toml" in text or "# node.toml" in text or policy:
        main_with("certs", "alpha", "--all-here", "--method", "fedal", "--out", str(folder))
        file = folder / ("federation.toml" if "# federation.toml" in text else "alpha/node.toml")
        for name, rows in AT_NODES.items():
            file.with_name(name).write_text(rows)
        file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | values))
        (read_federation if file.name == "federation.toml" else read_node)(file)
    elif "sweep" in values:
        (folder / "sweep.toml").write_text(text)
        read_sweep(str(folder / "sweep.toml"))
    else:
        top: dict[str, Any] = {
            key: values.pop(key) for key in ("title", "compare") if key in values
        }
        assert check(
            {**top, "run": {"method": "proto-evfl" if "columns" in values else "fedal"} | values}
        ).runs()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{page.relative_to(ROOT)}-{n}")
        for page in PAGES
        for n, (language, text) in enumerate(blocks(page))
        if language == "toml"
    ],
)
def test_settings_are_valid(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text("def factory(shape, classes): ...")
    settings_of(page, text, tmp_path)


def test_every_block_is_run_read_or_text() -> None:
    known = {"", "sh", "python", "toml", "text", "{toctree}", "{eval-rst}"}
    assert [
        (page.name, name) for page in PAGES for name, _ in blocks(page) if name not in known
    ] == []
