"""AugFL's page against its paper: closed forms in float64, the algorithm box by hand, and what may
not cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import ConfigError, ModelError
from fedloom.core.evaluation import predictions
from fedloom.core.faults import Faults
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.core.page import epoch_plan, sample_plan
from fedloom.core.party import Party
from fedloom.methods import steps
from fedloom.methods.meta import augfl, crd
from fedloom.methods.meta import steps as meta_steps
from fedloom.methods.meta.steps import hvp_by_difference, meta_gradient
from tests.toy import CLASSES, FEATURES, Toy, common, contexts, equal, rows

AUGFL, KD_ONLY, CE_ONLY, LOCAL_ONLY = (
    methods.find(n) for n in ("augfl", "kd-only", "server-ce-only", "local-only")
)
MODEL = 4 * sum(p.numel() for p in common().parameters())

# -- quadratic problems: everything has a closed form ----------------------------------------------

D, N = 5, 4


class Linear(nn.Module):
    """One number from d, in the two parts that the server needs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(D, 1, bias=False, dtype=torch.float64)
        self.head.weight = nn.Parameter(weight.clone()[None])

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def squares(party: Party[Any], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The loss of least squares: L is quadratic, ∇²L = A = mean x xᵀ, ∇L = A θ - b."""
    return (0.5 * (party.model(x)[:, 0] - y).square() * weight.double()).sum()


class Squares(augfl.AugFLClient):  # type: ignore[misc]
    """A client with that loss in place of cross-entropy."""

    def update(self, **arguments: Any) -> dict[str, Tree]:
        with mock.patch.object(meta_steps, "weighted_loss", squares):
            return super().update(**arguments)


def doubles(n: int, seed: int, scale: float = 1.0) -> Rows:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(scale * rng.normal(size=(n, D)))
    y = torch.from_numpy(rng.integers(-3, 4, size=n))
    return Rows(
        x,
        y,
        torch.arange(n),
        torch.zeros(1, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    )


START = torch.linspace(-1, 1, D, dtype=torch.float64)
KNOWN = torch.linspace(2, 0, D, dtype=torch.float64)
QUADRATIC: Method = replace(AUGFL, client=Squares)


def quadratic(
    count: Callable[[int], int] = lambda i: 12 + 4 * i, scale: float = 1.0, **params: Any
) -> Toy:
    client_contexts = contexts(
        N, make=lambda _: Linear(START), data=lambda i: doubles(count(i), i, scale)
    )
    server_side = {"data": doubles(6, 50), "pretrained": lambda: Linear(KNOWN)}
    return Toy(
        QUADRATIC,
        client_contexts=client_contexts,
        server_side=server_side,
        **{"alpha": 0.1, "crd": 0.0, "server_batch_size": 3, **params},
    )


def halves(client_context: ClientContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and b of the support, and of the query half."""
    found = []
    for x, y, _ in (client_context.support, client_context.query):
        found += [x.T @ x / len(x), x.T @ y.double() / len(x)]
    return tuple(found)  # type: ignore[return-value]


def meta(client_context: ClientContext, theta: Tensor, alpha: float) -> Tensor:
    """The gradient of L(θ - α ∇L(θ, D^s), D^q)."""
    a_s, b_s, a_q, b_q = halves(client_context)
    phi = theta - alpha * (a_s @ theta - b_s)
    return (torch.eye(D, dtype=torch.float64) - alpha * a_s) @ (a_q @ phi - b_q)


def shares(toy: Toy) -> list[float]:
    counts = [len(client_context.rows) for client_context in toy.client_contexts]
    return [c / sum(counts) for c in counts]


def theta_of(toy: Toy) -> Tensor:
    server: Any = toy.server
    return server.theta["head.weight"][0].clone()


def solution(toy: Toy, lam: float, alpha: float) -> Tensor:
    """Where the gradient of (2) with |θ - θ_p|² is 0."""
    one = torch.eye(D, dtype=torch.float64)
    h, g = 2 * lam * one, 2 * lam * KNOWN
    for w, client_context in zip(shares(toy), toy.client_contexts, strict=True):
        a_s, b_s, a_q, b_q = halves(client_context)
        left = one - alpha * a_s
        h = h + w * left @ a_q @ left
        g = g + w * left @ (b_q - alpha * a_q @ b_s)
    return torch.linalg.solve(h, g)


@pytest.mark.parametrize("hvp", ["exact", "fd", "fd_normalized"])
def test_a_quadratic_problem_is_solved_exactly_and_differences_are_exact_on_it(hvp: str) -> None:
    toy = quadratic(hvp=hvp, lam=0.05, l2=1.0, meta_lr=0.3).run(600)
    want = solution(toy, 0.05, 0.1)
    assert float((theta_of(toy) - want).norm() / want.norm()) < (1e-11 if hvp == "exact" else 1e-8)
    duals = torch.stack([toy.party(i).dual["head.weight"][0] for i in range(N)])
    slope = 0.05 * 2 * (theta_of(toy) - KNOWN)
    assert torch.allclose(duals.sum(0), slope, atol=1e-9, rtol=0)  # KKT: Σ y_i = λ ∇R_h


def test_the_dual_is_minus_the_weighted_meta_gradient_whatever_it_was_before() -> None:
    toy = quadratic(lam=0.0, rho=0.7, meta_lr=None)
    for i in range(N):
        toy.party(i).dual = {"head.weight": torch.full((1, D), 3.0 * i, dtype=torch.float64)}
    before = theta_of(toy)
    toy.run(1)
    for i, (w, client_context) in enumerate(zip(shares(toy), toy.client_contexts, strict=True)):
        assert torch.allclose(
            toy.party(i).dual["head.weight"][0],
            -w * meta(client_context, before, 0.1),
            atol=1e-14,
            rtol=0,
        )


@pytest.mark.parametrize("params", [{"rho": 0.7, "meta_lr": None}, {"meta_lr": 0.2}])
def test_rounds_are_optimistic_gradient_descent(params: dict[str, Any]) -> None:
    toy = quadratic(lam=0.3, l2=1.0, **params)
    rate = 1 / (N * 0.7) if "rho" in params else 0.2
    theta, last = theta_of(toy), torch.zeros(D, dtype=torch.float64)
    for t in range(6):
        now: Any = sum(
            w * meta(p, theta, 0.1) for w, p in zip(shares(toy), toy.client_contexts, strict=True)
        )
        theta, last = theta - rate * (2 * now - last + 0.3 * 2 * (theta - KNOWN)), now
        toy.run(1, start=t)
        assert torch.allclose(theta_of(toy), theta, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("times", "converges"), [(0.64, True), (0.69, False)])
def test_it_is_stable_below_two_thirds_of_the_inverse_curvature(
    times: float, converges: bool
) -> None:
    """Optimistic descent on a quadratic needs rate * L_F < 2/3, L_F the largest curvature."""
    toy = quadratic(alpha=0.0, lam=0.0)
    a = sum(w * halves(p)[2] for w, p in zip(shares(toy), toy.client_contexts, strict=True))
    rate = times / float(torch.linalg.eigvalsh(a)[-1])
    toy = quadratic(alpha=0.0, lam=0.0, meta_lr=rate)
    want = solution(toy, 0.0, 0.0)
    first = float((theta_of(toy) - want).norm())
    left = float((theta_of(toy.run(400)) - want).norm())
    assert left < 0.5 * first if converges else left > 100 * first


def test_alpha_0_is_optimistic_gradient_descent_on_the_query_halves() -> None:
    toy = quadratic(alpha=0.0, lam=0.0, meta_lr=0.1)
    before = theta_of(toy)
    slope = sum(
        w * (halves(p)[2] @ before - halves(p)[3])
        for w, p in zip(shares(toy), toy.client_contexts, strict=True)
    )
    assert torch.allclose(theta_of(toy.run(1)), before - 0.1 * 2 * slope, atol=1e-14, rtol=0)


def test_absent_clients_count_with_the_duals_that_the_server_knows() -> None:
    toy = quadratic(lam=0.2, l2=1.0, meta_lr=0.05, clients_per_round=2)
    server: Any = toy.server
    theta, duals = theta_of(toy), torch.zeros(N, D, dtype=torch.float64)
    rho = 1 / (N * 0.05)
    for t in range(7):
        there = toy.fed.sample(range(N), 2, t)
        sums = torch.zeros(D, dtype=torch.float64)
        for i in range(N):
            if i in there:
                new = -shares(toy)[i] * meta(toy.client_contexts[i], theta, 0.1)
                sums, duals[i] = sums + 2 * new - duals[i] + rho * theta, new
            else:
                sums = sums + duals[i] + rho * theta
        theta = (sums - 0.2 * 2 * (theta - KNOWN)) / (N * rho)
        toy.run(1, start=t)
        assert torch.allclose(theta_of(toy), theta, atol=1e-12, rtol=0)
        for i in there:
            assert torch.allclose(
                server.duals[str(i)]["head.weight"][0], duals[i], atol=1e-12, rtol=0
            )
    assert torch.allclose(
        theta_of(toy.run(800, start=7)), solution(toy, 0.2, 0.1), atol=1e-8, rtol=0
    )


class Gone(Faults):
    """Client 2 is not there in round 1."""

    def draw(self, seed: int, round: int, call: int, party: int) -> str | None:
        return "dropout" if (round, party) == (1, 2) else None


def test_a_client_that_fails_is_left_out_and_the_pull_of_r_h_stays() -> None:
    toy = quadratic(lam=0.3, l2=1.0, meta_lr=0.1).run(1)
    theta, before = theta_of(toy), [toy.party(i).dual["head.weight"][0].clone() for i in range(N)]
    lost = quadratic(lam=0.3, l2=1.0, meta_lr=0.1, faults=Gone(dropout=0.5)).run(2)
    there, rho = [0, 1, 3], 1 / (N * 0.1)
    new = {i: -shares(toy)[i] * meta(toy.client_contexts[i], theta, 0.1) for i in there}
    step = sum(2 * new[i] - before[i] for i in there) / (3 * rho) - 0.1 * 0.3 * 2 * (theta - KNOWN)
    assert torch.allclose(theta_of(lost), theta + step, atol=1e-13, rtol=0)
    assert [(f.round, f.party) for f in lost.fed.failures] == [(1, "client-2")]


# -- networks: the algorithm box, by hand ----------------------------------------------------------

TEACHER = partial(common, 0, width=12)


def bent(_: int = 0) -> nn.Module:
    """The common network with a smooth activation, on which differences of gradients mean
    something.
    """
    module: Any = common()
    module.body[1] = nn.ELU()
    return module


def helped(method: Method = AUGFL, **params: Any) -> Toy:
    server_side = {"data": rows(40, 5), "pretrained": TEACHER}
    return Toy(
        method,
        server_side=server_side,
        **{"server_batch_size": 16, "crd_negatives": 64, "crd_dim": 6, **params},
    )


def loss(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.func.functional_call(module, dict(weights), (x,)), y)


def slope_of(
    module: nn.Module, weights: Mapping[str, Tensor], client_context: ClientContext, alpha: float
) -> dict[str, Tensor]:
    """The meta-gradient, by differentiating through the step."""
    theta = {k: w.detach().clone().requires_grad_() for k, w in weights.items()}
    (xs, ys, _), (xq, yq, _) = client_context.support, client_context.query
    inner = torch.autograd.grad(
        loss(module, theta, xs, ys), list(theta.values()), create_graph=True
    )
    phi = {k: w - alpha * g for (k, w), g in zip(theta.items(), inner, strict=True)}
    found = torch.autograd.grad(loss(module, phi, xq, yq), list(theta.values()))
    return dict(zip(theta, found, strict=True))


def by_hand(
    client_contexts: list[ClientContext], rounds: int, alpha: float, rho: float
) -> dict[str, Tensor]:
    """Algorithm 1 without R_h: θ, θ_i and y_i one by one."""
    module, count = common(), sum(len(p.rows) for p in client_contexts)
    theta = {k: p.detach().clone() for k, p in module.named_parameters()}
    y = [{k: torch.zeros_like(w) for k, w in theta.items()} for _ in client_contexts]
    for _ in range(rounds):
        local = []
        for i, client_context in enumerate(client_contexts):
            w = len(client_context.rows) / count
            slope = slope_of(module, theta, client_context, alpha)
            local.append({k: theta[k] - (y[i][k] + w * slope[k]) / rho for k in theta})
            y[i] = {k: y[i][k] + rho * (local[i][k] - theta[k]) for k in theta}
        theta = {
            k: sum(y[i][k] + rho * local[i][k] for i in range(len(client_contexts)))
            / (len(client_contexts) * rho)  # type: ignore[misc]
            for k in theta
        }
    return theta


def test_three_rounds_equal_the_algorithm_box_written_out() -> None:
    toy = Toy(AUGFL, lam=0.0, alpha=0.05, rho=0.5, meta_lr=None).run(3)
    want, server = by_hand(toy.client_contexts, 3, 0.05, 0.5), toy.server
    assert isinstance(server, augfl.AugFLServer)
    assert all(torch.allclose(server.theta[k], want[k], atol=2e-6, rtol=0) for k in want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_the_hessian_vector_product_is_exact_to_float_precision() -> None:
    client_context = contexts(1, make=bent)[0]
    party = augfl.AugFLClient(AUGFL.configure(params={"lam": 0}), client_context)
    double = bent().double()
    weights = {k: p.detach() for k, p in double.named_parameters()}
    rng = np.random.default_rng(3)
    v = {k: torch.from_numpy(rng.normal(size=w.shape)) for k, w in weights.items()}
    x, y, _ = client_context.support

    def of(w: dict[str, Tensor]) -> Tensor:
        return loss(double, w, x.double(), y)

    want: Any = torch.func.jvp(torch.func.grad(of), (weights,), (v,))[1]  # forward over reverse
    at = {k: w.float() for k, w in weights.items()}
    value, gradient, product = party.curvature_at(
        at, partial(steps.weighted_loss, party), *client_context.support
    )
    found = product({k: x.float() for k, x in v.items()})
    length = torch.cat([w.flatten() for w in want.values()]).norm()
    off = torch.cat([(found[k].double() - want[k]).flatten() for k in want]).norm()
    assert float(off / length) < 1e-5
    assert torch.allclose(value.double(), loss(double, weights, x.double(), y), atol=1e-6)
    again = party.gradient_at(at, partial(steps.weighted_loss, party), *client_context.support)[1]
    assert all(torch.equal(gradient[k], again[k]) for k in gradient)
    apart = hvp_by_difference(party, at, {k: x.float() for k, x in v.items()}, 1e-2, unit=False)
    off = torch.cat([(apart[k].double() - want[k]).flatten() for k in want]).norm()
    assert 1e-9 < float(off / length) < 1e-2


def test_first_order_leaves_the_hessian_out() -> None:
    client_context = contexts(1, make=common)[0]
    party = augfl.AugFLClient(AUGFL.configure(params={"lam": 0}), client_context)
    weights, module = dict(party.params), common()
    found = meta_gradient(party, weights, "first_order", 0.0)
    (xs, ys, _), (xq, yq, _) = client_context.support, client_context.query
    inner = torch.func.grad(lambda w: loss(module, w, xs, ys))(weights)
    phi = {k: w - party.cfg.alpha * inner[k] for k, w in weights.items()}
    want = torch.func.grad(lambda w: loss(module, w, xq, yq))(phi)
    assert all(torch.allclose(found[k], want[k], atol=1e-6) for k in want)


def test_where_the_gradient_is_0_a_difference_along_its_direction_is_too() -> None:
    client_context = contexts(1, make=common)[0]
    party = augfl.AugFLClient(AUGFL.configure(params={"lam": 0}), client_context)
    nothing = {k: torch.zeros_like(w) for k, w in party.params.items()}
    found = hvp_by_difference(party, dict(party.params), nothing, 1e-2, unit=True)
    assert not any(x.any() for x in found.values())


def test_support_and_query_share_no_row_and_leave_none_out() -> None:
    for client_context in contexts(5):
        support, query = client_context.half("support"), client_context.half("query")
        assert sorted([*support.tolist(), *query.tolist()]) == list(range(len(client_context.rows)))
        assert len(support) - len(query) in (0, 1)


# -- what crosses ----------------------------------------------------------------------------------


def test_nothing_of_the_pretrained_model_crosses_but_the_meta_model() -> None:
    toy = helped().run(2)
    kinds = {(e.sender, e.receiver, e.kind) for e in toy.fed.ledger}
    assert {kind for _, _, kind in kinds} == {"size", "update"}
    form = {k: tuple(p.shape) for k, p in common().named_parameters()}
    for entry in toy.fed.ledger:
        if entry.kind == "update" and entry.sender == "server":
            assert entry.bytes == entry.count * MODEL  # θ, and plain numbers
        elif entry.kind == "update":
            assert entry.bytes == entry.count * MODEL  # u_i: n floats
        else:
            assert entry.bytes in (0, 8 * entry.count)
    seen: list[Any] = []

    class Spy(augfl.AugFLClient):  # type: ignore[misc]
        def update(self, **arguments: Any) -> Any:
            seen.append(arguments)
            return super().update(**arguments)

    helped(replace(AUGFL, client=Spy)).run(2)
    for arguments in seen:
        assert arguments.keys() == {"t", "weights", "rho", "rows"}
        assert {k: tuple(w.shape) for k, w in arguments["weights"].items()} == form
    state = helped().run(1).party(0).state()
    assert set(state) == {"params", "buffers", "opt", "dual"}


def refuse() -> nn.Module:
    raise AssertionError("the pretrained model was read")


@pytest.mark.parametrize(
    ("method", "params"),
    [(AUGFL, {"lam": 0.0}), (LOCAL_ONLY, {}), (CE_ONLY, {}), (AUGFL, {"crd": 0.0, "ce": 1.0})],
)
def test_the_pretrained_model_is_not_read_where_it_does_not_count(
    method: Method, params: dict[str, Any]
) -> None:
    server_side = {"data": rows(40, 5), "pretrained": refuse}
    toy = Toy(method, server_side=server_side, **params).run(2)
    assert toy.server is not None
    toy.engine.call(
        toy.engine.ids,
        "predictions",
        {"on": "test", "eval_mode": "1 step", "broadcast": toy.server.broadcast()},
        None,
        None,
    )
    with pytest.raises(AssertionError, match="was read"):
        Toy(AUGFL, server_side=server_side).run(1)


def test_at_lambda_0_the_server_s_rows_change_nothing() -> None:
    server_side = {"data": rows(40, 5), "pretrained": refuse}
    bare, more = Toy(AUGFL, lam=0.0).run(3), Toy(AUGFL, lam=0.0, server_side=server_side).run(3)
    assert equal(bare.tensors(), more.tensors())


def test_what_is_missing_is_reported_before_work_starts() -> None:
    with pytest.raises(ConfigError, match=r"\[pretrained\]"):
        Toy(AUGFL)
    with pytest.raises(ConfigError, match=r"data\.server_rows"):
        Toy(AUGFL, server_side={"pretrained": refuse})
    with pytest.raises(ConfigError, match="exactly one of"):
        AUGFL.configure(params={"rho": 0.7})
    with pytest.raises(ConfigError, match="weights no term"):
        AUGFL.configure(params={"crd": 0})
    with pytest.raises(ConfigError, match="distinct integers >= 0"):
        AUGFL.configure(params={"adapt_steps": [1, 1]})
    with pytest.raises(ConfigError, match="distinct integers >= 0"):
        AUGFL.configure(params={"adapt_steps": [-1]})
    with pytest.raises(ConfigError, match="needs a pretrained model with the architecture"):
        helped(l2=1.0).run(1)


# -- R_h -------------------------------------------------------------------------------------------


def crd_by_drawing(
    scores: Tensor, which: Tensor, drawn: list[list[int]], negatives: int, each: bool = False
) -> Tensor:
    """The loss as the paper has it, one anchor and stranger after the other; `each`: each so often
    that they are N.
    """
    c, total = negatives / scores.shape[1], torch.zeros(())
    for b, own in enumerate(which.tolist()):
        total = total - torch.log(scores[b, own] / (scores[b, own] + c))
        for j in drawn[b]:
            weight = negatives / len(drawn[b]) if each else 1
            total = total - weight * torch.log(1 - scores[b, j] / (scores[b, j] + c))
    return total / len(which)


def test_the_whole_bank_gives_what_drawing_every_stranger_once_gives() -> None:
    rng = torch.Generator().manual_seed(0)
    scores, y = torch.rand(3, 12, generator=rng) + 0.1, torch.arange(12) % 3
    which = torch.tensor([4, 7, 0])
    negative_rows = y[which][:, None] != y
    found = crd.contrast(scores.log(), which, negative_rows, 8)
    drawn = [torch.nonzero(row)[:, 0].tolist() for row in negative_rows]
    assert torch.allclose(found, crd_by_drawing(scores, which, drawn, 8), atol=1e-5)
    # N draws from 8 negative_rows: each twice
    twice = crd.contrast(scores.log(), which, negative_rows, 16)
    assert torch.allclose(
        twice, crd_by_drawing(scores, which, [2 * d for d in drawn], 16), atol=1e-5
    )


@pytest.mark.parametrize("crd_negatives", [256, 4096])
def test_at_first_each_network_s_loss_is_about_log_n_plus_1(crd_negatives: int) -> None:
    """With Z each e is about 1/n: -log(1 / (1 + N)), and N times log(1 + 1/N)."""
    toy = helped(crd_negatives=crd_negatives, server_batch_size=40, crd_dim=128).run(1)
    assert toy.server is not None
    first = toy.server.take_notes()["transfer crd"]
    assert first == pytest.approx(2 * (np.log(crd_negatives) + 1), rel=0.25)


def test_distillation_brings_the_features_of_a_row_together() -> None:
    toy = helped(KD_ONLY, meta_lr=0.02, crd_negatives=256)
    assert toy.server is not None
    losses = []
    for t in range(60):
        toy.run(1, start=t)
        losses.append(toy.server.take_notes()["transfer crd"])
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:5])


