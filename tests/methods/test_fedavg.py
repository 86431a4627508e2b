"""FedAvg's page against its algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.core.context import ClientContext
from fedloom.core.faults import Faults
from fedloom.protect.aggregators import Robust
from fedloom.protect.robust import Rule
from tests.toy import CLASSES, FEATURES, Toy, common, contexts, equal, rows

FEDAVG, FEDAVG_FT = (methods.find(n) for n in ("fedavg", "fedavg-ft"))
MODEL = 4 * sum(p.numel() for p in common().parameters())
BODY = 4 * (FEATURES * 8 + 8)


def by_hand(
    start: dict[str, Tensor],
    client_contexts: Sequence[ClientContext],
    rounds: range,
    epochs: int,
    lr: float,
    momentum: float,
) -> dict[str, Tensor]:
    """Algorithm 1 with all clients: the server's weights after these rounds."""
    weights = start
    for t in rounds:
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in weights.items()}
        for client_context in client_contexts:
            module = common()
            module.load_state_dict(weights)
            optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
            for n in range(t * epochs, (t + 1) * epochs):
                for x, y in client_context.epochs(n, epochs=1, size=8):
                    optimizer.zero_grad()
                    F.cross_entropy(module(x), y).backward()
                    optimizer.step()
            for k, p in module.state_dict().items():
                total[k] += len(client_context.rows) * p.double()
        count = sum(len(client_context.rows) for client_context in client_contexts)
        weights = {k: (v / count).float() for k, v in total.items()}
    return weights


def initial() -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in common().named_parameters()}


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=atol) for k in a)


def test_everybody_begins_with_the_server_s_weights() -> None:
    toy = Toy(FEDAVG)
    assert toy.server is not None
    assert close(toy.server.weights, initial(), 0.0)
    assert all(close(dict(toy.party(i).params), initial(), 0.0) for i in toy.engine.ids)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_two_rounds_are_those_written_by_hand(batched: bool, momentum: float) -> None:
    """Uneven data: 20, 30, 40 and 50 rows, so that the mean is weighted."""
    toy = Toy(FEDAVG, batched=batched, epochs=2, batch_size=8, lr=0.05, momentum=momentum)
    assert toy.server is not None
    weights = initial()
    for t in range(2):
        toy.run(1, start=t)
        weights = by_hand(weights, toy.client_contexts, range(t, t + 1), 2, 0.05, momentum)
        assert close(toy.server.weights, weights)
    assert not close(weights, initial(), 1e-3)
    unweighted = {
        k: torch.stack([toy.party(i).params[k] for i in toy.engine.ids]).mean(0) for k in weights
    }
    assert not close(toy.server.weights, unweighted, 1e-5)


def test_one_client_is_central_training() -> None:
    """Its weights go to the server and back, unchanged; only momentum begins anew each round."""
    toy = Toy(FEDAVG, 1, epochs=2, batch_size=8, lr=0.05).run(3)
    assert toy.server is not None
    assert close(
        toy.server.weights, by_hand(initial(), toy.client_contexts, range(3), 2, 0.05, 0.9)
    )
    assert close(toy.server.weights, dict(toy.party(0).params), 0.0)
    plain = Toy(FEDAVG, 1, epochs=6, batch_size=8, lr=0.05, momentum=0.0).run(1)
    rounds = Toy(FEDAVG, 1, epochs=2, batch_size=8, lr=0.05, momentum=0.0).run(3)
    # without momentum rounds make no difference at all
    assert equal(plain.tensors(), rounds.tensors())


@pytest.mark.parametrize(("chosen", "expected"), [(None, 5), (3, 3), (10, 5)])
def test_a_round_costs_two_models_a_participant_and_a_row_count(
    chosen: int | None, expected: int
) -> None:
    toy = Toy(FEDAVG, 5, batch_size=8, clients_per_round=chosen).run(4)
    assert toy.fed.ledger.sent("server") == 4 * expected * MODEL
    assert toy.fed.ledger.received("server") == 4 * expected * (MODEL + 8)
    assert {e.kind for e in toy.fed.ledger} == {"update"}
    assert not [pair for pair in toy.fed.ledger.pairs if "server" not in pair]


def test_with_a_personal_head_only_bodies_are_averaged() -> None:
    toy = Toy(FEDAVG, batch_size=8, personal_head=True, epochs=1).run(2)
    assert toy.server is not None
    assert list(toy.server.weights) == ["body.0.weight", "body.0.bias"]
    assert toy.fed.ledger.sent("server") == 2 * 4 * BODY
    counts = [len(p.rows) for p in toy.client_contexts]
    for k, v in toy.server.weights.items():
        mean = sum(n * toy.party(i).params[k].double() for i, n in enumerate(counts)) / sum(counts)
        assert torch.allclose(v.double(), mean, rtol=0, atol=1e-6)


def test_participants_are_few_and_the_others_stay_as_they_were() -> None:
    toy = Toy(FEDAVG, 5, batch_size=8, clients_per_round=2)
    start = toy.tensors()
    chosen = toy.fed.sample(range(5), 2, 0)
    end = toy.run(1).tensors()
    moved = {
        int(k[0]) for k in end if not k.startswith("server") and not torch.equal(start[k], end[k])
    }
    assert moved == set(chosen)
    assert toy.server is not None
    counts = {i: len(toy.client_contexts[i].rows) for i in chosen}
    for k, v in toy.server.weights.items():
        mean = sum(n * toy.party(i).params[k].double() for i, n in counts.items()) / sum(
            counts.values()
        )
        assert torch.allclose(v.double(), mean, rtol=0, atol=1e-6)


