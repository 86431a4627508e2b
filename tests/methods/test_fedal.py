"""FedAL's page against its paper: gradients, reductions, bytes, order, faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.core.losses import cap_rows, kl, kl_gradient, reverse_kl_gradient
from fedloom.methods.distillation import fedal
from fedloom.methods.distillation.fedal import (
    FedALClient,
    FedALConfig,
    FedALServer,
    author_loss,
    averaged,
    target_of,
)
from fedloom.methods.distillation.steps import mean_of_others
from tests.toy import CLASSES, FEATURES, Toy, combined, contexts, equal, network, rows

FEDAL, FEDMD, FEDMD_LF, LOCAL = (methods.find(n) for n in ("fedal", "fedmd", "fedmd-lf", "local"))


def judge(
    owner: Any, logits: Mapping[int, Any], t: int, i: int
) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Lines 12-16 on these answers."""
    found = combined(logits, read=lambda n, sent: averaged(owner, owner.cfg.decode(sent, CLASSES)))
    return fedal.judge(owner, found, t, i)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def server(clients: int = 5, **params: Any) -> FedALServer:
    """In float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return FedALServer(
            FedALConfig(**params), ClientContext(id=0, parties=clients, classes=CLASSES)
        )
    finally:
        torch.set_default_dtype(torch.float32)


# -- losses and their gradients, in float64 --------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_gradient_of_kl_in_the_logits(temperature: float) -> None:
    target, z = F.softmax(rand(7, 5), -1), rand(7, 5, seed=1).requires_grad_()
    (ours,) = torch.autograd.grad(kl(target, z, temperature) * 7, z)
    closed = (F.softmax(z / temperature, -1) - target) / temperature
    assert (kl_gradient(target, z, temperature) - closed).abs().max() == 0
    assert (ours - closed).abs().max() < 1e-15


def test_gradient_of_reverse_kl_in_the_logits() -> None:
    target, z = F.softmax(rand(7, 5), -1), rand(7, 5, seed=1).requires_grad_()
    p = F.softmax(z / 2, -1)
    (auto,) = torch.autograd.grad((p * (p / target).log()).sum(), z)
    assert (reverse_kl_gradient(target, z, 2.0) - auto).abs().max() < 1e-15


def test_losses_pass_gradcheck() -> None:
    target, z = F.softmax(rand(4, 3), -1), rand(4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: kl(target, z, 2.0), z)
    owner = server(3, disc_hidden=(8,))
    f, author = rand(6, CLASSES, seed=2).requires_grad_(), torch.tensor([0, 0, 1, 1, 2, 2])
    assert torch.autograd.gradcheck(lambda f: author_loss(owner, f, author, "sum"), f)


def test_cap_shortens_long_rows_and_leaves_short_ones() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert torch.allclose(cap_rows(g, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert torch.equal(cap_rows(torch.zeros(1, 2), 1.0), torch.zeros(1, 2))


def test_the_mean_of_the_others_is_exact() -> None:
    f = rand(6, 3, CLASSES)
    for n in range(6):
        others = f[[m for m in range(6) if m != n]].mean(0)
        assert (mean_of_others(f[n], f.mean(0), 6) - others).abs().max() < 1e-15


# -- the server ------------------------------------------------------------------------------------


def test_split_gradient_is_that_of_the_composed_graph_and_of_finite_differences() -> None:
    """(21): J_theta fᵀ G, with G from the server, is the gradient of U_n through model, softmax and
    h.
    """
    owner = server(disc_lr=1e-3)
    net = nn.Linear(FEATURES, CLASSES).double()
    x, others = rand(8, FEATURES, seed=3), {n: rand(8, CLASSES, seed=n) for n in range(1, 5)}
    _, gradients = judge(owner, {0: net(x).detach(), **others}, 0, 0)

    def u() -> Tensor:
        return -author_loss(owner, net(x), torch.zeros(8, dtype=torch.long), "sum")

    split = torch.autograd.grad((net(x) * gradients[0]["gradient"]).sum(), net.weight)[0]
    composed = torch.autograd.grad(u(), net.weight)[0]
    assert (split - composed).abs().max() < 1e-14
    h, numeric = 1e-6, torch.zeros_like(split)
    with torch.no_grad():
        for i in range(split.numel()):
            net.weight.view(-1)[i] += h
            up = u()
            net.weight.view(-1)[i] -= 2 * h
            numeric.view(-1)[i] = (up - u()) / (2 * h)
            net.weight.view(-1)[i] += h
    assert (split - numeric).abs().max() < 1e-8


def test_rows_of_the_gradient_sum_to_zero() -> None:
    _, gradients = judge(server(), {n: rand(8, CLASSES, seed=n) for n in range(5)}, 0, 0)
    for g in gradients.values():
        assert g["gradient"].abs().max() > 1e-4
        assert g["gradient"].sum(-1).abs().max() < 1e-16


def test_the_gradient_is_per_row_and_ascent_comes_first() -> None:
    """G uses the discriminator after its step, is not divided by B or N, and depends on no other
    client.
    """
    logits = {n: rand(8, CLASSES, seed=n) for n in range(5)}
    owner, twin = server(disc_lr=0.01), server(disc_lr=0.01)
    before = {k: v.clone() for k, v in owner.params.items()}
    _, gradients = judge(owner, logits, 0, 0)
    assert any(not torch.equal(before[k], v) for k, v in owner.params.items())
    twin.params = owner.params  # w^{t,i+1}
    for n, z in logits.items():
        row = z[3:4].clone().requires_grad_()
        u = -author_loss(twin, row, torch.tensor([n]))
        (alone,) = torch.autograd.grad(u, row)
        assert (gradients[n]["gradient"][3:4] - alone).abs().max() < 1e-14


def test_the_discriminator_learns_only_from_its_own_step() -> None:
    owner = server(disc_lr=0.01)
    logits = {n: rand(32, CLASSES, seed=n) + 2 * torch.eye(CLASSES)[n % CLASSES] for n in range(4)}
    f, author = torch.cat(list(logits.values())), torch.arange(4).repeat_interleave(32)
    first = author_loss(owner, f, author).item()
    for _ in range(100):
        judge(owner, logits, 0, 0)
    assert author_loss(owner, f, author).item() < first - 0.2
    assert int(owner.opt["step"]) == 100


def test_identical_clients_leave_the_discriminator_at_chance_and_gradients_cancel() -> None:
    """Lemma IV.2 in its true form: equal output laws give h = 1/N, CE = log N and sum_n G_n = 0."""
    owner = server(disc_lr=1e-2)
    same = rand(16, CLASSES)
    for _ in range(600):
        _, gradients = judge(owner, {n: same.clone() for n in range(5)}, 0, 0)
    author = torch.arange(5).repeat_interleave(16)
    excess = author_loss(owner, same.repeat(5, 1), author).item() - math.log(5)
    assert 0 <= excess < 1e-5
    total: Any = sum(g["gradient"] for g in gradients.values())
    assert total.abs().max() < 1e-4


def test_permuted_outputs_fool_the_discriminator_too() -> None:
    """Chance level is necessary for agreement, not sufficient: only the KL term aligns rows."""
    owner = server(disc_lr=1e-2)
    base = rand(16, CLASSES)
    logits = {
        n: base[torch.randperm(16, generator=torch.Generator().manual_seed(n))] for n in range(5)
    }
    for _ in range(600):
        judge(owner, logits, 0, 0)
    author = torch.arange(5).repeat_interleave(16)
    assert (
        abs(author_loss(owner, torch.cat(list(logits.values())), author).item() - math.log(5))
        < 1e-5
    )


def test_a_step_against_the_gradient_lowers_what_gives_a_client_away() -> None:
    owner = server()
    logits = {n: rand(8, CLASSES, seed=n) for n in range(5)}
    _, gradients = judge(owner, logits, 0, 0)
    author = torch.zeros(8, dtype=torch.long)
    before = -author_loss(owner, logits[0], author)
    after = -author_loss(owner, logits[0] - 0.01 * gradients[0]["gradient"], author)
    assert after < before


# -- a client's step, against a hand-made one ------------------------------------------------------


def test_one_round_of_one_client_by_hand() -> None:
    """NumPy: a linear client, one local and one transfer step by SGD-free arithmetic on its
    gradients.
    """
    toy = Toy(
        FEDAL,
        3,
        client_contexts=contexts(3, make=lambda n: network(2)),
        tau=1,
        batch_size=8,
        adv=0.0,
    )
    start = {k: v.clone() for k, v in toy.tensors().items()}
    context = toy.engine._parties[0].context
    w, b = start["0.weight"].double().numpy(), start["0.bias"].double().numpy()
    x, y = (a[0].double().numpy() for a in _batch(toy.engine._parties[0]))

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def adam(value: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
        m: Any = 0.0
        v: Any = 0.0
        for k, g in enumerate(grads, 1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            value = value - 1e-3 * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
        return value

    d = (softmax(x @ w.T + b) - np.eye(CLASSES)[y.astype(int)]) / 8
    gw, gb = d.T @ x, d.sum(0)
    w1, b1 = adam(w, [gw]), adam(b, [gb])
    toy.run(1)
    public = context.public.batches(0, 1, 8)[0].double().numpy()
    others = []
    for n in (1, 2):
        twin = (
            Toy(
                LOCAL,
                3,
                client_contexts=contexts(3, make=lambda n: network(2)),
                tau=1,
                batch_size=8,
            )
            .run(1)
            .tensors()
        )
        others.append(
            public @ twin[f"{n}.weight"].double().numpy().T + twin[f"{n}.bias"].double().numpy()
        )
    d = (softmax(public @ w1.T + b1) - softmax(np.mean(others, 0))) / 8
    w2, b2 = adam(w, [gw, d.T @ public]), adam(b, [gb, d.sum(0)])
    after = toy.tensors()
    assert np.abs(after["0.weight"].numpy() - w2).max() < 1e-6
    assert np.abs(after["0.bias"].numpy() - b2).max() < 1e-6


def _batch(client: FedALClient) -> tuple[Tensor, Tensor]:
    batches = client.batches(0, steps=1, size=8)
    return batches.x, batches.y


def test_less_forgetting_pulls_towards_the_stage_start() -> None:
    plain = Toy(FEDMD, tau=4, batch_size=8, lr=0.05).run(3).tensors()
    kept = Toy(FEDMD, tau=4, batch_size=8, lr=0.05, lf_local=5.0, lf_global=5.0).run(3).tensors()
    start = Toy(FEDMD).tensors()
    names = [k for k in start if not k.startswith("server")]

    def moved(to: dict[str, Tensor]) -> float:
        return sum(float((to[k] - start[k]).norm()) for k in names)

    assert moved(kept) < 0.95 * moved(plain)


def test_a_stage_begins_with_an_adam_at_rest_though_its_first_exchange_is_lost() -> None:
    toy = Toy(FEDAL, 3, tau=2, batch_size=8, adam="stage").run(1)
    client = toy.party(0)
    assert int(client.opt["step"]) == 2  # those of the transfer stage
    client.local_train(t=1)
    assert not any(slot.any() for slot in client.opt.values())
    client.predict(t=1, i=1)
    client.distil(t=1, i=1, n=3, mean=torch.zeros(8, CLASSES))
    assert int(client.opt["step"]) == 1


# -- reductions between the points of the page -----------------------------------------------------


def test_fedal_without_its_adversary_is_fedmd_lf() -> None:
    assert equal(Toy(FEDAL, adv=0.0).run(3).tensors(), Toy(FEDMD_LF).run(3).tensors())


def test_fedmd_lf_with_one_step_is_fedmd_to_the_bit() -> None:
    assert equal(Toy(FEDMD_LF, tau=1).run(5).tensors(), Toy(FEDMD).run(5).tensors())


def test_fedmd_lf_with_no_weight_is_fedmd() -> None:
    a = Toy(FEDMD_LF, tau=3, lf_local=0.0, lf_global=0.0).run(3).tensors()
    assert equal(a, Toy(FEDMD, tau=3).run(3).tensors())


def test_fedal_with_no_weights_is_local() -> None:
    toy = Toy(FEDAL, adv=0.0, kd=0.0, lf_local=0.0, lf_global=0.0).run(3)
    assert equal(toy.tensors(), Toy(LOCAL).run(3).tensors())
    assert all(e.bytes == 0 for e in toy.fed.ledger)


def test_equal_clients_stay_equal_and_teach_each_other_nothing() -> None:
    client_contexts = contexts(3, make=lambda n: network(0), data=lambda n: rows(8, 5))
    # all 8 rows in each batch
    toy = Toy(FEDMD, client_contexts=client_contexts, batch_size=8, tau=1)
    toy.run(4)
    states = [s["params"] for s in toy.engine.states().values()]
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=1e-6)
    notes = toy.engine.notes()[0]
    assert notes["gradient norm kd"] < 1e-6


# -- bytes, who sees what --------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "down"), [(FEDAL, 2), (FEDMD_LF, 1)])
def test_bytes_are_exactly_those_of_the_paper(method: Any, down: int) -> None:
    """V-A: K·B·4 up and twice that down per client and iteration; FedMD's down is half of that."""
    toy = Toy(method, 4, tau=3, batch_size=8).run(5)
    iteration = CLASSES * 8 * 4 * 4 * 3 * 5
    assert toy.fed.ledger.received("server") == iteration
    assert toy.fed.ledger.sent("server") == down * iteration