def test_one_step_of_all_terms_equals_the_formulas() -> None:
    """(13) with the gradient of R_h by hand: one batch of all rows."""
    params: dict[str, Any] = {
        "crd": 0.5,
        "kl": 0.3,
        "ce": 0.7,
        "l2": 0.01,
        "lam": 2.0,
        "meta_lr": 0.1,
        "server_batch_size": 40,
    }
    teacher: Any = common(width=8)
    data = rows(40, 5)
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.3)
    toy = Toy(
        KD_ONLY,
        server_side={"data": data, "pretrained": lambda: teacher},
        crd_negatives=64,
        crd_dim=6,
        **params,
    )
    server: Any = toy.server
    start = {k: w.clone() for k, w in server.theta.items()}
    order = sample_plan(server.stream("knowledge transfer", 0), 40, 1, 40)[0]
    toy.run(1)
    module: Any = common()
    x, y = data.x(order), data.y(order)
    theta = dict(module.named_parameters())
    features, logits = module.features(x), module(x)
    with server.seeded("crd"):
        state = crd.init(40, 8, 8, 6)
    maps = state["maps"]
    seen = {
        "student": F.normalize(
            features @ maps["student"]["weight"].T + maps["student"]["bias"], dim=-1
        ),
        "teacher": F.normalize(
            teacher.features(x) @ maps["teacher"]["weight"].T + maps["teacher"]["bias"], dim=-1
        ).detach(),
    }
    negative_rows = y[:, None] != data.y(torch.arange(40))
    total = 0.7 * F.cross_entropy(logits, y)
    soft = F.softmax(teacher(x).detach() / 4, -1)
    total = total + 0.3 * 16 * F.kl_div(F.log_softmax(logits / 4, -1), soft, reduction="batchmean")
    total = total + 0.01 * sum(
        (theta[k] - p.detach()).square().sum() for k, p in teacher.named_parameters()
    )
    for who, other in (("student", "teacher"), ("teacher", "student")):
        e = torch.exp(seen[who] @ state["banks"][other].T / 0.07)
        z = torch.cat([e[negative_rows], e.gather(1, order[:, None])[:, 0]]).mean() * 40
        total = total + 0.5 * crd_by_drawing(
            e / z.detach(),
            order,
            [torch.nonzero(row)[:, 0].tolist() for row in negative_rows],
            64,
            each=True,
        )
    total.backward()
    for k, p in theta.items():
        assert p.grad is not None
        want = start[k] - 0.1 * 2.0 * p.grad
        assert torch.allclose(server.theta[k], want, atol=1e-5, rtol=1e-4), k


