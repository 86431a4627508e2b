"""FD's page against its algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.aggregate import Combined
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.methods.distillation.fd import FDClient, FDConfig, FDServer
from tests.toy import CLASSES, FEATURES, Toy, contexts, equal, network, rows

FD, LOCAL = methods.find("fd"), methods.find("local")


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(n: int) -> nn.Module:
    """One architecture, each client's own weights: what can be batched."""
    with torch.random.fork_rng():
        torch.manual_seed(40 + n)
        return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def only(i: int, *classes: int) -> Rows:
    """Rows of these classes alone."""
    every = rows(200, i)
    which = torch.isin(every.y(torch.arange(200)), torch.tensor(classes)).nonzero()[
        : 20 + 10 * i, 0
    ]
    return Rows(every.pool, every.labels, which, every.shift, every.scale)


def few(i: int) -> Rows:
    """Class 0 is everybody's, class i + 1 is client i's alone."""
    return only(i, 0, i % 3 + 1)


def apart(i: int) -> Rows:
    """No class is at two clients."""
    return only(i, i)


# -- the loss and the server, in float64 -----------------------------------------------------------


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_the_gradient_is_that_of_the_loss(average: str) -> None:
    client = FDClient(FDConfig(gamma=0.7, average=average), contexts(1)[0])
    means = (
        rand(CLASSES, CLASSES, seed=2)
        if average == "logits"
        else rand(CLASSES, CLASSES, seed=2).softmax(-1)
    )
    client.received = {"means": means, "known": torch.tensor([True, False, True, True])}
    f, y = rand(9, CLASSES).requires_grad_(), torch.arange(9) % CLASSES
    targets = means.softmax(-1) if average == "logits" else means
    pull = torch.stack(
        [-(targets[k] * f[row].log_softmax(-1)).sum() for row, k in enumerate(y.tolist()) if k != 1]
    )
    (auto,) = torch.autograd.grad(F.cross_entropy(f, y, reduction="sum") + 0.7 * pull.sum(), f)
    assert (client.gradient_by_row(f.detach(), y) - auto).abs().max() < 1e-15


def test_each_receives_the_mean_of_those_others_that_have_a_class() -> None:
    have = [[0, 1], [0, 2], [0, 1, 2], []]
    means = rand(4, CLASSES, CLASSES)
    replies = {
        10 + n: {"means": means[n], "present": torch.tensor([k in classes for k in range(CLASSES)])}
        for n, classes in enumerate(have)
    }
    server = FDServer(FDConfig(), ClientContext(id=0, classes=CLASSES))
    taught = server.teach(Combined({}, None, tuple(replies), replies))
    assert list(taught) == list(replies)
    for n in range(4):
        for k in range(CLASSES):
            others = [means[m, k] for m in range(4) if m != n and k in have[m]]
            assert bool(taught[10 + n]["known"][k]) == bool(others)
            mean = torch.stack(others).mean(0) if others else torch.zeros(CLASSES)
            assert (taught[10 + n]["means"][k] - mean).abs().max() < 1e-15


def test_who_alone_has_a_class_has_no_target_for_it_and_gives_one() -> None:
    t = Toy(FD, client_contexts=contexts(3, data=few), batch_size=16).run(1)
    for i in range(3):
        known = t.party(i).received["known"].tolist()
        assert known == [k != i + 1 for k in range(CLASSES)]


# -- rounds, against hand-made ones ----------------------------------------------------------------


