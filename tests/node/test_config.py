"""node.toml and the policy in it: each rule lets through what fits, and refuses what does not with
fixed words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import ConfigError
from fedloom.methods import registry
from fedloom.remote import rpc_errors
from fedloom.remote.node.config import NodeConfig, read
from tests.node.hosts import RunRequest, config, opening

GOOD = """
name = "node"
callers = { coordinator = "127.0.0.1:7443" }
revoked = "revoked.pem"
methods = ["fedavg", "fedmd"]
[data.mine]
rows = "mine.csv"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(text)
    (tmp_path / "mine.csv").touch()
    return path


def complaints(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(written(tmp_path, text))
    lines = str(error.value).splitlines()
    start = str(tmp_path / "node.toml")
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start).removeprefix(": ") for line in lines]


# -- the file --------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = read(written(tmp_path, GOOD))
    assert found.state == tmp_path / "state" and found.data["mine"].rows == tmp_path / "mine.csv"
    assert (found.ca, found.certificate, found.key, found.revoked) == (
        *(tmp_path / f"{name}.pem" for name in ("ca", "certificate", "key", "revoked")),
    )


def test_methods_are_a_list_or_tables(tmp_path: Path) -> None:
    assert set(read(written(tmp_path, GOOD)).methods) == {"fedavg", "fedmd"}
    tables = GOOD.replace('methods = ["fedavg", "fedmd"]\n', "") + (
        '[methods.fedmd]\npresets = ["recommended"]\n[methods.fedavg]\nmin = { batch_size = 4 '
        "}\nmax = { lr = 0.1 }\n"
    )
    found = read(written(tmp_path, tables)).methods
    assert found["fedmd"].presets == ("recommended",) and found["fedavg"].min == {"batch_size": 4}


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace('"node"', '""') + 'max_rounds = 0\nqueue = "many"\nnoise = 3\n'
    lines = complaints(tmp_path, text.replace("[data.mine]", "[data.mine]\nroot = 3"))
    assert len(lines) >= 2
    text = """
name = "node"
[data.mine]
dataset = "digits"
[methods.fedavgg]
[methods.fedmd]
presets = ["strict"]
[methods.fedavg]
min = { batchsize = 4 }
"""
    lines = complaints(tmp_path, text)
    assert [line.split(":")[0] for line in lines] == [
        "methods",
        "methods.fedmd.presets",
        "methods.fedavg.min",
    ]
    assert "Did you mean 'fedavg'?" in lines[0] and "Did you mean 'batch_size'?" in lines[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"127.0.0.1:7443"', '"7443"'), "callers.coordinator: an address must be host:port"),
        (('"127.0.0.1:7443"', '["127.0.0.1:7443", "x"]'), "not 'x'"),
        (('"127.0.0.1:7443" }', '"a.example:7443" }\ninsecure = true'), "loopback"),
        (
            ("[data.mine]", 'listen = "127.0.0.1:7443"\n[data.mine]'),
            "listen: there is no such setting.",
        ),
        (
            ("revoked = ", "# "),
            "revoked: a node with own rows needs the list of revoked certificates",
        ),
        (('rows = "mine.csv"', ""), "set exactly one of dataset"),
        (
            ('rows = "mine.csv"', 'rows = "mine.csv"\ndataset = "digits"'),
            "set exactly one of dataset",
        ),
        (('rows = "mine.csv"', 'dataset = "digits"\npublic = "p.csv"'), "public needs rows"),
        (('rows = "mine.csv"', 'rows = "mine.csv"\nroot = "here"'), "root needs dataset"),
        (('methods = ["fedavg", "fedmd"]', "methods = []"), "methods"),
        (('methods = ["fedavg", "fedmd"]', "methods = 3"), "methods"),
        (("[data.mine]", "secret_noise = 3\n[data.mine]"), "secret_noise"),
        (("[data.mine]", "color = 3\n[data.mine]"), "color"),
        (
            ("[data.mine]", "most_rounds = 3\n[data.mine]"),
            "most_rounds: there is no such setting.",
        ),
        (('rows = "mine.csv"', 'set = "digits"'), "data.mine.set: there is no such setting."),
        (("[data.mine]", "[data.mine"), "not valid TOML"),
        (('"mine.csv"', '"none.csv"'), "none.csv does not exist"),
        (('"mine.csv"', '"mine.csv"\npublic = "none.csv"'), "[data.mine] public: "),
    ],
)
def test_what_cannot_be_is_refused(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    assert change[0] in GOOD
    assert any(words in line for line in complaints(tmp_path, GOOD.replace(*change)))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedloom certs writes"):
        read(tmp_path / "none.toml")


POLICIES = [
    ("afind-plus", 'fixed = { "dp.target" = "phi", lr = 0.1, explore_every = "none" }', []),
    ("fedal", "fixed = { disc_hidden = [32, 256], include_self = false }", []),
    ("afind-plus", 'max = { "dp.clip" = 1, explore_every = 4 }\nmin = { "dp.sigma" = 1 }', []),
    (
        "afind-plus",
        'max = { "dp.clp" = 1 }',
        ["max: the method has no setting 'dp.clp'. Did you mean 'dp.clip'?"],
    ),
    (
        "ditto",
        'fixed = { "dp.tagret" = "phi" }',
        ["fixed: the method has no setting 'dp.tagret'. Did"],
    ),
    (
        "afind-plus",
        'fixed = { "dp.target.x" = 1 }',
        ["fixed: the method has no setting 'dp.target.x'."],
    ),
    (
        "afind-plus",
        'fixed = { dp = { target = "phi" }, lr = -1 }',
        ["fixed: dp is a table", "fixed: lr: "],
    ),
    (
        "afind-plus",
        'fixed = { "dp.target" = "fi" }',
        ["fixed: dp.target: must be 'none', 'phi' or 'update'"],
    ),
    (
        "fedal",
        'fixed = { disc_hidden = ["x", 256], tau = 0 }',
        ["fixed: tau: ", "fixed: disc_hidden.0: "],
    ),
    ("fedal", 'fixed = { tau = "3" }', ["fixed: tau: '3' becomes 3 in a run"]),
    (
        "fedal",
        "min = { adam = 1, disc_hidden = 1 }",
        ["min: adam is not a", "min: disc_hidden is not a"],
    ),
    ("fedal", "least = { tau = 3 }", ["least: there is no such setting."]),
    ("fedal", "fixd = { tau = 3 }", ["fixd: there is no such setting. Did you mean 'fixed'?"]),
]


@pytest.mark.parametrize(
    ("method", "policy", "wrong"), POLICIES, ids=[policy for _, policy, _ in POLICIES]
)
def test_a_policy_that_no_run_can_meet_is_refused(
    method: str, policy: str, wrong: list[str], tmp_path: Path
) -> None:
    text = GOOD.replace('methods = ["fedavg", "fedmd"]\n', "") + f"[methods.{method}]\n{policy}\n"
    if not wrong:
        read(written(tmp_path, text))
        return
    found = complaints(tmp_path, text)
    assert len(found) == len(wrong)
    for line, words in zip(found, wrong, strict=True):
        assert line.startswith((f"methods.{method}: {words}", f"methods.{method}.{words}"))


def test_what_is_wrong_only_with_other_settings_is_left_to_the_run(tmp_path: Path) -> None:
    """One setting of two that must fit each other is no fault of the policy."""
    text = (
        GOOD.replace('methods = ["fedavg", "fedmd"]\n', "")
        + '[methods.ditto]\nfixed = { "dp.target" = "update" }\n'
    )
    with pytest.raises(ConfigError, match="available in afind-plus"):
        registry()["ditto"].configure(params={"dp": {"target": "update"}})
    read(written(tmp_path, text))


# -- the policy ------------------------------------------------------------------------------------

RULES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # policy, a run that fits, one that does not, the words it gets
    ({}, {}, {"method": "fedmd"}, "this node does not allow the method fedmd"),
    (
        {"max_rounds": 3},
        {"rounds": 3},
        {"rounds": 4},
        "the run has 4 rounds; this node allows at most 3",
    ),
    (
        {"min_batch_size": 8},
        {"params": {"batch_size": 8}},
        {"params": {"batch_size": 7}},
        "batch_size is 7; this node requires at least 8",
    ),
    (
        {"methods": {"fedmd": {"presets": ["recommended"]}}},
        {"method": "fedmd", "params": {}},
        {"method": "fedmd", "params": {}, "preset": "paper"},
        "preset paper of fedmd is not allowed here; allowed: recommended",
    ),
    (
        {"methods": {"fedavg": {"presets": ["recommended"]}}},
        {"params": {}},
        {"params": {"batch_size": 9}},
        "presets of fedavg may not be changed here: leave params out",
    ),
    (
        {"methods": {"fedavg": {"min": {"batch_size": 8}}}},
        {"params": {"batch_size": 8}},
        {"params": {"batch_size": 7}},
        "fedavg has batch_size = 7; this node requires at least 8",
    ),
    (
        {"methods": {"fedavg": {"max": {"lr": 0.1}}}},
        {"params": {"batch_size": 8, "lr": 0.1}},
        {"params": {"batch_size": 8, "lr": 0.2}},
        "fedavg has lr = 0.2; this node allows at most 0.1",
    ),
    (
        {"methods": {"fedal": {"fixed": {"disc_hidden": [32, 256]}}}},
        {"method": "fedal", "params": {}},
        {"method": "fedal", "params": {"disc_hidden": [32]}},
        "fedal has disc_hidden = [32]; this node requires [32, 256]",
    ),
    (
        {"max_rounds": 3, "min_batch_size": 8, "methods": {"fedavg": {"max": {"lr": 0.1}}}},
        {"params": {"batch_size": 8, "lr": 0.1}},
        {"rounds": 4, "params": {"batch_size": 7, "lr": 0.2}, "data.name": "theirs"},
        "the run has 4 rounds; this node allows at most 3; batch_size is 7; this node requires "
        "at least 8; fedavg has lr = 0.2; this node allows at most 0.1; this node has no data "
        "'theirs'",
    ),
    ({}, {}, {"data.name": "theirs"}, "this node has no data 'theirs'"),
]


