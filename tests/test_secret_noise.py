"""Noise that hides something: who knows the run's seed can't make it again, if the party has a
secret.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError
from fedloom.core.rng import hidden_stream
from fedloom.experiment.plan.build import build, with_secret
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.reading import check
from fedloom.methods import find
from fedloom.methods.peer.selection import private, proxy
from fedloom.methods.vertical.proto_evfl_steps import with_noise
from fedloom.methods.vertical.steps import aligned_rows
from tests.toy import Toy, common, contexts

X = torch.arange(6.0)
SECRET = 2**128 - 1


def drawn(context: ClientContext, on: torch.Tensor = X, *keys: int) -> list[float]:
    found: list[float] = context.noise(on, "privacy", *keys).standard_normal(4).tolist()
    return found


def test_without_a_secret_noise_is_the_stream_that_it_was() -> None:
    context = ClientContext(3, seed=5)
    assert drawn(context, X, 1) == context.stream("privacy", 1).standard_normal(4).tolist()
    assert drawn(context, X, 1) == drawn(context, X + 1, 1)


def test_with_one_it_depends_on_it_and_on_what_it_hides() -> None:
    context = ClientContext(3, seed=5, secret=SECRET)
    every = [
        drawn(context), drawn(ClientContext(3, seed=5)),
        drawn(replace(context, secret=SECRET - 1)), drawn(context, X + 1),
        drawn(context, X.double()), context.noise(X, "other").standard_normal(4).tolist(),
        *(context.noise([X, scale], "privacy").standard_normal(4).tolist() for scale in (1.0, 2.0)),
    ]  # fmt: skip
    assert len({tuple(numbers) for numbers in every}) == len(every)
    # who resumes makes it again
    assert drawn(context) == drawn(replace(context)) == drawn(context, X.clone())
    assert (
        context.stream("batches").integers(100, size=9).tolist()
        == ClientContext(3, seed=5).stream("batches").integers(100, size=9).tolist()
    )


def test_with_one_nothing_that_a_caller_chooses_gives_other_noise_for_the_same() -> None:
    context = ClientContext(3, seed=5, secret=SECRET)
    every = [
        drawn(context),
        drawn(context, X, 1),
        drawn(context, X, 1, 2),
        drawn(replace(context, seed=6, id=4)),
    ]
    assert every == [every[0]] * 4


def test_a_secret_has_128_bits() -> None:
    for wrong in (-1, 2**128):
        with pytest.raises(ConfigError, match="secret"):
            hidden_stream(wrong, "x", b"")
    assert np.isfinite(hidden_stream(0, "x", b"").standard_normal())


def test_the_noise_of_a_proxy_is_fresh_and_each_proxy_is_charged() -> None:
    """Equal noise for equal content would tell by equality whether a row is there; averaging is for
    the budget.
    """
    params: dict[str, Any] = {
        "dp": {"target": "phi", "sigma": 1.0, "clip": 0.1},
        "probe_rows": 1000,
    }  # all rows, in every round

    charges: list[tuple[float, int, float]] = []

    def noises(secret: int | None) -> list[torch.Tensor]:
        charges.clear()
        budget = lambda *of: charges.append(of)
        client_contexts = [
            replace(context, secret=secret, privacy_budget=budget)
            for context in contexts(3, make=common)
        ]
        method = find("afind-plus")
        peer: Any = method.party_at(client_contexts[1])(
            method.configure("recommended", params), client_contexts[1]
        )
        phi = proxy(peer, 0)[0]
        assert all(torch.equal(proxy(peer, t)[0], phi) for t in range(5))
        return [private(peer, phi, t, torch.tensor(by)) - phi for t in range(5) for by in (0, 2)]

    plain, again, hidden, other = noises(None), noises(None), noises(SECRET), noises(SECRET)
    for each in (plain, hidden):
        # each round and asker has its own
        assert len({tuple(noise.tolist()) for noise in each}) == 10
    assert all(map(torch.equal, plain, again)) and not any(map(torch.equal, hidden, other))
    assert charges == [(1.0, 1, 1.0)] * 10


@pytest.mark.parametrize("target", ["phi", "update"])
def test_afind_s_noise_cannot_be_made_again_with_the_seed_alone(target: str) -> None:
    params: dict[str, Any] = {"dp": {"target": target, "sigma": 1.0, "clip": 0.1}}
    method = find("afind-plus")

    def states(secret: int | None) -> dict[int, str]:
        client_contexts = [replace(context, secret=secret) for context in contexts(3, make=common)]
        return Toy(method, client_contexts=client_contexts, **params).run(2).engine.digests()

    known, hidden = states(None), states(SECRET)
    again = states(SECRET)
    assert all(known[i] != hidden[i] for i in known)
    assert hidden == again if target == "update" else all(again[i] != hidden[i] for i in again)


def test_proto_evfl_s_embeddings_are_hidden_by_the_node_s_secret() -> None:
    values = {
        "method": "proto-evfl", "rounds": 1, "params": {"embedding_dim": 8, "embedding_noise": 0.5},
        "data": {"name": "breast_cancer", "clients": 3},
        "columns": {"aligned": 24, "unaligned": 20, "blocks_per_party": 1},
    }  # fmt: skip
    sent = for_nodes(build(check({"run": values}).run))
    parties: list[Any] = [build_party(sent, 1, secret=secret).party for secret in (None, 1, 2, 1)]
    said, one = [party.introduce() for party in parties], parties[1]
    assert torch.equal(said[1], said[3])
    distances = [float((a - b).std()) for a, b in ((said[0], said[1]), (said[1], said[2]))]
    assert all(0.5 < d < 1.0 for d in distances)  # two independent noises of 0.5 differ by 0.71
    f = one.infer(aligned_rows(one))
    rounds = [with_noise(one, f, "embeddings", t) for t in range(5)]
    assert all(torch.equal(rounds[0], r) for r in rounds)
    louder = sent.model_copy(update={"params": {"embedding_dim": 8, "embedding_noise": 1.0}})
    other: Any = build_party(louder, 1, secret=1).party
    again = other.introduce()
    assert float((2 * said[1] - again - f).std()) > 1  # or two runs with two scales would tell f
    active: Any = build(
        check({"run": {**values, "params": {"embedding_dim": 8, "prototype_noise": 0.5}}}).run,
        secret=7,
    ).server
    assert active is not None and active.context.secret == 7
    active.prototypes = torch.ones_like(active.prototypes)
    one, two = (active.prototypes_for(t)[1]["prototypes"] for t in (0, 1))
    assert torch.equal(one, two) and not torch.equal(one, torch.ones_like(one))


def test_the_coordinator_cannot_draw_the_first_network_for_private_columns() -> None:
    """From the first embeddings of a known network it would find the columns."""
    plan = build(
        check({"run": {"method": "split", "rounds": 1, "data": {"name": "breast_cancer"}}}).run
    )
    columns = plan.run.columns.model_copy(update={"private": True})
    private = replace(plan, run=plan.run.model_copy(update={"columns": columns}))

    def first(plan: Any, i: int) -> torch.Tensor:
        return next(plan.contexts[i].build().parameters()).detach()

    at_node = with_secret(private, SECRET)
    assert not torch.equal(first(at_node, 1), first(plan, 1)) and not torch.equal(
        first(at_node, 1), first(at_node, 2)
    )
    ordered = [first(one, 1).flatten().sort().values for one in (at_node, plan)]
    assert torch.equal(*ordered)  # another order, not another of torch's 2**32 seeds
    # a node that was restarted
    assert torch.equal(first(at_node, 1), first(with_secret(private, SECRET), 1))
    # columns of a public data set
    assert torch.equal(first(with_secret(plan, SECRET), 1), first(plan, 1))
    assert torch.equal(first(with_secret(private, None), 1), first(plan, 1))
