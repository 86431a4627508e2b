"""An old name of a setting or an option is answered with the new one, wherever it stands."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.core import renamed
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.partitions import check_options
from fedloom.experiment.plan.reading import read
from fedloom.remote.config_file import read_config
from fedloom.remote.node.config import NodeConfig
from fedloom.sweep import config as sweep
from tests.command import Done, fedloom

__all__ = ["fedloom"]

REAL = renamed.RENAMED
TABLE = {
    "params.tua": "params.tau",
    "data.nme": "data.name",
    "models.black_box.flor": "models.black_box.min_probability",
    "data.options.alfa": "data.options.alpha",
    "churn.away.begin": "churn.away.start",
    "nodename": "name",
    "sweep.repeats": "sweep.seeds",
    "--seeeds": "--seeds",
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED", TABLE)


def test_no_new_name_was_renamed_itself() -> None:
    assert not set(REAL) & set(REAL.values())


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("params.tua=3", "params.tua was renamed: write params.tau."),
        ("data.nme=digits", "data.nme was renamed: write data.name."),
        (
            "models.black_box.flor=0.01",
            "models.black_box.flor was renamed: write models.black_box.min_probability.",
        ),
        (
            "churn.away=[{client=1, begin=2}]",
            "churn.away.0.begin was renamed: write churn.away.start.",
        ),
    ],
)
def test_a_run_config_and_its_params_name_the_new_setting(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read("fedal", [override])
    assert str(error.value).splitlines() == [sentence]


def test_an_unknown_setting_that_was_never_renamed_still_gets_a_suggestion() -> None:
    with pytest.raises(
        ConfigError, match=r"params\.tay: there is no such setting\. Did you mean 'tau'\?"
    ):
        read("fedal", ["params.tay=3"])


def test_options_of_partitions_name_the_new_one() -> None:
    with pytest.raises(
        DataError, match=r"data\.options\.alfa was renamed: write data\.options\.alpha\."
    ):
        check_options("dirichlet", {"alfa": 1.0})


def test_sweeps_and_nodes_name_the_new_setting(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('method = "fedal"\n[sweep]\nrepeats = [1]\n"params.tau" = [1, 2]\n')
    with pytest.raises(ConfigError, match=r"sweep\.repeats was renamed: write sweep\.seeds\."):
        sweep.read(str(file))
    file.write_text('nodename = "a"\n')
    with pytest.raises(ConfigError, match="nodename was renamed: write name"):
        read_config(file, NodeConfig, "make one")


def test_the_command_line_names_the_new_option(fedloom: Callable[..., Done]) -> None:
    done = fedloom("compare", "fedal", "fedmd", "--seeeds", "0", code=2)
    assert "--seeeds was renamed: write --seeds." in done.stderr
