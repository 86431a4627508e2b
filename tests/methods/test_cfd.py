"""CFD's page against its paper: the two steps, labels in few bits, delta coding, bytes, order,
faults.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import ClientContext, PublicSet
from fedloom.core.errors import ConfigError, MessageError
from fedloom.core.faults import Faults
from fedloom.core.losses import kl, kl_gradient
from fedloom.core.message import Tree
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.methods.distillation.cfd import CFDClient, CFDServer
from fedloom.protect.labels import (
    changes,
    checked,
    merged,
    pack,
    probabilities,
    quantized,
    size_of,
    unpack,
)
from tests.toy import CLASSES, FEATURES, Toy, combined, contexts, equal, network, rows

CFD, LOCAL = methods.find("cfd"), methods.find("local")
BOTH: dict[str, Any] = {"bits": 2, "bits_down": 3}
DELTA: dict[str, Any] = {**BOTH, "delta_coding": True}


def toy(
    n: int = 4, client_contexts: list[ClientContext] | None = None, method: Any = CFD, **params: Any
) -> Toy:
    """CFD on the toy federation: batches of 8, and a server with the public rows and a network of
    its own.
    """
    client_contexts = client_contexts or contexts(n)
    server_side = {"public": client_contexts[0].public, "network": lambda: network(7)}
    return Toy(
        method,
        client_contexts=client_contexts,
        server_side=server_side,
        **{"batch_size": 8, **params},
    )


def some_labels(n: int, bits: int, seed: int = 0, classes: int = CLASSES) -> Tensor:
    logits = 3 * torch.randn(n, classes, generator=torch.Generator().manual_seed(seed))
    return quantized(F.softmax(logits, -1), bits)


# -- labels in few bits ----------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4).filter(lambda w: sum(w) > 1e-3),
    bits=st.integers(1, 3),
)
def test_no_labels_are_nearer_to_the_probabilities(weights: list[float], bits: int) -> None:
    """Against all points of the grid that sum to 1."""
    p, steps = np.array(weights) / sum(weights), 2**bits - 1
    found = quantized(torch.from_numpy(p)[None], bits)[0].numpy()
    grid = [g for g in itertools.product(range(steps + 1), repeat=len(p)) if sum(g) == steps]
    assert found.sum() == steps
    assert (
        np.abs(found / steps - p).sum()
        <= min(np.abs(np.array(g) / steps - p).sum() for g in grid) + 1e-12
    )


def test_one_bit_is_the_predicted_class() -> None:
    p = F.softmax(torch.randn(200, 10, generator=torch.Generator().manual_seed(1)), -1)
    assert torch.equal(quantized(p, 1), F.one_hot(p.argmax(-1), 10).to(torch.uint8))
    assert torch.equal(quantized(torch.eye(3), 1), torch.eye(3, dtype=torch.uint8))
    assert quantized(torch.full((1, 4), 0.25), 1).tolist() == [[1, 0, 0, 0]]  # of equals the first


def test_eight_bits_lose_little_and_every_row_sums_to_one() -> None:
    p = F.softmax(8 * torch.randn(2000, 100, generator=torch.Generator().manual_seed(1)), -1)
    labels = quantized(p, 8)
    assert (labels.sum(-1) == 255).all()
    assert (probabilities(labels) - p).abs().max() < 1 / 255


def test_a_row_that_is_not_finite_has_no_labels() -> None:
    labels = quantized(torch.tensor([[0.5, 0.5], [torch.nan, 0.5]]), 2)
    assert labels.tolist() == [[2, 1], [0, 0]]
    with pytest.raises(MessageError, match="must sum to 3"):
        checked(labels, 2)


@given(
    n=st.integers(0, 9), width=st.integers(1, 11), bits=st.integers(1, 8), seed=st.integers(0, 9)
)
def test_packing_is_the_bits_in_order_and_comes_back(
    n: int, width: int, bits: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed).integers(2**bits, size=(n, width)).astype(np.uint8)
    packed = pack(torch.from_numpy(numbers), bits)
    assert len(packed) == size_of(n * width, bits) == -(-n * width * bits // 8)
    assert np.array_equal(
        packed.numpy(), np.packbits(np.unpackbits(numbers[..., None], axis=-1)[..., 8 - bits :])
    )
    assert np.array_equal(unpack(packed, bits, n, width).numpy(), numbers)
    with pytest.raises(MessageError, match="bytes"):
        unpack(torch.cat([packed, packed.new_zeros(1)]), bits, n, width)


def test_only_what_changed_crosses() -> None:
    known, labels = some_labels(9, 3), some_labels(9, 3)
    labels[[2, 7]] = labels[[2, 7]].roll(1, -1)  # no row of four with the sum 7 is itself again
    message = changes(labels, known, 3)
    assert unpack(message["changed"], 1, 9, 1)[:, 0].nonzero()[:, 0].tolist() == [2, 7]
    assert len(message["rows"]) == size_of(2 * CLASSES, 3)
    assert torch.equal(merged(message, known, 3), labels)
    assert not len(changes(labels, labels, 3)["rows"])
    assert torch.equal(
        merged(changes(labels, torch.zeros_like(labels), 3), torch.zeros_like(labels), 3), labels
    )


def test_changes_that_do_not_fit_are_refused() -> None:
    known, labels = some_labels(8, 2), some_labels(8, 2, seed=1)
    message = changes(labels, torch.zeros_like(known), 2)
    with pytest.raises(MessageError, match="bytes"):
        merged({**message, "changed": message["changed"][:0]}, known, 2)
    with pytest.raises(MessageError, match="bytes"):
        merged({**message, "rows": message["rows"][1:]}, known, 2)
    with pytest.raises(MessageError, match="sum"):
        merged({**message, "rows": ~message["rows"]}, known, 2)
    # a row is called unchanged, but nothing is known of it
    with pytest.raises(MessageError, match="sum"):
        merged(changes(labels, labels, 2), torch.zeros_like(known), 2)


@pytest.mark.parametrize("bits", [None, 1, 3])
def test_gradient_of_kl_to_labels_with_zeros(bits: int | None) -> None:
    """What both descend along, in float64."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(8, CLASSES, generator=generator, dtype=torch.float64).requires_grad_()
    p = F.softmax(3 * torch.randn(8, CLASSES, generator=generator, dtype=torch.float64), -1)
    target = p if bits is None else quantized(p, bits).double() / (2**bits - 1)
    (auto,) = torch.autograd.grad(kl(target, z), z)
    assert (auto - kl_gradient(target, z) / 8).abs().max() < 1e-16


