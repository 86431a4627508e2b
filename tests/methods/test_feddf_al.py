"""FedDF-AL's page against FedAL's, against FedAvg's, and against a round written by hand in plain
PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.methods.distillation.fedal import mlp
from tests.methods.architectures import GROUPS, group_networks, grouped, size
from tests.methods.test_feddf import close, floats, models_of
from tests.toy import CLASSES, Toy, equal

FEDAL, FEDAVG_ADAM, FEDDF_AL = (methods.find(n) for n in ("fedal", "fedavg-adam", "feddf-al"))
SMALL: dict[str, Any] = {"batch_size": 8, "tau": 3}
ALONE: dict[str, Any] = {"kd": 0.0, "adv": 0.0, "lf_local": 0.0, "lf_global": 0.0}


def clients_of(toy: Toy) -> dict[str, Tensor]:
    return {k: v for k, v in toy.tensors().items() if not k.startswith("server")}


def kl(target: Tensor, f: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(f, -1), target, reduction="batchmean")


def probabilities(module: nn.Module, x: Tensor) -> Tensor:
    """Constant, in evaluation mode."""
    with torch.no_grad():
        return F.softmax(module.eval()(x), -1)


class ByHand:
    """The method with all clients, by autograd through a client's network and the discriminator at
    once.
    """

    def __init__(self, toy: Toy) -> None:
        self.cfg, self.client_contexts, self.makers = (
            toy.cfg,
            toy.client_contexts,
            group_networks(GROUPS),
        )
        self.clients = [self.makers[g]() for g in GROUPS]
        self.adams = [torch.optim.Adam(c.parameters(), lr=self.cfg.lr) for c in self.clients]
        self.models = [floats(make()) for make in self.makers]
        self.judge = mlp(CLASSES, *self.cfg.disc_hidden, len(GROUPS))
        assert toy.server is not None
        self.judge.load_state_dict(toy.server.params)
        self.judge_adam = torch.optim.Adam(self.judge.parameters(), lr=self.cfg.disc_lr)

    def step(self, n: int, loss: Tensor) -> None:
        self.adams[n].zero_grad()
        loss.backward()
        self.adams[n].step()

    def guess(self, f: Tensor) -> Tensor:
        return F.log_softmax(self.judge(F.softmax(f / self.cfg.disc_temperature, -1)), -1)

    def round(self, t: int) -> None:
        cfg = self.cfg
        for n, (g, client) in enumerate(zip(GROUPS, self.clients, strict=True)):
            client.load_state_dict(self.models[g])
            batches = self.client_contexts[n].batches(t, steps=cfg.tau, size=cfg.batch_size)
            before = [probabilities(client, x) for x, _ in batches]
            for (x, y), own in zip(batches, before, strict=True):
                f = client.train()(x)
                self.step(n, F.cross_entropy(f, y) + kl(own, f))
        self.transfer(t)
        for g in range(len(self.makers)):
            mine = [i for i, other in enumerate(GROUPS) if other == g]
            rows = sum(len(self.client_contexts[i].rows) for i in mine)
            sent: Any = {i: floats(self.clients[i]) for i in mine}
            self.models[g] = {
                k: sum(len(self.client_contexts[i].rows) / rows * sent[i][k] for i in mine)
                for k in sent[mine[0]]
            }

    def transfer(self, t: int) -> None:
        cfg, public = self.cfg, self.client_contexts[0].public
        assert public is not None
        batches = public.batches(t, cfg.tau, cfg.batch_size)
        before = [[probabilities(client, x) for x in batches] for client in self.clients]
        for i, x in enumerate(batches):
            answers = [client.train()(x) for client in self.clients]
            sent = torch.stack(answers).detach()
            authors = torch.arange(len(sent)).repeat_interleave(len(x))
            self.judge_adam.zero_grad()
            F.nll_loss(self.guess(sent.flatten(0, 1)), authors).backward()
            self.judge_adam.step()
            for n, f in enumerate(answers):
                others = F.softmax((sent.sum(0) - sent[n]) / (len(sent) - 1), -1)
                given_away = self.guess(f)[:, n].mean()
                self.step(n, kl(others, f) + given_away + kl(before[n][i], f))


# -- the algorithm by hand, and its reductions -----------------------------------------------------


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_two_rounds_are_those_written_by_hand(batched: bool) -> None:
    """The second one's less-forgetting has the averaged models as its reference."""
    toy = grouped(FEDDF_AL, batched=batched, disc_lr=1e-2, gradient_cap=None, **SMALL)
    hand = ByHand(toy)
    for t in range(2):
        toy.run(1, start=t)
        hand.round(t)
        for ours, theirs in zip(models_of(toy), hand.models, strict=True):
            assert close(ours, theirs, 2e-6)
    for i, client in enumerate(hand.clients):
        assert close(dict(toy.party(i).params), floats(client), 2e-6)
    assert toy.server is not None
    assert close(dict(toy.server.params), floats(hand.judge), 2e-6)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_where_each_client_has_an_architecture_of_its_own_it_is_fedal_to_the_bit(
    norm: bool,
) -> None:
    """The mean of one model is that model. What is more is a model each way, and a row count."""
    each = (0, 1, 2, 3)
    ours, fedal = (
        grouped(m, each, norm=norm, disc_lr=1e-2, **SMALL).run(3) for m in (FEDDF_AL, FEDAL)
    )
    assert equal(clients_of(ours), clients_of(fedal))
    assert ours.server is not None and fedal.server is not None
    assert equal(dict(ours.server.params), dict(fedal.server.params))
    models = sum(size(i, each, norm) for i in each)
    assert ours.fed.ledger.sent("server") == fedal.fed.ledger.sent("server") + 3 * models
    assert ours.fed.ledger.received("server") == fedal.fed.ledger.received("server") + 3 * (
        models + 4 * 8
    )


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_without_its_terms_it_is_fedavg_with_a_kept_adam_to_the_bit(norm: bool) -> None:
    ours = grouped(FEDDF_AL, norm=norm, **ALONE, **SMALL).run(3)
    plain = grouped(FEDAVG_ADAM, norm=norm, **SMALL).run(3)
    assert equal(clients_of(ours), clients_of(plain))
    for a, b in zip(models_of(ours), models_of(plain), strict=True):
        assert close(a, b, 0.0)
    assert ours.fed.ledger.received("server") == plain.fed.ledger.received("server")


