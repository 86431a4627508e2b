"""A node with columns against a coordinator that trains as it likes: it chooses among aligned rows,
and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.core import message
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.reading import check
from fedloom.methods.vertical.fedhssl import TOP
from fedloom.remote import payload
from fedloom.remote.rpc_errors import CallRefused
from tests.node.hosts import RUN, RunRequest, doing, opening

WIDE, BATCH, ALIGNED = 8, 16, 64
CUTS: dict[str, Any] = {
    "not a number": torch.full((BATCH, WIDE), float("nan")),
    "infinite": torch.full((BATCH, WIDE), float("inf")),
    "huge": torch.full((BATCH, WIDE), 1e38),
    "of few rows": torch.ones(3, WIDE),
    "of one row": torch.ones(1, WIDE),
    "wide": torch.ones(BATCH, WIDE + 1),
    "flat": torch.ones(WIDE),
    "a number": torch.tensor(1.0),
    "deep": torch.ones(BATCH, WIDE, 2),
}


@pytest.fixture(params=["split"])
def ask(hosts: Callable[..., RunRequest], request: Any) -> RunRequest:
    made = hosts(methods=[request.param], data={"digits": {"dataset": "digits"}})
    values: dict[str, Any] = {
        "method": request.param,
        "rounds": 6,
        "models": {"pool": ["mlp"]},
        "data": {"clients": 3},
    }
    values |= {
        "params": {"batch_size": BATCH, "embedding_dim": WIDE},
        "columns": {"aligned": ALIGNED},
    }
    made("open", opening(for_nodes(build(check({"run": values}).run)).model_dump_json(), party=1))
    return made


def asked(ask: RunRequest, call: int, method: str, round: int = 0, **shared: Any) -> Any:
    """The reply, or the line of a failure."""
    head, rest = payload.unpack(
        ask("do", doing(call, ask.host, method=method, round=round, shared=shared))
    )
    line = head["lines"][0]
    return payload.decoded(rest, line["reply"]) if "reply" in line else line


@pytest.mark.parametrize("ask", ["split", "ss-vfl", "fedhssl"], indirect=True)
def test_no_gradient_leaves_a_network_that_is_not_finite_or_tells_why(ask: RunRequest) -> None:
    party: Any = ask.host._node_runs[RUN].party
    before = message.digest(party.state())
    for call, cut in enumerate(CUTS.values()):
        try:
            told = asked(ask, call, "update", number=0, step=0, cut=cut)
            assert told["failure"] in ("raised", "refused what it was sent: not finite")
        except CallRefused as refusal:
            assert "weights that are not finite; nothing was changed" in refusal.words
        assert message.digest(ask.host._node_runs[RUN].party.state()) == before
    asked(ask, len(CUTS), "update", number=0, step=0, cut=torch.ones(BATCH, WIDE))
    assert message.digest(party.state()) != before


def test_batches_are_of_aligned_rows_and_as_many_as_a_round_has(ask: RunRequest) -> None:
    """It may ask for a batch again, or for one of a later epoch: the same rows in another order."""
    party: Any = ask.host._node_runs[RUN].party
    rows = party.data.every
    seen = {row.numpy().tobytes() for row in rows[:ALIGNED]} - {
        row.numpy().tobytes() for row in rows[ALIGNED:]
    }
    turns = party.cfg.calls_in_round(party.context)["embed"]
    for call in range(turns):
        number = (0, 0, 10**9, 7)[call % 4]
        assert asked(ask, call, "embed", number=number, step=call % 2).shape == (BATCH, WIDE)
        batch = party.context.aligned_batch(number, call % 2, size=BATCH)
        assert {row.numpy().tobytes() for row in batch} <= seen
    assert (
        f"calls embed {turns} times"
        in ask.refused(
            "do", doing(turns, ask.host, method="embed", shared={"number": 0, "step": 0})
        ).words
    )
    told = asked(ask, turns, "embed_mixed", number=0, step=0, rows=torch.arange(4))
    assert told == {"failure": "raised", "injected": False}
    for on in ("aligned", "own", "train"):
        body = doing(turns + 1, ask.host, method="contribution", round=-1, shared={"on": on})
        assert "for test rows only" in ask.refused("do", body).words


@pytest.mark.parametrize("ask", ["fedhssl"], indirect=True)
def test_a_mean_of_tops_replaces_tops_alone(ask: RunRequest) -> None:
    """With an encoder of its own a coordinator would read the columns from embeddings."""
    party: Any = ask.host._node_runs[RUN].party
    bottom = next(name for name in party.params if name.startswith("cross.body"))
    top = {name: torch.ones_like(party.params[name]) for name in party.part(TOP)}
    before = message.digest(party.state())
    wrong = [
        {**top, bottom: torch.zeros_like(party.params[bottom])},
        {bottom: party.params[bottom]},
        {},
    ]
    for call, sent in enumerate(wrong):
        told = asked(ask, call, "share", round=call, top=sent)
        assert told == {"failure": "not a message", "injected": False}
        assert message.digest(party.state()) == before
    asked(ask, len(wrong), "share", round=len(wrong), top=top)
    assert message.digest(party.state()) != before
