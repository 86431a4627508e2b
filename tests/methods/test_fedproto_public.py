"""FedProto on public data against its algorithm, written by hand in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError, ModelError
from fedloom.core.faults import Faults
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.methods.distillation.fedproto_public import (
    LARGEST,
    AdaptedFeatures,
    FedProtoPublicClient,
    FedProtoPublicConfig,
    FedProtoPublicServer,
)
from fedloom.models.parts import Classifier
from tests.toy import CLASSES, FEATURES, Toy, combined, common, contexts, equal

PROTO, LOCAL = methods.find("fedproto-public"), methods.find("local")
WIDTH = 8


def own(n: int, *, hidden: int | None = None, width: int = WIDTH, norm: bool = False) -> Classifier:
    """Client n's: features of one width, from bodies of several."""
    hidden = 5 + n % 2 if hidden is None else hidden
    with torch.random.fork_rng():
        torch.manual_seed(40 + n)
        middle = [nn.BatchNorm1d(hidden)] if norm else []
        body = nn.Sequential(
            nn.Linear(FEATURES, hidden), *middle, nn.Tanh(), nn.Linear(hidden, width), nn.ReLU()
        )
        return Classifier(body, width, CLASSES)


def toy(n: int = 3, **settings: Any) -> Toy:
    make = settings.pop("make", own)
    return Toy(
        PROTO,
        client_contexts=settings.pop("client_contexts", contexts(n, make=make)),
        **{"batch_size": 8, **settings},
    )


def params(t: Toy, i: int) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in t.party(i).params.items()}


# -- a round, against hand-made ones ---------------------------------------------------------------


def by_hand(
    client_contexts: list[ClientContext],
    modules: list[AdaptedFeatures],
    rounds: int,
    tau: int,
    lam: float,
) -> None:
    """Train these networks for so many rounds, with torch's Adam."""
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in modules]
    for t in range(rounds):
        for client_context, module, optimizer in zip(
            client_contexts, modules, optimizers, strict=True
        ):
            for x, y in client_context.batches(t, steps=tau, size=8):
                optimizer.zero_grad()
                F.cross_entropy(module.network.head(module(x)), y).backward()
                optimizer.step()
        assert client_contexts[0].public is not None
        for x in client_contexts[0].public.batches(t, tau, 8):
            features = [m(x).detach() for m in modules]
            for n, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                target = torch.stack([f for m, f in enumerate(features) if m != n]).mean(0)
                optimizer.zero_grad(set_to_none=True)
                (lam * (module(x) - target).square().sum() / target.numel()).backward()
                optimizer.step()
                for p in module.network.head.parameters():
                    assert p.grad is None
                    optimizer.state[p]["step"] += 1  # the page's one count of steps


@pytest.mark.parametrize("feature_dim", [None, 6])
@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_three_rounds_are_those_written_by_hand(batched: bool, feature_dim: int | None) -> None:
    client_contexts = contexts(3, make=lambda n: own(n, hidden=5 if batched else None))
    t = toy(
        client_contexts=client_contexts,
        batched=batched,
        tau=2,
        lr=0.02,
        lam=1.5,
        feature_dim=feature_dim,
    )
    modules = [
        AdaptedFeatures(client_context.build(), feature_dim) for client_context in t.client_contexts
    ]
    for i, module in enumerate(modules):
        module.load_state_dict(t.party(i).params)  # an adaptor's first weights are drawn for each
    by_hand(t.client_contexts, modules, 3, 2, 1.5)
    t.run(3)
    assert not any("in turn" in remark for remark in t.engine.account().remarks)
    for i, module in enumerate(modules):
        for k, p in module.named_parameters():
            assert torch.allclose(t.party(i).params[k], p, atol=2e-6), k


