"""Messages: trees of named tensors and plain numbers, with one safe encoding.

A message is one safetensors blob. Its tensors are named "0", "1", … in tree order. Its metadata
holds the format's name
and, as JSON, the skeleton: the tree with `{"$tensor": 0}` in place of tensor 0. It cannot contain
code. A tree has exactly one encoding, and `decode` accepts no other: a decoded tree encodes to the
same bytes.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fedloom.core._trees import (
    DTYPES,
    Leaf,
    Shape,
    Template,
    Tree,
    check_finite,
    check_like,
    digest,
    floats,
    join,
    kind,
    leaves,
    map_tensors,
    refuse,
    weighted_mean,
    zip_tensors,
)
from fedloom.core.errors import MessageError

__all__ = [
    "Leaf",
    "Limits",
    "Shape",
    "Size",
    "Template",
    "Tree",
    "check",
    "check_finite",
    "check_like",
    "decode",
    "describe",
    "digest",
    "encode",
    "floats",
    "leaves",
    "map_tensors",
    "measured",
    "size",
    "weighted_mean",
    "zip_tensors",
]

FORMAT: Final = "fedloom/1"
MAX_HEADER: Final = 1 << 24  # bytes
MAX_TEXT: Final = 1 << 16  # bytes of one str leaf in UTF-8
# values, or quotes, of a header for each leaf: its name, dtype, shape and offsets
_PER_LEAF: Final = 16
_ENTRIES: Final = 512  # headers and structures in each cache
# bytes; longer headers are not cached, so that no sender can fill the memory
_REMEMBER: Final = 1 << 16

_NAMES: Final = ("F32", "F64", "F16", "BF16", "I8", "U8", "I16", "I32", "I64", "BOOL")
_CODES: Final = dict(zip(DTYPES, _NAMES, strict=True))
_DTYPES: Final = dict(zip(_NAMES, DTYPES, strict=True))
_dumps: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


@dataclass(frozen=True)
class Limits:
    """Limits on the messages that a party sends and receives.

    `max_depth` counts nested containers, `max_leaves` leaves and empty containers, `max_name` the
    characters of a key.

    Example:
        >>> check({"weights": torch.zeros(8)}, Limits(max_ndim=1))
    """

    max_bytes: int = 1 << 30
    max_depth: int = 16
    max_leaves: int = 100_000
    max_name: int = 256
    max_ndim: int = 8
    dtypes: tuple[torch.dtype, ...] = DTYPES


DEFAULT: Final = Limits()
_ANY: Final = Limits(
    max_bytes=1 << 62, max_depth=1 << 30, max_leaves=1 << 62, max_name=1 << 62, max_ndim=1 << 30
)


class Size(NamedTuple):
    """Bytes of tensor data, and bytes of the whole encoded message.

    Example:
        >>> size({"logits": torch.zeros(32, 10)}).payload
        1280
    """

    payload: int
    wire: int


@dataclass(frozen=True, slots=True)
class _Spec:
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# --- encode -----------------------------------------------------------------------------------


def encode(tree: Tree, limits: Limits = DEFAULT) -> bytes:
    """The bytes of a tree, which are always the same for the same tree. Tensors may be on any
    device. Raises MessageError if `check` refuses the tree, or its message exceeds
    `limits.max_bytes`.

    Example:
        >>> blob = encode({"t": 3, "logits": torch.ones(2)})
        >>> decode(blob)
        {'t': 3, 'logits': tensor([1., 1.])}
    """
    walk = _Walk(limits)
    header, payload = _header(walk.text(tree), walk.specs)
    wire = 8 + len(header) + payload
    if wire > limits.max_bytes:
        raise MessageError(f"a message may have at most {limits.max_bytes} bytes, not {wire}")
    parts: list[Any] = [len(header).to_bytes(8, "little"), header]
    parts += [_raw(walk.tensors[i]) for i in _order(walk.specs)]
    return b"".join(parts)


def check(tree: Tree, limits: Limits = DEFAULT) -> None:
    """Raise MessageError, with the path of the first problem, unless this tree may be sent.

    Example:
        >>> check({"rows": {1, 2}})  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        MessageError: at 'rows': a message holds tensors, …
    """
    _Walk(limits).strip(tree, "", 0)


class _Walk:
    """One pass over a tree: checks each node, collects the tensors, returns the skeleton."""

    def __init__(self, limits: Limits, *, meta: bool = False) -> None:
        self.limits = limits
        self.meta = meta  # whether tensors need no data
        self.specs: list[_Spec] = []
        self.tensors: list[Tensor] = []
        self.leaves = 0

    def text(self, tree: Any) -> str:
        return _dumps(self.strip(tree, "", 0))

    def strip(self, node: Any, path: str, depth: int) -> Any:
        if isinstance(node, dict | list | tuple) and node:
            if depth >= self.limits.max_depth:
                refuse(path, f"a message may nest at most {depth} containers")
            if not isinstance(node, dict):
                return [self.strip(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(node)]
            for key in node:
                self.key(key, path)
            return {k: self.strip(x, join(path, k), depth + 1) for k, x in node.items()}
        self.leaves += 1
        if self.leaves > self.limits.max_leaves:
            refuse(path, f"a message may have at most {self.limits.max_leaves} leaves")
        if isinstance(node, Tensor | _Spec):
            return self.tensor(node, path)
        if not isinstance(node, dict | list | tuple):
            _check_plain(node, path)
        return node

    def key(self, key: Any, path: str) -> None:
        if not isinstance(key, str):
            refuse(path, f"keys are str, not {kind(key)}")
        if len(key) > self.limits.max_name or key.startswith("$") or _utf8(key) is None:
            refuse(
                path,
                f"a key must be valid Unicode of at most {self.limits.max_name} characters that "
                f"does not start with '$', not {key[:40]!a}",
            )

    def tensor(self, node: Tensor | _Spec, path: str) -> dict[str, int]:
        if isinstance(node, Tensor):
            if (
                node.layout != torch.strided
                or node.is_quantized
                or node.is_nested
                or (node.is_meta and not self.meta)
            ):
                refuse(path, "a tensor must be dense and hold data: not sparse, quantized or meta")
            self.tensors.append(node)
            node = _Spec(node.dtype, tuple(node.shape))
        if node.dtype not in self.limits.dtypes or node.dtype not in _CODES:
            refuse(path, f"a message may not hold {node.dtype}; convert the tensor")
        if len(node.shape) > self.limits.max_ndim:
            refuse(
                path,
                f"a tensor may have at most {self.limits.max_ndim} dimensions, not "
                f"{len(node.shape)}",
            )
        # Also refuses empty tensors with lengths whose strides overflow.
        if math.prod(d or 1 for d in node.shape) * node.dtype.itemsize >= 1 << 63:
            refuse(path, "a tensor must have less than 2**63 bytes")
        self.specs.append(node)
        return {"$tensor": len(self.specs) - 1}


def _check_plain(leaf: Any, path: str) -> None:
    exact = type(leaf)
    if exact is int and not -(1 << 63) <= leaf < 1 << 63:
        refuse(path, "an int must fit in 64 bits with its sign")
    if exact is float and not math.isfinite(leaf):
        refuse(path, f"a float must be finite, not {leaf}; send it in a tensor")
    if exact is str and ((length := _utf8(leaf)) is None or length > MAX_TEXT):
        refuse(path, f"a str must be valid Unicode of at most {MAX_TEXT} bytes")
    if leaf is not None and exact not in (bool, int, float, str):
        refuse(
            path,
            "a message holds tensors, bool, int, float, str, None, list, tuple and dict, not "
            f"{exact.__module__}.{exact.__qualname__}; convert it (.item(), torch.as_tensor)",
        )


def _utf8(text: str) -> int | None:
    """The length of the text in UTF-8, in bytes; None if it has an unpaired surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _header(text: str, specs: Sequence[_Spec]) -> tuple[bytes, int]:
    """The header of a skeleton and its tensors, and the number of bytes of tensor data."""
    offsets, total = _offsets(specs)
    fields: dict[str, Any] = {"__metadata__": {"format": FORMAT, "tree": text}}
    for i, (spec, start) in enumerate(zip(specs, offsets, strict=True)):
        fields[str(i)] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (start, start + spec.nbytes),
        }
    header = _dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise MessageError(
            f"a header may have at most {MAX_HEADER} bytes, not {len(header)}; send fewer leaves"
        )
    return header, total