@pytest.mark.parametrize(
    "params",
    [
        {"meta_lr": 0.1},
        {"meta_lr": None, "rho": 0.7},
        {"rho": 0.2, "meta_lr": None, "clients_per_round": 2},
    ],
)
def test_a_rate_of_the_transfer_is_lambda_over_the_sum_of_rho(params: dict[str, Any]) -> None:
    total = 1 / 0.1 if params["meta_lr"] else N * params["rho"]
    ours = quadratic(l2=1.0, lam=None, kd_lr=0.04, **params).run(3).server.theta
    same = quadratic(l2=1.0, lam=0.04 * total, **params).run(3).server.theta
    assert all(torch.allclose(ours[k], same[k], atol=1e-12) for k in same)


def test_lambda_and_a_rate_exclude_each_other() -> None:
    for wrong in ({"kd_lr": 0.1}, {"lam": None}):
        with pytest.raises(ConfigError, match="exactly one of params"):
            AUGFL.configure(params=wrong)
    with pytest.raises(ConfigError, match="weights no term"):
        AUGFL.configure(params={"lam": "none", "kd_lr": 0.1, "crd": 0.0})


def test_a_pass_over_all_rows_is_the_mean_of_its_batches() -> None:
    toy = helped(CE_ONLY, server_batches="none", lam=1.0, meta_lr=0.1)
    server: Any = toy.server
    start, data, module = dict(server.theta), rows(40, 5), common()
    start = {k: w.clone() for k, w in start.items()}
    order = epoch_plan(server.stream("knowledge transfer", 0), 40, 1, 16)
    assert order.shape == (3, 16)
    toy.run(1)
    torch.stack([F.cross_entropy(module(data.x(b)), data.y(b)) for b in order]).mean().backward()
    for k, p in module.named_parameters():
        assert p.grad is not None
        assert torch.allclose(server.theta[k], start[k] - 0.1 * p.grad, atol=1e-6)


