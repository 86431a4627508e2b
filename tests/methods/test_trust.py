"""Trust-weighted answers: the identity behind them, their limits, messages, engines, liars and
leaks.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError, MethodError
from fedloom.core.faults import Faults
from fedloom.methods.distillation import trust
from fedloom.protect import labels
from tests.toy import CLASSES, FEATURES, Toy, contexts, equal, network

FEDMD, FEDAL, CFD, FEDDF, FEDDF_AL = (
    methods.find(name) for name in ("fedmd", "fedal", "cfd", "feddf", "feddf-al")
)
KINDS = ("confidence", "distance", "select", "kernel")
ROWS = 64  # public rows of the toy federation


def toy(method: Any = FEDMD, n: int = 4, **params: Any) -> Toy:
    """A method with trust on the toy federation, whose server has the public rows."""
    client_contexts = params.pop("client_contexts", None) or contexts(n)
    server_side: dict[str, Any] = {
        "public": client_contexts[0].public,
        "network": lambda: network(7),
    }
    if method in (FEDDF, FEDDF_AL):
        client_contexts = [
            replace(context, group=0, network=lambda: network(0)) for context in client_contexts
        ]
        server_side |= {
            "groups": (0,) * len(client_contexts),
            "group_networks": (lambda: network(0),),
        }
    return Toy(
        method,
        client_contexts=client_contexts,
        server_side=server_side,
        **{"batch_size": 8, "tau": 2, **params},
    )


def server(kind: str, introductions: dict[str, Any], **params: Any) -> Any:
    """What `shares` reads of a server."""
    cfg = FEDMD.configure(params={"trust": kind, **params})
    context = contexts(1)[0]
    return SimpleNamespace(
        cfg=cfg, introductions=introductions, public_set=context.public, context=context
    )


def distances(*values: list[int]) -> dict[str, Any]:
    """Introductions with these coded distances to the first public rows, the rest the farthest."""
    codes = [torch.tensor(v + [15] * (ROWS - len(v)), dtype=torch.uint8) for v in values]
    return {str(n): {"scores": labels.pack(code[:, None], 4)} for n, code in enumerate(codes)}


def weights(at: Any, n: int, rows: list[int], answers: Tensor | None = None) -> Tensor:
    answers = torch.zeros(n, len(rows), CLASSES) if answers is None else answers
    return trust.shares(at, list(range(n)), lambda: torch.tensor(rows), answers)


# -- weights ---------------------------------------------------------------------------------------


def test_weights_by_density_give_the_posterior_of_the_pooled_rows() -> None:
    x = np.linspace(-6, 8, 141)
    sizes = np.array([50, 400, 10])
    centers = np.array([-3.0, 0.5, 4.0])
    spreads = np.array([1.0, 0.7, 1.5])
    density = (
        np.exp(-((x - centers[:, None]) ** 2) / (2 * spreads[:, None] ** 2)) / spreads[:, None]
    )
    slopes = np.array([2.0, -1.0, 0.5])[:, None]
    posterior = 1 / (1 + np.exp(-slopes * (x - centers[:, None])))
    both = torch.from_numpy(np.stack([posterior, 1 - posterior], -1))
    joint = (sizes[:, None] * density * posterior).sum(0) / (sizes[:, None] * density).sum(0)
    shares = torch.from_numpy(sizes[:, None] * density)
    pooled = trust.weighted(both, shares / shares.sum(0))[:, 0].numpy()
    assert np.abs(pooled - joint).max() < 1e-12
    assert np.abs(both.mean(0)[:, 0].numpy() - joint).max() > 0.3  # equal weights are far off


def test_of_two_clients_far_apart_the_one_that_knows_answers_alone() -> None:
    shares = weights(
        server("distance", distances([0, 15], [15, 0]), trust_temperature=1e-3), 2, [0, 1]
    )
    assert shares.tolist() == [[1, 0], [0, 1]]
    answers = torch.randn(2, 2, CLASSES, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trust.weighted(answers, shares), torch.stack([answers[0, 0], answers[1, 1]]))


@pytest.mark.parametrize("cap", [0.26, 0.34, 0.5, 1.0])
def test_weights_sum_to_1_and_none_exceeds_the_cap(cap: float) -> None:
    drawn = torch.rand(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 6
    shares = trust.capped(drawn / drawn.sum(0), cap)
    assert (
        torch.allclose(shares.sum(0), torch.ones(30, dtype=torch.float64))
        and shares.max() <= cap + 1e-12
    )
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(trust.capped((drawn / drawn.sum(0))[order], cap), shares[order])
    if cap == 1:
        assert torch.equal(shares, drawn / drawn.sum(0))


def test_what_a_cap_cuts_goes_to_the_others_in_proportion() -> None:
    shares = trust.capped(torch.tensor([[0.8], [0.15], [0.05]], dtype=torch.float64), 0.5)
    assert torch.allclose(shares[:, 0], torch.tensor([0.5, 0.375, 0.125], dtype=torch.float64))
    alone = trust.capped(torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64), 0.5)
    assert alone[:, 0].tolist() == [0.5, 0.25, 0.25]
    assert trust.capped(torch.tensor([[1.0], [0.0]], dtype=torch.float64), 0.3)[:, 0].tolist() == [
        0.5,
        0.5,
    ]


def test_a_row_that_nobody_selects_is_shared_by_all() -> None:
    passed = [[1, 0, 0], [1, 1, 0]]
    sent = {
        str(n): {
            "scores": labels.pack(torch.tensor(p + [0] * (ROWS - 3), dtype=torch.uint8)[:, None], 1)
        }
        for n, p in enumerate(passed)
    }
    assert weights(server("select", sent), 2, [0, 1, 2]).T.tolist() == [
        [0.5, 0.5],
        [0, 1],
        [0.5, 0.5],
    ]


def test_confident_answers_weigh_more() -> None:
    answers = torch.tensor([[[9.0, 0, 0, 0]], [[0.1, 0, 0, 0]]])
    shares = weights(server("confidence", {}), 2, [0], answers)
    p = F.softmax(answers.double(), -1)
    entropy = -(p * p.log()).sum(-1)
    assert torch.allclose(shares, torch.softmax(-entropy / 0.1, 0)) and shares[0, 0] > 0.99


def test_a_client_without_an_introduction_weighs_as_the_mean_of_the_others() -> None:
    known = distances([0], [15])
    shares = weights(server("distance", known, trust_temperature=2.0), 3, [0])[:, 0]
    assert shares[2] == pytest.approx(float(shares[:2].mean())) and shares[0] > shares[1]
    assert torch.allclose(
        weights(server("distance", {}), 3, [0]), torch.full((3, 1), 1 / 3, dtype=torch.float64)
    )


def test_a_liar_of_the_kernel_gains_nothing_by_size() -> None:
    rng = torch.Generator().manual_seed(0)
    honest = {
        str(n): {"mean": torch.randn(trust.FEATURES, generator=rng) / 23, "rows": torch.tensor(50)}
        for n in range(3)
    }
    claims = {**honest, "3": {"mean": 1e9 * honest["0"]["mean"], "rows": torch.tensor(10**15)}}
    norms = torch.stack([v["mean"].norm() for v in honest.values()])
    fair = {
        **honest,
        "3": {"mean": honest["0"]["mean"] * norms.median() / norms[0], "rows": torch.tensor(200)},
    }
    rows = list(range(20))
    lied, bound = (weights(server("kernel", sent), 4, rows) for sent in (claims, fair))
    # four times the median of rows, the median norm, no more
    assert (lied[3] <= bound[3] * 1.1 + 1e-9).all()


# -- a client's introduction -----------------------------------------------------------------------


def test_distances_are_to_the_nearest_own_rows() -> None:
    x = torch.tensor([[0.0], [10.0]]).double()
    own = torch.tensor([[0.0], [1.0], [3.0], [50.0]]).double()
    assert trust.neighbour_distance(x, own, 3).tolist() == [4 / 3, (7 + 9 + 10) / 3]
    assert trust.neighbour_distance(own, own, 2, itself=True)[0] == 2
    assert trust.neighbour_distance(x, own[:1], 5).tolist() == [0, 10]  # all, if there are fewer
    assert trust.neighbour_distance(own[:1], own[:1], 5, itself=True).tolist() == [0]


def test_clients_are_near_rows_like_their_own() -> None:
    t = toy(trust="distance", trust_bits=None)
    client = t.party(0)
    own, public = client.data.every, client.public_set.rows.every
    sent = client.introduce()["scores"]
    h = (
        torch.cdist(public, public)
        .fill_diagonal_(torch.inf)
        .topk(5, largest=False)
        .values.mean(1)
        .median()
    )
    expected = torch.cdist(public, own).topk(5, largest=False).values.mean(1) / h
    assert torch.allclose(sent, expected, rtol=1e-4)
    coarse = toy(trust="distance").party(0).introduce()["scores"]
    steps = labels.unpack(coarse, 4, ROWS, 1)[:, 0].float() * 4 / 15
    assert (steps - expected.clamp(max=4)).abs().max() <= 2 / 15 + 1e-5


def test_principal_components_of_the_public_rows_are_a_space() -> None:
    t = toy(trust="distance", trust_bits=None, trust_space=f"public:{FEATURES}")
    whole, rotated = toy(trust="distance", trust_bits=None).party(0), t.party(0)
    # a rotation
    assert torch.allclose(whole.introduce()["scores"], rotated.introduce()["scores"], rtol=1e-4)
    few = (
        toy(trust="distance", trust_bits=None, trust_space="public:2")
        .party(0)
        .introduce()["scores"]
    )
    assert not torch.allclose(few, whole.introduce()["scores"], rtol=1e-2)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size"),
    [("confidence", 0), ("distance", ROWS // 2), ("select", ROWS // 8), ("kernel", 4 * 512 + 8)],
)
def test_a_client_introduces_itself_once(kind: str, size: int) -> None:
    t = toy(trust=kind, trust_epsilon=2.0 if kind == "kernel" else 0.0).run(3)
    sent = [e for e in t.fed.ledger if e.kind == "introduce" and e.sender.startswith("client")]
    assert sum(e.bytes for e in sent) == 4 * size
    assert {e.round for e in sent} == (set() if kind == "confidence" else {0})
    assert sum(e.count for e in sent) == (0 if kind == "confidence" else 4)


def test_a_client_that_joins_later_introduces_itself_then() -> None:
    t = toy(trust="distance").run(1, present=[0, 1, 2])
    assert t.server is not None and set(t.server.introductions) == {"0", "1", "2"}
    t.run(1, start=1)
    assert set(t.server.introductions) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("kind", ["uniform", "confidence"])
def test_no_introduction_is_made_that_the_config_does_not_ask_for(kind: str) -> None:
    with pytest.raises(MethodError, match="needs no introduction"):
        toy(trust=kind).party(0).introduce()


def test_without_trust_nothing_is_added_to_the_server() -> None:
    assert toy().server.state().keys() == {"params", "opt"}
    assert "introductions" in toy(trust="select").server.state()


# -- the round -------------------------------------------------------------------------------------


def test_a_high_temperature_is_the_uniform_mean() -> None:
    same: dict[str, Any] = {"include_self": False, "average": "logits"}
    uniform = toy(**same).run(3).tensors()
    weighted = toy(trust="distance", trust_temperature=1e9, **same).run(3).tensors()
    assert all(
        torch.allclose(uniform[k], v, atol=2e-4)
        for k, v in weighted.items()
        if not k.startswith("server")
    )


def test_the_target_without_oneself_is_the_mean_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 6, CLASSES, generator=generator, dtype=torch.float64)
    shares = torch.softmax(torch.randn(3, 6, generator=generator, dtype=torch.float64), 0)
    shares[:, 0] = torch.tensor([0.97, 0.02, 0.01])  # nobody else knows the first row
    mean = trust.weighted(p, shares)
    for n in range(3):
        others = [m for m in range(3) if m != n]
        rest = trust.weighted(p[others], shares[others] / shares[others].sum(0))
        found = trust.without(p[n], mean, shares[n])
        assert torch.allclose(found[1:], rest[1:])
        assert torch.equal(found[0], p[n][0]) if n == 0 else torch.allclose(found[0], rest[0])


def test_weights_move_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round uses the weights: with all weight on client 0, the target is its answer."""

    def first(server: Any, clients: list[int], rows: Any, answers: Tensor) -> Tensor:
        shares = torch.zeros(answers.shape[:2], dtype=torch.float64)
        shares[0] = 1
        return shares

    monkeypatch.setattr(trust, "shares", first)
    t = toy(trust="confidence", tau=1)
    targets: list[Tensor] = []
    original = t.server.cfg.encode_dense
    monkeypatch.setattr(
        type(t.cfg), "encode_dense", lambda cfg, rows: targets.append(rows) or original(rows)
    )
    t.run(1)
    batch = t.party(0).public(0, steps=1, size=8)[0]
    before = toy(trust="confidence", tau=1, kd=0.0, adv=0.0)
    before.fed.call(before.engine.ids, "local_train", shared={"t": 0})
    assert torch.allclose(targets[0], F.softmax(before.party(0).forward(batch), -1), atol=1e-6)


