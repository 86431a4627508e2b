"""AFIND+: its equations on hand numbers, one round against plain PyTorch, planted groups, joins,
leaves and faults.
"""

from __future__ import annotations

import copy
import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedloom import models
from fedloom.core.errors import ConfigError, MethodError, ModelError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.methods import find, steps
from fedloom.methods.peer.afind import AFIND_PLUS
from fedloom.methods.peer.selection import (
    after_churn,
    boltzmann,
    cosine,
    entropy,
    initial_proxy,
    largest_gap,
    probabilities,
    proxy,
    proxy_names,
    smoothed,
    threshold,
)
from tests.toy import Toy, common, contexts, equal, rows

EQ13 = AFIND_PLUS.configure()
CALIBRATED = AFIND_PLUS.configure("calibrated")


def theta(s: Tensor, cfg: Any = EQ13) -> float:
    return float(threshold(entropy(s), len(s), cfg))


# -- the threshold: golden values ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "similarity", "expected"),
    [
        (5, 1.0, 0.25),  # h = 0
        (10, 0.0, 0.01515),  # h = 10 * 0.5 ln 2 = 3.4657
        (99, 0.9, 0.00399),  # h = 4.824: below 1/99, so everybody is in
        (99, 0.98, 0.1360),  # h = 0.985... above 1/99: nobody is
    ],
)
def test_the_printed_threshold_has_its_golden_values(
    n: int, similarity: float, expected: float
) -> None:
    assert theta(torch.full((n,), similarity, dtype=torch.float64)) == pytest.approx(
        expected, rel=2e-3
    )


def test_with_many_diverse_neighbours_the_printed_threshold_is_next_to_nothing_but_not_nothing() -> (  # noqa: E501
    None
):
    found = theta(torch.zeros(99, dtype=torch.float64))
    assert 1e-16 < found < 1e-14


def test_a_coreset_in_which_all_are_alike_empties_itself_by_the_printed_rule() -> None:
    n = 99
    assert theta(torch.full((n,), 0.98, dtype=torch.float64)) > 1 / n
    assert theta(torch.full((n,), 0.9, dtype=torch.float64)) < 1 / n


similarities = st.lists(st.floats(-1, 1), min_size=1, max_size=60).map(
    lambda s: torch.tensor(s, dtype=torch.float64)
)


@given(similarities, st.floats(0.01, 3))
def test_the_printed_threshold_lies_between_nothing_and_half_of_tau(s: Tensor, tau: float) -> None:
    assert 0 < theta(s, AFIND_PLUS.configure(params={"tau": tau})) <= tau / 2


@given(similarities)
def test_the_calibrated_entropy_lies_between_0_and_1(s: Tensor) -> None:
    assert 0 <= theta(s, CALIBRATED) <= 2 * CALIBRATED.tau * (1 + 1e-9)


def test_the_calibrated_threshold_lets_everybody_in_who_is_alike() -> None:
    assert theta(torch.ones(7, dtype=torch.float64), CALIBRATED) == 0


def test_similarity_is_the_cosine_and_survives_a_proxy_of_zero() -> None:
    own = torch.tensor([3.0, 4.0])
    found = cosine(torch.tensor([[6.0, 8.0], [-3.0, -4.0], [4.0, -3.0], [0.0, 0.0]]), own)
    assert torch.allclose(found, torch.tensor([1.0, -1.0, 0.0, 0.0]), atol=1e-6)


# -- p: (8), (9), joins and leaves -----------------------------------------------------------------


def test_p_on_hand_numbers() -> None:
    p = torch.tensor([0.0, 0.2, 0.3, 0.5], dtype=torch.float64)
    new = probabilities(
        p, torch.tensor([1, 3]), torch.tensor([0.0, math.log(3)], dtype=torch.float64), 1.0
    )
    assert torch.allclose(new, torch.tensor([0.0, 0.7 / 4, 0.3, 0.7 * 3 / 4], dtype=torch.float64))


