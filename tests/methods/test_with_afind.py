"""What holds for every method that AFIND+ lends its choice to: who is asked, what crosses, faults,
churn, engines.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.core.faults import Faults
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.methods import find
from tests.toy import CLASSES, Toy, common

PLAIN = ["ditto", "fedfomo", "dispfl"]
LENT = [f"{name}-afind" for name in PLAIN]
RING = {i: [(i - 1) % 6, (i + 1) % 6] for i in range(6)}
SMALL: dict[str, Any] = {"batch_size": 8, "epochs": 1}

each = pytest.mark.parametrize("name", PLAIN + LENT)
lent = pytest.mark.parametrize("name", LENT)


def sha(toy: Toy) -> str:
    return state_sha256((str(i), s) for i, s in toy.engine.states().items())


def mean_loss(toy: Toy) -> float:
    answers = toy.engine.call(toy.engine.ids, "predictions", {"on": "test"}, None, None)
    return sum(float(a["loss"]) for a in answers) / len(answers)


@pytest.mark.each_time("plain-*", "batchnorm-ditto-afind")
@each
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(name: str, norm: bool) -> None:
    make = partial(common, norm=norm)
    loop, strict = (
        Toy(find(name), 4, isolated=i, make=make, **SMALL).run(3) for i in (False, True)
    )
    assert sha(loop) == sha(strict)
    assert loop.fed.ledger.state() == strict.fed.ledger.state()
    assert loop.engine.notes() == strict.engine.notes()


@each
def test_only_neighbours_exchange_messages_and_the_coordinator_learns_no_number(name: str) -> None:
    toy = Toy(find(name), 6, graph=RING, **SMALL).run(3)
    assert not toy.fed.failures
    peers = {(a, b) for a, b in toy.fed.ledger.pairs if "server" not in (a, b)}
    assert peers == {(f"peer-{i}", f"peer-{j}") for i, near in RING.items() for j in near}
    assert {e.what for e in toy.fed.ledger if e.receiver == "server"} <= {"none", "bool[6]"}


@each
def test_a_personal_head_stays_where_it_is(name: str) -> None:
    toy = Toy(find(name), 3, **SMALL).run(2)
    crossed = " ".join(e.what for e in toy.fed.ledger)
    assert "body.0.weight" in crossed and "head" not in crossed
    assert not re.search(rf"\[{CLASSES}(,8)?\]", crossed)
    toy = Toy(find(name), 3, personal_head=False, **SMALL).run(1)
    assert "head.weight" in " ".join(e.what for e in toy.fed.ledger)


@each
def test_mixing_weights_are_a_distribution_over_oneself_and_neighbours(name: str) -> None:
    toy = Toy(find(name), 6, graph=RING, **SMALL)
    for t in range(3):
        toy.run(1, start=t)
        for i, notes in toy.engine.notes().items():
            mixing = notes["mixing"]
            assert isinstance(mixing, list) and len(mixing) == 6
            assert min(mixing) >= 0 and sum(mixing) == pytest.approx(1, abs=1e-6)
            assert {j for j, share in enumerate(mixing) if share} <= {i, *RING[i]}


@pytest.mark.each_time("*-ditto", "nan-*-afind")
@each
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dropout", "dropped out"),
        ("crash", "raised"),
        ("nan", "not finite"),
        ("shape", "wrong shape"),
        ("type", "not a message"),
        ("late", "late"),
    ],
)
def test_faults_are_counted_and_poison_nothing(name: str, fault: str, reason: str) -> None:
    toy = Toy(find(name), 5, faults=Faults(**{fault: 0.25}), **SMALL).run(4)
    assert {f.reason for f in toy.fed.failures} == {reason}
    assert all(v.isfinite().all() for v in toy.tensors().values())


@each
def test_who_is_absent_neither_changes_nor_is_asked(name: str) -> None:
    toy = Toy(find(name), 5, **SMALL).run(2)
    before, pairs = state_sha256([("2", toy.party(2).state())]), dict(toy.fed.ledger.pairs)
    spoke = {k: list(v) for k, v in pairs.items() if "peer-2" in k}
    toy.run(2, start=2, present=[0, 1, 3, 4])
    assert state_sha256([("2", toy.party(2).state())]) == before
    assert {k: v for k, v in toy.fed.ledger.pairs.items() if "peer-2" in k} == spoke
    toy.run(1, start=4)
    assert not toy.fed.failures
    assert state_sha256([("2", toy.party(2).state())]) != before


@each
def test_it_learns(name: str) -> None:
    toy = Toy(find(name), 5, batch_size=16, epochs=2, lr=0.05)
    before = mean_loss(toy)
    assert mean_loss(toy.run(15)) < 0.8 * before


@lent
def test_afind_chooses_and_nothing_of_a_round_is_kept(name: str) -> None:
    toy = Toy(find(name), 5, **SMALL)
    sizes = []
    for t in range(4):
        toy.run(1, start=t)
        sizes.append([n["coreset"] for n in toy.engine.notes().values()])
        assert all(toy.party(i).replies == {"t": -1} for i in range(5))
    assert sizes[0] == [4.0] * 5
    assert all(0 < n <= 4 for row in sizes for n in row)
    assert min(sizes[-1]) < 4


@lent
def test_afind_runs_from_probes_at_the_weights_before_training(name: str) -> None:
    kinds = [e.kind for e in Toy(find(name), 3, **SMALL).run(1).fed.ledger if e.count]
    assert kinds.index("probe") < kinds.index("update") < kinds.index("give")


@lent
def test_noise_on_phi_works_and_noise_on_updates_is_refused(name: str) -> None:
    toy = Toy(find(name), 3, dp={"target": "phi"}, threshold="anchored", **SMALL).run(2)
    assert not toy.fed.failures
    assert all(n["epsilon of phi"] > 0 for n in toy.engine.notes().values())
    with pytest.raises(ConfigError, match="afind-plus"):
        find(name).configure(params={"dp": {"target": "update"}})


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_method_asks_for_no_gradient_and_no_loss(name: str) -> None:
    toy = Toy(find(name), 4, neighbours=2, **SMALL).run(2)
    assert not {"probe", "request"} & {e.kind for e in toy.fed.ledger}
    assert "loss" not in " ".join(e.what for e in toy.fed.ledger)
    assert sum(e.count for e in toy.fed.ledger if e.kind == "give") == 4 * 2 * 2


@each
def test_tuning_before_an_evaluation_leaves_no_trace(name: str) -> None:
    toy = Toy(find(name), 3, **SMALL).run(1)
    before = sha(toy)
    answers = [
        toy.engine.call([0], "predictions", {"on": "test", "eval_mode": eval_mode}, None, None)[0]
        for eval_mode in ("", "tuned")
    ]
    assert sha(toy) == before
    assert not torch.equal(*(a["loss"] for a in answers))
