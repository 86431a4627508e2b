"""Each public function and class has an example, in its docstring or on a page that is tested, and
each works.
"""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.context import PublicSet, Rows
from fedloom.core.optim import SGD

ROOT = Path(__file__).parents[1]
MODULES = (
    *(
        "fedloom.api",
        "fedloom.core.context",
        "fedloom.core.errors",
        "fedloom.core.federation",
        "fedloom.core.message",
    ),
    *(
        "fedloom.core.method",
        "fedloom.core.optim",
        "fedloom.core.party",
        "fedloom.data.sources",
        "fedloom.data.split",
    ),
    *("fedloom.deploy.export", "fedloom.deploy.hub", "fedloom.deploy.models", "fedloom.estimators"),
    *(
        "fedloom.experiment.config.run",
        "fedloom.experiment.plan.reading",
        "fedloom.experiment.stats",
    ),
    *("fedloom.experiment.trial", "fedloom.experiment.trial.result"),
)
"""Modules whose docstrings have examples."""
WHOLE = ("fedloom.core.optim", "fedloom.core.message")
"""Modules that the API page shows whole. It shows `fedloom.core.errors`, too, whose classes need no
example each.
"""
HOOKS = {
    "Federation.means": "as mean, of groups of parties",
    "Party.at_round": "engines call it",
    "Party.public_digest": "engines call it",
    "Party.public_set": "public and public_rows read it",
}
"""Public methods without an example, and why."""


class Client(fedloom.Party[Any]):
    """The party of the examples, after one message."""

    STATE = ("params", "opt", "seen")

    def setup(self) -> None:
        self.network(nn.Linear(3, 2), SGD(0.1))
        self.seen = 0

    def update(self, *, t: int) -> None:
        self.seen = self.seen + 2


def party() -> Client:
    at, one = torch.arange(20), torch.ones(1)
    rows = Rows(
        torch.randn(20, 3, generator=torch.Generator().manual_seed(0)),
        at % 2,
        at,
        torch.zeros(1),
        one,
    )
    made = Client(
        None,
        fedloom.ClientContext(id=0, classes=2, data=rows, public=PublicSet(rows, 0, "a digest")),
    )
    made.update(t=0)
    return made


HUB = SimpleNamespace(
    HfApi=lambda: SimpleNamespace(
        create_repo=lambda *_, **__: None,
        upload_folder=lambda repo_id, **_: f"https://huggingface.co/{repo_id}/commit/1a2b",
    ),
    snapshot_download=lambda *_, **__: "models/server",
)
"""Stands in for the library of the Hugging Face hub, which holds the model of the export."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The objects and files that examples of methods speak of, made as the examples of their
    classes make them.
    """
    small: dict[str, Any] = {"iterations": 5, "clients": 3, "models": "mlp"}
    X, y = np.random.default_rng(0).normal(size=(120, 3)), np.arange(120) % 2
    folder = tmp_path_factory.mktemp("examples")
    ages = {
        "age": [31, 45, 62, 58, 40, 37] * 5,
        "ill": ["no", "yes", "yes"] * 10,
        "site": ["a", "b", "c"] * 10,
    }
    owners = np.repeat(["a", "b"], 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fedloom.run(
            "fedavg", data="digits", clients=2, iterations=1, models="mlp", out="runs/digits"
        )
        patch.setattr("fedloom.deploy.hub._library", lambda: HUB)
        yield {
            "np": np,
            "party": party(),
            "result": fedloom.run("fedmd", seed=1, out=folder / "run", **small),
            "found": fedloom.compare(["fedmd", "local"], seeds=2, **small),
            "told": fedloom.trial(
                (X, y), group=owners, repeats=1, methods=["fedglm"], alone=("logistic",)
            ),
            "table_one": fedloom.stats(ages, label="ill", group="site"),
        }


@pytest.mark.parametrize("module", sorted(MODULES))  # export comes before what reads its folder
def test_the_examples_work(module: str, made: dict[str, Any]) -> None:
    own = {"found": made["table_one"]} if module.endswith("stats") else {}
    tried = doctest.testmod(importlib.import_module(module), extraglobs=made | own)
    assert tried.attempted and not tried.failed


def public() -> dict[str, Any]:
    """What `fedloom` exports and the API page shows, by name."""
    named = re.findall(
        r"auto(?:function|class):: fedloom\.(\S+)",
        (ROOT / "docs" / "reference" / "api.md").read_text(),
    )
    found = {}
    for name in dict.fromkeys([*fedloom.__all__, *named]):
        home, _, last = f"fedloom.{name}".rpartition(".")
        found[last] = getattr(importlib.import_module(home), last)
    for module in map(importlib.import_module, WHOLE):
        found |= {
            name: one
            for name, one in vars(module).items()
            if getattr(one, "__module__", "") == module.__name__
        }
    return {
        name: one
        for name, one in found.items()
        if name[0] != "_" and callable(one) and inspect.getdoc(one)
    }


def test_every_public_name_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert not [
        n
        for n in fedloom.__all__
        if n[0] != "_" and n != "FedloomError" and f":: fedloom.{n}\n" not in page
    ]


def has_example(one: object) -> bool:
    return ">>>" in (inspect.getdoc(one) or "")


def test_every_public_function_and_class_has_an_example() -> None:
    assert len(public()) > 30 and not [
        name for name, one in public().items() if not has_example(one)
    ]


def test_every_public_method_is_in_an_example() -> None:
    """In one of its class, or in a method page that is tested."""
    pages = "".join(page.read_text() for page in (ROOT / "examples").glob("*.py"))
    none = set()
    for kind in (one for one in public().values() if inspect.isclass(one)):
        own = {
            name: getattr(one, "__func__", one)
            for name, one in vars(kind).items()
            if name[0] != "_"
        }
        made = property | functools.cached_property
        methods = {
            name: one
            for name, one in own.items()
            if isinstance(one, made) or inspect.isfunction(one)
        }
        texts = "\n".join(inspect.getdoc(one) or "" for one in (kind, *methods.values()))
        lines = "\n".join(re.findall(r"^\s*(?:>>>|\.\.\.)(.*)", texts, re.M))
        described = [name for name, one in methods.items() if inspect.getdoc(one)]
        none |= {
            f"{kind.__name__}.{n}"
            for n in described
            if not re.search(rf"(?:\.|def ){n}\b", lines + pages)
        }
    assert none == {*HOOKS}, sorted(none)