# -- the rest --------------------------------------------------------------------------------------


def test_batched_clients_give_what_one_after_the_other_gives_with_halves_of_all_lengths() -> None:
    """The filling of shorter halves weighs nothing."""
    for hvp in ("exact", "fd", "first_order"):
        loop, many = helped(hvp=hvp).run(3), helped(hvp=hvp, batched=True).run(3)
        remarks = many.engine.account().remarks
        assert not [r for r in remarks if "in turn" in r], remarks
        a, b = loop.tensors(), many.tensors()
        assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a if a[k].is_floating_point())
        looks = [
            toy.engine.call(
                toy.engine.ids,
                "predictions",
                {"on": "test", "eval_mode": "5 steps", "broadcast": toy.server.broadcast()},
                None,
                None,
            )
            for toy in (loop, many)
        ]
        for one, other in zip(*looks, strict=True):
            assert torch.equal(one["predicted"], other["predicted"])


def test_adaptation_is_full_batch_descent_on_the_support_half_and_leaves_no_trace() -> None:
    toy = Toy(AUGFL, lam=0.0, alpha=0.2).run(2)
    assert toy.server is not None
    before = toy.tensors()
    party, client_context = toy.party(1), toy.client_contexts[1]
    weights, module = {k: w.clone() for k, w in toy.server.theta.items()}, common()
    x, y, _ = client_context.support
    for _ in range(5):
        slope = torch.func.grad(lambda w: loss(module, w, x, y))(weights)
        weights = {k: w - 0.2 * slope[k] for k, w in weights.items()}
    found = predictions(party, on="test", eval_mode="5 steps", broadcast=toy.server.broadcast())
    want = torch.func.functional_call(module, weights, (client_context.tests["test"].every,))
    assert torch.equal(found["predicted"], want.argmax(-1))
    assert equal(before, toy.tensors())


