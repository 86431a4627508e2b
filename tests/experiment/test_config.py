"""Config: everything that is wrong is told at once, before any work, with a mend."""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from fedloom import methods
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.deploy.export import _config as read_run
from fedloom.experiment.config import run as config
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check, experiments, read
from fedloom.experiment.pool.pool import digest
from fedloom.remote.node.config import read as read_node


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(
        'method = "fedal"\nrounds = -2\nsede = 3\n[data]\nnme = "digits"\nclients = 0\npartition '
        '= "dirichlet"\n[data.options]\nalfa = 1.0\n[params]\ntua = 4\nlr = '
        '"fast"\n[models]\npool = ["mpl"]\n[engines]\nx = 1\n'
    )
    with pytest.raises(ConfigError) as error:
        read(str(file))
    text = str(error.value)
    for part in (
        "rounds: ",
        "sede: there is no such setting. Did you mean 'seed'?",
        "data.nme: there is no such setting. Did you mean 'name'?",
        "data.clients: ",
        "'alfa'",
        "Did you mean 'alpha'?",
        "params.tua: there is no such setting. Did you mean 'tau'?",
        "params.lr: ",
        "Did you mean 'mlp'?",
        "engines: there is no such setting. Did you mean 'engine'?",
    ):
        assert part in text, part
    assert len(text.splitlines()) == 9


def test_a_section_that_does_not_exist_says_where_its_settings_stand(tmp_path: Path) -> None:
    file = tmp_path / "section.toml"
    file.write_text('[run]\nmethod = "fedavg"\nrounds = 2\n[data.split]\nclients = 3\n')
    with pytest.raises(ConfigError) as error:
        read(str(file))
    assert "run: there is no such section. Write its settings one level up: method, rounds." in str(
        error.value
    )
    assert "data.split: there is no such section. Write its settings one level up: clients." in str(
        error.value
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("quikstart", "Did you mean 'quickstart'?"),
        ("nowhere.toml", "there is no file nowhere.toml"),
        ("nowhere.py", "nowhere.py does not exist"),
    ],
)
def test_unknown_sources(source: str, text: str) -> None:
    with pytest.raises((ConfigError, MethodError), match=text):
        read(source).run.resolve()


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("method = fedal\n")
    with pytest.raises(ConfigError, match=r"x\.toml is not valid TOML.*line 1"):
        read(str(file))


@pytest.mark.parametrize(
    ("text", "why"), [("x = " + "[" * 9_000, "nested too deeply"), ("x = " + "9" * 5_000, "4300")]
)
def test_toml_that_takes_a_parser_down_is_refused_everywhere(
    text: str, why: str, tmp_path: Path
) -> None:
    for name in ("x.toml", "node.toml", "config.toml"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"is not valid TOML: .*{why}"):
        read(str(tmp_path / "x.toml"))
    with pytest.raises(ConfigError, match=why):
        read_node(tmp_path / "node.toml")
    with pytest.raises(ConfigError, match=why):
        read_run(tmp_path, ())
    with pytest.raises(ConfigError, match=r"params\.tau"):
        read("fedal", [f"params.tau={text[4:]}"])


def test_overrides_reach_every_level_and_keep_types() -> None:
    run = read(
        "fedal",
        [
            "data.options.alpha=0.5",
            "params.tau=3",
            "data.name=wine",
            "models.pool=['mlp']",
            "seed=7",
        ],
    ).run
    assert run.data.options == {"alpha": 0.5}
    assert (run.params, run.data.name, run.models.pool, run.seed) == (
        {"tau": 3},
        "wine",
        ("mlp",),
        7,
    )
    for bad in ("params", "=3", "a..b=1"):
        with pytest.raises(ConfigError, match=r"dotted\.key=value"):
            read("fedal", [bad])
    with pytest.raises(ConfigError, match="is a value, not a table"):
        read("fedal", ["seed=3", "seed.x=1"])


def test_length_in_iterations_is_fair_between_methods() -> None:
    rounds = {
        name: read(name, ["iterations=601"]).run.resolve()[2]
        for name in ("fedal", "fedmd", "local")
    }
    assert rounds == {"fedal": 121, "fedmd": 601, "local": 121}
    assert read("fedal", ["rounds=4"]).run.resolve()[2] == 4
    with pytest.raises(ConfigError, match="rounds or iterations, not both"):
        check({"run": {"rounds": 1, "iterations": 2}})
    # the flag wins over the file's iterations
    assert read("quickstart", flags={"rounds": 3}).run.rounds == 3


def test_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    run = read(
        "fedal", ["data.options.alpha=0.5", "params.disc_hidden=[8]", "faults.nan=0.1", "rounds=3"]
    ).run
    file = tmp_path / "config.toml"
    file.write_text(config.toml(run))
    assert read(str(file)).run == run