@given(st.data())
def test_p_stays_a_distribution_through_rounds_joins_and_leaves(data: st.DataObject) -> None:
    m = data.draw(st.integers(2, 12))
    near = torch.ones(m, dtype=torch.bool)
    near[0] = False  # oneself
    p, here = near.double() / near.sum(), near
    for _ in range(data.draw(st.integers(1, 15))):
        now = near & torch.tensor(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)))
        p, here = after_churn(p, here, now), now
        assert (p >= 0).all() and (p[~here] == 0).all()
        assert float(p.sum()) == pytest.approx(1.0 if here.any() else 0.0, abs=1e-6)
        present = here.nonzero().flatten()
        if len(present):
            ids = present[: data.draw(st.integers(1, len(present)))]
            s = torch.tensor(
                data.draw(st.lists(st.floats(-1, 1), min_size=len(ids), max_size=len(ids)))
            ).double()
            new = probabilities(p, ids, s, data.draw(st.sampled_from([0.02, 0.1, 1.0])))
            outside = torch.ones(m, dtype=torch.bool)
            outside[ids] = False
            assert torch.equal(new[outside], p[outside])
            assert float(new[ids].sum()) == pytest.approx(float(p[ids].sum()), abs=1e-9)
            p = new


def test_who_joins_gets_the_mean_and_who_leaves_takes_its_own() -> None:
    mask = torch.tensor
    p = mask([0.0, 0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    before, here = mask([False, True, True, True, False]), mask([False, True, True, False, True])
    assert torch.allclose(
        after_churn(p, before, here), mask([0.0, 0.6, 0.3, 0.0, 0.45], dtype=torch.float64) / 1.35
    )
    assert torch.equal(after_churn(p, before, before), p)


# -- weights: (14)-(16) ----------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20), st.floats(0.1, 100))
def test_boltzmann_weights_sum_to_1_and_fall_with_the_loss(
    losses: list[float], temperature: float
) -> None:
    x = torch.tensor(losses, dtype=torch.float64)
    weights = boltzmann(x, temperature)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    assert (weights[x.argsort()].diff() <= 1e-12).all()


def test_boltzmann_weights_at_the_edges() -> None:
    assert torch.allclose(boltzmann(torch.full((4,), 3.0), 1.0), torch.full((4,), 0.25))
    assert torch.allclose(boltzmann(torch.tensor([0.0, 5.0]), 1e9), torch.full((2,), 0.5))
    assert boltzmann(torch.tensor([1e4, 1e4 + 1]), 1.0).isfinite().all()


def test_the_loss_before_training_weighs_nine_tenths() -> None:
    peer = Toy(AFIND_PLUS, 2).party(0)
    assert float(smoothed(torch.tensor(2.0), torch.tensor(1.0), peer.cfg.gamma)) == pytest.approx(
        0.1 * 2 + 0.9 * 1
    )


# -- one round against plain PyTorch ---------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "batch_size": 30,
    "lr": 0.1,
    "epochs": 2,
    "head_epochs": 1,
    "probe_rows": 30,
}


def plain_work(
    peer: Any, body: dict[str, Tensor], t: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """φ, F(before), F(after) and the weights after a peer's training from this body, by torch.optim
    alone.
    """
    cfg, module = peer.cfg, copy.deepcopy(peer.net.module)
    module.load_state_dict({**dict(module.state_dict()), **body})
    x, y = peer.sample_batch(t, size=cfg.probe_rows)
    before = F.cross_entropy(module(x), y)
    layer = [
        p for k, p in module.named_parameters() if k in proxy_names(dict(module.named_parameters()))
    ]
    phi = torch.cat([g.flatten() for g in torch.autograd.grad(before, layer)])
    head = [p for k, p in module.named_parameters() if k.startswith("head.")]
    rest = [p for k, p in module.named_parameters() if not k.startswith("head.")]
    # One optimizer for each stage: momentum stays with what moved.
    first = t * (cfg.head_epochs + cfg.epochs)
    for stage, passes in (
        (head, range(cfg.head_epochs)),
        (rest, range(cfg.head_epochs, cfg.head_epochs + cfg.epochs)),
    ):
        optimizer = torch.optim.SGD(stage, lr=cfg.lr, momentum=cfg.momentum)
        for n in passes:
            for bx, by in peer.epochs(first + n, size=cfg.batch_size):
                module.zero_grad()
                F.cross_entropy(module(bx), by).backward()
                optimizer.step()
    after = F.cross_entropy(module(x), y)
    return (
        phi,
        before.detach(),
        after.detach(),
        {k: p.detach() for k, p in module.named_parameters()},
    )


@pytest.mark.parametrize("aggregation", ["boltzmann", "uniform"])
def test_a_faithful_round_is_the_algorithm_box_written_out(aggregation: str) -> None:
    n = 4
    toy = Toy(
        AFIND_PLUS,
        client_contexts=contexts(n, make=common, data=lambda i: rows(30, i)),
        **PLAIN,
        aggregation=aggregation,
    )
    toy.run(1)  # so that bodies, heads and p differ
    peers = [copy.deepcopy(toy.party(i)) for i in range(n)]
    expected = []
    for i, peer in enumerate(peers):
        f = peer.neighbours
        coreset = [j for j in range(n) if j != i and f["p"][j] >= f["theta"]]
        coreset = coreset or [int(torch.where(f["near"], f["p"], -1.0).argmax())]
        body = {k: v.clone() for k, v in steps.shared_weights(peer).items()}
        work = {j: plain_work(peers[j], body, 1) for j in [i, *coreset]}
        smooth = torch.stack([0.1 * after + 0.9 * before for _, before, after, _ in work.values()])
        shares = (
            torch.softmax(-smooth, 0)
            if aggregation == "boltzmann"
            else torch.full((len(work),), 1 / len(work))
        )
        mixed = {
            k: sum(w * x[3][k] for w, x in zip(shares, work.values(), strict=True)) for k in body
        }
        head = {k: v for k, v in work[i][3].items() if k.startswith("head.")}
        s = torch.stack([F.cosine_similarity(work[j][0], work[i][0], 0) for j in coreset]).double()
        e = (1 + s) / 2
        h = -(e * e.log()).sum()
        p = f["p"].clone()
        p[coreset] = torch.softmax(s / 0.1, 0) * f["p"][coreset].sum()
        expected.append(({**mixed, **head}, p, 0.5 * (1 - torch.sigmoid(h))))
    toy.run(1, start=1)
    for i, (weights, p, theta_) in enumerate(expected):
        for k, v in toy.party(i).params.items():
            assert torch.allclose(v, weights[k], atol=2e-6), (i, k)
        assert torch.allclose(toy.party(i).neighbours["p"], p, atol=1e-5)
        assert float(toy.party(i).neighbours["theta"]) == pytest.approx(float(theta_), abs=1e-5)


def test_serving_leaves_a_peer_bit_for_bit_as_it_was_and_begins_from_the_asking_peer_s_body() -> (
    None
):
    toy = Toy(AFIND_PLUS, 3, **PLAIN).run(1)
    asking, server = toy.party(0), toy.party(1)
    body = {k: v.clone() for k, v in steps.shared_weights(asking).items()}
    assert any(not torch.equal(v, steps.shared_weights(server)[k]) for k, v in body.items())
    before = state_sha256([("1", server.state())])
    answer = server.serve(t=1, asked={"weights": body}, by=torch.tensor(0))
    assert state_sha256([("1", server.state())]) == before
    phi, first, last, weights = plain_work(server, body, 1)
    assert torch.allclose(answer["phi"], phi, atol=1e-6)
    assert float(answer["loss"]) == pytest.approx(0.1 * float(last) + 0.9 * float(first), abs=1e-6)
    for k, v in answer["weights"].items():
        assert torch.allclose(v, weights[k], atol=1e-6)


def test_a_cheap_round_mixes_what_each_trained_from_its_own_body() -> None:
    n = 3
    toy = Toy(AFIND_PLUS, n, **PLAIN, mode="cheap", tau=1e-9).run(1)  # everybody is asked
    peers = [copy.deepcopy(toy.party(i)) for i in range(n)]
    own = [plain_work(p, dict(steps.shared_weights(p)), 1) for p in peers]
    toy.run(1, start=1)
    for i, peer in enumerate(peers):
        body = {k: v.clone() for k, v in steps.shared_weights(peer).items()}
        order = [i, *(j for j in range(n) if j != i)]
        smooth = torch.stack(
            [0.1 * own[j][2] + 0.9 * plain_work(peers[j], body, 1)[1] for j in order]
        )
        shares = torch.softmax(-smooth, 0)
        for k in body:
            mixed = sum(w * own[j][3][k] for w, j in zip(shares, order, strict=True))
            assert torch.allclose(toy.party(i).params[k], mixed, atol=2e-6)


# -- planted groups --------------------------------------------------------------------------------


class Planted:
    """Twenty clients of digits, five groups of four with two classes each."""

    def __init__(
        self, seed: int, *, clients: int = 20, rows: int | None = None, **params: Any
    ) -> None:
        torch.set_num_threads(1)
        options = {} if rows is None else {"rows": rows}
        run = check(
            {
                "run": {
                    "method": "afind-plus",
                    "seed": seed,
                    "rounds": 1,
                    "params": {"batch_size": 32, "epochs": 1, **params},
                    "data": {
                        "name": "digits",
                        "clients": clients,
                        "partition": "groups",
                        "options": options,
                        "public_rows": 0,
                    },
                    "models": {"pool": ["mlp"]},
                }
            }
        ).run
        self.small = build(run)
        self.engine = start(self.small)
        self.fed = Federation(
            self.engine, seed=seed, coordinator="coordinator", param_shapes=self.small.param_shapes
        )
        self.t = 0

    def run(self, rounds: int) -> Planted:
        for _ in range(rounds):
            self.fed.round = self.t
            list(self.small.method.round(self.fed, None, self.engine.ids, self.small.cfg, self.t))
            self.t += 1
        return self

    def coresets(self) -> dict[int, set[int]]:
        """Whom each peer will ask next."""
        here = torch.ones(len(self.engine.ids), dtype=torch.bool)
        masks = self.engine.call(
            self.engine.ids, "choose", {"here": here, "open": False}, None, None
        )
        return {
            i: set(m.nonzero().flatten().tolist())
            for i, m in zip(self.engine.ids, masks, strict=True)
        }


MATES = {i: {j for j in range(20) if j // 4 == i // 4 and j != i} for i in range(20)}


@pytest.mark.each_time("faithful-*-0")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("threshold", ["eq13", "calibrated"])
@pytest.mark.parametrize("mode", ["faithful", "cheap"])
def test_after_the_first_round_the_coreset_is_exactly_the_group(
    mode: str, threshold: str, seed: int
) -> None:
    assert Planted(seed, threshold=threshold, mode=mode).run(1).coresets() == MATES


def test_peers_of_a_group_are_always_more_alike_than_others() -> None:
    planted = Planted(0)
    peers = [planted.engine._parties[i] for i in range(20)]  # type: ignore[attr-defined]
    phis = torch.stack([proxy(peer, 0)[0] for peer in peers])
    cos = torch.stack([cosine(phis, phi) for phi in phis])
    same = torch.tensor([[i // 4 == j // 4 for j in range(20)] for i in range(20)])
    different = cos[~same].max()
    assert (cos[same] > different).all()


@pytest.mark.slow
def test_the_calibrated_threshold_still_holds_the_groups_many_rounds_later() -> None:
    assert Planted(0, threshold="calibrated", mode="cheap").run(15).coresets() == MATES


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5, 8, 10])
def test_anchored_groups_of_any_size_are_found_and_kept(size: int) -> None:
    """From messages alone: no peer is told of groups. Twenty rounds for the two small ones, whose
    peers are few.
    """
    planted = Planted(0, clients=5 * size, rows=24, threshold="anchored", mode="cheap", lr=0.05)
    mates = {
        i: {j for j in range(5 * size) if j // size == i // size and j != i}
        for i in range(5 * size)
    }
    assert planted.run(1).coresets() == mates
    assert planted.run(19 if size <= 5 else 2).coresets() == mates


def test_the_largest_gap_separates_groups_of_any_size_and_none() -> None:
    def kept(*cosines: float) -> list[float]:
        s = torch.tensor(cosines)
        return s[s >= largest_gap(s)].tolist()

    assert kept(0.9, 0.1, -0.4, 0.2) == pytest.approx([0.9])
    assert kept(0.8, 0.85, 0.95, 0.3, 0.1) == pytest.approx([0.8, 0.85, 0.95])
    assert kept(0.9, 0.8, 0.85) == pytest.approx([0.9, 0.8, 0.85])  # all are alike
    assert kept(0.3, 0.1, -0.9) == []  # nobody is
    assert largest_gap(torch.zeros(0)) == 0.5


def test_anchored_proxies_do_not_change_and_are_exchanged_once() -> None:
    toy = Toy(AFIND_PLUS, 4, **PLAIN, threshold="anchored", mode="cheap")
    first = initial_proxy(toy.party(0))
    toy.run(3)
    assert torch.equal(initial_proxy(toy.party(0)), first)
    sent = [e for e in toy.fed.ledger if e.kind == "anchor"]
    assert {e.round for e in sent} == {0} and sum(e.count for e in sent) == 12
    assert sum(e.bytes for e in sent) == 12 * 4 * len(first)


def test_an_anchored_peer_that_joins_later_is_compared_then() -> None:
    toy = Toy(AFIND_PLUS, 4, **PLAIN, threshold="anchored", mode="cheap").run(2, present=[0, 1, 2])
    assert toy.party(0).neighbours["met"].tolist() == [False, True, True, False]
    toy.run(1, start=2)
    assert toy.party(0).neighbours["met"].tolist() == [False, True, True, True]
    whole = Toy(AFIND_PLUS, 4, **PLAIN, threshold="anchored", mode="cheap").run(1)
    assert torch.equal(toy.party(0).neighbours["cosines"], whole.party(0).neighbours["cosines"])


@pytest.mark.parametrize("mode", ["faithful", "cheap"])
def test_anchored_engines_agree_to_the_bit(mode: str) -> None:
    loop, strict = (
        Toy(AFIND_PLUS, 4, **PLAIN, threshold="anchored", mode=mode, isolated=isolated).run(2)
        for isolated in (False, True)
    )
    assert equal(loop.tensors(), strict.tensors())


# -- who is spoken to, and what crosses ------------------------------------------------------------


def half(n: int) -> dict[int, list[int]]:
    """Everybody's neighbours at even distance, both ways."""
    return {i: sorted({(i + d) % n for d in (-4, -2, 2, 4)}) for i in range(n)}


@pytest.mark.parametrize("mode", ["faithful", "cheap"])
def test_the_first_round_asks_all_neighbours_and_nobody_else_is_ever_asked(mode: str) -> None:
    n = 9
    graph = half(n)
    toy = Toy(
        AFIND_PLUS,
        client_contexts=contexts(n, make=common, graph=graph),
        graph=graph,
        **PLAIN,
        mode=mode,
    )
    toy.fed.coordinator = "coordinator"
    toy.run(1)
    pairs = {pair for pair in toy.fed.ledger.pairs if "coordinator" not in pair}
    assert pairs == {(f"peer-{i}", f"peer-{j}") for i in range(n) for j in graph[i]}
    toy.run(3, start=1)
    assert {pair for pair in toy.fed.ledger.pairs if "coordinator" not in pair} == pairs
    with pytest.raises(MethodError, match="not a neighbour"):
        toy.fed.exchange({0: [1]}, answer="give", take="mix", shared={"t": 9})


def test_the_coordinator_learns_who_asks_whom_and_nothing_else_and_no_head_ever_crosses() -> None:
    toy = Toy(AFIND_PLUS, 4, **PLAIN)
    toy.fed.coordinator = "coordinator"
    toy.run(3)
    for entry in toy.fed.ledger:
        assert "head" not in entry.what
        if entry.receiver == "coordinator":
            assert (entry.kind, entry.what) in {("choose", "bool[4]"), ("update", "none")}
        if entry.sender == "coordinator":
            assert "float" not in entry.what


def test_trainings_are_one_for_each_peer_and_one_for_each_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = [0]
    train = steps.local_sgd

    def counted(party: Any, *, t: int) -> None:
        done[0] += 1
        train(party, t=t)

    monkeypatch.setattr(steps, "local_sgd", counted)
    n, toy = 5, Toy(AFIND_PLUS, 5, **PLAIN)
    for t in range(4):
        done[0] = 0
        toy.run(1, start=t)
        asked = sum(e.count for e in toy.fed.ledger if e.round == t and e.kind == "serve")
        noted = [notes["trainings"] for notes in toy.engine.notes().values()]
        assert done[0] == n + asked == sum(noted)
    done[0] = 0
    Toy(AFIND_PLUS, 5, **PLAIN, mode="cheap").run(1)
    assert done[0] == n


def test_bytes_of_a_pair_are_two_bodies_and_a_proxy() -> None:
    for mode, losses in (("faithful", 1), ("cheap", 2)):
        toy = Toy(AFIND_PLUS, 3, **PLAIN, mode=mode).run(1)
        peer = toy.party(0)
        body = sum(v.numel() for v in steps.shared_weights(peer).values())
        phi = sum(peer.params[k].numel() for k in proxy_names(peer.params))
        assert toy.fed.ledger.pairs["peer-0", "peer-1"][1] == 4 * (2 * body + phi + losses)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "expected"), [("top1", [2]), ("self", []), ("all", [1, 2, 3])])
def test_an_empty_coreset(policy: str, expected: list[int]) -> None:
    peer = Toy(AFIND_PLUS, 4, empty_coreset=policy).party(0)
    p = torch.tensor([0.0, 0.3, 0.4, 0.3], dtype=torch.float64)
    peer.neighbours = {**peer.neighbours, "p": p, "theta": torch.tensor(0.9, dtype=torch.float64)}
    here = torch.ones(4, dtype=torch.bool)
    assert peer.choose(here=here, open=False).nonzero().flatten().tolist() == expected
    assert peer.choose(here=here, open=True).nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(("top", "expected"), [(1, [2]), (2, [2, 3]), (9, [1, 2, 3])])
def test_a_fixed_number_of_the_likeliest(top: int, expected: list[int]) -> None:
    """They are among those who are here, whatever θ is."""
    peer = Toy(AFIND_PLUS, 4, threshold="top", top=top).party(0)
    p = torch.tensor([0.0, 0.2, 0.5, 0.3], dtype=torch.float64)
    peer.neighbours = {**peer.neighbours, "p": p, "theta": torch.tensor(0.9, dtype=torch.float64)}
    here = torch.tensor([False, True, True, True])
    assert peer.choose(here=here, open=False).nonzero().flatten().tolist() == expected
    without = torch.tensor([False, True, False, True])
    assert 2 not in peer.choose(here=without, open=False).nonzero().flatten().tolist()


def test_rounds_that_ask_again_ask_everybody_or_some() -> None:
    toy = Toy(AFIND_PLUS, 6, **PLAIN, explore_every=2, tau=1.5, upsilon=0.02).run(3)
    assert [_asked(toy, t) for t in (0, 2)] == [30, 30]
    assert _asked(toy, 1) < 30
    assert _asked(Toy(AFIND_PLUS, 6, **PLAIN, explore_neighbours=2).run(1), 0) == 12


def test_an_opening_by_probes_trains_only_for_those_who_pass() -> None:
    toy = Toy(AFIND_PLUS, 6, **PLAIN, explore_by="probe", tau=1.5, upsilon=0.02).run(1)
    probes = sum(e.count for e in toy.fed.ledger if e.kind == "probe")
    assert probes == 30
    assert _asked(toy, 0) < 30


def _asked(toy: Toy, t: int) -> int:
    return sum(e.count for e in toy.fed.ledger if e.round == t and e.kind == "serve")


# -- faults, leaves, joins, ids --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["faithful", "cheap"])
def test_rounds_finish_and_p_stays_whole_when_answers_are_missing(mode: str) -> None:
    faults = Faults(dropout=0.15, nan=0.1, shape=0.1, late=0.1)
    toy = Toy(AFIND_PLUS, 6, faults=faults, **PLAIN, mode=mode).run(8)
    assert len(toy.fed.failures) > 20
    for i in range(6):
        assert float(toy.party(i).neighbours["p"].sum()) == pytest.approx(1, abs=1e-6)
        assert all(v.isfinite().all() for v in toy.party(i).params.values())


def test_peers_leave_and_join_during_a_run() -> None:
    toy = Toy(AFIND_PLUS, 5, **PLAIN, explore_every=3).run(2, present=[0, 1, 2, 3])
    idle = state_sha256([("4", toy.party(4).state())])
    assert (
        state_sha256([("4", Toy(AFIND_PLUS, 5, **PLAIN, explore_every=3).party(4).state())]) == idle
    )
    toy.run(2, start=2, present=[1, 2, 3, 4])  # 0 leaves, 4 comes
    for i in (1, 2, 3):
        p = toy.party(i).neighbours["p"]
        assert float(p.sum()) == pytest.approx(1, abs=1e-6) and p[0] == 0 and p[4] > 0
    spoken = {pair for e in toy.fed.ledger for pair in toy.fed.ledger.pairs if e.round >= 2}
    assert ("peer-4", "peer-1") in spoken
    left = toy.fed.ledger.pairs["peer-0", "peer-1"]
    toy.run(2, start=4, present=[1, 2, 3, 4])
    assert toy.fed.ledger.pairs["peer-0", "peer-1"] == left
    toy.run(1, start=6, present=[1])  # alone
    assert all(v.isfinite().all() for v in toy.party(1).params.values())


def test_other_numbers_for_the_peers_change_nothing() -> None:
    full = {**PLAIN, "probe_rows": 30}  # one full batch a pass: nothing is drawn but its order
    data = [rows(30, i) for i in range(4)]
    order = [2, 0, 3, 1]
    a = Toy(
        AFIND_PLUS, client_contexts=contexts(4, make=common, data=lambda i: data[i]), **full
    ).run(3)
    b = Toy(
        AFIND_PLUS, client_contexts=contexts(4, make=common, data=lambda i: data[order[i]]), **full
    ).run(3)
    for i in range(4):
        for k, v in b.party(i).params.items():
            assert torch.allclose(v, a.party(order[i]).params[k], atol=1e-5), k
        assert torch.allclose(
            b.party(i).neighbours["p"], a.party(order[i]).neighbours["p"][order], atol=1e-4
        )


# -- privacy ---------------------------------------------------------------------------------------


def test_noise_on_the_proxy_is_clipped_sized_and_accounted_for() -> None:
    peer = Toy(AFIND_PLUS, 3, **PLAIN, dp={"target": "phi", "sigma": 2.0, "clip": 0.01}).party(1)
    asked = {"weights": {k: v.clone() for k, v in steps.shared_weights(peer).items()}}
    clean, _ = proxy(peer, 0)
    assert float(clean.norm()) <= 0.01 + 1e-6
    noise = torch.cat(
        [peer.probe(t=0, asked=asked, by=torch.tensor(i))["phi"] - clean for i in range(40)]
    )
    rows_ = min(30, len(peer.data))
    assert float(noise.std()) == pytest.approx(2.0 * 0.01 / rows_, rel=0.05)
    assert int(peer.neighbours["sent"]) == 40
    # its choice of neighbours compares a φ without noise
    assert "epsilon of phi" not in peer.take_notes()


def test_noise_on_the_update_is_added_to_a_clipped_change() -> None:
    quiet = Toy(AFIND_PLUS, 3, **PLAIN, dp={"target": "update", "sigma": 1e-9, "clip": 0.05}).party(
        1
    )
    body = {k: v.clone() for k, v in steps.shared_weights(quiet).items()}
    answer = quiet.serve(t=0, asked={"weights": body}, by=torch.tensor(0))
    change = torch.cat([(v - body[k]).flatten() for k, v in answer["weights"].items()])
    assert float(change.norm()) == pytest.approx(0.05, rel=1e-3)
    loud = Toy(AFIND_PLUS, 3, **PLAIN, dp={"target": "update", "sigma": 50.0, "clip": 0.05}).party(
        1
    )
    other = loud.serve(t=0, asked={"weights": body}, by=torch.tensor(0))
    noise = torch.cat([(v - answer["weights"][k]).flatten() for k, v in other["weights"].items()])
    assert float(noise.std()) == pytest.approx(50 * 0.05 / PLAIN["batch_size"], rel=0.2)
    with pytest.raises(ConfigError, match="faithful"):
        AFIND_PLUS.configure(params={"mode": "cheap", "dp": {"target": "update"}})


# -- the rest --------------------------------------------------------------------------------------


def test_afind_is_afind_plus_with_equal_weights_and_the_method_without_a_head_shares_all() -> None:
    assert find("afind").configure().aggregation == "uniform"
    toy = Toy(find("fedavg-ft-afind"), 3, **PLAIN).run(1)
    assert set(steps.shared_weights(toy.party(0))) == set(toy.party(0).params)


def test_a_network_without_a_layer_before_its_head_is_refused() -> None:
    with pytest.raises(ModelError, match="a layer before"):
        proxy_names({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)})
    found = proxy_names(
        {
            "body.0.weight": torch.zeros(3, 3),
            "body.1.weight": torch.zeros(3),
            "head.weight": torch.zeros(2, 3),
        }
    )
    assert found == ["body.0.weight"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet8", "conv2"),
        ("resnet18", "conv2"),
        ("wrn-10-1", "conv2"),
        ("cnn-small", ""),
    ],
)
def test_the_output_layer_of_a_residual_network_is_its_last_convolution(
    name: str, layer: str
) -> None:
    """It is the last one whose output passes through no other: shortcuts are
    registered after it.
    """
    module = models.build(name, (1, 28, 28), 10, seed=0)
    (weight, *_) = proxy_names(dict(module.named_parameters()))
    assert weight.endswith(f"{layer}.weight") and "shortcut" not in weight
    order = list[str]()
    for path, one in module.named_modules():
        if isinstance(one, torch.nn.Conv2d | torch.nn.Linear) and "shortcut" not in path:
            one.register_forward_hook(lambda _, inputs, output, path=path: order.append(path))
    module(torch.rand(2, 1, 28, 28))
    assert order[-2] == weight.removesuffix(".weight") and order[-1] == "head"


def test_peers_learn() -> None:
    toy = Toy(AFIND_PLUS, 4, lr=0.1, batch_size=16, epochs=3).run(6)
    replies = toy.engine.call(toy.engine.ids, "predictions", {"on": "test"}, None, None)
    labels = toy.party(0).context.tests["test"].labels
    assert min(float((r["predicted"] == labels).float().mean()) for r in replies) > 0.6


@pytest.mark.slow
def test_a_run_on_a_partial_graph_with_joins_and_leaves_ends_the_same_after_a_kill(
    tmp_path: Path,
) -> None:
    run = check(
        {
            "run": {
                "method": "afind-plus",
                "rounds": 6,
                "params": {"epochs": 1, "batch_size": 16, "explore_every": 2},
                "data": {
                    "name": "digits",
                    "clients": 8,
                    "public_rows": 0,
                    "test_rows": 40,
                    "own_test_rows": 20,
                },
                "models": {"pool": ["mlp"]},
                "topology": {"kind": "regular", "degree": 4},
                "churn": {"away": [{"client": 0, "start": 3}, {"client": 7, "end": 2}]},
            }
        }
    ).run
    whole = execute(run, tmp_path / "whole")
    with pytest.raises(Stopped):
        execute(run, tmp_path / "killed", stop=lambda: True)
    parts = execute(run, tmp_path / "killed", resume=True)
    assert parts.summary["state_sha256"] == whole.summary["state_sha256"]
    assert (tmp_path / "killed" / "mixing.csv").read_text() == (
        tmp_path / "whole" / "mixing.csv"
    ).read_text()
    near = json.loads((tmp_path / "whole" / "partition.json").read_text())["neighbours"]
    assert {len(those) for those in near} == {4}
    for line in csv.DictReader((tmp_path / "whole" / "mixing.csv").read_text().splitlines()):
        t, i = int(line["round"]) - 1, int(line["party"].partition("-")[2])
        taken = {int(part.partition(":")[0]) for part in line["weights"].split()} - {i}
        assert taken <= set(near[i])
        assert not (t >= 3 and 0 in taken) and not (t < 2 and 7 in taken)
        assert not (i == 0 and t >= 3) and not (i == 7 and t < 2)  # who is away mixes nothing
    assert whole.summary["eval_modes"]["tuned"]["mean"] > 0.5