# -- bytes, stages, evaluation ---------------------------------------------------------------------


def test_bytes_are_those_of_fedal_and_a_model_each_way() -> None:
    toy = grouped(FEDDF_AL, **SMALL).run(2)
    models, answers = sum(size(i) for i in range(5)), 5 * 3 * CLASSES * 8 * 4
    assert toy.fed.ledger.sent("server") == 2 * (models + 2 * answers)
    assert toy.fed.ledger.received("server") == 2 * (models + 5 * 8 + answers)
    assert {e.kind for e in toy.fed.ledger} == {"begin", "local_train", "predict", "distil", "give"}
    assert {e.kind for e in toy.fed.ledger if e.receiver == "server" and e.bytes} == {
        "predict",
        "give",
    }


def test_while_a_round_is_in_progress_each_is_evaluated_as_it_is_and_then_with_the_group_s_model() -> (  # noqa: E501
    None
):
    toy = grouped(FEDDF_AL, norm=True, clients_per_round=3, **SMALL)
    assert toy.server is not None
    test, seen = toy.client_contexts[0].tests["test"], {}
    before = toy.server.broadcast()
    for stage in toy.method.round(toy.fed, toy.server, toy.engine.ids, toy.cfg, 0):
        seen[stage] = toy.server.broadcast()
        words = {"on": "test", "broadcast": seen[stage]}
        found = toy.engine.call(toy.engine.ids, "predictions", words, None, None)
        for i, (g, reply) in enumerate(zip(GROUPS, found, strict=True)):
            own = {**toy.party(i).params, **toy.party(i).buffers}
            module = group_networks(GROUPS, True)[g]().eval()
            module.load_state_dict(models_of(toy)[g] if stage == "average" else own, strict=False)
            with torch.no_grad():
                assert torch.allclose(
                    reply["loss"], F.cross_entropy(module(test.every), test.labels), atol=1e-6
                )
    assert list(seen) == ["local", "transfer", "average"]
    assert before and not seen["local"] and not seen["transfer"]
    assert seen["average"].keys() == before.keys()


