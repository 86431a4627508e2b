"""Config files from elsewhere run no code that their reader does not trust by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.experiment.config.foreign_code import named_code
from fedloom.experiment.plan.reading import check, read

PAGE = (
    "from fedloom.methods.averaging.fedavg import METHODS\nimport "
    "pathlib\npathlib.Path('it-ran').touch()\n"
)
CONFIG = (
    'method = "mine.py"\n[data]\npartition = "os:system"\n[models]\npool = '
    '["torchvision:resnet18"]\n'
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    here, elsewhere = tmp_path / "work", tmp_path / "downloads"
    here.mkdir(), elsewhere.mkdir()
    (here / "mine.py").write_text(PAGE)
    monkeypatch.chdir(here)
    return here, elsewhere


def test_a_file_from_elsewhere_that_names_code_is_refused_before_it_runs(
    folders: tuple[Path, Path],
) -> None:
    here, elsewhere = folders
    (elsewhere / "x.toml").write_text(CONFIG)
    with pytest.raises(
        ConfigError, match=r"mine.py, os:system\. .* --trust mine.py --trust os:system"
    ):
        read(str(elsewhere / "x.toml"))
    with pytest.raises(ConfigError, match="os:system"):
        fedloom.run(elsewhere / "x.toml", trust=["mine.py"])
    (here / "link.toml").symlink_to(elsewhere / "x.toml")
    with pytest.raises(ConfigError, match="outside the working folder"):
        read("link.toml")
    assert not (here / "it-ran").exists()


def test_it_runs_where_it_is_trusted_and_what_the_user_wrote_asks_nothing(
    folders: tuple[Path, Path],
) -> None:
    here, elsewhere = folders
    (elsewhere / "x.toml").write_text('method = "mine.py"\n')
    assert read(str(elsewhere / "x.toml"), trust=["mine.py"]).run.method == "mine.py"
    (here / "own.toml").write_text('method = "mine.py"\n')
    assert read("own.toml").run.method == "mine.py"
    (elsewhere / "plain.toml").write_text('method = "fedavg"\n[data]\nname = "digits"\n')
    # by hand
    assert read(str(elsewhere / "plain.toml"), flags={"method": "mine.py"}).run.method == "mine.py"


def test_code_is_known_by_its_form() -> None:
    values = {
        "a": ["mine.py:NAME", "pkg.mod:factory", "mlp"],
        "title": "os:system",
        "b": {"c": "hf:user/name"},
    }
    assert [*named_code(values)] == ["mine.py:NAME", "pkg.mod:factory"]
    assert not [*named_code({"name": "digits", "root": "/data", "x": "12:30", "y": "a: b"})]


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "..", ".", "a\\b", "a\nb", "a\0b"])
def test_a_run_s_name_is_one_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="name: must be the name of one folder"):
        check({"run": {"name": name}})
    with pytest.raises(ConfigError, match="name: must be the name of one folder"):
        check({"run": {}, "compare": {"methods": [{"method": "fedavg", "name": name}, "fedal"]}})


def test_usual_names_are_names(tmp_path: Path) -> None:
    assert check({"run": {"name": "FedAvg, τ = 5 (2nd)"}}).run.name == "FedAvg, τ = 5 (2nd)"
