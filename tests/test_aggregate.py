"""`[aggregate]`: the run says how a page's means are taken, on every engine, and the page has no
line about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.errors import ConfigError

FEDPROX = str(Path(__file__).parents[1] / "examples" / "fedprox.py")
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"clients": 5, "public_rows": 40, "test_rows": 60, "own_test_rows": 10},
    "models": {"pool": ["linear"], "norm": "none"},
}
WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {"rule": "median"},
    "krum": {"rule": "krum"},
    "secure": {"secure": True},
    "noise": {"noise": {"sigma": 0.1}},
}
ENGINES: dict[str, dict[str, Any]] = {
    "isolated": {"name": "isolated"},
    "batched": {"name": "batched"},
    "workers": {"workers": 2},
}


def ran(way: str, engine: str = "", page: str = FEDPROX, **changes: Any) -> Any:
    values = {**SMALL, "aggregate": WAYS[way], "engine": ENGINES.get(engine, {}), **changes}
    return fedloom.run(page, **values).summary


def test_an_example_of_forty_lines_has_every_way_of_a_mean_on_every_engine() -> None:
    assert not {"aggregat", "median", "secure", "noise"} & set(Path(FEDPROX).read_text().split())
    loops = {way: ran(way) for way in WAYS}
    assert len({loop["state_sha256"] for loop in loops.values()}) == len(WAYS)
    for way, loop in loops.items():
        for engine in ENGINES:
            there = ran(way, engine)
            if engine == "batched":
                assert abs(there["accuracy"]["mean"] - loop["accuracy"]["mean"]) < 0.02
            else:
                assert there["state_sha256"] == loop["state_sha256"], (way, engine)


def test_the_example_withstands_a_liar_by_the_run_s_rule() -> None:
    even: dict[str, Any] = {"rounds": 6, "data": {**SMALL["data"], "partition": "iid"}}
    liar: dict[str, Any] = {**even, "faults": {"liars": [1], "lie": "huge"}}
    right = ran("mean", **even)["accuracy"]["mean"]
    assert ran("mean", **liar)["accuracy"]["mean"] < right - 0.3
    assert abs(ran("median", **liar)["accuracy"]["mean"] - right) < 0.1


def test_the_report_has_the_epsilon_of_the_example_s_clients() -> None:
    (one,) = ran("noise")["privacy"]
    assert one["message"] == "mean" and one["simulated"] and len(one["epsilon"]["per_client"]) == 5


def test_only_sums_go_up_where_the_run_is_secure(tmp_path: Path) -> None:
    fedloom.run(FEDPROX, **SMALL, aggregate=WAYS["secure"], out=tmp_path / "run")
    ledger = (tmp_path / "run" / "ledger.csv").read_text().splitlines()
    up = [line for line in ledger if ",update," in line and line.split(",")[1] != "server"]
    assert up and all("masked int64" in line for line in up)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (
            {"rule": "median", "secure": True},
            "aggregate: rule = 'median' compares single replies, which secure = true",
        ),
        ({"secure": True, "noise": {}}, "aggregate: noise needs single replies at the server"),
        (
            {"rule": "krum", "noise": {}},
            "aggregate: how far one client moves the result of rule = 'krum' has no bound",
        ),
        ({"f": 2}, 'aggregate: f is for a robust rule: set rule, such as "median", or leave f out'),
        (
            {"rule": "krum", "f": 2},
            "aggregate: rule = 'krum' with f = 2 needs 7 participants in a round, not 5: add",
        ),
        ({"rule": "none"}, "aggregate.rule: must be 'mean', 'median'"),
    ],
)
def test_what_does_not_go_together_is_refused(aggregate: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        fedloom.run(FEDPROX, **SMALL, aggregate=aggregate)
    assert message in str(error.value)


def test_a_method_without_a_mean_names_those_that_have_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"aggregate: fedpcl takes no mean of clients' replies: .* fedavg, fedavg-ft",
    ):
        fedloom.run("fedpcl", **SMALL, aggregate={"rule": "median"})


PAGE = '''
"""A page that means what it says, or not."""
from fedloom.core.message import floats
from fedloom import Method, MethodConfig, Party
import torch


class Config(MethodConfig):
    secure: bool = False


class Client(Party[Config]):
    STATE = ()
    CALLS = ("tell",)
    MEANS = {means}

    def tell(self):
        return {{"x": torch.ones(2)}}

    def infer(self, x):
        return torch.zeros(len(x), self.context.classes)


class Server(Party[Config]):
    STATE = ()


def round(fed, server, clients, cfg, t):
    fed.{call}(clients, "tell", expect={{"x": floats(2)}})
    yield "round"


METHODS = (Method("means", "", "", "example", Config, round, Client, Server),)
'''


@pytest.mark.parametrize(
    ("means", "call", "way", "message"),
    [
        ("()", "mean", "mean", "fed.total calls 'tell': list it in MEANS"),
        (
            '("tell",)',
            "call",
            "secure",
            "secure = true hides single replies to 'tell' of MEANS: call it by fed.mean",
        ),
        ('("tell",)', "call", "noise", "noise hides single replies to 'tell'"),
    ],
)
def test_a_page_whose_means_are_not_means_is_refused(
    means: str, call: str, way: str, message: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.py"
    page.write_text(PAGE.format(means=means, call=call))
    with pytest.raises(fedloom.FedloomError) as error:
        ran(way, page=str(page))
    assert message in str(error.value)
    # Python tells an edited file by its seconds and size, which may be equal
    right = tmp_path / "right.py"
    right.write_text(PAGE.format(means='("tell",)', call="mean"))
    assert ran("secure", page=str(right))["failures"] == 0
