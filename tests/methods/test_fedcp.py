"""FedCP's page against its equations, written by hand in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import ModelError
from fedloom.core.faults import Faults
from fedloom.core.rng import stream
from fedloom.methods.meta import fedcp
from tests.toy import CLASSES, FEATURES, Toy, common, equal

FEDCP = methods.find("fedcp")
WIDTH = 8
BODY, HEAD = FEATURES * WIDTH + WIDTH, WIDTH * CLASSES + CLASSES
POLICY = WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * 2 * WIDTH


class ByHand(nn.Module):
    """A client: extractor, both heads, policy network, as the paper draws them."""

    def __init__(self, weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        super().__init__()
        whole: Any = common()
        self.body: Any
        self.head: Any
        self.head_g: Any
        self.body, self.head, self.head_g = whole.body, whole.head, copy.deepcopy(whole.head)
        self.policy = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.ReLU())
        self.body.load_state_dict(
            {k[len("network.body.") :]: p for k, p in weights.items() if "body" in k}
        )
        self.head_g.load_state_dict({k.split(".")[1]: p for k, p in weights.items() if "head" in k})
        self.head.load_state_dict(own or self.head_g.state_dict())
        linear, norm = self.policy[0], self.policy[1]
        linear.load_state_dict(
            {k.split(".")[1]: p for k, p in weights.items() if k.startswith("policy")}
        )
        norm.load_state_dict(
            {k.split(".")[1]: p for k, p in weights.items() if k.startswith("norm")}
        )

    def context(self) -> Tensor:
        v = self.head.weight.detach().sum(0)
        return v / v.norm()

    def forward(self, h: Tensor, v: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        a, b = (self.policy(h * v).view(len(h), 2, WIDTH) + noise).unbind(1)
        pi = a.exp() / (a.exp() + b.exp())
        frozen = F.linear((1 - pi) * h, self.head_g.weight.detach(), self.head_g.bias.detach())
        out: Tensor = self.head(pi * h) + frozen
        return out

    def shared(self) -> dict[str, Tensor]:
        state = {f"network.body.{k}": p for k, p in self.body.state_dict().items()}
        for k, p in self.head.state_dict().items():
            state[f"global_head.{k}"] = (p + self.head_g.state_dict()[k]) / 2
        for i, name in enumerate(("policy", "norm")):
            state.update({f"{name}.{k}": p for k, p in self.policy[i].state_dict().items()})
        return {k: p.clone() for k, p in state.items()}


def mmd(x: Tensor, y: Tensor) -> Tensor:
    def k(a: Tensor, b: Tensor) -> Tensor:
        far = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        return torch.stack([torch.exp(-far / 2 / s) for s in (10, 15, 20, 50)]).sum(0).mean()

    if torch.equal(x, y):  # where cdist has no gradient; that of MMD is 0
        return 0 * x.sum()
    return k(x, x) + k(y, y) - 2 * k(x, y)


def trained(client: ByHand, client_context: ClientContext, t: int, epochs: int, lam: float) -> None:
    """One client's round."""
    rng = stream(client_context.seed, "gumbel", client_context.id, t)
    batches = [
        b
        for n in range(t * epochs, (t + 1) * epochs)
        for b in client_context.epochs(n, epochs=1, size=10)
    ]
    before, v = copy.deepcopy(client.body), client.context()
    moving = [p for k, p in client.named_parameters() if not k.startswith("head_g")]
    optimizer = torch.optim.SGD(moving, lr=0.05)
    for x, y in batches:
        noise = torch.from_numpy(rng.gumbel(size=(10, 2, WIDTH))).float()
        h = client.body(x)
        with torch.no_grad():
            h_g = before(x)
        loss = F.cross_entropy(client(h, v, noise), y) + lam * mmd(h, h_g)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def toy(n: int = 3, **settings: Any) -> Toy:
    return Toy(FEDCP, n, **{"lr": 0.05, "epochs": 2, **settings})


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=atol) for k in a)


@pytest.mark.parametrize("lam", [0.0, 5.0])
def test_two_rounds_are_those_written_by_hand(lam: float) -> None:
    t = toy(lam=lam)
    assert t.server is not None
    weights = dict(t.server.weights)
    own: list[dict[str, Tensor]] = [{} for _ in t.client_contexts]
    for number in range(2):
        sent = []
        for i, client_context in enumerate(t.client_contexts):
            client = ByHand(weights, own[i])
            trained(client, client_context, number, 2, lam)
            sent.append(client.shared())
            own[i] = copy.deepcopy(client.head.state_dict())
        counts = [len(p.rows) for p in t.client_contexts]
        pairs = [list(zip(counts, (s[k] for s in sent), strict=True)) for k in weights]
        weights = {
            k: sum(n * p for n, p in each) / sum(counts)
            for k, each in zip(weights, pairs, strict=True)
        }
        t.run(1, start=number)
        assert close(t.server.weights, weights)
        for i, head in enumerate(own):
            assert torch.allclose(
                t.party(i).params["network.head.weight"], head["weight"], atol=1e-6
            )
    assert not torch.allclose(own[0]["weight"], own[1]["weight"], atol=1e-3)


def test_a_term_of_the_loss_more_gives_another_result() -> None:
    weights = [toy(lam=lam).run(1).server.weights["network.body.0.weight"] for lam in (0.0, 5.0)]
    assert not torch.allclose(weights[0], weights[1], atol=1e-4)