@pytest.mark.each_time("fedal-confidence", "cfd-distance", "feddf-select", "feddf-al-kernel")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [FEDAL, CFD, FEDDF, FEDDF_AL], ids=lambda m: m.name)
def test_engines_agree_to_the_bit(method: Any, kind: str) -> None:
    loop, strict = (
        toy(method, trust=kind, isolated=isolated).run(2).tensors() for isolated in (False, True)
    )
    assert equal(loop, strict)
    changed = toy(method).run(2).tensors()
    assert any(not torch.equal(v, loop[k]) for k, v in changed.items())  # trust has an effect


@pytest.mark.parametrize("kind", KINDS)
def test_own_weights_are_sent_where_the_own_answer_is_removed(kind: str) -> None:
    loop, strict = (toy(trust=kind, include_self=False, isolated=i).run(2) for i in (False, True))
    assert equal(loop.tensors(), strict.tensors())


def test_clients_that_fail_have_no_weight() -> None:
    t = toy(trust="distance", faults=Faults(dropout=0.4, nan=0.2)).run(6)
    assert all(v.isfinite().all() for v in t.tensors().values() if v.is_floating_point())


# -- what an introduction tells --------------------------------------------------------------------


def recovered(points: Tensor, far: Tensor) -> Tensor:
    """The point (d,) at these distances (n,) from points (n, d): trilateration by least squares."""
    a = 2 * (points[1:] - points[0])
    b = far[0] ** 2 - far[1:] ** 2 + (points[1:] ** 2).sum(1) - (points[0] ** 2).sum()
    return torch.linalg.lstsq(a, b[:, None]).solution[:, 0]


