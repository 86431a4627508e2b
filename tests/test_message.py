from __future__ import annotations

import enum
import io
import json
import math
import pickle
import struct
import time
import tracemalloc
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import message
from fedloom.core.errors import MessageError
from fedloom.core.message import (
    DEFAULT,
    Limits,
    Shape,
    Size,
    check,
    check_finite,
    check_like,
    decode,
    describe,
    encode,
    floats,
    leaves,
    map_tensors,
    size,
    weighted_mean,
)

EXAMPLE: dict[str, Any] = {
    "logits": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "t": 3,
    "rest": [True, None, -0.5, "née", {}, (torch.tensor([1, 2], dtype=torch.int8),)],
}


def same(a: Any, b: Any) -> bool:
    """Equal trees: types, key order, dtypes, shapes and bits; a tuple equals a list."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return (
            isinstance(b, list | tuple)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return type(a) is type(b) and repr(a) == repr(b)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def blob(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    """A message made by hand."""
    raw = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def head(tree: str, **tensors: Any) -> dict[str, Any]:
    return {"__metadata__": {"format": "fedloom/1", "tree": tree}} | tensors


def f32(*shape: Any, end: int, start: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


# --- strategies -------------------------------------------------------------------------------

names = st.text(max_size=12).filter(
    lambda s: not s.startswith("$") and s.isascii() | (s.encode(errors="replace").decode() == s)
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DEFAULT.dtypes))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    raw = bytearray(
        draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    )
    if dtype == torch.bool:
        raw = bytearray(b & 1 for b in raw)
    tensor = torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    return tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(names, children, max_size=4),
    )


trees = st.recursive(plain | tensors(), containers, max_leaves=12)


# --- encode and decode ------------------------------------------------------------------------


@settings(max_examples=200)
@given(trees)
def test_round_trip(tree: Any) -> None:
    data = encode(tree)
    back = decode(data)
    assert same(back, tree)
    assert encode(back) == data
    payload = sum(x.nbytes for _, x in leaves(tree) if isinstance(x, Tensor))
    assert size(tree) == size(back) == Size(payload, len(data))


def test_the_bytes_are_these() -> None:
    """The format is a promise to other versions: spelled out once, by hand."""
    data = encode({"a": torch.tensor([1, 2], dtype=torch.int8), "b": [0.5, torch.tensor(1.0)]})
    header = (
        b'{"__metadata__":{"format":"fedloom/1",'
        b'"tree":"{\\"a\\":{\\"$tensor\\":0},\\"b\\":[0.5,{\\"$tensor\\":1}]}"},'
        b'"0":{"dtype":"I8","shape":[2],"data_offsets":[4,6]},'
        b'"1":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
    )
    header += b" " * (-len(header) % 8)
    assert data == struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0) + b"\1\2"


def test_any_safetensors_reader_can_read_it() -> None:
    found = safetensors.torch.load(encode(EXAMPLE))
    assert set(found) == {"0", "1"}
    assert torch.equal(found["0"], EXAMPLE["logits"])
    assert found["1"].tolist() == [1, 2] and found["1"].dtype == torch.int8


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoded_tensors_are_private_writable_and_aligned(kind: Any) -> None:
    tree = [
        torch.ones(3, dtype=torch.int8),
        torch.ones(3, dtype=torch.float64),
        torch.ones(1, dtype=torch.bool),
        torch.ones(5, dtype=torch.float16),
    ]
    source = bytearray(encode(tree))
    back = decode(kind(source))
    for tensor in back:
        assert tensor.data_ptr() % tensor.element_size() == 0
        tensor.zero_()
    assert same(decode(source), tree)


def test_views_gradients_and_parameters_are_encoded_by_value() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    lazy = torch.complex(base, base).conj().imag[0, 1]  # a view that is negated when read
    assert lazy.is_neg() and lazy.is_contiguous()
    odd = [base.T, base[:, ::2], base[0, 0].expand(3), torch.nn.Parameter(base), lazy]
    back: Any = decode(encode(odd))
    assert all(torch.equal(x, y) for x, y in zip(odd, back, strict=True))
    assert not any(x.requires_grad for x in back)
    assert back[4].item() == -1


def test_tuples_arrive_as_lists_and_order_is_kept() -> None:
    back = decode(encode(OrderedDict(z=(1, (2,)), a=2)))
    assert back == {"z": [1, [2]], "a": 2} and list(back) == ["z", "a"]
    assert encode({"a": 1, "b": 2}) != encode({"b": 2, "a": 1})


def test_nothing_is_lost_in_numbers() -> None:
    tree = [True, 1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, 2**63 - 1, -(2**63), 0.1 + 0.2]
    assert same(decode(encode(tree)), tree)


def test_nan_travels_in_tensors() -> None:
    tree = [torch.tensor([math.nan, math.inf, -math.inf, -0.0])]
    assert same(decode(encode(tree)), tree)


# --- what may be sent -------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 1


def nest(depth: int, leaf: Any = 1) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


BAD: list[tuple[Any, str, str]] = [
    ({"reply": {"weights": [1, 2, 3, object()]}}, "reply.weights[3]", "builtins.object"),
    ({"x": np.float64(1.0)}, "x", "numpy.float64"),
    ({"x": np.ones(2)}, "x", "numpy.ndarray"),
    ({"x": Color.RED}, "x", "Color"),
    ({"x": 1j}, "x", "complex"),
    ({"x": b"raw"}, "x", "bytes"),
    ({"x": {1, 2}}, "x", "set"),
    ({"x": torch.nn.Linear(1, 1)}, "x", "Linear"),
    ({"x": 2**63}, "x", "64 bits"),
    ({"x": -(2**63) - 1}, "x", "64 bits"),
    ({"x": math.nan}, "x", "finite"),
    ({"x": [math.inf]}, "x[0]", "finite"),
    ({"x": "a\ud800"}, "x", "Unicode"),
    ({"x": "é" * 32_769}, "x", "65536"),
    ({"x": {1: 2}}, "x", "keys are str"),
    ({"x": {"$tensor": 0}}, "x", "'$'"),
    ({"x": {"\udfff": 0}}, "x", "Unicode"),
    ({"x": {"k" * 257: 0}}, "x", "256"),
    ({"x": torch.ones(2, 2).to_sparse()}, "x", "dense"),
    ({"x": torch.ones(2, device="meta")}, "x", "meta"),
    ({"x": torch.ones(2, dtype=torch.complex64)}, "x", "complex64"),
    ({"x": torch.ones([1] * 9)}, "x", "8 dimensions"),
    ({"x": nest(16)}, "x" + "[0]" * 15, "16 containers"),
]


@pytest.mark.parametrize(
    ("tree", "path", "why"), BAD, ids=lambda v: v if isinstance(v, str) else ""
)
def test_unfit_trees_are_refused_with_their_path(tree: Any, path: str, why: str) -> None:
    for function in (check, encode):
        with pytest.raises(MessageError) as caught:
            function(tree)
        assert repr(path) in str(caught.value) and why in str(caught.value)


def test_quantized_tensors_are_refused() -> None:
    with warnings.catch_warnings():  # newer versions of PyTorch deprecate them
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(MessageError, match="quantized"):
        check([tensor])


def test_the_limits_hold_on_both_sides_and_at_the_edge() -> None:
    tree: dict[str, Any] = {"abc": [torch.zeros(1, 2), 1, []]}
    data = encode(tree)
    exact = Limits(
        max_bytes=len(data),
        max_depth=2,
        max_leaves=3,
        max_name=3,
        max_ndim=2,
        dtypes=(torch.float32,),
    )
    assert encode(tree, exact) == data and same(decode(data, exact), tree)
    tighter: list[dict[str, Any]] = [
        {"max_bytes": len(data) - 1},
        {"max_depth": 1},
        {"max_leaves": 2},
        {"max_name": 2},
        {"max_ndim": 1},
        {"dtypes": (torch.int8,)},
    ]
    for change in tighter:
        with pytest.raises(MessageError):
            encode(tree, Limits(**change))
        with pytest.raises(MessageError):
            decode(data, Limits(**change))


def test_the_deepest_tree_passes() -> None:
    tree = nest(16, torch.ones(1))
    assert same(decode(encode(tree)), tree)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(MessageError, match="nest"):
        check(cyclic)


def test_a_header_that_no_one_would_read_is_not_written() -> None:
    with pytest.raises(MessageError, match="header"):
        encode(["x" * 65_536] * 257)


# --- what arrives -----------------------------------------------------------------------------

ONE = b"\0\0\x80\x3f"
TREE = '{"$tensor":0}'

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "no header": struct.pack("<Q", 0),
    "header beyond the end": struct.pack("<Q", 100) + b"{}",
    "header length of all ones": b"\xff" * 8 + b"{}",
    "not UTF-8": blob(b'{"__metadata__":"\xff"}'),
    "not JSON": blob(b"hello"),
    "UTF-16": blob('{"a":1}'.encode("utf-16")),
    "a list": blob(b"[]"),
    "a number": blob(b"1"),
    "no metadata": blob({"0": f32(1, end=4)}, ONE),
    "metadata is a list": blob({"__metadata__": []}),
    "another format": blob({"__metadata__": {"format": "pt", "tree": "1"}}),
    "no tree": blob({"__metadata__": {"format": "fedloom/1"}}),
    "tree is no text": blob({"__metadata__": {"format": "fedloom/1", "tree": 1}}),
    "tree is empty": blob(head("")),
    "more metadata": blob({"__metadata__": {"format": "fedloom/1", "tree": "1", "more": "1"}}),
    "deep header": blob(b"[" * 100_000),
    "deep closed header": blob(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "deep tree": blob(head("[" * 200_000 + "]" * 200_000)),
    "deep after a quote": blob(b'{"\\"":' + b"[" * 100_000),
    "tree too deep": blob(head("[" * 17 + "1" + "]" * 17)),
    "duplicate keys": blob(b'{"__metadata__":{},"__metadata__":{}}'),
    "duplicate keys in tree": blob(head('{"a":1,"a":1}')),
    "1e400": blob(head("1e400")),
    "-1e400": blob(head("[-1e400]")),
    "NaN": blob(head("NaN")),
    "Infinity": blob(head("-Infinity")),
    "int of 65 bits": blob(head("9223372036854775808")),
    "int of 5000 digits": blob(head("9" * 5000)),
    "int of 4000 digits": blob(head("9" * 4000)),
    "lone surrogate": blob(head('"\\ud800"')),
    "lone surrogate in JSON text": blob(
        b'{"__metadata__":{"format":"fedloom/1","tree":"\\ud800"}}'
    ),
    "spaces in tree": blob(head("[1, 2]")),
    "other spelling of a number": blob(head("1.50")),
    "spaces in header": blob(json.dumps(head("1")).encode()),
    "key with a dollar": blob(head('{"$a":1}')),
    "tensor key with company": blob(head('{"$tensor":0,"a":1}', **{"0": f32(1, end=4)}), ONE),
    "tensor that is not there": blob(head('{"$tensor":0}')),
    "tensor minus one": blob(head('{"$tensor":-1}', **{"0": f32(1, end=4)}), ONE),
    "tensor true": blob(head('{"$tensor":false}', **{"0": f32(1, end=4)}), ONE),
    "tensor text": blob(head('{"$tensor":"0"}', **{"0": f32(1, end=4)}), ONE),
    "tensor float": blob(head('{"$tensor":0.0}', **{"0": f32(1, end=4)}), ONE),
    "tensor twice": blob(head('[{"$tensor":0},{"$tensor":0}]', **{"0": f32(1, end=4)}), ONE),
    "tensor never": blob(head("[]", **{"0": f32(1, end=4)}), ONE),
    "tensors out of order": blob(
        head(
            '[{"$tensor":1},{"$tensor":0}]',
            **{"0": f32(1, end=4), "1": f32(1, start=4, end=8)},
        ),
        ONE * 2,
    ),
    "tensor by another name": blob(head(TREE, a=f32(1, end=4)), ONE),
    "tensor is a list": blob(head(TREE, **{"0": []}), ONE),
    "tensor without dtype": blob(head(TREE, **{"0": {"shape": [1], "data_offsets": [0, 4]}}), ONE),
    "unknown dtype": blob(head(TREE, **{"0": f32(1, end=4) | {"dtype": "F8_E4M3"}}), ONE),
    "dtype is a list": blob(head(TREE, **{"0": f32(1, end=4) | {"dtype": ["F32"]}}), ONE),
    "negative shape": blob(head(TREE, **{"0": f32(-1, -1, end=4)}), ONE),
    "bool in shape": blob(head(TREE, **{"0": f32(True, end=4)}), ONE),
    "float in shape": blob(head(TREE, **{"0": f32(1.0, end=4)}), ONE),
    "text for a shape": blob(head(TREE, **{"0": f32(end=4) | {"shape": "1"}}), ONE),
    "huge shape": blob(head(TREE, **{"0": f32(2**60, end=2**62)}), ONE),
    "huge shape, small offsets": blob(head(TREE, **{"0": f32(2**60, end=4)}), ONE),
    "shape that wraps round": blob(head(TREE, **{"0": f32(2**32, 2**32, end=4)}), ONE),
    "shape of 4000 digits": blob(head(TREE, **{"0": f32(10**4000, end=4)}), ONE),
    "empty but huge": blob(head(TREE, **{"0": f32(0, 2**62, 2**62, end=0)})),
    "empty but too long": blob(head(TREE, **{"0": f32(0, 2**62, end=0)})),
    "nine dimensions": blob(head(TREE, **{"0": f32(*[1] * 9, end=4)}), ONE),
    "bool offsets": blob(
        head(TREE, **{"0": {"dtype": "I8", "shape": [1], "data_offsets": [False, True]}}), b"\1"
    ),
    "hole before": blob(head(TREE, **{"0": f32(1, start=4, end=8)}), ONE * 2),
    "hole after": blob(head(TREE, **{"0": f32(1, end=4)}), ONE * 2),
    "data too short": blob(head(TREE, **{"0": f32(2, end=8)}), ONE),
    "overlap": blob(
        head('[{"$tensor":0},{"$tensor":1}]', **{"0": f32(1, end=4), "1": f32(1, end=4)}), ONE
    ),
    "bool of two": blob(
        head(TREE, **{"0": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}), b"\2"
    ),
    "data without tensors": blob(head("1"), b"x"),
    "plain safetensors": safetensors.torch.save({"0": torch.ones(1)}),
}


def test_a_message_made_by_hand_is_accepted() -> None:
    """So the hostile ones are refused for their one flaw."""
    assert decode(blob(head(TREE, **{"0": f32(1, end=4)}), ONE)) == torch.ones(1)
    assert decode(blob(head("[1,2]"))) == [1, 2]


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_messages_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


@pytest.mark.parametrize("data", [None, 1, "text", [1], memoryview(b"0123456789abcdef")[::2]])
def test_what_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(MessageError, match="contiguous bytes"):
        decode(data)


class Payload:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


def test_no_pickle_is_read() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(3)}, file)
    blobs = [file.getvalue(), *(pickle.dumps(Payload(), protocol=p) for p in range(6))]
    for data in [*blobs, *(blob(b) for b in blobs), *(blob(head("1"), b) for b in blobs)]:
        with pytest.raises(MessageError):
            decode(data)


def test_a_lie_about_the_shape_allocates_nothing() -> None:
    lies = [HOSTILE[name] for name in ("huge shape", "huge shape, small offsets", "empty but huge")]
    tracemalloc.start()
    for data in lies:
        with pytest.raises(MessageError):
            decode(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_torn_message_is_refused_at_every_byte() -> None:
    data = encode(EXAMPLE)
    for end in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:end])
    with pytest.raises(MessageError):
        decode(data + b"\0")


def accept_or_refuse(data: bytes) -> None:
    """Either a MessageError, or a tree whose one encoding is these bytes."""
    try:
        tree = decode(data)
    except MessageError:
        return
    assert encode(tree) == data


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    accept_or_refuse(data)
    accept_or_refuse(blob(data))
    accept_or_refuse(blob(head(data.decode("latin-1"))))


@settings(max_examples=100)
@given(trees, st.data())
def test_flipped_bits(tree: Any, draw: st.DataObject) -> None:
    data = bytearray(encode(tree))
    for _ in range(20):
        bit = draw.draw(st.integers(0, 8 * len(data) - 1))
        data[bit // 8] ^= 1 << bit % 8
        accept_or_refuse(bytes(data))


def test_every_flipped_bit_of_one_header() -> None:
    data = encode({"a": torch.tensor([True]), "b": 1})
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        accept_or_refuse(bytes(torn))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**65)
    | st.floats()
    | st.sampled_from(["F32", "BOOL", "0", "$tensor", "fedloom/1", "1", TREE, "[1]"]),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(
            st.sampled_from(["0", "1", "dtype", "shape", "data_offsets", "$tensor", "tree"]), x
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.data(), st.binary(max_size=8))
def test_rewritten_headers(draw: st.DataObject, data: bytes) -> None:
    """One field of a valid header, at any level, becomes any JSON value."""
    header: Any = head(TREE, **{"0": f32(1, end=4)})
    node = header
    while True:
        key = draw.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if not (isinstance(node[key], dict | list) and node[key] and draw.draw(st.booleans())):
            break
        node = node[key]
    node[key] = draw.draw(json_values)
    accept_or_refuse(blob(header, data))
    accept_or_refuse(blob(head(json.dumps(draw.draw(json_values), separators=(",", ":")))))


def test_a_large_hostile_header_is_refused_soon() -> None:
    start = time.thread_time()  # CPU seconds: a busy machine is no failure
    for unit in (b'"', b"\\", b"[", b"{", b'\\"', b"[]", b'{"a":', b"1,"):
        with pytest.raises(MessageError):
            decode(blob(unit * ((1 << 22) // len(unit))))
    assert time.thread_time() - start < 10  # measured: below 1; minutes if a scan were quadratic


# --- size, describe ---------------------------------------------------------------------------


def test_size_is_exact_when_only_numbers_change() -> None:
    for t in [0, -1, 10**6, 0.5, 1e-300, True, "a", 'quote"', "\n", "é", None, [], {}]:
        tree: dict[str, Any] = {"t": t, "x": torch.ones(3)}
        assert size(tree) == (12, len(encode(tree))), t
        assert size(tree) == (12, len(encode(tree))), t
    assert size(1) == (0, len(encode(1)))
    assert size(True) == (0, len(encode(True)))
    assert size({"x": torch.empty(5, 2, device="meta")}) == size({"x": torch.ones(5, 2)})


def test_size_distinguishes_similar_structures() -> None:
    similar: list[Any] = [
        [1, [2]],
        [[1], 2],
        {"a": [], "b": 1},
        {"a": {}, "b": 1},
        [True, 1],
        [1, True],
        [[], 1],
    ]
    similar += [["a", "b"], {"a": "b"}, [torch.ones(2, 3)], [torch.ones(2), torch.ones(3)]]
    for tree in similar * 2:
        assert size(tree).wire == len(encode(tree))


def test_a_structure_is_encoded_once_to_know_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {"logits": torch.ones(32, 10), "loss": 0.25, "t": 3}
    first = size(tree)
    monkeypatch.setattr(message, "_header", None)
    assert size({**tree, "loss": 0.75}) == first


def test_describe_names_what_crosses() -> None:
    assert describe({"logits": torch.ones(32, 10), "t": 3}) == "logits float32[32,10]; t int"
    assert describe(EXAMPLE) == (
        "logits float32[2,3]; t int; rest[0] bool; rest[1] none; rest[2] float; rest[3] str; "
        "rest[5][0] int8[2]"
    )
    assert describe(torch.ones(())) == "float32[]"
    assert describe({}) == "nothing"
    assert describe({"x": 1}) == describe({"x": 2}) != describe({"x": 1.0})


def test_describe_groups_long_messages_by_first_name() -> None:
    state = {f"conv{i}.{w}": torch.ones(4) for i in range(8) for w in ("weight", "bias")}
    text = describe({**state, "t": 1})
    assert text.startswith("conv0* 2 leaves 32 B; conv1* 2 leaves 32 B") and text.endswith("t int")
    assert describe({"w": [torch.ones(4)] * 20}) == "w* 20 leaves 320 B"
    assert describe([1] * 20) == "* 20 leaves 0 B"


def test_control_characters_of_strangers_stay_out_of_logs() -> None:
    assert describe({"a\n\x1b[31m": 1}) == "a\\n\\x1b[31m int"


# --- checks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_finite_finds_the_tensor(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    tree: dict[str, Any] = {
        "t": 1,
        "x": [tensor, torch.ones(2, dtype=torch.int64), "nan", None],
        "logits": tensor,
    }
    check_finite(tree)
    tree["logits"] = tensor.clone()
    tree["logits"][713] = value
    with pytest.raises(MessageError) as caught:
        check_finite(tree)
    assert str(caught.value) == "not finite at 'logits'"


def test_check_finite_is_not_fooled_by_sums() -> None:
    check_finite([torch.full((1000,), 3e38), torch.full((1000,), 6e4, dtype=torch.float16)])
    check_finite(torch.ones(3, requires_grad=True))
    check_finite(torch.empty(0))
    with pytest.raises(MessageError, match="not finite at the root"):
        check_finite(torch.tensor([math.inf, -math.inf]))
    with pytest.raises(MessageError, match=r"not finite at 'a\[1\]'"):
        check_finite({"a": [0.0, math.nan]})


TEMPLATE = {
    "x": torch.empty(2, 3, device="meta"),
    "y": floats(4, None),
    "n": [int, float, bool, str, None],
    "k": Shape("int64", None),
}


def fitting() -> dict[str, Any]:
    return {
        "x": torch.ones(2, 3),
        "y": torch.ones(4, 9),
        "n": (1, 1.0, True, "a", None),
        "k": torch.ones(0, dtype=torch.int64),
    }


def test_check_like_accepts_what_fits() -> None:
    check_like(fitting(), TEMPLATE)
    check_like(dict(reversed(fitting().items())), TEMPLATE)
    check_like(decode(encode(fitting())), TEMPLATE)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.ones(2, 4)}, r"'x': expected float32\[2,3\], got float32\[2,4\]"),
        ({"x": torch.ones(2, 3, 1)}, r"'x': .*got float32\[2,3,1\]"),
        ({"x": torch.ones(2, 3).double()}, r"'x': .*got float64\[2,3\]"),
        ({"x": 1.0}, r"'x': .*got float"),
        ({"y": torch.ones(3, 9)}, r"'y': expected float32\[4,\?\], got float32\[3,9\]"),
        ({"k": torch.ones(3)}, r"'k': expected int64\[\?\], got float32\[3\]"),
        ({"n": [1, 1.0, True, "a"]}, r"'n': expected a list of 5, got 4"),
        ({"n": 3}, r"'n': expected a list of 5, got int"),
        ({"n": [True, 1.0, True, "a", None]}, r"'n\[0\]': expected int, got bool"),
        ({"n": [1, 1, True, "a", None]}, r"'n\[1\]': expected float, got int"),
        ({"n": [1, 1.0, True, "a", 0]}, r"'n\[4\]': expected none, got int"),
        ({"z": 1}, r"the root: expected the keys 'x', 'y', 'n', 'k', got .*'z'"),
    ],
)
def test_check_like_names_the_difference(change: dict[str, Any], why: str) -> None:
    with pytest.raises(MessageError, match=why):
        check_like(fitting() | change, TEMPLATE)


def test_check_like_refuses_other_containers_and_bad_templates() -> None:
    with pytest.raises(MessageError, match="expected the keys 'a', got int"):
        check_like({"m": 3}, {"m": {"a": int}})
    with pytest.raises(MessageError, match="expected the keys none, got 'a'"):
        check_like({"a": 3}, {})
    with pytest.raises(MessageError, match="template"):
        check_like({"a": 3}, {"a": 3})
    with pytest.raises(MessageError, match="float33"):
        Shape("float33", 1)


def test_shapes_are_values() -> None:
    assert floats(2, None) == Shape("float32", 2, None) == Shape(torch.float32, 2, None)
    assert hash(floats(2)) == hash(floats(2)) and floats(2) != floats(3)


# --- trees ------------------------------------------------------------------------------------


def test_leaves_have_paths_in_order() -> None:
    tree: dict[str, Any] = {"a": [1, {"b": (2, [])}], "c.d": 3}
    assert list(leaves(tree)) == [("a[0]", 1), ("a[1].b[0]", 2), ("c.d", 3)]
    assert list(leaves(7)) == [("", 7)]


def test_map_tensors_keeps_the_rest() -> None:
    tree: dict[str, Any] = {"a": (torch.ones(2), 1), "b": "x"}
    assert same(map_tensors(lambda t: t * 2, tree), {"a": [torch.full((2,), 2.0), 1], "b": "x"})
    assert tree["a"][0].tolist() == [1, 1]


def test_weighted_mean_by_hand() -> None:
    a: dict[str, Any] = {
        "w": torch.tensor([1.0, 2.0]),
        "n": torch.tensor(3),
        "l": (torch.ones(1, dtype=torch.float64),),
    }
    b: dict[str, Any] = {
        "n": torch.tensor(7),
        "w": torch.tensor([5.0, -2.0]),
        "l": [torch.zeros(1, dtype=torch.float64)],
    }
    mean = weighted_mean([a, b], [1, 3])
    assert same(
        mean,
        {
            "w": torch.tensor([4.0, -1.0]),
            "n": torch.tensor(7),
            "l": [torch.tensor([0.25], dtype=torch.float64)],
        },
    )
    assert a["w"].tolist() == [1, 2] and b["n"].item() == 7


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.1, 1e3)), min_size=1, max_size=6))
def test_weighted_mean_is_the_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = np.array(pairs).T
    mean: Any = weighted_mean(
        [{"x": torch.tensor(v, dtype=torch.float64)} for v in values], list(weights)
    )
    assert mean["x"].item() == pytest.approx(np.average(values, weights=weights), abs=1e-9)


def test_weighted_mean_of_one_is_that_one() -> None:
    tree: dict[str, Any] = {
        "x": torch.randn(100, generator=torch.Generator().manual_seed(0)),
        "n": torch.tensor(2),
    }
    mean: Any = weighted_mean([tree], [7.3])
    assert same(mean, tree)
    mean["x"].zero_(), mean["n"].zero_()
    assert tree["x"].any() and tree["n"] == 2


def test_weighted_mean_adds_in_the_given_order_and_does_not_overflow() -> None:
    xs = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    expected = xs[0] * (1 / 3)
    for x in xs[1:]:
        expected = expected.add(x, alpha=1 / 3)
    mean: Any = weighted_mean(xs, [2, 2, 2])
    assert torch.equal(mean, expected)
    half = torch.full((1,), 6e4, dtype=torch.float16)
    assert weighted_mean([half, half], [1000, 1000]).item() == 6e4
    assert not weighted_mean([torch.ones(1, requires_grad=True)] * 2, [1, 1]).requires_grad


@pytest.mark.parametrize(
    ("trees", "weights", "why"),
    [
        ([], [], "one weight for each"),
        ([{"a": torch.ones(1)}], [1, 2], "one weight for each: 1 trees, 2 weights"),
        ([{"a": torch.ones(1)}] * 2, [0, 0], "not all 0"),
        ([{"a": torch.ones(1)}] * 2, [2, -1], "at least 0"),
        ([{"a": torch.ones(1)}], [math.nan], "finite"),
        ([{"a": torch.ones(1)}] * 2, [1e308, 1e308], "finite"),
        (
            [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}],
            [1, 1],
            "'a', 'b', got 'a'",
        ),
        ([{"a": {"b": torch.ones(1)}}, {"a": {"b": torch.ones(2)}}], [1, 1], r"'a\.b': expected"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(1).double()}], [1, 1], "got float64"),
        ([{"a": torch.ones(1, dtype=torch.bool)}], [1], r"'a': only float and integer.*bool\[1\]"),
        ([{"a": torch.ones(1, dtype=torch.complex64)}], [1], "complex64"),
        ([{"a": 1.0}], [1], "'a': only float and integer tensors"),
    ],
)
def test_weighted_mean_refuses(trees: Any, weights: list[float], why: str) -> None:
    with pytest.raises(MessageError, match=why):
        weighted_mean(trees, weights)


def test_an_empty_tensor_of_numpy_crosses_whatever_its_strides() -> None:
    for shape in ((0,), (3, 0), (0, 2)):
        there = decode(encode(torch.from_numpy(np.zeros(shape, dtype=np.int64))))
        assert (
            isinstance(there, torch.Tensor) and there.shape == shape and there.dtype == torch.int64
        )


@pytest.mark.parametrize("piece", [b"[],", b'"",', b"0,", b"{},"])
def test_a_header_of_millions_of_values_is_refused_before_it_is_parsed(
    piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a hundred bytes of memory once parsed, at the top or in the text of the tree."""
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    junk = b"[" + piece * 5_000_000 + b"0]"
    for header in (junk, b'{"__metadata__":' + junk + b"}"):
        with pytest.raises(MessageError, match="than its leaves can have"):
            decode(len(header).to_bytes(8, "little") + header)