def test_the_server_never_receives_anything_but_logits() -> None:
    toy = Toy(FEDAL, 4, batch_size=8).run(2)
    up = {e.what for e in toy.fed.ledger if e.receiver == "server"}
    assert up == {f"float32[8,{CLASSES}]", "none"}


# -- identity, order, participation ----------------------------------------------------------------


def test_renaming_the_clients_renames_the_result() -> None:
    """Without a discriminator, which knows clients by number, the order of clients
    does not matter.
    """
    plain = contexts(3)
    order = [2, 0, 1]
    toy = Toy(FEDMD_LF, client_contexts=plain, tau=2, batch_size=8).run(3).tensors()
    moved = (
        Toy(FEDMD_LF, client_contexts=[plain[i] for i in order], tau=2, batch_size=8)
        .run(3)
        .tensors()
    )
    for k, v in toy.items():
        assert torch.allclose(v, moved[k], atol=1e-6)


def test_renaming_the_clients_renames_the_gradients() -> None:
    owner, twin = server(3), server(3)
    order = [2, 0, 1]  # new number of old client n
    last = list(owner.params)[-2:]  # the output layer: its rows are the clients
    twin.params = {
        k: v[torch.tensor(order).argsort()] if k in last else v for k, v in owner.params.items()
    }
    logits = {n: rand(8, CLASSES, seed=n) for n in range(3)}
    mean, gradients = judge(owner, logits, 0, 0)
    mean2, gradients2 = judge(twin, {order[n]: z for n, z in logits.items()}, 0, 0)
    assert (mean - mean2).abs().max() < 1e-15
    for n in range(3):
        assert (gradients[n]["gradient"] - gradients2[order[n]]["gradient"]).abs().max() < 1e-12