def by_hand(
    client_contexts: list[ClientContext], rounds: int, tau: int, gamma: float, average: str
) -> list[nn.Module]:
    """All clients' networks after this many rounds."""
    networks = [client_context.build() for client_context in client_contexts]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in networks]
    received: list[dict[int, Tensor]] = [{} for _ in client_contexts]
    for t in range(rounds):
        sent = []
        for n, client_context in enumerate(client_contexts):
            said: dict[int, list[Tensor]] = {}
            for x, y in client_context.batches(t, steps=tau, size=8):
                f = networks[n](x)
                loss = F.cross_entropy(f, y)
                for row, k in enumerate(y.tolist()):
                    answer = f[row] if average == "logits" else f[row].softmax(-1)
                    said.setdefault(k, []).append(answer.detach())
                    if k in received[n]:
                        target = (
                            received[n][k].softmax(-1) if average == "logits" else received[n][k]
                        )
                        loss = loss + gamma * F.cross_entropy(f[row], target) / len(y)
                optimizers[n].zero_grad()
                loss.backward()
                optimizers[n].step()
            sent.append({k: torch.stack(each).mean(0) for k, each in said.items()})
        for n in range(len(client_contexts)):
            others = [s for m, s in enumerate(sent) if m != n]
            classes = {k for s in others for k in s}
            received[n] = {
                k: torch.stack([s[k] for s in others if k in s]).mean(0) for k in classes
            }
    return networks


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_three_rounds_are_those_written_by_hand(batched: bool, average: str) -> None:
    client_contexts = contexts(3, make=alike if batched else network, data=few)
    t = Toy(
        FD,
        client_contexts=client_contexts,
        batched=batched,
        tau=2,
        batch_size=8,
        lr=0.05,
        gamma=1.5,
        average=average,
    ).run(3)
    assert not any("in turn" in remark for remark in t.engine.account().remarks)
    for i, module in enumerate(by_hand(client_contexts, 3, 2, 1.5, average)):
        for k, p in module.named_parameters():
            assert torch.allclose(t.party(i).params[k], p, atol=2e-6)


@pytest.mark.parametrize(("rounds", "gamma"), [(1, 0.15), (3, 0.0)], ids=["first round", "gamma 0"])
def test_without_a_target_it_is_local_training(rounds: int, gamma: float) -> None:
    alone = Toy(LOCAL, tau=2, batch_size=8).run(rounds)
    t = Toy(FD, tau=2, batch_size=8, gamma=gamma).run(rounds)
    for i in range(4):
        for k, p in alone.party(i).params.items():
            assert torch.allclose(t.party(i).params[k], p, atol=1e-6)


def test_clients_without_a_common_class_learn_nothing_from_each_other() -> None:
    weak, strong = (
        Toy(FD, client_contexts=contexts(4, data=apart), batch_size=8, gamma=g).run(3)
        for g in (0.1, 10.0)
    )
    assert equal(weak.tensors(), strong.tensors())
    together = [
        Toy(FD, client_contexts=contexts(4), batch_size=8, gamma=g).run(3) for g in (0.1, 10.0)
    ]
    assert not equal(*(t.tensors() for t in together))


def test_the_others_answers_pull() -> None:
    """A strong pull leaves clients closer to what they hear."""

    def off(gamma: float) -> float:
        t = Toy(FD, tau=4, lr=0.02, gamma=gamma).run(5)
        found = []
        for i in range(4):
            x, y = (
                t.client_contexts[i].rows.every,
                t.client_contexts[i].rows.y(torch.arange(len(t.client_contexts[i].rows))),
            )
            target = t.party(i).received["means"].softmax(-1)[y]
            found.append(
                float(F.kl_div(t.party(i).infer(x).log_softmax(-1), target, reduction="batchmean"))
            )
        return sum(found)

    assert off(10.0) < 0.3 * off(0.0)


# -- bytes, who sees what --------------------------------------------------------------------------


def test_bytes_are_those_of_the_means_and_the_mask() -> None:
    t = Toy(FD, 4, tau=3, batch_size=8).run(5)
    once = CLASSES * CLASSES * 4 + CLASSES
    assert t.fed.ledger.received("server") == t.fed.ledger.sent("server") == 5 * 4 * once


