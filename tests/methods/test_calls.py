"""What a party class names in CALLS and TO_PEERS is what rounds ask of it, no more and no less.

At a node of another organization nothing else is answered: a name too few stops a run there, one
too many is a door.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedloom.methods
from fedloom.core.engine import run_task
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.party import Party
from fedloom.engines import joint, local
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry
from tests.engines.test_every_method import run_of

CLASSES: set[type[Party[Any]]] = {
    c for m in registry().values() for c in (m.client, m.black_box) if c is not None
}
LOOKS = {*EVALUATIONS, "public_digest"}
SERVER, PEERS = {"call": 1, "mean": 1, "means": 1, "total": 1, "choose_peers": 1}, {"ask", "answer"}
"""Where a round names a method: by position in `fed.call` and the like, by name in `fed.exchange`.
"""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registry()},
    "boxes in fedal": ("fedal", {"models": {"pool": ["knn"]}}),
    "trust in fedal": ("fedal", {"preset": "trusted"}),
    "trust in boxes": ("fedmd", {"models": {"pool": ["knn"]}, "params": {"trust": "distance"}}),
    "trust in feddf": ("feddf", {"params": {"trust": "select"}}),
    "boxes in cfd": ("cfd", {"models": {"pool": ["knn"]}}),
    "cheap": ("afind-plus", {"preset": "cheap"}),
    "anchored": ("afind-plus", {"preset": "anchored"}),
    "opened by probes": (
        "afind-plus",
        {"params": {"explore_by": "probe", "epochs": 1, "batch_size": 8}},
    ),
}


def literal(node: ast.expr) -> str:
    """The name that stands here as it is. A name made at run time would escape this test."""
    assert isinstance(node, ast.Constant) and isinstance(node.value, str), ast.unparse(node)
    return node.value


def named() -> Iterator[tuple[bool, str]]:
    """What the rounds of all pages call: whether its reply is for peers, and its name."""
    for page in sorted(Path(fedloom.methods.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(page.read_text())):
            given: list[tuple[str, ast.expr]] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) == "fed" and node.func.attr in SERVER:
                    yield False, literal(node.args[SERVER[node.func.attr]])
                elif ast.unparse(node.func) == "fed.exchange":
                    given = [(k.arg, k.value) for k in node.keywords if k.arg]
            elif isinstance(node, ast.Dict):  # of arguments for two exchanges
                given = [
                    (str(k.value), v)
                    for k, v in zip(node.keys, node.values, strict=True)
                    if isinstance(k, ast.Constant)
                ]
            for word, value in given:
                if word in PEERS or word == "take":
                    yield word in PEERS, literal(value)


def test_the_pages_name_what_their_rounds_call_and_nothing_else() -> None:
    asked = {name for for_peers, name in named() if for_peers}
    called = {name for for_peers, name in named() if not for_peers}
    assert {"update", "choose", "mix"} <= called and {"request", "give"} <= asked
    assert called == {name for c in CLASSES for name in c.CALLS}
    assert asked == {name for c in CLASSES for name in c.TO_PEERS}


def full_name(party: type[Party[Any]]) -> str:
    return f"{party.__module__}.{party.__name__}"


IN_ORDER: list[type[Party[Any]]] = sorted(CLASSES, key=full_name)


@pytest.mark.parametrize("party", IN_ORDER, ids=full_name)
def test_what_a_class_names_is_its_own(party: type[Party[Any]]) -> None:
    names = (*party.CALLS, *party.TO_PEERS)
    assert party.CALLS and len(set(names)) == len(names)
    for name in names:
        assert (
            callable(getattr(party, name))
            and not hasattr(Party, name)
            and name not in EVALUATIONS
            and not name.startswith("_")
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_calls_nothing_else(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[tuple[Any, str]] = set()
    work = run_task

    def watched(party: Party[Any], task: Any, *rest: Any) -> Any:
        used.add((type(party), task.method))
        return work(party, task, *rest)

    monkeypatch.setattr(local, "run_task", watched)
    monkeypatch.setattr(joint, "run_task", watched)
    method, changes = VARIANTS[variant]
    values = run_of(method, "none").model_dump(mode="json")
    execute(check({"run": {**values, **changes, "faults": {}}}).run)
    used = {(party, name) for party, name in used if name not in LOOKS}
    assert used or not registry()[method].fixed.get("federated", True)
    assert all(name in (*party.CALLS, *party.TO_PEERS) for party, name in used), used