def test_partial_participation_trains_only_the_sampled() -> None:
    toy = Toy(FEDAL, 6, clients_per_round=2, batch_size=8)
    start = toy.tensors()
    toy.run(1)
    after = toy.tensors()
    changed = {k.split(".")[0] for k in start if not torch.equal(start[k], after[k])} - {"server"}
    assert changed == {str(i) for i in toy.fed.sample(range(6), 2, 0)}
    assert len(changed) == 2


def test_a_federation_of_one_learns_alone_and_says_why() -> None:
    toy = Toy(FEDAL, 1, batch_size=8).run(2)
    assert {t.reason for t in toy.fed.failures} == {"fewer than 2 replies"}
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


# -- engines, state, faults ------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FEDAL, FEDMD_LF, FEDMD, LOCAL], ids=lambda m: m.name)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(method: Any, norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: network(n, norm=norm))
    loop = Toy(method, client_contexts=client_contexts, batch_size=8).run(3)
    strict = Toy(method, client_contexts=client_contexts, batch_size=8, isolated=True).run(3)
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()


def test_every_client_changes_and_so_does_the_server() -> None:
    toy = Toy(FEDAL, 3)
    start = toy.tensors()
    after = toy.run(1).tensors()
    assert all(not torch.equal(start[k], after[k]) for k in start)


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    toy = Toy(FEDAL, 5, faults=Faults(**{fault: 0.3}), batch_size=8).run(6)
    reason = {
        "dropout": "dropped out",
        "crash": "raised",
        "nan": "not finite",
        "inf": "not finite",
        "shape": "wrong shape",
        "type": "not a message",
        "late": "late",
    }[fault]
    reasons = {t.reason for t in toy.fed.failures}
    assert reason in reasons <= {reason, "fewer than 2 replies"}
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