def test_the_server_receives_means_by_class_and_nothing_else() -> None:
    t = Toy(FD, 4, batch_size=8).run(2)
    means = f"float32[{CLASSES},{CLASSES}]"
    up = {e.what for e in t.fed.ledger if e.receiver == "server"}
    assert up == {f"means {means}; present bool[{CLASSES}]", "none"}


# -- participation, faults, engines ----------------------------------------------------------------


def test_who_is_away_keeps_what_it_received() -> None:
    t = Toy(FD, 4, batch_size=8).run(1)
    before, start = {k: v.clone() for k, v in t.party(3).received.items()}, t.tensors()
    t.run(1, start=1, present=[0, 1, 2])
    assert equal(before, t.party(3).received)
    changed = {k.split(".")[0] for k, v in t.tensors().items() if not torch.equal(v, start[k])}
    assert changed == {"0", "1", "2"}


def test_one_client_alone_receives_nothing() -> None:
    t = Toy(FD, 1, batch_size=8).run(2)
    assert {f.reason for f in t.fed.failures} == {"fewer than 2 replies"}
    assert not t.party(0).received["known"].any() and not t.fed.ledger.sent("server")


def test_a_nan_client_is_kept_out_of_the_means() -> None:
    client_contexts = contexts(4)
    t = Toy(FD, client_contexts=client_contexts, batch_size=8)
    with torch.no_grad():
        t.party(3).net.flat.fill_(float("nan"))
    t.run(3)
    assert {(f.party, f.reason) for f in t.fed.failures} == {("client-3", "not finite")}
    alone = Toy(FD, client_contexts=client_contexts[:3], batch_size=8).run(3)
    healthy = {k: v for k, v in t.tensors().items() if not k.startswith("3.")}
    assert equal(alone.tensors(), healthy)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("liars", [1, 2])
def test_huge_answers_leave_everybody_finite_and_learning(
    liars: int, average: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FDClient.update

    def update(self: FDClient, *, t: int) -> Any:
        messages = honest(self, t=t)
        lies = self.context.id < liars and t == 0
        return {**messages, "means": torch.full_like(messages["means"], 3e38)} if lies else messages

    monkeypatch.setattr(FDClient, "update", update)
    t = Toy(FD, 4, batch_size=8, average=average).run(1)
    received = t.party(3).received["means"]
    assert torch.isfinite(received).all() and (
        average == "logits" or ((received >= 0).all() and (received <= 1).all())
    )
    t.run(1, start=1)
    before = t.tensors()
    after = t.run(1, start=2).tensors()
    assert not t.fed.failures
    assert all(torch.isfinite(v).all() for v in after.values())
    assert all((v - before[k]).abs().max() > 1e-5 for k, v in after.items())


def test_faults_are_counted_and_poison_nothing() -> None:
    t = Toy(
        FD,
        6,
        faults=Faults(nan=0.15, inf=0.1, shape=0.15, type=0.1, dropout=0.1, late=0.1),
        batch_size=8,
    ).run(5)
    reasons = {f.reason for f in t.fed.failures}
    assert reasons >= {"not finite", "wrong shape", "not a message", "dropped out", "late"}
    assert all(torch.isfinite(v).all() for v in t.tensors().values())


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: network(n, norm=norm))
    loop = Toy(FD, client_contexts=client_contexts, tau=2, batch_size=8).run(3)
    strict = Toy(FD, client_contexts=client_contexts, tau=2, batch_size=8, isolated=True).run(3)
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()
    assert loop.engine.notes() == strict.engine.notes()


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        FD.configure(params={"gama": 1, "gamma": -1, "average": "sideways", "coding": "int8"})
    text = str(error.value)
    assert "Did you mean 'gamma'?" in text and "params.coding: there is no such setting" in text
    assert "params.gamma" in text and "params.average" in text


def test_the_defaults_are_ours() -> None:
    settings: Any = FD.configure()
    assert settings.gamma == 0.15 and settings.average == "logits" and not FD.needs
