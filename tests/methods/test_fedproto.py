"""FedProto's page against its algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import MethodError, ModelError
from fedloom.core.faults import Faults
from fedloom.methods.features import class_means
from fedloom.models.parts import Classifier
from tests.toy import CLASSES, FEATURES, Toy, common, contexts, equal, rows

FEDPROTO = methods.find("fedproto")
WIDTH = 8


def own(n: int) -> Classifier:
    """Client n's: features of one width, from bodies of two."""
    with torch.random.fork_rng():
        torch.manual_seed(40 + n)
        hidden = 5 + n % 2
        body = nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH), nn.ReLU()
        )
        return Classifier(body, WIDTH, CLASSES)


def few(i: int) -> Rows:
    """Client i has the classes i and i + 1 alone; nobody has the last class."""
    every = rows(200, i)
    y = every.y(torch.arange(200))
    which = torch.cat([torch.nonzero(y == k)[: 6 + 2 * i + 3 * k, 0] for k in (i % 2, i % 2 + 1)])
    return Rows(every.pool, every.labels, which, every.shift, every.scale)


def toy(n: int = 3, **settings: Any) -> Toy:
    make = settings.pop("make", own)
    return Toy(
        FEDPROTO,
        client_contexts=contexts(n, make=make, data=few),
        **{"batch_size": 4, "lr": 0.05, **settings},
    )


def by_hand(
    client_contexts: list[ClientContext], rounds: int, epochs: int, lam: float
) -> tuple[list[Classifier], dict[int, Tensor]]:
    """Algorithm 1 with all clients: their networks, and the global prototypes by class."""
    networks = [own(p.id) for p in client_contexts]
    known: dict[int, Tensor] = {}
    for t in range(rounds):
        sent: dict[int, list[tuple[int, Tensor]]] = {}
        for client_context, network in zip(client_contexts, networks, strict=True):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
            for n in range(t * epochs, (t + 1) * epochs):
                for x, y in client_context.epochs(n, epochs=1, size=4):
                    optimizer.zero_grad()
                    f = network.features(x)
                    target = f.detach().clone()
                    for row, k in enumerate(y.tolist()):
                        if k in known:
                            target[row] = known[k]
                    (F.cross_entropy(network(x), y) + lam * F.mse_loss(f, target)).backward()
                    optimizer.step()
            x = client_context.rows.every
            y = client_context.rows.y(torch.arange(len(client_context.rows)))
            for k in y.unique().tolist():
                sent.setdefault(k, []).append(
                    (int((y == k).sum()), network.features(x[y == k]).detach().mean(0))
                )
        for k, each in sent.items():
            known[k] = torch.stack([n * c for n, c in each]).sum(0) / sum(n for n, _ in each)
    return networks, known


@pytest.mark.parametrize("lam", [0.0, 1.5])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_two_rounds_are_those_written_by_hand(batched: bool, lam: float) -> None:
    t = toy(batched=batched, epochs=2, lam=lam).run(2)
    assert not any("in turn" in remark for remark in t.engine.account().remarks)
    networks, known = by_hand(t.client_contexts, 2, 2, lam)
    assert t.server is not None
    found = t.server.prototypes
    assert found["known"].tolist() == [True, True, True, False]
    for k, c in known.items():
        assert torch.allclose(found["prototypes"][k], c, atol=1e-6)
    for i, network in enumerate(networks):
        for name, p in network.named_parameters():
            assert torch.allclose(t.party(i).params[f"network.{name}"], p, atol=1e-6)


def test_the_global_prototypes_matter_and_at_ld_0_training_is_local() -> None:
    local, near = toy(lam=0.0).run(2), toy(lam=1.5).run(2)
    assert not torch.allclose(
        local.party(0).params["network.head.weight"], near.party(0).params["network.head.weight"]
    )
    alone = Toy(
        FEDPROTO, client_contexts=[local.client_contexts[0]], batch_size=4, lr=0.05, lam=0.0
    ).run(2)
    assert all(torch.equal(p, local.party(0).params[k]) for k, p in alone.party(0).params.items())


def test_what_crosses_is_prototypes_and_counts() -> None:
    t = toy().run(3)
    down, up = CLASSES * WIDTH * 4 + CLASSES, CLASSES * WIDTH * 4 + CLASSES * 8
    assert t.fed.ledger.sent("server") == 2 * 3 * down  # nothing is known in the first round
    assert t.fed.ledger.received("server") == 3 * 3 * up