def test_the_first_transfer_step_in_numpy() -> None:
    """One linear layer for features: the gradient of the mean squared error is 2 (g - target)ᵀ x /
    (B d).
    """

    def plain(n: int) -> Classifier:
        with torch.random.fork_rng():
            torch.manual_seed(n)
            return Classifier(nn.Linear(FEATURES, WIDTH, bias=False), WIDTH, CLASSES)

    t = toy(make=plain, lam=0.7)
    before = [params(t, i) for i in range(3)]
    x = t.client_contexts[0].public.batches(0, 1, 8)[0]
    features = {i: t.party(i).embed(t=0, i=0) for i in range(3)}
    t.party(0).align(t=0, i=0, n=3, mean=combined(features, read=t.server.read).value)
    w = [b["network.body.weight"].double().numpy() for b in before]
    rows = x.double().numpy()
    apart = rows @ w[0].T - (rows @ w[1].T + rows @ w[2].T) / 2
    gradient = 0.7 * 2 * apart.T @ rows / (8 * WIDTH)
    assert (
        np.abs(t.party(0).opt["mean"][: gradient.size].numpy() - 0.1 * gradient.ravel()).max()
        < 1e-7
    )
    moved = t.party(0).params["network.body.weight"].double().numpy() - w[0]
    assert np.abs(moved + 1e-3 * gradient / (np.abs(gradient) + 1e-8)).max() < 1e-6
    assert abs(t.engine.notes()[0]["feature distance"] - (apart**2).mean()) < 1e-6


def test_the_gradient_of_the_distance_is_the_closed_form() -> None:
    """In float64, through the network: that of <2 λ (g - target) / (B d), g>."""
    client_context = contexts(1, make=lambda n: own(n).double())[0]
    client = FedProtoPublicClient(FedProtoPublicConfig(lam=0.7, feature_dim=5), client_context)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, FEATURES, generator=draw, dtype=torch.float64)
    target = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    value, found = client.gradient(client.distance, x, target)
    g = client.forward(x)
    closed = 2 * 0.7 * (g - target) / target.numel()
    assert abs(float(value) - 0.7 * float((g - target).square().mean())) < 1e-15
    _, through = client.gradient(lambda x: (client.model(x) * closed).sum(), x)
    for k, v in found.items():
        assert (v - through[k]).abs().max() < 1e-15
        assert bool(v.abs().max() > 0) == (not k.startswith("network.head"))


def test_a_transfer_step_leaves_the_last_layer_and_its_moments_alone() -> None:
    t = toy(tau=2, lr=0.02)
    for i in range(3):
        t.party(i).local_train(t=0)  # Adam now has momentum
    before, slots = params(t, 0), {k: v.clone() for k, v in t.party(0).opt.items()}
    mean = combined({i: t.party(i).embed(t=0, i=0) for i in range(3)}).value
    t.party(0).align(t=0, i=0, n=3, mean=mean)
    after = t.party(0).params
    assert all(torch.equal(v, after[k]) == k.startswith("network.head") for k, v in before.items())
    head = sum(v.numel() for k, v in before.items() if k.startswith("network.head"))
    for name in ("mean", "square"):
        assert torch.equal(t.party(0).opt[name][-head:], slots[name][-head:])
        assert not torch.equal(t.party(0).opt[name][:-head], slots[name][:-head])


# -- reductions and degenerate cases ---------------------------------------------------------------


def test_at_ld_0_it_is_local_training_and_nothing_crosses() -> None:
    alone = Toy(LOCAL, client_contexts=contexts(3, make=own), tau=2, batch_size=8).run(3)
    t = toy(tau=2, lam=0.0).run(3)
    for i in range(3):
        assert all(
            torch.equal(t.party(i).params[f"network.{k}"], v)
            for k, v in alone.party(i).params.items()
        )
    assert t.fed.ledger.received("server") == t.fed.ledger.sent("server") == 0


def test_equal_clients_are_already_there() -> None:
    t = toy(make=lambda n: own(0), lam=5.0)
    mean = combined({i: t.party(i).embed(t=0, i=0) for i in range(3)}).value
    client, x = t.party(1), t.client_contexts[1].public.batches(0, 1, 8)[0]
    value, gradient = client.gradient(client.distance, x, mean)
    assert float(value) < 1e-12 and max(float(g.abs().max()) for g in gradient.values()) < 1e-6


def test_features_come_together() -> None:
    def last(lam: float) -> float:
        t = toy(4, lam=lam, lr=0.01, batch_size=16).run(25)
        return sum(n["feature distance"] for n in t.engine.notes().values())

    assert last(1.0) < 0.25 * last(1e-6)


def test_a_network_without_a_body_shows_its_features_and_learns_alone() -> None:
    def make(n: int) -> Classifier:
        with torch.random.fork_rng():
            torch.manual_seed(n)
            return Classifier(nn.Flatten(), FEATURES, CLASSES) if n == 2 else own(n, width=FEATURES)

    t = toy(make=make, tau=2).run(2)
    alone = Toy(LOCAL, client_contexts=contexts(3, make=make), tau=2, batch_size=8).run(2)
    assert all(
        torch.equal(t.party(2).params[f"network.{k}"], v) for k, v in alone.party(2).params.items()
    )
    assert not torch.equal(
        t.party(0).params["network.body.0.weight"], alone.party(0).params["body.0.weight"]
    )
    assert set(t.engine.notes()[2]) == {"feature distance"}


