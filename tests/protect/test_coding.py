"""Shorter messages: their bytes, what is lost on the way, and what a sender can't do with them."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from fedloom.core import message
from fedloom.core.engine import reply_problem
from fedloom.core.errors import MessageError
from fedloom.methods.distillation.steps import mean_of_others
from fedloom.protect.coding import LARGEST, Coding, decode, encode, like

B = 7
WAYS: list[tuple[Coding, int | None]] = [
    ("float32", None),
    ("float16", None),
    ("int8", None),
    ("top-k", 1),
    ("top-k", 3),
    ("top-k", 50),
]
eval_modes = pytest.mark.parametrize(("coding", "k"), WAYS)
scales = st.floats(-25, 3).map(lambda power: 10**power)
seeds = st.integers(0, 2**31)


def rows(width: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(B, width, generator=torch.Generator().manual_seed(seed))


def there(x: Tensor, coding: Coding, k: int | None = None) -> Tensor:
    """What arrives, after the bytes that go over a wire."""
    crossed: Any = message.decode(message.encode(encode(x, coding, k)))
    return decode(crossed, coding, x.shape[-1])


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 10, 256, 257, 40_000])
@eval_modes
def test_bytes_of_a_row_are_those_of_the_table(width: int, coding: Coding, k: int | None) -> None:
    most = min(k or 0, width)
    place = 1 if width <= 256 else 2 if width <= 32_768 else 4
    table = {
        "float32": 4 * width,
        "float16": 2 * width,
        "int8": width + 4,
        "top-k": (2 + place) * most + 2,
    }
    sent = encode(rows(width), coding, k)
    assert message.size(sent).payload == B * table[coding]
    message.check_like(sent, like(B, width, coding, k))
    assert there(rows(width), coding, k).shape == (B, width)


def test_a_message_of_another_coding_or_shape_does_not_fit() -> None:
    sent = {eval_mode: encode(rows(10), *eval_mode) for eval_mode in WAYS}
    for eval_mode in WAYS:
        for other in WAYS:
            if eval_mode != other:
                with pytest.raises(MessageError):
                    message.check_like(sent[other], like(B, 10, *eval_mode))
        with pytest.raises(MessageError):
            message.check_like(sent[eval_mode], like(B + 1, 10, *eval_mode))
        with pytest.raises(MessageError):
            message.check_like(sent[eval_mode], like(B, 300, *eval_mode))


# -- what is lost ----------------------------------------------------------------------------------


def test_float32_crosses_bit_for_bit() -> None:
    x = torch.cat(
        [rows(10), torch.tensor([[0.0, -0.0, 1e-45, -1e-38, LARGEST, -LARGEST, 1, -1, 3, 0.1]])]
    )
    assert encode(x, "float32") is x
    assert torch.equal(decode(x, "float32", 10).view(torch.int32), x.view(torch.int32))


@given(width=st.integers(1, 20), seed=seeds, scale=scales)
def test_float16_is_off_by_its_rounding(width: int, seed: int, scale: float) -> None:
    x = rows(width, seed, scale)
    assert ((there(x, "float16") - x).abs() <= x.abs() * 2**-11 + 2**-25).all()


@given(width=st.integers(1, 20), seed=seeds, scale=st.floats(-45, 38).map(lambda power: 10**power))
def test_int8_is_off_by_half_a_step(width: int, seed: int, scale: float) -> None:
    x = rows(width, seed, scale).clamp(-LARGEST, LARGEST)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((there(x, "int8") - x).abs() <= 0.50001 * step + torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -7.25, 3e-39, -1e30])
def test_equal_numbers_stay_equal(value: float) -> None:
    x = torch.full((B, 10), value)
    for coding, k in WAYS:
        if coding in ("float32", "int8") or abs(value) < 6e4:
            y = there(x, coding, k)
            assert (
                torch.equal(y, y[:, :1].expand_as(y))
                and (y[0, 0] - value).abs() <= 1e-3 * abs(value) + 1e-38
            )


@given(width=st.integers(2, 30), k=st.integers(1, 35), seed=seeds, scale=st.floats(0, 30))
def test_softmax_of_top_k_gives_the_k_and_the_rest_their_shares(
    width: int, k: int, seed: int, scale: float
) -> None:
    x = rows(width, seed, scale)
    y = there(x, "top-k", k)
    before, after = x.double().log_softmax(-1), y.double().log_softmax(-1)
    places = x.topk(min(k, width), -1).indices
    most = 2 * (x.abs().amax() + 4).item() * 2**-11  # twice the rounding of a logit
    assert (after - before).gather(-1, places).abs().max() <= most
    if k < width:
        rest = torch.ones_like(x, dtype=torch.bool).scatter(-1, places, False)
        shares = [p.masked_fill(~rest, -torch.inf).logsumexp(-1) for p in (before, after)]
        assert (shares[1] - shares[0]).abs().max() <= most
        flat = y.masked_fill(~rest, torch.nan)
        assert torch.equal(
            flat.nan_to_num(-torch.inf).amax(-1), flat.nan_to_num(torch.inf).amin(-1)
        )


@pytest.mark.parametrize("k", [1, 2, 9])
def test_top_k_of_two_classes_loses_only_the_rounding(k: int) -> None:
    x = rows(2)
    assert torch.equal(there(x, "top-k", k), x.half().float())


@eval_modes
def test_parties_done_together_send_what_each_would_send(coding: Coding, k: int | None) -> None:
    x = torch.stack([rows(10, seed) for seed in range(4)])

    def both(x: Tensor) -> tuple[Any, Tensor]:
        sent = encode(x, coding, k)
        return sent, decode(sent, coding, 10)

    together = vmap(both)(x)
    for n, own in enumerate(x):
        apart = both(own)
        own_of = message.map_tensors(itemgetter(n), list(together))
        for (_, a), (_, b) in zip(message.leaves(list(apart)), message.leaves(own_of), strict=True):
            assert isinstance(a, Tensor) and isinstance(b, Tensor)
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("n", [2, 3, 10])
@pytest.mark.parametrize("coding", ["float16", "int8"])
def test_a_client_taken_out_of_a_rounded_mean_leaves_its_rounding_times_n_over_n_less_1(
    coding: Coding, n: int
) -> None:
    seen = torch.stack([there(rows(10, seed), coding) for seed in range(n)]).double()
    mean = seen.mean(0)
    rounding = {"float16": mean.abs() * 2**-11, "int8": mean.abs().amax(-1, keepdim=True) / 254}[
        coding
    ]
    arrived = there(mean.float(), coding).double()
    for own in range(n):
        others = seen[[m for m in range(n) if m != own]].mean(0)
        assert (
            (mean_of_others(seen[own], arrived, n) - others).abs()
            <= 1.001 * rounding * n / (n - 1) + 1e-5
        ).all()


# -- senders who mean no good ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@eval_modes
def test_what_is_not_finite_is_refused(bad: float, coding: Coding, k: int | None) -> None:
    x = rows(10)
    x[2, 3] = bad
    sent = encode(x, coding, k)
    # a place that never wins: it has no share
    lost = coding == "top-k" and k != 50 and bad == -torch.inf
    failure = reply_problem(sent, like(B, 10, coding, k))
    assert lost or (failure is not None and failure.reason == "not finite")


@pytest.mark.parametrize(("coding", "k"), [("float16", None), ("top-k", 1), ("top-k", 3)])
def test_what_float16_cannot_hold_is_refused(coding: Coding, k: int | None) -> None:
    x = rows(10)
    x[2, 3] = 66_000.0
    failure = reply_problem(encode(x, coding, k), like(B, 10, coding, k))
    assert failure is not None and failure.reason == "not finite"
    x[2, 3] = 65_504.0
    assert reply_problem(encode(x, coding, k), like(B, 10, coding, k)) is None


HUGE = torch.finfo(torch.float32).max
MEAN: list[tuple[Coding, int | None, Any]] = [
    ("float32", None, torch.full((B, 10), HUGE)),
    ("float16", None, torch.full((B, 10), 65_504.0).half()),
    (
        "int8",
        None,
        {"steps": torch.full((B, 10), -128, dtype=torch.int8), "scale": torch.full((B,), -HUGE)},
    ),
    (
        "int8",
        None,
        {"steps": torch.full((B, 10), 127, dtype=torch.int8), "scale": torch.full((B,), HUGE)},
    ),
    (
        "top-k",
        3,
        {
            "values": torch.full((B, 3), -65_504.0).half(),
            "places": torch.full((B, 3), 255, dtype=torch.uint8),
            "left": torch.full((B,), 65_504.0).half(),
        },
    ),
]


@pytest.mark.parametrize(("coding", "k", "sent"), MEAN)
def test_no_finite_message_makes_a_mean_infinite(coding: Coding, k: int | None, sent: Any) -> None:
    # it is a message, so it must be harmless
    assert reply_problem(sent, like(B, 10, coding, k)) is None
    evil = decode(sent, coding, 10)
    assert evil.isfinite().all() and evil.abs().max() <= LARGEST
    for n in (2, 10, 1000):
        mean = torch.stack([evil] * (n - 1) + [rows(10)]).mean(0)
        down: Coding = "float16" if coding == "top-k" else coding
        back = encode(mean, down)
        message.check_finite(back)
        target = mean_of_others(rows(10), decode(back, down, 10), n).softmax(-1)
        assert target.isfinite().all()


def test_places_outside_a_row_fall_inside_it() -> None:
    places = torch.tensor([[-1], [-32_768], [32_767], [300], [299], [0], [5]], dtype=torch.int16)
    sent = {"values": torch.ones(B, 1).half(), "places": places, "left": torch.zeros(B).half()}
    message.check_like(sent, like(B, 300, "top-k", 1))
    assert decode(sent, "top-k", 300).argmax(-1).tolist() == [int(p) % 300 for p in places]