def test_networks_of_one_architecture_begin_as_they_were_given() -> None:
    t = toy(make=common).run(1)
    assert not t.fed.failures
    assert not torch.allclose(
        t.party(0).params["network.head.weight"], t.party(1).params["network.head.weight"]
    )


def test_features_of_different_widths_are_refused() -> None:
    """A run with such networks is refused before it starts."""
    wider = toy(make=lambda i: common(width=8 + i)).run(1)
    assert {f.reason for f in wider.fed.failures if f.party != "client-0"} == {"wrong shape"}
    late = toy(make=lambda i: common(width=8 + i // 2)).run(1, present=[0, 1])
    assert late.server is not None
    with pytest.raises(MethodError, match="some have 8 and some 9"):
        late.run(1, start=1, present=[2])


def test_a_network_without_features_is_refused() -> None:
    with pytest.raises(ModelError, match="no method `features`"):
        toy(make=lambda i: nn.Linear(FEATURES, CLASSES))


def test_who_fails_does_not_count_and_a_class_keeps_its_prototype() -> None:
    t = toy().run(1)
    assert t.server is not None
    before = t.server.prototypes["prototypes"].clone()
    t.run(1, start=1, present=[0])  # it has the classes 0 and 1
    after = t.server.prototypes["prototypes"]
    assert torch.equal(after[2], before[2]) and not torch.equal(after[1], before[1])
    assert t.server.prototypes["known"].tolist() == [True, True, True, False]
    poor = toy(6, faults=Faults(nan=0.3, shape=0.2, dropout=0.2)).run(4)
    assert poor.server is not None and {f.reason for f in poor.fed.failures} >= {
        "not finite",
        "wrong shape",
    }
    assert torch.isfinite(poor.server.prototypes["prototypes"]).all()


def answer(t: Toy, i: int, eval_mode: str) -> Any:
    assert t.server is not None
    (found,) = t.engine.call(
        [i],
        "predictions",
        {"on": "test", "eval_mode": eval_mode, "broadcast": t.server.broadcast()},
        None,
        None,
    )
    return found


@pytest.mark.parametrize("who", ["prototype", "classifier"])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_an_unseen_client_adapts_its_own_first_network(who: str, batched: bool) -> None:
    """On its support half, with the prototypes handed out; then these, or its own last layer,
    answer.
    """
    t = toy(4, predict=who, alpha=0.1, batched=batched).run(2, present=[0, 1])
    assert t.server is not None
    before, known = t.tensors(), t.server.prototypes
    network = own(3)
    x, y, _ = t.client_contexts[3].support
    for eval_mode, steps in {"0 steps": 0, "1 step": 1, "5 steps": 4}.items():
        for _ in range(steps):
            network.zero_grad()
            f = network.features(x)
            far = (f - known["prototypes"][y]).square().mean(-1) * known["known"][y]
            (F.cross_entropy(network(x), y) + far.mean()).backward()
            with torch.no_grad():
                for p in network.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * p.grad)
        f = network.features(t.client_contexts[3].tests["test"].every)
        distances = torch.cdist(f, known["prototypes"])[:, :3]
        expected = distances.argmin(-1) if who == "prototype" else network.head(f).argmax(-1)
        assert torch.equal(answer(t, 3, eval_mode)["predicted"], expected)
    assert equal(t.tensors(), before)


def test_a_class_without_a_prototype_is_never_answered_and_the_loss_is_a_number() -> None:
    t = toy().run(1)
    found = answer(t, 1, "")
    assert (found["predicted"] < 3).all() and torch.isfinite(found["loss"])
    nothing = answer(toy(), 1, "1 step")  # before the first round: no prototypes at all
    assert torch.isfinite(nothing["loss"])


def test_class_means_do_not_count_rows_that_fill_up() -> None:
    f = torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0], [5.0, 5.0]])
    means, counts = class_means(
        f, torch.tensor([1, 1, 1, 0]), 3, torch.tensor([0.5, 0.5, 0.0, 0.5])
    )
    assert means.tolist() == [[5.0, 5.0], [2.0, 3.0], [0.0, 0.0]] and counts.tolist() == [1, 2, 0]