def test_a_nan_client_is_kept_out_of_the_mean() -> None:
    client_contexts = contexts(4)
    toy = Toy(FEDMD, client_contexts=client_contexts, batch_size=8)
    sick = toy.engine._parties[3]
    with torch.no_grad():
        sick.net.flat.fill_(float("nan"))
    toy.run(2)
    healthy = {k: v for k, v in toy.tensors().items() if not k.startswith("3.")}
    assert all(torch.isfinite(v).all() for v in healthy.values())
    alone = Toy(FEDMD, client_contexts=client_contexts[:3], batch_size=8).run(2).tensors()
    for k, v in alone.items():
        if not k.startswith("server"):
            assert torch.equal(v, healthy[k])  # as if the sick client were not there


# -- shorter messages ------------------------------------------------------------------------------


CODINGS: dict[
    str, tuple[dict[str, Any], int, int]
] = {  # with the bytes of a row up, and of a mean's or gradient's down
    "float32": ({}, 4 * CLASSES, 4 * CLASSES),
    "float16": ({"coding": "float16"}, 2 * CLASSES, 2 * CLASSES),
    "int8": ({"coding": "int8"}, CLASSES + 4, CLASSES + 4),
    "top-1": ({"coding": "top-k", "top_k": 1}, 5, 2 * CLASSES),
    "top-3": ({"coding": "top-k", "top_k": 3}, 11, 2 * CLASSES),
}
codings = pytest.mark.parametrize("coding", CODINGS)