def test_batch_statistics_are_an_option_of_that_name_only() -> None:
    make = partial(common, norm=True)
    sizes = {}
    for policy in ("own", "batch"):
        toy = Toy(AUGFL, lam=0.0, batchnorm=policy, make=make).run(2)
        assert toy.server is not None
        x = toy.client_contexts[0].tests["test"].every
        party = toy.party(0)
        alone, beside = party.infer(x[:2]), party.infer(x[:20])[:2]
        sizes[policy] = float((alone - beside).abs().max())
        kept = {k: b.clone() for k, b in party.buffers.items()}
        party.infer(x)
        assert equal(kept, party.buffers)
    assert sizes["own"] < 1e-5 < 1e-2 < sizes["batch"]


def test_the_presets_are_the_paper_s_and_the_code_s() -> None:
    paper, code = AUGFL.configure("paper"), AUGFL.configure("authors_code")
    assert (paper.alpha, paper.rho, paper.lam, paper.hvp, paper.crd, paper.ce) == (
        0.03,
        0.7,
        5.0,
        "fd",
        1.0,
        0.0,
    )
    assert (code.alpha, code.rho, code.crd, code.ce, code.kl, code.server_batches) == (
        0.05,
        0.7,
        0.8,
        1.0,
        0.0,
        None,
    )
    assert paper.penalty(40) == paper.penalty(80) == 0.7
    assert AUGFL.configure().penalty(40) == pytest.approx(1 / (40 * AUGFL.configure().meta_lr))