# -- one round, against plain torch ----------------------------------------------------------------


def hand_quantized(p: np.ndarray, bits: int) -> np.ndarray:
    """The largest remainders go up, row by row."""
    steps, found = 2**bits - 1, np.floor(p * (2**bits - 1))
    for row, scaled in zip(found, p * steps, strict=True):
        for _ in range(int(steps - row.sum())):
            row[np.argmax(scaled - row)] += 1
    return found / steps


@pytest.mark.parametrize("params", [{}, BOTH, DELTA], ids=["floats", "bits", "delta"])
def test_rounds_by_plain_torch(params: dict[str, Any]) -> None:
    """Two rounds of two steps each, with three steps of the server, by torch's own Adam and KL."""
    client_contexts = contexts(3)
    run = toy(
        client_contexts=client_contexts, tau=2, server_steps=3, server_lr=0.01, lr=0.02, **params
    ).run(2)
    nets, g = [network(n) for n in range(3)], network(7)
    opts = [torch.optim.Adam(net.parameters(), lr=0.02) for net in nets]
    learns = torch.optim.Adam(g.parameters(), lr=0.01)

    def step(optimizer: torch.optim.Adam, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def sent(net: nn.Module, x: Tensor, bits: int | None) -> Tensor:
        p = F.softmax(net(x), -1).detach()
        return p if bits is None else torch.from_numpy(hand_quantized(p.numpy(), bits)).float()

    for t in range(2):
        for context, net, opt in zip(client_contexts, nets, opts, strict=True):
            for x, y in context.batches(t, steps=2, size=8):
                step(opt, F.cross_entropy(net(x), y))
        assert client_contexts[0].public is not None
        for x in client_contexts[0].public.batches(t, 2, 8):
            mean = torch.stack([sent(net, x, params.get("bits")) for net in nets]).mean(0)
            for _ in range(3):
                step(learns, F.kl_div(F.log_softmax(g(x), -1), mean, reduction="batchmean"))
            target = sent(g, x, params.get("bits_down"))
            for net, opt in zip(nets, opts, strict=True):
                step(opt, F.kl_div(F.log_softmax(net(x), -1), target, reduction="batchmean"))
    after = run.tensors()
    for n, net in enumerate(nets):
        for name, p in net.named_parameters():
            assert torch.allclose(after[f"{n}.{name}"], p, atol=2e-6), (n, name)
    for name, p in g.named_parameters():
        assert torch.allclose(after[f"server.params.{name}"], p, atol=2e-6), name


def test_everybody_changes() -> None:
    run = toy()
    start = run.tensors()
    after = run.run(1).tensors()
    assert all(not torch.equal(start[k], after[k]) for k in start if start[k].numel())


def test_the_server_comes_to_answer_as_the_clients_do() -> None:
    server: Any = toy(server_steps=300, server_lr=0.02).server
    answers = {
        n: F.softmax(torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(n)), -1)
        for n in range(3)
    }
    server.learn(combined(answers), t=0, i=0)
    shared, each = server.teach(answers, t=0, i=0)
    assert not each
    assert kl(torch.stack([*answers.values()]).mean(0), shared["labels"]) < 0.01