def _order(specs: Sequence[_Spec]) -> list[int]:
    """Tensors by decreasing item size, then in tree order, so that each is aligned and the data has
    no gaps.
    """
    return sorted(range(len(specs)), key=lambda i: -specs[i].dtype.itemsize)


def _offsets(specs: Sequence[_Spec]) -> tuple[list[int], int]:
    """The start of each tensor, and the end of the last one."""
    offsets, total = [0] * len(specs), 0
    for i in _order(specs):
        offsets[i] = total
        total += specs[i].nbytes
    return offsets, total


def _raw(tensor: Tensor) -> Any:
    """The tensor's bytes, copied only if they are not contiguous on the CPU."""
    if not tensor.numel():  # strides may be 0, which view refuses
        return b""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy()


# --- decode -----------------------------------------------------------------------------------


def decode(data: bytes | bytearray | memoryview, limits: Limits = DEFAULT) -> Tree:
    """The tree of an encoded message; tuples come back as lists.

    The tensors are writable, on the CPU, and share one private copy of the data. They may hold NaN:
    see `check_finite`. Memory grows with the bytes received, not with the sizes that they declare.

    Raises:
        MessageError: the bytes are not a valid message. No other exception is raised.

    Example:
        >>> decode(encode([1, None, "text"]))
        [1, None, 'text']
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise MessageError(f"a message must be contiguous bytes: {error}") from None
    if not 8 <= len(view) <= limits.max_bytes:
        raise MessageError(f"a message must have 8 to {limits.max_bytes} bytes, not {len(view)}")
    length = int.from_bytes(view[:8], "little")
    if length > min(MAX_HEADER, len(view) - 8):
        raise MessageError(
            "the message is truncated or not fedloom's: its first 8 bytes announce a header of "
            f"{length} bytes"
        )
    read = _plan if length <= _REMEMBER else _plan.__wrapped__
    plan = read(bytes(view[8 : 8 + length]), limits)
    body = bytearray(view[8 + length :])
    if len(body) != plan.total:
        raise MessageError(
            f"the header announces {plan.total} bytes of tensors, but the message has {len(body)}"
        )
    tensors = [_tensor(body, spec, at) for spec, at in zip(plan.specs, plan.offsets, strict=True)]
    tree: Tree = _fill(plan.skeleton, tensors)
    return tree


class _Plan(NamedTuple):
    """The content of a validated header."""

    skeleton: Any
    specs: list[_Spec]
    offsets: list[int]
    total: int


@lru_cache(maxsize=_ENTRIES)
def _plan(header: bytes, limits: Limits) -> _Plan:
    fields = _parse(header, 3, limits)
    meta = fields.pop("__metadata__", None) if isinstance(fields, dict) else None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise MessageError(f"the header must name the format {FORMAT!r}")
    if not isinstance(meta.get("tree"), str):
        raise MessageError("the header must hold the tree as text")
    if len(fields) > limits.max_leaves:
        raise MessageError(f"a message may have {limits.max_leaves} leaves, not {len(fields)}")
    specs = [_read_spec(str(i), fields.get(str(i))) for i in range(len(fields))]
    skeleton = _parse(meta["tree"].encode(errors="replace"), limits.max_depth + 1, limits)
    # Encoding the tree again must give the same header. This checks every offset, number, NaN,
    # reference, repeated key and space.
    walk = _Walk(limits)
    if _header(walk.text(_fill(skeleton, specs)), walk.specs)[0] != header:
        raise MessageError(
            "the header must be exactly as encode writes it: names, order, offsets, spaces"
        )
    return _Plan(skeleton, specs, *_offsets(specs))


def _parse(raw: bytes, depth: int, limits: Limits) -> Any:
    """Parse JSON after bounding its values and its nesting by `2 * depth`, so that the parser
    cannot overflow.
    """
    most = _PER_LEAF * limits.max_leaves + 1000
    if raw.count(b'"') > most:
        raise MessageError("the header has more names and texts than its leaves can have")
    try:
        text = raw.decode()
        outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
        values = "".join(outside)
        if values.count(",") + values.count("[") + values.count("{") > most:
            raise MessageError("the header has more values than its leaves can have")
        brackets = re.sub(r"[^][{}]+", "", values)
        for _ in range(depth):  # each pass removes the innermost level, or two
            brackets = brackets.replace("[]", "").replace("{}", "")
        if brackets:
            raise MessageError("the header is nested too deeply, or its brackets do not match")
        return json.loads(text)
    except ValueError as error:
        raise MessageError(f"the header must be JSON in UTF-8: {error}") from None


def _read_spec(name: str, entry: Any) -> _Spec:
    if not isinstance(entry, dict):
        raise MessageError(f"the header must describe tensor {name} by a JSON object")
    code, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(code, str) or code not in _DTYPES:
        raise MessageError(f"the dtype of tensor {name} must be one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or any(type(d) is not int or d < 0 for d in shape):
        raise MessageError(f"the shape of tensor {name} must be a list of non-negative integers")
    return _Spec(_DTYPES[code], tuple(shape))


def _fill(node: Any, tensors: Sequence[Any]) -> Any:
    """The skeleton with its tensors in place."""
    if isinstance(node, list):
        return [_fill(child, tensors) for child in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" not in node:
        return {key: _fill(child, tensors) for key, child in node.items()}
    index = node["$tensor"]
    if type(index) is not int or not 0 <= index < len(tensors):
        raise MessageError(f"the tree refers to a tensor outside 0 to {len(tensors) - 1}")
    return tensors[index]


def _tensor(body: bytearray, spec: _Spec, start: int) -> Tensor:
    count = math.prod(spec.shape)
    if count == 0:  # torch.frombuffer refuses it
        return torch.empty(spec.shape, dtype=spec.dtype)
    if spec.dtype == torch.bool and body[start : start + count].translate(None, b"\0\1"):
        raise MessageError("a bool must be the byte 0 or 1")
    flat = torch.frombuffer(body, dtype=spec.dtype, count=count, offset=start)
    return flat.view(spec.shape)


# --- size, describe ---------------------------------------------------------------------------


class _Facts(NamedTuple):
    payload: int
    fixed: int  # bytes of the header without its ints, floats and padding
    summary: str


_known: dict[tuple[Any, ...], _Facts] = {}


def measured(tree: Tree) -> tuple[str, Size]:
    """What `describe` and `size` say of a tree, in one pass.

    Example:
        >>> what, length = measured({"t": 3})
        >>> what, length.payload
        ('t int', 0)
    """
    key: list[Any] = []
    digits = _key(tree, key)
    facts = _facts(tree, key, digits)
    header = facts.fixed + digits
    return facts.summary, Size(facts.payload, 8 + header + -header % 8 + facts.payload)


def size(tree: Tree) -> Size:
    """The exact sizes in bytes of a tree that passes `check`, without encoding it; also of a tree
    of meta tensors.

    Example:
        >>> size({"w": torch.zeros(3, 4)}) == size({"w": torch.zeros(3, 4, device="meta")})
        True
    """
    return measured(tree)[1]


def describe(tree: Tree) -> str:
    """The leaves by name, such as "logits float32[32,10]; t int".

    Above 12 leaves, those with the same first name form one entry: "layer1* 6 leaves 73728 B".

    Example:
        >>> describe({"logits": torch.zeros(32, 10), "t": 3})
        'logits float32[32,10]; t int'
    """
    return measured(tree)[0]


def _key(node: Any, key: list[Any]) -> int:
    """Append everything that determines the summary and the header, with types in place of ints and
    floats.

    Returns the length of these ints and floats as text.
    """
    if isinstance(node, Tensor):
        key += (node.dtype, node.shape)
        return 0
    if isinstance(node, dict):
        key += (dict, len(node))
        digits = 0
        for name, child in node.items():
            key.append(name)
            digits += _key(child, key)
        return digits
    if isinstance(node, list | tuple):
        key += (list, len(node))
        return sum([_key(child, key) for child in node])
    exact = type(node)
    if exact is int or exact is float:
        key.append(exact)
        return len(repr(node))
    _check_plain(node, "")
    key.append(node)
    return 0


def _facts(tree: Tree, key: list[Any], digits: int) -> _Facts:
    structure = tuple(key)
    facts = _known.get(structure)
    if facts is None:
        walk = _Walk(_ANY, meta=True)
        header, payload = _header(walk.text(tree), walk.specs)
        facts = _Facts(payload, len(header.rstrip(b" ")) - digits, _summary(tree))
        if len(header) <= _REMEMBER:
            if len(_known) >= _ENTRIES:
                _known.clear()
            _known[structure] = facts
    return facts


def _summary(tree: Tree) -> str:
    every = list(leaves(tree))
    groups: dict[str, dict[str, Leaf]] = {}
    for path, leaf in every:
        name = path if len(every) <= 12 else re.split(r"[.[]", path, maxsplit=1)[0]
        groups.setdefault(name, {})[path] = leaf
    entries = []
    for name, group in groups.items():
        data = sum(leaf.nbytes for leaf in group.values() if isinstance(leaf, Tensor))
        alone = "".join(f"{path} {kind(leaf)}".strip() for path, leaf in group.items())
        entries.append(alone if len(group) == 1 else f"{name}* {len(group)} leaves {data} B")
    return "; ".join(entries) or "nothing"