@codings
@pytest.mark.parametrize(("method", "down"), [(FEDAL, 2), (FEDMD_LF, 1)])
def test_bytes_of_each_coding(method: Any, down: int, coding: str) -> None:
    params, row_up, row_down = CODINGS[coding]
    toy = Toy(method, 4, tau=3, batch_size=8, **params).run(5)
    assert not toy.fed.failures
    batches = 8 * 4 * 3 * 5
    assert toy.fed.ledger.received("server") == row_up * batches
    assert toy.fed.ledger.sent("server") == down * row_down * batches


@codings
def test_engines_agree_whatever_the_coding(coding: str) -> None:
    params, *_ = CODINGS[coding]
    client_contexts = contexts(3, make=lambda n: network(1))
    loop = Toy(FEDAL, client_contexts=client_contexts, batch_size=8, tau=2, **params).run(2)
    strict = Toy(
        FEDAL, client_contexts=client_contexts, batch_size=8, tau=2, isolated=True, **params
    ).run(2)
    together = Toy(
        FEDAL, client_contexts=client_contexts, batch_size=8, tau=2, batched=True, **params
    ).run(2)
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state() == together.fed.ledger.state()
    assert not any("in turn" in remark for remark in together.engine.account().remarks)
    for name, value in loop.tensors().items():
        assert torch.allclose(value, together.tensors()[name], atol=1e-4), name


@pytest.mark.parametrize(("coding", "most"), [("float16", 2e-3), ("int8", 0.03)])
def test_a_run_with_rounded_logits_stays_near_the_exact_one(coding: str, most: float) -> None:
    params, *_ = CODINGS[coding]
    exact, rounded = (
        Toy(FEDMD, batch_size=8, lr=0.01, **p).run(10).tensors() for p in ({}, params)
    )
    start = Toy(FEDMD).tensors()
    off = math.sqrt(sum(float((exact[k] - rounded[k]).square().sum()) for k in start))
    eval_mode = math.sqrt(sum(float((exact[k] - start[k]).square().sum()) for k in start))
    assert 0 < off < most * eval_mode