def answers(toy: Toy, eval_mode: str = "") -> list[Any]:
    assert toy.server is not None
    words = {"on": "test", "eval_mode": eval_mode, "broadcast": toy.server.broadcast()}
    return toy.engine.call(toy.engine.ids, "predictions", words, None, None)


def test_everybody_is_evaluated_with_the_server_s_weights() -> None:
    """Also who took no part; what it evaluates is what a fresh module with these
    weights answers.
    """
    toy = Toy(FEDAVG_FT, 5, batch_size=8, clients_per_round=2).run(2)
    assert toy.server is not None
    before, sent = toy.tensors(), toy.fed.ledger.state()
    found = answers(toy)
    module = common()
    module.load_state_dict(toy.server.weights)
    test = toy.client_contexts[0].tests["test"]
    with torch.no_grad():
        expected = module(test.every)
    for reply in found:
        assert torch.equal(reply["predicted"], expected.argmax(-1))
        assert torch.allclose(reply["loss"], F.cross_entropy(expected, test.labels), atol=1e-6)
    assert equal(toy.tensors(), before) and toy.fed.ledger.state() == sent
    tuned = [float(r["loss"]) for r in answers(toy, "tuned")]
    assert len(set(tuned)) == 5  # each has fine-tuned on its own rows
    assert equal(toy.tensors(), before)


def test_fedavg_has_no_fine_tuning_and_fedavg_ft_is_fedavg_otherwise() -> None:
    assert FEDAVG.configure().eval_modes == () and FEDAVG_FT.configure().eval_modes == ("tuned",)
    assert equal(
        Toy(FEDAVG, batch_size=8).run(2).tensors(), Toy(FEDAVG_FT, batch_size=8).run(2).tensors()
    )


def test_a_round_without_a_reply_leaves_the_server_as_it_was() -> None:
    toy = Toy(FEDAVG, batch_size=8, faults=Faults(dropout=1.0)).run(2)
    assert toy.server is not None and close(toy.server.weights, initial(), 0.0)
    assert {f.reason for f in toy.fed.failures} == {"dropped out", "fewer than 1 replies"}


def test_replies_that_are_no_use_are_left_out_of_the_mean() -> None:
    toy = Toy(FEDAVG, 6, batch_size=8, faults=Faults(nan=0.3, late=0.2, dropout=0.1)).run(4)
    assert toy.server is not None
    assert len({f.reason for f in toy.fed.failures}) >= 3
    assert all(torch.isfinite(v).all() for v in toy.server.weights.values())


def test_a_network_of_another_shape_cannot_poison_the_mean() -> None:
    """The template is the common network's: who sends another is dropped and counted."""
    client_contexts = contexts(3, make=common)
    odd = ClientContext(
        id=2,
        parties=3,
        classes=CLASSES,
        data=rows(30, 2),
        network=lambda: common(width=9),
        tests=client_contexts[2].tests,
    )
    toy = Toy(FEDAVG, client_contexts=[*client_contexts[:2], odd], batch_size=8).run(1)
    assert toy.server is not None
    assert [f.party for f in toy.fed.failures] == ["client-2"]
    assert close(
        toy.server.weights, by_hand(initial(), client_contexts[:2], range(1), 5, 0.01, 0.9)
    )


def test_any_module_will_do_where_all_is_shared() -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    toy = Toy(FEDAVG, batch_size=8, make=lambda i: nn.Sequential(nn.Linear(FEATURES, CLASSES))).run(
        1
    )
    assert not toy.fed.failures and toy.fed.ledger.sent("server") == 4 * 4 * sum(
        p.numel() for p in plain.parameters()
    )


def liar(how: Aggregator, lie: str) -> Toy:
    """Three rounds of seven clients with like data, of which one lies in every reply."""
    faults = Faults(liars=(2,), lie=lie)
    return Toy(FEDAVG, 7, faults=faults, epochs=2, batch_size=8, lr=0.05, means=how).run(3)


@pytest.mark.each_time(
    "clip-flip", "median-*", "trimmed-huge", "krum-*", "centered-flip", "multikrum-huge"
)
@pytest.mark.parametrize("lie", ["flip", "huge"])
@pytest.mark.parametrize("rule", ["clip", "median", "trimmed", "krum", "multikrum", "centered"])
def test_a_robust_rule_keeps_a_liar_from_the_weights(rule: Rule, lie: str) -> None:
    """The server's weights stay as near to those of an honest run as the honest clients' are to
    each other.
    """
    toy, honest = liar(Robust(rule), lie), Toy(FEDAVG, 7, epochs=2, batch_size=8, lr=0.05).run(3)
    assert toy.server is not None and honest.server is not None
    moved = max(float((honest.server.weights[k] - v).abs().max()) for k, v in initial().items())
    apart = max(
        float((toy.server.weights[k] - v).abs().max()) for k, v in honest.server.weights.items()
    )
    assert apart < 2 * moved
    plain = liar(MEAN, "huge").server
    assert plain is not None and max(float(v.abs().max()) for v in plain.weights.values()) > 1e4


def test_a_round_with_too_few_replies_changes_nothing() -> None:
    toy = Toy(FEDAVG, 5, faults=Faults(dropout=1.0), means=Robust("krum")).run(1)
    assert toy.server is not None and close(toy.server.weights, initial(), 0.0)