def test_only_who_takes_part_trains() -> None:
    toy = grouped(FEDDF_AL, clients_per_round=2, **SMALL)
    start = toy.tensors()
    end = toy.run(1).tensors()
    moved = {
        k[0] for k in start if not k.startswith("server") and not torch.equal(start[k], end[k])
    }
    assert moved == {str(i) for i in toy.fed.sample(range(5), 2, 0)}


# -- faults, engines, config -----------------------------------------------------------------------


def test_who_did_not_get_its_group_s_model_sits_the_round_out() -> None:
    toy = grouped(FEDDF_AL, faults=Faults(dropout=0.15), **SMALL).run(8)
    missed = {(f.round, f.party) for f in toy.fed.failures if f.kind == "begin"}
    later = {
        (f.round, f.party)
        for f in toy.fed.failures
        if f.kind in ("local_train", "predict", "distil", "give")
    }
    assert missed and later and not missed & later
    trained = {
        t: sum(e.count for e in toy.fed.ledger if (e.round, e.kind) == (t, "local_train"))
        for t in range(8)
    }
    assert trained == {t: 2 * (5 - sum(r == t for r, _ in missed)) - lost(toy, t) for t in range(8)}


def lost(toy: Toy, t: int) -> int:
    """Replies of the local stage that did not come."""
    return sum(f.round == t and f.kind == "local_train" for f in toy.fed.failures)


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    reason = {
        "dropout": "dropped out",
        "crash": "raised",
        "nan": "not finite",
        "inf": "not finite",
        "shape": "wrong shape",
        "type": "not a message",
        "late": "late",
    }[fault]
    toy = grouped(FEDDF_AL, faults=Faults(**{fault: 0.25}), **SMALL).run(5)
    reasons = {f.reason for f in toy.fed.failures}
    assert reason in reasons <= {reason, "fewer than 2 replies"}
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


def test_without_participants_nothing_moves() -> None:
    toy = grouped(FEDDF_AL, faults=Faults(dropout=1.0), **SMALL)
    before = toy.tensors()
    assert equal(toy.run(1).tensors(), before)
    assert toy.server is not None and toy.server.broadcast()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(norm: bool) -> None:
    loop, strict = (
        grouped(FEDDF_AL, norm=norm, isolated=isolated, **SMALL).run(2)
        for isolated in (False, True)
    )
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()


def test_a_run_continues_from_its_states() -> None:
    whole = grouped(FEDDF_AL, norm=True, **SMALL).run(3)
    first, rest = (grouped(FEDDF_AL, norm=True, **SMALL) for _ in range(2))
    first.run(2)
    rest.engine.load(first.engine.states())
    assert rest.server is not None and first.server is not None
    rest.server.load(first.server.state())
    assert equal(rest.run(1, start=2).tensors(), whole.tensors())


def test_the_settings_are_fedal_s_with_a_longer_stage() -> None:
    cfg, fedal = FEDDF_AL.configure(), FEDAL.configure()
    assert {**cfg.model_dump(), "tau": 5} == fedal.model_dump() and cfg.tau == 15
    assert (cfg.disc_temperature, cfg.disc_lr) == (2.0, 1e-4)
    paper = FEDDF_AL.configure("paper")
    assert (paper.disc_optimizer, paper.gradient_cap) == ("sgd", None)
    with pytest.raises(ConfigError, match="Did you mean 'tau'"):
        FEDDF_AL.configure(params={"tua": 3})