# -- widths ----------------------------------------------------------------------------------------


def wide(n: int) -> Classifier:
    return own(n, width=WIDTH + n)


def a_run(pool: list[str], **more: Any) -> RunConfig:
    data: Any = {"name": "digits", "clients": 4, "public_rows": 40, "test_rows": 50}
    return RunConfig(
        **{"method": "fedproto-public", "rounds": 1, "data": data, "models": {"pool": pool}, **more}
    )


def test_networks_whose_features_differ_in_width_are_refused_before_any_work() -> None:
    pool = ["mlp", "mlp-large"]
    with pytest.raises(ConfigError) as error:
        build(a_run(pool))
    text = str(error.value)
    assert text.startswith("models.pool: fedproto-public needs features of one dimension, but mlp")
    assert text.endswith(
        "use networks whose last layers have inputs of one width, or set params.feature_dim to "
        "one width for all"
    )
    with pytest.raises(ConfigError, match=r"inputs of one width$"):  # fedproto has no adaptor
        build(a_run(pool, method="fedproto"))
    build(a_run(pool, params={"feature_dim": 6}))
    small = build(a_run(["mlp"]))
    assert (
        isinstance(small.server, FedProtoPublicServer)
        and small.server.width == small.clients[0]().net.module.width
    )


def test_one_reply_of_another_width_is_a_failure_and_the_others_continue() -> None:
    client_contexts = contexts(3, make=own)
    t = toy(client_contexts=client_contexts)
    liar = t.party(1)
    object.__setattr__(liar, "embed", lambda *, t, i: torch.zeros(8, WIDTH + 1))
    t.run(2)
    assert {(f.party, f.reason) for f in t.fed.failures} == {("client-1", "wrong shape")}
    honest = toy(client_contexts=client_contexts).run(2, present=[0, 2]).tensors()
    after = t.tensors()
    assert all(torch.equal(v, after[k]) for k, v in honest.items() if not k.startswith("1."))


def test_an_adaptor_makes_them_one_width() -> None:
    t = toy(make=wide, feature_dim=6).run(2)
    assert not t.fed.failures
    for i in range(3):
        shapes = {k: tuple(v.shape) for k, v in t.party(i).params.items()}
        assert shapes["adaptor.weight"] == (6, WIDTH + i) and shapes["network.head.weight"] == (
            CLASSES,
            6,
        )
    weights = [params(toy(make=common, feature_dim=6), i)["adaptor.weight"] for i in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], params(toy(make=common, feature_dim=6), 0)["adaptor.weight"])


def test_a_head_without_a_bias_is_replaced_by_one_without() -> None:
    network = common()
    network.head = nn.Linear(8, CLASSES, bias=False)
    names = dict(AdaptedFeatures(network, 3).named_parameters())
    assert names["network.head.weight"].shape == (CLASSES, 3) and "network.head.bias" not in names


def test_a_network_without_features_is_refused() -> None:
    with pytest.raises(ModelError, match="no method `features`"):
        toy(make=lambda n: nn.Linear(FEATURES, CLASSES))


# -- bytes, who sees what, evaluation --------------------------------------------------------------


@pytest.mark.parametrize(("feature_dim", "width"), [(None, WIDTH), (6, 6)])
def test_bytes_are_those_of_the_features(feature_dim: int | None, width: int) -> None:
    t = toy(4, tau=3, feature_dim=feature_dim).run(5)
    assert (
        t.fed.ledger.received("server") == t.fed.ledger.sent("server") == 5 * 4 * 3 * width * 8 * 4
    )
    assert {e.what for e in t.fed.ledger if e.receiver == "server"} == {
        f"float32[8,{width}]",
        "none",
    }


def test_the_own_classifier_answers() -> None:
    t = toy(feature_dim=6).run(2)
    x = t.client_contexts[0].tests["test"].every
    module = AdaptedFeatures(t.client_contexts[0].build(), 6)
    module.load_state_dict(t.party(0).params)
    assert torch.equal(t.party(0).infer(x), module.network.head(module(x)))
    (found,) = t.engine.call([0], "predictions", {"on": "test"}, None, None)
    assert torch.equal(found["predicted"], module.network.head(module(x)).argmax(-1))


