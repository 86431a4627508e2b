"""Malformed messages for the decoder: `python -m benchmarks.fuzz [MESSAGES] [SEED]`.

Each message is a valid one that was changed, or a header made to cost time and memory: many values,
names or brackets, deep nests, long texts, false sizes. One in 100 such headers has up to 16 MiB.
Whatever arrives must be decoded and encode to the same bytes, or raise MessageError. The table has
CPU seconds, and the last line the growth of the largest memory of the process.
"""

import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from fedloom.core import message
from fedloom.core.errors import MessageError

Bytes = bytes | bytearray


def valid(chance: random.Random) -> bytes:
    """A message as methods send it: tensors, names, numbers, nested."""
    tree: dict[str, Any] = {"round": chance.randrange(1000), "name": "x" * chance.randrange(40)}
    for k in range(chance.randrange(1, 6)):
        dtype = chance.choice(
            (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
        )
        shape = [chance.randrange(4) for _ in range(chance.randrange(3))]
        tree[f"layer{k}"] = {
            "weight": torch.zeros(shape, dtype=dtype),
            "also": [k, None, 0.5, True],
        }
    return message.encode(tree)


def framed(header: Bytes, body: Bytes = b"", lie: int = 0) -> bytes:
    """A message of this header, whose announced size is wrong by `lie`."""
    return max(0, len(header) + lie).to_bytes(8, "little") + header + body


def flipped(chance: random.Random, size: int) -> bytes:
    """A valid message with changed bytes."""
    data = bytearray(valid(chance))
    for _ in range(chance.randrange(1, 5)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def spliced(chance: random.Random, size: int) -> bytes:
    """Pieces of two valid messages."""
    a, b = valid(chance), valid(chance)
    return a[: chance.randrange(len(a))] + b[chance.randrange(len(b)) :]


def reworded(chance: random.Random, size: int) -> bytes:
    """A valid message with another number, bracket or quote in its header."""
    data = valid(chance)
    end = 8 + int.from_bytes(data[:8], "little")
    header = bytearray(data[8:end])
    at = chance.randrange(len(header))
    with_ = chance.choice(
        (
            b"9" * 30,
            b"-1",
            b"[",
            b"]",
            b"{",
            b"}",
            b'"',
            b"\\u0000",
            b"null",
            b"1e999",
            b"NaN",
            b"\xff",
        )
    )
    header[at : at + chance.randrange(3)] = with_
    return framed(header, data[end:])


def brackets(chance: random.Random, size: int) -> bytes:
    """A header of many or deep containers, closed or not."""
    unit = chance.choice((b"[],", b"{},", b"[[]],", b"[", b'{"a":', b"]", b"[{},", b'{"a":[],'))
    return framed(b'{"a":[' + unit * (size // len(unit)) + chance.choice((b"]}", b"0]}", b"")))


def values(chance: random.Random, size: int) -> bytes:
    """A header of many numbers, names or texts."""
    unit = chance.choice((b"0,", b"1e9,", b'"",', b'"a":0,', b'"\\"",', b"null,", b"-0.0,"))
    return framed(b'{"a":[' + unit * (size // len(unit)) + b"0]}")


def texts(chance: random.Random, size: int) -> bytes:
    """A header of one long text or number, or one of backslashes and quotes."""
    unit = chance.choice(
        (b"a", b"\\\\", b'\\"', b"9", b"\\u00e4", "ä".encode(), b" ", b"[", b"\x00")
    )
    quote = b"" if unit in (b"9", b" ") else b'"'
    return framed(
        b'{"a":' + quote + unit * (size // len(unit)) + quote + b"}",
        lie=chance.choice((0, 0, 1, -1)),
    )


def trees(chance: random.Random, size: int) -> bytes:
    """A right header around a large tree: hostile JSON inside a text of JSON."""
    unit = chance.choice(("[],", "0,", '"a",', "[", '{"$tensor":0},', "1.5,"))
    tree = "[" + unit * (size // (2 * len(unit))) + chance.choice(("0]", "]", ""))
    return framed(
        json.dumps(
            {"__metadata__": {"format": message.FORMAT, "tree": tree}}, separators=(",", ":")
        ).encode()
    )


def tensors(chance: random.Random, size: int) -> bytes:
    """A header of many tensors, or of few that claim to be huge."""
    shape = [chance.choice((0, 1, 2**31, 2**62, 10**30)) for _ in range(chance.randrange(40))]
    entry = {
        "dtype": chance.choice(("F32", "BOOL", "F128", 3)),
        "shape": shape,
        "data_offsets": [0, chance.randrange(99)],
    }
    fields = {str(k): entry for k in range(max(1, size // (60 + 20 * len(shape))))}
    head = {"__metadata__": {"format": message.FORMAT, "tree": '{"$tensor":0}'}, **fields}
    return framed(json.dumps(head, separators=(",", ":")).encode(), bytes(chance.randrange(99)))


SMALL: tuple[Callable[[random.Random, int], bytes], ...] = (flipped, spliced, reworded)
LARGE: tuple[Callable[[random.Random, int], bytes], ...] = (brackets, values, texts, trees, tensors)


def header_bytes(chance: random.Random, largest: int) -> int:
    """Below 4 KiB; one in 100 up to `largest`, with sizes of each order equally likely."""
    return (
        int(4096 * (largest / 4096) ** chance.random())
        if chance.random() < 0.01
        else chance.randrange(8, 4096)
    )


def main(count: int, seed: int, largest: int = message.MAX_HEADER) -> None:
    """Print the table; any other outcome than the two is an error."""
    chance = random.Random(seed)
    kinds: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    slowest: dict[str, tuple[float, int]] = {}
    biggest: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        kind = chance.choice(SMALL + LARGE)
        data = kind(chance, header_bytes(chance, largest))
        name = kind.__name__
        start = time.process_time()
        try:
            tree = message.decode(data)
        except MessageError:
            tree = None
            good = False
        else:
            good = True
        took = time.process_time() - start
        if good:
            assert message.encode(tree) == data
        kinds[name] += 1
        accepted[name] += good
        seconds[name] = seconds.get(name, 0.0) + took
        biggest[name] = max(biggest[name], len(data))
        slowest[name] = max(slowest.get(name, (0.0, 0)), (took, len(data)))
    print("| messages | number | accepted | largest, bytes | mean, µs | slowest, s | its bytes |")
    print("|---|---|---|---|---|---|---|")
    for name in kinds:
        took, size = slowest[name]
        print(
            f"| {name} | {kinds[name]:,} | {accepted[name]:,} | {biggest[name]:,} "
            f"| {1e6 * seconds[name] / kinds[name]:.0f} | {took:.3f} | {size:,} |"
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{kinds.total():,} messages, no other exception; memory grew by at most "
        f"{grown / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [1_000_000, 0][len(given) :]))
