"""Functions that vertical methods share: centering, the rows of each batch, and where the labels
are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import MethodError
from fedloom.core.evaluation import predictions_alone
from fedloom.core.party import Party
from fedloom.methods.vertical.split import SplitActive, SplitPassive
from fedloom.methods.vertical.steps import (
    Extractor,
    SplitConfig,
    aligned_batch,
    aligned_rows,
    batch_indices,
    calibrate,
    extractor,
    labels,
    sample_rows,
    steps_per_pass,
)
from tests.methods.columns import TESTED, WIDTH, Columns, people

SPLIT = methods.find("split")


def passive(m: int = 1, **params: Any) -> SplitPassive:
    return SplitPassive(
        SplitConfig(embedding_dim=WIDTH, batch_size=8, **params), Columns(SPLIT).contexts[m]
    )


# -- the extractor ---------------------------------------------------------------------------------


def test_calibration_centres_the_embeddings_of_the_own_rows() -> None:
    party = passive()
    calibrate(party)
    raw = party.net.module.eval().body(party.data.every).detach()  # type: ignore[operator]
    f = party.infer(party.data.every)
    assert torch.allclose(f, (raw - raw.mean(0)) / (raw.var(0) + 1e-5).sqrt(), atol=1e-5)
    assert f.mean(0).abs().max() < 1e-5 and (f.std(0) - 1).abs().max() < 1e-3
    assert torch.allclose(party.buffers["centre.running_mean"], raw.mean(0), atol=1e-6)
    assert torch.allclose(party.buffers["centre.running_var"], raw.var(0), atol=1e-6)


def test_to_calibrate_again_changes_nothing_and_learns_nothing() -> None:
    party = passive()
    weights = {k: v.clone() for k, v in party.params.items()}
    calibrate(party)
    first = party.infer(party.data.every)
    calibrate(party)
    assert torch.allclose(first, party.infer(party.data.every), atol=1e-5)
    assert all(torch.equal(weights[k], v) for k, v in party.params.items())


def test_calibration_follows_weights_that_have_moved() -> None:
    party = passive()
    calibrate(party)
    party.params = {k: 3 * v + 0.1 for k, v in party.params.items()}
    assert party.infer(party.data.every).mean(0).abs().max() > 0.01
    calibrate(party)
    assert party.infer(party.data.every).mean(0).abs().max() < 1e-5


def test_without_centering_the_extractor_is_its_body() -> None:
    party = passive(centered=False)
    calibrate(party)
    body = party.context.build()
    assert torch.equal(party.infer(party.data.every), body(party.data.every).detach())
    assert not party.buffers and set(party.params) == {
        f"body.{k}" for k, _ in body.named_parameters()
    }


def test_centering_has_no_weights_of_its_own() -> None:
    body = nn.Linear(3, WIDTH)
    names = {k for k, _ in Extractor(body, WIDTH, True).named_parameters()}
    assert names == {k for k, _ in Extractor(body, WIDTH, False).named_parameters()}


# -- rows, labels, batches -------------------------------------------------------------------------


def test_the_same_people_stand_in_the_same_order_everywhere() -> None:
    toy = Columns(SPLIT, aligned=13)
    y, _ = people(3, 13, 20, 0, ())
    assert torch.equal(labels(toy.active), y)
    active = toy.active.data.every
    assert torch.equal(active, aligned_rows(toy.party(0)))  # the active party's own columns
    for number in range(3):
        seen = []
        for step in range(steps_per_pass(toy.active)):
            rows = batch_indices(toy.active, number, step)
            seen.append(rows)
            for m in toy.engine.ids:
                x = aligned_batch(toy.party(m), number, step)
                assert torch.equal(x, aligned_rows(toy.party(m))[rows])
            assert torch.equal(labels(toy.active, rows), y[rows])
        every = torch.cat(seen)
        # topped up from its own start
        assert len(every) == 16 and set(every.tolist()) == set(range(13))
        assert torch.equal(every[13:], every[:3])


@pytest.mark.parametrize(
    ("aligned", "size", "steps"), [(6, 16, 1), (8, 8, 1), (9, 8, 2), (16, 8, 2)]
)
def test_a_pass_is_made_of_full_batches(aligned: int, size: int, steps: int) -> None:
    active = Columns(SPLIT, aligned=aligned, batch_size=size).active
    assert steps_per_pass(active) == steps
    assert {len(batch_indices(active, 0, step)) for step in range(steps)} == {size}


def test_some_rows_are_different_ones_drawn_for_a_purpose_and_round() -> None:
    party = passive()
    every = {tuple(row): n for n, row in enumerate(party.data.every.tolist())}

    def drawn(*key: Any) -> list[int]:
        return [every[tuple(row)] for row in sample_rows(party, 12, *key).tolist()]

    assert len(set(drawn("a", 0))) == 12 and drawn("a", 0) == drawn("a")
    assert drawn("a", 0) != drawn("a", 1) != drawn("b", 1)
    assert torch.equal(sample_rows(party, 50, "a"), party.data.every)  # all, if there are no more


def test_passes_differ_from_each_other_and_repeat() -> None:
    active = Columns(SPLIT).active
    assert not torch.equal(batch_indices(active, 0, 0), batch_indices(active, 1, 0))
    assert torch.equal(batch_indices(active, 1, 0), batch_indices(Columns(SPLIT).active, 1, 0))
    assert not torch.equal(
        batch_indices(active, 0, 0), batch_indices(Columns(SPLIT, seed=1).active, 0, 0)
    )


def test_a_party_has_no_labels_to_read() -> None:
    toy = Columns(SPLIT)
    for context in toy.contexts:
        for rows in (context.rows, *context.tests.values()):
            assert rows.labels is None
    party = toy.party(1)
    reads: list[Any] = [
        lambda: party.data.y(torch.arange(2)),
        lambda: party.batches(0, steps=1, size=4),
        lambda: party.epochs(0, size=4),
        lambda: party.sample_batch(0, size=4),
    ]
    for read in reads:
        with pytest.raises(
            MethodError, match="these rows have no labels here; read labels only at"
        ):
            read()


def test_the_active_party_holds_the_labels_of_the_aligned_people_alone() -> None:
    active = Columns(SPLIT, aligned=13).active
    assert len(active.data) == active.context.aligned == 13
    assert (labels(active) >= 0).all()
    others = torch.ones(len(active.data.pool), dtype=torch.bool)
    others[active.data.index] = False
    # there is none to be found, even by a wrong index
    assert (active.data.labels[others] == -1).all()


# -- evaluation ------------------------------------------------------------------------------------


def test_the_active_party_decides_from_what_all_contribute_in_their_order() -> None:
    toy = Columns(SPLIT)
    parts = {m: toy.party(m).contribution(on="test") for m in toy.engine.ids}
    assert {tuple(f.shape) for f in parts.values()} == {(TESTED, WIDTH)}
    assert torch.equal(parts[1], toy.party(1).infer(toy.contexts[1].tests["test"].every))
    active = SplitActive(SplitConfig(embedding_dim=WIDTH), toy.active.context)
    logits = active.decide(parts)
    assert torch.equal(
        logits, active.net.module(torch.stack([parts[m] for m in range(3)], 1)).detach()
    )
    assert not torch.allclose(logits, active.decide({0: parts[1], 1: parts[0], 2: parts[2]}))


def test_a_method_must_define_how_a_party_predicts_alone() -> None:
    with pytest.raises(MethodError, match="cannot predict alone"):
        predictions_alone(passive(), on="test")


def test_the_state_of_a_passive_party_must_name_the_statistics_of_centering() -> None:
    class Forgets(Party[SplitConfig]):
        STATE = ("params", "opt")

        def setup(self) -> None:
            self.network(extractor(self), self.cfg.optimize())

    with pytest.raises(MethodError, match="STATE must name"):
        Forgets(SplitConfig(embedding_dim=WIDTH), Columns(SPLIT).contexts[0])
    assert partial(
        Forgets, SplitConfig(embedding_dim=WIDTH, centered=False), Columns(SPLIT).contexts[0]
    )().params


def test_a_party_without_rows_is_reported() -> None:
    with pytest.raises(MethodError, match="no rows of its own"):
        aligned_rows(
            SplitPassive(
                SplitConfig(embedding_dim=WIDTH),
                ClientContext(id=4, network=lambda: nn.Linear(2, WIDTH)),
            )
        )
