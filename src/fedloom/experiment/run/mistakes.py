"""Detects mistakes in a page or a federation that do not stop a run: refused replies, silent
clients, stale weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import CallFailure, Federation
from fedloom.core.ledger import role
from fedloom.core.party import Party
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.metrics import RMSE
from fedloom.experiment.run.result import Final

REFUSED = ("not a message", "wrong shape", "refused")
"""Reasons of refused replies that indicate a mistake in the page, not in one party or machine."""

SHOWN = 5
"""Maximum number of parties in a warning."""


def check_replies(plan: RunPlan, fed: Federation, start: int) -> None:
    """Stop a run in which the replies of all parties to one call of this round were refused, as it
    cannot learn.

    Args:
        plan: of the run; with injected faults nothing is checked.
        fed: after the round.
        start: number of failures before the round.

    Raises:
        MethodError: with the call and the reason.
    """
    if plan.run.faults != Faults():
        return
    by_kind: dict[str, list[CallFailure]] = {}
    for failure in fed.failures[start:]:
        if failure.party != fed.coordinator:
            by_kind.setdefault(failure.kind, []).append(failure)
    for kind, failures in by_kind.items():
        if not all(failure.reason in REFUSED for failure in failures):
            continue
        coordinator = role(fed.coordinator)
        if not any(
            (e.round, e.kind) == (fed.round, kind) and e.sender != coordinator for e in fed.ledger
        ):
            first = failures[0]
            if fed.engine.remote and (said := sorted({f.trace for f in failures if f.trace})):
                raise MethodError(
                    f"round {fed.round + 1}: {kind!r} is refused by all nodes:\n" + "\n".join(said)
                )
            detail = (
                ""
                if fed.engine.remote or not first.trace
                else f" ({first.trace.strip().splitlines()[-1]})"
            )
            raise MethodError(
                f"round {fed.round + 1}: the replies of all {len(failures)} parties to {kind!r} "
                f"were refused, because of {first.reason}{detail}: return from {kind!r} what its "
                "call expects"
            )


def warnings(plan: RunPlan, fed: Federation, states: Callable[[], Mapping[str, Any]]) -> list[str]:
    """The warnings of a finished run, for the terminal and `result.json`; none with injected
    faults.

    Args:
        plan, fed: of the run.
        states: returns the final state of each party on this machine, by name; called only if it is
            needed.
    """
    if plan.run.faults != Faults():
        return []
    return [*_silent(fed), *_diverged(plan, fed), *_stale(plan, states)]


def divergence(plan: RunPlan, fed: Federation, final: Final, names: Sequence[str]) -> str:
    """Why no model of a finished run is usable: training diverged; "" if one is.

    Args:
        plan, fed: of the run.
        final: its last values.
        names: of the clients.
    """
    if plan.run.faults != Faults():
        return ""
    if text := next(_diverged(plan, fed), ""):
        return text
    if np.isfinite(final.get(("loss mean", ""), 0.0)) or plan.run.data.own:
        return ""
    score = "balanced accuracy" if plan.data.target is None else str(RMSE)
    if any(np.isfinite(final.get((score, name), np.nan)) for name in names):
        return ""
    return "no client's predictions are finite: training diverged; lower the learning rate"


def _silent(fed: Federation) -> Iterator[str]:
    """A warning about parties that never gave a usable reply to a kind of call."""
    silent: dict[str, Counter[str]] = {}
    for failure in fed.failures:
        silenced = (
            failure.party,
            failure.kind,
        ) not in fed.usable and failure.party != fed.coordinator
        if silenced and failure.reason != "not ready":
            silent.setdefault(failure.party, Counter())[f"{failure.kind!r} {failure.reason}"] += 1
    if silent:
        names = ", ".join([*silent][:SHOWN]) + (
            f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
        )
        total = sum(silent.values(), Counter())
        why = ", ".join(f"{reason} ({count})" for reason, count in total.most_common(3))
        yield (
            f"{names} never gave a usable reply to a call: {why}; see failures.csv and "
            "tracebacks.log"
        )


def _diverged(plan: RunPlan, fed: Federation) -> Iterator[str]:
    """A warning if no reply was finite in the last round."""
    last = plan.rounds - 1
    kinds = {f.kind for f in fed.failures if f.round == last and f.reason == "not finite"}
    for kind in sorted(kinds):
        if not any(
            (e.round, e.kind) == (last, kind) and e.sender != role(fed.coordinator)
            for e in fed.ledger
        ):
            yield (
                f"no reply to {kind!r} was finite in the last round: training diverged; lower "
                "the learning rate"
            )


def _stale(plan: RunPlan, states: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
    """A warning if a method that averages weights evaluates clients with weights that differ from
    the server's.
    """
    server = plan.server
    if (
        server is None
        or not plan.rounds
        or "one network" not in plan.method.needs
        or server.broadcast()
    ):
        return
    shapes = plan.param_shapes
    trees = [tree for tree in server.state().values() if isinstance(tree, Mapping)]
    held = [tree for tree in trees if shapes and shapes.keys() <= tree.keys()]
    unprepared = [
        i for i in plan.training if plan.method.party_at(plan.contexts[i]).prepare is Party.prepare
    ]
    if not held or not unprepared:
        return
    found = states()
    known = [found[plan.names[i]].get("params", {}) for i in unprepared if plan.names[i] in found]
    different = [params for params in known if not any(_equal(params, tree) for tree in held)]
    if different:
        yield (
            f"{len(different)} of {len(plan.training)} clients were evaluated with weights other "
            "than the server's: to evaluate the server's model, send it at the end of the round, "
            "or define broadcast() at the server and prepare() at the client"
        )


def _equal(params: Mapping[str, Tensor], weights: Mapping[str, Any]) -> bool:
    return all(
        k in weights and torch.equal(value.cpu(), torch.as_tensor(weights[k]).cpu())
        for k, value in params.items()
    )