def test_tables_in_a_list_read_back_the_same(tmp_path: Path) -> None:
    away = [{"client": 3, "start": 2}, {"client": 1, "end": 4}]
    run = check(
        {"run": {"churn": {"away": away}, "topology": {"kind": "regular", "degree": 4}}}
    ).run
    assert [(a.client, a.start, a.end) for a in run.churn.away] == [(3, 2, None), (1, 0, 4)]
    file = tmp_path / "config.toml"
    file.write_text(config.toml(run))
    assert read(str(file)).run == run
    file.write_text("[[churn.away]]\nclient = 3\nstart = 2\n[[churn.away]]\nclient = 1\nend = 4\n")
    assert read(str(file)).run.churn == run.churn
    assert (
        read("fedal", ["churn.away=[{client=3, start=2}, {client=1, end=4}]"]).run.churn
        == run.churn
    )


def test_infinite_settings_and_keys_with_spaces_read_back_the_same(tmp_path: Path) -> None:
    run = read("fedal", ["params.kd_temperature=inf"]).run
    file = tmp_path / "config.toml"
    file.write_text(config.toml(run))
    again = read(str(file)).run
    assert again == run
    assert again.resolve()[1].kd_temperature == math.inf
    assert digest(again) == digest(run)
    options = {"by the ward": [-math.inf, {"a.b": 'a "quoted" \\ word', "none": None}]}
    own = RunConfig.model_validate({"data": {"partition": "my.package:split", "options": options}})
    del options["by the ward"][1]["none"]  # type: ignore[attr-defined]
    assert tomllib.loads(config.toml(own))["data"]["options"] == options


def test_an_infinite_setting_and_none_are_two_runs() -> None:
    digests = {
        digest(check({"run": {"params": {"gradient_cap": cap}}}).run)
        for cap in (None, math.inf, 1.0)
    }
    assert len(digests) == 3


def test_toml_can_say_none(tmp_path: Path) -> None:
    run = check({"run": {"params": {"gradient_cap": None, "clients_per_round": 3}}}).run
    file = tmp_path / "config.toml"
    file.write_text(config.toml(run))
    again = read(str(file)).run
    assert again.resolve()[1] == run.resolve()[1]
    assert again.resolve()[1].gradient_cap is None
    assert read("fedal", ["params.gradient_cap=none"]).run.resolve()[1].gradient_cap is None
    with pytest.raises(ConfigError, match=r"params\.lr"):
        read("fedal", ["params.lr=none"])


def test_a_comparison_is_its_runs() -> None:
    experiment = check(
        {
            "run": {"iterations": 10, "params": {"lr": 0.01}},
            "compare": {
                "methods": [
                    "fedal",
                    {"method": "fedal", "name": "slow", "params": {"lr": 0.001, "adv": 0}},
                ],
                "seeds": [0, 3],
            },
        }
    )
    runs = experiment.runs()
    assert [(r.name, r.seed, r.params) for r in runs] == [
        ("fedal", 0, {"lr": 0.01}),
        ("fedal", 3, {"lr": 0.01}),
        ("slow", 0, {"lr": 0.001, "adv": 0}),
        ("slow", 3, {"lr": 0.001, "adv": 0}),
    ]
    with pytest.raises(ConfigError, match="Did you mean 'fedmd'"):
        check({"compare": {"methods": ["fedal", "fdmd"]}})


@pytest.mark.parametrize(
    ("values", "server", "model"),
    [
        ({"method": "augfl"}, "auto", "auto"),
        ({"method": "fedlp"}, "auto", "auto"),
        ({"method": "fedpcl"}, "auto", "auto"),
        ({"method": "server-ce-only"}, "auto", None),
        ({"method": "local-only"}, None, None),
        ({"method": "fedavg"}, None, None),
        ({"method": "proto-evfl"}, None, None),
        ({"method": "augfl", "data": {"server_rows": 50}}, 50, "auto"),
        ({"method": "augfl", "data": {"server_rows": 0}}, 0, None),
        ({"method": "augfl", "pretrained": {"model": "mlp"}}, "auto", "mlp"),
        ({"method": "fedpcl", "pretrained": {"file": "/own.safetensors"}}, None, None),
    ],
)
def test_a_server_has_what_its_method_needs(
    values: dict[str, Any], server: int | str | None, model: str | None
) -> None:
    run = check({"run": values}).run
    assert (run.data.server_rows, run.pretrained.model) == (server, model)
    assert check({"run": tomllib.loads(config.toml(run))}).run == run


@pytest.mark.parametrize(
    "names", [["augfl", "fedavg"], ["fedavg", "augfl"], ["fedavg", "server-ce-only", "fedlp"]]
)
def test_a_comparison_has_one_split_whatever_its_methods_need(names: list[str]) -> None:
    runs = check({"compare": {"methods": names}}).runs()
    assert {(run.data.server_rows, run.pretrained.model) for run in runs} == {("auto", "auto")}
    alone = check({"run": tomllib.loads(config.toml(runs[names.index("fedavg")]))}).run
    assert alone == runs[names.index("fedavg")]


