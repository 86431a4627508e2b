"""Every command as a new user would type it."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from rich.text import Text

from fedloom._version import __version__
from fedloom.cli import listing
from fedloom.cli.app import app
from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.reading import seeds_of
from fedloom.methods import registry, source_of
from fedloom.report.formatting import size
from tests.command import Done

FAST = ["-s", "models.pool=['linear']", "-s", "data.clients=3", "-s", "evaluate.points=2"]


def test_a_first_run_a_second_and_their_reports(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    for folder in ("fedal", "fedal-2"):
        done = fedloom("run", "fedal", "--rounds", "2", *FAST)
        assert f"report  runs/{folder}/report.html" in done.stdout
        assert (
            (tmp_path / "runs" / folder / "report.html")
            .read_text()
            .lower()
            .startswith("<!doctype html>")
        )
    assert re.search(r"fedal\s.*\d\d?\.\d%", done.stdout)
    assert "round 2/2" in done.stdout
    one, two = (
        json.loads((tmp_path / "runs" / f / "result.json").read_text())
        for f in ("fedal", "fedal-2")
    )
    assert one["state_sha256"] == two["state_sha256"]
    page = fedloom("report", "runs/fedal").stdout
    assert "runs/fedal/report.html" in page
    fedloom("report", "runs/fedal", "runs/fedal-2", "--out", "both.html")
    assert (tmp_path / "both.html").stat().st_size > 10_000


def test_resume_finds_the_last_run_of_that_very_name(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    for name in ("fedal", "fedal-2", "fedal-skew", "fedal-10"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert (
        "runs/fedal-10/report.html"
        in fedloom("run", "fedal", "--rounds", "1", "--resume", *FAST).stdout
    )
    assert "runs/fedal-11/report.html" in fedloom("run", "fedal", "--rounds", "1", *FAST).stdout


def test_the_folder_repeats_its_run(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    fedloom("run", "fedal", "--rounds", "2", "--seed", "3", "--out", "a", *FAST)
    fedloom("run", "a/config.toml", "--out", "b")
    one, two = (json.loads((tmp_path / f / "result.json").read_text()) for f in "ab")
    assert one["state_sha256"] == two["state_sha256"] and one["seed"] == 3


def test_a_comparison(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    done = fedloom(
        "compare", "fedal", "local", "--seeds", "0-1", "--rounds", "1", "--out", "c", *FAST
    )
    assert "fedal - local" in done.stdout and "over 2 seeds" in done.stdout
    found = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [r["folder"] for r in found["runs"]] == [
        "fedal-seed0",
        "fedal-seed1",
        "local-seed0",
        "local-seed1",
    ]
    assert (tmp_path / "c" / "report.html").exists()
    assert (tmp_path / "c" / "fedal-seed0" / "report.html").exists()
    assert "fedal-seed0/report.html" in (tmp_path / "c" / "report.html").read_text()


def test_results_on_validation_rows_say_so(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    settings = ["-s", "rounds=1", "-s", "data.clients=2", "-s", "models.pool=['linear']"]
    tested = fedloom("compare", "fedmd", "local", *settings, "--out", "tested").stdout
    chosen = fedloom(
        "compare", "fedmd", "local", *settings, "-s", "data.validation=0.2", "--out", "chosen"
    ).stdout
    words = "measured on validation rows, 20 % of the training rows, and not on the test rows"
    assert words in chosen and "validation" not in tested
    assert f"M{words[1:]}." in (tmp_path / "chosen/report.html").read_text()
    one, other = (
        json.loads(next((tmp_path / name).glob("fedmd*/result.json")).read_text())
        for name in ("tested", "chosen")
    )
    assert one["test_sha256"] != other["test_sha256"] and (
        one["validation"],
        other["validation"],
    ) == (0, 0.2)
    pages = [
        next((tmp_path / name).glob("fedmd*/report.html")).read_text()
        for name in ("tested", "chosen")
    ]
    assert ["on validation rows" in page for page in pages] == [False, True]
    assert ["the global validation set" in page for page in pages] == [False, True]


@pytest.mark.parametrize("kind", ["methods", "models", "datasets", "partitions", "experiments"])
def test_lists(kind: str, fedloom: Callable[..., Done]) -> None:
    rows = json.loads(fedloom("list", kind, "--json").stdout)
    text = fedloom("list", kind).stdout
    assert len(rows) >= 1 and all(row["name"] in text for row in rows)
    if kind == "methods":
        assert {row["name"] for row in rows} == set(registry())


@pytest.mark.slow
def test_lists_and_copies_need_no_torch_once_they_are_cached(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    code = "import sys, fedloom.cli; sys.argv = ['fedloom', *{}]\n"
    code += "try: fedloom.cli.main()\nfinally: print('torch' in sys.modules)"

    def slow(*arguments: str) -> bool:
        command = [sys.executable, "-c", code.format(list(arguments))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.endswith("True\n")

    assert slow("list", "methods")  # reads the pages
    others = (
        ["copy", "fedmd", str(tmp_path / "a.py")],
        ["certs", "north", "--all-here", "--out", str(tmp_path / "fed")],
    )
    for arguments in (["list"], ["list", "fedal"], ["list", "experiments"], *others):
        assert not slow(*arguments), arguments
    assert (tmp_path / "a.py").read_text() == source_of("fedmd").read_text()
    entry = next(tmp_path.glob("fedloom/lists/*.json"))
    entry.write_text("torn")
    assert slow("list", "methods") and json.loads(entry.read_text())["methods"]


def test_a_wheel_has_the_lists_of_its_own_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "INDEX", tmp_path / "listing.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listing.write_index()
    kept = listing.listing()
    monkeypatch.setattr(listing, "_build", lambda: {"methods": []})
    assert listing.listing() == kept and {row["name"] for row in kept["methods"]} == set(registry())
    monkeypatch.setattr(listing, "_digest", lambda: "of other sources")
    assert listing.listing() == {"digest": "of other sources", "methods": []}


@pytest.mark.parametrize("kind", listing.LISTS)
def test_the_first_list_is_as_later_ones(
    kind: str, fedloom: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call in a checkout makes the lists, and later ones read them from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(listing, "INDEX", tmp_path / "listing.json")
    first, later = fedloom("list", kind).stdout, fedloom("list", kind).stdout
    assert first == later and len(first.splitlines()) > 3
    assert len([*(tmp_path / "fedloom/lists").iterdir()]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run fedpr", {"fedproto", "fedproto-public"}),
        ("run quick", {"quickstart"}),
        ("compare fedal fedm", {"fedmd"}),
        ("run fedal --method afind-p", {"afind-plus"}),
        ("data brea", {"breast_cancer"}),
        ("data digits --partition dirich", {"dirichlet"}),
        ("list partit", {"partitions"}),
        ("copy fedm", {"fedmd"}),
        ("run fedal -s params.disc_t", {"params.disc_temperature="}),
        ("run fedal -s data.name=brea", {"breast_cancer"}),
        ("run fedal -s models.pool=", {"mlp", "forest"}),
        ("""run fedal -s 'models.pool=["mlp","lene""", {"""models.pool=["mlp","lenet5"""}),
        ("run fedal -s engine.name=bat", {"batched"}),
        ("run fedal --engine bat", {"batched"}),
        ("run fedal --engine=iso", {"isolated"}),
        ("run fedal --seed=1 -s topology.kind=small", {"small-world"}),
        ("run fedal -s evaluate.po", {"evaluate.points="}),
    ],
)
def test_completion_knows_the_names(words: str, expected: set[str]) -> None:
    """Bash takes an "=" outside quotes for a word of its own, and inserts what follows it."""
    split = ["fedloom", *re.findall(r"'.*|[^ =]+|=", words)]
    line = {"COMP_WORDS": "\n".join(split), "COMP_CWORD": str(len(split) - 1)}
    environment = {**os.environ, "_FEDLOOM_COMPLETE": "complete_bash", **line}
    command = [
        sys.executable,
        "-c",
        "from fedloom.cli import main; import sys; sys.argv = ['fedloom']; main()",
    ]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    assert expected <= set(found), found