def test_nothing_is_learned_from_a_server_that_agrees() -> None:
    """Where g answers as the client does its step is 0; another answer moves it."""
    run = toy(1)
    client, start = run.party(0), run.tensors()
    labels = client.predict(t=0, i=0)
    client.distil(t=0, i=0, labels=labels.clone())
    assert equal(start, run.tensors())
    client.distil(t=0, i=0, labels=labels.roll(1, -1))
    assert not equal(start, run.tensors())


# -- delta coding ----------------------------------------------------------------------------------


def volumes(run: Toy) -> tuple[int, int]:
    return run.fed.ledger.received("server"), run.fed.ledger.sent("server")


@pytest.mark.parametrize("bits", [{"bits": 1, "bits_down": 1}, BOTH], ids=["one bit", "more"])
def test_delta_coding_changes_bytes_and_nothing_else(bits: dict[str, Any]) -> None:
    plain, delta = toy(**bits, tau=2).run(15), toy(**bits, tau=2, delta_coding=True).run(15)
    models = {k: v for k, v in delta.tensors().items() if "held" not in k and "told" not in k}
    assert equal({k: v for k, v in plain.tensors().items() if k in models}, models)
    assert all(d < 0.8 * p for d, p in zip(volumes(delta), volumes(plain), strict=True))


@pytest.mark.parametrize("fault", ["dropout", "crash", "late", "shape", "type"])
def test_delta_coding_stays_exact_where_messages_are_lost(fault: str) -> None:
    """Both sides' memories would differ for good if one side believed in a message
    that never came.
    """
    faults = Faults(**{fault: 0.25})
    runs = [
        toy(**BOTH, faults=faults, tau=2, clients_per_round=3, delta_coding=delta).run(9)
        for delta in (False, True)
    ]
    assert runs[0].fed.failures
    assert [(f.round, f.party, f.kind) for f in runs[0].fed.failures] == [
        (f.round, f.party, f.kind) for f in runs[1].fed.failures
    ]
    a, b = (
        {k: v for k, v in r.tensors().items() if "held" not in k and "told" not in k} for r in runs
    )
    assert equal(a, b)
    assert all(d < p for d, p in zip(volumes(runs[1]), volumes(runs[0]), strict=True))