@pytest.mark.parametrize("preset", ["paper", "authors_code"])
def test_a_point_stays_what_it_is_in_every_preset(preset: str) -> None:
    assert not LOCAL_ONLY.configure(preset).lam
    assert not CE_ONLY.configure(preset).taught and CE_ONLY.configure(preset).ce == 1.0
    assert not KD_ONLY.configure(preset).federated and KD_ONLY.configure(preset).taught


def test_without_its_server_s_help_any_network_will_do() -> None:
    toy = Toy(AUGFL, lam=0.0, make=lambda _: nn.Sequential(nn.Linear(FEATURES, CLASSES))).run(2)
    assert toy.server is not None and not toy.fed.failures
    with pytest.raises(ModelError, match="features"):
        Toy(
            AUGFL,
            server_side={"data": rows(40, 5), "pretrained": TEACHER},
            make=lambda _: nn.Linear(FEATURES, CLASSES),
        )
    bare = {"data": rows(40, 5), "pretrained": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES))}
    with pytest.raises(ModelError, match="pretrained model with a method `features`"):
        Toy(AUGFL, server_side=bare).run(1)


def test_answers_that_are_not_finite_are_refused_in_words() -> None:
    def broken() -> nn.Module:
        module: Any = TEACHER()
        torch.nn.init.constant_(module.body[0].weight, torch.nan)
        return module

    with pytest.raises(ModelError, match="not finite"):
        Toy(AUGFL, server_side={"data": rows(40, 5), "pretrained": broken}).run(1)