def test_tau_is_fedmd_s_and_settings_out_of_range_are_refused() -> None:
    assert PROTO.configure().tau == 1 and PROTO.needs == ("public rows", "same feature dim")
    with pytest.raises(ConfigError) as error:
        PROTO.configure(params={"lam": -1, "feature_dim": 0, "coding": "int8"})
    assert all(f"params.{k}" in str(error.value) for k in ("lam", "feature_dim", "coding"))
    assert PROTO.configure(params={"feature_dim": "none"}).feature_dim is None


# -- participation, faults, engines ----------------------------------------------------------------


def test_only_the_sampled_take_part() -> None:
    t = toy(5, clients_per_round=2)
    start = t.tensors()
    after = t.run(1).tensors()
    changed = {k.split(".")[0] for k in start if not torch.equal(start[k], after[k])}
    assert changed == {str(i) for i in t.fed.sample(range(5), 2, 0)}


def test_a_federation_of_one_learns_alone() -> None:
    t = toy(1).run(2)
    alone = Toy(LOCAL, client_contexts=t.client_contexts, tau=1, batch_size=8).run(2)
    assert {f.reason for f in t.fed.failures} == {"fewer than 2 replies"}
    assert all(
        torch.equal(t.party(0).params[f"network.{k}"], v) for k, v in alone.party(0).params.items()
    )


def test_a_nan_client_is_kept_out_of_the_mean() -> None:
    client_contexts = contexts(4, make=own)
    t = toy(client_contexts=client_contexts)
    with torch.no_grad():
        t.party(3).net.flat.fill_(float("nan"))
    t.run(3)
    assert {(f.party, f.reason) for f in t.fed.failures} == {("client-3", "not finite")}
    healthy = {k: v for k, v in t.tensors().items() if not k.startswith("3.")}
    assert equal(toy(client_contexts=client_contexts[:3]).run(3).tensors(), healthy)


@pytest.mark.parametrize("size", [1e25, 3e38])
@pytest.mark.parametrize("liars", [1, 2])
def test_huge_features_neither_end_the_run_nor_freeze_the_others(
    liars: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FedProtoPublicClient.embed

    def embed(self: FedProtoPublicClient, *, t: int, i: int) -> Tensor:
        answer = honest(self, t=t, i=i)
        return torch.full_like(answer, size) if self.context.id < liars and t == 0 else answer

    monkeypatch.setattr(FedProtoPublicClient, "embed", embed)
    t = toy(4).run(1)
    before = t.tensors()
    after = t.run(10, start=1).tensors()
    assert not t.fed.failures
    assert all(torch.isfinite(v).all() for v in after.values())
    for i in range(4):
        assert torch.isfinite(t.party(i).opt["square"]).all()
    assert all((v - before[k]).abs().max() > 1e-4 for k, v in after.items() if k[1:2] == ".")


def test_what_is_far_beyond_any_network_s_features_is_believed_up_to_a_bound() -> None:
    server, f = toy().server, torch.tensor([[3.0, -3e38]])
    assert isinstance(server, FedProtoPublicServer)
    assert combined({0: f, 1: f}, read=server.read).value.tolist() == [[3.0, -LARGEST]]


def test_faults_are_counted_and_poison_nothing() -> None:
    t = toy(6, faults=Faults(nan=0.15, inf=0.1, shape=0.15, type=0.1, dropout=0.1, late=0.1)).run(5)
    reasons = {f.reason for f in t.fed.failures}
    assert reasons >= {"not finite", "wrong shape", "not a message", "dropped out", "late"}
    assert all(torch.isfinite(v).all() for v in t.tensors().values())


def test_a_reply_of_another_width_than_the_adaptor_s_is_dropped() -> None:
    t = toy(feature_dim=6)
    liar = t.party(1)
    object.__setattr__(liar, "embed", lambda *, t, i: torch.zeros(8, 7))
    t.run(1)
    assert {(f.party, f.reason) for f in t.fed.failures} == {("client-1", "wrong shape")}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("feature_dim", [None, 6])
def test_engines_agree_to_the_bit(feature_dim: int | None, norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: own(n, norm=norm))
    loop, strict = (
        toy(client_contexts=client_contexts, tau=2, feature_dim=feature_dim, isolated=i).run(3)
        for i in (False, True)
    )
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()
    assert loop.engine.notes() == strict.engine.notes()