def test_exact_nearest_distances_tell_a_row_and_few_bits_of_several_do_not() -> None:
    generator = torch.Generator().manual_seed(0)
    planted = torch.tensor([[5.0, 5.0, 5.0]]).double()
    own = torch.cat([planted, torch.randn(30, 3, generator=generator, dtype=torch.float64)])
    probes = planted + torch.randn(12, 3, generator=generator, dtype=torch.float64)
    exact = trust.neighbour_distance(probes, own, 1)
    assert (recovered(probes, exact) - planted).norm() < 1e-3
    several = trust.neighbour_distance(probes, own, 5)
    coarse = (several / 4).clamp(max=1).mul(255).round() / 255 * 4
    assert (recovered(probes, coarse) - planted).norm() > 0.5


# -- settings --------------------------------------------------------------------------------------


def test_settings_are_checked() -> None:
    wrong = {
        "trust_neighbours": 2,
        "trust_cap": 0.0,
        "trust_space": "pixels",
        "trust_bits": 9,
        "trust": "kernle",
    }
    with pytest.raises(ConfigError) as error:
        FEDMD.configure(params=wrong)
    assert all(f"params.{name}" in str(error.value) for name in wrong)
    assert FEDMD.configure("trusted").trust_epsilon == 2.0
    assert FEDMD.configure().includes_self is False and FEDMD.configure().averages_logits
    trusted = FEDMD.configure("trusted")
    assert trusted.includes_self and not trusted.averages_logits
