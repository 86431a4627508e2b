"""Declared state: what may survive, what is refused, what a failing call leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.core.context import (
    BatchCache,
    Batches,
    ClientContext,
    PublicSet,
    Rows,
    aligned_plan,
    epoch_plan,
    sample_plan,
)
from fedloom.core.errors import MethodError, StateError
from fedloom.core.evaluation import contribution, decide, predictions
from fedloom.core.optim import SGD, Adam
from fedloom.core.party import Party
from tests.toy import CLASSES, FEATURES, common, rows


class Counter(Party[None]):
    STATE = ("total", "log")

    def setup(self) -> None:
        self.total = torch.zeros(())
        self.log: dict[str, Any] = {"n": 0}

    def add(self, *, x: Tensor) -> Tensor:
        self.total = self.total + x
        self.log = {"n": self.log["n"] + 1}
        return self.total

    def sneak(self) -> None:
        self.cache = 3

    def keep_object(self) -> None:
        self.log = {"f": object()}

    def fail(self) -> None:
        self.total = self.total + 1
        self.total.add_(5)
        raise RuntimeError("secret")


class Learner(Party[None]):
    STATE = ("params", "opt")

    def setup(self) -> None:
        self.network(nn.Linear(FEATURES, CLASSES), SGD(0.1, momentum=0.9))


def test_undeclared_state_is_refused_and_says_how_to_mend_it() -> None:
    party = Counter(None, ClientContext(id=0))
    with pytest.raises(
        StateError, match=r"self\.cache.*Add 'cache' to STATE, or use a local variable"
    ):
        party.sneak()
    with pytest.raises(StateError, match=r"Counter\.log is in STATE and must be a tree.*\bf\b"):
        party.keep_object()


def test_state_goes_round_and_holds_no_graph() -> None:
    party, twin = Counter(None, ClientContext(id=0)), Counter(None, ClientContext(id=1))
    party.add(x=torch.tensor(2.0, requires_grad=True))
    assert not party.total.requires_grad
    twin.load(party.state())
    twin.add(x=torch.tensor(1.0))
    assert twin.state() == {"total": torch.tensor(3.0), "log": {"n": 2}}
    with pytest.raises(StateError, match="state of the same method and version"):
        twin.load({"total": torch.zeros(())})


def test_a_failing_call_changes_nothing() -> None:
    party = Counter(None, ClientContext(id=0))
    party.add(x=torch.tensor(2.0))
    with pytest.raises(RuntimeError), party.transaction():
        party.fail()
    assert party.total == 2.0


def test_a_failing_call_leaves_the_network_as_it_was() -> None:
    party = Learner(None, ClientContext(id=0, data=rows(20, 0)))
    before = {k: v.clone() for k, v in {**party.params, **party.opt}.items()}
    batches = party.batches(0, steps=2, size=8)
    with pytest.raises(RuntimeError), party.transaction():
        party.train(lambda x, y: nn.functional.cross_entropy(party.model(x), y), batches)
        raise RuntimeError
    assert all(torch.equal(before[k], v) for k, v in {**party.params, **party.opt}.items())


def test_mistakes_in_setup_are_reported() -> None:
    class Forgets(Party[None]):
        STATE = ("x",)

    class Hides(Party[None]):
        def setup(self) -> None:
            self.cache: list[int] = []  # which a method could fill without ever assigning it

    with pytest.raises(
        StateError, match=r"Hides assigns self\.cache.*put constants in the config or on the class"
    ):
        Hides(None, ClientContext(id=0))

    learner = Learner(None, ClientContext(id=0))
    with pytest.raises(StateError, match=r"Learner assigns self\.context"):
        learner.context = ClientContext(id=1)
    with pytest.raises(StateError, match=r"Learner assigns self\._network"):
        learner.network(nn.Linear(2, 2), SGD(0.1))

    class NoNetwork(Party[None]):
        STATE = ("params", "opt")

    class NoBuffers(Party[None]):
        STATE = ("params", "opt")

        def setup(self) -> None:
            self.network(nn.BatchNorm1d(3), SGD(0.1))

    class TorchAdam(Party[None]):
        STATE = ("params", "opt")

        def setup(self) -> None:
            self.network(nn.Linear(1, 1), torch.optim.Adam([torch.zeros(1, requires_grad=True)]))  # type: ignore[arg-type]

    for kind, text in (
        (TorchAdam, "such as SGD.*not Adam of torch"),
        (Forgets, "does not set it"),
        (NoNetwork, "call self.network"),
        (NoBuffers, "'buffers'"),
    ):
        with pytest.raises(MethodError, match=text):
            kind(None, ClientContext(id=0))
    with pytest.raises(MethodError, match="no rows of its own"):
        _ = Counter(None, ClientContext(id=4)).data
    with pytest.raises(MethodError, match=r"set data\.public"):
        Counter(None, ClientContext(id=4)).public(0, steps=1, size=1)
    with pytest.raises(MethodError, match="has no network"):
        _ = Counter(None, ClientContext(id=4)).params


def test_assigning_params_copies_values_and_keeps_the_flat_vector() -> None:
    a, b = Learner(None, ClientContext(id=0)), Learner(None, ClientContext(id=1))
    flat = b.net.flat
    b.params = a.params
    assert b.net.flat is flat
    assert torch.equal(a.net.flat, b.net.flat)
    with torch.no_grad():
        a.net.flat.zero_()
    assert b.net.flat.abs().sum() > 0


# -- what a page does with its network -------------------------------------------------------------


class Student(Party[None]):
    """Its network is prepared for an evaluation in one of two ways."""

    STATE = ("params", "buffers", "opt", "looks")

    def setup(self) -> None:
        self.network(common(norm=True), Adam(0.05))
        self.looks = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Any]) -> None:
        if broadcast:
            self.params = {**self.params, **broadcast}
        if eval_mode == "tuned":
            self.train(self.loss, self.batches(0, steps=3, size=8))
        if eval_mode == "broken":
            self.train(self.loss, self.batches(0, steps=1, size=8))
            raise RuntimeError


def student() -> Student:
    party = Student(None, ClientContext(id=0, data=rows(40, 0), tests={"test": rows(60, 1)}))
    party.minimize(party.loss, *party.sample_batch(0, size=8))
    return party


def test_an_evaluation_is_prepared_and_that_is_undone() -> None:
    party, ready = student(), student()
    before = party.net.memory.clone()
    plain = predictions(party, on="test")
    ready.prepare(eval_mode="tuned", broadcast={})
    with party.transaction():
        tuned = predictions(party, on="test", eval_mode="tuned")
        assert not party.net.changed
    assert torch.equal(tuned["loss"], predictions(ready, on="test")["loss"])
    assert not torch.equal(tuned["loss"], plain["loss"])
    blank = {k: torch.zeros_like(v) for k, v in party.params.items() if k.startswith("head.")}
    assert float(predictions(party, on="test", broadcast=blank)["loss"]) == pytest.approx(
        np.log(CLASSES)
    )
    with pytest.raises(RuntimeError):
        predictions(party, on="test", eval_mode="broken")
    assert torch.equal(party.net.memory, before)
    assert torch.equal(predictions(party, on="test")["loss"], plain["loss"])


def test_a_party_passes_on_what_its_network_can() -> None:
    party = student()
    x, y = party.sample_batch(1, size=8)
    before = {k: v.clone() for k, v in party.params.items()}
    value, gradients = party.gradient(party.loss, x, y, of=["head.bias"])
    assert gradients.keys() == {"head.bias"} and value.shape == ()
    assert party.live.keys() == party.params.keys() and all(
        p.requires_grad for p in party.live.values()
    )
    with party.scratch():
        party.minimize(party.loss, x, y)
    assert all(torch.equal(v, before[k]) for k, v in party.params.items())
    party.minimize(party.loss, x, y, only=["head.bias"])
    party.train(
        party.loss,
        party.batches(0, steps=1, size=8),
        only={"head.bias": torch.tensor([1.0, 0.0, 1.0, 1.0])},
    )
    assert {k for k, v in party.params.items() if not torch.equal(v, before[k])} == {"head.bias"}


def test_notes_are_numbers_or_vectors() -> None:
    party = student()
    party.note("theta", torch.tensor(0.25))
    party.note("coreset", 3)
    party.note("mixing", torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
    party.note("coreset", 4)
    assert party.take_notes() == {"theta": 0.25, "coreset": 4.0, "mixing": [0.5, 0.0, 0.5]}
    assert party.take_notes() == {}


# -- batches ---------------------------------------------------------------------------------------


def test_batches_depend_on_seed_round_and_party_only() -> None:
    def batch(id: int, seed: int, t: int) -> Tensor:
        return (
            Learner(None, ClientContext(id=id, seed=seed, data=rows(50, 0)))
            .batches(t, steps=2, size=8)
            .x
        )

    base = batch(0, 0, 0)
    assert torch.equal(base, batch(0, 0, 0))
    assert all(not torch.equal(base, batch(*other)) for other in [(1, 0, 0), (0, 1, 0), (0, 0, 1)])


def test_sampled_batches_repeat_no_row_unless_they_must() -> None:
    rng = np.random.default_rng(0)
    plan = sample_plan(rng, rows=40, steps=6, size=32)
    assert all(len(set(row.tolist())) == 32 for row in plan)
    assert sample_plan(rng, rows=5, steps=3, size=32).shape == (3, 32)


def test_an_epoch_sees_every_row_and_its_batches_are_full() -> None:
    plan = epoch_plan(np.random.default_rng(0), rows=30, epochs=2, size=8)
    assert plan.shape == (8, 8)
    for one in plan.view(2, 32):
        assert set(one.tolist()) == set(range(30))
        assert one[30:].tolist() == one[:2].tolist()


def test_public_batches_are_one_object_for_all_parties() -> None:
    public = PublicSet(rows(64, 7), 3, "x")
    a = Counter(None, ClientContext(id=0, seed=3, public=public)).public(5, steps=2, size=8)
    b = Counter(None, ClientContext(id=1, seed=3, public=public)).public(5, steps=2, size=8)
    assert a[1] is b[1]
    other = PublicSet(rows(64, 7), 3, "x").batches(5, 2, 8)
    assert torch.equal(other[1], a[1])
    assert not torch.equal(a[0], a[1])


def test_rows_are_scaled_when_they_are_read() -> None:
    data = rows(10, 0)
    scaled = type(data)(
        data.pool, data.labels, torch.tensor([3, 1]), torch.tensor([1.0]), torch.tensor([2.0])
    )
    assert torch.allclose(scaled.x(torch.tensor([0])), (data.pool[3:4] - 1) / 2)
    assert scaled.y(torch.tensor([1])) == data.labels[1]
    assert len(Batches(torch.zeros(2, 3), torch.zeros(2, 3))) == 2


def test_some_rows_are_different_ones_and_all_where_there_are_fewer() -> None:
    party = Learner(None, ClientContext(id=0, data=rows(30, 0)))
    x, y = party.sample_batch(2, size=12)
    assert x.shape == (12, FEATURES) and y.shape == (12,)
    assert len({tuple(row) for row in x.tolist()}) == 12
    own = {
        tuple(row): int(label)
        for row, label in zip(party.data.every.tolist(), party.data.labels, strict=True)
    }
    assert all(own[tuple(row)] == label for row, label in zip(x.tolist(), y, strict=True))
    assert {tuple(row) for row in party.sample_batch(2, size=99)[0].tolist()} == set(own)
    assert torch.equal(party.sample_batch(2, size=12)[0], x) and not torch.equal(
        party.sample_batch(3, size=12)[0], x
    )


def test_batches_are_gathered_once_while_they_are_recent_and_never_for_another() -> None:
    recent, made = BatchCache(1000), [0]

    class Owner:
        pass

    def make() -> Batches:
        made[0] += 1
        return Batches(torch.full((1, 100), float(made[0])), torch.zeros(1, 1))  # 400 bytes

    a, b = Owner(), Owner()
    first = recent.get(a, 0, make)
    assert recent.get(a, 0, make) is first and recent.get(b, 0, make) is not first and made == [2]
    recent.get(a, 1, make)  # the third: the oldest must go
    assert recent.get(b, 0, make).x[0, 0] == 2 and made == [3]
    assert recent.get(a, 0, make) is not first and made == [4]
    large = recent.get(a, 2, lambda: Batches(torch.zeros(1, 1000), torch.zeros(1, 1)))
    assert len(large) == 1 and not recent._held and recent._bytes == 0
    recent.get(a, 0, make)
    recent._held = {(id(b), 0): held for held in recent._held.values()}  # as if b had a's id now
    assert recent.get(b, 0, make).x[0, 0] == 6


# -- rows that have no labels here -----------------------------------------------------------------


def unlabeled(n: int = 12, aligned: int = 5, **context: Any) -> ClientContext:
    """A place with n rows, of which the first are aligned."""
    data = rows(n, 0)
    hidden = Rows(data.pool, None, data.index, data.shift, data.scale)
    return ClientContext(
        id=2,
        seed=4,
        classes=CLASSES,
        data=hidden,
        aligned=aligned,
        tests={"test": hidden},
        **context,
    )


def test_without_labels_inputs_can_be_read_and_labels_can_not() -> None:
    context = unlabeled()
    which = torch.tensor([[3, 1], [0, 3]])
    assert torch.equal(context.rows.inputs(which)[1, 0], context.rows.every[0])
    assert context.rows.inputs(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, FEATURES)
    for read in (
        lambda: context.rows.y(which[0]),
        lambda: context.rows.batches(which),
        lambda: context.sample_batch(0, size=2),
    ):
        with pytest.raises(MethodError, match="no labels here; read labels only at"):
            read()
    with pytest.raises(MethodError, match="no labels here"):
        predictions(Learner(None, unlabeled(network=common)), on="test")


def test_aligned_batches_are_the_same_people_at_every_place_and_one_object_here() -> None:
    context, other = unlabeled(), ClientContext(id=0, seed=4, data=rows(7, 1), aligned=5)
    plan = aligned_plan(4, 3, 5, 2)
    assert plan.shape == (3, 2) and set(plan.flatten().tolist()) == set(range(5))
    for step in range(3):
        for place in (context, other):
            assert torch.equal(place.aligned_batch(3, step, size=2), place.rows.every[plan[step]])
    batch = context.aligned_batch(3, 1, size=2)
    assert context.aligned_batch(3, 1, size=2) is batch
    assert all(context.aligned_batch(*key, size=2) is not batch for key in ((3, 0), (2, 1)))
    assert not torch.equal(plan, aligned_plan(4, 4, 5, 2)) and not torch.equal(
        plan, aligned_plan(5, 3, 5, 2)
    )


@pytest.mark.parametrize("size", [4, 20])
def test_unlabeled_batches_are_of_all_rows_or_of_the_unaligned_alone(size: int) -> None:
    context = unlabeled()
    numbers = {tuple(row): n for n, row in enumerate(context.rows.every.tolist())}

    def drawn(t: int, aligned: bool) -> list[list[int]]:
        batches = context.unlabeled(t, steps=30, size=size, aligned=aligned)
        assert batches.shape == (30, size, FEATURES)
        return [[numbers[tuple(row)] for row in batch] for batch in batches.tolist()]

    assert {n for batch in drawn(0, True) for n in batch} == set(range(12))
    own = drawn(0, False)
    assert {n for batch in own for n in batch} == set(range(5, 12))
    # none twice, unless they are few
    assert size > 7 or all(len(set(batch)) == size for batch in own)
    assert drawn(0, False) == own != drawn(1, False)
    assert context.unlabeled(0, steps=0, size=size).shape == (0, size, FEATURES)
    with pytest.raises(MethodError, match="party 2 has no unaligned rows"):
        unlabeled(5).unlabeled(0, steps=1, size=2, aligned=False)


def test_only_a_method_with_columns_contributes_and_decides() -> None:
    party = Counter(None, ClientContext(id=0))
    with pytest.raises(MethodError, match=r"define contribution\(\)"):
        contribution(party, on="test")
    with pytest.raises(MethodError, match=r"define decide\(\)"):
        decide(party, {})