def test_both_sides_remember_the_same() -> None:
    run = toy(**DELTA).run(12)
    server: Any = run.server
    for n in range(4):
        assert torch.equal(run.party(n).sent, server.held[n])
        assert torch.equal(run.party(n).received, server.told[n])
    seen = torch.cat(
        [PublicSet(rows(64, 77), 0, "").plan(t, 1, 8).flatten() for t in range(12)]
    ).unique()
    known = server.held[0].sum(-1).nonzero()[:, 0]
    assert torch.equal(known, seen) and len(seen) < 64


def test_one_direction_alone_can_be_quantized() -> None:
    up, down = toy(bits=1, delta_coding=True).run(2), toy(bits_down=1, delta_coding=True).run(2)
    float_bytes = 4 * 8 * CLASSES * 4 * 2
    assert volumes(up)[1] == volumes(down)[0] == float_bytes
    assert volumes(up)[0] < float_bytes / 20 and volumes(down)[1] < float_bytes / 20
    assert not up.party(0).received.numel() and not down.party(0).sent.numel()


# -- bytes, who sees what --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "up", "down"),
    [
        ({}, 8 * CLASSES * 4, 8 * CLASSES * 4),
        ({"bits": 1}, CLASSES, 8 * CLASSES * 4),
        ({"bits": 1, "bits_down": 1}, CLASSES, CLASSES),
        ({"bits": 3, "bits_down": 8}, 8 * CLASSES * 3 // 8, 8 * CLASSES),
        ({"coding": "int8"}, 8 * (CLASSES + 4), 8 * (CLASSES + 4)),
        ({"coding": "float16"}, 8 * CLASSES * 2, 8 * CLASSES * 2),
        ({"coding": "top-k", "top_k": 2}, 8 * (3 * 2 + 2), 8 * CLASSES * 2),
        ({"coding": "float16", "bits_down": 1}, 8 * CLASSES * 2, CLASSES),
        ({"coding": "top-k", "top_k": 2, "bits_down": 2}, 8 * (3 * 2 + 2), 2 * CLASSES),
    ],
    ids=str,
)
def test_bytes_are_exactly_those_of_the_labels(params: dict[str, Any], up: int, down: int) -> None:
    run = toy(**params, tau=3).run(2)
    assert volumes(run) == (4 * 3 * 2 * up, 4 * 3 * 2 * down)


def test_bits_that_fill_no_byte_are_rounded_up_once_a_message() -> None:
    run = toy(bits=3, batch_size=5, delta_coding=True).run(1)
    # all rows are new: their mask, and all of them
    assert volumes(run)[0] == 4 * (1 + -(-5 * CLASSES * 3 // 8))


def test_only_labels_cross() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, f"float32[8,{CLASSES}]", f"labels float32[8,{CLASSES}]"),
        ({"bits": 1, "bits_down": 2}, f"uint8[{CLASSES}]", f"labels uint8[{2 * CLASSES}]"),
    ]
    for params, up, down in cases:
        entries = [*toy(**params).run(2).fed.ledger]
        assert {e.what for e in entries if e.receiver == "server"} == {"none", up}
        assert {e.what for e in entries if e.sender == "server"} == {
            "t int",
            "t int; i int",
            f"t int; i int; {down}",
        }
    delta = {e.what.split("[")[0] for e in toy(**DELTA).run(2).fed.ledger if e.receiver == "server"}
    assert delta == {"none", "changed uint8"}


# -- engines, order, participation -----------------------------------------------------------------