@pytest.mark.parametrize(
    ("policy", "fits", "unfit", "words"), RULES, ids=[rule[3][:40] for rule in RULES]
)
def test_each_rule_lets_through_what_fits_and_refuses_the_rest(
    policy: dict[str, Any],
    fits: dict[str, Any],
    unfit: dict[str, Any],
    words: str,
    hosts: Callable[..., RunRequest],
) -> None:
    ask = hosts(**policy)
    refusal = ask.refused("open", opening(config(**unfit)))
    assert (refusal.code, refusal.words) == (rpc_errors.REFUSED, words)
    assert "hidden-cohort" not in refusal.words and str(ask.config.state) not in refusal.words
    assert ask.audited("refused")[-1] | {"time": "", "before": ""} == {
        "time": "",
        "before": "",
        "what": "refused",
        "caller": "hub",
        "code": rpc_errors.REFUSED,
        "words": words,
    }
    assert not list(ask.config.state.glob("run-*"))
    ask("open", opening(config(**fits)))
    assert ask.audited()[-1]["what"] == "opened"


@pytest.mark.parametrize("table", ["min", "max"])
@pytest.mark.parametrize("value", ["NaN", "null", '"x"', "[3]"])
def test_a_bound_is_not_passed_by_what_is_no_number(
    table: str, value: str, hosts: Callable[..., RunRequest]
) -> None:
    ask = hosts(methods={"fedavg": {table: {"lr": 0.1}}})
    text = config(params={"batch_size": 8, "lr": 0.1}).replace('"lr": 0.1', f'"lr": {value}')
    assert ask.refused("open", opening(text)).code in (rpc_errors.REFUSED, rpc_errors.MISMATCH)


