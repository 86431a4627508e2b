"""Bytes and seconds of a secure sum: python -m benchmarks.secure_sums

All parties in one process, with signatures by P-256 keys as at nodes; seconds are CPU seconds of
one thread.
"""

import sys
from time import process_time

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from fedloom.protect.masks import SumMember, unmasked

SUM = b"benchmark"


class Clock:
    """CPU seconds by who spends them."""

    def __init__(self) -> None:
        self.spent = {"client": 0.0, "coordinator": 0.0}

    def __call__(self, who: str, work):
        before = process_time()
        result = work()
        self.spent[who] += process_time() - before
        return result


def measure(n: int, d: int, lost: int) -> str:
    """One sum of n clients of d numbers, of whom some are lost after they shared their secrets."""
    names = [f"node-{k:03}" for k in range(n)]
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in names}

    def verify(name: str, text: bytes, signature: bytes) -> bool:
        try:
            keys[name].public_key().verify(signature, text, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    def member(name: str) -> SumMember:
        return SumMember(name, SUM, lambda text: keys[name].sign(text, ec.ECDSA(SHA256())), verify)

    clock, up, down = Clock(), 0, 0
    members = {name: member(name) for name in names}
    listed = {name: clock("client", members[name].keys) for name in names}
    size = sum(64 + len(k.signature) for k in listed.values())
    up, down = size, n * size
    sealed = {
        name: clock("client", lambda name=name: members[name].shares(listed)) for name in names
    }
    boxes = sum(len(box) for each in sealed.values() for box in each.values())
    up, down = up + boxes, down + boxes
    x = {
        name: np.random.default_rng(k).integers(0, 2**64, d, np.uint64)
        for k, name in enumerate(names)
    }
    masked = {}
    for name in names[lost:]:
        mine = {other: each[name] for other, each in sealed.items() if other != name}
        masked[name] = clock(
            "client", lambda name=name, mine=mine: members[name].mask(x[name], bytes(32), mine)
        )
    up += sum(y.nbytes for y in masked.values())
    signatures = {
        name: clock("client", lambda name=name: members[name].agree(masked)) for name in masked
    }
    size = sum(map(len, signatures.values()))
    up, down = up + size, down + len(masked) * size
    opened = {
        name: clock("client", lambda name=name: members[name].open(signatures)) for name in masked
    }
    up += sum(len(share) for each in opened.values() for share in each.values())
    total = clock("coordinator", lambda: unmasked(listed, sealed, masked, opened, SUM, bytes(32)))
    assert np.array_equal(total, np.sum([x[name] for name in masked], axis=0, dtype=np.uint64))
    mine, all_of_them = clock.spent["client"] / n, clock.spent["coordinator"]
    besides = (up - 8 * d * len(masked)) / n / 1000
    return (
        f"| {n} | {d:,} | {lost} | {8 * d / 1e6:.2f} MB | {besides:.1f} kB | "
        f"{down / n / 1000:.1f} kB | {mine:.2f} | {all_of_them:.2f} |"
    )


if __name__ == "__main__":
    for case in (
        (10, 100_000, 0),
        (10, 100_000, 3),
        (10, 1_000_000, 0),
        (100, 100_000, 0),
        (100, 100_000, 10),
    ):
        sys.stdout.write(measure(*case) + "\n")
        sys.stdout.flush()