def test_a_list_of_the_user_page(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    fedloom("copy", "fedmd", "mine.py")
    own = json.loads(fedloom("list", "mine.py:fedmd", "--json").stdout)
    assert own == json.loads(fedloom("list", "fedmd", "--json").stdout) != []
    assert "nowhere.py does not exist" in fedloom("list", "nowhere.py", code=2).stderr


def test_the_settings_of_a_method(fedloom: Callable[..., Done]) -> None:
    rows = {row["name"]: row for row in json.loads(fedloom("list", "fedmd", "--json").stdout)}
    assert rows["params.tau"]["default"] == "1" and rows["params.lr"]["default"] == "0.001"
    assert all(row["what"] for row in rows.values())
    assert "params.disc_temperature" in fedloom("list", "fedal").stdout


def test_json_and_quiet(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    shown = json.loads(
        fedloom("run", "fedal", "--rounds", "1", "--out", "a", "--json", *FAST).stdout
    )
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (
        shown.items() >= result.items()
        and shown["folder"] == "a"
        and (tmp_path / "a" / "report.html").is_file()
    )
    line = fedloom("run", "fedal", "--rounds", "1", "--out", "b", "--quiet", *FAST).stdout
    assert line == f"fedal: accuracy {result['accuracy']['mean']:.1%}\n"
    both = "compare", "fedal", "local", "--seeds", "0-1", "--rounds", "1"
    shown = json.loads(fedloom(*both, "--out", "c", "--json", *FAST).stdout)
    assert shown["runs"] == json.loads((tmp_path / "c" / "comparison.json").read_text())["runs"]
    line = fedloom(*both, "--out", "c", "--resume", "--quiet", *FAST).stdout
    assert line == f"{shown['verdict']}\n" and re.search(
        r"95% .* to .*, 2 seeds$", shown["verdict"]
    )


@pytest.mark.slow
def test_a_log_is_short(fedloom: Callable[..., Done]) -> None:
    lines = fedloom("run", "fedal", "--rounds", "40", "--out", "a", *FAST).stdout.splitlines()
    assert [re.search(r"round (\d+/\d+)", line)[1] for line in lines[:4]] == [
        "10/40",
        "20/40",
        "30/40",
        "40/40",
    ]
    assert len(lines) < 15
    lines = fedloom(
        "compare", "fedal", "local", "--rounds", "8", "--out", "c", *FAST
    ).stdout.splitlines()
    assert sum("round 8/8" in line for line in lines) == 2 and not any(
        "round 7/8" in line for line in lines
    )


def test_a_folder_alone_is_resumed_and_a_finished_run_keeps_its_length(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    fedloom("run", "fedal", "--rounds", "2", "--seed", "3", "--out", "a", *FAST)
    before = (tmp_path / "a" / "result.json").read_bytes()
    assert "report  a/report.html" in fedloom("run", "--resume", "--out", "a").stdout
    assert (
        json.loads(before)["state_sha256"]
        == json.loads((tmp_path / "a" / "result.json").read_text())["state_sha256"]
    )
    longer = fedloom("run", "--resume", "--out", "a", "--rounds", "5", code=2).stderr
    assert "holds a finished run of 2 rounds, which cannot be changed to 5" in longer
    fedloom("compare", "fedal", "local", "--rounds", "1", "--out", "c", *FAST)
    assert (
        "c holds several runs: repeat the command"
        in fedloom("run", "--resume", "--out", "c", code=2).stderr
    )


def test_no_round_is_reported(fedloom: Callable[..., Done]) -> None:
    assert (
        "No round was run: the models are untrained."
        in fedloom("run", "fedal", "--rounds", "0", *FAST).stdout
    )
    assert "untrained" not in fedloom("run", "fedal", "--rounds", "1", *FAST).stdout


def test_who_holds_what(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    done = fedloom(
        "data", "digits", "--clients", "4", "-s", "data.options.alpha=0.1", "--plot", "who.png"
    )
    assert "1,797 rows" in done.stdout
    assert (tmp_path / "who.png").read_bytes().startswith(b"\x89PNG")
    counts = json.loads(
        fedloom("data", "digits", "--clients", "4", "-s", "data.public_rows=300", "--json").stdout
    )["counts"]
    assert len(counts) == 4 and sum(map(sum, counts)) == 1797 - 300 - 451


def test_what_the_server_has_and_who_is_in_no_round(fedloom: Callable[..., Done]) -> None:
    own = ["-s", "data.server_rows=300", "-s", "data.unseen=0.2"]
    shown = json.loads(fedloom("data", "digits", *own, "--json").stdout)
    assert shown["server"] == 300 and len(shown["unseen"]) == 2
    text = fedloom("data", "digits", *own).stdout
    assert "300 at the server" in text
    assert f"unseen in training: clients {', '.join(map(str, shown['unseen']))}" in text
    bare = fedloom("data", "digits").stdout
    assert "at the server" not in bare and "unseen in training" not in bare


def test_a_comparison_takes_no_method_from_its_config(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    """Nor what that method would need."""
    (tmp_path / "base.toml").write_text(
        'title = "T"\nmethod = "augfl"\nname = "n"\n[compare]\nmethods = ["fedlp"]\n'
    )
    fedloom(
        "compare", "fedal", "local", "--config", "base.toml", "--rounds", "1", "--out", "c", *FAST
    )
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.is_dir()) == [
        "fedal-seed0",
        "local-seed0",
    ]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text())["title"] == "T"
    for name in ("fedal", "local"):
        resolved = tomllib.loads((tmp_path / "c" / f"{name}-seed0" / "config.toml").read_text())
        assert "server_rows" not in resolved["data"] and "model" not in resolved["pretrained"]


@pytest.mark.parametrize("name", ["digits", "wine", "breast_cancer"])
def test_bundled_data_need_no_settings(name: str, fedloom: Callable[..., Done]) -> None:
    assert f"{name}: " in fedloom("data", name).stdout


def test_the_servers_own_model(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    """Trained on the server's rows, then taken by a run on the same data, and by no other."""
    assert "such as data.server_rows=1000" in fedloom("pretrain", "--model", "mlp", code=2).stderr
    assert (
        "name one of fedloom list models"
        in fedloom("pretrain", "-s", "data.server_rows=300", code=2).stderr
    )
    (tmp_path / "my.toml").write_text(
        'method = "fedavg"\nrounds = 1\n[data]\nclients = 3\nserver_rows = '
        '300\n[pretrained]\nmodel = "mlp"\n'
    )
    done = fedloom("pretrain", "my.toml", "--epochs", "3", "--out", "own.safetensors")
    assert "mlp: 4,810 parameters, norm none; 300 rows of digits" in done.stdout
    assert re.search(r"epoch 3/3  loss 2\.\d+\naccuracy \d+\.\d% on 1,497 rows", done.stdout)
    shown = done.stdout.partition("on the same data:\n")[2]
    assert tomllib.loads(shown) == {
        "data": {"name": "digits", "server_rows": 300},
        "pretrained": {"file": "own.safetensors"},
    }
    assert (
        "already exists; add --force"
        in fedloom("pretrain", "my.toml", "--out", "own.safetensors", code=2).stderr
    )
    assert (
        "--out must be a .safetensors file"
        in fedloom("pretrain", "my.toml", "--out", "own.pt", code=2).stderr
    )
    fedloom("run", "my.toml", "-s", "pretrained.file=own.safetensors", "--seed", "5")
    other = fedloom(
        "run",
        "my.toml",
        "-s",
        "pretrained.file=own.safetensors",
        "-s",
        "data.server_rows=200",
        code=2,
    )
    assert "may include client or test rows" in other.stderr
    text = (tmp_path / "my.toml").read_text()
    # as runs to come have it
    (tmp_path / "later.toml").write_text(f'{text}epochs = 3\nfile = "b.safetensors"\n')
    fedloom("pretrain", "later.toml", "--out", "b.safetensors")
    fedloom("run", "later.toml")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "own.safetensors").read_bytes()


def test_a_page_of_the_user(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    done = fedloom("copy", "fedmd", "mine.py")
    assert "fedloom run --method mine.py:fedmd" in done.stdout
    page = tmp_path / "mine.py"
    page.write_text(page.read_text().replace('name="fedal"', 'name="mine"'))
    fedloom("run", "--method", "mine.py", "--rounds", "1", "--out", "r", *FAST)
    assert json.loads((tmp_path / "r" / "result.json").read_text())["method"] == "mine"
    assert "already exists" in fedloom("copy", "fedal", "mine.py", code=2).stderr


def test_a_page_is_named_by_its_file_without_the_folder(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    fedloom("copy", "fedmd", "mine.py")
    page = str(tmp_path / "mine.py")
    assert fedloom("run", "--method", page, "--rounds", "1", *FAST).stdout.startswith(
        "mine  round 1/1"
    )
    fedloom("compare", page, f"{page}:fedmd-lf", "local", "--rounds", "1", "--out", "c", *FAST)
    assert {p.name for p in (tmp_path / "c").iterdir() if p.is_dir()} == {
        "mine-seed0",
        "fedmd-lf-seed0",
        "local-seed0",
    }


def test_a_network_of_the_user(fedloom: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\ndef tiny(shape, classes):\n    return "
        "nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    fedloom("run", "fedal", "--rounds", "1", "--out", "r", *FAST, "-s", "models.pool=['nets:tiny']")
    assert (
        json.loads((tmp_path / "r" / "partition.json").read_text())["architectures"]
        == ["nets:tiny"] * 3
    )


def test_the_end_says_where_the_reasons_of_failures_are(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    assert "call failures" not in fedloom("run", "fedmd", "--rounds", "1", *FAST).stdout
    done = fedloom("run", "fedmd", "--rounds", "4", "--out", "r", *FAST, "-s", "faults.crash=0.4")
    assert (
        "call failures  r/tracebacks.log" in done.stdout
        and (tmp_path / "r" / "tracebacks.log").exists()
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "nothing to run"),
        (["run", "fedall"], "Did you mean 'fedal'?"),
        (["run", "nowhere.toml"], "there is no file nowhere.toml"),
        (["run", "fedal", "-s", "params.tua=3", "-s", "sede=1"], "Did you mean 'tau'?"),
        (["run", "fedal", "--workers", "3", "--engine", "batched"], "takes one worker, not 3"),
        (["run", "fedal", "--workers", "0"], "Invalid value for '--workers'"),
        (["run", "fedal", "--engine", "locl"], "engine.name: "),
        (["run", "fedal", "--device", "cuda:77"], "is not available here"),
        (["run", "fedal", "-s", "engine.address=1.2.3.4"], "address belongs to the engine ray"),
        (["run", "fedal", "-s", "engine.chunk_size=3"], "chunk_size belongs to the engine batched"),
        (["run", "fedal", "-s", "data.name=mnits"], "Did you mean 'mnist'?"),
        (["run", "fedal", "--resume"], "no run of 'fedal' in runs/"),
        (["run", "--method", "nowhere.py"], "nowhere.py does not exist"),
        (["compare", "fedal", "local", "--seeds", "a"], "--seeds takes a number of seeds"),
        (
            ["compare", "fedal", "quickstart"],
            "quickstart is an experiment, not a method: use fedloom run quickstart",
        ),
        (["compare", "a.toml", "fedal"], "or fedloom compare METHOD... --config a.toml"),
        (["report", "nowhere"], "nowhere"),
        (["list", "mehtods"], "Did you mean 'methods'?"),
        (["data", "digits", "--clients", "5000"], "5000"),
        (["copy", "fedal", "x.txt"], "must end in .py"),
        (["runn"], "Did you mean 'run'?"),
        (["run", "fedal", "--bogus"], "--bogus"),
        (["run", "fedal", "--preset", "paper"], "no option --preset: write -s preset=VALUE"),
        (["run", "fedal", "--tau", "3"], "no option --tau: write -s params.tau=VALUE"),
        (["run", "fedal", "-s", "tau=3"], "tau: there is no such setting. Write params.tau."),
        (
            ["run", "fedal", "-s", "alpha=3"],
            "alpha: there is no such setting. Write data.options.alpha.",
        ),
        (
            ["run", "fedal", "-s", "clients=3"],
            "clients: there is no such setting. Write data.clients.",
        ),
        (
            ["run", "fedal", "-s", "models.pool=mlp,cnn"],
            "models.pool: must be a list, such as ['mlp', 'cnn'], not 'mlp,cnn'",
        ),
        (["run", "--resume", "--out", "X"], "X has no config.toml, so there is no run to resume"),
        (["run", "--resume"], "nothing to run: name a method"),
        (["node", "node.toml", "--log", "json"], "No such option '--log'"),
    ],
)
def test_mistakes_get_a_sentence_and_no_traceback(
    arguments: list[str], text: str, fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    done = fedloom(*arguments, code=2)
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", [[], ["run"], ["compare"], ["report"], ["list"], ["data"], ["copy"]]
)
def test_help_teaches(command: list[str], fedloom: Callable[..., Done]) -> None:
    shown = fedloom(*command, "--help").stdout
    assert "Usage" in shown and len(shown.splitlines()) > 8
    if not command:
        assert "fedloom run quickstart" in shown
    assert fedloom("--version").stdout.strip() == __version__


def test_help_shows_words_in_square_brackets() -> None:
    seen = 0
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for text in [command.help, *(getattr(one, "help", None) for one in command.params)]:
            plain = re.sub(r"\[bold\]|\[/\]|\\(?=\[)", "", text or "")
            assert Text.from_markup(text or "").plain == plain, name
            seen += "[" in plain
    assert seen > 3


def test_ctrl_c_saves_and_the_same_command_with_resume_continues(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    command = ["run", "fedal", "--rounds", "60", "--out", "r", *FAST]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "r" / "environment.json").exists():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"--resume" in errors and b"Traceback" not in errors
    assert not (tmp_path / "r" / "result.json").exists()
    assert "not empty; add --resume" in fedloom(*command, code=2).stderr
    fedloom(*command, "--resume")
    with (tmp_path / "r" / "metrics.csv").open() as file:
        assert max(int(row["round"]) for row in csv.DictReader(file)) == 60


@pytest.mark.slow
def test_ctrl_c_in_a_pretraining_is_answered_and_loses_no_epoch(
    fedloom: Callable[..., Done], tmp_path: Path
) -> None:
    command = [
        "pretrain",
        "--model",
        "mlp",
        "--epochs",
        "400",
        "-s",
        "data.server_rows=400",
        "--out",
        "a.safetensors",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fedloom", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "a.safetensors.part").exists():
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "Stopping after this epoch. Press Ctrl-C again to stop at once.\n"
    done = re.findall(r"^epoch (\d+)/400", shown, re.MULTILINE)[-1]
    assert shown.endswith(f"the same command resumes after epoch {done}\n")
    assert f"\nepoch {int(done) + 1}/400" in fedloom(*command).stdout


@pytest.mark.slow
def test_ctrl_c_in_a_runs_own_pretraining_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [
        "run",
        "fedlp",
        "--rounds",
        "1",
        "--out",
        "r",
        *FAST,
        "-s",
        "pretrained.epochs=100_000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while not list(tmp_path.glob("cache/fedloom/models/*.part")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert any("Stopping after this round" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors


def test_small_things() -> None:
    assert [size(n, " ") for n in (0, 999, 1500, 7_680_000, 3e12)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "7.68 MB",
        "3.00 TB",
    ]
    assert seeds_of("0,2-4,9") == [0, 2, 3, 4, 9]
    with pytest.raises(ConfigError, match="--seeds takes a number of seeds"):
        seeds_of("1-")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "fedal", "-s", "models.pool=[mlp]"],
            "quote it in a shell, as in -s 'models.pool=",
        ),
        (["compare", "fedal", "local", "--seeds", "3-1"], "--seeds takes a number of seeds"),
        (["run", "search.toml"], "use fedloom sweep search.toml"),
        (["run", "folder.toml"], "folder.toml is a folder, not a file"),
        (["run", "rows.csv"], "fedloom data rows.csv writes the settings of a run"),
        (["run", "fedal", "--out", "runs", "--resume"], "runs has files but no run to resume"),
        (
            ["data", "digits", "--plot", "who.xyz"],
            "--plot must end in .png, .svg or .pdf, not who.xyz",
        ),
        (["data", "digits", "--plot", "nowhere/who.png"], "the folder nowhere does not exist"),
        (["certs", "--revoke", "--out", "fed"], "names of the nodes whose certificates"),
        (["certs", "a", "--out", "file"], "file is a file"),
    ],
)
def test_more_mistakes_get_a_sentence(
    fedloom: Callable[..., Done], tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "search.toml").write_text("[sweep]")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "runs" / "fedal").mkdir(parents=True)
    (tmp_path / "runs" / "fedal" / "config.toml").touch()
    (tmp_path / "file").touch()
    (tmp_path / "rows.csv").touch()
    if "--revoke" in arguments:
        fedloom("certs", "a", "--all-here", "--out", "fed")
    done = fedloom(*arguments, code=2)
    assert words in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["reproduce fedal-table-6 --plan", "list reproductions"])
def test_without_the_papers_the_error_names_the_extra(line: str) -> None:
    code = (
        "import importlib.metadata, sys; importlib.metadata.entry_points = lambda **_: ();"
        f"from fedloom.cli import main; sys.argv = ['fedloom', *{line.split()}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error  ") and "pip install -e . -e papers" in done.stderr