@pytest.mark.parametrize("server", [-1, 0.5, "lots", True, False])
def test_the_servers_rows_are_a_number(server: Any) -> None:
    with pytest.raises(ConfigError) as error:
        check({"run": {"data": {"server_rows": server}}})
    assert (
        str(error.value)
        == f'data.server_rows: must be a number of rows of at least 0, or "auto", not {server!r}'
    )


@pytest.mark.parametrize("data", [{"server_rows": -3}, {"server_rows": 100, "unseen": 0.01}])
def test_of_rows_that_are_not_known_nothing_is_reported(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        check({"run": {"method": "fedavg", "data": data, "pretrained": {"model": "mlp"}}})
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("data")


def test_flags_apply_to_a_whole_comparison() -> None:
    assert {r.seed for r in read("quickstart", flags={"seed": 7}).runs()} == {7}
    assert {r.seed for r in read("quickstart", ["seed=8"]).runs()} == {8}
    one = read("quickstart", flags={"method": "fedmd-lf"})
    assert one.compare is None and one.run.method == "fedmd-lf" and one.run.iterations == 300


def test_faults_are_checked_with_all_the_rest() -> None:
    with pytest.raises(ConfigError) as error:
        read("fedal", ["faults.nan=0.7", "faults.late=0.7", "params.tua=1"])
    assert "faults: the probabilities must sum to at most 1, not 1.4" in str(error.value)
    assert "params.tua" in str(error.value)
    with pytest.raises(
        ConfigError, match=r"faults\.nam: there is no such setting. Did you mean 'nan'"
    ):
        read("fedal", ["faults.nam=0.7"])


ALONE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"clients": 1}, {}),
    ({"clients": 5}, {"clients_per_round": 1}),
    ({"clients": 3, "unseen": 0.67}, {}),
)


@pytest.mark.parametrize(("data", "params"), ALONE, ids=str)
def test_who_learns_from_others_is_not_alone(data: dict[str, Any], params: dict[str, Any]) -> None:
    several = (
        "fedal",
        "fedmd",
        "fedmd-lf",
        "fd",
        "fedproto-public",
        "fccl",
        "fccl-plus",
        "feddf-al",
    )
    for name in several:
        with pytest.raises(
            ConfigError, match=f"{name} needs at least 2 clients in a round, not 1: increase"
        ):
            RunConfig(method=name, data=data, params=params).resolve()
        RunConfig(method=name, data={"clients": 2}, params={}).resolve()
    for name in ("local", "cfd", "feddf", "fedavg-adam"):
        RunConfig(method=name, data=data, params=params).resolve()


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(experiments()))
def test_every_shipped_experiment_is_valid(name: str) -> None:
    for run in read(name).runs():
        run.resolve()


def test_pages_of_the_user(tmp_path: Path) -> None:
    page = tmp_path / "mine.py"
    page.write_text(methods.source_of("fedal").read_text())
    assert methods.load(page).name == "fedal"
    assert methods.load(f"{page}:fedmd").fixed["tau"] == 1
    with pytest.raises(MethodError, match="Did you mean 'fedmd'"):
        methods.load(f"{page}:fdmd")
    page.write_text("import nothing_there\n")
    with pytest.raises(MethodError, match=r"cannot import .*mine\.py: ModuleNotFoundError"):
        methods.load(page)
    page.write_text("x = 1\n")
    with pytest.raises(MethodError, match="defines no METHODS"):
        methods.load(page)
    with pytest.raises(MethodError, match="Did you mean 'fedal'"):
        methods.find("fedall")


def test_a_client_that_mislabels_trains_on_false_labels_and_is_tested_on_true_ones() -> None:
    """Its number of rows, its inputs and all other clients are as without it."""
    plain = ["data.clients=3", "data.own_test_rows=10", 'models.pool=["mlp"]']
    lying = [*plain, "faults.liars=[1]", "faults.lie=labels"]
    honest, false = (build(read("fedavg", overrides).run).contexts for overrides in (plain, lying))
    for n, (a, b) in enumerate(zip(honest, false, strict=True)):
        assert a.data is not None and b.data is not None
        every = torch.arange(len(a.data))
        assert torch.equal(a.data.every, b.data.every)
        assert torch.equal(b.data.y(every), 9 - a.data.y(every) if n == 1 else a.data.y(every))
        for name, rows in a.tests.items():
            which = torch.arange(len(rows))
            assert torch.equal(rows.y(which), b.tests[name].y(which))
    assert Faults(liars=(1,), lie="labels").draw(0, 0, 0, 1) is None


def settings_of(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, str]]:
    """The full names of all settings of a section and of its tables, and what is said of each."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if tables:
            yield from settings_of(tables[0], f"{place}{name}.")
        else:
            yield f"{place}{name}", field.description or ""


def test_the_reference_of_settings_says_something_of_each() -> None:
    said = dict([*settings_of(RunConfig), *settings_of(config.CompareConfig, "compare.")])
    assert len(said) > 100 and "data.label_scale" in said
    assert not [name for name, words in said.items() if len(words) < 10]