def test_the_global_head_of_a_client_stays_as_it_came() -> None:
    t = toy(momentum=0.9)
    assert t.server is not None
    first = {k: v.clone() for k, v in t.server.weights.items()}
    t.run(1)
    for i in range(3):
        for name in ("weight", "bias"):
            assert torch.equal(
                t.party(i).params[f"global_head.{name}"], first[f"global_head.{name}"]
            )
            assert not torch.equal(
                t.party(i).params[f"network.head.{name}"], first[f"global_head.{name}"]
            )


def test_the_pure_functions() -> None:
    torch.manual_seed(0)
    w = {k: p.detach().double() for k, p in fedcp.ConditionalNetwork(common()).named_parameters()}
    h, v = torch.randn(7, WIDTH, dtype=torch.float64), fedcp.context(w)
    assert torch.allclose(v.norm(), torch.ones(1, dtype=torch.float64))
    noise = torch.full((7, 2, WIDTH), 3.0, dtype=torch.float64)
    pi = fedcp.policy(w, h, v, 1.0, None)
    assert torch.allclose(pi, fedcp.policy(w, h, v, 1.0, noise))  # noise that both have is none
    assert ((pi > 0) & (pi < 1)).all()
    sharp = fedcp.policy(w, h, v, 1e-6, None)
    assert ((sharp < 1e-3) | (sharp > 1 - 1e-3) | (sharp == 0.5)).all()
    zero = {
        **w,
        "policy.weight": 0 * w["policy.weight"],
        "norm.weight": 0 * w["norm.weight"],
        "norm.bias": 0 * v.repeat(2),
    }
    # π = 1/2, and both heads are alike
    both = (F.linear(h / 2, w["network.head.weight"]) + w["network.head.bias"]) * 2
    assert torch.allclose(fedcp.logits(zero, h, v, 1.0), both)
    same = torch.full((7,), 1 / 7, dtype=torch.float64)
    assert torch.allclose(fedcp.mmd(h, h + 1, same), mmd(h, h + 1))
    assert abs(float(fedcp.mmd(h, h, same))) < 1e-12
    filled = torch.cat([h, h[:1]])
    none = torch.cat([same, same.new_zeros(1)])
    assert torch.allclose(fedcp.mmd(filled, filled + 1, none), mmd(h, h + 1))


def test_gradients_of_the_loss() -> None:
    torch.manual_seed(1)
    w = {k: p.detach().double() for k, p in fedcp.ConditionalNetwork(common()).named_parameters()}
    names = [k for k in w if not k.startswith(("global", "network.body"))]
    h, before, v = torch.randn(5, WIDTH).double(), torch.randn(5, WIDTH).double(), fedcp.context(w)
    same, y = torch.full((5,), 0.2, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])

    def loss(h: Tensor, *values: Tensor) -> Tensor:
        out = fedcp.logits({**w, **dict(zip(names, values, strict=True))}, h, v, 0.7)
        return F.cross_entropy(out, y) + 2 * fedcp.mmd(h, before, same)

    assert torch.autograd.gradcheck(
        loss, [x.clone().requires_grad_() for x in (h, *(w[k] for k in names))]
    )


def test_a_round_costs_extractor_head_and_policy_both_ways() -> None:
    t = Toy(FEDCP, 5, clients_per_round=3).run(2)
    size = 4 * (BODY + HEAD + POLICY)
    assert t.fed.ledger.sent("server") == 2 * 3 * size
    assert t.fed.ledger.received("server") == 2 * 3 * (size + 8)


def test_who_fails_is_left_out() -> None:
    t = toy(6, faults=Faults(nan=0.3, dropout=0.2)).run(3)
    assert t.server is not None and t.fed.failures
    assert all(torch.isfinite(p).all() for p in t.server.weights.values())


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
def test_an_unseen_client_takes_the_global_head_and_adapts_without_noise(batched: bool) -> None:
    t = toy(4, alpha=0.1, batched=batched).run(2, present=[0, 1])
    assert t.server is not None
    before, client_context = t.tensors(), t.client_contexts[3]
    x, y, _ = client_context.support
    for eval_mode, steps in {"0 steps": 0, "1 step": 1, "5 steps": 5}.items():
        client = ByHand(t.server.weights, {})
        v, h_g = client.context(), client.body(x).detach()
        for _ in range(steps):
            client.zero_grad()
            h = client.body(x)
            (F.cross_entropy(client(h, v), y) + 5.0 * mmd(h, h_g)).backward()
            with torch.no_grad():
                for p in client.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
        test = client_context.tests["test"]
        expected = client(client.body(test.every), client.context())
        words = {"on": "test", "eval_mode": eval_mode, "broadcast": t.server.broadcast()}
        found = t.engine.call(t.engine.ids, "predictions", words, None, None)
        assert torch.allclose(found[3]["loss"], F.cross_entropy(expected, test.labels), atol=1e-5)
        assert not torch.allclose(found[0]["loss"], found[3]["loss"])
    assert equal(t.tensors(), before)


def test_everybody_is_evaluated_with_today_s_parts_and_its_own_head() -> None:
    t = toy().run(1)
    assert t.server is not None
    party, test = t.party(0), t.client_contexts[0].tests["test"]
    client = ByHand(
        t.server.weights, {k: party.params[f"network.head.{k}"] for k in ("weight", "bias")}
    )
    expected = client(client.body(test.every), client.context())
    (found,) = t.engine.call(
        [0],
        "predictions",
        {"on": "test", "eval_mode": "", "broadcast": t.server.broadcast()},
        None,
        None,
    )
    assert torch.allclose(found["loss"], F.cross_entropy(expected, test.labels), atol=1e-6)


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match="linear layer `head`"):
        Toy(FEDCP, make=lambda i: nn.Linear(FEATURES, CLASSES))