def test_a_setting_that_a_method_lacks_is_bounded_by_refusing(
    hosts: Callable[..., RunRequest],
) -> None:
    ask = hosts(methods={"fedavg": {"max": {"gradient_cap": 1.0}}})
    assert (
        ask.refused("open", opening()).words
        == "fedavg has gradient_cap = None; this node allows at most 1"
    )


def test_rows_of_the_user_are_not_shared_out(
    hosts: Callable[..., RunRequest], tmp_path: Path
) -> None:
    ask = hosts(data={"mine": {"rows": tmp_path / "mine.csv"}})
    refusal = ask.refused("open", opening())
    assert refusal.code == rpc_errors.REFUSED and "this node's own rows" in refusal.words


@pytest.mark.parametrize("caller", ["peer", "stranger", "node", ""])
def test_only_named_callers_start_runs(caller: str, hosts: Callable[..., RunRequest]) -> None:
    ask = hosts()
    refusal = ask.refused("open", opening(), caller)
    assert (refusal.code, refusal.words) == (
        rpc_errors.REFUSED,
        "you are not among this node's callers",
    )
    assert ask.audited("refused")[-1]["caller"] == caller


def test_a_run_cannot_continue_beyond_its_rounds(hosts: Callable[..., RunRequest]) -> None:
    from tests.node.hosts import doing

    ask = hosts(max_rounds=1000)
    ask("open", opening())
    ask("do", doing(0, ask.host, round=2))
    assert ask.refused("do", doing(1, ask.host, round=3)).words.startswith(
        "this run has rounds 0 to 2"
    )
    assert ask.refused("do", doing(1, ask.host, round=-1)).code == rpc_errors.REFUSED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "page.py:Method"),
        ("method", "/tmp/page.py"),
        ("data.root", "/etc"),
        ("columns.files", "/etc/passwd"),
        ("columns.manifest", "/etc/passwd"),
        ("topology.file", "/etc/passwd"),
        ("pretrained.file", "/etc/passwd"),
        ("pretrained.model", "os:system"),
        ("engine.address", "ray://evil.example:1"),
        ("models.pool", ["os:system"]),
        ("models.pool", ["linear", "package.module:factory"]),
        ("data.partition", "os:system"),
    ],
)
def test_a_config_that_would_run_code_or_read_files_is_refused(
    name: str, value: Any, hosts: Callable[..., RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a party was being made")

    monkeypatch.setattr("fedloom.remote.node.service.build_party", never)
    ask = hosts()
    refusal = ask.refused("open", opening(config(**{name: value})))
    assert refusal.code in (rpc_errors.REFUSED, rpc_errors.MISMATCH)
    assert not list(ask.config.state.glob("run-*"))


def test_a_factory_that_the_node_names_is_let_through(hosts: Callable[..., RunRequest]) -> None:
    ask = hosts(factories=["tests.node.nowhere:factory"])
    words = ask.refused(
        "open", opening(config(**{"models.pool": ["tests.node.nowhere:factory"]}))
    ).words
    assert "must allow it by name" not in words
    words = ask.refused(
        "open", opening(config(**{"models.pool": ["tests.node.elsewhere:factory"]}))
    ).words
    assert "must allow it by name" in words


LACKING = (
    "this node lacks the run's method: copy its page there and list it in pages of node.toml, or "
    "use the same version of fedloom on both sides"
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "3",
        "[]",
        '"text"',
        "{",
        "{}x",
        "[" * 60_000,
        '{"seed": ' + "[" * 30_000 + "]" * 30_000 + "}",
        '{"seed": ' + "9" * 10_000 + "}",
        '{"seed": 1e999}',
        '{"rounds": 1.5}',
        '{"method": 3}',
        '{"method": "' + "x" * 60_000 + '"}',
        '{"data": {"clients": 1000000000}}',
        '{"data": []}',
        '{"color": "red"}',
        '{"params": {"lr": -1}}',
        '{"preset": "\\u0000"}',
        '{"method": "\\ud800"}',
    ],
    ids=lambda text: text[:24],
)
def test_a_config_that_is_none_is_refused_in_fixed_words(
    text: str, hosts: Callable[..., RunRequest]
) -> None:
    ask = hosts()
    refusal = ask.refused("open", opening(text))
    assert refusal.code in (rpc_errors.MISMATCH, rpc_errors.MALFORMED)
    assert refusal.words in (
        "this node cannot read the run's config: use the same version of fedloom on both sides",
        LACKING,
        "invalid message",
    )
    assert (refusal.words == LACKING) == ('"method": "' in text)
    assert not list(ask.config.state.glob("run-*"))


def test_every_setting_of_a_node_says_what_it_is() -> None:
    schema = json.dumps(NodeConfig.model_json_schema())
    for name, field in NodeConfig.model_fields.items():
        assert field.description, name
    assert "secret" in schema
