"""The steps that methods share: local SGD, the personal head, fine-tuning."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import ModelError
from fedloom.core.evaluation import predictions
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.methods import steps
from fedloom.methods.peer.gossip import GossipConfig, GossipPeer
from tests.toy import CLASSES, FEATURES, Toy, common, contexts, equal, rows

GOSSIP, ALONE, FEDAVG = (methods.find(n) for n in ("gossip", "alone", "fedavg"))
BODY, HEAD = ["body.0.weight", "body.0.bias"], ["head.weight", "head.bias"]


def copied(party: Any) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in party.params.items()}


def peer(**params: Any) -> GossipPeer:
    (client_context,) = contexts(1, make=common, data=lambda i: rows(30, i))
    return GossipPeer(GossipConfig(**{"batch_size": 8, "lr": 0.05, **params}), client_context)


def sha(toy: Toy) -> str:
    return state_sha256((str(i), s) for i, s in toy.engine.digests().items())


def trained(
    module: nn.Module,
    client_context: ClientContext,
    numbers: range,
    names: list[str],
    lr: float,
    momentum: float,
) -> None:
    """Passes over a place's rows in plain torch; only the named parameters are the optimizer's."""
    optimizer = torch.optim.SGD([module.get_parameter(k) for k in names], lr=lr, momentum=momentum)
    for n in numbers:
        for x, y in client_context.epochs(n, epochs=1, size=8):
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()


# -- local training --------------------------------------------------------------------------------


def test_head_and_body_learn_in_turn() -> None:
    """An epoch of the head leaves the body bit for bit, and the other way round."""
    party = peer(epochs=3, head_epochs=2)
    assert steps.local_epochs(party, 0) == [(0, HEAD), (1, HEAD), (2, BODY), (3, BODY), (4, BODY)]
    assert [n for n, _ in steps.local_epochs(party, 1)] == [5, 6, 7, 8, 9]
    for n, names in steps.local_epochs(party, 0):
        before = copied(party)
        steps.sgd_epochs(party, [(n, names)])
        assert [k for k, v in party.params.items() if not torch.equal(v, before[k])] == names
    assert steps.local_epochs(peer(epochs=3, personal_head=False), 1) == [
        (3, None),
        (4, None),
        (5, None),
    ]


@pytest.mark.parametrize("personal", [True, False])
def test_two_rounds_are_those_of_plain_torch(personal: bool) -> None:
    """With a new optimizer for each round and part: momentum begins at zero."""
    party, module = peer(epochs=2, head_epochs=1, personal_head=personal, momentum=0.8), common()
    train = partial(trained, module, party.context, lr=0.05, momentum=0.8)
    for t in range(2):
        steps.local_sgd(party, t=t)
        if personal:
            train(range(3 * t, 3 * t + 1), HEAD)
            train(range(3 * t + 1, 3 * t + 3), BODY)
        else:
            train(range(2 * t, 2 * t + 2), [*BODY, *HEAD])
    for k, p in module.named_parameters():
        assert torch.allclose(party.params[k], p, rtol=0, atol=1e-6), k
        assert not torch.equal(party.params[k], common().get_parameter(k))


def test_no_head_passes_leave_the_head_alone() -> None:
    party = peer(head_epochs=0)
    before = copied(party)
    steps.local_sgd(party, t=0)
    assert {k for k, v in party.params.items() if not torch.equal(v, before[k])} == set(BODY)


# -- fine-tuning -----------------------------------------------------------------------------------


def test_fine_tuning_moves_all_weights_with_shuffles_of_its_own() -> None:
    party, module = peer(finetune_epochs=2), common()
    steps.fine_tune(party)
    trained(module, party.context, range(steps.TUNING - 2, steps.TUNING), [*BODY, *HEAD], 0.05, 0.9)
    for k, p in module.named_parameters():
        assert torch.allclose(party.params[k], p, rtol=0, atol=1e-6), k
    assert (
        GossipConfig(finetune_epochs=2).eval_modes == ("tuned",)
        and GossipConfig(finetune_epochs=0).eval_modes == ()
    )


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
@pytest.mark.parametrize("name", ["gossip", "fedavg-ft"])
def test_an_evaluation_after_fine_tuning_leaves_the_state_as_it_was(
    name: str, batched: bool
) -> None:
    toy = Toy(methods.find(name), batch_size=8, finetune_epochs=3, lr=0.1, batched=batched).run(1)
    before = sha(toy)
    broadcast = toy.server.broadcast() if toy.server else {}
    words: dict[str, Any] = {"on": "test", "broadcast": broadcast}
    plain, tuned = (
        toy.engine.call(toy.engine.ids, "predictions", {**words, "eval_mode": w}, None, None)
        for w in ("", "tuned")
    )
    assert sha(toy) == before
    for i, (a, b) in enumerate(zip(plain, tuned, strict=True)):
        assert not torch.equal(a["loss"], b["loss"])
        party = toy.party(i)
        if broadcast:
            steps.set_weights(party, broadcast)
        assert torch.allclose(a["loss"], predictions(party, on="test")["loss"], atol=1e-6)
        steps.fine_tune(party)
        assert torch.allclose(b["loss"], predictions(party, on="test")["loss"], atol=1e-6)


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_predictions_may_use_the_statistics_of_the_rows_asked_about(batched: bool) -> None:
    toy = Toy(
        GOSSIP, make=lambda _: common(norm=True), batch_size=8, batchnorm="batch", batched=batched
    ).run(1)
    party, module = toy.party(1), common(norm=True)
    module.load_state_dict({**party.params, **party.buffers})
    x = party.context.tests["test"].every
    found = toy.engine.call([0, 1], "predictions", {"on": "test"}, None, None)[1]
    assert torch.equal(found["predicted"], module.train()(x).argmax(-1))
    assert not torch.allclose(party.infer(x), module.eval()(x), atol=1e-3)


# -- what others may see ---------------------------------------------------------------------------


def test_shared_weights_are_all_or_all_but_the_head() -> None:
    assert list(steps.shared_weights(peer())) == BODY
    assert list(steps.shared_weights(peer(personal_head=False))) == [*BODY, *HEAD]
    party = peer()
    before = copied(party)
    steps.set_weights(
        party, {k: torch.zeros_like(v) for k, v in steps.shared_weights(party).items()}
    )
    assert all(not party.params[k].any() for k in BODY)
    assert all(torch.equal(party.params[k], before[k]) for k in HEAD)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (
            nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)),
            "has no module named `head`",
        ),
        (nn.ModuleDict({"head": nn.Linear(FEATURES, CLASSES)}), "consists only of a head"),
        (nn.ModuleDict({"header": nn.Linear(FEATURES, CLASSES)}), "has no module named `head`"),
    ],
    ids=["no head", "no body", "another name"],
)
def test_a_network_without_two_parts_is_refused_in_words(module: nn.Module, what: str) -> None:
    context = ClientContext(id=0, data=rows(20, 0), network=lambda: module)
    with pytest.raises(
        ModelError, match=rf"{re.escape(what)}.*models\.pool.*params\.personal_head=false"
    ):
        GossipPeer(GossipConfig(), context)
    params = dict(module.named_parameters())
    assert steps.shared_names(params, personal_head=False) == list(params)
    assert list(
        steps.shared_weights(GossipPeer(GossipConfig(personal_head=False), context))
    ) == list(params)


PERSONAL = [m for m in methods.registry().values() if "personal_head" in m.config.model_fields]


@pytest.mark.parametrize("method", PERSONAL, ids=lambda m: m.name)
def test_a_personal_head_is_in_no_message(method: Any) -> None:
    """Read off the ledger, whose lines name every tensor that crossed."""
    if "personal_head" in method.fixed:
        assert not method.fixed["personal_head"]
        return
    toy = Toy(method, server_side={"pretrained": common}, batch_size=8, personal_head=True).run(2)
    assert not toy.fed.failures
    assert "head." not in " ".join(e.what for e in toy.fed.ledger)
    end = toy.tensors()
    assert len({tuple(end[f"{i}.head.bias"].tolist()) for i in toy.engine.ids}) == len(
        toy.engine.ids
    )


@pytest.mark.parametrize("personal", [True, False], ids=["personal head", "all shared"])
@pytest.mark.parametrize("method", [GOSSIP, FEDAVG], ids=lambda m: m.name)
def test_what_is_shared_crosses_and_all_weights_learn(method: Any, personal: bool) -> None:
    toy = Toy(method, batch_size=8, personal_head=personal)
    start = toy.tensors()
    end = toy.run(2).tensors()
    crossed = " ".join(e.what for e in toy.fed.ledger)
    for k in (*BODY, *HEAD):
        assert (f"weights.{k} " in crossed) == (k in BODY or not personal)
        assert not any(torch.equal(start[f"{i}.{k}"], end[f"{i}.{k}"]) for i in toy.engine.ids)


def test_statistics_stay_with_their_client() -> None:
    norm = lambda i: common(norm=True)
    for method in (GOSSIP, FEDAVG):
        toy = Toy(method, make=norm, batch_size=8).run(2)
        assert "running" not in " ".join(e.what for e in toy.fed.ledger)
        end = toy.tensors()
        means = {tuple(end[f"{i}.body.1.running_mean"].tolist()) for i in toy.engine.ids}
        assert len(means) == len(toy.engine.ids)


# -- who is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [GOSSIP, ALONE, FEDAVG], ids=lambda m: m.name)
def test_who_is_away_keeps_its_state_and_receives_nothing(method: Any) -> None:
    toy = Toy(method, batch_size=8).run(1)
    before = {
        i: {k: v for k, v in toy.tensors().items() if k.startswith(f"{i}.")} for i in toy.engine.ids
    }
    pairs = {pair: tuple(n) for pair, n in toy.fed.ledger.pairs.items()}
    toy.run(2, start=1, present=(0, 1, 3))
    after = {
        i: {k: v for k, v in toy.tensors().items() if k.startswith(f"{i}.")} for i in toy.engine.ids
    }
    assert [equal(before[i], after[i]) for i in toy.engine.ids] == [False, False, True, False]
    me = toy.engine.name(2)
    assert all(
        tuple(n) == pairs.get(pair, (0, 0))
        for pair, n in toy.fed.ledger.pairs.items()
        if me in pair
    )
    if method is not FEDAVG:
        assert toy.party(2).take_notes()["mixing"][2] > 0  # of the first round
    toy.run(1, start=3)
    assert not toy.fed.failures
    assert not equal(after[2], {k: v for k, v in toy.tensors().items() if k.startswith("2.")})