@codings
@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("n", [2, 5])
def test_the_target_is_the_mean_of_the_others_as_the_server_has_them(
    n: int, average: str, coding: str
) -> None:
    """Also where one client's largest logits are another's rest."""
    toy = Toy(FEDMD, n, batch_size=8, average=average, **CODINGS[coding][0])
    cfg = toy.cfg
    assert isinstance(cfg, FedALConfig) and isinstance(toy.server, FedALServer)
    sent = {m: cfg.encode(4 * rand(8, CLASSES, seed=m).float()) for m in range(n)}
    mean, _ = judge(toy.server, sent, 0, 0)
    seen = torch.stack([cfg.decode(z, CLASSES) for z in sent.values()])
    for own in range(n):
        others = seen[[m for m in range(n) if m != own]]
        exact = others.mean(0).softmax(-1) if average == "logits" else others.softmax(-1).mean(0)
        target = target_of(4 * rand(8, CLASSES, seed=own).float(), mean, n, None, toy.party(own))
        off = (target - exact).abs().sum(-1).max() / 2
        assert off < {"float32": 1e-6, "int8": 0.05}.get(coding, 5e-3)


def test_a_client_beyond_float16_is_kept_out_of_the_mean() -> None:
    client_contexts = contexts(4)
    toy = Toy(FEDMD, client_contexts=client_contexts, batch_size=8, coding="float16")
    with torch.no_grad():
        toy.party(3).net.flat.fill_(1e5)
    toy.run(2)
    assert {(f.party, f.kind, f.reason) for f in toy.fed.failures} == {
        (toy.engine.name(3), "predict", "not finite")
    }
    alone = (
        Toy(FEDMD, client_contexts=client_contexts[:3], batch_size=8, coding="float16")
        .run(2)
        .tensors()
    )
    healthy = toy.tensors()
    assert all(torch.equal(v, healthy[k]) for k, v in alone.items() if not k.startswith("server"))


@pytest.mark.parametrize("coding", ["float32", "int8"])
def test_huge_answers_leave_everybody_finite(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(FEDAL, 4, batch_size=8, tau=2, coding=coding)
    honest = FedALClient.predict

    def predict(self: FedALClient, *, t: int, i: int) -> Any:
        answer = honest(self, t=t, i=i)
        huge = torch.full((8, CLASSES), torch.finfo(torch.float32).max)
        evil = (
            {"steps": huge.sign().to(torch.int8) * 127, "scale": huge[:, 0]}
            if coding == "int8"
            else huge
        )
        return evil if self.context.id > 1 else answer

    monkeypatch.setattr(FedALClient, "predict", predict)
    toy.run(3)
    assert not toy.fed.failures
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


# -- config ----------------------------------------------------------------------------------------


def test_presets_differ_where_the_paper_is_read_literally() -> None:
    paper, ours = FEDAL.configure("paper"), FEDAL.configure()
    assert (paper.disc_optimizer, ours.disc_optimizer) == ("sgd", "adam")
    assert (paper.lr, paper.tau, paper.disc_lr, paper.batch_size) == (1e-3, 5, 1e-4, 32)
    assert FEDMD.configure("paper").tau == 1


def test_errors_come_all_at_once_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as error:
        FEDAL.configure(params={"tua": 3, "lr": -1, "kl_direction": "sideways"})
    text = str(error.value)
    assert "Did you mean 'tau'?" in text
    assert "params.lr" in text and "params.kl_direction" in text


@pytest.mark.parametrize(
    "params", [{"coding": "top-k"}, {"coding": "int8", "top_k": 3}, {"top_k": 3}]
)
def test_top_k_and_its_number_belong_together(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set both or neither"):
        FEDAL.configure(params=params)
    with pytest.raises(ConfigError, match=r"params\.coding"):
        FEDAL.configure(params={"coding": "int4"})
