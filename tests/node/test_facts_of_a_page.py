"""What is approved and limited stands on a method's page: it holds under any name, and what a page
does not declare counts as the worst.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from fedloom.core.method import Method, MethodConfig
from fedloom.core.party import Fact, Party
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import resolve
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry
from fedloom.remote.node.budget import Budget
from fedloom.remote.node.config import NodeData
from fedloom.remote.node.limits import OwnerLimits
from fedloom.remote.node.terms import terms, weaknesses
from fedloom.remote.rpc_errors import CallRefused

LISTS = ("CALLS", "TO_PEERS", "MEANS")
HOOKS = ("introduction", "exact_introduction", "least_in_sum", "rows_add_up")
ROW = 5


def new_names(method: Method) -> dict[str, str]:
    calls = (*method.client.CALLS, *method.client.TO_PEERS)
    return {name: f"call_{n}" for n, name in enumerate(calls)}


def renamed(method: Method) -> Method:
    """The same page under another name, with other names of all that is called."""
    kind, names = method.client, new_names(method)
    body: dict[str, Any] = {new: getattr(kind, old) for old, new in names.items()}
    for fact in LISTS:
        body[fact] = tuple(names[name] for name in getattr(kind, fact))
    assert kind.TELLS is not None
    body["TELLS"] = tuple(
        (fact, tuple(names[one] for one in called)) for fact, called in kind.TELLS
    )
    return replace(method, name="renamed", client=type("Renamed", (kind,), body))


def counting(cfg: Any, names: dict[str, str]) -> Any:
    """The config of a renamed page, which says how often its methods are called."""

    def calls(self: Any, context: Any) -> dict[str, int]:
        counts = cfg.calls_in_round(context)
        return {names.get(name, name): count for name, count in counts.items()}

    kind: Any = type("Counting", (type(cfg),), {"calls_in_round": calls})
    return kind.model_construct(**dict(cfg))


def stripped(method: Method) -> Method:
    """The same page without what it declares of itself."""
    bare = {name: vars(MethodConfig)[name] for name in HOOKS}
    return replace(
        method,
        client=type("Stripped", (method.client,), {"TELLS": None}),
        config=type("Bare", (method.config,), bare),
    )


def runs(method: Method) -> Iterator[tuple[RunConfig, Any]]:
    """A run of a method without and with secure sums, with each kind of trust that it has."""
    rows = {"clients": 3, "public_rows": 40} if method.setting == "horizontal" else {}
    values: dict[str, Any] = {
        "method": method.name,
        "rounds": 30,
        "data": {"name": "digits", **rows},
    }
    if "secure sums" in method.needs:
        values["aggregate"] = {"secure": True}
    trust = method.config.model_fields.keys() - method.fixed.keys() & {"trust"}
    for params in ({}, {"trust": "distance"}, {"trust": "kernel", "trust_epsilon": 2.0}):
        if params and "trust" not in trust:
            continue
        kind = check({"run": {**values, "params": params}}).run
        cfg = resolve(kind, at_node=True)[1]
        for secure in (False, True):
            aggregate = kind.aggregate.model_copy(update={"secure": secure})
            yield kind.model_copy(update={"aggregate": aggregate}), cfg


@pytest.mark.parametrize("method", registry().values(), ids=lambda m: m.name)
def test_a_page_has_the_same_terms_under_any_name(method: Method) -> None:
    other = renamed(method)
    for kind, cfg in runs(method):
        expected = terms(kind, method, cfg, 30).replace(f"Method {method.name}:", "Method renamed:")
        found = terms(kind, other, counting(cfg, new_names(method)), 30)
        for name, new in new_names(method).items():
            found = found.replace(f"  {new},", f"  {name},")
        assert found == expected


@pytest.mark.parametrize("method", registry().values(), ids=lambda m: m.name)
def test_a_page_without_its_declarations_has_all_weaknesses(method: Method) -> None:
    bare = stripped(method)
    for kind, cfg in runs(method):
        found, worst = weaknesses(kind, bare, cfg), {"W3", "W7"}
        assert {*found} >= {*weaknesses(kind, method, cfg), *worst}
        assert ("W8" in found) == kind.aggregate.secure
        assert "which passes it on to the other nodes" in terms(kind, bare, cfg, 30)


@pytest.mark.parametrize("method", registry().values(), ids=lambda m: m.name)
def test_each_fact_names_methods_that_may_be_called_at_all_kinds_of_clients(method: Method) -> None:
    for kind in filter(None, (method.client, method.black_box)):
        assert kind.TELLS is not None, kind
        for fact, called in kind.TELLS:
            assert fact in get_args(Fact) and {*called} <= {*kind.CALLS}, (kind, fact)


def limited(method: Method, cfg: Any, folder: Path, **data: Any) -> OwnerLimits:
    """The limits of a party with rows of five numbers and fifty public rows."""
    (folder / "own.csv").touch()
    public = SimpleNamespace(rows=range(50), digest="public")
    own = SimpleNamespace(x=lambda rows: torch.zeros(len(rows), ROW))
    context = SimpleNamespace(public=public, classes=2)
    declared = {name: getattr(method.client, name) for name in (*LISTS, "TELLS")}
    party = type("Declared", (SimpleNamespace,), declared)(cfg=cfg, context=context, data=own)
    rows = NodeData(rows=folder / "own.csv", **data)
    return OwnerLimits(Budget(folder), "wards", rows, party)


def outcomes(method: Method, cfgs: list[Any], folder: Path) -> list[list[str]]:
    """Of each call of a method, which of several settings in turn are refused, and why; then how
    101 rows are.
    """
    found = []
    for n, call in enumerate((*method.client.CALLS, *method.client.TO_PEERS)):
        (own := folder / f"{n}").mkdir(parents=True)
        reasons = []
        for cfg in cfgs:
            for rows in (0, 101):
                try:
                    limited(method, cfg, own).check(call, {"rows": torch.zeros(rows, ROW)})
                    reasons.append("")
                except CallRefused as refusal:
                    reasons.append(refusal.words)
        found.append(reasons)
    return found


@pytest.mark.parametrize("method", registry().values(), ids=lambda m: m.name)
def test_a_page_has_the_same_limits_under_any_name_and_the_strictest_without_declarations(
    method: Method, tmp_path: Path
) -> None:
    cfgs = [method.configure()]
    if "trust" in method.config.model_fields.keys() - method.fixed.keys():
        several = ({"trust_neighbours": 3}, {"trust_neighbours": 4}, {"trust_bits": "none"})
        cfgs += [method.configure(params={"trust": "distance", **one}) for one in several]
    usual = outcomes(method, cfgs, tmp_path / "usual")
    assert outcomes(renamed(method), cfgs, tmp_path / "renamed") == usual
    bare = stripped(method)
    plain = [bare.config.model_construct(**dict(cfg)) for cfg in cfgs]
    for call, reasons in zip(outcomes(bare, plain, tmp_path / "bare"), usual, strict=True):
        assert all(call) and len(call) == len(reasons)


@pytest.mark.parametrize("named", ["rows", "points", "nested"])
def test_rows_count_under_any_name_where_a_page_does_not_say_which_arguments_are_rows(
    tmp_path: Path, named: str
) -> None:
    page = replace(
        registry()["fens-student"],
        client=type("Silent", (Party,), {"CALLS": ("ask",)}),
    )
    limits = limited(page, MethodConfig(), tmp_path, max_answers=10, exact_distances=True)
    rows: Any = torch.zeros(6, ROW)
    given = {"inner": {"deep": rows}} if named == "nested" else {named: rows}
    limits.check("ask", given)
    with pytest.raises(CallRefused, match="max_answers"):
        limits.check("ask", given)
    limits.check("ask", {"step": 3, "weights": torch.zeros(9, ROW + 1), "bias": torch.zeros(ROW)})


def test_a_page_with_noise_that_declares_no_least_sum_needs_all_in_it() -> None:
    class Noisy(MethodConfig):
        @property
        def promises(self) -> bool:
            return True

    context: Any = SimpleNamespace(parties=7)
    assert Noisy().least_in_sum(context) == 7
    assert MethodConfig().least_in_sum(context) == 0
    for method in registry().values():
        if method.client.MEANS and method.config.guarantees is not MethodConfig.guarantees:
            known = inspect.getattr_static(method.config, "least_in_sum")
            refuses = method.config.refuses is not MethodConfig.refuses
            assert known is not MethodConfig.least_in_sum or refuses, method.name