@pytest.mark.each_time("plain-{}", "batchnorm-*delta*", "plain-*int8*")
@pytest.mark.parametrize("params", [{}, BOTH, DELTA, {"coding": "int8"}], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
def test_engines_agree_to_the_bit(params: dict[str, Any], norm: bool) -> None:
    client_contexts = contexts(3, make=lambda n: network(n, norm=norm))
    loop = toy(client_contexts=client_contexts, tau=2, **params).run(3)
    strict = toy(client_contexts=client_contexts, tau=2, isolated=True, **params).run(3)
    assert equal(loop.tensors(), strict.tensors())
    assert loop.fed.ledger.state() == strict.fed.ledger.state()


@pytest.mark.parametrize("params", [{}, BOTH, {"coding": "top-k", "top_k": 2}], ids=str)
def test_clients_of_one_architecture_are_done_together(params: dict[str, Any]) -> None:
    client_contexts = contexts(4, make=lambda n: network(1))
    loop, together = (
        toy(client_contexts=client_contexts, **params).run(3),
        toy(client_contexts=client_contexts, batched=True, **params).run(3),
    )
    assert together.engine.account().remarks == ("4 of 4 parties together, in groups: 1",)
    a, b = loop.tensors(), together.tensors()
    assert all(torch.allclose(a[k].float(), b[k].float(), atol=1e-5) for k in a)


def test_delta_coding_is_done_in_turn_and_gives_the_same() -> None:
    client_contexts = contexts(4, make=lambda n: network(1))
    loop, together = (
        toy(client_contexts=client_contexts, **DELTA).run(3),
        toy(client_contexts=client_contexts, batched=True, **DELTA).run(3),
    )
    assert any("predict in turn" in remark for remark in together.engine.account().remarks)
    a, b = loop.tensors(), together.tensors()
    assert all(torch.allclose(a[k].float(), b[k].float(), atol=1e-5) for k in a)


def test_partial_participation_trains_only_the_sampled() -> None:
    run = toy(6, clients_per_round=2)
    start = run.tensors()
    after = run.run(1).tensors()
    changed = {k.split(".")[0] for k in start if not torch.equal(start[k], after[k])} - {"server"}
    assert changed == {str(i) for i in run.fed.sample(range(6), 2, 0)}


def test_renaming_the_clients_renames_the_result() -> None:
    plain, order = contexts(3), [2, 0, 1]
    a, b = (
        toy(client_contexts=plain, tau=2).run(3).tensors(),
        toy(client_contexts=[plain[i] for i in order], tau=2).run(3).tensors(),
    )
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["dropout", "crash", "nan", "inf", "shape", "type", "late"])
def test_a_fault_is_counted_and_poisons_nothing(fault: str) -> None:
    run = toy(5, faults=Faults(**{fault: 0.3})).run(6)
    assert run.fed.failures
    assert all(torch.isfinite(v).all() for v in run.tensors().values())


@pytest.mark.parametrize("params", [{}, BOTH, DELTA], ids=["floats", "bits", "delta"])
def test_a_nan_client_is_left_out(params: dict[str, Any]) -> None:
    client_contexts = contexts(4)
    run = toy(client_contexts=client_contexts, **params)
    with torch.no_grad():
        run.party(3).net.flat.fill_(float("nan"))
    run.run(3)
    # as if the sick client were not there
    alone = toy(client_contexts=client_contexts[:3], **params).run(3).tensors()
    after = run.tensors()
    assert all(
        torch.equal(v, after[k]) for k, v in alone.items() if "held" not in k and "told" not in k
    )


class Liar(CFDClient):  # type: ignore[misc]  # of a page, so final; here it lies on purpose
    """Client 1 sends as many bytes as it should, which are no labels."""

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        sent = super().predict(t=t, i=i, anew=anew)
        if self.context.id != 1:
            return sent
        if isinstance(sent, Tensor):
            return torch.full_like(sent, 255)
        assert isinstance(sent, dict)
        return {**sent, "rows": torch.full((t,), 255, dtype=torch.uint8)}


