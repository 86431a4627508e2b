"""Mistakes are loud: refused replies end a run; silent clients, stale weights and missing gradients
warn.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.errors import MethodError, warn_once
from fedloom.experiment.run.page_check import problems
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

PAGE = (Path(__file__).parents[2] / "examples" / "fedprox.py").read_text()
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"clients": 3, "test_rows": 50, "own_test_rows": 0, "public_rows": 10},
}


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test may warn anew."""
    warn_once.cache_clear()


def page(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The example page with planted mistakes."""
    text = PAGE
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    file = tmp_path / "mine.py"
    file.write_text(text)
    return str(file)


WRONG = ('"rows": self.row_count}', '"rows": len(self.data)}')
HAND_OUT = ('    fed.call(clients, "receive", shared={"weights": server.weights})\n', "")
CONSTANT = ("(self.live[name] - weights[name])", "(self.params[name] - weights[name])")
LOSS = "        def loss(x, y):"
RAISES = (LOSS, f"        assert self.context.id != 1\n{LOSS}")


def test_a_page_without_mistakes_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fedloom.run(page(tmp_path), **SMALL).summary["warnings"] == [] and not caplog.records
    assert [text for _, text in problems(page(tmp_path), [])] == [""] * 6


def test_refused_replies_of_all_parties_end_the_run_with_the_reason(
    tmp_path: Path, command: Callable[..., Done], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        MethodError,
        match=r"round 1: the replies of all 3 parties to 'update' were refused, because of",
    ):
        fedloom.run(page(tmp_path, WRONG), **SMALL)
    said = command("run", "--method", "mine.py", "--rounds", "1", "-s", "data.clients=3", code=2)
    assert "were refused, because of wrong shape" in said.stderr
    faults: dict[str, Any] = {"faults": {"dropout": 0.2}}  # then a refused reply may be one of them
    assert fedloom.run(page(tmp_path, WRONG), **SMALL, **faults).summary["failures"] > 0


def test_a_client_that_always_fails_is_named_at_the_end_and_in_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = fedloom.run(page(tmp_path, RAISES), out=tmp_path / "run", **SMALL)
    sentence = (
        "client-1 never gave a usable reply to a call: 'update' raised (2); see failures.csv and "
        "tracebacks.log"
    )
    assert sentence in caplog.text
    assert (
        sentence
        in json.loads((tmp_path / "run" / "result.json").read_text())["warnings"]
        == result.summary["warnings"]
    )


def test_clients_without_the_server_s_weights_at_evaluation_get_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = fedloom.run(page(tmp_path, HAND_OUT), **SMALL).summary["warnings"]
    assert text.startswith(
        "3 of 3 clients were evaluated with weights other than the server's: to evaluate the "
        "server's model"
    )
    # it has broadcast and prepare
    assert fedloom.run("fedavg", **SMALL, models="mlp").summary["warnings"] == []
    assert fedloom.run(page(tmp_path, HAND_OUT), **{**SMALL, "rounds": 0}).summary["warnings"] == []


def test_parameters_without_a_gradient_in_a_loss_get_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fedloom.run(page(tmp_path, CONSTANT), **SMALL)
    warned = [record.message for record in caplog.records]
    assert len(warned) == 1 and warned[0].startswith(
        "Client reads self.params in a loss, where it is a constant"
    )


def test_divergence_to_the_end_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    result = fedloom.run("fedal", models="mlp", params={"lr": 1e30, "tau": 2}, **SMALL)
    assert any(
        "training diverged; lower the learning rate" in text for text in result.summary["warnings"]
    )
    assert logging.getLogger("fedloom").name in {record.name for record in caplog.records}


@pytest.mark.each_time("change0-*", "change3-*")
@pytest.mark.parametrize(
    ("change", "what", "text"),
    [
        (WRONG, "source", "a message has len(self.data), a number: send self.row_count, a tensor"),
        (WRONG, "local", "the replies of all 4 parties to 'update' were refused"),
        (CONSTANT, "source", "self.params in a loss has no gradient: use self.live"),
        (HAND_OUT, "local", "were evaluated with weights other than the server's"),
    ],
)
def test_the_command_names_planted_mistakes(
    tmp_path: Path, command: Callable[..., Done], change: tuple[str, str], what: str, text: str
) -> None:
    found = list(problems(page(tmp_path, change), []))
    assert any(what == checked and text in sentence for checked, sentence in found), found
    assert text[:12] in command("check", "mine.py", code=1).stdout


def test_state_outside_of_STATE_shows_as_another_result_where_parties_are_rebuilt(
    tmp_path: Path,
) -> None:
    count = "        calls = self.__dict__['calls'] = self.__dict__.get('calls', 0) + 1"
    hidden = (
        LOSS,
        f"{count}\n        self.params = {{k: p * (1 + calls / 10) for k, p in "
        f"weights.items()}}\n{LOSS}",
    )
    found = dict(problems(page(tmp_path, hidden), []))
    assert "declare what must persist in STATE" in found["local = isolated"]