def test_frozen_weights_take_no_part() -> None:
    def frozen(_: int = 0) -> nn.Module:
        module: Any = common()
        module.body[0].weight.requires_grad_(False)
        return module

    toy = helped(make=frozen)
    toy.fed.param_shapes = {
        k: p for k, p in toy.fed.param_shapes.items() if k in toy.party(0).params
    }
    toy.run(2)
    assert not toy.fed.failures and "body.0.weight" not in toy.server.broadcast()


class Unsaid(Faults):
    """Client 1's number of rows is lost in round 0, client 2's answer in round 1 after its work."""

    def draw(self, seed: int, round: int, call: int, party: int) -> str | None:
        if (round, call, party) == (0, 0, 1):
            return "dropout"
        return "late" if (round, call, party) == (1, 1, 2) else None


@pytest.mark.slow
def test_lost_numbers_and_lost_answers_leave_the_rate_right_and_the_end_too() -> None:
    toy = quadratic(lam=0.2, l2=1.0, meta_lr=0.05, clients_per_round=4, faults=Unsaid(late=0.5))
    first = theta_of(toy)
    toy.run(1)
    there = [0, 2, 3]
    count = sum(len(toy.client_contexts[i].rows) for i in there)
    slope = sum(
        len(toy.client_contexts[i].rows) / count * meta(toy.client_contexts[i], first, 0.1)
        for i in there
    )
    assert torch.allclose(
        theta_of(toy), first - 0.05 * (2 * slope + 0.4 * (first - KNOWN)), atol=1e-13, rtol=0
    )
    toy.run(1500, start=1)
    assert len(toy.fed.failures) == 2
    assert torch.allclose(theta_of(toy), solution(toy, 0.2, 0.1), atol=1e-8, rtol=0)


def test_points_without_clients_send_nothing() -> None:
    for method in (KD_ONLY, CE_ONLY, LOCAL_ONLY):
        toy = helped(method)
        before = toy.server.broadcast() if toy.server else {}
        before = {k: w.clone() for k, w in before.items()}
        toy.run(3)
        assert toy.server is not None
        moved = any(not torch.equal(before[k], w) for k, w in toy.server.theta.items())
        assert not list(toy.fed.ledger)
        assert moved is (method is not LOCAL_ONLY)


def test_it_learns_and_the_class_count_is_four() -> None:
    toy = helped(alpha=0.1, meta_lr=0.5, lam=0.2)
    assert toy.server is not None

    def accuracy(eval_mode: str) -> float:
        y = toy.client_contexts[0].tests["test"].y(torch.arange(50))
        replies = toy.engine.call(
            toy.engine.ids,
            "predictions",
            {"on": "test", "eval_mode": eval_mode, "broadcast": toy.server.broadcast()},
            None,
            None,
        )
        return float(np.mean([(r["predicted"] == y).float().mean() for r in replies]))

    before = accuracy("1 step")
    toy.run(60)
    assert CLASSES == 4 and FEATURES == 6
    assert accuracy("1 step") > max(0.6, before + 0.15)