@pytest.mark.parametrize("params", [BOTH, DELTA], ids=["bits", "delta"])
def test_bytes_that_are_no_labels_are_left_out(params: dict[str, Any]) -> None:
    client_contexts = contexts(3)
    run = toy(client_contexts=client_contexts, method=replace(CFD, client=Liar), **params).run(4)
    assert {(f.party, f.kind, f.reason) for f in run.fed.failures} == {
        ("client-1", "predict", "refused")
    }
    honest = toy(client_contexts=client_contexts, **params).run(4, present=[0, 2]).tensors()
    after = run.tensors()
    assert all(torch.equal(v, after[k]) for k, v in honest.items() if not k.startswith("1."))


class Liars(CFDClient):  # type: ignore[misc]  # likewise
    """Nobody sends labels."""

    def predict(self, *, t: int, i: int, anew: bool = False) -> Tree:
        return torch.zeros(size_of(8 * CLASSES, 2), dtype=torch.uint8)


def test_without_any_labels_everybody_continues_alone() -> None:
    client_contexts = contexts(3)
    run = toy(client_contexts=client_contexts, method=replace(CFD, client=Liars), **BOTH).run(2)
    reasons = [f.reason for f in run.fed.failures]
    assert reasons.count("refused") == 6 and reasons.count("fewer than 1 replies") == 2
    alone = Toy(LOCAL, client_contexts=client_contexts, batch_size=8, tau=1).run(2).tensors()
    after = run.tensors()
    assert all(torch.equal(v, after[k]) for k, v in alone.items() if not k.startswith("server"))


# -- config, places --------------------------------------------------------------------------------


def test_the_paper_sends_one_bit_and_only_what_changed() -> None:
    paper, ours = CFD.configure("paper"), CFD.configure()
    assert (paper.bits, paper.bits_down, paper.delta_coding) == (1, None, True)
    assert (ours.bits, ours.bits_down, ours.delta_coding, ours.tau, ours.server_steps) == (
        None,
        None,
        False,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"bits": 9}, "params.bits"),
        ({"bits": 1, "coding": "int8"}, 'set coding = "float32"'),
        ({"bits": 1, "bits_down": 1, "coding": "float16"}, 'set coding = "float32"'),
        ({"delta_coding": True}, "set params.bits or params.bits_down"),
        ({"server_steps": 0}, "params.server_steps"),
        ({"bit": 1}, "Did you mean 'bits'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CFD.configure(params=params)


def test_delta_coding_needs_each_row_once_in_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"data\.public"):
        toy(bits=1, delta_coding=True, batch_size=65)
    assert volumes(toy(bits=1, batch_size=65).run(1))[0] == 4 * -(-65 * CLASSES // 8)


def test_the_rows_of_a_public_batch_are_known_by_number() -> None:
    public = PublicSet(rows(64, 77), 3, "toy")
    plan = public.plan(5, 2, 8)
    assert plan.shape == (2, 8)
    assert torch.equal(
        public.rows.x(plan.flatten()).view(2, 8, FEATURES), torch.stack(public.batches(5, 2, 8))
    )
    client = toy().party(2)
    assert torch.equal(client.public_rows(1, steps=2, size=8), client.context.public.plan(1, 2, 8))


@pytest.mark.parametrize("name", ["cfd", "fedal"])
def test_a_server_holds_the_public_rows_where_its_method_is_reported(name: str) -> None:
    run = RunConfig(method=name, rounds=1, data={"name": "wine", "clients": 3, "public_rows": 40})
    small = build(run)
    assert small.server is not None and (small.server.context.public is not None) == (name == "cfd")


def test_networks_of_server_and_clients_are_their_own() -> None:
    small = build(
        RunConfig(method="cfd", rounds=1, data={"name": "wine", "clients": 2, "public_rows": 40})
    )
    server, first = small.server, small.clients[0]()
    assert isinstance(server, CFDServer)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(server.params.values(), first.params.values(), strict=True)
    )
